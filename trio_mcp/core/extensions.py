"""Extensions: methods, results and filters beyond those of the protocol, and the rules for both sides (SEP-2133).

An `Extension` says what one extension adds.  A program gives its extensions to the `Offer` of its side, as
`Extensions`; the session then declares them, and finds their methods after the tables of the revision:

    ping = Extension("com.example/ping", methods=[ExtensionMethod("com.example/ping", Role.CLIENT)])
    session = ServerProtocol(Offer(info, extensions=Extensions([ping])))

| An extension is declared in | as |
|---|---|
| 2026-07-28 | `capabilities.extensions`: an object from identifiers to settings (type-19) |
| older revisions | `capabilities.experimental`, in the same form |
| any revision, with `capability` | the core capability of that name, whose value is the settings |

Both sides must declare an extension before one uses it (ver-06):

| Who has not declared it | A request is refused with | A notification is |
|---|---|---|
| the client | -32021, and `requiredCapabilities` | reported and ignored |
| the server | -32601 | reported and ignored |

The side that sends looks first: it raises `NotDeclared`.  An extension with two forms, such as tasks, is two
`Extension` objects with one identifier and different `revisions`.

Settings of the peer are read in both places, in every revision: hosts of 2025-11-25 declare MCP Apps as
`capabilities.extensions` already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from trio_mcp.core.errors import METHOD_NOT_FOUND, MISSING_CLIENT_CAPABILITY, RequestError, UsageError, shown
from trio_mcp.core.messages import JsonObject, record
from trio_mcp.core.revisions import (
    NOTHING,
    REVISIONS,
    Capability,
    Revision,
    Role,
    Terms,
    capability_object,
    check_extension,
    declares,
    in_protocol,
)
from trio_mcp.core.subscriptions import ChangeKind

__all__ = ["Extension", "ExtensionMethod", "Extensions"]


def _check_name(method: ExtensionMethod, _: object, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of a method must be a text, such as com.example/ping, got {shown(name)}")


@record
class ExtensionMethod:
    """A request or a notification that the protocol does not have.

    `sender` is the side that sends it.  `mcp_name` is the parameter that the HTTP header Mcp-Name repeats, or None.
    `subscribed`: a notification that a server sends on subscriptions, and never elsewhere.  `while_draining`: a request
    about calls that go on without their own requests; a server that drains, and so waits for them, still serves it.
    """

    name: str = attrs.field(validator=_check_name)
    sender: Role
    notification: bool = False
    mcp_name: str | None = None
    subscribed: bool = False
    while_draining: bool = False


def _check_settings(extension: Extension, _: object, settings: object) -> None:
    if not isinstance(settings, Mapping):
        raise UsageError(f"the settings of {extension.id} must be an object, got {type(settings).__name__}; use {{}}")


def _check_filters(extension: Extension, _: object, filters: Collection[str]) -> None:
    for name in filters:
        if not isinstance(name, str) or not name:
            raise UsageError(f"the name of a filter must be a text, such as com.example/items, got {shown(name)}")
        if any(name == kind.field for kind in ChangeKind):
            raise UsageError(f"the filter {name} is one of the protocol already; choose another name")


def _as_tuple(methods: Iterable[ExtensionMethod]) -> tuple[ExtensionMethod, ...]:
    return tuple(methods)


@record
class Extension:
    """One extension: its identifier, the settings of our side, and what it adds to the protocol.

    - `methods`: its requests and notifications, in both directions.
    - `result_types`: for each method of the protocol, further values of `resultType` (rtype-02).
    - `filters`: the members that it adds to the filter of `subscriptions/listen`.
    - `revisions`: the revisions that have it, by name.
    - `capability`: the core capability that declares it, such as "tasks"; otherwise see the head of the file.
    - `required`: a server refuses requests of clients that do not declare it.

    Raises `UsageError` for an identifier without a prefix (ver-05), settings that are no object, a filter that the
    protocol has, and a revision that does not exist.
    """

    id: str
    settings: Mapping[str, Any] = attrs.field(default=NOTHING, validator=_check_settings)
    methods: tuple[ExtensionMethod, ...] = attrs.field(default=(), converter=_as_tuple)
    result_types: Mapping[str, Collection[str]] = NOTHING
    filters: Collection[str] = attrs.field(default=(), validator=_check_filters)
    revisions: Collection[str] = tuple(REVISIONS)
    capability: str = ""
    required: bool = False

    def __attrs_post_init__(self) -> None:
        check_extension(self.id)
        for name in self.revisions:
            if name not in REVISIONS:
                raise UsageError(f"{self.id}: unknown revision {shown(name)}; the revisions are {', '.join(REVISIONS)}")

    def path(self, revision: Revision) -> Capability:
        """Return the capability that declares it in this revision."""
        if self.capability:
            return (self.capability,)
        return ("extensions" if "extensions" in revision.capabilities[Role.CLIENT] else "experimental", self.id)

    def declared_in(self, terms: Terms) -> bool:
        """Whether the peer declares it, and its revision has it."""
        if terms.revision.name not in self.revisions:
            return False
        if self.capability:
            return declares(terms.capabilities, (self.capability,))
        return terms.extension(self.id) is not None


class Extensions:
    """The extensions of one side, and its methods that belong to none.

    `methods` are not gated: the peer need not declare anything.  With `fallback`, requests and notifications of the
    peer with an unknown method are served too, as a proxy needs it.

    Raises `UsageError` if a revision gets one extension, or one method, twice, or a method that the protocol has.
    """

    def __init__(
        self,
        extensions: Iterable[Extension] = (),
        *,
        methods: Iterable[ExtensionMethod] = (),
        fallback: bool = False,
    ) -> None:
        self.all = tuple(extensions)
        self.methods = tuple(methods)
        self.fallback = fallback
        self.mcp_names: Mapping[str, str] = {
            each.name: each.mcp_name
            for each in (*self.methods, *(method for extension in self.all for method in extension.methods))
            if each.mcp_name is not None
        }
        """The parameter that Mcp-Name repeats, for the methods that have one."""
        self._rows: dict[tuple[Revision, Role, str], tuple[ExtensionMethod, Extension | None]] = {}
        for revision in REVISIONS.values():
            self._add_rows(revision)

    def _add_rows(self, revision: Revision) -> None:
        here, ids = self.of(revision), [each.id for each in self.of(revision)]
        for id in ids:
            if ids.count(id) > 1:
                raise UsageError(f"the extension {id} is given twice for {revision}")
        owned = [(method, extension) for extension in here for method in extension.methods]
        for method, extension in [*owned, *((method, None) for method in self.methods)]:
            core = revision.notification if method.notification else revision.request
            if core(method.sender, method.name) is not None:
                raise UsageError(f"{method.name} is a method of {revision} already; choose another name")
            key = (revision, method.sender, method.name)
            if key in self._rows:
                raise UsageError(f"the method {method.name} is given twice for {revision}")
            self._rows[key] = method, extension

    def of(self, revision: Revision) -> tuple[Extension, ...]:
        """The extensions that this revision has."""
        return tuple(each for each in self.all if revision.name in each.revisions)

    def declare(self, revision: Revision, capabilities: Mapping[str, Any]) -> JsonObject:
        """Return capabilities of our side with the extensions that this revision has."""
        declared = dict(capabilities)
        for extension in self.of(revision):
            name, *inner = extension.path(revision)
            settings = dict(extension.settings)
            declared[name] = {**declared.get(name, NOTHING), inner[0]: settings} if inner else settings
        return declared

    def find(self, sender: Role, revision: Revision, name: str, *, notification: bool) -> ExtensionMethod | None:
        """Return the method of this name that `sender` may send, or None."""
        found = self._rows.get((revision, sender, name))
        return found[0] if found is not None and found[0].notification is notification else None

    def __contains__(self, name: str) -> bool:
        """Whether a revision has a method of this name."""
        return any(row.name == name for row, _ in self._rows.values())

    def serves(self, sender: Role, revision: Revision, name: str, *, notification: bool) -> bool:
        """Whether our side takes a message of this name from `sender`.  With `fallback` it takes all unknown ones."""
        if self.find(sender, revision, name, notification=notification) is not None:
            return True
        return self.fallback and not in_protocol(name) and name not in self

    def lacking(self, sender: Role, name: str, terms: Terms) -> Capability | None:
        """Return the capability that the peer must declare for this method of `sender`, and has not."""
        row, extension = self._rows.get((terms.revision, sender, name), (None, None))
        # Only the owner of a core capability declares it: the receiver of a request, the sender of a notification.
        if row is None or extension is None or (extension.capability and row.notification):
            return None
        return None if extension.declared_in(terms) else extension.path(terms.revision)

    def refusal(self, sender: Role, name: str, terms: Terms) -> RequestError | None:
        """Return the error for a request of `sender`, our peer, that has not declared the extension; or None."""
        missing = self.lacking(sender, name, terms)
        if missing is None or len(missing) == 1:  # of a core capability we are the owner
            return None
        if sender is Role.SERVER:
            why = f"{name} belongs to {missing[-1]}, which the server has not declared"
            return RequestError(METHOD_NOT_FOUND, why)
        return _undeclared(name, [missing])

    def refusal_of_all(self, name: str, terms: Terms) -> RequestError | None:
        """Return the error for a request of a client that has not declared what this server requires; or None."""
        needed = [each for each in self.of(terms.revision) if each.required and not each.declared_in(terms)]
        return _undeclared(name, [each.path(terms.revision) for each in needed]) if needed else None

    def requires(self, revision: Revision) -> bool:
        """Whether a client must declare one of the extensions for every request."""
        return any(each.required for each in self.of(revision))

    def result_types(self, method: str, terms: Terms) -> frozenset[str]:
        """Return the result types beyond those of the protocol that this result may have (rtype-02)."""
        agreed = [each for each in self.of(terms.revision) if method in each.result_types and each.declared_in(terms)]
        return frozenset(kind for each in agreed for kind in each.result_types[method])

    def asked(self, params: JsonObject, terms: Terms) -> Mapping[str, Any]:
        """Return the members of the filter of a listen request that belong to our extensions.

        Raises `RequestError` (-32021) if the client has not declared the extension of one of them (xtask-37).
        """
        filter = params.get("notifications")
        if not isinstance(filter, dict):
            return NOTHING
        used = [each for each in self.of(terms.revision) if not filter.keys().isdisjoint(each.filters)]
        if needed := [each.path(terms.revision) for each in used if not each.declared_in(terms)]:
            raise _undeclared("subscriptions/listen", needed)
        return {name: filter[name] for each in used for name in each.filters if name in filter}


def _undeclared(name: str, needed: Sequence[Capability]) -> RequestError:
    names = ", ".join(".".join(each) for each in needed)
    why = f"{name} needs the client capability {names}, which was not declared"
    return RequestError(MISSING_CLIENT_CAPABILITY, why, {"requiredCapabilities": capability_object(needed)})
