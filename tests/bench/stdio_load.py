"""The load on stdio servers: pipes that are written and read as fast as both ends can."""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from tests.bench.messages import INITIALIZE, Template, call, encoded
from tests.bench.subjects import Usage, running

__all__ = ["Pipes", "Spent", "started_server"]

CHUNK = 1 << 18
PATIENCE = 60.0


@attrs.frozen
class Spent:
    """The cost of several calls: seconds of CPU of the server, seconds by the clock, and how busy this process was,
    from 0 to 1."""

    cpu: float
    wall: float
    busy: float


class Stopwatch:
    """Measures the time of a block."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage

    def __enter__(self) -> Stopwatch:
        self._wall, self._own, self._theirs = time.perf_counter(), time.process_time(), self._usage.cpu()
        return self

    def __exit__(self, *_: object) -> None:
        theirs = self._usage.cpu() - self._theirs
        wall = time.perf_counter() - self._wall
        self.spent = Spent(theirs, wall, (time.process_time() - self._own) / wall)


class Pipes:
    """The pipes of a server."""

    def __init__(self, usage: Usage, era: str) -> None:
        process = usage.process
        assert process.stdin is not None
        assert process.stdout is not None
        self.usage = usage
        self._to, self._of = process.stdin.fileno(), process.stdout.fileno()
        for fd in (self._to, self._of):
            os.set_blocking(fd, False)
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._poll = select.epoll()
        self._poll.register(self._of, select.EPOLLIN)
        self._unsent = memoryview(b"")
        if era == "session":
            (hello,) = self.ask([encoded({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})])
            assert "result" in hello, hello
            self._write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')

    def close(self) -> None:
        self._poll.close()

    def _write(self, data: bytes) -> None:
        """Write as much as the pipe accepts; the rest is written later."""
        waited = bool(self._unsent)
        data = bytes(self._unsent) + data if waited else data
        try:
            written = os.write(self._to, data)
        except BlockingIOError:
            written = 0
        self._unsent = memoryview(data)[written:]
        if self._unsent and not waited:
            self._poll.register(self._to, select.EPOLLOUT)
        elif waited and not self._unsent:
            self._poll.unregister(self._to)

    def _read(self) -> bytes:
        """Wait for bytes, and return them; writes in the meantime."""
        while True:
            ready = self._poll.poll(PATIENCE)
            assert ready, "the server is silent"
            for fd, _ in ready:
                if fd == self._to:
                    self._write(b"")
            if any(fd == self._of for fd, _ in ready):
                data = os.read(self._of, CHUNK)
                assert data, "the server has ended"
                return data

    def calls(self, lines: Sequence[bytes], in_flight: int) -> tuple[Spent, bytes]:
        """Send all these lines, with so many unanswered at a time.  Returns the cost and the bytes that came back."""
        output, answered, sent = [], 0, in_flight
        with Stopwatch(self.usage) as watch:
            self._write(b"".join(lines[:in_flight]))
            while answered < len(lines):
                data = self._read()
                output.append(data)
                ended = data.count(b"\n")
                answered += ended
                if ended and sent < len(lines):
                    self._write(b"".join(lines[sent : sent + ended]))
                    sent += ended
        return watch.spent, b"".join(output)

    def reported(self, line: bytes) -> tuple[Spent, bytes]:
        """Send this line, and read all bytes up to its answer."""
        output = [b""]
        with Stopwatch(self.usage) as watch:
            self._write(line)
            while b'"result"' not in output[-1] or not output[-1].endswith(b"\n"):
                output.append(self._read())
        return watch.spent, b"".join(output)

    def latencies(self, lines: Sequence[bytes]) -> tuple[Spent, list[float]]:
        """Send these lines one after the other.  Returns the seconds of each."""
        seconds = []
        with Stopwatch(self.usage) as watch:
            for line in lines:
                begun = time.perf_counter()
                os.write(self._to, line)
                while not self._read().endswith(b"\n"):
                    pass
                seconds.append(time.perf_counter() - begun)
        return watch.spent, seconds

    def say(self, line: bytes) -> None:
        """Send this line without waiting for an answer."""
        self._write(line)
        while self._unsent:
            for fd, _ in self._poll.poll(PATIENCE):
                assert fd == self._to, "an answer came too early"
                self._write(b"")

    def ask(self, messages: Sequence[bytes]) -> list[Any]:
        """The answers to these messages."""
        _, output = self.calls([each + b"\n" for each in messages], len(messages))
        return [json.loads(line) for line in output.splitlines()]


@contextmanager
def started_server(command: list[str], era: str) -> Iterator[Pipes]:
    """Start the server of this command; yields its pipes after a first answer."""
    with running(command) as process:
        pipes = Pipes(Usage(process), era)
        (answer,) = pipes.ask([Template(encoded(call(era))).take()])
        assert "result" in answer, answer
        yield pipes
        pipes.close()
