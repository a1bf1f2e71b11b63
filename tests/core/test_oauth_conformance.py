"""The authorization scenarios of the conformance suite, in memory, with the checks of the suite."""

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
    Deployment,
    Driver,
    McpServer,
    deployment,
    jwt_parts,
    key,
    reply,
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


def only(items: list[Any]) -> Any:
    (item,) = items
    return item


def error_text(driver: Driver, blame: Blame, operation: str = "") -> str:
    """Make a request that must fail with this blame, and return the text of the error."""
    with pytest.raises(AuthorizationFailed) as caught:
        driver.call(operation)
    assert caught.value.blame is blame
    return str(caught.value)


# The URLs of the metadata documents.

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
def test_metadata_is_requested_in_order_and_a_token_is_obtained(name: str) -> None:
    settings, of_resource, of_server = LOCATIONS[name]
    driver = Driver(deployment(**settings))
    mcp, server = driver.deployment.mcp, driver.deployment.servers[0]
    assert [driver.call(), driver.call()] == [200, 200]
    assert mcp.asked == of_resource
    assert [each["path"] for each in server.of("metadata")] == of_server
    assert only(server.of("register"))["application_type"] == "native"
    assert only(server.of("register"))["redirect_uris"] == [CALLBACK]
    page, redeemed = only(server.of("authorize")), only(server.of("token"))
    assert page["code_challenge_method"] == "S256"
    # The same string as in the metadata: no slash is added to an origin without a path.
    assert page["resource"] == redeemed["resource"] == (mcp.resource or MCP)
    token = only([*server.tokens])
    assert [each.get("Authorization") for each in mcp.calls] == [None, *[f"Bearer {token}"] * 2]
    assert not [each for each in driver.deployment.requests if token in each.url]


@req("auth-13", "auth-14", "auth-15")
@pytest.mark.parametrize("published", [True, False])
def test_a_server_of_2025_03_26_is_its_own_authorization_server(published: bool) -> None:
    path, methods = (SERVER_KNOWN, ("client_secret_post",)) if published else (None, ("none",))
    server = AuthServer(ORIGIN, path, "/oauth" if published else "", iss=None, methods=methods)
    driver = Driver(Deployment(McpServer(server, paths=(), named=None), [server]))
    assert driver.call() == 200
    assert driver.deployment.mcp.asked == [f"{WELL_KNOWN}/mcp", WELL_KNOWN]
    assert [each["path"] for each in server.of("metadata")] == [SERVER_KNOWN]
    assert server.asked[0].headers["MCP-Protocol-Version"] == "2025-03-26"
    assert only(server.of("authorize"))["resource"] == only(server.of("token"))["resource"] == MCP
    assert "code_challenge" in only(server.of("authorize"))
    held = driver.persisted[-1].authorization
    assert held is not None
    assert (held.issuer, held.token_endpoint) == (ORIGIN, f"{ORIGIN}{server.endpoints}/token")


# The client id and the client's credentials.


@req("auth-58", "auth-69", "auth-71", "auth-77", "auth-98")
@pytest.mark.parametrize("supported", [True, False])
def test_the_document_url_is_the_client_id_if_the_server_supports_it(supported: bool) -> None:
    url = "https://conformance-test.local/client-metadata.json"
    driver = Driver(
        deployment(metadata={"client_id_metadata_document_supported": supported}),
        Application("Visitor", document_url=url),
    )
    server = driver.deployment.servers[0]
    assert driver.call() == 200
    assert (only(server.of("authorize"))["client_id"] == url) is supported
    assert len(server.of("register")) == (not supported)
    assert len(driver.persisted[-1].registered) == (not supported)


PRE_REGISTERED = OAuthClient("pre-registered", ISSUER, "a:secret/%")


@req("auth-69", "auth-78", "auth-98")
def test_pre_registered_credentials_come_first() -> None:
    document = "https://conformance-test.local/client-metadata.json"
    settings = {"registers": False, "methods": ("client_secret_basic",)}
    driver = Driver(
        deployment(**settings, metadata={"client_id_metadata_document_supported": True}),
        Application("Visitor", clients=(PRE_REGISTERED,), document_url=document),
    )
    server = driver.deployment.servers[0]
    server.clients["pre-registered"] = {"client_secret": "a:secret/%"}
    assert driver.call() == 200
    assert only(server.of("authorize"))["client_id"] == "pre-registered"
    assert driver.persisted[-1].registered == ()
    assert server.asked[-1].headers["Authorization"].startswith("Basic ")


