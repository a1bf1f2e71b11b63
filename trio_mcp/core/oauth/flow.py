"""One attempt to get a token: a course of actions and events, from the known facts to a token or an error.

The course is a generator, `Flow._course`.  It yields an action (see `actions`), which a driver carries out, and is
resumed with the event that answers it.  So discovery, registration, the browser and the token request stand in their
order from top to bottom.

A flow changes only the record of its authorizer, by whole facts, and reports each change that should outlive the
process by `Persist`.  So it may be dropped at any action.  Every error says who is to blame.

The rules follow from the documents found, not from the negotiated revision, which is unknown before there is a token.
A server with resource metadata has revision 2025-06-18 or later, and the strictest rules apply.  A server without it
has 2025-03-26, and is its own authorization server at its own origin.  A 5xx proves nothing: if a document could not be
fetched, it may still exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.fields import JSON, PROTOCOL_VERSION, Fields
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.oauth import actions, discovery, messages
from trio_mcp.core.oauth.discovery import DPOP, AuthChallenge, ResourceDocument, ServerDocument
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame, issuer_failed
from trio_mcp.core.oauth.messages import AuthorizationCode, IdentityAssertion, Key
from trio_mcp.core.oauth.records import ClientAuthMethod, OAuthClient, ServerRecord, TokenGrant

__all__ = ["Flow"]

if TYPE_CHECKING:
    from trio_mcp.core.oauth.tokens import Authorizer

T = TypeVar("T")

# The generators below: they yield actions, are resumed with events, and return a T.
_Course: TypeAlias = Generator[actions.FlowAction, Any, T]

_FORM_HEADERS: Final[Fields] = (("Content-Type", "application/x-www-form-urlencoded"), ("Accept", JSON))
_JSON_HEADERS: Final[Fields] = (("Content-Type", JSON), ("Accept", JSON))
_SECRETS: Final = ("assertion", "code", "code_verifier", "refresh_token")
_OF_2025_03_26: Final = "2025-03-26"
_REDIRECTS = (301, 302, 303, 307, 308)
_MOVES = 3  # redirects of one search for a document; they stay at the same origin
_BUSY = (408, 425, 429)
_LATER = "try again later"
_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_JAG: Final = "urn:ietf:params:oauth:token-type:id-jag"


class Flow:
    """Call `start`, carry out the actions, and feed the events to `receive`, until `FlowDone` or `FlowFailed`.

    `challenge` is the demand of a refused request; None if the token has only expired.  Call `abandon` when you stop,
    for any reason.
    """

    def __init__(self, authorizer: Authorizer, challenge: AuthChallenge | None) -> None:
        self.outcome: actions.FlowDone | actions.FlowFailed | None = None
        self.abandoned = False
        self.adopted = False  # True if another process got the token
        self._renews = challenge is None  # a token that has expired; no server has refused it
        self._challenge = challenge or AuthChallenge(0)
        self._authorizer = authorizer
        self._application = authorizer.application
        self._rules = authorizer.rules
        self._running: _Course[None] | None = None
        self._action: actions.FlowAction | None = None  # the action that waits for its event
        self._queued: tuple[actions.FlowAction, ...] = ()  # actions before the next one
        self._now = 0.0
        self._networks = discovery.networks_of(authorizer.server_url, authorizer.record.network)
        self._document: ResourceDocument | None = None
        self._issuer = ""
        self._token_endpoint = ""
        self._resource = discovery.resource_of(authorizer.server_url)
        self._client: OAuthClient | None = None
        self._reused = False  # the client was registered by an earlier flow
        self._requested: tuple[str, ...] = ()
        self._proof_key: Key | None = None

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.abandoned

    def start(self, now: float) -> tuple[actions.FlowAction, ...]:
        if self._running is not None or self.over:
            raise UsageError("start() of a flow must be called once")
        self._running = self._course()
        return self._advance(None, now)

    def receive(self, event: actions.FlowEvent, now: float) -> tuple[actions.FlowAction, ...]:
        """Return the next actions.  Events after the end are late, and ignored."""
        if self.over:
            return ()
        waiting = None if self._action is None else type(self._action)
        if not isinstance(event, (*actions.ANSWERS.get(waiting, ()), actions.FlowAbandoned)):
            name = "no event" if waiting is None else f"the answer to {waiting.__name__}"
            raise UsageError(f"a flow that waits for {name} cannot receive {type(event).__name__}")
        if isinstance(event, actions.ReceiverReady):
            discovery.check_redirect_uri(event.redirect_uri)
        return self._advance(event, now)

    def adopt(self, stored: ServerRecord) -> bool:
        """Call before `start`: take the tokens that another process has stored meanwhile, and end the flow with them.

        Returns False if there are none.  The other process may have used up our refresh token; if we used it again,
        both processes could lose their tokens.
        """
        theirs, ours = stored.authorization, self._authorizer.tokens
        if theirs is None or theirs.tokens == ours:
            return False
        if self._running is not None or self.over:
            raise UsageError("adopt() must be called before start()")
        self.outcome, self.adopted = actions.FlowDone(), True
        self._authorizer.restore(stored)
        self._authorizer.obtained()
        self._authorizer.flow_over(self)
        return True

    def abandon(self) -> None:
        """Report that no further event will come, which drops the course.  Does nothing if the flow is over."""
        self.abandoned, self._running = self.outcome is None, None
        self._authorizer.flow_over(self)

    def _advance(self, event: actions.FlowEvent | None, now: float) -> tuple[actions.FlowAction, ...]:
        last: actions.FlowAction
        action, self._action, self._now = self._action, None, now
        try:
            if isinstance(event, actions.FlowAbandoned):
                # Not thrown into the course, which an unexpected error may have ended.
                in_browser = isinstance(action, actions.OpenBrowser | actions.ReturnIgnored)
                raise self._abandoned_error(event, in_browser=in_browser) from event.cause
            assert self._running is not None
            last = self._action = self._running.send(event)
        except StopIteration:
            last = self.outcome = actions.FlowDone()
        except AuthorizationFailed as error:
            last = self.outcome = actions.FlowFailed(error)
        except UsageError as error:  # a key of the application could not sign
            failure = self._abandoned_error(actions.FlowAbandoned(str(error)), in_browser=False)
            failure.__cause__ = error.__cause__
            last = self.outcome = actions.FlowFailed(failure)
        if self.over:
            self._authorizer.flow_over(self)
        following, self._queued = (*self._queued, last), ()
        return following

    def _abandoned_error(self, event: actions.FlowAbandoned, *, in_browser: bool) -> AuthorizationFailed:
        if in_browser and self._reused:
            # A server that has lost the registration shows an error to the user, and does not redirect the browser.
            self._forget_client()
        if in_browser and not event.at_fault:
            why = f"{shown(self._issuer)} was not allowed to issue a token: {event.why}"
            return AuthorizationFailed(Blame.USER, why, "the user must allow it there")
        return AuthorizationFailed(Blame.APPLICATION, f"the authorization was abandoned: {event.why}", "start it again")

    def _course(self) -> _Course[None]:
        """From the known facts to a token, which is in the record at the end."""
        held, grant = self._authorizer.record.authorization, self._application.grant
        needs_no_user = self._application.needs_no_user
        if held is not None and self._renews:
            if self._is_ours(held) and (needs_no_user or held.tokens.refresh is not None):
                yield from self._renew(held)
                return
            if not needs_no_user:
                return  # do not ask the user before the server refuses a request
        # If a server refuses a token, check first whether it still uses the same issuer; only then renew the token.
        yield from self._find_resource()
        if held is not None and self._can_renew(held) and (yield from self._renew(held)):
            return
        server = yield from self._find_server()
        self._token_endpoint = server.token_endpoint
        self._requested = self._scopes(server)
        self._proof_key = self._choose_proof_key(server)
        if isinstance(grant, AuthorizationCode):
            messages.check_pkce(server)
            fields = yield from self._ask_user(server)
        else:
            name = "client_credentials" if isinstance(grant, messages.ClientCredentials) else messages.JWT_BEARER
            if server.grants is not None and name not in server.grants:
                raise AuthorizationFailed(
                    Blame.APPLICATION,
                    f"{shown(self._issuer)} does not offer the grant {name}, which the application is configured to "
                    "use",
                    "use another grant, or have this one allowed there",
                )
            yield from self._identify(server, None)
            fields = yield from self._grant_without_user()
        yield from self._request_tokens(fields)

    def _persist(self, record: ServerRecord) -> None:
        if record != self._authorizer.record:
            self._authorizer.restore(record)
            self._queued = (actions.Persist(record),)

    # Requests.

    def _request(
        self,
        method: str,
        url: str,
        headers: Fields,
        body: bytes = b"",
        *,
        uses_up: bool = False,
        by_application: bool = False,
    ) -> actions.SendRequest:
        """Make a request.  It may connect to any network if the application named the URL or trusts it."""
        named = by_application or discovery.same_origin(url, self._authorizer.server_url)
        anywhere = named or any(discovery.is_trusted(each, self._rules) for each in (url, self._issuer))
        networks = None if anywhere else self._networks
        return actions.SendRequest(method, url, headers, body, networks=networks, uses_up=uses_up)

    def _read_reply(
        self, request: actions.SendRequest, event: actions.Replied | actions.ForbiddenAddress | actions.RequestFailed
    ) -> tuple[int, JsonObject]:
        """Return the status and the object in the body of a reply, {} without one.  Raises if there was no reply."""
        if not isinstance(event, actions.Replied):
            raise _no_reply(request.url, event, Blame.AUTHORIZATION_SERVER)
        return event.status, discovery.read_object(event.body, request.body_bytes) or {}

    def _search(
        self,
        urls: Sequence[str],
        read: Callable[[JsonObject], T],
        blame: Blame,
        error: AuthorizationFailed | None = None,
        fields: Fields = (),
    ) -> _Course[tuple[T | None, list[str]]]:
        """Search for one document at several URLs, in order; return what `read` makes of it, and the requested URLs.

        A server that answers 4xx, or without a JSON object, does not have the document; some servers answer every path
        with 200 and the same page.  A server that answers 5xx or not at all may have it, and so may a URL in a
        forbidden network.  The search then continues, but if it finds no document it raises the first such error,
        because it cannot conclude that there is none.
        """
        authorizer, rules = self._authorizer, self._rules
        waiting, requested, redirects = [*urls], [], _MOVES
        while waiting:
            url = waiting.pop(0)
            requested.append(url)
            request = self._request("GET", url, (("Accept", JSON), *fields))
            event = yield request
            fault: AuthorizationFailed | None = None
            if not isinstance(event, actions.Replied):
                error = error or _no_reply(url, event, blame)
                continue
            if event.address and discovery.same_origin(url, authorizer.server_url):
                # The network of the MCP server, which is stored with the next record.
                authorizer.record = attrs.evolve(authorizer.record, network=discovery.network_at(event.address))
                self._networks = discovery.networks_of(authorizer.server_url, authorizer.record.network)
            if event.status in _REDIRECTS:
                # The driver follows no redirects, so that each target is checked here first.
                target = discovery.redirect_target(url, event.headers.get("Location", ""), rules)
                if target is not None and redirects > 0:
                    redirects -= 1
                    waiting.insert(0, target)
            elif event.status >= 500 or event.status in _BUSY:
                fault = AuthorizationFailed(blame, f"{_bare(url)} answered {event.status}", _LATER)
            elif 200 <= event.status < 300:
                found = discovery.read_object(event.body, request.body_bytes)
                try:
                    if found is not None:
                        return read(found), requested
                except AuthorizationFailed as unusable:
                    if blame is Blame.SERVER:
                        raise
                    fault = unusable  # auth-91: not used; another URL may have the right one
            error = error or fault
        if error is not None:
            raise error
        return None, requested

    # Discovery.

    def _find_resource(self) -> _Course[None]:
        """Find the resource's document and the issuer of its tokens."""
        url, rules, app = self._authorizer.server_url, self._rules, self._application
        named = self._challenge.metadata_url
        error: AuthorizationFailed | None = None
        urls = discovery.resource_metadata_urls(url, named, rules)
        if named in urls and (fault := discovery.network_fault(named, rules, self._networks)):
            urls = discovery.resource_metadata_urls(url, None, rules)  # they may suffice
            why = f"the MCP server names its metadata at {shown(named)}, which {fault}"
            error = AuthorizationFailed(Blame.SERVER, why, discovery.trust_advice(named))

        def read(answer: JsonObject) -> ResourceDocument:
            return discovery.read_resource(answer, url, rules, self._networks)

        document, _ = yield from self._search(urls, read, Blame.SERVER, error)
        if document is not None:
            self._document, self._resource = document, document.resource
            # auth-118: prefer the application's choice, then an issuer already in use, then the first.
            held = self._authorizer.record.authorization
            wanted = [*app.prefers, *(each.issuer for each in app.clients), held and held.issuer]
            self._issuer = next((each for each in wanted if each in document.issuers), None) or document.issuers[0]
        elif named is not None:
            # A server that names its metadata has a revision without default endpoints.
            why = f"the MCP server names its metadata at {shown(named)}, but none was found"
            raise AuthorizationFailed(Blame.SERVER, why, "its operator must fix it")
        else:
            self._issuer = discovery.origin_of(url)  # auth-14: the authorization base URL of 2025-03-26

    def _find_server(self) -> _Course[ServerDocument]:
        """Find the metadata of the issuer."""
        issuer, legacy = self._issuer, self._document is None
        urls = discovery.server_metadata_urls(issuer)
        fields: Fields = ()
        if legacy:
            # auth-13: only this revision asks for the header, and only its servers are asked here.  auth-14: the URL
            # is independent of the server's path.
            urls, fields = urls[:1], ((PROTOCOL_VERSION, _OF_2025_03_26),)

        def read(answer: JsonObject) -> ServerDocument:
            return discovery.read_server(answer, issuer, self._rules, self._networks, legacy=legacy)

        found, requested = yield from self._search(urls, read, Blame.AUTHORIZATION_SERVER, None, fields)
        if found is None and not legacy:
            advice = "its operator must publish it, because endpoints are never guessed"
            raise issuer_failed(issuer, f"publishes no metadata at {', '.join(requested)}", advice)
        return found or discovery.default_server(self._authorizer.server_url)

    def _scopes(self, server: ServerDocument) -> tuple[str, ...]:
        """auth-66: the scopes of the challenge, or all that the resource supports, plus those requested earlier."""
        app, held = self._application, self._authorizer.record.authorization
        wanted = self._challenge.scopes or app.scopes
        if wanted is None:
            wanted = (self._document.scopes if self._document else None) or ()
        if held is not None and held.issuer == self._issuer:
            wanted = discovery.union(held.asked, wanted)  # auth-99, auth-112
        # auth-108.  offline_access alone would replace the server's default scopes instead of adding to them.
        offline = app.offline and not app.needs_no_user and messages.OFFLINE in server.scopes
        return discovery.union(wanted, (messages.OFFLINE,)) if wanted and offline else wanted

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
        return bound or self._challenge.schemes == (DPOP,)

    # The client's identity.

    def _identify(self, server: ServerDocument, redirect_uri: str | None) -> _Course[OAuthClient]:
        """Find the client to use at this server, and its method; register one if there is none.

        A client of the application that has no issuer belongs to the issuer of its first use.  auth-97: if all clients
        of the application belong to other issuers, this raises, and nothing is registered.  A client that was
        registered earlier can be used with the redirect URIs of its registration.  Without a `redirect_uri` no user is
        asked, and no client registered.
        """
        app, issuer, record = self._application, server.issuer, self._authorizer.record
        used_at = {**self._authorizer.used_at, **record.issuers}
        issuers = [each.issuer or used_at.get(each.client_id, issuer) for each in app.clients]
        known = record.client_at(issuer, self._now)
        ours: OAuthClient | None = None
        if issuer in issuers:
            ours = app.clients[issuers.index(issuer)]
            client = attrs.evolve(ours, issuer=issuer)
        elif issuers:
            raise AuthorizationFailed(
                Blame.APPLICATION,
                f"the application is registered at {', '.join(map(shown, issuers))}, and the MCP server now uses "
                f"{shown(issuer)}",
                "register it there too, because credentials are never sent to another issuer",
            )
        elif app.document_url is not None and server.supports_client_documents:
            # auth-77: the URL of the metadata document is the client id, if the server says that it reads these.
            signs = app.key is not None and ClientAuthMethod.KEY.value in (server.methods or ())
            method = ClientAuthMethod.KEY if signs else ClientAuthMethod.NONE
            client = OAuthClient(app.document_url, issuer, method=method)
        elif known is not None and redirect_uri in known.redirect_uris:
            client = known
            self._reused = True
        elif redirect_uri is None or server.registration_endpoint is None:
            raise AuthorizationFailed(
                Blame.APPLICATION,
                f"the application has no client id at {shown(issuer)} and cannot get one by itself",
                "register it there by hand, and give it the client id",
            )
        else:
            body = json.dumps(messages.registration(app, server, redirect_uri, self._requested)).encode()
            request = self._request("POST", server.registration_endpoint, _JSON_HEADERS, body)
            status, answer = self._read_reply(request, (yield request))
            if not 200 <= status < 300:
                raise messages.registration_refused(issuer, status, answer)
            client = messages.read_registration(answer, issuer, redirect_uri)
            self._persist(self._authorizer.record.with_client(client))
        self._client = client = attrs.evolve(client, method=messages.choose_method(client, app.key, server.methods))
        if ours is not None and ours.issuer is None:
            self._persist(self._authorizer.record.with_client(client))  # from now on it belongs to this issuer
        return client

    def _forget_client(self) -> None:
        assert self._client is not None
        self._persist(self._authorizer.record.without_client(self._client))

    # The grants: each returns the fields of the token request.

    def _ask_user(self, server: ServerDocument) -> _Course[Mapping[str, str | None]]:
        redirect_uri = (yield actions.OpenReceiver()).redirect_uri
        client = yield from self._identify(server, redirect_uri)
        pending = messages.new_authorization(server, redirect_uri, self._authorizer.entropy)
        url = messages.authorization_url(server, client.client_id, pending, self._requested, self._resource)
        event = yield actions.OpenBrowser(url, self._issuer, self._rules.user_seconds)
        try:
            while (code := messages.read_return(event.query, pending)) is None:
                event = yield actions.ReturnIgnored("the browser came back with the answer to another request")
        except AuthorizationFailed as error:
            self._learn_from(error)
            raise
        return {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": pending.verifier,
        }

    def _grant_without_user(self) -> _Course[Mapping[str, str | None]]:
        grant, scope = self._application.grant, " ".join(self._requested) or None
        if isinstance(grant, messages.ClientCredentials):
            return {"grant_type": "client_credentials", "scope": scope}
        assertion: str = (yield actions.AskAssertion(self._issuer, self._resource)).assertion
        if isinstance(grant, IdentityAssertion):
            # The user's assertion; the identity provider exchanges it for one for this issuer and this MCP server.
            url, client = grant.token_endpoint, grant.client
            client = attrs.evolve(client, method=messages.choose_method(client, None, None))
            headers, proofs = messages.authenticated(client, None, url, self._now, self._authorizer.entropy)
            fields = {
                "grant_type": _EXCHANGE,
                "requested_token_type": _ID_JAG,
                "audience": self._issuer,
                "resource": self._resource,
                "scope": scope,
                "subject_token": assertion,
                "subject_token_type": grant.subject_token_type,
            }
            body = messages.form({**fields, **proofs})
            request = self._request("POST", url, (*_FORM_HEADERS, *headers), body, by_application=True)
            status, answer = self._read_reply(request, (yield request))
            if not 200 <= status < 300:
                raise messages.refused(url, answer, status, (assertion, client.secret), Blame.IDENTITY_PROVIDER)
            if not messages.is_printable(answer.get("access_token")) or answer.get("issued_token_type") != _ID_JAG:
                raise AuthorizationFailed(
                    Blame.IDENTITY_PROVIDER,
                    f"{shown(url)} exchanged the user's assertion for another type of token than requested",
                    "its operator must allow the exchange for an ID-JAG",
                )
            assertion = str(answer["access_token"])
        return {"grant_type": messages.JWT_BEARER, "assertion": assertion, "scope": scope}

    # Tokens known from earlier.

    def _is_ours(self, held: TokenGrant) -> bool:
        """Whether the application is still the one of this grant, and has its keys."""
        app, client = self._application, held.client
        if client.method is ClientAuthMethod.KEY and app.key is None:
            return False
        if held.tokens.kind == DPOP and app.dpop is None:
            return False
        rules, endpoint = self._rules, held.token_endpoint
        if discovery.url_fault(endpoint, rules) or not (
            discovery.is_trusted(held.issuer, rules) or discovery.network_fault(endpoint, rules, self._networks) is None
        ):
            return False  # the rules have changed since then
        return not app.clients or any((client.client_id, client.secret) == (c.client_id, c.secret) for c in app.clients)

    def _can_renew(self, held: TokenGrant) -> bool:
        """Whether the refused token can be renewed: same issuer, same resource, and no additional scopes."""
        challenge = self._challenge
        if held.tokens.refresh is None or challenge.status != 401:
            return False
        same = (held.issuer, held.resource) == (self._issuer, self._resource) and {*challenge.scopes} <= {*held.asked}
        if not same or not self._is_ours(held):
            return False
        return held.tokens.kind == DPOP or not self._must_prove()  # else the next token would not be bound either

    def _renew(self, held: TokenGrant) -> _Course[bool]:
        """Get new tokens from the known facts.  Returns False if the refresh token is no longer valid."""
        self._issuer, self._token_endpoint, self._resource = held.issuer, held.token_endpoint, held.resource
        self._client, self._requested = held.client, held.asked
        self._proof_key = self._application.dpop if held.tokens.kind == DPOP else None
        if held.tokens.refresh is None:
            return (yield from self._request_tokens((yield from self._grant_without_user())))
        # Omit the scope, so that it stays the same.
        fields = {"grant_type": "refresh_token", "refresh_token": held.tokens.refresh}
        return (yield from self._request_tokens(fields, held))

    # The token request.

    def _request_tokens(self, grant: Mapping[str, str | None], renewed: TokenGrant | None = None) -> _Course[bool]:
        """Get tokens for this grant.  Returns False if those of `renewed` cannot be renewed any more."""
        authorizer, url, client, key = self._authorizer, self._token_endpoint, self._client, self._proof_key
        assert client is not None
        nonce_retried = False
        while True:
            headers, proofs = messages.authenticated(
                client, self._application.key, self._issuer, self._now, authorizer.entropy
            )
            headers = (*headers, *authorizer.proof(key, "POST", url, self._now))
            # auth-42: the same resource as in the authorization request, even if the server ignores it.
            body = messages.form({**grant, "resource": self._resource, **proofs})
            request = self._request("POST", url, (*_FORM_HEADERS, *headers), body, uses_up=True)
            event = yield request
            if isinstance(event, actions.ForbiddenAddress) and renewed is not None and self._renews:
                # The network of the MCP server may have changed, as with a VPN.  Its refusal of the request shows its
                # present network, so send the request first.
                return False
            status, answer = self._read_reply(request, event)
            error = answer.get("error")
            fresh = authorizer.nonces.note(url, event.headers)
            if error == "use_dpop_nonce" and fresh and key is not None and not nonce_retried:
                nonce_retried = True
                continue
            # Some servers refuse with a 200.
            if 200 <= status < 300 and (error is None or "access_token" in answer):
                self._take_tokens(client, answer, renewed)
                return True
            refusal = messages.refused(self._issuer, answer, status, [*map(grant.get, _SECRETS), client.secret])
            self._learn_from(refusal)
            if status < 500 and status not in _BUSY:
                if renewed is not None:
                    self._persist(authorizer.record.without_refresh())
                    return False
                if self._renews:
                    # Facts that were used without discovery are out of date: the next request starts with discovery.
                    self._persist(attrs.evolve(authorizer.record, authorization=None))
            raise refusal

    def _learn_from(self, refusal: AuthorizationFailed) -> None:
        """Forget remembered facts that the server refuses, so that the next flow does not fail in the same way."""
        record = self._authorizer.record
        if refusal.code in ("invalid_client", "unauthorized_client"):
            self._forget_client()
        elif refusal.code == "invalid_scope" and record.authorization is not None:
            self._persist(attrs.evolve(record, authorization=attrs.evolve(record.authorization, asked=())))

    def _take_tokens(self, client: OAuthClient, answer: JsonObject, renewed: TokenGrant | None) -> None:
        granted = self._requested if renewed is None else renewed.tokens.scopes
        tokens = messages.read_tokens(answer, self._issuer, granted, self._now, proven=self._proof_key is not None)
        if self._must_prove() and tokens.kind != DPOP:
            why = f"issued a {tokens.kind} token, but the MCP server accepts only DPoP"
            raise issuer_failed(self._issuer, why, "its operator must enable DPoP")
        if tokens.refresh is None and renewed is not None:
            tokens = attrs.evolve(tokens, refresh=renewed.tokens.refresh)  # not rotated
        authorization = TokenGrant(self._issuer, self._token_endpoint, client, self._resource, self._requested, tokens)
        self._persist(attrs.evolve(self._authorizer.record, authorization=authorization))
        self._authorizer.obtained()


def _no_reply(url: str, event: actions.ForbiddenAddress | actions.RequestFailed, blame: Blame) -> AuthorizationFailed:
    if isinstance(event, actions.ForbiddenAddress):
        where = discovery.forbidden_reason(discovery.network_at(event.address))
        return AuthorizationFailed(
            blame, f"{_bare(url)} leads to {shown(event.address)}, which {where}", discovery.trust_advice(url)
        )
    error = AuthorizationFailed(Blame.NETWORK, f"{_bare(url)} could not be reached: {event.why}", _LATER)
    error.__cause__ = event.cause
    return error


def _bare(url: str) -> str:
    return shown(url.partition("?")[0])
