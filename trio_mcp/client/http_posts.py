"""What both kinds of HTTP have in common: a POST for each message, and what becomes of it.

Whoever waits for the answer to a request carries it there and back in its own task.  Everything else has a task of its
own: what nobody waits for, and a request whose caller may be busy with its progress when there is more to be heard.

What a reply means is decided in `core.http_client`; here it is done:

| The verdict | What happens |
|---|---|
| an answer | it is heard |
| TryInitialize | the opening goes on as with a legacy server |
| TryVersion | its error is heard: the opening knows what to make of it, and later it is an error like any |
| TrySse | the link is lost by `NeedsSse` |
| SessionGone | the link is lost by `SessionLost`; what has not run is told apart from what may have |
| RetryAfter | the same is sent once more, if that is no longer off than `PATIENCE` |
| Redirected | the same is sent there, up to five times in a row |
| Challenged | with the option `auth`, the same is sent with what is wanted, once that could be got |
| RefreshTools, Challenged, Failed | the request fails with an error of its own |

A request that cannot be answered any more fails at once, alone, and with the cause chained; while the session is being
opened it takes the link with it.  An answer that does not get through is sent again for a minute, since the server and
a caller of ours both wait for it; then the session is lost.  So is ``notifications/initialized``, without which the
server says nothing by itself.  What else cannot be told the server (another notification, an answer that it refuses) is
a mistake that is reported.  So nothing here needs a timeout: a connection that ends is seen,
and how long a server that is there may think is for the scope of whoever asked.

Messages overtake each other, but for one rule: until the server has taken ``notifications/initialized`` nothing goes
that may not precede it, because servers judge in order of arrival.

A server may ask faster than it takes the answers.  So only `_ANSWERS` of them are on their way at once; while
`Limits.outgoing` others wait, its streams are not read.
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
from trio_mcp.core.jsonrpc import (
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
from trio_mcp.core.outcomes import PeerMistake
from trio_mcp.core.revisions import META_VERSION, REVISIONS, Revision
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import Credentials, TokenSource

__all__ = [
    "ACKNOWLEDGED", "PATIENCE", "InFlight", "Listen", "NeedsSse", "NoResponse", "PostTransport", "Unauthorized",
    "closed_here", "drain", "name_of",
]  # fmt: skip

PATIENCE = 60.0
"""The longest Retry-After, in seconds, that is waited for.  Beyond it the request fails at once, and says how long."""

ACKNOWLEDGED = 30.0
"""Seconds in which a server has to say to what is no request whether it takes it, or when to try again: nobody's scope
bounds it, and calls may wait for it."""

_MOVES = 5  # redirects in a row: a URL that was moved has one or two of them, a loop has no end
_LEFTOVERS = 1.0  # seconds for the end of a reply that has said all, so that its connection can be used again
_ANSWERS = 32  # on their way to the server at once, each on a connection
# Seconds from one attempt to give an answer to the next: a server that restarts has a minute.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
_BROKEN = 3  # attempts to end the handshake that the server may break off
_BUSY = frozenset({429, 502, 503, 504})  # of a server, or of a proxy before it, that may do better later
_GRACE = 1.0  # seconds for requests that were sent to a lost session to be refused like the first of them

# What may go out a second time if the server closed the connection as it was sent: whatever changes nothing, or comes
# to the same if it is done twice.  A tool may do anything.
_REPEATABLE = frozenset(
    {
        *("initialize", "server/discover", "ping", "tools/list", "prompts/list", "prompts/get", "completion/complete"),
        *("resources/list", "resources/templates/list", "resources/read", "resources/subscribe"),
        *("resources/unsubscribe", "logging/setLevel", "subscriptions/listen"),
    }
)
_OPENING = frozenset({"initialize", "server/discover"})
_INITIALIZED = "notifications/initialized"
_OURS = frozenset(
    each.lower() for each in ("Accept", "Content-Type", SESSION_ID, PROTOCOL_VERSION, METHOD, NAME, LAST_EVENT_ID)
)

Listen: TypeAlias = "Callable[[Exchange, HttpReply], Awaitable[None]]"


class NeedsSse(McpError):
    """The server does not take `initialize` here; it may be one of HTTP+SSE, which begins with a GET."""


@attrs.define(eq=False, repr=False)
class InFlight:
    """A message on its way; of a request, until it has its answer."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    sent: bool = False
    streams: bool = False  # the server has begun to answer
    awaited: bool = False  # it is carried by whoever waits for the answer
    answered: bool = False  # by another stream