@req("auth-69", "auth-98")
def test_without_registration_the_application_must_supply_a_client_id() -> None:
    driver = Driver(deployment(registers=False))
    assert "no client id" in error_text(driver, Blame.APPLICATION)
    assert {each.kind for each in driver.deployment.servers[0].asked} == {"metadata"}


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
    driver = Driver(deployment(methods=(method,), gives_secret=method != "none"))
    server = driver.deployment.servers[0]
    assert driver.call() == 200
    assert only(server.of("register"))["token_endpoint_auth_method"] == method
    assert ("Authorization" in server.asked[-1].headers) is has_header
    assert {"client_id", "client_secret"} & only(server.of("token")).keys() == fields


@req("auth-90", "auth-95", "auth-96", "auth-48")
def test_a_new_issuer_gets_no_credentials_of_the_old_one() -> None:
    first, second = AuthServer(), AuthServer("https://as2.example", iss="https://as2.example")
    driver = Driver(Deployment(McpServer(first), [first, second]))
    assert driver.call() == 200
    driver.deployment.mcp.trusts = second
    seen = len(first.asked)
    assert driver.call() == 200
    secrets = [*first.clients, *first.tokens, *first.refresh_tokens]
    assert len(second.of("register")) == 1
    assert not [secret for secret in secrets for each in second.asked if secret in f"{each.fields}"]
    # The first issuer gets no request any more, not even for its refresh token.
    assert len(first.asked) == seen
    # When the server returns to the first issuer, the registration there is still used.
    driver.deployment.mcp.trusts = first
    first.tokens.clear()
    assert driver.call() == 200
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
def test_scopes_come_from_the_challenge_or_from_scopes_supported(
    challenged: str | None, supported: list[str] | None, asked: str | None
) -> None:
    driver = Driver(deployment(mcp_scope=challenged, mcp_metadata={"scopes_supported": supported}))
    assert driver.call() == 200
    server = driver.deployment.servers[0]
    assert only(server.of("register")).get("scope") == only(server.of("authorize")).get("scope") == asked


@pytest.mark.parametrize(("wanted", "asked"), [(("mcp:mine",), "mcp:mine"), ((), None)])
def test_scopes_of_the_application_apply_if_the_challenge_has_no_scopes(
    wanted: tuple[str, ...], asked: str | None
) -> None:
    settings: dict[str, Any] = {"mcp_metadata": {"scopes_supported": ["mcp:read"]}}
    for challenged, expected in [(None, asked), ("mcp:basic", "mcp:basic")]:
        driver = Driver(deployment(mcp_scope=challenged, **settings), Application("V", scopes=wanted))
        assert driver.call() == 200
        assert only(driver.deployment.servers[0].of("authorize")).get("scope") == expected


@req("auth-82", "auth-83", "auth-99", "auth-112")
def test_a_request_that_needs_more_scopes_gets_them_and_keeps_the_old_ones() -> None:
    driver = Driver(deployment(mcp_scope="mcp:basic", mcp_needs={"tools/call": "mcp:write"}))
    assert [driver.call("tools/list"), driver.call("tools/call")] == [200, 200]
    asked = [each["scope"] for each in driver.deployment.servers[0].of("authorize")]
    assert asked == ["mcp:basic", "mcp:basic mcp:write"]


@req("auth-83", "auth-113")
def test_a_scope_that_is_never_granted_is_requested_once() -> None:
    driver = Driver(deployment(mcp_needs={"tools/call": "mcp:admin"}, withholds=("mcp:admin",)))
    server = driver.deployment.servers[0]
    driver.call("tools/list")
    assert "mcp:admin" in error_text(driver, Blame.USER, "tools/call")
    assert "mcp:admin" in error_text(driver, Blame.USER, "tools/call")  # the user is not asked again
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
def test_offline_access_is_requested_if_supported_and_wanted(
    supported: list[str] | None, offline: bool, asked: str
) -> None:
    driver = Driver(
        deployment(mcp_scope="mcp:basic", metadata={"scopes_supported": supported}), Application("V", offline=offline)
    )
    server = driver.deployment.servers[0]
    assert driver.call() == 200
    assert only(server.of("authorize"))["scope"] == asked
    assert only(server.of("authorize")).get("prompt") == ("consent" if "offline" in asked else None)
    assert ("refresh_token" in only(server.of("register"))["grant_types"]) is offline


def test_offline_access_does_not_replace_the_default_scopes() -> None:
    driver = Driver(deployment(metadata={"scopes_supported": ["offline_access"]}))
    assert driver.call() == 200
    assert "scope" not in only(driver.deployment.servers[0].of("authorize"))


