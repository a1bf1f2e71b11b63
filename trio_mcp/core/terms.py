"""What one message is spoken under.

A legacy link agrees its terms once, in the handshake; a modern request brings its own.  Either way whoever has to
decide something is handed a `Terms` and need not ask which era it is in.
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
    """`capabilities` and `identity` are the other side's, as they came from the wire.

    The identity is for display and logs: nothing may depend on it (meta-14).  `principal` and `headers` are those of
    the request at hand, never those of the one that opened the session.  A principal is a stable name, or, where the
    server is protected, a `Principal`.
    """

    revision: Revision
    capabilities: Mapping[str, Any] = NOTHING
    identity: Mapping[str, Any] | None = None
    log_level: str | None = None
    principal: Any = None
    headers: Mapping[str, str] = NOTHING

    def declares(self, *capability: str) -> bool:
        return declares(self.capabilities, Capability(capability))

    def wants_log(self, level: str) -> bool:
        """Whether the other side asked for log messages of this level.

        In the modern era none are sent unasked; in the legacy one the server may choose what to send until a level is
        set, and we choose everything.  Raises `UsageError` for a level that does not exist.
        """
        if level not in LOG_LEVELS:
            raise UsageError(f"{level!r} is no log level; there are {', '.join(LOG_LEVELS)}")
        if self.log_level is None:
            return self.revision.handshake
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.log_level)


def stable_name(principal: object) -> str | None:
    """The name under which something is kept for a principal: text, or None for nobody in particular.

    Only text is the same in another process, and after it was written and read.  Objects that are equal only sometimes
    would show one caller what belongs to another, or never find their own.  Raises `UsageError` for them.
    """
    if principal is None or isinstance(principal, str):
        return principal
    raise UsageError(
        f"principal is the principal's stable name, a str or None, not {type(principal).__name__}: "
        "give what tells it from all others, such as a user id"
    )
