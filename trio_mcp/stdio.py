"""Standard input and output as one private byte stream, and the life of a server process around it.

The wire is ours alone.  While it is owned, fds 0 and 1 are something else: who reads standard input meets its end, and
whatever is printed, by us, a library, C code or a child process, comes out on stderr (stdio-03).  The wire itself is
read and written through private fds that no child inherits.

Two things surprise.  O_NONBLOCK belongs to an open file description, which the parent's terminal and our own stderr
may share, so we take a description of our own where there is one to be had.  And epoll refuses files and /dev/null,
which always are ready: trio's FdStream never waits for those, as reading and writing succeed at once.

`serve_stdio` serves within the caller's program: it takes what it needs, puts everything back under every way of
leaving, and touches no signal.  `run` is a whole process: it answers signals, and never puts fds 0 and 1 back, so that
what an abandoned thread prints or a buffer still holds when the interpreter ends does not reach the wire either.

How a process under `run` ends:

| what happens | running calls | exit status |
|---|---|---|
| end of input, or the client is gone | cancelled at once | 0 |
| SIGTERM | finish within `grace` seconds, new ones are refused; then cancelled, and a second later left | 143 |
| Ctrl-C, or a handler raises KeyboardInterrupt | cancelled at once | 130 |
| Ctrl-C again | KeyboardInterrupt, as in any Trio program, which ends a handler that blocks the loop | 130 |
| Ctrl-C once more | the system ends the process | killed by SIGINT |

Worker threads that may be abandoned hold nobody up; one that may not be is waited for, until the third Ctrl-C or the
end of SIGTERM's grace.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

import trio

from trio_mcp.core.errors import LocalProtocolError
from trio_mcp.driver import Tap, serve_stream

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from types import FrameType

    from trio_mcp.server import Server

__all__ = ["own_stdio", "run", "serve_stdio"]

_LAST = 1.0  # seconds that handlers have for their cleaning up, when they are cancelled after SIGTERM's grace

# One pair of fds, one owner: a second one would take stderr for the wire.
_owner = threading.Lock()
_replaced: list[TextIO] = []


# KeyboardInterrupt waits until all is taken, or all is back.
@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def own_stdio() -> AsyncIterator[trio.abc.HalfCloseableStream]:
    """Standard input and output as a stream, for as long as the block runs.

    Within it fd 0 is /dev/null and fd 1 is stderr; afterwards both are what they were, O_NONBLOCK included.  Works
    with pipes, sockets, terminals and files.  Raises LocalProtocolError on Windows, without a standard input or
    output, and while another block owns them.
    """
    await trio.lowlevel.checkpoint()
    with _owned(give_back=True) as stream:
        yield stream


async def serve_stdio(server: Server, *, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output; returns at the end of input.

    To be cancelled like anything else.  No signal handler is installed, and what is printed afterwards is on standard
    output again: a process that does nothing but serve calls `run`.
    """
    async with own_stdio() as stream:
        await serve_stream(server, stream, tap=tap)