class PostTransport:
    """What both kinds of HTTP have in common: a POST for each message."""

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
        self._id: str | None = None  # of the session; http-61: never shown
        self._proposed: Revision | None = None  # while nothing is agreed
        self._target: str | None = url  # of every POST
        self._flights: dict[Id, InFlight] = {}
        self._probe: Id | None = None  # the last request that was to open the session
        self._scopes: set[trio.CancelScope] = set()  # of everything that runs
        self._answers: deque[Message] = deque()  # that wait
        self._answering = 0  # tasks that carry them
        # Streams of cancelled calls that are read on, from the one that was silent for longest.
        self._left: dict[object, trio.CancelScope] = {}
        self._room = trio.lowlevel.ParkingLot()  # there are fewer of them
        self._withheld: set[Id] = set()  # requests that nobody has seen, so that nobody need be told of their end
        self._ready = trio.Event()  # the server has been told that the handshake is over, or there is none
        self._news = trio.lowlevel.ParkingLot()  # a reply has begun, or a message has landed
        self._over = False
        self._gone = False  # the server does not know the session any more
        caller.attach(self)

    # As a carrier.

    def wake(self) -> None:
        for message in self._outgoing():
            self._send(message)

    def send_request(self, id: Id) -> Awaitable[None] | None:
        mine: Awaitable[None] | None = None
        for message in self._outgoing():
            if not isinstance(message, Request) or message.id != id:
                self._send(message)
            elif (flight := self._begin(message)) is not None:
                flight.awaited = True
                mine = self._carry(message, flight)
        return mine

    def _send(self, message: Message) -> None:
        """Have it carried by a task of its own, or an answer by one of those that carry answers."""
        if not isinstance(message, Response | Error | Batch):
            if (flight := self._begin(message)) is not None:
                self._nursery.start_soon(self._carry, message, flight, name=f"to the server: {name_of(message)}")
            return
        self._answers.append(message)
        if self._answering < _ANSWERS:
            self._answering += 1
            self._nursery.start_soon(self._carry_answers, name="to the server: answers")

    async def _carry_answers(self) -> None:
        try:
            while self._answers:
                message = self._answers.popleft()
                if (flight := self._begin(message)) is not None:
                    await self._carry(message, flight)
                self._room.unpark_all()
        finally:
            self._answering -= 1

    async def _receive(self, reply: HttpReply, patience: float) -> bytes:
        """As `HttpReply.receive`; a silence of so many seconds is the end of the connection."""
        if patience == math.inf:
            return await reply.receive()
        with trio.move_on_after(patience):
            return await reply.receive()
        why = f"nothing came for {patience:g} seconds, in which there were keep-alives before: the line is dead"
        raise ReplyBroken(why, sent=True)

    async def _has_room(self) -> None:
        """Wait until no more answers wait than may; for whoever reads what the server says."""
        while len(self._answers) > self._limits.outgoing:
            await self._room.park()

    def _outgoing(self) -> list[Message]:
        """What can be sent now."""
        if self._target is None or self._over:
            return []
        if self._session.opened and not self._revision.handshake:
            self._ready.set()
        # cancel-01: a cancellation is for what is "believed to be still in-progress".
        messages: list[Message] = [
            each for each, _ in self._session.outgoing() if _cancelled(each) not in self._withheld
        ]
        self._withheld.clear()  # what is told of them is queued before `forget`
        return messages

    def request_done(self, id: Id) -> None:
        flight = self._flights.get(id)
        if flight is not None and flight.awaited:  # by another stream; whoever waits for it is not to wait for this one
            flight.answered = True
            self.request_abandoned(id)

    def request_abandoned(self, id: Id) -> None:
        flight = self._flights.pop(id, None)
        if flight is not None:
            if not flight.sent:
                self._withheld.add(id)
            flight.scope.cancel(reason="nobody waits for the answer")

    def abort(self, why: str) -> None:
        self._lose(lambda: SessionLost(True, why))

    def _begin(self, message: Message) -> InFlight | None:
        """What is to be carried; None if it cannot be any more."""
        if self._gone:
            if isinstance(message, Request):
                self._caller.fail(message.id, lambda: SessionLost(False))
            return None
        flight = InFlight()
        if isinstance(message, Request):
            if message.method in _OPENING:
                if self._probe is not None:
                    self.request_abandoned(self._probe)  # it took too long, and what it says now would be of no use
                self._probe, self._id = message.id, None
                self._proposed = _proposed(message)
            self._flights[message.id] = flight
        self._scopes.add(flight.scope)
        return flight

    # One message.

    async def _carry(self, message: Message, flight: InFlight) -> None:
        try:
            with flight.scope:
                if not self._ready.is_set():
                    await self._turn(message)
                flight.sent = True
                try:
                    verdict = await self._answer(self._exchange(message), flight)
                    if verdict is not None:
                        self._settle(message, verdict)
                except ReplyBroken as error:
                    why = NoResponse(f"{name_of(message)} has no answer: {error}", request_may_have_run=error.sent)
                    why.__cause__ = error
                    self._fail(message, why)
                except McpError as error:
                    self._fail(message, error)
                if _is_initialized(message):
                    self._ready.set()  # however it went: a server that refused it refuses what follows, or does not
        finally:
            self._scopes.discard(flight.scope)
            self._news.unpark_all()

    async def _turn(self, message: Message) -> None:
        """Wait until the server can make sense of it."""
        early = isinstance(message, Request | Notification) and message.method in (*_OPENING, _INITIALIZED)
        if not early and not isinstance(message, Response | Error | Batch):
            await self._ready.wait()

    def _exchange(self, message: Message | None, method: str = "POST", url: str | None = None) -> Exchange:
        assert self._target is not None
        return Exchange(
            url or self._target,
            self._revision,
            message,
            method,
            session=self._id,
            speaks=self._session.offer.revisions,
            probing=self._session.terms is None and not self._sse,
            sse=self._sse,
        )

    @property
    def _revision(self) -> Revision:
        terms = self._session.terms
        revision = self._proposed if terms is None else terms.revision
        assert revision is not None  # nothing is sent before something is proposed
        return revision

    async def _answer(self, exchange: Exchange, flight: InFlight) -> ReplyVerdict | None:
        """What came of it; None if that has been settled already."""
        return await self._ask(exchange)

    async def _ask(self, exchange: Exchange, listen: Listen | None = None, *, after: str = "") -> ReplyVerdict:
        """Send it, wherever that leads, and say what came back; a stream has been read by `listen` then."""
        moves = 0
        assert not isinstance(exchange.message, InvalidMessage)  # what is sent is what we have made
        body = b"" if exchange.message is None else encode(exchange.message)
        answers = isinstance(exchange.message, Response | Error)  # the server waits for it, and takes it but once
        # Without `initialized` a server asks nothing and tells of no change, for as long as the session lives.  But
        # some servers break off over it, or do not reply to it, and are fine otherwise.
        owed = answers or _is_initialized(exchange.message)
        broken = 0  # attempts that the server may have taken
        pauses = iter(_PAUSES)
        send = self._attempt if self._authorization is None else self._authorized
        while True:
            try:
                status, verdict = await send(exchange, body, listen, after)
            except (ReplyBroken, ConnectionFailed, NoResponse) as error:
                broken += not isinstance(error, ConnectionFailed)
                if not owed or (not answers and (broken > _BROKEN or isinstance(error, NoResponse))):
                    raise
                await self._pause(pauses, f"{name_of(exchange.message)} did not reach the server: {error}")
                continue
            if answers and status in _BUSY and not isinstance(verdict, RetryAfter):
                await self._pause(pauses, f"{name_of(exchange.message)} did not reach the server: HTTP {status}")
                continue
            if answers and broken and status in (400, 404, 409):  # the first attempt has got there
                return ReplyAccepted()
            if isinstance(verdict, Redirected):
                moves += 1
                if moves > _MOVES:
                    return ReplyLost(f"the server redirects more than {_MOVES} times")
                exchange = attrs.evolve(exchange, url=verdict.url)
            elif isinstance(verdict, RetryAfter) and exchange.method == "POST":
                if verdict.seconds > PATIENCE:
                    return ReplyLost(f"HTTP {status}: the server is busy for {verdict.seconds} seconds", status)
                await trio.sleep(verdict.seconds)
                exchange = attrs.evolve(exchange, again=True)
            else:
                return verdict

    async def _pause(self, pauses: Iterator[float], why: str) -> None:
        """Before what the server waits for is sent again; a caller of ours waits for the server.  After the last pause
        the session is lost, so that both hear of it."""
        pause = next(pauses, None)
        if pause is None:
            self._lose(lambda: SessionLost(True, why))
            pause = 0.0  # in which this is cancelled
        await trio.sleep(pause)

    async def _authorized(
        self, exchange: Exchange, body: bytes, listen: Listen | None, after: str
    ) -> tuple[int, ReplyVerdict]:
        """Send it with what the server wants to see, and again when there is something better to show."""
        assert self._authorization is not None
        credentials = self._authorization.request(exchange.method, exchange.url, _operation(exchange))
        while True:
            await credentials.get()
            status, verdict = await self._attempt(exchange, body, listen, after, credentials)
            if not credentials.refused:
                return status, verdict
            assert isinstance(verdict, Challenged)
            credentials.refusal = _refusal(exchange.message, verdict, url_without_secrets(self._url))

    async def _attempt(
        self,
        exchange: Exchange,
        body: bytes,
        listen: Listen | None,
        after: str,
        credentials: Credentials | None = None,
    ) -> tuple[int, ReplyVerdict]:
        if exchange.asked or exchange.method != "POST":
            return await self._once(exchange, body, listen, after, credentials)
        try:
            # Each attempt for itself: how long to wait before another is for the server to say.
            with trio.fail_after(ACKNOWLEDGED):
                return await self._once(exchange, body, listen, after, credentials)
        except trio.TooSlowError:
            raise NoResponse(f"no answer within {ACKNOWLEDGED:g} seconds") from None

    async def _once(
        self, exchange: Exchange, body: bytes, listen: Listen | None, after: str, credentials: Credentials | None
    ) -> tuple[int, ReplyVerdict]:
        fields, replayable = self._fields(exchange, after, credentials), _repeatable(exchange.message)
        async with self._pool.request(exchange.method, exchange.url, fields, body, replayable=replayable) as reply:
            if credentials is not None:
                credentials.replied(reply.status, reply.headers)
            verdict = await self._judge(exchange, reply, fields)
            if isinstance(verdict, Streaming):
                assert listen is not None  # or nothing would be answered by a stream
                await listen(exchange, reply)
        return reply.status, verdict

    async def _judge(self, exchange: Exchange, reply: HttpReply, sent: Fields) -> ReplyVerdict:
        body = b""
        good = 200 <= reply.status < 300
        if good and exchange.method == "POST" and (exchange.sse or not exchange.asked):
            await drain(reply)  # it says no more than its status
        elif not good or kind_of(reply.headers) != EVENT_STREAM:
            body = await reply.read(self._limits.message_bytes)
        if not good:
            body = without_credentials(body, sent)
        verdict = read_reply(exchange, reply.status, reply.headers, body, self._limits)
        if isinstance(verdict, AnswerReceived | Streaming) and verdict.session is not None:
            self._id = verdict.session
        return verdict

    def _fields(self, exchange: Exchange, after: str, credentials: Credentials | None) -> Fields:
        """The protocol's headers, and the caller's own beside them: a call that has some has all of its own."""
        message = exchange.message
        mirrors: Sequence[Mirror] = ()
        own: Fields = ()
        if isinstance(message, Request):
            own = self._caller.headers_of(message.id)
            if message.method == "tools/call":
                mirrors = self._mirrors(str(message.params.get("name")))
        protocol = request_headers(exchange, mirrors=mirrors, last_event_id=after)
        given = own or self._general()
        for name, _ in given:
            if name.lower() in _OURS or name.lower().startswith(PARAM_PREFIX.lower()):
                raise UsageError(f"the header {name} is the protocol's own; leave it out")
        return (*protocol, *(given if credentials is None else credentials.beside(given)))

    def _general(self) -> Fields:
        try:
            return self._headers()
        except UsageError:
            raise
        except Exception as error:  # it is a callback, and what it raises belongs to whoever asks
            raise UsageError("the function given as headers raised an exception") from error

    @contextmanager
    def _running(self, deadline: float = math.inf) -> Iterator[trio.CancelScope]:
        """For what runs until the session is over, or until then."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._scopes.add(scope)
            if self._over:
                scope.cancel(reason="the session is over")
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    # What became of it.

    def _settle(self, message: Message | None, verdict: ReplyVerdict) -> None:
        if isinstance(message, Request) and self._flights.pop(message.id, None) is None:
            return  # nobody waits for it any more
        id = message.id if isinstance(message, Request) else None
        if isinstance(verdict, AnswerReceived):
            self._caller.receive(verdict.message, trio.current_time(), about=id)
        elif isinstance(verdict, TryVersion):
            self._caller.receive(verdict.error, trio.current_time(), about=id)
        elif isinstance(verdict, TryInitialize):
            self._caller.fall_back(verdict.why)
        elif isinstance(verdict, SessionGone):
            self._forgotten(id)
        elif not isinstance(verdict, ReplyAccepted):
            self._lapse(message, _error(message, verdict, url_without_secrets(self._url)))

    def _fail(self, message: Message, error: McpError) -> None:
        if not isinstance(message, Request) or self._flights.pop(message.id, None) is not None:
            self._lapse(message, error)

    def _lapse(self, message: Message | None, error: McpError) -> None:
        if not isinstance(message, Request):
            # A Talk may want to tell its user: the server waits for this, perhaps.
            self._caller.handle_events([PeerMistake(f"{name_of(message)} did not get through to the server: {error}")])
        elif self._session.terms is not None:
            self._caller.fail(message.id, lambda: error)
        elif self._session.phase is Phase.PROBING and isinstance(error, RemoteProtocolError):
            self._caller.fall_back(str(error))  # whatever is no answer to the probe is said by no modern server
        else:
            self._lose(repeated(error))

    def _forgotten(self, id: Id | None) -> None:
        """http-58: the session is over.

        Whoever else has asked may be about to hear the same, and so that nothing has run; what is answered by a stream
        already, has begun to.
        """
        first, self._gone, self._id = not self._gone, True, None
        if id is not None:
            self._caller.fail(id, lambda: SessionLost(False))
        for other, flight in list(self._flights.items()):
            if not flight.sent:
                self.request_abandoned(other)
                self._caller.fail(other, lambda: SessionLost(False))
        if all(each.streams for each in self._flights.values()):
            self._lose(lambda: SessionLost(True))
        elif first:
            self._nursery.start_soon(self._end, name="the end of a session")

    async def _end(self) -> None:
        with trio.move_on_after(_GRACE):
            while not all(each.streams for each in self._flights.values()):
                await self._news.park()
        self._lose(lambda: SessionLost(True))

    def _lose(self, failure: Failure) -> None:
        """Nothing more is sent or heard."""
        self._over = True
        self._flights.clear()
        self._answers.clear()
        self._room.unpark_all()
        self._caller.connection_lost(failure)
        for scope in list(self._scopes):
            scope.cancel(reason="the session is over")

    async def aclose(self) -> None:
        """End everything in flight.  Never raises because of the server."""
        self._lose(closed_here)
        await trio.lowlevel.checkpoint()


def name_of(message: Message | None) -> str:
    return message.method if isinstance(message, Request | Notification) else "an answer"


def _is_initialized(message: Message | None) -> bool:
    return isinstance(message, Notification) and message.method == _INITIALIZED


def _cancelled(message: Message) -> Id | None:
    """The request of ours that this is the end of."""
    if isinstance(message, Notification) and message.method == "notifications/cancelled":
        id: Id = message.params["requestId"]
        return id
    return None


def _proposed(message: Request) -> Revision:
    """The revision in which a session is to be opened."""
    params = message.params
    return REVISIONS[params["protocolVersion"] if "protocolVersion" in params else params["_meta"][META_VERSION]]


def _operation(exchange: Exchange) -> str:
    """What it does, as far as that may take scopes of its own."""
    message = exchange.message
    if not isinstance(message, Request):
        return exchange.method
    return f"{message.method} {message.params.get('name', message.params.get('uri', ''))}"


def _repeatable(message: Message | None) -> bool:
    return not isinstance(message, Request) or message.method in _REPEATABLE


async def drain(reply: HttpReply) -> None:
    """Read what may follow, though nobody needs it, so that the connection can be used again."""
    with trio.move_on_after(_LEFTOVERS), suppress(ReplyBroken):
        while await reply.receive():
            pass


def closed_here() -> SessionClosed:
    return SessionClosed("the connection was closed from this side")


def _refusal(message: Message | None, verdict: Challenged, where: str, advice: str = "") -> Unauthorized:
    why = f"{name_of(message)} was refused by {where}: {verdict.why}{advice}"
    return Unauthorized(why, verdict.status, verdict.challenge)


_AUTH = "the option auth gets tokens by OAuth, and headers takes an Authorization that you have"


def _error(message: Message | None, verdict: ReplyVerdict, where: str) -> McpError:
    what = name_of(message)
    if isinstance(verdict, Challenged):
        # 403 without a challenge is about something else: an origin, or who is known well enough.
        wanted = verdict.status == 401 or verdict.challenge
        return _refusal(message, verdict, where, f"; {_AUTH}" if wanted else "")
    if isinstance(verdict, RefreshTools):
        error = verdict.error
        return HeadersRefused(RequestError(error.code, error.message, None if error.data is ABSENT else error.data))
    if isinstance(verdict, TrySse):
        return NeedsSse(f"{what} was refused with {verdict.why}; the server may be one of HTTP+SSE")
    assert isinstance(verdict, ReplyLost)
    # Without a status it is not HTTP that failed, but what was said by it.
    if verdict.status is None:
        return RemoteProtocolError(f"{what} has no answer: {verdict.why}")
    return NoResponse(f"{what} has no answer: {verdict.why} ({where})", status=verdict.status)
