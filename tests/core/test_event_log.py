"""The event log, from which a client resumes a broken stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import ByteBudget, Limits, UsageError
from trio_mcp.core.http import EventLog, LoggedEvent, MemoryEventLog, NotReplayable, Replay


def new_log(events: int = 100, size: int = 1000) -> MemoryEventLog:
    return MemoryEventLog(Limits(replay_events=events, replay_bytes=size))


def append(log: EventLog, stream: str, data: bytes) -> str:
    (id,) = log.append(stream, [data])
    return id


def data_of(replayed: object) -> list[bytes]:
    assert isinstance(replayed, Replay), replayed
    return [each.data for each in replayed.events]


def test_the_memory_log_implements_the_interface() -> None:
    log: EventLog = MemoryEventLog()
    assert log.open() == "1"


def test_the_events_of_one_write_are_logged_like_single_ones() -> None:
    log, alone = new_log(events=4, size=14), new_log(events=4, size=14)
    one, two = log.open(), log.open()
    assert (one, two) == (alone.open(), alone.open())
    for stream, data in ((one, [b"1", b"22"]), (two, [b"333"]), (one, [b"4444", b"55555"]), (two, [b"6" * 9, b"7"])):
        ids = log.append(stream, data)
        assert ids == [append(alone, stream, each) for each in data]
        assert [log.replay(id) for id in ids] == [alone.replay(id) for id in ids]
        assert len(log) == len(alone)
    assert list(log.append(one, [])) == []


@req("http-42")
def test_later_events_are_replayed_in_order() -> None:
    log = new_log()
    stream = log.open()
    ids = [append(log, stream, data) for data in (b"", b"a", b"b")]
    assert log.replay(ids[0]) == Replay(stream, (LoggedEvent(ids[1], b"a"), LoggedEvent(ids[2], b"b")), finished=False)
    assert data_of(log.replay(ids[1])) == [b"b"]
    assert data_of(log.replay(ids[2])) == []


def test_a_finished_stream_accepts_no_more_events() -> None:
    log = new_log()
    stream = log.open()
    primed = append(log, stream, b"")
    append(log, stream, b"answer")
    log.finish(stream)
    replayed = log.replay(primed)
    assert isinstance(replayed, Replay)
    assert replayed.finished
    for action in (lambda: append(log, stream, b"more"), lambda: log.finish(stream), lambda: append(log, "99", b"x")):
        with pytest.raises(UsageError, match="not open"):
            action()
    assert data_of(log.replay(primed)) == [b"answer"]


@req("http-40", "http-45", "http-123")
def test_ids_are_unique_in_the_session_and_name_their_stream() -> None:
    log = new_log()
    streams = [log.open() for _ in range(3)]
    ids = [append(log, stream, b"") for _ in range(3) for stream in streams]
    assert len(set(ids)) == 9
    for stream in streams:
        assert [each for each in ids if each.startswith(f"{stream}-")] == [f"{stream}-{n}" for n in range(3)]


@pytest.mark.parametrize(
    "event_id",
    ["", "-", "1", "1-", "-0", "1-1", "1-00", "1--1", "2-0", "1-0 ", "1-x", "1-²", "1-٠", f"1-{'9' * 5000}", "\0"],
)
def test_an_unknown_id_cannot_be_resumed_from(event_id: str) -> None:
    log = new_log()
    append(log, log.open(), b"a")
    outcome = log.replay(event_id)
    assert isinstance(outcome, NotReplayable)
    assert "known" in outcome.why


def test_too_many_events_push_out_the_oldest_of_all_streams() -> None:
    log = new_log(events=3)
    one, two = log.open(), log.open()
    first = [append(log, one, data) for data in (b"a", b"b")]
    second = [append(log, two, data) for data in (b"c", b"d", b"e")]
    assert len(log) == 3
    assert data_of(log.replay(second[0])) == [b"d", b"e"]
    outcome = log.replay(first[0])
    assert isinstance(outcome, NotReplayable)
    assert "no longer kept" in outcome.why
    # No event followed the last one, so its replay is complete.
    assert data_of(log.replay(first[1])) == []


def test_too_many_bytes_push_out_the_oldest_too() -> None:
    log = new_log(size=10)
    stream = log.open()
    ids = [append(log, stream, b"12345") for _ in range(3)]
    assert len(log) == 2
    assert data_of(log.replay(ids[0])) == [b"12345"] * 2
    big = append(log, stream, b"x" * 11)
    assert len(log) == 0
    assert isinstance(log.replay(ids[2]), NotReplayable)
    assert data_of(log.replay(big)) == []
    append(log, stream, b"1234567890")
    assert data_of(log.replay(big)) == [b"1234567890"]


def test_a_finished_stream_is_forgotten_with_its_last_event() -> None:
    log = new_log(events=1)
    stream = log.open()
    id = append(log, stream, b"answer")
    log.finish(stream)
    append(log, log.open(), b"other")
    outcome = log.replay(id)
    assert isinstance(outcome, NotReplayable)
    assert "known" in outcome.why
    empty = log.open()
    log.finish(empty)
    with pytest.raises(UsageError):
        append(log, empty, b"x")


def test_names_of_streams_are_not_reused_even_after_clear() -> None:
    log = new_log()
    stream = log.open()
    id = append(log, stream, b"a" * 1000)
    log.clear()
    assert len(log) == 0
    assert isinstance(log.replay(id), NotReplayable)
    again = log.open()
    assert again != stream
    assert data_of(log.replay(append(log, again, b"a" * 1000))) == []
    assert len(log) == 1


@req("http-40", "http-42", "http-43")
@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=6)), max_size=40),
    st.integers(1, 12),
    st.integers(0, 40),
)
@settings(max_examples=80)
def test_a_replay_is_complete_and_of_one_stream_or_is_refused(
    sent: list[tuple[int, bytes]], events: int, size: int
) -> None:
    log = new_log(events, size)
    streams = [log.open() for _ in range(4)]
    logged = [(which, append(log, streams[which], data), data) for which, data in sent]
    assert len({id for _, id, _ in logged}) == len(logged)
    assert len(log) <= events
    for place, (which, id, _) in enumerate(logged):
        followed = [LoggedEvent(i, data) for w, i, data in logged[place + 1 :] if w == which]
        outcome = log.replay(id)
        if isinstance(outcome, Replay):
            assert outcome == Replay(streams[which], tuple(followed), finished=False)
        else:
            assert followed


# The byte budget.


def replayed(log: MemoryEventLog, event_id: str) -> list[bytes] | None:
    """The data of the events that followed, or None if they are no longer kept."""
    replay = log.replay(event_id)
    return [event.data for event in replay.events] if isinstance(replay, Replay) else None


EVENT = 512  # bytes charged for each event, in addition to its data


def test_a_log_drops_its_oldest_events_when_its_holder_needs_the_bytes() -> None:
    budget = ByteBudget(Limits(bytes_in_all=28_000))
    logs = {name: MemoryEventLog(account=budget.account(name[0])) for name in ("a1", "a2", "b1")}
    for log in logs.values():
        stream = log.open()
        log.append(stream, [b""])  # a client starts with the id of this event
        for _ in range(5):
            log.append(stream, [b"x" * 100])
    assert budget.shares.held == 3 * (500 + 6 * EVENT)
    account = budget.account("a")
    assert account.take(12_700) is None
    assert budget.shares.held == 12_700 + 1300 + 15 * EVENT
    assert [replayed(log, "1-1") for log in logs.values()] == [None, [b"x" * 100] * 4, [b"x" * 100] * 4]
    assert replayed(logs["a1"], "1-2") == [b"x" * 100] * 3
    account.close()
    for log in logs.values():
        log.clear()
    assert budget.shares.held == 0
    assert not budget._logs


def test_an_event_over_the_budget_is_not_kept_for_replay() -> None:
    budget = ByteBudget(Limits(bytes_in_all=8000))
    log = MemoryEventLog(account=budget.account("a"))
    stream = log.open()
    first, second = log.append(stream, [b"x" * 100, b"y" * 100])
    account = budget.account("a")
    assert account.take(5400) is None
    [third] = log.append(stream, [b"z" * 400])
    assert [replayed(log, id) for id in (first, second)] == [None, None]
    assert replayed(log, third) == []
    account.close()
    log.append(stream, [b"w"])
    assert replayed(log, third) == [b"w"]
    assert replayed(log, second) is None
    log.finish(stream)
    log.clear()
    assert budget.shares.held == 0


def test_a_log_drops_its_own_events_when_its_session_is_at_its_limit() -> None:
    log = MemoryEventLog(account=ByteBudget(Limits(bytes_each=1500)).account("a"))
    stream = log.open()
    first, second, third = [log.append(stream, [b"x" * 100])[0] for _ in range(3)]
    assert replayed(log, first) == [b"x" * 100] * 2
    log.append(stream, [b"y" * 100])
    assert replayed(log, first) is None
    assert replayed(log, second) == [b"x" * 100, b"y" * 100]
    assert replayed(log, third) == [b"y" * 100]


def test_the_names_of_streams_start_with_the_prefix_of_the_log() -> None:
    log = MemoryEventLog(prefix="x.")
    stream = log.open()
    assert (stream, log.append(stream, [b"a"])) == ("x.1", ["x.1-0"])
    assert stream in log
    assert "x.2" not in log
