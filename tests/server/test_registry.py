"""The catalog: lookup, lists in each revision, changes while a client pages, completion, and mounted catalogs."""

from __future__ import annotations

import functools
import gc
import json
import random
import subprocess
import sys
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.requirements import req
from tests.server.raw_client import ErrorResponse, connected
from trio_mcp.core import (
    INVALID_PARAMS,
    LATEST,
    REVISIONS,
    Annotations,
    Icon,
    JsonObject,
    Limits,
    Pager,
    Prompt,
    PromptArgument,
    PromptReference,
    Request,
    RequestError,
    Resource,
    ResourceReference,
    ResourceTemplate,
    Revision,
    Tool,
    ToolAnnotations,
    ToolExecution,
    UsageError,
)
from trio_mcp.core.schema import templates
from trio_mcp.server import (
    CallNext,
    Catalog,
    Context,
    Entry,
    Server,
    completer_of,
    prompt_of,
    raw_entry,
    resource_of,
    tool_of,
)

REVISION = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
raw_tool = functools.partial(raw_entry, "tools")
raw_prompt = functools.partial(raw_entry, "prompts")
raw_resource = functools.partial(raw_entry, "resources")
raw_template = functools.partial(raw_entry, "templates")
CTX: Any = object()


def tool(name: str) -> Entry:
    def function(city: str) -> str:
        return f"{name} {city}"

    return tool_of(function, name=name)


def prompt(name: str) -> Entry:
    def function(code: str, language: str = "python") -> str:
        return name

    return prompt_of(function, name=name)


def resource(uri: str) -> Entry:
    return resource_of(lambda: uri, uri, name=uri)


def template(uri: str) -> Entry:
    return raw_template(ResourceTemplate("some", uri), lambda ctx, uri, variables: variables)


def names(catalog: Catalog, method: str = "tools/list") -> list[str]:
    items = catalog.list(method, LATEST)[LISTS[method]]
    return [item.get("uri") or item.get("uriTemplate") or item["name"] for item in items]


def filled_catalog() -> Catalog:
    catalog = Catalog()
    for entry in (tool("add"), prompt("review"), resource("a:b"), template("a://{x}")):
        catalog.add(entry)
    return catalog


# Lookup.


@req("tool-18")
def test_tools_and_prompts_are_found_by_exactly_their_names() -> None:
    catalog = filled_catalog()
    found = catalog.find("tools", "add")
    assert found is not None
    assert found.entry.prepare(CTX, {"city": "Oslo"})() == "add Oslo"
    assert catalog.find("tools", "Add") is None
    catalog.add(tool("Add"))
    assert catalog.find("tools", "Add") is not catalog.find("tools", "add")
    review = catalog.find("prompts", "review")
    assert review is not None
    assert review.key == "review"
    assert catalog.find("prompts", "add") is None


@req("res-22")
def test_a_fixed_uri_comes_before_templates_in_registration_order() -> None:
    catalog = Catalog()
    catalog.add(template("a://x/{rest}"))
    catalog.add(template("a://{+rest}"))
    catalog.add(resource("a://x/fixed"))
    found = {uri: catalog.find_resource(uri) for uri in ("a://x/fixed", "a://x/y", "a://z", "b://z")}
    assert found.pop("b://z") is None
    assert {uri: (each[0].key, each[1]) for uri, each in found.items() if each} == {
        "a://x/fixed": ("a://x/fixed", {}),
        "a://x/y": ("a://x/{rest}", {"rest": "y"}),
        "a://z": ("a://{+rest}", {"rest": "z"}),
    }


@req("res-10")
@pytest.mark.parametrize("uri", ["a://..", "a://%2e%2e", "a://b%00", "a://%zz", "a://\ud800", "a:", "", "a:B"])
def test_an_unknown_or_invalid_uri_is_not_found(uri: str) -> None:
    assert filled_catalog().find_resource(uri) is None


def test_a_uri_is_quoted_once_for_all_templates_unless_it_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = Catalog()
    for number in range(30):
        catalog.add(template(f"t{number}://{{+rest}}"))
    prepared = []

    def quote(uri: str, safe: str) -> str:
        prepared.append(len(uri))
        return urllib.parse.quote(uri, safe)

    monkeypatch.setattr(templates, "quote", quote)
    longest = "t29://".ljust(Limits().uri_length, "é")
    found = catalog.find_resource(longest)
    assert found is not None
    assert found[1] == {"rest": longest.removeprefix("t29://")}
    assert catalog.find_resource(longest + "é") is None
    assert catalog.find_completed("ref/resource", longest + "é") is None
    assert prepared == [len(longest)]


