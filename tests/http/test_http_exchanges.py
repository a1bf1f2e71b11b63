"""Messages of a session over HTTP: questions of the server, changes, batches and cancellations."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import ProtocolViolation, Stream, notification, request, response
from tests.http.scripted_server import (
    QUESTIONS,
    SESSIONS,
    TOOLS,
    UPDATED,
    B,
    E,
    ScriptedServer,
    begin_post,
    methods,
    play_call,
    play_params,
    session_revisions,
    text_of,
    wait_until_idle,
)
from tests.http.served import served
from tests.requirements import req
from tests.server.raw_client import CANCELLED, PROGRESS
from trio_mcp import Limits

# Questions to the client


@req("http-22", "http-125")
@pytest.mark.parametrize(
    ("revision", "kind"), [(each, kind) for kind in QUESTIONS for each in SESSIONS if each >= QUESTIONS[kind][2]]
)
async def test_a_question_comes_on_the_stream_of_its_call(revision: str, kind: str, autojump_clock: MockClock) -> None:
    method, answer, _ = QUESTIONS[kind]
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        async with (
            web.stream(session=session) as changes,
            web.stream(play_call("wait go", id=1), session=session, headers={"Accept": "text/event-stream"}) as other,
            web.stream(play_call(kind, id=2), session=session) as stream,
        ):
            question = await stream.message()
            assert question["method"] == method
            posted = await web.post(response(question["id"], answer), session=session)
            assert (posted.status, posted.body) == (202, b"")
            assert text_of(await stream.response()) == "done"
            scripted.go["go"].set()
            await other.response()
            assert methods(other.seen) == ["the answer"]
            assert changes.seen == []
        assert len(scripted.answers) == 1


@session_revisions
async def test_questions_of_several_calls_do_not_mix(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        streams = [await web.open(play_call("sample", id=id), session=session) for id in range(5)]
        questions = [await stream.message() for stream in streams]
        assert len({each["id"] for each in questions}) == 5
        for stream, question in reversed(list(zip(streams, questions, strict=True))):
            await web.post(response(question["id"], QUESTIONS["sample"][1]), session=session)
            assert text_of(await stream.response()) == "done"


@req("http-125")
@session_revisions
async def test_a_question_lost_with_its_connection_is_replayed(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        stream = await web.open(play_call("progress", "wait go", "sample"), session=session)
        await stream.message()
        await stream.aclose()
        await wait_until_idle()
        scripted.go["go"].set()
        await wait_until_idle()
        async with web.stream(session=session, after=stream.last_event_id) as rest:
            question = await rest.message()
            assert question["method"] == "sampling/createMessage"
            await web.post(response(question["id"], QUESTIONS["sample"][1]), session=session)
            assert text_of(await rest.response()) == "done"


@session_revisions
async def test_an_answer_in_another_session_is_ignored(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session, other = await web.initialize(revision), await web.initialize(revision)
        async with web.stream(play_call("sample"), session=session) as stream:
            question = await stream.message()
            wrong = {"role": "assistant", "content": {"type": "text", "text": "wrong"}, "model": "m"}
            assert (await web.post(response(question["id"], wrong), session=other)).status == 202
            await wait_until_idle()
            assert scripted.answers == []
            await web.post(response(question["id"], QUESTIONS["sample"][1]), session=session)
            await stream.response()
            assert scripted.answers[0].content.text == "something"


@req("http-16")
@session_revisions
async def test_a_malformed_answer_is_refused_and_ends_the_question(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        async with web.stream(play_call("sample"), session=session) as stream:
            question = await stream.message()
            wrong = {"jsonrpc": "2.0", "id": question["id"], "result": 7}
            assert (await web.post(wrong, session=session)).status == 400
            assert (await stream.response())["result"]["isError"]


async def test_in_the_modern_revision_a_question_is_the_answer(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        first = await web.post(play_call("progress", "ask", revision=E))
        assert first.type == "text/event-stream"
        result = first.result
        assert result["resultType"] == "input_required"
        (key,) = result["inputRequests"]
        again = {
            **play_params("progress", "ask"),
            "inputResponses": {key: QUESTIONS["ask"][1]},
            "requestState": result["requestState"],
        }
        second = await web.call("tools/call", again)
        assert second.type == "application/json"
        assert text_of(second.message) == "done"


# The standalone stream


@req("http-34", "http-36", "http-35")
@session_revisions
async def test_the_stream_of_a_session_has_changes_only(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        await web.call("resources/subscribe", {"uri": "r://1"}, session=session)
        async with web.stream(session=session) as changes:
            answer = await web.post(
                play_call("progress", "touch r://1", "tools", "sleep 1", "progress"), session=session
            )
            assert methods(answer.messages) == [PROGRESS, PROGRESS, "the answer"]
            await wait_until_idle()
            assert {(await changes.message())["method"] for _ in range(2)} == {TOOLS, UPDATED}
            assert methods(changes.seen).count("the answer") == 0


@session_revisions
async def test_changes_wait_until_a_stream_is_open(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        scripted.server.notify_list_changed("tools")
        await trio.sleep(100)
        async with web.stream(session=session) as changes:
            assert (await changes.message())["method"] == TOOLS
        await wait_until_idle()
        scripted.server.notify_list_changed("resources")
        await trio.sleep(100)
        async with web.stream(session=session) as changes:
            assert (await changes.message())["method"] == "notifications/resources/list_changed"


@session_revisions
async def test_the_changes_that_wait_for_a_stream_are_limited(revision: str, autojump_clock: MockClock) -> None:
    """A change that already waits is not added again, so a client without a stream costs no more memory."""
    scripted = ScriptedServer(change_debounce=0)
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        await web.call("resources/subscribe", {"uri": "r://1"}, session=session)
        for _ in range(1000):
            scripted.server.notify_resource_updated("r://1")
            await trio.sleep(0.01)
        async with web.stream(session=session) as changes:
            with trio.move_on_after(1):
                while True:
                    await changes.message()
            assert len(changes.seen) < 2 * Limits().outgoing


@req("http-39", "http-38")
@session_revisions
async def test_of_several_streams_exactly_one_gets_each_message(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(change_debounce=0)
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        await web.call("resources/subscribe", {"uri": "r://1"}, session=session)
        streams = [await web.open(session=session) for _ in range(3)]
        async with trio.open_nursery() as nursery:

            async def read(stream: Stream) -> None:
                async for _ in stream:
                    pass

            for stream in streams:
                nursery.start_soon(read, stream)
            for _ in range(5):
                scripted.server.notify_resource_updated("r://1")
                await trio.sleep(1)
            nursery.cancel_scope.cancel()
        await max(streams, key=lambda each: len(each.seen)).aclose()
        received = sum(len(each.seen) for each in streams)
        assert received == 5
        rest = [each for each in streams if not each.seen]
        assert rest
        for _ in range(5):
            scripted.server.notify_resource_updated("r://1")
            await trio.sleep(1)
        found = 0
        for stream in rest:
            with trio.move_on_after(1):
                while True:
                    await stream.message()
                    found += 1
        assert found == 5


@req("http-39")
@session_revisions
async def test_of_several_streams_the_newest_gets_the_messages(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(change_debounce=0)
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        streams = [await web.open(session=session) for _ in range(3)]
        for stream in reversed(streams):
            scripted.server.notify_list_changed("tools")
            assert (await stream.message())["method"] == TOOLS
            await stream.aclose()
            await wait_until_idle()


@session_revisions
async def test_a_new_stream_replaces_a_lost_one(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(change_debounce=0)
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        async with web.stream(session=session) as old:
            scripted.server.notify_list_changed("tools")
            await old.message()
        await wait_until_idle()
        async with web.stream(session=session) as new, web.stream(session=session, after=old.last_event_id) as rest:
            assert await rest.rest() == []  # the stream has ended, so it gets no more messages
            assert rest.ended
            scripted.server.notify_list_changed("resources")
            assert (await new.message())["method"] == "notifications/resources/list_changed"


@req("http-37")
@session_revisions
async def test_a_client_can_close_its_stream(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        for _ in range(50):
            async with web.stream(session=session) as changes:
                scripted.server.notify_list_changed("tools")
                assert (await changes.message())["method"] == TOOLS
        assert (await web.call("ping", session=session)).result == {}


@req("http-38")
@session_revisions
async def test_streams_over_the_limit_are_refused_until_one_ends(revision: str, autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(streams=3)).server) as web:
        session = await web.initialize(revision)
        streams = [await web.open(session=session) for _ in range(2)]
        # A response that may still become JSON does not count as a stream.
        quick = [(await begin_post(web, play_call("wait go", id=id), session, revision))[0] for id in range(10, 14)]
        link, _ = await begin_post(web, play_call("progress", "wait go"), session, revision)
        fields = {**web.headers_for(None, revision, session), "Content-Type": None}
        refused = await web.send("GET", "/mcp", fields)
        assert refused.status == 429
        assert "Limits.streams" in refused.json["error"]["message"]
        assert int(refused.headers["Retry-After"]) > 0
        full = await web.call("ping", session=session)
        assert full.status == 429
        assert (await web.post(notification("notifications/x"), session=session)).status == 202
        await link.aclose()
        await wait_until_idle()
        async with web.stream(session=session):
            pass
        for stream in [*streams, *quick]:
            await stream.aclose()
        await wait_until_idle()
        assert (await web.call("ping", session=session)).result == {}


# Batches


@req("http-126", "http-14")
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", None])
@pytest.mark.parametrize("reports", [False, True], ids=["without reports", "with reports"])
async def test_a_batch_is_answered_with_all_its_responses(
    accept: str | None, reports: bool, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    steps = ["progress"] if reports else []
    async with served(scripted.server) as web:
        session = await web.initialize(B)
        batch = [
            play_call(*steps, "say one", id="one", revision=B),
            notification("notifications/progress", {"progressToken": 9, "progress": 1}),
            request("ping", id=2, revision=B),
            play_call("sleep 5", "say three", id="three", revision=B),
        ]
        headers = {} if accept is None else {"Accept": accept}
        answer = await web.post(batch, session=session, headers=headers)
        assert answer.status == 200
        answers = {each["id"]: each["result"] for each in answer.messages if "id" in each}
        assert answers.keys() == {"one", 2, "three"}
        assert answer.type == (
            "text/event-stream" if accept == "text/event-stream" or (reports and not accept) else "application/json"
        )
        if answer.type == "application/json":
            assert isinstance(answer.json, list)
            assert len(answer.json) == 3


async def test_a_batch_can_be_resumed(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(B)
        batch = [play_call("progress", "wait a", id=1, revision=B), play_call("wait b", id=2, revision=B)]
        stream = await web.open(batch, session=session)
        await stream.message()
        await stream.aclose()
        await wait_until_idle()
        scripted.go["b"].set()
        await wait_until_idle()
        async with web.stream(session=session, after=stream.last_event_id) as rest:
            scripted.go["a"].set()
            assert {each["id"] for each in await rest.rest()} == {1, 2}


@req("http-14")
async def test_a_batch_without_requests_gets_202(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web:
        session = await web.initialize(B)
        answer = await web.post([notification("notifications/x"), response(99, {})], session=session)
        assert (answer.status, answer.body) == (202, b"")


# Cancellations


@req("cancel-14")
@pytest.mark.parametrize("steps", [["wait never"], ["progress", "wait never"]], ids=["before the head", "in a stream"])
async def test_closing_a_modern_response_cancels_its_request_and_no_other(
    steps: list[str], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        other = await web.open(play_call("progress", "wait go", id=2, revision=E, name="other"), revision=E)
        link, _ = await begin_post(web, play_call(*steps, revision=E, name="mine"), None, E)
        assert scripted.began == ["other", "mine"]
        await link.aclose()
        await wait_until_idle()
        assert scripted.cancelled == ["mine"]
        scripted.go["go"].set()
        assert text_of(await other.response()) == "done"


@req("http-28")
@session_revisions
@pytest.mark.parametrize("steps", [[], ["progress"]], ids=["before the head", "in a stream"])
async def test_a_legacy_request_is_cancelled_by_a_notification(
    revision: str, steps: list[str], autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        link, _ = await begin_post(web, play_call(*steps, "wait never", id=7), session, revision)
        cancelled = await web.post(notification(CANCELLED, {"requestId": 7}), session=session)
        assert cancelled.status == 202
        head = await link.head()
        body = await link.body()
        assert scripted.cancelled == [""]
        # No more messages may be sent for the request (cancel-03): the HTTP response ends without a JSON-RPC response.
        if steps:
            assert head.status_code == 200
            assert b'"id":7' not in body
        else:
            assert (head.status_code, body) == (202, b"")
        assert (await web.call("ping", session=session)).result == {}


async def test_a_notification_cancels_nothing_in_the_modern_revision(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        call = await web.open(play_call("progress", "sleep 5", id=7, revision=E), revision=E)
        assert (await web.post(notification(CANCELLED, {"requestId": 7}))).status == 202
        assert text_of(await call.response()) == "done"


@session_revisions
async def test_the_same_id_in_two_sessions_is_two_requests(revision: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        one, two = await web.initialize(revision), await web.initialize(revision)
        first = await web.open(play_call("progress", "wait go", id=7, name="one"), session=one)
        second = await web.open(play_call("progress", "wait go", id=7, name="two"), session=two)
        await web.post(notification(CANCELLED, {"requestId": 7}), session=one)
        await wait_until_idle()
        assert scripted.cancelled == ["one"]
        scripted.go["go"].set()
        assert text_of(await second.response()) == "done"
        assert methods(await first.rest()) == [PROGRESS]


async def test_the_same_id_in_many_modern_requests_is_many_requests(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        streams = [
            await web.open(play_call("progress", "wait go", f"say {n}", id=1, revision=E), revision=E)
            for n in range(20)
        ]
        scripted.go["go"].set()
        assert [text_of(await stream.response()) for stream in streams] == [str(n) for n in range(20)]


@session_revisions
@pytest.mark.parametrize("seems_alive", [True, False])
async def test_a_resumed_stream_counts_unless_it_replaces_an_open_one(
    revision: str, seems_alive: bool, autojump_clock: MockClock
) -> None:
    scripted = ScriptedServer(limits=Limits(streams=2))
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        old = await web.open(play_call("progress", "wait go"), session=session)
        await old.message()
        if not seems_alive:
            await old.aclose()
            await wait_until_idle()
        others = [await web.open(session=session) for _ in range(1 if seems_alive else 2)]
        if seems_alive:
            async with web.stream(session=session, after=old.last_event_id) as rest:
                scripted.go["go"].set()
                assert text_of(await rest.response()) == "done"
        else:
            with pytest.raises(ProtocolViolation, match="429"):
                await web.open(session=session, after=old.last_event_id)
            await others[0].aclose()
            await wait_until_idle()
            await (await web.open(session=session, after=old.last_event_id)).aclose()
