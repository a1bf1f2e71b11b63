"""The official conformance suite: its command, and its scenarios for servers and clients of each revision.

All scenarios in its requirement sets must pass, also those that it does not score, except those in `NOT_REQUIRED`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import attrs

from tests.peers.installed import Unavailable, node, npm

__all__ = ["LOOPBACK", "NOT_REQUIRED", "Scenario", "Suite", "exemption", "suite"]

VERSION = "0.2.0-alpha.12"
PACKAGE = "@modelcontextprotocol/conformance"
REVISIONS = ("2025-11-25", "2026-07-28")
LOOPBACK = Path(__file__).with_name("loopback.mjs")

# Scenarios that need not pass: how their names begin, and the reason.  The first match counts.
NOT_REQUIRED = {
    "tasks-status-notifications": "the suite itself skips it",
}

Side: TypeAlias = Literal["server", "client"]

# Scenarios of an extension, which are not in the requirement sets.
SKILLS: Mapping[Side, Sequence[str]] = {
    "server": ("sep-2640-skills-enumeration", "sep-2640-skills-manifest", "sep-2640-skills-directory"),
    "client": (
        "sep-2640-client-no-prefetch", "sep-2640-client-verify-digest", "sep-2640-client-verify-size",
        "sep-2640-client-verify-frontmatter",
    ),
}  # fmt: skip


@attrs.frozen
class Scenario:
    """A scenario for one side, in one revision."""

    side: Side
    revision: str
    name: str
    group: str
    """`required`, or the reason why the suite does not score it (`pending`, `added-after-release`, `extension`), or
    `alone` if it is not in the requirement sets."""

    def __str__(self) -> str:
        return f"{self.side}-{self.revision}-{self.name}"


def exemption(scenario: Scenario) -> str | None:
    """The reason why this scenario need not pass, if there is one."""
    return next((reason for start, reason in NOT_REQUIRED.items() if scenario.name.startswith(start)), None)


@attrs.frozen
class Suite:
    """The installed suite."""

    folder: Path
    scenarios: Sequence[Scenario]

    def command(self, side: Side | Literal["authorization"], *options: str) -> list[str]:
        entry = self.folder / "node_modules" / PACKAGE / "dist" / "index.js"
        return [node(), "--import", LOOPBACK.as_uri(), str(entry), side, *options]


@cache
def _look_up() -> Suite | Unavailable:
    """The suite, or the reason why it cannot be installed.  Cached, so that it is tried only once."""
    try:
        folder = npm(f"conformance-{VERSION}", [f"{PACKAGE}@{VERSION}"])
        return Suite(folder, _required(folder))
    except Unavailable as reason:
        return reason


def suite() -> Suite:
    """The suite, which is installed first if necessary.  Raises `Unavailable`."""
    found = _look_up()
    if isinstance(found, Unavailable):
        raise found
    return found


# The requirement sets are YAML.  The suite has a parser for it.
READ = """
import { readFileSync } from "node:fs";
import { parse } from "yaml";
console.log(JSON.stringify(process.argv.slice(1).map((path) => parse(readFileSync(path, "utf8")))));
"""


def _required(folder: Path) -> list[Scenario]:
    sets = folder / "node_modules" / PACKAGE / "requirements"
    command = [node(), "--input-type=module", "-e", READ, *(str(sets / f"{revision}.yaml") for revision in REVISIONS)]
    # A program in an argument finds its packages from the working directory.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    sides: tuple[Side, ...] = ("server", "client")
    found = []
    for revision, read in zip(REVISIONS, json.loads(done.stdout), strict=True):
        found += [Scenario(side, revision, name, "required") for side in sides for name in read[side]]
        found += [Scenario(each["leg"], revision, each["scenario"], each["reason"]) for each in read["not_scored"]]
    return found + [Scenario(side, REVISIONS[-1], name, "alone") for side in sides for name in SKILLS[side]]
