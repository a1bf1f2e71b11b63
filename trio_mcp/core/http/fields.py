"""HTTP header fields: read their values, and mirror parts of a message into them.

Both roles need these functions, so they are separate from the rules of either role (`server_rules`, `client_rules`):

- `Headers`, a view of the received fields that ignores case (http-100) and joins repeated fields;
- the meaning of Accept, Content-Type, Origin and Host;
- the *mirrored* headers, which repeat parts of the body for intermediaries.  Mcp-Method and Mcp-Name repeat the method
  and the name.  Mcp-Param-* repeat the arguments of a tool that its schema marks with ``x-mcp-header``.  One table of
  rules per tool, made once from its schema, serves the client (values to send) and the server (values to compare).

What surprises: a mirrored header is compared with the value in the body, not with the schema.  If an argument has the
wrong type, validation against the schema refuses it with a better message; and no header matches an object.
"""

from __future__ import annotations

import functools
import re
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar, overload

import attrs

from trio_mcp.core.errors import UsageError, redacted, shown
from trio_mcp.core.messages import Error, Json, Notification, Request, encode, prepare, record

__all__ = [
    "CREDENTIALS", "DRAFT_HEADER_MISMATCH", "EVENT_STREAM", "JSON", "LAST_EVENT_ID", "LOOPBACK_HOSTS", "METHOD", "NAME",
    "NAMED_BY", "NO_NAMES", "PARAM_PREFIX", "PROTOCOL_VERSION", "SESSION_ID", "TOKEN", "AllowList", "Fields", "Headers",
    "HttpRequest", "Mirror", "Mirrors", "RawFields", "Reply", "cors_headers", "decode_value", "empty", "encode_value",
    "find_mirrors", "is_json", "is_session_id", "listed", "media_type", "mirror_fault", "mirrored", "preflight_headers",
    "quality", "refusal", "reply_headers", "split_target", "standard_fault", "standard_headers", "without_credentials",
]  # fmt: skip

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

SESSION_ID = "Mcp-Session-Id"  # 2025-11-25 writes MCP-Session-Id; header names ignore case
PROTOCOL_VERSION = "MCP-Protocol-Version"
METHOD = "Mcp-Method"
NAME = "Mcp-Name"
PARAM_PREFIX = "Mcp-Param-"
LAST_EVENT_ID = "Last-Event-ID"
_METHOD, _NAME = METHOD.lower(), NAME.lower()

# The mid-2026 draft's code for the later -32020 (draft-01).  Session-based revisions define no other code: there the
# server compares the standard headers of clients that follow the draft, and the client understands both codes.
DRAFT_HEADER_MISMATCH = -32001

T = TypeVar("T")

Fields: TypeAlias = tuple[tuple[str, str], ...]
"""Header fields to send, in order."""

RawFields: TypeAlias = Iterable[tuple[str | bytes, str | bytes]] | Mapping[str, str]
"""Received header fields: pairs, or a mapping."""


