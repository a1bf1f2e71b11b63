"""A server that breaks the protocol in many ways: ``bad_server.py REVISION``.  It needs no package."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

REVISION = sys.argv[1]
MODERN = REVISION >= "2026-07-28"
CAPABILITIES: dict[str, Any] = {"tools": {}, "resources": {}, "prompts": {}, "completions": {}}
if not MODERN:
    CAPABILITIES["logging"] = {}
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"name": "no schema"},
    {"name": "twice", "inputSchema": SCHEMA, "description": None},
    {"name": "twice", "inputSchema": {"type": "object", "properties": {"a": {"type": "text"}}}},
    {
        "name": "reads",
        "inputSchema": SCHEMA,
        "outputSchema": {"type": "array" if not MODERN else "object", "required": ["a"]},
        "annotations": {"readOnlyHint": True},
    },
    {
        "name": "headers",
        "inputSchema": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "x-mcp-header": "A"},
                "b": {"type": "string", "x-mcp-header": "B"},
                "c": {"type": "string", "x-mcp-header": "b"},
                "d": {"type": "string", "x-mcp-header": "a b"},
                "e": {"items": {"type": "string", "x-mcp-header": "E"}},
            },
        },
    },
]
PROMPTS = [
    {"name": "plain", "arguments": [{"name": "a"}]},
    {"name": "needy", "arguments": [{"name": "a", "required": True}]},
]
RESULTS: dict[str, Any] = {
    "server/discover": {
        "supportedVersions": [REVISION],
        "capabilities": CAPABILITIES,
        "ttlMs": -1,
        "cacheScope": "private",
    },
    "ping": {"pong": True},
    "resources/list": {"resources": [{"uri": "notes", "name": "notes"}], "nextCursor": None},
    "resources/templates/list": {
        "resourceTemplates": [{"uriTemplate": "notes://{", "name": "t"}],
        "nextCursor": "same",
    },
    "prompts/list": {"prompts": PROMPTS},
    "prompts/get": {"messages": [{"role": "system", "content": {"type": "text", "text": "x"}}]},
    "resources/read": {"contents": []},
    "completion/complete": {"completion": {"values": ["x"] * 101}},
}


def answer(method: str, params: dict[str, Any]) -> Any:
    if method == "initialize":
        given = params["protocolVersion"]
        version = given if given < "2000" else REVISION
        return {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": {"name": "bad", "version": "1"}}
    if method == "server/discover" and not MODERN:
        raise KeyError
    if method == "tools/list" and params.get("cursor") == "2":
        return {"tools": TOOLS[:1], "cacheScope": "private", "ttlMs": 1}
    if method == "tools/list":
        return {"tools": TOOLS, "nextCursor": "2", "ttlMs": "1", "cacheScope": "public"}
    if params.get("name") == "reads":
        for progress in (2, 1):
            report = {"progressToken": params["_meta"]["progressToken"], "progress": progress}
            write({"jsonrpc": "2.0", "method": "notifications/progress", "params": report})
        return {"content": [], "structuredContent": []}
    return RESULTS.get(method, {"content": [{"type": "text", "text": "what?"}]})


def write(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


sys.stdout.write("starting\n")
for line in sys.stdin:
    message = json.loads(line)
    method, id = message.get("method"), message.get("id")
    if id is None and method != "notifications/initialized":
        write({"jsonrpc": "2.0", "id": "never-sent" if method == "notifications/cancelled" else None, "result": {}})
    if id is None or method == 5:
        continue
    if MODERN and method == "resources/list":
        write({"jsonrpc": "2.0", "id": "server", "method": "roots/list", "params": {}})
    try:
        write({"jsonrpc": "2.0", "id": id, "result": answer(method, message.get("params", {}))})
    except KeyError:
        write({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no"}})
time.sleep(7 if MODERN else 0)
