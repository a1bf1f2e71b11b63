"""`Rates`: the rate of requests of each client."""

from __future__ import annotations

import math

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from trio_mcp.core import UsageError
from trio_mcp.server import Rates, run


async def test_without_a_rate_no_client_waits_or_is_remembered() -> None:
    rates = Rates(math.inf)
    assert [rates.wait("a") for _ in range(10_000)] == [0.0] * 10_000
    assert not rates._buckets


@pytest.mark.parametrize(
    ("rate", "burst", "wait"), [(10.0, 10, 0.1), (1.0, 1, 1.0), (0.5, 1, 2.0), (0.01, 1, 100.0), (2.5, 2, 0.2)]
)
async def test_a_burst_and_then_the_rate(rate: float, burst: int, wait: float, mock_clock: MockClock) -> None:
    rates = Rates(rate)
    assert [rates.wait("a") for _ in range(burst)] == [0.0] * burst
    assert rates.wait("a") == pytest.approx(wait)
    mock_clock.jump(wait * 0.9)
    assert rates.wait("a") == pytest.approx(wait * 0.1)  # a refused request is not counted
    mock_clock.jump(wait * 0.11)
    assert rates.wait("a") == 0
    assert rates.wait("a") > 0
    assert rates.wait("b") == 0  # another client
    mock_clock.jump(1e6)
    assert [rates.wait("a") > 0 for _ in range(burst + 1)] == [False] * burst + [True]


async def test_the_clients_idle_for_longest_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST", 3)
    rates = Rates(1.0)
    for client in ("a", "b", "c", "a", "d"):
        rates.wait(client)
    assert [rates.wait(client) > 0 for client in ("a", "c", "d", "b")] == [True, True, True, False]
    assert len(rates._buckets) == 3


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_a_rate_must_be_above_zero(rate: float) -> None:
    with pytest.raises(UsageError, match=r"Limits\.request_rate"):
        Rates(rate)


@given(
    st.floats(0.01, 1000),
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5)), max_size=60),
)
def test_the_rate_and_the_burst_are_never_exceeded(rate: float, requests: list[tuple[str, float]]) -> None:
    async def main() -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        rates, allowed, began = Rates(rate), {"a": 0, "b": 0}, trio.current_time()
        for client, pause in requests:
            clock.jump(pause)
            wait = rates.wait(client)
            assert 0 <= wait <= 1 / rate + 1e-9
            allowed[client] += not wait
        most = max(rate, 1) + (trio.current_time() - began) * rate
        assert all(count <= most + 1e-6 for count in allowed.values())

    trio.run(main, clock=MockClock())
