"""An MCP server that requires tokens, and the authorization servers that issue them, in memory.

The servers check each rule that a client could break, and can be set to each variation that the specification allows.
`AuthServer` and `McpServer` have settings, a list of the requests received, and a method `answer`.  `Deployment` routes
a request to a server by the URL.  `Driver` drives an `Authorizer` against a `Deployment`: it carries out one action
after the other, as an application does.

Faults are settings as well: a wrong issuer or no PKCE (`metadata`), a response of another issuer (`iss`), a refusal by
the user (`denies`), redirects (`redirects`), expired tokens (`expire`) and refresh tokens for one use (`rotates`).
`Deployment.override` replaces any reply.  `tests.http.auth_site` has servers that are slow or do not reply.

This module does no I/O, so a test can put it behind any HTTP server.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

import attrs

from trio_mcp.core.http import Headers
from trio_mcp.core.oauth import (
    Application,
    AskAssertion,
    Asserted,
    AuthorizationFailed,
    Authorized,
    Authorizer,
    BrowserReturned,
    Flow,
    FlowAction,
    FlowEvent,
    FlowFailed,
    Key,
    OpenBrowser,
    OpenReceiver,
    Persist,
    ReceiverReady,
    Replied,
    SendRequest,
    ServerRecord,
    StartFlow,
    UrlRules,
)

CALLBACK = "http://localhost:3000/callback"
NOW = 1_800_000_000.0
MCP = "https://mcp.example/mcp"
ISSUER = "https://as.example"
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"


_COUNT = itertools.count()


def entropy(size: int) -> bytes:
    """Bytes that differ in each call."""
    return hashlib.shake_128(str(next(_COUNT)).encode()).digest(size)


def key(algorithm: str = "ES256", **more: Any) -> Key:
    """A key with a constant signature, for servers that check the header and the claims only."""

    def sign(claims: Mapping[str, Any], header: Mapping[str, Any]) -> str:
        parts = (json.dumps(dict(each)).encode() for each in (header, claims))
        return ".".join([*(base64.urlsafe_b64encode(each).decode() for each in parts), "signature"])

    return Key(algorithm, sign, {"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}, **more)


def jwt_parts(jwt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the claims of a JWT of `key`."""
    header, claims, _ = jwt.split(".")
    return json.loads(base64.urlsafe_b64decode(header)), json.loads(base64.urlsafe_b64decode(claims))


def reply(status: int, body: Any = None, **headers: str) -> Replied:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Replied(status, Headers(fields), b"" if body is None else json.dumps(body).encode())


@attrs.frozen
class ReceivedRequest:
    """A request that a server received.  The kind is metadata, register, authorize, token, userinfo, revoke or
    redirected."""

    kind: str
    fields: dict[str, Any]
    headers: Headers = attrs.field(factory=Headers)


@attrs.frozen
class IssuedToken:
    client_id: str
    scopes: tuple[str, ...]
    resource: str | None
    kind: str
    jwk: Any = None


