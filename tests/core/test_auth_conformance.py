"""The conformance suite's scenarios of authorization, replayed in memory, and what each is judged by."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import pytest

from tests.core.auth_server import (
    CALLBACK,
    ISSUER,
    JWT_BEARER,
    MCP,
    NOW,
    AuthServer,
    McpServer,
    Visitor,
    World,
    key,
    reply,
    unsigned,
    world,
)
from tests.requirements import req
from trio_mcp.core.http import Headers
from trio_mcp.core.oauth import (
    Application,
    AuthorizationFailed,
    Blame,
    ClientAuthMethod,
    ClientCredentials,
    FlowEvent,
    IdentityAssertion,
    OAuthClient,
    SendRequest,
    WorkloadIdentity,
)

WELL_KNOWN = "/.well-known/oauth-protected-resource"
SERVER_KNOWN = "/.well-known/oauth-authorization-server"
OPENID = "/.well-known/openid-configuration"
ORIGIN = "https://mcp.example"


def only(things: list[Any]) -> Any:
    (thing,) = things
    return thing


def fails(visitor: Visitor, blame: Blame, operation: str = "") -> str:
    """What the one to blame is told."""
    with pytest.raises(AuthorizationFailed) as caught:
        visitor.call(operation)
    assert caught.value.blame is blame
    return str(caught.value)


# Where documents are found.

LOCATIONS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "metadata-default": ({}, [f"{WELL_KNOWN}/mcp"], [SERVER_KNOWN]),
    "metadata-var1": ({"mcp_named": None, "path": OPENID}, [f"{WELL_KNOWN}/mcp"], [SERVER_KNOWN, OPENID]),
    "metadata-var2": (
        {
            "mcp_named": None,
            "mcp_paths": (WELL_KNOWN,),
            "mcp_resource": ORIGIN,
            "issuer": f"{ISSUER}/tenant1",
            "iss": f"{ISSUER}/tenant1",
            "path": f"{SERVER_KNOWN}/tenant1",
        },
        [f"{WELL_KNOWN}/mcp", WELL_KNOWN],
        [f"{SERVER_KNOWN}/tenant1"],
    ),
    "metadata-var3": (
        {
            "mcp_named": f"{ORIGIN}/custom/metadata/location.json",
            "mcp_paths": ("/custom/metadata/location.json",),
            "issuer": f"{ISSUER}/tenant1",
            "iss": f"{ISSUER}/tenant1",
            "path": "/tenant1/.well-known/openid-configuration",
        },
        ["/custom/metadata/location.json"],
        [f"{SERVER_KNOWN}/tenant1", f"{OPENID}/tenant1", f"/tenant1{OPENID}"],
    ),
}


@req("auth-08", "auth-35", "auth-40", "auth-41", "auth-61", "auth-67", "auth-68", "auth-42", "auth-43", "auth-44")
@req(
    "auth-07",
    "auth-59",
    "auth-16",
    "auth-17",
    "auth-18",
    "auth-29",
    "auth-84",
    "auth-54",
    "auth-92",
    "auth-93",
    "auth-98",
)
@pytest.mark.parametrize("name", LOCATIONS)
def test_documents_are_asked_for_in_order_and_everything_else_follows(name: str) -> None:
    settings, of_resource, of_server = LOCATIONS[name]
    visitor = Visitor(world(**settings))
    mcp, server = visitor.world.mcp, visitor.world.servers[0]
    assert [visitor.call(), visitor.call()] == [200, 200]
    assert mcp.asked == of_resource
    assert [each["path"] for each in server.of("metadata")] == of_server
    assert only(server.of("register"))["application_type"] == "native"
    assert only(server.of("register"))["redirect_uris"] == [CALLBACK]
    page, redeemed = only(server.of("authorize")), only(server.of("token"))
    assert page["code_challenge_method"] == "S256"
    # Equal as a string to what the metadata says: no slash is added to a bare origin.
    assert page["resource"] == redeemed["resource"] == (mcp.resource or MCP)
    token = only([*server.tokens])
    assert [each.get("Authorization") for each in mcp.calls] == [None, *[f"Bearer {token}"] * 2]
    assert not [each for each in visitor.world.requests if token in each.url]


@req("auth-13", "auth-14", "auth-15")
@pytest.mark.parametrize("published", [True, False])
def test_a_server_of_2025_03_26_is_its_own_authorization_server(published: bool) -> None:
    path, methods = (SERVER_KNOWN, ("client_secret_post",)) if published else (None, ("none",))
    server = AuthServer(ORIGIN, path, "/oauth" if published else "", iss=None, methods=methods)
    visitor = Visitor(World(McpServer(server, paths=(), named=None), [server]))
    assert visitor.call() == 200
    assert visitor.world.mcp.asked == [f"{WELL_KNOWN}/mcp", WELL_KNOWN]
    assert [each["path"] for each in server.of("metadata")] == [SERVER_KNOWN]
    assert server.asked[0].headers["MCP-Protocol-Version"] == "2025-03-26"
    assert only(server.of("authorize"))["resource"] == only(server.of("token"))["resource"] == MCP
    assert "code_challenge" in only(server.of("authorize"))
    held = visitor.persisted[-1].authorization
    assert held is not None
    assert (held.issuer, held.token_endpoint) == (ORIGIN, f"{ORIGIN}{server.endpoints}/token")


# Who the client is.


@req("auth-58", "auth-69", "auth-71", "auth-77", "auth-98")
@pytest.mark.parametrize("supported", [True, False])
def test_the_document_of_the_client_is_its_id_where_the_server_reads_such(supported: bool) -> None:
    url = "https://conformance-test.local/client-metadata.json"
    visitor = Visitor(
        world(metadata={"client_id_metadata_document_supported": supported}), Application("Visitor", document_url=url)
    )
    server = visitor.world.servers[0]
    assert visitor.call() == 200
    assert (only(server.of("authorize"))["client_id"] == url) is supported
    assert len(server.of("register")) == (not supported)
    assert len(visitor.persisted[-1].registered) == (not supported)


PRE_REGISTERED = OAuthClient("pre-registered", ISSUER, "a:secret/%")


@req("auth-69", "auth-78", "auth-98")
def test_credentials_that_the_application_brings_come_first() -> None:
    document = "https://conformance-test.local/client-metadata.json"
    settings = {"registers": False, "methods": ("client_secret_basic",)}
    visitor = Visitor(
        world(**settings, metadata={"client_id_metadata_document_supported": True}),
        Application("Visitor", clients=(PRE_REGISTERED,), document_url=document),
    )
    server = visitor.world.servers[0]
    server.clients["pre-registered"] = {"client_secret": "a:secret/%"}
    assert visitor.call() == 200
    assert only(server.of("authorize"))["client_id"] == "pre-registered"
    assert visitor.persisted[-1].registered == ()
    assert server.asked[-1].headers["Authorization"].startswith("Basic ")


@req("auth-69", "auth-98")
def test_without_any_way_to_a_client_id_the_application_must_bring_one() -> None:
    visitor = Visitor(world(registers=False))
    assert "no client id" in fails(visitor, Blame.APPLICATION)
    assert {each.kind for each in visitor.world.servers[0].asked} == {"metadata"}


@pytest.mark.parametrize(
    ("method", "has_header", "fields"),
    [
        ("client_secret_basic", True, {"client_id"}),
        ("client_secret_post", False, {"client_id", "client_secret"}),
        ("none", False, {"client_id"}),
    ],
)
def test_the_method_of_the_token_endpoint_is_that_of_the_registration(
    method: str, has_header: bool, fields: set[str]
) -> None:
    visitor = Visitor(world(methods=(method,), gives_secret=method != "none"))
    server = visitor.world.servers[0]
    assert visitor.call() == 200
    assert only(server.of("register"))["token_endpoint_auth_method"] == method
    assert ("Authorization" in server.asked[-1].headers) is has_header
    assert {"client_id", "client_secret"} & only(server.of("token")).keys() == fields


@req("auth-90", "auth-95", "auth-96", "auth-48")
def test_when_the_server_moves_to_another_issuer_nothing_of_the_first_is_shown_to_it() -> None:
    first, second = AuthServer(), AuthServer("https://as2.example", iss="https://as2.example")
    visitor = Visitor(World(McpServer(first), [first, second]))
    assert visitor.call() == 200
    visitor.world.mcp.trusts = second
    seen = len(first.asked)
    assert visitor.call() == 200
    secrets = [*first.clients, *first.tokens, *first.refresh_tokens]
    assert len(second.of("register")) == 1
    assert not [secret for secret in secrets for each in second.asked if secret in f"{each.fields}"]
    # And the first one hears nothing any more: not even its refresh token is tried.
    assert len(first.asked) == seen
    # Should it move back, what was registered there is still good.
    visitor.world.mcp.trusts = first
    first.tokens.clear()
    assert visitor.call() == 200
    assert len(first.of("register")) == 1


# Scopes.


@req("auth-63", "auth-64", "auth-66")
@pytest.mark.parametrize(
    ("challenged", "supported", "asked"),
    [
        ("mcp:basic", ["mcp:read", "mcp:write"], "mcp:basic"),
        (None, ["mcp:basic", "mcp:read", "mcp:write"], "mcp:basic mcp:read mcp:write"),
        (None, None, None),
    ],
)
def test_the_scopes_are_those_of_the_challenge_else_all_that_are_supported(
    challenged: str | None, supported: list[str] | None, asked: str | None
) -> None:
    visitor = Visitor(world(mcp_scope=challenged, mcp_metadata={"scopes_supported": supported}))
    assert visitor.call() == 200
    server = visitor.world.servers[0]
    assert only(server.of("register")).get("scope") == only(server.of("authorize")).get("scope") == asked


@pytest.mark.parametrize(("wanted", "asked"), [(("mcp:mine",), "mcp:mine"), ((), None)])
def test_the_application_may_say_what_it_asks_for_where_the_challenge_does_not(
    wanted: tuple[str, ...], asked: str | None
) -> None:
    settings: dict[str, Any] = {"mcp_metadata": {"scopes_supported": ["mcp:read"]}}
    for challenged, expected in [(None, asked), ("mcp:basic", "mcp:basic")]:
        visitor = Visitor(world(mcp_scope=challenged, **settings), Application("V", scopes=wanted))
        assert visitor.call() == 200
        assert only(visitor.world.servers[0].of("authorize")).get("scope") == expected


@req("auth-82", "auth-83", "auth-99", "auth-112")
def test_a_request_that_needs_more_scopes_gets_them_and_keeps_the_old_ones() -> None:
    visitor = Visitor(world(mcp_scope="mcp:basic", mcp_needs={"tools/call": "mcp:write"}))
    assert [visitor.call("tools/list"), visitor.call("tools/call")] == [200, 200]
    asked = [each["scope"] for each in visitor.world.servers[0].of("authorize")]
    assert asked == ["mcp:basic", "mcp:basic mcp:write"]


@req("auth-83", "auth-113")
def test_a_scope_that_is_never_enough_is_given_up_soon() -> None:
    visitor = Visitor(world(mcp_needs={"tools/call": "mcp:admin"}, withholds=("mcp:admin",)))
    server = visitor.world.servers[0]
    visitor.call("tools/list")
    assert "mcp:admin" in fails(visitor, Blame.USER, "tools/call")
    assert "mcp:admin" in fails(visitor, Blame.USER, "tools/call")  # and nobody is asked again
    assert len(server.of("authorize")) == 2


@req("auth-108", "auth-107")
@pytest.mark.parametrize(
    ("supported", "offline", "asked"),
    [
        (["mcp:basic", "offline_access"], True, "mcp:basic offline_access"),
        (["mcp:basic", "offline_access"], False, "mcp:basic"),
        (["mcp:basic"], True, "mcp:basic"),
        (None, True, "mcp:basic"),
    ],
)
def test_offline_access_is_asked_for_where_the_server_lists_it_and_it_is_wanted(
    supported: list[str] | None, offline: bool, asked: str
) -> None:
    visitor = Visitor(
        world(mcp_scope="mcp:basic", metadata={"scopes_supported": supported}), Application("V", offline=offline)
    )
    server = visitor.world.servers[0]
    assert visitor.call() == 200
    assert only(server.of("authorize"))["scope"] == asked
    assert only(server.of("authorize")).get("prompt") == ("consent" if "offline" in asked else None)
    assert ("refresh_token" in only(server.of("register"))["grant_types"]) is offline


def test_offline_access_does_not_replace_the_scopes_that_a_server_gives_by_default() -> None:
    visitor = Visitor(world(metadata={"scopes_supported": ["offline_access"]}))
    assert visitor.call() == 200
    assert "scope" not in only(visitor.world.servers[0].of("authorize"))


# Whose answer it is.


def test_the_resource_of_the_metadata_is_the_server_or_nothing_is_asked() -> None:
    visitor = Visitor(world(mcp_resource="https://evil.example.com/mcp"))
    assert "https://evil.example.com/mcp" in fails(visitor, Blame.SERVER)
    assert visitor.world.mcp.asked == [f"{WELL_KNOWN}/mcp"]
    assert visitor.world.servers[0].asked == []


@req("auth-100", "auth-103", "auth-104")
@pytest.mark.parametrize(
    ("promised", "sent", "good"),
    [
        (True, ISSUER, True),
        (None, None, True),
        (None, ISSUER, True),
        (True, None, False),
        (True, "https://evil.example.com", False),
        (None, "https://evil.example.com", False),
        (True, f"{ISSUER}/", False),
        (True, "HTTPS://as.example", False),
        (True, "https://as.example:443", False),
    ],
)
def test_the_issuer_in_the_answer_is_compared_as_a_string(promised: bool | None, sent: str | None, good: bool) -> None:
    metadata = {"authorization_response_iss_parameter_supported": promised}
    visitor = Visitor(world(iss=sent, metadata=metadata))
    server = visitor.world.servers[0]
    if good:
        assert visitor.call() == 200
    else:
        assert ISSUER in fails(visitor, Blame.AUTHORIZATION_SERVER)
    assert len(server.of("authorize")) == 1
    assert len(server.of("token")) == good


@req("auth-105")
def test_an_error_of_somebody_else_is_not_shown() -> None:
    denies = {
        "error": "access_denied",
        "error_description": "call +1 555 0100",
        "error_uri": "https://evil.example/why",
    }
    visitor = Visitor(world(iss="https://evil.example.com", denies=denies))
    said = fails(visitor, Blame.AUTHORIZATION_SERVER)
    assert not [each for each in denies.values() if each in said]
    visitor = Visitor(world(denies=denies))
    assert "call +1 555 0100" in fails(visitor, Blame.USER)


@req("auth-91")
def test_metadata_of_another_issuer_is_not_used() -> None:
    visitor = Visitor(world(metadata={"issuer": "https://attacker.example.com"}))
    assert "https://attacker.example.com" in fails(visitor, Blame.AUTHORIZATION_SERVER)
    assert {each.kind for each in visitor.world.servers[0].asked} == {"metadata"}


@req("auth-85")
@pytest.mark.parametrize("listed", [None, [], ["plain"]])
def test_a_server_that_lists_no_s256_is_refused(listed: list[str] | None) -> None:
    visitor = Visitor(world(metadata={"code_challenge_methods_supported": listed}))
    assert "S256" in fails(visitor, Blame.AUTHORIZATION_SERVER)
    assert {each.kind for each in visitor.world.servers[0].asked} == {"metadata"}


# The extensions.


def machine(**settings: Any) -> World:
    return world(registers=False, refreshes=False, **settings)


@req("auth-73")
def test_client_credentials_by_a_key() -> None:
    client = OAuthClient("robot", method=ClientAuthMethod.KEY)
    visitor = Visitor(
        machine(grants=("client_credentials",), methods=("private_key_jwt",), mcp_scope="mcp:basic"),
        Application("Robot", grant=ClientCredentials(), clients=(client,), key=key(id="k1")),
    )
    server = visitor.world.servers[0]
    server.clients["robot"] = {}
    assert visitor.call() == 200
    token = only(server.of("token"))
    assert (token["grant_type"], token["resource"], token["scope"]) == ("client_credentials", MCP, "mcp:basic")
    assert token["client_assertion_type"] == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
    header, claims = unsigned(token["client_assertion"])
    assert header == {"typ": "JWT", "alg": "ES256", "kid": "k1"}
    assert (claims["iss"], claims["sub"], claims["aud"]) == ("robot", "robot", ISSUER)
    assert claims["iat"] == NOW
    assert claims["exp"] == NOW + 300
    assert visitor.pages == []


def test_client_credentials_by_a_secret() -> None:
    visitor = Visitor(
        machine(grants=("client_credentials",), methods=("client_secret_basic",)),
        Application("Robot", grant=ClientCredentials(), clients=(OAuthClient("robot", secret="beep"),)),
    )
    server = visitor.world.servers[0]
    server.clients["robot"] = {"client_secret": "beep"}
    assert visitor.call() == 200
    token = {"grant_type": "client_credentials", "client_id": "robot", "resource": MCP}
    assert only(server.of("token")) == token
    # Its token is renewed where the first one came from, and nothing is looked for again.
    asked, visitor.now = len(visitor.world.requests), NOW + 3600
    assert visitor.call() == 200
    assert [each.url for each in visitor.world.requests[asked:]] == [f"{ISSUER}/token"]


class Provider:
    """An enterprise's identity provider."""

    def __init__(self, world: World) -> None:
        self.asked: list[dict[str, str]] = []
        world.broken = self.answer
        self.status = 200
        self.said: dict[str, Any] = {
            "access_token": "the-id-jag",
            "issued_token_type": "urn:ietf:params:oauth:token-type:id-jag",
            "token_type": "N_A",
        }

    def answer(self, request: SendRequest) -> FlowEvent | None:
        if not request.url.startswith("https://idp.example/"):
            return None
        assert "DPoP" not in Headers(request.headers)
        self.asked.append(dict(parse_qsl(request.body.decode())))
        return reply(self.status, self.said)


