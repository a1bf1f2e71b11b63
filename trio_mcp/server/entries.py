"""Entries: one tool, resource, resource template, prompt or completion; and how tools are made.

`KINDS` says how the kinds differ.  An entry is made from the signature and the docstring of a function, here for tools
and in `resources` and `prompts` for the other kinds, or in `raw_entries` from an object of the protocol and a handler.
Each maker checks at registration everything that can be known before a call, and its errors say how to fix the code.

A server that is only called needs no objects of the protocol (50 ms) and no JSON Schema engine (20 ms), so they are
imported inside functions.
"""

from __future__ import annotations

import functools
import logging
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack

import attrs

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.options import check_options
from trio_mcp.core.principals import declared_scopes
from trio_mcp.core.revisions import LATEST, check_meta
from trio_mcp.server.handlers import Arguments, Handler, arguments_of, typed
from trio_mcp.server.results import OutputSchema, model_class, tool_result

if TYPE_CHECKING:
    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Annotations, Described, Icon
    from trio_mcp.core.http.fields import Mirror
    from trio_mcp.core.models import ToolAnnotations
    from trio_mcp.core.revisions import Revision
    from trio_mcp.core.schema.templates import Matcher

__all__ = [
    "KINDS", "LISTS", "CompletionOptions", "Entry", "HandlerOptions", "Kind", "PromptOptions", "RawResourceOptions",
    "RawToolOptions", "ResourceOptions", "TaskSupport", "ToolOptions", "tool_of",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")


class Kind(NamedTuple):
    """How one kind of entries differs from the others.

    `label` and `key_name` are for messages.  `capability` is the one that the server declares for such entries.
    `member` is the member of the result of the list `method`, and `key` the member of its items that names them.
    `model` is the class of the protocol, and `takes` are the parameters of a handler that is registered with an object
    of that class.
    """

    label: str
    key_name: str
    capability: str
    method: str
    member: str
    key: str
    model: str
    takes: tuple[str, ...]

    @property
    def prefixed(self) -> bool:
        """Whether mounting puts a prefix before the key; URIs do not change."""
        return self.key_name == "name"


KINDS: Mapping[str, Kind] = {
    "tools": Kind("tool", "name", "tools", "tools/list", "tools", "name", "Tool", ("ctx", "arguments")),
    "prompts": Kind("prompt", "name", "prompts", "prompts/list", "prompts", "name", "Prompt", ("ctx", "arguments")),
    "resources": Kind(
        "resource", "URI", "resources", "resources/list", "resources", "uri", "Resource", ("ctx", "uri")
    ),
    "templates": Kind(
        "resource template", "URI", "resources", "resources/templates/list", "resourceTemplates", "uriTemplate",
        "ResourceTemplate", ("ctx", "uri", "variables"),
    ),
}  # fmt: skip
"""The kinds of entries that are listed.  Completions are entries too, but clients only see that there are some."""

LISTS: Mapping[str, str] = {kind.method: name for name, kind in KINDS.items()}
"""For each method: the kind of its entries."""

Finish: TypeAlias = "Callable[[Entry, Any, str, Revision], JsonObject]"
"""It takes the entry, the value, the name or URI of the request, and its revision."""


@attrs.define(eq=False)
class Entry:
    """One tool, resource, resource template, prompt or completion.

    The description for clients (`model`, `json`) is made when the first client asks for a list.
    """

    kind: str
    key: str
    """The name of a tool or prompt, or the URI or URI template of a resource; unique for each kind."""
    handler: Handler
    finish: Finish
    """Makes the result of the value that the handler returned; see `results`."""
    _describe: Callable[[], Any] = lambda: None
    replay: bool = False
    """Whether the handler may be run again from the start."""
    arguments: Arguments | None = None
    """Checks and converts the arguments; None if the handler takes them as they are."""
    takes: frozenset[str] = frozenset()
    """The names of the arguments that can be completed; for a completion, the parameters of its function."""
    output: OutputSchema | None = None
    """The schema that the results of a tool are checked against."""
    mirrors: Sequence[Mirror] = ()
    """The arguments of a tool that are repeated in HTTP headers."""
    scopes: Sequence[str] = ()
    """The scopes that an access token needs for a call of a tool over HTTP."""
    task: TaskSupport = "forbidden"
    """Whether a call of a tool becomes a task."""
    asks_first: bool = False
    """Whether the handler of a tool itself makes its call a task."""
    embeds: bool = False
    """The results of a tool contain resources, so the server declares the resources capability (tool-12)."""
    matcher: Matcher | None = None
    """Matches URIs with a resource template."""
    mime_type: str | None = None
    """A default for the contents of a resource."""
    cache: CacheHints | None = None
    """Hints for the contents of a resource."""
    description: str | None = None
    """A default for the result of a prompt."""
    _json: dict[str, JsonObject] = attrs.field(factory=dict)

    def prepare(self, ctx: Any, arguments: JsonObject, uri: str | None = None) -> Callable[[], Any]:
        """Return the call of the handler; for a resource the arguments are the variables of its `uri`.

        Raises BadArguments for arguments that the schema does not allow (tool-06, prm-08, prm-09).
        """
        named = arguments if self.arguments is None else self.arguments.read(arguments)
        if uri is None:
            return self.handler.bind(ctx, named, arguments)
        placed = (uri,) if self.matcher is None else (uri, arguments)
        return self.handler.bind(ctx, named, *placed)

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the variables of a URI, or None if the template does not match it.

        `uri` comes from `core.schema.templates.in_ascii`.  res-10: a URI does not match if a variable could lead
        outside of its part of the path, or does not fit the parameters of the function.
        """
        assert self.matcher is not None
        variables = self.matcher.match_ascii(uri)
        if variables is None or self.arguments is None or self.arguments.fit(variables):
            return variables
        return None

    @property
    def model(self) -> Described:
        """The description for clients; made when it is first needed."""
        model: Described = self._describe()
        return model

    def json(self, revision: Revision) -> JsonObject:
        """Return `model` as JSON for `revision`.  It is cached, so callers must not change it."""
        if revision.name not in self._json:
            from trio_mcp.core.codec import to_json

            model = self.model
            if self.output is not None and self.output.boxed_in(revision):
                model = attrs.evolve(model, output_schema=self.output.boxed_schema())  # type: ignore[call-arg]
            self._json[revision.name] = to_json(model, revision)
        return self._json[revision.name]


# The options of decorators and `add_...`, each written once: `help` and type checkers read them here.


TaskSupport: TypeAlias = Literal["forbidden", "optional", "required"]
"""Whether a tool may run as a task."""


class CompletionOptions(TypedDict, total=False):
    """How a function is run; see `Server.tool`."""

    thread: bool
    abandon_on_cancel: bool


class HandlerOptions(CompletionOptions, total=False):
    """How the function of an entry is run; see `Server.tool`."""

    replay: bool


class _EntryOptions(TypedDict, total=False):
    name: str | None
    title: str | None
    description: str | None
    icons: Sequence[Icon] | None
    meta: Mapping[str, Any] | None


class PromptOptions(_EntryOptions, HandlerOptions, total=False):
    """The options of a prompt; see `Server.prompt`."""


class ToolOptions(_EntryOptions, HandlerOptions, total=False):
    """The options of a tool; see `Server.tool`."""

    annotations: ToolAnnotations | None
    scopes: Collection[str]
    structured: bool
    task: TaskSupport
    asks_first: bool


class ResourceOptions(_EntryOptions, HandlerOptions, total=False):
    """The options of a resource; see `Server.resource`."""

    mime_type: str | None
    size: int | None
    annotations: Annotations | None
    cache: CacheHints | None


class RawToolOptions(HandlerOptions, total=False):
    """The options of a tool that is described by hand."""

    scopes: Collection[str]
    asks_first: bool


class RawResourceOptions(HandlerOptions, total=False):
    """The options of a resource that is described by hand."""

    cache: CacheHints | None


# Options that no client sees.
_OWN = ("name", "scopes", "structured", "task", "asks_first", "cache", *HandlerOptions.__annotations__)


def read_function(
    function: Callable[..., Any], label: str, options: Mapping[str, Any], known: Any
) -> tuple[str, Handler, dict[str, Any]]:
    """Read a function and its options: the name of the entry, the handler, and the description without the name."""
    name = options.get("name")
    if name is None:
        named = function
        while isinstance(named, functools.partial):
            named = named.func
        name = getattr(named, "__name__", None)
        if name is None:
            raise UsageError(f"{name_of(function)} has no name; give name=... for the {label}")
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of a {label} must be a str and not empty, got {name!r}")
    check_details(f"the {label} {name!r}", options, known)
    handler = typed(function, **running(options))
    details = {each: options.get(each) for each in known.__annotations__ if each not in _OWN}
    if details["description"] is None:
        from trio_mcp.core.schema.hints import describe

        details["description"] = describe(function).text or None
    return name, handler, details


def running(options: Mapping[str, Any]) -> CompletionOptions:
    """The options that say how a function is run."""
    return {"thread": options.get("thread", True), "abandon_on_cancel": options.get("abandon_on_cancel", True)}


def check_details(subject: str, given: Mapping[str, Any], known: Any) -> None:
    """Check the title, icons, metadata and so on of an entry."""
    check_options(given, known, subject)
    if given.get("meta") is not None:
        check_meta(given["meta"], LATEST)


def described_as(model: str, *arguments: Any, **details: Any) -> Callable[[], Any]:
    """Return a function that makes a model once.  The models are imported only when a client lists entries."""

    @functools.cache
    def describe() -> Any:
        from trio_mcp.core import models

        made = {name: value() if name == "execution" else value for name, value in details.items()}
        return getattr(models, model)(*arguments, **made)

    return describe


# Tools.

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_tool_name(name: str) -> None:
    """Raise UsageError for an invalid name (tool-17).

    The specification only asks for a warning, but hosts refuse tools with invalid names, or all tools of the server.
    """
    if not _TOOL_NAME.fullmatch(name):
        raise UsageError(
            f"the name of a tool must have 1 to 128 of the characters A-Z a-z 0-9 _ - ., got {name[:200]!r}; "
            "give name=..."
        )


def tool_of(function: Callable[..., Any], **options: Unpack[ToolOptions]) -> Entry:
    """Make a tool; its schemas come from the function's parameters and return annotation.

    `structured=False`: results are content only, for any annotation.  An argument that is marked with
    `Field(header=...)` is repeated in an HTTP header, where every proxy and log on the way sees it: mark no secrets
    (tool-28).
    """
    from trio_mcp.core.schema.hints import hint_of

    name, handler, details = read_function(function, "tool", options, ToolOptions)
    arguments = arguments_of(function, handler)
    try:
        returned = hint_of(function, "return")
        output = OutputSchema(returned) if options.get("structured", True) else None
    except UsageError as error:
        raise UsageError(f"the tool {name!r}: {error}") from None
    output_schema = None if output is None else output.schema
    task = options.get("task", "forbidden")
    if task not in typing.get_args(TaskSupport):
        raise UsageError(f"task of the tool {name!r} must be one of {', '.join(typing.get_args(TaskSupport))}")
    if task != "forbidden":
        details["execution"] = described_as("ToolExecution", task)
    describe = described_as("Tool", name, arguments.schema, output_schema=output_schema, **details)
    return tool_entry(name, handler, describe, arguments, output, options, task, embeds=_embeds(returned))


def _embeds(hint: object) -> bool:
    """Whether the returned value may contain resources."""
    return hint is model_class("EmbeddedResource") or any(map(_embeds, typing.get_args(hint)))


def tool_entry(
    name: str,
    handler: Handler,
    describe: Callable[[], Any],
    arguments: Arguments,
    output: OutputSchema | None,
    options: Mapping[str, Any],
    task: TaskSupport = "forbidden",
    *,
    embeds: bool = False,
) -> Entry:
    """Make a tool of its parts.  Raises UsageError for a name, scope or header that cannot be."""
    check_tool_name(name)
    scopes = options.get("scopes", ())
    if scopes:
        scopes = declared_scopes(f"the scopes of the tool {name!r}", scopes)
    mirrors: Sequence[Mirror] = ()
    if "x-mcp-header" in repr(arguments.schema):  # most schemas have none, and need no module for headers
        from trio_mcp.core.http.fields import find_mirrors
        from trio_mcp.server.questions import names_a_secret

        found = find_mirrors(arguments.schema)
        if found.faults:
            raise UsageError(f"the tool {name!r} cannot have its arguments in headers: {'; '.join(found.faults)}")
        mirrors = found.rules
        for rule in mirrors:
            if names_a_secret(rule.path[-1]):
                _log.warning(
                    "the tool %r repeats its argument %r in the header %s, which every proxy and log on the way sees; "
                    "if that is a secret, do not mark it (tool-28)",
                    name,
                    rule.path[-1],
                    rule.header,
                )
    asks_first = options.get("asks_first", False)
    if asks_first and task == "forbidden":
        raise UsageError(f"the tool {name!r} asks before it becomes a task, but never becomes one; give task=...")
    return Entry(
        "tools", name, handler, _finish_tool, describe, replay=options.get("replay", False), arguments=arguments,
        output=output, mirrors=mirrors, scopes=scopes, task=task, asks_first=asks_first, embeds=embeds,
    )  # fmt: skip


def _finish_tool(entry: Entry, value: Any, name: str, revision: Revision) -> JsonObject:
    return tool_result(value, entry.output, name, revision)
