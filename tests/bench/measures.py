"""The measurements: each function prepares a subject, and returns a function that measures one round of some seconds.

A round returns the cost of one operation, in the unit of the row; less is better.  CPU is the time of all threads of
the measured process.  The wall clock depends more on the other programs of the machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

import attrs

from tests.bench import http_load
from tests.bench.messages import TEXT, Template, call, encoded, request, with_tasks
from tests.bench.stdio_load import Pipes, Spent, started_server
from tests.bench.subjects import (
    client_command,
    replica_command,
    running,
    server_command,
    tasks_command,
    workers_command,
)
from tests.bench.works import WORKS
from tests.redis_server import started_redis

__all__ = ["Figure", "Measure", "Pace", "Prepare"]

MOST = 20_000  # calls of one round
WARM = 300
KEEP_ALIVE = 15.0  # seconds between two comments on a stream


@attrs.frozen
class Figure:
    cost: float
    busy: float | None = None
    """How busy the load was, from 0 to 1: a load that is too busy measures itself."""


Measure = Callable[[float], Figure]
Prepare = Callable[[ExitStack, str], Measure]


class Pace:
    """The number of calls that fill the seconds of a round."""

    def __init__(self, least: int) -> None:
        self._least = self._rate = float(least)

    def calls(self, seconds: float) -> int:
        return int(min(max(self._least, self._rate * seconds), MOST))

    def seen(self, calls: int, spent: Spent) -> None:
        self._rate = calls / spent.wall


# By stdio.


def _checked(output: bytes, calls: int, sign: bytes) -> None:
    assert output.count(sign) == calls, output[-500:]
    assert b'"isError":true' not in output, output[-500:]


def stdio_calls(era: str, in_flight: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for an echo, in µs."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio"), era))
    return _stdio_requests(pipes, call(era), TEXT.encode(), in_flight)


def stdio_works(work: str, era: str, in_flight: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for a request of `works.py`, in µs."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio", works=True), era))
    asked = WORKS[work]
    return _stdio_requests(pipes, request(era, asked.method, asked.params), asked.sign, in_flight)


def _stdio_requests(pipes: Pipes, message: Any, sign: bytes, in_flight: int) -> Measure:
    """CPU of the server for this message, in µs.  The answer must have this sign."""
    template, pace = Template(encoded(message) + b"\n"), Pace(max(WARM, in_flight))

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        lines = [template.take() for _ in range(number)]
        spent, output = pipes.calls(lines, in_flight)
        _checked(output, number, sign)
        pace.seen(number, spent)
        return Figure(spent.cpu / number * 1e6, spent.busy)

    measure(0)
    return measure


def stdio_tasks(store: str, in_flight: int, stack: ExitStack, subject: str) -> Measure:
    """The time until a task is created, has run and its result is fetched, in ms."""
    if store == "redis":
        store = stack.enter_context(started_redis()).url
    pipes, ids = stack.enter_context(started_server(tasks_command(subject, store), "modern")), count(2_000_000)
    create, pace = Template(encoded(with_tasks(call("modern"))) + b"\n", ids), Pace(WARM)

    def fetch(task: str) -> bytes:
        return Template(encoded(with_tasks(request("modern", "tasks/get", {"taskId": task}))) + b"\n", ids).take()

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        spent, output = pipes.calls([create.take() for _ in range(number)], in_flight)
        left = [json.loads(line)["result"]["taskId"] for line in output.splitlines()]
        every = [spent]
        while left:
            spent, output = pipes.calls([fetch(task) for task in left], in_flight)
            every.append(spent)
            states = [json.loads(line)["result"] for line in output.splitlines()]
            left = [each["taskId"] for each in states if each["status"] != "completed"]
            assert all("result" in each for each in states if each["status"] == "completed"), output[-500:]
        wall = sum(each.wall for each in every)
        pace.seen(number, attrs.evolve(spent, wall=wall))
        return Figure(wall / number * 1e3, sum(each.busy * each.wall for each in every) / wall)

    measure(0)
    return measure


def stdio_latency(era: str, stack: ExitStack, subject: str) -> Measure:
    """The median of the µs until an echo has returned, with one call at a time."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio"), era))
    template, pace = Template(encoded(call(era)) + b"\n"), Pace(WARM)

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        spent, each = pipes.latencies([template.take() for _ in range(number)])
        pace.seen(number, spent)
        return Figure(statistics.median(each) * 1e6, spent.busy)

    measure(0)
    return measure


