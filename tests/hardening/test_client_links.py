"""The links of a client: cancellation, timeouts, dead connections, and requests of the server."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.client.http_script import (
    URL,
    ReceivedRequest,
    ResponseWriter,
    ScriptedHttpServer,
    legacy,
    modern,
    scripted_server,
)
from tests.client.matrix import Variant, client_of, each_transport, no_tasks_left, serve_over, tcp_connects_to
from tests.client.memory_links import Peer
from tests.client.sample_server import sample_server
from tests.http.scripted_server import D, E
from tests.requirements import req
from tests.server.checkpoints import unlimited_pipe
from trio_mcp import (
    Client,
    Context,
    Elicit,
    Limits,
    ListRoots,
    RequestError,
    Sample,
    Server,
    UsageError,
    connect_client,
    open_client,
    serve_http,
    serve_http_stream,
    serve_stream,
)
from trio_mcp.errors import (
    ClientError,
    InputUnavailable,
    NoResponse,
    NotInThisRevision,
    SessionClosed,
    SubscriptionUnsupported,
)
from trio_mcp.types import ChangeKind, FormElicitationRequest, PromptReference, SamplingRequest

each_era = pytest.mark.parametrize("revision", [D, E])


def server_of_tools() -> Server:
    server = Server("asking")

    @server.tool
    async def ask(ctx: Context) -> str:
        return repr(await ctx.elicit("A name?", {"type": "object", "properties": {"name": {"type": "string"}}}))

    @server.tool
    async def sleep(ctx: Context, text: str = "") -> None:
        await trio.sleep_forever()

    @server.tool
    async def work(ctx: Context, seconds: int) -> int:
        for step in range(seconds):
            await ctx.progress(step)
            await trio.sleep(1)
        return seconds

    return server


# Cancellation.


@each_transport(revisions=[D, E], without=["child", "http json", "http+sse"])
@pytest.mark.parametrize("tool", ["ask", "sleep", "sleep with a long text"])
async def test_a_cancelled_call_raises_a_plain_cancelled(
    variant: Variant, tool: str, autojump_clock: MockClock
) -> None:
    async def never(form: FormElicitationRequest) -> None:
        await trio.sleep_forever()

    caught: list[BaseException] = []
    name, _, long_text = tool.partition(" with ")
    async with client_of(variant, server_of_tools(), elicitation=never) as client:
        with trio.move_on_after(5) as scope:
            try:
                await client.call_tool(name, {"text": "x" * 200_000} if long_text else None)
            except BaseException as error:
                caught.append(error)
                raise
    assert scope.cancelled_caught
    assert [type(error) for error in caught] == [trio.Cancelled]


@each_era
@pytest.mark.parametrize("error", [KeyError("own"), None], ids=["an error", "a cancellation"])
async def test_an_exception_of_a_block_leaves_open_client_unchanged(
    revision: str, error: Exception | None, autojump_clock: MockClock
) -> None:
    raised: list[BaseException] = []
    caught: list[BaseException] = []
    async with no_tasks_left():
        with trio.move_on_after(5):
            try:
                async with open_client(server_of_tools(), revision=revision) as client:
                    try:
                        if error is not None:
                            raise error
                        await client.call_tool("sleep")
                    except BaseException as left:
                        raised.append(left)
                        raise
            except KeyError as left:
                caught.append(left)
            except BaseException as left:
                caught.append(left)
                raise
    assert len(caught) == 1
    assert caught[0] is raised[0]


# Calls that may have run.

FORM = {"type": "object", "properties": {}}
QUESTION = {"method": "elicitation/create", "params": {"message": "Sure?", "requestedSchema": FORM}}
INPUT_REQUIRED = {"resultType": "input_required", "inputRequests": {"sure": QUESTION}, "requestState": "charged"}
COMPLETE = {"resultType": "complete", "content": []}
MISMATCH = {"code": -32020, "message": "the headers do not fit"}


@pytest.mark.parametrize("how", ["the port is closed", "sending fails", "the answer is cut", "the headers are refused"])
async def test_a_call_whose_first_round_has_run_may_have_run(how: str, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if "requestState" in received.message["params"]:
            if how == "the headers are refused":
                server.refuses_connections = True
                await out.json({"jsonrpc": "2.0", "id": received.id, "error": MISMATCH}, 400)
            out.close()
        else:
            await out.json(received.answer(INPUT_REQUIRED))

    async with scripted_server(modern(handle)) as server:

        async def connect() -> trio.abc.Stream:
            if how == "sending fails" and server.refuses_connections:
                ours, theirs = unlimited_pipe()
                theirs.close()
                return ours
            return await server.connect()

        async def lose(form: FormElicitationRequest) -> dict[str, Any]:
            if how in ("the port is closed", "sending fails"):
                server.refuses_connections = True
                for link in server.connections:
                    link.close()
            return {}

        with tcp_connects_to(connect):
            async with open_client(URL, elicitation=lose) as client:
                with pytest.raises(NoResponse) as lost:
                    await client.call_tool("charge")
    assert lost.value.request_may_have_run


async def test_a_request_that_could_not_be_sent_again_may_have_run(autojump_clock: MockClock) -> None:
    """The first connection ended after the whole request was sent, and no second one could be opened."""

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if "cursor" in received.message["params"]:
            server.refuses_connections = True
            out.close()
        else:
            await out.json(received.answer({"resultType": "complete", "tools": []}))

    async with scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL) as client:
                await client.list_tools_page()
                with pytest.raises(NoResponse) as lost:
                    await client.list_tools_page("more")
    assert server.operations.count("tools/list") == 2
    assert lost.value.request_may_have_run


async def test_a_round_that_is_refused_for_its_headers_is_sent_again_and_not_the_call(
    autojump_clock: MockClock,
) -> None:
    """The first round has run, and its tool may have charged a card."""
    refused = False

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        nonlocal refused
        if received.operation == "tools/list":
            tools = [{"name": "charge", "inputSchema": {"type": "object"}}]
            await out.json(received.answer({"resultType": "complete", "tools": tools}))
        elif "requestState" not in received.message["params"]:
            await out.json(received.answer(INPUT_REQUIRED))
        elif not refused:
            refused = True
            await out.json({"jsonrpc": "2.0", "id": received.id, "error": MISMATCH}, 400)
        else:
            await out.json(received.answer(COMPLETE))

    async with scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL, elicitation=lambda form: {}) as client:
                await client.call_tool("charge")
    assert request_states(server) == [None, "charged", "charged"]


def request_states(server: ScriptedHttpServer) -> list[str | None]:
    return [each.message["params"].get("requestState") for each in server.requests if each.operation == "tools/call"]


# Timeouts.


@req("time-01", "time-02", "time-03", "time-04")
@each_transport(revisions=[D, E], without=["child"])
@pytest.mark.parametrize("given", ["for all", "for one"])
async def test_a_request_has_the_given_timeout(variant: Variant, given: str, autojump_clock: MockClock) -> None:
    options, along = ({"timeout": 5}, {}) if given == "for all" else ({}, {"timeout": 5})
    async with client_of(variant, sample_server(), **options) as client:
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError, match=r"^tools/call had no answer .* for 5 seconds \(timeout\)$"):
            await client.call_tool("hold", {"name": "it"}, **along)  # type: ignore[arg-type]  # one of two
        assert trio.current_time() == start + 5
        ledger = await client.call_tool("ledger", returns=list[str])
    assert ledger == ["it began", "it was cancelled"]


@req("time-05", "time-06")
@each_transport(revisions=[D, E], without=["child", "http json"])
async def test_progress_restarts_the_timeout_but_not_the_maximum(variant: Variant, autojump_clock: MockClock) -> None:
    async with client_of(variant, server_of_tools(), timeout=5, max_timeout=40) as client:
        assert await client.call_tool("work", {"seconds": 30}, returns=int) == 30
        start = trio.current_time()
        with pytest.raises(trio.TooSlowError, match=r"^tools/call was not complete within 40 seconds \(max_timeout\)$"):
            await client.call_tool("work", {"seconds": 50})
        assert trio.current_time() == start + 40
        assert await client.call_tool("work", {"seconds": 50}, max_timeout=math.inf, returns=int) == 50
        with pytest.raises(trio.TooSlowError, match="for 3 seconds"):
            await client.request("tools/call", {"name": "sleep", "arguments": {}}, timeout=3)


@contextlib.asynccontextmanager
async def client_of_a_peer(**options: Any) -> AsyncIterator[tuple[Client, Peer]]:
    ours, theirs = memory_stream_pair()
    peer = Peer(theirs, D, {"tools": {}})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        async with open_client(ours, revision=D, **options) as client:
            yield client, peer


async def test_a_question_does_not_restart_the_timeout_of_an_answered_call(
    autojump_clock: MockClock,
) -> None:
    results = []

    async def slowly(*report: Any) -> None:
        await trio.sleep(60)

    async with client_of_a_peer(roots=["/x"]) as (client, peer), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def call() -> None:
            results.append(await client.call_tool("t", on_progress=slowly, timeout=5))

        asked = await peer.take("tools/call")
        token = asked["params"]["_meta"]["progressToken"]
        await peer.notify("notifications/progress", {"progressToken": token, "progress": 1})
        await peer.answer(asked, {"content": []})
        await peer.send({"id": 1, "method": "roots/list"})
    assert len(results) == 1


@pytest.mark.parametrize("option", ["timeout", "max_timeout"])
@pytest.mark.parametrize("returns", [False, True])
async def test_the_timeout_of_a_call_includes_the_list_of_tools_that_it_needs(
    returns: bool, option: str, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            assert received.headers["X-Key"] == "k"
            await out.wait_for_close()
        await out.json(received.error(-32020, "the headers do not fit"), 400)

    async with scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL, revision=E) as client:
                start, expected = trio.current_time(), {"returns": int} if returns else {}
                options: Any = {option: 5, "headers": {"X-Key": "k"}, **expected}
                with trio.fail_after(60), pytest.raises(trio.TooSlowError, match=f"5 seconds.*{option}"):
                    await client.call_tool("t", **options)
                assert trio.current_time() == start + 5
                assert server.operations[-1] == "tools/list"


async def test_the_text_of_a_deviation_is_short(autojump_clock: MockClock) -> None:
    async with client_of_a_peer() as (client, peer):
        await peer.send({"id": None, "error": {"code": -32600, "message": "x" * 100_000}})
        await wait_all_tasks_blocked()
        [why] = client.deviations
        assert why.startswith("the server could not read a message: 'xxx")
        assert len(why) <= 1000


@each_transport(revisions=[D, E], without=["child", "http json"])
async def test_the_timeout_does_not_run_while_the_user_answers_a_question(
    variant: Variant, autojump_clock: MockClock
) -> None:
    async def think(form: FormElicitationRequest) -> dict[str, Any]:
        await trio.sleep(60)
        return {}

    async with client_of(variant, server_of_tools(), elicitation=think, timeout=5) as client:
        await client.call_tool("ask")
        with pytest.raises(trio.TooSlowError, match="within 30 seconds"):
            await client.call_tool("ask", max_timeout=30)
        with pytest.raises(trio.TooSlowError, match="for 5 seconds"):
            await client.call_tool("sleep")


@pytest.mark.parametrize("name", ["timeout", "max_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, "5", True, math.nan])
async def test_a_timeout_must_be_a_number_above_zero(name: str, seconds: Any, autojump_clock: MockClock) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be a number of seconds above 0, or None; got "):
        open_client(server_of_tools(), **{name: seconds})
    async with open_client(server_of_tools()) as client:
        with pytest.raises(UsageError, match=f"^{name} must be a number of seconds above 0, or None; got "):
            await client.call_tool("sleep", **{name: seconds})


# Completions.


class Cities:
    """A server that completes cities slowly.  `asked` has the values that it was asked to complete."""

    def __init__(self) -> None:
        self.server = Server("cities", capabilities=["prompts", "tools"], change_debounce=0)
        self.asked: list[str] = []
        self.left = 0

        @self.server.prompt
        async def visit(city: str) -> str:
            return city

        @self.server.completion("visit", "city")
        async def cities(value: str) -> list[str]:
            self.asked.append(value)
            try:
                await trio.sleep(1)
            except trio.Cancelled:
                self.left += 1
                raise
            return [f"{value}{end}" for end in ("lo", "slo")]


VISIT = PromptReference("visit")
each_transport_of_completions = each_transport(revisions=[D, E], without=["child"])


@req("cmpl-03")
@each_transport_of_completions
async def test_equal_completions_share_one_request(variant: Variant, autojump_clock: MockClock) -> None:
    cities, found = Cities(), []

    async def complete(client: Client, value: str) -> None:
        found.append((await client.complete(VISIT, "city", value)).values)

    async with client_of(variant, cities.server) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(complete, client, "Os")
            nursery.start_soon(complete, client, "Wars")
        assert sorted(cities.asked) == ["Os", "Wars"]
        assert found.count(["Oslo", "Osslo"]) == 20
        found[0].append("changed")  # other callers must not see this change
        await complete(client, "Os")
        assert found[-1] == ["Oslo", "Osslo"]
        assert len(cities.asked) == 2


@req("cmpl-03")
@each_transport_of_completions
async def test_a_completion_is_cached_for_ten_seconds(variant: Variant, autojump_clock: MockClock) -> None:
    cities = Cities()
    async with client_of(variant, cities.server) as client:
        for pause, asked in ((9.9, 1), (0.1, 1), (0, 2)):
            await client.complete(VISIT, "city", "Os")
            assert len(cities.asked) == asked
            await trio.sleep(pause)
        await client.complete(VISIT, "city", "Os", meta={"x/tenant": "A"})  # other metadata is another request
        assert len(cities.asked) == 3
        if variant.transport != "http json":  # this transport sends no notifications
            async with client.listen(prompts=True) as changes:
                cities.server.notify_list_changed("prompts")
                await anext(changes)
            await client.complete(VISIT, "city", "Os")
            assert len(cities.asked) == 4
    cities.asked.clear()
    async with client_of(variant, cities.server, cache=False) as client:
        for _ in range(2):
            await client.complete(VISIT, "city", "Os")
        assert len(cities.asked) == 2


@req("cmpl-03")
@each_transport_of_completions
async def test_a_cancelled_completion_does_not_cancel_the_shared_request(
    variant: Variant, autojump_clock: MockClock
) -> None:
    cities, found, first = Cities(), [], trio.CancelScope()

    async def complete(client: Client, scope: trio.CancelScope) -> None:
        with scope:
            found.append((await client.complete(VISIT, "city", "Os")).values)

    async with client_of(variant, cities.server) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete, client, first)
            await trio.sleep(0.2)
            nursery.start_soon(complete, client, trio.CancelScope())
            await trio.sleep(0.2)
            first.cancel()
        assert found == [["Oslo", "Osslo"]]
        assert (len(cities.asked), cities.left) == (1, 0)
        with trio.move_on_after(0.5):
            await client.complete(VISIT, "city", "Par")
        with pytest.raises(trio.TooSlowError):
            await client.complete(VISIT, "city", "Par", timeout=0.5)
        await wait_all_tasks_blocked()
        assert cities.left == 2  # no caller waited, so the server got a cancellation
        assert (await client.complete(VISIT, "city", "Par")).values == ["Parlo", "Parslo"]


@each_transport_of_completions
async def test_each_caller_of_a_shared_completion_gets_its_own_error(
    variant: Variant, autojump_clock: MockClock
) -> None:
    errors: list[RequestError] = []

    async def complete(client: Client) -> None:
        with pytest.raises(RequestError) as refused:
            await client.complete(PromptReference("unknown"), "city", "Os")
        errors.append(refused.value)

    async with client_of(variant, Cities().server) as client, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(complete, client)
    assert {error.code for error in errors} == {-32602}
    assert len({id(error) for error in errors}) == 3


@each_era
async def test_a_shared_completion_ends_with_the_client(revision: str, autojump_clock: MockClock) -> None:
    async with no_tasks_left(), trio.open_nursery() as nursery:
        client = await connect_client(nursery, Cities().server, revision=revision)

        async def complete() -> None:
            with pytest.raises(SessionClosed):
                await client.complete(VISIT, "city", "Os")

        nursery.start_soon(complete)
        await trio.sleep(0.5)
        await client.aclose()


# Logs.


@each_transport(revisions=[D, E], without=["child", "http json"])
async def test_a_client_can_stop_requesting_logs(variant: Variant, autojump_clock: MockClock) -> None:
    heard: list[object] = []
    async with client_of(variant, sample_server(), on_log=lambda message: heard.append(message.data)) as client:
        await client.call_tool("talk")
        assert heard == [{"loud": True}]
        if not variant.modern:
            with pytest.raises(NotInThisRevision, match=r'use set_log_level\("emergency"\)'):
                await client.set_log_level(None)
            await client.set_log_level("emergency")
        else:
            await client.set_log_level(None)
        await client.call_tool("talk")
        assert len(heard) == 1
        await client.set_log_level("debug")
        await client.call_tool("talk")
        assert heard[1:] == ["a whisper", {"loud": True}]


# Requests of the server.


class AskingServer:
    """A server with a tool that asks the same question many times at once, and callbacks of a client that wait."""

    def __init__(self) -> None:
        self.server = Server("curious")
        self.refused: list[RequestError] = []
        self.working = self.most = 0
        self.free = trio.Event()

        @self.server.tool
        async def wonder(ctx: Context, kind: str, times: int) -> int:
            """The number of questions that were answered."""
            if ctx.revision == E:
                questions = {f"q{number}": QUESTIONS[kind] for number in range(times)}
                return len(await ctx.ask(**questions))
            answered = 0

            async def ask() -> None:
                nonlocal answered
                try:
                    await ctx.ask(q=QUESTIONS[kind])
                    answered += 1
                except ClientError as error:
                    self.refused.append(error)

            async with trio.open_nursery() as nursery:
                for _ in range(times):
                    nursery.start_soon(ask)
            return answered

    async def work(self, *_: object) -> None:
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            await self.free.wait()
        finally:
            self.working -= 1

    async def think(self, request: SamplingRequest) -> tuple[str, str]:
        await self.work()
        return "so", "a model"

    async def fill(self, form: FormElicitationRequest) -> dict[str, Any]:
        await self.work()
        return {}

    async def list_roots(self) -> list[str]:
        await self.work()
        return ["/tmp"]


QUESTIONS: dict[str, Any] = {
    "sampling": Sample("What is new?", max_tokens=9),
    "elicitation": Elicit("Sure?", FORM),
    "roots": ListRoots(),
}


@each_transport(revisions=[D, E], without=["child", "http json"])
@pytest.mark.parametrize("kind", QUESTIONS)
async def test_a_client_answers_a_limited_number_of_questions_at_once(
    variant: Variant, kind: str, autojump_clock: MockClock
) -> None:
    asking_server = AskingServer()
    callbacks: dict[str, Any] = {
        "sampling": asking_server.think, "elicitation": asking_server.fill, "roots": asking_server.list_roots,
        "limits": Limits(questions=3, questions_waiting=4),
    }  # fmt: skip
    async with client_of(variant, asking_server.server, **callbacks) as client, trio.open_nursery() as nursery:
        answered: list[int] = []

        async def wonder(times: int) -> None:
            answered.append(await client.call_tool("wonder", {"kind": kind, "times": times}, returns=int))

        nursery.start_soon(wonder, 7)
        await wait_all_tasks_blocked()
        assert (asking_server.working, answered) == (3, [])
        if variant.modern:
            with pytest.raises(InputUnavailable, match=r"Limits\.questions_waiting"):
                await wonder(1)
        else:
            nursery.start_soon(wonder, 2)
            await wait_all_tasks_blocked()
            assert [error.code for error in asking_server.refused] == [-32603] * 2
            assert "Limits.questions_waiting" in asking_server.refused[0].message
        asking_server.free.set()
        await wait_all_tasks_blocked()
        await wonder(7)
        assert answered == ([7, 7] if variant.modern else [0, 7, 7])
        assert asking_server.most == 3


@each_era
async def test_a_waiting_question_can_be_cancelled(revision: str, autojump_clock: MockClock) -> None:
    """The next question then gets its turn."""
    asking_server = AskingServer()
    options: dict[str, Any] = {"elicitation": asking_server.fill, "limits": Limits(questions=1)}
    async with (
        open_client(asking_server.server, revision=revision, **options) as client,
        trio.open_nursery() as nursery,
    ):

        async def wonder(seconds: float) -> None:
            with trio.move_on_after(seconds):
                await client.call_tool("wonder", {"kind": "elicitation", "times": 2})

        nursery.start_soon(wonder, 2)  # one question runs and one waits, until both are cancelled
        await wait_all_tasks_blocked()
        nursery.start_soon(wonder, 1)
        nursery.start_soon(wonder, math.inf)
        await trio.sleep(3)
        assert asking_server.working == 1
        asking_server.free.set()
    assert asking_server.most == 1


async def test_many_questions_on_http_do_not_open_many_connections(autojump_clock: MockClock) -> None:
    """Each answer is a POST, and so is each refusal."""
    sent = 200

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/call":
            await out.begin()
            for number in range(sent):
                await out.event({"jsonrpc": "2.0", "id": number, "method": "roots/list"})
            await out.event(received.answer({"content": []}))
            await out.end()
        elif received.operation == "answer":
            await trio.sleep(1)
            await out.reply(202)
        else:
            await out.reply(405)

    async with scripted_server(legacy(handle)) as server:
        with tcp_connects_to(server.connect):
            limits = Limits(questions=4, questions_waiting=4, outgoing=16)
            async with open_client(URL, revision=D, roots=["/tmp"], limits=limits) as client:
                await client.call_tool("ask")
                await trio.sleep(60)
    assert server.operations.count("answer") == sent
    assert len(server.connections) < 50


# Dead connections.


class BreakableConnection(trio.abc.HalfCloseableStream):
    """The client's end of a connection.  When `dead` is set, it silently drops all data in both directions."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.dead = False
        self.closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self._stream.receive_some(max_bytes))
        if self.dead:
            await trio.sleep_forever()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if not self.dead:
            await self._stream.send_all(data)
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self.closed = True
        await self._stream.aclose()


