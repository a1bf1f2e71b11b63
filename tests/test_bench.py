"""The benchmark: its rows can be chosen and run, and its report has the measured figures.

No test judges a measured figure: that is for the reader of the report.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from attrs import evolve

from tests.bench.__main__ import measured
from tests.bench.against import Comparison, subjects_of
from tests.bench.calls import HOME, SCENARIOS, CallTrace
from tests.bench.measures import Figure, Measure
from tests.bench.plot import Panel, drawn
from tests.bench.report import Outcome, as_json, shown
from tests.bench.rows import ROWS, Aim, Row, Seen, chosen
from tests.bench.works import WORKS

ROOT = Path(__file__).parent.parent


def test_rows_are_chosen_by_words_of_their_names() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row in chosen(row.name.upper().split())
    assert [row.name for row in chosen(["http", "modern", "16", "json"])] == ["HTTP, JSON, modern, 16 connections"]
    assert chosen(["stdio", "nothing"]) == []


def test_without_words_all_rows_with_an_aim_are_measured() -> None:
    asked = chosen([])
    assert {row.name for row in ROWS if any(aim != Aim() for aim in row.aims.values())} - {
        row.name for row in asked
    } == {f"HTTP, memory of an idle {kind} stream, each of 1,000" for kind in ("GET", "listen")}
    assert "HTTP, JSON, modern, 1 connection" not in {row.name for row in asked}


def outcome(row: Row, subject: str = "ours", **costs: Sequence[float]) -> Outcome:
    figures = {name.replace("_", "+"): [Figure(each, 0.25) for each in rounds] for name, rounds in costs.items()}
    return Outcome(row, subject, figures)


def row_of(aim: Aim, *, rate: bool = False) -> Row:
    return Row("a row", "µs", lambda stack, subject: lambda seconds: Figure(0), {"ours": aim}, rate=rate)


def test_an_aim_is_a_ratio_of_the_best_rounds() -> None:
    aim = Seen(bare=10, typescript=20, python=300).aim(26)
    assert (aim.bare, aim.peer) == (2.6, 1.3)
    seen = outcome(row_of(aim), ours=[30, 26, 52], bare=[10, 13, 13], typescript=[20, 20, 20], python=[100, 100, 100])
    assert seen.to_bare is not None
    assert (seen.to_bare.of_best, seen.to_bare.lowest, seen.to_bare.highest) == (2.6, 2.0, 4.0)
    assert seen.peer == "typescript"
    assert seen.met
    slower = outcome(row_of(aim), ours=[27], bare=[10], typescript=[20], python=[100])
    assert not slower.met
    assert shown(slower).endswith("  missed")
    assert "2.70 (2.70-2.70) > 2.60" in shown(slower)


def test_the_ratios_to_all_are_shown_side_by_side() -> None:
    seen = outcome(row_of(Aim(peer=1.0)), ours=[30], bare=[10], typescript=[20], python=[60])
    assert [each and each.of_best for each in seen.to_peers] == [1.5, 0.5]
    assert [each and each.at_most for each in seen.to_peers] == [1.0, None]  # of the better one
    for ratio in ("3.00 (3.00-3.00)", "1.50 (1.50-1.50) > 1.00", "0.50 (0.50-0.50)"):
        assert ratio in shown(seen)


def test_an_aim_may_be_an_absolute_figure() -> None:
    row = row_of(Aim(most=10.0))
    assert outcome(row, ours=[12, 10]).met
    assert not outcome(row, ours=[12, 11]).met
    assert "a row, µs (<= 10)" in shown(outcome(row, ours=[12, 11]))


def test_a_row_of_calls_is_measured_after_a_warm_up() -> None:
    times: list[float] = []

    def prepare(stack: object, subject: str) -> Measure:
        def measure(seconds: float) -> Figure:
            times.append(time.monotonic())
            time.sleep(0.01)
            return Figure(1)

        return measure

    begun = time.monotonic()
    row = Row("a row", "µs", prepare)
    assert len(measured(row, ["ours"], 2, 0.0, warm_up=0.1)["ours"]) == 2
    assert len(times) > 2
    assert times[-2] - begun >= 0.1
    times.clear()
    measured(evolve(row, warm=False), ["ours"], 2, 0.0, warm_up=0.1)
    assert len(times) == 2


def test_rounds_are_split_among_processes_and_failed_ones_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lives: list[str] = []

    def prepare(stack: ExitStack, subject: str) -> Measure:
        lives.append(subject)
        stack.callback(lives.append, f"{subject} has ended")
        assert subject != "bare" or len(lives) < 3
        return lambda seconds: Figure(len(lives))

    found = measured(Row("a row", "µs", prepare), ["ours", "bare"], 7, 0.0, 0.0, processes=3)
    assert {subject: len(figures) for subject, figures in found.items()} == {"ours": 7}
    begun = ["ours", "bare", "bare has ended", "ours has ended"]
    assert lives == [*begun, *begun, "ours", "ours has ended"]
    assert "without bare: AssertionError" in capsys.readouterr().err
    lives.clear()
    measured(Row("a row", "µs", prepare, rounds=2), ["ours"], 7, 0.0, 0.0, processes=3)
    assert lives == ["ours", "ours has ended"]


def test_a_subject_without_figures_is_not_compared() -> None:
    alone = outcome(row_of(Aim(1.0, 1.0)), ours=[30])
    assert (alone.to_bare, alone.to_peer, alone.met) == (None, None, True)


def test_each_codec_is_compared_with_the_bare_one_that_has_it() -> None:
    row = row_of(Aim())
    both = outcome(row, "ours+orjson", ours=[4], ours_orjson=[2], bare=[4], bare_orjson=[1])
    assert (both.bare, both.to_bare and both.to_bare.of_best) == ("bare+orjson", 2.0)
    assert outcome(row, "ours+orjson", ours_orjson=[2], bare=[4]).bare == "bare"


def test_a_rate_is_shown_per_second_and_compared_by_its_cost() -> None:
    seen = outcome(row_of(Aim(2.0), rate=True), ours=[4.0], bare=[2.5])
    (shown_as,) = as_json([seen])["rows"]
    assert shown_as["values"] == {"ours": 250.0, "bare": 400.0}
    assert shown_as["bare"]["of_best"] == 1.6
    assert shown_as["met"]


def compared(now: Sequence[float], before: Sequence[float]) -> Comparison:
    return Comparison(row_of(Aim()), "ours", [Figure(each) for each in now], [Figure(each) for each in before])


def test_a_row_is_dearer_beyond_the_limit_and_beyond_its_spread() -> None:
    steady = compared([104, 105, 106, 105, 105], [100] * 5)
    assert (steady.ratio, steady.spread) == (1.05, pytest.approx(0.005))
    assert steady.dearer(0.03)
    assert not steady.dearer(0.08)
    noisy = compared([90, 200, 105, 60, 180], [100] * 5)
    assert noisy.ratio == 1.05
    assert not noisy.dearer(0.03)


def test_rounds_are_compared_each_with_its_neighbour() -> None:
    drift = compared([100, 200, 400], [100, 200, 400])  # the machine slows down
    assert (drift.ratio, drift.spread) == (1, 0)


def test_a_row_of_ours_is_compared_with_the_same_codec_before() -> None:
    (large,) = chosen(["stdio", "5", "MB"])
    assert subjects_of(large) == ["ours", "before", "ours+orjson", "before+orjson"]
    seen = Comparison.of(large, {each: [Figure(1)] for each in subjects_of(large)})
    assert [each.subject for each in seen] == ["ours", "ours+orjson"]


def test_a_plot_has_each_point_and_each_label() -> None:
    panels = [Panel(f"<{name}>", "things", [1, 10, 5000], {"a": [1, 2, 3], "b": [40, 50, 60]}) for name in "xy"]
    picture = ElementTree.fromstring(drawn(panels, "µs"))
    kinds = [each.tag.partition("}")[2] for each in picture.iter()]
    assert kinds.count("circle") == 12
    said = [each.text for each in picture.iter() if each.text]
    assert said.count("things") == 2
    assert "<x>" in said
    assert "5,000" in said


def test_a_trace_counts_calls_and_resumptions_separately() -> None:
    code = "def items():\n yield 1\n yield 2\nasync def wait(): await step()\n"
    code += "import types\n@types.coroutine\ndef step(): yield\n"
    names: dict[str, Any] = {}
    exec(compile(code, f"{HOME}made_up.py", "exec"), names)
    trace = CallTrace()
    sys.setprofile(trace)
    try:
        trace.on = True
        assert [*names["items"]()] == [1, 2]
        waiting = names["wait"]()
        waiting.send(None)
        with pytest.raises(StopIteration):
            waiting.send(None)
    finally:
        sys.setprofile(None)
    assert trace.files == ["made_up.py"]
    assert trace.begun == 3
    assert len(trace.calls) > trace.begun


def test_the_functions_on_the_way_of_a_call_are_counted() -> None:
    command = [sys.executable, "-m", "tests.bench", "calls", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["files", "functions", "calls", "resumed", "changes"]
    assert [line[:44].rstrip() for line in lines[::2]] == [*SCENARIOS]
    for counts, files in zip(lines[::2], lines[1::2], strict=True):
        entered, functions, begun, resumed, changes = map(int, counts[44:].split())
        assert entered == len(files.split(", ")) <= functions <= begun + resumed
        assert entered <= changes < begun + resumed
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        "stdio, echo, modern, 64 in flight",
        "stdio, 2,000 reports of progress, each",
        "stdio, tools/list of 200 tools",
        "stdio, cold start to the first answer",
        "HTTP, SSE, session, 16 connections",
        "HTTP, SSE, modern, 2,000 reports of progress, each",
        "HTTP, memory of an idle GET stream, each of 1,000",
        "HTTP, a notice to 1,000 GET streams, 3 replicas on SQLite, by the clock",
        *(f"stdio, {work}, session, 64 in flight" for work in WORKS),
        *(f"HTTP, {work}, modern, 64 connections" for work in WORKS),
        "client, stdio, session, 16 in flight",
        "client, HTTP, modern, 16 in flight",
    ],
)
def test_a_row_can_be_measured(words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench", *words.split(), "--only", "ours", "bare"]
    quick = ["--rounds", "1", "--seconds", "0", "--warm-up", "0"]
    seen = tmp_path / "seen.json"
    done = subprocess.run(
        [*command, *quick, "--json", str(seen)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    (row,) = [each for each in json.loads(seen.read_text())["rows"] if each["subject"] == "ours"]
    assert row["row"] == words
    assert all(value > 0 for value in row["values"].values())
    assert row["values"].keys() == {"ours", "bare"}


def test_a_word_after_only_that_is_no_subject_is_refused() -> None:
    command = [sys.executable, "-m", "tests.bench", "--only", "ours", "bare", "stdio", "echo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument --only: invalid choice: 'stdio'" in done.stderr
