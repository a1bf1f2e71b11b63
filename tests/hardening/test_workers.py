"""Several workers behind one address, as real processes: their ends, and the effects for clients.

`tests/server/test_supervisor.py` has the decisions of the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.hardening.test_process_life import ENVIRONMENT, LATEST, modern
from trio_mcp import TextContent, open_client

PROGRAM = """
import contextlib, logging, os, signal, sys
import trio, trio_mcp, trio_mcp.server.http.listener, trio_mcp.stores

logging.basicConfig(level="INFO", format="%(processName)s|%(message)s")

@contextlib.asynccontextmanager
async def lifespan(server):
    if os.path.exists("broken"):
        raise OSError("the database is away")
    yield

options = dict(argument.split("=") for argument in sys.argv[1:])
if "settle" in options:  # a client on a busy machine needs more than a second for its next request
    trio_mcp.server.http.listener._SETTLE = float(options["settle"])
store = trio_mcp.stores.SQLiteStore(options["store"]) if "store" in options else None
server = trio_mcp.Server("crew", lifespan=lifespan, store=store, state_keys=[bytes(32)])

@server.tool
async def pid(seconds: float = 0.0) -> int:
    if seconds >= 0.5:
        logging.info("<called>")
    await trio.sleep(seconds)
    return os.getpid()

@server.resource("news://today")
async def news() -> str:
    return "none"

@server.tool
async def ask(ctx: trio_mcp.Context) -> int:
    await ctx.elicit("Sure?", bool)
    return os.getpid()

@server.tool
async def change() -> None:
    server.notify_resource_updated("news://today")

@server.tool
async def report(ctx: trio_mcp.Context) -> None:
    await ctx.progress(1, 2)
    while not os.path.exists("go"):
        await trio.sleep(0.01)

@server.tool
async def stay() -> int:
    logging.info("<called>")
    while not os.path.exists("go"):
        await trio.sleep(0.01)
    return os.getpid()

@server.tool
async def hold() -> None:
    logging.info("<called>")
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

