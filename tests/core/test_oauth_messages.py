"""Reading and writing the messages of a flow: challenges, URLs, documents, registrations, proofs, records."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.auth_server import (
    CALLBACK,
    ISSUER,
    MCP,
    NOW,
    Driver,
    deployment,
    entropy,
    jwt_parts,
    key,
    reply,
    restarted,
)
from tests.requirements import req
from trio_mcp.core import UsageError
from trio_mcp.core.http import Headers
from trio_mcp.core.oauth import (
    Application,
    AuthChallenge,
    AuthorizationFailed,
    Blame,
    Challenge,
    ClientAuthMethod,
    FlowEvent,
    Key,
    Network,
    Nonces,
    OAuthClient,
    PendingAuthorization,
    SendRequest,
    ServerRecord,
    UrlRules,
    as_json,
    authenticated,
    authorization_url,
    censored,
    check_pkce,
    choose_method,
    client_document,
    client_id_fault,
    covers,
    default_server,
    dpop_proof,
    form,
    is_final,
    issuer_fault,
    network_at,
    new_authorization,
    read_auth_challenge,
    read_challenges,
    read_object,
    read_record,
    read_registration,
    read_resource,
    read_return,
    read_server,
    read_tokens,
    redirect_target,
    refused,
    registration,
    registration_refused,
    resource_metadata_urls,
    scopes_of,
    server_metadata_urls,
    union,
    url_fault,
)

STRICT, LOOSE = UrlRules(), UrlRules(loopback=True)
PENDING = PendingAuthorization(ISSUER, False, CALLBACK, "state", "verifier")
METADATA = {"issuer": ISSUER, "token_endpoint": f"{ISSUER}/token", "code_challenge_methods_supported": ["S256"]}
SERVER = read_server(METADATA, ISSUER, STRICT)


# Challenges.


@req("auth-40")
@pytest.mark.parametrize(
    ("value", "challenges"),
    [
        ("", []),
        ("Bearer", [("bearer", {})]),
        ('Bearer realm="a", error=invalid_token', [("bearer", {"realm": "a", "error": "invalid_token"})]),
        (
            'Basic realm="a, b", Bearer scope="x y",resource_metadata = "https://h/p?q=1"',
            [("basic", {"realm": "a, b"}), ("bearer", {"scope": "x y", "resource_metadata": "https://h/p?q=1"})],
        ),
        (r'BEARER Realm="say \"hi\" \\"', [("bearer", {"realm": 'say "hi" \\'})]),
        # Not in the grammar, but servers send it.
        ("Bearer resource_metadata=https://h/p?q=1", [("bearer", {"resource_metadata": "https://h/p?q=1"})]),
        ('Bearer realm="x" error="y"', [("bearer", {"realm": "x", "error": "y"})]),
        ("Bearer scope=a, scope=b", [("bearer", {"scope": "a"})]),
        ("realm=x, Bearer", [("bearer", {})]),
        ('Bearer realm="never closed', [("bearer", {"realm": ""}), ("never", {}), ("closed", {})]),
        ("Negotiate YWJj==, DPoP algs=ES256", [("negotiate", {"ywjj": "="}), ("dpop", {"algs": "ES256"})]),
        ("x" * 9000, [("x" * 8192, {})]),
    ],
)
def test_challenges_are_read_as_servers_write_them(value: str, challenges: list[tuple[str, dict[str, str]]]) -> None:
    assert read_challenges(value) == tuple(Challenge(*each) for each in challenges)


@given(st.text())
def test_any_text_can_be_read_as_a_challenge(value: str) -> None:
    read_auth_challenge(401, value)


@pytest.mark.parametrize(
    ("value", "demand"),
    [
        (None, AuthChallenge(401)),
        ("", AuthChallenge(401)),
        ("Basic realm=x", None),
        ("Basic, Bearer", AuthChallenge(401, ("Bearer",))),
        (
            'DPoP error="e", resource_metadata=r, Bearer scope="a b a"',
            AuthChallenge(401, ("DPoP", "Bearer"), "e", ("a", "b"), "r"),
        ),
        ("Bearer scope=a, DPoP scope=b", AuthChallenge(401, ("Bearer", "DPoP"), "", ("a",))),
    ],
)
def test_only_bearer_and_dpop_challenges_count(value: str | None, demand: AuthChallenge | None) -> None:
    assert read_auth_challenge(401, value) == demand


@req("auth-63")
@pytest.mark.parametrize(
    ("value", "scopes"),
    [
        (None, ()),
        (7, ()),
        ("", ()),
        ("a  b\ta", ("a", "b")),
        (["a b", "c", 3, 'q"', "\n", ""], ("c",)),
        ([f"s{number}" for number in range(300)], tuple(f"s{number}" for number in range(200))),
    ],
)
def test_reading_scopes(value: object, scopes: tuple[str, ...]) -> None:
    assert scopes_of(value) == scopes
    assert union(scopes, scopes, ("c",)) == tuple(dict.fromkeys([*scopes, "c"]))


# URLs.


@req("auth-24", "auth-53")
@pytest.mark.parametrize(
    ("url", "strict", "loose"),
    [
        ("https://h", None, None),
        ("https://h:8443/p?q", None, None),
        ("http://localhost:1/x", "is not https", None),
        ("http://127.0.0.1", "is not https", None),
        ("http://[::1]:3000/", "is not https", None),
        ("http://h/", "is not https", "is not https"),
        ("http://localhost.evil.example", "is not https", "is not https"),
        ("http://127.0.0.1@evil.example", "is not https", "is not https"),
        ("javascript:alert(1)", "is not an absolute URL", "is not an absolute URL"),
        ("file:///etc/passwd", "is not an absolute URL", "is not an absolute URL"),
        ("https:///x", "is not an absolute URL", "is not an absolute URL"),
        ("https://h:port/", "is not an absolute URL", "is not an absolute URL"),
        ("https://x[h/", "is not an absolute URL", "is not an absolute URL"),
        ("https://u:p@h/", "contains credentials", "contains credentials"),
        ("https://h/#", "has a fragment", "has a fragment"),
        ("https://h/ x", "is not a URL", "is not a URL"),
        ("https://h\\@evil.example", "is not a URL", "is not a URL"),
        ("https://h/\x00", "is not a URL", "is not a URL"),
        ("https://h/é", "is not a URL", "is not a URL"),
        ("", "is not a URL", "is not a URL"),
        (None, "is not a URL", "is not a URL"),
    ],
)
def test_urls_that_may_be_requested(url: object, strict: str | None, loose: str | None) -> None:
    assert (url_fault(url, STRICT), url_fault(url, LOOSE)) == (strict, loose)


@req("auth-71")
@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("https://app.example/client.json", None),
        ("https://app.example", "has no path"),
        ("https://app.example/", "has no path"),
        ("https://app.example/a/../b", "has a path with dots"),
        ("http://localhost/client.json", "is not https"),
    ],
)
def test_a_client_id_that_is_a_url(url: str, fault: str | None) -> None:
    assert client_id_fault(url) == fault
    if fault is not None:
        with pytest.raises(UsageError, match=fault):
            Application("V", document_url=url)


def test_an_issuer_has_no_query() -> None:
    assert issuer_fault("https://h/t?x=1", STRICT) == "has a query"
    assert issuer_fault("http://h", STRICT) == "is not https"


@req("auth-43", "auth-45", "auth-46")
@pytest.mark.parametrize(
    ("resource", "url", "is_it"),
    [
        ("https://h/mcp", "https://h/mcp", True),
        ("https://h", "https://h/mcp", True),
        ("https://h/", "https://h/mcp", True),
        ("https://h/a", "https://h/a/mcp", True),
        ("https://h/mcp/", "https://h/mcp", True),
        ("https://h/mcp", "https://h/mcp/", True),
        ("HTTPS://H/mcp", "https://h/mcp", True),
        ("https://h:443/mcp", "https://h/mcp", True),
        ("https://h/mcp", "https://h/mcp?key=1", True),
        ("https://h/mcp?key=1", "https://h/mcp?key=1", True),
        ("https://h/mcp?key=2", "https://h/mcp?key=1", False),
        ("https://h/mc", "https://h/mcp", False),
        ("https://h/mcp/x", "https://h/mcp", False),
        ("https://h/MCP", "https://h/mcp", False),
        ("http://h/mcp", "https://h/mcp", False),
        ("https://h:8443/mcp", "https://h/mcp", False),
        ("https://evil/mcp", "https://h/mcp", False),
        ("https://h/mcp#x", "https://h/mcp", False),
        ("h/mcp", "https://h/mcp", False),
        ("https://h:x/", "https://h/mcp", False),
    ],
)
def test_a_resource_covers_its_own_url_and_the_urls_below_it(resource: str, url: str, is_it: bool) -> None:
    assert covers(resource, url) is is_it


@req("auth-41")
@pytest.mark.parametrize(
    ("url", "named", "places"),
    [
        ("https://h/public/mcp", None, ["https://h/.well-known/x/public/mcp", "https://h/.well-known/x"]),
        ("https://h/mcp?k=1", None, ["https://h/.well-known/x/mcp?k=1", "https://h/.well-known/x"]),
        ("https://H:8443/", None, ["https://h:8443/.well-known/x"]),
        ("https://h", "https://other/y", ["https://other/y", "https://h/.well-known/x"]),
        ("https://h", "http://h/y", ["https://h/.well-known/x"]),
        ("https://h", "https://h/.well-known/oauth-protected-resource", ["https://h/.well-known/x"]),
    ],
)
def test_the_urls_of_resource_metadata(url: str, named: str | None, places: list[str]) -> None:
    found = resource_metadata_urls(url, named, STRICT)
    assert [each.replace("oauth-protected-resource", "x") for each in found] == places


@req("auth-67", "auth-68")
def test_the_urls_of_server_metadata() -> None:
    assert server_metadata_urls("https://h/t/1/") == (
        "https://h/.well-known/oauth-authorization-server/t/1",
        "https://h/.well-known/openid-configuration/t/1",
        "https://h/t/1/.well-known/openid-configuration",
    )
    assert server_metadata_urls("https://h/") == (
        "https://h/.well-known/oauth-authorization-server",
        "https://h/.well-known/openid-configuration",
    )


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b", "https://h/b"),
        ("b", "https://h/b"),
        ("https://h/b", "https://h/b"),
        ("https://H:443/b", "https://H:443/b"),
        ("https://evil/b", None),
        ("http://h/b", None),
        ("//evil/b", None),
        ("https://[", None),
        ("", "https://h/a"),
    ],
)
def test_a_redirect_must_stay_within_its_origin(location: str, target: str | None) -> None:
    assert redirect_target("https://h/a", location, STRICT) == target


# Documents.


@pytest.mark.parametrize("body", [b'{"a": NaN}', b'{"a": -Infinity}', b"[]", b"7", b"", b'{"a": 1}' + b" " * 100])
def test_a_body_that_is_not_a_json_object_is_not_read(body: bytes) -> None:
    assert read_object(body, 100) is None
    assert read_object(b'{"a": 1}' + b" " * 92, 100) == {"a": 1}


@given(st.binary(max_size=300))
def test_any_body_can_be_read(body: bytes) -> None:
    assert isinstance(read_object(body, 200), dict | None)


RESOURCE = {"resource": MCP, "authorization_servers": [ISSUER]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resource": None}, "names no resource"),
        ({"resource": 7}, "names no resource"),
        ({"resource": "https://evil.example/mcp"}, "not for the MCP server"),
        ({"resource": f"{MCP}\ud800"}, "not for the MCP server"),
        ({"authorization_servers": None}, "names none"),
        ({"authorization_servers": ISSUER}, "names none"),
        ({"authorization_servers": []}, "names none"),
        ({"authorization_servers": [7]}, "names none"),
        ({"authorization_servers": ["http://as.example"]}, "is not https"),
    ],
)
def test_required_members_of_resource_metadata(change: dict[str, Any], words: str) -> None:
    with pytest.raises(AuthorizationFailed, match=words) as caught:
        read_resource({**RESOURCE, **change}, MCP, STRICT)
    assert caught.value.blame is Blame.SERVER
    assert caught.value.advice


def test_optional_members_of_resource_metadata() -> None:
    assert read_resource(RESOURCE, MCP, STRICT).scopes is None
    assert read_resource({**RESOURCE, "scopes_supported": "a b"}, MCP, STRICT).scopes is None
    assert read_resource({**RESOURCE, "scopes_supported": []}, MCP, STRICT).scopes == ()
    many = [f"https://as{number}.example" for number in range(100)]
    assert len(read_resource({**RESOURCE, "authorization_servers": many}, MCP, STRICT).issuers) == 20


@req("auth-24", "auth-91")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"issuer": f"{ISSUER}/"}, "another issuer"),
        ({"issuer": None}, "another issuer"),
        ({"token_endpoint": None}, "no token endpoint"),
        ({"token_endpoint": "http://as.example/token"}, "is not https"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "is not an absolute URL"),
        ({"registration_endpoint": 7}, "is not a URL"),
    ],
)
def test_required_members_of_server_metadata(change: dict[str, Any], words: str) -> None:
    with pytest.raises(AuthorizationFailed, match=words) as caught:
        read_server({**METADATA, **change}, ISSUER, STRICT)
    assert caught.value.blame is Blame.AUTHORIZATION_SERVER


def test_absent_members_of_server_metadata_have_no_defaults() -> None:
    assert (SERVER.methods, SERVER.grants, SERVER.scopes, SERVER.dpop_algorithms) == (None, None, (), ())
    odd = {"token_endpoint_auth_methods_supported": "none", "grant_types_supported": ["a", 7]}
    server = read_server({**METADATA, **odd}, ISSUER, STRICT)
    assert (server.methods, server.grants) == (None, ("a",))


def test_an_issuer_of_2025_03_26_may_end_with_a_slash() -> None:
    server = read_server({**METADATA, "issuer": f"{ISSUER}/"}, ISSUER, STRICT, legacy=True)
    assert (server.issuer, server.stated_issuer) == (ISSUER, f"{ISSUER}/")
    for name in ("https://honest.example", f"{ISSUER}//", "HTTPS://as.example", None):
        with pytest.raises(AuthorizationFailed, match="another issuer"):
            read_server({**METADATA, "issuer": name}, ISSUER, STRICT, legacy=True)


@req("auth-85")
def test_absent_pkce_metadata_is_accepted_in_2025_03_26_only() -> None:
    check_pkce(default_server(MCP))
    check_pkce(SERVER)
    for server in (attrs.evolve(SERVER, challenges=None), attrs.evolve(default_server(MCP), challenges=("plain",))):
        with pytest.raises(AuthorizationFailed, match="S256"):
            check_pkce(server)


# Registrations and authentication.


@req("auth-72", "auth-70", "auth-26")
def test_the_document_of_a_client() -> None:
    url = "https://app.example/client.json"
    application = Application("V", uri="https://app.example", document_url=url)
    members = client_document(application, [CALLBACK])
    assert (members["client_id"], members["client_name"], members["redirect_uris"]) == (url, "V", [CALLBACK])
    assert (members["client_uri"], members["token_endpoint_auth_method"]) == ("https://app.example", "none")
    signed = client_document(application, [CALLBACK], "https://app.example/jwks.json")
    assert (signed["token_endpoint_auth_method"], signed["jwks_uri"]) == (
        "private_key_jwt",
        "https://app.example/jwks.json",
    )
    with pytest.raises(UsageError, match="document_url"):
        client_document(Application("V"), [CALLBACK])
    with pytest.raises(UsageError, match="https, or on loopback"):
        client_document(application, ["app://callback"])


@req("auth-92", "auth-93", "auth-107")
@pytest.mark.parametrize(
    ("uri", "grants", "kind", "grant_types"),
    [
        ("http://127.0.0.1:1/c", None, "native", ["authorization_code", "refresh_token"]),
        ("https://app.example/c", ("authorization_code",), "web", ["authorization_code"]),
    ],
)
def test_the_members_of_a_registration_request(uri: str, grants: Any, kind: str, grant_types: list[str]) -> None:
    members = registration(Application("V"), attrs.evolve(SERVER, grants=grants), uri, ())
    assert "scope" not in members
    assert (members["application_type"], members["grant_types"], members["redirect_uris"]) == (kind, grant_types, [uri])
    assert members["token_endpoint_auth_method"] == "none"
    odd = attrs.evolve(SERVER, methods=("tls_client_auth",))
    members = registration(Application("V"), odd, uri, ("a", "b"))
    assert (members["token_endpoint_auth_method"], members["scope"]) == ("none", "a b")


@pytest.mark.parametrize(
    ("members", "client"),
    [
        ({"client_id": "c"}, OAuthClient("c", ISSUER, redirect_uris=(CALLBACK,))),
        (
            {"client_id": "c", "client_secret": "", "client_secret_expires_at": 0, "token_endpoint_auth_method": "x"},
            OAuthClient("c", ISSUER, redirect_uris=(CALLBACK,)),
        ),
        (
            {"client_id": "c", "client_secret": "s", "client_secret_expires_at": 9, "redirect_uris": ["https://x/y"]},
            OAuthClient("c", ISSUER, "s", redirect_uris=(CALLBACK,), secret_expires_at=9.0),
        ),
        (
            {"client_id": "c", "token_endpoint_auth_method": "client_secret_post"},
            OAuthClient("c", ISSUER, None, ClientAuthMethod.POST, (CALLBACK,)),
        ),
        (
            {"client_id": "c", "client_secret_expires_at": 10**400},
            OAuthClient("c", ISSUER, redirect_uris=(CALLBACK,)),
        ),
        ({"client_id": 7}, None),
        ({"client_id": ""}, None),
        ({"client_id": "é"}, None),
        ({}, None),
    ],
)
def test_reading_a_registration_response(members: Any, client: OAuthClient | None) -> None:
    if client is None:
        with pytest.raises(AuthorizationFailed, match="no client id"):
            read_registration(members, ISSUER, CALLBACK)
    else:
        assert read_registration(members, ISSUER, CALLBACK) == client


@req("auth-94", "auth-116")
@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            {"error": "invalid_redirect_uri", "error_description": "no http"},
            "invalid_redirect_uri no http.*other|redirect URI",
        ),
        ({"error": "invalid_client_metadata"}, "invalid_client_metadata.*by hand"),
        ({}, "status 403.*by hand"),
    ],
)
def test_the_error_of_a_refused_registration_has_the_reason(members: Any, words: str) -> None:
    with pytest.raises(AuthorizationFailed, match=words):
        raise registration_refused(ISSUER, 403, members)


@req("auth-94")
def test_after_a_refused_registration_the_next_flow_succeeds() -> None:
    driver = Driver(deployment())

    def answer(request: SendRequest) -> FlowEvent | None:
        return reply(400, {"error": "invalid_redirect_uri"}) if request.url.endswith("/register") else None

    driver.deployment.override = answer
    with pytest.raises(AuthorizationFailed, match="redirect URI"):
        driver.call()
    driver.deployment.override = lambda request: None
    assert driver.call() == 200


KEY = key()


@pytest.mark.parametrize(
    ("client", "signs", "taken", "method"),
    [
        (OAuthClient("c"), False, None, ClientAuthMethod.NONE),
        (OAuthClient("c", secret="s"), False, None, ClientAuthMethod.BASIC),
        (OAuthClient("c", secret="s"), False, ("client_secret_post", "none"), ClientAuthMethod.POST),
        (OAuthClient("c", secret="s"), False, ("none",), ClientAuthMethod.NONE),
        (OAuthClient("c", secret="s"), True, ("private_key_jwt", "client_secret_basic"), ClientAuthMethod.KEY),
        (
            OAuthClient("c", secret="s", method=ClientAuthMethod.POST),
            False,
            ("client_secret_basic",),
            ClientAuthMethod.POST,
        ),
        (
            OAuthClient("c", method=ClientAuthMethod.BASIC),
            False,
            ("client_secret_basic", "none"),
            ClientAuthMethod.NONE,
        ),
        (OAuthClient("c", method=ClientAuthMethod.KEY), False, None, ClientAuthMethod.NONE),
        (OAuthClient("c"), False, ("client_secret_basic",), None),
        (OAuthClient("c", secret="s"), True, ("tls_client_auth",), None),
    ],
)
def test_the_method_is_one_that_both_sides_support(
    client: OAuthClient, signs: bool, taken: Any, method: ClientAuthMethod | None
) -> None:
    if method is None:
        with pytest.raises(AuthorizationFailed, match="authenticates clients by"):
            choose_method(client, KEY if signs else None, taken)
    else:
        assert choose_method(client, KEY if signs else None, taken) is method


def test_the_id_and_secret_of_basic_are_encoded_before_they_are_joined() -> None:
    client = OAuthClient("a:b", ISSUER, "c:d e/é", ClientAuthMethod.BASIC)
    headers, fields = authenticated(client, None, ISSUER, NOW, entropy)
    assert fields == {"client_id": "a:b"}  # servers of the official Python SDK do not find the client without it
    assert headers == (("Authorization", "Basic YSUzQWI6YyUzQWQrZSUyRiVDMyVBOQ=="),)


def test_authentication_by_a_key_without_a_key_is_an_error() -> None:
    with pytest.raises(AuthorizationFailed, match="has no key now"):
        authenticated(OAuthClient("c", ISSUER, method=ClientAuthMethod.KEY), None, ISSUER, NOW, entropy)


# Signatures.


def test_a_key_is_asymmetric_and_shows_its_public_half_only() -> None:
    with pytest.raises(UsageError, match="asymmetric"):
        Key("HS256", KEY.sign)
    with pytest.raises(UsageError, match="private"):
        Key("ES256", KEY.sign, {"kty": "EC", "d": "secret"})
    with pytest.raises(UsageError, match="public jwk"):
        Application("V", dpop=Key("ES256", KEY.sign))
    assert repr(KEY) == "Key(algorithm='ES256', id=None)"


def test_a_proof_is_for_one_request() -> None:
    proof = dpop_proof(KEY, "POST", "https://h/p?q=1#f", NOW + 0.9, entropy, nonce="n", token="t")
    header, claims = jwt_parts(proof)
    assert header == {"typ": "dpop+jwt", "alg": "ES256", "jwk": KEY.jwk}
    assert claims.pop("jti") != jwt_parts(dpop_proof(KEY, "POST", "https://h/", NOW, entropy))[1]["jti"]
    assert claims == {
        "htm": "POST",
        "htu": "https://h/p",
        "iat": NOW,
        "nonce": "n",
        "ath": "47mKTaMaEn1L3m5DAz9muidMqw636xxw7EFAK_YnPdg",
    }


def test_the_newest_nonce_of_each_origin_is_kept() -> None:
    nonces = Nonces()
    for number in range(20):
        assert nonces.note(f"https://h{number}/x", Headers({"DPoP-Nonce": f"n{number}"}))
    assert nonces.note("https://h19/y", Headers({"dpop-nonce": "newer"}))
    assert (nonces.of("https://h19/z"), nonces.of("https://h4/"), nonces.of("https://h3/")) == ("newer", "n4", None)
    assert not nonces.note("https://h19/", Headers({"DPoP-Nonce": "x" * 2000}))
    assert not nonces.note("https://h19/", Headers())


# The authorization request and its response.


@req("auth-29", "auth-42", "auth-55", "auth-84", "auth-100")
def test_the_authorization_url() -> None:
    server = attrs.evolve(SERVER, authorization_endpoint=f"{ISSUER}/authorize?tenant=1")
    asked = new_authorization(server, CALLBACK, entropy)
    other = new_authorization(server, CALLBACK, entropy)
    assert len({asked.state, asked.verifier, other.state, other.verifier}) == 4
    assert {len(asked.state), len(asked.verifier)} == {43}
    assert asked.issuer == ISSUER
    url = authorization_url(
        server, "c d", attrs.evolve(asked, verifier="dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"), ("a", "b"), MCP
    )
    members = dict(parse_qsl(urlsplit(url).query))
    # The verifier and its challenge are those of RFC 7636, appendix B.
    assert members == {
        "tenant": "1",
        "response_type": "code",
        "client_id": "c d",
        "redirect_uri": CALLBACK,
        "state": asked.state,
        "code_challenge": "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM",
        "code_challenge_method": "S256",
        "scope": "a b",
        "resource": MCP,
    }
    with pytest.raises(AuthorizationFailed, match="no authorization endpoint"):
        authorization_url(SERVER, "c", asked, (), None)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("code=c&state=state", "c"),
        ("?state=state&code=a%2Bb+c&extra=1", "a+b c"),
        ("state=state&code=c&iss=https%3A%2F%2Fas.example", "c"),
        ("code=c&state=other", None),
        ("code=c", None),
        ("", None),
    ],
)
def test_reading_the_code_of_a_callback(query: str, code: str | None) -> None:
    assert read_return(query, PENDING) == code


@pytest.mark.parametrize(
    ("query", "blame", "words"),
    [
        ("state=state", Blame.AUTHORIZATION_SERVER, "neither a code nor an error"),
        ("state=state&code=", Blame.AUTHORIZATION_SERVER, "neither a code nor an error"),
        ("state=state&error=access_denied", Blame.USER, "access_denied'; the user must allow it"),
        ("state=state&error=invalid_scope", Blame.AUTHORIZATION_SERVER, "must be known there"),
        ("state=state&error=server_error", Blame.AUTHORIZATION_SERVER, "try again later"),
        ("state=state&error=new_error&code=c", Blame.AUTHORIZATION_SERVER, "'new_error'; its operator can say why"),
        ("state=state&error=e&error_description=verifier", Blame.AUTHORIZATION_SERVER, "secret"),
        ("state=state&code=c&iss=https%3A%2F%2Fas.example&iss=https%3A%2F%2Fas.example", None, "came back with"),
    ],
)
def test_the_error_of_a_callback_without_a_code(query: str, blame: Blame | None, words: str) -> None:
    with pytest.raises(AuthorizationFailed, match=words) as caught:
        read_return(query, PENDING)
    assert caught.value.blame is (blame or Blame.AUTHORIZATION_SERVER)


@given(st.text())
def test_any_text_without_the_state_is_ignored_as_a_callback(query: str) -> None:
    assert read_return(query, PENDING) is None


# Tokens.


@pytest.mark.parametrize(
    ("change", "proven", "kind", "expires_at", "scopes"),
    [
        ({}, False, "Bearer", NOW + 60, ("asked",)),
        ({"token_type": "BEARER", "expires_in": "60", "scope": "a b"}, True, "Bearer", NOW + 60, ("a", "b")),
        ({"token_type": "dpop", "scope": ""}, True, "DPoP", NOW + 60, ()),
        ({"expires_in": None}, False, "Bearer", None, ("asked",)),
        ({"expires_in": -1}, False, "Bearer", None, ("asked",)),
        ({"expires_in": True}, False, "Bearer", None, ("asked",)),
        ({"expires_in": "soon"}, False, "Bearer", None, ("asked",)),
        ({"expires_in": 10**400}, False, "Bearer", None, ("asked",)),
        ({"expires_in": 0.5}, False, "Bearer", NOW + 0.5, ("asked",)),
        ({"refresh_token": 7}, False, "Bearer", NOW + 60, ("asked",)),
    ],
)
def test_reading_tokens(change: dict[str, Any], proven: bool, kind: str, expires_at: float | None, scopes: Any) -> None:
    members = {"access_token": "t", "token_type": "bearer", "expires_in": 60, **change}
    tokens = read_tokens(members, ISSUER, ("asked",), NOW, proven=proven)
    assert (tokens.access, tokens.kind, tokens.expires_at, tokens.scopes) == ("t", kind, expires_at, scopes)
    assert tokens.refresh is None


@pytest.mark.parametrize(
    "change",
    [
        {"access_token": None},
        {"access_token": ""},
        {"access_token": "two words"},
        {"access_token": "line\r\nX-Other: 1"},
        {"access_token": "x" * 40_000},
        {"token_type": None},
        {"token_type": "mac"},
        {"token_type": "DPoP"},
    ],
)
def test_tokens_that_cannot_be_used(change: dict[str, Any]) -> None:
    with pytest.raises(AuthorizationFailed) as caught:
        read_tokens({"access_token": "abcdef", "token_type": "Bearer", **change}, ISSUER, (), NOW, proven=False)
    assert caught.value.blame is Blame.AUTHORIZATION_SERVER
    assert "abcdef" not in str(caught.value)


def test_an_error_with_status_200_is_a_refusal() -> None:
    driver = Driver(deployment())

    def answer(request: SendRequest) -> FlowEvent | None:
        members = {"error": "bad_verification_code", "error_description": "The code has expired."}
        return reply(200, members) if request.url.endswith("/token") else None

    driver.deployment.override = answer
    with pytest.raises(AuthorizationFailed, match="The code has expired"):
        driver.call()


def test_a_token_that_lives_for_seconds_is_used_before_it_is_renewed() -> None:
    driver = Driver(deployment(expires_in=5))
    assert driver.call() == 200
    assert len(driver.deployment.servers[0].of("token")) == 1
    assert driver.call() == 200
    assert len(driver.deployment.servers[0].of("token")) == 2


def test_a_form_omits_absent_fields() -> None:
    assert parse_qs(form({"a": "1 2", "b": None, "c": "é"}).decode()) == {"a": ["1 2"], "c": ["é"]}


def test_error_texts_of_a_server_are_cut_and_censored() -> None:
    assert censored("token hunter2\nis bad", ("hunter2", None, "is")) == r"'token [secret]\nis bad'"
    assert len(censored("x" * 1000, ())) == 200
    assert censored({"a": "hunter2"}, ("hunter2",)) == "\"{'a': '[secret]'}\""


# Networks.


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("93.184.216.34", Network.PUBLIC), ("2606:2800:220:1::1", Network.PUBLIC),
        ("2002:5db8:d822::1", Network.PUBLIC), ("::ffff:93.184.216.34", Network.PUBLIC),
        ("64:ff9b::5db8:d822", Network.PUBLIC),
        ("127.0.0.1", Network.LOOPBACK), ("127.255.0.1", Network.LOOPBACK), ("0.0.0.0", Network.LOOPBACK),
        ("::1", Network.LOOPBACK), ("::", Network.LOOPBACK), ("::ffff:127.0.0.1", Network.LOOPBACK),
        ("64:ff9b::7f00:1", Network.LOOPBACK), ("2002:7f00:1::", Network.LOOPBACK),
        ("169.254.169.254", Network.LINK_LOCAL), ("fe80::1", Network.LINK_LOCAL), ("fe80::1%eth0", Network.LINK_LOCAL),
        ("::ffff:169.254.169.254", Network.LINK_LOCAL),
        ("10.0.0.1", Network.PRIVATE), ("172.16.0.1", Network.PRIVATE), ("192.168.0.1", Network.PRIVATE),
        ("100.64.0.1", Network.PRIVATE), ("0.0.0.1", Network.PRIVATE), ("224.0.0.1", Network.PRIVATE),
        ("240.0.0.1", Network.PRIVATE), ("255.255.255.255", Network.PRIVATE), ("fd00::1", Network.PRIVATE),
        ("fec0::1", Network.PRIVATE), ("ff02::1", Network.PRIVATE), ("::10.0.0.1", Network.PRIVATE),
        ("64:ff9b:1::1", Network.PRIVATE), ("2001:0:1::1", Network.PRIVATE), ("::ffff:10.0.0.1", Network.PRIVATE),
    ],
)  # fmt: skip
def test_an_address_is_in_one_network(address: str, network: Network) -> None:
    assert network_at(address) is network


# Records and errors.


@req("auth-95")
def test_a_record_is_the_same_after_it_is_written_and_read() -> None:
    driver = Driver(deployment(methods=("client_secret_basic",)))
    driver.call()
    for each in (ServerRecord(MCP), ServerRecord(MCP, network=Network.LINK_LOCAL), *driver.persisted):
        assert read_record(json.loads(json.dumps(as_json(each)))) == each
    assert ServerRecord(MCP).without_refresh() == ServerRecord(MCP)
    assert restarted(driver).call() == 200
    record = ServerRecord(MCP)
    for number in range(20):
        record = record.with_client(OAuthClient("c", f"https://as{number}.example"))
    assert [each.issuer for each in record.registered][::7] == ["https://as19.example", "https://as12.example"]


def damaged_records() -> list[Any]:
    driver = Driver(deployment())
    driver.call()
    good = as_json(attrs.evolve(driver.persisted[-1], network=Network.PRIVATE))
    found: list[Any] = [None, [], "x", {}]

    def spoil(at: Any, path: tuple[Any, ...]) -> None:
        for name in [*at] if isinstance(at, dict) else range(len(at)):
            values: list[Any] = [7.5, "x", [], {}, True]
            for value in values:
                copy = json.loads(json.dumps(good))
                spot = copy
                for step in path:
                    spot = spot[step]
                spot[name] = value
                found.append(copy)
            if isinstance(at[name], dict | list):
                spoil(at[name], (*path, name))

    spoil(good, ())
    return found


def test_a_damaged_record_is_read_or_refused_without_a_value_in_the_error() -> None:
    refused = []
    for members in damaged_records():
        try:
            assert isinstance(read_record(members), ServerRecord)
        except UsageError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert {each for each in refused if "cannot be read" not in each or "example" in each} == set()
    names = ("form", "registered", "network", "authorization", "tokens", "client", "redirect_uris", "method")
    for name in (*names, "expires_at"):
        assert [each for each in refused if f"'{name}'" in each]


def test_temporary_failures_are_not_final() -> None:
    passing = {blame for blame in Blame if AuthorizationFailed(blame, "why", "advice").passes}
    assert passing == {Blame.NETWORK, Blame.AUTHORIZATION_SERVER, Blame.IDENTITY_PROVIDER}
    assert {blame for blame in Blame if is_final(AuthorizationFailed(blame, "why", "advice"))} == set(Blame) - passing
    assert not is_final(UsageError("of another kind"))


def test_only_strings_of_a_refusal_are_repeated() -> None:
    """Other values could be nested so deeply that they cannot be shown."""
    body: Any = {"error": [[["x"]]], "error_description": {"y": "z"}}
    assert str(refused(ISSUER, body, 400, ())) == f"'{ISSUER}' issued no token: 'status 400'; its operator can say why"
    assert "status 400" in str(registration_refused(ISSUER, 400, body))
