"""The watchdog: report a handler that blocks the event loop while `server.run()` serves.

While a handler computes or calls a blocking function, no other call is served, and no error says why.  The loop cannot
see this itself, and comparing clocks at each step of each task would cost more than the protocol.  So a thread looks at
the stack of the loop's thread four times a second while there are calls, and sleeps while there are none.  If the loop
is in a handler, the thread asks the loop to answer.  If no answer comes, the handler is reported, once.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import trio

from trio_mcp.transport.stderr import block_signals
from trio_mcp.transport.workers import Worker, WorkerPool, watchdog

__all__ = ["watched"]

_log = logging.getLogger("trio_mcp")

_LOOK = 0.25  # seconds between two looks
_ANSWER = 0.75  # seconds for an answer: so a handler that blocks the loop for a second is found
_REPORTED = 1_000  # names of calls that are remembered: clients choose the URIs in them, so they are bounded
_OURS = str(Path(__file__).parent)


@contextmanager
def watched() -> Iterator[None]:
    """A block in which handlers that block the loop of this Trio run are reported."""
    watch = _WatchdogThread()
    before = watchdog.set(watch)
    watch.thread.start()
    try:
        yield
    finally:
        watchdog.reset(before)
        watch.end()


class _WatchdogThread:
    """The thread of the watchdog, and its wake-up; implements `transport.workers.Watchdog`."""

    def __init__(self) -> None:
        self.asleep = False
        self.thread = threading.Thread(target=self._run, name="trio_mcp: watchdog", daemon=True)
        self._loop = threading.get_ident()
        self._token = trio.lowlevel.current_trio_token()
        self._pools: list[WorkerPool] = []
        self._called = threading.Event()
        self._answered = threading.Event()
        self._over = threading.Event()
        self._reported: set[str] = set()

    def watch(self, pool: WorkerPool) -> None:
        self._pools = [*(each for each in self._pools if not each.ended), pool]

    def wake(self) -> None:
        self.asleep = False
        self._called.set()

    def end(self) -> None:
        for event in (self._over, self._called, self._answered):
            event.set()
        self.thread.join(_ANSWER)  # a log handler may be slow

    def _run(self) -> None:
        block_signals()
        while not self._over.is_set():
            self._called.clear()
            self.asleep = True  # set before looking for calls, or a call that starts now might be missed
            if not any(pool.busy for pool in self._pools):
                self._called.wait()
            self.asleep = False
            if not self._over.wait(_LOOK):
                self._look()

    def _look(self) -> None:
        worker, _ = self._handler()
        if worker is None:
            return
        name = worker.name
        self._answered.clear()
        try:
            self._token.run_sync_soon(self._answered.set)
        except trio.RunFinishedError:
            return
        if self._answered.wait(_ANSWER) or name in self._reported or len(self._reported) >= _REPORTED:
            return
        still, stack = self._handler()
        if still is worker and worker.name == name:
            self._reported.add(name)
            _log.warning(
                "%s has blocked the event loop for a second, and no other call is served meanwhile: make it wait with "
                "`await`, or make it a plain `def`, which runs in a thread. It is at\n%s",
                name, "".join(traceback.format_list(stack)).rstrip(),
            )  # fmt: skip

    def _handler(self) -> tuple[Worker | None, traceback.StackSummary]:
        """The worker that the loop's thread runs now, or None, and its stack."""
        frame: FrameType | None = sys._current_frames().get(self._loop)
        stack: list[tuple[FrameType, int]] = []
        while frame is not None:
            if frame.f_code is Worker.serve.__code__:
                found = traceback.StackSummary.extract(iter(reversed(stack)))
                return frame.f_locals["self"], traceback.StackSummary.from_list(
                    [each for each in found if not each.filename.startswith(_OURS)]
                )
            stack.append((frame, frame.f_lineno))
            frame = frame.f_back
        return None, traceback.StackSummary()
