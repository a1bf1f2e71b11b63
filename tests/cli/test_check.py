"""`check`: no alarm for a server that obeys the protocol, and one for each fault of a server that does not."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.cli.servers import server as weather
from tests.cli.test_cli import SERVER, run_apart
from tests.requirements import TABLE, read
from trio_mcp import serve_http

# The command line has no public API.
from trio_mcp.cli import check_stream
from trio_mcp.cli.check_rules import RULES, CheckReport  # the same
from trio_mcp.cli.check_stream import LineWatch  # the same
from trio_mcp.cli.main import main  # the same
from trio_mcp.core import REVISIONS

BAD = str(Path(__file__).parent / "bad_server.py")
A, B, C, D, E = REVISIONS
CALLS = """
import os
from trio_mcp import Server
from trio_mcp.types import ToolAnnotations

server = Server("calls")
READ = ToolAnnotations(read_only_hint=True)

def log(name: str) -> str:
    with open(os.environ["CALLED"], "a") as file:
        file.write(name + "\\n")
    return name

@server.tool(annotations=READ)
def reads(days: int = 1) -> str:
    return log("reads")

@server.tool(annotations=READ)
def reads_one(city: str) -> str:
    return log("reads_one")

@server.tool
def writes(city: str = "") -> str:
    return log("writes")
"""


def found(out: str) -> Mapping[str, Any]:
    report: Mapping[str, Any] = json.loads(out)
    return report


def broken(report: Mapping[str, Any]) -> set[str]:
    return {each["requirement"] for each in report["deviations"]}


def test_the_rules_are_requirements() -> None:
    rows = read(TABLE)
    for name, rule in RULES.items():
        assert rule.level == rows[name]["level"], name
        parts = [part.partition("..") for part in rows[name]["revisions"].split(",")]
        having = [each for each in REVISIONS if any(first <= each <= (last or first) for first, _, last in parts)]
        assert [each for each in REVISIONS if rule.since <= each <= rule.until] == having, name


@pytest.mark.parametrize("revision", REVISIONS)
def test_our_server_has_no_deviation(revision: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["check", SERVER, "--revision", revision, "--strict", "--json", "--call", 'forecast={"city": "Oslo"}'])
        == 0
    )
    report = found(capsys.readouterr().out)
    assert (report["revision"], report["deviations"], report["notes"]) == (revision, [], [])
    applying = {name for name, rule in RULES.items() if rule.since <= revision <= rule.until}
    # The server has one page and no templates; no call fails, and it sends no log message before logging/setLevel.
    untested = {"log-01", "page-11", "res-22", "tool-30"}
    assert applying - set(report["tested"]) <= untested | ({"cmpl-07"} if revision == A else set())


BOTH = {
    "core-16", "core-28", "core-29", "core-30", "stdio-03", "type-01", "prog-03", "type-03", "schema-07", "tool-06",
    "tool-31", "res-13", "res-22", "cmpl-07", "cancel-08", "page-03", "page-11", "tool-13", "tool-17", "tool-19",
    "prm-08", "cmpl-06",
}  # fmt: skip
ONLY = {
    D: {"life-10", "ping-01", "tool-34", "tool-36", "log-03", "res-05"},
    E: {
        "stdio-14", "ping-07", "ver-01", "meta-11", "rtype-01", "cache-01", "cache-09", "cache-23", "tool-14",
        "http-80", "http-81", "http-82", "http-84", "res-06", "res-09", "stdio-11", "meta-13",
    },
}  # fmt: skip


@pytest.mark.parametrize("revision", ONLY)
def test_each_fault_is_found(
    revision: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_stream, "_WAIT", 0.3)
    monkeypatch.setattr(check_stream, "_EXIT", 0.3)
    assert main(["check", "--json", "--", sys.executable, BAD, revision]) == 1
    report = found(capsys.readouterr().out)
    assert report["revision"] == revision
    assert broken(report) == BOTH | ONLY[revision]
    assert all(each["sentence"] == RULES[each["requirement"]].sentence for each in report["deviations"])
    levels = [each["level"] for each in report["deviations"]]
    assert levels == sorted(levels)  # MUST comes first


def test_the_report_is_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_stream, "_WAIT", 0.3)
    assert main(["check", "--", sys.executable, BAD, D]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "bad 1 (2025-11-25)",
        "",
        "MUST    core-16",
        "        A notification gets no response, not even an unknown one.",
        "        notifications: result {}; result {}",
    ]
    assert "Note: a result must carry the id of its request" in lines
    assert lines[-1].endswith("checks of 36 rules: 25 deviations from MUST, 17 from SHOULD")
    assert max(map(len, lines)) <= 100


def test_a_server_that_ends_during_the_checks_deviates(capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import json, sys
RESULT = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "a", "version": "1"}}
ANSWERS = {
    "initialize": {"result": RESULT},
    "server/discover": {"error": {"code": -32601, "message": "no"}},
}
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and message["method"] not in ANSWERS:
        sys.exit("no " + message["method"])
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **ANSWERS[message["method"]]}), flush=True)
"""
    assert main(["check", "--json", "--", sys.executable, "-c", script]) == 1
    report = found(capsys.readouterr().out)
    assert broken(report) == {"core-31"}
    assert [each["where"] for each in report["deviations"]] == [
        "com.example/trio-mcp-check",
        "odd messages on standard input",
    ]
    assert report["notes"] == ["the connection was lost, so the other checks were not made"]


