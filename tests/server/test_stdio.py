"""stdio: fds 0 and 1 as a private stream, and the life of a server process.

The first half uses the fds of this process.  The second half starts real processes, the small programs in
`stdio_programs/`.  No test measures time: each test waits for the end, and the general timeout ends a test that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

import trio_mcp
from tests.requirements import req
from trio_mcp.core import Offer, UsageError
from trio_mcp.server import process
from trio_mcp.transport import owned_stdio

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stdio is not supported on Windows")


# --- The kinds of standard fds, with both ends ----------------------------------------------------------------------


class StandardFds:
    """The fds 0 and 1 of a server, and the ends of its launcher."""

    def __init__(self, stdin: int, stdout: int, write: int = -1, read: int = -1) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.write, self.read = write, read

    def close(self) -> None:
        for fd in {self.stdin, self.stdout, self.write, self.read} - {-1}:
            os.close(fd)


def pipes(_folder: Path) -> StandardFds:
    stdin, write = os.pipe()
    read, stdout = os.pipe()
    return StandardFds(stdin, stdout, write, read)


def two_sockets(_folder: Path) -> StandardFds:
    # Node gives these to its children.
    (stdin, write), (read, stdout) = (tuple(end.detach() for end in socket.socketpair()) for _ in range(2))
    return StandardFds(stdin, stdout, write, read)


def one_socket(_folder: Path) -> StandardFds:
    # inetd and systemd give this.
    ours, theirs = (end.detach() for end in socket.socketpair())
    return StandardFds(ours, os.dup(ours), theirs, theirs)


def terminal(_folder: Path) -> StandardFds:
    theirs, ours = pty.openpty()
    tty.setraw(ours)
    settings = termios.tcgetattr(ours)
    settings[3] |= termios.ISIG  # Ctrl-C can be typed
    termios.tcsetattr(ours, termios.TCSANOW, settings)
    return StandardFds(ours, os.dup(ours), theirs, theirs)


def files(folder: Path) -> StandardFds:
    (folder / "in").write_bytes(b"skipped\nasked\n")
    stdin = os.open(folder / "in", os.O_RDONLY)
    # A shell's `read` may have read a line before, so the server must start at the current offset.
    os.lseek(stdin, len(b"skipped\n"), os.SEEK_SET)
    return StandardFds(stdin, os.open(folder / "out", os.O_WRONLY | os.O_CREAT))


def null_device(_folder: Path) -> StandardFds:
    return StandardFds(os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY))


BIDIRECTIONAL = [pipes, two_sockets, one_socket, terminal]
ALL_KINDS = [*BIDIRECTIONAL, files, null_device]
SHARED = [two_sockets, one_socket]  # the system cannot open a second file description for these

Kind = Callable[[Path], StandardFds]


@contextmanager
def as_standard_fds(wire: StandardFds, stderr: int | None = None) -> Iterator[StandardFds]:
    """Make the wire fds 0 and 1 of this process, and restore fds 0, 1 and 2 afterwards."""
    kept = {fd: os.dup(fd) for fd in (0, 1, 2)}
    try:
        os.dup2(wire.stdin, 0)
        os.dup2(wire.stdout, 1)
        if stderr is not None:
            os.dup2(stderr, 2)
        yield wire
    finally:
        for fd, copy in kept.items():
            os.dup2(copy, fd)
            os.close(copy)
        wire.close()


@pytest.fixture(autouse=True)
def no_fd_is_left() -> Iterator[None]:
    before = sorted(os.listdir("/dev/fd"))
    yield
    assert sorted(os.listdir("/dev/fd")) == before


def fd_state(fd: int) -> tuple[object, ...]:
    """The visible state of an fd."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, fcntl.fcntl(fd, fcntl.F_GETFL), os.get_inheritable(fd)


# --- The stream -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
async def test_bytes_pass_in_both_directions(kind: Kind, tmp_path: Path) -> None:
    with as_standard_fds(kind(tmp_path)) as wire:
        with owned_stdio() as stream:
            os.write(wire.write, b"asked\n")
            with assert_checkpoints():
                assert await stream.receive_some() == b"asked\n"
            with assert_checkpoints():
                await stream.wait_send_all_might_not_block()
            with assert_checkpoints():
                await stream.send_all(b"answered\n")
        assert os.read(wire.read, 100) == b"answered\n"


async def test_a_file_is_read_from_its_offset_and_written(tmp_path: Path) -> None:
    with as_standard_fds(files(tmp_path)), owned_stdio() as stream:
        with assert_checkpoints():
            assert await stream.receive_some() == b"asked\n"
        assert await stream.receive_some() == b""
        # Twice: if epoll were asked about a file, the second time would be a conflict.
        for _ in range(2):
            with assert_checkpoints():
                await stream.wait_send_all_might_not_block()
        await stream.send_all(b"answered\n")
    assert (tmp_path / "out").read_bytes() == b"answered\n"


