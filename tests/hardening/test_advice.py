"""Rows of the table of requirements that say SHOULD, if no other test has them."""

from __future__ import annotations

import base64
import contextlib
import logging
import re
import socket
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest
import trio
from trio.testing import MockClock

from tests.http.asgi_servers import _connection
from tests.http.client import HttpClient
from tests.http.scripted_server import C, D, E
from tests.http.served import MemoryListener
from tests.requirements import req
from tests.server.raw_client import connected
from trio_mcp import Context, Field, Server, UsageError, open_client
from trio_mcp.asgi import AsgiApp
from trio_mcp.core import CreateMessageResult, SamplingMessage, ToolResultContent, ToolUseContent
from trio_mcp.errors import InvalidSchema, RemoteProtocolError
from trio_mcp.types import BlobResourceContents, EmbeddedResource, Request, TextResourceContents, Tool

ROOT = Path(__file__).parents[2]
TYPES = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
CALL = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "drop"}}'
both = pytest.mark.parametrize("revision", [D, E])


# Tools.


@req("tool-15")
@pytest.mark.parametrize("revision", [C, D, E])
@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ({"degrees": "warm"}, "degrees"),
        ({}, "degrees"),
        (None, "structured"),
    ],
    ids=str,
)
async def test_a_structured_result_that_breaks_its_output_schema_is_refused(
    revision: str, returned: Any, why: str, autojump_clock: MockClock
) -> None:
    async def spoil(ctx: Context, request: Request, call_next: Any) -> Any:
        result = await call_next()
        if request.method != "tools/call":
            return result
        rest = {name: value for name, value in result.items() if name != "structuredContent"}
        return rest if returned is None else {**rest, "structuredContent": returned}

    server = Server("weather", middleware=[spoil])

    @server.tool
    async def forecast() -> dict[str, int]:
        return {"degrees": 3}

    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    server.add_tool(Tool("measured", {"type": "object"}, output_schema=schema), lambda ctx, arguments: {"degrees": 3})
    async with open_client(server, revision=revision) as client:
        await client.list_tools_page()
        with pytest.raises(RemoteProtocolError, match=why):
            await client.call_tool("measured")


@req("tool-12")
@both
async def test_a_server_whose_tools_embed_resources_declares_resources(
    revision: str, autojump_clock: MockClock
) -> None:
    def embedding(*hints: Any) -> Server:
        server = Server("embedding")
        for number, hint in enumerate(hints):

            async def read() -> Any:
                return EmbeddedResource(TextResourceContents("notes://a", "hi"))

            read.__annotations__["return"] = hint
            server.tool(name=f"read_{number}")(read)
        return server

    for hint in (EmbeddedResource, list[EmbeddedResource], str | EmbeddedResource, list[str | EmbeddedResource]):
        async with connected(embedding(hint), revision) as wire:
            assert "resources" in (await wire.about())["capabilities"]
            assert (await wire.call("resources/list"))["resources"] == []
    async with connected(embedding(str, dict[str, int]), revision) as wire:
        assert "resources" not in (await wire.about())["capabilities"]


@req("tool-12")
async def test_a_server_declares_resources_for_the_tools_of_a_mounted_server(autojump_clock: MockClock) -> None:
    inner, outer = Server("inner"), Server("outer")
    outer.mount(inner, prefix="in_")

    @inner.tool
    async def read() -> EmbeddedResource:
        return EmbeddedResource(TextResourceContents("notes://a", "hi"))

    async with open_client(outer) as client:
        assert "resources" in client.capabilities


