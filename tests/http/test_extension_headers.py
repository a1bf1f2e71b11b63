"""Extensions over HTTP: the headers of their methods, and the status of refused requests."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.served import served
from tests.requirements import req
from tests.server.raw_client import CAPABILITIES, CLIENT_INFO, LATEST
from trio_mcp import Server
from trio_mcp.core import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_VERSION

PING = "com.example/ping"
DECLARING = {**CAPABILITIES[LATEST], "extensions": {PING: {}}}
META = {META_VERSION: LATEST, META_CLIENT_INFO: CLIENT_INFO, META_CLIENT_CAPABILITIES: DECLARING}


def pinging(received: list[int] | None = None) -> Server:
    server = Server("pinging")
    ext = server.extension(PING)

    @ext.method(PING, mcp_name="target")
    async def ping(target: str) -> dict[str, str]:
        return {"target": target}

    @ext.notification("com.example/heard")
    async def on_heard(n: int) -> None:
        if received is not None:
            received.append(n)

    return server


@req("http-75", "http-91", "http-95")
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Mcp-Name": "moon"}, 200, None),
        ({"Mcp-Name": "=?base64?bW9vbg==?="}, 200, None),
        ({"Mcp-Name": "sun"}, 400, -32020),
        ({"Mcp-Name": None}, 200, None),  # a client may not know that the method needs the header
        ({"Mcp-Name": "moon", "Mcp-Method": "tools/call"}, 400, -32020),
        ({"Mcp-Name": "moon", "Mcp-Method": None}, 400, -32020),
    ],
)
async def test_the_headers_of_a_method_must_match_the_body(
    headers: dict[str, str | None], status: int, code: int | None, autojump_clock: MockClock
) -> None:
    async with served(pinging()) as web:
        answer = await web.call(PING, {"target": "moon", "_meta": META}, headers=headers)
        assert (answer.status, answer.code) == (status, code)


async def test_a_session_allows_missing_headers_but_no_wrong_ones(autojump_clock: MockClock) -> None:
    async with served(pinging()) as web:
        session = await web.initialize("2025-11-25", {"experimental": {PING: {}}})
        for headers, status in ((None, 200), ({"Mcp-Name": "moon"}, 200), ({"Mcp-Name": "sun"}, 400)):
            answer = await web.call(PING, {"target": "moon"}, session=session, headers=headers)
            assert answer.status == status


@req("ver-06")
async def test_a_refusal_has_the_status_of_its_code(autojump_clock: MockClock) -> None:
    async with served(pinging()) as web:
        answer = await web.call(PING, {"target": "moon"}, headers={"Mcp-Name": "moon"})
        assert (answer.status, answer.code) == (400, -32021)
        answer = await web.call("com.example/unknown")
        assert (answer.status, answer.code) == (404, -32601)
        session = await web.initialize("2025-11-25")
        answer = await web.call(PING, {"target": "moon"}, session=session)
        assert (answer.status, answer.code) == (200, -32021)


async def test_a_notification_needs_no_session(autojump_clock: MockClock) -> None:
    received: list[int] = []
    async with served(pinging(received)) as web:
        for params, status in (({"n": 1, "_meta": META}, 202), ({"n": 2}, 202), ({"n": 3, "_meta": {**META}}, 202)):
            note: Any = {"jsonrpc": "2.0", "method": "com.example/heard", "params": params}
            answer = await web.post(note)
            assert (answer.status, answer.body) == (status, b"")
        await wait_all_tasks_blocked()
    assert received == [1, 3]
