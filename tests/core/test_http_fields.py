"""Header values: reading them, and mirroring parts of a message into them."""

from __future__ import annotations

import string
import tracemalloc
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import Notification, Request, UsageError
from trio_mcp.core.http import (
    NAMED_BY,
    AllowList,
    Fields,
    Headers,
    Mirror,
    cors_headers,
    decode_value,
    encode_value,
    find_mirrors,
    is_json,
    is_session_id,
    media_type,
    mirror_fault,
    mirrored,
    preflight_headers,
    quality,
    reply_headers,
    standard_fault,
    standard_headers,
    without_credentials,
)

SAFE = 2**53 - 1


# Headers.


@req("http-100")
@given(st.sampled_from(["mcp-name", "MCP-NAME", "Mcp-Name"]), st.sampled_from(["mcp-name", "MCP-NAME", "mCP-nAME"]))
def test_names_are_found_in_any_case_and_values_keep_theirs(sent: str, asked: str) -> None:
    headers = Headers([(sent, "VaLue")])
    assert headers[asked] == headers.get(asked) == "VaLue"
    assert asked in headers
    assert list(headers) == ["mcp-name"]
    assert len(headers) == 1


def test_a_mapping_reads_like_its_pairs() -> None:
    headers = Headers({"Host": "a", "X": "1"})
    assert headers == Headers([("Host", "a"), ("X", "1")])
    assert Headers(headers) == headers


def test_bytes_and_strings_are_equal_and_outer_spaces_do_not_count() -> None:
    assert Headers([(b"A", b" \t1 ")]) == Headers([("a", "1")])
    assert Headers([(b"A", b"\xe4")])["a"] == "ä"


def test_repeated_fields_are_one_list_unless_they_agree() -> None:
    headers = Headers([("Accept", "text/html"), ("accept", "*/*"), ("X", "1"), ("x", "1")])
    assert headers["Accept"] == "text/html, */*"
    assert headers["X"] == "1"
    assert headers.get("Y") is None


def test_values_are_not_shown() -> None:
    assert repr(Headers([("Authorization", "Bearer hunter2"), ("Host", "h")])) == "<Headers authorization, host>"


def test_headers_cannot_be_changed() -> None:
    """Requests with equal heads share them."""
    headers = Headers({"Host": "h"})
    with pytest.raises(TypeError):
        headers.by_name["host"] = "evil"  # type: ignore[index]
    with pytest.raises(AttributeError, match="cannot be changed"):
        headers.by_name = {}
    assert dict(Headers.of({"a": "b"})) == {"a": "b"}


def test_a_header_can_be_left_out_of_a_copy() -> None:
    headers = Headers([("Authorization", "Bearer hunter2"), ("Host", "h")])
    assert dict(headers.without("AUTHORIZATION")) == {"host": "h"}
    assert dict(headers.without("Cookie")) == dict(headers)


# Accept and Content-Type.


def test_the_most_specific_range_decides() -> None:
    accept = "*/*;q=0.1, application/*;q=0.5, application/json;q=0.7, text/event-stream;q=0"
    assert quality(accept, "application/json") == 0.7
    assert quality(accept, "application/xml") == 0.5
    assert quality(accept, "text/html") == 0.1
    assert quality(accept, "text/event-stream") == 0


@given(st.text(max_size=30))
def test_any_accept_gives_a_weight(accept: str) -> None:
    assert 0 <= quality(accept, "application/json") <= 1


def test_a_media_type_comes_with_its_parameters() -> None:
    assert media_type('Text/HTML; Charset="UTF-8"; x') == ("text/html", {"charset": "utf-8", "x": ""})
    assert media_type("") == ("", {})


@pytest.mark.parametrize("weight", ["high", "2", "1.5", "-1", ""])
def test_an_invalid_weight_counts_as_one(weight: str) -> None:
    assert quality(f"application/json;q={weight}", "application/json") == 1


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("application/json", True),
        ("application/json; charset=utf8", True),
        ("application/json; profile=x", True),
        ("application/json; charset=utf-16", False),
        ("application/jsonp", False),
        (None, False),
    ],
)
def test_json_is_utf_8(value: str | None, good: bool) -> None:
    assert is_json(value) is good


