"""The life of a server process that is our child; what is said on its wire is for others.

| what happens | what the process sees |
|---|---|
| `aclose`, or its nursery is cancelled | stdin ends; the timeout; SIGTERM; the timeout; SIGKILL (stdio-08) |
| it ends by itself, for whatever reason | the rest of its group gets the same from SIGTERM on |
| our own process is killed | stdin ends |

Signals go to its process group: launchers (npx, uv, shells) have the server itself as a child, and pass on little.  The
group is that of a session of its own.  So Ctrl-C at our terminal reaches us only, who say goodbye in order; and the
process has no terminal to ask at, which would be the one that we use.  Whatever starts a session for itself, as daemons
do, has left, and is not ours any more.

One task, the keeper, owns the process and all its fds, and runs in a nursery of the caller.  It is shielded, so the end
is the same when it comes by cancellation, and each of its steps has a deadline.  A process that not even SIGKILL ends
(it hangs in the kernel, or runs as another user) is given up, and logged.

That the process has ended is asked of the system and not of its pipes, which a grandchild may hold open for ever.  All
that it has written is in the pipes then; they are emptied into memory and closed.  stderr is read all the time, as is
stdout once nobody else reads it: a server that cannot write cannot end in order.  What comes on stderr is passed on to
ours, byte for byte, as if the process had inherited it; only its end is kept here as well.

Of the environment it gets a few variables by default (`MINIMAL`), as in the official SDKs: the rest of ours may hold
keys and tokens that are not for every server that a user has configured.  `env` adds what a server needs, and
"inherit" passes on all.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import termios
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import trio

from trio_mcp.core.errors import ConnectionFailed, SessionClosed, UsageError, printable, shown
from trio_mcp.core.jsonrpc import ABSENT, Absent
from trio_mcp.transport.command import Command, Environment, arguments_of, name_of, variables_of, why_not
from trio_mcp.transport.duplex import write_now
from trio_mcp.transport.nursery import open_nursery

__all__ = ["Child", "Command", "Environment", "ServerExited", "start_child"]

_log = logging.getLogger("trio_mcp")

_TAIL = 8192  # bytes of stderr that are kept: a traceback or two
_READ = 65536  # bytes that are read at once, which is what a pipe holds as a rule
_LINES = 20  # of them that an error repeats
_PIPE = 2**20  # bytes that a pipe may hold: what Linux allows at most, unless asked by root; usually it is 64 KiB

# Seconds from the end of stdout, or of stdin, to the end of the process, if it was that which ended it.
_MOMENT = 0.5
# Seconds that our stderr may need for what was read at once.  After a death that is done twice at most, within the
# moment above: how it ended is known only when all that it wrote is.
_ROOM = 0.2
# Seconds that the system may need for a process that it was told to kill.
_REAPED = 2.0
# Seconds from one look at the rest of the group to the next, at first and at most: only our own children tell when they
# end.
_LOOK, _LOOK_MOST = 0.01, 0.1


class ServerExited(SessionClosed):
    """The server was a process, and has ended.

    `status` is its exit status, or `signal` what killed it; the other one is None.  A signal without a name counts as
    status 128 + n, as shells have it.  `how` says the same in words; `stderr_tail` is the last that it wrote there,
    which often says why.
    """

    def __init__(self, name: str, returncode: int, stderr_tail: str, when: str = "") -> None:
        self._name = name
        self._returncode = returncode
        self.status: int | None = returncode
        self.signal: signal.Signals | None = None
        if returncode < 0:
            self.status = 128 - returncode
            with suppress(ValueError):
                self.signal, self.status = signal.Signals(-returncode), None
        self.stderr_tail = stderr_tail
        self.how = f"ended with status {self.status}" if self.signal is None else f"was ended by {self.signal.name}"
        super().__init__(f"the server {name!r} {self.how}{when}{_last_words(stderr_tail, when)}")

    def unstarted(self, said: str) -> ServerExited:
        """The same of a server that has sent no message, and `said` this on stdout."""
        forgot = " (did it forget server.run()?)" if self.status == 0 else ""
        when = f" before its first message{forgot}{said}"
        return ServerExited(self._name, self._returncode, self.stderr_tail, when)


def _last_words(tail: str, said: str) -> str:
    """The end of what it wrote to stderr, behind what it `said` on stdout."""
    lines = [printable(line) for line in tail.splitlines()]
    listed = "\n" in said
    if not any(lines):
        return "\nand nothing to stderr" if listed else ", and wrote nothing to stderr"
    return (
        ("\nand at last to stderr" if listed else "; the last it wrote to stderr")
        + ":\n  "
        + "\n  ".join(lines[-_LINES:])
    )


async def start_child(
    nursery: trio.Nursery,
    command: Command,
    *,
    env: Mapping[str, str | None] | None = None,
    environment: Environment = "minimal",
    cwd: str | os.PathLike[str] | None = None,
    shutdown_timeout: float = 2.0,
    stderr: Callable[[bytes], object] | Absent | None = ABSENT,
) -> Child:
    """Start a server process, which lives until it is closed or `nursery` is cancelled.

    `command` is a program and its arguments, or a program alone; there is no shell.  It is looked for in the PATH that
    it gets, and if it has a slash, from `cwd` on.  `environment` is "minimal" (`MINIMAL`), "inherit" (all of ours) or
    just these variables; `env` adds some, and None removes one.  `shutdown_timeout` is how long it may take to end by
    itself, and then upon SIGTERM.  `stderr` is called with what the process writes there, as it comes; it must not
    block.  Without it that goes to our own `sys.stderr`, and with None to nobody.

    Raises `ConnectionFailed` if there is no such command, or it cannot be run, and `UsageError` for what is no
    command and no option of one.  May be cancelled: a process that has been started by then is ended first.  `nursery`
    does not end before the process does.
    """
    argv = arguments_of(command)
    if type(shutdown_timeout) not in (int, float) or not shutdown_timeout >= 0:  # NaN is none either
        raise UsageError(f"shutdown_timeout is a number of seconds, 0 or more; not {shown(shutdown_timeout)}")
    variables = variables_of(environment, env)
    child: Child = await nursery.start(
        _start_and_keep, argv, variables, cwd, shutdown_timeout, stderr, name=f"the server {name_of(argv)!r}"
    )
    return child


# Without protection Ctrl-C could come between the start of the process and the first step of whoever ends it.
@trio.lowlevel.enable_ki_protection
async def _start_and_keep(
    argv: list[str],
    variables: dict[str, str],
    cwd: str | os.PathLike[str] | None,
    shutdown_timeout: float,
    stderr: Callable[[bytes], object] | Absent | None,
    *,
    task_status: trio.TaskStatus[Child],
) -> None:
    """The keeper: from the start of the process to the last of its group."""
    try:
        # Not left by cancellation once the process is there.
        process = await trio.lowlevel.open_process(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise ConnectionFailed(why_not(error, argv[0], variables, cwd)) from error
    except ValueError as error:
        raise UsageError(why_not(error, argv[0], variables, cwd)) from error
    child = Child(process, name_of(argv), shutdown_timeout, stderr)
    await child._keep(task_status)


class _OutputPipe:
    """A pipe that the process writes to: first what comes, and after its death what was left."""

    def __init__(self, pipe: trio.lowlevel.FdStream) -> None:
        self._pipe = pipe
        self._rest = bytearray()

    async def read(self, max_bytes: int | None = None) -> bytes:
        fd = self._pipe.fileno()
        try:
            if fd >= 0:  # FdStream would go round the loop and ask in vain before it sleeps
                await trio.lowlevel.wait_readable(fd)
                with suppress(OSError):  # it waits once more then, or says what there is
                    if self._pipe.fileno() == fd:
                        return os.read(fd, max_bytes or _READ)
            return await self._pipe.receive_some(max_bytes)
        except trio.ClosedResourceError:
            data = bytes(self._rest[:max_bytes])
            del self._rest[: len(data)]
            return data

    def cut(self) -> None:
        """Take what is in the pipe, and close it: whoever reads goes on with that, and then is at the end."""
        with suppress(BlockingIOError):  # somebody else holds it open, and it is empty
            # A bound, for that somebody may also go on writing.
            while len(self._rest) < _PIPE and (data := os.read(self._pipe.fileno(), _PIPE)):
                self._rest += data
        self._pipe.close()


def _bytes_in(pipe: int) -> int:
    """How many bytes are in a pipe that is open for writing; 0 where only its other end would tell, as on macOS."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


