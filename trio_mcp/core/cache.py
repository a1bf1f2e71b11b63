"""The client's response cache, and the hints that a server gives for it.

A server says of its lists and resources for how long they are likely to stay the same (`ttlMs`) and whether anybody may
see them (`cacheScope`).  `ResponseCache` keeps complete results for that long: by method, by the params that affect the
result, and, unless the server said "public", by the principal who asked.  Every page of a list is an entry of its own.

Completions have no such hints, in no revision, and are asked for with each key that a user presses.  They are kept for
`COMPLETION_SECONDS`, for the principal who asked.

The cache never acts by itself.  It answers when asked, and what is stale is simply not there (cache-12: nothing is
fetched in the background).  The caller looks with `get`, sends its request if that gives None, and offers the result to
`store`; what may not be kept is turned away there, so every result may be offered.

Two things surprise.  *A result can be stale before it arrives*: on HTTP the notice of a change travels on another
stream than the response, and may overtake it.  So `store` wants to know how many changes were known when the request
was sent, and refuses a result that was overtaken.  *Entries are bytes*: a stored result is encoded, and each `get`
decodes a fresh copy.  Nobody can change what others will see, the size is exact, and an idle cache holds no objects
that the garbage collector has to walk.

One cache belongs to one server.  What goes with a request outside of its params (headers, above all the access token)
is not seen here: `principal` must stand for all of it.  It is the stable name of one, text that tells it from all
others (a user id, not a token), or None if there are no others; anything else raises `UsageError`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import JsonObject
from trio_mcp.core.records import record
from trio_mcp.core.revisions import META_CLIENT_INFO, META_LOG_LEVEL, Revision
from trio_mcp.core.terms import stable_name

__all__ = ["COMPLETION_SECONDS", "MAX_BYTES", "MAX_ENTRIES", "MAX_TTL_MS", "CacheHints", "ResponseCache"]

MAX_ENTRIES = 1024
"""The pages of every list of a large server, and a working set of resources.  Beyond, the least recently used goes."""

MAX_BYTES = 32 * 1024 * 1024
"""Room for two messages of the greatest size that is received at all.  Beyond, the least recently used goes."""

MAX_TTL_MS = 365 * 24 * 60 * 60 * 1000
"""No process lives longer; a number with a thousand digits, which JSON allows, must not break the arithmetic."""

COMPLETION_SECONDS = 10.0
"""A user who deletes a letter and types it again does so within seconds; files and branches, which servers complete,
come and go within minutes."""

_COMPLETE: Final = "completion/complete"

# What the notice of a change makes stale (cache-19).  Completions are for arguments of prompts and of templates.
_STALE: Mapping[str, tuple[str, ...]] = {
    "notifications/tools/list_changed": ("tools/list",),
    "notifications/prompts/list_changed": ("prompts/list", _COMPLETE),
    "notifications/resources/list_changed": ("resources/list", "resources/templates/list", _COMPLETE),
}
_UPDATED = "notifications/resources/updated"

# Request metadata that cannot affect a result.  Whatever else a caller puts there (a tenant, say) is part of the key:
# "Clients MUST NOT serve a cached response for a request whose method or parameters differ".
_PASSING = frozenset({"progressToken", "traceparent", "tracestate", "baggage", META_CLIENT_INFO, META_LOG_LEVEL})

_Owner: TypeAlias = tuple[Literal["private", "public"], str | None]
_Key: TypeAlias = tuple[str, str, _Owner]  # method, canonical params, who may see it
_PUBLIC: _Owner = ("public", None)


@record
class _CacheEntry:
    body: bytes
    stale_at: float
    uri: str  # what was read, so that an update can find it; empty for a list


class ResponseCache:
    """Complete results of the methods that `revision` lets be cached, and completions.

    Times are those of the caller's one clock.
    """

    def __init__(self, revision: Revision, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._methods = revision.cacheable | {_COMPLETE}
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, _CacheEntry] = OrderedDict()  # least recently used first
        self._size = 0
        self._changes = 0
        self._changed: dict[str, int] = {}  # method -> `changes` after its results were last dropped

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes held: results and the params they are found by."""
        return self._size

    @property
    def changes(self) -> int:
        """How many changes are known.  Read it before a request is sent, for `store`."""
        return self._changes

    def get(self, method: str, params: Mapping[str, Any], *, now: float, principal: str | None) -> JsonObject | None:
        """A fresh result for this request by this principal; the caller's own copy.  None: ask the server."""
        private: _Owner = ("private", stable_name(principal))
        if not self._may_keep(method, params):
            return None
        text = _affecting(params)
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
        """Equal for requests of which one answer, on its way now, is the answer to all."""
        return method, _affecting(params), stable_name(principal), self._changes

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
        """Offer the result of the request with exactly these params, received now.  Whether it is kept.

        `asked` is what `changes` was when the request was sent.  The newest result replaces an older one even if it
        may not be kept itself.
        """
        private: _Owner = ("private", stable_name(principal))
        if not self._may_keep(method, params) or result.get("resultType", "complete") != "complete":
            return False
        if self._changed.get(method, 0) > asked:
            return False
        text = _affecting(params)
        for older in (private, _PUBLIC):
            self._drop((method, text, older))
        ttl = int(1000 * COMPLETION_SECONDS) if method == _COMPLETE else result.get("ttlMs")
        if type(ttl) is not int or ttl <= 0:  # cache-05, 07, 08: stale at once; so is what is no number of milliseconds
            return False
        body = json.dumps(result, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        stale_at = now + min(ttl, MAX_TTL_MS) / 1000  # cache-06, 27: each from its own receipt
        # cache-17: whatever is not clearly public is for the one who asked.
        owner = _PUBLIC if result.get("cacheScope") == "public" and method != _COMPLETE else private
        return self._keep((method, text, owner), _CacheEntry(body, stale_at, params.get("uri", "")))

    def changed(self, notification: str, params: Mapping[str, Any]) -> None:
        """Take a notification of the server: what it makes stale is dropped for everybody, and not kept if on its way.

        Any notification may come; most change nothing here.
        """
        for method in _STALE.get(notification, ()):
            self.forget(method)
        if notification == _UPDATED:
            uri = params.get("uri")
            # A notice that does not say what it is about may be about anything.
            self.forget("resources/read", uri if isinstance(uri, str) else None)

    def forget(self, method: str, uri: str | None = None) -> None:
        """Drop the results of `method`, or only those that an update of `uri` concerns.

        For a list this drops all of its pages, as is wanted when the server no longer knows a cursor (cache-22).
        """
        self._changes += 1
        self._changed[method] = self._changes
        for key, entry in list(self._entries.items()):
            if key[0] == method and (uri is None or _concerns(uri, entry.uri)):
                self._drop(key)

    def _may_keep(self, method: str, params: Mapping[str, Any]) -> bool:
        # cache-03: a retry "depends on inputs that are not part of the cache key".
        return method in self._methods and "inputResponses" not in params and "requestState" not in params

    def _keep(self, key: _Key, entry: _CacheEntry) -> bool:
        size = _size(key, entry)
        if size > self._max_bytes:  # it would push out all the others, and then itself
            return False
        while self._entries and (len(self._entries) >= self._max_entries or self._size + size > self._max_bytes):
            self._drop(next(iter(self._entries)))
        self._entries[key] = entry
        self._size += size
        return True

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= _size(key, entry)


def _affecting(params: Mapping[str, Any]) -> str:
    """The params that affect the result, as one text for one value."""
    meta = {name: value for name, value in params.get("_meta", {}).items() if name not in _PASSING}
    rest = {name: value for name, value in params.items() if name != "_meta"}
    # What is no JSON is never sent, so a text that stands for it will do.
    return json.dumps([rest, meta], sort_keys=True, separators=(",", ":"), default=repr)


def _size(key: _Key, entry: _CacheEntry) -> int:
    return len(entry.body) + len(key[1])


def _concerns(updated: str, cached: str) -> bool:
    """Whether an update of one resource makes what was read of another stale.

    "This might be a sub-resource of the one that the client actually subscribed to": then the one above it, which may
    list or contain it, has changed as well.
    """
    if not updated.startswith(cached):
        return False
    return cached.endswith("/") or updated[len(cached) :][:1] in ("", "/", "?", "#")


@record
class CacheHints:
    """What a server says about one list, or one resource.  Nothing is public unless somebody wrote so (cache-24)."""

    ttl_ms: int = 0
    scope: Literal["private", "public"] = "private"

    def __attrs_post_init__(self) -> None:
        if type(self.ttl_ms) is not int or self.ttl_ms < 0:  # cache-09
            raise UsageError(f"ttl_ms is a whole number of milliseconds, 0 or more, not {self.ttl_ms!r}")
        if self.scope not in ("private", "public"):
            raise UsageError(f"scope is 'private' or 'public', not {self.scope!r}")

    def page(self, ttl_ms: int) -> CacheHints:
        """For one page of the list: pages may differ in their time (cache-20), never in their scope (cache-23)."""
        return attrs.evolve(self, ttl_ms=ttl_ms)

    def members(self) -> JsonObject:
        """What goes into a complete result."""
        return {"ttlMs": self.ttl_ms, "cacheScope": self.scope}
