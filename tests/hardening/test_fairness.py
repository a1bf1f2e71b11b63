"""Fair shares between clients: no client can use up a resource that all clients need, and calls take turns.

A client is a principal, or an address if it has no principal.  Most clients here are principals, because streams in
memory have no address.  The rule is the same for both.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import Answer, HttpClient
from tests.http.served import by_token, listening, served
from tests.http.test_asgi import posted
from tests.http.ws import CONTINUED, PING, TEXT, frame, upgrade_request
from tests.requirements import req
from tests.server.raw_client import LATEST, ErrorResponse, connected
from trio_mcp import Context, Limits, Server
from trio_mcp.asgi import AsgiApp
from trio_mcp.core import Role
from trio_mcp.core.http import Headers
from trio_mcp.server import Threads
from trio_mcp.server.threads import _ThreadPlace  # only its two methods can run in one tick of the loop

OLD = "2025-11-25"
LONG = b"x" * 200_000


class ServerUnderTest:
    """A server with tools that wait for an event, and tools that answer at once."""

    def __init__(self, *, threads: int = 40, **limits: Any) -> None:
        self.server = Server("tested", limits=Limits(**limits), threads=threads)
        self.let_go = trio.Event()
        self.thread = threading.Event()
        self.working = 0

        @self.server.tool
        async def wait() -> str:
            self.working += 1
            await self.let_go.wait()
            return "waited"

        @self.server.tool
        async def echo(text: str = "") -> str:
            return f"{len(text)} characters"

        @self.server.tool
        def block() -> str:
            self.working += 1
            self.thread.wait(60)
            return "blocked"

        @self.server.tool(thread=True)
        def quick() -> str:
            return "quick"

        @self.server.tool
        async def ask(ctx: Context) -> str:
            await ctx.elicit("Sure?", {"type": "object", "properties": {"x": {"type": "string"}}})
            return "asked"

        @self.server.resource("note://{name}")
        async def note(name: str) -> str:
            return name

    @property
    def held(self) -> int:
        return self.server.statistics().bytes


@contextlib.asynccontextmanager
async def shared(tested: ServerUnderTest, *names: str, **options: Any) -> AsyncIterator[list[HttpClient]]:
    """A client for each of these principals."""
    async with served(tested.server, authenticate=by_token, **options) as web, contextlib.AsyncExitStack() as stack:
        webs = [
            HttpClient(web.connect, host=str(web.headers["Host"]), headers={"Authorization": f"Bearer {name}"})
            for name in names
        ]
        for each in webs:
            await stack.enter_async_context(contextlib.aclosing(each))
        yield webs


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a thread has made the condition true."""
    with trio.fail_after(30):
        while not condition():
            await trio.lowlevel.checkpoint()


async def tool(web: HttpClient, name: str, arguments: Any = None, **how: Any) -> Answer:
    return await web.call("tools/call", {"name": name, "arguments": arguments or {}}, **how)


def why(answer: Answer) -> str:
    text: str = json.loads(answer.body)["error"]["message"]
    return text


# Bodies.


