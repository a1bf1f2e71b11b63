"""Server processes that are children of the client: small programs, real signals, and a leak check after each test.

The clock and the processes are real.  A process that ends by itself has a long timeout, which no test waits for.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.requirements import req
from tests.server.checkpoints import Attempt, open_fds
from trio_mcp.core import ConnectionFailed, SessionClosed, UsageError
from trio_mcp.transport import MINIMAL, Child, ServerExited, name_of, open_nursery, start_child

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the check for leaks needs /proc")

LONG = 60.0
"""A shutdown timeout that must not be needed."""

SHORT = 0.05

PYTHON = os.path.basename(sys.executable)

# The beginning of the programs.  A test waits for a line of `say` on stdout.
PRELUDE = """
import os, signal, sys
def say(text):
    os.write(1, text.encode() + b"\\n")
def stay():
    while True:
        signal.pause()
def read():
    while os.read(0, 65536):
        pass
def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
WITH_GRANDCHILD = """
ready, told = os.pipe()
if not os.fork():
    {}
    os.write(told, b"x")
    stay()
os.read(ready, 1)
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", PRELUDE + program]


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock at the real rate, for tests that jump over a timeout."""
    return trio.testing.MockClock(rate=1)


@pytest.fixture(autouse=True)
def check_for_leaks() -> Iterator[None]:
    """Check that no file descriptor and no child is left, also no zombie."""
    fds = open_fds()
    yield
    assert open_fds() <= fds  # descriptors of an earlier test may be closed by the garbage collector
    assert has_no_children()


def has_no_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def group_of(pid: int) -> set[int]:
    """The processes that are alive in the process group."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == pid and state not in "ZX":
                found.add(int(name))
    return found


@asynccontextmanager
async def running(program: str, *, until: bytes = b"", **options: Any) -> AsyncIterator[Child]:
    """Run the program as a child, and wait for `until` on stdout.  After closing, check that its group is empty."""
    async with open_nursery() as nursery:
        child = await start_child(nursery, python(program), **{"shutdown_timeout": LONG, **options})
        async with child:
            if until:
                assert await read_from(child, len(until) + 1) == until + b"\n"
            yield child
    assert group_of(child.pid) == set()


async def read_from(child: Child, size: int | None = None) -> bytes:
    """Read `size` bytes, or all until the end."""
    data = b""
    while size is None or len(data) < size:
        if not (more := await child.stream.receive_some(None if size is None else size - len(data))):
            break
        data += more
    return data


def exit_of(child: Child) -> ServerExited:
    assert child.exit is not None
    return child.exit


# The stream.


async def test_stdin_and_stdout_are_one_stream_that_can_be_half_closed() -> None:
    async with running("while data := os.read(0, 9): os.write(1, data[::-1])\nsay('bye')") as child:
        await child.stream.wait_send_all_might_not_block()
        await child.stream.send_all(b"abc")
        assert await read_from(child, 3) == b"cba"
        assert child.exit is None
        await child.stream.send_eof()
        assert await read_from(child) == b"bye\n"
        assert exit_of(child).status == 0
        assert await child.stream.receive_some() == b""  # it stays at the end
        with pytest.raises(trio.ClosedResourceError):
            await child.stream.send_all(b"more")


async def test_a_child_that_reads_nothing_blocks_a_write_that_can_be_cancelled() -> None:
    async with running("say('here'); stay()", until=b"here", shutdown_timeout=SHORT) as child:
        with trio.move_on_after(SHORT) as scope:
            await child.stream.send_all(bytes(10_000_000))
        assert scope.cancelled_caught
    assert exit_of(child).signal is signal.SIGTERM


@req("stdio-10")
async def test_a_child_that_closes_its_stdout_and_exits_is_a_clean_end() -> None:
    async with running("say('last'); os.close(1); os._exit(0)") as child:
        assert await read_from(child) == b"last\n"
        assert exit_of(child).status == 0


async def test_a_child_that_closes_its_stdout_and_runs_on_ends_the_stream() -> None:
    async with running("say('last'); os.close(1); read()") as child:
        assert await read_from(child) == b"last\n"
        assert child.exit is None
        await child.stream.send_all(b"it still listens")
    assert exit_of(child).status == 0


async def test_output_before_an_exit_is_read_if_a_grandchild_holds_stdout_open() -> None:
    program = WITH_GRANDCHILD.format("") + "os.write(1, b'x' * 50_000); say('last'); os.kill(os.getpid(), 9)"
    async with running(program) as child:
        await trio.testing.wait_all_tasks_blocked()
        assert await read_from(child) == b"x" * 50_000 + b"last\n"
        assert exit_of(child).signal is signal.SIGKILL


async def test_an_exit_wakes_readers_and_writers_if_a_grandchild_holds_the_pipes() -> None:
    outcomes: list[str] = []

    async def write() -> None:
        with pytest.raises(trio.BrokenResourceError):
            await child.stream.send_all(bytes(10_000_000))
        with pytest.raises(trio.BrokenResourceError):
            await child.stream.wait_send_all_might_not_block()
        outcomes.append("writer")

    async def read() -> None:
        assert await child.stream.receive_some() == b""
        outcomes.append("reader")

    async with running(
        WITH_GRANDCHILD.format("ignore_sigterm()") + "say('here'); stay()", until=b"here", shutdown_timeout=SHORT
    ) as child:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(child.pid, signal.SIGKILL)
        assert sorted(outcomes) == ["reader", "writer"]


async def test_output_before_an_exit_can_be_read_later_if_stdout_is_held_open() -> None:
    program = """
