"""Relay: one server shown in the place of another, on other transports and in other revisions.

    async with open_relay(["python", "notes.py"]) as server:
        await serve_http(server, "127.0.0.1", 3000)            # a stdio server over HTTP

    async with open_relay("https://notes.example/mcp") as server:
        await serve_stdio(server)                              # an HTTP server over stdio

In front is a `Server` like any other, without tools of its own.  Its innermost middleware makes each request again, by
a client of the server behind, with an id and a progress token of its own.

| Towards the server behind | Back to the client in front |
|---|---|
| lists, page by page, with its own cursors | their pages, in the revision of the client |
| calls, reads, prompts, completions | results and errors as they came, progress, log messages |
| the cancellation of a call | |
| subscriptions, for as long as a client has them | changes |
| answers | its questions, asked of the client that made the call |

Messages are translated between revisions; what the revision of the client cannot carry is an error that says so.
`_meta` is passed on, except for what the protocol defines for one hop: tokens, versions, identities.  Headers and
principals belong to one hop as well, so access is decided by the middleware that is given here.

Each client has a session of its own with the server behind, in which nothing of another client can be seen.  Each is
a process where the server behind is one.

| A request | uses | which is closed |
|---|---|---|
| of a principal | the session of this principal | after `Limits.session_idle_seconds` without a request |
| without one, in a connection or session | the session of that connection | with the connection |
| without one, by HTTP without a session | one session for all of these | as that of a principal |
| any, where `target` is one open stream | that stream | with the relay |

The session that the relay opens at its start goes to the first client.  There are `Limits.relayed` at most; beyond, one
that is idle is closed, and its client gets another with its next request.  A session whose process or connection has
ended is opened again by the next request; the calls that were under way fail.

A server of 2026-07-28 asks in the answer to a call, so it is known which client is asked.  Before, a server asks in a
request of its own, which does not say to which call it belongs; nor does a log message, in any revision.

| Calls that run in this session | Questions | Log messages |
|---|---|---|
| none | refused | dropped |
| of one client | asked in the course of the newest call | told in the course of the newest call |
| of one client, in a session that several use | the same, but for roots | the same |
| of several clients, or one was cancelled and not answered | refused | dropped, with one warning |

A cancelled call counts for as long as the server may work on it: until it answers all the same, or for five minutes.
Roots are refused in a session that several use, because a server keeps them for later calls.  A call whose client has
been asked in 2026-07-28, and has not come back yet, does not count beside other calls of the same client.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import trio

from trio_mcp.client.asked import FormElicitationRequest, SamplingRequest, UrlElicitationRequest
from trio_mcp.client.client import Client, ClientOptions, open_client
from trio_mcp.client.connecting import Target
from trio_mcp.client.subscriptions import SubscriptionUnsupported
from trio_mcp.core.codec import REQUESTS, from_json, to_json
from trio_mcp.core.content import Model, well_formed
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    InputUnavailable,
    McpError,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.jsonrpc import Json, JsonObject, Limits, Request
from trio_mcp.core.meta import check_meta
from trio_mcp.core.models import CreateMessageResult, ListToolsResult, LoggingMessageParams, Root
from trio_mcp.core.revisions import LATEST, REVISIONS, Revision
from trio_mcp.core.shares import Shares
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind, resource_updated
from trio_mcp.relay.server import ChangeFor, RelayServer, owner_of
from trio_mcp.relay.sessions import UpstreamSession
from trio_mcp.server.context import Context
from trio_mcp.server.description import check_list, revisions_of
from trio_mcp.server.questions import Elicit, ElicitUrl, Inquiry, ListRoots, Sample
from trio_mcp.server.server import Server
from trio_mcp.transport.nursery import Block, check_trio, open_nursery

if TYPE_CHECKING:
    from trio_mcp.server.conversation import ServerSession
    from trio_mcp.server.dispatch import CallNext, Middleware

__all__ = ["ASKS", "open_relay"]

_log = logging.getLogger("trio_mcp.relay")

ASKS = ("sampling", "elicitation", "elicitation_url", "roots")
"""The questions that the server behind may ask."""

_LOGS = 1000  # log messages of one call that wait for a slow client; beyond, the oldest are dropped
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds from the end of a subscription to the next attempt
_PAGES = 100  # pages that were visited and are not known to be done, as in `answering`
_PER_HOP = ("_meta", "inputResponses", "requestState")  # of params
_QUESTIONS = frozenset({"tools/call", "prompts/get", "resources/read"})  # requests with questions
_LISTS: Mapping[str, Callable[[Client, str | None], Awaitable[Model]]] = {
    "tools/list": Client.list_tools_page,
    "prompts/list": Client.list_prompts_page,
    "resources/list": Client.list_resources_page,
    "resources/templates/list": Client.list_resource_templates_page,
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

    It can be served in every way that a `Server` can, in several at once, for as long as the block; it cannot be
    mounted.  `revisions` are those that it speaks, `middleware` is its own.  The options are those of `open_client`,
    and it raises as that does.  Each client has a session of its own with the server behind; the table at the head of
    this module says which.

    `asks`: the questions that are declared to the server behind, before a client is known.  A client that cannot be
    asked answers with the error that it would give itself.  A callback among the options answers instead of clients.
    `log_level` is "debug" by default, and `cache` False, because clients have caches of their own.

    A process that has died, or a connection that has ended, is replaced with the next request; the calls that were
    under way fail.  A target that is a stream cannot be: then every request is answered with an error.
    """
    check_list("asks", asks)
    for name in asks:
        if name not in ASKS:
            raise UsageError(f"asks: {shown(name)} is nothing to be asked; there are {', '.join(ASKS)}")
    revisions_of(revisions)
    return _OpenRelay(target, asks, middleware, revisions, options)


