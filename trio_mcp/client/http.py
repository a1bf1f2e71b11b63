"""Sessions over HTTP: one POST for each message, and how the messages of the server are received.

The task that waits for an answer also sends its request and reads the reply.  Other messages have tasks of their own:
those without a waiting task, and requests whose caller may be busy with progress reports.  `core.http.client_rules`
decides the meaning of a reply; this file acts on it:

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

Streamable HTTP (`HttpLink`): each POST has its own answer, as a body or as a stream.  Messages on the stream are
processed as they come; nothing more is read after the answer.  If a stream of the legacy era breaks before its answer,
it is resumed as `StreamResumption` says.  In the modern era a broken stream ends its request, and closing the stream
from here cancels it.  In the legacy era one more stream carries messages that belong to no request.  When a call of the
legacy era is cancelled, its stream is still read for a while: a gateway may use it for messages of other requests, or
of none.

HTTP+SSE of 2024-11-05 (`SseLink`): one stream carries all messages of the server, and the reply to a POST only says if
the message was accepted.

A stream that has sent keep-alives counts as broken after a silence of three of their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import attrs
import trio

from trio_mcp.client.session import (
    ClientSession,
    HeadersRefused,
    NoResponse,
    ServerMessageHandler,
    SessionLost,
    Unauthorized,
)
from trio_mcp.core.errors import (
    ConnectionFailed,
    McpError,
    RemoteProtocolError,
    SessionClosed,
    UsageError,
)
from trio_mcp.core.http import client_rules as rules
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
from trio_mcp.core.http.sse import EventReader, Oversized, SseEvent
from trio_mcp.core.messages import (
    PROGRESS,
    Batch,
    Error,
    Id,
    InvalidMessage,
    Message,
    Notification,
    Request,
    Response,
    decode,
    encode,
)
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.opening import ClientProtocol, Phase
from trio_mcp.core.revisions import LEGACY, META_VERSION, REVISIONS, Revision
from trio_mcp.core.shares import weight
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import Credentials, TokenSource

__all__ = ["ACKNOWLEDGE_TIMEOUT", "AUTH_ADVICE", "ENDPOINT", "MAX_RETRY_AFTER", "HttpLink", "NeedsSse", "SseLink"]

MAX_RETRY_AFTER = 60.0
"""The longest Retry-After in seconds that is waited for.  If it is longer, the request fails at once, and the error has
the time."""

ACKNOWLEDGE_TIMEOUT = 30.0
"""Seconds that a server may take to accept a notification or an answer, or to say when to retry: no caller's scope
limits this, and calls may wait for it."""

ENDPOINT = 10.0
"""Seconds for the first event of an HTTP+SSE stream: another kind of stream may never send one."""

_MAX_REDIRECTS = 5  # redirects in a row: a moved URL has one or two, a loop has no end
_DRAIN_SECONDS = 1.0  # seconds to read the rest of a complete reply, so that its connection can be used again
_LAST_CANCELLATIONS = 1.0  # seconds for the last cancellations of a session
_DELETE_TIMEOUT = 2.0  # seconds for its DELETE, which follows them
_ANSWER_TASKS = 32  # answers that are sent at once, each on a connection
# Seconds between attempts to send an answer: a server that restarts has a minute.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
# Attempts to send `notifications/initialized` if the server breaks the connection or does not reply.  They share the
# time for a reply, because the calls of the session wait for it, and one connection may be dead.
_INITIALIZED_ATTEMPTS = 4
# The server, or a proxy before it, may accept the message later; after 408 it has waited too long for the whole of it.
_BUSY = frozenset({408, 429, 502, 503, 504})
_GONE_SECONDS = 1.0  # seconds for other requests to a lost session to be refused, too

# The most streams of cancelled calls that are still read, and the limits of each in seconds: without a message about
# another request, and in all.  Each is a connection, which the server may keep open because it does not answer
# cancelled calls.
_MAX_ABANDONED = 8
_ABANDONED_SILENT, _ABANDONED_TOTAL = 300.0, 3600.0

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
_EARLY = _OPENING | {_INITIALIZED}  # these may precede the end of the handshake
_RESERVED = frozenset(
    each.lower() for each in ("Accept", "Content-Type", SESSION_ID, PROTOCOL_VERSION, METHOD, NAME, LAST_EVENT_ID)
)
_CLOSED_HERE = "the connection was closed by this side"
AUTH_ADVICE = "use the option auth to get a token by OAuth, or headers to send a token that you have"


class NeedsSse(McpError):
    """The server refuses `initialize` at this URL.  It may be an HTTP+SSE server, whose sessions begin with a GET."""


@attrs.define(eq=False, repr=False)
class _InFlight:
    """A message that is being sent; for a request, until it has its answer."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    sent: bool = False
    streaming: bool = False  # the response is a stream that has begun
    answered: bool = False  # the answer came on another stream


