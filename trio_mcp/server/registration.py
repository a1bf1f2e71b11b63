"""Registration: turn the functions and descriptions of an author into entries of the catalog.

Each kind has two functions.  `..._of` reads the signature and the docstring of a function; `raw_...` takes an object of
the protocol and a handler.  Both make the same kind of entry.  They check at registration everything that can be known
before a call, and their errors say how to fix the code.

Slow imports that are not always needed are inside functions: a tool that returns a str needs no objects of the protocol
(50 ms) and no JSON Schema engine (20 ms).
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.oauth.principals import declared_scopes
from trio_mcp.core.revisions import LATEST
from trio_mcp.server.arguments import Arguments, arguments_of, text_arguments
from trio_mcp.server.entries import Completer, PromptEntry, ResourceEntry, TemplateEntry, ToolEntry
from trio_mcp.server.handlers import raw, typed

if TYPE_CHECKING:
    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Annotations, Described, Icon, Meta, Resource
    from trio_mcp.core.http.fields import Mirror
    from trio_mcp.core.models import Prompt, ResourceTemplate, Tool, ToolAnnotations
    from trio_mcp.core.schema.templates import Matcher

__all__ = [
    "completer_of",
    "prompt_of",
    "raw_prompt",
    "raw_resource",
    "raw_template",
    "raw_tool",
    "resource_of",
    "tool_of",
]

_Function = Callable[..., Any]

_log = logging.getLogger("trio_mcp")


# Tools.


def tool_of(
    function: _Function,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    annotations: ToolAnnotations | None = None,
    icons: Sequence[Icon] | None = None,
    meta: Meta | None = None,
    scopes: Collection[str] = (),
    structured: bool = True,
    thread: bool = True,
    abandon_on_cancel: bool = True,
    replay: bool = False,
) -> ToolEntry:
    """Make a tool; its schemas come from the function's parameters and return annotation.

    `structured=False`: results are content only, for any annotation.  An argument that is marked with
    `Field(header=...)` is repeated in an HTTP header, where every proxy and log on the way sees it: mark no secrets
    (tool-28).
    """
    from trio_mcp.core.schema.hints import hint_of
    from trio_mcp.server.results import OutputSchema

    name = _name_of_entry(function, name, "tool")
    handler = typed(function, thread=thread, abandon_on_cancel=abandon_on_cancel)
    details: dict[str, Any] = {"title": title, "description": _described(function, description)}
    details |= {"annotations": annotations, "icons": icons, "meta": meta}
    _check_details(f"the tool {name!r}", details, "ToolAnnotations")
    arguments = arguments_of(function, handler)
    try:
        returned = hint_of(function, "return")
        output = OutputSchema(returned) if structured else None
    except UsageError as error:
        raise UsageError(f"the tool {name!r}: {error}") from None
    output_schema = None if output is None else output.schema
    make = _later("Tool", name, arguments.schema, output_schema=output_schema, **details)
    mirrors = _mirrors(name, arguments.schema)
    return ToolEntry(
        name, handler, make,
        replay=replay, arguments=arguments, output=output, mirrors=mirrors, scopes=_scopes(name, scopes),
        embeds=_embeds(returned),
    )  # fmt: skip


def _embeds(hint: object) -> bool:
    """Whether the returned value may contain resources.  It cannot if their module was never imported."""
    content: Any = sys.modules.get("trio_mcp.core.content")
    if content is None:
        return False
    return hint is content.EmbeddedResource or any(map(_embeds, typing.get_args(hint)))


def raw_tool(
    tool: Tool,
    function: _Function,
    *,
    scopes: Collection[str] = (),
    thread: bool = True,
    abandon_on_cancel: bool = True,
    replay: bool = False,
) -> ToolEntry:
    """Make a tool that is described by hand; `function(ctx, arguments)` gets arguments that fit its schema."""
    from trio_mcp.core.models import Tool
    from trio_mcp.core.schema.validation import InvalidSchema, check_input_schema, compile_schema
    from trio_mcp.server.results import OutputSchema

    _check_model(tool, Tool, "ToolAnnotations")
    handler = raw(function, ("ctx", "arguments"), thread=thread, abandon_on_cancel=abandon_on_cancel)
    try:
        which = "input"
        check_input_schema(tool.input_schema)
        arguments = Arguments(dict(tool.input_schema), compiled=compile_schema(tool.input_schema))
        which = "output"
        output = None if tool.output_schema is None else OutputSchema(schema=tool.output_schema)
    except InvalidSchema as error:
        raise InvalidSchema(error.reason, f"the {which} schema of the tool {tool.name!r}: {error}") from None
    return ToolEntry(
        tool.name, handler, lambda: tool,
        replay=replay, arguments=arguments, output=output, mirrors=_mirrors(tool.name, arguments.schema),
        scopes=_scopes(tool.name, scopes),
    )  # fmt: skip


def _scopes(name: str, scopes: Collection[str]) -> tuple[str, ...]:
    return declared_scopes(f"the scopes of the tool {name!r}", scopes) if scopes else ()


def _mirrors(name: str, schema: JsonObject) -> tuple[Mirror, ...]:
    if "x-mcp-header" not in repr(schema):  # most schemas have none, and need no module for headers
        return ()
    from trio_mcp.core.http.fields import find_mirrors
    from trio_mcp.server.questions import names_a_secret

    mirrors = find_mirrors(schema)
    if mirrors.faults:
        raise UsageError(f"the tool {name!r} cannot have its arguments in headers: {'; '.join(mirrors.faults)}")
    for rule in mirrors.rules:
        if names_a_secret(rule.path[-1]):
            _log.warning(
                "the tool %r repeats its argument %r in the header %s, which every proxy and log on the way sees; "
                "if that is a secret, do not mark it (tool-28)",
                name,
                rule.path[-1],
                rule.header,
            )
    return mirrors.rules


# Resources.

# RFC 3986, appendix A.
_PLAIN = r"[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_PATH = rf"(?:{_PLAIN}|[:@/])*"
_LITERAL = r"\[(?:[0-9A-Fa-f:.]+|[Vv][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]"  # [::1]
_AUTHORITY = rf"(?:(?:{_PLAIN}|:)*@)?(?:{_LITERAL}|(?:{_PLAIN})*)(?::[0-9]*)?"
_REST = rf"(?:{_PLAIN}|[:@/?])*"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*:"
_URI = rf"{_SCHEME}(?://{_AUTHORITY}(?:/{_PATH})?|(?!//){_PATH})(?:\?{_REST})?(?:#{_REST})?"


def _check_uri(uri: str) -> None:
    """res-10, res-13."""
    if not isinstance(uri, str) or not re.fullmatch(_URI, uri):
        raise UsageError(
            f"{uri!r} is not an absolute URI (RFC 3986): it needs a scheme, such as notes://today, and characters that "
            "URIs do not allow must be percent-encoded"
        )


def resource_of(
    function: _Function,
    uri: str,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    mime_type: str | None = None,
    size: int | None = None,
    annotations: Annotations | None = None,
    icons: Sequence[Icon] | None = None,
    meta: Meta | None = None,
    cache: CacheHints | None = None,
    thread: bool = True,
    abandon_on_cancel: bool = True,
    replay: bool = False,
) -> ResourceEntry | TemplateEntry:
    """Make a resource that the function reads, or a resource template if `uri` is an RFC 6570 template.

    The variables of a template are the function's parameters.
    """
    handler = typed(function, thread=thread, abandon_on_cancel=abandon_on_cancel)
    name = _name_of_entry(function, name, "resource")
    details: dict[str, Any] = {"title": title, "description": _described(function, description), "mime_type": mime_type}
    details |= {"annotations": annotations, "icons": icons, "meta": meta}
    _check_details(f"the resource {name!r}", {**details, "size": size})
    _check_cache(f"the resource {name!r}", cache)
    arguments = text_arguments(function, handler, "the variables of a URI template")
    if isinstance(uri, str) and "{" in uri:
        if size is not None:
            raise UsageError(f"the resources of the template {uri!r} have different sizes; drop size={size}")
        matcher = _matcher(uri)
        _check_variables(function, matcher, arguments.schema)
        make = _later("ResourceTemplate", name, uri, **details)
        return TemplateEntry(
            matcher, handler, make, replay=replay, mime_type=mime_type, cache=cache, arguments=arguments
        )
    _check_uri(uri)
    for parameter in arguments.schema["properties"]:
        raise UsageError(
            f"parameter {parameter!r} of {name_of(function)} is not in the URI {uri!r}; write {{{parameter}}} into the "
            "URI, or drop the parameter"
        )
    make = _later("Resource", name, uri, size=size, **details)
    return ResourceEntry(uri, handler, make, replay=replay, mime_type=mime_type, cache=cache)


def _matcher(text: str) -> Matcher:
    from trio_mcp.core.schema.templates import Matcher

    if not re.match(_SCHEME + r"|\{", text):
        raise UsageError(f"the URI template {text!r} must begin with a scheme, such as notes://{{name}}")
    return Matcher(text)


def _check_variables(function: _Function, matcher: Matcher, schema: JsonObject) -> None:
    """Raise UsageError unless the variables of the template are the parameters of the function."""
    where, variables = f"the URI template {matcher.template.text!r}", matcher.template.variables
    for name in schema["properties"]:
        if name not in variables:
            raise UsageError(
                f"parameter {name!r} of {name_of(function)} is not in {where}; write {{{name}}} or {{?{name}}} into "
                "the template, or drop the parameter"
            )
    for name in variables:
        if name not in schema["properties"]:
            raise UsageError(f"{where} has {name!r}, which {name_of(function)} does not take; add the parameter")
        if name in matcher.optional and name in schema.get("required", ()):
            raise UsageError(
                f"{name!r} may be absent from the URIs of {where}; give the parameter of {name_of(function)} a default"
            )


def raw_resource(
    resource: Resource,
    function: _Function,
    *,
    cache: CacheHints | None = None,
    thread: bool = True,
    abandon_on_cancel: bool = True,
    replay: bool = False,
) -> ResourceEntry:
    """Make a resource that is described by hand, and read by `function(ctx, uri)`."""
    from trio_mcp.core.content import Resource

    _check_model(resource, Resource)
    _check_cache(f"the Resource {resource.name!r}", cache)
    _check_uri(resource.uri)
    handler = raw(function, ("ctx", "uri"), thread=thread, abandon_on_cancel=abandon_on_cancel)
    return ResourceEntry(
        resource.uri, handler, lambda: resource, replay=replay, mime_type=resource.mime_type, cache=cache
    )


def raw_template(
    template: ResourceTemplate,
    function: _Function,
    *,
    cache: CacheHints | None = None,
    thread: bool = True,
    abandon_on_cancel: bool = True,
    replay: bool = False,
) -> TemplateEntry:
    """Make a resource template that is described by hand, and read by `function(ctx, uri, variables)`."""
    from trio_mcp.core.models import ResourceTemplate

    _check_model(template, ResourceTemplate)
    _check_cache(f"the ResourceTemplate {template.name!r}", cache)
    if "{" not in template.uri_template:
        raise UsageError(f"{template.uri_template!r} has no variables; register it as a resource")
    handler = raw(function, ("ctx", "uri", "variables"), thread=thread, abandon_on_cancel=abandon_on_cancel)
    matcher = _matcher(template.uri_template)
    return TemplateEntry(
        matcher, handler, lambda: template,
        replay=replay, mime_type=template.mime_type, cache=cache, arguments=None,
    )  # fmt: skip


# Prompts.


def prompt_of(
    function: _Function,
    *,
    name: str | None = None,
    title: str | None = None,
    description: str | None = None,
    icons: Sequence[Icon] | None = None,
    meta: Meta | None = None,
    thread: bool = True,
    abandon_on_cancel: bool = True,
    replay: bool = False,
) -> PromptEntry:
    """Make a prompt whose arguments are the function's parameters."""
    handler = typed(function, thread=thread, abandon_on_cancel=abandon_on_cancel)
    name = _name_of_entry(function, name, "prompt")
    description = _described(function, description)
    details: dict[str, Any] = {"title": title, "description": description, "icons": icons, "meta": meta}
    _check_details(f"the prompt {name!r}", details)
    arguments = text_arguments(function, handler, "the arguments of a prompt")

    def make() -> Prompt:
        from trio_mcp.core.models import Prompt, PromptArgument

        required = arguments.schema.get("required", ())
        listed = [
            PromptArgument(each, schema.get("description"), each in required, title=schema.get("title"))
            for each, schema in arguments.schema["properties"].items()
        ]
        return Prompt(name, listed or None, **details)

    return PromptEntry(name, handler, make, replay=replay, arguments=arguments, description=description)


