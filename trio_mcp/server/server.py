"""Server: what its author writes, and how it is started.

A server is a description: tools, resources, prompts, completions, and how they are to be served.  It may be changed at
any time, also while it runs, and it may run several times at once, since all that moves belongs to a `Run`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias, TypeVar, Unpack, overload

from trio_mcp.core.errors import UsageError, check_seconds
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.core.rounds import StateSealer
from trio_mcp.core.session import Offer
from trio_mcp.core.subscriptions import ChangeEvent, resource_updated
from trio_mcp.server import registration
from trio_mcp.server.catalog import CHANGES, Catalog
from trio_mcp.server.description import (
    CAPABILITIES,
    check_cache,
    check_hooks,
    check_numbers,
    check_switches,
    experimental_of,
    info_of,
    kind_of,
    offers_of,
    revisions_of,
    text_of,
)
from trio_mcp.server.dispatch import Filter, Middleware
from trio_mcp.server.process import live, place
from trio_mcp.server.run import Draining, Run, Runs, Statistics
from trio_mcp.transport.nursery import check_trio, is_but, open_nursery
from trio_mcp.transport.workers import stale

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

    import trio

    from trio_mcp.core.cache import CacheHints
    from trio_mcp.core.content import Annotations, Icon, Resource
    from trio_mcp.core.models import Prompt, ResourceTemplate, Tool, ToolAnnotations
    from trio_mcp.core.oauth.resource import Protection, Verify
    from trio_mcp.server.http.listener import HttpAddress
    from trio_mcp.server.http.options import HttpOptions
    from trio_mcp.transport.duplex import Tap

__all__ = ["Server"]

_log = logging.getLogger("trio_mcp")
F = TypeVar("F", bound=Callable[..., Any])
Lifespan: TypeAlias = "Callable[[Server], AbstractAsyncContextManager[Any]]"
ListName: TypeAlias = Literal["tools", "prompts", "resources"]


class Server:
    """An MCP server.

    `name` and `version` are what clients are told it is; `instructions` is advice on how to use it, for the model.

    `lifespan(server)` is an async context manager, entered once for each run; what it yields is `ctx.lifespan`.
    `middleware` wraps every request for a list, a completion, a legacy subscription or a handler: `async def (ctx,
    request, call_next)`, the first one outermost.  It sees a call once, however many rounds of questions that takes.
    `filter(principal, item)` says what exists for whom, with True or False, and is where access is decided: it is asked
    for every tool, prompt, resource and template that is listed, called, read, completed or listened to.
    `capabilities` names what the server will have later though it has none at the start ("tools", "prompts",
    "resources", "completions"): clients are told once.  Without `list_changed` clients are not told when lists change,
    and without `subscribe` not when a resource does; both are promised otherwise.  `experimental` is declared as it is:
    objects by name, such as ``{"com.example/voice": {}}``; what clients declare there is found by `ctx.supports`.

    `page_size` is the most that a list gives at once; `cache` the hints for lists, by method ("tools/list": ...);
    `change_debounce` the seconds for which changes are gathered before clients are told; `threads` how many plain
    functions run at once.  `state_keys`, each of 32 random bytes or more, seal what a client carries between the rounds
    of a call: give the same to every replica; by default they are made at random.

    Raises `UsageError` for what cannot be declared.
    """

    def __init__(
        self,
        name: str,
        *more: Never,
        version: str = "0",
        title: str | None = None,
        description: str | None = None,
        website_url: str | None = None,
        icons: Sequence[Icon] | None = None,
        instructions: str | None = None,
        lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] = (),
        filter: Filter | None = None,
        capabilities: Collection[str] = (),
        subscribe: bool = True,
        list_changed: bool = True,
        experimental: Mapping[str, Mapping[str, Any]] | None = None,
        page_size: int | None = 100,
        cache: Mapping[str, CacheHints] | None = None,
        change_debounce: float = 0.05,
        threads: int = 40,
        limits: Limits | None = None,
        state_keys: Sequence[bytes] | None = None,
        revisions: Collection[str] = tuple(REVISIONS),
        **other: Never,
    ) -> None:
        if more:
            raise TypeError(
                'Server takes the name by position, and all else by name; write Server("x", instructions="...")'
            )
        if other:
            from trio_mcp.core.migration import option_error

            raise option_error("Server", min(other), (Server.__init__.__kwdefaults__ or {}))
        check_numbers(page_size, change_debounce, threads)
        check_hooks(lifespan, middleware, filter)
        if not isinstance(limits, Limits | None):
            raise UsageError(f"limits are given as Limits(...), not as {type(limits).__name__}")
        check_cache(cache or {})
        self.catalog = Catalog()
        self.lifespan = lifespan
        self.middleware: Sequence[Middleware] = _MiddlewareList(middleware)
        self.filter = filter
        self.protection: Protection | None = None
        self.page_size = page_size
        self.cache: Mapping[str, CacheHints] = dict(cache or {})
        self._info = info_of(name, version, title, description, website_url, icons)
        self._instructions = text_of("instructions", instructions)
        self._revisions = revisions_of(revisions)
        self._change_debounce = change_debounce
        self._threads = threads
        self._limits = limits if limits is not None else Limits()
        self._sealer = StateSealer(state_keys if state_keys is not None else [os.urandom(32)])
        self._offers = offers_of(capabilities)
        check_switches(subscribe=subscribe, list_changed=list_changed)
        self._told = {"subscribe": subscribe, "listChanged": list_changed}
        self._experimental = experimental_of(experimental)
        self._offer: Offer | None = None
        self._offered = 0  # how many kinds the catalog had when the offer was made
        self._mounted: list[Server] = []
        self._runs: set[Run] = set()  # its own, and those of the servers that it is mounted in
        self._own = Runs()
        self._shared: Run | None = None  # the one that all connections have in common
        self._sharing = False
        self.catalog.on_change.append(self._publish)
        self.offer()  # what cannot be declared is told now, not to the first client

    if not TYPE_CHECKING:  # or a type checker would take any attribute for one that there is

        def __getattr__(self, name: str) -> Never:
            from trio_mcp.core.migration import attribute_error

            raise attribute_error(self, name)

    # Tools, resources, prompts, completions.

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        annotations: ToolAnnotations | None = None,
        icons: Sequence[Icon] | None = None,
        meta: Mapping[str, Any] | None = None,
        scopes: Collection[str] = (),
        structured: bool = True,
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
    ) -> Callable[[F], F]: ...
    def tool(self, function: Any = None, **options: Any) -> Any:
        """Make a tool of a function; it stays what it was.

        Its parameters become the input schema, its docstring the description, its return hint the output schema
        (`structured=False`: results are text only).  An `async def` runs as a task; a `def` runs in a worker thread
        (`thread=False`: right in the event loop, which stands still meanwhile).  When a call is cancelled, its thread
        is left behind to finish by itself, unless `abandon_on_cancel=False`: then the call ends when the thread does;
        either may ask `trio.from_thread.check_cancelled()`, and report by `trio.from_thread.run(ctx.progress, 1)`.
        With `replay=True` a call whose handler is lost with its process is run again from the start with the answers
        that the client gave.  `scopes` are what an access token must be good for to call it by HTTP, beside those of
        `protect`.  Raises `UsageError` for a signature, a name or a hint that cannot be used.
        """
        return self._decorate("tool", registration.tool_of, function, options)

    def add_tool(
        self,
        tool: Tool,
        handler: Callable[..., Any] | None = None,
        *,
        scopes: Collection[str] = (),
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
        **other: Never,
    ) -> None:
        """Add a tool with a schema of its own; `handler(ctx, arguments)` gets arguments that satisfy it."""
        handler = _handler_of("tool", tool, handler, other)
        options: dict[str, Any] = {
            "scopes": scopes,
            "thread": thread,
            "abandon_on_cancel": abandon_on_cancel,
            "replay": replay,
        }
        self.catalog.add(registration.raw_tool(tool, handler, **options))

    def remove_tool(self, name: str) -> None:
        self.catalog.remove_tool(name)

    @overload
    def resource(self, uri: str) -> Callable[[F], F]: ...
    @overload
    def resource(
        self,
        uri: str,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        mime_type: str | None = None,
        size: int | None = None,
        annotations: Annotations | None = None,
        icons: Sequence[Icon] | None = None,
        meta: Mapping[str, Any] | None = None,
        cache: CacheHints | None = None,
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
    ) -> Callable[[F], F]: ...
    def resource(self, uri: Any = None, **options: Any) -> Any:
        """Make a resource of a function: one URI, or all that a template such as ``notes://{name}`` stands for, whose
        variables are its parameters."""

        if not isinstance(uri, str):
            raise UsageError('a resource has a URI; write @server.resource("notes://{name}")')

        def register(function: F) -> F:
            self.catalog.add(_made(registration.resource_of, options, function, uri))
            return function

        return register

    def add_resource(
        self,
        resource: Resource,
        handler: Callable[..., Any] | None = None,
        *,
        cache: CacheHints | None = None,
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
        **other: Never,
    ) -> None:
        """Add a resource that `handler(ctx, uri)` reads."""
        handler = _handler_of("resource", resource, handler, other)
        options: dict[str, Any] = {
            "cache": cache,
            "thread": thread,
            "abandon_on_cancel": abandon_on_cancel,
            "replay": replay,
        }
        self.catalog.add(registration.raw_resource(resource, handler, **options))

    def add_template(
        self,
        template: ResourceTemplate,
        handler: Callable[..., Any] | None = None,
        *,
        cache: CacheHints | None = None,
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
        **other: Never,
    ) -> None:
        """Add the resources that a template stands for, which `handler(ctx, uri, variables)` reads."""
        handler = _handler_of("template", template, handler, other)
        options: dict[str, Any] = {
            "cache": cache,
            "thread": thread,
            "abandon_on_cancel": abandon_on_cancel,
            "replay": replay,
        }
        self.catalog.add(registration.raw_template(template, handler, **options))

    def remove_resource(self, uri: str) -> None:
        self.catalog.remove_resource(uri)

    def remove_template(self, uri_template: str) -> None:
        self.catalog.remove_template(uri_template)

    @overload
    def prompt(self, function: F, /) -> F: ...
    @overload
    def prompt(
        self,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        icons: Sequence[Icon] | None = None,
        meta: Mapping[str, Any] | None = None,
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
    ) -> Callable[[F], F]: ...
    def prompt(self, function: Any = None, **options: Any) -> Any:
        """Make a prompt of a function whose parameters are text; what it returns are the messages."""
        return self._decorate("prompt", registration.prompt_of, function, options)

    def add_prompt(
        self,
        prompt: Prompt,
        handler: Callable[..., Any] | None = None,
        *,
        thread: bool = True,
        abandon_on_cancel: bool = True,
        replay: bool = False,
        **other: Never,
    ) -> None:
        """Add a prompt; `handler(ctx, arguments)` gets all that are required."""
        handler = _handler_of("prompt", prompt, handler, other)
        self.catalog.add(
            registration.raw_prompt(prompt, handler, thread=thread, abandon_on_cancel=abandon_on_cancel, replay=replay)
        )

    def remove_prompt(self, name: str) -> None:
        self.catalog.remove_prompt(name)

    @overload
    def completion(self, function: F, /) -> F: ...
    @overload
    def completion(
        self,
        ref: str | None = None,
        argument: str | None = None,
        *,
        thread: bool = True,
        abandon_on_cancel: bool = True,
    ) -> Callable[[F], F]: ...
    def completion(self, ref: Any = None, argument: str | None = None, **options: Any) -> Any:
        """Make a function complete arguments: those of one prompt or URI template, or one of them, or (bare) all that
        have no completion of their own.  It takes by name what it needs of `value`, `arguments` (those that have a
        value already), `argument` (the name) and `ref`, and returns the values, best first."""
        if callable(ref):
            return self.completion(**options)(ref)

        def register(function: F) -> F:
            self.catalog.add_completer(_made(registration.completer_of, options, function), ref, argument)
            return function

        return register

    def _decorate(self, kind: str, make: Callable[..., Any], function: Any, options: dict[str, Any]) -> Any:
        if function is None:
            return lambda function: self._decorate(kind, make, function, options)
        if not callable(function):
            how = f"options have names: @server.{kind}(name={function!r})"
            raise UsageError(f"a decorator takes a function, got {function!r}; {how}")
        self.catalog.add(_made(make, options, function))
        return function

    def mount(self, other: Server, *more: Never, prefix: str = "") -> None:
        """Show everything that `other` has, now and later, with `prefix` before the names of tools and prompts.

        URIs stay as they are.  The other's middleware and filter go on working for what is its own, after ours, and its
        lifespan is entered with ours.  Raises `UsageError` for a clash of names, which mounts nothing, for a
        relay, and while the server runs.
        """
        if more:
            raise UsageError(f"mount takes one Server, and a prefix by name; write {_MOUNT}")
        if not isinstance(other, Server):
            raise UsageError(f"mount takes a Server, got {kind_of(other)}; write {_MOUNT}")
        if self._runs:
            raise UsageError("a running server cannot enter the lifespan of another; mount it before it runs")
        self.catalog.mount(other.catalog, prefix)
        self._mounted.append(other)

    def protect(
        self,
        *,
        verify: Verify,
        authorization_servers: Collection[str],
        resource: str | None = None,
        scopes: Collection[str] = (),
        implies: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Demand an access token for every request by HTTP, WebSockets included; other streams are not concerned.

        `verify(token)`, an `async def` or a `def` that does not wait, says who holds it, by a `Principal`, or None if
        it is not accepted: it has expired, say, or was issued for another server, which only `verify` can know.  When
        it cannot tell now it raises `CannotVerify`.  `trio_mcp.jwks` has one for JWTs.

        `resource` is the URL of the endpoint as clients know it, "https://example.com/mcp"; without it `public_url` of
        `serve_http` says so.  `authorization_servers` are the issuers of its tokens: clients find them in the metadata
        of the resource (RFC 9728), which is served beside the endpoint.  `scopes` are needed for every request, those
        of a tool for its calls; `implies` says which scopes stand for others: ``{"notes:write": ["notes:read"]}``.

        Raises `UsageError` for what cannot be, for plain http beyond loopback, and while the server runs.
        """
        from trio_mcp.core.oauth.resource import Protection

        if self._runs:
            raise UsageError("a running server cannot be protected any more; protect it before it runs")
        self.protection = Protection(verify, authorization_servers, resource, scopes, implies or {})

    # Changes.

    def notify_list_changed(self, *lists: ListName) -> None:
        """Tell clients that these lists are to be read again.  Adding and removing says so by itself."""
        for name in lists:
            if name not in CHANGES:
                raise UsageError(f"{name!r} is no list; there are {', '.join(CHANGES)}")
            self._check_told("listChanged", f"the change of {name}")
            self._publish(CHANGES[name])

    def notify_resource_updated(self, uri: str) -> None:
        """Tell clients that subscribed to it that a resource is to be read again.

        Both, and all that adds and removes, may be called from any thread.
        """
        if not isinstance(uri, str):
            raise UsageError(f"a resource is told by its URI, text; not {type(uri).__name__}")
        self._check_told("subscribe", "the change of a resource")
        self._publish(resource_updated(uri))

    def _check_told(self, what: str, change: str) -> None:
        if not self._told[what]:
            option = "list_changed" if what == "listChanged" else what
            raise UsageError(
                f"{change} cannot be told: the server was made with {option}=False, so no client waits for it"
            )

    def _publish(self, change: ChangeEvent) -> None:
        for run in tuple(self._runs):
            run.publisher.publish(change)

    async def _serve_client(self, stream: trio.abc.Stream) -> None:
        """Serve the client of `open_client(server)`, which calls this because it cannot import `serve_stream`."""
        from trio_mcp.server.driver import serve_stream

        await serve_stream(self, stream, shutdown_timeout=0)  # a client that closes its end reads nothing more

    # What it is.

    def offer(self) -> Offer:
        """What the server says about itself: what it has, and what it ever had, since clients may still ask for it."""
        kinds = self.catalog.kinds
        if self._offer is None or len(kinds) != self._offered:  # asked for each message; and kinds only grow
            self._offered = len(kinds)
            capabilities: dict[str, Any] = {"logging": {}, **self._experimental}
            for name in sorted(self._offers | kinds):
                capabilities[name] = {key: True for key in CAPABILITIES[name] if self._told[key]}
            self._offer = Offer(self._info, capabilities, self._revisions, self._instructions)
        return self._offer

    def statistics(self) -> Statistics:
        """How many connections, requests, waiting handlers and listeners there are, over all runs.  A mounted server
        takes part in those of the server that it is mounted in."""
        each = [run.statistics() for run in self._runs]
        return Statistics(
            sum(run.connections for run in each),
            sum(run.running for run in each),
            sum(run.waiting for run in each),
            sum(run.parked for run in each),
            sum(run.listeners for run in each),
            sum(run.bytes for run in each),
        )

    # Running.

    def running(self) -> AbstractAsyncContextManager[object]:
        """The server runs as long as the block: every connection served meanwhile shares its lifespan, its limits and
        its listeners, and handlers that wait for an answer may get it on another connection.

        What the block raises leaves it unchanged.  Connections that are still open at its end are closed then.
        """
        return _RunningServer(self, shared=True)

    def draining(self, seconds: float) -> AbstractAsyncContextManager[None]:
        """The server ends in good order.  From the beginning of the block no new request is taken, nor a connection
        served that begins; what runs goes on, and each connection ends when it has nothing left.  The end of the block
        waits for all of them, and for the lifespans of runs that end with them, until `seconds` after its beginning
        (`math.inf`: as long as it takes).  What is left then
        is cancelled, and answered with an error for which there is a second; it is stopped without one if the block is
        cancelled or raises.

        A server that was drained may run again; `running` blocks that it left behind serve nobody any more.
        """
        check_seconds("what draining may take", seconds)
        return Draining(self._own, seconds)

    def joined(self) -> AbstractAsyncContextManager[Run]:
        """The run that a connection belongs to; for transports."""
        if self._shared is not None:
            return contextlib.nullcontext(self._shared)
        return _RunningServer(self, shared=False)

    def _parts(self) -> Iterator[Server]:
        for mounted in self._mounted:
            yield mounted
            yield from mounted._parts()

    def run(
        self,
        *address: Never,
        http: str | None = None,
        unix: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        shutdown_timeout: float = 5.0,
        tap: Tap | None = None,
        **options: Unpack[HttpOptions],
    ) -> None:
        """Serve as the purpose of this process; for the end of a script.  Inside a Trio program use `serve_stdio`,
        `serve_http` or `serve_stream`.

        That is one client on standard input and output, until it closes them or has gone; or, with `http`, all that
        come to an address such as ``127.0.0.1:3000`` (port 0 takes any; a line on stderr says where), or, with `unix`,
        to a socket file, with the options of `serve_http`.  Raises SystemExit: 130 after Ctrl-C, 143 after SIGTERM, 1
        with one line where it cannot begin.  Calls that run at the end of input, or when SIGTERM comes, have
        `shutdown_timeout` seconds; three seconds later the process ends in any case.  It never waits for the reader of
        its standard error.  `tap` sees all that is said: with `print` it is on standard error of a server on stdio.
        """
        if "transport" in options or (address and address[0] in _TRANSPORTS):
            raise TypeError('transports have no names here: run() serves stdio, run(http="127.0.0.1:3000") HTTP')
        if address:
            raise TypeError(f"say by name what it is: run(http={address[0]!r}) serves HTTP at an address")
        if options:
            _check_http_options(options)
        if http is not None or unix is not None:
            self._run_http(http, unix, ssl_context, shutdown_timeout, tap, options)
            return
        if ssl_context is not None or options:
            which = min(options, default="ssl_context")
            raise TypeError(f'{which} is an option for HTTP, which is served by run(http="127.0.0.1:3000")')
        from trio_mcp.server.stdio import run

        run(self, shutdown_timeout=shutdown_timeout, tap=tap)

    def _run_http(
        self,
        http: str | None,
        unix: str | os.PathLike[str] | None,
        ssl_context: ssl.SSLContext | None,
        shutdown_timeout: float,
        tap: Tap | None,
        options: HttpOptions,
    ) -> None:
        from trio_mcp.server.http.listener import serve_http

        if http is not None and unix is not None:
            raise UsageError("a server listens at an address or at a unix socket; give one of http and unix")
        at = () if http is None else place(http)
        told = _Announcement(self, unix)
        live(
            self,
            lambda _: serve_http(self, *at, unix=unix, ssl_context=ssl_context, tap=tap, task_status=told, **options),
            shutdown_timeout=shutdown_timeout,
        )