# Origin and Host.


def test_a_port_matters_for_an_origin_and_for_a_host_only_if_listed() -> None:
    origins = AllowList("allowed_origins", ["https://a.example", "http://[::1]:*", "app://x:1"], schemes=True)
    assert origins.allows("https://a.example:443")
    assert origins.allows("HTTPS://A.EXAMPLE")
    assert origins.allows("http://[::1]:99")
    assert origins.allows("app://x:1")
    for other in (
        "http://a.example",
        "https://a.example:444",
        "app://x",
        "app://x:2",
        "a.example",
        "https://a.example/",
        "*",
    ):
        assert not origins.allows(other), other
    hosts = AllowList("allowed_hosts", ["a.example", "b.example:81", "c.example:*"], schemes=False)
    for host in ("a.example", "a.example:1", "b.example:81", "c.example", "c.example:2"):
        assert hosts.allows(host), host
    for host in ("b.example", "b.example:82", "d.example", "http://a.example", "a.example:123456"):
        assert not hosts.allows(host), host


@given(st.text(max_size=20))
def test_only_listed_values_are_allowed(text: str) -> None:
    assert not AllowList("x", [], schemes=True).allows(text)
    assert AllowList("x", ["*"], schemes=False).allows(text)


@pytest.mark.parametrize(
    ("patterns", "schemes"),
    [
        (["a.example"], True),
        (["http://a.example"], False),
        (["http://a.example/"], True),
        ([""], False),
        ("a.example", False),
    ],
)
def test_the_error_of_an_invalid_pattern_names_the_setting(patterns: list[str], schemes: bool) -> None:
    with pytest.raises(UsageError, match="the_setting"):
        AllowList("the_setting", patterns, schemes=schemes)


# Headers of a reply.


def test_a_page_may_read_all_headers_and_send_the_requested_ones() -> None:
    for name, value in cors_headers("https://a.example")[2:]:
        assert name == "Access-Control-Expose-Headers"
        assert {"Mcp-Session-Id", "Retry-After"} <= set(value.split(", "))
    allowed = Headers(preflight_headers("mcp-param-x, x-key,bad name, ", "POST"))["Access-Control-Allow-Headers"]
    assert allowed.endswith(", mcp-param-x, x-key")


def test_a_reply_has_the_headers_of_its_kind() -> None:
    assert Headers(reply_headers((), stream=True))["Content-Type"] == "text/event-stream"
    assert Headers(reply_headers((("A", "b"),), stream=False)) == Headers(
        [("Content-Type", "application/json"), ("Cache-Control", "no-store"), ("A", "b")]
    )
    assert Headers(reply_headers((), stream=False, session="s"))["Mcp-Session-Id"] == "s"


# Values.

EXAMPLES = [
    ("us-west1", "us-west1"),
    ("", ""),
    ("inner space", "inner space"),
    ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
    (" padded ", "=?base64?IHBhZGRlZCA=?="),
    ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
    ("tab\tinside", "=?base64?dGFiCWluc2lkZQ==?="),
    ("nul\0", "=?base64?bnVsAA==?="),
    ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
    ("=?base64?=", "=?base64?PT9iYXNlNjQ/PQ==?="),
    ("=?base64?no end", "=?base64?no end"),
    ("=?BASE64?x?=", "=?BASE64?x?="),
]


@req("http-76", "http-89", "http-90", "http-92")
@pytest.mark.parametrize(("value", "encoded"), EXAMPLES)
def test_a_value_that_is_not_plain_is_marked_and_encoded(value: str, encoded: str) -> None:
    assert encode_value(value) == encoded
    assert decode_value(encoded) == value


@req("http-76", "http-89", "http-91", "http-92")
@given(st.text() | st.text(alphabet="=?base64 ", max_size=24))
def test_any_text_can_be_encoded_and_decoded(value: str) -> None:
    encoded = encode_value(value)
    assert all(" " <= each <= "~" for each in encoded)
    assert encoded == encoded.strip()
    assert decode_value(encoded) == value


