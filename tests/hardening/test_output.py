"""Bytes that a server holds for its clients: of connections, of clients, and in all; and clients that do not read."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.hardening.test_fairness import OLD, Desk, head, shared, tool, websocket_of
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


class Store(Desk):
    """A desk whose tools give long answers, and take their time for long requests."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**{**LIMITS, **limits})
        self.given = 0

        @self.server.tool
        async def give(size: int = SIZE) -> str:
            self.given += 1
            return "x" * size

        @self.server.tool
        async def tell(ctx: Context, size: int = SIZE) -> str:
            await ctx.log("error", "it follows")  # so that the answer is a stream, and logged
            return "x" * size

        @self.server.tool
        async def keep(text: str) -> str:
            self.working += 1
            await self.let_go.wait()
            return "kept"


def call(name: str, id: int, **arguments: Any) -> bytes:
    params = {"name": name, "arguments": arguments, "_meta": META}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).encode()


def narrow() -> tuple[trio.abc.Stream, trio.abc.Stream]:
    return pipe_pair(1000)


# Answers that are not read.


async def test_answers_by_http_that_nobody_reads_are_a_share(autojump_clock: MockClock) -> None:
    store = Store()
    async with shared(store, "mallory", "ann", streams=narrow) as (mallory, ann), trio.open_nursery() as nursery:
        ends: list[str] = []

        async def deaf() -> None:
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
            nursery.start_soon(deaf)
        await trio.sleep(1)
        assert store.given == 100
        assert 25 * SIZE < store.held < 31 * SIZE
        assert len((await tool(ann, "give")).body) > SIZE
        await trio.sleep(61)
        assert store.held == 0
        await trio.sleep(1000)
        assert (ends.count("dropped"), ends.count("refused")) == (29, 71)


async def deaf_websocket(web: HttpClient, calls: list[bytes]) -> Callable[[], Awaitable[bytes]]:
    stream = await websocket_of(web)
    for each in calls:
        await stream.send_all(frame(Role.SERVER, TEXT, each))
    return stream.receive_some


async def deaf_legacy_stream(web: HttpClient, calls: list[bytes]) -> Callable[[], Awaitable[bytes]]:
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


@pytest.mark.parametrize("deaf", [deaf_websocket, deaf_legacy_stream])
async def test_answers_by_one_connection_that_nobody_reads_have_a_bound_and_an_end(
    deaf: Any, autojump_clock: MockClock
) -> None:
    store = Store(outgoing=1000)
    async with shared(store, "mallory", "ann", streams=narrow, **LEGACY) as (mallory, ann):
        receive = await deaf(mallory, [call("give", id) for id in range(40)])
        await wait_all_tasks_blocked()
        assert store.given == 40
        assert 9 * SIZE < store.held <= 10 * SIZE
        assert len((await tool(ann, "give")).body) > SIZE
        await trio.sleep(61)
        assert (store.held, store.server.statistics().connections) == (0, 0)
        with contextlib.suppress(trio.BrokenResourceError):
            while await receive():
                pass


async def test_a_call_whose_answer_finds_no_room_is_told_so(autojump_clock: MockClock) -> None:
    """By a pipe, too: a host that does not read cannot have the whole memory either."""
    store = Store()
    ours, theirs = pipe_pair(1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, store.server, theirs)
        for id in range(40):
            await ours.send_all(call("give", id) + b"\n")
        await trio.sleep(1000)  # nobody knows how long a host may take
        assert 9 * SIZE < store.held <= 10 * SIZE
        answers, rest = [], b""
        while len(answers) < 40:
            *lines, rest = (rest + await ours.receive_some()).split(b"\n")
            answers += [json.loads(line) for line in lines]
        refused = [answer["error"] for answer in answers if "error" in answer]
        assert len(refused) == 31
        assert {error["code"] for error in refused} == {-32603}
        assert all("Limits.bytes_each" in error["message"] for error in refused)
        await ours.send_eof()
    assert store.held == 0


