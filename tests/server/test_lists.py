"""Lists and information of a server: pages, filters for principals, cache hints, capabilities and server info."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from trio.testing import MockClock

from tests.requirements import req
from tests.server.principals import principal_meta, principals_in_meta
from tests.server.raw_client import LATEST, ErrorResponse, RawClient, connected, every_revision, modern
from trio_mcp import CacheHints, Context, ElicitUrl, InputRequired, Limits, ResourceNotFound, Server
from trio_mcp.core import Request
from trio_mcp.types import (
    Annotations,
    CallNext,
    Icon,
    Prompt,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
    Tool,
    ToolAnnotations,
)

Object = dict[str, Any]


# The four lists: the member of the result, the key of a name, and methods to add and remove the n-th item.


class List:
    def __init__(self, method: str, member: str, key: str, item: Callable[[int], Any], takes: int) -> None:
        self.method, self.member, self.key, self._item, self._takes = method, member, key, item, takes

    def name(self, number: int) -> str:
        item = self._item(number)
        for attribute in ("uri_template", "uri", "name"):
            if hasattr(item, attribute):
                return str(getattr(item, attribute))
        raise AssertionError(item)

    def add(self, server: Server, number: int) -> None:
        handler: Callable[..., str] = [lambda a, b: "", lambda a, b, c: ""][self._takes - 2]
        getattr(server, f"add_{self.kind}")(self._item(number), handler)

    def remove(self, server: Server, number: int) -> None:
        getattr(server, f"remove_{self.kind}")(self.name(number))

    @property
    def kind(self) -> str:
        return {"tools": "tool", "prompts": "prompt", "resources": "resource"}.get(self.member, "template")

    def names(self, page: Object) -> list[str]:
        return [item[self.key] for item in page[self.member]]


LISTS = [
    List("tools/list", "tools", "name", lambda number: Tool(f"tool{number}", {"type": "object"}), 2),
    List("prompts/list", "prompts", "name", lambda number: Prompt(f"prompt{number}"), 2),
    List("resources/list", "resources", "uri", lambda number: Resource("r", f"r://{number}"), 2),
    List(
        "resources/templates/list",
        "resourceTemplates",
        "uriTemplate",
        lambda number: ResourceTemplate("t", f"t{number}://{{x}}"),
        3,
    ),
]
each_list = pytest.mark.parametrize("each", LISTS, ids=lambda each: each.member)


def server_with_items(count: int, **options: Any) -> Server:
    server = Server("lists", **options)
    for each in LISTS:
        for number in range(count):
            each.add(server, number)
    return server


async def walk(wire: RawClient, each: List, meta: Object | None = None) -> list[list[str]]:
    """The names on each page."""
    pages, params = [], {}
    while True:
        page = await wire.call(each.method, params, meta=meta)
        pages.append(each.names(page))
        if "nextCursor" not in page:
            return pages
        params = {"cursor": page["nextCursor"]}


# Pages.


@pytest.mark.contract(size=(2,))
@req("page-02", "page-10", "page-11", "tool-25")
@every_revision
@each_list
@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8, None])
async def test_every_list_comes_in_pages_of_any_size(
    size: int | None, each: List, revision: str, autojump_clock: MockClock
) -> None:
    all_names = [each.name(number) for number in range(7)]
    async with connected(server_with_items(7, page_size=size), revision) as wire:
        pages = await walk(wire, each)
        assert pages == [all_names[at : at + (size or 7)] for at in range(0, 7, size or 7)]
        assert await walk(wire, each) == pages


@every_revision
@each_list
async def test_pages_have_a_hundred_items_by_default(each: List, revision: str, autojump_clock: MockClock) -> None:
    async with connected(server_with_items(101), revision) as wire:
        assert [len(page) for page in await walk(wire, each)] == [100, 1]


@pytest.mark.contract(cursor=("nonsense",))
@req("page-03", "page-09")
@every_revision
@each_list
@pytest.mark.parametrize("cursor", ["", "1", "nonsense", "YQ==.Yg==", "YQ==", 1, [], {}, True])
async def test_an_invalid_cursor_or_that_of_another_list_is_refused(
    cursor: Any, each: List, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server_with_items(3, page_size=1), revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call(each.method, {"cursor": cursor})
        assert refused.value.code == -32602
        for other in LISTS:
            if other is not each:
                given = (await wire.call(other.method))["nextCursor"]
                with pytest.raises(ErrorResponse) as refused:
                    await wire.call(each.method, {"cursor": given})
                assert refused.value.code == -32602
        assert len(await walk(wire, each)) == 3
    assert not caplog.records


@every_revision
@each_list
async def test_a_null_cursor_means_the_first_page(each: List, revision: str, autojump_clock: MockClock) -> None:
    async with connected(server_with_items(3, page_size=2), revision) as wire:
        assert len(each.names(await wire.call(each.method, {"cursor": None}))) == 2


@req("page-02")
@every_revision
@each_list
async def test_paging_continues_while_the_list_changes(each: List, revision: str, autojump_clock: MockClock) -> None:
    server = server_with_items(5, page_size=2)
    async with connected(server, revision) as wire:
        first = await wire.call(each.method)
        each.remove(server, 1)  # the last item of the first page
        each.add(server, 7)
        second = await wire.call(each.method, {"cursor": first["nextCursor"]})
        assert each.names(second) == [each.name(2), each.name(3)]
        third = await wire.call(each.method, {"cursor": second["nextCursor"]})
        assert each.names(third) == [each.name(4), each.name(7)]
        each.remove(server, 3)
        each.remove(server, 4)
        with pytest.raises(ErrorResponse) as refused:
            await wire.call(each.method, {"cursor": second["nextCursor"]})
        assert refused.value.code == -32602


@req("tool-22", "tool-43", "prm-13", "prm-18", "res-14", "res-26")
@every_revision
@each_list
async def test_a_list_may_be_empty_and_filled_later(each: List, revision: str, autojump_clock: MockClock) -> None:
    server = Server("empty", capabilities=["tools", "prompts", "resources"])
    async with connected(server, revision) as wire:
        assert await walk(wire, each) == [[]]
        each.add(server, 1)
        assert await walk(wire, each) == [[each.name(1)]]
        each.remove(server, 1)
        assert await walk(wire, each) == [[]]


@req("tool-23", "prm-14", "res-15", "tool-25")
@every_revision
@each_list
async def test_a_list_does_not_depend_on_the_connection_and_its_history(
    each: List, revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_items(5, page_size=2)
    async with connected(server, revision) as one, connected(server, revision) as two:
        before = await walk(one, each)
        await one.call("tools/call", {"name": "tool1"})
        await one.call("prompts/get", {"name": "prompt1"})
        await one.call("resources/read", {"uri": "r://1"})
        await one.subscribe(tools=True, uris=["r://1"])
        assert await walk(one, each) == before
        assert await walk(two, each) == before


# For each principal.


class FilteredServer:
    """A server with two entries of each kind: one for all principals, and one for Ada only."""

    def __init__(self, **options: Any) -> None:
        self.server = server = Server("hiding", filter=self.filter, **options)
        self.asked: list[tuple[Any, str]] = []
        for name in ("open", "adas"):
            server.add_tool(Tool(name, {"type": "object"}), lambda ctx, arguments: "tool")
            server.prompt(name=name)(lambda text="": "prompt")
            server.resource(f"{name}://now", name=name)(lambda: "resource")
            server.resource(f"{name}s://{{text}}", name=name)(lambda text: "template")
            server.completion(name, "text")(lambda: ["completed"])
            server.completion(f"{name}s://{{text}}", "text")(lambda: ["completed"])

    def filter(self, principal: Any, item: Any) -> bool:
        self.asked.append((principal, item.name))
        return item.name != "adas" or principal == "ada"


ref = {"argument": {"name": "text", "value": ""}}
NAMED: dict[str, tuple[str, Callable[[str], Object]]] = {
    "a call": ("tools/call", lambda name: {"name": name}),
    "a prompt": ("prompts/get", lambda name: {"name": name}),
    "a resource": ("resources/read", lambda name: {"uri": f"{name}://now"}),
    "of a template": ("resources/read", lambda name: {"uri": f"{name}s://x"}),
    "a completion of a prompt": (
        "completion/complete",
        lambda name: {**ref, "ref": {"type": "ref/prompt", "name": name}},
    ),
    "a completion of no argument": (
        "completion/complete",
        lambda name: {"argument": {"name": "no", "value": ""}, "ref": {"type": "ref/prompt", "name": name}},
    ),
    "a completion of a template": (
        "completion/complete",
        lambda name: {**ref, "ref": {"type": "ref/resource", "uri": f"{name}s://{{text}}"}},
    ),
    "a completion of a URI": (
        "completion/complete",
        lambda name: {**ref, "ref": {"type": "ref/resource", "uri": f"{name}s://x"}},
    ),
    "a subscription": ("resources/subscribe", lambda name: {"uri": f"{name}://now"}),
    "a subscription to one of many": ("resources/subscribe", lambda name: {"uri": f"{name}s://x"}),
}


@req("tool-07", "tool-22", "tool-24", "prm-12", "prm-13", "prm-15", "res-11", "res-14", "res-16", "gen-01")
@every_revision
@each_list
@pytest.mark.parametrize("size", [1, None])
async def test_a_list_has_the_items_of_the_principal(
    size: int | None, each: List, revision: str, autojump_clock: MockClock
) -> None:
    with principals_in_meta():
        async with connected(FilteredServer(page_size=size).server, revision) as wire:
            for _ in range(2):
                for principal, count in (("ada", 2), ("bob", 1), (None, 1)):
                    names = [name for page in await walk(wire, each, principal_meta(principal)) for name in page]
                    assert len(names) == count
                    assert any("ada" in name for name in names) is (principal == "ada")


@req("tool-07", "tool-31", "prm-08", "prm-12", "res-11", "cmpl-04", "cache-25", "gen-01")
@every_revision
@pytest.mark.parametrize("kind", NAMED)
async def test_a_hidden_entry_looks_like_one_that_does_not_exist(
    kind: str, revision: str, autojump_clock: MockClock
) -> None:
    method, params = NAMED[kind]
    public = CacheHints(60_000, "public")
    hiding = FilteredServer(cache={each.method: public for each in LISTS})
    if method == "resources/subscribe" and revision == LATEST:
        return  # this revision has no resources/subscribe; see the next test

    async def refused(name: str, principal: str | None) -> Object:
        error: Object = (await wire.exchange(method, params(name), meta=principal_meta(principal)))["error"]
        return json.loads(json.dumps(error).replace(name, "NAME"))  # type: ignore[no-any-return]

    with principals_in_meta():
        async with connected(hiding.server, revision) as wire:
            for principal in ("bob", None):
                assert await refused("adas", principal) == await refused("nobodys", principal)
            for name, principal in (("adas", "ada"), ("open", "ada"), ("open", "bob"), ("open", None)):
                if kind == "a completion of no argument":
                    assert "no argument" in (await refused(name, principal))["message"]
                else:
                    await wire.call(method, params(name), meta=principal_meta(principal))
    assert {principal for principal, _ in hiding.asked} == {"ada", "bob", None}


@req("sub-11", "res-11")
@modern
async def test_a_subscription_has_only_the_resources_of_its_principal(revision: str, autojump_clock: MockClock) -> None:
    hiding = FilteredServer()
    uris = ["adas://now", "adass://x", "open://now", "opens://x", "nobodys://now"]
    with principals_in_meta():
        async with (
            connected(hiding.server, revision, meta=principal_meta("ada")) as ada,
            connected(hiding.server, revision, meta=principal_meta("bob")) as bob,
        ):
            assert (await ada.subscribe(uris=uris)).agreed == set(uris[:4])
            assert (await bob.subscribe(uris=uris)).agreed == set(uris[2:4])


@modern
async def test_the_filter_is_called_at_most_once_for_each_allowed_uri(revision: str, autojump_clock: MockClock) -> None:
    hiding = FilteredServer(limits=Limits(listener_changes=5))
    hidden = [f"adass://{number}" for number in range(5)]
    async with connected(hiding.server, revision) as wire:
        with pytest.raises(ErrorResponse, match="may ask for 5 changes"):
            await wire.subscribe(uris=["open://now", *hidden])
        assert hiding.asked == []
        assert (await wire.subscribe(uris=["open://now", *hidden[1:]] * 3)).agreed == {"open://now"}
        assert len(hiding.asked) == 5


@every_revision
async def test_without_a_filter_a_client_may_subscribe_to_a_later_resource(
    revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_items(1)
    async with server.running(), connected(server, revision) as wire:
        assert "r://7" in (await wire.subscribe(uris=["r://7"])).agreed
        LISTS[2].add(server, 7)
        server.notify_resource_updated("r://7")
        assert await wire.changed() == ("updated", "r://7")


@every_revision
async def test_a_filter_that_raises_fails_the_request(
    revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def filter(principal: Any, item: Any) -> bool:
        raise ValueError("hunter2")

    server = server_with_items(1, filter=filter)
    async with server.running(), connected(server, revision) as wire:
        for each in LISTS:
            with pytest.raises(ErrorResponse, match="log says why") as refused:
                await wire.call(each.method)
            assert refused.value.code == -32603
        result = await wire.call("tools/call", {"name": "tool0"})
        assert result["isError"] is True
        with pytest.raises(ErrorResponse, match="log says why"):
            await wire.subscribe(uris=["r://0"])
        assert len(caplog.records) == 6
        assert await wire.about()
    assert not any(b"hunter2" in line for line in wire.lines)


# Items.

ICON = Icon("data:image/png;base64,iVBORw==", mime_type="image/png", sizes=["48x48"])
ICON_JSON = {"src": "data:image/png;base64,iVBORw==", "mimeType": "image/png", "sizes": ["48x48"]}
ABOUT = Annotations(audience=["user"], priority=0.5, last_modified="2025-06-18T15:00:00Z")
META = {"com.example/key": 1}


def described_server() -> Server:
    server = Server("described")
    common: Object = {"title": "A title", "icons": [ICON], "meta": META}

    @server.tool(annotations=ToolAnnotations(title="Hinted", read_only_hint=True), **common)
    def tool(number: int) -> list[int]:
        """It lists a number."""
        return [number]

    @server.prompt(**common)
    def prompt(text: str, tone: str = "dry") -> str:
        """It asks a question."""
        return text

    @server.resource("r://one", mime_type="text/plain", size=3, annotations=ABOUT, **common)
    def resource() -> str:
        """It holds a text."""
        return "one"

    @server.resource("t://{x}", mime_type="text/plain", annotations=ABOUT, **common)
    def template(x: str) -> str:
        """They hold texts."""
        return x

    return server


def since(revision: str, first: str, **members: Any) -> Object:
    return members if revision >= first else {}


def shown(each: List, revision: str) -> Object:
    more = {
        **since(revision, "2025-06-18", title="A title", _meta=META),
        **since(revision, "2025-11-25", icons=[ICON_JSON]),
    }
    when = since(revision, "2025-06-18", lastModified="2025-06-18T15:00:00Z")
    about = {"mimeType": "text/plain", "annotations": {"audience": ["user"], "priority": 0.5, **when}}
    takes = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    numbers = {"type": "array", "items": {"type": "integer"}}
    boxed = {"type": "object", "properties": {"result": numbers}, "required": ["result"]}
    items: dict[str, Object] = {
        "tools": {
            "name": "tool",
            "description": "It lists a number.",
            "inputSchema": {**takes, "additionalProperties": False},
            **since(revision, "2025-03-26", annotations={"title": "Hinted", "readOnlyHint": True}),
            # tool-36: in older revisions, an output schema must have the type object.
            **since(revision, "2025-06-18", outputSchema=numbers if revision == "2026-07-28" else boxed),
        },
        "prompts": {
            "name": "prompt",
            "description": "It asks a question.",
            "arguments": [{"name": "text", "required": True}, {"name": "tone", "required": False}],
        },
        "resources": {"name": "resource", "uri": "r://one", "description": "It holds a text.", "size": 3, **about},
        "resourceTemplates": {
            "name": "template",
            "uriTemplate": "t://{x}",
            "description": "They hold texts.",
            **about,
        },
    }
    return {**items[each.member], **more}


@req("tool-16", "tool-36", "tool-37", "res-22", "res-24", "res-25", "type-02", "type-06", "type-21")
@every_revision
@each_list
async def test_an_item_has_the_members_of_its_revision(each: List, revision: str, autojump_clock: MockClock) -> None:
    async with connected(described_server(), revision) as wire:
        (item,) = (await wire.call(each.method))[each.member]
    assert item == shown(each, revision)


# Cache hints.

_NO_HINTS = {"ttlMs": 0, "cacheScope": "private"}


def hints(result: Object) -> Object:
    return {name: result[name] for name in ("ttlMs", "cacheScope") if name in result}


@req("cache-01", "cache-09", "cache-18", "cache-23", "cache-24")
@every_revision
@each_list
@pytest.mark.parametrize("given", [None, CacheHints(), CacheHints(60_000), CacheHints(5, "public")])
async def test_a_list_has_its_cache_hints(
    given: CacheHints | None, each: List, revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_items(3, page_size=1, cache={} if given is None else {each.method: given})
    async with connected(server, revision) as wire:
        expected = _NO_HINTS if given is None else {"ttlMs": given.ttl_ms, "cacheScope": given.scope}
        params: Object = {}
        for _ in range(3):
            page = await wire.call(each.method, params)
            assert hints(page) == (expected if wire.modern else {})
            params = {"cursor": page.get("nextCursor")}
        for other in LISTS:
            if other is not each:
                assert hints(await wire.call(other.method)) == (_NO_HINTS if wire.modern else {})


@req("cache-20", "cache-23")
@modern
async def test_each_page_of_a_list_may_have_its_own_time_to_live(revision: str, autojump_clock: MockClock) -> None:
    whole = CacheHints(60_000, "public")

    async def shorten(ctx: Context, request: Request, call_next: CallNext) -> Object:
        page = await call_next(request)
        return {**page, **whole.page(5_000).members()} if "cursor" in request.params else page

    server = server_with_items(2, page_size=1, middleware=[shorten], cache={"tools/list": whole})
    async with connected(server, revision) as wire:
        first = await wire.call("tools/list")
        second = await wire.call("tools/list", {"cursor": first["nextCursor"]})
    assert hints(first) == {"ttlMs": 60_000, "cacheScope": "public"}
    assert hints(second) == {"ttlMs": 5_000, "cacheScope": "public"}


@req("cache-01", "cache-24", "cache-26")
@every_revision
async def test_a_resource_has_its_cache_hints(revision: str, autojump_clock: MockClock) -> None:
    server = Server("cached")
    kept = CacheHints(60_000, "public")
    asks = ElicitUrl("Please sign in.", "https://example.com/sign-in")

    @server.resource("r://plain")
    def plain() -> str:
        return "plain"

    @server.resource("r://kept", cache=kept)
    def holds() -> str:
        return "kept"

    @server.resource("t://{x}", cache=kept)
    def template(x: str) -> str:
        return x

    @server.resource("r://said", cache=kept)
    def said() -> ReadResourceResult:
        return ReadResourceResult([TextResourceContents("r://said", "said")], ttl_ms=7)

    @server.resource("r://asks", cache=kept)
    def asking() -> InputRequired:
        return InputRequired({"sign-in": asks})

    @server.resource("r://gone", cache=kept)
    def gone() -> str:
        raise ResourceNotFound("r://gone")

    server.add_resource(Resource("raw", "r://raw"), lambda ctx, uri: "raw", cache=CacheHints(9))
    expected = {
        "r://plain": _NO_HINTS,
        "r://kept": kept.members(),
        "t://x": kept.members(),
        "r://said": {"ttlMs": 7, "cacheScope": "private"},  # the hints of the handler come first
        "r://raw": {"ttlMs": 9, "cacheScope": "private"},
    }
    async with connected(server, revision) as wire:
        for uri, told in expected.items():
            assert hints(await wire.call("resources/read", {"uri": uri})) == (told if wire.modern else {})
        with pytest.raises(ErrorResponse) as refused:
            await wire.call("resources/read", {"uri": "r://gone"})
        assert refused.value.data == {"uri": "r://gone"}
        if wire.modern:
            asked = await wire.call("resources/read", {"uri": "r://asks"}, rounds=False)
            assert asked["resultType"] == "input_required"
            assert hints(asked) == {}


# Capabilities and server info.

KINDS: dict[str, tuple[Callable[[Server], Any], Object, list[tuple[str, Object]]]] = {
    # The entry, the capabilities that it declares, and the requests that clients may make then.
    "tools": (
        lambda server: LISTS[0].add(server, 1),
        {"tools": {"listChanged": True}},
        [("tools/list", {}), ("tools/call", {"name": "tool1"})],
    ),
    "prompts": (
        lambda server: LISTS[1].add(server, 1),
        {"prompts": {"listChanged": True}},
        [("prompts/list", {}), ("prompts/get", {"name": "prompt1"})],
    ),
    "resources": (
        lambda server: LISTS[2].add(server, 1),
        {"resources": {"listChanged": True, "subscribe": True}},
        [("resources/list", {}), ("resources/templates/list", {}), ("resources/read", {"uri": "r://1"})],
    ),
    "templates": (
        lambda server: LISTS[3].add(server, 1),
        {"resources": {"listChanged": True, "subscribe": True}},
        [("resources/list", {}), ("resources/templates/list", {}), ("resources/read", {"uri": "t1://x"})],
    ),
    "completions": (
        lambda server: server.completion(lambda value: [value]),
        {"completions": {}},
        [],
    ),
}


@pytest.mark.contract(has=(tuple(KINDS),))
@req(
    "arch-01", "arch-02", "tool-02", "prm-01", "prm-02", "res-01", "cmpl-05", "cmpl-10", "log-01", "core-04", "core-32"
)
@every_revision
@pytest.mark.parametrize("has", [(), *((kind,) for kind in KINDS), tuple(KINDS)], ids=lambda has: "+".join(has))
async def test_a_server_declares_and_serves_the_kinds_of_its_entries(
    has: tuple[str, ...], revision: str, autojump_clock: MockClock
) -> None:
    server = Server("declaring")
    expected: Object = {"logging": {}}
    for kind in has:
        add, declares, _ = KINDS[kind]
        add(server)
        expected |= declares
    if revision == "2024-11-05":
        expected.pop("completions", None)
    async with connected(server, revision) as wire:
        assert (await wire.about())["capabilities"] == expected
        for kind, (_, declares, calls) in KINDS.items():
            for method, params in calls:
                if kind in has:
                    await wire.call(method, params)
                elif not declares.keys() & expected.keys():
                    with pytest.raises(ErrorResponse) as refused:
                        await wire.call(method, params)
                    assert refused.value.code == -32601


@req("arch-01")
@every_revision
async def test_capabilities_can_be_declared_before_their_first_entry(revision: str, autojump_clock: MockClock) -> None:
    server = Server("later", capabilities=["tools", "completions"])
    async with connected(server, revision) as wire:
        declared = (await wire.about())["capabilities"]
        assert declared.keys() - {"completions"} == {"logging", "tools"}
        assert ("completions" in declared) is (revision != "2024-11-05")
        await wire.subscribe(tools=True)
        LISTS[0].add(server, 1)
        assert await wire.changed() == ("tools", None)
        await wire.call("tools/call", {"name": "tool1"})


@req("arch-01")
@every_revision
async def test_the_capabilities_of_removed_entries_stay_declared(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_items(1)
    for each in LISTS:
        each.remove(server, 0)
    async with connected(server, revision) as wire:
        assert {"tools", "prompts", "resources"} < (await wire.about())["capabilities"].keys()


@req("arch-01")
@every_revision
async def test_a_later_client_gets_the_new_capabilities(revision: str, autojump_clock: MockClock) -> None:
    server = Server("growing")
    async with server.running(), connected(server, revision) as one:
        assert (await one.about())["capabilities"] == {"logging": {}}
        LISTS[0].add(server, 1)
        async with connected(server, revision) as two:
            assert "tools" in (await two.about())["capabilities"]
        if one.modern:
            assert "tools" in (await one.about())["capabilities"]
        assert await walk(one, LISTS[0]) == [["tool1"]]


@pytest.mark.contract
@req("life-03", "life-19", "ver-16", "meta-13", "type-06")
@every_revision
async def test_the_server_info_has_the_members_of_its_revision(revision: str, autojump_clock: MockClock) -> None:
    server = Server(
        "named",
        version="1.2",
        title="A title",
        description="What it is for.",
        website_url="https://example.com",
        icons=[ICON],
        instructions="Use it well.",
    )
    async with connected(server, revision) as wire:
        about = await wire.about()
    assert about["serverInfo"] == {
        "name": "named",
        "version": "1.2",
        **since(revision, "2025-06-18", title="A title"),
        **since(revision, "2025-11-25", icons=[ICON_JSON], description="What it is for."),
        **since(revision, "2025-11-25", websiteUrl="https://example.com"),
    }
    assert about["instructions"] == "Use it well."
    assert hints(about) == (_NO_HINTS if wire.modern else {})


@every_revision
async def test_the_server_info_has_no_unset_members(revision: str, autojump_clock: MockClock) -> None:
    async with connected(Server("plain"), revision) as wire:
        about = await wire.about()
    assert about["serverInfo"] == {"name": "plain", "version": "0"}
    assert "instructions" not in about
