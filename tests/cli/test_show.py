"""`show`: messages linked to each other, as lines, as JSON and as a page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trio_mcp.cli.exchange import DiagramRow, as_json, counts, matching, rows_of  # the links of a diagram
from trio_mcp.cli.main import main  # the command line has no public API
from trio_mcp.cli.recording import RecordedEntry, Recording  # an exchange without a file

from .test_cli import on_terminal

ROOT = Path(__file__).parents[2]
ABOUT = {"trio-mcp tap": 1, "began": "2026-11-20T04:00:00.000+00:00", "kind": "stdio", "server": "weather"}
PROGRESS = {"progressToken": "p", "progress": 1, "total": 2, "message": "day 1"}
CALL: dict[str, Any] = {"name": "forecast", "arguments": {"city": "Oslo"}, "_meta": {"progressToken": "p"}}
TALK: Sequence[tuple[float, str, dict[str, Any]]] = (
    (0.0, "client", {"frame": {"id": 1, "method": "tools/call", "params": CALL}}),
    (0.001, "client", {"frame": {"id": 2, "method": "tools/call", "params": {"name": "slow"}}}),
    (0.002, "client", {"frame": {"id": "1", "method": "ping"}}),
    (0.003, "server", {"frame": {"method": "notifications/progress", "params": PROGRESS}}),
    (0.004, "server", {"stderr": "Traceback:"}),
    (0.005, "server", {"stderr": "ValueError: no city"}),
    (0.006, "server", {"frame": {"id": 1, "method": "elicitation/create", "params": {"message": "Which?"}}}),
    (0.007, "client", {"frame": {"id": 1, "result": {"action": "decline"}}}),
    (0.008, "server", {"frame": {"id": "1", "error": {"code": -32601, "message": "no ping"}}}),
    (0.009, "client", {"frame": {"method": "notifications/cancelled", "params": {"requestId": 2, "reason": "bored"}}}),
    (0.0125, "server", {"frame": {"id": 1, "result": {"isError": True, "content": [{"type": "text", "text": "no"}]}}}),
    (0.013, "server", {"text": "hello\nworld"}),
    (0.014, "client", {"frame": {"id": 9, "method": "resources/read", "params": {"uri": "notes://today"}}}),
    (0.015, "server", {"end": "ended with status 0"}),
)


def rows(talk: Sequence[tuple[float, str, dict[str, Any]]] = TALK) -> list[DiagramRow]:
    return rows_of(Recording(ABOUT, [RecordedEntry(*each) for each in talk]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    lines = [ABOUT, *({"at": at, "from": sender, **has} for at, sender, has in TALK)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_are_linked() -> None:
    found = rows()
    assert [(row.kind, row.title, row.status) for row in found] == [
        ("request", "tools/call forecast", "error"),
        ("request", "tools/call slow", "cancelled"),
        ("request", "ping", "error"),
        ("progress", "progress tools/call forecast", ""),
        ("stderr", "stderr, 2 lines", ""),
        ("request", "elicitation/create", "ok"),
        ("answer", "elicitation/create", "ok"),
        ("answer", "ping", "error"),
        ("cancelled", "cancelled tools/call slow", ""),
        ("answer", "tools/call forecast", "error"),
        ("text", "not JSON", ""),
        ("request", "resources/read notes://today", "open"),
        ("end", "the server", ""),
    ]
    links = {row.number: row.request.number for row in found if row.request is not None}
    assert links == {3: 0, 6: 5, 7: 2, 8: 1, 9: 0}  # the ids 1 of the two sides and "1" are different
    assert found[0].seconds == found[9].seconds == 0.0125
    assert counts(found) == {"requests": 5, "ok": 1, "error": 2, "cancelled": 1, "open": 1}
    assert found[4].frame == "Traceback:\nValueError: no city"


def test_an_answer_without_a_request_and_a_batch() -> None:
    batch = [{"id": 1, "method": "ping"}, {"method": "notifications/initialized"}, "nonsense"]
    found = rows(
        [(0, "client", {"frame": batch}), (1, "server", {"frame": [{"id": 1, "result": {}}, {"id": 2, "result": 3}]})]
    )
    assert [row.title for row in found] == ["ping", "initialized", "no message", "ping", "an answer without a request"]


def test_equal_ids_of_two_http_clients_are_distinguished() -> None:
    def entry(sender: str, number: int, **frame: Any) -> tuple[float, str, dict[str, Any]]:
        return 0.0, sender, {"http": {"number": number}, "frame": {"id": 1, **frame}}

    found = rows(
        [
            entry("client", 1, method="a"),
            entry("client", 2, method="b"),
            entry("server", 1, result={}),
            entry("server", 2, result={}),
        ]
    )
    assert [row.method for row in found] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("result", "summary"),
    [
        ({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}, "logging": {}}, "serverInfo": {"name": "a"}},
         "a · 2025-11-25 · capabilities tools, logging"),
        ({"tools": [{"name": "a"}, {"name": "b"}], "nextCursor": "c"}, "2 tools: a, b · nextCursor c"),
        ({"content": [{"type": "text", "text": "hello\nworld"}, {"type": "image", "data": "x"}]}, "hello world, image"),
        ({"content": [{"type": "text", "text": "1"}], "structuredContent": {"n": 1}, "_meta": {}}, '{"n": 1}'),
        ({"resultType": "input_required", "inputRequests": {"a": {"method": "ask"}}}, "input required ask"),
        ({"resultType": "task", "taskId": "t"}, "task"),
        (7, "7"),
    ],
)  # fmt: skip
def test_the_summary_of_a_result(result: Any, summary: str) -> None:
    found = rows(
        [(0, "client", {"frame": {"id": 1, "method": "a"}}), (1, "server", {"frame": {"id": 1, "result": result}})]
    )
    assert found[1].summary == summary


def test_an_error_without_an_id_belongs_to_its_http_request() -> None:
    error = {"id": None, "error": {"code": -32000, "message": "not initialized"}}
    found = rows(
        [
            (0, "client", {"http": {"number": 1}, "frame": {"id": 1, "method": "a"}}),
            (1, "server", {"http": {"number": 1, "status": 400}, "frame": error}),
        ]
    )
    assert (found[0].status, found[1].request) == ("error", found[0])


@pytest.mark.parametrize(
    ("revision", "status", "kind"), [("2026-07-28", "cancelled", "cancelled"), ("2025-06-18", "open", "end")]
)
def test_a_disconnect_cancels_a_modern_request(revision: str, status: str, kind: str) -> None:
    http = {"number": 1, "method": "POST", "path": "/mcp", "headers": {"mcp-protocol-version": revision}}
    frame = {"id": 1, "method": "tools/call", "params": {"name": "slow"}}
    found = rows(
        [
            (0, "client", {"http": http, "frame": frame}),
            (1, "client", {"http": {"number": 1}, "end": "the client has disconnected"}),
        ]
    )
    assert (found[0].status, found[1].kind) == (status, kind)


def test_a_filter_keeps_what_belongs_to_a_method() -> None:
    assert [row.number for row in matching(rows(), ["tools/*"])] == [0, 1, 3, 8, 9]
    assert [row.number for row in matching(rows(), ["ping", "resources/read"])] == [2, 7, 11]


def test_a_row_as_json() -> None:
    assert as_json(rows()[8]) == {
        "number": 8, "at": 0.009, "from": "client", "kind": "cancelled", "method": "notifications/cancelled",
        "title": "cancelled tools/call slow", "summary": "bored", "request": 1, "frame": TALK[9][2]["frame"],
    }  # fmt: skip


def test_the_diagram_in_a_pipe(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["show", str(file)]) == 0
    assert capsys.readouterr().out == (
        "weather · stdio · 2026-11-20T04:00:00.000+00:00\n"
        "         client                                                server\n"
        '  0.000  │─ ✗ tools/call forecast #1 {"city": "Oslo"} ─────────────▶│\n'
        "  0.001  │─ ⊘ tools/call slow #2 ──────────────────────────────────▶│\n"
        "  0.002  │─ ✗ ping #1 ─────────────────────────────────────────────▶│\n"
        "  0.003  │◀───────────── progress tools/call forecast 1 of 2 day 1 ─│\n"
        "  0.004  │                     stderr, 2 lines ValueError: no city  │\n"
        "  0.006  │◀────────────────────────── elicitation/create #1 Which? ─│\n"
        "  0.007  │─ ✓ elicitation/create #1 1 ms action decline ───────────▶│\n"
        "  0.008  │◀───────────────────────── ✗ ping #1 6 ms -32601 no ping ─│\n"
        "  0.009  │─ cancelled tools/call slow bored ───────────────────────▶│\n"
        "  0.013  │◀─────────────────── ✗ tools/call forecast #1 12.5 ms no ─│\n"
        "  0.013  │◀────────────────────────────────── not JSON hello world ─│\n"
        "  0.014  │─ … resources/read notes://today #9 ─────────────────────▶│\n"
        "  0.015  │                          the server ended with status 0  │\n"
        "5 requests, 1 answered, 2 failed, 1 cancelled, 1 without an answer; 0.015 s\n"
    )


def test_every_line_has_the_same_width(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (40, 60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["show", str(file)]) == 0
        lines = capsys.readouterr().out.splitlines()[2:-1]
        assert {len(line) for line in lines} == {columns - 1}


def test_wide_characters_and_control_characters_keep_their_lane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    frame = {"id": 1, "method": "tools/call", "params": {"name": "天気\x1b[31m", "arguments": {"a": "天" * 200}}}
    path = tmp_path / "t"
    path.write_text(f"{json.dumps(ABOUT)}\n{json.dumps({'at': 0, 'from': 'client', 'frame': frame})}\n")
    assert main(["show", str(path)]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert "\x1b" not in line
    assert len(line) + sum(each in "天気" for each in line) == 99


def test_full_frames(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--full", "--method", "ping"]) == 0
    out = capsys.readouterr().out
    assert '\n             "method": "ping"\n' in out
    assert '"code": -32601' in out
    assert "2 failed" not in out


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["about"], shown["counts"]["requests"], len(shown["frames"])) == (ABOUT, 5, 13)


def test_colours_on_a_terminal(file: Path) -> None:
    shown, status = on_terminal(("show", str(file)), ())
    assert status == 0
    assert "\x1b[31m✗ ping #1" in shown
    assert "\x1b[33mcancelled tools/call slow" in shown


def test_a_transcript_is_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.txt"
    path.write_text('> {"id": 1, "method": "ping"}\n< {"id": 1, "result": {}}\n< hello\n')
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 request, 1 answered; 0.000 s"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "is no recording; make one with: trio-mcp tap -o"),
        ("[1]\n[2]\n", "is no recording; make one with"),
        ("hello\nworld\n", "is no recording: line 1 is not JSON"),
        (json.dumps(ABOUT) + '\n{"at": 0}\n', "entry 2 must have the members 'at' and 'from'"),
        ("> {}\nhello\n", "line 2 of a transcript must begin with"),
    ],
)
def test_a_file_that_is_no_recording_is_an_error_of_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "t").write_text(text)
    assert main(["show", str(tmp_path / "t")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_an_unfinished_line_is_no_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text() + '{"at": 0.02, "fro')
    assert main(["show", str(file)]) == 0
    assert capsys.readouterr().out.endswith("0.015 s\n")


# The page.


def test_the_page_loads_nothing(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = file.read_text()
    evil = {"at": 1, "from": "server", "text": "</script><script>alert(1)</script><!--\udc80"}
    file.write_text(f"{lines}{json.dumps(evil)}\n")
    assert main(["show", str(file), "--html", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().err == f"{tmp_path / 'out.html'}: 14 frames; open it in a browser\n"
    text = (tmp_path / "out.html").read_text()
    assert text.count("</script>") == 2
    assert "default-src 'none'" in text
    assert not any(word in text for word in ("http://", "https://", "src=", "href="))
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["rows"][13]["frame"] == evil["text"]


def test_a_filtered_page_has_its_own_numbers(file: Path, tmp_path: Path) -> None:
    assert main(["show", str(file), "--html", str(tmp_path / "out.html"), "--method", "ping"]) == 0
    text = (tmp_path / "out.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [(row["number"], row.get("request"), row.get("answer")) for row in data["rows"]] == [
        (0, None, 1),
        (1, 0, None),
    ]


def test_a_page_that_cannot_be_written(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "--html", "/nonexistent/out.html"]) == 2
    assert capsys.readouterr().err == "trio-mcp: /nonexistent/out.html cannot be written: No such file or directory\n"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on this machine")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    talk = [ABOUT]
    for number in range(5000):
        at = number / 100
        talk.append({"at": at, "from": "client", "frame": {"id": number, "method": "tools/call", "params": CALL}})
        talk.append({"at": at + 0.005, "from": "server", "frame": {"id": number, "result": {"content": []}}})
    talk.insert(1, {"at": 0, "from": "server", "frame": {"method": "x", "params": {"a": "\u202eturned\x9b"}}})
    (tmp_path / "t").write_text("".join(json.dumps(line) + "\n" for line in talk))
    assert main(["show", str(tmp_path / "t"), "--html", str(tmp_path / "out.html")]) == 0
    shown = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'out.html'}"),
        ],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "HOME": str(tmp_path)},
    ).stdout  # fmt: skip
    assert "5000 answered" in shown
    assert 'style="height: 300030px;"' in shown
    assert "\\u202eturned\\u009b" in shown  # a direction mark would reverse the rest of the row
    assert 10 < shown.count('role="listitem"') < 100  # only the rows in view


def test_show_loads_no_event_loop() -> None:
    script = "import sys, trio_mcp.cli.show; print('trio' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
