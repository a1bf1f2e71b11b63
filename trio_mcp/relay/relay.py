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
| requests and notifications that the protocol does not have | the same, unchanged |
| calls that become tasks, and requests about them | tasks in the client's form, see `relay.tasks` |
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
revision.  Only the messages of a task name their task.  For the others:

| Running calls in the session | Questions | Log messages |
|---|---|---|
| none | refused | dropped |
| of one client | asked in its newest call | sent in its newest call |
| of one client, in a shared session | the same, except that roots are refused | the same |
| of several clients, or a call was cancelled and not answered | refused | dropped, with one warning |

A cancelled call counts until the server answers it anyway, or for five minutes, because the server may still work on
it.  Roots are refused in a shared session, because a server keeps them for later calls.  A 2026-07-28 call whose client
was asked and has not answered yet is ignored if the same client has other calls.  So is a call that asks for a task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import urlsplit

import attrs
import trio

from trio_mcp.client.client import Client, ClientOptions
from trio_mcp.client.connecting import Target
from trio_mcp.client.subscriptions import SubscriptionUnsupported
from trio_mcp.core.content import MalformedContent, well_formed
from trio_mcp.core.errors import INTERNAL_ERROR, McpError, RequestError, UsageError, shown
from trio_mcp.core.extensions import Extension, Extensions
from trio_mcp.core.http.fields import Mirror, find_mirrors
from trio_mcp.core.messages import Id, JsonObject, Limits, Request
from trio_mcp.core.models import Tool
from trio_mcp.core.revisions import REVISIONS, Revision, Role, in_protocol
from trio_mcp.core.session import Offer
from trio_mcp.core.shares import Shares
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind, Listeners, resource_updated
from trio_mcp.relay.upstream import FORWARDED, RelayedCall, Upstream, WatchedChange, owner_of
from trio_mcp.server.context import Context
from trio_mcp.server.entries import Entry
from trio_mcp.server.publishing import ListenerKey
from trio_mcp.server.registry import CAPABILITIES, Catalog
from trio_mcp.server.server import Server, check_names
from trio_mcp.transport.nursery import Block, check_trio, open_nursery

if TYPE_CHECKING:
    from trio_mcp.relay.tasks import RelayTasks
    from trio_mcp.server.dispatch import CallNext, Middleware
    from trio_mcp.server.session import ServerSession

__all__ = ["ASKS", "Relay", "open_relay"]

_log = logging.getLogger("trio_mcp.relay")

