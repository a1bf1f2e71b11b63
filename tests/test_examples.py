"""The examples, run as a user runs them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from examples import blocking_client
from tests.requirements import req
from trio_mcp import RequestError, open_client
from trio_mcp.errors import SessionClosed

EXAMPLES = Path(__file__).parent.parent / "examples"
MODERN = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}


class Child:
    """The asyncio example in a separate process.  The test exchanges lines with it."""

    def __init__(self, code: str | None = None) -> None:
        command = [str(EXAMPLES / "asyncio_stdio.py")] if code is None else ["-c", code]
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def send(self, **message: Any) -> None:
        self.send_raw(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        return message

    def end(self) -> tuple[bytes, bytes]:
        rest, errors = self.process.communicate(timeout=60)
        return rest, errors


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.communicate()


@req("ver-08", "ver-09", "trans-01")
def test_a_client_of_each_era_is_served_over_one_pair_of_pipes(child: Child) -> None:
    child.send(id=1, method="initialize", params=INITIALIZE)
    assert child.receive()["result"]["protocolVersion"] == "2025-06-18"
    child.send(id=2, method="tools/call", params={"name": "echo", "arguments": {"text": "old"}})
    assert child.receive()["result"] == {"content": [{"type": "text", "text": "old"}]}
    child.send(id=3, method="tools/call", params={"name": "echo", "arguments": {"text": "new"}, "_meta": MODERN})
    assert child.receive()["result"]["resultType"] == "complete"


def test_progress_comes_before_the_result(child: Child) -> None:
    params = {"name": "count", "arguments": {"to": 2}, "_meta": {**MODERN, "progressToken": "t"}}
    child.send(id="a", method="tools/call", params=params)
    assert [child.receive()["params"]["progress"] for _ in range(2)] == [1, 2]
    assert child.receive()["result"]["content"] == [{"type": "text", "text": "counted to 2"}]


def test_a_cancelled_call_gets_no_answer_and_the_connection_continues(child: Child) -> None:
    child.send(id=1, method="tools/call", params={"name": "count", "arguments": {"to": 10**6}, "_meta": MODERN})
    child.send(method="notifications/cancelled", params={"requestId": 1})
    child.send(id=2, method="tools/call", params={"name": "echo", "arguments": {"text": "on"}, "_meta": MODERN})
    assert child.receive()["id"] == 2
    child.send(id=1, method="tools/call", params={"name": "echo", "arguments": {"text": "again"}, "_meta": MODERN})
    assert child.receive()["result"]["content"] == [{"type": "text", "text": "again"}]


@req("core-27", "core-29", "core-30")
@pytest.mark.parametrize(
    ("line", "code", "id"),
    [
        (b"junk\n", -32700, None),
        (b'{"id":7,"method":"tools/list"}\n', -32600, 7),
        (
            json.dumps({"jsonrpc": "2.0", "id": 8, "method": "no/such", "params": {"_meta": MODERN}}).encode() + b"\n",
            -32601,
            8,
        ),
        (
            json.dumps(
                {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"name": "no", "_meta": MODERN}}
            ).encode()
            + b"\n",
            -32602,
            9,
        ),
    ],
)
def test_the_connection_continues_after_bad_input(child: Child, line: bytes, code: int, id: int | None) -> None:
    child.send_raw(line)
    reply = child.receive()
    assert (reply["error"]["code"], reply["id"]) == (code, id)
    child.send(id=10, method="ping")
    assert child.receive() == {"jsonrpc": "2.0", "id": 10, "result": {}}


@pytest.mark.parametrize(
    "params", [{"name": ["x"]}, {"name": "echo", "arguments": [1]}, {"name": "echo", "arguments": {}}]
)
def test_wrong_arguments_get_an_invalid_params_error(child: Child, params: dict[str, Any]) -> None:
    child.send(id=1, method="tools/call", params={**params, "_meta": MODERN})
    assert child.receive()["error"]["code"] == -32602


def test_a_large_answer_arrives_whole_through_sockets() -> None:
    (ours_in, their_in), (ours_out, their_out) = socket.socketpair(), socket.socketpair()
    process = subprocess.Popen([sys.executable, str(EXAMPLES / "asyncio_stdio.py")], stdin=their_in, stdout=their_out)
    their_in.close()
    their_out.close()
    text = "x" * 4_000_000
    params = {"name": "echo", "arguments": {"text": text}, "_meta": MODERN}
    with ours_in, ours_out, ours_out.makefile("rb") as answers:
        ours_in.sendall(
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode() + b"\n"
        )
        assert json.loads(answers.readline())["result"]["content"][0]["text"] == text
        ours_in.shutdown(socket.SHUT_WR)
        assert answers.read() == b""
    assert process.wait(timeout=60) == 0


@req("core-31")
def test_a_failing_tool_fails_its_own_call_and_its_text_stays_local(child: Child) -> None:
    child.send(id=1, method="tools/call", params={"name": "divide", "arguments": {"a": 1, "b": 0}, "_meta": MODERN})
    assert child.receive()["error"] == {"code": -32603, "message": "the tool failed"}
    child.send(id=2, method="ping")
    assert child.receive()["id"] == 2
    _, errors = child.end()
    assert b"ZeroDivisionError" in errors


def test_the_end_of_input_ends_the_server_even_with_a_call_in_flight(child: Child) -> None:
    child.send(id=1, method="tools/call", params={"name": "count", "arguments": {"to": 10**6}, "_meta": MODERN})
    child.send(id=2, method="ping")
    assert child.receive()["id"] == 2
    rest, errors = child.end()
    assert (rest, errors, child.process.returncode) == (b"", b"", 0)


def test_calls_that_run_at_the_end_of_input_are_answered(child: Child) -> None:
    child.send(id=1, method="tools/call", params={"name": "count", "arguments": {"to": 5}, "_meta": MODERN})
    last = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {"_meta": MODERN}}
    child.send_raw(json.dumps(last).encode())  # without a newline
    rest, errors = child.end()
    assert sorted(json.loads(line)["id"] for line in rest.splitlines()) == [1, 2]
    assert (errors, child.process.returncode) == (b"", 0)


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25", "2026-07-28"])
async def test_our_own_client_calls_the_asyncio_server(revision: str) -> None:
    seen: list[float] = []
    async with open_client([sys.executable, str(EXAMPLES / "asyncio_stdio.py")], revision=revision) as client:
        assert [tool.name for tool in await client.list_tools()] == ["echo", "divide", "count"]
        counted = await client.call_tool(
            "count", {"to": 3}, returns=str, on_progress=lambda done, *_: seen.append(done)
        )
        assert (counted, seen) == ("counted to 3", [1, 2, 3])
        with trio.move_on_after(0.1) as scope:
            await client.call_tool("count", {"to": 10**6})
        assert scope.cancelled_caught
        assert await client.call_tool("echo", {"text": "on"}, returns=str) == "on"


def test_the_core_driven_from_asyncio_loads_no_trio() -> None:
    code = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import asyncio_stdio
print([name for name in ("trio", "h11", "wsproto", "anyio", "cattrs", "jsonschema_rs") if name in sys.modules])
"""
    rest, errors = Child(code).end()
    assert (rest.strip(), errors) == (b"[]", b"")


