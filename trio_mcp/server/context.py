"""Context: the interface of a running handler to its request and its client.

A handler runs once, from top to bottom, for one call of a client.  In the modern revision one call may take several
requests: a question to the client ends one request, and the answer comes with the next.  A context belongs to the call
and always uses the request that is open now.  While the server waits for the client no request is open, so progress
and log messages are not sent.

Principal, headers and metadata belong to the request, never to the connection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeVar, overload

import trio

from trio_mcp.core.errors import RequestError, SessionClosed, UsageError, shown
from trio_mcp.core.jsonrpc import PROGRESS, Id, Json, JsonObject, Request
from trio_mcp.core.oauth.principals import Principal
from trio_mcp.core.revisions import Role
from trio_mcp.core.session import ServerProtocol
from trio_mcp.core.shares import Account
from trio_mcp.core.terms import NOTHING, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_mcp.core.elicitation import Accepted, Declined, Dismissed
    from trio_mcp.core.models import CreateMessageResult, LogLevel, SamplingMessage
    from trio_mcp.server.parking import ParkedCall
    from trio_mcp.server.questions import ElicitUrl, Inquiry
    from trio_mcp.transport.outbox import Wire
    from trio_mcp.transport.paths import Roots

__all__ = ["LOG", "ClientError", "ClientGone", "Context", "ContextLink"]

T = TypeVar("T")
_TRACE = ("traceparent", "tracestate", "baggage")
_NUMBERS = (int, float)
_COMPLETED = "notifications/elicitation/complete"
LOG = "notifications/message"


class ContextLink(Protocol):
    """The connection of a context's request: the methods that a context calls."""

    session: ServerProtocol
    account: Account

    def keeps(self, ctx: Context) -> bool:
        """Whether a report of `ctx` may have to be kept for later, because the client reads too slowly."""

    async def keep(self, ctx: Context, method: str, *report: Any) -> bool:
        """Keep a report for later.  Return False if it can be sent now."""

    async def tell(self, ctx: Context) -> None:
        """Send the queued messages of `ctx`.  Waits while too much is queued."""

    async def report(self, ctx: Context) -> None:
        """As `tell`, for messages that may come in quick succession: collects them for up to a millisecond."""

    async def tell_apart(self, method: str, params: JsonObject) -> bool:
        """Send a notification that belongs to no request.  Return False if it cannot reach the client."""

    async def ask(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, Any]:
        """Return the client's answers, read, by the keys of `questions`."""

    async def ask_raw(self, ctx: Context, questions: Mapping[str, Inquiry[Any]]) -> Mapping[str, JsonObject]:
        """Return the client's answers as JSON, by the keys of `questions`."""

    async def roots(self, ctx: Context) -> Roots: ...


class ClientGone(SessionClosed):
    """The client has gone, so it cannot answer a question, nor receive the result of the call.

    Raised by the method that asked.  It is no fault of the handler and is not logged.
    """


class ClientError(RequestError):
    """The client answered a question with an error.

    Raised by the method that asked.  Unlike a `RequestError` that a handler raises, it does not become the answer to
    the call, because its code says something about the question and not about the call.
    """

    def __init__(self, method: str, code: int, message: str, data: Any) -> None:
        super().__init__(code, message, data)
        self.method = method

    def __str__(self) -> str:
        return f"the client answered {self.method} with an error: {shown(self.message)} ({self.code})"


class Context:
    """The context of one call.  A handler gets it by a parameter with the annotation `Context`.

    | To do | Use |
    |---|---|
    | report to the client | `progress`, `log`, `completed` |
    | ask the client | `elicit`, `elicit_url`, `sample`, `roots`, `ask` |
    | know the request | `request_id`, `method`, `meta`, `trace`, `revision`, `headers` |
    | know the client | `principal`, `scopes`, `client`, `supports` |

    The methods that ask raise `NotDeclared` or `NotInThisRevision` if this client cannot be asked, `RequestError` if
    the client answers with an error, `RemoteProtocolError` if the answer does not fit the question, and `SessionClosed`
    if the client goes away.

    The async methods are safe to cancel: a message is sent as a whole or not at all.  They are cancelled when the
    client cancels the request or goes away.  Do not use a context after its handler has ended, except `completed`.
    """

    __slots__ = (
        "_kept_roots", "_keys", "_last_write", "_link", "_over", "_pages", "_parked", "_progress", "_received",
        "_recorded", "_refusal", "_replay", "_rounds", "_scope", "_terms", "_waits", "_wire", "answers", "lifespan",
        "request", "state",
    )  # fmt: skip