class Connections(list[BreakableConnection]):
    """The connections of a client.  New ones are dead while `stopped` is set."""

    stopped = False


@contextlib.asynccontextmanager
async def client_with_connections(
    variant: Variant, server: Server, **options: Any
) -> AsyncIterator[tuple[Client, Connections]]:
    """A client and its connections."""
    connections = Connections()
    async with no_tasks_left(), serve_over(variant.transport, server) as target:
        dial = trio.open_tcp_stream

        async def connect() -> trio.abc.Stream:
            connections.append(BreakableConnection(await dial("127.0.0.1", 3000)))
            connections[-1].dead = connections.stopped
            return connections[-1]

        with tcp_connects_to(connect):
            async with open_client(target, revision=variant.revision, **options) as client:
                yield client, connections


def break_connections(connections: list[BreakableConnection]) -> None:
    for connection in connections:
        connection.dead = True


def slow_server() -> tuple[Server, trio.Event]:
    """A server with a tool that reports progress once, and then waits."""
    server, go = Server("slow", change_debounce=0), trio.Event()

    @server.tool
    async def wait(ctx: Context) -> str:
        await ctx.progress(1)
        await go.wait()
        return "went"

    return server, go


each_streaming_http = each_transport(revisions=[D, E], without=["memory", "child", "websocket", "http json"])
INTERVAL = 15.0  # of our own servers


