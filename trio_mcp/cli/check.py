"""``trio-mcp check``: test whether a server obeys the protocol.

The checks read all lists, and send requests that a server has to refuse.  They call no tool, except those that
`--call` names and those that say that they are read-only and need no arguments.  `check_rules` has the rules,
`check_probes` the checks through a client, and `check_stream` those of single lines on standard input and output.

| Status | Meaning |
|---|---|
| 0 | no rule with MUST is broken (with `--strict`: no rule at all) |
| 1 | the server deviates |
| 2 | wrong arguments |
| 3 | no connection |
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from trio_mcp.cli.check_probes import probe_all
from trio_mcp.cli.check_rules import RULES, CheckReport
from trio_mcp.cli.check_stream import LineWatch, check_lines
from trio_mcp.cli.output import Output, headline
from trio_mcp.cli.target import add_target_arguments, connected, run_command, target_of
from trio_mcp.client.options import ClientOptions
from trio_mcp.core.errors import UsageError

__all__ = ["add_arguments", "run"]

_SHOWN = 4  # places for each rule; JSON has all


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    parser.add_argument(
        "--call", action="append", default=[], metavar="TOOL=JSON", help="call this tool too, with these arguments"
    )
    parser.add_argument("--strict", action="store_true", help="deviations from SHOULD fail too")


def run(arguments: argparse.Namespace) -> int:
    return run_command(lambda: _check(arguments), verbose=arguments.verbose)


async def _check(arguments: argparse.Namespace) -> int:
    calls = dict(map(_call_of, arguments.call))
    target = target_of(arguments)
    output, watch = Output(arguments.json), LineWatch()
    is_child = not isinstance(target.address, str)
    options: ClientOptions = {"tap": watch} if is_child else {}
    async with connected(arguments, **options) as client:
        report = CheckReport(client.revision)
        server = dict(client.server)
        await probe_all(client, report, calls)
        report.notes += client.deviations
        if is_child:
            watch.report(report, client.capabilities)
    if not isinstance(target.address, str):
        await check_lines(target.address, target.env, report)
    found = report.deviations
    if output.as_json:
        output.json(_as_json(report, server))
    else:
        _show(report, server, output)
    levels = {RULES[each.rule].level for each in found}
    return int("MUST" in levels or (arguments.strict and bool(levels)))


def _call_of(text: str) -> tuple[str, dict[str, Any]]:
    name, _, given = text.partition("=")
    try:
        arguments = json.loads(given or "{}")
    except ValueError as error:
        raise UsageError(f"--call must be like TOOL=JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise UsageError(f"--call {name} needs a JSON object, got {type(arguments).__name__}")
    return name, arguments


def _as_json(report: CheckReport, server: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "server": server,
        "revision": report.revision,
        "checks": report.checks,
        "tested": sorted(report.tested),
        "deviations": [
            {
                "requirement": each.rule,
                "level": RULES[each.rule].level,
                "sentence": RULES[each.rule].sentence,
                "where": each.where,
                "seen": each.seen,
            }
            for each in report.deviations
        ],
        "notes": report.notes,
    }


def _show(report: CheckReport, server: Mapping[str, Any], output: Output) -> None:
    found = report.deviations
    output.title(headline(server, report.revision))
    for rule in dict.fromkeys(each.rule for each in found):
        level = RULES[rule].level
        output.line()
        output.line(f"{output.painted(f'{level:<6}', 'bad' if level == 'MUST' else 'title')}  {rule}")
        output.paragraph(RULES[rule].sentence, 8)
        places = [each for each in found if each.rule == rule]
        for each in places[:_SHOWN]:
            output.paragraph(f"{each.where}: {each.seen}" if each.seen else each.where, 8, "dim")
        if len(places) > _SHOWN:
            output.paragraph(f"and {len(places) - _SHOWN} more; --json shows all", 8, "dim")
    output.line()
    for note in dict.fromkeys(report.notes):
        output.paragraph(f"Note: {note}", 0)
    counts = [sum(RULES[each.rule].level == level for each in found) for level in ("MUST", "SHOULD")]
    words = f"{counts[0]} deviation{'' if counts[0] == 1 else 's'} from MUST, {counts[1]} from SHOULD"
    output.line(
        f"{report.checks} checks of {len(report.tested)} rules: "
        + output.painted(words, "bad" if counts[0] else "good")
    )
