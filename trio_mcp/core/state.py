"""The life cycle of a request, as tables.

A table has a row for each state and a column for each event.  The cell holds the new state and the action.  Clients and
servers use the same tables: `CALLING` for the requests that we made, `SERVING` for the requests that the peer made.
The meaning of a lost stream and of a cancellation depends on the kind of link, so there is one table for each
`LinkKind`, and no `if`.

A state has a row only where it differs from OPEN; in the other tables OPEN is used instead.  So every cell matters: a
test fails if any of them changes.

Three rules do not fit a table, and are in `peer`: ids only grow (so late answers need no memory), progress must
increase, and batches.  An event without a column in a row cannot happen in that state: `step` raises, because it is a
bug of ours, and changes no state.
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
    """An enum with a fast hash: each message looks up several members, and the hash of `Enum` is four times as slow."""

    __hash__ = object.__hash__


class LinkKind(_TableKey):
    """The kind of transport.  It decides what a lost stream and a cancellation mean."""

    DUPLEX = enum.auto()  # stdio, WebSocket, HTTP+SSE: one stream; if it is lost, all requests are lost
    SESSION = enum.auto()  # a legacy HTTP session: streams come and go; a lost stream ends no request
    EXCHANGE = enum.auto()  # one modern POST: closing its response stream is the cancellation


class State(_TableKey):
    """The state of a request."""

    OPEN = enum.auto()
    STANDING = enum.auto()  # a subscription: the side that serves it may end it too
    FIXED = enum.auto()  # `initialize` and the probe before it: never cancelled
    CANCELLED = enum.auto()  # only for requests that we serve: cancelled, but the handler has not ended yet
    GONE = enum.auto()  # finished and forgotten: there is no row for it


class RequestEvent(_TableKey):
    """An event in the life of a request."""

    ANSWER = enum.auto()  # a result: from the peer for a request we made, from us for one we serve
    ERROR = enum.auto()
    GARBLED = enum.auto()  # an answer that is not a valid message
    NOTE = enum.auto()  # progress, or another notification that belongs to the request
    CANCEL = enum.auto()  # by the side that made the request
    TEARDOWN = enum.auto()  # a cancellation by the side that serves the request
    EXPIRE = enum.auto()
    STREAM_LOST = enum.auto()
    FAILED = enum.auto()  # our side cannot send the request, or can no longer receive its answer
    INPUT_ENDED = enum.auto()  # half of the link is closed: the peer sends no more messages, but may still read
    LINK_LOST = enum.auto()


class Action(_TableKey):
    """The action that an event requires."""

    NOTHING = enum.auto()
    # For a request that we made:
    REPORT = enum.auto()  # report the outcome or the progress
    SEND_CANCEL = enum.auto()
    SEND_CANCEL_AND_REPORT = enum.auto()
    # For a request that we serve; a message that is not written is dropped:
    STOP_HANDLER = enum.auto()
    WRITE = enum.auto()
    WRITE_AND_TEAR_DOWN = enum.auto()


Row: TypeAlias = Mapping[RequestEvent, tuple[State, Action]]
Table: TypeAlias = dict[State, dict[RequestEvent, tuple[State, Action]]]

# Module names for the members that each message needs: in Python 3.11 the lookup of a member is eight times as slow.
OPEN, STANDING, FIXED, CANCELLED, GONE = State
ANSWER, NOTE, NOTHING = RequestEvent.ANSWER, RequestEvent.NOTE, Action.NOTHING

# Requests that we made.

_WAITING: Row = {
    RequestEvent.ANSWER: (GONE, Action.REPORT),
    RequestEvent.ERROR: (GONE, Action.REPORT),
    RequestEvent.GARBLED: (GONE, Action.REPORT),
    RequestEvent.NOTE: (OPEN, Action.REPORT),
    RequestEvent.CANCEL: (GONE, Action.SEND_CANCEL),
    RequestEvent.TEARDOWN: (OPEN, Action.NOTHING),  # cancel-13: the serving side may end only a subscription
    RequestEvent.EXPIRE: (GONE, Action.SEND_CANCEL_AND_REPORT),
    # No cancellation is sent: the peer never got the request, or cannot be reached.
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
    # "The initialize request MUST NOT be cancelled by clients": we give up without a message.
    RequestEvent.CANCEL: (GONE, Action.NOTHING),
    RequestEvent.EXPIRE: (GONE, Action.REPORT),
}
# cancel-15: the client closes the response stream and posts no cancellation.
# http-114: a broken stream loses its request.
_BY_ITS_STREAM: Row = {
    RequestEvent.CANCEL: (GONE, Action.NOTHING),
    RequestEvent.EXPIRE: (GONE, Action.REPORT),
    RequestEvent.STREAM_LOST: (GONE, Action.REPORT),
}

# No answer can come.  No cancellation is sent: it only makes sense if the answer could still come.
_UNANSWERABLE: Row = {RequestEvent.INPUT_ENDED: (GONE, Action.REPORT)}

CALLING: dict[LinkKind, Table] = {
    LinkKind.DUPLEX: {
        OPEN: {**_WAITING, **_UNANSWERABLE},
        STANDING: {**_SUBSCRIBED, **_UNANSWERABLE},
        FIXED: {**_OPENING, **_UNANSWERABLE},
    },
    # The answer can still come, if the stream is resumed or with the next GET.
    LinkKind.SESSION: {
        OPEN: {**_WAITING, RequestEvent.STREAM_LOST: (OPEN, Action.NOTHING)},
        FIXED: {**_OPENING, RequestEvent.STREAM_LOST: (FIXED, Action.NOTHING)},
    },
    # No FIXED row: no cancellation is ever sent here, so a request that must not be cancelled is like any other.
    LinkKind.EXCHANGE: {OPEN: {**_WAITING, **_BY_ITS_STREAM}, STANDING: {**_SUBSCRIBED, **_BY_ITS_STREAM}},
}

# Requests that we serve.

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
    # cancel-12: a subscription ends with its result and then, if there is no stream to close, with a cancellation.
    RequestEvent.ANSWER: (GONE, Action.WRITE_AND_TEAR_DOWN),
}
_OPENED: Row = {**_RUNNING, RequestEvent.NOTE: (FIXED, Action.WRITE), RequestEvent.CANCEL: (FIXED, Action.NOTHING)}
# cancel-18: after the cancellation no message is sent for the request.  The request stays until its handler has ended,
# so that a late answer cannot be taken for the answer to a new request with the same id.
_STOPPED: Row = {
    RequestEvent.ANSWER: (GONE, Action.NOTHING),
    RequestEvent.ERROR: (GONE, Action.NOTHING),
    RequestEvent.NOTE: (CANCELLED, Action.NOTHING),
    RequestEvent.CANCEL: (CANCELLED, Action.NOTHING),
    RequestEvent.LINK_LOST: (CANCELLED, Action.NOTHING),
}

SERVING: dict[LinkKind, Table] = {
    # A peer that closes its side of the stream may still read, so handlers go on and their answers are sent.  The owner
    # of the link limits the time for that, and ends the subscriptions, which have no more purpose.
    LinkKind.DUPLEX: {
        OPEN: {**_RUNNING, RequestEvent.INPUT_ENDED: (OPEN, Action.NOTHING)},
        STANDING: {**_LISTENED, RequestEvent.INPUT_ENDED: (STANDING, Action.NOTHING)},
        FIXED: {**_OPENED, RequestEvent.INPUT_ENDED: (FIXED, Action.NOTHING)},
        CANCELLED: {**_STOPPED, RequestEvent.INPUT_ENDED: (CANCELLED, Action.NOTHING)},
    },
    # http-28: a lost connection is not a cancellation; the answer waits in the session.
    LinkKind.SESSION: {
        OPEN: {**_RUNNING, RequestEvent.STREAM_LOST: (OPEN, Action.NOTHING)},
        FIXED: {**_OPENED, RequestEvent.STREAM_LOST: (FIXED, Action.NOTHING)},
        CANCELLED: {**_STOPPED, RequestEvent.STREAM_LOST: (CANCELLED, Action.NOTHING)},
    },
    # cancel-14: a closed response stream cancels its request, whatever its method.
    LinkKind.EXCHANGE: {
        OPEN: {**_RUNNING, RequestEvent.STREAM_LOST: (CANCELLED, Action.STOP_HANDLER)},
        CANCELLED: {**_STOPPED, RequestEvent.STREAM_LOST: (CANCELLED, Action.NOTHING)},
    },
}


# The methods whose requests do not begin as OPEN.  The methods differ by era, so all revisions share one mapping.
_FIRST: Mapping[str, State] = {
    **{method: STANDING for each in REVISIONS.values() for method in each.teardown},
    **{method: FIXED for each in REVISIONS.values() for method in each.uncancellable},
}


def first_state(table: Table, method: str) -> State:
    """Return the initial state of a request for `method`."""
    state = _FIRST.get(method, OPEN)
    return state if state in table else OPEN


def step(table: Table, state: State, event: RequestEvent) -> tuple[State, Action]:
    """Return the new state and the action.  Raises `UsageError` if the event cannot happen in this state."""
    try:
        return table[state][event]
    except KeyError:
        raise UsageError(f"{event.name} cannot happen to a request that is {state.name} on this link") from None
