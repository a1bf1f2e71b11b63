"""One session of a relay with its upstream server.  It is opened again after its end, by the next request.

| State | A request | It opens | Opening fails | The server ends it | Idle for too long |
|---|---|---|---|---|---|
| closed | opening; refused during a pause | | | | |
| opening | waits | open | closed, pause | | |
| open | is sent | | | closed, pause | closing |
| closing | waits, and then uses a new `UpstreamSession` | | | | |

So the next request restarts a process that has died, and a client that listens to changes restarts it after a second,
if no request comes.  The first restart is immediate; later ones come after pauses that
grow to 30 seconds, because a process that dies at once must not be restarted by every request.
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

# Seconds from the end of a session or a failed attempt to the next attempt: after the first failure in a row, after the
# second, and so on.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_PATIENCE = 1.0  # seconds that a listening client waits for a request to open the session again
_STABLE = 30.0  # a session that was open for this many seconds resets the count of failures; equals the longest pause


class _UpstreamLife:
    """One opening of a session, up to its end."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.failed = False
        self.settled = trio.Event()  # set when it is open or has failed
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    @property
    def ending(self) -> bool:
        return self.scope.cancel_called or (self.client is not None and self.client._connection.gone.is_set())


class UpstreamSession:
    """One session with the upstream server, opened again when needed; see the head of this file.

    `connect` makes a client for each opening.  `opened` is then called with that client and a nursery for tasks that
    serve it.  All openings run in `nursery`; without `can_reopen` there is only one.  After `idle` seconds without use
    the session is closed.  `forget` is called when the session was closed.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        connect: Callable[[], AbstractAsyncContextManager[Client]],
        opened: Callable[[Client, trio.Nursery], object],
        forget: Callable[[], object],
        *,
        idle: float,
        can_reopen: bool,
    ) -> None:
        self.idle = idle
        self.users = 0
        self.last_used = trio.current_time()
        self._nursery = nursery
        self._connect = connect
        self._opened = opened
        self._forget = forget
        self._can_reopen = can_reopen
        self._client_disconnected = False
        self._life = _UpstreamLife()
        self._life.ended.set()
        self._failures = 0  # ends and failed attempts in a row, without a stable session between them
        self._not_before = -math.inf
        self._reason = ""  # why there is no session, for error messages
        self._reopened = trio.Event()

    # For the tasks that use the session.

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the session as in use for the duration of the block."""
        self.users += 1
        self._life.scope.deadline = math.inf
        try:
            yield
        finally:
            self.users -= 1
            if not self.users:
                self.last_used = trio.current_time()
                self._life.scope.deadline = self.last_used + self.idle
                if self._client_disconnected:
                    self.close()

    async def client(self) -> Client:
        """The client of the session, which is opened first if needed.

        Raises RequestError if opening fails, or during a pause.
        """
        while True:
            life = self._life
            if life.ended.is_set():
                life = self._start_reopening()
            elif life.ending:
                await life.ended.wait()
                continue
            if not life.settled.is_set():
                await life.settled.wait()
            if life.failed:
                raise self._unavailable()
            if not life.ending:
                assert life.client is not None
                return life.client

    async def next_client(self, before: Client) -> Client:
        """Return the client that follows `before`, which has ended.

        A request opens the session again.  If no request comes, this method does, after pauses that grow.
        """
        pause = _PATIENCE
        while (client := self._life.client) is None or client is before:
            with trio.move_on_after(pause):
                await self._reopened.wait()
                continue
            try:
                return await self.client()
            except RequestError as error:
                _log.info("the relay cannot listen to the upstream server: %s", error)
            pause = min(2 * pause, _PAUSES[-1])
        return client

    def can_replace(self, client: Client) -> bool:
        """Whether this client has ended and the session can be opened again."""
        return self._can_reopen and client._connection.gone.is_set()

    # For the relay.

    @property
    def closing(self) -> bool:
        """Whether it is being closed, so that its owner needs a new session."""
        return self._life.scope.cancel_called

    def close(self) -> None:
        """Close it.  `forget` is called when that is done."""
        if self._life.ended.is_set():
            self._forget()
        else:
            self._life.scope.cancel(reason="the session with the upstream server is not needed any more")

    def client_disconnected(self) -> None:
        """Close the session when its last call has ended, because its client has disconnected."""
        self._client_disconnected = True
        if not self.users:
            self.close()

    async def open(self) -> None:
        """Open it for the first time.  Raises as entering `open_client` does."""
        self._life = _UpstreamLife()
        await self._nursery.start(self._run_life, name="a session of a relay")

    # Opening.

    async def _run_life(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
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
                    await client._connection.gone.wait()
        except BaseException:
            life.failed = True
            raise
        finally:
            now = trio.current_time()
            self._reason = "could not be reached" if opened_at == math.inf else "has ended"
            self._failures = 1 if now >= opened_at + _STABLE else self._failures + 1
            self._not_before = now + _PAUSES[min(self._failures, len(_PAUSES)) - 1]
            life.settled.set()
            life.ended.set()
            if life.scope.cancel_called:
                self._forget()

    def _start_reopening(self) -> _UpstreamLife:
        if not self._can_reopen:
            raise RequestError(INTERNAL_ERROR, "the upstream server did not answer: its stream has ended")
        if trio.current_time() < self._not_before:
            raise self._unavailable()
        self._life = _UpstreamLife()
        self._nursery.start_soon(self._reopen, name="a session of a relay")
        return self._life

    async def _reopen(self) -> None:
        try:
            await self._run_life()
        except McpError as error:
            _log.warning("the upstream server could not be reached: %s", error)
        except Exception:  # noqa: BLE001  # callbacks among the client options may raise any exception
            _log.exception("the upstream server could not be reached")

    def _unavailable(self) -> RequestError:
        wait = math.ceil(max(0.0, self._not_before - trio.current_time()))
        when = f"in {wait} s" if wait else "with the next request"
        return RequestError(INTERNAL_ERROR, f"the upstream server {self._reason}; it is started again {when}")
