"""Reports that wait for room: the progress and log messages of a call whose client reads too slowly.

A server loads this for the first client of this kind.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.core.messages import PROGRESS, Id, JsonObject, Notification, encode, prepare, prepared_progress
from trio_mcp.core.requests import checked_total
from trio_mcp.core.shares import LONG
from trio_mcp.server.context import LOG, Context

if TYPE_CHECKING:
    from trio_mcp.core.session import ServerProtocol
    from trio_mcp.server.session import ServerSession
    from trio_mcp.transport.wire import Wire

__all__ = ["HeldReports", "hold_report", "send_held"]

_LOGS = 16  # log messages of one call that are held
# Seconds between two held reports of one call: a loop that only reports would take all of the CPU.
_INTERVAL = 0.05


class HeldReports:
    """The reports of a call whose client reads too slowly: the last progress, and the first log messages."""

    __slots__ = ("_length", "ctx", "dropped", "logs", "progress", "time")

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.time = -math.inf  # the time of the last held report
        self.logs: deque[JsonObject] = deque()
        self._length = 0  # of all log messages that were ever held, in bytes
        self.dropped = 0  # the number of log messages that were dropped
        self.progress: tuple[float, float | None, str | None] | None = None

    def add_log(self, text: bytes) -> None:
        """Hold a log message.  `text` is a copy, so later changes of the author's data do not affect it."""
        if len(self.logs) < _LOGS and self._length + len(text) <= LONG:
            self._length += len(text)
            self.logs.append(json.loads(text)["params"])
        else:
            self.dropped += 1

    def send_next(self, session: ServerProtocol) -> bool:
        """Send the next held report; False if there is none."""
        id = self.ctx.request.id
        if self.logs:
            session.notify(LOG, self.logs.popleft(), about=id)
        elif self.dropped:
            text = f"{self.dropped} log messages of this call were dropped: the client did not read fast enough"
            self.dropped = 0
            session.notify(LOG, {"level": "warning", "data": text}, about=id)
        elif self.progress is not None:
            report, self.progress = self.progress, None
            session.progress(id, *report)
        else:
            return False
        self.ctx._last_write = self.ctx._wire.mark
        return True


def send_held(session: ServerSession, has_room: Callable[[Wire], bool]) -> None:
    """Send held reports on wires that have room."""
    for id in tuple(session.held_reports):
        _send(session, id, has_room)


def _send(session: ServerSession, id: Id, has_room: Callable[[Wire], bool]) -> None:
    """Send the held reports of this request, as long as its wire has room."""
    held = session.held_reports.get(id)
    while held is not None and has_room(held.ctx._wire):
        if not held.send_next(session.session):
            del session.held_reports[id]
            return


async def hold_report(session: ServerSession, ctx: Context, method: str, *report: Any) -> bool:
    """Hold a report until there is room.  Return False if it can be sent now."""
    ctx._wire.wake()
    for _ in range(2):  # after two turns the writer has written, if it can, for any order of tasks
        await trio.lowlevel.checkpoint()
    held = session.held_reports.get(ctx.request.id)
    if held is not None and ctx._wire.full:
        await trio.sleep_until(held.time + _INTERVAL)
    id = ctx.request.id
    if session._contexts.get(id) is not ctx:
        return True  # meanwhile the call has ended or moved to another session
    _send(session, id, lambda wire: not wire.full)  # in order
    held = session.held_reports.get(id)
    if held is None and not ctx._wire.full:
        return False
    if method == PROGRESS:
        progress, total, message = report
        total = checked_total(total, message)
        prepare(prepared_progress(0, progress, total, message))  # raises if it cannot be written
        held = session.held_reports.setdefault(id, HeldReports(ctx))
        if message is not None and len(message) > LONG:
            message = None  # it may wait long, with those of thousands of calls
        held.progress = progress, total, message
    else:
        (params,) = report
        text = encode(prepare(Notification(method, params)))
        if not ctx._terms.wants_log(params["level"]):
            return True
        held = session.held_reports.setdefault(id, HeldReports(ctx))
        held.add_log(text)
    held.time = trio.current_time()
    return True
