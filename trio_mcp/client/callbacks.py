"""Answers to requests of the server: the callbacks of a client for sampling, elicitation and roots.

An `Answering` holds the callbacks of one client.  It checks a question of the server, calls the callback, and converts
the result into the answer of the revision.  It does not depend on how the question came: as a request in the legacy era
(`answer`), or with others in an input-required result in the modern era (`answer_all`).  Capabilities without a
callback are not declared, and their requests are refused.

| Callback | Argument | Result |
|---|---|---|
| sampling | `SamplingRequest` | a `CreateMessageResult`, `(text, model)`, or `Declined` |
| elicitation | `FormElicitationRequest` | the values, or `Accepted` with them, `Declined`, None or `Dismissed` |
| elicitation_url | `UrlElicitationRequest` | True or `Accepted`, False or `Declined`, None or `Dismissed` |
| roots | none | the roots |

A callback is an `async def`, or a `def`, which runs in the event loop and must not block.  Up to `Limits.questions`
callbacks run at once; up to `Limits.questions_waiting` more questions wait, and further ones are refused.  A callback
that calls the server, which then asks again, keeps its place.  A callback is cancelled when the server cancels its
question.

Errors: an invalid question is answered with -32602, by a `RequestError`.  An invalid result of a callback is never
sent: `UsageError` says which field does not fit, but does not show its value.  Exceptions of a callback are not
changed; a `RequestError` is an answer, and the caller of `answer` makes an answer of the others.

Forms: the values are a mapping by field, or an object of a dataclass or attrs class with these fields.  A missing field
gets its default.  A field with the value None is left out, even if it has a default.

Each request has the name of the server that asks (elic-04).  The server chooses this name itself: show it, but do not
trust it.  The texts of the server may be private, so no repr shows them (samp-10).

Pages: the callback asks for consent.  The callback, not this package, opens the page, in a place that the client and
its model cannot read.  Nothing is fetched before or after (elic-38 to elic-40).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard
from urllib.parse import SplitResult, urlsplit

import attrs
import trio

from trio_mcp.client.errors import too_many_questions
from trio_mcp.core import codec, forms, models
from trio_mcp.core.content import MalformedContent, Model, TextContent, ToolUseContent, well_formed
from trio_mcp.core.elicitation import LOOPBACK_HOSTS, Accepted, Declined, Dismissed, FormCheck, split_url
from trio_mcp.core.errors import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    McpError,
    RemoteProtocolError,
    RequestError,
    UsageError,
    name_of,
    shown,
)
from trio_mcp.core.messages import JsonObject, Limits
from trio_mcp.core.revisions import Revision, Role, Terms, missing_capabilities
from trio_mcp.core.rounds import Question
from trio_mcp.core.sampling import check_sampling
from trio_mcp.core.schema.classes import describes_itself
from trio_mcp.core.schema.writing import to_json_value
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.paths import PathRefused, file_path
from trio_mcp.transport.workers import contained

__all__ = [
    "Answering",
    "FormAnswer",
    "FormElicitationRequest",
    "GivenRoots",
    "OnElicitation",
    "OnElicitationUrl",
    "OnSampling",
    "PageAnswer",
    "RootLike",
    "SamplingAnswer",
    "SamplingRequest",
    "UrlElicitationRequest",
]

_log = logging.getLogger("trio_mcp")

_REJECTED = -1  # samp-05, samp-06: "User rejected sampling request"

# The most questions in one round.  A wizard asks a dozen; each question is a task here and a dialog for the user.
_QUESTIONS = 100

# Characters of an exception that are repeated in another error; the exception itself is chained.
_REASON_LENGTH = 200

# The longest JSON text of a form that stays compiled for the next question with the same form.
_FORM_LENGTH = 8192

# The most pages whose end was not reported.  Most servers never report it; the oldest page is forgotten.
_PAGES = 100


@attrs.frozen(eq=False)
class SamplingRequest:
    """The server asks the model of the client.

    `params` has the messages and all options of the server.  The answer must not exceed `max_tokens` and must obey
    `tool_choice`; the other options are advice.
    """

    params: models.CreateMessageParams = attrs.field(repr=False)
    server: models.Implementation | None

    def pick_model(self, available: Iterable[str]) -> str | None:
        """Return the model of `available` that the server prefers, or None if no hint matches.

        A hint is a part of a model's name; case does not matter.  If several models match a hint, the first is
        returned.
        """
        names = list(available)
        preferences = self.params.model_preferences
        for hint in well_formed((preferences and preferences.hints) or ()):  # samp-27: the first that matches
            part = (hint.name or "").casefold()
            found = next((name for name in names if part in name.casefold()), None) if part else None
            if found is not None:
                return found
        return None


@attrs.frozen(eq=False)
class FormElicitationRequest:
    """The server asks the user to fill in a form.

    `defaults` are the values to show first.  If the callback leaves a field out, its default is sent.
    """

    params: forms.ElicitFormParams = attrs.field(repr=False)
    server: models.Implementation | None
    defaults: Mapping[str, forms.ElicitValue] = attrs.field(repr=False)

    @property
    def message(self) -> str:
        """The question, and the reason for it."""
        return self.params.message

    @property
    def fields(self) -> Mapping[str, forms.FieldSchema | MalformedContent]:
        """The fields by name.  A field that the protocol does not allow in a form is a `MalformedContent`: its `raw` is
        a JSON Schema.
        """
        return self.params.requested_schema.properties


@attrs.frozen(eq=False)
class UrlElicitationRequest:
    """The server asks the user to open a web page.

    Show the whole `url`, `host` and `warnings`, and open the page only if the user agrees, in the user's own browser.
    `url` is exactly what the server sent.  It has only ASCII characters, so it cannot contain invisible or look-alike
    characters.
    """

    params: forms.ElicitUrlParams = attrs.field(repr=False)
    server: models.Implementation | None
    host: str

    @property
    def message(self) -> str:
        """The reason to open the page."""
        return self.params.message

    @property
    def url(self) -> str:
        return self.params.url

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the URL to show before the user agrees."""
        parts = urlsplit(self.url)
        return tuple(warning for warning, applies in _WARNINGS if applies(parts))


