"""Servers made of parts: middleware, mounted servers, lifespans, and the run that connections share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.principals import principal_meta, principals_in_meta
from tests.server.raw_client import PROGRESS, ErrorResponse, RawClient, connected, every_revision
from trio_mcp import Context, Limits, RequestError, Server, ToolError, UsageError, serve_stream
from trio_mcp.core import Request
from trio_mcp.types import Tool

Object = dict[str, Any]
CallNext = Callable[[Request], Any]


def text_of(result: Object) -> str:
    return "\n".join(block["text"] for block in result["content"])


def target_of(request: Request) -> str:
    """The name, the URI or the method of a request."""
    params = request.params
    return str(params.get("name") or params.get("uri") or params.get("ref", {}).get("name") or request.method)


class Part:
    """A server with an entry of each kind, which logs its events.

    All parts of a test share `log`.  An entry of it is the name of a part, and the event.
    """

    def __init__(self, name: str, log: list[Any], **options: Any) -> None:
        self.name, self.log = name, log
        options = {"middleware": [self.middleware], "lifespan": self.lifespan, **options}
        self.server = server = Server(name, **options)

        @server.tool(name=f"{name}_tool")
        async def tool(text: str = "") -> Any:
            return await self.handle(text)

        @server.prompt(name=f"{name}_prompt")
        async def prompt(text: str = "") -> Any:
            return await self.handle(text)

        @server.resource(f"{name}://now", name=f"{name}_resource")
        async def resource() -> Any:
            return await self.handle("")

        @server.resource(f"{name}s://{{text}}", name=f"{name}_template")
        async def template(text: str) -> Any:
            return await self.handle(text)

        @server.completion(f"{name}_prompt", "text")
        async def complete(value: str, ref: Any, ctx: Context) -> list[str]:
            self.log.append((self.name, "completes", ref.name, ctx.lifespan))
            return [await self.handle(value)]

        @server.completion(f"{name}s://{{text}}")
        async def complete_uri(value: str, ref: Any, ctx: Context) -> list[str]:
            self.log.append((self.name, "completes", ref.uri, ctx.lifespan))
            return [await self.handle(value)]

    async def handle(self, text: str) -> Any:
        self.log.append((self.name, "handles", text))
        return f"{text} by {self.name}"

    async def middleware(self, ctx: Context, request: Request, call_next: CallNext) -> Object:
        self.log.append((self.name, "in", target_of(request), ctx.lifespan))
        try:
            result: Object = await call_next(request)
            return result
        finally:
            self.log.append((self.name, "out", target_of(request), ctx.lifespan))

    @contextlib.asynccontextmanager
    async def lifespan(self, server: Server) -> AsyncIterator[str]:
        assert server is self.server
        self.log.append((self.name, "begins"))
        yield f"that of {self.name}"
        self.log.append((self.name, "ends"))


def part(name: str = "part", **options: Any) -> Part:
    return Part(name, [], **options)


def complete(ref: Object, value: str = "x") -> Object:
    return {"ref": ref, "argument": {"name": "text", "value": value}}


def requests_to(name: str, prefix: str = "") -> dict[str, tuple[str, Object, str]]:
    """By kind: the method and the params of a request to the part of this name, and the target in its middleware."""
    return {
        "tool": ("tools/call", {"name": f"{prefix}{name}_tool"}, f"{name}_tool"),
        "prompt": ("prompts/get", {"name": f"{prefix}{name}_prompt"}, f"{name}_prompt"),
        "resource": ("resources/read", {"uri": f"{name}://now"}, f"{name}://now"),
        "template": ("resources/read", {"uri": f"{name}s://x"}, f"{name}s://x"),
        "completion": (
            "completion/complete",
            complete({"type": "ref/prompt", "name": f"{prefix}{name}_prompt"}),
            f"{name}_prompt",
        ),
        "completion of a URI": (
            "completion/complete",
            complete({"type": "ref/resource", "uri": f"{name}s://{{text}}"}),
            "completion/complete",
        ),
    }


KINDS = tuple(requests_to(""))
every_kind = pytest.mark.parametrize("kind", KINDS)


# Middleware.


def tracing(name: str, log: list[str]) -> Callable[..., Any]:
    async def trace(ctx: Context, request: Request, call_next: CallNext) -> Any:
        log.append(f"{name} {request.method}")
        try:
            return await call_next(request)
        finally:
            log.append(f"/{name}")

    return trace


@req("tool-07", "cmpl-02", "cmpl-04", "gen-01")
@every_revision
async def test_middleware_wraps_every_request_for_entries_of_a_server(revision: str, autojump_clock: MockClock) -> None:
    log: list[str] = []
    one = part(middleware=[tracing("a", log), tracing("b", log)])
    methods = [(method, params) for method, params, _ in requests_to("part").values()]
    methods += [(f"{each}/list", {}) for each in ("tools", "prompts", "resources", "resources/templates")]
    if revision != "2026-07-28":
        methods += [(f"resources/{each}subscribe", {"uri": "part://now"}) for each in ("", "un")]
    async with connected(one.server, revision, log_level="info") as wire:
        for method, params in methods:
            log.clear()
            await wire.call(method, params)
            assert log == [f"a {method}", f"b {method}", "/b", "/a"]
        log.clear()
        await wire.about()
        if not wire.modern:
            await wire.call("ping")
            await wire.set_level("error")
        assert log == []  # the session itself answers these requests


@req("tool-07", "tool-06", "prm-12")
@every_revision
@every_kind
async def test_middleware_may_replace_the_request(kind: str, revision: str, autojump_clock: MockClock) -> None:
    one = part()
    method, params, _ = requests_to("part")[kind]

    async def redirect(ctx: Context, request: Request, call_next: CallNext) -> Any:
        return await call_next(Request(request.id, request.method, params))

    two = Server("two", middleware=[redirect])
    two.mount(one.server)
    async with connected(one.server, revision) as plain, connected(two, revision) as wire:
        expected = await plain.call(method, params)
        # The entry of the original request need not exist.
        changed = await wire.call(method, {"name": "nothing", "uri": "nothing://"})
        assert {**changed, "_meta": None} == {**expected, "_meta": None}


@req("tool-06")
@every_revision
async def test_arguments_from_middleware_are_validated(revision: str, autojump_clock: MockClock) -> None:
    one = part()

    async def spoil(ctx: Context, request: Request, call_next: CallNext) -> Any:
        return await call_next(Request(request.id, request.method, {**request.params, "arguments": {"text": 3}}))

    one.server._catalog.middleware = [spoil]
    async with connected(one.server, revision) as wire:
        with contextlib.suppress(ErrorResponse):
            assert (await wire.call("tools/call", {"name": "part_tool"}))["isError"] is True
    assert ("part", "handles", 3) not in one.log


@req("tool-07")
@every_revision
async def test_middleware_may_change_the_result(revision: str, autojump_clock: MockClock) -> None:
    async def sign(ctx: Context, request: Request, call_next: CallNext) -> Object:
        result = await call_next(request)
        return {**result, "_meta": {"com.example/signed": True}}

    one = part(middleware=[sign])
    async with connected(one.server, revision) as wire:
        for method, params, _ in requests_to("part").values():
            assert (await wire.call(method, params))["_meta"]["com.example/signed"] is True
        assert (await wire.call("tools/list"))["_meta"]["com.example/signed"] is True


@req("tool-24")
@pytest.mark.parametrize("options", [{}, {"filter": lambda principal, item: True}], ids=["all", "filter"])
@every_revision
async def test_middleware_may_remove_an_item_of_a_list_for_one_caller(
    revision: str, options: Object, autojump_clock: MockClock
) -> None:
    async def hide(ctx: Context, request: Request, call_next: CallNext) -> Object:
        result: Object = await call_next(request)
        if hidden:
            del result["tools"][1]
            result["tools"][0]["inputSchema"]["title"] = "theirs"
        return result

    server = Server("hiding", middleware=[hide], **options)
    for name in ("open", "secret"):
        server.tool(name=name)(lambda: None)
    async with connected(server, revision) as wire:
        hidden = False
        everything = await wire.call("tools/list")
        assert [tool["name"] for tool in everything["tools"]] == ["open", "secret"]
        hidden = True
        (left,) = (await wire.call("tools/list"))["tools"]
        assert left["inputSchema"]["title"] == "theirs"
        hidden = False
        assert await wire.call("tools/list") == everything


async def refuse(ctx: Context, request: Request, call_next: CallNext) -> Object:
    raise RequestError(4711, "not now")


async def replace(ctx: Context, request: Request, call_next: CallNext) -> Object:
    return {"content": [{"type": "text", "text": "instead"}]}


async def tool_error(ctx: Context, request: Request, call_next: CallNext) -> Object:
    raise ToolError("not today")


@req("tool-07", "cmpl-02", "gen-01")
@every_revision
@every_kind
async def test_middleware_may_refuse_a_request(kind: str, revision: str, autojump_clock: MockClock) -> None:
    one = part(middleware=[refuse])
    method, params, _ = requests_to("part")[kind]
    async with connected(one.server, revision) as wire:
        with pytest.raises(ErrorResponse, match="not now") as refused:
            await wire.call(method, params)
        assert refused.value.code == 4711
    assert not any(entry[1] == "handles" for entry in one.log)


@every_revision
@pytest.mark.parametrize(
    ("middleware", "text", "fails"), [(replace, "instead", False), (tool_error, "not today", True)]
)
async def test_middleware_may_answer_in_the_place_of_a_tool(
    middleware: Any, text: str, fails: bool, revision: str, autojump_clock: MockClock
) -> None:
    one = part(middleware=[middleware])
    async with connected(one.server, revision) as wire:
        result = await wire.call("tools/call", {"name": "nothing"})
    assert (text_of(result), result.get("isError", False)) == (text, fails)


@every_revision
@every_kind
async def test_middleware_gets_the_exception_of_a_handler_unchanged(
    kind: str, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[BaseException] = []
    error = ValueError("hunter2")

    async def watch(ctx: Context, request: Request, call_next: CallNext) -> Object:
        try:
            return await call_next(request)  # type: ignore[no-any-return]
        except ValueError as caught:
            raised.append(caught)
            raise RequestError(4711, "mended") from None

    one = part(middleware=[watch])

    async def fail(text: str) -> Any:
        raise error

    one.handle = fail  # type: ignore[method-assign]
    method, params, _ = requests_to("part")[kind]
    async with connected(one.server, revision) as wire:
        with pytest.raises(ErrorResponse, match="mended"):
            await wire.call(method, params)
    assert raised == [error]
    assert not caplog.records


NO_RESULTS: dict[str, Any] = {
    "none": None,
    "a number": 3,
    "a list": [],
    "text": "done",
    "an object inside": {"content": [object()]},
    "not a number": {"content": [], "_meta": {"com.example/x": math.nan}},
    "metadata that is no object": {"content": [], "_meta": 3},
}


@every_revision
@pytest.mark.parametrize("kind", NO_RESULTS)
async def test_middleware_without_a_valid_result_fails_only_its_call(
    kind: str, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def spoil(ctx: Context, request: Request, call_next: CallNext) -> Any:
        await call_next(request)
        return NO_RESULTS[kind]

    one = part()
    one.server._catalog.middleware = [spoil]
    async with connected(one.server, revision) as wire:
        result = await wire.call("tools/call", {"name": "part_tool"})
        assert "the server's log says why" in text_of(result)
        (record,) = caplog.records
        if not isinstance(NO_RESULTS[kind], dict):  # most often a forgotten `return`
            assert f"a middleware must return a result, got {type(NO_RESULTS[kind]).__name__}" in str(record.exc_info)
        assert await wire.about()


@every_revision
async def test_middleware_knows_the_principal_and_may_report_progress(revision: str, autojump_clock: MockClock) -> None:
    async def speak(ctx: Context, request: Request, call_next: CallNext) -> Any:
        await ctx.progress(1, message=f"{ctx.principal} {ctx.headers['authorization']}")
        try:
            return await call_next(request)
        finally:
            await ctx.progress(2)

    one = part(middleware=[speak])
    with principals_in_meta():
        async with connected(one.server, revision, meta=principal_meta("ada")) as wire:
            await wire.call("tools/call", {"name": "part_tool"}, progress="p")
    said = {} if revision == "2024-11-05" else {"message": "ada Bearer ada"}
    assert wire.noted(PROGRESS) == [
        {"progressToken": "p", "progress": 1, **said},
        {"progressToken": "p", "progress": 2},
    ]


# Mounting.


def mounted(log: list[Any], **options: Any) -> tuple[Part, Part, Part]:
    """Three servers, each mounted in the one before: the leaf's `leaf_tool` is `m_l_leaf_tool` at the top."""
    top, middle, leaf = (Part(name, log, **options) for name in ("top", "middle", "leaf"))
    middle.server.mount(leaf.server, prefix="l_")
    top.server.mount(middle.server, prefix="m_")
    return top, middle, leaf


