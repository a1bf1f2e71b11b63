"""The result cache of 2026-07-28, through a client: lifetime, scope, and the events that make results stale."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, ScriptedHttpServer, scripted_server
from tests.client.matrix import no_tasks_left, tcp_connects_to
from tests.client.sample_server import Size
from tests.http.scripted_server import D, E
from tests.requirements import req
from tests.server.checkpoints import wait_or_fail
from trio_mcp import Accepted, Context, RequestError, ResourceNotFound, Server
from trio_mcp.client import Client, open_client
from trio_mcp.core import CacheHints, McpError, UsageError
from trio_mcp.errors import SessionClosed

CAPABILITIES: dict[str, Any] = {"tools": {}, "resources": {}, "prompts": {}}


class NumberingServer:
    """A server that numbers its results, and sends the cache hints `hints` with each of them."""

    def __init__(self, **hints: Any) -> None:
        self.hints = hints
        self.numbers = itertools.count(1)
        self.stale_cursor = False

    async def handle(self, received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "server/discover":
            found = {"supportedVersions": [E], "capabilities": CAPABILITIES, "resultType": "complete"}
            await out.json(received.answer(found))
            return
        params = received.message["params"]
        if self.stale_cursor and "cursor" in params:
            await out.json(received.error(-32602, "no such cursor"), 400)
            return
        said = f"{next(self.numbers)} for {received.headers.get('Authorization', 'anonymous')}"
        result: dict[str, Any] = {"resultType": "complete", **self.hints}
        if received.operation == "resources/read":
            result["contents"] = [{"uri": params["uri"], "text": said}]
        else:
            result[received.operation.partition("/")[0]] = []
            if "cursor" not in params:
                result["nextCursor"] = "two"
        await out.json(received.answer(result))


@contextlib.asynccontextmanager
async def open_numbered(server: NumberingServer, **options: Any) -> AsyncIterator[tuple[Client, ScriptedHttpServer]]:
    async with no_tasks_left(), scripted_server(server.handle) as scripted:
        with tcp_connects_to(scripted.connect):
            async with open_client(URL, **{"revision": E, **options}) as client:
                scripted.requests.clear()
                yield client, scripted


async def read(client: Client, uri: str = "r://one", **request_options: Any) -> str:
    found = await client.read_resource(uri, **request_options)
    text: str = found.contents[0].text  # type: ignore[union-attr]  # the server sends text
    return text


@req("cache-04", "cache-06", "cache-11", "cache-12")
async def test_a_result_is_used_again_until_it_is_stale(autojump_clock: MockClock) -> None:
    async with open_numbered(NumberingServer(ttlMs=1500)) as (client, server):
        assert [await read(client), await read(client)] == ["1 for anonymous"] * 2
        await trio.sleep(1.4)
        assert await read(client) == "1 for anonymous"
        await trio.sleep(0.1)
        assert len(server.requests) == 1  # a stale result is not requested again before it is used
        assert [await read(client), await read(client)] == ["2 for anonymous"] * 2


@req("cache-05", "cache-07", "cache-08")
@pytest.mark.parametrize("hints", [{}, {"ttlMs": 0}, {"ttlMs": -1}])
async def test_a_result_without_a_lifetime_is_requested_each_time(
    hints: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with open_numbered(NumberingServer(**hints)) as (client, _):
        assert [await read(client), await read(client)] == ["1 for anonymous", "2 for anonymous"]


TRACE = f"00-{1:032x}-{1:016x}-00"


async def test_a_client_without_a_cache_requests_each_result(autojump_clock: MockClock) -> None:
    async with open_numbered(NumberingServer(ttlMs=9000), cache=False) as (client, server):
        assert [await read(client), await read(client)] == ["1 for anonymous", "2 for anonymous"]
        assert len(server.requests) == 2


@req("cache-02")
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {"uri": "r://two"}, False),
        ({"meta": {"x/tenant": "A"}}, {"meta": {"x/tenant": "B"}}, False),
        ({"meta": {"x/tenant": "A"}}, {}, False),
        ({"meta": {"x/tenant": "A"}}, {"meta": {"x/tenant": "A"}}, True),
        ({"meta": {"traceparent": TRACE}}, {"meta": {"traceparent": TRACE[:-1] + "1"}}, True),
        ({"headers": {"Authorization": "A"}}, {"headers": {"Authorization": "B"}}, False),
        ({"headers": {"Authorization": "A"}}, {"headers": {"authorization": "A"}}, True),
        ({"headers": {"X-Api-Key": "A"}}, {}, False),
        ({"headers": {"X-Api-Key": "A"}}, {"headers": {"X-Api-Key": "B"}}, False),
        ({"headers": {"Cookie": "u=A"}}, {"headers": {"Cookie": "u=B"}}, False),
        ({"headers": {"A": "1", "B": "2"}}, {"headers": {"b": "2", "a": "1"}}, True),
    ],
)
async def test_cached_results_are_separate_by_meta_headers_and_params(
    one: Any, other: Any, same: bool, autojump_clock: MockClock
) -> None:
    async with open_numbered(NumberingServer(ttlMs=9000)) as (client, server):
        assert (await read(client, **one) == await read(client, **other)) is same
        assert len(server.requests) == (1 if same else 2)


async def test_meta_of_all_requests_is_part_of_the_cache_key(autojump_clock: MockClock) -> None:
    tenant = "A"
    async with open_numbered(NumberingServer(ttlMs=9000), meta=lambda: {"x/tenant": tenant}) as (client, server):
        await client.list_tools_page()
        tenant = "B"
        await client.list_tools_page()
        await client.list_tools_page(meta={"x/tenant": "A"})
        assert [each.message["params"]["_meta"]["x/tenant"] for each in server.requests] == ["A", "B"]


@req("cache-16", "cache-17")
@pytest.mark.parametrize("scope", ["public", "private", None])
@pytest.mark.parametrize("name", ["Authorization", "Cookie", "X-Api-Key"])
async def test_a_private_result_is_cached_per_credential_and_a_public_one_for_all(
    scope: str | None, name: str, autojump_clock: MockClock
) -> None:
    token = "one"
    hints = {"ttlMs": 9000, **({} if scope is None else {"cacheScope": scope})}
    async with open_numbered(NumberingServer(**hints), headers=lambda: {name: token}) as (client, server):
        await read(client)
        token = "another"
        await read(client)
        token = "one"
        await read(client)
        assert [each.headers.get(name) for each in server.requests] == (
            ["one"] if scope == "public" else ["one", "another"]
        )


@req("cache-17")
async def test_a_result_is_cached_for_the_token_with_which_it_was_requested(
    autojump_clock: MockClock,
) -> None:
    tokens: Iterator[str] = iter(())

    def headers() -> dict[str, str]:
        return {"Authorization": next(tokens, "ann")}

    async with open_numbered(NumberingServer(ttlMs=9000), headers=headers) as (client, _):
        tokens = iter(["ann", "bob", "bob"])
        assert await read(client) == "1 for ann"
        tokens = iter(())
        assert await read(client) == "1 for ann"


async def test_headers_are_made_once_for_each_call(autojump_clock: MockClock) -> None:
    numbers = itertools.count()

    def headers() -> dict[str, str]:
        return {"Authorization": str(next(numbers)), "X-Of": "all"}

    async with open_numbered(NumberingServer(ttlMs=9000), headers=headers) as (client, server):
        numbers = itertools.count(1)
        await client.list_tools_page()
        await client.request("prompts/list", headers={"x-of": "one"})
        await read(client)
        sent_headers = [(each.headers.get("Authorization"), each.headers.get("X-Of")) for each in server.requests]
        assert sent_headers == [("1", "all"), ("2", "one"), ("3", "all")]


@req("cache-27", "cache-21")
async def test_each_page_is_cached_separately(autojump_clock: MockClock) -> None:
    async with open_numbered(NumberingServer(ttlMs=1000)) as (client, server):
        await client.list_prompts_page()
        await trio.sleep(0.6)
        await client.list_prompts_page("two")
        assert list(await client.list_prompts()) == []
        assert len(server.requests) == 2
        await trio.sleep(0.6)
        assert list(await client.list_prompts()) == []
        cursors = [each.message["params"].get("cursor") for each in server.requests]
        assert cursors == [None, "two", None]  # the second was fresh


async def test_an_unknown_cursor_makes_all_pages_stale(autojump_clock: MockClock) -> None:
    numbering = NumberingServer(ttlMs=9000)
    async with open_numbered(numbering) as (client, server):
        await client.list_prompts_page()
        numbering.stale_cursor = True
        with pytest.raises(RequestError):
            list(await client.list_prompts())
        numbering.stale_cursor = False
        assert list(await client.list_prompts()) == []
        cursors = [each.message["params"].get("cursor") for each in server.requests]
        assert cursors == [None, "two", None, "two"]


CALLS: list[Callable[[Client], Any]] = [
    lambda client: client.list_tools_page(),
    lambda client: client.read_resource("r://one"),
    lambda client: client.call_tool("t"),
    lambda client: client.request("tools/list"),
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_closed_client_returns_no_cached_results(
    call: Callable[[Client], Any], autojump_clock: MockClock
) -> None:
    async with open_numbered(NumberingServer(ttlMs=9000)) as (client, _):
        await client.list_tools_page()
        await read(client)
        await client.aclose()
        with pytest.raises(SessionClosed):
            await wait_or_fail(lambda: call(client), "an outcome")


@pytest.mark.parametrize("call", CALLS)
async def test_an_exception_of_the_headers_function_is_the_same_error_for_all_calls(
    call: Callable[[Client], Any], autojump_clock: MockClock
) -> None:
    broken = ZeroDivisionError("no token today")
    fails = False

    def headers() -> dict[str, str]:
        if fails:
            raise broken
        return {}

    async with open_numbered(NumberingServer(ttlMs=9000), headers=headers) as (client, server):
        await client.list_tools_page()
        fails = True
        with pytest.raises(UsageError, match="the function given as headers raised an exception") as failed:
            await wait_or_fail(lambda: call(client), "an outcome")
        assert failed.value.__cause__ is broken
        fails = False
        assert len(server.requests) == 1
        await client.list_prompts_page()


# With a real server.


def notes_server() -> Server:
    server = Server(
        "house", capabilities=("tools", "resources"), change_debounce=0, cache={"tools/list": CacheHints(9000)}
    )

    @server.tool
    async def rename() -> None:
        server.notify_list_changed("tools")

    @server.tool
    async def write() -> None:
        server.notify_resource_updated("notes://todo")

    numbers = itertools.count(1)

    @server.resource("notes://{name}", cache=CacheHints(9000))
    async def note(name: str, ctx: Context) -> str:
        if name == "overtaken":
            server.notify_resource_updated("notes://overtaken")
            await wait_all_tasks_blocked()
        if name == "secret":
            match await ctx.elicit("Which size?", Size):
                case Accepted(Size(size)):
                    return f"{size}, {next(numbers)}"
                case _:
                    raise ResourceNotFound("notes://secret")
        return str(next(numbers))

    return server


@contextlib.asynccontextmanager
async def open_notes(**options: Any) -> AsyncIterator[tuple[Client, Callable[[str], int]]]:
    """A client, and a function that counts its requests by method."""
    sent: list[bytes] = []
    options = {"revision": E, "tap": lambda way, data: sent.append(data if way == "out" else b""), **options}
    async with no_tasks_left(), open_client(notes_server(), **options) as client:
        yield client, lambda method: b"".join(sent).count(b'"%s"' % method.encode())


@req("cache-19")
async def test_a_change_notification_makes_results_stale_at_once(autojump_clock: MockClock) -> None:
    async with open_notes() as (client, count), client.listen(tools=True, resources=["notes://todo"]):
        for _ in range(2):
            await client.list_tools_page()
            await read(client, "notes://todo")
            await read(client, "notes://done")
        assert (count("tools/list"), count("resources/read")) == (1, 2)
        await client.call_tool("rename")
        await wait_all_tasks_blocked()
        await client.list_tools_page()
        await read(client, "notes://todo")
        assert (count("tools/list"), count("resources/read")) == (2, 2)
        await client.call_tool("write")
        await wait_all_tasks_blocked()
        assert [await read(client, "notes://todo"), await read(client, "notes://done")] == ["3", "2"]
        assert (count("tools/list"), count("resources/read")) == (2, 3)


@req("cache-19")
async def test_a_result_that_is_overtaken_by_a_change_is_not_used_again(autojump_clock: MockClock) -> None:
    async with open_notes() as (client, _), client.listen(resources=["notes://overtaken"]):
        assert await read(client, "notes://overtaken") == "1"
        assert await read(client, "notes://overtaken") == "2"


@req("cache-03")
async def test_a_result_that_needed_answers_of_the_client_is_not_cached(autojump_clock: MockClock) -> None:
    answers = iter([7, 8])
    async with open_notes(elicitation=lambda received: {"size": next(answers), "colour": "red"}) as (client, count):
        assert await read(client, "notes://secret") == "7, 1"
        assert await read(client, "notes://secret") == "8, 2"
        assert count("resources/read") == 4


async def test_older_revisions_have_no_cache(autojump_clock: MockClock) -> None:
    async with open_notes(revision=D) as (client, count):
        await client.list_tools_page()
        await client.list_tools_page()
        assert count("tools/list") == 2


async def test_an_error_is_not_cached(autojump_clock: MockClock) -> None:
    async with open_notes() as (client, count):
        for _ in range(2):
            with pytest.raises(McpError):
                await read(client, "nothing://here")
        assert count("resources/read") == 2
