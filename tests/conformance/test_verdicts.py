"""Reading the results of the conformance suite, with results that it could have saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.conformance.runs import run_command
from tests.conformance.suite import Scenario
from tests.conformance.verdicts import faults, log_of, log_of_server, results_of, scores

AT = "2026-07-28T12-00-00-000Z"
OF_SERVER = Scenario("server", "2026-07-28", "tools-list", "required")
OF_CLIENT = Scenario("client", "2025-11-25", "auth/basic-cimd", "required")

GOOD = {"id": "tools-list", "status": "SUCCESS", "description": "Lists its tools"}
NOTE = {"id": "request", "status": "INFO", "description": "POST"}
LEFT_OUT = {"id": "order", "status": "SKIPPED", "description": "In the same order"}
WARNING = {"id": "names", "status": "WARNING", "description": "Names are short"}
FAILURE = {"id": "schema", "status": "FAILURE", "description": "Is valid", "errorMessage": "it has no type"}
UNKNOWN = {"id": "new", "status": "MAYBE", "description": "Unheard of"}


def save(scenario: Scenario, folder: Path, text: str, at: str = AT) -> Path:
    prefix = "server-" if scenario.side == "server" else ""
    saved = results_of(scenario, folder) / f"{prefix}{scenario.name}-{at}"
    saved.mkdir(parents=True)
    (saved / "checks.json").write_text(text)
    return saved


@pytest.mark.parametrize("scenario", [OF_SERVER, OF_CLIENT], ids=str)
@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([GOOD], []),
        ([NOTE, LEFT_OUT, GOOD], []),
        ([GOOD, WARNING], ["WARNING names: Names are short"]),
        ([FAILURE, GOOD], ["FAILURE schema: it has no type"]),
        ([GOOD, UNKNOWN], ["MAYBE new: Unheard of"]),
        ([NOTE, LEFT_OUT], ["no check of it succeeded"]),
        ([], ["no check of it succeeded"]),
    ],
)
def test_one_check_must_succeed_and_no_check_may_fail_or_warn(
    scenario: Scenario, checks: list[dict[str, Any]], expected: list[str], tmp_path: Path
) -> None:
    save(scenario, tmp_path, json.dumps(checks))
    assert faults(scenario, tmp_path) == expected


def test_a_failure_has_the_output_of_the_client(tmp_path: Path) -> None:
    (save(OF_CLIENT, tmp_path, json.dumps([GOOD, FAILURE])) / "stderr.txt").write_text("no tool, no joy\n")
    assert faults(OF_CLIENT, tmp_path) == ["FAILURE schema: it has no type", "the client said:", "no tool, no joy"]


def test_a_failure_has_the_output_of_the_server(tmp_path: Path) -> None:
    save(OF_SERVER, tmp_path, json.dumps([GOOD, WARNING]))
    log_of_server(tmp_path).write_text("oh\ndear\n")
    assert faults(OF_SERVER, tmp_path) == ["WARNING names: Names are short", "the server said:", "oh", "dear"]


def test_the_output_of_a_client_alone_is_no_failure(tmp_path: Path) -> None:
    (save(OF_CLIENT, tmp_path, json.dumps([GOOD])) / "stderr.txt").write_text("all is well\n")
    assert faults(OF_CLIENT, tmp_path) == []


def test_a_scenario_without_a_saved_result_has_failed(tmp_path: Path) -> None:
    save(Scenario("server", "2026-07-28", "tools-list-all", "required"), tmp_path, json.dumps([GOOD]))
    log_of(OF_SERVER, tmp_path).write_text("it fell over\n")
    assert faults(OF_SERVER, tmp_path) == [
        "the suite has saved 0 results of it, not one",
        "the suite said:",
        "it fell over",
    ]


def test_a_scenario_with_two_saved_results_has_failed(tmp_path: Path) -> None:
    save(OF_SERVER, tmp_path, json.dumps([GOOD]))
    save(OF_SERVER, tmp_path, json.dumps([GOOD]), AT.replace("12", "13"))
    assert faults(OF_SERVER, tmp_path) == ["the suite has saved 2 results of it, not one"]


def test_a_result_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    save(OF_SERVER, tmp_path, "[")
    assert "cannot be read" in faults(OF_SERVER, tmp_path)[0]


def test_scores_separate_the_scenarios_that_are_not_required() -> None:
    outcomes = {
        OF_SERVER: [],
        Scenario("server", "2026-07-28", "tools-call-image", "required"): ["no check of it succeeded"],
        Scenario("server", "2026-07-28", "caching", "pending"): [],
        Scenario("server", "2026-07-28", "tasks-status-notifications", "extension"): ["no check of it succeeded"],
        Scenario("client", "2026-07-28", "tools_call", "required"): [],
    }
    assert scores(outcomes) == [
        "server 2026-07-28: required 1/2, pending 1/1, extension (the suite itself skips it) 0/1",
        "client 2026-07-28: required 1/1",
    ]


async def test_a_run_that_hangs_is_killed_with_its_children(tmp_path: Path, mock_clock: MockClock) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log.txt"
    os.mkfifo(pipe)
    hang = ["sh", "-c", 'exec 3>"$0"; echo begun >&3; sleep 1000 & sleep 1000', str(pipe)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_command, hang, log, 60)
        async with await trio.open_file(pipe) as held:
            assert await held.readline() == "begun\n"
            mock_clock.jump(60)
            assert await held.read() == ""  # the pipe ends when no process has it open for writing
    assert log.read_text() == "\nended after 60 seconds\n"
