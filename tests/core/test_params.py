"""The params and results of methods of extensions, which are read by the annotations of a function."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

import pytest

from trio_mcp.core import JsonObject, RemoteProtocolError, UsageError
from trio_mcp.core.schema import MethodParams, read_result, write_object_of


@dataclass
class Pong:
    target: str
    times: int = 1


class Colour(Enum):
    RED = "red"


class PingParams(TypedDict):
    target: str


def by_name(target: str, colour: Colour = Colour.RED) -> None: ...


def by_class(params: Pong) -> None: ...


def by_mapping(params: dict[str, Any]) -> None: ...


def by_typed_dict(params: PingParams) -> None: ...


def by_two(params: int, other: int = 0) -> None: ...


def without() -> None: ...


@pytest.mark.parametrize(
    ("function", "params", "read"),
    [
        (by_name, {"target": "moon", "colour": "red"}, {"target": "moon", "colour": Colour.RED}),
        (by_name, {"target": "moon", "later": 1, "_meta": {}}, {"target": "moon"}),
        (by_class, {"target": "moon", "later": 1, "_meta": {}}, {"params": Pong("moon")}),
        (by_mapping, {"any": 1, "_meta": {}}, {"params": {"any": 1}}),
        (by_typed_dict, {"target": "moon", "_meta": {}}, {"params": {"target": "moon"}}),
        (by_two, {"params": 1}, {"params": 1}),
        (by_two, {"params": 1.0}, {"params": 1}),
        (without, {"any": 1}, {}),
    ],
)
def test_params_are_read_for_a_function(function: Any, params: JsonObject, read: dict[str, Any]) -> None:
    assert MethodParams(function).read(params) == read


@pytest.mark.parametrize(
    ("function", "params", "why"),
    [
        (by_name, {"target": 1}, r"^params/target: "),
        (by_name, {}, r'^params: lacks the member "target"'),
        (by_class, {"target": "moon", "times": "2"}, r"^params/times: "),
    ],
)
def test_params_that_do_not_fit_are_refused(function: Any, params: JsonObject, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        MethodParams(function).read(params)


def test_a_parameter_that_the_program_passes_is_not_read_from_the_params() -> None:
    def handler(target: str, ctx: object) -> None: ...

    assert MethodParams(handler, {"ctx"}).read({"target": "moon", "ctx": 1}) == {"target": "moon"}


def test_a_parameter_without_a_schema_is_refused() -> None:
    def handler(params: object, more: type) -> None: ...

    with pytest.raises(UsageError, match="has no JSON form"):
        MethodParams(handler)


@dataclass
class OddNumber:
    """The constructor refuses values that the hints allow."""

    n: int

    def __post_init__(self) -> None:
        if not self.n % 2:
            raise ValueError("even")


def test_results_are_read_as_a_type() -> None:
    assert read_result(Pong, {"target": "moon", "resultType": "complete", "_meta": {}}) == Pong("moon")
    assert read_result(dict[str, int], {"a": 1, "resultType": "complete"}) == {"a": 1}
    with pytest.raises(RemoteProtocolError, match=r"^result/times: "):
        read_result(Pong, {"target": "moon", "times": None})
    with pytest.raises(RemoteProtocolError, match=r"^result: "):
        read_result(OddNumber, {"n": 2})


@pytest.mark.parametrize(
    ("value", "written"), [(None, {}), ({"a": 1}, {"a": 1}), (Pong("x"), {"target": "x", "times": 1})]
)
def test_an_object_is_written(value: object, written: JsonObject) -> None:
    assert write_object_of(value, "x") == written


@pytest.mark.parametrize("value", [1, "x", [1], True])
def test_a_result_that_is_not_an_object_is_refused(value: object) -> None:
    with pytest.raises(
        UsageError, match=f"^the result must be an object, such as a dict or a dataclass, got {type(value).__name__}$"
    ):
        write_object_of(value, "the result")
