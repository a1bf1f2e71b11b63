"""What our client sees at servers of others otherwise than the table says, and why; see `interop`."""

from __future__ import annotations

from functools import partial

from tests.peers.behaviours import LISTS, Holding, seen_in
from tests.peers.installed import LEGACY
from tests.peers.interop import NOTHING, Gap, Pair
from tests.peers.looking import TOO_LATE

__all__ = ["GAPS", "LISTED"]

# All but the tool whose schema is more than types can say: most kits take functions only.
TOOLS = Holding("test_simple_text", "test_error_handling", "interop_echo", "interop_toggle")
LISTED = {**LISTS, "tools": TOOLS}
TEXT, _, ITEM = seen_in("2024-11-05")["read"]

Server = partial(Gap, whose="the server's")

ONE_PIECE = Server({**LISTED, "paged": []}, "its kit gives its lists in one piece")
AS_RESULT = Server("isError", "its kit makes a result of it")
NO_CODE = Server(0, "its kit answers what its functions raise with the code 0")
NEWER = Server(-32602, "its kit has the code of 2026-07-28 in all revisions")
INTERNAL = Server(-32603, "its kit takes it for a fault of the server")
NO_UPDATES = Server("SubscriptionUnsupported", "its kit says that nobody can subscribe, whoever is told otherwise")
NO_INSTRUCTIONS = Server(["2024-11-05", None], "its kit has no place for instructions")

FIRST_RELEASE = {
    "connect": NO_INSTRUCTIONS,
    "list": Server({**LISTED, "templates": -32601, "paged": []}, "its kit has no templates, and no pages"),
    "unknown tool": AS_RESULT,
    "bad arguments": AS_RESULT,
    "progress": Server([], "its kit does not show a tool the token of its request"),
    "cancel": Server(NOTHING, "it takes one request after another, and cancels none"),
    "read": Server([TEXT, "application/octet-stream", ITEM], "its kit has no place for the type of a picture"),
    "unknown resource": NO_CODE,
    "subscribe": NO_UPDATES,
    "unknown prompt": NO_CODE,
}
PYTHON_1 = {
    "list": ONE_PIECE,
    "unknown tool": AS_RESULT,
    "unknown resource": NO_CODE,
    "subscribe": NO_UPDATES,
    "unknown prompt": NO_CODE,
}
BEFORE_BAD_ARGUMENTS = {**PYTHON_1, "bad arguments": AS_RESULT}
BEFORE_COMPLETIONS = {
    **BEFORE_BAD_ARGUMENTS,
    "cancel": Server(NOTHING, "a call that is cancelled takes its whole session along"),
    "completion": Server("NotDeclared", "its kit does not say that it completes anything"),
}
PYTHON_2 = {"list": ONE_PIECE, "unknown tool": AS_RESULT, "unknown resource": NEWER, "unknown prompt": NO_CODE}
PYTHON_2_MODERN = {"list": ONE_PIECE, "unknown tool": AS_RESULT, "unknown prompt": INTERNAL}

WITH_MORE = Server(
    [f"{level} interop {{'msg': '{level}', 'extra': None}}" for level in ("notice", "warning", "error")],
    "its kit has a text and more in a message, and no other data",
)
FASTMCP = {"unknown tool": AS_RESULT, "unknown resource": NEWER, "subscribe": NO_UPDATES, "logging": WITH_MORE}
FASTMCP_MODERN = {
    "unknown tool": AS_RESULT,
    "subscribe": NO_UPDATES,
    "list changed": Server("SubscriptionUnsupported", "its kit has no subscriptions"),
    "logging": WITH_MORE,
}
NOT_TOLD = Gap(
    TOO_LATE,
    "it sends a notification that the call is cancelled, and leaves the stream open, whose end would have said so",
    "the proxy's",
)

GAPS: dict[Pair, dict[str, Gap]] = {
    **{("python-1.0.0", way): FIRST_RELEASE for way in ("stdio", "sse", "ws")},
    **{("python-1.9.4", way): BEFORE_COMPLETIONS for way in LEGACY},
    **{("python-1.12.4", way): BEFORE_BAD_ARGUMENTS for way in LEGACY},
    **{("python-1.30.0", way): PYTHON_1 for way in LEGACY},
    **{("python-2.3.0", way): PYTHON_2 for way in ("stdio", "session", "sse")},
    **{("python-2.3.0", way): PYTHON_2_MODERN for way in ("stdio-modern", "modern")},
    **{("typescript-1.0.4", way): {"connect": NO_INSTRUCTIONS} for way in ("stdio", "sse")},
    **{
        ("typescript-2.4.0", way): {"list": ONE_PIECE, "unknown resource": NEWER} for way in ("stdio", "session", "sse")
    },
    **{("typescript-2.4.0", way): {"list": ONE_PIECE} for way in ("stdio-modern", "modern")},
    **{("fastmcp-4.1.2", way): FASTMCP for way in ("stdio", "session", "sse")},
    **{("fastmcp-4.1.2", way): FASTMCP_MODERN for way in ("stdio-modern", "modern")},
    ("mcp-remote-0.15.1", "modern"): {"cancel": NOT_TOLD},
}
