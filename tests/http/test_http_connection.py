"""`HttpConnection` with a scripted endpoint: the order of requests, limits, ends of connections, and callbacks."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import re
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.cuts import Cuts
from tests.server.checkpoints import (
    Attempt,
    Pair,
    PipeEnd,
    _Pipe,
    any_task,
    cancel_at_each_step,
    one_byte_pipe,
    pipe_pair,
    unlimited_pipe,
)
from trio_mcp.core import ByteBudget, Error, Limits
from trio_mcp.core.http import Fields, HttpRequest, Reply, RequestHead, refusal, refused
from trio_mcp.server.http import HttpConnection, ListenerState

CHUNKED = "Transfer-Encoding: chunked"
TEXT: Fields = (("Content-Type", "text/plain"),)
ADMITTED = SimpleNamespace(
    head=SimpleNamespace(cors=(("Access-Control-Allow-Origin", "https://app.example"),)), holder=None
)


class ScriptedEndpoint:
    """An endpoint with scripted paths; `log` has the events in their order.

    `/echo` returns the body at once.  The test answers `/wait` from another task.  The head of `/refuse` is refused.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.log: list[str] = []
        self.bodies: list[bytes] = []
        self.requests: list[HttpRequest] = []
        self.responses: list[Any] = []
        self.arrived = trio.Event()
        self.reply = refusal(403, Error(None, -32600, "no"))
        self.failure: Exception | None = None
        self.bytes = ByteBudget(limits or Limits())
        self.account = self.bytes.account
        self.callback: weakref.ref[Any] | None = (
            None  # a reference to the callback for the disconnection of the last client
        )

    async def admit(self, request: HttpRequest, peer: str | None = None) -> Reply | SimpleNamespace:
        await trio.lowlevel.checkpoint()
        self.log.append(f"head {request.target}")
        assert request.body == b""
        if request.target == "/broken":
            raise ValueError("secret")
        return self.reply if request.target.startswith("/refuse") else ADMITTED

    async def serve(self, admitted: Any, request: HttpRequest, response: Any, prefix: str = "") -> Callable[[], None]:
        assert admitted is ADMITTED
        self.log.append(f"body {request.target}")
        self.requests.append(request)
        self.bodies.append(request.body)
        self.responses.append(response)
        if request.target.startswith("/echo"):
            await response.begin(200, TEXT, request.body, more=False)
        elif request.target == "/stream":
            await response.begin(200, TEXT, b"", more=True)
        elif request.target == "/fail":
            raise ValueError("secret")
        elif request.target == "/break":
            await response.begin(200, TEXT, b"half", more=True)
            raise ValueError("secret")
        await trio.lowlevel.checkpoint()
        if not request.target.startswith("/echo"):
            self.arrived.set()
        gone = partial(self.log.append, f"gone {request.target}")
        self.callback = weakref.ref(gone)
        return gone

    async def response(self) -> Any:
        """Wait for the next request that is not answered at once, and return its response."""
        await self.arrived.wait()
        self.arrived = trio.Event()
        return self.responses[-1]


class Peer:
    """The client's end of a connection, and the bytes that it has read."""

    def __init__(self, stream: PipeEnd, endpoint: ScriptedEndpoint, connection: HttpConnection) -> None:
        self.stream = stream
        self.endpoint = endpoint
        self.connection = connection
        self.raw = bytearray()
        self.closed = trio.Event()  # set when `serve` has returned

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def read(self) -> bytes:
        """Read until the server sends nothing for the moment, and return all bytes so far."""
        with trio.move_on_after(0.001):
            while data := await self.stream.receive_some():
                self.raw += data
        return bytes(self.raw)

    async def read_to_end(self) -> bytes:
        """Read until the server closes, and return all bytes so far."""
        while data := await self.stream.receive_some():
            self.raw += data
        return bytes(self.raw)


@contextlib.asynccontextmanager
async def connected(
    *,
    limits: Limits | None = None,
    streams: Callable[[], Pair] = unlimited_pipe,
    endpoint: ScriptedEndpoint | None = None,
    **shared: Any,
) -> AsyncIterator[Peer]:
    ours, theirs = streams()
    endpoint = endpoint or ScriptedEndpoint(limits)
    shared_state: Any = ListenerState(endpoint, limits or Limits(), **shared)  # type: ignore[arg-type]
    peer = Peer(ours, endpoint, HttpConnection(shared_state, theirs, "10.0.0.1"))

    async def serve() -> None:
        try:
            await peer.connection.serve()
        finally:
            peer.closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        nursery.start_soon(shared_state.run)
        yield peer
        nursery.cancel_scope.cancel()


def get(target: str = "/echo", *fields: str, version: str = "1.1", method: str = "GET") -> bytes:
    return "\r\n".join((f"{method} {target} HTTP/{version}", "Host: localhost", *fields, "", "")).encode()


def post(body: bytes, target: str = "/echo", *fields: str, version: str = "1.1") -> bytes:
    return get(target, f"Content-Length: {len(body)}", *fields, version=version, method="POST") + body