ready, told = os.pipe()
if not (left := os.fork()):
    os.setsid()
    os.write(told, b"x")
    stay()
os.read(ready, 1)
os.write(1, b"x" * 50_000)
say(f"<{left}")
"""
    async with running(program) as child:
        while child.exit is None:  # noqa: ASYNC110  # there is no event for this without a reader
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        data, _, left = (await read_from(child)).partition(b"<")
        assert data == b"x" * 50_000
        os.kill(int(left), signal.SIGKILL)


async def test_the_output_kept_after_an_exit_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(fd: int, size: int) -> bytes:
        return bytes(65_536) if size == 2**20 else read(fd, size)

    read = os.read
    async with running(WITH_GRANDCHILD.format("") + STAYS, until=b"ready") as child:
        with monkeypatch.context() as patch:
            patch.setattr("trio_mcp.transport.child.os.read", endless)
            os.kill(child.pid, signal.SIGKILL)
            assert len(await read_from(child)) == 2**20


async def test_a_stream_ends_if_a_process_outside_the_group_goes_on_writing() -> None:
    program = """
if not (left := os.fork()):
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    while True:
        os.write(1, b"-" * 9999)
say(f"<{left}>")
"""
    async with running(program) as child:
        assert b"<" in await read_from(child)
        assert exit_of(child).status == 0


async def test_only_one_task_receives_and_closing_the_stream_wakes_it() -> None:
    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await child.stream.receive_some()

    async with running("read()") as child, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await child.stream.receive_some()
        await child.stream.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await child.stream.receive_some()
        with pytest.raises(trio.ClosedResourceError):
            await child.stream.send_all(b"x")
    assert exit_of(child).status == 0


async def test_a_cancelled_read_loses_no_data() -> None:
    async with running("read(); say('all of it')") as child:
        with trio.move_on_after(0):
            await child.stream.receive_some()
        with trio.move_on_after(SHORT):
            await child.stream.receive_some()
        await child.stream.send_eof()
        assert await read_from(child) == b"all of it\n"


# How it ends.


@pytest.mark.parametrize(
    ("program", "status", "number", "message"),
    [
        ("", 0, None, "ended with status 0, and wrote nothing to stderr"),
        ("os._exit(3)", 3, None, "ended with status 3, and"),
        ("os.write(2, b'\\n'); os._exit(3)", 3, None, "ended with status 3, and"),
        ("sys.exit('no API key')", 1, None, "ended with status 1; its last lines on stderr:\n  no API key"),
        ("os.kill(os.getpid(), 11)", None, signal.SIGSEGV, "was ended by SIGSEGV, and"),
        ("os.kill(os.getpid(), 40)", 168, None, "ended with status 168, and"),
    ],
)
async def test_the_exit_error_has_the_status_the_signal_and_stderr(
    program: str, status: int, number: signal.Signals, message: str
) -> None:
    async with running(program) as child:
        assert await read_from(child) == b""
        error = exit_of(child)
        assert (error.status, error.signal) == (status, number)
        assert error.stderr_tail == child.stderr_tail
        assert str(error).startswith(f"the server {PYTHON!r} {message}")
        assert isinstance(error, SessionClosed)
        assert child.exit is not error  # each raise has an error object of its own
    assert str(child.exit) == str(error)


def test_an_exit_error_has_the_last_lines_without_control_characters() -> None:
    error = ServerExited("x", 1, "\n".join(["first", *map(str, range(18)), "a\x1b[2Jb\tc", "z"]))
    assert str(error).splitlines()[1:] == [*(f"  {n}" for n in range(18)), "  a\ufffd[2Jb\tc", "  z"]


ENDS = "say('ready'); read()"
STAYS = "say('ready'); stay()"
STOPS = "say('ready'); os.kill(os.getpid(), signal.SIGSTOP)"


@req("stdio-08", "stdio-09")
@pytest.mark.parametrize(
    ("program", "shutdown_timeout", "status", "number"),
    [
        pytest.param(ENDS, LONG, 0, None, id="it ends with its stdin"),
        pytest.param(STAYS, SHORT, None, signal.SIGTERM, id="it waits for SIGTERM"),
        pytest.param("ignore_sigterm();" + STAYS, SHORT, None, signal.SIGKILL, id="it ignores SIGTERM"),
        pytest.param(STOPS, SHORT, None, signal.SIGKILL, id="it is stopped"),
        pytest.param(WITH_GRANDCHILD.format("") + ENDS, LONG, 0, None, id="a grandchild stays"),
        pytest.param(WITH_GRANDCHILD.format("") + STAYS, SHORT, None, signal.SIGTERM, id="both wait for SIGTERM"),
        pytest.param(
            WITH_GRANDCHILD.format("ignore_sigterm()") + "ignore_sigterm();" + STAYS,
            SHORT,
            None,
            signal.SIGKILL,
            id="both ignore it",
        ),
    ],
)
async def test_after_closing_no_process_of_the_group_is_alive(
    program: str, shutdown_timeout: float, status: int | None, number: signal.Signals | None
) -> None:
    async with running(program, until=b"ready", shutdown_timeout=shutdown_timeout) as child:
        assert len(group_of(child.pid)) == (2 if "fork" in program else 1)
        await child.aclose()
        assert group_of(child.pid) == set()
        assert (exit_of(child).status, exit_of(child).signal) == (status, number)
        await child.aclose()  # a second time is allowed


@req("stdio-08", "stdio-09")
async def test_a_grandchild_that_ignores_sigterm_is_killed_after_the_timeout(clock: trio.testing.MockClock) -> None:
    async with (
        running(WITH_GRANDCHILD.format("ignore_sigterm()") + ENDS, until=b"ready") as child,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(child.aclose)
        while child.exit is None:  # noqa: ASYNC110  # there is no event for this without a reader
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        assert len(group_of(child.pid)) == 1
        clock.jump(LONG)
    assert exit_of(child).status == 0


@req("stdio-08", "stdio-09")
async def test_sigterm_follows_the_end_of_stdin_and_both_have_a_timeout(
    clock: trio.testing.MockClock,
) -> None:
    program = """
