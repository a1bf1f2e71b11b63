"""One session of a relay with the server behind it, and the next one after its end.

| State | A request | It opens | Opening fails | The server ends it | Nobody uses it for a time |
|---|---|---|---|---|---|
| closed | opening; refused during a pause | | | | |
| opening | waits | open | closed, pause | | |
| open | is sent | | | closed, pause | closing |
| closing | another session takes it, afterwards | | | | |

So a process that has died is started again by the next request.  The first time that happens at once, and then after
pauses that grow up to half a minute: a process that dies at once must not be started as often as a client asks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import trio

from trio_mcp.client.client import Client
from trio_mcp.core.errors import INTERNAL_ERROR, McpError, RequestError
from trio_mcp.transport.nursery import open_nursery

__all__ = ["UpstreamSession"]

_log = logging.getLogger("trio_mcp.relay")

# Seconds from the end of a session, or from an attempt that failed, to the next attempt; one for each in a row.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_HELD = 30.0  # seconds after which a session has held, and its end is the first again: as long as the longest pause


class _UpstreamLife:
    """From one opening to its end."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.failed = False
        self.settled = trio.Event()  # it is open, or could not be opened
        self.scope = trio.CancelScope()
        self.over = trio.Event()

    @property
    def ending(self) -> bool:
        return self.scope.cancel_called or (self.client is not None and self.client._keeper.gone.is_set())


class UpstreamSession:
    """See the head of this file.

    `connect` makes the client, and `opened` is called with each, and with a nursery for what serves it.  All lives run
    in `nursery`; without `again` there is one only.  A session that nobody uses is closed after `idle` seconds, and
    `forget` is called when one was closed.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        connect: Callable[[], AbstractAsyncContextManager[Client]],
        opened: Callable[[Client, trio.Nursery], object],
        forget: Callable[[], object],
        *,
        idle: float,
        again: bool,
    ) -> None:
        self.idle = idle
        self.users = 0
        self.last_used = trio.current_time()
        self._nursery = nursery
        self._connect = connect
        self._opened = opened
        self._forget = forget
        self._again = again
        self._left = False
        self._life = _UpstreamLife()
        self._life.over.set()
        self._ends = 0  # in a row, none of which came after the session had held
        self._not_before = -math.inf
        self._why = ""  # there is no session
        self._reopened = trio.Event()

    # For users.

    @contextmanager
    def used(self) -> Iterator[None]:
        """For as long as this block the session is in use."""
        self.users += 1
        self._life.scope.deadline = math.inf
        try:
            yield
        finally:
            self.users -= 1
            if not self.users:
                self.last_used = trio.current_time()
                self._life.scope.deadline = self.last_used + self.idle
                if self._left:
                    self.close()

    async def client(self) -> Client:
        """The client of the session, which is opened if it is not open.

        Raises RequestError if that fails, or during a pause.
        """
        while True:
            life = self._life
            if life.over.is_set():
                life = self._begin()
            elif life.ending:
                await life.over.wait()
                continue
            if not life.settled.is_set():
                await life.settled.wait()
            if life.failed:
                raise self._unavailable()
            if not life.ending:
                assert life.client is not None
                return life.client

    async def next_client(self, before: Client) -> Client:
        """The client after this one, which has ended, when a request has opened the session again."""
        while (client := self._life.client) is None or client is before:
            await self._reopened.wait()
        return client

    def connection_lost(self, client: Client) -> bool:
        """Whether this client has ended, and another can follow."""
        return self._again and client._keeper.gone.is_set()

    # For the relay.

    @property
    def closing(self) -> bool:
        """It is being closed, and another session has to be made."""
        return self._life.scope.cancel_called

    def close(self) -> None:
        """Close it; `forget` follows."""
        if self._life.over.is_set():
            self._forget()
        else:
            self._life.scope.cancel(reason="the session with the server behind is not needed")

    def leave(self) -> None:
        """Its client has gone: it is closed when its last call has ended."""
        self._left = True
        if not self.users:
            self.close()

    async def open(self) -> None:
        """Open it for the first time.  Raises as entering `open_client` does."""
        self._life = _UpstreamLife()
        await self._nursery.start(self._live, name="a session of a relay")

    # Its lives.

    async def _live(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        life, opened_at = self._life, math.inf
        try:
            with life.scope:
                async with self._connect() as client, open_nursery() as nursery:
                    opened_at, life.client = trio.current_time(), client
                    reopened, self._reopened = self._reopened, trio.Event()
                    self._opened(client, nursery)
                    task_status.started()
                    life.settled.set()
                    reopened.set()
                    await client._keeper.gone.wait()
        except BaseException:
            life.failed = True
            raise
        finally:
            now = trio.current_time()
            self._why = "could not be reached" if opened_at == math.inf else "has ended"
            self._ends = 1 if now >= opened_at + _HELD else self._ends + 1
            self._not_before = now + _PAUSES[min(self._ends, len(_PAUSES)) - 1]
            life.settled.set()
            life.over.set()
            if life.scope.cancel_called:
                self._forget()

    def _begin(self) -> _UpstreamLife:
        if not self._again:
            raise RequestError(INTERNAL_ERROR, "the server behind this one has given no answer: its stream has ended")
        if trio.current_time() < self._not_before:
            raise self._unavailable()
        self._life = _UpstreamLife()
        self._nursery.start_soon(self._live_again, name="a session of a relay")
        return self._life

    async def _live_again(self) -> None:
        try:
            await self._live()
        except McpError as error:
            _log.warning("the server behind could not be reached: %s", error)
        except Exception:  # noqa: BLE001  # callbacks among the client's options may raise anything
            _log.exception("the server behind could not be reached")

    def _unavailable(self) -> RequestError:
        wait = math.ceil(max(0.0, self._not_before - trio.current_time()))
        when = f"in {wait} s" if wait else "by the next request"
        return RequestError(INTERNAL_ERROR, f"the server behind this one {self._why}; it is started again {when}")