@req("http-95")
@pytest.mark.parametrize(
    "value",
    [
        "\xe4",
        "a\nb",
        "a\x7f",
        "=?base64?SGVsbG8?=",
        "=?base64?SGVs!!!bG8=?=",
        "=?base64?/w==?=",
        "=?base64?====?=",
        "=?base64? ?=",
    ],
)
def test_malformed_values_are_not_decoded(value: str) -> None:
    assert decode_value(value) is None


def test_an_empty_value_may_be_encoded_too() -> None:
    assert decode_value("=?base64??=") == ""
    assert decode_value("=?base64?=") == "=?base64?="  # the two markers would overlap
    assert decode_value("a\tb") == "a\tb"


@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=30))
def test_decoding_any_header_never_fails(value: str) -> None:
    assert decode_value(value) is None or isinstance(decode_value(value), str)
    assert decode_value(f"=?base64?{value}?=") != value or value == ""


def test_encoding_half_a_surrogate_pair_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        encode_value("\ud800")


@req("http-54")
def test_a_session_id_is_visible_ascii() -> None:
    assert is_session_id("!az~")
    for bad in ("", " ", "a b", "ä", "a\x7f", "a\n"):
        assert not is_session_id(bad)


# Standard headers.


@req("http-74", "http-75", "draft-06", "xtask-40")
@pytest.mark.parametrize(("method", "source"), NAMED_BY.items())
def test_method_and_name_repeat_the_body(method: str, source: str) -> None:
    message = Request(1, method, {source: "größe"})
    fields = standard_headers(message)
    assert fields == (("Mcp-Method", method), ("Mcp-Name", "=?base64?Z3LDtsOfZQ==?="))
    assert standard_fault(Headers(fields), message, required=True) is None


def test_a_name_may_be_missing_where_only_an_intermediary_needs_it() -> None:
    fields = Headers([("Mcp-Method", "tasks/get")])
    assert standard_fault(fields, Request(1, "tasks/get", {"taskId": "x"}), required=True) is None


def test_other_messages_have_a_method_only() -> None:
    for message in (Request(1, "tools/list", {"": "x", "name": "y"}), Notification("notifications/cancelled")):
        fields = standard_headers(message)
        assert fields == (("Mcp-Method", message.method),)
        assert standard_fault(Headers(fields), message, required=True) is None
    assert standard_headers(Request(1, "tools/call", {"name": 7})) == (("Mcp-Method", "tools/call"),)


@req("http-91", "http-96", "http-102")
@pytest.mark.parametrize(
    ("fields", "params", "why"),
    [
        ({"Mcp-Name": "x"}, {"name": "x"}, "Mcp-Method header is missing"),
        ({"Mcp-Method": "tools/list", "Mcp-Name": "x"}, {"name": "x"}, "Mcp-Method header says 'tools/list'"),
        ({"Mcp-Method": "tools/call"}, {"name": "x"}, "Mcp-Name header is missing"),
        ({"Mcp-Method": "tools/call", "Mcp-Name": "=?base64?!?="}, {"name": "x"}, "malformed"),
        ({"Mcp-Method": "tools/call", "Mcp-Name": "y"}, {"name": "x"}, "says 'y', params.name is 'x'"),
        ({"Mcp-Method": "tools/call", "Mcp-Name": "=?base64?eA==?="}, {"name": "x"}, None),
        ({"Mcp-Method": "tools/call"}, {}, None),
        ({"Mcp-Method": "tools/call", "Mcp-Name": "7"}, {"name": 7}, "params.name is 7"),
    ],
)
def test_a_standard_header_that_does_not_repeat_the_body_is_a_fault(
    fields: dict[str, str], params: dict[str, Any], why: str | None
) -> None:
    fault = standard_fault(Headers(fields.items()), Request(1, "tools/call", params), required=True)
    assert (why is None and fault is None) or (why is not None and fault is not None and why in fault)


