"""Relay: serves an upstream server under another transport or to clients of other protocol revisions.

    async with open_relay(["python", "notes.py"]) as server:
        await serve_http(server, "127.0.0.1", 3000)            # a stdio server over HTTP

    async with open_relay("https://notes.example/mcp") as server:
        await serve_stdio(server)                              # an HTTP server over stdio

The front server is a `Server` without features of its own.  Its innermost middleware sends each request to the upstream
server, through a `Client`, with a new id and a new progress token.

| To the upstream server | Back to the client |
|---|---|
| list requests, page by page, with upstream cursors | the pages, in the client's revision |
| calls, reads, prompts, completions | unchanged results and errors, progress, log messages |
| the cancellation of a call | |
| subscriptions, while a client has them | changes |
| answers | questions, asked of the client that made the call |

Messages are translated between revisions.  A message that the client's revision cannot express becomes an error that
says so.  `_meta` is forwarded, except for the keys that the protocol defines for one hop: tokens, versions, identities.
Headers and principals also belong to one hop, so the `middleware` of the relay decides about access.

Each client has its own session with the upstream server, and sees nothing of other clients.  If the target is a
command, each session is a process.

| A request | uses | which is closed |
|---|---|---|
| of a principal | the session of this principal | after `Limits.session_idle_seconds` without a request |
| without a principal, in a connection or session | the session of that connection | with the connection |
| without a principal, over HTTP without a session | one session for all of these | as that of a principal |
| any, if `target` is an open stream | that stream | with the relay |

The session that the relay opens at its start goes to the first client.  There are at most `Limits.relayed` sessions.
At the limit an idle session is closed, and its client gets a new one with its next request.  If a process or connection
ends, its running calls fail, and the next request opens the session again.

A server of 2026-07-28 asks questions in the answer to a call, so the relay knows which client to ask.  Servers of older
revisions ask in a separate request, which does not name the call it belongs to.  Log messages do not name it in any
revision.

| Running calls in the session | Questions | Log messages |
|---|---|---|
| none | refused | dropped |
| of one client | asked in its newest call | sent in its newest call |
| of one client, in a shared session | the same, except that roots are refused | the same |
| of several clients, or a call was cancelled and not answered | refused | dropped, with one warning |

A cancelled call counts until the server answers it anyway, or for five minutes, because the server may still work on
it.  Roots are refused in a shared session, because a server keeps them for later calls.  A 2026-07-28 call whose client
was asked and has not answered yet is ignored if the same client has other calls.
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

from trio_mcp.client.callbacks import FormElicitationRequest, SamplingRequest, UrlElicitationRequest
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
)
from trio_mcp.core.messages import Json, JsonObject, Limits, Request
from trio_mcp.core.models import CreateMessageResult, ListToolsResult, LoggingMessageParams, Root
from trio_mcp.core.revisions import LATEST, REVISIONS, Revision, check_meta
from trio_mcp.core.shares import Shares, holder_of
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind, resource_updated
from trio_mcp.relay.server import RelayServer
from trio_mcp.relay.sessions import UpstreamSession
from trio_mcp.server.context import Context
from trio_mcp.server.questions import Elicit, ElicitUrl, Inquiry, ListRoots, Sample
from trio_mcp.server.server import Server, check_names
from trio_mcp.transport.nursery import Block, check_trio, open_nursery

if TYPE_CHECKING:
    from trio_mcp.server.dispatch import CallNext, Middleware
    from trio_mcp.server.session import ServerSession

__all__ = ["ASKS", "open_relay"]

_log = logging.getLogger("trio_mcp.relay")

ASKS = ("sampling", "elicitation", "elicitation_url", "roots")
"""The questions that the upstream server may ask."""

_MAX_LOGS = 1000  # log messages of one call that wait for a slow client; if there are more, the oldest are dropped
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds from the end of a subscription to the next attempt
_MAX_ELICITATIONS = 100  # URL elicitations that are not known to be complete; as many as the client keeps
_PER_HOP = ("_meta", "inputResponses", "requestState")  # params that are not forwarded
_QUESTIONS = frozenset({"tools/call", "prompts/get", "resources/read"})  # requests during which a server may ask
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
    """Open a relay: ``async with open_relay(target) as server`` gives a `Server` that presents the one at `target`.

    Inside the block, serve it like any other server, also in several ways at once, or mount it in another server.  Each
    client gets its own session with the upstream server, and for a command its own process.

    `revisions` are the protocol revisions that the relay offers to clients, and `middleware` handles their requests
    first.  The other options are those of `open_client`, and the exceptions too, at the call and on entering the block.
    `log_level` is "debug" by default, and `cache` is False, because clients have their own caches.

    `asks` are the kinds of questions that the relay declares to the upstream server: it must do so before it knows a
    client.  If a client does not support a question, the upstream server gets the error that the client would send.  A
    callback among the options answers instead of the clients.

    If a process dies or a connection ends, its running calls fail, and the next request opens it again.  A target that
    is a stream cannot be opened again: then all later requests fail.
    """
    check_names("asks", asks, ASKS)
    check_names("revisions", revisions, REVISIONS, "revision")
    return _OpenRelay(target, asks, middleware, revisions, options)


class _OpenRelay(Block[Server]):
    """Opens the relay for the duration of the block."""

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


# Requests.

_PRINCIPAL = holder_of("", None)


def owner_of(link: Any) -> Hashable | None:
    """The owner of the upstream session that a request on `link` uses: see the second table at the head of this file.

    `link` is a connection, a session, or a single request.  Returns the holder of a principal, the link of a client
    without one, or None for a single request without a principal.
    """
    holder = link.account.holder
    if isinstance(holder, str) and holder.startswith(str(_PRINCIPAL)):
        return holder
    return None if link.alone else link


class _RelayedCall:
    """A running request and the client that sent it."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.link: Any = ctx._open_link("a request")
        self.owner = owner_of(self.link)
        self.question_lock = trio.Lock()  # asks one question at a time, because a 2026-07-28 call may have only one
        self.logs: deque[LoggingMessageParams] = deque(maxlen=_MAX_LOGS)
        self.logs_sent: trio.Event | None = None  # set when all `logs` are sent; None if there are none

    @property
    def origin(self) -> object:
        """Identifies the client; for a single request outside a session, the request itself."""
        return self.link if self.owner is None else self.owner


