"""What the clients on node, or behind a proxy on it, see otherwise than the table says, and why; see `interop`."""

from __future__ import annotations

from tests.peers.interop import NOTHING, Gap, Pair

__all__ = ["GAPS"]

OWN = Gap(-32602, "it gives its programs the code that this has in 2026-07-28, whatever the server sent")
SIGNALS = Gap("clean, but the server ended with 143", "it does not close standard input, and sends SIGTERM at once")
HALF_MODERN = Gap(
    NOTHING,
    "it sends a notification that the call is cancelled, and leaves the stream open, whose end would have said so",
    "the proxy's",
)
TWO_SESSIONS = Gap(
    "clean, but the server was left with 2 listeners",
    "it opens a session to see whether there is a server, and another for its client, and ends neither",
    "the proxy's",
)

GAPS: dict[Pair, dict[str, Gap]] = {
    ("typescript-1.0.4", "stdio"): {"end": SIGNALS},
    ("typescript-1.12.3", "stdio"): {"end": SIGNALS},
    ("typescript-2.4.0", "stdio"): {"unknown resource": OWN},
    ("typescript-2.4.0", "session"): {"unknown resource": OWN},
    ("typescript-2.4.0", "sse"): {"unknown resource": OWN},
    ("mcp-remote-0.15.1", "session"): {"end": TWO_SESSIONS},
    ("mcp-remote-0.15.1", "modern"): {"cancel": HALF_MODERN, "end": TWO_SESSIONS},
}
