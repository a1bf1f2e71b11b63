"""``trio-mcp task`` with a server with tasks over HTTP, and with a stdio server that keeps its tasks in a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.in_process import ROOT, run
from tests.cli.test_cli import on_terminal
from trio_mcp.cli.output import ReportLines  # the command line has no public API
from trio_mcp.core.task_states import TaskState  # the same
from trio_mcp.core.tasks import TaskStatus  # the same

SERVER = str(Path(__file__).parent / "task_server.py")
# A server with tasks that send the form of the command line as an elicitation, and accept any answer.
ASKING = """
import json, sys

FORM = json.loads(sys.argv[1])
CAPABILITIES = {"tools": {}, "extensions": {"io.modelcontextprotocol/tasks": {}}}
QUESTION = {"method": "elicitation/create", "params": {"mode": "form", "message": "m", "requestedSchema": FORM}}
RESULTS = {
    "server/discover": {"supportedVersions": ["2026-07-28"], "capabilities": CAPABILITIES},
    "tasks/get": {"taskId": "t", "status": "input_required", "inputRequests": {"form": QUESTION}},
    "tasks/update": {},
}
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "tasks/update":
        with open(sys.argv[2], "w") as file:
            json.dump(message["params"]["inputResponses"]["form"], file)
    if "id" in message:
        result = {"resultType": "complete", **RESULTS[message["method"]]}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, SERVER, "http"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.mark.parametrize("revision", ["2026-07-28", "2025-11-25"])
def test_a_task_is_followed_by_its_id(url: str, revision: str) -> None:
    chosen = ("--revision", revision)
    started = run("task", "start", url, "report", "days=2", *chosen)
    assert (started.stderr, started.returncode) == ("", 0)
    id = started.stdout.strip()
    assert id.isalnum()  # a "-" at its start would be an option here
    followed = run("task", "follow", url, id, *chosen)
    assert followed.stdout.splitlines()[-1] == "2 days"
    assert followed.returncode == 0
    state = json.loads(run("task", "status", url, id, "--json", *chosen).stdout)
    assert (state["id"], state["status"]) == (id, "completed")


@pytest.mark.full
def test_task_start_warns_that_the_stdio_server_exits() -> None:
    started = run("task", "start", SERVER, "report", "days=9")
    assert (started.returncode, started.stderr.count("\n")) == (0, 1)
    assert started.stderr.startswith("trio-mcp: the server ends now; its task goes on if it has a store")


def test_a_list_of_another_session_has_no_tasks(url: str) -> None:
    shown = run("task", "list", url, "--revision", "2025-11-25")
    assert (shown.stdout, shown.returncode) == ("", 0)
    assert shown.stderr.startswith("trio-mcp: no tasks; without access tokens a server lists those of the same session")


def test_a_list_needs_the_older_form(url: str) -> None:
    shown = run("task", "list", url, "--revision", "2026-07-28")
    assert shown.returncode == 2
    assert shown.stderr == "trio-mcp: tasks/list does not exist in 2026-07-28; add --revision 2025-11-25\n"


def test_a_task_is_cancelled(url: str) -> None:
    id = run("task", "start", url, "report", "days=100000").stdout.strip()
    assert run("task", "cancel", url, id).returncode == 0
    followed = run("task", "follow", url, id)
    assert followed.returncode == 1
    assert "was cancelled" in followed.stderr


def test_a_question_is_answered_by_its_key(url: str) -> None:
    id = run("task", "start", url, "ask").stdout.strip()
    state = {"questions": {}}
    while not state["questions"]:
        state = json.loads(run("task", "status", url, id, "--json").stdout)
    (key,) = state["questions"]
    wrong = run("task", "answer", url, id, f"{key}=1")
    assert wrong.returncode == 2
    assert "must be a JSON object with the fields of the form, accept, decline or cancel, got '1'" in wrong.stderr
    unknown = run("task", "answer", url, id, "size=decline")
    advice = f"trio-mcp: the task has no question size; it asks {key}: write {key}=JSON\n"
    assert (unknown.returncode, unknown.stderr) == (2, advice)
    assert run("task", "answer", url, id, f'{key}={{"size": "large"}}').returncode == 0
    assert run("task", "follow", url, id).stdout.splitlines()[-1] == "large"


