"""The lifetime of a server process that is our child.  Other modules interpret the messages on its stdin and stdout.

| Event | Effect |
|---|---|
| `aclose` is called, or its nursery is cancelled | close stdin; wait; SIGTERM; wait; SIGKILL (stdio-08) |
| the process ends by itself, for any reason | the rest of its process group gets SIGTERM; wait; SIGKILL |
| our own process is killed | the system closes stdin of the process |

Signals go to the process group, because launchers (npx, uv, shells) run the server as a child and pass on few signals.
The process has its own session.  So Ctrl-C at our terminal reaches only our process, which then ends the server by the
steps above, and the server cannot prompt at our terminal.  A descendant that starts another session, like a daemon, has
left the group and is not ended.

One task, the supervisor, owns the process and all its fds, and runs in a nursery of the caller.  It is shielded, so a
cancellation does not change these steps, and each step has a deadline.  If even SIGKILL does not end the process (it
hangs in the kernel, or runs as another user), the supervisor stops waiting and logs an error.

The supervisor waits for the process, not for the end of its pipes, because a grandchild may hold the pipes open for
ever.  When the process has ended, its last output is still in the pipes: the supervisor reads it into memory and closes
the pipes.  It reads stderr all the time.  It also reads stdout after the client has stopped reading, because a server
that blocks in a write cannot end.  It writes stderr of the process to our own stderr, byte for byte, as if the process
had inherited it, and keeps the last part for error messages.

By default the process gets only a few environment variables (`MINIMAL`), as in the official SDKs: the others may
contain keys and tokens that not every configured server should see.  `env` adds the variables that a server needs, and
"inherit" passes on all.

The name of the process in messages, logs and task names is its program alone: arguments may be tokens and passwords.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import select
import signal
import subprocess
import sys
import termios
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

import trio

from trio_mcp.core.errors import ConnectionFailed, SessionClosed, UsageError, check_seconds, printable, shown
from trio_mcp.core.messages import ABSENT, Absent
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import write_now

__all__ = ["MINIMAL", "Child", "Command", "Environment", "ServerExited", "name_of", "start_child"]

Command: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Environment: TypeAlias = Literal["minimal", "inherit"] | Mapping[str, str]

MINIMAL = ("HOME", "LANG", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""The variables of "minimal": those that programs need to be found, to find their files and to know the user's
language, and no secrets.  LC_* stands for all variables that begin with LC_."""

_log = logging.getLogger("trio_mcp")

_TAIL = 8192  # bytes of stderr that are kept: a traceback or two
_READ = 65536  # bytes of one read: the usual capacity of a pipe
_LINES = 20  # of stderr in an error message
_PIPE = 2**20  # bytes that a pipe may hold: the maximum of Linux, except for root; usually it is 64 KiB

# Seconds to wait for the end of the process after its stdout or stdin was closed: usually it is about to end.
_EXIT_SECONDS = 0.5
# Seconds to wait until our stderr accepts the data of one read.  After the process has ended there are at most two of
# these waits.  They fit in the time above, because `exit` is set only when all output has been read.
_STDERR_SECONDS = 0.2
# Seconds to wait for the end of a process after SIGKILL.
_REAPED = 2.0
# Seconds between two checks whether the process group has ended: the first interval and the longest.  It is polled
# because the system reports only the end of our own children.
_POLL, _POLL_MAX = 0.01, 0.1


