"""The five revisions of the protocol, as data; the terms of a message; and the keys of `_meta`.

The differences between revisions are tables in this file: the methods and notifications, the side that may send them,
the capability that each one needs, the members of results, the error codes, cancellation, and the rules of HTTP.  The
rest of the core asks a `Revision`, and does not compare names of revisions.  (The *fields* of the protocol's objects
differ too.  `models` marks them at the fields themselves.)  A new revision is one more entry in the tables.

A legacy connection agrees its terms once, in the handshake.  A modern request brings terms of its own.  In both eras
the code that makes a decision gets a `Terms`, and does not ask which era it is in.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Json, JsonObject, mutable_record, record

__all__ = [
    "INSTEAD", "LATEST", "LATEST_LEGACY", "LEGACY", "LOG_LEVELS", "META_CLIENT_CAPABILITIES", "META_CLIENT_INFO",
    "META_LOG_LEVEL", "META_SERVER_INFO", "META_SUBSCRIPTION_ID", "META_VERSION", "MODERN", "NOTHING", "REVISIONS",
    "Capability", "CapabilityRule", "ConditionalNeed", "HttpRules", "MethodRule", "Revision", "Role", "Terms",
    "capability_object", "check_extension", "check_key", "check_meta", "declares", "in_protocol", "is_like_protocol",
    "meta_of", "missing_capabilities", "stable_name",
]  # fmt: skip

META_VERSION = "io.modelcontextprotocol/protocolVersion"
META_CLIENT_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META_CLIENT_INFO = "io.modelcontextprotocol/clientInfo"
META_SERVER_INFO = "io.modelcontextprotocol/serverInfo"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
META_SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"


class Role(enum.Enum):
    """The role of one side: client or server."""

    CLIENT = "client"
    SERVER = "server"

    __hash__ = object.__hash__  # each message looks up several roles, and the hash of Enum is four times as slow

    @property
    def other(self) -> Role:
        """The role of the peer."""
        return Role.SERVER if self is Role.CLIENT else Role.CLIENT


CLIENT, SERVER = Role.CLIENT, Role.SERVER

Capability = tuple[str, ...]
"""A path into a capabilities object, such as ``("resources", "subscribe")``."""


@record
class MethodRule:
    """The rule of one revision for one request or notification.

    `needs` is the capability that it needs, and `owner` is the side that must declare it: the receiver of a request,
    the sender of a notification.
    """

    name: str
    owner: Role
    needs: Capability = ()
    early: bool = False  # may be sent before the end of the handshake


@record
class HttpRules:
    """The rules of one revision for Streamable HTTP."""

    version_header: bool  # MCP-Protocol-Version is required (after initialize, if the revision has it)
    standard_headers: bool  # Mcp-Method, Mcp-Name and Mcp-Param-* are required
    disconnect_cancels: bool  # closing the response stream cancels the request; no notification is posted
    statuses: Mapping[int, int]  # JSON-RPC error code -> HTTP status; 200 for all other codes
    sse_fallback: frozenset[int]  # statuses of the first POST after which HTTP+SSE is tried
    priming: bool  # a stream begins with an event that has only an id; the server may close it and the client resumes


NOTHING: Mapping[str, Any] = MappingProxyType({})
_COMPLETE: Mapping[str, Any] = MappingProxyType({"resultType": "complete"})
_COMPLETE_UNCACHED: Mapping[str, Any] = MappingProxyType({**_COMPLETE, "ttlMs": 0, "cacheScope": "private"})


@attrs.frozen(eq=False, repr=False)
class Revision:
    """One revision.  Compared by identity: there is exactly one object for each name."""

    name: str
    handshake: bool  # starts with initialize; otherwise every request carries its terms in _meta
    requests: Mapping[Role, Mapping[str, MethodRule]]  # by sender
    notifications: Mapping[Role, Mapping[str, MethodRule]]  # by sender
    capabilities: Mapping[Role, Mapping[str, CapabilityRule]]  # that each side may declare
    info_fields: frozenset[str]  # of Implementation
    input_requests: Mapping[str, MethodRule]  # requests inside an input-required result
    input_required: frozenset[str]  # methods that may be answered with an input-required result
    batches: bool  # JSON arrays of messages
    unreadable_id_is_null: bool  # the id of an error is null if that of the request is unreadable; False: it is missing
    result_type: bool  # every result has a resultType
    on_subscriptions: frozenset[str]  # notifications that are sent on subscriptions; no others are sent there
    cacheable: frozenset[str]  # methods whose complete results carry ttlMs and cacheScope
    required_meta: Mapping[str, type]  # members of params._meta in every request of a client
    reserved_labels: slice | None  # a _meta prefix with "mcp" among these labels is reserved; None: keys have no rules
    teardown: frozenset[str]  # requests of the client that a server may end with notifications/cancelled
    uncancellable: frozenset[str]
    progress_message: bool  # notifications/progress may carry a message
    resource_not_found: int
    invalid_arguments_are_results: bool  # invalid arguments of a tool give isError, not a JSON-RPC error
    forbidden_codes: frozenset[int]  # error codes that must not be sent
    conditional_needs: tuple[ConditionalNeed, ...]
    http: HttpRules | None  # None: this revision has only HTTP+SSE

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Revision {self.name}>"

    def request(self, sender: Role, name: str) -> MethodRule | None:
        """Return the rule for a request, or None if it does not exist."""
        return self.requests[sender].get(name)

    def notification(self, sender: Role, name: str) -> MethodRule | None:
        """Return the rule for a notification, or None if it does not exist."""
        return self.notifications[sender].get(name)

    def declarable(self, role: Role, capabilities: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of `capabilities` that exists in this revision."""
        declared: dict[str, Any] = {}
        for name, rule in self.capabilities[role].items():
            value = capabilities.get(name)
            if value is None or (rule.only_with and not declares(capabilities, rule.only_with)):
                continue
            keep = rule.keys
            declared[name] = value if keep is None else {key: each for key, each in value.items() if key in keep}
        return declared

    def instead_of(self, method: str) -> str:
        """Return the alternative to a method that this revision does not have, or "" if there is none."""
        if method in self.input_requests:
            return "an input request in an input-required result"
        return INSTEAD.get(method, "")

    def error_code(self, code: int) -> int:
        """Return the error code to send.  Handlers raise codes without knowing the revision."""
        if code == errors.RESOURCE_NOT_FOUND:
            return self.resource_not_found
        return errors.INTERNAL_ERROR if code in self.forbidden_codes else code

    def meta_fault(self, meta: object) -> str | None:
        """Return what the `_meta` of a client's request lacks, or None if it has all that this revision requires."""
        required = self.required_meta.items()
        if isinstance(meta, dict):
            for name, kind in required:
                if not isinstance(meta.get(name), kind):
                    break
            else:
                return None
        needed = [f"{name} ({'a string' if kind is str else 'an object'})" for name, kind in required]
        return f"params._meta must have {' and '.join(needed)}"

    def complete(self, cacheable: bool) -> Mapping[str, Any]:
        """Return the members that every complete result has, of cacheable methods or of others."""
        if not self.result_type:
            return NOTHING
        return _COMPLETE_UNCACHED if cacheable else _COMPLETE


