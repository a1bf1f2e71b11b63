"""The authorization server for MCP clients, which asks the identity provider who the user is.

One flow goes through these hands, each of which is worth something to nobody but its holder, and once:

| What | From | To | Bound to |
|---|---|---|---|
| `ticket` | /authorize | /consent | the browser, by its cookie; the request of the client |
| `state` | /consent | /callback | the same browser; there is none before the user has agreed |
| `code` | /callback | /token | the client, its redirect URI, its PKCE challenge |
| tokens | /token | /mcp | the grant: client, user, scopes, and the provider's tokens, which stay here |

Nothing of what a client has registered is trusted: its name is shown as what it claims, the browser goes to its
redirect URI only after the user has seen where that is, and whatever is wrong before that ends on a page of ours.
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

from .kept import Access, Asked, Client, Grant, Once, Shelf, hashed
from .upstream import Down, Refused, Tokens, Upstream
from .wire import LOOPBACK, NEVER, PAGE, Fault, body_of, fields_of, may_be_returned_to, page

METHODS = ("none", "client_secret_post", "client_secret_basic")
GRANTS = ("authorization_code", "refresh_token")
ENDPOINTS = {"authorization": "authorize", "token": "token", "registration": "register", "revocation": "revoke"}
COOKIE = "__Host-browser"  # no other host, and no page without TLS, can set one of this name
CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}")
CLIENTS = 10_000  # beyond, the oldest has to register once more
TICKET, CODE, ACCESS, REFRESH = 600.0, 60.0, 600.0, 30 * 86400.0  # seconds for which each is good


class Proxy:
    """`scopes` are what clients may ask for, each with words for the user; the first is for those that ask for none."""

    def __init__(self, issuer: str, resource: str, scopes: Mapping[str, str], upstream: Upstream) -> None:
        self.issuer, self.resource, self.scopes, self.upstream = issuer, resource, scopes, upstream
        self.clients: dict[str, Client] = {}
        self.tickets = Shelf[Asked](TICKET)
        self.states = Shelf[tuple[Asked, str]](TICKET)
        self.codes = Shelf[Once](CODE)
        self.accesses = Shelf[Access](ACCESS)
        self.refreshes = Shelf[Once](REFRESH)

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
        """For `Server.protect`.  Tokens of the provider, or of anybody else, are not known here."""
        access = self.accesses.get(token)
        if access is None or not access.grant.alive:
            return None
        return Principal(access.grant.user, access.scopes, access.until, {"grant": access.grant})

    # Clients.

    async def metadata(self, request: Request) -> Response:
        endpoints = {f"{name}_endpoint": f"{self.issuer}/{path}" for name, path in ENDPOINTS.items()}
        said = {
            "issuer": self.issuer,
            **endpoints,
            "response_types_supported": ["code"],
            "grant_types_supported": GRANTS,
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": METHODS,
            "scopes_supported": list(self.scopes),
            "authorization_response_iss_parameter_supported": True,
        }
        return JSONResponse(said)

    async def register(self, request: Request) -> Response:
        try:
            said = json.loads(await body_of(request))
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise Fault("invalid_client_metadata", "a registration is a JSON object")
        uris, method = said.get("redirect_uris"), said.get("token_endpoint_auth_method", "client_secret_basic")
        if not isinstance(uris, list) or not 1 <= len(uris) <= 10 or not all(map(may_be_returned_to, uris)):
            why = "redirect_uris are up to ten: https, or http on loopback, without a fragment"
            raise Fault("invalid_redirect_uri", why)
        if method not in METHODS:
            raise Fault("invalid_client_metadata", f"token_endpoint_auth_method is one of {', '.join(METHODS)}")
        if not isinstance(name := said.get("client_name", ""), str):
            raise Fault("invalid_client_metadata", "client_name is a text")
        name = "".join(filter(str.isprintable, name))[:100] or "A program without a name"  # none turns the line around
        secret = "" if method == "none" else secrets.token_urlsafe(32)
        client = Client(secrets.token_urlsafe(16), name, tuple(uris), method, hashed(secret))
        self.clients[client.id] = client
        if len(self.clients) > CLIENTS:
            del self.clients[next(iter(self.clients))]
        told = {
            "client_id": client.id,
            "client_id_issued_at": int(time.time()),
            "client_name": client.name,
            "redirect_uris": uris,
            "token_endpoint_auth_method": method,
            "grant_types": GRANTS,
            "response_types": ["code"],
            **({"client_secret": secret, "client_secret_expires_at": 0} if secret else {}),
        }
        return JSONResponse(told, 201, NEVER)

    # The user's browser.

    async def authorize(self, request: Request) -> Response:
        fields = fields_of(request.url.query)
        client = self.clients.get(fields.get("client_id", ""))
        if client is None:
            raise Fault("invalid_client", "this program is not known here; it has to register")
        if (redirect_uri := fields.get("redirect_uri")) not in client.redirect_uris:  # letter by letter
            raise Fault("invalid_request", "this program wants you to return to where it has not said it is")
        if fields.get("response_type") != "code":
            raise Fault("unsupported_response_type", "response_type is code")
        if fields.get("code_challenge_method") != "S256" or not CHALLENGE.fullmatch(fields.get("code_challenge", "")):
            raise Fault("invalid_request", "PKCE is needed, by S256")
        self._check_resource(fields)
        wanted = tuple(each for each in self.scopes if each in fields.get("scope", "").split())
        scopes = wanted or tuple(self.scopes)[:1]
        browser = request.cookies.get(COOKIE) or secrets.token_urlsafe(32)
        asked = Asked(client, redirect_uri, fields.get("state"), fields["code_challenge"], scopes, hashed(browser))
        answer = HTMLResponse(self._question(asked, self.tickets.add(asked)), headers=PAGE)
        answer.set_cookie(COOKIE, browser, secure=True, httponly=True, samesite="lax")
        return answer

    def _question(self, asked: Asked, ticket: str) -> str:
        """It is asked each time: what one user allowed a program says nothing of who has sent the next request."""
        host = urlsplit(asked.redirect_uri).hostname
        where = f"You will be sent to <b>{escape(asked.redirect_uri.partition('?')[0])}</b>."
        if host in LOOPBACK:
            where += " That is whatever program listens there <b>on this computer</b>. Have you just started one?"
        things = "".join(f"<li>{escape(self.scopes[each])}</li>" for each in asked.scopes)
        return page(
            "Allow this?",
            f"<h1>{escape(asked.client.name)} asks for access</h1>"
            f"<p>That is how it calls itself; nobody has checked it.</p><p>It wants to</p><ul>{things}</ul>"
            f'<p>{where}</p><form method="post" action="/consent">'
            f'<input type="hidden" name="ticket" value="{escape(ticket)}">'
            '<button name="decision" value="allow">Allow</button> <button name="decision" value="deny">Deny</button>'
            "</form>",
        )

    async def consent(self, request: Request) -> Response:
        fields = fields_of(await body_of(request))
        asked = self.tickets.take(fields.get("ticket", ""))
        if asked is None or not is_browser(request, asked):
            raise Fault("invalid_request", "this question was answered, or is too old; begin anew in your program")
        if fields.get("decision") != "allow":
            return self._back(asked, error="access_denied")
        verifier = secrets.token_urlsafe(48)
        state = self.states.add((asked, verifier))
        return RedirectResponse(self.upstream.page(state, verifier), 303, NEVER)

    async def callback(self, request: Request) -> Response:
        fields = fields_of(request.url.query)
        asked, verifier = self.states.take(fields.get("state", "")) or (None, "")
        if asked is None or not is_browser(request, asked):
            raise Fault("invalid_request", "you did not begin this here, or it took too long; begin anew")
        if not self.upstream.has_sent(fields):
            raise Fault("invalid_request", "this answer is not of the server that was asked")
        if "error" in fields:  # what else it says may be anybody's words
            return self._back(asked, error="access_denied" if fields["error"] == "access_denied" else "server_error")
        try:
            tokens = await self.upstream.redeem(fields.get("code", ""), verifier)
            user = await self.upstream.user(tokens)
        except Refused:
            return self._back(asked, error="access_denied")
        except Down:
            return self._back(asked, error="temporarily_unavailable")
        grant = Grant(asked.client.id, user, asked.scopes, tokens)
        return self._back(asked, code=self.codes.add(Once(grant, asked)))

    def _back(self, asked: Asked, **fields: str) -> Response:
        query = urlencode({**fields, "iss": self.issuer, **({} if asked.state is None else {"state": asked.state})})
        joint = "&" if "?" in asked.redirect_uri else "?"
        return RedirectResponse(f"{asked.redirect_uri}{joint}{query}", 303, NEVER)

    # Tokens.

    async def token(self, request: Request) -> Response:
        fields = fields_of(await body_of(request))
        client = self._authenticated(request, fields)
        self._check_resource(fields)
        match fields.get("grant_type"):
            case "authorization_code":
                return self._redeemed(client, fields)
            case "refresh_token":
                return await self._refreshed(client, fields)
            case _:
                raise Fault("unsupported_grant_type", f"grant_type is one of {', '.join(GRANTS)}")

    def _redeemed(self, client: Client, fields: Mapping[str, str]) -> Response:
        code = self._use(self.codes, fields.get("code", ""), client)
        assert code.asked is not None
        challenge = urlsafe_b64encode(hashed(fields.get("code_verifier", ""))).rstrip(b"=").decode()
        if fields.get("redirect_uri") != code.asked.redirect_uri or not compare_digest(challenge, code.asked.challenge):
            raise Fault("invalid_grant", "the code was given for another redirect_uri or code_challenge")
        return self._given(code.grant, code.grant.scopes)

    async def _refreshed(self, client: Client, fields: Mapping[str, str]) -> Response:
        old = self._use(self.refreshes, fields.get("refresh_token", ""), client)
        grant = old.grant
        try:
            await self.renew(grant, grant.upstream)
        except Refused:
            raise Fault("invalid_grant", "the identity provider does not stand by this user any more") from None
        except Down:
            old.used = False  # it may be tried again
            raise Fault("temporarily_unavailable", "the identity provider cannot be asked now", 503) from None
        asked = fields.get("scope", " ".join(grant.scopes)).split()
        return self._given(grant, tuple(each for each in grant.scopes if each in asked))

    def _use(self, shelf: Shelf[Once], secret: str, client: Client) -> Once:
        found = shelf.get(secret)
        if found is None or not found.grant.alive or found.grant.client_id != client.id:
            raise Fault("invalid_grant", "it is not known, or not good any more")
        if found.used:
            found.grant.alive = False
            raise Fault("invalid_grant", "it was used before, so all that came of it is revoked")
        found.used = True
        return found

    def _given(self, grant: Grant, scopes: tuple[str, ...]) -> Response:
        said = {
            "access_token": self.accesses.add(Access(grant, scopes, time.time() + ACCESS)),
            "token_type": "Bearer",
            "expires_in": int(ACCESS),
            "refresh_token": self.refreshes.add(Once(grant)),
            "scope": " ".join(scopes),
        }
        return JSONResponse(said, headers=NEVER)

    async def renew(self, grant: Grant, seen: Tokens) -> None:
        """Get the provider's tokens anew, once for all who have `seen` the old ones, or end the grant with them.

        It is not cancelled with whoever asks: new refresh tokens may have taken the place of the old ones there.
        """
        async with grant.renewing:
            if grant.upstream is seen:
                with trio.CancelScope(shield=True):
                    try:
                        grant.upstream = await self.upstream.renewed(seen)
                    except Refused:
                        grant.alive = False
                        raise

    async def user_of(self, grant: Grant) -> str:
        """Who the provider says that the user is, now."""
        seen = grant.upstream
        try:
            return await self.upstream.user(seen)
        except Refused:  # the provider's token may live shorter than ours
            await self.renew(grant, seen)
            return await self.upstream.user(grant.upstream)

    async def revoke(self, request: Request) -> Response:
        """RFC 7009: what is not known is revoked already."""
        fields = fields_of(await body_of(request))
        client, token = self._authenticated(request, fields), fields.get("token", "")
        found = self.refreshes.get(token) or self.accesses.get(token)
        if found is not None and found.grant.client_id == client.id and found.grant.alive:
            found.grant.alive = False
            with contextlib.suppress(Refused, Down):  # here it is revoked all the same
                await self.upstream.revoke(found.grant.upstream)
        return Response(headers=NEVER)

    def _authenticated(self, request: Request, fields: Mapping[str, str]) -> Client:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        client_id, secret = fields.get("client_id", ""), fields.get("client_secret", "")
        method = "client_secret_post" if secret else "none"
        if kind.lower() == "basic":
            try:
                pair = b64decode(given, validate=True).decode()
            except ValueError:
                pair = ""
            client_id, _, secret = (unquote_plus(each) for each in pair.partition(":"))
            method = "client_secret_basic"
        client = self.clients.get(client_id)
        if client is None or client.method != method or not compare_digest(client.secret, hashed(secret)):
            raise Fault("invalid_client", "this client is not known, or not by this secret", 401)
        return client

    def _check_resource(self, fields: Mapping[str, str]) -> None:
        """Tokens are for the MCP server beside us, and clients of 2025-06-18 and later say that they mean it."""
        if fields.get("resource", self.resource).rstrip("/") != self.resource:
            raise Fault("invalid_target", f"tokens from here are for {self.resource}")


def is_browser(request: Request, asked: Asked) -> bool:
    """Whether this is the browser that was asked: a link that somebody else has begun ends here."""
    return compare_digest(hashed(request.cookies.get(COOKIE, "")), asked.browser)