@attrs.define(eq=False, repr=False)
class _Insistence:
    """The attempts to send a message that must arrive."""

    pauses: Iterator[float] = attrs.field(factory=lambda: iter(_PAUSES))
    broken: int = 0  # attempts that the server may have received; of `initialized` also those that it was too busy for


@attrs.define(eq=False, repr=False)
class _ResumedStream:
    """An event stream, over all its connections."""

    exchange: rules.Exchange  # the POST that it answers, or the GET for messages outside of requests
    resumption: rules.StreamResumption
    flight: _InFlight | None = None  # the request that it answers
    requested: trio.Event = attrs.field(factory=trio.Event)  # set when the first attempt to open it has ended
    opened: bool = False
    attempts: int = 0  # number of connections by GET
    seconds_open: float = 0  # duration of the last connection
    done: bool = False  # its answer has come
    reader: EventReader = attrs.field(init=False)  # of the last connection
    keep_alives: rules.KeepAlives = attrs.field(factory=rules.KeepAlives)  # of the last connection
    until: float = 0  # latest time to read it, after its call was cancelled
    error: McpError | None = None  # the error of the last connection, if it broke


class HttpLink(ClientSession):
    """A session over Streamable HTTP, in both eras.

    Its tasks run in `nursery`, which must outlast the session.  `headers` returns the headers of the program for each
    request, and raises only `McpError`; `mirrors` returns the arguments of a tool that are sent in headers, too.
    """

    message_size = 0
    _sse = False

    def __init__(
        self,
        session: ClientProtocol,
        handler: ServerMessageHandler,
        pool: HttpPool,
        url: str,
        *,
        nursery: trio.Nursery,
        headers: Callable[[], Fields],
        mirrors: Callable[[str], Sequence[Mirror]] = lambda tool: (),
        authorization: TokenSource | None = None,
    ) -> None:
        super().__init__(session, handler, nursery=nursery)
        self._limits = session.limits
        self._pool = pool
        self._url = url
        self._headers = headers
        self._mirrors = mirrors
        self._authorization = authorization
        self._session_id: str | None = None  # http-61: never shown
        self._proposed_revision: Revision | None = None  # until a revision is agreed
        # The URL for POSTs.  sse-14: nothing is sent before the server has sent it.
        self._target: str | None = None if self._sse else url
        self._in_flight: dict[Id, _InFlight] = {}
        self._abandoned: dict[Id, _InFlight] = {}  # cancelled requests whose POST must arrive before the cancellation
        self._probe: Id | None = None  # the last request that opens the session
        self._scopes: set[trio.CancelScope] = set()  # scopes of all tasks
        self._answer_slots = trio.Semaphore(_ANSWER_TASKS)
        # Streams of cancelled calls that are still read; the first one was silent for longest.
        self._abandoned_streams: dict[object, trio.CancelScope] = {}
        self._never_sent: set[Id] = set()  # cancelled before they were sent, so the server need not be told
        self._handshake_done = trio.Event()  # the server knows that the handshake is complete, or there is none
        self._changed = trio.lowlevel.ParkingLot()  # woken when a stream begins or a message is done
        self._cancelling: set[trio.CancelScope] = set()  # scopes of cancellations, and of some that have been sent
        self._closed = False
        self._session_gone = False  # the server has forgotten the session

    # Transport

    def wake(self) -> None:
        for message in self._outgoing():
            self._start(message)

    def send_request(self, id: Id) -> Awaitable[None] | None:
        sending: Awaitable[None] | None = None
        for message in self._outgoing():
            if not isinstance(message, Request) or message.id != id:
                self._start(message)
            elif (flight := self._begin(message)) is not None:
                sending = self._post(message, flight)
        return sending

    def _outgoing(self) -> list[Message]:
        """Return the messages that can be sent now."""
        if self._target is None or self._closed:
            return []
        if self.session.opened and not self._revision.handshake:
            self._handshake_done.set()
        # cancel-01: only requests "believed to be still in-progress" are cancelled.
        messages: list[Message] = [
            each for each, _ in self.session.outgoing() if _cancelled_id(each) not in self._never_sent
        ]
        self._never_sent.clear()  # their notifications are queued before `request_abandoned`
        return messages

    def _start(self, message: Message) -> None:
        """Send a message in a task of its own."""
        if (flight := self._begin(message)) is not None:
            if _cancelled_id(message) is not None:
                self._cancelling &= self._scopes
                self._cancelling.add(flight.scope)
            post = self._post_answer if isinstance(message, Response | Error | Batch) else self._post
            self._nursery.start_soon(post, message, flight, name=f"to the server: {_name_of(message)}")

    async def _post_answer(self, message: Message, flight: _InFlight) -> None:
        with self._running():
            async with self._answer_slots:
                await self._post(message, flight)

    def _begin(self, message: Message) -> _InFlight | None:
        """Return the state for sending a message, or None if it cannot be sent any more."""
        if self._session_gone:
            if isinstance(message, Request):
                self.fail(message.id, SessionLost(False))
            return None
        flight = _InFlight()
        if isinstance(message, Request):
            if message.method in _OPENING:
                if self._probe is not None:
                    self.request_abandoned(self._probe)  # it took too long, and its answer is of no use now
                params = message.params
                name = params["protocolVersion"] if "protocolVersion" in params else params["_meta"][META_VERSION]
                self._probe, self._session_id, self._proposed_revision = message.id, None, REVISIONS[name]
            self._in_flight[message.id] = flight
        self._scopes.add(flight.scope)
        return flight

    def request_done(self, id: Id) -> None:
        flight = self._in_flight.get(id)
        if flight is not None:  # answered on another stream: end the wait for this one
            flight.answered = True
            self.request_abandoned(id)

    def request_abandoned(self, id: Id) -> None:
        flight = self._in_flight.pop(id, None)
        if flight is None:
            return
        if not flight.sent:
            self._never_sent.add(id)
        elif self._sse:
            # On another connection a cancellation could arrive before its request, and would have no effect.
            flight.scope.deadline = trio.current_time() + ACKNOWLEDGE_TIMEOUT
            self._abandoned[id] = flight
            return
        flight.scope.cancel(reason="no task waits for the answer")

    def abort(self, why: str) -> None:
        self._close(SessionLost(True, why))

    # Sending one message

    async def _post(self, message: Message, flight: _InFlight) -> None:
        id = message.id if isinstance(message, Request) else None
        try:
            with flight.scope:
                if (request := self._abandoned.pop(_cancelled_id(message), None)) is not None:  # type: ignore[arg-type]
                    while request.scope in self._scopes:
                        await self._changed.park()
                if not self._handshake_done.is_set():
                    early = not isinstance(message, Request | Notification) or message.method in _EARLY
                    if not early:
                        await self._handshake_done.wait()
                flight.sent = True
                try:
                    verdict = await self._converse(self._exchange(message), flight)
                    if verdict is not None:
                        self._handle_verdict(message, verdict)
                except McpError as error:
                    why = error
                    if isinstance(error, ReplyBroken):
                        text = f"{_name_of(message)} has no answer: {error}"
                        why = NoResponse(text, request_may_have_run=error.sent)
                        why.__cause__ = error
                    if id is None or self._in_flight.pop(id, None) is not None:
                        self._report_failure(message, why)
                if _is_initialized(message):
                    self._handshake_done.set()  # with any result: a server that refused it decides about later messages
        finally:
            self._scopes.discard(flight.scope)
            self._changed.unpark_all()

    async def _converse(self, exchange: rules.Exchange, flight: _InFlight) -> rules.ReplyVerdict | None:
        """Send a message and return its verdict, or None if the verdict was handled already."""
        verdict, exchange, reply = await self._send(exchange)
        if not isinstance(verdict, rules.Streaming):
            return verdict
        stream = _ResumedStream(exchange, rules.StreamResumption(exchange.revision), flight)
        flight.streaming = True
        self._changed.unpark_all()
        await self._read_connection(stream, reply)
        if not stream.done:
            verdict = await self._resume(stream, stream.resumption.ended(stream.seconds_open))
        if stream.done:
            return None
        if isinstance(verdict, rules.SessionGone):
            self._handle_session_gone(None)  # without the id of this request, because it may have run
            return None
        if isinstance(verdict, rules.ReplyLost) and stream.error is not None:
            raise NoResponse(f"{_name_of(exchange.message)} has no answer: {verdict.why}") from stream.error
        return verdict

    def _exchange(self, message: Message | None, method: str = "POST", url: str | None = None) -> rules.Exchange:
        assert self._target is not None
        return rules.Exchange(
            url or self._target,
            self._revision,
            message,
            method,
            session=self._session_id,
            speaks=self.session.offer.revisions,
            probing=self.session.terms is None and not self._sse,
            sse=self._sse,
        )

    @property
    def _revision(self) -> Revision:
        terms = self.session.terms
        revision = self._proposed_revision if terms is None else terms.revision
        assert revision is not None  # the first message proposes a revision
        return revision

    async def _send(
        self,
        exchange: rules.Exchange,
        *,
        after: str = "",
        opening: trio.CancelScope | None = None,
    ) -> tuple[rules.ReplyVerdict, rules.Exchange, HttpReply]:
        """Send an HTTP request, with redirects, retries and better tokens.

        Returns the verdict, and the last request and its reply.  If the verdict is `Streaming`, enter the block of the
        reply at once and read it.  `opening` is cancelled if a stream does not begin within `ENDPOINT` seconds; its
        reader takes the deadline away.
        """
        message = exchange.message
        assert not isinstance(message, InvalidMessage)  # messages to send are made here
        body = b"" if message is None else encode(message)
        must_arrive = isinstance(message, Response | Error | Batch) or _is_initialized(message)
        insistence = _Insistence() if must_arrive else None
        redirects = 0
        while True:
            if insistence is None:
                verdict, reply = await self._attempt(exchange, body, after, opening)
            else:
                verdict, reply = await self._insist(exchange, body, insistence)
            match verdict:
                case rules.Redirected(url):
                    redirects += 1
                    if redirects > _MAX_REDIRECTS:
                        why = f"the server redirects more than {_MAX_REDIRECTS} times"
                        return rules.ReplyLost(why), exchange, reply
                    exchange = attrs.evolve(exchange, url=url)
                case rules.RetryAfter(seconds) if exchange.method == "POST":
                    if seconds > MAX_RETRY_AFTER:
                        why = f"HTTP {reply.status}: the server is busy for {seconds} seconds"
                        return rules.ReplyLost(why, reply.status), exchange, reply
                    self._end_abandoned_stream("the server is busy, perhaps with too many connections")
                    await trio.sleep(seconds)
                    exchange = attrs.evolve(exchange, waited=True)
                case _:
                    return verdict, exchange, reply

    async def _insist(
        self, exchange: rules.Exchange, body: bytes, tries: _Insistence
    ) -> tuple[rules.ReplyVerdict, HttpReply]:
        """Send a message that must arrive, again and again for a minute.

        The server waits for an answer, and accepts it once.  Without `initialized` a server sends no questions and no
        changes in this session; but some servers break the connection over it, or do not reply, and work otherwise.
        An attempt without a reply has waited already, so no pause follows it.
        """
        answers = not _is_initialized(exchange.message)
        while True:
            last = not answers and tries.broken + 1 >= _INITIALIZED_ATTEMPTS
            try:
                verdict, reply = await self._attempt(exchange, body, "", None)
                if last or reply.status not in _BUSY or isinstance(verdict, rules.RetryAfter):
                    received = answers and tries.broken and reply.status in (400, 404, 409)  # an earlier attempt
                    return rules.ReplyAccepted() if received else verdict, reply
                tries.broken += not answers
                lost, silent = f"HTTP {reply.status}", False
            except (ReplyBroken, ConnectionFailed, NoResponse, AuthorizationFailed) as error:
                if isinstance(error, AuthorizationFailed) and not error.passes:
                    raise
                sent = not isinstance(error, ConnectionFailed | AuthorizationFailed)
                if last and sent:
                    raise
                tries.broken += sent
                lost, silent = str(error), not answers and isinstance(error, NoResponse)
            if (pause := next(tries.pauses, None)) is None:  # the server and the caller here must learn it
                self._close(SessionLost(True, f"{_name_of(exchange.message)} did not reach the server: {lost}"))
            await trio.sleep(0.0 if silent else pause or 0.0)  # at least a checkpoint, at which this may be cancelled

    def _end_abandoned_stream(self, why: str) -> None:
        """End the stream of a cancelled call that was silent for longest, if there is one."""
        if self._abandoned_streams:
            oldest = next(iter(self._abandoned_streams))
            self._abandoned_streams.pop(oldest).cancel(reason=why)

    async def _attempt(
        self, exchange: rules.Exchange, body: bytes, after: str, opening: trio.CancelScope | None
    ) -> tuple[rules.ReplyVerdict, HttpReply]:
        """Send the request once; with the option `auth` with a token, and again if a better token can be had."""
        if self._authorization is None and exchange.asked:
            return await self._send_once(exchange, body, after, None)
        credentials: Credentials | None = None
        if self._authorization is not None:
            operation = exchange.method  # an operation may need scopes of its own
            if isinstance(request := exchange.message, Request):
                operation = f"{request.method} {request.params.get('name', request.params.get('uri', ''))}"
            credentials = self._authorization.credentials(exchange.method, exchange.url, operation)
        while True:
            if credentials is not None:
                await credentials.get()
            seconds = ACKNOWLEDGE_TIMEOUT if exchange.method == "POST" and not exchange.asked else math.inf
            if _is_initialized(exchange.message):
                seconds /= _INITIALIZED_ATTEMPTS
            if opening is not None:  # not before: the user may need longer to allow access
                opening.deadline = trio.current_time() + ENDPOINT
            with trio.move_on_after(seconds) as waiting:
                verdict, reply = await self._send_once(exchange, body, after, credentials)
            if waiting.cancelled_caught:
                raise NoResponse(f"no answer within {seconds:g} seconds")
            if opening is not None and not isinstance(verdict, rules.Streaming):
                opening.deadline = math.inf
            if credentials is None or not credentials.refused:
                return verdict, reply
            assert isinstance(verdict, rules.Challenged)
            credentials.refusal = self._refusal(exchange.message, verdict)

    async def _send_once(
        self, exchange: rules.Exchange, body: bytes, after: str, credentials: Credentials | None
    ) -> tuple[rules.ReplyVerdict, HttpReply]:
        fields, message = self._fields(exchange, after, credentials), exchange.message
        replayable = not isinstance(message, Request) or message.method in _REPEATABLE
        async with self._pool.request(exchange.method, exchange.url, fields, body, replayable=replayable) as reply:
            status = reply.status
            if credentials is not None:
                credentials.replied(status, reply.headers)
            content = b""
            success = 200 <= status < 300
            if success and exchange.method == "POST" and (exchange.sse or not exchange.asked):
                await _drain(reply)  # only the status matters
            elif not success or rules.kind_of(reply.headers) != EVENT_STREAM:
                content = await reply.read(self._limits.message_bytes)
            if not success or exchange.method == "GET":  # then it is no message, and an error may show it
                content = without_credentials(content, fields)
            verdict = rules.read_reply(exchange, status, reply.headers, content, self._limits)
            if isinstance(verdict, rules.ReplyLost) and success:  # it quotes the body that is no message
                verdict = attrs.evolve(verdict, why=without_credentials(verdict.why.encode(), fields).decode())
            if isinstance(verdict, rules.AnswerReceived | rules.Streaming) and verdict.session is not None:
                self._session_id = verdict.session
            if isinstance(verdict, rules.Streaming):
                reply.leave()  # the block in which it is read is entered before the next checkpoint
        return verdict, reply

    def _fields(self, exchange: rules.Exchange, after: str, credentials: Credentials | None) -> Fields:
        """Return the headers of the protocol and those of the program.

        Headers that were given for a call already contain those of the client.
        """
        message = exchange.message
        mirrors: Sequence[Mirror] = ()
        given: Fields = ()
        if isinstance(message, Request):
            given = self._pending[message.id].headers if message.id in self._pending else ()
            if message.method == "tools/call":
                mirrors = self._mirrors(str(message.params.get("name")))
        protocol = rules.request_headers(
            exchange, mirrors=mirrors, last_event_id=after, mcp_names=self.session.offer.mcp_names
        )
        given = given or self._headers()
        for name, _ in given:
            if name.lower() in _RESERVED or name.lower().startswith(PARAM_PREFIX.lower()):
                raise UsageError(f"the header {name} is set by the protocol; leave it out")
        return (*protocol, *(given if credentials is None else credentials.beside(given)))

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

    async def _receive_events(
        self, reply: HttpReply, reader: EventReader, keep_alives: rules.KeepAlives
    ) -> Sequence[SseEvent | Oversized] | None:
        """Return the next events of a stream, or None at its end.

        Raises ReplyBroken if no data came for longer than the keep-alives allow.
        """
        while self._answer_slots.statistics().tasks_waiting > self._limits.outgoing:
            await self._changed.park()
        silence = keep_alives.timeout
        if silence == math.inf:
            data = await reply.receive()
        else:
            with trio.move_on_after(silence) as waiting:
                data = await reply.receive()
            if waiting.cancelled_caught:
                why = f"no data came for {silence:g} seconds, but keep-alives came before: the connection is dead"
                raise ReplyBroken(why, sent=True)
        if not data:
            return None
        comments = reader.comments
        events = reader.feed(data)
        alone = all(
            isinstance(each, SseEvent)
            and each.id is None
            and (not each.data or each.event not in ("message", "endpoint"))
            for each in events
        )
        commented = reader.comments > comments
        keep_alives.received(trio.current_time(), keep_alive=alone and (commented or bool(events)))
        return events

    def _decode(self, event: SseEvent) -> Message:
        message = decode(event.data, self._limits)
        self.message_size = weight(event.data, self._limits.values, message)
        return message

    # Outcomes

    def _deliver(self, message: Message, about: Id | None) -> None:
        self.receive(message, trio.current_time(), about)
        if self.session.queued:
            self.wake()

    def _handle_verdict(self, message: Message | None, verdict: rules.ReplyVerdict) -> None:
        id = message.id if isinstance(message, Request) else None
        if id is not None and self._in_flight.pop(id, None) is None:
            return  # no task waits for it any more
        match verdict:
            case rules.AnswerReceived(answer) | rules.TryVersion(_, answer):
                self._deliver(answer, id)
            case rules.TryInitialize(why):
                self.fall_back(why)
            case rules.SessionGone():
                self._handle_session_gone(id)
            case rules.Challenged(status, challenge):
                # A 403 without a challenge has another reason, such as the origin, or a user without access.
                advice = f"; {AUTH_ADVICE}" if status == 401 or challenge else ""
                self._report_failure(message, self._refusal(message, verdict, advice))
            case rules.RefreshTools(answer):
                self._report_failure(message, HeadersRefused(answer.exception))
            case rules.TrySse(why):
                why = f"{_name_of(message)} was refused with {why}; the server may use HTTP+SSE"
                self._report_failure(message, NeedsSse(why))
            case rules.ReplyLost(why, status):
                error: McpError = RemoteProtocolError(f"{_name_of(message)} has no answer: {why}")
                if status is not None:  # otherwise HTTP worked, but the message was invalid
                    where = rules.url_without_secrets(self._url)
                    error = NoResponse(f"{_name_of(message)} has no answer: {why} ({where})", status=status)
                self._report_failure(message, error)
            case _:
                assert isinstance(verdict, rules.ReplyAccepted)

    def _refusal(self, message: Message | None, verdict: rules.Challenged, advice: str = "") -> Unauthorized:
        why = f"{_name_of(message)} was refused by {rules.url_without_secrets(self._url)}: {verdict.why}{advice}"
        return Unauthorized(why, verdict.status, verdict.challenge)

    def _report_failure(self, message: Message | None, error: McpError) -> None:
        if not isinstance(message, Request):
            # The program may want to report it: the server may be waiting for this message.
            self._handler.mistake(f"{_name_of(message)} did not reach the server: {error}")
        elif self.session.terms is not None:
            self.fail(message.id, error)
        elif self.session.phase is Phase.PROBING and isinstance(error, RemoteProtocolError):
            self.fall_back(str(error))  # a modern server does not answer the probe like this
        else:
            self._close(error)

    def _handle_session_gone(self, id: Id | None) -> None:
        """http-58: the server has forgotten the session.

        Other requests in flight probably get the same reply soon, which proves that they have not run.  Requests with a
        response stream may have run.
        """
        first, self._session_gone, self._session_id = not self._session_gone, True, None
        if id is not None:
            self.fail(id, SessionLost(False))
        for other, flight in list(self._in_flight.items()):
            if not flight.sent:
                self.request_abandoned(other)
                self.fail(other, SessionLost(False))
        if all(each.streaming for each in self._in_flight.values()):
            self._close(SessionLost(True))
        elif first:

            async def end() -> None:
                with trio.move_on_after(_GONE_SECONDS):
                    while not all(each.streaming for each in self._in_flight.values()):
                        await self._changed.park()
                self._close(SessionLost(True))

            self._nursery.start_soon(end, name="the end of a session")

    def _close(self, failure: McpError) -> None:
        """Stop sending and receiving."""
        self._closed = True
        self._in_flight.clear()
        self.lose(failure)
        for scope in list(self._scopes):
            scope.cancel(reason="the session is over")

    async def aclose(self) -> None:
        """End all requests and tasks, and tell the server that the session is over (http-59).

        Never raises because of the server, and takes at most three seconds.
        """
        # First the cancellations: some servers end a session and go on with its calls.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_CANCELLATIONS):
            while self._cancelling & self._scopes:
                await self._changed.park()
        self._close(SessionClosed(_CLOSED_HERE))
        if self._session_id is not None:
            delete, self._session_id = self._exchange(None, "DELETE"), None
            deadline = trio.current_time() + _DELETE_TIMEOUT
            with trio.CancelScope(shield=True, deadline=deadline), suppress(McpError):
                await self._send(delete)
        await trio.lowlevel.checkpoint()

    # Receiving messages of the server

    async def run_event_stream(self, ready: trio.Event | None = None) -> None:
        """Receive the messages outside of requests, until the server has no stream for them or the session ends.

        For an open legacy session.  In the modern era there is no such stream: returns at once.  `ready` is set when
        the stream is open, or when it is known that it cannot be opened now.
        """
        ready = trio.Event() if ready is None else ready
        try:
            with self._running():
                if not self._revision.handshake:
                    return
                await self._handshake_done.wait()
                resumption = rules.StreamResumption(self._revision, standalone=True)
                stream = _ResumedStream(self._exchange(None, "GET"), resumption, requested=ready)
                try:
                    verdict = await self._resume(stream, rules.Reconnect(0, ""))
                except McpError as error:
                    verdict = rules.ReplyLost(str(error))
                if isinstance(verdict, rules.SessionGone):
                    if stream.opened:
                        self._handle_session_gone(None)
                        return
                    # A 404 to the first GET may only mean that the server has no event stream; a POST shows if the
                    # session is gone.
                    with trio.move_on_after(ACKNOWLEDGE_TIMEOUT), suppress(McpError):
                        await self.request("ping")
                    if self._session_gone:
                        return
                elif not isinstance(verdict, rules.NoStream):
                    self._handler.mistake(f"the event stream of the session is lost: {rules.reason(verdict)}")
                self.missed(for_good=True)
        finally:
            ready.set()

    async def _resume(self, stream: _ResumedStream, plan: rules.Reconnect | rules.ReplyLost) -> rules.ReplyVerdict:
        """Reconnect the stream until its answer has come, or until it cannot be resumed."""
        while isinstance(plan, rules.Reconnect):
            await trio.sleep(plan.seconds)
            stream.attempts += 1
            get = self._exchange(None, "GET", stream.exchange.url)
            try:
                with trio.CancelScope() as scope:
                    if stream.keep_alives.timeout < math.inf:
                        # Servers without keep-alives may send the response head only with the first event.
                        scope.deadline = trio.current_time() + max(stream.keep_alives.timeout, ACKNOWLEDGE_TIMEOUT)
                    verdict, _, reply = await self._send(get, after=plan.last_event_id)
                    scope.deadline = math.inf
                    if isinstance(verdict, rules.Streaming):
                        if (stream.attempts > 1 or reply.replayed) and not stream.resumption.last_event_id:
                            self.missed(for_good=False)  # the server has stored no messages since the last connection
                        await self._read_connection(stream, reply)
                if scope.cancelled_caught:
                    raise ReplyBroken("the server does not answer, but keep-alives came before", sent=True)
            except (ConnectionFailed, ReplyBroken, AuthorizationFailed) as error:
                if isinstance(error, AuthorizationFailed) and not error.passes:
                    raise
                stream.error = error
                plan = stream.resumption.ended()
                continue
            finally:
                stream.requested.set()
            if stream.done or isinstance(verdict, rules.SessionGone | rules.Challenged):
                return verdict
            if isinstance(verdict, rules.Streaming):
                plan = stream.resumption.ended(stream.seconds_open)
            elif isinstance(verdict, rules.NoStream) and stream.exchange.message is None:
                return verdict
            else:
                plan = stream.resumption.refused(verdict)
                busy = reply.status >= 400 and not isinstance(verdict, rules.NoStream)
                if busy and isinstance(plan, rules.ReplyLost):  # this was the last attempt
                    plan = attrs.evolve(plan, status=reply.status)
        return plan

    async def _read_connection(self, stream: _ResumedStream, reply: HttpReply) -> None:
        """Read one connection of the stream, to its end or to the answer."""
        stream.reader, stream.keep_alives = EventReader(self._limits.message_bytes), rules.KeepAlives()
        stream.opened, stream.error = True, None
        stream.requested.set()
        start = trio.current_time()
        async with reply:
            try:
                await self._read_events(stream, reply)
                # In a task: the call does not wait for the end of the stream.
                if stream.done and not reply.done and not self._closed:
                    self._nursery.start_soon(self._read_rest, reply.leave(), name="the end of a stream")
            except ReplyBroken as error:
                stream.error = error
            except trio.Cancelled:
                abandoned = stream.flight is not None and not stream.flight.answered
                if abandoned and self.session.opened and self._revision.handshake and not self._closed:
                    name = "the stream of a cancelled call"
                    self._nursery.start_soon(self._read_rest, reply.leave(), stream, name=name)
                raise
        stream.seconds_open = trio.current_time() - start

    async def _read_events(self, stream: _ResumedStream, reply: HttpReply) -> None:
        while not stream.done:
            events = await self._receive_events(reply, stream.reader, stream.keep_alives)
            if events is None:
                return
            stream.resumption.received(stream.reader, events)
            for event in events:
                if not stream.done:
                    self._handle_sse_event(stream, event)

    async def _read_rest(self, reply: HttpReply, stream: _ResumedStream | None = None) -> None:
        """Read a reply to its end after its request is over.

        `stream` is the stream of a cancelled request: receive the other messages on it.
        """
        with self._running() as scope:
            async with reply:
                if stream is not None:
                    stream.until = trio.current_time() + _ABANDONED_TOTAL
                    scope.deadline = trio.current_time() + _ABANDONED_SILENT
                    if len(self._abandoned_streams) == _MAX_ABANDONED:
                        self._end_abandoned_stream("too many streams of cancelled calls")
                    self._abandoned_streams[stream] = scope
                try:
                    with suppress(ReplyBroken):
                        if stream is not None:
                            await self._read_events(stream, reply)
                        await _drain(reply)
                finally:
                    self._abandoned_streams.pop(stream, None)

    def _handle_sse_event(self, stream: _ResumedStream, event: SseEvent | Oversized) -> None:
        exchange = stream.exchange
        if isinstance(event, Oversized):
            why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
            if exchange.message is None:
                self._handler.mistake(f"{why}; skipped")
            else:  # It is probably the answer; otherwise the caller might wait forever.
                stream.done = True
                self._handle_verdict(exchange.message, rules.ReplyLost(why))
            return
        if event.event != "message" or not event.data:
            return  # http-46: an event without a message, to resume from
        message = self._decode(event)
        # An error without an id can only be about the request of this stream.
        if exchange.asked and (exchange.answered_by(message) or (isinstance(message, Error) and message.id is None)):
            stream.done = True
            self._handle_verdict(exchange.message, rules.read_answer(exchange, message))
            return
        about = exchange.message.id if isinstance(exchange.message, Request) else None
        if stream in self._abandoned_streams:
            progress = (
                isinstance(message, Notification)
                and message.method == PROGRESS
                and message.params.get("progressToken") in (about, str(about))
            )
            if not progress:
                # Move it behind the others.
                self._abandoned_streams[stream] = scope = self._abandoned_streams.pop(stream)
                scope.deadline = min(trio.current_time() + _ABANDONED_SILENT, stream.until)
        self._deliver(message, about)