ASKS = ("sampling", "elicitation", "elicitation_url", "roots")
"""The questions that the upstream server may ask."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds from the end of a subscription to the next attempt
_TASKS = "io.modelcontextprotocol/tasks"  # what it adds is loaded when the upstream server declares it
_TOOLS = 10_000  # tools whose header rules are remembered, as in the client


def open_relay(
    target: Target,
    *,
    asks: Collection[str] = ASKS,
    middleware: Sequence[Middleware] = (),
    revisions: Collection[str] = tuple(REVISIONS),
    state_keys: Sequence[bytes] | None = None,
    **options: Unpack[ClientOptions],
) -> AbstractAsyncContextManager[Server]:
    """Open a relay: ``async with open_relay(target) as server`` gives a `Server` that presents the one at `target`.

    Inside the block, serve it like any other server, also in several ways at once, or mount it in another server.  Each
    client gets its own session with the upstream server, and for a command its own process.

    `revisions` are the protocol revisions that the relay offers to clients, and `middleware` handles their requests
    first.  The other options are those of `open_client`, and the exceptions too, at the call and on entering the block.
    `log_level` is "debug" by default, and `cache` is False, because clients have their own caches.  `tasks` is True:
    tasks are carried in both forms; with False the relay declares none.

    `state_keys` are keys as those of `Server`: at least 32 random bytes each.  With keys that stay the same, principals
    find their tasks also after a restart of the relay.  Without principals no keys are needed for that.

    `asks` are the kinds of questions that the relay declares to the upstream server: it must do so before it knows a
    client.  If a client does not support a question, the upstream server gets the error that the client would send.  A
    callback among the options answers instead of the clients.

    If a process dies or a connection ends, its running calls fail, and the next request opens it again.  A target that
    is a stream cannot be opened again: then all later requests fail.
    """
    check_names("asks", asks, ASKS)
    check_names("revisions", revisions, REVISIONS, "revision")
    relay = Relay(target, asks, middleware, revisions, options, state_keys)
    return Block(relay.open, "async with open_relay(...) as server")


class Relay:
    """All sessions with the upstream server.  Chooses the session for each request."""

    nursery: trio.Nursery
    revision: Revision
    """The revision of all sessions: that of the first one, because the offer to clients depends on it."""
    tasks: RelayTasks | None = None
    """The tasks of the upstream server, if its tools can run as tasks."""

    def __init__(
        self,
        target: Target,
        asks: Collection[str],
        middleware: Sequence[Middleware],
        revisions: Collection[str],
        options: ClientOptions,
        state_keys: Sequence[bytes] | None = None,
        *,
        lists_change: bool = False,
    ) -> None:
        self.target = target
        self.asks = asks
        self.options = options
        self.can_reopen = not isinstance(target, trio.abc.Stream)
        """Whether the target can be opened more than once."""
        self.lists_change = lists_change
        """Whether `reopen` may change lists of which the upstream server does not declare changes."""
        self.warned: set[str] = set()  # the reasons for dropped log messages that were logged as warnings
        self.catalog = RelayCatalog((*middleware, self._serve))
        self._revisions = revisions
        self._limits = options.get("limits") or Limits()
        self._first: Upstream | None = Upstream(self)  # until a client uses it
        self._upstreams: dict[Hashable | None, Upstream] = {}
        self._shares = Shares(self._limits.relayed)
        self._room = trio.Event()  # set when a session was closed
        self._opened = trio.Event()  # set when a session was opened
        self._watches: dict[tuple[Hashable | None, ChangeEvent], WatchedChange] = {}
        self.state_keys = state_keys
        self.carries_tasks = bool(options.get("tasks", True))
        self.ended = False
        self._first.connect()  # raises for an invalid target or option

    async def open(self, stack: AsyncExitStack) -> Server:
        """Open the first session with the upstream server, until the end of the stack."""
        check_trio()
        assert self._first is not None
        self.nursery = await stack.enter_async_context(open_nursery())
        self._first.lists_known = True  # clients may know lists from before this relay started
        client = await self._first.open()
        self.revision = REVISIONS[client.revision]
        self.options = {**self.options, "revision": client.revision}
        self._server = RelayServer(self, client, self._revisions, self._limits)
        if _TASKS in client.extensions or "tasks" in client.capabilities:
            self._add_tasks(client)
        stack.callback(self._end)
        return self._server

    def _add_tasks(self, client: Client) -> None:
        from trio_mcp.relay.tasks import RelayTasks, form_of

        form = form_of(client) if self.carries_tasks else None
        if form is not None:
            self.tasks = RelayTasks(self, self._server, form, self._place(client), client.capabilities)

    def _place(self, client: Client) -> str:
        """A text that tells this upstream server from others, also in another process.

        It leaves out all that may be secret: a query, and the arguments of a program.
        """
        where: Any = None
        if isinstance(self.target, str):
            where = urlsplit(self.target)._replace(netloc=urlsplit(self.target).netloc.rpartition("@")[2], query="")
        elif isinstance(self.target, Sequence):
            where = self.target[:2]  # the program, and perhaps a script
        return repr([client.server.get("name"), where])

    def _end(self) -> None:
        self.ended = True  # the front server may be served for longer, and refuses further requests

    async def reopen(self) -> None:
        """End all sessions and open them again at once, because the program at `target` has changed.

        Running calls fail, and clients are told that the lists may have changed.  Raises RequestError if the program
        does not start.
        """
        for upstream in (*([] if self._first is None else [self._first]), *self._upstreams.values()):
            if upstream in (self._first, self._upstreams.get(upstream.owner)):  # its client may have gone meanwhile
                await upstream.reopen()

    def publish(self, change: ChangeEvent, reaches: Callable[[Any], bool]) -> None:
        """Notify the clients on the links for which `reaches` returns True."""
        self._server._publish(change, reaches)

    # The innermost middleware.

    async def _serve(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        if request.method not in FORWARDED and in_protocol(request.method):
            result = await call_next(request)
            if request.method == "resources/subscribe":
                link: Any = ctx._open_link("a request")
                await self._wait_until_subscribed(link, resource_updated(request.params["uri"]))
            return result
        if request.method.startswith("tasks/") and self.tasks is not None:
            return await call_next(request)
        call = RelayedCall(ctx)
        upstream = await self.upstream_for(call.owner, call.link)
        if call.notifies:
            return await upstream.forward_notification(request)
        result = await upstream.forward(call, request)
        return self.tasks.listed(result, ctx) if request.method == "tools/list" and self.tasks is not None else result

    # Choosing the session of a client.

    async def upstream_for(self, owner: Hashable | None, link: ServerSession | None) -> Upstream:
        """The session of this client, made if needed.  Raises RequestError if there are too many.

        Without a link the owner is a principal, or None.
        """
        while not self.ended and not (link is not None and link.session.closed):
            room, upstream = self._room, self._upstreams.get(owner)
            if upstream is not None:
                if not upstream.closing:
                    return upstream
            elif not self.can_reopen and self._upstreams:  # all clients share the one open stream
                (only,) = self._upstreams.values()
                await only.share()
                return only
            elif self._shares.take(holder := None if owner is None else owner if link is None else link.account.holder):
                return self._assign(owner, holder)
            else:
                self._make_room(holder)
            await room.wait()
        raise RequestError(INTERNAL_ERROR, "the upstream server did not answer: the relay has ended")

    def _assign(self, owner: Hashable | None, holder: Hashable | None) -> Upstream:
        upstream, self._first = self._first or Upstream(self), None
        if self.can_reopen and (owner is None or owner == holder):
            upstream.idle = self._limits.session_idle_seconds
        upstream.owner, upstream.holder, upstream.shared = owner, holder, owner is None
        upstream.last_used = trio.current_time()
        self._upstreams[owner] = upstream
        return upstream

    def _make_room(self, holder: Hashable | None) -> None:
        """Close an idle session: of this holder, or if the limit is reached, of the holder with the most sessions."""
        every = self._upstreams.values()
        idle = [each for each in every if not each.users and not each.closing]
        own = [each for each in idle if holder is not None and each.holder == holder]
        if own or (self._shares.full and idle):
            most = max(self._shares.of(each.holder) for each in own or idle)
            taken = [each for each in own or idle if self._shares.of(each.holder) == most]
            min(taken, key=lambda each: each.last_used).close()
        elif not any(each.closing for each in every):
            why = f"{len(every)} sessions with the upstream server are in use (Limits.relayed); try again later"
            raise RequestError(INTERNAL_ERROR, why)

    def forget(self, upstream: Upstream) -> None:
        """Remove a session that was closed."""
        if self._upstreams.get(upstream.owner) is upstream:
            del self._upstreams[upstream.owner]
            self._shares.give(upstream.holder)
        self._room.set()
        self._room = trio.Event()

    def session_opened(self) -> None:
        """A request has opened a session: subscriptions need not wait longer."""
        self._opened.set()
        self._opened = trio.Event()

    # Subscriptions of clients.

    def listeners(self, limits: Limits, catalog: Catalog, watchers: Sequence[Relay]) -> Listeners[ListenerKey]:
        """Make the listeners of a run, with the relays that are served or mounted there."""
        return _RelayListeners(limits, catalog, watchers)

    def upstream_of(self, owner: Hashable | None) -> object:
        """The upstream session that this owner has or would get; None if there is none."""
        if not self.can_reopen and self._upstreams:
            (only,) = self._upstreams.values()
            return only
        return self._upstreams.get(owner, self._first)

    def client_disconnected(self, link: object) -> None:
        """This connection or session has ended."""
        upstream = self._upstreams.get(link)
        if upstream is not None and self.can_reopen:
            upstream.client_disconnected()

    def listen(self, link: Any, change: ChangeEvent, *, announced: bool = False) -> None:
        """A client has subscribed to this change.  `announced`: its subscription is acknowledged already."""
        if self.ended:
            return
        owner = owner_of(link)
        watch = self._watches.get((owner, change))
        if watch is None:
            watch = self._watches[owner, change] = WatchedChange()
            self.nursery.start_soon(self._watch, owner, link, change, watch, name="subscription of a relay")
        watch.listeners += 1
        if announced and not watch.settled.is_set():
            watch.announced = watch.missed = True

    def stop_listening(self, link: Any, change: ChangeEvent) -> None:
        """A client has ended its subscription to this change."""
        owner = owner_of(link)
        watch = self._watches.get((owner, change))
        if watch is not None:  # None: the upstream server has ended it
            watch.listeners -= 1
            if not watch.listeners:
                del self._watches[owner, change]
                watch.scope.cancel(reason="no client listens any more")

    async def _watch(
        self, owner: Hashable | None, link: ServerSession, change: ChangeEvent, watch: WatchedChange
    ) -> None:
        """Listen for as long as clients do, also after the upstream server has ended the subscription or was lost.

        A request opens a lost session again.  If no request comes, this task does, after pauses that grow, and that
        begin anew after a subscription that was longer than the longest pause.  A client cannot be told that its
        subscription has ended, so only a refusal is final.
        """
        pause = _SHORTEST_PAUSE
        try:
            with watch.scope:
                while True:
                    began = trio.current_time()
                    try:
                        upstream = await self.upstream_for(owner, link)
                        with upstream.used():
                            await upstream.listen(change, watch)
                    except McpError as error:
                        _log.info("updates of a resource are not forwarded: %s", error)
                        refused = isinstance(error, RequestError) and error.code != INTERNAL_ERROR
                        if not watch.announced or refused or isinstance(error, SubscriptionUnsupported | UsageError):
                            watch.failure = error
                            return
                    watch.missed = True
                    if self.ended:
                        return
                    if trio.current_time() > began + _LONGEST_PAUSE:
                        pause = _SHORTEST_PAUSE
                    with trio.move_on_after(pause):
                        await self._opened.wait()
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            if self._watches.get((owner, change)) is watch:
                del self._watches[owner, change]
            watch.settled.set()

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


class RelayServer(Server):
    """A server with the identity and capabilities of the server of `client`, and no features of its own."""

    def __init__(self, relay: Relay, client: Client, revisions: Collection[str], limits: Limits) -> None:
        info = client.server  # it proves nothing (meta-14), and may be incomplete
        named = info.get("name") and all(isinstance(info.get(key), str) for key in ("name", "version"))
        info = info if named else {"name": "relay", "version": "0"}
        capabilities: dict[str, Any] = {"logging": {}}  # log messages of the upstream server are forwarded
        for name in CAPABILITIES:
            if isinstance(declared := client.capabilities.get(name), Mapping):
                capabilities[name] = {key: True for key in ("listChanged", "subscribe") if declared.get(key) is True}
                if relay.lists_change and "listChanged" in CAPABILITIES[name]:
                    capabilities[name]["listChanged"] = True
        if "completions" not in REVISIONS[client.revision].capabilities[Role.SERVER]:  # it does not declare them
            capabilities["completions"] = {}
        offered = [REVISIONS[name] for name in revisions]
        # An extension is agreed only if the relay was given it, because it declares it to the upstream server.
        given = {id: each for id, each in client.extensions.items() if id != _TASKS or not relay.carries_tasks}
        self._passed_on = [Extension(id, settings) for id, settings in given.items()]
        self._relay_offer = Offer(info, capabilities, offered, client.instructions)
        options: Any = {} if relay.state_keys is None else {"state_keys": relay.state_keys}
        super().__init__(
            info["name"], middleware=relay.catalog.middleware, limits=limits, revisions=revisions, **options
        )
        self._catalog, self._watcher = relay.catalog, relay
        self._catalog.kinds |= capabilities.keys() & CAPABILITIES.keys()

    def _current_offer(self) -> Offer:
        ours = () if self._catalog.extended is None else self._catalog.extended.values()
        return attrs.evolve(self._relay_offer, extensions=Extensions([*self._passed_on, *ours], fallback=True))


class RelayCatalog(Catalog):
    """An empty catalog that remembers the header rules of listed tools.

    Over HTTP, arguments that a rule mirrors in a header must equal the header (http-93).
    """

    remote = True

    def __init__(self, middleware: Sequence[Middleware]) -> None:
        super().__init__(middleware)
        self._mirrored: dict[str, Sequence[Mirror]] = {}

    def mirrors(self, tool: str) -> Sequence[Mirror]:
        return self._mirrored.get(tool, ())

    def add(self, entry: Entry) -> None:
        raise _read_only()

    def add_completer(self, completer: Entry, ref: str | None = None, argument: str | None = None) -> None:
        raise _read_only()

    def mount(self, other: Catalog, prefix: str = "") -> None:
        raise _read_only()

    def learn(self, tools: Sequence[Tool | MalformedContent]) -> None:
        """Remember the header rules of listed tools.  Their schemas are not compiled: that may take minutes."""
        for tool in well_formed(tools):
            self._mirrored.pop(tool.name, None)
            found = find_mirrors(tool.input_schema)
            if found.faults and found.rules:
                faults = "; ".join(found.faults)
                _log.info("the headers of calls of the tool %s are not checked: %s", shown(tool.name), faults)
            elif found.rules and len(self._mirrored) < _TOOLS:
                self._mirrored[tool.name] = found.rules


def _read_only() -> UsageError:
    return UsageError("a relay only has the features of its upstream server; add features there, or to another server")


class _RelayListeners(Listeners[ListenerKey]):
    """Listeners whose subscriptions are reported to relays, except those to resources of our own."""

    def __init__(self, limits: Limits, catalog: Catalog, relays: Sequence[Relay]) -> None:
        super().__init__(limits)
        self._catalog = catalog
        self._relays = relays

    def forget(self, key: ListenerKey) -> bool:
        known = super().forget(key)
        for relay in self._relays if key.id is None else ():
            relay.client_disconnected(key.link)
        return known

    def _index(self, key: ListenerKey, id: Id | None, change: ChangeEvent) -> None:
        super()._index(key, id, change)
        for relay in self._concerned(id, change):
            # A listen request, which has an id, is acknowledged at once.
            relay.listen(key.link, change, announced=id is not None)

    def _unindex(self, key: ListenerKey, change: ChangeEvent) -> None:
        super()._unindex(key, change)
        for relay in self._concerned(key.id, change):
            relay.stop_listening(key.link, change)

    def _concerned(self, id: Id | None, change: ChangeEvent) -> Sequence[Relay]:
        if change.kind is ChangeKind.RESOURCE:
            return self._relays if self._catalog.find_resource(change.item) is None else ()
        return () if id is None else self._relays  # a legacy session gets changes of lists without asking
