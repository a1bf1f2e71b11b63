"""Bytes that a server holds for clients: limits for a connection, a client and in all; clients that do not read."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.hardening.test_fairness import OLD, ServerUnderTest, head, shared, tool, websocket_of
from tests.http.client import HttpClient
from tests.http.served import listening
from tests.http.ws import TEXT, frame
from tests.requirements import req
from tests.server.checkpoints import pipe_pair
from tests.server.raw_client import LATEST
from trio_mcp import Context, serve_stream
from trio_mcp.core import Role

META = {"io.modelcontextprotocol/protocolVersion": LATEST, "io.modelcontextprotocol/clientCapabilities": {}}
SIZE = 100_000
LEGACY = {"sse_path": "/sse", "message_path": "/messages"}
LIMITS: dict[str, Any] = {"bytes_each": 10 * SIZE, "bytes_in_all": 40 * SIZE}


class LongAnswerServer(ServerUnderTest):
    """A server with tools that return long answers, or hold long requests."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**{**LIMITS, **limits})
        self.given = 0

        @self.server.tool
        async def give(size: int = SIZE) -> str:
            self.given += 1
            return "x" * size

        @self.server.tool
        async def tell(ctx: Context, size: int = SIZE) -> str:
            await ctx.log("error", "it follows")  # makes the answer a stream with two events
            return "x" * size

        @self.server.tool
        async def keep(text: str) -> str:
            self.working += 1
            await self.let_go.wait()
            return "kept"


def call(name: str, id: int, **arguments: Any) -> bytes:
    params = {"name": name, "arguments": arguments, "_meta": META}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).encode()


def narrow_pipe() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    return pipe_pair(1000)


# Answers that are not read.


async def test_unread_answers_on_http_are_limited_to_a_share(autojump_clock: MockClock) -> None:
    tested = LongAnswerServer()
    async with shared(tested, "mallory", "ann", streams=narrow_pipe) as (mallory, ann), trio.open_nursery() as nursery:
        ends: list[str] = []

        async def unread() -> None:
            message = mallory.request("tools/call", {"name": "give", "arguments": {}})
            link = await mallory.link()
            fields = {**mallory.headers, **mallory.headers_for(message, LATEST, None)}
            await link.ask("POST", "/mcp", fields, json.dumps(message).encode())
            await trio.sleep(1000)
            heard = b""
            with contextlib.suppress(trio.BrokenResourceError):
                while data := await link.stream.receive_some():
                    heard += data
            ends.append("refused" if b"Limits.bytes_in_all" in heard else "read" if len(heard) > SIZE else "dropped")

        for _ in range(100):
            nursery.start_soon(unread)
        await trio.sleep(1)
        assert tested.given == 100
        assert 25 * SIZE < tested.held < 31 * SIZE
        assert len((await tool(ann, "give")).body) > SIZE
        await trio.sleep(61)
        assert tested.held == 0
        await trio.sleep(1000)
        assert (ends.count("dropped"), ends.count("refused")) == (29, 71)


async def unread_websocket(web: HttpClient, calls: list[bytes]) -> Callable[[], Awaitable[bytes]]:
    stream = await websocket_of(web)
    for each in calls:
        await stream.send_all(frame(Role.SERVER, TEXT, each))
    return stream.receive_some


async def unread_legacy_stream(web: HttpClient, calls: list[bytes]) -> Callable[[], Awaitable[bytes]]:
    opened = await web.open(path="/sse", revision="2024-11-05")
    target = (await opened.event()).data.decode()
    opening = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    for message in (
        {"jsonrpc": "2.0", "id": "i", "method": "initialize", "params": opening},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        *(json.loads(each) for each in calls),
    ):
        if message.get("params", {}).get("_meta") == META:
            del message["params"]["_meta"]
        fields = {"Content-Type": "application/json"}
        answer = await web.send("POST", target, fields, json.dumps(message).encode())
        assert answer.status == 202
    return opened.link.stream.receive_some


