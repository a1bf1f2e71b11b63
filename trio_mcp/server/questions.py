"""Questions of a server to a client: a form, a visit to a page, a message of the model, the roots.

A question is one object in every revision.  In legacy revisions it becomes a request, in the modern one an input
request inside `input_required`.  `params` writes the question, and `read` reads the answer for the handler.  The
context sends questions.  The tables of `core.revisions` decide whether the client declared the capabilities that a
question needs; only `needs` adds to them.

A question is checked when it is built, so that a mistake is reported in the line that made it, with clients of any
revision.  Answers come from a client and a person: an answer is checked against the question, and
`RemoteProtocolError` names the field that does not fit, never its value.

Forms are flat: text, numbers, booleans, and choices of one or several strings.  A class has one field for each member;
any other type is one field with the name "value".  `X | None` and a default mean that a field may be left out.  Null in
an answer counts as left out, and fields that are not in the form are ignored.  An Enum's members are shown by their
names as words ("Dark blue" for `DARK_BLUE`) if these differ from the values; a Literal is shown as it is.  `format` is
only a hint to the client; use `datetime.date` to be sure of a date.
"""

from __future__ import annotations

import enum
import functools
import re
import secrets
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload
from urllib.parse import parse_qsl

from trio_mcp.core.elicitation import (
    LOOPBACK_HOSTS,
    Accepted,
    Declined,
    Dismissed,
    ElicitationOutcome,
    FormCheck,
    split_url,
)
from trio_mcp.core.errors import (
    URL_ELICITATION_REQUIRED,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.messages import Json, JsonObject
from trio_mcp.core.revisions import LATEST, LATEST_LEGACY, NOTHING, Capability, Revision, Role

# Models, codec, schemas and the readers of values are imported when the first question needs them, so that a server
# that only names one of these classes in an annotation starts without them.
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
    early: ClassVar[bool] = True  # a call may have the answer before the client was asked
    task: bool = False
    """Whether the client may answer later, with a task (2025-11-25)."""

    def params(self, revision: Revision) -> JsonObject:
        """Write the params of the question.  Raises `NotInThisRevision` if `revision` has no way to ask it."""
        if revision.request(Role.SERVER, self.method) is None and self.method not in revision.input_requests:
            raise NotInThisRevision(self.method, revision.name)
        return self._params_in(revision)

    def needs(self, revision: Revision) -> tuple[Capability, ...]:
        """Return the capabilities that the client must have declared, beyond the tables of `revision`."""
        return ()

    @abstractmethod
    def _params_in(self, revision: Revision) -> JsonObject: ...

    @abstractmethod
    def read(self, answer: JsonObject) -> T:
        """Read the answer.  Raises `RemoteProtocolError` if it does not fit.  May be called more than once."""


def _knows(revision: Revision, capability: str, member: str) -> bool:
    """Whether clients of `revision` can declare this member of a capability."""
    rule = revision.capabilities[Role.CLIENT].get(capability)
    return rule is not None and member in (rule.keys or ())


# The answers of a user.  elic-59: accept, decline and cancel are three types, which cannot be mistaken for each other.


_WITHOUT_VALUE: Mapping[Json, Declined | Dismissed] = {"decline": Declined(), "cancel": Dismissed()}


def _outcome(answer: JsonObject, value: Callable[[], T]) -> ElicitationOutcome[T]:
    action = answer.get("action")
    if action == "accept":
        return Accepted(value())
    if isinstance(action, str) and action in _WITHOUT_VALUE:  # elic-49: the content is ignored
        return _WITHOUT_VALUE[action]
    raise RemoteProtocolError("the answer to elicitation/create: action must be accept, decline or cancel")


def _prompt(message: str) -> str:
    if not isinstance(message, str) or not message.strip():  # elic-13
        raise UsageError("an elicitation needs a message that tells the user what is asked, and why")
    return message


# Answers pass through the client, and often through its model: elic-01, elic-02 forbid questions for secrets in a form,
# and elic-36 forbids secrets in a URL.  Only the name can be checked.  The last word decides: a "password" is a secret,
# a "password policy" and a "secret name" are not.
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

    `form` is one of these:

    | `form` | The value of `Accepted` |
    |---|---|
    | a dataclass, attrs class, TypedDict or NamedTuple with flat members | an object of the class |
    | a type for one field, such as `bool` or `Literal[...]` | the value |
    | a JSON Schema: a mapping or a `RequestedSchema` | a dict |

    `task`: see `Context.elicit`.  Raises `UsageError` for a form that is not flat, that asks for a secret (use
    `ElicitUrl`), or that has a clickable link.
    """

    __slots__ = ("_form", "_message", "task")
    method = "elicitation/create"

    @overload
    def __init__(self, message: str, form: type[T], *, task: bool = False) -> None: ...
    @overload
    def __init__(self: Elicit[Any], message: str, form: Any, *, task: bool = False) -> None: ...
    def __init__(self, message: str, form: Any, *, task: bool = False) -> None:
        self._message = _prompt(message)
        self._form = _form(form)
        self.task = task
        if _LINK.search(message):
            raise _clickable("message")

    def _params_in(self, revision: Revision) -> JsonObject:
        return {**self._form.params_in(revision), "message": self._message}

    def read(self, answer: JsonObject) -> ElicitationOutcome[T]:
        return _outcome(answer, lambda: self._form.read(answer.get("content")))


class _QuestionForm:
    """A checked form: the schema to send, and the reader of its answer."""

    __slots__ = ("_asked", "_check", "_fields", "_may_be_none", "_value", "_written")

    def __init__(
        self, schema: Mapping[str, Any], hints: Mapping[str, Any] = NOTHING, value: Callable[[Any], Any] | None = None
    ) -> None:
        """`schema` need not be ours; `value` converts a valid answer, or None to return it as a dict."""
        from trio_mcp.core import codec, forms

        properties, required = schema.get("properties"), schema.get("required") or []
        if schema.get("type") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UsageError('a form is a JSON Schema with "type": "object", "properties" and a list of "required"')
        _refuse_keywords(schema.keys() - _ROOT_KEYWORDS, "its root")
        self._fields = {name: _titled(_field(name, each), hints.get(name)) for name, each in properties.items()}
        self._may_be_none = [name for name, each in properties.items() if name in required and _nullable(each)]
        self._value = value
        asked: JsonObject = {"type": "object", "properties": self._fields}
        if mandatory := [name for name in required if name not in self._may_be_none]:
            asked["required"] = mandatory
        try:
            self._asked = codec.from_json(forms.RequestedSchema, asked, strict=True)
        except RemoteProtocolError as error:
            raise UsageError(f"{error}; {_FLAT}") from None
        self._check = FormCheck(asked)
        self._written: dict[Revision, JsonObject] = {}
        self._refuse_bad_fields(mandatory)

    def _refuse_bad_fields(self, mandatory: Sequence[str]) -> None:
        """Raise UsageError for a valid JSON Schema that makes no good form."""
        for name in mandatory:
            if name not in self._fields:
                raise UsageError(f"the form requires {name!r}, which is not among its properties")
        for name, field in self._fields.items():
            if _LINK.search(str(field)):
                raise _clickable(f"field {name!r}")
            entered = field["type"] in ("string", "number", "integer") and not field.keys() & {"enum", "oneOf"}
            if entered and (names_a_secret(name) or names_a_secret(field.get("title", ""))):
                raise UsageError(f"a form must not ask for secrets such as {name!r}; use ElicitUrl")
        defaults = {name: field["default"] for name, field in self._fields.items() if "default" in field}
        for problem in self._check.fields.errors(defaults):
            raise UsageError(f"the default of {problem.path[1:]!r} {problem.message}")

    def params_in(self, revision: Revision) -> JsonObject:
        """Return the params of the question, with a message to be replaced; they are written once for each revision."""
        if (written := self._written.get(revision)) is None:
            from trio_mcp.core import codec, forms

            # elic-53, elic-54: for older revisions the codec leaves out or rewrites unknown fields.  It refuses a
            # choice of several strings, which cannot be left out.
            written = codec.to_json(forms.ElicitFormParams("", self._asked, "form"), revision)
            self._written[revision] = written
        return written

    def read(self, content: Json) -> Any:
        if content is None:
            content = {}  # no field was filled in
        if not isinstance(content, dict):
            raise RemoteProtocolError("the answer to elicitation/create: content must be an object")
        given = {name: content[name] for name in self._fields if content.get(name) is not None}
        if why := self._check.misfit(given):  # elic-08, elic-45
            raise RemoteProtocolError(f"the answer does not fit the form: {why}")
        if self._value is None:
            return given
        from trio_mcp.core.schema.shapes import Unreadable

        try:
            return self._value(dict.fromkeys(self._may_be_none) | given)
        except Unreadable as error:  # an invalid date
            raise RemoteProtocolError(f"the answer does not fit the form: content{error.path} {error.why}") from None


def _form(form: Any) -> _QuestionForm:
    from trio_mcp.core import codec, forms

    if isinstance(form, forms.RequestedSchema):
        return _QuestionForm(codec.to_json(form, LATEST))
    if isinstance(form, Mapping):
        return _QuestionForm(form)
    return _form_of_class(form) if isinstance(form, type) else _form_of(form)


def _form_of(form: Any) -> _QuestionForm:
    from trio_mcp.core.schema.shapes import shape_of

    shape = shape_of(form, where="the form")
    if "properties" in shape.schema:
        return _QuestionForm(shape.schema, _hints_of_members(form), shape.read)
    bare = {"type": "object", "properties": {"value": shape.schema}, "required": ["value"]}

    def value(content: JsonObject) -> Any:
        return content["value"] if shape.read is None else shape.read(content["value"])

    return _QuestionForm(bare, {"value": form}, value)


# A handler asks the same form at each call, and the check of a form costs more than the rest of the question.
_form_of_class = functools.lru_cache(64)(_form_of)


# For each kind of field (its type, or the keyword of a choice): the keywords that a form allows.
_COMMON = frozenset({"type", "title", "description", "default"})
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "enum": _COMMON | {"enum", "enumNames"},
    "oneOf": _COMMON | {"oneOf"},
    "string": _COMMON | {"format", "minLength", "maxLength"},
    "number": _COMMON | {"minimum", "maximum"},
    "integer": _COMMON | {"minimum", "maximum"},
    "boolean": _COMMON,
    "array": _COMMON | {"items", "minItems", "maxItems"},
}
_ROOT_KEYWORDS = frozenset(
    {"$schema", "type", "title", "description", "properties", "required", "additionalProperties"}
)
_FLAT = "a form is flat: text, numbers, booleans, and choices of one or several strings (Literal or Enum)"
_NULL = {"type": "null"}
# elic-37.  A plain URL may be the subject of the question; markup means that the user is meant to click it.
_LINK = re.compile(r"\]\(\s*<?https?:|<https?:|\bhref\s*=", re.IGNORECASE)


def _clickable(where: str) -> UsageError:
    return UsageError(f"the {where} of a form has a clickable link; use ElicitUrl to send the user to a page")


def _nullable(field: Json) -> bool:
    branches = field.get("anyOf") if isinstance(field, Mapping) else None
    if not isinstance(branches, list) or not all(isinstance(branch, Mapping) for branch in branches):
        return False
    return len(branches) == 2 and _NULL in branches


def _field(name: str, field: Any) -> JsonObject:
    """Return the field in the form that the protocol allows: without null, which means that it may be left out."""
    if _nullable(field):
        other = next((branch for branch in field["anyOf"] if branch != _NULL), _NULL)
        field = {**other, **{key: each for key, each in field.items() if key != "anyOf"}}
    members = field.items() if isinstance(field, Mapping) else ()
    schema: JsonObject = {key: each for key, each in members if each is not None}
    kind = next((mark for mark in ("enum", "oneOf") if mark in schema), schema.get("type"))
    allowed = _KEYWORDS.get(kind) if isinstance(kind, str) else None
    if allowed is None or (kind in ("enum", "oneOf") and schema.get("type") != "string"):
        raise UsageError(f"field {name!r} has a type that a form cannot have; {_FLAT}")
    if kind == "array":
        schema.pop("uniqueItems", None)  # choices always differ from each other
    _refuse_keywords(schema.keys() - allowed, f"field {name!r}")
    return schema


def _refuse_keywords(keywords: AbstractSet[str], where: str) -> None:
    if keywords:
        raise UsageError(f"a form cannot have {min(keywords)} in {where}; check it in the handler")


# The titles of choices.


def _hints_of_members(form: Any) -> Mapping[str, Any]:
    """The type hints of a class, by the names of its members in a form."""
    from trio_mcp.core.schema.classes import members_of

    while typing.get_origin(form) is typing.Annotated:
        form = typing.get_args(form)[0]
    kind = typing.get_origin(form) or form
    found = members_of(kind, "the form") if isinstance(kind, type) else None
    return {member.name: member.hint for member in found or ()}


def _titled(field: JsonObject, hint: Any) -> JsonObject:
    """Return `field` with the names of the Enum in `hint` as titles, if these differ from the values."""
    titles = {str(member.value): _in_words(member.name) for kind in _enums(hint) for member in kind}
    if all(_normalized(value) == _normalized(title) for value, title in titles.items()):
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


def _normalized(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text).strip().casefold()


# Pages


class ElicitUrl(Inquiry[ElicitationOutcome[None]]):
    """Ask the user to open a web page, for input that the client must not see.

    `Accepted` means that the user agreed to open the page, not that the user has finished there.  `task`: see
    `Context.elicit`.  Raises `UsageError` if `url` is not an absolute https URL (http is allowed on loopback), or if it
    holds credentials.
    """

    __slots__ = ("elicitation_id", "message", "task", "url")
    method = "elicitation/create"
    early = False  # a user cannot agree to visit a page before the question shows its URL

    def __init__(self, message: str, url: str, *, task: bool = False) -> None:
        self.message = _prompt(message)
        self.url = _checked_url(url)
        self.task = task
        # elic-58: unique, and impossible to guess, because it may travel in the page's URL.
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


def _checked_url(url: str) -> str:
    # The error does not repeat the URL, because it may hold a secret.
    parts = split_url(url)
    if parts is None:
        raise UsageError("the url to visit is not a valid URL: it needs a scheme, a host, and percent-encoding")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS):
        raise UsageError("the url to visit must be https, or http on loopback")
    # elic-36: the URL passes through the client, so it must give no access.
    if "@" in parts.netloc or any(names_a_secret(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise UsageError("the url to visit holds credentials; let the page authenticate the user")
    return url


class UrlElicitationRequired(RequestError):
    """Raise this to make the user visit pages first, and the client try again.

    In 2025-11-25 the client gets a special error (-32042).  In the modern revision the client is asked the questions,
    and the handler is started again with the answers.  In other revisions the call fails.

    Raises `UsageError` if `questions` are not `ElicitUrl` objects.
    """

    def __init__(self, *questions: ElicitUrl, message: str = "This request needs a page to be visited first") -> None:
        # elic-27: the error is for pages only.
        if not questions or not all(isinstance(each, ElicitUrl) for each in questions):
            raise UsageError("UrlElicitationRequired needs one ElicitUrl or more, and nothing else")
        elicitations = [each.params(LATEST_LEGACY) for each in questions]  # elic-28
        super().__init__(URL_ELICITATION_REQUIRED, message, {"elicitations": elicitations})
        self.questions = questions


# Sampling


class Sample(Inquiry["CreateMessageResult"]):
    """Ask the client's model for a message.  Deprecated in 2026-07-28, where it still works.

    `messages` is the text of a user, or a list of messages; an earlier answer may be in the list as it came.  A
    question does not include the messages of earlier ones.  `task`: see `Context.elicit`.

    Raises `UsageError` for invalid messages or options.  In particular, the results of all tool uses must be in the
    next message, and that message must hold nothing else.
    """

    __slots__ = ("_params", "task")
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
        task: bool = False,
    ) -> None:
        from trio_mcp.core import codec, content, models
        from trio_mcp.core.sampling import check_sampling

        self.task = task

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
        try:  # read as strictly as a client would; the copy shares no list with the caller
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
        # samp-13 is a SHOULD, so it is in no table.  samp-21: each question has its own messages.
        more = self._params.include_context in ("thisServer", "allServers") and _knows(revision, "sampling", "context")
        return (("sampling", "context"),) if more else ()

    def read(self, answer: JsonObject) -> CreateMessageResult:
        from trio_mcp.core import codec, models

        return codec.from_json(models.CreateMessageResult, answer, strict=True)  # samp-07


def _message(given: Any) -> SamplingMessage:
    from trio_mcp.core import content, models

    if isinstance(given, str):
        return models.SamplingMessage("user", content.TextContent(given))
    if isinstance(given, models.CreateMessageResult):
        return models.SamplingMessage(given.role, given.content)
    return given  # type: ignore[no-any-return]  # another type is refused when the message is written


# Roots


class ListRoots(Inquiry["Roots"]):
    """Ask for the directories that the client exposes.  Deprecated in 2026-07-28, where it still works."""

    __slots__ = ()
    method = "roots/list"

    def _params_in(self, revision: Revision) -> JsonObject:
        return {}

    def read(self, answer: JsonObject) -> Roots:
        from trio_mcp.core import codec, content, models
        from trio_mcp.transport.paths import Roots

        # One malformed root does not hide the others.
        return Roots(content.well_formed(codec.from_json(models.ListRootsResult, answer).roots))