def test_standard_headers_may_be_missing_where_they_are_not_required() -> None:
    message = Request(1, "tools/call", {"name": "x"})
    assert standard_fault(Headers(), message, required=False) is None
    assert standard_fault(Headers([("Mcp-Name", "y")]), message, required=False) is not None


def test_long_names_are_cut_in_messages() -> None:
    fault = standard_fault(Headers([("Mcp-Method", "x" * 9999)]), Request(1, "m"), required=True)
    assert fault is not None
    assert len(fault) < 400


# x-mcp-header.


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def marked(name: object = "X", type: object = "string", **more: Any) -> dict[str, Any]:
    return {"type": type, "x-mcp-header": name, **more}


@req("http-77", "http-78", "http-84")
def test_rules_are_found_along_properties() -> None:
    found = find_mirrors(
        schema(
            region=marked("Region"),
            plain={"type": "string"},
            count=marked("COUNT", "integer"),
            deep=schema(deeper=schema(flag=marked("Flag", "boolean"))),
        )
    )
    assert found.faults == ()
    assert found.rules == (
        Mirror("Mcp-Param-Region", ("region",)),
        Mirror("Mcp-Param-COUNT", ("count",)),
        Mirror("Mcp-Param-Flag", ("deep", "deeper", "flag")),
    )


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        *(
            pytest.param(schema(a=marked(name)), "token", marks=req("http-79", "http-80"))
            for name in ("", "a b", "a:b", "a\r\nb", "ä", "a\x00", "a/b", 7, None, True, ["X"])
        ),
        *(
            pytest.param(schema(a=marked(type=kind)), "mirrored", marks=req("http-82"))
            for kind in ("number", "object", "array", "null", ["string", "null"], None)
        ),
        pytest.param(schema(a=marked("X"), b=marked("x")), "twice", marks=req("http-81")),
        pytest.param(schema(a=marked("X"), b=schema(c=marked("X"))), "twice", marks=req("http-81")),
        *(
            pytest.param(bad, "properties", marks=req("http-84"))
            for bad in [
                marked(),
                schema(a={"type": "array", "items": marked()}),
                schema(a={"type": "array", "items": schema(b=marked())}),
                schema(a={"prefixItems": [{}, marked()]}),
                {**schema(), "oneOf": [schema(a=marked())]},
                {**schema(), "anyOf": [schema(a=marked())]},
                {**schema(), "allOf": [schema(a=marked())]},
                {**schema(), "not": schema(a=marked())},
                {**schema(), "if": schema(a=marked())},
                {**schema(), "then": schema(a=marked())},
                {**schema(), "else": schema(a=marked())},
                {**schema(a={"$ref": "#/$defs/a"}), "$defs": {"a": marked()}},
                {**schema(), "definitions": {"a": schema(b=marked())}},
                {**schema(), "additionalProperties": marked()},
                {**schema(), "patternProperties": {".*": marked()}},
                {**schema(), "dependentSchemas": {"a": schema(b=marked())}},
                {**schema(), "unheardOf": {"a": marked()}},
            ]
        ),
    ],
)
def test_the_fault_of_a_schema_says_which_rule_it_breaks(bad: dict[str, Any], why: str) -> None:
    found = find_mirrors(bad)
    assert len(found.faults) == 1
    assert why in found.faults[0]


def test_each_fault_is_found_with_its_path() -> None:
    found = find_mirrors({**schema(a=marked(""), b={"items": [marked()]}, c=marked("Good")), "x-mcp-header": "R"})
    assert [each.split(":")[0] for each in found.faults] == [
        "x-mcp-header at the root",
        "x-mcp-header at /properties/a",
        "x-mcp-header at /properties/b/items/0",
    ]
    assert [each.header for each in found.rules] == ["Mcp-Param-Good"]


