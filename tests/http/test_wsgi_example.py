"""The example that serves over WSGI: as a process, and under the validator of wsgiref."""

from __future__ import annotations

import importlib.util
import io
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
import trio

from tests.http.client import Answer, HttpClient, notification, request
from tests.server.raw_client import CLIENT_INFO, LATEST, Object, every_revision, legacy
from trio_mcp.core.http import Headers

EXAMPLE = Path(__file__).parents[2] / "examples" / "wsgi_json.py"
BATCHES = "2025-03-26"


@asynccontextmanager
async def process(example: Path = EXAMPLE) -> AsyncIterator[tuple[HttpClient, list[str]]]:
    """A client of the running example, and its standard error after Ctrl-C has ended it."""
    command = [sys.executable, "-W", "error", str(example), "0"]
    running = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert running.stderr is not None
        serving = ""
        while not serving.endswith("\n"):
            byte = bytes(await running.stdout.receive_some(1))
            assert byte, bytes(await running.stderr.receive_some())
            serving += byte.decode()
        authority = serving.removeprefix("serving http://").removesuffix("/mcp\n")
        host, _, port = authority.partition(":")

        async def connect() -> trio.abc.Stream:
            return await trio.open_tcp_stream(host, int(port))

        web, errors = HttpClient(connect, host=authority), list[str]()
        yield web, errors
        await web.aclose()
        running.send_signal(signal.SIGINT)
        errors.append(b"".join([bytes(data) async for data in running.stderr]).decode())
        assert await running.wait() == 0
    finally:
        running.kill()
        with trio.CancelScope(shield=True):
            await running.wait()


def echo(text: str) -> Object:
    return {"name": "echo", "arguments": {"text": text}}


def initialize(revision: str) -> Object:
    return {"protocolVersion": revision, "capabilities": {}, "clientInfo": CLIENT_INFO}


def text_of(answer: Answer) -> str:
    assert (answer.status, answer.type) == (200, "application/json")
    text: str = answer.result["content"][0]["text"]
    return text


@every_revision
async def test_each_post_of_every_revision_is_served_independently(revision: str) -> None:
    async with process() as (web, errors):
        if revision == LATEST:
            opened = await web.call("server/discover")
            assert revision in opened.result["supportedVersions"]
        else:
            opened = await web.call("initialize", initialize(revision), revision=revision)
            assert opened.result["protocolVersion"] == revision
            accepted = await web.post(notification("notifications/initialized"), revision=revision)
            assert (accepted.status, accepted.body) == (202, b"")
        assert "Mcp-Session-Id" not in opened.headers
        listed = await web.call("tools/list", revision=revision)
        assert [tool["name"] for tool in listed.result["tools"]] == ["echo", "divide"]
        assert text_of(await web.call("tools/call", echo("Grüße\u2028🎺"), revision=revision)) == "Grüße\u2028🎺"
    assert errors == [""]


async def test_a_failing_tool_fails_only_its_call_and_its_text_is_not_sent() -> None:
    async with process() as (web, errors):
        failed = await web.call("tools/call", {"name": "divide", "arguments": {"a": 1, "b": 0}})
        assert (failed.code, failed.message["error"]["message"]) == (-32603, "the tool failed")
        assert text_of(await web.call("tools/call", echo("on"))) == "on"
    assert "ZeroDivisionError" in errors[0]


