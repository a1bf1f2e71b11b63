"""The cost of one message, and messages that are refused before they take much work.

``python -m tests.attacks.values`` measures the attacks that these limits prevent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from tests.attacks.values import ANSWERS, MESSAGES, attack_client, attack_ids, attack_server, running
from tests.client.http_script import Handler, ReceivedRequest, ResponseWriter, modern, scripted_server
from tests.client.matrix import ROOT, Variant, client_of, each_transport_and_asgi, tcp_connects_to
from tests.http.asgi_servers import hosted
from tests.http.client import HttpClient
from tests.http.scripted_server import SSE_PATHS
from tests.http.served import bearer, by_token, served
from tests.server.checkpoints import wait_or_fail
from trio_mcp import Client, Limits, McpError, RequestError, Server, TextContent, open_client, serve_stream
from trio_mcp.asgi import AsgiApp
from trio_mcp.errors import RemoteProtocolError
from trio_mcp.relay import open_relay
from trio_mcp.types import FormElicitationRequest

FEW = Limits(values=1000)

CHUNKED = (
    b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
INITIALIZE = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}'


def small_server(limits: Limits | None = None) -> Server:
    server = Server("little", version="1.0", limits=limits)

    @server.tool
    def count(items: list[Any]) -> int:
        return len(items)

    @server.tool
    def words(most: int) -> list[TextContent]:
        return [TextContent("[{,")] * most

    @server.tool
    def power(base: int, exponent: int) -> int:
        return int(base**exponent)

    return server


# Values.


@each_transport_and_asgi(without=["child"])
async def test_a_call_with_too_many_values_is_refused_and_the_next_one_is_served(
    variant: Variant, autojump_clock: MockClock
) -> None:
    async with client_of(variant, small_server(FEW)) as client:
        assert await client.call_tool("count", {"items": [1] * 900}, returns=int) == 900
        for items in ([1] * 1000, [[]] * 500, [{"a": {}}] * 400, ["x"] * 1000, [""] * 5000, [None] * 100_000):
            with pytest.raises(RequestError, match=r"more than 1000 values \(Limits.values\)") as caught:
                await client.call_tool("count", {"items": items})
            assert caught.value.code == -32600
        # Characters inside of texts do not count as values.
        for text in ("[{," * 2000, '\\"[{,' * 2000, "\\", '"' * 10_000, '",' * 9000):
            assert await client.call_tool("count", {"items": [text, "x"]}, returns=int) == 2


@each_transport_and_asgi(without=["child"])
async def test_an_answer_with_too_many_values_fails_only_its_call(variant: Variant, autojump_clock: MockClock) -> None:
    async with client_of(variant, small_server(), limits=FEW) as client:
        for most in (400, 10_000):
            with pytest.raises(RemoteProtocolError, match=r"the answer has more than 1000 values \(Limits.values\)"):
                await client.call_tool("words", {"most": most})
        assert len((await client.call_tool("words", {"most": 200})).content) == 200


async def test_a_text_that_is_read_as_json_has_no_more_values_than_a_message(autojump_clock: MockClock) -> None:
    # An old server returns a list as a text, which counts as one value of the message.
    texts = {"few": "[" + "1," * 100_000 + "1]", "many": "[" + "1," * 200_000 + "1]"}

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            await out.json(received.answer({"tools": [], "resultType": "complete"}))
        else:
            content = [{"type": "text", "text": texts[received.message["params"]["name"]]}]
            await out.json(received.answer({"content": content, "resultType": "complete"}))

    async with client_of_hostile_server(handle) as client:
        assert len(await client.call_tool("few", returns=list[int])) == 100_001
        with pytest.raises(RemoteProtocolError, match="no structured value"):
            await client.call_tool("many", returns=list[int])
        assert len(await client.call_tool("many", returns=str)) == 400_003


@pytest.mark.full
def test_the_measurements_of_the_attacks_run() -> None:
    argument, (method, answer) = MESSAGES["refused: 5 million texts"](), ANSWERS["refused: 500,000 contents"]
    with running(ROOT) as (port, pid):
        figures = trio.run(attack_server, port, pid, argument)
    assert "Limits.values" in figures.answer
    assert attack_client(ROOT, method, answer()).answer.startswith("the server's answer to tools/call is invalid")
    assert attack_ids(ROOT, count(1)) > 0


# Schemas of a hostile server.

SLOW = "a[ab]{4000}[cde]"
"""A pattern that takes 14 µs for each character: after each the engine may be at 4,000 places of the pattern."""


@contextlib.asynccontextmanager
async def client_of_hostile_server(handle: Handler, **options: Any) -> AsyncIterator[Client]:
    async with scripted_server(modern(handle)) as server_script:
        with tcp_connects_to(server_script.connect):
            async with open_client("http://127.0.0.1:3000/mcp", **options) as client:
                yield client


async def call_with_output_schema(schema: Any, value: Any) -> None:
    """Call a tool that declares this output schema and returns this value."""
    tool = {"name": "t", "inputSchema": {"type": "object"}, "outputSchema": schema}

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            await out.json(received.answer({"tools": [tool], "resultType": "complete"}))
        else:
            result = {"content": [], "structuredContent": value, "resultType": "complete"}
            await out.json(received.answer(result))

    async with client_of_hostile_server(handle) as client:
        for _ in await client.list_tools():
            pass
        await client.call_tool("t")


@pytest.mark.parametrize("text", ["ab" * 5000, ["ab" * 50] * 100])
async def test_a_pattern_that_would_take_minutes_is_not_matched(text: Any, autojump_clock: MockClock) -> None:
    fitting = {"pattern": f"{SLOW}|b"}
    await call_with_output_schema(
        {"type": "object", "properties": {"a": {**fitting, "items": fitting}}}, {"a": "ab" * 100}
    )
    with pytest.raises(RemoteProtocolError, match="too much work to check"):
        await call_with_output_schema(
            {"type": "object", "properties": {"a": {**fitting, "items": fitting}}}, {"a": text}
        )


PROGRAM = "((a{1,9}){1,9}){1,100}"  # 22 characters, which are compiled to 1.5 MB
HUGE: dict[str, Any] = {
    "patterns": {str(i): {"pattern": "|".join(f"{i}x{j}" for j in range(100))} for i in range(150)},
    "programs": {str(i): {"pattern": PROGRAM + str(i)} for i in range(150)},
    "values": {str(i): {"type": "string"} for i in range(11_000)},
    "doubling": {"a": {"$ref": "#/$defs/0"}},
}
DOUBLING = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}


@pytest.mark.parametrize("case", HUGE)
async def test_an_output_schema_that_needs_too_much_work_is_ignored(
    case: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": HUGE[case]}
    if case == "doubling":
        schema["$defs"] = {**DOUBLING, "40": {}}
    await call_with_output_schema(schema, {"0": 5})  # a smaller schema would refuse this value
    assert "are not checked, because its outputSchema is invalid" in caplog.text
    with pytest.raises(RemoteProtocolError, match="must match the pattern"):
        await call_with_output_schema({"type": "object", "properties": {"0": {"pattern": PROGRAM}}}, {"0": "b"})


ELICIT = "elicitation/create"


async def ask_with_form(fields: dict[str, Any]) -> tuple[list[FormElicitationRequest], list[Any]]:
    """The forms that the callback of a client gets, and the answers that the server gets or the errors of the call."""
    forms: list[FormElicitationRequest] = []
    answers: list[Any] = []

    async def fill_in(form: FormElicitationRequest) -> dict[str, Any]:
        forms.append(form)
        return {}

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        params = received.message["params"]
        if "inputResponses" in params:
            answers.append(params["inputResponses"]["form"])
            await out.json(received.answer({"content": [], "resultType": "complete"}))
            return
        form = {"mode": "form", "message": "?", "requestedSchema": {"type": "object", "properties": fields}}
        requests = {"form": {"method": ELICIT, "params": form}}
        await out.json(
            received.answer({"resultType": "input_required", "inputRequests": requests, "requestState": "s"})
        )

    async with client_of_hostile_server(handle, elicitation=fill_in) as client:
        try:
            await client.call_tool("t")
        except McpError as error:
            answers.append(str(error))
    return forms, answers


async def test_the_work_for_all_defaults_of_a_form_is_limited(autojump_clock: MockClock) -> None:
    field = {"type": "string", "pattern": f"{SLOW}|b", "default": "ab" * 500}
    forms, answers = await ask_with_form({"one": field})
    assert forms[0].defaults == {"one": "ab" * 500}
    assert answers == [{"action": "accept", "content": {"one": "ab" * 500}}]
    forms, answers = await ask_with_form({str(i): field for i in range(10)})
    assert forms[0].defaults == {}
    assert answers == [{"action": "accept", "content": {}}]


@pytest.mark.parametrize("case", ["patterns", "programs", "values"])
async def test_a_form_that_needs_too_much_work_is_not_shown(case: str, autojump_clock: MockClock) -> None:
    forms, (error,) = await ask_with_form(HUGE[case])
    assert forms == []
    assert "elicitation/create: requestedSchema: the " in error


async def test_a_relay_does_not_compile_schemas_of_the_upstream_server(autojump_clock: MockClock) -> None:
    # A relay only looks for arguments that are repeated in headers.  This schema cannot be compiled.
    region = {"type": "string", "x-mcp-header": "Region", "pattern": "(?=a)"}
    tool = {"name": "t", "inputSchema": {"type": "object", "properties": {"region": region}}}

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            await out.json(received.answer({"tools": [tool], "resultType": "complete"}))
        else:
            await out.json(received.answer({"content": [], "resultType": "complete"}))

    async with scripted_server(modern(handle)) as server_script:
        with tcp_connects_to(server_script.connect):
            async with open_relay("http://127.0.0.1:3000/mcp") as shown, served(shown) as web:
                assert len((await web.call("tools/list")).result["tools"]) == 1
                answer = await web.call("tools/call", {"name": "t", "arguments": {"region": "north"}})
                assert "Mcp-Param-Region header is missing" in answer.message["error"]["message"]


# Ids.

SAME_HASH = 2**61 - 1
"""Integers that differ by this have the same hash in Python, so one lookup among many takes as many comparisons."""
IDS = {
    0: 0,
    7 * SAME_HASH: 7 * SAME_HASH,
    -4 * SAME_HASH: -4 * SAME_HASH,
    2**64: None,
    1000 * SAME_HASH: None,
    -(10**40): None,
}


async def by_stream(message: Any) -> Any:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, small_server(), theirs)
        await ours.send_all(json.dumps(message).encode() + b"\n")
        answer = json.loads(await ours.receive_some())
        await ours.aclose()
    return answer


async def by_http(message: Any) -> Any:
    async with served(small_server()) as web:
        return (await web.post(message, revision="2025-11-25")).json


@pytest.mark.parametrize("send", [by_stream, by_http])
@pytest.mark.parametrize("id", IDS)
async def test_integer_ids_of_more_than_64_bits_are_refused(
    id: int, send: Callable[[Any], Awaitable[Any]], autojump_clock: MockClock
) -> None:
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    answer = await send({"jsonrpc": "2.0", "id": id, "method": "initialize", "params": params})
    assert answer.get("id") == IDS[id]
    assert ("error" in answer) is (IDS[id] is None)
    if IDS[id] is None:
        assert answer["error"] == {"code": -32600, "message": "the id is an integer of more than 64 bits"}


# Heads.


@pytest.mark.parametrize("host", ["localhost:", "127.0.0.1:", "[::1]:"])
async def test_a_host_may_end_with_a_colon(host: str, autojump_clock: MockClock) -> None:
    # RFC 3986, 3.2.3: a port may be empty, which means the default port of the scheme.
    async with served(small_server()) as web:
        assert (await web.call("server/discover", headers={"Host": host})).status == 200


async def test_another_host_that_ends_with_a_colon_is_refused(autojump_clock: MockClock) -> None:
    async with served(small_server()) as web:
        assert (await web.call("server/discover", headers={"Host": "example.com:"})).status == 421


SITES = {"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200}


@pytest.mark.parametrize("site", SITES)
async def test_a_page_of_another_site_opens_no_stream_without_its_origin(site: str, autojump_clock: MockClock) -> None:
    async with served(small_server(), **SSE_PATHS) as web:
        link, head = await web.ask("GET", "/sse", {"Accept": "text/event-stream", "Sec-Fetch-Site": site})
        assert head.status_code == SITES[site]
        await link.aclose()


async def test_a_page_of_an_allowed_origin_may_be_of_another_site(autojump_clock: MockClock) -> None:
    async with served(small_server(), **SSE_PATHS) as web:
        headers = {"Accept": "text/event-stream", "Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8080"}
        link, head = await web.ask("GET", "/sse", headers)
        assert head.status_code == 200
        await link.aclose()


async def test_a_server_for_all_origins_accepts_a_page_without_its_origin(autojump_clock: MockClock) -> None:
    async with served(small_server(), **SSE_PATHS, allowed_origins=["*"]) as web:
        link, head = await web.ask("GET", "/sse", {"Accept": "text/event-stream", "Sec-Fetch-Site": "cross-site"})
        assert head.status_code == 200
        await link.aclose()


# Sessions.


@contextlib.asynccontextmanager
async def by_asgi(server: Server, **options: Any) -> AsyncIterator[HttpClient]:
    async with hosted(AsgiApp(server, allowed_hosts=["127.0.0.1"], **options)) as web:
        yield web


@pytest.mark.parametrize("serving", [served, by_asgi])
@pytest.mark.parametrize("case", ["unknown", "of another principal", "unknown, of HTTP+SSE", "known", "not expected"])
async def test_a_session_is_checked_before_the_body_is_read(
    case: str, serving: Callable[..., Any], autojump_clock: MockClock
) -> None:
    async with serving(small_server(), authenticate=by_token, **SSE_PATHS) as web:
        session = await web.initialize("2025-11-25", headers=bearer("ann"))
        path, headers = "/mcp", {"Mcp-Session-Id": session, **bearer("ann")}
        if case == "unknown":
            headers["Mcp-Session-Id"] = "unknown"
        elif case == "of another principal":
            headers |= bearer("bob")
        elif case == "unknown, of HTTP+SSE":
            path = "/messages?session=unknown"
        elif case == "not expected":
            headers |= {"Mcp-Session-Id": "unknown", "MCP-Protocol-Version": "2026-07-28"}
        expected = {"of another principal": b" 403 ", "known": b" 408 ", "not expected": b" 408 "}.get(case, b" 404 ")
        head = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": "16000000", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        # The test never sends the body.
        link = await web.link()
        await link.stream.send_all(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode())
        answer = await wait_or_fail(link.stream.receive_some, "an answer")
        assert expected in answer[:20]
        assert session.encode() not in answer


# Bodies in chunks.

# An intermediary may end the line at the control character, and then read another body than this server.
EXTENSIONS = {
    b";a=\rb": 400, b";a=\x00b": 400, b";a\x7fb": 400, b";\x0b": 400, b" \r": 400,
    b"": 200, b";a": 200, b" ; a = b": 200, b";a=\"b \xe9\";c": 200, b"  ": 200,
}  # fmt: skip


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: ascii(extension)[2:-1])
async def test_a_chunk_extension_has_no_control_characters(extension: bytes, autojump_clock: MockClock) -> None:
    async with served(small_server(), check=False) as web:
        size = b"%x" % len(INITIALIZE)
        answer = await web.raw(CHUNKED + size + extension + b"\r\n" + INITIALIZE + b"\r\n0" + extension + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % EXTENSIONS[extension])


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: ascii(extension)[2:-1])
async def test_a_client_refuses_control_characters_in_chunk_extensions(
    extension: bytes, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = json.dumps(received.answer({"tools": [], "resultType": "complete"})).encode()
        await out.write(b"%x%b\r\n%b\r\n0%b\r\n\r\n" % (len(body), extension, body, extension))

    async with client_of_hostile_server(handle) as client:
        if EXTENSIONS[extension] == 200:
            assert (await client.list_tools_page()).tools == []
        else:
            with pytest.raises(McpError, match="chunk"):
                await client.list_tools_page()
