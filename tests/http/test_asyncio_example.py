"""The example that serves HTTP on asyncio, in its own process: sessions, streams, and clients that disconnect."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from tests.http.client import Cut, HttpClient, notification, request
from tests.http.test_wsgi_example import process
from tests.requirements import req
from tests.server.raw_client import CLIENT_INFO, LATEST, Object, every_revision, legacy
from trio_mcp import RequestError, open_client

EXAMPLE = Path(__file__).parents[2] / "examples" / "asyncio_http.py"


def call(name: str, **arguments: object) -> Object:
    return {"name": name, "arguments": arguments}


async def session_of(web: HttpClient, revision: str) -> str:
    params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": CLIENT_INFO}
    opened = await web.call("initialize", params, revision=revision)
    assert opened.result["protocolVersion"] == revision
    session: str = opened.headers["Mcp-Session-Id"]
    assert (await web.post(notification("notifications/initialized"), revision=revision, session=session)).status == 202
    return session


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_the_client_calls_gets_progress_and_cancels(revision: str) -> None:
    async with process(EXAMPLE) as (web, errors):
        url = f"http://{web.headers['Host']}/mcp"
        async with open_client(url, revision=revision) as client:
            assert [tool.name for tool in await client.list_tools()] == ["echo", "divide", "count"]
            assert await client.call_tool("echo", {"text": "Grüße\u2028🎺"}, returns=str) == "Grüße\u2028🎺"
            seen: list[float] = []
            counted = await client.call_tool(
                "count", {"to": 3}, returns=str, on_progress=lambda done, *_: seen.append(done)
            )
            assert (counted, seen) == ("counted to 3", [1, 2, 3])
            with trio.move_on_after(0.1) as scope:
                await client.call_tool("count", {"to": 10**6})
            assert scope.cancelled_caught
            with pytest.raises(RequestError, match="echo"):
                await client.call_tool("echo", {"text": 7})
            assert await client.call_tool("echo", {"text": "on"}, returns=str) == "on"
    assert errors == [""]


@every_revision
async def test_several_clients_at_once_have_their_own_answers(revision: str) -> None:
    texts: dict[int, str] = {}

    async def visit(web: HttpClient, number: int) -> None:
        session = None if revision == LATEST else await session_of(web, revision)
        for _ in range(3):
            params = call("echo", text=str(number))
            answer = await web.call("tools/call", params, id=1, revision=revision, session=session)
            texts[number] = answer.result["content"][0]["text"]

    async with process(EXAMPLE) as (web, errors), trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(visit, web, number)
    assert texts == {number: str(number) for number in range(10)}
    assert errors == [""]


@req("http-28")
async def test_the_end_of_a_session_ends_its_stream_and_its_calls() -> None:
    revision = "2025-06-18"
    async with process(EXAMPLE) as (web, _):
        session = await session_of(web, revision)
        message = request("tools/call", call("count", to=10**6), id="c", revision=revision, progress="t")
        async with (
            await web.open(session=session, revision=revision) as standing,
            await web.open(message, session=session, revision=revision) as calling,
        ):
            assert (await calling.message())["params"]["progress"] == 1
            head = {"Mcp-Session-Id": session}
            assert (await web.send("DELETE", "/mcp", head)).status == 204
            assert await standing.rest() == []
            assert {each["method"] for each in await calling.rest()} <= {"notifications/progress"}
        assert (await web.send("DELETE", "/mcp", head)).status == 404


@legacy
async def test_a_session_refuses_unknown_ids_and_resumption(revision: str) -> None:
    async with process(EXAMPLE) as (web, _):
        session = await session_of(web, revision)
        resumed = {"Mcp-Session-Id": session, "Accept": "text/event-stream", "Last-Event-ID": "1-1"}
        assert (await web.send("GET", "/mcp", resumed)).status == 400
        stranger = {"Mcp-Session-Id": "stranger", "Accept": "text/event-stream"}
        assert (await web.send("GET", "/mcp", stranger)).status == 404
        assert (await web.call("tools/list", revision=revision)).status == 400
        again = await web.call("tools/list", revision=revision, session=session)
        assert len(again.result["tools"]) == 3


async def test_initialize_that_is_refused_opens_no_session() -> None:
    async with process(EXAMPLE) as (web, _):
        answer = await web.call("initialize", {}, revision="2025-06-18")
        assert (answer.status, answer.code) == (200, -32602)
        assert "Mcp-Session-Id" not in answer.headers


@pytest.mark.parametrize("revision", ["2025-06-18", LATEST])
async def test_a_client_that_leaves_a_call_disturbs_no_other_call(revision: str) -> None:
    async with process(EXAMPLE) as (web, errors):
        session = None if revision == LATEST else await session_of(web, revision)
        message = request("tools/call", call("count", to=30), revision=revision, progress="t")
        async with await web.open(message, session=session, revision=revision) as calling:
            await calling.message()
        answer = await web.call("tools/call", call("count", to=50), id=2, revision=revision, session=session)
        assert answer.result["content"][0]["text"] == "counted to 50"
    assert errors == [""]


async def test_a_failing_tool_fails_only_its_call_and_its_text_is_not_sent() -> None:
    async with process(EXAMPLE) as (web, errors):
        failed = await web.call("tools/call", call("divide", a=1, b=0))
        assert (failed.code, failed.message["error"]["message"]) == (-32603, "the tool failed")
        assert (await web.call("tools/call", call("divide", a=1, b=2))).result["content"][0]["text"] == "0.5"
    assert "ZeroDivisionError" in errors[0]


async def test_a_client_that_does_not_wait_for_its_response_is_closed() -> None:
    async with process(EXAMPLE) as (web, errors):
        session = await session_of(web, "2025-11-25")
        head = f"GET /mcp HTTP/1.1\r\nHost: {web.headers['Host']}\r\nMcp-Session-Id: {session}\r\n\r\n".encode()
        assert (await web.raw(head * 2)).count(b"HTTP/1.1") <= 1
        assert len((await web.call("tools/list", session=session)).result["tools"]) == 3
    assert errors == [""]


async def test_bad_requests_are_refused_and_the_server_continues() -> None:
    async with process(EXAMPLE) as (web, errors):
        assert (await web.send("POST", "/mcp", {"Host": "evil.example"}, b"{}")).status == 421
        assert (await web.send("POST", "/other", {}, b"{}")).status == 404
        assert (await web.call("subscriptions/listen", {"notifications": {}})).code == -32601
        assert await web.raw(b"junk\r\n\r\n") == b""
        length = {"Content-Type": "application/json", "Content-Length": str(17 * 1024 * 1024)}
        link = await web.link()
        await link.ask("POST", "/mcp", {**web.headers, **length}, b"x" * 17 * 1024 * 1024)
        with suppress(
            Cut
        ):  # the server does not read the rest of the body, so the connection may break before the refusal arrives
            assert (await link.head()).status_code == 413
        head = f"GET /mcp HTTP/1.1\r\nHost: {web.headers['Host']}\r\n\r\n".encode()
        assert (await web.raw(head * 3 + b"junk\r\n\r\n")).count(b"HTTP/1.1 400") == 3
        assert (await web.call("tools/list")).status == 200
    assert errors == [""]


def test_no_event_loop_is_loaded() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import asyncio_http
print([name for name in ("trio", "wsproto", "anyio", "cattrs", "jsonschema_rs") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
