"""Retries of calls that wait in another replica: they are passed on to the replica that holds the handler.

A handle in a sealed request state begins with the name of the replica that parked the handler, so each replica knows
where a retry belongs.  States of a retry that arrives here:

| The holder | The tool | The retry |
|---|---|---|
| this replica | any | continues here |
| another one, alive | any | is forwarded: the handler continues there, and its messages go out here |
| gone | `replay=True` | runs the handler again here, once: its handle is spent in the store first |
| gone | another | is refused (`StateRefusal.HOLDER_GONE`) |

Two streams of the store carry a forwarded retry, because nothing of it may be lost: one leads to the holder (the
request, perhaps a cancellation), the other leads back (the messages of the call, the answer last).  A message to the
holder names them; it is sent again until the first event comes back.  In the holder the request belongs to a
`ServerSession` of its own, as any modern request, so all checks of a retry are done there.

- A handle is continued once.  The holder knows its own handles.  That of a `replay=True` tool is also a row of the
  store, because another replica may run the handler again when the holder is taken for dead.  The replica that adds the
  row continues the call.
- The client closes the response: the replica that has it appends a cancellation.  It dies: the holder sees the end of
  its lease, and cancels the handler.
- The holder dies: the replica that has the response sees the end of the lease.  It goes on as if the holder had been
  gone before; the row of a spent handle decides whether the handler of a `replay=True` tool had continued.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, RequestError
from trio_mcp.core.http.fields import CREDENTIALS
from trio_mcp.core.messages import PROGRESS, Error, JsonObject, Request, Response, decode, encode
from trio_mcp.core.principals import Principal
from trio_mcp.core.request_state import SealedState, StateRefusal
from trio_mcp.core.requests import LinkKind
from trio_mcp.server.context import LOG, Context
from trio_mcp.server.parking import ParkedCall, Parking
from trio_mcp.server.replicas import LEASE, Replica, text_for_clients
from trio_mcp.server.session import ServerSession
from trio_mcp.stores.rows import Row, StoreFailed, StoreFull, wall_time
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import Wire

if TYPE_CHECKING:
    from trio_mcp.server.run import Run
    from trio_mcp.stores.rows import Message

__all__ = ["SharedParking"]

_LOOK: Final = 1.0  # seconds until a stream is read again, if no message has come about it
_UNHEARD: Final = LEASE + 5  # seconds until a retry fails of which its holder says nothing, although it lives
_KEPT: Final = 60.0  # seconds for which a stream stays at least after a sign of its writer
_ALIVE: Final = LEASE / 3  # seconds between two looks whether the other replica lives
_EVENTS: Final = 50  # events that are read at once
_CLOSING: Final = 1.0  # seconds for the last write of a retry that was cancelled
_CANCEL: Final = b"cancel"
_TAKEN: Final = b"taken"  # also the sign that a side is still there, every `_ALIVE` seconds


class SharedParking(Parking):
    """The parked handlers of one replica, and the way to those of the others."""

    def __init__(self, run: Run, replica: Replica) -> None:
        super().__init__(run.server._sealer, run.limits, wall=wall_time, name=replica.name)
        self._run = run
        self._replica = replica
        self._store = replica.store
        self._spent_kind = f"spent state {replica.server_name}"
        self._taken: dict[str, _TakenRetry] = {}  # the retries that others have forwarded, by their ids
        self._changed = trio.lowlevel.ParkingLot()
        replica.hears["retry"] = [self._take]
        run.connections[self] = None

    async def retry(self, ctx: Context) -> ParkedCall | JsonObject | None:
        """As `Parking.retry`, for handlers in all replicas."""
        state = self._open(ctx)
        if state.handle is None or state.handle in self.calls or state.handle.startswith(self._prefix):
            found = self._continue(ctx, state)
            if isinstance(found, ParkedCall) and found.ctx._replay:
                await self._spend_or_park_again(found, state)
            return found
        holder = state.handle.partition(".")[0]
        try:
            if await self._replica.quickly(self._replica.alive(holder)):
                with suppress(_HolderGone):
                    return await self._forward(ctx, holder)
            if state.carried is None:
                raise StateRefusal.HOLDER_GONE.error
            if not await self._spend(state, None if ctx._link is None else ctx._link.account.holder):
                raise StateRefusal.SPENT.error
        except (StoreFailed, StoreFull) as error:
            raise RequestError(INTERNAL_ERROR, text_for_clients(error)) from error
        return self._continue(ctx, state)

    # Handles that are continued once.

    async def _spend(self, state: SealedState, holder: Hashable | None, *, again: bool = False) -> bool:
        """Whether this replica is the first to continue the call of this handle.  Raises `StoreFailed`.

        With `again` an earlier attempt of this replica, whose outcome is unknown, does not count.
        """
        assert state.handle is not None  # other states may be used several times
        body = self._replica.name.encode()
        now, until = wall_time(), state.expires + LEASE
        row = Row(self._spent_kind, state.handle, body, _owner(holder), now, until)
        try:
            if await self._replica.quickly(self._store.add(row)):
                return True
        except StoreFull as error:
            raise StoreFailed(str(error)) from None
        found = await self._replica.quickly(self._store.get(row.kind, row.key)) if again else None
        return found is not None and found.body == body

    async def _spend_or_park_again(self, parked: ParkedCall, state: SealedState) -> None:
        """Continue a parked call that another replica could run again, unless that has happened."""
        try:
            first = await self._spend(state, parked.holder, again=True)
        except BaseException as error:
            if self._run.dismissed or not self._shares.take(parked.holder):
                self._cancel(parked, "the store of the replicas has failed, and there is no place for parked calls")
            else:  # the client may try again
                self.calls[parked.handle] = parked
                self.calls = dict(sorted(self.calls.items(), key=lambda item: item[1].deadline))
                self._more.set()
            if isinstance(error, StoreFailed):
                raise RequestError(INTERNAL_ERROR, text_for_clients(error)) from error
            raise
        if not first:
            self._cancel(parked, "another replica has run this call again")
            raise StateRefusal.SPENT.error

    # In the replica where a retry arrives.

    async def _forward(self, ctx: Context, holder: str) -> JsonObject:
        """Let the holder continue the call, send its messages here, and return its result."""
        id, link = secrets.token_urlsafe(12), ctx._link
        there, back = self._streams(id)
        assert link is not None  # it has just been received
        # Without credentials, which readers of the store could use.  The principal is known.
        headers = {name: value for name, value in ctx.headers.items() if not CREDENTIALS.search(name)}
        request = {
            "from": self._replica.name, "method": ctx.method, "params": dict(ctx.request.params),
            "principal": _written(ctx._terms.principal), "headers": headers,
            "holder": link.account.holder,
        }  # fmt: skip
        ended = False
        try:
            async with self._store.receive([back]) as news:
                await self._replica.quickly(self._append(there, json.dumps(request).encode(), link.account.holder))
                async with aclosing(self._answers(news, id, holder, link.account.holder)) as answers:
                    async for body in answers:
                        message = decode(body, self._run.limits)
                        if isinstance(message, Response | Error):
                            ended = True
                            return _result(message)
                        await _report(ctx, message)
            raise AssertionError("the messages of a call end with its answer")
        finally:
            self._replica.start_soon(self._finish, there, back, ended, name="the end of a forwarded retry")

    async def _finish(self, there: str, back: str, ended: bool) -> None:
        with suppress(StoreFailed, StoreFull):  # the holder sees the end of our lease, and the streams expire
            if ended:
                await self._store.discard(there)
            else:
                await self._append(there, _CANCEL, None)
            await self._store.discard(back)

    async def _answers(
        self, news: AsyncIterator[Message], id: str, holder: str, owner: Hashable | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the messages of the call, as they come."""
        there, back = self._streams(id)
        quickly, after, heard = self._replica.quickly, 0, trio.current_time()
        looked = heard  # it was alive a moment ago
        while True:
            if not after:
                await quickly(self._replica.send(holder, "retry", id=id))
            oldest, events = await quickly(self._store.read(back, after, _EVENTS))
            if oldest > after + 1:
                raise RequestError(INTERNAL_ERROR, "messages of this call were lost between two replicas")
            for number, body in events:
                if body != _TAKEN:
                    yield body
                after = number
            now = trio.current_time()
            if events:
                heard = now
                continue
            if now - looked >= _ALIVE:
                looked = now
                if not await quickly(self._replica.alive(holder)):
                    raise _HolderGone
                await quickly(self._append(there, _TAKEN, owner))
            if now - heard >= _UNHEARD:
                raise RequestError(INTERNAL_ERROR, "the process that holds this call does not answer; try again later")
            with trio.move_on_after(_LOOK):
                await anext(news)

    def _streams(self, id: str) -> tuple[str, str]:
        name = f"retry {self._replica.server_name} {id}"
        return f"{name} there", f"{name} back"

    async def _append(self, stream: str, body: bytes, owner: Hashable | None) -> None:
        await self._store.append(
            stream, body,
            owner=_owner(owner),
            expires=wall_time() + self._ttl + _KEPT, max_bytes=4 * self._run.limits.message_bytes,
        )  # fmt: skip

    # In the replica that holds the handler.

    def _take(self, message: JsonObject) -> None:
        """Take a retry that another replica forwards."""
        id = message["id"]
        if id not in self._taken:
            self._taken[id] = taken = _TakenRetry(self._run)
            self._replica.start_soon(self._serve, id, taken, name="a retry from another replica")

    async def _serve(self, id: str, taken: _TakenRetry) -> None:
        there, back = self._streams(id)
        try:
            async with self._store.receive([there]) as messages:
                _, events = await self._store.read(there, 0, _EVENTS)
                if not events or events[0][1] == _TAKEN or events[-1][1] == _CANCEL:
                    return  # it was served before, or its client has gone
                request = json.loads(events[0][1])
                await self._append(back, _TAKEN, request["holder"])
                taken.begin(request, len(events[0][1]))
                async with open_nursery() as nursery:
                    nursery.start_soon(self._watch, id, request, messages, taken)
                    async with aclosing(taken.messages()) as texts:
                        async for text in texts:
                            await self._append(back, text, request["holder"])
        except (StoreFailed, StoreFull) as error:
            taken.lost(f"the messages of a call could not be sent to its client: {error}")
        finally:
            taken.lost("the server has stopped")
            with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True), suppress(StoreFailed):
                await self._store.discard(there)  # otherwise it expires
            del self._taken[id]  # now, because a retry that comes once more finds no stream
            self._changed.unpark_all()

    async def _watch(self, id: str, request: JsonObject, messages: AsyncIterator[Message], taken: _TakenRetry) -> None:
        """Cancel the call if its client has gone, or the replica that has the response; tell it that the call runs."""
        (there, back), after = self._streams(id), 1
        told = trio.current_time()
        while True:
            with trio.move_on_after(_ALIVE):
                await anext(messages)
            try:
                _, events = await self._store.read(there, after, _EVENTS)
                cancelled = any(body == _CANCEL for _, body in events)
                if cancelled or not await self._replica.alive(request["from"]):
                    taken.lost("the client has closed the response stream")  # cancel-14
                    return
                after = events[-1][0] if events else after
                if trio.current_time() - told >= _ALIVE:
                    told = trio.current_time()
                    with suppress(StoreFull):  # the answer may fit later
                        await self._append(back, _TAKEN, request["holder"])
            except StoreFailed:
                await trio.sleep(_LOOK)

    # As a connection of the run.

    @property
    def is_busy(self) -> bool:
        """A handler may have ended, and the store not yet have its answer."""
        return bool(self.calls or self._taken)

    @property
    def clients(self) -> int:
        return len(self._taken)

    async def drain(self) -> None:
        while self._run.parked or self._taken:
            for parked in self._run.parked:
                await parked.resumed.wait()
            if self._taken:
                await self._changed.park()

    def abort_pending(self) -> None:
        for taken in self._taken.values():
            taken.session.abort_pending()

    def stop(self) -> None:
        super().stop()
        for taken in tuple(self._taken.values()):
            taken.lost("the server has stopped")