def run(server: Server, *, grace: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output as the purpose of this process.

    Returns at the end of input; raises SystemExit(130) after Ctrl-C and SystemExit(143) after SIGTERM, which gives
    the calls that run `grace` seconds (`math.inf`: as long as they take).  Signals that the program has ignored or
    handles already are left to it, and so are all of them outside the main thread.
    """
    life = _Life(grace)
    try:
        trio.run(life.live, server, tap)
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


class _Life:
    """One process that serves: what its signals ask for, and the exit status it owes."""

    __slots__ = ("drain", "everything", "grace", "ours", "status")

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.status = 0
        self.everything = trio.CancelScope()
        self.drain = trio.Event()
        # Asked before Trio puts its own handler where Python's default one is.  A program in the background of a
        # shell script ignores SIGINT, and is to go on doing so.
        usual = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
        main = threading.current_thread() is threading.main_thread()
        self.ours = [number for number, handler in usual if main and signal.getsignal(number) == handler]

    async def live(self, server: Server, tap: Tap | None) -> None:
        with self._signals(), _owned(give_back=False) as stream, self.everything:
            await serve_stream(server, stream, tap=tap, drain=self.drain)

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
                token.run_sync_soon(self._begin_to_end)
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

    def _begin_to_end(self) -> None:
        self.drain.set()
        self.everything.deadline = trio.current_time() + self.grace


def _end_at_last() -> None:
    """In a thread of its own, for what still runs may block the loop, or shield itself from being cancelled."""
    os.write(2, b"trio_mcp: a handler did not end after SIGTERM; the process does\n")
    os._exit(143)


@contextmanager
@trio.lowlevel.enable_ki_protection
def _owned(*, give_back: bool) -> Iterator[trio.abc.HalfCloseableStream]:
    """The wire as a stream, with fds 0 and 1 out of everybody's way; what is given back is as it was."""
    _check_that_there_is_a_wire()
    with ExitStack() as undo:
        if not _owner.acquire(blocking=False):
            raise LocalProtocolError("standard input and output serve a client already; serve one at a time")
        undo.callback(_owner.release)
        # The first fd that is opened: where stderr is closed this one becomes fd 2, and none of the wire's can.
        null = os.open(os.devnull, os.O_RDWR)
        undo.callback(os.close, null)
        kept_in = undo.enter_context(_kept(0, give_back))
        kept_out = undo.enter_context(_kept(1, give_back))
        receiving = trio.lowlevel.FdStream(_description_of_our_own(kept_in, os.O_RDONLY))
        undo.callback(receiving.close)
        sending = _Output(_description_of_our_own(kept_out, os.O_WRONLY))
        undo.callback(sending.close)
        os.dup2(null, 0)
        os.dup2(_where_prints_go(kept_out, null), 1)
        # What was printed while the program was being imported; only now, when it cannot reach the wire any more.
        _flush_prints(null)
        if give_back:
            undo.callback(_flush_c)
            undo.callback(_flush_prints, null)
        yield trio.StapledStream(sending, receiving)


def _check_that_there_is_a_wire() -> None:
    """Raise LocalProtocolError where the process cannot serve on its standard input and output."""
    if sys.platform == "win32":
        raise LocalProtocolError("stdio is not supported on Windows; use `serve_stream` with a socket, or WSL")
    for fd, name, file in ((0, "input", sys.__stdin__), (1, "output", sys.__stdout__)):
        # An fd that was closed when Python began may be anything by now, Trio's own wakeup socket for one, so what
        # Python saw then decides.
        closed = file is None
        try:
            os.fstat(fd)
        except OSError:
            closed = True
        if closed:
            raise LocalProtocolError(f"standard {name} is closed; start the server with a pipe, socket or file there")


@contextmanager
def _kept(fd: int, give_back: bool) -> Iterator[int]:
    """A private duplicate of a standard fd; in the end O_NONBLOCK is as before, and if it is given back, the fd."""
    inheritable, blocking = os.get_inheritable(fd), os.get_blocking(fd)
    kept = _duplicate(fd)
    try:
        yield kept
    finally:
        os.set_blocking(kept, blocking)
        if give_back:
            os.dup2(kept, fd, inheritable)
        os.close(kept)


def _duplicate(fd: int) -> int:
    # Above the standard ones, and not for children.
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _description_of_our_own(fd: int, flags: int) -> int:
    """An fd for the same pipe, terminal, ..., with an open file description that nobody shares if possible.

    A pipe can be opened again where /proc is, a terminal by its name.  A socket cannot, and a file must not, as it
    would begin with its first byte once more.  Where it fails the description is shared, and is non-blocking for all
    until we give it back.
    """
    if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
        with contextlib.suppress(OSError):
            path = f"/proc/self/fd/{fd}" if sys.platform == "linux" else os.ttyname(fd)
            return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    return _duplicate(fd)


def _where_prints_go(wire: int, null: int) -> int:
    """stderr, unless it is closed, or is the wire itself after `2>&1`; on a terminal a person reads both."""
    if sys.__stderr__ is None or (os.path.sameopenfile(wire, 2) and not os.isatty(wire)):
        return null
    return 2


def _flush_prints(null: int) -> None:
    """Send all that Python has buffered for fd 1 to what fd 1 is now."""
    for file in (sys.stdout, sys.__stdout__):
        # ValueError: it was closed, or the program has made another file of its buffer.
        if file is not None:
            with contextlib.suppress(ValueError):
                try:
                    file.flush()
                except OSError:
                    # stderr takes nothing any more.  The text would stay in the buffer, and the wire be next to get it.
                    os.dup2(null, 1)
                    file.flush()


def _flush_c() -> None:
    """The same for what C code has printed: its buffer would be written when the process exits."""
    import ctypes  # Trio has loaded it anyway

    ctypes.CDLL(None).fflush(None)


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


class _Output(trio.abc.SendStream):
    """FdStream, which can also be asked whether a file is ready."""

    __slots__ = ("_stream", "_waits")

    def __init__(self, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        # Asking epoll about a file or /dev/null fails, and leaves Trio thinking that this task waits for it.
        self._waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)
        self._stream = trio.lowlevel.FdStream(fd)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        if self._waits or self._stream.fileno() < 0:
            await self._stream.wait_send_all_might_not_block()
        else:
            await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
