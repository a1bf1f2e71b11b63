"""Extensions of a server: methods and notifications of its own, filters, and calls that go on without their request.

    ext = server.extension("com.example/ping", settings={"loud": True})

    @ext.method("com.example/ping")
    async def ping(target: str, ctx: Context) -> Pong: ...

`core.extensions` has the rules: what is declared, which methods there are, and who is refused.  This module runs the
handlers.  They are ordinary functions; their params and results follow the annotations (`core.schema.params`).

A handler may be detached from its request: the request is answered at once, and the handler goes on with a `CallHost`
in place of its client.  Tasks are such calls.  A handler of a notification is detached from the start, because it has
no request.

A server loads this module with its first extension, method or detached call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, Unpack, cast

import attrs
import trio

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.extensions import Extension, ExtensionMethod, Extensions
from trio_mcp.core.messages import ABSENT, PROGRESS, Id, Json, JsonObject, Notification, Request, encode, prepare
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.revisions import META_SUBSCRIPTION_ID, NOTHING, Role, Terms
from trio_mcp.core.rounds import Question
from trio_mcp.core.schema.params import MethodParams, read_result, write_object_of
from trio_mcp.core.shares import LONG
from trio_mcp.server.context import ClientGone, Context
from trio_mcp.server.entries import CompletionOptions, Entry, running
from trio_mcp.server.handlers import BadArguments, Handler, raw, typed
from trio_mcp.server.results import BadResult
from trio_mcp.server.session import CANCELLED_CALL, ServerSession, start_work
from trio_mcp.transport.wire import Wire

if TYPE_CHECKING:
    from trio_mcp.core.revisions import Revision
    from trio_mcp.core.session import Notice, ServerProtocol
    from trio_mcp.core.shares import Account
    from trio_mcp.server.dispatch import Middleware
    from trio_mcp.server.questions import Inquiry
    from trio_mcp.server.registry import Catalog
    from trio_mcp.server.run import Run
    from trio_mcp.transport.paths import Roots
    from trio_mcp.transport.workers import Worker

__all__ = [
    "Agree", "Background", "CallHost", "DetachedCall", "ExtensionRegistry", "ExtensionRun", "Listener",
    "ServerExtension", "agree", "candidates", "detach", "entry_for", "notice_call",
    "notify_client", "offered_by", "request_client", "session_for_notices",
    "start_subscription",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")
F = TypeVar("F", bound=Callable[..., Any])


# Registration.


class Listener:
    """The stream of one `subscriptions/listen` request, for the notifications of an extension."""

    def __init__(self, session: ServerSession, id: Id) -> None:
        self.ended = trio.Event()
        """Set when the subscription has ended, on any path."""
        self._session = session
        self._id = id

    def notify(self, method: str, params: Mapping[str, Json], key: str = "") -> None:
        """Send a notification.  It gets the id of the subscription.

        While the client does not read, only the newest notification with the same method and key is kept, and a long
        one is dropped.
        """
        if not self.ended.is_set():
            note = Notification(method, {**params, "_meta": {**_meta(params), META_SUBSCRIPTION_ID: self._id}})
            wire = self._session._listening.get(self._id)
            if wire is not None and not (wire.full and len(encode(prepare(note))) > LONG):
                self._session.tell_change(note, self._id, key)


def _meta(params: Mapping[str, Json]) -> Mapping[str, Json]:
    meta = params.get("_meta")
    return meta if isinstance(meta, dict) else NOTHING


Background: TypeAlias = "Callable[[ExtensionRun], Awaitable[object]]"
Agree: TypeAlias = Callable[[Context, Json, Listener], Awaitable[Json]]
"""Returns the part of a member of a filter that the server agrees to, or None for no part."""


class ServerExtension:
    """One extension of a server, made by `Server.extension`.

    `values` are its forms, one for each group of revisions.
    """

    def __init__(self, registry: ExtensionRegistry, values: Sequence[Extension]) -> None:
        self.values = tuple(values)
        self._registry = registry
        self._background: list[Background] = []

    @property
    def id(self) -> str:
        """The identifier of the extension."""
        return self.values[0].id

    def method(
        self, name: str, *, mcp_name: str | None = None, **options: Unpack[CompletionOptions]
    ) -> Callable[[F], F]:
        """Register a function that serves requests of this name: `@ext.method("com.example/ping")`.

        Its parameters are the params of the request, or one parameter `params` takes all of them; it may also take a
        `Context`.  It returns an object for JSON, such as a dataclass or a dict, or None.  `mcp_name` is the parameter
        that the HTTP header Mcp-Name repeats.  A client that does not declare the extension gets error -32021.

        Raises `UsageError` for a name that is taken, and for parameters without a schema.
        """
        return self._registry.method(self, name, mcp_name, options)

    def notification(self, name: str, **options: Unpack[CompletionOptions]) -> Callable[[F], F]:
        """Register a function for notifications of this name, as `method` does.  Its result is not sent."""
        return self._registry.notification(self, name, options)

    def middleware(self, function: Middleware) -> Middleware:
        """Register a middleware that wraps all requests of the server, before those of the server itself."""
        self._registry.catalog.middleware = (function, *self._registry.catalog.middleware)
        return function

    def background(self, function: Background) -> Background:
        """Register an `async def (run)` that runs beside the server, from the start of each run to its end."""
        self._background.append(function)
        for run in self._registry.runs():
            self._start(run, function)
        return function

    def start(self, run: Run) -> None:
        """Start the background work in a run."""
        for function in self._background:
            self._start(run, function)

    def _start(self, run: Run, function: Background) -> None:
        run.nursery.start_soon(function, ExtensionRun(run), name=f"the background of {self.id}")

    def filter(self, name: str) -> Callable[[Agree], Agree]:
        """Register an `async def (ctx, asked, listener)` for a member of the filter of `subscriptions/listen`.

        It returns the part of `asked` that the acknowledgement confirms, or None for no part.
        """

        def register(agree: Agree) -> Agree:
            if name in self._registry.filters:
                raise UsageError(f"the filter {name!r} is registered already")
            self._registry.filters[name] = agree
            self.values = tuple(attrs.evolve(each, filters=(*each.filters, name)) for each in self.values)
            self._registry.changed()
            return agree

        return register


class ExtensionRegistry:
    """The extensions, methods and filters of one server.

    `changed` is called after each change, and `runs` returns the current runs.
    """

    def __init__(self, catalog: Catalog, changed: Callable[[], object], runs: Callable[[], Collection[Run]]) -> None:
        self.catalog = catalog
        self.changed = changed
        self.runs = runs
        self.extensions: dict[str, ServerExtension] = {}
        self.methods: dict[str, Entry] = {}
        self.rows: list[tuple[ServerExtension | None, ExtensionMethod]] = []
        self.filters: dict[str, Agree] = {}
        self.fallback: Handler | None = None

    def add(self, values: Sequence[Extension]) -> ServerExtension:
        """Add an extension.  Raises `UsageError` if it is there already."""
        (id, *others) = {each.id for each in values}
        if others:
            raise UsageError(f"the forms of one extension have one identifier, got {id} and {', '.join(others)}")
        if id in self.extensions:
            raise UsageError(f"this server has the extension {id} already")
        added = self.extensions[id] = ServerExtension(self, values)
        self._check(lambda: self.extensions.pop(id))
        return added

    def method(
        self, extension: ServerExtension | None, name: str, mcp_name: str | None, options: CompletionOptions
    ) -> Callable[[F], F]:
        return self._register(extension, ExtensionMethod(name, Role.CLIENT, mcp_name=mcp_name), options)

    def notification(
        self, extension: ServerExtension | None, name: str, options: CompletionOptions
    ) -> Callable[[F], F]:
        return self._register(extension, ExtensionMethod(name, Role.CLIENT, notification=True), options)

    def _register(
        self, extension: ServerExtension | None, row: ExtensionMethod, options: CompletionOptions
    ) -> Callable[[F], F]:
        def register(function: F) -> F:
            if row.name in self.methods:
                raise UsageError(f"the method {row.name} is registered already")
            self.methods[row.name] = _method_entry(row, function, options)
            self.rows.append((extension, row))
            self._check(lambda: (self.methods.pop(row.name), self.rows.pop()))
            return function

        return register

    def set_fallback(self, function: Callable[..., Any]) -> None:
        if self.fallback is not None:
            raise UsageError("this server has a fallback already")
        self.fallback = raw(function, ("ctx", "method", "params"))
        self.changed()

    def start(self, run: Run) -> None:
        """Start the background work of all extensions in a run."""
        for extension in self.extensions.values():
            extension.start(run)

    def _check(self, undo: Callable[[], object]) -> None:
        """Make the new offer, and take the change back if it cannot be made."""
        try:
            self.changed()
        except UsageError:
            undo()
            raise

    def values(self) -> list[Extension]:
        """Return the extensions with the methods that were registered."""
        return [
            self._with_methods(extension, value) for extension in self.extensions.values() for value in extension.values
        ]

    def _with_methods(self, extension: ServerExtension, value: Extension) -> Extension:
        listed = {method.name for each in extension.values for method in each.methods}
        added = [row for owner, row in self.rows if owner is extension and row.name not in listed]
        # A request without a handler would be accepted, and then be unknown.
        own = [each for each in value.methods if each.sender is Role.SERVER or each.name in self.methods]
        return attrs.evolve(value, methods=(*own, *added))


def _method_entry(row: ExtensionMethod, function: Callable[..., Any], options: CompletionOptions) -> Entry:
    handler = typed(function, **running(options))
    return Entry("methods", row.name, handler, _method_result, arguments=_TypedParams(function, handler))  # type: ignore[arg-type]


class _TypedParams:
    """The params of a method; used as the `Arguments` of an entry."""

    def __init__(self, function: Callable[..., Any], handler: Handler) -> None:
        self._params = MethodParams(function, handler.skip)

    def read(self, arguments: JsonObject) -> JsonObject:
        try:
            return self._params.read(arguments)
        except RemoteProtocolError as error:
            raise BadArguments([str(error)]) from None


def _method_result(entry: Entry, value: Any, key: str, revision: Revision) -> JsonObject:
    try:
        return write_object_of(value, f"the result of {key}")
    except UsageError as error:
        raise BadResult(str(error)) from error


def offered_by(catalog: Catalog) -> Extensions | None:
    """Return what a server and those mounted in it add to the protocol; None for a server without extensions."""
    registries = [part.extended for part in catalog.parts() if part.extended is not None]
    if not registries:
        return None
    values: dict[tuple[str, tuple[str, ...]], Extension] = {}
    loose: dict[str, ExtensionMethod] = {}
    for registry in registries:
        for value in registry.values():
            first = values.setdefault((value.id, tuple(sorted(value.revisions))), value)
            if first is not value:
                known = {each.name for each in first.methods}
                more = [each for each in value.methods if each.name not in known]
                key = (value.id, tuple(sorted(value.revisions)))
                values[key] = attrs.evolve(
                    first, methods=(*first.methods, *more), filters=tuple({*first.filters, *value.filters})
                )
        loose |= {row.name: row for owner, row in registry.rows if owner is None and row.name not in loose}
    fallback = any(each.fallback is not None or each.catalog.remote for each in registries)
    return Extensions(values.values(), methods=loose.values(), fallback=fallback)


# Serving.


def candidates(server: Catalog, method: str) -> list[Catalog]:
    """Return the servers to try for a method: `server` itself and those mounted in it, those with a fallback last."""
    here = [server, *server.mounted]
    known = [each for each in here if _knows(each, server, method, by_fallback=False)]
    return [*known, *(each for each in here if _knows(each, server, method, by_fallback=True) and each not in known)]


def _knows(each: Catalog, server: Catalog, method: str, *, by_fallback: bool) -> bool:
    parts = [each] if each is server else each.parts()
    if by_fallback:
        return any(part.remote or (part.extended is not None and part.extended.fallback is not None) for part in parts)
    return any(part.extended is not None and method in part.extended.methods for part in parts)


def entry_for(catalog: Catalog, ctx: Context, request: Request) -> tuple[Entry, Callable[[], Any]]:
    """Return the entry of this server for a request, and the call of its handler."""
    registry = catalog.extended
    entry = None if registry is None else registry.methods.get(request.method)
    if entry is not None:
        try:
            return entry, entry.prepare(ctx, request.params)
        except BadArguments as bad:
            raise RequestError(INVALID_PARAMS, f"{request.method}: {bad}") from None
    if registry is None or registry.fallback is None:
        raise RequestError(METHOD_NOT_FOUND, f"{shown(request.method)} does not exist here")
    handler = registry.fallback
    entry = Entry("methods", request.method, handler, _method_result)
    return entry, handler.bind(ctx, NOTHING, request.method, request.params)


async def agree(catalog: Catalog, ctx: Context, listener: Listener, asked: Mapping[str, Json]) -> dict[str, Json]:
    """Return the parts of a filter that the extensions of this server, and of those mounted in it, agree to."""
    agreed: dict[str, Json] = {}
    for part in catalog.parts():
        for name, function in () if part.extended is None else part.extended.filters.items():
            if (
                name in asked
                and name not in agreed
                and (part_agreed := await function(ctx, asked[name], listener)) is not None
            ):
                agreed[name] = part_agreed
    return agreed


# Calls that go on without their request.


class CallHost(Protocol):
    """The object of an extension that takes the place of the client of a detached call."""

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Take a progress report of the handler."""

    async def log(self, level: str, data: Json, logger: str | None) -> None:
        """Take a log message of the handler."""

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        """Return the answers to questions of the handler, by their keys."""

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        """Take the result of the call, or its error.  Not called if the call was cancelled."""