def test_only_tools_that_are_named_or_harmless_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, called = tmp_path / "calls.py", tmp_path / "called"
    file.write_text(CALLS)
    called.touch()
    env = ["--env", f"CALLED={called}", "--json"]
    assert main(["check", str(file), *env]) == 0
    assert called.read_text() == "reads\n"
    assert main(["check", str(file), *env, "--call", 'reads_one={"city": "Oslo"}', "--call", "writes"]) == 0
    assert called.read_text().split() == ["reads", "reads", "reads_one", "writes"]
    capsys.readouterr()
    assert main(["check", str(file), *env, "--call", "absent"]) == 2
    assert capsys.readouterr().err == "trio-mcp: the server has no tool 'absent'; it has reads, reads_one, writes\n"


def test_deviations_from_should_fail_if_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "named.py"
    file.write_text(CALLS + "\n@server.tool(name='has_a_result')\ndef f() -> int:\n    return 1\n")
    adapter = tmp_path / "adapter.py"  # answers an unknown resource with -32602 instead of -32002
    adapter.write_text(
        "import subprocess, sys\n"
        f"child = subprocess.Popen({[sys.executable, '-m', 'trio_mcp', 'run', SERVER]!r}, stdout=subprocess.PIPE)\n"
        "for line in child.stdout:\n"
        "    sys.stdout.buffer.write(line.replace(b'-32002', b'-32602'))\n"
        "    sys.stdout.buffer.flush()\n"
    )
    command = ["--revision", D, "--env", f"PYTHONPATH={Path.cwd()}", "--", sys.executable, str(adapter)]
    assert main(["check", *command]) == 0
    assert "res-05" in capsys.readouterr().out
    assert main(["check", "--strict", *command]) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([SERVER, "--call", "forecast=[]"], 2, "--call forecast needs a JSON object, got list"),
        ([SERVER, "--call", "forecast={"], 2, "--call must be like TOOL=JSON: "),
        (["--", sys.executable, "-c", "raise SystemExit('no licence')"], 3, "the server 'python"),
    ],
)
def test_other_failures_have_their_own_status_and_message(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == status
    assert capsys.readouterr().err.startswith(f"trio-mcp: {message}"), shlex.join(arguments)


@pytest.mark.parametrize("revision", [D, E])
async def test_a_server_over_http_is_checked(revision: str) -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serve_http, weather)
        arguments = ["check", address.url, "--revision", revision, "--strict", "--json"]
        shown = await trio.to_thread.run_sync(partial(run_apart, *arguments))
        nursery.cancel_scope.cancel()
    assert (shown.returncode, shown.stderr) == (0, "")
    report = found(shown.stdout)
    assert (report["deviations"], report["notes"]) == ([], [])
    assert "stdio-03" not in report["tested"]


def test_the_rules_for_single_lines_are_checked() -> None:
    watch, report = LineWatch(), CheckReport(E)
    for line in (b'{"jsonrpc": "1.0", "id": 1, "result": {}}\n{"jsonrpc"', b': "2.0", "id": 2}\n5\n'):
        watch("in", line)
    watch("in", b'[{"jsonrpc": "2.0", "id": 3, "error": {"code": "x"}}]\n')
    watch("in", b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}\n\n')
    watch("out", b"not looked at\n")
    watch.report(report, {})
    assert [(each.rule, each.where, each.seen) for each in report.deviations] == [
        ("core-01", "a response", 'jsonrpc is "1.0"'),
        ("core-11", "a response", "members jsonrpc, id"),
        ("core-13", "a response", 'code is "x"'),
        ("stdio-03", "standard output", "5"),
        ("log-01", "notifications/message", "logging is not declared"),
    ]
