"""Results of our client with third-party servers that differ from the table, with the reason; see `interop`."""

from __future__ import annotations

from functools import partial

from tests.peers.behaviours import LISTS, Contains, expected_results
from tests.peers.installed import LEGACY
from tests.peers.interop import NOT_TRIED, Gap, Pair
from tests.peers.our_client import TOO_LATE

__all__ = ["GAPS", "LISTED"]

# All tools but one: its schema cannot be written as types, and most SDKs take only functions.
TOOLS = Contains("test_simple_text", "test_error_handling", "interop_echo", "interop_toggle")
LISTED = {**LISTS, "tools": TOOLS}
TEXT, _, ITEM = expected_results("2024-11-05")["read"]

Server = partial(Gap, whose="the server's")

ONE_PIECE = Server({**LISTED, "paged": []}, "its SDK sends each list as one page")
AS_RESULT = Server("isError", "its SDK answers with a result")
NO_CODE = Server(0, "its SDK answers each exception of a function with the code 0")
NEWER_CODE = Server(-32602, "its SDK uses the code of 2026-07-28 in all revisions")
INTERNAL = Server(-32603, "its SDK reports an internal error of the server")
NO_UPDATES = Server("SubscriptionUnsupported", "its SDK never declares subscriptions of resources")
NO_INSTRUCTIONS = Server(["2024-11-05", None], "its SDK does not support instructions")

FIRST_RELEASE = {
    "connect": NO_INSTRUCTIONS,
    "list": Server({**LISTED, "templates": -32601, "paged": []}, "its SDK has neither templates nor pages"),
    "unknown tool": AS_RESULT,
    "bad arguments": AS_RESULT,
    "progress": Server([], "its SDK does not give a tool the progress token of its request"),
    "cancel": Server(NOT_TRIED, "it handles one request after another, and cannot cancel them"),
    "read": Server([TEXT, "application/octet-stream", ITEM], "its SDK cannot set the MIME type of a resource"),
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
BAD_ARGUMENTS_AS_RESULT = {**PYTHON_1, "bad arguments": AS_RESULT}
WITHOUT_COMPLETIONS = {
    **BAD_ARGUMENTS_AS_RESULT,
    "cancel": Server(NOT_TRIED, "cancelling a call ends its whole session"),
    "completion": Server("NotDeclared", "its SDK does not declare completions"),
}
PYTHON_2 = {"list": ONE_PIECE, "unknown tool": AS_RESULT, "unknown resource": NEWER_CODE, "unknown prompt": NO_CODE}
PYTHON_2_MODERN = {"list": ONE_PIECE, "unknown tool": AS_RESULT, "unknown prompt": INTERNAL}

WRAPPED_DATA = Server(
    [f"{level} interop {{'msg': '{level}', 'extra': None}}" for level in ("notice", "warning", "error")],
    "its SDK puts a text and further fields into each message, and accepts no other data",
)
FASTMCP = {"unknown tool": AS_RESULT, "unknown resource": NEWER_CODE, "subscribe": NO_UPDATES, "logging": WRAPPED_DATA}
FASTMCP_MODERN = {
    "unknown tool": AS_RESULT,
    "subscribe": NO_UPDATES,
    "list changed": Server("SubscriptionUnsupported", "its SDK has no subscriptions"),
    "logging": WRAPPED_DATA,
}
STREAM_LEFT_OPEN = Gap(
    TOO_LATE,
    "it sends notifications/cancelled and leaves the stream open; closing the stream would cancel the call",
    "the proxy's",
)

GAPS: dict[Pair, dict[str, Gap]] = {
    **{("python-1.0.0", way): FIRST_RELEASE for way in ("stdio", "sse", "ws")},
    **{("python-1.9.4", way): WITHOUT_COMPLETIONS for way in LEGACY},
    **{("python-1.12.4", way): BAD_ARGUMENTS_AS_RESULT for way in LEGACY},
    **{("python-1.30.0", way): PYTHON_1 for way in LEGACY},
    **{("python-2.3.0", way): PYTHON_2 for way in ("stdio", "session", "sse")},
    **{("python-2.3.0", way): PYTHON_2_MODERN for way in ("stdio-modern", "modern")},
    **{("typescript-1.0.4", way): {"connect": NO_INSTRUCTIONS} for way in ("stdio", "sse")},
    **{
        ("typescript-2.4.0", way): {"list": ONE_PIECE, "unknown resource": NEWER_CODE}
        for way in ("stdio", "session", "sse")
    },
    **{("typescript-2.4.0", way): {"list": ONE_PIECE} for way in ("stdio-modern", "modern")},
    **{("fastmcp-4.1.2", way): FASTMCP for way in ("stdio", "session", "sse")},
    **{("fastmcp-4.1.2", way): FASTMCP_MODERN for way in ("stdio-modern", "modern")},
    ("mcp-remote-0.15.1", "modern"): {"cancel": STREAM_LEFT_OPEN},
}