class ServerExited(SessionClosed):
    """The server process has ended.

    `status` is its exit status; if a signal killed it, `status` is None and `signal` is the signal.  A signal that
    Python has no name for is given as the status 128 + n, as in shells.  `how` describes the end in words.
    `stderr_tail` is the last output on stderr, which often has the reason.
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

    def unstarted(self, output: str) -> ServerExited:
        """Return the same error for a server that sent no message; `output` describes its stdout."""
        forgot = " (did it forget server.run()?)" if self.status == 0 else ""
        when = f" before its first message{forgot}{output}"
        return ServerExited(self._name, self._returncode, self.stderr_tail, when)


def _last_words(tail: str, before: str) -> str:
    """Return the last lines of stderr for an error message.  `before` is the text that precedes them in the message."""
    lines = [printable(line) for line in tail.splitlines()]
    listed = "\n" in before
    if not any(lines):
        return "\nand nothing to stderr" if listed else ", and wrote nothing to stderr"
    return (
        ("\nand its last lines on stderr" if listed else "; its last lines on stderr")
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
    """Start a server process, which runs until it is closed or `nursery` is cancelled.

    `command` is a list of a program and its arguments, or a program alone; no shell is used.  The program is searched
    in the PATH of the process; if its name contains a slash, it is a path relative to `cwd`.  `environment` is
    "minimal" (`MINIMAL`), "inherit" (all our variables) or a mapping of all its variables; `env` adds variables, and a
    value of None removes one.  `shutdown_timeout` is the number of seconds to wait after stdin is closed, and again
    after SIGTERM.  `stderr` is a function; it is called with each piece of output on stderr, and must not block.  By
    default this output goes to our own `sys.stderr`; with None it is discarded.

    Raises `ConnectionFailed` if the command does not exist or cannot be run, and `UsageError` if the command or an
    option is invalid.  It may be cancelled; a process that was started is then ended first.  `nursery` does not end
    before the process.
    """
    argv = _arguments_of(command)
    check_seconds("shutdown_timeout", shutdown_timeout)
    variables = _variables_of(environment, env)
    child: Child = await nursery.start(
        _start_and_keep, argv, variables, cwd, shutdown_timeout, stderr, name=f"the server {name_of(argv)!r}"
    )
    return child


# Otherwise Ctrl-C could arrive after the process has started and before the `try` that ends the process.
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
    """The supervisor: runs from the start of the process until its group has ended."""
    try:
        # If the process has started, this call returns it even if the task is cancelled.
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
        raise ConnectionFailed(_explain_start_error(error, argv[0], variables, cwd)) from error
    except ValueError as error:
        raise UsageError(_explain_start_error(error, argv[0], variables, cwd)) from error
    child = Child(process, name_of(argv), shutdown_timeout, stderr)
    async with open_nursery() as nursery:
        nursery.start_soon(child._run, name=f"the life of the server {child.name!r}")
        task_status.started(child)
        try:
            await child._over.wait()
        finally:
            child._closing.set()


class _OutputPipe:
    """A pipe that the process writes to.  After the process has ended, reads return the rest of its output."""

    def __init__(self, pipe: trio.lowlevel.FdStream) -> None:
        self._pipe = pipe
        self._rest = bytearray()

    async def read(self, max_bytes: int | None = None) -> bytes:
        fd = self._pipe.fileno()
        try:
            if fd >= 0:  # wait first: FdStream would first make a checkpoint and a read that fails
                await trio.lowlevel.wait_readable(fd)
                with suppress(OSError):  # then the FdStream below waits again, or raises the error
                    if self._pipe.fileno() == fd:
                        return os.read(fd, max_bytes or _READ)
            return await self._pipe.receive_some(max_bytes)
        except trio.ClosedResourceError:
            data = bytes(self._rest[:max_bytes])
            del self._rest[: len(data)]
            return data

    def cut(self) -> None:
        """Read the rest of the pipe into memory, and close the pipe.  Readers get the rest, and then the end."""
        with suppress(BlockingIOError):  # another process holds the pipe open, and it is empty
            # Limited, because another process that holds the pipe may go on writing.
            while len(self._rest) < _PIPE and (data := os.read(self._pipe.fileno(), _PIPE)):
                self._rest += data
        self._pipe.close()


class _ChildStream(trio.abc.HalfCloseableStream):
    """stdin and stdout of the process as one stream.

    If stdout or stdin closes because the process ends, `Child.exit` is set before a read or a write reports this.  A
    write after the end of the process raises `trio.BrokenResourceError`, as if a peer had closed the connection.
    """

    def __init__(self, stdin: trio.lowlevel.FdStream, stdout: _OutputPipe, ended: trio.Event) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._ended = ended
        self._closed = trio.Event()
        self._sent = self._left = 0  # bytes written to the pipe, and bytes that were in it when last checked
        self._finished = False  # our side has closed stdin
        self._reader = trio.Lock()
        self._reading = trio.CancelScope()

    def send_now(self, data: bytes | memoryview) -> int:
        sent = write_now(self._stdin.fileno(), data)
        self._sent += sent
        return sent

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._sent += len(data)  # counted before the write: if it fails, `is_unread` is False
        await self._write(self._stdin.send_all, data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._write(self._stdin.wait_send_all_might_not_block)

    async def _write(self, write: Callable[..., Awaitable[None]], *data: object) -> None:
        """Call `write`.  If it fails because the process has closed stdin, wait a moment for the process to end."""
        try:
            await write(*data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            if self._finished:
                raise
            # A process that has closed its stdin is usually about to end.
            with trio.move_on_after(_EXIT_SECONDS):
                await self._ended.wait()
            raise trio.BrokenResourceError("the process has closed its stdin") from error

    async def send_eof(self) -> None:
        self._finished = True
        await self._stdin.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._closed.is_set():
            try:
                self._reader.acquire_nowait()
            except trio.WouldBlock:
                raise trio.BusyResourceError("another task is already receiving") from None
            try:
                with trio.CancelScope() as self._reading:
                    data = await self._stdout.read(max_bytes)
                    if not data:
                        with trio.move_on_after(_EXIT_SECONDS):
                            await self._ended.wait()
                    return data
            finally:
                self._reader.release()
        await trio.lowlevel.checkpoint()
        raise trio.ClosedResourceError("the stream was closed")

    def is_unread(self) -> bool:
        if (pipe := self._stdin.fileno()) >= 0:  # if the pipe is closed, the last count is used
            count = array("i", [0])
            fcntl.ioctl(pipe, termios.FIONREAD, count)  # 0 on macOS, where only the reader knows it
            self._left = count[0]
        return self._left == self._sent

    def process_ended(self) -> None:
        """Close stdin.  A grandchild that reads it gets the end of the stream."""
        self.is_unread()
        self._stdin.close()

    def close(self) -> None:
        self._finished = True
        self._stdin.close()
        self._closed.set()
        self._reading.cancel(reason="the stream was closed")

    async def aclose(self) -> None:
        """Close stdin, and stop reading stdout.  The process may go on until `Child.aclose`."""
        self.close()
        await trio.lowlevel.checkpoint()

    @trio.lowlevel.enable_ki_protection
    async def discard(self) -> None:
        """After the stream is closed, read and discard stdout, so that no write of the process fails or blocks."""
        await self._closed.wait()
        async with self._reader:
            while await self._stdout.read():
                pass


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
        # On POSIX, Trio's pipes are FdStreams, but its annotations do not say so.
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
        self._stderr_has_room = True  # our own stderr took the last piece
        self._tail = bytearray()
        self._returncode: int | None = None  # set when the process is reaped
        self._closing = trio.Event()  # `aclose` was called, or the supervisor was cancelled
        self._stderr_read = trio.Event()  # stderr has been read to its end
        self._ended = trio.Event()  # the process has ended, and all its output has been read
        self._over = trio.Event()  # the process and its group have ended
        # True: the group is empty.  The system may give its number to another group, so do not use the number again.
        self._empty = False
        self.stream = _ChildStream(stdin, self._stdout, self._ended)
        """The stdin and stdout of the process.  Reading ends when stdout is closed, or when the process ends, even if
        another process still holds its stdout."""
        self.pid = process.pid

    @property
    def has_read_nothing(self) -> bool:
        """Whether the process has read no data: all data is still in the pipe, or was there when the process ended.

        Only Linux tells this.  On other systems all data counts as read.
        """
        return self.stream.is_unread()

    @property
    def stderr_tail(self) -> str:
        """The last 8 KiB of stderr, from the beginning of a line if there is one."""
        tail = bytes(self._tail)
        if len(tail) > _TAIL:  # `_tail` has one byte more, which may be the end of a line
            tail = tail.partition(b"\n")[2] or tail[1:]
        return tail.decode(errors="replace")

    def last_words(self, before: str) -> str:
        """Return the last lines of stderr for an error message that begins with the text `before`."""
        return _last_words(self.stderr_tail, before)

    @property
    def exit(self) -> ServerExited | None:
        """The error that says how the process ended, or None if it runs.

        A new object each time, because the traceback of an exception grows whenever it is raised.
        """
        if self._returncode is None or not self._ended.is_set():
            return None
        return ServerExited(self.name, self._returncode, self.stderr_tail)

    async def aclose(self) -> None:
        """End the process and its group, and wait until they have ended.

        This takes at most two times `shutdown_timeout` plus two seconds.  It never raises, and a cancellation does not
        shorten it.
        """
        self._closing.set()
        with trio.CancelScope(shield=True):
            await self._over.wait()

    # The supervisor.

    @trio.lowlevel.enable_ki_protection
    async def _run(self) -> None:
        try:
            with trio.CancelScope(shield=True):
                async with open_nursery() as nursery:
                    nursery.start_soon(self._read_stderr)
                    nursery.start_soon(self._reap)
                    nursery.start_soon(self.stream.discard)
                    await self._wait_and_end(nursery)
        finally:
            for pipe in self._pipes:
                pipe.close()
            self._over.set()

    async def _wait_and_end(self, nursery: trio.Nursery) -> None:
        """Wait until the process has ended or is being closed; then end it and its group."""
        with trio.CancelScope() as waiting:

            @trio.lowlevel.enable_ki_protection
            async def close() -> None:
                await self._closing.wait()
                waiting.deadline = trio.current_time() + self._shutdown_timeout
                self.stream.close()

            nursery.start_soon(close)
            await self._ended.wait()
        for number, seconds in ((signal.SIGTERM, self._shutdown_timeout), (signal.SIGKILL, _REAPED)):
            if self._signal(number) or self._returncode is None:
                with trio.move_on_after(seconds):
                    await self._ended.wait()
                    delay = _POLL
                    while self._signal(0) and _has_running_process(self.pid):
                        await trio.sleep(delay)
                        delay = min(2 * delay, _POLL_MAX)
        if self._returncode is not None:
            await self._ended.wait()  # the process was just reaped; wait until the rest of its output has been read
        else:
            _log.error("the server %r (process %d) cannot be ended; end it by hand", self.name, self.pid)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group (0: only check).  Return False if the group has no process that we may signal."""
        if self._empty:
            return False
        if self._returncode is not None:
            # If we are process 1, as in many containers, orphans become our children, and remain until we reap them.
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

    @trio.lowlevel.enable_ki_protection
    async def _reap(self) -> None:
        self._returncode = await self._process.wait()
        self._stdout.cut()
        self._stderr.cut()
        self.stream.process_ended()
        await self._stderr_read.wait()
        self._ended.set()

    @trio.lowlevel.enable_ki_protection
    async def _read_stderr(self) -> None:
        while data := await self._stderr.read():
            self._tail += data
            del self._tail[: -(_TAIL + 1)]
            if self._listener is ABSENT:
                await self._pass_on(data)
            elif self._listener is not None:
                try:
                    self._listener(data)
                except Exception:  # noqa: BLE001  # it must not end the task that reads the pipe
                    _log.exception("the callback for stderr of the server %r failed; it is not called again", self.name)
                    self._listener = None
        self._stderr_read.set()

    async def _pass_on(self, data: bytes) -> None:
        """Write to our own stderr, piece by piece, only while it has room.

        Its reader may stop for ever (a pipe without a reader, a stopped terminal), which must not block the event loop.
        The first time there is no room, this waits a moment; then output is dropped until there is room again.
        """
        end = trio.current_time() + (_STDERR_SECONDS if self._stderr_has_room else 0)
        for at in range(0, len(data), select.PIPE_BUF):  # a writable pipe has room for this many bytes
            try:
                # Polled, because no event tells when stderr has room.  If it is broken, the write raises.
                poll, writable = select.poll(), True
                with suppress(OSError, ValueError, AttributeError):  # it is not a file, and does not block
                    poll.register(sys.stderr.fileno(), select.POLLOUT)
                    while not (writable := bool(poll.poll(0))) and trio.current_time() < end:  # noqa: ASYNC110
                        await trio.sleep(_POLL)
                self._stderr_has_room = writable
                if not writable:
                    return
                # `sys.stderr` is read each time, because programs replace it.
                piece, stderr = data[at : at + select.PIPE_BUF], sys.stderr
                if hasattr(stderr, "buffer"):
                    stderr.flush()
                    stderr.buffer.write(piece)
                elif stderr is not None:  # a text stream such as io.StringIO has no buffer
                    stderr.write(piece.decode(errors="replace"))
                if stderr is not None:
                    stderr.flush()
            except Exception:  # noqa: BLE001  # stderr is closed or replaced, so there is no place to report this
                return


