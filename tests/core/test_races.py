"""The events of one or two requests in every order, and a test that each cell of the tables of states matters.

`races` has the model, its rules and its functions.  This module has the plans, the number of orders of each (so that
no order can get lost unnoticed), and a set of short scripts that together detect any change to the tables.
"""

from __future__ import annotations

import pytest

from tests.core.races import (
    DUPLEX,
    EXCHANGE,
    LISTEN,
    SERVER,
    SESSION,
    Plan,
    PlannedRequest,
    explore,
    play_script,
)
from tests.requirements import req
from trio_mcp.core import CALLING, SERVING, Action, LinkKind, RequestEvent, State, Table

SAMPLE = "sampling/createMessage"
FULL = "progress cancel error garble teardown rogue"

SINGLE_REQUESTS = {
    "call": (Plan(DUPLEX, (PlannedRequest(may=FULL, deadline=5),), "link"), 9_575_816),
    "opening": (Plan(DUPLEX, (PlannedRequest("initialize", FULL, deadline=5),), "link"), 7_697_502),
    "subscription": (
        Plan(DUPLEX, (PlannedRequest(LISTEN, "note cancel error teardown rogue", deadline=5),), "link"),
        9_130_584,
    ),
    "failing call": (Plan(DUPLEX, (PlannedRequest(may="progress cancel fail", deadline=5),), "link"), 93_972),
    "queued": (Plan(DUPLEX, (PlannedRequest(may="progress cancel", deadline=5),), "link", lazy=True), 54_690_112),
    "session call": (
        Plan(SESSION, (PlannedRequest(may="progress cancel error", deadline=5),), "stream link"),
        12_505_936,
    ),
    "session opening": (
        Plan(SESSION, (PlannedRequest("initialize", "cancel rogue teardown", deadline=5),), "stream link"),
        109_032_032,
    ),
    "session failing call": (Plan(SESSION, (PlannedRequest(may="progress cancel fail"),), "stream link"), 2_661_542),
    "session queued": (Plan(SESSION, (PlannedRequest(may="progress cancel"),), "link", lazy=True), 677_628),
    "half-closed call": (Plan(DUPLEX, (PlannedRequest(may="cancel fail rogue"),), "input link"), 1_067_202),
    "half-closed late call": (
        Plan(DUPLEX, (PlannedRequest(may="progress cancel error", deadline=5),), "input"),
        513_074,
    ),
    "half-closed opening": (
        Plan(DUPLEX, (PlannedRequest("initialize", "cancel rogue", deadline=5),), "input link"),
        2_536_116,
    ),
    "half-closed subscription": (
        Plan(DUPLEX, (PlannedRequest(LISTEN, "note cancel teardown"),), "input link"),
        4_301_842,
    ),
    "half-closed server's call": (
        Plan(DUPLEX, (PlannedRequest(SAMPLE, "progress cancel", by=SERVER, deadline=5),), "input link"),
        2_945_380,
    ),
    "server's call": (
        Plan(DUPLEX, (PlannedRequest(SAMPLE, "progress cancel rogue", by=SERVER, deadline=5),), "link"),
        131_831,
    ),
    "session server's call": (
        Plan(SESSION, (PlannedRequest(SAMPLE, "progress cancel error", by=SERVER, deadline=5),), "link"),
        28_190,
    ),
    "exchange": (Plan(EXCHANGE, (PlannedRequest(may="progress cancel error", deadline=5),), "stream link"), 698_370),
    "exchange subscription": (
        Plan(EXCHANGE, (PlannedRequest(LISTEN, "note cancel teardown"),), "stream link"),
        300_192,
    ),
    "exchange discover": (
        Plan(EXCHANGE, (PlannedRequest("server/discover", "cancel rogue", deadline=5),), "stream link"),
        424_144,
    ),
    "exchange failing call": (
        Plan(EXCHANGE, (PlannedRequest(may="progress cancel fail", deadline=5),), "stream link"),
        2_845_670,
    ),
    "exchange queued": (Plan(EXCHANGE, (PlannedRequest(may="progress cancel"),), "stream", lazy=True), 121_616),
}
LONG = {
    "call", "opening", "subscription", "queued", "session call", "session opening", "exchange failing call",
    "half-closed late call", "half-closed opening", "half-closed subscription", "half-closed server's call",
}  # fmt: skip
PAIRS_OF_REQUESTS = {
    "calls": (Plan(DUPLEX, (PlannedRequest(may="progress cancel"), PlannedRequest(may="progress cancel"))), 3_773_068),
    "calls, link lost": (Plan(DUPLEX, (PlannedRequest(may="cancel"), PlannedRequest(may="cancel")), "link"), 153_408),
    "calls, first is late": (
        Plan(DUPLEX, (PlannedRequest(may="cancel", deadline=4), PlannedRequest(may="cancel", deadline=5))),
        2_833_441,
    ),
    "calls, second is late": (Plan(DUPLEX, (PlannedRequest(deadline=5), PlannedRequest(deadline=4)), "link"), 468_107),
    "opening and call": (
        Plan(DUPLEX, (PlannedRequest("initialize", "cancel rogue"), PlannedRequest(may="cancel")), "link"),
        2_140_086,
    ),
    "subscription and call": (
        Plan(DUPLEX, (PlannedRequest(LISTEN, "note cancel"), PlannedRequest(may="progress")), "link"),
        2_657_978,
    ),
    "queued calls": (
        Plan(DUPLEX, (PlannedRequest(may="progress cancel"), PlannedRequest(may="progress")), lazy=True),
        5_097_086_772,
    ),
    "each way": (
        Plan(DUPLEX, (PlannedRequest(may="progress cancel"), PlannedRequest(SAMPLE, "cancel", by=SERVER)), "link"),
        3_739_470,
    ),
    "one in the other": (
        Plan(DUPLEX, (PlannedRequest(may="cancel"), PlannedRequest(SAMPLE, "progress cancel", SERVER, 0, 5)), "link"),
        11_128_610,
    ),
    "half-closed calls": (
        Plan(DUPLEX, (PlannedRequest(may="cancel"), PlannedRequest(may="cancel")), "input"),
        4_081_978,
    ),
    "half-closed, each way": (
        Plan(DUPLEX, (PlannedRequest(may="cancel"), PlannedRequest(SAMPLE, "progress", by=SERVER)), "input"),
        3_592_473,
    ),
    "half-closed, one in the other": (
        Plan(DUPLEX, (PlannedRequest(may="cancel"), PlannedRequest(SAMPLE, "cancel", SERVER, 0)), "input"),
        901_185,
    ),
    "session calls": (Plan(SESSION, (PlannedRequest(may="cancel"), PlannedRequest(may="cancel")), "link"), 606_224),
    "session calls with progress": (
        Plan(SESSION, (PlannedRequest(may="progress cancel"), PlannedRequest(may="progress"))),
        413_028,
    ),
    "session calls, streams lost": (
        Plan(SESSION, (PlannedRequest(), PlannedRequest(may="cancel")), "stream"),
        312_236_925,
    ),
    "session, each way": (
        Plan(SESSION, (PlannedRequest(may="cancel"), PlannedRequest(SAMPLE, "progress cancel", by=SERVER)), "link"),
        12_389_746,
    ),
    "session, one in the other": (
        Plan(SESSION, (PlannedRequest(may="cancel"), PlannedRequest(SAMPLE, "cancel", SERVER, 0, 5)), "link"),
        1_137_618,
    ),
    "exchanges, link lost": (
        Plan(EXCHANGE, (PlannedRequest(may="cancel"), PlannedRequest(may="cancel")), "link"),
        7_187_720,
    ),
    "exchanges, streams lost": (
        Plan(EXCHANGE, (PlannedRequest(may="cancel"), PlannedRequest(may="cancel")), "stream"),
        8_150_680,
    ),
    "exchanges, late": (
        Plan(EXCHANGE, (PlannedRequest(may="cancel", deadline=5), PlannedRequest(deadline=4))),
        1_159_022,
    ),
}


