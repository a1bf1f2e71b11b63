"""A client that shows the entries of any server, and calls one of its tools.

    python examples/look.py http://127.0.0.1:3000/mcp
    python examples/look.py python examples/progress.py
    python examples/look.py --call export '{"rows": 5}' python examples/progress.py

It asks the questions of the server at the terminal.  Ctrl-C during a call cancels the call in the server, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable

import trio

from trio_mcp import Client, McpError, TextContent, UsageError, open_client
from trio_mcp.core.forms import BooleanSchema, MultiSelectSchema, NumberSchema
from trio_mcp.types import (
    CallToolResult,
    FormElicitationRequest,
    Prompt,
    PromptArgument,
    Resource,
    ResourceTemplate,
    Tool,
)


async def fill_in(form: FormElicitationRequest) -> dict[str, object] | None:
    print(f"the server asks: {form.message}")
    values: dict[str, object] = dict(form.defaults)
    for name, field in form.fields.items():
        choices = ", ".join(value for value, _ in getattr(field, "choices", ()))
        text = f"  {name}{choices and f' ({choices})'} [{values.get(name, '')}]: "
        line = await trio.to_thread.run_sync(input, text, abandon_on_cancel=True)
        if line:
            values[name] = parse(line) if isinstance(field, NumberSchema | BooleanSchema | MultiSelectSchema) else line
    return values or None


def parse(line: str) -> object:
    """Parse 5, true or ["a", "b"].  Other text is returned as it is; the client then reports that it does not fit."""
    try:
        return json.loads(line)
    except ValueError:
        return line


async def look(client: Client) -> None:
    print(f"{client.server.get('name')} {client.server.get('version')}, in {client.revision}: {client.negotiation.why}")
    if "tools" in client.capabilities:
        for tool in await client.list_tools():
            schema = tool.input_schema
            arguments = signature(schema.get("properties") or (), schema.get("required") or ())
            print(f"  tool {tool.name}{arguments}{description_of(tool)}")
    if "resources" in client.capabilities:
        for resource in await client.list_resources():
            print(f"  resource {resource.uri}{description_of(resource)}")
        for template in await client.list_resource_templates():
            print(f"  template {template.uri_template}{description_of(template)}")
    if "prompts" in client.capabilities:
        for prompt in await client.list_prompts():
            given = [each for each in prompt.arguments or () if isinstance(each, PromptArgument)]
            required = [each.name for each in given if each.required]
            print(f"  prompt {prompt.name}{signature([each.name for each in given], required)}{description_of(prompt)}")


def signature(names: Iterable[str], required: Collection[str]) -> str:
    return f"({', '.join(name if name in required else f'{name}?' for name in names)})"


def description_of(entry: Tool | Resource | ResourceTemplate | Prompt) -> str:
    text = entry.description or entry.title
    return f": {text}" if text else ""


async def call(client: Client, name: str, arguments: dict[str, object]) -> None:
    async with client.stream_tool(name, arguments) as stream:
        async for report in stream:
            print(f"  {report.progress:g} of {report.total or '?'} {report.message or ''}")
        result: CallToolResult = await stream.result()
    print("it has failed:" if result.is_error else "it gave:")
    for block in result.content:
        print(f"  {block.text}" if isinstance(block, TextContent) else f"  {type(block).__name__}")


async def main(words: list[str]) -> None:
    name, arguments = "", {}
    if not words or words[0] in ("-h", "--help"):
        sys.exit(__doc__)
    if words[:1] == ["--call"] and len(words) > 3:
        try:
            name, arguments, words = words[1], json.loads(words[2]), words[3:]
        except ValueError as error:
            sys.exit(f"the arguments of a tool are a JSON object, such as '{{\"rows\": 5}}': {error}")
    target = words[0] if len(words) == 1 and "://" in words[0] else words
    async with open_client(target, elicitation=fill_in) as client:
        await (call(client, name, arguments) if name else look(client))


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1:])
    except UsageError as error:
        sys.exit(f"{error}\n{__doc__}")
    except McpError as error:
        sys.exit(str(error))
