"""Errands: what goes with a request, how often anything is tried, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.auth_server import (
    ISSUER,
    MCP,
    NOW,
    AuthServer,
    McpServer,
    Visitor,
    World,
    again,
    entropy,
    failed,
    key,
    reply,
    unsigned,
    world,
)
from tests.requirements import req
from trio_mcp.core import UsageError
from trio_mcp.core.oauth import (
    Application,
    Authorized,
    Authorizer,
    Blame,
    BrowserReturned,
    ClientCredentials,
    FlowDone,
    FlowFailed,
    IdentityAssertion,
    OAuthClient,
    OpenBrowser,
    OpenReceiver,
    Persist,
    SendRequest,
    ServerRecord,
    StartFlow,
    UrlRules,
    WaitForFlow,
)

CHALLENGE = {"WWW-Authenticate": f'Bearer resource_metadata="{MCP}/metadata"'}
LATER = NOW + 3600
WELL_KNOWN = "/.well-known/oauth-protected-resource/mcp"


# Before, and without, authorization.


@req("auth-01")
def test_a_server_that_wants_no_token_is_sent_none() -> None:
    errand = Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST")
    assert errand.go(NOW) == Authorized(())
    with pytest.raises(UsageError, match="before the request was sent"):
        Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST").refused(401, CHALLENGE, NOW)


@req("auth-18", "auth-24", "auth-48", "auth-53")
@pytest.mark.parametrize(
    "url", ["http://mcp.example/mcp", "http://localhost/mcp", "ftp://x", "https://u:p@mcp.example"]
)
def test_tokens_go_to_https_and_to_one_origin_only(url: str) -> None:
    with pytest.raises(UsageError, match="tokens cannot be sent"):
        Authorizer(url, Application("V"), entropy=entropy)
    authorizer = Authorizer(MCP, Application("V"), entropy=entropy)
    for same in ("https://mcp.example/sse", "https://MCP.example:443/mcp"):
        assert authorizer.authorized_request("GET", same).go(NOW) == Authorized()
    with pytest.raises(UsageError, match="another origin"):
        authorizer.authorized_request("POST", "https://evil.example/mcp")


def test_loopback_may_do_without_tls_where_the_application_says_so() -> None:
    issuer = "http://localhost:9000"
    server = AuthServer(issuer, iss=issuer)
    url = "http://127.0.0.1:3000/mcp"
    mcp = McpServer(server, url, named="http://127.0.0.1:3000/.well-known/oauth-protected-resource/mcp")
    assert Visitor(World(mcp, [server]), rules=UrlRules(loopback=True)).call() == 200


# How often anything is tried.


def test_a_request_is_sent_again_once_and_the_next_one_gets_a_token_in_another_way() -> None:
    visitor = Visitor(world())
    server, mcp = visitor.world.servers[0], visitor.world.mcp
    visitor.call()
    kept, mcp.trusts = mcp.trusts, AuthServer(ISSUER)  # trusts no token at all any more
    mcp.calls.clear()
    error = failed(visitor)
    assert error.blame is Blame.SERVER
    assert len(mcp.calls) == 2
    assert [each["grant_type"] for each in server.of("token")] == ["authorization_code", "refresh_token"]
    mcp.trusts = kept
    server.tokens.clear()
    assert visitor.call() == 200
    assert server.of("token")[-1]["grant_type"] == "authorization_code"


@pytest.mark.parametrize(
    ("status", "challenge", "words"),
    [
        (401, "Basic realm=x", "neither Bearer nor DPoP"),
        (403, "Basic realm=x", "neither Bearer nor DPoP"),
        (403, "", "forbids"),
        (403, "Bearer error=insufficient_scope", "forbids"),
        (403, 'Bearer error="invalid_token", scope="a"', "forbids"),
        (401, "DPoP error=use_dpop_nonce", "nonce"),
    ],
)
def test_what_no_token_would_mend_is_the_end(status: int, challenge: str, words: str) -> None:
    errand = Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST")
    errand.go(NOW)
    verdict = errand.refused(status, {"WWW-Authenticate": challenge}, NOW)
    assert isinstance(verdict, FlowFailed)
    assert verdict.error.blame is Blame.SERVER
    assert words in str(verdict.error)


def test_a_server_that_wants_ever_new_nonces_is_obeyed_once() -> None:
    errand = Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST")
    nonce = {"WWW-Authenticate": "DPoP error=use_dpop_nonce", "DPoP-Nonce": "n"}
    errand.go(NOW)
    assert isinstance(errand.refused(401, nonce, NOW), Authorized)
    assert isinstance(errand.refused(401, nonce, NOW), FlowFailed)


def test_a_refusal_that_names_no_challenge_is_one_for_the_well_known_places() -> None:
    visitor = Visitor(world())
    errand = visitor.authorizer.authorized_request("POST")
    errand.go(NOW)
    verdict = errand.refused(401, {}, NOW)
    assert isinstance(verdict, StartFlow)
    visitor.drive(verdict.flow)
    assert visitor.world.mcp.asked == [WELL_KNOWN]


@req("auth-83", "auth-113")
def test_steps_up_are_counted_for_each_operation_and_what_it_lacks() -> None:
    visitor = Visitor(world(mcp_needs={"x": "b", "y": "b"}))
    visitor.call()
    visitor.world.servers[0].denies = {"error": "access_denied"}
    pages = []
    for operation in ("x", "x", "x", "x", "y"):
        assert failed(visitor, operation).blame is Blame.USER
        pages.append(len(visitor.pages))
    assert pages == [2, 3, 3, 3, 4]
    # A new token is a new chance.
    visitor.now = NOW + 3600
    visitor.call()
    failed(visitor, "x")
    assert len(visitor.pages) == 5
    # Of a great many, the oldest are forgotten.
    failed(visitor, "x")
    for number in range(300):
        visitor.world.mcp.needs = {f"{number}": "b"}
        failed(visitor, f"{number}")
    visitor.world.mcp.needs = {"x": "b"}
    failed(visitor, "x")
    assert len(visitor.pages) == 6 + 300 + 1


def test_one_request_steps_up_twice_at_most() -> None:
    visitor = Visitor(world())
    visitor.call()
    errand = visitor.authorizer.authorized_request("POST")
    errand.go(NOW)
    for scope in ("a", "b"):
        verdict = errand.refused(403, {"WWW-Authenticate": f"Bearer error=insufficient_scope, scope={scope}"}, NOW)
        assert isinstance(verdict, StartFlow)
        visitor.drive(verdict.flow)
        errand.go(NOW)
    verdict = errand.refused(403, {"WWW-Authenticate": "Bearer error=insufficient_scope, scope=c"}, NOW)
    assert isinstance(verdict, FlowFailed)
    assert [each.get("scope") for each in visitor.world.servers[0].of("authorize")] == [None, "a", "a b"]


# Several requests, one flow.


def two_errands(visitor: Visitor) -> tuple[Any, Any, StartFlow]:
    first, second = visitor.authorizer.authorized_request("POST"), visitor.authorizer.authorized_request("POST")
    for each in (first, second):
        each.go(visitor.now)
    begun = first.refused(401, CHALLENGE, visitor.now)
    assert isinstance(begun, StartFlow)
    assert second.refused(401, CHALLENGE, visitor.now) == WaitForFlow(begun.flow)
    return first, second, begun


def test_of_many_requests_in_need_one_begins_a_flow_and_the_others_wait_for_it() -> None:
    visitor = Visitor(world())
    first, second, begun = two_errands(visitor)
    assert second.go(NOW) == first.go(NOW) == WaitForFlow(begun.flow)
    assert visitor.authorizer.authorized_request("POST").go(NOW) == Authorized()  # who needs no token does not wait
    visitor.drive(begun.flow)
    assert first.go(NOW) == second.go(NOW)
    assert first.go(NOW).headers[0][0] == "Authorization"
    assert len(visitor.world.servers[0].of("authorize")) == 1


def test_of_many_requests_whose_token_has_ended_one_renews_it() -> None:
    visitor = Visitor(world())
    visitor.call()
    errands = [visitor.authorizer.authorized_request("POST") for _ in range(10)]
    begun, *waiting = [each.go(LATER) for each in errands]
    assert isinstance(begun, StartFlow)
    assert waiting == [WaitForFlow(begun.flow)] * 9
    visitor.now = LATER
    visitor.drive(begun.flow)
    assert len({each.go(LATER) for each in errands}) == 1
    assert [each["grant_type"] for each in visitor.world.servers[0].of("token")][1:] == ["refresh_token"]


def test_who_waits_for_a_flow_that_fails_gets_its_error_and_may_try_anew() -> None:
    visitor = Visitor(world(denies={"error": "access_denied"}))
    first, second, begun = two_errands(visitor)
    visitor.drive(begun.flow)
    assert first.go(NOW) == second.go(NOW) == begun.flow.outcome
    assert isinstance(second.go(NOW), StartFlow)


def test_when_a_flow_is_abandoned_one_of_those_who_waited_begins_another() -> None:
    visitor = Visitor(world())
    _, second, begun = two_errands(visitor)
    third = visitor.authorizer.authorized_request("POST")
    third.go(NOW)
    third.refused(401, CHALLENGE, NOW)
    deeds = begun.flow.start(NOW)
    begun.flow.abandon()
    verdict = second.go(NOW)
    assert isinstance(verdict, StartFlow)
    assert verdict.flow is not begun.flow
    assert third.go(NOW) == WaitForFlow(verdict.flow)
    # What the abandoned one gets is late, and it cannot be started again.
    assert begun.flow.receive(visitor.act(deeds), NOW) == ()
    begun.flow.abandon()
    assert visitor.authorizer.flow is verdict.flow
    with pytest.raises(UsageError, match="once"):
        begun.flow.start(NOW)
    visitor.drive(verdict.flow)
    assert second.go(NOW) == third.go(NOW)


def test_the_refusal_of_an_old_token_is_no_reason_to_get_a_third() -> None:
    visitor = Visitor(world())
    visitor.call()
    slow, quick = visitor.authorizer.authorized_request("POST"), visitor.authorizer.authorized_request("POST")
    old = slow.go(NOW)
    quick.go(NOW)
    verdict = quick.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    visitor.drive(verdict.flow)
    fresh = slow.refused(401, CHALLENGE, NOW)
    assert isinstance(fresh, Authorized)
    assert fresh != old
    slow = visitor.authorizer.authorized_request("POST")
    slow._sent = 0
    lacking = {"WWW-Authenticate": 'Bearer error="insufficient_scope", scope="a"'}
    assert slow.refused(403, lacking, NOW) == fresh


def test_a_flow_that_gained_nothing_does_not_end_the_need_of_who_knows_the_demand() -> None:
    visitor = Visitor(world())
    visitor.call()
    visitor.world.servers[0].refresh_tokens.clear()
    early, late = visitor.authorizer.authorized_request("POST"), visitor.authorizer.authorized_request("POST")
    early.go(NOW)
    renewal = late.go(LATER)
    assert isinstance(renewal, StartFlow)
    assert early.refused(401, CHALLENGE, LATER) == WaitForFlow(renewal.flow)
    visitor.drive(renewal.flow)
    assert renewal.flow.outcome == FlowDone()
    assert isinstance(late.go(LATER), Authorized)  # with the old token: the server is to say what it demands
    verdict = early.go(LATER)
    assert isinstance(verdict, StartFlow)
    visitor.drive(verdict.flow)
    assert isinstance(early.go(LATER), Authorized)
    assert len(visitor.pages) == 2


def test_who_is_told_to_bind_tokens_does_not_renew_one_that_is_not_bound() -> None:
    visitor = Visitor(world(dpop=True), Application("V"))
    visitor.call()
    bound = Visitor(visitor.world, Application("V", dpop=key()), visitor.persisted[-1])
    visitor.world.mcp.scheme = "DPoP"
    assert bound.call() == 200
    grants = [each["grant_type"] for each in visitor.world.servers[0].of("token")]
    assert grants == ["authorization_code", "authorization_code"]


def test_a_nonce_that_comes_with_an_answer_is_used_for_the_next_request() -> None:
    visitor = Visitor(world(dpop=True), Application("V", dpop=key()))
    visitor.call()
    visitor.authorizer.replied([(b"dpop-nonce", b"n9")])
    verdict = visitor.authorizer.authorized_request("POST").go(NOW)
    assert isinstance(verdict, Authorized)
    assert unsigned(dict(verdict.headers)["DPoP"])[1]["nonce"] == "n9"


# What nobody sees.


@req("auth-22", "auth-106")
def test_no_secret_is_in_a_repr_or_an_error() -> None:
    visitor = Visitor(world(methods=("client_secret_post",)))
    visitor.call()
    server = visitor.world.servers[0]
    server.codes.clear()
    page = server.of("authorize")[0]
    redeemed = server.of("token")[0]
    secrets = [page["state"], redeemed["code"], redeemed["code_verifier"], "s3cret", *server.tokens]
    secrets += [*server.refresh_tokens]
    errand = visitor.authorizer.authorized_request("POST")
    shown: list[object] = [
        *visitor.deeds,
        *visitor.persisted,
        errand.go(NOW),
        errand,
        visitor.authorizer,
        visitor.application,
    ]
    shown += [
        visitor.world.requests,
        BrowserReturned("code=x"),
        visitor.authorizer.record,
    ]
    for secret in secrets:
        assert secret not in repr(shown)
    visitor.now = LATER
    flow = visitor.authorizer.authorized_request("POST").go(LATER).flow  # type: ignore[union-attr]
    flow.start(LATER)
    echo = reply(503, {"error": "server_error", "error_description": f"{secrets} and {redeemed}"})
    (last,) = flow.receive(echo, LATER)
    assert isinstance(last, FlowFailed)
    for secret in (*server.refresh_tokens, "s3cret"):
        assert secret not in str(last.error)
    assert repr(SendRequest("GET", "https://mcp.example/?key=k")) == "<GET https://mcp.example/>"


def test_a_record_belongs_to_one_server() -> None:
    with pytest.raises(UsageError, match="another server"):
        Authorizer(MCP, Application("V"), entropy=entropy, record=ServerRecord("https://mcp.example/other"))
    grant = IdentityAssertion("http://idp.example/token", OAuthClient("x"))
    with pytest.raises(UsageError, match="is not https"):
        Authorizer(MCP, Application("V", grant=grant), entropy=entropy)


def test_what_is_stored_comes_before_what_follows_from_it() -> None:
    visitor = Visitor(world())
    visitor.call()
    kinds = [type(each) for each in visitor.deeds]
    assert kinds == [
        SendRequest,
        SendRequest,
        OpenReceiver,
        SendRequest,
        Persist,
        OpenBrowser,
        SendRequest,
        Persist,
        FlowDone,
    ]


def test_what_an_application_has_several_of_may_come_in_anything() -> None:
    client, issuers = OAuthClient("id"), ("https://one.example", "https://other.example")
    plain = Application("V", clients=(client,), scopes=("a", "b"), prefers=issuers)
    assert Application("V", clients=[client], scopes="a b", prefers=list(issuers)) == plain
    assert Application("V", clients=iter([client]), scopes=dict.fromkeys("ab"), prefers=iter(issuers)) == plain
    assert Application("V").scopes is None


def test_an_application_says_at_once_what_it_is_not_made_of() -> None:
    given: Any = OAuthClient("id")
    with pytest.raises(UsageError, match=r"must be a list, even of one: clients=\[OAuthClient"):
        Application("V", clients=given)
    for grant in ("client_credentials", ClientCredentials, None):
        given = grant
        with pytest.raises(UsageError, match=r"for example ClientCredentials\(\), not .*"):
            Application("V", grant=given)


# Several processes of one application.


def elsewhere(visitor: Visitor) -> ServerRecord:
    """What another process has stored, which had the same record and has renewed it."""
    other = again(visitor, now=LATER + 1)
    assert other.call() == 200
    return other.persisted[-1]


@pytest.mark.parametrize("revoked", [False, True])
def test_what_another_process_has_renewed_is_used_instead_of_renewing_it_again(revoked: bool) -> None:
    """By the token's time, or because the server refuses it."""
    visitor = Visitor(world())
    assert visitor.call() == 200
    server, errand = visitor.world.servers[0], visitor.authorizer.authorized_request("POST")
    stored, now = elsewhere(visitor), NOW if revoked else LATER + 1
    verdict = errand.go(now)
    if revoked:
        assert isinstance(verdict, Authorized)
        verdict = errand.refused(401, CHALLENGE, now)
    assert isinstance(verdict, StartFlow)
    asked = len(server.asked)
    assert verdict.flow.adopt(stored)
    assert verdict.flow.over
    assert visitor.authorizer.flow is None
    assert stored.authorization is not None
    token = stored.authorization.tokens.access
    assert errand.go(now) == Authorized((("Authorization", f"Bearer {token}"),))
    assert len(server.asked) == asked


