"""The weight of a message: its bytes, and the Python objects that its values become.

A text of some hundred bytes may hold as many objects, each of a hundred bytes.  So messages that are held for a client
are charged by their weight, and not by their length.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.attacks.output import quick_frame
from tests.client.matrix import Variant, client_of, each_transport
from tests.hardening.test_fairness import OLD, ServerUnderTest, head, shared, websocket_of
from tests.hardening.test_output import META, unread_legacy_stream
from tests.http.test_asgi import posted
from tests.http.ws import CONTINUED, PING, TEXT, frame
from tests.server.checkpoints import pipe_pair
from tests.server.raw_client import connected
from trio_mcp import Context, Limits, RequestError, Server, serve_stream
from trio_mcp.asgi import AsgiApp
from trio_mcp.core import Listeners, Notification, Peer, Request, Role, Subscriptions, resource_updated
from trio_mcp.errors import ClientError
from trio_mcp.types import SamplingRequest

MIB = 1024 * 1024
SSE = {"sse_path": "/sse", "message_path": "/messages"}


class HoldingServer(ServerUnderTest):
    """A server with a tool that holds its arguments."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**{"bytes_each": MIB, "bytes_in_all": 16 * MIB, **limits})

        @self.server.tool
        async def keep(items: list[Any]) -> str:
            self.working += 1
            await self.let_go.wait()
            return "kept"


# The arguments, how often they are sent, and how many of these requests fit into one MiB.
HEAVY: dict[str, tuple[str, int, range]] = {
    "many values": (json.dumps([[]] * 1000), 20, range(3, 8)),
    "many members": (json.dumps([{"": 1}] * 1000), 20, range(3, 8)),
    "some values": (json.dumps([[]] * 200), 100, range(20, 60)),
    "values in a text": (json.dumps(["[{," * 4000]), 40, range(40, 41)),
    "wide characters": (json.dumps(["x" * 100_000 + "\U0001f600"], ensure_ascii=False), 20, range(2, 4)),
    "escaped wide characters": (json.dumps(["x" * 100_000 + "\U0001f600"]), 20, range(2, 4)),
    "characters of two bytes": (json.dumps(["x" * 100_000 + "\u20ac"]), 20, range(4, 7)),
}


def call(id: int, items: str) -> bytes:
    params = {"name": "keep", "arguments": {"items": "@"}, "_meta": META}
    message = {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}
    return json.dumps(message).replace('"@"', items).encode()


async def by_stream(tested: HoldingServer, calls: list[bytes], nursery: trio.Nursery) -> None:
    ours, theirs = pipe_pair(MIB)
    nursery.start_soon(serve_stream, tested.server, theirs)
    await ours.send_all(b"\n".join((*calls, b"")))


async def by_websocket(tested: HoldingServer, calls: list[bytes], nursery: trio.Nursery) -> None:
    async with client_in(tested, nursery) as web:
        stream = await websocket_of(web)
        for each in calls:
            await stream.send_all(quick_frame(each))


async def by_legacy_stream(tested: HoldingServer, calls: list[bytes], nursery: trio.Nursery) -> None:
    async with client_in(tested, nursery) as web:
        await unread_legacy_stream(web, calls)


async def by_session(tested: HoldingServer, calls: list[bytes], nursery: trio.Nursery) -> None:
    async with client_in(tested, nursery) as web:
        session = await web.initialize(OLD)
        for each in calls:
            message = json.loads(each)
            del message["params"]["_meta"]
            nursery.start_soon(post, web, message, session)


async def post(web: Any, message: Any, session: str) -> None:
    await web.post(message, revision=OLD, session=session)


@contextlib.asynccontextmanager
async def client_in(tested: HoldingServer, nursery: trio.Nursery) -> AsyncIterator[Any]:
    """A client of a server that runs until the nursery ends."""
    ready = trio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with shared(tested, "mallory", **SSE) as (web,):
            found.append(web)
            ready.set()
            await trio.sleep_forever()

    nursery.start_soon(serve)
    await ready.wait()
    yield found[0]


