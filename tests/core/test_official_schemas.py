"""Every model against the official schema of every revision, and round trips of the official example messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings

from tests.core.model_strategies import MODELS, Fixed, build, exists, instances, one_of, without_raw_data
from tests.requirements import req
from trio_mcp.core import (
    LATEST,
    META_CLIENT_CAPABILITIES,
    META_VERSION,
    REVISIONS,
    Model,
    Revision,
    Role,
    codec,
    content,
    forms,
    models,
)

EACH = pytest.mark.parametrize(
    ("revision", "cls"),
    [
        pytest.param(revision, cls, id=f"{revision}-{cls.__name__}")
        for revision in REVISIONS.values()
        for cls in MODELS
        if exists(cls, revision)
    ],
)
REVISION = pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)

PARAMS = "/properties/params"
# The place of a model in the schemas, if it is not its own name: the first of these that the revision has.
PLACES: Mapping[type[Model], tuple[str, ...]] = {
    content.Annotations: ("Annotations", "Annotated/properties/annotations"),
    models.CallToolParams: ("CallToolRequestParams", "CallToolRequest" + PARAMS),
    models.CompleteParams: ("CompleteRequestParams", "CompleteRequest" + PARAMS),
    models.Completion: ("CompleteResult/properties/completion",),
    models.CompletionArgument: (
        "CompleteRequestParams/properties/argument",
        f"CompleteRequest{PARAMS}/properties/argument",
    ),
    models.CompletionContext: (
        "CompleteRequestParams/properties/context",
        f"CompleteRequest{PARAMS}/properties/context",
    ),
    models.CreateMessageParams: ("CreateMessageRequestParams", "CreateMessageRequest" + PARAMS),
    models.GetPromptParams: ("GetPromptRequestParams", "GetPromptRequest" + PARAMS),
    models.LoggingMessageParams: ("LoggingMessageNotificationParams", "LoggingMessageNotification" + PARAMS),
    models.PaginatedParams: ("PaginatedRequestParams", "PaginatedRequest" + PARAMS),
    models.Params: ("NotificationParams", "Notification" + PARAMS),
    models.ReadResourceParams: ("ReadResourceRequestParams", "ReadResourceRequest" + PARAMS),
    models.ResourceReference: ("ResourceTemplateReference", "ResourceReference"),
    forms.ElicitFormParams: ("ElicitRequestFormParams", "ElicitRequest" + PARAMS),
    forms.ElicitUrlParams: ("ElicitRequestURLParams",),
    forms.EnumItems: ("UntitledMultiSelectEnumSchema/properties/items",),
    forms.EnumOption: ("TitledSingleSelectEnumSchema/properties/oneOf/items",),
    forms.EnumSchema: ("LegacyTitledEnumSchema", "EnumSchema"),
    forms.IntegerSchema: ("NumberSchema",),
    forms.MultiSelectSchema: ("UntitledMultiSelectEnumSchema",),
    forms.RequestedSchema: (
        "ElicitRequestFormParams/properties/requestedSchema",
        f"ElicitRequest{PARAMS}/properties/requestedSchema",
    ),
    forms.TitledEnumItems: ("TitledMultiSelectEnumSchema/properties/items",),
    forms.TitledEnumSchema: ("TitledSingleSelectEnumSchema",),
}
# Members of the schemas that the models keep as unknown fields: those of tasks, and `$schema`, which is for the peer.
UNMODELLED = {"task", "tasks", "$schema"}
# The schemas before 2025-11-25 allow metadata on all parameters in one place, and do not repeat it.
UNLISTED = {"_meta"}


# Two oversights of the schemas, which contradict their text: 0.5 is a number, and null is JSON.
NUMBERS = '["string", "integer", "boolean"]'


class Schemas:
    def __init__(self, folder: Path, revision: Revision) -> None:
        written = json.dumps(json.loads((folder / "schema" / f"{revision}.json").read_text()))
        self.whole = json.loads(written.replace(NUMBERS, '["string", "number", "boolean"]'))
        self.key = "$defs" if "$defs" in self.whole else "definitions"
        self.definitions = self.whole[self.key]
        if "JSONValue" in self.definitions:
            self.definitions["JSONValue"]["anyOf"].append({"type": "null"})

    def at(self, place: str) -> Any:
        found = self.definitions
        for step in place.split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        return found

    def where(self, cls: type[Model]) -> str | None:
        return next((place for place in PLACES.get(cls, (cls.__name__,)) if self.at(place) is not None), None)

    @functools.cache  # noqa: B019
    def validator(self, place: str) -> Any:
        return jsonschema_rs.validator_for({**self.whole, "$ref": f"#/{self.key}/{place}"}, validate_formats=True)

    def check(self, place: str, instance: Any) -> None:
        self.validator(place).validate(instance)

    def check_model(self, revision: Revision, value: Model) -> None:
        written = codec.to_json(value, revision)
        place = self.where(type(value))
        assert place is not None
        if isinstance(value, forms.MultiSelectSchema):
            place = "MultiSelectEnumSchema"  # `where` names one of its two shapes, for its members
        if "RequestParams" in place and revision is LATEST:
            written = with_terms(written)
        self.check(place, written)


def with_terms(params: dict[str, Any]) -> dict[str, Any]:
    """The params as 2026-07-28 sends them: the session adds its terms."""
    return {**params, "_meta": {**params.get("_meta", {}), META_VERSION: LATEST.name, META_CLIENT_CAPABILITIES: {}}}


@pytest.fixture(scope="session")
def schemas(shared_schemas: Path) -> Mapping[str, Schemas]:
    return {name: Schemas(shared_schemas, revision) for name, revision in REVISIONS.items()}


@req("type-02")
@REVISION
def test_a_class_exists_in_the_revisions_whose_schema_has_it(
    schemas: Mapping[str, Schemas], revision: Revision
) -> None:
    schema = schemas[revision.name]
    unlike = {cls for cls in MODELS if exists(cls, revision) != (schema.where(cls) is not None)}
    # Before 2026-07-28 these were messages, and only the models of their parameters are used.
    assert unlike <= {models.CreateMessageRequest, models.ListRootsRequest, models.ElicitRequest}


@req("type-02", "type-04", "type-05", "type-06", "type-09", "type-10", "type-19", "type-21", "prog-14", "tool-38")
@EACH
def test_a_class_writes_exactly_the_members_that_its_schema_names(
    schemas: Mapping[str, Schemas], revision: Revision, cls: type[Model]
) -> None:
    schema = schemas[revision.name].at(schemas[revision.name].where(cls) or "")
    ignored = UNMODELLED | (UNLISTED if cls.__name__.endswith("Params") else set())
    written = codec.to_json(build(cls, revision, Fixed(full=True)), revision)
    assert written.keys() - ignored == schema.get("properties", {}).keys() - ignored


@req("type-01", "type-03", "type-09")
@pytest.mark.parametrize("full", [False, True], ids=["minimal", "maximal"])
@EACH
def test_a_written_model_is_valid(
    schemas: Mapping[str, Schemas], revision: Revision, cls: type[Model], full: bool
) -> None:
    schemas[revision.name].check_model(revision, build(cls, revision, Fixed(full=full)))


@req("type-01")
@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_any_written_model_is_valid(schemas: Mapping[str, Schemas], revision: Revision) -> None:
    @settings(max_examples=60, deadline=None)
    @given(instances(revision))
    def check(value: Model) -> None:
        schemas[revision.name].check_model(revision, value)

    check()


@req("type-01")
@REVISION
@pytest.mark.parametrize("sender", Role)
@pytest.mark.parametrize("full", [False, True], ids=["minimal", "maximal"])
def test_whole_requests_and_notifications_are_valid(
    schemas: Mapping[str, Schemas], revision: Revision, sender: Role, full: bool
) -> None:
    kind, choose = sender.value.title(), Fixed(full=full)
    for method in revision.requests[sender].keys() & codec.REQUESTS.keys():
        params = codec.to_json(one_of(codec.REQUESTS[method].params, revision, choose), revision)
        params = with_terms(params) if revision is LATEST else params
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        schemas[revision.name].check(f"{kind}Request", message)
    if sender is Role.SERVER:
        params = codec.to_json(build(models.LoggingMessageParams, revision, choose), revision)
        message = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        schemas[revision.name].check("ServerNotification", message)


# The examples of errors hold no models but these two members.
ERRORS = {"ParseError", "InternalError", "InvalidParamsError", "MethodNotFoundError", "UnsupportedProtocolVersionError"}
ERRORS |= {"HeaderMismatchError", "MissingRequiredClientCapabilityError"}


# Sessions read and write these, and no models hold them.
BY_SESSIONS = ("Initialize", "Discover", "SubscriptionsListen", "SubscriptionsAcknowledged", "SubscriptionFilter")
BY_SESSIONS += ("ClientCapabilities", "ServerCapabilities", "MissingRequiredClientCapability", "Progress", "Cancelled")
BY_SESSIONS += ("ToolListChanged", "PromptListChanged", "ResourceListChanged", "ResourceUpdated")


def model_in(kind: str, example: Any) -> tuple[codec.Shape, Any]:
    """The class that an example of `kind` is an instance of, and the part of it that is the instance."""
    if kind.endswith("Response"):
        return model_in(kind.removesuffix("Response"), example["result"])
    if kind == "InputRequests":
        return models.InputRequiredResult, {"resultType": "input_required", "inputRequests": example}
    if kind == "InputResponses":
        return models.RetryParams, {"inputResponses": example}
    if kind.endswith("Request"):
        return codec.REQUESTS[example["method"]].params, example.get("params", {})
    if kind == "LoggingMessageNotification":
        return models.LoggingMessageParams, example["params"]
    if kind == "NumberSchema":
        return forms.FieldSchema, example
    names = {"UntitledMultiSelectEnumSchema": "MultiSelectSchema", "TitledMultiSelectEnumSchema": "MultiSelectSchema"}
    names |= {"UntitledSingleSelectEnumSchema": "EnumSchema", "TitledSingleSelectEnumSchema": "TitledEnumSchema"}
    places = {place: cls for cls, some in PLACES.items() for place in some} | {cls.__name__: cls for cls in MODELS}
    return places.get(kind) or getattr(forms, names[kind]), example


@req("type-01")
def test_every_official_example_is_read_and_written_again(shared_schemas: Path) -> None:
    seen = set()
    for path in sorted((shared_schemas / "examples" / LATEST.name).glob("*/*.json")):
        kind, example = path.parent.name, json.loads(path.read_text())
        seen.add(kind)
        if kind in ERRORS or kind.startswith(BY_SESSIONS):
            continue
        shape, part = model_in(kind, example)
        value = codec.from_json(shape, part, strict=True)
        if isinstance(value, models.CacheableResult):
            part = {"ttlMs": 0, "cacheScope": "private", **part}  # one example has neither, and both are required
        assert codec.to_json(value, LATEST) == part, path
        # The raw data is not the reason: every member is modelled, and every kind is known.
        assert codec.to_json(without_raw_data(value), LATEST) == part, path
        assert "Unknown(" not in repr(value), path
    assert len(seen) == 88