@pytest.mark.parametrize("unread", [unread_websocket, unread_legacy_stream])
async def test_unread_answers_of_one_connection_are_limited_in_size_and_time(
    unread: Any, autojump_clock: MockClock
) -> None:
    tested = LongAnswerServer(outgoing=1000)
    async with shared(tested, "mallory", "ann", streams=narrow_pipe, **LEGACY) as (mallory, ann):
        receive = await unread(mallory, [call("give", id) for id in range(40)])
        await wait_all_tasks_blocked()
        assert tested.given == 40
        assert 9 * SIZE < tested.held <= 10 * SIZE
        assert len((await tool(ann, "give")).body) > SIZE
        await trio.sleep(61)
        assert (tested.held, tested.server.statistics().connections) == (0, 0)
        with contextlib.suppress(trio.BrokenResourceError):
            while await receive():
                pass


async def test_a_call_without_room_for_its_answer_gets_an_error(autojump_clock: MockClock) -> None:
    """This holds on a pipe too: a host that does not read cannot fill the memory."""
    tested = LongAnswerServer()
    ours, theirs = pipe_pair(1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, tested.server, theirs)
        for id in range(40):
            await ours.send_all(call("give", id) + b"\n")
        await trio.sleep(1000)  # a host on a pipe has no time limit
        assert 9 * SIZE < tested.held <= 10 * SIZE
        answers, rest = [], b""
        while len(answers) < 40:
            *lines, rest = (rest + await ours.receive_some()).split(b"\n")
            answers += [json.loads(line) for line in lines]
        refused = [answer["error"] for answer in answers if "error" in answer]
        assert len(refused) == 31
        assert {error["code"] for error in refused} == {-32603}
        assert all("Limits.bytes_each" in error["message"] for error in refused)
        await ours.send_eof()
    assert tested.held == 0


@pytest.mark.parametrize("transport", ["http", "websocket", "legacy"])
async def test_a_client_that_reads_too_slowly_is_dropped(transport: str, autojump_clock: MockClock) -> None:
    tested = LongAnswerServer()
    async with shared(tested, "mallory", streams=narrow_pipe, **LEGACY) as (mallory,):
        if transport == "http":
            message = mallory.request("tools/call", {"name": "give", "arguments": {}})
            link = await mallory.link()
            fields = {**mallory.headers, **mallory.headers_for(message, LATEST, None)}
            await link.ask("POST", "/mcp", fields, json.dumps(message).encode())
            receive: Any = link.stream.receive_some
        else:
            receive = await (unread_websocket if transport == "websocket" else unread_legacy_stream)(
                mallory, [call("give", 1)]
            )
        began, heard = trio.current_time(), 0
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await receive(200):
                heard += len(data)
                await trio.sleep(1)
        assert heard < SIZE
        assert trio.current_time() - began < 130
        await trio.sleep(1)
        assert tested.held == 0


# Requests that are being served.


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_requests_are_charged_until_they_are_answered(transport: str, autojump_clock: MockClock) -> None:
    tested = LongAnswerServer()
    async with shared(tested, "mallory", "ann") as (mallory, ann), trio.open_nursery() as nursery:
        if transport == "websocket":
            stream = await websocket_of(mallory)
            for id in range(20):
                await stream.send_all(frame(Role.SERVER, TEXT, call("keep", id, text="x" * SIZE)))
            most = 9
        else:
            for _ in range(60):
                nursery.start_soon(tool, mallory, "keep", {"text": "x" * SIZE})
            most = 29
        await wait_all_tasks_blocked()
        assert tested.working == most
        assert most * SIZE < tested.held < (most + 1) * SIZE
        assert (await tool(ann, "echo", {"text": "x" * SIZE})).status == 200
        tested.let_go.set()
        await wait_all_tasks_blocked()
        assert tested.held == 0
        nursery.cancel_scope.cancel()


# Reports.


