"""Lists in pages, on the server and on the client.

A server cuts a list into pages with `paginate`; a client requests them one after another with `Pager`.  To the client a
cursor is opaque: it sends the string back unchanged.  Only this module knows the format of the server's cursors.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from trio_mcp.core.errors import INVALID_PARAMS, RemoteProtocolError, RequestError, UsageError
from trio_mcp.core.jsonrpc import Json, JsonObject, Limits

__all__ = ["Pager", "paginate"]

T = TypeVar("T")


def paginate(
    items: Sequence[T], cursor: Json, size: int | None, key: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """Return one page of `items`, and the cursor of the next page or None.

    A page has at most `size` items; None means all that follow.  `cursor` is the value that the client sent, or None
    for the first page; an empty string is an invalid cursor.  `key` returns the name of an item, which must be unique.

    page-02, page-11: a cursor is not an index: it names the two items before and after it, so the list may change
    between two pages.  While one of the two items is still in the list, no item is skipped or repeated.  If both are
    gone, or the cursor is invalid, this raises RequestError -32602 (page-09).  Silently starting again (page-03) or
    guessing would give the client a list that never existed.
    """
    if size is not None and size < 1:
        raise UsageError(f"the page size must be at least 1, got {size}")
    start = 0 if cursor is None else _find(items, cursor, key)
    end = len(items) if size is None else start + size
    if end >= len(items):
        return items[start:], None
    return items[start:end], f"{_encode(key(items[end - 1]))}.{_encode(key(items[end]))}"


def _find(items: Sequence[T], cursor: Json, key: Callable[[T], str]) -> int:
    try:
        last, following = (_decode(part) for part in cursor.split("."))
    except (AttributeError, ValueError):  # not a string, or not a cursor of `paginate`
        raise RequestError(INVALID_PARAMS, "the cursor is not from this server; list again without a cursor") from None
    indexes = {key(item): index for index, item in enumerate(items)}
    if last in indexes:
        return indexes[last] + 1
    if following in indexes:
        return indexes[following]
    raise RequestError(INVALID_PARAMS, "the list has changed around the cursor; list again without a cursor")


def _encode(key: str) -> str:
    return urlsafe_b64encode(key.encode()).decode()


def _decode(part: str) -> str:
    key = urlsafe_b64decode(part).decode()
    if _encode(key) != part:  # the decoder skips invalid characters
        raise ValueError(part)
    return key


class Pager:
    """Requests the pages of one list, from the first to the last.

    Send a request with `params`, pass its result to `received`, and repeat until `done`.  A failed request may be sent
    again with the same `params`.  A pager always begins with the first page, and its cursor ends with it: cursors are
    not kept for another time or another session (page-07).

    page-01: a page may have any length, even 0; only `nextCursor` tells whether another page follows.
    """

    def __init__(self, params: Mapping[str, Json] | None = None, limits: Limits | None = None) -> None:
        self._params = dict(params or {})
        if "cursor" in self._params:
            raise UsageError("a Pager begins at the first page: the params must not have a cursor")
        self._max_pages = (limits or Limits()).pages
        self._seen: set[int] = set()  # hashes, because a cursor can be as long as a message
        self.done = False

    @property
    def params(self) -> JsonObject:
        """The params of the next request."""
        if self.done:
            raise UsageError("the last page has been received; make a new Pager to list again")
        return dict(self._params)

    def received(self, result: JsonObject) -> None:
        """Process a page.  Raises RemoteProtocolError if the list does not end; the pager is then done."""
        if self.done:
            raise UsageError("the last page has been received; make a new Pager to list again")
        # page-08: "Don't make any determination based on cursor value other than whether a non-null value was
        # provided".  A repeated cursor means an endless list; comparing it does not interpret it.
        cursor = result.get("nextCursor")
        self.done = cursor is None
        if self.done:
            return
        why = None
        if not isinstance(cursor, str):
            why = f"nextCursor must be a string, not {type(cursor).__name__}"
        elif hash(cursor) in self._seen:
            why = "the server gave the same nextCursor twice, so its list would never end"
        elif len(self._seen) + 1 >= self._max_pages:
            why = f"the list has more than {self._max_pages} pages (Limits.pages)"
        if why is not None:
            self.done = True
            raise RemoteProtocolError(why)
        self._seen.add(hash(cursor))
        self._params["cursor"] = cursor
