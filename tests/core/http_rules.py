"""The reply of a server to each kind of HTTP request: the rules of all revisions, as a table.

This module runs no code under test, so that the same rows can check the decisions and a real server.  A row that needs
a session gives the revision in `session`; ``{session}`` in its path or headers stands for the id of that session, and
``{length}`` in a header for the length of the body.  `answer` is the kind of response that the server may choose: JSON,
a stream, or either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import pytest

from tests.requirements import req
from trio_mcp.core import LEGACY, MODERN, REVISIONS, Limits

A, B, C, D, E = REVISIONS
EMPTY: Mapping[str, Any] = MappingProxyType({})
NO_REQUIREMENT = req()

# A tool with arguments that are mirrored into headers, and others that are not.
TOOL = "execute_sql"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "limit": {"type": "integer", "x-mcp-header": "Limit"},
        "dry": {"type": "boolean", "x-mcp-header": "Dry"},
        "where": {"type": "object", "properties": {"zone": {"type": "string", "x-mcp-header": "Zone"}}},
        "query": {"type": "string"},
    },
}

BASE = {
    "Host": "127.0.0.1:3000",
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
}


@attrs.frozen
class Rule:
    about: str
    status: int
    code: int | None = None  # of the JSON-RPC error in the body
    says: tuple[str, ...] = ()  # parts of the message of that error
    proves: pytest.MarkDecorator = NO_REQUIREMENT
    method: str = "POST"
    path: str = "/mcp"
    headers: Mapping[str, str | None] = EMPTY  # in addition to BASE; None removes a header of BASE
    body: object = None  # bytes, or a value to send as JSON; None: no body
    session: str | None = None
    principal: str | None = None  # of the request; the session itself has no principal
    policy: Mapping[str, Any] = EMPTY  # settings that differ from the default
    answer: str = "EITHER"  # for status 200: JSON, STREAM or EITHER
    reply: Mapping[str, str | None] = EMPTY  # headers of the reply; None: the reply does not have it
    id: object = None  # the id in the error
    # Differences between a real server and the decision alone.
    at_once: int | None = None  # the status of the HTTP reader, which refuses the request before the decision
    known: bool = True  # for status 200: whether the server has the method, prompt or resource

    @property
    def content(self) -> bytes:
        if self.body is None or isinstance(self.body, bytes):
            return self.body or b""
        return json.dumps(self.body).encode()

    def fields(self, session: str) -> list[tuple[str, str]]:
        merged = {**BASE, **self.headers}
        values = {"{session}": session, "{length}": str(len(self.content))}
        for mark, text in values.items():
            merged = {name: value and value.replace(mark, text) for name, value in merged.items()}
        return [(name, value) for name, value in merged.items() if value is not None]


def request(method: str, params: object = None, id: object = 1) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": id, "method": method}
    return message if params is None else {**message, "params": params}


def notification(method: str, params: object = None) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "method": method}
    return message if params is None else {**message, "params": params}


def meta(version: object = E, **more: object) -> dict[str, Any]:
    prefix = "io.modelcontextprotocol/"
    return {f"{prefix}protocolVersion": version, f"{prefix}clientCapabilities": {}, **more}


def modern(about: str, status: int, method: str = "tools/list", *, headers: Any = EMPTY, **row: Any) -> Rule:
    """A valid modern request, with the changes of this row."""
    params = {"_meta": meta(), **row.pop("params", {})}
    body = row.setdefault("body", request(method, params))
    named = body.get("method", method) if isinstance(body, dict) else method
    standard = {"MCP-Protocol-Version": E, "Mcp-Method": named, **headers}
    if status >= 400:
        row.setdefault("id", 1)
    return Rule(about, status, headers=standard, **row)


def call(about: str, status: int, arguments: object, headers: Any = EMPTY, **row: Any) -> Rule:
    """A modern call of TOOL with these arguments, and these mirrored headers."""
    headers = {"Mcp-Name": TOOL, **{f"Mcp-Param-{name}": value for name, value in headers.items()}}
    if status == 400:
        row.setdefault("code", -32020)
    return modern(about, status, "tools/call", params={"name": TOOL, "arguments": arguments}, headers=headers, **row)


def in_session(about: str, status: int, *, session: str = D, headers: Any = EMPTY, **row: Any) -> Rule:
    """A request in a session of this revision."""
    row.setdefault("body", request("tools/list") if row.get("method", "POST") == "POST" else None)
    return Rule(about, status, session=session, headers={"Mcp-Session-Id": "{session}", **headers}, **row)


INITIALIZE = {"protocolVersion": D, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
SSE = {"sse_path": "/sse", "message_path": "/messages"}
WEBSOCKETS = {"websocket_path": "/ws"}
MODERN_ONLY = {"revisions": MODERN}
LEGACY_ONLY = {"revisions": LEGACY}
DISCOVER = request("server/discover", {"_meta": meta()})

PATH_RULES = [
    Rule("another path", 404, -32600, says=("/other", "/mcp", "(path)"), path="/other", body=DISCOVER),
    Rule("a path below the endpoint", 404, -32600, path="/mcp/more", body=DISCOVER),
    modern("the path with a slash", 200, path="/mcp/"),
    modern("the path with a query", 200, path="/mcp?x=1"),
    modern("the root as the endpoint", 200, path="/", policy={"path": "/"}),
    modern("a target with scheme and host", 200, path="http://localhost:3000/mcp", headers={"Host": "evil.example"}),
    modern("a target with another host", 421, path="http://evil.example/mcp", code=-32600, id=None),
    Rule("a target without a path", 404, -32600, method="OPTIONS", path="*"),
    Rule(
        "PUT",
        405,
        -32600,
        ("'PUT'", "GET, POST, DELETE, OPTIONS"),
        req("http-01", "http-120", "draft-02"),
        method="PUT",
        reply={"Allow": "GET, POST, DELETE, OPTIONS"},
    ),
    Rule("HEAD has no body", 405, method="HEAD", reply={"Allow": "GET, POST, DELETE, OPTIONS"}),
    Rule("OPTIONS", 204, method="OPTIONS", reply={"Allow": "GET, POST, DELETE, OPTIONS", "Content-Length": None}),
    *(
        Rule(
            f"{method} where only 2026-07-28 is served",
            405,
            -32600,
            (method, "revisions"),
            proves=req("http-02", "http-110", "http-111", "http-120", "draft-02"),
            method=method,
            headers={"Mcp-Session-Id": "x", "Last-Event-ID": "1-1"},
            policy=MODERN_ONLY,
            reply={"Allow": "POST, OPTIONS"},
        )
        for method in ("GET", "DELETE")
    ),
    *(
        in_session(
            f"{method} under the header of 2026-07-28",
            405,
            code=-32600,
            says=(method, E),
            proves=req("http-117"),
            method=method,
            headers={"MCP-Protocol-Version": E},
            reply={"Allow": "POST, OPTIONS"},
        )
        for method in ("GET", "DELETE")
    ),
    *(
        Rule(
            f"{method} without sessions",
            405,
            -32600,
            (method, "sessions=False"),
            proves=req("http-33", "http-60"),
            method=method,
            policy={"sessions": False},
            reply={"Allow": "POST, OPTIONS"},
        )
        for method in ("GET", "DELETE")
    ),
    Rule(
        "GET with json_only",
        405,
        -32600,
        ("'GET'", "json_only=True"),
        proves=req("http-33"),
        method="GET",
        policy={"json_only": True},
        reply={"Allow": "POST, DELETE, OPTIONS"},
    ),
]

WEBSOCKET_RULES = [
    Rule(
        "a GET without an upgrade",
        426,
        -32600,
        ("WebSocket",),
        method="GET",
        path="/ws",
        policy=WEBSOCKETS,
        reply={"Upgrade": "websocket"},
    ),
    Rule("any Accept header", 426, -32600, method="GET", path="/ws/", headers={"Accept": "x/y"}, policy=WEBSOCKETS),
    *(
        Rule(
            f"{method} at the path of WebSockets",
            405,
            -32600,
            method=method,
            path="/ws",
            policy=WEBSOCKETS,
            reply={"Allow": "GET, OPTIONS"},
        )
        for method in ("POST", "DELETE")
    ),
    Rule("no path of WebSockets", 404, -32600, method="GET", path="/ws"),
]

EVIL = "http://evil.example"
ORIGIN_RULES = [
    Rule(
        "an origin that is not allowed",
        403,
        -32600,
        (EVIL, "allowed_origins"),
        req("http-03", "http-04", "http-05"),
        headers={"Origin": EVIL},
        body=DISCOVER,
        reply={"Access-Control-Allow-Origin": None},
    ),
    *(
        Rule(
            f"{method} {path} from an origin that is not allowed",
            403,
            -32600,
            proves=req("http-03", "http-04", "sse-01"),
            method=method,
            path=path,
            headers={"Origin": EVIL},
            policy={**SSE, **WEBSOCKETS},
        )
        for method, path in [
            ("GET", "/mcp"),
            ("DELETE", "/mcp"),
            ("OPTIONS", "/mcp"),
            ("GET", "/sse"),
            ("POST", "/messages"),
            ("GET", "/ws"),
        ]
    ),
    Rule(
        "a WebSocket at a host that is not served",
        421,
        -32600,
        method="GET",
        path="/ws",
        headers={"Host": "evil.example"},
        policy=WEBSOCKETS,
    ),
    *(
        Rule(f"the origin {origin!r}", 403, -32600, headers={"Origin": origin}, body=DISCOVER)
        for origin in (
            "null",
            "",
            "http://127.0.0.1.evil.example",
            "file://",
            "http://localhost:x",
            "localhost",
            "http://[::2]",
        )
    ),
    *(
        modern(
            f"the origin {origin!r}",
            200,
            proves=req("http-03"),
            headers={"Origin": origin},
            reply={"Access-Control-Allow-Origin": origin, "Vary": "Origin"},
        )
        for origin in ("http://localhost:5173", "https://127.0.0.1", "http://[::1]:8080", "HTTP://LOCALHOST:1")
    ),
    modern("the origin null, allowed", 200, headers={"Origin": "null"}, policy={"allowed_origins": ["null"]}),
    modern("any origin, allowed", 200, headers={"Origin": EVIL}, policy={"allowed_origins": ["*"]}),
    modern(
        "an origin with its default port written out",
        200,
        headers={"Origin": "https://app.example:443"},
        policy={"allowed_origins": ["https://app.example"]},
    ),
    modern(
        "an allowed origin with another port",
        403,
        code=-32600,
        id=None,
        headers={"Origin": "https://app.example:8443"},
        policy={"allowed_origins": ["https://app.example"]},
    ),
    *(
        Rule(
            f"Sec-Fetch-Site: {site} without an origin",
            403,
            -32600,
            (f"Sec-Fetch-Site: {site}", "allowed_origins"),
            method="GET",
            headers={"Sec-Fetch-Site": site},
        )
        for site in ("cross-site", "same-site")
    ),
    *(
        modern(f"Sec-Fetch-Site: {site}", 200, headers={"Sec-Fetch-Site": site})
        for site in ("same-origin", "none", "a value of the future")
    ),
    modern(
        "Sec-Fetch-Site: cross-site and an allowed origin",
        200,
        headers={"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:5173"},
    ),
    modern(
        "Sec-Fetch-Site: cross-site without an origin, and any origin is allowed",
        200,
        headers={"Sec-Fetch-Site": "cross-site"},
        policy={"allowed_origins": ["*"]},
    ),
    Rule(
        "a host that is not served",
        421,
        -32600,
        ("evil.example", "allowed_hosts"),
        req("http-03"),
        headers={"Host": "evil.example"},
        body=DISCOVER,
    ),
    Rule(
        "a bad host and a bad origin",
        403,
        -32600,
        proves=req("http-04"),
        headers={"Host": "evil.example", "Origin": EVIL},
        body=DISCOVER,
    ),
    *(
        modern(f"the host {host!r}", 200, headers={"Host": host})
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:65535", "[::1]", "[::1]:3000", "localhost:", None)
    ),
    *(
        modern(f"the host {host!r}", 421, code=-32600, id=None, headers={"Host": host}, at_once=at_once)
        for host, at_once in [
            ("", None),
            ("evil.example:", None),
            ("localhost:*", 400),
            ("a@localhost", 400),
            ("localhost, localhost2", 400),
            ("[::1", 400),
            ("127.0.0.1.evil.example", None),
        ]
    ),
    modern(
        "a host with the port that is served",
        200,
        headers={"Host": "a.example:81"},
        policy={"allowed_hosts": ["a.example:81"]},
    ),
    modern(
        "a host with another port",
        421,
        code=-32600,
        id=None,
        headers={"Host": "a.example"},
        policy={"allowed_hosts": ["a.example:81"]},
    ),
    modern("any host", 200, headers={"Host": "whatever.example"}, policy={"allowed_hosts": ["*"]}),
    Rule(
        "a preflight",
        204,
        method="OPTIONS",
        headers={
            "Origin": "http://localhost:5173",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type, mcp-param-region, x: y",
        },
        reply={
            "Access-Control-Allow-Origin": "http://localhost:5173",
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": "Mcp-Session-Id, MCP-Protocol-Version, Mcp-Method, Mcp-Name, "
            "Last-Event-ID, Accept, Authorization, Content-Type, DPoP, DPoP-Nonce, WWW-Authenticate, content-type, "
            "mcp-param-region",
            "Access-Control-Max-Age": "7200",
        },
    ),
    Rule(
        "a refusal with CORS headers",
        404,
        -32600,
        path="/other",
        headers={"Origin": "http://localhost:5173"},
        reply={"Access-Control-Allow-Origin": "http://localhost:5173"},
    ),
]

SMALL_LIMITS = Limits(message_bytes=200)
CONTENT_RULES = [
    *(
        modern(f"the content type {kind!r}", 200, headers={"Content-Type": kind})
        for kind in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"')
    ),
    *(
        modern(
            f"the content type {kind!r}",
            415,
            code=-32600,
            says=("application/json",),
            id=None,
            headers={"Content-Type": kind},
        )
        for kind in (
            None,
            "text/plain",
            "application/json; charset=latin-1",
            "application/x-www-form-urlencoded",
            "json",
        )
    ),
    *(
        modern(f"Accept: {accept!r}", 200, headers={"Accept": accept}, answer=answer, proves=req("http-18"))
        for accept, answer in [
            ("application/json, text/event-stream", "EITHER"),
            ("text/event-stream, application/json", "EITHER"),
            ("Application/JSON, Text/Event-Stream", "EITHER"),
            (None, "EITHER"),
            ("", "EITHER"),
            ("*/*", "EITHER"),
            ("application/*, text/*", "EITHER"),
            ("application/json;q=0.5, text/event-stream;q=0.1", "EITHER"),
            ("application/json", "JSON"),
            ("application/*", "JSON"),
            ("*/*, text/event-stream;q=0", "JSON"),
            ("text/event-stream;q=0.000, */*;q=0.1", "JSON"),
            ("text/event-stream", "STREAM"),
            ("text/*;q=0.1", "STREAM"),
            ("*/*;q=0, text/event-stream", "STREAM"),
            ("application/json;q=0, */*", "STREAM"),
            ("application/json;q=high, text/html", "JSON"),
            ("application/json; version=2, text/html", "JSON"),
        ]
    ),
    *(
        modern(
            f"Accept: {accept!r}",
            406,
            code=-32600,
            says=("Accept", "text/event-stream"),
            id=None,
            headers={"Accept": accept},
        )
        for accept in ("text/html", "*/*;q=0", "application/json;q=0, text/event-stream;q=0.0", "nonsense")
    ),
    modern("json_only, and the client accepts JSON", 200, answer="JSON", policy={"json_only": True}),
    modern(
        "json_only, and the client accepts streams only",
        406,
        code=-32600,
        says=("text/event-stream", "json_only=True"),
        id=None,
        headers={"Accept": "text/event-stream"},
        policy={"json_only": True},
    ),
    Rule(
        "a request without a session, with an unknown version",
        400,
        -32600,
        says=("'2030-01-01'",),
        id=1,
        headers={"MCP-Protocol-Version": "2030-01-01"},
        body=request("tools/list"),
    ),
    Rule(
        "a request without a session and without a version",
        400,
        -32600,
        says=("initialize", E),
        id=1,
        body=request("tools/list"),
    ),
    in_session("a GET that accepts no stream", 406, code=-32600, method="GET", headers={"Accept": "application/json"}),
    Rule(
        "a length over the limit",
        413,
        -32600,
        ("has 201 bytes", "200", "Limits.message_bytes"),
        headers={"Content-Length": "201"},
        policy={"limits": SMALL_LIMITS},
    ),
    Rule("a length of 5000 digits", 413, -32600, headers={"Content-Length": "9" * 5000}, at_once=400),
    modern("a length with leading zeros", 200, headers={"Content-Length": "00{length}"}),
    *(
        Rule(
            f"{method} with the length {length!r}",
            400,
            -32600,
            ("Content-Length",),
            method=method,
            headers={"Content-Length": length},
            reply={"Connection": "close"},
        )
        for method in ("POST", "GET")
        for length in ("", "-1", "+1", "0x10", "1_0", "1 0", "1, 2", "\xb2")
    ),
    *(
        Rule(
            f"{method} with a length and a coding",
            400,
            -32600,
            ("Content-Length", "Transfer-Encoding"),
            method=method,
            headers={"Content-Length": "5", "Transfer-Encoding": "chunked"},
            body=b"0\r\n\r\n",
            reply={"Connection": "close"},
        )
        for method in ("POST", "DELETE")
    ),
    modern("the encoding identity", 200, headers={"Content-Encoding": "Identity"}),
    *(
        modern(
            f"a body in {coding!r}",
            415,
            code=-32600,
            says=(coding,),
            id=None,
            headers={"Content-Encoding": coding},
            reply={"Accept-Encoding": "identity"},
        )
        for coding in ("gzip", "br", "identity, gzip")
    ),
    Rule(
        "a body that is too long",
        413,
        -32600,
        ("Limits.message_bytes",),
        body=b" " * 201,
        policy={"limits": SMALL_LIMITS},
    ),
    Rule("a body that is not JSON", 400, -32700, body=b"{"),
    Rule("no body", 400, -32700, ("the body is empty; a POST carries one JSON-RPC message",)),
    Rule("no jsonrpc", 400, -32600, ('"jsonrpc": "2.0" is missing',), body={"id": 1, "method": "ping"}, id=1),
    Rule("a body that is no message", 400, -32600, proves=req("http-16"), body=[]),
    Rule(
        "an invalid notification",
        400,
        -32600,
        proves=req("http-16", "http-17"),
        body={"jsonrpc": "2.0", "method": "notifications/x", "params": 7},
    ),
]

MALFORMED = {"jsonrpc": "2.0", "id": 1, "result": 7}
MODERN_RULES = [
    modern("a request", 200, proves=req("http-02", "http-18"), reply={"Mcp-Session-Id": None}),
    modern("a session id is ignored", 200, proves=req("http-111"), headers={"Mcp-Session-Id": "x"}),
    modern(
        "a last event id is ignored", 200, proves=req("http-111"), headers={"Last-Event-ID": "1-1"}, policy=MODERN_ONLY
    ),
    modern(
        "a legacy session is ignored",
        200,
        proves=req("http-117"),
        session=D,
        headers={"Mcp-Session-Id": "{session}"},
    ),
    modern(
        "header names in another case",
        200,
        proves=req("http-100"),
        headers={"Mcp-Method": None, "MCP-METHOD": "tools/list"},
    ),
    modern(
        "a notification", 202, body=notification("notifications/cancelled", {"requestId": 1}), proves=req("http-15")
    ),
    modern(
        "a notification with the header of its method",
        202,
        body=notification("notifications/cancelled", {"requestId": 1}),
        headers={"Mcp-Method": "notifications/cancelled"},
    ),
    modern(
        "a notification with the header of another method",
        400,
        body=notification("notifications/cancelled", {"_meta": meta()}),
        headers={"Mcp-Method": "notifications/progress"},
        code=-32020,
        id=None,
        proves=req("http-17"),
    ),
    modern(
        "a notification of an unserved version",
        400,
        body=notification("notifications/cancelled", {"_meta": meta("2099-01-01")}),
        headers={"MCP-Protocol-Version": "2099-01-01", "Mcp-Method": None},
        code=-32022,
        id=None,
        proves=req("http-17"),
    ),
    *(
        modern(f"{kind} is posted", 400, body=body, headers={"Mcp-Method": None}, code=-32600, id=None)
        for kind, body in [
            ("a result", {"jsonrpc": "2.0", "id": 1, "result": {}}),
            ("an error", {"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "x"}}),
            ("a malformed result", MALFORMED),
            ("a batch", [DISCOVER]),
        ]
    ),
    modern(
        "no version header",
        400,
        code=-32020,
        says=("MCP-Protocol-Version", "it repeats the version in _meta, '2026-07-28'"),
        proves=req("http-73", "http-102"),
        headers={"MCP-Protocol-Version": None},
        policy=MODERN_ONLY,
    ),
    modern(
        "no version header, where older clients are served too",
        400,
        code=-32020,
        proves=req("http-102"),
        headers={"MCP-Protocol-Version": None},
    ),
    modern(
        "header and body name different versions",
        400,
        code=-32020,
        proves=req("http-69", "http-96", "http-102"),
        params={"_meta": meta("2099-01-01")},
    ),
    modern(
        "a served version in the header, a legacy one in the body",
        400,
        code=-32020,
        proves=req("http-69"),
        params={"_meta": meta(D)},
    ),
    modern(
        "an unknown version",
        400,
        code=-32022,
        proves=req("http-70", "ver-01"),
        headers={"MCP-Protocol-Version": "v999.0.0"},
        params={"_meta": meta("v999.0.0")},
    ),
    modern(
        "a legacy version in `_meta`",
        400,
        code=-32022,
        proves=req("http-70", "ver-01"),
        headers={"MCP-Protocol-Version": D},
        params={"_meta": meta(D)},
    ),
    modern(
        "a version in `_meta` that is empty",
        400,
        code=-32020,
        proves=req("http-69"),
        params={"_meta": meta("")},
    ),
    modern(
        "a version in `_meta` that is empty, and no header",
        400,
        code=-32020,
        headers={"MCP-Protocol-Version": None},
        params={"_meta": meta("")},
    ),
    # If no modern revision is served, a modern error would keep a client from trying initialize (ver-14).
    *(
        modern(
            f"no modern revision is served: a probe {kind}",
            400,
            "server/discover",
            code=-32600,
            says=("initialize",),
            policy=LEGACY_ONLY,
            **row,
        )
        for kind, row in [
            ("with all metadata", {}),
            ("without the version header", {"headers": {"MCP-Protocol-Version": None}}),
            ("without `_meta`", {"body": request("server/discover")}),
            ("with another version in `_meta`", {"params": {"_meta": meta("2099-01-01")}}),
            ("without the other headers", {"headers": {"Mcp-Method": None}}),
        ]
    ),
    modern(
        "no modern revision and no sessions are served",
        400,
        code=-32600,
        says=(D, C, B, A),
        policy={**LEGACY_ONLY, "sessions": False},
    ),
    modern(
        "no modern revision is served: only `_meta` is modern, which a legacy server ignores",
        200,
        headers={"MCP-Protocol-Version": None},
        policy={**LEGACY_ONLY, "sessions": False},
    ),
    modern("no modern revision is served: a handshake with modern headers", 200, "initialize", policy=LEGACY_ONLY),
    *(
        modern(
            f"`_meta` is {kind}",
            400,
            code=-32602,
            says=("_meta",),
            proves=req("http-105"),
            body=request("tools/list", params),
        )
        for kind, params in [
            ("missing, without params", None),
            ("missing", {}),
            ("empty", {"_meta": {}}),
            ("without a version", {"_meta": {"io.modelcontextprotocol/clientCapabilities": {}}}),
            ("without capabilities", {"_meta": {"io.modelcontextprotocol/protocolVersion": E}}),
            (
                "with invalid capabilities",
                {"_meta": {**meta(), "io.modelcontextprotocol/clientCapabilities": []}},
            ),
        ]
    ),
    modern("a version in `_meta` that is not a string", 400, code=-32020, params={"_meta": meta(20260728)}),
    modern("no method header", 400, code=-32020, proves=req("http-102"), headers={"Mcp-Method": None}),
    modern(
        "another method", 400, code=-32020, proves=req("http-96", "http-102"), headers={"Mcp-Method": "prompts/list"}
    ),
    modern("the method in capitals", 400, code=-32020, proves=req("http-100"), headers={"Mcp-Method": "TOOLS/LIST"}),
    *(
        modern(
            f"{method} without its name header",
            400,
            method,
            code=-32020,
            says=("Mcp-Name", source),
            proves=req("http-102"),
            params={source: "x"},
        )
        for method, source in [
            ("tools/call", "name"),
            ("prompts/get", "name"),
            ("resources/read", "uri"),
        ]
    ),
    *(
        modern(
            f"{method} with its name",
            200,
            method,
            params={source: "x"},
            headers={"Mcp-Name": "x"},
            known=method == "tools/call",
        )
        for method, source in [
            ("tools/call", "name"),
            ("prompts/get", "name"),
            ("resources/read", "uri"),
            ("tasks/get", "taskId"),
        ]
    ),
    modern("a call without a name needs no name header", 200, "tools/call"),
    modern("a name between spaces", 200, "tools/call", params={"name": "x"}, headers={"Mcp-Name": "  x  "}),
    modern(
        "a name in Base64",
        200,
        "tools/call",
        params={"name": "größe"},
        headers={"Mcp-Name": "=?base64?Z3LDtsOfZQ==?="},
        proves=req("http-91"),
    ),
    modern(
        "another name",
        400,
        "tools/call",
        code=-32020,
        params={"name": "x"},
        headers={"Mcp-Name": "y"},
        proves=req("http-96"),
    ),
    modern(
        "a malformed name", 400, "tools/call", code=-32020, params={"name": "x"}, headers={"Mcp-Name": "=?base64?!?="}
    ),
    modern("a name in the header only", 400, "tools/call", code=-32020, headers={"Mcp-Name": "y"}),
    modern("a subscription is answered by a stream", 200, "subscriptions/listen", answer="STREAM"),
    modern(
        "a subscription by a client that accepts no stream",
        406,
        "subscriptions/listen",
        code=-32600,
        headers={"Accept": "application/json"},
    ),
    *(
        modern(f"{method} is left to the dispatcher", 200, method, policy=policy, known=False, proves=req("http-71"))
        for method in ("initialize", "ping", "unknown/method")
        for policy in (EMPTY, MODERN_ONLY)
    ),
    Rule(
        "a handshake where only 2026-07-28 is served",
        400,
        -32022,
        proves=req("ver-12", "ver-18"),
        body=request("initialize", INITIALIZE),
        policy=MODERN_ONLY,
        id=1,
    ),
    Rule(
        "a request with a legacy header where only 2026-07-28 is served",
        400,
        -32022,
        (E,),
        req("http-70"),
        headers={"MCP-Protocol-Version": D},
        body=request("tools/list"),
        policy=MODERN_ONLY,
        id=1,
    ),
    Rule(
        "a legacy request where only 2026-07-28 is served",
        400,
        -32020,
        ("it names the version of the message, such as 2026-07-28",),
        proves=req("http-73"),
        body=request("tools/list"),
        policy=MODERN_ONLY,
        id=1,
    ),
]

HELLO64 = "=?base64?SGVsbG8=?="
PARAMETER_RULES = [
    call("no argument to mirror", 200, {"query": "x"}),
    call("no arguments", 200, None),
    call(
        "all arguments mirrored",
        200,
        {"region": "eu", "limit": 42, "dry": True, "where": {"zone": "a"}},
        {"Region": "eu", "Limit": "42", "Dry": "true", "Zone": "a"},
        proves=req("http-96"),
    ),
    call("null and absent", 200, {"region": None, "where": None}, proves=req("http-98")),
    call("an empty string", 200, {"region": ""}, {"Region": ""}),
    call("no header", 400, {"region": "eu"}, says=("Mcp-Param-Region",), proves=req("http-99", "http-102")),
    call("no header for a nested argument", 400, {"where": {"zone": "a"}}, proves=req("http-99")),
    call("another value", 400, {"region": "eu"}, {"Region": "us"}, proves=req("http-96", "http-102")),
    call("the value in another case", 400, {"region": "eu"}, {"Region": "EU"}, proves=req("http-100")),
    call("a header for null", 400, {"region": None}, {"Region": "eu"}, proves=req("http-96")),
    call("a header for an absent argument", 400, {}, {"Region": ""}, proves=req("http-96")),
    call("a header without a rule", 200, {"query": "x"}, {"Other": "x"}),
    call("Base64", 200, {"region": "Hello"}, {"Region": HELLO64}, proves=req("http-91")),
    call(
        "Base64 without its padding", 400, {"region": "Hello"}, {"Region": "=?base64?SGVsbG8?="}, proves=req("http-95")
    ),
    call("Base64 with junk", 400, {"region": "Hello"}, {"Region": "=?base64?SGVs!!!bG8=?="}, proves=req("http-95")),
    call(
        "Base64 of bytes that are not UTF-8",
        400,
        {"region": "\ufffd"},
        {"Region": "=?base64?/w==?="},
        proves=req("http-95"),
    ),
    call("a value that only looks like Base64", 200, {"region": "SGVsbG8="}, {"Region": "SGVsbG8="}),
    call("half a Base64 marker", 200, {"region": "=?base64?SGVsbG8="}, {"Region": "=?base64?SGVsbG8="}),
    call("a Base64 marker in capitals", 200, {"region": "=?BASE64?SGVsbG8=?="}, {"Region": "=?BASE64?SGVsbG8=?="}),
    call("Latin-1", 400, {"region": "gr\xf6\xdfe"}, {"Region": "gr\xf6\xdfe"}, proves=req("http-95")),
    *(
        call(f"{value!r} as {text!r}", 200, {"limit": value}, {"Limit": text}, proves=req("http-101"))
        for value, text in [(42, "42.0"), (42.0, "42"), (-7, "-7"), (0, "0"), (2**53 - 1, str(2**53 - 1)), (42, "042")]
    ),
    *(
        call(f"{value!r} as {text!r}", 400, {"limit": value}, {"Limit": text}, proves=req("http-96"))
        for value, text in [
            (42, "43"),
            (42, "42.5"),
            (42, "4.2e1"),
            (42, ""),
            (42, "0x2a"),
            (42, "9" * 400),
            (1, "true"),
        ]
    ),
    *(
        call(f"{value!r} is beyond the safe range", 400, {"limit": value}, {"Limit": str(value)}, proves=req("http-83"))
        for value in (2**53, -(2**53), 10**300, 1e300)
    ),
    *(
        call(f"{value!r} as {text!r}", 400, {"dry": value}, {"Dry": text}, proves=req("http-96"))
        for value, text in [(True, "True"), (True, "1"), (False, "true"), (True, "")]
    ),
    call("false", 200, {"dry": False}, {"Dry": "false"}),
    call("a value of the wrong type is left to the schema", 200, {"limit": "many"}, {"Limit": "many"}),
    call("an object cannot be mirrored", 400, {"region": {}}, {"Region": "{}"}),
    modern(
        "an unknown tool has no rules",
        200,
        "tools/call",
        params={"name": "other", "arguments": {"region": "eu"}},
        headers={"Mcp-Name": "other", "Mcp-Param-Region": "us"},
    ),
    modern("a name that is not a string", 200, "tools/call", params={"name": 7}),
]

OLD = [each.name for each in LEGACY]
RESPONSE = {"jsonrpc": "2.0", "id": 1, "result": {}}
LEGACY_RULES = [
    *(
        Rule(
            f"a handshake, {kind}",
            200,
            proves=req("http-52", "ver-08"),
            headers=headers,
            body=request("initialize", INITIALIZE),
        )
        for kind, headers in [
            ("plain", {}),
            ("with a version header", {"MCP-Protocol-Version": D}),
            ("with an unknown version in the header", {"MCP-Protocol-Version": "v999.0.0"}),
            ("with a modern version in the header", {"MCP-Protocol-Version": E}),
            ("with a header of the draft", {"Mcp-Method": "initialize"}),
        ]
    ),
    *(in_session("a request", 200, session=revision, proves=req("http-01", "http-18")) for revision in OLD),
    *(
        in_session(
            f"{kind} is posted",
            202,
            session=revision,
            body=body,
            proves=req("http-14", "http-125"),
            reply={"Content-Length": "0"},
        )
        for revision in OLD
        for kind, body in [
            ("a notification", notification("notifications/initialized")),
            ("a result", RESPONSE),
            ("an error", {"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "x"}}),
        ]
    ),
    *(
        in_session(
            "the stream of a session",
            200,
            session=revision,
            method="GET",
            answer="STREAM",
            proves=req("http-01", "http-33"),
        )
        for revision in OLD
    ),
    *(in_session("the end of a session", 204, session=revision, method="DELETE") for revision in OLD),
    *(
        Rule(
            f"{method} without a session id",
            400,
            -32600,
            ("Mcp-Session-Id",),
            req("http-56"),
            method=method,
            body=request("tools/list") if method == "POST" else None,
            id=1 if method == "POST" else None,
        )
        for method in ("GET", "POST", "DELETE")
    ),
    *(
        Rule(
            f"{method} in a session that has ended",
            404,
            -32600,
            ("initialize",),
            req("http-57"),
            method=method,
            headers={"Mcp-Session-Id": "ended"},
            body=request("tools/list") if method == "POST" else None,
        )
        for method in ("GET", "POST", "DELETE")
    ),
    Rule(
        "a handshake in a session that has ended",
        404,
        -32600,
        ("initialize",),
        req("http-57"),
        headers={"Mcp-Session-Id": "ended"},
        body=request("initialize", INITIALIZE),
    ),
    modern("a modern request with the id of a session that has ended", 200, headers={"Mcp-Session-Id": "ended"}),
    *(
        in_session(
            f"{method} in a session of another principal",
            403,
            code=-32600,
            method=method,
            principal="mallory",
        )
        for method in ("GET", "POST", "DELETE")
    ),
    *(
        in_session(
            f"{method} with the version {version!r}",
            400,
            session=revision,
            code=-32600,
            proves=req("http-65"),
            method=method,
            headers={"MCP-Protocol-Version": version},
        )
        for revision in (C, D)
        for method in ("GET", "POST", "DELETE")
        for version in ("v999.0.0", "")
    ),
    in_session(
        "a version that is known and not served",
        400,
        code=-32600,
        headers={"MCP-Protocol-Version": B},
        policy={"revisions": [REVISIONS[D]]},
        proves=req("http-65"),
    ),
    *(
        in_session(
            "the header has the version of the session", 200, session=each, headers={"MCP-Protocol-Version": each}
        )
        for each in OLD
    ),
    in_session("the header has another version", 200, headers={"MCP-Protocol-Version": C}),
    Rule(
        "no session and no version, without sessions",
        200,
        body=request("tools/list"),
        policy={"sessions": False},
        proves=req("http-64", "http-72"),
    ),
    Rule(
        "a batch, without sessions and version",
        200,
        body=[request("tools/list")],
        policy={"sessions": False},
        proves=req("http-64"),
    ),
    Rule(
        "a batch under the header of another version",
        400,
        -32600,
        headers={"MCP-Protocol-Version": C},
        body=[request("tools/list")],
        policy={"sessions": False},
    ),
    Rule("a handshake without sessions", 200, body=request("initialize", INITIALIZE), policy={"sessions": False}),
    Rule(
        "no version, where 2025-03-26 is not served",
        400,
        -32600,
        body=request("tools/list"),
        policy={"sessions": False, "revisions": [REVISIONS[D]]},
        id=1,
    ),
    Rule(
        "a response without sessions",
        400,
        -32600,
        ("sessions=False",),
        req("http-16"),
        body=RESPONSE,
        policy={"sessions": False},
    ),
    Rule(
        "a notification without sessions",
        202,
        body=notification("notifications/initialized"),
        policy={"sessions": False},
    ),
    in_session(
        "a batch with a request",
        200,
        session=B,
        body=[notification("notifications/x"), request("tools/list")],
    ),
    in_session(
        "a batch of a request, a response and an invalid message",
        200,
        session=B,
        body=[1, request("tools/list"), RESPONSE],
    ),
    *(
        in_session(
            f"a batch of an invalid message and {kind}", 400, session=B, code=-32600, says=("integer",), body=[1, *rest]
        )
        for kind, rest in [
            ("no other message", []),
            ("a notification", [notification("notifications/x")]),
            ("a response", [RESPONSE]),
            ("a malformed response", [MALFORMED]),
        ]
    ),
    in_session(
        "a batch of notifications", 202, session=B, body=[notification("notifications/x")] * 2, proves=req("http-14")
    ),
    in_session("a batch of responses", 202, session=B, body=[RESPONSE, {**RESPONSE, "id": 2}], proves=req("http-14")),
    in_session(
        "a batch of malformed notifications",
        400,
        session=B,
        code=-32600,
        body=[{"jsonrpc": "2.0", "method": "notifications/x", "params": 7}],
        proves=req("http-16"),
    ),
    in_session("a malformed response", 400, code=-32600, body=MALFORMED, proves=req("http-16")),
    in_session("a batch of malformed responses", 202, session=B, body=[MALFORMED]),
    Rule("a malformed response without sessions", 400, -32600, body=MALFORMED, policy={"sessions": False}),
    in_session("a handshake in a batch", 400, session=B, code=-32600, body=[request("initialize", INITIALIZE)]),
    *(in_session("a batch", 400, session=each, code=-32600, body=[request("tools/list")]) for each in (A, C, D)),
    in_session(
        "the draft's headers, right",
        200,
        body=request("tools/call", {"name": "x"}),
        headers={"Mcp-Method": "tools/call", "Mcp-Name": "x"},
    ),
    in_session(
        "the draft's method header, wrong",
        400,
        code=-32001,
        headers={"Mcp-Method": "prompts/list"},
        proves=req("draft-01"),
        id=1,
    ),
    in_session(
        "the draft's name header, wrong",
        400,
        code=-32001,
        body=request("tools/call", {"name": "x"}),
        headers={"Mcp-Name": "y"},
        id=1,
    ),
    in_session(
        "the draft's parameter header, wrong",
        400,
        code=-32001,
        body=request("tools/call", {"name": TOOL, "arguments": {"region": "eu"}}),
        headers={"Mcp-Param-Region": "us"},
        id=1,
    ),
    in_session(
        "the draft's parameter header, absent",
        200,
        body=request("tools/call", {"name": TOOL, "arguments": {"region": "eu"}}),
    ),
    Rule(
        "a handshake with a wrong method header",
        400,
        -32001,
        headers={"Mcp-Method": "x"},
        body=request("initialize", INITIALIZE),
        id=1,
    ),
]

# HTTP+SSE; here `session` is the session of a stream.
SSE_RULES = [
    Rule("the stream", 200, method="GET", path="/sse", policy=SSE, answer="STREAM", proves=req("sse-04")),
    Rule("the stream, with a slash", 200, method="GET", path="/sse/", policy=SSE, answer="STREAM"),
    Rule(
        "the stream for a client that accepts no stream",
        406,
        -32600,
        method="GET",
        path="/sse",
        headers={"Accept": "text/html"},
        policy=SSE,
    ),
    Rule("a POST to the stream", 405, -32600, path="/sse", policy=SSE, reply={"Allow": "GET, OPTIONS"}),
    Rule(
        "a GET of the message path",
        405,
        -32600,
        method="GET",
        path="/messages",
        policy=SSE,
        reply={"Allow": "POST, OPTIONS"},
    ),
    *(
        Rule(
            f"{kind} is posted",
            202,
            path="/messages?session={session}",
            session=A,
            body=body,
            policy=SSE,
            proves=req("sse-04"),
        )
        for kind, body in [
            ("a handshake", request("initialize", INITIALIZE)),
            ("a request", request("tools/list")),
            ("a notification", notification("notifications/initialized")),
            ("a response", RESPONSE),
        ]
    ),
    Rule(
        "with other parameters",
        202,
        path="/messages/?a=b&session={session}&c",
        session=A,
        body=request("ping"),
        policy=SSE,
    ),
    Rule(
        "any Accept header",
        202,
        path="/messages?session={session}",
        session=A,
        body=request("ping"),
        headers={"Accept": "x/y"},
        policy=SSE,
    ),
    Rule("a body that is not JSON", 400, -32700, path="/messages?session={session}", session=A, body=b"{", policy=SSE),
    Rule(
        "a batch is left to the session",
        202,
        path="/messages?session={session}",
        session=A,
        body=[request("ping")],
        policy=SSE,
    ),
    Rule("no session", 400, -32600, ("endpoint",), path="/messages", body=request("ping"), policy=SSE),
    Rule("an unknown session", 404, -32600, path="/messages?session=x", body=request("ping"), policy=SSE),
    Rule(
        "a session of another principal",
        403,
        -32600,
        path="/messages?session={session}",
        session=A,
        principal="mallory",
        body=request("ping"),
        policy=SSE,
    ),
    Rule("the stream where HTTP+SSE is not served", 404, -32600, method="GET", path="/sse", proves=req("sse-13")),
]

RULES: dict[str, list[Rule]] = {
    "paths": PATH_RULES,
    "websocket": WEBSOCKET_RULES,
    "origins": ORIGIN_RULES,
    "content": CONTENT_RULES,
    "modern": MODERN_RULES,
    "parameters": PARAMETER_RULES,
    "legacy": LEGACY_RULES,
    "http+sse": SSE_RULES,
}
