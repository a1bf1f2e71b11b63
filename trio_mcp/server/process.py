"""The life of a process whose purpose is to serve.

How it ends:

| what happens | running calls | exit status |
|---|---|---|
| the end of standard input | finish within `shutdown_timeout` seconds; then an error | 0 |
| SIGTERM | finish within `shutdown_timeout` seconds, new ones are refused; then an error | 143 |
| Ctrl-C, or a handler raises KeyboardInterrupt | cancelled at once | 130 |
| Ctrl-C again | KeyboardInterrupt, as in any Trio program, which ends a handler that blocks the loop | 130 |
| Ctrl-C once more | the system ends the process | killed by SIGINT |
| it cannot begin: the port is in use, standard input is closed | there are none | 1 |

The end of standard input counts also while a lifespan begins, when nothing reads it: if nothing unread is in it, or the
reader of standard output has gone.

`_LAST` seconds after the grace the process ends, with one line on stderr and the status above, also while a handler
shields itself or blocks the loop, or a worker thread runs that may not be abandoned.  The time runs from the first of
these events: SIGTERM after Ctrl-C, or after the end of input, does not prolong it.  With `shutdown_timeout=math.inf`
there is no such end, and none outside the main thread, where the process has other purposes.

Two things are beyond this.  C code that keeps the lock of the interpreter, such as a regular expression that backtracks
without end, lets no thread run, and in a worker thread no signal handler either.  Threads of the program's own that are
no daemons, such as those of `concurrent.futures`, keep the process after `run()` until they end, or a second signal.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

import trio

from trio_mcp.core.errors import CannotServe, UsageError, check_seconds
from trio_mcp.server.watchdog import watched
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import CLOSING
from trio_mcp.transport.stderr import Stderr, take_no_signals, unhindered_stderr

if TYPE_CHECKING:
    from types import FrameType

    from trio_mcp.server.server import Server

__all__ = ["ProcessLife", "live", "place"]

# Seconds for cleaning up after SIGTERM's grace: connections have `CLOSING` of them to tell what was not finished, and
# as many again for what is being written when they are cut off.
_LAST = 2 * CLOSING + 1.0

_replaced: list[TextIO] = []


def _in_asyncio() -> bool:
    try:
        sys.modules["asyncio"].get_running_loop()
    except (KeyError, RuntimeError):  # it is not even loaded, or no loop runs
        return False
    return True


def live(server: Server, serve: Callable[[ProcessLife], Awaitable[object]], *, shutdown_timeout: float) -> None:
    """Serve as the purpose of this process, for as long as `serve` does.

    Returns then; raises SystemExit(130) after Ctrl-C, SystemExit(143) after SIGTERM, and SystemExit with a line for
    stderr if it cannot begin.  Calls that run at the end have `shutdown_timeout` seconds (`math.inf`: as long as they
    take).  Signals that the program has ignored or handles already are left to it, and so are all of them outside the
    main thread.
    """
    check_seconds("shutdown_timeout", shutdown_timeout)
    if trio.lowlevel.in_trio_run():
        raise UsageError(
            "run() begins a Trio program of its own, and this is one already; in here, await serve_stdio(server), or "
            "serve_http(server, host, port)"
        )
    if _in_asyncio():
        raise UsageError(
            "run() blocks its thread, and an event loop of asyncio runs in that; call server.run() outside of it, as "
            "the last line of a script"
        )
    try:
        with unhindered_stderr() as stderr, ProcessLife(server, shutdown_timeout, stderr) as life:
            try:
                with _fewer_full_collections():
                    trio.run(life.live, serve)
            except KeyboardInterrupt:
                life.status = 130
            except CannotServe as error:
                raise SystemExit(f"{server.offer().info['name']}: {error}") from None
            except BaseExceptionGroup as group:
                # Ctrl-C wins over whatever else went wrong while everything ended.
                if group.subgroup(KeyboardInterrupt) is None:
                    raise
                life.status = 130
    finally:
        _unbuffer()
    if life.status:
        raise SystemExit(life.status)


# A full collection visits all objects, and 5,000 calls that wait at once are 250,000 of them.  They take 395 ms of
# CPU if a full collection follows ten of the middle generation, which is Python's default, 257 ms if it follows
# fifty, and 225 ms without collections.  The younger generations keep their thresholds, because garbage of handlers
# is found there: with 20,000 new objects before a collection, calls that leave cycles of 60 kB pile up to 1.2 GB, and
# 2,000 are no faster than Python's 700.
_FULL, _PYTHONS_FULL = 50, 10


@contextmanager
def _fewer_full_collections() -> Iterator[None]:
    """Full collections are rarer in here, unless the program, or its version of Python, has another default."""
    before = gc.get_threshold()
    if before[2] != _PYTHONS_FULL:
        yield
        return
    meanwhile = (*before[:2], _FULL)
    gc.set_threshold(*meanwhile)
    try:
        yield
    finally:
        if gc.get_threshold() == meanwhile:  # else the program has said when
            gc.set_threshold(*before)


def place(text: str) -> tuple[str, int]:
    """The host and port to listen at, from text such as ``127.0.0.1:3000``, ``localhost:0`` or ``[::1]:3000``.

    Raises UsageError for anything else.  An empty host is refused: to be open to everybody is to be said.
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdecimal() or "/" in host:
        raise UsageError(f'http is where to listen, such as "127.0.0.1:3000"; not {text!r}')
    if int(port[:6]) > 65535:
        raise UsageError(f"a port is at most 65535, or 0 for any that is free; not {text!r}")
    if ":" in host and not bracketed:
        raise UsageError(f'an IPv6 address stands in brackets: http="[{host}]:{port}", not {text!r}')
    host = host[1:-1] if bracketed else host
    if not host:
        every = f"0.0.0.0:{port}"
        raise UsageError(f'say for whom to listen: http="127.0.0.1:{port}", or "{every}" for every network')
    return host, int(port)