def stdio_reports(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for each of so many reports of progress by one call, in µs."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio"), era))
    template = Template(encoded(call(era, "report", {"number": number}, reports=True)) + b"\n")

    def measure(seconds: float) -> Figure:
        spent, output = pipes.reported(template.take())
        _checked(output, number, b"notifications/progress")
        return Figure(spent.cpu / number * 1e6, spent.busy)

    measure(0)
    return measure


def stdio_list(era: str, tools: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for the list of so many tools, with all its pages, in µs."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio", tools=tools), era))
    pages, listed, params, ids = [], 0, {}, count(2_000_000)
    while True:
        pages.append(Template(encoded(request(era, "tools/list", params)) + b"\n", ids))
        (answer,) = pipes.ask([pages[-1].take()[:-1]])
        listed += len(answer["result"]["tools"])
        if "nextCursor" not in answer["result"]:
            break
        params = {"cursor": answer["result"]["nextCursor"]}
    assert listed == tools, listed

    def measure(seconds: float) -> Figure:
        lists = max(20, int(seconds * 200))
        lines = [page.take() for _ in range(lists) for page in pages]
        spent, output = pipes.calls(lines, 4)
        _checked(output, len(lines), b'"tools":')
        return Figure(spent.cpu / lists * 1e6, spent.busy)

    measure(0)
    return measure