where = {"unix": options["unix"]} if "unix" in options else {"http": options.get("http", "127.0.0.1:0")}
server.run(
    workers=int(options.get("workers", 3)), shutdown_timeout=float(options.get("shutdown", 5)), monitoring=True,
    allowed_hosts=["localhost", options.get("host", "localhost")], **where
)
"""


class Service:
    """A supervisor with its workers, and the lines that they write."""

    def __init__(self, process: trio.Process, stderr: trio.abc.ReceiveStream) -> None:
        self.process = process
        self.lines: list[str] = []
        self.clients: list[Client] = []
        self._stderr = stderr
        self._came = trio.lowlevel.ParkingLot()
        self._seen = 0

    async def read(self) -> None:
        rest = b""
        while data := await self._stderr.receive_some():
            *lines, rest = (rest + data).split(b"\n")
            self.lines += [line.decode() for line in lines]
            self._came.unpark_all()
        self.lines.append("<end>")
        self._came.unpark_all()

    async def line(self, pattern: str) -> re.Match[str]:
        """Wait for the next line with this pattern, after the line that was found last."""
        while True:
            for index in range(self._seen, len(self.lines)):
                if (found := re.search(pattern, self.lines[index])) is not None:
                    self._seen = index + 1
                    return found
            assert self.lines[-1:] != ["<end>"], (pattern, self.lines)
            await self._came.park()

    async def said(self, pattern: str) -> None:
        """Wait for a line with this pattern, which may be there already."""
        while not any(re.search(pattern, line) for line in self.lines):
            assert self.lines[-1:] != ["<end>"], (pattern, self.lines)
            await self._came.park()

    async def opened(self, workers: int) -> dict[int, int]:
        """Wait until this number of workers serves, and return their process ids by worker number."""
        found: dict[int, int] = {}
        first = not self._seen
        while len(found) < workers:
            number, pid = (await self.line(r"worker (\d+) serves \(process (\d+)\)")).groups()
            found[int(number)] = int(pid)
        if first:
            await self.line(f" listens at .*, with {workers} workers$")
            await self.line(" has no store: ")
        return found

    async def close(self) -> None:
        await self._stderr.aclose()

    @property
    def port(self) -> int:
        return int(next(re.findall(r":(\d+)/mcp", line)[0] for line in self.lines if "listens at" in line))

    async def ended(self) -> int:
        """The exit status."""
        return await self.process.wait()


@contextlib.asynccontextmanager
async def running(folder: Path, program: str = PROGRAM, **options: object) -> AsyncIterator[Service]:
    with trio.fail_after(60):
        read, write = os.pipe()
        arguments = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-c", program, *arguments]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.DEVNULL, stderr=write, cwd=folder, env={**ENVIRONMENT, "TMPDIR": str(folder)}
        )
        os.close(write)
        service = Service(process, trio.lowlevel.FdStream(read))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(service.read)
                yield service
                nursery.cancel_scope.cancel()
        finally:
            process.kill()  # its workers notice it, and end
            with trio.CancelScope(shield=True):
                await process.wait()
                for client in service.clients:
                    await client.close()
                await service.close()


# Clients.


def request(tool: str, /, accept: str = "application/json", **arguments: Any) -> bytes:
    message = modern(1, "tools/call", name=tool, arguments=arguments)
    message["params"]["_meta"]["progressToken"] = "p"
    body = json.dumps(message).encode()
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: {accept}\r\n"
        f"MCP-Protocol-Version: {LATEST}\r\nMcp-Method: tools/call\r\nMcp-Name: {tool}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@attrs.define
class Client:
    """A client that uses its connection again as long as the server allows it."""

    connect: Callable[[], Awaitable[trio.abc.Stream]]
    stream: trio.abc.Stream | None = None
    connections: int = 0
    translate: Callable[[bytes], bytes] = bytes

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        """The status and the body of the response.  Raises if the connection is closed before."""
        data = self.translate(data)
        if self.stream is None:
            self.stream = await self.connect()
            self.connections += 1
        await self.stream.send_all(data)
        head, body = b"", b""
        while b"\r\n\r\n" not in head:
            part = await self.stream.receive_some()
            assert part, f"the connection was closed after {head!r}"
            head += part
        head, _, body = head.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
        while len(body) < int(length):
            body += await self.stream.receive_some()
        if b"connection: close" in head.lower():
            await self.close()
        return int(head.split()[1]), body

    async def close(self) -> None:
        if self.stream is not None:
            await trio.aclose_forcefully(self.stream)
            self.stream = None

    async def call(self, tool: str, **arguments: Any) -> Any:
        status, body = await self.ask(request(tool, **arguments))
        assert status == 200, body
        return json.loads(body)["result"]["structuredContent"]


def client_of(service: Service) -> Client:
    client = Client(partial(trio.open_tcp_stream, "127.0.0.1", service.port))
    service.clients.append(client)
    return client


@attrs.define
class Load:
    """Clients that make calls one after another, with the counts of answers and the failures."""

    answers: Counter[int] = attrs.field(factory=Counter)  # by process id
    failures: list[object] = attrs.field(factory=list)
    wanted: float = math.inf
    reached: trio.Event = attrs.field(factory=trio.Event)
    over: bool = False

    async def client(self, client: Client, seconds: float) -> None:
        while not self.over:
            try:
                self.answers[await client.call("pid", seconds=seconds)] += 1
                if self.answers.total() >= self.wanted:
                    self.reached.set()
            except (OSError, AssertionError, trio.BrokenResourceError) as error:
                self.failures.append(error)
                await client.close()

    async def more(self, answers: int) -> None:
        """Wait for this number of further answers."""
        self.wanted, self.reached = self.answers.total() + answers, trio.Event()
        await self.reached.wait()


@contextlib.asynccontextmanager
async def loaded(service: Service, clients: int, seconds: float = 0.02) -> AsyncIterator[Load]:
    load = Load()
    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(load.client, client_of(service), seconds)
        yield load
        load.over = True


async def metrics(service: Service) -> dict[str, int]:
    status, body = await client_of(service).ask(get("/metrics"))
    assert status == 200, body
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("trio_mcp_"): int(value) for name, value in map(str.split, lines)}


# The tests.


async def test_workers_share_an_address_and_finish_their_calls_at_sigterm(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as service:
        workers = await service.opened(2)
        assert service.lines[3] == (
            "crew has no store: tasks and sessions end with this service; "
            'Server(store=SQLiteStore("tasks.db")) keeps them'
        )
        assert re.fullmatch("crew listens at http://127.0.0.1:[0-9]+/mcp, with 2 workers", service.lines[2])
        served: set[int] = set()
        while served != set(workers.values()):
            served.add(await client_of(service).call("pid"))
        found: list[int] = []
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                found.append(await client_of(service).call("pid", seconds=0.5))

            for _ in range(6):
                nursery.start_soon(call)
            for _ in range(6):
                number = (await service.line(r"^worker (\d)\|<called>")).group(1)
                assert int(number) in workers
            seen = await metrics(service)
            assert (seen["running_requests"], seen["workers"], seen["silent_workers"]) == (6, 2, 0)
            service.process.terminate()
        assert set(found) <= set(workers.values())
        assert await service.ended() == 143


async def test_a_killed_worker_is_replaced_without_failed_requests(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as service:
        workers = await service.opened(2)
        os.kill(workers[1], signal.SIGKILL)
        await service.line(rf"worker 1 \(process {workers[1]}\) was killed by SIGKILL; it is replaced now")
        async with loaded(service, 4) as load:
            again = await service.opened(1)
            await load.more(50)
        assert (again.keys(), load.failures) == ({1}, [])
        os.kill(again[1], signal.SIGKILL)
        await service.line(r"was killed by SIGKILL; it is replaced in 0.5 s")
        again = await service.opened(1)
        assert (await metrics(service))["worker_failures_total"] == 2
        service.process.terminate()
        assert await service.ended() == 143


@pytest.mark.full
async def test_no_request_fails_while_all_workers_are_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, workers=3, settle=4) as service:
        old = await service.opened(3)
        async with loaded(service, 200) as load:
            await load.more(500)
            service.process.send_signal(signal.SIGHUP)
            new = await service.opened(3)
            for pid in old.values():
                await service.said(rf"process {pid}\) has ended with status 143")
            await load.more(500)  # some answers were on their way
            load.answers.clear()
            await load.more(2000)
        assert load.failures == []
        assert set(load.answers) == set(new.values())


@pytest.mark.full
async def test_a_client_between_two_requests_is_not_affected_by_a_restart(tmp_path: Path) -> None:
    """The connection stays open for a moment, and the next response is the last one on it."""
    async with running(tmp_path, workers=2, settle=4) as service:
        old = await service.opened(2)
        clients = [client_of(service) for _ in range(8)]
        for client in clients:
            await client.call("pid")
        service.process.send_signal(signal.SIGHUP)
        await service.opened(1)
        pids = {await client.call("pid") for client in clients}
        assert pids & set(old.values())
        assert {client.connections for client in clients} == {1}
        assert [client for client in clients if client.stream is None]
        await service.opened(1)


@pytest.mark.full
async def test_a_call_continues_during_the_restart_of_its_worker(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, shutdown=50) as service:
        old = await service.opened(2)
        calls = []
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                calls.append(await client_of(service).call("pid", seconds=2.5))

            for _ in range(8):
                nursery.start_soon(call)
                await service.line("<called>")
            service.process.send_signal(signal.SIGHUP)
            await service.opened(2)
        assert set(calls) <= set(old.values())


@pytest.mark.full
async def test_a_restart_that_fails_leaves_the_old_workers(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as service:
        old = await service.opened(2)
        (tmp_path / "broken").touch()
        service.process.send_signal(signal.SIGHUP)
        await service.said("OSError: the database is away")
        await service.line(r"has ended with status 1 before it was ready; the old workers stay")
        async with loaded(service, 20) as load:
            await load.more(200)
        assert (set(load.answers), load.failures) == (set(old.values()), [])


@pytest.mark.full
async def test_one_worker_that_gets_sigterm_leaves_without_a_failed_request(tmp_path: Path) -> None:
    async with running(tmp_path, workers=3, settle=4) as service:
        workers = await service.opened(3)
        async with loaded(service, 100) as load:
            await load.more(200)
            os.kill(workers[2], signal.SIGTERM)
            await service.line(r"worker 2 .* has ended with status 143; it is replaced now")
            await service.opened(1)
            await load.more(200)
        assert load.failures == []


@pytest.mark.full
async def test_workers_of_a_killed_supervisor_end_and_free_the_address_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, shutdown=50) as service:
        await service.opened(2)
        port, found = service.port, []
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                found.append(await client_of(service).call("stay"))

            nursery.start_soon(call)
            await service.line("<called>")
            service.process.kill()
            for _ in range(2):
                await service.line(r"^worker \d\|the supervisor has ended")
            async with running(tmp_path, workers=2, http=f"127.0.0.1:{port}") as successor:
                await successor.opened(2)
                assert not found
                (tmp_path / "go").touch()
        assert len(found) == 1
        await service.line("<end>")


def folders(parent: Path) -> list[Path]:
    return [*parent.glob("trio_mcp-workers-*")]


@pytest.mark.full
async def test_the_folder_of_a_service_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as killed:
        await killed.opened(2)
        (folder,) = folders(tmp_path)
        os.utime(folder, (0, 0))
        async with running(tmp_path, workers=2) as other:
            await other.opened(2)
            assert folder.is_dir()  # it is locked
            other.process.terminate()
            assert await other.ended() == 143
        assert folders(tmp_path) == [folder]
        killed.process.kill()
        await killed.line("<end>")
    os.utime(folder, (0, 0))
    async with running(tmp_path, workers=2) as successor:
        await successor.opened(2)
        assert not folder.exists()


@pytest.mark.full
async def test_a_server_that_cannot_start_fails_once(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    async with running(tmp_path, workers=4) as service:
        assert await service.ended() == 1
        await service.line("<end>")
        *traceback, error, ended, why, _ = service.lines
        assert (traceback[0], error) == ("Traceback (most recent call last):", "OSError: the database is away")
        assert re.fullmatch(r"MainProcess\|worker 1 \(process \d+\) has ended with status 1 before it was ready", ended)
        assert why == "MainProcess|crew ends, because its workers cannot start"


@pytest.mark.full
async def test_the_service_ends_if_workers_cannot_start_again(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as service:
        workers = await service.opened(2)
        (tmp_path / "broken").touch()
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
        assert await service.ended() == 1
        await service.line("crew ends, because its workers cannot start")
        assert sum("before it was ready" in line for line in service.lines) == 10


@pytest.mark.full
async def test_a_port_in_use_is_an_error_of_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with running(tmp_path, http=f"127.0.0.1:{port}") as service:
            assert await service.ended() == 1
            await service.line("<end>")
            assert service.lines == [
                f"crew: cannot listen at 127.0.0.1:{port}: Address already in use; another program listens there; stop "
                "it, or choose another port (0: any free port)",
                "<end>",
            ]


@pytest.mark.full
@pytest.mark.parametrize(("times", "took"), [(1, "cancels the calls"), (3, "kills")])
async def test_ctrl_c_ends_the_service(tmp_path: Path, times: int, took: str) -> None:
    async with running(tmp_path, workers=2, shutdown=30) as service:
        await service.opened(2)
        client = client_of(service)
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with contextlib.suppress(AssertionError, trio.BrokenResourceError):
                    await client.call("hold") if times == 3 else await client.call("pid", seconds=30)

            nursery.start_soon(call)
            await service.line("<called>")
            for _ in range(times):
                service.process.send_signal(signal.SIGINT)
                await trio.sleep(0.3)  # the system merges signals that were not delivered yet
            assert await service.ended() == 130


@pytest.mark.full
async def test_a_stopped_worker_counts_as_silent_and_is_killed_at_the_end(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, shutdown=0.1) as service:
        workers = await service.opened(2)
        os.kill(workers[1], signal.SIGSTOP)
        seen = await metrics(service)
        assert (seen["workers"], seen["silent_workers"]) == (1, 1)
        service.process.terminate()
        assert await service.ended() == 143
        await service.line(rf"worker 1 \(process {workers[1]}\) has not ended in time; it is killed")


@pytest.mark.full
async def test_a_service_that_ends_accepts_no_connection_and_is_not_ready(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, shutdown=50) as service:
        await service.opened(2)
        probe = client_of(service)
        assert [(await probe.ask(get(path)))[0] for path in ("/healthz", "/readyz")] == [200, 200]
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(lambda: client_of(service).call("stay"))
                await service.line("<called>")
            service.process.terminate()
            # The signal may arrive later.  The probe never idles, because a worker that ends closes idle connections.
            while (answer := await probe.ask(get("/readyz")))[0] == 200:
                assert probe.stream is not None
            assert answer == (503, b"the server is shutting down\n")
            assert probe.stream is None
            with contextlib.suppress(OSError, AssertionError, trio.BrokenResourceError):
                while True:  # until the worker has accepted the connections that waited
                    await client_of(service).ask(get("/healthz"))
            (tmp_path / "go").touch()
        assert await service.ended() == 143


@pytest.mark.full
async def test_sessions_of_older_revisions_continue_in_other_workers(tmp_path: Path) -> None:
    async with running(tmp_path, workers=3) as service:
        old = await service.opened(3)
        answers, new, called = set[int](), dict[int, int](), trio.Event()
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                async with open_client(f"http://localhost:{service.port}/mcp", revision="2025-11-25") as client:
                    pid = None
                    while pid is None or pid not in new.values():
                        (text,) = (await client.call_tool("pid", {"seconds": 0.01})).content
                        assert isinstance(text, TextContent)
                        answers.add(pid := int(text.text))
                        called.set()

            for _ in range(6):
                nursery.start_soon(call)
            await called.wait()
            service.process.send_signal(signal.SIGHUP)
            new |= await service.opened(3)
        assert answers & {*old.values()}


@pytest.mark.full
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_a_subscription_continues_in_another_worker(revision: str, tmp_path: Path) -> None:
    async with (
        running(tmp_path, workers=2) as service,
        trio.open_nursery() as nursery,
    ):
        old = await service.opened(2)
        url = f"http://localhost:{service.port}/mcp"
        async with open_client(url, revision=revision) as client, client.listen(resources=["news://today"]) as changes:
            await client.call_tool("change")
            await anext(changes)
            service.process.send_signal(signal.SIGHUP)
            await service.opened(2)
            for pid in old.values():
                await service.said(rf"process {pid}\) has ended with status 143")

            async def publish() -> None:
                while True:
                    await client.call_tool("change")
                    await trio.sleep(0.1)

            nursery.start_soon(publish)
            for _ in range(3):  # the first change may report the time without a subscription
                await anext(changes)
            nursery.cancel_scope.cancel()


@pytest.mark.full
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_a_question_is_answered_while_its_worker_is_replaced(revision: str, tmp_path: Path) -> None:
    async with running(tmp_path, workers=2, shutdown=50) as service:
        old = await service.opened(2)
        asked, go_on, answers = trio.Semaphore(0), trio.Event(), list[int]()

        async def answer(*_: object) -> dict[str, Any]:
            asked.release()
            await go_on.wait()
            return {"value": True}

        async def call() -> None:
            async with open_client(url, revision=revision, elicitation=answer) as client:
                (text,) = (await client.call_tool("ask")).content
                assert isinstance(text, TextContent)
                answers.append(int(text.text))

        url = f"http://localhost:{service.port}/mcp"
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(call)
            for _ in range(8):
                await asked.acquire()
            service.process.send_signal(signal.SIGHUP)
            await service.opened(1)
            await trio.sleep(1.5)  # the old worker closes its idle connections in this time
            go_on.set()
        assert len(answers) == 8
        assert set(answers) <= set(old.values())


QUIET = """
import logging, os, signal, threading
import trio_mcp

