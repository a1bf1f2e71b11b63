"""A client over several sessions with one server: the loss of a session, its renewal, and the effect on calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, ScriptedHttpServer, scripted_server
from tests.client.matrix import no_tasks_left, tcp_connects_to
from tests.client.sample_server import sample_server
from tests.http.scripted_server import A, D, E
from tests.http.served import MemoryListener
from tests.requirements import req
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step, wait_or_fail
from trio_mcp import RequestError, serve_http
from trio_mcp.client import Client, HandshakeError, SessionLost, open_client
from trio_mcp.core import TOOLS_CHANGED, McpError, resource_updated
from trio_mcp.errors import ConnectionFailed, RemoteProtocolError, SessionClosed, SubscriptionUnsupported
from trio_mcp.transport import open_nursery

ONE = resource_updated("r://one")
RESULT: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}
PAUSES = [0.0, 1.0, 2.0, 4.0, 8.0]  # before each attempt to open a session again for subscriptions


class ForgetfulServer:
    """A server that forgets its sessions when the test tells it to.

    The answer to a call of "stream" begins and does not end.  All other requests are answered.
    """

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self.made = 0
        self.refused = 0
        self.received: list[tuple[str, str]] = []  # the session and the operation of each request
        self.made_at: list[float] = []
        self.capabilities: dict[str, Any] = {
            "tools": {"listChanged": True}, "resources": {"subscribe": True}, "logging": {}
        }  # fmt: skip
        self.output: dict[str, Any] = {"type": "object", "required": ["old"]}
        self.structured: dict[str, Any] = {"old": 1}
        self.keeps = True  # False: each new session is forgotten at once
        self.accepts_level = True
        self.up = True
        self.streams: list[ResponseWriter] = []
        self.may_open = trio.Event()
        self.may_open.set()

    def forget(self) -> None:
        self.sessions.clear()

    @property
    def methods(self) -> list[str]:
        return [operation for _, operation in self.received]

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        session = received.headers.get("Mcp-Session-Id", "")
        self.received.append((session, received.operation))
        if received.operation == "initialize":
            await self._open(received, out)
        elif received.operation == "server/discover":
            await out.json(received.error(-32601), 404)
        elif session not in self.sessions:
            self.refused += 1
            await out.json({"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "gone"}}, 404)
        elif received.operation == "GET":
            self.streams.append(out)
            await out.begin()
            await out.wait_for_close()
        elif received.operation == "DELETE":
            self.sessions.discard(session)
            await out.reply(204)
        else:
            await self._answer(received, out)

    async def _open(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        await self.may_open.wait()
        self.made += 1
        self.made_at.append(trio.current_time())
        name = f"session-{self.made}"
        if self.keeps or self.made == 1:
            self.sessions.add(name)
        version = received.message["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": self.capabilities,
            "serverInfo": {"name": "f", "version": "1"},
        }
        await out.json(received.answer(result), headers={"Mcp-Session-Id": name})

    async def _answer(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation.startswith("notifications/"):
            await out.reply(202)
        elif received.operation == "logging/setLevel" and not self.accepts_level:
            await out.json(received.error(-32603))
        elif received.operation == "tools/list":
            tool = {"name": "t", "inputSchema": {"type": "object"}, "outputSchema": self.output}
            await out.json(received.answer({"tools": [tool]}))
        elif received.operation == "tools/call" and received.message["params"]["name"] == "stream":
            await out.begin()
            await out.wait_for_close()
        elif received.operation == "tools/call":
            await out.json(received.answer({**RESULT, "structuredContent": self.structured}))
        else:
            await out.json(received.answer({}))


@contextlib.asynccontextmanager
async def open_forgetful(**options: Any) -> AsyncIterator[tuple[Client, ForgetfulServer, ScriptedHttpServer]]:
    server = ForgetfulServer()
    for name in [each for each in options if hasattr(server, each)]:
        setattr(server, name, options.pop(name))
    async with no_tasks_left(), scripted_server(server.handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, **{"revision": D, **options}) as client:
                await wait_all_tasks_blocked()
                yield client, server, scripted


async def refused(call: Callable[[], Any]) -> McpError:
    with pytest.raises(McpError) as failed:
        await wait_or_fail(call, "an outcome")
    return failed.value


async def test_a_lost_session_is_opened_again_once_for_all_calls(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _):
        server.forget()
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(client.call_tool, "t")
        assert server.made == 2
        operations = [operation for session, operation in server.received if session == "session-2"]
        assert operations.count("tools/call") == 10
        assert client.deviations == ()
        await client.call_tool("t")
        assert server.made == 2


async def test_a_session_lost_without_a_call_is_opened_again_when_detected(
    autojump_clock: MockClock,
) -> None:
    async with open_forgetful() as (client, server, _):
        server.forget()
        server.streams[0].close()
        await trio.sleep(5)
        assert server.made == 2
        assert await client.call_tool("t")


async def test_a_call_that_may_have_run_fails_and_the_client_goes_on(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _):
        lost: list[McpError] = []

        async def call() -> None:
            lost.append(await refused(lambda: client.call_tool("stream")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            server.forget()
            assert await client.call_tool("t")
        (error,) = lost
        assert isinstance(error, SessionLost)
        assert error.request_may_have_run
        assert server.methods.count("tools/call") == 3  # the one that was refused twice


@pytest.mark.parametrize("level", [None, "info"])
async def test_subscriptions_and_the_log_level_are_requested_again(level: Any, autojump_clock: MockClock) -> None:
    async with (
        open_forgetful(log_level=level) as (client, server, _),
        client.listen(tools=True, resources=ONE.item) as changes,
    ):
        server.forget()
        await client.call_tool("t")
        await wait_all_tasks_blocked()
        renewed = [operation for session, operation in server.received if session == "session-2"]
        assert renewed.count("resources/subscribe") == 1
        assert renewed.count("logging/setLevel") == (level is not None)
        # A change may have been missed, so each subscribed change is reported.
        assert {await anext(changes), await anext(changes)} == {TOOLS_CHANGED, ONE}
        await server.streams[-1].event({"jsonrpc": "2.0", "method": ONE.kind.method, "params": {"uri": ONE.item}})
        assert await anext(changes) == ONE


async def test_known_tools_are_forgotten_with_the_session(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _):
        assert [tool.name for tool in await client.list_tools()] == ["t"]
        await client.call_tool("t")
        server.output, server.structured = {"type": "object", "required": ["new"]}, {"new": 1}
        with pytest.raises(RemoteProtocolError, match="outputSchema"):
            await client.call_tool("t")
        server.forget()
        assert (await client.call_tool("t")).structured_content == {"new": 1}


async def test_known_tools_are_forgotten_when_they_change(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _):
        assert [tool.name for tool in await client.list_tools()] == ["t"]
        server.structured = {"new": 1}
        await server.streams[0].event({"jsonrpc": "2.0", "method": TOOLS_CHANGED.kind.method})
        await wait_all_tasks_blocked()
        assert (await client.call_tool("t")).structured_content == {"new": 1}


async def test_known_tools_are_forgotten_when_a_change_may_have_been_missed(
    autojump_clock: MockClock,
) -> None:
    async with open_forgetful() as (client, server, _):
        assert [tool.name for tool in await client.list_tools()] == ["t"]
        server.structured = {"new": 1}
        server.streams[0].close()
        await trio.sleep(5)
        assert len(server.streams) == 2
        assert server.made == 1
        assert (await client.call_tool("t")).structured_content == {"new": 1}


async def test_calls_fail_at_once_without_a_new_session_and_can_be_repeated(
    autojump_clock: MockClock,
) -> None:
    async with open_forgetful() as (client, server, scripted):
        server.forget()
        scripted.refuses_connections = True
        for link in scripted.connections:
            link.close()
        await trio.sleep(100)
        for _ in range(3):
            start = trio.current_time()
            error = await refused(lambda: client.call_tool("t"))
            assert isinstance(error, ConnectionFailed | SessionClosed)
            assert trio.current_time() == start
        scripted.refuses_connections = False
        assert await client.call_tool("t")
        assert server.made == 2


async def test_a_subscription_resumes_when_the_server_is_back(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, scripted):
        async with client.listen(tools=True) as changes:
            server.forget()
            server.may_open = trio.Event()
            with trio.move_on_after(0):
                await client.call_tool("t")
            scripted.refuses_connections = True
            for link in scripted.connections:
                link.close()
            await trio.sleep(5)
            scripted.refuses_connections = False
            server.may_open.set()
            with trio.fail_after(60):
                assert await anext(changes) == TOOLS_CHANGED
        assert await client.call_tool("t")


async def test_a_subscription_ends_if_the_server_does_not_come_back(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, scripted), client.listen(tools=True) as changes:
        server.forget()
        assert await client.call_tool("t")  # a session is lost
        assert await anext(changes) == TOOLS_CHANGED
        await trio.sleep(40)  # the session has lasted, and its connections are still open
        server.forget()
        scripted.refuses_connections = True
        start = trio.current_time()
        assert isinstance(await refused(client.ping), SessionClosed)
        with pytest.raises(SessionClosed) as closed:
            await anext(changes)
        assert isinstance(closed.value.__cause__, ConnectionFailed)
        assert trio.current_time() - start <= sum(PAUSES) + 30
        scripted.refuses_connections = False
        assert await client.call_tool("t")  # the client still works


async def test_opening_again_ends_if_the_server_loses_each_session_at_once(autojump_clock: MockClock) -> None:
    async with open_forgetful(keeps=False) as (client, server, _):
        async with client.listen(resources="r://one") as changes:
            server.forget()
            start = trio.current_time()
            error = await refused(lambda: client.call_tool("t"))
            assert isinstance(error, SessionLost)
            assert not error.request_may_have_run
            with pytest.raises(SessionClosed):
                await anext(changes)
            assert sum(PAUSES) - 1 <= trio.current_time() - start <= sum(PAUSES) + 10
            assert server.made <= 2 + len(PAUSES)
            before = server.made
            await trio.sleep(1000)
            assert server.made == before
        server.keeps = True
        assert await client.call_tool("t")


async def test_a_log_level_is_set_also_if_the_session_is_lost_by_the_request(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _):
        server.forget()
        await client.set_log_level("info")
        assert ("session-2", "logging/setLevel") in server.received


async def test_sessions_that_have_lasted_may_be_lost_any_number_of_times(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _), client.listen(tools=True) as changes:
        for number in range(2, 10):
            await trio.sleep(60)
            server.forget()
            server.streams[-1].close()
            assert await anext(changes) == TOOLS_CHANGED
            assert server.made == number


async def test_the_wait_for_the_end_of_the_handshake_is_bounded(
    autojump_clock: MockClock,
) -> None:
    server = ForgetfulServer()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "notifications/initialized":
            await out.wait_for_close()
        await server.handle(received, out)

    async with no_tasks_left(), scripted_server(handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, revision=D) as client:
                start = trio.current_time()
                assert await client.call_tool("t")
                assert trio.current_time() == start + 30
                (mistake,) = client.deviations
                assert "notifications/initialized" in mistake
                assert scripted.operations.count("notifications/initialized") == 4


async def test_closing_ends_a_renewal_and_all_calls_that_wait_for_it(autojump_clock: MockClock) -> None:
    async with open_forgetful() as (client, server, _), trio.open_nursery() as nursery:
        errors: list[McpError] = []

        async def call() -> None:
            errors.append(await refused(lambda: client.call_tool("t")))

        server.forget()
        server.may_open = trio.Event()
        nursery.start_soon(call)
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await client.aclose()
        assert trio.current_time() <= start + 3
        await wait_all_tasks_blocked()
        assert [type(error) for error in errors] == [SessionClosed, SessionClosed]


async def test_a_refused_log_level_that_was_declared_is_a_deviation(autojump_clock: MockClock) -> None:
    async with open_forgetful(log_level="info", accepts_level=False) as (client, server, _):
        assert any("level" in each for each in client.deviations)
        assert await client.call_tool("t")
        with pytest.raises(RequestError):
            await client.set_log_level("debug")
        async with client.listen(resources="r://one") as changes:
            server.forget()
            assert await client.call_tool("t")
            assert await anext(changes) == ONE


@pytest.mark.parametrize("how", ["silent", "500", "202", "401", "refused"])
async def test_the_client_works_with_any_reply_to_the_log_level(how: str, autojump_clock: MockClock) -> None:
    server = ForgetfulServer()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation != "logging/setLevel":
            await server.handle(received, out)
        elif how == "silent":
            await out.wait_for_close()
        elif how == "refused":
            await out.json(received.error(-32601), 404)
        else:
            await out.reply(int(how))

    start = trio.current_time()
    async with no_tasks_left(), scripted_server(handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, revision=D, log_level="info") as client:
                await wait_all_tasks_blocked()
                server.forget()
                assert await client.call_tool("t")
                await wait_all_tasks_blocked()
                assert trio.current_time() - start == (3 if how == "silent" else 0)
                assert scripted.operations.count("logging/setLevel") == 2
                about = [each for each in client.deviations if "but refused the log level" in each]
                assert len(about) == (0 if how == "silent" else 2)
            assert client.deviations == tuple(about)


class StreamingServer:
    """A server over HTTP+SSE: a session ends with its stream."""

    def __init__(self) -> None:
        self.streams: list[ResponseWriter] = []
        self.operations: list[str] = []

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.method == "GET":
            self.streams.append(out)
            await out.begin()
            await out.chunk(b"event: endpoint\ndata: /post\n\n")
            await out.wait_for_close()
        elif received.target != "/post":
            await out.reply(405)
        else:
            self.operations.append(received.operation)
            await out.reply(202)
            if received.operation == "initialize":
                capabilities = {"tools": {"listChanged": True}}
                server = {"name": "s", "version": "1"}
                result = {"protocolVersion": A, "capabilities": capabilities, "serverInfo": server}
                await self.streams[-1].event(received.answer(result))
            elif received.operation == "tools/call" and received.message["params"]["name"] == "t":
                await self.streams[-1].event(received.answer(RESULT))


async def test_a_session_that_ends_with_its_event_stream_is_opened_again(autojump_clock: MockClock) -> None:
    server = StreamingServer()
    async with no_tasks_left(), scripted_server(server.handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, revision=A) as client, client.listen(tools=True) as changes:
                await client.call_tool("t")
                async with trio.open_nursery() as nursery:

                    async def call() -> None:
                        lost = await refused(lambda: client.call_tool("silent"))
                        assert isinstance(lost, SessionLost)
                        assert lost.request_may_have_run
                        assert "event stream" in str(lost)

                    nursery.start_soon(call)
                    await wait_all_tasks_blocked()
                    await server.streams[-1].end()
                assert await client.call_tool("t")
                assert await wait_or_fail(changes.__anext__, "a missed change") == TOOLS_CHANGED
                assert server.operations.count("initialize") == len(server.streams) == 2


async def test_a_stream_that_is_cut_repeatedly_resumes_and_reports_each_gap(
    autojump_clock: MockClock,
) -> None:
    server = ForgetfulServer()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation != "GET":
            await server.handle(received, out)
            return
        await out.begin()
        for _ in range(4):
            await trio.sleep(15)
            await out.chunk(b": ping\n\n")
        out.close()

    gaps: list[float] = []
    async with no_tasks_left(), scripted_server(handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, revision=D) as client, client.listen(tools=True) as changes:
                start = trio.current_time()
                with trio.move_on_after(3600):
                    async for _ in changes:
                        gaps.append(trio.current_time() - start)
                assert gaps == [61 * number for number in range(1, 60)]
                assert client.deviations == ()


@pytest.mark.parametrize("status", [404, 405, 400])
async def test_listening_to_a_server_without_an_event_stream_is_an_error(
    status: int, autojump_clock: MockClock
) -> None:
    server = ForgetfulServer()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.reply(status)
        else:
            await server.handle(received, out)

    async with no_tasks_left(), scripted_server(handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, revision=D) as client:
                for _ in range(2):
                    with pytest.raises(SubscriptionUnsupported):
                        async with client.listen(tools=True, resources=ONE.item) as changes:
                            await anext(changes)
                assert await client.call_tool("t")
                assert server.made == 1


@req("ver-10")
@pytest.mark.parametrize("sse", [False, True])
async def test_the_era_of_a_server_is_remembered_until_it_proves_wrong(sse: bool, autojump_clock: MockClock) -> None:
    options: dict[str, Any] = {"sse_path": "/sse", "message_path": "/messages"} if sse else {}
    url = "http://127.0.0.1:3000/sse" if sse else URL

    async def tried() -> list[str]:
        async with open_client(url) as client:
            return [each.tried for each in client.negotiation.attempts]

    old, new = MemoryListener(), MemoryListener()
    with tcp_connects_to(old.connect):
        async with serve_in_memory(sample_server(revisions=[D]), old, **options):
            first, second = await tried(), await tried()
            assert first[0] == f"server/discover in {E}"
            assert f"server/discover in {E}" not in second
            assert second[-1] == f"initialize with {D}"
            await trio.sleep(601)
            assert await tried() == first
    with tcp_connects_to(new.connect):
        async with serve_in_memory(sample_server(revisions=[E]), new, path="/sse" if sse else "/mcp"):
            assert (await tried())[-1] == f"server/discover in {E}"
            assert len(await tried()) == 1


async def test_a_pinned_legacy_revision_is_not_remembered_as_the_era_of_the_server(
    autojump_clock: MockClock,
) -> None:
    listener = MemoryListener()
    with tcp_connects_to(listener.connect):
        async with serve_in_memory(sample_server(), listener):
            async with open_client(URL, revision=D) as client:
                assert client.revision == D
            async with open_client(URL) as client:
                assert client.revision == E


@contextlib.asynccontextmanager
async def serve_in_memory(server: Any, listener: MemoryListener, **options: Any) -> AsyncIterator[None]:
    async with open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_http(
                server, listeners=[listener], allowed_hosts=["127.0.0.1"], task_status=task_status, **options
            )
        )
        yield


async def test_a_client_works_after_a_restart_of_the_server(autojump_clock: MockClock) -> None:
    listeners = [MemoryListener()]
    with tcp_connects_to(lambda: listeners[-1].connect()):
        async with no_tasks_left(), open_nursery() as nursery:
            life = await nursery.start(_serve, listeners[-1])
            async with open_client(URL, revision=D) as client, client.listen(tools=True) as changes:
                await client.call_tool("greet", {"name": "you"})
                life.cancel()
                await wait_all_tasks_blocked()
                listeners.append(MemoryListener())
                await nursery.start(_serve, listeners[-1])
                assert await client.call_tool("greet", {"name": "you"}, returns=str) == "Hello, you!"
                assert await anext(changes) == TOOLS_CHANGED
                await client.call_tool("grow")
                assert await anext(changes) == TOOLS_CHANGED


async def _serve(listener: MemoryListener, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        async with serve_in_memory(sample_server(), listener):
            task_status.started(scope)
            await trio.sleep_forever()


async def _lose_one(server: ForgetfulServer, client: Client) -> None:
    async with client.listen(resources=ONE.item) as changes:
        server.forget()
        await client.call_tool("t")
        assert await anext(changes) == ONE


def test_a_session_may_be_lost_and_the_client_cancelled_at_any_step() -> None:
    async def scenario(attempt: Attempt) -> None:
        server = ForgetfulServer()
        async with scripted_server(server.handle) as scripted:
            with tcp_connects_to(scripted.connect), attempt.window():
                async with open_client(URL, revision=D, log_level="info") as client:
                    await _lose_one(server, client)
            await wait_all_tasks_blocked()
            # The client has ended each session, except one of which it did not learn any more.
            assert not server.sessions & {session for session, _ in server.received}

    assert cancel_at_each_step(scenario, watch="the scenario") > 5
    assert cancel_at_each_step(scenario, watch="a client") > 1
    assert cancel_at_each_step(scenario, watch=any_task) > 50


def test_a_session_may_be_lost_at_any_step() -> None:
    outcomes = set()

    async def scenario(attempt: Attempt) -> None:
        server = ForgetfulServer()
        async with scripted_server(server.handle) as scripted:
            with tcp_connects_to(scripted.connect):
                async with open_client(URL, revision=D) as client, client.listen(resources=ONE.item) as changes:
                    with attempt.window(server.forget):
                        try:
                            await client.call_tool("t")
                            outcomes.add("a result")
                        except SessionLost as error:
                            outcomes.add(f"may have run: {error.request_may_have_run}")
                    if attempt.fired:
                        await client.call_tool("t")
                        await wait_or_fail(changes.__anext__, "a missed change")
                    assert server.made == 1 + attempt.fired

    assert cancel_at_each_step(scenario, watch=any_task) > 5
    assert "a result" in outcomes
    assert "may have run: False" not in outcomes


async def test_opening_a_session_has_a_timeout(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.wait_for_close()

    async with no_tasks_left(), scripted_server(handle) as scripted:
        with tcp_connects_to(scripted.connect):
            start = trio.current_time()
            with pytest.raises(HandshakeError, match="in time, which was 300 seconds; use a cancel scope"):
                async with open_client(URL):
                    raise AssertionError("it was opened")
            assert trio.current_time() == start + 300
            assert [each.getMessage() for each in caplog.records] == [
                "the server has not answered for 10 seconds; still waiting"
            ]
