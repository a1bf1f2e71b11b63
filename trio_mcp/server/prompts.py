"""Prompts and completions: how they are made from functions, and the results of their handlers."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.options import check_options
from trio_mcp.core.revisions import LATEST, Revision
from trio_mcp.core.schema.hints import alternatives_of, parameters_of
from trio_mcp.server.entries import CompletionOptions, Entry, PromptOptions, read_function, running
from trio_mcp.server.handlers import Arguments, Handler, arguments_of, typed
from trio_mcp.server.results import HandlerFault, block_of, model_class, with_type, written

if TYPE_CHECKING:
    from trio_mcp.core.models import Prompt

__all__ = ["completer_of", "completion_result", "prompt_of", "prompt_result", "text_arguments"]


def prompt_of(function: Callable[..., Any], **options: Unpack[PromptOptions]) -> Entry:
    """Make a prompt whose arguments are the function's parameters."""
    name, handler, details = read_function(function, "prompt", options, PromptOptions)
    arguments = text_arguments(function, handler, "the arguments of a prompt")
    properties = arguments.schema["properties"]

    def describe() -> Prompt:
        from trio_mcp.core.models import Prompt, PromptArgument

        required = arguments.schema.get("required", ())
        listed = [
            PromptArgument(each, schema.get("description"), each in required, title=schema.get("title"))
            for each, schema in properties.items()
        ]
        return Prompt(name, listed or None, **details)

    return Entry(
        "prompts", name, handler, finish_prompt, describe, replay=options.get("replay", False),
        arguments=arguments, takes=frozenset(properties), description=details["description"],
    )  # fmt: skip


def finish_prompt(entry: Entry, value: Any, name: str, revision: Revision) -> JsonObject:
    """Make the result of a prompt."""
    return prompt_result(value, entry.description, revision)


def text_arguments(function: Callable[..., Any], handler: Handler, subject: str) -> Arguments:
    """Arguments that are text in the protocol: arguments of prompts, and variables of templates (prm-17)."""
    for each in parameters_of(function, handler.skip):
        if each.hint is not Any and not _is_text(each.hint):
            raise UsageError(
                f"parameter {each.name!r} of {name_of(function)}: {subject} are text; make it str, str | None, a "
                "Literal of strings or an Enum of strings, and convert it in the function"
            )
    return arguments_of(function, handler, untyped=str)


def _is_text(hint: Any) -> bool:
    values: list[Any] = []
    for each in alternatives_of(hint):
        origin: Any = typing.get_origin(each)
        if origin is typing.Literal:
            values += typing.get_args(each)
        elif hasattr(each, "__members__"):  # an Enum
            values += [member.value for member in each]
        elif each is not types.NoneType:
            values.append("" if each is str else each)
    return bool(values) and all(isinstance(value, str) for value in values)


def prompt_result(value: Any, description: str | None, revision: Revision) -> JsonObject:
    """Make a result from text, a content block, a message, a list of these, or `GetPromptResult`.

    Raises as `tool_result`.
    """
    more = {} if description is None else {"description": description}
    if type(value) is str:
        return {**more, "messages": [{"role": "user", "content": {"type": "text", "text": value}}]}
    with HandlerFault("the result of the prompt"):
        if not isinstance(value, model_class("GetPromptResult")):
            values = value if isinstance(value, list | tuple) else [value]
            return {**more, "messages": [_message(each, revision) for each in values]}
        result = written(value, revision)
        for message in result["messages"]:
            message["content"] = with_type(message["content"])
        return result


def _message(value: Any, revision: Revision) -> JsonObject:
    if not isinstance(value, model_class("PromptMessage")):
        if isinstance(value, (str, model_class("ContentBlock"))):
            return {"role": "user", "content": block_of(value, revision)}
        raise UsageError(f"{type(value).__name__} is not a message; return text, content or PromptMessage")
    if value.role not in ("user", "assistant"):  # prm-17
        raise UsageError("the role of a message must be user or assistant")
    message = written(value, revision)
    return {**message, "content": with_type(message["content"])}


# Completion.

_COMPLETION = ("value", "arguments", "argument", "ref")


def completer_of(function: Callable[..., Any], **options: Unpack[CompletionOptions]) -> Entry:
    """Make a completer.

    Its function takes any of these by name: `value`, `arguments` (those that have a value already), `argument` (the
    name of the completed argument), `ref`, and a Context.  It returns the values, best first.
    """
    check_options(options, CompletionOptions)
    handler = typed(function, **running(options))
    wants = frozenset(inspect.signature(function).parameters) - handler.skip
    for name in inspect.signature(function).parameters:
        if name in wants and name not in _COMPLETION:
            raise UsageError(
                f"parameter {name!r} of {name_of(function)} is not a parameter of completions; these are "
                f"{', '.join(_COMPLETION)} and a Context"
            )
    return Entry("completions", "", handler, _finish_completion, takes=wants)


def _finish_completion(entry: Entry, value: Any, name: str, revision: Revision) -> JsonObject:
    return completion_result(value)


_COMPLETIONS = 100


def completion_result(value: Any) -> JsonObject:
    """Make a result from a list of strings, best first, or `Completion`.  Raises `BadResult`."""
    with HandlerFault("the result of a completion"):
        if isinstance(value, model_class("Completion")):
            return {"completion": written(value, LATEST)}
        texts = (
            isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
        )
        if not texts:
            raise UsageError(f"it must be a list of strings or a Completion, got {type(value).__name__}")
        # cmpl-01: the order is kept.  cmpl-07: "must not exceed 100 items".
        first = [str.__str__(each) for each in list(value)[:_COMPLETIONS]]
        return {"completion": {"values": first, "total": len(value), "hasMore": len(value) > _COMPLETIONS}}
