"""Context: the interface of a running handler to its request and its client.

A handler runs once, from top to bottom, for one call of a client.  In the modern revision one call may take several
requests: a question to the client ends one request, and the answer comes with the next.  A context belongs to the call
and always uses the request that is open now.  While the server waits for the client no request is open, so progress
and log messages are not sent.

Principal, headers and metadata belong to the request, never to the connection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import trio

from trio_mcp.core.errors import RequestError, SessionClosed, UsageError, check_seconds, shown
from trio_mcp.core.messages import ABSENT, PROGRESS, Id, Json, JsonObject, Request
from trio_mcp.core.options import WithOtherNames
from trio_mcp.core.principals import Principal, name_of_principal
from trio_mcp.core.revisions import NOTHING, Role, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_mcp.core.elicitation import Accepted, Declined, Dismissed
    from trio_mcp.core.models import CreateMessageResult, LogLevel, SamplingMessage
    from trio_mcp.extensions.tasks.server import ToolTask
    from trio_mcp.server.detached import CallHost, DetachedCall
    from trio_mcp.server.parking import ParkedCall
    from trio_mcp.server.questions import ElicitUrl, Inquiry
    from trio_mcp.server.session import ChargedMessage, ServerSession
    from trio_mcp.transport.paths import Roots
    from trio_mcp.transport.wire import Wire

    Link: TypeAlias = ServerSession | DetachedCall

__all__ = ["LOG", "ROOTS_CHANGED", "ClientError", "ClientGone", "Context"]

T = TypeVar("T")
_TRACE = ("traceparent", "tracestate", "baggage")
_NUMBERS = (int, float)
_COMPLETED = "notifications/elicitation/complete"
ROOTS_CHANGED = "notifications/roots/list_changed"
_ROOTS = 16 * 1024  # characters of roots that are cached for the session; longer roots are asked for each time
LOG = "notifications/message"


class ClientGone(SessionClosed):
    """The client has gone, so it cannot answer a question, nor receive the result of the call.

    Raised by the method that asked.  It is no fault of the handler and is not logged.
    """


class ClientError(RequestError):
    """The client answered a question with an error.

    Raised by the method that asked.  Unlike a `RequestError` that a handler raises, it does not become the answer to
    the call, because its code says something about the question and not about the call.
    """

    def __init__(self, method: str, code: int, message: str, data: Any) -> None:
        super().__init__(code, message, data)
        self.method = method

    def __str__(self) -> str:
        return f"the client answered {self.method} with an error: {shown(self.message)} ({self.code})"


class Context(metaclass=WithOtherNames):
    """The context of one call.  A handler gets it by a parameter with the annotation `Context`.

    | To do | Use |
    |---|---|
    | report to the client | `progress`, `log`, `completed` |
    | ask the client | `elicit`, `elicit_url`, `sample`, `roots`, `ask` |
    | release the connection of a long call | `hang_up` |
    | use an extension | `extension`, `send_request`, `notify`, `detach` |
    | read the request | `request`, `request_id`, `method`, `meta`, `trace`, `revision`, `headers` |
    | know the client | `principal`, `scopes`, `claims`, `client`, `supports`, `may_read` |
    | use the value of the server's lifespan | `lifespan` |
    | read the answers after `InputRequired` | `answers`, `state` |

    The methods that ask raise `NotDeclared` or `NotInThisRevision` if this client cannot be asked, `RequestError` if
    the client answers with an error, `RemoteProtocolError` if the answer does not fit the question, and `SessionClosed`
    if the client goes away.

    The async methods are safe to cancel: a message is sent as a whole or not at all.  They are cancelled when the
    client cancels the request or goes away.  Do not use a context after its handler has ended, except `completed`.
    """

    __slots__ = (
        "_kept_roots", "_keys", "_last_write", "_link", "_over", "_pages", "_parked", "_progress", "_received",
        "_recorded", "_refusal", "_replay", "_rounds", "_scope", "_task", "_terms", "_waits", "_wire", "answers",
        "lifespan", "request", "state",
    )  # fmt: skip

    def __init__(self, link: Link | None, request: Request, terms: Terms, wire: Wire) -> None:
        self._scope: trio.CancelScope | None = None  # the scope of the handler, once it has started
        # The scopes of questions that wait for the client.  A tuple costs nothing for the many calls that ask nothing.
        self._waits: tuple[trio.CancelScope, ...] = ()
        self._over = False
        self._progress = -math.inf
        self._keys: tuple[str, ...] = ()  # of the questions so far
        self.request = request
        """The current request, as it came."""
        self._terms = terms
        """The terms of the request: revision, capabilities, identity, principal, headers."""
        self.lifespan: Any = None
        """The value of the server's lifespan."""
        self.answers: Mapping[str, JsonObject] = NOTHING
        """The client's answers to an `InputRequired` that this handler returned; use `read` of each question."""
        self.state: Json = None
        """The state of that `InputRequired`."""
        self._wire = wire  # where messages of the current request go
        self._last_write = 0  # the number of the last write to `wire` with a message of this call
        self._link = link  # the session of the current request, or its detached call; None between two requests
        self._parked: ParkedCall | None = None  # where the call waits for its next request
        self._received: ChargedMessage | None = None  # the long message that brought the request
        # For questions.
        self._pages: tuple[ElicitUrl, ...] = ()  # the pages that users were sent to
        self._rounds = 0
        self._refusal: RequestError | None = None  # why the call cannot go on here, unless the handler replays
        self._replay = False
        self._recorded: Mapping[str, JsonObject] = NOTHING  # the answers that it had before it was run again
        self._kept_roots: Roots | None = None
        self._task: ToolTask | None = None

    # The request.

    @property
    def request_id(self) -> Id:
        """The JSON-RPC id of the request."""
        return self.request.id

    @property
    def method(self) -> str:
        """The method of the request, such as "tools/call"."""
        return self.request.method

    @property
    def meta(self) -> Mapping[str, Json]:
        """The `_meta` object of the request; empty if it has none."""
        meta: Mapping[str, Json] = self.request.params.get("_meta", NOTHING)
        return meta

    @property
    def trace(self) -> Mapping[str, str]:
        """The W3C trace context of the request: traceparent, tracestate and baggage.  Pass it on to other services."""
        return {key: self.meta[key] for key in _TRACE if isinstance(self.meta.get(key), str)}

    @property
    def revision(self) -> str:
        """The protocol revision of the request, such as "2025-11-25"."""
        return self._terms.revision.name

    @property
    def principal(self) -> Any:
        """The name of the authenticated principal; None without authentication."""
        return name_of_principal(self._terms.principal)

    @property
    def scopes(self) -> frozenset[str]:
        """The scopes of the access token; empty if the server is not protected."""
        principal = self._terms.principal
        return principal.scopes if isinstance(principal, Principal) else frozenset()

    @property
    def claims(self) -> Mapping[str, Any]:
        """The claims of the access token, as `verify` put them into the `Principal`; empty without one."""
        principal = self._terms.principal
        return principal.claims if isinstance(principal, Principal) else {}

    @property
    def headers(self) -> Mapping[str, str]:
        """The HTTP headers of the request; empty on other transports."""
        return self._terms.headers

    @property
    def client(self) -> Mapping[str, Json] | None:
        """The name and version that the client claims; None if it gives none.  Use it for display and logs only."""
        return self._terms.identity

    def supports(self, *capability: str) -> bool:
        """Whether the client declared a capability, as in ``ctx.supports("elicitation", "url")``."""
        return self._terms.declares(*capability)

    def extension(self, id: str) -> Mapping[str, Any] | None:
        """The settings with which the client declares an extension; None if it does not declare it."""
        return self._terms.extension(id)

    @property
    def task(self) -> ToolTask:
        """The task of this call, in a tool with `task=`; it has status messages, and starts a task later.

        Raises `UsageError` in other handlers.
        """
        if self._task is None:
            raise UsageError('this handler has no ctx.task; write @server.tool(task="optional")')
        return self._task

    def may_read(self, uri: str) -> bool:
        """Whether the filters of the server let this client read a resource.  Without a filter it may read all."""
        return self._open_link("a question about access")._run.dispatcher.may_subscribe(self, uri)

    # Messages of extensions.

    async def send_request(self, method: str, params: Any = None, *, returns: Any = ABSENT) -> Any:
        """Send the client a request that the protocol does not have, and return its result as JSON.

        `params` is a dict, or an object such as a dataclass.  With `returns`, the result is an object of that type.
        Raises the errors of the class docstring; in 2026-07-28 servers send no requests (`NotInThisRevision`).
        """
        from trio_mcp.server.extensions import request_client

        return await request_client(self, method, params, returns)

    async def notify(self, method: str, params: Any = None) -> bool:
        """Send the client a notification that the protocol does not have.  False: the client cannot receive it now.

        It belongs to the current request.  Raises `NotDeclared` if the client has not declared the extension of a
        method that the server lists in an `Extension`.
        """
        from trio_mcp.server.extensions import notify_client

        return await notify_client(self, method, params)

    async def detach(self, host: CallHost, result: JsonObject) -> DetachedCall:
        """Answer the request now, with `result`, and go on without it: see `CallHost`, which replaces the client.

        Raises `UsageError` if the call waits for an answer of its client, is detached already, or if `result` has a
        type that no extension has, and `ClientGone` if the request has been cancelled.
        """
        from trio_mcp.server.detached import detach

        return await detach(self, host, result)

    # Reports to the client.

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report progress, if the client asked for it.

        `progress` must rise with each report; the same number again is not sent.  Raises `UsageError` if `progress`
        falls or is not a number, also if the client did not ask.

        If the client reads too slowly, only the last report is kept.  It is sent when there is room, or before the
        answer, and a call that does nothing but report is slowed down to 20 reports a second.  Each report is a
        cancellation point; other tasks run when a millisecond has passed since the last report.
        """
        number = type(progress) is int or (
            isinstance(progress, _NUMBERS) and type(progress) is not bool and -math.inf < progress < math.inf
        )
        if not number or progress < self._progress:
            before = "" if self._progress == -math.inf else f" from {self._progress}"
            raise UsageError(f"progress must be a number that rises{before}, got {shown(progress)}")
        self._progress = progress
        link = self._heard
        if link is None:
            await trio.lowlevel.checkpoint()
        else:
            await link.report(self, PROGRESS, progress, total, message)

    async def log(self, level: LogLevel, data: Json, *, logger: str | None = None) -> None:
        """Send the client a log message, if it wants messages of this level.

        `data` is any JSON value.  The client reads it, so it must not contain secrets.  If the client reads too slowly,
        the first messages are kept, and the client is told how many others were dropped.

        Raises `UsageError` for an unknown level, and for data that JSON cannot express.

        Deprecated in 2026-07-28, where it still works.  Messages for the operator of the server belong in its own log.
        """
        link = self._heard
        if link is None:
            self._terms.wants_log(level)  # an unknown level is a mistake also if the message is not sent
            await trio.lowlevel.checkpoint()
            return
        params: JsonObject = {"level": level, "data": data}
        if logger is not None:
            params["logger"] = logger
        await link.report(self, LOG, params)

    async def hang_up(self, *, retry: float = 1.0) -> bool:
        """Close the HTTP response of a long call, and let the client reconnect after `retry` seconds.

        The client then holds no connection while the call takes long.  Messages that are sent meanwhile wait for it.

        Returns False and does nothing if that is not possible.  It needs a session over HTTP in 2025-11-25 and a client
        that accepts streams and is connected now.  Raises `UsageError` if `retry` is not a number of seconds.
        """
        check_seconds("retry", retry, finite=True)
        await trio.lowlevel.checkpoint()
        return self._heard is not None and self._wire.hang_up(retry)

    @property
    def _heard(self) -> Link | None:
        """The session, if it can send messages before the answer; None otherwise."""
        return None if self._over or self._wire.answers_only else self._link

    async def completed(self, question: ElicitUrl) -> bool:
        """Tell the client that the user has finished on a page of `elicit_url`.

        It may be called after the handler has ended, because users often finish much later.  Returns False if the
        client has gone, or if its revision has no such notification.  In 2025-11-25 clients also find out when they
        try again.

        Raises `UsageError` if `question` was not asked by this context.
        """
        if not any(question is each for each in self._pages):  # elic-22
            raise UsageError("this call has not asked that question; call completed of the context that asked")
        if self._terms.revision.notification(Role.SERVER, _COMPLETED) is None:
            await trio.lowlevel.checkpoint()
            return False
        assert self._link is not None  # only modern calls are without a connection at times
        link, params = self._link, question.completed_params()
        if self._heard is not None and link.session.notify(_COMPLETED, params, about=self.request.id):
            await link.tell(self)
            return True
        queued = link.session.notify(_COMPLETED, params)  # after the call it belongs to no request
        link.wire.wake()
        await link.wire.room()
        return queued

    # Questions to the client.

    @overload
    async def elicit(
        self, message: str, form: type[T], *, task: bool = False
    ) -> Accepted[T] | Declined | Dismissed: ...
    @overload
    async def elicit(self, message: str, form: Any, *, task: bool = False) -> Accepted[Any] | Declined | Dismissed: ...
    async def elicit(self, message: str, form: Any, *, task: bool = False) -> Accepted[Any] | Declined | Dismissed:
        """Ask the user to fill in a form, and return `Accepted`, `Declined` or `Dismissed`.

        `form` is a dataclass, attrs class, TypedDict or NamedTuple with flat members, a type for a single value such as
        `bool`, or a JSON Schema; see `Elicit`.  `Accepted.value` is an object of the class, or the value.

        With `task=True` a client of 2025-11-25 that declares such tasks keeps the question and answers it later: no
        request is open meanwhile, and the server asks from time to time.  Other clients are asked as usual.

        Raises `UsageError` for a form that is not flat or asks for a secret, and the errors of the class docstring.
        """
        from trio_mcp.server.questions import Elicit

        return (await self.ask(form=Elicit(message, form, task=task)))["form"]  # type: ignore[no-any-return]

    async def elicit_url(self, message: str, url: str, *, task: bool = False) -> Accepted[None] | Declined | Dismissed:
        """Ask the user to open a web page, for input that the client must not see; see `ElicitUrl`.

        `Accepted` means that the user agreed to open the page, not that the user has finished there.  `task`: see
        `elicit`.

        Raises `UsageError` if the URL is not https or holds credentials, and the errors of the class docstring.
        """
        from trio_mcp.server.questions import ElicitUrl

        return (await self.ask(url=ElicitUrl(message, url, task=task)))["url"]  # type: ignore[no-any-return]

    async def sample(
        self, messages: str | SamplingMessage | Sequence[SamplingMessage], *, max_tokens: int, **options: Any
    ) -> CreateMessageResult:
        """Ask the client's model for a message.

        `messages` is a text or a list of messages; see `Sample` for the options, and `elicit` for `task=True`.  Raises
        `UsageError` for invalid messages or options, and the errors of the class docstring.
        """
        from trio_mcp.server.questions import Sample

        question = Sample(messages, max_tokens=max_tokens, **options)
        return (await self.ask(sample=question))["sample"]  # type: ignore[no-any-return]

    async def roots(self) -> Roots:
        """Return the directories that the client exposes.

        The client is asked once in a call.  If it notifies of changes, it is asked once in a session and again after
        each change.  Raises the errors of the class docstring.
        """
        if self._kept_roots is not None:
            await trio.lowlevel.checkpoint()
            return self._kept_roots
        from trio_mcp.server.questions import ListRoots

        link = await self._opened("roots/list")
        # root-12, root-13: the answer holds until the client notifies of a change; without that, for this call.
        notifies = self._terms.revision.notification(Role.CLIENT, ROOTS_CHANGED) is not None
        notifies = notifies and self._terms.declares("roots", "listChanged")
        if notifies and link.roots is not None:
            await trio.lowlevel.checkpoint()
            return link.roots
        changes = link.roots_changes
        roots: Roots = (await self.ask(roots=ListRoots()))["roots"]
        if not notifies:
            self._kept_roots = roots
        elif changes == link.roots_changes and len(repr(roots)) <= _ROOTS:
            link.roots = roots
        return roots

    async def ask(self, **questions: Inquiry[Any]) -> Mapping[str, Any]:
        """Ask several questions at once: ``await ctx.ask(size=Elicit(...), page=ElicitUrl(...))``

        Returns a mapping from the names to the answers.  Raises the errors of the class docstring.

        A modern client may send answers to known names with the call itself; it is asked only for the others.  In a
        tool with `replay=True`, recorded answers are found by the names and their order.
        """
        link = await self._opened("a question")
        keys = self._new_keys(questions)
        answers = await link.ask(self, dict(zip(keys.values(), questions.values(), strict=True)))
        return {name: answers[key] for name, key in keys.items()}

    def _new_keys(self, names: Iterable[str]) -> dict[str, str]:
        """Keys for questions: each is new in this call, and the same at this place if the handler is run again."""
        keys: dict[str, str] = {}
        for name in names:
            key, number = name, 1
            while key in self._keys:
                number += 1
                key = f"{name}-{number}"
            keys[name] = key
            self._keys = (*self._keys, key)
        return keys

    async def _opened(self, subject: str) -> Link:
        """Return the session; after a question that was given up, wait for the next request first."""
        if self._parked is not None and self._parked.abandoned:
            await self._parked.resumed.wait()
        return self._open_link(subject)

    def _open_link(self, subject: str) -> Link:
        """Return the session.  Raises UsageError while another question waits; `subject` names the new one."""
        if self._link is None:
            raise UsageError(
                f"{subject} was not sent: another question of this call waits for its answer; "
                "ask several at once with ctx.ask(a=…, b=…)"
            )
        return self._link

    # For other modules of the server.

    def _session(self, subject: str) -> ServerSession:
        """As `_open_link`, for a call that has its request."""
        link = self._open_link(subject)
        assert not link.detached
        return link

    @property
    def _holder(self) -> Any:
        """The client that is charged for the shared resources of this call."""
        return None if self._link is None else self._link.account.holder

    def _wait_in(self, parked: ParkedCall) -> None:
        """The request has been answered, or belongs to another call now: there is no session until the next one."""
        self._link, self._parked = None, parked

    def _continue_with(self, retry: Context) -> None:
        """Take over the request of another context."""
        self._link, self._parked, self._wire, self._last_write = retry._link, None, retry._wire, 0
        self.request, self._terms = retry.request, retry._terms
        # Each call holds one message until its end.
        self._received, retry._received = retry._received, self._received

    def _cancel(self, reason: str) -> None:
        if self._scope is not None and not self._over:  # after the end another call may run in this scope
            self._scope.cancel(reason=reason)
        self._finish()

    def _drop_message(self) -> None:
        """The message that brought the request is not needed any more."""
        if self._received is not None:
            self._received.drop()
            self._received = None

    def _finish(self) -> None:
        """The call has ended, or is about to.

        Questions stop waiting, also under a shield or for an abandoned worker thread, where a cancellation does not
        arrive.
        """
        self._over = True
        for scope in self._waits:
            scope.cancel(reason="the call has ended")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A block that waits for the client.  Raises ClientGone if the call ends and the block is not cancelled."""
        if self._over:
            raise ClientGone("the question was not asked: the call has ended")
        with trio.CancelScope() as scope:
            self._waits += (scope,)
            try:
                yield
            finally:
                self._waits = tuple(each for each in self._waits if each is not scope)
        if scope.cancelled_caught:
            raise ClientGone("the call has ended before the client answered")