signal.signal(signal.SIGTERM, lambda *_: (os.write(2, b"SIGTERM\\n"), os._exit(4)))
say("ready")
read()
os.write(2, b"end of stdin\\n")
stay()
"""

    def hear(said: bytes) -> None:
        if said == b"end of stdin\n":
            clock.jump(LONG)

    async with running(program, until=b"ready", stderr=hear) as child:
        pass
    assert child.stderr_tail == "end of stdin\nSIGTERM\n"
    assert exit_of(child).status == 4


async def test_a_grandchild_has_the_timeout_after_sigterm_without_its_parent() -> None:
    cleaning = "signal.signal(signal.SIGTERM, lambda *_: (os.close(told), os._exit(0)))"
    program = "out, into = os.pipe()\n" + WITH_GRANDCHILD.format(cleaning) + "os.close(told); say('ready'); read()"
    async with running(program, until=b"ready") as child:
        pass  # with the timeout LONG: it has ended by itself
    assert exit_of(child).status == 0


async def test_output_after_the_end_of_stdin_does_not_prevent_a_clean_exit() -> None:
    async with running("read(); os.write(1, bytes(3_000_000)); os.write(2, b'whole'); os._exit(5)") as child:
        pass
    assert child.stderr_tail == "whole"
    assert exit_of(child).status == 5


async def test_a_child_has_a_group_and_a_session_of_its_own() -> None:
    async with running("read()") as child:
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid


async def test_many_tasks_may_close_a_child_at_once() -> None:
    statuses: list[int | None] = []
    async with running("read(); os.write(2, b'in order')") as child:

        async def close() -> None:
            with trio.CancelScope() as scope:
                scope.cancel()
                await child.aclose()
                statuses.append(exit_of(child).status)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(close)
    assert child.stderr_tail == "in order"
    assert statuses == [0] * 5


async def test_the_exit_is_known_if_closed_while_its_last_output_is_read() -> None:
    program = """
