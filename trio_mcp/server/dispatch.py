"""Dispatch: turn a request into its result.

The session has checked the request already: its method exists, its capability was declared, and its metadata is valid.
The dispatcher reads the params, finds the entry, calls middleware and filters, runs the handler, and turns its return
value or exception into the answer:

| Raised by a handler | tools/call | other methods |
|---|---|---|
| ToolError | a result with isError and its text | -32603, with its text |
| PathRefused | a result with isError and its text | -32602 |
| RequestError | that JSON-RPC error | that JSON-RPC error |
| NotDeclared (the client cannot be asked) | modern: -32021; legacy: isError, with its text | the same; legacy: -32603 |
| NotInThisRevision, RemoteProtocolError | isError, with its text | -32603, with its text |
| ClientError: the client answered a question with an error | isError, with its text | -32603, with its text |
| another exception | isError, generic; traceback to the log | -32603, generic; traceback to the log |

KeyboardInterrupt and cancellation pass through.

A mounted server serves its own entries as if it were alone: the request goes to it under its own name for the entry,
through its middleware and its filter, with its lifespan.  A request for an entry that no catalog has goes to the relays
that are mounted.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    RESOURCE_NOT_FOUND,
    URL_ELICITATION_REQUIRED,
    McpError,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    ResourceNotFound,
    UsageError,
    printable,
    shown,
)
from trio_mcp.core.messages import CachedResult, JsonObject, Request, parse, to_text
from trio_mcp.core.principals import Principal, has_scopes
from trio_mcp.core.revisions import NOTHING, capability_object
from trio_mcp.server.context import ClientError, ClientGone, Context
from trio_mcp.server.entries import KINDS, LISTS, Entry
from trio_mcp.server.handlers import BadArguments, Handler, RunMode
from trio_mcp.server.registry import Catalog, EntryRoute
from trio_mcp.server.results import BadResult, InputRequired, ToolError, tool_failure
from trio_mcp.transport.nursery import sole

if TYPE_CHECKING:
    from trio_mcp.core.oauth.resource import Protection
    from trio_mcp.server.run import Run

__all__ = ["CallNext", "Dispatcher", "Middleware"]


class CallNext(Protocol):
    """The rest of the chain after a middleware.  Returns the result of the request, or raises as the handler.

    The default `request` is the one that the middleware got.
    """

    def __call__(self, request: Request | None = None, /) -> Awaitable[JsonObject]: ...


_Rest: TypeAlias = Callable[[Request], Awaitable[JsonObject]]  # of the chain of middleware
Middleware: TypeAlias = Callable[[Context, Request, CallNext], Awaitable[JsonObject]]
_USED = {"tools/call": "tools", "prompts/get": "prompts", "resources/read": "resources"}  # the kind of the entry
_OF_RELAYS = "@"  # begins the cursors of pages of relays; the cursors of `paginate` do not have it
_Method: TypeAlias = "Callable[[Dispatcher, Catalog, Context, Request], Awaitable[JsonObject]]"

_log = logging.getLogger("trio_mcp")


class Dispatcher:
    """Serves the requests of one running server.  `lifespans` are the values of its lifespan and of those mounted."""

    def __init__(self, run: Run, catalog: Catalog, lifespans: Mapping[Catalog, Any]) -> None:
        self._run = run
        self.catalog = catalog
        self._lifespans = lifespans

    def protection(self) -> Protection | None:
        """The protection of the running server.  Clients with access to it have access to all mounted servers.

        Raises UsageError if only a mounted server is protected, because it would be open to all clients.
        """
        if self.catalog.protection is None and any(each.protection is not None for each in self.catalog.parts()):
            raise UsageError(
                "a mounted server is protected, but the server that is served is not; call protect of the outer server"
            )
        return self.catalog.protection

    async def serve(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        """Serve a request as `server` does: the running server, or a server that is mounted in it.

        Raises the exception of the handler; see `failure`.
        """
        try:
            serve = self._METHODS[ctx.request.method]  # a middleware may replace the request, but not its method
        except KeyError:
            serve = Dispatcher._beyond
        outer, ctx.lifespan = ctx.lifespan, self._lifespans.get(server)
        try:
            if not server.middleware:
                return await serve(self, server, ctx, request)
            call_next: _Rest = functools.partial(serve, self, server, ctx)
            for middleware in reversed(server.middleware):
                call_next = functools.partial(_pass, middleware, ctx, call_next)
            result = await call_next(request)
        finally:
            ctx.lifespan = outer
        if not isinstance(result, dict):
            if inspect.iscoroutine(result):
                result.close()  # or Python would warn as well
            raise UsageError(
                f"a middleware must return a result, got {type(result).__name__}; write return await call_next()"
            )
        return result

    def failure(self, ctx: Context, error: BaseException) -> JsonObject | RequestError:
        """Make the answer to a request whose handler raised `error`.  Details for the operator go to the log."""
        try:
            return self._answer_for(ctx, sole(error))
        except Exception as second:  # noqa: BLE001  # `str` of an author's exception may raise
            return self.broken(ctx, second)

    def broken(self, ctx: Context, error: BaseException) -> JsonObject | RequestError:
        """Log `error`, and make a generic answer that does not show it."""
        # log-06: the text of the exception may be a secret, so it goes only to the server's own log.
        name = _described(ctx)
        if type(error) is RuntimeError and error.args == ("no running event loop",):  # asyncio raises it
            error.add_note("handlers run on Trio: use `await trio.sleep(1)`, or asyncio.run in a def handler")
        if isinstance(error, BadResult) and isinstance(error.__cause__, McpError):
            _log.error("%s failed: %s", name, error)  # no frame of the traceback is the author's
        else:
            _log.error("%s failed", name, exc_info=error)
        return _error_answer(ctx, f"{name} failed; the server's log says why")

    def _answer_for(self, ctx: Context, error: BaseException) -> JsonObject | RequestError:
        tool = ctx.method == "tools/call"
        if tool and isinstance(error, RequestError) and error.correctable:
            return tool_failure(str(error.message), ctx._terms.revision)
        if isinstance(error, RequestError) and not isinstance(error, ClientError):
            code = ctx._terms.revision.error_code(error.code)
            if code == INTERNAL_ERROR != error.code:
                _log.warning(
                    "%s was answered with error %d, because %s reserves %d; use a code outside of -32768 to -32000",
                    _described(ctx), code, ctx.revision, error.code,
                )  # fmt: skip
            return error
        if isinstance(error, ToolError):
            try:
                failed = tool_failure(error, ctx._terms.revision)
            except (BadResult, NotInThisRevision) as unwritable:
                error = unwritable
            else:
                if tool:
                    return failed
                texts = [block["text"] for block in failed["content"] if block.get("type") == "text"]
                if any(texts):  # an error can carry only text
                    return RequestError(INTERNAL_ERROR, "\n".join(texts))
        if isinstance(error, NotDeclared) and not ctx._terms.revision.handshake:
            needed = {"requiredCapabilities": capability_object([error.capability])}
            return RequestError(MISSING_CLIENT_CAPABILITY, str(error), needed)
        if isinstance(error, NotDeclared | NotInThisRevision | RemoteProtocolError | ClientError | ClientGone):
            return _error_answer(ctx, f"{_described(ctx)}: {error}")
        return self.broken(ctx, error)

    # Lists.

    async def _list(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        method, revision, cursor = request.method, ctx._terms.revision, request.params.get("cursor")
        allowed = functools.partial(EntryRoute.allowed, principal=ctx.principal) if self._filters else None
        relays, member = server.relays(LISTS[method]), KINDS[LISTS[method]].member
        if relays and isinstance(cursor, str) and cursor.startswith(_OF_RELAYS):
            page = await self._list_relayed(server, ctx, request, [], cursor)
        else:
            page = server.list(method, revision, cursor, server.page_size, allowed)
            if relays and "nextCursor" not in page:
                page = await self._list_relayed(server, ctx, request, page[member], f"{_OF_RELAYS}0.")
        if server.middleware:  # it may change the page, and cached entries are shown to other clients
            page = parse(page.text if isinstance(page, CachedResult) else to_text(page))[0]
        hints = server.cache.get(method)
        if hints is None or method not in revision.cacheable:
            return page
        if isinstance(page, CachedResult):
            return page.with_more("hints", hints, lambda: {**page, **hints.members()})
        return {**page, **hints.members()}

    async def _list_relayed(
        self, server: Catalog, ctx: Context, request: Request, items: Sequence[JsonObject], cursor: str
    ) -> JsonObject:
        """Append a page of a mounted relay to items of our own, without the entries that one of our own hides.

        The cursor has the number of the relay, and the cursor that its server gave.
        """
        kind, (number, _, inner) = LISTS[request.method], cursor.removeprefix(_OF_RELAYS).partition(".")
        relays, member, key = server.relays(kind), KINDS[kind].member, KINDS[kind].key
        if not number.isdecimal() or int(number) >= len(relays):
            raise RequestError(INVALID_PARAMS, "the list has changed around the cursor; list again without a cursor")
        mount = relays[int(number)]
        params = {name: value for name, value in request.params.items() if name != "cursor"}
        if inner or not mount.catalog.remote:
            params["cursor"] = inner or f"{_OF_RELAYS}0."
        found = await self.serve(mount.catalog, ctx, Request(request.id, request.method, params))
        page: JsonObject = {member: [*items]}
        for item in found.get(member, ()):
            if isinstance(item, dict) and isinstance(name := item.get(key), str):
                name = mount.outer(kind, name)
                if server.find(kind, name) is not None:
                    continue
                item = {**item, key: name}
            page[member].append(item)
        if (following := found.get("nextCursor")) is not None:
            page["nextCursor"] = f"{_OF_RELAYS}{number}.{following}"
        elif int(number) + 1 < len(relays):
            page["nextCursor"] = f"{_OF_RELAYS}{int(number) + 1}."
        return page

    @functools.cached_property
    def _filters(self) -> bool:
        return any(each.filter is not None for each in self.catalog.parts())

    # Scopes.  Lists also show tools that need other scopes: a client that does not see a tool never asks for its scope.

    @property
    def scopes(self) -> Sequence[str]:
        """The scopes that every request needs."""
        return self._required_scopes(())

    def scopes_for(self, request: Request, principal: Any) -> Sequence[str]:
        """All scopes that this request needs over HTTP."""
        name = request.params.get("name") if request.method == "tools/call" else None
        route = self.catalog.find("tools", name) if isinstance(name, str) else None
        if route is None or not route.entry.scopes or not route.allowed(principal):
            return self._required_scopes(())  # the scopes of a hidden tool would show that it exists
        return self._required_scopes(route.entry.scopes)

    def _required_scopes(self, scopes: Sequence[str]) -> Sequence[str]:
        protection = self.catalog.protection
        return scopes if protection is None else tuple(dict.fromkeys((*protection.scopes, *scopes)))

    def check_scopes(self, ctx: Context, entry: Entry) -> None:
        """Raise RequestError for a missing scope, if HTTP itself could not refuse, as on a WebSocket (auth-80).

        Scopes exist only over HTTP: the client of a stream, which has no headers, may call all tools.  Over HTTP a
        client has no scopes if the server is not protected.
        """
        principal = ctx._terms.principal
        if not (isinstance(principal, Principal) or ctx.headers):
            return
        needed = self._required_scopes(entry.scopes)
        if not has_scopes(principal, needed):
            scope = " ".join(needed)
            data = {"error": "insufficient_scope", "scope": scope}
            raise RequestError(INVALID_REQUEST, f"the access token lacks a scope; this request needs {scope}", data)

    # Calls.

    async def _use(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        """Call a tool, get a prompt or read a resource."""
        kind, revision = _USED[ctx.request.method], ctx._terms.revision
        route: EntryRoute | None
        if kind == "resources":
            key = uri = request.params.get("uri")
            if not isinstance(key, str):
                raise RequestError(INVALID_PARAMS, "resources/read needs a uri, a string")
            route, arguments = server.find_resource(key) or (None, {})
        else:
            (key, arguments), uri = _call_params(request.params), None
            route = server.find(kind, key)
        if route is None or (self._filters and not route.allowed(ctx.principal)):
            return await self._relayed(server, ctx, request, kind, key)
        entry = route.entry
        if entry.scopes:
            self.check_scopes(ctx, entry)
        if len(route.places) > 1:
            return await self._serve_mounted(route, ctx, request)
        try:
            call = entry.prepare(ctx, arguments, uri)  # res-10: the variables of a URI are checked already
        except BadArguments as bad:
            if kind == "tools" and revision.invalid_arguments_are_results:  # tool-33: the model can correct them
                return tool_failure(str(bad), revision)
            raise RequestError(INVALID_PARAMS, str(bad)) from None  # tool-32, prm-08, prm-09, prm-17
        result = await self._run_handler(ctx, entry, call, key)
        if entry.cache is None:
            return result
        complete = result.get("resultType", "complete") == "complete"
        if complete and request.method in revision.cacheable:
            return {**entry.cache.members(), **result}
        return result

    async def _serve_mounted(self, route: EntryRoute, ctx: Context, request: Request) -> JsonObject:
        """Serve a request as the next server on the route does."""
        catalog, key = route.places[1]
        return await self.serve(catalog, ctx, _renamed(request, route.entry.kind, key))

    async def _relayed(
        self, server: Catalog, ctx: Context, request: Request, kind: str, key: str, why: str = ""
    ) -> JsonObject:
        """Serve a request for an entry that no catalog has by a mounted relay.  Raises RequestError if there is none.

        The prefix of a name decides which relay is asked.  A URI has none, so all relays are asked until one knows it.
        """
        label, method, prefixed = KINDS[kind].label, KINDS[kind].method, KINDS[kind].prefixed
        missing: RequestError = ResourceNotFound(key)
        if why or prefixed:  # tool-31: an unknown tool is an error, not a tool result; prm-08
            why = why or f"there is no {label} {shown(key)}; {method} names those there are"
            missing = RequestError(INVALID_PARAMS, why)
        for mount in server.relays(kind, key):
            inner = mount.inner(kind, key)
            assert inner is not None
            try:
                return await self.serve(mount.catalog, ctx, _renamed(request, kind, inner))
            except RequestError as error:
                if prefixed or error.code not in (RESOURCE_NOT_FOUND, INVALID_PARAMS):
                    raise
        raise missing

    async def _run_handler(self, ctx: Context, entry: Entry, call: Callable[[], Any], key: str) -> JsonObject:
        """Run a handler, again after each `InputRequired`, and make the result of its value."""
        ctx._replay = entry.replay
        if ctx._refusal is not None and not entry.replay:
            raise ctx._refusal
        while True:
            try:
                value = await (call() if entry.handler.how is RunMode.ASYNC else self._call(entry.handler, call, ctx))
            except RequestError as error:
                value = None if error.code != URL_ELICITATION_REQUIRED else self._run.parking.pages_of(ctx, error)
                if value is None:
                    raise
            if not isinstance(value, InputRequired):
                return entry.finish(entry, value, key, ctx._terms.revision)
            asking = await self._run.parking.answers_to(ctx, value)
            if asking is not None:
                return asking

    async def _call(self, handler: Handler, call: Callable[[], Any], ctx: Context) -> Any:
        if handler.how is RunMode.ASYNC:
            return await call()
        if handler.how is RunMode.THREAD:
            return await self._run.threads.run(call, ctx._holder, abandon_on_cancel=handler.abandon_on_cancel)
        return call()

    # Completion.

    async def _complete(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        kind, name, argument, value, arguments = _completion_params(request.params)
        route = server.find_completed(kind, name)
        # cmpl-04: a client may complete the arguments of the entries that it may use.
        if route is None or not route.allowed(ctx.principal):
            of = "prompts" if kind == "ref/prompt" else "templates"
            label = "prompt" if kind == "ref/prompt" else "resource or resource template"
            return await self._relayed(server, ctx, request, of, name, f"there is no {label} {shown(name)}")
        found = server.completer(route, argument)
        if found is None:
            return {"completion": {"values": [], "total": 0, "hasMore": False}}
        completer, at = found
        if at:
            return await self._serve_mounted(route, ctx, request)
        given: dict[str, Any] = {"value": value, "arguments": arguments, "argument": argument}
        if "ref" in completer.takes:
            from trio_mcp.core.models import PromptReference, ResourceReference

            given["ref"] = ResourceReference(name) if kind == "ref/resource" else PromptReference(name)
        call = completer.prepare(ctx, {each: given[each] for each in completer.takes})
        value = await self._call(completer.handler, call, ctx)
        return completer.finish(completer, value, argument, ctx._terms.revision)

    # Legacy subscriptions.  Modern ones do not come here, because no handler runs for them.

    async def _subscribe(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        uri = request.params.get("uri")
        if ctx.request.method == "resources/subscribe" and isinstance(uri, str):
            if not self.may_subscribe(ctx, uri):
                raise ResourceNotFound(uri)
            if not server.remote and server.relays("resources") and server.find_resource(uri) is None:
                return await self._relayed(server, ctx, request, "resources", uri)
        return await ctx._session("a subscription").watch(ctx.request)

    def may_subscribe(self, ctx: Context, uri: str) -> bool:
        """Whether this client may subscribe to updates of a resource.

        Without a filter it may subscribe to a resource that does not exist yet.  With a filter it may not: the filter
        would not be called again when the resource appears, and hidden resources must look like missing ones.
        """
        if not self._filters:
            return True
        found = self.catalog.find_resource(uri)
        return found is not None and found[0].allowed(ctx.principal)

    # Extensions.

    async def _beyond(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        """Serve a method that the protocol does not have: of this server, or of one that is mounted in it.

        Of several servers with this method, each is asked until one knows what the params name.
        """
        from trio_mcp.server.extensions import candidates, entry_for

        unknown = RequestError(METHOD_NOT_FOUND, f"{shown(request.method)} does not exist here")
        for each in candidates(server, request.method):
            try:
                if each is not server:
                    return await self.serve(each, ctx, request)
                entry, call = entry_for(server, ctx, request)
                return await self._run_handler(ctx, entry, call, request.method)
            except RequestError as error:
                if error.code not in (INVALID_PARAMS, METHOD_NOT_FOUND):
                    raise
                if unknown.code == METHOD_NOT_FOUND:
                    unknown = error
        raise unknown

    async def _agree(self, server: Catalog, ctx: Context, request: Request) -> JsonObject:
        """Let extensions agree to their members of a filter, then start the subscription."""
        from trio_mcp.server.extensions import start_subscription

        await start_subscription(server, ctx)
        return {}  # not sent: the request stays open

    _METHODS: ClassVar[Mapping[str, _Method]] = {
        "subscriptions/listen": _agree,
        **dict.fromkeys(LISTS, _list),
        **dict.fromkeys(_USED, _use),
        "completion/complete": _complete,
        **dict.fromkeys(("resources/subscribe", "resources/unsubscribe"), _subscribe),
    }


async def _pass(middleware: Middleware, ctx: Context, call_next: _Rest, request: Request) -> JsonObject:
    return await middleware(ctx, request, functools.partial(_next, call_next, request))


def _next(call_next: _Rest, request: Request, other: Request | None = None, /) -> Awaitable[JsonObject]:
    if not isinstance(other, Request | None):
        raise UsageError(f"call_next takes a Request, got {type(other).__name__}; write await call_next()")
    return call_next(request if other is None else other)


def _renamed(request: Request, kind: str, key: str) -> Request:
    """The request with the name that the next server uses for the entry; URIs have no prefix."""
    if not KINDS[kind].prefixed:
        return request
    params, completes = request.params, request.method == "completion/complete"
    changed = {"ref": {**params["ref"], "name": key}} if completes else {"name": key}
    return Request(request.id, request.method, {**params, **changed})


def _described(ctx: Context) -> str:
    """Describe the request for messages and logs."""
    name = ctx.request.params.get("name", ctx.request.params.get("uri"))
    method = printable(ctx.method[:80])  # with a fallback, clients choose it
    return f"{method} {shown(name)}" if isinstance(name, str) else method


def _error_answer(ctx: Context, text: str) -> JsonObject | RequestError:
    """Make the answer of a failed call: a result with isError for a tool, or else an error."""
    tool = ctx.method == "tools/call"
    return tool_failure(text, ctx._terms.revision) if tool else RequestError(INTERNAL_ERROR, text)


# Params.


def _call_params(params: JsonObject) -> tuple[str, JsonObject]:
    """Read the name and the arguments of a call."""
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
    """Read the params of a completion: kind, name, argument, value, other arguments (cmpl-04, cmpl-08)."""
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
