"""Context: what a handler may do while it runs.

A handler runs once, from top to bottom, for one call of a client.  In the modern revision such a call may take several
requests, because a question to the client ends one and its answer comes with the next; a context belongs to the call
and always speaks for the request that is open now.  While none is (the client is thinking) there is nobody to tell of
progress, and nothing is sent.

Who is behind a request, its headers and its metadata are those of the request, never those of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import trio

from trio_mcp.core.errors import LocalProtocolError, NotDeclared, RequestError
from trio_mcp.core.jsonrpc import Id, Json, JsonObject, Request
from trio_mcp.core.session import ServerSession
from trio_mcp.core.terms import NOTHING, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_mcp.core.models import CreateMessageResult, LogLevel, SamplingMessage
    from trio_mcp.paths import Roots
    from trio_mcp.questions import Accepted, Declined, Dismissed, ElicitUrl, Inquiry

__all__ = ["Context", "Link"]

T = TypeVar("T")
_TRACE = ("traceparent", "tracestate", "baggage")


class Link(Protocol):
    """The connection of a context's request, as far as a context needs to know it."""

    session: ServerSession

    async def tell(self, ctx: Context) -> None:
        """What `ctx` has queued is on its way.  Waits while too much is queued already."""

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        """The client's answers, by the same keys."""

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """The same, as they came."""

    async def roots(self, ctx: Context) -> Roots: ...


class Context:
    """The call at hand, as its handler sees it.

    Every method that waits may be cancelled at any time: what it had queued is sent whole or not at all.  They are
    cancelled when the client cancels the request or goes away, and must not be used after the handler has ended.
    """

    __slots__ = (
        "_asked", "_link", "_scope", "answers", "elsewhere", "lifespan", "recorded", "replay", "request", "rounds",
        "state", "terms",
    )  # fmt: skip

    def __init__(self, link: Link, request: Request, terms: Terms) -> None:
        self._link: Link | None = link
        self._scope = trio.CancelScope()
        self._asked: set[str] = set()
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
        # For the machinery of questions.
        self.rounds = 0
        self.elsewhere: RequestError | None = None  # the refusal, unless the handler replays
        self.replay = False
        self.recorded: dict[str, JsonObject] = {}

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
        """Who is behind the request, as authentication found; None where there is none."""
        return self.terms.principal

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

        Raises `LocalProtocolError` when `progress` does not rise.  Waits while the client does not read.
        """
        if self._link is not None:
            self._link.session.progress(self.request.id, progress, total, message)
            await self._link.tell(self)
        else:
            await trio.lowlevel.checkpoint()

    async def log(self, level: LogLevel, data: Json, *, logger: str | None = None) -> None:
        """Send the client a log message, if it wants those of this level.

        `data` is anything that can be written as JSON: it reaches the client, so it must hold no secret.  Raises
        `LocalProtocolError` for an unknown level, and for data that cannot be written.  Waits as `progress`.
        """
        if self._link is None:
            self.terms.wants_log(level)  # a level that does not exist is a mistake also when nobody hears
            await trio.lowlevel.checkpoint()
            return
        params: JsonObject = {"level": level, "data": data}
        if logger is not None:
            params["logger"] = logger
        self._link.session.notify("notifications/message", params, about=self.request.id)
        await self._link.tell(self)

    async def completed(self, question: ElicitUrl) -> bool:
        """Tell the client that what a URL was visited for is done; False where clients are not told (but in 2025-11-25
        they always find out by trying again)."""
        link = self._open("notifications/elicitation/complete")
        told = self.revision == "2025-11-25" and link.session.notify(
            "notifications/elicitation/complete", question.completed_params()
        )
        await link.tell(self)
        return told

    # What can be asked.  All of these raise NotInThisRevision and NotDeclared for a client that cannot be asked,
    # RequestError if it answers with an error, RemoteProtocolError for an answer that does not fit, and SessionClosed.

    @overload
    async def elicit(self, message: str, form: type[T]) -> Accepted[T] | Declined | Dismissed: ...
    @overload
    async def elicit(self, message: str, form: Any) -> Accepted[Any] | Declined | Dismissed: ...
    async def elicit(self, message: str, form: Any) -> Accepted[Any] | Declined | Dismissed:
        """Ask the user to fill in a form; see `Elicit`."""
        from trio_mcp.questions import Elicit

        return await self._ask_one("form", Elicit(message, form))

    async def elicit_url(self, message: str, url: str) -> Accepted[None] | Declined | Dismissed:
        """Ask the user to visit a page; see `ElicitUrl`.  Accepted means the user agreed to, not that it is done."""
        from trio_mcp.questions import ElicitUrl

        return await self._ask_one("url", ElicitUrl(message, url))

    async def sample(
        self, messages: str | SamplingMessage | Sequence[SamplingMessage], *, max_tokens: int, **options: Any
    ) -> CreateMessageResult:
        """Ask the client's model; see `Sample` for the options."""
        from trio_mcp.questions import Sample

        return await self._ask_one("sample", Sample(messages, max_tokens=max_tokens, **options))

    async def roots(self) -> Roots:
        """The directories that the client exposes.  They are asked for again when the client says they have changed."""
        return await self._open("roots/list").roots(self)

    async def ask(self, **questions: Inquiry[Any]) -> Mapping[str, Any]:
        """Ask several things at once; the answers have the same names.

        In a tool with `replay=True` the names and their order are what recorded answers are found by.
        """
        keys = {self._key(name): name for name in questions}
        asked = {key: questions[name] for key, name in keys.items()}
        self._check(asked)
        answers = await self._open("a question").ask(self, asked)
        return {name: answers[key] for key, name in keys.items()}

    async def _ask_one(self, name: str, question: Inquiry[T]) -> T:
        answer: T = (await self.ask(**{name: question}))[name]
        return answer

    def _key(self, name: str) -> str:
        """A key that this call has not used yet, and the next run of the same handler will use at the same place."""
        key, number = name, 1
        while key in self._asked:
            number += 1
            key = f"{name}-{number}"
        self._asked.add(key)
        return key

    def _check(self, questions: Mapping[str, Inquiry[Any]]) -> None:
        for question in questions.values():
            for needed in question.needs(self.terms.revision):  # samp-13, and whatever else no table of methods knows
                if not self.terms.declares(*needed):
                    raise NotDeclared(question.method, "client", needed)

    def _open(self, what: str) -> Link:
        if self._link is None:
            raise LocalProtocolError(
                f"{what} was not sent: a question of this call waits for its answer; ask several by ctx.ask(a=…, b=…)"
            )
        return self._link

    # For the machinery: a call is carried by one request after another.

    @property
    def link(self) -> Link | None:
        return self._link

    def let_go(self) -> None:
        """The request was answered with a question: nobody listens until the next one comes."""
        self._link = None

    def go_on(self, link: Link, request: Request, terms: Terms) -> None:
        self._link, self.request, self.terms = link, request, terms

    @property
    def scope(self) -> trio.CancelScope:
        return self._scope
