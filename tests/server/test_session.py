"""The server's end of one session: the end of calls at the same time as other events, and the wire of each message."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.checkpoints import PipeEnd, one_byte_pipe
from tests.server.raw_client import CAPABILITIES, LATEST, REVISION_NAMES, every_revision, legacy
from tests.server.wire_stub import WireStub, session_of
from trio_mcp import Context, ElicitUrl, Limits, Server, UsageError, serve_stream
from trio_mcp.core import (
    META_CLIENT_CAPABILITIES,
    META_LOG_LEVEL,
    META_VERSION,
    REVISIONS,
    Error,
    LinkKind,
    Notification,
    Request,
    Response,
    Terms,
    encode,
)
from trio_mcp.errors import NotDeclared
from trio_mcp.server import Run, ServerSession

OLD = REVISION_NAMES[-2]


def call(id: int, name: str) -> bytes:
    meta = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: {}}
    message = {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, "_meta": meta}}
    return json.dumps(message).encode() + b"\n"


def new_server(**options: Any) -> Server:
    server = Server("working", **options)

    @server.tool
    async def quick() -> str:
        return "quick"

    @server.tool
    async def slow() -> str:
        await trio.sleep(5)
        return "slow"

    return server


@pytest.mark.parametrize("shared", [True, False])
async def test_a_cancelled_connection_ends_its_calls(shared: bool, autojump_clock: MockClock) -> None:
    server = new_server()
    ours, theirs = memory_stream_pair()
    start = trio.current_time()
    with trio.move_on_after(1):
        async with trio.open_nursery() as nursery:
            if shared:
                await nursery.start(_running, server)
            nursery.start_soon(serve_stream, server, theirs)
            await ours.send_all(call(1, "slow"))
            await trio.sleep_forever()
    assert trio.current_time() == start + 1
    assert (server.statistics().running, server.statistics().connections) == (0, 0)


async def _running(server: Server, task_status: trio.TaskStatus[None]) -> None:
    async with server.running():
        task_status.started()
        await trio.sleep_forever()


async def test_an_id_may_be_used_again_as_soon_as_its_answer_is_queued(autojump_clock: MockClock) -> None:
    """No client should do this, but it must not break the server."""
    server = new_server(limits=Limits(outgoing=0))
    ours, theirs = one_byte_pipe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs)
        # The first answer blocks the wire, so the other two calls count as running until there is room.
        await ours.send_all(b"".join(call(id, "quick") for id in (1, 2, 3)))
        await wait_all_tasks_blocked()
        assert server.statistics().running == 3
        await ours.send_all(b"".join(call(id, "slow") for id in (2, 3)))
        await wait_all_tasks_blocked()
        assert server.statistics().running == 5
        answers = await _answers(ours, 5)
        assert sorted((each["id"], each["result"]["content"][0]["text"]) for each in answers) == [
            (1, "quick"), (2, "quick"), (2, "slow"), (3, "quick"), (3, "slow"),
        ]  # fmt: skip
        assert server.statistics().running == 0
        await ours.send_eof()


async def _answers(stream: PipeEnd, count: int) -> list[Any]:
    data = b""
    while data.count(b"\n") < count:
        data += await stream.receive_some()
    await wait_all_tasks_blocked()
    return [json.loads(line) for line in data.splitlines()]


# Several wires.


def meta(revision: str) -> dict[str, Any]:
    terms = {META_VERSION: LATEST, META_CLIENT_CAPABILITIES: CAPABILITIES[LATEST], META_LOG_LEVEL: "info"}
    return {"progressToken": "p", **(terms if revision == LATEST else {})}


def new_request(id: int, revision: str, name: str, method: str = "tools/call") -> Request:
    params = {"name": name} if method == "tools/call" else {"notifications": {"toolsListChanged": True}}
    return Request(id, method, {**params, "_meta": meta(revision)})


def receive(conversation: ServerSession, *requests: Request, wire: WireStub) -> None:
    for request in requests:
        conversation.receive(request, trio.current_time(), wire=wire)


def sent_to(conversation: ServerSession, wire: WireStub) -> list[Any]:
    """The outgoing messages of this wire."""
    return [message for message, label in conversation.session.outgoing() if label is wire]


def new_session(run: Run, revision: str, own: WireStub) -> ServerSession:
    """The server's end over HTTP: of a session, or of one request of the modern era."""
    return session_of(run, revision, own) if revision != LATEST else ServerSession(run, own, link=LinkKind.EXCHANGE)


