"""Signatures that show the options of another function, or of a TypedDict."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypedDict

import pytest

from trio_mcp.core import Icon, Limits, UsageError, check_options, show_options


class Options(TypedDict, total=False):
    name: str
    size: int | None


def test_the_keys_of_a_typed_dict_are_keywords() -> None:
    def draw(target: str, **options: Any) -> None: ...

    assert show_options(draw, Options) is draw
    shown = "(target: 'str', *, name: 'str' = ..., size: 'int | None' = ...) -> 'None'"
    assert str(inspect.signature(draw)) == shown


class Checked(TypedDict, total=False):
    title: str | None
    on: bool
    meta: Mapping[str, Any] | None
    hook: Callable[[str], Awaitable[str | None]]
    limits: Limits | None
    icons: Sequence[Icon] | None
    names: Sequence[str]
    size: int


@pytest.mark.parametrize(
    "given",
    [
        {
            "title": "x",
            "on": False,
            "meta": {},
            "hook": print,
            "limits": Limits(),
            "icons": [],
            "names": 3,
            "size": "x",
        },
        {"title": None, "meta": None, "limits": None, "icons": (Icon("https://example.com/i.png"),)},
        {},
    ],
)
def test_options_of_the_right_types_pass(given: Any) -> None:
    check_options(given, Checked)
    check_options(given, Checked, "the tool 'x'")


@pytest.mark.parametrize(
    ("given", "why", "of_an_owner"),
    [
        ({"title": 1}, "title must be text, got int", "the title of a tool must be text, not int"),
        ({"on": "x"}, "on must be True or False, got 'x'", "the on of a tool must be True or False, not 'x'"),
        ({"meta": "x"}, "meta must be a mapping, got str", "the meta of a tool must be a mapping, not str"),
        (
            {"hook": None},
            "hook must be a function, got NoneType",
            "the hook of a tool must be a function, not NoneType",
        ),
        (
            {"limits": {}},
            "limits must be a Limits object, got dict",
            "the limits of a tool must be a Limits object, not",
        ),
        ({"icons": "x"}, "icons must be a list of Icon objects", "the icons of a tool must be a list of Icon objects"),
        ({"icons": [1]}, "icons must be a list of Icon objects", "the icons of a tool must be a list of Icon objects"),
        ({"icons": 1}, "icons must be a list of Icon objects", "the icons of a tool must be a list of Icon objects"),
    ],
)
def test_an_option_of_another_type_is_refused(given: Any, why: str, of_an_owner: str) -> None:
    with pytest.raises(UsageError, match=f"^{why}$"):
        check_options(given, Checked)
    with pytest.raises(UsageError, match=f"^{of_an_owner}"):
        check_options(given, Checked, "a tool")


def test_an_unknown_option_is_a_type_error_that_names_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"^unknown option 'nam'; the options are name, size$"):
        check_options({"nam": "x"}, Options)
