"""Context: what a handler may do while it runs.

A handler runs once, from top to bottom, for one call of a client.  In the modern revision such a call may take several
requests, because a question to the client ends one and its answer comes with the next; a context belongs to the call
and always speaks for the request that is open now.  While none is (the client is thinking) there is nobody to tell of
progress, and nothing is sent.

Who is behind a request, its headers and its metadata are those of the request, never those of the connection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeVar, overload

import trio

from trio_mcp.core.errors import RequestError, SessionClosed, UsageError, shown
from trio_mcp.core.jsonrpc import PROGRESS, Id, Json, JsonObject, Request
from trio_mcp.core.oauth.principals import Principal
from trio_mcp.core.revisions import Role
from trio_mcp.core.session import ServerProtocol
from trio_mcp.core.shares import Account
from trio_mcp.core.terms import NOTHING, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_mcp.core.elicitation import Accepted, Declined, Dismissed
    from trio_mcp.core.models import CreateMessageResult, LogLevel, SamplingMessage
    from trio_mcp.server.parking import ParkedCall
    from trio_mcp.server.questions import ElicitUrl, Inquiry
    from trio_mcp.transport.outbox import Wire
    from trio_mcp.transport.paths import Roots

__all__ = ["LOG", "ClientError", "ClientGone", "Context", "ContextLink"]

T = TypeVar("T")
_TRACE = ("traceparent", "tracestate", "baggage")
_NUMBERS = (int, float)
_COMPLETED = "notifications/elicitation/complete"
LOG = "notifications/message"


class ContextLink(Protocol):
    """The connection of a context's request, as far as a context needs to know it."""

    session: ServerProtocol
    account: Account

    def keeps(self, ctx: Context) -> bool:
        """Whether a report of `ctx` may have to be kept for later: the client has too much to read."""

    async def keep(self, ctx: Context, method: str, *report: Any) -> bool:
        """Keep a report for later, as `keeps` says; False if it can be sent now after all."""

    async def tell(self, ctx: Context) -> None:
        """What `ctx` has queued is on its way.  Waits while too much is queued already."""

    async def report(self, ctx: Context) -> None:
        """As `tell`, of what may come many times in a row: that is on its way within a millisecond, in one piece."""

    async def tell_apart(self, method: str, params: JsonObject) -> bool:
        """As a notification of its own, in the course of no request; False if nobody hears it."""

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        """The client's answers, by the same keys."""

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """The same, as they came."""

    async def roots(self, ctx: Context) -> Roots: ...


class ClientGone(SessionClosed):
    """The client cannot answer a question any more, so nobody hears what becomes of the call either.

    Raised where it was asked; no fault of the handler, and nothing for the log.
    """


class ClientError(RequestError):
    """The client answered a question with an error.

    Raised where it was asked.  Other than a `RequestError` that a handler makes, it is no answer to the call: in the
    client's hands its code would say something of that.
    """

    def __init__(self, method: str, code: int, message: str, data: Any) -> None:
        super().__init__(code, message, data)
        self.method = method

    def __str__(self) -> str:
        return f"the client answered {self.method} with an error: {shown(self.message)} ({self.code})"


