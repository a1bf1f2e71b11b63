"""Records behave like the classes that `attrs.frozen` makes."""

from __future__ import annotations

import copy
import pickle

import attrs
import pytest

from trio_mcp.core import Request, Response

# Programs use `attrs.frozen`; this decorator is for the messages of the core.
from trio_mcp.core.messages import record


@record
class Point:
    x: int
    y: float = 0.0
    seen: int = attrs.field(default=0, eq=False, repr=False)


@record
class Place(Point):
    name: str = ""


@record(kw_only=True)
class Named:
    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (Point(1, 2), Point(1, 2.0), True),
        (Point(1), Point(2), False),
        (Point(1), Point(1, 1), False),
        (Point(1), Point(1, seen=5), True),
        (Point(1), Place(1), False),
        (Place(1, name="a"), Place(1, name="a"), True),
        (Place(1, name="a"), Place(1, name="b"), False),
        (Point(1), (1, 0.0), False),
    ],
    ids=repr,
)
def test_records_are_equal_if_their_class_and_their_fields_are_equal(one: Point, other: object, equal: bool) -> None:
    assert (one == other, other == one) == (equal, equal)
    assert (one != other) is not equal
    assert (hash(one) == hash(other)) is equal
    assert len({one, other}) == (1 if equal else 2)


def test_a_record_shows_its_fields() -> None:
    assert repr(Place(1, 2.5, 3, "here")) == "Place(x=1, y=2.5, name='here')"
    assert repr(Request(7, "ping")) == "Request(id=7, method='ping', params={})"


def test_a_record_with_a_dict_has_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Response(1, {}))


def test_methods_that_a_class_defines_are_kept() -> None:
    assert repr(Named(name="x")) == "<x>"
    assert hash(Named(name="x")) == 7
    assert Named(name="x") == Named(name="y")
    with pytest.raises(TypeError):
        Named("x")  # type: ignore[misc]


def test_a_record_is_frozen_and_slotted() -> None:
    point = Point(1)
    for name in ("x", "z"):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(point, name, 2)
    assert not hasattr(point, "__dict__")


def test_the_functions_of_attrs_work_with_records() -> None:
    assert [field.name for field in attrs.fields(Place)] == ["x", "y", "seen", "name"]
    assert attrs.evolve(Place(1), name="there") == Place(1, name="there")
    match Place(1, 2.0):
        case Place(x, y):
            assert (x, y) == (1, 2.0)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_equals_its_record(again: object) -> None:
    place = Place(1, 2.0, name="here")
    assert callable(again)
    assert again(place) == place