async def wait_for(client: Client, outcome: list[Any]) -> None:
    """Call the slow tool, and append its result or error to `outcome`."""
    try:
        outcome.append(await client.call_tool("wait", returns=str, on_progress=lambda *_: None))
    except SessionClosed as error:
        outcome.append(error)


@each_streaming_http
async def test_a_call_does_not_wait_on_a_dead_connection(variant: Variant, autojump_clock: MockClock) -> None:
    server, go = slow_server()
    async with client_with_connections(variant, server) as (client, connections):
        outcome: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, client, outcome)
            await trio.sleep(3.5 * INTERVAL)
            break_connections(connections)
            await trio.sleep(2 * INTERVAL)
            assert outcome == []
            await trio.sleep(2 * INTERVAL)  # now the client has noticed it
            go.set()
        if variant.transport == "http" and not variant.modern:
            assert outcome == ["went"]  # on a resumed stream
        else:
            assert outcome[0].request_may_have_run
        assert await client.call_tool("wait", returns=str) == "went"


@each_streaming_http
async def test_a_subscription_does_not_wait_on_a_dead_connection(variant: Variant, autojump_clock: MockClock) -> None:
    server, _ = slow_server()
    async with client_with_connections(variant, server) as (client, connections), client.listen(tools=True) as changes:
        await trio.sleep(3.5 * INTERVAL)
        break_connections(connections)
        await trio.sleep(5 * INTERVAL)
        if (
            variant.modern or variant.transport == "http+sse"
        ):  # otherwise the server has kept the events for a resumed stream
            with trio.fail_after(1):
                await anext(changes)  # a change may have been missed
        server.remove_tool("wait")
        with trio.fail_after(1):
            await anext(changes)