@pytest.mark.full
def test_the_older_form_has_no_answers(url: str) -> None:
    chosen = ("--revision", "2025-11-25")
    id = run("task", "start", url, "ask", *chosen).stdout.strip()
    shown = run("task", "answer", url, id, "size=decline", *chosen)
    assert (shown.returncode, shown.stderr) == (2, "trio-mcp: tasks/update does not exist in 2025-11-25\n")


@pytest.mark.parametrize("revision", ["2026-07-28", "2025-11-25"])
def test_a_question_is_answered_on_the_terminal(url: str, revision: str) -> None:
    chosen = ("--revision", revision)
    id = run("task", "start", url, "ask", *chosen).stdout.strip()
    shown, status = on_terminal(("task", "follow", url, id, *chosen), [("  size: ", "small\n")])
    assert (shown.splitlines()[-1], status) == ("small", 0)


def test_an_unknown_task_is_one_line(url: str) -> None:
    shown = run("task", "status", url, "unknown")
    assert (shown.stdout, shown.returncode, shown.stderr.count("\n")) == ("", 1, 1)


def test_call_waits_for_a_task(url: str) -> None:
    shown = run("call", url, "report", "days=1", "--quiet")
    assert (shown.stdout, shown.returncode, shown.stderr) == ("1 days\n", 0, "")


def test_call_names_its_task(url: str) -> None:
    shown = run("call", url, "ask")
    assert (shown.stdout, shown.returncode) == ("none\n", 0)
    task, question, _ = shown.stderr.splitlines()
    assert re.fullmatch(r"task \w{32}: working", task)
    assert question == "the server asks: Which size?"


async def test_each_new_message_of_a_task_that_works_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    working, asking, ended = TaskStatus.WORKING, TaskStatus.INPUT_REQUIRED, TaskStatus.COMPLETED
    states = [(working, None), (working, "1\x1b"), (asking, "1\x1b"), (working, "2"), (working, "2"), (ended, "3")]
    for quiet in (True, False):
        reports = ReportLines(quiet)
        for status, message in states:
            await reports.state(TaskState("x", status, message))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "task x: working\ntask x: working  1\ufffd\ntask x: working  2\n")


@pytest.mark.full
def test_one_value_is_asked_without_the_name_of_its_field(url: str) -> None:
    shown, status = on_terminal(("call", url, "agree"), [("  answer (y/n): ", "y\n")])
    assert (shown.splitlines()[-1], status) == ("Accepted(value=True)", 0)


@pytest.mark.full
def test_one_value_is_answered_without_its_field(url: str) -> None:
    id = run("task", "start", url, "agree").stdout.strip()
    while "form" not in run("task", "status", url, id).stdout:
        pass
    wrong = run("task", "answer", url, id, 'form={"value": "maybe"}')
    why = "trio-mcp: the answer form does not fit its form: /value must be of type boolean, not a string\n"
    assert (wrong.returncode, wrong.stderr) == (2, why)
    assert run("task", "answer", url, id, "form=true").returncode == 0
    assert run("task", "follow", url, id).stdout.splitlines()[-1] == "Accepted(value=True)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ({"properties": {"name": {"type": "string"}}, "required": 5}, '{"name": 1}', {"name": 1}),
        ({"properties": {"name": {"type": "odd"}}}, '{"name": 1}', {"name": 1}),
        ({"properties": {"value": 3}}, "1", {"value": 1}),
        ({"properties": {"value": {"type": "string"}}}, "1", {"value": "1"}),
        ({"properties": {"value": {"type": "string"}}}, '"1"', {"value": "1"}),
        ({"properties": {"value": {"type": "string"}}}, "a b", {"value": "a b"}),
        ({"properties": {"value": {"type": "integer"}}}, "1", {"value": 1}),
    ],
)
def test_an_answer_is_sent_though_its_form_is_odd(form: Any, text: str, content: Any, tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    (tmp_path / "given.json").touch()
    command = (sys.executable, "asking.py", json.dumps({"type": "object", **form}), "given.json")
    shown = run("task", "answer", "t", f"form={text}", "--", *command, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads((tmp_path / "given.json").read_text()) == {"action": "accept", "content": content}