PREFIXES = {"top": "", "middle": "m_", "leaf": "m_l_"}
LISTED = {
    "tools/list": ("tools", "name", "{prefix}{name}_tool"),
    "prompts/list": ("prompts", "name", "{prefix}{name}_prompt"),
    "resources/list": ("resources", "uri", "{name}://now"),
    "resources/templates/list": ("resourceTemplates", "uriTemplate", "{name}s://{{text}}"),
}


@req("tool-19")
@every_revision
@pytest.mark.parametrize("method", LISTED)
async def test_mounted_servers_are_listed_with_their_prefixes(
    method: str, revision: str, autojump_clock: MockClock
) -> None:
    top, _, _ = mounted([])
    member, key, pattern = LISTED[method]
    async with connected(top.server, revision) as wire:
        names = [item[key] for item in (await wire.call(method))[member]]
    assert names == [pattern.format(name=name, prefix=prefix) for name, prefix in PREFIXES.items()]


@every_revision
@every_kind
@pytest.mark.parametrize("owner", PREFIXES)
async def test_a_mounted_server_serves_its_entries_as_if_it_were_alone(
    owner: str, kind: str, revision: str, autojump_clock: MockClock
) -> None:
    """It gets its own names and its lifespan, after the middleware of the outer servers and its own."""
    log: list[Any] = []
    top, _, _ = mounted(log)
    method, params, _ = requests_to(owner, PREFIXES[owner])[kind]
    async with connected(top.server, revision) as wire:
        await wait_all_tasks_blocked()
        log.clear()
        await wire.call(method, params)
        passed = [*PREFIXES][: [*PREFIXES].index(owner) + 1]
        names = [requests_to(owner, PREFIXES[owner].removeprefix(PREFIXES[each]))[kind][1] for each in passed]
        calls = [target_of(Request(0, method, each)) for each in names]
        ways_in = [(each, "in", name, f"that of {each}") for each, name in zip(passed, calls, strict=True)]
        assert log[: len(passed)] == ways_in
        assert log[-len(passed) :] == [(each, "out", name, span) for each, _, name, span in reversed(ways_in)]
        inside = log[len(passed) : -len(passed)]
        assert inside[-1][:2] == (owner, "handles")
        for entry in inside[:-1]:
            own = requests_to(owner)[kind][1]["ref"]
            assert entry == (owner, "completes", own.get("name", own.get("uri")), f"that of {owner}")