server = trio_mcp.Server("quiet")

@server.tool(thread=False)
def complain() -> None:
    logging.getLogger("quiet").warning("this is odd")

@server.tool(thread=False)
def stop(number: int) -> None:
    os.kill(os.getpid(), number)

threading.Thread(target=threading.Event().wait, name="idler", daemon=True).start()
server.run(http="127.0.0.1:0", workers=2)
"""


@pytest.mark.full
async def test_lines_of_a_worker_have_its_name_without_configured_logging(tmp_path: Path) -> None:
    async with running(tmp_path, QUIET) as service:
        await service.line("^workers are forks of this process and have none of its threads \\(idler\\); start threads")
        await service.line("listens at")
        await client_of(service).ask(request("complain"))
        await service.line("^worker [12]: this is odd$")
        with pytest.raises(AssertionError, match="the connection was closed"):
            await client_of(service).ask(request("stop", number=signal.SIGRTMIN + 1))
        await service.line(rf"was killed by signal {signal.SIGRTMIN + 1}; it is replaced now")


@pytest.mark.full
async def test_workers_serve_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "crew.sock"
    async with running(tmp_path, workers=2, unix=path) as service:
        workers = await service.opened(2)
        assert service.lines[2] == f"crew listens at {path}, for http://localhost/mcp, with 2 workers"
        client = Client(partial(trio.open_unix_socket, path))
        service.clients.append(client)
        assert await client.call("pid") in workers.values()
        service.process.send_signal(signal.SIGHUP)
        await service.opened(2)
        assert path.exists()
        service.process.terminate()
        assert await service.ended() == 143
        assert os.listdir(tmp_path) == []  # neither the socket nor the store


@pytest.mark.full
async def test_the_end_of_the_terminal_ends_the_service(tmp_path: Path) -> None:
    """The end of a terminal is a SIGHUP too, but no user would see the service afterwards."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(
            sys.executable, [sys.executable, "-c", PROGRAM, "workers=2"], {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
        )
    with trio.fail_after(60):
        said = b""
        while said.count(b" serves ") < 2:
            said += await trio.to_thread.run_sync(os.read, terminal, 4096)
        os.close(terminal)
        _, status = await trio.to_thread.run_sync(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 143
