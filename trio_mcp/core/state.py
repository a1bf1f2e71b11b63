"""The life of a request, as tables.

A row for each state, a column for everything that can be seen in it, and in the cell the new state and the deed.  The
tables do not know which side we are: a request that we made is followed by `CALLING`, one that the peer made by
`SERVING`, on clients and servers alike.  What a lost stream and a cancellation mean depends on the kind of link, so
there is one table for each `Link`, not an `if`.

A state stands in a table only where it makes a difference there; elsewhere such a request is like any other.  So every
cell counts: to change any one of them is to break a promise that a test can see.

What does not fit a table stands in `peer`: ids that only grow (so that a late answer needs no memory), progress that
must increase, and batches.  A column that is missing from a row cannot be seen there: to step on it is our own mistake
and raises, changing nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias

from trio_mcp.core.errors import LocalProtocolError
from trio_mcp.core.revisions import REVISIONS

__all__ = [
    "ANSWER", "CALLING", "CANCELLED", "GONE", "NOTE", "NOTHING", "SERVING", "Deed", "Link", "Seen", "State", "Table",
    "first_state", "step",
]  # fmt: skip


class _Key(enum.Enum):
    """Members are looked up in tables several times for each message, and enum's own hash is four times as slow."""

    __hash__ = object.__hash__


class Link(_Key):
    """What carries the messages, as far as it changes what a loss and a cancellation mean."""

    DUPLEX = enum.auto()  # stdio, WebSocket, HTTP+SSE: one stream, and losing it loses everything
    SESSION = enum.auto()  # a legacy HTTP session: streams come and go, and nothing is lost with one
    EXCHANGE = enum.auto()  # one modern POST: closing its response stream is the cancellation


class State(_Key):
    OPEN = enum.auto()
    STANDING = enum.auto()  # a subscription: it may also be ended by the side that serves it
    FIXED = enum.auto()  # `initialize` and the probe before it: never cancelled
    CANCELLED = enum.auto()  # served only: the cancel was seen, the handler is still winding down
    GONE = enum.auto()  # forgotten: has no row, because nothing of it is kept


class Seen(_Key):
    ANSWER = enum.auto()  # a result: theirs for a request we made, ours for one we serve
    ERROR = enum.auto()
    GARBLED = enum.auto()  # an answer that is no valid message
    NOTE = enum.auto()  # progress, or anything else that belongs to the request
    CANCEL = enum.auto()  # by the side that made the request
    TEARDOWN = enum.auto()  # a cancellation by the side that serves it
    EXPIRE = enum.auto()
    STREAM_LOST = enum.auto()
    FAILED = enum.auto()  # our own side cannot send the request, or cannot get its answer any more
    INPUT_ENDED = enum.auto()  # half of the link: the other side sends nothing more, and may still read
    LINK_LOST = enum.auto()


class Deed(_Key):
    NOTHING = enum.auto()
    # For a request that we made:
    REPORT = enum.auto()  # tell whoever waits for it
    SEND_CANCEL = enum.auto()
    SEND_CANCEL_AND_REPORT = enum.auto()
    # For one that we serve; what is not written is dropped:
    STOP_HANDLER = enum.auto()
    WRITE = enum.auto()
    WRITE_AND_TEAR_DOWN = enum.auto()


Row: TypeAlias = Mapping[Seen, tuple[State, Deed]]
Table: TypeAlias = dict[State, dict[Seen, tuple[State, Deed]]]

# What is asked about each message has a name of its own: in Python 3.11 a member is looked up eight times as slowly.
OPEN, STANDING, FIXED, CANCELLED, GONE = State
ANSWER, NOTE, NOTHING = Seen.ANSWER, Seen.NOTE, Deed.NOTHING

# A request that we made.

_WAITING: Row = {
    Seen.ANSWER: (GONE, Deed.REPORT),
    Seen.ERROR: (GONE, Deed.REPORT),
    Seen.GARBLED: (GONE, Deed.REPORT),
    Seen.NOTE: (OPEN, Deed.REPORT),
    Seen.CANCEL: (GONE, Deed.SEND_CANCEL),
    Seen.TEARDOWN: (OPEN, Deed.NOTHING),  # cancel-13: only a subscription may be ended so
    Seen.EXPIRE: (GONE, Deed.SEND_CANCEL_AND_REPORT),
    # A cancellation is for a peer that still works on the request; here it never got it, or cannot be reached.
    Seen.FAILED: (GONE, Deed.REPORT),
    Seen.LINK_LOST: (GONE, Deed.REPORT),
}
_SUBSCRIBED: Row = {**_WAITING, Seen.NOTE: (STANDING, Deed.REPORT), Seen.TEARDOWN: (GONE, Deed.REPORT)}
_OPENING: Row = {
    **_WAITING,
    Seen.NOTE: (FIXED, Deed.REPORT),
    Seen.TEARDOWN: (FIXED, Deed.NOTHING),
    # "The initialize request MUST NOT be cancelled by clients": we give up, and say nothing.
    Seen.CANCEL: (GONE, Deed.NOTHING),
    Seen.EXPIRE: (GONE, Deed.REPORT),
}
# cancel-15: the client closes the response stream and posts nothing; http-114: a broken stream loses its request.
_BY_ITS_STREAM: Row = {
    Seen.CANCEL: (GONE, Deed.NOTHING),
    Seen.EXPIRE: (GONE, Deed.REPORT),
    Seen.STREAM_LOST: (GONE, Deed.REPORT),
}