@record
class CapabilityRule:
    """The rule of one revision for declaring a capability.

    `keys`: the members it may have (None: any).  `only_with`: the capability is declared only if this path is, because
    in this revision the capability without members already includes the path.
    """

    keys: frozenset[str] | None = None
    only_with: Capability = ()


@record
class ConditionalNeed:
    """A parameter that needs a capability: `param` is present, and has one of `values` if there are any."""

    method: str
    param: str
    values: tuple[str, ...]  # not a set: a value of the peer may be unhashable
    needs: Capability

    def applies(self, method: str, params: Mapping[str, Any]) -> bool:
        """Return whether a request with these params needs the capability."""
        if method != self.method or self.param not in params:
            return False
        return not self.values or params[self.param] in self.values


def declares(capabilities: Mapping[str, Any], needs: Capability) -> bool:
    """Return whether a capabilities object, as it came from the wire, declares the capability `needs`.

    A capability is declared if it is present and neither false nor null; `{}` declares it.  ``{"elicitation": {}}``
    means form mode, so it declares ``("elicitation", "form")`` too; an object with only another mode does not.
    """
    at: Any = capabilities
    for step in needs:
        if needs == ("elicitation", "form") and at == {} and at is not capabilities:
            return True
        at = at.get(step) if isinstance(at, Mapping) else None
        if at is None or at is False:
            return False
    return True


