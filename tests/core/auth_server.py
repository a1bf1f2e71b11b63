"""An MCP server that wants tokens and the authorization servers that give them, in memory.

They are strict where a client could cheat and open to every variation that a server is allowed: `AuthServer` and
`McpServer` are settings, a memory of what was asked, and one method that answers a request.  `World` finds who is
meant by a URL, and `Visitor` drives an `Authorizer` against it as an application does, one deed after the other.

They misbehave as they are told: the issuer and PKCE by `metadata`, a mixed-up answer by `iss`, what the user refuses by
`denies`, `redirects`, tokens that have come to their end (`expire`) or are good once (`rotates`).  `World.broken` puts
anything at all in the place of a reply, and `tests.http.auth_site` has the slow and the dead.

Nothing here does any I/O, so whatever speaks HTTP can stand before it.
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
    """Bytes that are never the same twice."""
    return hashlib.shake_128(str(next(_COUNT)).encode()).digest(size)


def key(algorithm: str = "ES256", **more: Any) -> Key:
    """A key whose signature is worth nothing, for servers that look at all the rest."""

    def sign(claims: Mapping[str, Any], header: Mapping[str, Any]) -> str:
        parts = (json.dumps(dict(each)).encode() for each in (header, claims))
        return ".".join([*(base64.urlsafe_b64encode(each).decode() for each in parts), "signature"])

    return Key(algorithm, sign, {"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}, **more)


def unsigned(jwt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the claims of a JWT of `key`."""
    header, claims, _ = jwt.split(".")
    return json.loads(base64.urlsafe_b64decode(header)), json.loads(base64.urlsafe_b64decode(claims))


def reply(status: int, body: Any = None, **headers: str) -> Replied:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return Replied(status, Headers(fields), b"" if body is None else json.dumps(body).encode())


@attrs.frozen
class Asked:
    """One request that a server got: what it is (metadata, register, authorize, token, userinfo, revoke) and what was
    in it."""

    kind: str
    fields: dict[str, Any]
    headers: Headers = attrs.field(factory=Headers)


@attrs.frozen
class Granted:
    client_id: str
    scopes: tuple[str, ...]
    resource: str | None
    kind: str
    jwk: Any = None


