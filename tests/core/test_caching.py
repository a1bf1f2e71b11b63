"""The response cache of the client: the results that it keeps, their lifetime, their principal, and their removal."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    COMPLETION_SECONDS,
    LATEST,
    LEGACY,
    MAX_BYTES,
    MAX_ENTRIES,
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    MODERN,
    REVISIONS,
    CacheHints,
    Limits,
    ResponseCache,
    Role,
    UsageError,
)

LISTS = ["tools/list", "prompts/list", "resources/list", "resources/templates/list"]
REQUESTS = [(method, {}) for method in [*LISTS, "server/discover"]] + [("resources/read", {"uri": "file:///a"})]
RESULT = {"resultType": "complete", "tools": [], "ttlMs": 1000, "cacheScope": "private"}
PUBLIC = {**RESULT, "cacheScope": "public"}


class CachingClient:
    """A client: a cache, a clock and a principal, so that a test gives only the parameters that matter to it."""

    def __init__(self, cache: ResponseCache | None = None, principal: str | None = "ann") -> None:
        self.cache = ResponseCache(LATEST) if cache is None else cache
        self.principal = principal
        self.now = 100.0

    def get(self, method: str, **params: Any) -> dict[str, Any] | None:
        return self.cache.get(method, params, now=self.now, principal=self.principal)

    def store(self, method: str, result: dict[str, Any], **params: Any) -> bool:
        return self.cache.store(
            method, params, result, asked=self.cache.changes, now=self.now, principal=self.principal
        )


@pytest.fixture
def ann() -> CachingClient:
    return CachingClient()


# Results that are kept


@req("cache-04")
@pytest.mark.parametrize(("method", "params"), REQUESTS)
def test_a_complete_result_is_kept_and_found(ann: CachingClient, method: str, params: dict[str, Any]) -> None:
    assert ann.get(method, **params) is None
    assert ann.store(method, RESULT, **params)
    assert ann.get(method, **params) == RESULT


def test_a_result_without_a_type_is_complete(ann: CachingClient) -> None:
    assert ann.store("tools/list", {"tools": [], "ttlMs": 1000})
    assert ann.get("tools/list") == {"tools": [], "ttlMs": 1000}


@pytest.mark.parametrize(
    ("revision", "method"),
    [
        (revision, method)
        for revision in REVISIONS.values()
        for method in revision.requests[Role.CLIENT]
        if method not in (*revision.cacheable, "completion/complete")
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_methods_and_revisions_without_hints_are_not_cached(revision: Any, method: str) -> None:
    client = CachingClient(ResponseCache(revision))
    assert not client.store(method, RESULT)
    assert client.get(method) is None
    assert (len(client.cache), client.cache.size) == (0, 0)


@req("cmpl-03")
@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_a_completion_is_kept_for_seconds_and_for_one_principal(revision: Any) -> None:
    """Hints of the server are ignored, because the protocol has no hints for completions."""
    cache = ResponseCache(revision)
    ann, bob = CachingClient(cache), CachingClient(cache, "bob")
    asked = {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "a", "value": "v"}}
    found = {"completion": {"values": ["vw"]}, "ttlMs": 10**9, "cacheScope": "public"}
    assert ann.store("completion/complete", found, **asked)
    assert bob.get("completion/complete", **asked) is None
    ann.now += COMPLETION_SECONDS - 1
    assert ann.get("completion/complete", **asked) == found
    ann.now += 1
    assert ann.get("completion/complete", **asked) is None


@req("cmpl-03")
@pytest.mark.parametrize("kind", ["prompts", "resources", "tools"])
def test_a_completion_is_dropped_with_the_lists_of_prompts_and_resources(kind: str) -> None:
    ann = CachingClient()
    before = ann.cache.key("completion/complete", {}, principal=None)
    assert before == ann.cache.key("completion/complete", {}, principal=None)
    ann.store("completion/complete", {"completion": {"values": []}})
    ann.cache.changed(f"notifications/{kind}/list_changed", {})
    assert (ann.get("completion/complete") is None) is (kind != "tools")
    assert ann.cache.key("completion/complete", {}, principal=None) != before


def test_params_that_are_not_json_are_not_found() -> None:
    """The params are refused when the request is written."""
    assert CachingClient().get("tools/list", cursor=object()) is None


@req("cache-03")
@pytest.mark.parametrize(("method", "params"), REQUESTS)
@pytest.mark.parametrize("leftover", [{"inputResponses": {}}, {"requestState": "s"}, {"requestState": None}])
def test_the_result_of_a_retry_is_neither_kept_nor_served(
    ann: CachingClient, method: str, params: dict[str, Any], leftover: dict[str, Any]
) -> None:
    assert not ann.store(method, RESULT, **params, **leftover)
    assert len(ann.cache) == 0
    ann.store(method, RESULT, **params)
    assert ann.get(method, **params, **leftover) is None


@pytest.mark.parametrize("kind", ["input_required", "task", None, 1, []])
def test_an_incomplete_result_is_not_kept_and_replaces_no_result(ann: CachingClient, kind: Any) -> None:
    ann.store("resources/read", RESULT, uri="a")
    assert not ann.store("resources/read", {**PUBLIC, "resultType": kind}, uri="a")
    assert ann.get("resources/read", uri="a") == RESULT


# The key of a result


@req("cache-02")
def test_a_result_is_served_for_the_same_method_and_params_only(ann: CachingClient) -> None:
    requests = [
        ("tools/list", {}),
        ("tools/list", {"cursor": ""}),
        ("tools/list", {"cursor": "2"}),
        ("tools/list", {"cursor": "2", "filter": {"a": 1, "b": 1}}),
        ("tools/list", {"cursor": "2", "filter": {"a": 1, "b": True}}),
        ("tools/list", {"_meta": {"tenant": "x"}}),
        ("tools/list", {"_meta": {META_CLIENT_CAPABILITIES: {}}}),
        ("prompts/list", {}),
        ("prompts/list", {"cursor": "2"}),
        ("resources/read", {"uri": "file:///a"}),
        ("resources/read", {"uri": "file:///A"}),
    ]
    for number, (method, params) in enumerate(requests):
        assert ann.get(method, **params) is None
        assert ann.store(method, {**RESULT, "number": number}, **params)
    for number, (method, params) in enumerate(requests):
        assert ann.get(method, **params) == {**RESULT, "number": number}


def test_metadata_that_cannot_affect_a_result_is_not_in_the_key(ann: CachingClient) -> None:
    noise = {
        "progressToken": 4,
        "traceparent": "00-1-2-00",
        "tracestate": "a=b",
        "baggage": "c=d",
        META_CLIENT_INFO: {"name": "n", "version": "1"},
        META_LOG_LEVEL: "debug",
    }
    ann.store("tools/list", RESULT, cursor="2", filter={"a": 1, "b": 2}, _meta=noise)
    assert ann.get("tools/list", filter={"b": 2, "a": 1}, cursor="2", _meta={}) == RESULT
    assert ann.get("tools/list", filter={"b": 2, "a": 1}, cursor="2") == RESULT


# The lifetime of a result


@req("cache-04", "cache-06", "cache-11")
@pytest.mark.parametrize("ttl_ms", [1, 999, 1000, 60_000])
def test_a_result_is_fresh_until_the_end_of_its_ttl(ann: CachingClient, ttl_ms: int) -> None:
    ann.store("tools/list", {**RESULT, "ttlMs": ttl_ms})
    end = 100 + ttl_ms / 1000
    ann.now = math.nextafter(end, 0)
    assert ann.get("tools/list") is not None
    ann.now = end
    assert ann.get("tools/list") is None
    assert (len(ann.cache), ann.cache.size) == (0, 0)


@req("cache-05", "cache-07", "cache-08")
@pytest.mark.parametrize(
    "hint",
    [{}, *({"ttlMs": ttl} for ttl in (0, -1, -(10**30), None, True, 5000.0, math.inf, "5000", [5000], {}))],
    ids=str,
)
def test_a_result_without_a_positive_integer_ttl_is_not_kept(ann: CachingClient, hint: dict[str, Any]) -> None:
    assert not ann.store("tools/list", {"tools": [], "cacheScope": "public", **hint})
    assert ann.get("tools/list") is None
    assert len(ann.cache) == 0


def test_a_very_long_ttl_is_cut_to_a_year(ann: CachingClient) -> None:
    assert ann.store("tools/list", {**RESULT, "ttlMs": 10**400})
    ann.now += 365 * 24 * 3600 - 1
    assert ann.get("tools/list") is not None
    ann.now += 1
    assert ann.get("tools/list") is None


@pytest.mark.parametrize(("first", "second"), [*product(["private", "public"], repeat=2)])
def test_the_newest_result_replaces_the_older_one(ann: CachingClient, first: str, second: str) -> None:
    for other in ({"ttlMs": 5000}, {"ttlMs": 0}):
        ann.store("tools/list", {**RESULT, "cacheScope": first, "tools": ["old"]})
        newer = {**RESULT, **other, "cacheScope": second, "tools": ["new"]}
        assert ann.store("tools/list", newer) is (other["ttlMs"] > 0)
        assert ann.get("tools/list") == (newer if other["ttlMs"] else None)


@req("cache-27")
def test_the_ttl_of_a_page_starts_when_the_page_is_received(ann: CachingClient) -> None:
    for cursor in ("", "2", "3"):
        ann.store("tools/list", {**RESULT, "nextCursor": cursor}, cursor=cursor)
        ann.now += 0.25
    seen = []
    for _ in range(4):
        seen.append([cursor for cursor in ("", "2", "3") if ann.get("tools/list", cursor=cursor)])
        ann.now += 0.25
    assert seen == [["", "2", "3"], ["2", "3"], ["3"], []]


def test_an_expired_page_leaves_the_others_and_can_be_stored_again(ann: CachingClient) -> None:
    ann.store("tools/list", {**RESULT, "ttlMs": 9000})
    ann.store("tools/list", RESULT, cursor="2")
    ann.now += 1
    assert ann.get("tools/list", cursor="2") is None
    assert ann.store("tools/list", {**RESULT, "again": 1}, cursor="2")
    assert ann.get("tools/list", cursor="2") == {**RESULT, "again": 1}
    assert ann.get("tools/list") is not None


# The principal of a result

PRINCIPALS = ["ann", "bob", "", None]


@req("cache-17")
@pytest.mark.parametrize(("owner", "other"), [*product(PRINCIPALS, repeat=2)])
@pytest.mark.parametrize("scope", ["private", "Public", "", None, True, ["public"], ...])
def test_a_result_that_is_not_public_is_served_to_its_owner_only(owner: Any, other: Any, scope: Any) -> None:
    mine = CachingClient(principal=owner)
    theirs = CachingClient(mine.cache, other)
    result = {**RESULT, "cacheScope": scope}
    if scope is ...:  # a result without a scope
        del result["cacheScope"]
    assert mine.store("tools/list", result)
    assert mine.get("tools/list") == result
    assert theirs.get("tools/list") == (result if owner == other else None)


@req("cache-16")
@pytest.mark.parametrize(("owner", "other"), [*product(PRINCIPALS, repeat=2)])
def test_a_public_result_is_served_to_all_principals(owner: Any, other: Any) -> None:
    mine = CachingClient(principal=owner)
    assert mine.store("tools/list", PUBLIC)
    assert CachingClient(mine.cache, other).get("tools/list") == PUBLIC


@pytest.mark.parametrize("method", ["tools/list", "tools/call"])
@pytest.mark.parametrize("principal", [("ann", "example.com"), 7, b"ann", {"sub": "ann"}, object()])
def test_a_principal_without_a_stable_name_is_refused(method: str, principal: Any) -> None:
    asker = CachingClient(principal=principal)
    for use in (lambda: asker.get(method), lambda: asker.store(method, PUBLIC)):
        with pytest.raises(UsageError, match="principal must be a str or None, got "):
            use()
    assert len(asker.cache) == 0


def test_a_private_result_is_preferred_to_a_public_one_and_replaces_it() -> None:
    ann = CachingClient()
    bob = CachingClient(ann.cache, "bob")
    bob.store("tools/list", {**RESULT, "tools": ["bob's"]})
    ann.store("tools/list", {**PUBLIC, "ttlMs": 9000})
    assert bob.get("tools/list") == {**RESULT, "tools": ["bob's"]}
    bob.now += 1  # his private result has expired, the public one has not
    assert bob.get("tools/list") == {**PUBLIC, "ttlMs": 9000}
    # The new result is private, so the public one is removed.
    ann.store("tools/list", RESULT)
    assert bob.get("tools/list") is None
    assert ann.get("tools/list") == RESULT


# Notifications that remove results

CHANGES = {
    "notifications/tools/list_changed": {"tools/list"},
    "notifications/prompts/list_changed": {"prompts/list"},
    "notifications/resources/list_changed": {"resources/list", "resources/templates/list"},
    "notifications/resources/updated": {"resources/read"},
}


def fill(cache: ResponseCache) -> dict[str, list[tuple[CachingClient, dict[str, Any]]]]:
    """Store results for two principals: a first page that is private, and a second page that is public."""
    held: dict[str, list[tuple[CachingClient, dict[str, Any]]]] = {}
    for (method, params), page, principal in product(REQUESTS, [{}, {"cursor": "2"}], ["ann", "bob"]):
        asker = CachingClient(cache, principal)
        asker.store(method, PUBLIC if page else RESULT, **params, **page)
        held.setdefault(method, []).append((asker, {**params, **page}))
    return held


@req("cache-19")
@pytest.mark.parametrize("notification", [*LATEST.notifications[Role.SERVER], "notifications/unknown"])
def test_a_notification_removes_only_the_results_of_its_subject(ann: CachingClient, notification: str) -> None:
    held = fill(ann.cache)
    ann.cache.changed(notification, {"uri": "file:///a"})
    for method, requests in held.items():
        gone = method in CHANGES.get(notification, ())
        assert [asker.get(method, **params) is None for asker, params in requests] == [gone] * 4, method


@req("cache-19")
@pytest.mark.parametrize(
    ("updated", "left"),
    [
        ("file:///a", {"file:///a/b", "file:///ab", "db://x"}),
        ("file:///a/b", {"file:///ab", "db://x"}),  # a sub-resource: the folder above it has changed as well
        ("file:///a/b/c#d", {"file:///ab", "db://x"}),
        ("file:///a?q", {"file:///a/b", "file:///ab", "db://x"}),
        ("file:///a#f", {"file:///a/b", "file:///ab", "db://x"}),
        ("file:///c", {"file:///a", "file:///a/b", "file:///ab", "db://x"}),
        ("db://x/row/5", {"file:///", "file:///a", "file:///a/b", "file:///ab"}),
        ("file:", {"file:///", "file:///a", "file:///a/b", "file:///ab", "db://x"}),
        ("", {"file:///", "file:///a", "file:///a/b", "file:///ab", "db://x"}),
        (None, set()),
        (5, set()),
        (["file:///a"], set()),
    ],
)
def test_an_update_removes_the_contents_of_that_resource(ann: CachingClient, updated: Any, left: set[str]) -> None:
    uris = ["file:///", "file:///a", "file:///a/b", "file:///ab", "db://x"]
    for uri in uris:
        ann.store("resources/read", RESULT, uri=uri)
    ann.cache.changed("notifications/resources/updated", {"uri": updated})
    assert {uri for uri in uris if ann.get("resources/read", uri=uri)} == left


def test_an_update_without_a_uri_removes_the_contents_of_all_resources(ann: CachingClient) -> None:
    ann.store("resources/read", RESULT, uri="a")
    ann.store("resources/list", RESULT)
    ann.cache.changed("notifications/resources/updated", {})
    assert ann.get("resources/read", uri="a") is None
    assert ann.get("resources/list") == RESULT


@req("cache-22")
@pytest.mark.parametrize("method", LISTS)
def test_a_cursor_that_became_invalid_drops_all_pages_of_its_list(ann: CachingClient, method: str) -> None:
    held = fill(ann.cache)
    ann.cache.forget(method)
    for each, requests in held.items():
        assert [asker.get(each, **params) is None for asker, params in requests] == [each == method] * 4


@req("cache-19")
@pytest.mark.parametrize("notification", CHANGES)
def test_a_result_requested_before_a_change_is_not_kept(ann: CachingClient, notification: str) -> None:
    for method, params in REQUESTS:
        asked = ann.cache.changes
        ann.cache.changed(notification, params)
        kept = ann.cache.store(method, params, RESULT, asked=asked, now=ann.now, principal="ann")
        assert kept is (method not in CHANGES[notification])
        assert ann.store(method, RESULT, **params)  # requested after the change


def test_a_change_before_the_request_does_not_matter(ann: CachingClient) -> None:
    ann.cache.changed("notifications/tools/list_changed", {})
    asked = ann.cache.changes
    ann.cache.changed("notifications/prompts/list_changed", {})
    assert ann.cache.store("tools/list", {}, RESULT, asked=asked, now=0, principal=None)
    assert not ann.cache.store("prompts/list", {}, RESULT, asked=asked, now=0, principal=None)


def test_other_notifications_do_not_count_as_changes(ann: CachingClient) -> None:
    ann.cache.changed("notifications/message", {"level": "info"})
    assert ann.cache.changes == 0


# Bounds and isolation


def test_beyond_the_number_of_entries_the_least_recently_used_is_removed() -> None:
    ann = CachingClient(ResponseCache(LATEST, max_entries=3))
    for cursor in "abc":
        ann.store("tools/list", RESULT, cursor=cursor)
    assert ann.get("tools/list", cursor="a")
    ann.store("tools/list", RESULT, cursor="b")
    ann.store("tools/list", RESULT, cursor="d")
    assert [cursor for cursor in "abcd" if ann.get("tools/list", cursor=cursor)] == ["a", "b", "d"]
    assert len(ann.cache) == 3


def test_beyond_the_number_of_bytes_the_least_recently_used_is_removed() -> None:
    ann = CachingClient()
    ann.store("tools/list", {**RESULT, "tools": ["x" * 1000]}, cursor="0")
    one = ann.cache.size
    ann = CachingClient(ResponseCache(LATEST, max_bytes=3 * one))
    for cursor in "012":
        ann.store("tools/list", {**RESULT, "tools": ["x" * 1000]}, cursor=cursor)
    assert (len(ann.cache), ann.cache.size) == (3, 3 * one)
    ann.store("tools/list", {**RESULT, "tools": ["x" * 1001]}, cursor="3")
    assert [cursor for cursor in "0123" if ann.get("tools/list", cursor=cursor)] == ["2", "3"]
    assert ann.cache.size == 2 * one + 1


def test_the_size_of_the_params_counts_and_the_limit_is_exact() -> None:
    ann = CachingClient()
    ann.store("resources/read", RESULT, uri="x")
    ann.store("resources/read", RESULT, uri="y" * 1001)
    size = ann.cache.size
    ann.cache.forget("resources/read", "y" * 1001)
    assert size - ann.cache.size == ann.cache.size + 1000
    exact = CachingClient(ResponseCache(LATEST, max_bytes=ann.cache.size))
    assert exact.store("resources/read", RESULT, uri="x")
    assert not exact.store("resources/read", RESULT, uri="xy")


def test_a_result_larger_than_the_cache_removes_only_its_predecessor() -> None:
    ann = CachingClient(ResponseCache(LATEST, max_bytes=1000))
    ann.store("tools/list", RESULT)
    ann.store("prompts/list", RESULT)
    assert not ann.store("tools/list", {**RESULT, "tools": ["x" * 1000]})
    assert ann.get("tools/list") is None
    assert ann.get("prompts/list") == RESULT


def test_the_largest_message_fits_into_the_default_cache() -> None:
    assert 2 * Limits().message_bytes <= MAX_BYTES
    assert MAX_ENTRIES >= 1000


def test_changes_of_a_result_do_not_reach_the_cache(ann: CachingClient) -> None:
    result = {**RESULT, "tools": [{"name": "a"}]}
    ann.store("tools/list", result)
    result["tools"][0]["name"] = "changed after it was stored"  # type: ignore[index]
    first = ann.get("tools/list")
    assert first == {**RESULT, "tools": [{"name": "a"}]}
    first["tools"].clear()
    assert ann.get("tools/list") == {**RESULT, "tools": [{"name": "a"}]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_result_is_returned_unchanged(members: dict[str, Any]) -> None:
    ann = CachingClient()
    result = {**members, "half a pair": "\ud800", "resultType": "complete", "ttlMs": 1}
    assert ann.store("tools/list", result)
    found = ann.get("tools/list")
    assert found == result
    assert json.dumps(found) == json.dumps(result)  # the same types (1 is neither 1.0 nor true) and the same order


@given(
    st.fixed_dictionaries({}, optional={"resultType": JSON, "ttlMs": JSON, "cacheScope": JSON, "tools": JSON}),
    st.fixed_dictionaries({}, optional={"uri": JSON}),
)
def test_any_hints_and_any_notification_are_accepted(result: dict[str, Any], notice: dict[str, Any]) -> None:
    ann = CachingClient()
    assert ann.store("resources/read", result, uri="a") is (ann.get("resources/read", uri="a") is not None)
    ann.cache.changed("notifications/resources/updated", notice)


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["get", "store", "change", "wait"]),
            st.sampled_from(["tools/list", "prompts/list"]),
            st.sampled_from(["1", "2"]),
            st.sampled_from(["ann", "bob"]),
            st.sampled_from(["private", "public"]),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_the_cache_agrees_with_a_plain_list_of_the_results(moves: list[tuple[Any, ...]]) -> None:
    cache, held, now = ResponseCache(LATEST), [], 0.0
    for move, method, cursor, principal, scope, seconds in moves:
        asker = CachingClient(cache, principal)
        asker.now = now
        if move == "wait":
            now += seconds
        elif move == "change":
            cache.changed(f"notifications/{method[:-5]}/list_changed", {})
            held = [each for each in held if each[0] != method]
        elif move == "store":
            result = {"ttlMs": 1000 * seconds, "cacheScope": scope, "number": len(held)}
            asker.store(method, result, cursor=cursor)
            may_see = (principal, "public")
            held = [each for each in held if each[:2] != (method, cursor) or each[2] not in may_see]
            held.append((method, cursor, "public" if scope == "public" else principal, now + seconds, result))
        else:
            mine = [e for e in held if e[:3] == (method, cursor, principal) and now < e[3]]
            anyone = [e for e in held if e[:3] == (method, cursor, "public") and now < e[3]]
            expected = next((each[4] for each in mine + anyone), None)
            assert asker.get(method, cursor=cursor) == expected


# The hints of a server


@req("cache-24")
def test_hints_are_private_and_stale_by_default() -> None:
    assert CacheHints().members() == {"ttlMs": 0, "cacheScope": "private"}
    assert CacheHints(ttl_ms=5).members() == {"ttlMs": 5, "cacheScope": "private"}
    assert CacheHints(scope="public").members() == {"ttlMs": 0, "cacheScope": "public"}


@req("cache-09")
@pytest.mark.parametrize("ttl_ms", [-1, 1.0, 0.5, True, None, "5", math.inf])
def test_a_ttl_must_be_an_integer_of_zero_or_more(ttl_ms: Any) -> None:
    with pytest.raises(UsageError, match="a whole number of milliseconds, 0 or more, got "):
        CacheHints(ttl_ms)
    with pytest.raises(UsageError):
        CacheHints().page(ttl_ms)


@pytest.mark.parametrize("scope", ["Public", "", "shared", None, True, ["public"]])
def test_a_scope_must_be_private_or_public(scope: Any) -> None:
    with pytest.raises(UsageError, match="scope must be 'private' or 'public', got "):
        CacheHints(scope=scope)


@req("cache-20", "cache-23")
@pytest.mark.parametrize("scope", ["private", "public"])
def test_pages_may_differ_in_ttl_but_not_in_scope(scope: Any, shared_schemas: Path) -> None:
    whole = CacheHints(60_000, scope)
    pages = [{"resultType": "complete", **whole.page(ttl_ms).members()} for ttl_ms in (0, 1, 10**9)]
    assert [page["ttlMs"] for page in pages] == [0, 1, 10**9]
    assert {page["cacheScope"] for page in pages} == {scope}
    schema = json.loads((shared_schemas / "schema" / "2026-07-28.json").read_text("utf-8"))
    for page in pages:
        jsonschema_rs.validator_for({**schema, "$ref": "#/$defs/CacheableResult"}).validate(page)


def test_only_the_modern_revisions_cache() -> None:
    assert not any(revision.cacheable for revision in LEGACY)
    assert all(revision.cacheable == {method for method, _ in REQUESTS} for revision in MODERN)
