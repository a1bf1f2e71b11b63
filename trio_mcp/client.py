"""Client: what a program asks of a server, in whatever revision and by whatever transport the two have found.

    async with open_client("http://127.0.0.1:3000/mcp") as client:
        async for tool in client.tools():
            ...
        with trio.move_on_after(5):
            result = await client.call_tool("forecast", {"city": "Oslo"})

`open_client` is a block; `connect_client` puts the client into a nursery of yours, and any task may close it.  A
caller's cancel scope is the timeout of a call: leaving it tells the server, and the connection stays usable.

Nothing here raises in the background.  What ends a connection is raised by the calls that wait, at once, and by each
later one.  A session over HTTP that the server has lost is opened anew (http-58), once for all who need it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import attrs
import trio

from trio_mcp.caller import Caller, Failure, OnProgress
from trio_mcp.connecting import PROBE, Connection, Hold, Manner, Target, how_to_reach
from trio_mcp.core.errors import (
    INVALID_PARAMS,
    LocalProtocolError,
    McpError,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
)
from trio_mcp.core.headers import Fields, Mirror
from trio_mcp.core.jsonrpc import Json, JsonObject, Limits
from trio_mcp.core.opening import ClientSession, Negotiation
from trio_mcp.core.pages import Pager
from trio_mcp.core.peer import Outcome
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.core.rounds import Ask, Rounds
from trio_mcp.core.session import Call, Notice, Offer
from trio_mcp.core.terms import LOG_LEVELS, NOTHING, Terms
from trio_mcp.groups import open_nursery

if TYPE_CHECKING:
    import os
    import ssl

    from trio_mcp.core.content import Resource
    from trio_mcp.core.models import (
        CallToolResult,
        Completion,
        GetPromptResult,
        ListPromptsResult,
        ListResourcesResult,
        ListResourceTemplatesResult,
        ListToolsResult,
        LoggingMessageParams,
        LogLevel,
        Prompt,
        PromptReference,
        ReadResourceResult,
        ResourceReference,
        ResourceTemplate,
        Tool,
    )
    from trio_mcp.duplex import Tap

__all__ = ["Client", "ClientOptions", "connect_client", "open_client"]

T = TypeVar("T")
M = TypeVar("M")

_log = logging.getLogger("trio_mcp.client")

_DEVIATIONS = 100  # that are kept, the newest; who wants all of them has the log
_CLOSING = 30.0  # seconds that closing may take at the very most, whatever its parts are bounded by


class ClientOptions(TypedDict, total=False):
    """The options of `open_client` and `connect_client`."""

    name: str
    version: str
    """How the client introduces itself."""
    revision: str
    """The only revision to speak, such as "2025-11-25"; without it, the newest that both sides have."""
    on_log: Callable[[LoggingMessageParams], object]
    """Called with each log message of the server."""
    log_level: LogLevel
    """From which level on the server is asked to send them."""
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]]
    """What goes along with each HTTP request, such as Authorization; a function is asked for each."""
    meta: Callable[[], Mapping[str, Json]]
    """What goes along with each request as `_meta`, such as a trace context."""
    limits: Limits
    ssl_context: ssl.SSLContext
    tap: Tap
    """Called with "in" or "out" and the bytes of a stream."""
    probe: float
    """Seconds for which a server on a stream may think about whether it is a modern one."""
    env: Mapping[str, str | None]
    environment: Any
    cwd: str | os.PathLike[str]
    grace: float
    stderr: Callable[[bytes], object]


_CHILD = ("env", "environment", "cwd", "grace", "stderr")


def open_client(target: Target, **options: Unpack[ClientOptions]) -> _Block:
    """``async with open_client(target) as client``: a client for as long as the block.

    `target` is a URL (http, https, ws, wss), a command as a list of words, a `Server` of this process, or any stream
    with one message a line.  Raises LocalProtocolError for what is none and for options that it has no use for,
    `OpeningError` if the two sides find no common language, `McpError` (such as `ConnectionFailed` or `ServerExited`)
    if there is no connection.  What the block raises leaves it as it is.
    """
    return _Block(Client(target, options))


async def connect_client(nursery: trio.Nursery, target: Target, **options: Unpack[ClientOptions]) -> Client:
    """A client that lives in `nursery`, and is closed by `aclose`, which any task may call.  As `open_client`."""
    client = Client(target, options)
    await nursery.start(client._live)
    return client


class _Block:
    """A class, as `groups.open_nursery` is one."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> Client:
        self._nursery = open_nursery()
        nursery = await self._nursery.__aenter__()
        try:
            await nursery.start(self._client._live)
        except BaseException as error:
            await self._nursery.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            await self._client.aclose()
        finally:
            left = await self._nursery.__aexit__(kind, error, traceback)
        return left


