"""The tables of the revisions: compared with the official schemas, and by themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.requirements import req
from trio_mcp.core import (
    LATEST,
    LATEST_LEGACY,
    LEGACY,
    MODERN,
    REVISIONS,
    Call,
    CapabilityRule,
    ConditionalNeed,
    HttpRules,
    MethodRule,
    Offer,
    Request,
    Revision,
    Role,
    ServerProtocol,
    capability_object,
    declares,
    errors,
    missing_capabilities,
)

A, B, C, D, E = REVISIONS.values()
ALL = tuple(REVISIONS.values())
CLIENT, SERVER = Role
each_revision = pytest.mark.parametrize("revision", ALL, ids=str)

Schema = Mapping[str, Any]


def schema_of(folder: Path, revision: Revision) -> Schema:
    whole = json.loads((folder / "schema" / f"{revision}.json").read_text(encoding="utf-8"))
    definitions: Schema = whole.get("$defs") or whole["definitions"]
    return definitions


def methods(schema: Schema, union: str) -> set[str]:
    """The methods in a union of messages, without those of tasks, which other tests compare."""
    members = schema.get(union, {"anyOf": []})
    names = [each["$ref"].split("/")[-1] for each in members["anyOf"]] if "anyOf" in members else [union]
    found = {schema[name]["properties"]["method"]["const"] for name in names}
    return {each for each in found if not each.startswith(("tasks/", "notifications/tasks"))}


def resolved(schema: Schema, value: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema[value["$ref"].split("/")[-1]] if "$ref" in value else value


# Compared with the schemas.


@req("type-02", "type-15", "type-16")
@each_revision
def test_the_methods_are_those_of_the_schema(revision: Revision, shared_schemas: Path) -> None:
    schema = schema_of(shared_schemas, revision)
    for role, name in ((CLIENT, "Client"), (SERVER, "Server")):
        assert revision.requests[role].keys() == methods(schema, f"{name}Request")
        assert revision.notifications[role].keys() == methods(schema, f"{name}Notification")
    assert revision.input_requests.keys() == (methods(schema, "InputRequest") if "InputRequest" in schema else set())


@each_revision
def test_the_capabilities_are_those_of_the_schema(revision: Revision, shared_schemas: Path) -> None:
    schema = schema_of(shared_schemas, revision)
    for role, name in ((CLIENT, "ClientCapabilities"), (SERVER, "ServerCapabilities")):
        properties = {each: value for each, value in schema[name]["properties"].items() if each != "tasks"}
        assert revision.capabilities[role].keys() == properties.keys()
        for each, rule in revision.capabilities[role].items():
            if rule.keys is not None:
                assert rule.keys == resolved(schema, properties[each]).get("properties", {}).keys(), each


@each_revision
def test_the_fields_of_an_implementation_are_those_of_the_schema(revision: Revision, shared_schemas: Path) -> None:
    implementation = schema_of(shared_schemas, revision)["Implementation"]
    assert revision.info_fields == implementation["properties"].keys()
    assert set(implementation["required"]) == {"name", "version"}


@each_revision
def test_the_required_members_are_those_of_the_schema(revision: Revision, shared_schemas: Path) -> None:
    schema = schema_of(shared_schemas, revision)
    required = {name: set(each.get("required", ())) for name, each in schema.items() if name.endswith("Result")}
    assert revision.result_type is ("resultType" in required["Result"])
    cacheable = {name for name, fields in required.items() if {"ttlMs", "cacheScope"} <= fields} - {"CacheableResult"}
    assert len(cacheable) == len(revision.cacheable)
    stems = {name.removesuffix("Result") for name in cacheable}
    requests = {name: each for name, each in schema.items() if name.removesuffix("Request") in stems}
    assert {each["properties"]["method"]["const"] for each in requests.values()} == revision.cacheable
    meta = schema.get("RequestMetaObject", {"required": []})
    assert set(revision.required_meta) == set(meta["required"])


@each_revision
def test_progress_has_a_message_if_the_schema_has_one(revision: Revision, shared_schemas: Path) -> None:
    schema = schema_of(shared_schemas, revision)
    params = resolved(schema, schema["ProgressNotification"]["properties"]["params"])
    assert revision.progress_message is ("message" in params["properties"])


@each_revision
def test_only_the_methods_of_the_schema_may_ask_for_input(revision: Revision, shared_schemas: Path) -> None:
    schema = schema_of(shared_schemas, revision)
    asking = set()
    for name, each in schema.items():
        result = each.get("properties", {}).get("result", {})
        if name.endswith("ResultResponse") and {"$ref": "#/$defs/InputRequiredResult"} in result.get("anyOf", ()):
            request = schema[name.replace("ResultResponse", "Request")]
            asking.add(request["properties"]["method"]["const"])
    assert revision.input_required == asking


# By themselves.


def test_the_revisions_are_in_order_and_each_name_is_one_object() -> None:
    assert [*REVISIONS] == sorted(REVISIONS) == [str(each) for each in ALL]
    assert (*LEGACY, *MODERN) == ALL
    assert (LATEST_LEGACY, LATEST) == (D, E)
    assert repr(A) == "<Revision 2024-11-05>"
    assert attrs.evolve(A) != A
    assert Role.CLIENT.other is Role.SERVER
    assert Role.SERVER.other is Role.CLIENT


@each_revision
def test_every_table_is_complete_and_consistent(revision: Revision) -> None:
    for table in (revision.requests, revision.notifications):
        assert table.keys() == set(Role)
        for rows in table.values():
            assert all(isinstance(row, MethodRule) and row.name == name for name, row in rows.items())
    assert revision.capabilities.keys() == set(Role)
    for sender in Role:
        for row in revision.requests[sender].values():
            assert row.owner is sender.other
        for row in revision.notifications[sender].values():
            assert row.owner is sender
        for row in (*revision.requests[sender].values(), *revision.notifications[sender].values()):
            # The owner of a row can declare the capability that the row needs, in that revision.
            assert declares(revision.declarable(row.owner, capability_object([row.needs])), row.needs)
    ours = revision.requests[CLIENT].keys()
    assert revision.input_required | revision.cacheable | revision.teardown <= ours
    assert revision.uncancellable <= ours
    assert revision.on_subscriptions <= revision.notifications[SERVER].keys()
    assert all(need.needs[0] in revision.capabilities[CLIENT] for need in revision.conditional_needs)
    assert revision.resource_not_found not in revision.forbidden_codes
    assert revision.error_code(revision.resource_not_found) == revision.resource_not_found
    assert (revision.http is None) is (revision is A)
    assert isinstance(revision.http, HttpRules | None)


def test_all_legacy_revisions_allow_the_same_early_messages() -> None:
    both = {"notifications/cancelled", "notifications/progress"}
    early = {
        CLIENT: {"initialize", "ping", "notifications/initialized", *both},
        SERVER: {"ping", "notifications/message", *both},
    }
    for revision in ALL:
        for role in Role:
            rows = [*revision.requests[role].values(), *revision.notifications[role].values()]
            assert {row.name for row in rows if row.early} == (early[role] if revision.handshake else set())


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("batches", (False, True, False, False, False)),
        ("handshake", (True, True, True, True, False)),
        ("unreadable_id_is_null", (True, True, True, False, False)),
        ("invalid_arguments_are_results", (False, False, False, True, True)),
        ("resource_not_found", (-32002, -32002, -32002, -32002, -32602)),
        ("teardown", (frozenset(),) * 4 + (frozenset({"subscriptions/listen"}),)),
        ("uncancellable", (frozenset({"initialize"}),) * 4 + (frozenset({"server/discover"}),)),
    ],
)
def test_rules_that_are_not_in_the_schemas_are_those_of_the_prose(column: str, values: tuple[Any, ...]) -> None:
    assert tuple(getattr(revision, column) for revision in ALL) == values


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("version_header", (False, True, True, True)),
        ("standard_headers", (False, False, False, True)),
        ("disconnect_cancels", (False, False, False, True)),
        ("sse_fallback", (frozenset(range(400, 500)),) * 2 + (frozenset({400, 404, 405}),) * 2),
        (
            "statuses",
            ({},) * 3 + ({-32700: 400, -32600: 400, -32601: 404, -32020: 400, -32021: 400, -32022: 400},),
        ),
    ],
)
def test_the_http_rules_are_those_of_the_prose(column: str, values: tuple[Any, ...]) -> None:
    assert tuple(getattr(revision.http, column) for revision in ALL[1:]) == values


CAPABILITIES = {
    "on": {},
    "off": False,
    "null": None,
    "nested": {"on": True, "off": False, "object": {}, "null": None},
    "odd": "yes",
    "list": [],
}


@req("life-21")
@pytest.mark.parametrize(
    ("needs", "declared"),
    [
        ((), True),
        (("on",), True),
        (("off",), False),
        (("null",), False),
        (("absent",), False),
        (("nested",), True),
        (("nested", "on"), True),
        (("nested", "object"), True),
        (("nested", "off"), False),
        (("nested", "null"), False),
        (("nested", "absent"), False),
        (("on", "absent"), False),
        (("odd",), True),
        (("odd", "deeper"), False),
        (("list",), True),
        (("list", "deeper"), False),
    ],
    ids=str,
)
def test_a_capability_is_declared_if_it_is_neither_absent_nor_false_nor_null(
    needs: tuple[str, ...], declared: bool
) -> None:
    assert declares(CAPABILITIES, needs) is declared


@pytest.mark.parametrize(
    ("elicitation", "form", "url"),
    [
        ({}, True, False),
        ({"form": {}}, True, False),
        ({"url": {}}, False, True),
        ({"form": {}, "url": {}}, True, True),
        ({"form": False}, False, False),
        (None, False, False),
        (False, False, False),
        ([], False, False),
    ],
    ids=str,
)
def test_elicitation_alone_means_forms(elicitation: Any, form: bool, url: bool) -> None:
    capabilities = {"elicitation": elicitation}
    assert declares(capabilities, ("elicitation", "form")) is form
    assert declares(capabilities, ("elicitation", "url")) is url
    assert not declares({}, ("elicitation", "form"))


@pytest.mark.parametrize(
    ("revision", "method", "params", "declared", "missing"),
    [
        (A, "sampling/createMessage", {}, {}, ["sampling"]),
        (A, "sampling/createMessage", {"tools": []}, {"sampling": {}}, []),
        (C, "elicitation/create", {"mode": "url", "requestedSchema": {}}, {"elicitation": {}}, []),
        (D, "elicitation/create", {"mode": "url"}, {}, ["elicitation", "elicitation.url"]),
        (D, "elicitation/create", {"mode": "url"}, {"elicitation": {}}, ["elicitation.url"]),
        (D, "elicitation/create", {"mode": {}}, {"elicitation": {}}, []),
        (D, "elicitation/create", {"mode": "form", "requestedSchema": {}}, {"elicitation": {}}, []),
        (D, "elicitation/create", {"requestedSchema": {}}, {"elicitation": {"url": {}}}, ["elicitation.form"]),
        (D, "sampling/createMessage", {"tools": [], "toolChoice": {}}, {"sampling": {}}, ["sampling.tools"] * 2),
        (D, "sampling/createMessage", {"tools": []}, {"sampling": {"tools": {}}}, []),
        (D, "roots/list", {"tools": [], "mode": "url"}, {"roots": {}}, []),
    ],
    ids=str,
)
def test_the_missing_capabilities_of_a_request(
    revision: Revision, method: str, params: Any, declared: Any, missing: list[str]
) -> None:
    row = revision.request(SERVER, method)
    assert row is not None
    assert [".".join(each) for each in missing_capabilities(revision, row, params, declared)] == missing


def test_a_modern_input_request_needs_the_same_capabilities() -> None:
    assert E.conditional_needs == D.conditional_needs
    for name, row in E.input_requests.items():
        assert row == D.requests[SERVER][name]


def test_a_need_applies_to_its_own_parameter_only() -> None:
    need = ConditionalNeed("m", "p", ("x", "y"), ("c",))
    assert need.applies("m", {"p": "x"})
    assert not need.applies("m", {"p": "z"})
    assert not need.applies("m", {"q": "x"})
    assert not need.applies("n", {"p": "x"})
    assert ConditionalNeed("m", "p", (), ("c",)).applies("m", {"p": None})


def test_missing_capabilities_are_named_as_the_smallest_object() -> None:
    assert capability_object([]) == {}
    needs = [("elicitation",), ("elicitation", "url"), ("sampling", "tools"), ("elicitation", "form")]
    assert capability_object(needs) == {"elicitation": {"url": {}, "form": {}}, "sampling": {"tools": {}}}


@pytest.mark.parametrize(
    ("offered", "declared"),
    [
        ({}, {}),
        ({"unknown": {}}, {}),
        ({"tools": None}, {}),
        ({"tools": {"listChanged": True, "x": 1}}, {"tools": {"listChanged": True}}),
        ({"logging": {"x": 1}}, {"logging": {}}),
        ({"experimental": {"x": {"y": 1}}}, {"experimental": {"x": {"y": 1}}}),
    ],
    ids=str,
)
@each_revision
def test_only_known_capabilities_are_declared(revision: Revision, offered: Any, declared: Any) -> None:
    assert revision.declarable(SERVER, offered) == declared


def test_a_rule_may_depend_on_another_capability() -> None:
    assert C.capabilities[CLIENT]["elicitation"] == CapabilityRule(frozenset(), only_with=("elicitation", "form"))
    assert C.declarable(CLIENT, {"elicitation": {"url": {}}}) == {}
    assert C.declarable(CLIENT, {"elicitation": {"form": {}, "url": {}}}) == {"elicitation": {}}


@pytest.mark.parametrize(
    ("revision", "method", "use"),
    [
        (A, "elicitation/create", ""),
        (B, "elicitation/create", ""),
        (D, "subscriptions/listen", "resources/subscribe and the list_changed notifications"),
        (D, "server/discover", "initialize"),
        (E, "ping", "any other request"),
        (E, "initialize", "server/discover, or no opening request at all"),
        (E, "elicitation/create", "an input request in an input-required result"),
        (E, "no/such", ""),
    ],
    ids=str,
)
def test_an_error_names_the_replacement_of_a_method(revision: Revision, method: str, use: str) -> None:
    assert revision.instead_of(method) == use


@each_revision
def test_the_defaults_are_the_members_of_each_complete_result(revision: Revision) -> None:
    for method in revision.requests[CLIENT]:
        hints = {"ttlMs": 0, "cacheScope": "private"} if method in revision.cacheable else {}
        assert revision.complete(method in revision.cacheable) == (
            {"resultType": "complete", **hints} if revision is E else {}
        )


@req("core-20", "core-21", "core-23", "core-24")
def test_the_forbidden_codes_are_the_reserved_ranges_but_for_three() -> None:
    allowed = {errors.HEADER_MISMATCH, errors.MISSING_CLIENT_CAPABILITY, errors.UNSUPPORTED_VERSION}
    for code in range(-32110, -31990):
        assert (code in E.forbidden_codes) is (-32099 <= code <= -32000 and code not in allowed)
    assert [each.forbidden_codes for each in (A, B, C, D)] == [{errors.URL_ELICITATION_REQUIRED}] * 3 + [set()]


def test_a_new_revision_needs_only_one_more_row() -> None:
    newer = attrs.evolve(LATEST, name="2027-01-01")
    offer = Offer({"name": "s", "version": "1"}, {"tools": {}}, (newer, D))
    meta = {"io.modelcontextprotocol/protocolVersion": newer.name, "io.modelcontextprotocol/clientCapabilities": {}}
    (event,) = ServerProtocol(offer).receive(Request(1, "tools/list", {"_meta": meta}), 0.0)
    assert isinstance(event, Call)
    assert event.terms.revision is newer
