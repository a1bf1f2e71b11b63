"""Validation with JSON schemas: all dialects, no external references, and limits for hostile schemas and values."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import UsageError
from trio_mcp.core.schema import (
    DEFAULT_DIALECT,
    DIALECTS,
    InvalidSchema,
    Problem,
    check_input_schema,
    compile_schema,
)

# The number of states decides whether a pattern is refused, and has no public name.
from trio_mcp.core.schema.cost import _states

D4, D6, D7, D2019, D2020 = DIALECTS
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "value": {"type": "integer"}},
    "required": ["value"],
}


def deep(levels: int, leaf: Any = None, name: str = "left") -> Any:
    for _ in range(levels):
        leaf = {"value": 1, name: leaf} if leaf is not None else {"value": 1}
    return leaf


def refused(schema: Any) -> str:
    with pytest.raises(InvalidSchema) as caught:
        compile_schema(schema)
    return caught.value.reason


def doubling(levels: int, keyword: str) -> dict[str, Any]:
    """Definitions that each use the next one twice: 2 ** levels subschemas in a few hundred bytes."""
    definitions: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "integer"}}}


def chained(references: int, end: Any) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(references)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{references}": end}}


def two_chains() -> dict[str, Any]:
    """Two chains, of which the second leads into the first, so that neither is too long by itself."""
    second: dict[str, Any] = {f"e{i}": {"$ref": f"#/$defs/e{i + 1}"} for i in range(150)}
    return {**chained(150, {})["$defs"], **second, "e": {"$ref": "#/$defs/e0"}, "e150": {"$ref": "#/$defs/d0"}}


# Dialects.


@req("schema-01", "schema-05")
@pytest.mark.parametrize(
    ("dialect", "schema", "valid", "invalid"),
    [
        # Each of these has another meaning, or no meaning, in the other dialects.
        (D4, {"maximum": 3, "exclusiveMaximum": True}, 2, 3),
        (D6, {"items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
        (D7, {"definitions": {"a": {"$id": "#a", "type": "string"}}, "$ref": "#a"}, "x", 1),
        (D7, {"if": {"minimum": 0}, "then": {"multipleOf": 2}}, 2, 3),
        (
            D2019,
            {"$recursiveAnchor": True, "properties": {"a": {"$recursiveRef": "#"}}, "type": "object"},
            {},
            {"a": 1},
        ),
        (D2020, {"prefixItems": [{"type": "integer"}], "items": False}, [1], [1, 2]),
    ],
)
def test_a_schema_uses_the_dialect_that_it_names(dialect: str, schema: Any, valid: Any, invalid: Any) -> None:
    compiled = compile_schema({"$schema": dialect, **schema})
    assert compiled.dialect == dialect
    assert compiled.errors(valid) == []
    assert compiled.errors(invalid) != []


@req("schema-02", "schema-05")
def test_the_default_dialect_is_2020_12() -> None:
    schema = {"prefixItems": [{"type": "integer"}], "dependentRequired": {"a": ["b"]}, "unevaluatedItems": False}
    compiled = compile_schema(schema)
    assert compiled.dialect == DEFAULT_DIALECT == D2020
    assert compiled.errors([1]) == []
    assert compiled.errors(["x"]) == [Problem("/0", "type", "must be of type integer, not a string")]
    assert compiled.errors([1, 2]) == [Problem("", "unevaluatedItems", "has items that are not allowed")]
    assert compiled.errors({"a": 1}) == [Problem("", "required", 'lacks the member "b"')]


@req("schema-01")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_may_be_named_by_http_or_https_with_or_without_the_hash(dialect: str) -> None:
    rest = dialect.removesuffix("#").split("://")[1]
    for scheme in ("http", "https"):
        for end in ("", "#"):
            assert compile_schema({"$schema": f"{scheme}://{rest}{end}"}).dialect == dialect


@req("schema-06")
@pytest.mark.parametrize(
    "named", ["http://json-schema.org/draft-03/schema#", "https://example.com/mine", "", 7, None, {"a": 1}]
)
def test_an_unknown_dialect_is_refused(named: Any) -> None:
    with pytest.raises(
        InvalidSchema, match=r"dialect .* is not supported; supported are .*draft-07.*2020-12"
    ) as caught:
        compile_schema({"$schema": named})
    assert caught.value.reason == "dialect"


@req("schema-06")
def test_a_part_of_a_schema_cannot_have_another_dialect() -> None:
    assert compile_schema({"$defs": {"a": {"$id": "a", "$schema": D2020}}}).errors(1) == []
    assert refused({"$defs": {"a": {"$id": "a", "$schema": D7}}}) == "dialect"
    assert refused({"$defs": {"a": {"$id": "a", "$schema": "urn:mine"}}}) == "dialect"


@req("schema-03")
def test_the_docstring_of_the_module_names_the_dialects() -> None:
    # Its docstring names the dialects.
    import trio_mcp.core.schema.validation as module

    assert "draft 4, 6, 7, 2019-09 and 2020-12" in " ".join(str(module.__doc__).split())
    assert len(DIALECTS) == 5


# Schemas that are refused.


@req("schema-07")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": 1},
        {"properties": {"a": {"minimum": "3"}}},
        {"required": 3, "dependentRequired": 3},
        {"allOf": {}},
        {"patternProperties": 3},
        {"$id": "::"},
        {"$ref": 1},
        {"const": "\ud800"},
        {1: {}},
        {10**5000: {}},
        {"const": {10**5000}},
        "{}",
        None,
        [],
    ],
)
def test_an_invalid_schema_is_refused(schema: Any) -> None:
    assert refused(schema) == "invalid"


@req("schema-07")
def test_each_dialect_has_its_own_rules_for_valid_schemas() -> None:
    boolean_bound = {"maximum": 3, "exclusiveMaximum": True}
    assert compile_schema({"$schema": D4, **boolean_bound}).errors(2) == []
    for dialect in (D6, D7, D2019, D2020):
        assert refused({"$schema": dialect, **boolean_bound}) == "invalid"


def test_a_refused_schema_is_a_usage_error_that_names_the_place() -> None:
    with pytest.raises(UsageError, match=r"not valid under .*2020-12/schema at /properties/a/type"):
        compile_schema({"properties": {"a": {"type": "text"}}})
    with pytest.raises(UsageError, match="at its root"):
        compile_schema({"$id": "::"})


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "properties": {"a": {}}}])
def test_an_input_schema_has_an_object_at_its_root(schema: Any) -> None:
    check_input_schema(schema)


@req("tool-16")
@pytest.mark.parametrize("schema", [{}, {"type": "array"}, {"type": ["object"]}, {"$ref": "#/$defs/a"}, True, None])
def test_other_schemas_are_refused_as_input_schemas(schema: Any) -> None:
    with pytest.raises(InvalidSchema, match='"type": "object"') as caught:
        check_input_schema(schema)
    assert caught.value.reason == "root"


def test_any_other_schema_may_have_any_root() -> None:
    assert compile_schema(True).errors(1) == []
    assert compile_schema(False).errors(1) == [Problem("", "falseSchema", "is not allowed")]
    assert compile_schema({"type": "array"}).errors([]) == []
    assert compile_schema({"anyOf": [{"type": "null"}, {"type": "string"}]}).errors(None) == []


# References.

EXTERNAL = [
    "http://127.0.0.1:9/schema.json",
    "https://example.com/schema.json#/$defs/a",
    "file:///etc/passwd",
    "urn:example:other",
    "other.json",
    "#/$defs/missing",
    "#missing",
    "#/allOf/1",
    "#/allOf/x",
    "#/allOf/" + "9" * 2000,
    "#/type/x",
    "https://json-schema.org/draft/2020-12/schema",
]


@req("schema-08", "schema-09", "schema-11")
@pytest.mark.parametrize("reference", EXTERNAL)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_an_external_reference_is_refused(reference: str, keyword: str) -> None:
    external = {keyword: reference}
    for schema in (external, {"$defs": {"unused": external}}, {"properties": {"a": {"items": external}}}):
        assert refused({"allOf": [{}], "type": "object", **schema}) == "reference"


def test_data_that_looks_like_a_reference_is_not_followed() -> None:
    looks = {"$ref": "http://127.0.0.1:9/"}
    assert compile_schema({"const": looks, "default": looks, "x-ours": looks}).errors(looks) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "integer"}}},
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "integer"}}},
        {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", "type": "integer"}}},
        {"$id": "https://example.com/root", "$ref": "root#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$id": "urn:example:root", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"$id": "https://example.com/root", "$ref": "a", "$defs": {"x": {"$id": "a", "type": "integer"}}},
        {"$ref": "#/$defs/0/items", "$defs": {"0": {"items": {"type": "integer"}}}},
        {"$ref": "#/allOf/1", "allOf": [{}, {"type": "integer"}]},
        {"$ref": "#/x-ours/a", "x-ours": {"a": {"$ref": "#/x-ours/b"}, "b": {"type": "integer"}}},
        {"$schema": D7, "$id": "https://e.com/", "$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}},
        {"$schema": D7, "allOf": [{"$id": "https://e.com/", "$ref": "#/x"}], "x": {"type": "integer"}},
        {"$schema": D4, "definitions": {"a": {"id": "b", "type": "integer"}}, "allOf": [{"$ref": "b"}]},
        {"$schema": D4, "id": "https://e.com/", "allOf": [{"$ref": "#/x"}], "x": {"type": "integer"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"id": "no name now", "$ref": "#/$defs/b"}, "b": {"type": "integer"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": False}},
    ],
)
def test_all_forms_of_references_inside_the_document_are_followed(schema: Any) -> None:
    compiled = compile_schema(schema)
    assert compiled.errors("x") != []
    assert (compiled.errors(1) == []) is ("False" not in str(schema))


def test_a_malformed_uri_is_refused() -> None:
    assert refused({"$id": "https://example.com/", "allOf": [{"$ref": "http://[::"}]}) == "reference"


# Problems.


def test_a_problem_names_the_place_the_keyword_and_the_requirement() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": ["string", "null"]}, "n": {"maximum": 3}, "e": {"enum": ["x", 1]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert set(compile_schema(schema).errors({"a/b": 1, "e": "y", "~other": 1, "n": 4})) == {
        Problem("/a~1b", "type", "must be of type null or string, not an integer"),
        Problem("/n", "maximum", "must be at most 3"),
        Problem("/e", "enum", 'must be one of ["x", 1]'),
        Problem("/~0other", "additionalProperties", 'is not allowed; the allowed names are "a/b", "n", "e"'),
    }


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({}, "an object"), ([], "an array"), ("x", "a string"), (7.5, "a floating-point number"), (True, "a boolean"),
        (None, "null"),
    ],
)  # fmt: skip
def test_a_problem_names_the_kind_of_the_value(value: Any, kind: str) -> None:
    assert compile_schema({"type": "integer"}).errors(value) == [
        Problem("", "type", f"must be of type integer, not {kind}")
    ]


CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({**CLOSED, "properties": {"a": {}, "b": {}}}, '; the allowed names are "a", "b"'),
        ({**CLOSED, "properties": {}}, "; no members are allowed"),
        ({**CLOSED, "properties": {"a": {}}, "patternProperties": {"^b": {}}}, ""),
        ({"unevaluatedProperties": False, "properties": {"a": {}}}, ""),
        ({"$ref": "#/$defs/b", "$defs": {"b": {**CLOSED, "properties": {"c": {}}}}}, '; the allowed names are "c"'),
        ({"anyOf": [{"type": "null"}, {**CLOSED, "properties": {"a": {}}}]}, '; the allowed names are "a"'),
        ({"allOf": [{**CLOSED, "properties": {"a": {}}}]}, '; the allowed names are "a"'),
        ({"$id": "https://e.com/", "$ref": "x", "$defs": {"x": {"$id": "x", **CLOSED, "properties": {"a": {}}}}}, ""),
        ({**CLOSED, "properties": {str(number): {} for number in range(100)}}, '"18", "19"…'),
    ],
)
def test_a_problem_lists_the_allowed_names_if_they_are_known(schema: Any, names: str) -> None:
    (problem,) = compile_schema(schema).errors({"other": 1})
    assert problem.path == "/other"
    assert problem.message.startswith("is not allowed")
    assert problem.message.endswith(names or "allowed")
    assert len(problem.message) < 250


def test_later_changes_of_a_schema_have_no_effect() -> None:
    schema = {"properties": {"a": {**CLOSED, "properties": {"c": {}}}}}
    compiled = compile_schema(schema)
    schema.clear()
    assert compiled.errors({"a": {"b": 1}}) == [Problem("/a/b", "additionalProperties", "is not allowed")]


SECRET = "hunter2-hunter2"
BROKEN: list[tuple[dict[str, Any], Any]] = [
    ({"$schema": D7, "items": [{}], "additionalItems": False}, [1, SECRET]),
    ({"$schema": D7, "contentEncoding": "base64"}, f"*{SECRET}"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, SECRET),
    ({"const": "x"}, SECRET),
    ({"contains": {"type": "integer"}}, [SECRET]),
    ({"contains": {}, "maxContains": 1}, [SECRET, SECRET]),
    ({"enum": ["x"]}, SECRET),
    ({"exclusiveMaximum": 0}, 424242),
    ({"exclusiveMinimum": 10**9}, 424242),
    ({"items": False}, [SECRET]),
    ({"maxItems": 0}, [SECRET]),
    ({"maxLength": 1}, SECRET),
    ({"maxProperties": 0}, {"a": SECRET}),
    ({"maximum": 0}, 424242),
    ({"minItems": 2}, [SECRET]),
    ({"minLength": 99}, SECRET),
    ({"minProperties": 2}, {"a": SECRET}),
    ({"minimum": 10**9}, 424242),
    ({"multipleOf": 5}, 424242),
    ({"not": {"type": "string"}}, SECRET),
    ({"oneOf": [{"type": "string"}, {}]}, SECRET),
    ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, SECRET),
    ({"oneOf": [{"minLength": 99}, {"maxLength": 1}]}, SECRET),
    ({"pattern": "^x"}, SECRET),
    ({"propertyNames": {"maxLength": 0}}, {"a": SECRET}),
    ({"required": ["a"]}, {"b": SECRET}),
    ({"type": "integer"}, SECRET),
    ({"unevaluatedItems": False}, [SECRET]),
    ({"unevaluatedProperties": {"type": "null"}}, {"a": SECRET}),
    ({"uniqueItems": True}, [SECRET, SECRET]),
]


@pytest.mark.parametrize(("schema", "value"), BROKEN)
def test_no_problem_quotes_the_value(schema: Any, value: Any) -> None:
    problems = compile_schema({"properties": {"x": schema}, **{k: schema[k] for k in ("$schema",) if k in schema}})
    found = problems.errors({"x": value})
    assert found
    for problem in found:
        assert problem.path.startswith("/x")
        assert problem.keyword
        assert problem.message
        assert SECRET not in problem.message
        assert "424242" not in problem.message


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_the_problems_of_the_only_alternative_of_the_type_are_reported(keyword: str) -> None:
    schema = {keyword: [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "null"}]}
    assert compile_schema(schema).errors({"a": "x"}) == [Problem("/a", "type", "must be of type integer, not a string")]
    nested = {keyword: [schema, {"type": "array"}]}
    assert compile_schema({"items": nested}).errors([{"a": "x"}])[0].path in ("/0", "/0/a")


def test_the_number_and_the_length_of_problems_are_limited() -> None:
    many = compile_schema({"items": {"type": "integer"}})
    assert [problem.path for problem in many.errors(["x"] * 1000)] == [f"/{i}" for i in range(20)]
    closed = compile_schema({"properties": {}, "additionalProperties": False})
    assert len(closed.errors(dict.fromkeys(map(str, range(1000)), 1))) == 20
    long = compile_schema({"additionalProperties": {"enum": ["y" * 10_000]}}).errors({"n" * 10_000: 1})
    assert long == [Problem("/" + "n" * 64 + "…", "enum", 'must be one of ["' + "y" * 198 + "…")]


def test_equal_problems_are_reported_once() -> None:
    assert len(compile_schema({"allOf": [{"type": "integer"}] * 5}).errors("x")) == 1


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("inf"), "outside the range of a double"),
        (float("-inf"), "outside the range of a double"),
        (float("nan"), "outside the range of a double"),
        (10**400, "outside the range of a double"),
        (json.loads("[1e400]"), "outside the range of a double"),
        ("\ud800", "is not JSON"),
        ({1: "x"}, "is not JSON"),
        ({10**5000: "x"}, "is not JSON"),
        ({1, 2}, "is not JSON"),
        (deep(250), "is nested more than 250 deep"),
        ([[0] * 1_000_000] * 9, "has more than 8388608 values"),
    ],
)
def test_a_value_that_is_not_json_or_too_large_is_a_problem(value: Any, why: str) -> None:
    (problem,) = compile_schema({"minLength": 0}).errors(value)
    assert why in problem.message
    assert problem.path == problem.keyword == ""


def test_large_numbers_keep_their_value() -> None:
    compiled = compile_schema({"type": "integer", "maximum": 2**80})
    assert compiled.errors(2**80) == []
    assert compiled.errors(2**80 + 1) == [Problem("", "maximum", f"must be at most {2**80}")]
    assert compile_schema({"multipleOf": 0.01}).errors(1e300) == []
    assert compile_schema({"const": 2**53}).errors(2**53 + 1) != []


def test_true_and_text_are_not_integers() -> None:
    for value in (True, "3", 3.5, None):
        assert compile_schema({"type": "integer"}).errors(value) != []


def test_formats_are_not_checked_in_any_dialect() -> None:
    for dialect in DIALECTS:
        assert compile_schema({"$schema": dialect, "format": "date-time"}).errors("soon") == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
SCHEMAS = [compile_schema(schema) for schema, _ in BROKEN] + [compile_schema(TREE), compile_schema(False)]


@settings(max_examples=60)
@given(JSON)
def test_no_value_raises_an_exception(value: Any) -> None:
    for compiled in SCHEMAS:
        for problem in compiled.errors(value):
            assert len(problem.message) < 300


@settings(max_examples=60)
@given(JSON)
def test_any_schema_is_compiled_or_invalid(value: Any) -> None:
    for schema in (value, {"properties": value}, {"anyOf": [value]}, {"$ref": value}, {"$id": value, "type": value}):
        try:
            compiled = compile_schema(schema)
        except InvalidSchema:
            continue
        compiled.errors(value)


# Bounds.


@req("schema-12")
@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_a_small_schema_that_needs_exponential_work_is_refused(keyword: str) -> None:
    assert refused(doubling(40, keyword)) == "limit"
    assert compile_schema(doubling(8, keyword)).errors("x") != []


@req("schema-12")
def test_exponential_work_inside_nested_members_is_refused() -> None:
    definitions: dict[str, Any] = {
        f"d{i}": {"allOf": [{"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}] * 2} for i in range(30)
    }
    assert refused({"$ref": "#/$defs/d0", "$defs": {**definitions, "d30": {"type": "integer"}}}) == "limit"


@req("schema-12")
@pytest.mark.parametrize(
    ("dialect", "plain", "dynamic", "anchor"),
    [
        (D2020, "$ref", "$dynamicRef", {"$dynamicAnchor": "a"}),
        (D2019, "$ref", "$recursiveRef", {"$recursiveAnchor": True}),
    ],
)
def test_the_work_for_a_dynamic_reference_includes_all_its_targets(
    dialect: str, plain: str, dynamic: str, anchor: dict[str, Any]
) -> None:
    wide = {"$id": "https://example.com/wide", **anchor, "allOf": [{"minLength": i} for i in range(2000)]}

    def schema(keyword: str) -> dict[str, Any]:
        reference = "#a" if "$dynamicAnchor" in anchor else "#"
        thrice = {"$id": "https://example.com/thrice", **anchor, "properties": {"b": {"items": {keyword: reference}}}}
        thrice["allOf"] = [{"items": {keyword: reference}} for _ in range(3)]
        return {"$schema": dialect, "$defs": {"wide": wide, "thrice": thrice}}

    assert compile_schema(schema(plain)).errors(1) == []
    assert refused(schema(dynamic)) == "limit"


@req("schema-12")
def test_unused_definitions_are_limited_because_they_are_compiled() -> None:
    assert refused({"properties": {"a": {"type": "string"}}, "$defs": doubling(40, "anyOf")["$defs"]}) == "limit"


@req("schema-12")
def test_the_repeated_work_for_unevaluated_members_is_limited() -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"properties": {"a": True}}
        for _ in range(levels):
            schema = {"anyOf": [schema], "unevaluatedProperties": False}
        return schema

    assert compile_schema(nested(4)).errors({"a": 1}) == []
    assert refused(nested(25)) == "limit"


@req("schema-12")
@pytest.mark.parametrize(
    "schema",
    [
        {"enum": list(range(30_000))},
        {"$defs": {str(i): {} for i in range(30_000)}},
        chained(3000, {}),
        {"allOf": [chained(150, {})["$defs"]["d0"], {"$ref": "#/$defs/e"}], "$defs": two_chains()},
        {"properties": {str(i): {"pattern": "x"} for i in range(201)}},
        {"patternProperties": {str(i): {} for i in range(201)}},
        {"properties": {str(i): {"pattern": "x" * 1000} for i in range(66)}},
        {"required": [str(i) for i in range(6000)]},
        {"dependentRequired": {"a": [str(i) for i in range(6000)]}},
        {"const": deep(70)},
        {"maximum": 10**400},
    ],
    ids=[
        "values",
        "subschemas",
        "chain",
        "chains",
        "patterns",
        "pattern names",
        "pattern text",
        "required",
        "dependent",
        "depth",
        "number",
    ],
)
def test_a_schema_beyond_a_limit_is_refused(schema: Any) -> None:
    assert refused(schema) == "limit"


def long_uri(length: int) -> str:
    return "https://example.com/".ljust(length, "x")


@req("schema-12")
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_the_length_of_a_uri_is_limited(keyword: str) -> None:
    def named(name: str, reference: str) -> dict[str, Any]:
        return {"$defs": {"a": {"$id": name}}, "items": {keyword: reference}}

    assert compile_schema(named(long_uri(2048), long_uri(2048))).errors(1) == []
    assert refused(named(long_uri(2049), "#")) == "limit"
    assert refused(named("a", long_uri(2049))) == "limit"


@req("schema-12")
def test_the_length_of_a_uri_that_grows_by_nesting_is_limited() -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        for _ in range(levels):
            schema = {"$id": "x" * 99 + "/", "items": schema}
        return schema

    assert compile_schema(nested(20)).errors(1) == []
    assert refused(nested(21)) == "limit"


@req("schema-12")
def test_anchors_do_not_copy_their_base_uri() -> None:
    anchors = {str(i): {"$anchor": f"a{i}"} for i in range(9000)}
    schema = {"$id": long_uri(2048), "$defs": anchors}
    compile_schema({})
    tracemalloc.start()
    try:
        compile_schema(schema)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 9000 * 2048 / 2


@req("schema-12")
@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ({"$ref": "#a"}, lambda i: {"$anchor": "a"}),
        ({"$ref": "u#/x"}, lambda i: {"$id": "u", "x": True} if i == 0 else {"$id": "u"}),
        ({"$dynamicRef": "p0#a"}, lambda i: {"$id": f"p{i}", "$dynamicAnchor": "a"}),
    ],
    ids=["anchor", "id", "dynamic anchor"],
)
def test_many_references_to_a_repeated_name_are_refused(
    reference: dict[str, Any], place: Callable[[int], dict[str, Any]]
) -> None:
    def ambiguous(times: int) -> dict[str, Any]:
        places = {f"p{i}": place(i) for i in range(times)}
        return {"$defs": {**places, **{f"r{i}": dict(reference) for i in range(times)}}}

    assert compile_schema(ambiguous(100)).errors(1) == []
    assert refused(ambiguous(2000)) == "limit"


@req("schema-12")
def test_a_part_that_many_references_enter_is_refused() -> None:
    def entered(ways: int) -> dict[str, Any]:
        part: dict[str, Any] = {"$defs": {str(i): {} for i in range(8000)}}
        for _ in range(ways):
            part = {"not": part}
        inner_first = {f"r{i}": {"$ref": "#/x-ours" + "/not" * i} for i in range(ways)}
        return {"x-ours": part, "$defs": inner_first}

    assert compile_schema(entered(3)).errors(1) == []
    assert refused(entered(40)) == "limit"


@req("schema-12")
def test_long_names_above_many_subschemas_are_refused() -> None:
    below = {"properties": {str(i): {"type": "integer"} for i in range(2000)}}
    assert compile_schema({"properties": {"n" * 1000: below}}).errors(1) == []
    assert refused({"properties": {"n" * 100_000: below}}) == "limit"


@req("schema-12")
def test_a_schema_nested_beyond_the_stack_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    assert refused(schema) == "limit"
    while schema:  # in a loop, because the interpreter would free the nested dicts recursively
        schema = schema.pop("not")


@req("schema-12")
@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(", "(a{1000}){1000}"])
def test_patterns_that_cannot_run_in_linear_time_are_refused(pattern: str) -> None:
    assert refused({"properties": {"a": {"pattern": pattern}}}) == "pattern"
    assert refused({"patternProperties": {pattern: {}}}) == "pattern"


def test_the_total_size_of_compiled_patterns_is_limited() -> None:
    few, many = ({"properties": {str(i): {"pattern": ".{1000}"} for i in range(count)}} for count in (10, 100))
    assert compile_schema(few).errors({"0": "x"})[0].path == "/0"
    assert refused(many) == "pattern"


@req("schema-12")
def test_a_pattern_with_nested_repetition_takes_linear_time() -> None:
    compiled = compile_schema({"pattern": "^(a+)+$"})
    assert compiled.errors("a" * 100_000) == []
    assert compiled.errors("a" * 100_000 + "b") == [Problem("", "pattern", 'must match the pattern "^(a+)+$"')]


@req("schema-12")
def test_recursive_choices_are_explained_only_up_to_a_limit_of_work() -> None:
    branch = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    compiled = compile_schema({"anyOf": [{"type": "null"}, branch, {**branch, "required": ["b"]}]})
    chain: Any = None
    for _ in range(100):
        chain = {"a": chain}
    assert compiled.errors(chain) == []
    bad: Any = {"a": 1}
    assert compiled.errors(bad)[0].keyword == "anyOf"
    for _ in range(100):
        bad = {"a": bad}
    assert compiled.errors(bad) == [Problem("", "", "breaks the schema; it would take too much work to say where")]


INTEGERS: dict[str, Any] = {"items": {"type": "integer"}}


@req("schema-12")
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"minLength": 10**9 + i} for i in range(500)]}, "x" * 1_000_000),
        ({"additionalProperties": INTEGERS}, {"n" * 100_000: ["x"] * 5000}),
        ({"patternProperties": {"n|" * 4000: INTEGERS}}, {"n": ["x"] * 5000}),
        ({"additionalProperties": {"$ref": "#"}, "required": ["a"]}, deep(200, {"n": "x" * 1_000_000})),
        ({"items": {"const": "y" * 100_000}}, ["x"] * 2000),
        ({"items": {"not": {"description": "y" * 100_000}}}, [{}] * 2000),
        (
            chained(20, {"type": ["object", "array"], "properties": {"left": {"$ref": "#/$defs/d0"}}, **INTEGERS}),
            deep(50, ["x"] * 300),
        ),
    ],
    ids=["text", "names", "patterns", "nesting", "const", "not", "places in the schema"],
)
def test_problems_that_need_too_much_work_are_not_explained(schema: Any, value: Any) -> None:
    assert compile_schema(schema).errors(value) == [
        Problem("", "", "breaks the schema; it would take too much work to say where")
    ]


@req("schema-12")
def test_one_long_text_or_many_short_ones_are_explained() -> None:
    assert compile_schema({"properties": {"a": {"maxLength": 9}}}).errors({"a": "x" * 1_000_000})[0].path == "/a"
    assert len(compile_schema(INTEGERS).errors(["x"] * 4000)) == 20


@req("schema-12")
def test_plain_recursion_is_explained_at_any_depth() -> None:
    compiled = compile_schema(TREE)
    assert compiled.errors(deep(249)) == []
    assert compiled.errors(deep(200, {})) == [Problem("/left" * 200, "required", 'lacks the member "value"')]


@req("schema-12")
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        # Many values, each of which meets many subschemas.
        ({"items": {"allOf": [{"minLength": i} for i in range(4000)]}}, ["x"] * 30_000),
        # The same, squared: the engine searches its memory of a recursive schema.
        ({"items": {"$ref": "#"}, "allOf": [{"minLength": i} for i in range(1000)]}, ["x"] * 1000),
        # Many large integers that hash alike.
        ({"uniqueItems": True}, [2**62 + i for i in range(200)]),
        # A long chain of references for each of many levels.
        (chained(150, {"properties": {"left": {"$ref": "#/$defs/d0"}}}), deep(200)),
    ],
    ids=["values", "memory", "crowd", "frames"],
)
def test_a_value_that_needs_too_much_work_is_not_checked(schema: Any, value: Any) -> None:
    assert compile_schema(schema).errors(value) == [
        Problem("", "", "would take too much work to check against this schema")
    ]


TOO_MUCH = [Problem("", "", "would take too much work to check against this schema")]
SLOW = "a[ab]{4000}[cde]"  # 14 µs for each character


@req("schema-12")
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": SLOW}, "ab" * 5000),
        ({"properties": {"b": {"items": {"anyOf": [{"type": "integer"}, {"pattern": SLOW}]}}}}, {"b": ["ab"] * 5000}),
        ({"patternProperties": {SLOW: True}}, {"ab" * 5000: 1}),
        ({"propertyNames": {"pattern": SLOW}}, [{"ab" * 5000: 1}]),
        (
            {"$ref": "#/$defs/d", "$defs": {"d": {"allOf": [{"pattern": f"{i}[ab]{{40}}"} for i in range(100)]}}},
            "b" * 9999,
        ),
        ({"allOf": [{"minLength": i} for i in range(4000)]}, "x" * 2_000_000),
        ({"pattern": "(é[ß日]{10}){9}"}, "日" * 200_000),
        (
            {"additionalProperties": {"$ref": "#"}, "unevaluatedProperties": {"$ref": "#"}, "pattern": "a[ab]{40}c"},
            deep(20, {"n": "ab"}),
        ),
    ],
    ids=["text", "texts", "names", "property names", "many", "lengths", "beyond ASCII", "again and again"],
)
def test_a_text_that_needs_too_much_work_for_its_patterns_is_not_checked(schema: Any, value: Any) -> None:
    compiled = compile_schema(schema)
    assert compiled.errors(value) == TOO_MUCH
    assert not compiled.can_check(value)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (SLOW, "ab" * 500), ("^(a+)+$", "a" * 5_000_000), ("^[A-Za-z0-9+/]*={0,2}$", "QUJD" * 1_000_000),
        ("^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$", "123e4567-e89b-12d3-a456-426614174000"),
        ("^.{1,255}$", "é" * 255),
    ],
)  # fmt: skip
def test_usual_patterns_are_checked_on_usual_texts(pattern: str, text: str) -> None:
    compiled = compile_schema({"items": {"pattern": pattern}})
    assert compiled.can_check([text, "b" * 100, 1])
    assert compiled.errors([text]) in ([], [Problem("/0", "pattern", f"must match the pattern {json.dumps(pattern)}")])


def test_problems_that_need_repeated_pattern_matches_are_not_explained() -> None:
    branch = {"type": "object", "additionalProperties": {"$ref": "#"}}
    compiled = compile_schema({"anyOf": [branch, {"type": "string", "pattern": "a[ab]{400}c"}, branch]})
    value = deep(10, {"n": "ab" * 3000})
    assert compiled.can_check(value)
    assert compiled.errors(value) == [Problem("", "", "breaks the schema; it would take too much work to say where")]


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        ("", 0), ("abc", 3), ("a*b+c?", 3), ("a|bc", 3), ("[a-z]{20}", 20), ("[]x]{20}", 22), (r"[\]x]{20}", 20),
        ("a{20}", 20), ("a{2,20}", 20), ("a{20,}", 20), ("a{20", 4), ("a{,20}", 5), ("a{0}b{20}", 20), ("{20}", 0),
        (r"\d{20}", 20), (r"\p{L}{20}", 20), (r"\u0041{20}", 20), (r"\u{1F600}{20}", 20), (r"\x41{20}", 20), ("\\", 1),
        ("(ab){20}", 40), ("((ab){20}c){3}", 123), ("(a|b{3}){20}", 80), ("((a", 2), ("a)b)", 4), ("[abc", 1),
        ("a{1000}{1000}{1000}{1000}", 10**9), ("(?:a{1000}){1000}" * 2000, 10**9),
    ],
)  # fmt: skip
def test_the_states_of_a_pattern_are_counted(pattern: str, places: int) -> None:
    assert _states(pattern) == (places if places > 10 else 1 / 4)


@given(st.text("a[]{}()|*+?\\^1,0{2,3}", max_size=20))
def test_any_pattern_has_a_number_of_states(pattern: str) -> None:
    assert 0 < _states(pattern) <= 10**9


@req("schema-12")
def test_branching_recursion_under_unevaluated_members_is_not_checked() -> None:
    tree = {**TREE, "unevaluatedProperties": False}
    assert compile_schema(tree).errors(deep(200)) == []
    again = {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "unevaluatedProperties": {"$ref": "#"}}
    branching = compile_schema({"anyOf": [{"additionalProperties": again}, {"type": "integer"}]})
    assert branching.errors(deep(3)) == []
    assert branching.errors(deep(100)) == [Problem("", "", "would take too much work to check against this schema")]


def test_large_integers_are_checked_if_they_are_not_compared() -> None:
    assert compile_schema({"items": {"type": "integer"}}).errors([2**62 + i for i in range(200)]) == []
    assert compile_schema({"uniqueItems": True}).errors([2**62 + i * 2**20 for i in range(200)]) == []
    assert compile_schema({"items": {"uniqueItems": True}}).errors([[1e20]] * 200) == []


def test_the_engine_is_imported_with_the_first_schema_only() -> None:
    code = (
        "import sys; import trio_mcp.core.schema.validation as v; assert 'jsonschema_rs' not in sys.modules;"
        "v.check_input_schema({'type': 'object'}); assert 'jsonschema_rs' not in sys.modules;"
        "v.compile_schema({}); assert 'jsonschema_rs' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
