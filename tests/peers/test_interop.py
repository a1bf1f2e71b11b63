"""Tests of `interop` and of `record_exit`: the rules for gaps, the file of results, and the recorded exit status."""

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
from tests.peers.interop import NOT_TRIED, Gap, ResultTable, differences, merged, write_file

TABLE = {"call": True, "read": "text"}
NOT_POSSIBLE = Gap(NOT_TRIED, "it has no way to do so")


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
        ({"call": True}, {"read": NOT_POSSIBLE}, {}),
        (TABLE, {"read": NOT_POSSIBLE}, {"read": "'text', not 'nothing'"}),
        (TABLE, {"ping": NOT_POSSIBLE}, {"ping": "this gap has gone: it has no way to do so (the client's)"}),
    ],
)
def test_differences_from_the_table_and_the_gaps_are_found(
    seen: dict[str, Any], gaps: dict[str, Gap], wrong: dict[str, str]
) -> None:
    assert differences(seen, TABLE, gaps) == wrong


A, B, C = ("a-1.0", "stdio"), ("b-1.0", "stdio"), ("b-1.0", "session")


def new_table(title: str = "Ours") -> ResultTable:
    table = ResultTable(title)
    table.declare([A, B, C], ["call", "read"], {"z-1.0": "it does not install"})
    return table


def test_the_file_has_a_row_per_visit_and_a_footnote_per_gap(tmp_path: Path) -> None:
    ours = new_table()
    assert ours.record(C, {"call": True}, TABLE, {"read": NOT_POSSIBLE}, absent={"call"}) == {}
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


def test_rows_of_other_visits_stay_and_rows_of_removed_pairs_go(tmp_path: Path) -> None:
    file = tmp_path / "file"
    first, theirs = new_table(), new_table("Theirs")
    for pair in (A, B, C):
        first.record(pair, {"call": True}, TABLE, {"read": NOT_POSSIBLE})
        theirs.record(pair, TABLE, TABLE, {})
    write_file([first, theirs], file)
    once = file.read_text()
    second = new_table()
    second.pairs = [B, C]
    second.record(B, {**TABLE, "call": "late"}, TABLE, {"call": Gap("late", "it is slow")})
    write_file([second, new_table("Theirs")], file)
    ours, _, others = file.read_text().partition("## Theirs")
    assert ours.partition("## Ours\n\n")[2].splitlines()[2:6] == [
        "| b-1.0, stdio | [1] | yes |",
        "| b-1.0, streamable HTTP | yes | [2] |",
        "",
        "1. it is slow (the client's)",
    ]
    assert others == once.partition("## Theirs")[2]


def test_equal_visits_write_equal_text_and_no_visit_writes_no_file(tmp_path: Path) -> None:
    ours = new_table()
    for pair in (A, B):
        ours.record(pair, {"call": True}, TABLE, {"read": NOT_POSSIBLE})
    once = merged("", [ours])
    assert merged(once, [ours]) == once
    write_file([new_table()], tmp_path / "file")
    assert not (tmp_path / "file").exists()


def recorded_exit(
    file: Path, script: str, action: Callable[[subprocess.Popen[str]], None] = lambda process: None
) -> str:
    command = [sys.executable, str(PROGRAMS / "record_exit.py"), str(file), "/bin/sh", "-c", f"echo here; {script}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        action(process)
        process.communicate()
    return file.read_text()


def test_record_exit_records_the_exit_status_of_a_stdio_server(tmp_path: Path) -> None:
    assert recorded_exit(tmp_path / "by itself", "cat; exit 3") == "3"
    assert recorded_exit(tmp_path / "told to", "exec sleep 60", subprocess.Popen.terminate) == "SIGTERM"
    assert recorded_exit(tmp_path / "killed", "kill -TERM $$") == str(-signal.SIGTERM)


SIGTERM_HANDLER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("status", "found"), [(0, "SIGTERM"), (143, "SIGTERM"), (1, "1")])
def test_record_exit_records_whether_a_server_obeyed_sigterm(tmp_path: Path, status: int, found: str) -> None:
    def tell(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        process.wait()  # before its input ends

    script = shlex.join(["exec", sys.executable, "-c", SIGTERM_HANDLER.format(status=status)])
    assert recorded_exit(tmp_path / "ended", script, tell) == found


def test_record_exit_forwards_sigterm_received_while_it_starts_the_server(tmp_path: Path) -> None:
    assert recorded_exit(tmp_path / "ended", "kill -TERM $PPID; exec sleep 60") == "SIGTERM"