@req("cancel-02", "cancel-03", "cancel-05", "cancel-06", "cancel-15", "cancel-18", "cancel-21", "prog-05", "prog-09")
@pytest.mark.parametrize(
    ("plan", "orders"),
    [pytest.param(*each, marks=[pytest.mark.full] if name in LONG else []) for name, each in SINGLE_REQUESTS.items()],
    ids=SINGLE_REQUESTS,
)
def test_one_request_obeys_the_rules_in_every_order(plan: Plan, orders: int) -> None:
    assert explore(plan).orders == orders


@req("cancel-02", "cancel-03", "cancel-05", "cancel-06", "cancel-15", "cancel-18", "cancel-21", "prog-05", "prog-09")
@pytest.mark.full
@pytest.mark.timeout(600)  # millions of orders
@pytest.mark.parametrize(("plan", "orders"), PAIRS_OF_REQUESTS.values(), ids=PAIRS_OF_REQUESTS)
def test_two_requests_obey_the_rules_in_every_order(plan: Plan, orders: int) -> None:
    assert explore(plan).orders == orders


# Scripts: single orders, no more than are needed to detect every change to a table.

ALL = FULL + " note fail"
CALL, OPENING, SUBSCRIPTION = (
    PlannedRequest(each, ALL, deadline=5, times=9) for each in ("tools/call", "initialize", LISTEN)
)