class SseLink(HttpLink):
    """A session over HTTP+SSE (2024-11-05): messages are sent by POST and received on one stream.

    Its session is one of `LinkKind.DUPLEX`: when the stream ends, all requests are lost, and they may have run.
    """

    _sse = True

    def send_request(self, id: Id) -> None:
        self.wake()  # the reply to a POST has no answer

    def request_done(self, id: Id) -> None:
        """Do nothing: the reply to the POST may still come, so that its connection can be used again."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the session until its stream ends; it is started when the server has sent the URL for POSTs.

        Before that it raises `Unauthorized`, `NoResponse`, `RemoteProtocolError`, and the errors of the pool.
        """
        verdict: rules.ReplyVerdict | None = None
        cause: McpError | None = None
        with self._running() as scope:
            try:
                get = rules.Exchange(self._url, LEGACY[0], method="GET", sse=True)
                verdict, get, reply = await self._send(get, opening=scope)
                if isinstance(verdict, rules.Streaming):
                    async with reply:
                        await self._read_session(get.url, reply, scope, task_status)
            except McpError as error:
                if self._target is None:
                    raise
                cause = error
        if self._target is None:
            if self._closed:
                raise SessionClosed(_CLOSED_HERE)
            if scope.cancelled_caught:
                raise RemoteProtocolError(f"no endpoint event came within {ENDPOINT:g} seconds")
            match verdict:
                case rules.Streaming():
                    raise RemoteProtocolError("the event stream ended before its endpoint event")
                case rules.Challenged(status, challenge, why):
                    raise Unauthorized(f"the event stream was refused: {why}", status, challenge)
            assert verdict is not None  # otherwise the request raised an error
            lost = verdict.status if isinstance(verdict, rules.ReplyLost) else None
            raise NoResponse(f"there is no event stream at this URL: {rules.reason(verdict)}", status=lost)
        how = "the server ended the event stream of the session"
        ended = SessionClosed(how if cause is None else f"the event stream of the session broke: {cause}")
        if self.session.terms is not None:
            ended = SessionLost(True, str(ended))  # a new session can be opened
        ended.__cause__ = cause
        self._close(ended)

    async def _read_session(
        self, url: str, reply: HttpReply, scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> None:
        reader, keep_alives = EventReader(self._limits.message_bytes), rules.KeepAlives()
        while (events := await self._receive_events(reply, reader, keep_alives)) is not None:
            for event in events:
                if self._target is None:
                    target = rules.read_endpoint(url, event)
                    if isinstance(target, rules.ReplyLost):
                        raise RemoteProtocolError(target.why)
                    self._target = target
                    scope.deadline = math.inf
                    task_status.started()
                    self.wake()
                elif isinstance(event, Oversized):
                    # It is unknown whose answer it was, and its caller would wait forever.
                    why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
                    raise RemoteProtocolError(why)
                elif event.event == "message" and event.data:
                    self._deliver(self._decode(event), None)


def _name_of(message: Message | None) -> str:
    return message.method if isinstance(message, Request | Notification) else "an answer"


def _is_initialized(message: Message | None) -> bool:
    return isinstance(message, Notification) and message.method == _INITIALIZED


def _cancelled_id(message: Message) -> Id | None:
    """Return the id of the request that this notification cancels, or None."""
    if isinstance(message, Notification) and message.method == "notifications/cancelled":
        id: Id = message.params["requestId"]
        return id
    return None


async def _drain(reply: HttpReply) -> None:
    """Read the rest of the reply without using it, so that the connection can be used again."""
    with trio.move_on_after(_DRAIN_SECONDS), suppress(ReplyBroken):
        while await reply.receive():
            pass