def stdio_waits(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """Milliseconds by the clock until so many calls of 50 ms, made at once, are answered."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio"), era))
    template = Template(encoded(call(era, "wait", {"seconds": 0.05})) + b"\n")

    def measure(seconds: float) -> Figure:
        spent, output = pipes.calls([template.take() for _ in range(number)], number)
        _checked(output, number, b"waited")
        return Figure(spent.wall * 1e3, spent.busy)

    measure(0)
    return measure


def stdio_large(era: str, megabytes: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server to echo a text of so many MB, in ms for each MB."""
    pipes = stack.enter_context(started_server(server_command(subject, "stdio"), era))
    text = (TEXT + "\n") * (megabytes * 1_000_000 // (len(TEXT) + 1))
    template = Template(encoded(call(era, "echo", {"text": text})) + b"\n")

    def measure(seconds: float) -> Figure:
        lines = [template.take() for _ in range(5)]
        spent, output = pipes.calls(lines, 1)
        assert len(output) > len(lines) * len(text), len(output)
        return Figure(spent.cpu / len(lines) / megabytes * 1e3, spent.busy)

    measure(0)
    return measure


# The process.


def start(stack: ExitStack, subject: str) -> Measure:
    """CPU of a stdio server until its first call is answered, in ms."""

    def measure(seconds: float) -> Figure:
        with started_server(server_command(subject, "stdio"), "session") as pipes:
            return Figure(pipes.usage.cpu() * 1e3)

    measure(0)  # writes the bytecode
    return measure


def resident(stack: ExitStack, subject: str) -> Measure:
    """MB of memory of a stdio server that has answered one call."""

    def measure(seconds: float) -> Figure:
        with started_server(server_command(subject, "stdio"), "session") as pipes:
            return Figure(pipes.usage.resident() * 1024 / 1e6)

    return measure


def growth(number: int, stack: ExitStack, subject: str) -> Measure:
    """MB by which this memory grows over so many calls, after a first thousand."""
    template = Template(encoded(call("session")) + b"\n")

    def many(pipes: Pipes, number: int) -> None:
        for _ in range(number // 1000):
            pipes.calls([template.take() for _ in range(1000)], 64)

    def measure(seconds: float) -> Figure:
        with started_server(server_command(subject, "stdio"), "session") as pipes:
            many(pipes, 1000)
            before = pipes.usage.resident()
            many(pipes, number)
            return Figure((pipes.usage.resident() - before) * 1024 / 1e6)

    return measure


# By HTTP.


def _accept(subject: str, style: str) -> str:
    """The Accept header of a client that wants this style.  For other servers the style is a setting, and they refuse
    clients that do not accept both; our server lets the client choose."""
    return http_load.STREAM if style == "sse" and subject.startswith(("ours", "before")) else http_load.EITHER


def http_calls(style: str, era: str, connections: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for an echo, in µs."""
    command = server_command(subject, "http", style=style)
    return _http_requests(command, _accept(subject, style), era, call(era), TEXT.encode(), connections, stack)


def http_works(work: str, era: str, connections: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for a request of `works.py` with a JSON response, in µs."""
    command, asked = server_command(subject, "http", works=True), WORKS[work]
    message = request(era, asked.method, asked.params)
    return _http_requests(command, http_load.EITHER, era, message, asked.sign, connections, stack)


def _http_requests(
    command: list[str], accept: str, era: str, message: Any, sign: bytes, connections: int, stack: ExitStack
) -> Measure:
    """CPU of the server for this message, in µs.  The answer must have this sign."""
    usage, port = stack.enter_context(http_load.listening(command))
    callers = [http_load.Caller(port, era, accept) for _ in range(connections)]
    pace = Pace(max(WARM, connections))
    for each in callers:
        stack.callback(each.socket.close)
        each.prepare(message)
    http_load.answered(callers[0], message, streams=command[-1] == "sse")

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        spent = http_load.calls(usage, callers, number, sign)
        pace.seen(number, spent)
        return Figure(spent.cpu / number * 1e6, spent.busy)

    measure(0)
    return measure


def http_burning(workers: int, milliseconds: float, stack: ExitStack, subject: str) -> Measure:
    """Milliseconds by the clock for a call that computes for so long, with so many processes; `bare` has only one."""
    command = workers_command(subject, 1 if subject == "bare" else workers)
    usage, port = stack.enter_context(http_load.listening(command))
    message, pace = call("modern", "burn", {"seconds": milliseconds / 1e3}), Pace(100)
    callers = [http_load.Caller(port, "modern") for _ in range(16 * workers)]
    for each in callers:
        stack.callback(each.socket.close)
        each.prepare(message)

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        spent = http_load.calls(usage, callers, number, b"burnt")
        pace.seen(number, spent)
        return Figure(spent.wall / number * 1e3, spent.busy)

    measure(0)
    return measure


def http_reports(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the server for each of so many reports of progress by one call, in µs."""
    usage, port = stack.enter_context(http_load.listening(server_command(subject, "http", style="sse")))
    caller = http_load.Caller(port, era)
    stack.callback(caller.socket.close)
    caller.prepare(call(era, "report", {"number": number}, reports=True))

    def measure(seconds: float) -> Figure:
        spent = http_load.calls(usage, [caller], 1, b"reported")
        assert caller.received.count(b"notifications/progress") == number, bytes(caller.received[-500:])
        return Figure(spent.cpu / number * 1e6, spent.busy)

    measure(0)
    return measure


def http_waits(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """Milliseconds by the clock until so many calls of 50 ms, each on a connection of its own, are answered."""
    usage, port = stack.enter_context(http_load.listening(server_command(subject, "http")))

    def measure(seconds: float) -> Figure:
        with ExitStack() as opened:
            callers = [http_load.Caller(port, era) for _ in range(number)]
            for each in callers:
                opened.callback(each.socket.close)
                each.prepare(call(era))
            http_load.exchange(callers, number, TEXT.encode())  # then all connections are accepted
            for each in callers:
                each.prepare(call(era, "wait", {"seconds": 0.05}))
            spent = http_load.calls(usage, callers, number, b"waited")
            return Figure(spent.wall * 1e3, spent.busy)

    return measure


def idle_streams(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """KB of memory of the server for each of so many open streams, with their sessions if they have any.  `bare` knows
    no subscriptions, so its streams are opened by GET in both eras."""
    era = "session" if subject == "bare" else era

    def opened(port: int, many: int, streams: ExitStack) -> None:
        for _ in range(many):
            caller = http_load.Caller(port, era)
            streams.callback(caller.socket.close)
            caller.stream()

    def measure(seconds: float) -> Figure:
        with http_load.listening(server_command(subject, "http", style="sse")) as (usage, port), ExitStack() as streams:
            opened(port, 50, streams)  # the memory that is allocated once
            before = usage.resident()
            opened(port, number, streams)
            return Figure((usage.resident() - before) * 1.024 / number)

    return measure


def http_notice(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """Milliseconds by the clock of the longest call of another client while so many listeners receive a notice."""
    _, port = stack.enter_context(http_load.listening(server_command(subject, "http", works=True)))
    listeners = [_listener(port, era, stack) for _ in range(number)]
    announcer, other = (http_load.Caller(port, era) for _ in range(2))
    for each, message in ((announcer, call(era, "announce", {})), (other, call(era))):
        stack.callback(each.socket.close)
        each.prepare(message)

    def measure(seconds: float) -> Figure:
        with http_load.NoticeWait(listeners) as notices:
            other.ask(other.template.take())
            announcer.next()
            longest = 0.0
            while not notices.all_received():
                for _ in range(20):
                    begun = time.perf_counter()
                    other.ask(other.template.take())
                    longest = max(longest, time.perf_counter() - begun)
            assert notices.count(b"list_changed") > 0.99 * number
        return Figure(longest * 1e3)

    measure(0)
    return measure


def replicas_notice(store: str, era: str, number: int, replicas: int, stack: ExitStack, subject: str) -> Measure:
    """Milliseconds by the clock until so many listeners at several replicas have received a notice of one replica.
    `bare` is one process without a store."""
    if store == "redis":
        place = stack.enter_context(started_redis()).url
    else:
        place = stack.enter_context(tempfile.TemporaryDirectory()) + "/store.db"
    commands = [replica_command(subject, place)] * (1 if subject == "bare" else replicas)
    ports = [stack.enter_context(http_load.listening(command))[1] for command in commands]
    listeners = [_listener(ports[each % len(ports)], era, stack) for each in range(number)]
    announcer = http_load.Caller(ports[0], era)
    stack.callback(announcer.socket.close)
    announcer.prepare(call(era, "announce", {}))

    def measure(seconds: float) -> Figure:
        with http_load.NoticeWait(listeners) as notices:
            begun = time.perf_counter()
            announcer.ask(announcer.template.take())
            while not notices.all_received(0.1):
                pass
            spent = time.perf_counter() - begun
            assert notices.count(b"list_changed") > 0.99 * number
        return Figure(spent * 1e3)

    measure(0)
    return measure


def keep_alives(era: str, number: int, stack: ExitStack, subject: str) -> Measure:
    """Milliseconds of CPU of the server for each second, with so many open streams without messages."""
    usage, port = stack.enter_context(http_load.listening(server_command(subject, "http", works=True)))
    for _ in range(number):
        _listener(port, era, stack)

    def measure(seconds: float) -> Figure:
        begun, cpu = time.perf_counter(), usage.cpu()
        time.sleep(KEEP_ALIVE)  # each stream gets one keep-alive
        return Figure((usage.cpu() - cpu) / (time.perf_counter() - begun) * 1e3)

    return measure


def _listener(port: int, era: str, stack: ExitStack) -> http_load.Caller:
    """A client with an open stream."""
    caller = http_load.Caller(port, era)
    stack.callback(caller.socket.close)
    caller.stream()
    return caller


# Clients.


def client_calls(transport: str, era: str, in_flight: int, stack: ExitStack, subject: str) -> Measure:
    """CPU of the client for an echo, in µs.  The load is the server; the figure shows how busy the client was."""
    responder = server_command("scripted", transport)
    if transport == "http":
        _, port = stack.enter_context(http_load.listening(responder))
        target = json.dumps(f"http://127.0.0.1:{port}/mcp")
    else:
        target = json.dumps(responder)
    process = stack.enter_context(running(client_command(subject, target, era, str(in_flight))))
    stack.callback(_end, process)
    _read_line(process)
    pace = Pace(max(WARM, in_flight))

    def measure(seconds: float) -> Figure:
        number = pace.calls(seconds)
        assert process.stdin is not None
        process.stdin.write(b"%d\n" % number)
        wall, cpu = map(float, _read_line(process).split())
        pace.seen(number, Spent(cpu, wall, 0))
        return Figure(cpu / number * 1e6, cpu / wall)

    measure(0)
    return measure


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the client has ended"
    return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the client end, with the server that it has started."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)