class _OpenRelay(Block[Server]):
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
        self._relay = _Relay(target, asks, options)
        self._limits = options.get("limits")
        self._middleware = middleware
        self._revisions = revisions

    async def __aenter__(self) -> Server:
        check_trio()
        async with AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(open_nursery())
            client = await self._relay.begin(nursery)
            stack.callback(self._relay.end)
            layers = (*self._middleware, self._relay.serve)
            server = self._relay.server = RelayServer(self._relay, client, layers, self._revisions, self._limits)
            self._stack = stack.pop_all()
        return server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)


# What goes through.


class _RelayedCall:
    """A call on its way, and the client that made it."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.link: Any = ctx.opened("a request")
        self.owner = owner_of(self.link)
        self.turn = trio.Lock()  # its questions are asked one after another: in 2026-07-28 a call has one at a time
        self.logs: deque[LoggingMessageParams] = deque(maxlen=_LOGS)
        self.told: trio.Event | None = None  # set when `logs` have been

    @property
    def whose(self) -> object:
        """The client; of a request that belongs to no session, that request alone."""
        return self.link if self.owner is None else self.owner


_at_hand: ContextVar[_RelayedCall | None] = ContextVar("the call that a relay makes", default=None)


class _WatchedChange:
    """A change that some clients of one session listen to."""

    def __init__(self) -> None:
        self.hearers = 0
        self.scope = trio.CancelScope()
        self.told = False
        """A client was told that it listens; by 2026-07-28 before the server behind has agreed."""
        self.missed = False
        """A change may have been missed since then."""
        self.settled = trio.Event()
        self.failure: McpError | None = None


class _Relay:
    """All sessions with the server behind, and the way from a request to one of them."""

    server: RelayServer
    nursery: trio.Nursery

    def __init__(self, target: Target, asks: Collection[str], options: ClientOptions) -> None:
        self.again = not isinstance(target, trio.abc.Stream)
        """Whether another session can be opened."""
        self._target = target
        self._asks = asks
        self._options = options
        self._limits = options.get("limits") or Limits()
        self._first: _Upstream | None = _Upstream(self)  # until a client uses it
        self._upstreams: dict[Hashable | None, _Upstream] = {}
        self._shares = Shares(self._limits.relayed)
        self._room = trio.Event()  # set when a session was forgotten
        self._watches: dict[tuple[Hashable | None, ChangeEvent], _WatchedChange] = {}
        self._ended = False
        self.warned: set[str] = set()  # why log messages were dropped
        self.connect(self._first)  # which raises for what is no target, and for options that it has no use for

    def connect(self, upstream: _Upstream) -> AbstractAsyncContextManager[Client]:
        return open_client(self._target, **upstream.options(self._asks, self._options))

    async def begin(self, nursery: trio.Nursery) -> Client:
        """Open the first session.  Raises as entering `open_client` does."""
        self.nursery = nursery
        assert self._first is not None
        self._first.news = True  # of what clients were told before this relay there is no record
        session = self._first.begin(math.inf)
        await session.open()
        client = await session.client()
        # Every other session is spoken in the same revision: what clients were told belongs to that.
        self._options = {**self._options, "revision": client.revision}
        return client

    def end(self) -> None:
        """The server may be served for longer; there is nothing behind it any more."""
        self._ended = True

    # The innermost middleware.

    async def serve(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method not in _FORWARDED:
            result = await call_next(request)
            if request.method == "resources/subscribe":
                link: Any = ctx.opened("a request")
                await self._agreed(link, resource_updated(request.params["uri"]))
            return result
        call = _RelayedCall(ctx)
        upstream = await self._of(call.owner, call.link)
        return await upstream.forward(call, request)

    # Whose session it is.

    async def _of(self, owner: Hashable | None, link: ServerSession) -> _Upstream:
        """The session of this client, which may have to be made.  Raises RequestError if there are too many."""
        while not self._ended and not link.session.closed:
            room, upstream = self._room, self._upstreams.get(owner)
            if upstream is not None:
                if not upstream.session.closing:
                    return upstream
            elif not self.again and self._upstreams:  # one open stream is for all
                (only,) = self._upstreams.values()
                await only.share()
                return only
            elif self._shares.take(holder := None if owner is None else link.account.holder):
                return self._give(owner, holder)
            else:
                self._make_room(holder)
            await room.wait()
        raise RequestError(INTERNAL_ERROR, "the server behind this one has given no answer: the relay has ended")

    def _give(self, owner: Hashable | None, holder: Hashable | None) -> _Upstream:
        idle = self._limits.session_idle_seconds if owner is None or owner == holder else math.inf
        upstream, self._first = self._first or _Upstream(self), None
        upstream.begin(idle if self.again else math.inf)
        upstream.owner, upstream.holder, upstream.shared = owner, holder, owner is None
        self._upstreams[owner] = upstream
        return upstream

    def _make_room(self, holder: Hashable | None) -> None:
        """Close an idle session: the client's own first, and if all are in use that of a client with more of them."""
        every = self._upstreams.values()
        idle = [each for each in every if not each.session.users and not each.session.closing]
        own = [each for each in idle if holder is not None and each.holder == holder]
        if own or (self._shares.full and idle):
            most = max(self._shares.of(each.holder) for each in own or idle)
            taken = [each for each in own or idle if self._shares.of(each.holder) == most]
            min(taken, key=lambda each: each.session.last_used).session.close()
        elif not any(each.session.closing for each in every):
            why = f"{len(every)} sessions with the server behind this one are in use (Limits.relayed); try again later"
            raise RequestError(INTERNAL_ERROR, why)

    def forget(self, upstream: _Upstream) -> None:
        """This session was closed."""
        if self._upstreams.get(upstream.owner) is upstream:
            del self._upstreams[upstream.owner]
            self._shares.give(upstream.holder)
        self._room.set()
        self._room = trio.Event()

    # What clients listen to, as the server that is shown hears of it.

    def session_of(self, owner: Hashable | None) -> object:
        if not self.again and self._upstreams:
            (only,) = self._upstreams.values()
            return only
        return self._upstreams.get(owner, self._first)

    def left(self, link: object) -> None:
        upstream = self._upstreams.get(link)
        if upstream is not None and self.again:
            upstream.session.leave()

    def listen(self, link: ServerSession, change: ChangeEvent, *, told: bool = False) -> None:
        if self._ended:
            return
        owner = owner_of(link)
        watch = self._watches.get((owner, change))
        if watch is None:
            watch = self._watches[owner, change] = _WatchedChange()
            self.nursery.start_soon(self._watch, owner, link, change, watch, name="a relay listens to a change")
        watch.hearers += 1
        if told and not watch.settled.is_set():
            watch.told = watch.missed = True

    def unhear(self, link: ServerSession, change: ChangeEvent) -> None:
        owner = owner_of(link)
        watch = self._watches.get((owner, change))
        if watch is not None:  # None: the server behind has ended it
            watch.hearers -= 1
            if not watch.hearers:
                del self._watches[owner, change]
                watch.scope.cancel(reason="no client listens any more")

    async def _watch(
        self, owner: Hashable | None, link: ServerSession, change: ChangeEvent, watch: _WatchedChange
    ) -> None:
        pause = _SHORTEST_PAUSE
        try:
            with watch.scope:
                while await self._listens(owner, link, change, watch):
                    await trio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            if self._watches.get((owner, change)) is watch:
                del self._watches[owner, change]
            watch.settled.set()

    async def _listens(
        self, owner: Hashable | None, link: ServerSession, change: ChangeEvent, watch: _WatchedChange
    ) -> bool:
        """Listen until the server behind ends that or is lost; whether to try again.  A client cannot be told that it
        does not listen any more, so only a refusal is final."""
        try:
            upstream = await self._of(owner, link)
            with upstream.session.used():
                await upstream.listen(change, watch)
        except McpError as error:
            _log.info("updates of a resource are not passed on: %s", error)
            refused = isinstance(error, RequestError) and error.code != INTERNAL_ERROR
            if not watch.told or refused or isinstance(error, SubscriptionUnsupported | UsageError):
                watch.failure = error
                return False
        watch.missed = True
        return not self._ended

    async def _agreed(self, link: ServerSession, change: ChangeEvent) -> None:
        """Wait until the server behind tells of this resource.  Raises RequestError if it does not."""
        owner = owner_of(link)
        if (owner, change) not in self._watches:  # it had refused, or ended it
            self.listen(link, change)
        if (watch := self._watches.get((owner, change))) is None:
            raise RequestError(INTERNAL_ERROR, "the server behind this one is not there any more")
        await watch.settled.wait()
        if isinstance(watch.failure, RequestError):
            raise watch.failure
        if watch.failure is not None:
            raise RequestError(INTERNAL_ERROR, "the server behind this one does not tell of changes of this resource")