EMPLOYEE = Application(
    "Employee",
    grant=IdentityAssertion("https://idp.example/token", OAuthClient("at-idp")),
    clients=(OAuthClient("employee", secret="s:c"),),
)


def enterprise() -> tuple[Visitor, Provider]:
    visitor = Visitor(machine(grants=(JWT_BEARER,), methods=("client_secret_basic",)), EMPLOYEE, assertion="id-token")
    visitor.world.servers[0].clients["employee"] = {"client_secret": "s:c"}
    return visitor, Provider(visitor.world)


def test_an_enterprise_vouches_for_its_user() -> None:
    visitor, provider = enterprise()
    server = visitor.world.servers[0]
    assert visitor.call() == 200
    assert only(provider.asked) == {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
        "subject_token": "id-token",
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "audience": ISSUER,
        "resource": MCP,
        "client_id": "at-idp",
    }
    token = {"grant_type": JWT_BEARER, "assertion": "the-id-jag", "client_id": "employee", "resource": MCP}
    assert only(server.of("token")) == token
    assert server.asked[-1].headers["Authorization"].startswith("Basic ")
    # A token that has ended is renewed by a new assertion, without discovery.
    asked, visitor.now = len(visitor.world.requests), NOW + 3600
    assert visitor.call() == 200
    urls = [each.url for each in visitor.world.requests[asked:]]
    assert urls == ["https://idp.example/token", f"{ISSUER}/token"]


