"""The client's side of authorization: which token goes with a request, and what to do when there is none.

One `Authorizer` belongs to one MCP server and holds its tokens.  Each HTTP request to the server is an
`AuthorizedRequest`: it says which headers to send, is told when the server refused them, and is tried again so often
and no oftener.  What it takes to get a token is a `Flow`, and there is one at a time: the first errand in need is told
to `StartFlow` it, all others to `WaitForFlow` for it, and its outcome is the outcome of all.  A flow that was abandoned
has no outcome; then one of those who waited begins a new one.  Nothing is locked meanwhile, and who needs no token does
not wait.

A flow is driven by `start` and `receive`, and is to be left by `abandon`, however that comes about::

    deeds = authorizer.start(flow, now)
    while True:
        for deed in deeds: ...  # store what a Persist has
        if flow.over: break
        heard = ...  # what came of the last deed, the only one that is answered
        deeds = authorizer.receive(flow, heard, now)

`now` is Unix time, for tokens outlive processes.  Whoever restarts with the `ServerRecord` that was last persisted goes
on where the last process ended: a token that has come to its end is renewed at the endpoint that is known, and nobody
is asked anything.

The token goes to this server alone: to URLs of its origin, in the Authorization header, and nowhere else (auth-18,
auth-48).
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import Fields, Headers, RawFields
from trio_mcp.core.oauth.challenge import DPOP, AuthChallenge, read_demand
from trio_mcp.core.oauth.clients import Application, IdentityAssertion
from trio_mcp.core.oauth.deeds import Deed, FlowDone, FlowFailed, Heard, Persist
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame
from trio_mcp.core.oauth.flow import Flow, FlowSettings
from trio_mcp.core.oauth.places import UrlRules, origin_of, same_origin, url_fault
from trio_mcp.core.oauth.proofs import Entropy, Nonces, dpop_proof
from trio_mcp.core.oauth.records import ServerRecord, Tokens
from trio_mcp.core.records import record

__all__ = ["Authorized", "AuthorizedRequest", "Authorizer", "StartFlow", "Verdict", "WaitForFlow"]


@record
class Authorized:
    """Send the request with these headers, which are none before the server has asked for any."""

    headers: Fields = attrs.field(default=(), repr=False)


@record
class StartFlow:
    """Start this flow and drive it to its end, then ask the errand again."""

    flow: Flow


@record
class WaitForFlow:
    """Somebody drives this flow already: when it is over, ask the errand again."""

    flow: Flow


Verdict: TypeAlias = Authorized | StartFlow | WaitForFlow | FlowFailed

# Operations whose refusals are remembered; beyond, the oldest is forgotten and may ask the user once more.
_OPERATIONS = 256


class Authorizer:
    """The tokens of the MCP server at `server_url`.

    `entropy` gives so many random bytes.  `record` is what was last persisted for this server, if anything was.
    `used_at`, which all servers of one application share, has the issuer that each client id was first used at
    (auth-90): a server that the application goes to later must not be able to have it shown elsewhere.  Raises
    `UsageError` for a URL that tokens may not be sent to, and for a record of another server.
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
            raise UsageError(f"tokens are not sent to {shown(server_url.partition('?')[0])}, which {fault}")
        if record is not None and record.server_url != server_url:
            raise UsageError(f"the record is of another server than {origin_of(server_url)}")
        grant = application.grant
        if isinstance(grant, IdentityAssertion) and (fault := url_fault(grant.token_endpoint, self.rules)) is not None:
            raise UsageError(f"the identity provider's token endpoint {shown(grant.token_endpoint)} {fault}")
        self.server_url = server_url
        self._used_at = {} if used_at is None else used_at
        self._hold(record or ServerRecord(server_url))
        self.flow: Flow | None = None
        self.generation = 0
        """Counts the tokens that there have been, so that the refusal of an old one is told from that of the newest."""
        self._nonces = Nonces()
        self._setting = FlowSettings(server_url, application, entropy, self.rules, self._nonces, self._used_at)
        self._stepped_up: dict[tuple[str, frozenset[str]], int] = {}

    def errand(self, method: str, url: str | None = None, operation: str = "") -> AuthorizedRequest:
        """A request that is to be made; `operation` names what it does, such as ``tools/call add``."""
        url = url or self.server_url
        if not same_origin(url, self.server_url):
            raise UsageError("the token of an MCP server is not sent to another origin")
        return AuthorizedRequest(self, method, url, operation)

    @property
    def tokens(self) -> Tokens | None:
        return None if self.record.authorization is None else self.record.authorization.tokens

    def replied(self, headers: RawFields) -> None:
        """The MCP server sent these headers, with whatever status: they may bring the next DPoP nonce."""
        self._note_nonce(Headers(headers))

    # Flows.

    def start(self, flow: Flow, now: float) -> tuple[Deed, ...]:
        return self._take(flow, flow.start(now))

    def receive(self, flow: Flow, heard: Heard, now: float) -> tuple[Deed, ...]:
        """What to do next for this flow; nothing if it is over.  Raises for what does not answer its last deed."""
        return self._take(flow, flow.receive(heard, now))

    def adopt(self, flow: Flow, stored: ServerRecord) -> bool:
        """Before `start`: whether another process has stored other tokens meanwhile, which `flow` is then over by.

        Such a process may have used up our refresh token; to ask with it again could cost both of them theirs.
        """
        theirs, ours = stored.authorization, self.record.authorization
        if theirs is None or (ours is not None and theirs.tokens == ours.tokens):
            return False
        flow.adopt(stored)
        self._hold(stored)
        self._take(flow, ())
        return True

    def abandon(self, flow: Flow) -> None:
        """Nobody drives this flow any more.  Call it whenever that is so; to a flow that is over it does nothing."""
        flow.abandon()
        if self.flow is flow:
            self.flow = None

    def _hold(self, record: ServerRecord) -> None:
        self.record = record
        for client_id, issuer in record.issuers.items():
            self._used_at.setdefault(client_id, issuer)

    def _take(self, flow: Flow, deeds: tuple[Deed, ...]) -> tuple[Deed, ...]:
        for deed in deeds:
            if isinstance(deed, Persist):
                self._hold(deed.record)
        if flow.over and self.flow is flow:
            self.flow = None
            if flow.obtained:
                self.generation += 1
                self._stepped_up.clear()  # what was refused then may be granted now
        return deeds

    # For errands.

    def _flow_for(self, demand: AuthChallenge | None) -> StartFlow | WaitForFlow:
        if self.flow is not None:
            return WaitForFlow(self.flow)
        self.flow = Flow(self._setting, self.record, demand)
        return StartFlow(self.flow)

    def _note_nonce(self, headers: Headers) -> bool:
        return self._nonces.note(self.server_url, headers)

    def _has_expired(self, now: float) -> bool:
        """Whether the token is at its end, and there may be a way to the next without asking the server first."""
        tokens = self.tokens
        if tokens is None or tokens.expires_at is None or now < tokens.expires_at - self.rules.margin:
            return False
        return tokens.refresh is not None or self._setting.application.needs_no_user

    def _headers(self, method: str, url: str, now: float) -> Fields:
        tokens = self.tokens
        if tokens is None:
            return ()
        authorization = ("Authorization", f"{tokens.kind} {tokens.access}")  # auth-16
        key = self._setting.application.dpop
        if tokens.kind != DPOP or key is None:
            return (authorization,)
        nonce, entropy = self._nonces.of(self.server_url), self._setting.entropy
        proof = dpop_proof(key, method, url, now, entropy, nonce=nonce, token=tokens.access)
        return (authorization, ("DPoP", proof))

    def _distrust(self) -> None:
        """A new token was refused at once, so the next one comes by another way than the last."""
        self.record = self.record.without_refresh()

    def _may_step_up(self, operation: str, scopes: tuple[str, ...]) -> bool:
        """auth-83: counted for each operation and what it lacks."""
        lacking = (operation, frozenset(scopes))
        count = self._stepped_up.pop(lacking, 0)
        self._stepped_up[lacking] = count + 1
        if len(self._stepped_up) > _OPERATIONS:
            del self._stepped_up[next(iter(self._stepped_up))]
        return count < self.rules.step_ups


