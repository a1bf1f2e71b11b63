"""A server process that is a child of ours: small programs, real signals, and each time a look at what is left.

The clock is real, as the processes are.  What ends by itself is given a grace that no test waits for.
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

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="what is left is seen in /proc")

LONG = 60.0
"""A grace that is not to be needed."""

SHORT = 0.05

PYTHON = os.path.basename(sys.executable)

# What programs here begin with: `say` is heard on stdout, and the test goes on when it is.
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
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
GRANDCHILD = """
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
    """Time that passes as it does, for a test that lets a grace be over when it wants it to be."""
    return trio.testing.MockClock(rate=1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No file descriptor, and no child, not even a dead one."""
    fds = open_fds()
    yield
    assert open_fds() <= fds  # what an earlier test has left to the garbage collector may be closed by now
    assert no_child_is_left()


def no_child_is_left() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def group_of(pid: int) -> set[int]:
    """Who is alive in the process group."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == pid and state not in "ZX":
                found.add(int(name))
    return found


@asynccontextmanager
async def running(program: str, *, until: bytes = b"", **options: Any) -> AsyncIterator[Child]:
    """A child with this program, which has said `until`; closed afterwards, and then nobody of its group is there."""
    async with open_nursery() as nursery:
        child = await start_child(nursery, python(program), **{"shutdown_timeout": LONG, **options})
        async with child:
            if until:
                assert await heard(child, len(until) + 1) == until + b"\n"
            yield child
    assert group_of(child.pid) == set()


async def heard(child: Child, size: int | None = None) -> bytes:
    """So many bytes, or all until the end."""
    data = b""
    while size is None or len(data) < size:
        if not (more := await child.stream.receive_some(None if size is None else size - len(data))):
            break
        data += more
    return data


def exit_of(child: Child) -> ServerExited:
    assert child.exit is not None
    return child.exit


# The wire.


async def test_its_stdin_and_stdout_are_one_stream_that_can_be_half_closed() -> None:
    async with running("while data := os.read(0, 9): os.write(1, data[::-1])\nsay('bye')") as child:
        await child.stream.wait_send_all_might_not_block()
        await child.stream.send_all(b"abc")
        assert await heard(child, 3) == b"cba"
        assert child.exit is None
        await child.stream.send_eof()
        assert await heard(child) == b"bye\n"
        assert exit_of(child).status == 0
        assert await child.stream.receive_some() == b""  # and it stays so
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
        assert await heard(child) == b"last\n"
        assert exit_of(child).status == 0


async def test_a_child_that_closes_its_stdout_and_lives_on_is_an_end_too() -> None:
    async with running("say('last'); os.close(1); read()") as child:
        assert await heard(child) == b"last\n"
        assert child.exit is None
        await child.stream.send_all(b"it still listens")
    assert exit_of(child).status == 0


async def test_what_was_written_before_a_death_is_read_though_a_grandchild_holds_stdout_open() -> None:
    program = GRANDCHILD.format("") + "os.write(1, b'x' * 50_000); say('last'); os.kill(os.getpid(), 9)"
    async with running(program) as child:
        await trio.testing.wait_all_tasks_blocked()
        assert await heard(child) == b"x" * 50_000 + b"last\n"
        assert exit_of(child).signal is signal.SIGKILL


async def test_who_waits_to_read_or_write_is_woken_by_a_death_though_a_grandchild_holds_both_pipes() -> None:
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
        GRANDCHILD.format("deaf()") + "say('here'); stay()", until=b"here", shutdown_timeout=SHORT
    ) as child:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(child.pid, signal.SIGKILL)
        assert sorted(outcomes) == ["reader", "writer"]


async def test_what_was_written_before_a_death_can_be_read_later_though_somebody_holds_stdout_open() -> None:
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
        while child.exit is None:  # noqa: ASYNC110  # nobody tells who does not read
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        data, _, left = (await heard(child)).partition(b"<")
        assert data == b"x" * 50_000
        os.kill(int(left), signal.SIGKILL)


async def test_what_is_kept_of_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(fd: int, size: int) -> bytes:
        return bytes(65_536) if size == 2**20 else read(fd, size)

    read = os.read
    async with running(GRANDCHILD.format("") + STAYS, until=b"ready") as child:
        with monkeypatch.context() as patch:
            patch.setattr("trio_mcp.transport.child.os.read", endless)
            os.kill(child.pid, signal.SIGKILL)
            assert len(await heard(child)) == 2**20