def test_a_fixed_uri_may_be_as_long_as_it_was_registered() -> None:
    catalog = filled_catalog()
    catalog.add(resource(long := "a:".ljust(Limits().uri_length + 1, "b")))
    assert catalog.find_resource(long) is not None


# Lists.


class OfficialSchema:
    def __init__(self, folder: Path, revision: Revision) -> None:
        self.whole = json.loads((folder / "schema" / f"{revision}.json").read_text())

    def check(self, definition: str, instance: JsonObject) -> None:
        key = "$defs" if "$defs" in self.whole else "definitions"
        schema = {**self.whole, "$ref": f"#/{key}/{definition}"}
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(instance)


def full_catalog() -> Catalog:
    """For each kind, two entries with all optional members, one of them raw, and one without optional members."""
    icons, meta, notes = (
        [Icon("https://example.com/i.png")],
        {"com.example/a": 1},
        Annotations(["user"], 1, "2025-06-18"),
    )

    def forecast(city: str, days: int = 3) -> dict[str, int]:
        """The forecast."""
        return {city: days}

    def review(code: str) -> str:
        """Review."""
        return code

    rich: Mapping[str, Any] = {"title": "T", "icons": icons, "meta": meta}
    execution = ToolExecution("optional")
    catalog = Catalog()
    for entry in (
        tool_of(forecast, annotations=ToolAnnotations("T", True), **rich),
        raw_tool(Tool("raw", {"type": "object"}, {"type": "array"}, execution=execution, **rich), lambda ctx, it: []),
        tool("plain"),
        prompt_of(review, **rich),
        raw_prompt(Prompt("raw", [PromptArgument("a", required=True, title="A")], **rich), lambda ctx, it: ""),
        prompt("plain"),
        resource_of(lambda: "", "a:b", name="n", mime_type="text/plain", size=1, annotations=notes, **rich),
        raw_resource(Resource("raw", "a:c", "text/plain", 0, notes, **rich), lambda ctx, uri: ""),
        resource("a:plain"),
        resource_of(review, "a://{code}", mime_type="text/plain", annotations=notes, **rich),
        raw_template(ResourceTemplate("raw", "b://{c}", "text/plain", notes, **rich), lambda ctx, uri, variables: ""),
        template("c://{d}"),
    ):
        catalog.add(entry)
    return catalog


@req("tool-16", "tool-36", "tool-37", "res-22", "res-25", "prm-17")
@REVISION
@pytest.mark.parametrize("method", LISTS)
def test_every_list_conforms_to_the_schema_of_its_revision(
    revision: Revision, method: str, shared_schemas: Path
) -> None:
    page = full_catalog().list(method, revision)
    terms = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"} if revision is LATEST else {}
    name = {"resources/templates/list": "ListResourceTemplatesResult"}.get(method)
    name = name or f"List{method.partition('/')[0].capitalize()}Result"
    OfficialSchema(shared_schemas, revision).check(name, {**page, **terms})
    assert len(page[LISTS[method]]) == 3


@req("tool-36", "tool-37", "tool-38")
@REVISION
def test_an_output_schema_of_no_object_is_listed_in_the_newest_revision(revision: Revision) -> None:
    listed = {each["name"]: each for each in full_catalog().list("tools/list", revision)["tools"]}
    assert ("outputSchema" in listed["forecast"]) == (revision.name >= "2025-06-18")
    assert ("outputSchema" in listed["raw"]) == (revision is LATEST)
    assert all(each["inputSchema"]["type"] == "object" for each in listed.values())
    assert ("execution" in listed["raw"]) == (revision.name == "2025-11-25")


def pages_of(catalog: Catalog, size: int, **more: Any) -> list[list[str]]:
    pages, pager = [], Pager()
    while not pager.done:
        page = catalog.list("tools/list", LATEST, pager.params.get("cursor"), size, **more)
        pages.append([each["name"] for each in page["tools"]])
        pager.received(page)
    return pages


@req("tool-25")
@REVISION
def test_a_list_is_in_the_order_of_registration_each_time(revision: Revision) -> None:
    order = [f"t{number}" for number in range(50)]
    random.shuffle(order)
    catalog = Catalog()
    for name in order:
        catalog.add(tool(name))
    for _ in range(3):
        assert [each["name"] for each in catalog.list("tools/list", revision)["tools"]] == order
    assert [name for page in pages_of(catalog, 7) for name in page] == order


@req("page-11")
@REVISION
@pytest.mark.parametrize("method", LISTS)
def test_every_list_is_cut_into_pages(revision: Revision, method: str) -> None:
    catalog = full_catalog()
    whole, pages, pager = catalog.list(method, revision)[LISTS[method]], [], Pager()
    while not pager.done:
        page = catalog.list(method, revision, pager.params.get("cursor"), 2)
        pages.append(page[LISTS[method]])
        pager.received(page)
    assert pages == [whole[:2], whole[2:]]


