"""Standard input and output as one private byte stream, and the life of a server process around it.

The wire is ours alone.  While it is owned, fds 0 and 1 are something else: who reads standard input meets its end, and
whatever is printed, by us, a library, C code or a child process, comes out on stderr (stdio-03).  The wire itself is
read and written through private fds that no child inherits.

Two things surprise.  O_NONBLOCK belongs to an open file description, which the parent's terminal and our own stderr
may share, so we take a description of our own where there is one to be had.  And epoll refuses files and /dev/null,
which always are ready: trio's FdStream never waits for those, as reading and writing succeed at once.

`serve_stdio` serves within the caller's program: it takes what it needs, puts everything back under every way of
leaving, and touches no signal.  `run` is a whole process (see `process`), and never puts fds 0 and 1 back, so that what
an abandoned thread prints or a buffer still holds when the interpreter ends does not reach the wire either.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from trio_mcp.core.errors import LocalProtocolError
from trio_mcp.driver import serve_stream
from trio_mcp.duplex import Tap, write_now
from trio_mcp.process import check_trio, live

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from trio_mcp.server import Server

__all__ = ["own_stdio", "run", "serve_stdio"]

# Bytes to read at once: what a pipe holds, and what one holds that was made larger.
_FEW, _MANY = 64 * 1024, 1024 * 1024

# One pair of fds, one owner: a second one would take stderr for the wire.
_owner = threading.Lock()


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
    check_trio()
    async with own_stdio() as stream:
        await serve_stream(server, stream, tap=tap)


def run(server: Server, *, grace: float = 5.0, tap: Tap | None = None) -> None:
    """Serve one client on standard input and output as the purpose of this process.

    Returns at the end of input; raises SystemExit(130) after Ctrl-C and SystemExit(143) after SIGTERM, which gives
    the calls that run `grace` seconds (`math.inf`: as long as they take).  Signals that the program has ignored or
    handles already are left to it, and so are all of them outside the main thread.
    """

    async def serve() -> None:
        with _owned(give_back=False) as stream:
            await serve_stream(server, stream, tap=tap)

    _greet(server)
    live(server, serve, grace=grace)


def _greet(server: Server) -> None:
    """Tell whoever has started this by hand why nothing happens; what a host gives it is no terminal."""
    if sys.__stderr__ is not None and os.isatty(0):
        name = server.offer().info["name"]
        line = f"{name} waits for a client on standard input, which hosts are: give one this command (Ctrl-C ends it)\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))


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
        receiving = _Input(_description_of_our_own(kept_in, os.O_RDONLY))
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


class _Input(trio.abc.ReceiveStream):
    """FdStream, which sleeps first and reads then: what comes wakes it once, where FdStream goes round the loop and
    asks in vain before it sleeps.  It takes more at a time when there is more, and is woken less by a long message.
    """

    __slots__ = ("_size", "_stream", "_waits")

    def __init__(self, fd: int) -> None:
        self._waits = _can_be_waited_for(fd)
        self._stream = trio.lowlevel.FdStream(fd)
        self._size = _FEW

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        fd = self._stream.fileno()
        if max_bytes is not None or not self._waits or fd < 0:
            return bytes(await self._stream.receive_some(max_bytes))
        await trio.lowlevel.wait_readable(fd)
        try:
            data = os.read(fd, self._size)
        except OSError:  # somebody else was quicker, or the other side has gone: FdStream waits, or says so
            return bytes(await self._stream.receive_some())
        self._size = _MANY if len(data) >= _FEW else _FEW
        return data

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _can_be_waited_for(fd: int) -> bool:
    # Asking epoll about a file or /dev/null fails, and leaves Trio thinking that this task waits for it.
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class _Output(trio.abc.SendStream):
    """FdStream, which can also be asked whether a file is ready."""

    __slots__ = ("_stream", "_waits")

    def __init__(self, fd: int) -> None:
        self._waits = _can_be_waited_for(fd)
        self._stream = trio.lowlevel.FdStream(fd)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    def send_now(self, data: bytes | memoryview) -> int:
        return write_now(self._stream.fileno(), data)

    async def wait_send_all_might_not_block(self) -> None:
        if self._waits or self._stream.fileno() < 0:
            await self._stream.wait_send_all_might_not_block()
        else:
            await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
