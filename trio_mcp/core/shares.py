"""Fair shares of a resource that all clients of a server use together: sessions, calls, worker threads, bytes.

A holder is a principal, or an address if there are no principals (see `holder_of`).  A holder may take an amount if it
then holds at most three times what then remains free (a dynamic threshold, after Choudhury and Hahne, 1998).  One
holder alone gets three quarters of the total, two get three sevenths each, and a new holder always finds room.  Units
are never taken away from a holder, so no timer is needed, and `take` and `give` cost O(1).  The price is the part that
stays free.  Two alternatives are worse: fixed quotas would leave far more unused, and a queue alone would let the first
holder occupy everything.

There are two exceptions.  A holder that holds no units may take any amount that is free; otherwise a total of one could
not be used.  The holder None is a client that cannot be distinguished from others, on standard input or a Unix socket.
Only the total limits it.

`turns` says which holder is next when a resource is full.  `ByteBudget` applies the same rule to memory: each
connection or session has an `Account` in it, with a limit of its own.  A peer that moves its data too slowly holds its
share too long; `Pace` says when to give it up.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import TracebackType

import trio_mcp.core as room  # it loads `unparsed` with the first message that is weighed
from trio_mcp.core.messages import ABSENT, Json, Limits, Message, Response

__all__ = [
    "FEW", "LONG", "Account", "ByteBudget", "Charge", "Pace", "Shares", "holder_of", "is_principal", "weight",
]  # fmt: skip


FEW = 512
"""The size in bytes up to which a message is short.  Most messages are.  An outgoing short message is not charged, and
the values of an incoming one are not counted."""

LONG = 4096
"""The size in bytes above which data from a client is charged.  The limits that count messages bound the rest."""

_VALUE = 100  # bytes of memory for each value: an object with one member takes 180, a string 50, an empty list 60
_SEARCHED = 1_000  # values; up to this number, a look at each is faster than a search in many bytes
_FOUR_BYTES_LONG = (*(bytes([first]) for first in range(0xF0, 0xF5)), b"\\ud", b"\\uD")

_FREE = 3  # a holder may hold this many times the free amount


def holder_of(principal: str | None, address: str | None) -> str | None:
    """Return the holder for a client: its principal; without a principal its address; without both None.

    An IPv6 client counts as its /64 network, because a client can choose any address in its network.
    """
    if principal is not None:
        return f"{_PRINCIPAL}{principal}"
    if address is None:
        return None
    return f"address {_network(address) if ':' in address else address}"


def is_principal(holder: Hashable | None) -> bool:
    """Return whether `holder_of` has made this holder from a principal."""
    return isinstance(holder, str) and holder.startswith(_PRINCIPAL)


_PRINCIPAL = "principal "


@functools.lru_cache(1024)
def _network(address: str) -> str:
    import ipaddress  # takes 3 ms, which a server without IPv6 clients should not pay

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
        """The units that all holders have together."""
        self._holders: dict[Hashable, int] = {}

    @property
    def full(self) -> bool:
        """Whether no unit is free."""
        return self.held >= self.total

    def of(self, holder: Hashable | None) -> int:
        """Return how many units this holder has; always 0 for None."""
        return self._holders.get(holder, 0)

    def fits(self, holder: Hashable | None, amount: int = 1) -> bool:
        """Return whether the holder may take this amount now."""
        free = self.total - self.held - amount
        if free < 0 or holder is None:
            return free >= 0
        has = self._holders.get(holder, 0)
        return not has or has + amount <= _FREE * free

    def take(self, holder: Hashable | None, amount: int = 1) -> bool:
        """Take this amount for the holder.  False: the holder may not take it, and gets no part of it."""
        if holder is None:  # the fast path of standard input: each call passes here
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
        """Give back units of the holder."""
        self.held -= amount
        if holder is not None and amount:
            left = self._holders[holder] - amount
            assert left >= 0, f"{holder} gives back more than it has"
            if left:
                self._holders[holder] = left
            else:
                del self._holders[holder]


class ByteBudget:
    """The bytes that one run of a server holds for its clients: `Limits.bytes_in_all`, shared by holder.

    Event logs have the lowest priority.  When a holder may take no more, its own logs forget their oldest events,
    beginning with the log that was written least recently.  Other holders lose no events.
    """

    __slots__ = ("_logs", "each", "shares")

    def __init__(self, limits: Limits) -> None:
        self.shares = Shares(limits.bytes_in_all)
        self.each = limits.bytes_each
        self._logs: dict[Hashable | None, OrderedDict[Callable[[], bool], None]] = {}

    def account(self, holder: Hashable | None) -> Account:
        """Return a new account of this holder."""
        return Account(self, holder)

    def take(self, holder: Hashable | None, amount: int) -> bool:
        """As `Shares.take`, after the holder's logs have forgotten as much as necessary."""
        while not self.shares.take(holder, amount):
            if not self._forget(holder):
                return False
        return True

    def wrote(self, holder: Hashable | None, log: Callable[[], bool]) -> None:
        """Register a log that has just been written, by the function that forgets its oldest event.

        The function gives back the bytes of the event.  It returns False if the log is empty.
        """
        logs = self._logs.setdefault(holder, OrderedDict())
        logs[log] = None
        logs.move_to_end(log)

    def drop(self, holder: Hashable | None, log: Callable[[], bool]) -> None:
        """Unregister a log that is empty.  A second call has no effect."""
        logs = self._logs.get(holder)
        if logs is not None:
            logs.pop(log, None)
            if not logs:
                del self._logs[holder]

    def _forget(self, holder: Hashable | None) -> bool:
        while logs := self._logs.get(holder):
            log = next(iter(logs))
            if log():
                return True
            self.drop(holder, log)
        return False