class _TakenRetry(Wire):
    """A retry that another replica has forwarded: the wire of its session, whose messages go back to that replica."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.session = ServerSession(run, self, link=LinkKind.EXCHANGE)
        self._woken = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        self._over = False

    def begin(self, request: JsonObject, size: int) -> None:
        """Serve the request."""
        self.session.account = self.session.session.account = self._run.bytes.account(request["holder"])
        self.session.receive(
            Request(1, request["method"], request["params"]), trio.current_time(),
            principal=_read(request["principal"]), headers=request["headers"], size=size,
        )  # fmt: skip

    def lost(self, why: str) -> None:
        """No client waits for the answer any more.  Does nothing after the answer."""
        if not self._over:
            self._over = True
            self.session.connection_lost(why)
            self._woken.set()
            self._room.unpark_all()

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield the messages of the call, up to its answer."""
        session = self.session.session
        while not self._over:
            self._woken = trio.Event()
            outgoing, charged = session.outgoing(), session.take_charge()
            try:
                for message, _ in outgoing:
                    yield encode(message)
            finally:  # also if they cannot be sent
                self.session.account.give(charged)
            self._room.unpark_all()
            if self.session.held_reports:
                self.session.release()
            if not session.queued:
                if not session.serving:
                    return
                await self._woken.wait()

    # As a wire.

    def wake(self) -> None:
        self._woken.set()

    @property
    def full(self) -> bool:
        return not self._over and self.session.session.queued >= self._run.limits.outgoing

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()
        while self.full:
            await self._room.park()

    def close(self) -> None:
        self.lost("the server has stopped")


class _HolderGone(Exception):
    """The replica that holds the handler has ended."""


def _result(answer: Response | Error) -> JsonObject:
    if isinstance(answer, Response):
        return answer.result
    raise answer.exception


async def _report(ctx: Context, message: Any) -> None:
    """Send a message of the call to its client, as if its handler ran here."""
    link = ctx._link
    if link is None or not hasattr(message, "method"):
        return
    params = message.params
    if message.method == PROGRESS:
        await link.report(ctx, PROGRESS, params["progress"], params.get("total"), params.get("message"))
    elif message.method == LOG:
        await link.report(ctx, LOG, params)
    elif link.session.notify(message.method, params, about=ctx.request.id):
        await link.tell(ctx)


def _owner(holder: Hashable | None) -> str:
    """The holder as the owner of rows and streams."""
    return "" if holder is None else str(holder)


def _written(principal: Any) -> Any:
    if not isinstance(principal, Principal):
        return principal
    return {**attrs.asdict(principal), "scopes": sorted(principal.scopes)}


def _read(principal: Any) -> Any:
    return Principal(**principal) if isinstance(principal, dict) else principal