import fcntl
fcntl.fcntl(2, 1031, 2**20)  # F_SETPIPE_SZ: large, so that it needs more than one read
say("ready")
os.read(0, 1)
os.write(2, b"x" * 900_000 + b"\\nlast")
os._exit(3)
"""
    for _ in range(20):  # the tasks may run in several orders, and some orders are rare
        async with running(program, until=b"ready", shutdown_timeout=0) as child:
            await child.stream.send_all(b"x")
            # This blocks the event loop, which has not seen the exit yet.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert exit_of(child).status == 3
        assert child.stderr_tail == "last"


async def test_an_exception_of_the_body_is_raised_as_the_same_object() -> None:
    error = KeyError("the body's own")
    with pytest.raises(KeyError) as raised:
        async with running("read()"):
            raise error
    assert raised.value is error


@pytest.mark.parametrize("program", ["read()", "say('ready'); ignore_sigterm(); stay()"])
async def test_cancelling_the_nursery_ends_the_child(program: str) -> None:
    async with trio.open_nursery() as nursery:
        child = await start_child(nursery, python(program), shutdown_timeout=SHORT)
        nursery.cancel_scope.cancel()
    assert group_of(child.pid) == set()
    assert child.exit is not None


@pytest.mark.parametrize("when", ["while it starts", "while the body runs", "while its stderr is read"])
def test_ctrl_c_leaves_the_child_time_to_exit(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    stderr_pieces: list[bytes] = []

    async def starting(*args: Any, **options: Any) -> trio.Process:
        process = await open_process(*args, **options)
        pids.append(process.pid)
        if when == "while it starts":
            signal.raise_signal(signal.SIGINT)
        return process

    def hear(data: bytes) -> None:
        if when == "while its stderr is read" and not stderr_pieces:
            signal.raise_signal(signal.SIGINT)
        stderr_pieces.append(data)

    async def main() -> None:
        async with open_nursery() as nursery:
            program = python("os.write(2, b'begun, ');read(); os.write(2, b'in order')")
            await start_child(nursery, program, shutdown_timeout=LONG, stderr=hear)
            if when == "while the body runs":
                signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()

    open_process = trio.lowlevel.open_process
    monkeypatch.setattr("trio_mcp.transport.child.trio.lowlevel.open_process", starting)
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert b"".join(stderr_pieces) == b"begun, in order"
    assert not group_of(pids[0])


@pytest.mark.parametrize("program", ["read()", "stay()", "os._exit(3)"])
def test_cancelling_at_every_step_leaves_no_process(program: str) -> None:
    for n in itertools.count():
        attempt = Attempt(n, lambda task: True)
        groups: list[int] = []

        async def scenario(attempt: Attempt = attempt, groups: list[int] = groups) -> None:
            with attempt.window():
                async with open_nursery() as nursery:
                    child = await start_child(nursery, python(program), shutdown_timeout=0.01)
                    groups.append(child.pid)
                    with suppress(trio.BrokenResourceError):
                        await child.stream.send_all(b"x")
                    await child.aclose()
                    assert child.exit is not None

        trio.run(scenario, instruments=[attempt])
        assert not any(group_of(pid) for pid in groups)
        assert has_no_children()
        if not attempt.fired:
            break
    assert n > 15


async def test_the_stdin_of_a_child_ends_when_the_client_process_is_killed() -> None:
    program = """