class _ChildStream(trio.abc.HalfCloseableStream):
    """stdin and stdout of the process as one stream.

    When stdout or stdin is closed because the process ends, `Child.exit` is known before that is told.  A write that
    cannot be because it has ended raises `trio.BrokenResourceError`, like one to a peer that has gone.
    """

    def __init__(self, stdin: trio.lowlevel.FdStream, stdout: _OutputPipe, ended: trio.Event) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._ended = ended
        self._closed = trio.Event()
        self._sent = self._left = 0  # bytes that went into the pipe, and how many of them were last seen in it
        self._finished = False  # from our side: nothing more is to be sent
        self._reader = trio.Lock()
        self._reading = trio.CancelScope()

    def send_now(self, data: bytes | memoryview) -> int:
        sent = write_now(self._stdin.fileno(), data)
        self._sent += sent
        return sent

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._sent += len(data)  # if less of it gets there, that counts as read
        await self._blaming_the_process(self._stdin.send_all, data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._blaming_the_process(self._stdin.wait_send_all_might_not_block)

    async def _blaming_the_process(self, write: Callable[..., Awaitable[None]], *data: object) -> None:
        try:
            await write(*data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            if self._finished:
                raise
            # A process that does not read any more is about to end as a rule.
            with trio.move_on_after(_MOMENT):
                await self._ended.wait()
            raise trio.BrokenResourceError("the process reads no more") from error

    async def send_eof(self) -> None:
        self._finished = True
        await self._stdin.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._closed.is_set():
            try:
                self._reader.acquire_nowait()
            except trio.WouldBlock:
                raise trio.BusyResourceError("another task receives already") from None
            try:
                with trio.CancelScope() as self._reading:
                    data = await self._stdout.read(max_bytes)
                    if not data:
                        with trio.move_on_after(_MOMENT):
                            await self._ended.wait()
                    return data
            finally:
                self._reader.release()
        await trio.lowlevel.checkpoint()
        raise trio.ClosedResourceError("the stream was closed")

    def is_unread(self) -> bool:
        if (pipe := self._stdin.fileno()) >= 0:  # or it is closed, and this was asked before
            self._left = _bytes_in(pipe)
        return self._left == self._sent

    def hang_up(self) -> None:
        """The process has ended: it hears nothing any more, nor does a grandchild with the same stdin."""
        self.is_unread()
        self._stdin.close()

    def close(self) -> None:
        self._finished = True
        self._stdin.close()
        self._closed.set()
        self._reading.cancel(reason="the stream was closed")

    async def aclose(self) -> None:
        """Close stdin, and read stdout no more.  The process may end in its own time, until it is closed itself."""
        self.close()
        await trio.lowlevel.checkpoint()

    @trio.lowlevel.enable_ki_protection
    async def discard(self) -> None:
        """Once nobody reads any more, read all that still comes, so that no write of the process fails or blocks."""
        await self._closed.wait()
        async with self._reader:
            while await self._stdout.read():
                pass


class _OwnStderr:
    """Our own stderr, for what a server writes to its own.

    It may take nothing for a while, or ever (a pipe that nobody reads, a terminal that was stopped), and must not hold
    up the loop then, nor the end of the server.  So it is only written to when there is room for a whole piece, which
    is waited for a moment; after that, what it does not take at once is left out until it takes something again.
    """

    def __init__(self) -> None:
        self._takes = True

    async def pass_on(self, data: bytes) -> None:
        end = trio.current_time() + (_ROOM if self._takes else 0)
        for at in range(0, len(data), select.PIPE_BUF):  # when a pipe is called writable, it has room for so much
            try:
                while not (writable := _is_writable()) and trio.current_time() < end:  # noqa: ASYNC110  # nobody tells
                    await trio.sleep(_LOOK)
                self._takes = writable
                if not writable:
                    return
                _write_to_ours(data[at : at + select.PIPE_BUF])
            except Exception:  # noqa: BLE001  # closed, or replaced by somebody's object; there is nobody to tell
                return


def _is_writable() -> bool:
    try:
        fd = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return True  # it is no file, and does not block
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))  # also if it is broken, which writing then tells


