"""The HTTP client: its requests, the kept connections, each way in which a reply can end, and leaks."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import h11
import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from tests.cuts import Cuts
from tests.http.served import listening, served
from tests.server.checkpoints import (
    Attempt,
    Pair,
    PipeEnd,
    any_task,
    cancel_at_each_step,
    one_byte_pipe,
    pipe_pair,
    unlimited_pipe,
    wait_or_fail,
)
from trio_mcp import Limits, Server, UsageError
from trio_mcp.transport import CLOSING, IDLE_SECONDS, HttpPool, ReplyBroken, ReplyTooLong, open_nursery

URL = "http://mcp.test/mcp"
HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

Handler = Callable[["ServerConnection"], Awaitable[None]]


class ServerConnection:
    """The server's end of a connection.  `number` counts the connections, from 1."""

    def __init__(self, stream: PipeEnd, number: int) -> None:
        self.stream = stream
        self.number = number
        self.requests = 0
        self.data = b""

    async def request(self) -> tuple[bytes, bytes]:
        """The head and the body of the next request."""
        while b"\r\n\r\n" not in self.data:
            await self._more()
        head, _, self.data = self.data.partition(b"\r\n\r\n")
        size = next(
            (int(connection[15:]) for connection in head.split(b"\r\n") if connection.startswith(b"Content-Length:")), 0
        )
        while len(self.data) < size:
            await self._more()
        body, self.data = self.data[:size], self.data[size:]
        self.requests += 1
        return head, body

    async def _more(self) -> None:
        data = await self.stream.receive_some()
        if not data:
            raise ClientClosed
        self.data += data

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            await self.stream.send_all(piece)


class ClientClosed(Exception):
    """The client has closed the connection."""


class MemoryServer:
    """A server in memory, which calls the handler for each connection, and the client's pool."""

    def __init__(self, nursery: trio.Nursery, handle: Handler, make: Callable[[], Pair], **options: Any) -> None:
        self._nursery = nursery
        self._handle = handle
        self._make = make
        self.connections: list[ServerConnection] = []
        self.ours: list[PipeEnd] = []
        self.pool = HttpPool(**{"limits": Limits(), "connect": self._connect, "environ": {}, **options})

    async def _connect(self, host: str, port: int) -> PipeEnd:
        await trio.lowlevel.checkpoint()
        ours, theirs = self._make()
        self.ours.append(ours)
        self.connections.append(ServerConnection(theirs, len(self.connections) + 1))
        self._nursery.start_soon(self._run, self.connections[-1])
        return ours

    async def _run(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ClientClosed, trio.BrokenResourceError):
            await self._handle(connection)
        connection.stream.close()

    @property
    def open(self) -> int:
        """The number of connections that the client has not closed."""
        return sum(not each._out.no_sender for each in self.ours)

    async def get(self, url: str = URL, **options: Any) -> bytes:
        async with self.pool.request("GET", url, (), **options) as reply:
            return await reply.read(1000)


@contextlib.asynccontextmanager
async def memory_server(
    handle: Handler, make: Callable[[], Pair] = unlimited_pipe, **options: Any
) -> AsyncIterator[MemoryServer]:
    """Run the server and the pool.  After the block, check that no connection is open."""
    async with open_nursery() as nursery:
        server = MemoryServer(nursery, handle, make, **options)
        async with server.pool:
            yield server
        assert server.open == 0


def always_reply(*pieces: bytes) -> Handler:
    """A handler that sends these pieces for each request."""

    async def handle(connection: ServerConnection) -> None:
        while True:
            await connection.request()
            await connection.send(*pieces)

    return handle


def replies_in_turn(*replies: bytes | None) -> Handler:
    """A handler that sends the n-th reply on the n-th connection, and closes it.

    None only reads the request.  The last reply is for all further connections.
    """

    async def handle(connection: ServerConnection) -> None:
        await connection.request()
        reply = replies[min(connection.number, len(replies)) - 1]
        if reply is not None:
            await connection.send(reply)

    return handle


