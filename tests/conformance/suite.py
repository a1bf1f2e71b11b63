"""The official conformance suite: what runs it, and which scenarios it has for servers and clients of a revision.

All that are in its requirement sets are demanded, those too that it does not score, but for what `NOT_DEMANDED` names.
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

__all__ = ["LOOPBACK", "NOT_DEMANDED", "Scenario", "Suite", "suite", "why_not"]

VERSION = "0.2.0-alpha.12"
PACKAGE = "@modelcontextprotocol/conformance"
REVISIONS = ("2025-11-25", "2026-07-28")
LOOPBACK = Path(__file__).with_name("loopback.mjs")

# How the names of scenarios begin that need not pass, and why.  The first that fits counts.
NOT_DEMANDED = {
    "tasks-status-notifications": "the suite itself skips it",
}

Side: TypeAlias = Literal["server", "client"]

# Scenarios of an extension, which are in no set of requirements.
SKILLS: Mapping[Side, Sequence[str]] = {
    "server": ("sep-2640-skills-enumeration", "sep-2640-skills-manifest", "sep-2640-skills-directory"),
    "client": (
        "sep-2640-client-no-prefetch", "sep-2640-client-verify-digest", "sep-2640-client-verify-size",
        "sep-2640-client-verify-frontmatter",
    ),
}  # fmt: skip


@attrs.frozen
class Scenario:
    """A scenario of one side's requirements in one revision."""

    side: Side
    revision: str
    name: str
    group: str
    """Whether it is required, or why the suite does not score it: pending, added-after-release, extension; or alone, if
    no set of requirements has it."""

    def __str__(self) -> str:
        return f"{self.side}-{self.revision}-{self.name}"


def why_not(scenario: Scenario) -> str | None:
    """Why this one is not demanded."""
    return next((reason for start, reason in NOT_DEMANDED.items() if scenario.name.startswith(start)), None)


@attrs.frozen
class Suite:
    """The suite as it is installed."""

    folder: Path
    scenarios: Sequence[Scenario]

    def command(self, side: Side | Literal["authorization"], *options: str) -> list[str]:
        entry = self.folder / "node_modules" / PACKAGE / "dist" / "index.js"
        return [node(), "--import", LOOPBACK.as_uri(), str(entry), side, *options]


@cache
def _look_up() -> Suite | Unavailable:
    """What cannot be had is not asked for twice."""
    try:
        folder = npm(f"conformance-{VERSION}", [f"{PACKAGE}@{VERSION}"])
        return Suite(folder, _required(folder))
    except Unavailable as reason:
        return reason


def suite() -> Suite:
    """The suite, installed if it was not yet.  Raises `Unavailable`."""
    found = _look_up()
    if isinstance(found, Unavailable):
        raise found
    return found


# The sets are YAML, for which the suite brings a parser along.
READ = """
import { readFileSync } from "node:fs";
import { parse } from "yaml";
console.log(JSON.stringify(process.argv.slice(1).map((path) => parse(readFileSync(path, "utf8")))));
"""


def _required(folder: Path) -> list[Scenario]:
    sets = folder / "node_modules" / PACKAGE / "requirements"
    command = [node(), "--input-type=module", "-e", READ, *(str(sets / f"{revision}.yaml") for revision in REVISIONS)]
    # A program that is an argument finds its packages from where it runs.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    sides: tuple[Side, ...] = ("server", "client")
    found = []
    for revision, read in zip(REVISIONS, json.loads(done.stdout), strict=True):
        found += [Scenario(side, revision, name, "required") for side in sides for name in read[side]]
        found += [Scenario(each["leg"], revision, each["scenario"], each["reason"]) for each in read["not_scored"]]
    return found + [Scenario(side, REVISIONS[-1], name, "alone") for side in sides for name in SKILLS[side]]
