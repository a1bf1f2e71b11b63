"""How much of the peer's words a message of ours repeats."""

from __future__ import annotations

from typing import Any

import pytest

from trio_mcp.core.errors import ResourceNotFound, printable, shown


@pytest.mark.parametrize("value", ["", "it's", "two\nlines", "x" * 78, 7, None, True, 1.5, [1, "x"], {"a": {}}])
def test_what_is_short_is_shown_whole_and_on_one_line(value: Any) -> None:
    assert shown(value) == repr(value)
    assert len(shown(value).splitlines()) == 1


@pytest.mark.parametrize(
    "value", ["x" * 79, "\n" * 79, "\U000e0001" * 9, "x" * 10**7, 10**80, [0] * 1000, {"x" * 99: 1}]
)
@pytest.mark.parametrize("limit", [80, 20])
def test_what_is_long_is_cut_to_the_limit(value: Any, limit: int) -> None:
    assert len(shown(value, limit)) == limit
    assert shown(value, limit) == repr(value)[: limit - 3] + "..."


def test_what_is_not_there_is_named_in_few_words_and_whole_in_the_data() -> None:
    uri = "notes://" + "x" * 1000
    error = ResourceNotFound(uri)
    assert error.data == {"uri": uri}
    assert len(error.message) < 300
    assert error.message.startswith("Resource not found: 'notes://xxx")
    assert ResourceNotFound(uri, "gone").message == "gone"


def test_a_line_of_another_program_cannot_move_the_cursor() -> None:
    assert printable("a\tb\x1b[2Jc\x00") == "a\tb\ufffd[2Jc\ufffd"
