"""What a peer reports of requests: what became of ours, and what is asked for of those that we serve."""

from __future__ import annotations

from trio_mcp.core.jsonrpc import Error, Event, Id, JsonObject
from trio_mcp.core.records import record, thawed

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
    """What became of a request of ours: every one has exactly one, unless it was we who cancelled it."""

    id: Id
    method: str


@record
class Answered(Outcome):
    """The answer is a result."""

    result: JsonObject


_thawed_answered = thawed(Answered)


def answered(id: Id, method: str, result: JsonObject) -> Answered:
    """An `Answered`, made in half the time: there is one for each answer."""
    made = _thawed_answered()
    made.id, made.method, made.result = id, method, result
    made.__class__ = Answered
    return made  # type: ignore[no-any-return]


@record
class Refused(Outcome):
    """The answer is an error."""

    error: Error


@record
class InvalidAnswer(Outcome):
    """The answer is no valid answer."""

    why: str


@record
class TimedOut(Outcome):
    """The deadline has passed; the peer was told, where it may be."""


@record
class ConnectionLost(Outcome):
    """The stream or link is gone, or the request failed on it; it may or may not have been carried out."""

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
    """A request that we serve is to be stopped: its handler is to end, and its answer will go nowhere.

    Once the handler has ended, call `answer` or `refuse` all the same.  It sends nothing, and frees the request: until
    then it counts against `Limits.requests`, and its id is refused to a new one.
    """

    id: Id
    method: str
    reason: str


@record
class PeerComplaint(Event):
    """The peer sent an error without an id: it could not read something that we sent."""

    error: Error


@record
class PeerMistake(Event):
    """Something off the protocol that cost nothing: it was refused, ignored or put right."""

    why: str