def _write_to_ours(data: bytes) -> None:
    # Looked up each time, for others replace it; a text stream such as io.StringIO has no buffer.
    if (ours := sys.stderr) is None:
        return
    buffer = getattr(ours, "buffer", None)
    if buffer is None:
        ours.write(data.decode(errors="replace"))
        ours.flush()
    else:
        ours.flush()
        buffer.write(data)
        buffer.flush()


class Child(trio.abc.AsyncResource):
    """A server process: start one with `start_child`.  Any task may use it and close it."""

    def __init__(
        self,
        process: trio.Process,
        name: str,
        shutdown_timeout: float,
        listener: Callable[[bytes], object] | Absent | None,
    ) -> None:
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        # As pipes are where there are no handles, but Trio does not say so.
        assert isinstance(stdin, trio.lowlevel.FdStream)
        assert isinstance(stdout, trio.lowlevel.FdStream)
        assert isinstance(stderr, trio.lowlevel.FdStream)
        self._process = process
        self.name = name
        self._shutdown_timeout = shutdown_timeout
        self._listener = listener
        self._pipes = (stdin, stdout, stderr)
        self._stdout = _OutputPipe(stdout)
        self._stderr = _OutputPipe(stderr)
        self._ours = _OwnStderr()
        self._tail = bytearray()
        self._returncode: int | None = None  # set when it is reaped
        self._leaving = trio.Event()  # it is to end
        self._heard = trio.Event()  # stderr has been read to its end
        self._ended = trio.Event()  # it has, and all that it wrote is here
        self._over = trio.Event()  # nothing is left of it and of its group
        # Nobody is in its group any more, so that its number may be given to others: it must not be used again.
        self._empty = False
        self._wire = _ChildStream(stdin, self._stdout, self._ended)
        self.pid = process.pid

    @property
    def stream(self) -> trio.abc.HalfCloseableStream:
        """Its stdin and stdout.  It ends with the process, whoever else holds its stdout, or when that is closed."""
        return self._wire

    @property
    def has_read_nothing(self) -> bool:
        """Whether all that was sent to it is, or was when it ended, still in the pipe: so far it has only started.

        Known on Linux.  Elsewhere what was sent counts as read.
        """
        return self._wire.is_unread()

    @property
    def stderr_tail(self) -> str:
        """The last 8 KiB that it wrote to stderr, from the beginning of a line if there is one."""
        tail = bytes(self._tail)
        if len(tail) > _TAIL:  # there is one byte more, which may be the end of a line
            tail = tail.partition(b"\n")[2] or tail[1:]
        return tail.decode(errors="replace")

    def last_words(self, said: str) -> str:
        """The end of what it wrote to stderr, in words of an error, behind what it `said` on stdout."""
        return _last_words(self.stderr_tail, said)

    @property
    def exit(self) -> ServerExited | None:
        """How it ended, once it has.  Each time a new error, to be raised: tracebacks grow with every raise."""
        if self._returncode is None or not self._ended.is_set():
            return None
        return ServerExited(self.name, self._returncode, self.stderr_tail)

    async def aclose(self) -> None:
        """End the process and its group; returns when that is done, within twice `shutdown_timeout` and two seconds.

        Never raises, and is not cut short by cancellation.
        """
        self._leaving.set()
        with trio.CancelScope(shield=True):
            await self._over.wait()

    # The keeper.

    async def _keep(self, task_status: trio.TaskStatus[Child]) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(self._live, name=f"the life of the server {self.name!r}")
            task_status.started(self)
            try:
                await self._over.wait()
            finally:
                self._leaving.set()

    @trio.lowlevel.enable_ki_protection
    async def _live(self) -> None:
        try:
            with trio.CancelScope(shield=True):
                async with open_nursery() as nursery:
                    nursery.start_soon(self._listen)
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._wire.discard)
                    nursery.start_soon(self._hang_up)
                    await self._part()
        finally:
            for pipe in self._pipes:
                pipe.close()
            self._over.set()

    @trio.lowlevel.enable_ki_protection
    async def _hang_up(self) -> None:
        await self._leaving.wait()
        self._wire.close()

    async def _part(self) -> None:
        """Wait until it is to end, or has; and see to it that it does, with all of its group."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._be_patient, nursery.cancel_scope)
            await self._ended.wait()
        for number, patience in ((signal.SIGTERM, self._shutdown_timeout), (signal.SIGKILL, _REAPED)):
            if self._signal(number) or self._returncode is None:
                with trio.move_on_after(patience):
                    await self._gone()
        if self._returncode is not None:
            await self._ended.wait()  # it was just reaped, and what it has left is being read
        else:
            _log.error("the server %r (process %d) cannot be ended: end it by hand", self.name, self.pid)

    @trio.lowlevel.enable_ki_protection
    async def _be_patient(self, waiting: trio.CancelScope) -> None:
        """Once it is to end by itself, not for longer than it was granted."""
        await self._leaving.wait()
        waiting.deadline = trio.current_time() + self._shutdown_timeout

    def _signal(self, number: int) -> bool:
        """Send the group a signal (0: none); False if there is nobody in it, or nobody whom we may send one."""
        if self._empty:
            return False
        if self._returncode is not None:
            # Where we are process 1, as in many containers, orphans become our children, and stay until we reap them.
            with suppress(ChildProcessError):
                while os.waitpid(-self.pid, os.WNOHANG)[0]:
                    pass
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            self._empty = True
        except PermissionError:
            return False
        return not self._empty

    async def _gone(self) -> None:
        await self._ended.wait()
        delay = _LOOK
        while self._signal(0) and _somebody_runs(self.pid):
            await trio.sleep(delay)
            delay = min(2 * delay, _LOOK_MOST)

    @trio.lowlevel.enable_ki_protection
    async def _watch(self) -> None:
        self._returncode = await self._process.wait()
        self._stdout.cut()
        self._stderr.cut()
        self._wire.hang_up()
        await self._heard.wait()
        self._ended.set()

    @trio.lowlevel.enable_ki_protection
    async def _listen(self) -> None:
        while data := await self._stderr.read():
            self._tail += data
            del self._tail[: -(_TAIL + 1)]
            if self._listener is ABSENT:
                await self._ours.pass_on(data)
            elif self._listener is not None:
                try:
                    self._listener(data)
                except Exception:  # noqa: BLE001  # the user's, which must not end what drains the pipe
                    _log.exception("the callback for stderr of the server %r failed; it is not called again", self.name)
                    self._listener = None
        self._heard.set()


def _somebody_runs(group: int) -> bool:
    """Whether of a group that is not empty not all are dead.

    The dead are in it until their new parent reaps them, which not every process 1 does in time, or ever.
    """
    if sys.platform != "linux":
        return True  # nobody tells; it is only waited for
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # OSError: it has gone meanwhile
            # After the name, which may hold anything: its state, its parent, its group.
            state, _, of, *_ = file.read().rpartition(b")")[2].split()
            if int(of) == group and state not in (b"Z", b"X"):
                return True
    return False