def missing_capabilities(
    revision: Revision, method: MethodRule, params: Mapping[str, Any], declared: Mapping[str, Any]
) -> list[Capability]:
    """Return the capabilities that the request needs and `declared` lacks: for the method and for its parameters."""
    needs = [method.needs] if method.needs else []
    needs += [need.needs for need in revision.conditional_needs if need.applies(method.name, params)]
    return [need for need in needs if not declares(declared, need)]


def capability_object(needs: Iterable[Capability]) -> dict[str, Any]:
    """Return the smallest capabilities object that declares all of `needs`.  It is the data of an error."""
    whole: dict[str, Any] = {}
    for need in needs:
        at = whole
        for step in need:
            at = at.setdefault(step, {})
    return whole


# Methods and notifications, with the capability that each one needs.


_Rows = Mapping[Role, Mapping[str, "MethodRule"]]


def _rules(
    client: Mapping[str, Capability], server: Mapping[str, Capability], *, requests: bool, early: Iterable[str] = ()
) -> _Rows:
    """Return the rules for what each side sends: requests, or notifications."""
    return MappingProxyType(
        {
            sender: MappingProxyType(
                {
                    name: MethodRule(name, sender.other if requests else sender, needs, name in early)
                    for name, needs in rows.items()
                }
            )
            for sender, rows in ((CLIENT, client), (SERVER, server))
        }
    )


_FEATURES: dict[str, Capability] = {
    "tools/list": ("tools",),
    "tools/call": ("tools",),
    "prompts/list": ("prompts",),
    "prompts/get": ("prompts",),
    "resources/list": ("resources",),
    "resources/templates/list": ("resources",),
    "resources/read": ("resources",),
    "completion/complete": ("completions",),
}
_LEGACY_CLIENT: dict[str, Capability] = {
    "initialize": (),
    "ping": (),
    **_FEATURES,
    "resources/subscribe": ("resources", "subscribe"),
    "resources/unsubscribe": ("resources", "subscribe"),
    "logging/setLevel": ("logging",),
}
_LEGACY_SERVER: dict[str, Capability] = {
    "ping": (),
    "sampling/createMessage": ("sampling",),
    "roots/list": ("roots",),
}
_ELICITATION: dict[str, Capability] = {"elicitation/create": ("elicitation",)}
_CHANGES: dict[str, Capability] = {
    "notifications/tools/list_changed": ("tools", "listChanged"),
    "notifications/prompts/list_changed": ("prompts", "listChanged"),
    "notifications/resources/list_changed": ("resources", "listChanged"),
    "notifications/resources/updated": ("resources", "subscribe"),
}
_BOTH_WAYS: dict[str, Capability] = {"notifications/cancelled": (), "notifications/progress": ()}
_LOGGING: dict[str, Capability] = {"notifications/message": ("logging",)}

# "The client SHOULD NOT send requests other than pings before the server has responded to the initialize request".
# Before `initialized` the server may send only pings and log messages.  The cancellation and progress of an early
# request are early too.
_EARLY = frozenset({"initialize", "ping", "notifications/initialized", *_BOTH_WAYS, *_LOGGING})


def _legacy_notifications(server_adds: Mapping[str, Capability]) -> _Rows:
    roots = {"notifications/initialized": (), "notifications/roots/list_changed": ("roots", "listChanged")}
    server = {**_BOTH_WAYS, **_LOGGING, **_CHANGES, **server_adds}
    return _rules({**_BOTH_WAYS, **roots}, server, requests=False, early=_EARLY)


def _legacy_requests(client: Mapping[str, Capability], server_adds: Mapping[str, Capability]) -> _Rows:
    return _rules(client, {**_LEGACY_SERVER, **server_adds}, requests=True, early=_EARLY)


_LIST_METHODS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
_URL_MODE = ConditionalNeed("elicitation/create", "mode", ("url",), ("elicitation", "url"))
_SAMPLING_NEEDS = (
    ConditionalNeed("sampling/createMessage", "tools", (), ("sampling", "tools")),
    ConditionalNeed("sampling/createMessage", "toolChoice", (), ("sampling", "tools")),
)
_FORM_MODE = ConditionalNeed("elicitation/create", "requestedSchema", (), ("elicitation", "form"))