def test_data_and_property_names_are_not_annotations() -> None:
    data = {"x-mcp-header": "Nope"}
    fine = schema(
        **{"x-mcp-header": {"type": "string"}},
        a={"type": "object", "default": data, "const": data, "examples": [data], "enum": [data]},
        b=True,
    )
    assert find_mirrors({**fine, "required": ["a"], "$defs": [], "properties ": 7}) == find_mirrors(schema())
    assert find_mirrors({"type": "object", "properties": 7}).faults == ()
    assert find_mirrors({**schema(), "$defs": {"x-mcp-header": {"type": "string"}}}).faults == ()


def test_a_deep_schema_needs_no_deep_stack() -> None:
    deep: dict[str, Any] = marked()
    for _ in range(2000):
        deep = {"not": deep}
    (fault,) = find_mirrors(deep).faults
    assert fault.startswith(f"x-mcp-header at .../{'/'.join(['not'] * 20)}: ")


def test_a_schema_may_be_any_mapping() -> None:
    frozen = MappingProxyType({**schema(), "properties": MappingProxyType({"a": MappingProxyType(marked("Good"))})})
    assert find_mirrors(frozen).rules == (Mirror("Mcp-Param-Good", ("a",)),)
    assert len(find_mirrors({"allOf": (MappingProxyType(marked()),)}).faults) == 1


def test_long_names_are_cut_and_the_list_of_faults_is_limited() -> None:
    found = find_mirrors(schema(**{f"{n}{'x' * 1000}": marked("") for n in range(21)}))
    assert len(found.faults) == 21
    assert found.faults[-1] == "and more"
    assert max(map(len, found.faults)) < 200
    assert len(find_mirrors(schema(**{str(n): marked("") for n in range(20)})).faults) == 20


@pytest.mark.parametrize(
    "hostile",
    [
        schema(**{"x" * 100_000: schema(**{str(n): {"type": "string"} for n in range(2000)})}),
        schema(**{"x" * 100_000: {"allOf": [marked()] * 2000}}),
    ],
    ids=["good", "bad"],
)
def test_a_long_name_is_not_copied_into_the_paths_below_it(hostile: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        find_mirrors(hostile)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # two thousand copies would be 200 MB
    finally:
        tracemalloc.stop()


@req("http-80")
@given(
    st.text(max_size=5)
    | st.text(alphabet=string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1, max_size=9)
)
def test_a_name_is_valid_if_and_only_if_it_is_a_token(name: str) -> None:
    token = name != "" and all(each in string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~" for each in name)
    assert (find_mirrors(schema(a=marked(name))).faults == ()) is token


RULES = find_mirrors(
    schema(s=marked("S"), i=marked("I", "integer"), b=marked("B", "boolean"), o=schema(n=marked("N")))
).rules


@req("http-78", "http-88", "http-97")
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"s": "x y"}, {"S": "x y"}),
        ({"s": ""}, {"S": ""}),
        ({"s": " x"}, {"S": "=?base64?IHg=?="}),
        ({"i": 42}, {"I": "42"}),
        ({"i": -7}, {"I": "-7"}),
        ({"i": 42.0}, {"I": "42"}),
        ({"i": SAFE}, {"I": "9007199254740991"}),
        ({"i": -SAFE}, {"I": "-9007199254740991"}),
        ({"b": True}, {"B": "true"}),
        ({"b": False}, {"B": "false"}),
        ({"o": {"n": "x"}}, {"N": "x"}),
        ({"s": None, "i": None, "b": None, "o": None}, {}),
        ({"o": {}}, {}),
        ({"o": "x"}, {}),
        ({}, {}),
        ({"s": "a", "i": 1, "b": True, "o": {"n": "b"}, "q": 1}, {"S": "a", "I": "1", "B": "true", "N": "b"}),
    ],
)
def test_arguments_are_mirrored_into_headers_that_fit_them(arguments: dict[str, Any], fields: dict[str, str]) -> None:
    sent = mirrored(RULES, arguments)
    assert dict(sent) == {f"Mcp-Param-{name}": value for name, value in fields.items()}
    assert mirror_fault(RULES, Headers(sent), arguments) is None


