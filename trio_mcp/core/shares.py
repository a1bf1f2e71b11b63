"""Fair shares of a resource that all clients of a server use together: sessions, calls, worker threads, bytes.

A holder is a principal, or an address where there are no principals (see `holder_of`).  A holder may take as long as
what it then holds is at most three times what then remains free (a dynamic threshold, after Choudhury and Hahne, 1998).
One holder alone gets three quarters of the total, two get three sevenths each, and a newcomer always finds room.
Nothing is taken away from a holder, so no timer is needed, and `take` and `give` cost O(1).  The price is the part that
stays free; fixed quotas would leave far more unused, and a queue alone would let one holder occupy everything first.

Two exceptions.  A holder that holds nothing may take any amount that is free, or a total of one could not be used at
all.  The holder None is a client that cannot be told from others, as on standard input or a Unix socket; it is bounded
by the total only.

`FairQueue` decides who is next where a resource is full.  A `ByteBudget` is the same rule for memory: each connection
or session has an `Account` in it, which has a bound of its own.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from trio_mcp.core.glimpse import estimated_values
from trio_mcp.core.jsonrpc import Limits

__all__ = [
    "FEW",
    "LONG",
    "Account",
    "ByteBudget",
    "Charge",
    "FairQueue",
    "Reclaimable",
    "Shares",
    "holder_of",
    "to_make_room",
    "weight",
]  # fmt: skip

T = TypeVar("T", bound=Hashable)

FEW = 512
"""Bytes of a message that is short, as most are: one that is to be sent is free, and the values of one that came are
not counted."""

LONG = 4096
"""Bytes above which what a client has sent is charged.  Less is bounded by the limits that count messages."""

_VALUE = 100  # bytes of memory for each value: an object with one member takes 180, a text 50, an empty list 60
_FOUR_BYTES_LONG = (*(bytes([first]) for first in range(0xF0, 0xF5)), b"\\ud", b"\\uD")

_FREE = 3  # how many times as much as remains free one holder may have


def holder_of(principal: str | None, address: str | None) -> str | None:
    """The holder of what a client takes: its principal, else its address, else None.

    An IPv6 client counts as its /64 network, because each client can choose any address in it.
    """
    if principal is not None:
        return f"principal {principal}"
    if address is None:
        return None
    return f"address {_network(address) if ':' in address else address}"


@functools.lru_cache(1024)
def _network(address: str) -> str:
    import ipaddress  # 3 ms at the start, which a server without IPv6 clients should not wait for

    try:
        ip = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address  # an ASGI server may report anything
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((ip, 64), strict=False))


class Shares:
    """One resource: `total` units, of which each holder gets its share."""

    __slots__ = ("_holders", "held", "total")

    def __init__(self, total: float) -> None:
        self.total = total
        self.held = 0
        """Units that all holders have together."""
        self._holders: dict[Hashable, int] = {}

    @property
    def full(self) -> bool:
        return self.held >= self.total

    def of(self, holder: Hashable | None) -> int:
        """How many units this holder has; always 0 for None."""
        return self._holders.get(holder, 0)

    def fits(self, holder: Hashable | None, amount: int = 1) -> bool:
        """Whether the holder may take this much now."""
        free = self.total - self.held - amount
        if free < 0 or holder is None:
            return free >= 0
        has = self._holders.get(holder, 0)
        return not has or has + amount <= _FREE * free

    def take(self, holder: Hashable | None, amount: int = 1) -> bool:
        """Take this much for the holder, or nothing; False if it may not."""
        if holder is None:  # as on standard input, where each call passes here
            if self.held + amount > self.total:
                return False
            self.held += amount
            return True
        if not self.fits(holder, amount):
            return False
        self.held += amount
        self._holders[holder] = self._holders.get(holder, 0) + amount
        return True

    def give(self, holder: Hashable | None, amount: int = 1) -> None:
        """Give back what was taken."""
        self.held -= amount
        if holder is not None and amount:
            left = self._holders[holder] - amount
            assert left >= 0, f"{holder} gives back more than it has"
            if left:
                self._holders[holder] = left
            else:
                del self._holders[holder]


def to_make_room(shares: Shares, holder: Hashable | None, candidates: Iterable[tuple[T, Hashable | None]]) -> T | None:
    """Which of the candidates has to go for a unit that the holder may not take; None if the holder has to do without.

    Candidates come with their holders, the first one in the line first.  One of the same holder goes first.  One of
    another holder goes only where there is nothing left at all, and if that holder has more: then one of the holder
    that has most.
    """
    found: T | None = None
    most = shares.of(holder)
    for thing, other in candidates:
        if other == holder:
            return thing
        if shares.full and shares.of(other) > most:
            found, most = thing, shares.of(other)
    return found


class FairQueue(Generic[T]):
    """A queue for each holder that waits for a unit of a resource; holders take turns.

    Things of the holder None cannot be told from each other, so each of them has a turn of its own.
    """

    __slots__ = ("_queues", "_shares")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        # Ordered dicts: the first entry is found at once, where a plain dict searches among all that were deleted.
        self._queues: OrderedDict[Hashable, tuple[Hashable | None, OrderedDict[T, None]]] = OrderedDict()

    def add(self, holder: Hashable | None, thing: T) -> None:
        """Put a thing at the end of its holder's queue; nothing changes if it waits already."""
        key = thing if holder is None else holder
        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = holder, OrderedDict()
        found[1].setdefault(thing)

    def discard(self, holder: Hashable | None, thing: T) -> None:
        """The thing waits no more; nothing changes if it did not."""
        key = thing if holder is None else holder
        found = self._queues.get(key)
        if found is not None:
            found[1].pop(thing, None)
            if not found[1]:
                del self._queues[key]

    def next(self) -> T | None:
        """The thing whose turn it is, with a unit taken for its holder; None if no holder may take one.

        Looks at each holder once at most: those that have their share already are passed over.
        """
        if self._shares.full:
            return None
        for key, (holder, queue) in self._queues.items():
            if self._shares.take(holder):
                thing, _ = queue.popitem(last=False)
                if queue:
                    self._queues.move_to_end(key)
                else:
                    del self._queues[key]
                return thing
        return None