# Requests.


async def test_a_request_has_exactly_the_needed_headers() -> None:
    heads = []

    async def handle(connection: ServerConnection) -> None:
        while True:
            heads.append(await connection.request())
            await connection.send(HI)

    async with memory_server(handle) as server:
        for method, url, body in [
            ("POST", "http://MCP.test:80/mcp?a=b#c", b"x" * 70_000),
            ("POST", "http://mcp.test", b""),
            ("GET", "http://mcp.test:8080/a%20b/\N{SNOWMAN}", b""),
            ("DELETE", "http://[::1]:81/?q", b""),
        ]:
            async with server.pool.request(method, url, (("Mcp-Name", "n: \t\xe9"),), body) as reply:
                assert (reply.status, await reply.read(10)) == (200, b"hi")
    common = b"\r\nAccept-Encoding: identity"
    field = b"\r\nMcp-Name: n: \t\xe9"
    assert heads == [
        (b"POST /mcp?a=b HTTP/1.1\r\nHost: mcp.test" + common + b"\r\nContent-Length: 70000" + field, b"x" * 70_000),
        (b"POST / HTTP/1.1\r\nHost: mcp.test" + common + b"\r\nContent-Length: 0" + field, b""),
        (b"GET /a%20b/%E2%98%83 HTTP/1.1\r\nHost: mcp.test:8080" + common + field, b""),
        (b"DELETE /?q HTTP/1.1\r\nHost: [::1]:81" + common + field, b""),
    ]


async def test_a_cached_head_is_used_again_for_the_same_request_only() -> None:
    heads: list[list[bytes]] = []

    async def handle(connection: ServerConnection) -> None:
        while True:
            head, _ = await connection.request()
            heads.append(head.split(b"\r\n"))
            await connection.send(HI)

    requests = [("POST", "/", name, b"x" * size) for name in ("a", "b", "a") for size in (1, 10)]
    requests += [("POST", "/", str(number), b"") for number in range(70)]  # each of them once
    requests += [
        ("POST", "/", "a", b"x"),
        ("POST", "/", "a" * 3000, b""),
        ("POST", "/c", "a", b""),
        ("GET", "/c", "a", b""),
    ]
    async with memory_server(handle) as server:
        for method, path, name, body in requests:
            async with server.pool.request(method, f"http://mcp.test{path}", (("Mcp-Name", name),), body) as reply:
                await reply.read(10)
            assert sum(len(each.after) for each in server.pool._heads.values()) < 64 * 2048
    common = [b"Host: mcp.test", b"Accept-Encoding: identity"]
    for head, (method, path, name, body) in zip(heads, requests, strict=True):
        length = [b"Content-Length: %d" % len(body)] if method == "POST" else []
        assert head == [f"{method} {path} HTTP/1.1".encode(), *common, *length, f"Mcp-Name: {name}".encode()]


