"""A process that only serves: standard input and output, signals, the last deadline, the exit status, the watchdog.

`serve_stdio` serves inside the caller's Trio program and handles no signals.  `run_stdio` and `live` are whole
processes.

How the process ends:

| Event | Running calls | Running tasks | Exit status |
|---|---|---|---|
| end of standard input | finish within `shutdown_timeout` seconds; then an error | given back after the last call | 0 |
| SIGTERM | the same, and new ones are refused | finish within `shutdown_timeout` seconds; then given back | 143 |
| Ctrl-C, or a handler raises KeyboardInterrupt | cancelled at once | given back at once | 130 |
| second Ctrl-C | KeyboardInterrupt, which ends a handler that blocks the loop | the same | 130 |
| third Ctrl-C | the system ends the process | as of a process that dies | killed by SIGINT |
| the background of an extension raises an exception | cancelled at once | given back at once | 1 |
| the server cannot start: the port is in use, standard input is closed | there are none | there are none | 1 |

A task that is given back is cancelled here.  If its tool has `replay=True`, another process on the same store runs it
again at once.  Otherwise it has failed, with an error that says so.  Of a process that dies the next one on the same
store recovers the tasks in this way.  A `MemoryStore` ends with its process.  Tasks have no time of their own after the
end of input: hosts kill a process that does not end within a few seconds, and its handlers could not clean up.

The end of standard input also counts while a lifespan starts, although no task reads stdin then.  It counts if stdin
holds no unread bytes, or if the reader of standard output has gone.

`LAST` seconds after `shutdown_timeout` the process ends with one line on stderr and the status above.  It ends even if
a handler shields itself or blocks the loop, or if a worker thread runs that may not be abandoned.  The time runs from
the first of these events: SIGTERM after Ctrl-C, or after the end of input, does not prolong it.  There is no last
deadline with `shutdown_timeout=math.inf`, nor outside the main thread, because there the process has other purposes.

Two cases are not covered.  C code that keeps the interpreter lock, such as a regular expression that backtracks without
end, stops all threads; in a worker thread it also stops signal handlers.  Threads of the program that are not daemons,
such as those of `concurrent.futures`, keep the process alive after `run()` until they end, or until a second signal.

The watchdog reports a handler that blocks the event loop.  While a handler computes or calls a blocking function, no
other call is served, and no error says why.  The loop cannot see this itself, and comparing clocks at each step of each
task would cost more than the protocol.  So a thread looks at the stack of the loop's thread four times a second while
there are calls, and sleeps while there are none.  If the loop is in a handler, the thread asks the loop to answer.  If
no answer comes, the handler is reported, once.
"""

from __future__ import annotations

import gc
import io
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final, TextIO, cast

import trio

from trio_mcp.core.errors import CannotServe, UsageError, check_seconds
from trio_mcp.server.session import serve_stream
from trio_mcp.transport.nursery import check_trio, open_nursery
from trio_mcp.transport.stdio import Stderr, block_signals, owned_stdio, unhindered_stderr
from trio_mcp.transport.wire import CLOSING, Tap
from trio_mcp.transport.workers import Worker, WorkerPool, watchdog

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = [
    "LAST", "ProcessLife", "announce", "check_process", "live", "parse_address", "run_stdio",
    "serve_stdio", "show_operator", "unbuffer", "watched",
]  # fmt: skip

_log = logging.getLogger("trio_mcp")

# Seconds for cleaning up after `shutdown_timeout`: connections have `CLOSING` seconds to answer unfinished calls with
# an error, and `CLOSING` seconds more for bytes that are being written when they are cut off.
LAST: Final = 2 * CLOSING + 1.0