class Reclaimable(Protocol):
    """What may give memory back when its holder needs it for something else: a log that is kept for replay."""

    def forget_oldest(self) -> bool:
        """Give some of it back; False if there is nothing more to give."""


class ByteBudget:
    """The bytes that one run of a server holds for its clients: `Limits.bytes_in_all`, shared by holder.

    Logs are kept only while nothing else needs the room: when a holder may take no more, its own logs forget their
    oldest events first, from the log that was written least recently.  No other holder loses anything.
    """

    __slots__ = ("_logs", "each", "shares")

    def __init__(self, limits: Limits) -> None:
        self.shares = Shares(limits.bytes_in_all)
        self.each = limits.bytes_each
        self._logs: dict[Hashable | None, OrderedDict[Reclaimable, None]] = {}

    def account(self, holder: Hashable | None) -> Account:
        return Account(self, holder)

    def take(self, holder: Hashable | None, amount: int) -> bool:
        while not self.shares.take(holder, amount):
            if not self._forget(holder):
                return False
        return True

    def wrote(self, holder: Hashable | None, log: Reclaimable) -> None:
        """The log has something to forget, and was written just now."""
        logs = self._logs.setdefault(holder, OrderedDict())
        logs[log] = None
        logs.move_to_end(log)

    def drop(self, holder: Hashable | None, log: Reclaimable) -> None:
        """The log holds nothing more; nothing changes if it did not."""
        logs = self._logs.get(holder)
        if logs is not None:
            logs.pop(log, None)
            if not logs:
                del self._logs[holder]

    def _forget(self, holder: Hashable | None) -> bool:
        while logs := self._logs.get(holder):
            log = next(iter(logs))
            if log.forget_oldest():
                return True
            self.drop(holder, log)
        return False


class Account:
    """The bytes of one connection or session: `Limits.bytes_each` at most, in the name of its holder."""

    __slots__ = ("budget", "held", "holder")

    def __init__(self, budget: ByteBudget, holder: Hashable | None) -> None:
        self.budget = budget
        self.holder = holder
        self.held = 0

    def take(self, amount: int) -> str | None:
        """Take this much, or nothing; then the name of the limit that does not allow it.

        An account that holds nothing may exceed its own bound, by one message: that has a limit of its own.
        """
        if not amount:
            return None  # also for a holder that has more than its share by now
        if self.held and self.held + amount > self.budget.each:
            return "bytes_each"
        if not self.budget.take(self.holder, amount):
            return "bytes_in_all"
        self.held += amount
        return None

    def give(self, amount: int) -> None:
        self.held -= amount
        self.budget.shares.give(self.holder, amount)

    def close(self) -> None:
        """Give back all."""
        self.give(self.held)


class Charge:
    """What one thing that grows and shrinks has in an account, such as a body that is being received; a block."""

    __slots__ = ("_account", "held")

    def __init__(self, account: Account) -> None:
        self._account = account
        self.held = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.set(0)

    def set(self, amount: int) -> str | None:
        """Hold this much; if that is not allowed, what was held before, and the name of the limit.

        What is not long counts as nothing.
        """
        more = (amount if amount > LONG else 0) - self.held
        if more > 0 and (limit := self._account.take(more)) is not None:
            return limit
        if more < 0:
            self._account.give(-more)
        self.held += more
        return None


def weight(data: bytes, most: float) -> int:
    """How much memory a message takes that came as `data`, about: it is held as objects of Python.

    It holds not more than `most` values.
    """
    size = len(data)
    if size <= FEW:
        return size
    if size > LONG:
        size *= _width(data)
    return size + int(_VALUE * estimated_values(data, most))


def _width(data: bytes) -> int:
    """How many bytes Python takes for each character of a text in `data`: the widest character decides for all."""
    if data.isascii() and b"\\u" not in data:
        return 1
    return 4 if any(each in data for each in _FOUR_BYTES_LONG) else 2
