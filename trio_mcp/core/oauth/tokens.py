"""The client's side of authorization: which token a request carries, and how to get one.

One `Authorizer` belongs to one MCP server and holds its tokens.  Each HTTP request to the server is an
`AuthorizedRequest`: it returns the headers to send, is told if the server refused them, and is retried a limited number
of times.  A `Flow` gets a token, and there is one flow at a time: the first request in need gets `StartFlow`, all
others get `WaitForFlow`, and the outcome of the flow is the outcome of all.  An abandoned flow has no outcome; then one
of the waiting requests starts a new one.  Nothing is locked meanwhile, and a request that needs no token does not wait.

Drive a flow by `start` and `receive`.  Call `abandon` when you stop, for any reason::

    actions = flow.start(now)
    while True:
        for action in actions: ...  # store the record of a Persist
        if flow.over: break
        event = ...  # the result of the last action, the only one that has an answer
        actions = flow.receive(event, now)

`now` is Unix time, because tokens outlive processes.  A program that restarts with the last persisted `ServerRecord`
continues where the last process ended: an expired token is renewed at the known endpoint, without asking the user.

The token goes to this server only: to URLs of its origin, in the Authorization header (auth-18, auth-48).
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import Fields, Headers, RawFields
from trio_mcp.core.messages import record
from trio_mcp.core.oauth.actions import FlowFailed
from trio_mcp.core.oauth.discovery import (
    DPOP,
    AuthChallenge,
    UrlRules,
    origin_of,
    read_auth_challenge,
    same_origin,
    url_fault,
)
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame
from trio_mcp.core.oauth.flow import Flow
from trio_mcp.core.oauth.messages import Application, Entropy, IdentityAssertion, Key, Nonces, dpop_proof
from trio_mcp.core.oauth.records import ServerRecord, Tokens

__all__ = ["Authorized", "AuthorizedRequest", "Authorizer", "StartFlow", "Verdict", "WaitForFlow"]


@record
class Authorized:
    """Send the request with these headers, which are empty before the server has asked for authorization."""

    headers: Fields = attrs.field(default=(), repr=False)


@record
class StartFlow:
    """Start this flow and drive it to its end, then call `go` again."""

    flow: Flow


@record
class WaitForFlow:
    """Another request started this flow: wait until it is over, then call `go` again."""

    flow: Flow


Verdict: TypeAlias = Authorized | StartFlow | WaitForFlow | FlowFailed

# Operations whose refusals are remembered.  If there are more, the oldest is forgotten, and may ask the user once more.
_OPERATIONS = 256
_STEP_UPS = 2  # how often more scopes are requested for one operation before its refusal is final (auth-83, auth-113)
_MARGIN = 10.0  # seconds before its expiry at which a token is renewed, because the request needs time to arrive


class Authorizer:
    """The tokens of the MCP server at `server_url`.

    `entropy(n)` returns n random bytes.  `record` is the record last persisted for this server, or None.  `used_at`
    maps each client id to the issuer where it was first used (auth-90).  All servers of an application share it, so
    that a server visited later cannot have a client id shown to another issuer.  Raises `UsageError` if tokens must not
    be sent to the URL, or if the record belongs to another server.
    """

    def __init__(
        self,
        server_url: str,
        application: Application,
        *,
        entropy: Entropy,
        record: ServerRecord | None = None,
        rules: UrlRules | None = None,
        used_at: dict[str, str] | None = None,
    ) -> None:
        self.rules = rules or UrlRules()
        if (fault := url_fault(server_url, self.rules)) is not None:
            raise UsageError(f"tokens cannot be sent to {shown(server_url.partition('?')[0])}, which {fault}")
        if record is not None and record.server_url != server_url:
            raise UsageError(f"the record belongs to another server than {origin_of(server_url)}")
        grant = application.grant
        if isinstance(grant, IdentityAssertion) and (fault := url_fault(grant.token_endpoint, self.rules)) is not None:
            raise UsageError(f"the identity provider's token endpoint {shown(grant.token_endpoint)} {fault}")
        self.server_url = server_url
        self.application = application
        self.entropy = entropy
        self.used_at = {} if used_at is None else used_at
        self.nonces = Nonces()
        self.restore(record or ServerRecord(server_url))
        self.flow: Flow | None = None
        self.generation = 0
        """The number of tokens so far.  It tells the refusal of an old token from that of the newest."""
        self._stepped_up: dict[tuple[str, frozenset[str]], int] = {}

    def restore(self, record: ServerRecord) -> None:
        """Continue with this record of the same server, for example the one last persisted."""
        self.record = record
        for client_id, issuer in record.issuers.items():
            self.used_at.setdefault(client_id, issuer)

    def authorized_request(self, method: str, url: str | None = None, operation: str = "") -> AuthorizedRequest:
        """Make an authorized request; `operation` names its purpose, for example ``tools/call add``."""
        url = url or self.server_url
        if not same_origin(url, self.server_url):
            raise UsageError("the token of an MCP server cannot be sent to another origin")
        return AuthorizedRequest(self, method, url, operation)

    @property
    def tokens(self) -> Tokens | None:
        return None if self.record.authorization is None else self.record.authorization.tokens

    def replied(self, headers: RawFields) -> None:
        """Report the headers of a response of the MCP server, of any status: they may contain the next DPoP nonce."""
        self.nonces.note(self.server_url, Headers(headers))

    def flow_over(self, flow: Flow) -> None:
        """Called by a flow at its end.  The next request that needs a token starts another one."""
        if self.flow is flow:
            self.flow = None

    def obtained(self) -> None:
        """Called by a flow when the record has new tokens."""
        self.generation += 1
        self._stepped_up.clear()  # a scope that was refused earlier may be granted now

    # For authorized requests.

    def _has_expired(self, now: float) -> bool:
        """Whether the token has expired, and a new one may be had without asking the server first."""
        tokens = self.tokens
        if tokens is None or tokens.expires_at is None or now < tokens.expires_at - _MARGIN:
            return False
        return tokens.refresh is not None or self.application.needs_no_user

    def _headers(self, method: str, url: str, now: float) -> Fields:
        tokens = self.tokens
        if tokens is None:
            return ()
        authorization = ("Authorization", f"{tokens.kind} {tokens.access}")  # auth-16
        key = self.application.dpop if tokens.kind == DPOP else None
        return (authorization, *self.proof(key, method, url, now, tokens.access))

    def proof(self, key: Key | None, method: str, url: str, now: float, token: str | None = None) -> Fields:
        """Return the DPoP header of a request, with the newest nonce of the origin; empty without a key."""
        if key is None:
            return ()
        proof = dpop_proof(key, method, url, now, self.entropy, nonce=self.nonces.of(url), token=token)
        return (("DPoP", proof),)

    def _drop_refresh_token(self) -> None:
        """A new token was refused at once, so the next token must not come from the refresh token."""
        self.record = self.record.without_refresh()


class AuthorizedRequest:
    """The steps of one HTTP request to its answer.

    `go` returns how to send it, `refused` the reaction to a 401 or 403.
    """

    def __init__(self, authorizer: Authorizer, method: str, url: str, operation: str) -> None:
        self._authorizer = authorizer
        self._method = method
        self._url = url
        self._operation = operation
        self._flow: Flow | None = None  # the flow that it waits for
        self._sent: int | None = None  # the generation of the token that the request was last sent with
        self._challenge: AuthChallenge | None = None  # of the last refusal
        self._refused_generation = 0  # the generation of the token in that refusal
        self._expired = False  # the token has expired, and a flow is needed to renew it
        self._renewed = False  # a flow has tried that
        self._replaced = False  # because the server had refused it
        self._nonce_retried = False
        self._step_ups = 0

    def go(self, now: float) -> Verdict:
        """Return how to send the request, or the flow to finish first.  Call it again after the flow."""
        authorizer = self._authorizer
        if self._flow is not None:
            if not self._flow.over:
                return WaitForFlow(self._flow)
            outcome, adopted, self._flow = self._flow.outcome, self._flow.adopted, None
            if isinstance(outcome, FlowFailed):
                return outcome
            if outcome is not None:
                self._renewed = True  # a token that expires within seconds is used anyway
                self._replaced = self._replaced and not adopted  # an adopted token may be the one that was refused
        # A refusal is answered by a newer token.  The flow of another request may not have got one, because it did not
        # know of this demand; and another request may have got one meanwhile.
        lacks = self._challenge is not None and self._refused_generation == authorizer.generation
        if not lacks and not self._renewed and (self._expired or authorizer._has_expired(now)):
            lacks = self._expired = True
            self._challenge = None
        if not lacks:
            self._sent = authorizer.generation
            return Authorized(authorizer._headers(self._method, self._url, now))
        if authorizer.flow is not None:
            self._flow = authorizer.flow
            return WaitForFlow(self._flow)
        self._flow = authorizer.flow = Flow(authorizer, self._challenge)
        return StartFlow(self._flow)

    def refused(self, status: int, headers: RawFields, now: float) -> Verdict:
        """React to a 401 or 403.  After any verdict except `FlowFailed`, send the request again."""
        if self._sent is None:
            raise UsageError("refused() was called before the request was sent; call go() first")
        authorizer, sent, self._sent = self._authorizer, self._sent, None
        fields = Headers(headers)
        challenge = read_auth_challenge(status, fields.get("WWW-Authenticate"))
        fresh_nonce = authorizer.nonces.note(authorizer.server_url, fields)
        blame = Blame.SERVER
        if challenge is None:
            why = f"the MCP server answered {status} and accepts neither Bearer nor DPoP"
            advice = "it, or a proxy in front of it, needs another kind of authentication"
        elif challenge.error == "use_dpop_nonce":
            if fresh_nonce and not self._nonce_retried:
                self._nonce_retried = True
                return self.go(now)
            why = "the MCP server requires a DPoP nonce, but sent none or refused its own"
            advice = "its operator must fix it"
        elif status == 401 and self._replaced:
            authorizer._drop_refresh_token()
            why = "the MCP server refused the token that its authorization server has just issued"
            advice = "the two must agree on which tokens are valid"
        elif status != 401 and (challenge.error != "insufficient_scope" or not challenge.scopes):
            why = "the MCP server forbids this request and names no scope that would allow it"
            advice = "its operator can say which users are allowed"
        elif status != 401 and not self._may_step_up(challenge.scopes, newer=sent != authorizer.generation):
            blame = Blame.USER
            needed = shown(" ".join(challenge.scopes))
            why = f"this request needs the scopes {needed}, which were requested and not granted"
            advice = "a user who may grant them must do so"
        else:
            self._replaced = self._replaced or status == 401
            self._challenge, self._refused_generation = challenge, sent
            return self.go(now)
        return FlowFailed(AuthorizationFailed(blame, why, advice))

    def _may_step_up(self, scopes: tuple[str, ...], *, newer: bool) -> bool:
        """auth-83: counted for each request, and for each operation and its missing scopes; `newer`: another request
        has got a new token meanwhile."""
        authorizer = self._authorizer
        self._step_ups += 1
        if self._step_ups > _STEP_UPS:
            return False
        if newer:
            return True
        held, counts = authorizer.record.authorization, authorizer._stepped_up
        if held is not None and {*scopes} <= {*held.asked}:
            return False
        lacking = (self._operation, frozenset(scopes))
        count = counts.pop(lacking, 0)
        counts[lacking] = count + 1
        if len(counts) > _OPERATIONS:
            del counts[next(iter(counts))]
        return count < _STEP_UPS
