"""Every transport, behind the byte stream of `tests.server.raw_client`.

A test that uses `connected(server, revision)` runs unchanged over any transport.  `connected` serves the server's end
of its stream with `trio_mcp.server.session.serve_stream`.  The fixture of `tests.contract.cases` replaces this function
by one of `TRANSPORTS`.

- `memory` is `serve_stream` itself.
- `stdio` is `serve_stdio`, with two pipes as fds 0 and 1.
- The others are gateways.  A gateway reads the lines of the client and sends them in the form of its transport.  It
  returns the messages of all streams as lines.  `client.HttpClient` checks the HTTP itself.  At the end of the client's
  lines the gateway ends a session with DELETE, and a modern request by closing its response.  If the server ends, the
  lines end.

`http json` accepts both kinds of response: a response is JSON unless the server sends a message before its result.
`http stream` accepts only event streams.  `asgi` is like `http json`, with the ASGI application in a host in memory.

Between two messages of the client the server can run for some checkpoints.  So it reads the messages in the order in
which the test sends them, as it does in memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

import trio
import wsproto
from trio.lowlevel import FdStream
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, CloseConnection, Event, Ping, RejectConnection, TextMessage
from wsproto.events import Request as Handshake

from tests.http.asgi_servers import hosted
from tests.http.client import Answer, Cut, HttpClient, Link, Stream, _items, _key
from tests.http.served import MemoryListener
from tests.server.checkpoints import unwrapped
from tests.server.raw_client import LATEST
from trio_mcp.asgi import AsgiApp
from trio_mcp.core import META_VERSION
from trio_mcp.core.http import LOOPBACK_HOSTS
from trio_mcp.server import serve_stdio, serve_stream

__all__ = ["TRANSPORTS"]

_CHECKPOINTS = 40  # more than the server needs to read a request
_CLOSED = (trio.BrokenResourceError, trio.ClosedResourceError)


def _parsed(line: bytes) -> Any:
    """None if that is not possible: a test may send anything."""
    try:
        return json.loads(line)
    except ValueError:
        return None


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    """The lines, without their ends.  Other tasks can run between two lines."""
    rest = b""
    async for data in stream:
        *lines, rest = (rest + bytes(data)).split(b"\n")
        for line in lines:
            yield line
            for _ in range(_CHECKPOINTS):
                await trio.lowlevel.checkpoint()


class _Gateway:
    """Connects the lines of one client with a transport."""

    def __init__(self, stream: trio.abc.Stream, web: HttpClient) -> None:
        self.stream = stream
        self.web = web
        self.nursery: trio.Nursery
        self._writing = trio.Lock()

    async def run(self) -> None:
        """Run until the client has ended its lines, or the server has closed."""
        async with trio.open_nursery() as self.nursery:
            await self.begin()
            with contextlib.suppress(*_CLOSED):
                async for line in _lines(self.stream):
                    await self.take(line)
            await self.finish()
            self.nursery.cancel_scope.cancel()

    async def begin(self) -> None: ...

    async def take(self, line: bytes) -> None:
        raise NotImplementedError

    async def finish(self) -> None: ...

    async def refused(self, answer: Answer, message: Any) -> None:
        """A status stands for an error: of the request, or without an id for a line that is not a message.

        HTTP refuses responses and notifications as well.  On a byte stream only an invalid notification is answered.
        """
        if not isinstance(message, dict) or "method" in message:
            id = message.get("id") if isinstance(message, dict) else None
            await self.give({**answer.json, "id": id})

    async def give(self, message: Any) -> None:
        text = message if isinstance(message, bytes) else json.dumps(message, ensure_ascii=False).encode()
        with contextlib.suppress(*_CLOSED):
            async with self._writing:
                await self.stream.send_all(text + b"\n")


class _Streamable(_Gateway):
    """Streamable HTTP, in the era of the messages."""

    def __init__(self, stream: trio.abc.Stream, web: HttpClient, accept: str | None = None) -> None:
        super().__init__(stream, web)
        self.session: str | None = None
        self.revision = LATEST
        self._headers = {} if accept is None else {"Accept": accept}
        self._running: dict[str, trio.CancelScope] = {}
        self._posts = 0  # requests without a complete response
        self._answered = trio.lowlevel.ParkingLot()

    async def take(self, line: bytes) -> None:
        message = _parsed(line)
        method = message.get("method") if isinstance(message, dict) else None
        modern = self._learn(message)
        if modern and method == "notifications/cancelled":
            scope = self._running.get(_key((message.get("params") or {}).get("requestId")))
            if scope is not None:
                scope.cancel()
                return
        asks = any(isinstance(each, dict) and "method" in each and "id" in each for each in _items(message))
        if asks:
            self.nursery.start_soon(self._post, message, line, modern, name=f"a POST of {method}")
        else:
            await self._post(message, line, modern)

    def _learn(self, message: Any) -> bool:
        """Return whether the message belongs to the modern era."""
        params = message.get("params") if isinstance(message, dict) else None
        meta = params.get("_meta") if isinstance(params, dict) else None
        if isinstance(meta, dict) and isinstance(meta.get(META_VERSION), str):
            return True
        opening = isinstance(message, dict) and message.get("method") == "initialize"
        return self.session is None and self.revision == LATEST and not opening

    async def _post(self, message: Any, line: bytes, modern: bool) -> None:
        self._posts += 1
        with trio.CancelScope() as scope:
            ids = [_key(each["id"]) for each in _items(message) if isinstance(each, dict) and "id" in each]
            self._running.update(dict.fromkeys(ids, scope) if modern else {})
            opening = isinstance(message, dict) and message.get("method") == "initialize"
            session = None if modern or opening else self.session
            how: dict[str, Any] = {"session": session, "revision": LATEST if modern else self.revision}
            link: Link | None = None
            try:
                link, head, checks = await self.web.begin(message, body=line, headers=self._headers, **how)
                if (head.status_code, opening) == (200, True):
                    self._opened(dict(head.headers))
                await self._answer(link, head, checks, session, message)
            except Cut:
                pass  # the server has closed; the test decides whether that is right
            finally:
                if scope.cancel_called and link is not None:
                    with trio.CancelScope(shield=True):
                        await link.aclose()
        for id in ids:
            self._running.pop(id, None)
        self._posts -= 1
        self._answered.unpark_all()

    def _opened(self, headers: Mapping[bytes, bytes]) -> None:
        raw = headers.get(b"mcp-session-id")
        self.session = None if raw is None else raw.decode()

    async def _answer(self, link: Link, head: Any, checks: Any, session: str | None, request: Any) -> None:
        kind = dict(head.headers).get(b"content-type", b"")
        if kind == b"text/event-stream":
            stream = Stream(link, head, checks)
            while True:
                await self._forward(stream)
                if not checks.open or session is None or stream.retry is None:
                    return
                await trio.sleep(stream.retry / 1000)  # closed early: open it again for the rest
                stream = await self.web.open(session=session, after=stream.last_event_id)
        answer = await self.web._read_answer(link, head)
        if answer.status >= 400 and "id" not in answer.json:
            await self.refused(answer, request)
        elif answer.body:
            await self._read_opening(answer.json)
            await self.give(answer.body)

    async def _forward(self, stream: Stream) -> None:
        async with stream:
            async for event in stream:
                if event.data:
                    await self._read_opening(json.loads(event.data))
                    await self.give(event.data)

    async def _read_opening(self, message: Any) -> None:
        result = message.get("result") if isinstance(message, dict) else None
        if self.revision == LATEST and isinstance(result, dict) and "protocolVersion" in result:
            self.revision = result["protocolVersion"]
            if self.session is not None:
                self.web._revisions[self.session] = self.revision
                self.nursery.start_soon(self._listen, self.session, name="a GET")

    async def _listen(self, session: str) -> None:
        """Forward the standalone stream of the session.  The gateway ends after it and after the last response."""
        with contextlib.suppress(Cut):
            await self._forward(await self.web.open(session=session, revision=self.revision))
        while self._posts:
            await self._answered.park()
        self.nursery.cancel_scope.cancel()

    async def finish(self) -> None:
        for scope in tuple(self._running.values()):
            scope.cancel()
        if self.session is not None:
            with contextlib.suppress(Cut):
                await self.web.end(self.session)


class _EventStream(_Gateway):
    """HTTP+SSE, the transport of 2024-11-05."""

    async def begin(self) -> None:
        self._stream = await self.web.open(path="/sse")
        event = await self._stream.event()
        assert event.event == "endpoint"
        self._target = event.data.decode()
        self.nursery.start_soon(self._forward, name="the event stream")

    async def _forward(self) -> None:
        with contextlib.suppress(Cut):
            async for event in self._stream:
                await self.give(event.data)
        self.nursery.cancel_scope.cancel()

    async def take(self, line: bytes) -> None:
        fields = {"Content-Type": "application/json"}
        with contextlib.suppress(Cut):
            message = _parsed(line)
            self.web.expect(message)
            answer = await self.web.send("POST", self._target, fields, line)
            if answer.status >= 400:
                await self.refused(answer, message)

    async def finish(self) -> None:
        await self._stream.aclose()


class _WebSocket(_Gateway):
    async def begin(self) -> None:
        self._sending = trio.Lock()
        self._link = await self.web.connect()
        self._socket = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        await self._link.send_all(self._socket.send(Handshake(host="localhost", target="/ws", subprotocols=["mcp"])))
        self._accepted = trio.Event()
        self.nursery.start_soon(self._forward, name="the WebSocket")
        await self._accepted.wait()

    async def _forward(self) -> None:
        text = ""
        with contextlib.suppress(*_CLOSED):
            while data := bytes(await self._link.receive_some()):
                self._socket.receive_data(data)
                for event in self._socket.events():
                    match event:
                        case AcceptConnection():
                            assert event.subprotocol == "mcp"
                            self._accepted.set()
                        case TextMessage():
                            text += event.data
                            if event.message_finished:
                                await self.give(text.encode())
                                text = ""
                        case Ping():
                            await self._send(event.response())
                        case CloseConnection() if self._socket.state is ConnectionState.REMOTE_CLOSING:
                            await self._send(event.response())
                        case RejectConnection():
                            raise AssertionError(event)
        self.nursery.cancel_scope.cancel()

    async def take(self, line: bytes) -> None:
        with contextlib.suppress(*_CLOSED):
            await self._send(TextMessage(line.decode()))

    async def finish(self) -> None:
        with contextlib.suppress(*_CLOSED):
            await self._send(CloseConnection(code=1000))
            await trio.sleep_forever()  # until the server closes its side, which ends the gateway

    async def _send(self, event: Event) -> None:
        async with self._sending:
            if self._socket.state is not ConnectionState.CLOSED:  # the server may have closed it
                await self._link.send_all(self._socket.send(event))


async def _over_http(
    make: Callable[[trio.abc.Stream, HttpClient], _Gateway],
    options: Mapping[str, Any],
    server: Any,
    stream: trio.abc.Stream,
    *,
    tap: Any = None,
) -> None:
    from trio_mcp.server.http import serve_http

    listener = MemoryListener()
    how: dict[str, Any] = {"listeners": [listener], "allowed_hosts": LOOPBACK_HOSTS, "tap": tap, **options}
    web = HttpClient(listener.connect, check=False)

    async def serving(*, task_status: Any) -> None:
        await serve_http(server, task_status=task_status, **how)
        nursery.cancel_scope.cancel()

    with unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(serving)
            await make(stream, web).run()
            await web.aclose()
            nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await stream.aclose()


async def _over_asgi(server: Any, stream: trio.abc.Stream, *, tap: Any = None) -> None:
    assert tap is None, "an ASGI application has no tap"
    # Clients without addresses, as over the memory streams of the other transports: calls are limited per address.
    async with hosted(AsgiApp(server, allowed_hosts=LOOPBACK_HOSTS), client=None) as web:
        web.check = False
        await _Streamable(stream, web).run()
    with trio.CancelScope(shield=True):
        await stream.aclose()


# Standard input and output.

_standard = threading.Lock()  # this process has one pair of fds, for one client


async def _over_stdio(server: Any, stream: trio.abc.Stream, *, tap: Any = None) -> None:
    """`serve_stdio`, with two pipes as fds 0 and 1 of this process.

    A process has one pair of these fds.  A second client of the same test has a memory stream.
    """
    if not _standard.acquire(blocking=False):
        await serve_stream(server, stream, tap=tap)
        return
    try:
        stdin, there = os.pipe()
        back, stdout = os.pipe()
        with unwrapped(), closing(FdStream(there)) as to_server, closing(FdStream(back)) as from_server:
            async with trio.open_nursery() as nursery:
                with _as_standard_streams(stdin, stdout):
                    nursery.start_soon(_write_lines, stream, to_server, name="to standard input")
                    nursery.start_soon(_copy, from_server, stream, name="from standard output")
                    await serve_stdio(server, tap=tap)
    finally:
        _standard.release()


@contextlib.contextmanager
def _as_standard_streams(*ends: int) -> Iterator[None]:
    """Use two fds as fds 0 and 1 of this process during the block, then close them."""
    kept = [os.dup(fd) for fd in (0, 1)]
    for fd, end in enumerate(ends):
        os.dup2(end, fd)
        os.close(end)
    try:
        yield
    finally:
        for fd, copy in enumerate(kept):
            os.dup2(copy, fd)
            os.close(copy)


async def _write_lines(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream) -> None:
    """Forward the lines, and then the end of the stream."""
    async with sink:
        with contextlib.suppress(*_CLOSED):
            async for line in _lines(source):
                await sink.send_all(line + b"\n")


async def _copy(source: trio.abc.ReceiveStream, sink: trio.abc.Stream) -> None:
    """Forward the bytes, and then the end of the stream."""
    async with sink:
        with contextlib.suppress(*_CLOSED):
            async for data in source:
                await sink.send_all(data)


TRANSPORTS: Mapping[str, Callable[..., Awaitable[None]]] = MappingProxyType(
    {
        "stdio": _over_stdio,
        "memory": serve_stream,
        "http json": functools.partial(_over_http, _Streamable, {}),
        "http stream": functools.partial(_over_http, functools.partial(_Streamable, accept="text/event-stream"), {}),
        "http+sse": functools.partial(_over_http, _EventStream, {"sse_path": "/sse", "message_path": "/messages"}),
        "websocket": functools.partial(_over_http, _WebSocket, {"websocket_path": "/ws"}),
        "asgi": _over_asgi,
    }
)
"""Functions with the arguments of `serve_stream`, by the names of the transports."""
