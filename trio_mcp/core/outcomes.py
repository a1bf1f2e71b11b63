"""The events that a `Peer` reports: outcomes of our requests, cancellations of the requests that we serve, mistakes.

The names are from our point of view.  Our requests are those that we sent; the peer's requests are those that we serve.
"""

from __future__ import annotations

from trio_mcp.core.jsonrpc import Error, Event, Id, JsonObject
from trio_mcp.core.records import mutable_twin, record

__all__ = [
    "Answered",
    "ConnectionLost",
    "InvalidAnswer",
    "Outcome",
    "PeerComplaint",
    "PeerMistake",
    "ProgressReported",
    "Refused",
    "RequestCancelled",
    "SubscriptionEnded",
    "TimedOut",
    "answered",
]


@record
class Outcome(Event):
    """The outcome of a request of ours.  Every request has exactly one, except a request that we cancel."""

    id: Id
    method: str


@record
class Answered(Outcome):
    """The answer is a result."""

    result: JsonObject


_MutableAnswered = mutable_twin(Answered)


def answered(id: Id, method: str, result: JsonObject) -> Answered:
    """Create an `Answered` in half the time of its `__init__`: there is one for each answer."""
    event = _MutableAnswered()
    event.id, event.method, event.result = id, method, result
    event.__class__ = Answered
    return event  # type: ignore[no-any-return]


@record
class Refused(Outcome):
    """The answer is an error."""

    error: Error


@record
class InvalidAnswer(Outcome):
    """The answer is malformed."""

    why: str


@record
class TimedOut(Outcome):
    """The deadline has passed.  The cancellation was sent to the peer, if the protocol allows it."""


@record
class ConnectionLost(Outcome):
    """The stream or the connection is lost, or the request failed on it.  The peer may have executed the request."""

    why: str


@record
class SubscriptionEnded(Outcome):
    """The server ended a subscription without a result."""

    reason: str


@record
class ProgressReported(Event):
    """Progress of a request of ours."""

    id: Id
    progress: float
    total: float | None
    message: str | None


@record
class RequestCancelled(Event):
    """A request that we serve was cancelled.  Its handler must stop, and its answer will be dropped.

    Call `answer` or `refuse` after the handler has ended, as for any request.  The call sends no message, but it frees
    the request.  Until then the request counts against `Limits.requests`, and a new request must not use its id.
    """

    id: Id
    method: str
    reason: str


@record
class PeerComplaint(Event):
    """The peer sent an error without an id: it could not read one of our messages."""

    error: Error


@record
class PeerMistake(Event):
    """The peer broke the protocol without damage: the message was refused, ignored or corrected."""

    why: str
