"""Results of the clients on Node, and of its proxy, that differ from the table, with the reason; see `interop`."""

from __future__ import annotations

from tests.peers.behaviours import LISTS, Contains
from tests.peers.interop import NOT_TRIED, Gap, Pair

__all__ = ["GAPS"]

OWN_CODE = Gap(-32602, "it reports the code of 2026-07-28 in all revisions, not the code that the server sent")
SIGNALS = Gap(
    "clean, but the server ended with SIGTERM", "it sends SIGTERM at once, without closing standard input first"
)
STREAM_LEFT_OPEN = Gap(
    NOT_TRIED,
    "it sends notifications/cancelled and leaves the stream open; closing the stream would cancel the call",
    "the proxy's",
)
TWO_SESSIONS = Gap(
    "clean, but the server was left with 2 listeners",
    "it opens one session to test the server and another for its client, and ends neither of them",
    "the proxy's",
)

NO_WAY = Gap(NOT_TRIED, "its command line cannot do this")
WITHOUT_CODE = Gap("error", "its command line shows an error without its code")
COMMAND_LINE = {
    "list": Gap({**LISTS, "paged": []}, "it reads all pages, and does not show them one by one"),
    "unknown tool": Gap("tool_not_found", "it looks the name up in the list of tools, and does not send the call"),
    "progress": NO_WAY,
    "cancel": NO_WAY,
    "unknown resource": WITHOUT_CODE,
    "subscribe": NO_WAY,
    "list changed": NO_WAY,
    "unknown prompt": WITHOUT_CODE,
    "completion": NO_WAY,
    "logging": NO_WAY,
    "sampling": Gap(
        Contains("sampling/createMessage needs the client capability sampling, which was not declared"),
        "its command line does not declare sampling, so it gets no request, and the tool returns the reason",
    ),
    "elicitation": Gap(
        Contains("elicitation/create needs the client capability elicitation.form, which was not declared"),
        "its command line does not declare elicitation, so it gets no request, and the tool returns the reason",
    ),
    "roots": Gap("", "its command line has no roots"),
    "1 MB": Gap(NOT_TRIED, "the text is too long for an argument of a command line"),
}
SESSIONS = Gap("clean, but the server was left with 23 listeners", "each of its commands leaves its session open")

GAPS: dict[Pair, dict[str, Gap]] = {
    ("typescript-1.0.4", "stdio"): {"end": SIGNALS},
    ("typescript-1.12.3", "stdio"): {"end": SIGNALS},
    ("typescript-2.4.0", "stdio"): {"unknown resource": OWN_CODE},
    ("typescript-2.4.0", "session"): {"unknown resource": OWN_CODE},
    ("typescript-2.4.0", "sse"): {"unknown resource": OWN_CODE},
    **{("inspector-2.12.0", way): COMMAND_LINE for way in ("stdio", "modern", "sse")},
    ("inspector-2.12.0", "session"): {**COMMAND_LINE, "end": SESSIONS},
    ("chromium-typescript-2.4.0", "session"): {"unknown resource": OWN_CODE},
    ("chromium-typescript-2.4.0", "sse"): {"unknown resource": OWN_CODE},
    ("mcp-remote-0.15.1", "session"): {"end": TWO_SESSIONS},
    ("mcp-remote-0.15.1", "modern"): {"cancel": STREAM_LEFT_OPEN, "end": TWO_SESSIONS},
}