import trio
from trio_mcp.transport.child import start_child
async def main():
    async with trio.open_nursery() as nursery:
        child = await start_child(nursery, ["cat"])
        print(child.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""
    async with open_nursery() as nursery:
        parent = await start_child(nursery, [sys.executable, "-c", program], shutdown_timeout=LONG)
        pid = int(await parent.stream.receive_some())
        watched = os.pidfd_open(pid)
        os.kill(parent.pid, signal.SIGKILL)
        await trio.lowlevel.wait_readable(watched)
        os.close(watched)
        await parent.aclose()
    assert exit_of(parent).signal is signal.SIGKILL


@pytest.fixture
def as_process_one() -> Iterator[None]:
    """Make this process adopt orphans, as process 1 does."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    yield
    prctl(36, 0, 0, 0, 0)


@pytest.mark.usefixtures("as_process_one")
async def test_orphans_that_become_children_of_the_client_are_reaped() -> None:
    async with running(WITH_GRANDCHILD.format("") + ENDS, until=b"ready") as child:
        await child.aclose()
        assert has_no_children()


@pytest.mark.usefixtures("as_process_one")
async def test_closing_does_not_wait_for_zombies_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def reap(pid: int, options: int) -> tuple[int, int]:
        if pid < 0:
            raise ChildProcessError
        return waitpid(pid, options)

    waitpid = os.waitpid
    async with running(WITH_GRANDCHILD.format("") + ENDS, until=b"ready") as child:
        with monkeypatch.context() as patch:
            patch.setattr("trio_mcp.transport.child.os.waitpid", reap)
            await child.aclose()  # takes less than the timeout, which is LONG
    assert os.waitpid(-child.pid, os.WNOHANG)[1] == signal.SIGTERM  # noqa: ASYNC222  # a zombie


async def test_a_process_group_gets_no_signal_after_its_end(
    clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        sent.append(number)
        killpg(pid, number)

    sent: list[int] = []
    killpg = os.killpg
    monkeypatch.setattr("trio_mcp.transport.child.os.killpg", kill)
    async with running(STAYS, until=b"ready") as child, trio.open_nursery() as nursery:
        nursery.start_soon(child.aclose)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(LONG)
    assert sent == [signal.SIGTERM, 0]


def pipes() -> set[tuple[int, str]]:
    return {fd for fd in open_fds() if fd[1].startswith("pipe:")}


def forbid(pid: int, number: int) -> None:
    raise PermissionError


async def test_a_process_that_cannot_be_signalled_still_has_the_timeout(
    clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tell_and_forbid(pid: int, number: int) -> None:
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGUSR1)  # the process ends for another reason
        forbid(pid, number)

    monkeypatch.setattr("trio_mcp.transport.child.os.killpg", tell_and_forbid)
    program = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(7)); read(); os.write(2, b'over'); stay()"
    async with running(program, stderr=lambda said: clock.jump(LONG)) as child:
        pass
    assert exit_of(child).status == 7
    assert not caplog.records


async def test_a_process_that_cannot_be_ended_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = pipes()
    async with running(STAYS, until=b"ready", shutdown_timeout=SHORT) as child:
        with monkeypatch.context() as patch:
            patch.setattr("trio_mcp.transport.child.os.killpg", forbid)
            await child.aclose()
        assert child.exit is None
        assert pipes() == before
        assert f"(process {child.pid}) cannot be ended" in caplog.text
        os.kill(child.pid, signal.SIGKILL)
        await child._process.wait()


# stderr.


@req("stdio-06", "stdio-07")
async def test_much_unread_stderr_does_not_block_and_is_no_error() -> None:
    program = """
data = memoryview(b"".join(b"%09d\\n" % n for n in range(1_000_000)))
while data:
    data = data[os.write(2, data):]
say("done")
read()
"""
    async with running(program, until=b"done") as child:
        assert child.exit is None
    assert exit_of(child).status == 0
    lines = child.stderr_tail.splitlines()
    assert lines == [f"{n:09}" for n in range(1_000_000 - 819, 1_000_000)]  # the last 8 KiB


@pytest.mark.parametrize(
    ("written", "tail"),
    [
        (b"", ""),
        (b"one\ntwo", "one\ntwo"),
        (b"\xff\xc3\xa9\n", "\ufffdé\n"),
        (b"x" * 8192, "x" * 8192),
        (b"x" * 8193, "x" * 8192),
        (b"first\n" + b"x" * 8191 + b"\n", "x" * 8191 + "\n"),
        (b"first\n" + b"x" * 8000 + b"\nlast\n" + b"y" * 200, "last\n" + "y" * 200),
        (b"x" * 9000 + b"\n", "x" * 8191 + "\n"),
    ],
)
async def test_the_stderr_tail_begins_at_the_start_of_a_line(written: bytes, tail: str) -> None:
    async with running(f"os.write(2, {written!r}); read()") as child:
        pass
    assert child.stderr_tail == tail


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell how much is unread in a pipe")
async def test_has_read_nothing_is_known_after_the_end() -> None:
    async with running("say('up'); stay()", until=b"up", shutdown_timeout=SHORT) as child:
        pass
    assert child.has_read_nothing  # no data was sent
    async with running("say('up'); os.read(0, 1); say('read'); stay()", until=b"up", shutdown_timeout=SHORT) as child:
        assert child.has_read_nothing
        await child.stream.send_all(b"ab")
        assert await read_from(child, 5) == b"read\n"
        assert not child.has_read_nothing
    assert not child.has_read_nothing
    async with running("say('up'); stay()", until=b"up") as child:
        await child.stream.send_all(b"ab")
        os.kill(child.pid, signal.SIGKILL)
        assert await child.stream.receive_some() == b""
        assert child.has_read_nothing
    assert child.has_read_nothing


@req("stdio-06")
async def test_stderr_can_be_forwarded_to_a_callback() -> None:
    pieces: list[bytes] = []
    async with running("os.write(2, b'one'); say('1'); read(); os.write(2, b'two')", stderr=pieces.append) as child:
        assert await read_from(child, 2) == b"1\n"
        await trio.testing.wait_all_tasks_blocked()
        assert pieces == [b"one"]
    assert pieces == [b"one", b"two"]


async def test_a_callback_that_fails_is_logged_and_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(piece: bytes) -> None:
        calls.append(piece)
        raise ValueError("of the callback")

    async with running("os.write(2, b'one'); say('1'); read(); os.write(2, b'two')", stderr=fail) as child:
        assert await read_from(child, 2) == b"1\n"
        await trio.testing.wait_all_tasks_blocked()
    assert calls == [b"one"]
    assert child.stderr_tail == "onetwo"
    assert [(record.name, record.levelno) for record in caplog.records] == [("trio_mcp", logging.ERROR)]


WORDS = b"\x1b[1mone\xff\n"


class TextStderr(io.StringIO):
    """A replacement of `sys.stderr` that takes only text, as in a notebook or a test."""

    def said(self) -> bytes:
        return self.getvalue().encode()


class BytesStderr(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def said(self) -> bytes:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


@req("stdio-06")
@pytest.mark.parametrize(
    ("stderr_type", "said"), [(BytesStderr, WORDS + b"two"), (TextStderr, "\x1b[1mone\ufffd\ntwo".encode())]
)
async def test_stderr_is_passed_on_to_sys_stderr(
    stderr_type: Callable[[], Any], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = stderr_type()
    monkeypatch.setattr(sys, "stderr", stderr)
    async with running(f"os.write(2, {WORDS!r}); say('1'); read(); os.write(2, b'two')") as child:
        assert await read_from(child, 2) == b"1\n"
        await trio.testing.wait_all_tasks_blocked()
        assert stderr.said() == said.removesuffix(b"two")
    assert stderr.said() == said
    assert child.stderr_tail == WORDS.decode(errors="replace") + "two"


async def test_stderr_can_be_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = TextStderr()
    monkeypatch.setattr(sys, "stderr", stderr)
    async with running("os.write(2, b'one'); read()", stderr=None) as child:
        pass
    assert (stderr.said(), child.stderr_tail) == (b"", "one")


def closed() -> TextStderr:
    stream = TextStderr()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr_type", [lambda: None, closed, object])
async def test_an_unusable_sys_stderr_is_no_error(
    stderr_type: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr_type())
    async with running("os.write(2, b'one'); read(); os.write(2, b'two')") as child:
        pass
    assert child.stderr_tail == "onetwo"
    assert not caplog.records


MUCH_STDERR = """
data = memoryview(b"x" * 300_000)
while data:
    data = data[os.write(2, data):]
os._exit(3)
"""


@contextmanager
def a_pipe_as_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    reading, writing = os.pipe()
    with open(writing, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield reading
    os.close(reading)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while os.write(pipe, b"." * 4096):
            pass
    os.set_blocking(pipe, True)


async def test_an_unread_sys_stderr_blocks_neither_the_loop_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_pipe_as_stderr(monkeypatch) as reading:
        async with running(MUCH_STDERR) as child:
            assert await read_from(child) == b""
            assert exit_of(child).status == 3
        assert len(child.stderr_tail) == 8192
        assert 0 < len(os.read(reading, 2**20)) < 300_000
        fill(sys.stderr.fileno())
        async with running("os.write(2, b'last'); os._exit(3)") as child:
            assert await read_from(child) == b""
            assert exit_of(child).stderr_tail == "last"  # known in time, but not passed on


async def test_a_full_sys_stderr_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_pipe_as_stderr(monkeypatch) as reading:
        fill(sys.stderr.fileno())
        async with running("os.write(2, b'one'); say('1'); read()") as child:
            assert await read_from(child, 2) == b"1\n"
            await trio.testing.wait_all_tasks_blocked()
            assert os.read(reading, 2**20).strip(b".") == b""
        assert os.read(reading, 2**20) == b"one"


async def test_a_sys_stderr_that_is_read_gets_all_output(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 0

    async def read() -> None:
        nonlocal size
        while size < 300_000:
            await trio.lowlevel.wait_readable(reading)
            size += len(os.read(reading, 2**20))

    with a_pipe_as_stderr(monkeypatch) as reading:
        async with running(MUCH_STDERR) as child, trio.open_nursery() as nursery:
            nursery.start_soon(read)
            assert await read_from(child) == b""
    assert size == 300_000


async def test_output_of_a_grandchild_after_an_exit_is_not_waited_for() -> None:
    async with running(
        WITH_GRANDCHILD.format("ignore_sigterm()") + "os.write(2, b'last'); os._exit(3)", shutdown_timeout=SHORT
    ) as child:
        assert await read_from(child) == b""
        assert exit_of(child).stderr_tail == "last"


# Command and environment.

ENVIRONMENT = """
for name, value in os.environb.items():
    os.write(1, name + b"=" + value + b"\\n")
"""


@pytest.mark.parametrize(
    ("environment", "env", "found"),
    [
        ("inherit", None, {"OURS": "1", "HOME": "/h", "PATH": "/bin", "LC_TIME": "C"}),
        ("inherit", {"OURS": "2", "HOME": None, "LC_TIME": None, "NONE": None}, {"OURS": "2", "PATH": "/bin"}),
        ("minimal", None, {"HOME": "/h", "PATH": "/bin", "LC_TIME": "C"}),
        ("minimal", {"TOKEN": "t", "PATH": "/p", "LC_TIME": None}, {"HOME": "/h", "PATH": "/p", "TOKEN": "t"}),
        ({"ONLY": "this"}, None, {"ONLY": "this"}),
        ({"ONLY": "this", "AND": "that"}, {"ONLY": None, "X": ""}, {"AND": "that", "X": ""}),
        ({}, None, {}),
    ],
)
async def test_the_environment_is_a_policy_with_overrides(
    environment: Any, env: Any, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in {"OURS": "1", "HOME": "/h", "PATH": "/bin", "LC_TIME": "C"}.items():
            patch.setenv(name, value)
        async with running(ENVIRONMENT, environment=environment, env=env) as child:
            lines = (await read_from(child)).decode().splitlines()
    # Python itself sets LC_CTYPE if there is no locale.
    assert dict(line.split("=", 1) for line in lines if not line.startswith("LC_CTYPE=")) == found


def test_the_minimal_environment_has_the_variables_to_find_programs() -> None:
    assert MINIMAL == ("HOME", "LANG", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")


@pytest.mark.parametrize("form", [str, Path, lambda path: [path], lambda path: (Path(path),)])
async def test_a_command_string_is_one_program_also_with_a_space(form: Callable[[str], Any], tmp_path: Path) -> None:
    program = tmp_path / "my server"
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    (tmp_path / "there").mkdir()
    places: list[tuple[str, str | Path]]
    places = [(str(program), tmp_path), ("../my server", tmp_path / "there"), ("my server", str(tmp_path))]
    for name, cwd in places:
        async with (
            open_nursery() as nursery,
            await start_child(nursery, form(name), cwd=cwd, env={"PATH": f"/nowhere:{tmp_path}:/bin"}) as child,
        ):
            assert await read_from(child) == os.fsencode(cwd) + b"\n"
            assert exit_of(child).status == 0


SECRET = "s3cret"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/opt/v/bin/python3.11", "servers/weather.py", SECRET], "python3.11"),
        (["python", "-c", SECRET], "python"),
        (["python"], "python"),
        (["npx", f"--token={SECRET}", "some-server"], "npx"),
        (["./serve", SECRET], "serve"),
        (["my server", SECRET], "my server"),
        ([f"serve --token {SECRET}/x"], "serve"),
        ([f"serve token={SECRET}/x"], "serve token"),
    ],
)
def test_the_name_of_a_command_shows_no_secret(command: list[str], name: str) -> None:
    assert name_of(command) == name
    assert SECRET not in name


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("no-such", {"env": {"PATH": "/a:/b"}}, "there is no command 'no-such' in '/a:/b'"),
        ("no-such", {"environment": {}}, "there is no command 'no-such' in '/bin:/usr/bin'"),
        (["no-such", SECRET], {"env": {"PATH": "/a"}}, "there is no command 'no-such' in '/a'"),
        (f"no-such --token={SECRET}", {"env": {"PATH": "/a"}},
         "there is no command 'no-such ...' in '/a'; write a command with arguments as a list, one string for each"),
        ("notes.py", {"env": {"PATH": "/a"}},
         """there is no command 'notes.py' in '/a'; name the program that runs it: ["python", "server.py"]"""),
        ("/no/such", {}, "there is no command '/no/such'"),
        ("./no-such", {"cwd": "/usr"}, "there is no command './no-such' in '/usr'"),
        ("./no-such", {}, "there is no command './no-such' in '.'"),
        ("/dev", {}, "'/dev' cannot be started: it is a directory; name a program in it"),
        ("cat", {"cwd": "/no/such"}, "'cat' cannot be started in '/no/such': that is not a directory"),
        ("cat", {"cwd": "/dev/null"}, "'cat' cannot be started in '/dev/null': that is not a directory"),
        (["cat", SECRET + "\0"], {},
         "'cat' cannot be started: arguments and variables must not contain NUL, names of variables no ="),
        ("cat", {"env": {"A=B": SECRET}},
         "'cat' cannot be started: arguments and variables must not contain NUL, names of variables no ="),
        ("cat", {"env": {"A": 1}}, "the environment variable 'A' must be a string, got int"),
        ("cat", {"env": {1: SECRET}}, "the environment variable 1 must be a string, got str"),
        ("cat", {"environment": "maximal"},
         'environment must be "minimal", "inherit" or a mapping of all variables of the process'),
        ("cat", {"shutdown_timeout": -1}, "shutdown_timeout must be a number of seconds, 0 or more, got -1"),
        ("cat", {"shutdown_timeout": float("nan")}, "shutdown_timeout must be a number of seconds, 0 or more, got nan"),
        ("cat", {"shutdown_timeout": "2"}, "shutdown_timeout must be a number of seconds, 0 or more, got '2'"),
        *((command, {}, 'a command must be a program and its arguments, all strings: ["python", "server.py"]')
          for command in ("", [], [""], ["cat", 1], ["cat", b"x"], b"cat", 7, None)),
    ],
)  # fmt: skip
async def test_the_error_of_a_command_has_the_reason_and_no_secret(command: Any, options: Any, message: str) -> None:
    async with open_nursery() as nursery:
        with pytest.raises((UsageError, ConnectionFailed)) as raised:
            await start_child(nursery, command, **options)
        assert not nursery.child_tasks
    # An error of the operating system is not a usage error.
    assert isinstance(raised.value, ConnectionFailed) is isinstance(raised.value.__cause__, OSError)
    assert str(raised.value) == message
    assert SECRET not in f"{raised.value!r} {raised.value.__cause__!r}"


async def test_tasks_and_exit_error_have_the_name_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "weather.py"
    script.write_text("import sys; sys.exit(len(sys.argv))")
    async with open_nursery() as nursery:
        child = await start_child(nursery, [sys.executable, script, SECRET])
        assert [task.name for task in nursery.child_tasks] == [f"the server {PYTHON!r}"]
        assert await read_from(child) == b""
    assert str(child.exit) == f"the server {PYTHON!r} ended with status 2, and wrote nothing to stderr"


async def test_a_missing_interpreter_and_a_missing_script_are_different_errors(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    async with open_nursery() as nursery:
        with pytest.raises(ConnectionFailed, match="was found, but not the interpreter") as raised:
            await start_child(nursery, script)
        assert isinstance(raised.value.__cause__, FileNotFoundError)
        with pytest.raises(ConnectionFailed, match=r"was found in .*, but not the interpreter"):
            await start_child(nursery, "script", env={"PATH": str(tmp_path)})
