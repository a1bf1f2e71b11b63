"""The public interface of a client, apart from its parts: options, plain requests, values by type."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypedDict, cast

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, ScriptedHttpServer, scripted_server
from tests.client.matrix import no_tasks_left, tcp_connects_to
from tests.client.sample_server import sample_server
from tests.http.scripted_server import C, D, E
from tests.requirements import req
from trio_mcp import CacheHints, RequestError, Server, UsageError, serve_http, serve_stdio
from trio_mcp.client import Client, open_client
from trio_mcp.core import REVISIONS, PromptReference
from trio_mcp.relay import open_relay
from trio_mcp.testing import open_memory_pair

DISCOVERED = {"supportedVersions": [E], "capabilities": {"tools": {}}, "resultType": "complete"}


class ToolServer:
    """A server that lists `listed`, or refuses to list, and answers each call with the next of `calls`."""

    def __init__(self, *calls: dict[str, Any], listed: list[dict[str, Any]] | None = None) -> None:
        self.calls = list(calls)
        self.listed = listed

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "server/discover":
            await out.json(received.answer(DISCOVERED))
        elif received.operation == "tools/list" and self.listed is None:
            await out.json(received.error(-32603, "the list is away"), 200)
        elif received.operation == "tools/list":
            await out.json(received.answer({"tools": self.listed, "resultType": "complete"}))
        else:
            said = self.calls.pop(0)
            answer = received.error(**said) if "code" in said else received.answer({"resultType": "complete", **said})
            await out.json(answer, 400 if "code" in said else 200)


@contextlib.asynccontextmanager
async def open_tools(tools: ToolServer, **options: Any) -> AsyncIterator[tuple[Client, ScriptedHttpServer]]:
    async with no_tasks_left(), scripted_server(tools.handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, **{"revision": E, **options}) as client:
                yield client, scripted


class Record(TypedDict):
    result: int


THREE = {"content": [{"type": "text", "text": "3"}], "structuredContent": {"result": 3}}
BOXED = {"type": "object", "properties": {"result": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
MISMATCH = {"code": -32020, "message": "the headers do not fit"}


# Values by type.


async def test_a_value_that_the_server_has_wrapped_is_unwrapped(autojump_clock: MockClock) -> None:
    listed = [{"name": "t", "inputSchema": {"type": "object"}, "outputSchema": BOXED}]
    async with open_tools(ToolServer(THREE, listed=listed)) as (client, _):
        wanted: Any = int | None
        assert await client.call_tool("t", returns=wanted) == 3


@pytest.mark.parametrize("revision", [E, D, C])
@pytest.mark.parametrize(
    ("given", "hint", "value"),
    [
        ("", None, None),
        ("", str | None, None),
        ("abc", str | None, "abc"),
        ("abc", bytes, b"abc"),
        ("", bytes | None, None),
    ],
)
async def test_a_result_without_structured_content_is_converted_to_a_value(
    given: str, hint: Any, value: Any, revision: str, autojump_clock: MockClock
) -> None:
    server = Server("plain")

    @server.tool
    async def give(text: str, binary: bool) -> bytes | str | None:
        return (text.encode() if binary else text) or None

    async with open_client(server, revision=revision) as client:
        arguments = {"text": given, "binary": isinstance(value, bytes)}
        assert await client.call_tool("give", arguments, returns=hint) == value


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_value_is_the_same_in_every_revision_wrapped_or_not(revision: str, autojump_clock: MockClock) -> None:
    server = Server("boxes")

    @server.tool
    async def number(mapped: bool) -> int | dict[str, int]:
        return {"result": 3} if mapped else 3

    @server.tool
    async def record() -> Record:
        return {"result": 3}

    async with open_client(server, revision=revision) as client:
        for hint in (int | dict[str, int], Any, list[int] | object):
            assert await client.call_tool("number", {"mapped": False}, returns=hint) == 3
            assert await client.call_tool("number", {"mapped": True}, returns=hint) == {"result": 3}
            assert await client.call_tool("record", returns=hint) == {"result": 3}


async def test_an_invalid_type_is_refused_before_the_tool_runs(autojump_clock: MockClock) -> None:
    async with open_tools(ToolServer(listed=[])) as (client, server):
        unusable: Any = [int]
        with pytest.raises(UsageError, match="returns"):
            await client.call_tool("t", returns=unusable)
        assert server.operations == ["server/discover"]


async def test_the_tools_are_listed_once_for_an_unlisted_tool(autojump_clock: MockClock) -> None:
    async with open_tools(ToolServer(THREE, THREE, THREE, listed=[])) as (client, server):
        for _ in range(3):
            assert await client.call_tool("t", returns=int) == 3
        assert server.operations.count("tools/list") == 1


async def test_a_tool_is_called_though_the_list_is_refused(autojump_clock: MockClock) -> None:
    async with open_tools(ToolServer(THREE)) as (client, _):
        assert await client.call_tool("t", returns=int) == 3
        assert "the list is away" in client.deviations[-1]


# Plain requests.


async def test_a_header_mismatch_of_a_plain_request_is_an_error_without_a_retry(autojump_clock: MockClock) -> None:
    async with open_tools(ToolServer(MISMATCH)) as (client, server):
        with pytest.raises(RequestError, match="do not fit") as refused:
            await client.request("tools/call", {"name": "t", "arguments": {}})
        assert refused.value.code == MISMATCH["code"]
        assert server.operations.count("tools/list") == 0


@req("http-93")
async def test_a_header_mismatch_makes_the_client_list_the_tools_and_retry_once(autojump_clock: MockClock) -> None:
    region = {"region": {"type": "string", "x-mcp-header": "Region"}}
    listed = [{"name": "t", "inputSchema": {"type": "object", "properties": region}}]
    async with open_tools(ToolServer(MISMATCH, THREE, MISMATCH, MISMATCH, listed=listed)) as (client, server):
        result = await client.call_tool("t", {"region": "north"})
        assert result.structured_content == {"result": 3}
        calls = [each for each in server.requests if each.operation == "tools/call"]
        assert [each.headers.get("Mcp-Param-Region") for each in calls] == [None, "north"]
        with pytest.raises(RequestError, match="do not fit"):
            await client.call_tool("t", {"region": "north"})


@pytest.mark.parametrize("meta", [None, 3, "text", []])
@pytest.mark.parametrize("more", [None, {"x/tenant": "A"}])
async def test_meta_that_is_not_a_mapping_is_refused_before_sending(
    meta: Any, more: Any, autojump_clock: MockClock
) -> None:
    async with open_client(sample_server()) as client:
        with pytest.raises(UsageError, match="_meta must be a mapping, got"):
            await client.request("tools/list", {"_meta": meta}, meta=more)
        await client.list_tools_page()


CALLS: list[Callable[..., Any]] = [
    lambda client, **request_options: client.list_tools_page(**request_options),
    lambda client, **request_options: client.list_resources_page(**request_options),
    lambda client, **request_options: client.list_resource_templates_page(**request_options),
    lambda client, **request_options: client.list_prompts_page(**request_options),
    lambda client, **request_options: client.read_resource("house://one", **request_options),
    lambda client, **request_options: client.get_prompt("review", {"code": "x"}, **request_options),
    lambda client, **request_options: client.call_tool("greet", {"name": "you"}, **request_options),
    lambda client, **request_options: client.complete(PromptReference("review"), "language", "py", **request_options),
    lambda client, **request_options: client.request("tools/list", **request_options),
]


@pytest.mark.parametrize("call", CALLS)
async def test_meta_is_sent_with_each_call(call: Callable[..., Any], autojump_clock: MockClock) -> None:
    sent: list[bytes] = []
    tap = lambda way, data: sent.append(data if way == "out" else b"")  # noqa: E731
    async with open_client(sample_server(), revision=D, tap=tap) as client:
        await call(client, meta={"x/tenant": "A"})
    asked = [json.loads(line) for line in b"".join(sent).splitlines()]
    assert [each["params"]["_meta"] for each in asked if "_meta" in each.get("params", {})] == [{"x/tenant": "A"}]


async def test_an_unknown_request_option_is_refused(autojump_clock: MockClock) -> None:
    async with open_client(sample_server()) as client:
        wrong: dict[str, Any] = {"metadata": {}}
        with pytest.raises(
            TypeError, match=r"^unknown request option 'metadata'; the options are meta, headers, timeout, max_timeout$"
        ):
            await client.list_prompts_page(**wrong)
        with pytest.raises(
            TypeError, match=r"^unknown request option 'metadata'; the options are meta, headers, timeout, max_timeout$"
        ):
            await client.read_resource("notes://x", **wrong)


async def test_on_progress_must_be_a_function(autojump_clock: MockClock) -> None:
    async with open_client(sample_server()) as client:
        with pytest.raises(UsageError, match=r"^on_progress must be a function, got bool$"):
            await client.call_tool("forecast", on_progress=cast("Any", True))


@pytest.mark.parametrize("method", ["call_tool", "stream_tool", "get_prompt"])
async def test_arguments_given_as_keywords_are_refused_with_advice(method: str, autojump_clock: MockClock) -> None:
    async with open_client(sample_server()) as client:
        wrong: dict[str, Any] = {"city": "Oslo"}
        with pytest.raises(TypeError, match=rf"one mapping: {method}\('forecast', {{'city': ...}}\)"):
            await getattr(client, method)("forecast", **wrong)
        with pytest.raises(
            TypeError, match=r"option 'read_timeout'.*: write timeout=5, or .* trio\.move_on_after\(5\)$"
        ):
            await getattr(client, method)("forecast", read_timeout=5)
        wrong = {"progress_callback": print}
        with pytest.raises(TypeError, match=r": write call_tool\('forecast', {\.\.\.}, on_progress=function\)$"):
            await client.call_tool("forecast", **wrong)


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("arguments", lambda client, wrong: client.call_tool("forecast", wrong)),
        ("arguments", lambda client, wrong: client.stream_tool("forecast", wrong).__aenter__()),
        ("arguments", lambda client, wrong: client.get_prompt("p", wrong)),
        ("context", lambda client, wrong: client.complete(PromptReference("p"), "a", "", context=wrong)),
        ("params", lambda client, wrong: client.request("tools/list", wrong)),
        ("meta", lambda client, wrong: client.call_tool("t", meta=wrong)),
        ("headers", lambda client, wrong: client.call_tool("t", headers=wrong)),
    ],
)
@pytest.mark.parametrize("wrong", ["Oslo", ["Oslo"], ""])
async def test_an_argument_that_must_be_a_mapping_is_checked_before_sending(
    what: str, ask: Callable[[Client, Any], Any], wrong: Any, autojump_clock: MockClock
) -> None:
    async with open_client(sample_server()) as client:
        with pytest.raises(UsageError, match=rf"^{what} must be a mapping by name, got {type(wrong).__name__}$"):
            await ask(client, wrong)


async def test_the_answer_to_a_question_is_sent_with_new_headers(autojump_clock: MockClock) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}}
    question = {"method": "elicitation/create", "params": {"message": "Which size?", "requestedSchema": schema}}
    asks = {"resultType": "input_required", "inputRequests": {"size": question}, "requestState": "s"}
    token = "old"

    async def think(asked: Any) -> dict[str, Any]:
        nonlocal token
        await trio.sleep(3600)
        token = "new"
        return {"size": 1}

    options: dict[str, Any] = {"elicitation": think, "headers": lambda: {"Authorization": token}}
    async with open_tools(ToolServer(asks, THREE), **options) as (client, server):
        await client.call_tool("t", headers={"X-Of": "this call"})
        sent_headers = [(each.headers.get("Authorization"), each.headers.get("X-Of")) for each in server.requests[1:]]
        assert sent_headers == [("old", "this call"), ("new", "this call")]


# Options.


@pytest.mark.parametrize("url", [URL, "ws://127.0.0.1:3000/ws"])
async def test_an_exception_of_the_headers_function_is_the_cause_of_a_failed_opening(
    url: str, autojump_clock: MockClock
) -> None:
    broken = ZeroDivisionError("no token today")

    def headers() -> dict[str, str]:
        raise broken

    async with no_tasks_left(), scripted_server(ToolServer().handle) as scripted:
        with (
            tcp_connects_to(scripted.connect),
            pytest.raises(UsageError, match="function given as headers raised") as failed,
        ):
            async with open_client(url, headers=headers):
                raise AssertionError("it was opened")
    assert failed.value.__cause__ is broken


class AsyncCallback:
    async def __call__(self, *given: Any) -> None:
        raise AssertionError("it was called")


async def async_callback(*given: Any) -> None:
    raise AssertionError("it was called")


@pytest.mark.parametrize(
    "callback", [async_callback, AsyncCallback(), functools.partial(async_callback, 1), AsyncCallback().__call__]
)
@pytest.mark.parametrize("name", ["on_log", "on_elicitation_complete", "headers", "meta", "tap", "stderr"])
def test_an_async_callback_is_refused_where_a_plain_function_is_needed(name: str, callback: Any) -> None:
    options: dict[str, Any] = {name: callback}
    with pytest.raises(UsageError, match=f"{name} .* plain function"):
        open_client(["python"], **options)


@pytest.mark.parametrize("name", ["on_log", "on_elicitation_complete", "meta", "tap", "stderr"])
def test_a_callback_that_is_not_a_function_is_refused(name: str) -> None:
    options: dict[str, Any] = {name: "Geheim"}
    with pytest.raises(UsageError, match=f"^{name} must be a function, got str$"):
        open_client(["python"], **options)


def test_limits_and_headers_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(UsageError, match="got int"):
        open_client(URL, limits=cast("Any", 5))
    with pytest.raises(UsageError, match=r"^headers must be a mapping .* got str$"):
        open_client(URL, headers=cast("Any", "Authorization: Bearer Geheim"))


@pytest.mark.parametrize(
    "target", [["python", "x.py"], ("python",), Server("here"), trio.testing.memory_stream_pair()[0]]
)
def test_headers_are_refused_for_targets_without_http(target: Any) -> None:
    with pytest.raises(UsageError, match=r"^a (command|Server|StapledStream) does not support the options: headers$"):
        open_client(target, headers={"Authorization": "Bearer Geheim"})


@pytest.mark.parametrize("wrap", [lambda headers: headers, lambda headers: lambda: headers], ids=["given", "made"])
@pytest.mark.parametrize("headers", [{"X": "y", "Authorization": None}, {None: "x"}])
@pytest.mark.parametrize("url", [URL, "ws://127.0.0.1:3000/ws"])
async def test_a_header_that_is_not_a_string_is_refused(
    url: str, headers: Any, wrap: Callable[[Any], Any], autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), scripted_server(ToolServer().handle) as scripted:
        with tcp_connects_to(scripted.connect), pytest.raises(UsageError, match="must be strings, got NoneType"):
            async with open_client(url, headers=wrap(headers)):
                raise AssertionError("it was opened")


async def test_the_headers_function_must_return_a_mapping(autojump_clock: MockClock) -> None:
    sent_headers: Any = {}
    async with open_tools(ToolServer(THREE), headers=lambda: sent_headers) as (client, _):
        sent_headers = "Authorization: Bearer Geheim"
        with pytest.raises(UsageError, match=r"^headers must be a mapping by name, got str$"):
            await client.call_tool("t")
        sent_headers = {"Authorization": "Bearer Geheim"}
        await client.call_tool("t")


@pytest.mark.parametrize(
    ("data", "noted"),
    [
        ({"requiredCapabilities": {"elicitation": {"form": {}}}}, ["elicitation"]),
        ({"requiredCapabilities": {"elicitation": {"url": {}}}}, ["elicitation_url"]),
        ({"requiredCapabilities": {"sampling": {"tools": {}}, "roots": {}}}, ["sampling_tools, roots"]),
        ({"requiredCapabilities": {"sampling": {}, "elicitation": {}}}, ["sampling, elicitation"]),
        ({"requiredCapabilities": {"sampling": True, "telepathy": {}}}, []),
        ({"requiredCapabilities": "sampling"}, []),
        (None, []),
    ],
)
async def test_an_error_about_a_missing_capability_names_the_option_for_it(
    data: Any, noted: list[str], autojump_clock: MockClock
) -> None:
    refusal = {"code": -32021, "message": "it is missing", "data": data}
    async with open_tools(ToolServer(refusal)) as (client, _):
        with pytest.raises(RequestError, match="missing") as refused:
            await client.call_tool("t")
    assert getattr(refused.value, "__notes__", []) == [
        f"declare it with these options of the client: {x}" for x in noted
    ]


# The run, the thread and the event loop of a client.


@pytest.mark.parametrize("make", [open_client, open_relay])
async def test_an_error_tells_of_a_forgotten_async_with(make: Callable[..., Any]) -> None:
    usage = rf"write async with {make.__name__}\(\.\.\.\) as "
    with pytest.raises(AttributeError, match=rf"'call_tool' yet: {usage}"):
        make(Server("here")).call_tool  # noqa: B018
    with pytest.raises(TypeError, match=usage):
        await make(Server("here"))
    with pytest.raises(TypeError, match=usage), make(Server("here")):
        raise AssertionError("it was entered")


USES: list[Callable[[Client], Any]] = [
    lambda client: client.call_tool("forecast", {"city": "Oslo"}),
    lambda client: client.list_tools_page(),
    lambda client: client.read_resource("notes://x"),
    lambda client: client.set_log_level("debug"),
    lambda client: client.set_roots([]),
    lambda client: client.listen(tools=True).__aenter__(),
    lambda client: client.aclose(),
    lambda client: client.ping(),
]


@pytest.mark.parametrize("run", [trio.run, lambda use: asyncio.run(use())], ids=["Trio", "asyncio"])
@pytest.mark.parametrize("use", USES)
async def test_a_call_from_another_run_is_refused_and_does_not_harm_the_client(
    use: Callable[[Client], Any], run: Callable[..., Any]
) -> None:
    async with open_client(sample_server(), revision=D, roots=[]) as client:

        async def use_in_other_run() -> None:
            await use(client)

        with pytest.raises(UsageError, match=r"another trio\.run.* trio\.from_thread\.run"):
            await trio.to_thread.run_sync(run, use_in_other_run)
        assert (await client.list_tools_page()).tools


async def test_a_thread_can_use_a_client_through_its_own_run() -> None:
    async with open_client(sample_server()) as client:
        page = await trio.to_thread.run_sync(lambda: trio.from_thread.run(client.list_tools_page))
        assert page.tools


async def test_the_end_of_a_block_has_a_timeout(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = trio.current_time()
    with trio.CancelScope() as scope:
        async with open_client(sample_server()) as client:
            monkeypatch.setattr(client, "aclose", trio.sleep_forever)
            scope.cancel()
    assert scope.cancelled_caught
    assert 30 < trio.current_time() - begun < 60


@pytest.mark.parametrize(
    "begin",
    [
        lambda server: open_client(server).__aenter__(),
        lambda server: open_memory_pair(server).__aenter__(),
        lambda server: open_relay(server).__aenter__(),
        lambda server: server.running().__aenter__(),
        serve_stdio,
        serve_http,
    ],
    ids=["client", "pair", "relay", "run", "stdio", "HTTP"],
)
def test_running_on_another_event_loop_is_a_usage_error(begin: Callable[[Server], Awaitable[object]]) -> None:
    async def use() -> None:
        await begin(Server("here"))

    with pytest.raises(UsageError, match="trio_mcp runs on Trio"):
        asyncio.run(use())


# Checkpoints.


async def listen(client: Client) -> None:
    async with client.listen(tools=True):
        pass


async def follow(client: Client) -> None:
    async with client.stream_tool("add", {"a": 1, "b": 2}) as call:
        await call.result()
        with assert_checkpoints():
            await call.result()


ADD = {"a": 1, "b": 2}
WAYS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "request": lambda client: client.request("tools/list"),
    "notify": lambda client: client.notify("com.example/heard"),
    "list_tools_page": lambda client: client.list_tools_page(),
    "list_tools": lambda client: client.list_tools(),
    "call_tool": lambda client: client.call_tool("add", ADD),
    "call_tool with returns": lambda client: client.call_tool("add", ADD, returns=int),
    "stream_tool": follow,
    "start_task": lambda client: client.start_task("add", ADD),
    "list_resources_page": lambda client: client.list_resources_page(),
    "list_resources": lambda client: client.list_resources(),
    "list_resource_templates_page": lambda client: client.list_resource_templates_page(),
    "list_resource_templates": lambda client: client.list_resource_templates(),
    "read_resource": lambda client: client.read_resource("house://one"),
    "list_prompts_page": lambda client: client.list_prompts_page(),
    "list_prompts": lambda client: client.list_prompts(),
    "get_prompt": lambda client: client.get_prompt("review", {"code": "x"}),
    "complete": lambda client: client.complete(PromptReference("review"), "language", "p"),
    "set_log_level": lambda client: client.set_log_level("info"),
    "set_roots": lambda client: client.set_roots(["/"]),
    "listen": listen,
    "aclose": lambda client: client.aclose(),
}


def test_the_checkpoint_cases_cover_every_async_method() -> None:
    methods = {
        name
        for name, each in vars(Client).items()
        if not name.startswith("_") and (inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each))
    }
    assert methods - {"ping", "wait_closed"} == {name.partition(" ")[0] for name in WAYS} - {
        "listen",
        "stream_tool",
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("revision", [D, E])
async def test_every_async_method_is_a_checkpoint_and_can_be_cancelled(
    revision: str, way: str, autojump_clock: MockClock
) -> None:
    """The second time the answer may be cached.  A cancellation does not affect later calls."""
    lists = ("tools", "resources", "resources/templates", "prompts")
    server = sample_server(cache={f"{name}/list": CacheHints(ttl_ms=60_000) for name in lists})
    async with no_tasks_left(), open_client(server, revision=revision, roots=["/tmp"], tasks=True) as client:
        for _ in range(2):
            with trio.CancelScope() as scope:
                scope.cancel()
                if way != "aclose":
                    await WAYS[way](client)
            assert scope.cancelled_caught or way == "aclose"
            with assert_checkpoints():
                await WAYS[way](client)
        if way != "aclose":
            assert await client.call_tool("add", ADD, returns=int) == 3
        else:
            with assert_checkpoints():
                await client.wait_closed()
        if revision == D and way == "request":
            with assert_checkpoints():
                await client.ping()
