"""Relay: one server shown in the place of another, on other transports and in other revisions.

    async with open_relay(["python", "notes.py"]) as server:
        await serve_http(server, "127.0.0.1", 3000)            # a stdio server over HTTP

    async with open_relay("https://notes.example/mcp") as server:
        await serve_stdio(server)                              # an HTTP server over stdio

There is one client, and behind it the server that is shown; before it a `Server` like any other, with no tools of its
own: a middleware takes each request, and the client makes it again, with an id and a progress token of its own.

| Towards the server behind | Back to who asked |
|---|---|
| lists, page by page, with its own cursors | what it lists, in the revision of who asked |
| calls, reads, prompts, completions | results and errors as they came, progress, log messages |
| the end of a call that is cancelled | |
| what somebody here listens to, for as long | changes |
| answers | its questions, asked of the client whose call they belong to |

What is said otherwise between revisions is said otherwise here; what the revision of who asked cannot carry is an error
that says so.  `_meta` goes along, but for what the protocol means for one hop: tokens, versions, identities.  Headers
and principals belong to a hop as well, so who may do what is decided by the middleware that is given here.

Whose question is it?  In 2026-07-28 a question answers a call, and is asked of who made that.  Before, a server just
asks.  Then it is for the one client whose calls run; if there is none, or there are several, the question is refused,
for it must not be shown to somebody else.  A call whose client has been asked in 2026-07-28, and has not come back yet,
does not count beside others: it may never come back, and nobody could be asked for as long.  That takes a server to ask
one thing at a time in a call; for one that does not, give a callback of your own.  Log messages are for the one client
that has calls of any kind, and else they are dropped.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import trio

from trio_mcp.asked import FormRequest, PageRequest, SamplingRequest
from trio_mcp.client import Client, ClientOptions, open_client
from trio_mcp.connecting import Target
from trio_mcp.context import Context
from trio_mcp.core.codec import REQUESTS, from_json, to_json
from trio_mcp.core.content import Model, well_formed
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    InputNotGiven,
    LocalProtocolError,
    McpError,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    shown,
)
from trio_mcp.core.jsonrpc import Json, JsonObject, Request
from trio_mcp.core.listen import Change, Kind
from trio_mcp.core.meta import check_meta
from trio_mcp.core.models import CreateMessageResult, ListToolsResult, LoggingMessageParams, Root
from trio_mcp.core.revisions import LATEST, REVISIONS, Revision
from trio_mcp.description import revisions_of
from trio_mcp.groups import Block, open_nursery
from trio_mcp.questions import Elicit, ElicitUrl, Inquiry, ListRoots, Sample
from trio_mcp.relay_server import Shown
from trio_mcp.server import Server

if TYPE_CHECKING:
    from trio_mcp.dispatch import CallNext, Middleware

__all__ = ["ASKS", "open_relay"]

_log = logging.getLogger("trio_mcp.relay")

ASKS = ("sampling", "elicitation", "elicitation_url", "roots")
"""What the server behind may ask."""

_LOGS = 1000  # messages of one call that wait for a client which reads slowly; then the oldest are left out
_PAGES = 100  # that were visited and whose end was not told, as in `answering`
_PER_HOP = ("_meta", "inputResponses", "requestState")  # of params
_QUESTIONS = frozenset({"tools/call", "prompts/get", "resources/read"})  # may have some
_LISTS: Mapping[str, Callable[[Client, str | None], Awaitable[Model]]] = {
    "tools/list": Client.list_tools,
    "prompts/list": Client.list_prompts,
    "resources/list": Client.list_resources,
    "resources/templates/list": Client.list_templates,
}
_FORWARDED = frozenset({*_LISTS, *_QUESTIONS, "completion/complete"})


def open_relay(
    target: Target,
    *,
    asks: Collection[str] = ASKS,
    middleware: Sequence[Middleware] = (),
    revisions: Collection[str] = tuple(REVISIONS),
    **options: Unpack[ClientOptions],
) -> AbstractAsyncContextManager[Server]:
    """``async with open_relay(target) as server``: a server that stands for the one at `target`.

    It may be served in every way that a `Server` can, in several at once, for as long as the block; it cannot be
    mounted.  `revisions` are those that it speaks, `middleware` is its own.  The options are those of `open_client`,
    and it raises as that does.

    `asks`: what the server behind is told that it may ask.  It has to know at the start, whoever comes then; where that
    one cannot be asked, it gets the error that it would get from that one.  A callback of your own among the options
    answers itself, and nobody else is asked.  Log messages are wanted from `log_level` on, which is "debug"; `cache` is
    False, for clients have caches of their own.

    When the server behind is gone for good, every request is answered with an error; the block goes on.
    """
    for name in asks:
        if name not in ASKS:
            raise LocalProtocolError(f"asks: {shown(name)} is nothing to be asked; there are {', '.join(ASKS)}")
    revisions_of(revisions)
    return _Block(target, asks, middleware, revisions, options)


class _Block(Block[Server]):
    """A class, as `groups.open_nursery` is one."""

    _usage = "async with open_relay(...) as server"

    def __init__(
        self,
        target: Target,
        asks: Collection[str],
        middleware: Sequence[Middleware],
        revisions: Collection[str],
        options: ClientOptions,
    ) -> None:
        self._relay = _Relay()
        self._limits = options.get("limits")
        self._middleware = middleware
        self._revisions = revisions
        self._client = open_client(target, **self._relay.options(asks, options))

    async def __aenter__(self) -> Server:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._client)
            nursery = await stack.enter_async_context(open_nursery())
            layers = (*self._middleware, self._relay.serve)
            server = Shown(self._relay, client, layers, self._revisions, self._limits)
            self._relay.begin(client, server, nursery)
            stack.callback(self._relay.end)
            self._stack = stack.pop_all()
        return server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)


# What goes through.


class _Call:
    """A call on its way, and who made it."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.whose = ctx.link
        """The connection or session; of a request without one, that request alone."""
        self.turn = trio.Lock()  # its questions are asked one after another: in 2026-07-28 a call has one at a time
        self.logs: deque[LoggingMessageParams] = deque(maxlen=_LOGS)
        self.told: trio.Event | None = None  # set when `logs` have been


