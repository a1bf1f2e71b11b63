"""Every transport there is, behind the byte stream of `tests.server.wire`.

A test that was written for `connected(server, revision)` runs over any transport, unchanged: with the fixture

    @pytest.fixture(autouse=True, params=TRANSPORTS)
    def transport(request, monkeypatch): monkeypatch.setattr("trio_mcp.driver.serve_stream", TRANSPORTS[request.param])

what serves the server's end of its stream is a gateway.  It takes the client's lines, sends them as that transport
wants them, and gives back as lines what comes, on whichever stream; what is wrong with the HTTP itself, `client.Web`
finds.  The ends mean the same too: when the client ends its lines, a session is ended by DELETE, a modern request by
closing its response; when the server ends, so do the lines.

The gateway sends one message after the other, and gives the server a few turns in between, so that they are heard in
the order in which the test has sent them, as they would be on a byte stream.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import trio
import wsproto
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, CloseConnection, Ping, RejectConnection, TextMessage
from wsproto.events import Request as Handshake

from tests.http.client import Answer, Cut, Link, Stream, Web, _items, _key
from tests.http.served import MemoryListener
from tests.server.checkpoints import unwrapped
from tests.server.wire import LATEST
from trio_mcp.core.revisions import META_VERSION
from trio_mcp.core.verdicts import LOOPBACK_HOSTS

__all__ = ["TRANSPORTS"]

_TURNS = 40  # more than it takes from the bytes of a request to its being heard
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


def _parsed(line: bytes) -> Any:
    """None if that is not possible: a test may send anything."""
    try:
        return json.loads(line)
    except ValueError:
        return None


class _Gateway:
    """One client's lines on one side, a transport on the other."""

    def __init__(self, stream: trio.abc.Stream, web: Web) -> None:
        self.stream = stream
        self.web = web
        self.nursery: trio.Nursery
        self._writing = trio.Lock()

    async def run(self) -> None:
        """Until the client has ended its lines, or the server everything."""
        async with trio.open_nursery() as self.nursery:
            await self.begin()
            rest = b""
            with contextlib.suppress(*_GONE):
                while data := bytes(await self.stream.receive_some()):
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        await self.take(line)
                        for _ in range(_TURNS):
                            await trio.lowlevel.checkpoint()
            await self.finish()
            self.nursery.cancel_scope.cancel()

    async def begin(self) -> None: ...

    async def take(self, line: bytes) -> None:
        raise NotImplementedError

    async def finish(self) -> None: ...

    async def refused(self, answer: Answer, message: Any) -> None:
        """HTTP refuses what a byte stream answers with a null id, and even responses, about which that says nothing."""
        if not isinstance(message, dict) or "method" in message:
            await self.give({**answer.json, "id": None})

    async def give(self, message: Any) -> None:
        text = message if isinstance(message, bytes) else json.dumps(message, ensure_ascii=False).encode()
        with contextlib.suppress(*_GONE):
            async with self._writing:
                await self.stream.send_all(text + b"\n")