_MOUNT = 'server.mount(other, prefix="notes_")'
# What other packages call them, in this place.
_TRANSPORTS = ("stdio", "sse", "http", "streamable-http", "streamable_http")


def _check_http_options(options: HttpOptions) -> None:
    from trio_mcp.server.http.options import HttpOptions

    known = HttpOptions.__annotations__
    if unknown := options.keys() - known:
        if "listeners" in unknown:
            raise TypeError("run has no option 'listeners'; serve_http has it, for use in a Trio program")
        from trio_mcp.core.migration import OPTIONS, option_error

        if elsewhere := unknown & OPTIONS.keys():
            raise option_error("run", min(elsewhere), ())
        raise TypeError(
            f"run has no option {min(unknown)!r}; it serves standard input and output, or HTTP at an address, "
            f'run(http="127.0.0.1:3000"), with the options {", ".join(known)}'
        )


class _MiddlewareList(tuple[Middleware, ...]):
    """Says how middleware is given, where it is taken for a decorator."""

    __slots__ = ()

    def __call__(self, *_: object) -> Never:
        raise UsageError('middleware is an option of the server; write Server("name", middleware=[log_calls])')


def _handler_of(
    kind: str, described: object, handler: Callable[..., Any] | None, other: Mapping[str, object]
) -> Callable[..., Any]:
    """The handler of what is described by hand.  A function alone is what a decorator takes."""
    model, takes = _RAW[kind]
    if inspect.isroutine(described):
        made = 'resource("notes://today")' if kind in ("resource", "template") else kind
        write = f"server.{made}({described.__name__})"
        raise UsageError(f"add_{kind} takes a {model} and a handler, got a function; write {write}")
    if other:
        raise TypeError(f"add_{kind} has no option {min(other)!r}; what clients are told is in the {model}")
    if handler is None:
        write = f"server.add_{kind}({model}(...), handler), with async def handler({takes})"
        raise UsageError(f"add_{kind} needs a handler; write {write}")
    return handler


