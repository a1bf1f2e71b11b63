"""The life of a request, as tables.

A row for each state, a column for everything that can be seen in it, and in the cell the new state and the deed.  The
tables do not know which side we are: a request that we made is followed by `CALLING`, one that the peer made by
`SERVING`, on clients and servers alike.  What a lost stream and a cancellation mean depends on the kind of link, so
there is one table for each `LinkKind`, not an `if`.

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

from trio_mcp.core.errors import UsageError
from trio_mcp.core.revisions import REVISIONS

__all__ = [
    "ANSWER", "CALLING", "CANCELLED", "GONE", "NOTE", "NOTHING", "SERVING", "Action", "LinkKind", "RequestEvent",
    "State", "Table", "first_state", "step",
]  # fmt: skip


class _TableKey(enum.Enum):
    """Members are looked up in tables several times for each message, and enum's own hash is four times as slow."""

    __hash__ = object.__hash__


class LinkKind(_TableKey):
    """What carries the messages, as far as it changes what a loss and a cancellation mean."""

    DUPLEX = enum.auto()  # stdio, WebSocket, HTTP+SSE: one stream, and losing it loses everything
    SESSION = enum.auto()  # a legacy HTTP session: streams come and go, and nothing is lost with one
    EXCHANGE = enum.auto()  # one modern POST: closing its response stream is the cancellation


class State(_TableKey):
    OPEN = enum.auto()
    STANDING = enum.auto()  # a subscription: it may also be ended by the side that serves it
    FIXED = enum.auto()  # `initialize` and the probe before it: never cancelled
    CANCELLED = enum.auto()  # served only: the cancel was seen, the handler is still winding down
    GONE = enum.auto()  # forgotten: has no row, because nothing of it is kept


class RequestEvent(_TableKey):
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


class Action(_TableKey):
    NOTHING = enum.auto()
    # For a request that we made:
    REPORT = enum.auto()  # tell whoever waits for it
    SEND_CANCEL = enum.auto()
    SEND_CANCEL_AND_REPORT = enum.auto()
    # For one that we serve; what is not written is dropped:
    STOP_HANDLER = enum.auto()
    WRITE = enum.auto()
    WRITE_AND_TEAR_DOWN = enum.auto()


Row: TypeAlias = Mapping[RequestEvent, tuple[State, Action]]
Table: TypeAlias = dict[State, dict[RequestEvent, tuple[State, Action]]]

# What is asked about each message has a name of its own: in Python 3.11 a member is looked up eight times as slowly.
OPEN, STANDING, FIXED, CANCELLED, GONE = State
ANSWER, NOTE, NOTHING = RequestEvent.ANSWER, RequestEvent.NOTE, Action.NOTHING

# A request that we made.

_WAITING: Row = {
    RequestEvent.ANSWER: (GONE, Action.REPORT),
    RequestEvent.ERROR: (GONE, Action.REPORT),
    RequestEvent.GARBLED: (GONE, Action.REPORT),
    RequestEvent.NOTE: (OPEN, Action.REPORT),
    RequestEvent.CANCEL: (GONE, Action.SEND_CANCEL),
    RequestEvent.TEARDOWN: (OPEN, Action.NOTHING),  # cancel-13: only a subscription may be ended so
    RequestEvent.EXPIRE: (GONE, Action.SEND_CANCEL_AND_REPORT),
    # A cancellation is for a peer that still works on the request; here it never got it, or cannot be reached.
    RequestEvent.FAILED: (GONE, Action.REPORT),
    RequestEvent.LINK_LOST: (GONE, Action.REPORT),
}
_SUBSCRIBED: Row = {
    **_WAITING,
    RequestEvent.NOTE: (STANDING, Action.REPORT),
    RequestEvent.TEARDOWN: (GONE, Action.REPORT),
}
_OPENING: Row = {
    **_WAITING,
    RequestEvent.NOTE: (FIXED, Action.REPORT),
    RequestEvent.TEARDOWN: (FIXED, Action.NOTHING),
    # "The initialize request MUST NOT be cancelled by clients": we give up, and say nothing.
    RequestEvent.CANCEL: (GONE, Action.NOTHING),
    RequestEvent.EXPIRE: (GONE, Action.REPORT),
}
# cancel-15: the client closes the response stream and posts nothing; http-114: a broken stream loses its request.
_BY_ITS_STREAM: Row = {
    RequestEvent.CANCEL: (GONE, Action.NOTHING),
    RequestEvent.EXPIRE: (GONE, Action.REPORT),
    RequestEvent.STREAM_LOST: (GONE, Action.REPORT),
}

