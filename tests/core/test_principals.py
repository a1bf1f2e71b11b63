"""The holders of access tokens, and the allowed scopes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.requirements import req
from trio_mcp.core import Principal, UsageError, declared_scopes, has_scopes, name_of_principal


def test_a_principal_shows_its_name_and_scopes_and_no_claims() -> None:
    principal = Principal("ada", ["read"], 7.0, {"email": "ada@example.com"})
    assert repr(principal) == "Principal(name='ada', scopes=frozenset({'read'}), expires=7.0)"
    assert principal == Principal("ada", {"read"}, 7.0, {"email": "ada@example.com"})


def test_the_name_of_a_principal_without_a_token_is_the_principal() -> None:
    assert [name_of_principal(each) for each in (Principal("ada"), "ada", None)] == ["ada", "ada", None]


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_principal_must_have_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match="name of a principal must be a str"):
        Principal(name)


def test_half_a_surrogate_pair_is_refused_in_a_name() -> None:
    """A store cannot write it."""
    with pytest.raises(UsageError, match=r"must be Unicode text, got '\\ud800'"):
        Principal("\ud800")


@pytest.mark.parametrize("scopes", ["read write", [7]])
def test_the_scopes_of_a_principal_must_be_a_list_of_names(scopes: Any) -> None:
    with pytest.raises(UsageError, match="list of names"):
        Principal("ada", scopes)


@pytest.mark.parametrize("expires", ["2030-01-01", math.nan, True])
def test_the_expiry_of_a_token_must_be_a_time(expires: Any) -> None:
    with pytest.raises(UsageError, match="seconds since 1970"):
        Principal("ada", (), expires)
    assert Principal("ada", (), math.inf).expires == math.inf


@pytest.mark.parametrize(
    ("holder", "needed", "good"),
    [
        (None, [], True),
        (None, ["read"], False),
        ("ada", ["read"], False),
        (Principal("ada"), [], True),
        (Principal("ada", ["read"]), ["read"], True),
        (Principal("ada", ["read"]), ["read", "write"], False),
    ],
)
def test_a_principal_needs_all_scopes(holder: object, needed: list[str], good: bool) -> None:
    assert has_scopes(holder, needed) is good


def test_declared_scopes_are_kept_in_order_and_once() -> None:
    assert declared_scopes("scopes", ["b", "a", "b"]) == ("b", "a")


@req("auth-110")
@pytest.mark.parametrize("scopes", ["read", ["a b"], [""], ['"'], ["\\"], ["é"], [7], ["read", "offline_access"]])
def test_some_scopes_cannot_be_declared(scopes: Any) -> None:
    with pytest.raises(UsageError, match=r"^the scopes must (be a list|not contain)"):
        declared_scopes("the scopes", scopes)