def raw_prompt(
    prompt: Prompt, function: _Function, *, thread: bool = True, abandon_on_cancel: bool = True, replay: bool = False
) -> PromptEntry:
    """Make a prompt that is described by hand; `function(ctx, arguments)` gets strings, with all required arguments."""
    from trio_mcp.core.models import Prompt, PromptArgument
    from trio_mcp.core.schema.shapes import shape_of

    _check_model(prompt, Prompt)
    members: dict[str, Any] = {}
    for each in prompt.arguments or ():
        if not isinstance(each, PromptArgument) or not each.name or each.name in members:
            raise UsageError(
                f"the arguments of the prompt {prompt.name!r} must be PromptArgument objects, each with a name of its "
                "own"
            )
        members[each.name] = str if each.required else typing.NotRequired[str]
    shape = shape_of(typing.TypedDict("Arguments", members))  # type: ignore[operator]
    handler = raw(function, ("ctx", "arguments"), thread=thread, abandon_on_cancel=abandon_on_cancel)
    return PromptEntry(
        prompt.name, handler, lambda: prompt,
        replay=replay, arguments=Arguments(shape.schema, shape.fits), description=prompt.description,
    )  # fmt: skip


# Completion.

_COMPLETION = ("value", "arguments", "argument", "ref")


def completer_of(function: _Function, *, thread: bool = True, abandon_on_cancel: bool = True) -> Completer:
    """Make a completer.

    Its function takes any of these by name: `value`, `arguments` (those that have a value already), `argument` (the
    name of the completed argument), `ref`, and a Context.  It returns the values, best first.
    """
    handler = typed(function, thread=thread, abandon_on_cancel=abandon_on_cancel)
    wants = [name for name in inspect.signature(function).parameters if name not in handler.skip]
    for name in wants:
        if name not in _COMPLETION:
            raise UsageError(
                f"parameter {name!r} of {name_of(function)} is not a parameter of completions; these are "
                f"{', '.join(_COMPLETION)} and a Context"
            )
    return Completer(handler, wants)


