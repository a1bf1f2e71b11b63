"""The terms of a message: its revision, and the peer's capabilities, identity, log level, principal and headers.

A legacy connection agrees its terms once, in the handshake.  A modern request brings terms of its own.  In both eras
the code that makes a decision gets a `Terms`, and does not ask which era it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trio_mcp.core.errors import UsageError
from trio_mcp.core.records import record
from trio_mcp.core.revisions import Capability, Revision, declares

__all__ = ["LOG_LEVELS", "NOTHING", "Terms", "stable_name"]

NOTHING: Mapping[str, Any] = MappingProxyType({})

LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""From the least to the most severe, as in RFC 5424."""


@record
class Terms:
    """The terms of one message.

    `capabilities` and `identity` are those of the peer, as they came from the wire.  The identity is for display and
    logs only: no decision may depend on it (meta-14).  `principal` and `headers` belong to the current request, never
    to the request that opened the session.  The principal is a stable name, or a `Principal` if the server is
    protected.
    """

    revision: Revision
    capabilities: Mapping[str, Any] = NOTHING
    identity: Mapping[str, Any] | None = None
    log_level: str | None = None
    principal: Any = None
    headers: Mapping[str, str] = NOTHING

    def declares(self, *capability: str) -> bool:
        """Return whether the peer declared this capability."""
        return declares(self.capabilities, Capability(capability))

    def wants_log(self, level: str) -> bool:
        """Return whether to send log messages of this level to the peer.

        In the modern era only a client that asks for log messages gets them.  In the legacy era the server may choose
        until the client sets a level; we send all levels.  Raises `UsageError` if the level does not exist.
        """
        if level not in LOG_LEVELS:
            raise UsageError(f"level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
        if self.log_level is None:
            return self.revision.handshake
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.log_level)


def stable_name(principal: object) -> str | None:
    """Return the name under which data of a principal is stored: a string, or None if there is no principal.

    Only a string is equal in another process, and after it was stored and loaded.  With objects that are not reliably
    equal, one caller could get the data of another, or never find its own.  Raises `UsageError` for an object.
    """
    if principal is None or isinstance(principal, str):
        return principal
    raise UsageError(
        f"principal must be a str or None, got {type(principal).__name__}: pass a stable, unique name, "
        "for example the user id"
    )
