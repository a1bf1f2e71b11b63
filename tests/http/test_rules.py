"""The table of `tests.core.http_rules` over real sockets.

The default suite has the first row of each table with each status and code.  `tests/core` tries all rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import h11
import pytest
import trio

from tests.core.http_rules import RULES, SCHEMA, TOOL, Rule
from tests.http.client import Answer, HttpClient
from tests.http.served import listening
from trio_mcp import Context, Server
from trio_mcp.core.http import Headers, HttpRequest
from trio_mcp.types import Tool

ANONYMOUS = "anonymous"


def server_for(rule: Rule) -> Server:
    policy = rule.policy
    more = {"revisions": [each.name for each in policy["revisions"]]} if "revisions" in policy else {}
    if "limits" in policy:
        more["limits"] = policy["limits"]
    server = Server("rules", **more)

    async def execute(ctx: Context, arguments: dict[str, Any]) -> str:
        return "done"

    server.add_tool(Tool(TOOL, SCHEMA), execute)
    return server


async def from_the_header(request: HttpRequest) -> str:
    return request.headers.get("Authorization", ANONYMOUS)


def options_for(rule: Rule) -> dict[str, Any]:
    options = {name: value for name, value in rule.policy.items() if name not in ("revisions", "limits")}
    options.setdefault("websocket_path", None)
    return {**options, "authenticate": from_the_header}


def request_bytes(rule: Rule, session: str) -> bytes:
    """The bytes of the request, because no client library sends some of the rows."""
    fields = rule.fields(session)
    names = {name.lower() for name, _ in fields}
    # A request without Host is valid in HTTP/1.0 only.
    version = "1.1" if "host" in names else "1.0"
    if rule.body is not None and not names & {"content-length", "transfer-encoding"}:
        fields.append(("Content-Length", str(len(rule.content))))
    if rule.principal is not None:
        fields.append(("Authorization", rule.principal))
    lines = [
        f"{rule.method} {rule.path.replace('{session}', session)} HTTP/{version}",
        *(f"{name}: {value}" for name, value in fields),
    ]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + rule.content


async def exchange(stream: trio.abc.Stream, rule: Rule, data: bytes) -> Answer:
    """The response; only the head if the body is an event stream, because that has no end."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=rule.method, target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    await stream.send_all(data)
    head: h11.Response | None = None
    body = b""
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Response):
            head = event
            if dict(head.headers).get(b"content-type") == b"text/event-stream":
                break
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            raise AssertionError(event)
    assert head is not None
    return Answer(head.status_code, Headers(head.headers), body)


async def session_for(rule: Rule, web: HttpClient) -> str:
    if rule.session is None:
        return "unused"
    if rule.path.startswith("/messages"):
        stream = await web.open(path="/sse")  # closed with the client
        event = await stream.event()
        assert event.event == "endpoint"
        return event.data.decode().partition("session=")[2]
    return await web.initialize(rule.session)


def rows(
    found: Iterable[tuple[str, Rule]], key: Callable[[str, Rule], Hashable], others: pytest.MarkDecorator
) -> list[Any]:
    """A case for each row.  The first row of each key has the speed of its test, the others have the mark."""
    params, seen = [], set()
    for table, rule in found:
        marks = [rule.proves, *([others] if key(table, rule) in seen else [])]
        seen.add(key(table, rule))
        params.append(pytest.param(rule, id=f"{table}: {rule.about}", marks=marks))
    return params


EVERY_ROW = [(table, rule) for table, rules in RULES.items() for rule in rules]


@pytest.mark.parametrize("rule", rows(EVERY_ROW, lambda table, rule: (table, rule.status, rule.code), pytest.mark.full))
async def test_every_request_gets_the_answer_of_the_table(rule: Rule) -> None:
    async with listening(server_for(rule), **options_for(rule)) as web:
        session = await session_for(rule, web)
        with trio.fail_after(60):
            async with await web.connect() as stream:
                answer = await exchange(stream, rule, request_bytes(rule, session))
        status = rule.status if rule.known else 404
        assert answer.status == (rule.at_once or status), answer.body
        for name, value in rule.reply.items():
            assert answer.headers.get(name) == value, name
        if rule.code is not None:
            error = answer.json
            assert error["error"]["code"] == rule.code
            assert error.get("id") == rule.id
            assert rule.at_once or all(part in error["error"]["message"] for part in rule.says), error
            assert answer.headers["Content-Length"] == str(len(answer.body))
            assert session not in answer.body.decode()
        elif not rule.known:
            assert answer.code == -32601
        elif rule.status == 200:
            kinds = {"JSON": ["application/json"], "STREAM": ["text/event-stream"]}
            assert answer.type in kinds.get(rule.answer, ["application/json", "text/event-stream"])
            assert answer.headers.get("X-Accel-Buffering") == ("no" if answer.type != "application/json" else None)
            if answer.type == "application/json":
                json.loads(answer.body)
        else:
            assert answer.body == b""