@pytest.mark.parametrize("cursor", ["", "nonsense", "YQ==", 3, [], {}, True])
@pytest.mark.parametrize("allowed", [None, lambda route: True])
def test_an_unknown_cursor_is_refused(cursor: Any, allowed: Any) -> None:
    with pytest.raises(RequestError) as caught:
        filled_catalog().list("tools/list", LATEST, cursor, 1, allowed)
    assert caught.value.code == INVALID_PARAMS


def test_a_page_is_cached_for_each_revision_until_the_list_changes() -> None:
    catalog = Catalog()
    for name in "abcde":
        catalog.add(tool(name))
    first = catalog.list("tools/list", LATEST, None, 2)
    second = catalog.list("tools/list", LATEST, first["nextCursor"], 2)
    assert catalog.list("tools/list", LATEST, None, 2) is first
    assert catalog.list("tools/list", LATEST, first["nextCursor"], 2) is second
    oldest = REVISIONS["2024-11-05"]
    assert catalog.list("tools/list", oldest, None, 2) is not first
    assert catalog.list("tools/list", oldest, None, 2) is catalog.list("tools/list", oldest, None, 2)
    catalog.add(prompt("other"))
    assert catalog.list("tools/list", LATEST, None, 2) is first
    catalog.add(tool("f"))
    renewed = catalog.list("tools/list", LATEST, None, 2)
    assert renewed is not first
    assert renewed["tools"][0] is first["tools"][0]  # unchanged items are used again


def test_pages_of_invented_cursors_are_not_cached() -> None:
    catalog = Catalog()
    for name in "abcde":
        catalog.add(tool(name))
    cursor = catalog.list("tools/list", LATEST, None, 2)["nextCursor"]
    last = cursor.partition(".")[0]
    for _ in range(3):
        made_up = catalog.list("tools/list", LATEST, f"{last}.YWFh", 2)
        assert made_up is not catalog.list("tools/list", LATEST, f"{last}.YWFh", 2)
        assert made_up == catalog.list("tools/list", LATEST, cursor, 2)
    assert len(catalog._pages["tools"]) == 3


def test_a_filter_hides_entries_and_changes_no_cached_page() -> None:
    catalog = Catalog()
    for name in "abcde":
        catalog.add(tool(name))
    assert pages_of(catalog, 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert pages_of(catalog, 2, allowed=lambda route: route.key not in "bd") == [["a", "c"], ["e"]]
    assert pages_of(catalog, 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert catalog.list("tools/list", LATEST, allowed=lambda route: False) == {"tools": []}


@req("page-02", "page-11")
@settings(max_examples=60)
@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=8))
def test_changes_between_two_pages_neither_repeat_nor_skip_an_entry(size: int, changes: list[tuple[bool, int]]) -> None:
    catalog, seen, pager = Catalog(), [], Pager()
    for number in range(10):
        catalog.add(tool(f"t{number}"))
    removed: set[str] = set()
    added = 0
    while not pager.done:
        try:
            page = catalog.list("tools/list", LATEST, pager.params.get("cursor"), size)
        except RequestError:  # both of the items that the cursor names are gone
            assert len(removed) >= 2
            return
        seen += [each["name"] for each in page["tools"]]
        pager.received(page)
        if changes:
            add, number = changes.pop()
            if add:
                added += 1
                catalog.add(tool(f"new{added}"))
            elif f"t{number}" not in removed:
                removed.add(f"t{number}")
                catalog.remove("tools", f"t{number}")
    assert len(set(seen)) == len(seen)
    assert {f"t{number}" for number in range(10)} - removed <= set(seen)


# Changes.


@req("tool-19")
@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (lambda: tool("add"), "the tool 'add' exists already; give the new one another name"),
        (lambda: prompt("review"), "the prompt 'review' exists already; give the new one another name"),
        (lambda: resource("a:b"), "the resource 'a:b' exists already; give the new one another URI"),
        (lambda: template("a://{x}"), "the resource template 'a://{x}' exists already; give the new one another URI"),
    ],
)
def test_a_second_entry_with_the_same_name_or_uri_is_refused(entry: Callable[[], Entry], why: str) -> None:
    catalog = filled_catalog()
    before = {method: names(catalog, method) for method in LISTS}
    heard: list[str] = []
    catalog.on_change.append(heard.append)
    with pytest.raises(UsageError) as caught:
        catalog.add(entry())
    assert str(caught.value).startswith(why)
    assert {method: names(catalog, method) for method in LISTS} == before
    assert heard == []


