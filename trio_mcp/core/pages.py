"""Lists in pages, from both ends.

A server cuts a list with `paginate`; a client walks one with `Pager`.  To the client a cursor is a string that it
sends back as it came; what is in ours is said here, and nobody else may know.
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
    """One page of `items`, at most `size` long (None: all the rest), and the cursor of the next page, if there is one.

    `cursor` is None for the first page, else whatever the client sent: an empty string is a cursor, and not one of
    ours.  `key` names an item; no two items may have the same.

    page-02, page-11: a cursor names the two items it stands between, not a number, so the list may change from page to
    page: what follows is found as long as one of the two is left, without a gap and without a repetition.  With both
    gone, or with a cursor that was never ours, the answer is RequestError -32602 (page-09), for to start again in
    silence (page-03) or to guess would give the client a list that never was.
    """
    if size is not None and size < 1:
        raise UsageError(f"a page holds at least one item; got a size of {size}")
    start = 0 if cursor is None else _find(items, cursor, key)
    end = len(items) if size is None else start + size
    if end >= len(items):
        return items[start:], None
    return items[start:end], f"{_hide(key(items[end - 1]))}.{_hide(key(items[end]))}"


def _find(items: Sequence[T], cursor: Json, key: Callable[[T], str]) -> int:
    try:
        last, following = (_reveal(part) for part in cursor.split("."))
    except (AttributeError, ValueError):  # not a string, or not of our making
        raise RequestError(INVALID_PARAMS, "the cursor is not one this server gave; list again without one") from None
    places = {key(item): at for at, item in enumerate(items)}
    if last in places:
        return places[last] + 1
    if following in places:
        return places[following]
    raise RequestError(INVALID_PARAMS, "the list has changed where the cursor points; list again without one")


def _hide(key: str) -> str:
    return urlsafe_b64encode(key.encode()).decode()


def _reveal(part: str) -> str:
    key = urlsafe_b64decode(part).decode()
    if _hide(key) != part:  # the decoder skips over what it does not know
        raise ValueError(part)
    return key


class Pager:
    """One walk over the pages of one list, from the first to the last.

    Ask with `params`, give the result to `received`, and go on until `done`.  A walk cannot begin in the middle, and
    its cursor goes with it: cursors are not kept for another time or another session (page-07).  A request that failed
    may be made again with the same `params`.

    page-01: a page may have any length, also none; only `nextCursor` tells whether another follows.
    """

    def __init__(self, params: Mapping[str, Json] | None = None, limits: Limits | None = None) -> None:
        self._params = dict(params or {})
        if "cursor" in self._params:
            raise UsageError("a walk begins at the first page: the params must not hold a cursor")
        self._most = (limits or Limits()).pages
        self._seen: set[int] = set()  # hashes, for a cursor may be as long as a message
        self.done = False

    @property
    def params(self) -> JsonObject:
        """The params of the next request."""
        if self.done:
            raise UsageError("the last page has been received; begin a new walk with a new Pager")
        return dict(self._params)

    def received(self, result: JsonObject) -> None:
        """Take note of a page.  Raises RemoteProtocolError where the walk would never end, which ends it."""
        if self.done:
            raise UsageError("the last page has been received; begin a new walk with a new Pager")
        # page-08: "Don't make any determination based on cursor value other than whether a non-null value was
        # provided".  That a cursor came back is no determination on its value, only the end of patience.
        cursor = result.get("nextCursor")
        self.done = cursor is None
        if self.done:
            return
        why = None
        if not isinstance(cursor, str):
            why = f"nextCursor must be a string, not {type(cursor).__name__}"
        elif hash(cursor) in self._seen:
            why = "the server gave the same nextCursor twice, so its list would never end"
        elif len(self._seen) + 1 >= self._most:
            why = f"the list has more than {self._most} pages (Limits.pages)"
        if why is not None:
            self.done = True
            raise RemoteProtocolError(why)
        self._seen.add(hash(cursor))
        self._params["cursor"] = cursor
