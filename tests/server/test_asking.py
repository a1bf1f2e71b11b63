"""Questions of handlers to the client, from the handler to the wire and back, in every revision.

The same handlers run in all revisions.  `KINDS` has the kinds of questions, the first revision of each, and the answer
of the client.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from tests.http.client import response
from tests.http.served import bearer, by_token, served
from tests.requirements import req
from tests.server.raw_client import (
    CANCELLED,
    CAPABILITIES,
    CLIENT_INFO,
    MESSAGE,
    PROGRESS,
    REVISION_NAMES,
    ErrorResponse,
    RawClient,
    connected,
    every_revision,
    legacy,
    modern,
    since,
)
from tests.server.wire_stub import WireStub, session_of
from trio_mcp import Context, Elicit, ElicitUrl, InputRequired, ListRoots, RequestError, Sample, Server, UsageError
from trio_mcp.core import LOG_LEVELS, MAX_ROUNDS, ModelPreferences, Notification, Request, Response, Tool
from trio_mcp.errors import NotDeclared, NotInThisRevision, SessionClosed, UrlElicitationRequired
from trio_mcp.server import Inquiry

Object = dict[str, Any]
LATEST = REVISION_NAMES[-1]


@dataclass
class Size:
    size: int


ACCEPTED = {"action": "accept", "content": {"size": 3}}
SAMPLED: Object = {"role": "assistant", "content": {"type": "text", "text": "six"}, "model": "m"}
HOME: Object = {"roots": [{"uri": "file:///home", "name": "home"}]}
PAGE = "https://shop.example/visit?order=7"


@dataclass
class Kind:
    """One kind of question."""

    ask: Callable[[Context], Awaitable[object]]
    method: str
    answer: Object
    read: str
    """A part of the answer as the handler reads it."""
    needs: Object
    """The capabilities that a client must declare."""
    bad: Object
    """An invalid answer."""
    place: str
    """The path of the fault, which the error names."""
    since: str = REVISION_NAMES[0]
    instead: Object = field(default_factory=dict)
    """The capabilities of a client that supports all kinds except this one."""

    def known(self, revision: str) -> bool:
        return revision >= self.since


KINDS: Mapping[str, Kind] = {
    "form": Kind(
        lambda ctx: ctx.elicit("Which size?", Size),
        "elicitation/create",
        ACCEPTED,
        "Accepted(value=Size(size=3))",
        {"elicitation": {"form": {}}},
        {"action": "accept", "content": {"size": "three"}},
        "content/size",
        "2025-06-18",
        {"roots": {}, "sampling": {}},
    ),
    "url": Kind(
        lambda ctx: ctx.elicit_url("Please pay.", PAGE),
        "elicitation/create",
        {"action": "accept"},
        "Accepted(value=None)",
        {"elicitation": {"url": {}}},
        {"action": "perhaps"},
        "action",
        "2025-11-25",
        {"elicitation": {}, "roots": {}, "sampling": {}},
    ),
    "sample": Kind(
        lambda ctx: ctx.sample("Say a number", max_tokens=5),
        "sampling/createMessage",
        SAMPLED,
        "text='six'",
        {"sampling": {}},
        {"role": "assistant", "content": {"type": "text"}, "model": "m"},
        "content",
        instead={"roots": {}, "elicitation": {}},
    ),
    "roots": Kind(
        lambda ctx: ctx.roots(),
        "roots/list",
        HOME,
        "file:///home",
        {"roots": {}},
        {"roots": "none"},
        "roots",
        instead={"sampling": {}, "elicitation": {}},
    ),
}
PARAMS: Mapping[str, Callable[[str], Object]] = {
    "tools/call": lambda name: {"name": name},
    "prompts/get": lambda name: {"name": name},
    "resources/read": lambda name: {"uri": f"ask://{name}"},
}
each_kind = pytest.mark.parametrize("name", KINDS)
EXISTING = [(revision, name) for name in KINDS for revision in REVISION_NAMES if KINDS[name].known(revision)]
each_existing_kind = pytest.mark.parametrize(("revision", "name"), EXISTING)
each_existing_legacy_kind = pytest.mark.parametrize(
    ("revision", "name"), [each for each in EXISTING if each[0] != LATEST]
)
each_elicitation = pytest.mark.parametrize(
    ("revision", "name"), [each for each in EXISTING if each[1] in ("form", "url")]
)
each_method = pytest.mark.parametrize("method", PARAMS)


def asking_server(**options: Any) -> Server:
    """A server with a tool, a prompt and a resource for each kind, which ask a question of this kind."""
    server = Server("asking", **options)
    for name, kind in KINDS.items():
        handler = _handler_that_asks(kind.ask)
        server.tool(name=name, structured=False)(handler)
        server.prompt(name=name)(handler)
        server.resource(f"ask://{name}", name=name)(handler)
    return server


def _handler_that_asks(ask: Callable[[Context], Awaitable[object]]) -> Callable[[Context], Awaitable[str]]:
    async def handler(ctx: Context) -> str:
        return repr(await ask(ctx))

    return handler


def tool(handler: Callable[..., Any], **options: Any) -> Server:
    """A server with one tool, "it"."""
    server = Server("one")
    server.tool(name="it", **options)(handler)
    return server


IT = {"name": "it"}


def text_of(result: Object) -> str:
    """The text of a result, of any of the three methods."""
    if "messages" in result:
        result = {"content": [result["messages"][0]["content"]]}
    (content,) = result.get("content") or result["contents"]
    assert isinstance(content["text"], str)
    return content["text"]


async def failure_text(wire: RawClient, method: str, params: Object) -> str:
    """The failure of a call as a client sees it: an error response, or a tool result with `isError`."""
    try:
        result = await wire.call(method, params)
    except ErrorResponse as error:
        return f"{error.code} {error.message}"
    assert result["isError"] is True
    return text_of(result)


def error_prefix(method: str) -> str:
    return "" if method == "tools/call" else "-32603 "


# One question.


@pytest.mark.contract(name=("form", "sample", "roots"))
@req("mrtr-01", "mrtr-03", "mrtr-06", "mrtr-12", "elic-47")
@every_revision
@each_method
@each_kind
async def test_a_handler_asks_in_one_line_and_gets_the_answer(
    revision: str, method: str, name: str, autojump_clock: MockClock
) -> None:
    kind = KINDS[name]
    async with connected(asking_server(), revision, answers={kind.method: lambda params: kind.answer}) as wire:
        if kind.known(revision):
            assert kind.read in text_of(await wire.call(method, PARAMS[method](name)))
            assert [asked for asked, _ in wire.asked] == [kind.method]
        else:
            assert f"does not exist in {revision}" in await failure_text(wire, method, PARAMS[method](name))
            assert not wire.asked


@pytest.mark.contract
@req("mrtr-13", "meta-16", "elic-12", "root-11")
@each_existing_kind
@each_method
async def test_a_client_without_the_capability_gets_an_error_that_names_it(
    revision: str, method: str, name: str, autojump_clock: MockClock
) -> None:
    kind = KINDS[name]
    async with connected(asking_server(), revision, capabilities=kind.instead) as wire:
        if revision == LATEST:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call(method, PARAMS[method](name))
            assert (caught.value.code, caught.value.data) == (-32021, {"requiredCapabilities": kind.needs})
        else:
            lacks = ".".join(("elicitation", *kind.needs.get("elicitation", ()))) if "elic" in kind.method else name
            assert "client capability" in (said := await failure_text(wire, method, PARAMS[method](name)))
            assert said.startswith(error_prefix(method))
            assert lacks.split(".")[0] in said
        assert not wire.asked
        assert not [message for message in wire.messages if "method" in message]


@pytest.mark.parametrize("name", ["form", "sample", "roots"])
@every_revision
async def test_a_handler_may_catch_the_error_of_a_missing_capability(
    revision: str, name: str, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        try:
            return repr(await KINDS[name].ask(ctx))
        except NotInThisRevision as error:
            return error.revision
        except NotDeclared as error:
            return error.capability[0]

    async with connected(tool(it), revision, capabilities={}) as wire:
        capability = next(iter(KINDS[name].needs))
        expected = capability if KINDS[name].known(revision) else revision
        assert text_of(await wire.call("tools/call", IT)) == expected


@pytest.mark.contract
@each_existing_legacy_kind
@each_method
async def test_an_error_of_the_client_is_raised_in_the_handler(
    revision: str, method: str, name: str, autojump_clock: MockClock
) -> None:
    kind = KINDS[name]
    caught = []

    async def it(ctx: Context) -> str:
        try:
            await kind.ask(ctx)
        except RequestError as error:
            caught.append((error.code, error.message, error.data))
        return "went on"

    server = asking_server()
    server.tool(it)

    def refuse(params: Object) -> Object:
        raise ErrorResponse(-1, "User rejected", {"why": "no"})

    async with connected(server, revision, answers={kind.method: refuse}) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "went on"
        assert caught == [(-1, "User rejected", {"why": "no"})]
        # A handler that does not catch it fails.  The client's code is not passed on: it is not about the call.
        said = await failure_text(wire, method, PARAMS[method](name))
        assert said.startswith(error_prefix(method))
        assert "User rejected" in said


@req("elic-08", "elic-45", "samp-07", "mrtr-22", "mrtr-23")
@each_existing_kind
async def test_an_invalid_answer_is_refused_with_the_path_of_the_fault(
    revision: str, name: str, autojump_clock: MockClock
) -> None:
    kind = KINDS[name]
    server = asking_server()
    answers = iter([kind.bad, kind.answer])
    async with connected(server, revision, answers={kind.method: lambda params: next(answers)}) as wire:
        said = await failure_text(wire, "tools/call", {"name": name})
        assert kind.place in said
        assert "three" not in said
        assert "perhaps" not in said
        assert said.startswith(f"-32602 inputResponses['{name}']") is (revision == LATEST)
        assert server.statistics().parked == (revision == LATEST)  # a retry with a valid answer is possible


@req("mrtr-22", "mrtr-24")
@each_existing_kind
async def test_an_answer_before_the_question_saves_the_round(
    revision: str, name: str, autojump_clock: MockClock
) -> None:
    kind, asked = KINDS[name], []

    def answer(params: Object) -> Object:
        asked.append(params)
        return kind.answer

    early = {"name": name, "inputResponses": {name: kind.answer, "unasked": {"action": "accept"}}}
    async with connected(asking_server(), revision, answers={kind.method: answer}) as wire:
        assert kind.read in text_of(await wire.call("tools/call", early))
        # Consent to a page counts only after the user has seen its URL.  In the legacy revisions answers are only
        # responses to requests.
        assert len(asked) == (revision != LATEST or name == "url")


@req("mrtr-22", "mrtr-25")
@modern
@pytest.mark.parametrize("early", [None, 7, {"form": 7}, {"form": None}, {"model": SAMPLED}])
async def test_a_question_with_an_unusable_early_answer_is_asked(
    revision: str, early: Any, autojump_clock: MockClock
) -> None:
    params = {"name": "form", "inputResponses": early}
    async with connected(asking_server(), revision, answers={"elicitation/create": lambda params: ACCEPTED}) as wire:
        assert (await wire.call("tools/call", params, rounds=False))["resultType"] == "input_required"
        assert "size=3" in text_of(await wire.call("tools/call", params))


@req("mrtr-23")
@modern
async def test_an_early_answer_that_does_not_fit_is_refused(revision: str, autojump_clock: MockClock) -> None:
    async with connected(asking_server(), revision) as wire:
        said = await failure_text(wire, "tools/call", {"name": "form", "inputResponses": {"form": KINDS["form"].bad}})
        assert said.startswith("-32602 inputResponses['form']: the answer does not fit the form: content/size")


@req("mrtr-24")
@modern
async def test_answers_in_a_retry_do_not_answer_later_questions(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        return f"{await ctx.elicit('Which size?', Size)} {await ctx.elicit('And now?', Size)}"

    async with connected(tool(it), revision) as wire:
        first = await wire.call("tools/call", IT, rounds=False)
        given = {"form": ACCEPTED, "form-2": ACCEPTED}
        again = {**IT, "inputResponses": given, "requestState": first["requestState"]}
        second = await wire.call("tools/call", again, rounds=False)
        assert [*second["inputRequests"]] == ["form-2"]


@modern
async def test_an_early_answer_is_kept_while_the_rest_is_asked_for(revision: str, autojump_clock: MockClock) -> None:
    asked: list[Object] = []

    async def it(ctx: Context) -> str:
        got = await ctx.ask(a=Elicit("a?", Size), b=Elicit("b?", Size))
        return f"{got} {await ctx.elicit('again?', Size)}"

    def answer(params: Object) -> Object:
        asked.append(params["message"])
        return ACCEPTED

    early = {"a": {"action": "decline"}}
    async with connected(tool(it), revision, answers={"elicitation/create": answer}) as wire:
        said = text_of(await wire.call("tools/call", {**IT, "inputResponses": early}))
        assert "'a': Declined(), 'b': Accepted(value=Size(size=3))" in said
        assert asked == ["b?", "again?"]


@pytest.mark.contract
@req("elic-49", "elic-50", "elic-59")
@each_elicitation
@pytest.mark.parametrize(
    ("action", "outcome"), [("accept", "Accepted"), ("decline", "Declined()"), ("cancel", "Dismissed()")]
)
async def test_accept_decline_and_cancel_have_different_results(
    revision: str, name: str, action: str, outcome: str, autojump_clock: MockClock
) -> None:
    kind = KINDS[name]
    # The content of a refusal is ignored, even if it is invalid.
    content = {} if name == "url" else {"content": {"size": 3 if action == "accept" else "no size"}}
    async with connected(
        asking_server(), revision, answers={kind.method: lambda params: {"action": action, **content}}
    ) as wire:
        assert outcome in text_of(await wire.call("tools/call", {"name": name}))


@req("elic-13", "elic-16", "elic-18", "elic-19", "elic-56", "elic-58")
@since("2025-06-18")
async def test_a_question_has_only_the_fields_of_its_revision(revision: str, autojump_clock: MockClock) -> None:
    answers = {"elicitation/create": lambda params: {"action": "decline"}}
    async with connected(asking_server(), revision, answers=answers) as wire:
        await wire.call("tools/call", {"name": "form"})
        (form,) = (params for _, params in wire.asked)
        assert form["message"] == "Which size?"
        assert form["requestedSchema"]["properties"] == {"size": {"type": "integer"}}
        assert form.get("mode", "form") == "form"
        if revision == "2025-06-18":
            return
        wire.asked.clear()
        for _ in range(3):
            await wire.call("tools/call", {"name": "url"})
        ids = {params.pop("elicitationId", None) for _, params in wire.asked}
        assert [params for _, params in wire.asked] == [{"mode": "url", "message": "Please pay.", "url": PAGE}] * 3
        assert ids == {None} if revision == LATEST else len(ids - {None}) == 3


@req("samp-12", "samp-13")
@since("2025-11-25")
@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"tools": [Tool("t", {"type": "object"})]}, "tools"),
        ({"include_context": "thisServer"}, "context"),
        ({"include_context": "none"}, None),
        ({"model_preferences": ModelPreferences()}, None),
    ],
)
async def test_sampling_uses_only_the_declared_capabilities(
    revision: str, options: Object, lacking: str | None, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        try:
            return repr(await ctx.sample("Say a number", max_tokens=5, **options))
        except NotDeclared as error:
            return ".".join(error.capability)

    answers = {"sampling/createMessage": lambda params: SAMPLED}
    for capabilities in ({"sampling": {}}, {"sampling": {"tools": {}, "context": {}}}):
        full = bool(capabilities["sampling"])
        async with connected(tool(it), revision, capabilities=capabilities, answers=answers) as wire:
            said = text_of(await wire.call("tools/call", IT))
            assert ("six" in said) is (full or lacking is None)
            assert ("six" in said) or said == f"sampling.{lacking}"
            assert len(wire.asked) == ("six" in said)


@legacy
async def test_a_question_before_the_end_of_the_handshake_is_an_error(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"roots/list": lambda _: {"roots": []}}
    async with connected(asking_server(), revision, opened=False, answers=answers) as wire:
        opening = {"protocolVersion": revision, "capabilities": CAPABILITIES[revision], "clientInfo": CLIENT_INFO}
        await wire.call("initialize", opening)
        said = await failure_text(wire, "tools/call", PARAMS["tools/call"]("roots"))
        assert said.endswith("nothing can be asked before the client has sent notifications/initialized")
        assert not caplog.text
        await wire.notify("notifications/initialized")
        assert not (await wire.call("tools/call", PARAMS["tools/call"]("roots"))).get("isError")


@modern
async def test_a_question_in_a_method_without_questions_is_an_error(revision: str, autojump_clock: MockClock) -> None:
    server = asking_server()

    @server.prompt
    async def greet(name: str) -> str:
        return name

    async def questioning(ctx: Context, request: Any, call_next: Any) -> Any:
        if request.method in ("tools/list", "completion/complete"):
            await ctx.roots()
        return await call_next(request)

    server._catalog.middleware = (questioning,)
    server.completion(lambda value: ["x"])
    completion = {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "name", "value": "x"}}
    async with connected(server, revision) as wire:
        for method, params in [("tools/list", {}), ("completion/complete", completion)]:
            said = await failure_text(wire, method, params)
            assert said.startswith("-32603 ")
            assert f"input_required as the answer to {method} does not exist in {revision}" in said
        assert not wire.asked
        assert server.statistics().parked == 0


# Several questions at the same time.


@pytest.mark.contract
@every_revision
async def test_several_questions_are_asked_at_once_and_answered_in_any_order(
    revision: str, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        got = await ctx.ask(
            first=Sample("a", max_tokens=1), home=ListRoots(), last=Sample("b", max_tokens=1, system_prompt="be brief")
        )
        return f"{list(got)} {got['first'].content.text} {len(got['home'])} {got['last'].content.text}"

    open_, turns = [], itertools.count()
    gates = [trio.Event() for _ in range(3)]

    async def sampled(params: Object) -> Object:
        at = "b" if "systemPrompt" in params else "a"
        open_.append(at)
        if revision != LATEST:
            if len(open_) == 2:
                gates[0].set()
            await gates[0].wait()
            if at == "a":  # the first question is answered last
                await trio.sleep(1)
        return {**SAMPLED, "content": {"type": "text", "text": f"{at}{next(turns)}"}}

    answers = {"sampling/createMessage": sampled, "roots/list": lambda params: HOME}
    async with connected(tool(it), revision, answers=answers) as wire:
        first, last = ("a0", "b1") if revision == LATEST else ("a1", "b0")
        assert text_of(await wire.call("tools/call", IT)) == f"['first', 'home', 'last'] {first} 1 {last}"
        assert sorted(method for method, _ in wire.asked) == ["roots/list", *["sampling/createMessage"] * 2]


@every_revision
async def test_if_one_of_several_questions_fails_no_question_is_sent(revision: str, autojump_clock: MockClock) -> None:
    class Broken(Inquiry[object]):
        method = "roots/list"

        def _params_in(self, revision: Any) -> Object:
            raise ValueError("a mistake of its own")

        def read(self, answer: Object) -> object:
            raise AssertionError

    async def it(ctx: Context, which: str) -> str:
        other = {"undeclared": Sample("a", max_tokens=1), "broken": Broken()}[which]
        with pytest.raises((NotDeclared, ValueError)):
            await ctx.ask(home=ListRoots(), other=other)
        return repr(await ctx.roots())

    answers = {"roots/list": lambda params: HOME}
    async with connected(tool(it), revision, capabilities={"roots": {}}, answers=answers) as wire:
        for which in ("undeclared", "broken"):
            assert "file:///home" in text_of(await wire.call("tools/call", {**IT, "arguments": {"which": which}}))
        assert [method for method, _ in wire.asked] == ["roots/list"] * 2
        assert not wire.noted(CANCELLED)


@every_revision
async def test_a_question_that_is_not_json_is_a_usage_error_and_not_sent(
    revision: str, autojump_clock: MockClock
) -> None:
    class Unwritable(ListRoots):
        def _params_in(self, revision: Any) -> Object:
            return {"what": object()}

    async def it(ctx: Context) -> str:
        with pytest.raises(UsageError):
            await ctx.ask(what=Unwritable())
        return repr(await ctx.roots())

    server = tool(it)
    async with connected(server, revision, answers={"roots/list": lambda params: HOME}) as wire:
        assert "file:///home" in text_of(await wire.call("tools/call", IT))
        assert len(wire.asked) == 1
        assert server.statistics().parked == 0


@since("2025-11-25")
async def test_each_async_method_of_the_context_is_a_checkpoint(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        page = ElicitUrl("Please pay.", PAGE)
        for wait in (
            *(functools.partial(kind.ask, ctx) for kind in KINDS.values()),
            ctx.roots,
            functools.partial(ctx.ask, page=page),
            functools.partial(ctx.completed, page),
            functools.partial(ctx.progress, 1),
            functools.partial(ctx.log, "error", None),
        ):
            with assert_checkpoints():
                await wait()
        with assert_checkpoints():
            assert await ctx.ask() == {}
        return "done"

    answers = {
        "elicitation/create": lambda params: {"action": "decline"},
        "sampling/createMessage": lambda params: SAMPLED,
        "roots/list": lambda params: HOME,
    }
    async with connected(tool(it), revision, answers=answers) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "done"


# Roots.


@pytest.mark.contract
@req("root-08", "root-12", "root-13", "root-15")
@every_revision
@pytest.mark.parametrize("tells", [True, False])
async def test_roots_are_asked_for_once_and_again_when_they_change(
    revision: str, tells: bool, autojump_clock: MockClock
) -> None:
    # root-15: in the modern era there are no notifications of changed roots, even if the client declares them.
    told_of = tells and revision != LATEST
    homes: list[Object] = [HOME]

    async def it(ctx: Context) -> str:
        roots = [await ctx.roots() for _ in range(3)]
        return " ".join(root.uri for root in roots[-1])

    capabilities = {"roots": {"listChanged": True} if tells else {}}
    answers = {"roots/list": lambda params: homes[-1]}
    async with connected(tool(it), revision, capabilities=capabilities, answers=answers) as wire:
        for calls in (1, 2):
            assert text_of(await wire.call("tools/call", IT)) == "file:///home"
            assert len(wire.asked) == (1 if told_of else calls)
        homes.append({"roots": []})  # the root is removed
        await wire.notify("notifications/roots/list_changed")
        assert text_of(await wire.call("tools/call", IT)) == ""
        assert len(wire.asked) == (2 if told_of else 3)


@req("root-12")
@legacy
async def test_roots_that_change_during_the_request_are_not_cached(revision: str, autojump_clock: MockClock) -> None:
    homes = iter([HOME, {"roots": []}])

    async def it(ctx: Context) -> str:
        return str([len(await ctx.roots()) for _ in range(3)])

    async def answer(params: Object) -> Object:
        if len(wire.asked) == 1:
            await wire.notify("notifications/roots/list_changed")
        return next(homes)

    async with connected(tool(it), revision, answers={"roots/list": answer}) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "[1, 0, 0]"
        assert len(wire.asked) == 2


# Pages to visit.


@req("elic-21", "elic-22", "elic-56")
@since("2025-11-25")
async def test_the_client_is_notified_when_its_page_is_completed(revision: str, autojump_clock: MockClock) -> None:
    """Also long after the end of the call.  Other clients are not notified."""
    pages: list[tuple[Context, ElicitUrl]] = []

    async def it(ctx: Context) -> str:
        page = ElicitUrl("Please pay.", PAGE)
        with pytest.raises(UsageError, match="of the context that asked"):
            await ctx.completed(page)
        await ctx.ask(page=page)
        pages.append((ctx, page))
        return str(await ctx.completed(page))

    server = tool(it)
    answers = {"elicitation/create": lambda params: {"action": "accept"}}
    async with server.running(), connected(server, revision, answers=answers) as other:
        await other.call("tools/call", IT)
        other.notes.clear()
        async with connected(server, revision, answers=answers) as wire:
            told = revision == "2025-11-25"
            assert text_of(await wire.call("tools/call", IT)) == str(told)
            assert await pages[1][0].completed(pages[1][1]) is told
            await wait_all_tasks_blocked()
            ids = [params.get("elicitationId") for _, params in wire.asked]
            assert wire.noted("notifications/elicitation/complete") == [{"elicitationId": ids[0]}] * 2 * told
            with pytest.raises(UsageError):
                await pages[0][0].completed(pages[1][1])
        assert await pages[1][0].completed(pages[1][1]) is False  # the client has gone
        assert not other.notes


class _Shop:
    """A server with a handler that requires a payment on a page."""

    def __init__(self) -> None:
        self.server = Server("shop")
        self.paid = False
        self.page = ElicitUrl("Please pay.", PAGE)
        for decorate in (self.server.tool, self.server.prompt, self.server.resource("ask://enter")):
            decorate(self.enter)

    async def enter(self, ctx: Context) -> str:
        if not self.paid:
            raise UrlElicitationRequired(self.page)
        return "inside"

    def pay(self, params: Object) -> Object:
        self.paid = True
        return {"action": "accept"}


@req("elic-26", "elic-27", "elic-28", "elic-56")
@every_revision
@each_method
async def test_a_handler_may_require_a_page_to_be_visited_first(
    revision: str, method: str, autojump_clock: MockClock
) -> None:
    shop = _Shop()
    params = PARAMS[method]("enter")
    async with connected(shop.server, revision, answers={"elicitation/create": shop.pay}) as wire:
        if revision == LATEST:
            assert text_of(await wire.call(method, params)) == "inside"
            assert [asked["url"] for _, asked in wire.asked] == [PAGE]
        elif revision == "2025-11-25":
            with pytest.raises(ErrorResponse) as caught:
                await wire.call(method, params)
            assert caught.value.code == -32042
            page = {"mode": "url", "message": "Please pay.", "url": PAGE, "elicitationId": shop.page.elicitation_id}
            assert caught.value.data == {"elicitations": [page]}
            shop.paid = True
            assert text_of(await wire.call(method, params)) == "inside"
        else:
            said = await failure_text(wire, method, params)
            assert said.startswith(error_prefix(method))
            assert "elicitation/create" in said
            assert f"does not exist in {revision}" in said


@req("elic-12")
@since("2025-11-25")
async def test_a_client_without_url_elicitation_gets_no_page(revision: str, autojump_clock: MockClock) -> None:
    async with connected(_Shop().server, revision, capabilities={"elicitation": {"form": {}}}) as wire:
        if revision == LATEST:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tools/call", {"name": "enter"})
            assert (caught.value.code, caught.value.data) == (
                -32021,
                {"requiredCapabilities": {"elicitation": {"url": {}}}},
            )
        else:
            assert "elicitation.url, which was not declared" in await failure_text(
                wire, "tools/call", {"name": "enter"}
            )
        assert PAGE not in str(wire.messages)


@req("elic-50")
@modern
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_client_that_refuses_a_page_is_not_asked_again(
    revision: str, action: str, autojump_clock: MockClock
) -> None:
    answers = {"elicitation/create": lambda params: {"action": action}}
    async with connected(_Shop().server, revision, answers=answers) as wire:
        said = await failure_text(wire, "tools/call", {"name": "enter"})
        assert said.startswith("-32603 This request needs a page to be visited first")
        assert len(wire.asked) == 1
        assert "elicitationId" not in str(wire.messages)


# Handlers that build their rounds themselves.


@pytest.mark.contract
@req("mrtr-07", "mrtr-15")
@every_revision
@each_method
async def test_a_handler_may_return_questions_and_runs_again_with_the_answers(
    revision: str, method: str, autojump_clock: MockClock
) -> None:
    runs: list[Any] = []

    async def it(ctx: Context) -> Any:
        runs.append((sorted(ctx.answers), ctx.state))
        if "a" not in ctx.answers:
            return InputRequired({"a": Sample("a", max_tokens=1)}, state={"round": 1})
        if "b" not in ctx.answers:
            return InputRequired({"b": Sample("b", max_tokens=1), "home": ListRoots()}, state=["two", None])
        said = [Sample("?", max_tokens=1).read(ctx.answers[key]).content for key in "ab"]
        return f"{said[0].text} {said[1].text} {len(ListRoots().read(ctx.answers['home']))}"  # type: ignore[union-attr]

    server = Server("it")
    server.tool(structured=False)(it)
    server.prompt(it)
    server.resource("ask://it")(it)
    answers = {
        "sampling/createMessage": lambda params: {**SAMPLED, "content": params["messages"][0]["content"]},
        "roots/list": lambda params: HOME,
    }
    async with connected(server, revision, answers=answers) as wire:
        assert text_of(await wire.call(method, PARAMS[method]("it"))) == "a b 1"
        assert runs == [([], None), (["a"], {"round": 1}), (["a", "b", "home"], ["two", None])]
        assert len(wire.asked) == 3
        assert server.statistics().parked == 0


@every_revision
async def test_a_request_state_is_ignored_where_it_is_not_defined(revision: str, autojump_clock: MockClock) -> None:
    async with connected(asking_server(), revision, answers={"roots/list": lambda params: HOME}) as wire:
        junk = {"requestState": "x", "inputResponses": 7}
        assert (await wire.call("tools/list", junk))["tools"]
        if revision != LATEST:
            assert "file:///home" in text_of(await wire.call("tools/call", {"name": "roots", **junk}))


@every_revision
async def test_a_handler_may_ask_for_another_round_without_a_question(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> Any:
        count = ctx.state or 0
        assert isinstance(count, int)
        return InputRequired({}, state=count + 1) if count < 3 else f"after {count}"

    async with connected(tool(it, structured=False), revision) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "after 3"


@every_revision
@pytest.mark.parametrize("questions", [{}, {"home": ListRoots()}])
async def test_endless_rounds_are_stopped(
    revision: str, questions: Mapping[str, Any], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    runs = itertools.count()

    async def it(ctx: Context, stop: int) -> Any:
        return "enough" if next(runs) == stop else InputRequired(questions)

    async with connected(tool(it, structured=False), revision, answers={"roots/list": lambda params: HOME}) as wire:
        arguments = {**IT, "arguments": {"stop": MAX_ROUNDS}}
        assert text_of(await wire.call("tools/call", arguments)) == "enough"
        runs = itertools.count()
        assert "the server's log says why" in await failure_text(wire, "tools/call", {**IT, "arguments": {"stop": -1}})
        assert next(runs) == MAX_ROUNDS + 1
        assert f"has asked {MAX_ROUNDS} times" in str(caplog.records[-1].exc_info)


@every_revision
async def test_returned_questions_are_checked_like_other_questions(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> Any:
        return InputRequired({"a": Sample("a", max_tokens=1, include_context="allServers"), "home": ListRoots()})

    async with connected(tool(it, structured=False), revision, capabilities={"sampling": {}}) as wire:
        if revision == LATEST:
            with pytest.raises(ErrorResponse) as caught:
                await wire.call("tools/call", IT)
            assert (caught.value.code, caught.value.data) == (
                -32021,
                {"requiredCapabilities": {"sampling": {"context": {}}}},
            )
        else:
            lacking = "sampling.context" if revision == "2025-11-25" else "roots"
            assert f"the client capability {lacking}" in await failure_text(wire, "tools/call", IT)
        assert not wire.asked


@every_revision
async def test_answers_to_returned_questions_do_not_answer_later_ones(revision: str, autojump_clock: MockClock) -> None:
    """The two ways of asking have separate keys: both keys are "roots" here."""
    homes = iter([HOME, {"roots": []}])

    async def it(ctx: Context) -> Any:
        if "roots" not in ctx.answers:
            return InputRequired({"roots": ListRoots()})
        now = await ctx.ask(roots=ListRoots())
        return f"{len(ListRoots().read(ctx.answers['roots']))} {len(now['roots'])} {sorted(ctx.answers)}"

    async with connected(
        tool(it, structured=False), revision, answers={"roots/list": lambda params: next(homes)}
    ) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "1 0 ['roots']"


# Threads.


@every_revision
@pytest.mark.parametrize("abandon", [True, False])
async def test_a_handler_in_a_thread_can_ask(revision: str, abandon: bool) -> None:
    def it(ctx: Context) -> str:
        got = [trio.from_thread.run(ctx.roots), trio.from_thread.run(ctx.roots)]
        said = trio.from_thread.run(lambda: ctx.sample("Say a number", max_tokens=5))
        return f"{len(got[1])} {said.content.text}"

    answers = {"roots/list": lambda params: HOME, "sampling/createMessage": lambda params: SAMPLED}
    async with connected(tool(it, abandon_on_cancel=abandon), revision, answers=answers) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "1 six"


# Cancellation in the legacy era.  test_parking has the modern era.


async def wait_until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # the client has no event for a new question, and the clock is a mock
        await trio.sleep(0.01)


@pytest.fixture
def silent() -> Callable[[Object], Awaitable[Object]]:
    """An answer that never comes, as when the user does not react."""

    async def answer(params: Object) -> Object:
        await trio.sleep_forever()
        raise AssertionError

    return answer


@pytest.mark.contract
@legacy
async def test_a_cancelled_call_cancels_its_questions(
    revision: str, silent: Any, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[BaseException] = []

    async def it(ctx: Context) -> str:
        try:
            await ctx.ask(a=Sample("a", max_tokens=1), home=ListRoots(), b=Sample("b", max_tokens=1))
        except BaseException as error:
            ended.append(error)
            raise
        return ""

    answers = {"roots/list": lambda params: HOME, "sampling/createMessage": silent}
    async with connected(tool(it), revision, answers=answers) as wire:
        id = await wire.start("tools/call", IT)
        await wait_until(lambda: len(wire.asked) == 3)
        await wire.cancel(id, "enough")
        await wait_until(lambda: len(wire.noted(CANCELLED)) == 2)
        samples = [message["id"] for message in wire.messages if message.get("method") == "sampling/createMessage"]
        assert [params["requestId"] for params in wire.noted(CANCELLED)] == samples
        assert isinstance(ended[0], trio.Cancelled)
        assert not wire.answered(id)
        assert await wire.call("ping") == {}
    assert not caplog.records


@legacy
async def test_when_one_question_fails_the_others_are_cancelled(
    revision: str, silent: Any, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        with pytest.raises(RequestError, match="no roots"):
            await ctx.ask(home=ListRoots(), a=Sample("a", max_tokens=1))
        return "went on"

    def refuse(params: Object) -> Object:
        raise ErrorResponse(-32603, "no roots")

    async with connected(tool(it), revision, answers={"roots/list": refuse, "sampling/createMessage": silent}) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "went on"
        assert len(wire.noted(CANCELLED)) == 1


@legacy
async def test_a_question_ends_at_the_deadline_of_its_scope(
    revision: str, silent: Any, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        with trio.move_on_after(60):
            await ctx.sample("a", max_tokens=1)
        return repr(await ctx.roots())

    answers = {"roots/list": lambda params: HOME, "sampling/createMessage": silent}
    start = trio.current_time()
    async with connected(tool(it), revision, answers=answers) as wire:
        assert "file:///home" in text_of(await wire.call("tools/call", IT))
        assert len(wire.noted(CANCELLED)) == 1
        assert trio.current_time() == start + 60


@pytest.mark.contract(how=("close",))
@legacy
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_question_ends_with_its_client_and_with_its_call(
    revision: str, how: str, silent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a shield or an abandoned thread keeps the cancellation off."""
    ended: list[str] = []

    async def plain(ctx: Context) -> None:
        try:
            await ctx.sample("a", max_tokens=1)
        except (trio.Cancelled, SessionClosed):  # after a half-close the client may still read: the call goes on
            ended.append("plain")
            raise

    async def shielded(ctx: Context) -> None:
        with trio.CancelScope(shield=True):
            try:
                await ctx.sample("a", max_tokens=1)
            except SessionClosed:
                ended.append("shielded SessionClosed")
            try:
                await ctx.sample("a", max_tokens=1)
            except (UsageError, SessionClosed):
                ended.append("shielded again")

    def threaded(ctx: Context) -> None:
        try:
            trio.from_thread.run(lambda: ctx.sample("a", max_tokens=1))
        except SessionClosed:
            ended.append("threaded SessionClosed")

    server = Server("waiting")
    for handler in (plain, shielded, threaded):
        server.tool(handler)
    with trio.fail_after(60):
        async with connected(server, revision, answers={"sampling/createMessage": silent}) as wire:
            ids = [await wire.start("tools/call", {"name": name}) for name in ("plain", "shielded", "threaded")]
            await wait_until(lambda: len(wire.asked) == 3)
            if how == "cancel":
                for id in ids:
                    await wire.cancel(id)
                await wait_until(lambda: len(wire.noted(CANCELLED)) == 3)
        await wait_until(lambda: len(ended) == 4)
    assert sorted(ended) == [
        "plain", "shielded SessionClosed", "shielded again", "threaded SessionClosed",
    ]  # fmt: skip
    assert not caplog.records


