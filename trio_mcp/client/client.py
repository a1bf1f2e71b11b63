"""Client: what a program asks of a server, in whatever revision and by whatever transport the two have found.

    async with open_client("http://127.0.0.1:3000/mcp") as client:
        for tool in await client.list_tools():
            ...
        with trio.move_on_after(5):
            result = await client.call_tool("forecast", {"city": "Oslo"})

`open_client` is a block; `connect_client` puts the client into a nursery of yours, and any task may close it.  A
caller's cancel scope is the timeout of a call: leaving it tells the server, and the connection stays usable.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar, Unpack, overload

import trio

from trio_mcp.client.answering import Answering, GivenRoots
from trio_mcp.client.caller import HeadersRefused, NoResponse, OnProgress, Timer
from trio_mcp.client.connecting import PROBE, Target, how_to_reach
from trio_mcp.client.following import _ToolCallBlock
from trio_mcp.client.keeper import ClientParts, Keeper, terms_of
from trio_mcp.client.options import (
    ANSWERING,
    CHILD,
    ClientOptions,
    RequestOptions,
    check_along,
    check_options,
    checked_level,
    fields_of,
    log_level_of,
    members,
    offer_of,
)
from trio_mcp.client.subscriptions import Subscription
from trio_mcp.client.tools import ReturnType, ToolBook
from trio_mcp.core.codec import from_json, to_json
from trio_mcp.core.content import MalformedContent, Model, Resource
from trio_mcp.core.errors import (
    INVALID_PARAMS,
    RESOURCE_NOT_FOUND,
    ConnectionFailed,
    RequestError,
    ResourceNotFound,
    UsageError,
)
from trio_mcp.core.http.fields import Fields, Mirror
from trio_mcp.core.jsonrpc import ABSENT, Json, JsonObject, Limits
from trio_mcp.core.meta import check_meta
from trio_mcp.core.models import (
    CallToolResult,
    CompleteParams,
    CompleteResult,
    Completion,
    CompletionArgument,
    CompletionContext,
    GetPromptResult,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    Prompt,
    PromptReference,
    ReadResourceResult,
    ResourceReference,
    ResourceTemplate,
    Tool,
)
from trio_mcp.core.opening import Negotiation
from trio_mcp.core.pages import Pager
from trio_mcp.core.revisions import Role
from trio_mcp.core.rounds import Ask, Rounds, is_complete
from trio_mcp.core.state import LinkKind
from trio_mcp.core.subscriptions import ChangeEvent
from trio_mcp.core.terms import Terms
from trio_mcp.transport.nursery import Block, check_trio, open_nursery

if TYPE_CHECKING:
    from trio_mcp.core.models import LogLevel

__all__ = ["Client", "ClientOptions", "connect_client", "open_client"]

T = TypeVar("T")
M = TypeVar("M", bound=Model)

_COMPLETE = "completion/complete"
_LEAVING = 40.0  # seconds that the end of a block is shielded; a `Keeper` closes within 30


def open_client(target: Target, **options: Unpack[ClientOptions]) -> AbstractAsyncContextManager[Client]:
    """``async with open_client(target) as client``: a client for as long as the block.

    `target` is a URL (http, https, ws, wss), a command as a list of words, a `Server` of this process, or any stream
    with one message a line.  Raises UsageError for what is none and for options that it has no use for.
    Entering raises `HandshakeError` if the two sides have no revision in common, and `McpError` (as `ConnectionFailed`
    or `ServerExited`) if there is no connection.  What the block raises leaves it as it is.
    """
    return _OpenClient(Client(target, options))


async def connect_client(nursery: trio.Nursery, target: Target, **options: Unpack[ClientOptions]) -> Client:
    """A client that lives in `nursery`, and is closed by `aclose`, which any task may call.

    Raises as `open_client`.
    """
    client = Client(target, options)
    await nursery.start(client._keeper.live, name="a client")
    return client


class _OpenClient(Block["Client"]):
    """A class, as `groups.open_nursery` is one."""

    _usage = "async with open_client(...) as client; or, without a block, client = await connect_client(nursery, ...)"

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> Client:
        check_trio()
        self._nursery = open_nursery()
        nursery = await self._nursery.__aenter__()
        try:
            await nursery.start(self._client._keeper.live, name="a client")
        except BaseException as error:
            await self._nursery.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        # Shielded, or being cancelled would take the place of what the block has raised.  It takes no longer: the
        # nursery waits for the same.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LEAVING):
            await self._client.aclose()
        return await self._nursery.__aexit__(kind, error, traceback)


class Client:
    """A client of one server; made by `open_client` or `connect_client`.  Any task may use it, many at once.

    Every method that asks the server raises `RequestError` if that answers with an error, `RemoteProtocolError` if its
    answer breaks the rules, `SessionClosed` (or what it was closed by) if there is none, `NotInThisRevision` and
    `NotDeclared` for what this server cannot be asked, and `InputUnavailable` if it wanted something first that it was
    not given.  All of them may be cancelled: the server is told, and what it says too late is forgotten.  With a
    timeout (see `ClientOptions` and `RequestOptions`) they raise `trio.TooSlowError` when that is over.
    """

    def __init__(self, target: Target, options: ClientOptions) -> None:
        given: Mapping[str, Any] = options
        check_options(given)
        hold = how_to_reach(
            target, ssl_context=options.get("ssl_context"), headers=options.get("headers"), auth=options.get("auth"),
            probe=options.get("probe", PROBE), **{name: given[name] for name in CHILD if name in given},
        )  # fmt: skip
        auth = options.get("auth")
        self._authorization = auth.at(target) if auth is not None and isinstance(target, str) else None
        self._limits = options.get("limits") or Limits()
        self._answering = Answering(limits=self._limits, **{name: given[name] for name in ANSWERING if name in given})
        self._headers = options.get("headers", {})
        self._meta = options.get("meta")
        self._timeout = options.get("timeout") or math.inf
        self._max_timeout = options.get("max_timeout") or math.inf
        self._timed = min(self._timeout, self._max_timeout) < math.inf
        self._offer = offer_of(options, self._answering.capabilities)
        parts = ClientParts(
            self._answering,
            options.get("on_log"),
            options.get("on_elicitation_complete"),
            options.get("on_notification"),
            log_level_of(options),
            options.get("ping_seconds"),
            options.get("cache", True),
            lambda: self._book.forget(),
        )
        self._keeper = Keeper(
            hold,
            self._offer,
            self._limits,
            parts,
            headers=self._own_headers,
            mirrors=self._mirrors,
            tap=options.get("tap"),
        )
        self._book = ToolBook(self._keeper.loss)

    if not TYPE_CHECKING:  # or a type checker would take any attribute for one that there is

        def __new__(cls, target: object = None, options: object = None, **other: object) -> Client:
            if options is None or other:  # as FastMCP has it
                raise TypeError(f"a Client is made by open_client: write {_OpenClient._usage}")
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Never:
            from trio_mcp.core.migration import attribute_error

            raise attribute_error(self, name)

    async def aclose(self) -> None:
        """Close the connection in good order: a session is ended, a child process is waited for.

        Any task may call it, and more than one; all return when it is closed.  If this is cancelled, it is closed all
        the same.
        """
        await self._keeper.aclose()

    # What is known of the other side.

    @property
    def negotiation(self) -> Negotiation:
        """What was tried when the session was opened, what came back, what was chosen and why."""
        return self._keeper.connection.negotiation

    @property
    def revision(self) -> str:
        """The revision that is spoken, such as "2026-07-28"."""
        return self._terms.revision.name

    @property
    def server(self) -> Mapping[str, Any]:
        """How the server introduced itself: name, version, and what else it said.  It is proof of nothing."""
        return self._terms.identity or {}

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """What the server declares."""
        return self._terms.capabilities

    @property
    def instructions(self) -> str | None:
        """The server's advice on how to use it."""
        return self._keeper.connection.caller.session.instructions

    @property
    def deviations(self) -> tuple[str, ...]:
        """What the server did off the protocol, as far as it cost nothing; the newest of it."""
        return tuple(self._keeper.deviations)

    @property
    def _terms(self) -> Terms:
        terms = self._keeper.connection.caller.session.terms
        assert terms is not None  # it was opened
        return terms

    # Asking.

    async def request(
        self,
        method: str,
        params: Mapping[str, Json] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **along: Unpack[RequestOptions],
    ) -> JsonObject:
        """The result of any request of the protocol, as it came, with the server's questions answered on the way.

        `on_progress` is called in this task; what it raises ends the request, and is raised.
        """
        check_along(along)
        asked = self._with_meta(members("params", params), along.get("meta"))
        timer, headers = self._timer(along, progress=True), along.get("headers")
        try:
            result = await self._keeper.ask(method, asked, on_progress, self._fields(headers), timer)
        except HeadersRefused as error:
            raise error.error from error
        if not is_complete(result):
            result, _ = await self._rounds(result, method, asked, on_progress, headers, timer)
        return result

    def _timer(self, along: RequestOptions, *, progress: bool = False) -> Timer | None:
        """What bounds a call; None if nothing does.  `progress`: its server may be asked for reports."""
        seconds, at_most = along.get("timeout"), along.get("max_timeout")
        seconds = self._timeout if seconds is None else seconds
        at_most = self._max_timeout if at_most is None else at_most
        return None if seconds == at_most == math.inf else Timer(seconds, at_most, progress=progress)

    async def _ask_anew(
        self,
        refused: HeadersRefused,
        asked: JsonObject,
        on_progress: OnProgress | None,
        headers: Mapping[str, str] | None,
        timer: Timer | None,
    ) -> JsonObject:
        """Call a tool once more, with the headers that it wants by now (http-93)."""
        if self._keeper.cache is not None:
            self._keeper.cache.forget("tools/list")
        await self._walk_tools()
        try:
            return await self._keeper.ask("tools/call", asked, on_progress, self._fields(headers), timer)
        except HeadersRefused as error:
            raise error.error from refused

    async def _rounds(
        self,
        result: JsonObject,
        method: str,
        asked: JsonObject,
        on_progress: OnProgress | None,
        headers: Mapping[str, str] | None,
        timer: Timer | None,
        *,
        anew: bool = False,
    ) -> tuple[JsonObject, JsonObject]:
        """What becomes of a result that is not complete as it stands, and the params of the request that had it.

        With `anew` a round whose headers do not fit the tool any more is sent again with others.
        """
        terms = self._terms
        rounds = Rounds(terms.revision, method, asked, self._offer.declared(Role.CLIENT, terms.revision))
        while isinstance(step := rounds.receive(result), Ask):
            answer = partial(self._answering.answer_all, step.questions, terms, rounds.abandon)
            asked = rounds.retry(await (answer() if timer is None else timer.run(method, answer, request=False)))
            try:
                try:
                    # A user may have thought for longer than a token in the headers holds.
                    result = await self._keeper.ask(method, asked, on_progress, self._fields(headers), timer)
                except HeadersRefused as refused:
                    if not anew:
                        raise refused.error from refused
                    result = await self._ask_anew(refused, asked, on_progress, headers, timer)
            except ConnectionFailed as error:  # which says that nothing was asked of the server
                raise NoResponse(f"{method} has no answer after its first round: {error}") from error
            except NoResponse as error:
                error.request_may_have_run = True  # an earlier round of it has
                raise
        return step.result, asked

    def _with_meta(self, params: JsonObject, meta: Mapping[str, Json] | None) -> JsonObject:
        if meta is None and self._meta is None and "_meta" not in params:
            return params
        given = params.get("_meta", {})
        if not isinstance(given, Mapping):
            raise UsageError(f"_meta is an object, not {type(given).__name__}; leave it out if there is none")
        more = {**(self._meta() if self._meta is not None else {}), **members("meta", meta)}
        if more:
            check_meta(more, self._terms.revision)
        return {**params, "_meta": {**given, **more}} if more else params

    def _fields(self, headers: Mapping[str, str] | None) -> Fields:
        """The headers of a call, those of all calls among them: made once, so that what is cached is whose it is."""
        if headers is None:
            return self._own_headers() if self._headers else ()
        own = fields_of(headers)
        named = {name.lower() for name, _ in own}
        return (*[(name, value) for name, value in self._own_headers() if name.lower() not in named], *own)

    async def _cached(self, method: str, params: JsonObject, along: RequestOptions) -> JsonObject:
        """As `request`, of what the server may have said how long it holds."""
        await self._keeper.caller()  # who has closed the client has no more use for it
        timer, headers = self._timer(along), along.get("headers")
        asked, fields = self._with_meta(params, along.get("meta")), self._fields(headers)
        cache = self._keeper.cache
        principal = _principal(fields if self._authorization is None else (*fields, self._authorization.generation))
        if cache is not None:
            kept = cache.get(method, asked, now=trio.current_time(), principal=principal)
            if kept is not None:
                await trio.lowlevel.checkpoint()
                return kept

        async def ask(timer: Timer | None = None) -> JsonObject:
            changes = 0 if cache is None else cache.changes
            result, complete = await self._keeper.ask(method, asked, None, fields, timer), asked
            if not is_complete(result):
                result, complete = await self._rounds(result, method, asked, None, headers, timer)
            if cache is not None:
                # Offered with the params that had it, by which the cache sees a retry (cache-03).
                cache.store(method, complete, result, asked=changes, now=trio.current_time(), principal=principal)
            return result

        if cache is None or method != _COMPLETE:
            return await ask(timer)
        # cmpl-03: it is asked for with each key that a user presses.
        key = cache.key(method, asked, principal=principal)
        if timer is None:
            return await self._keeper.share(key, ask)
        return await timer.run(method, lambda: self._keeper.share(key, ask))

    async def _page(self, method: str, shape: type[M], cursor: str | None, along: RequestOptions) -> M:
        check_along(along)
        return from_json(shape, await self._cached(method, {} if cursor is None else {"cursor": cursor}, along))

    async def _pages(self, method: str, shape: type[M], along: RequestOptions) -> AsyncIterator[M]:
        check_along(along)
        pager = Pager(limits=self._limits)
        while not pager.done:
            params = pager.params
            try:
                result = await self._cached(method, params, along)
            except RequestError:
                if self._keeper.cache is not None and "cursor" in params:
                    self._keeper.cache.forget(method)  # cache-22: no page of this walk is worth anything now
                raise
            pager.received(result)
            yield from_json(shape, result)

    def _good(self, items: Iterable[T | MalformedContent]) -> list[T]:
        """What can be read; one that cannot must not hide the others."""
        good = []
        for each in items:
            if isinstance(each, MalformedContent):
                self._keeper.loss(f"left out of a list: {each.why}")
            else:
                good.append(each)
        return good

    async def ping(self) -> None:
        """Ask whether the server is there.  2026-07-28 has no such request."""
        await self._keeper.ask("ping", {}, timer=self._timer({}))

    # Tools.

    async def list_tools_page(self, cursor: str | None = None, **along: Unpack[RequestOptions]) -> ListToolsResult:
        """One page of the tools, from `cursor`.  `list_tools` gets all pages."""
        page = await self._page("tools/list", ListToolsResult, cursor, along)
        self._learn(page)
        return page

    async def list_tools(self, **along: Unpack[RequestOptions]) -> list[Tool]:
        """All tools of all pages.  A tool that cannot be called is left out and named in `deviations`."""
        return [tool async for page in self._pages("tools/list", ListToolsResult, along) for tool in self._learn(page)]

    def _learn(self, page: ListToolsResult) -> list[Tool]:
        return self._book.learn(page.tools, mirroring=self._keeper.connection.caller.session.link is LinkKind.EXCHANGE)

    def _mirrors(self, name: str) -> Sequence[Mirror]:
        return self._book.mirrors(name)

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **along: Unpack[RequestOptions],
    ) -> CallToolResult: ...

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: type[T],
        on_progress: OnProgress | None = None,
        **along: Unpack[RequestOptions],
    ) -> T: ...

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: Any,  # a union or None, which to a type checker are no types
        on_progress: OnProgress | None = None,
        **along: Unpack[RequestOptions],
    ) -> Any: ...

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: Any = ABSENT,
        on_progress: OnProgress | None = None,
        **along: Unpack[RequestOptions],
    ) -> Any:
        """The result of a tool: all of it, or with `returns` its structured value, as that type.

        `returns` also takes the text of a tool that returns nothing else, the bytes, or nothing (None).  A tool that
        has failed says so in its result (`is_error`), which is for the model; with `returns` that raises `ToolFailed`.
        A result that is not what the tool has promised raises RemoteProtocolError, as far as the tool was listed
        before; with `returns` it is, if need be and if the server has a list.
        """
        if along:
            check_along(along, "call_tool", name)
        params: JsonObject = {"name": name, "arguments": members("arguments", arguments)}
        returned: ReturnType[Any] | None = None
        if returns is not ABSENT:
            returned = ReturnType(returns)  # before anything is done
            await self._book.look_for(name, self._walk_tools)
        asked, headers = self._with_meta(params, along.get("meta")), along.get("headers")
        timer = self._timer(along, progress=True) if along or self._timed else None
        try:
            said = await self._keeper.ask("tools/call", asked, on_progress, self._fields(headers), timer)
        except HeadersRefused as refused:
            said = await self._ask_anew(refused, asked, on_progress, headers, timer)
        if not is_complete(said):
            said, _ = await self._rounds(said, "tools/call", asked, on_progress, headers, timer, anew=True)
        result = from_json(CallToolResult, said)
        self._book.judge(name, result)
        return result if returned is None else returned.value(name, result, boxed=self._book.boxes(name))

    @overload
    def stream_tool(
        self, name: str, arguments: Mapping[str, Json] | None = None, **along: Unpack[RequestOptions]
    ) -> _ToolCallBlock[CallToolResult]: ...

    @overload
    def stream_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: type[T],
        **along: Unpack[RequestOptions],
    ) -> _ToolCallBlock[T]: ...

    @overload
    def stream_tool(
        self, name: str, arguments: Mapping[str, Json] | None = None, *, returns: Any, **along: Unpack[RequestOptions]
    ) -> _ToolCallBlock[Any]: ...

    def stream_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        returns: Any = ABSENT,
        **along: Unpack[RequestOptions],
    ) -> _ToolCallBlock[Any]:
        """``async with client.stream_tool(...) as call``: the call runs beside the block, which iterates over its
        progress and asks for its `result`, which is as that of `call_tool`; see `ToolCall`.  A call that is not
        done at the end is cancelled.
        """

        check_along(along, "stream_tool", name)
        given = members("arguments", arguments)

        async def call(on_progress: OnProgress) -> Any:
            return await self.call_tool(name, given, returns=returns, on_progress=on_progress, **along)

        return _ToolCallBlock(call, f"tools/call {name[:80]!r}, followed")

    async def _walk_tools(self) -> None:
        for _ in await self.list_tools():
            pass

    # Resources.

    async def list_resources_page(
        self, cursor: str | None = None, **along: Unpack[RequestOptions]
    ) -> ListResourcesResult:
        """One page of the resources, from `cursor`.  `list_resources` gets all pages."""
        return await self._page("resources/list", ListResourcesResult, cursor, along)

    async def list_resources(self, **along: Unpack[RequestOptions]) -> list[Resource]:
        """All resources of all pages."""
        pages = self._pages("resources/list", ListResourcesResult, along)
        return [resource async for page in pages for resource in self._good(page.resources)]

    async def list_resource_templates_page(
        self, cursor: str | None = None, **along: Unpack[RequestOptions]
    ) -> ListResourceTemplatesResult:
        """One page of the resource templates, from `cursor`.  `list_resource_templates` gets all pages."""
        return await self._page("resources/templates/list", ListResourceTemplatesResult, cursor, along)

    async def list_resource_templates(self, **along: Unpack[RequestOptions]) -> list[ResourceTemplate]:
        """All resource templates of all pages."""
        pages = self._pages("resources/templates/list", ListResourceTemplatesResult, along)
        return [template async for page in pages for template in self._good(page.resource_templates)]

    async def read_resource(self, uri: str, **along: Unpack[RequestOptions]) -> ReadResourceResult:
        """What is in a resource.  Raises `ResourceNotFound` where the server says that there is none."""
        check_along(along)
        try:
            return from_json(ReadResourceResult, await self._cached("resources/read", {"uri": uri}, along))
        except RequestError as error:
            # res-08: either code is heard from servers in either era.
            if error.code not in (RESOURCE_NOT_FOUND, INVALID_PARAMS):
                raise
            missing = ResourceNotFound(uri, error.message)
            missing.code, missing.data = error.code, error.data
            raise missing from None

    # Prompts and completion.

    async def list_prompts_page(self, cursor: str | None = None, **along: Unpack[RequestOptions]) -> ListPromptsResult:
        """One page of the prompts, from `cursor`.  `list_prompts` gets all pages."""
        return await self._page("prompts/list", ListPromptsResult, cursor, along)

    async def list_prompts(self, **along: Unpack[RequestOptions]) -> list[Prompt]:
        """All prompts of all pages."""
        pages = self._pages("prompts/list", ListPromptsResult, along)
        return [prompt async for page in pages for prompt in self._good(page.prompts)]

    async def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, **along: Unpack[RequestOptions]
    ) -> GetPromptResult:
        """A prompt, filled in."""
        check_along(along, "prompt", name)
        params: JsonObject = {"name": name, "arguments": members("arguments", arguments)}
        return from_json(GetPromptResult, await self.request("prompts/get", params, **along))

    async def complete(
        self,
        ref: PromptReference | ResourceReference,
        argument: str,
        value: str,
        *,
        context: Mapping[str, str] | None = None,
        **along: Unpack[RequestOptions],
    ) -> Completion:
        """What the server would complete `value` to, as this argument of a prompt or template.

        `context` are the other arguments that have a value already; revisions before 2025-06-18 do without.  Equal
        questions at the same time are one request, and its answer is used again for ten seconds, unless a list of
        prompts or resources changes before or the option `cache` is off.
        """
        check_along(along)
        others = None if context is None else CompletionContext(members("context", context))
        params = to_json(CompleteParams(ref, CompletionArgument(argument, value), others), self._terms.revision)
        return from_json(CompleteResult, await self._cached(_COMPLETE, params, along)).completion

    # What the server tells, and what it is told.

    def listen(
        self,
        *changes: ChangeEvent,
        tools: bool = False,
        prompts: bool = False,
        resources: bool | str | Iterable[str] = False,
        undeclared: bool = False,
    ) -> AbstractAsyncContextManager[Subscription]:
        """``async with client.listen(tools=True, resources=["notes://todo"]) as changes``: hear of changes for as long
        as the block; see `Subscription`.  ``resources=True`` is the list of resources, URIs are what the resources
        hold.  With ``undeclared=True`` the block also waits for what the server does not declare: some, such as mcp up
        to 1.30, send it all the same.
        """
        self._keeper.check_run()
        return self._keeper.listening.listen(
            *changes, tools=tools, prompts=prompts, resources=resources, undeclared=undeclared
        )

    async def set_log_level(self, level: LogLevel | None) -> None:
        """From which level on the server is to send log messages, which go to `on_log`.

        None: none from now on.  Raises `NotInThisRevision` for that in revisions before 2026-07-28, whose servers
        cannot be told to stop; "emergency" comes next to it there.
        """
        wanted = checked_level(level)
        self._keeper.check_run()
        await trio.lowlevel.checkpoint()  # in the modern era nothing is sent
        await self._keeper.set_log_level(wanted, self._timer({}))

    async def set_roots(self, roots: GivenRoots) -> None:
        """Directories that the server may work in from now on; the option `roots` has to have been given."""
        self._keeper.check_run()
        await trio.lowlevel.checkpoint()
        caller = await self._keeper.caller()
        changed = self._answering.set_roots(roots)
        if changed and terms_of(caller).revision.handshake:
            caller.notify("notifications/roots/list_changed")

    def _own_headers(self) -> Fields:
        if not self._headers:
            return ()
        try:
            headers = self._headers() if callable(self._headers) else self._headers
        except Exception as error:  # it is a callback, and what it raises belongs to whoever asks
            raise UsageError("the headers for a request could not be made") from error
        return fields_of(headers)


def _principal(fields: Fields) -> str | None:
    """cache-17: another token is another context, and a cookie or a key may be one; a digest tells them apart."""
    told = sorted((name.lower(), value) for name, value in fields)
    return sha256(repr(told).encode()).hexdigest() if told else None