@every_revision
async def test_messages_of_a_request_go_to_the_wire_on_which_it_came(revision: str, autojump_clock: MockClock) -> None:
    server = Server("wires")

    @server.tool
    async def tells(ctx: Context) -> str:
        await ctx.progress(1)
        await ctx.log("info", "x")
        await trio.sleep(1)
        return "done"

    async with server._joined() as run:
        own, wires = WireStub(), (WireStub(), WireStub())
        conversation = new_session(run, revision, own)
        if revision != LATEST:
            conversation.receive(Request(9, "logging/setLevel", {"level": "info"}), 0)
            assert [label for _, label in conversation.session.outgoing()] == [own]
        for id, wire in enumerate(wires):
            receive(conversation, new_request(id, revision, "tells"), wire=wire)
        await trio.sleep(0.5)
        told = conversation.session.outgoing()
        for wire in wires:
            assert [type(message) for message, label in told if label is wire] == [Notification, Notification]
            assert wire.woken
        await trio.sleep(1)
        answers = conversation.session.outgoing()
        assert {(message.id, label) for message, label in answers} == set(enumerate(wires))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("revision", "kind"),
    [*((name, "call") for name in REVISION_NAMES), (LATEST, "subscription")],
)
async def test_a_request_that_ends_without_an_answer_wakes_its_wire(
    revision: str, kind: str, autojump_clock: MockClock
) -> None:
    server = new_server(capabilities=["tools"])
    async with server._joined() as run:
        own, wire = WireStub(), WireStub()
        conversation = new_session(run, revision, own)
        method = "subscriptions/listen" if kind == "subscription" else "tools/call"
        receive(conversation, new_request(2, revision, "slow", method), wire=wire)
        await wait_all_tasks_blocked()
        before = wire.woken
        conversation.receive(Notification("notifications/cancelled", {"requestId": 2}), 0, wire=WireStub())
        await wait_all_tasks_blocked()
        assert wire.woken == before + 1
        assert conversation.session.label_of(2) is None
        server.notify_list_changed("tools")
        await trio.sleep(1)
        assert not sent_to(conversation, wire)


@req("http-28")
@legacy
async def test_a_lost_wire_ends_no_call_and_a_lost_session_all_calls(revision: str, autojump_clock: MockClock) -> None:
    server = new_server()
    async with server._joined() as run:
        wire = WireStub()
        conversation = session_of(run, revision, WireStub())
        receive(conversation, new_request(1, revision, "slow"), wire=wire)
        await trio.sleep(1)
        assert not conversation.session.connection_lost(1)  # the stream of this request
        await trio.sleep(5)
        assert [type(message) for message in sent_to(conversation, wire)] == [Response]
        receive(conversation, new_request(2, revision, "slow"), wire=wire)
        await trio.sleep(1)
        conversation.connection_lost("its client has ended the session")
        await wait_all_tasks_blocked()
        assert server.statistics().running == 0
        assert not sent_to(conversation, wire)


