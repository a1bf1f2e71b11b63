"""Standard input and output as one private byte stream, and standard error that never waits for its reader.

Only this stream uses the wire (the original stdin and stdout).  While a block owns it, fds 0 and 1 are replaced: reads
of standard input return its end, and all prints of the program, a library, C code or a child process go to stderr
(stdio-03).  The wire itself is read and written through private fds that no child inherits.

Two surprises.  O_NONBLOCK belongs to the open file description, which the parent's terminal and our own stderr may
share, so we open a description of our own if possible.  And epoll refuses files and /dev/null, which are always ready:
Trio's FdStream never waits for them, because reads and writes succeed at once.

`owned_stdio` may be a part of the caller's program: it restores the fds however the block ends.  With a `ProcessLife`,
the process ends with the wire, and fds 0 and 1 are never restored.  So prints of an abandoned thread, and data that a
buffer still holds at the end of the interpreter, do not reach the wire either.

A process must end when its input ends, even if a handler blocks the event loop, which then cannot see the end.  So
under `run` a thread watches the input too.

A host may start a server with a pipe as its stderr and never read it.  The pipe holds 64 KiB; the next log line would
block for ever, and the event loop with it.  So while `server.run()` serves, the Python files for stderr write without
waiting.  A line is written at once if there is room; otherwise it goes into a bounded queue, which a thread writes when
the pipe has room again.  If the queue is full, lines are dropped, counted, and reported in one line.

The file objects are initialised again in place.  A logging handler created earlier, or a module that has imported
`stderr`, holds the same object, and must not block either; a new object in `sys` would not reach them.

C code and child processes write to the file descriptors directly, and may still block.  A pipe of our own in front of
the real one would cover them, but the last lines of a process that crashes or calls `os._exit` would be lost in it.
"""

from __future__ import annotations

import io
import math
import os
import select
import signal
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO, TextIO, TypeGuard, cast

import trio

from trio_mcp.core.errors import CannotServe, UsageError
from trio_mcp.transport.wire import CLOSING, write_now

if sys.platform != "win32":
    import fcntl
    import termios

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from trio_mcp.server.process import ProcessLife

__all__ = ["Stderr", "block_signals", "owned_stdio", "unhindered_stderr"]

# Bytes of one read: the usual capacity of a pipe, and that of an enlarged one.
_FEW, _MANY = 64 * 1024, 1024 * 1024

_MAX_QUEUED = 256 * 1024  # bytes in the queue of stderr: some thousand lines, enough for a slow moment of the host

# There is one pair of fds and so one owner: a second owner would use stderr as its wire.
_owner = threading.Lock()


# KeyboardInterrupt waits until all fds are replaced, or all are restored.
@contextmanager
@trio.lowlevel.enable_ki_protection
def owned_stdio(life: ProcessLife | None = None) -> Iterator[trio.abc.HalfCloseableStream]:
    """Give standard input and output as a stream until the end of the block.

    Within the block, fd 0 is /dev/null and fd 1 is stderr; afterwards both are restored, O_NONBLOCK included.  With
    `life`, the process ends with the wire, and the fds stay replaced.  Works with pipes, sockets, terminals and files.
    Raises `CannotServe` on Windows, or if standard input or output is closed, and `UsageError` while another block owns
    them.
    """
    _check_that_there_is_a_wire()
    give_back = life is None
    with ExitStack() as undo:
        if not _owner.acquire(blocking=False):
            raise UsageError("standard input and output serve a client already; serve one at a time")
        undo.callback(_owner.release)
        # Opened first: if stderr is closed, this becomes fd 2, and no fd of the wire can.
        null = os.open(os.devnull, os.O_RDWR)
        undo.callback(os.close, null)
        kept_in = undo.enter_context(_kept(0, give_back))
        kept_out = undo.enter_context(_kept(1, give_back))
        own_in = _own_description(kept_in, os.O_RDONLY)
        receiving = _StdinStream(own_in, (lambda _: None) if life is None else life.ends)
        undo.callback(receiving.close)
        own_out = _own_description(kept_out, os.O_WRONLY)
        sending = _StdoutStream(own_out)
        undo.callback(sending.close)
        os.dup2(null, 0)
        # Prints go to stderr, but not if it is closed or is the wire itself, as after `2>&1`; a terminal may be both.
        at_wire = sys.__stderr__ is None or (os.path.sameopenfile(kept_out, 2) and not os.isatty(kept_out))
        prints = null if at_wire else 2
        os.dup2(prints, 1)
        # Flush prints of the time before; not earlier, because they would have reached the wire.
        _flush_prints(null)
        if life is not None:
            if life.stderr is not None and prints != null:
                undo.enter_context(life.stderr.redirecting(1, sys.stdout, sys.__stdout__))
            undo.enter_context(_input_watched(own_in, own_out, receiving, life))
        if give_back:
            import ctypes  # already loaded by Trio

            # Otherwise the buffer of C code would be written when the process exits.
            undo.callback(ctypes.CDLL(None).fflush, None)
            undo.callback(_flush_prints, null)
        yield trio.StapledStream(sending, receiving)