# No answer can come any more.  The peer is not told: a cancellation is for work whose answer would be read.
_UNANSWERABLE: Row = {Seen.INPUT_ENDED: (GONE, Deed.REPORT)}

CALLING: dict[Link, Table] = {
    Link.DUPLEX: {
        OPEN: {**_WAITING, **_UNANSWERABLE},
        STANDING: {**_SUBSCRIBED, **_UNANSWERABLE},
        FIXED: {**_OPENING, **_UNANSWERABLE},
    },
    # The answer can still come: by resumption of that stream, or by the next GET.
    Link.SESSION: {
        OPEN: {**_WAITING, Seen.STREAM_LOST: (OPEN, Deed.NOTHING)},
        FIXED: {**_OPENING, Seen.STREAM_LOST: (FIXED, Deed.NOTHING)},
    },
    # Where no cancellation is ever sent, a request for which none may be sent is like any other.
    Link.EXCHANGE: {OPEN: {**_WAITING, **_BY_ITS_STREAM}, STANDING: {**_SUBSCRIBED, **_BY_ITS_STREAM}},
}

# A request that we serve.

_RUNNING: Row = {
    Seen.ANSWER: (GONE, Deed.WRITE),
    Seen.ERROR: (GONE, Deed.WRITE),
    Seen.NOTE: (OPEN, Deed.WRITE),
    Seen.CANCEL: (CANCELLED, Deed.STOP_HANDLER),
    Seen.LINK_LOST: (CANCELLED, Deed.STOP_HANDLER),
}
_LISTENED: Row = {
    **_RUNNING,
    Seen.NOTE: (STANDING, Deed.WRITE),
    # cancel-12: ending a subscription takes its result and then, where there is no stream to close, the notice.
    Seen.ANSWER: (GONE, Deed.WRITE_AND_TEAR_DOWN),
}
_OPENED: Row = {**_RUNNING, Seen.NOTE: (FIXED, Deed.WRITE), Seen.CANCEL: (FIXED, Deed.NOTHING)}
# cancel-18: after the cancellation nothing more is sent for the request.  The row is kept until the handler has ended,
# so that its late answer cannot be taken for the answer to a new request with the same id.
_STOPPED: Row = {
    Seen.ANSWER: (GONE, Deed.NOTHING),
    Seen.ERROR: (GONE, Deed.NOTHING),
    Seen.NOTE: (CANCELLED, Deed.NOTHING),
    Seen.CANCEL: (CANCELLED, Deed.NOTHING),
    Seen.LINK_LOST: (CANCELLED, Deed.NOTHING),
}

SERVING: dict[Link, Table] = {
    # A peer that ends its side of the stream may still read: what runs goes on, and is answered.  How long it may, and
    # that a subscription has nothing to wait for any more, is known to the owner of the link.
    Link.DUPLEX: {
        OPEN: {**_RUNNING, Seen.INPUT_ENDED: (OPEN, Deed.NOTHING)},
        STANDING: {**_LISTENED, Seen.INPUT_ENDED: (STANDING, Deed.NOTHING)},
        FIXED: {**_OPENED, Seen.INPUT_ENDED: (FIXED, Deed.NOTHING)},
        CANCELLED: {**_STOPPED, Seen.INPUT_ENDED: (CANCELLED, Deed.NOTHING)},
    },
    # http-28: a dropped connection is not a cancellation; the answer waits in the session.
    Link.SESSION: {
        OPEN: {**_RUNNING, Seen.STREAM_LOST: (OPEN, Deed.NOTHING)},
        FIXED: {**_OPENED, Seen.STREAM_LOST: (FIXED, Deed.NOTHING)},
        CANCELLED: {**_STOPPED, Seen.STREAM_LOST: (CANCELLED, Deed.NOTHING)},
    },
    # cancel-14: a closed response stream cancels its request, whatever it is.
    Link.EXCHANGE: {
        OPEN: {**_RUNNING, Seen.STREAM_LOST: (CANCELLED, Deed.STOP_HANDLER)},
        CANCELLED: {**_STOPPED, Seen.STREAM_LOST: (CANCELLED, Deed.NOTHING)},
    },
}


# Where a new request is not OPEN.  The methods differ by era, so one mapping serves all revisions.
_FIRST: Mapping[str, State] = {
    **{method: STANDING for each in REVISIONS.values() for method in each.teardown},
    **{method: FIXED for each in REVISIONS.values() for method in each.uncancellable},
}


def first_state(table: Table, method: str) -> State:
    """The state in which a request for `method` begins."""
    state = _FIRST.get(method, OPEN)
    return state if state in table else OPEN


def step(table: Table, state: State, seen: Seen) -> tuple[State, Deed]:
    """The new state and the deed.  Raises `LocalProtocolError` for what cannot be seen in this state."""
    try:
        return table[state][seen]
    except KeyError:
        raise LocalProtocolError(f"{seen.name} cannot happen to a request that is {state.name} on this link") from None
