"""The row of a session in the store: the facts with which any replica can continue the session.

Each copy of the session reads it when it joins, changes it with a comparison of versions, and renews it as long as the
client is there.  The session has ended when there is no row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

import attrs

from trio_mcp.core.errors import INVALID_PARAMS, RequestError
from trio_mcp.core.messages import JsonObject
from trio_mcp.server.replicas import CannotContinue
from trio_mcp.stores.rows import Row, StoreFailed, wall_time

if TYPE_CHECKING:
    from trio_mcp.server.replicas import Replica

__all__ = ["ENDED", "SessionRecord", "SessionRow", "key_of"]

_TRIES: Final = 20  # to write a row that other replicas write too
ENDED: Final = "the session has ended"
"""The reason that clients and logs get."""


@attrs.frozen
class SessionRecord:
    """The facts with which any replica can continue a session."""

    revision: str
    capabilities: JsonObject
    identity: JsonObject | None
    principal: str | None
    opened: bool = False
    level: str | None = None
    uris: Sequence[str] = ()
    speaks_in: str = ""
    """The replica and the number of the copy that speaks, with a dot between them; "" if none does."""

    def text(self) -> bytes:
        return json.dumps(attrs.asdict(self)).encode()

    @property
    def speaker(self) -> tuple[str, int]:
        """The replica and the number of the copy that speaks; "" and 0 if none does."""
        replica, _, number = self.speaks_in.partition(".")
        return replica, int(number or 0)

    @staticmethod
    def from_text(text: bytes) -> SessionRecord:
        return SessionRecord(**json.loads(text))

    def without(self, uri: str) -> SessionRecord:
        """Remove a subscription."""
        return attrs.evolve(self, uris=tuple(each for each in self.uris if each != uri))

    def watching(self, uri: str, most: int) -> SessionRecord:
        """Add a subscription.  Raises `RequestError` if there are too many."""
        others = self.without(uri).uris
        if len(others) >= most:
            raise RequestError(INVALID_PARAMS, f"one listener may ask for {most} changes; these would be more")
        return attrs.evolve(self, uris=(*others, uri))


def key_of(id: str) -> str:
    """The name of a session in the store.  Its id is a secret, which a reader of the store could use."""
    return hashlib.sha256(id.encode()).hexdigest()[:32]


class SessionRow:
    """The row of a session, as one copy has it.  `gone` is called when there is no row any more.

    All methods raise `StoreFailed`, which is `CannotContinue` if the session has ended.
    """

    def __init__(
        self, replica: Replica, kind: str, key: str, owner: str, seconds: float, gone: Callable[[], object]
    ) -> None:
        self._replica = replica
        self._store = replica.store
        self._kind, self._key, self._owner = kind, key, owner
        self._seconds = seconds  # for which a client may be absent
        self._gone = gone
        self._expires = inf  # when it was read last
        self._looked = -inf  # when it was read or written last

    @property
    def expired(self) -> bool:
        """Whether no copy has renewed it in time, as far as this copy knows."""
        return self._expires <= wall_time()

    @property
    def due(self) -> bool:
        """Whether it is time to look whether the session still exists, and to renew it."""
        return wall_time() - self._looked >= self._seconds / 4

    async def create(self, record: SessionRecord, add: Callable[[Row], Awaitable[object]]) -> None:
        """Write it for the first time.  `add` makes room for it, and adds it; raises as that."""
        now = wall_time()
        row = Row(self._kind, self._key, record.text(), self._owner, now, now + self._seconds)
        await add(row)
        self._looked, self._expires = now, row.expires

    async def read(self) -> SessionRecord:
        row = await self._get()
        self._expires = row.expires
        return SessionRecord.from_text(row.body)

    async def change(self, change: Callable[[SessionRecord], SessionRecord], *, renew: bool = True) -> SessionRecord:
        """Write it, and return the record before.  With `renew` the client is here.  Raises also as `change`."""
        for _ in range(_TRIES):
            row = await self._get()
            before = SessionRecord.from_text(row.body)
            if await self._replace(row, change(before).text(), renew):
                return before
        raise StoreFailed("too many replicas write one session at the same time; try again later")

    async def renew(self, wanted: bool) -> bool:
        """Read it, and renew it if that is wanted.  Returns whether it was renewed."""
        self._looked = wall_time()  # also if the store is away: other sessions have their turn
        row = await self._get()
        self._expires = row.expires
        return wanted and await self._replace(row, row.body, True)

    async def name_no_speaker(self, name: str) -> None:
        """If it names this copy as the speaker, name none, so that another copy takes its place."""
        await self.change(lambda r: attrs.evolve(r, speaks_in="") if r.speaks_in == name else r, renew=False)

    async def delete(self) -> None:
        await self._replica.quickly(self._store.delete(self._kind, self._key))

    async def _get(self) -> Row:
        row = await self._replica.quickly(self._store.get(self._kind, self._key))
        if row is None:
            self._gone()
            raise CannotContinue(ENDED)
        return row

    async def _replace(self, row: Row, body: bytes, renew: bool) -> bool:
        now = wall_time()
        row = attrs.evolve(row, body=body, expires=now + self._seconds if renew else row.expires)
        if not await self._replica.quickly(self._store.replace(row)):
            return False
        self._looked, self._expires = now, row.expires
        return True
