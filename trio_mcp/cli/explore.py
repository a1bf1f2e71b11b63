"""Commands that look at a server: `list`, `read`, `prompt`, `complete`, `listen` and `ping`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from trio_mcp.cli.arguments import above_zero
from trio_mcp.cli.output import Output, compact, headline, write_file
from trio_mcp.cli.target import add_target_arguments, connected, run_command, server_log
from trio_mcp.client.client import Client
from trio_mcp.core.codec import to_json
from trio_mcp.core.content import BlobResourceContents, MalformedContent, TextContent, TextResourceContents
from trio_mcp.core.errors import NotInThisRevision, RemoteProtocolError, UsageError
from trio_mcp.core.models import PromptReference, ResourceReference, Tool
from trio_mcp.core.revisions import REVISIONS

__all__ = ["add_arguments", "run"]

_PINGS = 5
_LONGEST = 2000  # characters of a description


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    match command:
        case "list":
            parser.add_argument("--schemas", action="store_true", help="show the whole schemas of tools")
        case "read":
            parser.add_argument("uri", metavar="URI")
            parser.add_argument("-o", "--output", metavar="FILE", help="write the content to a file")
        case "prompt":
            parser.add_argument("prompt", metavar="PROMPT")
            parser.add_argument("pairs", nargs="*", default=[], metavar="NAME=VALUE")
        case "complete":
            parser.add_argument("entry", metavar="ENTRY", help="the name of a prompt, or a resource template")
            parser.add_argument("argument", metavar="ARGUMENT")
            parser.add_argument("value", nargs="?", default="", metavar="VALUE", help="the start of the value")
            parser.add_argument("--with", dest="pairs", action="append", default=[], metavar="NAME=VALUE")
        case "listen":
            parser.add_argument("uris", nargs="*", default=[], metavar="URI", help="resources; without any: all lists")
        case "ping":
            parser.add_argument(
                "--count", type=above_zero(int), metavar="N", default=_PINGS, help=f"how many ({_PINGS})"
            )


def run(arguments: argparse.Namespace) -> int:
    return run_command(lambda: _connected(arguments), verbose=arguments.verbose)


async def _connected(arguments: argparse.Namespace) -> int:
    if "pairs" in arguments:
        arguments.pairs = _pairs(arguments.pairs)
    async with connected(arguments, log=server_log()) as client:
        await _WORKS[arguments.name](arguments, client, Output(arguments.json))
    return 0


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found:
            raise UsageError(f"an argument must be like NAME=VALUE, got {text!r}")
        pairs[name] = value
    return pairs


async def _list(arguments: argparse.Namespace, client: Client, output: Output) -> None:
    found = await _everything(client)
    revision = REVISIONS[client.revision]
    if output.as_json:
        listed = {kind: [to_json(each, revision) for each in entries] for kind, entries in found.items()}
        output.json({"server": client.server, "revision": client.revision, **listed})
        return
    output.title(headline(client.server, client.revision))
    if client.instructions:
        output.paragraph(client.instructions, 2, "dim")
    if tools := found["tools"]:
        output.line()
        output.title("Tools")
        for tool in tools:
            _show_tool(tool, output, arguments.schemas)
    rows = {
        "Resources": [(each.uri, each.mime_type or "", _words(each)) for each in found["resources"]],
        "Resource templates": [
            (each.uri_template, each.mime_type or "", _words(each)) for each in found["resourceTemplates"]
        ],
        "Prompts": [
            (
                each.name,
                " ".join(a.name if a.required else f"[{a.name}]" for a in each.arguments or ()),
                _words(each),
            )
            for each in found["prompts"]
        ],
    }
    for title, lines in rows.items():
        if lines:
            output.line()
            output.title(title)
            output.table(lines)
    if not any(found.values()):
        output.line("The server has no tools, resources or prompts.")


async def _everything(client: Client) -> dict[str, Sequence[Any]]:
    """All lists that the server declares."""
    found: dict[str, Sequence[Any]] = {"tools": [], "resources": [], "resourceTemplates": [], "prompts": []}
    if "tools" in client.capabilities:
        found["tools"] = await client.list_tools()
    if "resources" in client.capabilities:
        found["resources"] = await client.list_resources()
        found["resourceTemplates"] = await client.list_resource_templates()
    if "prompts" in client.capabilities:
        found["prompts"] = await client.list_prompts()
    return found


def _words(entry: Any) -> str:
    text = entry.description or entry.title or ""
    return _beginning(text).replace("\n", " ")


def _beginning(text: str) -> str:
    """The first paragraph of a description, which may be as long as a message; --json shows all."""
    first = text.strip().partition("\n\n")[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}…"


def _show_tool(tool: Tool, output: Output, schemas: bool) -> None:
    hints = tool.annotations
    notes = [
        word
        for word, given in (
            ("read-only", hints and hints.read_only_hint),
            ("destructive", hints and hints.destructive_hint),
            ("idempotent", hints and hints.idempotent_hint),
        )
        if given
    ]
    if tool.execution and tool.execution.task_support:
        notes.append(f"task: {tool.execution.task_support}")
    more = output.painted(f"  {', '.join(notes)}", "dim") if notes else ""
    output.line(f"  {output.painted(tool.name, 'name')}{more}")
    if tool.description:
        output.paragraph(_beginning(tool.description), 4)
    if schemas:
        output.line(f"    input  {compact(tool.input_schema, 10_000)}")
        if tool.output_schema is not None:
            output.line(f"    output {compact(tool.output_schema, 10_000)}")
        return
    required = tool.input_schema.get("required", ())
    properties = tool.input_schema.get("properties", {})
    if isinstance(properties, dict) and isinstance(required, list | tuple):
        output.table([_argument(name, schema, name in required) for name, schema in properties.items()], indent=4)


def _argument(name: str, schema: Any, required: bool) -> tuple[str, str, str]:
    """The name, the type and the description of one argument; an optional one is in brackets."""
    schema = schema if isinstance(schema, dict) else {}
    words = _beginning(str(schema.get("description", ""))).replace("\n", " ")
    notes = []
    match schema:
        case {"minimum": least, "maximum": most}:
            notes.append(f"{compact(least)} to {compact(most)}")
        case {"minimum": least}:
            notes.append(f"at least {compact(least)}")
        case {"maximum": most}:
            notes.append(f"at most {compact(most)}")
    if "default" in schema:
        notes.append(f"default {compact(schema['default'], 30)}")
    if notes:
        words = f"{words} ({', '.join(notes)})".strip()
    return name if required else f"[{name}]", type_of(schema), words


def type_of(schema: Mapping[str, Any]) -> str:
    """Return the type of a schema in a few words."""
    if isinstance(schema.get("enum"), list):
        return " | ".join(compact(each, 20) for each in schema["enum"][:6])
    if "const" in schema:
        return compact(schema["const"], 20)
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            return " | ".join(type_of(each) for each in schema[union][:4] if isinstance(each, dict))
    kind = schema.get("type", "object" if "properties" in schema else "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"{type_of(schema['items'])}[]"
    return " | ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


async def _read(arguments: argparse.Namespace, client: Client, output: Output) -> None:
    result = await client.read_resource(arguments.uri)
    if output.as_json:
        output.json(to_json(result, REVISIONS[client.revision]))
        return
    for contents in result.contents:
        if isinstance(contents, BlobResourceContents):
            data = contents.blob
            text = f"{len(data)} bytes of {contents.mime_type or 'binary data'}; save them with -o FILE"
        elif isinstance(contents, TextResourceContents):
            text, data = contents.text, contents.text.encode()
        else:
            raise RemoteProtocolError(f"the contents of {arguments.uri} are malformed: {contents.why}")
        if arguments.output:
            write_file(Path(arguments.output), data)
            text = f"{arguments.output}: {len(data)} bytes"
        output.content(text)


async def _prompt(arguments: argparse.Namespace, client: Client, output: Output) -> None:
    result = await client.get_prompt(arguments.prompt, arguments.pairs)
    if output.as_json:
        output.json(to_json(result, REVISIONS[client.revision]))
        return
    for message in result.messages:
        if isinstance(message, MalformedContent):
            raise RemoteProtocolError(f"a message of the prompt {arguments.prompt} is malformed: {message.why}")
        output.title(message.role)
        content = message.content
        output.paragraph(content.text if isinstance(content, TextContent) else repr(content), 2)


async def _complete(arguments: argparse.Namespace, client: Client, output: Output) -> None:
    entry = arguments.entry
    ref = ResourceReference(entry) if "://" in entry or "{" in entry else PromptReference(entry)
    result = await client.complete(ref, arguments.argument, arguments.value, context=arguments.pairs or None)
    if output.as_json:
        output.json(to_json(result, REVISIONS[client.revision]))
    else:
        for value in result.values:
            output.content(value)
        if not result.values:
            sys.stderr.write("trio-mcp: the server suggests no value\n")


async def _listen(arguments: argparse.Namespace, client: Client, output: Output) -> None:
    lists = {name for name in ("tools", "prompts", "resources") if not arguments.uris and name in client.capabilities}
    wanted: Any = arguments.uris or "resources" in lists
    async with client.listen(tools="tools" in lists, prompts="prompts" in lists, resources=wanted) as changes:
        if not output.as_json:
            output.line(f"listening to {headline(client.server, client.revision)}; Ctrl-C ends")
        async for change in changes:
            if output.as_json:
                output.json({"kind": change.kind.name.lower(), "item": change.item or None})
            else:
                output.content(f"{change.kind.name.lower()} {change.item}".rstrip())


async def _ping(arguments: argparse.Namespace, client: Client, output: Output) -> None:
    times = []
    method = "ping"
    for number in range(arguments.count):
        start = trio.current_time()
        try:
            await client.ping()
        except NotInThisRevision:  # 2026-07-28 has no ping
            method = "server/discover"
            await client.request(method)
        times.append((trio.current_time() - start) * 1000)
        if not output.as_json:
            output.line(f"{method} {number + 1}: {times[-1]:.2f} ms")
    ordered = sorted(times)
    figures = {"least": ordered[0], "median": ordered[math.floor((len(ordered) - 1) / 2)], "most": ordered[-1]}
    if output.as_json:
        output.json({"method": method, "ms": times, **figures})
    else:
        output.line("  ".join(f"{name} {value:.2f} ms" for name, value in figures.items()))


_WORKS: Mapping[str, Callable[[argparse.Namespace, Client, Output], Awaitable[None]]] = {
    "list": _list,
    "read": _read,
    "prompt": _prompt,
    "complete": _complete,
    "listen": _listen,
    "ping": _ping,
}
