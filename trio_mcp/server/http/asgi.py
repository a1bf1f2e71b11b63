"""A server as an ASGI application: what `serve_http` does, on connections that an ASGI server has.

    app = AsgiApp(server, allowed_hosts=["mcp.example.com"])

    hypercorn --worker-class trio weather:app

That server must run on Trio, as Hypercorn does when it is asked to.  What it owns it answers for: sockets, TLS, HTTP/2,
the time that a head may take, the frames and pings of a WebSocket.  What a request means, and how much there may be of
it, is decided here as everywhere.

What surprises:

- The server runs for as long as the lifespan of the application.  Under a prefix of a larger application there is none,
  as frameworks do not pass it on: the larger one has ``async with app.running()`` in its own lifespan.  Or else the run
  begins with the first request, in a system task of Trio's, and ends with the event loop.
- ASGI servers and frameworks disagree whether `path` begins with `root_path`: it is read as what is served.
- A response is written by whoever has something to say, mostly a handler, and not by the task of the request.  That one
  waits for the end, or for the client to leave.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Awaitable, Callable, Container, Iterable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack
from urllib.parse import quote

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_REQUEST, UsageError, check_seconds, shown
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.http.verdicts import HttpRequest, Reply, refusal, where_websockets_are
from trio_mcp.core.jsonrpc import Error, InvalidMessage, Limits, Message, decode
from trio_mcp.core.pace import Pace
from trio_mcp.core.shares import Account, Charge, weight
from trio_mcp.server.driver import converse
from trio_mcp.server.http.endpoint import AdmittedRequest, Endpoint, HttpOptions, log_refusal, over_limit, send_reply
from trio_mcp.server.http.gate import seconds_left
from trio_mcp.server.run import Run
from trio_mcp.transport.nursery import check_trio, open_nursery, sole
from trio_mcp.transport.outbox import CLOSING

if TYPE_CHECKING:
    from types import TracebackType

    from trio_mcp.server.server import Server

__all__ = ["AsgiApp"]

_log = logging.getLogger("trio_mcp")
_PIECE = 64 * 1024  # bytes of a body in one event: how much of it the server has sent is not told
_SUBPROTOCOL = "mcp"  # as in `websocket`, which is not loaded here: it reads frames
_GOING_AWAY, _UNSUPPORTED, _TOO_BIG = 1001, 1003, 1009  # RFC 6455, 7.4.1

Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]


class AsgiApp:
    """An ASGI 3 application that serves `server`; see the head of this file.

    `options` are those of `serve_http` that are about requests.  When the application is shut down, running calls have
    `shutdown_timeout` seconds, unless the server has closed all connections before, as ASGI has it.  Options that
    cannot be end the start of the application.
    """

    def __init__(self, server: Server, *, shutdown_timeout: float = 5.0, **options: Unpack[HttpOptions]) -> None:
        check_seconds("shutdown_timeout", shutdown_timeout)
        self._server = server
        self._shutdown_timeout = shutdown_timeout
        self._options = options
        self._begun = False  # by a lifespan, or by `running`: then no request begins it
        self._taken = False  # by one that runs, or is about to
        self._served: _AppState | None = None
        self._open = 0  # requests and WebSockets
        self._first: trio.Event | None = None  # while the first request, and all that come with it, wait

    def running(self) -> AbstractAsyncContextManager[None]:
        """The application serves as long as the block: for the lifespan of one that it is mounted in.

        At the end of the block calls have `shutdown_timeout` seconds to finish; afterwards requests are refused.  What
        the block raises leaves it unchanged.
        """
        return self._running(closed=False)

    def _running(self, *, closed: bool) -> _RunningApp:
        self._begun = True
        return _RunningApp(self, closed=closed)

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
            raise UsageError(f"an ASGI scope {kind!r} is not served here")
        self._open += 1
        try:
            await serve(scope, receive, send)
        finally:
            self._open -= 1

    # The run.

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # that it starts up
        begun = False
        try:
            async with self._running(closed=True):
                begun = True
                await send({"type": "lifespan.startup.complete"})
                await receive()  # that it shuts down
        except Exception as error:
            if begun:
                raise
            _log.error("the server could not begin", exc_info=error)
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    async def _serving(self) -> _AppState | None:
        """What serves a request; None if nothing does."""
        if self._served is None and not self._begun:
            first = self._first
            if first is None:
                first = self._first = trio.Event()
                trio.lowlevel.spawn_system_task(self._hold, first, name="the run of an ASGI application")
            await first.wait()
        return self._served

    async def _hold(self, first: trio.Event) -> None:
        """Run for as long as the event loop does.  Should that fail, the next request begins anew."""
        try:
            async with _RunningApp(self, closed=False):
                first.set()
                await trio.sleep_forever()
        except BaseException as error:  # noqa: BLE001  # what leaves a system task is Trio's end
            _report(error)
        finally:
            self._first = None
            first.set()

    # Requests.

    async def _http(self, scope: Event, receive: Receive, send: Send) -> None:
        served = await self._serving()
        if served is None:
            await _reply(_AsgiResponse(send, Limits()), _NOT_RUNNING)
            return
        response = _AsgiResponse(send, served.limits)
        cors: Fields = ()
        try:
            request, admitted = await served.admit(scope)
            if isinstance(admitted, Reply):
                await _reply(response, admitted)
                return
            cors = admitted.head.cors
            body = await _body(receive, served.limits, cors, served.endpoint.account(admitted.holder))
            if isinstance(body, Reply):
                log_refusal(body, request, admitted.peer)
                await _reply(response, body)
            elif body is not None:
                request = attrs.evolve(request, body=body)
                await response.follow(receive, served.endpoint.serve(admitted, request, response, _prefix(scope)))
        except Exception:  # noqa: BLE001  # what an author's event log raises, for one
            _log.exception("a request failed in the server itself, and not in a handler")
            if not response.begun:  # and it was dropped
                failed = refusal(500, Error(None, INTERNAL_ERROR, "internal error"), cors)
                await _reply(_AsgiResponse(send, served.limits), failed)

    async def _websocket(self, scope: Event, receive: Receive, send: Send) -> None:
        await receive()  # that it connects
        served = await self._serving()
        if served is None:
            await _refuse_websocket(scope, send, _NOT_RUNNING)
            return
        request, verdict = await served.admit(scope)
        if (
            isinstance(verdict, AdmittedRequest)
            and (fault := _no_websocket(scope, verdict, served.endpoint)) is not None
        ):
            log_refusal(fault, request, verdict.peer)
            verdict = fault
        if isinstance(verdict, Reply):
            await _refuse_websocket(scope, send, verdict)
            return
        stream, frames = _WebSocket(receive, send, served.limits), _Messages(served.limits)
        # Every message of a WebSocket is one in the name of its token.
        with suppress(trio.BrokenResourceError), trio.move_on_after(seconds_left(verdict.caller)):
            await stream.accept(scope)
            account = served.endpoint.account(verdict.holder)
            await converse(
                served.run, stream, frames, headers=verdict.headers, principal=verdict.caller, account=account
            )


@attrs.frozen(eq=False)
class _AppState:
    """What serves, while it does."""

    run: Run
    endpoint: Endpoint

    @property
    def limits(self) -> Limits:
        return self.run.limits

    async def admit(self, scope: Event) -> tuple[HttpRequest, Reply | AdmittedRequest]:
        target = _target(scope, self.endpoint.paths)
        request = HttpRequest(scope.get("method", "GET"), target, scope["headers"])
        if scope["type"] == "websocket" and "Upgrade" not in request.headers:  # HTTP/2 has another way to say it
            request = attrs.evolve(request, headers=[*scope["headers"], (b"upgrade", b"websocket")])
        client = scope.get("client")
        peer = None if client is None else client[0]
        return request, await self.endpoint.admit(request, peer, _prefix(scope))


class _RunningApp:
    """The block of `AsgiApp.running`; a class, as `groups.open_nursery` is one."""

    __slots__ = ("_app", "_closed", "_shared", "_stack")

    def __init__(self, app: AsgiApp, *, closed: bool) -> None:
        """`closed`: no request comes after it."""
        self._app = app
        self._closed = closed

    async def __aenter__(self) -> None:
        app = self._app
        check_trio()
        if app._taken:
            raise UsageError("this ASGI application is running already")
        async with AsyncExitStack() as stack:
            app._taken = True
            stack.callback(self._leave)
            joined = app._server.joined()
            run = await stack.enter_async_context(joined)
            run.held = True  # by the ASGI server, or the program
            nursery = await stack.enter_async_context(open_nursery())
            endpoint = Endpoint(run, **app._options)
            nursery.start_soon(endpoint.run, name="the endpoint of an ASGI application")
            self._shared = isinstance(joined, nullcontext)
            stack.push_async_exit(self._drain)
            app._served = _AppState(run, endpoint)
            self._stack = stack.pop_all()

    def _leave(self) -> None:
        self._app._served, self._app._taken = None, False

    async def _drain(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        served = self._app._served
        if error is None and served is not None:
            # A run that is shared goes on without this application.
            ending: Endpoint | Run = served.endpoint if self._shared else served.run
            # ASGI: the lifespan ends when the server "has stopped accepting connections and closed all active" ones.
            # It has given them time of its own; calls of older revisions go on without one, and nobody can come back.
            shutdown_timeout = 0 if self._closed and not self._app._open else self._app._shutdown_timeout
            with trio.move_on_after(shutdown_timeout):
                await ending.drain()
                return
            ending.abort_pending()
            with trio.move_on_after(CLOSING):
                await ending.drain()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)


def _report(error: BaseException) -> None:
    """What a run in a system task ended with: failures are logged, and Ctrl-C goes to the program, as it was meant."""
    interrupt, rest = BaseExceptionGroup("", [error]).split(KeyboardInterrupt)
    failures = None if rest is None else rest.split((trio.Cancelled, GeneratorExit))[1]
    if failures is not None:
        _log.error("the server has ended, or could not begin", exc_info=sole(failures))
    if interrupt is not None:
        signal.raise_signal(signal.SIGINT)


_WHY_NOT = "the server is shutting down, or could not begin; its log says which"
_NOT_RUNNING = refusal(503, Error(None, INTERNAL_ERROR, _WHY_NOT))


# What a request says.


def _prefix(scope: Event) -> str:
    """Where the application is mounted."""
    root: str = scope.get("root_path", "")
    return quote(root.rstrip("/"))


def _target(scope: Event, paths: Container[str]) -> str:
    """The path below the prefix, and the query, as in a request line."""
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", "").rstrip("/"))
    # `path` has the prefix in newer servers, and has not in older ones, or where a proxy has taken it away.
    if below.rstrip("/") in paths:
        path = below or "/"
    query = scope.get("query_string", b"").decode("latin-1")
    return quote(path, safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")


async def _body(receive: Receive, limits: Limits, cors: Fields, account: Account) -> bytes | Reply | None:
    """The body; None if the client has gone.  One that is too long is given as far as it came: that is refused."""
    body = bytearray()  # and no list: a piece of two bytes would take 43 in it
    pace = Pace(limits.body_seconds, limits.body_rate)
    pace.begin(trio.current_time())
    with Charge(account) as charge:
        while len(body) <= limits.message_bytes:
            with trio.move_on_at(pace.deadline) as scope:
                event = await receive()
            if scope.cancelled_caught:
                why = f"the body took too long; {len(body)} bytes came (Limits.body_seconds, Limits.body_rate)"
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


# What goes back.


class _AsgiSender:
    """Events to the ASGI server.  Raises `BrokenResourceError` when the client has gone, or takes nothing any more."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self._send = send
        self._pace = Pace(limits.write_seconds, limits.write_rate)  # of the client, as a reader
        self._scope = trio.CancelScope()  # of the event at hand
        self._deadline = math.inf  # of all events, once everything ends
        self.shielded = False  # no cancellation cuts an event short: somebody will `hurry`
        self.closed = False

    async def put(self, event: Event, size: int = 0) -> None:
        """Send an event with so many bytes of content."""
        if self.closed:
            raise trio.BrokenResourceError("the client has gone")
        self._pace.begin(trio.current_time())
        try:
            until = min(self._pace.deadline, self._deadline)
            with trio.CancelScope(deadline=until, shield=self.shielded) as self._scope:
                await self._send(event)
            self._pace.move(size, trio.current_time())
            self._pace.end(trio.current_time())
        except OSError as error:  # so ASGI has it since 2.4; before that, nothing was raised
            raise trio.BrokenResourceError("the client has gone") from error
        if self._scope.cancelled_caught:
            raise trio.BrokenResourceError("the client reads too slowly (Limits.write_seconds, Limits.write_rate)")

    async def hurry(self) -> None:
        """When this is cancelled, what is being sent may go on for a moment.  Who sends it cannot see that."""
        try:
            await trio.sleep_forever()
        finally:
            self._deadline = trio.current_time() + CLOSING
            self._scope.deadline = min(self._scope.deadline, self._deadline)

    def close(self) -> None:
        self.closed = True
        self._scope.cancel(reason="the client has gone")