@pytest.mark.parametrize("fields", [(), (("A", "b"),), (("Mcp-Name", "\x80\xff"), ("B", ""))])
async def test_h11_can_read_the_requests(fields: tuple[tuple[str, str], ...]) -> None:
    read = []

    async def handle(connection: ServerConnection) -> None:
        head, _ = await connection.request()
        server = h11.Connection(h11.SERVER)
        server.receive_data(head + b"\r\n\r\n")
        request = server.next_event()
        assert isinstance(request, h11.Request)
        read.append((request.method, request.target, [pair for pair in request.headers if len(pair[0]) < 9]))
        await connection.send(HI)

    async with memory_server(handle) as server, server.pool.request("GET", URL, fields):
        pass
    sent = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
    assert read == [(b"GET", b"/mcp", [(b"host", b"mcp.test"), *sent])]


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (("A", "secret\r\nB: c"), "cannot be sent"),
        (("A", "secret\nB: c"), "cannot be sent"),
        (("A", "secret\0"), "cannot be sent"),
        (("A", "secret\x7f"), "cannot be sent"),
        (("A", "secret\N{SNOWMAN}"), "cannot be sent"),
        (("A\r\nB", "secret"), "cannot be sent"),
        (("A: x", "secret"), "cannot be sent"),
        (("A ", "secret"), "cannot be sent"),
        (("", "secret"), "cannot be sent"),
        (("\xc4", "secret"), "cannot be sent"),
        (("Content-LENGTH", "secret"), "belongs to the connection"),
        (("Transfer-Encoding", "secret"), "belongs to the connection"),
        (("Host", "secret"), "belongs to the connection"),
        (("Connection", "secret"), "belongs to the connection"),
        (("Proxy-Authorization", "secret"), "belongs to the connection"),
        (("Accept-Encoding", "secret"), "belongs to the connection"),
    ],
)
async def test_an_invalid_header_field_is_not_sent(field: tuple[str, str], why: str) -> None:
    async with memory_server(always_reply(HI)) as server:
        with pytest.raises(UsageError, match=why) as caught:
            server.pool.request("GET", URL, (("Ok", "fine"), field))
        assert "secret" not in str(caught.value)
        assert server.connections == []


@pytest.mark.parametrize("method", ["", "GE T", "GET / HTTP/1.1\r\nA: b\r\n\r\n", "CONNECT"])
async def test_an_invalid_method_is_not_sent(method: str) -> None:
    async with memory_server(always_reply(HI)) as server:
        with pytest.raises(UsageError, match="not a method"):
            server.pool.request(method, URL, ())


# Replies.


async def test_a_streamed_body_is_read_piece_by_piece() -> None:
    go_on = trio.Event()

    async def handle(connection: ServerConnection) -> None:
        await connection.request()
        await connection.send(CHUNKED, b"5\r\nfirst\r\n")
        await go_on.wait()
        await connection.send(b"6\r\nsecond\r\n0\r\n\r\n")
        await connection.request()

    async with memory_server(handle) as server:
        async with server.pool.request("POST", URL, (), b"{}") as reply:
            assert reply.headers["content-type"] == "text/event-stream"
            assert await wait_or_fail(reply.receive, "the first") == b"first"
            go_on.set()
            assert [await reply.receive(), await reply.receive(), await reply.receive()] == [b"second", b"", b""]
        assert server.open == 1