@req("prm-18", "res-26")
def test_each_change_is_reported_after_it_was_made() -> None:
    catalog, heard = Catalog(), []
    catalog.on_change.append(lambda change: heard.append((change, [len(names(catalog, method)) for method in LISTS])))
    for entry in (tool("add"), prompt("review"), resource("a:b"), template("a://{x}")):
        catalog.add(entry)
    catalog.remove("templates", "a://{x}")
    catalog.remove("resources", "a:b")
    catalog.remove("prompts", "review")
    catalog.remove("tools", "add")
    assert heard == [
        ("tools", [1, 0, 0, 0]),
        ("prompts", [1, 1, 0, 0]),
        ("resources", [1, 1, 1, 0]),
        ("resources", [1, 1, 1, 1]),
        ("resources", [1, 1, 1, 0]),
        ("resources", [1, 1, 0, 0]),
        ("prompts", [1, 0, 0, 0]),
        ("tools", [0, 0, 0, 0]),
    ]
    catalog.add(tool("add"))  # its name is free again
    assert names(catalog) == ["add"]


@pytest.mark.parametrize(
    ("remove", "why"),
    [
        (lambda catalog: catalog.remove("tools", "sub"), "there is no tool 'sub' to remove"),
        (lambda catalog: catalog.remove("prompts", "add"), "there is no prompt 'add' to remove"),
        (lambda catalog: catalog.remove("resources", "a://x"), "there is no resource 'a://x' to remove"),
        (lambda catalog: catalog.remove("templates", "a:b"), "there is no resource template 'a:b' to remove"),
    ],
)
def test_an_unknown_entry_cannot_be_removed(remove: Callable[[Catalog], None], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        remove(filled_catalog())
    assert str(caught.value) == why


def test_the_kinds_include_those_of_removed_entries() -> None:
    catalog = Catalog()
    assert catalog.kinds == set()
    catalog.add(template("a://{x}"))
    assert catalog.kinds == {"resources"}
    catalog.remove("templates", "a://{x}")
    catalog.add(tool("add"))
    catalog.add_completer(completer_of(lambda value: []))
    catalog.add(prompt("review"))
    assert catalog.kinds == {"tools", "prompts", "resources", "completions"}


# Completion.


def completes_with(*words: str) -> Entry:
    return completer_of(lambda value: [*words, value])


def completer(catalog: Catalog, kind: str, name: str, argument: str) -> tuple[Entry, int] | None:
    route = catalog.find_completed(kind, name)
    assert route is not None
    return catalog.completer(route, argument)


async def completed(server: Server, kind: str, name: str, argument: str) -> list[str]:
    """The values that a client gets for the text "x", while the argument "other" has a value."""
    ref = {"type": kind, "name" if kind == "ref/prompt" else "uri": name}
    params = {"ref": ref, "argument": {"name": argument, "value": "x"}, "context": {"arguments": {"other": "y"}}}
    async with connected(server, LATEST.name) as wire:
        values: list[str] = (await wire.call("completion/complete", params))["completion"]["values"]
    return values


def server_of(catalog: Catalog) -> Server:
    server = Server("completing")
    server._catalog = catalog
    catalog.kinds.add("completions")
    return server


def answer(found: tuple[Entry, int] | None) -> Any:
    assert found is not None
    return found[0].prepare(CTX, {"value": "x"})()


@req("cmpl-08")
def test_the_most_specific_completer_is_found() -> None:
    catalog = filled_catalog()
    catalog.add(prompt("explain"))
    assert completer(catalog, "ref/prompt", "review", "code") is None
    for ref, argument in [
        (None, None), (None, "language"), ("review", None), ("review", "language"), ("a://{x}", "x"),
    ]:  # fmt: skip
        catalog.add_completer(completes_with(f"{ref} {argument}"), ref, argument)
    found = {
        (kind, name, argument): answer(completer(catalog, kind, name, argument))[0]
        for kind, name, argument in [
            ("ref/prompt", "review", "language"),
            ("ref/prompt", "review", "code"),
            ("ref/prompt", "explain", "language"),
            ("ref/prompt", "explain", "code"),
            ("ref/resource", "a://{x}", "x"),
            ("ref/resource", "a://anything", "x"),
        ]
    }
    assert list(found.values()) == [
        "review language",
        "review None",
        "None language",
        "None None",
        "a://{x} x",
        "a://{x} x",
    ]


@req("cmpl-06", "cmpl-08")
@pytest.mark.parametrize(
    ("kind", "name", "argument", "why"),
    [
        ("ref/prompt", "unknown", "code", "there is no prompt 'unknown'"),
        ("ref/prompt", "add", "city", "there is no prompt 'add'"),
        ("ref/prompt", "review", "tone", "the prompt 'review' has no argument 'tone'"),
        ("ref/resource", "b://{x}", "x", "there is no resource or resource template 'b://{x}'"),
        ("ref/resource", "review", "code", "there is no resource or resource template 'review'"),
        ("ref/resource", "a://{x}", "y", "the resource template 'a://{x}' has no argument 'y'"),
        ("ref/resource", "a:b", "x", "the resource 'a:b' has no argument 'x'"),
    ],
)
async def test_the_completion_of_an_unknown_argument_is_refused(
    kind: str, name: str, argument: str, why: str, autojump_clock: MockClock
) -> None:
    catalog = filled_catalog()
    catalog.add_completer(completes_with())
    with pytest.raises(ErrorResponse) as caught:
        await completed(server_of(catalog), kind, name, argument)
    assert (caught.value.code, caught.value.message) == (INVALID_PARAMS, why)


@pytest.mark.parametrize(
    ("kind", "name", "argument", "ref"),
    [
        ("ref/prompt", "review", "code", PromptReference("review")),
        ("ref/resource", "a://{x}", "x", ResourceReference("a://{x}")),
        ("ref/resource", "a://what", "x", ResourceReference("a://what")),
    ],
)
async def test_a_completer_gets_the_parameters_that_it_declares(
    kind: str, name: str, argument: str, ref: Any, autojump_clock: MockClock
) -> None:
    given: list[Any] = []

    def everything(ref: Any, argument: str, arguments: Mapping[str, str], value: str, ctx: Context) -> list[str]:
        given.extend([ref, argument, arguments, value, ctx.method])
        return []

    catalog = filled_catalog()
    catalog.add_completer(completer_of(everything))
    route = catalog.find_completed(kind, name)
    assert route is not None
    assert (len(route.places), route.entry.takes) == (1, {argument} | ({"language"} if argument == "code" else set()))
    assert await completed(server_of(catalog), kind, name, argument) == []
    assert given == [ref, argument, {"other": "y"}, "x", "completion/complete"]


@pytest.mark.parametrize(
    ("ref", "argument", "why"),
    [
        ("unknown", None, "there is no prompt or URI template 'unknown' to complete; register that first"),
        ("a:b", None, "there is no prompt or URI template 'a:b' to complete; register that first"),
        ("review", "x", "the prompt 'review' has no argument 'x' to complete; it has code, language"),
        ("empty", "x", "the prompt 'empty' has no argument 'x' to complete; it has none"),
        ("review", "code", "the argument 'code' of review has a completer already; give this one another"),
        (None, None, "every argument of every prompt and template has a completer already"),
    ],
)
def test_a_completer_without_a_target_or_a_second_one_is_refused(ref: Any, argument: Any, why: str) -> None:
    catalog = filled_catalog()
    catalog.add(raw_prompt(Prompt("empty"), lambda ctx, arguments: ""))
    catalog.add_completer(completes_with("first"), "review", "code")
    catalog.add_completer(completes_with("any"))
    with pytest.raises(UsageError) as caught:
        catalog.add_completer(completes_with("second"), ref, argument)
    assert str(caught.value).startswith(why)
    assert answer(completer(catalog, "ref/prompt", "review", "code")) == ["first", "x"]


def test_completers_are_removed_with_their_entries() -> None:
    catalog = filled_catalog()
    catalog.add_completer(completes_with("old"), "review", "code")
    catalog.add_completer(completes_with("old"), "a://{x}")
    catalog.add_completer(completes_with("any"))
    catalog.remove("prompts", "review")
    catalog.remove("templates", "a://{x}")
    catalog.add(prompt("review"))
    catalog.add(template("a://{x}"))
    assert answer(completer(catalog, "ref/prompt", "review", "code")) == ["any", "x"]
    assert answer(completer(catalog, "ref/resource", "a://{x}", "x")) == ["any", "x"]


# Mounting.


def nested_catalogs() -> tuple[Catalog, Catalog, Catalog]:
    outer, middle, inner = Catalog(), Catalog(), Catalog()
    outer.mount(middle, "m_")
    middle.mount(inner, "i_")
    return outer, middle, inner


def test_mounted_names_get_a_prefix_and_mounted_uris_stay() -> None:
    outer, inner = Catalog(), filled_catalog()
    outer.add(tool("add"))
    outer.mount(inner, "math.")
    assert {method: names(outer, method) for method in LISTS} == {
        "tools/list": ["add", "math.add"],
        "prompts/list": ["math.review"],
        "resources/list": ["a:b"],
        "resources/templates/list": ["a://{x}"],
    }
    mounted = outer.find("tools", "math.add")
    assert mounted is not None
    assert mounted.places == ((outer, "math.add"), (inner, "add"))
    assert mounted.json(LATEST)["name"] == "math.add"
    own = inner.find("tools", "add")
    assert own is not None
    assert mounted.entry is own.entry
    assert mounted.entry.prepare(CTX, {"city": "Oslo"})() == "add Oslo"
    review = outer.find("prompts", "math.review")
    assert review is not None
    assert review.entry.prepare(CTX, {"code": "x"})() == "review"
    for uri, key, variables in (("a:b", "a:b", {}), ("a://y", "a://{x}", {"x": "y"})):
        found = outer.find_resource(uri)
        assert found is not None
        assert (found[0].places, found[1]) == (((outer, key), (inner, key)), variables)
    assert {method: names(inner, method)[0] for method in LISTS} == dict(
        zip(LISTS, ["add", "review", "a:b", "a://{x}"], strict=True)
    )
    assert outer.kinds == {"tools", "prompts", "resources"}


@REVISION
def test_a_mounted_entry_differs_only_in_its_name(revision: Revision) -> None:
    outer, inner = Catalog(), full_catalog()
    outer.mount(inner, "x")
    for method, member in LISTS.items():
        prefix = "x" if method in ("tools/list", "prompts/list") else ""
        expected = [{**each, "name": prefix + each["name"]} for each in inner.list(method, revision)[member]]
        assert outer.list(method, revision)[member] == expected


def test_live_changes_go_up_two_levels() -> None:
    outer, middle, inner = nested_catalogs()
    heard: list[tuple[str, str]] = []
    for name, catalog in (("outer", outer), ("middle", middle), ("inner", inner)):
        catalog.on_change.append(lambda change, name=name: heard.append((name, change)))  # type: ignore[misc]
    inner.add(tool("add"))
    middle.add(tool("own"))
    inner.add(template("a://{x}"))
    assert names(outer) == ["m_i_add", "m_own"]
    assert names(middle) == ["i_add", "own"]
    assert names(inner) == ["add"]
    found = outer.find("tools", "m_i_add")
    assert found is not None
    assert found.places == ((outer, "m_i_add"), (middle, "i_add"), (inner, "add"))
    assert found.entry.prepare(CTX, {"city": "Oslo"})() == "add Oslo"
    assert outer.find_resource("a://y") is not None
    inner.remove("tools", "add")
    inner.remove("templates", "a://{x}")
    assert names(outer) == ["m_own"]
    assert names(middle) == ["own"]
    assert outer.find("tools", "m_i_add") is None
    assert outer.find_resource("a://y") is None
    all_three = ["inner", "middle", "outer"]
    assert heard == [
        *((name, "tools") for name in all_three),
        ("middle", "tools"),
        ("outer", "tools"),
        *((name, "resources") for name in all_three),
        *((name, "tools") for name in all_three),
        *((name, "resources") for name in all_three),
    ]
    assert outer.kinds == {"tools", "resources"}


def test_a_mount_is_reported_once_for_each_list() -> None:
    outer, heard = Catalog(), []
    outer.on_change.append(heard.append)
    outer.mount(filled_catalog())
    assert heard == ["tools", "prompts", "resources"]


def test_changes_of_a_mounted_catalog_renew_the_cached_pages() -> None:
    outer, _, inner = nested_catalogs()
    assert names(outer) == []
    inner.add(tool("a"))
    assert names(outer) == ["m_i_a"]
    inner.remove("tools", "a")
    assert names(outer) == []


def contents_of(*catalogs: Catalog) -> list[Any]:
    return [(names(catalog, method), sorted(catalog.kinds)) for catalog in catalogs for method in LISTS]


@req("tool-19")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    ("taken", "new", "why"),
    [
        (["m_i_a", "i_a", "a"], tool("a"), "the tool '{}' exists already; give the new one another name (or its"),
        (["m_i_p", "i_p", "p"], prompt("p"), "the prompt '{}' exists already"),
        (["a:b"] * 3, resource("a:b"), "the resource '{}' exists already; give the new one another URI"),
        (["a://{x}"] * 3, template("a://{x}"), "the resource template '{}' exists already"),
    ],
    ids=["tool", "prompt", "resource", "template"],
)
def test_a_clash_in_an_outer_catalog_changes_no_catalog(level: int, taken: list[str], new: Entry, why: str) -> None:
    make = {"tools": tool, "prompts": prompt, "resources": resource, "templates": template}[new.kind]
    catalogs = outer, _, inner = nested_catalogs()
    catalogs[level].add(make(taken[level]))
    before, heard = contents_of(*catalogs), []
    for catalog in catalogs:
        catalog.on_change.append(heard.append)
    with pytest.raises(UsageError) as caught:
        inner.add(new)
    assert str(caught.value).startswith(why.format(taken[level]))
    assert contents_of(*catalogs) == before
    assert heard == []
    # A catalog with the clashing entry cannot be mounted.
    other = Catalog()
    other.add(new)
    with pytest.raises(UsageError):
        inner.mount(other)
    assert contents_of(*catalogs) == before
    other.add(tool("later"))
    assert contents_of(*catalogs) == before
    assert outer.find("tools", "m_i_later") is None


