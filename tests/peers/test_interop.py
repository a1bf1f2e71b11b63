"""The frame of the visits by itself: what counts as a gap, and how the file keeps what was not looked at this time."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.peers.installed import PROGRAMS
from tests.peers.interop import NOTHING, Gap, Side, merged, shortcomings, write_file

TABLE = {"call": True, "read": "text"}
SILENT = Gap(NOTHING, "it has no way to do so")


@pytest.mark.parametrize(
    ("seen", "gaps", "wrong"),
    [
        (TABLE, {}, {}),
        ({**TABLE, "read": "else"}, {}, {"read": "'else', not 'text'"}),
        ({"call": True}, {}, {"read": "'nothing', not 'text'"}),
        ({**TABLE, "more": 1}, {}, {"more": "1, not 'nothing'"}),
        ({**TABLE, "read": "else"}, {"read": Gap("else", "why")}, {}),
        (TABLE, {"read": Gap("else", "why")}, {"read": "'text', not 'else'"}),
        (TABLE, {"read": Gap("text", "why")}, {"read": "this gap has gone: why (the client's)"}),
        ({"call": True}, {"read": SILENT}, {}),
        (TABLE, {"read": SILENT}, {"read": "'text', not 'nothing'"}),
        (TABLE, {"ping": SILENT}, {"ping": "this gap has gone: it has no way to do so (the client's)"}),
    ],
)
def test_what_is_seen_is_what_table_and_gaps_say(
    seen: dict[str, Any], gaps: dict[str, Gap], wrong: dict[str, str]
) -> None:
    assert shortcomings(seen, TABLE, gaps) == wrong


A, B, C = ("a-1.0", "stdio"), ("b-1.0", "stdio"), ("b-1.0", "session")


def side(title: str = "Ours") -> Side:
    made = Side(title)
    made.holds([A, B, C], ["call", "read"], {"z-1.0": "it does not install"})
    return made


def test_a_row_for_each_visit_with_a_footnote_for_each_gap(tmp_path: Path) -> None:
    ours = side()
    assert ours.record(C, {"call": True}, TABLE, {"read": SILENT}, absent={"call"}) == {}
    broken = {"read": Gap(1, "it is broken", "ours")}
    assert ours.record(A, {"call": 1, "read": 1}, {**TABLE, "call": 2}, broken) == {"call": "1, not 2"}
    write_file([ours], tmp_path / "file")
    table = (tmp_path / "file").read_text().partition("## Ours\n\n")[2]
    assert table.splitlines() == [
        "|  | call | read |",
        "| --- | --- | --- |",
        "| a-1.0, stdio | **no** | [1] |",
        "| b-1.0, streamable HTTP | – | [2] |",
        "",
        "1. it is broken (ours)",
        "2. it has no way to do so (the client's)",
        "",
        "- Not visited: z-1.0: it does not install",
    ]


def test_rows_of_other_visits_are_kept_and_those_of_pairs_that_are_gone_are_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    first, theirs = side(), side("Theirs")
    for pair in (A, B, C):
        first.record(pair, {"call": True}, TABLE, {"read": SILENT})
        theirs.record(pair, TABLE, TABLE, {})
    write_file([first, theirs], file)
    once = file.read_text()
    second = side()
    second.pairs = [B, C]
    second.record(B, {**TABLE, "call": "late"}, TABLE, {"call": Gap("late", "it is slow")})
    write_file([second, side("Theirs")], file)
    ours, _, others = file.read_text().partition("## Theirs")
    assert ours.partition("## Ours\n\n")[2].splitlines()[2:6] == [
        "| b-1.0, stdio | [1] | yes |",
        "| b-1.0, streamable HTTP | yes | [2] |",
        "",
        "1. it is slow (the client's)",
    ]
    assert others == once.partition("## Theirs")[2]


def test_the_same_visits_give_the_same_file_and_none_leave_it_alone(tmp_path: Path) -> None:
    ours = side()
    for pair in (A, B):
        ours.record(pair, {"call": True}, TABLE, {"read": SILENT})
    once = merged("", [ours])
    assert merged(once, [ours]) == once
    write_file([side()], tmp_path / "file")
    assert not (tmp_path / "file").exists()


def witnessed(file: Path, script: str, do: Callable[[subprocess.Popen[str]], None] = lambda process: None) -> str:
    command = [sys.executable, str(PROGRAMS / "witness.py"), str(file), "/bin/sh", "-c", f"echo here; {script}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        do(process)
        process.communicate()
    return file.read_text()


def test_a_witness_tells_how_a_server_on_stdio_has_ended(tmp_path: Path) -> None:
    assert witnessed(tmp_path / "by itself", "cat; exit 3") == "3"
    assert witnessed(tmp_path / "told to", "exec sleep 60", subprocess.Popen.terminate) == "SIGTERM"
    assert witnessed(tmp_path / "killed", "kill -TERM $$") == str(-signal.SIGTERM)


HEEDS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("status", "found"), [(0, "SIGTERM"), (143, "SIGTERM"), (1, "1")])
def test_a_witness_tells_whether_a_server_has_heeded_sigterm(tmp_path: Path, status: int, found: str) -> None:
    def tell(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        process.wait()  # before its input ends

    script = shlex.join(["exec", sys.executable, "-c", HEEDS.format(status=status)])
    assert witnessed(tmp_path / "ended", script, tell) == found


def test_a_witness_passes_on_what_comes_while_it_starts_the_server(tmp_path: Path) -> None:
    assert witnessed(tmp_path / "ended", "kill -TERM $PPID; exec sleep 60") == "SIGTERM"
