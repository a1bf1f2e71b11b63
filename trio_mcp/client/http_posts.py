"""The common half of both HTTP transports: one POST for each message, and what happens with the reply.

The task that waits for an answer also sends its request and reads the reply.  Other messages have tasks of their own:
those without a waiting task, and requests whose caller may be busy with progress reports.

`core.http.client_rules` decides the meaning of a reply; this file acts on it:

| Verdict | Action |
|---|---|
| an answer | it goes to the session |
| TryInitialize | opening continues with the legacy handshake |
| TryVersion | its error goes to the session: opening handles it, and later it is an error like any other |
| TrySse | the connection ends with `NeedsSse` |
| SessionGone | the connection ends with `SessionLost`, which says if the request may have run |
| RetryAfter | the message is sent again, if the pause is at most `MAX_RETRY_AFTER` |
| Redirected | the message is sent to the new URL, up to five times in a row |
| Challenged | with the option `auth`, the message is sent again with a better token |
| RefreshTools, Challenged, ReplyLost | the request fails with an error of its own |

A request that cannot be answered any more fails at once, alone, with the cause chained; while the session is being
opened, the connection ends, too.  An answer is repeated for a minute if it does not arrive, because the server and a
caller here both wait for it; then the session is lost.  The same holds for ``notifications/initialized``, without which
the server sends nothing on its own.  Other messages that do not arrive (another notification, an answer that the server
refuses) are reported as mistakes.  So nothing here needs a timeout: the end of a connection is noticed, and the
caller's scope limits how long the server may take.

Messages may overtake each other, with one exception: until the server has received ``notifications/initialized``, only
messages that may precede it are sent, because servers judge by the order of arrival.

A server may ask faster than it receives the answers.  So only `_ANSWER_TASKS` answers are sent at once, and while more
than `Limits.outgoing` others wait, the server's streams are not read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

from trio_mcp.client.caller import Caller, Failure, HeadersRefused, NoResponse, SessionLost, Unauthorized
from trio_mcp.core.errors import (
    ConnectionFailed,
    McpError,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    UsageError,
    repeated,
)
from trio_mcp.core.http.client_rules import (
    AnswerReceived,
    Challenged,
    Exchange,
    Redirected,
    RefreshTools,
    ReplyAccepted,
    ReplyLost,
    ReplyVerdict,
    RetryAfter,
    SessionGone,
    Streaming,
    TryInitialize,
    TrySse,
    TryVersion,
    kind_of,
    read_reply,
    request_headers,
    url_without_secrets,
)
from trio_mcp.core.http.fields import (
    EVENT_STREAM,
    LAST_EVENT_ID,
    METHOD,
    NAME,
    PARAM_PREFIX,
    PROTOCOL_VERSION,
    SESSION_ID,
    Fields,
    Mirror,
    without_credentials,
)
from trio_mcp.core.messages import (
    ABSENT,
    Batch,
    Error,
    Id,
    InvalidMessage,
    Message,
    Notification,
    Request,
    Response,
    encode,
)
from trio_mcp.core.opening import Phase
from trio_mcp.core.requests import PeerMistake
from trio_mcp.core.revisions import META_VERSION, REVISIONS, Revision
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import Credentials, TokenSource

__all__ = [
    "ACKNOWLEDGE_TIMEOUT",
    "MAX_RETRY_AFTER",
    "InFlight",
    "NeedsSse",
    "NoResponse",
    "OnStream",
    "PostTransport",
    "Unauthorized",
    "closed_here",
    "drain",
    "name_of",
]  # fmt: skip

MAX_RETRY_AFTER = 60.0
"""The longest Retry-After in seconds that is waited for.  If it is longer, the request fails at once, and the error has
the time."""

ACKNOWLEDGE_TIMEOUT = 30.0
"""Seconds that a server may take to accept a notification or an answer, or to say when to retry: no caller's scope
limits this, and calls may wait for it."""

_MAX_REDIRECTS = 5  # redirects in a row: a moved URL has one or two, a loop has no end
_DRAIN_SECONDS = 1.0  # seconds to read the rest of a complete reply, so that its connection can be used again
_ANSWER_TASKS = 32  # answers that are sent at once, each on a connection
# Seconds between attempts to send an answer: a server that restarts has a minute.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
_INITIALIZED_ATTEMPTS = 3  # attempts to send `notifications/initialized` if the server breaks the connection
_BUSY = frozenset({429, 502, 503, 504})  # the server, or a proxy before it, may accept the message later
_GONE_SECONDS = 1.0  # seconds for other requests to a lost session to be refused, too

# Methods that may be sent a second time if the server closed the connection meanwhile: they change nothing, or have the
# same effect twice.  A tool may do anything.
_REPEATABLE = frozenset(
    {
        *("initialize", "server/discover", "ping", "tools/list", "prompts/list", "prompts/get", "completion/complete"),
        *("resources/list", "resources/templates/list", "resources/read", "resources/subscribe"),
        *("resources/unsubscribe", "logging/setLevel", "subscriptions/listen"),
    }
)
_OPENING = frozenset({"initialize", "server/discover"})
_INITIALIZED = "notifications/initialized"
_RESERVED = frozenset(
    each.lower() for each in ("Accept", "Content-Type", SESSION_ID, PROTOCOL_VERSION, METHOD, NAME, LAST_EVENT_ID)
)

OnStream: TypeAlias = "Callable[[Exchange, HttpReply], Awaitable[None]]"


class NeedsSse(McpError):
    """The server refuses `initialize` at this URL.  It may be an HTTP+SSE server, whose sessions begin with a GET."""


@attrs.define(eq=False, repr=False)
class InFlight:
    """A message that is being sent; for a request, until it has its answer."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    sent: bool = False
    streaming: bool = False  # the response is a stream that has begun
    awaited: bool = False  # the task that waits for the answer sends it
    answered: bool = False  # the answer came on another stream