async def test_dev_null_is_like_a_client_that_has_left(tmp_path: Path) -> None:
    with as_standard_fds(null_device(tmp_path)), owned_stdio() as stream:
        assert await stream.receive_some() == b""
        await stream.wait_send_all_might_not_block()
        await stream.send_all(b"to nobody\n")


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("leave", ["end", "exception", "cancelled", "closed", "half closed", "closed in another order"])
async def test_the_fds_are_restored_after_each_kind_of_end(
    kind: Kind, leave: str, blocking: bool, tmp_path: Path
) -> None:
    with as_standard_fds(kind(tmp_path)):
        os.set_blocking(0, blocking)
        os.set_blocking(1, blocking)
        os.set_inheritable(0, False)
        before = fd_state(0), fd_state(1), fd_state(2)
        ending = pytest.raises(ZeroDivisionError) if leave == "exception" else trio.CancelScope()
        with ending as scope, owned_stdio() as stream:
            assert fd_state(0) != before[0]
            assert fd_state(1) != before[1]
            if leave == "cancelled":
                assert isinstance(scope, trio.CancelScope)
                scope.cancel()
                await trio.lowlevel.checkpoint()
            elif leave == "closed":
                await stream.aclose()
            elif leave == "half closed":
                await stream.send_eof()
            elif leave == "closed in another order":
                assert isinstance(stream, trio.StapledStream)
                await stream.receive_stream.aclose()
                await stream.send_stream.aclose()
            elif leave == "exception":
                raise ZeroDivisionError
        assert (fd_state(0), fd_state(1), fd_state(2)) == before


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
async def test_waiting_for_a_silent_client_can_be_cancelled(
    kind: Kind, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    with as_standard_fds(kind(tmp_path)) as wire, owned_stdio() as stream:
        with trio.move_on_after(5) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
        os.write(wire.write, b"late\n")
        assert await stream.receive_some() == b"late\n"


async def test_taking_the_fds_is_a_checkpoint_and_can_be_cancelled(tmp_path: Path) -> None:
    with as_standard_fds(pipes(tmp_path)):
        before = fd_state(0), fd_state(1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await process.serve_stdio(cast(Any, None))
        assert scope.cancelled_caught
        assert (fd_state(0), fd_state(1)) == before


@pytest.mark.parametrize("kind", [pipes, two_sockets, one_socket])
async def test_a_client_that_has_left_is_a_broken_stream(kind: Kind, tmp_path: Path) -> None:
    with as_standard_fds(kind(tmp_path)) as wire:
        for fd in {wire.write, wire.read}:
            os.close(fd)
        wire.write = wire.read = -1
        with owned_stdio() as stream:
            assert await stream.receive_some() == b""
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(b"anybody?\n")


async def test_a_terminal_that_was_closed_is_a_broken_stream(tmp_path: Path) -> None:
    with as_standard_fds(terminal(tmp_path)) as wire:
        os.close(wire.write)
        wire.write = wire.read = -1
        with owned_stdio() as stream, pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"anybody?\n")


@pytest.mark.parametrize("kind", [pipes, two_sockets, one_socket])
async def test_eight_mebibytes_pass_both_ways_at_once(kind: Kind, tmp_path: Path) -> None:
    line = bytes(range(256)) * (8 << 12)
    got: dict[str, int] = {"client": 0, "server": 0}

    async def read(side: str, receive: Callable[[], object]) -> None:
        while got[side] < len(line):
            data = await receive()  # type: ignore[misc]
            start = got[side] % 256
            assert data == (line[start : start + len(data)])
            got[side] += len(data)

    with as_standard_fds(kind(tmp_path)) as wire:
        client = trio.StapledStream(
            trio.lowlevel.FdStream(os.dup(wire.write)), trio.lowlevel.FdStream(os.dup(wire.read))
        )
        with owned_stdio() as stream:
            async with client, trio.open_nursery() as nursery:
                nursery.start_soon(client.send_all, line)
                nursery.start_soon(stream.send_all, line)
                nursery.start_soon(read, "client", client.receive_some)
                nursery.start_soon(read, "server", stream.receive_some)


async def test_one_read_takes_the_whole_content_of_a_pipe(tmp_path: Path) -> None:
    with as_standard_fds(pipes(tmp_path)) as wire:
        os.write(wire.write, bytes(65536))
        with owned_stdio() as stream:
            assert len(await stream.receive_some()) == 65536


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
async def test_two_tasks_at_one_end_are_a_conflict(kind: Kind, tmp_path: Path) -> None:
    with as_standard_fds(kind(tmp_path)), owned_stdio() as stream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive_some)
            nursery.start_soon(stream.send_all, bytes(1 << 20))
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await stream.receive_some()
            with pytest.raises(trio.BusyResourceError):
                await stream.send_all(b"me too")
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", [pipes, files])
async def test_a_closed_stream_raises_closed_resource_error(kind: Kind, tmp_path: Path) -> None:
    with as_standard_fds(kind(tmp_path)), owned_stdio() as stream:
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await stream.receive_some()
        with pytest.raises(trio.ClosedResourceError):
            await stream.send_all(b"")
        with pytest.raises(trio.ClosedResourceError):
            await stream.wait_send_all_might_not_block()


# --- Effects on other processes and files ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
async def test_only_our_own_file_description_is_set_non_blocking(kind: Kind, tmp_path: Path) -> None:
    with as_standard_fds(kind(tmp_path)) as wire:
        with owned_stdio():
            # The fds of the wire represent the parent's terminal, or a stderr that shares the file description.
            assert [os.get_blocking(wire.stdin), os.get_blocking(wire.stdout)] == [kind not in SHARED] * 2
        assert os.get_blocking(wire.stdin)
        assert os.get_blocking(wire.stdout)