async def test_a_stream_is_not_resumed_for_ever_on_silent_connections(
    autojump_clock: MockClock,
) -> None:
    """A stopped process has silent connections.  The call fails, and a block that listens continues afterwards."""
    server, _ = slow_server()
    async with (
        client_with_connections(Variant("http", D), server) as (client, connections),
        client.listen(tools=True) as changes,
    ):
        outcome: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, client, outcome)
            await trio.sleep(3.5 * INTERVAL)
            connections.stopped = True
            break_connections(connections)
            await trio.sleep(300)
            assert outcome[0].request_may_have_run
        connections.stopped = False
        await trio.sleep(100)
        server.remove_tool("wait")
        with trio.fail_after(1):
            await anext(changes)


@each_streaming_http
@pytest.mark.parametrize("alive", [0, 1])
async def test_a_stream_with_fewer_than_two_keep_alives_may_be_silent_for_ever(
    variant: Variant, alive: int, autojump_clock: MockClock
) -> None:
    server, _ = slow_server()
    async with client_with_connections(variant, server) as (client, connections), client.listen(tools=True):
        await trio.sleep((alive + 0.5) * INTERVAL)
        break_connections(connections)
        opened = len(connections)
        await trio.sleep(1500)
        assert len(connections) == opened


@each_streaming_http
async def test_a_stream_with_messages_or_keep_alives_is_kept(variant: Variant, autojump_clock: MockClock) -> None:
    """Reports and silence may follow each other in any pattern."""
    server, _ = slow_server()

    @server.tool
    async def rattle(ctx: Context) -> str:
        for step in range(50):
            await ctx.progress(step)
            await trio.sleep((1, 14, 29, 44, 61)[step % 5])
        return "still here"

    async with client_with_connections(variant, server) as (client, connections):
        opened = len(connections)
        assert await client.call_tool("rattle", returns=str, on_progress=lambda *_: None) == "still here"
        assert len(connections) <= opened + 2