def _has_running_process(group: int) -> bool:
    """Whether a process in a group that is not empty is still running.

    A dead process remains in its group until its parent reaps it.  The new parent of an orphan is process 1, and some
    programs that run as process 1 reap late or never.
    """
    if sys.platform != "linux":
        return True  # other systems have no /proc; the caller waits until its timeout
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # OSError: the process has just ended
            # After the name, which may contain any character: the state, the parent, the group.
            state, _, group_of_process, *_ = file.read().rpartition(b")")[2].split()
            if int(group_of_process) == group and state not in (b"Z", b"X"):
                return True
    return False


# The command.

_MORE = re.compile(r"\s+-|=")


def name_of(argv: Sequence[str]) -> str:
    """Return the name of the program.  If the caller forgot that a command is a list, it ends before the arguments."""
    return os.path.basename(_MORE.split(argv[0])[0])


def _arguments_of(command: Command) -> list[str]:
    """Return the program and its arguments as a list.  Raises `UsageError` if `command` is not a command."""
    try:
        if isinstance(command, (str, os.PathLike)):
            argv = [os.fspath(command)]
        else:
            argv = [os.fspath(part) for part in command]
    except TypeError:
        argv = []
    if not argv or not argv[0] or not all(isinstance(part, str) for part in argv):
        raise UsageError('a command must be a program and its arguments, all strings: ["python", "server.py"]')
    return argv


