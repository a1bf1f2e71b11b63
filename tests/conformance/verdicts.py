"""What the conformance suite has saved of its scenarios, and what that comes to.

A scenario has passed if one check of it succeeded, and none failed or warned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tests.conformance.suite import Scenario, why_not

__all__ = ["Outcomes", "against", "log_of", "log_of_server", "results_of", "scores"]

TAIL = 30  # lines of what a program said, in a message

Outcomes: TypeAlias = Mapping[Scenario, Sequence[str]]
"""What speaks against each scenario that was run."""


def results_of(scenario: Scenario, folder: Path) -> Path:
    """Where the suite is to save what it finds, a folder for each scenario."""
    return folder / f"{scenario.side}-{scenario.revision}"


def log_of(scenario: Scenario, folder: Path) -> Path:
    """What the suite said meanwhile; there is one run for all scenarios of a server."""
    one_run = scenario.side == "server" and scenario.group != "alone"
    name = "all" if one_run else scenario.name.replace("/", "-")
    return folder / f"{scenario.side}-{scenario.revision}-{name}.txt"


def log_of_server(folder: Path) -> Path:
    """What our server said while it was visited."""
    return folder / "server.txt"


def against(scenario: Scenario, folder: Path) -> list[str]:
    """What speaks against it."""
    prefix = "server-" if scenario.side == "server" else ""
    # After the name comes the time: 2026-07-28T12-00-00-000Z.
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
        return [f"what the suite has saved of it cannot be read: {error}"]
    wrong = [
        f"{check['status']} {check['id']}: {check.get('errorMessage') or check.get('description')}"
        for check in checks
        if check["status"] not in ("SUCCESS", "SKIPPED", "INFO")
    ]
    if not any(check["status"] == "SUCCESS" for check in checks):
        wrong.append("no check of it succeeded")
    return wrong


def _end(who: str, file: Path) -> list[str]:
    """The end of what one of the two said, if anything."""
    said = file.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:] if file.exists() else []
    return [f"the {who} said:", *said] if said else []


def scores(outcomes: Outcomes) -> list[str]:
    """A line for each side and revision: how many passed, of how many that were run."""
    lines: dict[str, dict[str, list[bool]]] = {}
    for each, wrong in outcomes.items():
        reason = why_not(each)
        group = f"{each.group} ({reason})" if reason else each.group
        lines.setdefault(f"{each.side} {each.revision}", {}).setdefault(group, []).append(not wrong)
    return [
        f"{name}: " + ", ".join(f"{group} {sum(passed)}/{len(passed)}" for group, passed in groups.items())
        for name, groups in lines.items()
    ]
