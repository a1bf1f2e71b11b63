"""The results that the conformance suite has saved of its scenarios, and the verdict on each.

A scenario has passed if one of its checks succeeded, and no check failed or warned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tests.conformance.suite import Scenario, exemption

__all__ = ["Outcomes", "faults", "log_of", "log_of_server", "results_of", "scores"]

TAIL = 30  # lines of a program's output in a message

Outcomes: TypeAlias = Mapping[Scenario, Sequence[str]]
"""The faults of each scenario that was run.  Empty if it passed."""


def results_of(scenario: Scenario, folder: Path) -> Path:
    """The folder in which the suite saves its results, with a folder for each scenario."""
    return folder / f"{scenario.side}-{scenario.revision}"


def log_of(scenario: Scenario, folder: Path) -> Path:
    """The output of the suite.  All scenarios of a server have one run."""
    one_run = scenario.side == "server" and scenario.group != "alone"
    name = "all" if one_run else scenario.name.replace("/", "-")
    return folder / f"{scenario.side}-{scenario.revision}-{name}.txt"


def log_of_server(folder: Path) -> Path:
    """The stderr of our server during the runs."""
    return folder / "server.txt"


def faults(scenario: Scenario, folder: Path) -> list[str]:
    """The faults of a scenario."""
    prefix = "server-" if scenario.side == "server" else ""
    # The time follows the name: 2026-07-28T12-00-00-000Z.
    found = list(results_of(scenario, folder).glob(f"{prefix}{scenario.name}-????-??-??T*Z/checks.json"))
    if len(found) == 1:
        wrong = _wrong(found[0])
    else:
        wrong = [f"the suite has saved {len(found)} results of it, not one", *_end("suite", log_of(scenario, folder))]
    if wrong and scenario.side == "server":
        wrong += _end("server", log_of_server(folder))
    elif wrong and found:
        wrong += _end("client", found[0].with_name("stderr.txt"))
    return wrong


def _wrong(saved: Path) -> list[str]:
    try:
        checks: list[dict[str, Any]] = json.loads(saved.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"the result that the suite has saved cannot be read: {error}"]
    wrong = [
        f"{check['status']} {check['id']}: {check.get('errorMessage') or check.get('description')}"
        for check in checks
        if check["status"] not in ("SUCCESS", "SKIPPED", "INFO")
    ]
    if not any(check["status"] == "SUCCESS" for check in checks):
        wrong.append("no check of it succeeded")
    return wrong


def _end(program: str, file: Path) -> list[str]:
    """The last lines of a program's output, if it has any."""
    said = file.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:] if file.exists() else []
    return [f"the {program} said:", *said] if said else []


def scores(outcomes: Outcomes) -> list[str]:
    """A line for each side and revision: the number of scenarios that passed, and of those that were run."""
    lines: dict[str, dict[str, list[bool]]] = {}
    for each, wrong in outcomes.items():
        reason = exemption(each)
        group = f"{each.group} ({reason})" if reason else each.group
        lines.setdefault(f"{each.side} {each.revision}", {}).setdefault(group, []).append(not wrong)
    return [
        f"{name}: " + ", ".join(f"{group} {sum(passed)}/{len(passed)}" for group, passed in groups.items())
        for name, groups in lines.items()
    ]