# By the kind of what is described by hand: its class, and what its handler takes.
_RAW = {
    "tool": ("Tool", "ctx, arguments"),
    "resource": ("Resource", "ctx, uri"),
    "template": ("ResourceTemplate", "ctx, uri, variables"),
    "prompt": ("Prompt", "ctx, arguments"),
}


class _Announcement:
    """Says on stderr where a server listens.  Nothing else goes out on stdout either, which is the program's."""

    def __init__(self, server: Server, unix: str | os.PathLike[str] | None) -> None:
        self._name = server._info["name"]
        self._unix = unix

    def started(self, value: HttpAddress | None = None) -> None:
        assert value is not None
        where = value.local_url if self._unix is None else os.fspath(self._unix)
        where += f", for {value.url}" if value.url != where else ""
        print(f"{self._name} listens at {where}", file=sys.stderr, flush=True)  # noqa: T201  # that is what it is for


class _RunningServer:
    """A run of a server, as a block.

    A class, and no generator that would have to be in this block for as long: see `groups`.
    """

    __slots__ = ("_run", "_server", "_shared", "_stack")

    def __init__(self, server: Server, *, shared: bool) -> None:
        self._server = server
        self._shared = shared

    async def __aenter__(self) -> Run:
        check_trio()
        server = self._server
        async with contextlib.AsyncExitStack() as stack:
            if self._shared:
                if server._sharing:
                    raise UsageError(f"{server._info['name']} is running already")
                server._sharing = True
                stack.callback(setattr, server, "_sharing", False)
            parts = {part.catalog: part for part in server._parts()}
            lifespans = {}
            for part in (server, *parts.values()):
                if part.lifespan is not None:
                    begun = part.lifespan(part)
                    if not isinstance(begun, AbstractAsyncContextManager):
                        raise UsageError(
                            f"lifespan gave {type(begun).__name__}, which is no async context manager; "
                            "write @contextlib.asynccontextmanager above it"
                        )
                    lifespan = _LifespanGuard(begun, part._info["name"])
                    lifespans[part.catalog] = await stack.enter_async_context(lifespan)
            nursery = await stack.enter_async_context(open_nursery())
            run = Run(
                server, parts, lifespans, nursery,
                offer=server.offer, limits=server._limits, window=server._change_debounce, sealer=server._sealer,
                threads=server._threads, held=self._shared,
            )  # fmt: skip
            server._own.add(run)
            stack.callback(server._own.discard, run)
            for part in (server, *parts.values()):
                part._runs.add(run)
                stack.callback(part._runs.discard, run)
            stack.callback(run.stop)
            if self._shared:
                server._shared = run
            self._stack = stack.pop_all()
        self._run = run
        return run

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if self._shared:
            self._server._shared = None
        try:
            return await self._stack.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if not is_but(group, error):
                raise
            return False  # the nursery of a lifespan gives back what has passed through it in a group
        finally:
            self._run.ended.set()


class _LifespanGuard(AbstractAsyncContextManager[Any]):
    """A lifespan of the author.  It may end the run, but not without a word, as a cancellation would."""

    __slots__ = ("_given", "_name")

    def __init__(self, given: AbstractAsyncContextManager[Any], name: str) -> None:
        self._given = given
        self._name = name

    async def __aenter__(self) -> Any:
        try:
            return await self._given.__aenter__()
        except BaseException as error:
            if (failure := stale(error, "the lifespan")) is None:
                raise
            raise failure from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            ended = await self._given.__aexit__(kind, error, traceback)
        except BaseException as raised:
            if (failure := stale(raised, "the lifespan")) is None:
                raise
            raise failure from raised
        if ended and stale(error, "the lifespan") is not None:
            _log.warning("%s ends: its lifespan has cancelled what runs within it", self._name)
        return ended


def _made(make: Callable[..., Any], options: Mapping[str, Any], *given: Any) -> Any:
    """What a decorator registers.  Says which options there are to who gives another."""
    known = [each.name for each in inspect.signature(make).parameters.values() if each.kind is each.KEYWORD_ONLY]
    if unknown := options.keys() - set(known):
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(known)}")
    return make(*given, **options)