@attrs.define
class AuthServer:
    issuer: str = ISSUER
    # Of the metadata; None for a server that publishes none.
    path: str | None = "/.well-known/oauth-authorization-server"
    endpoints: str = ""  # the path before authorize, token and register
    methods: tuple[str, ...] = ("none",)
    grants: tuple[str, ...] = ("authorization_code", "refresh_token")
    registers: bool = True
    gives_secret: bool = True
    metadata: dict[str, Any] = attrs.field(factory=dict)  # None takes a member away
    iss: str | None = ISSUER  # what the browser comes back with
    refreshes: bool = True
    rotates: bool = True
    expires_in: Any = 3600
    withholds: tuple[str, ...] = ()  # scopes that nobody gets
    dpop: bool = False
    nonce: str | None = None
    clients: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    asked: list[Asked] = attrs.field(factory=list)
    codes: dict[str, dict[str, str]] = attrs.field(factory=dict)
    tokens: dict[str, Granted] = attrs.field(factory=dict)
    refresh_tokens: dict[str, Granted] = attrs.field(factory=dict)
    denies: dict[str, str] = attrs.field(factory=dict)  # what the browser brings back instead of a code
    redirects: dict[str, str] = attrs.field(factory=dict)  # where requests for these paths are sent on to
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
        said = {
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
        return {name: value for name, value in said.items() if value is not None}

    def expire(self) -> None:
        """No access token that was given so far is good any more."""
        self.tokens.clear()

    def answer(self, request: SendRequest) -> Replied:
        path, headers = urlsplit(request.url).path, Headers(request.headers)
        if path in self.redirects:
            self.asked.append(Asked("redirected", {"path": path}, headers))
            return reply(307, None, Location=self.redirects[path])  # which keeps the method and all that is in a form
        if path == f"{self.endpoints}/userinfo":
            self.asked.append(Asked("userinfo", {}, headers))
            known = headers.get("Authorization", "").removeprefix("Bearer ") in self.tokens
            return reply(200, {"sub": self.user}) if known else reply(401)
        if request.method == "GET":
            found = self.path is not None and path == self.path
            self.asked.append(Asked("metadata", {"path": path}, headers))
            return reply(200, self.document()) if found else reply(404)
        if path == f"{self.endpoints}/register" and self.registers:
            fields = json.loads(request.body)
            self.asked.append(Asked("register", fields, headers))
            return self._register(fields)
        if path == f"{self.endpoints}/token":
            token = dict(parse_qsl(request.body.decode(), strict_parsing=True))
            self.asked.append(Asked("token", token, headers))
            return self._token(token, headers)
        if path == f"{self.endpoints}/revoke":
            return self._revoke(dict(parse_qsl(request.body.decode(), strict_parsing=True)), headers)
        return reply(404)

    def _register(self, fields: dict[str, Any]) -> Replied:
        client_id = f"client-{next(self._count)}-of-{urlsplit(self.issuer).netloc}"
        said = {**fields, "client_id": client_id, "client_secret": "s3cret" if self.gives_secret else None}
        self.clients[client_id] = said
        return reply(201, {name: value for name, value in said.items() if value is not None})

    def browse(self, url: str) -> str:
        """What a browser comes back with whose user agrees to everything."""
        back = self.authorize(url)
        assert back is not None, "the user sees an error, and the browser does not come back"
        return back

    def authorize(self, url: str) -> str | None:
        """As `browse`; None where the user sees an error."""
        parts = urlsplit(url)
        assert parts.path == f"{self.endpoints}/authorize"
        fields = dict(parse_qsl(parts.query, strict_parsing=True))
        self.asked.append(Asked("authorize", fields))
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
            header, claims = unsigned(proof)
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
                granted = Granted(client_id, tuple(asked.get("scope", "").split()), fields.get("resource"), kind, jwk)
            case "refresh_token":
                old = self.refresh_tokens.get(fields["refresh_token"])
                if old is None or old.client_id != client_id or old.resource != fields.get("resource"):
                    return reply(400, {"error": "invalid_grant", "error_description": f"no {fields['refresh_token']}"})
                if self.rotates:
                    del self.refresh_tokens[fields["refresh_token"]]
                granted = old
            case grant if grant in self.grants:
                granted = Granted(client_id, tuple(fields.get("scope", "").split()), fields.get("resource"), kind, jwk)
            case _:
                return reply(400, {"error": "unsupported_grant_type"})
        return self._give(granted, fields["grant_type"])

    def _revoke(self, fields: dict[str, str], headers: Headers) -> Replied:
        self.asked.append(Asked("revoke", fields, headers))
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
        """The client id, if it is proven by a method that this server takes."""
        if "Authorization" in headers:
            pair = base64.b64decode(headers["Authorization"].removeprefix("Basic ")).decode()
            client_id, _, secret = (unquote_plus(each) for each in pair.partition(":"))
            method = "client_secret_basic"
        elif "client_assertion" in fields:
            header, claims = unsigned(fields["client_assertion"])
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

    def _give(self, granted: Granted, grant: str) -> Replied:
        number = next(self._count)
        granted = attrs.evolve(granted, scopes=tuple(each for each in granted.scopes if each not in self.withholds))
        access = f"access-{number}-of-{urlsplit(self.issuer).netloc.replace(':', '.')}"  # no token has a colon in it
        refresh = f"refresh-{number}"
        self.tokens[access] = granted
        said = {"access_token": access, "token_type": granted.kind, "expires_in": self.expires_in}
        if granted.scopes:
            said["scope"] = " ".join(granted.scopes)
        once = ("authorization_code", "refresh_token") if self.rotates else ("authorization_code",)
        if self.refreshes and grant in once:
            self.refresh_tokens[refresh] = granted
            said["refresh_token"] = refresh
        return reply(200, said)


@attrs.define
class McpServer:
    """An MCP server that answers every request with 200, to whom it trusts."""

    trusts: AuthServer
    url: str = MCP
    resource: str | None = None  # None: the URL
    issuers: tuple[str, ...] | None = None  # None: that of whom it trusts
    # Where its metadata is; none for a server of 2025-03-26.
    paths: tuple[str, ...] = ("/.well-known/oauth-protected-resource/mcp",)
    named: str | None = "https://mcp.example/.well-known/oauth-protected-resource/mcp"
    metadata: dict[str, Any] = attrs.field(factory=dict)
    scope: str | None = None  # of the challenge of a 401
    needs: dict[str, str] = attrs.field(factory=dict)  # the scopes that operations need
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
        said = {"resource": self.resource or self.url, "authorization_servers": list(issuers), **self.metadata}
        return reply(200, {name: value for name, value in said.items() if value is not None})

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
        _, claims = unsigned(proof)
        if claims.get("nonce") != self.nonce:
            return "use_dpop_nonce"
        ath = base64.urlsafe_b64encode(hashlib.sha256(token.encode()).digest()).rstrip(b"=").decode()
        assert claims["jti"] not in self.jtis
        self.jtis.add(claims["jti"])
        good = (claims["ath"], claims["htu"], claims["htm"]) == (ath, self.url, "POST")
        return None if good else "invalid_dpop_proof"

    def _refuse(self, status: int, **parameters: str | None) -> Replied:
        said = {**parameters, "resource_metadata": self.named}
        text = ", ".join(f'{name}="{value}"' for name, value in said.items() if value is not None)
        nonce = {} if self.nonce is None else {"DPoP_Nonce": self.nonce}
        return reply(status, None, WWW_Authenticate=f"{self.scheme} {text}".strip(), **nonce)


@attrs.define
class World:
    """Who answers at which origin.  A server that is its own authorization server stands in both places."""

    mcp: McpServer
    servers: list[AuthServer]
    requests: list[SendRequest] = attrs.field(factory=list)
    broken: Callable[[SendRequest], FlowEvent | None] = lambda request: None

    def send(self, request: SendRequest) -> FlowEvent:
        self.requests.append(request)
        if (heard := self.broken(request)) is not None:
            return heard
        path = urlsplit(request.url).path
        its_own = path in self.mcp.paths or path.startswith("/.well-known/oauth-protected-resource")
        server = self._server(request.url)
        if request.url.startswith(f"{self.mcp.origin}/") and (its_own or server is None):
            return self.mcp.answer(request)
        assert server is not None, f"nobody is at {request.url}"
        return server.answer(request)

    def browse(self, url: str) -> str:
        server = self._server(url)
        assert server is not None, f"nobody is at {url}"
        return server.browse(url)

    def _server(self, url: str) -> AuthServer | None:
        return next((each for each in self.servers if url.startswith(f"{each.origin}/")), None)


def world(**settings: Any) -> World:
    """One MCP server and one authorization server; settings with `mcp_` are those of the first."""
    of_mcp = {name.removeprefix("mcp_"): value for name, value in settings.items() if name.startswith("mcp_")}
    server = AuthServer(**{name: value for name, value in settings.items() if not name.startswith("mcp_")})
    return World(McpServer(server, **of_mcp), [server])


APPLICATION = Application("Visitor")


@attrs.define
class Visitor:
    """An application that makes one request after the other, and does what it is told."""

    world: World
    application: Application = APPLICATION
    record: ServerRecord | None = None
    rules: UrlRules | None = None
    now: float = NOW
    assertion: str = "vouched"
    authorizer: Authorizer = attrs.field(init=False)
    persisted: list[ServerRecord] = attrs.field(factory=list)
    deeds: list[FlowAction] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.authorizer = Authorizer(
            self.world.mcp.url, self.application, entropy=entropy, record=self.record, rules=self.rules
        )

    @property
    def pages(self) -> list[OpenBrowser]:
        return [each for each in self.deeds if isinstance(each, OpenBrowser)]

    def call(self, operation: str = "") -> int:
        """Make a request until it is answered; the status.  Raises what the authorization failed with."""
        errand = self.authorizer.authorized_request("POST", operation=operation)
        verdict = errand.go(self.now)
        while True:
            if isinstance(verdict, FlowFailed):
                raise verdict.error
            if isinstance(verdict, Authorized):
                answer = self.world.mcp.call(Headers(verdict.headers), operation)
                if answer.status == 200:
                    self.authorizer.replied(answer.headers)
                    return answer.status
                verdict = errand.refused(answer.status, answer.headers, self.now)
            else:
                assert isinstance(verdict, StartFlow), "nobody else is there to wait for"
                self.drive(verdict.flow)
                verdict = errand.go(self.now)

    def drive(self, flow: Flow) -> None:
        try:
            deeds = flow.start(self.now)
            while not flow.over:
                deeds = flow.receive(self.act(deeds), self.now)
            self._note(deeds)
        finally:
            flow.abandon()

    def act(self, deeds: tuple[FlowAction, ...]) -> FlowEvent:
        """Do them all; what came of the last."""
        self._note(deeds)
        match deeds[-1]:
            case SendRequest() as request:
                return self.world.send(request)
            case OpenReceiver():
                return ReceiverReady(CALLBACK)
            case OpenBrowser(url=url):
                return BrowserReturned(self.world.browse(url))
            case AskAssertion():
                return Asserted(self.assertion)
            case other:
                raise AssertionError(other)

    def _note(self, deeds: tuple[FlowAction, ...]) -> None:
        self.deeds += deeds
        self.persisted += [each.record for each in deeds if isinstance(each, Persist)]


def failed(visitor: Visitor, operation: str = "") -> AuthorizationFailed:
    """What a request fails with."""
    try:
        status = visitor.call(operation)
    except AuthorizationFailed as error:
        return error
    raise AssertionError(f"answered with {status}")


def again(visitor: Visitor, **changes: Any) -> Visitor:
    """The same application in a new process, which has what was persisted last."""
    return Visitor(visitor.world, visitor.application, visitor.persisted[-1], visitor.rules, **changes)
