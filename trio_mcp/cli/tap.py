"""``trio-mcp tap``: record the messages between a host and a server.

    trio-mcp tap -o talk.jsonl weather.py
    trio-mcp tap -o talk.jsonl -- npx -y @modelcontextprotocol/server-everything
    trio-mcp tap -o talk.jsonl --http 3001 https://mcp.example.com/mcp

With a command, three threads copy bytes: from our standard input to that of the server, and from its standard output
and error to ours.  Each piece is written as it was read, and a copy goes to the recorder, which no write waits for.
The host sees the server's own behaviour: its bytes, its exit status, the signal that has ended it, a closed input or
output.  Signals that we get are passed to the process group of the server, because launchers (npx, uv, shells) run the
server as a child.

No event loop and no part of the protocol is loaded, so the server starts nearly as fast as alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from trio_mcp.cli.arguments import above_zero
from trio_mcp.cli.http_options import http_address
from trio_mcp.cli.recording import Recorder, open_recorder, summary_of
from trio_mcp.core.errors import UsageError

__all__ = ["add_arguments", "pass_through", "passing_signals", "run"]

_READ = 65536  # bytes of one read: the usual capacity of a pipe
_LIMIT = 256  # MiB of the file
_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Seconds for a copier, after the end of the server, to find more output.  A grandchild may hold the pipe for ever.
_LAST_OUTPUT = 0.5


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    forms = (
        "trio-mcp tap -o FILE TARGET",
        "trio-mcp tap -o FILE -- COMMAND ...",
        "trio-mcp tap -o FILE --http PORT URL",
    )
    parser.usage = "\n       ".join(forms)
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the recording, written anew; or a folder for it"
    )
    parser.add_argument(
        "--limit", type=above_zero(float), default=_LIMIT, metavar="MIB", help=f"of the recording ({_LIMIT})"
    )
    parser.add_argument(
        "--json", action="store_true", help="at the end, write file, frames and bytes as JSON to standard error"
    )
    if not parser.get_default("server_command"):
        parser.add_argument(
            "--http", type=http_address, metavar="PORT", help="for a URL: a port of this machine (0: any)"
        )
        parser.add_argument("target", metavar="TARGET", help="a file or a module, as of `run`; with --http a URL")


def run(arguments: argparse.Namespace) -> int:
    most = int(min(arguments.limit * 2**20, sys.maxsize))
    command: Sequence[str] = arguments.server_command
    path = arguments.output
    if os.path.isdir(path):  # a host may start a server several times at once
        path = os.path.join(path, f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}.jsonl")
    if not command and arguments.http is None:
        if "://" in arguments.target:
            raise UsageError("a URL needs --http PORT, the port at which the host connects")
        command = [sys.executable, "-m", "trio_mcp", "run", arguments.target]
    if not command:
        from trio_mcp.cli.tap_http import serve_tap

        return serve_tap(path, most, arguments.target, arguments.http, as_json=arguments.json)
    # The program alone: arguments may be tokens.
    recorder = open_recorder(path, {"kind": "stdio", "server": os.path.basename(command[0])}, most)
    # The copiers close the streams of the host when the server closes its own, so they get private descriptors.
    host = (os.dup(0), os.dup(1), os.dup(2))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        status = pass_through(command, recorder, host)
    except OSError as error:
        recorder.close()
        sys.stderr.write(f"trio-mcp: {command[0]} cannot be started: {error.strerror}\n")
        return 3
    recorder.close()
    if arguments.json:
        sys.stderr.write(f"{summary_of(path)}\n")  # standard output is the wire
    return status if status >= 0 else _end_alike(-status)


def _end_alike(number: int) -> int:
    """End this process by the signal that has ended the server; its core dump would be about the wrong program."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def pass_through(command: Sequence[str], recorder: Recorder, host: tuple[int, int, int]) -> int:
    """Run a server between the three streams of its host, which are closed.  Returns the status as `subprocess` does.

    Raises OSError if the command cannot be started.  Must be called in the main thread, which gets the signals.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0,  # Ctrl-C at the terminal reaches it once, by us
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    with passing_signals(process):
        stdin, stdout, stderr = (os.dup(each.fileno()) for each in (process.stdin, process.stdout, process.stderr))
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        _Copier("standard input", host[0], stdin, lambda data: recorder.lines("client", data)).start()
        outputs = (
            _Copier("standard output", stdout, host[1], lambda data: recorder.lines("server", data)),
            _Copier("standard error", stderr, host[2], lambda data: recorder.lines("server", data, "stderr")),
        )
        for copier in outputs:
            copier.start()
        status = process.wait()
        for copier in outputs:
            copier.finish()
    recorder.entry("server", end=_ended(status))
    return status


@contextmanager
def passing_signals(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Within the block, the process group of the process gets the signals that we get.  Only in the main thread."""

    def pass_signal(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    before = {number: signal.signal(number, pass_signal) for number in _PASSED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


class _Copier(threading.Thread):
    """Copies bytes from one descriptor to another until one of them ends, and closes both."""

    def __init__(self, name: str, source: int, sink: int, heard: Callable[[bytes], object]) -> None:
        super().__init__(name=f"trio-mcp: {name}", daemon=True)
        self._source = source
        self._sink = sink
        self._heard = heard
        self._waiting = False  # for the source
        self._reads = 0

    def run(self) -> None:
        try:
            while data := self._read():
                self._heard(data)  # first, so that the answer is recorded after its request
                self._write(memoryview(data))
        except OSError:
            pass  # the reader or the writer has gone; closing tells the other side
        finally:
            os.close(self._source)
            os.close(self._sink)

    def finish(self) -> None:
        """Wait until the output of a server that has ended is copied.  A host that reads slowly gets all of it."""
        while self.is_alive():
            before = self._reads
            self.join(_LAST_OUTPUT)
            if self._waiting and self._reads == before:
                return

    def _read(self) -> bytes:
        self._waiting = True
        while True:
            try:
                data = os.read(self._source, _READ)
            except BlockingIOError:
                _wait(self._source, select.POLLIN)
                continue
            self._reads += 1
            self._waiting = False
            return data

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._sink, data) :]
            except BlockingIOError:  # the host has set O_NONBLOCK on a description that we share
                _wait(self._sink, select.POLLOUT)


def _wait(fd: int, event: int) -> None:
    poll = select.poll()
    poll.register(fd, event)
    poll.poll()