@pytest.mark.parametrize(
    ("sign", "noticed"),
    [
        (b": ping\n\n", True),
        (b"event: ping\ndata: {}\n\n", True),
        (b"data:\n\n", True),
        (b"id: 1\ndata:\n\n", False),  # an event id, from which a stream can be resumed
        (
            b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}\n\n',
            False,
        ),
    ],
)
async def test_an_event_without_message_or_id_is_a_keep_alive(
    sign: bytes, noticed: bool, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.begin()
        for _ in range(3):
            await trio.sleep(10)
            await out.chunk(sign)
        await out.wait_for_close()

    async with scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL) as client:
                start = trio.current_time()
                with (
                    trio.move_on_after(1000) as scope,
                    pytest.raises(NoResponse) if noticed else contextlib.nullcontext(),
                ):
                    await client.call_tool("t")
                assert scope.cancelled_caught is not noticed
                assert trio.current_time() == start + (60 if noticed else 1000)


# Streams of cancelled calls.


class Gateway:
    """A server that sends all messages of a session on the stream of the oldest unanswered call, even if cancelled."""

    def __init__(self) -> None:
        self.streams: list[ResponseWriter] = []

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/call":
            await out.begin()
            self.streams.append(out)
            if received.message["params"]["name"] == "quick":
                await self.say({"id": received.id, "result": {"content": [], "structuredContent": {"result": 7}}})
            await out.wait_for_close()
        elif received.operation in ("GET", "resources/subscribe"):
            await out.reply(405)
        else:
            await out.reply(202)

    async def say(self, message: dict[str, Any]) -> None:
        await self.streams[0].event({"jsonrpc": "2.0", **message})

    @property
    def open(self) -> int:
        return sum(not out.stream._into.no_sender for out in self.streams)


