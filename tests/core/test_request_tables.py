"""The tables of the states of requests: their shape, and the transitions that must not exist.

`test_races` shows that each cell is right: it changes the cell, and a rule must break.
"""

from __future__ import annotations

import pytest

from tests.requirements import req
from trio_mcp.core import (
    CALLING,
    SERVING,
    Action,
    LinkKind,
    RequestEvent,
    State,
    Table,
    UsageError,
    first_state,
    step,
)

TABLES = [
    pytest.param(tables[link], id=f"{side}-{link.name}")
    for side, tables in (("calling", CALLING), ("serving", SERVING))
    for link in LinkKind
]
METHODS = ("tools/call", "initialize", "server/discover", "subscriptions/listen")
SENDING = {Action.SEND_CANCEL, Action.SEND_CANCEL_AND_REPORT}


@pytest.mark.parametrize("table", TABLES)
def test_each_row_of_a_table_has_a_cell_for_each_event_of_the_link(table: Table) -> None:
    assert len({frozenset(row) for row in table.values()}) == 1


@pytest.mark.parametrize("table", TABLES)
def test_every_state_can_be_reached_and_left(table: Table) -> None:
    reached = {first_state(table, method) for method in METHODS}
    for _ in State:
        reached |= {after for state in reached - {State.GONE} for after, _ in table[state].values()}
    assert reached == {*table, State.GONE}
    assert all(any(after is not state for after, _ in row.values()) for state, row in table.items())


def test_no_two_tables_share_a_row() -> None:
    rows = [row for tables in (CALLING, SERVING) for table in tables.values() for row in table.values()]
    assert len({id(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("link", LinkKind)
def test_only_a_link_with_several_streams_can_lose_one(link: LinkKind) -> None:
    seen = {event for table in (CALLING[link], SERVING[link]) for row in table.values() for event in row}
    assert (RequestEvent.STREAM_LOST in seen) is (link is not LinkKind.DUPLEX)


@pytest.mark.parametrize("link", LinkKind)
def test_only_a_link_with_a_single_stream_has_an_end_of_input(link: LinkKind) -> None:
    seen = {event for table in (CALLING[link], SERVING[link]) for row in table.values() for event in row}
    assert (RequestEvent.INPUT_ENDED in seen) is (link is LinkKind.DUPLEX)


def test_the_end_of_input_ends_waiting_requests_and_keeps_served_ones() -> None:
    for state, row in SERVING[LinkKind.DUPLEX].items():
        assert row[RequestEvent.INPUT_ENDED] == (state, Action.NOTHING)
    for row in CALLING[LinkKind.DUPLEX].values():
        assert row[RequestEvent.INPUT_ENDED] == (State.GONE, Action.REPORT)


@pytest.mark.parametrize("link", LinkKind)
@pytest.mark.parametrize(
    ("method", "state"),
    [
        ("tools/call", State.OPEN),
        ("initialize", State.FIXED),
        ("server/discover", State.FIXED),
        ("subscriptions/listen", State.STANDING),
    ],
)
def test_a_request_begins_in_the_state_of_its_method(link: LinkKind, method: str, state: State) -> None:
    for table in (CALLING[link], SERVING[link]):
        assert first_state(table, method) is (state if state in table else State.OPEN)
    assert first_state(CALLING[LinkKind.DUPLEX], method) is state


@req("cancel-02")
@pytest.mark.parametrize("link", LinkKind)
def test_no_event_of_initialize_sends_a_cancellation(link: LinkKind) -> None:
    state = first_state(CALLING[link], "initialize")
    row = CALLING[link][state]
    # An exchange has no handshake, and no message cancels a request there.
    assert (state is State.FIXED) is (link is not LinkKind.EXCHANGE)
    assert not SENDING & {action for _, action in row.values()}


@req("cancel-15")
def test_no_event_on_an_exchange_sends_a_cancellation() -> None:
    actions = {
        action
        for table in (CALLING, SERVING)
        for row in table[LinkKind.EXCHANGE].values()
        for _, action in row.values()
    }
    assert not actions & {*SENDING, Action.WRITE_AND_TEAR_DOWN}


@pytest.mark.parametrize("table", TABLES)
def test_a_stopped_request_sends_no_more_messages(table: Table) -> None:
    for row in table.values():
        for after, action in row.values():
            if action is Action.STOP_HANDLER:
                assert after is State.CANCELLED
                assert {action for _, action in table[after].values()} == {Action.NOTHING}


def test_a_step_returns_the_new_state_and_the_action() -> None:
    assert step(CALLING[LinkKind.DUPLEX], State.OPEN, RequestEvent.CANCEL) == (State.GONE, Action.SEND_CANCEL)


@pytest.mark.parametrize(
    ("table", "state", "seen"),
    [
        (CALLING[LinkKind.DUPLEX], State.OPEN, RequestEvent.STREAM_LOST),
        (CALLING[LinkKind.DUPLEX], State.GONE, RequestEvent.ANSWER),
        (CALLING[LinkKind.SESSION], State.STANDING, RequestEvent.ANSWER),
        (SERVING[LinkKind.EXCHANGE], State.OPEN, RequestEvent.TEARDOWN),
    ],
)
def test_an_impossible_step_is_a_usage_error(table: Table, state: State, seen: RequestEvent) -> None:
    with pytest.raises(UsageError, match=f"{seen.name} cannot happen to a request that is {state.name}"):
        step(table, state, seen)
