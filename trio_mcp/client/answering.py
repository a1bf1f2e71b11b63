"""What a client offers its server: its model, the answers of its user, its roots.

An `Answering` holds the callbacks of one client and turns a server's question into the answer that the revision wants.
It does not know how the question came: as a request of its own in the legacy era (`answer`), or among others in an
input-required result in the modern one (`answer_all`).  What was not offered is not declared, and is refused.

| A callback for | is given | and returns |
|---|---|---|
| sampling | `SamplingRequest` | a `CreateMessageResult`, `(text, model)`, or `Declined` |
| elicitation | `FormElicitationRequest` | the values, or `Accepted` with them, `Declined`, None or `Dismissed` |
| elicitation_url | `UrlElicitationRequest` | True or `Accepted`, False or `Declined`, None or `Dismissed` |
| roots | nothing | the roots |

Each may be `async def`, or a plain `def`, which runs in the loop as it is and must not block.  Up to `Limits.questions`
may be at work at once; further questions wait their turn, up to `Limits.questions_waiting`, and beyond are refused.  A
callback that calls the server, which asks again, keeps its place meanwhile.  A callback is cancelled when its question
is taken back.

Who is to blame: what the server asks wrongly is answered with -32602, by a `RequestError`.  What a callback answers
wrongly is never sent: `UsageError` says what does not fit, and where, but not what stood there.  What a
callback raises leaves as it is; a `RequestError` is an answer, and any other the caller of `answer` makes one of.

Forms: values are a mapping by field, or an object of a dataclass or attrs class with these fields.  A field for which
the user gave nothing gets its default.  None says that it is to be left out all the same.

Pages: the callback asks for consent, and it, not this package, opens the page, somewhere that the client and its model
cannot look into.  Nothing is fetched, before or after (elic-38 to elic-40).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import attrs
import trio

from trio_mcp.client.asked import AnswerForm, FormElicitationRequest, SamplingRequest, UrlElicitationRequest, host_of
from trio_mcp.client.caller import too_many_questions
from trio_mcp.core import codec, forms, models
from trio_mcp.core.content import Model, TextContent, ToolUseContent, well_formed
from trio_mcp.core.elicitation import Accepted, Declined, Dismissed
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
from trio_mcp.core.jsonrpc import JsonObject, Limits
from trio_mcp.core.revisions import Revision, Role, missing_capabilities
from trio_mcp.core.rounds import Question
from trio_mcp.core.sampling import check_sampling
from trio_mcp.core.schema.self_described import describes_itself
from trio_mcp.core.schema.writing import to_json_value
from trio_mcp.core.terms import Terms
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.paths import PathRefused, file_path
from trio_mcp.transport.workers import contained

__all__ = [
    "Answering",
    "FormAnswer",
    "GivenRoots",
    "OnElicitation",
    "OnElicitationUrl",
    "OnSampling",
    "PageAnswer",
    "RootLike",
    "SamplingAnswer",
]

_log = logging.getLogger("trio_mcp")

T = TypeVar("T")

_REJECTED = -1  # samp-05, samp-06: "User rejected sampling request"

# Questions of one round.  A wizard asks a dozen; each is a task here, and a dialogue before somebody's eyes.
_QUESTIONS = 100

# Characters of an exception that another error repeats; all of it is chained.
_REASON = 200

# Pages that were agreed to and whose end was not told.  Most servers never tell it; the oldest is forgotten.
_PAGES = 100


class _Dataclass(Protocol):
    """An object of any dataclass, as type checkers know it."""

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
    """See the head of this file.

    Raises `UsageError` for `sampling_tools` without `sampling`, what cannot be called, and what is no root.
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
        self._turns = _CallbackQueue(limits or Limits())
        given = {"sampling": sampling, "elicitation": elicitation, "elicitation_url": elicitation_url}
        for name, callback in given.items():
            if callback is not None and not callable(callback):
                raise UsageError(f"{name} is a callback, not {type(callback).__name__}")
        if sampling_tools and sampling is None:
            raise UsageError("sampling_tools says what the sampling callback can do, and there is none")
        self._sampling = sampling
        self._elicitation = elicitation
        self._elicitation_url = elicitation_url
        self._roots = None if roots is None else _kept(roots)
        self._pages: dict[str | None, UrlElicitationRequest] = {}  # by elicitation id, oldest first

        self.capabilities: JsonObject = {}
        """What was offered and nothing else, for an `Offer`: for the newest revision that knows it."""
        if sampling is not None:
            self.capabilities["sampling"] = {"tools": {}} if sampling_tools else {}
        modes = {"form": elicitation is not None, "url": elicitation_url is not None}
        if any(modes.values()):  # elic-11
            self.capabilities["elicitation"] = {mode: {} for mode, offered in modes.items() if offered}
        if roots is not None:
            self.capabilities["roots"] = {"listChanged": True}

    async def answer(self, method: str, params: JsonObject, terms: Terms) -> JsonObject:
        """The result of a request of the server, as its revision writes it.

        Raises `RequestError` for what is refused, with the code to refuse it by, `UsageError` for what a
        callback should not have answered, and what a callback raises.
        """
        revision = terms.revision
        row = revision.request(Role.SERVER, method) or revision.input_requests.get(method)
        ask = self._ASKS.get(method)
        if row is None or ask is None:
            raise RequestError(METHOD_NOT_FOUND, f"{shown(method)} is nothing that a client of {revision} is asked")
        missing = missing_capabilities(revision, row, params, revision.declarable(Role.CLIENT, self.capabilities))
        if missing:
            # As in `Session`: without its capability the method does not exist (samp-34, root-05), and a mode or a
            # parameter that was not declared is a wrong one (elic-34, samp-30).
            code = METHOD_NOT_FOUND if missing[0] == row.needs else INVALID_PARAMS
            why = f"{method} needs the client capability {'.'.join(missing[0])}, which was not declared"
            raise RequestError(code, why)
        async with self._turns:
            return codec.to_json(await ask(self, params, terms), revision)

    async def answer_all(
        self, questions: Sequence[Question], terms: Terms, abandon: Callable[[str, str], McpError]
    ) -> dict[str, JsonObject]:
        """The answers to one round, by key.  They are worked on together.

        When one cannot be given the others are cancelled, and what `abandon(key, why)` makes of it is raised (see
        `Rounds.abandon`), with what went wrong as its cause.  Raises `RemoteProtocolError` for more questions than
        anybody asks.
        """
        if len(questions) > _QUESTIONS:
            why = f"the server asks {len(questions)} questions at once; no more than {_QUESTIONS} are answered"
            raise RemoteProtocolError(why)
        answers: dict[str, JsonObject] = {}
        failures: list[tuple[Question, Exception]] = []

        async def answer(question: Question) -> None:
            try:
                answers[question.key] = await self.answer(question.method, question.params, terms)
            except Exception as error:  # noqa: BLE001  # a callback may raise anything; it is raised below
                failures.append((question, error))
                nursery.cancel_scope.cancel(reason="another question of this round has no answer")

        async with open_nursery(wait=True) as nursery:
            for each in questions:
                nursery.start_soon(answer, each, name=f"the server asks: {each.method}")
        if not failures:
            return answers
        (question, error), *later = failures
        for other, failure in later:  # while it was being cancelled: told, but not the reason
            _log.error("the callback for %s has failed while it was cancelled", other.method, exc_info=failure)
        raise abandon(question.key, _why_not(question, error)) from error

    def set_roots(self, roots: GivenRoots) -> bool:
        """Expose these from now on.  Whether they may be others than before, so that servers of the legacy era are to
        be sent `notifications/roots/list_changed`; the modern one asks again each time.

        Raises `UsageError` for what is no root, and if roots were not offered from the start.
        """
        if self._roots is None:
            raise UsageError("the server was told that there are no roots; offer roots=[] from the start")
        before, self._roots = self._roots, _kept(roots)
        return callable(before) or callable(self._roots) or before != self._roots

    def finished(self, params: JsonObject) -> UrlElicitationRequest | None:
        """Which page `notifications/elicitation/complete` is about, once; None for what is not, or no longer, known.

        A page is known from the moment the callback sees it, for it may be visited before the callback has returned,
        until it is finished or was not agreed to.
        """
        id = params.get("elicitationId")
        return self._pages.pop(id, None) if isinstance(id, str) else None  # elic-23

    # One for each method.

    async def _sample(self, params: JsonObject, terms: Terms) -> models.CreateMessageResult:
        with _blaming_the_server("sampling/createMessage"):
            asked = codec.from_json(models.CreateMessageParams, params, strict=True)  # samp-07, samp-20
            if not _knows(terms.revision, "sampling", "tools"):
                asked = attrs.evolve(asked, tools=None, tool_choice=None)  # there they mean nothing
            # samp-14, samp-15, samp-32: what our own servers could not ask is not to be asked of our clients.
            check_sampling(well_formed(asked.messages))
            if asked.max_tokens < 1:
                raise UsageError("max_tokens must be at least 1")
        assert self._sampling is not None  # or it would not have been declared
        said = await _called(self._sampling, SamplingRequest(asked, _server(terms)))
        if isinstance(said, Declined | Dismissed):
            raise RequestError(_REJECTED, "the user rejected the sampling request")
        result = _sampled(said)
        _check_use_of_tools(asked, result)
        try:  # samp-07: read as strictly as a server would
            codec.from_json(models.CreateMessageResult, codec.to_json(result, terms.revision), strict=True)
        except RemoteProtocolError as error:
            raise UsageError(f"the sampling callback returned no answer: {error}") from None
        return result

    async def _elicit(self, params: JsonObject, terms: Terms) -> forms.ElicitResult:
        if params.get("mode") == "url" and _knows(terms.revision, "elicitation", "url"):
            return await self._visit(params, terms)
        with _blaming_the_server("elicitation/create"):
            asked = codec.from_json(forms.ElicitFormParams, params)  # elic-15: without a mode, too
            form = AnswerForm(params["requestedSchema"])
        assert self._elicitation is not None  # or it would not have been declared
        said = await _called(self._elicitation, FormElicitationRequest(asked, _server(terms), form.defaults))
        if said is None or isinstance(said, Dismissed):
            return forms.ElicitResult("cancel")
        if isinstance(said, Declined):
            return forms.ElicitResult("decline")
        return forms.ElicitResult("accept", form.fill_in(_values(said.value if isinstance(said, Accepted) else said)))

    async def _visit(self, params: JsonObject, terms: Terms) -> forms.ElicitResult:
        """elic-51: the answer has no content, ever."""
        told = terms.revision.notification(Role.SERVER, "notifications/elicitation/complete") is not None
        with _blaming_the_server("elicitation/create"):
            asked = codec.from_json(forms.ElicitUrlParams, params)
            page = UrlElicitationRequest(asked, _server(terms), host_of(asked.url))
            if told and asked.elicitation_id is None:  # elic-18
                raise RemoteProtocolError("ElicitUrlParams: elicitationId: missing")
        assert self._elicitation_url is not None  # or it would not have been declared
        with _PageVisit(self._pages, page if told else None) as visit:
            said = await _called(self._elicitation_url, page)
            if said is True or isinstance(said, Accepted):
                visit.agreed = True
                return forms.ElicitResult("accept")
        if said is False or isinstance(said, Declined):
            return forms.ElicitResult("decline")
        if said is None or isinstance(said, Dismissed):
            return forms.ElicitResult("cancel")
        wanted = "True, False, Accepted, Declined, Dismissed or None"
        raise UsageError(f"the elicitation_url callback returns {wanted}, not {_kind_of(said)}")

    async def _list_roots(self, params: JsonObject, terms: Terms) -> models.ListRootsResult:
        roots = self._roots
        assert roots is not None  # or it would not have been declared
        if callable(roots):  # root-07: who gives them decides anew each time
            roots = _checked(await _called(roots))
        return models.ListRootsResult(roots)

    _ASKS: ClassVar[Mapping[str, Callable[[Any, JsonObject, Terms], Awaitable[Model]]]] = {
        "sampling/createMessage": _sample,
        "elicitation/create": _elicit,
        "roots/list": _list_roots,
    }