class _Upstream:
    """One session with the server behind, and the calls that run in it."""

    session: UpstreamSession

    def __init__(self, relay: _Relay) -> None:
        self.owner: Hashable | None = None
        self.holder: Hashable | None = None
        self.shared = False
        """Whether calls of several clients may run in it."""
        self.news = False
        """Whether clients may know lists that this session did not give them."""
        self._relay = relay
        self._begun = False
        self._calls: dict[_RelayedCall, None] = {}
        self._pages: OrderedDict[UrlElicitationRequest, tuple[Context, ElicitUrl]] = OrderedDict()
        self._gave_roots = False

    def begin(self, idle: float) -> UpstreamSession:
        """There is a session from now on, which may be idle for so many seconds."""
        if self._begun:
            self.session.idle = idle
        else:
            relay = self._relay
            connect, forget = partial(relay.connect, self), partial(relay.forget, self)
            self.session = UpstreamSession(relay.nursery, connect, self._opened, forget, idle=idle, again=relay.again)
            self._begun = True
        return self.session

    async def share(self) -> None:
        """Another client uses it as well."""
        if self.shared:
            return
        self.shared = True
        if self._gave_roots:
            client = await self.session.client()
            await client.set_roots(self._list_roots)  # by which the server hears that those it knows are no more

    def options(self, asks: Collection[str], given: ClientOptions) -> ClientOptions:
        answers: dict[str, Any] = {
            "sampling": self._sample,
            "elicitation": self._elicit,
            "elicitation_url": self._visit,
            "roots": self._list_roots,
        }
        own: ClientOptions = {"on_log": self._logged, "on_elicitation_complete": self._page_done, "log_level": "debug"}
        own["cache"] = False  # what is kept here and there would live twice as long as its server said
        offered: Any = {name: answers[name] for name in asks}
        own.update(offered)
        if "sampling" in asks and "sampling" not in given:
            own["sampling_tools"] = True
        return {**own, **given}

    def _opened(self, client: Client, nursery: trio.Nursery) -> None:
        self._client = client
        nursery.start_soon(self._watch_lists, client, name="a relay listens to lists")

    @property
    def _behind(self) -> Revision:
        return REVISIONS[self._client.revision]

    # Requests.

    async def forward(self, call: _RelayedCall, request: Request) -> JsonObject:
        """The result of the request, made once more."""
        with self.session.used():
            if request.method in _QUESTIONS:  # from the beginning: some servers ask when they are opened
                self._calls[call] = None
            try:
                model = await self._forwarded(call, request)
                async with call.turn:
                    pass  # a question that came for it is still being asked
                while call.told is not None:  # what was said before the result is heard before it
                    await call.told.wait()
            finally:
                self._calls.pop(call, None)
            return _result(model, self._behind, call.ctx.terms.revision)

    async def _forwarded(self, call: _RelayedCall, request: Request) -> Model:
        client = await self.session.client()
        token = _at_hand.set(call)
        try:
            return await self._made(client, call.ctx, request)
        except InputUnavailable as error:
            raise _not_given(error) from error
        except (RequestError, RemoteProtocolError):
            raise
        except (McpError, trio.TooSlowError) as error:
            # Not in its words, which may be those of a process that has died: they are for the log.
            _log.warning("%s has no answer from the server behind: %s", request.method, error)
            again = "; it has ended, and is started again by the next request" * self.session.connection_lost(client)
            raise RequestError(INTERNAL_ERROR, f"the server behind this one has given no answer{again}") from error
        finally:
            _at_hand.reset(token)

    async def _made(self, client: Client, ctx: Context, request: Request) -> Model:
        method, params = request.method, _params(request, self._behind)
        if method in _LISTS:
            page = await _LISTS[method](client, params.get("cursor"))
            self.news = True
            if isinstance(page, ListToolsResult):
                self._relay.server.mirrored.learn(page.tools)
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

    def _whose(self, calls: Sequence[_RelayedCall]) -> _RelayedCall | str:
        """The call to which belongs what the server behind says, or why there is none; see the head of this file."""
        call = _at_hand.get()
        # Where servers just ask, this is the context in which the session was opened.
        if call is not None and call in self._calls and not self._behind.handshake:
            return call
        if not calls:
            return "no call runs"
        if self.shared:
            if len({each.whose for each in self._calls}) > 1:
                return "calls of several clients run, and it does not say to which it belongs"
            if self._client._keeper.connection.caller.ignored:
                return "a call was cancelled, and the server behind may still work on that"
        return calls[-1]

    async def _ask(self, make: Callable[[_RelayedCall], Inquiry[Any]]) -> Any:
        calls = list(self._calls)
        call = self._whose([each for each in calls if each.ctx.link is not None] or calls)
        if isinstance(call, str):
            raise _not_passed_on(call)
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

        def make(call: _RelayedCall) -> Sample:
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

    async def _elicit(self, asked: FormElicitationRequest) -> Any:
        answer = await self._ask(lambda call: Elicit(asked.message, asked.params.requested_schema))
        filled_in = getattr(answer, "value", None)
        # What was left out there is left out here: defaults were filled in where the user saw them.
        return answer if filled_in is None else {**dict.fromkeys(asked.fields), **filled_in}

    async def _visit(self, asked: UrlElicitationRequest) -> Any:
        def make(call: _RelayedCall) -> ElicitUrl:
            question = ElicitUrl(asked.message, asked.url)
            self._pages[asked] = call.ctx, question
            if len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
            return question

        return await self._ask(make)

    async def _list_roots(self) -> list[Root]:
        if self.shared and self._behind.handshake:
            raise _not_passed_on("several clients use this session, and the server behind would keep the roots of one")
        self._gave_roots = True
        return list(await self._ask(lambda call: ListRoots()))

    # What the server behind tells.

    def _page_done(self, page: UrlElicitationRequest) -> None:
        if (asked := self._pages.pop(page, None)) is not None:
            self._relay.nursery.start_soon(self._tell_page_done, *asked, name="a relay tells that a page is done")

    async def _tell_page_done(self, ctx: Context, question: ElicitUrl) -> None:
        try:
            await ctx.completed(question)
        except McpError as error:
            _log.info("that a page is done could not be told: %s", error)

    def _logged(self, message: LoggingMessageParams) -> None:
        call = self._whose(list(self._calls))
        if isinstance(call, str):
            level = logging.DEBUG if call in self._relay.warned else logging.WARNING
            self._relay.warned.add(call)
            _log.log(level, "log messages of the server behind are dropped: %s", call)
            return
        call.logs.append(message)
        if call.told is None:
            call.told = trio.Event()
            self._relay.nursery.start_soon(self._tell_logs, call, call.told, name="a relay passes log messages on")

    async def _tell_logs(self, call: _RelayedCall, told: trio.Event) -> None:
        try:
            while call.logs:
                each = call.logs.popleft()
                await call.ctx.log(each.level, each.data, logger=each.logger)
        except McpError as error:
            _log.info("a log message could not be passed on: %s", error)
        finally:
            call.told = None
            told.set()

    async def _watch_lists(self, client: Client) -> None:
        names = {ChangeKind.TOOLS: "tools", ChangeKind.PROMPTS: "prompts", ChangeKind.RESOURCES: "resources"}
        changes = [ChangeEvent(kind) for kind in names if kind.declared_in(client.capabilities)]
        if not changes:
            return
        try:
            async with client.listen(*changes) as heard:
                for change in changes if self.news else ():
                    self._tell_change(change)
                self.news = True
                async for change in heard:
                    self._tell_change(change)
        except McpError as error:
            _log.warning("changes of lists are not passed on any more: %s", error)

    def _tell_change(self, change: ChangeEvent) -> None:
        self._relay.server.tell(ChangeFor(change.kind, change.item, self))

    async def listen(self, change: ChangeEvent, watch: _WatchedChange) -> None:
        """Pass on what the server behind tells of, in this session and in those that follow it.

        Returns when the server ends that in good order.  Raises as `Client.listen` if it does not begin, or breaks off
        without the session.
        """
        client = await self.session.client()
        while True:
            try:
                if change.kind is ChangeKind.RESOURCE:
                    async with client.listen(change) as heard:
                        if watch.missed:
                            watch.missed = False
                            self._tell_change(change)
                        watch.told = True
                        watch.settled.set()
                        async for each in heard:
                            self._tell_change(each)
                else:  # for lists there is `_watch_lists`
                    watch.settled.set()
                    await client._keeper.gone.wait()
            except McpError:
                if not (watch.settled.is_set() and self.session.connection_lost(client)):
                    raise
            if not self.session.connection_lost(client):
                return
            client = await self.session.next_client(client)
            if change.kind is ChangeKind.RESOURCE:
                watch.missed = True
            else:
                self._tell_change(change)


def _not_passed_on(why: str) -> RequestError:
    return RequestError(INTERNAL_ERROR, f"the question was not passed on: {why}")


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
    except UsageError:
        return False
    return True


def _not_given(error: InputUnavailable) -> McpError:
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
