"""What the clients on node see otherwise than the table says, and why; see `interop`."""

from __future__ import annotations

from tests.peers.interop import Gap, Pair

__all__ = ["GAPS"]

OWN = "it gives its programs the code that this has in 2026-07-28, whatever the server sent"
GAPS: dict[Pair, dict[str, Gap]] = {
    ("typescript-2.4.0", "session"): {"unknown resource": Gap(-32602, OWN)},
    ("typescript-2.4.0", "sse"): {"unknown resource": Gap(-32602, OWN)},
}