_at_hand: ContextVar[_Call | None] = ContextVar("the call that a relay makes", default=None)


class _Watch:
    """A resource of the server behind that somebody here listens to."""

    def __init__(self) -> None:
        self.hearers = 0  # runs of the server
        self.scope = trio.CancelScope()
        self.settled = trio.Event()
        self.failure: McpError | None = None


class _Relay:
    """Both directions; see the head of this file."""

    _client: Client
    _server: Shown
    _nursery: trio.Nursery

    def __init__(self) -> None:
        self._ended = False
        self._calls: dict[_Call, None] = {}
        self._watches: dict[str, _Watch] = {}
        self._pages: OrderedDict[PageRequest, tuple[Context, ElicitUrl]] = OrderedDict()

    def options(self, asks: Collection[str], given: ClientOptions) -> ClientOptions:
        answers: dict[str, Any] = {
            "sampling": self._sample,
            "elicitation": self._elicit,
            "elicitation_url": self._visit,
            "roots": self._list_roots,
        }
        own: ClientOptions = {"on_log": self._logged, "on_page_done": self._page_done, "log_level": "debug"}
        own["cache"] = False  # what is kept here and there would live twice as long as its server said
        offered: Any = {name: answers[name] for name in asks}
        own.update(offered)
        if "sampling" in asks and "sampling" not in given:
            own["sampling_tools"] = True
        return {**own, **given}

    def begin(self, client: Client, server: Shown, nursery: trio.Nursery) -> None:
        self._client, self._server, self._nursery = client, server, nursery
        nursery.start_soon(self._watch_lists, name="a relay listens to lists")

    def end(self) -> None:
        """Somebody may go on serving the server; there is nothing behind it any more."""
        self._ended = True

    @property
    def _behind(self) -> Revision:
        return REVISIONS[self._client.revision]

    # Requests.

    async def serve(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        """The innermost middleware."""
        if request.method not in _FORWARDED:
            result = await call_next(request)
            if request.method == "resources/subscribe":
                await self._agreed(request.params["uri"])
            return result
        call = _Call(ctx)
        if request.method in _QUESTIONS:
            self._calls[call] = None
        token = _at_hand.set(call)
        try:
            model = await self._forwarded(call, request)
            async with call.turn:
                pass  # a question that came for it is still being asked
            while call.told is not None:  # what was said before the result is heard before it
                await call.told.wait()
        finally:
            _at_hand.reset(token)
            self._calls.pop(call, None)
        return _result(model, self._behind, ctx.terms.revision)

    async def _forwarded(self, call: _Call, request: Request) -> Model:
        try:
            return await self._made(call.ctx, request)
        except InputNotGiven as error:
            raise _not_given(error) from error
        except (RequestError, RemoteProtocolError):
            raise
        except McpError as error:
            # Not in its words, which may be those of a process that has died: they are for the log.
            _log.warning("%s has no answer from the server behind: %s", request.method, error)
            raise RequestError(INTERNAL_ERROR, "the server behind this one has given no answer") from error

    async def _made(self, ctx: Context, request: Request) -> Model:
        """The request, made once more."""
        method, client = request.method, self._client
        params = _params(request, self._behind)
        if method in _LISTS:
            page = await _LISTS[method](client, params.get("cursor"))
            if isinstance(page, ListToolsResult):
                self._server.mirrored.learn(page.tools)
            return page
        meta = _passed_on(ctx.meta, self._behind)
        on_progress = ctx.progress if "progressToken" in ctx.meta else None
        if method == "tools/call":
            arguments = params.get("arguments")
            return await client.call_tool(params["name"], arguments, on_progress=on_progress, meta=meta)
        result = await client.request(method, params, on_progress=on_progress, meta=meta)
        read: Model = from_json(REQUESTS[method].result, result)
        return read

    # Questions of the server behind.

    def _whose(self, calls: Sequence[_Call]) -> _Call:
        """To which of these what the server behind says belongs."""
        call = _at_hand.get()
        # Where servers just ask, this is the context of whoever opened the session.
        if call is not None and call in self._calls and not self._behind.handshake:
            return call
        clients = {each.whose for each in calls}
        if len(clients) == 1:
            return calls[-1]
        why = "calls of several clients run, and it does not say to which it belongs" if clients else "no call runs"
        raise RequestError(INTERNAL_ERROR, f"the question was not passed on: {why}")

    async def _ask(self, make: Callable[[_Call], Inquiry[Any]]) -> Any:
        calls = list(self._calls)
        call = self._whose([each for each in calls if each.ctx.link is not None] or calls)
        async with call.turn:
            try:
                return (await call.ctx.ask(passed_on=make(call)))["passed_on"]
            except RequestError:
                raise
            except McpError as error:
                if not self._behind.handshake:
                    raise  # that is how the call ends
                raise _refusal(error) from error

    async def _sample(self, asked: SamplingRequest) -> CreateMessageResult:
        params = asked.params

        def make(call: _Call) -> Sample:
            return Sample(
                well_formed(params.messages),
                max_tokens=params.max_tokens,
                system_prompt=params.system_prompt,
                temperature=params.temperature,
                stop_sequences=params.stop_sequences,
                model_preferences=params.model_preferences,
                include_context=params.include_context,
                tools=None if params.tools is None else well_formed(params.tools),
                tool_choice=params.tool_choice,
                metadata=params.metadata,
            )

        result: CreateMessageResult = await self._ask(make)
        return result

    async def _elicit(self, asked: FormRequest) -> Any:
        answer = await self._ask(lambda call: Elicit(asked.message, asked.params.requested_schema))
        filled_in = getattr(answer, "value", None)
        # What was left out there is left out here: defaults were filled in where the user saw them.
        return answer if filled_in is None else {**dict.fromkeys(asked.fields), **filled_in}

    async def _visit(self, asked: PageRequest) -> Any:
        def make(call: _Call) -> ElicitUrl:
            question = ElicitUrl(asked.message, asked.url)
            self._pages[asked] = call.ctx, question
            if len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
            return question

        return await self._ask(make)

    async def _list_roots(self) -> list[Root]:
        return list(await self._ask(lambda call: ListRoots()))

    # What the server behind tells.

    def _page_done(self, page: PageRequest) -> None:
        if (asked := self._pages.pop(page, None)) is not None:
            self._nursery.start_soon(self._tell_page_done, *asked, name="a relay tells that a page is done")

    async def _tell_page_done(self, ctx: Context, question: ElicitUrl) -> None:
        try:
            await ctx.completed(question)
        except McpError as error:
            _log.info("that a page is done could not be told: %s", error)

    def _logged(self, message: LoggingMessageParams) -> None:
        try:
            call = self._whose(list(self._calls))
        except RequestError:
            _log.debug("a log message of the server behind was dropped, for it is not known whose it is")
            return
        call.logs.append(message)
        if call.told is None:
            call.told = trio.Event()
            self._nursery.start_soon(self._tell_logs, call, call.told, name="a relay passes log messages on")

    async def _tell_logs(self, call: _Call, told: trio.Event) -> None:
        try:
            while call.logs:
                each = call.logs.popleft()
                await call.ctx.log(each.level, each.data, logger=each.logger)
        except McpError as error:
            _log.info("a log message could not be passed on: %s", error)
        finally:
            call.told = None
            told.set()

    async def _watch_lists(self) -> None:
        names = {Kind.TOOLS: "tools", Kind.PROMPTS: "prompts", Kind.RESOURCES: "resources"}
        changes = [Change(kind) for kind in names if kind.declared_in(self._client.capabilities)]
        if not changes:
            return
        try:
            async with self._client.listen(*changes) as heard:
                for change in changes:  # between the first reading and now it may have changed
                    self._tell_change(change)
                async for change in heard:
                    self._tell_change(change)
        except McpError as error:
            _log.warning("changes of lists are not passed on any more: %s", error)

    def _tell_change(self, change: Change) -> None:
        if change.kind is Kind.RESOURCE:
            self._server.updated(change.item)
        elif change.kind is Kind.TOOLS:
            self._server.changed("tools")
        elif change.kind is Kind.PROMPTS:
            self._server.changed("prompts")
        else:
            self._server.changed("resources")

    # Resources that are listened to.

    def hear(self, uri: str) -> None:
        if self._ended:
            return
        watch = self._watches.get(uri)
        if watch is None:
            watch = self._watches[uri] = _Watch()
            self._nursery.start_soon(self._watch, uri, watch, name="a relay listens to a resource")
        watch.hearers += 1

    def unhear(self, uri: str) -> None:
        watch = self._watches.get(uri)
        if watch is not None:  # None: the server behind has ended it
            watch.hearers -= 1
            if not watch.hearers:
                del self._watches[uri]
                watch.scope.cancel(reason="nobody listens any more")

    async def _watch(self, uri: str, watch: _Watch) -> None:
        try:
            with watch.scope:
                async with self._client.listen(resources=uri) as heard:
                    watch.settled.set()
                    async for change in heard:
                        self._tell_change(change)
        except McpError as error:
            _log.info("updates of a resource are not passed on: %s", error)
            watch.failure = error
        finally:
            if self._watches.get(uri) is watch:
                del self._watches[uri]
            watch.settled.set()

    async def _agreed(self, uri: str) -> None:
        """Wait until the server behind tells of this resource.  Raises RequestError if it does not."""
        if uri not in self._watches:  # it had refused, or ended it
            self.hear(uri)
        if (watch := self._watches.get(uri)) is None:
            raise RequestError(INTERNAL_ERROR, "the server behind this one is not there any more")
        await watch.settled.wait()
        if isinstance(watch.failure, RequestError):
            raise watch.failure
        if watch.failure is not None:
            raise RequestError(INTERNAL_ERROR, "the server behind this one does not tell of changes of this resource")


# What is said otherwise on the other side.


def _params(request: Request, revision: Revision) -> JsonObject:
    params = {name: value for name, value in request.params.items() if name not in _PER_HOP}
    try:
        read: Model = from_json(REQUESTS[request.method].params, params)
    except RemoteProtocolError as error:
        raise RequestError(INVALID_PARAMS, str(error)) from None
    return to_json(read, revision)


def _result(model: Model, behind: Revision, revision: Revision) -> JsonObject:
    raw = model.raw
    result = dict(raw) if behind is revision and raw is not None else to_json(model, revision)
    meta = _passed_on(result.pop("_meta", None) or {}, revision)
    return {**result, "_meta": meta} if meta else result


def _passed_on(meta: Mapping[str, Json], revision: Revision) -> JsonObject:
    return {key: value for key, value in meta.items() if _is_for_all(key, value, revision)}


def _is_for_all(key: str, value: Json, revision: Revision) -> bool:
    """Whether it is no business of a hop.  What the protocol has kept to itself has changed once, so both are asked."""
    try:
        check_meta({key: value}, LATEST)
        check_meta({key: value}, revision)
    except LocalProtocolError:
        return False
    return True


def _not_given(error: InputNotGiven) -> McpError:
    """What is told the client that did not answer, or could not be asked."""
    why = error.__cause__
    if isinstance(why, NotDeclared | NotInThisRevision | RequestError):
        return why
    return RequestError(INTERNAL_ERROR, f"the server behind this one asked what could not be passed on: {why or error}")


def _refusal(error: McpError) -> RequestError:
    """What the server behind is told, when the client cannot be asked."""
    if isinstance(error, NotDeclared):  # as that client would say it itself
        return RequestError(METHOD_NOT_FOUND if len(error.capability) == 1 else INVALID_PARAMS, str(error))
    return RequestError(INTERNAL_ERROR, f"the question was not passed on, or not answered: {error}")