class PostTransport:
    """The common base class of both HTTP transports, as a `Transport`."""

    _sse = False

    def __init__(
        self,
        caller: Caller,
        pool: HttpPool,
        url: str,
        *,
        nursery: trio.Nursery,
        headers: Callable[[], Fields],
        mirrors: Callable[[str], Sequence[Mirror]],
        authorization: TokenSource | None = None,
    ) -> None:
        self.message_size = 0
        self._caller = caller
        self._session = caller.session
        self._limits = caller.session.limits
        self._pool = pool
        self._url = url
        self._nursery = nursery
        self._headers = headers
        self._mirrors = mirrors
        self._authorization = authorization
        self._session_id: str | None = None  # http-61: never shown
        self._proposed_revision: Revision | None = None  # until a revision is agreed
        self._target: str | None = url  # the URL for POSTs
        self._in_flight: dict[Id, InFlight] = {}
        self._probe: Id | None = None  # the last request that opens the session
        self._scopes: set[trio.CancelScope] = set()  # scopes of all tasks
        self._answers: deque[Message] = deque()  # waiting to be sent
        self._answer_tasks = 0  # tasks that send them
        # Streams of cancelled calls that are still read; the first one was silent for longest.
        self._abandoned_streams: dict[object, trio.CancelScope] = {}
        self._answers_room = trio.lowlevel.ParkingLot()  # woken when fewer answers wait
        self._never_sent: set[Id] = set()  # cancelled before they were sent, so the server need not be told
        self._handshake_done = trio.Event()  # the server knows that the handshake is complete, or there is none
        self._changed = trio.lowlevel.ParkingLot()  # woken when a stream begins or a message is done
        self._closed = False
        self._session_gone = False  # the server has forgotten the session
        caller.attach(self)

    # Transport

    def wake(self) -> None:
        for message in self._outgoing():
            self._send(message)

    def send_request(self, id: Id) -> Awaitable[None] | None:
        sending: Awaitable[None] | None = None
        for message in self._outgoing():
            if not isinstance(message, Request) or message.id != id:
                self._send(message)
            elif (flight := self._begin(message)) is not None:
                flight.awaited = True
                sending = self._post(message, flight)
        return sending

    def _send(self, message: Message) -> None:
        """Send a message in a task of its own; answers share a limited number of tasks."""
        if not isinstance(message, Response | Error | Batch):
            if (flight := self._begin(message)) is not None:
                self._nursery.start_soon(self._post, message, flight, name=f"to the server: {name_of(message)}")
            return
        self._answers.append(message)
        if self._answer_tasks < _ANSWER_TASKS:
            self._answer_tasks += 1
            self._nursery.start_soon(self._post_answers, name="to the server: answers")

    async def _post_answers(self) -> None:
        try:
            while self._answers:
                message = self._answers.popleft()
                if (flight := self._begin(message)) is not None:
                    await self._post(message, flight)
                self._answers_room.unpark_all()
        finally:
            self._answer_tasks -= 1

    async def _receive(self, reply: HttpReply, silence: float) -> bytes:
        """Receive a part of the reply.  Raises ReplyBroken after this many seconds without data."""
        if silence == math.inf:
            return await reply.receive()
        with trio.move_on_after(silence):
            return await reply.receive()
        why = f"no data came for {silence:g} seconds, but keep-alives came before: the connection is dead"
        raise ReplyBroken(why, sent=True)

    async def _wait_for_room(self) -> None:
        """Wait until fewer answers wait than the limit; called before more is read from the server."""
        while len(self._answers) > self._limits.outgoing:
            await self._answers_room.park()

    def _outgoing(self) -> list[Message]:
        """Return the messages that can be sent now."""
        if self._target is None or self._closed:
            return []
        if self._session.opened and not self._revision.handshake:
            self._handshake_done.set()
        # cancel-01: only requests "believed to be still in-progress" are cancelled.
        messages: list[Message] = [
            each for each, _ in self._session.outgoing() if cancelled_id(each) not in self._never_sent
        ]
        self._never_sent.clear()  # their notifications are queued before `request_abandoned`
        return messages

    def request_done(self, id: Id) -> None:
        flight = self._in_flight.get(id)
        if flight is not None and flight.awaited:  # answered on another stream: end the wait for this one
            flight.answered = True
            self.request_abandoned(id)

    def request_abandoned(self, id: Id) -> None:
        flight = self._in_flight.pop(id, None)
        if flight is not None:
            if not flight.sent:
                self._never_sent.add(id)
            self._abandon(id, flight)

    def _abandon(self, id: Id, flight: InFlight) -> None:
        flight.scope.cancel(reason="no task waits for the answer")

    @property
    def last_data_at(self) -> float:
        return -math.inf

    def abort(self, why: str) -> None:
        self._close(lambda: SessionLost(True, why))

    def _begin(self, message: Message) -> InFlight | None:
        """Return the state for sending a message, or None if it cannot be sent any more."""
        if self._session_gone:
            if isinstance(message, Request):
                self._caller.fail(message.id, lambda: SessionLost(False))
            return None
        flight = InFlight()
        if isinstance(message, Request):
            if message.method in _OPENING:
                if self._probe is not None:
                    self.request_abandoned(self._probe)  # it took too long, and its answer is of no use now
                self._probe, self._session_id = message.id, None
                self._proposed_revision = _revision_to_open(message)
            self._in_flight[message.id] = flight
        self._scopes.add(flight.scope)
        return flight

    # Sending one message

    async def _post(self, message: Message, flight: InFlight) -> None:
        try:
            with flight.scope:
                if not self._handshake_done.is_set():
                    await self._wait_for_handshake(message)
                flight.sent = True
                try:
                    verdict = await self._get_verdict(self._exchange(message), flight)
                    if verdict is not None:
                        self._handle_verdict(message, verdict)
                except ReplyBroken as error:
                    why = NoResponse(f"{name_of(message)} has no answer: {error}", request_may_have_run=error.sent)
                    why.__cause__ = error
                    self._fail(message, why)
                except McpError as error:
                    self._fail(message, error)
                if _is_initialized(message):
                    self._handshake_done.set()  # with any result: a server that refused it decides about later messages
        finally:
            self._scopes.discard(flight.scope)
            self._changed.unpark_all()

    async def _wait_for_handshake(self, message: Message) -> None:
        """Wait until the server can process the message."""
        early = isinstance(message, Request | Notification) and message.method in (*_OPENING, _INITIALIZED)
        if not early and not isinstance(message, Response | Error | Batch):
            await self._handshake_done.wait()

    def _exchange(self, message: Message | None, method: str = "POST", url: str | None = None) -> Exchange:
        assert self._target is not None
        return Exchange(
            url or self._target,
            self._revision,
            message,
            method,
            session=self._session_id,
            speaks=self._session.offer.revisions,
            probing=self._session.terms is None and not self._sse,
            sse=self._sse,
        )

    @property
    def _revision(self) -> Revision:
        terms = self._session.terms
        revision = self._proposed_revision if terms is None else terms.revision
        assert revision is not None  # the first message proposes a revision
        return revision

    async def _get_verdict(self, exchange: Exchange, flight: InFlight) -> ReplyVerdict | None:
        """Send a message and return its verdict, or None if the verdict was handled already."""
        return await self._send_exchange(exchange)

    async def _send_exchange(
        self, exchange: Exchange, on_stream: OnStream | None = None, *, after: str = ""
    ) -> ReplyVerdict:
        """Send a message, with redirects and retries, and return the verdict.  `on_stream` reads a stream response."""
        redirects = 0
        assert not isinstance(exchange.message, InvalidMessage)  # messages to send are made here
        body = b"" if exchange.message is None else encode(exchange.message)
        answers = isinstance(exchange.message, Response | Error)  # the server waits for it, and accepts it once
        # Without `initialized` a server sends no questions and no changes in this session.  But some servers break the
        # connection over it, or do not reply, and work otherwise.
        must_arrive = answers or _is_initialized(exchange.message)
        broken = 0  # attempts that the server may have received
        pauses = iter(_PAUSES)
        send = self._send_with_timeout if self._authorization is None else self._send_authorized
        while True:
            try:
                status, verdict = await send(exchange, body, on_stream, after)
            except (ReplyBroken, ConnectionFailed, NoResponse) as error:
                broken += not isinstance(error, ConnectionFailed)
                gives_up = not answers and (broken > _INITIALIZED_ATTEMPTS or isinstance(error, NoResponse))
                if gives_up or not must_arrive:
                    raise
                await self._pause(pauses, f"{name_of(exchange.message)} did not reach the server: {error}")
                continue
            if answers and status in _BUSY and not isinstance(verdict, RetryAfter):
                await self._pause(pauses, f"{name_of(exchange.message)} did not reach the server: HTTP {status}")
                continue
            if answers and broken and status in (400, 404, 409):  # the server has received an earlier attempt
                return ReplyAccepted()
            if isinstance(verdict, Redirected):
                redirects += 1
                if redirects > _MAX_REDIRECTS:
                    return ReplyLost(f"the server redirects more than {_MAX_REDIRECTS} times")
                exchange = attrs.evolve(exchange, url=verdict.url)
            elif isinstance(verdict, RetryAfter) and exchange.method == "POST":
                if verdict.seconds > MAX_RETRY_AFTER:
                    return ReplyLost(f"HTTP {status}: the server is busy for {verdict.seconds} seconds", status)
                self._end_abandoned_stream("the server is busy, perhaps with too many connections")
                await trio.sleep(verdict.seconds)
                exchange = attrs.evolve(exchange, again=True)
            else:
                return verdict

    def _end_abandoned_stream(self, why: str) -> None:
        """End the stream of a cancelled call that was silent for longest, if there is one."""
        if self._abandoned_streams:
            oldest = next(iter(self._abandoned_streams))
            self._abandoned_streams.pop(oldest).cancel(reason=why)

    async def _pause(self, pauses: Iterator[float], why: str) -> None:
        """Wait before a message is repeated that the server waits for.

        After the last pause the session is lost, so that the server and the caller here both learn it.
        """
        pause = next(pauses, None)
        if pause is None:
            self._close(lambda: SessionLost(True, why))
            pause = 0.0  # a checkpoint, at which this is cancelled
        await trio.sleep(pause)

    async def _send_authorized(
        self, exchange: Exchange, body: bytes, on_stream: OnStream | None, after: str
    ) -> tuple[int, ReplyVerdict]:
        """Send a message with an access token, and again if the server refuses it and a better one can be had."""
        assert self._authorization is not None
        credentials = self._authorization.request(exchange.method, exchange.url, _operation_of(exchange))
        while True:
            await credentials.get()
            status, verdict = await self._send_with_timeout(exchange, body, on_stream, after, credentials)
            if not credentials.refused:
                return status, verdict
            assert isinstance(verdict, Challenged)
            credentials.refusal = _refusal(exchange.message, verdict, url_without_secrets(self._url))

    async def _send_with_timeout(
        self,
        exchange: Exchange,
        body: bytes,
        on_stream: OnStream | None,
        after: str,
        credentials: Credentials | None = None,
    ) -> tuple[int, ReplyVerdict]:
        if exchange.asked or exchange.method != "POST":
            return await self._send_once(exchange, body, on_stream, after, credentials)
        try:
            # Per attempt: the server decides how long to wait before another one.
            with trio.fail_after(ACKNOWLEDGE_TIMEOUT):
                return await self._send_once(exchange, body, on_stream, after, credentials)
        except trio.TooSlowError:
            raise NoResponse(f"no answer within {ACKNOWLEDGE_TIMEOUT:g} seconds") from None

    async def _send_once(
        self,
        exchange: Exchange,
        body: bytes,
        on_stream: OnStream | None,
        after: str,
        credentials: Credentials | None,
    ) -> tuple[int, ReplyVerdict]:
        fields, replayable = self._fields(exchange, after, credentials), _repeatable(exchange.message)
        async with self._pool.request(exchange.method, exchange.url, fields, body, replayable=replayable) as reply:
            if credentials is not None:
                credentials.replied(reply.status, reply.headers)
            verdict = await self._read_verdict(exchange, reply, fields)
            if isinstance(verdict, Streaming):
                assert on_stream is not None  # only requests have stream responses
                await on_stream(exchange, reply)
        return reply.status, verdict

    async def _read_verdict(self, exchange: Exchange, reply: HttpReply, sent: Fields) -> ReplyVerdict:
        body = b""
        success = 200 <= reply.status < 300
        if success and exchange.method == "POST" and (exchange.sse or not exchange.asked):
            await drain(reply)  # only the status matters
        elif not success or kind_of(reply.headers) != EVENT_STREAM:
            body = await reply.read(self._limits.message_bytes)
        if not success:
            body = without_credentials(body, sent)
        verdict = read_reply(exchange, reply.status, reply.headers, body, self._limits)
        if isinstance(verdict, AnswerReceived | Streaming) and verdict.session is not None:
            self._session_id = verdict.session
        return verdict

    def _fields(self, exchange: Exchange, after: str, credentials: Credentials | None) -> Fields:
        """Return the headers of the protocol and those of the program.

        Headers that were given for a call already contain those of the client.
        """
        message = exchange.message
        mirrors: Sequence[Mirror] = ()
        own: Fields = ()
        if isinstance(message, Request):
            own = self._caller.headers_of(message.id)
            if message.method == "tools/call":
                mirrors = self._mirrors(str(message.params.get("name")))
        protocol = request_headers(exchange, mirrors=mirrors, last_event_id=after)
        given = own or self._client_headers()
        for name, _ in given:
            if name.lower() in _RESERVED or name.lower().startswith(PARAM_PREFIX.lower()):
                raise UsageError(f"the header {name} is set by the protocol; leave it out")
        return (*protocol, *(given if credentials is None else credentials.beside(given)))

    def _client_headers(self) -> Fields:
        try:
            return self._headers()
        except UsageError:
            raise
        except Exception as error:  # a callback may raise anything
            raise UsageError("the function given as headers raised an exception") from error

    @contextmanager
    def _running(self, deadline: float = math.inf) -> Iterator[trio.CancelScope]:
        """A scope that is cancelled when the session is over, or at the deadline."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._scopes.add(scope)
            if self._closed:
                scope.cancel(reason="the session is over")
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    # Outcomes

    def _handle_verdict(self, message: Message | None, verdict: ReplyVerdict) -> None:
        if isinstance(message, Request) and self._in_flight.pop(message.id, None) is None:
            return  # no task waits for it any more
        id = message.id if isinstance(message, Request) else None
        if isinstance(verdict, AnswerReceived):
            self._caller.receive(verdict.message, trio.current_time(), about=id)
        elif isinstance(verdict, TryVersion):
            self._caller.receive(verdict.error, trio.current_time(), about=id)
        elif isinstance(verdict, TryInitialize):
            self._caller.fall_back(verdict.why)
        elif isinstance(verdict, SessionGone):
            self._handle_session_gone(id)
        elif not isinstance(verdict, ReplyAccepted):
            self._report_failure(message, _error_of(message, verdict, url_without_secrets(self._url)))

    def _fail(self, message: Message, error: McpError) -> None:
        if not isinstance(message, Request) or self._in_flight.pop(message.id, None) is not None:
            self._report_failure(message, error)

    def _report_failure(self, message: Message | None, error: McpError) -> None:
        if not isinstance(message, Request):
            # The program may want to report it: the server may be waiting for this message.
            self._caller.handle_events([PeerMistake(f"{name_of(message)} did not reach the server: {error}")])
        elif self._session.terms is not None:
            self._caller.fail(message.id, lambda: error)
        elif self._session.phase is Phase.PROBING and isinstance(error, RemoteProtocolError):
            self._caller.fall_back(str(error))  # a modern server does not answer the probe like this
        else:
            self._close(repeated(error))

    def _handle_session_gone(self, id: Id | None) -> None:
        """http-58: the server has forgotten the session.

        Other requests in flight probably get the same reply soon, which proves that they have not run.  Requests with a
        response stream may have run.
        """
        first, self._session_gone, self._session_id = not self._session_gone, True, None
        if id is not None:
            self._caller.fail(id, lambda: SessionLost(False))
        for other, flight in list(self._in_flight.items()):
            if not flight.sent:
                self.request_abandoned(other)
                self._caller.fail(other, lambda: SessionLost(False))
        if all(each.streaming for each in self._in_flight.values()):
            self._close(lambda: SessionLost(True))
        elif first:
            self._nursery.start_soon(self._end, name="the end of a session")

    async def _end(self) -> None:
        with trio.move_on_after(_GONE_SECONDS):
            while not all(each.streaming for each in self._in_flight.values()):
                await self._changed.park()
        self._close(lambda: SessionLost(True))

    def _close(self, failure: Failure) -> None:
        """Stop sending and receiving."""
        self._closed = True
        self._in_flight.clear()
        self._answers.clear()
        self._answers_room.unpark_all()
        self._caller.connection_lost(failure)
        for scope in list(self._scopes):
            scope.cancel(reason="the session is over")

    async def aclose(self) -> None:
        """End all requests and tasks.  Never raises because of the server."""
        self._close(closed_here)
        await trio.lowlevel.checkpoint()


def name_of(message: Message | None) -> str:
    return message.method if isinstance(message, Request | Notification) else "an answer"


def _is_initialized(message: Message | None) -> bool:
    return isinstance(message, Notification) and message.method == _INITIALIZED


def cancelled_id(message: Message) -> Id | None:
    """Return the id of the request that this notification cancels, or None."""
    if isinstance(message, Notification) and message.method == "notifications/cancelled":
        id: Id = message.params["requestId"]
        return id
    return None


def _revision_to_open(message: Request) -> Revision:
    """Return the revision in which this request opens the session."""
    params = message.params
    return REVISIONS[params["protocolVersion"] if "protocolVersion" in params else params["_meta"][META_VERSION]]


def _operation_of(exchange: Exchange) -> str:
    """Return a name of the operation for the OAuth client: an operation may need scopes of its own."""
    message = exchange.message
    if not isinstance(message, Request):
        return exchange.method
    return f"{message.method} {message.params.get('name', message.params.get('uri', ''))}"


def _repeatable(message: Message | None) -> bool:
    return not isinstance(message, Request) or message.method in _REPEATABLE


async def drain(reply: HttpReply) -> None:
    """Read the rest of the reply without using it, so that the connection can be used again."""
    with trio.move_on_after(_DRAIN_SECONDS), suppress(ReplyBroken):
        while await reply.receive():
            pass


def closed_here() -> SessionClosed:
    return SessionClosed("the connection was closed by this side")


def _refusal(message: Message | None, verdict: Challenged, where: str, advice: str = "") -> Unauthorized:
    why = f"{name_of(message)} was refused by {where}: {verdict.why}{advice}"
    return Unauthorized(why, verdict.status, verdict.challenge)


_AUTH = "use the option auth to get a token by OAuth, or headers to send a token that you have"


def _error_of(message: Message | None, verdict: ReplyVerdict, where: str) -> McpError:
    what = name_of(message)
    if isinstance(verdict, Challenged):
        # A 403 without a challenge has another reason, such as the origin, or a user without access.
        wanted = verdict.status == 401 or verdict.challenge
        return _refusal(message, verdict, where, f"; {_AUTH}" if wanted else "")
    if isinstance(verdict, RefreshTools):
        error = verdict.error
        return HeadersRefused(RequestError(error.code, error.message, None if error.data is ABSENT else error.data))
    if isinstance(verdict, TrySse):
        return NeedsSse(f"{what} was refused with {verdict.why}; the server may use HTTP+SSE")
    assert isinstance(verdict, ReplyLost)
    # Without a status, HTTP worked but the message was invalid.
    if verdict.status is None:
        return RemoteProtocolError(f"{what} has no answer: {verdict.why}")
    return NoResponse(f"{what} has no answer: {verdict.why} ({where})", status=verdict.status)
