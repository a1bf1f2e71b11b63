"""Pages: cut and walked again, with the list changing in between, and with servers that never come to an end."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import Json, JsonObject, Limits, Pager, RemoteProtocolError, RequestError, UsageError, paginate


def same(item: str) -> str:
    return item


def walk(items: list[str], size: int | None) -> list[list[str]]:
    """Both ends together."""
    pages = []
    pager = Pager()
    while not pager.done:
        page, following = paginate(items, pager.params.get("cursor"), size, same)
        pages.append(list(page))
        pager.received({"items": page} if following is None else {"items": page, "nextCursor": following})
    return pages


# The server's side.


@req("page-11")
@given(st.lists(st.text(max_size=5), unique=True, max_size=12), st.integers(1, 5))
@settings(max_examples=100)
def test_a_walk_gives_every_item_once_in_order_and_no_page_too_long(items: list[str], size: int) -> None:
    items = [item.encode("utf-8", "ignore").decode() for item in items]
    items = list(dict.fromkeys(items))
    pages = walk(items, size)
    assert [item for page in pages for item in page] == items
    assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)
    assert pages[-1] or not items  # the last cursor was not given in vain


def test_without_a_size_there_is_one_page() -> None:
    assert walk(["a", "b", "c"], None) == [["a", "b", "c"]]
    assert walk([], None) == [[]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_page_has_room_for_an_item(size: int) -> None:
    with pytest.raises(UsageError, match="the page size must be at least 1, got"):
        paginate(["a"], None, size, same)


@req("page-02")
def test_the_same_cursor_names_the_same_place() -> None:
    items = [str(at) for at in range(9)]
    _, cursor = paginate(items, None, 3, same)
    assert paginate(items, cursor, 3, same) == paginate(items, cursor, 3, same)
    assert paginate(items, cursor, 3, same)[0] == ["3", "4", "5"]
    assert paginate(items, cursor, None, same) == (["3", "4", "5", "6", "7", "8"], None)


@pytest.mark.parametrize(
    ("after", "rest"),
    [
        ("abcdef", "cdef"),
        ("bcdef", "cdef"),  # an item of an earlier page has gone
        ("acdef", "cdef"),  # the last item of that page has gone
        ("abdef", "def"),  # the first item of the next page has gone
        ("abcde", "cde"),
        ("xabcdef", "cdef"),  # an item has come earlier
        ("abxcdef", "xcdef"),  # or just there
        ("abcdefx", "cdefx"),
        ("ab", ""),
        ("cdef", "cdef"),
        ("b", ""),
    ],
)
def test_a_list_that_changes_in_between_is_continued_without_a_gap(after: str, rest: str) -> None:
    page, cursor = paginate("abcdef", None, 2, same)
    assert (page, cursor is None) == ("ab", False)
    assert paginate(after, cursor, None, same) == (rest, None)


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@req("page-03", "page-09")
@pytest.mark.parametrize(
    "cursor",
    [
        "",
        ".",
        "2",
        "page-2",
        encoded("b"),
        f"{encoded('b')}.{encoded('c')}.",
        f"{encoded('b')}.{encoded('c')}\n",
        f"{encoded('b')}.{encoded('c')}=",
        f"{encoded('x')}.{encoded('y')}",
        f"{encoded('b').rstrip('=')}.{encoded('c')}",
        f"{encoded('b')}.!!!",
        "é.é",
        "_w==._w==",  # no UTF-8
        7,
        ["a"],
        {},
        False,
    ],
)
def test_a_cursor_that_names_no_place_is_refused(cursor: Json) -> None:
    with pytest.raises(RequestError, match="list again") as caught:
        paginate("abcdef", cursor, 2, same)
    assert caught.value.code == -32602


def test_a_cursor_is_refused_when_both_its_neighbours_have_gone() -> None:
    _, cursor = paginate("abcdef", None, 2, same)
    with pytest.raises(RequestError, match="list has changed") as caught:
        paginate("adef", cursor, 2, same)
    assert caught.value.code == -32602


# The client's side.


@req("page-01", "page-05")
@pytest.mark.parametrize("sizes", [[3], [0], [2, 0, 5], [0, 0, 0], [1] * 20])
def test_pages_of_any_length_are_walked_to_the_end(sizes: list[int]) -> None:
    pager = Pager()
    asked = []
    for at, size in enumerate(sizes):
        assert not pager.done
        asked.append(pager.params)
        result: JsonObject = {"tools": [{}] * size}
        if at < len(sizes) - 1:
            result["nextCursor"] = str(at)
        pager.received(result)
    assert pager.done
    assert asked == [{}, *({"cursor": str(at)} for at in range(len(sizes) - 1))]


@req("page-04", "page-08")
@pytest.mark.parametrize(("result", "done"), [({}, True), ({"nextCursor": None}, True), ({"nextCursor": ""}, False)])
def test_only_an_absent_or_null_cursor_is_the_end(result: JsonObject, done: bool) -> None:
    pager = Pager()
    pager.received(result)
    assert pager.done is done
    if not done:
        assert pager.params == {"cursor": ""}


@req("page-06")
@given(st.text())
@settings(max_examples=50)
def test_a_cursor_is_sent_back_as_it_came(cursor: str) -> None:
    pager = Pager()
    pager.received({"nextCursor": cursor})
    assert pager.params == {"cursor": cursor}


def test_a_request_that_failed_may_be_made_again_with_the_same_params() -> None:
    pager = Pager()
    pager.received({"nextCursor": "x"})
    pager.params["cursor"] = "spoiled"
    assert pager.params == {"cursor": "x"}


@pytest.mark.parametrize("cursors", [["a", "a"], ["", ""], ["a", "b", "c", "a"], ["a", "b", "b"]])
def test_a_cursor_that_comes_back_ends_the_walk_with_blame(cursors: list[str]) -> None:
    pager = Pager()
    for cursor in cursors[:-1]:
        pager.received({"nextCursor": cursor})
    with pytest.raises(RemoteProtocolError, match="twice"):
        pager.received({"nextCursor": cursors[-1]})
    assert pager.done


def test_a_list_of_too_many_pages_ends_the_walk_with_blame() -> None:
    pager = Pager(Limits(pages=3))
    pager.received({"nextCursor": "1"})
    pager.received({"nextCursor": "2"})
    with pytest.raises(RemoteProtocolError, match="the server gave more than 3 pages of a list"):
        pager.received({"nextCursor": "3"})
    assert pager.done


def test_a_list_of_just_as_many_pages_as_allowed_is_walked() -> None:
    pager = Pager(Limits(pages=3))
    for result in ({"nextCursor": "1"}, {"nextCursor": "2"}, {}):
        pager.received(result)
    assert pager.done


@pytest.mark.parametrize("cursor", [0, 1, False, [], {}, 1.5])
def test_a_cursor_that_is_no_string_ends_the_walk_with_blame(cursor: Json) -> None:
    pager = Pager()
    with pytest.raises(RemoteProtocolError, match="nextCursor must be a string"):
        pager.received({"nextCursor": cursor})
    assert pager.done


@req("page-07")
def test_a_walk_that_has_ended_keeps_no_cursor() -> None:
    pager = Pager()
    pager.received({"nextCursor": "x"})
    pager.received({})
    with pytest.raises(UsageError, match="new Pager"):
        _ = pager.params
    with pytest.raises(UsageError, match="new Pager"):
        pager.received({})