def test_what_another_process_had_may_be_no_better_and_then_a_new_one_is_got() -> None:
    visitor = Visitor(world())
    assert visitor.call() == 200
    errand, stored = visitor.authorizer.authorized_request("POST"), elsewhere(visitor)
    assert isinstance(errand.go(NOW), Authorized)
    verdict = errand.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    assert verdict.flow.adopt(stored)
    assert isinstance(errand.go(NOW), Authorized)
    verdict = errand.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    assert not verdict.flow.adopt(stored)  # it is our own now
    visitor.drive(verdict.flow)
    assert isinstance(errand.go(NOW), Authorized)
    assert isinstance(errand.refused(401, CHALLENGE, NOW), FlowFailed)


def test_nothing_is_adopted_that_is_nothing_or_too_late() -> None:
    visitor = Visitor(world())
    errand = visitor.authorizer.authorized_request("POST")
    assert isinstance(errand.go(NOW), Authorized)
    verdict = errand.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    assert not verdict.flow.adopt(ServerRecord(MCP))
    verdict.flow.start(NOW)
    other = Visitor(visitor.world)
    assert other.call() == 200
    with pytest.raises(UsageError, match="before start"):
        verdict.flow.adopt(other.persisted[-1])
    assert visitor.authorizer.record == ServerRecord(MCP)