def head(web: HttpClient, size: int) -> bytes:
    lines = (
        "POST /mcp HTTP/1.1", f"Host: {web.headers['Host']}", f"Authorization: {web.headers['Authorization']}",
        "Content-Type: application/json", "Accept: application/json, text/event-stream", f"Content-Length: {size}",
        f"MCP-Protocol-Version: {LATEST}", "Mcp-Method: ping", "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode()


async def test_incomplete_bodies_do_not_block_other_clients(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(bytes_in_all=2_000_000)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        links = [await mallory.link() for _ in range(16)]
        for link in links:
            await link.stream.send_all(head(mallory, 200_000) + LONG[1:])
            await wait_all_tasks_blocked()
        began = trio.current_time()
        assert tested.held == 7 * 199_999  # three quarters, and no more
        assert b"503" in await links[-1].stream.receive_some()
        answer = await tool(ann, "echo", {"text": "x" * 300_000})
        assert answer.result["content"][0]["text"] == "300000 characters"
        # Incomplete bodies are not held for long.
        assert b"408" in await links[0].stream.receive_some()
        assert trio.current_time() - began <= 30
        await trio.sleep(1)
        assert tested.held == 0


async def websocket_of(web: HttpClient) -> trio.abc.Stream:
    stream = (await web.link()).stream
    asked = upgrade_request(Authorization=web.headers["Authorization"], Host=str(web.headers["Host"]))
    await stream.send_all(asked)
    assert b" 101 " in await stream.receive_some()
    return stream


async def test_incomplete_websocket_messages_do_not_block_other_clients(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(bytes_in_all=2_000_000)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        streams = [await websocket_of(mallory) for _ in range(12)]
        for stream in streams:
            await stream.send_all(frame(Role.SERVER, TEXT, LONG, fin=False))
            await wait_all_tasks_blocked()
        began = trio.current_time()
        assert tested.held == 7 * 200_000
        assert int.from_bytes((await streams[-1].receive_some())[2:4]) == 1013
        assert (await tool(ann, "echo", {"text": "x" * 300_000})).status == 200
        # A ping does not count as progress of the message.
        for _ in range(6):
            await trio.sleep(4)
            with contextlib.suppress(trio.BrokenResourceError):
                await streams[0].send_all(frame(Role.SERVER, PING) + frame(Role.SERVER, CONTINUED, b"x", fin=False))
        said = b""
        while data := await streams[0].receive_some():
            said += data
        assert int.from_bytes(said[said.index(b"\x88") + 2 :][:2]) == 1008
        assert trio.current_time() - began <= 31
        await trio.sleep(20)
        assert tested.held == 0


async def test_an_incomplete_line_on_a_socket_has_a_time_limit() -> None:
    """A pipe has no such limit: it belongs to the program that has started the server, which may be slow."""
    server = ServerUnderTest(body_seconds=0.05).server
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    from trio_mcp import serve_stream

    async def serve() -> None:
        await serve_stream(server, await listeners[0].accept())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        client = await trio.open_tcp_stream(*listeners[0].socket.getsockname()[:2])
        with trio.fail_after(30):
            await client.send_all(b'{"jsonrpc":"2.0"')
            with contextlib.suppress(trio.BrokenResourceError):
                while await client.receive_some():
                    pass
        await client.aclose()
    await listeners[0].aclose()


# Sessions.


async def test_sessions_of_one_client_do_not_end_those_of_another(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(sessions=8)
    async with shared(tested, "mallory", "ann", "bob") as (mallory, ann, bob):
        hers = await ann.initialize(OLD)
        opened = [await mallory.initialize(OLD) for _ in range(30)]
        assert (await tool(ann, "echo", session=hers)).status == 200
        assert (await tool(mallory, "echo", session=opened[0])).status == 404  # its own oldest sessions have made room
        assert (await tool(mallory, "echo", session=opened[-1])).status == 200
        his = await bob.initialize(OLD)
        assert (await tool(bob, "echo", session=his)).status == 200
        assert tested.server.statistics().connections == 7


async def test_sessions_in_use_are_limited_to_a_share(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(sessions=8)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        for _ in range(6):
            session = await mallory.initialize(OLD)
            await mallory.open(session=session)
        refused = await mallory.call("initialize", {**OPENING, "protocolVersion": OLD}, revision=OLD)
        assert refused.status == 503
        assert "Limits.sessions" in why(refused)
        await ann.initialize(OLD)


OPENING = {"capabilities": {}, "clientInfo": {"name": "client", "version": "1"}}


# Calls.


async def test_calls_of_one_client_leave_room_for_others(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(calls_in_all=8)
    async with shared(tested, "mallory", "ann") as (mallory, ann), trio.open_nursery() as nursery:
        answers: list[Answer] = []

        async def flood() -> None:
            answers.append(await tool(mallory, "wait"))

        for _ in range(20):
            nursery.start_soon(flood)
        await wait_all_tasks_blocked()
        now = tested.server.statistics()
        assert (now.running, len(answers)) == (6, 14)
        assert all("Limits.calls_in_all" in why(answer) for answer in answers)
        assert (await tool(ann, "echo")).status == 200
        # When some of its calls have ended, the client may call again.
        tested.let_go.set()
        await wait_all_tasks_blocked()
        assert (await tool(mallory, "echo")).status == 200
        assert tested.working == 6
        nursery.cancel_scope.cancel()


async def test_calls_of_many_websockets_leave_room_for_others(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(calls_in_all=20)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        meta = {"io.modelcontextprotocol/protocolVersion": LATEST, "io.modelcontextprotocol/clientCapabilities": {}}
        for _ in range(4):
            stream = await websocket_of(mallory)
            for id in range(100):
                params = {"name": "wait", "arguments": {}, "_meta": meta}
                text = json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
                await stream.send_all(frame(Role.SERVER, TEXT, text.encode()))
        await wait_all_tasks_blocked()
        assert tested.server.statistics().running == 15
        assert (await tool(ann, "echo")).status == 200


async def test_abandoned_threads_count_for_their_own_client_only() -> None:
    tested = ServerUnderTest(threads=4)
    try:
        async with shared(tested, "mallory", "ann") as (mallory, ann):
            async with trio.open_nursery() as nursery:
                for _ in range(40):
                    nursery.start_soon(tool, mallory, "block")
                await wait_until(lambda: tested.working == 3)
                nursery.cancel_scope.cancel()
            await mallory.aclose()
            with trio.fail_after(30):
                answer = await tool(ann, "quick")
                assert answer.result["content"][0]["text"] == "quick"
            assert tested.working == 3
    finally:
        tested.thread.set()


async def test_a_waiting_call_gets_its_thread_and_a_cancelled_one_does_not() -> None:
    tested = ServerUnderTest(threads=2)
    try:
        async with shared(tested, "ann") as (ann,), trio.open_nursery() as nursery:
            with trio.CancelScope() as given_up:
                nursery.start_soon(tool, ann, "block")
                await wait_until(lambda: tested.working == 1)
                given_up.cancel()
            with trio.move_on_after(0.05):
                await tool(ann, "quick")
                raise AssertionError("one thread is its share of two")
            done: list[Answer] = []

            async def quick() -> None:
                done.append(await tool(ann, "quick"))

            nursery.start_soon(quick)
            await trio.sleep(0.05)
            assert not done
            tested.thread.set()
            await wait_until(lambda: bool(done))
    finally:
        tested.thread.set()


async def test_a_free_thread_passes_from_a_cancelled_call_to_the_next() -> None:
    threads, given_up = Threads(1), trio.CancelScope()
    held = _ThreadPlace(threads._places, threads._turns, "ann")
    await held.acquire_on_behalf_of(None)
    began: list[str] = []

    async def call(name: str) -> None:
        await threads.run(lambda: began.append(name), name, abandon_on_cancel=False)

    async def call_and_give_up() -> None:
        with given_up:
            await call("bob")

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for each in (call_and_give_up, partial(call, "cid")):
                nursery.start_soon(each)
                await wait_all_tasks_blocked()
            given_up.cancel()
            held.release_on_behalf_of(None)  # bob's turn, but bob's task has not run since its cancellation
    assert began == ["cid"]


async def test_calls_of_clients_without_an_address_have_one_rate(autojump_clock: MockClock) -> None:
    async with served(ServerUnderTest(call_rate=2).server) as web:  # each request has its own account
        codes = [(await web.call("tools/list")).code for _ in range(3)]
        assert codes == [None, None, -32603]
        session = await web.initialize(OLD)  # like a stream, a session has its own rate
        codes = [(await web.call("tools/list", session=session)).code for _ in range(3)]
        assert codes == [None, None, -32603]


# Subscriptions and questions.


def listening_to(web: HttpClient, *uris: str) -> Any:
    return web.request("subscriptions/listen", {"notifications": {"resourceSubscriptions": list(uris)}})


@pytest.mark.parametrize(
    ("limits", "name", "length"),
    [({"subscriptions": 40}, "Limits.subscriptions", 1), ({"bytes_in_all": 40_000}, "Limits.bytes_in_all", 2000)],
)
async def test_subscriptions_are_shared_by_number_and_by_bytes(
    limits: dict[str, int], name: str, length: int, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest(**limits)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        for number in range(40):
            stream = await mallory.open(listening_to(mallory, f"note://{number}{'x' * length}"))
            message = await stream.message()
            if "error" in message:
                assert name in message["error"]["message"]
                break
        else:
            raise AssertionError("there was no limit")
        stream = await ann.open(listening_to(ann, f"note://ann{'x' * length}"))
        assert (await stream.message())["method"] == "notifications/subscriptions/acknowledged"
    await wait_all_tasks_blocked()
    assert tested.held == 0


async def test_open_questions_of_clients_at_one_address_are_limited_to_a_share(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(parked=8)
    app = AsgiApp(tested.server, allowed_hosts=["127.0.0.1"])

    async def asked(address: str) -> str:
        message = HttpClient(None).request("tools/call", {"name": "ask"}, capabilities={"elicitation": {}})  # type: ignore[arg-type]
        scope, events = posted(message)
        await app({**scope, "client": (address, 1)}, events.receive, events.send)
        said = json.loads(events.body)
        kind: str = said["result"]["resultType"] if "requestState" in said.get("result", ()) else "refused"
        return kind

    async with app.running():
        said = [await asked("10.0.0.1") for _ in range(9)]
        assert said == ["input_required"] * 6 + ["refused"] * 3
        assert await asked("10.0.0.2") == "input_required"
        assert await asked("2001:db8::1") == "input_required"
        assert await asked("2001:db8::2") == "refused"  # of the same network


# Connections.


async def test_an_idle_connection_is_closed_for_a_new_client(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(connections=8)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        silent = [await mallory.link() for _ in range(8)]
        for link in silent[:4]:
            await link.ask("GET", "/nowhere", {"Host": "localhost"})
            await link.head()
            await link.body()
        await wait_all_tasks_blocked()
        began = trio.current_time()
        assert (await tool(ann, "echo")).status == 200
        assert trio.current_time() == began
        closed = []
        for number, link in enumerate(silent):
            with trio.move_on_after(0.001):
                if not await link.stream.receive_some():
                    closed.append(number)
        assert closed == [4]  # the connection that was silent for the longest time


async def test_busy_connections_are_limited_to_a_share_of_their_address() -> None:
    """Linux has a whole network of loopback addresses."""
    tested = ServerUnderTest(connections=8)
    async with listening(tested.server) as web:
        port = int(str(web.headers["Host"]).rpartition(":")[2])
        mine = []
        for _ in range(8):
            mine.append(await web.connect())
            await mine[-1].send_all(b"GET ")  # the head does not end
        with trio.fail_after(30):
            for stream in mine[6:]:
                assert b" 503 " in await stream.receive_some()
            other = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
            await other.send_all(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 404 " in await other.receive_some()
        for stream in (*mine, other):
            await stream.aclose()


# Rates.


async def test_a_guess_of_credentials_is_counted_before_the_authentication(autojump_clock: MockClock) -> None:
    asked: list[str | None] = []

    async def authenticate(request: Any) -> str | None:
        token = request.headers.get("Authorization")
        asked.append(token)
        return "ann" if token == "Bearer right" else None

    tested = ServerUnderTest(request_rate=5)
    async with served(tested.server, authenticate=authenticate) as web:
        statuses = [
            (await web.call("tools/list", headers={"Authorization": f"Bearer {guess}"})).status for guess in range(300)
        ]
        assert (statuses.count(401), statuses.count(429), len(asked)) == (5, 295, 5)
        # A client with the right credentials is counted as a principal, not as a client of its address.
        await trio.sleep(60)
        right = {"Authorization": "Bearer right"}
        for _ in range(10):
            assert (await web.call("tools/list", headers=right)).status == 200
            assert (await web.call("tools/list", headers={"Authorization": "Bearer wrong"})).status == 401
            await trio.sleep(1)


CALLS = {
    "tools/call": {"name": "echo", "arguments": {}},
    "tools/list": {},
    "resources/read": {"uri": "note://a"},
    "completion/complete": {
        "ref": {"type": "ref/resource", "uri": "note://{name}"}, "argument": {"name": "name", "value": ""},
    },
}  # fmt: skip


@req("tool-07", "cmpl-02")
@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("transport", ["stream", "http", "session", "websocket", "asgi"])
async def test_calls_have_a_rate_limit_on_each_transport(
    transport: str, method: str, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest(call_rate=3)

    @tested.server.completion("note://{name}", "name")
    async def names(value: str) -> list[str]:
        return ["a"]

    async def one(call: Any) -> int | None:
        """The code of the error, or None for a result."""
        try:
            answer = await call(method, CALLS[method])
        except ErrorResponse as error:
            return error.code if "Limits.call_rate" in str(error) else 0
        return answer.code if isinstance(answer, Answer) else None

    async with caller_on(tested, transport) as call:
        assert [await one(call) for _ in range(5)] == [None] * 3 + [-32603] * 2
        await trio.sleep(1 / 3 + 0.001)
        assert [await one(call) for _ in range(2)] == [None, -32603]


@contextlib.asynccontextmanager
async def caller_on(tested: ServerUnderTest, transport: str) -> AsyncIterator[Any]:
    """A function that makes one call on this transport."""
    if transport in ("stream", "websocket"):
        from tests.http.ws import websocket

        how = connected(tested.server, LATEST) if transport == "stream" else websocket(tested.server, LATEST)
        async with how as wires:
            yield (wires[0] if isinstance(wires, tuple) else wires).call
    elif transport == "asgi":
        app = AsgiApp(tested.server, allowed_hosts=["127.0.0.1"])

        async def call(method: str, params: Any) -> Any:
            scope, events = posted(HttpClient(None).request(method, params))  # type: ignore[arg-type]
            await app({**scope, "client": ("10.0.0.1", 1)}, events.receive, events.send)
            return Answer(events.status, Headers(events.sent[0]["headers"]), events.body, ())

        async with app.running():
            yield call
    else:
        async with shared(tested, "ann") as (web,):
            session = await web.initialize(OLD) if transport == "session" else None

            async def by_http(method: str, params: Any) -> Answer:
                return await web.call(method, params, session=session)

            yield by_http


# Room among many sessions in use.


@pytest.mark.parametrize("owner", ["its own", "of others"])
async def test_an_idle_session_is_found_among_many_sessions_in_use(owner: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(sessions=160 if owner == "its own" else 200)
    async with shared(tested, "mallory", "ann") as (mallory, ann):
        other = mallory if owner == "its own" else ann
        for _ in range(105):
            session = await other.initialize(OLD)
            if owner == "its own":
                await other.open(session=session)
        for _ in range(60 if owner == "its own" else 90):
            asked = await mallory.call("initialize", {**OPENING, "protocolVersion": OLD}, revision=OLD)
            assert asked.status == 200