_ANY = CapabilityRule()
_FLAG = CapabilityRule(frozenset())
_LISTS = CapabilityRule(frozenset({"listChanged"}))
_SERVER_A = {
    "experimental": _ANY,
    "logging": _FLAG,
    "prompts": _LISTS,
    "resources": CapabilityRule(frozenset({"subscribe", "listChanged"})),
    "tools": _LISTS,
}
_SERVER_B = {**_SERVER_A, "completions": _FLAG}
_CLIENT_A = {"experimental": _ANY, "roots": _LISTS, "sampling": _FLAG}
# In this revision elicitation has no modes and means a form.  A client that offers only URLs must not declare it.
_CLIENT_C = {**_CLIENT_A, "elicitation": CapabilityRule(frozenset(), only_with=("elicitation", "form"))}
_CLIENT_D = {
    **_CLIENT_A,
    "elicitation": CapabilityRule(frozenset({"form", "url"})),
    "sampling": CapabilityRule(frozenset({"context", "tools"})),
}

_HTTP_B = HttpRules(
    version_header=False,
    standard_headers=False,
    disconnect_cancels=False,
    statuses=MappingProxyType({}),
    sse_fallback=frozenset(range(400, 500)),
    priming=False,
)
_HTTP_C = attrs.evolve(_HTTP_B, version_header=True)
_HTTP_D = attrs.evolve(_HTTP_C, sse_fallback=frozenset({400, 404, 405}), priming=True)
_HTTP_E = HttpRules(
    version_header=True,
    standard_headers=True,
    disconnect_cancels=True,
    statuses=MappingProxyType(
        {
            errors.PARSE_ERROR: 400,
            errors.INVALID_REQUEST: 400,
            errors.METHOD_NOT_FOUND: 404,
            errors.HEADER_MISMATCH: 400,
            errors.MISSING_CLIENT_CAPABILITY: 400,
            errors.UNSUPPORTED_VERSION: 400,
        }
    ),
    sse_fallback=_HTTP_D.sse_fallback,
    priming=False,
)

