"""Handlers that wait for a retry, in the revision in which a server cannot send requests.

Most tests do the client's part by hand: `ask` sends a call and returns the questions, and `retry_params` makes the
params of the retry.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.checkpoints import Attempt, cancel_at_each_step, one_byte_pipe, unlimited_pipe
from tests.server.raw_client import CAPABILITIES, LATEST, MESSAGE, PROGRESS, ErrorResponse, RawClient, connected
from trio_mcp import (
    Accepted,
    Context,
    Declined,
    Elicit,
    ElicitUrl,
    InputRequired,
    Limits,
    ListRoots,
    RequestError,
    Sample,
    Server,
    ToolError,
    UsageError,
)
from trio_mcp.core import MAX_ROUNDS, REVISIONS, Request, StateSealer, Terms
from trio_mcp.errors import SessionClosed, UrlElicitationRequired
from trio_mcp.server import Inquiry, ParkedCall, Parking, converse
from trio_mcp.transport import Lines

Object = dict[str, Any]
KEY = b"k" * 32
IT: Object = {"name": "it"}
HOME: Object = {"roots": [{"uri": "file:///home"}]}
SAMPLED: Object = {"role": "assistant", "content": {"type": "text", "text": "six"}, "model": "m"}
DECLINED: Object = {"action": "decline"}


@dataclass
class Size:
    size: int


def accepted_size(size: object) -> Object:
    return {"action": "accept", "content": {"size": size}}


def size_of(answer: object) -> int:
    assert isinstance(answer, Accepted)
    assert isinstance(answer.value, Size)
    return answer.value.size


Handler = Callable[..., Any]


def server_with(handler: Handler, *, replay: bool = False, **options: Any) -> Server:
    """A server with the tool "it", which is `handler`."""
    server = Server("parking", **options)
    server.tool(name="it", structured=False, replay=replay)(handler)
    return server


def connected_to(server: Server, **options: Any) -> contextlib.AbstractAsyncContextManager[RawClient]:
    return connected(server, LATEST, **options)


async def ask_size(ctx: Context) -> str:
    """A handler that asks one question."""
    return f"size {size_of(await ctx.elicit('Which size?', Size))}"


async def ask(wire: RawClient, params: Object = IT, method: str = "tools/call", **how: Any) -> Object:
    result = await wire.call(method, params, rounds=False, **how)
    assert result["resultType"] == "input_required", result
    return result


def retry_params(asked: Object, answers: Object | None = None, params: Object = IT) -> Object:
    """The params of a retry, by default with a valid answer to each question."""
    if answers is None:
        answers = {key: accepted_size(3) for key in asked["inputRequests"]}
    return {**params, "inputResponses": answers, "requestState": asked["requestState"]}


async def result_text(wire: RawClient, params: Object, **how: Any) -> str:
    """The text of a complete result."""
    result = await wire.call("tools/call", params, rounds=False, **how)
    assert result["resultType"] == "complete", result
    (content,) = result["content"]
    assert isinstance(content["text"], str)
    return f"failed: {content['text']}" if result.get("isError") else content["text"]


async def refusal(wire: RawClient, params: Object, method: str = "tools/call") -> str:
    with pytest.raises(ErrorResponse) as caught:
        await wire.call(method, params, rounds=False)
    assert caught.value.code == -32602
    assert caught.value.data is None
    # The message does not repeat the state.
    state = params.get("requestState")
    assert not isinstance(state, str) or len(state) < 8 or state not in caught.value.message
    return caught.value.message


USED = "requestState has been used or has expired: send the request again without it"
NOT_YOURS = "requestState was not issued to this caller by this server"
OTHER_REQUEST = "requestState belongs to another request: a retry repeats the method and params of the original"
NOT_WAITING = "The call of this requestState does not wait here: send the request again without it"
EXPIRED = "requestState has expired: send the request again without it"


# One handler, several requests.


@pytest.mark.contract
@req("mrtr-05", "mrtr-07", "mrtr-15")
async def test_a_handler_goes_on_where_it_asked_over_several_rounds(autojump_clock: MockClock) -> None:
    began, ended, ids = itertools.count(), itertools.count(), []

    async def it(ctx: Context) -> str:
        next(began)
        sizes = []
        try:
            for number in range(3):
                ids.append(ctx.request_id)
                await ctx.progress(number)
                await ctx.log("info", f"asking {number}")
                sizes.append(size_of(await ctx.elicit(f"Size {number}?", Size)))
            got = await ctx.ask(home=ListRoots(), form=Elicit("And now?", Size))
            return f"{sizes} {len(got['home'])} {size_of(got['form'])}"
        finally:
            next(ended)

    server = server_with(it)
    async with connected_to(server) as wire:
        asked = await ask(wire, progress="p0")
        keys = [[*asked["inputRequests"]]]
        for number in range(1, 4):
            wire.log_level = "info" if number == 1 else None
            asked = await ask(
                wire, retry_params(asked, {k: accepted_size(number) for k in keys[-1]}), progress=f"p{number}"
            )
            keys.append([*asked["inputRequests"]])
        text = await result_text(wire, retry_params(asked, {"home": HOME, "form-4": accepted_size(9)}))
        assert text == "[1, 2, 3] 1 9"
        assert keys == [["form"], ["form-2"], ["form-3"], ["home", "form-4"]]
        assert ids == [1, 2, 3]  # each question and notification belongs to the request that was open
        assert [(note["progressToken"], note["progress"]) for note in wire.noted(PROGRESS)] == [
            ("p0", 0),
            ("p1", 1),
            ("p2", 2),
        ]
        assert [note["data"] for note in wire.noted(MESSAGE)] == ["asking 1"]  # the level of the open request counts
        assert (next(began), next(ended)) == (1, 1)
    assert server.statistics().parked == 0


async def test_progress_is_dropped_while_no_request_is_open(autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        async def talk() -> None:
            for number in itertools.count():
                with trio.testing.assert_checkpoints():
                    await ctx.progress(number)
                await trio.sleep(0.25)  # never at the same time as the begin or end of a request
                with trio.testing.assert_checkpoints():
                    await ctx.log("error", number)
                with pytest.raises(UsageError, match=r"level must be one of debug, "):
                    await ctx.log("loud", number)  # type: ignore[arg-type]
                await trio.sleep(0.75)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            await trio.sleep(2.5)
            size = size_of(await ctx.elicit("Which size?", Size))
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
        return str(size)

    async with connected_to(server_with(it), log_level="error") as wire:
        asked = await ask(wire, progress="a")
        await trio.sleep(100)
        assert await result_text(wire, retry_params(asked), progress="b") == "3"
        heard = [(note["progressToken"], note["progress"]) for note in wire.noted(PROGRESS)]
        assert heard == [("a", 0), ("a", 1), ("a", 2), ("b", 103), ("b", 104)]
        assert [note["data"] for note in wire.noted(MESSAGE)] == [0, 1, 2, 103, 104]


@pytest.mark.parametrize("talks", [False, True])
async def test_two_simultaneous_questions_need_ctx_ask(talks: bool, autojump_clock: MockClock) -> None:
    """Also if both must first wait until earlier progress is sent."""

    async def it(ctx: Context) -> str:
        failed: list[object] = []

        async def ask(question: Callable[[], Awaitable[object]]) -> None:
            try:
                await question()
            except UsageError as error:
                failed.append(error)

        for number in range(2 * talks):
            await ctx.progress(number)
        async with trio.open_nursery() as nursery:
            for question in (ctx.roots, functools.partial(ctx.elicit, "And?", Size)):
                nursery.start_soon(ask, question)
        assert "waits for its answer; ask several at once with ctx.ask(" in str(*failed)
        return "one"

    answers = {"roots/list": lambda params: HOME, "elicitation/create": lambda params: DECLINED}
    async with connected_to(server_with(it), answers=answers, streams=one_byte_pipe) as wire:
        (content,) = (await wire.call("tools/call", IT, progress="p"))["content"]
        assert content["text"] == "one"
        assert len(wire.asked) == 1


async def test_the_context_has_the_facts_of_the_current_request(autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        known = []
        for _ in range(2):
            known.append([dict(ctx.trace), ctx.supports("sampling"), ctx.principal, dict(ctx.headers), ctx.request_id])
            if len(known) == 1:
                await ctx.elicit("Which size?", Size)
        return json.dumps(known)

    serve = _ServeAs("ada", {"x": "1"})
    async with connected_to(server_with(it), serve=serve, meta={"traceparent": "00-a"}) as wire:
        asked = await ask(wire)
        wire.capabilities = {"elicitation": {}}
        serve.headers["x"] = "2"
        text = await result_text(wire, retry_params(asked), meta={"traceparent": "00-b"})
        assert json.loads(text) == [
            [{"traceparent": "00-a"}, True, "ada", {"x": "1"}, 1],
            [{"traceparent": "00-b"}, False, "ada", {"x": "2"}, 2],
        ]


async def test_the_middleware_of_the_first_request_surrounds_the_whole_call(autojump_clock: MockClock) -> None:
    """Also its filter: a retry is not filtered again, because it has the same principal."""
    passed = []

    async def middleware(ctx: Context, request: Request, call_next: Any) -> Any:
        passed.append(("in", ctx.request_id))
        try:
            return await call_next(request)
        finally:
            passed.append(("out", ctx.request_id))

    async with connected_to(server_with(ask_size, middleware=[middleware])) as wire:
        assert await result_text(wire, retry_params(await ask(wire))) == "size 3"
        assert passed == [("in", 1), ("out", 2)]


# Answers.


@req("mrtr-11", "mrtr-22", "mrtr-23", "elic-45", "samp-07")
@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"form": accepted_size("three")}, "inputResponses['form']: the answer does not fit the form: content/size"),
        ({"form": {"action": "maybe"}}, "inputResponses['form']: the answer to elicitation/create needs action"),
        ({"form": []}, "inputResponses['form'] must be an object"),
        ([], "inputResponses must be an object"),
        ({"form": accepted_size(3), "model": {**SAMPLED, "content": {"type": "text"}}}, "inputResponses['model']: "),
        ({"form": accepted_size("three"), "model": SAMPLED}, "inputResponses['form']: "),
    ],
)
async def test_an_invalid_answer_is_refused_and_can_be_corrected(
    answers: Any, why: str, autojump_clock: MockClock
) -> None:
    async def it(ctx: Context) -> str:
        got = await ctx.ask(form=Elicit("Which size?", Size), model=Sample("Say a number", max_tokens=5))
        return f"{size_of(got['form'])} {got['model'].content.text}"

    server = server_with(it)
    async with connected_to(server) as wire:
        asked = await ask(wire)
        for _ in range(3):
            assert (await refusal(wire, retry_params(asked, answers))).startswith(why)
        assert server.statistics().parked == 1
        # No answer of the invalid retries counts: both answers are still missing.
        rest = await ask(wire, retry_params(asked, {}))
        assert [*rest["inputRequests"]] == ["form", "model"]
        assert await result_text(wire, retry_params(rest, {"form": accepted_size(3), "model": SAMPLED})) == "3 six"


@req("mrtr-24", "mrtr-25")
async def test_missing_answers_are_asked_for_again_and_the_others_kept(autojump_clock: MockClock) -> None:
    runs = itertools.count()

    async def it(ctx: Context) -> str:
        next(runs)
        got = await ctx.ask(**{key: Elicit(f"{key}?", Size) for key in "abc"})
        return " ".join(str(size_of(answer)) for answer in got.values())

    async with connected_to(server_with(it)) as wire:
        first = await ask(wire)
        second = await ask(wire, retry_params(first, {"b": accepted_size(2), "unasked": accepted_size(0)}))
        assert second["inputRequests"] == {key: first["inputRequests"][key] for key in "ac"}
        assert second["requestState"] != first["requestState"]
        third = await ask(
            wire, retry_params(second, {"c": accepted_size(4), "b": accepted_size(9)})
        )  # b has its answer already
        assert [*third["inputRequests"]] == ["a"]
        without = {**IT, "requestState": third["requestState"]}
        assert [*(await ask(wire, without))["inputRequests"]] == ["a"]
        # Each state of the call reaches the handler while it waits.
        assert await result_text(wire, retry_params(first, {"a": accepted_size(1)})) == "1 2 4"
        assert next(runs) == 1
        for asked in (first, second, third):
            assert await refusal(wire, retry_params(asked, {"a": accepted_size(1)})) == USED


async def test_a_client_that_never_answers_is_refused_after_some_rounds(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_with(ask_size)
    async with connected_to(server) as wire:
        asked = await ask(wire)
        for _ in range(MAX_ROUNDS - 1):
            asked = await ask(wire, retry_params(asked, {}))
        said = await refusal(wire, retry_params(asked, {}))
        assert said == f"answers are missing from inputResponses after {MAX_ROUNDS} rounds"
        assert await result_text(wire, retry_params(asked)) == "size 3"
    assert not caplog.records  # a fault of the client is not logged


async def test_a_handler_that_asks_without_end_is_stopped(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def it(ctx: Context) -> str:
        while True:
            await ctx.roots()
            ctx._kept_roots = None

    async with connected_to(server_with(it), answers={"roots/list": lambda params: HOME}) as wire:
        result = await wire.call("tools/call", IT)
        assert result["isError"] is True
        assert len(wire.asked) == MAX_ROUNDS
    assert "has asked 32 times" in str(caplog.records[0].exc_info)


@req("mrtr-13")
async def test_a_question_is_repeated_only_to_a_client_with_the_capability(autojump_clock: MockClock) -> None:
    async with connected_to(server_with(ask_size)) as wire:
        asked = await ask(wire)
        wire.capabilities = {"roots": {}}
        with pytest.raises(ErrorResponse) as caught:
            await ask(wire, retry_params(asked, {}))
        assert (caught.value.code, caught.value.data) == (
            -32021,
            {"requiredCapabilities": {"elicitation": {"form": {}}}},
        )
        # A client that sends the answer needs no capability.
        assert await result_text(wire, retry_params(asked)) == "size 3"


# The owner of a state.


class _ServeAs:
    """Serve connections on which each message has this principal and these headers."""

    def __init__(self, principal: str | None, headers: dict[str, str] | None = None) -> None:
        self.principal = principal
        self.headers = headers or {}

    async def __call__(self, server: Server, stream: trio.abc.Stream) -> None:
        async with server._joined() as run:
            await converse(run, stream, Lines(run.limits), principal=self.principal, headers=self.headers)


def tampered(state: str) -> Iterator[str]:
    for place in (0, 20, 44, len(state) // 2, len(state) - 3):
        yield state[:place] + ("A" if state[place] != "A" else "B") + state[place + 1 :]
    yield state[:-4]
    yield state + "AAAA"
    yield state + " "
    yield f" {state}"
    yield ""
    payload = base64.urlsafe_b64decode(state)[32:].replace(b'"ada"', b'"bob"')
    yield base64.urlsafe_b64encode(bytes(32) + payload).decode()


@req("mrtr-08", "mrtr-09", "mrtr-10", "elic-30", "elic-35", "elic-43")
async def test_a_state_is_bound_to_its_principal_and_its_request(autojump_clock: MockClock) -> None:
    """An attempt by another client does not use up the state."""
    server, other = server_with(ask_size, state_keys=[KEY]), server_with(ask_size)
    server.tool(name="other", structured=False)(ask_size)
    server.prompt(name="it")(ask_size)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(server.running())
        ada = await stack.enter_async_context(connected_to(server, serve=_ServeAs("ada")))
        bob = await stack.enter_async_context(connected_to(server, serve=_ServeAs("bob")))
        anonymous = await stack.enter_async_context(connected_to(server))
        other_server = await stack.enter_async_context(connected_to(other, serve=_ServeAs("ada")))
        params = {**IT, "arguments": {}}
        asked = await ask(ada, params)
        good = retry_params(asked, params=params)
        for wire in (bob, anonymous, other_server):
            assert await refusal(wire, good) == NOT_YOURS
        for state in (*tampered(asked["requestState"]), None, 7, [], {}, "x" * 2_000_000):
            assert await refusal(ada, {**good, "requestState": state}) == NOT_YOURS
        assert await refusal(ada, good, "prompts/get") == OTHER_REQUEST
        for changed in ({"name": "other"}, {"arguments": {"more": 1}}, {"more": None}):
            assert await refusal(ada, {**good, **changed}) == OTHER_REQUEST
        assert server.statistics().parked == 1
        # Another connection of the same user is accepted.
        async with connected_to(server, serve=_ServeAs("ada")) as wire:
            assert await result_text(wire, good) == "size 3"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=3))
def test_an_arbitrary_value_as_a_state_is_refused(state: object) -> None:
    async def check() -> None:
        ctx = context({**IT, "requestState": state})
        with pytest.raises(RequestError) as caught:
            await Parking(StateSealer([KEY]), Limits()).retry(ctx)
        assert (caught.value.code, caught.value.message) == (-32602, NOT_YOURS)

    trio.run(check)


@req("mrtr-10", "elic-30")
async def test_a_state_contains_only_the_necessary_data(autojump_clock: MockClock) -> None:
    async def it(ctx: Context, secret: str) -> Any:
        ctx.state = "not needed"
        await ctx.ask(name=Elicit("Which size?", Size))
        return InputRequired({"more": Elicit("And?", Size)}, state={"step": 2})

    params = {**IT, "arguments": {"secret": "s3cret"}}
    async with connected_to(server_with(it), serve=_ServeAs("ada"), meta={"traceparent": "00-abc"}) as wire:
        parked = await ask(wire, params)
        returned = await ask(wire, retry_params(parked, {"name": accepted_size(3)}, params))
    for asked, rest in ((parked, [{}, None]), (returned, [{}, [["more"], {}, {"step": 2}]])):
        owner, method, digest, _expires, *state = json.loads(base64.urlsafe_b64decode(asked["requestState"])[32:])
        assert (owner, method, len(digest)) == ("ada", "tools/call", 64)
        assert state[-2:] == rest
        assert "s3cret" not in json.dumps(state)
    handle = state[1]
    assert handle is None  # a handler that starts again is not parked


def context(params: Object, principal: Any = None, method: str = "tools/call") -> Context:
    terms = Terms(REVISIONS[LATEST], CAPABILITIES[LATEST], principal=principal)
    return Context(cast(Any, None), Request(1, method, params), terms, cast(Any, None))


FORM: Mapping[str, Inquiry[Any]] = {"form": Elicit("Which size?", Size)}


@req("mrtr-10")
async def test_a_state_expires_by_the_wall_clock(autojump_clock: MockClock) -> None:
    now = 1000.0
    parking = Parking(StateSealer([KEY]), Limits(), wall=lambda: now)
    place, asking = parking.park(context(IT), FORM)
    returned = parking.ask_again(context(IT), FORM, None)
    now += Limits().parked_seconds
    for asked in (asking, returned):
        with pytest.raises(RequestError, match=EXPIRED):
            await parking.retry(context(retry_params(asked)))
    assert len(parking.calls) == 1
    now -= 1
    assert await parking.retry(context(retry_params(asking))) is place
    assert await parking.retry(context(retry_params(returned))) is None


async def test_a_principal_must_have_a_stable_name(autojump_clock: MockClock) -> None:
    parking = Parking(StateSealer([KEY]), Limits())
    with pytest.raises(UsageError, match="stable, unique name"):
        parking.park(context(IT, principal=object()), FORM)
    assert len(parking.calls) == 0


# A state is used once.


@pytest.mark.contract(connections=(2,))
@req("mrtr-11", "state-05")
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("connections", [1, 2])
async def test_a_state_can_be_used_once(connections: int, replay: bool, autojump_clock: MockClock) -> None:
    """Also for a handler with `replay`, which runs again only if its process is lost."""
    runs = itertools.count()

    async def it(ctx: Context) -> str:
        size = size_of(await ctx.elicit("Which size?", Size))
        next(runs)
        await trio.sleep(1)
        return str(size)

    server = server_with(it, replay=replay)
    async with server.running(), connected_to(server) as wire, connected_to(server) as second:
        asked = await ask(wire)
        outcomes: list[str] = []

        async def retry(wire: RawClient, size: int) -> None:
            try:
                outcomes.append(await result_text(wire, retry_params(asked, {"form": accepted_size(size)})))
            except ErrorResponse as error:
                outcomes.append(error.message)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(retry, [wire, second][number % connections], number)
        assert sorted(outcomes)[1:] == sorted([USED] * 4 + outcomes[-1:])[1:]
        assert sorted(outcomes)[0] in "01234"
        assert next(runs) == 1
        assert await refusal(wire, retry_params(asked)) == USED


# Connections.


@pytest.mark.contract
@req("mrtr-27", "state-03")
async def test_a_parked_handler_outlives_its_connection(autojump_clock: MockClock) -> None:
    ended = []

    async def it(ctx: Context) -> str:
        try:
            sizes = [size_of(await ctx.elicit("Which size?", Size)) for _ in range(2)]
            await ctx.progress(1)
            return str(sizes)
        finally:
            ended.append(trio.current_time())

    server = server_with(it)
    async with server.running():
        async with connected_to(server) as wire:
            asked = await ask(wire)
        now = server.statistics()
        assert (now.connections, now.running, now.parked) == (0, 0, 1)
        await trio.sleep(60)
        async with connected_to(server) as wire:
            asked = await ask(wire, retry_params(asked, {"form": accepted_size(1)}))
        async with connected_to(server) as wire:
            assert await result_text(wire, retry_params(asked, {"form-2": accepted_size(2)}), progress="p") == "[1, 2]"
            assert wire.noted(PROGRESS) == [{"progressToken": "p", "progress": 1}]
        assert len(ended) == 1


async def test_a_resumed_handler_is_cancelled_with_the_connection_of_the_retry(
    autojump_clock: MockClock,
) -> None:
    ended: list[str] = []

    async def it(ctx: Context) -> str:
        await ctx.elicit("Which size?", Size)
        try:
            await trio.sleep(1000)
        except trio.Cancelled:
            ended.append("cancelled")
            raise
        return "slept"

    server = server_with(it)
    async with server.running(), connected_to(server) as last:
        async with connected_to(server) as first:
            asked = await ask(first)
            other = await ask(first)
        async with connected_to(server) as second:
            await second.start("tools/call", retry_params(asked))
            await wait_all_tasks_blocked()
        assert ended == ["cancelled"]
        assert await result_text(last, retry_params(other)) == "slept"


async def test_without_a_shared_run_a_handler_ends_with_its_connection(autojump_clock: MockClock) -> None:
    ended: list[float] = []

    async def it(ctx: Context) -> str:
        try:
            return await ask_size(ctx)
        finally:
            ended.append(trio.current_time())

    start = trio.current_time()
    async with connected_to(server_with(it)) as wire:
        await ask(wire)
    assert ended == [start]


async def wait_until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # the end of a thread has no event
        await trio.sleep(0.01)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_server_that_stops_does_not_wait_for_parked_handlers(
    shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a handler waits under a shield or in a thread."""
    ended: list[str] = []

    async def plain(ctx: Context) -> None:
        try:
            await ctx.elicit("Which size?", Size)
        finally:
            ended.append("plain")

    async def shielded(ctx: Context) -> None:
        with trio.CancelScope(shield=True), pytest.raises(SessionClosed):
            await ctx.elicit("Which size?", Size)
        ended.append("shielded")

    def threaded(ctx: Context) -> None:
        with pytest.raises(SessionClosed):
            trio.from_thread.run(ctx.elicit, "Which size?", Size)
        ended.append("threaded")

    # A thread asks in a task of its own, and `connected` would report this task as left behind.
    handlers: list[Handler] = [plain, shielded] if shared else [plain, shielded, threaded]
    server = Server("parking")
    for handler in handlers:
        server.tool(handler)
    with trio.fail_after(60):
        async with server.running() if shared else contextlib.nullcontext(), connected_to(server) as wire:
            for handler in handlers:
                await ask(wire, {"name": handler.__name__})
            assert server.statistics().parked == len(handlers)
        await wait_until(lambda: len(ended) == len(handlers))
    assert server.statistics().parked == 0
    assert not caplog.records


