"""The command line: in this process, in a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.in_process import ROOT, run
from trio_mcp import Server, open_client
from trio_mcp.cli.call import read_arguments  # the command line has no public API
from trio_mcp.cli.main import COMMANDS, main  # the same
from trio_mcp.cli.output import headline  # the same
from trio_mcp.cli.target import exit_status, last_entry  # the same
from trio_mcp.errors import NotDeclared, UsageError
from trio_mcp.types import PromptReference, Tool

SERVER = str(Path(__file__).parent / "servers.py")
COMMAND = (sys.executable, "-m", "trio_mcp")


def run_apart(*arguments: str, input: str | None = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Like `run`, but in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [*COMMAND, *arguments], input=input, capture_output=True, text=True, timeout=60, cwd=cwd, env=environ
    )


def on_terminal(arguments: Sequence[str], typed: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Run a command on a terminal; type each answer after its prompt was seen.  Returns the output and the status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [*COMMAND, *arguments], {**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    seen, left = "", list(typed)
    at = 0
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the terminal has been closed
            data = b""
        if not data:
            break
        seen += data.decode()
        while left and (found := seen.find(left[0][0], at)) >= 0:
            prompt, answer = left.pop(0)
            at = found + len(prompt)
            os.write(terminal, answer.encode())
    os.close(terminal)
    return seen.replace("\r\n", "\n"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert err == ""
    assert max(map(len, out.splitlines())) <= 118


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert COMMANDS[command].summary in shown
    assert " --json " in shown


def test_without_a_command_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: trio-mcp COMMAND")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["lsit", "a b.py"], "'lsit'; write trio-mcp list 'a b.py'\n"),
        (["weather.py"], "'weather.py'; write trio-mcp list weather.py, or trio-mcp run weather.py\n"),
        (["https://x"], "'https://x'; write trio-mcp list https://x"),
        (["zzz"], "'zzz'; the commands are run, demo, list"),
        (["version"], "'version'; write trio-mcp --version\n"),
        (["dev", "a b.py"], "'dev'; write trio-mcp inspect 'a b.py', or trio-mcp run 'a b.py' --reload\n"),
        (["uninstall", "weather"], "'uninstall'; delete the entry from its file, which trio-mcp hosts shows\n"),
        (["remove"], "'remove'; delete the entry"),
    ],
)
def test_an_unknown_command_is_refused(words: list[str], instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"trio-mcp: unknown command {instead}")


def test_help_may_be_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["help"]), main(["--help"])) == (0, 0)
    shown = capsys.readouterr().out
    assert shown[: len(shown) // 2] * 2 == shown
    with pytest.raises(SystemExit):
        main(["help", "list"])
    assert capsys.readouterr().out.startswith("usage: trio-mcp list ")


def test_help_loads_no_protocol() -> None:
    script = (
        "import sys; from trio_mcp.cli.main import main; main(['--help']); "
        "print('trio' in sys.modules, 'attrs' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "False False"


def test_list_shows_the_entries_of_the_server() -> None:
    shown = run_apart("list", SERVER)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == (
        "weather 1.0 (2026-07-28)\n  Ask for a city.\n\nTools\n"
        "  forecast\n    The forecast for a city.\n"
        "    city    string   the name of the city\n    [days]  integer  how many days (0 to 14, default 2)\n"
        "  order\n    Order an umbrella.\n  picture\n    A picture.\n  fails\n    A tool that fails.\n"
        "  forever\n    A call that ends only by a cancellation.\n"
        "\nResources\n  notes://today    Notes of today.\n"
        "\nPrompts\n  review  code [style]  Review code.\n"
    )


def test_list_writes_json() -> None:
    listed = json.loads(run("list", SERVER, "--json", "--revision", "2025-06-18").stdout)
    assert listed["revision"] == "2025-06-18"
    assert listed["server"]["name"] == "weather"
    assert [tool["name"] for tool in listed["tools"]] == ["forecast", "order", "picture", "fails", "forever"]
    assert listed["resources"][0]["uri"] == "notes://today"
    assert listed["prompts"][0]["name"] == "review"


@pytest.mark.parametrize("target", [f"{SERVER}:server", "tests.cli.servers:server"])
def test_a_target_may_name_an_object(target: str) -> None:
    shown = run("call", target, "forecast", "city=Oslo", "days=1", "--quiet")
    assert (shown.stdout, shown.stderr, shown.returncode) == ('{"city": "Oslo", "degrees": 12.5}\n', "", 0)


def test_a_command_follows_after_dashes() -> None:
    shown = run("read", "notes://today", "--", *COMMAND, "run", SERVER)
    assert (shown.stdout, shown.returncode) == ("Buy milk\n", 0)


def test_a_configured_name_is_a_target(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": ["-m", "trio_mcp", "run", SERVER], "env": {"PYTHONPATH": str(ROOT)}}
    (tmp_path / ".mcp.json").write_text(json.dumps({"mcpServers": {"the weather": entry}}))
    assert run("read", "the weather", "notes://today", cwd=tmp_path).stdout == "Buy milk\n"
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"mcpServers": {}}))
    (tmp_path / "weather.py").touch()
    assert (
        "no file, module:object, URL or configured name; there is weather.py"
        in run("list", "weather", cwd=tmp_path).stderr
    )
    suggested = run("list", "127.0.0.1:3000/mcp", cwd=tmp_path)
    assert "or configured name; a URL is like http://127.0.0.1:3000/mcp; a command" in suggested.stderr
    refused = run("read", "the weather", "notes://today", "--config", str(other), cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is no file, module:object, URL or configured name" in refused.stderr


def test_call_reports_on_standard_error() -> None:
    shown = run("call", SERVER, "forecast", "city=Oslo")
    assert shown.stdout == '{"city": "Oslo", "degrees": 12.5}\n'
    reported = ["info: asked for Oslo", "progress: 1 of 2 day 1", "progress: 2 of 2 day 2"]
    assert sorted(shown.stderr.splitlines()) == reported  # the log does not wait for the progress


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("forecast", "city"), 2, "an argument must be like NAME=VALUE, got 'city'; forecast has city, days"),
        (("forecast", "city=Oslo", "days=x"), 2, "days must be a JSON integer, got 'x'"),
        (("forecast", "town=Oslo"), 2, "forecast has no argument 'town'; it has city, days"),
        ((), 2, "give the name of a TOOL; the server has fails, forecast, forever, order, picture"),
        (("nothing",), 2, "the server has no tool 'nothing'; it has fails, forecast, forever, order, picture"),
        (("forecast", "--args", "[]"), 2, "--args must be a JSON object, got list"),
        (("forecast", "--args", "@absent"), 2, "--args cannot be read: [Errno 2]"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: Sequence[str], status: int, message: str) -> None:
    shown = run("call", SERVER, *arguments)
    assert (shown.stdout, shown.returncode) == ("", status)
    assert shown.stderr.startswith(f"trio-mcp: {message}")
    assert shown.stderr.count("\n") == 1


def test_arguments_may_come_as_json(tmp_path: Path) -> None:
    file = tmp_path / "arguments.json"
    file.write_text('{"city": "Oslo", "days": 0}')
    expected = '{"city": "Oslo", "degrees": 12.5}\n'
    assert run("call", SERVER, "forecast", "--args", f"@{file}", "--quiet").stdout == expected
    assert run("call", SERVER, "forecast", "--args", "-", "--quiet", input=file.read_text()).stdout == expected
    assert run("call", SERVER, "forecast", 'city:="Oslo"', "days:=1", "--quiet").stdout == expected


def test_a_failing_tool_has_status_one() -> None:
    shown = run_apart("call", SERVER, "fails")
    assert (shown.stdout, shown.returncode) == ("tools/call 'fails' failed; the server's log says why\n", 1)
    assert (
        shown.stderr == "trio-mcp: the log of the server ends with: ValueError: a secret reason; --verbose shows it\n"
    )
    assert run("call", SERVER, "fails", "--quiet").stderr == ""
    verbose = run("call", SERVER, "fails", "--verbose").stderr
    assert verbose.count("ValueError: a secret reason\n") == 1
    assert "trio-mcp: " not in verbose


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        ("starting\nTraceback (most recent call last):\n  File x\nKeyError: 'Bergen'\n\n", "KeyError: 'Bergen'"),
        ("│ box │\n  ╰──╯\n    KeyError: 'Bergen'   \n", "KeyError: 'Bergen'"),
        ("ready\n[10:01] INFO  bad arguments  server.py:15\n        {'count': 1,\n        'a': 2}\n",
         "[10:01] INFO bad arguments server.py:15 {'count': 1, 'a': 2}"),
        ("\n".join(f"  {number}" for number in range(9)), "4 5 6 7 8"),
        ('KeyError: 1\n{"file": "a.jsonl", "frames": 6, "bytes": 8152}\n', "KeyError: 1"),  # `tap --json`
    ],
)  # fmt: skip
def test_the_last_entry_of_a_log_is_whole(log: str, expected: str) -> None:
    assert last_entry(log) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "object"}, "x", "a JSON object, such as it='{\"a\": 1}'"),
        ({"type": "array"}, "1, 2", "a JSON array, such as it='[1, 2]'"),
        ({"type": "array", "items": {"type": "string"}}, "a", 'a JSON array, such as it=\'["a", "b"]\''),
        ({"type": "boolean"}, "yes", "true or false"),
        ({"type": "integer", "enum": [1, 2]}, "HIGH", "one of [1, 2]"),
        ({"type": ["integer", "null"]}, "x", "a JSON value"),
        (True, "x", "a JSON value"),
    ],
)
def test_the_error_for_an_invalid_argument_names_the_expected_type(schema: Any, text: str, expected: str) -> None:
    tool = Tool("t", {"type": "object", "properties": {"it": schema}})
    with pytest.raises(UsageError) as caught:
        read_arguments([f"it={text}"], tool)
    assert str(caught.value) == f"it must be {expected}, got {text!r}"


def test_the_error_for_a_json_object_as_argument_names_the_option() -> None:
    tool = Tool("t", {"type": "object", "properties": {"it": {}}})
    message = r"like NAME=VALUE, and a JSON object of all follows --args; got '{.*; t has it"
    with pytest.raises(UsageError, match=message):
        read_arguments(['{"it": "a=b"}'], tool)


ONE_OF_EACH = """
from trio_mcp import Server, ToolError
server = Server("s")