def answers(raw: bytes, *methods: str, closed: bool = False) -> list[tuple[int, dict[str, str], bytes]]:
    """The responses in these bytes, which must be complete."""
    found = []
    client = h11.Connection(h11.CLIENT)
    client.receive_data(raw)
    if closed:
        client.receive_data(b"")
    waiting = list(methods)
    while client.trailing_data[0]:
        client.send(h11.Request(method=waiting.pop(0) if waiting else "GET", target="/", headers=[("Host", "a")]))
        client.send(h11.EndOfMessage())
        status, fields, body = 0, {}, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Response | h11.InformationalResponse | h11.Data), (raw, event)
            if isinstance(event, h11.Response):
                status, fields = event.status_code, {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
        found.append((status, fields, body))
        if client.our_state is not h11.DONE:
            break
        client.start_next_cycle()
    return found


def refusal_message(answer: tuple[int, dict[str, str], bytes]) -> str:
    """The message of a refusal, from its JSON-RPC error."""
    status, fields, body = answer
    assert status >= 400
    assert fields["content-type"] == "application/json"
    error = json.loads(body)
    assert error.keys() == {"jsonrpc", "error"}
    message: str = error["error"]["message"]
    return message


# The order of requests


async def test_a_connection_is_kept_for_the_next_request(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        for number in range(3):
            await peer.send(post(b"%d" % number))
            await peer.read()
        found = answers(bytes(peer.raw))
        assert [(status, body) for status, _, body in found] == [(200, b"0"), (200, b"1"), (200, b"2")]
        assert all("connection" not in fields for _, fields, _ in found)
        assert not peer.closed.is_set()


async def test_every_response_has_a_date_and_no_server_header(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get() + get("/refuse"))
        for _, fields, _ in answers(await peer.read()):
            assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", fields["date"])
            assert "server" not in fields


async def test_pipelined_requests_are_answered_in_their_order(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(post(b"one", "/wait") + post(b"two") + get("/refuse") + post(b"four", "/echo/4"))
        response = await peer.endpoint.response()
        await peer.read()
        assert peer.endpoint.log == ["head /wait", "body /wait"]
        await response.begin(200, TEXT, b"1", more=False)
        found = answers(await peer.read(), "POST", "POST", "GET", "POST")
        assert [(status, body) for status, _, body in found if status == 200] == [
            (200, b"1"), (200, b"two"), (200, b"four"),
        ]  # fmt: skip
        assert found[2][0] == 403
        assert "gone /wait" not in peer.endpoint.log


async def test_the_endpoint_gets_the_target_the_headers_and_the_body_unchanged(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(post(b"body", "http://example.com/echo?x=%20", "X-Some: thing"))
        await peer.read()
        (request,) = peer.endpoint.requests
        assert (request.method, request.target, request.body) == ("POST", "http://example.com/echo?x=%20", b"body")
        assert request.headers["x-some"] == "thing"


async def test_an_answer_and_the_beginning_of_a_stream_are_one_write_each(
    autojump_clock: MockClock,
) -> None:
    writes: list[bytes] = []
    async with connected(tap=lambda way, data: writes.append(data) if way == "out" else None) as peer:
        await peer.send(post(b"hello"))
        await peer.read()
        assert len(writes) == 1
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        await response.begin(200, TEXT, b"first", more=True)
        await response.send(b"second", more=True)
        await response.send(b"last", more=False)
        await peer.read()
        assert [data.rpartition(b"\r\n\r\n")[2] for data in writes[1:2]] == [b"5\r\nfirst\r\n"]
        assert writes[2:] == [b"6\r\nsecond\r\n", b"4\r\nlast\r\n0\r\n\r\n"]
        assert answers(bytes(peer.raw))[1][2] == b"firstsecondlast"
        assert b"".join(writes) == peer.raw


async def test_a_tap_sees_the_bytes_of_both_directions(autojump_clock: MockClock) -> None:
    seen: list[tuple[str, bytes]] = []
    async with connected(tap=lambda way, data: seen.append((way, data))) as peer:
        await peer.send(get())
        raw = await peer.read()
        assert seen == [("in", get()), ("out", raw)]


async def test_single_bytes_in_both_directions_give_the_same_responses(autojump_clock: MockClock) -> None:
    sent_bytes = post(b"one") + get("/refuse") + post(b"two", "/echo", "Connection: close")
    received = []
    for streams in (unlimited_pipe, one_byte_pipe):
        async with connected(streams=streams) as peer, trio.open_nursery() as nursery:
            nursery.start_soon(peer.send, sent_bytes)
            received.append(answers(await peer.read_to_end()))
    assert [(status, body) for status, _, body in received[0] if status == 200] == [(200, b"one"), (200, b"two")]
    for one, other in zip(*received, strict=True):
        assert {**one[1], "date": ""} == {**other[1], "date": ""}
        assert one[::2] == other[::2]


async def test_requests_during_a_response_are_buffered_up_to_a_limit(autojump_clock: MockClock) -> None:
    more = b"".join(post(b"x" * 100, f"/echo/{number}") for number in range(100))
    async with connected(limits=Limits(header_bytes=1000), streams=partial(pipe_pair, 100)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        sent = 0

        async def send() -> None:
            nonlocal sent
            for at in range(0, len(more), 10):
                await peer.send(more[at : at + 10])
                sent = at + 10

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(1000)
            assert 1000 <= sent <= 1200
            nursery.start_soon(partial(response.begin, 200, TEXT, b"", more=False))
            while len(peer.endpoint.bodies) < 101:
                await peer.read()
        assert peer.endpoint.bodies[1:] == [b"x" * 100] * 100


@pytest.mark.parametrize(
    "size", [500, 1900 - len(post(b"x" * 900)), 999, 1000, 5000]
)  # the second makes 1000 bytes with its head
async def test_the_next_request_can_arrive_before_the_write_of_the_answer_ends(
    size: int, autojump_clock: MockClock
) -> None:
    there, back = _Pipe(math.inf), _Pipe(10)
    ours, theirs = PipeEnd(there, back), PipeEnd(back, there)
    async with connected(limits=Limits(header_bytes=1000), streams=lambda: (ours, theirs)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(response.begin, 200, TEXT, b"the answer", more=False))
            await wait_all_tasks_blocked()  # the answer is being written
            await peer.send(post(b"x" * size))
            await trio.sleep(10)
            await peer.read()
        await peer.read()
        assert [body for _, _, body in answers(bytes(peer.raw))] == [b"the answer", b"x" * size]


# Disconnections


async def test_a_disconnection_before_the_end_of_the_response_is_reported_once(autojump_clock: MockClock) -> None:
    written: list[bytes] = []
    for target in ("/wait", "/stream"):
        async with connected(tap=lambda way, data: written.append(data) if way == "out" else None) as peer:
            await peer.send(get(target))
            response = await peer.endpoint.response()
            await peer.stream.aclose()
            await peer.closed.wait()
            assert peer.endpoint.log == [f"head {target}", f"body {target}", f"gone {target}"]
            with pytest.raises(trio.BrokenResourceError):
                await response.send(b"late", more=True)
    assert b"late" not in b"".join(written)


async def test_a_client_that_closes_its_half_counts_as_disconnected(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        await peer.endpoint.response()
        await peer.stream.send_eof()
        await peer.closed.wait()
        assert peer.endpoint.log[-1] == "gone /wait"


async def test_a_disconnection_is_noticed_while_the_next_request_waits(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait") + get("/echo"))
        await peer.endpoint.response()
        await peer.stream.aclose()
        await peer.closed.wait()
        assert peer.endpoint.log == ["head /wait", "body /wait", "gone /wait"]


async def test_a_disconnection_after_the_response_is_not_reported(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        await response.begin(200, TEXT, b"", more=False)
        await peer.stream.aclose()
        await peer.closed.wait()
        assert peer.endpoint.log == ["head /wait", "body /wait"]


async def test_a_failing_next_request_does_not_affect_the_previous_one(
    autojump_clock: MockClock,
) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        await (await peer.endpoint.response()).begin(200, TEXT, b"", more=False)
        await peer.send(get("/echo", "Content-Length: 10", method="POST"))
        assert answers(await peer.read_to_end())[1][0] == 408
        await peer.closed.wait()
        assert peer.endpoint.log == ["head /wait", "body /wait", "head /echo"]


async def test_a_disconnection_that_a_write_reported_is_not_reported_again(autojump_clock: MockClock) -> None:
    async with connected(streams=partial(pipe_pair, 10)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await response.begin(200, TEXT, b"x" * 1000, more=True)

            nursery.start_soon(write)
            await wait_all_tasks_blocked()
            peer.stream._into.close_receiver()  # the client reads no more, and does not close its half
        await peer.closed.wait()
        assert "gone /wait" not in peer.endpoint.log


async def test_a_dropped_response_closes_the_connection_without_a_callback(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/stream"))
        (await peer.endpoint.response()).drop()
        raw = await peer.read_to_end()
        assert raw.endswith(b"\r\n\r\n")
        assert not raw.endswith(b"0\r\n\r\n")
        await peer.closed.wait()
        assert peer.endpoint.log == ["head /stream", "body /stream"]


async def test_a_response_that_has_ended_cannot_write_into_the_next_one(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        old = await peer.endpoint.response()
        await old.begin(200, TEXT, b"", more=False)
        await peer.send(get("/wait"))
        await peer.endpoint.response()
        with pytest.raises(trio.BrokenResourceError):
            await old.begin(200, TEXT, b"not yours", more=False)
        with pytest.raises(trio.BrokenResourceError):
            await old.send(b"not yours", more=False)
        assert len(answers(await peer.read())) == 1


async def test_the_client_can_disconnect_after_any_byte_it_sends(cuts: Cuts, autojump_clock: MockClock) -> None:
    sent_bytes = post(b"one") + post(b"two", "/wait", "Expect: 100-continue") + get("/stream")
    for cut in cuts(sent_bytes):
        endpoint = ScriptedEndpoint()
        async with connected(endpoint=endpoint) as peer:
            await peer.send(sent_bytes[:cut])
            await peer.stream.send_eof()
            await peer.closed.wait()
            assert endpoint.log.count("gone /wait") <= 1
            assert ("gone /wait" in endpoint.log) == ("body /wait" in endpoint.log), cut


async def test_the_client_can_disconnect_after_any_byte_it_receives(cuts: Cuts, autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(post(b"one") + get("/refuse"))
        whole = await peer.read()
    for cut in cuts(whole):
        async with connected(streams=one_byte_pipe) as peer:
            async with trio.open_nursery() as nursery:

                async def ask(peer: Peer = peer) -> None:
                    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        await peer.send(post(b"one") + get("/refuse"))

                nursery.start_soon(ask)
                for _ in range(cut):
                    await peer.stream.receive_some()
                await peer.stream.aclose()
            await peer.closed.wait()


# Bodies


async def test_a_client_that_waits_for_100_gets_it_after_its_head_is_accepted(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/echo", "Expect: 100-continue", "Content-Length: 4", method="POST"))
        assert await peer.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert peer.endpoint.log == ["head /echo"]
        await peer.send(b"body")
        await peer.read()
        assert answers(bytes(peer.raw))[0][2] == b"body"


async def test_a_client_that_waits_for_100_gets_only_the_refusal_of_its_head(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", "Expect: 100-continue", "Content-Length: 4", method="POST"))
        # The next bytes may be the body or another request, so the server reads no more.
        ((status, fields, _),) = answers(await peer.read_to_end())
        assert (status, fields["connection"]) == (403, "close")


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_100_is_not_sent_after_a_part_of_the_body_or_to_http_1_0(version: str, autojump_clock: MockClock) -> None:
    async with connected() as peer:
        sent_bytes = post(b"body", "/echo", "Expect: 100-continue", version=version)
        await peer.send(sent_bytes[:-2])  # a part of the body is enough
        assert await peer.read() == b""
        await peer.send(sent_bytes[-2:])
        assert answers(await peer.read())[0][2] == b"body"
    async with connected() as peer:
        await peer.send(sent_bytes)
        assert (await peer.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_in_chunks_is_one_body(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/echo", CHUNKED, method="POST") + b"2\r\nab\r\n")
        await peer.read()
        await peer.send(b"1\r\nc\r\n0\r\n\r\n" + get())
        found = answers(await peer.read())
        assert [body for _, _, body in found] == [b"abc", b""]


async def test_a_small_body_of_a_refused_request_is_discarded(
    autojump_clock: MockClock,
) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", "Content-Length: 10", method="POST") + b"01234")
        assert answers(await peer.read())[0][0] == 403  # before the rest of the body
        await peer.send(b"56789" + get())
        assert [status for status, _, _ in answers(await peer.read())] == [403, 200]
        assert peer.endpoint.bodies == [b""]


@pytest.mark.parametrize(("length", "kept"), [(64 * 1024 + 1, True), (64 * 1024 + 2, False)])
async def test_a_refusal_keeps_the_connection_if_at_most_64_kib_are_missing(
    length: int, kept: bool, autojump_clock: MockClock
) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", f"Content-Length: {length}", method="POST") + b"1")
        ((_, fields, _),) = answers(await peer.read())
        assert (fields.get("connection") != "close") is kept


async def test_a_refused_request_with_its_body_is_followed_by_the_next_request(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(post(b"body", "/refuse") + get("/echo/next"))
        assert [status for status, _, _ in answers(await peer.read())] == [403, 200]


async def test_data_after_a_refusal_is_read_up_to_a_limit(autojump_clock: MockClock) -> None:
    limits = Limits(message_bytes=10_000)
    async with connected(limits=limits, streams=partial(pipe_pair, 100)) as peer:
        sent = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.read_to_end)
            await peer.send(get("/refuse", CHUNKED, method="POST"))
            with contextlib.suppress(trio.BrokenResourceError):
                while sent < 1_000_000:
                    await peer.send(b"x" * 100)
                    sent += 100
        assert 10_000 <= sent < 11_000
        assert answers(bytes(peer.raw))[0][0] == 403


@pytest.mark.parametrize("field", [f"Content-Length: {1024 * 1024}", CHUNKED])
async def test_a_refused_request_with_a_long_body_closes_the_connection(field: str, autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", field, method="POST") + b"1\r\n")
        await peer.read()
        await peer.send(b"x" * 10_000)  # the server reads it, so that no unread data resets the connection
        ((status, fields, _),) = answers(await peer.read_to_end())
        assert (status, fields["connection"]) == (403, "close")
        await peer.closed.wait()
        assert peer.stream._out.buffer == b""


async def test_a_refused_request_with_a_too_long_body_gets_one_refusal(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(message_bytes=1000)) as peer:
        await peer.send(get("/refuse", "Content-Length: 1001", method="POST"))
        ((status, fields, _),) = answers(await peer.read_to_end())
        assert (status, fields["connection"]) == (403, "close")


async def test_a_refused_request_with_a_complete_chunked_body_keeps_the_connection(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", CHUNKED, method="POST") + b"1\r\na\r\n0\r\n\r\n" + get())
        assert [status for status, _, _ in answers(await peer.read())] == [403, 200]


async def test_a_refused_request_with_a_malformed_body_gets_one_refusal(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", CHUNKED, method="POST") + b"nonsense\r\n" + get())
        ((status, fields, _),) = answers(await peer.read_to_end())
        assert (status, fields["connection"]) == (403, "close")


async def test_a_client_that_disconnects_within_a_body_is_not_served(autojump_clock: MockClock) -> None:
    for target in ("/echo", "/refuse"):
        async with connected() as peer:
            await peer.send(get(target, "Content-Length: 10", method="POST") + b"01234")
            await peer.stream.send_eof()
            await peer.read_to_end()
            assert peer.endpoint.bodies == []


async def test_refused_requests_are_logged(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    for data in (
        b"\x16\x03\x01",
        get("/echo?session=secret", "Content-Length: 9000", method="POST"),
        get("/echo?session=secret", "Content-Length: 9", method="POST"),
        get("/echo", "Content-Length: 1", method="POST") + b"1nonsense\r\n\r\n",
    ):
        async with connected(limits=Limits(message_bytes=1000, body_seconds=1)) as peer:
            await peer.send(data)
            await peer.read_to_end()
    assert caplog.messages == [
        "10.0.0.1: a connection: 400, the client speaks TLS, and this server does not (ssl_context)",
        "10.0.0.1: 'POST' '/echo': 413, the body has 9000 bytes; 1000 are allowed (Limits.message_bytes)",
        "10.0.0.1: 'POST' '/echo': 408, the body did not arrive in time: send it within 1 seconds, or at 4096 bytes "
        "per second or faster (Limits.body_seconds, Limits.body_rate)",
        "10.0.0.1: a connection: 400, the request line is malformed; it must be a method, a target and HTTP/1.1",
    ]


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"nonsense\r\n\r\n", 400, "request line"),
        (get("/echo", "X: " + "x" * 1000), 431, "Limits.header_bytes"),
        (get("/echo", "Content-Length: 1001", method="POST"), 413, "Limits.message_bytes"),
        (get("/echo", CHUNKED, method="POST") + b"3E9\r\n" + b"x" * 1001, 413, "Limits.message_bytes"),
        (get("/echo", CHUNKED, method="POST") + b"nonsense\r\n", 400, "chunk"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, "HTTP/1.1"),
    ],
)  # fmt: skip
async def test_a_malformed_request_is_refused_and_closes_the_connection(
    data: bytes, status: int, words: str, autojump_clock: MockClock
) -> None:
    async with connected(limits=Limits(header_bytes=1000, message_bytes=1000)) as peer:
        await peer.send(get() + data + get())
        first, refused = answers(await peer.read_to_end())
        assert first[0] == 200
        assert (refused[0], refused[1]["connection"]) == (status, "close")
        assert words in refusal_message(refused)
        assert len(peer.endpoint.bodies) == 1


async def test_a_malformed_request_after_a_head_request_gets_a_body(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/echo", method="HEAD") + b"bad\r\n\r\n")
        _, refused = answers(await peer.read_to_end(), "HEAD", "GET")
        assert refused[0] == 400
        assert "request line" in refusal_message(refused)


# Versions and methods


async def test_a_head_request_gets_a_content_length_without_a_body(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/refuse", method="HEAD") + get("/refuse"))
        one, two = answers(await peer.read(), "HEAD", "GET")
        assert one[2] == b""
        assert one[1]["content-length"] == two[1]["content-length"] == str(len(two[2]))


async def test_a_head_request_for_a_stream_gets_no_body(autojump_clock: MockClock) -> None:
    writes: list[bytes] = []
    async with connected(tap=lambda way, data: writes.append(data) if way == "out" else None) as peer:
        await peer.send(get("/stream", method="HEAD") + get())
        response = await peer.endpoint.response()
        await response.send(b"data", more=True)
        await response.send(b"", more=False)
        one, two = answers(await peer.read(), "HEAD", "GET")
        assert (one[2], two[0]) == (b"", 200)
        assert len(writes) == 2  # the dropped body causes no writes


async def test_204_has_no_content_length(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        await (await peer.endpoint.response()).begin(204, (), b"dropped", more=False)
        ((status, fields, _),) = answers(await peer.read())
        assert status == 204
        assert fields.keys() == {"date"}


async def test_a_given_content_length_is_kept(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        await response.begin(200, (("content-length", "4"),), b"ab", more=True)
        await response.send(b"cd", more=False)
        ((_, fields, body),) = answers(await peer.read())
        assert (fields["content-length"], body) == ("4", b"abcd")
        assert "transfer-encoding" not in fields


async def test_a_client_of_http_1_0_is_answered_and_the_connection_closed(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(post(b"old", version="1.0"))
        raw = await peer.read_to_end()
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        ((_, fields, body),) = answers(raw)
        assert (fields["connection"], fields["content-length"], body) == ("close", "3", b"old")


async def test_a_client_of_http_1_0_can_keep_the_connection_alive(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        for _ in range(2):
            await peer.send(post(b"old", "/echo", "Connection: keep-alive", version="1.0"))
            await peer.read()
        assert [fields["connection"] for _, fields, _ in answers(bytes(peer.raw))] == ["keep-alive", "keep-alive"]
        assert not peer.closed.is_set()


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/stream", "Connection: keep-alive", version="1.0"))
        response = await peer.endpoint.response()
        await response.send(b"one", more=True)
        await response.send(b"two", more=True)
        await peer.read()
        await response.send(b"", more=False)
        raw = await peer.read_to_end()
        assert raw.endswith(b"\r\n\r\nonetwo")
        assert b"chunked" not in raw
        assert b"Connection: close" in raw


async def test_connection_close_is_confirmed_and_closes_the_connection(autojump_clock: MockClock) -> None:
    for target in ("/echo", "/refuse", "/wait"):
        async with connected() as peer:
            await peer.send(get(target, "Connection: close"))
            if target == "/wait":
                await (await peer.endpoint.response()).begin(200, TEXT, b"", more=False)
            ((_, fields, _),) = answers(await peer.read_to_end())
            assert fields["connection"] == "close"
            assert trio.current_time() < 1


async def test_a_head_in_time_has_no_effect_on_later_deadlines(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        head = get("/wait", "Connection: close")
        await peer.send(head[:9])
        await trio.sleep(1)
        await peer.send(head[9:])
        await (await peer.endpoint.response()).begin(200, TEXT, b"", more=False)
        assert (await peer.read_to_end()).count(b"HTTP/1.1 ") == 1


async def test_requests_after_connection_close_are_not_served(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/echo", "Connection: close") + get("/never"))
        assert len(answers(await peer.read_to_end())) == 1
        assert peer.endpoint.log == ["head /echo", "body /echo"]
        # The connection stays open with that unread, because a reset could destroy the answer.
        assert not peer.closed.is_set()
        await peer.send(get("/never"))
        await peer.stream.aclose()
        await peer.closed.wait()


# Upgrades

UPGRADE = ("Connection: Upgrade", "Upgrade: websocket")


async def test_a_request_for_a_websocket_is_handed_over_with_its_trailing_bytes(autojump_clock: MockClock) -> None:
    seen = []

    targets = ("/ws", "/ws/?x=1", "http://localhost/ws", "HTTP://localhost/ws/?x=http://a/b")

    async def upgraded(stream: trio.abc.Stream, request: HttpRequest, trailing: bytes, peer: str | None) -> None:
        seen.append((request.target, request.headers["upgrade"], trailing, peer))
        await stream.send_all(b"another protocol")

    for target in targets:
        async with connected(websocket_path="/ws", upgraded=upgraded) as peer:
            await peer.send(get(target, *UPGRADE) + b"frame")
            assert await peer.read_to_end() == b"another protocol"
            assert peer.endpoint.log == []
    assert seen == [(target, "websocket", b"frame", "10.0.0.1") for target in targets]


@pytest.mark.parametrize(
    "data",
    [
        get("/echo", *UPGRADE),
        get("/echo/ws", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"),
        get("/echo/ws"),
        get("/echo/ws", *UPGRADE, version="1.0"),
        get("/echo/ws", *UPGRADE, method="POST"),
        get("/echo/ws", *UPGRADE, "Content-Length: 0") + b"",
        get("/echo/ws", *UPGRADE, "Content-Length: 4") + b"body",
        get("/echo?x=http://localhost/echo/ws", *UPGRADE),
    ],
    ids=[
        "another path",
        "another protocol",
        "no upgrade",
        "HTTP/1.0",
        "POST",
        "an empty body",
        "a body",
        "another path with a query",
    ],
)
async def test_other_requests_stay_http(data: bytes, autojump_clock: MockClock) -> None:
    handed = []

    async def upgraded(stream: trio.abc.Stream, request: HttpRequest, trailing: bytes, peer: str | None) -> None:
        handed.append(request)

    async with connected(websocket_path="/echo/ws", upgraded=upgraded) as peer:
        await peer.send(data)
        await peer.read()
        if b"Content-Length: 0" in data:
            assert handed  # an empty body counts as no body
        else:
            assert not handed
            assert answers(bytes(peer.raw))[0][0] == 200


# Deadlines


async def seconds_to_close(peer: Peer) -> float:
    """The seconds until the server closes."""
    began = trio.current_time()
    await peer.read_to_end()
    return round(trio.current_time() - began, 3)


async def test_a_connection_without_a_request_is_closed_without_a_response(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(head_seconds=10)) as peer:
        assert await seconds_to_close(peer) == 10
        assert peer.raw == b""


async def test_an_idle_connection_is_closed_without_a_response(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(idle_seconds=75)) as peer:
        for target in ("/echo", "/refuse", "/wait"):
            await peer.send(get(target)[:9])
            await trio.sleep(1)
            await peer.send(get(target)[9:])
            if target == "/wait":
                await (await peer.endpoint.response()).begin(200, TEXT, b"", more=False)
            await peer.read()
            await trio.sleep(74)
        before = await peer.read()
        assert await seconds_to_close(peer) == pytest.approx(1, abs=0.01)
        assert peer.raw == before


async def test_a_slow_head_gets_408(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(head_seconds=10)) as peer:
        await peer.send(get())
        await peer.read()
        await trio.sleep(50)
        began = trio.current_time()
        for letter in b"GET / HTTP":
            await peer.send(bytes([letter]))
            await trio.sleep(0.9)
        await peer.read_to_end()
        assert trio.current_time() - began == pytest.approx(10, abs=0.01)
        _, (status, fields, body) = answers(bytes(peer.raw))
        assert (status, fields["connection"]) == (408, "close")
        assert "10 seconds (Limits.head_seconds)" in refusal_message((status, fields, body))


async def test_a_slow_first_head_gets_408(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(head_seconds=10)) as peer:
        await trio.sleep(9)
        await peer.send(b"GET ")
        await trio.sleep(9)
        await peer.send(b"/")
        assert answers(await peer.read_to_end())[0][0] == 408


async def test_a_body_extends_its_deadline_by_at_most_one_window(autojump_clock: MockClock) -> None:
    limits = Limits(body_seconds=30, body_rate=100)
    async with connected(limits=limits) as peer:
        await peer.send(get("/echo", "Content-Length: 10000", method="POST"))
        began = trio.current_time()
        await trio.sleep(10)
        await peer.send(b"x" * 9000)  # much data at once extends the deadline by one window only
        for _ in range(30):  # below the rate
            with contextlib.suppress(trio.BrokenResourceError):
                await peer.send(b"x" * 20)
            await trio.sleep(1)
        await peer.read_to_end()
        assert trio.current_time() - began == pytest.approx(40, abs=0.01)
        (refused,) = answers(bytes(peer.raw))
        assert refused[0] == 408
        assert "Limits.body_seconds, Limits.body_rate" in refusal_message(refused)
        assert peer.endpoint.bodies == []


@pytest.mark.parametrize("framing", ["Content-Length: 200000", CHUNKED])
async def test_unfinished_long_bodies_have_a_common_limit(framing: str, autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(bytes_in_all=300_000)) as peer:
        shares = peer.endpoint.bytes.shares
        assert shares.take(None, 200_000)  # held by other connections
        await peer.send(get("/echo", "Content-Length: 60000", method="POST"))  # a small body is always accepted
        for _ in range(2):
            await peer.send(b"x" * 30_000)
        assert answers(await peer.read())[0][2] == b"x" * 60_000
        await peer.send(get("/echo", framing, method="POST"))
        for _ in range(9):
            piece = b"x" * 10_000
            await peer.send(piece if framing != CHUNKED else b"2710\r\n" + piece + b"\r\n")
            await wait_all_tasks_blocked()
        assert shares.held == 290_000
        with contextlib.suppress(trio.BrokenResourceError):
            await peer.send(b"x" * 20_000 if framing != CHUNKED else b"4E20\r\n" + b"x" * 20_000 + b"\r\n")
        await peer.read_to_end()
        last = answers(bytes(peer.raw), "POST", "POST", closed=True)[1]
        assert last[0] == 503
        assert "Limits.bytes_in_all" in refusal_message(last)
        assert int(last[1]["retry-after"]) > 0
        assert last[1]["access-control-allow-origin"] == "https://app.example"
        assert shares.held == 200_000
        assert peer.endpoint.bodies == [b"x" * 60_000]


async def test_the_bytes_of_a_body_are_released_when_it_is_complete_or_lost(
    autojump_clock: MockClock,
) -> None:
    for end in ("whole", "gone"):
        async with connected() as peer:
            await peer.send(get("/wait", "Content-Length: 200000", method="POST"))
            await peer.send(b"x" * 150_000)
            await wait_all_tasks_blocked()
            assert peer.endpoint.bytes.shares.held == 150_000
            if end == "whole":
                await peer.send(b"x" * 50_000)
                await peer.endpoint.response()
            else:
                await peer.stream.aclose()
                await peer.closed.wait()
            assert peer.endpoint.bytes.shares.held == 0


async def test_a_body_at_the_required_rate_has_no_deadline(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(body_seconds=5, body_rate=100)) as peer:
        await peer.send(get("/echo", "Content-Length: 100000", method="POST"))
        for _ in range(1000):
            await peer.send(b"x" * 100)
            await trio.sleep(0.9)
        assert answers(await peer.read())[0][2] == b"x" * 100_000


async def test_the_rest_of_a_refused_body_has_a_deadline(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(body_seconds=30)) as peer:
        await peer.send(get("/refuse", "Content-Length: 10", method="POST"))
        await peer.read()
        assert await seconds_to_close(peer) < 40
        ((status, fields, _),) = answers(bytes(peer.raw))  # only one response for the request
        assert (status, "connection" in fields) == (403, False)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (get("/echo", "Content-Length: 10", method="POST"), 408),
        (get("/echo", "Content-Length: 1001", method="POST"), 413),
        (get("/echo", CHUNKED, method="POST") + b"3e9\r\n" + b"x" * 1001, 413),
        (get("/echo", CHUNKED, method="POST") + b"what\r\n", 400),
        (post(b"", "/fail"), 500),
    ],
)
async def test_a_web_page_can_read_why_its_body_was_refused(
    data: bytes, status: int, autojump_clock: MockClock
) -> None:
    async with connected(limits=Limits(message_bytes=1000)) as peer:
        await peer.send(get("/refuse/it") + data)  # this request must not affect the next one
        first, second = answers(await peer.read_to_end())
        assert "access-control-allow-origin" not in first[1]
        assert second[0] == status
        assert second[1]["access-control-allow-origin"] == "https://app.example"


async def test_a_refused_head_has_no_headers_of_the_previous_request(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(post(b"good") + b"bad\r\n\r\n")
        good, bad = answers(await peer.read_to_end())
        assert (good[0], bad[0]) == (200, 400)
        assert "access-control-allow-origin" not in bad[1]


async def test_a_response_has_no_deadline_while_its_client_waits(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        await trio.sleep(80_000)
        await response.begin(200, TEXT, b"at last", more=False)
        assert answers(await peer.read())[0][2] == b"at last"


async def test_a_slow_body_has_no_effect_on_the_deadline_of_its_response(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(body_seconds=30)) as peer:
        sent_bytes = post(b"body", "/wait")
        await peer.send(sent_bytes[:-2])
        await trio.sleep(1)
        await peer.send(sent_bytes[-2:])
        response = await peer.endpoint.response()
        await trio.sleep(80_000)
        await response.begin(200, TEXT, b"at last", more=False)
        assert [(status, body) for status, _, body in answers(await peer.read())] == [(200, b"at last")]


async def test_a_client_that_reads_nothing_is_dropped(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(write_seconds=60), streams=partial(pipe_pair, 1000)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError, match=r"Limits\.write_seconds"):
            await response.begin(200, TEXT, b"x" * 2000, more=True)
        assert trio.current_time() - began == 60
        await peer.closed.wait()
        assert trio.current_time() - began < 62
        assert "gone /wait" not in peer.endpoint.log


async def test_hurry_does_not_extend_the_deadline_of_a_write(autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(write_seconds=60), streams=partial(pipe_pair, 1000)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()

        async def hurry() -> None:
            await trio.sleep(59.5)
            peer.connection.hurry()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hurry)
            with pytest.raises(trio.BrokenResourceError):
                await response.begin(200, TEXT, b"x" * 2000, more=True)
            assert trio.current_time() == 60


@pytest.mark.parametrize("caller_is_cancelled", [False, True])
async def test_a_client_that_reads_slowly_is_not_dropped(caller_is_cancelled: bool, autojump_clock: MockClock) -> None:
    async with connected(limits=Limits(write_seconds=60), streams=partial(pipe_pair, 2000)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        size = 1_500_000
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with trio.CancelScope() as scope:
                    if caller_is_cancelled:
                        scope.cancel()  # a write that has begun is finished
                    await response.begin(200, TEXT, b"x" * size, more=False)

            nursery.start_soon(write)
            while len(peer.raw) < size:
                await trio.sleep(1)
                peer.raw += await peer.stream.receive_some(1500)
        assert trio.current_time() > 900
        await peer.read()
        assert answers(bytes(peer.raw))[0][2] == b"x" * size


@pytest.mark.parametrize("size", [500_000, 500])
async def test_a_client_that_reads_too_slowly_is_dropped(size: int, autojump_clock: MockClock) -> None:
    """For one long write, and for many short writes in direct succession."""
    async with connected(limits=Limits(write_seconds=60), streams=partial(pipe_pair, 1000)) as peer:
        await peer.send(get("/wait"))
        response = await peer.endpoint.response()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    await response.begin(200, TEXT, b"x" * size, more=True)
                    while True:
                        await response.send(b"x" * size, more=True)
                nursery.cancel_scope.cancel()

            nursery.start_soon(write)
            while True:
                await trio.sleep(1)
                peer.raw += await peer.stream.receive_some(500)
        assert 60 <= trio.current_time() <= 61


# Draining and cancellation


async def test_an_idle_connection_is_closed_when_the_server_drains(autojump_clock: MockClock) -> None:
    for before in (b"", get(), get("/refuse")):
        async with connected() as peer:
            await peer.send(before)
            await peer.read()
            peer.connection.drain()
            await peer.closed.wait()
            assert trio.current_time() < 2
            await peer.read_to_end()


async def test_a_connection_that_just_became_idle_is_closed_by_a_drain(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/wait"))
        await (await peer.endpoint.response()).begin(200, TEXT, b"", more=False)
        peer.connection.drain()
        assert len(answers(await peer.read_to_end())) == 1


async def test_a_draining_connection_marks_its_last_response_and_finishes_it(
    autojump_clock: MockClock,
) -> None:
    async with connected() as peer:
        await peer.send(get("/wait") + get("/never"))
        response = await peer.endpoint.response()
        peer.connection.drain()
        await trio.sleep(100)
        assert not peer.closed.is_set()
        await response.begin(200, TEXT, b"done", more=False)
        ((_, fields, body),) = answers(await peer.read_to_end())
        assert (fields["connection"], body) == ("close", b"done")
        assert "head /never" not in peer.endpoint.log


async def test_a_draining_connection_lets_its_stream_end(autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(get("/stream"))
        response = await peer.endpoint.response()
        peer.connection.drain()
        await trio.sleep(100)
        await response.send(b"bye", more=False)
        assert answers(await peer.read_to_end())[0][2] == b"bye"


@pytest.mark.parametrize("part", [get()[:10], post(b"body")[:-2]])
async def test_an_incomplete_request_is_answered_during_a_drain(part: bytes, autojump_clock: MockClock) -> None:
    async with connected() as peer:
        await peer.send(part)
        await peer.read()
        peer.connection.drain()
        await peer.send((get() if part == get()[:10] else post(b"body"))[len(part) :])
        ((status, fields, _),) = answers(await peer.read_to_end())
        assert (status, fields["connection"]) == (200, "close")


async def test_a_write_in_progress_has_a_second_after_a_cancellation(autojump_clock: MockClock) -> None:
    for reads in (True, False):
        ours, theirs = pipe_pair(10)
        endpoint = ScriptedEndpoint()
        connection = HttpConnection(ListenerState(endpoint, Limits()), theirs)  # type: ignore[arg-type]
        raw = bytearray()
        async with trio.open_nursery() as outer:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.serve)
                await ours.send_all(get("/wait"))
                response = await endpoint.response()

                async def write(response: Any = response) -> None:
                    with contextlib.suppress(trio.BrokenResourceError):
                        await response.begin(200, TEXT, b"x" * 1000, more=False)

                outer.start_soon(write)
                await wait_all_tasks_blocked()

                async def read(raw: bytearray = raw, ours: PipeEnd = ours) -> None:
                    while data := await ours.receive_some():
                        raw += data

                if reads:
                    outer.start_soon(read)
                began = trio.current_time()
                nursery.cancel_scope.cancel()
            assert trio.current_time() - began == (0 if reads else 1)
            assert ("gone /wait" in endpoint.log) is True
        assert (b"x" * 1000 in raw) is reads


@pytest.mark.parametrize("takes", [0.5, math.inf])
async def test_the_close_of_a_stream_has_a_second_after_a_cancellation(
    takes: float, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ours, theirs = unlimited_pipe()
    ends: list[float] = []

    async def aclose() -> None:
        try:
            await trio.sleep(takes)
        finally:
            ends.append(trio.current_time())

    monkeypatch.setattr(theirs, "aclose", aclose)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(HttpConnection(ListenerState(ScriptedEndpoint(), Limits()), theirs).serve)  # type: ignore[arg-type]
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ends == [min(takes, 1)]


def test_a_connection_can_be_cancelled_at_each_step() -> None:
    sent_bytes = post(b"one") + get("/refuse", "Content-Length: 3", method="POST") + b"abc" + get("/stream")

    def attempt_with(streams: Callable[[], Pair]) -> Callable[[Attempt], Any]:
        async def scenario(attempt: Attempt) -> None:
            ours, theirs = streams()
            endpoint = ScriptedEndpoint()
            connection = HttpConnection(ListenerState(endpoint, Limits()), theirs)  # type: ignore[arg-type]
            async with trio.open_nursery() as nursery:

                async def talk() -> None:
                    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        await ours.send_all(sent_bytes)
                        while await ours.receive_some():
                            pass

                nursery.start_soon(talk, name="the client")

                async def stream() -> None:
                    response = await endpoint.response()
                    while response.begun is False or len(endpoint.responses) < 2:
                        response = await endpoint.response()
                    with contextlib.suppress(trio.BrokenResourceError):
                        await response.send(b"event", more=True)
                        await response.send(b"", more=False)
                    await trio.sleep(1)
                    connection.drain()

                nursery.start_soon(stream)
                with attempt.window():
                    await connection.serve()
                nursery.cancel_scope.cancel()
            assert endpoint.log.count("gone /stream") <= 1
            with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
                await theirs.send_all(b"after the end")

        return scenario

    for streams in (unlimited_pipe, one_byte_pipe):
        assert cancel_at_each_step(attempt_with(streams), watch=any_task) > 10


async def test_a_connection_does_not_reference_finished_responses(autojump_clock: MockClock) -> None:
    for kept in (True, False):
        async with connected() as peer:
            await peer.send(get("/wait", *([] if kept else ["Connection: close"])))
            response = await peer.endpoint.response()
            await response.begin(200, TEXT, b"x" * 100, more=False)
            await (peer.read if kept else peer.read_to_end)()
            await wait_all_tasks_blocked()
            assert peer.endpoint.callback is not None
            assert peer.endpoint.callback() is None
            holders = gc.get_referrers(response)
            assert not any(each is peer.connection or each is vars(peer.connection) for each in holders)


async def test_the_head_of_a_request_is_freed_during_its_stream(autojump_clock: MockClock) -> None:
    def heads() -> int:
        gc.collect()
        return sum(isinstance(each, RequestHead) for each in gc.get_objects())

    before = heads()
    async with connected() as peer:
        await peer.send(get("/stream", "Authorization: Bearer secret"))  # a head without credentials may be cached
        response = await peer.endpoint.response()
        await wait_all_tasks_blocked()
        peer.endpoint.requests.clear()
        assert heads() <= before
        await response.send(b"", more=False)


# Failures of the endpoint and of taps


async def test_an_exception_of_the_endpoint_is_logged_and_gives_500(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with connected() as peer:
        await peer.send(post(b"x", "/broken"))
        (answer,) = answers(await peer.read_to_end())
        assert (answer[0], answer[1]["connection"]) == (500, "close")
        assert refusal_message(answer) == "internal error"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "secret" in str(record.exc_info)


async def test_a_response_that_fails_halfway_is_incomplete(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with connected() as peer:
        await peer.send(get("/break"))
        raw = await peer.read_to_end()
        assert raw.endswith(b"4\r\nhalf\r\n")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("way", ["in", "out"])
async def test_an_exception_of_a_tap_propagates_unchanged(way: str, autojump_clock: MockClock) -> None:
    class Mistake(Exception):
        pass

    def tap(direction: str, _data: bytes) -> None:
        if direction == way:
            raise Mistake

    ours, theirs = unlimited_pipe()
    await ours.send_all(get())
    with pytest.raises(Mistake):
        await HttpConnection(ListenerState(ScriptedEndpoint(), Limits(), tap=tap), theirs).serve()  # type: ignore[arg-type]
    assert await ours.receive_some() == b""


async def test_an_exception_of_a_tap_within_a_body_is_not_a_failed_request(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    class Mistake(Exception):
        pass

    def tap(_direction: str, data: bytes) -> None:
        if data == b"body":
            raise Mistake

    ours, theirs = unlimited_pipe()
    sent_bytes = post(b"body")
    raised = []

    async def serve() -> None:
        try:
            await HttpConnection(ListenerState(ScriptedEndpoint(), Limits(), tap=tap), theirs).serve()  # type: ignore[arg-type]
        except Mistake as error:
            raised.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await ours.send_all(sent_bytes[:-4])
        await wait_all_tasks_blocked()
        await ours.send_all(sent_bytes[-4:])
        assert await ours.receive_some() == b""
    assert len(raised) == 1
    assert caplog.records == []


async def test_disconnections_are_not_logged(caplog: pytest.LogCaptureFixture, autojump_clock: MockClock) -> None:
    for data in (b"", b"nonsense\r\n\r\n", get("/wait"), get("/stream"), get("/echo")[:9], b"\x16\x03\x01\0"):
        async with connected() as peer:
            await peer.send(data)
            await peer.read()
            await peer.stream.aclose()
            await peer.closed.wait()
    async with connected(streams=partial(pipe_pair, 100)) as peer:
        await peer.send(get())
        await wait_all_tasks_blocked()  # during a write of an answer that is longer than the pipe
        await peer.stream.aclose()
        await peer.closed.wait()
    assert caplog.records == []


async def test_a_connection_over_the_limit_gets_a_refusal(autojump_clock: MockClock) -> None:
    ours, theirs = unlimited_pipe()
    shared = ListenerState(ScriptedEndpoint(), Limits())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(HttpConnection(shared, theirs).serve, refused(503, "full"))
        await ours.send_all(get() * 100)
        peer = Peer(ours, ScriptedEndpoint(), HttpConnection(shared, theirs))
        (answer,) = answers(await peer.read_to_end())
        assert answer[0] == 503
        assert refusal_message(answer) == "full"
        assert trio.current_time() < 5


async def test_a_connection_over_the_limit_that_does_not_read_is_closed_soon(autojump_clock: MockClock) -> None:
    _ours, theirs = pipe_pair(10)
    shared = ListenerState(ScriptedEndpoint(), Limits())  # type: ignore[arg-type]
    await HttpConnection(shared, theirs).serve(refused(503, "full"))
    assert trio.current_time() < 2


# System sockets, which accept most writes at once


class ImmediateEndpoint:
    """An endpoint that answers at once, without a checkpoint."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def admit(self, request: HttpRequest, peer: str | None = None) -> SimpleNamespace:
        return ADMITTED

    async def serve(self, admitted: Any, request: HttpRequest, response: Any, prefix: str = "") -> Callable[[], None]:
        await response.begin(200, TEXT, self.body, more=False)
        return lambda: None


@contextlib.asynccontextmanager
async def on_a_socket(endpoint: Any, limits: Limits) -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Serve one end of a socket pair during the block, and yield the client's stream and the server's."""
    ours, theirs = map(trio.SocketStream, trio.socket.socketpair())
    async with ours, trio.open_nursery() as nursery:
        nursery.start_soon(HttpConnection(ListenerState(endpoint, limits), theirs).serve)
        yield ours, theirs
        nursery.cancel_scope.cancel()


async def read_bytes(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        data = await stream.receive_some()
        assert data, bytes(raw)
        raw += data
    return bytes(raw)


@pytest.mark.skipif(os.name != "posix", reason="Trio writes all of it on other systems")
async def test_a_write_that_the_system_accepts_at_once_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_a_socket(ImmediateEndpoint(b"body"), Limits()) as (ours, theirs):
        monkeypatch.setattr(theirs, "send_all", None)
        for _ in range(3):
            await ours.send_all(get())
            assert (await ours.receive_some()).endswith(b"\r\n\r\nbody")


async def test_a_long_write_continues_as_the_client_reads() -> None:
    body = bytes(range(256)) * 16 * 1024
    async with on_a_socket(ImmediateEndpoint(body), Limits()) as (ours, _):
        for _ in range(3):
            await ours.send_all(get())
            await wait_all_tasks_blocked()
            head = await ours.receive_some(16)
            while b"\r\n\r\n" not in head:
                head += await ours.receive_some(1)
            assert await read_bytes(ours, len(body)) == body


async def test_a_client_that_does_not_read_from_a_socket_is_dropped(autojump_clock: MockClock) -> None:
    async with on_a_socket(ImmediateEndpoint(bytes(16 * 1024 * 1024)), Limits(write_seconds=5)) as (ours, _):
        await ours.send_all(get())
        await trio.sleep(6)
        size = 0
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await ours.receive_some():
                size += len(data)
        assert size < 16 * 1024 * 1024


async def test_a_write_notices_a_client_that_disconnected_before_its_answer() -> None:
    class EndpointAfterDisconnect(ImmediateEndpoint):
        async def serve(self, *args: Any, **named: Any) -> Callable[[], None]:
            await ours.aclose()
            try:
                while True:  # the first write may still succeed
                    await args[2].begin(200, TEXT, self.body, more=True)
            except trio.BrokenResourceError:
                left.set()
                raise

    left = trio.Event()
    async with on_a_socket(EndpointAfterDisconnect(b"body"), Limits()) as (ours, _):
        await ours.send_all(get())
        with trio.fail_after(60):
            await left.wait()


async def test_pipelined_requests_do_not_hold_up_other_tasks() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with on_a_socket(ImmediateEndpoint(b""), Limits()) as (ours, _), trio.open_nursery() as nursery:
        await ours.send_all(get())
        size = len(await ours.receive_some())
        nursery.start_soon(others)
        await trio.lowlevel.checkpoint()
        before = turns
        await ours.send_all(get() * 100)
        await read_bytes(ours, 100 * size)
        assert turns - before >= 98  # one turn between two requests, without the ends
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["closes", "closes its half", "resets"])
async def test_a_disconnection_of_a_socket_is_noticed_at_once(how: str) -> None:
    endpoint = ScriptedEndpoint()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    ours = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])
    theirs = await listeners[0].accept()
    await listeners[0].aclose()
    async with trio.open_nursery() as nursery, ours:
        nursery.start_soon(HttpConnection(ListenerState(endpoint, Limits()), theirs).serve)  # type: ignore[arg-type]
        await ours.send_all(get("/wait"))
        await endpoint.response()
        if how == "closes its half":
            await ours.send_eof()
        else:
            if how == "resets":
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await ours.aclose()
        with trio.fail_after(60):
            while "gone /wait" not in endpoint.log:
                await trio.lowlevel.checkpoint()


async def test_a_closed_server_socket_ends_its_connection() -> None:
    endpoint = ScriptedEndpoint()
    async with on_a_socket(endpoint, Limits()) as (ours, theirs):
        await ours.send_all(get("/wait"))
        await endpoint.response()
        await theirs.aclose()
        with trio.fail_after(60):
            while "gone /wait" not in endpoint.log:
                await trio.lowlevel.checkpoint()


async def test_unread_immediate_writes_count_against_the_write_deadline(
    autojump_clock: MockClock,
) -> None:
    client, server = trio.socket.socketpair()
    connection = HttpConnection(ListenerState(ScriptedEndpoint(), Limits()), trio.SocketStream(server))  # type: ignore[arg-type]
    while connection.write_at_once(bytes(100_000)):
        pass
    assert not connection.write_at_once(b"more")
    with pytest.raises(trio.BrokenResourceError, match=r"Limits\.write_seconds"):
        await connection.write(b"last")
    client.close()
    server.close()


async def test_an_immediate_write_is_sent_first_and_fails_silently() -> None:
    client, server = trio.socket.socketpair()
    connection = HttpConnection(ListenerState(ScriptedEndpoint(), Limits()), trio.SocketStream(server))  # type: ignore[arg-type]
    assert connection.write_at_once(b"first")
    sent = len(b"first")
    while connection.write_at_once(bytes(100_000)):
        sent += 100_000
    sent += 100_000 if connection._unsent else 0  # a part was sent, and the next write sends the rest
    received = bytearray()

    async def listen() -> None:
        while len(received) < sent + len(b"last"):
            received.extend(await client.recv(100_000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await connection.write(b"last")
    assert bytes(received) == b"first" + bytes(sent - 5) + b"last"
    client.close()
    assert not connection.write_at_once(b"too late")
    server.close()
