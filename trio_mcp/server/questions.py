"""What a server can ask a client: a form, a visit to a page, its model, its roots.

A question is one object in every revision.  In the legacy ones it is a request of its own, in the modern one an input
request inside `input_required`; `params` is what it carries there, and `read` makes the answer what the handler gets.
Who sends it, and when, is the context's business; whether the client declared what it needs is judged by the tables of
`core.revisions`, except for what only `needs` knows.

A question is checked when it is built, so that a mistake shows in the line that made it, and not only with a client of
some revision.  An answer is a client's and a person's: it is held against what was asked, and `RemoteProtocolError`
names the place that does not fit, never what stood there.

Forms are flat: text, numbers, booleans, and choices of one or several strings.  A class is one field for each member,
any other hint one field of the name "value".  `X | None` and a default mean that a field may be left out; null in an
answer counts as left out, and what was not asked for is not looked at.  An Enum's members are shown by their names in
words ("Dark blue" for `DARK_BLUE`), where these say something else than the values; a Literal is shown as it is.
`format` is a note to the client, as everywhere: ask for a `datetime.date` to get one for certain.
"""

from __future__ import annotations

import enum
import re
import secrets
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload
from urllib.parse import parse_qsl, urlsplit

from trio_mcp.core.elicitation import Accepted, Declined, Dismissed, ElicitationOutcome
from trio_mcp.core.errors import (
    URL_ELICITATION_REQUIRED,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.jsonrpc import Json, JsonObject
from trio_mcp.core.revisions import LATEST, LATEST_LEGACY, Capability, Revision, Role
from trio_mcp.core.terms import NOTHING

# Models, codec, schemas and what reads values are imported where the first question needs them: a server that names
# one of these classes in an annotation starts without them.
if TYPE_CHECKING:
    from trio_mcp.core.models import CreateMessageResult, ModelPreferences, SamplingMessage, Tool, ToolChoice
    from trio_mcp.transport.paths import Roots

__all__ = [
    "Elicit",
    "ElicitUrl",
    "Inquiry",
    "ListRoots",
    "Sample",
    "UrlElicitationRequired",
]

T = TypeVar("T")


class Inquiry(ABC, Generic[T]):
    """A question to the client, whose answer becomes a `T`."""

    __slots__ = ()
    method: ClassVar[str]

    def params(self, revision: Revision) -> JsonObject:
        """What the question carries.  Raises `NotInThisRevision` where it cannot be asked, or not like this."""
        if revision.request(Role.SERVER, self.method) is None and self.method not in revision.input_requests:
            raise NotInThisRevision(self.method, revision.name)
        return self._params_in(revision)

    def needs(self, revision: Revision) -> tuple[Capability, ...]:
        """What the client must have declared, beside what the tables of `revision` say of the method and its params."""
        return ()

    @abstractmethod
    def _params_in(self, revision: Revision) -> JsonObject: ...

    @abstractmethod
    def read(self, answer: JsonObject) -> T:
        """The answer, or `RemoteProtocolError` if it does not fit.  May be called more than once."""


def _knows(revision: Revision, capability: str, member: str) -> bool:
    """Whether clients of `revision` can declare this member of a capability."""
    rule = revision.capabilities[Role.CLIENT].get(capability)
    return rule is not None and member in (rule.keys or ())


# What a user answers.  elic-59: three things, and never a value that could be taken for another.


_WITHOUT_VALUE: Mapping[Json, Declined | Dismissed] = {"decline": Declined(), "cancel": Dismissed()}


def _outcome(answer: JsonObject, value: Callable[[], T]) -> ElicitationOutcome[T]:
    action = answer.get("action")
    if action == "accept":
        return Accepted(value())
    if isinstance(action, str) and action in _WITHOUT_VALUE:  # elic-49: what comes with it counts for nothing
        return _WITHOUT_VALUE[action]
    raise RemoteProtocolError("the answer to elicitation/create: action must be accept, decline or cancel")


def _prompt(message: str) -> str:
    if not isinstance(message, str) or not message.strip():  # elic-13
        raise UsageError("an elicitation needs a message that tells the user what is asked, and why")
    return message


# Secrets pass through the client, and often through its model: elic-01, elic-02 forbid to ask for them by a form, and
# elic-36 to put them into a URL.  Names are all there is to judge by.  The last word says what a thing is: a "password"
# is a secret, a "password policy" and a "secret name" are none.
_SECRET = re.compile(
    r"\b(?:passwords?|passwd|passphrases?|passcodes?|secrets?|credentials?|cvc|cvv"
    r"|(?:api|access|encryption|private|secret|signing) ?keys?"
    r"|(?:api|access|auth|bearer|id|refresh|session) ?tokens?"
    r"|(?:credit|debit) ?cards?|card ?numbers?)$",
    re.IGNORECASE,
)


def names_a_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", name)
    return _SECRET.search(words.strip()) is not None


# Forms


class Elicit(Inquiry[ElicitationOutcome[T]]):
    """Ask the user to fill in a form.

    `form` is a dataclass, attrs class, TypedDict or NamedTuple with flat members, or a hint for one field (`bool`,
    `Literal[...]`), whose value is returned by itself, or a JSON Schema (a mapping, or a `RequestedSchema`), whose
    answer is returned as a dict.  Raises `UsageError` for what no form can ask, and for what none may: secrets,
    which go by `ElicitUrl`, and clickable links.
    """

    __slots__ = ("_form", "_message")
    method = "elicitation/create"

    @overload
    def __init__(self, message: str, form: type[T]) -> None: ...
    @overload
    def __init__(self: Elicit[Any], message: str, form: Any) -> None: ...
    def __init__(self, message: str, form: Any) -> None:
        self._message = _prompt(message)
        self._form = _form(form)
        if _LINK.search(message):
            raise _clickable("message")

    def _params_in(self, revision: Revision) -> JsonObject:
        from trio_mcp.core import codec, forms

        # elic-53, elic-54: what an older revision does not know is left out or said differently by the codec, which
        # refuses what cannot be left out: a choice of several.
        return codec.to_json(forms.ElicitFormParams(self._message, self._form.asked, "form"), revision)

    def read(self, answer: JsonObject) -> ElicitationOutcome[T]:
        return _outcome(answer, lambda: self._form.read(answer.get("content")))


class _QuestionForm:
    """A form as it is asked for, and what makes its answer a value."""

    __slots__ = ("_check", "_fields", "_may_be_none", "_value", "asked")

    def __init__(
        self, schema: Mapping[str, Any], hints: Mapping[str, Any] = NOTHING, value: Callable[[Any], Any] | None = None
    ) -> None:
        """`schema` may come from anywhere; `value` makes a value of an answer that fits, if that is not the value."""
        from trio_mcp.core import codec, forms
        from trio_mcp.core.schema import validation

        properties, required = schema.get("properties"), schema.get("required") or []
        if schema.get("type") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UsageError('a form is a JSON Schema with "type": "object", "properties" and a list of "required"')
        _refuse_keywords(schema.keys() - _OF_THE_ROOT, "its root")
        self._fields = {name: _titled(_field(name, each), hints.get(name)) for name, each in properties.items()}
        self._may_be_none = [name for name, each in properties.items() if name in required and _nullable(each)]
        self._value = value
        asked: JsonObject = {"type": "object", "properties": self._fields}
        if demanded := [name for name in required if name not in self._may_be_none]:
            asked["required"] = demanded
        try:
            self.asked = codec.from_json(forms.RequestedSchema, asked, strict=True)
        except RemoteProtocolError as error:
            raise UsageError(f"{error}; {_FLAT}") from None
        self._check = validation.compile_schema(asked)
        self._judge(demanded)

    def _judge(self, demanded: Sequence[str]) -> None:
        """Refuse what is legal JSON Schema, and yet no good question."""
        for name in demanded:
            if name not in self._fields:
                raise UsageError(f"the form requires {name!r}, which is not among its properties")
        for name, field in self._fields.items():
            if _LINK.search(str(field)):
                raise _clickable(f"field {name!r}")
            entered = field["type"] in ("string", "number", "integer") and not field.keys() & {"enum", "oneOf"}
            if entered and (names_a_secret(name) or names_a_secret(field.get("title", ""))):
                raise UsageError(f"a form must not ask for secrets such as {name!r}; use ElicitUrl")
        defaults = {name: field["default"] for name, field in self._fields.items() if "default" in field}
        for problem in self._check.errors(defaults):
            if problem.keyword != "required":
                raise UsageError(f"the default of {problem.path[1:]!r} {problem.message}")

    def read(self, content: Json) -> Any:
        if content is None:
            content = {}  # nothing was filled in
        if not isinstance(content, dict):
            raise RemoteProtocolError("the answer to elicitation/create: content must be an object")
        given = {name: content[name] for name in self._fields if content.get(name) is not None}
        problems = [f"content{each.path} {each.message}" for each in self._check.errors(given)]  # elic-08, elic-45
        if problems:
            raise RemoteProtocolError(f"the answer does not fit the form: {'; '.join(problems)}")
        if self._value is None:
            return given
        from trio_mcp.core.schema.values import Unreadable

        try:
            return self._value(dict.fromkeys(self._may_be_none) | given)
        except Unreadable as error:  # a date that is none
            raise RemoteProtocolError(f"the answer does not fit the form: content{error.path} {error.why}") from None


def _form(form: Any) -> _QuestionForm:
    from trio_mcp.core import codec, forms
    from trio_mcp.core.schema import schema
    from trio_mcp.core.schema.values import reader_of

    if isinstance(form, forms.RequestedSchema):
        return _QuestionForm(codec.to_json(form, LATEST))
    if isinstance(form, Mapping):
        return _QuestionForm(form)
    described, read = schema.schema_of(form, where="the form"), reader_of(form) or _same
    if "properties" in described:
        return _QuestionForm(described, _hints_of_members(form), read)
    bare = {"type": "object", "properties": {"value": described}, "required": ["value"]}
    return _QuestionForm(bare, {"value": form}, lambda content: read(content["value"]))


def _same(value: Json) -> Any:
    return value


# What a field can say, by what makes it the kind it is.
_COMMON = frozenset({"type", "title", "description", "default"})
_SAYS: Mapping[str, frozenset[str]] = {
    "enum": _COMMON | {"enum", "enumNames"},
    "oneOf": _COMMON | {"oneOf"},
    "string": _COMMON | {"format", "minLength", "maxLength"},
    "number": _COMMON | {"minimum", "maximum"},
    "integer": _COMMON | {"minimum", "maximum"},
    "boolean": _COMMON,
    "array": _COMMON | {"items", "minItems", "maxItems"},
}
_OF_THE_ROOT = frozenset({"$schema", "type", "title", "description", "properties", "required", "additionalProperties"})
_FLAT = "a form is flat: text, numbers, booleans, and choices of one or several strings (Literal or Enum)"
_NULL = {"type": "null"}
# elic-37.  A plain URL may well be what the question is about; markup says that it is meant to be clicked.
_LINK = re.compile(r"\]\(\s*<?https?:|<https?:|\bhref\s*=", re.IGNORECASE)


def _clickable(where: str) -> UsageError:
    return UsageError(f"the {where} of a form has a clickable link; use ElicitUrl to send the user to a page")


def _nullable(field: Json) -> bool:
    branches = field.get("anyOf") if isinstance(field, Mapping) else None
    if not isinstance(branches, list) or not all(isinstance(branch, Mapping) for branch in branches):
        return False
    return len(branches) == 2 and _NULL in branches


def _field(name: str, field: Any) -> JsonObject:
    """The field as a form may ask for it, without the null that means that it may be left out."""
    if _nullable(field):
        other = next((branch for branch in field["anyOf"] if branch != _NULL), _NULL)
        field = {**other, **{key: each for key, each in field.items() if key != "anyOf"}}
    members = field.items() if isinstance(field, Mapping) else ()
    said: JsonObject = {key: each for key, each in members if each is not None}
    kind = next((mark for mark in ("enum", "oneOf") if mark in said), said.get("type"))
    says = _SAYS.get(kind) if isinstance(kind, str) else None
    if says is None or (kind in ("enum", "oneOf") and said.get("type") != "string"):
        raise UsageError(f"field {name!r} is of a kind that no form can ask for; {_FLAT}")
    if kind == "array":
        said.pop("uniqueItems", None)  # that the chosen ones differ goes without saying
    _refuse_keywords(said.keys() - says, f"field {name!r}")
    return said


def _refuse_keywords(keywords: AbstractSet[str], where: str) -> None:
    if keywords:
        raise UsageError(f"a form cannot say {min(keywords)} of {where}; check it in the handler")


# The titles of choices.


def _hints_of_members(form: Any) -> Mapping[str, Any]:
    """The hints of a class by the names that its members have in a form."""
    from trio_mcp.core.schema.schema import members_of

    while typing.get_origin(form) is typing.Annotated:
        form = typing.get_args(form)[0]
    kind = typing.get_origin(form) or form
    found = members_of(kind, "the form") if isinstance(kind, type) else None
    return {member.name: member.hint for member in found or ()}


def _titled(field: JsonObject, hint: Any) -> JsonObject:
    """`field`, its choices shown by the names of the Enum in `hint` where these say more than the values."""
    titles = {str(member.value): _in_words(member.name) for kind in _enums(hint) for member in kind}
    if all(_spoken(value) == _spoken(title) for value, title in titles.items()):
        return field
    options = [{"const": value, "title": title} for value, title in titles.items()]
    if "enum" in field:
        return {**{key: each for key, each in field.items() if key != "enum"}, "oneOf": options}
    if "enum" in field.get("items", ()):
        return {**field, "items": {"anyOf": options}}
    return field


def _enums(hint: Any) -> Iterator[type[enum.Enum]]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield hint
    elif typing.get_origin(hint) is not Literal:
        for part in typing.get_args(hint):
            yield from _enums(part)


def _in_words(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words.capitalize() if words.isupper() else words


def _spoken(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text).strip().casefold()


# Pages

_URL = re.compile(
    r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+"
)  # RFC 3986; others parsers drop or guess
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class ElicitUrl(Inquiry[ElicitationOutcome[None]]):
    """Ask the user to visit a page, where things are entered that the client must not see.

    `Accepted` means that the user agreed to go there, not that anything was done.  Raises `UsageError` unless
    `url` is an absolute https URL, or an http one on loopback, and for one that holds credentials.
    """

    __slots__ = ("elicitation_id", "message", "url")
    method = "elicitation/create"

    def __init__(self, message: str, url: str) -> None:
        self.message = _prompt(message)
        self.url = _visitable(url)
        # elic-58: unique, and (as it may travel in the page's URL) nothing that anybody could guess.
        self.elicitation_id = secrets.token_urlsafe(16)

    def _params_in(self, revision: Revision) -> JsonObject:
        from trio_mcp.core import codec, forms

        if not _knows(revision, "elicitation", "url"):
            raise NotInThisRevision("elicitation/create with a URL", revision.name)
        return codec.to_json(forms.ElicitUrlParams(self.message, self.url, self.elicitation_id), revision)

    def completed_params(self) -> JsonObject:
        """The params of `notifications/elicitation/complete` (2025-11-25), for the client that was asked."""
        return {"elicitationId": self.elicitation_id}

    def read(self, answer: JsonObject) -> ElicitationOutcome[None]:
        return _outcome(answer, lambda: None)


def _visitable(url: str) -> str:
    # The URL is not repeated: it may hold what should not be in it.
    try:
        parts = urlsplit(url)
        valid = _URL.fullmatch(url) is not None and bool(parts.hostname) and parts.port != 0
    except (TypeError, ValueError, AttributeError):  # no text; half a bracket; a port that is no number
        valid = False
    if not valid:
        raise UsageError("the url to visit is not a valid URL: it needs a scheme, a host, and percent-encoding")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise UsageError("the url to visit must be https, or http on loopback")
    # elic-36: it passes through the client, and is no key to anything.
    if "@" in parts.netloc or any(names_a_secret(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise UsageError("the url to visit holds credentials; let the page ask who its visitor is")
    return url


class UrlElicitationRequired(RequestError):
    """Answer the request with: visit these pages, then try again.

    In 2025-11-25 that is an error of its own (-32042); in the modern revision the questions themselves are asked, and
    the handler is started again with the answers.  Others know no such thing.
    """

    def __init__(self, *questions: ElicitUrl, message: str = "This request needs a page to be visited first") -> None:
        # elic-27: a page is what it is for.
        if not questions or not all(isinstance(each, ElicitUrl) for each in questions):
            raise UsageError("UrlElicitationRequired needs one ElicitUrl or more, and nothing else")
        elicitations = [each.params(LATEST_LEGACY) for each in questions]  # elic-28
        super().__init__(URL_ELICITATION_REQUIRED, message, {"elicitations": elicitations})
        self.questions = questions


# Sampling


class Sample(Inquiry["CreateMessageResult"]):
    """Ask the client's model.  Deprecated in 2026-07-28, where it still works.

    `messages` is what a user says, or messages; an earlier answer may stand among them as it came.  Each question holds
    messages of its own: nothing is carried over from another (samp-21).  Raises `UsageError` for what no model
    can be asked: above all, each tool use has its result in the very next message, which holds nothing else.
    """

    __slots__ = ("_params",)
    method = "sampling/createMessage"

    def __init__(
        self,
        messages: str | SamplingMessage | Sequence[str | SamplingMessage | CreateMessageResult],
        *,
        max_tokens: int,
        system_prompt: str | None = None,
        temperature: float | None = None,
        stop_sequences: Sequence[str] | None = None,
        model_preferences: ModelPreferences | None = None,
        include_context: Literal["none", "thisServer", "allServers"] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice | None = None,
        metadata: Mapping[str, Json] | None = None,
    ) -> None:
        from trio_mcp.core import codec, content, models
        from trio_mcp.core.sampling import check_sampling

        each = [messages] if isinstance(messages, str | models.SamplingMessage) else messages
        params = models.CreateMessageParams(
            [_message(one) for one in each],
            max_tokens,
            system_prompt=system_prompt,
            temperature=temperature,
            stop_sequences=stop_sequences,
            model_preferences=model_preferences,
            include_context=include_context,
            tools=tools,
            tool_choice=tool_choice,
            metadata=metadata,
        )
        try:  # read as strictly as a client would; what comes of it shares nothing with the caller's lists
            self._params = codec.from_json(models.CreateMessageParams, codec.to_json(params, LATEST), strict=True)
        except RemoteProtocolError as error:
            raise UsageError(str(error)) from None
        if max_tokens < 1:
            raise UsageError("max_tokens must be at least 1")
        check_sampling(content.well_formed(self._params.messages), content.well_formed(self._params.tools or ()))

    def _params_in(self, revision: Revision) -> JsonObject:
        from trio_mcp.core import codec

        return codec.to_json(self._params, revision)

    def needs(self, revision: Revision) -> tuple[Capability, ...]:
        # samp-13: a SHOULD, so that no table has it.
        more = self._params.include_context in ("thisServer", "allServers") and _knows(revision, "sampling", "context")
        return (("sampling", "context"),) if more else ()

    def read(self, answer: JsonObject) -> CreateMessageResult:
        from trio_mcp.core import codec, models

        return codec.from_json(models.CreateMessageResult, answer, strict=True)  # samp-07


def _message(said: Any) -> SamplingMessage:
    from trio_mcp.core import content, models

    if isinstance(said, str):
        return models.SamplingMessage("user", content.TextContent(said))
    if isinstance(said, models.CreateMessageResult):
        return models.SamplingMessage(said.role, said.content)
    return said  # type: ignore[no-any-return]  # what is no message is refused when it is written


# Roots


class ListRoots(Inquiry["Roots"]):
    """Ask which directories the client exposes.  Deprecated in 2026-07-28, where it still works."""

    __slots__ = ()
    method = "roots/list"

    def _params_in(self, revision: Revision) -> JsonObject:
        return {}

    def read(self, answer: JsonObject) -> Roots:
        from trio_mcp.core import codec, content, models
        from trio_mcp.transport.paths import Roots

        # One bad element does not hide the others.
        return Roots(content.well_formed(codec.from_json(models.ListRootsResult, answer).roots))
