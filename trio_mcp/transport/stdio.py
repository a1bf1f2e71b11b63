"""Standard input and output as one private byte stream, and the life of a server process around it.

The wire is ours alone.  While it is owned, fds 0 and 1 are something else: who reads standard input meets its end, and
whatever is printed, by us, a library, C code or a child process, comes out on stderr (stdio-03).  The wire itself is
read and written through private fds that no child inherits.

Two things surprise.  O_NONBLOCK belongs to an open file description, which the parent's terminal and our own stderr
may share, so we take a description of our own where there is one to be had.  And epoll refuses files and /dev/null,
which always are ready: trio's FdStream never waits for those, as reading and writing succeed at once.

`own_stdio` is for a part of the caller's program: it puts everything back under every way of leaving.  With a
`ProcessLife` the process ends with the wire, and fds 0 and 1 are never put back, so that what an abandoned thread
prints or a buffer still holds when the interpreter ends does not reach the wire either.

A process has to end with its input, also while a handler blocks the event loop, which then cannot see the end.  So
under `run` a thread watches the input, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from trio_mcp.core.errors import CannotServe, UsageError
from trio_mcp.transport.duplex import write_now
from trio_mcp.transport.stderr import take_no_signals

if sys.platform != "win32":
    import fcntl
    import termios

if TYPE_CHECKING:
    from trio_mcp.server.process import ProcessLife

__all__ = ["own_stdio", "owned_stdio"]

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
    with pipes, sockets, terminals and files.  Raises UsageError on Windows, without a standard input or
    output, and while another block owns them.
    """
    await trio.lowlevel.checkpoint()
    with owned_stdio() as stream:
        yield stream


@contextmanager
@trio.lowlevel.enable_ki_protection
def owned_stdio(life: ProcessLife | None = None) -> Iterator[trio.abc.HalfCloseableStream]:
    """The wire as a stream, with fds 0 and 1 out of everybody's way.

    With `life` the process ends with the wire, and the fds stay as they are; else they are given back as they were.
    """
    _check_that_there_is_a_wire()
    give_back = life is None
    with ExitStack() as undo:
        if not _owner.acquire(blocking=False):
            raise UsageError("standard input and output serve a client already; serve one at a time")
        undo.callback(_owner.release)
        # The first fd that is opened: where stderr is closed this one becomes fd 2, and none of the wire's can.
        null = os.open(os.devnull, os.O_RDWR)
        undo.callback(os.close, null)
        kept_in = undo.enter_context(_kept(0, give_back))
        kept_out = undo.enter_context(_kept(1, give_back))
        own_in = _description_of_our_own(kept_in, os.O_RDONLY)
        receiving = _StdinStream(own_in, _ignored if life is None else life.ends)
        undo.callback(receiving.close)
        own_out = _description_of_our_own(kept_out, os.O_WRONLY)
        sending = _StdoutStream(own_out)
        undo.callback(sending.close)
        os.dup2(null, 0)
        prints = _where_prints_go(kept_out, null)
        os.dup2(prints, 1)
        # What was printed while the program was being imported; only now, when it cannot reach the wire any more.
        _flush_prints(null)
        if life is not None:
            if life.stderr is not None and prints != null:
                undo.enter_context(life.stderr.carrying(1, sys.stdout, sys.__stdout__))
            undo.enter_context(_input_watched(own_in, own_out, receiving, life))
        if give_back:
            undo.callback(_flush_c)
            undo.callback(_flush_prints, null)
        yield trio.StapledStream(sending, receiving)


def _check_that_there_is_a_wire() -> None:
    """Raise `CannotServe` where the process cannot serve on its standard input and output."""
    if sys.platform == "win32":
        raise CannotServe("stdio is not supported on Windows; use `serve_stream` with a socket, or WSL")
    for fd, name, file in ((0, "input", sys.__stdin__), (1, "output", sys.__stdout__)):
        # An fd that was closed when Python began may be anything by now, Trio's own wakeup socket for one, so what
        # Python saw then decides.
        closed = file is None
        try:
            os.fstat(fd)
        except OSError:
            closed = True
        if closed:
            raise CannotServe(f"standard {name} is closed; start the server with a pipe, socket or file there")


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
    """Flush Python's buffers for fd 1, which is stderr now; drop their text if stderr is full."""
    room = select.poll()
    room.register(1, select.POLLOUT)
    if not room.poll(0):
        os.dup2(null, 1)
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


