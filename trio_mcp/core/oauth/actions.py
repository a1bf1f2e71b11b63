"""The actions that a flow asks of its driver, and the events that answer them.

`ANSWERS`, at the end, says which event answers which action.  `Persist`, `FlowDone` and `FlowFailed` have no answer.

A driver carries out each action.  Actions contain time limits, and the driver enforces them: it reports `RequestFailed`
or `FlowAbandoned` after a timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import attrs

from trio_mcp.core.http.fields import Fields, Headers
from trio_mcp.core.messages import record
from trio_mcp.core.oauth.discovery import Network
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.oauth.records import ServerRecord

__all__ = [
    "AskAssertion", "Asserted", "BrowserReturned", "FlowAbandoned", "FlowAction", "FlowDone", "FlowEvent", "FlowFailed",
    "ForbiddenAddress", "OpenBrowser", "OpenReceiver", "Persist", "ReceiverReady", "Replied", "RequestFailed",
    "ReturnIgnored", "SendRequest",
]  # fmt: skip

# Actions.


@record
class SendRequest:
    """Send this HTTP request without cookies and without other credentials, and do not follow redirects.

    Time out after `seconds`.  Read at most `body_bytes` + 1 bytes of the body; a longer one is unreadable.  If
    `networks` is not None and no proxy makes the connection, look at the connection's address before sending: if its
    `network_at` is not among `networks`, send nothing, and report `ForbiddenAddress`.  `uses_up`: the request uses up a
    code or a refresh token, so a driver that must stop gives the response a moment to arrive.
    """

    method: str
    url: str
    headers: Fields = attrs.field(default=(), repr=False)
    body: bytes = attrs.field(default=b"", repr=False)
    body_bytes: int = 256 * 1024  # the longest known metadata documents have some 10 KB
    seconds: float = 30.0  # a healthy server sends a document within seconds
    networks: frozenset[Network] | None = None
    uses_up: bool = False

    def __repr__(self) -> str:
        return f"<{self.method} {self.url.partition('?')[0]}>"  # some URLs of MCP servers have a key in the query


@record
class OpenReceiver:
    """Listen for the browser's return, and report the redirect URI."""


@record
class OpenBrowser:
    """Show this page of `issuer` to the user, without a shell, and wait for the return to the redirect URI."""

    url: str = attrs.field(repr=False)
    issuer: str
    seconds: float = 600.0


@record
class AskAssertion:
    """Get a new assertion for `audience`: a user's from the enterprise's provider, or a JWT of the platform."""

    audience: str
    resource: str


@record
class Persist:
    """Store this record before the next action.  It replaces the stored record of this MCP server, and is secret."""

    record: ServerRecord


@record
class ReturnIgnored:
    """The browser returned without the expected answer (auth-55): keep waiting, within the same time limit."""

    why: str


@record
class FlowDone:
    """The flow is over: call `go` of the authorized request again."""


@record
class FlowFailed:
    """The flow is over without a token.  All requests that waited for it get this error."""

    error: AuthorizationFailed


FlowAction: TypeAlias = (
    SendRequest | OpenReceiver | OpenBrowser | AskAssertion | Persist | ReturnIgnored | FlowDone | FlowFailed
)

# Events.


@record
class Replied:
    """The response to the request, of any status.  `address`: the server's IP address, if known."""

    status: int
    headers: Headers
    body: bytes = attrs.field(default=b"", repr=False)
    address: str | None = None


@record
class ForbiddenAddress:
    """The connection leads to this address, which is in no allowed network.  Nothing was sent."""

    address: str


@record
class RequestFailed:
    """There was no response: no connection, or a timeout.  The error message will contain `why`."""

    why: str
    cause: BaseException | None = attrs.field(default=None, repr=False)


@record
class ReceiverReady:
    redirect_uri: str


@record
class BrowserReturned:
    """The browser returned.  `query`: the text after the question mark."""

    query: str = attrs.field(repr=False)


@record
class Asserted:
    assertion: str = attrs.field(repr=False)


@record
class FlowAbandoned:
    """There will be no answer; the error message will contain `why`.

    If the flow waits for the user, the error blames the user, unless the application is `at_fault`.
    """

    why: str
    at_fault: bool = False
    cause: BaseException | None = attrs.field(default=None, repr=False)


FlowEvent: TypeAlias = (
    Replied | ForbiddenAddress | RequestFailed | ReceiverReady | BrowserReturned | Asserted | FlowAbandoned
)

ANSWERS: Final[Mapping[type | None, tuple[type, ...]]] = {
    SendRequest: (Replied, ForbiddenAddress, RequestFailed),
    OpenReceiver: (ReceiverReady,),
    OpenBrowser: (BrowserReturned,),
    ReturnIgnored: (BrowserReturned,),
    AskAssertion: (Asserted,),
}
"""The events that may answer each action.  `FlowAbandoned` may answer all of these."""