async def test_a_stream_ends_though_somebody_who_has_left_the_group_holds_it_and_goes_on_writing() -> None:
    program = """
if not (left := os.fork()):
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    while True:
        os.write(1, b"-" * 9999)
say(f"<{left}>")
"""
    async with running(program) as child:
        assert b"<" in await heard(child)
        assert exit_of(child).status == 0


async def test_only_one_task_receives_and_who_waits_is_told_when_the_stream_is_closed() -> None:
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


async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    async with running("read(); say('all of it')") as child:
        with trio.move_on_after(0):
            await child.stream.receive_some()
        with trio.move_on_after(SHORT):
            await child.stream.receive_some()
        await child.stream.send_eof()
        assert await heard(child) == b"all of it\n"


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
async def test_how_it_ended_is_told(program: str, status: int, number: signal.Signals, message: str) -> None:
    async with running(program) as child:
        assert await heard(child) == b""
        error = exit_of(child)
        assert (error.status, error.signal) == (status, number)
        assert error.stderr_tail == child.stderr_tail
        assert str(error).startswith(f"the server {PYTHON!r} {message}")
        assert isinstance(error, SessionClosed)
        assert child.exit is not error  # for each who raises it, one of their own
    assert str(child.exit) == str(error)


def test_an_error_repeats_the_last_lines_and_nothing_that_moves_a_cursor() -> None:
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
        pytest.param("deaf();" + STAYS, SHORT, None, signal.SIGKILL, id="it ignores SIGTERM"),
        pytest.param(STOPS, SHORT, None, signal.SIGKILL, id="it is stopped"),
        pytest.param(GRANDCHILD.format("") + ENDS, LONG, 0, None, id="a grandchild stays"),
        pytest.param(GRANDCHILD.format("") + STAYS, SHORT, None, signal.SIGTERM, id="both wait for SIGTERM"),
        pytest.param(GRANDCHILD.format("deaf()") + "deaf();" + STAYS, SHORT, None, signal.SIGKILL, id="both ignore it"),
    ],
)
async def test_after_it_is_closed_nobody_of_its_group_is_alive(
    program: str, shutdown_timeout: float, status: int | None, number: signal.Signals | None
) -> None:
    async with running(program, until=b"ready", shutdown_timeout=shutdown_timeout) as child:
        assert len(group_of(child.pid)) == (2 if "fork" in program else 1)
        await child.aclose()
        assert group_of(child.pid) == set()
        assert (exit_of(child).status, exit_of(child).signal) == (status, number)
        await child.aclose()  # once more is no different


@req("stdio-08", "stdio-09")
async def test_a_grandchild_that_ignores_sigterm_is_killed_once_its_time_is_over(clock: trio.testing.MockClock) -> None:
    async with running(GRANDCHILD.format("deaf()") + ENDS, until=b"ready") as child, trio.open_nursery() as nursery:
        nursery.start_soon(child.aclose)
        while child.exit is None:  # noqa: ASYNC110  # nobody tells who does not read
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        assert len(group_of(child.pid)) == 1
        clock.jump(LONG)
    assert exit_of(child).status == 0