@req("http-83", "http-88")
@pytest.mark.parametrize("value", [SAFE + 1, -SAFE - 1, 10**400, 1.5, float("inf"), float("nan"), [], {}])
def test_an_argument_that_no_header_can_hold_is_a_usage_error(value: object) -> None:
    with pytest.raises(UsageError, match=r"'i' goes into the header Mcp-Param-I"):
        mirrored(RULES, {"i": value})


VALUES = st.none() | st.text(max_size=8) | st.integers(-SAFE, SAFE) | st.booleans()


@req("http-91", "http-96", "http-98", "http-99", "http-101")
@given(
    st.fixed_dictionaries({"s": VALUES, "i": VALUES, "b": VALUES, "o": st.fixed_dictionaries({"n": VALUES})}),
    st.fixed_dictionaries({"s": VALUES, "i": VALUES, "b": VALUES, "o": st.fixed_dictionaries({"n": VALUES})}),
)
@settings(max_examples=60)
def test_headers_fit_only_their_own_arguments(one: dict[str, Any], other: dict[str, Any]) -> None:
    headers = Headers(mirrored(RULES, one))
    assert mirror_fault(RULES, headers, one) is None
    if mirrored(RULES, one) != mirrored(RULES, other):
        assert mirror_fault(RULES, headers, other) is not None


@pytest.mark.parametrize("text", ["\u0663", "\u00b3", "3 ", "+3", "3.5"])
def test_a_number_in_a_header_has_ascii_digits_only(text: str) -> None:
    assert mirror_fault(RULES, Headers([("Mcp-Param-I", encode_value(text))]), {"i": 3}) is not None


def test_headers_may_be_missing_where_they_are_not_required() -> None:
    assert mirror_fault(RULES, Headers(), {"s": "x"}, required=False) is None
    assert mirror_fault(RULES, Headers([("Mcp-Param-S", "y")]), {"s": "x"}, required=False) is not None
    assert mirror_fault(RULES, Headers(), {"s": "x"}) is not None


def test_mirrored_values_are_not_shown() -> None:
    for sent in ("hunter2", "=?base64?hunter2?="):
        fault = mirror_fault(RULES, Headers([("Mcp-Param-S", sent)]), {"s": "hunter3"})
        assert fault is not None
        assert "hunter" not in fault


# Results that are cached stay correct, and the cache stays small.


def test_a_cached_verdict_on_a_host_is_the_same_as_the_first() -> None:
    hosts = AllowList("allowed_hosts", ["example.com"], schemes=False)
    names = [f"{'x' * (number % 300)}{number}.example" for number in range(1000)]
    for _ in range(2):
        assert not any(map(hosts.allows, names))
        assert hosts.allows("example.com:80")
        assert not hosts.allows("example.org")


def test_the_cache_of_hosts_takes_little_memory() -> None:
    hosts = AllowList("allowed_hosts", ["example.com"], schemes=False)
    tracemalloc.start()
    try:
        for number in range(5000):
            hosts.allows(f"{number}.{'x' * 5000}")
            hosts.allows(f"{number}.example")
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_an_accept_header_of_any_length_is_read() -> None:
    long = ", ".join([f"text/x{number};q=0.{number % 10}" for number in range(60)])
    assert len(long) > 200
    for _ in range(2):
        assert quality(f"{long}, application/json;q=0.5", "application/json") == 0.5
        assert quality("application/json;q=0.5", "application/json") == 0.5
        assert quality(long, "application/json") == 0


@req("auth-22")
@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ((("Accept", "a.b.c"), ("authorization", "Bearer a.b.c")), b"no [secret] here"),
        ((("Authorization", "a.b.c"),), b"no [secret] here"),
        ((("X-Other", "a.b.c"), ("Authorization", "Bearer ")), b"no a.b.c here"),
        ((), b"no a.b.c here"),
    ],
)
def test_credentials_of_the_request_are_not_shown(sent: Fields, shown: bytes) -> None:
    assert without_credentials(b"no a.b.c here", sent) == shown
