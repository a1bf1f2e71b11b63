"""The registry of a server: how its entries are found, listed, changed and mounted; `entries` says how they are made.

A `Catalog` has the entries of one server.  Mounting is routing: a lookup searches the catalog's own tables, then strips
the prefix of each mounted catalog and asks that one.  The `EntryRoute` that it returns has the entry and each catalog
on the way, which is all that middleware, filters and lifespans need.  A name may be taken only once in a catalog and
all that it shows, so a change is first compared with the catalogs above.  A catalog refers to those by weak references:
a mounted server does not keep an unused outer server alive.

A catalog knows no connection.  A server that must notify clients of changes adds a function to `on_change`.
"""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import attrs

from trio_mcp.core.errors import INVALID_PARAMS, RequestError, UsageError, shown
from trio_mcp.core.messages import CachedResult, Json, JsonObject, Limits
from trio_mcp.server.entries import KINDS, LISTS, Entry, check_tool_name
from trio_mcp.transport.workers import called

if TYPE_CHECKING:
    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Described
    from trio_mcp.core.http.fields import Mirror
    from trio_mcp.core.oauth.resource import Protection
    from trio_mcp.core.revisions import Revision
    from trio_mcp.server.dispatch import Middleware
    from trio_mcp.server.extensions import ExtensionRegistry

__all__ = ["CAPABILITIES", "Catalog", "EntryRoute", "Filter", "Mount"]

Filter: TypeAlias = "Callable[[Any, Described], bool]"

CAPABILITIES: Mapping[str, Sequence[str]] = {
    "tools": ("listChanged",),
    "prompts": ("listChanged",),
    "resources": ("listChanged", "subscribe"),
    "completions": (),
}
"""The capabilities that a server declares, with the notifications of each.  Every server may log."""


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

    def route(self, above: Catalog, route: EntryRoute) -> EntryRoute:
        """The way to an entry of the mounted catalog from the one above."""
        key = self.outer(route.entry.kind, route.key)
        return EntryRoute(route.entry, max(route.since, self.since), ((above, key), *route.places))


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
    because clients keep using a capability that they were told of.  `on_change`: functions to call after each
    change, with the capability.

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
        self.on_change: list[Callable[[str], None]] = []
        # By kind and key, in the order of registration, which is the order of the lists (tool-25).
        self._tables: dict[str, dict[str, EntryRoute]] = {kind: {} for kind in KINDS}
        self._completers: dict[_Completed, Entry] = {}
        self.extended: ExtensionRegistry | None = None
        """The extensions of the server, if it has any."""
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
                        found = self._found[kind][key] = mount.route(self, route)
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

        if (ascii := in_ascii(uri)) is None:
            return None
        matches = ((template, template.entry.match(ascii)) for template in templates)
        return next(((template, variables) for template, variables in matches if variables is not None), None)

    def relays(self, kind: str, key: str | None = None) -> Sequence[Mount]:
        """The mounts with a remote catalog that has entries of a kind, or may have this entry; longest prefix first.

        Only the server of a remote catalog knows its entries.
        """
        if key is None:
            return [mount for mount in self._mounts if mount.catalog.has_remote(kind)]
        inside = ((mount, mount.inner(kind, key)) for mount in self._mounts)
        found = [mount for mount, inner in inside if inner is not None and mount.catalog.has_remote(kind, inner)]
        return sorted(found, key=lambda mount: -len(mount.prefix))

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
                    found += [mount.route(self, each) for each in mount.catalog.routes(kind)]
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

    @property
    def mounted(self) -> Sequence[Catalog]:
        """The catalogs that are mounted in this one."""
        return tuple(mount.catalog for mount in self._mounts)

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
                    check_tool_name(name)
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
                    notify(capability)