@contextlib.asynccontextmanager
async def client_of_gateway(gateway: Gateway, **options: Any) -> AsyncIterator[tuple[Client, ScriptedHttpServer]]:
    async with scripted_server(legacy(gateway.handle, logging={})) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL, revision=D, **options) as client:
                yield client, server
    assert gateway.open == 0


async def cancel_a_call(client: Client) -> None:
    with trio.move_on_after(1):
        await client.call_tool("slow")


async def test_the_stream_of_a_cancelled_call_is_still_read(autojump_clock: MockClock) -> None:
    gateway, heard = Gateway(), []
    options = {"roots": ["/tmp"], "on_log": lambda message: heard.append(message.data), "log_level": None}
    async with client_of_gateway(gateway, **options) as (client, server):
        await cancel_a_call(client)
        await trio.sleep(60)
        await gateway.say({"method": "notifications/message", "params": {"level": "error", "data": "on"}})
        await gateway.say({"id": 1, "method": "roots/list"})
        assert await client.call_tool("quick", returns=int) == 7
        await wait_all_tasks_blocked()
        assert heard == ["on"]
        assert "answer" in server.operations
        answer = server.requests[server.operations.index("tools/call")].answer({"content": []})
        assert gateway.open == 1
        await gateway.say(answer)  # the late answer ends its stream
        await trio.sleep(2)
        assert gateway.open == 0


async def test_the_number_of_streams_of_cancelled_calls_is_limited(autojump_clock: MockClock) -> None:
    gateway, heard = Gateway(), []
    async with client_of_gateway(gateway, on_log=lambda message: heard.append(message.data), log_level=None) as (
        client,
        _,
    ):
        for _ in range(20):
            await cancel_a_call(client)
            await gateway.say({"method": "notifications/message", "params": {"level": "error", "data": len(heard)}})
        await wait_all_tasks_blocked()
        assert heard == [*range(20)]  # the oldest stream, which has the messages, is kept
        assert gateway.open == 8


async def test_the_number_of_streams_of_calls_cancelled_together_is_limited(autojump_clock: MockClock) -> None:
    gateway = Gateway()
    async with client_of_gateway(gateway) as (client, _server):
        with trio.move_on_after(1):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(client.call_tool, "slow")
        await wait_all_tasks_blocked()
        assert gateway.open == 8


async def test_our_own_servers_end_the_stream_of_a_cancelled_call(autojump_clock: MockClock) -> None:
    async with client_with_connections(Variant("http", D), sample_server()) as (client, connections):
        with trio.move_on_after(1):
            await client.call_tool("hold", {"name": "it"})
        await trio.sleep(2)
        opened = len(connections)
        for number in range(10):
            assert await client.call_tool("add", {"a": number, "b": 1}, returns=int) == number + 1
        assert len(connections) == opened  # the connection is used again


@pytest.mark.parametrize("about", ["the call", "the session"])
async def test_the_time_of_streams_of_cancelled_calls_is_limited(about: str, autojump_clock: MockClock) -> None:
    gateway = Gateway()
    async with client_of_gateway(gateway) as (client, server):
        await cancel_a_call(client)
        token = server.requests[server.operations.index("tools/call")].id
        of_the_call: Any = {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}}
        for minute in range(1, 70):
            await trio.sleep(60 if minute > 1 else 59)  # the first minute began with the call
            assert gateway.open == (minute <= (60 if about == "the session" else 5))
            if gateway.open:
                said = {"method": "notifications/message", "params": {"level": "info", "data": minute}}
                await gateway.say(said if about == "the session" else of_the_call)
                of_the_call["params"]["progress"] = minute + 1
                await wait_all_tasks_blocked()


@pytest.mark.parametrize("variant", [Variant("http", E), Variant("http json", D)], ids=" ".join)
async def test_a_stream_that_carries_only_its_call_is_closed_with_it(
    variant: Variant, autojump_clock: MockClock
) -> None:
    """A modern cancellation closes the connection, and a JSON response has no other messages."""
    async with client_with_connections(variant, sample_server()) as (client, connections):
        with trio.move_on_after(1):
            await client.call_tool("hold", {"name": "it"})
        await wait_all_tasks_blocked()
        assert [connection.closed for connection in connections].count(True) == 1
        assert await client.call_tool("ledger", returns=list[str]) == ["it began", "it was cancelled"]


# Changes that a server announces without a declared capability.

