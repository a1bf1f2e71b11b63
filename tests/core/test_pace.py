"""`Pace`: the progress that the other side must make while data waits for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_mcp.core import Pace


def test_a_window_begins_when_data_waits_and_ends_with_enough_progress() -> None:
    pace = Pace(10.0, 100.0)
    assert pace.deadline == math.inf
    pace.begin(5.0)
    pace.begin(9.0)
    assert pace.deadline == 15.0
    pace.move(999, 12.0)
    assert pace.deadline == 15.0
    pace.move(1, 14.0)
    assert pace.deadline == 24.0
    pace.move(10**9, 15.0)  # a large amount at once gives no more than one window
    assert pace.deadline == 25.0
    pace.move(999, 20.0)
    pace.end(20.0)
    assert pace.deadline == math.inf
    pace.begin(30.0)
    pace.move(1, 31.0)
    assert pace.deadline == 40.0


def test_data_that_follows_at_once_belongs_to_the_same_window() -> None:
    pace = Pace(10.0, 100.0)
    for now in (0.0, 3.0, 6.0, 9.0):
        pace.begin(now)
        assert pace.deadline == 10.0
        pace.move(10, now + 3)
        pace.end(now + 3)
    pace.begin(12.2)  # before this no data waited for a while
    assert pace.deadline == 22.2


@pytest.mark.parametrize(("seconds", "rate"), [(10.0, 0.0), (10.0, math.inf), (0.05, 1.0)])
def test_without_a_rate_any_progress_is_enough(seconds: float, rate: float) -> None:
    pace = Pace(seconds, rate)
    pace.begin(0.0)
    pace.move(0, 0.01)
    assert pace.deadline == seconds
    pace.move(1, 0.02)
    assert pace.deadline == 0.02 + seconds


def test_without_seconds_the_deadline_is_infinite() -> None:
    pace = Pace(math.inf, 100.0)
    pace.begin(0.0)
    assert pace.deadline == math.inf
    pace.move(1, 1.0)
    assert pace.deadline == math.inf


@given(st.lists(st.tuples(st.floats(0, 4), st.integers(0, 5000)), max_size=60))
def test_a_peer_that_is_not_late_has_moved_enough_in_each_window(moves: list[tuple[float, int]]) -> None:
    pace, now, moved = Pace(10.0, 100.0), 0.0, 0
    pace.begin(now)
    for wait, size in moves:
        now += wait
        if now > pace.deadline:
            break
        pace.move(size, now)
        moved += size
    whole_windows = int(min(now, pace.deadline) // 10)
    # Overlapping windows share no bytes, so each window but the last has 1000 bytes.
    assert moved >= 1000 * (whole_windows - 1) or now > pace.deadline