@req("stdio-08", "stdio-09")
async def test_sigterm_comes_after_the_end_of_stdin_and_both_leave_time_to_end_in_order(
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


async def test_a_grandchild_is_given_time_after_sigterm_though_its_parent_has_gone() -> None:
    cleaning = "signal.signal(signal.SIGTERM, lambda *_: (os.close(told), os._exit(0)))"
    program = "out, into = os.pipe()\n" + GRANDCHILD.format(cleaning) + "os.close(told); say('ready'); read()"
    async with running(program, until=b"ready") as child:
        pass  # with a grace of LONG: it has ended by itself
    assert exit_of(child).status == 0


async def test_what_it_writes_after_the_end_of_its_stdin_does_not_keep_it_from_ending_in_order() -> None:
    async with running("read(); os.write(1, bytes(3_000_000)); os.write(2, b'whole'); os._exit(5)") as child:
        pass
    assert child.stderr_tail == "whole"
    assert exit_of(child).status == 5


async def test_a_child_has_a_group_and_a_session_of_its_own() -> None:
    async with running("read()") as child:
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid


async def test_many_tasks_may_close_it_at_once_and_none_of_them_is_cut_short() -> None:
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


async def test_how_it_ended_is_known_though_it_is_closed_while_its_last_words_are_being_read() -> None:
    program = """
import fcntl
fcntl.fcntl(2, 1031, 2**20)  # F_SETPIPE_SZ: so much that it takes more than one read
say("ready")
os.read(0, 1)
os.write(2, b"x" * 900_000 + b"\\nlast")
os._exit(3)
"""
    for _ in range(20):  # the orders in which the tasks may run, some of which are rare
        async with running(program, until=b"ready", shutdown_timeout=0) as child:
            await child.stream.send_all(b"x")
            # The loop is blocked meanwhile, and has yet to see anything.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert exit_of(child).status == 3
        assert child.stderr_tail == "last"


async def test_the_bodys_exception_leaves_as_the_same_object() -> None:
    error = KeyError("the body's own")
    with pytest.raises(KeyError) as raised:
        async with running("read()"):
            raise error
    assert raised.value is error


@pytest.mark.parametrize("program", ["read()", "say('ready'); deaf(); stay()"])
async def test_a_nursery_that_is_cancelled_ends_it(program: str) -> None:
    async with trio.open_nursery() as nursery:
        child = await start_child(nursery, python(program), shutdown_timeout=SHORT)
        nursery.cancel_scope.cancel()
    assert group_of(child.pid) == set()
    assert child.exit is not None


@pytest.mark.parametrize("when", ["while it starts", "while the body runs", "while it is heard"])
def test_ctrl_c_leaves_it_time_to_end_in_order(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    heard: list[bytes] = []

    async def starting(*args: Any, **options: Any) -> trio.Process:
        process = await open_process(*args, **options)
        pids.append(process.pid)
        if when == "while it starts":
            signal.raise_signal(signal.SIGINT)
        return process

    def hear(data: bytes) -> None:
        if when == "while it is heard" and not heard:
            signal.raise_signal(signal.SIGINT)
        heard.append(data)

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
    assert b"".join(heard) == b"begun, in order"
    assert not group_of(pids[0])


@pytest.mark.parametrize("program", ["read()", "stay()", "os._exit(3)"])
def test_cancelling_at_every_step_leaves_nothing(program: str) -> None:
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
        assert no_child_is_left()
        if not attempt.fired:
            break
    assert n > 15


async def test_when_our_process_is_killed_it_is_told_by_the_end_of_its_stdin() -> None:
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
    """Orphans become our children, as they do where we are process 1."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    yield
    prctl(36, 0, 0, 0, 0)


@pytest.mark.usefixtures("as_process_one")
async def test_orphans_that_are_given_to_us_are_reaped() -> None:
    async with running(GRANDCHILD.format("") + ENDS, until=b"ready") as child:
        await child.aclose()
        assert no_child_is_left()


@pytest.mark.usefixtures("as_process_one")
async def test_the_dead_whom_nobody_reaps_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def reap(pid: int, options: int) -> tuple[int, int]:
        if pid < 0:
            raise ChildProcessError
        return waitpid(pid, options)

    waitpid = os.waitpid
    async with running(GRANDCHILD.format("") + ENDS, until=b"ready") as child:
        with monkeypatch.context() as patch:
            patch.setattr("trio_mcp.transport.child.os.waitpid", reap)
            await child.aclose()  # in less than its grace, which is LONG
    assert os.waitpid(-child.pid, os.WNOHANG)[1] == signal.SIGTERM  # noqa: ASYNC222  # it is dead


async def test_a_number_that_was_given_back_is_not_used_again(
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


async def test_one_whom_we_may_not_signal_still_has_its_time(
    clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tell_and_forbid(pid: int, number: int) -> None:
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGUSR1)  # its own reason to end
        forbid(pid, number)

    monkeypatch.setattr("trio_mcp.transport.child.os.killpg", tell_and_forbid)
    program = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(7)); read(); os.write(2, b'over'); stay()"
    async with running(program, stderr=lambda said: clock.jump(LONG)) as child:
        pass
    assert exit_of(child).status == 7
    assert not caplog.records


async def test_one_that_cannot_be_ended_is_given_up_and_logged(
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


# What it writes to stderr.


@req("stdio-06", "stdio-07")
async def test_a_flood_on_stderr_that_nobody_reads_blocks_nothing_and_is_no_error() -> None:
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
    assert lines == [f"{n:09}" for n in range(1_000_000 - 819, 1_000_000)]  # as many as 8 KiB have room for


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
async def test_the_tail_begins_with_a_line_where_there_is_one(written: bytes, tail: str) -> None:
    async with running(f"os.write(2, {written!r}); read()") as child:
        pass
    assert child.stderr_tail == tail


@pytest.mark.skipif(sys.platform != "linux", reason="there nobody tells what is still in a pipe")
async def test_it_is_known_whether_anything_was_read_also_after_the_end() -> None:
    async with running("say('up'); stay()", until=b"up", shutdown_timeout=SHORT) as child:
        pass
    assert child.has_read_nothing  # nor was anything sent
    async with running("say('up'); os.read(0, 1); say('read'); stay()", until=b"up", shutdown_timeout=SHORT) as child:
        assert child.has_read_nothing
        await child.stream.send_all(b"ab")
        assert await heard(child, 5) == b"read\n"
        assert not child.has_read_nothing
    assert not child.has_read_nothing
    async with running("say('up'); stay()", until=b"up") as child:
        await child.stream.send_all(b"ab")
        os.kill(child.pid, signal.SIGKILL)
        assert await child.stream.receive_some() == b""
        assert child.has_read_nothing
    assert child.has_read_nothing


@req("stdio-06")
async def test_stderr_can_be_forwarded_as_it_comes() -> None:
    pieces: list[bytes] = []
    async with running("os.write(2, b'one'); say('1'); read(); os.write(2, b'two')", stderr=pieces.append) as child:
        assert await heard(child, 2) == b"1\n"
        await trio.testing.wait_all_tasks_blocked()
        assert pieces == [b"one"]
    assert pieces == [b"one", b"two"]


async def test_a_callback_that_fails_is_logged_and_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(piece: bytes) -> None:
        calls.append(piece)
        raise ValueError("of the callback")

    async with running("os.write(2, b'one'); say('1'); read(); os.write(2, b'two')", stderr=fail) as child:
        assert await heard(child, 2) == b"1\n"
        await trio.testing.wait_all_tasks_blocked()
    assert calls == [b"one"]
    assert child.stderr_tail == "onetwo"
    assert [(record.name, record.levelno) for record in caplog.records] == [("trio_mcp", logging.ERROR)]


WORDS = b"\x1b[1mone\xff\n"


class Text(io.StringIO):
    """What a notebook or a test puts in the place of stderr: it takes text alone."""

    def said(self) -> bytes:
        return self.getvalue().encode()


class Bytes(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def said(self) -> bytes:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue()


@req("stdio-06")
@pytest.mark.parametrize(("ours", "said"), [(Bytes, WORDS + b"two"), (Text, "\x1b[1mone\ufffd\ntwo".encode())])
async def test_stderr_is_passed_on_to_ours_as_it_comes(
    ours: Callable[[], Any], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = ours()
    monkeypatch.setattr(sys, "stderr", stderr)
    async with running(f"os.write(2, {WORDS!r}); say('1'); read(); os.write(2, b'two')") as child:
        assert await heard(child, 2) == b"1\n"
        await trio.testing.wait_all_tasks_blocked()
        assert stderr.said() == said.removesuffix(b"two")
    assert stderr.said() == said
    assert child.stderr_tail == WORDS.decode(errors="replace") + "two"


async def test_stderr_can_be_kept_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Text()
    monkeypatch.setattr(sys, "stderr", stderr)
    async with running("os.write(2, b'one'); read()", stderr=None) as child:
        pass
    assert (stderr.said(), child.stderr_tail) == (b"", "one")


def closed() -> Text:
    stream = Text()
    stream.close()
    return stream


@pytest.mark.parametrize("ours", [lambda: None, closed, object])
async def test_a_stderr_of_ours_that_takes_nothing_is_no_error(
    ours: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", ours())
    async with running("os.write(2, b'one'); read(); os.write(2, b'two')") as child:
        pass
    assert child.stderr_tail == "onetwo"
    assert not caplog.records


FLOODS = """
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


async def test_a_stderr_of_ours_that_nobody_reads_holds_up_neither_the_loop_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_pipe_as_stderr(monkeypatch) as reading:
        async with running(FLOODS) as child:
            assert await heard(child) == b""
            assert exit_of(child).status == 3
        assert len(child.stderr_tail) == 8192
        assert 0 < len(os.read(reading, 2**20)) < 300_000
        fill(sys.stderr.fileno())
        async with running("os.write(2, b'last'); os._exit(3)") as child:
            assert await heard(child) == b""
            assert exit_of(child).stderr_tail == "last"  # known in time, though it could not be passed on


async def test_a_stderr_of_ours_that_is_full_is_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_pipe_as_stderr(monkeypatch) as reading:
        fill(sys.stderr.fileno())
        async with running("os.write(2, b'one'); say('1'); read()") as child:
            assert await heard(child, 2) == b"1\n"
            await trio.testing.wait_all_tasks_blocked()
            assert os.read(reading, 2**20).strip(b".") == b""
        assert os.read(reading, 2**20) == b"one"


async def test_a_stderr_of_ours_that_is_read_gets_all_of_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 0

    async def read() -> None:
        nonlocal size
        while size < 300_000:
            await trio.lowlevel.wait_readable(reading)
            size += len(os.read(reading, 2**20))

    with a_pipe_as_stderr(monkeypatch) as reading:
        async with running(FLOODS) as child, trio.open_nursery() as nursery:
            nursery.start_soon(read)
            assert await heard(child) == b""
    assert size == 300_000


async def test_the_words_of_a_grandchild_after_a_death_are_not_waited_for() -> None:
    async with running(
        GRANDCHILD.format("deaf()") + "os.write(2, b'last'); os._exit(3)", shutdown_timeout=SHORT
    ) as child:
        assert await heard(child) == b""
        assert exit_of(child).stderr_tail == "last"


# What it is started with.

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
async def test_its_environment_is_a_policy_with_overrides(
    environment: Any, env: Any, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in {"OURS": "1", "HOME": "/h", "PATH": "/bin", "LC_TIME": "C"}.items():
            patch.setenv(name, value)
        async with running(ENVIRONMENT, environment=environment, env=env) as child:
            lines = (await heard(child)).decode().splitlines()
    # LC_CTYPE is set by Python itself, where there is no locale.
    assert dict(line.split("=", 1) for line in lines if not line.startswith("LC_CTYPE=")) == found


def test_the_minimal_environment_is_what_programs_need_to_be_found() -> None:
    assert MINIMAL == ("HOME", "LANG", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")


@pytest.mark.parametrize("form", [str, Path, lambda path: [path], lambda path: (Path(path),)])
async def test_a_command_alone_is_a_program_even_with_a_space_in_its_name(
    form: Callable[[str], Any], tmp_path: Path
) -> None:
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
            assert await heard(child) == os.fsencode(cwd) + b"\n"
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
def test_a_command_has_a_name_that_tells_no_secret(command: list[str], name: str) -> None:
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
async def test_a_command_that_cannot_be_started_says_why_and_no_secret(
    command: Any, options: Any, message: str
) -> None:
    async with open_nursery() as nursery:
        with pytest.raises((UsageError, ConnectionFailed)) as raised:
            await start_child(nursery, command, **options)
        assert not nursery.child_tasks
    # What the system says is nobody's mistake in the use of this package.
    assert isinstance(raised.value, ConnectionFailed) is isinstance(raised.value.__cause__, OSError)
    assert str(raised.value) == message
    assert SECRET not in f"{raised.value!r} {raised.value.__cause__!r}"


async def test_its_tasks_and_its_end_have_the_name_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "weather.py"
    script.write_text("import sys; sys.exit(len(sys.argv))")
    async with open_nursery() as nursery:
        child = await start_child(nursery, [sys.executable, script, SECRET])
        assert [task.name for task in nursery.child_tasks] == [f"the server {PYTHON!r}"]
        assert await heard(child) == b""
    assert str(child.exit) == f"the server {PYTHON!r} ended with status 2, and wrote nothing to stderr"


async def test_a_script_whose_interpreter_is_missing_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    async with open_nursery() as nursery:
        with pytest.raises(ConnectionFailed, match="was found, but not the interpreter") as raised:
            await start_child(nursery, script)
        assert isinstance(raised.value.__cause__, FileNotFoundError)
        with pytest.raises(ConnectionFailed, match=r"was found in .*, but not the interpreter"):
            await start_child(nursery, "script", env={"PATH": str(tmp_path)})
