"""Pages of lists: cutting and reading them, lists that change in between, and servers with endless pages."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import Json, JsonObject, Limits, Pager, RemoteProtocolError, RequestError, UsageError, paginate


def key_of(item: str) -> str:
    return item


def walk(items: list[str], size: int | None) -> list[list[str]]:
    """Read all pages: the client's side and the server's side together."""
    pages = []
    pager = Pager()
    while not pager.done:
        page, following = paginate(items, pager.params.get("cursor"), size, key_of)
        pages.append(list(page))
        pager.received({"items": page} if following is None else {"items": page, "nextCursor": following})
    return pages


# The server's side.


@req("page-11")
@given(st.lists(st.text(max_size=5), unique=True, max_size=12), st.integers(1, 5))
@settings(max_examples=100)
def test_the_pages_have_each_item_once_in_order(items: list[str], size: int) -> None:
    items = [item.encode("utf-8", "ignore").decode() for item in items]
    items = list(dict.fromkeys(items))
    pages = walk(items, size)
    assert [item for page in pages for item in page] == items
    assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)
    assert pages[-1] or not items  # no cursor leads to an empty page


def test_without_a_size_there_is_one_page() -> None:
    assert walk(["a", "b", "c"], None) == [["a", "b", "c"]]
    assert walk([], None) == [[]]


@pytest.mark.parametrize("size", [0, -1])
def test_the_page_size_must_be_at_least_1(size: int) -> None:
    with pytest.raises(UsageError, match="the page size must be at least 1, got"):
        paginate(["a"], None, size, key_of)


@req("page-02")
def test_the_same_cursor_names_the_same_place() -> None:
    items = [str(at) for at in range(9)]
    _, cursor = paginate(items, None, 3, key_of)
    assert paginate(items, cursor, 3, key_of) == paginate(items, cursor, 3, key_of)
    assert paginate(items, cursor, 3, key_of)[0] == ["3", "4", "5"]
    assert paginate(items, cursor, None, key_of) == (["3", "4", "5", "6", "7", "8"], None)


@pytest.mark.parametrize(
    ("after", "rest"),
    [
        ("abcdef", "cdef"),
        ("bcdef", "cdef"),  # an item of an earlier page was removed
        ("acdef", "cdef"),  # the last item of that page was removed
        ("abdef", "def"),  # the first item of the next page was removed
        ("abcde", "cde"),
        ("xabcdef", "cdef"),  # an item was added before
        ("abxcdef", "xcdef"),  # an item was added exactly there
        ("abcdefx", "cdefx"),
        ("ab", ""),
        ("cdef", "cdef"),
        ("b", ""),
    ],
)
def test_a_list_that_changes_is_continued_without_a_gap(after: str, rest: str) -> None:
    page, cursor = paginate("abcdef", None, 2, key_of)
    assert (page, cursor is None) == ("ab", False)
    assert paginate(after, cursor, None, key_of) == (rest, None)


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
        "_w==._w==",  # not UTF-8
        7,
        ["a"],
        {},
        False,
    ],
)
def test_an_invalid_cursor_is_refused(cursor: Json) -> None:
    with pytest.raises(RequestError, match="list again") as caught:
        paginate("abcdef", cursor, 2, key_of)
    assert caught.value.code == -32602


def test_a_cursor_is_refused_when_both_its_neighbours_were_removed() -> None:
    _, cursor = paginate("abcdef", None, 2, key_of)
    with pytest.raises(RequestError, match="list has changed") as caught:
        paginate("adef", cursor, 2, key_of)
    assert caught.value.code == -32602


# The client's side.


@req("page-01", "page-05")
@pytest.mark.parametrize("sizes", [[3], [0], [2, 0, 5], [0, 0, 0], [1] * 20])
def test_pages_of_any_length_are_read_to_the_end(sizes: list[int]) -> None:
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
def test_a_cursor_is_sent_back_unchanged(cursor: str) -> None:
    pager = Pager()
    pager.received({"nextCursor": cursor})
    assert pager.params == {"cursor": cursor}


def test_a_request_that_failed_may_be_made_again_with_the_same_params() -> None:
    pager = Pager()
    pager.received({"nextCursor": "x"})
    pager.params["cursor"] = "spoiled"
    assert pager.params == {"cursor": "x"}


@pytest.mark.parametrize("cursors", [["a", "a"], ["", ""], ["a", "b", "c", "a"], ["a", "b", "b"]])
def test_a_repeated_cursor_is_an_error_of_the_server(cursors: list[str]) -> None:
    pager = Pager()
    for cursor in cursors[:-1]:
        pager.received({"nextCursor": cursor})
    with pytest.raises(RemoteProtocolError, match="twice"):
        pager.received({"nextCursor": cursors[-1]})
    assert pager.done


def test_too_many_pages_are_an_error_of_the_server() -> None:
    pager = Pager(Limits(pages=3))
    pager.received({"nextCursor": "1"})
    pager.received({"nextCursor": "2"})
    with pytest.raises(RemoteProtocolError, match="the server gave more than 3 pages of a list"):
        pager.received({"nextCursor": "3"})
    assert pager.done


def test_the_largest_allowed_number_of_pages_is_read() -> None:
    pager = Pager(Limits(pages=3))
    for result in ({"nextCursor": "1"}, {"nextCursor": "2"}, {}):
        pager.received(result)
    assert pager.done


@pytest.mark.parametrize("cursor", [0, 1, False, [], {}, 1.5])
def test_a_cursor_that_is_not_a_string_is_an_error_of_the_server(cursor: Json) -> None:
    pager = Pager()
    with pytest.raises(RemoteProtocolError, match="nextCursor must be a string"):
        pager.received({"nextCursor": cursor})
    assert pager.done


@req("page-07")
def test_a_finished_pager_cannot_be_used_again() -> None:
    pager = Pager()
    pager.received({"nextCursor": "x"})
    pager.received({})
    with pytest.raises(UsageError, match="new Pager"):
        _ = pager.params
    with pytest.raises(UsageError, match="new Pager"):
        pager.received({})