def named_other_than(*hidden: str) -> Callable[[Any, Any], bool]:
    return lambda principal, item: item.name not in hidden or principal == "ada"


OWN_NAMES = ("leaf_tool", "leaf_prompt", "leaf_resource", "leaf_template")


@req("tool-07", "tool-24", "prm-12", "prm-15", "res-11", "res-16")
@every_revision
@every_kind
async def test_the_filter_of_a_mounted_server_gets_its_own_names(
    kind: str, revision: str, autojump_clock: MockClock
) -> None:
    log: list[Any] = []
    top, _, leaf = mounted(log)
    leaf.server._catalog.filter = named_other_than(*OWN_NAMES)
    method, params, _ = requests_to("leaf", "m_l_")[kind]
    with principals_in_meta():
        async with connected(top.server, revision) as wire:
            with pytest.raises(ErrorResponse) as refused:
                await wire.call(method, params)
            assert refused.value.code in (-32602, -32002)
            await wire.call(method, params, meta=principal_meta("ada"))
            for listed, (member, _, _) in LISTED.items():
                assert len((await wire.call(listed))[member]) == 2
                assert len((await wire.call(listed, meta=principal_meta("ada")))[member]) == 3
    assert sum(entry[1] == "handles" for entry in log) == 1


@req("tool-07")
@every_revision
async def test_the_filters_of_all_outer_servers_apply(revision: str, autojump_clock: MockClock) -> None:
    top, middle, leaf = mounted([])
    for hiding, name in ((top, "m_l_leaf_tool"), (middle, "l_leaf_tool"), (leaf, "leaf_tool")):
        hiding.server._catalog.filter = named_other_than(name)
        async with connected(top.server, revision) as wire:
            with pytest.raises(ErrorResponse, match="there is no tool 'm_l_leaf_tool'"):
                await wire.call("tools/call", {"name": "m_l_leaf_tool"})
        hiding.server._catalog.filter = None
    async with connected(top.server, revision) as wire:
        assert text_of(await wire.call("tools/call", {"name": "m_l_leaf_tool"})) == " by leaf"


