"""How much may have come of bodies that are not whole yet, of all clients together.

A body may take as long as a modem needs, and as many may be on their way as there are connections: without a bound,
clients that send slowly would have the memory of the whole machine.  What is small is not counted, so that those who
fill the bound keep only each other from sending more.
"""

from __future__ import annotations

from types import TracebackType

from trio_mcp.core.jsonrpc import Limits

__all__ = ["Intake", "Share"]

_SMALL = 64 * 1024  # bytes that any connection may have here, as it may have a head of that length


class Intake:
    """All bodies that one server receives now."""

    def __init__(self, limits: Limits) -> None:
        self.most = limits.bodies_bytes
        self.held = 0
        """Bytes that have come, but for those of small bodies."""


class Share:
    """What has come of one body; a block, after which that is somebody else's matter."""

    __slots__ = ("_held", "_intake")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.fits(0)

    def fits(self, size: int) -> bool:
        """Whether there is room for a body of which so much has come."""
        counted = size if size > _SMALL else 0
        self._intake.held += counted - self._held
        self._held = counted
        return not counted or self._intake.held <= self._intake.most
