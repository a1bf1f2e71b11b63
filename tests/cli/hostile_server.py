"""A server that puts escape sequences for terminals into all its texts.  It needs no package."""

from __future__ import annotations

import json
import sys
from typing import Any

EVIL = "\x1b]0;owned\x07\x9b2J\u202e"
PLAIN: dict[str, Any] = {"type": "object", "properties": {}}
ODD = {"a": {"enum": 5}, "b": {"type": [1, 2]}, "c": {"anyOf": 3}, "d": 7}
FAR = "../../far.a"
TOOLS = [
    {"name": f"evil{EVIL}", "description": EVIL, "inputSchema": {**PLAIN, "properties": {EVIL: {"default": EVIL}}}},
    {"name": "odd", "inputSchema": {**PLAIN, "properties": ODD}},
    {"name": "none", "inputSchema": {**PLAIN, "properties": 5, "required": 5}},
    {"name": "text", "inputSchema": PLAIN},
    {"name": "structure", "inputSchema": PLAIN},
    {"name": "error", "inputSchema": PLAIN},
    {"name": FAR, "inputSchema": PLAIN},
    {"name": "-f", "inputSchema": PLAIN},
    {"name": "wide", "description": "x" * 1_000_000, "inputSchema": {
        **PLAIN, "properties": {"k" * 10_000: {}, **{f"a{number}": {} for number in range(300)}}}},
    *({"name": f"many{number}", "inputSchema": PLAIN} for number in range(99)),
]  # fmt: skip
CAPABILITIES = {"tools": {}, "resources": {}, "prompts": {}, "completions": {}, "tasks": {"list": {}}}
LINK = {"uri": EVIL, "name": EVIL}
IMAGE = {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}
TIMES = {"createdAt": "2026-01-01T00:00:00Z", "lastUpdatedAt": "2026-01-01T00:00:00Z", "ttl": None}
TASK = {"taskId": f"1{EVIL}", "status": "working", "statusMessage": EVIL, **TIMES}
INFO = {"name": EVIL, "version": EVIL}
RESULTS: dict[str, Any] = {
    "initialize": {
        "protocolVersion": "2025-11-25", "capabilities": CAPABILITIES, "serverInfo": INFO, "instructions": EVIL
    },
    "tools/list": {"tools": TOOLS},
    "resources/list": {"resources": [{"uri": f"a:{EVIL}", "name": EVIL}]},
    "resources/templates/list": {"resourceTemplates": []},
    "resources/read": {"contents": [{"uri": "a:b", "text": EVIL}]},
    "prompts/list": {"prompts": [{"name": EVIL}]},
    "prompts/get": {"messages": [{"role": "user", "content": {"type": "text", "text": EVIL}}]},
    "completion/complete": {"completion": {"values": [EVIL]}},
    "tasks/get": TASK,
    "text": {"content": [{"type": "text", "text": f"two\nlines{EVIL}"}, {"type": "resource_link", **LINK}]},
    "structure": {"content": [], "structuredContent": {"a": EVIL}},
    "-f": {"content": [{"type": "text", "text": "-f was called"}]},
    FAR: {"content": [IMAGE, IMAGE]},
}  # fmt: skip

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    params = message.get("params", {})
    name = params["name"] if message["method"] == "tools/call" else message["method"]
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if name == "error":
        reply["error"] = {"code": -32603, "message": EVIL}
    elif name == "tasks/list":  # the cursors repeat without end
        reply["result"] = {"tasks": [TASK], "nextCursor": "b" if params.get("cursor") == "a" else "a"}
    elif name == "resources/templates/list" and "endless" in sys.argv:
        reply["result"] = {"resourceTemplates": [], "nextCursor": str(message["id"])}
    else:
        reply["result"] = RESULTS[name]
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