class Account:
    """The bytes of one connection or session: at most `Limits.bytes_each`, charged to its holder."""

    __slots__ = ("budget", "held", "holder")

    def __init__(self, budget: ByteBudget, holder: Hashable | None) -> None:
        self.budget = budget
        self.holder = holder
        self.held = 0

    def take(self, amount: int) -> str | None:
        """Take this amount and return None, or take no byte and return the name of the limit that is exceeded.

        One message may exceed the limit of an empty account, because the message has a limit of its own.
        """
        if not amount:
            return None  # even if the holder now has more than its share
        if self.held and self.held + amount > self.budget.each:
            return "bytes_each"
        if not self.budget.take(self.holder, amount):
            return "bytes_in_all"
        self.held += amount
        return None

    def give(self, amount: int) -> None:
        """Give back bytes."""
        self.held -= amount
        self.budget.shares.give(self.holder, amount)

    def close(self) -> None:
        """Give back all bytes."""
        self.give(self.held)


class Charge:
    """The bytes of one growing buffer in an account, for example of a body that is being received.

    It is a context manager: all bytes are given back when the block ends.
    """

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
        """Set the size of the buffer.  A size up to `LONG` counts as 0.

        Returns None, or the name of the limit that is exceeded; the charge is then unchanged.
        """
        more = (amount if amount > LONG else 0) - self.held
        if more > 0 and (limit := self._account.take(more)) is not None:
            return limit
        if more < 0:
            self._account.give(-more)
        self.held += more
        return None


def weight(data: bytes, most: float, message: Message | None = None) -> int:
    """Estimate the memory of a message that came as `data`, as Python objects.

    The message has at most `most` values.  `message` is the result of parsing `data`, if the caller has it.
    """
    size = len(data)
    if size <= FEW:
        return size
    values = room.estimated_values(data, most)
    if size > LONG and not (values < _SEARCHED and _is_ascii(message)):
        size *= _width(data)
    return size + int(_VALUE * values)


def _is_ascii(message: Message | None) -> bool:
    """Return whether this is a request, a notification or a result, and all strings in it are ASCII."""
    unvisited: list[Json] = [message.result if isinstance(message, Response) else getattr(message, "params", ABSENT)]
    if unvisited[0] is ABSENT:
        return False
    for value in unvisited:
        if isinstance(value, dict):
            unvisited += value
            unvisited += value.values()
        elif isinstance(value, list):
            unvisited += value
        elif isinstance(value, str) and not value.isascii():
            return False
    return True


def _width(data: bytes) -> int:
    """Return how many bytes Python needs per character of a string in `data`; its widest character decides."""
    if data.isascii() and b"\\u" not in data:
        return 1
    return 4 if any(each in data for each in _FOUR_BYTES_LONG) else 2


_SAME_WINDOW = 0.1  # seconds; after a longer pause, the next wait starts a new window


class Pace:
    """The deadline of one direction of one connection: the minimum speed of the peer while data waits for it.

    The data is a body that is received, or a write.  The rule is the same in both directions: in each window of
    `seconds` at least `rate` bytes per second must move, on average over the window.  Two simpler rules were turned
    down:

    - An average over the whole transfer.  A client that sends most of a body at once could then be silent for an hour.
    - A limit for the time without any byte.  A client could then hold the connection with one byte per minute.

    A window covers several writes or bodies if each follows the previous one immediately.  Otherwise a client that
    takes a minute for each short event would get a new window with each event.

    There is no clock: the time is an argument.
    """

    __slots__ = ("_ended", "_enough", "_moved", "_seconds", "_window_end", "deadline")

    def __init__(self, seconds: float, rate: float) -> None:
        self._seconds = seconds
        # At least one byte, so that a rate of 0 still requires progress.  With an infinite rate one byte is enough.
        self._enough = max(1.0, seconds * rate) if rate < math.inf and seconds < math.inf else 1.0
        self._moved = 0
        self._window_end = math.inf
        self._ended = -math.inf
        self.deadline = math.inf
        """The time at which to give up the peer; `math.inf` while no data waits for it."""

    def begin(self, now: float) -> None:
        """Start to wait for the peer.  A second call has no effect."""
        if self.deadline < math.inf:
            return
        if now - self._ended > _SAME_WINDOW:
            self._moved = 0
            self._window_end = now + self._seconds
        self.deadline = self._window_end

    def move(self, size: int, now: float) -> None:
        """Count bytes that have moved.  A new window starts when there are enough of them."""
        self._moved += size
        if self._moved >= self._enough:
            self._moved = 0
            self.deadline = self._window_end = now + self._seconds

    def end(self, now: float) -> None:
        """Stop waiting for the peer."""
        self.deadline = math.inf
        self._ended = now