ON_ALL_LINKS = [
    "send, arrive, progress, note, arrive, answer, progress, arrive",
    "send, arrive, progress, arrive, error, note, arrive",
    "send, arrive, progress, arrive, garble, arrive",
    "send, arrive, progress, arrive, teardown, arrive, teardown, arrive, cancel, arrive, answer, arrive",
    "send, arrive, progress, arrive, clock, tick, arrive, error, arrive",
    "send, arrive, progress, fail, arrive, fail, answer, arrive",
    "send, arrive, progress, note, cut, lost 0, lost 1, answer",
    "send, arrive, note, arrive, cut, lost 1, lost 0, progress, error",
]
WITH_CANCELLATION_SENT = [
    "send, arrive, progress, note, arrive, cancel, arrive, rogue, arrive, note, answer",
    "send, arrive, cancel, arrive, cut, lost 1, lost 0, note, answer",
]
WITHOUT_CANCELLATION_SENT = [
    "send, arrive, note, rogue, arrive, rogue, arrive, progress, arrive, cancel, arrive, error, arrive"
]
WITH_INPUT_ENDED = [
    "send, arrive, progress, note, close 0, end 1, progress, note, arrive, answer, arrive",
    "send, close 0, arrive, end 1, note, arrive, error, arrive, close 1, end 0",
    "send, arrive, close 1, end 0, progress, note, answer, cancel, fail",
    "send, close 1, end 0, arrive, cut, lost 0, lost 1, answer",
]
WITH_CANCEL_BEFORE_INPUT_ENDED = [
    "send, arrive, cancel, arrive, close 0, end 1, note, progress, answer, arrive",
]
WITH_RESUMED_STREAMS = [
    "send, arrive, break, client_loses, server_loses, progress, arrive, cancel, arrive, answer, arrive",
    "send, arrive, break, cancel, arrive, server_loses, progress, error",
]
WITH_STREAM_FOR_EACH_REQUEST = [
    "send, arrive, progress, note, break, client_loses, server_loses, progress, note, answer",
    "send, arrive, note, arrive, cancel, rogue, arrive, rogue, note, server_loses, note, arrive, error",
    "send, arrive, cancel, server_loses, cut, lost 1, lost 0, answer",
]
SCRIPTS: dict[LinkKind, list[tuple[PlannedRequest, list[str]]]] = {
    DUPLEX: [
        (CALL, ON_ALL_LINKS + WITH_CANCELLATION_SENT + WITH_INPUT_ENDED + WITH_CANCEL_BEFORE_INPUT_ENDED),
        (OPENING, ON_ALL_LINKS + WITHOUT_CANCELLATION_SENT + WITH_INPUT_ENDED),
        (SUBSCRIPTION, ON_ALL_LINKS + WITH_CANCELLATION_SENT + WITH_INPUT_ENDED + WITH_CANCEL_BEFORE_INPUT_ENDED),
    ],
    SESSION: [
        (CALL, ON_ALL_LINKS + WITH_CANCELLATION_SENT + WITH_RESUMED_STREAMS),
        (OPENING, ON_ALL_LINKS + WITHOUT_CANCELLATION_SENT + WITH_RESUMED_STREAMS),
    ],
    EXCHANGE: [
        (CALL, ON_ALL_LINKS + WITH_STREAM_FOR_EACH_REQUEST),
        (SUBSCRIPTION, ON_ALL_LINKS + WITH_STREAM_FOR_EACH_REQUEST),
    ],
}


