"""What a server can have: a tool, a resource, a resource template, a prompt, a completer.

An entry is made by `registration`, which has checked all that can be known before anybody calls.  Its `prepare` checks
the arguments of one call and binds the handler to them; whoever runs the call need not know what kind of handler it is.

What a client is shown (`model`, `json`) is made when the first client asks for a list: the protocol's objects take
50 ms to import, and a server that is only called never needs them.  That is why so much is imported inside functions.

Entries do not change.  A mounted one is another entry with the same handler, which knows its `owners` and the entry
that it stands for.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import JsonObject
from trio_mcp.server.arguments import Arguments
from trio_mcp.server.handlers import Handler

if TYPE_CHECKING:
    from trio_mcp.core.cache import CacheHints
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
    """What all have in common.

    `key` is the name of a tool or prompt, the URI or URI template of a resource; no two entries of a `kind` share one.
    `takes`: the names of its arguments that can be completed.  `replay`: whether the handler may be run again from the
    start.  `owners`: the catalogs that this entry was mounted from, outermost first; `inner`: the entry that it stands
    for in the first of them, if there are any.
    """

    __slots__ = ("_json", "_make", "_model", "handler", "inner", "key", "owners", "replay", "takes")
    kind: ClassVar[str]
    what: ClassVar[str]  # in messages
    called: ClassVar[str]  # what its key is, there
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
        return f"the {self.what} {self.key!r}"

    @property
    def model(self) -> Described:
        """What clients are shown."""
        if self._model is None:
            self._model = self._make()
        model: Described = self._model
        return model

    def json(self, revision: Revision) -> JsonObject:
        """`model` as `revision` has it; made once, and not to be changed."""
        if revision.name not in self._json:
            from trio_mcp.core.codec import to_json

            self._json[revision.name] = to_json(self._model_in(revision), revision)
        return self._json[revision.name]

    def _model_in(self, revision: Revision) -> Described:
        return self.model

    def under(self, prefix: str, owner: Catalog) -> Entry:
        """This entry of `owner` as it appears where that is mounted.  Resources keep their URIs."""
        view = copy.copy(self)
        view.inner, view.owners = self, (owner, *self.owners)
        return view


class _NamedEntry(Entry):
    __slots__ = ()
    called = "name"

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
    """tool-17.  Refused, where the text is content with a warning: hosts refuse such tools, or all of a server's."""
    if not _TOOL_NAME.fullmatch(name):
        raise UsageError(
            f"{name[:200]!r} cannot be the name of a tool: use 1 to 128 of the characters A-Z a-z 0-9 _ - . (name=...)"
        )


class ToolEntry(_NamedEntry):
    """`output`: what the results are checked against, if anything.  `mirrors`: the arguments repeated in headers.
    `scopes`: what an access token must be good for to call it by HTTP.  `embeds`: its results hold resources, so the
    server declares that it has some (tool-12)."""

    __slots__ = ("_arguments", "embeds", "mirrors", "output", "scopes")
    kind = "tools"
    what = "tool"

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
        """The call.  Raises BadArguments.  tool-06: the handler never sees what its schema does not allow."""
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
    """`mime_type` and `cache` hold for what is read, unless the handler says otherwise."""

    __slots__ = ("cache", "mime_type")
    called = "URI"

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
    __slots__ = ()
    kind = "resources"
    what = "resource"

    def prepare(self, ctx: Any, uri: str, variables: Mapping[str, str]) -> Callable[[], Any]:
        """The call that reads it.  There are no variables."""
        return self.handler.bind(ctx, variables, uri)


class TemplateEntry(_ReadableEntry):
    __slots__ = ("_arguments", "_matcher")
    kind = "templates"
    what = "resource template"

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
        """The variables of a URI (as `core.templates.in_ascii` gives it) that this template stands for, or None.

        res-10: none is there that could lead out of its place, and none that the function's hints do not allow.
        """
        variables = self._matcher.match_ascii(uri)
        if variables is None or self._arguments is None or self._arguments.fit(variables):
            return variables
        return None

    def prepare(self, ctx: Any, uri: str, variables: JsonObject) -> Callable[[], Any]:
        """The call that reads a URI, with what `match` found in it.  Raises BadArguments."""
        named = variables if self._arguments is None else self._arguments.read(variables)
        return self.handler.bind(ctx, named, uri, variables)


# Prompts.


class PromptEntry(_NamedEntry):
    __slots__ = ("_arguments", "description")
    kind = "prompts"
    what = "prompt"

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
        """The call.  Raises BadArguments (prm-08, prm-09)."""
        return self.handler.bind(ctx, self._arguments.read(arguments), arguments)


# Completion.


class Completer:
    """A function that completes arguments; `wants` is what it takes of what there is to know."""

    __slots__ = ("handler", "wants")

    def __init__(self, handler: Handler, wants: Iterable[str]) -> None:
        self.handler = handler
        self.wants = frozenset(wants)


class Completing:
    """A completer that was found for an argument of `entry`, a prompt or a template.

    `owners`: the catalogs that the completer was mounted from; `name`: what the entry is called in the last of them.
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
        """The call that completes `value`, what there is so far of one argument."""
        given: dict[str, Any] = {"value": value, "arguments": arguments, "argument": argument}
        if "ref" in self._completer.wants:
            from trio_mcp.core.models import PromptReference, ResourceReference

            given["ref"] = ResourceReference(name) if kind == "ref/resource" else PromptReference(self.name)
        return self.handler.bind(ctx, {each: given[each] for each in self._completer.wants})
