"""The parts of one response: a JSON body, a stream, or neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.pairs import CLIENT_INFO, EVERYTHING_OF_A_SERVER, SERVER_INFO, initialize, modern
from tests.requirements import req
from trio_mcp.core import (
    LEGACY,
    REVISIONS,
    Batch,
    LinkKind,
    Message,
    Notification,
    Offer,
    Request,
    RequestError,
    Revision,
    ServerProtocol,
    SessionAgreed,
    Terms,
    encode,
)
from trio_mcp.core.http import (
    KEEP_ALIVE,
    Answer,
    EncodedPart,
    EventReader,
    OpenStream,
    ResponseEncoder,
    Serve,
    reply_headers,
)

A, B, C, D, E = REVISIONS.values()
CORS = (("Access-Control-Allow-Origin", "http://localhost"),)
OFFER = Offer(SERVER_INFO, EVERYTHING_OF_A_SERVER)
EITHER, JSON, STREAM = Answer.EITHER, Answer.JSON, Answer.STREAM
STREAM_HEAD = (200, reply_headers(CORS, stream=True))


class Post:
    """A POST to a server: its session and its response."""

    def __init__(
        self,
        message: Message,
        answer: Answer = EITHER,
        revision: Revision | None = E,
        session: ServerProtocol | None = None,
        opens: bool = False,
    ) -> None:
        verdict = Serve(message, revision, None if session is None else "s", opens, answer, CORS)
        self.session = verdict.new_session(OFFER) if session is None else session
        self.response = ResponseEncoder(verdict, self.session)
        self.events = self.session.receive(message, 0.0, about=self.response)

    def part(self) -> EncodedPart | None:
        for message, label in self.session.outgoing():
            if label is self.response:
                self.response.send(message)
        return self.response.data_to_send()

    def whole(self) -> tuple[int, dict[str, str], Any]:
        """The status, headers and body of a response that consists of a single part."""
        part = self.part()
        assert part is not None
        assert part.head is not None
        assert not part.more
        assert self.part() is None
        status, fields = part.head
        return status, dict(fields), json.loads(part.data) if part.data else None

    def events_of(self, data: bytes) -> list[Any]:
        return [json.loads(event.data) for event in EventReader(10_000).feed(data)]  # type: ignore[union-attr]


def call(answer: Answer = EITHER, **meta: Any) -> Post:
    asked = modern(1, "tools/call", {"name": "x"})
    asked.params["_meta"] |= meta
    return Post(asked, answer)


@pytest.mark.parametrize("answer", [EITHER, JSON])
def test_a_response_as_the_first_message_is_one_json_body(answer: Answer) -> None:
    post = call(answer)
    assert post.part() is None
    post.session.answer(1, {"content": []})
    status, headers, body = post.whole()
    assert (status, body["id"], body["result"]["content"]) == (200, 1, [])
    assert headers["Content-Type"] == "application/json"
    assert int(headers["Content-Length"]) > 0
    assert headers["Access-Control-Allow-Origin"] == "http://localhost"


@pytest.mark.parametrize("answer", [EITHER, STREAM])
def test_a_message_before_the_answer_makes_it_a_stream(answer: Answer) -> None:
    post = call(answer, progressToken="t")
    assert post.part() == (None if answer is EITHER else EncodedPart(STREAM_HEAD, b"", True))
    assert post.part() is None
    post.session.progress(1, 1)
    first = post.part()
    assert first is not None
    assert first.head == (STREAM_HEAD if answer is EITHER else None)
    assert first.more
    post.session.progress(1, 2)
    post.session.answer(1, {"content": []})
    last = post.part()
    assert last is not None
    assert (last.head, last.more) == (None, False)
    seen = post.events_of(first.data + last.data)
    assert [each.get("method") for each in seen] == ["notifications/progress", "notifications/progress", None]
    assert post.part() is None


@pytest.mark.parametrize("answer", [EITHER, STREAM])
def test_messages_that_are_ready_together_are_sent_in_one_part(answer: Answer) -> None:
    post = call(answer, progressToken="t")
    if answer is EITHER:
        post.session.progress(1, 1)
    post.session.answer(1, {"content": []})
    part = post.part()
    assert part is not None
    assert (part.head, part.more) == (STREAM_HEAD, False)
    assert post.events_of(part.data)[-1]["id"] == 1


def test_progress_is_not_sent_with_a_json_body() -> None:
    post = call(JSON, progressToken="t")
    assert not post.response.send(Notification("notifications/progress"))
    post.response.keep_alive()
    assert post.part() is None
    post.session.progress(1, 1)
    post.session.answer(1, {"content": []})
    assert post.whole()[0] == 200


def test_a_comment_keeps_a_silent_response_alive() -> None:
    post = call()
    post.response.keep_alive()
    assert post.part() == EncodedPart(STREAM_HEAD, KEEP_ALIVE, True)
    assert post.part() is None
    post.response.keep_alive()
    post.session.answer(1, {"content": []})
    part = post.part()
    assert part is not None
    assert KEEP_ALIVE not in part.data
    assert not part.more


@req("cancel-03")
@pytest.mark.parametrize("begun", [False, True])
def test_a_cancelled_request_ends_its_response_without_an_answer(begun: bool) -> None:
    session = ServerProtocol(OFFER, link=LinkKind.SESSION, terms=Terms(D))
    params = {"name": "x", "_meta": {"progressToken": "t"}}
    post = Post(Request(1, "tools/call", params), STREAM if begun else EITHER, D, session)
    if begun:
        assert post.part() == EncodedPart(STREAM_HEAD, b"", True)
    session.progress(1, 1)
    for message, _ in session.outgoing():
        post.response.send(message)
    session.receive(Notification("notifications/cancelled", {"requestId": 1}), 0.0)
    accepted = EncodedPart((202, (("Content-Length", "0"), *CORS)), b"", False)
    assert post.part() == (EncodedPart(None, b"", False) if begun else accepted)
    assert post.part() is None


def test_a_request_cancelled_before_its_stream_begins_gets_an_empty_stream() -> None:
    post = call(STREAM)
    post.session.receive(Notification("notifications/cancelled", {"requestId": 1}), 0.0)
    assert post.part() == EncodedPart(STREAM_HEAD, b"", False)


@pytest.mark.parametrize("answer", Answer)
def test_an_error_has_the_status_of_its_code_in_its_revision(answer: Answer) -> None:
    status, headers, body = Post(modern(1, "no/such"), answer).whole()
    assert (status, headers["Content-Type"], body["error"]["code"]) == (404, "application/json", -32601)


def test_an_error_without_a_status_of_its_own_is_200() -> None:
    post = call()
    post.session.refuse(1, RequestError(-32603, "no"))
    assert post.whole()[0] == 200


@req("batch-02")
def test_a_batch_is_answered_when_all_its_requests_are() -> None:
    session = ServerProtocol(OFFER, link=LinkKind.SESSION, terms=Terms(B))
    post = Post(Batch((Request(1, "tools/list"), Request(2, "tools/list"))), EITHER, B, session)
    session.answer(2, {"tools": []})
    assert post.part() is None
    session.answer(1, {"tools": []})
    assert [each["id"] for each in post.whole()[2]] == [2, 1]


@given(st.lists(st.sampled_from(["progress", "take", "silence"])), st.sampled_from(Answer))
def test_each_message_is_sent_once_and_in_order(moves: list[str], answer: Answer) -> None:
    post = call(answer, progressToken="t")
    parts: list[EncodedPart | None] = []
    for number, move in enumerate(moves):
        if move == "progress":
            post.session.progress(1, number)
        elif move == "silence":
            post.response.keep_alive()
        else:
            parts.append(post.part())
    post.session.answer(1, {"content": []})
    parts += [post.part(), post.part()]
    taken = [part for part in parts if part is not None]
    assert parts[-1] is None
    assert [part.head is not None for part in taken] == [True, *[False] * (len(taken) - 1)]
    assert [part.more for part in taken] == [*[True] * (len(taken) - 1), False]
    body = b"".join([part.data for part in taken])
    streamed = taken[0].head == STREAM_HEAD
    messages = post.events_of(body) if streamed else [json.loads(body)]
    reported = [each["params"]["progress"] for each in messages[:-1]]
    assert reported == ([number for number, move in enumerate(moves) if move == "progress"] if streamed else [])
    assert messages[-1]["id"] == 1
    assert streamed or answer is not STREAM


# Sessions.


@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_the_reply_to_initialize_has_the_session_id_in_its_head(revision: Revision) -> None:
    post = Post(initialize(1, revision.name), EITHER, None, opens=True)
    assert [type(event) for event in post.events] == [SessionAgreed]
    post.response.session_id = "abc"
    status, headers, body = post.whole()
    assert (status, headers["Mcp-Session-Id"], body["result"]["protocolVersion"]) == (200, "abc", revision.name)
    stream = Post(initialize(1, revision.name), STREAM, None, opens=True)
    stream.response.session_id = "abc"
    part = stream.part()
    assert part is not None
    assert part.head == (200, reply_headers(CORS, stream=True, session="abc"))
    assert not part.more


def test_initialize_that_is_refused_has_the_status_200() -> None:
    status, headers, body = Post(
        Request(1, "initialize", {"clientInfo": CLIENT_INFO}), EITHER, None, opens=True
    ).whole()
    assert (status, body["error"]["code"]) == (200, -32602)
    assert "Mcp-Session-Id" not in headers


def test_a_message_without_a_session_gets_one_with_its_terms() -> None:
    legacy = Serve(Request(1, "tools/list"), C, None, False, EITHER, ()).new_session(OFFER)
    assert (legacy.terms, legacy.link) == (Terms(C), LinkKind.SESSION)
    alone = Serve(modern(1, "tools/list"), E, None, False, EITHER, ()).new_session(OFFER)
    assert (alone.terms, alone.link) == (None, LinkKind.EXCHANGE)


def standalone_stream() -> tuple[ResponseEncoder, ServerProtocol]:
    session = ServerProtocol(OFFER, link=LinkKind.SESSION, terms=Terms(D))
    return ResponseEncoder(OpenStream("s", D, None, CORS), session), session


def test_the_stream_of_a_get_carries_messages_until_its_session_ends() -> None:
    response, session = standalone_stream()
    assert response.data_to_send() == EncodedPart(STREAM_HEAD, b"", True)
    note = Notification("notifications/tools/list_changed")
    assert response.send(note)
    assert response.data_to_send() == EncodedPart(None, b"event: message\ndata: %b\n\n" % encode(note), True)
    assert response.data_to_send() is None
    session.connection_lost()
    assert response.data_to_send() == EncodedPart(None, b"", False)
    assert response.data_to_send() is None
    assert not response.send(note)


def test_a_lost_connection_gets_no_more_parts() -> None:
    for response in (standalone_stream()[0], call().response):
        assert response.send(Notification("x"))
        response.connection_lost()
        response.keep_alive()
        assert response.data_to_send() is None
        assert not response.send(Notification("x"))
