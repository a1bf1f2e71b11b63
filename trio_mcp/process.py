"""The life of a process whose purpose is to serve.

How it ends:

| what happens | running calls | exit status |
|---|---|---|
| there is nothing more to serve, such as after the end of input | cancelled at once | 0 |
| SIGTERM | finish within `grace` seconds, new ones are refused; then an error, and three seconds later left | 143 |
| Ctrl-C, or a handler raises KeyboardInterrupt | cancelled at once | 130 |
| Ctrl-C again | KeyboardInterrupt, as in any Trio program, which ends a handler that blocks the loop | 130 |
| Ctrl-C once more | the system ends the process | killed by SIGINT |

Worker threads that may be abandoned hold nobody up; one that may not be is waited for, until the third Ctrl-C or the
end of SIGTERM's grace.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

import trio

from trio_mcp.core.errors import LocalProtocolError
from trio_mcp.groups import open_nursery
from trio_mcp.outbox import CLOSING
from trio_mcp.running import check_seconds

if TYPE_CHECKING:
    from types import FrameType

    from trio_mcp.server import Server

__all__ = ["check_trio", "live", "place"]

# Seconds for cleaning up after SIGTERM's grace: connections have `CLOSING` of them to tell what was not finished, and
# as many again for what is being written when they are cut off.
_LAST = 2 * CLOSING + 1.0

_replaced: list[TextIO] = []


def check_trio() -> None:
    """Raise `LocalProtocolError` in a program on another event loop."""
    if not trio.lowlevel.in_trio_task():
        raise LocalProtocolError(
            "trio_mcp runs on Trio, and this program, or the ASGI server that it is part of, on another event loop; "
            "begin by trio.run(main), or use Hypercorn with its Trio worker: hypercorn --worker-class trio module:app"
        )


def live(server: Server, serve: Callable[[], Awaitable[object]], *, grace: float) -> None:
    """Serve as the purpose of this process, for as long as `serve` does.

    Returns then; raises SystemExit(130) after Ctrl-C and SystemExit(143) after SIGTERM, which gives the calls that run
    `grace` seconds (`math.inf`: as long as they take).  Signals that the program has ignored or handles already are
    left to it, and so are all of them outside the main thread.
    """
    check_seconds("grace", grace)
    if trio.lowlevel.in_trio_run():
        raise LocalProtocolError(
            "run() begins a Trio program of its own, and this is one already; in here, await serve_stdio(server), or "
            "serve_http(server, host, port)"
        )
    life = _Life(server, grace)
    try:
        with _collecting_rarely():
            trio.run(life.live, serve)
    except KeyboardInterrupt:
        life.status = 130
    except BaseExceptionGroup as group:
        # Ctrl-C wins over whatever else went wrong while everything ended.
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        life.status = 130
    finally:
        _unbuffer()
    if life.status:
        raise SystemExit(life.status)


# A call that waits is some dozens of objects to the cyclic collector, which by default looks at new ones after 700, and
# at all again and again while thousands of calls begin: that was a third of what 5,000 at once cost.  Calls make no
# cycles, so what is found is only what handlers leave behind.  As long as that is nothing, looks become rarer still, up
# to where 5,000 calls can begin without one: another tenth.  Nor is all looked at again after each tenth look, which is
# the default too, for what has been looked at is what waits; so that is after a million new objects in any case.
_NEW_OBJECTS = 20_000
_LOOKS = 50
_RARER = 16  # times, at most
_NOTHING = 0.01  # of what was new
_DEFAULTS = {700, 2000}  # of Python 3.11 to 3.14


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """In here the collector looks at new objects when there are many, unless the program has told it when."""
    told = gc.get_threshold()
    if told[0] not in _DEFAULTS:
        yield
        return
    looks = _Looks(told[2])
    gc.callbacks.append(looks)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the program may have cleared them
            gc.callbacks.remove(looks)
        gc.set_threshold(*told)


class _Looks:
    """When the collector looks: half as often after each time that it found next to nothing, until it finds something.

    No more once the program says when.
    """

    __slots__ = ("_all", "_rarer")

    def __init__(self, all: int) -> None:
        self._all = all
        self._rarer = 1
        gc.set_threshold(*self._thresholds)

    @property
    def _thresholds(self) -> tuple[int, int, int]:
        return _NEW_OBJECTS * self._rarer, _LOOKS // self._rarer, self._all

    @trio.lowlevel.enable_ki_protection  # the collector drops what is raised here, and a Ctrl-C is not to be lost
    def __call__(self, phase: str, looked: Mapping[str, int]) -> None:
        if phase != "stop" or looked["generation"] != 0 or gc.get_threshold() != self._thresholds:
            return
        found = looked["collected"] > _NEW_OBJECTS * self._rarer * _NOTHING
        self._rarer = 1 if found else min(2 * self._rarer, _RARER)
        gc.set_threshold(*self._thresholds)


def place(text: str) -> tuple[str, int]:
    """The host and port to listen at, from text such as ``127.0.0.1:3000``, ``localhost:0`` or ``[::1]:3000``.

    Raises LocalProtocolError for anything else.  An empty host is refused: to be open to everybody is to be said.
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdecimal() or "/" in host:
        raise LocalProtocolError(f'http is where to listen, such as "127.0.0.1:3000"; not {text!r}')
    if int(port[:6]) > 65535:
        raise LocalProtocolError(f"a port is at most 65535, or 0 for any that is free; not {text!r}")
    if ":" in host and not bracketed:
        raise LocalProtocolError(f'an IPv6 address stands in brackets: http="[{host}]:{port}", not {text!r}')
    host = host[1:-1] if bracketed else host
    if not host:
        every = f"0.0.0.0:{port}"
        raise LocalProtocolError(f'say for whom to listen: http="127.0.0.1:{port}", or "{every}" for every network')
    return host, int(port)


