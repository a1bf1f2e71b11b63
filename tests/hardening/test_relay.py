"""A relay: clients see nothing of each other's sessions with the upstream server, and a dead server is replaced."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.attacks.relay import CASES, Case, attack
from tests.client.matrix import serve_over, tcp_connects_to
from tests.client.memory_links import Peer
from tests.client.sample_server import sample_server
from tests.http.scripted_server import A, D, E
from tests.http.served import MemoryListener, bearer, by_token
from trio_mcp import Client, Context, Limits, RequestError, Server, open_client, serve_http, serve_stream
from trio_mcp.errors import SessionClosed
from trio_mcp.relay import open_relay

CONFIRM_FORM = {
    "message": "transfer?",
    "requestedSchema": {"type": "object", "properties": {"yes": {"type": "boolean"}}},
}


# The owners of sessions.


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_client_gets_no_messages_of_a_cancelled_call_of_another(case: Case) -> None:
    found = await attack(case)
    assert (found.asked, found.logged, found.roots) == ([], [], 0)
    assert not isinstance(found.answer.get("confirm"), dict)


class RunningRelay:
    """A relay of a server in this process, with a function that opens its clients."""

    def __init__(self, server: Server, url: Any, principals: bool) -> None:
        self._server = server
        self._url = url
        self._principals = principals

    @property
    def sessions(self) -> int:
        """The number of sessions with the upstream server."""
        return self._server.statistics().connections

    def client(self, name: str = "", revision: str = D, **options: Any) -> Any:
        if self._principals:
            options["headers"] = bearer(name)
        return open_client(self._url, revision=revision, **options)


@contextlib.asynccontextmanager
async def relay(
    transport: str, *, principals: bool = False, server: Server | None = None, **options: Any
) -> AsyncIterator[RunningRelay]:
    server = server or sample_server()
    http = {"authenticate": by_token} if principals else {}
    options = {"revision": D, **options}
    async with (
        server.running(),
        open_relay(server, **options) as shown,
        shown.running(),
        serve_over(transport, shown, **http) as url,
    ):
        yield RunningRelay(server, url, principals)


async def sessions_closed() -> None:
    """Wait until sessions are closed, which takes several steps with memory streams."""
    for _ in range(3):
        await wait_all_tasks_blocked()


@pytest.mark.parametrize("upstream", [D, E])
@pytest.mark.parametrize(
    ("transport", "revision_before"), [("http", D), ("http", E), ("websocket", E), ("http+sse", A)]
)
async def test_each_principal_has_one_session_with_the_upstream_server(
    transport: str, revision_before: str, upstream: str
) -> None:
    async with relay(transport, principals=True, revision=upstream) as relay_under_test:
        assert relay_under_test.sessions == 1  # the session that was opened at the start
        for connections in range(2):
            async with (
                relay_under_test.client("alice", revision_before) as one,
                relay_under_test.client("alice", revision_before) as again,
            ):
                for client in (one, again):
                    await client.call_tool("greet", {"name": "you"})
                assert relay_under_test.sessions == 1 + connections
            async with relay_under_test.client("bob", revision_before) as other:
                await other.call_tool("greet", {"name": "you"})
                assert relay_under_test.sessions == 2


@pytest.mark.parametrize(
    ("transport", "revision_before"), [("memory", D), ("memory", E), ("http", D), ("websocket", E), ("http+sse", A)]
)
async def test_each_connection_without_a_principal_has_its_own_session(transport: str, revision_before: str) -> None:
    async with relay(transport) as relay_under_test:
        for _ in range(2):
            async with (
                relay_under_test.client("", revision_before) as one,
                relay_under_test.client("", revision_before) as other,
            ):
                for client in (one, other):
                    await client.call_tool("greet", {"name": "you"})
                assert relay_under_test.sessions == 2
            await sessions_closed()
            assert relay_under_test.sessions == 0


async def test_requests_without_a_connection_share_one_session() -> None:
    async with (
        relay("http") as relay_under_test,
        relay_under_test.client("", E) as one,
        relay_under_test.client("", E) as other,
    ):
        for client in (one, other):
            await client.call_tool("greet", {"name": "you"})
        assert relay_under_test.sessions == 1


@pytest.mark.parametrize(("principals", "revision_before"), [(True, D), (True, E), (False, E)])
async def test_an_idle_session_is_closed_after_a_time(
    principals: bool, revision_before: str, autojump_clock: MockClock
) -> None:
    async with (
        relay("http", principals=principals) as relay_under_test,
        relay_under_test.client("alice", revision_before) as client,
    ):
        for _ in range(2):
            await client.call_tool("greet", {"name": "you"})
            await trio.sleep(1799)
            assert relay_under_test.sessions == 1
        await trio.sleep(2)
        assert relay_under_test.sessions == 0
        await client.call_tool("greet", {"name": "you"})
        assert relay_under_test.sessions == 1


@pytest.mark.parametrize("busy", ["a call", "a subscription", "a subscription to a list"])
async def test_a_session_in_use_is_not_idle(busy: str, autojump_clock: MockClock) -> None:
    async with relay("http", principals=True) as relay_under_test, relay_under_test.client("alice", E) as client:
        await client.call_tool("greet", {"name": "you"})
        await trio.sleep(1000)
        with trio.move_on_after(4000):
            if busy == "a call":
                await client.call_tool("hold", {"name": "x"})
            else:
                wanted: Any = {"tools": True} if "list" in busy else {"resources": "house://one"}
                async with client.listen(**wanted) as changes:
                    async for _ in changes:
                        pass
        assert relay_under_test.sessions == 1
        await trio.sleep(1801)
        assert relay_under_test.sessions == 0


@pytest.mark.parametrize(("transport", "revision_before"), [("memory", D), ("websocket", E), ("http+sse", A)])
async def test_a_connection_that_ends_during_a_call_leaves_no_session(
    transport: str, revision_before: str, autojump_clock: MockClock
) -> None:
    async def hold(client: Client) -> None:
        with pytest.raises(SessionClosed):
            await client.call_tool("hold", {"name": "x"})

    async with (
        relay(transport) as relay_under_test,
        relay_under_test.client("", revision_before) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(hold, client)
        await trio.sleep(1)
        assert relay_under_test.sessions == 1
        await client.aclose()
        await trio.sleep(1)
        assert relay_under_test.sessions == 0


async def test_a_request_that_outlives_its_connection_opens_no_session(autojump_clock: MockClock) -> None:
    async def late(ctx: Context, request: Any, call_next: Any) -> Any:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)
            return await call_next()

    async with relay("memory", middleware=[late]) as relay_under_test:
        async with relay_under_test.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(client.call_tool, "hold", {"name": "x"})
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        await trio.sleep(20)
        assert relay_under_test.sessions == 1  # the session that was opened at the start, and has no client yet


async def test_the_session_that_is_idle_for_the_longest_time_is_closed_for_room(autojump_clock: MockClock) -> None:
    server, links = sample_server(), list[Any]()

    @server.tool
    async def which(ctx: Context) -> int:
        """The number of the session."""
        if ctx._link not in links:
            links.append(ctx._link)
        return links.index(ctx._link)

    async with (
        relay("http", principals=True, server=server, limits=Limits(relayed=2)) as relay_under_test,
        trio.open_nursery() as nursery,
    ):

        async def call(name: str, tool: str = "which") -> Any:
            async with relay_under_test.client(name, E) as client:
                result = await client.call_tool(tool, {} if tool == "which" else {"name": name})
                await trio.sleep(1)
                return result.content[0].text

        names = ("alice", "bob", "alice", "carol", "alice", "bob")
        assert [await call(name) for name in names] == ["0", "1", "0", "2", "0", "3"]
        assert relay_under_test.sessions == 2
        for name in ("alice", "bob"):
            nursery.start_soon(call, name, "hold")
        await trio.sleep(1)
        with pytest.raises(RequestError, match=r"2 sessions .* are in use \(Limits.relayed\)"):
            await call("carol")
        nursery.cancel_scope.cancel()


async def test_sessions_of_the_same_address_are_closed_first_for_room() -> None:
    server, opened = sample_server(), list[Client]()
    async with (
        server.running(),
        open_relay(server, revision=D, limits=Limits(relayed=4)) as shown,
        shown.running(),
        trio.open_nursery() as nursery,
        contextlib.AsyncExitStack() as stack,
    ):
        at = await nursery.start(lambda task_status: serve_http(shown, "127.0.0.1", 0, task_status=task_status))

        async def open_client_at(address: str) -> Client:
            async def dial(host: str, port: int) -> trio.abc.Stream:
                return await connect(host, port, local_address=address)

            with mock.patch.object(trio, "open_tcp_stream", dial):
                client: Client = await stack.enter_async_context(open_client(at.local_url, revision=D))
                await client.call_tool("ledger")
            opened.append(client)
            return client

        connect = trio.open_tcp_stream
        other = await open_client_at("127.0.0.2")
        for _ in range(5):
            await open_client_at("127.0.0.1")
        assert server.statistics().connections == 3  # one place remains free for others, see `core.shares`
        sessions = {id(connection) for run in server._runs for connection in run.connections}
        await other.call_tool("ledger")
        assert sessions == {id(connection) for run in server._runs for connection in run.connections}
        await stack.aclose()
        nursery.cancel_scope.cancel()


# The owners of questions and log messages.


@contextlib.asynccontextmanager
async def relay_of_a_peer(
    transport: str, revision: str = D, *, principals: bool = False, **options: Any
) -> AsyncIterator[tuple[Peer, Callable[..., Any]]]:
    """A relay of one stream to a `Peer` of the test, and a function that opens clients of the relay."""
    ours, theirs = memory_stream_pair()
    peer = Peer(theirs, revision, {"tools": {}})
    http = {"authenticate": by_token} if principals else {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        async with (
            open_relay(ours, revision=revision, **options) as shown,
            shown.running(),
            serve_over(transport, shown, **http) as url,
        ):

            def client(name: str = "", revision: str = E, **options: Any) -> Any:
                headers = {"headers": bearer(name)} if principals else {}
                return open_client(url, revision=revision, **headers, **options)

            yield peer, client
        await theirs.aclose()


SHARED_SESSIONS = [
    ("http", False, E),
    ("http", True, D),
    ("http", True, E),
    ("websocket", False, E),
    ("memory", False, D),
]
each_shared_session = pytest.mark.parametrize(("transport", "principals", "revision_before"), SHARED_SESSIONS)


async def cancelled_call(peer: Peer, client: Client) -> Any:
    """Make a call that is cancelled.  The upstream server ignores the cancellation."""
    asked: Any = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "transfer")
        asked = await peer.take("tools/call")
        nursery.cancel_scope.cancel()
    await sessions_closed()
    peer.messages.clear()
    return asked


@each_shared_session
async def test_a_cancelled_call_in_a_shared_session_counts_until_its_answer(
    transport: str, principals: bool, revision_before: str
) -> None:
    seen: list[str] = []

    def answer(asked: Any) -> dict[str, bool]:
        seen.append(asked.message)
        return {"yes": True}

    options: Any = {"elicitation": answer}
    async with (
        relay_of_a_peer(transport, principals=principals) as (peer, client),
        client("alice", revision_before, **options) as alice,
        client("bob", revision_before, **options) as bob,
        trio.open_nursery() as nursery,
    ):
        await peer_answers(peer, bob)  # otherwise the stream would belong to alice alone
        ignored = await cancelled_call(peer, alice)
        nursery.start_soon(bob.call_tool, "wait")
        call = await peer.take("tools/call")
        await peer.send({"id": 5, "method": "elicitation/create", "params": CONFIRM_FORM})
        refused = await answer_to(peer, 5)
        assert "a call was cancelled, and the upstream server may still work on it" in refused["error"]["message"]
        assert seen == []
        await peer.answer(ignored, {"content": []})
        await peer.send({"id": 6, "method": "elicitation/create", "params": CONFIRM_FORM})
        assert (await answer_to(peer, 6))["result"]["content"] == {"yes": True}
        assert seen == ["transfer?"]
        await peer.answer(call, {"content": []})


async def peer_answers(peer: Peer, client: Client) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "nothing")
        await peer.answer(await peer.take("tools/call"), {"content": []})


async def answer_to(peer: Peer, id: int) -> Any:
    await sessions_closed()
    (answer,) = [message for message in peer.messages if message.get("id") == id]
    peer.messages.remove(answer)
    return answer


@pytest.mark.parametrize(("transport", "principals"), [("http", False), ("http", True), ("websocket", False)])
async def test_a_call_with_a_question_counts_in_a_shared_session(transport: str, principals: bool) -> None:
    asked: list[str] = []

    def client_of(name: str) -> Any:
        async def answer(question: Any) -> dict[str, bool]:
            asked.append(name)
            await trio.sleep_forever()
            raise AssertionError

        return client(name, E, elicitation=answer)

    async with (
        relay_of_a_peer(transport, principals=principals) as (peer, client),
        client_of("alice") as alice,
        client_of("bob") as bob,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(alice.call_tool, "wait")
        await peer.take("tools/call")
        await peer.send({"id": 5, "method": "elicitation/create", "params": CONFIRM_FORM})
        await sessions_closed()
        nursery.start_soon(bob.call_tool, "wait")
        await sessions_closed()
        await peer.send({"id": 6, "method": "elicitation/create", "params": CONFIRM_FORM})
        assert "calls of several clients are running" in (await answer_to(peer, 6))["error"]["message"]
        nursery.cancel_scope.cancel()
    assert asked == ["alice"]


async def test_a_cancelled_call_counts_for_five_minutes(autojump_clock: MockClock) -> None:
    async with (
        relay_of_a_peer("http") as (peer, client),
        client(elicitation=lambda asked: {"yes": True}) as one,
        trio.open_nursery() as nursery,
    ):
        await cancelled_call(peer, one)
        nursery.start_soon(one.call_tool, "wait")
        call = await peer.take("tools/call")
        for seconds, member in ((299, "error"), (2, "result")):
            await trio.sleep(seconds)
            await peer.send({"id": seconds, "method": "elicitation/create", "params": CONFIRM_FORM})
            assert member in await answer_to(peer, seconds)
        await peer.answer(call, {"content": []})


async def test_cancelled_calls_beyond_the_limit_count_for_five_minutes(autojump_clock: MockClock) -> None:
    async with (
        relay_of_a_peer("http", limits=Limits(requests=2)) as (peer, client),
        client(elicitation=lambda asked: {"yes": True}) as one,
        trio.open_nursery() as nursery,
    ):
        ignored = [await cancelled_call(peer, one) for _ in range(3)]
        for each in ignored:
            await peer.answer(each, {"content": []})
        nursery.start_soon(one.call_tool, "wait")
        call = await peer.take("tools/call")
        for seconds, member in ((299, "error"), (2, "result")):
            await trio.sleep(seconds)
            await peer.send({"id": seconds, "method": "elicitation/create", "params": CONFIRM_FORM})
            assert member in await answer_to(peer, seconds)
        await peer.answer(call, {"content": []})


@each_shared_session
@pytest.mark.parametrize("upstream", [D, E])
async def test_log_messages_of_several_clients_in_a_shared_session_are_dropped(
    transport: str, principals: bool, revision_before: str, upstream: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []
    options: Any = {"on_log": lambda message: heard.append(message.data), "log_level": "debug"}
    async with (
        relay_of_a_peer(transport, upstream, principals=principals) as (peer, client),
        client("alice", revision_before, **options) as alice,
        client("bob", revision_before, **options) as bob,
        trio.open_nursery() as nursery,
    ):
        calls = []
        for each in (alice, bob):
            nursery.start_soon(each.call_tool, "wait")
            calls.append(await peer.take("tools/call"))
        for _ in range(3):
            await peer.notify("notifications/message", {"level": "info", "data": "the PIN of alice"})
        for call in calls:
            await peer.answer(call, {"content": []})
    assert heard == []
    warnings = [record.getMessage() for record in caplog.records if "log messages" in record.getMessage()]
    why = "calls of several clients are running, and the message does not name its call"
    assert warnings == [f"log messages of the upstream server are dropped: {why}"]


@each_shared_session
async def test_the_roots_of_a_client_are_not_sent_in_a_shared_session(
    transport: str, principals: bool, revision_before: str
) -> None:
    async with (
        relay_of_a_peer(transport, principals=principals) as (peer, client),
        client("alice", revision_before, roots=["/home/alice"]) as alice,
        client("bob", revision_before, roots=["/home/bob"]) as bob,
    ):
        given = []
        for number, each in enumerate((alice, bob, alice)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(each.call_tool, "look")
                if each is bob and given[0]:  # the server got a notice that there are no roots now
                    await peer.take("notifications/roots/list_changed")
                call = await peer.take("tools/call")
                await peer.send({"id": number, "method": "roots/list"})
                given.append("result" in await answer_to(peer, number))
                await peer.answer(call, {"content": []})
    # The stream belongs to alice until bob connects.  Requests without a connection belong to no client.
    assert given == [principals or transport != "http", False, False]


@pytest.mark.parametrize("revision_before", [D, E])
async def test_roots_are_those_of_the_principal(revision_before: str) -> None:
    async with relay("http", principals=True) as relay_under_test:
        for name in ("alice", "bob", "alice"):
            async with relay_under_test.client(name, revision_before, roots=[f"/home/{name}"]) as client:
                assert await client.call_tool("rooms", returns=list[str]) == [f"file:///home/{name}"]


async def test_a_question_during_the_opening_goes_to_the_client_that_opens_it() -> None:
    """Some servers request the roots at the opening."""
    program = """