class Context:
    """The call at hand, as its handler sees it.

    Every method that waits may be cancelled at any time: what it had queued is sent whole or not at all.  They are
    cancelled when the client cancels the request or goes away, and must not be used after the handler has ended.
    """

    __slots__ = (
        "_keys", "_over", "_progress", "_scope", "_waits", "answers", "elsewhere", "kept_roots", "lifespan", "link",
        "pages", "place", "received", "recorded", "replay", "request", "rounds", "state", "terms", "told", "wire",
    )  # fmt: skip

    def __init__(
        self, link: ContextLink, request: Request, terms: Terms, wire: Wire, scope: trio.CancelScope | None = None
    ) -> None:
        self._scope = scope  # what the handler runs in, until it is over
        # Of those who wait for the client.  Nothing that must be made for each call: most ask nothing.
        self._waits: tuple[trio.CancelScope, ...] = ()
        self._over = False
        self._progress = -math.inf
        self._keys: set[str] | None = None
        self.request = request
        """The request at hand, as it came."""
        self.terms = terms
        """What the request is spoken under: revision, capabilities, identity, principal, headers."""
        self.lifespan: Any = None
        """What the server's lifespan gave."""
        self.answers: Mapping[str, JsonObject] = NOTHING
        """The client's answers to an `InputRequired` that this handler returned; a question's `read` reads them."""
        self.state: Json = None
        """What that `InputRequired` carried."""
        self.wire = wire  # where what belongs to the request at hand goes, and
        self.told = 0  # the last write there that has something of it, for the machinery
        self.link: ContextLink | None = link  # the connection of the request at hand, or, between two of one call,
        self.place: ParkedCall | None = None  # where the next is awaited
        self.received: Any = None  # what it came with, where that was long and is charged
        # For the machinery of questions.
        self.pages: tuple[ElicitUrl, ...] = ()  # to which it sent somebody
        self.rounds = 0
        self.elsewhere: RequestError | None = None  # the refusal, unless the handler replays
        self.replay = False
        self.recorded: Mapping[str, JsonObject] = NOTHING  # what it asked and got, before it was run again
        self.kept_roots: Roots | None = None

    if not TYPE_CHECKING:  # or a type checker would take any attribute for one that there is

        def __getattr__(self, name: str) -> Never:
            from trio_mcp.core.migration import attribute_error

            raise attribute_error(self, name)

    # What is known about the request.

    @property
    def request_id(self) -> Id:
        return self.request.id

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def meta(self) -> Mapping[str, Json]:
        """The request's `_meta`."""
        meta: Mapping[str, Json] = self.request.params.get("_meta", NOTHING)
        return meta

    @property
    def trace(self) -> Mapping[str, str]:
        """The W3C trace context that came with the request, to be passed on: traceparent, tracestate, baggage."""
        return {key: self.meta[key] for key in _TRACE if isinstance(self.meta.get(key), str)}

    @property
    def revision(self) -> str:
        """The protocol revision of the request, such as "2025-11-25"."""
        return self.terms.revision.name

    @property
    def principal(self) -> Any:
        """Who is behind the request, by name, as authentication found; None where there is none."""
        who = self.terms.principal
        return who.name if isinstance(who, Principal) else who

    @property
    def scopes(self) -> frozenset[str]:
        """What the access token of the request is good for; empty where the server is not protected."""
        who = self.terms.principal
        return who.scopes if isinstance(who, Principal) else frozenset()

    @property
    def headers(self) -> Mapping[str, str]:
        """The HTTP headers of the request; empty on other transports."""
        return self.terms.headers

    @property
    def client(self) -> Mapping[str, Json] | None:
        """What the client calls itself.  For display and logs: anybody can claim any name."""
        return self.terms.identity

    def supports(self, *capability: str) -> bool:
        """Whether the client declared a capability, such as ``("elicitation", "url")``."""
        return self.terms.declares(*capability)

    # What can be told.

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report progress, if the client asked for it.

        Where it stands still nothing is sent.  Raises `UsageError` when `progress` falls, or is no number, also
        when nobody hears it.  While the client has too much to read, the last report is kept, and follows when there is
        room, or before the answer; then a call that does nothing but report makes 20 reports a second.  May be
        cancelled each time; other tasks have their turn when a millisecond has passed since the last report.
        """
        number = isinstance(progress, _NUMBERS) and type(progress) is not bool and -math.inf < progress < math.inf
        if not number or progress < self._progress:
            before = "" if self._progress == -math.inf else f" from {self._progress}"
            raise UsageError(f"progress must rise{before}, and is a number; got {shown(progress)}")
        self._progress = progress
        link = self._heard
        if (
            link is not None
            and not (link.keeps(self) and await link.keep(self, PROGRESS, progress, total, message))
            and link.session.progress(self.request.id, progress, total, message)
        ):
            await link.report(self)
        else:
            await trio.lowlevel.checkpoint()

    async def log(self, level: LogLevel, data: Json, *, logger: str | None = None) -> None:
        """Send the client a log message, if it wants those of this level.  Deprecated in 2026-07-28, where it still
        works: what is for who runs the server belongs in its own log.

        `data` is anything that can be written as JSON: it reaches the client, so it must hold no secret.  Raises
        `UsageError` for an unknown level, and for data that cannot be written.  While the client has too much
        to read, the first messages are kept, and of the others it is told how many they were.
        """
        link = self._heard
        if link is None:
            self.terms.wants_log(level)  # a level that does not exist is a mistake also when nobody hears
            await trio.lowlevel.checkpoint()
            return
        params: JsonObject = {"level": level, "data": data}
        if logger is not None:
            params["logger"] = logger
        kept = link.keeps(self) and await link.keep(self, LOG, params)
        if not kept and link.session.notify(LOG, params, about=self.request.id):
            await link.report(self)
        else:
            await trio.lowlevel.checkpoint()

    async def hang_up(self, *, retry: float = 1.0) -> bool:
        """Let the client hang up, and come back for the rest of this call in `retry` seconds.

        So it need not hold a connection while a call takes long.  What is said meanwhile waits for it.  False, and
        nothing happens, where there is no such thing: it takes a session over HTTP in 2025-11-25, a client that accepts
        streams, and that it is there now.
        """
        if type(retry) not in (int, float) or not 0 <= retry < math.inf:
            raise UsageError(f"retry is a number of seconds, 0 or more; not {shown(retry)}")
        await trio.lowlevel.checkpoint()
        return self._heard is not None and self.wire.hang_up(retry)

    @property
    def _heard(self) -> ContextLink | None:
        """The connection, while it hears what precedes the answer."""
        return None if self._over or self.wire.answers_only else self.link

    async def completed(self, question: ElicitUrl) -> bool:
        """Tell the client that what a URL was visited for is done.

        The one method that may be called after the handler has ended: the page is often done much later.  False where
        clients are not told (but in 2025-11-25 they always find out by trying again), or when this one has gone.
        Raises `UsageError` for a page that this call sent nobody to.
        """
        if not any(question is each for each in self.pages):  # elic-22
            raise UsageError("no client was sent to that page by this call; tell by the context that asked")
        if self.terms.revision.notification(Role.SERVER, _COMPLETED) is None:
            await trio.lowlevel.checkpoint()
            return False
        assert self.link is not None  # only modern calls are ever without one
        link, params = self.link, question.completed_params()
        if self._heard is not None and link.session.notify(_COMPLETED, params, about=self.request.id):
            await link.tell(self)
            return True
        return await link.tell_apart(_COMPLETED, params)

    # What can be asked.  All of these raise NotInThisRevision and NotDeclared for a client that cannot be asked,
    # RequestError if it answers with an error, RemoteProtocolError for an answer that does not fit, and SessionClosed.

    @overload
    async def elicit(self, message: str, form: type[T]) -> Accepted[T] | Declined | Dismissed: ...
    @overload
    async def elicit(self, message: str, form: Any) -> Accepted[Any] | Declined | Dismissed: ...
    async def elicit(self, message: str, form: Any) -> Accepted[Any] | Declined | Dismissed:
        """Ask the user to fill in a form; see `Elicit`.  Several questions at once are one `ask`."""
        from trio_mcp.server.questions import Elicit

        return await self._ask_one("form", Elicit(message, form))

    async def elicit_url(self, message: str, url: str) -> Accepted[None] | Declined | Dismissed:
        """Ask the user to visit a page; see `ElicitUrl`.  Accepted means the user agreed to, not that it is done."""
        from trio_mcp.server.questions import ElicitUrl

        return await self._ask_one("url", ElicitUrl(message, url))

    async def sample(
        self, messages: str | SamplingMessage | Sequence[SamplingMessage], *, max_tokens: int, **options: Any
    ) -> CreateMessageResult:
        """Ask the client's model; see `Sample` for the options."""
        from trio_mcp.server.questions import Sample

        return await self._ask_one("sample", Sample(messages, max_tokens=max_tokens, **options))

    async def roots(self) -> Roots:
        """The directories that the client exposes.

        It is asked once in a call; or, if it tells of changes, once and then after each of them.
        """
        if self.kept_roots is not None:
            await trio.lowlevel.checkpoint()
            return self.kept_roots
        return await (await self._opened("roots/list")).roots(self)

    async def ask(self, **questions: Inquiry[Any]) -> Mapping[str, Any]:
        """Ask several things at once; the answers have the same names.

        A modern client that knows the names may give answers with the call already, and is asked for the others only.
        In a tool with `replay=True` the names and their order are what recorded answers are found by.
        """
        link = await self._opened("a question")
        keys = {self._key(name): name for name in questions}
        answers = await link.ask(self, {key: questions[name] for key, name in keys.items()})
        return {name: answers[key] for key, name in keys.items()}

    async def _ask_one(self, name: str, question: Inquiry[T]) -> T:
        answer: T = (await self.ask(**{name: question}))[name]
        return answer

    def _key(self, name: str) -> str:
        """A key that this call has not used yet, and the next run of the same handler will use at the same place."""
        if self._keys is None:
            self._keys = set()
        key, number = name, 1
        while key in self._keys:
            number += 1
            key = f"{name}-{number}"
        self._keys.add(key)
        return key

    async def _opened(self, what: str) -> ContextLink:
        """The connection, when there is somebody to ask."""
        if self.place is not None and self.place.left:
            await self.place.resumed.wait()
        return self.opened(what)

    def opened(self, what: str) -> ContextLink:
        if self.link is None:
            raise UsageError(
                f"{what} was not sent: a question of this call waits for its answer; ask several by ctx.ask(a=…, b=…)"
            )
        return self.link

    # For the machinery.

    @property
    def holder(self) -> Any:
        """In whose name it takes of what all clients share."""
        return None if self.link is None else self.link.account.holder

    def detach(self, place: ParkedCall) -> None:
        """The request was answered with a question: nobody listens until the next one comes."""
        self.link, self.place = None, place

    def attach(self, link: ContextLink, request: Request, terms: Terms, wire: Wire) -> None:
        self.link, self.place, self.request, self.terms = link, None, request, terms
        self.wire, self.told = wire, 0

    def cancel(self, reason: str) -> None:
        if self._scope is not None and not self._over:  # or another call may run in it by now
            self._scope.cancel(reason=reason)
        self.over()

    @property
    def cancelled(self) -> bool:
        return self._scope is not None and self._scope.cancel_called

    def over(self) -> None:
        """The call has ended, or is about to: nobody waits for the client any more, not even where a cancellation
        does not come: under a shield, or for a worker thread that was left behind."""
        self._over = True
        for scope in self._waits:
            scope.cancel(reason="the call has ended")

    @property
    def asking(self) -> bool:
        """Whether something of it waits for the client."""
        return bool(self._waits)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the client in here.  Raises SessionClosed when the call ends, where it is not cancelled with it."""
        if self._over:
            raise ClientGone("the call has ended: nobody is asked any more")
        with trio.CancelScope() as scope:
            self._waits += (scope,)
            try:
                yield
            finally:
                self._waits = tuple(each for each in self._waits if each is not scope)
        if scope.cancelled_caught:
            raise ClientGone("the call has ended before the client answered")
