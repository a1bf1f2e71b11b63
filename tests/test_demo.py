"""The demo runs in a pipe, in a terminal and until Ctrl-C.  It shows the results, and leaves no process behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The screen, its width and the names of messages are private to the demo.
from trio_mcp.cli.demo.tour import WIDTH, Screen, message_names
from trio_mcp.core import REVISIONS
from trio_mcp.testing import Transcript

DEMO = [sys.executable, "-m", "trio_mcp", "demo"]
BAR = "bar │ "


@contextmanager
def no_process_left(**variables: str) -> Iterator[dict[str, str]]:
    """Yields the environment for a process.  At the end of the block, the process and its children must have ended."""
    mark = uuid.uuid4().hex  # in a variable that a client passes to its servers
    environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    yield {**environ, "PYTHONIOENCODING": "utf-8", "LC_DEMO_OF_TEST": mark, **variables}
    left = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                left.append(path)
        except OSError:  # the process has ended, or belongs to another user
            continue
    assert left == []


@pytest.fixture(scope="module")
def piped() -> str:
    with no_process_left(TERM="xterm") as environ:
        shown = subprocess.run(DEMO, env=environ, capture_output=True, timeout=100)
    assert (shown.returncode, shown.stderr) == (0, b"")
    return shown.stdout.decode()


def test_a_pipe_gets_plain_text_for_80_columns(piped: str) -> None:
    assert not set(piped) & {"\x1b", "\r", "\t"}
    assert max(map(len, piped.splitlines())) <= WIDTH


@pytest.mark.full
def test_the_demo_can_print_json(piped: str) -> None:
    with no_process_left(TERM="xterm") as environ:
        shown = subprocess.run([*DEMO, "--json"], env=environ, capture_output=True, timeout=100)
    parts = [json.loads(line) for line in shown.stdout.splitlines()]
    assert all(part.keys() == {"kind", "text"} for part in parts)
    heads = [part["text"] for part in parts if part["kind"] in ("title", "head")]
    assert all(head in piped for head in heads)
    assert {"kind": "prints", "text": "Star(name='Vega', light_years=25.0)"} in parts
    assert {part["kind"] for part in parts} > {"code of server", "code of client", "wire", "progress", "note"}


def test_the_demo_shows_the_same_in_an_old_and_the_newest_revision(piped: str) -> None:
    *_, newest, old, every, _ = piped.split("\n== ")
    for shown, revision, asked in ((newest, "2026-07-28", "← input_required"), (old, "2025-06-18", "elicitation/crea")):
        assert f"chosen │ {revision}, with observatory 1.0\n" in shown
        assert "prints │ Star(name='Vega', light_years=25.0)\n" in shown
        assert [line for line in shown.splitlines() if line.endswith("24 of 24")]
        assert "← progress ×24  ← result\n" in shown
        assert re.search(r"the server's diary: took \d+ of 500 frames\n +wire │ .*→ cancelled", shown)
        assert "prints │ 2 hours tomorrow, then.\n" in shown
        assert asked in shown
        assert "prints │ Change(RESOURCE, 'sky://tonight')\nprints │ Saturn, the Moon, a comet\n" in shown
    assert re.findall(r"^prints │ (\S+) at http.*: Sirius$", every, re.MULTILINE) == list(REVISIONS)


def test_the_code_is_shown_once(piped: str) -> None:
    assert piped.count("async def expose(") == piped.count("client.stream_tool(") == 1


@pytest.mark.full
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_demo_during_a_call(number: int, status: int) -> None:
    with no_process_left() as environ:
        # The pipe is too small for the rest of the output, so the demo cannot finish before the signal.
        process = subprocess.Popen(
            DEMO, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, pipesize=4096
        )
        assert process.stdout is not None
        shown = b""
        while BAR.encode() not in shown:
            some = process.stdout.read(1)
            assert some
            shown += some
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, b"")


@pytest.mark.full
def test_the_demo_ends_when_its_reader_closes_the_pipe() -> None:
    with no_process_left() as environ:
        process = subprocess.Popen(DEMO, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, b"")


@pytest.mark.full
def test_a_terminal_gets_colours_and_a_progress_bar_until_ctrl_c() -> None:
    in_a_terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    with no_process_left(TERM="xterm") as environ:
        process = subprocess.Popen(
            [sys.executable, "-c", in_a_terminal, *DEMO], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        shown = b""
        while shown.count(b"\r\x1b[2m   bar") < 3:
            some = os.read(process.stdout.fileno(), 4096)
            assert some
            shown += some
        rest, _ = process.communicate(b"\x03", timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in rest
    assert rest.endswith(b"\r\n")  # the prompt of the shell starts on a new line


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "colour", "redraws"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colours_and_redrawing_depend_on_the_environment(environ: dict[str, str], colour: bool, redraws: bool) -> None:
    file = Terminal()
    screen = Screen(file, environ)
    screen.bar(1, 4, None)
    screen.bar(4, 4, None)
    screen.print("done")
    assert ("\x1b" in file.getvalue()) is colour
    assert ("\r" in file.getvalue()) is redraws
    plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert plain.replace("\r", "\n").splitlines()[-3:] == [
        f"   bar │ {'━' * 7}{'─' * 23} 1 of 4",
        f"   bar │ {'━' * 30} 4 of 4",
        "prints │ done",
    ]


def test_characters_outside_the_encoding_are_replaced() -> None:
    file = io.TextIOWrapper(io.BytesIO(), "latin-1")
    screen = Screen(file, {})
    screen.say("wire", message_names(Transcript.parse('> {"method": "ping"}\n< {"result": {}}'), screen.glyphs))
    file.seek(0)
    assert file.read() == "  wire | -> ping  <- result\n"


def test_messages_are_named_by_their_kind() -> None:
    transcript = Transcript.parse(
        """
        > {"id": 1, "method": "tools/call"}
        < {"method": "notifications/progress"}
        < {"method": "notifications/progress"}
        < {"id": 1, "result": {"resultType": "input_required"}}
        < {"id": 1, "error": {"code": -32602, "message": "no"}}
        """
    )
    glyphs = {"out": ">", "in": "<", "times": "x"}
    words = message_names(transcript, glyphs).replace("\xa0", " ")
    assert words == "> tools/call  < progress x2  < input_required  < error -32602"