@req("prog-08", "log-04")
@pytest.mark.parametrize("transport", ["stream", "http", "session", "legacy"])
async def test_progress_and_logs_for_a_slow_client_are_merged(transport: str, autojump_clock: MockClock) -> None:
    """The last progress is sent, the first log messages are kept, and a last one tells how many were dropped."""
    tested = LongAnswerServer(outgoing=8, write_seconds=10_000)
    done: list[float] = []

    @tested.server.tool
    async def talk(ctx: Context) -> str:
        for number in range(1, 1001):
            await ctx.progress(number)
            await ctx.log("error", number)
            await trio.sleep(0.1)
        done.append(trio.current_time())
        return "said"

    async with call_of_talk(tested, transport) as receive:
        await trio.sleep(200)
        assert done == [pytest.approx(150, abs=1)]  # a report waits for another report, but not for the client
        messages, rest = [], b""
        while not any(message.get("id") == 1 for message in messages):
            *lines, rest = (rest + await receive()).split(b"\n")
            texts = [line.removeprefix(b"data: ") for line in lines]
            messages += [json.loads(text) for text in texts if text.startswith(b"{")]
        progress = [each["params"]["progress"] for each in messages if each.get("method") == "notifications/progress"]
        logs = [each["params"]["data"] for each in messages if each.get("method") == "notifications/message"]
        assert progress == sorted(set(progress))
        assert progress[-1] == 1000
        assert len(progress) + len(logs) < 60
        *numbers, last = logs
        assert numbers == sorted(numbers)
        assert last.startswith(f"{1000 - len(numbers)} log messages of this call were dropped")
        assert messages[-1]["result"]
    await wait_all_tasks_blocked()


@contextlib.asynccontextmanager
async def call_of_talk(tested: LongAnswerServer, transport: str) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """Call `talk`, and yield a function that reads the next bytes.  The client reads only when it is called."""
    meta = {**META, "progressToken": 1, "io.modelcontextprotocol/logLevel": "debug"}
    params: Any = {"name": "talk", "arguments": {}, "_meta": meta}
    if transport == "stream":
        ours, theirs = pipe_pair(1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_stream, tested.server, theirs)
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            await ours.send_all(json.dumps(message).encode() + b"\n")
            yield ours.receive_some
            await ours.aclose()
        return
    async with shared(tested, "ann", streams=narrow_pipe, **LEGACY) as (web,):
        session = await web.initialize(OLD) if transport == "session" else None
        if transport == "legacy":
            params["_meta"] = {"progressToken": 1}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            yield await unread_legacy_stream(web, [json.dumps(message).encode()])
            return
        revision = OLD if session else LATEST
        if session:
            params["_meta"] = {"progressToken": 1}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        link, _, _ = await web.begin(message, revision=revision, session=session)

        async def chunk() -> bytes:
            return await link.chunk() or b""

        yield chunk


# Requests that follow each other.


