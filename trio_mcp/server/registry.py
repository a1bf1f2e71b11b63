"""The registry of a server: its entries, how they are made, found, listed, changed and mounted.

An `Entry` is a tool, a resource, a resource template, a prompt or a completion; `KINDS` says how the kinds differ.
`..._of` makes an entry from the signature and the docstring of a function; `raw_...` makes it from an object of the
protocol and a handler.  They check at registration everything that can be known before a call, and their errors say how
to fix the code.

A `Catalog` has the entries of one server.  Mounting is routing: a lookup searches the catalog's own tables, then strips
the prefix of each mounted catalog and asks that one.  The `EntryRoute` that it returns has the entry and each catalog
on the way, which is all that middleware, filters and lifespans need.  A name may be taken only once in a catalog and
all that it shows, so a change is first compared with the catalogs above.  A catalog refers to those by weak references:
a mounted server does not keep an unused outer server alive.

A catalog knows no connection.  A server that must notify clients of changes adds a function to `on_change`.

Slow imports that are not always needed are inside functions: a server that is only called needs no objects of the
protocol (50 ms) and no JSON Schema engine (20 ms).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import re
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, Unpack

import attrs

from trio_mcp.core.errors import INVALID_PARAMS, RequestError, UsageError, name_of, shown
from trio_mcp.core.messages import CachedResult, Json, JsonObject, Limits
from trio_mcp.core.oauth.principals import declared_scopes
from trio_mcp.core.revisions import LATEST
from trio_mcp.core.signatures import check_options
from trio_mcp.core.subscriptions import PROMPTS_CHANGED, RESOURCES_CHANGED, TOOLS_CHANGED, ChangeEvent
from trio_mcp.server.arguments import Arguments, arguments_of, text_arguments
from trio_mcp.server.handlers import Handler, raw, typed
from trio_mcp.transport.workers import called

if TYPE_CHECKING:
    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Annotations, Described, Icon, Resource
    from trio_mcp.core.http.fields import Mirror
    from trio_mcp.core.models import Prompt, ResourceTemplate, Tool, ToolAnnotations
    from trio_mcp.core.oauth.resource import Protection
    from trio_mcp.core.revisions import Revision
    from trio_mcp.core.schema.templates import Matcher
    from trio_mcp.server.dispatch import Middleware
    from trio_mcp.server.results import OutputSchema

__all__ = [
    "CAPABILITIES", "CHANGES", "KINDS", "LISTS", "Catalog", "CompletionOptions", "Entry", "EntryRoute", "Filter",
    "HandlerOptions", "Kind", "Mount", "PromptOptions", "RawResourceOptions", "RawToolOptions", "ResourceOptions",
    "ToolOptions", "completer_of", "prompt_of", "raw_prompt", "raw_resource", "raw_template", "raw_tool", "resource_of",
    "tool_of",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")

Filter: TypeAlias = "Callable[[Any, Described], bool]"
_Function = Callable[..., Any]


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

CAPABILITIES: Mapping[str, Sequence[str]] = {
    "tools": ("listChanged",),
    "prompts": ("listChanged",),
    "resources": ("listChanged", "subscribe"),
    "completions": (),
}
"""The capabilities that a server declares, with the notifications of each.  Every server may log."""

CHANGES: Mapping[str, ChangeEvent] = {
    "tools": TOOLS_CHANGED,
    "prompts": PROMPTS_CHANGED,
    "resources": RESOURCES_CHANGED,
}
"""For each capability with lists: the change that clients are notified of."""


# Entries.


@attrs.define(eq=False)
class Entry:
    """One tool, resource, resource template, prompt or completion.

    The description for clients (`model`, `json`) is made when the first client asks for a list.
    """

    kind: str
    key: str
    """The name of a tool or prompt, or the URI or URI template of a resource; unique for each kind."""
    handler: Handler
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


@attrs.define(eq=False)
class EntryRoute:
    """The way to an entry: each catalog that a request for it passes, outermost first, with the key of the entry there.

    `since` is the moment from which on the first catalog shows the entry.
    """

    entry: Entry
    since: int
    places: tuple[tuple[Catalog, str], ...]

    @property
    def key(self) -> str:
        return self.places[0][1]

    def __str__(self) -> str:
        return f"the {KINDS[self.entry.kind].label} {self.key!r}"

    def json(self, revision: Revision) -> JsonObject:
        """Return the description of the entry under its key; callers must not change it."""
        json = self.entry.json(revision)
        return json if self.key == self.entry.key else {**json, "name": self.key}

    def allowed(self, principal: Any) -> bool:
        """Whether the filters of all servers on the way allow the entry, each under the key that it has there.

        tool-24: the entries that a client sees may depend on its principal, and on no other thing (tool-23).
        """
        for catalog, key in self.places:
            if catalog.filter is not None:
                model = self.entry.model
                if key != self.entry.key:
                    model = attrs.evolve(model, name=key)
                if called(catalog.filter, principal, model) is not True:  # also if it did not return a bool
                    return False
        return True


class Mount(NamedTuple):
    """A catalog that is shown in another one, from the moment `since` on."""

    prefix: str
    catalog: Catalog
    since: int

    def inner(self, kind: str, key: str) -> str | None:
        """The key that an entry must have in the mounted catalog; None for a name without the prefix."""
        if not KINDS[kind].prefixed:
            return key
        return key.removeprefix(self.prefix) if key.startswith(self.prefix) else None

    def outer(self, kind: str, key: str) -> str:
        """The key under which the entry is shown."""
        return self.prefix + key if KINDS[kind].prefixed else key


# A message has room for a URI of megabytes, and matching it against each template would block the event loop.
_LONGEST_URI = Limits().uri_length
_PREFIX = r"[A-Za-z0-9_.-]{0,127}"

# Worker threads change catalogs too.  One lock for all catalogs, because a change also concerns the catalogs above.
_changing = threading.RLock()
_moments = itertools.count()

_Page: TypeAlias = tuple[str, int | None, str | None]  # revision, size, cursor
_Completed: TypeAlias = tuple[str | None, str | None, str | None]  # kind and key of an entry, argument; None means all


class Catalog:
    """The entries of one server, the catalogs that are mounted in it, and the options of the server for requests.

    `kinds`: the capabilities that it needs, of "tools", "prompts", "resources" and "completions".  It only grows,
    because clients keep using a capability that they were told of.  `on_change`: functions to call after each change.

    It may be changed in any thread; the functions of `on_change` are called in the same thread.
    """

    remote = False
    """True: only another server knows the entries, so a request for any of them is sent there."""

    def __init__(
        self,
        middleware: Sequence[Middleware] = (),
        filter: Filter | None = None,
        page_size: int | None = None,
        cache: Mapping[str, CacheHints] | None = None,
    ) -> None:
        self.middleware = middleware
        self.filter = filter
        self.page_size = page_size
        self.cache = cache or {}
        self.protection: Protection | None = None
        self.kinds: set[str] = set()
        self.on_change: list[Callable[[ChangeEvent], None]] = []
        # By kind and key, in the order of registration, which is the order of the lists (tool-25).
        self._tables: dict[str, dict[str, EntryRoute]] = {kind: {} for kind in KINDS}
        self._completers: dict[_Completed, Entry] = {}
        self._mounts: list[Mount] = []
        self._above: weakref.WeakKeyDictionary[Catalog, None] = weakref.WeakKeyDictionary()
        # All three are dropped when a list changes: ways that were found, lists with mounted entries, and pages.  None:
        # the page is not made yet, but a client has got its cursor.
        self._found: dict[str, dict[str, EntryRoute]] = {kind: {} for kind in KINDS}
        self._routes: dict[str, Sequence[EntryRoute]] = {}
        self._pages: dict[str, dict[_Page, CachedResult | None]] = {kind: {} for kind in KINDS}

    # Finding.

    def find(self, kind: str, key: str) -> EntryRoute | None:
        """Return the way to the entry with exactly this name or URI, or None."""
        found = self._tables[kind].get(key) or self._found[kind].get(key)  # tool-18: names are case-sensitive
        if found is None and self._mounts:
            with _changing:  # no change may come between finding the way and keeping it
                for mount in self._mounts:
                    inner = mount.inner(kind, key)
                    if inner is not None and (route := mount.catalog.find(kind, inner)) is not None:
                        found = EntryRoute(route.entry, max(route.since, mount.since), ((self, key), *route.places))
                        self._found[kind][key] = found
                        break
        return found

    def find_resource(self, uri: str) -> tuple[EntryRoute, dict[str, str]] | None:
        """Return the way to the entry that reads this URI and the variables in the URI, or None.

        Templates are tried in the order of registration.  A URI of more than `Limits.uri_length` characters matches no
        template.
        """
        fixed = self.find("resources", uri)
        if fixed is not None:
            return fixed, {}
        templates = self.routes("templates")
        if not templates or len(uri) > _LONGEST_URI:
            return None
        from trio_mcp.core.schema.templates import in_ascii  # templates have imported it already

        ascii = in_ascii(uri)
        if ascii is None:
            return None
        for template in templates:
            variables = template.entry.match(ascii)
            if variables is not None:
                return template, variables
        return None

    def relays(self, kind: str, key: str | None = None) -> Sequence[Mount]:
        """The mounts with a remote catalog that has entries of a kind, or may have this entry; longest prefix first.

        Only the server of a remote catalog knows its entries.
        """
        found = []
        for mount in self._mounts:
            inner = None if key is None else mount.inner(kind, key)
            if (key is None or inner is not None) and mount.catalog.has_remote(kind, inner):
                found.append(mount)
        return found if key is None else sorted(found, key=lambda mount: -len(mount.prefix))

    def has_remote(self, kind: str, key: str | None = None) -> bool:
        """Whether this catalog or one below it is remote and has entries of a kind, or may have this entry."""
        return KINDS[kind].capability in self.kinds if self.remote else bool(self.relays(kind, key))

    def mirrors(self, tool: str) -> Sequence[Mirror]:
        """The arguments of a tool that are repeated in HTTP headers."""
        if (route := self.find("tools", tool)) is not None:
            return route.entry.mirrors
        for mount in self.relays("tools", tool):
            return mount.catalog.mirrors(tool.removeprefix(mount.prefix))
        return ()

    def find_completed(self, kind: str, name: str) -> EntryRoute | None:
        """Find the entry of a reference: a prompt by its name, a template by its text or by a URI (cmpl-08).

        `kind` is "ref/prompt" or "ref/resource".
        """
        if kind == "ref/prompt":
            return self.find("prompts", name)
        if (template := self.find("templates", name)) is not None:
            return template
        found = self.find_resource(name)
        return None if found is None else found[0]

    def completer(self, route: EntryRoute, argument: str) -> tuple[Entry, int] | None:
        """Find the completer for an argument of a prompt or template; None if there is none.

        The first of these is used: the completer of this argument, the completer of all arguments of this prompt or
        template, the completer of all prompts and templates.  For a mounted entry the general completer of its own
        catalog goes before those of the catalogs above.  The number is that of the catalog on the route.

        Raises RequestError if there is no such argument (cmpl-06).
        """
        if argument not in route.entry.takes:
            raise RequestError(INVALID_PARAMS, f"{route} has no argument {shown(argument)}")
        own = [(at, route.entry.kind, key) for at, (_, key) in enumerate(route.places)]
        general = [(at, None, None) for at in reversed(range(len(route.places)))]
        for at, kind, key in (*own, *general):
            table = route.places[at][0]._completers
            found = table.get((kind, key, argument)) or table.get((kind, key, None))
            if found is not None:
                return found, at
        return None

    # Listing.

    def routes(self, kind: str) -> Sequence[EntryRoute]:
        """All entries of a kind, in the order in which they have appeared here."""
        if not self._mounts:
            return tuple(self._tables[kind].values())
        with _changing:  # no change may come between making the list and keeping it
            if kind not in self._routes:
                found = list(self._tables[kind].values())
                for mount in self._mounts:
                    found += [
                        EntryRoute(
                            each.entry,
                            max(mount.since, each.since),
                            ((self, mount.outer(kind, each.key)), *each.places),
                        )
                        for each in mount.catalog.routes(kind)
                    ]
                self._routes[kind] = sorted(found, key=lambda each: each.since)
            return self._routes[kind]

    def list(
        self,
        method: str,
        revision: Revision,
        cursor: Json = None,
        size: int | None = None,
        allowed: Callable[[EntryRoute], bool] | None = None,
    ) -> JsonObject:
        """Return one page of a list, as the result of `method`.  The caller adds cache hints and metadata.

        The page is cached, so callers must not change it.  Entries for which `allowed` returns False are left out.
        Raises RequestError for an invalid cursor.
        """
        kind = LISTS[method]
        if allowed is not None or not isinstance(cursor, str | None):
            return self._page(kind, revision, cursor, size, allowed)
        pages, at = self._pages[kind], (revision.name, size, cursor)
        page = pages.get(at)
        if page is not None:
            return page
        with _changing:  # no change may come between making the page and caching it
            page = CachedResult(self._page(kind, revision, cursor, size, None))
            # Clients can invent any number of valid cursors; only pages of cursors that we gave are cached.
            if cursor is None or at in pages:
                pages[at] = page
                if "nextCursor" in page:
                    pages.setdefault((revision.name, size, page["nextCursor"]), None)
        return page

    def _page(
        self,
        kind: str,
        revision: Revision,
        cursor: Json,
        size: int | None,
        allowed: Callable[[EntryRoute], bool] | None,
    ) -> JsonObject:
        from trio_mcp.core.caching import paginate

        routes = [route for route in self.routes(kind) if allowed is None or allowed(route)]
        items, following = paginate(routes, cursor, size, lambda route: route.key)
        page: JsonObject = {KINDS[kind].member: [route.json(revision) for route in items]}
        return page if following is None else {**page, "nextCursor": following}

    # Changing.

    def add(self, entry: Entry) -> None:
        """Add an entry.  Raises UsageError if its name or URI is taken here or in a catalog above."""
        with _changing:
            self._check_free([(entry.kind, entry.key)])
            self._tables[entry.kind][entry.key] = EntryRoute(entry, next(_moments), ((self, entry.key),))
            self._announce([entry.kind], {KINDS[entry.kind].capability} | ({"resources"} if entry.embeds else set()))

    def remove(self, kind: str, key: str) -> None:
        """Remove an entry and its completers.  Raises UsageError if it is missing or mounted."""
        with _changing:
            route = self.find(kind, key)
            if route is None:
                raise UsageError(f"there is no {KINDS[kind].label} {key!r} to remove")
            if len(route.places) > 1:
                raise UsageError(f"{route} belongs to a mounted server; remove it there")
            del self._tables[kind][key]
            for catalog, name in self._shown_as(kind, key):
                for place in [place for place in catalog._completers if place[:2] == (kind, name)]:
                    del catalog._completers[place]
            self._announce([kind])

    def add_completer(self, completer: Entry, ref: str | None = None, argument: str | None = None) -> None:
        """Add a completer.

        `ref` is a prompt or URI template, or None for all; `argument` is one argument, or None for all.  Arguments with
        a more specific completer do not use it.  Raises UsageError if there is no such entry or argument, or if it has
        a completer already.
        """
        with _changing:
            kind = None
            if ref is not None:
                route = self.find("prompts", ref) or self.find("templates", ref)
                if route is None:
                    raise UsageError(f"there is no prompt or URI template {ref!r} to complete; register that first")
                kind = route.entry.kind
                if argument is not None and argument not in route.entry.takes:
                    has = ", ".join(sorted(route.entry.takes)) or "none"
                    raise UsageError(f"{route} has no argument {argument!r} to complete; it has {has}")
            place = (kind, ref, argument)
            if place in self._completers:
                which = "every argument" if argument is None else f"the argument {argument!r}"
                raise UsageError(
                    f"{which} of {ref or 'every prompt and template'} has a completer already; give this one another "
                    "ref or argument"
                )
            self._completers[place] = completer
            self._announce([], {"completions"})

    # Mounting.

    def mount(self, other: Catalog, prefix: str = "") -> None:
        """Show all entries of `other`, now and in the future, with `prefix` before the names of tools and prompts.

        Raises UsageError, and mounts nothing, if a name or URI is taken here or in a catalog above, or if this one is
        mounted in `other`.
        """
        if not isinstance(prefix, str) or not re.fullmatch(_PREFIX, prefix):
            raise UsageError(f"a prefix may only have the characters A-Z a-z 0-9 _ - . of tool names, got {prefix!r}")
        with _changing:
            if other in self._upward():
                raise UsageError("a server cannot contain itself; mount it the other way round")
            if any(mount[:2] == (prefix, other) for mount in self._mounts):
                raise UsageError(f"this server is mounted here already with the prefix {prefix!r}; use another prefix")
            if any(each.remote for each in other.parts()):
                if any(catalog.filter is not None for catalog in self._upward()):
                    raise UsageError(
                        "a server with a filter cannot show the entries of a relay, because only the upstream server "
                        "knows them; decide about access in a middleware"
                    )
                if any(
                    prefix == mount.prefix and any(each.remote for each in mount.catalog.parts())
                    for mount in self._mounts
                ):
                    raise UsageError(f"a relay is mounted here already with the prefix {prefix!r}; use another prefix")
            mount, shown = Mount(prefix, other, next(_moments)), {kind: other.routes(kind) for kind in KINDS}
            self._check_free((kind, mount.outer(kind, each.key)) for kind, every in shown.items() for each in every)
            self._mounts.append(mount)
            other._above[self] = None
            self._announce([kind for kind, routes in shown.items() if routes], other.kinds)

    def parts(self) -> Iterator[Catalog]:
        """This catalog, and all that are mounted in it or below."""
        yield self
        for mount in self._mounts:
            yield from mount.catalog.parts()

    def _upward(self) -> dict[Catalog, None]:
        """This catalog, and all that it is mounted in, if they still exist."""
        found: dict[Catalog, None] = {self: None}
        for above in tuple(self._above):
            found |= above._upward()
        return found

    def _shown_as(self, kind: str, key: str) -> Iterator[tuple[Catalog, str]]:
        """Each catalog that shows an entry of this one, with its key there."""
        yield self, key
        for above in tuple(self._above):
            for mount in above._mounts:
                if mount.catalog is self:
                    yield from above._shown_as(kind, mount.outer(kind, key))

    def _check_free(self, entries: Iterable[tuple[str, str]]) -> None:
        """Raise UsageError if one of the kinds and keys is taken, here or in a catalog above."""
        new: set[tuple[Catalog, str, str]] = set()
        for kind, key in entries:
            for catalog, name in self._shown_as(kind, key):
                if kind == "tools":
                    _check_tool_name(name)
                if catalog.find(kind, name) is not None or (catalog, kind, name) in new:  # tool-19
                    raise UsageError(
                        f"the {KINDS[kind].label} {name!r} exists already; give the new one another "
                        f"{KINDS[kind].key_name} (or its server another prefix), or remove the old one first"
                    )
                new.add((catalog, kind, name))

    def _announce(self, kinds: Sequence[str], capabilities: Collection[str] = ()) -> None:
        """Notify of a complete change.  All cached pages are dropped before the first function is called."""
        changed = self._upward()
        for catalog in changed:
            catalog.kinds.update(capabilities)
            for kind in kinds:
                catalog._found[kind].clear()
                catalog._routes.pop(kind, None)
                catalog._pages[kind].clear()
        for catalog in changed:
            for capability in dict.fromkeys(KINDS[kind].capability for kind in kinds):
                for notify in catalog.on_change:
                    notify(CHANGES[capability])


# The options of decorators and `add_...`, each written once: `help` and type checkers read them here.


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


class ResourceOptions(_EntryOptions, HandlerOptions, total=False):
    """The options of a resource; see `Server.resource`."""

    mime_type: str | None
    size: int | None
    annotations: Annotations | None
    cache: CacheHints | None


class RawToolOptions(HandlerOptions, total=False):
    """The options of a tool that is described by hand."""

    scopes: Collection[str]


class RawResourceOptions(HandlerOptions, total=False):
    """The options of a resource that is described by hand."""

    cache: CacheHints | None


# Options that no client sees.
_OWN = ("name", "scopes", "structured", "cache", *HandlerOptions.__annotations__)


def _read(
    function: _Function, label: str, options: Mapping[str, Any], known: Any
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
    _check_details(f"the {label} {name!r}", options, known)
    handler = typed(function, **_running(options))
    details = {each: options.get(each) for each in known.__annotations__ if each not in _OWN}
    if details["description"] is None:
        from trio_mcp.core.schema.hints import describe

        details["description"] = describe(function).text or None
    return name, handler, details


def _running(options: Mapping[str, Any]) -> CompletionOptions:
    return {"thread": options.get("thread", True), "abandon_on_cancel": options.get("abandon_on_cancel", True)}


def _model(name: str, *arguments: Any, **details: Any) -> Any:
    """Make a model.  The models are imported only when a client lists entries."""
    from trio_mcp.core import models

    return getattr(models, name)(*arguments, **details)


def _entry(
    kind: str, key: str, handler: Handler, describe: Callable[[], Any], options: Mapping[str, Any], **more: Any
) -> Entry:
    kept = {name: options[name] for name in ("replay", "mime_type", "cache", "description") if name in options}
    return Entry(kind, key, handler, functools.cache(describe), **kept, **more)


# For each kind: the options of a function, and those beside an object of the protocol.
_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "tools": (ToolOptions, RawToolOptions),
    "prompts": (PromptOptions, HandlerOptions),
    "resources": (ResourceOptions, RawResourceOptions),
    "templates": (ResourceOptions, RawResourceOptions),
}


def _read_raw(kind: str, model: Any, function: _Function | None, options: Mapping[str, Any]) -> Handler:
    """Check the arguments of `add_...`, an object of the protocol and a function, and return the handler."""
    from trio_mcp.core import models

    (known, raw_options), takes, word = _OPTIONS[kind], KINDS[kind].takes, kind.removesuffix("s")
    name = KINDS[kind].model
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
    described = {each: getattr(model, each) for each in known.__annotations__ if hasattr(model, each)}
    _check_details(f"the {name} {model.name!r}", {**described, **options}, known)
    return raw(function, takes, **_running(options))


_MIME_TYPE = r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(\s*;.*)?"


def _check_details(subject: str, given: Mapping[str, Any], known: Any) -> None:
    """Check the title, icons, annotations, metadata and so on of an entry."""
    check_options(given, known, subject)
    mime_type, size, annotations = given.get("mime_type"), given.get("size"), given.get("annotations")
    if mime_type is not None and not re.fullmatch(_MIME_TYPE, mime_type):
        raise UsageError(f"the mime_type of {subject} must be like text/plain, not {mime_type!r}")
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(f"the size of {subject} must be a number of bytes, got {size!r}")
    if annotations is not None and known is ResourceOptions:  # res-25
        from datetime import datetime

        if not set(annotations.audience or ()) <= {"user", "assistant"}:
            raise UsageError(f"the audience of {subject} must be a list of user and assistant")
        try:
            datetime.fromisoformat(annotations.last_modified or "2025-06-18")
        except ValueError:
            raise UsageError(
                f"the last_modified of {subject} must be ISO 8601, such as 2025-06-18T15:00:00Z, not "
                f"{annotations.last_modified!r}"
            ) from None
    if given.get("meta") is not None:
        from trio_mcp.core.revisions import check_meta

        check_meta(given["meta"], LATEST)


# Tools.

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def _check_tool_name(name: str) -> None:
    """Raise UsageError for an invalid name (tool-17).

    The specification only asks for a warning, but hosts refuse tools with invalid names, or all tools of the server.
    """
    if not _TOOL_NAME.fullmatch(name):
        raise UsageError(
            f"the name of a tool must have 1 to 128 of the characters A-Z a-z 0-9 _ - ., got {name[:200]!r}; "
            "give name=..."
        )


def tool_of(function: _Function, **options: Unpack[ToolOptions]) -> Entry:
    """Make a tool; its schemas come from the function's parameters and return annotation.

    `structured=False`: results are content only, for any annotation.  An argument that is marked with
    `Field(header=...)` is repeated in an HTTP header, where every proxy and log on the way sees it: mark no secrets
    (tool-28).
    """
    from trio_mcp.core.schema.hints import hint_of
    from trio_mcp.server.results import OutputSchema

    name, handler, details = _read(function, "tool", options, ToolOptions)
    arguments = arguments_of(function, handler)
    try:
        returned = hint_of(function, "return")
        output = OutputSchema(returned) if options.get("structured", True) else None
    except UsageError as error:
        raise UsageError(f"the tool {name!r}: {error}") from None
    output_schema = None if output is None else output.schema
    describe = functools.partial(_model, "Tool", name, arguments.schema, output_schema=output_schema, **details)
    return _tool(name, handler, describe, arguments, output, options, embeds=_embeds(returned))


def _embeds(hint: object) -> bool:
    """Whether the returned value may contain resources.  It cannot if their module was never imported."""
    content: Any = sys.modules.get("trio_mcp.core.content")
    if content is None:
        return False
    return hint is content.EmbeddedResource or any(map(_embeds, typing.get_args(hint)))


def raw_tool(tool: Tool, function: _Function | None, **options: Unpack[RawToolOptions]) -> Entry:
    """Make a tool that is described by hand; `function(ctx, arguments)` gets arguments that fit its schema."""
    from trio_mcp.core.schema.validation import InvalidSchema, check_input_schema, compile_schema
    from trio_mcp.server.results import OutputSchema

    handler = _read_raw("tools", tool, function, options)
    try:
        which = "input"
        check_input_schema(tool.input_schema)
        arguments = Arguments(dict(tool.input_schema), compiled=compile_schema(tool.input_schema))
        which = "output"
        output = None if tool.output_schema is None else OutputSchema(schema=tool.output_schema)
    except InvalidSchema as error:
        raise InvalidSchema(error.reason, f"the {which} schema of the tool {tool.name!r}: {error}") from None
    return _tool(tool.name, handler, lambda: tool, arguments, output, options)


def _tool(
    name: str,
    handler: Handler,
    describe: Callable[[], Any],
    arguments: Arguments,
    output: OutputSchema | None,
    options: Mapping[str, Any],
    *,
    embeds: bool = False,
) -> Entry:
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
    _check_tool_name(name)
    return _entry(
        "tools", name, handler, describe, options,
        arguments=arguments, output=output, mirrors=mirrors, scopes=scopes, embeds=embeds,
    )  # fmt: skip


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


def resource_of(function: _Function, uri: str, **options: Unpack[ResourceOptions]) -> Entry:
    """Make a resource that the function reads, or a resource template if `uri` is an RFC 6570 template.

    The variables of a template are the function's parameters.
    """
    name, handler, details = _read(function, "resource", options, ResourceOptions)
    arguments = text_arguments(function, handler, "the variables of a URI template")
    if isinstance(uri, str) and "{" in uri:
        if details.pop("size") is not None:
            raise UsageError(f"the resources of the template {uri!r} have different sizes; drop size={options['size']}")
        matcher = _matcher(uri)
        _check_variables(function, matcher, arguments.schema)
        describe = functools.partial(_model, "ResourceTemplate", name, uri, **details)
        takes = frozenset(matcher.template.variables)
        return _entry("templates", uri, handler, describe, options, arguments=arguments, takes=takes, matcher=matcher)
    _check_uri(uri)
    for parameter in arguments.schema["properties"]:
        raise UsageError(
            f"parameter {parameter!r} of {name_of(function)} is not in the URI {uri!r}; write {{{parameter}}} into the "
            "URI, or drop the parameter"
        )
    return _entry("resources", uri, handler, functools.partial(_model, "Resource", name, uri, **details), options)


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


def raw_resource(resource: Resource, function: _Function | None, **options: Unpack[RawResourceOptions]) -> Entry:
    """Make a resource that is described by hand, and read by `function(ctx, uri)`."""
    handler = _read_raw("resources", resource, function, options)
    _check_uri(resource.uri)
    more = {"mime_type": resource.mime_type, **options}
    return _entry("resources", resource.uri, handler, lambda: resource, more)


def raw_template(
    template: ResourceTemplate, function: _Function | None, **options: Unpack[RawResourceOptions]
) -> Entry:
    """Make a resource template that is described by hand, and read by `function(ctx, uri, variables)`."""
    handler = _read_raw("templates", template, function, options)
    if "{" not in template.uri_template:
        raise UsageError(f"{template.uri_template!r} has no variables; register it as a resource")
    matcher, more = _matcher(template.uri_template), {"mime_type": template.mime_type, **options}
    takes = frozenset(matcher.template.variables)
    return _entry("templates", template.uri_template, handler, lambda: template, more, takes=takes, matcher=matcher)


# Prompts.


def prompt_of(function: _Function, **options: Unpack[PromptOptions]) -> Entry:
    """Make a prompt whose arguments are the function's parameters."""
    name, handler, details = _read(function, "prompt", options, PromptOptions)
    arguments = text_arguments(function, handler, "the arguments of a prompt")

    def describe() -> Prompt:
        from trio_mcp.core.models import Prompt, PromptArgument

        required = arguments.schema.get("required", ())
        listed = [
            PromptArgument(each, schema.get("description"), each in required, title=schema.get("title"))
            for each, schema in arguments.schema["properties"].items()
        ]
        return Prompt(name, listed or None, **details)

    takes = frozenset(arguments.schema["properties"])
    return _entry("prompts", name, handler, describe, {**options, **details}, arguments=arguments, takes=takes)


