"""The front server of a relay: it has the identity and capabilities of the upstream server, and no features of its own.

A middleware of the relay handles the requests and sends them upstream.  This module owns the parts that no middleware
sees: identity, subscriptions, and the rules for arguments that are mirrored in HTTP headers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from trio_mcp.client.client import Client
from trio_mcp.core.content import MalformedContent, well_formed
from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import find_mirrors
from trio_mcp.core.messages import Id, JsonObject, Limits, Notification
from trio_mcp.core.models import Tool
from trio_mcp.core.revisions import REVISIONS, Role
from trio_mcp.core.session import Offer
from trio_mcp.core.shares import holder_of
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind, Listeners
from trio_mcp.server.catalog import Catalog
from trio_mcp.server.context import Context
from trio_mcp.server.description import revisions_of
from trio_mcp.server.publishing import ListenerKey
from trio_mcp.server.registration import raw_tool
from trio_mcp.server.server import Server

if TYPE_CHECKING:
    from trio_mcp.server.dispatch import Middleware
    from trio_mcp.server.entries import Completer, Entry, ToolEntry
    from trio_mcp.server.run import Run

__all__ = ["ChangeFor", "RelayServer", "Subscriber", "owner_of"]

_log = logging.getLogger("trio_mcp.relay")

_TOOLS = 10_000  # tools whose header rules are remembered, as in the client
_PRINCIPAL = holder_of("", None)


def owner_of(link: Any) -> Hashable | None:
    """The owner of the upstream session that a request on `link` uses: see the second table in `relay`.

    `link` is a connection, a session, or a single request.  Returns the holder of a principal, the link of a client
    without one, or None for a single request without a principal.
    """
    holder = link.account.holder
    if isinstance(holder, str) and holder.startswith(str(_PRINCIPAL)):
        return holder
    return None if link.alone else link


@attrs.frozen
class ChangeFor(ChangeEvent):
    """A change for the clients of one upstream session."""

    session: object = None


class Subscriber(Protocol):
    """The relay, as the receiver of its clients' subscriptions: it subscribes to the same changes upstream."""

    def listen(self, link: Any, change: ChangeEvent, *, announced: bool = False) -> None:
        """A client has subscribed to this change.  `announced`: its subscription is acknowledged already."""

    def stop_listening(self, link: Any, change: ChangeEvent) -> None:
        """A client has ended its subscription to this change."""

    def upstream_of(self, owner: Hashable | None) -> object:
        """The upstream session that this owner has or would get; None if there is none."""

    def client_disconnected(self, link: object) -> None:
        """This connection or session has ended."""


class RelayServer(Server):
    """A server that presents the server of `client`.  The last of `middleware` sends requests upstream."""

    def __init__(
        self,
        subscriber: Subscriber,
        client: Client,
        middleware: Sequence[Middleware],
        revisions: Collection[str],
        limits: Limits | None,
    ) -> None:
        self._subscriber = subscriber
        capabilities, supported = _capabilities(client), tuple(revisions_of(revisions))
        self._relay_offer = Offer(_info(client), capabilities, supported, client.instructions)
        super().__init__(self._relay_offer.info["name"], middleware=middleware, limits=limits, revisions=revisions)
        self._features.catalog = self.mirrored = _RelayCatalog()

    def _current_offer(self) -> Offer:
        return self._relay_offer

    def publish_change(self, change: ChangeFor) -> None:
        self._publish(change)

    def running(self) -> AbstractAsyncContextManager[object]:
        return _AttachedRun(super().running(), self._subscriber)

    def _joined(self) -> AbstractAsyncContextManager[Run]:
        return _AttachedRun(super()._joined(), self._subscriber)


def _info(client: Client) -> Mapping[str, Any]:
    """The upstream server's identity, or a default if it is incomplete.  It proves nothing (meta-14)."""
    info = client.server
    named = info.get("name") and all(isinstance(info.get(key), str) for key in ("name", "version"))
    return info if named else {"name": "relay", "version": "0"}


def _capabilities(client: Client) -> JsonObject:
    capabilities: JsonObject = {"logging": {}}  # log messages of the upstream server are forwarded
    for name in ("tools", "prompts", "resources", "completions"):
        declared = client.capabilities.get(name)
        if isinstance(declared, Mapping):
            capabilities[name] = {key: True for key in ("listChanged", "subscribe") if declared.get(key) is True}
    if "completions" not in REVISIONS[client.revision].capabilities[Role.SERVER]:  # that revision does not declare it
        capabilities["completions"] = {}
    return capabilities