# The issuer and the resource of a document or a response.


def test_metadata_for_another_resource_is_refused() -> None:
    driver = Driver(deployment(mcp_resource="https://evil.example.com/mcp"))
    assert "https://evil.example.com/mcp" in error_text(driver, Blame.SERVER)
    assert driver.deployment.mcp.asked == [f"{WELL_KNOWN}/mcp"]
    assert driver.deployment.servers[0].asked == []


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
def test_iss_in_the_authorization_response_is_compared_as_a_string(
    promised: bool | None, sent: str | None, good: bool
) -> None:
    metadata = {"authorization_response_iss_parameter_supported": promised}
    driver = Driver(deployment(iss=sent, metadata=metadata))
    server = driver.deployment.servers[0]
    if good:
        assert driver.call() == 200
    else:
        assert ISSUER in error_text(driver, Blame.AUTHORIZATION_SERVER)
    assert len(server.of("authorize")) == 1
    assert len(server.of("token")) == good


@req("auth-105")
def test_error_details_of_another_issuer_are_not_shown() -> None:
    denies = {
        "error": "access_denied",
        "error_description": "call +1 555 0100",
        "error_uri": "https://evil.example/why",
    }
    driver = Driver(deployment(iss="https://evil.example.com", denies=denies))
    error = error_text(driver, Blame.AUTHORIZATION_SERVER)
    assert not [each for each in denies.values() if each in error]
    driver = Driver(deployment(denies=denies))
    assert "call +1 555 0100" in error_text(driver, Blame.USER)


@req("auth-91")
def test_metadata_of_another_issuer_is_not_used() -> None:
    driver = Driver(deployment(metadata={"issuer": "https://attacker.example.com"}))
    assert "https://attacker.example.com" in error_text(driver, Blame.AUTHORIZATION_SERVER)
    assert {each.kind for each in driver.deployment.servers[0].asked} == {"metadata"}


@req("auth-85")
@pytest.mark.parametrize("listed", [None, [], ["plain"]])
def test_a_server_that_does_not_list_s256_is_refused(listed: list[str] | None) -> None:
    driver = Driver(deployment(metadata={"code_challenge_methods_supported": listed}))
    assert "S256" in error_text(driver, Blame.AUTHORIZATION_SERVER)
    assert {each.kind for each in driver.deployment.servers[0].asked} == {"metadata"}


# The extensions.


def without_registration(**settings: Any) -> Deployment:
    return deployment(registers=False, refreshes=False, **settings)


@req("auth-73")
def test_client_credentials_by_a_key() -> None:
    client = OAuthClient("robot", method=ClientAuthMethod.KEY)
    driver = Driver(
        without_registration(grants=("client_credentials",), methods=("private_key_jwt",), mcp_scope="mcp:basic"),
        Application("Robot", grant=ClientCredentials(), clients=(client,), key=key(id="k1")),
    )
    server = driver.deployment.servers[0]
    server.clients["robot"] = {}
    assert driver.call() == 200
    token = only(server.of("token"))
    assert (token["grant_type"], token["resource"], token["scope"]) == ("client_credentials", MCP, "mcp:basic")
    assert token["client_assertion_type"] == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
    header, claims = jwt_parts(token["client_assertion"])
    assert header == {"typ": "JWT", "alg": "ES256", "kid": "k1"}
    assert (claims["iss"], claims["sub"], claims["aud"]) == ("robot", "robot", ISSUER)
    assert claims["iat"] == NOW
    assert claims["exp"] == NOW + 300
    assert driver.pages == []


def test_client_credentials_by_a_secret() -> None:
    driver = Driver(
        without_registration(grants=("client_credentials",), methods=("client_secret_basic",)),
        Application("Robot", grant=ClientCredentials(), clients=(OAuthClient("robot", secret="beep"),)),
    )
    server = driver.deployment.servers[0]
    server.clients["robot"] = {"client_secret": "beep"}
    assert driver.call() == 200
    token = {"grant_type": "client_credentials", "client_id": "robot", "resource": MCP}
    assert only(server.of("token")) == token
    # A renewal goes to the token endpoint of the first token, without discovery.
    asked, driver.now = len(driver.deployment.requests), NOW + 3600
    assert driver.call() == 200
    assert [each.url for each in driver.deployment.requests[asked:]] == [f"{ISSUER}/token"]