CAPABILITIES = {"tools": {"listChanged": False}, "resources": {"subscribe": False}, "logging": {}}
UNDECLARED_EXCHANGE = """
> {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": "..."}
< {"jsonrpc": "2.0", "id": 1, "result": INITIALIZED}
> {"jsonrpc": "2.0", "method": "notifications/initialized"}
> {"jsonrpc": "2.0", "id": 2, "method": "resources/subscribe", "params": {"uri": "r://1"}}
< {"jsonrpc": "2.0", "id": 2, "result": {}}
< {"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "r://1"}}
< {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
> {"jsonrpc": "2.0", "id": 3, "method": "resources/unsubscribe", "params": {"uri": "r://1"}}
< {"jsonrpc": "2.0", "id": 3, "result": {}}
"""
ANNOUNCED: list[tuple[str, dict[str, Any]]] = [
    ("notifications/tools/list_changed", {}),
    ("notifications/resources/updated", {"uri": "r://1"}),
    ("notifications/tools/list_changed", {}),
    ("notifications/message", {"level": "error", "data": "x"}),
]


@contextlib.asynccontextmanager
async def client_without_declarations(said: str = UNDECLARED_EXCHANGE) -> AsyncIterator[Client]:
    """A client of a server that sends its lines of `said`, each after the preceding lines of the client."""
    info = {"name": "older", "version": "1"}
    result = {"protocolVersion": D, "capabilities": CAPABILITIES, "serverInfo": info}
    ours, theirs = memory_stream_pair()
    heard: list[Any] = []

    async def play() -> None:
        rest = b""
        for line in said.replace("INITIALIZED", json.dumps(result)).strip().split("\n"):
            if line[0] == "<":
                await theirs.send_all(line[2:].encode() + b"\n")
                continue
            while b"\n" not in rest:
                rest += await theirs.receive_some()
            sent, _, rest = rest.partition(b"\n")
            heard.append(json.loads(sent))
            expected = json.loads(line[2:])
            assert heard[-1] == ({**expected, "params": heard[-1]["params"]} if len(heard) == 1 else expected)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        async with open_client(ours, revision=D) as client:
            yield client
    assert len(heard) == said.count("> ")


async def test_a_block_can_wait_for_undeclared_changes(autojump_clock: MockClock) -> None:
    """The messages are those of servers of mcp up to 1.30."""
    async with client_without_declarations() as client:
        async with client.listen(tools=True, resources="r://1", undeclared=True) as changes:
            assert {change.kind for change in changes.missing} == {ChangeKind.TOOLS, ChangeKind.RESOURCE}
            assert [(await anext(changes)).kind for _ in range(2)] == [ChangeKind.RESOURCE, ChangeKind.TOOLS]
        await wait_all_tasks_blocked()
        with pytest.raises(SubscriptionUnsupported):
            async with client.listen(tools=True):
                pass
        assert client.deviations == ()


UNSERVED_EXCHANGE = """
> {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": "..."}
< {"jsonrpc": "2.0", "id": 1, "result": INITIALIZED}
> {"jsonrpc": "2.0", "method": "notifications/initialized"}
> {"jsonrpc": "2.0", "id": 2, "method": "resources/subscribe", "params": {"uri": "r://1"}}
< {"jsonrpc": "2.0", "id": 2, "error": {"code": -32601, "message": "Method not found"}}
< {"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": "r://1"}}
> {"jsonrpc": "2.0", "id": 3, "method": "resources/unsubscribe", "params": {"uri": "r://1"}}
< {"jsonrpc": "2.0", "id": 3, "error": {"code": -32601, "message": "Method not found"}}
"""


async def test_a_block_can_wait_for_changes_of_a_server_without_subscriptions(
    autojump_clock: MockClock,
) -> None:
    async with client_without_declarations(UNSERVED_EXCHANGE) as client:
        async with client.listen(resources="r://1", undeclared=True) as changes:
            assert (await anext(changes)).item == "r://1"
        await wait_all_tasks_blocked()
        assert client.deviations == ()


class AnnouncingServer:
    """A server on HTTP that announces changes without declaring them."""

    def __init__(self) -> None:
        self.said = trio.Event()

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await out.begin()
            await self.said.wait()
            for method, params in ANNOUNCED:
                await out.event({"jsonrpc": "2.0", "method": method, "params": params})
            await out.wait_for_close()
        elif received.operation in ("resources/subscribe", "resources/unsubscribe"):
            await out.json(received.answer({}))
        else:
            await out.reply(202)


@contextlib.asynccontextmanager
async def client_of_announcing_server(**options: Any) -> AsyncIterator[tuple[Client, AnnouncingServer]]:
    playing = AnnouncingServer()
    async with scripted_server(legacy(playing.handle, **CAPABILITIES)) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL, revision=D, **options) as client:
                yield client, playing


async def test_a_block_can_wait_for_undeclared_changes_on_http(autojump_clock: MockClock) -> None:
    async with client_of_announcing_server() as (client, playing):
        async with client.listen(tools=True, resources=["r://1"], undeclared=True) as changes:
            playing.said.set()
            assert {(await anext(changes)).kind for _ in range(2)} == {ChangeKind.RESOURCE, ChangeKind.TOOLS}
        assert client.deviations == ()


async def test_changes_without_a_listener_reach_the_callback_for_notifications(autojump_clock: MockClock) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    async with client_of_announcing_server(on_notification=lambda method, params: seen.append((method, params))) as (
        client,
        playing,
    ):
        playing.said.set()
        await trio.sleep(1)
        assert seen == ANNOUNCED
        told = [each for each in client.deviations if "undeclared=True" in each]
        assert [each.split()[2] for each in told] == [  # once each
            "notifications/tools/list_changed", "notifications/resources/updated"
        ]  # fmt: skip


