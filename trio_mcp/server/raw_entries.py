"""Entries that are described by hand: an object of the protocol, and a handler that takes its arguments by position.

| Kind | The handler is called with |
|---|---|
| tools | the context, and arguments that fit the schema |
| prompts | the context, and strings, with all required arguments |
| resources | the context and the URI |
| templates | the context, the URI and a dict of its variables |
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from trio_mcp.core import models
from trio_mcp.core.errors import UsageError
from trio_mcp.core.schema.cost import InvalidSchema
from trio_mcp.core.schema.shapes import shape_of
from trio_mcp.core.schema.validation import check_input_schema, compile_schema
from trio_mcp.server.entries import (
    KINDS,
    Entry,
    HandlerOptions,
    PromptOptions,
    RawResourceOptions,
    RawToolOptions,
    ResourceOptions,
    ToolOptions,
    check_details,
    running,
    tool_entry,
)
from trio_mcp.server.handlers import Arguments, Handler, raw
from trio_mcp.server.prompts import finish_prompt
from trio_mcp.server.resources import check_contents, check_uri, matcher_of, resource_entry
from trio_mcp.server.results import OutputSchema

__all__ = ["raw_entry"]

# For each kind: the options of a function, and those beside an object of the protocol.
_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "tools": (ToolOptions, RawToolOptions),
    "prompts": (PromptOptions, HandlerOptions),
    "resources": (ResourceOptions, RawResourceOptions),
    "templates": (ResourceOptions, RawResourceOptions),
}


def raw_entry(kind: str, model: Any, function: Callable[..., Any] | None, **options: Any) -> Entry:
    """Make an entry of an object of the protocol and its handler, the arguments of `Server.add_tool` and so on."""
    handler = _checked_handler(kind, model, function, options)
    if kind == "tools":
        return _raw_tool(model, handler, options)
    if kind == "prompts":
        return _raw_prompt(model, handler, options)
    more = {"mime_type": model.mime_type, **options}
    if kind == "resources":
        check_uri(model.uri)
        return resource_entry(model.uri, handler, lambda: model, more)
    if "{" not in model.uri_template:
        raise UsageError(f"{model.uri_template!r} has no variables; register it as a resource")
    matcher = matcher_of(model.uri_template)
    return resource_entry(model.uri_template, handler, lambda: model, more, matcher=matcher)


def _checked_handler(kind: str, model: Any, function: Callable[..., Any] | None, options: Mapping[str, Any]) -> Handler:
    (known, raw_options), word = _OPTIONS[kind], kind.removesuffix("s")
    name, takes = KINDS[kind].model, KINDS[kind].takes
    if inspect.isroutine(model):
        made = 'resource("notes://today")' if known is ResourceOptions else word
        write = f"server.{made}({model.__name__})"
        raise UsageError(f"add_{word} takes a {name} and a handler, got a function; write {write}")
    if unknown := options.keys() - raw_options.__annotations__:
        raise TypeError(f"add_{word} has no option {min(unknown)!r}; describe the {word} in the {name} object")
    if function is None:
        write = f"server.add_{word}({name}(...), handler), with async def handler({', '.join(takes)})"
        raise UsageError(f"add_{word} needs a handler; write {write}")
    if not isinstance(model, getattr(models, name)):
        raise UsageError(f"expected a {name} object, got {type(model).__name__}")
    if not isinstance(model.name, str) or not model.name:
        raise UsageError(f"the name of a {name} must be a str and not empty, got {model.name!r}")
    subject = f"the {name} {model.name!r}"
    described = {each: getattr(model, each) for each in known.__annotations__ if hasattr(model, each)}
    given = {**described, **options}
    check_details(subject, given, known)
    if known is ResourceOptions:
        check_contents(subject, given)
    return raw(function, takes, **running(options))


def _raw_tool(tool: models.Tool, handler: Handler, options: Mapping[str, Any]) -> Entry:
    try:
        which = "input"
        check_input_schema(tool.input_schema)
        arguments = Arguments(dict(tool.input_schema), compiled=compile_schema(tool.input_schema))
        which = "output"
        output = None if tool.output_schema is None else OutputSchema(schema=tool.output_schema)
    except InvalidSchema as error:
        raise InvalidSchema(error.reason, f"the {which} schema of the tool {tool.name!r}: {error}") from None
    task = None if tool.execution is None else tool.execution.task_support
    return tool_entry(tool.name, handler, lambda: tool, arguments, output, options, task or "forbidden")


def _raw_prompt(prompt: models.Prompt, handler: Handler, options: Mapping[str, Any]) -> Entry:
    members: dict[str, Any] = {}
    for each in prompt.arguments or ():
        if not isinstance(each, models.PromptArgument) or not each.name or each.name in members:
            raise UsageError(
                f"the arguments of the prompt {prompt.name!r} must be PromptArgument objects, each with a name of its "
                "own"
            )
        members[each.name] = str if each.required else typing.NotRequired[str]
    shape = shape_of(typing.TypedDict("Arguments", members))  # type: ignore[operator]
    return Entry(
        "prompts", prompt.name, handler, finish_prompt, lambda: prompt, replay=options.get("replay", False),
        arguments=Arguments(shape.schema, shape.fits), takes=frozenset(members), description=prompt.description,
    )  # fmt: skip
