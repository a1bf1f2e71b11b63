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
    find_own_client,
    given_client,
    read_registration,
    registration,
    registration_refused,
)
from trio_mcp.core.oauth.deeds import (
    AskAssertion,
    Asserted,
    BrowserReturned,
    Deed,
    FlowAbandoned,
    FlowDone,
    FlowFailed,
    ForbiddenAddress,
    Heard,
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
    code_grant,
    exchange_grant,
    form,
    jwt_grant,
    own_grant,
    pending,
    read_assertion,
    read_return,
    read_tokens,
    refresh_grant,
    refused,
)
from trio_mcp.core.oauth.places import (
    UrlRules,
    is_trusted,
    legacy_place,
    network_at,
    networks_of,
    origin_of,
    place_fault,
    redirect_fault,
    resource_of,
    resource_places,
    same_origin,
    server_places,
    trust,
    url_fault,
)
from trio_mcp.core.oauth.proofs import Entropy, Key, Nonces, dpop_proof
from trio_mcp.core.oauth.records import ServerRecord, TokenGrant
from trio_mcp.core.oauth.search import DocumentSearch, led_elsewhere
from trio_mcp.core.records import record

__all__ = ["FLOW", "Flow", "FlowFinding", "FlowSettings", "FlowStep"]


class FlowStep(enum.Enum):
    """The step whose event the flow waits for."""

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

    `demand` is the server's refusal of a request; None if the token has only expired.  `record` is the knowledge about
    the server, which the flow extends.
    """

    def __init__(self, setting: FlowSettings, record: ServerRecord, demand: AuthChallenge | None) -> None:
        self.step = FlowStep.START
        self.outcome: FlowDone | FlowFailed | None = None
        self.abandoned = False
        self.obtained = False  # True once the flow has a token
        self.adopted = False  # True if another process got that token
        self.record = record
        self.demand = demand
        self._setting = setting
        self._application = setting.application
        self._said: list[Deed] = []  # actions before the next one
        self._networks = networks_of(setting.server_url, record.network)
        self._search = self._search_resource()
        self._document: ResourceDocument | None = None
        self._server: ServerDocument | None = None
        self._legacy = False
        self._issuer = ""
        self._token_endpoint = ""
        self._resource = resource_of(setting.server_url)
        self._client: OAuthClient | None = None
        self._asked: tuple[str, ...] = ()
        self._proof_key: Key | None = None
        self._renonced = False
        self._reused = False  # the client was registered by an earlier flow
        self._redirect_uri = ""
        self._pending: PendingAuthorization | None = None
        self._assertion = ""
        self._grant: dict[str, str | None] = {}
        self._asked_at = ""

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.abandoned

    def start(self, now: float) -> tuple[Deed, ...]:
        if self.step is not FlowStep.START or self.over:
            raise UsageError("start() of a flow must be called once")
        return self._step(self._find_beginning, now)

    def receive(self, heard: Heard, now: float) -> tuple[Deed, ...]:
        """Return the next actions.  Events after the end are late, and ignored."""
        if self.over:
            return ()
        if not isinstance(heard, (*_ANSWERS[self.step], FlowAbandoned)):
            raise UsageError(f"a flow in the step {self.step.name} cannot receive {type(heard).__name__}")
        if isinstance(heard, ReceiverReady) and (fault := redirect_fault(heard.redirect_uri)):
            uri = shown(heard.redirect_uri)
            raise UsageError(f"the redirect URI {uri} {fault}; it must be https, or on loopback")
        return self._step(lambda: self._judge(heard, now), now)

    def adopt(self, record: ServerRecord) -> None:
        """End the flow before its start, with the tokens of another process."""
        if self.step is not FlowStep.START or self.over:
            raise UsageError("adopt() must be called before start()")
        self.step, self.outcome, self.record = FlowStep.OVER, FlowDone(), record
        self.obtained = self.adopted = True

    def abandon(self) -> None:
        """Report that no further event will come.  Does nothing if the flow is over."""
        self.abandoned = self.outcome is None

    def _step(self, judge: Callable[[], FlowFinding | None], now: float) -> tuple[Deed, ...]:
        last: Deed
        try:
            found = judge()
            if found is None:
                return (ReturnIgnored("the browser came back with the answer to another request"),)
            self.step = FLOW[self.step][found]
            last = self._ask(now)
        except AuthorizationFailed as error:
            self.step = FlowStep.OVER
            last = FlowFailed(error)
        if isinstance(last, FlowDone | FlowFailed):
            self.outcome = last
        deeds, self._said = (*self._said, last), []
        return deeds

    def _keep(self, record: ServerRecord) -> None:
        if record != self.record:
            self.record = record
            self._said = [Persist(record)]

    # The actions of each step.

    def _ask(self, now: float) -> Deed:
        match self.step:
            case FlowStep.RESOURCE | FlowStep.SERVER:
                return self._sent(self._search.request())
            case FlowStep.LISTEN:
                return OpenReceiver()
            case FlowStep.REGISTER:
                return self._ask_registration()
            case FlowStep.BROWSER:
                return self._ask_browser()
            case FlowStep.ASSERTION:
                return AskAssertion(self._issuer, self._resource)
            case FlowStep.EXCHANGE:
                return self._ask_exchange(now)
            case FlowStep.TOKEN | FlowStep.REFRESH:
                return self._ask_token(now)
            case _:
                return FlowDone()

    def _post(self, url: str, headers: Fields, body: bytes) -> SendRequest:
        rules = self._setting.rules
        request = SendRequest(
            "POST", url, headers, body, body_bytes=rules.document_bytes, seconds=rules.request_seconds
        )
        return self._sent(request)

    def _sent(self, request: SendRequest) -> SendRequest:
        """Add the networks to which the request may connect: any network, if the application named the URL."""
        self._asked_at, rules = request.url, self._setting.rules
        of_application = self.step is FlowStep.EXCHANGE or same_origin(request.url, self._setting.server_url)
        if of_application or is_trusted(request.url, rules) or is_trusted(self._issuer, rules):
            return request
        return attrs.evolve(request, networks=self._networks)

    def _ask_registration(self) -> Deed:
        assert self._server is not None
        assert self._server.registration_endpoint is not None
        said = registration(self._application, self._server, self._redirect_uri, self._asked)
        return self._post(self._server.registration_endpoint, _JSON_HEADERS, json.dumps(said).encode())

    def _ask_browser(self) -> Deed:
        assert self._server is not None
        assert self._client is not None
        self._pending = pending(self._server, self._redirect_uri, self._setting.entropy)
        url = authorization_url(self._server, self._client.client_id, self._pending, self._asked, self._resource)
        return OpenBrowser(url, self._issuer, self._setting.rules.user_seconds)

    def _ask_exchange(self, now: float) -> Deed:
        grant = self._application.grant
        assert isinstance(grant, IdentityAssertion)
        fields = exchange_grant(grant, self._assertion, self._issuer, self._resource, self._asked)
        client = attrs.evolve(grant.client, method=choose_method(grant.client, None, None))
        headers, proofs = authenticated(client, None, grant.token_endpoint, now, self._setting.entropy)
        return self._post(grant.token_endpoint, (*_FORM_HEADERS, *headers), form({**fields, **proofs}))

    def _ask_token(self, now: float) -> Deed:
        assert self._client is not None
        entropy, url = self._setting.entropy, self._token_endpoint
        headers, proofs = authenticated(self._client, self._application.key, self._issuer, now, entropy)
        if self._proof_key is not None:
            nonce = self._setting.nonces.of(url)
            headers = (*headers, ("DPoP", dpop_proof(self._proof_key, "POST", url, now, entropy, nonce=nonce)))
        # auth-42: the same resource as in the authorization request, even if the server ignores it.
        body = form({**self._grant, "resource": self._resource, **proofs})
        return self._post(url, (*_FORM_HEADERS, *headers), body)

    # The meaning of the events.

    def _judge(self, heard: Heard, now: float) -> FlowFinding | None:
        match heard:
            case FlowAbandoned():
                raise self._given_up(heard)
            case Replied() | ForbiddenAddress() | RequestFailed() if self.step is FlowStep.RESOURCE:
                return self._find_resource(heard)
            case Replied() | ForbiddenAddress() | RequestFailed() if self.step is FlowStep.SERVER:
                return self._find_server(heard)
            case RequestFailed(why=why):
                raise AuthorizationFailed(
                    Blame.NETWORK, f"{shown(self._asked_at)} could not be reached: {why}", "try again later"
                )
            case ForbiddenAddress() if self.step is FlowStep.REFRESH and self.demand is None:
                # If the network of the MCP server has changed, as by a VPN, its reply to the request will show that.
                return FlowFinding.SPENT
            case ForbiddenAddress():
                raise led_elsewhere(self._asked_at, heard, Blame.AUTHORIZATION_SERVER)
            case Replied() if self.step is FlowStep.REGISTER:
                return self._find_registration(heard)
            case Replied() if self.step is FlowStep.EXCHANGE:
                return self._find_exchanged(heard)
            case Replied():
                return self._find_tokens(heard, now)
            case ReceiverReady(redirect_uri=uri):
                return self._find_client(uri, now)
            case BrowserReturned(query=query):
                return self._find_code(query)
            case _:
                return self._take_assertion(heard.assertion)

    def _given_up(self, heard: FlowAbandoned) -> AuthorizationFailed:
        why = heard.why
        if self.step is FlowStep.BROWSER:
            # A server that has lost the registration shows an error to the user, and does not redirect the browser.
            if self._reused:
                self._forget_client()
            if not heard.at_fault:
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
            self._keep(attrs.evolve(self.record, authorization=attrs.evolve(held, asked=())))

    def _forget_client(self) -> None:
        assert self._client is not None
        known = next((each for each in self.record.registered if each.issuer == self._issuer), None)
        if known is not None and known.client_id == self._client.client_id and known.redirect_uris:
            self._keep(self.record.without_client(known))

    # The first step.

    def _find_beginning(self) -> FlowFinding:
        held = self.record.authorization
        if held is None or self.demand is not None:
            return FlowFinding.NOTHING
        alone = self._application.needs_no_user
        if not self._is_ours(held) or not (alone or held.tokens.refresh):
            return FlowFinding.NOTHING if alone else FlowFinding.SPENT  # do not ask the user before the server refuses
        self._adopt(held)
        if held.tokens.refresh is not None:
            self._grant = refresh_grant(held.tokens.refresh)
            return FlowFinding.RENEWABLE
        return self._present()

    def _is_ours(self, held: TokenGrant) -> bool:
        """Whether the application is still the one of this grant, and has its keys."""
        app, client = self._application, held.client
        if client.method is ClientAuthMethod.KEY and app.key is None:
            return False
        if held.tokens.kind == DPOP and app.dpop is None:
            return False
        rules, endpoint = self._setting.rules, held.token_endpoint
        if url_fault(endpoint, rules) or not (
            is_trusted(held.issuer, rules) or place_fault(endpoint, rules, self._networks) is None
        ):
            return False  # the rules have changed since then
        return not app.clients or any((client.client_id, client.secret) == (c.client_id, c.secret) for c in app.clients)

    def _adopt(self, held: TokenGrant) -> None:
        self._issuer, self._token_endpoint, self._resource = held.issuer, held.token_endpoint, held.resource
        self._client, self._asked = held.client, held.asked
        self._proof_key = self._application.dpop if held.tokens.kind == DPOP else None

    def _present(self) -> FlowFinding:
        """Choose the grant without a user."""
        if isinstance(self._application.grant, ClientCredentials):
            self._grant = own_grant(self._asked)
            return FlowFinding.BY_ITSELF
        return FlowFinding.BY_ASSERTION

    # Discovery.

    def _search_resource(self) -> DocumentSearch:
        url, rules = self._setting.server_url, self._setting.rules
        named = None if self.demand is None else self.demand.metadata_url
        fault = None
        if named is not None and url_fault(named, rules) is None:
            fault = place_fault(named, rules, self._networks)
        search = DocumentSearch(resource_places(url, named if fault is None else None, rules), rules, Blame.SERVER)
        if named is not None and fault is not None:  # the well-known URLs may suffice
            why = f"the MCP server names its metadata at {shown(named)}, which {fault}"
            search.pass_over(AuthorizationFailed(Blame.SERVER, why, trust(named)))
        return search

    def _find_resource(self, heard: Replied | ForbiddenAddress | RequestFailed) -> FlowFinding:
        setting = self._setting
        fields: Fields = ()
        self._see(heard)
        said = self._search.read(heard)
        if said is not None:
            self._document = read_resource(said, setting.server_url, setting.rules, self._networks)
            self._resource = self._document.resource
            self._issuer = self._choose_issuer(self._document.issuers)
            places = server_places(self._issuer)
        elif not self._search.exhausted:
            return FlowFinding.ELSEWHERE
        else:
            self._search.conclude()
            self._refuse_to_guess()
            self._legacy = True
            self._issuer = origin_of(setting.server_url)
            # auth-13: only this revision asks for the header, and only its servers are asked here.
            fields = ((PROTOCOL_VERSION, _OF_2025_03_26),)
            places = (legacy_place(setting.server_url),)
        self._search = DocumentSearch(places, setting.rules, Blame.AUTHORIZATION_SERVER, fields)
        return FlowFinding.RENEWABLE if self._can_renew() else FlowFinding.GOOD

    def _see(self, heard: Replied | ForbiddenAddress | RequestFailed) -> None:
        """Note the MCP server's network, if this reply comes from its own origin.

        Another host's name proves nothing.
        """
        if isinstance(heard, Replied) and heard.address and same_origin(self._asked_at, self._setting.server_url):
            seen = network_at(heard.address)
            self.record = attrs.evolve(self.record, network=seen)  # stored with the next Persist
            self._networks = networks_of(self._setting.server_url, seen)

    def _refuse_to_guess(self) -> None:
        """A server that names its metadata has a revision without default endpoints."""
        if self.demand is not None and self.demand.metadata_url is not None:
            raise AuthorizationFailed(
                Blame.SERVER,
                f"the MCP server names its metadata at {shown(self.demand.metadata_url)}, but none was found",
                "its operator must fix it",
            )

    def _choose_issuer(self, issuers: tuple[str, ...]) -> str:
        """auth-118: the application's preference, else an issuer already in use, else the first."""
        held = self.record.authorization
        wanted = [
            *self._application.prefers,
            *(each.issuer for each in self._application.clients),
            *([] if held is None else [held.issuer]),
        ]
        return next((each for each in wanted if each in issuers), None) or issuers[0]

    def _can_renew(self) -> bool:
        """Whether the refused token can be renewed: same issuer, same resource, and no additional scopes."""
        held, demand = self.record.authorization, self.demand
        if held is None or held.tokens.refresh is None or demand is None or demand.status != 401:
            return False
        same = held.issuer == self._issuer and held.resource == self._resource
        if not same or not {*demand.scopes} <= {*held.asked} or not self._is_ours(held):
            return False
        if self._must_prove() and held.tokens.kind != DPOP:
            return False  # the next token would not be bound either
        self._adopt(held)
        self._grant = refresh_grant(held.tokens.refresh)
        return True

    def _find_server(self, heard: Replied | ForbiddenAddress | RequestFailed) -> FlowFinding:
        setting = self._setting
        said = self._search.read(heard)
        if said is not None:
            try:
                self._server = read_server(said, self._issuer, setting.rules, self._networks, legacy=self._legacy)
            except AuthorizationFailed as error:
                self._search.pass_over(error)  # auth-91: not used; another URL may have the right one
        if self._server is None and not self._search.exhausted:
            return FlowFinding.ELSEWHERE
        if self._server is None:
            self._search.conclude()
            if not self._legacy:
                raise AuthorizationFailed(
                    Blame.AUTHORIZATION_SERVER,
                    f"{shown(self._issuer)} publishes no metadata at {', '.join(self._search.asked)}",
                    "its operator must publish it, because endpoints are never guessed",
                )
            self._server = default_server(setting.server_url)
        return self._agree(self._server)

    def _agree(self, server: ServerDocument) -> FlowFinding:
        """Choose the scopes and the grant for this server."""
        grant = self._application.grant
        self._token_endpoint = server.token_endpoint
        self._asked = self._scopes(server)
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
        self._settle(find_own_client(self._application, server, self._given()))
        return self._present()

    def _scopes(self, server: ServerDocument) -> tuple[str, ...]:
        """auth-66: those of the challenge, else all that the resource supports, else none; plus earlier ones."""
        app, held = self._application, self.record.authorization
        if self.demand is not None and self.demand.scopes:
            wanted = self.demand.scopes
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
        bound = self._document is not None and self._document.wants_dpop
        return bound or (self.demand is not None and self.demand.schemes == (DPOP,))

    # The client's identity.

    def _given(self) -> OAuthClient | None:
        bound_to = {**self._setting.used_at, **self.record.issuers}
        return given_client(self._application, self._issuer, bound_to)

    def _settle(self, client: OAuthClient) -> None:
        taken = None if self._server is None else self._server.methods
        self._client = attrs.evolve(client, method=choose_method(client, self._application.key, taken))
        if any(each.client_id == client.client_id and each.issuer is None for each in self._application.clients):
            self._keep(self.record.with_client(self._client))  # from now on it belongs to this issuer

    def _find_client(self, redirect_uri: str, now: float) -> FlowFinding:
        assert self._server is not None
        self._redirect_uri = redirect_uri
        known = self.record.client_at(self._issuer, now)
        client = find_client(self._application, self._server, self._given(), known, redirect_uri)
        if client is None:
            return FlowFinding.UNKNOWN
        self._reused = client is known
        self._settle(client)
        return FlowFinding.KNOWN

    def _find_registration(self, reply: Replied) -> FlowFinding:
        said = read_object(reply.body, self._setting.rules.document_bytes)
        if not 200 <= reply.status < 300:
            raise registration_refused(self._issuer, reply.status, said)
        client = read_registration(said, self._issuer, self._redirect_uri)
        self._keep(self.record.with_client(client))
        self._settle(client)
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
        self._grant = jwt_grant(assertion, self._asked)
        return FlowFinding.GOOD

    def _find_exchanged(self, reply: Replied) -> FlowFinding:
        grant = self._application.grant
        assert isinstance(grant, IdentityAssertion)
        said = read_object(reply.body, self._setting.rules.document_bytes)
        if not 200 <= reply.status < 300:
            secrets = (self._assertion, grant.client.secret)
            raise refused(grant.token_endpoint, said, reply.status, secrets, Blame.IDENTITY_PROVIDER)
        self._grant = jwt_grant(read_assertion(said, grant.token_endpoint), self._asked)
        return FlowFinding.GOOD

    def _find_tokens(self, reply: Replied, now: float) -> FlowFinding:
        said = read_object(reply.body, self._setting.rules.document_bytes)
        fresh = self._setting.nonces.note(self._token_endpoint, reply.headers)
        error = said.get("error") if said else None
        if error == "use_dpop_nonce" and fresh and self._proof_key is not None and not self._renonced:
            self._renonced = True
            return FlowFinding.NONCE
        # Some servers refuse with a 200.
        if not 200 <= reply.status < 300 or (error is not None and "access_token" not in (said or {})):
            return self._refused(reply, said)
        self._take_tokens(said, now)
        return FlowFinding.GOOD

    def _refused(self, reply: Replied, said: JsonObject | None) -> FlowFinding:
        secrets = [*map(self._grant.get, _SECRETS), self._client.secret if self._client else None]
        refusal = refused(self._issuer, said, reply.status, secrets)
        self._learn_from(refusal)
        passing = reply.status >= 500 or reply.status in (408, 425, 429)
        if self.step is FlowStep.REFRESH and not passing:
            self._keep(self.record.without_refresh())
            return FlowFinding.SPENT if self.demand is None else FlowFinding.STALE
        if self.demand is None and not passing:
            # Facts that were used without discovery are out of date: the next request starts with discovery.
            self._keep(attrs.evolve(self.record, authorization=None))
        raise refusal

    def _take_tokens(self, said: JsonObject | None, now: float) -> None:
        assert self._client is not None
        held = self.record.authorization
        granted = held.tokens.scopes if self.step is FlowStep.REFRESH and held is not None else self._asked
        tokens = read_tokens(said, self._issuer, granted, now, proven=self._proof_key is not None)
        if self._must_prove() and tokens.kind != DPOP:
            raise AuthorizationFailed(
                Blame.AUTHORIZATION_SERVER,
                f"{shown(self._issuer)} issued a {tokens.kind} token, but the MCP server accepts only DPoP",
                "its operator must enable DPoP",
            )
        if tokens.refresh is None and self.step is FlowStep.REFRESH and held is not None:
            tokens = attrs.evolve(tokens, refresh=held.tokens.refresh)  # not rotated
        authorization = TokenGrant(
            self._issuer, self._token_endpoint, self._client, self._resource, self._asked, tokens
        )
        self._keep(attrs.evolve(self.record, authorization=authorization))
        self.obtained = True