TRANSPORTS: dict[str, Callable[[HoldingServer, list[bytes], trio.Nursery], Awaitable[None]]] = {
    "stream": by_stream,
    "websocket": by_websocket,
    "HTTP+SSE": by_legacy_stream,
    "session": by_session,
}


@pytest.mark.parametrize("arguments", HEAVY)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_request_is_charged_for_its_values(transport: str, arguments: str, autojump_clock: MockClock) -> None:
    items, count, fit = HEAVY[arguments]
    tested = HoldingServer(streams=200)
    async with trio.open_nursery() as nursery:
        await TRANSPORTS[transport](tested, [call(id, items) for id in range(count)], nursery)
        await wait_all_tasks_blocked()
        assert tested.working in fit
        tested.let_go.set()
        await wait_all_tasks_blocked()
        assert tested.held == 0
        nursery.cancel_scope.cancel()


async def test_requests_on_asgi_are_charged_for_their_values(autojump_clock: MockClock) -> None:
    tested = HoldingServer(bytes_in_all=4 * MIB)
    app = AsgiApp(tested.server, allowed_hosts=["127.0.0.1"])
    items, _, _ = HEAVY["many members"]
    async with app.running(), trio.open_nursery() as nursery:
        for id in range(40):
            scope, events = posted(json.loads(call(id, items)))
            nursery.start_soon(app, {**scope, "client": ("10.0.0.1", 1)}, events.receive, events.send)
        await wait_all_tasks_blocked()
        assert tested.working in range(8, 18)
        tested.let_go.set()


# The data of an opening that is kept.


def opening(size: int) -> dict[str, Any]:
    capabilities = {"experimental": {"x": {"y": "x" * size}}}
    params = {"protocolVersion": OLD, "capabilities": capabilities, "clientInfo": {"name": "c", "version": "1"}}
    return {"jsonrpc": "2.0", "id": "i", "method": "initialize", "params": params}


async def test_capabilities_of_clients_are_charged_while_they_are_kept(autojump_clock: MockClock) -> None:
    tested = HoldingServer(bytes_in_all=4 * MIB)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        answers = [await mallory.post(opening(100_000), revision=OLD) for _ in range(60)]
        opened = [each for each in answers if "result" in each.json]
        assert len(opened) in range(25, 33)
        refused = [each.json["error"] for each in answers if "error" in each.json]
        assert {error["code"] for error in refused} == {-32603}
        assert all("Limits.bytes_in_all" in error["message"] for error in refused)
        assert tested.held > len(opened) * 100_000
        await ann.initialize(OLD)
        for each in opened:
            await mallory.end(each.headers["Mcp-Session-Id"])
        await wait_all_tasks_blocked()
        assert tested.held == 0


@pytest.mark.parametrize("transport", ["stream", "websocket"])
async def test_capabilities_of_the_client_of_a_stream_are_charged_until_its_end(
    transport: str, autojump_clock: MockClock
) -> None:
    tested = HoldingServer()
    data = json.dumps(opening(100_000)).encode()
    async with trio.open_nursery() as nursery:
        if transport == "stream":
            ours: trio.abc.Stream
            ours, theirs = pipe_pair(MIB)
            nursery.start_soon(serve_stream, tested.server, theirs)
            await ours.send_all(data + b"\n")
        else:
            async with client_in(tested, nursery) as web:
                ours = await websocket_of(web)
                await ours.send_all(frame(Role.SERVER, TEXT, data))
        assert b"result" in await ours.receive_some()
        await wait_all_tasks_blocked()
        assert tested.held > 100_000
        await ours.aclose()
        await trio.sleep(10)
        assert tested.held == 0
        nursery.cancel_scope.cancel()


# Messages that a client holds for its server.