def test_a_name_that_is_too_long_with_its_prefixes_is_refused() -> None:
    outer, middle, inner = nested_catalogs()
    inner.add(tool("x" * 124))
    with pytest.raises(UsageError, match="the name of a tool must have 1 to 128"):
        inner.add(tool("x" * 125))
    assert [len(names(catalog)) for catalog in (outer, middle, inner)] == [1, 1, 1]
    inner.add(prompt("x" * 200))


def test_one_catalog_can_be_mounted_in_two_places() -> None:
    top, left, right, shared = Catalog(), Catalog(), Catalog(), Catalog()
    top.mount(left, "l_")
    top.mount(right, "r_")
    left.mount(shared)
    right.mount(shared)
    shared.add(tool("a"))
    assert names(top) == ["l_a", "r_a"]
    with pytest.raises(UsageError, match=r"^the resource 'a:b' exists already"):
        shared.add(resource("a:b"))  # `top` would have its URI twice
    assert contents_of(left, right, shared)[2] == ([], ["tools"])
    shared.remove("tools", "a")
    assert names(top) == []
    twice = Catalog()
    twice.mount(shared, "x")
    twice.mount(shared, "y")
    shared.add(prompt("p"))
    assert names(twice, "prompts/list") == ["xp", "yp"]


class Model:
    """Some catalogs, and the expected entries of each, computed from the operations."""

    def __init__(self) -> None:
        self.catalogs = [Catalog() for _ in range(4)]
        self.own: list[tuple[int, str, str]] = []  # catalog, kind, key
        self.mounts: list[tuple[int, int, str]] = []  # outer, inner, prefix

    def shown(self, at: int) -> list[tuple[str, str]]:
        shown = [(kind, key) for catalog, kind, key in self.own if catalog == at]
        for outer, inner, prefix in self.mounts:
            if outer == at:
                shown += [(kind, prefix + key if kind == "tools" else key) for kind, key in self.shown(inner)]
        return shown

    def valid(self) -> bool:
        """Whether no catalog contains itself, and no catalog shows an entry twice."""
        if len(set(self.mounts)) < len(self.mounts) or any(at in self.below(at) for at in range(4)):
            return False
        return all(len(shown) == len(set(shown)) for shown in map(self.shown, range(4)))

    def below(self, at: int) -> set[int]:
        found: set[int] = set()
        waiting = [at]
        while waiting:
            outer = waiting.pop()
            new = {inner for each, inner, _ in self.mounts if each == outer} - found
            found |= new
            waiting += new
        return found

    def apply(self, operation: str, at: int, *rest: Any) -> None:
        catalog = self.catalogs[at]
        if operation == "mount":
            catalog.mount(self.catalogs[rest[0]], rest[1])
        elif operation == "add":
            catalog.add(tool(rest[1]) if rest[0] == "tools" else resource(f"{rest[1]}:"))
        else:
            catalog.remove("tools", rest[1]) if rest[0] == "tools" else catalog.remove("resources", f"{rest[1]}:")

    def record(self, operation: str, *values: Any) -> bool:
        """Record the operation, if it is valid."""
        own, mounts = list(self.own), list(self.mounts)
        if operation == "mount":
            self.mounts.append(values)  # type: ignore[arg-type]
        elif operation == "add":
            self.own.append(values)  # type: ignore[arg-type]
        else:
            self.own = [each for each in own if each != values]
        if (operation != "remove" or values in own) and self.valid():
            return True
        self.own, self.mounts = own, mounts
        return False

    def check(self) -> None:
        for at, catalog in enumerate(self.catalogs):
            tools, resources = names(catalog), names(catalog, "resources/list")
            expected = self.shown(at)
            assert sorted(tools) == sorted(key for kind, key in expected if kind == "tools")
            assert sorted(resources) == sorted(f"{key}:" for kind, key in expected if kind == "resources")


