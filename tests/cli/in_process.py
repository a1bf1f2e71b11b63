"""Run commands in the process of the tests, because a process for each command takes twice as long.

`tests/cli/test_cli.py` starts some commands in processes of their own, on a terminal and with pipes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

from trio_mcp.cli.main import main  # the command line has no public API

__all__ = ["ROOT", "run"]

ROOT = Path(__file__).parents[2]


def run(*arguments: str, input: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command with pipes or files as its standard streams, which its server inherits."""
    environ = {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with mock.patch.dict(os.environ, environ), contextlib.chdir(cwd), _logging(), _streams(_pipe(input), out, err):
            try:
                status: Any = main(arguments)
            except SystemExit as ended:  # of argparse
                status = ended.code
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Restore the logging of this process after the block, because a command configures it."""
    root, relay = logging.getLogger(), logging.getLogger("trio_mcp.relay")
    handlers, levels = root.handlers[:], {each: each.level for each in (root, relay)}
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for each, level in levels.items():
            each.setLevel(level)


def _pipe(text: str) -> IO[str]:
    read, write = os.pipe()
    with open(write, "w") as file:
        file.write(text)
    return open(read)


@contextlib.contextmanager
def _streams(stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> Iterator[None]:
    """Use these files as the standard streams of this process during the block, then close `stdin`."""
    kept = [os.dup(fd) for fd in range(3)]
    for fd, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file.fileno(), fd)
    try:
        with stdin, mock.patch.multiple("sys", stdin=stdin, stdout=stdout, stderr=stderr):
            yield
            stdout.flush()
            stderr.flush()
    finally:
        for fd, copy in enumerate(kept):
            os.dup2(copy, fd)
            os.close(copy)
