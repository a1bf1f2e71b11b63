"""What the clients on node see otherwise than the table says, and why; see `interop`."""

from __future__ import annotations

from tests.peers.interop import Gap, Pair

__all__ = ["GAPS"]

OWN = Gap(-32602, "it gives its programs the code that this has in 2026-07-28, whatever the server sent")
SIGNALS = Gap("clean, but the server ended with 143", "it does not close standard input, and sends SIGTERM at once")

GAPS: dict[Pair, dict[str, Gap]] = {
    ("typescript-1.0.4", "stdio"): {"end": SIGNALS},
    ("typescript-1.12.3", "stdio"): {"end": SIGNALS},
    ("typescript-2.4.0", "stdio"): {"unknown resource": OWN},
    ("typescript-2.4.0", "session"): {"unknown resource": OWN},
    ("typescript-2.4.0", "sse"): {"unknown resource": OWN},
}
