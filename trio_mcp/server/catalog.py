"""The catalog of a server: find, list, add, remove and mount entries.

A catalog knows no connection.  A server that must notify clients of changes adds a function to `on_change`.

Mounting shows all entries of another catalog, now and in the future.  Each catalog keeps all entries that it shows in
its own tables, so finding and listing are the same with and without mounts.  A change begins with a plan of all tables
that it touches, here and in the catalogs that this one is mounted in; a name that is taken in any of them raises before
any table has changed.  A mounted catalog refers to the catalogs above it by weak references, so a mounted server does
not keep an unused outer server alive.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trio_mcp.core.errors import INVALID_PARAMS, RequestError, UsageError, shown
from trio_mcp.core.messages import CachedResult, Json, JsonObject, Limits
from trio_mcp.core.subscriptions import PROMPTS_CHANGED, RESOURCES_CHANGED, TOOLS_CHANGED, ChangeEvent
from trio_mcp.server.entries import (
    Completer,
    Completing,
    Entry,
    PromptEntry,
    ResourceEntry,
    TemplateEntry,
    ToolEntry,
)

if TYPE_CHECKING:
    from trio_mcp.core.revisions import Revision

__all__ = ["CHANGES", "LISTS", "Catalog"]


LISTS: Mapping[str, tuple[str, str]] = {
    "tools/list": ("tools", "tools"),
    "prompts/list": ("prompts", "prompts"),
    "resources/list": ("resources", "resources"),
    "resources/templates/list": ("templates", "resourceTemplates"),
}
"""For each method: the kind of its entries, and the member of the result that holds them."""

CHANGES: Mapping[str, ChangeEvent] = {
    "tools": TOOLS_CHANGED,
    "prompts": PROMPTS_CHANGED,
    "resources": RESOURCES_CHANGED,
}
"""For each capability with lists: the change that clients are notified of."""

# For each kind: its capability, which also decides the change that clients are notified of.
_CAPABILITY = {"tools": "tools", "prompts": "prompts", "resources": "resources", "templates": "resources"}
# A message has room for a URI of megabytes, and matching it against each template would block the event loop.
_LONGEST_URI = Limits().uri_length
_PREFIX = r"[A-Za-z0-9_.-]{0,127}"

# Worker threads change catalogs too.  One lock for all catalogs, because a change also goes to the catalogs above.
_changing = threading.RLock()

_Page: TypeAlias = tuple[str, int | None, str | None]  # revision, size, cursor
_Completed: TypeAlias = tuple[str | None, str | None, str | None]  # kind and key of an entry, argument; None means all


class Catalog:
    """The tools, resources, resource templates, prompts and completers of one server.

    `kinds`: the capabilities that it needs, of "tools", "prompts", "resources" and "completions".  It only grows,
    because clients keep using a capability that they were told of.  `on_change`: functions to call after each change.

    It may be changed in any thread; the functions of `on_change` are called in the same thread.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.on_change: list[Callable[[ChangeEvent], None]] = []
        # By kind and key, in the order of registration, which is the order of the lists (tool-25).
        self._tables: dict[str, dict[str, Any]] = {kind: {} for kind in _CAPABILITY}
        self._completers: dict[_Completed, Completer] = {}
        # None: the page is not made yet, but a client has got its cursor.
        self._pages: dict[str, dict[_Page, CachedResult | None]] = {kind: {} for kind in _CAPABILITY}
        self._above: list[tuple[weakref.ref[Catalog], str]] = []  # the catalogs that show this one, with the prefixes

    # Finding.

    def tool(self, name: str) -> ToolEntry | None:
        """Return the tool with this name, or None."""
        found: ToolEntry | None = self._tables["tools"].get(name)  # tool-18: names are case-sensitive
        return found

    def prompt(self, name: str) -> PromptEntry | None:
        """Return the prompt with this name, or None."""
        found: PromptEntry | None = self._tables["prompts"].get(name)
        return found

    def resource(self, uri: str) -> tuple[ResourceEntry | TemplateEntry, dict[str, str]] | None:
        """Return the entry that reads this URI and the variables in the URI, or None.

        Templates are tried in the order of registration.  A URI of more than `Limits.uri_length` characters matches no
        template.
        """
        fixed: ResourceEntry | None = self._tables["resources"].get(uri)
        if fixed is not None:
            return fixed, {}
        templates = tuple(self._tables["templates"].values())
        if not templates or len(uri) > _LONGEST_URI:
            return None
        from trio_mcp.core.schema.templates import in_ascii  # templates have imported it already

        ascii = in_ascii(uri)
        if ascii is None:
            return None
        for template in templates:
            variables = template.match(ascii)
            if variables is not None:
                return template, variables
        return None

    def completer(
        self, kind: str, name: str, argument: str, allowed: Callable[[Any], bool] | None = None
    ) -> Completing | None:
        """Find the completer for an argument of a prompt or template; None if there is none.

        `kind` is "ref/prompt" or "ref/resource".  The first of these is used: the completer of this argument, the
        completer of all arguments of this prompt or template, the completer of all prompts and templates.  For a
        mounted entry the general completer of its own catalog goes before those of the catalogs above.

        Raises RequestError if there is no such entry or argument, or if `allowed` hides the entry (cmpl-06).
        """
        entry = self._completed(kind, name)
        if entry is None or (allowed is not None and not allowed(entry)):
            described = "prompt" if kind == "ref/prompt" else "resource or resource template"
            raise RequestError(INVALID_PARAMS, f"there is no {described} {shown(name)}")
        if argument not in entry.takes:
            raise RequestError(INVALID_PARAMS, f"{entry} has no argument {shown(argument)}")
        levels: list[tuple[Catalog, Entry]] = [(self, entry)]
        for owner in entry.owners:
            levels.append((owner, levels[-1][1].inner))
        own = [(at, (each.kind, each.key)) for at, (_, each) in enumerate(levels)]
        general = [(at, (None, None)) for at in reversed(range(len(levels)))]
        for at, place in (*own, *general):
            table = levels[at][0]._completers
            found = table.get((*place, argument)) or table.get((*place, None))
            if found is not None:
                return Completing(found, entry, levels[at][1].key, entry.owners[:at])
        return None

    def _completed(self, kind: str, name: str) -> Entry | None:
        """Find the entry of a reference: a prompt by its name, a template by its text or by a URI (cmpl-08)."""
        if kind == "ref/prompt":
            return self.prompt(name)
        template: Entry | None = self._tables["templates"].get(name)
        if template is not None:
            return template
        found = self.resource(name)
        return None if found is None else found[0]

    # Listing.

    def list(
        self,
        method: str,
        revision: Revision,
        cursor: Json = None,
        size: int | None = None,
        allowed: Callable[[Any], bool] | None = None,
    ) -> JsonObject:
        """Return one page of a list, as the result of `method`.  The caller adds cache hints and metadata.

        The page is cached, so callers must not change it.  Entries for which `allowed` returns False are left out.
        Raises RequestError for an invalid cursor.
        """
        kind, member = LISTS[method]
        if allowed is not None or not isinstance(cursor, str | None):
            return self._page(kind, member, revision, cursor, size, allowed)
        pages, at = self._pages[kind], (revision.name, size, cursor)
        page = pages.get(at)
        if page is not None:
            return page
        with _changing:  # no change may come between making the page and caching it
            page = CachedResult(self._page(kind, member, revision, cursor, size, None))
            # Clients can invent any number of valid cursors; only pages of cursors that we gave are cached.
            if cursor is None or at in pages:
                pages[at] = page
                if "nextCursor" in page:
                    pages.setdefault((revision.name, size, page["nextCursor"]), None)
        return page

    def _page(
        self,
        kind: str,
        member: str,
        revision: Revision,
        cursor: Json,
        size: int | None,
        allowed: Callable[[Any], bool] | None,
    ) -> JsonObject:
        from trio_mcp.core.caching import paginate

        entries = [entry for entry in tuple(self._tables[kind].values()) if allowed is None or allowed(entry)]
        items, following = paginate(entries, cursor, size, lambda entry: entry.key)
        page: JsonObject = {member: [entry.json(revision) for entry in items]}
        return page if following is None else {**page, "nextCursor": following}

    # Changing.

    def add(self, entry: Entry) -> None:
        """Show an entry here and in all catalogs that this one is mounted in.

        Raises UsageError, and changes no catalog, if its name or URI is taken in one of them.
        """
        with _changing:
            plan = _plan(self._places(entry))
            _insert(plan)
            _announce(plan)

    def remove_tool(self, name: str) -> None:
        """Remove a tool here and in the catalogs above.  Raises UsageError if it is missing or mounted."""
        self._remove("tools", "tool", name)

    def remove_prompt(self, name: str) -> None:
        """Remove a prompt and its completers, as `remove_tool`."""
        self._remove("prompts", "prompt", name)

    def remove_resource(self, uri: str) -> None:
        """Remove a resource, as `remove_tool`."""
        self._remove("resources", "resource", uri)

    def remove_template(self, uri_template: str) -> None:
        """Remove a template and its completers, as `remove_tool`."""
        self._remove("templates", "resource template", uri_template)

    def _remove(self, kind: str, described: str, key: str) -> None:
        with _changing:
            entry: Entry | None = self._tables[kind].get(key)
            if entry is None:
                raise UsageError(f"there is no {described} {key!r} to remove")
            if entry.owners:
                raise UsageError(f"{entry} belongs to a mounted server; remove it there")
            plan = list(self._places(entry))
            for catalog, each in plan:
                del catalog._tables[kind][each.key]
                for place in [place for place in catalog._completers if place[:2] == (kind, each.key)]:
                    del catalog._completers[place]
            _announce(plan)

    def add_completer(self, completer: Completer, ref: str | None = None, argument: str | None = None) -> None:
        """Add a completer.

        `ref` is a prompt or URI template, or None for all; `argument` is one argument, or None for all.  Arguments with
        a more specific completer do not use it.  Raises UsageError if there is no such entry or argument, or if it has
        a completer already.
        """
        with _changing:
            kind = None
            if ref is not None:
                kind = next((each for each in ("prompts", "templates") if ref in self._tables[each]), None)
                if kind is None:
                    raise UsageError(f"there is no prompt or URI template {ref!r} to complete; register that first")
                entry: Entry = self._tables[kind][ref]
                if argument is not None and argument not in entry.takes:
                    has = ", ".join(sorted(entry.takes)) or "none"
                    raise UsageError(f"{entry} has no argument {argument!r} to complete; it has {has}")
            place = (kind, ref, argument)
            if place in self._completers:
                which = "every argument" if argument is None else f"the argument {argument!r}"
                raise UsageError(
                    f"{which} of {ref or 'every prompt and template'} has a completer already; give this one another "
                    "ref or argument"
                )
            self._completers[place] = completer
            for catalog in (self, *self._all_above()):
                catalog.kinds.add("completions")

    # Mounting.

    def check_mounting(self) -> None:
        """Raise `UsageError` if this catalog cannot be mounted; for subclasses."""

    def mount(self, other: Catalog, prefix: str = "") -> None:
        """Show all entries of `other`, now and in the future, with `prefix` before the names of tools and prompts.

        Raises UsageError, and mounts nothing, if a name or URI is taken here or in a catalog above, or if this one is
        mounted in `other`.
        """
        if not isinstance(prefix, str) or not re.fullmatch(_PREFIX, prefix):
            raise UsageError(f"a prefix may only have the characters A-Z a-z 0-9 _ - . of tool names, got {prefix!r}")
        other.check_mounting()
        with _changing:
            if other is self or other in self._all_above():
                raise UsageError("a server cannot contain itself; mount it the other way round")
            if (self, prefix) in other._links():
                raise UsageError(f"this server is mounted here already with the prefix {prefix!r}; use another prefix")
            entries = [entry for table in other._tables.values() for entry in table.values()]
            plan = _plan(place for entry in entries for place in self._places(entry.under(prefix, other)))
            _insert(plan)
            other._above.append((weakref.ref(self), prefix))
            for catalog in (self, *self._all_above()):
                catalog.kinds |= other.kinds
            _announce(plan)

    def _links(self) -> Sequence[tuple[Catalog, str]]:
        """The catalogs that this one is mounted in, if they still exist."""
        links = [(above, prefix) for reference, prefix in self._above if (above := reference()) is not None]
        self._above = [(weakref.ref(above), prefix) for above, prefix in links]
        return links

    def _all_above(self) -> Iterator[Catalog]:
        for above, _ in self._links():
            yield above
            yield from above._all_above()

    def _places(self, entry: Entry) -> Iterator[_Place]:
        """Every catalog that shows this entry, with the entry as it is shown there."""
        yield self, entry
        for above, prefix in self._links():
            yield from above._places(entry.under(prefix, self))