class _StdinStream(trio.abc.ReceiveStream):
    """FdStream, which sleeps first and reads then: what comes wakes it once, where FdStream goes round the loop and
    asks in vain before it sleeps.  It takes more at a time when there is more, and is woken less by a long message.
    """

    __slots__ = ("_ended", "_size", "_stream", "_waits", "begun")

    def __init__(self, fd: int, ended: Callable[[str], object]) -> None:
        """`ended` is called with the reason when nothing more will be read."""
        self.begun = False  # it has been read from
        self._waits = _can_be_waited_for(fd)
        self._stream = trio.lowlevel.FdStream(fd)
        self._size = _FEW
        self._ended = ended

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.begun = True
        fd = self._stream.fileno()
        if max_bytes is not None or not self._waits or fd < 0:
            data = bytes(await self._stream.receive_some(max_bytes))
        else:
            await trio.lowlevel.wait_readable(fd)
            try:
                data = os.read(fd, self._size)
            except OSError:  # somebody else was quicker, or the other side has gone: FdStream waits, or says so
                data = bytes(await self._stream.receive_some())
        if not data:
            self._ended(_END)
        self._size = _MANY if len(data) >= _FEW else _FEW
        return data

    def close(self) -> None:
        self._ended(_GONE)
        self._stream.close()

    async def aclose(self) -> None:
        self._ended(_GONE)
        await self._stream.aclose()


_END, _GONE = "the end of standard input", "its client had gone"


def _ignored(_: str) -> None:
    """The process goes on after the end of its input."""


@contextmanager
def _input_watched(fd: int, out: int, stream: _StdinStream, life: ProcessLife) -> Iterator[None]:
    """Within the block a thread looks for the end of this input, which a loop that is blocked cannot see, nor one that
    does not read yet.

    After the end the thread asks the loop for an answer, again and again.  A loop that gives none for as long as the
    process may take to end is blocked by a handler.  The system reports the end of pipes and sockets; a file has its
    end from the start; at a terminal there is Ctrl-C.
    """
    if life.patience == math.inf:
        yield
        return
    waits, token = _can_be_waited_for(fd), trio.lowlevel.current_trio_token()
    woken, wake = os.pipe()
    over = False

    def turned() -> None:
        if not over:
            if not stream.begun and _nothing_waits(fd, out):
                life.unwanted(_END)
            os.write(wake, b".")

    def watch() -> None:
        take_no_signals()
        look = select.poll()
        look.register(woken, select.POLLIN)
        if waits:
            look.register(fd, getattr(select, "POLLRDHUP", 0))
            if any(ready == woken for ready, _ in look.poll()):
                return
            look.unregister(fd)
        patience = min(1000 * life.patience, 2**31 - 1)  # milliseconds, in C
        while True:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(turned)
            if not look.poll(patience):
                life.leave(_END)
            # The loop has answered, or this is over.
            if not os.read(woken, 1) or look.poll(patience):
                return

    thread = threading.Thread(target=watch, name="trio_mcp: the end of standard input", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over = True
        os.close(wake)
        thread.join()
        os.close(woken)


def _nothing_waits(fd: int, out: int) -> bool:
    """Whether nothing is unread in this input, or whatever would be answered is read no more."""
    try:
        unread = any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    except OSError:  # it is a file, or a device
        return False
    reader = select.poll()
    reader.register(out, 0)
    return not unread or bool(reader.poll(0))


def _can_be_waited_for(fd: int) -> bool:
    # Asking epoll about a file or /dev/null fails, and leaves Trio thinking that this task waits for it.
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class _StdoutStream(trio.abc.SendStream):
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