class _RelayCatalog(Catalog):
    """An empty catalog that remembers the header rules of listed tools.

    Over HTTP, arguments that a rule mirrors in a header must equal the header (http-93).
    """

    def __init__(self) -> None:
        super().__init__()
        self._mirrored: dict[str, ToolEntry] = {}

    def tool(self, name: str) -> ToolEntry | None:
        return self._mirrored.get(name)

    def add(self, entry: Entry) -> None:
        raise _read_only()

    def add_completer(self, completer: Completer, ref: str | None = None, argument: str | None = None) -> None:
        raise _read_only()

    def mount(self, other: Catalog, prefix: str = "") -> None:
        raise _read_only()

    def check_mounting(self) -> None:
        raise UsageError("a relay cannot be mounted in another server; serve it on its own")

    def learn(self, tools: Sequence[Tool | MalformedContent]) -> None:
        for tool in well_formed(tools):
            self._mirrored.pop(tool.name, None)
            found = find_mirrors(tool.input_schema)
            if not found.rules or len(self._mirrored) == _TOOLS:
                continue
            try:
                if found.faults:
                    raise UsageError("; ".join(found.faults))
                # The schemas are not compiled: the upstream server validates arguments and results, and compiling all
                # schemas of one page of tools may take minutes.
                known = attrs.evolve(tool, input_schema={"type": "object"}, output_schema=None)
                entry = self._mirrored[tool.name] = raw_tool(known, _unreachable)
                entry.mirrors = found.rules
            except UsageError as error:
                _log.info("the headers of calls of the tool %s are not checked: %s", shown(tool.name), error)


def _read_only() -> UsageError:
    return UsageError("a relay only has the features of its upstream server; add features there, or to another server")


async def _unreachable(ctx: Context, arguments: JsonObject) -> None:
    raise AssertionError("the middleware of the relay handles all calls")


class _AttachedRun(AbstractAsyncContextManager[Any]):
    """A run of the front server, with its subscriptions reported to the relay."""

    def __init__(self, run: AbstractAsyncContextManager[Any], subscriber: Subscriber) -> None:
        self._run = run
        self._subscriber = subscriber

    async def __aenter__(self) -> Any:
        run = await self._run.__aenter__()
        if not isinstance(run.publisher.listeners, _RelayListeners):  # a shared run may have them already
            run.publisher.listeners = _RelayListeners(run.limits, self._subscriber)
        return run

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._run.__aexit__(kind, error, traceback)


class _RelayListeners(Listeners[ListenerKey]):
    """The clients' subscriptions, reported to the relay.  A change only reaches the clients of its upstream session."""

    def __init__(self, limits: Limits, subscriber: Subscriber) -> None:
        super().__init__(limits)
        self._subscriber = subscriber

    def publish(self, change: ChangeEvent) -> list[tuple[ListenerKey, Notification]]:
        if not isinstance(change, ChangeFor):
            return super().publish(change)
        notifications, upstream_of = (
            super().publish(ChangeEvent(change.kind, change.item)),
            self._subscriber.upstream_of,
        )
        return [each for each in notifications if upstream_of(owner_of(each[0].link)) is change.session]

    def forget(self, key: ListenerKey) -> bool:
        known = super().forget(key)
        if key.id is None:
            self._subscriber.client_disconnected(key.link)
        return known

    def _index(self, key: ListenerKey, id: Id | None, change: ChangeEvent) -> None:
        super()._index(key, id, change)
        if _was_requested(id, change):
            # A listen request, which has an id, is acknowledged at once.
            self._subscriber.listen(key.link, change, announced=id is not None)

    def _unindex(self, key: ListenerKey, change: ChangeEvent) -> None:
        super()._unindex(key, change)
        if _was_requested(key.id, change):
            self._subscriber.stop_listening(key.link, change)


def _was_requested(id: Id | None, change: ChangeEvent) -> bool:
    """Whether a client has asked for it.  False for list changes in a legacy session, which gets them unasked."""
    return id is not None or change.kind is ChangeKind.RESOURCE