@attrs.define
class AuthServer:
    issuer: str = ISSUER
    # The path of the metadata.  None: the server publishes no metadata.
    path: str | None = "/.well-known/oauth-authorization-server"
    endpoints: str = ""  # a prefix of the paths /authorize, /token and /register
    methods: tuple[str, ...] = ("none",)
    grants: tuple[str, ...] = ("authorization_code", "refresh_token")
    registers: bool = True
    gives_secret: bool = True
    metadata: dict[str, Any] = attrs.field(factory=dict)  # None removes a member
    iss: str | None = ISSUER  # in the authorization response
    refreshes: bool = True
    rotates: bool = True
    expires_in: Any = 3600
    withholds: tuple[str, ...] = ()  # scopes that are never granted
    dpop: bool = False
    nonce: str | None = None
    clients: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    asked: list[ReceivedRequest] = attrs.field(factory=list)
    codes: dict[str, dict[str, str]] = attrs.field(factory=dict)
    tokens: dict[str, IssuedToken] = attrs.field(factory=dict)
    refresh_tokens: dict[str, IssuedToken] = attrs.field(factory=dict)
    denies: dict[str, str] = attrs.field(factory=dict)  # the authorization response has these fields instead of a code
    redirects: dict[str, str] = attrs.field(factory=dict)  # from a path to a URL
    user: str = "ada"
    _count: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    @property
    def origin(self) -> str:
        parts = urlsplit(self.issuer)
        return f"{parts.scheme}://{parts.netloc}"

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The fields of all requests of one kind."""
        return [each.fields for each in self.asked if each.kind == kind]

    def document(self) -> dict[str, Any]:
        base = self.origin + self.endpoints
        members = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{base}/authorize",
            "token_endpoint": f"{base}/token",
            "registration_endpoint": f"{base}/register" if self.registers else None,
            "response_types_supported": ["code"],
            "token_endpoint_auth_methods_supported": list(self.methods),
            "grant_types_supported": list(self.grants),
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": self.iss is not None,
            "dpop_signing_alg_values_supported": ["ES256"] if self.dpop else None,
            **self.metadata,
        }
        return {name: value for name, value in members.items() if value is not None}

    def expire(self) -> None:
        """Invalidate all access tokens that were issued so far."""
        self.tokens.clear()

    def answer(self, request: SendRequest) -> Replied:
        path, headers = urlsplit(request.url).path, Headers(request.headers)
        if path in self.redirects:
            self.asked.append(ReceivedRequest("redirected", {"path": path}, headers))
            return reply(307, None, Location=self.redirects[path])  # 307 keeps the method and the body
        if path == f"{self.endpoints}/userinfo":
            self.asked.append(ReceivedRequest("userinfo", {}, headers))
            known = headers.get("Authorization", "").removeprefix("Bearer ") in self.tokens
            return reply(200, {"sub": self.user}) if known else reply(401)
        if request.method == "GET":
            found = self.path is not None and path == self.path
            self.asked.append(ReceivedRequest("metadata", {"path": path}, headers))
            return reply(200, self.document()) if found else reply(404)
        if path == f"{self.endpoints}/register" and self.registers:
            fields = json.loads(request.body)
            self.asked.append(ReceivedRequest("register", fields, headers))
            return self._register(fields)
        if path == f"{self.endpoints}/token":
            token = dict(parse_qsl(request.body.decode(), strict_parsing=True))
            self.asked.append(ReceivedRequest("token", token, headers))
            return self._token(token, headers)
        if path == f"{self.endpoints}/revoke":
            return self._revoke(dict(parse_qsl(request.body.decode(), strict_parsing=True)), headers)
        return reply(404)

    def _register(self, fields: dict[str, Any]) -> Replied:
        client_id = f"client-{next(self._count)}-of-{urlsplit(self.issuer).netloc}"
        members = {**fields, "client_id": client_id, "client_secret": "s3cret" if self.gives_secret else None}
        self.clients[client_id] = members
        return reply(201, {name: value for name, value in members.items() if value is not None})

    def browse(self, url: str) -> str:
        """The query of the authorization response, when the user agrees."""
        back = self.authorize(url)
        assert back is not None, "the user sees an error page, and the browser does not return"
        return back

    def authorize(self, url: str) -> str | None:
        """Like `browse`, or None when the user sees an error page."""
        parts = urlsplit(url)
        assert parts.path == f"{self.endpoints}/authorize"
        fields = dict(parse_qsl(parts.query, strict_parsing=True))
        self.asked.append(ReceivedRequest("authorize", fields))
        client = self.clients.get(fields["client_id"])
        known = (
            fields["client_id"].startswith("https:")
            if client is None
            else fields["redirect_uri"] in (client.get("redirect_uris") or [CALLBACK])
        )
        if not known:
            return None
        code = f"code-{next(self._count)}"
        self.codes[code] = fields
        back = self.denies or {"code": code}
        issuer = {} if self.iss is None else {"iss": self.iss}
        return urlencode({**back, "state": fields["state"], **issuer})

    def _token(self, fields: dict[str, str], headers: Headers) -> Replied:
        client_id = self._authenticate(fields, headers)
        if client_id is None:
            return reply(401, {"error": "invalid_client"})
        proof = headers.get("DPoP") if self.dpop else None
        jwk = None
        if proof is not None:
            header, claims = jwt_parts(proof)
            if claims.get("nonce") != self.nonce:
                return reply(400, {"error": "use_dpop_nonce"}, DPoP_Nonce=str(self.nonce))
            assert (header["typ"], claims["htm"]) == ("dpop+jwt", "POST")
            assert claims["htu"] == f"{self.origin}{self.endpoints}/token"
            jwk = header["jwk"]
        kind = "Bearer" if jwk is None else "DPoP"
        match fields["grant_type"]:
            case "authorization_code":
                asked = self.codes.pop(fields["code"], None)
                if asked is None or not self._redeems(fields, asked, client_id):
                    return reply(400, {"error": "invalid_grant"})
                granted = IssuedToken(
                    client_id, tuple(asked.get("scope", "").split()), fields.get("resource"), kind, jwk
                )
            case "refresh_token":
                old = self.refresh_tokens.get(fields["refresh_token"])
                if old is None or old.client_id != client_id or old.resource != fields.get("resource"):
                    return reply(400, {"error": "invalid_grant", "error_description": f"no {fields['refresh_token']}"})
                if self.rotates:
                    del self.refresh_tokens[fields["refresh_token"]]
                granted = old
            case grant if grant in self.grants:
                granted = IssuedToken(
                    client_id, tuple(fields.get("scope", "").split()), fields.get("resource"), kind, jwk
                )
            case _:
                return reply(400, {"error": "unsupported_grant_type"})
        return self._give(granted, fields["grant_type"])

    def _revoke(self, fields: dict[str, str], headers: Headers) -> Replied:
        self.asked.append(ReceivedRequest("revoke", fields, headers))
        if self._authenticate(fields, headers) is None:
            return reply(401, {"error": "invalid_client"})
        self.tokens.pop(fields["token"], None)
        self.refresh_tokens.pop(fields["token"], None)
        return reply(200)

    def _redeems(self, fields: dict[str, str], asked: dict[str, str], client_id: str) -> bool:
        challenge = base64.urlsafe_b64encode(hashlib.sha256(fields["code_verifier"].encode()).digest())
        return (
            challenge.rstrip(b"=").decode() == asked["code_challenge"]
            and asked["code_challenge_method"] == "S256"
            and fields["redirect_uri"] == asked["redirect_uri"]
            and client_id == asked["client_id"]
            and fields.get("resource") == asked.get("resource")
        )

    def _authenticate(self, fields: dict[str, str], headers: Headers) -> str | None:
        """The client id, if the client authenticates by a method that this server accepts."""
        if "Authorization" in headers:
            pair = base64.b64decode(headers["Authorization"].removeprefix("Basic ")).decode()
            client_id, _, secret = (unquote_plus(each) for each in pair.partition(":"))
            method = "client_secret_basic"
        elif "client_assertion" in fields:
            header, claims = jwt_parts(fields["client_assertion"])
            assert claims["aud"] == self.issuer
            assert claims["iss"] == claims["sub"]
            assert header["alg"] == "ES256"
            client_id, secret, method = claims["sub"], None, "private_key_jwt"
        else:
            client_id, secret = fields["client_id"], fields.get("client_secret")
            method = "none" if secret is None else "client_secret_post"
        known = self.clients.get(client_id, {} if client_id.startswith("https:") else None)
        if known is None or method not in self.methods:
            return None
        good = not method.startswith("client_secret") or secret == known["client_secret"]
        return client_id if good else None

    def _give(self, granted: IssuedToken, grant: str) -> Replied:
        number = next(self._count)
        granted = attrs.evolve(granted, scopes=tuple(each for each in granted.scopes if each not in self.withholds))
        access = f"access-{number}-of-{urlsplit(self.issuer).netloc.replace(':', '.')}"  # tokens have no colon
        refresh = f"refresh-{number}"
        self.tokens[access] = granted
        members = {"access_token": access, "token_type": granted.kind, "expires_in": self.expires_in}
        if granted.scopes:
            members["scope"] = " ".join(granted.scopes)
        once = ("authorization_code", "refresh_token") if self.rotates else ("authorization_code",)
        if self.refreshes and grant in once:
            self.refresh_tokens[refresh] = granted
            members["refresh_token"] = refresh
        return reply(200, members)


@attrs.define
class McpServer:
    """An MCP server that replies 200 to each request with a token of the authorization server `trusts`."""

    trusts: AuthServer
    url: str = MCP
    resource: str | None = None  # None: the URL
    issuers: tuple[str, ...] | None = None  # None: the issuer of `trusts`
    # The paths of its metadata; empty for a server of 2025-03-26.
    paths: tuple[str, ...] = ("/.well-known/oauth-protected-resource/mcp",)
    named: str | None = "https://mcp.example/.well-known/oauth-protected-resource/mcp"
    metadata: dict[str, Any] = attrs.field(factory=dict)
    scope: str | None = None  # in the challenge of a 401
    needs: dict[str, str] = attrs.field(factory=dict)  # from an operation to the scopes that it needs
    scheme: str = "Bearer"
    nonce: str | None = None
    calls: list[Headers] = attrs.field(factory=list)
    asked: list[str] = attrs.field(factory=list)
    jtis: set[str] = attrs.field(factory=set)

    @property
    def origin(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    def answer(self, request: SendRequest) -> Replied:
        path = urlsplit(request.url).path
        self.asked.append(path)
        if path not in self.paths:
            return reply(404)
        issuers = self.issuers if self.issuers is not None else (self.trusts.issuer,)
        members = {"resource": self.resource or self.url, "authorization_servers": list(issuers), **self.metadata}
        return reply(200, {name: value for name, value in members.items() if value is not None})

    def call(self, headers: Headers, operation: str) -> Replied:
        self.calls.append(headers)
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        granted = self.trusts.tokens.get(token)
        if granted is None or scheme != granted.kind or (self.scheme == "DPoP" and scheme != "DPoP"):
            return self._refuse(401, scope=self.scope)
        if granted.kind == "DPoP" and (error := self._disproven(headers.get("DPoP"), token)):
            return self._refuse(401, error=error)
        lacking = {*self.needs.get(operation, "").split()} - {*granted.scopes}
        if lacking:
            return self._refuse(403, error="insufficient_scope", scope=self.needs[operation])
        return reply(200, {"operation": operation})

    def _disproven(self, proof: str | None, token: str) -> str | None:
        if proof is None:
            return "invalid_token"
        _, claims = jwt_parts(proof)
        if claims.get("nonce") != self.nonce:
            return "use_dpop_nonce"
        ath = base64.urlsafe_b64encode(hashlib.sha256(token.encode()).digest()).rstrip(b"=").decode()
        assert claims["jti"] not in self.jtis
        self.jtis.add(claims["jti"])
        good = (claims["ath"], claims["htu"], claims["htm"]) == (ath, self.url, "POST")
        return None if good else "invalid_dpop_proof"

    def _refuse(self, status: int, **parameters: str | None) -> Replied:
        members = {**parameters, "resource_metadata": self.named}
        text = ", ".join(f'{name}="{value}"' for name, value in members.items() if value is not None)
        nonce = {} if self.nonce is None else {"DPoP_Nonce": self.nonce}
        return reply(status, None, WWW_Authenticate=f"{self.scheme} {text}".strip(), **nonce)


@attrs.define
class Deployment:
    """One MCP server and its authorization servers.  `send` finds the server by the origin of the URL.  For an MCP
    server that is its own authorization server, the `AuthServer` has the same origin."""

    mcp: McpServer
    servers: list[AuthServer]
    requests: list[SendRequest] = attrs.field(factory=list)
    override: Callable[[SendRequest], FlowEvent | None] = lambda request: None

    def send(self, request: SendRequest) -> FlowEvent:
        self.requests.append(request)
        if (event := self.override(request)) is not None:
            return event
        path = urlsplit(request.url).path
        its_own = path in self.mcp.paths or path.startswith("/.well-known/oauth-protected-resource")
        server = self._server(request.url)
        if request.url.startswith(f"{self.mcp.origin}/") and (its_own or server is None):
            return self.mcp.answer(request)
        assert server is not None, f"no server is at {request.url}"
        return server.answer(request)

    def browse(self, url: str) -> str:
        server = self._server(url)
        assert server is not None, f"no server is at {url}"
        return server.browse(url)

    def _server(self, url: str) -> AuthServer | None:
        return next((each for each in self.servers if url.startswith(f"{each.origin}/")), None)


def deployment(**settings: Any) -> Deployment:
    """One MCP server and one authorization server; a setting with the prefix `mcp_` is for the MCP server."""
    of_mcp = {name.removeprefix("mcp_"): value for name, value in settings.items() if name.startswith("mcp_")}
    server = AuthServer(**{name: value for name, value in settings.items() if not name.startswith("mcp_")})
    return Deployment(McpServer(server, **of_mcp), [server])


APPLICATION = Application("Visitor")


@attrs.define
class Driver:
    """A driver of an `Authorizer`: it makes one request after the other and carries out each action of a flow."""

    deployment: Deployment
    application: Application = APPLICATION
    record: ServerRecord | None = None
    rules: UrlRules | None = None
    now: float = NOW
    assertion: str = "vouched"
    authorizer: Authorizer = attrs.field(init=False)
    persisted: list[ServerRecord] = attrs.field(factory=list)
    actions: list[FlowAction] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.authorizer = Authorizer(
            self.deployment.mcp.url, self.application, entropy=entropy, record=self.record, rules=self.rules
        )

    @property
    def pages(self) -> list[OpenBrowser]:
        return [each for each in self.actions if isinstance(each, OpenBrowser)]

    def call(self, operation: str = "") -> int:
        """Send a request until it succeeds, and return the status.  Raises the error of a failed flow."""
        request = self.authorizer.authorized_request("POST", operation=operation)
        verdict = request.go(self.now)
        while True:
            if isinstance(verdict, FlowFailed):
                raise verdict.error
            if isinstance(verdict, Authorized):
                answer = self.deployment.mcp.call(Headers(verdict.headers), operation)
                if answer.status == 200:
                    self.authorizer.replied(answer.headers)
                    return answer.status
                verdict = request.refused(answer.status, answer.headers, self.now)
            else:
                assert isinstance(verdict, StartFlow), "no other request has started a flow"
                self.drive(verdict.flow)
                verdict = request.go(self.now)

    def drive(self, flow: Flow) -> None:
        try:
            actions = flow.start(self.now)
            while not flow.over:
                actions = flow.receive(self.perform(actions), self.now)
            self._save(actions)
        finally:
            flow.abandon()

    def perform(self, actions: tuple[FlowAction, ...]) -> FlowEvent:
        """Carry out all actions, and return the event that answers the last one."""
        self._save(actions)
        match actions[-1]:
            case SendRequest() as request:
                return self.deployment.send(request)
            case OpenReceiver():
                return ReceiverReady(CALLBACK)
            case OpenBrowser(url=url):
                return BrowserReturned(self.deployment.browse(url))
            case AskAssertion():
                return Asserted(self.assertion)
            case other:
                raise AssertionError(other)

    def _save(self, actions: tuple[FlowAction, ...]) -> None:
        self.actions += actions
        self.persisted += [each.record for each in actions if isinstance(each, Persist)]


def failure(driver: Driver, operation: str = "") -> AuthorizationFailed:
    """Make a request that must fail, and return its error."""
    try:
        status = driver.call(operation)
    except AuthorizationFailed as error:
        return error
    raise AssertionError(f"answered with {status}")


def restarted(driver: Driver, **changes: Any) -> Driver:
    """The same application in a new process, with the record that was persisted last."""
    return Driver(driver.deployment, driver.application, driver.persisted[-1], driver.rules, **changes)