@server.tool
def ask() -> str:
    raise ToolError("elicitation via server-initiated requests is unavailable")

@server.resource("notes://{name}")
def note(name: str) -> str:
    return {}[name]
"""


def test_a_server_may_have_no_version() -> None:
    assert headline({"name": "sdk", "version": ""}, "2025-11-25") == "sdk (2025-11-25)"
    assert headline({}, "2025-11-25") == "a server (2025-11-25)"


async def test_a_server_without_completions_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_client(Server("plain")) as client:
        with pytest.raises(NotDeclared) as caught:
            await client.complete(PromptReference("review"), "style", "")

    def fail() -> int:
        raise caught.value

    assert exit_status(fail, verbose=False) == 2
    assert capsys.readouterr().err == "trio-mcp: the server has no completions, which completion/complete needs\n"


def test_a_failed_resource_is_reported_with_the_log_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(ONE_OF_EACH)
    shown = run("read", "server.py", "notes://x", cwd=tmp_path)
    assert (shown.stdout, shown.returncode) == ("", 1)
    first, second = shown.stderr.splitlines()
    assert first.startswith("trio-mcp: the server answered: resources/read 'notes://x' failed")
    assert second == "trio-mcp: the log of the server ends with: KeyError: 'x'; --verbose shows it"
    assert "the log of the server" not in run("read", "server.py", "notes://x", "--verbose", cwd=tmp_path).stderr


def test_a_file_does_not_see_the_arguments_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import sys\nfrom trio_mcp import Server\nserver = Server('s')\ngiven = sys.argv[1:]\n"
        "@server.resource('file://arguments')\ndef arguments() -> str:\n    return f'{given}'\n"
    )
    assert run("read", "server.py", "file://arguments", cwd=tmp_path).stdout == "[]\n"


@pytest.mark.full
@pytest.mark.parametrize(("revision", "hinted"), [("2026-07-28", True), ("2025-11-25", False)])
def test_a_server_that_asks_only_in_older_revisions_gets_a_hint(revision: str, hinted: bool, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(ONE_OF_EACH)
    shown = run("call", "server.py", "ask", "--revision", revision, cwd=tmp_path)
    assert shown.stdout == "elicitation via server-initiated requests is unavailable\n"
    assert ("this server asks the user in older revisions; add --revision 2025-11-25" in shown.stderr) == hinted


def test_each_mistake_of_a_call_has_a_line() -> None:
    shown = run("call", SERVER, "forecast", "city:=1", "days=99")
    assert shown.stdout.splitlines() == ["/city: must be of type string, not an integer", "/days: must be at most 14"]


def test_images_are_saved(tmp_path: Path) -> None:
    shown = run("call", SERVER, "picture", "--save", str(tmp_path))
    path = tmp_path / "picture-1.png"
    assert shown.stdout == f"a picture\n{path}: 5 bytes of image/png\n"
    assert path.read_bytes() == b"hello"


def test_prompts_and_completions() -> None:
    assert run("prompt", SERVER, "review", "code=x").stdout == "user\n  Review x, short\n"
    assert run("complete", SERVER, "review", "style", "l").stdout == "long\n"
    empty = run("complete", SERVER, "review", "style", "x")
    assert (empty.stdout, empty.stderr, empty.returncode) == ("", "trio-mcp: the server suggests no value\n", 0)
    pings = json.loads(run("ping", SERVER, "--count", "2", "--json", "--revision", "2025-11-25").stdout)
    assert (pings["method"], len(pings["ms"])) == ("ping", 2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((sys.executable, "-c", "raise SystemExit('no licence')"), "ended with status 1 before its first message"),
        ((sys.executable, "-c", "print('hello', flush=True); import sys; sys.stdin.read()"), "'hello"),
        (("/nonexistent/server",), "/nonexistent/server"),
    ],
)
def test_a_server_that_sends_no_message_is_reported_with_its_cause(command: Sequence[str], message: str) -> None:
    shown = run_apart("list", "--timeout", "3", "--", *command)
    assert shown.returncode == 3
    assert message in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("trio-mcp: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def add(a: int) -> int\n", "server.py:1: SyntaxError: expected ':'"),
        pytest.param(
            "import nothing_of_this\n",
            "server.py:1: ModuleNotFoundError: No module named 'nothing_of_this'; "
            f"this is {sys.executable}; for another Python, give its command after --",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "import json\n\njson.loads('{')\n",
            "server.py:3: json.decoder.JSONDecodeError: Expecting property name",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line_with_its_place(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(text)
    shown = run("list", "server.py", cwd=tmp_path)
    assert (shown.stdout, shown.returncode) == ("", 3)
    why = "ended with status 1 before its first message; the last line on stderr"
    assert shown.stderr.startswith(f"trio-mcp: the server {os.path.basename(sys.executable)!r} {why}: {reason}")
    assert shown.stderr.count("\n") == 1
    traceback, _, last = run_apart("run", "server.py", cwd=tmp_path).stderr.rstrip().rpartition("\n")
    assert last.startswith(f"trio-mcp: {reason}")
    assert "trio_mcp" not in traceback


def test_a_question_is_asked_on_the_terminal() -> None:
    typed = [("Which umbrella?", ""), ("  size: ", "2\n"), ("  count", "\n"), ("  gift", "\n")]
    shown, status = on_terminal(("call", SERVER, "order"), typed)
    assert status == 0
    assert shown.splitlines()[-1] == "1 large"
    assert "  1  small\n  2  large\n" in shown


@pytest.mark.parametrize("revision", [pytest.param("2025-11-25", marks=pytest.mark.full), "2026-07-28"])
def test_a_field_that_does_not_fit_is_asked_again(revision: str) -> None:
    typed = [
        ("  size: ", "3\n"), ("  size: ", "small\n"), ("  count", "x\n"), ("  count", "0\n"), ("  count", "3\n"),
        ("  gift (y/n) [false]: ", "maybe\n"), ("  gift", "y\n"),
    ]  # fmt: skip
    shown, status = on_terminal(("call", SERVER, "order", "--revision", revision), typed)
    assert (shown.splitlines()[-1], status) == ("3 small, wrapped", 0)
    assert "expected a number from 1 to 2 or a value, got '3'" in shown
    assert "expected a whole number, got 'x'" in shown
    assert "must be at least 1" in shown
    assert "expected y or n, got 'maybe'" in shown


def test_a_question_without_a_terminal_is_declined() -> None:
    shown = run("call", SERVER, "order")
    assert (shown.stdout, shown.returncode) == ("no order\n", 0)
    assert "declined: standard input is not a terminal" in shown.stderr


def test_control_c_ends_a_call() -> None:
    process = subprocess.Popen(
        [*COMMAND, "call", SERVER, "forever", "--verbose"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert (line, rest, process.returncode) == ("progress: 0 begun\n", "cancelled\n", 130)