class _Dataclass(Protocol):
    """An object of any dataclass, for type checkers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


SamplingAnswer: TypeAlias = models.CreateMessageResult | tuple[str, str] | Declined | Dismissed
FormAnswer: TypeAlias = (
    Mapping[str, Any] | _Dataclass | attrs.AttrsInstance | Accepted[Any] | Declined | Dismissed | None
)
PageAnswer: TypeAlias = bool | Accepted[Any] | Declined | Dismissed | None
OnSampling: TypeAlias = Callable[[SamplingRequest], SamplingAnswer | Awaitable[SamplingAnswer]]
OnElicitation: TypeAlias = Callable[[FormElicitationRequest], FormAnswer | Awaitable[FormAnswer]]
OnElicitationUrl: TypeAlias = Callable[[UrlElicitationRequest], PageAnswer | Awaitable[PageAnswer]]

RootLike: TypeAlias = str | os.PathLike[str] | models.Root
"""An absolute path, or a `file:` URI."""
GivenRoots: TypeAlias = Sequence[RootLike] | Callable[[], Sequence[RootLike] | Awaitable[Sequence[RootLike]]]


class Answering:
    """The callbacks of one client; see the head of this file.

    Raises `UsageError` for `sampling_tools` without `sampling`, a callback that is not callable, and an invalid root.
    """

    def __init__(
        self,
        *,
        sampling: OnSampling | None = None,
        sampling_tools: bool = False,
        elicitation: OnElicitation | None = None,
        elicitation_url: OnElicitationUrl | None = None,
        roots: GivenRoots | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._slots = trio.Semaphore(self._limits.questions)
        callbacks = {"sampling": sampling, "elicitation": elicitation, "elicitation_url": elicitation_url}
        for name, callback in callbacks.items():
            if callback is not None and not callable(callback):
                raise UsageError(f"{name} must be a function, got {type(callback).__name__}")
        if sampling_tools and sampling is None:
            raise UsageError("sampling_tools needs the option sampling")
        self._sampling = sampling
        self._elicitation = elicitation
        self._elicitation_url = elicitation_url
        self._roots = roots if roots is None or callable(roots) else _check_roots(roots)
        self._pages: dict[str | None, UrlElicitationRequest] = {}  # by elicitation id, the oldest first

        self._declared: dict[Revision, JsonObject] = {}

        self.capabilities: JsonObject = {}
        """The capabilities of the client, for an `Offer`: the callbacks and roots that were given, as in the newest
        revision."""
        if sampling is not None:
            self.capabilities["sampling"] = {"tools": {}} if sampling_tools else {}
        modes = {"form": elicitation is not None, "url": elicitation_url is not None}
        if any(modes.values()):  # elic-11
            self.capabilities["elicitation"] = {mode: {} for mode, offered in modes.items() if offered}
        if roots is not None:
            self.capabilities["roots"] = {"listChanged": True}

    async def answer(self, method: str, params: JsonObject, terms: Terms) -> JsonObject:
        """Return the result of a request of the server, as its revision writes it.

        Raises `RequestError` if the request is refused, with the code to send; `UsageError` if the result of a callback
        is invalid; and all exceptions of the callback.
        """
        revision = terms.revision
        row = revision.request(Role.SERVER, method) or revision.input_requests.get(method)
        handler = self._HANDLERS.get(method)
        if row is None or handler is None:
            raise RequestError(METHOD_NOT_FOUND, f"a client of {revision} does not support {shown(method)}")
        if (declared := self._declared.get(revision)) is None:
            declared = self._declared[revision] = revision.declarable(Role.CLIENT, self.capabilities)
        missing = missing_capabilities(revision, row, params, declared)
        if missing:
            # As in `SessionProtocol`: without its capability the method does not exist (samp-34, root-05), and a mode
            # or a parameter that was not declared is invalid (elic-34, samp-30).
            code = METHOD_NOT_FOUND if missing[0] == row.needs else INVALID_PARAMS
            why = f"{method} needs the client capability {'.'.join(missing[0])}, which was not declared"
            raise RequestError(code, why)
        limits = self._limits
        if not self._slots.value and (
            not limits.questions or self._slots.statistics().tasks_waiting >= limits.questions_waiting
        ):
            raise too_many_questions(limits)
        async with self._slots:
            return codec.to_json(await handler(self, params, terms), revision)

    async def answer_all(
        self, questions: Sequence[Question], terms: Terms, abandon: Callable[[str, str], McpError]
    ) -> dict[str, JsonObject]:
        """Return the answers to one round of questions, by key.  The callbacks run at the same time.

        If one question has no answer, the others are cancelled and `abandon(key, why)` is raised (see
        `Rounds.abandon`), with the error as its cause.  Raises `RemoteProtocolError` if there are too many questions.
        """
        if len(questions) > _QUESTIONS:
            why = f"the server asked {len(questions)} questions at once; the limit is {_QUESTIONS}"
            raise RemoteProtocolError(why)
        answers: dict[str, JsonObject] = {}
        failures: list[tuple[Question, Exception]] = []
        scope = trio.CancelScope()

        async def answer(question: Question) -> None:
            try:
                answers[question.key] = await self.answer(question.method, question.params, terms)
            except Exception as error:  # noqa: BLE001  # a callback may raise anything; it is raised below
                failures.append((question, error))
                scope.cancel(reason="another question of this round has no answer")

        if len(questions) == 1:  # as usual: it needs no task of its own
            await answer(questions[0])
        else:
            with scope:
                async with open_nursery(wait=True) as nursery:
                    for each in questions:
                        nursery.start_soon(answer, each, name=f"the server asks: {each.method}")
        if not failures:
            return answers
        (question, error), *later = failures
        for other, failure in later:  # logged, because only one error can be raised
            _log.error("the callback for %s has failed while it was cancelled", other.method, exc_info=failure)
        why = f"the callback for {question.method} has failed: {shown(error, _REASON_LENGTH)}"
        if isinstance(error, RequestError):
            why = error.message  # the code is for the server, which gets no answer here
        elif isinstance(error, UsageError):
            why = str(error)
        raise abandon(question.key, why) from error

    def set_roots(self, roots: GivenRoots) -> bool:
        """Replace the roots.  Returns True if they may differ from the roots before.

        Servers of the legacy era are then sent `notifications/roots/list_changed`; modern servers ask again each time.
        Raises `UsageError` if a root is invalid, or if roots were not declared.
        """
        if self._roots is None:
            raise UsageError("this client did not declare roots; open it with the option roots=[]")
        before, self._roots = self._roots, roots if callable(roots) else _check_roots(roots)
        return callable(before) or callable(self._roots) or before != self._roots

    def finished(self, params: JsonObject) -> UrlElicitationRequest | None:
        """Return the page of a `notifications/elicitation/complete`, once; None if the page is unknown.

        A page is known from the call of its callback on, because the user may finish before the callback returns.  It
        is forgotten when it is finished, or when the user does not agree.
        """
        id = params.get("elicitationId")
        return self._pages.pop(id, None) if isinstance(id, str) else None  # elic-23

    # Handlers by method

    async def _sample(self, params: JsonObject, terms: Terms) -> models.CreateMessageResult:
        with _as_invalid_params("sampling/createMessage"):
            request = codec.from_json(models.CreateMessageParams, params, strict=True)  # samp-07, samp-20
            if not _can_declare(terms.revision, "sampling", "tools"):
                request = attrs.evolve(request, tools=None, tool_choice=None)  # this revision has no tools here
            # samp-14, samp-15, samp-32: the same rules as for requests that our own servers send.
            check_sampling(well_formed(request.messages))
            if request.max_tokens < 1:
                raise UsageError("max_tokens must be at least 1")
        assert self._sampling is not None  # its capability was declared
        answer = await contained(name_of(self._sampling), self._sampling, SamplingRequest(request, _server_info(terms)))
        if isinstance(answer, Declined | Dismissed):
            raise RequestError(_REJECTED, "the user rejected the sampling request")
        result = answer
        if isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(part, str) for part in answer):
            result = models.CreateMessageResult("assistant", TextContent(answer[0]), answer[1])
        if not isinstance(result, models.CreateMessageResult):
            expected = "a CreateMessageResult, (text, model) or Declined"  # servers want to know the model, too
            raise UsageError(f"the sampling callback must return {expected}, got {_describe(answer)}")
        _check_tool_use(request, result)
        try:  # samp-07: check it as strictly as a server does
            codec.from_json(models.CreateMessageResult, codec.to_json(result, terms.revision), strict=True)
        except RemoteProtocolError as error:
            raise UsageError(f"the sampling callback returned an invalid result: {error}") from None
        return result

    async def _elicit(self, params: JsonObject, terms: Terms) -> forms.ElicitResult:
        if params.get("mode") == "url" and _can_declare(terms.revision, "elicitation", "url"):
            return await self._visit(params, terms)
        with _as_invalid_params("elicitation/create"):
            request = codec.from_json(forms.ElicitFormParams, params)  # elic-15: also without a mode
            schema: JsonObject = params["requestedSchema"]
            text = json.dumps(schema)
            form = _form(text) if len(text) <= _FORM_LENGTH else _form.__wrapped__(text)
        assert self._elicitation is not None  # its capability was declared
        asked = FormElicitationRequest(request, _server_info(terms), dict(form.defaults))
        answer = await contained(name_of(self._elicitation), self._elicitation, asked)
        if answer is None or isinstance(answer, Dismissed):
            return forms.ElicitResult("cancel")
        if isinstance(answer, Declined):
            return forms.ElicitResult("decline")
        values = _form_values(answer.value if isinstance(answer, Accepted) else answer)
        return forms.ElicitResult("accept", form.fill_in(values))

    async def _visit(self, params: JsonObject, terms: Terms) -> forms.ElicitResult:
        """elic-51: the answer never has content."""
        reports_completion = terms.revision.notification(Role.SERVER, "notifications/elicitation/complete") is not None
        with _as_invalid_params("elicitation/create"):
            request = codec.from_json(forms.ElicitUrlParams, params)
            page = UrlElicitationRequest(request, _server_info(terms), _host_of(request.url))
            if reports_completion and request.elicitation_id is None:  # elic-18
                raise RemoteProtocolError("ElicitUrlParams: elicitationId: missing")
        assert self._elicitation_url is not None  # its capability was declared
        id = request.elicitation_id if reports_completion else None
        if id is not None:  # elic-55: it is only compared
            self._pages[id] = page
            if len(self._pages) > _PAGES:
                del self._pages[next(iter(self._pages))]
        agreed = False
        try:
            answer = await contained(name_of(self._elicitation_url), self._elicitation_url, page)
            agreed = answer is True or isinstance(answer, Accepted)
        finally:
            if not agreed and self._pages.get(id) is page:
                del self._pages[id]
        if agreed:
            return forms.ElicitResult("accept")
        if answer is False or isinstance(answer, Declined):
            return forms.ElicitResult("decline")
        if answer is None or isinstance(answer, Dismissed):
            return forms.ElicitResult("cancel")
        expected = "True, False, Accepted, Declined, Dismissed or None"
        raise UsageError(f"the elicitation_url callback must return {expected}, got {_describe(answer)}")

    async def _list_roots(self, params: JsonObject, terms: Terms) -> models.ListRootsResult:
        roots = self._roots
        assert roots is not None  # its capability was declared
        if callable(roots):  # root-07: the callback is called each time
            roots = _check_roots(await contained(name_of(roots), roots))
        return models.ListRootsResult(roots)

    _HANDLERS: ClassVar[Mapping[str, Callable[[Any, JsonObject, Terms], Awaitable[Model]]]] = {
        "sampling/createMessage": _sample,
        "elicitation/create": _elicit,
        "roots/list": _list_roots,
    }


def _describe(answer: object) -> str:
    # A program may return the class Declined instead of Declined(); "type" would not show that.
    return f"the class {answer.__name__}" if isinstance(answer, type) else type(answer).__name__


@contextlib.contextmanager
def _as_invalid_params(method: str) -> Iterator[None]:
    """Convert errors of the question to an answer with -32602 and the name of the field."""
    try:
        yield
    except (RemoteProtocolError, UsageError) as error:
        raise RequestError(INVALID_PARAMS, f"{method}: {error}") from None


def _can_declare(revision: Revision, capability: str, member: str) -> bool:
    """Return whether clients of `revision` can declare this member of a capability."""
    rule = revision.capabilities[Role.CLIENT].get(capability)
    return rule is not None and member in (rule.keys or ())


def _server_info(terms: Terms) -> models.Implementation | None:
    if terms.identity is None:
        return None
    try:
        return codec.from_json(models.Implementation, dict(terms.identity))
    except RemoteProtocolError:  # meta-14: the identity is for display only, and this one cannot be displayed
        return None


# Forms


@attrs.frozen(eq=False)
class _Form:
    """The compiled schema of a form."""

    check: FormCheck
    names: tuple[str, ...]
    defaults: dict[str, forms.ElicitValue]

    def fill_in(self, values: Mapping[str, Any]) -> dict[str, forms.ElicitValue]:
        """Return the content of the answer (elic-44): the values, with defaults for the missing fields."""
        for name in values:
            if name not in self.names:
                raise UsageError(f"the form has no field {shown(name)}; its fields are {shown(self.names)}")
        content: dict[str, forms.ElicitValue] = {}
        for name, value in {**self.defaults, **values}.items():
            if value is not None:
                if not _is_plain(value):
                    expected = "a str, a finite number, a bool or a list of str"
                    raise UsageError(f"the form field {shown(name)} must be {expected}, got {type(value).__name__}")
                content[name] = list(value) if isinstance(value, tuple) else value
        if why := self.check.misfit(content):
            raise UsageError(f"the values of the elicitation callback do not fit the form: {why}")
        return content


@lru_cache(maxsize=32)  # to compile a form costs more than all other work for its question
def _form(text: str) -> _Form:
    """Compile the schema of a form, given as JSON.  Raises `RemoteProtocolError` if it is invalid or too costly."""
    schema = json.loads(text)
    properties: JsonObject = schema["properties"]
    try:
        check = FormCheck(schema)
    except UsageError as error:  # it blames this side, but the schema is the server's
        raise RemoteProtocolError(f"requestedSchema: {error}") from None
    defaults = {name: each.get("default") for name, each in properties.items() if isinstance(each, dict)}
    plain = {name: value for name, value in defaults.items() if _is_plain(value)}
    if not check.fields.can_check(plain):  # the check of each is cheap, but of all together may not be
        plain = {}
    # A default that does not fit the schema of its own field is ignored.
    fitting = {name: value for name, value in plain.items() if check.fields.fits({name: value})}
    return _Form(check, tuple(properties), fitting)


def _is_plain(value: object) -> TypeGuard[forms.ElicitValue]:
    if isinstance(value, list | tuple):
        return all(type(each) is str for each in value)
    return type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _form_values(answer: object) -> Mapping[str, Any]:
    if isinstance(answer, Mapping):
        return answer
    kind = type(answer)
    has_fields = dataclasses.is_dataclass(kind) or attrs.has(kind) or describes_itself(kind)
    values = to_json_value(answer) if has_fields else None
    if not isinstance(values, dict):
        expected = "the values by field, an object with those fields, Accepted, Declined, Dismissed or None"
        raise UsageError(f"the elicitation callback must return {expected}, got {_describe(answer)}")
    return values


# Sampling

# "Model MUST use at least one tool before completing": these are the reasons to stop of a complete answer.
_COMPLETED = (None, "endTurn", "stopSequence", "toolUse")


def _check_tool_use(request: models.CreateMessageParams, result: models.CreateMessageResult) -> None:
    """samp-16: a server cannot use a tool call for a tool that it did not offer."""
    mode = request.tool_choice.mode if request.tool_choice is not None else None
    usable = {tool.name for tool in well_formed(request.tools or ())} if mode != "none" else set()
    used = [block.name for block in result.blocks if isinstance(block, ToolUseContent)]
    for name in used:
        if name not in usable:
            raise UsageError(f"the sampling callback used the tool {name!r}, which the request does not offer")
    if mode == "required" and usable and not used and result.stop_reason in _COMPLETED:
        raise UsageError("the sampling callback used no tool, but toolChoice is 'required'")


# Pages


def _host_of(url: str) -> str:
    """Return the host of a URL.  Raises `RemoteProtocolError` unless all browsers read the same host from it."""
    parts = split_url(url)
    host = parts.hostname if parts is not None and parts.scheme in ("http", "https") else None
    if not host or "%" in host:
        # The URL is not shown: it may contain secrets for the page.
        raise RemoteProtocolError("url: expected an absolute http or https URL, percent-encoded, its host in ASCII")
    return host


_WARNINGS: tuple[tuple[str, Callable[[SplitResult], bool]], ...] = (
    (
        "the host is written in Punycode: it may look like another one",
        lambda parts: any(label.startswith("xn--") for label in (parts.hostname or "").split(".")),
    ),
    ("the text before the @ is not the host", lambda parts: "@" in parts.netloc),
    (
        "the page is not encrypted",
        lambda parts: parts.scheme == "http" and parts.hostname not in LOOPBACK_HOSTS,
    ),
)


# Roots


def _check_roots(roots: object) -> tuple[models.Root, ...]:
    if isinstance(roots, str | bytes) or not isinstance(roots, Sequence):
        raise UsageError(f"roots must be a sequence of paths, file: URIs or Root objects, got {type(roots).__name__}")
    return tuple(_root(number, each) for number, each in enumerate(roots))


def _root(number: int, given: object) -> models.Root:
    """Return a valid root.  root-04: its URI begins with file://; root-06: it has no `..`, in any encoding."""
    if isinstance(given, models.Root):
        root = given
    elif isinstance(given, str) and given.startswith("file:"):
        root = models.Root(given)
    elif isinstance(given, str | os.PathLike):
        path = os.fspath(given)
        if not os.path.isabs(path):
            # A relative path would change its meaning when the program changes its directory.
            raise UsageError(f"roots[{number}] must be an absolute path, such as Path(...).resolve(), or a file:// URI")
        root = models.Root(Path(os.fsdecode(path)).as_uri())
    else:
        raise UsageError(f"roots[{number}] must be a path, a file: URI or a Root, got {type(given).__name__}")
    if not root.uri.startswith("file://"):
        raise UsageError(f"roots[{number}]: the URI must begin with file://")
    try:
        file_path(root.uri)
    except PathRefused as error:
        raise UsageError(f"roots[{number}]: {error.message}; use Path(...).resolve()") from None
    return root
