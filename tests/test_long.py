"""The long suite runs in parts.  Their results belong to one commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import long

PASSED, FAILED = {"ended": "passed"}, {"ended": "failed"}
Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that have run.  Part 2/6 fails."""
    parts: list[str] = []

    def run(part: str) -> dict[str, Any]:
        parts.append(part)
        return FAILED if part == "2/6" else PASSED

    monkeypatch.setattr(long, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(long, "commit", lambda: "one")
    monkeypatch.setattr(long, "run", run)
    return parts


def test_a_run_continues_after_a_failure_and_repeats_the_failed_part(ran: list[str]) -> None:
    assert long.main("") == 1
    assert ran == ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6"]
    assert long.main("") == 1
    assert ran[6:] == ["2/6"]
    assert long.main("3/6") == 0
    assert ran[7:] == ["3/6"]


def test_results_count_for_their_commit_only(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert long.main("3/6") == 0
    monkeypatch.setattr(long, "commit", lambda: "two")
    assert long.main("") == 1
    assert len(ran) == 7
    assert json.loads(long.RESULTS.read_text())["commit"] == "two"


@pytest.mark.parametrize("then", ["two", None])
def test_a_part_has_no_result_if_the_tree_changes_meanwhile(
    then: str | None, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Run = long.run

    def changing(part: str) -> dict[str, Any]:
        monkeypatch.setattr(long, "commit", lambda: then)
        return run(part)

    monkeypatch.setattr(long, "run", changing)
    assert long.main("1/6") == 0
    assert not long.RESULTS.exists()


def test_parts_that_run_at_the_same_time_keep_both_results(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run: Run = long.run

    def meanwhile(part: str) -> dict[str, Any]:
        monkeypatch.setattr(long, "run", run)
        assert long.main("3/6") == 0
        return run(part)

    monkeypatch.setattr(long, "run", meanwhile)
    assert long.main("1/6") == 0
    assert json.loads(long.RESULTS.read_text())["parts"] == {"1/6": PASSED, "3/6": PASSED}


@pytest.mark.parametrize("part", ["0/6", "7/6", "3", "3/", "a/6", "-1/6", "1/0"])
def test_a_part_that_does_not_exist_is_refused(part: str, ran: list[str]) -> None:
    with pytest.raises(SystemExit, match="K/N"):
        long.main(part)
    assert ran == []


@pytest.mark.parametrize(
    ("program", "seconds", "ended"),
    [
        ("exit 1", 60, "failed"),
        ("exit 4", 60, "failed"),
        ("exec sleep 60", 0.1, "stopped after 0.1 s"),
        ("trap '' INT; exec sleep 60", 0.1, "stopped after 0.1 s"),
    ],
)
def test_a_part_without_a_report_has_a_result(
    program: str, seconds: float, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(long, "SECONDS", seconds)
    monkeypatch.setattr(long, "GRACE", 0.1)
    result = long.run("1/6")
    assert (result["ended"], result["tests"], result["failed"]) == (ended, 0, 0)