def play_all_scripts(link: LinkKind) -> None:
    for planned, scripts in SCRIPTS[link]:
        for script in scripts:
            play_script(Plan(link, (planned,), "stream link input" if link is DUPLEX else "stream link"), script)


@pytest.mark.parametrize("link", LinkKind)
def test_the_scripts_obey_the_rules(link: LinkKind) -> None:
    play_all_scripts(link)


# The other values that a cell can get: any other state, and any other action that is possible for the event.
OUTCOMES = {Action.NOTHING, Action.REPORT, Action.SEND_CANCEL, Action.SEND_CANCEL_AND_REPORT}
ACTIONS: dict[str, dict[RequestEvent, set[Action]]] = {
    "calling": {
        **dict.fromkeys(RequestEvent, OUTCOMES),
        RequestEvent.CANCEL: {Action.NOTHING, Action.SEND_CANCEL},  # the caller that cancels needs no report
        RequestEvent.LINK_LOST: {Action.NOTHING, Action.REPORT},  # and there is no link to send by
    },
    "serving": {
        RequestEvent.ANSWER: {Action.NOTHING, Action.WRITE, Action.WRITE_AND_TEAR_DOWN},
        RequestEvent.ERROR: {Action.NOTHING, Action.WRITE, Action.WRITE_AND_TEAR_DOWN},
        RequestEvent.NOTE: {Action.NOTHING, Action.WRITE},
        RequestEvent.CANCEL: {Action.NOTHING, Action.STOP_HANDLER},
        RequestEvent.STREAM_LOST: {Action.NOTHING, Action.STOP_HANDLER},
        RequestEvent.INPUT_ENDED: {Action.NOTHING, Action.STOP_HANDLER},
        RequestEvent.LINK_LOST: {Action.NOTHING, Action.STOP_HANDLER},
    },
}
CELLS = [
    pytest.param(
        tables[link], link, state, seen, ACTIONS[side][seen], id=f"{side}-{link.name}-{state.name}-{seen.name}"
    )
    for side, tables in (("calling", CALLING), ("serving", SERVING))
    for link in LinkKind
    for state, row in tables[link].items()
    for seen in row
]


@pytest.mark.parametrize(("table", "link", "state", "seen", "actions"), CELLS)
def test_no_cell_of_a_table_can_be_changed_unnoticed(
    table: Table, link: LinkKind, state: State, seen: RequestEvent, actions: set[Action]
) -> None:
    cell = table[state][seen]
    # Only a cancellation by the peer distinguishes these two states, and it cannot arrive after the end of the input.
    alike = {State.OPEN, State.FIXED} if seen is RequestEvent.INPUT_ENDED else set()
    others = [(other, cell[1]) for other in State if other is not cell[0] and not {other, cell[0]} <= alike]
    others += [(cell[0], other) for other in actions if other is not cell[1]]
    survivors = []
    try:
        for other in others:
            table[state][seen] = other
            try:
                play_all_scripts(link)
            except Exception:  # noqa: BLE001  any exception shows that the change is noticed
                continue
            survivors.append(other)
    finally:
        table[state][seen] = cell
    assert not survivors
