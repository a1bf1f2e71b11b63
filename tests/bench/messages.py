"""The messages of the loads: calls in both eras."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

__all__ = ["INITIALIZE", "MODERN", "REVISIONS", "TEXT", "Template", "call", "encoded", "request", "with_tasks"]

REVISIONS = {"modern": "2026-07-28", "session": "2025-11-25"}
MODERN = {
    "io.modelcontextprotocol/protocolVersion": REVISIONS["modern"],
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}
INITIALIZE = {
    "protocolVersion": REVISIONS["session"],
    "capabilities": {},
    "clientInfo": {"name": "bench", "version": "1"},
}
TEXT = "Mostly sunny, 21 degrees, light wind from the west."
_FIRST = 1_000_000  # all ids have the same length, so all calls have the same length


def encoded(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def call(era: str, name: str = "echo", arguments: Mapping[str, Any] | None = None, *, reports: bool = False) -> Any:
    """A call, as a message with the id that `Template` replaces."""
    params: dict[str, Any] = {"name": name, "arguments": {"text": TEXT} if arguments is None else arguments}
    return request(era, "tools/call", params, reports=reports)


def request(era: str, method: str, params: Mapping[str, Any], *, reports: bool = False) -> Any:
    meta: dict[str, Any] = {**(MODERN if era == "modern" else {}), **({"progressToken": 7} if reports else {})}
    merged = {**params, **({"_meta": meta} if meta else {})}
    return {"jsonrpc": "2.0", "id": _FIRST, "method": method, "params": merged}


def with_tasks(message: Any) -> Any:
    """The same request of a client that declares tasks."""
    declared = {"io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}
    params = {**message["params"], "_meta": {**message["params"]["_meta"], **declared}}
    return {**message, "params": params}


class Template:
    """The same bytes for each call, with ids that count up.  Several templates of one connection share the ids."""

    def __init__(self, whole: bytes, ids: Iterator[int] | None = None) -> None:
        self._before, found, self._after = whole.partition(b"%d" % _FIRST)
        assert found
        self.ids = ids or count(_FIRST + 1)

    def take(self) -> bytes:
        return b"%b%d%b" % (self._before, next(self.ids), self._after)
