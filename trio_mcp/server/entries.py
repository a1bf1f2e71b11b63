"""The entries of a server: tools, resources, resource templates, prompts and completers.

`registration` makes entries and checks everything that can be known before a call.  `prepare` checks the arguments of
one call and binds the handler to them, so the code that runs the call treats all handlers alike.

The description for clients (`model`, `json`) is made when the first client asks for a list.  The objects of the
protocol take 50 ms to import, and a server that is only called never needs them; hence the imports inside functions.

Entries do not change.  Where a server is mounted, a copy of its entry with the same handler is shown; the copy knows
its `owners` and the original (`inner`).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import JsonObject
from trio_mcp.server.arguments import Arguments
from trio_mcp.server.handlers import Handler

if TYPE_CHECKING:
    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Described
    from trio_mcp.core.http.fields import Mirror
    from trio_mcp.core.models import Prompt, Tool
    from trio_mcp.core.revisions import Revision
    from trio_mcp.core.schema.templates import Matcher
    from trio_mcp.server.catalog import Catalog
    from trio_mcp.server.results import OutputSchema

__all__ = [
    "Completer",
    "Completing",
    "Entry",
    "PromptEntry",
    "ResourceEntry",
    "TemplateEntry",
    "ToolEntry",
    "check_tool_name",
]


class Entry:
    """The base class of entries.

    - `key`: the name of a tool or prompt, or the URI or URI template of a resource; unique for each `kind`.
    - `takes`: the names of the arguments that can be completed.
    - `replay`: whether the handler may be run again from the start.
    - `owners`: the catalogs that this entry was mounted from, outermost first.
    - `inner`: the entry in the first of `owners`; only mounted entries have it.
    """

    __slots__ = ("_json", "_make", "_model", "handler", "inner", "key", "owners", "replay", "takes")
    kind: ClassVar[str]
    kind_name: ClassVar[str]  # the name of the kind in messages
    key_name: ClassVar[str]  # the name of `key` in messages
    inner: Entry

    def __init__(
        self, key: str, handler: Handler, make: Callable[[], Any], *, replay: bool, takes: Collection[str] = ()
    ) -> None:
        self.key = key
        self.handler = handler
        self.replay = replay
        self.takes = frozenset(takes)
        self.owners: tuple[Catalog, ...] = ()
        self._make = make
        self._model: Any = None
        self._json: dict[str, JsonObject] = {}

    def __str__(self) -> str:
        return f"the {self.kind_name} {self.key!r}"

    @property
    def model(self) -> Described:
        """The description for clients; made when it is first needed."""
        if self._model is None:
            self._model = self._make()
        model: Described = self._model
        return model

    def json(self, revision: Revision) -> JsonObject:
        """Return `model` as JSON for `revision`.  It is cached, so callers must not change it."""
        if revision.name not in self._json:
            from trio_mcp.core.codec import to_json

            self._json[revision.name] = to_json(self._model_in(revision), revision)
        return self._json[revision.name]

    def _model_in(self, revision: Revision) -> Described:
        return self.model

    def under(self, prefix: str, owner: Catalog) -> Entry:
        """Return the entry to show where `owner` is mounted with `prefix`.  Resources keep their URIs."""
        view = copy.copy(self)
        view.inner, view.owners = self, (owner, *self.owners)
        return view


class _NamedEntry(Entry):
    __slots__ = ()
    key_name = "name"

    @property
    def name(self) -> str:
        return self.key

    def under(self, prefix: str, owner: Catalog) -> Entry:
        view = super().under(prefix, owner)
        view.key = prefix + self.key
        view._model, view._json = None, {}
        view._make = functools.partial(_renamed, self, view.key)
        return view


def _renamed(entry: Entry, name: str) -> Described:
    import attrs

    return attrs.evolve(entry.model, name=name)


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


class ToolEntry(_NamedEntry):
    """A tool.

    - `output`: the output schema that results are checked against, or None.
    - `mirrors`: the arguments that are repeated in HTTP headers.
    - `scopes`: the scopes that an access token needs for a call over HTTP.
    - `embeds`: its results contain resources, so the server declares the resources capability (tool-12).
    """

    __slots__ = ("_arguments", "embeds", "mirrors", "output", "scopes")
    kind = "tools"
    kind_name = "tool"

    def __init__(
        self,
        name: str,
        handler: Handler,
        make: Callable[[], Tool],
        *,
        replay: bool,
        arguments: Arguments,
        output: OutputSchema | None,
        mirrors: Sequence[Mirror] = (),
        scopes: Sequence[str] = (),
        embeds: bool = False,
    ) -> None:
        check_tool_name(name)
        super().__init__(name, handler, make, replay=replay)
        self._arguments = arguments
        self.output = output
        self.mirrors = mirrors
        self.scopes = scopes
        self.embeds = embeds

    def prepare(self, ctx: Any, arguments: JsonObject) -> Callable[[], Any]:
        """Return the call.  Raises BadArguments for arguments that the schema does not allow (tool-06)."""
        return self.handler.bind(ctx, self._arguments.read(arguments), arguments)

    def _model_in(self, revision: Revision) -> Described:
        if self.output is None or not self.output.boxed_in(revision):
            return self.model
        import attrs

        return attrs.evolve(self.model, output_schema=self.output.boxed_schema())  # type: ignore[call-arg]

    def under(self, prefix: str, owner: Catalog) -> Entry:
        view = super().under(prefix, owner)
        check_tool_name(view.key)
        return view


# Resources.


class _ReadableEntry(Entry):
    """A resource or template.  `mime_type` and `cache` are defaults for the contents that its handler returns."""

    __slots__ = ("cache", "mime_type")
    key_name = "URI"

    def __init__(
        self,
        uri: str,
        handler: Handler,
        make: Callable[[], Any],
        *,
        replay: bool,
        mime_type: str | None,
        cache: CacheHints | None,
        takes: Collection[str] = (),
    ) -> None:
        super().__init__(uri, handler, make, replay=replay, takes=takes)
        self.mime_type = mime_type
        self.cache = cache


class ResourceEntry(_ReadableEntry):
    """A resource with one URI."""

    __slots__ = ()
    kind = "resources"
    kind_name = "resource"

    def prepare(self, ctx: Any, uri: str, variables: Mapping[str, str]) -> Callable[[], Any]:
        """Return the call that reads the resource.  `variables` is empty."""
        return self.handler.bind(ctx, variables, uri)


class TemplateEntry(_ReadableEntry):
    """A resource template."""

    __slots__ = ("_arguments", "_matcher")
    kind = "templates"
    kind_name = "resource template"

    def __init__(
        self,
        matcher: Matcher,
        handler: Handler,
        make: Callable[[], Any],
        *,
        replay: bool,
        mime_type: str | None,
        cache: CacheHints | None,
        arguments: Arguments | None,
    ) -> None:
        template = matcher.template
        super().__init__(
            template.text, handler, make, replay=replay, mime_type=mime_type, cache=cache, takes=template.variables
        )
        self._matcher = matcher
        self._arguments = arguments

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the variables of a URI, or None if the template does not match it.

        `uri` comes from `core.schema.templates.in_ascii`.  res-10: a URI does not match if a variable could lead
        outside of its part of the path, or does not fit the parameters of the function.
        """
        variables = self._matcher.match_ascii(uri)
        if variables is None or self._arguments is None or self._arguments.fit(variables):
            return variables
        return None

    def prepare(self, ctx: Any, uri: str, variables: JsonObject) -> Callable[[], Any]:
        """Return the call that reads a URI; `variables` are the result of `match`.  Raises BadArguments."""
        named = variables if self._arguments is None else self._arguments.read(variables)
        return self.handler.bind(ctx, named, uri, variables)