import json, sys
call = None
def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    method, id = message.get("method"), message.get("id")
    if method == "initialize":
        info = {"name": "x", "version": "1"}
        send(id=id, result={"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "notifications/initialized":
        send(id="r", method="roots/list")
    elif method == "tools/call":
        call = id
    elif id == "r":
        roots = message.get("result")
    if call is not None and "roots" in globals():
        send(id=call, result={"content": [{"type": "text", "text": json.dumps(roots)}]})
        call = None
"""
    command = [sys.executable, "-E", "-S", "-c", program]
    texts = []
    async with open_relay(command, revision=D) as shown, shown.running():
        for name in ("alice", "bob"):
            async with open_client(shown, revision=D, roots=[f"/home/{name}"]) as client:
                result = await client.call_tool("look")
                texts.append(result.content[0].text)  # type: ignore[union-attr]
    assert "/home/bob" not in texts[0]  # alice may not be asked either: the first session is opened before she connects
    assert "/home/bob" in texts[1]


GREETING = """
import json, sys
def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}))
for line in sys.stdin:
    message = json.loads(line)
    method, id = message.get("method"), message.get("id")
    if method == "initialize":
        capabilities = {"tools": {}, "logging": {}}
        info = {"name": "x", "version": "1"}
        send(id=id, result={"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info})
        send(method="notifications/message", params={"level": "error", "data": "hello"})
    elif id is not None:
        send(id=id, result={"content": []})
    sys.stdout.flush()
"""


async def test_a_log_message_during_the_opening_goes_to_the_call_that_opens_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Any] = []
    async with (
        open_relay([sys.executable, "-E", "-S", "-c", GREETING], revision=D) as shown,
        shown.running(),
        serve_over("http", shown) as url,
        open_client(url, revision=D) as first,
    ):
        await first.call_tool("look")  # uses the session that was opened at the start
        async with open_client(url, revision=E, on_log=lambda message: heard.append(message.data)) as client:
            await client.call_tool("look")
    assert heard == ["hello"]
    assert "callback" not in caplog.text


async def test_the_bytes_of_log_messages_for_a_slow_client_are_limited() -> None:
    async with relay_of_a_peer("memory") as (peer, client), trio.open_nursery() as nursery:
        heard: list[int] = []
        async with client("", D, on_log=lambda message: heard.append(len(message.data))) as slow:
            nursery.start_soon(slow.call_tool, "t")
            call = await peer.take("tools/call")
            params = {"level": "error", "data": "x" * 100_000}
            line = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": params})
            await peer.stream.send_all(f"{line}\n".encode() * 100)  # all at once, so that few are forwarded in between
            await peer.answer(call, {"content": []})
            await sessions_closed()
        assert 0 < sum(heard) <= 2 * 1024 * 1024


# Changes.


class Upstream:
    """An upstream server for each WebSocket connection.  The last entry of `links` is the newest.

    While `down` is set, connecting fails.
    """

    url = "ws://127.0.0.1:3000/ws"

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.links: list[trio.abc.Stream] = []
        self.dialled = 0
        self.down = False

    async def dial(self) -> trio.abc.Stream:
        self.dialled += 1
        if self.down:
            raise OSError("the server is down")
        listener = MemoryListener()

        async def serve(task_status: trio.TaskStatus[Any]) -> None:
            await serve_http(
                sample_server(), listeners=[listener], allowed_hosts=["127.0.0.1"], task_status=task_status
            )

        await self._nursery.start(serve)
        stream = await listener.connect()
        self.links += listener.server_ends
        return stream

    async def cut(self) -> None:
        await self.links[-1].aclose()
        await sessions_closed()


@contextlib.asynccontextmanager
async def relay_of_websockets(revision: str = D, **options: Any) -> AsyncIterator[tuple[Upstream, Server]]:
    async with trio.open_nursery() as nursery:
        upstream = Upstream(nursery)
        with tcp_connects_to(upstream.dial):
            async with open_relay(upstream.url, revision=revision, **options) as shown, shown.running():
                yield upstream, shown
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("upstream", [D, E])
@pytest.mark.parametrize("revision_before", [D, E])
async def test_a_change_is_sent_to_the_client_of_its_session(
    revision_before: str, upstream: str, autojump_clock: MockClock
) -> None:
    heard: dict[str, list[str]] = {"alice": [], "bob": []}
    async with relay_of_websockets(upstream) as (_, shown), trio.open_nursery() as nursery:

        async def listen(name: str, task_status: trio.TaskStatus[Client]) -> None:
            async with (
                open_client(shown, revision=revision_before) as one,
                one.listen(tools=True, resources="house://one") as changes,
            ):
                await one.call_tool("ledger")
                task_status.started(one)
                async for change in changes:
                    heard[name].append(change.kind.name)

        alice, bob = [await nursery.start(listen, name) for name in heard]
        await trio.sleep(1)
        for each in heard.values():
            each.clear()
        await alice.call_tool("touch", {"uri": "house://one"})
        await bob.call_tool("grow")
        await trio.sleep(1)
        assert heard == {"alice": ["RESOURCE"], "bob": ["TOOLS"]}
        nursery.cancel_scope.cancel()


async def test_a_new_client_gets_no_earlier_changes(autojump_clock: MockClock) -> None:
    async with (
        relay_of_websockets() as (_, shown),
        open_client(shown, revision=D) as first,
        open_client(shown, revision=D) as client,
    ):
        await first.call_tool("ledger")
        heard = []
        with trio.move_on_after(10):
            async with client.listen(tools=True) as changes:
                await client.list_tools_page()
                async for change in changes:
                    heard.append(change.kind.name)
        assert heard == []


# The upstream server dies.

DYING = """
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    id, result = message.get("id"), {}
    if message.get("method") == "initialize":
        info = {"name": "x", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    elif message.get("method") == "tools/call":
        if message["params"]["name"] == "die":
            print("the secret of the server", file=sys.stderr, flush=True)
            os._exit(3)
        result = {"content": [{"type": "text", "text": str(os.getpid())}]}
    if id is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}), flush=True)