class IdentityProvider:
    """The identity provider of an enterprise."""

    def __init__(self, deployment: Deployment) -> None:
        self.asked: list[dict[str, str]] = []
        deployment.override = self.answer
        self.status = 200
        self.response: dict[str, Any] = {
            "access_token": "the-id-jag",
            "issued_token_type": "urn:ietf:params:oauth:token-type:id-jag",
            "token_type": "N_A",
        }

    def answer(self, request: SendRequest) -> FlowEvent | None:
        if not request.url.startswith("https://idp.example/"):
            return None
        assert "DPoP" not in Headers(request.headers)
        self.asked.append(dict(parse_qsl(request.body.decode())))
        return reply(self.status, self.response)


EMPLOYEE = Application(
    "Employee",
    grant=IdentityAssertion("https://idp.example/token", OAuthClient("at-idp")),
    clients=(OAuthClient("employee", secret="s:c"),),
)


def enterprise() -> tuple[Driver, IdentityProvider]:
    driver = Driver(
        without_registration(grants=(JWT_BEARER,), methods=("client_secret_basic",)), EMPLOYEE, assertion="id-token"
    )
    driver.deployment.servers[0].clients["employee"] = {"client_secret": "s:c"}
    return driver, IdentityProvider(driver.deployment)


def test_an_identity_assertion_is_exchanged_for_a_token() -> None:
    driver, provider = enterprise()
    server = driver.deployment.servers[0]
    assert driver.call() == 200
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
    # An expired token is renewed with a new assertion, without discovery.
    asked, driver.now = len(driver.deployment.requests), NOW + 3600
    assert driver.call() == 200
    urls = [each.url for each in driver.deployment.requests[asked:]]
    assert urls == ["https://idp.example/token", f"{ISSUER}/token"]


@pytest.mark.parametrize(
    ("status", "response", "blame"),
    [
        (400, {"error": "invalid_scope", "error_description": "id-token is not good"}, Blame.IDENTITY_PROVIDER),
        (400, {"error": "invalid_grant"}, Blame.APPLICATION),
        (503, {"error": "server_error"}, Blame.IDENTITY_PROVIDER),
        (200, {"access_token": "x", "issued_token_type": "urn:ietf:params:oauth:token-type:jwt"}, None),
        (200, {}, None),
        (200, None, None),
    ],
)
def test_a_provider_that_issues_no_assertion_is_blamed(status: int, response: Any, blame: Blame | None) -> None:
    driver, provider = enterprise()
    provider.status, provider.response = status, response
    assert "id-token" not in error_text(driver, blame or Blame.IDENTITY_PROVIDER).replace("an ID-JAG", "")
    assert driver.deployment.servers[0].of("token") == []


def test_a_workload_presents_its_assertion() -> None:
    application = Application("Pod", grant=WorkloadIdentity(), clients=(OAuthClient("pod"),))
    driver = Driver(without_registration(grants=(JWT_BEARER,), methods=("none",)), application)
    server = driver.deployment.servers[0]
    server.clients["pod"] = {}
    assert driver.call() == 200
    expected = {"grant_type": JWT_BEARER, "assertion": "vouched", "resource": MCP, "client_id": "pod"}
    assert only(server.of("token")) == expected


def test_a_refused_workload_makes_no_second_attempt() -> None:
    application = Application("Pod", grant=WorkloadIdentity(), clients=(OAuthClient("stranger"),))
    driver = Driver(without_registration(grants=(JWT_BEARER,), methods=("none",)), application)
    assert "vouched" not in error_text(driver, Blame.APPLICATION)
    assert len(driver.deployment.servers[0].of("token")) == 1


@pytest.mark.parametrize("nonces", [False, True])
def test_dpop_at_both_servers(nonces: bool) -> None:
    of_servers = {"nonce": "as-1", "mcp_nonce": "rs-1"} if nonces else {}
    driver = Driver(deployment(dpop=True, mcp_scheme="DPoP", **of_servers), Application("V", dpop=key()))
    mcp, server = driver.deployment.mcp, driver.deployment.servers[0]
    assert [driver.call(), driver.call()] == [200, 200]
    assert len(server.of("token")) == 1 + nonces
    header, claims = jwt_parts(server.asked[-1].headers["DPoP"])
    assert header["jwk"] == {"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}
    assert (claims["htu"], claims["iat"]) == (f"{ISSUER}/token", NOW)
    assert "ath" not in claims
    bound = [each["Authorization"].split()[0] for each in mcp.calls if "Authorization" in each]
    # The first refusal already has the nonce, so no request is sent twice.
    assert bound == ["DPoP", "DPoP"]
    if nonces:
        mcp.nonce = "rs-2"
        assert driver.call() == 200
        assert len(server.of("token")) == 2
    assert len(mcp.jtis) == len([*mcp.calls]) - 1 - nonces
