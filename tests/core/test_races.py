"""Every order of every race, and the proof that each cell of the tables counts.

The plans, the promises and the machinery are in `races`.  Here stands which plans are played, how many orders each has
(so that none can get lost unnoticed), and a set of short stories which together notice any change to the tables.
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
    Wish,
    explore,
    tell,
)
from tests.requirements import req
from trio_mcp.core import CALLING, SERVING, Action, LinkKind, RequestEvent, State, Table

SAMPLE = "sampling/createMessage"
FULL = "progress cancel error garble teardown rogue"

ALONE = {
    "call": (Plan(DUPLEX, (Wish(may=FULL, deadline=5),), "link"), 9_575_816),
    "opening": (Plan(DUPLEX, (Wish("initialize", FULL, deadline=5),), "link"), 7_697_502),
    "subscription": (Plan(DUPLEX, (Wish(LISTEN, "note cancel error teardown rogue", deadline=5),), "link"), 9_130_584),
    "failing call": (Plan(DUPLEX, (Wish(may="progress cancel fail", deadline=5),), "link"), 93_972),
    "queued": (Plan(DUPLEX, (Wish(may="progress cancel", deadline=5),), "link", lazy=True), 54_690_112),
    "session call": (Plan(SESSION, (Wish(may="progress cancel error", deadline=5),), "stream link"), 12_505_936),
    "session opening": (
        Plan(SESSION, (Wish("initialize", "cancel rogue teardown", deadline=5),), "stream link"),
        109_032_032,
    ),
    "session failing call": (Plan(SESSION, (Wish(may="progress cancel fail"),), "stream link"), 2_661_542),
    "session queued": (Plan(SESSION, (Wish(may="progress cancel"),), "link", lazy=True), 677_628),
    "half-closed call": (Plan(DUPLEX, (Wish(may="cancel fail rogue"),), "input link"), 1_067_202),
    "half-closed late call": (Plan(DUPLEX, (Wish(may="progress cancel error", deadline=5),), "input"), 513_074),
    "half-closed opening": (Plan(DUPLEX, (Wish("initialize", "cancel rogue", deadline=5),), "input link"), 2_536_116),
    "half-closed subscription": (Plan(DUPLEX, (Wish(LISTEN, "note cancel teardown"),), "input link"), 4_301_842),
    "half-closed server's call": (
        Plan(DUPLEX, (Wish(SAMPLE, "progress cancel", by=SERVER, deadline=5),), "input link"),
        2_945_380,
    ),
    "server's call": (Plan(DUPLEX, (Wish(SAMPLE, "progress cancel rogue", by=SERVER, deadline=5),), "link"), 131_831),
    "session server's call": (
        Plan(SESSION, (Wish(SAMPLE, "progress cancel error", by=SERVER, deadline=5),), "link"),
        28_190,
    ),
    "exchange": (Plan(EXCHANGE, (Wish(may="progress cancel error", deadline=5),), "stream link"), 698_370),
    "exchange subscription": (Plan(EXCHANGE, (Wish(LISTEN, "note cancel teardown"),), "stream link"), 300_192),
    "exchange discover": (
        Plan(EXCHANGE, (Wish("server/discover", "cancel rogue", deadline=5),), "stream link"),
        424_144,
    ),
    "exchange failing call": (
        Plan(EXCHANGE, (Wish(may="progress cancel fail", deadline=5),), "stream link"),
        2_845_670,
    ),
    "exchange queued": (Plan(EXCHANGE, (Wish(may="progress cancel"),), "stream", lazy=True), 121_616),
}
LONG = {
    "call", "opening", "subscription", "queued", "session call", "session opening", "exchange failing call",
    "half-closed late call", "half-closed opening", "half-closed subscription", "half-closed server's call",
}  # fmt: skip
BOTH = {
    "calls": (Plan(DUPLEX, (Wish(may="progress cancel"), Wish(may="progress cancel"))), 3_773_068),
    "calls, link lost": (Plan(DUPLEX, (Wish(may="cancel"), Wish(may="cancel")), "link"), 153_408),
    "calls, first is late": (Plan(DUPLEX, (Wish(may="cancel", deadline=4), Wish(may="cancel", deadline=5))), 2_833_441),
    "calls, second is late": (Plan(DUPLEX, (Wish(deadline=5), Wish(deadline=4)), "link"), 468_107),
    "opening and call": (Plan(DUPLEX, (Wish("initialize", "cancel rogue"), Wish(may="cancel")), "link"), 2_140_086),
    "subscription and call": (Plan(DUPLEX, (Wish(LISTEN, "note cancel"), Wish(may="progress")), "link"), 2_657_978),
    "queued calls": (Plan(DUPLEX, (Wish(may="progress cancel"), Wish(may="progress")), lazy=True), 5_097_086_772),
    "each way": (Plan(DUPLEX, (Wish(may="progress cancel"), Wish(SAMPLE, "cancel", by=SERVER)), "link"), 3_739_470),
    "one in the other": (
        Plan(DUPLEX, (Wish(may="cancel"), Wish(SAMPLE, "progress cancel", SERVER, 0, 5)), "link"),
        11_128_610,
    ),
    "half-closed calls": (Plan(DUPLEX, (Wish(may="cancel"), Wish(may="cancel")), "input"), 4_081_978),
    "half-closed, each way": (
        Plan(DUPLEX, (Wish(may="cancel"), Wish(SAMPLE, "progress", by=SERVER)), "input"),
        3_592_473,
    ),
    "half-closed, one in the other": (
        Plan(DUPLEX, (Wish(may="cancel"), Wish(SAMPLE, "cancel", SERVER, 0)), "input"),
        901_185,
    ),
    "session calls": (Plan(SESSION, (Wish(may="cancel"), Wish(may="cancel")), "link"), 606_224),
    "session calls with progress": (Plan(SESSION, (Wish(may="progress cancel"), Wish(may="progress"))), 413_028),
    "session calls, streams lost": (Plan(SESSION, (Wish(), Wish(may="cancel")), "stream"), 312_236_925),
    "session, each way": (
        Plan(SESSION, (Wish(may="cancel"), Wish(SAMPLE, "progress cancel", by=SERVER)), "link"),
        12_389_746,
    ),
    "session, one in the other": (
        Plan(SESSION, (Wish(may="cancel"), Wish(SAMPLE, "cancel", SERVER, 0, 5)), "link"),
        1_137_618,
    ),
    "exchanges, link lost": (Plan(EXCHANGE, (Wish(may="cancel"), Wish(may="cancel")), "link"), 7_187_720),
    "exchanges, streams lost": (Plan(EXCHANGE, (Wish(may="cancel"), Wish(may="cancel")), "stream"), 8_150_680),
    "exchanges, late": (Plan(EXCHANGE, (Wish(may="cancel", deadline=5), Wish(deadline=4))), 1_159_022),
}


@req("cancel-02", "cancel-03", "cancel-05", "cancel-06", "cancel-15", "cancel-18", "cancel-21", "prog-05", "prog-09")
@pytest.mark.parametrize(
    ("plan", "orders"),
    [pytest.param(*each, marks=[pytest.mark.full] if name in LONG else []) for name, each in ALONE.items()],
    ids=ALONE,
)
def test_one_request_keeps_its_promises_in_every_order(plan: Plan, orders: int) -> None:
    assert explore(plan).orders == orders


@req("cancel-02", "cancel-03", "cancel-05", "cancel-06", "cancel-15", "cancel-18", "cancel-21", "prog-05", "prog-09")
@pytest.mark.full
@pytest.mark.timeout(600)  # millions of orders, which all go on
@pytest.mark.parametrize(("plan", "orders"), BOTH.values(), ids=BOTH)
def test_two_requests_keep_their_promises_in_every_order(plan: Plan, orders: int) -> None:
    assert explore(plan).orders == orders


# Stories: single orders, as few as it takes to notice every change to a table.

ALL = FULL + " note fail"
CALL, OPENING, SUBSCRIPTION = (Wish(each, ALL, deadline=5, times=9) for each in ("tools/call", "initialize", LISTEN))

ANYWHERE = [
    "send, arrive, progress, note, arrive, answer, progress, arrive",
    "send, arrive, progress, arrive, error, note, arrive",
    "send, arrive, progress, arrive, garble, arrive",
    "send, arrive, progress, arrive, teardown, arrive, teardown, arrive, cancel, arrive, answer, arrive",
    "send, arrive, progress, arrive, clock, tick, arrive, error, arrive",
    "send, arrive, progress, fail, arrive, fail, answer, arrive",
    "send, arrive, progress, note, cut, lost 0, lost 1, answer",
    "send, arrive, note, arrive, cut, lost 1, lost 0, progress, error",
]
WHERE_A_CANCELLATION_IS_SENT = [
    "send, arrive, progress, note, arrive, cancel, arrive, rogue, arrive, note, answer",
    "send, arrive, cancel, arrive, cut, lost 1, lost 0, note, answer",
]
WHERE_NONE_IS_SENT = [
    "send, arrive, note, rogue, arrive, rogue, arrive, progress, arrive, cancel, arrive, error, arrive"
]
ENDS = [
    "send, arrive, progress, note, close 0, end 1, progress, note, arrive, answer, arrive",
    "send, close 0, arrive, end 1, note, arrive, error, arrive, close 1, end 0",
    "send, arrive, close 1, end 0, progress, note, answer, cancel, fail",
    "send, close 1, end 0, arrive, cut, lost 0, lost 1, answer",
]
CANCELLED_BEFORE_AN_END = [
    "send, arrive, cancel, arrive, close 0, end 1, note, progress, answer, arrive",
]
WHERE_STREAMS_COME_AND_GO = [
    "send, arrive, break, feel, hear, progress, arrive, cancel, arrive, answer, arrive",
    "send, arrive, break, cancel, arrive, hear, progress, error",
]
WHERE_A_STREAM_IS_THE_REQUEST = [
    "send, arrive, progress, note, break, feel, hear, progress, note, answer",
    "send, arrive, note, arrive, cancel, rogue, arrive, rogue, note, hear, note, arrive, error",
    "send, arrive, cancel, hear, cut, lost 1, lost 0, answer",
]
STORIES: dict[LinkKind, list[tuple[Wish, list[str]]]] = {
    DUPLEX: [
        (CALL, ANYWHERE + WHERE_A_CANCELLATION_IS_SENT + ENDS + CANCELLED_BEFORE_AN_END),
        (OPENING, ANYWHERE + WHERE_NONE_IS_SENT + ENDS),
        (SUBSCRIPTION, ANYWHERE + WHERE_A_CANCELLATION_IS_SENT + ENDS + CANCELLED_BEFORE_AN_END),
    ],
    SESSION: [
        (CALL, ANYWHERE + WHERE_A_CANCELLATION_IS_SENT + WHERE_STREAMS_COME_AND_GO),
        (OPENING, ANYWHERE + WHERE_NONE_IS_SENT + WHERE_STREAMS_COME_AND_GO),
    ],
    EXCHANGE: [
        (CALL, ANYWHERE + WHERE_A_STREAM_IS_THE_REQUEST),
        (SUBSCRIPTION, ANYWHERE + WHERE_A_STREAM_IS_THE_REQUEST),
    ],
}


def tell_all(link: LinkKind) -> None:
    for wish, stories in STORIES[link]:
        for story in stories:
            tell(Plan(link, (wish,), "stream link input" if link is DUPLEX else "stream link"), story)


@pytest.mark.parametrize("link", LinkKind)
def test_the_stories_keep_their_promises(link: LinkKind) -> None:
    tell_all(link)


# What a cell can be changed into: any other state, and whatever else could be done about what was seen.
OUTCOMES = {Action.NOTHING, Action.REPORT, Action.SEND_CANCEL, Action.SEND_CANCEL_AND_REPORT}
DEEDS: dict[str, dict[RequestEvent, set[Action]]] = {
    "calling": {
        **dict.fromkeys(RequestEvent, OUTCOMES),
        RequestEvent.CANCEL: {Action.NOTHING, Action.SEND_CANCEL},  # whoever cancels need not be told
        RequestEvent.LINK_LOST: {Action.NOTHING, Action.REPORT},  # and there is nothing to send by
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
    pytest.param(tables[link], link, state, seen, DEEDS[side][seen], id=f"{side}-{link.name}-{state.name}-{seen.name}")
    for side, tables in (("calling", CALLING), ("serving", SERVING))
    for link in LinkKind
    for state, row in tables[link].items()
    for seen in row
]


@pytest.mark.parametrize(("table", "link", "state", "seen", "deeds"), CELLS)
def test_no_cell_of_a_table_can_be_changed_unnoticed(
    table: Table, link: LinkKind, state: State, seen: RequestEvent, deeds: set[Action]
) -> None:
    cell = table[state][seen]
    # Only a cancellation by the peer tells these two apart, and after the end of its input none can come.
    alike = {State.OPEN, State.FIXED} if seen is RequestEvent.INPUT_ENDED else set()
    others = [(other, cell[1]) for other in State if other is not cell[0] and not {other, cell[0]} <= alike]
    others += [(cell[0], other) for other in deeds if other is not cell[1]]
    survivors = []
    try:
        for other in others:
            table[state][seen] = other
            try:
                tell_all(link)
            except Exception:  # noqa: BLE001  whatever goes wrong was noticed
                continue
            survivors.append(other)
    finally:
        table[state][seen] = cell
    assert not survivors