class _CallbackQueue:
    """As many at work as may be; the others wait in order of arrival.

    Entering raises `RequestError` if too many wait already.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._working = 0
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        limits = self._limits
        if self._working < limits.questions:
            self._working += 1
        elif self._working and len(self._waiting) < limits.questions_waiting:
            await self._waiting.park()  # until somebody leaves, and hands over
        else:
            raise too_many_questions(limits)

    async def __aexit__(self, *_: object) -> None:
        if self._waiting:
            self._waiting.unpark()
        else:
            self._working -= 1


async def _called(callback: Callable[..., T | Awaitable[T]], *args: Any) -> T:
    async def call() -> T:
        said = callback(*args)
        return await said if inspect.isawaitable(said) else said

    return await contained(call, name_of(callback))


def _kind_of(said: object) -> str:
    # Declined for Declined() is easily written, and "type" would not say so.
    return f"the class {said.__name__}" if isinstance(said, type) else type(said).__name__


def _why_not(question: Question, error: Exception) -> str:
    """Why a question has no answer, for whoever made the call that it belongs to."""
    if isinstance(error, RequestError):
        return error.message  # its code is for the server, which is not told
    if isinstance(error, UsageError):
        return str(error)
    return f"the callback for {question.method} has failed: {shown(error, _REASON)}"


@contextlib.contextmanager
def _blaming_the_server(method: str) -> Iterator[None]:
    """What is wrong with a question is told the server: with -32602, and the name of the field."""
    try:
        yield
    except (RemoteProtocolError, UsageError) as error:
        raise RequestError(INVALID_PARAMS, f"{method}: {error}") from None


def _knows(revision: Revision, capability: str, member: str) -> bool:
    """Whether clients of `revision` can declare this member of a capability."""
    rule = revision.capabilities[Role.CLIENT].get(capability)
    return rule is not None and member in (rule.keys or ())


def _server(terms: Terms) -> models.Implementation | None:
    if terms.identity is None:
        return None
    try:
        return codec.from_json(models.Implementation, dict(terms.identity))
    except RemoteProtocolError:  # meta-14: for display, and this one cannot be displayed
        return None


# Forms


def _values(said: object) -> Mapping[str, Any]:
    if isinstance(said, Mapping):
        return said
    kind = type(said)
    has_fields = dataclasses.is_dataclass(kind) or attrs.has(kind) or describes_itself(kind)
    values = to_json_value(said) if has_fields else None
    if not isinstance(values, dict):
        wanted = "the values by field, an object with those fields, Accepted, Declined, Dismissed or None"
        raise UsageError(f"the elicitation callback returns {wanted}, not {_kind_of(said)}")
    return values


# Sampling


def _sampled(said: object) -> models.CreateMessageResult:
    if isinstance(said, models.CreateMessageResult):
        return said
    if isinstance(said, tuple) and len(said) == 2 and all(isinstance(part, str) for part in said):
        text, model = said
        return models.CreateMessageResult("assistant", TextContent(text), model)
    wanted = "a CreateMessageResult, (text, model) or Declined"  # not the text alone: servers are told who said it
    raise UsageError(f"the sampling callback returns {wanted}, not {_kind_of(said)}")


# "Model MUST use at least one tool before completing": it has completed, unless something stopped it.
_COMPLETED = (None, "endTurn", "stopSequence", "toolUse")


def _check_use_of_tools(asked: models.CreateMessageParams, result: models.CreateMessageResult) -> None:
    """samp-16: a server that has given no tool for use can do nothing with the use of one."""
    mode = asked.tool_choice.mode if asked.tool_choice is not None else None
    usable = {tool.name for tool in well_formed(asked.tools or ())} if mode != "none" else set()
    used = [block.name for block in result.blocks if isinstance(block, ToolUseContent)]
    for name in used:
        if name not in usable:
            raise UsageError(f"the sampling callback uses {name!r}, which is no tool that may be used here")
    if mode == "required" and usable and not used and result.stop_reason in _COMPLETED:
        raise UsageError("the sampling callback uses no tool, though toolChoice is 'required'")


# Pages


class _PageVisit:
    """While the user is asked whether to visit `page`, and, if that was `agreed`, until it is told to be finished.

    `page` is None where that is never told.
    """

    __slots__ = ("_page", "_pages", "agreed")

    def __init__(self, pages: dict[str | None, UrlElicitationRequest], page: UrlElicitationRequest | None) -> None:
        self._pages = pages
        self._page = page
        self.agreed = False

    def __enter__(self) -> _PageVisit:
        if self._page is not None:  # elic-55: the id is only ever compared
            self._pages[self._page.params.elicitation_id] = self._page
            if len(self._pages) > _PAGES:
                del self._pages[next(iter(self._pages))]
        return self

    def __exit__(self, *_: object) -> None:
        if not self.agreed and self._page is not None:
            id = self._page.params.elicitation_id
            if self._pages.get(id) is self._page:
                del self._pages[id]


# Roots

_Kept: TypeAlias = tuple[models.Root, ...] | Callable[[], Sequence[RootLike] | Awaitable[Sequence[RootLike]]]


def _kept(roots: GivenRoots) -> _Kept:
    return roots if callable(roots) else _checked(roots)


def _checked(roots: object) -> tuple[models.Root, ...]:
    if isinstance(roots, str | bytes) or not isinstance(roots, Sequence):
        raise UsageError(f"roots are a sequence of paths, file: URIs or Root, not {type(roots).__name__}")
    return tuple(_root(number, each) for number, each in enumerate(roots))


def _root(number: int, given: object) -> models.Root:
    """A root that is exposed.  root-04: its URI begins with file://; root-06: and climbs nowhere, however encoded."""
    if not isinstance(given, models.Root | str | os.PathLike):
        raise UsageError(f"roots[{number}] must be a path, a file: URI or a Root, not {type(given).__name__}")
    root = given if isinstance(given, models.Root) else models.Root(_uri(number, given))
    if not root.uri.startswith("file://"):
        raise UsageError(f"roots[{number}]: the URI of a root begins with file://")
    try:
        file_path(root.uri)
    except PathRefused as error:
        raise UsageError(f"roots[{number}]: {error.message}; Path(...).resolve() is a root") from None
    return root


def _uri(number: int, given: str | os.PathLike[str]) -> str:
    path = os.fspath(given)
    if isinstance(given, str) and given.startswith("file:"):
        return given
    if not os.path.isabs(path):
        # A relative one would mean another directory when the program has changed its own.
        raise UsageError(f"roots[{number}] must be an absolute path, as Path(...).resolve() is, or a file:// URI")
    return Path(os.fsdecode(path)).as_uri()
