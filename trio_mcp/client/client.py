"""The client: `open_client`, `connect_client`, and `Client` with a method for each request of the protocol.

    async with open_client("http://127.0.0.1:3000/mcp") as client:
        for tool in await client.list_tools():
            ...
        with trio.move_on_after(5):
            result = await client.call_tool("forecast", {"city": "Oslo"})

`Client` has the same methods for every revision and every transport.  Other modules own its parts: `connection` the
sessions, `connecting` the transports, `callbacks` the callbacks, and `tools` the schemas of tools.

`open_client` is an `async with` block.  `connect_client` starts the client in a nursery of the program, and any task
may close it.  Use a cancel scope as the timeout of a call: when the scope is cancelled, the client cancels the request
at the server, and the connection remains usable.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

import trio

from trio_mcp.client.callbacks import Answering, GivenRoots
from trio_mcp.client.connecting import Target, connector_for
from trio_mcp.client.connection import ClientConnection
from trio_mcp.client.errors import HeadersRefused, NoResponse
from trio_mcp.client.options import (
    ANSWERING,
    ClientOptions,
    RequestOptions,
    check_client_options,
    check_request_options,
    copy_mapping,
    fields_of,
)
from trio_mcp.client.session import DroppingQueue, OnProgress, Progress, Timer
from trio_mcp.client.subscriptions import Subscription
from trio_mcp.client.tools import ReturnType
from trio_mcp.core import models
from trio_mcp.core.caching import Pager
from trio_mcp.core.codec import from_json, to_json
from trio_mcp.core.content import MalformedContent, Model, Resource
from trio_mcp.core.errors import (
    INVALID_PARAMS,
    RESOURCE_NOT_FOUND,
    ConnectionFailed,
    RequestError,
    ResourceNotFound,
    SessionClosed,
    UsageError,
)
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.messages import ABSENT, Absent, Json, JsonObject, Limits
from trio_mcp.core.opening import Negotiation
from trio_mcp.core.options import WithOtherNames, show_options
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.revisions import LOG_LEVELS, REVISIONS, Role, Terms, check_meta
from trio_mcp.core.rounds import Rounds, is_complete
from trio_mcp.core.session import Offer
from trio_mcp.core.subscriptions import ChangeEvent
from trio_mcp.transport.nursery import Block, block, check_trio, open_nursery

if TYPE_CHECKING:
    from trio_mcp.client.extensions import ClientExtensions
    from trio_mcp.core.models import LogLevel
    from trio_mcp.extensions.tasks.client import ClientTask, ClientTasks

__all__ = ["Client", "ClientOptions", "ToolCall", "_stream_call", "connect_client", "open_client"]

T = TypeVar("T")
M = TypeVar("M", bound=Model)

_COMPLETE = "completion/complete"
_TASKS = "trio_mcp.extensions.tasks"  # loaded by the option `tasks`
# The requests of a server that are answered by these options.
_ANSWERED = {
    "sampling/createMessage": frozenset({"sampling"}),
    "elicitation/create": frozenset({"elicitation", "elicitation_url"}),
}
_USAGE = "async with open_client(...) as client; or, without a block, client = await connect_client(nursery, ...)"
_CLOSE_TIMEOUT = 40.0  # seconds; `ClientConnection` closes within 30


def open_client(target: Target, **options: Unpack[ClientOptions]) -> AbstractAsyncContextManager[Client]:
    """``async with open_client(target) as client``: open a client, and close it at the end of the block.

    `target` is a URL (http, https, ws, wss), a command as a list of strings, a `Server` of this process, or a stream
    with one message per line.  `ClientOptions` explains the options.

    Raises UsageError if the target is not one of these, or if it does not support one of the options.  Entering the
    block raises `HandshakeError` if the client and the server have no revision in common, and `McpError` (for example
    `ConnectionFailed` or `ServerExited`) if there is no connection.  Entering may be cancelled.  An exception that
    the block raises is raised unchanged, not in an exception group.
    """
    return Block(partial(_enter, Client(target, options)), _USAGE)


async def connect_client(nursery: trio.Nursery, target: Target, **options: Unpack[ClientOptions]) -> Client:
    """Return a client that runs in `nursery`.  Close it with `Client.aclose`; any task may do that.

    Raises the same errors as `open_client` and its block.  May be cancelled.
    """
    client = Client(target, options)
    await nursery.start(client._connection.run, name="a client")
    return client


show_options(open_client, ClientOptions)
show_options(connect_client, ClientOptions)


async def _enter(client: Client, stack: AsyncExitStack) -> Client:
    check_trio()
    nursery = await stack.enter_async_context(open_nursery())
    await nursery.start(client._connection.run, name="a client")
    stack.push_async_callback(_close, client)
    return client


async def _close(client: Client) -> None:
    # Shielded, because otherwise `Cancelled` would replace the exception of the block.  The shield costs no time,
    # because the nursery waits for the same tasks.
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIMEOUT):
        await client.aclose()


class Client(metaclass=WithOtherNames):
    """A client of one server, made by `open_client` or `connect_client`.  Many tasks may use it at the same time.

    The methods that send a request raise:

    | Error | Reason |
    |---|---|
    | `RequestError` | the server answered with an error |
    | `RemoteProtocolError` | the answer breaks the protocol |
    | `SessionClosed`, or the error that closed the connection | there is no answer |
    | `NotInThisRevision`, `NotDeclared` | the server does not support the request; it was not sent |
    | `InputUnavailable` | the server asked for input before it answered, and no callback gave the input |
    | `trio.TooSlowError` | a timeout of `ClientOptions` or `RequestOptions` has expired |

    All these methods may be cancelled.  The client then cancels the request at the server, and drops a late answer.
    """

    def __init__(self, target: Target, options: ClientOptions) -> None:
        given: Mapping[str, Any] = options
        check_client_options(given)
        connector = connector_for(target, given)
        auth = options.get("auth")
        self._tokens = auth.at(target) if auth is not None and isinstance(target, str) else None
        self._limits = options.get("limits") or Limits()
        self._answering = Answering(limits=self._limits, **{name: given[name] for name in ANSWERING if name in given})
        self._headers = options.get("headers", {})
        self._meta = options.get("meta")
        self._timeout = options.get("timeout") or math.inf
        self._max_timeout = options.get("max_timeout") or math.inf
        self._has_timeout = min(self._timeout, self._max_timeout) < math.inf
        # Servers of 2026-07-28 send no logs unasked.
        log_level = options.get("log_level", "info" if "on_log" in options else None)
        self._extensions = extensions = _extensions(options)
        self._offer = _offer(options, self._answering.capabilities, extensions)
        if extensions is not None and extensions.wrapped:
            self._send = extensions.sending(self, self._send)  # type: ignore[assignment,method-assign]
        self._connection = ClientConnection(
            connector, options, self._offer, self._answering, headers=self._client_headers, tokens=self._tokens,
            log_level=_checked_level(log_level), extensions=extensions,
        )  # fmt: skip
        self._tools = self._connection.tools

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

        def __new__(cls, target: object = None, options: object = None, **other: object) -> Client:
            if options is None or other:  # `Client(target)` is how FastMCP makes a client
                raise TypeError(f"create a Client with open_client: {_USAGE}")
            return super().__new__(cls)

    async def aclose(self) -> None:
        """Close the connection: end the session, and wait until the server process, if there is one, has exited.

        Any task may call this method, more than once.  Each call returns when the connection is closed.  The connection
        is also closed if the call is cancelled.
        """
        await self._connection.aclose()

    @property
    def closed(self) -> bool:
        """True if the connection has ended for good, so that further requests fail."""
        return self._connection.gone.is_set()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended for good."""
        await self._connection.gone.wait()

    @property
    def has_unanswered_cancellations(self) -> bool:
        """True if the server may still work on a request that was cancelled in the last minutes: it has not answered
        it.
        """
        return self._connection.current.ignored

    # The server

    @property
    def negotiation(self) -> Negotiation:
        """The report on how the session was opened: attempts, answers of the server, the revision and the reason."""
        negotiation = self._connection.current.session.negotiation
        assert negotiation is not None  # the session was opened
        return negotiation

    @property
    def revision(self) -> str:
        """The protocol revision of the session, such as "2026-07-28"."""
        return self._terms.revision.name

    @property
    def server(self) -> Mapping[str, Any]:
        """The name, the version and other data of the server, as it states them.  Do not trust them."""
        return self._terms.identity or {}

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """The capabilities that the server declares."""
        return self._terms.capabilities

    @property
    def instructions(self) -> str | None:
        """The server's text about how to use it, or None."""
        return self._connection.current.session.instructions

    @property
    def deviations(self) -> tuple[str, ...]:
        """Violations of the protocol by the server that the client tolerates, as texts; only the newest 100."""
        return tuple(self._connection.deviations)

    @property
    def _terms(self) -> Terms:
        return self._connection.current.terms

    # Requests

    @overload
    async def request(
        self,
        method: str,
        params: Any = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> JsonObject: ...

    @overload
    async def request(
        self,
        method: str,
        params: Any = None,
        *,
        returns: type[T],
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> T: ...

    async def request(
        self,
        method: str,
        params: Any = None,
        *,
        returns: Any = ABSENT,
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Send any request, of the protocol, of an extension or of your own, and return its result as JSON.

        `params` is a mapping, or an object such as a dataclass.  With `returns`, the result is an object of that type.

        If the server asks for input first, the callbacks of the client answer.  `on_progress` is called in this task
        with each progress report.  If `on_progress` raises, the request is cancelled, and this method raises the same
        exception.
        """
        if options:
            check_request_options(options)
        result = await self._call(method, _params_of(method, params), options, on_progress)
        if returns is ABSENT:
            return result
        from trio_mcp.core.schema.params import read_result

        return read_result(returns, result)

    async def notify(self, method: str, params: Any = None) -> bool:
        """Send a notification of an extension or of your own.  False: the server cannot receive it any more.

        Raises `NotDeclared` if the server does not declare the extension, and `NotInThisRevision` for a notification
        that the session does not have.
        """
        caller = await self._connection.session()
        sent = caller.notify(method, _params_of(method, params))
        await trio.lowlevel.checkpoint()
        return sent

    @property
    def extensions(self) -> Mapping[str, Mapping[str, Any]]:
        """The extensions that both sides declare, with the settings of the server."""
        given = self._offer.extensions
        ids = () if given is None else (each.id for each in given.of(self._terms.revision))
        found = {id: self._terms.extension(id) for id in ids}
        return {id: settings for id, settings in found.items() if settings is not None}

    def extension(self, id: str) -> Mapping[str, Any] | None:
        """The settings with which the server declares an extension; None if it does not declare it."""
        return self._terms.extension(id)

    async def _call(
        self, method: str, params: JsonObject, options: RequestOptions, on_progress: OnProgress | None = None
    ) -> JsonObject:
        sent_params, headers = self._with_meta(params, options.get("meta")), options.get("headers")
        timer = self._timer(options, progress=True) if options or self._has_timeout else None
        result, _ = await self._send(method, sent_params, on_progress, headers, timer)
        return result

    def _timer(self, options: RequestOptions, *, progress: bool = False) -> Timer | None:
        """Return the timer of a call, or None if it has no timeout.

        `progress`: the timer may ask the server for progress reports.
        """
        seconds, at_most = options.get("timeout"), options.get("max_timeout")
        seconds = self._timeout if seconds is None else seconds
        at_most = self._max_timeout if at_most is None else at_most
        return None if seconds == at_most == math.inf else Timer(seconds, at_most, progress=progress)

    async def _send(
        self,
        method: str,
        params: JsonObject,
        on_progress: OnProgress | None,
        headers: Mapping[str, str] | None,
        timer: Timer | None,
        fields: Fields | None = None,
        *,
        refresh_tools: bool = False,
    ) -> tuple[JsonObject, JsonObject]:
        """Send a request, and answer the questions of the server until a result is complete.

        Return this result and its request's params.  `fields` are the headers of the first request.  With
        `refresh_tools`, the tools are listed again if the server refuses the headers of a request, which is then
        repeated with the headers that the new schema of the tool requires (http-93).
        """
        rounds: Rounds | None = None
        refused: HeadersRefused | None = None
        while True:
            try:
                if refused is not None:
                    if self._connection.cache is not None:
                        self._connection.cache.forget("tools/list")
                    await self._list_tools(headers, timer)
                # New headers for each round: the user may take longer to answer than a token is valid.
                fields = self._fields(headers) if fields is None else fields
                result = await self._connection.request(method, params, on_progress, fields, timer)
            except HeadersRefused as error:
                if refused is not None or not refresh_tools:
                    raise error.error from refused or error
                refused, fields = error, None
                continue
            except ConnectionFailed as error:  # the request of this round was not sent
                if rounds is None:
                    raise
                raise NoResponse(f"{method} has no answer after its first round: {error}") from error
            except NoResponse as error:
                error.request_may_have_run |= rounds is not None  # an earlier round of this call has run
                raise
            if rounds is None:
                if is_complete(result):
                    return result, params
                terms = self._terms
                declared = self._offer.declared(Role.CLIENT, terms.revision)
                kinds = self._connection.current.session.result_types(method, terms)
                rounds = Rounds(terms.revision, method, params, declared, extensions=kinds)
            questions = rounds.receive(result)
            if questions is None:
                return result, params
            answer = partial(self._answering.answer_all, questions, terms, rounds.abandon)
            params = rounds.retry(await (answer() if timer is None else timer.run(method, answer, request=False)))
            refused = fields = None

    def _with_meta(self, params: JsonObject, meta: Mapping[str, Json] | None) -> JsonObject:
        if meta is None and self._meta is None and "_meta" not in params:
            return params
        given = params.get("_meta", {})
        if not isinstance(given, Mapping):
            raise UsageError(f"_meta must be a mapping, got {type(given).__name__}; leave it out if it is empty")
        more = {**(self._meta() if self._meta is not None else {}), **copy_mapping("meta", meta)}
        if more:
            check_meta(more, self._terms.revision)
        return {**params, "_meta": {**given, **more}} if more else params

    def _fields(self, headers: Mapping[str, str] | None) -> Fields:
        """Return the headers of a call: its own, and those of the client.

        This is called once per call, because the key in the cache depends on the headers.
        """
        if headers is None:
            return self._client_headers() if self._headers else ()
        own = fields_of(headers)
        named = {name.lower() for name, _ in own}
        return (*[(name, value) for name, value in self._client_headers() if name.lower() not in named], *own)

    async def _cached(self, method: str, params: JsonObject, options: RequestOptions) -> JsonObject:
        """Send a request whose result may be in the cache."""
        await self._connection.session()  # raises SessionClosed if the client is closed
        timer, headers = self._timer(options), options.get("headers")
        sent_params, fields = self._with_meta(params, options.get("meta")), self._fields(headers)
        cache = self._connection.cache
        principal = _principal(fields if self._tokens is None else (*fields, self._tokens.generation))
        if cache is not None:
            cached = cache.get(method, sent_params, now=trio.current_time(), principal=principal)
            if cached is not None:
                await trio.lowlevel.checkpoint()
                return cached

        async def ask(timer: Timer | None = None) -> JsonObject:
            changes = 0 if cache is None else cache.changes
            result, complete = await self._send(method, sent_params, None, headers, timer, fields)
            if cache is not None:
                # The params of the last round tell the cache whether the request was a retry (cache-03).
                cache.store(method, complete, result, asked=changes, now=trio.current_time(), principal=principal)
            return result

        if cache is None or method != _COMPLETE:
            return await ask(timer)
        # cmpl-03: programs ask for completions at each key press, so equal requests at the same time are sent once.
        key = cache.key(method, sent_params, principal=principal)
        if timer is None:
            return await self._connection.share(key, ask)
        return await timer.run(method, lambda: self._connection.share(key, ask))

    async def _page(self, method: str, shape: type[M], cursor: str | None, options: RequestOptions) -> M:
        check_request_options(options)
        return from_json(shape, await self._cached(method, {} if cursor is None else {"cursor": cursor}, options))

    async def _pages(self, method: str, shape: type[M], options: RequestOptions) -> AsyncIterator[M]:
        check_request_options(options)
        pager = Pager(self._limits)
        while not pager.done:
            params = pager.params
            try:
                result = await self._cached(method, params, options)
            except RequestError:
                if self._connection.cache is not None and "cursor" in params:
                    self._connection.cache.forget(method)  # the cached pages of this list are no longer valid
                raise
            pager.received(result)
            yield from_json(shape, result)

    def _readable(self, items: Iterable[T | MalformedContent]) -> list[T]:
        """Return the readable items of a list, and report the others as deviations."""
        readable = []
        for each in items:
            if isinstance(each, MalformedContent):
                self._connection.report_loss(f"an invalid list item is left out: {each.why}")
            else:
                readable.append(each)
        return readable

    async def ping(self) -> None:
        """Send a ping and wait for the answer.  Raises `NotInThisRevision` in 2026-07-28, which has no ping."""
        await self._connection.request("ping", {}, timer=self._timer({}))

    # Tools

    async def list_tools_page(
        self, cursor: str | None = None, **options: Unpack[RequestOptions]
    ) -> models.ListToolsResult:
        """Return the page of tools at `cursor`, or the first page.  `list_tools` returns the tools of all pages."""
        page = await self._page("tools/list", models.ListToolsResult, cursor, options)
        self._remember_tools(page)
        return page

    async def list_tools(self, **options: Unpack[RequestOptions]) -> list[models.Tool]:
        """Return the tools of all pages.  Tools that cannot be called are left out; `deviations` gives the reason."""
        pages = self._pages("tools/list", models.ListToolsResult, options)
        return [tool async for page in pages for tool in self._remember_tools(page)]

    async def _list_tools(self, headers: Mapping[str, str] | None, timer: Timer | None) -> None:
        """List the tools for a call, with its headers and in its time."""
        list_tools = partial(self.list_tools, headers=headers)
        await (list_tools() if timer is None else timer.run("tools/list", list_tools))

    def _remember_tools(self, page: models.ListToolsResult) -> list[models.Tool]:
        return self._tools.add(page.tools, mirroring=self._connection.current.session.link is LinkKind.EXCHANGE)

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> models.CallToolResult: ...

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: type[T],
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> T: ...

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: Any,  # a union or None, which type checkers do not accept as `type[T]`
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: Any = ABSENT,
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Call a tool, and return its result.  With `returns`, return its structured value as an object of that type.

        If the tool fails, `is_error` of the result is True, and the content is a text for the model.  With `returns`, a
        tool that fails raises `ToolFailed`.

        `returns` may also be `str` for a tool that returns only text, `bytes` for an image, audio or a binary resource,
        or None for a tool without a result.

        Raises RemoteProtocolError if the result does not fit the output schema of the tool.  The schema is known
        if the tools were listed before.  With `returns`, this method lists the tools first if necessary.
        """
        if options:
            check_request_options(options, "call_tool", name)
        params: JsonObject = {"name": name, "arguments": copy_mapping("arguments", arguments)}
        returned: ReturnType[Any] | None = None
        if returns is not ABSENT:
            returned = ReturnType(returns)  # raises UsageError before a request is sent
        sent_params, headers = self._with_meta(params, options.get("meta")), options.get("headers")
        timer = self._timer(options, progress=True) if options or self._has_timeout else None
        if returned is not None:
            await self._tools.ensure_listed(name, partial(self._list_tools, headers, timer))
        raw_result, _ = await self._send("tools/call", sent_params, on_progress, headers, timer, refresh_tools=True)
        result = from_json(models.CallToolResult, raw_result)
        self._tools.check_result(name, result)
        return result if returned is None else returned.value(name, result, wrapped=self._tools.wraps_result(name))

    @overload
    def stream_tool(
        self, name: str, arguments: Mapping[str, Json] | None = None, **options: Unpack[RequestOptions]
    ) -> AbstractAsyncContextManager[ToolCall[models.CallToolResult]]: ...

    @overload
    def stream_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: type[T],
        **options: Unpack[RequestOptions],
    ) -> AbstractAsyncContextManager[ToolCall[T]]: ...

    @overload
    def stream_tool(
        self, name: str, arguments: Mapping[str, Json] | None = None, *, returns: Any, **options: Unpack[RequestOptions]
    ) -> AbstractAsyncContextManager[ToolCall[Any]]: ...

    def stream_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: Any = ABSENT,
        **options: Unpack[RequestOptions],
    ) -> AbstractAsyncContextManager[ToolCall[Any]]:
        """``async with client.stream_tool(...) as call``: call a tool while the block runs.

        In the block, ``async for report in call`` gives the progress reports, and ``await call.result()`` returns the
        result of `call_tool`; see `ToolCall`.  If the call is not complete at the end of the block, it is cancelled.
        """

        check_request_options(options, "stream_tool", name)
        given = copy_mapping("arguments", arguments)

        async def call(on_progress: OnProgress) -> Any:
            return await self.call_tool(name, given, returns=returns, on_progress=on_progress, **options)

        return _stream_call(call, f"tools/call {name[:80]!r}, streamed")

    async def start_task(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        ttl: float | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> ClientTask:
        """Call a tool as a task, and return the handle of the task.  Needs the option `tasks`.

        In 2026-07-28 the server decides whether there is a task.  In 2025-11-25 the client asks for one, and for `ttl`
        seconds to keep it.  If there is none, the call has ended when this returns, and the handle has its result.

        `on_progress` asks the server for progress.  It is called until this returns; give it to `ClientTask.result`
        as well.
        """
        if options:
            check_request_options(options, "start_task", name)
        given = copy_mapping("arguments", arguments)
        milliseconds = None if ttl is None else int(ttl * 1000)
        return await self._task_extension().start(self, name, given, milliseconds, options, on_progress)

    def open_task(self, id: str) -> ClientTask:
        """Return the handle of a task by its id, which any client of the same principal may have got."""
        return self._task_extension().open(self, id)

    def _task_extension(self) -> ClientTasks:
        found: ClientTasks | None = None if self._extensions is None else self._extensions.tasks
        if found is None:
            raise UsageError("this client does not know tasks; write open_client(target, tasks=True)")
        return found

    # Resources

    async def list_resources_page(
        self, cursor: str | None = None, **options: Unpack[RequestOptions]
    ) -> models.ListResourcesResult:
        """Return one page of the resources, from `cursor`.  `list_resources` returns all pages."""
        return await self._page("resources/list", models.ListResourcesResult, cursor, options)

    async def list_resources(self, **options: Unpack[RequestOptions]) -> list[Resource]:
        """Return all resources of all pages."""
        pages = self._pages("resources/list", models.ListResourcesResult, options)
        return [resource async for page in pages for resource in self._readable(page.resources)]

    async def list_resource_templates_page(
        self, cursor: str | None = None, **options: Unpack[RequestOptions]
    ) -> models.ListResourceTemplatesResult:
        """Return one page of the resource templates, from `cursor`.  `list_resource_templates` returns all pages."""
        return await self._page("resources/templates/list", models.ListResourceTemplatesResult, cursor, options)

    async def list_resource_templates(self, **options: Unpack[RequestOptions]) -> list[models.ResourceTemplate]:
        """Return all resource templates of all pages."""
        pages = self._pages("resources/templates/list", models.ListResourceTemplatesResult, options)
        return [template async for page in pages for template in self._readable(page.resource_templates)]

    async def read_resource(self, uri: str, **options: Unpack[RequestOptions]) -> models.ReadResourceResult:
        """Return the content of a resource.  Raises `ResourceNotFound` if the server has no resource at this URI."""
        check_request_options(options)
        try:
            return from_json(models.ReadResourceResult, await self._cached("resources/read", {"uri": uri}, options))
        except RequestError as error:
            # res-08: servers of each revision send one or the other of these codes.
            if error.code not in (RESOURCE_NOT_FOUND, INVALID_PARAMS):
                raise
            missing = ResourceNotFound(uri, error.message)
            missing.code, missing.data = error.code, error.data
            raise missing from None

    # Prompts and completion

    async def list_prompts_page(
        self, cursor: str | None = None, **options: Unpack[RequestOptions]
    ) -> models.ListPromptsResult:
        """Return one page of the prompts, from `cursor`.  `list_prompts` returns all pages."""
        return await self._page("prompts/list", models.ListPromptsResult, cursor, options)

    async def list_prompts(self, **options: Unpack[RequestOptions]) -> list[models.Prompt]:
        """Return all prompts of all pages."""
        pages = self._pages("prompts/list", models.ListPromptsResult, options)
        return [prompt async for page in pages for prompt in self._readable(page.prompts)]

    async def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, **options: Unpack[RequestOptions]
    ) -> models.GetPromptResult:
        """Return the messages that the server makes from a prompt and these arguments."""
        if options:
            check_request_options(options, "get_prompt", name)
        params: JsonObject = {"name": name, "arguments": copy_mapping("arguments", arguments)}
        return from_json(models.GetPromptResult, await self._call("prompts/get", params, options))

    async def complete(
        self,
        ref: models.PromptReference | models.ResourceReference,
        argument: str,
        value: str,
        *,
        context: Mapping[str, str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> models.Completion:
        """Return the server's completions of `value`, which is the start of an argument of a prompt or of a template.

        `context` has the values of the other arguments that the user has entered.  It is not used in revisions before
        2025-06-18.  Equal calls at the same time share one request.  The answer is cached for ten seconds, or until a
        list of prompts or resources changes.  The option `cache` turns this off.
        """
        check_request_options(options)
        others = None if context is None else models.CompletionContext(copy_mapping("context", context))
        params = to_json(
            models.CompleteParams(ref, models.CompletionArgument(argument, value), others), self._terms.revision
        )
        return from_json(models.CompleteResult, await self._cached(_COMPLETE, params, options)).completion

    # Changes, logs and roots

    def listen(
        self,
        *changes: ChangeEvent,
        tools: bool = False,
        prompts: bool = False,
        resources: bool | str | Iterable[str] = False,
        undeclared: bool = False,
        filters: Mapping[str, Json] | None = None,
    ) -> AbstractAsyncContextManager[Subscription]:
        """``async with client.listen(tools=True, resources=["notes://todo"]) as changes``: iterate over changes.

        The subscription ends with the block; see `Subscription`.  ``resources=True`` subscribes to the list of
        resources; one or more URIs subscribe to the contents of these resources; for both, add `RESOURCES_CHANGED`.
        With ``undeclared=True`` the block also waits for changes that the server does not declare or confirm: some
        servers, such as mcp up to 1.30, send them anyway, even without `resources/subscribe`.
        `filters` are members that extensions add to the filter, in 2026-07-28; `Subscription.agreed` has the part that
        the server confirmed.  The notifications go to the handlers of the extension.

        Raises UsageError if there are no changes, or too many.  The block is entered when the server has confirmed the
        subscription; `Subscription.missing` has the changes that it did not confirm.  Entering raises `RequestError` if
        the server refuses, `SubscriptionUnsupported` if it confirms no change, and otherwise the same errors as the
        iterator.
        """
        self._connection.check_run()
        return self._connection.subscriptions.listen(
            *changes, tools=tools, prompts=prompts, resources=resources, undeclared=undeclared, filters=filters
        )

    async def set_log_level(self, level: LogLevel | None) -> None:
        """Set the lowest level of the log messages that the server sends.  The client passes them to `on_log`.

        None turns log messages off.  In revisions before 2026-07-28, None raises `NotInThisRevision`, because these
        servers cannot turn log messages off; use "emergency" there.
        """
        wanted = _checked_level(level)
        self._connection.check_run()
        await trio.lowlevel.checkpoint()  # since 2026-07-28 this method sends no request
        await self._connection.set_log_level(wanted, self._timer({}))

    async def set_roots(self, roots: GivenRoots) -> None:
        """Replace the roots: the directories that the server may work in.

        Raises UsageError if the option `roots` was not given, or if a root is invalid.
        """
        self._connection.check_run()
        await trio.lowlevel.checkpoint()
        caller = await self._connection.session()
        changed = self._answering.set_roots(roots)
        if changed and caller.terms.revision.handshake:
            caller.notify("notifications/roots/list_changed")

    def _client_headers(self) -> Fields:
        if not self._headers:
            return ()
        try:
            headers = self._headers() if callable(self._headers) else self._headers
        except Exception as error:  # a callback may raise any exception
            raise UsageError("the function given as headers raised an exception") from error
        return fields_of(headers)


def _extensions(options: ClientOptions) -> ClientExtensions | None:
    given, all_notifications = options.get("extensions"), "on_notification" in options
    if not given and not all_notifications and not options.get("tasks"):
        return None
    from trio_mcp.client.extensions import ClientExtensions

    added = []
    if options.get("tasks"):
        declared = [method for method, names in _ANSWERED.items() if not names.isdisjoint(options)]
        added = [importlib.import_module(_TASKS).ClientTasks(*declared, limits=options.get("limits"))]
    return ClientExtensions([] if given is None else given, *added, fallback=all_notifications)


def _offer(options: ClientOptions, capabilities: JsonObject, extensions: ClientExtensions | None) -> Offer:
    info = {"name": options.get("name", "trio_mcp"), "version": options.get("version", "0")}
    revisions = tuple(REVISIONS.values())
    if (name := options.get("revision")) is not None:
        if name not in REVISIONS:
            raise UsageError(f"unknown revision {name!r}; the revisions are {', '.join(REVISIONS)}")
        revisions = (REVISIONS[name],)
    experimental = options.get("experimental")
    if experimental is not None:
        capabilities = {**capabilities, "experimental": copy_mapping("experimental", experimental)}
    return Offer(info, capabilities, revisions, extensions=None if extensions is None else extensions.offered)


def _params_of(method: str, params: Any) -> JsonObject:
    """Return params as JSON."""
    if isinstance(params, Mapping | Sequence | None):
        return copy_mapping("params", params)  # type: ignore[arg-type]  # it refuses a sequence
    from trio_mcp.core.schema.params import write_object_of

    return write_object_of(params, f"the params of {method}")


def _checked_level(level: str | None) -> str | None:
    if level is not None and level not in LOG_LEVELS:
        raise UsageError(f"the log level must be one of {', '.join(LOG_LEVELS)}; got {level!r}")
    return level


def _principal(fields: Fields) -> str | None:
    """Return a digest of the headers for the cache.

    cache-17: a request with another token, cookie or key must not get the cached answer.
    """
    pairs = sorted((name.lower(), value) for name, value in fields)
    return sha256(repr(pairs).encode()).hexdigest() if pairs else None


# Streamed calls


class ToolCall(Generic[T]):
    """A running tool call: an asynchronous iterator of `Progress`, made by `Client.stream_tool`.

    One task at a time may iterate.  The iterator ends when the call ends, also if the call fails; `result` then returns
    the result or raises the error.  Waiting may be cancelled; the call goes on until its block ends.
    """

    def __init__(self) -> None:
        self._reports: DroppingQueue[Progress] = DroppingQueue()
        self._changed = trio.Event()
        self._ended = trio.Event()
        self._result: T | Absent = ABSENT
        self._error: Exception | None = None
        self._error_raised = False  # `result` has raised the error

    def __aiter__(self) -> ToolCall[T]:
        return self

    async def __anext__(self) -> Progress:
        while not self._reports:
            if self._ended.is_set():
                raise StopAsyncIteration
            await self._changed.wait()
            self._changed = trio.Event()
        await trio.lowlevel.checkpoint()
        return self._reports.take()

    async def result(self) -> T:
        """Wait until the call ends, and return its result.

        Raises the same errors as `Client.call_tool`, and SessionClosed if the call was cancelled.
        """
        await self._ended.wait()
        if self._error is not None:
            self._error_raised = True
            raise self._error
        if self._result is ABSENT:  # the block or its nursery was cancelled
            raise SessionClosed("the call was cancelled before it had a result")
        return self._result

    def _add_report(self, progress: float, total: float | None, message: str | None) -> None:
        self._reports.add(Progress(progress, total, message), len(message or ""))
        self._changed.set()

    async def _run(self, call: Callable[[OnProgress], Awaitable[T]]) -> None:
        try:
            self._result = await call(self._add_report)
        except Exception as error:  # noqa: BLE001  # `result` raises it
            self._error = error
        finally:
            self._ended.set()
            self._changed.set()


@block
async def _stream_call(stack: AsyncExitStack, call: Callable[[OnProgress], Awaitable[T]], name: str) -> ToolCall[T]:
    """The block of `Client.stream_tool`.  The call is cancelled when the block ends.

    If the call failed and the block did not ask for the result, the end of the block raises the error.
    """
    tool_call: ToolCall[T] = ToolCall()

    def raise_failure(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None and tool_call._error is not None and not tool_call._error_raised:
            raise tool_call._error

    stack.push(raise_failure)
    nursery = await stack.enter_async_context(open_nursery())
    nursery.start_soon(tool_call._run, call, name=name)
    return tool_call
