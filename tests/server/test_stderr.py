"""Standard error that does not wait for its reader, on fds of this process.  `hardening` tests servers that use it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trio_mcp.transport import Stderr, unhindered_stderr
from trio_mcp.transport import stdio as module

Ends = tuple[int, int]


def pipe() -> Ends:
    read, write = os.pipe()
    if sys.platform == "linux":
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    return read, write


def sockets() -> Ends:
    read, write = socket.socketpair()
    return read.detach(), write.detach()


@pytest.fixture(params=["pipe", "pipe that cannot be opened again", "socket"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    if request.param == "pipe that cannot be opened again":

        def refuse(*_: object) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "open", refuse)
    before = sorted(os.listdir("/dev/fd"))
    read, write = sockets() if request.param == "socket" else pipe()
    yield read, write
    for fd in (read, write):
        os.close(fd)
    assert sorted(os.listdir("/dev/fd")) == before


def full(fd: int) -> bool:
    return not select.select([], [fd], [], 0)[1]


def read_until(read: int, text: bytes) -> bytes:
    said = b""
    while text not in said:
        said += os.read(read, 65536)
    return said


def test_lines_are_written_while_there_is_room(ends: Ends) -> None:
    read, write = ends
    stderr = Stderr(write)
    stderr.put(b"one\n")
    stderr.put(b"two\n")
    assert read_until(read, b"two\n") == b"one\ntwo\n"
    assert os.get_blocking(write)  # other processes share the file description
    stderr.close(0)
    stderr.put(b"three\n")
    assert not select.select([read], [], [], 0)[0]


@pytest.mark.parametrize("lost", [0, 1, 500])
def test_lines_wait_for_room_and_dropped_lines_are_counted(
    ends: Ends, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = ends
    stderr, line, lines = Stderr(write), b"x" * 99 + b"\n", 0
    while not stderr._queue:
        stderr.put(line)
        lines += 1
    assert full(write)
    monkeypatch.setattr(module, "_MAX_QUEUED", stderr._queued + 3000)
    for _ in range(30 + lost):
        stderr.put(line)
    report = f"trio_mcp: {lost} lines were dropped here because standard error was not read\n".replace(
        "1 lines were", "1 line was"
    )
    ended = report if lost else ""
    said = os.read(read, 65536)
    while len(said) < (lines + 30) * len(line) + len(ended):
        said += os.read(read, 65536)
    assert said.decode() == line.decode() * (lines + 30) + ended
    stderr.close(10)
    assert stderr._writer is None


def test_a_long_line_is_written_whole(ends: Ends) -> None:
    read, write = ends
    stderr, line = Stderr(write), b"x" * 1_000_000 + b"\n"
    stderr.put(line)
    assert read_until(read, b"\n") == line
    stderr.close(10)


def test_lines_after_the_report_of_dropped_lines_follow_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = ends
    stderr = Stderr(write)
    while not stderr._queue:
        stderr.put(b"x" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MAX_QUEUED", stderr._queued)
        stderr.put(b"lost")  # half a line counts as one
    stderr.put(b"found\n")
    said = read_until(read, b"found\n")
    assert said.endswith(b"trio_mcp: 1 line was dropped here because standard error was not read\nfound\n")
    stderr.close(10)


def test_lines_are_dropped_after_the_reader_has_closed() -> None:
    read, write = pipe()
    stderr = Stderr(write)
    while not stderr._queue:
        stderr.put(b"x" * 100)
    os.close(read)
    stderr.put(b"to nobody")
    stderr.close(10)
    assert stderr._writer is None
    os.close(write)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Callable[[int], io.TextIOWrapper]]:
    made: list[io.TextIOWrapper] = []

    def make(fd: int) -> io.TextIOWrapper:
        made.append(open(fd, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        return made[-1]

    yield make
    for file in made:
        with contextlib.suppress(ValueError):  # detached
            file.close()


def test_a_redirected_file_is_the_same_object_and_writes_whole_lines(
    ends: Ends, files: Callable[[int], io.TextIOWrapper]
) -> None:
    read, write = ends
    stderr, file = Stderr(write), files(write)
    with stderr.redirecting(write, file, file, None):
        file.write("half, ")
        assert not select.select([read], [], [], 0)[0]
        print("ünd whole", file=file)
        assert os.read(read, 100).decode() == "half, ünd whole\n"
        file.buffer.write(b"bytes")
        assert os.read(read, 100) == b"bytes"
        assert (file.fileno(), file.isatty(), file.encoding) == (write, False, "utf-8")
        file.write("left")
    assert os.read(read, 100) == b"left"
    file.write("without a buffer")
    assert os.read(read, 100) == b"without a buffer"
    stderr.close(0)


def test_a_file_with_another_descriptor_is_not_redirected(
    ends: Ends, files: Callable[[int], io.TextIOWrapper], tmp_path: Path
) -> None:
    _, write = ends
    stderr, away = Stderr(write), files(write)
    away.detach()
    with open(tmp_path / "log", "w") as log, stderr.redirecting(write, log, away, io.StringIO()):
        log.write("into the file")
    assert (tmp_path / "log").read_text() == "into the file"
    stderr.close(0)


def test_a_file_that_was_closed_meanwhile_stays_closed(ends: Ends, files: Callable[[int], io.TextIOWrapper]) -> None:
    _, write = ends
    stderr, file = Stderr(write), files(write)
    with stderr.redirecting(write, file):
        file.close()
    assert file.closed
    stderr.close(0)


@pytest.mark.parametrize("state", ["a file", "closed", "none"])
def test_a_standard_error_that_never_blocks_is_not_changed(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = os.dup(2)
    try:
        with open(tmp_path / "said", "w") as said:
            os.dup2(said.fileno(), 2)
            if state == "closed":
                os.close(2)
            elif state == "none":
                monkeypatch.setattr(sys, "__stderr__", None)
            with unhindered_stderr() as stderr:
                assert stderr is None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