CATALOG, KIND = st.integers(0, 3), st.just("tools") | st.just("resources")
OPERATIONS = st.lists(
    st.tuples(st.just("add") | st.just("remove"), CATALOG, KIND, st.sampled_from(["a", "b", "xa"]))
    | st.tuples(st.just("mount"), CATALOG, CATALOG, st.sampled_from(["", "x", "y"])),
    max_size=14,
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_each_operation_shows_the_expected_entries_or_changes_nothing(operations: Any) -> None:
    model = Model()
    for operation in operations:
        if model.record(*operation):
            model.apply(*operation)
        else:
            with pytest.raises(UsageError):
                model.apply(*operation)
        model.check()


@pytest.mark.parametrize(
    ("mount", "why"),
    [
        (lambda outer, middle, inner: inner.mount(inner), "a server cannot contain itself"),
        (lambda outer, middle, inner: inner.mount(middle, "x"), "a server cannot contain itself"),
        (lambda outer, middle, inner: inner.mount(outer, "x"), "a server cannot contain itself"),
        (lambda outer, middle, inner: middle.mount(inner, "i_"), "this server is mounted here already with the prefix"),
        (lambda outer, middle, inner: inner.mount(Catalog(), "a b"), "a prefix may only have the characters"),
        (lambda outer, middle, inner: inner.mount(Catalog(), None), "a prefix may only have the characters"),
        (lambda outer, middle, inner: inner.mount(Catalog(), "x" * 128), "a prefix may only have the characters"),
    ],
)
def test_invalid_mounts_are_refused(mount: Callable[..., None], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        mount(*nested_catalogs())
    assert str(caught.value).startswith(why)


def test_a_mounted_entry_can_only_be_removed_from_its_own_catalog() -> None:
    outer, _, inner = nested_catalogs()
    inner.add(tool("a"))
    with pytest.raises(UsageError, match=r"^the tool 'm_i_a' belongs to a mounted server; remove it there$"):
        outer.remove("tools", "m_i_a")
    assert names(outer) == ["m_i_a"]


def test_a_mounted_catalog_does_not_keep_outer_catalogs_alive() -> None:
    part = filled_catalog()
    for number in range(3):
        outer = Catalog()
        outer.mount(part, f"p{number}_")
        gone = weakref.ref(outer)
        del outer
        gc.collect()
        assert gone() is None
    part.add(tool("new"))
    part.remove("tools", "new")
    assert len(part._above) == 0


async def test_completers_of_a_mounted_catalog_serve_its_own_entries(autojump_clock: MockClock) -> None:
    outer, middle, inner = nested_catalogs()
    passed: list[Catalog] = []
    for catalog in (outer, middle, inner):

        async def note(ctx: Context, request: Request, call_next: CallNext, catalog: Catalog = catalog) -> JsonObject:
            passed.append(catalog)
            return await call_next()

        catalog.middleware = [note]
        catalog.add(prompt("review"))
    inner.add_completer(completer_of(lambda ref: ["inner", ref.name]))
    assert outer.kinds == middle.kinds == inner.kinds == {"prompts", "completions"}

    async def found(name: str) -> tuple[list[str], list[Catalog]]:
        passed.clear()
        return await completed(server_of(outer), "ref/prompt", name, "code"), passed[1:]

    assert await found("m_i_review") == (["inner", "review"], [middle, inner])
    assert await found("review") == ([], [])
    middle.add_completer(completer_of(lambda ref: ["middle", ref.name]))
    assert await found("m_i_review") == (["inner", "review"], [middle, inner])
    assert await found("m_review") == (["middle", "review"], [middle])
    middle.add_completer(completer_of(lambda ref: ["middle's own", ref.name]), "i_review")
    assert await found("m_i_review") == (["middle's own", "i_review"], [middle])
    outer.add_completer(completer_of(lambda ref: ["outer", ref.name]))
    assert await found("review") == (["outer", "review"], [])
    assert await found("m_review") == (["middle", "review"], [middle])
    outer.add_completer(completer_of(lambda ref: ["outer's own", ref.name]), "m_i_review", "code")
    assert await found("m_i_review") == (["outer's own", "m_i_review"], [])


def test_mounting_adds_the_completions_of_the_mounted_catalog() -> None:
    outer, inner = Catalog(), Catalog()
    inner.add_completer(completes_with())
    outer.mount(inner)
    assert outer.kinds == {"completions"}


# Cost.


def test_calls_load_neither_models_nor_the_validation_engine() -> None:
    program = """
import sys
from trio_mcp.server import Catalog, prompt_of, tool_of
def add(a: int, b: float = 0.5, *, names: list[str] | None = None) -> str: return "sum"
catalog = Catalog()
catalog.add(tool_of(add))
catalog.add(prompt_of(lambda code: code, name="p"))
assert catalog.find("tools", "add").entry.prepare(None, {"a": 1, "names": ["x"]})() == "sum"
assert catalog.find("prompts", "p").entry.prepare(None, {"code": "x"})() == "x"
dear = ["cattrs", "jsonschema_rs", "trio_mcp.core.models", "trio_mcp.core.content", "trio_mcp.core.codec",
        "trio_mcp.core.schema.validation", "trio_mcp.core.schema.templates", "trio_mcp.core.http.fields",
        "trio_mcp.core.caching"]
print([name for name in dear if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
