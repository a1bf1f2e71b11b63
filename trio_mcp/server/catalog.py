"""What a server has: finding it, listing it, changing it, and showing another's as its own.

A catalog knows no connection.  Whoever has to tell clients of changes adds a function to `on_change`.

Mounting shows everything that another catalog has, now and later.  Each catalog holds all that it shows in its own
tables, so finding and listing are the same with and without mounts.  A change begins with a plan of everything that it
touches, here and wherever this is mounted, and a clash anywhere raises before anything has changed.  A mounted catalog
holds those above it by weak references only: a server that nobody needs any more is not kept by its parts.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trio_mcp.core.errors import INVALID_PARAMS, RequestError, UsageError, shown
from trio_mcp.core.jsonrpc import CachedResult, Json, JsonObject, Limits
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
"""For each list: the kind of its entries, and the member of the result that holds them."""

CHANGES: Mapping[str, ChangeEvent] = {
    "tools": TOOLS_CHANGED,
    "prompts": PROMPTS_CHANGED,
    "resources": RESOURCES_CHANGED,
}
"""For each capability that has lists: what clients are told when one has changed."""

# For each kind: the capability that stands for it, which is also what clients are told has changed.
_CAPABILITY = {"tools": "tools", "prompts": "prompts", "resources": "resources", "templates": "resources"}
# A message has room for a URI of megabytes, which would be held against each template while everybody waits.
_LONGEST_URI = Limits().uri_length
_PREFIX = r"[A-Za-z0-9_.-]{0,127}"

# Worker threads change catalogs too.  One lock for all, since a change of one goes on in those that it is mounted in.
_changing = threading.RLock()

_Page: TypeAlias = tuple[str, int | None, str | None]  # revision, size, cursor
_Completed: TypeAlias = tuple[str | None, str | None, str | None]  # kind and key of an entry, argument; None is any


class Catalog:
    """The tools, resources, resource templates, prompts and completers of one server.

    `kinds`: which capabilities it has a use for, of "tools", "prompts", "resources" and "completions".  It only grows,
    since clients that were told of one go on asking.  `on_change`: called after each change with what has changed.

    It may be changed in any thread; those who hear of it are called in that one.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.on_change: list[Callable[[ChangeEvent], None]] = []
        # By kind and key, in the order of registration, which is that of the lists (tool-25).
        self._tables: dict[str, dict[str, Any]] = {kind: {} for kind in _CAPABILITY}
        self._completers: dict[_Completed, Completer] = {}
        # None: not made yet, but its cursor was given.
        self._pages: dict[str, dict[_Page, CachedResult | None]] = {kind: {} for kind in _CAPABILITY}
        self._above: list[tuple[weakref.ref[Catalog], str]] = []  # where this is mounted, and with which prefix

    # Finding.

    def tool(self, name: str) -> ToolEntry | None:
        found: ToolEntry | None = self._tables["tools"].get(name)  # tool-18: in exactly these letters
        return found

    def prompt(self, name: str) -> PromptEntry | None:
        found: PromptEntry | None = self._tables["prompts"].get(name)
        return found

    def resource(self, uri: str) -> tuple[ResourceEntry | TemplateEntry, dict[str, str]] | None:
        """What reads this URI, and the variables found in it.  Templates are tried in the order of registration.

        No template stands for a URI of more than `Limits.uri_length` characters.
        """
        fixed: ResourceEntry | None = self._tables["resources"].get(uri)
        if fixed is not None:
            return fixed, {}
        templates = tuple(self._tables["templates"].values())
        if not templates or len(uri) > _LONGEST_URI:
            return None
        from trio_mcp.core.schema.templates import in_ascii  # who has a template has paid for it

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
        """What completes an argument of what is named by a "ref/prompt" or "ref/resource".

        One for this argument goes before one for all arguments of this prompt or template, that before those for all;
        of the latter, those of a mounted catalog go first for what is its own.  Raises RequestError for a reference to
        nothing, to what `allowed` leaves out, and for an argument that is not there (cmpl-06).
        """
        entry = self._completed(kind, name)
        if entry is None or (allowed is not None and not allowed(entry)):
            what = "prompt" if kind == "ref/prompt" else "resource or resource template"
            raise RequestError(INVALID_PARAMS, f"there is no {what} {shown(name)}")
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
        """cmpl-08: a prompt by its name, or a template by itself or by a URI that it stands for."""
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
        """One page of a list, as the result of `method`; what caching and metadata add to it is the caller's.

        The page may be kept for others: it must not be changed.  `allowed` is asked for each entry; what it leaves out
        is not there.  Raises RequestError for a cursor that is none of ours.
        """
        kind, member = LISTS[method]
        if allowed is not None or not isinstance(cursor, str | None):
            return self._page(kind, member, revision, cursor, size, allowed)
        pages, at = self._pages[kind], (revision.name, size, cursor)
        page = pages.get(at)
        if page is not None:
            return page
        with _changing:  # what is kept is of now
            page = CachedResult(self._page(kind, member, revision, cursor, size, None))
            # Clients can make up cursors without end that lead somewhere; kept is what is found by those that we gave.
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
        from trio_mcp.core.pages import paginate

        entries = [entry for entry in tuple(self._tables[kind].values()) if allowed is None or allowed(entry)]
        items, following = paginate(entries, cursor, size, lambda entry: entry.key)
        page: JsonObject = {member: [entry.json(revision) for entry in items]}
        return page if following is None else {**page, "nextCursor": following}

    # Changing.

    def add(self, entry: Entry) -> None:
        """Show an entry here and wherever this is mounted.

        Raises UsageError, and changes nothing anywhere, if its name or URI is taken in one of these places.
        """
        with _changing:
            plan = _free(self._places(entry))
            _fill(plan)
            _announce(plan)

    def remove_tool(self, name: str) -> None:
        self._remove("tools", "tool", name)

    def remove_prompt(self, name: str) -> None:
        """Its completers go with it."""
        self._remove("prompts", "prompt", name)

    def remove_resource(self, uri: str) -> None:
        self._remove("resources", "resource", uri)

    def remove_template(self, uri_template: str) -> None:
        """Its completers go with it."""
        self._remove("templates", "resource template", uri_template)

    def _remove(self, kind: str, what: str, key: str) -> None:
        with _changing:
            entry: Entry | None = self._tables[kind].get(key)
            if entry is None:
                raise UsageError(f"there is no {what} {key!r} to remove")
            if entry.owners:
                raise UsageError(f"{entry} was mounted with what it belongs to; remove it there")
            plan = list(self._places(entry))
            for catalog, each in plan:
                del catalog._tables[kind][each.key]
                for place in [place for place in catalog._completers if place[:2] == (kind, each.key)]:
                    del catalog._completers[place]
            _announce(plan)

    def add_completer(self, completer: Completer, ref: str | None = None, argument: str | None = None) -> None:
        """Complete one argument, or all without a completer of their own, of the prompt or URI template `ref`, or of
        all that have none of their own."""
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
                what = "every argument" if argument is None else f"the argument {argument!r}"
                raise UsageError(
                    f"{what} of {ref or 'every prompt and template'} has a completer already; say what this one is for"
                )
            self._completers[place] = completer
            for catalog in (self, *self._all_above()):
                catalog.kinds.add("completions")

    # Mounting.

    def check_mounting(self) -> None:
        """Raise `UsageError` where nothing of this would be seen if it were mounted."""

    def mount(self, other: Catalog, prefix: str = "") -> None:
        """Show everything that `other` has, now and later, with `prefix` before the names of tools and prompts.

        Raises UsageError, and mounts nothing, if a name or URI is taken here or wherever this is mounted, or
        if `other` shows this one already.
        """
        if not isinstance(prefix, str) or not re.fullmatch(_PREFIX, prefix):
            raise UsageError(f"a prefix has only the characters A-Z a-z 0-9 _ - . of tool names, not {prefix!r}")
        other.check_mounting()
        with _changing:
            if other is self or other in self._all_above():
                raise UsageError("what is mounted would contain itself; mount it the other way round")
            if (self, prefix) in other._links():
                raise UsageError(f"this is mounted here already, with the prefix {prefix!r}; give it another one")
            entries = [entry for table in other._tables.values() for entry in table.values()]
            plan = _free(place for entry in entries for place in self._places(entry.under(prefix, other)))
            _fill(plan)
            other._above.append((weakref.ref(self), prefix))
            for catalog in (self, *self._all_above()):
                catalog.kinds |= other.kinds
            _announce(plan)

    def _links(self) -> Sequence[tuple[Catalog, str]]:
        """The catalogs in which this one is mounted, if they are still there."""
        links = [(above, prefix) for reference, prefix in self._above if (above := reference()) is not None]
        self._above = [(weakref.ref(above), prefix) for above, prefix in links]
        return links

    def _all_above(self) -> Iterator[Catalog]:
        for above, _ in self._links():
            yield above
            yield from above._all_above()

    def _places(self, entry: Entry) -> Iterator[_Place]:
        """Every catalog that shows this entry of ours, with the entry as it is there."""
        yield self, entry
        for above, prefix in self._links():
            yield from above._places(entry.under(prefix, self))


