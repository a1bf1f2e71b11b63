"""Extensions of a server: methods and notifications of its own, filters of subscriptions, and messages to the client.

    ext = server.extension("com.example/ping", settings={"loud": True})

    @ext.method("com.example/ping")
    async def ping(target: str, ctx: Context) -> Pong: ...

`core.extensions` has the rules: what is declared, which methods there are, and who is refused.  This module runs the
handlers.  They are ordinary functions; their params and results follow the annotations (`core.schema.params`).

A server loads this module with its first extension or method.  Calls without a request are in `detached`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack

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
from trio_mcp.core.messages import ABSENT, CachedResult, Id, Json, JsonObject, Notification, Request, encode, prepare
from trio_mcp.core.revisions import META_SUBSCRIPTION_ID, NOTHING, Role
from trio_mcp.core.rounds import Question
from trio_mcp.core.schema.params import MethodParams, read_result, write_object_of
from trio_mcp.core.shares import LONG
from trio_mcp.server.context import Context
from trio_mcp.server.detached import DetachedCall, ExtensionRun
from trio_mcp.server.entries import CompletionOptions, Entry, running
from trio_mcp.server.handlers import BadArguments, Handler, raw, typed
from trio_mcp.server.results import BadResult

if TYPE_CHECKING:
    from trio_mcp.core.revisions import Revision
    from trio_mcp.server.dispatch import Middleware
    from trio_mcp.server.registry import Catalog
    from trio_mcp.server.run import Run
    from trio_mcp.server.session import ServerSession

__all__ = [
    "Agree", "Background", "ExtensionRegistry", "Listener", "ServerExtension", "agree", "candidates", "entry_for",
    "notify_client", "offered_by", "request_client", "start_subscription",
]  # fmt: skip

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
            more = {"_meta": {**_meta(params), META_SUBSCRIPTION_ID: self._id}}
            whole = params.with_members(more) if isinstance(params, CachedResult) else {**params, **more}
            note = Notification(method, whole)
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
        """Register an `async def (run)` that runs beside the server, from the start of each run to its end.

        An exception that it raises ends the run, as in a nursery: the server stops, and raises this exception.
        """
        self._background.append(function)
        for run in self._registry.runs():
            self._start(run, function)
        return function

    def _start(self, run: Run, function: Background) -> None:
        run.nursery.start_soon(self._run_background, run, function, name=f"the background of {self.id}")

    async def _run_background(self, run: Run, function: Background) -> None:
        with trio.CancelScope() as scope:
            run.backgrounds[scope] = None
            try:
                await function(ExtensionRun(run))
            except Exception as error:
                error.add_note(f"The background of the extension {self.id} has raised this, and ends the server.")
                raise
            finally:
                del run.backgrounds[scope]

    def filter(self, name: str) -> Callable[[Agree], Agree]:
        """Register an `async def (ctx, asked, listener)` for a member of the filter of `subscriptions/listen`.

        It returns the part of `asked` that the acknowledgement confirms, or None for no part.  Raises `UsageError` for
        a name that is taken, also by the protocol.
        """

        def register(agree: Agree) -> Agree:
            if name in self._registry.filters:
                raise UsageError(f"the filter {name!r} is registered already")
            self.values = tuple(attrs.evolve(each, filters=(*each.filters, name)) for each in self.values)
            self._registry.filters[name] = agree
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
        (id, *others) = dict.fromkeys(each.id for each in values)
        if others:
            raise UsageError(f"the forms of one extension have one identifier, got {id} and {', '.join(others)}")
        if id in self.extensions:
            raise UsageError(f"this server has the extension {id} already")
        with self.whole():
            added = self.extensions[id] = ServerExtension(self, values)
            self.changed()
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
            handler = typed(function, **running(options))
            params: Any = _TypedParams(function, handler)
            with self.whole():
                self.methods[row.name] = Entry("methods", row.name, handler, _method_result, arguments=params)
                self.rows.append((extension, row))
                self.changed()
            return function

        return register

    def set_fallback(self, function: Callable[..., Any]) -> None:
        if self.fallback is not None:
            raise UsageError("this server has a fallback already")
        self.fallback = raw(function, ("ctx", "method", "params"))
        self.changed()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Register a new extension or method in this block, or no part of it if the block raises.

        Background work is registered last, because it starts at once in the present runs.
        """
        extensions, methods, filters = self.extensions.copy(), self.methods.copy(), self.filters.copy()
        rows, middleware = self.rows.copy(), self.catalog.middleware
        try:
            yield
        except BaseException:
            self.extensions, self.methods, self.filters, self.rows = extensions, methods, filters, rows
            self.catalog.middleware = middleware
            self.changed()
            raise

    def start(self, run: Run) -> None:
        """Start the background work of all extensions in a run."""
        for extension in self.extensions.values():
            for function in extension._background:
                extension._start(run, function)

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
    if type(value) is CachedResult:  # it is JSON already, and may have members that are only written
        return value
    try:
        return write_object_of(value, f"the result of {key}")
    except UsageError as error:
        raise BadResult(str(error)) from error


def offered_by(catalog: Catalog) -> Extensions | None:
    """Return what a server and those mounted in it add to the protocol; None for a server without extensions."""
    registries = [part.extended for part in catalog.parts() if part.extended is not None]
    passes_on = any(part.remote for part in catalog.parts())  # a relay is mounted, whose server may know more methods
    if not registries and not passes_on:
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
    fallback = passes_on or any(each.fallback is not None for each in registries)
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
    session = ctx._session("a subscription")
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