@each_transport(revisions=[OLD], without=["child", "http json"])
async def test_the_bytes_of_waiting_questions_in_a_client_are_limited(
    variant: Variant, autojump_clock: MockClock
) -> None:
    server = Server("curious")
    free = trio.Event()
    refused: list[str] = []
    asking = 0

    @server.tool
    async def wonder(ctx: Context, size: int, times: int) -> str:
        async def ask() -> None:
            try:
                await ctx.sample("x" * size, max_tokens=9)
            except ClientError as error:
                refused.append(error.message)

        async with trio.open_nursery() as nursery:
            for _ in range(times):
                nursery.start_soon(ask)
        return "asked"

    async def think(request: SamplingRequest) -> tuple[str, str]:
        nonlocal asking
        asking += 1
        await free.wait()
        return "so", "a model"

    limits = Limits(bytes_each=MIB, questions=2)
    async with client_of(variant, server, sampling=think, limits=limits) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "wonder", {"size": 200_000, "times": 20})
        await wait_all_tasks_blocked()
        assert (asking, len(refused)) == (2, 15)
        assert all("Limits.bytes_each" in why for why in refused)
        free.set()
        await wait_all_tasks_blocked()
        assert asking == 5
        # A single question may be as long as a message.
        refused.clear()
        await client.call_tool("wonder", {"size": 2_000_000, "times": 1})
        assert (asking, refused) == (6, [])


@each_transport(revisions=[OLD, "2026-07-28"], without=["child", "http json"])
async def test_the_bytes_of_waiting_progress_in_a_client_are_limited(
    variant: Variant, autojump_clock: MockClock
) -> None:
    server = Server("chatty")
    heard: list[float] = []
    free = trio.Event()

    @server.tool
    async def chat(ctx: Context) -> str:
        for number in range(100):
            await ctx.progress(number, message="x" * 100_000)
        return "said"

    async def slow(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)
        await free.wait()

    async with client_of(variant, server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.call_tool, "chat", on_progress=slow))
        await wait_all_tasks_blocked()
        free.set()
        await wait_all_tasks_blocked()
        assert len(heard) in range(2, 14)
        assert heard[-1] == 99


# Logs for replay.


async def test_events_without_content_are_charged(autojump_clock: MockClock) -> None:
    """Even an empty event takes some hundred bytes, and a session may have a thousand of them."""
    tested = HoldingServer(bytes_in_all=80_000)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        session = await mallory.initialize(OLD)
        for _ in range(60):
            message = mallory.request("tools/call", {"name": "echo", "arguments": {}}, revision=OLD)
            stream = await mallory.open(message, session=session, headers={"Accept": "text/event-stream"})
            await stream.message()
            await stream.response()
        assert tested.held in range(55_000, 60_001)
        assert (await ann.post(opening(5000), revision=OLD)).status == 200


# Progress of incomplete messages.