_Place: TypeAlias = tuple[Catalog, Entry]


def _free(places: Iterable[_Place]) -> Sequence[_Place]:
    """All of them, if none is taken."""
    plan: list[_Place] = []
    planned: set[tuple[Catalog, str, str]] = set()
    for catalog, entry in places:
        at = (catalog, entry.kind, entry.key)
        if entry.key in catalog._tables[entry.kind] or at in planned:  # tool-19
            raise UsageError(
                f"{entry} is there already; give the new one another {entry.called} (or what it is mounted with, "
                "another prefix), or remove the old one first"
            )
        planned.add(at)
        plan.append((catalog, entry))
    return plan


def _fill(plan: Sequence[_Place]) -> None:
    for catalog, entry in plan:
        catalog._tables[entry.kind][entry.key] = entry
        catalog.kinds.add(_CAPABILITY[entry.kind])
        if isinstance(entry, ToolEntry) and entry.embeds:
            catalog.kinds.add("resources")


def _announce(plan: Sequence[_Place]) -> None:
    """After a change is complete: no page of before is left when the first listener hears of it."""
    for catalog, entry in plan:
        catalog._pages[entry.kind].clear()
    for catalog, capability in dict.fromkeys((catalog, _CAPABILITY[entry.kind]) for catalog, entry in plan):
        for hear in catalog.on_change:
            hear(CHANGES[capability])