def raw_prompt(prompt: Prompt, function: _Function | None, **options: Unpack[HandlerOptions]) -> Entry:
    """Make a prompt that is described by hand; `function(ctx, arguments)` gets strings, with all required arguments."""
    from trio_mcp.core.models import PromptArgument
    from trio_mcp.core.schema.shapes import shape_of

    handler = _read_raw("prompts", prompt, function, options)
    members: dict[str, Any] = {}
    for each in prompt.arguments or ():
        if not isinstance(each, PromptArgument) or not each.name or each.name in members:
            raise UsageError(
                f"the arguments of the prompt {prompt.name!r} must be PromptArgument objects, each with a name of its "
                "own"
            )
        members[each.name] = str if each.required else typing.NotRequired[str]
    shape = shape_of(typing.TypedDict("Arguments", members))  # type: ignore[operator]
    more, arguments = {"description": prompt.description, **options}, Arguments(shape.schema, shape.fits)
    return _entry("prompts", prompt.name, handler, lambda: prompt, more, arguments=arguments, takes=frozenset(members))


# Completion.

_COMPLETION = ("value", "arguments", "argument", "ref")


def completer_of(function: _Function, **options: Unpack[CompletionOptions]) -> Entry:
    """Make a completer.

    Its function takes any of these by name: `value`, `arguments` (those that have a value already), `argument` (the
    name of the completed argument), `ref`, and a Context.  It returns the values, best first.
    """
    check_options(options, CompletionOptions)
    handler = typed(function, **_running(options))
    wants = frozenset(inspect.signature(function).parameters) - handler.skip
    for name in inspect.signature(function).parameters:
        if name in wants and name not in _COMPLETION:
            raise UsageError(
                f"parameter {name!r} of {name_of(function)} is not a parameter of completions; these are "
                f"{', '.join(_COMPLETION)} and a Context"
            )
    return Entry("completions", "", handler, takes=wants)