class _Streamable(_Gateway):
    """Streamable HTTP, of whichever era the messages are."""

    def __init__(self, stream: trio.abc.Stream, web: Web, accept: str | None = None) -> None:
        super().__init__(stream, web)
        self.session: str | None = None
        self.revision = LATEST
        self._headers = {} if accept is None else {"Accept": accept}
        self._running: dict[str, trio.CancelScope] = {}

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
        """Which era it is that speaks."""
        params = message.get("params") if isinstance(message, dict) else None
        meta = params.get("_meta") if isinstance(params, dict) else None
        if isinstance(meta, dict) and isinstance(meta.get(META_VERSION), str):
            return True
        opening = isinstance(message, dict) and message.get("method") == "initialize"
        return self.session is None and self.revision == LATEST and not opening

    async def _post(self, message: Any, line: bytes, modern: bool) -> None:
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
                pass  # the server has gone; what that means is for the test to say
            finally:
                if scope.cancel_called and link is not None:
                    with trio.CancelScope(shield=True):
                        await link.aclose()
        for id in ids:
            self._running.pop(id, None)

    def _opened(self, headers: Mapping[bytes, bytes]) -> None:
        raw = headers.get(b"mcp-session-id")
        self.session = None if raw is None else raw.decode()

    async def _answer(self, link: Link, head: Any, checks: Any, session: str | None, asked: Any) -> None:
        kind = dict(head.headers).get(b"content-type", b"")
        if kind == b"text/event-stream":
            stream = Stream(link, head, checks)
            while True:
                await self._forward(stream)
                if not checks.open or session is None or stream.retry is None:
                    return
                await trio.sleep(stream.retry / 1000)  # closed early: come back for the rest
                stream = await self.web.open(session=session, after=stream.last_event_id)
        answer = await self.web._whole(link, head)
        if answer.status >= 400 and "id" not in answer.json:
            await self.refused(answer, asked)
        elif answer.body:
            await self._hear_opening(answer.json)
            await self.give(answer.body)

    async def _forward(self, stream: Stream) -> None:
        async with stream:
            async for event in stream:
                if event.data:
                    await self._hear_opening(json.loads(event.data))
                    await self.give(event.data)

    async def _hear_opening(self, message: Any) -> None:
        result = message.get("result") if isinstance(message, dict) else None
        if self.revision == LATEST and isinstance(result, dict) and "protocolVersion" in result:
            self.revision = result["protocolVersion"]
            if self.session is not None:
                self.web._revisions[self.session] = self.revision
                self.nursery.start_soon(self._listen, self.session, name="a GET")

    async def _listen(self, session: str) -> None:
        """The session's own stream, for as long as it lives; with it ends everything."""
        with contextlib.suppress(Cut):
            await self._forward(await self.web.open(session=session, revision=self.revision))
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
        self._link = await self.web.connect()
        self._socket = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        await self._link.send_all(self._socket.send(Handshake(host="localhost", target="/ws", subprotocols=["mcp"])))
        self._accepted = trio.Event()
        self.nursery.start_soon(self._forward, name="the WebSocket")
        await self._accepted.wait()

    async def _forward(self) -> None:
        text = ""
        with contextlib.suppress(*_GONE):
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
                            await self._link.send_all(self._socket.send(event.response()))
                        case CloseConnection() if self._socket.state is ConnectionState.REMOTE_CLOSING:
                            await self._link.send_all(self._socket.send(event.response()))
                        case RejectConnection():
                            raise AssertionError(event)
        self.nursery.cancel_scope.cancel()

    async def take(self, line: bytes) -> None:
        with contextlib.suppress(*_GONE):
            await self._link.send_all(self._socket.send(TextMessage(line.decode())))

    async def finish(self) -> None:
        with contextlib.suppress(*_GONE):
            await self._link.send_all(self._socket.send(CloseConnection(code=1000)))
            await trio.sleep_forever()  # until the server has closed its side, which ends everything


async def _serve(
    make: Callable[[trio.abc.Stream, Web], _Gateway],
    options: Mapping[str, Any],
    server: Any,
    stream: trio.abc.Stream,
    *,
    tap: Any = None,
) -> None:
    from trio_mcp.http_server import serve_http

    listener = MemoryListener()
    how: dict[str, Any] = {"listeners": [listener], "allowed_hosts": LOOPBACK_HOSTS, "tap": tap, **options}
    web = Web(listener.connect, check=False)

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


_ONLY_STREAMS = functools.partial(_Streamable, accept="text/event-stream")

TRANSPORTS: Mapping[str, Callable[..., Awaitable[None]]] = MappingProxyType(
    {
        "http": functools.partial(_serve, _Streamable, {}),
        "http, streams only": functools.partial(_serve, _ONLY_STREAMS, {}),
        "http+sse": functools.partial(_serve, _EventStream, {"sse_path": "/sse", "message_path": "/messages"}),
        "websocket": functools.partial(_serve, _WebSocket, {"websocket_path": "/ws"}),
    }
)
"""What serves a server's end of a byte stream of lines, by the name of the transport that is in between."""
