"""Errors: their messages, how much of the peer's text and of a secret they show, and copies of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from trio_mcp.core import (
    INVALID_PARAMS,
    ConnectionFailed,
    InputUnavailable,
    McpError,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    ResourceNotFound,
    UsageError,
    check_amount,
    check_seconds,
    name_of,
    printable,
    redacted,
    repeated,
    shown,
)


@pytest.mark.parametrize("value", ["", "it's", "two\nlines", "x" * 78, 7, None, True, 1.5, [1, "x"], {"a": {}}])
def test_a_short_value_is_shown_whole_and_on_one_line(value: Any) -> None:
    assert shown(value) == repr(value)
    assert len(shown(value).splitlines()) == 1


@pytest.mark.parametrize(
    "value", ["x" * 79, "\n" * 79, "\U000e0001" * 9, "x" * 10**7, 10**80, [0] * 1000, {"x" * 99: 1}]
)
@pytest.mark.parametrize("limit", [80, 20])
def test_a_long_value_is_cut_to_the_limit(value: Any, limit: int) -> None:
    assert len(shown(value, limit)) == limit
    assert shown(value, limit) == repr(value)[: limit - 3] + "..."


def test_the_error_of_a_missing_resource_is_short_and_its_data_complete() -> None:
    uri = "notes://" + "x" * 1000
    error = ResourceNotFound(uri)
    assert error.data == {"uri": uri}
    assert len(error.message) < 300
    assert error.message.startswith("Resource not found: 'notes://xxx")
    assert ResourceNotFound(uri, "gone").message == "gone"


def test_a_line_of_another_program_cannot_move_the_cursor() -> None:
    assert printable("a\tb\x1b[2Jc\x00") == "a\tb\ufffd[2Jc\ufffd"


# Secrets.


@pytest.mark.parametrize(
    ("text", "secrets", "safe"),
    [
        ("the token is abcdefgh", ["abcdefgh"], "the token is [secret]"),
        ("nabcdefgh9", ["abcdefgh"], "n[secret]9"),  # a long secret is replaced inside a word
        ("a=abcd&b=abcd", ["abcd"], "a=[secret]&b=[secret]"),
        ("abcdef xabcd abcd9 abcd", ["abcd"], "abcdef xabcd abcd9 [secret]"),  # a short one only as a word
        ("a.cd abcd", ["a.cd"], "[secret] abcd"),  # a secret is not a pattern
        ("abc", ["abc", "", None], "abc"),  # ordinary words have three letters, too
        ("abcdefgh 12345678", ["abcdefgh", None, "12345678"], "[secret] [secret]"),
    ],
)
def test_secrets_are_replaced_in_a_text(text: str, secrets: list[str | None], safe: str) -> None:
    assert redacted(text, secrets) == safe


# Messages and attributes.


def test_an_error_names_the_missing_feature_and_the_alternative() -> None:
    error = NotInThisRevision("tasks/get", "2025-06-18")
    assert str(error) == "tasks/get does not exist in 2025-06-18"
    assert (error.method, error.revision, error.use) == ("tasks/get", "2025-06-18", "")
    assert str(NotInThisRevision("ping", "2026-07-28", "a list")) == "ping does not exist in 2026-07-28; use a list"
    undeclared = NotDeclared("elicitation/create", "client", ("elicitation", "url"))
    assert str(undeclared) == ("elicitation/create needs the client capability elicitation.url, which was not declared")
    assert (undeclared.method, undeclared.owner) == ("elicitation/create", "client")
    assert undeclared.capability == ("elicitation", "url")


def test_an_error_of_a_request_shows_its_code() -> None:
    error = RequestError(INVALID_PARAMS, "no such tool", {"name": "x"})
    assert str(error) == "no such tool (-32602)"
    assert (error.code, error.message, error.data) == (INVALID_PARAMS, "no such tool", {"name": "x"})


def test_an_input_that_was_not_given_is_named_unless_there_is_a_reason() -> None:
    error = InputUnavailable("tools/call", "k" * 100)
    assert str(error) == (
        f"tools/call was not completed: the server asked for input {shown('k' * 100)}, and none was given"
    )
    assert (error.method, error.key) == ("tools/call", "k" * 100)
    assert str(InputUnavailable("tools/call", "k", "no user is there")) == (
        "tools/call was not completed: no user is there"
    )


# Copies of an error.


def errors() -> list[McpError]:
    failed = ConnectionFailed("no route")
    failed.__cause__ = OSError("down")
    alone = UsageError("alone")
    alone.__suppress_context__ = True
    return [
        failed,
        alone,
        RemoteProtocolError("bad"),
        RequestError(INVALID_PARAMS, "wrong", [1]),
        ResourceNotFound("a://b"),
        InputUnavailable("tools/call", "key"),
        NotDeclared("roots/list", "client", ("roots",)),
    ]


@pytest.mark.parametrize("error", errors(), ids=lambda error: type(error).__name__)
def test_a_copy_of_an_error_has_everything_except_its_traceback(error: McpError) -> None:
    with pytest.raises(McpError):
        raise error
    one, other = repeated(error), repeated(error)
    assert one is not error
    assert one is not other
    assert type(one) is type(error)
    assert (str(one), one.args, vars(one)) == (str(error), error.args, vars(error))
    assert one.__cause__ is error.__cause__
    assert one.__suppress_context__ is error.__suppress_context__
    assert error.__traceback__ is not None
    assert one.__traceback__ is None


def test_a_change_of_one_copy_does_not_reach_the_others() -> None:
    error = RequestError(INVALID_PARAMS, "wrong")
    one, other = repeated(error), repeated(error)
    vars(one)["code"] = 0
    assert vars(other)["code"] == INVALID_PARAMS


# Names of functions.


class Callback:
    def __call__(self) -> None: ...

    def read(self) -> None: ...


def partial_of_partial() -> Callable[..., object]:
    inner = functools.partial(Callback().read)
    inner.label = "x"  # type: ignore[attr-defined]  # without an attribute of its own, Python would merge the two
    return functools.partial(inner)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (shown, "shown"),
        (len, "len"),
        (Callback, "Callback"),
        (Callback().read, "Callback.read"),
        (lambda: None, "<lambda>"),
        (functools.partial(shown, 1), "shown"),
        (partial_of_partial(), "Callback.read"),
        (Callback(), "an object of Callback"),
        (functools.partial(Callback()), "an object of Callback"),
        (3, "an object of int"),
    ],
)
def test_a_function_is_named_by_its_definition(function: Callable[..., object], name: str) -> None:
    assert name_of(function) == name


# Numbers of seconds.


@pytest.mark.parametrize("seconds", [0, 0.0, 1, 0.5, math.inf])
def test_a_number_of_at_least_zero_is_a_number_of_seconds(seconds: float) -> None:
    check_seconds("timeout", seconds)


@pytest.mark.parametrize("seconds", [-1, -0.5, -math.inf, math.nan, True, "10", None, [1], 1j])
def test_other_values_are_refused_as_a_number_of_seconds(seconds: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_seconds("timeout", seconds)
    assert str(caught.value) == f"timeout must be a number of seconds, 0 or more, got {seconds!r}"


def test_a_number_may_be_required_to_be_finite_or_to_count_bytes() -> None:
    check_seconds("pause", 0.5, finite=True)
    with pytest.raises(UsageError, match="pause must be a number of seconds, 0 or more, got inf"):
        check_seconds("pause", math.inf, finite=True)
    with pytest.raises(UsageError, match="size must be a number of bytes, 0 or more, got -1"):
        check_amount("size", -1, "bytes")