class AuthorizedRequest:
    """One HTTP request's way to an answer.  `go` says how to send it, `refused` what follows from a 401 or 403."""

    def __init__(self, authorizer: Authorizer, method: str, url: str, operation: str) -> None:
        self._authorizer = authorizer
        self._method = method
        self._url = url
        self._operation = operation
        self._flow: Flow | None = None  # whose end it waits for
        self._needy = False
        self._demand: AuthChallenge | None = None
        self._sent: int | None = None  # the generation of the token that the request was last sent with
        self._waiting_since = 0  # likewise, of the one that is not good enough
        self._renewed = False  # because the token had expired
        self._replaced = False  # because the server had refused it
        self._renonced = False
        self._step_ups = 0

    def go(self, now: float) -> Verdict:
        """How to send the request, or what must come first.  Ask again when that is over."""
        if self._flow is not None:
            if not self._flow.over:
                return WaitForFlow(self._flow)
            outcome, adopted, self._flow = self._flow.outcome, self._flow.adopted, None
            if isinstance(outcome, FlowFailed):
                return outcome
            if isinstance(outcome, FlowDone):
                # Another's flow may have ended with nothing gained, for it knew of no demand.
                self._renewed = True  # a token that lives for seconds is used all the same
                newer = self._authorizer.generation != self._waiting_since
                self._needy = self._demand is not None and not newer
                self._replaced = self._replaced and not adopted  # which may be no better than what was refused
        if not self._needy and not self._renewed and self._authorizer._has_expired(now):
            self._needy = self._renewed = True
            self._demand = None
        if self._needy:
            verdict = self._authorizer._flow_for(self._demand)
            self._flow = verdict.flow
            return verdict
        self._sent = self._authorizer.generation
        return Authorized(self._authorizer._headers(self._method, self._url, now))

    def refused(self, status: int, headers: RawFields, now: float) -> Verdict:
        """The server answered 401 or 403.  A verdict other than `FlowFailed` is a reason to send the request again."""
        if self._sent is None:
            raise UsageError("a request that was not sent cannot be refused")
        sent, self._sent = self._sent, None
        fields = Headers(headers)
        demand = read_demand(status, fields.get("WWW-Authenticate"))
        fresh_nonce = self._authorizer._note_nonce(fields)
        if demand is None:
            return _failed(
                Blame.SERVER,
                f"the MCP server answered {status} and wants neither Bearer nor DPoP",
                "it, or a proxy before it, must be told in another way who asks",
            )
        if demand.error == "use_dpop_nonce":
            if not fresh_nonce or self._renonced:
                return _failed(
                    Blame.SERVER,
                    "the MCP server wants another DPoP nonce than the one that it has given, or gives none",
                    "its operator must mend it",
                )
            self._renonced = True
            return self.go(now)
        return self._judge_401(demand, sent, now) if status == 401 else self._judge_403(demand, sent, now)

    def _judge_401(self, demand: AuthChallenge, sent: int, now: float) -> Verdict:
        if self._replaced:
            self._authorizer._distrust()
            return _failed(
                Blame.SERVER,
                "the MCP server refused the token that its authorization server has just given",
                "the two must agree on what a good token is",
            )
        self._replaced = True
        return self._need(demand, sent, now)

    def _judge_403(self, demand: AuthChallenge, sent: int, now: float) -> Verdict:
        authorizer = self._authorizer
        if demand.error != "insufficient_scope" or not demand.scopes:
            return _failed(
                Blame.SERVER,
                "the MCP server forbids this request and names no scope that would allow it",
                "its operator can say who may make it",
            )
        held = authorizer.record.authorization
        newer = sent != authorizer.generation
        lacks = held is None or not {*demand.scopes} <= {*held.asked}
        self._step_ups += 1
        again = self._step_ups <= authorizer.rules.step_ups
        if again and (newer or (lacks and authorizer._may_step_up(self._operation, demand.scopes))):
            return self._need(demand, sent, now)
        return _failed(
            Blame.USER,
            f"this request needs the scopes {shown(' '.join(demand.scopes))}, which were asked for and not given",
            "whoever may grant them must do so",
        )

    def _need(self, demand: AuthChallenge, sent: int, now: float) -> Verdict:
        # The refusal of an old token says nothing of the newest, which another errand has got in the meantime.
        self._needy = sent == self._authorizer.generation
        self._demand = demand
        self._waiting_since = sent
        return self.go(now)


def _failed(blame: Blame, why: str, advice: str) -> FlowFailed:
    return FlowFailed(AuthorizationFailed(blame, why, advice))