class Headers(Mapping[str, str]):
    """Received header fields by name, in any case.  Made from bytes (h11, ASGI) or strings (WSGI).

    A repeated field reads as one comma-separated list, as HTTP defines it.  So two different session ids become one
    unknown id, and two hosts one host that is not allowed.  Immutable.  The repr has no values, because some are
    secrets.
    """

    __slots__ = ("by_name",)

    by_name: Mapping[str, str]
    """The values by their names in lower case, for code that reads many fields of each request."""

    def __init__(self, fields: RawFields = ()) -> None:
        values: dict[str, str] = {}
        repeated: dict[str, list[str]] = {}
        pairs: Any = fields.items() if isinstance(fields, Mapping) else fields
        for raw_name, raw_value in pairs:
            name = _text(raw_name).lower()
            value = _text(raw_value).strip(" \t")
            if values.setdefault(name, value) != value:
                repeated.setdefault(name, [values[name]]).append(value)
        for name, several in repeated.items():
            values[name] = ", ".join(several)
        object.__setattr__(self, "by_name", MappingProxyType(values))

    @classmethod
    def of(cls, values: dict[str, str]) -> Headers:
        """Make headers from a parsed mapping: names in lower case, values without surrounding space.

        The mapping is not copied, so do not change it afterwards.
        """
        headers = cls.__new__(cls)
        object.__setattr__(headers, "by_name", MappingProxyType(values))
        return headers

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("headers cannot be changed: requests with equal heads share them")

    def __getitem__(self, name: str) -> str:
        return self.by_name[name.lower()]

    @overload
    def get(self, name: str, default: None = None, /) -> str | None: ...
    @overload
    def get(self, name: str, default: T, /) -> str | T: ...
    def get(self, name: str, default: object = None, /) -> object:
        # Same result as `Mapping.get`, without raising and catching KeyError for the many absent fields.
        return self.by_name.get(name.lower(), default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def __repr__(self) -> str:
        return f"<Headers {', '.join(self.by_name)}>"

    def without(self, name: str) -> Headers:
        """Return a copy without this field."""
        name = name.lower()
        return Headers.of({each: value for each, value in self.by_name.items() if each != name})


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode("latin-1")


TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
"""The pattern of a token (RFC 9110, 5.6.2): methods and field names are tokens."""


def listed(text: str) -> list[str]:
    """Return the elements of a comma-separated list."""
    return [each for part in text.split(",") if (each := part.strip())]


def is_session_id(text: str) -> bool:
    """http-54: "only visible ASCII characters (ranging from 0x21 to 0x7E)"."""
    return text != "" and all("!" <= each <= "~" for each in text)


# Accept and Content-Type.


def media_type(value: str) -> tuple[str, dict[str, str]]:
    """Parse a media type or range.  Return the type and its parameters, all in lower case."""
    essence, *rest = value.lower().split(";")
    pairs = (each.partition("=") for each in rest)
    return essence.strip(), {name.strip(): text.strip().strip('"') for name, _, text in pairs}


def is_json(content_type: str | None) -> bool:
    """Return whether a Content-Type is application/json, with UTF-8 if it names a charset."""
    if content_type == JSON:
        return True
    essence, parameters = media_type(content_type or "")
    return essence == JSON and parameters.get("charset", "utf-8") in ("utf-8", "utf8")


_RANGES = 64  # of one Accept that are looked at; browsers send a handful


# A client sends the same header values with each request, and few clients have values of their own.  So the results for
# some values of usual length are cached.  A client that sends unusual values on purpose can take little memory, and can
# cost other clients only the time that the cache saves.
_REMEMBERED, _USUAL = 256, 200


def quality(accept: str | None, wanted: str) -> float:
    """Return how acceptable a media type is, from 0 (refused) to 1.  The most specific range wins (RFC 9110, 12.5.1).

    No Accept, or an empty one, accepts every type.  Parameters of a range are ignored: our types have no variants.
    """
    if not accept:
        return 1.0
    return _quality(accept, wanted) if len(accept) > _USUAL else _usual_quality(accept, wanted)


def _quality(accept: str, wanted: str) -> float:
    major = wanted.partition("/")[0]
    ranges = {wanted: 3, f"{major}/*": 2, "*/*": 1}
    best, welcome = 0, 0.0
    for each in accept.split(",", _RANGES)[:_RANGES]:
        essence, parameters = media_type(each)
        specific = ranges.get(essence, 0)
        if specific > best:
            weight = parameters.get("q", "1")
            # A malformed weight is no reason to refuse the request.
            best, welcome = specific, float(weight) if re.fullmatch(r"0(\.\d{0,3})?|1(\.0{0,3})?", weight) else 1.0
    return welcome


_usual_quality = functools.lru_cache(maxsize=_REMEMBERED)(_quality)


# Origin and Host.

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""The names of this machine, as a Host header has them."""

_AUTHORITY = r"(?:([a-z][a-z0-9+.\-]*)://)?(\[[0-9a-f:.]+\]|[a-z0-9._\-]+)(?::(\d{0,5}))?"  # a port may be empty
_DEFAULT_PORTS: Mapping[str, int] = MappingProxyType({"http": 80, "https": 443})


class _Site(NamedTuple):
    """An origin or a host.  `port` is None for any port in a pattern, and for no port in a Host header."""

    scheme: str
    host: str
    port: int | None


def _site(text: str) -> _Site | None:
    match = re.fullmatch(_AUTHORITY, text.lower())
    if match is None:
        return None
    scheme, host, port = match[1] or "", match[2], match[3]
    return _Site(scheme, host, int(port) if port else _DEFAULT_PORTS.get(scheme))


def split_target(target: str) -> tuple[str | None, str]:
    """Return the host and the path of a request target.  Only an absolute target has a host (RFC 9112, 3.2.2)."""
    target = target.partition("?")[0]
    scheme, mark, rest = target.partition("://")
    if not mark or "/" in scheme:
        return None, target
    host, slash, path = rest.partition("/")
    return host, slash + path


class AllowList:
    """The allowed origins, or the allowed hosts, of a server.

    An origin is written as browsers send it (``https://app.example.com``, or ``null``), with ``:*`` for any port.  A
    host is a name or address without a scheme.  Without a port it allows all ports, because a port does not protect
    against DNS rebinding.  ``*`` alone allows everything.
    """

    def __init__(self, setting: str, patterns: Sequence[str], *, schemes: bool) -> None:
        if isinstance(patterns, str):
            raise UsageError(f"{setting} must be a list of strings, not the string {patterns!r}")
        self._literal = {each for each in patterns if each == "*" or (each == "null" and schemes)}
        self._sites = {_pattern(setting, each, schemes) for each in patterns if each not in self._literal}
        self._known: dict[str, bool] = {}

    @property
    def everything(self) -> bool:
        """True if ``*`` is in the list."""
        return "*" in self._literal

    def allows(self, value: str) -> bool:
        known = self._known.get(value)
        if known is None:
            known = self._find(value)
            if len(value) <= _USUAL and len(self._known) < _REMEMBERED:
                self._known[value] = known
        return known

    def _find(self, value: str) -> bool:
        if "*" in self._literal or value in self._literal:
            return True
        site = _site(value)
        return site is not None and (site in self._sites or _Site(site.scheme, site.host, None) in self._sites)


def _pattern(setting: str, pattern: str, scheme: bool) -> _Site:
    anywhere = pattern.endswith(":*")
    site = _site(pattern.removesuffix(":*"))
    if site is None or bool(site.scheme) != scheme:
        wanted = "'https://app.example.com' or 'http://localhost:*'" if scheme else "'example.com' or '[::1]:8080'"
        raise UsageError(f"{setting}: {pattern!r} is not valid; write it like {wanted}, or '*'")
    return _Site(site.scheme, site.host, None if anywhere else site.port)


# Requests and replies.


def _headers(fields: RawFields) -> Headers:
    return fields if isinstance(fields, Headers) else Headers(fields)


@attrs.define(eq=False)  # one for each request
class HttpRequest:
    """One HTTP request.  `target` is the path and query as received (or the absolute URI, if sent to a proxy)."""

    method: str
    target: str = attrs.field(repr=False)  # contains the session id of an HTTP+SSE client
    headers: Headers = attrs.field(converter=_headers)  # from pairs or a mapping, of bytes or strings
    body: bytes = attrs.field(default=b"", repr=False)
    prefix: str = ""
    """The path under which the endpoint is mounted.  The path in `target` is below it."""


@record
class Reply:
    """Send this reply; nothing else follows.  `error` is the JSON-RPC error in the body, or None."""

    status: int
    headers: Fields
    body: bytes = b""
    error: Error | None = None


def refusal(status: int, error: Error, cors: Fields = (), extra: Fields = ()) -> Reply:
    """Make a refusal with a JSON-RPC body.  Drivers use it for their own refusals too (429, 503, forgotten events)."""
    body = encode(prepare(error, null_id=False))
    length = ("Content-Length", str(len(body)))
    return Reply(status, (*reply_headers(cors, stream=False), length, *extra), body, error)


def empty(status: int, fields: Fields) -> Reply:
    """Make a reply without a body."""
    length: Fields = () if status == 204 else (("Content-Length", "0"),)
    return Reply(status, (*length, *fields))


_MCP_NAMES = (SESSION_ID, PROTOCOL_VERSION, METHOD, NAME, LAST_EVENT_ID)
# Headers that a page of an allowed origin may send and read: those of every revision, and those of authorization.
_CORS_NAMES = (*_MCP_NAMES, "Accept", "Authorization", "Content-Type", "DPoP", "DPoP-Nonce", "WWW-Authenticate")
_PREFLIGHT_SECONDS = "7200"  # the longest time that any browser respects


def cors_headers(origin: str) -> Fields:
    """Return the CORS headers of every response, refusals included, to a page of an allowed origin."""
    exposed = ("Access-Control-Expose-Headers", ", ".join((*_CORS_NAMES, "Retry-After")))
    return (("Access-Control-Allow-Origin", origin), ("Vary", "Origin"), exposed)


def preflight_headers(asked: str, methods: str) -> Fields:
    """Return the headers of the response to a preflight.

    All requested names are allowed, because the names of Mcp-Param-* depend on the tools.
    """
    allowed = dict.fromkeys([*_CORS_NAMES, *(each for each in listed(asked) if re.fullmatch(TOKEN, each))])
    return (
        ("Access-Control-Allow-Methods", methods),
        ("Access-Control-Allow-Headers", ", ".join(allowed)),
        ("Access-Control-Max-Age", _PREFLIGHT_SECONDS),
    )


# "X-Accel-Buffering: no ... instructs reverse proxies to disable response buffering" (http-107); no-transform keeps
# others from compressing, which buffers as well.
_STREAM_HEADERS: Fields = (
    ("Content-Type", EVENT_STREAM),
    ("Cache-Control", "no-cache, no-transform"),
    ("X-Accel-Buffering", "no"),
)
_JSON_HEADERS: Fields = (("Content-Type", JSON), ("Cache-Control", "no-store"))


def reply_headers(cors: Fields, *, stream: bool, session: str | None = None) -> Fields:
    """Return the headers of a response that carries messages.  `session`: only for the answer to initialize."""
    kind = _STREAM_HEADERS if stream else _JSON_HEADERS
    return (*kind, *cors) if session is None else (*kind, (SESSION_ID, session), *cors)


CREDENTIALS = re.compile("authorization|cookie|key|password|secret|session|signature|token", re.IGNORECASE)
"""Finds the names of headers that may carry credentials, whatever method the author of a server has chosen."""


def without_credentials(body: bytes, sent: Fields) -> bytes:
    """auth-22: remove the credentials in `sent` from an error body, because a server may repeat them there."""
    secrets = [value.rpartition(" ")[2] for name, value in sent if name.lower() == "authorization"]
    return redacted(body.decode("latin-1"), secrets).encode("latin-1") if secrets else body


# Encode other values as header values.

_SENTINEL, _SENTINEL_END = "=?base64?", "?="
_plain = re.compile(r"(?! )[ -~]*(?<! )").fullmatch
_FIELD_VALUE = re.compile(r"[\t -~]*")


def encode_value(text: str) -> str:
    """Encode text as a header value: unchanged if that is safe, else as marked Base64.

    "Clients MUST also Base64-encode any plain-ASCII value that matches the sentinel pattern" (http-92).
    """
    looks_encoded = text.startswith(_SENTINEL) and text.endswith(_SENTINEL_END)
    if _plain(text) and not looks_encoded:
        return text
    try:
        encoded = b2a_base64(text.encode(), newline=False).decode()
    except UnicodeEncodeError:
        raise UsageError("a header cannot contain half of a surrogate pair") from None
    return f"{_SENTINEL}{encoded}{_SENTINEL_END}"


def decode_value(value: str) -> str | None:
    """Decode a header value.  Returns None if it is malformed (http-91, http-95)."""
    if not _FIELD_VALUE.fullmatch(value):
        return None
    inner = value.removeprefix(_SENTINEL)
    # Both marks must be present and must not overlap; they are case-sensitive.
    if inner == value or not inner.endswith(_SENTINEL_END):
        return value
    try:
        return a2b_base64(inner.removesuffix(_SENTINEL_END), strict_mode=True).decode()
    except (Base64Error, UnicodeDecodeError):
        return None


# The standard headers: Mcp-Method and Mcp-Name.

NAMED_BY: Mapping[str, str] = MappingProxyType(
    {
        "tools/call": "name",
        "prompts/get": "name",
        "resources/read": "uri",
        "tasks/get": "taskId",
        "tasks/update": "taskId",
        "tasks/cancel": "taskId",
    }
)
"""The parameter that Mcp-Name repeats, for the methods that have one (http-75, and the tasks extension)."""

NO_NAMES: Mapping[str, str] = MappingProxyType({})
"""No methods of extensions beside `NAMED_BY`."""
# Elsewhere only a wrong name is refused.  xtask-40 obliges the client, and that of FastMCP 4.1 leaves the header out.
_NAME_REQUIRED = frozenset({"tools/call", "prompts/get", "resources/read"})  # http-75


def standard_headers(message: Request | Notification, more: Mapping[str, str] = NO_NAMES) -> Fields:
    """Return Mcp-Method, and Mcp-Name if it applies.  `more` has the methods of extensions, as in `NAMED_BY`.

    Notifications have them too: the final text does not say, and the draft required it.
    """
    fields = [(METHOD, message.method)]
    source = NAMED_BY.get(message.method) or more.get(message.method)
    name = None if source is None else message.params.get(source)
    if isinstance(name, str):
        fields.append((NAME, encode_value(name)))
    return tuple(fields)


def standard_fault(
    headers: Headers, message: Request | Notification, *, required: bool, more: Mapping[str, str] = NO_NAMES
) -> str | None:
    """Return the fault in the standard headers of this message, or None.  Unless `required`, they may be missing.

    `more` has the methods of extensions, as in `NAMED_BY`.  Their names may be missing.
    """
    method = headers.by_name.get(_METHOD)
    if method is None and required:
        return f"the {METHOD} header is missing; it repeats the method, {shown(message.method)}"
    if method is not None and method != message.method:
        return f"the {METHOD} header says {shown(method)}, the body's method is {shown(message.method)}"
    source = NAMED_BY.get(message.method) or more.get(message.method)
    if source is None:
        return None
    sent, name = headers.by_name.get(_NAME), message.params.get(source)
    if sent is None:
        # If the body lacks the parameter too, the code that needs it refuses the request.
        missing = required and message.method in _NAME_REQUIRED and isinstance(name, str)
        return f"the {NAME} header is missing; it repeats params.{source}, {shown(name)}" if missing else None
    decoded = decode_value(sent)
    if decoded is None:
        return f"the {NAME} header is malformed: {shown(sent)} has bad characters or bad Base64"
    if decoded != name:
        return f"the {NAME} header says {shown(decoded)}, params.{source} is {shown(name)}"
    return None


# Arguments that a tool mirrors.

_ANNOTATION = "x-mcp-header"
_MIRRORED_TYPES = ("string", "integer", "boolean")
_SAFE_INTEGER = 2**53 - 1
# Keywords with data as values, where "x-mcp-header" is an ordinary key; and keywords with schemas by name.
_DATA_KEYWORDS = frozenset({"const", "default", "enum", "examples"})
_NAMING_KEYWORDS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"})


@record
class Mirror:
    """One rule: the argument at this path of property names is repeated in this header."""

    header: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return f"the argument {shown('.'.join(self.path))}"

    def value(self, arguments: Mapping[str, Any]) -> Json:
        """Return the argument, or None if it is absent."""
        part: Any = arguments
        for step in self.path:
            if not isinstance(part, Mapping):
                return None
            part = part.get(step)
        return part


@record
class Mirrors:
    """The mirroring rules of one tool's schema.

    `faults` is empty for a valid schema.  A server refuses to register a tool with faults.  A client on Streamable HTTP
    leaves the tool out of its list, and logs the reason (http-85, http-86).
    """

    rules: tuple[Mirror, ...] = ()
    faults: tuple[str, ...] = ()


# A malicious server may send a schema with thousands of faults, and a developer mends a few at a time.
_FAULTS = 20


@attrs.frozen(eq=False, repr=False)
class _SchemaNode:
    """One subschema, its parent, and the steps from there.

    A node has its parent instead of its path, because the peer decides how deep a schema is and how long its names are.
    """

    schema: Mapping[str, Any]
    parent: _SchemaNode | None = None
    steps: tuple[str, ...] = ()
    chained: bool = True  # reached from the root through `properties` only

    def branch(self) -> list[_SchemaNode]:
        """Return the nodes from below the root down to this one."""
        branch: list[_SchemaNode] = []
        node = self
        while node.parent is not None:
            branch.append(node)
            node = node.parent
        return branch[::-1]

    def __str__(self) -> str:
        steps = [step if len(step) <= 40 else f"{step[:40]}..." for node in self.branch() for step in node.steps]
        # The end of a long path helps more than its beginning.
        return ("/" if len(steps) <= 20 else ".../") + "/".join(steps[-20:]) if steps else "the root"


def find_mirrors(input_schema: Mapping[str, Any]) -> Mirrors:
    """Find the mirroring rules in a tool's inputSchema.  Called once, when the tool is registered or listed."""
    rules: list[Mirror] = []
    faults: list[str] = []
    taken: set[str] = set()
    waiting = [_SchemaNode(input_schema)]
    while waiting:
        node = waiting.pop()
        if _ANNOTATION in node.schema:
            name = node.schema[_ANNOTATION]
            fault = _annotation_fault(name, node, taken)
            if fault is None:
                taken.add(name.lower())
                rules.append(Mirror(PARAM_PREFIX + name, tuple(each.steps[-1] for each in node.branch())))
            elif len(faults) < _FAULTS:
                faults.append(f"{_ANNOTATION} at {node}: {fault}")
            else:
                faults.append("and more")
                break
        waiting += reversed(list(_subschemas(node)))
    return Mirrors(tuple(rules), tuple(faults))


def _annotation_fault(name: Json, node: _SchemaNode, taken: set[str]) -> str | None:
    if not isinstance(name, str) or not re.fullmatch(TOKEN, name):
        return f"{shown(name)} is not an HTTP token"  # http-79, http-80
    if not node.chained or node.parent is None:
        return "only a property reached through `properties` alone may be mirrored"  # http-84
    kind = node.schema.get("type")
    if kind not in _MIRRORED_TYPES:
        return f"a property of type {shown(kind)} cannot be mirrored, only {', '.join(_MIRRORED_TYPES)}"  # http-82
    if name.lower() in taken:
        return f"{shown(name)} is used twice; header names ignore case"  # http-81
    return None


def _subschemas(node: _SchemaNode) -> Iterator[_SchemaNode]:
    """Yield all subschemas directly below this one.  The value of an unknown keyword counts as a schema."""
    for keyword, value in node.schema.items():
        if keyword in _DATA_KEYWORDS:
            continue
        chained = node.chained and keyword == "properties"
        if isinstance(value, Mapping) and keyword != "properties" and keyword not in _NAMING_KEYWORDS:
            yield _SchemaNode(value, node, (keyword,), chained)
        else:
            for name, schema in _members(value):
                if isinstance(schema, Mapping):
                    yield _SchemaNode(schema, node, (keyword, name), chained)


def _members(value: Json) -> Iterable[tuple[str, Json]]:
    if isinstance(value, Mapping):
        return value.items()
    return ((str(index), each) for index, each in enumerate(value)) if isinstance(value, list | tuple) else ()


def mirrored(rules: Sequence[Mirror], arguments: Mapping[str, Any]) -> Fields:
    """Return the Mcp-Param-* headers of a call.  Arguments that are null or absent have no header (http-97)."""
    fields = []
    for rule in rules:
        value = rule.value(arguments)
        if value is None:
            continue
        text = _as_text(value)
        if text is None:
            raise UsageError(
                f"{rule} goes into the header {rule.header}, so it must be a string, "
                f"true or false, or an integer between -(2**53-1) and 2**53-1; got {type(value).__name__}"
            )
        fields.append((rule.header, encode_value(text)))
    return tuple(fields)


def _as_text(value: Json) -> str | None:
    """Format a primitive value for a header (http-88).  None for other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    number = _whole(value)
    return None if number is None else str(number)


def _whole(value: Json) -> int | None:
    """Return an integer, also for 42.0, which JSON Schema counts as one.  None beyond the safe range (http-83)."""
    if not isinstance(value, int | float) or not abs(value) <= _SAFE_INTEGER or value != int(value):
        return None
    return int(value)


def mirror_fault(
    rules: Sequence[Mirror], headers: Headers, arguments: Mapping[str, Any], *, required: bool = True
) -> str | None:
    """Return the fault in the Mcp-Param-* headers of a call, or None.  Headers without a rule are ignored.

    The messages name the header, not the value: a mirrored argument may be a secret.
    """
    for rule in rules:
        sent, value = headers.get(rule.header), rule.value(arguments)
        if sent is None:
            if value is not None and required:  # http-98, http-99
                return f"the {rule.header} header is missing; it repeats {rule}"
            continue
        decoded = decode_value(sent)
        if decoded is None:
            return f"the {rule.header} header is malformed: it has bad characters or bad Base64"
        if not _same(decoded, value):
            return f"the {rule.header} header does not match {rule}"
    return None


_DECIMAL = r"(-?[0-9]{1,16})(?:\.0*)?"  # not \d: a decoded value may have digits of other scripts


def _same(text: str, value: Json) -> bool:
    """http-96, and for integers http-101: "compare the header value and the body value numerically"."""
    number = None if isinstance(value, bool) else _whole(value)
    if number is None:
        return text == _as_text(value)
    match = re.fullmatch(_DECIMAL, text)
    return match is not None and int(match[1]) == number