@pytest.mark.parametrize("transport", ["http", "websocket", "legacy"])
async def test_a_client_that_reads_too_slowly_is_dropped(transport: str, autojump_clock: MockClock) -> None:
    store = Store()
    async with shared(store, "mallory", streams=narrow, **LEGACY) as (mallory,):
        if transport == "http":
            message = mallory.request("tools/call", {"name": "give", "arguments": {}})
            link = await mallory.link()
            fields = {**mallory.headers, **mallory.headers_for(message, LATEST, None)}
            await link.ask("POST", "/mcp", fields, json.dumps(message).encode())
            receive: Any = link.stream.receive_some
        else:
            receive = await (deaf_websocket if transport == "websocket" else deaf_legacy_stream)(
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
        assert store.held == 0


# Requests that are at work.


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_requests_are_charged_until_they_are_answered(transport: str, autojump_clock: MockClock) -> None:
    store = Store()
    async with shared(store, "mallory", "ann") as (mallory, ann), trio.open_nursery() as nursery:
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
        assert store.working == most
        assert most * SIZE < store.held < (most + 1) * SIZE
        assert (await tool(ann, "echo", {"text": "x" * SIZE})).status == 200
        store.let_go.set()
        await wait_all_tasks_blocked()
        assert store.held == 0
        nursery.cancel_scope.cancel()


# Reports.


@req("prog-08", "log-04")
@pytest.mark.parametrize("transport", ["stream", "http", "session", "legacy"])
async def test_reports_to_a_client_that_reads_slowly_are_merged(transport: str, autojump_clock: MockClock) -> None:
    """The last progress counts, of log messages the first are kept, and the client is told how many were not."""
    store = Store(outgoing=8, write_seconds=10_000)
    done: list[float] = []

    @store.server.tool
    async def talk(ctx: Context) -> str:
        for number in range(1, 1001):
            await ctx.progress(number)
            await ctx.log("error", number)
            await trio.sleep(0.1)
        done.append(trio.current_time())
        return "said"

    async with talking(store, transport) as receive:
        await trio.sleep(200)
        assert done == [pytest.approx(150, abs=1)]  # two reports wait for each other, and not for the client
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
async def talking(store: Store, transport: str) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """What comes back for a call of `talk`, from a client that does not read it before it is asked for."""
    meta = {**META, "progressToken": 1, "io.modelcontextprotocol/logLevel": "debug"}
    params: Any = {"name": "talk", "arguments": {}, "_meta": meta}
    if transport == "stream":
        ours, theirs = pipe_pair(1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_stream, store.server, theirs)
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            await ours.send_all(json.dumps(message).encode() + b"\n")
            yield ours.receive_some
            await ours.aclose()
        return
    async with shared(store, "ann", streams=narrow, **LEGACY) as (web,):
        session = await web.initialize(OLD) if transport == "session" else None
        if transport == "legacy":
            params["_meta"] = {"progressToken": 1}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            yield await deaf_legacy_stream(web, [json.dumps(message).encode()])
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
async def test_requests_behind_a_running_one_wait_unread_and_a_client_that_leaves_is_noticed(leaves: bool) -> None:
    store = Store()
    ended = trio.Event()

    @store.server.tool
    async def hold() -> str:
        try:
            await store.let_go.wait()
        finally:
            ended.set()
        return "held"

    async with listening(store.server) as web:
        stream = await web.connect()
        first, second = (raw(web, name) for name in ("hold", "echo"))
        await stream.send_all(first + second * (150_000 // len(second)))
        with trio.fail_after(30):
            if leaves:
                await stream.aclose()  # on Linux the socket tells, though nothing is read
            else:
                await trio.sleep(0.1)
                assert not ended.is_set()
                store.let_go.set()
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


async def test_logs_of_one_client_forget_before_anything_else_suffers(autojump_clock: MockClock) -> None:
    store = Store()
    async with shared(store, "mallory", "ann") as (mallory, ann):
        hers = await ann.initialize(OLD)
        streams = [await ann.open(ann.request("tools/call", {"name": "tell"}, revision=OLD), session=hers)]
        begun = await streams[0].event()
        assert begun.id
        await streams[0].response()
        sessions = [await mallory.initialize(OLD) for _ in range(5)]
        for _ in range(12):
            for session in sessions:
                assert (await tool(mallory, "tell", session=session)).status == 200
        assert store.held <= 31 * SIZE
        assert (await tool(mallory, "echo", {"text": "x" * 5 * SIZE}, session=sessions[0])).status == 200
        again = await ann.open(session=hers, after=begun.id)
        await again.message()
        assert len((await again.message())["result"]["content"][0]["text"]) == SIZE
        for session in sessions:
            await mallory.end(session)
        await ann.end(hers)
        await wait_all_tasks_blocked()
        assert store.held == 0


async def test_what_a_client_has_missed_is_charged_while_it_does_not_read_it(autojump_clock: MockClock) -> None:
    store = Store()
    async with shared(store, "mallory", streams=narrow) as (mallory,):
        session = await mallory.initialize(OLD)
        stream = await mallory.open(mallory.request("tools/call", {"name": "tell"}, revision=OLD), session=session)
        begun = await stream.event()
        await stream.message()
        await stream.message()
        statuses = []
        for _ in range(40):
            statuses.append(await resumed(mallory, session, begun.id))
        assert statuses == [200] * 9 + [503] * 31
        assert store.held < 12 * SIZE
        await trio.sleep(61)
        await mallory.end(session)
        await wait_all_tasks_blocked()
        assert store.held == 0


async def resumed(web: HttpClient, session: str, after: str) -> int:
    fields = {"Accept": "text/event-stream", "Mcp-Session-Id": session, "Last-Event-ID": after}
    _, response = await web.ask("GET", "/mcp", {**fields, "MCP-Protocol-Version": OLD})
    return response.status_code


# All of it.


async def live(web: HttpClient, rng: random.Random) -> None:
    """One life of a client, which may end anywhere."""
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
            await deaf_websocket(web, [call(rng.choice(["give", "keep"]), id, text="x" * size) for id in range(5)])
            await trio.sleep(rng.choice([1, 100]))
        elif kind == "half":
            link = await web.link()
            await link.stream.send_all(head(web, 200_000) + b"x" * rng.choice([1, 100_000]))
            await trio.sleep(rng.choice([1, 100]))
        elif kind == "legacy":
            await deaf_legacy_stream(web, [call("give", id) for id in range(5)])
            await trio.sleep(rng.choice([1, 100]))
        else:
            asked = {"notifications": {"resourceSubscriptions": [f"note://{'x' * rng.choice([1, 5000])}"]}}
            await web.open(web.request("subscriptions/listen", asked))
            await trio.sleep(rng.choice([1, 100]))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 30))])
async def test_after_any_lives_nothing_is_held(seed: int, autojump_clock: MockClock) -> None:
    rng = random.Random(seed)
    store = Store(session_idle_seconds=60, write_seconds=30)
    streams = rng.choice([narrow, lambda: pipe_pair(1 << 20)])
    async with shared(store, *"abc", streams=streams, **LEGACY, check=False) as webs:

        async def lives(web: HttpClient) -> None:
            for _ in range(6):
                own = HttpClient(web.connect, host=str(web.headers["Host"]), headers=web.headers, check=False)
                with contextlib.suppress(Exception):
                    await live(own, rng)
                await own.aclose()

        async with trio.open_nursery() as nursery:
            for web in webs:
                nursery.start_soon(lives, web)
        store.let_go.set()
        await trio.sleep(1000)
        now = store.server.statistics()
        assert (now.bytes, now.running, now.connections, now.listeners) == (0, 0, 0, 0)