# No answer can come any more.  The peer is not told: a cancellation is for work whose answer would be read.
_UNANSWERABLE: Row = {RequestEvent.INPUT_ENDED: (GONE, Action.REPORT)}

CALLING: dict[LinkKind, Table] = {
    LinkKind.DUPLEX: {
        OPEN: {**_WAITING, **_UNANSWERABLE},
        STANDING: {**_SUBSCRIBED, **_UNANSWERABLE},
        FIXED: {**_OPENING, **_UNANSWERABLE},
    },
    # The answer can still come: by resumption of that stream, or by the next GET.
    LinkKind.SESSION: {
        OPEN: {**_WAITING, RequestEvent.STREAM_LOST: (OPEN, Action.NOTHING)},
        FIXED: {**_OPENING, RequestEvent.STREAM_LOST: (FIXED, Action.NOTHING)},
    },
    # Where no cancellation is ever sent, a request for which none may be sent is like any other.
    LinkKind.EXCHANGE: {OPEN: {**_WAITING, **_BY_ITS_STREAM}, STANDING: {**_SUBSCRIBED, **_BY_ITS_STREAM}},
}

# A request that we serve.

_RUNNING: Row = {
    RequestEvent.ANSWER: (GONE, Action.WRITE),
    RequestEvent.ERROR: (GONE, Action.WRITE),
    RequestEvent.NOTE: (OPEN, Action.WRITE),
    RequestEvent.CANCEL: (CANCELLED, Action.STOP_HANDLER),
    RequestEvent.LINK_LOST: (CANCELLED, Action.STOP_HANDLER),
}
_LISTENED: Row = {
    **_RUNNING,
    RequestEvent.NOTE: (STANDING, Action.WRITE),
    # cancel-12: ending a subscription takes its result and then, where there is no stream to close, the notice.
    RequestEvent.ANSWER: (GONE, Action.WRITE_AND_TEAR_DOWN),
}
_OPENED: Row = {**_RUNNING, RequestEvent.NOTE: (FIXED, Action.WRITE), RequestEvent.CANCEL: (FIXED, Action.NOTHING)}
# cancel-18: after the cancellation nothing more is sent for the request.  The row is kept until the handler has ended,
# so that its late answer cannot be taken for the answer to a new request with the same id.
_STOPPED: Row = {
    RequestEvent.ANSWER: (GONE, Action.NOTHING),
    RequestEvent.ERROR: (GONE, Action.NOTHING),
    RequestEvent.NOTE: (CANCELLED, Action.NOTHING),
    RequestEvent.CANCEL: (CANCELLED, Action.NOTHING),
    RequestEvent.LINK_LOST: (CANCELLED, Action.NOTHING),
}

SERVING: dict[LinkKind, Table] = {
    # A peer that ends its side of the stream may still read: what runs goes on, and is answered.  How long it may, and
    # that a subscription has nothing to wait for any more, is known to the owner of the link.
    LinkKind.DUPLEX: {
        OPEN: {**_RUNNING, RequestEvent.INPUT_ENDED: (OPEN, Action.NOTHING)},
        STANDING: {**_LISTENED, RequestEvent.INPUT_ENDED: (STANDING, Action.NOTHING)},
        FIXED: {**_OPENED, RequestEvent.INPUT_ENDED: (FIXED, Action.NOTHING)},
        CANCELLED: {**_STOPPED, RequestEvent.INPUT_ENDED: (CANCELLED, Action.NOTHING)},
    },
    # http-28: a dropped connection is not a cancellation; the answer waits in the session.
    LinkKind.SESSION: {
        OPEN: {**_RUNNING, RequestEvent.STREAM_LOST: (OPEN, Action.NOTHING)},
        FIXED: {**_OPENED, RequestEvent.STREAM_LOST: (FIXED, Action.NOTHING)},
        CANCELLED: {**_STOPPED, RequestEvent.STREAM_LOST: (CANCELLED, Action.NOTHING)},
    },
    # cancel-14: a closed response stream cancels its request, whatever it is.
    LinkKind.EXCHANGE: {
        OPEN: {**_RUNNING, RequestEvent.STREAM_LOST: (CANCELLED, Action.STOP_HANDLER)},
        CANCELLED: {**_STOPPED, RequestEvent.STREAM_LOST: (CANCELLED, Action.NOTHING)},
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


def step(table: Table, state: State, seen: RequestEvent) -> tuple[State, Action]:
    """The new state and the deed.  Raises `UsageError` for what cannot be seen in this state."""
    try:
        return table[state][seen]
    except KeyError:
        raise UsageError(f"{seen.name} cannot happen to a request that is {state.name} on this link") from None