_Place: TypeAlias = tuple[Catalog, Entry]


def _plan(places: Iterable[_Place]) -> Sequence[_Place]:
    """Return all places.  Raises UsageError if the name or URI is taken in one of them."""
    plan: list[_Place] = []
    planned: set[tuple[Catalog, str, str]] = set()
    for catalog, entry in places:
        at = (catalog, entry.kind, entry.key)
        if entry.key in catalog._tables[entry.kind] or at in planned:  # tool-19
            raise UsageError(
                f"{entry} exists already; give the new one another {entry.key_name} (or its server another prefix), or "
                "remove the old one first"
            )
        planned.add(at)
        plan.append((catalog, entry))
    return plan


def _insert(plan: Sequence[_Place]) -> None:
    for catalog, entry in plan:
        catalog._tables[entry.kind][entry.key] = entry
        catalog.kinds.add(_CAPABILITY[entry.kind])
        if isinstance(entry, ToolEntry) and entry.embeds:
            catalog.kinds.add("resources")


def _announce(plan: Sequence[_Place]) -> None:
    """Notify of a complete change.  All cached pages are dropped before the first function of `on_change` is called."""
    for catalog, entry in plan:
        catalog._pages[entry.kind].clear()
    for catalog, capability in dict.fromkeys((catalog, _CAPABILITY[entry.kind]) for catalog, entry in plan):
        for notify in catalog.on_change:
            notify(CHANGES[capability])
