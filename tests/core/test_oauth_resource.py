"""A protected server: its settings, its metadata, its challenges, and the claims of a token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.requirements import req
from trio_mcp.core import Principal, UsageError
from trio_mcp.core.http import HttpRequest, Reply
from trio_mcp.core.oauth import (
    WELL_KNOWN,
    AuthChallenge,
    Protection,
    ResourceServer,
    UrlRules,
    canonical,
    claims_fault,
    read_auth_challenge,
    read_resource,
    scopes_in,
)

RESOURCE = "https://mcp.example.com/mcp"
ISSUER = "https://auth.example.com"
METADATA = "https://mcp.example.com/.well-known/oauth-protected-resource/mcp"


def verify(token: str) -> Principal | None:
    raise AssertionError("these tests verify no token")


def protection(**how: Any) -> Protection:
    return Protection(**{"verify": verify, "authorization_servers": [ISSUER], "resource": RESOURCE, **how})


def server(*, path: str = "/mcp", public_url: str | None = None, **how: Any) -> ResourceServer:
    return ResourceServer(protection(**how), path=path, public_url=public_url)


def get(target: str, method: str = "GET", **headers: str) -> HttpRequest:
    return HttpRequest(method, target, headers)


def challenge(reply: Reply | str) -> str:
    assert isinstance(reply, Reply)
    return dict(reply.headers)["WWW-Authenticate"]


# Settings.


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"verify": "token"}, "verify must be a function"),
        ({"authorization_servers": []}, "at least one"),
        ({"authorization_servers": ISSUER}, "at least one"),
        ({"authorization_servers": 7}, "at least one"),
        ({"authorization_servers": ["auth.example.com"]}, "an authorization server must be a URL"),
        ({"authorization_servers": ["http://auth.example.com"]}, "must be https"),
        ({"resource": "http://mcp.example.com/mcp"}, "must be https"),
        ({"resource": "http://localhost.example.com/mcp"}, "must be https"),
        ({"resource": "https://mcp.example.com/mcp#x"}, "without a query"),
        ({"resource": "https://mcp.example.com/mcp?x=1"}, "without a query"),
        ({"resource": 'https://mcp.example.com/"'}, "without a query"),
        ({"resource": 7}, "without a query"),
        ({"scopes": "read"}, "scopes must be a list"),
        ({"implies": {"write": "read"}}, "the scopes that 'write' implies must be a list"),
    ],
)
@req("auth-24", "auth-37", "auth-53")
def test_an_invalid_setting_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        protection(**how)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:3000", "[::1]:80"])
def test_plain_http_is_allowed_on_loopback(host: str) -> None:
    assert protection(resource=f"http://{host}/mcp").host == host


def test_a_server_needs_a_resource_or_a_public_url() -> None:
    assert protection(resource=None).host is None
    with pytest.raises(UsageError, match="public_url"):
        server(resource=None)


@req("auth-45", "auth-46")
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("HTTPS://MCP.Example.com/Mcp/", "https://mcp.example.com/Mcp"),
        ("https://mcp.example.com/", "https://mcp.example.com"),
        ("https://mcp.example.com", "https://mcp.example.com"),
    ],
)
def test_a_resource_has_one_canonical_form(given: str, meant: str) -> None:
    assert canonical(given) == meant
    assert server(resource=given).resource == meant


def test_a_resource_that_is_not_an_http_url_stays_unchanged() -> None:
    assert canonical("api://Default/") == "api://Default/"


@req("auth-111")
def test_a_scope_grants_all_scopes_that_it_implies() -> None:
    implies = {"admin": ["write"], "write": ["read", "write"], "read": ["admin"]}
    granted = protection(implies=implies).granted
    assert granted(Principal("ada", ["admin", "x"])).scopes == {"admin", "write", "read", "x"}
    assert granted(Principal("bob", ["x"])) == Principal("bob", ["x"])
    assert protection(implies={"write": ["read"]}).granted(Principal("eve", ["read"])).scopes == {"read"}


# The URLs of the metadata.

ORIGIN = "https://example.com"
ROOT = {WELL_KNOWN, WELL_KNOWN + "/mcp"}


@req("auth-34", "auth-39")
@pytest.mark.parametrize(
    ("resource", "public_url", "path", "named", "places"),
    [
        # The only server at its host, by either setting.
        (f"{ORIGIN}/mcp", None, "/mcp", f"{ORIGIN}{WELL_KNOWN}/mcp", ROOT),
        (None, ORIGIN, "/mcp", f"{ORIGIN}{WELL_KNOWN}/mcp", ROOT),
        (ORIGIN, None, "", f"{ORIGIN}{WELL_KNOWN}", {WELL_KNOWN}),
        # One resource for several endpoints.
        (ORIGIN, None, "/mcp", f"{ORIGIN}{WELL_KNOWN}", ROOT),
        (f"{ORIGIN}/a", f"{ORIGIN}/a", "/mcp", f"{ORIGIN}/a{WELL_KNOWN}/mcp", ROOT | {WELL_KNOWN + "/a"}),
        # Below the prefix of a gateway, or of a larger application.
        (f"{ORIGIN}/a/mcp", None, "/mcp", f"{ORIGIN}/a{WELL_KNOWN}/mcp", ROOT | {WELL_KNOWN + "/a/mcp"}),
        (None, f"{ORIGIN}/a", "/mcp", f"{ORIGIN}/a{WELL_KNOWN}/mcp", ROOT | {WELL_KNOWN + "/a/mcp"}),
        (f"{ORIGIN}/a/mcp", f"{ORIGIN}/a", "/mcp", f"{ORIGIN}/a{WELL_KNOWN}/mcp", ROOT | {WELL_KNOWN + "/a/mcp"}),
        # Behind a gateway that changes the path.
        (f"{ORIGIN}/tools", None, "/mcp", f"{ORIGIN}{WELL_KNOWN}/tools", ROOT | {WELL_KNOWN + "/tools"}),
    ],
)
def test_the_metadata_is_served_at_all_its_paths(
    resource: str | None, public_url: str | None, path: str, named: str, places: set[str]
) -> None:
    made = server(resource=resource, public_url=public_url, path=path)
    assert (made.metadata_url, set(made.paths)) == (named, places)
    for place in places:
        reply = made.document(get(place, Host="evil.example"))
        assert reply is not None
        assert json.loads(reply.body)["resource"] == (resource or f"{public_url}{path}")


@req("auth-37")
def test_the_members_and_headers_of_the_metadata() -> None:
    made = server(scopes=["read"], authorization_servers=[ISSUER, "https://other.example/tenant/"])
    reply = made.document(get(WELL_KNOWN + "/mcp/?x=1"))
    assert reply is not None
    assert json.loads(reply.body) == {
        "resource": RESOURCE,
        "authorization_servers": [ISSUER, "https://other.example/tenant/"],
        "bearer_methods_supported": ["header"],
        "scopes_supported": ["read"],
    }
    headers = dict(reply.headers)
    assert reply.status == 200
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == str(len(reply.body))


def test_the_metadata_of_a_server_without_scopes_has_no_scopes() -> None:
    reply = server().document(get(WELL_KNOWN))
    assert reply is not None
    assert "scopes_supported" not in json.loads(reply.body)


@pytest.mark.parametrize(
    ("method", "status", "header"),
    [
        ("HEAD", 200, ("Content-Type", "application/json")),
        ("OPTIONS", 204, ("Access-Control-Allow-Headers", "*")),
        ("POST", 405, ("Allow", "GET, HEAD, OPTIONS")),
    ],
)
def test_other_methods_of_the_metadata(method: str, status: int, header: tuple[str, str]) -> None:
    reply = server().document(get(WELL_KNOWN, method))
    assert reply is not None
    assert reply.status == status
    assert header in reply.headers
    assert ("Access-Control-Allow-Origin", "*") in reply.headers
    assert (reply.body == b"") is (method != "POST")


@pytest.mark.parametrize("request_", [get("/mcp"), get("/.well-known"), get(WELL_KNOWN, Upgrade="WebSocket")])
def test_other_paths_and_upgrades_have_no_metadata(request_: HttpRequest) -> None:
    assert server().document(request_) is None


# Tokens.


@pytest.mark.parametrize("value", ["Bearer abc-._~+/=", "bearer abc-._~+/=", "BEARER   abc-._~+/="])
def test_the_token_is_in_the_authorization_header(value: str) -> None:
    assert server().token(get("/mcp?x=1", Authorization=value), ()) == "abc-._~+/="


@req("auth-12", "auth-38", "auth-62")
@pytest.mark.parametrize("headers", [{}, {"Authorization": ""}, {"Authorization": "Basic abc"}])
def test_a_request_without_a_token_gets_a_challenge_without_an_error(headers: dict[str, str]) -> None:
    reply = server(scopes=["read", "list"]).token(get("/mcp", **headers), (("X", "y"),))
    assert isinstance(reply, Reply)
    assert reply.status == 401
    assert challenge(reply) == f'Bearer resource_metadata="https://mcp.example.com{WELL_KNOWN}/mcp", scope="read list"'
    assert ("X", "y") in reply.headers
    assert json.loads(reply.body)["error"]["code"] == -32600


def test_a_dpop_token_is_refused_with_advice() -> None:
    reply = server().token(get("/mcp", Authorization="DPoP secret"), ())
    assert isinstance(reply, Reply)
    assert reply.status == 401
    assert json.loads(reply.body)["error"]["message"] == (
        "the request has a token that is bound to a key (DPoP); send one as Authorization: Bearer"
    )


def test_the_challenge_of_a_server_without_scopes_has_no_scope() -> None:
    assert challenge(server().token(get("/mcp"), ())) == (
        f'Bearer resource_metadata="https://mcp.example.com{WELL_KNOWN}/mcp"'
    )


@req("auth-27")
@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("/mcp", "Bearer"),
        ("/mcp", "Bearer "),
        ("/mcp", "Bearer secret secret"),
        ("/mcp", "Bearer secret, Bearer other"),
        ("/mcp", "Bearer sécret"),
        ("/mcp?access_token=secret", "Bearer good"),
        ("/mcp?a=b&access%5Ftoken=secret", "Bearer good"),
    ],
)
def test_a_malformed_authorization_is_refused_without_the_token(target: str, value: str) -> None:
    reply = server().token(get(target, Authorization=value), ())
    assert isinstance(reply, Reply)
    assert reply.status == 400
    assert challenge(reply).startswith('Bearer error="invalid_request", ')
    assert "secret" not in repr(reply)


@req("auth-20", "auth-21")
def test_the_challenge_for_an_invalid_token() -> None:
    reply = server(scopes=["read"]).unauthorized(())
    assert reply.status == 401
    assert challenge(reply).startswith('Bearer error="invalid_token", resource_metadata="')
    assert 'scope="read"' in challenge(reply)


@req("auth-79", "auth-80")
def test_the_challenge_for_a_missing_scope_lists_all_needed_scopes() -> None:
    reply = server(scopes=["read"]).insufficient(["read", "write"], (), 7)
    assert reply.status == 403
    assert challenge(reply) == (
        f'Bearer error="insufficient_scope", resource_metadata="https://mcp.example.com{WELL_KNOWN}/mcp", '
        'scope="read write", error_description="the access token lacks a scope; this request needs read write"'
    )
    assert json.loads(reply.body)["id"] == 7


# Our own client reads these replies.


@pytest.mark.parametrize(
    ("reply", "demand"),
    [
        (server(scopes=["a", "b"]).token(get("/mcp"), ()), AuthChallenge(401, ("Bearer",), "", ("a", "b"), METADATA)),
        (server(scopes=["a"]).unauthorized(()), AuthChallenge(401, ("Bearer",), "invalid_token", ("a",), METADATA)),
        (server().unauthorized(()), AuthChallenge(401, ("Bearer",), "invalid_token", (), METADATA)),
        (
            server().insufficient(["a", "b"], ()),
            AuthChallenge(403, ("Bearer",), "insufficient_scope", ("a", "b"), METADATA),
        ),
    ],
)
def test_our_client_reads_the_challenge(reply: Reply, demand: AuthChallenge) -> None:
    assert read_auth_challenge(reply.status, challenge(reply)) == demand


def test_our_client_accepts_the_metadata() -> None:
    reply = server(scopes=["a"]).document(get(WELL_KNOWN))
    assert reply is not None
    found = read_resource(json.loads(reply.body), RESOURCE, UrlRules())
    assert (found.resource, found.issuers, found.scopes) == (RESOURCE, (ISSUER,), ("a",))


# Claims.

GOOD = {"iss": ISSUER, "aud": RESOURCE, "exp": 1000, "sub": "ada"}


def fault(now: float = 500.0, **claims: Any) -> str | None:
    return claims_fault({**GOOD, **claims}, issuer=ISSUER, audiences={RESOURCE}, now=now, leeway=10)


@req("auth-45", "auth-46", "auth-47")
@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({}, None),
        ({"aud": ["https://other.example", RESOURCE]}, None),
        ({"aud": "https://MCP.example.com/mcp/"}, None),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"aud": "https://other.example"}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": [7]}, "audience"),
        ({"aud": []}, "audience"),
        ({"sub": None}, "subject"),
        ({"sub": ""}, "subject"),
        ({"exp": None}, "number"),
        ({"exp": "1000"}, "number"),
        ({"exp": True}, "number"),
        ({"exp": float("nan")}, "number"),
        ({"exp": 10**400}, "number"),
        ({"nbf": "0"}, "number"),
        ({"nbf": 400.5}, None),
    ],
)
def test_the_claims_of_a_token(claims: dict[str, Any], expected: str | None) -> None:
    found = fault(**claims)
    assert found is None if expected is None else found is not None and expected in found


@pytest.mark.parametrize(
    ("now", "claims", "expected"),
    [
        (1009.9, {}, None),
        (1010.0, {}, "it has expired"),
        (500.0, {"nbf": 510}, None),
        (500.0, {"nbf": 510.1}, "it is not valid yet"),
    ],
)
def test_the_time_of_a_token_has_some_leeway(now: float, claims: dict[str, Any], expected: str | None) -> None:
    assert fault(now, **claims) == expected


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({}, set()),
        ({"scope": "a b"}, {"a", "b"}),
        ({"scp": "a b"}, {"a", "b"}),
        ({"scp": ["a", "b", 7]}, {"a", "b"}),
        ({"scope": 7}, set()),
    ],
)
def test_the_scopes_of_a_token(claims: dict[str, Any], scopes: set[str]) -> None:
    assert scopes_in(claims) == scopes