# The description of an entry: title, icons, annotations, metadata.

_MIME_TYPE = r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(\s*;.*)?"
_ROLES = ("user", "assistant")


def _check_details(subject: str, details: Mapping[str, Any], annotations: str = "Annotations") -> None:
    """`annotations` names the class that the annotations must have."""
    for name in ("title", "description", "mime_type"):
        if not isinstance(text := details.get(name), str | None):
            raise UsageError(f"the {name} of {subject} must be text, not {type(text).__name__}")
    mime_type, size = details.get("mime_type"), details.get("size")
    if mime_type is not None and not re.fullmatch(_MIME_TYPE, mime_type):
        raise UsageError(f"the mime_type of {subject} must be like text/plain, not {mime_type!r}")
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(f"the size of {subject} must be a number of bytes, got {size!r}")
    if details.get("icons") is not None:
        _check_icons(subject, details["icons"])
    if details.get("annotations") is not None:
        _check_annotations(subject, details["annotations"], annotations)
    if (meta := details.get("meta")) is not None:
        from trio_mcp.core.revisions import check_meta

        if not isinstance(meta, Mapping):
            raise UsageError(f"the meta of {subject} must be a mapping, not {type(meta).__name__}")
        check_meta(meta, LATEST)


def _check_icons(subject: str, icons: Any) -> None:
    from trio_mcp.core.content import Icon

    if not isinstance(icons, Sequence) or not all(isinstance(icon, Icon) for icon in icons):
        raise UsageError(f"the icons of {subject} must be a list of Icon objects")


