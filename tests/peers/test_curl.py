"""curl as a client of the server: unusual requests that HTTP allows, sent by a real HTTP client."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.http.client import HttpClient, notification, request
from tests.http.served import listening
from tests.peers.installed import needs, tool
from tests.requirements import req
from tests.server.raw_client import CAPABILITIES, CLIENT_INFO
from trio_mcp import Context, Server
from trio_mcp.core.http import EventReader, Headers, SseEvent

pytestmark = pytest.mark.full  # not every machine has curl

LEGACY, MODERN = "2025-11-25", "2026-07-28"
STREAM = "text/event-stream"


@attrs.frozen
class CurlResult:
    """The output of curl: all response heads (an informational one comes first), the body, and the figures of curl."""

    heads: tuple[bytes, ...]
    body: bytes
    exit: int
    figures: Mapping[str, Any] = attrs.field(repr=False)

    @property
    def statuses(self) -> list[int]:
        return [int(head.split()[1]) for head in self.heads]

    @property
    def status(self) -> int:
        return self.statuses[-1]

    @property
    def headers(self) -> Headers:
        lines = self.heads[-1].split(b"\r\n")[1:]
        return Headers([(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)])

    @property
    def message(self) -> Any:
        """The last message in the body."""
        if self.headers["Content-Type"] != STREAM:
            return json.loads(self.body)
        events = EventReader(1024 * 1024).feed(self.body)
        return json.loads([each.data for each in events if isinstance(each, SseEvent) and each.data][-1])

    @property
    def text(self) -> str:
        text: str = self.message["result"]["content"][0]["text"]
        return text


def _parsed(done: subprocess.CompletedProcess[bytes]) -> CurlResult:
    heads, rest = [], done.stdout
    while rest.startswith(b"HTTP/"):
        head, _, rest = rest.partition(b"\r\n\r\n")
        heads.append(head)
    return CurlResult(tuple(heads), rest, done.returncode, json.loads(done.stderr.splitlines()[-1]))


class Site:
    """A server, and curl to visit it with."""

    def __init__(self, web: HttpClient) -> None:
        self.host = web.headers["Host"]
        self.url = f"http://{self.host}/mcp"
        self.headers_for = web.headers_for
        self.cancelled = trio.Event()  # a call of `stay` was cancelled
        self.program = needs("curl", lambda: tool("curl"))

    async def disconnect_after(self, message: Any, after: bytes) -> None:
        """Post the message, and disconnect after these bytes of the response have come."""
        options = [part for each in self.headers_for(message, MODERN, None).items() for part in ("-H", ": ".join(each))]
        command = [self.program, "-sS", "--no-buffer", *options, "--data-binary", json.dumps(message), self.url]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            received = b""
            while after not in received:
                more = await process.stdout.receive_some()
                assert more, received
                received += more
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stdout.aclose()

    async def curl(self, *arguments: str, body: bytes | None = None, url: str | None = None) -> CurlResult:
        command = [self.program, "-sS", "-i", "--no-buffer", "--max-time", "60", "-w", "%{stderr}\n%{json}"]
        if body is not None:
            command += ["--data-binary", "@-"]
        done = await trio.run_process(
            [*command, *arguments, url or self.url],
            stdin=body or b"",
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        return _parsed(done)

    async def post(
        self,
        message: Any,
        *arguments: str,
        revision: str = MODERN,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> CurlResult:
        fields = {**self.headers_for(message, revision, session), **(headers or {})}
        options = [part for name, value in fields.items() for part in ("-H", f"{name}: {value}")]
        return await self.curl(*options, *arguments, body=json.dumps(message).encode(), url=url)


def call_of(name: str, progress: Any = None, **arguments: Any) -> Any:
    return request("tools/call", {"name": name, "arguments": arguments}, progress=progress)


ECHO = call_of("echo", text="hello")


@contextlib.asynccontextmanager
async def visited_by_curl(**options: Any) -> AsyncIterator[Site]:
    server = Server("awkward")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def told(ctx: Context) -> str:
        await ctx.progress(1)
        return "told"

    @server.tool
    async def stay(ctx: Context) -> str:
        await ctx.progress(1)
        try:
            await trio.sleep_forever()
        finally:
            site.cancelled.set()

    with trio.fail_after(60):
        async with listening(server, **options) as web:
            site = Site(web)
            yield site


# Versions of HTTP.


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1"])
async def test_a_call_is_answered_in_either_version_of_http(version: str) -> None:
    async with visited_by_curl() as site:
        result = await site.post(ECHO, version)
        assert (result.status, result.text, result.exit) == (200, "hello", 0)


@req("http-107")
async def test_a_stream_in_http_1_0_has_no_chunks_and_ends_with_its_connection() -> None:
    async with visited_by_curl() as site:
        result = await site.post(call_of("told", progress="p"), "--http1.0", "--raw")
        assert (result.status, result.text, result.exit) == (200, "told", 0)
        assert result.headers["Content-Type"] == STREAM
        assert "Transfer-Encoding" not in result.headers
        assert result.headers["X-Accel-Buffering"] == "no"
        assert result.body.count(b"notifications/progress") == 1


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with visited_by_curl() as site:
        again = ["--next", "-sS", "--max-time", "60", "-w", "%{num_connects}", "-o", "/dev/null"]
        result = await site.curl("-o", "/dev/null", site.url, *again)
        assert result.body == b"0"  # connections for the second request
        result = await site.curl("--http1.0", "-o", "/dev/null", site.url, *again)
        assert result.body == b"1"


# Methods.


async def test_head_is_refused_without_a_body_and_lists_the_methods() -> None:
    async with visited_by_curl() as site:
        result = await site.curl("--head")
        assert (result.status, result.body, result.exit) == (405, b"", 0)
        assert result.headers["Allow"] == "GET, POST, DELETE, OPTIONS"


async def test_options_lists_the_methods_and_answers_a_preflight() -> None:
    async with visited_by_curl() as site:
        result = await site.curl("-X", "OPTIONS")
        assert (result.status, result.body) == (204, b"")
        assert result.headers["Allow"] == "GET, POST, DELETE, OPTIONS"
        assert "Access-Control-Allow-Origin" not in result.headers
        asked = ["-H", "Access-Control-Request-Method: POST", "-H", "Access-Control-Request-Headers: Mcp-Method"]
        result = await site.curl("-X", "OPTIONS", "-H", "Origin: http://localhost:5173", *asked)
        assert result.status == 204
        assert result.headers["Access-Control-Allow-Origin"] == "http://localhost:5173"
        assert "POST" in result.headers["Access-Control-Allow-Methods"]
        assert "mcp-method" in result.headers["Access-Control-Allow-Headers"].lower()


# Bodies.


async def test_a_big_body_gets_100_continue_after_valid_headers() -> None:
    async with visited_by_curl() as site:
        text = "x" * 3_000_000  # curl waits for 100 if the body has more than a million bytes
        result = await site.post(
            call_of("echo", text=text), "--expect100-timeout", "30", headers={"Expect": "100-continue"}
        )
        assert result.statuses == [100, 200]
        assert result.text == text


@pytest.mark.parametrize(
    ("bad", "status"),
    [("Origin: http://evil.example", 403), ("Content-Type: text/plain", 415), ("Accept: text/html", 406)],
)
async def test_a_big_body_is_not_sent_after_invalid_headers(bad: str, status: int) -> None:
    async with visited_by_curl() as site:
        name, value = bad.split(": ")
        fields = {"Expect": "100-continue", name: value}
        result = await site.post(call_of("echo", text="x" * 3_000_000), "--expect100-timeout", "30", headers=fields)
        assert result.statuses == [status]
        assert result.figures["size_upload"] == 0
        assert result.message["error"]["code"] == -32600


async def test_a_body_longer_than_allowed_is_refused_by_content_length() -> None:
    async with visited_by_curl() as site:
        fields = {"Expect": "100-continue", "Content-Length": str(2**40)}
        result = await site.post(ECHO, "--expect100-timeout", "30", headers=fields)
        assert result.statuses == [413]


async def test_a_body_in_chunks_is_read() -> None:
    async with visited_by_curl() as site:
        text = "x" * 500_000
        result = await site.post(call_of("echo", text=text), headers={"Transfer-Encoding": "chunked"})
        assert (result.status, result.text) == (200, text)


# Disconnects and pipelining.


@req("cancel-14")
async def test_a_disconnect_during_a_stream_cancels_the_call() -> None:
    async with visited_by_curl() as site:
        await site.disconnect_after(call_of("stay", progress="p"), b"notifications/progress")
        await site.cancelled.wait()
        assert (await site.post(ECHO)).text == "hello"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with visited_by_curl() as site:
        name, _, port = site.host.partition(":")
        data = b""
        for number in range(5):
            message = call_of("echo", text=f"number {number}")
            body = json.dumps(message).encode()
            fields = {"Host": site.host, **site.headers_for(message, MODERN, None), "Content-Length": str(len(body))}
            fields["Connection"] = "close" if number == 4 else "keep-alive"
            data += b"POST /mcp HTTP/1.1\r\n"
            data += "".join(f"{key}: {value}\r\n" for key, value in fields.items()).encode() + b"\r\n" + body
        stream = await trio.open_tcp_stream(name, int(port))
        async with stream:
            await stream.send_all(data)
            received = b"".join([part async for part in stream])
        assert received.count(b"HTTP/1.1 200") == 5
        at = [received.index(b"number %d" % number) for number in range(5)]
        assert at == sorted(at)


# Host, Origin, Accept and the request target.


@req("http-03", "http-04")
@pytest.mark.parametrize(
    ("field", "status"),
    [
        ("Host: evil.example", 421),
        ("Host: 127.0.0.1.evil.example", 421),
        ("Host: localhost", 200),
        ("Origin: http://evil.example", 403),
        ("Origin: null", 403),
        ("Origin: https://localhost:8443", 200),
    ],
)
async def test_a_request_with_a_foreign_host_or_origin_is_refused(field: str, status: int) -> None:
    async with visited_by_curl() as site:
        name, _, value = field.partition(": ")
        result = await site.post(ECHO, headers={name: value})
        assert result.status == status
        if status == 200:
            assert result.text == "hello"
            assert result.headers.get("Access-Control-Allow-Origin") == (value if name == "Origin" else None)
        else:
            assert value in result.message["error"]["message"]
            assert "Access-Control-Allow-Origin" not in result.headers


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("application/*;q=0.1", "application/json"),
        ("application/json;q=0, text/event-stream;q=0.5", STREAM),
        ("text/*", STREAM),
        ("application/json;q=0.2, text/event-stream;q=0", "application/json"),
        ("text/html, application/xhtml+xml", None),
        ("*/*;q=0", None),
    ],
)
async def test_the_type_of_the_response_follows_accept(accept: str, kind: str | None) -> None:
    async with visited_by_curl() as site:
        result = await site.post(ECHO, headers={"Accept": accept})
        if kind is None:
            assert result.status == 406
            assert accept in result.message["error"]["message"]
        else:
            assert (result.status, result.headers["Content-Type"], result.text) == (200, kind, "hello")


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("localhost", 200), ("evil.example", 421)])
async def test_the_host_of_an_absolute_target_is_checked(host: str, status: int) -> None:
    async with visited_by_curl() as site:
        result = await site.post(ECHO, "--request-target", f"http://{host}/mcp")
        assert result.status == status
        # The same target, as curl sends it to a proxy.
        result = await site.post(ECHO, "--proxy", site.url, url=f"http://{host}/mcp")
        assert result.status == status


@req("http-57")
async def test_a_session_from_its_beginning_to_its_end() -> None:
    async with visited_by_curl() as site:
        terms = {"protocolVersion": LEGACY, "capabilities": CAPABILITIES[LEGACY], "clientInfo": CLIENT_INFO}
        opened = await site.post(request("initialize", terms, revision=LEGACY), revision=LEGACY)
        session = opened.headers["Mcp-Session-Id"]
        done = await site.post(notification("notifications/initialized"), revision=LEGACY, session=session)
        assert (done.status, done.body) == (202, b"")
        call = request("tools/call", {"name": "echo", "arguments": {"text": "hello"}}, revision=LEGACY)
        assert (await site.post(call, revision=LEGACY, session=session)).text == "hello"
        assert (await site.curl("-X", "DELETE", "-H", f"Mcp-Session-Id: {session}")).status == 204
        assert (await site.post(call, revision=LEGACY, session=session)).status == 404


async def test_a_server_on_a_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not `tmp_path`: the path of a socket must be short
        path = Path(folder) / "socket"
        async with visited_by_curl(unix=path) as site:
            result = await site.post(ECHO, "--unix-socket", str(path), url="http://localhost/mcp")
            assert (result.status, result.text) == (200, "hello")
        assert not path.exists()