# Prompts.


class PromptEntry(_NamedEntry):
    """A prompt."""

    __slots__ = ("_arguments", "description")
    kind = "prompts"
    kind_name = "prompt"

    def __init__(
        self,
        name: str,
        handler: Handler,
        make: Callable[[], Prompt],
        *,
        replay: bool,
        arguments: Arguments,
        description: str | None,
    ) -> None:
        super().__init__(name, handler, make, replay=replay, takes=arguments.schema["properties"])
        self._arguments = arguments
        self.description = description

    def prepare(self, ctx: Any, arguments: JsonObject) -> Callable[[], Any]:
        """Return the call.  Raises BadArguments (prm-08, prm-09)."""
        return self.handler.bind(ctx, self._arguments.read(arguments), arguments)


# Completion.


class Completer:
    """A function that completes arguments; `wants` are the names of its parameters."""

    __slots__ = ("handler", "wants")

    def __init__(self, handler: Handler, wants: Iterable[str]) -> None:
        self.handler = handler
        self.wants = frozenset(wants)


class Completing:
    """The completer that was found for an argument of `entry`, a prompt or a template.

    `owners`: the catalogs that the completer was mounted from.  `name`: the name of the entry in the last of them.
    """

    __slots__ = ("_completer", "entry", "name", "owners")

    def __init__(self, completer: Completer, entry: Entry, name: str, owners: tuple[Catalog, ...]) -> None:
        self._completer = completer
        self.entry = entry
        self.name = name
        self.owners = owners

    @property
    def handler(self) -> Handler:
        return self._completer.handler

    def prepare(
        self, ctx: Any, kind: str, name: str, argument: str, value: str, arguments: Mapping[str, str]
    ) -> Callable[[], Any]:
        """Return the call that completes `value`, the text of the argument so far."""
        given: dict[str, Any] = {"value": value, "arguments": arguments, "argument": argument}
        if "ref" in self._completer.wants:
            from trio_mcp.core.models import PromptReference, ResourceReference

            given["ref"] = ResourceReference(name) if kind == "ref/resource" else PromptReference(self.name)
        return self.handler.bind(ctx, {each: given[each] for each in self._completer.wants})