_current_call: ContextVar[_RelayedCall | None] = ContextVar("the current call of a relay", default=None)


class _WatchedChange:
    """A change to which clients of one upstream session are subscribed."""

    def __init__(self) -> None:
        self.listeners = 0
        self.scope = trio.CancelScope()
        self.announced = False
        """A subscription of a client was acknowledged; in 2026-07-28 before the upstream server has agreed."""
        self.missed = False
        """A change may have been missed since the acknowledgement."""
        self.settled = trio.Event()
        self.failure: McpError | None = None


class _Relay:
    """All sessions with the upstream server.  Chooses the session for each request."""

    server: RelayServer
    nursery: trio.Nursery

    def __init__(self, target: Target, asks: Collection[str], options: ClientOptions) -> None:
        self.can_reopen = not isinstance(target, trio.abc.Stream)
        """Whether the target can be opened more than once."""
        self._target = target
        self._asks = asks
        self._options = options
        self._limits = options.get("limits") or Limits()
        self._first: _Upstream | None = _Upstream(self)  # until a client uses it
        self._upstreams: dict[Hashable | None, _Upstream] = {}
        self._shares = Shares(self._limits.relayed)
        self._room = trio.Event()  # set when a session was closed
        self._watches: dict[tuple[Hashable | None, ChangeEvent], _WatchedChange] = {}
        self._ended = False
        self.warned: set[str] = set()  # the reasons for dropped log messages that were logged as warnings
        self.connect(self._first)  # raises for an invalid target or option

    def connect(self, upstream: _Upstream) -> AbstractAsyncContextManager[Client]:
        return open_client(self._target, **upstream.options(self._asks, self._options))

    async def begin(self, nursery: trio.Nursery) -> Client:
        """Open the first session.  Raises as entering `open_client` does."""
        self.nursery = nursery
        assert self._first is not None
        self._first.lists_known = True  # clients may know lists from before this relay started
        session = self._first.begin(math.inf)
        await session.open()
        client = await session.client()
        # All other sessions must use the same revision, because the offer to clients depends on it.
        self._options = {**self._options, "revision": client.revision}
        return client

    def end(self) -> None:
        """Refuse further requests.  The front server may be served for longer than the relay is open."""
        self._ended = True

    # The innermost middleware.

    async def serve(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method not in _FORWARDED:
            result = await call_next(request)
            if request.method == "resources/subscribe":
                link: Any = ctx._open_link("a request")
                await self._wait_until_subscribed(link, resource_updated(request.params["uri"]))
            return result
        call = _RelayedCall(ctx)
        upstream = await self._upstream_for(call.owner, call.link)
        return await upstream.forward(call, request)

    # Choosing the session of a client.

    async def _upstream_for(self, owner: Hashable | None, link: ServerSession) -> _Upstream:
        """The session of this client, made if needed.  Raises RequestError if there are too many."""
        while not self._ended and not link.session.closed:
            room, upstream = self._room, self._upstreams.get(owner)
            if upstream is not None:
                if not upstream.session.closing:
                    return upstream
            elif not self.can_reopen and self._upstreams:  # all clients share the one open stream
                (only,) = self._upstreams.values()
                await only.share()
                return only
            elif self._shares.take(holder := None if owner is None else link.account.holder):
                return self._assign(owner, holder)
            else:
                self._make_room(holder)
            await room.wait()
        raise RequestError(INTERNAL_ERROR, "the upstream server did not answer: the relay has ended")

    def _assign(self, owner: Hashable | None, holder: Hashable | None) -> _Upstream:
        idle = self._limits.session_idle_seconds if owner is None or owner == holder else math.inf
        upstream, self._first = self._first or _Upstream(self), None
        upstream.begin(idle if self.can_reopen else math.inf)
        upstream.owner, upstream.holder, upstream.shared = owner, holder, owner is None
        self._upstreams[owner] = upstream
        return upstream

    def _make_room(self, holder: Hashable | None) -> None:
        """Close an idle session: of this holder, or if the limit is reached, of the holder with the most sessions."""
        every = self._upstreams.values()
        idle = [each for each in every if not each.session.users and not each.session.closing]
        own = [each for each in idle if holder is not None and each.holder == holder]
        if own or (self._shares.full and idle):
            most = max(self._shares.of(each.holder) for each in own or idle)
            taken = [each for each in own or idle if self._shares.of(each.holder) == most]
            min(taken, key=lambda each: each.session.last_used).session.close()
        elif not any(each.session.closing for each in every):
            why = f"{len(every)} sessions with the upstream server are in use (Limits.relayed); try again later"
            raise RequestError(INTERNAL_ERROR, why)

    def forget(self, upstream: _Upstream) -> None:
        """Remove a session that was closed."""
        if self._upstreams.get(upstream.owner) is upstream:
            del self._upstreams[upstream.owner]
            self._shares.give(upstream.holder)
        self._room.set()
        self._room = trio.Event()

    # The methods of `Watcher`, for the subscriptions of clients.

    def upstream_of(self, owner: Hashable | None) -> object:
        """The upstream session that this owner has or would get; None if there is none."""
        if not self.can_reopen and self._upstreams:
            (only,) = self._upstreams.values()
            return only
        return self._upstreams.get(owner, self._first)

    def client_disconnected(self, link: object) -> None:
        upstream = self._upstreams.get(link)
        if upstream is not None and self.can_reopen:
            upstream.session.client_disconnected()

    def listen(self, link: ServerSession, change: ChangeEvent, *, announced: bool = False) -> None:
        if self._ended:
            return
        owner = owner_of(link)
        watch = self._watches.get((owner, change))
        if watch is None:
            watch = self._watches[owner, change] = _WatchedChange()
            self.nursery.start_soon(self._watch, owner, link, change, watch, name="subscription of a relay")
        watch.listeners += 1
        if announced and not watch.settled.is_set():
            watch.announced = watch.missed = True

    def stop_listening(self, link: ServerSession, change: ChangeEvent) -> None:
        owner = owner_of(link)
        watch = self._watches.get((owner, change))
        if watch is not None:  # None: the upstream server has ended it
            watch.listeners -= 1
            if not watch.listeners:
                del self._watches[owner, change]
                watch.scope.cancel(reason="no client listens any more")

    async def _watch(
        self, owner: Hashable | None, link: ServerSession, change: ChangeEvent, watch: _WatchedChange
    ) -> None:
        pause = _SHORTEST_PAUSE
        try:
            with watch.scope:
                while await self._listen_once(owner, link, change, watch):
                    await trio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            if self._watches.get((owner, change)) is watch:
                del self._watches[owner, change]
            watch.settled.set()

    async def _listen_once(
        self, owner: Hashable | None, link: ServerSession, change: ChangeEvent, watch: _WatchedChange
    ) -> bool:
        """Listen until the upstream server ends the subscription or is lost.  Returns whether to try again.

        A client cannot be told that its subscription has ended, so only a refusal is final.
        """
        try:
            upstream = await self._upstream_for(owner, link)
            with upstream.session.used():
                await upstream.listen(change, watch)
        except McpError as error:
            _log.info("updates of a resource are not forwarded: %s", error)
            refused = isinstance(error, RequestError) and error.code != INTERNAL_ERROR
            if not watch.announced or refused or isinstance(error, SubscriptionUnsupported | UsageError):
                watch.failure = error
                return False
        watch.missed = True
        return not self._ended

    async def _wait_until_subscribed(self, link: ServerSession, change: ChangeEvent) -> None:
        """Wait until the upstream server has accepted the subscription.  Raises RequestError if it does not."""
        owner = owner_of(link)
        if (owner, change) not in self._watches:  # the server has refused or ended an earlier subscription
            self.listen(link, change)
        if (watch := self._watches.get((owner, change))) is None:
            raise RequestError(INTERNAL_ERROR, "the relay has ended")
        await watch.settled.wait()
        if isinstance(watch.failure, RequestError):
            raise watch.failure
        if watch.failure is not None:
            raise RequestError(INTERNAL_ERROR, "the upstream server did not accept the subscription to this resource")


class _Upstream:
    """One session with the upstream server, and the calls that run in it."""

    session: UpstreamSession

    def __init__(self, relay: _Relay) -> None:
        self.owner: Hashable | None = None
        self.holder: Hashable | None = None
        self.shared = False
        """Whether calls of several clients may run in it."""
        self.lists_known = False
        """Whether clients may have lists that can be out of date when the session opens."""
        self._relay = relay
        self._begun = False
        self._calls: dict[_RelayedCall, None] = {}
        self._elicitations: OrderedDict[UrlElicitationRequest, tuple[Context, ElicitUrl]] = OrderedDict()
        self._roots_given = False

    def begin(self, idle: float) -> UpstreamSession:
        """Make the session, or set its idle timeout if it exists."""
        if self._begun:
            self.session.idle = idle
        else:
            relay, can_reopen = self._relay, self._relay.can_reopen
            connect, forget = partial(relay.connect, self), partial(relay.forget, self)
            self.session = UpstreamSession(
                relay.nursery, connect, self._opened, forget, idle=idle, can_reopen=can_reopen
            )
            self._begun = True
        return self.session

    async def share(self) -> None:
        """Let other clients use the session as well."""
        if self.shared:
            return
        self.shared = True
        if self._roots_given:
            client = await self.session.client()
            await client.set_roots(self._list_roots)  # tells the server that its roots are out of date

    def options(self, asks: Collection[str], given: ClientOptions) -> ClientOptions:
        answers: dict[str, Any] = {
            "sampling": self._sample,
            "elicitation": self._elicit,
            "elicitation_url": self._visit_url,
            "roots": self._list_roots,
        }
        own: ClientOptions = {"on_log": self._logged, "on_elicitation_complete": self._elicitation_complete}
        own["log_level"] = "debug"
        own["cache"] = False  # two caches in a row would keep a result for twice its lifetime
        offered: Any = {name: answers[name] for name in asks}
        own.update(offered)
        if "sampling" in asks and "sampling" not in given:
            own["sampling_tools"] = True
        return {**own, **given}

    def _opened(self, client: Client, nursery: trio.Nursery) -> None:
        self._client = client
        nursery.start_soon(self._watch_lists, client, name="list changes of a relay")

    @property
    def _upstream_revision(self) -> Revision:
        return REVISIONS[self._client.revision]

    # Requests.

    async def forward(self, call: _RelayedCall, request: Request) -> JsonObject:
        """Send the request upstream and return its result."""
        with self.session.used():
            if request.method in _QUESTIONS:  # before the session opens, because some servers ask at once
                self._calls[call] = None
            try:
                model = await self._send_upstream(call, request)
                async with call.question_lock:
                    pass  # wait for a question that is still being asked
                while call.logs_sent is not None:  # send earlier log messages before the result
                    await call.logs_sent.wait()
            finally:
                self._calls.pop(call, None)
            return _result(model, self._upstream_revision, call.ctx._terms.revision)

    async def _send_upstream(self, call: _RelayedCall, request: Request) -> Model:
        client = await self.session.client()
        token = _current_call.set(call)
        try:
            return await self._call_upstream(client, call.ctx, request)
        except InputUnavailable as error:
            raise _error_for_client(error) from error
        except (RequestError, RemoteProtocolError):
            raise
        except (McpError, trio.TooSlowError) as error:
            # The text of the error goes to the log only, because it may contain output of the process.
            _log.warning("%s got no answer from the upstream server: %s", request.method, error)
            again = "; it has ended, and is started again with the next request" * self.session.can_replace(client)
            raise RequestError(INTERNAL_ERROR, f"the upstream server did not answer{again}") from error
        finally:
            _current_call.reset(token)

    async def _call_upstream(self, client: Client, ctx: Context, request: Request) -> Model:
        method, params = request.method, _params(request, self._upstream_revision)
        if method in _LISTS:
            page = await _LISTS[method](client, params.get("cursor"))
            self.lists_known = True
            if isinstance(page, ListToolsResult):
                self._relay.server.entries.learn(page.tools)
            return page
        meta = _end_to_end_meta(ctx.meta, self._upstream_revision)
        on_progress = ctx.progress if "progressToken" in ctx.meta else None
        if method == "tools/call":
            arguments = params.get("arguments")
            return await client.call_tool(params["name"], arguments, on_progress=on_progress, meta=meta)
        result = await client.request(method, params, on_progress=on_progress, meta=meta)
        read: Model = from_json(REQUESTS[method].result, result)
        return read

    # Questions of the upstream server.

    def _call_for_message(self, calls: Sequence[_RelayedCall]) -> _RelayedCall | str:
        """The call to which a question or log message of the upstream server belongs, or the reason why it is unknown.

        See the third table at the head of this file.
        """
        call = _current_call.get()
        # With a legacy server the context is that of the opening of the session, so it does not name the call.
        if call is not None and call in self._calls and not self._upstream_revision.handshake:
            return call
        if not calls:
            return "no call is running"
        if self.shared:
            if len({each.origin for each in self._calls}) > 1:
                return "calls of several clients are running, and the message does not name its call"
            if self._client._connection.current.ignored:
                return "a call was cancelled, and the upstream server may still work on it"
        return calls[-1]

    async def _ask(self, make: Callable[[_RelayedCall], Inquiry[Any]]) -> Any:
        calls = list(self._calls)
        call = self._call_for_message([each for each in calls if each.ctx._link is not None] or calls)
        if isinstance(call, str):
            raise _not_forwarded(call)
        async with call.question_lock:
            try:
                return (await call.ctx.ask(passed_on=make(call)))["passed_on"]
            except RequestError:
                raise
            except McpError as error:
                if not self._upstream_revision.handshake:
                    raise  # the call itself fails with it
                raise _error_for_upstream(error) from error

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
        values = getattr(answer, "value", None)
        # None for each field that the user left out: the client in front has applied the defaults that the user saw,
        # so they must not be applied again here.
        return answer if values is None else {**dict.fromkeys(asked.fields), **values}

    async def _visit_url(self, asked: UrlElicitationRequest) -> Any:
        def make(call: _RelayedCall) -> ElicitUrl:
            question = ElicitUrl(asked.message, asked.url)
            self._elicitations[asked] = call.ctx, question
            if len(self._elicitations) > _MAX_ELICITATIONS:
                self._elicitations.popitem(last=False)
            return question

        return await self._ask(make)

    async def _list_roots(self) -> list[Root]:
        if self.shared and self._upstream_revision.handshake:
            raise _not_forwarded("several clients use this session, and the server would keep the roots of one of them")
        self._roots_given = True
        return list(await self._ask(lambda call: ListRoots()))

    # Notifications of the upstream server.

    def _elicitation_complete(self, page: UrlElicitationRequest) -> None:
        if (asked := self._elicitations.pop(page, None)) is not None:
            self._relay.nursery.start_soon(self._report_complete, *asked, name="elicitation/complete of a relay")

    async def _report_complete(self, ctx: Context, question: ElicitUrl) -> None:
        try:
            await ctx.completed(question)
        except McpError as error:
            _log.info("the completion of a URL elicitation could not be forwarded: %s", error)

    def _logged(self, message: LoggingMessageParams) -> None:
        call = self._call_for_message(list(self._calls))
        if isinstance(call, str):
            level = logging.DEBUG if call in self._relay.warned else logging.WARNING
            self._relay.warned.add(call)
            _log.log(level, "log messages of the upstream server are dropped: %s", call)
            return
        call.logs.append(message)
        if call.logs_sent is None:
            call.logs_sent = trio.Event()
            self._relay.nursery.start_soon(self._send_logs, call, call.logs_sent, name="log messages of a relay")

    async def _send_logs(self, call: _RelayedCall, sent: trio.Event) -> None:
        try:
            while call.logs:
                each = call.logs.popleft()
                await call.ctx.log(each.level, each.data, logger=each.logger)
        except McpError as error:
            _log.info("a log message could not be forwarded: %s", error)
        finally:
            call.logs_sent = None
            sent.set()

    async def _watch_lists(self, client: Client) -> None:
        names = {ChangeKind.TOOLS: "tools", ChangeKind.PROMPTS: "prompts", ChangeKind.RESOURCES: "resources"}
        changes = [ChangeEvent(kind) for kind in names if kind.declared_in(client.capabilities)]
        if not changes:
            return
        try:
            async with client.listen(*changes) as subscription:
                for change in changes if self.lists_known else ():
                    self._publish_change(change)
                self.lists_known = True
                async for change in subscription:
                    self._publish_change(change)
        except McpError as error:
            _log.warning("changes of lists are not forwarded any more: %s", error)

    def _publish_change(self, change: ChangeEvent) -> None:
        self._relay.server._publish(change, self._reaches)

    def _reaches(self, link: Any) -> bool:
        """Whether a connection belongs to a client of this session."""
        return self._relay.upstream_of(owner_of(link)) is self

    async def listen(self, change: ChangeEvent, watch: _WatchedChange) -> None:
        """Forward the changes, in this opening of the session and in later ones.

        Returns when the upstream server ends the subscription properly.  Raises as `Client.listen` does if the
        subscription cannot begin, or if it fails while the session continues.
        """
        client = await self.session.client()
        while True:
            try:
                if change.kind is ChangeKind.RESOURCE:
                    async with client.listen(change) as subscription:
                        if watch.missed:
                            watch.missed = False
                            self._publish_change(change)
                        watch.announced = True
                        watch.settled.set()
                        async for each in subscription:
                            self._publish_change(each)
                else:  # `_watch_lists` forwards list changes
                    watch.settled.set()
                    await client._connection.gone.wait()
            except McpError:
                if not (watch.settled.is_set() and self.session.can_replace(client)):
                    raise
            if not self.session.can_replace(client):
                return
            client = await self.session.next_client(client)
            if change.kind is ChangeKind.RESOURCE:
                watch.missed = True
            else:
                self._publish_change(change)


def _not_forwarded(why: str) -> RequestError:
    return RequestError(INTERNAL_ERROR, f"the question was not forwarded: {why}")


# Translation between the two hops.


def _params(request: Request, revision: Revision) -> JsonObject:
    params = {name: value for name, value in request.params.items() if name not in _PER_HOP}
    try:
        read: Model = from_json(REQUESTS[request.method].params, params)
    except RemoteProtocolError as error:
        raise RequestError(INVALID_PARAMS, str(error)) from None
    return to_json(read, revision)


def _result(model: Model, upstream_revision: Revision, revision: Revision) -> JsonObject:
    raw = model.raw
    result = dict(raw) if upstream_revision is revision and raw is not None else to_json(model, revision)
    meta = _end_to_end_meta(result.pop("_meta", None) or {}, revision)
    return {**result, "_meta": meta} if meta else result


def _end_to_end_meta(meta: Mapping[str, Json], revision: Revision) -> JsonObject:
    return {key: value for key, value in meta.items() if _is_end_to_end(key, value, revision)}


def _is_end_to_end(key: str, value: Json, revision: Revision) -> bool:
    """Whether a `_meta` key is not reserved for one hop.  Revisions reserve different keys, so two are checked."""
    try:
        check_meta({key: value}, LATEST)
        check_meta({key: value}, revision)
    except UsageError:
        return False
    return True


def _error_for_client(error: InputUnavailable) -> McpError:
    """The error for a client that did not answer a question, or could not be asked."""
    why = error.__cause__
    if isinstance(why, NotDeclared | NotInThisRevision | RequestError):
        return why
    return RequestError(INTERNAL_ERROR, f"a question of the upstream server could not be forwarded: {why or error}")


def _error_for_upstream(error: McpError) -> RequestError:
    """The error for the upstream server if the client cannot be asked."""
    if isinstance(error, NotDeclared):  # the error that the client itself would send
        return RequestError(METHOD_NOT_FOUND if len(error.capability) == 1 else INVALID_PARAMS, str(error))
    return RequestError(INTERNAL_ERROR, f"the question was not forwarded, or not answered: {error}")
