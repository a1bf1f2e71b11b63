"""What a flow asks of its driver, and what the driver tells it in return.

Each deed but `Persist` and the last ones is answered by one event: `SendRequest` by `Replied`, `ForbiddenAddress` or
`RequestFailed`, `OpenReceiver` by `ReceiverReady`, `OpenBrowser` by `BrowserReturned`, `AskAssertion` by `Asserted`.
`FlowAbandoned` answers any of them.  Bounds of time stand in the deed, and keeping them is the driver's: it says
`RequestFailed` or `FlowAbandoned` when they have passed.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from trio_mcp.core.http.fields import Fields, Headers
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.oauth.places import Network
from trio_mcp.core.oauth.records import ServerRecord
from trio_mcp.core.records import record

__all__ = [
    "AskAssertion",
    "Asserted",
    "BrowserReturned",
    "Deed",
    "FlowAbandoned",
    "FlowDone",
    "FlowFailed",
    "ForbiddenAddress",
    "Heard",
    "OpenBrowser",
    "OpenReceiver",
    "Persist",
    "ReceiverReady",
    "Replied",
    "RequestFailed",
    "ReturnIgnored",
    "SendRequest",
]  # fmt: skip

# Deeds.


@record
class SendRequest:
    """Send this, without cookies or credentials of your own, and do not follow redirects.

    Give up after `seconds`; of a body, hand on no more than `body_bytes` and one.  Where `networks` is not None, see
    to which address the connection leads, unless a proxy makes it: if `network_at` that address is not among them, send
    nothing, and answer `ForbiddenAddress`.
    """

    method: str
    url: str
    headers: Fields = attrs.field(default=(), repr=False)
    body: bytes = attrs.field(default=b"", repr=False)
    follow_redirects: bool = False
    body_bytes: int = 256 * 1024
    seconds: float = 30.0
    networks: frozenset[Network] | None = None

    def __repr__(self) -> str:
        return f"<{self.method} {self.url.partition('?')[0]}>"  # some keep a key in the query of an MCP server's URL


@record
class OpenReceiver:
    """Be ready for the browser's return, and say at which redirect URI."""


@record
class OpenBrowser:
    """Show this page of `issuer` to the user, without a shell, and wait for the return to the redirect URI."""

    url: str = attrs.field(repr=False)
    issuer: str
    seconds: float = 600.0


@record
class AskAssertion:
    """Get a fresh assertion: a user's, of the enterprise's provider, or the platform's JWT, made for `audience`."""

    audience: str
    resource: str


@record
class Persist:
    """Store this before you go on, in place of what was stored for this MCP server; it is secret."""

    record: ServerRecord


@record
class ReturnIgnored:
    """What came back was not the answer that is waited for (auth-55): go on waiting, in the same time."""

    why: str


@record
class FlowDone:
    """The flow is over; ask the errand again."""


@record
class FlowFailed:
    """There is no token.  Whoever waited for this flow gets the same error."""

    error: AuthorizationFailed


Deed: TypeAlias = (
    SendRequest | OpenReceiver | OpenBrowser | AskAssertion | Persist | ReturnIgnored | FlowDone | FlowFailed
)

# Events.


@record
class Replied:
    """The reply to the request, of any status; `address` is where it came from, if that is known."""

    status: int
    headers: Headers
    body: bytes = attrs.field(default=b"", repr=False)
    address: str | None = None


@record
class ForbiddenAddress:
    """The connection leads to this address, which is in none of the request's networks.  Nothing was sent."""

    address: str


@record
class RequestFailed:
    """There was no reply: no connection, no time left.  `why` will be shown."""

    why: str


@record
class ReceiverReady:
    redirect_uri: str


@record
class BrowserReturned:
    """The browser came back: what followed the question mark."""

    query: str = attrs.field(repr=False)


@record
class Asserted:
    assertion: str = attrs.field(repr=False)


@record
class FlowAbandoned:
    """There will be no answer, and `why` will be shown.

    While the user is waited for, that is the user's to mend, unless the application is `at_fault`.
    """

    why: str
    at_fault: bool = False


Heard: TypeAlias = (
    Replied | ForbiddenAddress | RequestFailed | ReceiverReady | BrowserReturned | Asserted | FlowAbandoned
)
