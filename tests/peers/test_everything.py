"""Our client with `server-everything`, which has all features of 2025-11-25, on each of its transports."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.peers.behaviours import Contains
from tests.peers.installed import PROGRAMS, PUBLISHED_SERVERS, needs
from tests.peers.listening import listening
from tests.peers.published_servers import Gaps, Table, Visit, check, error_code, list_names, tool_call, visiting
from trio_mcp import RequestError, TextContent
from trio_mcp.types import (
    BlobResourceContents,
    ChangeEvent,
    ChangeKind,
    EmbeddedResource,
    FormElicitationRequest,
    ImageContent,
    PromptReference,
    ResourceLink,
    SamplingMessage,
    SamplingRequest,
    TextResourceContents,
    UrlElicitationRequest,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

PATHS = {"stdio": "", "streamableHttp": "/mcp", "sse": "/sse"}  # the argument of the program, and the path of the URL

# The answers of our client to requests of the server.


def sample(request: SamplingRequest) -> tuple[str, str]:
    [message] = request.params.messages
    assert isinstance(message, SamplingMessage)
    assert isinstance(message.content, TextContent)
    return "a parrot", f"{message.content.text}, {request.params.max_tokens} at most"


def fill_in(form: FormElicitationRequest) -> dict[str, Any]:
    return {"name": "Ada", "check": True, "titledMultipleSelectEnum": ["fish-1", "fish-3"]}


def visit_page(page: UrlElicitationRequest) -> bool:
    return page.host == "example.com"


# Requests of our client.


@dataclass
class Weather:
    temperature: int
    conditions: str
    humidity: int


async def weather(visit: Visit) -> Weather:
    return await visit.client.call_tool("get-structured-content", {"location": "Chicago"}, returns=Weather)


async def progress(visit: Visit) -> list[Any]:
    reports: list[Any] = []
    await visit.client.call_tool(
        "trigger-long-running-operation",
        {"duration": 0.1, "steps": 4},
        on_progress=lambda done, total, _: reports.append((done, total)),
    )
    return reports


async def cancel(visit: Visit) -> Any:
    with trio.CancelScope() as scope:
        await visit.client.call_tool(
            "trigger-long-running-operation", {"duration": 1, "steps": 20}, on_progress=lambda *_: scope.cancel()
        )
    assert scope.cancelled_caught
    return await tool_call("echo", message="go on")(visit)  # while the cancelled call still reports progress


async def annotated(visit: Visit) -> list[Any]:
    result = await visit.client.call_tool("get-annotated-message", {"messageType": "success", "includeImage": True})
    return [(type(each), each.annotations.priority, each.annotations.audience) for each in result.content]  # type: ignore[union-attr]


async def image(visit: Visit) -> bytes:
    found = (await visit.client.call_tool("get-tiny-image")).content[1]
    assert isinstance(found, ImageContent)
    return found.data[:4]


async def linked(visit: Visit) -> list[Any]:
    result = await visit.client.call_tool("get-resource-links", {"count": 2})
    links = [each for each in result.content if isinstance(each, ResourceLink)]
    return [type((await visit.client.read_resource(link.uri)).contents[0]) for link in links]


async def embedded(visit: Visit) -> str:
    result = await visit.client.call_tool("get-resource-reference", {"resourceType": "Text", "resourceId": 7})
    [found] = [each for each in result.content if isinstance(each, EmbeddedResource)]
    assert isinstance(found.resource, TextResourceContents)
    return f"{found.resource.uri} {found.resource.text}"


async def zipped(visit: Visit) -> list[Any]:
    poem = b"roses are red\n" * 1000
    data = "data:text/plain;base64," + b64encode(poem).decode()
    async with visit.client.listen(resources=True) as changes:
        [link] = (await visit.client.call_tool("gzip-file-as-resource", {"name": "poem.gz", "data": data})).content
        received = await anext(changes)
    assert isinstance(link, ResourceLink)
    [found] = (await visit.client.read_resource(link.uri)).contents
    assert isinstance(found, BlobResourceContents)
    return [received, link.mime_type, gzip.decompress(found.blob) == poem]


async def document(visit: Visit) -> str:
    [found] = (await visit.client.read_resource("demo://resource/static/document/features.md")).contents
    assert isinstance(found, TextResourceContents)
    return found.text


async def completed(visit: Visit) -> list[Any]:
    prompt = PromptReference("completable-prompt")
    found = [
        await visit.client.complete(prompt, "department", "S"),
        await visit.client.complete(prompt, "name", "", context={"department": "Sales"}),
    ]
    return [each.values for each in found]


async def prompted(visit: Visit) -> list[str]:
    requests = [
        ("simple-prompt", {}),
        ("args-prompt", {"city": "Oslo"}),
        ("completable-prompt", {"department": "Sales", "name": "Eve"}),
    ]
    results = [await visit.client.get_prompt(name, arguments) for name, arguments in requests]
    return [each.messages[0].content.text for each in results]  # type: ignore[union-attr]


async def subscribed(visit: Visit) -> ChangeEvent:
    async with visit.client.listen(resources=["demo://resource/dynamic/text/1"]) as changes:
        await visit.client.call_tool("toggle-subscriber-updates")
        try:
            return await anext(changes)
        finally:
            await visit.client.call_tool("toggle-subscriber-updates")  # otherwise the updates never stop


async def logged(visit: Visit) -> list[str]:
    """The server logs each subscription at the level info."""
    client = visit.client
    for number, level in enumerate(("info", "error", "info"), 100):
        await client.set_log_level(level)  # type: ignore[arg-type]
        async with client.listen(resources=[f"demo://resource/dynamic/text/{number}"]):
            pass
    received: list[str] = []
    async for message in visit.logs:
        received += [uri for uri in ("text/100", "text/101", "text/102") if uri in message and "Subscribe " in message]
        if received[-1:] == ["text/102"]:
            break
    return list(dict.fromkeys(received))


async def page_first(visit: Visit) -> list[Any]:
    arguments = {"url": "https://example.com/in", "message": "Sign in", "errorPath": True}
    with pytest.raises(RequestError) as refused:
        await visit.client.call_tool("trigger-url-elicitation", arguments)
    return [refused.value.code, await tool_call("trigger-url-elicitation", **arguments)(visit)]


NAMES = [
    *("echo", "get-annotated-message", "get-env", "get-resource-links", "get-resource-reference", "get-roots-list"),
    *("get-structured-content", "get-sum", "get-tiny-image", "gzip-file-as-resource", "simulate-research-query"),
    *("toggle-simulated-logging", "toggle-subscriber-updates", "trigger-elicitation-request"),
    *("trigger-long-running-operation", "trigger-sampling-request", "trigger-url-elicitation"),
]
TABLE: Table = {
    "tools": (list_names("tools"), NAMES),
    "prompts": (list_names("prompts"), ["args-prompt", "completable-prompt", "resource-prompt", "simple-prompt"]),
    "templates": (list_names("templates"), ["Dynamic Blob Resource", "Dynamic Text Resource"]),
    "echo": (tool_call("echo", message="réd\u2028roses"), "Echo: réd\u2028roses"),
    "environment": (tool_call("get-env"), Contains('"PEERS": "of a test"')),
    "structured": (weather, Weather(36, "Light rain / drizzle", 82)),
    "progress": (progress, [(1, 4), (2, 4), (3, 4), (4, 4)]),
    "cancel": (cancel, "Echo: go on"),
    "sampling": (
        tool_call("trigger-sampling-request", prompt="a joke", maxTokens=9),
        Contains('"a parrot"', "context: a joke, 9 at most"),
    ),
    "elicitation": (
        tool_call("trigger-elicitation-request"),
        Contains("Name: Ada", "Agreed to terms: true", "Favorite Integer: 42", '"fish-3"'),
    ),
    "page": (tool_call("trigger-url-elicitation", url="https://example.com/", message="Look"), Contains("accept")),
    "page first": (page_first, [-32042, Contains("accept")]),
    "roots": (tool_call("get-roots-list"), Contains("Current MCP Roots (1 total)", "URI: file:///srv/a")),
    "annotated": (annotated, [(TextContent, 0.7, ["user"]), (ImageContent, 0.5, ["user"])]),
    "image": (image, b"\x89PNG"),
    "linked": (linked, [BlobResourceContents, TextResourceContents]),
    "embedded": (embedded, Contains("demo://resource/dynamic/text/7 Resource 7")),
    "zipped": (zipped, [ChangeEvent(ChangeKind.RESOURCES), "application/gzip", True]),
    "document": (document, Contains("# Everything Server")),
    "prompted": (
        prompted,
        [
            "This is a simple prompt without arguments.",
            "What's weather in Oslo?",
            "Please promote Eve to the head of the Sales team.",
        ],
    ),
    "completed": (completed, [["Sales", "Support"], ["David", "Eve", "Frank"]]),
    "subscribed": (subscribed, ChangeEvent(ChangeKind.RESOURCE, "demo://resource/dynamic/text/1")),
    "logged": (logged, ["text/100", "text/102"]),
    "bad arguments": (tool_call("get-sum", a="two", b=3), Contains("failed:", "Input validation error")),
    "unknown tool": (tool_call("no-such-tool"), -32602),
    "unknown prompt": (error_code(lambda client: client.get_prompt("no-such-prompt")), -32602),
    "unknown resource": (error_code(lambda client: client.read_resource("demo://no-such")), -32002),
}
GAPS: Gaps = {
    "unknown tool": (Contains("failed:", "no-such-tool not found"), "its SDK answers with a result with isError"),
    "unknown resource": (-32602, "its SDK uses the code of 2026-07-28"),
}


@asynccontextmanager
async def served(way: str, environment: dict[str, str]) -> AsyncIterator[Any]:
    """A target: the command, or the URL of a process that ends with the block."""
    node, program = needs("server-everything", PUBLISHED_SERVERS["server-everything"].command)
    if way == "stdio":
        yield [node, program, way]
        return
    command = [node, "--import", (PROGRAMS / "print_port.mjs").as_uri(), program, way]
    async with listening(command, {**environment, "PORT": "0"}) as origin:
        yield origin + PATHS[way]


@pytest.mark.parametrize("way", PATHS)
async def test_our_client_uses_each_feature_of_server_everything(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"PEERS": "of a test"}
    options = {"env": environment} if way == "stdio" else {}
    async with (
        served(way, environment) as target,
        visiting(
            target, tmp_path, sampling=sample, elicitation=fill_in, elicitation_url=visit_page, roots=["/srv/a"],
            **options,
        ) as visit,
    ):  # fmt: skip
        assert visit.client.revision == "2025-11-25"
        await check(visit, TABLE, GAPS)
    assert b"Traceback" not in b"".join(visit.errors)
    assert [each.getMessage() for each in caplog.records] == []
    assert capfd.readouterr() == ("", "")