class _NoClient:
    """The host of the handler of a notification."""

    def __init__(self, method: str) -> None:
        self._method = method

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        await trio.lowlevel.checkpoint()

    async def log(self, level: str, data: Json, logger: str | None) -> None:
        await trio.lowlevel.checkpoint()

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        raise UsageError(f"{self._method} is a notification: it has no answer, so its handler cannot ask the client")

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        if isinstance(outcome, RequestError):
            _log.info("the notification %s was refused: %s", self._method, outcome.message)
        await trio.lowlevel.checkpoint()


class DetachedCall(Wire):
    """A call without a request.  It is the session and the wire of its context, and passes all on to a `CallHost`."""

    __slots__ = (
        "_ctx", "_host", "_outcome", "_place", "_run", "_session", "account", "held_reports", "roots", "roots_changes",
    )  # fmt: skip
    detached: ClassVar[bool] = True
    _running: ClassVar[int] = 0  # other calls that are about to end on this wire

    def __init__(self, ctx: Context, run: Run, host: CallHost, session: ServerSession | None, *, place: bool) -> None:
        self._ctx = ctx
        self._run = run
        self._host = host
        self._session = session
        self._place = place  # it has a place among the running requests of the session
        self._outcome: JsonObject | RequestError | None = None
        self.account: Account = run.bytes.account(None) if session is None else session.account
        self.held_reports: Mapping[Id, Any] = {}
        self.roots: Roots | None = None
        self.roots_changes = 0

    # For extensions.

    @property
    def host(self) -> CallHost:
        """The host of the call."""
        return self._host

    def cancel(self, reason: str) -> None:
        """Cancel the handler.  Does nothing after its end."""
        self._ctx._cancel(reason)

    def notify(self, method: str, params: Mapping[str, Json] | None = None) -> bool:
        """Send a notification in the session of the call.  False: there is no session, or the client has gone."""
        if (protocol := self._open_session()) is None or self._session is None:
            return False
        sent = protocol.notify(method, dict(params or {}))
        self._session.wire.wake()
        return sent

    def progress(
        self,
        token: Id,
        progress: float,
        total: float | None = None,
        message: str | None = None,
        meta: JsonObject | None = None,
    ) -> bool:
        """Report progress in the session of the call, under the token of its request (prog-11).  False: as `notify`."""
        if (protocol := self._open_session()) is None or self._session is None:
            return False
        sent = protocol.progress_later(token, progress, total, message, meta)
        self._session.wire.wake()
        return sent

    def _open_session(self) -> ServerProtocol | None:
        """The session that outlives the request, if there is one and the client has not gone."""
        protocol = None if self._session is None else self._session.session
        return None if protocol is None or protocol.closed or protocol.terms is None or self._alone else protocol

    @property
    def _alone(self) -> bool:
        return self._session is None or self._session.alone

    # As a session.

    @property
    def origin(self) -> ServerSession | None:
        """The session of the call or the notification."""
        return self._session

    @property
    def session(self) -> ServerProtocol | _Silence:
        return self._open_session() or _SILENCE

    @property
    def wire(self) -> Wire:
        return self if self._session is None else self._session.wire

    def report(self, ctx: Context, method: str, *report: Any) -> Awaitable[None]:
        if method == PROGRESS:
            return self._host.progress(*report)
        (params,) = report
        return self._host.log(params["level"], params["data"], params.get("logger"))

    async def tell(self, ctx: Context) -> None:
        self.wire.wake()
        await trio.lowlevel.checkpoint()

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        answers = await self.ask_raw(ctx, questions)
        return {key: question.read(answers[key]) for key, question in questions.items()}

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        await trio.lowlevel.checkpoint_if_cancelled()
        with ctx._waiting():
            return await self._host.ask(self._run.parking.write(ctx, questions))

    async def _result(self, worker: Worker, ctx: Context) -> JsonObject | RequestError:
        return await ServerSession._result(cast(ServerSession, self), worker, ctx)

    async def _flush_reports(self, ctx: Context) -> None:
        await trio.lowlevel.checkpoint()

    def _close(self, ctx: Context, outcome: JsonObject | RequestError) -> bool:
        self._outcome = None if outcome is CANCELLED_CALL else outcome
        return True

    def _forget(self, ctx: Context) -> None:
        if self._place and self._session is not None:
            self._place = False
            self._session._forget(ctx)

    # As a wire.

    def wake(self) -> None:
        """Also called at the end of a handler whose task must not wait any more."""
        if self._outcome is not None:
            self._run.nursery.start_soon(self._finish, name="the end of a detached call")

    async def flush(self, batch: bool = False) -> None:
        if self._outcome is not None:
            await self._finish()

    async def _finish(self) -> None:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        try:
            await self._host.finish(outcome)
        except Exception:  # noqa: BLE001  # the host is code of an extension, and the server goes on
            _log.exception("the extension could not take the result of %s", self._ctx.method)

    def close(self) -> None:
        """Do nothing: the handler ends with the run of the server."""