@pytest.mark.parametrize(
    ("status", "said", "blame"),
    [
        (400, {"error": "invalid_scope", "error_description": "id-token is not good"}, Blame.IDENTITY_PROVIDER),
        (400, {"error": "invalid_grant"}, Blame.APPLICATION),
        (503, {"error": "server_error"}, Blame.IDENTITY_PROVIDER),
        (200, {"access_token": "x", "issued_token_type": "urn:ietf:params:oauth:token-type:jwt"}, None),
        (200, {}, None),
        (200, None, None),
    ],
)
def test_a_provider_that_does_not_vouch_is_to_blame(status: int, said: Any, blame: Blame | None) -> None:
    visitor, provider = enterprise()
    provider.status, provider.said = status, said
    assert "id-token" not in fails(visitor, blame or Blame.IDENTITY_PROVIDER).replace("an ID-JAG", "")
    assert visitor.world.servers[0].of("token") == []


def test_a_workload_presents_what_its_platform_gave_it_once() -> None:
    application = Application("Pod", grant=WorkloadIdentity(), clients=(OAuthClient("pod"),))
    visitor = Visitor(machine(grants=(JWT_BEARER,), methods=("none",)), application)
    server = visitor.world.servers[0]
    server.clients["pod"] = {}
    assert visitor.call() == 200
    expected = {"grant_type": JWT_BEARER, "assertion": "vouched", "resource": MCP, "client_id": "pod"}
    assert only(server.of("token")) == expected


