"""The life of a request, as tables.

A row for each state, a column for everything that can be seen in it, and in the cell the new state and the deed.  The
tables do not know which side we are: a request that we made is followed by `CALLING`, one that the peer made by
`SERVING`, on clients and servers alike.  What a lost stream and a cancellation mean depends on the kind of link, so
there is one table for each `Link`, not an `if`.

What does not fit a table stands in `peer`: ids that only grow (so that a late answer needs no memory), progress that
must increase, and batches.  A column that is missing from a row cannot be seen there: to step on it is our own mistake
and raises, changing nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias

from trio_mcp.core.errors import LocalProtocolError

__all__ = ["CALLING", "SERVING", "Deed", "Link", "Seen", "State", "Table", "step"]


class Link(enum.Enum):
    """What carries the messages, as far as it changes what a loss and a cancellation mean."""

    DUPLEX = enum.auto()  # stdio, WebSocket, HTTP+SSE: one stream, and losing it loses everything
    SESSION = enum.auto()  # an HTTP session: streams come and go, and nothing is lost with one
    EXCHANGE = enum.auto()  # one modern POST: closing its response stream is the cancellation


class State(enum.Enum):
    OPEN = enum.auto()
    STANDING = enum.auto()  # a subscription: it may also be ended by the side that serves it
    FIXED = enum.auto()  # `initialize` and the probe before it: never cancelled
    CANCELLED = enum.auto()  # served only: the cancel was seen, the handler is still winding down
    GONE = enum.auto()  # forgotten: has no row, because nothing of it is kept


class Seen(enum.Enum):
    ANSWER = enum.auto()  # a result: theirs for a request we made, ours for one we serve
    ERROR = enum.auto()
    GARBLED = enum.auto()  # an answer that is no valid message
    NOTE = enum.auto()  # progress, or anything else that belongs to the request
    CANCEL = enum.auto()  # by the side that made the request
    TEARDOWN = enum.auto()  # a cancellation by the side that serves it
    EXPIRE = enum.auto()
    STREAM_LOST = enum.auto()
    LINK_LOST = enum.auto()


class Deed(enum.Enum):
    NOTHING = enum.auto()
    REPORT = enum.auto()  # tell whoever waits for the request
    SEND_CANCEL = enum.auto()
    SEND_CANCEL_AND_REPORT = enum.auto()
    STOP_HANDLER = enum.auto()
    WRITE = enum.auto()
    WRITE_AND_TEAR_DOWN = enum.auto()
    DROP = enum.auto()


Row: TypeAlias = Mapping[Seen, tuple[State, Deed]]
Table: TypeAlias = dict[State, dict[Seen, tuple[State, Deed]]]

OPEN, STANDING, FIXED, CANCELLED, GONE = State

# A request that we made.

_WAITING: Row = {
    Seen.ANSWER: (GONE, Deed.REPORT),
    Seen.ERROR: (GONE, Deed.REPORT),
    Seen.GARBLED: (GONE, Deed.REPORT),
    Seen.NOTE: (OPEN, Deed.REPORT),
    Seen.CANCEL: (GONE, Deed.SEND_CANCEL),
    Seen.TEARDOWN: (OPEN, Deed.NOTHING),  # cancel-13: only a subscription may be ended so
    Seen.EXPIRE: (GONE, Deed.SEND_CANCEL_AND_REPORT),
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


def _calling(changes: Row, keep_on_loss: bool = False) -> Table:
    """The three rows, each with `changes`; `keep_on_loss`: a lost stream leaves the request where it is."""
    table: Table = {OPEN: {**_WAITING, **changes}, STANDING: {**_SUBSCRIBED, **changes}, FIXED: {**_OPENING, **changes}}
    if keep_on_loss:
        for state, row in table.items():
            row[Seen.STREAM_LOST] = (state, Deed.NOTHING)
    return table


CALLING: dict[Link, Table] = {
    Link.DUPLEX: _calling({}),
    # The answer can still come: by resumption of that stream, or by the next GET.
    Link.SESSION: _calling({}, keep_on_loss=True),
    # cancel-15: the client closes the response stream and posts nothing; http-114: a broken stream loses its request.
    Link.EXCHANGE: _calling(
        {
            Seen.CANCEL: (GONE, Deed.NOTHING),
            Seen.EXPIRE: (GONE, Deed.REPORT),
            Seen.STREAM_LOST: (GONE, Deed.REPORT),
        }
    ),
}

# A request that we serve.

_RUNNING: Row = {
    Seen.ANSWER: (GONE, Deed.WRITE),
    Seen.ERROR: (GONE, Deed.WRITE),
    Seen.NOTE: (OPEN, Deed.WRITE),
    Seen.CANCEL: (CANCELLED, Deed.STOP_HANDLER),
    Seen.LINK_LOST: (CANCELLED, Deed.STOP_HANDLER),
}
_LISTENED: Row = {**_RUNNING, Seen.NOTE: (STANDING, Deed.WRITE)}
_OPENED: Row = {**_RUNNING, Seen.NOTE: (FIXED, Deed.WRITE), Seen.CANCEL: (FIXED, Deed.NOTHING)}
# cancel-18: after the cancellation nothing more is sent for the request.  The row is kept until the handler has ended,
# so that its late answer cannot be taken for the answer to a new request with the same id.
_STOPPED: Row = {
    Seen.ANSWER: (GONE, Deed.DROP),
    Seen.ERROR: (GONE, Deed.DROP),
    Seen.NOTE: (CANCELLED, Deed.DROP),
    Seen.CANCEL: (CANCELLED, Deed.NOTHING),
    Seen.LINK_LOST: (CANCELLED, Deed.NOTHING),
}
_ROWS: Mapping[State, Row] = {OPEN: _RUNNING, STANDING: _LISTENED, FIXED: _OPENED, CANCELLED: _STOPPED}

SERVING: dict[Link, Table] = {
    Link.DUPLEX: {
        **{state: dict(row) for state, row in _ROWS.items()},
        # cancel-12: ending a subscription takes its result and then, where there is no stream to close, the notice.
        STANDING: {**_LISTENED, Seen.ANSWER: (GONE, Deed.WRITE_AND_TEAR_DOWN)},
    },
    # http-28: a dropped connection is not a cancellation; the answer waits in the session.
    Link.SESSION: {state: {**row, Seen.STREAM_LOST: (state, Deed.NOTHING)} for state, row in _ROWS.items()},
    # cancel-14: a closed response stream cancels its request.
    Link.EXCHANGE: {
        state: {
            **row,
            Seen.STREAM_LOST: (CANCELLED, Deed.NOTHING if state is CANCELLED else Deed.STOP_HANDLER),
        }
        for state, row in _ROWS.items()
    },
}


def step(table: Table, state: State, seen: Seen) -> tuple[State, Deed]:
    """The new state and the deed.  Raises `LocalProtocolError` for what cannot be seen in this state."""
    try:
        return table[state][seen]
    except KeyError:
        raise LocalProtocolError(f"{seen.name} cannot happen to a request that is {state.name} on this link") from None