# A full collection visits all objects, and 5,000 calls that wait at once are 250,000 objects.  Those calls take 395 ms
# of CPU if a full collection follows ten collections of the middle generation (Python's default), 257 ms if it follows
# fifty, and 225 ms without collections.  The younger generations keep their thresholds, because garbage of handlers
# is found there: with 20,000 new objects before a collection, calls that leave cycles of 60 kB pile up to 1.2 GB, and
# a threshold of 2,000 is no faster than Python's 700.
_FULL, _PYTHONS_FULL = 50, 10

# The watchdog.
_LOOK = 0.25  # seconds between two looks
_ANSWER = 0.65  # seconds for an answer: both are less than a second, so a handler that blocks for a second is found
_REPORTED = 1_000  # names of calls that are remembered: clients choose the URIs in them, so they are bounded
_OURS = str(Path(__file__).parent)

_replaced: list[TextIO] = []


async def serve_stdio(server: Server, *, shutdown_timeout: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output.

    Call it inside a Trio program; a script that only serves calls `server.run()`.  While it serves, `print` writes to
    stderr, because stdout belongs to the protocol.

    Returns after the end of stdin, when the running calls are answered.  They have `shutdown_timeout` seconds
    (`math.inf`: without a limit).  `tap(direction, data)` sees all messages.  It is safe to cancel, and installs no
    signal handler.  Raises `UsageError` outside of Trio, and `CannotServe` if stdin or stdout cannot be used.
    """
    check_trio()
    await trio.lowlevel.checkpoint()
    with owned_stdio() as stream:
        await serve_stream(server, stream, shutdown_timeout=shutdown_timeout, tap=tap)


def run_stdio(server: Server, *, shutdown_timeout: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output until the process ends.

    Returns after the end of input; raises SystemExit as `live` does.
    """

    async def serve(life: ProcessLife) -> None:
        with owned_stdio(life) as stream:
            await serve_stream(server, stream, shutdown_timeout=shutdown_timeout, tap=tap)

    if sys.__stderr__ is not None and os.isatty(0):  # a person has started it in a terminal; hosts use pipes
        name = server._current_offer().info["name"]
        advice = "Add this command to your host's configuration. Press Ctrl-C to stop."
        line = f"{name} is waiting for an MCP client on stdin. {advice}\n"
        with suppress(OSError):
            os.write(2, line.encode(errors="replace"))
    live(server, serve, shutdown_timeout=shutdown_timeout)


def live(
    server: Server,
    serve: Callable[[ProcessLife], Awaitable[object]],
    *,
    shutdown_timeout: float,
    leave: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Run a Trio program that serves until `serve` returns.

    After SIGTERM, `leave` is awaited before the server is drained.  Both share `shutdown_timeout`.

    Raises SystemExit(130) after Ctrl-C, SystemExit(143) after SIGTERM, and SystemExit with a line for stderr if the
    server cannot start.  Calls that run at the end have `shutdown_timeout` seconds (`math.inf`: without a limit).
    Signals that the program ignores or handles already are not touched, and no signal is outside the main thread.
    """
    check_process(shutdown_timeout)
    try:
        with unhindered_stderr() as stderr:
            life = ProcessLife(server, shutdown_timeout, stderr, leave)
            try:
                with _fewer_full_collections():
                    trio.run(life.live, serve)
            except KeyboardInterrupt:
                life.status = 130
            except CannotServe as error:
                raise SystemExit(f"{server._current_offer().info['name']}: {error}") from None
            except BaseExceptionGroup as group:
                # Ctrl-C wins over all exceptions that were raised while the tasks ended.
                if group.subgroup(KeyboardInterrupt) is None:
                    raise
                life.status = 130
            finally:
                life.over.set()
    finally:
        unbuffer()
    if life.status:
        raise SystemExit(life.status)


def check_process(shutdown_timeout: float) -> None:
    """Raise `UsageError` inside of an event loop, or if `shutdown_timeout` is no number of seconds."""
    check_seconds("shutdown_timeout", shutdown_timeout)
    if trio.lowlevel.in_trio_run():
        raise UsageError(
            "run() starts a Trio program, and this code runs in one already; here, await serve_stdio(server), or "
            "serve_http(server, host, port)"
        )
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        raise UsageError(
            "run() blocks its thread, and an asyncio event loop runs in this thread; call server.run() outside of the "
            "loop, as the last line of a script"
        )


def announce(
    server: Server, local_url: str, url: str, unix: str | os.PathLike[str] | None = None, workers: int = 1
) -> None:
    """Show on stderr where the server listens; `Server._announced` takes the place of that."""
    if server._announced is not None:
        server._announced(url, workers)
        return
    where = local_url if unix is None else os.fspath(unix)
    where += f", for {url}" if url != where else ""
    where += f", with {workers} workers" if workers > 1 else ""
    show_operator(f"{server._info['name']} listens at {where}")


def show_operator(line: str) -> None:
    """Print a line to stderr.  Only the program prints to stdout."""
    with suppress(OSError):  # the terminal has gone
        print(line, file=sys.stderr, flush=True)  # noqa: T201  # the operator reads it


@contextmanager
def _fewer_full_collections() -> Iterator[None]:
    """Make full collections rarer inside the block, unless the threshold is not Python's default of `_PYTHONS_FULL`."""
    before = gc.get_threshold()
    if before[2] != _PYTHONS_FULL:
        yield
        return
    meanwhile = (*before[:2], _FULL)
    gc.set_threshold(*meanwhile)
    try:
        yield
    finally:
        if gc.get_threshold() == meanwhile:  # otherwise the program has set its own
            gc.set_threshold(*before)


def parse_address(text: str) -> tuple[str, int]:
    """Parse a host and port to listen at, such as ``127.0.0.1:3000``, ``localhost:0`` or ``[::1]:3000``.

    Raises UsageError for other text.  An empty host is refused: listening on every network must be explicit.
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdecimal() or "/" in host:
        raise UsageError(f'http must be a host and port, such as "127.0.0.1:3000", got {text!r}')
    if int(port[:6]) > 65535:
        raise UsageError(f"the port of http must be between 0 (any free port) and 65535, got {text!r}")
    if ":" in host and not bracketed:
        raise UsageError(f'an IPv6 address needs brackets: http="[{host}]:{port}", got {text!r}')
    host = host[1:-1] if bracketed else host
    if not host:
        every = f"0.0.0.0:{port}"
        raise UsageError(f'http needs a host: "127.0.0.1:{port}" for this machine, "{every}" for every network')
    return host, int(port)


class ProcessLife:
    """One process that serves: owns its signals, its last deadline and its exit status."""

    def __init__(
        self,
        server: Server,
        shutdown_timeout: float,
        stderr: Stderr | None,
        leave: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.server = server
        self.stderr = stderr
        """Writes to stderr without waiting; None if stderr never makes a writer wait."""
        self.status = 0
        self.patience = shutdown_timeout + LAST
        """Seconds from the first reason to end until the process exits; may be infinite."""
        self.opening: trio.CancelScope | None = None
        """A scope that is cancelled at once with the first reason to end, because it only prepares to serve."""
        self._shutdown_timeout = shutdown_timeout
        self._leave = leave
        self._everything = trio.CancelScope()
        self._terminated = trio.Event()
        self._ending = False
        self.over = threading.Event()
        """Set when the process may end by itself."""
        main = threading.current_thread() is threading.main_thread()
        if not main or self.patience > threading.TIMEOUT_MAX:
            self.patience = math.inf
        # Read before Trio replaces Python's default handler.  A program in the background of a shell script ignores
        # SIGINT, and must go on ignoring it.
        defaults = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
        self._handled = [number for number, handler in defaults if main and signal.getsignal(number) == handler]

    async def live(self, serve: Callable[[ProcessLife], Awaitable[object]]) -> None:
        with self._signals(), watched(), self._everything:
            async with open_nursery() as nursery:
                nursery.start_soon(self._drain, name="SIGTERM")
                await serve(self)

    def ends(self, why: str) -> None:
        """Start the last deadline, for this reason.  May be called from any thread and from signal handlers.

        Only the first reason counts.  A thread measures the time, because a handler may block the loop.
        """
        if self._ending or self.patience == math.inf:
            return
        self._ending = True

        def enforce_deadline() -> None:
            block_signals()
            if not self.over.wait(self.patience):
                self.leave(why)

        threading.Thread(target=enforce_deadline, name="trio_mcp: the last deadline", daemon=True).start()

    def leave(self, why: str) -> None:
        """Exit the process at once.  May be called from any thread."""
        if self.over.is_set():
            return
        reason = f"a handler or the lifespan has not ended {self.patience:g} seconds after {why}"
        line = f"trio_mcp: {reason}; the process ends without it\n"
        if self.stderr is not None:
            self.stderr.put(line.encode())
        else:
            with suppress(OSError):
                os.write(2, line.encode())
        os._exit(self.status)

    def unwanted(self, why: str) -> None:
        """The client has gone before the run has begun: end without serving.  Call it in the loop."""
        self._cancel_in_time()
        self.ends(why)

    def terminate(self, why: str) -> None:
        """Drain the server and end, for this reason.  May be called in the loop and from signal handlers.

        Only the first reason counts: launchers pass on signals that their whole process group has got already.
        """
        if not self.status:
            self.status = 143
            self._token.run_sync_soon(self._terminated.set)
            self.ends(why)

    def _cancel_in_time(self) -> None:
        """Set a deadline for all tasks, including tasks of no run, such as a lifespan that is starting."""
        if self.opening is not None:
            self.opening.cancel(reason="the process ends before it serves")
        self._everything.deadline = min(
            self._everything.deadline, trio.current_time() + self._shutdown_timeout + CLOSING
        )

    async def _drain(self) -> None:
        await self._terminated.wait()
        self._cancel_in_time()
        deadline = trio.current_time() + self._shutdown_timeout
        if self._leave is not None:
            await self._leave()
        async with self.server.draining(max(0.0, deadline - trio.current_time())):
            pass

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block, unless the program handles them."""
        token = self._token = trio.lowlevel.current_trio_token()
        before = {number: signal.getsignal(number) for number in self._handled}

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            # Here and not in the loop, because the second Ctrl-C must interrupt a handler that blocks the loop.
            signal.signal(signal.SIGINT, interrupt_again)
            self.status = 130
            token.run_sync_soon(self._everything.cancel)
            self.ends("Ctrl-C")

        def interrupt_again(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # Trio's handler raises KeyboardInterrupt in the code of handlers, but not where it would break the loop.
            trio_handler = before[signal.SIGINT]
            assert callable(trio_handler)
            trio_handler(number, frame)

        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: lambda _number, _frame: self.terminate("SIGTERM")}
        try:
            for number in before:
                signal.signal(number, handlers[number])
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def unbuffer() -> None:
    """Replace stdout and stderr by unbuffered files, so that the interpreter has no buffer to flush when it ends.

    The interpreter aborts if it cannot get the lock of a buffer, and a thread that was abandoned inside `print` never
    releases it.  The buffered bytes of the old files are written when no thread uses them any more.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, f"__{name}__")
        # The file is closed, or is not a regular text file: leave it.
        with suppress(AttributeError, ValueError, OSError):
            raw = io.FileIO(old.fileno(), "w", closefd=False)
            # As `python -u` does.  The type annotation wants a buffered file, hence the cast.
            new = io.TextIOWrapper(cast(BinaryIO, raw), old.encoding, old.errors, write_through=True)
            # The list keeps the old file alive: an abandoned thread may print to it without holding a reference
            # (CPython up to 3.13).
            _replaced.append(old)
            if getattr(sys, name) is old:
                setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


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
    """The thread of the watchdog, and its wake-up; see `transport.workers.watchdog`."""

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