@pytest.mark.parametrize("kind", ["pings", "empty pieces", "chunk extensions"])
async def test_bytes_around_a_message_do_not_count_as_its_progress(kind: str, autojump_clock: MockClock) -> None:
    """If pings or long chunk extensions counted as progress, a client could hold 16 MiB without a time limit."""
    tested = HoldingServer(body_rate=64)
    async with shared(tested, "mallory") as (web,):
        if kind == "chunk extensions":
            stream = (await web.link()).stream
            head_of_it = head(web, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            await stream.send_all(head_of_it + b"%x\r\n" % 5000 + b"x" * 5000 + b"\r\n")
            noise = (b"1;" + b"x" * 8 + b"\r\nx\r\n") * 3
        else:
            stream = await websocket_of(web)
            await stream.send_all(frame(Role.SERVER, TEXT, b"x" * 5000, fin=False))
            noise = frame(Role.SERVER, PING) if kind == "pings" else frame(Role.SERVER, CONTINUED, fin=False)
        await wait_all_tasks_blocked()
        assert tested.held == 5000
        began = trio.current_time()
        with contextlib.suppress(trio.BrokenResourceError):
            while tested.held and trio.current_time() < began + 300:
                await trio.sleep(1)
                await stream.send_all(noise * (100 // len(noise) + 1))
        assert trio.current_time() - began < 62


# Short answers.


async def test_short_unread_answers_are_charged(autojump_clock: MockClock) -> None:
    """A connection may have 5,000 open calls, so answers of 4 KB are 20 MB."""
    tested = HoldingServer(bytes_in_all=400_000)

    @tested.server.tool
    async def give() -> str:
        return "x" * 1000

    params = {"name": "give", "arguments": {}, "_meta": META}
    calls = [{"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params} for id in range(100)]
    async with shared(tested, "mallory", "ann", streams=partial(pipe_pair, 100)) as (mallory, ann):
        streams = [await websocket_of(mallory) for _ in range(5)]
        for stream in streams:
            await stream.send_all(b"".join(quick_frame(json.dumps(each).encode()) for each in calls))
        await wait_all_tasks_blocked()
        assert tested.held in range(200_000, 300_001)
        assert "result" in (await ann.call("tools/call", {"name": "give", "arguments": {}})).json
        for stream in streams:
            await stream.aclose()
        await wait_all_tasks_blocked()
        assert tested.held == 0


# Roots.


@each_transport(revisions=[OLD], without=["child", "http json"])
async def test_many_roots_are_not_kept_for_a_session(variant: Variant, autojump_clock: MockClock) -> None:
    server = Server("curious")
    asked = 0

    @server.tool
    async def count(ctx: Context) -> int:
        return len(await ctx.roots())

    def roots() -> list[str]:
        nonlocal asked
        asked += 1
        return [f"file:///home/{number:0100}" for number in range(many)]

    for many, times in ((3, 1), (300, 2)):
        asked = 0
        async with client_of(variant, server, roots=roots) as client:
            assert [await client.call_tool("count", returns=int) for _ in range(2)] == [many, many]
        assert asked == times


def test_queued_messages_use_little_more_memory_than_their_bytes() -> None:
    """Only the core runs here, so that other memory is not counted."""
    peer = Peer(Role.SERVER)
    for id in range(100):
        peer.receive(Request(id, "tools/call"), 0)
    text = "x" * 10_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for id in range(50):
            peer.answer(id, {"content": [text + str(id)]})
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 50 * 11_000
        for id in range(50, 100):
            peer.refuse(id, RequestError(-32603, "too much"))
        errors, _ = tracemalloc.get_traced_memory()
        assert errors - after < 50 * 1200
    finally:
        tracemalloc.stop()
    assert len(peer.outgoing()) == 100


# Incomplete requests.


async def test_a_body_in_small_pieces_uses_little_more_memory_than_its_bytes(autojump_clock: MockClock) -> None:
    app = AsgiApp(Server("empty", limits=Limits(body_seconds=math.inf)), allowed_hosts=["127.0.0.1"])
    scope, _ = posted({"jsonrpc": "2.0", "id": 1, "method": "ping"})
    pieces = 3000

    async def receive() -> dict[str, Any]:
        nonlocal pieces
        await trio.lowlevel.checkpoint()
        pieces -= 1
        if pieces:
            return {"type": "http.request", "body": b"%02d" % (pieces % 100), "more_body": True}
        sizes.append(tracemalloc.get_traced_memory()[0])
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        raise AssertionError("the client has disconnected")

    sizes: list[int] = []
    async with app.running():
        tracemalloc.start()
        try:
            sizes.append(tracemalloc.get_traced_memory()[0])
            await app(scope, receive, send)
        finally:
            tracemalloc.stop()
    assert sizes[1] - sizes[0] < 60_000


async def test_an_incomplete_head_is_charged(autojump_clock: MockClock) -> None:
    tested = HoldingServer(bytes_in_all=400_000)
    async with shared(tested, "mallory", streams=partial(pipe_pair, MIB)) as (web,):
        links = [await web.link() for _ in range(8)]
        for link in links:
            await link.stream.send_all(b"GET /mcp HTTP/1.1\r\nX: " + b"x" * 60_000)
            await wait_all_tasks_blocked()
        assert tested.held in range(300_000, 400_001)
        assert b" 503 " in await links[-1].stream.receive_some()
        await trio.sleep(11)
        assert tested.held == 0


async def test_few_bytes_are_read_behind_a_running_request(autojump_clock: MockClock) -> None:
    tested = HoldingServer()
    async with shared(tested, "mallory", streams=partial(pipe_pair, 1000)) as (web,):
        link = await web.link()
        message = web.request("tools/call", {"name": "wait", "arguments": {}})
        fields = {**web.headers, **web.headers_for(message, "2026-07-28", None)}
        await link.ask("POST", "/mcp", fields, json.dumps(message).encode())
        await wait_all_tasks_blocked()
        sent = 0
        with trio.move_on_after(1):
            while sent < 60_000:
                await link.stream.send_all(b"x" * 100)
                sent += 100
        assert sent < 8000


# Work for a refusal.


@pytest.mark.parametrize("side", ["server", "client"])
def test_refusing_a_large_subscription_takes_little_work(side: str) -> None:
    """Only the core runs, and calls of functions are counted.  A search for each of 190,000 URIs took half a second."""
    uris = [f"note://{number}" for number in range(2000)]
    request = Request(1, "subscriptions/listen", {"notifications": {"resourceSubscriptions": uris}})
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    subscriptions, listeners = Subscriptions(), Listeners[str](Limits())
    subscription = subscriptions.ask(1, [resource_updated("note://7")])
    sys.setprofile(count)
    try:
        if side == "server":
            with pytest.raises(RequestError, match="one listener may ask for 1000 changes"):
                listeners.listen("a", request, {"resources": {"subscribe": True}})
        else:
            params = {**request.params, "_meta": {"io.modelcontextprotocol/subscriptionId": 1}}
            subscriptions.receive(Notification("notifications/subscriptions/acknowledged", params))
    finally:
        sys.setprofile(None)
    assert calls < 3 * len(uris)
    if side == "client":
        assert subscription.agreed == (resource_updated("note://7"),)


# A request and its answer.


@pytest.mark.parametrize("transport", ["stream", "session"])
async def test_the_bytes_of_a_request_are_free_for_its_answer(transport: str, autojump_clock: MockClock) -> None:
    """Otherwise the client would get an error although the work was done."""
    tested = HoldingServer(bytes_each=100_000)

    @tested.server.tool
    async def repeat(text: str) -> str:
        return text

    params = {"name": "repeat", "arguments": {"text": "x" * 70_000}}
    if transport == "stream":
        async with connected(tested.server, OLD) as wire:
            answer = await wire.call("tools/call", params)
    else:
        async with shared(tested, "ann") as (web,):
            answer = (await web.call("tools/call", params, session=await web.initialize(OLD))).result
    assert len(answer["content"][0]["text"]) == 70_000
    assert tested.held == 0


# Progress and logs that are kept for a client that does not read.


async def test_the_bytes_of_kept_progress_and_logs_of_a_call_are_limited(autojump_clock: MockClock) -> None:
    tested = HoldingServer(outgoing=2, bytes_each=16 * MIB)
    sizes: list[int] = []

    @tested.server.tool
    async def talk(ctx: Context) -> str:
        await ctx.progress(0, message="x" * 2000)
        await ctx.progress(1)
        await ctx.progress(2)
        tracemalloc.start()
        try:
            for number in range(100):
                await ctx.log("error", f"{number}" + "x" * 3000)
                await ctx.progress(3 + number, message=f"{number}" + "x" * 100_000)
            sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        return "said"

    ours, theirs = pipe_pair(100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, tested.server, theirs)
        meta = {**META, "progressToken": 1, "io.modelcontextprotocol/logLevel": "debug"}
        params = {"name": "talk", "arguments": {}, "_meta": meta}
        await ours.send_all(
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode() + b"\n"
        )
        await trio.sleep(100)
        assert sizes[0] < 40_000
        said = b""
        while b'"result"' not in said:
            said += await ours.receive_some()
        texts = [json.loads(line) for line in said.split(b"\n")[:-1]]
        assert (
            max(each["params"]["progress"] for each in texts if "params" in each and "progress" in each["params"])
            == 102
        )
        await ours.aclose()
