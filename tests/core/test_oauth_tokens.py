"""`AuthorizedRequest`: the headers of a request, the limits of retries, and requests that wait for the same flow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.auth_server import (
    ISSUER,
    MCP,
    NOW,
    AuthServer,
    Deployment,
    Driver,
    McpServer,
    deployment,
    entropy,
    failure,
    jwt_parts,
    key,
    reply,
    restarted,
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


# Before the first flow, and servers without authorization.


@req("auth-01")
def test_no_token_is_sent_to_a_server_without_authorization() -> None:
    request = Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST")
    assert request.go(NOW) == Authorized(())
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


def test_loopback_needs_no_tls_if_the_application_allows_it() -> None:
    issuer = "http://localhost:9000"
    server = AuthServer(issuer, iss=issuer)
    url = "http://127.0.0.1:3000/mcp"
    mcp = McpServer(server, url, named="http://127.0.0.1:3000/.well-known/oauth-protected-resource/mcp")
    assert Driver(Deployment(mcp, [server]), rules=UrlRules(loopback=True)).call() == 200


# The limits of retries.


def test_a_request_is_retried_once_and_the_next_one_uses_another_grant() -> None:
    driver = Driver(deployment())
    server, mcp = driver.deployment.servers[0], driver.deployment.mcp
    driver.call()
    kept, mcp.trusts = mcp.trusts, AuthServer(ISSUER)  # it accepts no token any more
    mcp.calls.clear()
    error = failure(driver)
    assert error.blame is Blame.SERVER
    assert len(mcp.calls) == 2
    assert [each["grant_type"] for each in server.of("token")] == ["authorization_code", "refresh_token"]
    mcp.trusts = kept
    server.tokens.clear()
    assert driver.call() == 200
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
def test_a_refusal_that_a_token_cannot_change_is_final(status: int, challenge: str, words: str) -> None:
    request = Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST")
    request.go(NOW)
    verdict = request.refused(status, {"WWW-Authenticate": challenge}, NOW)
    assert isinstance(verdict, FlowFailed)
    assert verdict.error.blame is Blame.SERVER
    assert words in str(verdict.error)


def test_a_request_is_retried_once_for_a_new_nonce() -> None:
    request = Authorizer(MCP, Application("V"), entropy=entropy).authorized_request("POST")
    nonce = {"WWW-Authenticate": "DPoP error=use_dpop_nonce", "DPoP-Nonce": "n"}
    request.go(NOW)
    assert isinstance(request.refused(401, nonce, NOW), Authorized)
    assert isinstance(request.refused(401, nonce, NOW), FlowFailed)


def test_a_401_without_a_challenge_leads_to_the_well_known_url() -> None:
    driver = Driver(deployment())
    request = driver.authorizer.authorized_request("POST")
    request.go(NOW)
    verdict = request.refused(401, {}, NOW)
    assert isinstance(verdict, StartFlow)
    driver.drive(verdict.flow)
    assert driver.deployment.mcp.asked == [WELL_KNOWN]


@req("auth-83", "auth-113")
def test_step_ups_are_limited_per_operation_and_missing_scopes() -> None:
    driver = Driver(deployment(mcp_needs={"x": "b", "y": "b"}))
    driver.call()
    driver.deployment.servers[0].denies = {"error": "access_denied"}
    pages = []
    for operation in ("x", "x", "x", "x", "y"):
        assert failure(driver, operation).blame is Blame.USER
        pages.append(len(driver.pages))
    assert pages == [2, 3, 3, 3, 4]
    # With a new token, the step-up is tried again.
    driver.now = NOW + 3600
    driver.call()
    failure(driver, "x")
    assert len(driver.pages) == 5
    # Only a limited number of failed step-ups is kept; the oldest ones are dropped.
    failure(driver, "x")
    for number in range(300):
        driver.deployment.mcp.needs = {f"{number}": "b"}
        failure(driver, f"{number}")
    driver.deployment.mcp.needs = {"x": "b"}
    failure(driver, "x")
    assert len(driver.pages) == 6 + 300 + 1


def test_one_request_steps_up_twice_at_most() -> None:
    driver = Driver(deployment())
    driver.call()
    request = driver.authorizer.authorized_request("POST")
    request.go(NOW)
    for scope in ("a", "b"):
        verdict = request.refused(403, {"WWW-Authenticate": f"Bearer error=insufficient_scope, scope={scope}"}, NOW)
        assert isinstance(verdict, StartFlow)
        driver.drive(verdict.flow)
        request.go(NOW)
    verdict = request.refused(403, {"WWW-Authenticate": "Bearer error=insufficient_scope, scope=c"}, NOW)
    assert isinstance(verdict, FlowFailed)
    assert [each.get("scope") for each in driver.deployment.servers[0].of("authorize")] == [None, "a", "a b"]


# Several requests share one flow.


def two_refused_requests(driver: Driver) -> tuple[Any, Any, StartFlow]:
    first, second = driver.authorizer.authorized_request("POST"), driver.authorizer.authorized_request("POST")
    for each in (first, second):
        each.go(driver.now)
    begun = first.refused(401, CHALLENGE, driver.now)
    assert isinstance(begun, StartFlow)
    assert second.refused(401, CHALLENGE, driver.now) == WaitForFlow(begun.flow)
    return first, second, begun


def test_one_request_starts_the_flow_and_the_others_wait_for_it() -> None:
    driver = Driver(deployment())
    first, second, begun = two_refused_requests(driver)
    assert second.go(NOW) == first.go(NOW) == WaitForFlow(begun.flow)
    assert driver.authorizer.authorized_request("POST").go(NOW) == Authorized()  # not refused, so it does not wait
    driver.drive(begun.flow)
    assert first.go(NOW) == second.go(NOW)
    assert first.go(NOW).headers[0][0] == "Authorization"
    assert len(driver.deployment.servers[0].of("authorize")) == 1


def test_one_of_many_requests_renews_an_expired_token() -> None:
    driver = Driver(deployment())
    driver.call()
    requests = [driver.authorizer.authorized_request("POST") for _ in range(10)]
    begun, *waiting = [each.go(LATER) for each in requests]
    assert isinstance(begun, StartFlow)
    assert waiting == [WaitForFlow(begun.flow)] * 9
    driver.now = LATER
    driver.drive(begun.flow)
    assert len({each.go(LATER) for each in requests}) == 1
    assert [each["grant_type"] for each in driver.deployment.servers[0].of("token")][1:] == ["refresh_token"]


def test_waiting_requests_get_the_error_of_the_flow_and_may_start_another() -> None:
    driver = Driver(deployment(denies={"error": "access_denied"}))
    first, second, begun = two_refused_requests(driver)
    driver.drive(begun.flow)
    assert first.go(NOW) == second.go(NOW) == begun.flow.outcome
    assert isinstance(second.go(NOW), StartFlow)


def test_a_waiting_request_starts_a_flow_when_the_first_is_abandoned() -> None:
    driver = Driver(deployment())
    _, second, begun = two_refused_requests(driver)
    third = driver.authorizer.authorized_request("POST")
    third.go(NOW)
    third.refused(401, CHALLENGE, NOW)
    actions = begun.flow.start(NOW)
    begun.flow.abandon()
    verdict = second.go(NOW)
    assert isinstance(verdict, StartFlow)
    assert verdict.flow is not begun.flow
    assert third.go(NOW) == WaitForFlow(verdict.flow)
    # An abandoned flow ignores the event that arrives late, and cannot be started again.
    assert begun.flow.receive(driver.perform(actions), NOW) == ()
    begun.flow.abandon()
    assert driver.authorizer.flow is verdict.flow
    with pytest.raises(UsageError, match="once"):
        begun.flow.start(NOW)
    driver.drive(verdict.flow)
    assert second.go(NOW) == third.go(NOW)


def test_the_refusal_of_an_old_token_starts_no_flow() -> None:
    driver = Driver(deployment())
    driver.call()
    slow, quick = driver.authorizer.authorized_request("POST"), driver.authorizer.authorized_request("POST")
    old = slow.go(NOW)
    quick.go(NOW)
    verdict = quick.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    driver.drive(verdict.flow)
    fresh = slow.refused(401, CHALLENGE, NOW)
    assert isinstance(fresh, Authorized)
    assert fresh != old
    slow = driver.authorizer.authorized_request("POST")
    slow._sent = 0
    lacking = {"WWW-Authenticate": 'Bearer error="insufficient_scope", scope="a"'}
    assert slow.refused(403, lacking, NOW) == fresh


def test_after_a_renewal_without_a_token_a_refused_request_starts_a_flow() -> None:
    driver = Driver(deployment())
    driver.call()
    driver.deployment.servers[0].refresh_tokens.clear()
    early, late = driver.authorizer.authorized_request("POST"), driver.authorizer.authorized_request("POST")
    early.go(NOW)
    renewal = late.go(LATER)
    assert isinstance(renewal, StartFlow)
    assert early.refused(401, CHALLENGE, LATER) == WaitForFlow(renewal.flow)
    driver.drive(renewal.flow)
    assert renewal.flow.outcome == FlowDone()
    assert isinstance(late.go(LATER), Authorized)  # with the old token: the challenge of the server is needed
    verdict = early.go(LATER)
    assert isinstance(verdict, StartFlow)
    driver.drive(verdict.flow)
    assert isinstance(early.go(LATER), Authorized)
    assert len(driver.pages) == 2


def test_an_unbound_token_is_not_renewed_once_dpop_is_configured() -> None:
    driver = Driver(deployment(dpop=True), Application("V"))
    driver.call()
    bound = Driver(driver.deployment, Application("V", dpop=key()), driver.persisted[-1])
    driver.deployment.mcp.scheme = "DPoP"
    assert bound.call() == 200
    grants = [each["grant_type"] for each in driver.deployment.servers[0].of("token")]
    assert grants == ["authorization_code", "authorization_code"]


def test_a_nonce_in_a_response_is_used_for_the_next_request() -> None:
    driver = Driver(deployment(dpop=True), Application("V", dpop=key()))
    driver.call()
    driver.authorizer.replied([(b"dpop-nonce", b"n9")])
    verdict = driver.authorizer.authorized_request("POST").go(NOW)
    assert isinstance(verdict, Authorized)
    assert jwt_parts(dict(verdict.headers)["DPoP"])[1]["nonce"] == "n9"


# Secrets, records and arguments.


@req("auth-22", "auth-106")
def test_no_secret_is_in_a_repr_or_an_error() -> None:
    driver = Driver(deployment(methods=("client_secret_post",)))
    driver.call()
    server = driver.deployment.servers[0]
    server.codes.clear()
    page = server.of("authorize")[0]
    redeemed = server.of("token")[0]
    secrets = [page["state"], redeemed["code"], redeemed["code_verifier"], "s3cret", *server.tokens]
    secrets += [*server.refresh_tokens]
    request = driver.authorizer.authorized_request("POST")
    shown: list[object] = [
        *driver.actions,
        *driver.persisted,
        request.go(NOW),
        request,
        driver.authorizer,
        driver.application,
    ]
    shown += [
        driver.deployment.requests,
        BrowserReturned("code=x"),
        driver.authorizer.record,
    ]
    for secret in secrets:
        assert secret not in repr(shown)
    driver.now = LATER
    flow = driver.authorizer.authorized_request("POST").go(LATER).flow  # type: ignore[union-attr]
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


def test_a_record_is_stored_before_the_action_that_depends_on_it() -> None:
    driver = Driver(deployment())
    driver.call()
    kinds = [type(each) for each in driver.actions]
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


def test_the_lists_of_an_application_may_be_any_iterable() -> None:
    client, issuers = OAuthClient("id"), ("https://one.example", "https://other.example")
    plain = Application("V", clients=(client,), scopes=("a", "b"), prefers=issuers)
    assert Application("V", clients=[client], scopes="a b", prefers=list(issuers)) == plain
    assert Application("V", clients=iter([client]), scopes=dict.fromkeys("ab"), prefers=iter(issuers)) == plain
    assert Application("V").scopes is None


def test_an_application_refuses_arguments_of_the_wrong_type() -> None:
    given: Any = OAuthClient("id")
    with pytest.raises(UsageError, match=r"must be a list, even of one: clients=\[OAuthClient"):
        Application("V", clients=given)
    for grant in ("client_credentials", ClientCredentials, None):
        given = grant
        with pytest.raises(UsageError, match=r"for example ClientCredentials\(\), not .*"):
            Application("V", grant=given)


# Several processes of one application.


def renewed_by_another_process(driver: Driver) -> ServerRecord:
    """The record that another process has stored after it renewed the same token."""
    other = restarted(driver, now=LATER + 1)
    assert other.call() == 200
    return other.persisted[-1]


@pytest.mark.parametrize("revoked", [False, True])
def test_a_token_renewed_by_another_process_is_adopted(revoked: bool) -> None:
    """The renewal is due because the token has expired, or because the server refuses it."""
    driver = Driver(deployment())
    assert driver.call() == 200
    server, request = driver.deployment.servers[0], driver.authorizer.authorized_request("POST")
    stored, now = renewed_by_another_process(driver), NOW if revoked else LATER + 1
    verdict = request.go(now)
    if revoked:
        assert isinstance(verdict, Authorized)
        verdict = request.refused(401, CHALLENGE, now)
    assert isinstance(verdict, StartFlow)
    asked = len(server.asked)
    assert verdict.flow.adopt(stored)
    assert verdict.flow.over
    assert driver.authorizer.flow is None
    assert stored.authorization is not None
    token = stored.authorization.tokens.access
    assert request.go(now) == Authorized((("Authorization", f"Bearer {token}"),))
    assert len(server.asked) == asked


def test_an_adopted_token_that_is_refused_is_replaced_by_a_new_one() -> None:
    driver = Driver(deployment())
    assert driver.call() == 200
    request, stored = driver.authorizer.authorized_request("POST"), renewed_by_another_process(driver)
    assert isinstance(request.go(NOW), Authorized)
    verdict = request.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    assert verdict.flow.adopt(stored)
    assert isinstance(request.go(NOW), Authorized)
    verdict = request.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    assert not verdict.flow.adopt(stored)  # it is the record in use already
    driver.drive(verdict.flow)
    assert isinstance(request.go(NOW), Authorized)
    assert isinstance(request.refused(401, CHALLENGE, NOW), FlowFailed)


def test_a_flow_adopts_neither_an_empty_record_nor_one_after_its_start() -> None:
    driver = Driver(deployment())
    request = driver.authorizer.authorized_request("POST")
    assert isinstance(request.go(NOW), Authorized)
    verdict = request.refused(401, CHALLENGE, NOW)
    assert isinstance(verdict, StartFlow)
    assert not verdict.flow.adopt(ServerRecord(MCP))
    verdict.flow.start(NOW)
    other = Driver(driver.deployment)
    assert other.call() == 200
    with pytest.raises(UsageError, match="before start"):
        verdict.flow.adopt(other.persisted[-1])
    assert driver.authorizer.record == ServerRecord(MCP)