# Limits.


@pytest.mark.contract
@req("mrtr-14", "elic-50")
async def test_a_parked_handler_is_cancelled_after_the_timeout(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[object] = []

    async def it(ctx: Context) -> str:
        try:
            return await ask_size(ctx)
        except trio.Cancelled:
            # A handler may try to ask while it is stopped, but there is no client to ask.
            with pytest.raises((trio.Cancelled, UsageError)):
                await ctx.elicit("Are you still there?", Size)
            with pytest.raises(trio.Cancelled):
                await ctx.progress(1)
            ended.append(trio.current_time())
            raise

    server = server_with(it)
    async with server.running(), connected_to(server) as wire:
        start = trio.current_time()
        asked = [await ask(wire)]
        await trio.sleep(Limits().parked_seconds / 2)
        asked.append(await ask(wire))
        await trio.sleep(Limits().parked_seconds / 2 - 1)
        assert server.statistics().parked == 2
        await trio.sleep(2)
        assert server.statistics().parked == 1
        assert ended == [start + Limits().parked_seconds]
        assert await refusal(wire, retry_params(asked[0])) == USED
        # A repeated question does not extend the time.
        rest = await ask(wire, retry_params(asked[1], {}))
        await trio.sleep(Limits().parked_seconds / 2)
        assert await refusal(wire, retry_params(rest)) == USED
        assert len(ended) == 2
        assert await result_text(wire, retry_params(await ask(wire))) == "size 3"
    assert not caplog.records


@req("mrtr-14")
@pytest.mark.parametrize(("principal", "limit"), [(None, Limits().parked), ("ada", Limits().parked_each)])
async def test_the_number_of_parked_handlers_is_limited(
    principal: str | None, limit: int, autojump_clock: MockClock
) -> None:
    server = server_with(ask_size)
    async with server.running(), connected_to(server, serve=_ServeAs(principal)) as wire:
        asked = [await ask(wire) for _ in range(limit)]
        assert server.statistics().parked == limit
        with pytest.raises(ErrorResponse, match="Too many calls are waiting for input: try again later") as caught:
            await ask(wire)
        assert caught.value.code == -32603
        assert server.statistics().parked == limit
        async with connected_to(server, serve=_ServeAs("bob")) as bob:
            if principal:
                await ask(bob)  # each principal has its own limit
            else:
                with pytest.raises(ErrorResponse):
                    await ask(bob)
        assert await result_text(wire, retry_params(asked[limit // 2])) == "size 3"
        await ask(wire)


async def test_the_limits_of_parking_can_be_set(autojump_clock: MockClock) -> None:
    parking = Parking(StateSealer([KEY]), Limits(parked=2, parked_each=1, parked_seconds=5))
    parking.park(context(IT, "ada"), FORM)
    with pytest.raises(RequestError, match="Too many"):
        parking.park(context(IT, "ada"), FORM)
    parking.park(context(IT, "bob"), FORM)
    with pytest.raises(RequestError, match="Too many"):
        parking.park(context(IT, "eve"), FORM)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parking.run)
        await trio.sleep(4.9)
        assert len(parking.calls) == 2
        await trio.sleep(0.2)
        assert len(parking.calls) == 0
        nursery.cancel_scope.cancel()


async def test_a_question_that_fails_before_it_is_sent_leaves_no_state(autojump_clock: MockClock) -> None:
    class Broken(ListRoots):
        def _params_in(self, revision: Any) -> Object:
            raise ZeroDivisionError

    parking, ctx = Parking(StateSealer([KEY]), Limits()), context(IT)
    with pytest.raises(ZeroDivisionError):
        parking.park(ctx, {"a": Broken()})
    with pytest.raises(UsageError, match="does not exist"):
        parking.park(context({}, method="completion/complete"), FORM)
    ctx._replay, ctx._recorded = True, {"picture": {"data": "x" * 2_000_000}}
    for question in (parking.park, lambda *each: parking.ask_again(*each, None)):
        with pytest.raises(RequestError, match="The requestState of this call may have"):
            question(ctx, FORM)
    with pytest.raises(UsageError, match="a request state must be JSON"):
        parking.ask_again(context(IT), FORM, cast(Any, object()))
    assert (len(parking.calls), ctx._rounds) == (0, 0)


async def test_a_parked_handler_does_not_count_as_a_running_call(autojump_clock: MockClock) -> None:
    server = server_with(ask_size, limits=Limits(calls=1, calls_in_all=1))
    async with server.running(), connected_to(server) as wire:
        asked = [await ask(wire) for _ in range(3)]
        statistics = server.statistics()
        assert (statistics.running, statistics.parked) == (0, 3)
        for each in asked:
            assert await result_text(wire, retry_params(each)) == "size 3"
        statistics = server.statistics()
        assert (statistics.running, statistics.parked) == (0, 0)


async def test_a_resumed_handler_counts_as_a_running_call(autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        await ctx.elicit("Which size?", Size)
        await trio.sleep(5)
        return "slept"

    server = server_with(it, limits=Limits(calls=1))
    async with server.running(), connected_to(server) as wire:
        asked = await ask(wire)
        id = await wire.start("tools/call", retry_params(asked))
        await trio.sleep(1)
        assert (server.statistics().running, server.statistics().parked) == (1, 0)
        with pytest.raises(ErrorResponse, match="overloaded"):
            await ask(wire)
        assert (await wire.response(id))["result"]["content"][0]["text"] == "slept"
        await ask(wire)


# Cancellation.


@pytest.mark.contract
async def test_cancelling_the_retry_cancels_the_handler(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[float] = []

    async def it(ctx: Context) -> str:
        await ctx.elicit("Which size?", Size)
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())
        raise AssertionError

    server = server_with(it)
    async with server.running(), connected_to(server) as wire:
        id = await wire.start("tools/call", IT)
        asked = (await wire.response(id))["result"]
        await wire.cancel(id)  # too late: the request has its answer
        await trio.sleep(1)
        assert server.statistics().parked == 1
        id = await wire.start("tools/call", retry_params(asked))
        await trio.sleep(1)
        assert not ended
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        assert ended == [trio.current_time()]
        assert not wire.answered(id)
        assert server.statistics().running == 0
        assert await refusal(wire, retry_params(asked)) == USED
    assert not caplog.records


async def test_a_retry_that_is_cancelled_before_it_begins_uses_no_state(autojump_clock: MockClock) -> None:
    server = server_with(ask_size)
    async with server.running(), connected_to(server) as wire:
        asked = await ask(wire)
        retry = wire.request("tools/call", retry_params(asked))
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": retry["id"]}}
        wire.post_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in (retry, cancel)))
        await trio.sleep(1)  # the client would report an answer, because it does not know this request
        assert server.statistics().parked == 1
        assert await result_text(wire, retry_params(asked)) == "size 3"


async def test_a_cancelled_request_cannot_be_answered_with_a_question(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, ended = trio.Event(), []

    async def it(ctx: Context) -> None:
        with trio.CancelScope(shield=True):
            await go_on.wait()
            with pytest.raises(SessionClosed, match="the question was not asked: the call has ended"):
                await ctx.elicit("Which size?", Size)
        ended.append(1)
        with pytest.raises(trio.Cancelled):
            await ctx.elicit("Which size?", Size)
        ended.append(2)
        await trio.lowlevel.checkpoint()

    server = server_with(it)
    async with server.running(), connected_to(server) as wire:
        id = await wire.start("tools/call", IT)
        await wait_all_tasks_blocked()
        await wire.cancel(id)
        await wait_all_tasks_blocked()
        go_on.set()
        await wait_all_tasks_blocked()
        assert ended == [1, 2]
        assert (server.statistics().parked, server.statistics().running) == (0, 0)
    assert not caplog.records


def test_a_call_may_be_cancelled_at_any_step_of_any_round() -> None:
    """Its client cancels it: the call ends once and leaves no state."""
    outcomes: set[str] = set()

    async def scenario(attempt: Attempt) -> None:
        began, ended = itertools.count(), itertools.count()

        async def it(ctx: Context) -> str:
            next(began)
            try:
                await ctx.progress(1)
                first = size_of(await ctx.elicit("Which size?", Size))
                await ctx.log("info", "second")
                second = size_of(await ctx.elicit("Which size?", Size))
                await trio.lowlevel.checkpoint()
                return f"{first} {second}"
            finally:
                next(ended)

        server = server_with(it)
        async with (
            server.running(),
            connected_to(server, streams=attempt.streams(unlimited_pipe), log_level="info") as wire,
        ):
            params, open_id, result = IT, 0, {}

            def cancel() -> None:
                wire.post({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": open_id}})

            with attempt.window(cancel):
                for _ in range(3):
                    open_id = await wire.start("tools/call", params, progress="p")
                    await wait_all_tasks_blocked()
                    if not wire.answered(open_id):
                        break
                    result = (await wire.response(open_id))["result"]
                    if result["resultType"] == "complete":
                        break
                    params = retry_params(result)
            statistics = server.statistics()
            assert statistics.running == 0
            assert statistics.parked == 0
            outcomes.add("complete" if wire.answered(open_id) else "cancelled")
            assert next(began) == next(ended)
            assert await wire.call("server/discover")

    assert cancel_at_each_step(scenario, watch=lambda task: "tools/call" in task.name or "server" in task.name) > 15
    assert outcomes == {"complete", "cancelled"}


def test_a_server_may_be_cancelled_at_any_step_of_any_round() -> None:
    async def scenario(attempt: Attempt) -> None:
        began, ended = itertools.count(), itertools.count()

        async def it(ctx: Context) -> str:
            next(began)
            try:
                return f"{await ask_size(ctx)} {await ask_size(ctx)}"
            finally:
                next(ended)

        server = server_with(it)
        with attempt.window(), contextlib.suppress(AssertionError):  # the client finds that the server has ended
            async with server.running(), connected_to(server, streams=attempt.streams(unlimited_pipe)) as wire:
                asked = await ask(wire)
                asked = await ask(wire, retry_params(asked))
                await result_text(wire, retry_params(asked))
        assert next(began) == next(ended)
        assert server.statistics().parked == 0

    assert cancel_at_each_step(scenario, watch="tools/call") > 5


# Handlers that do not wait for the answer.


@pytest.mark.parametrize("late", [False, True])
async def test_a_handler_may_stop_waiting_and_the_retry_gets_its_result(late: bool, autojump_clock: MockClock) -> None:
    """Before or after the end of the handler, and with any answers in the retry."""

    async def it(ctx: Context) -> str:
        with trio.move_on_after(60):
            await ctx.elicit("Which size?", Size)
        await trio.sleep(100)
        await ctx.progress(1)
        return "without an answer"

    server = server_with(it)
    async with server.running(), connected_to(server) as wire:
        for answers in ({"form": accepted_size(3)}, {}, {"form": accepted_size("none")}, {"form": 7}):
            asked = await ask(wire)
            await trio.sleep(300 if late else 100)
            assert server.statistics().parked == 1
            assert await result_text(wire, retry_params(asked, answers), progress="p") == "without an answer"
            assert await refusal(wire, retry_params(asked)) == USED
        assert len(wire.noted(PROGRESS)) == (0 if late else 4)
        assert server.statistics().parked == 0


@pytest.mark.parametrize("late", [False, True])
async def test_a_handler_that_stopped_waiting_may_ask_another_question(late: bool, autojump_clock: MockClock) -> None:
    """It asks when the retry has come."""

    async def it(ctx: Context) -> str:
        with trio.move_on_after(60):
            await ctx.elicit("Which size?", Size)
        await trio.sleep(100)
        return f"{await ask_size(ctx)} {len(await ctx.roots())}"

    async with connected_to(server_with(it), answers={"roots/list": lambda params: HOME}) as wire:
        asked = await ask(wire)
        await trio.sleep(300 if late else 100)
        asked = await ask(wire, retry_params(asked, {"form": accepted_size(1)}))
        assert [*asked["inputRequests"]] == ["form-2"]
        asked = await ask(wire, retry_params(asked))
        assert await result_text(wire, retry_params(asked, {"roots": HOME})) == "size 3 1"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("sold out"), "failed: sold out"),
        (ValueError("a secret"), "failed: tools/call 'it' failed; the server's log says why"),
        (SystemExit(3), "failed: tools/call 'it' failed; the server's log says why"),
    ],
)
async def test_a_handler_may_fail_while_it_waits_and_the_retry_gets_the_error(
    error: BaseException, text: str, autojump_clock: MockClock
) -> None:
    ended = []

    async def it(ctx: Context) -> str:
        async def fail() -> None:
            await trio.sleep(60)
            raise error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            try:
                await ctx.elicit("Which size?", Size)
            finally:
                ended.append(trio.current_time())
        raise AssertionError

    server = server_with(it)
    async with server.running(), connected_to(server) as wire:
        asked = await ask(wire)
        await trio.sleep(100)
        assert len(ended) == 1
        assert await result_text(wire, retry_params(asked, {})) == text
        assert server.statistics().parked == 0
        assert await wire.call("server/discover")


async def test_a_result_without_a_retry_is_discarded(autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        with trio.move_on_after(60):
            await ctx.elicit("Which size?", Size)
        return "without an answer"

    server = server_with(it)
    async with server.running(), connected_to(server) as wire:
        asked = await ask(wire)
        await trio.sleep(Limits().parked_seconds - 1)
        assert server.statistics().parked == 1
        await trio.sleep(2)
        assert server.statistics().parked == 0
        assert await refusal(wire, retry_params(asked)) == USED


async def test_an_answer_at_the_deadline_counts_or_is_late(autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> str:
        with trio.move_on_after(60):
            return await ask_size(ctx)
        return "too late"

    server = server_with(it)
    seen = set()
    async with server.running(), connected_to(server) as wire:
        for _ in range(20):
            asked = await ask(wire)
            await trio.sleep(60)
            seen.add(await result_text(wire, retry_params(asked)))
    assert seen <= {"size 3", "too late"}


async def test_an_expiry_reaches_a_handler_under_a_shield_or_in_a_thread() -> None:
    ended: list[str] = []
    parking = Parking(StateSealer([KEY]), Limits(parked_seconds=0.05))

    async def it(ctx: Context) -> None:
        with trio.CancelScope(shield=True), pytest.raises(SessionClosed):
            await ctx.elicit("Which size?", Size)
        ended.append("shielded")

    def thread(ctx: Context) -> None:
        with pytest.raises(SessionClosed):
            trio.from_thread.run(ctx.elicit, "Which size?", Size)
        ended.append("threaded")

    server = server_with(it)
    server.tool(thread)
    with trio.fail_after(60):
        async with server.running(), connected_to(server) as wire:
            (run,) = server._runs
            run._parking = parking  # the clock is the real one here, because threads have no mock clock
            run.nursery.start_soon(parking.run)
            await ask(wire)
            await ask(wire, {"name": "thread"})
            await wait_until(lambda: len(ended) == 2)


# Handlers that are lost with their process, and run again.


class _Order:
    """A replica of a server with a tool that asks four times."""

    def __init__(self, *, replay: bool = True, version: str = "1") -> None:
        self.runs = 0
        self.server = server_with(self.order, replay=replay, state_keys=[KEY], version=version)

    async def order(self, ctx: Context) -> str:
        self.runs += 1
        first = size_of(await ctx.elicit("First?", Size))
        both = await ctx.ask(home=ListRoots(), form=Elicit("Second?", Size))
        third = await ctx.elicit("Third?", Size)
        home = len(await ctx.roots())
        return f"{first} {size_of(both['form'])} {third == Declined()} {home}"


ROUNDS: list[Object] = [
    {"form": accepted_size(1)},
    {"home": HOME, "form-2": accepted_size(2)},
    {"form-3": DECLINED},
    {"roots": HOME},
]


@req("mrtr-27")
@pytest.mark.parametrize("moves", list(itertools.product([False, True], repeat=len(ROUNDS))))
async def test_a_handler_that_runs_again_on_another_replica_asks_only_new_questions(
    moves: tuple[bool, ...], autojump_clock: MockClock
) -> None:
    replicas = [_Order() for _ in range(len(ROUNDS) + 1)]
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected_to(each.server)) for each in replicas]
        at, asked = 0, await ask(wires[0])
        for number, answers in enumerate(ROUNDS):
            assert [*asked["inputRequests"]] == [*answers]  # each replica gives the same keys
            at += moves[number]
            asked = await wires[at].call("tools/call", retry_params(asked, answers), rounds=False)
        assert asked["content"][0]["text"] == "1 2 True 1"
        assert [each.runs for each in replicas[: at + 1]] == [1] * (at + 1)


async def test_a_handler_without_replay_is_refused_by_other_replicas(autojump_clock: MockClock) -> None:
    here, there, changed = _Order(replay=False), _Order(replay=False), _Order(replay=True)
    async with (
        connected_to(here.server) as wire,
        connected_to(there.server) as other,
        connected_to(changed.server) as third,
    ):
        asked = await ask(wire)
        assert await refusal(other, retry_params(asked)) == NOT_WAITING
        assert await refusal(third, retry_params(asked)) == NOT_WAITING  # `replay` was not set when it asked
        assert await refusal(wire, retry_params(await ask(third))) == NOT_WAITING  # `replay` is not set here
        assert (there.runs, changed.runs) == (0, 1)
        await ask(wire, retry_params(asked))  # the state is not used up


@req("mrtr-25", "mrtr-27")
async def test_answers_are_kept_for_other_replicas(autojump_clock: MockClock) -> None:
    here, there = _Order(), _Order()
    async with connected_to(here.server) as wire, connected_to(there.server) as other:
        asked = await ask(wire, retry_params(await ask(wire)))
        asked = await ask(wire, retry_params(asked, {"home": HOME}))
        assert [*asked["inputRequests"]] == ["form-2"]
        asked = await ask(other, retry_params(asked, {"form-2": accepted_size(2)}))
        assert [*asked["inputRequests"]] == ["form-3"]


async def test_an_invalid_answer_to_a_handler_that_runs_again_can_be_corrected(autojump_clock: MockClock) -> None:
    here, there = _Order(), _Order()
    async with connected_to(here.server) as wire, connected_to(there.server) as other:
        asked = await ask(wire)
        said = await refusal(other, retry_params(asked, {"form": accepted_size("?")}))
        assert said.startswith("inputResponses['form']: the answer does not fit")
        assert await refusal(other, retry_params(asked, {"form": 7})) == "inputResponses must be an object of objects"
        assert await refusal(other, retry_params(asked, cast(Any, []))) == "inputResponses must be an object of objects"
        assert [*(await ask(other, retry_params(asked)))["inputRequests"]] == ["home", "form-2"]


@req("mrtr-24", "mrtr-25")
async def test_a_handler_that_runs_again_gets_only_answers_to_its_questions(
    autojump_clock: MockClock,
) -> None:
    here, there = _Order(), _Order()
    async with connected_to(here.server) as wire, connected_to(there.server) as other:
        asked = await ask(wire, retry_params(await ask(wire)))
        rest = await ask(
            other,
            retry_params(asked, {"form-2": accepted_size(2), "form-3": accepted_size(9), "form": accepted_size(9)}),
        )
        assert [*rest["inputRequests"]] == ["home"]
        rest = await ask(other, retry_params(rest, {"home": HOME}))
        assert [*rest["inputRequests"]] == ["form-3"]
        rest = await ask(other, retry_params(rest, {"form-3": DECLINED}))
        assert await result_text(other, retry_params(rest, {"roots": HOME})) == "3 2 True 1"


@req("mrtr-22", "mrtr-24")
async def test_returned_questions_take_only_answers_with_their_keys(autojump_clock: MockClock) -> None:
    async def it(ctx: Context) -> Any:
        if "b" not in ctx.answers:
            return InputRequired({key: Elicit(f"{key}?", Size) for key in "ab" if key not in ctx.answers})
        return json.dumps([sorted(ctx.answers), size_of(await ctx.elicit("And?", Size))])

    async with connected_to(server_with(it)) as wire:
        asked = await ask(wire)
        for malformed in ([], "a", {"a": []}, {"b": None}):
            said = await refusal(wire, retry_params(asked, cast(Any, malformed)))
            assert said == "inputResponses must be an object of objects"
        asked = await ask(wire, retry_params(asked, {"a": accepted_size(1), "c": 7, "form": accepted_size(4)}))
        assert [*asked["inputRequests"]] == ["b"]
        asked = await ask(wire, retry_params(asked, {"b": accepted_size(2), "form": accepted_size(4)}))
        assert [*asked["inputRequests"]] == ["form"]
        assert await result_text(wire, retry_params(asked, {"form": accepted_size(5)})) == '[["a", "b"], 5]'


async def test_a_page_that_must_be_visited_leaves_the_state_unchanged(autojump_clock: MockClock) -> None:
    states = []

    async def it(ctx: Context) -> Any:
        states.append(ctx.state)
        if ctx.state is None:
            return InputRequired({}, state="begun")
        if "url-1" not in ctx.answers:
            raise UrlElicitationRequired(ElicitUrl("Please pay.", "https://shop.example/visit"))
        return str(ctx.state)

    async with connected_to(server_with(it)) as wire:
        wire.answers["elicitation/create"] = lambda params: {"action": "accept"}
        (content,) = (await wire.call("tools/call", IT))["content"]
        assert content["text"] == "begun"
        assert states == [None, "begun", "begun"]


async def test_both_ways_of_asking_work_when_a_handler_runs_again(autojump_clock: MockClock) -> None:
    def new_server() -> Server:
        async def it(ctx: Context) -> Any:
            size = size_of(await ctx.elicit("Which size?", Size))
            if "form" not in ctx.answers:
                return InputRequired({"form": Elicit("Sure?", Size)}, state=size)
            more = size_of(await ctx.elicit("And?", Size))
            sure = size_of(Elicit("Sure?", Size).read(ctx.answers["form"]))
            return f"{size} {sure} {more} {ctx.state}"

        return server_with(it, replay=True, state_keys=[KEY])

    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected_to(new_server())) for _ in range(4)]
        asked = await ask(wires[0])
        asked = await ask(wires[1], retry_params(asked, {"form": accepted_size(1)}))
        asked = await ask(wires[2], retry_params(asked, {"form": accepted_size(2)}))
        assert [*asked["inputRequests"]] == ["form-2"]
        assert await result_text(wires[3], retry_params(asked, {"form-2": accepted_size(3)})) == "1 2 3 1"


