"""``trio-mcp call``: call a tool, with progress, log messages and questions on the terminal.

The result goes to standard output, and everything else to standard error.  Ctrl-C cancels the call at the server.
"""

from __future__ import annotations

import argparse
import json
import math
import mimetypes
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trio_mcp.cli.forms import Terminal
from trio_mcp.cli.output import Output, ReportLines, compact, few_names, write_file
from trio_mcp.cli.target import (
    add_target_arguments,
    connected,
    end_of_log,
    run_command,
    server_log,
    until_signal,
)
from trio_mcp.client.client import Client
from trio_mcp.core.codec import to_json
from trio_mcp.core.content import (
    AudioContent,
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from trio_mcp.core.errors import RequestError, UsageError
from trio_mcp.core.models import CallToolResult, Tool
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.extensions.tasks.client import tasks_of

__all__ = ["add_arguments", "add_result_arguments", "read_arguments", "run", "show", "tool_arguments"]

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
# Errors of other SDKs, whose servers send requests to ask the user, which 2026-07-28 does not have.
_ASKS = re.compile(r"server-initiated|back-channel|elicitation/create|sampling/createMessage")
_OLDER = "this server asks the user in older revisions; add --revision 2025-11-25"
_LONGEST_NAME = 100  # characters of the name of a file


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    parser.add_argument("tool", metavar="TOOL", nargs="?", help="without it, the names of the tools are shown")
    parser.add_argument(
        "given", nargs="*", default=[], metavar="NAME=VALUE", help="arguments; NAME:=JSON for a JSON value"
    )
    add_result_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress and no log messages")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the arguments of a tool and for its result."""
    parser.add_argument(
        "--args", metavar="JSON", help="all arguments as a JSON object; @FILE reads a file, - the input"
    )
    parser.add_argument("--save", default=".", metavar="FOLDER", help="the folder for images and other files (.)")


def run(arguments: argparse.Namespace) -> int:
    return run_command(lambda: _call(arguments), verbose=arguments.verbose)


async def _call(arguments: argparse.Namespace) -> int:
    output, reports = Output(arguments.json), ReportLines(arguments.quiet)
    terminal = Terminal(reports)
    options: dict[str, Any] = {} if arguments.quiet else {"on_log": reports.log}
    log = server_log()
    async with connected(
        arguments, log=log, tasks=True, elicitation=terminal.fill_in, elicitation_url=terminal.open_page, **options
    ) as client:
        tasks_of(client).on_state = reports.state
        given = await tool_arguments(arguments, client)
        log.clear()
        timeout = math.inf if arguments.timeout is None else arguments.timeout
        result = None
        try:
            async with until_signal() as stopped:  # cancels the call alone, so that the server is told
                result = await client.call_tool(arguments.tool, given, on_progress=reports.progress, timeout=timeout)
        except RequestError as error:
            if advice := _asks_in_older(client, str(error)):
                error.add_note(advice)
            raise
        reports.settle()
        if result is None:
            return 128 + stopped.signal
        if output.as_json:
            output.json(to_json(result, REVISIONS[client.revision]))
        else:
            show(result, output, Path(arguments.save), arguments.tool)
    if result.is_error and not arguments.quiet:  # the client has been closed, so the log is complete
        texts = " ".join(each.text for each in result.content if isinstance(each, TextContent))
        hints = end_of_log(log), _asks_in_older(client, texts)
        sys.stderr.writelines(f"trio-mcp: {each}\n" for each in hints if each)
    return 1 if result.is_error else 0


def _asks_in_older(client: Client, failure: str) -> str:
    """Advice if a call has failed because the server asks the user only in older revisions; "" otherwise."""
    return _OLDER if not REVISIONS[client.revision].handshake and _ASKS.search(failure) else ""


async def tool_arguments(arguments: argparse.Namespace, client: Client) -> dict[str, Any]:
    """Return the arguments for the tool.  Raises `UsageError` if the server does not have the tool."""
    given = _whole(arguments.args)
    tools = {tool.name: tool for tool in await client.list_tools()} if "tools" in client.capabilities else {}
    if (tool := tools.get(arguments.tool)) is None:
        names = few_names(tools) or "no tool at all"
        if not arguments.tool:
            raise UsageError(f"give the name of a TOOL; the server has {names}")
        raise UsageError(f"the server has no tool {arguments.tool!r}; it has {names}")
    return {**given, **read_arguments(arguments.given, tool)}


def _whole(text: str | None) -> dict[str, Any]:
    """Read the arguments of `--args`."""
    if text is None:
        return {}
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--args cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--args must be a JSON object, got {type(value).__name__}")
    return value


def read_arguments(texts: Sequence[str], tool: Tool) -> dict[str, Any]:
    """Read arguments of the form NAME=VALUE by the schema of the tool, and NAME:=JSON without it.

    An argument that may be a string is taken as it is; others are read as JSON.  Raises `UsageError`.
    """
    declared = tool.input_schema.get("properties")
    properties = declared if isinstance(declared, dict) else {}
    values: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        whole = text.lstrip().startswith("{")
        if whole or not sign or not key.strip(":"):
            known = f"; {tool.name} has {few_names(properties)}" if properties else ""
            instead = " and a JSON object of all follows --args;" if whole else ""
            raise UsageError(f"an argument must be like NAME=VALUE,{instead} got {text!r}{known}")
        name = key.removesuffix(":")
        if name not in properties and properties:
            raise UsageError(f"{tool.name} has no argument {name!r}; it has {few_names(properties)}")
        schema = properties.get(name)
        if not key.endswith(":") and _takes_text(schema):
            values[name] = value
            continue
        try:
            values[name] = json.loads(value)
        except ValueError:
            raise UsageError(f"{name} must be {_expected(name, schema)}, got {value!r}") from None
    return values


def _expected(name: str, schema: Any) -> str:
    """What an argument must be, for an error."""
    if not isinstance(schema, dict):
        return "a JSON value"
    if schema.get("enum"):
        return f"one of {compact(schema['enum'])}"
    match schema.get("type"):
        case "object":
            return f"a JSON object, such as {name}='{{\"a\": 1}}'"
        case "array":
            example = '["a", "b"]' if _takes_text(schema.get("items")) else "[1, 2]"
            return f"a JSON array, such as {name}='{example}'"
        case "boolean":
            return "true or false"
        case str(kind):
            return f"a JSON {kind}"
    return "a JSON value"


def _takes_text(schema: Any) -> bool:
    """Whether an argument may be a string."""
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    if kinds is None:
        lists = {key: schema[key] for key in ("anyOf", "oneOf", "enum") if isinstance(schema.get(key), list)}
        unions = [each for key in ("anyOf", "oneOf") for each in lists.get(key, ())]
        return any(map(_takes_text, unions)) or any(isinstance(each, str) for each in lists.get("enum", ()))
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def show(result: CallToolResult, output: Output, folder: Path, name: str) -> None:
    """Write a result for people: texts as they are, structured content as JSON, and other content into files."""
    structured = result.structured_content
    texts = [each.text for each in result.content if isinstance(each, TextContent)]
    if structured is not None and not result.is_error:
        output.json(structured)
        texts = [text for text in texts if not _same(text, structured)]
    for text in texts:
        if result.is_error:
            for line in text.splitlines():
                output.line(output.painted(line, "bad"))
        else:
            output.content(text)
    for number, block in enumerate(each for each in result.content if not isinstance(each, TextContent)):
        if isinstance(block, ImageContent | AudioContent):
            _save(block.data, block.mime_type, folder, f"{name}-{number + 1}", output)
        elif isinstance(block, ResourceLink):
            output.content(f"{block.uri}  {block.name}")
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            output.content(block.resource.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, BlobResourceContents):
            _save(block.resource.blob, block.resource.mime_type, folder, f"{name}-{number + 1}", output)
        else:
            output.line(repr(block))


def _same(text: str, structured: object) -> bool:
    """Whether a text only repeats the structured content; a value alone is boxed as {"result": value}."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    boxed = structured["result"] if isinstance(structured, Mapping) and list(structured) == ["result"] else structured
    return bool(value in (structured, boxed) or text == boxed)


def _save(data: bytes, mime_type: str | None, folder: Path, name: str, output: Output) -> None:
    # The server has chosen the name of the tool, which must not lead out of the folder.
    name = _UNSAFE.sub("_", name)[-_LONGEST_NAME:].lstrip(".")
    path = folder / f"{name}{mimetypes.guess_extension(mime_type or '') or '.bin'}"
    write_file(path, data)
    output.content(f"{path}: {len(data)} bytes of {mime_type or 'binary data'}")