def _check_annotations(subject: str, annotations: Any, wanted: str) -> None:
    """res-25: audience, priority, and the time of the last change in ISO 8601."""
    from datetime import datetime

    from trio_mcp.core import models
    from trio_mcp.core.content import Annotations

    if not isinstance(annotations, getattr(models, wanted)):
        raise UsageError(f"the annotations of {subject} must be {wanted}, not {type(annotations).__name__}")
    if not isinstance(annotations, Annotations):
        return
    if not set(annotations.audience or ()) <= set(_ROLES):
        raise UsageError(f"the audience of {subject} must be a list of {' and '.join(_ROLES)}")
    try:
        datetime.fromisoformat(annotations.last_modified or "2025-06-18")
    except ValueError:
        raise UsageError(
            f"the last_modified of {subject} must be ISO 8601, such as 2025-06-18T15:00:00Z, not "
            f"{annotations.last_modified!r}"
        ) from None


def _check_model(model: Any, wanted: type[Described], annotations: str = "Annotations") -> None:
    if not isinstance(model, wanted):
        raise UsageError(f"expected a {wanted.__name__} object, got {type(model).__name__}")
    if not isinstance(model.name, str) or not model.name:
        raise UsageError(f"the name of a {wanted.__name__} must be a str and not empty, got {model.name!r}")
    names = ("title", "description", "icons", "meta", "annotations", "mime_type", "size")
    details = {name: getattr(model, name, None) for name in names}
    _check_details(f"the {wanted.__name__} {model.name!r}", details, annotations)


def _later(name: str, *arguments: Any, **details: Any) -> Callable[[], Any]:
    """Return a function that makes a model, so that the models are imported only when a client lists entries."""

    def make() -> Any:
        from trio_mcp.core import models

        return getattr(models, name)(*arguments, **details)

    return make


def _described(function: _Function, description: str | None) -> str | None:
    if description is not None:
        return description
    from trio_mcp.core.schema.hints import describe

    return describe(function).text or None


def _name_of_entry(function: _Function, name: str | None, kind: str) -> str:
    if name is None:
        while isinstance(function, functools.partial):
            function = function.func
        name = getattr(function, "__name__", None)
        if name is None:
            raise UsageError(f"{name_of(function)} has no name; give name=... for the {kind}")
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of a {kind} must be a str and not empty, got {name!r}")
    return name


def _check_cache(subject: str, cache: Any) -> None:
    if cache is not None:
        from trio_mcp.core.caching import CacheHints

        if not isinstance(cache, CacheHints):
            raise UsageError(f"the cache of {subject} must be CacheHints, not {type(cache).__name__}")