async def test_an_incomplete_request_does_not_delay_other_clients() -> None:
    async with process() as (web, _):
        slow = await web.link()
        await slow.stream.send_all(b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert text_of(await web.call("tools/call", echo("quick"))) == "quick"


def test_no_event_loop_is_loaded() -> None:
    code = f"""
import runpy, sys
runpy.run_path({str(EXAMPLE)!r})
print([name for name in ("trio", "h11", "wsproto", "asyncio", "anyio", "cattrs") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# The application as a WSGI callable


def module() -> Any:
    spec = importlib.util.spec_from_file_location("wsgi_json", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def application() -> Any:
    return module().application


def ask(
    application: Any, method: str, body: bytes = b"", headers: Mapping[str, str] | None = None, **environ: str
) -> Answer:
    """The response that a WSGI server would send."""
    whole: dict[str, Any] = {"REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": "/mcp", "QUERY_STRING": ""}
    whole |= {"wsgi.input": io.BytesIO(body), **environ}
    if method == "POST":
        whole = {"CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(body)), **whole}
    for name, value in (headers or {}).items():
        whole["HTTP_" + name.upper().replace("-", "_")] = value
    setup_testing_defaults(whole)
    begun: list[Any] = []

    def start_response(status: str, fields: list[tuple[str, str]], exc_info: Any = None) -> Any:
        begun.append((int(status.split()[0]), Headers(fields)))
        return lambda data: None

    parts = application(whole, start_response)
    answer = b"".join(parts)
    if hasattr(parts, "close"):
        parts.close()
    ((status, fields),) = begun
    return Answer(status, fields, answer)


def post(application: Any, message: Any, revision: str, **headers: str) -> Answer:
    standard = HttpClient.headers_for(HttpClient(lambda: None), message, revision, None)  # type: ignore[arg-type,return-value]
    fields = {name: value for name, value in standard.items() if value is not None and name != "Content-Type"}
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return ask(application, "POST", data, {**fields, **headers})


@every_revision
def test_answers_are_valid_wsgi(application: Any, revision: str) -> None:
    message = request("tools/call", echo("hello"), revision=revision)
    assert text_of(post(validator(application), message, revision)) == "hello"


@pytest.mark.parametrize(
    ("status", "code", "asked"),
    [
        (405, -32600, {"method": "GET"}),
        (405, -32600, {"method": "DELETE"}),
        (404, -32600, {"method": "POST", "PATH_INFO": "/other"}),
        (404, -32600, {"method": "POST", "PATH_INFO": "/mcp?"}),
        (403, -32600, {"method": "POST", "headers": {"Origin": "https://evil.example"}}),
        (421, -32600, {"method": "POST", "headers": {"Host": "evil.example"}}),
        (406, -32600, {"method": "POST", "headers": {"Accept": "text/event-stream"}}),
        (411, -32600, {"method": "POST", "CONTENT_LENGTH": ""}),
        (413, -32600, {"method": "POST", "CONTENT_LENGTH": str(10**9)}),
        (415, -32600, {"method": "POST", "CONTENT_TYPE": "text/plain"}),
        (400, -32700, {"method": "POST", "body": b"{"}),
    ],
)
def test_refusals_are_valid_wsgi(application: Any, status: int, code: int, asked: dict[str, Any]) -> None:
    answer = ask(validator(application), **asked)
    assert (answer.status, answer.code) == (status, code)


def test_a_too_long_body_is_refused_before_it_is_read(application: Any) -> None:
    class UnreadableBody(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise AssertionError("read")

    refused = ask(application, "POST", CONTENT_LENGTH=str(10**9), **{"wsgi.input": UnreadableBody()})  # type: ignore[arg-type]
    assert refused.status == 413


def test_a_page_of_an_allowed_origin_can_read_answers_and_refusals(application: Any) -> None:
    origin = {"Origin": "http://localhost:5173"}
    preflight = ask(validator(application), "OPTIONS", headers=origin)
    assert (preflight.status, preflight.headers["Access-Control-Allow-Origin"]) == (204, origin["Origin"])
    message = json.dumps(request("tools/list", revision="2025-06-18")).encode()
    for status, body, environ in ((200, message, {}), (400, b"{", {}), (411, message, {"CONTENT_LENGTH": ""})):
        answer = ask(validator(application), "POST", body, origin, **environ)
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, origin["Origin"])


def test_an_application_under_a_prefix_serves_both_spellings_of_its_path(application: Any) -> None:
    message = json.dumps(request("tools/list", revision="2025-06-18")).encode()
    for path in ("/mcp", "/mcp/"):
        answer = ask(validator(application), "POST", message, SCRIPT_NAME="/tools", PATH_INFO=path)
        assert (answer.status, len(answer.result["tools"])) == (200, 2)


@pytest.mark.parametrize(
    ("revision", "status", "code", "method", "params"),
    [
        (LATEST, 404, -32601, "no/such", {}),
        ("2025-06-18", 200, -32601, "no/such", {}),
        (LATEST, 200, -32602, "tools/call", {"name": "no"}),
        ("2025-06-18", 200, -32602, "tools/call", {"name": "no"}),
        (LATEST, 406, -32600, "subscriptions/listen", {"notifications": {}}),
    ],
)
def test_an_error_has_the_status_of_its_revision(
    application: Any, revision: str, status: int, code: int, method: str, params: Object
) -> None:
    answer = post(validator(application), request(method, params, revision=revision), revision)
    assert (answer.status, answer.code) == (status, code)


@legacy
def test_batches_are_answered_in_revisions_with_batches(application: Any, revision: str) -> None:
    batch = [request("tools/call", echo(text), id=text, revision=revision) for text in "ab"]
    answer = post(validator(application), batch, revision, **{"MCP-Protocol-Version": revision})
    if revision == BATCHES:
        assert [each["id"] for each in answer.json] == ["a", "b"]
    else:
        assert (answer.status, answer.code) == (400, -32600)


def test_a_batch_that_cancels_all_its_requests_gets_no_response(application: Any) -> None:
    asked = request("tools/call", echo("never"), revision=BATCHES)
    answer = post(application, [asked, notification("notifications/cancelled", {"requestId": 1})], BATCHES)
    assert (answer.status, answer.body) == (202, b"")
