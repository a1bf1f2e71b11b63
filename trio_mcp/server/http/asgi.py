"""A server as an ASGI application: the same service as `serve_http`, on the connections of an ASGI server.

    app = AsgiApp(server, allowed_hosts=["mcp.example.com"])

    hypercorn --worker-class trio weather:app

The ASGI server must run on Trio, as Hypercorn does with its Trio worker.  It owns the sockets, TLS, HTTP/2, the time
limit for a request head, and the frames and pings of a WebSocket.  This module and `Endpoint` own the meaning of
requests and all other limits, as with `serve_http`.

Three points surprise:

- The run of the server lasts as long as the lifespan of the application.  An application that is mounted in another one
  gets no lifespan, because frameworks do not pass it on.  So the outer application enters ``async with app.running()``
  in its own lifespan.  Otherwise the run begins with the first request, in a system task of Trio, and ends with the
  event loop.
- ASGI servers and frameworks disagree whether `path` begins with `root_path`.  If `path` without the prefix is a served
  path, it is read so.
- The task of a request does not write its response.  The task that has a part of the response writes it, mostly a
  handler.  The task of the request waits until the response has ended or the client has disconnected.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Awaitable, Callable, Container, Iterable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack
from urllib.parse import quote

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, UsageError, check_seconds, shown
from trio_mcp.core.http.fields import Fields, HttpRequest, Reply, refusal
from trio_mcp.core.http.server_rules import websocket_hint
from trio_mcp.core.messages import Error, InvalidMessage, Limits, Message, decode
from trio_mcp.core.shares import Account, Charge, Pace, weight
from trio_mcp.server.http.endpoint import (
    AdmittedRequest,
    Endpoint,
    log_refusal,
    open_endpoint,
    over_limit,
    send_reply,
)
from trio_mcp.server.http.options import HttpOptions
from trio_mcp.server.run import Run
from trio_mcp.transport.nursery import block, check_trio, open_nursery, sole
from trio_mcp.transport.wire import CLOSING, Lines

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["AsgiApp"]

_log = logging.getLogger("trio_mcp")
_PIECE = 64 * 1024  # bytes of a body per event; small, because an ASGI server does not report progress within an event
_SUBPROTOCOL = "mcp"  # as in `core.http.websocket`, which is not imported because the ASGI server reads the frames
_GOING_AWAY, _UNSUPPORTED, _TOO_BIG = 1001, 1003, 1009  # RFC 6455, 7.4.1

Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]


class AsgiApp:
    """An ASGI 3 application that serves `server`.

    `options` are the request options of `serve_http`; see `HttpOptions`.  When the application shuts down, running
    calls have `shutdown_timeout` seconds to finish, except if the ASGI server has closed all connections before.
    Invalid options make the startup of the application fail.
    """

    def __init__(self, server: Server, *, shutdown_timeout: float = 5.0, **options: Unpack[HttpOptions]) -> None:
        check_seconds("shutdown_timeout", shutdown_timeout)
        self._server = server
        self._shutdown_timeout = shutdown_timeout
        self._options = options
        self._started = False  # a lifespan or `running` owns the run, so that requests do not start one
        self._claimed = False  # a run is active or starts
        self._endpoint: Endpoint | None = None  # while the application runs
        self._open_requests = 0  # requests and WebSockets
        self._starting: trio.Event | None = None  # set when the run that the first request starts has begun or failed

    def running(self) -> AbstractAsyncContextManager[None]:
        """Serve for the duration of the block.  Use it in the lifespan of an application that this one is mounted in.

        At the end of the block running calls have `shutdown_timeout` seconds to finish; later requests are refused
        with 503.  Exceptions of the block propagate unchanged.  Raises `UsageError` if the application runs already or
        the program does not run on Trio.
        """
        return self._running(closed=False)

    def _running(self, *, closed: bool) -> AbstractAsyncContextManager[None]:
        self._started = True
        return _running_app(self, closed)

    def _leave(self) -> None:
        self._endpoint, self._claimed = None, False

    async def _drain(self, ending: Endpoint | Run, closed: bool) -> None:
        # ASGI: the lifespan ends when the server "has stopped accepting connections and closed all active" ones.  The
        # ASGI server has given them its own timeout.  Legacy calls continue without a connection, but no client can
        # reconnect for their answers, so they get no time.  (With tasks `closed` is False: their results are kept.)
        with trio.move_on_after(0 if closed and not self._open_requests else self._shutdown_timeout):
            await ending.drain()
            return
        ending.abort_pending()
        with trio.move_on_after(CLOSING):
            await ending.drain()

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        try:
            check_trio()
        except UsageError as error:
            if kind != "lifespan":
                raise
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        if kind == "lifespan":
            await self._lifespan(receive, send)
            return
        serve = {"http": self._http, "websocket": self._websocket}.get(kind)
        if serve is None:
            raise UsageError(f"the ASGI scope type must be 'http', 'websocket' or 'lifespan', got {kind!r}")
        self._open_requests += 1
        try:
            await serve(scope, receive, send)
        finally:
            self._open_requests -= 1

    # The run.

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        begun = False
        try:
            async with self._running(closed=True):
                begun = True
                await send({"type": "lifespan.startup.complete"})
                await receive()  # lifespan.shutdown
        except Exception as error:
            if begun:
                raise
            _log.error("the server could not start", exc_info=error)
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    async def _running_endpoint(self) -> Endpoint | None:
        """The endpoint of the running application, started by the first request if needed; None if it does not run."""
        if self._endpoint is None and not self._started:
            started = self._starting
            if started is None:
                started = self._starting = trio.Event()
                trio.lowlevel.spawn_system_task(self._run_until_exit, started, name="run of an ASGI application")
            await started.wait()
        return self._endpoint

    async def _run_until_exit(self, started: trio.Event) -> None:
        """Run until the event loop ends.  If the run fails, the next request starts another one."""
        try:
            async with _running_app(self, False):
                started.set()
                await trio.sleep_forever()
        except BaseException as error:  # noqa: BLE001  # an exception that leaves a system task ends the event loop
            _report(error)
        finally:
            self._starting = None
            started.set()

    # Requests.

    async def _http(self, scope: Event, receive: Receive, send: Send) -> None:
        endpoint = await self._running_endpoint()
        if endpoint is None:
            await _reply(_AsgiResponse(send, Limits()), _NOT_RUNNING)
            return
        response = _AsgiResponse(send, endpoint.limits)
        cors: Fields = ()
        try:
            request, admitted = await _admit(endpoint, scope)
            if isinstance(admitted, Reply):
                await _reply(response, admitted)
                return
            cors = admitted.head.cors
            body = await _body(receive, endpoint.limits, cors, endpoint.account(admitted.holder))
            if isinstance(body, Reply):
                log_refusal(body, request, admitted.peer)
                await _reply(response, body)
            elif body is not None:
                request = attrs.evolve(request, body=body)
                await response.run(receive, endpoint.serve(admitted, request, response))
        except Exception:  # noqa: BLE001  # for example from an author's event log
            _log.exception("a request failed in the server itself, and not in a handler")
            if not response.begun:
                failed = refusal(500, Error(None, INTERNAL_ERROR, "internal error"), cors)
                await _reply(_AsgiResponse(send, endpoint.limits), failed)

    async def _websocket(self, scope: Event, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        endpoint = await self._running_endpoint()
        if endpoint is None:
            await _refuse_websocket(scope, send, _NOT_RUNNING)
            return
        request, verdict = await _admit(endpoint, scope)
        if isinstance(verdict, AdmittedRequest) and (fault := _websocket_refusal(scope, verdict, endpoint)) is not None:
            log_refusal(fault, request, verdict.peer)
            verdict = fault
        if isinstance(verdict, Reply):
            await _refuse_websocket(scope, send, verdict)
            return
        stream, frames = _WebSocket(receive, send, endpoint.limits), _Messages(endpoint.limits)
        with suppress(trio.BrokenResourceError):
            await stream.accept(scope)
            await endpoint.serve_websocket(verdict, stream, frames)


async def _admit(endpoint: Endpoint, scope: Event) -> tuple[HttpRequest, Reply | AdmittedRequest]:
    root = scope.get("root_path", "").rstrip("/")
    request = HttpRequest(
        scope.get("method", "GET"), _target(scope, root, endpoint.paths), scope["headers"], prefix=quote(root)
    )
    if scope["type"] == "websocket" and "Upgrade" not in request.headers:  # HTTP/2 has no Upgrade
        request = attrs.evolve(request, headers=[*scope["headers"], (b"upgrade", b"websocket")])
    client = scope.get("client")
    return request, await endpoint.admit(request, None if client is None else client[0])


@block
async def _running_app(stack: AsyncExitStack, app: AsgiApp, closed: bool) -> None:
    """Run an application for the duration of the block.  `closed`: no request comes after the block."""
    check_trio()
    if app._claimed:
        raise UsageError("this ASGI application is running already")
    app._claimed = True
    stack.callback(app._leave)
    run = await stack.enter_async_context(app._server._joined())
    shared, run.held = run.held, True  # by the ASGI server, or the program
    await run.share()
    nursery = await stack.enter_async_context(open_nursery())
    endpoint = open_endpoint(run, app._options)
    nursery.start_soon(endpoint.run, name="endpoint of an ASGI application")
    # A shared run continues without this application.
    ending = endpoint if shared else run

    async def drain(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            await app._drain(ending, closed and not run.detached)

    stack.push_async_exit(drain)
    app._endpoint = endpoint


def _report(error: BaseException) -> None:
    """Log the failures of a run in a system task, and pass Ctrl-C on to the program."""
    interrupt, rest = BaseExceptionGroup("", [error]).split(KeyboardInterrupt)
    failures = None if rest is None else rest.split((trio.Cancelled, GeneratorExit))[1]
    if failures is not None:
        _log.error("the server has failed, or could not start", exc_info=sole(failures))
    if interrupt is not None:
        signal.raise_signal(signal.SIGINT)


_NOT_RUNNING_TEXT = "the server is shutting down, or could not start; see its log"
_NOT_RUNNING = refusal(503, Error(None, INTERNAL_ERROR, _NOT_RUNNING_TEXT))


# Reading requests.


def _target(scope: Event, root: str, paths: Container[str]) -> str:
    """The path below the root, with the query, as in a request line."""
    path: str = scope["path"]
    below = path.removeprefix(root)
    # Newer servers include the prefix in `path`; older ones do not, and some proxies remove it.
    if below.rstrip("/") in paths:
        path = below or "/"
    query = scope.get("query_string", b"").decode("latin-1")
    return quote(path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")


async def _body(receive: Receive, limits: Limits, cors: Fields, account: Account) -> bytes | Reply | None:
    """Read the body.  Returns None if the client disconnects, and the refusal if it is too slow or over a limit.  Of a
    body that exceeds `message_bytes` it returns the first bytes, which the endpoint refuses."""
    body = bytearray()  # not a list: a piece of two bytes would take 43 bytes there
    pace = Pace(limits.body_seconds, limits.body_rate)
    pace.begin(trio.current_time())
    with Charge(account) as charge:
        while len(body) <= limits.message_bytes:
            with trio.move_on_at(pace.deadline) as scope:
                event = await receive()
            if scope.cancelled_caught:
                why = f"the body took too long, got {len(body)} bytes (Limits.body_seconds, Limits.body_rate)"
                return refusal(408, Error(None, INVALID_REQUEST, why), cors)
            if event["type"] == "http.disconnect":
                return None
            piece: bytes = event.get("body", b"")
            if not event.get("more_body", False):
                return bytes(body) + piece if body else piece
            body += piece
            pace.move(len(piece), trio.current_time())
            if (limit := charge.set(len(body))) is not None:
                return over_limit(limit, cors)
    return bytes(body)


# Writing responses.


class _AsgiSender:
    """Sends events to the ASGI server.

    Raises `BrokenResourceError` if the client has disconnected or reads too slowly.
    """

    def __init__(self, send: Send, limits: Limits) -> None:
        self._send = send
        self._pace = Pace(limits.write_seconds, limits.write_rate)  # how fast the client reads
        self._scope = trio.CancelScope()  # of the current event
        self._deadline = math.inf  # for all events, once the request is cancelled
        self.shielded = False  # a cancellation does not interrupt an event; `hurry` runs and limits it instead
        self.closed = False

    async def put(self, event: Event, size: int = 0) -> None:
        """Send an event with `size` bytes of content."""
        if self.closed:
            raise trio.BrokenResourceError("the client has disconnected")
        self._pace.begin(trio.current_time())
        try:
            until = min(self._pace.deadline, self._deadline)
            with trio.CancelScope(deadline=until, shield=self.shielded) as self._scope:
                await self._send(event)
            self._pace.move(size, trio.current_time())
            self._pace.end(trio.current_time())
        except OSError as error:  # since ASGI 2.4; older servers raise no error here
            raise trio.BrokenResourceError("the client has disconnected") from error
        if self._scope.cancelled_caught:
            raise trio.BrokenResourceError("the client reads too slowly (Limits.write_seconds, Limits.write_rate)")

    async def hurry(self) -> None:
        """Wait for cancellation, and then limit the current and later events to `CLOSING` seconds.

        The sending task cannot notice the cancellation itself, because it is shielded.
        """
        try:
            await trio.sleep_forever()
        finally:
            self._deadline = trio.current_time() + CLOSING
            self._scope.deadline = min(self._scope.deadline, self._deadline)

    def close(self) -> None:
        self.closed = True
        self._scope.cancel(reason="the client has disconnected")


def _head(fields: Fields) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]


class _AsgiResponse:
    """One response: an `HttpResponse` (see `responses`)."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self._outgoing = _AsgiSender(send, limits)
        self.begun = False
        self._ending = False  # the last event is being sent, or has been sent
        self._over = trio.Event()  # no further event will be sent

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        self.begun = True
        head = _head(fields)
        if not more and status != 204 and not any(name == b"content-length" for name, _ in head):
            head.append((b"content-length", b"%d" % len(body)))
        await self._put({"type": "http.response.start", "status": status, "headers": head})
        await self.send(body, more=more)

    async def send(self, data: bytes, *, more: bool) -> None:
        for start in range(0, len(data) or 1, _PIECE):
            last = not more and start + _PIECE >= len(data)
            self._ending = last
            piece = data[start : start + _PIECE]
            await self._put({"type": "http.response.body", "body": piece, "more_body": not last}, len(piece))
        if not more:
            self._over.set()

    async def _put(self, event: Event, size: int = 0) -> None:
        try:
            await self._outgoing.put(event, size)
        except BaseException:
            self.drop()
            raise

    def send_now(self, data: bytes) -> bool:
        return False

    def drop(self) -> None:
        # ASGI has no other way to abort: the application returns before the response is complete, and the server
        # closes the connection.
        self._outgoing.close()
        self._over.set()

    async def run(self, receive: Receive, serving: Awaitable[Callable[[], None]]) -> None:
        """Await `serving`, then wait until the response has ended or the client has disconnected."""
        on_disconnect = None
        with suppress(trio.BrokenResourceError):
            async with open_nursery() as nursery:
                nursery.start_soon(self._outgoing.hurry, name="end of an ASGI request")
                self._outgoing.shielded = True
                try:
                    on_disconnect = await serving
                    if not self._over.is_set():
                        nursery.start_soon(self._wait_for_disconnect, receive)
                        await self._over.wait()
                finally:
                    # Also if the ASGI server has cancelled this task.
                    if not self._ending:
                        self.drop()
                        if on_disconnect is not None:
                            on_disconnect()

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # Some servers send this event at the end of every response, possibly while its last event is being sent.
        if not self._ending:
            self.drop()