def _check_that_there_is_a_wire() -> None:
    """Raise `CannotServe` if the process cannot serve on its standard input and output."""
    if sys.platform == "win32":
        raise CannotServe("stdio is not supported on Windows; use `serve_stream` with a socket, or WSL")
    for fd, name, file in ((0, "input", sys.__stdin__), (1, "output", sys.__stdout__)):
        # An fd that was closed when Python started may be reused by now, for example by Trio's wakeup socket.  So the
        # file objects that Python created at its start decide.
        closed = file is None
        try:
            os.fstat(fd)
        except OSError:
            closed = True
        if closed:
            raise CannotServe(f"standard {name} is closed; start the server with a pipe, socket or file there")


@contextmanager
def _kept(fd: int, give_back: bool) -> Iterator[int]:
    """Give a private duplicate of a standard fd; at the end restore O_NONBLOCK, and with `give_back` the fd."""
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
    # Above the standard fds, and not inherited by children.
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _own_description(fd: int, flags: int) -> int:
    """Return an fd for the same pipe, terminal or file, with an open file description of its own if possible.

    A pipe can be opened again through /proc, a terminal by its name.  A socket cannot.  A file must not, because it
    would start again at its first byte.  Otherwise the description is shared, and is non-blocking for all its users
    until it is restored.
    """
    if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
        with suppress(OSError):
            path = f"/proc/self/fd/{fd}" if sys.platform == "linux" else os.ttyname(fd)
            return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    return _duplicate(fd)


def _flush_prints(null: int) -> None:
    """Flush Python's buffers for fd 1, which is now stderr; drop their text if stderr is full."""
    room = select.poll()
    room.register(1, select.POLLOUT)
    if not room.poll(0):
        os.dup2(null, 1)
    for file in (sys.stdout, sys.__stdout__):
        # ValueError: the program has closed it, or has detached its buffer.
        if file is not None:
            with suppress(ValueError):
                try:
                    file.flush()
                except OSError:
                    # stderr accepts no more data.  The text would stay in the buffer, and be written to the wire later.
                    os.dup2(null, 1)
                    file.flush()


class _StdinStream(trio.abc.ReceiveStream):
    """An FdStream that waits first and then reads: FdStream does a checkpoint and a read in vain before it waits.
    After a full read the next one is larger, so that a long message takes fewer wake-ups.
    """

    __slots__ = ("_ended", "_size", "_stream", "_waits", "begun")

    def __init__(self, fd: int, ended: Callable[[str], object]) -> None:
        """`ended` is called with the reason when the stream has ended or is closed."""
        self.begun = False  # a read has started
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
            except OSError:  # another reader was quicker, or the peer has gone: FdStream waits, or raises
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