"""


@pytest.mark.parametrize("revision_before", [D, E])
async def test_a_dead_process_is_started_again_by_the_next_request(
    revision_before: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-E", "-S", "-c", DYING]
    async with (
        open_relay(command, revision=D, stderr=None) as shown,
        shown.running(),
        open_client(shown, revision=revision_before) as client,
        open_client(shown, revision=revision_before) as other,
    ):
        one, others = await client.call_tool("pid"), await other.call_tool("pid")
        with pytest.raises(RequestError) as raised:
            await client.call_tool("die")
        assert raised.value.message == (
            "the upstream server did not answer; it has ended, and is started again with the next request"
        )
        assert await client.call_tool("pid") != one
        assert await other.call_tool("pid") == others
    assert "ended with status 3" in caplog.text
    assert "the secret of the server" in caplog.text  # the log is for the operator of the relay


async def call(client: Client) -> str:
    """Make a call, and return "answered" or the text of its error."""
    try:
        await client.call_tool("ledger")
    except RequestError as error:
        return error.message.removeprefix("the upstream server ")
    return "answered"


async def test_a_lost_connection_is_opened_again_only_by_the_next_request(
    autojump_clock: MockClock,
) -> None:
    async with relay_of_websockets() as (upstream, shown), open_client(shown, revision=D) as client:
        for number in range(1, 4):
            assert await call(client) == "answered"
            await upstream.cut()
            await trio.sleep(60)
            assert upstream.dialled == number


async def test_running_calls_fail_when_the_server_dies(autojump_clock: MockClock) -> None:
    outcomes: list[str] = []
    async with relay_of_websockets() as (upstream, shown), open_client(shown, revision=D) as client:

        async def hold() -> None:
            try:
                await client.call_tool("hold", {"name": "x"})
            except RequestError as error:
                outcomes.append(error.message)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(hold)
            await sessions_closed()
            await upstream.cut()
        assert (
            outcomes
            == ["the upstream server did not answer; it has ended, and is started again with the next request"] * 2
        )
        assert await call(client) == "answered"


async def test_a_server_that_dies_repeatedly_is_started_after_growing_pauses(
    autojump_clock: MockClock,
) -> None:
    async with relay_of_websockets() as (upstream, shown), open_client(shown, revision=D) as client:
        waits = []
        for _ in range(8):
            assert await call(client) == "answered"
            await upstream.cut()
            start = trio.current_time()
            while (texts := await call(client)) != "answered":
                assert texts.startswith("has ended; it is started again in ")
                await trio.sleep(1)
            waits.append(trio.current_time() - start)
        assert waits == [0, 1, 2, 4, 8, 16, 30, 30]
        await trio.sleep(30)  # the connection has held for so long that the pause is reset
        await upstream.cut()
        assert await call(client) == "answered"


async def test_a_server_that_cannot_be_reached_is_tried_again_after_pauses(autojump_clock: MockClock) -> None:
    async with relay_of_websockets() as (upstream, shown), open_client(shown, revision=D) as client:
        assert await call(client) == "answered"
        await upstream.cut()
        upstream.down, upstream.dialled = True, 0
        texts = []
        for _ in range(100):
            texts.append(await call(client))
            await trio.sleep(1)
        assert upstream.dialled == 8  # after 0, 1, 3, 7, 15, 31, 61 and 91 seconds
        assert texts[0] == "could not be reached; it is started again in 1 s"
        assert texts[3:7] == [f"could not be reached; it is started again in {wait} s" for wait in (4, 3, 2, 1)]
        upstream.down = False
        await trio.sleep(30)
        assert await call(client) == "answered"


async def test_a_cancelled_call_does_not_cancel_the_opening_for_others(autojump_clock: MockClock) -> None:
    async with relay_of_websockets() as (upstream, shown), open_client(shown, revision=D) as client:
        await upstream.cut()
        dial = upstream.dial

        async def slowly() -> trio.abc.Stream:
            await trio.sleep(10)
            return await dial()

        with tcp_connects_to(slowly):
            with trio.move_on_after(5):
                await call(client)
            assert await call(client) == "answered"
        assert trio.current_time() == 10
        assert upstream.dialled == 2


async def test_a_subscription_continues_in_the_next_session(autojump_clock: MockClock) -> None:
    async with (
        relay_of_websockets() as (upstream, shown),
        open_client(shown, revision=D) as client,
        client.listen(resources="house://one") as changes,
    ):
        for _ in range(2):
            await client.call_tool("touch", {"uri": "house://one"})
            assert (await changes.__anext__()).item == "house://one"
            await upstream.cut()
            await call(client)
            assert (await changes.__anext__()).item == "house://one"  # it may have changed in the meantime
            await trio.sleep(31)


async def test_a_subscription_that_has_held_is_opened_again_soon(autojump_clock: MockClock) -> None:
    async with (
        relay_of_websockets() as (upstream, shown),
        open_client(shown, revision=D) as client,
        client.listen(resources="house://one"),
    ):
        for _ in range(8):
            await trio.sleep(3600)
            dialled = upstream.dialled
            await upstream.cut()
            await trio.sleep(2)
            assert upstream.dialled == dialled + 1


async def test_a_stream_that_has_ended_is_not_opened_again() -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, sample_server(), theirs)
        async with open_relay(ours, revision=D) as shown, open_client(shown, revision=D) as client:
            assert await call(client) == "answered"
            await theirs.aclose()
            await sessions_closed()
            assert await call(client) == "did not answer: its stream has ended"


async def test_an_upstream_server_slower_than_the_timeout_is_an_error(autojump_clock: MockClock) -> None:
    async with open_relay(sample_server(), revision=D, timeout=5) as shown, open_client(shown, revision=D) as client:
        with pytest.raises(RequestError, match="did not answer"):
            await client.call_tool("hold", {"name": "x"})
        assert trio.current_time() == 5