@req("tool-26", "tool-27")
@both
async def test_equal_tool_names_of_several_servers_are_distinguished_by_a_prefix(
    revision: str, autojump_clock: MockClock
) -> None:
    def counting(by: int) -> Server:
        server = Server("counter")  # both servers have the same name

        @server.tool
        async def add(number: int) -> int:
            return number + by

        return server

    shown = Server("counter")
    shown.mount(counting(1), prefix="one_")
    shown.mount(counting(2), prefix="two_")
    async with open_client(shown, revision=revision) as client:
        assert [tool.name for tool in await client.list_tools()] == ["one_add", "two_add"]
        assert await client.call_tool("one_add", {"number": 5}, returns=int) == 6
        assert await client.call_tool("two_add", {"number": 5}, returns=int) == 7
    with pytest.raises(UsageError, match=r"the tool 'one_add' exists already"):
        shown.mount(counting(3), prefix="one_")


@req("tool-28")
def test_a_secret_argument_that_is_repeated_in_a_header_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("headers")

    @server.tool
    async def find(
        region: Annotated[str, Field(header="Region")],
        page_token: Annotated[str, Field(header="Page")],
        secret_name: Annotated[str, Field(header="Which")],
    ) -> None: ...

    assert caplog.records == []

    @server.tool
    async def enter(api_key: Annotated[str, Field(header="Key")], region: str) -> None: ...

    secret = {"type": "string", "x-mcp-header": "Pass"}
    nested = {"type": "object", "properties": {"login": {"type": "object", "properties": {"password": secret}}}}
    server.add_tool(Tool("log_in", nested), lambda ctx, arguments: None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "the tool 'enter' repeats its argument 'api_key' in the header Mcp-Param-Key" in first
    assert "the tool 'log_in' repeats its argument 'password' in the header Mcp-Param-Pass" in second


# Sampling.


@req("samp-19")
@both
async def test_a_loop_of_tool_uses_in_sampling_is_limited(
    revision: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    server, tool, asked = Server("loop"), Tool("f", {"type": "object"}), list[int]()

    @server.tool
    async def think(ctx: Context) -> str:
        messages: list[Any] = ["Do it"]
        while True:
            answer = await ctx.sample(messages, max_tokens=9, tools=[tool])
            (use,) = answer.content if isinstance(answer.content, list) else [answer.content]
            assert isinstance(use, ToolUseContent)
            messages += [answer, SamplingMessage("user", [ToolResultContent(use.id, [])])]

    def model(request: object) -> CreateMessageResult:
        asked.append(len(asked))
        use = ToolUseContent(f"{len(asked)}", "f", {})
        return CreateMessageResult("assistant", use, "model", stop_reason="toolUse")

    async with open_client(server, revision=revision, sampling=model, sampling_tools=True) as client:
        with trio.fail_after(10):
            assert (await client.call_tool("think")).is_error
    assert "tools/call has asked 32 times; clients stop after as many rounds" in caplog.text
    assert len(asked) == 32


# Resources and schemas.


@req("res-03")
@both
async def test_uris_that_the_server_makes_have_a_scheme_that_cannot_be_fetched(
    revision: str, autojump_clock: MockClock
) -> None:
    server = Server("names")

    @server.tool
    async def give() -> bytes:
        return b"\x00\xff"

    @server.tool
    async def several() -> list[bytes]:
        return [b"\x00", b"\xff"]

    async with connected(server, revision) as wire:
        found = []
        for name in ("give", "several"):
            result = await wire.call("tools/call", {"name": name})
            found += re.findall(r'"uri": ?"([^"]*)"', repr(result).replace("'", '"'))
        assert found
        assert all(uri.startswith("tool://") for uri in found)


@req("res-12")
@both
async def test_binary_contents_are_base64_of_the_standard_alphabet(revision: str, autojump_clock: MockClock) -> None:
    given = [b"", b"\x00", b"\xff\xfe", b"\xfb\xef\xbe", bytes(range(256)), b"a\nb\r\n" * 100]
    server = Server("bytes")

    @server.resource("bytes://{number}")
    async def read(number: str) -> Any:
        value = given[int(number) // 2]
        return BlobResourceContents(f"bytes://{number}", value) if int(number) % 2 else value

    @server.tool
    async def embedded(number: int) -> EmbeddedResource:
        return EmbeddedResource(BlobResourceContents("bytes://0", given[number]))

    async with connected(server, revision) as wire:
        for number in range(2 * len(given)):
            (contents,) = (await wire.call("resources/read", {"uri": f"bytes://{number}"}))["contents"]
            assert "text" not in contents
            assert contents["blob"] == base64.b64encode(given[number // 2]).decode()
        for number, value in enumerate(given):
            result = await wire.call("tools/call", {"name": "embedded", "arguments": {"number": number}})
            assert result["content"][0]["resource"]["blob"] == base64.b64encode(value).decode()


@req("schema-10")
@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:9/s", "https://169.254.169.254/s", "https://example.com/s", "file:///s"]
)
def test_external_references_of_schemas_are_never_fetched(uri: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": uri}}}
    server = Server("schemas")
    with mock.patch.object(socket.socket, "connect", side_effect=AssertionError("it connects")):
        with pytest.raises(InvalidSchema, match=re.escape(uri)):
            server.add_tool(Tool("t", schema), lambda ctx, arguments: None)
        with pytest.raises(InvalidSchema, match=re.escape(uri)):
            server.add_tool(
                Tool("t", {"type": "object"}, output_schema={**schema, "$id": "https://example.com/"}),
                lambda ctx, arguments: None,
            )


# Versions.


@req("ver-07")
@both
async def test_the_fallback_of_each_declared_extension_is_documented(revision: str, autojump_clock: MockClock) -> None:
    """An extension is declared in the capabilities, and the docs must describe the behaviour without it."""
    server = Server("plain", capabilities=["tools", "prompts", "resources", "completions"])
    heard: list[Any] = []

    async def look(ctx: Context, request: Request, call_next: Any) -> Any:
        heard.append(ctx._terms.capabilities)
        return await call_next()

    server = Server("plain", middleware=[look], capabilities=["tools", "prompts", "resources"])
    options: Any = {"sampling": lambda asked: ("x", "m"), "elicitation": lambda form: None, "roots": []}
    async with open_client(server, revision=revision, **options) as client:
        await client.list_tools_page()
        declared = {**client.capabilities.get("extensions", {}), **heard[0].get("extensions", {})}
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for name in declared:
        assert re.search(rf"without `?{re.escape(name)}", pages), (
            f"the docs do not describe the behaviour without {name}"
        )
    assert declared == {}


# Between a client and a server.


@req("http-104")
async def test_a_proxy_that_decides_by_headers_refuses_versions_without_them(
    autojump_clock: MockClock,
) -> None:
    """The proxy is the example of the page about HTTP."""
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Policy" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    called: list[str] = []
    server = Server("tools")
    for name in ("look", "drop"):
        server.tool(name=name)(partial(called.append, name))
    app, listener = AsgiApp(server, allowed_hosts=["127.0.0.1"]), MemoryListener()
    policy = names["Policy"](app, {b"look"})
    async with app.running(), trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, partial(_connection, policy, {}), [listener])
        web = HttpClient(listener.connect)
        async with contextlib.aclosing(web):
            assert (await web.call("tools/call", {"name": "look"})).status == 200
            assert (await web.call("tools/call", {"name": "drop"})).status == 403
            # The headers do not fit the body.
            cheat = await web.call("tools/call", {"name": "drop"}, headers={"Mcp-Name": "look"})
            assert (cheat.status, cheat.code) == (400, -32020)
            for headers in ({"MCP-Protocol-Version": None}, {"MCP-Protocol-Version": D}):
                named = {**headers, "Mcp-Method": "tools/call", "Mcp-Name": "look"}
                old = await web.send("POST", "/mcp", {**TYPES, **named}, CALL)
                assert old.status == 400
        nursery.cancel_scope.cancel()
    assert called == ["look"]
