"""Fair shares of a resource: the share of each holder, the order of turns, and the removal of old data for room."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_mcp.core import (
    FEW,
    LONG,
    ByteBudget,
    Charge,
    FairQueue,
    Limits,
    Response,
    Shares,
    decode,
    holder_of,
    is_principal,
    to_make_room,
    weight,
)


@pytest.mark.parametrize(
    ("principal", "address", "holder"),
    [
        ("ann", "10.0.0.1", "principal ann"),
        ("ann", None, "principal ann"),
        (None, "10.0.0.1", "address 10.0.0.1"),
        (None, None, None),
        (None, "2001:db8:1:2:3:4:5:6", "address 2001:db8:1:2::/64"),
        (None, "2001:db8:1:2::9", "address 2001:db8:1:2::/64"),
        (None, "2001:db8:1:3::9", "address 2001:db8:1:3::/64"),
        (None, "fe80::1%eth0", "address fe80::/64"),
        (None, "::ffff:10.0.0.1", "address 10.0.0.1"),
        (None, "10.0.0.1:8080", "address 10.0.0.1:8080"),
    ],
)
def test_a_holder_is_a_principal_or_an_address_or_a_network_of_ipv6(
    principal: str | None, address: str | None, holder: str | None
) -> None:
    assert holder_of(principal, address) == holder
    assert is_principal(holder_of(principal, address)) == (principal is not None)


def fill(shares: Shares, holder: str | None) -> int:
    """Take units until one is refused.  Return the units of the holder."""
    while shares.take(holder):
        pass
    return shares.of(holder)


@pytest.mark.parametrize(("total", "alone"), [(0, 0), (1, 1), (2, 1), (4, 3), (40, 30), (10_000, 7500)])
def test_one_holder_alone_gets_three_quarters_and_at_least_one(total: int, alone: int) -> None:
    assert fill(Shares(total), "a") == alone


def test_a_new_holder_gets_room_and_the_others_keep_theirs() -> None:
    shares = Shares(700)
    assert fill(shares, "a") == 525
    assert fill(shares, "b") == 131  # three quarters of the free units
    for _ in range(300):
        shares.give("a")
    assert fill(shares, "b") == 356
    assert (shares.of("a"), shares.of("b"), shares.held) == (225, 356, 581)
    shares.give("b", 356)
    shares.give("a", 225)
    assert (shares.held, shares.of("a")) == (0, 0)


def test_holders_without_a_name_are_limited_only_by_the_total() -> None:
    shares = Shares(10)
    assert shares.take(None, 10)
    assert shares.full
    assert not shares.take(None)
    assert not shares.take("a")
    shares.give(None, 10)
    assert not shares.full
    assert shares.of(None) == 0


def test_without_a_total_there_is_no_bound() -> None:
    shares = Shares(math.inf)
    assert shares.take("a", 10**12)
    assert shares.take("a", 10**12)
    assert not shares.full


def test_giving_back_more_than_was_taken_is_an_assertion_error() -> None:
    shares = Shares(10)
    shares.take("a", 2)
    shares.take("b", 2)
    with pytest.raises(AssertionError, match="a gives back more than it has"):
        shares.give("a", 3)


def test_the_entry_that_is_removed_for_a_new_holder() -> None:
    shares = Shares(8)
    for holder, amount in (("a", 4), ("b", 1), ("c", 3)):
        for _ in range(amount):
            shares.held += 1
            shares._holders[holder] = shares.of(holder) + 1
    line = [("b1", "b"), ("c1", "c"), ("a1", "a"), ("a2", "a"), ("c2", "c")]
    assert to_make_room(shares, "b", line) == "b1"  # its own entry
    assert to_make_room(shares, "c", line) == "c1"
    assert to_make_room(shares, "new", line) == "a1"  # the first entry of the holder that has most
    assert to_make_room(shares, "new", [("b1", "b")]) == "b1"
    assert to_make_room(shares, "c", [("b1", "b")]) is None  # b has less
    shares.give("a")
    assert to_make_room(shares, "b", line[1:]) is None  # not all is taken, and b has its full share
    assert to_make_room(shares, None, []) is None


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(1, 9), st.booleans()), max_size=80),
)
def test_any_sequence_of_takes_and_gives_obeys_the_rule(total: int, moves: list[tuple[str | None, int, bool]]) -> None:
    shares, model = Shares(total), Counter[str | None]()
    for holder, amount, gives in moves:
        if gives:
            amount = min(amount, model[holder])
            if amount:
                shares.give(holder, amount)
                model[holder] -= amount
            continue
        free, had = total - model.total(), model[holder]
        after = had + amount
        may = amount <= free and (holder is None or not had or after <= 3 * (free - amount))
        assert shares.fits(holder, amount) == may
        assert shares.take(holder, amount) == may
        model[holder] += amount * may
        assert shares.held == model.total() <= total
        assert all(shares.of(each) == model[each] for each in "abc")
        # A holder that has no unit gets one as long as one is free.
        assert shares.fits("new") == (model.total() < total)


# Turns.


def test_holders_take_turns_and_each_is_served_in_its_order() -> None:
    shares = Shares(math.inf)
    turns: FairQueue[int] = FairQueue(shares)
    for holder, things in (("a", (1, 2, 3)), ("b", (11, 12)), (None, (21, 22))):
        for thing in things:
            turns.add(holder, thing)
            turns.add(holder, thing)  # the second time has no effect
    turns.discard("a", 2)
    turns.discard("a", 99)
    turns.discard("unknown", 99)
    assert [turns.next() for _ in range(7)] == [1, 11, 21, 22, 3, 12, None]
    assert turns.next() is None
    assert (shares.of("a"), shares.of("b"), shares.held) == (2, 2, 6)


def test_a_holder_with_its_share_is_passed_over() -> None:
    shares = Shares(4)
    turns: FairQueue[str] = FairQueue(shares)
    fill(shares, "a")
    turns.add("a", "a1")
    assert turns.next() is None
    turns.add("b", "b1")
    turns.add("b", "b2")
    assert turns.next() == "b1"
    assert shares.full
    assert turns.next() is None
    shares.give("a")
    assert turns.next() is None  # b has one, a has two, and no unit would remain free
    shares.give("a")
    assert turns.next() == "a1"
    shares.give("b")
    assert turns.next() == "b2"
    assert turns.next() is None


def test_the_queue_of_a_holder_is_removed_with_its_last_entry() -> None:
    turns: FairQueue[str] = FairQueue(Shares(1))
    turns.add("a", "a1")
    turns.add(None, "n1")
    turns.discard("a", "a1")
    turns.discard(None, "n1")
    assert turns.next() is None


# Bytes.


class Log:
    """A log of events of ten bytes each."""

    def __init__(self, budget: ByteBudget, holder: str | None, events: int) -> None:
        self.account = budget.account(holder)
        for _ in range(events):
            assert self.account.take(10) is None
            budget.wrote(holder, self.forget_oldest)

    @property
    def events(self) -> int:
        return self.account.held // 10

    def forget_oldest(self) -> bool:
        if not self.events:
            return False
        self.account.give(10)
        return True


def budget(in_all: float = 400, each: float = math.inf) -> ByteBudget:
    return ByteBudget(Limits(bytes_in_all=in_all, bytes_each=each))  # type: ignore[arg-type]


def test_an_account_has_its_own_limit_except_for_its_first_message() -> None:
    bytes = budget(each=100)
    account = bytes.account("a")
    assert account.take(60) is None
    assert account.take(41) == "bytes_each"
    assert account.take(40) is None
    account.give(100)
    assert account.take(150) is None
    assert account.take(1) == "bytes_each"
    account.close()
    account.close()
    assert (account.held, bytes.shares.held) == (0, 0)


def test_the_accounts_of_a_holder_share_its_limit() -> None:
    bytes = budget()
    one, two, other = bytes.account("a"), bytes.account("a"), bytes.account("b")
    assert one.take(200) is None
    assert two.take(101) == "bytes_in_all"
    assert two.take(0) is None
    assert two.take(100) is None
    assert other.take(75) is None


def test_the_logs_of_a_holder_drop_events_before_a_message_is_refused() -> None:
    bytes = budget()
    other, older, newer = Log(bytes, "b", 3), Log(bytes, "a", 9), Log(bytes, "a", 9)
    bytes.wrote("a", older.forget_oldest)  # now this log was written last
    account = bytes.account("a")
    assert account.take(160) is None
    assert (newer.events, older.events) == (2, 9)
    assert account.take(90) is None
    assert (newer.events, older.events) == (0, 2)
    assert account.take(100) == "bytes_in_all"  # all events of the holder are removed already
    assert (newer.events, older.events, other.events) == (0, 0, 3)
    bytes.drop("a", older.forget_oldest)
    bytes.drop("b", other.forget_oldest)
    bytes.drop("b", other.forget_oldest)
    assert not bytes._logs


def test_a_dropped_log_loses_no_more_events() -> None:
    bytes = budget(100)
    first, second = Log(bytes, None, 5), Log(bytes, None, 5)
    bytes.drop(None, first.forget_oldest)
    assert bytes.account(None).take(50) is None
    assert (first.events, second.events) == (5, 0)


def test_a_charge_counts_long_messages_only_and_ends_with_its_block() -> None:
    bytes = budget(4 * LONG)
    account = bytes.account("a")
    with Charge(account) as charge:
        for size, held in ((10, 0), (LONG, 0), (LONG + 1, LONG + 1), (2 * LONG, 2 * LONG), (LONG + 5, LONG + 5)):
            assert charge.set(size) is None
            assert account.held == charge.held == held
        assert charge.set(4 * LONG) == "bytes_in_all"
        assert account.held == LONG + 5
    assert (account.held, charge.held, bytes.shares.held) == (0, 0, 0)


TEXT = "x" * 5000
WEIGHTS = {
    "short": (["[{,"], 0, 1),
    "some values": ([[]] * 300, 600, 1),
    "many values": ([1] * 5000, 5000, 1),
    "values in a text": (["[{," * 5000], 1, 1),
    "values in an escaped text": (['\\"[{,\\' * 5000], 1, 1),
    "more quotes than are examined": ([""] * 40_000, 40_000, 1),
    "many escaped quotes": (['",' * 140_000], 1, 1),
    "more values than the limit": (['",' * 300_000], 200_000, 1),
    "of two bytes": ([TEXT + "\u20ac"], 1, 2),
    "of four bytes": ([TEXT + "\U0001f600"], 1, 4),
}


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("what", WEIGHTS)
def test_the_weight_of_a_message_counts_its_values_and_widest_character(what: str, escaped: bool) -> None:
    value, values, width = WEIGHTS[what]
    data = json.dumps(value, ensure_ascii=escaped, separators=(",", ":")).encode()
    size = len(data)
    weighed = pytest.approx(size if size <= FEW else size * width + 100 * values, abs=200)
    assert weight(data, 200_000) == weighed
    message = {"jsonrpc": "2.0", "id": 1, "result": {"is": value}}
    data = json.dumps(message, ensure_ascii=escaped, separators=(",", ":")).encode()
    result = decode(data, Limits(values=10**7))
    assert isinstance(result, Response)
    assert weight(data, 200_000, result) == weight(data, 200_000)


def test_escaped_ascii_counts_one_byte_for_each_character() -> None:
    data = b'{"jsonrpc":"2.0","method":"m","params":{"a":"' + rb"\u0041" * 5000 + b'"}}'
    assert weight(data, 200_000, decode(data, Limits())) < 2 * len(data) < weight(data, 200_000)
