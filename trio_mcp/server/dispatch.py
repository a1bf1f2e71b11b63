"""From a request to its result.

The session has judged a request already: its method exists, its capability was declared, its metadata is sound.  Here
its params are looked at, what it names is found, middleware and filters have their say, the handler is run, and what it
returns or raises becomes the answer.  What may be raised, and what the client gets to see:

| Raised by a handler | tools/call | everything else |
|---|---|---|
| ToolError | a result with isError and its text | -32603, with its text |
| PathRefused | a result with isError and its text | -32602 |
| RequestError | that JSON-RPC error | that JSON-RPC error |
| NotDeclared (the client cannot be asked) | modern: -32021; legacy: isError, saying so | the same; legacy: -32603 |
| NotInThisRevision, RemoteProtocolError | isError, saying so | -32603, saying so |
| an error that the client answered a question with | the same | the same |
| anything else | isError, generic; traceback to the log | -32603, generic; traceback to the log |

KeyboardInterrupt and cancellation are nobody's failure and pass through.

What a mounted server has, that server serves, as if it were alone: the request goes on to it under the name that it
knows, through its middleware and its filter, with its lifespan.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import attrs

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    MISSING_CLIENT_CAPABILITY,
    URL_ELICITATION_REQUIRED,
    McpError,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    ResourceNotFound,
    UsageError,
    shown,
)
from trio_mcp.core.json_text import parse, to_text
from trio_mcp.core.jsonrpc import CachedResult, JsonObject, Request
from trio_mcp.core.oauth.principals import Principal, has_scopes
from trio_mcp.core.revisions import capability_object
from trio_mcp.core.terms import NOTHING
from trio_mcp.server.arguments import BadArguments
from trio_mcp.server.catalog import LISTS, Catalog
from trio_mcp.server.context import ClientError, ClientGone, Context
from trio_mcp.server.entries import Entry, ToolEntry
from trio_mcp.server.handlers import Handler, RunMode
from trio_mcp.server.parking import Parking, next_round, worded
from trio_mcp.server.publishing import ListenerKey, Publisher
from trio_mcp.server.results import (
    BadResult,
    InputRequired,
    ToolError,
    completion_result,
    prompt_result,
    resource_result,
    tool_failure,
    tool_result,
)
from trio_mcp.server.threads import Threads
from trio_mcp.transport.nursery import sole
from trio_mcp.transport.paths import PathRefused
from trio_mcp.transport.workers import called

if TYPE_CHECKING:
    from trio_mcp.core.cache import CacheHints
    from trio_mcp.core.content import Described
    from trio_mcp.core.http.fields import Mirror
    from trio_mcp.core.oauth.resource import Protection

__all__ = ["CallNext", "Dispatcher", "Middleware", "ServerFeatures"]


class CallNext(Protocol):
    """What comes after a middleware: gives the result of a request, or raises what the handler did.

    Without an argument the request is the one that the middleware was given.
    """

    def __call__(self, request: Request | None = None, /) -> Awaitable[JsonObject]: ...


_Serve: TypeAlias = Callable[[Request], Awaitable[JsonObject]]
Middleware: TypeAlias = Callable[[Context, Request, CallNext], Awaitable[JsonObject]]
Serve: TypeAlias = "Callable[[Dispatcher, ServerFeatures, Context, Request], Awaitable[JsonObject]]"
Filter: TypeAlias = "Callable[[Any, Described], bool]"

_log = logging.getLogger("trio_mcp")


@attrs.define(eq=False)
class ServerFeatures:
    """The catalog and the options of one server, without its runs."""

    catalog: Catalog
    middleware: Sequence[Middleware]
    filter: Filter | None
    protection: Protection | None
    page_size: int | None
    cache: Mapping[str, CacheHints]


class Dispatcher:
    """Serves the requests of one running server."""

    def __init__(
        self,
        features: ServerFeatures,
        parts: Mapping[Catalog, ServerFeatures],
        lifespans: Mapping[Catalog, Any],
        *,
        parking: Parking,
        publisher: Publisher,
        threads: Threads,
    ) -> None:
        self._features = features
        self._parts = parts  # the mounted servers
        self._lifespans = lifespans
        self._parking = parking
        self._publisher = publisher
        self._threads = threads

    def protection(self) -> Protection | None:
        """That of the server which runs: who gets through to it gets through to all that is mounted in it.

        Raises UsageError where only something mounted has any, which would be open to everybody.
        """
        if self._features.protection is None and any(part.protection is not None for part in self._parts.values()):
            raise UsageError(
                "a server that is mounted here is protected, and the whole is not; call protect of that which is served"
            )
        return self._features.protection

    def __call__(self, ctx: Context) -> Awaitable[JsonObject]:
        """The result of the request of `ctx`.  Raises whatever the handler does; see `failure`."""
        return self._served_by(self._features, self._METHODS[ctx.request.method], ctx, ctx.request)

    async def _served_by(self, at: ServerFeatures, serve: Serve, ctx: Context, request: Request) -> JsonObject:
        """As this server, the running one or one that is mounted in it, serves a request."""
        outer, ctx.lifespan = ctx.lifespan, self._lifespans.get(at.catalog)
        try:
            if not at.middleware:
                return await serve(self, at, ctx, request)
            call_next: _Serve = functools.partial(serve, self, at, ctx)
            for middleware in reversed(at.middleware):
                call_next = functools.partial(_pass, middleware, ctx, call_next)
            result = await call_next(request)
        finally:
            ctx.lifespan = outer
        if not isinstance(result, dict):
            if inspect.iscoroutine(result):
                result.close()  # or Python would complain as well
            raise UsageError(
                f"a middleware returned {type(result).__name__}, and no result; write return await call_next()"
            )
        return result

    def failure(self, ctx: Context, error: BaseException) -> JsonObject | RequestError:
        """What the client is told about a request that ended with `error`; the log hears what it must not be told."""
        try:
            return self._told(ctx, sole(error))
        except Exception as second:  # noqa: BLE001  # an author's exception may fail to say what it is
            return self.broken(ctx, second)

    def broken(self, ctx: Context, error: BaseException) -> JsonObject | RequestError:
        """What the client is told when nothing can be said of `error` but to the log."""
        # log-06: what went wrong may be anybody's secret; it is for the server's own log.
        what = _called(ctx)
        if isinstance(error, BadResult) and isinstance(error.__cause__, McpError):
            _log.error("%s failed: %s", what, error)  # none of the frames that led here is the author's
        else:
            _log.error("%s failed", what, exc_info=error)
        return _failed(ctx, f"{what} failed; the server's log says why")

    def _told(self, ctx: Context, error: BaseException) -> JsonObject | RequestError:
        tool = ctx.method == "tools/call"
        if tool and isinstance(error, PathRefused):  # the model chose the path, and may choose another
            return tool_failure(str(error.message), ctx._terms.revision)
        if isinstance(error, RequestError) and not isinstance(error, ClientError):
            code = ctx._terms.revision.error_code(error.code)
            if code == INTERNAL_ERROR != error.code:
                _log.warning(
                    "%s was answered with %d, for %s keeps %d to itself; choose one outside of -32768 to -32000",
                    _called(ctx), code, ctx.revision, error.code,
                )  # fmt: skip
            return error
        if isinstance(error, ToolError):
            try:
                said = tool_failure(error, ctx._terms.revision)
            except (BadResult, NotInThisRevision) as unwritable:
                error = unwritable
            else:
                if tool:
                    return said
                texts = [block["text"] for block in said["content"] if block.get("type") == "text"]
                if any(texts):  # a picture is nothing that an error could show
                    return RequestError(INTERNAL_ERROR, "\n".join(texts))
        if isinstance(error, NotDeclared) and not ctx._terms.revision.handshake:
            needed = {"requiredCapabilities": capability_object([error.capability])}
            return RequestError(MISSING_CLIENT_CAPABILITY, str(error), needed)
        if isinstance(error, NotDeclared | NotInThisRevision | RemoteProtocolError | ClientError | ClientGone):
            return _failed(ctx, f"{_called(ctx)}: {error}")
        return self.broken(ctx, error)

    # Lists.

    async def _list(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        cursor = request.params.get("cursor")
        allowed = functools.partial(self._allows, at, ctx.principal) if self._filters else None
        revision, method = ctx._terms.revision, request.method
        page = at.catalog.list(method, revision, cursor, at.page_size, allowed)
        if at.middleware:
            page = _own(page)
        hints = at.cache.get(method)
        if hints is None or method not in revision.cacheable:
            return page
        members = hints.members

        def hinted() -> JsonObject:
            return {**page, **members()}

        return page.with_more("hints", hints, hinted) if isinstance(page, CachedResult) else hinted()

    @functools.cached_property
    def _filters(self) -> bool:
        return any(each.filter is not None for each in (self._features, *self._parts.values()))

    def _allows(self, at: ServerFeatures, principal: Any, entry: Entry) -> bool:
        """tool-24: what there is may depend on who asks, and on nothing else (tool-23)."""
        if at.filter is not None and called(at.filter, principal, entry.model) is not True:
            return False  # also for anything that is no answer
        return not entry.owners or self._allows(self._parts[entry.owners[0]], principal, entry.inner)

    # Scopes.  Lists show tools also to those who lack them: who does not see a tool will never ask for its scope.

    @property
    def scopes(self) -> Sequence[str]:
        """Those of every request."""
        return self._needed(())

    def scopes_for(self, request: Request, principal: Any) -> Sequence[str]:
        """All scopes that whoever asks needs for this request, by HTTP."""
        name = request.params.get("name") if request.method == "tools/call" else None
        entry = self._features.catalog.tool(name) if isinstance(name, str) else None
        if entry is not None and entry.scopes and not self._allows(self._features, principal, entry):
            entry = None  # or its scopes would tell that it is there
        return self._needed(() if entry is None else entry.scopes)

    def _needed(self, scopes: Sequence[str]) -> Sequence[str]:
        protection = self._features.protection
        return scopes if protection is None else tuple(dict.fromkeys((*protection.scopes, *scopes)))

    def _check_scopes(self, ctx: Context, entry: ToolEntry) -> None:
        """Where HTTP itself could not refuse, as on a WebSocket (auth-80).

        Scopes are an affair of HTTP: on a stream, which has no headers, whoever is at its other end has them all.  But
        by HTTP nobody has any where the server is not protected.
        """
        who = ctx._terms.principal
        if not (isinstance(who, Principal) or ctx.headers):
            return
        needed = self._needed(entry.scopes)
        if not has_scopes(who, needed):
            told = " ".join(needed)
            data = {"error": "insufficient_scope", "scope": told}
            raise RequestError(INVALID_REQUEST, f"the access token lacks a scope; this request needs {told}", data)

    # Calls.

    async def _call_tool(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        name, arguments = _named(request.params)
        entry, revision = at.catalog.tool(name), ctx._terms.revision
        if entry is None or (self._filters and not self._allows(at, ctx.principal, entry)):
            # tool-31: no tool, so no tool result.
            raise RequestError(INVALID_PARAMS, f"there is no tool {shown(name)}; tools/list names those there are")
        if entry.scopes:
            self._check_scopes(ctx, entry)
        if entry.owners:
            return await self._under(entry, Dispatcher._call_tool, ctx, _renamed(request, entry))
        try:
            call = entry.prepare(ctx, arguments)
        except BadArguments as bad:
            if revision.invalid_arguments_are_results:  # tool-33: so that the model can mend them
                return tool_failure(str(bad), revision)
            raise RequestError(INVALID_PARAMS, str(bad)) from None  # tool-32
        return await self._handled(ctx, entry, call, tool_result, entry.output, name, revision)

    async def _get_prompt(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        name, arguments = _named(request.params)
        entry, revision = at.catalog.prompt(name), ctx._terms.revision
        if entry is None or not self._allows(at, ctx.principal, entry):  # prm-08
            raise RequestError(INVALID_PARAMS, f"there is no prompt {shown(name)}; prompts/list names those there are")
        if entry.owners:
            return await self._under(entry, Dispatcher._get_prompt, ctx, _renamed(request, entry))
        try:
            call = entry.prepare(ctx, arguments)
        except BadArguments as bad:  # prm-08, prm-09, prm-17
            raise RequestError(INVALID_PARAMS, str(bad)) from None
        return await self._handled(ctx, entry, call, prompt_result, entry.description, revision)

    async def _read_resource(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        uri, revision = request.params.get("uri"), ctx._terms.revision
        if not isinstance(uri, str):
            raise RequestError(INVALID_PARAMS, "resources/read needs a uri, a string")
        found = at.catalog.resource(uri)
        if found is None or not self._allows(at, ctx.principal, found[0]):
            raise ResourceNotFound(uri)
        entry, variables = found
        if entry.owners:
            return await self._under(entry, Dispatcher._read_resource, ctx, request)
        call = entry.prepare(ctx, uri, variables)  # res-10: what was found in the URI has been checked
        result = await self._handled(ctx, entry, call, resource_result, uri, entry.mime_type, revision)
        complete = result.get("resultType", "complete") == "complete"
        if entry.cache is not None and complete and request.method in revision.cacheable:
            return {**entry.cache.members(), **result}
        return result

    async def _under(self, entry: Entry, serve: Serve, ctx: Context, request: Request) -> JsonObject:
        """As the mounted server serves it that `entry` belongs to."""
        return await self._served_by(self._parts[entry.owners[0]], serve, ctx, request)

    async def _handled(
        self, ctx: Context, entry: Entry, call: Callable[[], Any], finish: Callable[..., JsonObject], *options: Any
    ) -> JsonObject:
        """Run a handler until it returns something else than questions; of that, `finish` makes the result."""
        ctx._replay = entry.replay
        if ctx._elsewhere is not None and not entry.replay:
            raise ctx._elsewhere
        while True:
            try:
                value = await (call() if entry.handler.how is RunMode.ASYNC else self._run(entry.handler, call, ctx))
            except RequestError as error:
                value = _pages(ctx, error)
                if value is None:
                    raise
            if not isinstance(value, InputRequired):
                return finish(value, *options)
            if not ctx._terms.revision.handshake:
                return self._parking.ask_again(ctx, value.questions, value.state)
            ctx._rounds = next_round(ctx)
            assert ctx._link is not None  # only modern calls are ever without one
            ctx.answers = {**ctx.answers, **await ctx._link.ask_raw(ctx, value.questions)}
            ctx.state = value.state

    async def _run(self, handler: Handler, call: Callable[[], Any], ctx: Context) -> Any:
        if handler.how is RunMode.ASYNC:
            return await call()
        if handler.how is RunMode.THREAD:
            return await self._threads.run(call, ctx._holder, abandon_on_cancel=handler.abandon_on_cancel)
        return call()

    # Completion.

    async def _complete(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        kind, name, argument, value, arguments = _completion_params(request.params)
        # cmpl-04: access to suggestions is that to what they are for.
        found = at.catalog.completer(kind, name, argument, functools.partial(self._allows, at, ctx.principal))
        if found is None:
            return completion_result([])
        if found.owners:
            if kind == "ref/prompt":  # URIs stay as they are
                ref = {**request.params["ref"], "name": found.entry.inner.key}
                request = Request(request.id, request.method, {**request.params, "ref": ref})
            return await self._under(found.entry, Dispatcher._complete, ctx, request)
        return completion_result(
            await self._run(found.handler, found.prepare(ctx, kind, name, argument, value, arguments), ctx)
        )

    # Legacy subscriptions; the modern ones are no requests that anything runs for.

    async def _subscribe(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        uri = request.params.get("uri")
        if isinstance(uri, str) and not self.may_hear(ctx, uri):
            raise ResourceNotFound(uri)
        return self._in_session(ctx, self._publisher.listeners.subscribe)

    async def _unsubscribe(self, at: ServerFeatures, ctx: Context, request: Request) -> JsonObject:
        return self._in_session(ctx, self._publisher.listeners.unsubscribe)

    def _in_session(self, ctx: Context, change: Callable[[ListenerKey, JsonObject], JsonObject]) -> JsonObject:
        """Change what a legacy session listens to.  A client that has ended its input listens to nothing any more."""
        key = _session_of(ctx)
        return change(key, ctx.request.params) if key in self._publisher.listeners else {}

    def mirrors(self, tool: str) -> Sequence[Mirror]:
        """Which arguments of a tool are repeated in headers."""
        entry = self._features.catalog.tool(tool)
        return () if entry is None else entry.mirrors

    def may_hear(self, ctx: Context, uri: str) -> bool:
        """Whether updates of this resource may be told to who asks for them.

        A resource may be waited for that is not there yet.  But not where the filter would then have a say: nobody
        would ask it again, and what is hidden must not be told from what is not there.
        """
        if not self._filters:
            return True
        found = self._features.catalog.resource(uri)
        return found is not None and self._allows(self._features, ctx.principal, found[0])

    _METHODS: ClassVar[Mapping[str, Serve]] = {
        **dict.fromkeys(LISTS, _list),
        "tools/call": _call_tool,
        "prompts/get": _get_prompt,
        "resources/read": _read_resource,
        "completion/complete": _complete,
        "resources/subscribe": _subscribe,
        "resources/unsubscribe": _unsubscribe,
    }


async def _pass(middleware: Middleware, ctx: Context, call_next: _Serve, request: Request) -> JsonObject:
    return await middleware(ctx, request, functools.partial(_next, call_next, request))


def _next(call_next: _Serve, request: Request, other: Request | None = None, /) -> Awaitable[JsonObject]:
    if other is None:
        return call_next(request)
    if not isinstance(other, Request):
        raise UsageError(f"call_next takes a Request, got {type(other).__name__}; write await call_next()")
    return call_next(other)


def _own(page: JsonObject) -> JsonObject:
    """A copy that a middleware may change, for what is kept is shown to others too."""
    copy: JsonObject = parse(page.text if isinstance(page, CachedResult) else to_text(page))[0]
    return copy


def _renamed(request: Request, entry: Entry) -> Request:
    """The request as the mounted server knows it."""
    return Request(request.id, request.method, {**request.params, "name": entry.inner.key})


def _called(ctx: Context) -> str:
    """The request, for people."""
    name = ctx.request.params.get("name", ctx.request.params.get("uri"))
    return f"{ctx.method} {shown(name)}" if isinstance(name, str) else ctx.method


def _failed(ctx: Context, text: str) -> JsonObject | RequestError:
    tool = ctx.method == "tools/call"
    return tool_failure(text, ctx._terms.revision) if tool else RequestError(INTERNAL_ERROR, text)


def _session_of(ctx: Context) -> ListenerKey:
    return ListenerKey(ctx._link, None)  # type: ignore[arg-type]


def _pages(ctx: Context, error: RequestError) -> InputRequired | None:
    """What `UrlElicitationRequired` asks where there is no such error (elic-56).  None where there is, and for every
    other error.  Raises what the same question would raise if it were asked by `ctx.elicit_url`."""
    if error.code != URL_ELICITATION_REQUIRED:
        return None
    from trio_mcp.server.questions import UrlElicitationRequired

    if not isinstance(error, UrlElicitationRequired):
        return None
    pages = {f"url-{number}": question for number, question in enumerate(error.questions, 1)}
    worded(ctx, pages)  # elic-12
    if ctx._terms.revision.handshake:
        return None
    if any(ctx.answers.get(key, NOTHING).get("action") in ("decline", "cancel") for key in pages):
        raise RequestError(INTERNAL_ERROR, error.message)  # elic-50: asked again, the user would say no again
    return InputRequired(pages, ctx.state)


# Params.


def _named(params: JsonObject) -> tuple[str, JsonObject]:
    """The name and the arguments of a call."""
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str):
        raise RequestError(INVALID_PARAMS, "name must be a string")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(INVALID_PARAMS, "arguments must be an object")
    return name, arguments


_REFERENCES = {"ref/prompt": "name", "ref/resource": "uri"}


def _completion_params(params: JsonObject) -> tuple[str, str, str, str, Mapping[str, str]]:
    """cmpl-04, cmpl-08: what is to be completed, checked."""
    ref, argument = params.get("ref"), params.get("argument")
    context = params.get("context") or NOTHING
    kind = ref.get("type") if isinstance(ref, dict) else None
    if not isinstance(ref, dict) or not isinstance(kind, str) or not isinstance(ref.get(_REFERENCES.get(kind)), str):
        raise RequestError(INVALID_PARAMS, "ref must be a ref/prompt with a name or a ref/resource with a uri")
    if not isinstance(argument, dict) or not all(isinstance(argument.get(key), str) for key in ("name", "value")):
        raise RequestError(INVALID_PARAMS, "argument must have a name and a value, both strings")
    arguments = (context.get("arguments") or NOTHING) if isinstance(context, Mapping) else None
    if not isinstance(arguments, Mapping) or not all(isinstance(value, str) for value in arguments.values()):
        raise RequestError(INVALID_PARAMS, "context.arguments must be an object of strings")
    return kind, ref[_REFERENCES[kind]], argument["name"], argument["value"], arguments
