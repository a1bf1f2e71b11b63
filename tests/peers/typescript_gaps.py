"""What the clients on node, or behind a proxy on it, see otherwise than the table says, and why; see `interop`."""

from __future__ import annotations

from tests.peers.behaviours import LISTS, Holding
from tests.peers.interop import NOTHING, Gap, Pair

__all__ = ["GAPS"]

OWN = Gap(-32602, "it gives its programs the code that this has in 2026-07-28, whatever the server sent")
SIGNALS = Gap("clean, but the server ended with SIGTERM", "it does not close standard input, and sends SIGTERM at once")
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

NO_WAY = Gap(NOTHING, "its command line has no way to do so")
CODELESS = Gap("error", "its command line shows an error without its code")
COMMAND_LINE = {
    "list": Gap({**LISTS, "paged": []}, "it turns all pages, and shows none"),
    "unknown tool": Gap("tool_not_found", "it looks for the name among the tools, and does not call what is not there"),
    "progress": NO_WAY,
    "cancel": NO_WAY,
    "unknown resource": CODELESS,
    "subscribe": NO_WAY,
    "list changed": NO_WAY,
    "unknown prompt": CODELESS,
    "completion": NO_WAY,
    "logging": NO_WAY,
    "sampling": Gap(
        Holding("sampling/createMessage needs the client capability sampling, which was not declared"),
        "its command line declares no sampling, so it is not asked, and reads why",
    ),
    "elicitation": Gap(
        Holding("elicitation/create needs the client capability elicitation.form, which was not declared"),
        "its command line declares no elicitation, so it is not asked, and reads why",
    ),
    "roots": Gap("", "its command line exposes none"),
    "1 MB": Gap(NOTHING, "a word of a command line has no room for it"),
}
SESSIONS = Gap("clean, but the server was left with 23 listeners", "each of its commands leaves a session behind")

GAPS: dict[Pair, dict[str, Gap]] = {
    ("typescript-1.0.4", "stdio"): {"end": SIGNALS},
    ("typescript-1.12.3", "stdio"): {"end": SIGNALS},
    ("typescript-2.4.0", "stdio"): {"unknown resource": OWN},
    ("typescript-2.4.0", "session"): {"unknown resource": OWN},
    ("typescript-2.4.0", "sse"): {"unknown resource": OWN},
    **{("inspector-2.12.0", way): COMMAND_LINE for way in ("stdio", "modern", "sse")},
    ("inspector-2.12.0", "session"): {**COMMAND_LINE, "end": SESSIONS},
    ("chromium-typescript-2.4.0", "session"): {"unknown resource": OWN},
    ("chromium-typescript-2.4.0", "sse"): {"unknown resource": OWN},
    ("mcp-remote-0.15.1", "session"): {"end": TWO_SESSIONS},
    ("mcp-remote-0.15.1", "modern"): {"cancel": HALF_MODERN, "end": TWO_SESSIONS},
}