@legacy
async def test_a_question_over_a_json_only_wire_fails_with_a_hint(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, began = Server("json"), []

    @server.tool
    async def asks(ctx: Context) -> str:
        await ctx.progress(1)
        await ctx.log("emergency", "x")
        began.append(trio.current_time())
        return str(await ctx.sample("How many?", max_tokens=1))

    async with server._joined() as run:
        own, wire = WireStub(), WireStub(answers_only=True)
        conversation = session_of(run, revision, own)
        receive(conversation, new_request(1, revision, "asks"), wire=wire)
        await wait_all_tasks_blocked()
        (answer,) = conversation.session.outgoing()
        assert answer[1] is wire
        assert isinstance(answer[0], Error)
        for said in (answer[0].message, caplog.text):
            assert "json_only" in said
            assert "Accept" in said
        assert began == [trio.current_time()]


async def test_reports_are_checked_even_if_they_cannot_be_sent(autojump_clock: MockClock) -> None:
    server, failed = Server("json"), []

    @server.tool
    async def tells(ctx: Context) -> str:
        await ctx.progress(2)
        for report in (lambda: ctx.progress(1), lambda: ctx.log("loud", "x")):  # type: ignore[arg-type]
            try:
                await report()
            except UsageError as error:
                failed.append(str(error))
        return "done"

    async with server._joined() as run:
        wire = WireStub(answers_only=True)
        receive(new_session(run, LATEST, wire), new_request(1, LATEST, "tells"), wire=wire)
        await wait_all_tasks_blocked()
    assert len(failed) == 2


async def test_a_modern_question_can_be_sent_as_a_json_answer(autojump_clock: MockClock) -> None:
    server = Server("json")

    @server.tool
    async def asks(ctx: Context) -> str:
        answer = await ctx.elicit("Sure?", bool)
        await ctx.progress(1)
        return type(answer).__name__

    async with server._joined() as run:
        wires = WireStub(answers_only=True), WireStub()
        first = new_session(run, LATEST, wires[0])
        receive(first, new_request(1, LATEST, "asks"), wire=wires[0])
        await wait_all_tasks_blocked()
        (asking,) = sent_to(first, wires[0])
        result = json.loads(encode(asking))["result"]  # the queue has only its bytes
        assert result["resultType"] == "input_required"
        first.connection_lost("the response has ended")
        # The handler goes on with another request, and reports and answers on the wire of that request.
        (key,) = result["inputRequests"]
        again = new_request(2, LATEST, "asks")
        again.params["requestState"] = result["requestState"]
        again.params["inputResponses"] = {key: {"action": "decline"}}
        second = new_session(run, LATEST, wires[1])
        receive(second, again, wire=wires[1])
        await wait_all_tasks_blocked()
        told, answer = sent_to(second, wires[1])
        assert (told.method, answer.id) == ("notifications/progress", 2)
        assert answer.result["content"][0]["text"] == "Declined"


@legacy
async def test_changes_go_by_the_wire_of_the_session_and_wait_while_it_is_full(
    revision: str, autojump_clock: MockClock
) -> None:
    server = Server("changes", capabilities=["tools"])
    async with server._joined() as run:
        own, other = WireStub(), WireStub(full=True)
        conversation = session_of(run, revision, own)
        receive(conversation, Request(1, "ping", {}), wire=other)
        assert [type(message) for message in sent_to(conversation, other)] == [Response]
        server.notify_list_changed("tools")
        await trio.sleep(1)
        messages = conversation.session.outgoing()
        assert [label for _, label in messages] == [None]
        assert own.woken == 1
        own.is_full = True
        for _ in range(3):
            server.notify_list_changed("tools")
            await trio.sleep(1)
        assert not conversation.session.queued
        own.is_full = False
        conversation.release()
        assert len(conversation.session.outgoing()) == 1


@pytest.mark.parametrize("revision", [OLD])
async def test_a_completed_page_is_reported_by_its_call_or_by_the_session(
    revision: str, autojump_clock: MockClock
) -> None:
    server, calls = Server("pages"), []
    page = ElicitUrl("Pay", "https://example.com/pay")

    @server.tool
    async def pay(ctx: Context) -> str:
        calls.append(ctx)
        with trio.move_on_after(1):
            await ctx.ask(page=page)
        await ctx.completed(page)
        return "done"

    async with server._joined() as run:
        own, wire = WireStub(), WireStub()
        conversation = session_of(run, revision, own)
        receive(conversation, new_request(1, revision, "pay"), wire=wire)
        await trio.sleep(2)
        methods = [getattr(message, "method", "the answer") for message in sent_to(conversation, wire)]
        done = "notifications/elicitation/complete"
        assert methods == ["elicitation/create", "notifications/cancelled", done, "the answer"]
        before = own.woken
        assert await calls[0].completed(page)
        assert [label for _, label in conversation.session.outgoing()] == [None]
        assert own.woken == before + 1


@every_revision
async def test_a_server_that_stops_closes_each_wire_with_an_open_request(
    revision: str, autojump_clock: MockClock
) -> None:
    server = new_server()
    async with server._joined() as run:
        own, wire, over = WireStub(), WireStub(), WireStub()
        conversation = new_session(run, revision, own)
        receive(conversation, new_request(1, revision, "slow"), wire=wire)
        receive(conversation, new_request(2, revision, "quick"), wire=over)
        await trio.sleep(1)
        conversation.stop()
        assert (own.closed, wire.closed, over.closed) == (True, True, False)
        await wait_all_tasks_blocked()
        assert server.statistics().running == 0


@every_revision
async def test_a_drain_answers_each_request_on_its_own_wire(revision: str, autojump_clock: MockClock) -> None:
    server = new_server()
    async with server._joined() as run:
        wires = {name: WireStub() for name in ("runs", "listens", "late")}
        conversation = new_session(run, revision, WireStub())
        receive(conversation, new_request(1, revision, "slow"), wire=wires["runs"])
        if revision == LATEST:
            receive(conversation, new_request(3, revision, "", "subscriptions/listen"), wire=wires["listens"])
        conversation.session.outgoing()
        run.draining = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversation.drain)
            await wait_all_tasks_blocked()
            receive(conversation, new_request(4, revision, "slow"), wire=wires["late"])
            went = conversation.session.outgoing()
            expected = {(4, Error, wires["late"])}
            if revision == LATEST:
                expected |= {(3, Response, wires["listens"])}
            assert {(message.id, type(message), label) for message, label in went} == expected  # type: ignore[union-attr]
        (answer,) = sent_to(conversation, wires["runs"])
        assert isinstance(answer, Response)


async def test_a_legacy_request_needs_no_handshake_under_given_terms(
    autojump_clock: MockClock,
) -> None:
    server, failed = Server("alone"), []

    @server.tool
    async def asks(ctx: Context) -> str:
        try:
            await ctx.sample("How many?", max_tokens=1)
        except NotDeclared as error:  # the error is not about the response
            failed.append(type(error).__name__)
        return ctx.revision

    async with server._joined() as run:
        wire = WireStub()
        conversation = ServerSession(run, wire, link=LinkKind.SESSION, terms=Terms(REVISIONS[OLD]))
        receive(conversation, new_request(1, OLD, "asks"), wire=wire)
        await wait_all_tasks_blocked()
        (answer,) = sent_to(conversation, wire)
        assert answer.result["content"][0]["text"] == OLD
    assert failed == ["NotDeclared"]