async def test_prompts_and_resources_can_run_again(autojump_clock: MockClock) -> None:
    def new_server() -> Server:
        server = Server("parking", state_keys=[KEY])
        server.prompt(name="it", replay=True)(ask_size)
        server.resource("ask://it", replay=True)(ask_size)
        return server

    async with connected_to(new_server()) as wire, connected_to(new_server()) as other:
        for method, params in [("prompts/get", IT), ("resources/read", {"uri": "ask://it"})]:
            asked = await ask(wire, params, method)
            result = await other.call(method, retry_params(asked, params=params), rounds=False)
            assert "size 3" in json.dumps(result)


async def test_new_keys_seal_and_old_ones_are_still_read(autojump_clock: MockClock) -> None:
    def new_server(*keys: bytes) -> Server:
        return server_with(ask_size, replay=True, state_keys=keys)

    new = b"n" * 32
    async with (
        connected_to(new_server(KEY)) as before,
        connected_to(new_server(new, KEY)) as turning,
        connected_to(new_server(new)) as after,
    ):
        asked = await ask(before)
        assert await result_text(turning, retry_params(asked)) == "size 3"
        assert await refusal(after, retry_params(asked)) == NOT_YOURS
        assert await result_text(after, retry_params(await ask(turning))) == "size 3"


# `Parking` alone.


async def test_a_parked_call_that_is_given_up_is_removed(autojump_clock: MockClock) -> None:
    parking = Parking(StateSealer([KEY]), Limits())
    place, asking = parking.park(context(IT), FORM)
    assert isinstance(place, ParkedCall)
    assert (len(parking.calls), [each.key for each in place.open]) == (1, ["form"])
    parking.give_up(place)
    parking.give_up(place)
    assert len(parking.calls) == 0
    with pytest.raises(RequestError, match="has been used"):
        await parking.retry(context(retry_params(asking)))
    assert not place.resumed.is_set()