async def _reply(response: _AsgiResponse, reply: Reply) -> None:
    with suppress(trio.BrokenResourceError):
        await send_reply(response, reply)


# WebSockets.


def _websocket_refusal(scope: Event, admitted: AdmittedRequest, endpoint: Endpoint) -> Reply | None:
    """The refusal of an admitted WebSocket request, for its path or subprotocol; None if it is accepted."""
    why = None
    offered = scope.get("subprotocols") or ()
    if not admitted.head.websocket:
        why = websocket_hint(endpoint.policy, admitted.request.prefix)
    elif offered and _SUBPROTOCOL not in offered:
        why = f"the subprotocols {shown(', '.join(offered))} are not supported; offer {_SUBPROTOCOL}, or none"
    return None if why is None else refusal(400, Error(None, INVALID_REQUEST, why))


async def _refuse_websocket(scope: Event, send: Send, reply: Reply) -> None:
    events: list[Event] = [{"type": "websocket.close"}]  # the ASGI server answers 403, for any reason
    if "websocket.http.response" in (scope.get("extensions") or ()):
        head = _head(reply.headers)
        events = [
            {"type": "websocket.http.response.start", "status": reply.status, "headers": head},
            {"type": "websocket.http.response.body", "body": reply.body},
        ]
    with suppress(OSError):  # the client has disconnected
        for event in events:
            await send(event)