async def test_a_shared_file_description_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def refuse(path: str, flags: int, *args: int) -> int:
        if path.startswith("/proc"):
            raise PermissionError(errno.EACCES, "a pipe of another user")
        return opens(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with as_standard_fds(pipes(tmp_path)) as wire:
        with owned_stdio() as stream:
            assert not os.get_blocking(wire.stdin)
            os.write(wire.write, b"asked")
            assert await stream.receive_some() == b"asked"
        assert os.get_blocking(wire.stdin)


async def test_a_terminal_is_opened_by_its_name_on_other_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with as_standard_fds(terminal(tmp_path)) as wire, owned_stdio() as stream:
        assert os.get_blocking(wire.stdin)
        os.write(wire.write, b"asked")
        assert await stream.receive_some() == b"asked"


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_no_child_inherits_the_wire(kind: Kind, tmp_path: Path) -> None:
    def of_the_wire() -> set[int]:
        fds = [int(name) for name in os.listdir("/dev/fd")]
        return {fd for fd in fds if Path(f"/dev/fd/{fd}").exists() and os.get_inheritable(fd)}

    with as_standard_fds(kind(tmp_path)):
        before = of_the_wire()
        with owned_stdio():
            assert of_the_wire() == before
            assert os.path.samestat(os.fstat(0), os.stat(os.devnull))
            assert fd_state(1) == fd_state(2)


@contextmanager
def printing_to_1(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `print` write to fd 1, as outside of tests."""
    with open(1, "w", closefd=False) as file:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "__stdout__", file)
        yield
        patch.undo()


@pytest.mark.parametrize("stderr", ["open", "broken", "the wire", "another file"])
async def test_prints_before_and_during_serving_never_reach_the_wire(
    stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = pipes(tmp_path)
    read_end, write_end = os.pipe()
    if stderr == "broken":
        os.close(read_end)
    with as_standard_fds(wire, stderr=wire.stdout if stderr == "the wire" else write_end), printing_to_1(monkeypatch):
        sys.stdout.write("before,")
        if stderr == "another file":  # stderr was closed when Python began
            monkeypatch.setattr(sys, "__stderr__", None)
        with owned_stdio() as stream:
            sys.stdout.write("within")
            await stream.send_all(b"message")
        sys.stdout.write("after")
        sys.stdout.flush()
        assert os.read(wire.read, 100) == b"messageafter"
    os.close(write_end)
    if stderr != "broken":
        os.set_blocking(read_end, False)
        assert os.read(read_end, 100) == (b"before,within" if stderr == "open" else b"")
        os.close(read_end)


async def test_there_is_one_owner_at_a_time(tmp_path: Path) -> None:
    with as_standard_fds(pipes(tmp_path)):
        with owned_stdio() as stream:
            with pytest.raises(UsageError, match="one at a time"), owned_stdio():
                pass
            await stream.send_all(b"still ours")
        with owned_stdio():
            pass


HARMLESS = [("open", 1), ("open", 2)]


@pytest.mark.parametrize(
    ("name", "nth"),
    [*(("open", nth) for nth in range(3)), *(("fcntl", nth) for nth in range(4)), ("dup2", 0), ("dup2", 1)],
)
async def test_a_failed_system_call_leaves_the_fds_unchanged(
    name: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fcntl if name == "fcntl" else os
    real, calls = getattr(module, name), iter(range(100))

    def sometimes(*args: object) -> object:
        if next(calls) == nth:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args)

    with as_standard_fds(files(tmp_path) if name == "fcntl" else pipes(tmp_path)):
        before = fd_state(0), fd_state(1)
        monkeypatch.setattr(module, name, sometimes)
        # A second file description is not required.
        wrong = contextlib.nullcontext() if (name, nth) in HARMLESS else pytest.raises(OSError, match="Too many")
        with wrong, owned_stdio():
            pass
        monkeypatch.undo()
        assert (fd_state(0), fd_state(1)) == before
        with owned_stdio():
            pass


@pytest.mark.parametrize("nth", range(4))
def test_ctrl_c_waits_until_all_fds_are_taken_or_restored(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.dup2, iter(range(100))

    def interrupted(*args: int) -> int:
        if next(calls) == nth:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    async def main() -> None:
        with owned_stdio():
            await trio.lowlevel.checkpoint()

    with as_standard_fds(pipes(tmp_path)):
        before = fd_state(0), fd_state(1)
        monkeypatch.setattr(os, "dup2", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trio.run(main)
        monkeypatch.undo()
        assert (fd_state(0), fd_state(1)) == before


# --- Real processes -------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    # The package that this process tests.
    "PYTHONPATH": str(Path(trio_mcp.__file__).parents[1]),
}


class Host:
    """Start a server, and exchange lines with it.  A line on the wire that is not a message fails the test."""

    def __init__(self, wire: StandardFds, *command: str, stderr: int | None = None) -> None:
        self.wire = wire
        self.unread = b""
        self._ids = iter(range(1, 1000))
        self._stderr = b""
        self._changed = threading.Condition()
        read_end, theirs = os.pipe() if stderr is None else (-1, stderr)
        on_terminal = os.isatty(wire.stdin)
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=wire.stdin,
            stdout=wire.stdout,
            stderr=theirs,
            env=ENVIRONMENT,
            preexec_fn=_take_terminal if on_terminal else None,
        )
        self._listener = threading.Thread(target=self._listen, args=(read_end,))
        if stderr is None:
            os.close(theirs)
            self._listener.start()
        if not on_terminal:  # the tests check the flags of a terminal at the end
            wire.stdin = wire.stdout = _closed(wire.stdin, wire.stdout)

    def _listen(self, read_end: int) -> None:
        with open(read_end, "rb", buffering=0) as file:
            while data := file.read(65536):
                with self._changed:
                    self._stderr += data
                    self._changed.notify_all()

    def wait_for_stderr(self, text: str, times: int = 1) -> None:
        """Wait until the server has written this text to stderr."""
        with self._changed:
            self._changed.wait_for(lambda: self._stderr.count(f"<{text}>\n".encode()) >= times)

    @property
    def stderr(self) -> str:
        """The whole output on stderr of a server that has ended."""
        self._listener.join()
        return self._stderr.decode()

    def send(self, method: str, *, notify: bool = False, **params: object) -> int:
        id = next(self._ids)
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if notify else {"id": id})}
        left = json.dumps(message, ensure_ascii=False).encode() + b"\n"
        while left:
            left = left[os.write(self.wire.write, left) :]
        return id

    def line(self) -> bytes:
        """The next line; empty if the server has closed the wire."""
        while b"\n" not in self.unread:
            try:
                data = os.read(self.wire.read, 65536)
            except OSError:  # a terminal that no process has open any more
                data = b""
            if not data:
                assert not self.unread, "half a line"
                return b""
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def answer(self, id: int) -> dict[str, Any]:
        while True:
            line = self.line()
            assert line, "the server has ended"
            message = json.loads(line)
            if message.get("id") == id and "method" not in message:
                return message

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        return self.answer(self.send(method, **params))

    def call(self, tool: str, **arguments: object) -> dict[str, Any]:
        return self.ask("tools/call", name=tool, arguments=arguments)

    def begin(self, tool: str, **arguments: object) -> int:
        """Call a tool, and return when its handler waits."""
        id = self.send("tools/call", name=tool, arguments=arguments)
        self.wait_for_stderr("waiting")
        return id

    def open(self) -> Host:
        info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "host", "version": "1"}}
        self.ask("initialize", **info)
        self.send("notifications/initialized", notify=True)
        return self

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close_input(self) -> None:
        if self.wire.write == self.wire.read:
            with socket.socket(fileno=os.dup(self.wire.write)) as end:
                end.shutdown(socket.SHUT_WR)
        else:
            self.wire.write = _closed(self.wire.write)

    def stop_reading(self) -> None:
        """Close the reading end."""
        self.wire.read = _closed(self.wire.read)

    def wait_for_end(self) -> tuple[int, list[Any]]:
        """Wait for the end of the process.  Return the exit status, and the messages that it sent before."""
        messages = [json.loads(line) for line in iter(self.line, b"")]
        return self.process.wait(), messages

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._listener.ident is not None:
            self._listener.join()
        self.wire.close()


def _take_terminal() -> None:
    """Make fd 0 the controlling terminal, so that Ctrl-C there reaches the process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _closed(*fds: int) -> int:
    for fd in fds:
        os.close(fd)
    return -1


Launch = Callable[..., Host]


@pytest.fixture
def launch(no_fd_is_left: None, tmp_path: Path) -> Iterator[Launch]:
    hosts: list[Host] = []

    def start(*arguments: str, program: str = "tools", kind: Kind = pipes, stderr: int | None = None) -> Host:
        path = str(HERE / "stdio_programs" / f"{program}.py")
        hosts.append(Host(kind(tmp_path), path, *arguments, stderr=stderr))
        if kind is terminal:
            # On a terminal, output is written at once, before the library can redirect it.
            assert hosts[-1].line() == b"printed while the program was imported"
        return hosts[-1].open()

    yield start
    for host in hosts:
        host.close()


EMPTY = (0, [])


# --- The wire of a real process -------------------------------------------------------------------------------------


@req("stdio-02", "stdio-11")
@pytest.mark.parametrize("kind", [pipes, two_sockets, one_socket])
def test_a_server_answers_a_line_with_a_line_and_ends_with_its_input(launch: Launch, kind: Kind) -> None:
    host = launch(kind=kind)
    text = "two\nlines,\r\nor \u2028 three"
    assert host.call("echo", text=text)["result"]["content"] == [{"type": "text", "text": text}]
    host.close_input()
    assert host.wait_for_end() == EMPTY
    assert host.stderr == "printed while the program was imported\nprinted when all was over\n"


@req("stdio-03", "stdio-05")
def test_only_messages_reach_the_wire(launch: Launch) -> None:
    host = launch()
    assert host.call("prints")["result"]["content"][0]["text"] == "said it all"
    host.close_input()
    assert host.wait_for_end() == EMPTY
    for text in (
        "printed while the program was imported",
        "printed, überall",
        "written to 1",
        "put by C",
        "read ''",
        "said by a child",
        "left in the buffer",
        "printed when all was over",
    ):
        assert host.stderr.count(text) == 1


@req("stdio-03")
def test_prints_do_not_reach_the_wire_through_stderr(launch: Launch, tmp_path: Path) -> None:
    wire = pipes(tmp_path)
    host = launch(kind=lambda _: wire, stderr=wire.stdout)  # 2>&1
    assert host.call("prints")["result"]["content"][0]["text"] == "said it all"
    host.close_input()
    assert host.wait_for_end() == EMPTY


@pytest.mark.parametrize("stderr", ["gone", "full"])
@req("stdio-03")
def test_prints_do_not_reach_the_wire_if_stderr_is_not_read(launch: Launch, stderr: str) -> None:
    read, write = os.pipe()
    if stderr == "full":
        os.set_blocking(write, False)
        os.write(write, bytes(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)))
    else:
        read = _closed(read)
    host = launch(stderr=write)
    assert host.call("echo", text="here")["result"]["content"][0]["text"] == "here"
    host.close_input()
    assert host.wait_for_end() == EMPTY
    _closed(*{read, write} - {-1})


@pytest.mark.parametrize("how", ["ended", "cancelled"])
@req("stdio-03")
def test_a_program_that_goes_on_has_its_standard_fds_back(launch: Launch, how: str) -> None:
    host = launch(program="embedded")
    host.call("echo", text="here")
    if how == "cancelled":
        # The input has not ended, and stdin and stdout work afterwards.
        host.send("tools/call", name="leave", arguments={})
        host.wait_for_stderr("served")
        os.write(host.wire.write, b"still here\n")
        rest = host.line()
        assert rest == b"cancelled and stdin says 'still here\\n'"
    else:
        host.close_input()
        assert host.line() == b"ended and stdin says ''"
    assert host.wait_for_end() == EMPTY
    assert sorted(host.stderr.split("\n")) == ["", "<served>", "left in the bufferput by C"]


def test_eight_mebibytes_pass_through_a_real_server(launch: Launch) -> None:
    host = launch()
    text = "æ" * (4 << 20)
    assert host.call("echo", text=text)["result"]["content"][0]["text"] == text


def test_a_slow_reader_does_not_delay_other_calls(launch: Launch, tmp_path: Path) -> None:
    wire = pipes(tmp_path)
    fcntl.fcntl(wire.read, fcntl.F_SETPIPE_SZ, 4096)
    host = launch(kind=lambda _: wire)
    big = host.send("tools/call", name="big", arguments={"size": 1 << 20})
    head = b"".join(os.read(wire.read, 1) for _ in range(100))
    # The rest of a mebibyte waits for a pipe of 4 KiB.  Calls are served and cancelled in the meantime.
    for number in range(1, 4):
        id = host.send("tools/call", name="wait", arguments={})
        host.wait_for_stderr("waiting", number)
        host.send("notifications/cancelled", notify=True, requestId=id)
        host.wait_for_stderr("cancelled", number)
    last = host.send("ping")
    host.unread += head
    assert host.answer(big)["result"]["content"][0]["text"] == "x" * (1 << 20)
    assert host.answer(last)["result"] == {}
    host.close_input()
    assert host.wait_for_end() == EMPTY


# --- The end of a process -------------------------------------------------------------------------------------------

RUNNING = ["wait", "wait_in_thread", "print_in_thread"]


@req("stdio-11")
def test_the_end_of_input_lets_running_calls_finish_and_be_answered(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    host = launch("inf")
    id = host.begin("wait_for", path=str(tmp_path / "go"))
    host.close_input()
    (tmp_path / "go").write_text("finished")
    status, [message] = host.wait_for_end()
    assert (status, message["id"], message["result"]["content"][0]["text"]) == (0, id, "finished")


@req("stdio-11")
@pytest.mark.parametrize("tool", RUNNING)
def test_after_the_end_of_input_the_timeout_ends_the_running_calls(launch: Launch, tool: str) -> None:
    host = launch("0.05")
    id = host.begin(tool)
    host.close_input()
    status, [message] = host.wait_for_end()
    assert (status, message["id"], message["error"]["code"]) == (0, id, -32603)
    assert ("<cancelled>" in host.stderr) == (tool == "wait")


def test_the_end_of_input_ends_a_server_with_a_thread_blocked_on_stderr(launch: Launch) -> None:
    read_end, write_end = os.pipe()
    host = launch("0.05", stderr=write_end)
    host.send("tools/call", name="print_in_thread", arguments={})
    while select.select([write_end], [write_end], [], 0)[
        1
    ]:  # until it is full, and the thread in the middle of a print
        assert host.ask("ping")["result"] == {}
    host.close_input()
    status, messages = host.wait_for_end()
    assert (status, ["error" in message for message in messages]) == (0, [True])
    _closed(read_end, write_end)


def test_the_end_of_input_ends_a_server_with_an_unread_answer(launch: Launch) -> None:
    host = launch("0.05")
    host.send("tools/call", name="big", arguments={"size": 1 << 20})
    host.begin("wait")
    host.close_input()
    assert host.process.wait() == 0


@pytest.mark.parametrize("kind", [pipes, two_sockets])
def test_a_server_without_a_client_ends_without_a_message(launch: Launch, kind: Kind) -> None:
    host = launch(kind=kind)
    host.begin("wait")
    host.stop_reading()
    host.send("ping")
    assert host.process.wait() == 0
    assert host.stderr == "printed while the program was imported\n<waiting>\n<cancelled>\nprinted when all was over\n"


@req("stdio-10")
def test_sigterm_ends_an_idle_server_and_the_wire_is_closed_cleanly(launch: Launch) -> None:
    host = launch()
    host.signal(signal.SIGTERM)
    assert host.wait_for_end() == (143, [])
    assert host.stderr == "printed while the program was imported\n"


@req("stdio-10")
def test_sigterm_lets_running_calls_finish_and_refuses_new_ones(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    host = launch("inf")
    id = host.begin("wait_for", path=str(tmp_path / "go"))
    host.signal(signal.SIGTERM)
    # The system decides when the signal arrives.  After that, new calls are refused.
    while "result" in (refused := host.call("echo", text="more")):
        pass
    assert "shutting down" in refused["error"]["message"]
    host.signal(signal.SIGTERM)  # some launchers pass on a signal that the server has already received
    (tmp_path / "go").write_text("finished")
    status, messages = host.wait_for_end()
    assert status == 143
    assert [(message["id"], message["result"]["content"][0]["text"]) for message in messages] == [(id, "finished")]


@pytest.mark.parametrize("tool", RUNNING)
def test_after_sigterm_the_timeout_ends_the_running_calls(launch: Launch, tool: str) -> None:
    host = launch("0.05")
    id = host.begin(tool)
    host.signal(signal.SIGTERM)
    status, [message] = host.wait_for_end()
    assert (status, message["id"], message["error"]["code"]) == (143, id, -32603)
    assert "Traceback" not in host.stderr


@pytest.mark.parametrize(
    ("tool", "way", "status"),
    [
        ("block", "the end of standard input", 0),
        ("hold", "the end of standard input", 0),
        ("block", "SIGTERM", 143),
        ("hold", "SIGTERM", 143),
        ("block", "Ctrl-C", 130),
        ("hold", "Ctrl-C", 130),
    ],
)
def test_the_process_ends_without_a_handler_that_does_not_end(launch: Launch, tool: str, way: str, status: int) -> None:
    """A handler that blocks the loop, and a handler in a thread that must not be abandoned, with a short timeout."""
    host = launch("0.05", "0.2")
    host.begin(tool)
    if way == "Ctrl-C":
        host.signal(signal.SIGINT)
        host.wait_for_stderr("interrupted")
        host.signal(signal.SIGTERM)  # has no effect
    elif way == "SIGTERM":
        host.signal(signal.SIGTERM)
    else:
        host.close_input()
    found, _ = host.wait_for_end()
    assert found == status
    line = f"trio_mcp: a handler or the lifespan has not ended 0.25 seconds after {way}; the process ends without it"
    assert host.stderr.splitlines()[-1] == line


@pytest.mark.parametrize("tool", [None, *RUNNING])
def test_one_ctrl_c_ends_everything_and_leaves_no_traceback(launch: Launch, tool: str | None) -> None:
    host = launch()
    if tool is not None:
        host.begin(tool)
    host.signal(signal.SIGINT)
    assert host.wait_for_end() == (130, [])
    said = host.stderr.replace("and on and on", "").split("\n")
    assert [line for line in said if line] == [
        "printed while the program was imported",
        *(["<waiting>"] if tool is not None else []),
        *(["<cancelled>"] if tool == "wait" else []),
    ]


def test_ctrl_c_during_the_timeout_after_sigterm_ends_the_server(launch: Launch) -> None:
    host = launch("inf")
    host.begin("wait")
    host.signal(signal.SIGTERM)
    while "result" in host.call("echo", text="more"):
        pass
    host.signal(signal.SIGINT)
    assert host.wait_for_end() == (130, [])


def test_a_second_ctrl_c_ends_a_tool_that_blocks_the_loop(launch: Launch) -> None:
    host = launch()
    host.begin("block")
    host.signal(signal.SIGINT)
    host.wait_for_stderr("interrupted")
    host.signal(signal.SIGINT)
    assert host.wait_for_end() == (130, [])
    assert "Traceback" not in host.stderr


def test_a_third_ctrl_c_ends_a_thread_that_must_not_be_abandoned(launch: Launch) -> None:
    host = launch()
    host.begin("hold")
    for number in range(1, 3):
        host.signal(signal.SIGINT)
        host.wait_for_stderr("interrupted", number)
    host.signal(signal.SIGINT)
    assert host.wait_for_end() == (-signal.SIGINT, [])


@pytest.mark.parametrize("tool", ["interrupts", "interrupts_in_thread"])
def test_a_tool_that_raises_keyboard_interrupt_ends_the_server_as_ctrl_c_does(launch: Launch, tool: str) -> None:
    host = launch()
    host.send("tools/call", name=tool, arguments={})
    assert host.wait_for_end() == (130, [])
    assert host.stderr == "printed while the program was imported\n"


@pytest.mark.parametrize("tool", ["exits", "exits_in_thread"])
def test_a_tool_that_calls_exit_has_failed_and_the_server_goes_on(launch: Launch, tool: str) -> None:
    host = launch()
    assert "7" not in json.dumps(host.call(tool).get("error") or host.call(tool)["result"])
    assert host.call("echo", text="here")["result"]["content"][0]["text"] == "here"
    host.close_input()
    assert host.wait_for_end() == EMPTY


# --- At a terminal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [None, "wait", "wait_in_thread"])
def test_ctrl_c_at_a_terminal_ends_the_server_and_restores_the_flags(launch: Launch, tool: str | None) -> None:
    host = launch(kind=terminal)
    # They all share one file description: that of the shell, and of our stderr.
    assert os.get_blocking(host.wire.stdin)
    if tool is not None:
        host.begin(tool)
    os.write(host.wire.write, b"\x03")
    assert host.process.wait() == 130
    assert os.get_blocking(host.wire.stdin)
    assert "Traceback" not in host.stderr


# --- Fds that are closed or belong to another file ------------------------------------------------------------------


@pytest.mark.parametrize("fd", [0, 1])
def test_a_closed_standard_fd_is_a_clear_error(fd: int) -> None:
    """Also if another file has its number by then: Trio's own fds are the next to get it."""
    shell = f"exec {sys.executable} {HERE / 'stdio_programs' / 'tools.py'} {fd}>&-"
    done = subprocess.run(
        ["sh", "-c", shell], env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"tools: standard {'output' if fd else 'input'} is closed; start ")


@req("stdio-03")
def test_prints_with_a_closed_stderr_do_not_reach_the_wire(launch: Launch, tmp_path: Path) -> None:
    host = launch("closes stderr", program="closed")
    assert host.call("prints")["result"]["content"][0]["text"] == "said it all"
    host.close_input()
    assert host.wait_for_end() == EMPTY


@pytest.mark.parametrize("fd", [0, 1])
async def test_an_fd_that_was_closed_later_is_a_clear_error(fd: int, tmp_path: Path) -> None:
    with as_standard_fds(pipes(tmp_path)):
        os.close(fd)
        with pytest.raises(UsageError, match=r"standard \w+ is closed"), owned_stdio():
            pass


async def test_a_standard_stream_that_python_did_not_find_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its number belongs to another file by now, which the library must not touch.
    before = fd_state(0), fd_state(1)
    for name, text in (("__stdin__", "input"), ("__stdout__", "output")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, None)
            with pytest.raises(UsageError, match=f"standard {text} is closed"), owned_stdio():
                pass
    assert (fd_state(0), fd_state(1)) == before


async def test_windows_is_refused_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="not supported on Windows"), owned_stdio():
        pass


def test_the_module_can_be_imported_on_windows() -> None:
    script = "import sys, trio; sys.platform = 'win32'; sys.modules['fcntl'] = None; import trio_mcp.transport.stdio"
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True)


# --- `serve_stdio` and `run` without a server -----------------------------------------------------------------------

Serve = Callable[[trio.abc.Stream, trio.Event], Awaitable[None]]
RunStub = Callable[..., None]


class ServerStub:
    """A substitute for a server: a function that serves, and an event that is set when it must drain."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.drain = trio.Event()

    def _current_offer(self) -> Offer:
        return Offer({"name": "stand-in", "version": "1.0"}, {})

    @contextlib.asynccontextmanager
    async def draining(self, seconds: float) -> AsyncIterator[None]:
        self.drain.set()
        yield


async def serve_stream(
    server: ServerStub, stream: trio.abc.Stream, *, shutdown_timeout: float, tap: Any = None
) -> None:
    """Serve with the stub, and call the tap once."""
    if tap is not None:
        tap("in", b"")
    await server.serve(stream, server.drain)


async def test_serving_a_silent_client_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def listen(stream: trio.abc.Stream, drain: trio.Event) -> None:
        await stream.receive_some()

    monkeypatch.setattr(process, "serve_stream", serve_stream)
    tapped: list[tuple[str, bytes]] = []
    with as_standard_fds(pipes(tmp_path)):
        before, start = (fd_state(0), fd_state(1)), trio.current_time()
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with trio.move_on_after(3600) as scope:
            server: Any = ServerStub(listen)
            await process.serve_stdio(server, tap=lambda *seen: tapped.append(seen))
        assert scope.cancelled_caught
        assert trio.current_time() == start + 3600
        assert (fd_state(0), fd_state(1)) == before
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert tapped == [("in", b"")]


@pytest.fixture
def run_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunStub]:
    monkeypatch.setattr(process, "serve_stream", serve_stream)
    monkeypatch.setattr(process, "_replaced", [])
    monkeypatch.setattr(process.ProcessLife, "leave", lambda *_: None)  # this process must not end
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # restored afterwards
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with as_standard_fds(pipes(tmp_path)):
        yield lambda serve, **options: process.run_stdio(cast(Any, ServerStub(serve)), **options)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("kind", [terminal, pipes])
def test_a_server_at_a_terminal_says_that_it_waits_for_a_client(run_stub: RunStub, kind: Kind, tmp_path: Path) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        pass

    read_end, write_end = os.pipe()
    with as_standard_fds(kind(tmp_path), stderr=write_end):
        run_stub(serve)
    os.close(write_end)
    with open(read_end) as stderr:
        said = stderr.read()
    assert said.startswith("stand-in is waiting for an MCP client on stdin.") is (kind is terminal)
    assert said.count("\n") == (kind is terminal)


def test_a_run_closes_the_wire_and_does_not_restore_the_fds(run_stub: RunStub) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        await stream.send_all(b"bye\n")

    run_stub(serve)
    assert fd_state(1) == fd_state(2)
    assert os.path.samestat(os.fstat(0), os.stat(os.devnull))


def test_a_run_flushes_stdout_before_the_interpreter_ends(run_stub: RunStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would abort if an abandoned thread had the lock of the buffer."""

    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        sys.stdout.write("left")

    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    with printing_to_1(monkeypatch):
        run_stub(serve)
        assert os.read(read_end, 100) == b"left"
        sys.stdout.write("at once")
        assert os.read(read_end, 100) == b"at once"
        assert sys.stdout is sys.__stdout__
    _closed(read_end, write_end)


def test_with_stderr_in_a_file_the_buffer_is_written_at_the_end(
    run_stub: RunStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        sys.stdout.write("left")

    with open(tmp_path / "said", "wb") as said:
        os.dup2(said.fileno(), 2)
        with printing_to_1(monkeypatch):
            run_stub(serve)
            sys.stdout.write("at once,")
            assert (tmp_path / "said").read_bytes() == b"at once,"
        assert (tmp_path / "said").read_bytes() == b"at once,left"


@pytest.mark.parametrize("state", ["closed", "detached", "none"])
def test_a_run_works_without_a_usable_sys_stdout(
    run_stub: RunStub, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[bool] = []

    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        served.append(True)

    with open(os.devnull, "wb") as buffer:
        file = io.TextIOWrapper(buffer)
        monkeypatch.setattr(sys, "__stdout__", file)
        monkeypatch.setattr(sys, "stdout", None if state == "none" else file)
        if state == "closed":
            file.close()
        elif state == "detached":
            file.detach()
        run_stub(serve)
    assert served == [True]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_its_status(run_stub: RunStub, number: int, status: int) -> None:
    drained: list[bool] = []

    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        signal.raise_signal(number)
        try:
            await trio.sleep_forever()
        finally:
            drained.append(drain.is_set())

    with pytest.raises(SystemExit) as ended:
        run_stub(serve, shutdown_timeout=0)
    assert ended.value.code == status
    assert drained == [number == signal.SIGTERM]


def test_a_second_ctrl_c_raises_keyboard_interrupt_in_the_handler(run_stub: RunStub) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_stub(serve)
    assert ended.value.code == 130


def test_ctrl_c_during_the_end_of_a_run_waits_until_all_is_restored(
    run_stub: RunStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.set_blocking

    def interrupted(fd: int, blocking: bool) -> None:
        if blocking:
            signal.raise_signal(signal.SIGINT)
        real(fd, blocking)

    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        signal.raise_signal(signal.SIGINT)

    with as_standard_fds(two_sockets(tmp_path)) as wire:
        monkeypatch.setattr(os, "set_blocking", interrupted)
        monkeypatch.setattr(signal, "SIG_DFL", signal.SIG_IGN)  # the handler that the third signal would find
        with pytest.raises(SystemExit) as ended:
            run_stub(serve)
        assert ended.value.code == 130
        assert os.get_blocking(wire.stdin)
        assert os.get_blocking(wire.stdout)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_sigterm_is_ignored_and_ctrl_c_has_priority(run_stub: RunStub, first: int) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        for number in (first, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        await trio.sleep_forever()

    with pytest.raises(SystemExit) as ended:
        run_stub(serve, shutdown_timeout=0)
    assert ended.value.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[first]


def test_signal_handlers_of_the_program_are_kept(run_stub: RunStub) -> None:
    heard: list[int] = []

    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        for number in theirs:
            signal.raise_signal(number)
        await wait_all_tasks_blocked()
        assert not drain.is_set()

    theirs = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: lambda number, frame: heard.append(number)}
    before = {number: signal.signal(number, handler) for number, handler in theirs.items()}
    try:
        run_stub(serve)
        assert {number: signal.getsignal(number) for number in theirs} == theirs
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM]


def test_outside_the_main_thread_signals_are_left_alone(run_stub: RunStub) -> None:
    seen: list[object] = []

    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run_stub, args=(serve,))
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))]


@pytest.mark.parametrize("alone", [True, False])
def test_a_keyboard_interrupt_ends_a_run_as_ctrl_c_does(run_stub: RunStub, alone: bool) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        if alone:
            raise KeyboardInterrupt
        raise BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt()]), OSError()])

    with pytest.raises(SystemExit) as ended:
        run_stub(serve)
    assert ended.value.code == 130


@pytest.mark.parametrize("error", [ZeroDivisionError(), ExceptionGroup("", [ZeroDivisionError()])])
def test_other_exceptions_are_raised_unchanged(run_stub: RunStub, error: Exception) -> None:
    async def serve(stream: trio.abc.Stream, drain: trio.Event) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_stub(serve)
    assert raised.value is error
