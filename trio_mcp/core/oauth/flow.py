"""One attempt to get a token: a state machine from the known facts to a token or an error.

A flow changes nothing outside of itself.  So it may be dropped at any step, and the next flow starts fresh.  Facts that
should outlive a flow are reported by `Persist`.

`FLOW` is its state table: a row for each step, a column for each finding, and the next step in the cell.  A step begins
with an action, so one action is outstanding at any time, and one event answers it.  Every step can also end the flow
with an error that says who is to blame; this is the same everywhere, and has no column.

The rules follow from the documents found, not from the negotiated revision, which is unknown before there is a token.
A server with resource metadata has revision 2025-06-18 or later, and the strictest rules apply.  A server without it
has 2025-03-26, and is its own authorization server at its own origin.  A 5xx proves nothing: if a document could not be
fetched, it may still exist.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import JSON, PROTOCOL_VERSION, Fields
from trio_mcp.core.jsonrpc import JsonObject
from trio_mcp.core.oauth.challenge import DPOP, AuthChallenge, union
from trio_mcp.core.oauth.clients import (
    Application,
    AuthorizationCode,
    ClientAuthMethod,
    ClientCredentials,
    IdentityAssertion,
    OAuthClient,
    authenticated,
    choose_method,
    find_client,
    find_client_without_user,
    preregistered_client,
    read_registration,
    registration,
    registration_refused,
)
from trio_mcp.core.oauth.deeds import (
    AskAssertion,
    Asserted,
    BrowserReturned,
    FlowAbandoned,
    FlowAction,
    FlowDone,
    FlowEvent,
    FlowFailed,
    ForbiddenAddress,
    OpenBrowser,
    OpenReceiver,
    Persist,
    ReceiverReady,
    Replied,
    RequestFailed,
    ReturnIgnored,
    SendRequest,
)
from trio_mcp.core.oauth.documents import (
    ResourceDocument,
    ServerDocument,
    default_server,
    read_object,
    read_resource,
    read_server,
)
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame
from trio_mcp.core.oauth.grants import (
    JWT_BEARER,
    OFFLINE,
    PendingAuthorization,
    authorization_url,
    check_pkce,
    client_credentials_grant,
    code_grant,
    exchange_grant,
    form,
    jwt_grant,
    new_authorization,
    read_assertion,
    read_return,
    read_tokens,
    refresh_grant,
    refused,
)
from trio_mcp.core.oauth.places import (
    UrlRules,
    is_trusted,
    legacy_metadata_url,
    network_at,
    network_fault,
    networks_of,
    origin_of,
    redirect_fault,
    resource_metadata_urls,
    resource_of,
    same_origin,
    server_metadata_urls,
    trust_advice,
    url_fault,
)
from trio_mcp.core.oauth.proofs import Entropy, Key, Nonces, dpop_proof
from trio_mcp.core.oauth.records import ServerRecord, TokenGrant
from trio_mcp.core.oauth.search import DocumentSearch, forbidden_address
from trio_mcp.core.records import record

__all__ = ["FLOW", "Flow", "FlowFinding", "FlowSettings", "FlowStep"]


class FlowStep(enum.Enum):
    """The step that waits for an event."""

    START = enum.auto()
    RESOURCE = enum.auto()  # the metadata of the MCP server
    SERVER = enum.auto()  # the metadata of the authorization server
    LISTEN = enum.auto()  # the redirect URI
    REGISTER = enum.auto()
    BROWSER = enum.auto()
    ASSERTION = enum.auto()  # from the application
    EXCHANGE = enum.auto()  # of the assertion, at the identity provider
    TOKEN = enum.auto()
    REFRESH = enum.auto()
    OVER = enum.auto()


class FlowFinding(enum.Enum):
    GOOD = enum.auto()  # success
    ELSEWHERE = enum.auto()  # not at this URL; try the next one
    NOTHING = enum.auto()  # no earlier tokens that can be used
    RENEWABLE = enum.auto()  # by a refresh token of the same issuer
    FOR_USER = enum.auto()  # the grant needs a user
    BY_ASSERTION = enum.auto()  # the grant needs an assertion
    BY_ITSELF = enum.auto()  # the grant needs only the client's credentials
    KNOWN = enum.auto()  # the client has an id here
    UNKNOWN = enum.auto()
    TO_EXCHANGE = enum.auto()  # the assertion is the user's; the identity provider exchanges it
    NONCE = enum.auto()  # repeat the request with the new nonce
    STALE = enum.auto()  # the refresh token is no longer valid
    SPENT = enum.auto()  # no refresh token, and the demand of the server is unknown


FLOW: dict[FlowStep, dict[FlowFinding, FlowStep]] = {
    FlowStep.START: {
        FlowFinding.NOTHING: FlowStep.RESOURCE,
        FlowFinding.RENEWABLE: FlowStep.REFRESH,
        FlowFinding.BY_ASSERTION: FlowStep.ASSERTION,
        FlowFinding.BY_ITSELF: FlowStep.TOKEN,
        FlowFinding.SPENT: FlowStep.OVER,
    },
    # If a server refuses a token, check first whether it still uses the same issuer; only then renew the token.
    FlowStep.RESOURCE: {
        FlowFinding.ELSEWHERE: FlowStep.RESOURCE,
        FlowFinding.RENEWABLE: FlowStep.REFRESH,
        FlowFinding.GOOD: FlowStep.SERVER,
    },
    FlowStep.SERVER: {
        FlowFinding.ELSEWHERE: FlowStep.SERVER,
        FlowFinding.FOR_USER: FlowStep.LISTEN,
        FlowFinding.BY_ASSERTION: FlowStep.ASSERTION,
        FlowFinding.BY_ITSELF: FlowStep.TOKEN,
    },
    FlowStep.LISTEN: {FlowFinding.KNOWN: FlowStep.BROWSER, FlowFinding.UNKNOWN: FlowStep.REGISTER},
    FlowStep.REGISTER: {FlowFinding.GOOD: FlowStep.BROWSER},
    FlowStep.BROWSER: {FlowFinding.GOOD: FlowStep.TOKEN},
    FlowStep.ASSERTION: {FlowFinding.TO_EXCHANGE: FlowStep.EXCHANGE, FlowFinding.GOOD: FlowStep.TOKEN},
    FlowStep.EXCHANGE: {FlowFinding.GOOD: FlowStep.TOKEN},
    FlowStep.TOKEN: {FlowFinding.NONCE: FlowStep.TOKEN, FlowFinding.GOOD: FlowStep.OVER},
    FlowStep.REFRESH: {
        FlowFinding.NONCE: FlowStep.REFRESH,
        FlowFinding.GOOD: FlowStep.OVER,
        FlowFinding.STALE: FlowStep.SERVER,
        FlowFinding.SPENT: FlowStep.OVER,
    },
}

_REPLY = (Replied, ForbiddenAddress, RequestFailed)
_ANSWERS: Final[dict[FlowStep, tuple[type, ...]]] = {
    FlowStep.START: (),
    FlowStep.RESOURCE: _REPLY,
    FlowStep.SERVER: _REPLY,
    FlowStep.LISTEN: (ReceiverReady,),
    FlowStep.REGISTER: _REPLY,
    FlowStep.BROWSER: (BrowserReturned,),
    FlowStep.ASSERTION: (Asserted,),
    FlowStep.EXCHANGE: _REPLY,
    FlowStep.TOKEN: _REPLY,
    FlowStep.REFRESH: _REPLY,
}

_FORM_HEADERS: Final[Fields] = (("Content-Type", "application/x-www-form-urlencoded"), ("Accept", JSON))
_JSON_HEADERS: Final[Fields] = (("Content-Type", JSON), ("Accept", JSON))
_SECRETS: Final = ("assertion", "code", "code_verifier", "refresh_token")
_OF_2025_03_26: Final = "2025-03-26"


@record
class FlowSettings:
    """Settings common to all flows of one MCP server.  `used_at`: see `Authorizer`."""

    server_url: str
    application: Application
    entropy: Entropy
    rules: UrlRules
    nonces: Nonces
    used_at: Mapping[str, str]


class Flow:
    """Call `start`, carry out the actions, and feed the events to `receive`, until `FlowDone` or `FlowFailed`.

    `challenge` is the demand of a refused request; None if the token has only expired.  `record` is the knowledge about
    the server, which the flow extends.
    """

    def __init__(self, settings: FlowSettings, record: ServerRecord, challenge: AuthChallenge | None) -> None:
        self.step = FlowStep.START
        self.outcome: FlowDone | FlowFailed | None = None
        self.abandoned = False
        self.obtained = False  # True once the flow has a token
        self.adopted = False  # True if another process got that token
        self.record = record
        self.challenge = challenge
        self._settings = settings
        self._application = settings.application
        self._queued: list[FlowAction] = []  # actions before the next one
        self._networks = networks_of(settings.server_url, record.network)
        self._search = self._search_resource()
        self._document: ResourceDocument | None = None
        self._server: ServerDocument | None = None
        self._legacy = False
        self._issuer = ""
        self._token_endpoint = ""
        self._resource = resource_of(settings.server_url)
        self._client: OAuthClient | None = None
        self._requested: tuple[str, ...] = ()
        self._proof_key: Key | None = None
        self._nonce_retried = False
        self._reused = False  # the client was registered by an earlier flow
        self._redirect_uri = ""
        self._pending: PendingAuthorization | None = None
        self._assertion = ""
        self._grant: dict[str, str | None] = {}
        self._request_url = ""

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.abandoned

    def start(self, now: float) -> tuple[FlowAction, ...]:
        if self.step is not FlowStep.START or self.over:
            raise UsageError("start() of a flow must be called once")
        return self._step(self._find_beginning, now)

    def receive(self, event: FlowEvent, now: float) -> tuple[FlowAction, ...]:
        """Return the next actions.  Events after the end are late, and ignored."""
        if self.over:
            return ()
        if not isinstance(event, (*_ANSWERS[self.step], FlowAbandoned)):
            raise UsageError(f"a flow in the step {self.step.name} cannot receive {type(event).__name__}")
        if isinstance(event, ReceiverReady) and (fault := redirect_fault(event.redirect_uri)):
            uri = shown(event.redirect_uri)
            raise UsageError(f"the redirect URI {uri} {fault}; it must be https, or on loopback")
        return self._step(lambda: self._judge(event, now), now)

    def adopt(self, record: ServerRecord) -> None:
        """End the flow before its start, with the tokens of another process."""
        if self.step is not FlowStep.START or self.over:
            raise UsageError("adopt() must be called before start()")
        self.step, self.outcome, self.record = FlowStep.OVER, FlowDone(), record
        self.obtained = self.adopted = True

    def abandon(self) -> None:
        """Report that no further event will come.  Does nothing if the flow is over."""
        self.abandoned = self.outcome is None

    def _step(self, judge: Callable[[], FlowFinding | None], now: float) -> tuple[FlowAction, ...]:
        last: FlowAction
        try:
            found = judge()
            if found is None:
                return (ReturnIgnored("the browser came back with the answer to another request"),)
            self.step = FLOW[self.step][found]
            last = self._next_action(now)
        except AuthorizationFailed as error:
            self.step = FlowStep.OVER
            last = FlowFailed(error)
        if isinstance(last, FlowDone | FlowFailed):
            self.outcome = last
        actions, self._queued = (*self._queued, last), []
        return actions

    def _persist(self, record: ServerRecord) -> None:
        if record != self.record:
            self.record = record
            self._queued = [Persist(record)]

    # The actions of each step.

    def _next_action(self, now: float) -> FlowAction:
        match self.step:
            case FlowStep.RESOURCE | FlowStep.SERVER:
                return self._with_networks(self._search.request())
            case FlowStep.LISTEN:
                return OpenReceiver()
            case FlowStep.REGISTER:
                return self._request_registration()
            case FlowStep.BROWSER:
                return self._request_browser()
            case FlowStep.ASSERTION:
                return AskAssertion(self._issuer, self._resource)
            case FlowStep.EXCHANGE:
                return self._request_exchange(now)
            case FlowStep.TOKEN | FlowStep.REFRESH:
                return self._request_token(now)
            case _:
                return FlowDone()

    def _post(self, url: str, headers: Fields, body: bytes) -> SendRequest:
        rules = self._settings.rules
        request = SendRequest(
            "POST", url, headers, body, body_bytes=rules.document_bytes, seconds=rules.request_seconds
        )
        return self._with_networks(request)

    def _with_networks(self, request: SendRequest) -> SendRequest:
        """Add the networks to which the request may connect: any network, if the application named the URL."""
        self._request_url, rules = request.url, self._settings.rules
        of_application = self.step is FlowStep.EXCHANGE or same_origin(request.url, self._settings.server_url)
        if of_application or is_trusted(request.url, rules) or is_trusted(self._issuer, rules):
            return request
        return attrs.evolve(request, networks=self._networks)

    def _request_registration(self) -> FlowAction:
        assert self._server is not None
        assert self._server.registration_endpoint is not None
        body = registration(self._application, self._server, self._redirect_uri, self._requested)
        return self._post(self._server.registration_endpoint, _JSON_HEADERS, json.dumps(body).encode())

    def _request_browser(self) -> FlowAction:
        assert self._server is not None
        assert self._client is not None
        self._pending = new_authorization(self._server, self._redirect_uri, self._settings.entropy)
        url = authorization_url(self._server, self._client.client_id, self._pending, self._requested, self._resource)
        return OpenBrowser(url, self._issuer, self._settings.rules.user_seconds)

    def _request_exchange(self, now: float) -> FlowAction:
        grant = self._application.grant
        assert isinstance(grant, IdentityAssertion)
        fields = exchange_grant(grant, self._assertion, self._issuer, self._resource, self._requested)
        client = attrs.evolve(grant.client, method=choose_method(grant.client, None, None))
        headers, proofs = authenticated(client, None, grant.token_endpoint, now, self._settings.entropy)
        return self._post(grant.token_endpoint, (*_FORM_HEADERS, *headers), form({**fields, **proofs}))

    def _request_token(self, now: float) -> FlowAction:
        assert self._client is not None
        entropy, url = self._settings.entropy, self._token_endpoint
        headers, proofs = authenticated(self._client, self._application.key, self._issuer, now, entropy)
        if self._proof_key is not None:
            nonce = self._settings.nonces.of(url)
            headers = (*headers, ("DPoP", dpop_proof(self._proof_key, "POST", url, now, entropy, nonce=nonce)))
        # auth-42: the same resource as in the authorization request, even if the server ignores it.
        body = form({**self._grant, "resource": self._resource, **proofs})
        return self._post(url, (*_FORM_HEADERS, *headers), body)

    # The meaning of the events.

    def _judge(self, event: FlowEvent, now: float) -> FlowFinding | None:
        match event:
            case FlowAbandoned():
                raise self._abandoned_error(event)
            case Replied() | ForbiddenAddress() | RequestFailed() if self.step is FlowStep.RESOURCE:
                return self._find_resource(event)
            case Replied() | ForbiddenAddress() | RequestFailed() if self.step is FlowStep.SERVER:
                return self._find_server(event)
            case RequestFailed(why=why):
                raise AuthorizationFailed(
                    Blame.NETWORK, f"{shown(self._request_url)} could not be reached: {why}", "try again later"
                )
            case ForbiddenAddress() if self.step is FlowStep.REFRESH and self.challenge is None:
                # The network of the MCP server may have changed, as with a VPN.  Its refusal of the request shows its
                # present network, so send the request first.
                return FlowFinding.SPENT
            case ForbiddenAddress():
                raise forbidden_address(self._request_url, event, Blame.AUTHORIZATION_SERVER)
            case Replied() if self.step is FlowStep.REGISTER:
                return self._find_registration(event)
            case Replied() if self.step is FlowStep.EXCHANGE:
                return self._find_exchanged(event)
            case Replied():
                return self._find_tokens(event, now)
            case ReceiverReady(redirect_uri=uri):
                return self._find_client(uri, now)
            case BrowserReturned(query=query):
                return self._find_code(query)
            case _:
                return self._take_assertion(event.assertion)

    def _abandoned_error(self, event: FlowAbandoned) -> AuthorizationFailed:
        why = event.why
        if self.step is FlowStep.BROWSER:
            # A server that has lost the registration shows an error to the user, and does not redirect the browser.
            if self._reused:
                self._forget_client()
            if not event.at_fault:
                return AuthorizationFailed(
                    Blame.USER,
                    f"{shown(self._issuer)} was not allowed to issue a token: {why}",
                    "the user must allow it there",
                )
        return AuthorizationFailed(Blame.APPLICATION, f"the authorization was abandoned: {why}", "start it again")

    def _learn_from(self, refusal: AuthorizationFailed) -> None:
        """Forget remembered facts that the server refuses, so that the next flow does not fail in the same way."""
        held = self.record.authorization
        if refusal.code in ("invalid_client", "unauthorized_client"):
            self._forget_client()
        elif refusal.code == "invalid_scope" and held is not None:
            self._persist(attrs.evolve(self.record, authorization=attrs.evolve(held, asked=())))

    def _forget_client(self) -> None:
        assert self._client is not None
        known = next((each for each in self.record.registered if each.issuer == self._issuer), None)
        if known is not None and known.client_id == self._client.client_id and known.redirect_uris:
            self._persist(self.record.without_client(known))

    # The first step.

    def _find_beginning(self) -> FlowFinding:
        held = self.record.authorization
        if held is None or self.challenge is not None:
            return FlowFinding.NOTHING
        needs_no_user = self._application.needs_no_user
        if not self._is_ours(held) or not (needs_no_user or held.tokens.refresh):
            # Do not ask the user before the server refuses a request.
            return FlowFinding.NOTHING if needs_no_user else FlowFinding.SPENT
        self._use_grant(held)
        if held.tokens.refresh is not None:
            self._grant = refresh_grant(held.tokens.refresh)
            return FlowFinding.RENEWABLE
        return self._choose_grant()

    def _is_ours(self, held: TokenGrant) -> bool:
        """Whether the application is still the one of this grant, and has its keys."""
        app, client = self._application, held.client
        if client.method is ClientAuthMethod.KEY and app.key is None:
            return False
        if held.tokens.kind == DPOP and app.dpop is None:
            return False
        rules, endpoint = self._settings.rules, held.token_endpoint
        if url_fault(endpoint, rules) or not (
            is_trusted(held.issuer, rules) or network_fault(endpoint, rules, self._networks) is None
        ):
            return False  # the rules have changed since then
        return not app.clients or any((client.client_id, client.secret) == (c.client_id, c.secret) for c in app.clients)

    def _use_grant(self, held: TokenGrant) -> None:
        self._issuer, self._token_endpoint, self._resource = held.issuer, held.token_endpoint, held.resource
        self._client, self._requested = held.client, held.asked
        self._proof_key = self._application.dpop if held.tokens.kind == DPOP else None

    def _choose_grant(self) -> FlowFinding:
        """Choose the grant without a user."""
        if isinstance(self._application.grant, ClientCredentials):
            self._grant = client_credentials_grant(self._requested)
            return FlowFinding.BY_ITSELF
        return FlowFinding.BY_ASSERTION

    # Discovery.

    def _search_resource(self) -> DocumentSearch:
        url, rules = self._settings.server_url, self._settings.rules
        named = None if self.challenge is None else self.challenge.metadata_url
        fault = None
        if named is not None and url_fault(named, rules) is None:
            fault = network_fault(named, rules, self._networks)
        search = DocumentSearch(
            resource_metadata_urls(url, named if fault is None else None, rules), rules, Blame.SERVER
        )
        if named is not None and fault is not None:  # the well-known URLs may suffice
            why = f"the MCP server names its metadata at {shown(named)}, which {fault}"
            search.pass_over(AuthorizationFailed(Blame.SERVER, why, trust_advice(named)))
        return search

    def _find_resource(self, event: Replied | ForbiddenAddress | RequestFailed) -> FlowFinding:
        settings = self._settings
        fields: Fields = ()
        self._note_network(event)
        answer = self._search.read(event)
        if answer is not None:
            self._document = read_resource(answer, settings.server_url, settings.rules, self._networks)
            self._resource = self._document.resource
            self._issuer = self._choose_issuer(self._document.issuers)
            urls = server_metadata_urls(self._issuer)
        elif not self._search.exhausted:
            return FlowFinding.ELSEWHERE
        else:
            self._search.conclude()
            self._refuse_to_guess()
            self._legacy = True
            self._issuer = origin_of(settings.server_url)
            # auth-13: only this revision asks for the header, and only its servers are asked here.
            fields = ((PROTOCOL_VERSION, _OF_2025_03_26),)
            urls = (legacy_metadata_url(settings.server_url),)
        self._search = DocumentSearch(urls, settings.rules, Blame.AUTHORIZATION_SERVER, fields)
        return FlowFinding.RENEWABLE if self._can_renew() else FlowFinding.GOOD

    def _note_network(self, event: Replied | ForbiddenAddress | RequestFailed) -> None:
        """Note the MCP server's network, if this reply comes from its own origin.

        Another host's name proves nothing.
        """
        if isinstance(event, Replied) and event.address and same_origin(self._request_url, self._settings.server_url):
            seen = network_at(event.address)
            self.record = attrs.evolve(self.record, network=seen)  # stored with the next Persist
            self._networks = networks_of(self._settings.server_url, seen)

    def _refuse_to_guess(self) -> None:
        """A server that names its metadata has a revision without default endpoints."""
        if self.challenge is not None and self.challenge.metadata_url is not None:
            raise AuthorizationFailed(
                Blame.SERVER,
                f"the MCP server names its metadata at {shown(self.challenge.metadata_url)}, but none was found",
                "its operator must fix it",
            )

    def _choose_issuer(self, issuers: tuple[str, ...]) -> str:
        """auth-118: prefer the application's choice, then an issuer already in use, then the first."""
        held = self.record.authorization
        wanted = [
            *self._application.prefers,
            *(each.issuer for each in self._application.clients),
            *([] if held is None else [held.issuer]),
        ]
        return next((each for each in wanted if each in issuers), None) or issuers[0]

    def _can_renew(self) -> bool:
        """Whether the refused token can be renewed: same issuer, same resource, and no additional scopes."""
        held, challenge = self.record.authorization, self.challenge
        if held is None or held.tokens.refresh is None or challenge is None or challenge.status != 401:
            return False
        same = held.issuer == self._issuer and held.resource == self._resource
        if not same or not {*challenge.scopes} <= {*held.asked} or not self._is_ours(held):
            return False
        if self._must_prove() and held.tokens.kind != DPOP:
            return False  # the next token would not be bound either
        self._use_grant(held)
        self._grant = refresh_grant(held.tokens.refresh)
        return True

    def _find_server(self, event: Replied | ForbiddenAddress | RequestFailed) -> FlowFinding:
        settings = self._settings
        answer = self._search.read(event)
        if answer is not None:
            try:
                self._server = read_server(answer, self._issuer, settings.rules, self._networks, legacy=self._legacy)
            except AuthorizationFailed as error:
                self._search.pass_over(error)  # auth-91: not used; another URL may have the right one
        if self._server is None and not self._search.exhausted:
            return FlowFinding.ELSEWHERE
        if self._server is None:
            self._search.conclude()
            if not self._legacy:
                raise AuthorizationFailed(
                    Blame.AUTHORIZATION_SERVER,
                    f"{shown(self._issuer)} publishes no metadata at {', '.join(self._search.requested)}",
                    "its operator must publish it, because endpoints are never guessed",
                )
            self._server = default_server(settings.server_url)
        return self._choose_request(self._server)

    def _choose_request(self, server: ServerDocument) -> FlowFinding:
        """Choose the scopes and the grant for this server."""
        grant = self._application.grant
        self._token_endpoint = server.token_endpoint
        self._requested = self._scopes(server)
        self._proof_key = self._choose_proof_key(server)
        if isinstance(grant, AuthorizationCode):
            check_pkce(server)
            return FlowFinding.FOR_USER
        name = "client_credentials" if isinstance(grant, ClientCredentials) else JWT_BEARER
        if server.grants is not None and name not in server.grants:
            raise AuthorizationFailed(
                Blame.APPLICATION,
                f"{shown(self._issuer)} does not offer the grant {name}, which the application is configured to use",
                "use another grant, or have this one allowed there",
            )
        self._set_client(find_client_without_user(self._application, server, self._preregistered()))
        return self._choose_grant()

    def _scopes(self, server: ServerDocument) -> tuple[str, ...]:
        """auth-66: the scopes of the challenge, or all that the resource supports, plus those requested earlier."""
        app, held = self._application, self.record.authorization
        if self.challenge is not None and self.challenge.scopes:
            wanted = self.challenge.scopes
        elif app.scopes is not None:
            wanted = app.scopes
        else:
            wanted = (self._document.scopes if self._document else None) or ()
        if held is not None and held.issuer == self._issuer:
            wanted = union(held.asked, wanted)  # auth-99, auth-112
        # auth-108.  offline_access alone would replace the server's default scopes instead of adding to them.
        offline = app.offline and isinstance(app.grant, AuthorizationCode) and OFFLINE in server.scopes
        return union(wanted, (OFFLINE,)) if wanted and offline else wanted

    def _choose_proof_key(self, server: ServerDocument) -> Key | None:
        key = self._application.dpop
        if key is not None and key.algorithm in server.dpop_algorithms:
            return key
        if self._must_prove():
            lacks = "has no key for it" if key is None else f"has a key for {key.algorithm}"
            taken = ", ".join(server.dpop_algorithms) or "none"
            raise AuthorizationFailed(
                Blame.APPLICATION,
                f"the MCP server accepts only tokens that are bound by DPoP, and the application {lacks}",
                f"give it a dpop Key; the algorithms of {shown(self._issuer)} are {shown(taken)}",
            )
        return None

    def _must_prove(self) -> bool:
        bound = self._document is not None and self._document.requires_dpop
        return bound or (self.challenge is not None and self.challenge.schemes == (DPOP,))

    # The client's identity.

    def _preregistered(self) -> OAuthClient | None:
        bound_to = {**self._settings.used_at, **self.record.issuers}
        return preregistered_client(self._application, self._issuer, bound_to)

    def _set_client(self, client: OAuthClient) -> None:
        taken = None if self._server is None else self._server.methods
        self._client = attrs.evolve(client, method=choose_method(client, self._application.key, taken))
        if any(each.client_id == client.client_id and each.issuer is None for each in self._application.clients):
            self._persist(self.record.with_client(self._client))  # from now on it belongs to this issuer

    def _find_client(self, redirect_uri: str, now: float) -> FlowFinding:
        assert self._server is not None
        self._redirect_uri = redirect_uri
        known = self.record.client_at(self._issuer, now)
        client = find_client(self._application, self._server, self._preregistered(), known, redirect_uri)
        if client is None:
            return FlowFinding.UNKNOWN
        self._reused = client is known
        self._set_client(client)
        return FlowFinding.KNOWN

    def _find_registration(self, reply: Replied) -> FlowFinding:
        answer = read_object(reply.body, self._settings.rules.document_bytes)
        if not 200 <= reply.status < 300:
            raise registration_refused(self._issuer, reply.status, answer)
        client = read_registration(answer, self._issuer, self._redirect_uri)
        self._persist(self.record.with_client(client))
        self._set_client(client)
        return FlowFinding.GOOD

    # The grant, and the server's answer.

    def _find_code(self, query: str) -> FlowFinding | None:
        assert self._pending is not None
        try:
            code = read_return(query, self._pending)
        except AuthorizationFailed as error:
            self._learn_from(error)
            raise
        if code is None:
            return None
        self._grant = code_grant(code, self._pending)
        return FlowFinding.GOOD

    def _take_assertion(self, assertion: str) -> FlowFinding:
        self._assertion = assertion
        if isinstance(self._application.grant, IdentityAssertion):
            return FlowFinding.TO_EXCHANGE
        self._grant = jwt_grant(assertion, self._requested)
        return FlowFinding.GOOD

    def _find_exchanged(self, reply: Replied) -> FlowFinding:
        grant = self._application.grant
        assert isinstance(grant, IdentityAssertion)
        answer = read_object(reply.body, self._settings.rules.document_bytes)
        if not 200 <= reply.status < 300:
            secrets = (self._assertion, grant.client.secret)
            raise refused(grant.token_endpoint, answer, reply.status, secrets, Blame.IDENTITY_PROVIDER)
        self._grant = jwt_grant(read_assertion(answer, grant.token_endpoint), self._requested)
        return FlowFinding.GOOD

    def _find_tokens(self, reply: Replied, now: float) -> FlowFinding:
        answer = read_object(reply.body, self._settings.rules.document_bytes)
        fresh = self._settings.nonces.note(self._token_endpoint, reply.headers)
        error = answer.get("error") if answer else None
        if error == "use_dpop_nonce" and fresh and self._proof_key is not None and not self._nonce_retried:
            self._nonce_retried = True
            return FlowFinding.NONCE
        # Some servers refuse with a 200.
        if not 200 <= reply.status < 300 or (error is not None and "access_token" not in (answer or {})):
            return self._refused(reply, answer)
        self._take_tokens(answer, now)
        return FlowFinding.GOOD

    def _refused(self, reply: Replied, answer: JsonObject | None) -> FlowFinding:
        secrets = [*map(self._grant.get, _SECRETS), self._client.secret if self._client else None]
        refusal = refused(self._issuer, answer, reply.status, secrets)
        self._learn_from(refusal)
        passing = reply.status >= 500 or reply.status in (408, 425, 429)
        if self.step is FlowStep.REFRESH and not passing:
            self._persist(self.record.without_refresh())
            return FlowFinding.SPENT if self.challenge is None else FlowFinding.STALE
        if self.challenge is None and not passing:
            # Facts that were used without discovery are out of date: the next request starts with discovery.
            self._persist(attrs.evolve(self.record, authorization=None))
        raise refusal

    def _take_tokens(self, answer: JsonObject | None, now: float) -> None:
        assert self._client is not None
        held = self.record.authorization
        granted = held.tokens.scopes if self.step is FlowStep.REFRESH and held is not None else self._requested
        tokens = read_tokens(answer, self._issuer, granted, now, proven=self._proof_key is not None)
        if self._must_prove() and tokens.kind != DPOP:
            raise AuthorizationFailed(
                Blame.AUTHORIZATION_SERVER,
                f"{shown(self._issuer)} issued a {tokens.kind} token, but the MCP server accepts only DPoP",
                "its operator must enable DPoP",
            )
        if tokens.refresh is None and self.step is FlowStep.REFRESH and held is not None:
            tokens = attrs.evolve(tokens, refresh=held.tokens.refresh)  # not rotated
        authorization = TokenGrant(
            self._issuer, self._token_endpoint, self._client, self._resource, self._requested, tokens
        )
        self._persist(attrs.evolve(self.record, authorization=authorization))
        self.obtained = True