class Client:
    """A client of one server; made by `open_client` or `connect_client`.  Any task may use it, many at once."""

    def __init__(self, target: Target, options: ClientOptions) -> None:
        reach: dict[str, Any] = {name: options[name] for name in _CHILD if name in options}  # type: ignore[literal-required]
        self._hold: Hold = how_to_reach(
            target, ssl_context=options.get("ssl_context"), probe=options.get("probe", PROBE), **reach
        )
        self._talk = _Ear(self, options)
        self._options = options
        self._log_level: str | None = _checked_level(options.get("log_level"))
        self._limits = options.get("limits") or Limits()
        self._offer = _offer_of(options)
        self._meta = options.get("meta")
        self._nursery: trio.Nursery | None = None
        self._connection: Connection | None = None
        self._renewing: trio.Event | None = None
        self._ending = self._over = trio.Event()  # of the session at hand
        self._closing = trio.Event()
        self._closed = trio.Event()
        self._mirrors: dict[str, tuple[Mirror, ...]] = {}
        self._deviations: deque[str] = deque(maxlen=_DEVIATIONS)

    # Its life.

    async def _live(self, task_status: trio.TaskStatus[Client]) -> None:
        try:
            async with open_nursery() as nursery:
                self._nursery = nursery
                self._connection = await self._connect(self._offer)
                task_status.started(self)
                await self._closing.wait()
                await self._part()
        finally:
            self._closing.set()
            self._closed.set()

    async def _connect(self, offer: Offer) -> Connection:
        assert self._nursery is not None
        manner = Manner(
            offer, self._talk, self._limits, self._headers, lambda tool: self._mirrors.get(tool, ()),
            self._options.get("tap"),
        )  # fmt: skip
        over = trio.Event()

        async def hold(task_status: trio.TaskStatus[Connection]) -> None:
            try:
                await self._hold(manner, task_status)
            finally:
                over.set()

        self._ending, self._over = manner.ending, over
        connection: Connection = await self._nursery.start(hold, name="a session with the server")
        await self._settle(connection.caller)
        return connection

    async def _settle(self, caller: Caller) -> None:
        """What a new session is to know of the one before."""
        if self._log_level is not None:
            await self._ask_for_log(caller, self._log_level)

    async def _part(self) -> None:
        self._ending.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSING):
            await self._over.wait()

    async def aclose(self) -> None:
        """Close the connection in good order: a session is ended, a child process is waited for.

        Any task may call it, and more than one; all return when it is closed.  If this is cancelled, it is closed all
        the same.
        """
        self._closing.set()
        await self._closed.wait()

    # What is known of the other side.

    @property
    def negotiation(self) -> Negotiation:
        """What was tried when the session was opened, what came back, what was chosen and why."""
        assert self._connection is not None
        return self._connection.negotiation

    @property
    def revision(self) -> str:
        """The revision that is spoken, such as "2026-07-28"."""
        return self._terms.revision.name

    @property
    def server(self) -> Mapping[str, Any]:
        """How the server introduced itself: name, version, and what else it said."""
        return self._terms.identity or {}

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """What the server declares."""
        return self._terms.capabilities

    @property
    def instructions(self) -> str | None:
        """The server's advice on how to use it."""
        return self._session.instructions

    @property
    def deviations(self) -> tuple[str, ...]:
        """What the server did off the protocol, as far as it cost nothing; the newest of it."""
        return tuple(self._deviations)

    @property
    def _session(self) -> ClientSession:
        assert self._connection is not None
        return self._connection.caller.session

    @property
    def _terms(self) -> Terms:
        terms = self._session.terms
        assert terms is not None  # it was opened
        return terms

    # Asking.

    async def _caller(self) -> Caller:
        """Whom to ask now; a session that the server has lost is opened anew first."""
        while True:
            if self._closing.is_set():
                raise SessionClosed("the client has been closed")
            assert self._connection is not None
            failure = self._connection.caller.failure
            if failure is None:
                return self._connection.caller
            error = failure()
            if not _may_be_renewed(error):
                raise error
            await self._renewed(error)

    async def _renewed(self, why: McpError) -> None:
        """Wait until somebody, in a task that no caller's cancellation reaches, has opened the session anew."""
        assert self._nursery is not None
        if self._renewing is None:
            self._renewing = trio.Event()
            self._nursery.start_soon(self._renew, self._renewing)
        before, renewing = self._connection, self._renewing
        await renewing.wait()
        if self._connection is before:
            raise SessionClosed(f"{why}, and could not be opened anew; the log says why") from why

    async def _renew(self, done: trio.Event) -> None:
        old = self._connection
        assert old is not None
        try:
            revision = self._terms.revision  # http-58; what it speaks is known
            self._ending.set()
            self._connection = await self._connect(attrs.evolve(self._offer, revisions=(revision,)))
        except McpError as error:
            _log.warning("the session was lost, and could not be opened anew: %s", error)
        finally:
            self._renewing = None
            done.set()

    async def _ask(
        self, method: str, params: JsonObject, *, on_progress: OnProgress | None = None, headers: Fields = ()
    ) -> JsonObject:
        """One request, made a second time only where the first is known not to have been carried out."""
        caller = await self._caller()
        try:
            return await caller.request(method, params, on_progress=on_progress, headers=headers)
        except SessionClosed as error:
            if not _may_be_renewed(error) or error.request_may_have_run:  # type: ignore[attr-defined]
                raise
        caller = await self._caller()
        return await caller.request(method, params, on_progress=on_progress, headers=headers)

    async def request(
        self,
        method: str,
        params: Mapping[str, Json] | None = None,
        *,
        on_progress: OnProgress | None = None,
        meta: Mapping[str, Json] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> JsonObject:
        """The result of any request of the protocol, as it came, with the server's questions answered on the way.

        Raises `RequestError` if the server answers with an error, `RemoteProtocolError` if its answer breaks the rules,
        `SessionClosed` (or what it is caused by) if there is none, `NotInThisRevision` and `NotDeclared` for what
        cannot be asked of this server, and `InputNotGiven` if it asked for something that it was not given.
        """
        asked: JsonObject = dict(params or {})
        more = {**(self._meta() if self._meta is not None else {}), **(meta or {})}
        if more:
            asked["_meta"] = {**asked.get("_meta", {}), **more}
        fields = _fields_of(headers or {})
        terms = (await self._caller()).session.terms
        assert terms is not None
        declared = self._session.declared(terms.revision)
        rounds = Rounds(terms.revision, method, asked, declared)
        while True:
            step = rounds.receive(await self._ask(method, asked, on_progress=on_progress, headers=fields))
            if not isinstance(step, Ask):
                return step.result
            asked = rounds.retry(await self._talk.answers(rounds, step, terms))

    async def ping(self) -> None:
        """Ask whether the server is there.  Raises `NotInThisRevision` in 2026-07-28, which has no such request."""
        await self._ask("ping", {})

    # Tools.

    async def list_tools(self, cursor: str | None = None) -> ListToolsResult:
        """One page of the tools; `tools` goes through all of them."""
        from trio_mcp.core.models import ListToolsResult

        return await self._page("tools/list", ListToolsResult, cursor)

    async def tools(self) -> AsyncIterator[Tool]:
        """All tools, page after page."""
        from trio_mcp.core.models import ListToolsResult, Tool

        async for page in self._pages("tools/list", ListToolsResult):
            for tool in self._good(page.tools, Tool):
                yield tool

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Json] | None = None,
        *,
        on_progress: OnProgress | None = None,
        meta: Mapping[str, Json] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> CallToolResult:
        """The result of a tool; one that says `is_error` is a result, too.  Raises as `request`."""
        from trio_mcp.core.codec import from_json
        from trio_mcp.core.models import CallToolResult

        params: JsonObject = {"name": name, "arguments": dict(arguments or {})}
        result = await self.request("tools/call", params, on_progress=on_progress, meta=meta, headers=headers)
        return from_json(CallToolResult, result)

    # Resources.

    async def list_resources(self, cursor: str | None = None) -> ListResourcesResult:
        """One page of the resources; `resources` goes through all of them."""
        from trio_mcp.core.models import ListResourcesResult

        return await self._page("resources/list", ListResourcesResult, cursor)

    async def resources(self) -> AsyncIterator[Resource]:
        """All resources, page after page."""
        from trio_mcp.core.content import Resource
        from trio_mcp.core.models import ListResourcesResult

        async for page in self._pages("resources/list", ListResourcesResult):
            for resource in self._good(page.resources, Resource):
                yield resource

    async def list_templates(self, cursor: str | None = None) -> ListResourceTemplatesResult:
        """One page of the resource templates; `templates` goes through all of them."""
        from trio_mcp.core.models import ListResourceTemplatesResult

        return await self._page("resources/templates/list", ListResourceTemplatesResult, cursor)

    async def templates(self) -> AsyncIterator[ResourceTemplate]:
        """All resource templates, page after page."""
        from trio_mcp.core.models import ListResourceTemplatesResult, ResourceTemplate

        async for page in self._pages("resources/templates/list", ListResourceTemplatesResult):
            for template in self._good(page.resource_templates, ResourceTemplate):
                yield template

    async def read(
        self, uri: str, *, meta: Mapping[str, Json] | None = None, headers: Mapping[str, str] | None = None
    ) -> ReadResourceResult:
        """What is in a resource.  Raises as `request`."""
        from trio_mcp.core.codec import from_json
        from trio_mcp.core.models import ReadResourceResult

        return from_json(
            ReadResourceResult, await self.request("resources/read", {"uri": uri}, meta=meta, headers=headers)
        )

    # Prompts and completion.

    async def list_prompts(self, cursor: str | None = None) -> ListPromptsResult:
        """One page of the prompts; `prompts` goes through all of them."""
        from trio_mcp.core.models import ListPromptsResult

        return await self._page("prompts/list", ListPromptsResult, cursor)

    async def prompts(self) -> AsyncIterator[Prompt]:
        """All prompts, page after page."""
        from trio_mcp.core.models import ListPromptsResult, Prompt

        async for page in self._pages("prompts/list", ListPromptsResult):
            for prompt in self._good(page.prompts, Prompt):
                yield prompt

    async def prompt(
        self,
        name: str,
        arguments: Mapping[str, str] | None = None,
        *,
        meta: Mapping[str, Json] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> GetPromptResult:
        """A prompt, filled in.  Raises as `request`."""
        from trio_mcp.core.codec import from_json
        from trio_mcp.core.models import GetPromptResult

        params: JsonObject = {"name": name, "arguments": dict(arguments or {})}
        return from_json(GetPromptResult, await self.request("prompts/get", params, meta=meta, headers=headers))

    async def complete(
        self,
        ref: PromptReference | ResourceReference,
        argument: str,
        value: str,
        *,
        context: Mapping[str, str] | None = None,
    ) -> Completion:
        """What the server would complete `value` to, as this argument of a prompt or template.

        `context` are the other arguments that have a value already; revisions before 2025-06-18 do without.
        """
        from trio_mcp.core.codec import from_json, to_json
        from trio_mcp.core.models import CompleteParams, CompleteResult, CompletionArgument, CompletionContext

        others = None if context is None else CompletionContext(dict(context))
        params = to_json(CompleteParams(ref, CompletionArgument(argument, value), others), self._terms.revision)
        return from_json(CompleteResult, await self.request("completion/complete", params)).completion

    # Logging.

    async def set_log_level(self, level: LogLevel) -> None:
        """From which level on the server is to send log messages, which go to `on_log`."""
        self._log_level = _checked_level(level)
        await self._ask_for_log(await self._caller(), level)

    @staticmethod
    async def _ask_for_log(caller: Caller, level: str) -> None:
        terms = caller.session.terms
        assert terms is not None
        if terms.revision.handshake:
            await caller.request("logging/setLevel", {"level": level})
        else:
            caller.session.log_level = level  # log-10: each request says so

    # Lists.

    async def _page(self, method: str, shape: type[M], cursor: str | None) -> M:
        from trio_mcp.core.codec import from_json

        params: JsonObject = {} if cursor is None else {"cursor": cursor}
        return cast("M", from_json(cast("Any", shape), await self.request(method, params)))

    async def _pages(self, method: str, shape: type[M]) -> AsyncIterator[M]:
        from trio_mcp.core.codec import from_json

        pager = Pager(limits=self._limits)
        while not pager.done:
            result = await self.request(method, pager.params)
            pager.received(result)
            yield cast("M", from_json(cast("Any", shape), result))

    def _good(self, items: Any, shape: type[T]) -> list[T]:
        """What can be read; one that cannot must not hide the others."""
        bad = [each for each in items if not isinstance(each, shape)]
        for each in bad:
            self._talk.mistake(f"left out of a list: {each.why}")
        return [each for each in items if isinstance(each, shape)]

    def _headers(self) -> Fields:
        headers = self._options.get("headers", {})
        return _fields_of(headers() if callable(headers) else headers)


class _Ear:
    """The client as its sessions have it: a `caller.Talk`."""

    def __init__(self, client: Client, options: ClientOptions) -> None:
        self._client = client
        self._on_log = options.get("on_log")

    async def answer(self, call: Call) -> JsonObject:
        raise RequestError(INVALID_PARAMS, f"{call.request.method} is not served here")

    async def answers(self, rounds: Rounds, ask: Ask, terms: Terms) -> dict[str, JsonObject]:
        raise rounds.abandon(next(iter(ask.questions)).key)

    def notice(self, notice: Notice) -> None:
        note = notice.notification
        if note.method == "notifications/message" and self._on_log is not None:
            from trio_mcp.core.codec import from_json
            from trio_mcp.core.models import LoggingMessageParams

            try:
                message = from_json(LoggingMessageParams, note.params)
            except RemoteProtocolError as error:
                self.mistake(str(error))
                return
            try:
                self._on_log(message)
            except Exception:  # noqa: BLE001  # an author's callback may raise anything, and the link goes on
                _log.exception("on_log has failed")

    def ended(self, outcome: Outcome) -> None:
        pass

    def mistake(self, why: str) -> None:
        self._client._deviations.append(why)
        _log.info("the server: %s", why)

    def lost(self, failure: Failure) -> None:
        pass


def _may_be_renewed(error: McpError) -> bool:
    return hasattr(error, "request_may_have_run")


def _offer_of(options: ClientOptions) -> Offer:
    info = {"name": options.get("name", "trio_mcp"), "version": options.get("version", "0")}
    revisions = tuple(REVISIONS.values())
    if (name := options.get("revision")) is not None:
        if name not in REVISIONS:
            raise LocalProtocolError(f"there is no revision {name!r}; there are {', '.join(REVISIONS)}")
        revisions = (REVISIONS[name],)
    return Offer(info, NOTHING, revisions)


def _checked_level(level: str | None) -> str | None:
    if level is not None and level not in LOG_LEVELS:
        raise LocalProtocolError(f"a log level is one of {', '.join(LOG_LEVELS)}; not {level!r}")
    return level


def _fields_of(headers: Mapping[str, str]) -> Fields:
    return tuple(headers.items())