_A = Revision(
    name="2024-11-05",
    handshake=True,
    # Completion exists in this revision, but its capability does not.
    requests=_legacy_requests({**_LEGACY_CLIENT, "completion/complete": ()}, {}),
    notifications=_legacy_notifications({}),
    capabilities=MappingProxyType({CLIENT: _CLIENT_A, SERVER: _SERVER_A}),
    info_fields=frozenset({"name", "version"}),
    input_requests=MappingProxyType({}),
    input_required=frozenset(),
    batches=False,
    unreadable_id_is_null=True,
    result_type=False,
    on_subscriptions=frozenset(),
    cacheable=frozenset(),
    required_meta=MappingProxyType({}),
    reserved_labels=None,
    teardown=frozenset(),
    uncancellable=frozenset({"initialize"}),
    progress_message=False,
    resource_not_found=errors.RESOURCE_NOT_FOUND,
    invalid_arguments_are_results=False,
    forbidden_codes=frozenset({errors.URL_ELICITATION_REQUIRED}),
    conditional_needs=(),
    http=None,
)
_B = attrs.evolve(
    _A,
    name="2025-03-26",
    capabilities=MappingProxyType({CLIENT: _CLIENT_A, SERVER: _SERVER_B}),
    requests=_legacy_requests(_LEGACY_CLIENT, {}),
    batches=True,
    progress_message=True,
    http=_HTTP_B,
)
_C = attrs.evolve(
    _B,
    name="2025-06-18",
    capabilities=MappingProxyType({CLIENT: _CLIENT_C, SERVER: _SERVER_B}),
    info_fields=frozenset({"name", "version", "title"}),
    requests=_legacy_requests(_LEGACY_CLIENT, _ELICITATION),
    batches=False,
    reserved_labels=slice(None, -1),  # "any valid label" follows: mcp.dev/, api.mcp.dev/
    http=_HTTP_C,
)
_D = attrs.evolve(
    _C,
    name="2025-11-25",
    capabilities=MappingProxyType({CLIENT: _CLIENT_D, SERVER: _SERVER_B}),
    info_fields=frozenset({"name", "version", "title", "icons", "description", "websiteUrl"}),
    notifications=_legacy_notifications({"notifications/elicitation/complete": ()}),
    unreadable_id_is_null=False,
    reserved_labels=slice(1, 2),  # dev.mcp/, com.mcp.tools/
    invalid_arguments_are_results=True,
    forbidden_codes=frozenset(),
    conditional_needs=(_URL_MODE, _FORM_MODE, *_SAMPLING_NEEDS),
    http=_HTTP_D,
)
_E = attrs.evolve(
    _D,
    name="2026-07-28",
    handshake=False,
    capabilities=MappingProxyType(
        {CLIENT: {**_CLIENT_D, "roots": _FLAG, "extensions": _ANY}, SERVER: {**_SERVER_B, "extensions": _ANY}}
    ),
    requests=_rules({"server/discover": (), **_FEATURES, "subscriptions/listen": ()}, {}, requests=True),
    notifications=_rules(
        {"notifications/cancelled": ()},
        {**_BOTH_WAYS, **_LOGGING, **_CHANGES, "notifications/subscriptions/acknowledged": ()},
        requests=False,
    ),
    input_requests=_rules(
        {}, {"sampling/createMessage": ("sampling",), "roots/list": ("roots",), **_ELICITATION}, requests=True
    )[SERVER],
    input_required=frozenset({"tools/call", "prompts/get", "resources/read"}),
    result_type=True,
    on_subscriptions=frozenset({*_CHANGES, "notifications/subscriptions/acknowledged"}),
    cacheable=frozenset({"server/discover", *_LIST_METHODS, "resources/read"}),
    required_meta=MappingProxyType({META_VERSION: str, META_CLIENT_CAPABILITIES: dict}),
    teardown=frozenset({"subscriptions/listen"}),
    # The probe may reach a legacy server, which must get no other message before initialize.  So it is never cancelled.
    uncancellable=frozenset({"server/discover"}),
    resource_not_found=errors.INVALID_PARAMS,
    # core-20..24: codes of the old server range must no longer be sent; of the reserved range only these three may.
    forbidden_codes=frozenset(range(-32099, -31999)) - errors.MODERN_ERRORS,
    http=_HTTP_E,
)

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "initialize": "server/discover, or no opening request at all",
        "ping": "any other request",
        "logging/setLevel": f"_meta {META_LOG_LEVEL} on each request",
        "resources/subscribe": "subscriptions/listen",
        "resources/unsubscribe": "the end of subscriptions/listen",
        "subscriptions/listen": "resources/subscribe and the list_changed notifications",
        "server/discover": "initialize",
    }
)
"""The alternative to each method that some revision does not have, for both sides."""

REVISIONS: Mapping[str, Revision] = MappingProxyType({each.name: each for each in (_A, _B, _C, _D, _E)})
"""Every revision by name, oldest first."""

_NAMES = frozenset(
    name
    for each in REVISIONS.values()
    for rows in (*each.requests.values(), *each.notifications.values(), each.input_requests)
    for name in rows
)


def _word(method: str) -> str:
    return method.removeprefix("notifications/").partition("/")[0]


_WORDS = frozenset(map(_word, _NAMES))
_OF_EXTENSIONS = frozenset({"resources/directory/read"})  # official extensions use some of these words, too


def in_protocol(method: str) -> bool:
    """Whether some revision defines a request or a notification of this name, for either side."""
    return method in _NAMES


def is_like_protocol(method: str) -> bool:
    """Whether a name begins with a word that the protocol uses, as `tools/cal` does: it is probably misspelt."""
    return _word(method) in _WORDS and method not in _OF_EXTENSIONS


LEGACY = tuple(each for each in REVISIONS.values() if each.handshake)
MODERN = tuple(each for each in REVISIONS.values() if not each.handshake)
LATEST_LEGACY = LEGACY[-1]
LATEST = MODERN[-1]


LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""From the least to the most severe, as in RFC 5424."""


@mutable_record  # one for each request over HTTP
class Terms:
    """The terms of one message.

    `capabilities` and `identity` are those of the peer, as they came from the wire.  The identity is for display and
    logs only: no decision may depend on it (meta-14).  `principal` and `headers` belong to the current request, never
    to the request that opened the session.  The principal is a stable name, or a `Principal` if the server is
    protected.
    """

    revision: Revision
    capabilities: Mapping[str, Any] = NOTHING
    identity: Mapping[str, Any] | None = None
    log_level: str | None = None
    principal: Any = None
    headers: Mapping[str, str] = NOTHING

    def declares(self, *capability: str) -> bool:
        """Return whether the peer declared this capability."""
        return declares(self.capabilities, Capability(capability))

    def extension(self, id: str) -> Mapping[str, Any] | None:
        """Return the settings with which the peer declares an extension; None if it does not declare it.

        Older revisions have no `extensions`: their peers declare it as `experimental`, or as `extensions` all the same.
        """
        for name in ("extensions", "experimental"):
            declared = self.capabilities.get(name)
            settings = declared.get(id) if isinstance(declared, Mapping) else None
            if settings is not None and settings is not False:
                return settings if isinstance(settings, Mapping) else NOTHING
        return None

    def wants_log(self, level: str) -> bool:
        """Return whether to send log messages of this level to the peer.

        In the modern era only a client that asks for log messages gets them.  In the legacy era the server may choose
        until the client sets a level; we send all levels.  Raises `UsageError` if the level does not exist.
        """
        if level not in LOG_LEVELS:
            raise UsageError(f"level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
        if self.log_level is None:
            return self.revision.handshake
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.log_level)


def stable_name(principal: object) -> str | None:
    """Return the name under which data of a principal is stored: a string, or None if there is no principal.

    Only a string is equal in another process, and after it was stored and loaded.  With objects that are not reliably
    equal, one caller could get the data of another, or never find its own.  Raises `UsageError` for an object.
    """
    if principal is None or isinstance(principal, str):
        return principal
    raise UsageError(
        f"principal must be a str or None, got {type(principal).__name__}: pass a stable, unique name, "
        "for example the user id"
    )


# The keys of `_meta` and of `extensions`.  The checks are for data that *our* program sends.  Data of the peer is never
# checked here: any value at any key is accepted and passed on, because "implementations MUST NOT make assumptions about
# values at these keys".
#
# A key is an optional prefix, dotted labels and a slash, and then a name.  A custom prefix should be a reversed domain
# (``com.example/``); no check can tell whether it is.  The protocol reserves some prefixes.  They have changed once,
# and are in `Revision.reserved_labels`.  The core writes the reserved keys and the progress token itself, after this
# check.

# A label must "start with a letter and end with a letter or digit".
_LABEL = "[A-Za-z](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
# A name, "unless empty", begins and ends with a letter or digit.
_NAME = "(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)?"

_RESERVED = frozenset({"modelcontextprotocol", "mcp"})


def meta_of(name: str, holder: object) -> JsonObject:
    """Return the `_meta` of params or of a result that we are about to send.

    `name` is the name of `holder` for the error message.  Raises UsageError if `holder` or its `_meta` is not an
    object.
    """
    meta = holder.get("_meta", {}) if isinstance(holder, dict) else None
    if not isinstance(meta, dict):
        raise UsageError(f"{name} must be an object, and the _meta in it, if there is one, must be an object too")
    return meta


def check_meta(meta: Mapping[str, Json], revision: Revision) -> None:
    """Raise UsageError if the program must not send one of these keys in `_meta`."""
    for key in meta:
        if key == "progressToken":
            raise UsageError("progressToken in _meta must not be set by hand; request progress instead")
        if revision.reserved_labels is not None and _RESERVED & set(check_key(key)[revision.reserved_labels]):
            raise UsageError(f"{key!r} in _meta has a prefix reserved by {revision}; use your own: com.example/name")


def check_extension(identifier: str) -> None:
    """Raise UsageError if this is not the name of an extension: a key with a prefix (ver-05)."""
    if not check_key(identifier):
        raise UsageError(f"the extension {identifier!r} needs a prefix, for example com.example/{identifier}")


def check_key(key: str) -> list[str]:
    """Return the labels of the key's prefix.  Raises UsageError if the key is malformed."""
    prefix, slash, name = key.rpartition("/")
    labels = prefix.split(".") if slash else []
    if not all(re.fullmatch(_LABEL, label) for label in labels):
        raise UsageError(
            f"the prefix of {key!r} must be labels of letters, digits and hyphens, for example com.example/"
        )
    if not re.fullmatch(_NAME, name):
        raise UsageError(f"{key!r} must end with letters, digits, hyphens, underscores and dots, or with the slash")
    return labels