def _head(fields: Fields) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]


class _AsgiResponse:
    """One response, as `lanes.Response` has it."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self._outgoing = _AsgiSender(send, limits)
        self.begun = False
        self._ending = False  # the last event is on its way, or has been sent
        self._over = trio.Event()  # nothing more will be sent

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

    def drop(self) -> None:
        # All that ASGI has for it: the application returns before the response is whole, and the server gives the
        # connection up.
        self._outgoing.close()
        self._over.set()

    async def follow(self, receive: Receive, serving: Awaitable[Callable[[], None]]) -> None:
        """Serve, and stay until the response has ended, or the client has left it."""
        gone = None
        with suppress(trio.BrokenResourceError):
            async with open_nursery() as nursery:
                nursery.start_soon(self._outgoing.hurry, name="the end of a request")
                self._outgoing.shielded = True
                try:
                    gone = await serving
                    if not self._over.is_set():
                        nursery.start_soon(self._watch, receive)
                        await self._over.wait()
                finally:
                    # Also where the server has cancelled this.
                    if not self._ending:
                        self.drop()
                        if gone is not None:
                            gone()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # Some servers say so at the end of every response, and that may be while it still is on its way there.
        if not self._ending:
            self.drop()


async def _reply(response: _AsgiResponse, reply: Reply) -> None:
    with suppress(trio.BrokenResourceError):
        await send_reply(response, reply)


# WebSockets.


def _no_websocket(scope: Event, admitted: AdmittedRequest, endpoint: Endpoint) -> Reply | None:
    """Why there will be none, though the client may ask."""
    why = None
    offered = scope.get("subprotocols") or ()
    if not admitted.head.websocket:
        why = where_websockets_are(endpoint.policy, _prefix(scope))
    elif offered and _SUBPROTOCOL not in offered:
        why = f"the subprotocols {shown(', '.join(offered))} are not spoken here; offer {_SUBPROTOCOL}, or none"
    return None if why is None else refusal(400, Error(None, INVALID_REQUEST, why))


async def _refuse_websocket(scope: Event, send: Send, reply: Reply) -> None:
    events: list[Event] = [{"type": "websocket.close"}]  # the server makes a 403 of it, whatever it was
    if "websocket.http.response" in (scope.get("extensions") or ()):
        head = _head(reply.headers)
        events = [
            {"type": "websocket.http.response.start", "status": reply.status, "headers": head},
            {"type": "websocket.http.response.body", "body": reply.body},
        ]
    with suppress(OSError):  # the client has gone
        for event in events:
            await send(event)


class _WebSocket(trio.abc.Stream):
    """A WebSocket whose frames the ASGI server reads and writes.  What is received at once is one message."""

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive = receive
        self._outgoing = _AsgiSender(send, limits)
        self._limit = limits.message_bytes
        self._close = (_GOING_AWAY, "")
        self._unended = bytearray()  # of a message that is too long for one write

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
            self._close = (_UNSUPPORTED, "messages are text; this one is binary")
            return b""
        message = text.encode()
        if len(message) > self._limit:
            self._close = (_TOO_BIG, f"the message is longer than {self._limit} bytes (Limits.message_bytes)")
            return b""
        return message or b" "  # to be told that it is no JSON; no bytes at all would be the end

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._unended += data
        if b"\n" not in bytes(data):
            return
        *messages, self._unended = self._unended.split(b"\n")
        for message in messages:
            await self._outgoing.put({"type": "websocket.send", "text": message.decode()}, len(message))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        code, reason = self._close
        if not self._outgoing.closed:
            await self._outgoing.put({"type": "websocket.close", "code": code, "reason": reason})
            self._outgoing.close()


class _Messages:
    """Frames that are read already: what comes is one message, and what goes out is a line for each."""

    ended = False
    why = "the WebSocket has ended"
    stretch = None
    held = 0

    def __init__(self, limits: Limits) -> None:
        self.size = 0
        self._limits = limits

    def feed(self, data: bytes) -> Iterable[Message]:
        message = decode(data, self._limits)
        self.size = 0 if type(message) is InvalidMessage else weight(data, self._limits.values)
        return (message,)

    def give_up(self, why: str, *, late: bool) -> None:
        """Messages come whole: the ASGI server puts them together."""

    def frame(self, texts: Sequence[bytes]) -> Sequence[bytes]:
        return (b"\n".join((*texts, b"")),)

    def pending(self) -> bytes:
        return b""

    def ping(self) -> None:
        """The ASGI server does that."""

    def farewell(self) -> bytes:
        return b""