class _Life:
    """One process that serves: what its signals ask for, and the exit status it owes."""

    __slots__ = ("everything", "grace", "ours", "server", "status", "terminated")

    def __init__(self, server: Server, grace: float) -> None:
        self.server = server
        self.grace = grace
        self.status = 0
        self.everything = trio.CancelScope()
        self.terminated = trio.Event()
        # Asked before Trio puts its own handler where Python's default one is.  A program in the background of a
        # shell script ignores SIGINT, and is to go on doing so.
        usual = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
        main = threading.current_thread() is threading.main_thread()
        self.ours = [number for number, handler in usual if main and signal.getsignal(number) == handler]

    async def live(self, serve: Callable[[], Awaitable[object]]) -> None:
        with self._signals(), self.everything:
            async with open_nursery() as nursery:
                nursery.start_soon(self._drain, name="SIGTERM")
                await serve()

    async def _drain(self) -> None:
        await self.terminated.wait()
        # Then everything ends, also what no run has to do with yet, such as a lifespan that is beginning.
        self.everything.deadline = trio.current_time() + self.grace + CLOSING
        async with self.server.draining(self.grace):
            pass

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Hear the signals that are ours."""
        token = trio.lowlevel.current_trio_token()
        before = {number: signal.getsignal(number) for number in self.ours}

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            # Here and not in the loop, for the next one must get through to a handler that blocks the loop.
            signal.signal(signal.SIGINT, interrupt_again)
            self.status = 130
            token.run_sync_soon(self.everything.cancel)

        def interrupt_again(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # Trio's: raises KeyboardInterrupt in the code of handlers, but not where it would break the loop itself.
            trios = before[signal.SIGINT]
            assert callable(trios)
            trios(number, frame)

        def terminate(_number: int, _frame: FrameType | None) -> None:
            # Heard once: launchers pass on what their whole process group has got already.
            if not self.status:
                self.status = 143
                token.run_sync_soon(self.terminated.set)
                if self.grace < threading.TIMEOUT_MAX - _LAST:
                    last.append(threading.Timer(self.grace + _LAST, _end_at_last))
                    last[0].daemon = True
                    last[0].start()

        last: list[threading.Timer] = []
        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
        try:
            for number in before:
                signal.signal(number, handlers[number])
            yield
        finally:
            for timer in last:
                timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_at_last() -> None:
    """In a thread of its own, for what still runs may block the loop, or shield itself from being cancelled."""
    os.write(2, b"trio_mcp: a handler did not end after SIGTERM; the process does\n")
    os._exit(143)


def _unbuffer() -> None:
    """Let `print` write at once from now on, so that there is no buffer to be flushed when the interpreter ends.

    It aborts where it cannot get the lock of such a buffer, and a thread that was left behind in the middle of a
    `print` never gives it back.  What the old files hold is written when they go, which is when no thread uses them.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, f"__{name}__")
        # Closed, or in somebody else's hands: then there is nothing to do about it.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            raw = io.FileIO(old.fileno(), "w", closefd=False)
            # As `python -u` makes them; the hint asks for a buffer, which is just what must not be there.
            new = io.TextIOWrapper(cast(BinaryIO, raw), old.encoding, old.errors, write_through=True)
            # Such a thread may print to the old one without having counted itself among its users (CPython to 3.13).
            _replaced.append(old)
            if getattr(sys, name) is old:
                setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
