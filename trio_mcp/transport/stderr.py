"""Standard error that never waits for its reader.

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

from trio_mcp.transport.wire import CLOSING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Stderr", "block_signals", "unhindered_stderr"]

_MAX_QUEUED = 256 * 1024
"""Bytes in the queue at most: some thousand lines, enough for a host that is slow for a moment."""


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
        with ExitStack() as undo:
            for file in dict.fromkeys(files):
                if _is_file_of(file, fd):
                    undo.enter_context(self._redirected(file))
            yield

    @contextmanager
    def _redirected(self, file: io.TextIOWrapper) -> Iterator[None]:
        fd = file.fileno()
        if self._room.poll(0):
            with suppress(OSError):
                file.flush()
        # Lines are written as a whole, so that the lines of two threads do not mix.
        _reinitialise(file, _NonblockingFile(self, fd), line_buffering=True)
        try:
            yield
        finally:
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