@pytest.mark.parametrize(
    ("reply", "limit", "fits"),
    [
        (HI, 2, True),
        (HI, 1, False),
        (CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", 2, True),
        (CHUNKED + b"2\r\nhi\r\n1\r\n!", 2, False),
        (CHUNKED + b"3\r\nhi!\r\n0\r\n\r\n", 2, False),
        (CHUNKED + b"FFFFFFFFFFFF\r\nhi", 2, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n", 1000, False),
        (b"HTTP/1.1 200 OK\r\n\r\nhi", 2, True),
        (b"HTTP/1.1 200 OK\r\n\r\nhi!", 2, False),
        (b"HTTP/1.1 204 OK\r\n\r\n", 0, True),
    ],
)
async def test_a_body_is_read_up_to_a_limit(reply: bytes, limit: int, fits: bool) -> None:
    async with memory_server(replies_in_turn(reply)) as server, server.pool.request("GET", URL, ()) as answer:
        if fits:
            assert await answer.read(limit) in (b"hi", b"")
        else:
            with pytest.raises(ReplyTooLong, match=rf"{limit} bytes \(Limits.message_bytes\)$"):
                await wait_or_fail(lambda: answer.read(limit), "the refusal")


async def test_a_compressed_reply_is_refused_with_its_status() -> None:
    packed = HI.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n").replace(b"200", b"401")
    async with memory_server(always_reply(packed)) as server, server.pool.request("GET", URL, ()) as reply:
        assert reply.status == 401
        with pytest.raises(ReplyBroken, match="gzip"):
            await reply.read(10)


async def test_each_step_is_a_checkpoint() -> None:
    async with memory_server(always_reply(HI)) as server:
        for _ in range(2):
            with assert_checkpoints():
                reply = await (block := server.pool.request("GET", URL, ())).__aenter__()
            assert await reply.read(10) == b"hi"
            for _ in range(2):
                with assert_checkpoints():
                    assert await reply.receive() == b""
            await block.__aexit__(None, None, None)
        with assert_checkpoints():
            await server.pool.aclose()


async def test_a_reply_is_not_read_after_its_block() -> None:
    async with memory_server(always_reply(HI)) as server:
        async with server.pool.request("GET", URL, ()) as reply:
            await reply.read(10)
        async with server.pool.request("GET", URL, ()):
            with pytest.raises(UsageError, match="has ended"):
                await reply.receive()


async def test_a_block_is_entered_once_and_raises_its_own_exception() -> None:
    async with memory_server(always_reply(HI)) as server:
        block = server.pool.request("GET", URL, ())
        error = KeyError("mine")
        with pytest.raises(KeyError) as caught:
            async with block:
                raise error
        assert caught.value is error
        with pytest.raises(UsageError, match="once"):
            await block.__aenter__()


# Kept connections.


async def test_a_connection_is_used_again_the_newest_first(autojump_clock: MockClock) -> None:
    async with memory_server(always_reply(HI)) as server:
        async with server.pool.request("GET", URL, ()) as one, server.pool.request("GET", URL, ()) as other:
            await one.read(10)
            await other.read(10)
        for _ in range(3):
            assert await server.get() == b"hi"
        # The inner block, of the second connection, ended first.
        assert [connection.requests for connection in server.connections] == [4, 1]


async def test_idle_connections_have_a_limit_and_a_timeout(autojump_clock: MockClock) -> None:
    async with memory_server(always_reply(HI)) as server:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(40):
                reply = await stack.enter_async_context(server.pool.request("GET", URL, ()))
                await reply.read(10)
            assert server.open == 40
        assert server.open == 32
        await trio.sleep(IDLE_SECONDS - 1)
        await server.get()
        assert (len(server.connections), server.open) == (40, 32)
        await trio.sleep(2)
        await server.get()
        assert (len(server.connections), server.open) == (40, 1)
        await trio.sleep(IDLE_SECONDS)
        await server.get("http://other.test/")
        assert (len(server.connections), server.open) == (41, 1)


async def test_the_limit_of_idle_connections_counts_all_servers() -> None:
    async with memory_server(always_reply(HI)) as server:
        for number in range(70):
            await server.get(f"http://mcp.test:{1000 + number}/")
        assert (len(server.connections), server.open) == (70, 64)


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        (HI, True),
        (CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", True),
        (CHUNKED + b"2\r\nhi\r\n0\r\n", False),
        (HI + b"x", False),
        (HI.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), False),
        (HI.replace(b"1.1", b"1.0"), False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi", False),
    ],
)
async def test_a_connection_is_kept_if_the_reply_was_read_to_its_end(reply: bytes, kept: bool) -> None:
    async with memory_server(always_reply(reply)) as server:
        async with server.pool.request("GET", URL, ()) as answer:
            assert await answer.receive() == b"hi"
        assert server.open == kept
        async with server.pool.request("GET", URL, ()):
            pass
        assert len(server.connections) == 2 - kept


async def test_a_closed_pool_closes_idle_connections_and_later_those_in_use() -> None:
    async with memory_server(always_reply(HI)) as server:
        await server.get("http://idle.test/")
        async with server.pool.request("GET", URL, ()) as reply:
            await server.pool.aclose()
            await server.pool.aclose()
            assert server.open == 1
            assert await reply.read(10) == b"hi"
            with pytest.raises(UsageError, match="the pool is closed"):
                server.pool.request("GET", URL, ())
        assert server.open == 0


# Broken replies.

BROKEN = {
    "it ends before the reply": (b"", "ended before there was a reply"),
    "it ends in the head": (HI[:20], "in the middle of the head"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP reply"),
    "TLS": (b"\x15\x03\x03\0\x02\x02\x32", "https://"),
}


@pytest.mark.parametrize("which", BROKEN)
async def test_a_request_without_a_reply_may_have_run(which: str) -> None:
    reply, why = BROKEN[which]
    async with memory_server(replies_in_turn(reply)) as server:
        with pytest.raises(ReplyBroken, match=f"POST http://mcp.test: .*{why}") as caught:
            async with server.pool.request("POST", f"{URL}?key=secret", (("A", "secret"),), b"secret"):
                raise AssertionError
        assert caught.value.sent
        assert "secret" not in str(caught.value)
        assert (len(server.connections), server.open) == (1, 0)


@pytest.mark.parametrize("reply", [HI, CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"])
@pytest.mark.parametrize("make", [unlimited_pipe, one_byte_pipe])
async def test_a_reply_cut_at_any_byte_is_an_error_and_the_next_request_works(
    reply: bytes, make: Callable[[], Pair], cuts: Cuts
) -> None:
    for at in cuts(reply[:-1]):
        async with memory_server(replies_in_turn(reply[:at], reply), make) as server:
            with pytest.raises(ReplyBroken) as caught:
                await wait_or_fail(server.get, "the end")
            assert caught.value.sent
            assert await wait_or_fail(server.get, "the next") == b"hi"


async def test_a_reset_body_is_an_error_also_without_a_length() -> None:
    class Reset(trio.abc.Stream):
        parts = (b"HTTP/1.1 200 OK\r\n\r\nhi",)
        closed = False

        async def send_all(self, data: object) -> None:
            await trio.lowlevel.checkpoint()

        async def wait_send_all_might_not_block(self) -> None: ...

        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            await trio.lowlevel.checkpoint()
            if self.parts:
                part, self.parts = self.parts[0], ()
                return part
            raise trio.BrokenResourceError("reset")

        async def aclose(self) -> None:
            self.closed = True
            await trio.lowlevel.checkpoint()

    stream = Reset()

    async def connect(host: str, port: int) -> Reset:
        return stream

    async with HttpPool(limits=Limits(), connect=connect, environ={}) as pool:
        async with pool.request("GET", URL, ()) as reply:
            assert await reply.receive() == b"hi"
            with pytest.raises(ReplyBroken, match="the connection broke") as caught:
                await reply.receive()
        assert isinstance(caught.value.__cause__, trio.BrokenResourceError)
    assert stream.closed


@pytest.mark.parametrize("replayable", [True, False])
async def test_a_request_on_a_kept_connection_is_repeated_only_if_replayable(replayable: bool) -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.request()
        await connection.send(HI)
        await connection.request()
        if connection.number > 1:
            await connection.send(HI)

    async with memory_server(handle) as server:
        await server.get()
        if replayable:
            assert await server.get(replayable=True) == b"hi"
        else:
            with pytest.raises(ReplyBroken, match="before there was a reply") as caught:
                await server.get()
            assert caught.value.sent
        assert [connection.requests for connection in server.connections] == ([2, 1] if replayable else [2])


async def test_a_request_is_repeated_if_the_kept_connection_took_no_byte() -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.request()
        await connection.send(HI)
        if connection.number > 1:
            await connection.request()
            await connection.send(HI)

    async with memory_server(handle) as server:
        await server.get()
        await wait_all_tasks_blocked()  # the server has closed it; a memory stream does not show this
        async with server.pool.request("POST", URL, (), b"{}") as reply:
            assert await reply.read(10) == b"hi"
        assert len(server.connections) == 2


@pytest.mark.parametrize("second", [b"H", b"junk"])
async def test_a_request_is_not_repeated_after_the_first_byte_of_a_reply(second: bytes) -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.request()
        await connection.send(HI)
        await connection.request()
        await connection.send(second)

    async with memory_server(handle) as server:
        await server.get()
        with pytest.raises(ReplyBroken):
            await server.get(replayable=True)
        assert len(server.connections) == 1


async def test_a_request_on_a_new_connection_is_not_repeated() -> None:
    async with memory_server(replies_in_turn(None)) as server:
        with pytest.raises(ReplyBroken):
            await server.get(replayable=True)
        assert len(server.connections) == 1


@pytest.mark.parametrize("size", [10, 200_000])
async def test_writing_to_a_server_that_does_not_read_has_a_timeout(autojump_clock: MockClock, size: int) -> None:
    async def handle(connection: ServerConnection) -> None:
        await trio.sleep_forever()

    async with memory_server(handle, one_byte_pipe, limits=Limits(write_seconds=5)) as server:
        start = trio.current_time()
        with pytest.raises(ReplyBroken, match="did not read the whole request") as caught:
            async with server.pool.request("POST", URL, (), b"x" * size):
                raise AssertionError
        assert trio.current_time() == start + 5 + CLOSING
        assert not caught.value.sent
        assert server.open == 0


@pytest.mark.parametrize("closes", [True, False])
async def test_a_refusal_before_all_was_sent_is_a_reply(autojump_clock: MockClock, closes: bool) -> None:
    async def handle(connection: ServerConnection) -> None:
        await connection.stream.receive_some()
        await connection.send(b"HTTP/1.1 413 Too large\r\nContent-Length: 2\r\n\r\nno")
        if not closes:
            await trio.sleep_forever()

    async with memory_server(handle, lambda: pipe_pair(100)) as server:
        start = trio.current_time()
        async with server.pool.request("POST", URL, (), b"x" * 200_000) as reply:
            assert (reply.status, await reply.read(10)) == (413, b"no")
        assert trio.current_time() == start
        assert server.open == 0  # it has half of a request


# Cancelling.


@pytest.mark.parametrize("make", [unlimited_pipe, pytest.param(one_byte_pipe, marks=pytest.mark.full)])
@pytest.mark.parametrize("kept", [True, False])
def test_cancelling_at_any_step_closes_the_connection_and_leaves_the_pool_usable(
    make: Callable[[], Pair], kept: bool
) -> None:
    reply = CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"

    async def scenario(attempt: Attempt) -> None:
        async with memory_server(always_reply(reply), make) as server:
            if kept:
                await server.get()
            whole = False
            with attempt.window():
                async with server.pool.request("POST", URL, (), b"{}") as answer:
                    assert await answer.read(10) == b"hi"
                    whole = True
                    await trio.lowlevel.checkpoint()
            idle, opened = server.open, len(server.connections)
            assert idle == whole
            assert await server.get() == b"hi"
            assert (server.open, len(server.connections)) == (1, opened + 1 - idle)

    assert cancel_at_each_step(scenario, watch=any_task) > 7


def test_a_pool_that_is_closed_while_cancelled_closes_all() -> None:
    async def scenario(attempt: Attempt) -> None:
        async with memory_server(always_reply(HI)) as server:
            for port in range(4):
                await server.get(f"http://mcp.test:{1000 + port}/")
            with attempt.window():
                await server.pool.aclose()
            assert server.open == 0

    assert cancel_at_each_step(scenario, watch="the scenario") > 1


# Over sockets.


async def _loopback(nursery: trio.Nursery, handle: Callable[[trio.SocketStream], Awaitable[None]]) -> int:
    listeners = await nursery.start(trio.serve_tcp, handle, 0)
    port: int = next(each.socket.getsockname()[1] for each in listeners)
    return port


@pytest.mark.parametrize("last", [b"", b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n"])
async def test_an_idle_connection_that_received_data_is_not_used_again(last: bytes) -> None:
    requests = []
    gone = trio.Event()

    async def handle(stream: trio.SocketStream) -> None:
        async with stream:
            first = not requests
            requests.append(await stream.receive_some())
            await stream.send_all(HI)
            if first:
                await stream.send_all(last or b"")
            else:
                await stream.receive_some()
        gone.set()

    async with open_nursery() as nursery:
        url = f"http://127.0.0.1:{await _loopback(nursery, handle)}/"
        async with HttpPool(limits=Limits(), environ={}) as pool:
            async with pool.request("POST", url, ()) as reply:
                assert await reply.receive() == b"hi"
                await gone.wait()
            async with pool.request("POST", url, ()) as reply:
                assert await reply.read(10) == b"hi"
    assert len(requests) == 2


async def test_concurrent_requests_detect_closed_idle_connections() -> None:
    """While one request closes the connections that it found ended, the others check them too."""
    opened = 0
    gates = [trio.Event(), trio.Event()]

    async def handle(stream: trio.SocketStream) -> None:
        nonlocal opened
        opened += 1
        gate = gates[opened > 8]
        async with stream:
            await stream.receive_some()
            await stream.send_all(HI)
            await gate.wait()

    async def ask(pool: HttpPool, url: str) -> None:
        async with pool.request("POST", url, ()) as reply:
            assert await reply.read(10) == b"hi"
            together.append(1)
            while len(together) % 8:  # gives each request a connection of its own
                await trio.lowlevel.checkpoint()

    together: list[int] = []
    async with open_nursery() as nursery:
        url = f"http://127.0.0.1:{await _loopback(nursery, handle)}/"
        async with HttpPool(limits=Limits(), environ={}) as pool:
            for gate in gates:
                async with trio.open_nursery() as asking:
                    for _ in range(8):
                        asking.start_soon(ask, pool, url)
                gate.set()
                while not all(link._stream.socket.is_readable() for link in pool._idle):  # type: ignore[attr-defined]
                    await trio.lowlevel.checkpoint()
    assert opened == 16


async def test_a_reset_ends_a_reply_at_once() -> None:
    async def handle(stream: trio.SocketStream) -> None:
        await stream.receive_some(1)
        await stream.send_all(CHUNKED)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()

    async with open_nursery() as nursery:
        url = f"http://127.0.0.1:{await _loopback(nursery, handle)}/"
        async with HttpPool(limits=Limits(), environ={}) as pool:
            with pytest.raises(ReplyBroken) as caught:
                async with pool.request("POST", url, (), b"{}") as reply:
                    await reply.read(10)
            assert caught.value.sent


async def test_an_mcp_server_gets_many_calls_on_one_connection() -> None:
    server = Server("served")

    @server.tool
    def echo(text: str) -> str:
        return text

    body = (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hi"},"_meta":'
        b'{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},'
        b'"io.modelcontextprotocol/clientInfo":{"name":"a","version":"1"}}}}'
    )
    fields = (
        ("Content-Type", "application/json"),
        ("Accept", "application/json, text/event-stream"),
        ("MCP-Protocol-Version", "2026-07-28"),
        ("Mcp-Method", "tools/call"),
        ("Mcp-Name", "echo"),
    )
    opened = []
    async with listening(server, allowed_hosts=["127.0.0.1"]) as web:

        async def connect(host: str, port: int) -> trio.abc.Stream:
            opened.append(port)
            return await web.connect()

        async with HttpPool(limits=Limits(), connect=connect, environ={}) as pool:
            for _ in range(20):
                async with pool.request("POST", "http://127.0.0.1:3000/mcp", fields, body) as reply:
                    assert (reply.status, b'"hi"' in await reply.read(10_000)) == (200, True)
    assert opened == [3000]


async def test_a_tap_sees_what_is_sent_and_received(autojump_clock: MockClock) -> None:
    seen: dict[str, bytes] = {"in": b"", "out": b""}

    def tap(direction: str, data: bytes) -> None:
        seen[direction] += data

    async with (
        served(Server("tapped")) as web,
        HttpPool(limits=Limits(), connect=lambda *_: web.connect(), tap=tap) as pool,
        pool.request("GET", "http://localhost/nowhere", ()) as reply,
    ):
        await reply.read(1000)
    assert seen["out"].startswith(b"GET /nowhere HTTP/1.1\r\n")
    assert seen["in"].startswith(b"HTTP/1.1 404 ")
