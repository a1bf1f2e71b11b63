"""`ReturnType` converts the result of a tool to a type; `KnownTools` keeps the listed tools."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, Optional, Union

import pytest

from tests.requirements import req
from trio_mcp import RequestError, UsageError
from trio_mcp.client import KnownTools, ReturnType, ToolFailed
from trio_mcp.core import (
    ABSENT,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    Tool,
)
from trio_mcp.core.schema import Field
from trio_mcp.errors import RemoteProtocolError, SessionClosed


@dataclass
class Point:
    x: int


@dataclass
class Boxed:
    result: int


class Colour(enum.Enum):
    RED = "red"


Name = NewType("Name", str)
BLOB = EmbeddedResource(BlobResourceContents("tool://t", blob=b"\x00\xff"))
DEEP = "[" * 200_000  # deeper than the parser can go


def shortly(value: Any) -> str:
    return str(value)[:40]


def result(*content: Any, structured: Any = ABSENT, **more: Any) -> CallToolResult:
    blocks = [TextContent(each) if isinstance(each, str) else each for each in content]
    return CallToolResult(blocks, structured_content=structured, **more)


def boxed(value: Any, *content: Any) -> CallToolResult:
    return result(*content, structured={"result": value})


@pytest.mark.parametrize(
    ("hint", "said", "value"),
    [
        # The official servers wrap each value that is not an object, and each union, into an object with one member.
        (int, boxed(3), 3),
        (int | None, boxed(3), 3),
        (Optional[int], boxed(None, "null"), None),  # noqa: UP045  # both ways to write it
        (Union[int, str], boxed("three"), "three"),  # noqa: UP007
        (str | None, boxed(None, "null"), None),
        (str | None, boxed("null", "null"), "null"),
        (Point | None, boxed({"x": 1}), Point(1)),
        (Point | Boxed, boxed({"result": 2}), Boxed(2)),
        (list[Point], boxed([{"x": 1}]), [Point(1)]),
        (None, boxed(None), None),
        # A value that fits the type is not unwrapped.
        (Boxed, boxed(3), Boxed(3)),
        (Point | Boxed, boxed(3), Boxed(3)),
        (dict[str, int], boxed(3), {"result": 3}),
        (Any, boxed(3), {"result": 3}),
        (int | dict[str, int], boxed(3), {"result": 3}),
        (int | None, result(structured=3), 3),
        (int | None, result(structured=None), None),
        # Without structured content.
        (None, result(), None),
        (type(None), result(), None),
        (int | None, result(), None),
        (str | None, result(), None),
        (str | None, result("abc"), "abc"),
        (str | None, result("null"), "null"),
        (Annotated[str, Field(description="a name")], result('"Ann"'), '"Ann"'),
        (Name, result("3"), "3"),
        (str, result("3", structured={"words": 1}), "3"),
        (int, result("3"), 3),
        (int | str, result("3"), 3),
        (int | str, result("three"), "three"),
        (Literal["a", "b"], result("a"), "a"),
        (Literal["a", "b"], result('"a"'), "a"),
        (Colour, result("red"), Colour.RED),
        (str | int, result(DEEP), DEEP),
        (bytes, result(BLOB), b"\x00\xff"),
        (bytes | None, result(BLOB), b"\x00\xff"),
        (bytes | None, result(), None),
        (bytes, result(ImageContent(b"\x89", "image/png")), b"\x89"),
        (bytes, result(AudioContent(b"\x01", "audio/wav")), b"\x01"),
        (bytes, result('"AP8="'), b"\x00\xff"),
        (bytes, result(BLOB, structured="AA=="), b"\x00"),
    ],
    ids=shortly,
)
def test_a_result_is_converted_to_the_type_from_each_place_in_a_result(
    hint: Any, said: CallToolResult, value: Any
) -> None:
    assert ReturnType(hint).value("t", said) == value


@pytest.mark.parametrize(
    ("hint", "said", "why"),
    [
        (int, boxed("three"), "does not fit `returns`"),
        (Point, boxed({"y": 1}), "does not fit `returns`"),
        (int, result(structured={"result": 3, "more": 1}), "does not fit"),
        (int, result("3", structured="x"), "does not fit"),
        (int, result("three"), "call the tool without `returns` to see its content"),
        (int, result("NaN"), "to see its content"),
        (float, result("Infinity"), "to see its content"),
        (list, result("[NaN]"), "to see its content"),
        (int, result(DEEP), "to see its content"),
        (int, result(), "to see its content"),
        (None, result("done"), "to see its content"),
        (str, result("a", "b"), "to see its content"),
        (str, result(BLOB), "to see its content"),
        (bytes, result(EmbeddedResource(TextResourceContents("tool://t", text="a"))), "to see its content"),
        (bytes, result("?"), "cannot be read"),
    ],
    ids=shortly,
)
@req("tool-08")
def test_a_result_that_does_not_fit_the_type_is_an_error_with_advice(hint: Any, said: CallToolResult, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        ReturnType(hint).value("t", said)


def test_a_failed_tool_raises_instead_of_a_value() -> None:
    with pytest.raises(ToolFailed, match="out of bread"):
        ReturnType(str).value("t", result("out of bread", is_error=True))


@pytest.mark.parametrize("hint", [[int], object(), {int: str}, lambda: None])
def test_an_invalid_type_is_refused(hint: Any) -> None:
    with pytest.raises(UsageError, match="returns"):
        ReturnType(hint)


async def test_tools_are_listed_once_until_the_list_may_have_changed() -> None:
    known, listings = KnownTools(lambda why: None), list[int]()

    async def list_tools() -> None:
        listings.append(len(listings))
        known.add([Tool("listed", {"type": "object"})], mirroring=False)

    for name in ("listed", "unlisted", "unlisted", "another"):
        await known.ensure_listed(name, list_tools)
    assert len(listings) == 1
    known.forget()
    for name in ("unlisted", "listed"):
        await known.ensure_listed(name, list_tools)
    assert len(listings) == 2


async def test_a_list_that_changes_while_it_is_read_is_read_again() -> None:
    known, listings = KnownTools(lambda why: None), list[int]()

    async def list_tools() -> None:
        listings.append(len(listings))
        if len(listings) == 1:
            known.forget()

    for _ in range(3):
        await known.ensure_listed("unlisted", list_tools)
    assert len(listings) == 2


@pytest.mark.parametrize(
    "error", [RequestError(-32603, "no list"), RemoteProtocolError("no list"), SessionClosed("no list")]
)
async def test_tools_can_be_called_if_listing_them_fails(error: Exception) -> None:
    mistakes: list[str] = []
    known, listings = KnownTools(mistakes.append), list[int]()

    async def list_tools() -> None:
        listings.append(len(listings))
        raise error

    for _ in range(2):
        await known.ensure_listed("t", list_tools)
    assert len(listings) == 2  # the next attempt may succeed
    assert all("listing the tools failed" in each and "no list" in each for each in mistakes)
    assert len(mistakes) == 2


async def test_a_usage_error_during_the_listing_of_tools_is_raised() -> None:
    async def list_tools() -> None:
        raise UsageError("the function given as headers raised an exception")

    with pytest.raises(UsageError):
        await KnownTools(lambda why: None).ensure_listed("t", list_tools)