@req("tool-07")
@every_revision
async def test_the_middleware_of_a_mounted_server_may_change_its_calls(
    revision: str, autojump_clock: MockClock
) -> None:
    top, _, leaf = mounted([])

    async def shout(ctx: Context, request: Request, call_next: CallNext) -> Object:
        if request.params.get("name") != "leaf_tool":
            raise RequestError(4711, "not mine")
        params = {**request.params, "arguments": {"text": "hey"}}
        result = await call_next(Request(request.id, request.method, params))
        return {**result, "content": [*result["content"], {"type": "text", "text": "!"}]}

    leaf.server._catalog.middleware = [shout]
    async with connected(top.server, revision) as wire:
        assert text_of(await wire.call("tools/call", {"name": "m_l_leaf_tool"})) == "hey by leaf\n!"
        assert text_of(await wire.call("tools/call", {"name": "m_middle_tool"})) == " by middle"


@req("tool-31", "tool-18")
@every_revision
@pytest.mark.parametrize("name", ["leaf_tool", "l_leaf_tool", "m_leaf_tool", "m_l_top_tool", "m_l_", "M_L_leaf_tool"])
async def test_a_mounted_tool_has_no_other_name(name: str, revision: str, autojump_clock: MockClock) -> None:
    top, _, _ = mounted([])
    async with connected(top.server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call("tools/call", {"name": name})
        assert refused.value.code == -32602


@every_revision
async def test_the_outermost_completion_of_a_mounted_prompt_answers(revision: str, autojump_clock: MockClock) -> None:
    log: list[Any] = []
    top, middle, _ = mounted(log)
    params = complete({"type": "ref/prompt", "name": "m_l_leaf_prompt"})

    async def values_and_middleware() -> list[Any]:
        log.clear()
        (value,) = (await wire.call("completion/complete", params))["completion"]["values"]
        return [value, *(each for each, step, *_ in log if step == "in")]

    async with connected(top.server, revision) as wire:
        assert await values_and_middleware() == ["x by leaf", "top", "middle", "leaf"]
        middle.server.completion("l_leaf_prompt", "text")(lambda value: ["the middle's"])
        assert await values_and_middleware() == ["the middle's", "top", "middle"]
        top.server.completion("m_l_leaf_prompt", "text")(lambda value: ["the top's"])
        assert await values_and_middleware() == ["the top's", "top"]


@req("tool-03", "tool-04", "prm-03", "prm-04", "res-02", "res-20")
@every_revision
async def test_changes_of_a_mounted_server_reach_clients_of_the_outer_one(
    revision: str, autojump_clock: MockClock
) -> None:
    top, _, leaf = mounted([])
    async with top.server.running(), connected(top.server, revision) as wire:
        await wire.subscribe(tools=True, prompts=True, resources=True, uris=["leaf://now", "leafs://x"])
        leaf.server.add_tool(Tool("more", {"type": "object"}), lambda ctx, arguments: "more")
        assert await wire.changed() == ("tools", None)
        assert text_of(await wire.call("tools/call", {"name": "m_l_more"})) == "more"
        leaf.server.remove_tool("more")
        assert await wire.changed() == ("tools", None)
        with pytest.raises(ErrorResponse):
            await wire.call("tools/call", {"name": "m_l_more"})
        leaf.server.notify_resource_updated("leaf://now")
        assert await wire.changed() == ("updated", "leaf://now")
        leaf.server.notify_resource_updated("leafs://x")
        assert await wire.changed() == ("updated", "leafs://x")
        leaf.server.notify_list_changed("prompts", "resources")
        assert {await wire.changed(), await wire.changed()} == {("prompts", None), ("resources", None)}
        await trio.sleep(1)
        told = [method for method, _ in wire.notes if method.endswith(("list_changed", "updated"))]
        assert len(told) == 6  # each once


@every_revision
async def test_a_mounted_server_may_also_run_alone(revision: str, autojump_clock: MockClock) -> None:
    log: list[Any] = []
    top, _, leaf = mounted(log)
    async with connected(top.server, revision) as wire, connected(leaf.server, revision) as alone:
        await wait_all_tasks_blocked()
        begun = sorted(name for name, step, *_ in log if step == "begins")
        assert begun == ["leaf", "leaf", "middle", "top"]
        assert text_of(await wire.call("tools/call", {"name": "m_l_leaf_tool"})) == " by leaf"
        assert text_of(await alone.call("tools/call", {"name": "leaf_tool"})) == " by leaf"
        assert leaf.server.statistics().connections == 2  # it takes part in both
        assert top.server.statistics().connections == 1


@every_revision
async def test_a_running_server_refuses_mounts(revision: str, autojump_clock: MockClock) -> None:
    top, middle, leaf = mounted([])
    other = part("other")
    async with connected(top.server, revision) as wire:
        await wait_all_tasks_blocked()
        for server in (top.server, middle.server, leaf.server):
            with pytest.raises(UsageError, match="mount it before it runs"):
                server.mount(other.server)
        assert len((await wire.call("tools/list"))["tools"]) == 3
    leaf.server.mount(other.server, prefix="o_")
    async with connected(top.server, revision) as wire:
        assert text_of(await wire.call("tools/call", {"name": "m_l_o_other_tool"})) == " by other"


@every_revision
async def test_a_clash_of_names_refuses_the_whole_mount(revision: str, autojump_clock: MockClock) -> None:
    top, middle, _ = mounted([])
    clashing = Server("clashing", lifespan=middle.lifespan)
    clashing.tool(name="fine")(lambda: "")
    clashing.tool(name="tool")(lambda: "")
    with pytest.raises(UsageError, match="exists already"):
        top.server.mount(clashing, prefix="top_")
    async with connected(top.server, revision) as wire:
        assert len((await wire.call("tools/list"))["tools"]) == 3


@every_revision
async def test_one_server_may_be_mounted_twice(revision: str, autojump_clock: MockClock) -> None:
    log: list[Any] = []
    top = Server("top")
    twice = Server("twice", lifespan=logged_lifespan(log))
    twice.tool(name="tool")(lambda: "done")
    top.mount(twice, prefix="a_")
    top.mount(twice, prefix="b_")
    async with connected(top, revision) as wire:
        for name in ("a_tool", "b_tool"):
            assert text_of(await wire.call("tools/call", {"name": name})) == "done"
    assert log == ["begins", "ends"]


# Lifespans, and the run that connections share.


def logged_lifespan(log: list[Any], value: Any = None) -> Callable[[Server], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[Any]:
        log.append("begins")
        await trio.sleep(1)
        yield value
        await trio.sleep(1)
        log.append("ends")

    return lifespan


@every_revision
async def test_the_connections_of_a_shared_run_have_one_lifespan(revision: str, autojump_clock: MockClock) -> None:
    log: list[Any] = []
    server = Server("shared", lifespan=logged_lifespan(log, value := object()))

    @server.tool
    async def tell(ctx: Context) -> str:
        log.append(ctx.lifespan)
        return ""

    async with server.running():
        for _ in range(2):
            async with connected(server, revision) as one, connected(server, revision) as two:
                await one.call("tools/call", {"name": "tell"})
                await two.call("tools/call", {"name": "tell"})
    assert log == ["begins", value, value, value, value, "ends"]


@every_revision
async def test_without_a_shared_run_each_connection_has_its_own_lifespan(
    revision: str, autojump_clock: MockClock
) -> None:
    log: list[Any] = []
    server = Server("private", lifespan=logged_lifespan(log))
    server.tool(name="tell")(lambda: "")
    async with connected(server, revision) as one, connected(server, revision) as two:
        await one.subscribe(tools=True)
        await two.subscribe(tools=True)
        assert server.statistics().connections == 2
        server.notify_list_changed("tools")  # reaches all runs
        assert await one.changed() == await two.changed() == ("tools", None)
    assert log == ["begins", "begins", "ends", "ends"]
    assert server.statistics().connections == 0


@every_revision
async def test_lifespans_end_from_the_inside_after_all_handlers(revision: str, autojump_clock: MockClock) -> None:
    log: list[Any] = []
    top, _, leaf = mounted(log)

    async def wait(text: str) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            log.append("the handler has ended")

    leaf.handle = wait  # type: ignore[method-assign]
    async with connected(top.server, revision) as wire:
        await wire.start("tools/call", {"name": "m_l_leaf_tool"})
        await wait_all_tasks_blocked()
        log.clear()
    assert [entry for entry in log if entry[1] != "out"] == [
        "the handler has ended", ("leaf", "ends"), ("middle", "ends"), ("top", "ends"),
    ]  # fmt: skip


class Boom(Exception):
    pass


def failing_lifespan(when: str, error: BaseException) -> Callable[[Server], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        if when == "enter":
            raise error
        yield
        raise error

    return lifespan


@pytest.mark.parametrize("when", ["enter", "exit"])
@pytest.mark.parametrize("error", [Boom(), BaseExceptionGroup("", [Boom()]), KeyboardInterrupt(), SystemExit()])
async def test_the_exception_of_a_lifespan_is_raised_unchanged(
    when: str, error: BaseException, autojump_clock: MockClock
) -> None:
    server = Server("failing", lifespan=failing_lifespan(when, error))
    outer = Server("outer")
    outer.mount(server)
    for each in (server, outer):
        with pytest.raises(type(error)) as caught:
            async with each.running():
                pass
        assert caught.value is error
        ours, theirs = memory_stream_pair()
        await ours.aclose()
        with pytest.raises(type(error)) as caught:
            await serve_stream(each, theirs)
        assert caught.value is error
        assert each.statistics().connections == 0
    if when == "enter":  # and it may be tried again
        server._lifespan = None
        async with server.running():
            pass


@pytest.mark.parametrize(
    "error",
    [
        Boom(),
        ExceptionGroup("", [Boom()]),
        BaseExceptionGroup("", [Boom(), ExceptionGroup("", [KeyError()])]),
        KeyboardInterrupt(),
        SystemExit(),
    ],
)
async def test_the_exception_of_the_block_of_a_run_is_raised_unchanged(
    error: BaseException, autojump_clock: MockClock
) -> None:
    cause = ValueError("the cause")
    server = part().server
    with pytest.raises(type(error)) as caught:  # noqa: PT012
        async with server.running():
            async with connected(server, "2026-07-28") as wire:
                await wire.call("tools/call", {"name": "part_tool"})
            raise error from cause
    assert caught.value is error
    assert caught.value.__cause__ is cause
    async with server.running():
        pass


@contextlib.asynccontextmanager
async def nursery_lifespan(server: Server) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error", [Boom(), BaseExceptionGroup("", [Boom(), KeyError()]), KeyboardInterrupt(), SystemExit()]
)
async def test_nurseries_of_lifespans_do_not_wrap_the_exception(
    error: BaseException, autojump_clock: MockClock
) -> None:
    server, inner = (Server(name, lifespan=nursery_lifespan) for name in ("outer", "inner"))
    server.mount(inner)
    with pytest.raises(type(error)) as caught:
        async with server.running():
            raise error
    assert caught.value is error


async def test_a_second_failure_in_the_nursery_of_a_lifespan_makes_a_group(autojump_clock: MockClock) -> None:
    async def fail() -> None:
        raise Boom

    @contextlib.asynccontextmanager
    async def failing_meanwhile(server: Server) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            yield

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with Server("failing", lifespan=failing_meanwhile).running():
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError
    assert {type(each) for each in caught.value.exceptions} == {Boom, KeyError}


async def test_a_server_runs_once_at_a_time(autojump_clock: MockClock) -> None:
    server = Server("once", lifespan=logged_lifespan([]))
    async with trio.open_nursery() as nursery:

        async def begin() -> None:
            async with server.running():
                await trio.sleep(10)

        nursery.start_soon(begin)
        await wait_all_tasks_blocked()
        for _ in range(2):  # while it begins, and while it runs
            with pytest.raises(UsageError, match="once is running already"):
                async with server.running():
                    pass
            await trio.sleep(2)
    async with server.running():
        pass


@every_revision
async def test_connections_end_with_the_run_that_they_share(revision: str, autojump_clock: MockClock) -> None:
    log: list[Any] = []
    server = Server("ending", lifespan=logged_lifespan(log))

    @server.tool
    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("stopped")

    enough = trio.Event()

    async def run(task_status: trio.TaskStatus[None]) -> None:
        async with server.running():
            task_status.started()
            await enough.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        async with connected(server, revision) as wire:
            await wire.start("tools/call", {"name": "wait"})
            await wait_all_tasks_blocked()
            enough.set()
            await wire.ended.wait()
    assert log == ["begins", "stopped", "ends"]
    async with connected(server, revision) as wire:  # it may be used again
        assert (await wire.call("tools/list"))["tools"]


@pytest.mark.contract
@req("core-09")
@every_revision
async def test_connections_with_the_same_request_ids_do_not_interfere(revision: str, autojump_clock: MockClock) -> None:
    server = Server("crossing")

    @server.tool
    async def tell(who: str, seconds: float, ctx: Context) -> str:
        await ctx.progress(1, message=who)
        await trio.sleep(seconds)
        await ctx.log("info", who)
        return who

    async def call(wire: RawClient, who: str, seconds: float) -> None:
        params = {"name": "tell", "arguments": {"who": who, "seconds": seconds}}
        assert text_of(await wire.call("tools/call", params, id="one", progress="same")) == who
        assert [params["data"] for params in wire.noted("notifications/message")] == [who]

    async with (
        server.running(),
        connected(server, revision, log_level="info") as one,
        connected(server, revision, log_level="info") as two,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(call, one, "one", 2)
        nursery.start_soon(call, two, "two", 1)
        await wait_all_tasks_blocked()
        third = await one.start("tools/call", {"name": "tell", "arguments": {"who": "x", "seconds": 9}}, id="two")
        await two.cancel(third)  # this connection has no request with this id
        await one.cancel("none")
        await wait_all_tasks_blocked()
        assert server.statistics().running == 3
        assert text_of((await one.response(third))["result"]) == "x"


@every_revision
async def test_statistics_count_connections_calls_and_listeners(revision: str, autojump_clock: MockClock) -> None:

    server = Server("counted", limits=Limits(calls=2))
    gate = trio.Event()

    @server.tool
    async def wait() -> None:
        await gate.wait()

    @server.tool
    async def ask(ctx: Context) -> str:
        return str(await ctx.elicit("Really?", bool))

    def counts() -> tuple[int, ...]:
        each = server.statistics()
        return each.connections, each.running, each.parked, each.listeners

    assert counts() == (0, 0, 0, 0)
    async with server.running(), connected(server, revision) as wire, connected(server, revision) as other:
        ids = [await wire.start("tools/call", {"name": "wait"}) for _ in range(5)]
        for id in ids[2:]:
            assert "overloaded" in (await wire.response(id))["error"]["message"]
        await wait_all_tasks_blocked()
        assert counts() == (2, 2, 0, 0 if wire.modern else 2)
        await wire.cancel(ids[1])
        await wait_all_tasks_blocked()
        assert counts()[:2] == (2, 1)
        gate.set()
        await wire.response(ids[0])
        await other.subscribe(tools=True)
        await wait_all_tasks_blocked()
        assert counts() == (2, 0, 0, 1 if wire.modern else 2)
        if wire.modern:
            await wire.call("tools/call", {"name": "ask"}, rounds=False)
            await wait_all_tasks_blocked()
            assert counts() == (2, 0, 1, 1)
    assert counts() == (0, 0, 0, 0)
