"""The authorization server for MCP clients.  The identity provider identifies the user.

A flow passes these secrets from one endpoint to the next.  Ticket, state, code and refresh token are valid once, and
only for their holder:

| Secret | From | To | Bound to |
|---|---|---|---|
| `ticket` | /authorize | /consent | the browser, by its cookie; the request of the client |
| `state` | /consent | /callback | the same browser; it is made when the user agrees |
| `code` | /callback | /token | the client, its redirect URI, its PKCE challenge |
| tokens | /token | /mcp | the grant: client, user, scopes, and the provider's tokens, which stay here |

The metadata of a client is not trusted.  The page of consent shows the name as a claim of the client.  The browser goes
to the redirect URI only after the user has seen it; an error before that ends on a page of this server.
"""

import contextlib
import json
import re
import secrets
import time
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping
from hmac import compare_digest
from html import escape
from urllib.parse import unquote_plus, urlencode, urlsplit

import trio
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from trio_mcp import Principal

from .kept import AccessToken, AuthorizationRequest, Client, Grant, SecretStore, SingleUse, hashed
from .upstream import Refused, Tokens, Unavailable, Upstream
from .wire import LOOPBACK, NO_STORE, PAGE_HEADERS, OAuthError, body_of, fields_of, html_page, is_valid_redirect_uri

AUTH_METHODS = ("none", "client_secret_post", "client_secret_basic")
GRANT_TYPES = ("authorization_code", "refresh_token")
ENDPOINTS = {"authorization": "authorize", "token": "token", "registration": "register", "revocation": "revoke"}
COOKIE = "__Host-browser"  # because of the prefix, other hosts and pages without TLS cannot set this cookie
CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}")
MAX_CLIENTS = 10_000  # beyond this number the oldest client is dropped, and has to register again
TICKET, CODE, ACCESS, REFRESH = 600.0, 60.0, 600.0, 30 * 86400.0  # seconds for which each is valid


