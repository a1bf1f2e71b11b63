"""The errors of a client, about its session or one request."""

from __future__ import annotations

from trio_mcp.core.errors import INTERNAL_ERROR, McpError, RemoteProtocolError, RequestError, SessionClosed
from trio_mcp.core.messages import Limits
from trio_mcp.core.opening import Negotiation
from trio_mcp.core.requests import InvalidAnswer, Outcome, Refused, SubscriptionEnded

__all__ = [
    "HandshakeError", "HeadersRefused", "NoResponse", "SessionLost", "Unauthorized",
    "failure_of", "too_large_questions", "too_many_questions",
]  # fmt: skip


class HandshakeError(McpError):
    """The session could not be opened: the server and this client have no protocol in common.

    `negotiation` has the attempts, the answers of the server, and the reason.  `error` is the error of the server, if
    it sent one.  `nested`: this error is the cause of another one that already shows the reason.
    """

    def __init__(self, negotiation: Negotiation, error: RequestError | None = None, *, nested: bool = False) -> None:
        super().__init__(negotiation.why)
        self.negotiation = negotiation
        self.error = error
        self._nested = nested

    def __str__(self) -> str:
        why = self.negotiation.why  # shown once: it may contain all the output of a server that exited
        attempts = [(each.tried, each.answered) for each in self.negotiation.attempts]
        tried = "; ".join(attempt if answer == why else f"{attempt}: {answer}" for attempt, answer in attempts)
        text = "the connection could not be opened" + ("" if self._nested else f": {why}")
        return text + (f" (tried {tried})" if tried else "")


class SessionLost(SessionClosed):
    """The server has ended or forgotten the session.  A request that has not run can be repeated in a new session."""

    def __init__(self, request_may_have_run: bool, why: str = "the server does not know the session any more") -> None:
        has = "may have run" if request_may_have_run else "has not run"
        super().__init__(f"{why}; the request {has}")
        self.request_may_have_run = request_may_have_run


class NoResponse(SessionClosed):
    """One request has no answer and will not get one; the session continues.

    `status` is the HTTP status, if it is the reason.  `request_may_have_run` is False if the server has run no part of
    the call: neither this request nor an earlier round of the same call.
    """

    def __init__(self, why: str, *, status: int | None = None, request_may_have_run: bool = True) -> None:
        super().__init__(why)
        self.status = status
        self.request_may_have_run = request_may_have_run


class HeadersRefused(McpError):
    """The headers that repeat arguments do not fit the tool.  List the tools again, then call the tool once more."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(f"the server refused the headers of the call: {error}")
        self.error = error


class Unauthorized(McpError):
    """The server requires authentication (401) or refuses access (403).  `challenge` is its WWW-Authenticate header."""

    def __init__(self, why: str, status: int, challenge: str) -> None:
        super().__init__(why)
        self.status = status
        self.challenge = challenge


def failure_of(outcome: Outcome, failure: McpError | None) -> McpError:
    """Return the error for a request without a result.  `failure` is the error of the transport, if it has one."""
    if isinstance(outcome, Refused):
        return outcome.error.exception
    if isinstance(outcome, InvalidAnswer):
        return RemoteProtocolError(f"the server's answer to {outcome.method} is invalid: {outcome.why}")
    if failure is not None:
        return failure
    why = outcome.reason if isinstance(outcome, SubscriptionEnded) else getattr(outcome, "why", "no answer in time")
    return SessionClosed(f"{outcome.method} has no answer: {why}")


def too_many_questions(limits: Limits) -> RequestError:
    """Return the error for a question of the server if too many questions wait already."""
    return RequestError(
        INTERNAL_ERROR,
        f"the client answers {limits.questions} questions at once (Limits.questions), and "
        f"{limits.questions_waiting} more wait already (Limits.questions_waiting); ask again later",
    )


def too_large_questions() -> RequestError:
    """Return the error for a question of the server if those that wait already use the client's memory for them."""
    why = "the questions that the client holds are too large (Limits.bytes_each); ask again later"
    return RequestError(INTERNAL_ERROR, why)