def _variables_of(environment: Environment, env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return the variables of the process: those of `environment`, changed by `env`.  Raises `UsageError` if one of
    the two is invalid."""
    variables: dict[str, str | None]
    if environment == "inherit":
        variables = dict(os.environ)
    elif environment == "minimal":
        variables = {name: value for name, value in os.environ.items() if name in MINIMAL or name.startswith("LC_")}
    elif isinstance(environment, Mapping):
        variables = dict(environment)
    else:
        raise UsageError('environment must be "minimal", "inherit" or a mapping of all variables of the process')
    variables |= env or {}
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, (str, type(None))):  # the value may be a secret
            raise UsageError(f"the environment variable {shown(name)} must be a string, got {type(value).__name__}")
    return {name: value for name, value in variables.items() if value is not None}


def _explain_start_error(
    error: OSError | ValueError, program: str, variables: dict[str, str], cwd: str | os.PathLike[str] | None
) -> str:
    """Explain why the process could not be started.  The text repeats only the first word of the command, because
    arguments may be secrets."""
    word, *more = program.split(None, 1) or [program]
    name = shown(word)
    if not isinstance(error, OSError):
        return f"{name} cannot be started: arguments and variables must not contain NUL, names of variables no ="
    if cwd is not None and not os.path.isdir(cwd):
        return f"{name} cannot be started in {shown(os.fspath(cwd), 400)}: that is not a directory"
    if not os.path.dirname(program):
        folders = os.get_exec_path(variables)
        where = f" in {shown(os.pathsep.join(folders), 400)}"
    else:
        folders = [os.fspath(cwd or os.curdir)]
        where = "" if os.path.isabs(program) else f" in {shown(folders[0], 400)}"
    if os.path.dirname(program) and (fault := _path_fault(os.path.join(folders[0], program), error)):
        return f"{name} cannot be started{where}: {fault}"
    if not isinstance(error, FileNotFoundError):
        return f"{name} cannot be started{where}: {error.strerror}"
    if any(os.path.exists(os.path.join(folder, program)) for folder in folders):
        return f"{name} was found{where}, but not the interpreter that its first line names"
    hint = ""
    if more:
        name, hint = shown(f"{word} ..."), "; write a command with arguments as a list, one string for each"
    elif word.endswith(".py"):
        hint = '; name the program that runs it: ["python", "server.py"]'
    return f"there is no command {name}{where}{hint}"


def _path_fault(path: str, error: OSError) -> str | None:
    """Return why the file or directory at `path` is not a program, or None if the reason cannot be seen."""
    missing = error.errno == errno.ENOEXEC
    if os.path.isdir(path):
        return "it is a directory; name a program in it"
    if os.path.isfile(path) and (missing or not os.access(path, os.X_OK)):
        fault = "has no first line that names an interpreter" if missing else "is not executable"
        return f'it {fault}; name the program that runs it: ["python", "server.py"]'
    return None