@pytest.mark.parametrize("leaves", [False, True])
async def test_pipelined_requests_wait_unread_and_a_disconnect_is_noticed(leaves: bool) -> None:
    tested = LongAnswerServer()
    ended = trio.Event()

    @tested.server.tool
    async def hold() -> str:
        try:
            await tested.let_go.wait()
        finally:
            ended.set()
        return "held"

    async with listening(tested.server) as web:
        stream = await web.connect()
        first, second = (raw(web, name) for name in ("hold", "echo"))
        await stream.send_all(first + second * (150_000 // len(second)))
        with trio.fail_after(30):
            if leaves:
                await stream.aclose()  # Linux reports it although the server does not read
            else:
                await trio.sleep(0.1)
                assert not ended.is_set()
                tested.let_go.set()
                heard = b""
                while heard.count(b"0 characters") < 150_000 // len(second):
                    heard += await stream.receive_some()
                await stream.aclose()
            await ended.wait()


def raw(web: HttpClient, name: str) -> bytes:
    message = web.request("tools/call", {"name": name, "arguments": {}})
    fields = {"Host": web.headers["Host"], **web.headers_for(message, LATEST, None)}
    body = json.dumps(message).encode()
    lines = ("POST /mcp HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items() if value is not None))
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


# Logs for replay.


async def test_event_logs_of_a_client_drop_events_before_a_request_is_refused(autojump_clock: MockClock) -> None:
    tested = LongAnswerServer()
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        hers = await ann.initialize(OLD)
        streams = [await ann.open(ann.request("tools/call", {"name": "tell"}, revision=OLD), session=hers)]
        begun = await streams[0].event()
        assert begun.id
        await streams[0].response()
        sessions = [await mallory.initialize(OLD) for _ in range(5)]
        for _ in range(12):
            for session in sessions:
                assert (await tool(mallory, "tell", session=session)).status == 200
        assert tested.held <= 31 * SIZE
        assert (await tool(mallory, "echo", {"text": "x" * 5 * SIZE}, session=sessions[0])).status == 200
        again = await ann.open(session=hers, after=begun.id)
        await again.message()
        assert len((await again.message())["result"]["content"][0]["text"]) == SIZE
        for session in sessions:
            await mallory.end(session)
        await ann.end(hers)
        await wait_all_tasks_blocked()
        assert tested.held == 0


async def test_missed_events_are_charged_until_the_client_reads_them(autojump_clock: MockClock) -> None:
    tested = LongAnswerServer()
    async with shared(tested, "mallory", streams=narrow_pipe) as (mallory,):
        session = await mallory.initialize(OLD)
        stream = await mallory.open(mallory.request("tools/call", {"name": "tell"}, revision=OLD), session=session)
        begun = await stream.event()
        await stream.message()
        await stream.message()
        statuses = []
        for _ in range(40):
            statuses.append(await resumed(mallory, session, begun.id))
        assert statuses == [200] * 9 + [503] * 31
        assert tested.held < 12 * SIZE
        await trio.sleep(61)
        await mallory.end(session)
        await wait_all_tasks_blocked()
        assert tested.held == 0


async def resumed(web: HttpClient, session: str, after: str) -> int:
    fields = {"Accept": "text/event-stream", "Mcp-Session-Id": session, "Last-Event-ID": after}
    _, response = await web.ask("GET", "/mcp", {**fields, "MCP-Protocol-Version": OLD})
    return response.status_code


# All kinds of clients together.


async def act_as_a_client(web: HttpClient, rng: random.Random) -> None:
    """The actions of one client, which may end at any point."""
    with trio.move_on_after(rng.choice([0.5, 5, 50, 100])):
        kind = rng.choice(["post", "session", "websocket", "half", "legacy", "listen"])
        size = rng.choice([10, SIZE, 3 * SIZE])
        if kind == "post":
            await tool(web, rng.choice(["give", "keep", "echo"]), rng.choice([{}, {"text": "x" * size}]))
        elif kind == "session":
            session = await web.initialize(OLD)
            for _ in range(rng.randrange(4)):
                await web.open(web.request("tools/call", {"name": "tell"}, revision=OLD), session=session)
            if rng.random() < 0.5:
                await web.end(session)
        elif kind == "websocket":
            await unread_websocket(web, [call(rng.choice(["give", "keep"]), id, text="x" * size) for id in range(5)])
            await trio.sleep(rng.choice([1, 100]))
        elif kind == "half":
            link = await web.link()
            await link.stream.send_all(head(web, 200_000) + b"x" * rng.choice([1, 100_000]))
            await trio.sleep(rng.choice([1, 100]))
        elif kind == "legacy":
            await unread_legacy_stream(web, [call("give", id) for id in range(5)])
            await trio.sleep(rng.choice([1, 100]))
        else:
            asked = {"notifications": {"resourceSubscriptions": [f"note://{'x' * rng.choice([1, 5000])}"]}}
            await web.open(web.request("subscriptions/listen", asked))
            await trio.sleep(rng.choice([1, 100]))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 30))])
async def test_no_bytes_are_held_after_any_actions_of_clients(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    tested = LongAnswerServer(session_idle_seconds=60, write_seconds=30)
    streams = rng.choice([narrow_pipe, lambda: pipe_pair(1 << 20)])
    async with shared(tested, *"abc", streams=streams, **LEGACY, check=False) as webs:

        async def act_as_clients(web: HttpClient) -> None:
            for _ in range(6):
                own = HttpClient(web.connect, host=str(web.headers["Host"]), headers=web.headers, check=False)
                with contextlib.suppress(Exception):
                    await act_as_a_client(own, rng)
                await own.aclose()

        async with trio.open_nursery() as nursery:
            for web in webs:
                nursery.start_soon(act_as_clients, web)
        tested.let_go.set()
        await trio.sleep(1000)
        now = tested.server.statistics()
        assert (now.bytes, now.running, now.connections, now.listeners) == (0, 0, 0, 0)