def test_a_workload_that_is_refused_tries_nothing_else() -> None:
    application = Application("Pod", grant=WorkloadIdentity(), clients=(OAuthClient("stranger"),))
    visitor = Visitor(machine(grants=(JWT_BEARER,), methods=("none",)), application)
    assert "vouched" not in fails(visitor, Blame.APPLICATION)
    assert len(visitor.world.servers[0].of("token")) == 1


@pytest.mark.parametrize("nonces", [False, True])
def test_dpop_at_both_servers(nonces: bool) -> None:
    of_servers = {"nonce": "as-1", "mcp_nonce": "rs-1"} if nonces else {}
    visitor = Visitor(world(dpop=True, mcp_scheme="DPoP", **of_servers), Application("V", dpop=key()))
    mcp, server = visitor.world.mcp, visitor.world.servers[0]
    assert [visitor.call(), visitor.call()] == [200, 200]
    assert len(server.of("token")) == 1 + nonces
    header, claims = unsigned(server.asked[-1].headers["DPoP"])
    assert header["jwk"] == {"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}
    assert (claims["htu"], claims["iat"]) == (f"{ISSUER}/token", NOW)
    assert "ath" not in claims
    bound = [each["Authorization"].split()[0] for each in mcp.calls if "Authorization" in each]
    # The nonce came with the first refusal already, so nothing is sent twice.
    assert bound == ["DPoP", "DPoP"]
    if nonces:
        mcp.nonce = "rs-2"
        assert visitor.call() == 200
        assert len(server.of("token")) == 2
    assert len(mcp.jtis) == len([*mcp.calls]) - 1 - nonces