@contextmanager
def _input_watched(fd: int, out: int, stream: _StdinStream, life: ProcessLife) -> Iterator[None]:
    """Within the block, a thread watches for the end of this input, which an event loop cannot see while it is blocked
    or before it reads.

    After the end, the thread repeatedly asks the loop for a reply.  If the loop does not reply within the time that the
    process has to end, a handler blocks it.  The system reports the end of pipes and sockets; a file has its end from
    the start; at a terminal the user presses Ctrl-C.
    """
    if life.patience == math.inf:
        yield
        return
    waits, token = _can_be_waited_for(fd), trio.lowlevel.current_trio_token()
    woken, wake = os.pipe()
    over = False

    def reply() -> None:
        if not over:
            if not stream.begun and _nothing_to_do(fd, out):
                life.unwanted(_END)
            os.write(wake, b".")

    def watch() -> None:
        block_signals()
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        if waits:
            poll.register(fd, getattr(select, "POLLRDHUP", 0))
            if any(ready == woken for ready, _ in poll.poll()):
                return
            poll.unregister(fd)
        patience = min(1000 * life.patience, 2**31 - 1)  # milliseconds, as a C int
        while True:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(reply)
            if not poll.poll(patience):
                life.leave(_END)
            # The loop has replied, or the block has ended.
            if not os.read(woken, 1) or poll.poll(patience):
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


def _nothing_to_do(fd: int, out: int) -> bool:
    """Whether the input has no unread data, or the peer has stopped reading the output."""
    try:
        unread = any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    except OSError:  # a file or a device
        return False
    reader = select.poll()
    reader.register(out, 0)
    return not unread or bool(reader.poll(0))


def _can_be_waited_for(fd: int) -> bool:
    # Registering a file or /dev/null with epoll fails, and leaves the task marked in Trio as waiting for it.
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class _StdoutStream(trio.abc.SendStream):
    """An FdStream that also supports `wait_send_all_might_not_block` on a file."""

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


# Standard error.


@contextmanager
def unhindered_stderr() -> Iterator[Stderr | None]:
    """Within the block, `sys.stderr` does not wait for its reader.  None if stderr is a file, a terminal, or closed,
    because writes do not block there."""
    mode = 0
    with suppress(OSError):
        mode = os.fstat(2).st_mode
    if sys.__stderr__ is None or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        yield None
        return
    stderr = Stderr(2)
    try:
        with stderr.redirecting(2, sys.stderr, sys.__stderr__):
            yield stderr
    finally:
        stderr.close(CLOSING)