class _WebSocket(trio.abc.Stream):
    """A WebSocket as a stream; the ASGI server reads and writes the frames.  `receive_some` returns one message."""

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive = receive
        self._outgoing = _AsgiSender(send, limits)
        self._limit = limits.message_bytes
        self._close = (_GOING_AWAY, "")
        self._partial = bytearray()  # the begin of a message that is written in several pieces

    async def accept(self, scope: Event) -> None:
        offered = scope.get("subprotocols") or ()
        await self._outgoing.put(
            {"type": "websocket.accept", "subprotocol": _SUBPROTOCOL if offered else None, "headers": []}
        )

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        event = await self._receive()
        if event["type"] != "websocket.receive":
            self._outgoing.close()
            return b""
        text: str | None = event.get("text")
        if text is None:
            self._close = (_UNSUPPORTED, "messages must be text, got a binary message")
            return b""
        message = text.encode()
        if len(message) > self._limit:
            self._close = (_TOO_BIG, f"the message is longer than {self._limit} bytes (Limits.message_bytes)")
            return b""
        return message or b" "  # b"" would mean the end of the stream; " " is refused as invalid JSON

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._partial += data
        if b"\n" not in bytes(data):
            return
        *messages, self._partial = self._partial.split(b"\n")
        for message in messages:
            await self._outgoing.put({"type": "websocket.send", "text": message.decode()}, len(message))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        code, reason = self._close
        if not self._outgoing.closed:
            await self._outgoing.put({"type": "websocket.close", "code": code, "reason": reason})
            self._outgoing.close()


class _Messages(Lines):
    """The framing of `_WebSocket`: each input is one message, and each outgoing message is one line.

    The ASGI server delivers complete messages, and sends pings and close frames itself.
    """

    def feed(self, data: bytes) -> Iterable[Message]:
        message = decode(data, self._limits)
        self.size = 0 if type(message) is InvalidMessage else weight(data, self._limits.values, message)
        return (message,)
