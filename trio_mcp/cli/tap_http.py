"""``trio-mcp tap --http PORT URL``: an HTTP server on loopback that passes each request to another server.

A request for the path of the URL goes to the URL; other paths go to the same path of its server, because HTTP+SSE and
the metadata of OAuth have paths of their own.  Bodies pass unchanged.  A reply is passed on as it comes, so an event
stream stays a stream, and a client that disconnects ends the request at the server.

Recorded are the bodies at the path of the URL, and at a path that an `endpoint` event names.  Other bodies may be those
of an authorization server.  Of the headers only those in `_RECORDED` are written, of a session id the beginning, and of
a target the path: a query may have a key.

A web page in the user's browser may reach a server on loopback under a name of its own (DNS rebinding), so the Host
header must name loopback.  The Origin header goes to the server, which decides about it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import trio

from trio_mcp.cli.output import Output
from trio_mcp.cli.recording import Recorder, open_recorder, summary_of
from trio_mcp.cli.target import run_command
from trio_mcp.core.errors import ConnectionFailed, UsageError
from trio_mcp.core.http.client_rules import url_without_secrets
from trio_mcp.core.http.fields import LOOPBACK_HOSTS, AllowList, Headers, HttpRequest, Reply, media_type
from trio_mcp.core.http.h1 import head_bytes
from trio_mcp.core.http.sse import EventReader, Oversized
from trio_mcp.core.messages import Limits
from trio_mcp.core.shares import Account, ByteBudget
from trio_mcp.server.http.connection import HttpConnection, ListenerState
from trio_mcp.server.http.responses import HttpResponse
from trio_mcp.server.http.sockets import Listener, socket_name, tcp_listeners
from trio_mcp.server.process import parse_address
from trio_mcp.transport.dial import is_this_machine
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import GONE

if TYPE_CHECKING:
    from trio_mcp.server.http.endpoint import Endpoint

__all__ = ["HttpTap", "serve_tap"]

_RECORDED = (
    *("accept", "allow", "content-type", "last-event-id", "location", "mcp-method", "mcp-name", "mcp-protocol-version"),
    *("mcp-session-id", "origin", "retry-after", "user-agent", "www-authenticate"),
)
# Fields of one connection, which each side of the tap has for itself (RFC 9110, 7.6.1).
_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect", "accept-encoding", "date"),
    }
)
_MESSAGE = 64 * 2**20  # bytes of one body or event: more than any server accepts by default
_SESSION_ID = 8  # characters of a session id that are recorded


def serve_tap(path: str, most: int, url: str, address: str, *, as_json: bool) -> int:
    """Serve until Ctrl-C, and return the exit status of the process."""
    shown, scheme = url_without_secrets(url), urlsplit(url).scheme
    if scheme not in ("http", "https", "ws", "wss"):
        raise UsageError(f"the server must be an http, https, ws or wss URL, got {shown!r}")
    host, port = parse_address(address)
    if not is_this_machine(host):
        raise UsageError(f"tap serves programs of this machine only: give a port, got {address!r}")
    # Before the event loop, because the recorder starts a process.
    recorder = open_recorder(path, {"kind": "http", "server": shown}, most)

    async def work() -> int:
        listeners = await tcp_listeners(host, port)
        bound = socket_name(listeners[0])[1]
        here = f"{scheme.removesuffix('s')}://{address.rpartition(':')[0]}:{bound}{urlsplit(url).path or '/'}"
        if as_json:
            Output(as_json).json({"url": here, "server": shown, "file": path})
            sys.stdout.flush()
        else:
            sys.stderr.write(f"trio-mcp: {here} passes to {shown}; recording in {path}; Ctrl-C ends\n")
            sys.stderr.flush()
        await HttpTap(url, recorder).serve_listeners(listeners)
        return 0

    try:
        return run_command(work, verbose=False)
    finally:
        recorder.close()
        if as_json:
            sys.stdout.write(f"{summary_of(path)}\n")


class HttpTap:
    """The endpoint of the HTTP server: a connection asks it to `admit` a head, and then to `serve` the request.

    With a WebSocket URL, a request at its path that asks for a WebSocket gets one with the server.
    """

    def __init__(self, url: str, recorder: Recorder) -> None:
        parts = urlsplit(url)
        self._url = url
        self._websocket_path = parts.path.rstrip("/") if parts.scheme in ("ws", "wss") else None
        self._origin = f"{parts.scheme.replace('ws', 'http')}://{parts.netloc}"
        self._path = parts.path or "/"
        self._query = f"?{parts.query}" if parts.query else ""
        self._paths = {self._path}  # requests for these are recorded with their bodies
        self._recorder = recorder
        self._limits = Limits(message_bytes=_MESSAGE)
        self._bytes = ByteBudget(self._limits)
        self._numbers = itertools.count(1)
        self._hosts = AllowList("hosts", LOOPBACK_HOSTS, schemes=False)

    async def serve_listeners(self, listeners: list[Listener]) -> None:
        """Accept connections until cancelled."""
        # A connection needs of an endpoint the three methods that this class has.
        shared = _TapListener(
            cast("Endpoint", self), self._limits, websocket_path=self._websocket_path, upgraded=self._upgraded
        )
        async with HttpPool(limits=self._limits) as self._pool, open_nursery() as self._nursery:
            self._nursery.start_soon(shared.run)

            async def serve_connection(stream: trio.SocketStream) -> None:
                await HttpConnection(shared, stream).serve()

            await trio.serve_listeners(serve_connection, listeners)

    def account(self, holder: str | None) -> Account:
        return self._bytes.account(holder)

    async def admit(self, head: HttpRequest, peer: str | None) -> Any:
        if not self._hosts.allows(head.headers.get("Host", "")):
            why = b"the Host header must name this machine, such as 127.0.0.1\n"
            return Reply(403, (("Content-Type", "text/plain"),), why)
        return SimpleNamespace(head=SimpleNamespace(cors=()), holder=None)

    async def serve(self, admitted: object, request: HttpRequest, response: HttpResponse) -> Callable[[], None]:
        number, scope = next(self._numbers), trio.CancelScope()
        path, _, query = request.target.partition("?")
        recorded = path in self._paths
        about = {"number": number, "method": request.method, "path": path, "headers": _recorded(request.headers)}
        self._recorder.entry("client", (request.body or None) if recorded else None, http=about)
        query = f"?{query}" if query else self._query if path == self._path else ""
        url = f"{self._origin}{path}{query}"
        self._nursery.start_soon(self._exchange, request, url, number, recorded, response, scope)

        def disconnected() -> None:
            self._recorder.entry("client", http={"number": number}, end="the client has disconnected")
            scope.cancel()

        return disconnected

    async def _upgraded(self, stream: trio.abc.Stream, request: HttpRequest, trailing: bytes, peer: str | None) -> None:
        from trio_mcp.cli.tap_websocket import WebSocketRecorder, pass_websocket

        admitted = await self.admit(request, peer)
        if isinstance(admitted, Reply):
            with suppress(*GONE):
                await stream.send_all(head_bytes(admitted.status, admitted.headers, None, "Connection: close"))
            await trio.aclose_forcefully(stream)
            return
        heard = WebSocketRecorder(self._recorder, next(self._numbers), self._limits, _recorded)
        await pass_websocket(stream, request, trailing, self._url, heard, self._limits)

    async def _exchange(
        self, request: HttpRequest, url: str, number: int, recorded: bool, response: HttpResponse,
        scope: trio.CancelScope,
    ) -> None:  # fmt: skip
        """Send the request to the server, and its reply to the client."""
        fields = tuple((name, value) for name, value in request.headers.items() if name.lower() not in _HOP)
        with scope, suppress(*GONE):
            try:
                async with self._pool.request(request.method, url, fields, request.body) as reply:
                    await self._pass_reply(reply, number, recorded, response)
            except (ConnectionFailed, ReplyBroken, UsageError) as error:
                self._recorder.entry("server", http={"number": number, "failed": True}, end=str(error))
                if getattr(response, "begun", False):
                    response.drop()
                else:
                    text = f"trio-mcp tap: {error}\n".encode()
                    await response.begin(502, (("Content-Type", "text/plain"),), text, more=False)

    async def _pass_reply(self, reply: HttpReply, number: int, recorded: bool, response: HttpResponse) -> None:
        fields = tuple((name, value) for name, value in reply.headers.items() if name.lower() not in _HOP)
        about = {"number": number, "status": reply.status, "headers": _recorded(reply.headers)}
        kind, _ = media_type(reply.headers.get("Content-Type", ""))
        status = reply.status if reply.status in HTTPStatus._value2member_map_ else 502
        if kind != "text/event-stream":
            body = await reply.read(_MESSAGE)
            self._recorder.entry("server", (body or None) if recorded else None, http=about)
            await response.begin(status, fields, body, more=False)
            return
        self._recorder.entry("server", http=about)
        await response.begin(status, fields, b"", more=True)
        events = EventReader(_MESSAGE)
        while data := await reply.receive():
            for event in events.feed(data):
                if isinstance(event, Oversized):
                    self._recorder.entry("server", http={"number": number}, cut=event.limit)
                    continue
                told = {"number": number, "event": event.event, "id": event.id}
                if event.event == "endpoint":
                    self._paths.add(urlsplit(event.data.decode(errors="replace")).path)
                    told["path"] = urlsplit(event.data.decode(errors="replace")).path  # a query may name the session
                    self._recorder.entry("server", http=told)
                elif event.data:
                    self._recorder.entry("server", event.data, http=told)
            await response.send(data, more=True)
        self._recorder.entry("server", http={"number": number}, end="the stream has ended")
        await response.send(b"", more=False)


class _TapListener(ListenerState):
    """The state of the connections of one tap."""

    def failed(self, error: Exception) -> None:
        sys.stderr.write(f"trio-mcp: a connection has failed: {error!r}\n")


def _recorded(headers: Headers) -> dict[str, str]:
    found = {name: headers[name] for name in _RECORDED if name in headers}
    if "mcp-session-id" in found:
        found["mcp-session-id"] = found["mcp-session-id"][:_SESSION_ID] + "…"
    return found
