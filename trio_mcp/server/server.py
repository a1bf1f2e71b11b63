"""Server: the public class that authors write and start.

A server object has only the tools, resources, prompts, completions and options.  Entries may be added and removed at
any time, also while the server runs.  It may run several times at once, because each `Run` has the state of one run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias, TypeVar, Unpack, get_args, overload

import attrs
import trio

import trio_mcp.server as makers  # the room loads the module of a maker when that is first used
from trio_mcp.core.errors import UsageError, check_seconds, shown
from trio_mcp.core.messages import JsonObject, Limits
from trio_mcp.core.options import OPTIONS, WithOtherNames, check_options, option_error, show_options
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.core.session import Offer
from trio_mcp.server.entries import (
    LISTS,
    CompletionOptions,
    Entry,
    HandlerOptions,
    PromptOptions,
    RawResourceOptions,
    RawToolOptions,
    ResourceOptions,
    ToolOptions,
)
from trio_mcp.server.process import announce, live, parse_address, run_stdio
from trio_mcp.server.registry import CAPABILITIES, Catalog, Filter
from trio_mcp.server.run import Run, Statistics, drained, running
from trio_mcp.server.session import serve_stream

if TYPE_CHECKING:
    import ssl

    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Icon, Resource
    from trio_mcp.core.extensions import Extension
    from trio_mcp.core.models import Prompt, ResourceTemplate, Tool
    from trio_mcp.core.oauth.resource import Verify
    from trio_mcp.core.request_state import StateSealer
    from trio_mcp.core.subscriptions import ChangeEvent
    from trio_mcp.server.dispatch import Middleware
    from trio_mcp.server.extensions import ExtensionRegistry, ServerExtension
    from trio_mcp.server.http.listener import HttpAddress
    from trio_mcp.server.http.options import HttpOptions
    from trio_mcp.server.publishing import Watcher
    from trio_mcp.server.supervised import Supervised
    from trio_mcp.stores.rows import Store
    from trio_mcp.transport.wire import Tap

__all__ = ["Server", "check_names"]

F = TypeVar("F", bound=Callable[..., Any])
Lifespan: TypeAlias = "Callable[[Server], AbstractAsyncContextManager[Any]]"
ListName: TypeAlias = Literal["tools", "prompts", "resources"]
_LISTS = get_args(ListName)


class Server(metaclass=WithOtherNames):
    """An MCP server.

    Create one, register functions with `@server.tool`, `@server.resource` and `@server.prompt`, and call `run()` at the
    end of the script.

    Shown to clients:

    - `name`, `version`, `title`, `description`, `website_url`, `icons`: the identity of the server.
    - `instructions`: advice for the model on how to use the server.
    - `capabilities`: features of which the server has no entry at the start but will have some later ("tools",
      "prompts", "resources", "completions").  Clients read the capabilities only once, when they connect.
    - `list_changed`, `subscribe`: whether clients are notified when a list or a resource changes.
    - `experimental`: experimental capabilities by name, such as ``{"com.example/voice": {}}``.  `ctx.supports` tells
      whether a client has one.
    - `revisions`: the protocol revisions to serve.

    Called by the server:

    - `lifespan(server)`: an async context manager.  It is entered once for each run, and its value is `ctx.lifespan`.
    - `middleware`: a list of `async def (ctx, request, call_next)`, the outermost first.  Each one wraps the requests
      for lists, completions, legacy subscriptions and handlers.  It runs once for each call, even if the handler asks
      the user questions.
    - `filter(principal, item)`: returns True if this principal may use this tool, prompt, resource or template.  It is
      called for each item that is listed, called, read, completed or subscribed to.  It is a plain `def` and must not
      block.

    Limits and tuning:

    - `page_size`: the number of items on one page of a list; None for one page.
    - `cache`: cache hints for lists, by method, such as ``{"tools/list": CacheHints(...)}``.
    - `change_debounce`: seconds to collect changes before clients are notified of all of them.
    - `threads`: the number of plain (`def`) functions that may run at once.
    - `limits`: bounds for messages, calls and memory; see `Limits`.
    - `store`: keeps the tasks of tools with `task=`; by default a `MemoryStore`.  With an `SQLiteStore` they survive
      the process.  Processes that serve HTTP and share a store are replicas: any of them serves any request.
    - `state_keys`: keys of 32 random bytes or more.  In 2026-07-28 a call that asks the user sends its state to the
      client, which returns it with the answer.  The keys protect this state against changes.  Give the same keys to
      every replica.  By default they come from the environment variable TRIO_MCP_STATE_KEYS (hexadecimal digits, and a
      comma between two keys), and without it the server makes one random key.

    Raises `UsageError` for an option with a wrong type or value.
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
        store: Store | None = None,
        revisions: Collection[str] = tuple(REVISIONS),
        **other: Never,
    ) -> None:
        if more:
            raise TypeError(
                'Server takes only the name by position; give options by name, as in Server("x", instructions="...")'
            )
        if other:
            raise option_error("Server", min(other), (Server.__init__.__kwdefaults__ or {}))
        _check_numbers(page_size, change_debounce, threads)
        _check_hooks(lifespan, middleware, filter)
        given = {"limits": limits, "subscribe": subscribe, "list_changed": list_changed}
        check_options({**given, "cache": cache, "experimental": experimental}, Server.__init__)
        _check_cache(cache or {})
        self._catalog = Catalog(tuple(middleware), filter, page_size, dict(cache or {}))
        self._lifespan = lifespan
        self._info = _info_of(
            icons, instructions,
            name=name, version=version, title=title, description=description, websiteUrl=website_url,
        )  # fmt: skip
        self._instructions = instructions
        check_names("revisions", revisions, REVISIONS, "revision")
        self._revisions = [REVISIONS[name] for name in revisions]
        self._change_debounce = change_debounce
        self._threads = threads
        self._limits = limits if limits is not None else Limits()
        if store is not None and not hasattr(store, "claim"):
            raise UsageError(f'store must be a store, got {_kind_of(store)}; write SQLiteStore("tasks.db")')
        self._store = store
        self._shares_store = store is not None
        if state_keys is None and (text := os.environ.get("TRIO_MCP_STATE_KEYS")) is not None:
            from trio_mcp.core.request_state import read_keys

            state_keys = read_keys(text, "TRIO_MCP_STATE_KEYS")
        self._own_keys = state_keys is None
        self._state_keys = state_keys if state_keys is not None else [os.urandom(32)]
        if state_keys is not None:
            self._sealer  # noqa: B018  # so that wrong keys raise now
        check_names("capabilities", capabilities, CAPABILITIES, "capability")
        self._capabilities = frozenset(capabilities)  # declared although there may be no entries yet
        self._notifies = {"subscribe": subscribe, "listChanged": list_changed}
        self._experimental = {} if experimental is None else {"experimental": dict(experimental)}
        self._mounted: list[Server] = []
        self._runs: set[Run] = set()  # of this server, and of the servers that it is mounted in
        self._drains = 0  # the number of open `draining` blocks: meanwhile new runs refuse requests
        self._watcher: Watcher | None = None
        self._supervised: Supervised | None = None  # in a worker: its supervisor
        self._announced: Callable[[str, int], None] | None = None  # gets the URL and the number of workers
        self._shared: Run | None = None  # the run of an open `running` block; all connections use it
        self._sharing = False
        self._catalog.on_change.append(self._publish_list)
        self._current_offer()  # so that wrong options raise now, and not when the first client connects

    # Tools, resources, prompts, completions.

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(self, **options: Unpack[ToolOptions]) -> Callable[[F], F]: ...
    def tool(self, function: Any = None, **options: Any) -> Any:
        """Register a function as a tool: `@server.tool`, or `@server.tool(name="add", ...)`.

        Returns the function unchanged.  Its parameters become the input schema, its docstring the description, and its
        return annotation the output schema.  A parameter annotated with `Context` gets the context of the call; it
        is not part of the schema.

        - `name`, `title`, `description`, `annotations`, `icons`, `meta`: shown to clients.
        - `scopes`: scopes that an access token needs for a call over HTTP, in addition to those of `protect`.
        - `structured=False`: results are text only, without an output schema.
        - `thread=False`: run a `def` in the event loop; the `def` blocks all other tasks until it returns.  By default
          a `def` runs in a worker thread, and an `async def` in a task.
        - `abandon_on_cancel=False`: a cancelled call waits for its thread.  By default the call ends at once, and the
          thread runs to its end without it.  A thread can call `trio.from_thread.check_cancelled()` and
          `trio.from_thread.run(ctx.progress, 1)`.
        - `replay=True`: if the process ends while the call waits for an answer of the client, the function may be
          called again from the start; the answers that it had already received are not asked for again.  The same
          holds for a task that was running.
        - `task`: whether a call may outlive its request, as a task: "optional" (for clients that know tasks),
          "required" (other clients are refused), or "forbidden" (the default).  `ctx.task` sets the status message.
        - `asks_first=True`: the function makes its call a task itself, with `await ctx.task.start()`, for example when
          its questions are answered.

        Raises `UsageError` for a name that is taken or not allowed, or a signature or annotation that has no schema.
        Use `add_tool` to write the schema by hand, and `remove_tool` to remove the tool.
        """
        return self._decorate("tool", function, options)

    def add_tool(
        self, tool: Tool, handler: Callable[..., Any] | None = None, **options: Unpack[RawToolOptions]
    ) -> None:
        """Add a tool whose schema is written by hand.

        `handler(ctx, arguments)` gets the arguments as a dict, checked against the input schema of `tool`.  The options
        are those of `tool`.  Raises `UsageError` for a name that is taken or not allowed, an invalid schema or a
        handler with other parameters.
        """
        self._add(makers.raw_entry("tools", tool, handler, **options))

    def remove_tool(self, name: str) -> None:
        """Remove a tool and notify clients.

        Running calls continue.  Raises `UsageError` if this server has no such tool, or if the tool belongs to
        a mounted server.
        """
        self._catalog.remove("tools", name)

    def resource(self, uri: str = "", **options: Unpack[ResourceOptions]) -> Callable[[F], F]:
        """Register a function that reads a resource: `@server.resource("notes://today")`.

        `uri` is one URI, or a template such as ``notes://{name}`` for many of them; the variables of the template are
        the parameters of the function.  The function returns text, bytes, resource contents or data for JSON.

        `mime_type`, `size` and `cache` describe the contents; the other options are those of `tool`.

        Raises `UsageError` for a URI that is taken or invalid, or if parameters and variables differ.
        """
        if not uri or not isinstance(uri, str):
            raise UsageError('a resource needs a URI; write @server.resource("notes://{name}")')

        def register(function: F) -> F:
            self._catalog.add(makers.resource_of(function, uri, **options))
            return function

        return register

    def add_resource(
        self, resource: Resource, handler: Callable[..., Any] | None = None, **options: Unpack[RawResourceOptions]
    ) -> None:
        """Add a resource that is described by hand; `handler(ctx, uri)` reads it.

        Raises `UsageError` for a URI that is taken or invalid, or a handler with other parameters.
        """
        self._catalog.add(makers.raw_entry("resources", resource, handler, **options))

    def add_template(
        self,
        template: ResourceTemplate,
        handler: Callable[..., Any] | None = None,
        **options: Unpack[RawResourceOptions],
    ) -> None:
        """Add a resource template that is described by hand; `handler(ctx, uri, variables)` reads its resources.

        `variables` is a dict of strings.  Raises `UsageError` for a template that is taken or invalid, or a handler
        with other parameters.
        """
        self._catalog.add(makers.raw_entry("templates", template, handler, **options))

    def remove_resource(self, uri: str) -> None:
        """Remove a resource and notify clients.  Raises `UsageError` as `remove_tool` does."""
        self._catalog.remove("resources", uri)

    def remove_template(self, uri_template: str) -> None:
        """Remove a resource template and its completions, and notify clients.  Raises `UsageError` as `remove_tool`."""
        self._catalog.remove("templates", uri_template)

    @overload
    def prompt(self, function: F, /) -> F: ...
    @overload
    def prompt(self, **options: Unpack[PromptOptions]) -> Callable[[F], F]: ...
    def prompt(self, function: Any = None, **options: Any) -> Any:
        """Register a function as a prompt: `@server.prompt`, or `@server.prompt(name="greeting", ...)`.

        Its parameters are the arguments of the prompt, and must be strings.  It returns the messages: text, content, a
        `PromptMessage`, a list of these, or a `GetPromptResult`.  The options are those of `tool`.

        Raises `UsageError` for a name that is taken, or a parameter that is not text.
        """
        return self._decorate("prompt", function, options)

    def add_prompt(
        self, prompt: Prompt, handler: Callable[..., Any] | None = None, **options: Unpack[HandlerOptions]
    ) -> None:
        """Add a prompt that is described by hand.

        `handler(ctx, arguments)` gets a dict of strings with all required arguments.  Raises `UsageError` for a name
        that is taken, or a handler with other parameters.
        """
        self._catalog.add(makers.raw_entry("prompts", prompt, handler, **options))

    def remove_prompt(self, name: str) -> None:
        """Remove a prompt and its completions, and notify clients.  Raises `UsageError` as `remove_tool` does."""
        self._catalog.remove("prompts", name)

    @overload
    def completion(self, function: F, /) -> F: ...
    @overload
    def completion(
        self, ref: str | None = None, argument: str | None = None, **options: Unpack[CompletionOptions]
    ) -> Callable[[F], F]: ...
    def completion(self, ref: Any = None, argument: str | None = None, **options: Any) -> Any:
        """Register a function that completes arguments of prompts and variables of resource templates.

        - `@server.completion("greeting", "name")`: the argument "name" of the prompt "greeting".
        - `@server.completion("notes://{name}")`: all arguments of this prompt or template.
        - `@server.completion`: all arguments that have no completion of their own.

        The function takes any of these parameters, by name: `value` (the text so far), `arguments` (the arguments that
        have a value already), `argument` (its name), `ref` (the prompt or template), and a `Context`.  It returns a
        list of strings, best first, or a `Completion`.

        Raises `UsageError` if there is no such prompt, template or argument, or if it has a completion already.
        """
        if callable(ref):
            return self.completion(**options)(ref)

        def register(function: F) -> F:
            self._catalog.add_completer(makers.completer_of(function, **options), ref, argument)
            return function

        return register

    def _decorate(self, kind: str, function: Any, options: dict[str, Any]) -> Any:
        if function is None:
            return lambda function: self._decorate(kind, function, options)
        if not callable(function):
            how = f"give options by name: @server.{kind}(name={function!r})"
            raise UsageError(f"a decorator takes a function, got {function!r}; {how}")
        make: Callable[..., Entry] = makers.tool_of if kind == "tool" else makers.prompt_of
        self._add(make(function, **options))
        return function

    def _add(self, entry: Entry) -> None:
        if entry.task != "forbidden":
            importlib.import_module(_LOADED["task"]).add_tool(self, entry.key, entry.task)
        self._catalog.add(entry)

    def mount(self, other: Server, *more: Never, prefix: str = "") -> None:
        """Serve all entries of another server in this one, including entries that are added later.

        `prefix` is put before the names of tools and prompts; URIs do not change.  A request for an entry of `other`
        passes through the middleware and filter of this server, then through those of `other`.  Each run of
        this server also enters the lifespan of `other`.

        `other` may be a relay (`trio_mcp.relay`).  Only its upstream server knows its entries: they are listed after
        those of this server, an entry of this server hides one of the same name, and requests for unknown names with
        the prefix and for unknown URIs are sent to it.

        Raises `UsageError` if a name or URI is taken (then nothing is mounted), if this server is running, if it has a
        filter and `other` is a relay, or if two relays have the same prefix.
        """
        if more:
            raise UsageError(f"mount takes one Server, and the prefix by name; write {_MOUNT}")
        if not isinstance(other, Server):
            raise UsageError(f"mount takes a Server, got {_kind_of(other)}; write {_MOUNT}")
        if self._runs:
            raise UsageError("a running server cannot enter the lifespan of another; mount it before it runs")
        self._catalog.mount(other._catalog, prefix)
        self._mounted.append(other)

    def protect(
        self,
        *,
        verify: Verify,
        authorization_servers: Collection[str] = (),
        resource: str | None = None,
        scopes: Collection[str] = (),
        implies: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Require an access token for every HTTP request, including WebSockets.  stdio and other streams need no token.

        - `verify(token)`: returns the `Principal` of the token, or None to refuse the token, for example because it has
          expired or was issued for another server.  It raises `CannotVerify` if it cannot check tokens at
          present.  It is an `async def`, or a `def` that does not block.  `trio_mcp.oauth` has one for JWTs.
        - `authorization_servers`: the issuers of the tokens, at least one.  Clients find them in the metadata of the
          resource (RFC 9728), which is served beside the endpoint.
        - `resource`: the URL of the endpoint as clients know it, "https://example.com/mcp".  The default is
          `public_url` of `serve_http`.
        - `scopes`: the scopes that every request needs.  A call of a tool also needs the `scopes` of the tool.
        - `implies`: scopes that include others, such as ``{"notes:write": ["notes:read"]}``.

        Raises `UsageError` for invalid URLs or scopes, for plain http except on loopback, and while the server runs.
        """
        from trio_mcp.core.oauth.resource import Protection

        if self._runs:
            raise UsageError("a running server cannot be protected; call protect before the server runs")
        self._catalog.protection = Protection(verify, authorization_servers, resource, scopes, implies or {})

    # Extensions.

    def extension(
        self, id: str | Extension, *forms: Extension, settings: Mapping[str, Any] | None = None, required: bool = False
    ) -> ServerExtension:
        """Declare an extension of the protocol, and return the object that registers its methods.

        - `id`: its identifier, with a prefix: "com.example/ping"; or an `Extension` of `trio_mcp.core`, and `forms` if
          it differs between revisions.
        - `settings`: an object for the client.
        - `required`: refuse all requests of clients that do not declare it, with error -32021.

        Raises `UsageError` for a malformed identifier, settings that are no object, or an extension that is there.
        """
        from trio_mcp.core.extensions import Extension

        if isinstance(id, Extension):
            if settings is not None or required:
                raise UsageError("an Extension has its own settings; give them there")
            return self._extended().add((id, *forms))
        if not isinstance(id, str):
            raise UsageError(f"the identifier of an extension must be a str, got {_kind_of(id)}")
        return self._extended().add([Extension(id, {} if settings is None else settings, required=required)])

    def method(
        self, name: str, *, mcp_name: str | None = None, **options: Unpack[CompletionOptions]
    ) -> Callable[[F], F]:
        """Register a function for requests that the protocol does not have: `@server.method("com.example/ping")`.

        The method belongs to no extension, so clients need not declare anything.  `ServerExtension.method` explains the
        function and the options.
        """
        return self._extended().method(None, name, mcp_name, options)

    def notification(self, name: str, **options: Unpack[CompletionOptions]) -> Callable[[F], F]:
        """Register a function for notifications that the protocol does not have, as `method` does."""
        return self._extended().notification(None, name, options)

    def fallback(self, function: F) -> F:
        """Register an `async def (ctx, method, params)` for requests and notifications with unknown methods.

        It returns the result of a request.  Raises `UsageError` if there is a fallback already.
        """
        self._extended().set_fallback(function)
        return function

    def skills(self, path: str | os.PathLike[str], *, cache: CacheHints | None = None) -> None:
        """Serve Agent Skills: all directories with a `SKILL.md` below `path`, or `path` itself (SEP-2640).

        Each file of a skill is a resource, such as ``skill://refunds/SKILL.md``.  Files are read when a client asks, so
        they may change; new files of a skill are served without a call.  `cache` is for lists and entries.

        Raises `UsageError` for a directory without skills, a skill whose name is not that of its directory, whose
        frontmatter cannot be read, or that is larger than hosts must support, and for one that is served already.
        """
        importlib.import_module(_LOADED["skills"]).add_skills(self, path, cache)

    def _extended(self) -> ExtensionRegistry:
        if self._catalog.extended is None:
            from trio_mcp.server.extensions import ExtensionRegistry

            self._catalog.extended = ExtensionRegistry(self._catalog, self._offer_again, lambda: tuple(self._runs))
        return self._catalog.extended

    def _offer_again(self) -> None:
        """An extension or a method has changed.  Raises `UsageError` if it cannot be offered."""
        self._current_offer()
        for run in tuple(self._runs):
            run.make_offers()

    # Changes.

    def notify_list_changed(self, *lists: ListName) -> None:
        """Notify clients that these lists have changed: "tools", "prompts" or "resources".

        The server calls this method itself when entries are added or removed.  Call it if the result of `filter`
        changes.  It may be called from any thread.  Raises `UsageError` for another name, or if the server was created
        with `list_changed=False`.
        """
        for name in lists:
            if name not in _LISTS:
                raise UsageError(f"unknown list {name!r}; the lists are {', '.join(_LISTS)}")
            self._check_notifies("listChanged", f"a change of {name}")
            self._publish_list(name)

    def notify_resource_updated(self, uri: str) -> None:
        """Tell the clients with a subscription to this resource that its contents have changed.

        It may be called from any thread.  Raises `UsageError` if the server was created with `subscribe=False`.
        """
        if not isinstance(uri, str):
            raise UsageError(f"uri must be a str, got {type(uri).__name__}")
        self._check_notifies("subscribe", "a change of a resource")
        if self._runs:
            from trio_mcp.core.subscriptions import resource_updated

            self._publish(resource_updated(uri))

    def _check_notifies(self, capability: str, change: str) -> None:
        if not self._notifies[capability]:
            option = "list_changed" if capability == "listChanged" else capability
            raise UsageError(f"clients cannot be notified of {change}: the server was created with {option}=False")

    def _publish_list(self, name: str) -> None:
        if self._runs:
            from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind

            self._publish(ChangeEvent(ChangeKind[name.upper()]))

    def _publish(self, change: ChangeEvent, reaches: Callable[[Any], bool] | None = None) -> None:
        for run in tuple(self._runs):
            run.publish(change, reaches)

    async def _serve_client(self, stream: trio.abc.Stream) -> None:
        """Serve the client of `open_client(server)`, which calls this because it cannot import `serve_stream`."""
        await serve_stream(self, stream, shutdown_timeout=0)  # a client that has closed its end reads no more

    # Identity and statistics.

    @functools.cached_property
    def _sealer(self) -> StateSealer:
        from trio_mcp.core.request_state import StateSealer  # most servers ask no questions

        return StateSealer(self._state_keys)

    def _current_offer(self) -> Offer:
        """Return the identity and capabilities to declare to clients.

        A capability is still declared after its last entry was removed, because clients may still use it.
        """
        capabilities: dict[str, Any] = {"logging": {}, **self._experimental}
        for name in sorted(self._capabilities | self._catalog.kinds):
            capabilities[name] = {key: True for key in CAPABILITIES[name] if self._notifies[key]}
        if not any(part.extended is not None or part.remote for part in self._catalog.parts()):
            return Offer(self._info, capabilities, self._revisions, self._instructions)
        from trio_mcp.server.extensions import offered_by

        extensions = offered_by(self._catalog)
        return Offer(self._info, capabilities, self._revisions, self._instructions, extensions)

    def statistics(self) -> Statistics:
        """Return the numbers of connections, requests, parked handlers and listeners, summed over all runs.

        A mounted server counts the runs of the server that it is mounted in.
        """
        each = [attrs.astuple(run.statistics()) for run in self._runs]
        return Statistics(*map(sum, zip([0] * len(attrs.fields(Statistics)), *each, strict=True)))

    # Running.

    def running(self) -> AbstractAsyncContextManager[object]:
        """Run the server for the length of the block: ``async with server.running(): ...``

        All connections during the block share one lifespan, one set of limits and one set of subscriptions.  If a
        handler waits for an answer of the client, the answer may come on another connection.  The end of the block
        closes connections that are still open.

        An exception that the block raises is raised unchanged.  Raises `UsageError` if the server is running already.
        Inside the block, call `serve_stream`, `serve_stdio` or `serve_http`.
        """
        return running(self, shared=True)

    def draining(self, seconds: float) -> AbstractAsyncContextManager[None]:
        """Shut the server down gracefully: ``async with server.draining(5): pass``

        1. From the start of the block the server refuses new requests and new connections.  Running calls continue.
           Each connection closes when its last call has ended.
        2. The end of the block waits for all connections, for tasks, and for the lifespans of runs that end with the
           connections, until `seconds` after the start of the block (`math.inf`: without a limit).
        3. Then the calls that still run are cancelled, and the server has one second to answer them with an error.  If
           the block is cancelled or raises, these calls are stopped without an answer.  Tasks are given back to the
           store: those with `replay=True` run again in another process, and the others have failed.

        The server may run again afterwards.  A `running` block that was open during `draining` serves no more clients.
        Raises `UsageError` if `seconds` is not a number of at least 0.
        """
        check_seconds("seconds", seconds)
        return drained(self, seconds)

    def _joined(self) -> AbstractAsyncContextManager[Run]:
        """Return a context manager for a transport; its value is the run that a new connection belongs to."""
        if self._shared is not None:
            return contextlib.nullcontext(self._shared)
        return running(self, shared=False)

    def _parts(self) -> Iterator[Server]:
        for mounted in self._mounted:
            yield mounted
            yield from mounted._parts()

    def run(
        self,
        *address: Never,
        http: str | None = None,
        unix: str | os.PathLike[str] | None = None,
        workers: int = 1,
        ssl_context: ssl.SSLContext | None = None,
        shutdown_timeout: float = 5.0,
        tap: Tap | None = None,
        **options: Unpack[HttpOptions],
    ) -> None:
        """Serve until the process ends.  Call it in the last line of a script.

        - `server.run()` serves one client on stdin and stdout, until the client closes stdin or ends.
        - `server.run(http="127.0.0.1:3000")` serves HTTP.  Port 0 takes a free port; a line on stderr shows the URL.
        - `server.run(unix="/run/notes.sock")` serves HTTP on a Unix socket.
        - `server.run(http="127.0.0.1:3000", workers=4)` serves HTTP in four processes, which are forks of this one.  A
          process that fails is replaced, SIGHUP replaces all, and each one enters the lifespan.

        HTTP takes `ssl_context` and the options of `serve_http`.  `tap(direction, data)` is called with each message; a
        server on stdio may use `tap=print`, which prints to stderr.

        When stdin ends or SIGTERM arrives, running calls have `shutdown_timeout` seconds to finish.  The process ends
        at most three seconds later, even if they have not finished.

        Raises `SystemExit`: 130 after Ctrl-C, 143 after SIGTERM, 1 with a message if it cannot start.  Raises
        `UsageError` inside a Trio program; there, use `serve_stdio`, `serve_http` or `serve_stream`.
        """
        if "transport" in options or (address and address[0] in _TRANSPORTS):
            raise TypeError('run() takes no transport name: run() serves stdio, run(http="127.0.0.1:3000") serves HTTP')
        if address:
            raise TypeError(f"give the address by name: run(http={address[0]!r})")
        if options:
            _check_http_options(options)
        if http is None and unix is None:
            if ssl_context is not None or options or workers != 1:
                which = min(options, default="workers" if ssl_context is None else "ssl_context")
                raise TypeError(f'{which} is an option for HTTP; to serve HTTP, write run(http="127.0.0.1:3000")')
            run_stdio(self, shutdown_timeout=shutdown_timeout, tap=tap)
            return
        if http is not None and unix is not None:
            raise UsageError("give either http or unix, not both: a server has one address or one Unix socket")
        at = () if http is None else parse_address(http)
        if type(workers) is not int or workers != 1:
            from trio_mcp.server.supervised import run_workers

            run_workers(
                self, workers, at, unix,
                shutdown_timeout=shutdown_timeout, ssl_context=ssl_context, tap=tap, options=options,
            )  # fmt: skip
        from trio_mcp.server.http.listener import leave_to_others, serve_http

        status = _Announcement(self, unix)
        live(
            self,
            lambda _: serve_http(self, *at, unix=unix, ssl_context=ssl_context, tap=tap, task_status=status, **options),
            shutdown_timeout=shutdown_timeout,
            leave=functools.partial(leave_to_others, self, shutdown_timeout),
        )


# Modules of `trio_mcp.extensions`, by the option or method that loads them.
_LOADED = {"task": "trio_mcp.extensions.tasks", "skills": "trio_mcp.extensions.skills"}
_MOUNT = 'server.mount(other, prefix="notes_")'
# Names of transports that other packages take as the first argument of `run`.
_TRANSPORTS = ("stdio", "sse", "http", "streamable-http", "streamable_http")


def _check_http_options(options: HttpOptions) -> None:
    from trio_mcp.server.http.options import HttpOptions

    known = HttpOptions.__annotations__
    if unknown := options.keys() - known:
        if "listeners" in unknown:
            raise TypeError("run has no option 'listeners'; serve_http has it, for use in a Trio program")
        if elsewhere := unknown & OPTIONS.keys():
            raise option_error("run", min(elsewhere), ())
        raise TypeError(
            f"run has no option {min(unknown)!r}; it serves standard input and output, or HTTP at an address, "
            f'run(http="127.0.0.1:3000"), with the options {", ".join(known)}'
        )


show_options(Server.tool, ToolOptions)
show_options(Server.add_tool, RawToolOptions)
show_options(Server.resource, ResourceOptions)
show_options(Server.add_resource, RawResourceOptions)
show_options(Server.add_template, RawResourceOptions)
show_options(Server.prompt, PromptOptions)
show_options(Server.add_prompt, HandlerOptions)
show_options(Server.completion, CompletionOptions)


class _Announcement:
    """A task status that shows the URL of the server."""

    def __init__(self, server: Server, unix: str | os.PathLike[str] | None) -> None:
        self._server = server
        self._unix = unix

    def started(self, value: HttpAddress | None = None) -> None:
        assert value is not None
        announce(self._server, value.local_url, value.url, self._unix)


# The options of a server.


def _kind_of(thing: object) -> str:
    """Describe a wrong argument for an error message, without its value, which may be a secret."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return "a function" if inspect.isroutine(thing) else type(thing).__name__


def _info_of(icons: Sequence[Icon] | None, instructions: str | None, **given: str | None) -> JsonObject:
    """Make the identity of a server (`serverInfo`), and check the texts of a server."""
    if not given["name"]:
        raise UsageError("a server needs a name, which clients show")
    for option, text in {**given, "instructions": instructions}.items():
        if not isinstance(text, str | None):
            raise UsageError(f"the {option} of a server must be text, got {type(text).__name__}")
    info: JsonObject = {key: text for key, text in given.items() if text is not None}
    if icons is not None:
        from trio_mcp.core.codec import to_json
        from trio_mcp.core.content import Icon
        from trio_mcp.core.revisions import LATEST

        if not isinstance(icons, Sequence) or not all(isinstance(icon, Icon) for icon in icons):
            raise UsageError("the icons of a server must be a list of Icon objects")
        info["icons"] = [to_json(icon, LATEST) for icon in icons]
    return info


def check_names(option: str, names: Collection[str], known: Collection[str], one: str = "") -> None:
    """Raise UsageError unless all names are known; `one` is the word for one of them.  A str is a list of letters."""
    if isinstance(names, str):
        raise UsageError(f"{option} must be a list, also of one name: {option}=[{shown(names)}]")
    if not isinstance(names, Collection):
        raise UsageError(f"{option} must be a list of names, got {type(names).__name__}")
    for name in names:
        if isinstance(name, str) and name in known:
            continue
        if one:
            raise UsageError(f"unknown {one} {name!r}; the {option} are {', '.join(known)}")
        raise UsageError(f"each of {option} must be one of {', '.join(known)}, got {shown(name)}")


def _check_numbers(page_size: int | None, change_debounce: float, threads: int) -> None:
    if page_size is not None and (type(page_size) is not int or page_size < 1):
        raise UsageError(f"page_size must be a number of items, 1 or more, or None for one page, got {page_size!r}")
    check_seconds("change_debounce", change_debounce, finite=True)
    if type(threads) is not int or threads < 1:
        raise UsageError(f"threads must be a number of threads, 1 or more, got {threads!r}")


def _check_hooks(lifespan: Any, middleware: Any, filter: Any) -> None:
    if not isinstance(middleware, Sequence) or not all(map(callable, middleware)):
        raise UsageError(
            f"middleware must be a list of async def (ctx, request, call_next), got {_kind_of(middleware)}"
        )
    for name, hook in (("lifespan", lifespan), ("filter", filter)):
        if hook is not None and not callable(hook):
            raise UsageError(f"{name} must be a function, got {type(hook).__name__}")
    calls = [("middleware", each, "ctx, request, call_next") for each in middleware]
    calls += [("lifespan", lifespan, "server"), ("filter", filter, "principal, item")]
    for name, hook, takes in calls:
        try:
            # Hooks of other packages have other parameters.  Some builtins have no signature.
            if hook is not None:
                inspect.signature(hook).bind(*takes.split(", "))
        except TypeError as error:
            of = getattr(hook, "__qualname__", type(hook).__name__)
            raise UsageError(f"{name} is called with ({takes}), but {of} has other parameters: {error}") from None
        except ValueError:
            pass
    if inspect.iscoroutinefunction(filter) or inspect.iscoroutinefunction(type(filter).__call__):
        raise UsageError("filter must be a plain function, got an async function; it cannot wait")


def _check_cache(cache: Mapping[str, CacheHints]) -> None:
    if not cache:
        return
    from trio_mcp.core.caching import CacheHints

    for method, hints in cache.items():
        if method not in LISTS:
            raise UsageError(f"cache: unknown list {method!r}; the lists are {', '.join(LISTS)}")
        if not isinstance(hints, CacheHints):
            raise UsageError(f"cache: the hints for {method} must be CacheHints, not {type(hints).__name__}")