class _Silence:
    """The protocol object of a call whose session has ended: nothing is sent."""

    def notify(self, method: str, params: JsonObject, about: Id | None = None) -> bool:
        return False


_SILENCE = _Silence()


async def detach(ctx: Context, host: CallHost, result: JsonObject) -> DetachedCall:
    """Answer the request of a call with `result`, and let its handler go on without it; see `Context.detach`."""
    session = ctx._open_link("a result")
    if isinstance(session, DetachedCall):
        raise UsageError(f"{ctx.method} has been detached from its request already")
    if ctx._last_write:
        await session._flush_reports(ctx)
    await trio.lowlevel.checkpoint_if_cancelled()
    session, wire = ctx._open_link("a result"), ctx._wire
    if not session.session.answer(ctx.request.id, result):
        await trio.lowlevel.checkpoint_if_cancelled()
        raise ClientGone(f"{ctx.method} was not detached: the client has gone")
    session._forget(ctx)
    ctx._drop_message()
    call = DetachedCall(ctx, session._run, host, session, place=False)
    _put(ctx, call)
    wire.wake()
    return call


def _put(ctx: Context, call: DetachedCall) -> None:
    ctx._link, ctx._wire, ctx._last_write = cast(ServerSession, call), call, 0


def notice_call(session: ServerSession, notice: Notice) -> Context:
    """Return the context for the handler of a notification, which has taken a place already."""
    note = notice.notification
    ctx = Context(session, Request("", note.method, note.params), notice.terms, session.wire)
    _put(ctx, DetachedCall(ctx, session._run, _NoClient(note.method), session, place=True))
    return ctx


