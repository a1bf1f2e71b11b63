"""Hostile servers: escape sequences, invalid schemas, paths as names, huge texts, and lists without an end."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.cli.in_process import run
from tests.cli.test_cli import on_terminal

SERVER = (sys.executable, str(Path(__file__).parent / "hostile_server.py"))
SERVER_WORDS = ("--revision", "2025-11-25", "--", *SERVER)
OURS = re.compile(r"\x1b\[[0-9;]*m")
full = pytest.mark.full


def with_server(*arguments: str) -> tuple[str, ...]:
    return (*arguments, *SERVER_WORDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ("call", "text"),
        pytest.param(("list",), marks=full),
        pytest.param(("list", "--schemas"), marks=full),
        pytest.param(("list", "--json"), marks=full),
        pytest.param(("call", "structure"), marks=full),
        pytest.param(("call", "text", "--json"), marks=full),
        pytest.param(("call", "error"), marks=full),
        pytest.param(("call", "error", "--verbose"), marks=full),
        pytest.param(("call", "unknown"), marks=full),
        pytest.param(("read", "a:b"), marks=full),
        pytest.param(("prompt", "p"), marks=full),
        pytest.param(("complete", "p", "a"), marks=full),
        pytest.param(("task", "status", "1"), marks=full),
    ],
)
def test_no_escape_sequence_of_a_server_reaches_the_terminal(arguments: Sequence[str]) -> None:
    shown, _ = on_terminal(with_server(*arguments), [])
    rest = OURS.sub("", shown)
    assert {each for each in rest if not each.isprintable()} <= {"\n"}
    assert "owned" in rest


def test_a_pipe_gets_a_text_as_it_is() -> None:
    assert run(*with_server("read", "a:b")).stdout == "\x1b]0;owned\x07\x9b2J\u202e\n"


@full
def test_the_name_of_a_tool_is_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    shown = run(*with_server("call", "../../far.a", "--save", str(folder)))
    assert shown.returncode == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["_.._far.a-1.png", "_.._far.a-2.png"]
    assert {path.parent for path in files} == {folder}


@full
@pytest.mark.parametrize(
    "arguments", [("call", "../../far.a", "--save", "/nonexistent"), ("read", "a:b", "-o", "/nonexistent/file")]
)
def test_a_file_that_cannot_be_written_is_one_line(arguments: Sequence[str]) -> None:
    shown = run(*with_server(*arguments))
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert re.match("trio-mcp: /nonexistent/.* cannot be written: No such file or directory", shown.stderr)


@full
def test_a_list_stays_short() -> None:
    shown = run(*with_server("list"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "    [a]  any\n    [b]  1 | 2\n" in shown.stdout
    assert len(shown.stdout) < 40_000
    assert len(json.loads(run(*with_server("list", "--json")).stdout)["tools"]) == 108


@full
@pytest.mark.parametrize(("tool", "word"), [("odd", "a=1"), ("odd", "c=1"), ("odd", "d=1"), ("none", "x=1")])
def test_an_odd_schema_is_no_traceback(tool: str, word: str) -> None:
    shown = run(*with_server("call", tool, word))
    assert "Traceback" not in shown.stderr


@full
def test_an_error_names_a_few_of_many_tools() -> None:
    assert run(*with_server("call", "unknown")).stderr.endswith(" and 78 more\n")


@full
def test_pages_in_a_circle_end() -> None:
    shown = run("task", "list", *SERVER_WORDS)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "the same nextCursor twice" in shown.stderr


class Page(BaseHTTPRequestHandler):
    """A page for browsers, at each path."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>hello</p>")

    def log_message(self, *_: object) -> None:
        return


@full
def test_a_page_for_browsers_is_no_mcp_server() -> None:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = run("list", f"http://127.0.0.1:{server.server_port}/mcp", "--header", "Authorization: Bearer abcdefgh")
        server.shutdown()
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (3, "", 1)
    assert shown.stderr.startswith("trio-mcp: this is no MCP server: ")
    assert "abcdefgh" not in shown.stderr


def test_a_list_without_an_end_is_the_fault_of_the_server() -> None:
    shown = run(*with_server("list"), "endless")
    assert (shown.returncode, shown.stdout) == (1, "")
    why = "the server gave more than 1000 pages of a list (Limits.pages), always with a new nextCursor"
    assert shown.stderr == f"trio-mcp: {why}\n"


@full
def test_check_ends_with_a_list_without_an_end() -> None:
    shown = run(*with_server("check"), "endless")
    assert "resources/templates/list was read up to page 1000, and has no end so far" in shown.stdout
