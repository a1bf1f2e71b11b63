"""Signatures that show the options of another function, or of a TypedDict."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict

from trio_mcp.core import show_options


class Options(TypedDict, total=False):
    name: str
    size: int | None


def test_the_keys_of_a_typed_dict_are_keywords() -> None:
    def draw(target: str, **options: Any) -> None: ...

    assert show_options(draw, Options) is draw
    shown = "(target: 'str', *, name: 'str' = ..., size: 'int | None' = ...) -> 'None'"
    assert str(inspect.signature(draw)) == shown


def test_the_keywords_of_a_function_are_shown_with_their_defaults() -> None:
    def made(target: str, *, name: str = "x", size: int) -> None: ...

    def draw(**options: Any) -> None: ...

    show_options(draw, made)
    assert str(inspect.signature(draw)) == "(*, name: 'str' = 'x', size: 'int') -> 'None'"