class Stderr:
    """A pipe or a socket, and the queue of lines that wait for its reader."""

    def __init__(self, fd: int) -> None:
        fileno, self._write_now, self._close = _writer_of(fd)
        self._room = select.poll()
        self._room.register(fileno, select.POLLOUT)
        self._lock = threading.RLock()  # a signal handler may write while its own thread does
        self._queue: deque[bytes] = deque()
        self._queued = 0  # bytes
        self._dropped = 0  # lines
        self._writer: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def redirecting(self, fd: int, *files: TextIO | None) -> Iterator[None]:
        """Within the block, these files write here, if they are Python's files for `fd`."""
        found = [file for file in dict.fromkeys(files) if _is_file_of(file, fd)]
        for file in found:
            if self._room.poll(0):
                with suppress(OSError):
                    file.flush()
            # Lines are written as a whole, so that the lines of two threads do not mix.
            _reinitialise(file, _NonblockingFile(self, fd), line_buffering=True)
        try:
            yield
        finally:
            for file in found:
                with suppress(OSError, ValueError):  # the program has closed or detached it
                    file.flush()
                    # Without a buffer: the interpreter would have to flush it at its end, and could not if an abandoned
                    # thread holds its lock.
                    _reinitialise(file, io.FileIO(fd, "w", closefd=False), line_buffering=False)

    def put(self, data: bytes) -> None:
        """Write `data` now or when there is room; drop it if the queue is full.  May be called from any thread."""
        with self._lock:
            if self._closed:  # an abandoned thread writes
                return
            if not self._queue:
                data = self._write(data)
            if not data:
                return
            if self._queue and self._queued + len(data) > _MAX_QUEUED:  # a partly written line is always finished
                self._dropped += data.count(b"\n") or 1
                return
            self._report()
            self._add(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._catch_up, name="trio_mcp: stderr", daemon=True)
                self._writer.start()

    def close(self, seconds: float) -> None:
        """Drop all later lines, and wait up to `seconds` until the queue has been read.  After that, the thread goes on
        writing it until the process ends."""
        with self._lock:
            self._closed, writer = True, self._writer
            if writer is None:
                self._close()
        if writer is not None:
            writer.join(seconds)

    def _write(self, data: bytes) -> bytes:
        """Write as much as there is room for, and return the rest."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._write_now(left) :]
        except BlockingIOError:
            return bytes(left)
        except OSError:  # its reader has closed it
            pass
        return b""

    def _add(self, data: bytes) -> None:
        self._queue.append(data)
        self._queued += len(data)

    def _report(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            lines = "1 line was" if dropped == 1 else f"{dropped} lines were"
            self._add(f"trio_mcp: {lines} dropped here because standard error was not read\n".encode())

    def _catch_up(self) -> None:
        """Run in a thread of its own: write the queue whenever there is room."""
        block_signals()
        while True:
            self._room.poll()
            with self._lock:
                data = self._queue.popleft()
                self._queued -= len(data)
                if left := self._write(data):
                    self._queue.appendleft(left)
                    self._queued += len(left)
                elif not self._queue:
                    self._report()
                if not self._queue:
                    self._writer = None
                    if self._closed:
                        self._close()
                    return


def block_signals() -> None:
    """Leave signals to the main thread, where Python handles them.  Call this first in a new thread.

    The system gives a signal to one thread and interrupts only that one: a sleeping main thread would sleep on.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _reinitialise(file: io.TextIOWrapper, raw: io.RawIOBase, *, line_buffering: bool) -> None:
    whole = cast(BinaryIO, raw)
    io.TextIOWrapper.__init__(file, whole, file.encoding, file.errors, None, line_buffering, not line_buffering)


class _NonblockingFile(io.RawIOBase):
    """The raw file below one of Python's text files; `fileno` stays the same."""

    name = "<stderr>"
    mode = "wb"

    def __init__(self, stderr: Stderr, fd: int) -> None:
        self._stderr = stderr
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: ReadableBuffer, /) -> int:
        whole = bytes(data)
        self._stderr.put(whole)
        return len(whole)


def _is_file_of(file: TextIO | None, fd: int) -> TypeGuard[io.TextIOWrapper]:
    """Whether this is Python's file for `fd`; a program may have replaced, detached or closed it."""
    with suppress(ValueError, OSError):
        return isinstance(file, io.TextIOWrapper) and file.fileno() == fd
    return False


def _writer_of(fd: int) -> tuple[int, Callable[[memoryview], int], Callable[[], object]]:
    """Return an fd for the same pipe or socket, a function that writes to it without waiting, and one that closes it.

    The writing function writes as much as there is room for, and raises BlockingIOError if there is no room.  Setting
    O_NONBLOCK is not enough: it belongs to the open file description, which the parent and children share.
    """
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        sock = socket.socket(fileno=os.dup(fd))
        return sock.fileno(), lambda data: sock.send(data, socket.MSG_DONTWAIT), sock.close
    with suppress(OSError):  # there is no /proc, or the pipe belongs to another user
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
        return own, lambda data: os.write(own, data), lambda: os.close(own)
    shared = os.dup(fd)
    room = select.poll()
    room.register(shared, select.POLLOUT)

    def write(data: memoryview) -> int:
        if not room.poll(0):
            raise BlockingIOError
        return os.write(shared, data[: select.PIPE_BUF])  # there is room for this many bytes

    return shared, write, lambda: os.close(shared)
