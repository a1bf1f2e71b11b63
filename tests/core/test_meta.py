"""The keys of `_meta` and of `extensions`: their grammar, the reserved prefixes, and the formats of the W3C."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    REVISIONS,
    Limits,
    Request,
    Revision,
    UsageError,
    check_extension,
    check_key,
    check_meta,
    decode,
    encode,
    revisions,
)

EVERY = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
WITHOUT_RULES = {"2024-11-05", "2025-03-26"}


def refuses(key: str, revision: Revision, value: Any = 1) -> bool:
    try:
        check_meta({"fine": 1, key: value}, revision)
    except UsageError as error:
        return key in str(error)  # the error names the key
    return False


# The grammar.

GOOD_PREFIXES = ["", "a/", "com.example/", "A1.b-c.D/", "x--y/", "com.example.deep.er/"]
BAD_PREFIXES = [
    "/",
    "./",
    "a./",
    ".a/",
    "a..b/",
    "1a/",
    "-a/",
    "a-/",
    "a.b-/",
    "a_b/",
    "ä/",
    "a b/",
    "a//",
    "a/b/",
    "a\n/",
]
GOOD_NAMES = ["", "a", "0", "aB9", "a-b", "a_b", "a.b", "a..--__b", "name-1.0"]
BAD_NAMES = ["-a", "a-", "_a", "a_", ".a", "a.", "-", ".", "a b", "ä", "a:b", "a\n", "\n", "a\0b"]


@req("meta-02", "meta-03", "meta-04")
@pytest.mark.parametrize("name", GOOD_NAMES)
@pytest.mark.parametrize("prefix", GOOD_PREFIXES)
def test_a_key_is_an_optional_prefix_of_labels_and_a_name(prefix: str, name: str) -> None:
    assert check_key(prefix + name) == (prefix.removesuffix("/").split(".") if prefix else [])
    for revision in REVISIONS.values():
        assert not refuses(prefix + name, revision)


@req("meta-02", "meta-03")
@pytest.mark.parametrize("prefix", BAD_PREFIXES)
def test_a_prefix_that_is_not_a_series_of_labels_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="prefix"):
        check_key(prefix + "name")


@req("meta-04")
@pytest.mark.parametrize("prefix", GOOD_PREFIXES)
@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_malformed_name_is_refused(prefix: str, name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(prefix + name))):
        check_key(prefix + name)


@req("meta-02", "meta-03", "meta-04")
@EVERY
def test_malformed_keys_are_refused_in_the_revisions_that_have_rules(revision: Revision) -> None:
    for key in ("/a", "1a/b", "a/b/c", "a/-", "a b"):
        with nullcontext() if revision.name in WITHOUT_RULES else pytest.raises(UsageError):
            check_meta({key: 1}, revision)


label = st.from_regex(r"\A[A-Za-z]([A-Za-z0-9-]{0,6}[A-Za-z0-9])?\Z")
name = st.from_regex(r"\A([A-Za-z0-9]([A-Za-z0-9._-]{0,6}[A-Za-z0-9])?)?\Z")


@req("meta-02", "meta-03", "meta-04")
@given(st.lists(label, min_size=1, max_size=4), name)
@settings(max_examples=80)
def test_each_key_of_the_grammar_is_accepted_and_its_labels_are_returned(labels: list[str], name: str) -> None:
    assert check_key(f"{'.'.join(labels)}/{name}") == labels


@given(st.text(max_size=20) | st.text("aB1-_./ ", max_size=10))
@settings(max_examples=200)
def test_any_text_is_accepted_or_is_a_usage_error(key: str) -> None:
    whole = r"([A-Za-z]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z]([A-Za-z0-9-]*[A-Za-z0-9])?)*/)?"
    whole += r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?"
    if re.fullmatch(whole, key):
        check_key(key)
    else:
        with pytest.raises(UsageError):
            check_key(key)


# Reserved keys.

# The prefix, and the revisions that reserve it.
OLD, NEW = {"2025-06-18"}, {"2025-11-25", "2026-07-28"}
RESERVED = [
    ("modelcontextprotocol.io", OLD),
    ("mcp.dev", OLD),
    ("api.modelcontextprotocol.org", OLD | NEW),
    ("tools.mcp.com", OLD | NEW),
    ("a.b.mcp.c", OLD),
    ("mcp.a.b.c", OLD),
    ("io.modelcontextprotocol", NEW),
    ("dev.mcp", NEW),
    ("org.modelcontextprotocol.api", OLD | NEW),
    ("com.mcp.tools", OLD | NEW),
    ("com.example.mcp", set()),
    ("mcp", set()),
    ("modelcontextprotocol", set()),
    ("com.mcps", set()),
    ("com.mcp-tools.x", set()),
    ("com.example", set()),
]


@req("meta-05", "meta-06")
@EVERY
@pytest.mark.parametrize(("prefix", "where"), RESERVED, ids=[prefix for prefix, _ in RESERVED])
def test_a_reserved_prefix_is_refused_in_the_revisions_that_reserve_it(
    prefix: str, where: set[str], revision: Revision
) -> None:
    for name in ("", "x", "x.y-z"):
        assert refuses(f"{prefix}/{name}", revision) == (revision.name in where)


@req("meta-06")
@pytest.mark.parametrize("key", [getattr(revisions, name) for name in dir(revisions) if name.startswith("META_")])
def test_keys_of_the_protocol_are_refused(key: str) -> None:
    assert refuses(key, revisions.LATEST)


@req("meta-07")
@EVERY
def test_a_prefix_in_reverse_dns_order_is_accepted_and_advised(revision: Revision) -> None:
    check_meta({"com.example/key": 1, "org.example.tools/": None}, revision)
    if revision.name not in WITHOUT_RULES:
        with pytest.raises(UsageError, match=rf"com\.mcp\.dev.*{revision}.*com\.example/"):
            check_meta({"com.mcp.dev/key": 1}, revision)


@EVERY
def test_the_progress_token_is_refused(revision: Revision) -> None:
    with pytest.raises(UsageError, match="progressToken"):
        check_meta({"progressToken": 1}, revision)


@EVERY
def test_the_values_of_other_keys_are_not_checked(revision: Revision) -> None:
    check_meta({"a": None, "com.example/b": [{"progressToken": 1}], "c": {"dev.mcp/": 1}}, revision)
    check_meta({}, revision)


@req("meta-01", "meta-09")
@pytest.mark.parametrize("value", [None, True, 1.5, "", "not a traceparent", [1], {"a": {"b": None}}])
@pytest.mark.parametrize("key", ["dev.mcp/new", "io.modelcontextprotocol/unknown", "traceparent", "baggage", "-bad-"])
def test_any_meta_of_the_peer_is_accepted_and_passed_on(key: str, value: Any) -> None:
    data = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "m", "params": {"_meta": {key: value}}})
    message = decode(data.encode(), Limits())
    assert message == Request(1, "m", {"_meta": {key: value}})
    assert isinstance(message, Request)
    assert json.loads(encode(message)) == json.loads(data)


# The formats of the W3C.

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = {
    "traceparent": [
        f"00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-ff",
        f"cc-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-what-comes-later",
    ],
    "tracestate": [
        "",
        "rojo=00f067aa0ba902b7",
        "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "rojo=1 , congo=2\t,,",
        "fw529a3039@dt=FfAAAAAB",
        "0tenant@system=x",
        "a_-*/b= inner space",
        ",".join(f"k{n}=v" for n in range(32)),
        "a" * 256 + "=" + "v" * 256,
    ],
    "baggage": [
        "key1=value1",
        "userId=alice,serverNode=DF%2028,isProduction=false",
        "key1=value1;property1;property2, key2 = value2, key3=value3; propertyKey=propertyValue",
        "empty=",
        "k==a=b",
        "k=v;p= ; q",
        ",".join(f"k{n}=v" for n in range(180)),
    ],
}


@req("meta-08", "meta-09")
@EVERY
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GOOD.items() for value in values])
def test_trace_context_in_the_w3c_formats_may_be_set(key: str, value: str, revision: Revision) -> None:
    assert not refuses(key, revision, value)


# Extensions.


@req("ver-05")
@pytest.mark.parametrize("identifier", ["io.modelcontextprotocol/tasks", "com.example/x", "example/x", "com.example/"])
def test_an_extension_is_named_by_a_key_with_a_prefix(identifier: str) -> None:
    check_extension(identifier)


@req("ver-05")
@pytest.mark.parametrize("identifier", ["", "tasks", "traceparent", "/tasks", "1a/tasks", "com.example/-x", "a/b/c"])
def test_an_extension_without_a_prefix_or_with_a_malformed_one_is_refused(identifier: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(identifier))):
        check_extension(identifier)