def test_a_first_call_is_made_by_hand_in_each_era() -> None:
    command = [sys.executable, str(EXAMPLES / "first_call.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stderr == ""
    assert shown.stdout.count('[{"type":"text","text":"Tool echo: Hello, Trio!"}]') == 2
    assert shown.stdout.count("ends with status 0") == 2


def test_both_eras_talk_without_any_io() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "two_eras.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stderr == ""
    for revision in ("2025-11-25", "2026-07-28"):
        assert f"   agreed on {revision}: " in shown.stdout
    assert shown.stdout.count("   the client has: Hello, Trio!") == 2


def test_each_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    for stem in {path.stem for path in EXAMPLES.glob("*.py")} - {
        "kitchen",
        "asyncio_tools",
    }:  # client.py starts the first; the two servers of asyncio import the second
        assert re.search(rf"\b{stem}\.py|\"{stem}\"|import {stem}\b", tests), stem


def test_a_report_outlives_its_client(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-X", "dev", str(EXAMPLES / "long_report.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "begun: working",
        "asked: How shall it end?",
        "result: Chapter 1. Chapter 2. Chapter 3. A cheerful ending.",
    ]
    assert done.stderr == ""
    assert (tmp_path / "reports.db").exists()


# A client without an event loop.

PEER = """
import json, sys, time
revision, mode = sys.argv[1:]
answers = []
def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    method, id = asked.get("method"), asked.get("id")
    if method is None:
        answers.append(asked)
        if len(answers) == 2:
            say(id=called, result={"content": [], "structuredContent": {"answers": answers}})
        continue
    if method == "server/discover" and revision == "2026-07-28":
        say(id=id, result={"supportedVersions": [revision], "capabilities": {"tools": {}}, "resultType": "complete"})
    elif method == "initialize":
        info = {"name": "peer", "version": "1"}
        say(id=id, result={"protocolVersion": revision, "capabilities": {"tools": {}}, "serverInfo": info})
    elif method != "tools/call":
        if id is not None:
            say(id=id, error={"code": -32601, "message": "no"})
    elif mode == "dies":
        sys.exit(3)
    elif mode == "asks":
        called = id
        say(id="q", method="ping")
        say(id="r", method="roots/list")
    elif mode != "hangs":
        for number in range(3):
            token = asked["params"]["_meta"]["progressToken"]
            say(method="notifications/progress", params={"progressToken": token, "progress": number})
        print("junk", flush=True)
        say(id=id, result={"content": [], "structuredContent": asked["params"]["arguments"], "resultType": "complete"})
"""


def blocking(revision: str, mode: str) -> blocking_client.BlockingClient:
    return blocking_client.BlockingClient([sys.executable, "-c", PEER, revision, mode])


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25", "2026-07-28"])
def test_a_blocking_client_calls_and_receives_progress(revision: str) -> None:
    heard: list[float] = []
    large = {"text": "x" * 3_000_000}
    with blocking(revision, "answers") as client:
        assert client.connection.session.terms is not None
        assert str(client.connection.session.terms.revision) == revision
        result = client.call_tool("t", large, on_progress=lambda done, total, message: heard.append(done))
        assert result["structuredContent"] == large
        assert heard == [0, 1, 2]
        with pytest.raises(RequestError, match="no"):
            client.request("tools/list")
    assert client.child.returncode == 0


def test_a_blocking_client_continues_after_a_timeout() -> None:
    with blocking("2025-11-25", "hangs") as client:
        with pytest.raises(TimeoutError, match="tools/call"):
            client.call_tool("t", timeout=0)
        with pytest.raises(RequestError):
            client.request("tools/list")


def test_a_blocking_client_raises_if_its_server_ends() -> None:
    with blocking("2025-11-25", "dies") as client, pytest.raises(SessionClosed):
        client.call_tool("t")
    assert client.child.returncode == 3
    with pytest.raises(SessionClosed):
        blocking_client.BlockingClient([sys.executable, "-c", "pass"])


def test_a_blocking_client_answers_requests_of_its_server() -> None:
    """It answers a ping, and a request of a capability that it has not declared with an error."""
    with blocking("2025-11-25", "asks") as client:
        pong, refusal = client.call_tool("t")["structuredContent"]["answers"]
    assert (pong["id"], pong["result"]) == ("q", {})
    assert (refusal["id"], refusal["error"]["code"]) == ("r", -32601)


def test_a_blocking_client_loads_no_event_loop() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import blocking_client
blocking_client.BlockingClient([sys.executable, {str(EXAMPLES / "echo.py")!r}]).close()
print([name for name in ("trio", "asyncio", "anyio", "h11", "wsproto", "cattrs") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