class ProcessLife:
    """One process that serves: its signals, its last deadline and its exit status."""

    def __init__(self, server: Server, shutdown_timeout: float, stderr: Stderr | None) -> None:
        self.server = server
        self.stderr = stderr
        """Writes to stderr without waiting; None where stderr cannot make a writer wait."""
        self.status = 0
        self.patience = shutdown_timeout + _LAST
        """Seconds from the first reason to end until the process is gone; may be infinite."""
        self._shutdown_timeout = shutdown_timeout
        self._everything = trio.CancelScope()
        self._terminated = trio.Event()
        self._ending = False
        self._over = threading.Event()
        main = threading.current_thread() is threading.main_thread()
        if not main or self.patience > threading.TIMEOUT_MAX:
            self.patience = math.inf
        # Asked before Trio puts its own handler where Python's default one is.  A program in the background of a
        # shell script ignores SIGINT, and is to go on doing so.
        usual = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
        self._ours = [number for number, handler in usual if main and signal.getsignal(number) == handler]

    def __enter__(self) -> ProcessLife:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    async def live(self, serve: Callable[[ProcessLife], Awaitable[object]]) -> None:
        with self._signals(), watched(), self._everything:
            async with open_nursery() as nursery:
                nursery.start_soon(self._drain, name="SIGTERM")
                await serve(self)

    def ends(self, why: str) -> None:
        """The process has a reason to end.  May be called from any thread and from signal handlers.

        The first reason counts.  A thread takes the time, because a handler may block the loop.
        """
        if not self._ending and self.patience < math.inf:
            self._ending = True
            threading.Thread(target=self._outwait, args=(why,), name="trio_mcp: the last deadline", daemon=True).start()

    def _outwait(self, why: str) -> None:
        take_no_signals()
        if not self._over.wait(self.patience):
            self.leave(why)

    def leave(self, why: str) -> None:
        """End the process at once.  May be called from any thread."""
        if self._over.is_set():
            return
        what = f"a handler or the lifespan has not ended {self.patience:g} seconds after {why}"
        line = f"trio_mcp: {what}; the process ends without it\n"
        if self.stderr is not None:
            self.stderr.put(line.encode())
        else:
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        os._exit(self.status)

    def unwanted(self, why: str) -> None:
        """Nothing waits for an answer, and the run has not begun.  To be called in the loop."""
        self._cancel_in_time()
        self.ends(why)

    def _cancel_in_time(self) -> None:
        """Everything ends then, also what no run has to do with yet, such as a lifespan that is beginning."""
        self._everything.deadline = min(
            self._everything.deadline, trio.current_time() + self._shutdown_timeout + CLOSING
        )

    async def _drain(self) -> None:
        await self._terminated.wait()
        self._cancel_in_time()
        async with self.server.draining(self._shutdown_timeout):
            pass

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Hear the signals that are ours."""
        token = trio.lowlevel.current_trio_token()
        before = {number: signal.getsignal(number) for number in self._ours}

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            # Here and not in the loop, for the next one must get through to a handler that blocks the loop.
            signal.signal(signal.SIGINT, interrupt_again)
            self.status = 130
            token.run_sync_soon(self._everything.cancel)
            self.ends("Ctrl-C")

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
                token.run_sync_soon(self._terminated.set)
                self.ends("SIGTERM")

        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
        try:
            for number in before:
                signal.signal(number, handlers[number])
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