class _NoAnswers(Wire):
    """The wire of a notification that came alone over HTTP: its response has no body."""

    __slots__ = ()
    answers_only = True

    def wake(self) -> None: ...

    def close(self) -> None: ...


def session_for_notices(run: Run, account: Account, revision: Revision) -> ServerSession:
    """Return a session for one notification outside any session."""
    terms, link = (Terms(revision), LinkKind.SESSION) if revision.handshake else (None, LinkKind.EXCHANGE)
    return ServerSession(run, _NoAnswers(), account=account, link=link, terms=terms, changes=False)


class ExtensionRun:
    """One run of a server, for the background work of an extension."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def start(self, request: Request, terms: Terms, host: CallHost) -> DetachedCall:
        """Start the handler of a request that no client waits for, such as one from before a restart."""
        ctx = Context(cast(ServerSession, None), request, terms, cast(Wire, None))
        call = DetachedCall(ctx, self._run, host, None, place=False)
        _put(ctx, call)
        start_work(self._run, ctx, f"{request.method}, detached", copy_context())
        return call


# Messages to the client.


async def request_client(ctx: Context, method: str, params: Any, returns: Any) -> Any:
    """Send the client a request of our own; see `Context.send_request`."""
    session, revision = await ctx._opened(method), ctx._terms.revision
    if isinstance(session, DetachedCall):
        raise UsageError(
            f"{method} was not sent: {ctx.method} has no request any more; ask with ctx.elicit or ctx.sample"
        )
    if not revision.handshake:
        raise NotInThisRevision(method, revision.name)
    await trio.lowlevel.checkpoint_if_cancelled()
    question = Question("", method, write_object_of(params, f"the params of {method}"))
    result = (await session._run.parking.send(ctx, session, [question]))[""]
    return result if returns is ABSENT else read_result(returns, result)


async def notify_client(ctx: Context, method: str, params: Any) -> bool:
    """Send the client a notification of our own; see `Context.notify`."""
    link, written = ctx._heard, write_object_of(params, f"the params of {method}")
    if link is None:
        await trio.lowlevel.checkpoint()
        return False
    if isinstance(link, DetachedCall):
        sent = link.notify(method, written)
    else:
        sent = link.session.notify(method, written, about=ctx.request.id)
    await link.tell(ctx)
    return sent


async def start_subscription(server: Catalog, ctx: Context) -> None:
    """Let extensions agree to their members of the filter, and start the subscription with the rest of it."""
    session = ctx._open_link("a subscription")
    extensions, id = session.session.offer.extensions, ctx.request.id
    assert extensions is not None  # they have members in this filter
    listener = Listener(session, id)
    try:
        agreed = await agree(server, ctx, listener, extensions.asked(ctx.request.params, ctx._terms))
    except BaseException:  # an extension that has agreed already may wait for the end of the subscription
        listener.ended.set()
        raise
    if session.listeners is None:
        session.listeners = {}
    session.listeners[id] = listener
    session._forget(ctx)
    why = session.subscribe(ctx, agreed)
    if why is not None:
        session.session.refuse(id, RequestError(INTERNAL_ERROR, why))
    if id not in session._listening:
        session._end_listener(id)
    ctx._link = None  # the request has no handler any more
    ctx._wire.wake()
