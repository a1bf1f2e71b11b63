"""The words of commands: mistakes are one line, options stand anywhere, and `--` has two meanings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest

from tests.cli.in_process import run
from tests.cli.test_cli import SERVER
from tests.cli.test_hostile import SERVER as HOSTILE
from trio_mcp.cli.arguments import divided  # the command line has no public API
from trio_mcp.cli.http_options import http_address  # the same
from trio_mcp.cli.main import main  # the same

ABOVE = "a whole number above 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ping", "x.py", "--count", "-3"], f"--count must be {ABOVE}, got '-3'"),
        (["ping", "x.py", "--count", "0"], f"--count must be {ABOVE}, got '0'"),
        (["ping", "x.py", "--count", "many"], f"--count must be {ABOVE}, got 'many'"),
        (["list", "x.py", "--timeout", "-3"], "--timeout must be a number above 0, got '-3'"),
        (["list", "x.py", "--timeout", "nan"], "--timeout must be a number above 0, got 'nan'"),
        (["bridge", "x.py", "--timeout", "0"], "--timeout must be a number above 0, got '0'"),
        (["run", "x.py", "--http", "0", "--workers", "0"], f"--workers must be {ABOVE}, got '0'"),
        (["tap", "-o", "x", "--limit", "-1", "--", "x"], "--limit must be a number above 0, got '-1'"),
        (["call"], "the following arguments are required: TARGET"),
        (
            ["run", "https://x.y/mcp"],
            "TARGET must be a file or a module; for a URL write trio-mcp bridge https://x.y/mcp",
        ),
        (["task"], "the following arguments are required: ACTION, TARGET"),
        (["completion", "tcsh"], "shell: invalid choice: 'tcsh'"),
        (
            ["list", "npx", "-y", "x"],
            "unrecognized arguments: -y x; trio-mcp list --help shows the options; "
            "the command of a server, or a name that begins with -, follows after --",
        ),
        (["list", "x.py", "--", "-y"], "unrecognized arguments: -y; "),
        (["list", "x.py", "--js"], "unrecognized arguments: --js; "),
        (["call", "x.py", "add", "--a", "1"], "unrecognized arguments: --a 1; "),
        *(
            (
                [command, "x.py", *given],
                f"unrecognized arguments: {' '.join(given)}; write --http HOST:PORT, or --http PORT; ",
            )
            for command in ("run", "bridge")
            for given in (["--transport", "http", "--port", "9000"], ["--host", "0.0.0.0"])
        ),
        *(
            ([command, "x.py", option, given], f"{option}{message}")
            for command, option in (("run", "--http"), ("bridge", "--http"), ("bridge", "--ws"), ("tap", "--http"))
            for given, message in (
                ("x", " must be a host and port, such as \"127.0.0.1:3000\", got 'x'"),
                (":3000", ': needs a host: "127.0.0.1:3000" for this machine'),
                ("65536", ": the port of http must be between 0 (any free port) and 65535, got '127.0.0.1:65536'"),
            )
        ),
    ],
)
def test_a_mistake_is_one_line(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith(f"trio-mcp: {message}")
    assert f"trio-mcp {words[0]} --help shows the options" in shown.err


@pytest.mark.parametrize(
    ("words", "own", "command"),
    [
        ("x.py -v", "x.py -v", ""),
        ("-v -- npx -y x -- y", "-v", "npx -y x -- y"),
        ("x.py -- -t a=1 -u", "x.py \0-t a=1 \0-u", ""),
        ("-- -t -- npx -y", "\0-t", "npx -y"),
        ("x.py --", "x.py", ""),
    ],
)
def test_a_command_never_begins_with_a_hyphen(words: str, own: str, command: str) -> None:
    assert divided(words.split()) == (own.split(" "), command.split())


def test_the_form_of_the_arguments_of_a_tool_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["call", "x.py", "find", "--text", "du"])
    assert "; arguments of a tool are like NAME=VALUE; " in capsys.readouterr().err


def test_names_may_begin_with_a_hyphen() -> None:
    called = run("call", "--revision", "2025-11-25", "--", "-f", "-x=1", "--", *HOSTILE)
    assert (called.stdout, called.stderr, called.returncode) == ("-f was called\n", "", 0)
    shown = run("task", "status", "--revision", "2025-11-25", "--", "-1", "--", *HOSTILE)
    assert (shown.stdout[:8], shown.stderr, shown.returncode) == ("working ", "", 0)
    refused = run("call", SERVER, "--", "-f")
    assert refused.stderr.startswith("trio-mcp: the server has no tool '-f'; it has ")


def test_options_may_stand_between_the_other_words() -> None:
    shown = run("call", SERVER, "--quiet", "forecast", "--json", "city=Oslo")
    assert (shown.stderr, shown.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("3000", "127.0.0.1:3000"), ("0", "127.0.0.1:0"), ("localhost:1", "localhost:1"), ("[::1]:0", "[::1]:0")],
)
def test_a_port_without_a_host_is_on_loopback(given: str, expected: str) -> None:
    assert http_address(given) == expected


@pytest.mark.parametrize("given", ["", "::1:3000", "[::1]", "localhost", "3000/x", "\N{SUPERSCRIPT TWO}"])
def test_other_addresses_are_refused(given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        http_address(given)


def test_tap_refuses_an_address_that_other_machines_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tap", "-o", "x", "--http", "0.0.0.0:0", "http://127.0.0.1:9/mcp"]) == 2
    why = "tap serves programs of this machine only: give a port, got '0.0.0.0:0'"
    assert capsys.readouterr().err == f"trio-mcp: {why}\n"