async def test_changes_with_a_listener_do_not_reach_the_callback(autojump_clock: MockClock) -> None:
    seen: list[str] = []
    options: Any = {"on_notification": lambda method, params: seen.append(method), "on_log": lambda message: None}
    async with client_of_announcing_server(log_level=None, **options) as (client, playing):
        async with client.listen(resources=["r://1"], undeclared=True) as changes:
            playing.said.set()
            await anext(changes)
            await trio.sleep(1)
        assert seen == ["notifications/tools/list_changed"] * 2


@pytest.mark.parametrize("acknowledged", [{}, {"toolsListChanged": True}])
async def test_a_block_can_wait_for_unacknowledged_changes(acknowledged: Any, autojump_clock: MockClock) -> None:
    """In 2026-07-28 the server acknowledges the changes that it will announce."""

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        about = {"_meta": {"io.modelcontextprotocol/subscriptionId": received.id}}
        await out.begin()
        for method, params in (
            ("notifications/subscriptions/acknowledged", {"notifications": acknowledged}),
            ("notifications/prompts/list_changed", {}),
        ):
            await out.event({"jsonrpc": "2.0", "method": method, "params": {**about, **params}})
        await out.wait_for_close()

    async with scripted_server(modern(handle)) as server:
        with tcp_connects_to(server.connect):
            async with (
                open_client(URL) as client,
                client.listen(tools=True, prompts=True, undeclared=True) as changes,
            ):
                assert (await anext(changes)).kind is ChangeKind.PROMPTS
                assert len(changes.missing) == 2 - len(acknowledged)


# Pings and TCP.


@req("ping-02", "ping-03", "ping-04", "ping-05", "ping-06")
@each_transport(revisions=[D, E], without=["memory", "child"])
async def test_a_server_that_does_not_answer_a_ping_is_lost(
    variant: Variant, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_with_connections(variant, sample_server(), ping_seconds=2) as (client, connections):
        async with trio.open_nursery() as nursery:
            errors: list[SessionClosed] = []

            async def call() -> None:
                try:
                    await client.call_tool("hold", {"name": "it"})
                except SessionClosed as error:
                    errors.append(error)

            nursery.start_soon(call)
            await trio.sleep(11)  # the server has answered the pings in this time
            assert errors == []
            break_connections(connections)
            await trio.sleep(8)
            if variant.modern:  # modern revisions have no ping
                assert errors == []
                nursery.cancel_scope.cancel()
            else:
                assert "did not answer a ping within 2 seconds (ping_seconds)" in str(errors[0])
                assert "did not answer a ping" in caplog.text
        if not variant.modern and variant.transport != "websocket":
            assert errors[0].request_may_have_run  # type: ignore[attr-defined]
            assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3  # in another session


@req("ping-05")
@pytest.mark.parametrize("says", ["nothing", "an error", "reports", "junk"])
async def test_any_message_of_the_server_counts_as_the_answer_to_a_ping(says: str, autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()

    async def play() -> None:
        rest = b""
        async for data in theirs:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message["method"] == "initialize":
                    result = {"protocolVersion": D, "capabilities": {}, "serverInfo": {"name": "p", "version": "1"}}
                    await say({"id": message["id"], "result": result})
                elif message["method"] == "ping" and says != "nothing":
                    answers: dict[str, Any] = {
                        "an error": {"id": message["id"], "error": {"code": -32601, "message": "no"}},
                        "junk": {"id": message["id"], "result": 7},
                        "reports": {"method": "notifications/message", "params": {"level": "info", "data": 1}},
                    }
                    await trio.sleep(1)
                    await say(answers[says])

    async def say(message: dict[str, Any]) -> None:
        await theirs.send_all(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        async with open_client(ours, revision=D, ping_seconds=3) as client:
            await trio.sleep(60)
            if says == "nothing":
                with pytest.raises(SessionClosed, match="did not answer a ping"):
                    await client.ping()
            else:
                with trio.move_on_after(1) as scope:
                    await client.request("ping") if says == "reports" else await trio.sleep_forever()
                assert scope.cancelled_caught
        nursery.cancel_scope.cancel()


async def by_stream(end: trio.SocketStream) -> None:
    await serve_stream(sample_server(), end)


async def by_http_stream(end: trio.SocketStream) -> None:
    await serve_http_stream(sample_server(), end, allowed_hosts=["127.0.0.1"])


@pytest.mark.parametrize("how", ["http", "websocket", "a stream of http", "a stream"])
async def test_both_ends_of_tcp_use_keep_alive(how: str) -> None:
    if not hasattr(socket, "TCP_KEEPIDLE"):
        pytest.skip("this system names its options otherwise")
    ends: list[Any] = []
    accept, dial = trio.SocketListener.accept, trio.open_tcp_stream

    async def accepted(listener: trio.SocketListener) -> trio.SocketStream:
        ends.append(await accept(listener))
        return ends[-1]

    async def dialled(host: str, port: int) -> trio.SocketStream:
        ends.append(await dial(host, port))
        return ends[-1]

    async def target(nursery: trio.Nursery) -> Any:
        if "stream" not in how:
            address = await nursery.start(serve_http, sample_server())
            return address.url if how == "http" else address.websocket_url
        serve = by_http_stream if "http" in how else by_stream
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        return f"http://127.0.0.1:{port}/mcp" if "http" in how else await dialled("127.0.0.1", port)

    with (
        mock.patch.object(trio.SocketListener, "accept", accepted),
        mock.patch.object(trio, "open_tcp_stream", dialled),
    ):
        async with trio.open_nursery() as nursery:
            async with open_client(await target(nursery)) as client:
                assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3
                assert len(ends) >= 2
                for end in ends:
                    assert end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
                    assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 15
                    assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
            nursery.cancel_scope.cancel()
