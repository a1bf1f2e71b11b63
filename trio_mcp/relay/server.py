"""The server that a relay shows: it says of itself what the one behind says, and has nothing of its own.

Requests go to a middleware of the relay, which makes them again.  Here is the rest, which no middleware sees: identity,
subscriptions, and the arguments of calls that are repeated in headers.
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
from trio_mcp.core.jsonrpc import Id, JsonObject, Limits, Notification
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

_TOOLS = 10_000  # whose arguments in headers are known, as in `tool_book`
_PRINCIPAL = holder_of("", None)


def owner_of(link: Any) -> Hashable | None:
    """For whom there is one session with the server behind: see the table in `relay`.

    `link` is a connection, a session, or a request that has neither.
    """
    holder = link.account.holder
    if isinstance(holder, str) and holder.startswith(str(_PRINCIPAL)):
        return holder
    return None if link.alone else link


@attrs.frozen
class ChangeFor(ChangeEvent):
    """A change for clients of one session with the server behind."""

    session: object = None


class Subscriber(Protocol):
    """The relay, which subscribes to what clients subscribe to."""

    def listen(self, link: Any, change: ChangeEvent, *, told: bool = False) -> None:
        """A client has begun to listen to this change."""

    def unhear(self, link: Any, change: ChangeEvent) -> None:
        """It does not any more."""

    def session_of(self, owner: Hashable | None) -> object:
        """The session with the server behind that it has, or may get; None if there is none."""

    def left(self, link: object) -> None:
        """This connection or session has ended."""


class RelayServer(Server):
    """A server that stands for that of `client`.  `middleware` takes every request that is not its own business."""

    def __init__(
        self,
        listener: Subscriber,
        client: Client,
        middleware: Sequence[Middleware],
        revisions: Collection[str],
        limits: Limits | None,
    ) -> None:
        self._listener = listener
        self._said = Offer(_info(client), _capabilities(client), tuple(revisions_of(revisions)), client.instructions)
        super().__init__(self._said.info["name"], middleware=middleware, limits=limits, revisions=revisions)
        self.catalog = self.mirrored = _RelayCatalog()

    def offer(self) -> Offer:
        return self._said

    def tell(self, change: ChangeFor) -> None:
        self._publish(change)

    def running(self) -> AbstractAsyncContextManager[object]:
        return _AttachedRun(super().running(), self._listener)

    def joined(self) -> AbstractAsyncContextManager[Run]:
        return _AttachedRun(super().joined(), self._listener)


def _info(client: Client) -> Mapping[str, Any]:
    """meta-14: proof of nothing, also here."""
    info = client.server
    named = info.get("name") and all(isinstance(info.get(key), str) for key in ("name", "version"))
    return info if named else {"name": "relay", "version": "0"}


def _capabilities(client: Client) -> JsonObject:
    said: JsonObject = {"logging": {}}  # clients are given the messages that come
    for name in ("tools", "prompts", "resources", "completions"):
        declared = client.capabilities.get(name)
        if isinstance(declared, Mapping):
            said[name] = {key: True for key in ("listChanged", "subscribe") if declared.get(key) is True}
    if "completions" not in REVISIONS[client.revision].capabilities[Role.SERVER]:  # there it goes without saying
        said["completions"] = {}
    return said


class _RelayCatalog(Catalog):
    """Has nothing, and knows of tools that were listed which of their arguments are repeated in headers: over HTTP
    these have to be the same (http-93)."""

    def __init__(self) -> None:
        super().__init__()
        self._mirrored: dict[str, ToolEntry] = {}

    def tool(self, name: str) -> ToolEntry | None:
        return self._mirrored.get(name)

    def add(self, entry: Entry) -> None:
        raise _not_here()

    def add_completer(self, completer: Completer, ref: str | None = None, argument: str | None = None) -> None:
        raise _not_here()

    def mount(self, other: Catalog, prefix: str = "") -> None:
        raise _not_here()

    def check_mounting(self) -> None:
        raise UsageError("a relay shows another server as a whole, and cannot be a part of one; serve it alone")

    def learn(self, tools: Sequence[Tool | MalformedContent]) -> None:
        for tool in well_formed(tools):
            self._mirrored.pop(tool.name, None)
            found = find_mirrors(tool.input_schema)
            if not found.rules or len(self._mirrored) == _TOOLS:
                continue
            try:
                if found.faults:
                    raise UsageError("; ".join(found.faults))
                # Its schemas are not compiled: the server behind judges arguments and results, and one page of its
                # tools may hold so many schemas that it takes minutes.
                known = attrs.evolve(tool, input_schema={"type": "object"}, output_schema=None)
                entry = self._mirrored[tool.name] = raw_tool(known, _never_called)
                entry.mirrors = found.rules
            except UsageError as error:
                _log.info("the headers of calls of %s are not looked at: %s", shown(tool.name), error)


def _not_here() -> UsageError:
    return UsageError("a relay shows what the server behind it has; add more there, or in a server of your own")


async def _never_called(ctx: Context, arguments: JsonObject) -> None:
    raise AssertionError("the middleware is before it")


class _AttachedRun(AbstractAsyncContextManager[Any]):
    """A run of the server, and the relay hears what its clients listen to."""

    def __init__(self, run: AbstractAsyncContextManager[Any], listener: Subscriber) -> None:
        self._run = run
        self._listener = listener

    async def __aenter__(self) -> Any:
        run = await self._run.__aenter__()
        if not isinstance(run.publisher.listeners, _RelayListeners):  # it may be shared
            run.publisher.listeners = _RelayListeners(run.limits, self._listener)
        return run

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._run.__aexit__(kind, error, traceback)


class _RelayListeners(Listeners[ListenerKey]):
    """Subscriptions, which the relay hears of; each is told of changes in its own session with the server behind."""

    def __init__(self, limits: Limits, listener: Subscriber) -> None:
        super().__init__(limits)
        self._listener = listener

    def publish(self, change: ChangeEvent) -> list[tuple[ListenerKey, Notification]]:
        if not isinstance(change, ChangeFor):
            return super().publish(change)
        told = super().publish(ChangeEvent(change.kind, change.item))
        return [each for each in told if self._listener.session_of(owner_of(each[0].link)) is change.session]

    def forget(self, key: ListenerKey) -> bool:
        known = super().forget(key)
        if key.id is None:
            self._listener.left(key.link)
        return known

    def _hear(self, key: ListenerKey, id: Id | None, change: ChangeEvent) -> None:
        super()._hear(key, id, change)
        if _asked_for(id, change):
            self._listener.listen(key.link, change, told=id is not None)  # such a request is acknowledged at once

    def _unhear(self, key: ListenerKey, change: ChangeEvent) -> None:
        super()._unhear(key, change)
        if _asked_for(key.id, change):
            self._listener.unhear(key.link, change)


def _asked_for(id: Id | None, change: ChangeEvent) -> bool:
    """False for changes of lists that a legacy session is told of unasked."""
    return id is not None or change.kind is ChangeKind.RESOURCE
