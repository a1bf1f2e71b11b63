"""Cached results and lists in pages, for both roles.

A server says for how long a list or resource is likely to stay the same (`ttlMs`) and whether every user may see it
(`cacheScope`).  `ResponseCache` keeps complete results for that long.  The key is the method, the params that affect
the result, and the principal; a result with the scope "public" is shared by all principals.  Every page of a list is
a separate entry.

Completions have no hints in any revision, and a client requests them with each key that a user presses.  They are kept
for `COMPLETION_SECONDS`, for one principal.

The cache never acts by itself, and never returns a stale result (cache-12: nothing is fetched in the background).  The
caller calls `get`, sends its request if `get` returns None, and passes every result to `store`, which refuses the
results that may not be cached.

Two things surprise:

- *A result can be stale before it arrives.*  On HTTP the notification of a change travels on another stream than the
  response, and can overtake it.  So `store` takes the number of changes that were known when the request was sent, and
  refuses a result that was overtaken.
- *Entries are bytes.*  A stored result is encoded, and each `get` decodes a fresh copy.  So a caller cannot change the
  results of other callers, the size is exact, and an idle cache holds no objects for the garbage collector to walk.

One cache belongs to one server.  The cache sees only the params of a request, not its headers and access token:
`principal` must stand for all of these.  It is a stable name: text that differs for each principal (a user id, not a
token), or None if there is only one.  Another value raises `UsageError`.

A server cuts a list into pages with `paginate`; a client requests them one after another with `Pager`.  To the client a
cursor is opaque: it sends the string back unchanged.  Only this module knows the format of the server's cursors.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import INVALID_PARAMS, RemoteProtocolError, RequestError, UsageError
from trio_mcp.core.messages import Json, JsonObject, Limits, record
from trio_mcp.core.revisions import META_CLIENT_INFO, META_LOG_LEVEL, Revision, stable_name

__all__ = [
    "COMPLETION_SECONDS", "MAX_BYTES", "MAX_ENTRIES", "MAX_TTL_MS", "CacheHints", "Pager", "ResponseCache", "paginate",
]  # fmt: skip

MAX_ENTRIES = 1024
"""Enough for the pages of every list of a large server, and a working set of resources.  If there are more, the least
recently used are dropped."""

MAX_BYTES = 32 * 1024 * 1024
"""Room for two messages of the largest size that a client accepts.  If there are more bytes, the least recently used
entries are dropped."""

MAX_TTL_MS = 365 * 24 * 60 * 60 * 1000
"""Longer than a process lives.  Without a limit, a number with a thousand digits, which JSON allows, would break the
arithmetic."""

COMPLETION_SECONDS = 10.0
"""A user who deletes a letter and types it again does so within seconds.  Files and branches, which servers complete,
change within minutes."""

_COMPLETE: Final = "completion/complete"

# The methods with stale results after a notification (cache-19).  Completions are for arguments of prompts and of
# templates.
_STALE: Mapping[str, tuple[str, ...]] = {
    "notifications/tools/list_changed": ("tools/list",),
    "notifications/prompts/list_changed": ("prompts/list", _COMPLETE),
    "notifications/resources/list_changed": ("resources/list", "resources/templates/list", _COMPLETE),
}
_UPDATED = "notifications/resources/updated"

# Request metadata that cannot affect a result.  Other metadata (such as a tenant) is part of the key: "Clients MUST NOT
# serve a cached response for a request whose method or parameters differ".
_UNUSED_META = frozenset({"progressToken", "traceparent", "tracestate", "baggage", META_CLIENT_INFO, META_LOG_LEVEL})

_Owner: TypeAlias = tuple[Literal["private", "public"], str | None]
_Key: TypeAlias = tuple[str, str, _Owner]  # method, canonical params, owner
_PUBLIC: _Owner = ("public", None)


@record
class _CacheEntry:
    body: bytes
    stale_at: float
    uri: str  # of the resource that was read, so that an update can find the entry; empty for a list


class ResponseCache:
    """Keeps complete results of the methods that `revision` allows to cache, and completions.

    All times must come from the same clock.
    """

    def __init__(self, revision: Revision, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._methods = revision.cacheable | {_COMPLETE}
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, _CacheEntry] = OrderedDict()  # least recently used first
        self.size = 0
        """The number of cached bytes: the results, and the params in their keys."""
        self.changes = 0
        """The number of known changes.  Read it before a request is sent, and pass it to `store`."""
        self._changed: dict[str, int] = {}  # method -> `changes` after its results were last dropped

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, method: str, params: Mapping[str, Any], *, now: float, principal: str | None) -> JsonObject | None:
        """Return a copy of the fresh result for this request and principal, or None if there is none."""
        private: _Owner = ("private", stable_name(principal))
        if not self._cacheable(method, params):
            return None
        text = _params_key(params)
        for owner in (private, _PUBLIC):
            key: _Key = (method, text, owner)
            entry = self._entries.get(key)
            if entry is None:
                continue
            if now < entry.stale_at:  # cache-04: "fresh while now < t_received + ttlMs"
                self._entries.move_to_end(key)
                result: JsonObject = json.loads(entry.body)
                return result
            self._drop(key)
        return None

    def key(self, method: str, params: Mapping[str, Any], *, principal: str | None) -> Hashable:
        """Return a key that is equal for requests that can share one response while it is on its way."""
        return method, _params_key(params), stable_name(principal), self.changes

    def store(
        self,
        method: str,
        params: Mapping[str, Any],
        result: JsonObject,
        *,
        asked: int,
        now: float,
        principal: str | None,
    ) -> bool:
        """Cache the result of the request with exactly these params, if allowed.  Returns True if it is cached.

        `asked` is the value of `changes` when the request was sent, and `now` is the time of the response.  The newest
        result replaces an older one even if it may not be cached itself.
        """
        private: _Owner = ("private", stable_name(principal))
        if not self._cacheable(method, params) or result.get("resultType", "complete") != "complete":
            return False
        if self._changed.get(method, 0) > asked:
            return False
        text = _params_key(params)
        for older in (private, _PUBLIC):
            self._drop((method, text, older))
        ttl = int(1000 * COMPLETION_SECONDS) if method == _COMPLETE else result.get("ttlMs")
        if type(ttl) is not int or ttl <= 0:  # cache-05, 07, 08: stale at once; so is an invalid ttlMs
            return False
        body = json.dumps(result, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        stale_at = now + min(ttl, MAX_TTL_MS) / 1000  # cache-06, 27: counted from its own response
        # cache-17: a result that is not clearly public belongs to one principal.
        owner = _PUBLIC if result.get("cacheScope") == "public" and method != _COMPLETE else private
        key, size = (method, text, owner), len(body) + len(text)
        if size > self._max_bytes:  # it would displace all other entries, and then itself
            return False
        while self._entries and (len(self._entries) >= self._max_entries or self.size + size > self._max_bytes):
            self._drop(next(iter(self._entries)))
        self._entries[key] = _CacheEntry(body, stale_at, params.get("uri", ""))
        self.size += size
        return True

    def changed(self, notification: str, params: Mapping[str, Any]) -> None:
        """Process a notification of the server: drop the results that it makes stale, for all principals.

        A stale result that is still on its way will not be cached.  Notifications of other kinds change nothing.
        """
        for method in _STALE.get(notification, ()):
            self.forget(method)
        if notification == _UPDATED:
            uri = params.get("uri")
            # A notification without a URI can mean any resource.
            self.forget("resources/read", uri if isinstance(uri, str) else None)

    def forget(self, method: str, uri: str | None = None) -> None:
        """Drop the results of `method`, or only those that an update of `uri` makes stale.

        For a list this drops all of its pages, as a client does when the server no longer knows a cursor (cache-22).
        """
        self.changes += 1
        self._changed[method] = self.changes
        for key, entry in list(self._entries.items()):
            if key[0] == method and (uri is None or _concerns(uri, entry.uri)):
                self._drop(key)

    def _cacheable(self, method: str, params: Mapping[str, Any]) -> bool:
        # cache-03: a retry "depends on inputs that are not part of the cache key".
        return method in self._methods and "inputResponses" not in params and "requestState" not in params

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= len(entry.body) + len(key[1])


def _params_key(params: Mapping[str, Any]) -> str:
    """The params that affect the result, as canonical text."""
    meta = {name: value for name, value in params.get("_meta", {}).items() if name not in _UNUSED_META}
    rest = {name: value for name, value in params.items() if name != "_meta"}
    # A value that is not JSON is never sent, so its repr is enough.
    return json.dumps([rest, meta], sort_keys=True, separators=(",", ":"), default=repr)


def _concerns(updated: str, cached: str) -> bool:
    """Whether an update of the resource `updated` makes the cached contents of the resource `cached` stale.

    "This might be a sub-resource of the one that the client actually subscribed to": then the resource above it, which
    may list or contain it, has changed as well.
    """
    if not updated.startswith(cached):
        return False
    return cached.endswith("/") or updated[len(cached) :][:1] in ("", "/", "?", "#")


@record
class CacheHints:
    """How long clients may cache a list or a resource: `ttl_ms` milliseconds, 0 by default (not at all).

    The `scope` "public" lets a client share the result among its users; the default is "private".  Raises UsageError if
    a value is invalid.
    """

    ttl_ms: int = 0
    scope: Literal["private", "public"] = "private"  # cache-24: public only by explicit choice

    def __attrs_post_init__(self) -> None:
        if type(self.ttl_ms) is not int or self.ttl_ms < 0:  # cache-09
            raise UsageError(f"ttl_ms must be a whole number of milliseconds, 0 or more, got {self.ttl_ms!r}")
        if self.scope not in ("private", "public"):
            raise UsageError(f"scope must be 'private' or 'public', got {self.scope!r}")

    def page(self, ttl_ms: int) -> CacheHints:
        """The hints for one page of the list, with its own time.  All pages share one scope."""
        # cache-20, cache-23
        return attrs.evolve(self, ttl_ms=ttl_ms)

    def members(self) -> JsonObject:
        """The members that these hints add to a complete result."""
        return {"ttlMs": self.ttl_ms, "cacheScope": self.scope}


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

    def __init__(self, limits: Limits | None = None) -> None:
        self._params: JsonObject = {}
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
            most = f"{self._max_pages} pages of a list (Limits.pages)"
            why = f"the server gave more than {most}, always with a new nextCursor"
        if why is not None:
            self.done = True
            raise RemoteProtocolError(why)
        self._seen.add(hash(cursor))
        self._params["cursor"] = cursor
