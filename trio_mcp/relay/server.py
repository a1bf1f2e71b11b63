"""The front server of a relay: it has the identity and capabilities of the upstream server, and no features of its own.

A middleware of the relay handles the requests and sends them upstream.  This module owns the parts that no middleware
sees: identity, capabilities, and the rules for arguments that are mirrored in HTTP headers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.client.client import Client
from trio_mcp.core.content import MalformedContent, well_formed
from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import Mirror, find_mirrors
from trio_mcp.core.messages import Limits
from trio_mcp.core.models import Tool
from trio_mcp.core.revisions import REVISIONS, Role
from trio_mcp.core.session import Offer
from trio_mcp.server.publishing import Watcher
from trio_mcp.server.registry import CAPABILITIES, Catalog, Entry
from trio_mcp.server.server import Server

if TYPE_CHECKING:
    from trio_mcp.server.dispatch import Middleware

__all__ = ["RelayCatalog", "RelayServer"]

_log = logging.getLogger("trio_mcp.relay")

_TOOLS = 10_000  # tools whose header rules are remembered, as in the client


class RelayServer(Server):
    """A server that presents the server of `client`.  The last of `middleware` sends requests upstream."""

    def __init__(
        self,
        watcher: Watcher,
        client: Client,
        middleware: Sequence[Middleware],
        revisions: Collection[str],
        limits: Limits | None,
    ) -> None:
        info = client.server  # it proves nothing (meta-14), and may be incomplete
        named = info.get("name") and all(isinstance(info.get(key), str) for key in ("name", "version"))
        info = info if named else {"name": "relay", "version": "0"}
        capabilities: dict[str, Any] = {"logging": {}}  # log messages of the upstream server are forwarded
        for name in CAPABILITIES:
            if isinstance(declared := client.capabilities.get(name), Mapping):
                capabilities[name] = {key: True for key in ("listChanged", "subscribe") if declared.get(key) is True}
        if "completions" not in REVISIONS[client.revision].capabilities[Role.SERVER]:  # it does not declare them
            capabilities["completions"] = {}
        offered = [REVISIONS[name] for name in revisions]
        self._relay_offer = Offer(info, capabilities, offered, client.instructions)
        super().__init__(info["name"], middleware=middleware, limits=limits, revisions=revisions)
        self._catalog = self.entries = RelayCatalog(tuple(middleware))
        self._catalog.kinds |= capabilities.keys() & CAPABILITIES.keys()
        self._watcher = watcher

    def _current_offer(self) -> Offer:
        return self._relay_offer


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