@legacy
async def test_a_call_cancelled_behind_a_shield_asks_no_more_questions(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = trio.Event()

    async def it(ctx: Context) -> str:
        with trio.CancelScope(shield=True):
            await cancelled.wait()
        await ctx.roots()
        raise AssertionError

    async with connected(tool(it), revision) as wire:
        id = await wire.start("tools/call", IT)
        await wait_all_tasks_blocked()
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        cancelled.set()
        await wait_all_tasks_blocked()
        assert not wire.asked
        assert not wire.answered(id)
    assert not caplog.records


@every_revision
async def test_an_abandoned_thread_cannot_ask(revision: str) -> None:
    go_on, failed = threading.Event(), []

    async def it(ctx: Context) -> str:
        def ask() -> None:
            go_on.wait(60)
            try:
                trio.from_thread.run(ctx.roots)
            except SessionClosed as error:
                failed.append(error)

        with trio.move_on_after(0.01):
            await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        return "left"

    with trio.fail_after(60):
        async with connected(tool(it), revision, capabilities={"roots": {}}) as wire:
            assert text_of(await wire.call("tools/call", IT)) == "left"
            go_on.set()
            await wait_until(lambda: failed)
            assert not wire.asked


@legacy
async def test_questions_go_on_the_stream_of_their_call(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        with trio.move_on_after(5):
            await ctx.ask(home=ListRoots(), a=Sample("a", max_tokens=1))
        return "late"

    server = tool(it)
    async with server._joined() as run:
        conversation = session_of(run, revision, WireStub())
        wires = WireStub(), WireStub()
        for id, wire in enumerate(wires, 7):
            conversation.receive(Request(id, "tools/call", IT), 0, wire=wire)
        await wait_all_tasks_blocked()
        asked = [label for _, label in conversation.session.outgoing()]
        assert [asked.count(wire) for wire in wires] == [2, 2]
        await trio.sleep(6)
        ended = conversation.session.outgoing()
        for wire in wires:
            assert [type(message) for message, label in ended if label is wire] == [
                Notification,
                Notification,
                Response,
            ]


# The client of an answer.


@req("elic-29", "elic-30", "elic-35")
@legacy
async def test_an_answer_counts_only_from_the_client_that_was_asked(
    revision: str, silent: Any, autojump_clock: MockClock
) -> None:
    """A question belongs to its connection.  Another client that knows the id of the question cannot answer it."""

    async def it(ctx: Context) -> str:
        return repr(await ctx.sample("a", max_tokens=1))

    server = tool(it)
    answers = {"sampling/createMessage": silent}
    async with server.running(), connected(server, revision, answers=answers) as wire:
        async with connected(server, revision, answers=answers) as other:
            ids = [await each.start("tools/call", IT) for each in (wire, other)]
            await wait_until(lambda: wire.asked and other.asked)
            (question,) = (each["id"] for each in wire.messages if "method" in each)
            for id in (question, question + 1):
                await other.send({"jsonrpc": "2.0", "id": id, "result": SAMPLED})
            assert "six" in text_of((await other.response(ids[1]))["result"])
        await wait_all_tasks_blocked()
        assert not wire.answered(ids[0])
        await wire.send({"jsonrpc": "2.0", "id": question, "result": {**SAMPLED, "role": "robot"}})
        result = (await wire.response(ids[0]))["result"]
        assert result["isError"] is True
        assert "role" in text_of(result)


@req("elic-29")
@pytest.mark.parametrize("revision", ["2025-06-18", "2025-11-25"])
async def test_over_http_only_the_user_of_the_session_can_answer(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        return f"{ctx.principal}: {await ctx.elicit('Which size?', Size)}"

    async with served(tool(it), authenticate=by_token) as web:
        session = await web.initialize(revision, headers=bearer("ada"))
        asking = web.request("tools/call", IT, revision=revision)
        async with web.stream(asking, session=session, headers=bearer("ada")) as stream:
            question = (await stream.message())["id"]
            stolen = await web.post(response(question, ACCEPTED), session=session, headers=bearer("eve"))
            assert stolen.status == 403
            anonymous = await web.post(response(question, ACCEPTED), session=session)
            assert anonymous.status == 401
            own = await web.initialize(revision, headers=bearer("eve"))
            other_session = await web.post(response(question, ACCEPTED), session=own, headers=bearer("eve"))
            assert other_session.status == 202  # its session has no question with this id
            await wait_all_tasks_blocked()
            declined = response(question, {"action": "decline"})
            assert (await web.post(declined, session=session, headers=bearer("ada"))).status == 202
            assert text_of((await stream.response())["result"]) == "ada: Declined()"


@legacy
@pytest.mark.parametrize("answer", [{"result": 7}, {"result": {}, "error": {"code": 1, "message": "x"}}, {"error": 7}])
async def test_an_answer_that_is_not_a_response_is_an_error(
    revision: str, answer: Object, silent: Any, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        return repr(await ctx.roots())

    async with connected(tool(it), revision, answers={"roots/list": silent}) as wire:
        id = await wire.start("tools/call", IT)
        await wait_until(lambda: wire.asked)
        (question,) = (each["id"] for each in wire.messages if "method" in each)
        await wire.send({"jsonrpc": "2.0", "id": question, **answer})
        result = (await wire.response(id))["result"]
        assert result["isError"] is True
        assert "the client's answer to roots/list is invalid" in text_of(result)


@legacy
async def test_each_task_of_a_handler_may_ask(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        said: dict[int, str] = {}

        async def ask(number: int) -> None:
            said[number] = repr((await ctx.sample(str(number), max_tokens=1)).content)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
        assert all(f"text='{number}'" in text for number, text in said.items())
        assert ctx._waits == ()  # an answered question leaves no state
        return str(len(said))

    answers = {"sampling/createMessage": lambda params: {**SAMPLED, "content": params["messages"][0]["content"]}}
    async with connected(tool(it), revision, answers=answers) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "5"


async def test_a_call_in_a_batch_can_ask(autojump_clock: MockClock) -> None:
    async with connected(asking_server(), "2025-03-26", answers={"roots/list": lambda params: HOME}) as wire:
        calls = [wire.request("tools/call", {"name": "roots"}, id=id) for id in ("a", "b")]
        await wire.send(calls)
        for id in ("a", "b"):
            assert "file:///home" in text_of((await wire.response(id))["result"])


@every_revision
async def test_an_argument_that_is_not_a_question_is_a_usage_error(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def it(ctx: Context) -> str:
        with pytest.raises(UsageError, match=r"'size' must be a question, got str; write Elicit\(\.\.\.\)"):
            await ctx.ask(size="Which size?")  # type: ignore[arg-type]
        return "went on"

    async with connected(tool(it), revision) as wire:
        assert text_of(await wire.call("tools/call", IT)) == "went on"


# The context of a call, logs and progress.


@every_revision
async def test_the_context_has_the_facts_of_the_request(revision: str, autojump_clock: MockClock) -> None:
    seen: list[Any] = []

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[str]:
        yield "database"

    async def it(ctx: Context) -> str:
        seen.append(
            (
                ctx.request_id, ctx.method, ctx.revision, ctx.lifespan, ctx.principal, dict(ctx.headers),
                ctx.client and ctx.client["name"], dict(ctx.trace), ctx.meta.get("example.org/x"),
                ctx.request.params["name"], ctx.supports("roots"), ctx.supports("elicitation", "url"),
            )
        )  # fmt: skip
        return ""

    server = Server("one", lifespan=lifespan)
    server.tool(it)
    trace = {"traceparent": "00-1-2-01", "tracestate": "a=b", "baggage": "c=d"}
    capabilities = {"elicitation": {"url": {}}}
    async with connected(server, revision, capabilities=capabilities, check=False) as wire:
        await wire.call("tools/call", IT, id="x", meta={**trace, "example.org/x": [1]})
        await wire.call("tools/call", IT, id=9, meta={"tracestate": 7})
    for id, traced, mark, got in (("x", trace, [1], seen[0]), (9, {}, None, seen[1])):
        assert got == (
            id, "tools/call", revision, "database", None, {}, "wire", traced, mark, "it", False, True,
        )  # fmt: skip


@every_revision
async def test_progress_needs_a_token_and_must_rise(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        with assert_checkpoints():
            await ctx.progress(1, 3, "one")
        await ctx.progress(2.5)
        await ctx.progress(2.5)
        for wrong in (1, True, float("inf")):
            with pytest.raises(UsageError, match="must be a number that rises"):
                await ctx.progress(wrong)
        return ""

    async def silent(ctx: Context) -> str:
        with assert_checkpoints():
            await ctx.progress(1)
        await ctx.progress(1)  # without a token the numbers are not checked
        return ""

    server = tool(it)
    server.tool(silent)
    message = {} if revision == "2024-11-05" else {"message": "one"}
    async with connected(server, revision) as wire:
        await wire.call("tools/call", IT, progress="token")
        assert wire.noted(PROGRESS) == [
            {"progressToken": "token", "progress": 1, "total": 3, **message},
            {"progressToken": "token", "progress": 2.5},
        ]
        await wire.call("tools/call", {"name": "silent"})
        assert len(wire.noted(PROGRESS)) == 2


@every_revision
@pytest.mark.parametrize("level", [None, "debug", "warning", "emergency"])
async def test_logs_are_sent_from_the_level_that_the_client_set(
    revision: str, level: str | None, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        for each in LOG_LEVELS:
            await trio.sleep(0.002)
            with assert_checkpoints():
                await ctx.log(each, {"at": each}, logger="it" if each == "error" else None)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"^level must be one of debug, .*, got 'loud'$"):
            await ctx.log("loud", "")  # type: ignore[arg-type]
        return ""

    async with connected(tool(it), revision, log_level=level) as wire:
        await wire.call("tools/call", IT)
        first = len(LOG_LEVELS) if revision == LATEST else 0  # in the modern era logs are sent only on request
        if level is not None:
            first = LOG_LEVELS.index(level)
        assert wire.noted(MESSAGE) == [
            {"level": each, "data": {"at": each}, **({"logger": "it"} if each == "error" else {})}
            for each in LOG_LEVELS[first:]
        ]


@every_revision
async def test_an_invalid_log_or_progress_is_a_usage_error(revision: str, autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        with pytest.raises(UsageError):
            await ctx.log("error", object())  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            await ctx.progress(1, message=7)  # type: ignore[arg-type]
        return "went on"

    async with connected(tool(it), revision, log_level="debug") as wire:
        assert text_of(await wire.call("tools/call", IT, progress=1)) == "went on"
        assert not wire.notes


@every_revision
async def test_a_cancelled_request_cancels_only_its_handler(revision: str, autojump_clock: MockClock) -> None:
    ended: list[object] = []

    async def it(ctx: Context) -> str:
        try:
            await trio.sleep(5)
        except trio.Cancelled:
            with pytest.raises(trio.Cancelled):
                await ctx.progress(1)
            ended.append(ctx.request_id)
            raise
        return "slept"

    async with connected(tool(it), revision) as wire:
        first, second = [await wire.start("tools/call", IT, progress=number) for number in range(2)]
        await wait_all_tasks_blocked()
        await wire.cancel(first, "enough")
        await wait_all_tasks_blocked()
        assert ended == [first]
        assert text_of((await wire.response(second))["result"]) == "slept"
        assert not wire.answered(first)
        assert not wire.notes