class Proxy:
    """The endpoints of the authorization server, and `verify` for the MCP server.

    `scopes` are the scopes for clients, each with a description for the user.  A client that asks for no known scope
    gets the first one.
    """

    def __init__(self, issuer: str, resource: str, scopes: Mapping[str, str], upstream: Upstream) -> None:
        self.issuer, self.resource, self.scopes, self.upstream = issuer, resource, scopes, upstream
        self.clients: dict[str, Client] = {}
        self.tickets = SecretStore[AuthorizationRequest](TICKET)
        self.states = SecretStore[tuple[AuthorizationRequest, str]](TICKET)
        self.codes = SecretStore[SingleUse](CODE)
        self.access_tokens = SecretStore[AccessToken](ACCESS)
        self.refresh_tokens = SecretStore[SingleUse](REFRESH)

    def routes(self) -> list[Route]:
        return [
            Route("/.well-known/oauth-authorization-server", self.metadata),
            Route("/register", self.register, methods=["POST"]),
            Route("/authorize", self.authorize),
            Route("/consent", self.consent, methods=["POST"]),
            Route("/callback", self.callback),
            Route("/token", self.token, methods=["POST"]),
            Route("/revoke", self.revoke, methods=["POST"]),
        ]

    async def verify(self, token: str) -> Principal | None:
        """Check an access token for `Server.protect`.  The tokens of the provider are not valid here."""
        access = self.access_tokens.get(token)
        if access is None or not access.grant.alive:
            return None
        return Principal(access.grant.user, access.scopes, access.expires_at, {"grant": access.grant})

    # Clients.

    async def metadata(self, request: Request) -> Response:
        endpoints = {f"{name}_endpoint": f"{self.issuer}/{path}" for name, path in ENDPOINTS.items()}
        content = {
            "issuer": self.issuer,
            **endpoints,
            "response_types_supported": ["code"],
            "grant_types_supported": GRANT_TYPES,
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": AUTH_METHODS,
            "scopes_supported": list(self.scopes),
            "authorization_response_iss_parameter_supported": True,
        }
        return JSONResponse(content)

    async def register(self, request: Request) -> Response:
        try:
            metadata = json.loads(await body_of(request))
        except (ValueError, RecursionError):
            metadata = None
        if not isinstance(metadata, dict):
            raise OAuthError("invalid_client_metadata", "a registration is a JSON object")
        uris, method = metadata.get("redirect_uris"), metadata.get("token_endpoint_auth_method", "client_secret_basic")
        if not isinstance(uris, list) or not 1 <= len(uris) <= 10 or not all(map(is_valid_redirect_uri, uris)):
            why = "redirect_uris are up to ten: https, or http on loopback, without a fragment"
            raise OAuthError("invalid_redirect_uri", why)
        if method not in AUTH_METHODS:
            raise OAuthError(
                "invalid_client_metadata", f"token_endpoint_auth_method is one of {', '.join(AUTH_METHODS)}"
            )
        if not isinstance(name := metadata.get("client_name", ""), str):
            raise OAuthError("invalid_client_metadata", "client_name is a text")
        # Without control characters, which could reverse the direction of the text on the page.
        name = "".join(filter(str.isprintable, name))[:100] or "A program without a name"
        secret = "" if method == "none" else secrets.token_urlsafe(32)
        client = Client(secrets.token_urlsafe(16), name, tuple(uris), method, hashed(secret))
        self.clients[client.id] = client
        if len(self.clients) > MAX_CLIENTS:
            del self.clients[next(iter(self.clients))]
        registration = {
            "client_id": client.id,
            "client_id_issued_at": int(time.time()),
            "client_name": client.name,
            "redirect_uris": uris,
            "token_endpoint_auth_method": method,
            "grant_types": GRANT_TYPES,
            "response_types": ["code"],
            **({"client_secret": secret, "client_secret_expires_at": 0} if secret else {}),
        }
        return JSONResponse(registration, 201, NO_STORE)

    # The browser of the user.

    async def authorize(self, request: Request) -> Response:
        fields = fields_of(request.url.query)
        client = self.clients.get(fields.get("client_id", ""))
        if client is None:
            raise OAuthError("invalid_client", "this program is not known here; it has to register")
        if (redirect_uri := fields.get("redirect_uri")) not in client.redirect_uris:  # equal letter by letter
            raise OAuthError("invalid_request", "this program wants you to return to where it has not said it is")
        if fields.get("response_type") != "code":
            raise OAuthError("unsupported_response_type", "response_type is code")
        if fields.get("code_challenge_method") != "S256" or not CHALLENGE.fullmatch(fields.get("code_challenge", "")):
            raise OAuthError("invalid_request", "PKCE is needed, by S256")
        self._check_resource(fields)
        wanted = tuple(scope for scope in self.scopes if scope in fields.get("scope", "").split())
        scopes = wanted or tuple(self.scopes)[:1]
        browser = request.cookies.get(COOKIE) or secrets.token_urlsafe(32)
        pending = AuthorizationRequest(
            client, redirect_uri, fields.get("state"), fields["code_challenge"], scopes, hashed(browser)
        )
        response = HTMLResponse(self._consent_page(pending, self.tickets.add(pending)), headers=PAGE_HEADERS)
        response.set_cookie(COOKIE, browser, secure=True, httponly=True, samesite="lax")
        return response

    def _consent_page(self, pending: AuthorizationRequest, ticket: str) -> str:
        """Ask the user, for each request: an earlier consent for this program does not show that it sent this one."""
        host = urlsplit(pending.redirect_uri).hostname
        where = f"You will be sent to <b>{escape(pending.redirect_uri.partition('?')[0])}</b>."
        if host in LOOPBACK:
            where += " That is whatever program listens there <b>on this computer</b>. Have you just started one?"
        permissions = "".join(f"<li>{escape(self.scopes[scope])}</li>" for scope in pending.scopes)
        return html_page(
            "Allow this?",
            f"<h1>{escape(pending.client.name)} asks for access</h1>"
            f"<p>That is how it calls itself; nobody has checked it.</p><p>It wants to</p><ul>{permissions}</ul>"
            f'<p>{where}</p><form method="post" action="/consent">'
            f'<input type="hidden" name="ticket" value="{escape(ticket)}">'
            '<button name="decision" value="allow">Allow</button> <button name="decision" value="deny">Deny</button>'
            "</form>",
        )

    async def consent(self, request: Request) -> Response:
        fields = fields_of(await body_of(request))
        pending = self.tickets.take(fields.get("ticket", ""))
        if pending is None or not is_same_browser(request, pending):
            raise OAuthError("invalid_request", "this question was answered, or is too old; begin anew in your program")
        if fields.get("decision") != "allow":
            return self._redirect_to_client(pending, error="access_denied")
        verifier = secrets.token_urlsafe(48)
        state = self.states.add((pending, verifier))
        return RedirectResponse(self.upstream.authorization_url(state, verifier), 303, NO_STORE)

    async def callback(self, request: Request) -> Response:
        fields = fields_of(request.url.query)
        pending, verifier = self.states.take(fields.get("state", "")) or (None, "")
        if pending is None or not is_same_browser(request, pending):
            raise OAuthError("invalid_request", "you did not begin this here, or it took too long; begin anew")
        if not self.upstream.is_issuer_of(fields):
            raise OAuthError("invalid_request", "this answer is not of the server that was asked")
        if "error" in fields:  # its description is not passed on, because an attacker may have written it
            return self._redirect_to_client(
                pending, error="access_denied" if fields["error"] == "access_denied" else "server_error"
            )
        try:
            tokens = await self.upstream.redeem(fields.get("code", ""), verifier)
            user = await self.upstream.user(tokens)
        except Refused:
            return self._redirect_to_client(pending, error="access_denied")
        except Unavailable:
            return self._redirect_to_client(pending, error="temporarily_unavailable")
        grant = Grant(pending.client.id, user, pending.scopes, tokens)
        return self._redirect_to_client(pending, code=self.codes.add(SingleUse(grant, pending)))

    def _redirect_to_client(self, pending: AuthorizationRequest, **fields: str) -> Response:
        query = urlencode({**fields, "iss": self.issuer, **({} if pending.state is None else {"state": pending.state})})
        separator = "&" if "?" in pending.redirect_uri else "?"
        return RedirectResponse(f"{pending.redirect_uri}{separator}{query}", 303, NO_STORE)

    # Tokens.

    async def token(self, request: Request) -> Response:
        fields = fields_of(await body_of(request))
        client = self._authenticated(request, fields)
        self._check_resource(fields)
        match fields.get("grant_type"):
            case "authorization_code":
                return self._redeem_code(client, fields)
            case "refresh_token":
                return await self._refresh(client, fields)
            case _:
                raise OAuthError("unsupported_grant_type", f"grant_type is one of {', '.join(GRANT_TYPES)}")

    def _redeem_code(self, client: Client, fields: Mapping[str, str]) -> Response:
        code = self._use(self.codes, fields.get("code", ""), client)
        assert code.request is not None
        challenge = urlsafe_b64encode(hashed(fields.get("code_verifier", ""))).rstrip(b"=").decode()
        if fields.get("redirect_uri") != code.request.redirect_uri or not compare_digest(
            challenge, code.request.challenge
        ):
            raise OAuthError("invalid_grant", "the code was given for another redirect_uri or code_challenge")
        return self._token_response(code.grant, code.grant.scopes)

    async def _refresh(self, client: Client, fields: Mapping[str, str]) -> Response:
        old = self._use(self.refresh_tokens, fields.get("refresh_token", ""), client)
        grant = old.grant
        try:
            await self.renew(grant, grant.upstream)
        except Refused:
            raise OAuthError("invalid_grant", "the identity provider does not stand by this user any more") from None
        except Unavailable:
            old.used = False  # the client may try again with it
            raise OAuthError("temporarily_unavailable", "the identity provider cannot be asked now", 503) from None
        wanted = fields.get("scope", " ".join(grant.scopes)).split()
        return self._token_response(grant, tuple(scope for scope in grant.scopes if scope in wanted))

    def _use(self, store: SecretStore[SingleUse], secret: str, client: Client) -> SingleUse:
        """Return the code or refresh token, and mark it as used.  A second use ends its grant."""
        found = store.get(secret)
        if found is None or not found.grant.alive or found.grant.client_id != client.id:
            raise OAuthError("invalid_grant", "it is not known, or not good any more")
        if found.used:
            found.grant.alive = False
            raise OAuthError("invalid_grant", "it was used before, so all that came of it is revoked")
        found.used = True
        return found

    def _token_response(self, grant: Grant, scopes: tuple[str, ...]) -> Response:
        content = {
            "access_token": self.access_tokens.add(AccessToken(grant, scopes, time.time() + ACCESS)),
            "token_type": "Bearer",
            "expires_in": int(ACCESS),
            "refresh_token": self.refresh_tokens.add(SingleUse(grant)),
            "scope": " ".join(scopes),
        }
        return JSONResponse(content, headers=NO_STORE)

    async def renew(self, grant: Grant, old: Tokens) -> None:
        """Replace the `old` tokens of the provider, or end the grant if the provider refuses.

        If several requests have the same `old` tokens, only the first one renews them.  A renewal is not cancelled with
        its request: the provider may already have replaced the refresh token, and the new one would be lost.
        """
        async with grant.renewing:
            if grant.upstream is old:
                with trio.CancelScope(shield=True):
                    try:
                        grant.upstream = await self.upstream.renew(old)
                    except Refused:
                        grant.alive = False
                        raise

    async def user_of(self, grant: Grant) -> str:
        """Ask the provider for the name of the user."""
        tokens = grant.upstream
        try:
            return await self.upstream.user(tokens)
        except Refused:  # the provider's access token may expire before that of this server
            await self.renew(grant, tokens)
            return await self.upstream.user(grant.upstream)

    async def revoke(self, request: Request) -> Response:
        """RFC 7009: the answer for an unknown token is the same as for a revoked one."""
        fields = fields_of(await body_of(request))
        client, token = self._authenticated(request, fields), fields.get("token", "")
        found = self.refresh_tokens.get(token) or self.access_tokens.get(token)
        if found is not None and found.grant.client_id == client.id and found.grant.alive:
            found.grant.alive = False
            with contextlib.suppress(Refused, Unavailable):  # the grant has ended at this server in any case
                await self.upstream.revoke(found.grant.upstream)
        return Response(headers=NO_STORE)

    def _authenticated(self, request: Request, fields: Mapping[str, str]) -> Client:
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        client_id, secret = fields.get("client_id", ""), fields.get("client_secret", "")
        method = "client_secret_post" if secret else "none"
        if scheme.lower() == "basic":
            try:
                pair = b64decode(credentials, validate=True).decode()
            except ValueError:
                pair = ""
            client_id, _, secret = (unquote_plus(part) for part in pair.partition(":"))
            method = "client_secret_basic"
        client = self.clients.get(client_id)
        if client is None or client.auth_method != method or not compare_digest(client.secret, hashed(secret)):
            raise OAuthError("invalid_client", "this client is not known, or not by this secret", 401)
        return client

    def _check_resource(self, fields: Mapping[str, str]) -> None:
        """Tokens are for one MCP server only; clients of 2025-06-18 and later name it in the `resource` parameter."""
        if fields.get("resource", self.resource).rstrip("/") != self.resource:
            raise OAuthError("invalid_target", f"tokens from here are for {self.resource}")


def is_same_browser(request: Request, pending: AuthorizationRequest) -> bool:
    """Whether the request began in this browser.  If not, an attacker may have begun it and sent a link to the user."""
    return compare_digest(hashed(request.cookies.get(COOKIE, "")), pending.browser)
