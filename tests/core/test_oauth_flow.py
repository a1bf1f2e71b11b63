"""Flows: faults in each exchange, the flows of a new process, changed applications, and unusual or hostile servers."""

from __future__ import annotations

import itertools
import json
from typing import Any
from urllib.parse import parse_qsl

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.auth_server import (
    CALLBACK,
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
    key,
    reply,
    restarted,
)
from tests.requirements import req
from trio_mcp.core import UsageError
from trio_mcp.core.http import Headers
from trio_mcp.core.oauth import (
    Application,
    Asserted,
    AuthorizationCode,
    Authorized,
    Authorizer,
    Blame,
    BrowserReturned,
    ClientAuthMethod,
    ClientCredentials,
    FlowAbandoned,
    FlowDone,
    FlowEvent,
    FlowFailed,
    ForbiddenAddress,
    Grant,
    IdentityAssertion,
    OAuthClient,
    OpenBrowser,
    OpenReceiver,
    Persist,
    ReceiverReady,
    Replied,
    RequestFailed,
    ReturnIgnored,
    SendRequest,
    StartFlow,
    WorkloadIdentity,
    as_json,
    read_record,
)

LATER = NOW + 3600
WELL_KNOWN = "/.well-known/oauth-protected-resource/mcp"


# A fault in each exchange of a flow.

GRANTS: dict[str, tuple[Grant, dict[str, Any], int]] = {
    "code": (AuthorizationCode(), {}, 6),
    "client credentials": (ClientCredentials(), {"grants": ("client_credentials",)}, 3),
    "enterprise": (
        IdentityAssertion("https://as.example/idp", OAuthClient("at-idp")),
        {"grants": ("urn:ietf:params:oauth:grant-type:jwt-bearer",)},
        5,
    ),
    "workload": (WorkloadIdentity(), {"grants": ("urn:ietf:params:oauth:grant-type:jwt-bearer",)}, 4),
}
EXCHANGES = [(name, number) for name, (*_, count) in GRANTS.items() for number in range(count)]
ID_JAG = {"access_token": "jag", "issued_token_type": "urn:ietf:params:oauth:token-type:id-jag"}


def driver_for(name: str) -> Driver:
    grant, settings, _ = GRANTS[name]
    clients = () if name == "code" else (OAuthClient("known", ISSUER),)
    driver = Driver(deployment(**settings), Application("V", grant=grant, clients=clients))
    driver.deployment.servers[0].clients["known"] = {}

    def provider(request: SendRequest) -> FlowEvent | None:
        return reply(200, ID_JAG) if request.url.endswith("/idp") else None

    driver.deployment.override = provider
    return driver


def flow_at(driver: Driver, number: int) -> tuple[Any, tuple[Any, ...]]:
    """A flow after `number` exchanges, and the actions that it asks for next."""
    request = driver.authorizer.authorized_request("POST")
    request.go(driver.now)
    verdict = request.refused(401, {}, driver.now)
    assert isinstance(verdict, StartFlow)
    actions = verdict.flow.start(driver.now)
    for _ in range(number):
        actions = verdict.flow.receive(driver.perform(actions), driver.now)
    return verdict.flow, actions


def test_the_exchanges_are_counted_right() -> None:
    for name, (*_, count) in GRANTS.items():
        flow, actions = flow_at(driver_for(name), count)
        assert actions[-1] == FlowDone()
        assert flow.over


@pytest.mark.parametrize(("name", "number"), EXCHANGES)
def test_after_an_abandoned_flow_the_next_request_succeeds(name: str, number: int) -> None:
    driver = driver_for(name)
    flow, _ = flow_at(driver, number)
    flow.abandon()
    assert driver.call() == 200
    assert len(driver.deployment.servers[0].of("register")) <= 1  # the registration is kept


FAULTS: list[Any] = [
    RequestFailed("the name does not resolve"),
    FlowAbandoned("no time left"),
    ForbiddenAddress("10.0.0.7"),
    reply(500),
    reply(503, {"error": "temporarily_unavailable"}),
    reply(200, [1]),
    Replied(200, Headers(), b"<html>"),
    Replied(200, Headers(), b"[" * 300_000),
    Replied(200, Headers(), b"[" * 100_000),
    Replied(200, Headers(), b"\xff"),
    reply(302, None, Location="https://evil.example/"),
    reply(404),
]


@pytest.mark.parametrize(("name", "number"), EXCHANGES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: type(each).__name__)
def test_after_a_fault_in_any_exchange_the_next_flow_succeeds(name: str, number: int, fault: FlowEvent) -> None:
    driver = driver_for(name)
    flow, actions = flow_at(driver, number)
    if not isinstance(actions[-1], SendRequest):
        fault = FlowAbandoned("no time left")
    actions = flow.receive(fault, NOW)
    while not flow.over:
        actions = flow.receive(driver.perform(actions), NOW)
    driver._save(actions)
    # When the first URL has no document, the flow asks at the next one.
    assert isinstance(actions[-1], FlowFailed) or number == 0
    if isinstance(fault, RequestFailed) and number > 1:
        assert "the name does not resolve" in str(actions[-1])
    flow.abandon()
    assert driver.call() == 200
    assert restarted(driver).call() == 200


@pytest.mark.parametrize("number", range(6))
def test_an_event_that_does_not_fit_the_action_is_a_usage_error(number: int) -> None:
    driver = driver_for("code")
    flow, actions = flow_at(driver, number)
    for event in (reply(200), ReceiverReady(CALLBACK), BrowserReturned(""), Asserted("x")):
        fitting = {SendRequest: Replied, OpenReceiver: ReceiverReady, OpenBrowser: BrowserReturned}[type(actions[-1])]
        if not isinstance(event, fitting):
            with pytest.raises(UsageError, match=type(actions[-1]).__name__):
                flow.receive(event, NOW)
    while not flow.over:
        actions = flow.receive(driver.perform(actions), NOW)
    assert actions[-1] == FlowDone()


@req("auth-26")
@pytest.mark.parametrize("uri", ["http://app.example/callback", "app://callback", "https://app.example/#x", ""])
def test_a_redirect_uri_is_on_loopback_or_https(uri: str) -> None:
    driver = driver_for("code")
    flow, actions = flow_at(driver, 2)
    with pytest.raises(UsageError, match="redirect URI"):
        flow.receive(ReceiverReady(uri), NOW)
    assert isinstance(flow.receive(driver.perform(actions), NOW)[-1], SendRequest)


@req("auth-55")
def test_a_callback_with_another_state_is_ignored() -> None:
    driver = driver_for("code")
    flow, actions = flow_at(driver, 4)
    assert isinstance(actions[-1], OpenBrowser)
    right = driver.deployment.browse(actions[-1].url)
    fields = dict(parse_qsl(right))
    for query in (
        "",
        "code=stolen",
        "code=stolen&state=guessed",
        "error=access_denied&state=%F0%9F",
        f"state={fields['state']}&state=x&code=stolen",
        "&".join(f"a{number}=b" for number in range(100)) + right,
        "state=\ud800",
    ):
        assert isinstance(flow.receive(BrowserReturned(query), NOW)[-1], ReturnIgnored)
    actions = flow.receive(BrowserReturned(f"?{right}"), NOW)
    assert b"code-" in actions[-1].body  # type: ignore[union-attr]
    assert b"stolen" not in actions[-1].body  # type: ignore[union-attr]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(exchange=st.sampled_from(EXCHANGES), status=st.sampled_from([200, 400, 401]), data=st.data())
def test_a_flow_ends_with_a_token_or_an_error_for_any_json_in_a_reply(
    exchange: tuple[str, int], status: int, data: st.DataObject
) -> None:
    driver = driver_for(exchange[0])
    flow, actions = flow_at(driver, exchange[1])
    event = driver.perform(actions)
    if isinstance(event, Replied):
        fields = json.loads(event.body) if event.body else {}
        name = data.draw(st.sampled_from([*fields, "error", "error_description", "scope"]))
        event = reply(status, {**fields, name: data.draw(JSON_VALUES)})
    actions = flow.receive(event, NOW)
    while not flow.over:
        actions = flow.receive(driver.perform(actions), NOW)
    assert isinstance(actions[-1], FlowDone | FlowFailed)
    for each in actions:
        if isinstance(each, Persist):
            assert read_record(json.loads(json.dumps(as_json(each.record)))) == each.record


# A new process.


@req("auth-109")
def test_a_new_process_renews_its_token_with_one_request() -> None:
    driver = Driver(deployment(methods=("client_secret_basic",)))
    driver.call()
    written = json.loads(json.dumps(as_json(driver.persisted[-1])))
    fresh = Driver(driver.deployment, driver.application, read_record(written), now=LATER)
    before = len(driver.deployment.requests)
    assert [fresh.call(), fresh.call()] == [200, 200]
    (request,) = driver.deployment.requests[before:]
    assert request.url == f"{ISSUER}/token"
    (first, renewal) = driver.deployment.servers[0].of("token")
    assert renewal["resource"] == first["resource"] == MCP
    assert "scope" not in renewal
    assert fresh.persisted[-1].authorization.tokens.expires_at == LATER + 3600  # type: ignore[union-attr]


def test_a_token_is_used_until_shortly_before_its_end() -> None:
    driver = Driver(deployment())
    driver.call()
    asked = len(driver.deployment.requests)
    assert restarted(driver, now=LATER - 11).call() == 200
    assert len(driver.deployment.requests) == asked
    assert restarted(driver, now=LATER - 10).call() == 200
    assert len(driver.deployment.requests) == asked + 1


@pytest.mark.parametrize("rotates", [True, False])
def test_the_newest_refresh_token_is_kept(rotates: bool) -> None:
    driver = Driver(deployment(rotates=rotates))
    driver.call()
    for number in range(1, 4):
        driver.now = NOW + 3600 * number
        assert driver.call() == 200
    assert len({each["refresh_token"] for each in driver.deployment.servers[0].of("token")[1:]}) == (
        3 if rotates else 1
    )
    assert len(driver.pages) == 1


@req("auth-109")
def test_without_a_refresh_token_an_expired_token_is_used_until_refused() -> None:
    driver = Driver(deployment(refreshes=False))
    driver.call()
    driver.now = LATER
    assert driver.call() == 200  # the token has expired by the client's clock, but the server still accepts it
    assert len(driver.pages) == 1
    driver.deployment.servers[0].tokens.clear()
    assert driver.call() == 200
    assert len(driver.pages) == 2


def test_a_token_without_expiry_is_used_until_refused_and_then_renewed() -> None:
    driver = Driver(deployment(expires_in=None, mcp_scope="a"))
    driver.call()
    driver.now = NOW + 10**9
    assert driver.call() == 200
    driver.deployment.servers[0].tokens.clear()
    asked = len(driver.deployment.requests)
    assert driver.call() == 200
    assert [each.url.removeprefix("https://") for each in driver.deployment.requests[asked:]] == [
        f"mcp.example{WELL_KNOWN}",
        "as.example/token",
    ]
    driver.deployment.servers[0].tokens.clear()
    driver.deployment.mcp.scope = "a b"  # a renewed token would not have the scope b
    assert driver.call() == 200
    assert [each["scope"] for each in driver.deployment.servers[0].of("authorize")] == ["a", "a b"]


@pytest.mark.parametrize("refused_by", ["expiry", "server"])
def test_after_an_invalid_refresh_token_the_user_is_asked_again(refused_by: str) -> None:
    driver = Driver(deployment())
    driver.call()
    server = driver.deployment.servers[0]
    server.refresh_tokens.clear()
    server.tokens.clear()
    driver.now = LATER if refused_by == "expiry" else NOW
    assert driver.call() == 200
    assert len(driver.pages) == 2
    assert len([each for each in server.of("token") if each["grant_type"] == "refresh_token"]) == 1


@pytest.mark.parametrize("fault", [RequestFailed("no route"), reply(503), reply(429), reply(200, {})])
def test_a_failed_refresh_is_tried_again_by_the_next_request(fault: FlowEvent) -> None:
    driver = Driver(deployment())
    driver.call()
    driver.now = LATER
    driver.deployment.override = lambda request: fault
    failure(driver)
    driver.deployment.override = lambda request: None
    assert driver.call() == 200
    assert len(driver.pages) == 1


def test_a_client_that_the_server_has_forgotten_registers_again() -> None:
    driver = Driver(deployment())
    driver.call()
    server = driver.deployment.servers[0]
    server.clients.clear()
    server.tokens.clear()
    assert driver.call() == 200
    assert len(server.of("register")) == 2


def test_an_old_registration_is_replaced_after_an_unfinished_page() -> None:
    driver = Driver(deployment(refreshes=False))
    driver.call()
    server = driver.deployment.servers[0]
    server.clients.clear()
    server.tokens.clear()
    flow, actions = flow_at(driver, 3)
    assert isinstance(actions[-1], OpenBrowser)
    *_, last = actions = flow.receive(FlowAbandoned("closed"), NOW)
    assert isinstance(last, FlowFailed)
    assert last.error.blame is Blame.USER
    driver._save(actions)
    assert driver.call() == 200
    assert len(server.of("register")) == 2
    # A page that could not be shown is no refusal by the user, and the server may have forgotten this client as well.
    server.tokens.clear()
    flow, actions = flow_at(driver, 3)
    assert isinstance(actions[-1], OpenBrowser)
    *_, last = actions = flow.receive(FlowAbandoned("no screen", at_fault=True), NOW)
    assert isinstance(last, FlowFailed)
    assert last.error.blame is Blame.APPLICATION
    assert "no screen" in str(last.error)
    driver._save(actions)
    assert driver.call() == 200
    assert len(server.of("register")) == 3
    # The server says in its response that it does not know the client.
    server.tokens.clear()
    server.denies = {"error": "unauthorized_client"}
    assert failure(driver).blame is Blame.APPLICATION
    server.denies = {}
    assert driver.call() == 200
    assert len(server.of("register")) == 4


@pytest.mark.parametrize("told_by", ["browser", "token endpoint"])
def test_old_scopes_are_dropped_after_invalid_scope(told_by: str) -> None:
    driver = Driver(deployment(mcp_scope="old", mcp_needs={"x": "new"}))
    driver.call()
    server = driver.deployment.servers[0]
    if told_by == "browser":
        server.denies = {"error": "invalid_scope"}
    else:
        driver.deployment.override = lambda request: (
            reply(400, {"error": "invalid_scope"}) if request.url.endswith("/token") else None
        )
    error = failure(driver, "x")
    assert (error.blame, error.code) == (Blame.AUTHORIZATION_SERVER, "invalid_scope")
    server.denies, driver.deployment.override = {}, lambda request: None
    assert driver.call("x") == 200
    assert [each["scope"] for each in server.of("authorize")] == ["old", "old new", "new"]


def test_a_renewal_without_its_refresh_token_does_not_ask_the_user() -> None:
    driver = Driver(deployment())
    driver.call()
    request = driver.authorizer.authorized_request("POST")
    first = request.go(LATER)
    assert isinstance(first, StartFlow)
    driver.authorizer._drop_refresh_token()
    first.flow.abandon()
    second = request.go(LATER)
    assert isinstance(second, StartFlow)
    driver.drive(second.flow)
    assert second.flow.outcome == FlowDone()
    assert isinstance(request.go(LATER), Authorized)
    assert len(driver.pages) == 1


def test_a_refusal_by_the_user_keeps_the_registration() -> None:
    driver = Driver(deployment(denies={"error": "access_denied"}))
    assert failure(driver).blame is Blame.USER
    assert failure(driver).blame is Blame.USER
    assert len(driver.deployment.servers[0].of("register")) == 1
    # A page that was closed keeps a new registration as well, because the server certainly knows it.
    driver = Driver(deployment())
    flow, _ = flow_at(driver, 4)
    flow.receive(FlowAbandoned("closed"), NOW)
    assert driver.call() == 200
    assert len(driver.deployment.servers[0].of("register")) == 1


def test_a_registration_is_bound_to_its_redirect_uri_issuer_and_expiry() -> None:
    driver = Driver(deployment(refreshes=False, expires_in=None))
    server = driver.deployment.servers[0]
    driver.call()
    record = driver.persisted[-1]
    (client,) = record.registered
    for changed in (
        attrs.evolve(client, redirect_uris=("http://127.0.0.1:1/callback",)),
        attrs.evolve(client, secret_expires_at=NOW),
        attrs.evolve(client, issuer="https://other.example"),
    ):
        server.tokens.clear()
        count = len(server.of("register"))
        assert Driver(driver.deployment, record=attrs.evolve(record, registered=(changed,))).call() == 200
        assert len(server.of("register")) == count + 1


# The application has changed since it got the token.


def test_a_grant_of_another_client_is_not_renewed() -> None:
    driver = driver_for("client credentials")
    driver.call()
    server = driver.deployment.servers[0]
    server.clients["other"] = {}
    application = attrs.evolve(driver.application, clients=(OAuthClient("other"),))
    later = Driver(driver.deployment, application, driver.persisted[-1], now=LATER)
    assert later.call() == 200
    assert [each["client_id"] for each in server.of("token")] == ["known", "other"]
    # The client had no issuer.  It now belongs to this issuer, and this is stored once.
    assert "other" in {each.client_id for each in later.persisted[-1].registered}
    count = len(later.persisted)
    server.tokens.clear()
    assert later.call() == 200
    assert len(later.persisted) == count + 1


@pytest.mark.parametrize("lost", ["key", "dpop", "tls"])
def test_a_token_is_not_renewed_without_the_keys_of_its_grant(lost: str) -> None:
    client = OAuthClient("known", method=ClientAuthMethod.KEY)
    driver = Driver(
        deployment(dpop=True, methods=("private_key_jwt",)), Application("V", clients=(client,), key=key(), dpop=key())
    )
    driver.deployment.servers[0].clients["known"] = {}
    driver.call()
    record = driver.persisted[-1]
    held = record.authorization
    assert held is not None
    assert held.tokens.kind == "DPoP"
    application = driver.application
    if lost == "tls":
        record = attrs.evolve(record, authorization=attrs.evolve(held, token_endpoint="http://localhost/token"))
    else:
        without: dict[str, Any] = {lost: None}
        application = attrs.evolve(application, **without)
    later = Driver(driver.deployment, application, record, now=LATER)
    if lost != "dpop":  # the user is not asked as long as the server accepts the old token
        assert later.call() == 200
        assert later.pages == []
        driver.deployment.servers[0].tokens.clear()
    if lost == "key":
        assert failure(later).blame is Blame.APPLICATION
    else:
        assert later.call() == 200
        assert len(later.pages) == 1
        assert driver.deployment.servers[0].of("token")[-1]["grant_type"] == "authorization_code"


def test_a_bound_token_is_sent_without_a_proof_if_its_key_is_lost() -> None:
    driver = Driver(deployment(dpop=True), Application("V", dpop=key()))
    driver.call()
    later = Driver(driver.deployment, Application("V"), driver.persisted[-1])
    (authorization,) = later.authorizer.authorized_request("POST").go(NOW).headers  # type: ignore[union-attr]
    assert authorization[0] == "Authorization"


@req("auth-97", "auth-95")
@pytest.mark.parametrize("issuer", [None, ISSUER])
def test_credentials_are_not_sent_to_another_issuer(issuer: str | None) -> None:
    other = AuthServer("https://other.example", iss="https://other.example")
    client = OAuthClient("known", issuer, "hush")
    server = AuthServer(methods=("client_secret_post",), clients={"known": {"client_secret": "hush"}})
    driver = Driver(Deployment(McpServer(server), [server, other]), Application("V", clients=(client,)))
    assert driver.call() == 200
    driver.deployment.mcp.trusts = other
    for each in (driver, restarted(driver)):
        error = failure(each)
        assert error.blame is Blame.APPLICATION
        assert ISSUER in str(error)
        assert "hush" not in str(error)
    assert {each.kind for each in other.asked} == {"metadata"}


@req("auth-90", "auth-95")
def test_credentials_without_an_issuer_go_to_the_first_issuer_only() -> None:
    """A malicious MCP server names its own authorization server, which would get the secret."""
    thief = AuthServer("https://thief.example", iss="https://thief.example", grants=("client_credentials",))
    robot = Application("Robot", grant=ClientCredentials(), clients=(OAuthClient("robot", secret="hush"),))
    server = AuthServer(
        grants=("client_credentials",), methods=("client_secret_post",), clients={"robot": {"client_secret": "hush"}}
    )
    used_at: dict[str, str] = {}
    drivers = [Driver(Deployment(McpServer(each), [each]), robot) for each in (server, thief)]
    for driver in drivers:
        driver.authorizer = Authorizer(MCP, robot, entropy=entropy, used_at=used_at)
    good, bad = drivers
    assert good.call() == 200
    assert ISSUER in str(failure(bad))
    assert {each.kind for each in thief.asked} == {"metadata"}
    # The issuer is also known from a stored record.
    used_at.clear()
    Authorizer(MCP, robot, entropy=entropy, record=good.persisted[-1], used_at=used_at)
    assert ISSUER in str(failure(bad))


@req("auth-118")
def test_the_application_decides_between_several_issuers() -> None:
    urls = ["https://a.example", "https://b.example", "https://c.example"]
    servers = [AuthServer(url, iss=url, clients={"known": {}}) for url in urls]
    for expected, application in [
        (0, Application("V")),
        (1, Application("V", clients=(OAuthClient("known", urls[1]),))),
        (2, Application("V", clients=(OAuthClient("known"),), prefers=("https://x.example", urls[2]))),
    ]:
        driver = Driver(Deployment(McpServer(servers[expected], issuers=("http://bad", *urls)), servers), application)
        assert driver.call() == 200
        # The issuer of a stored record is kept.
        servers[expected].tokens.clear()
        driver = restarted(driver)
        driver.authorizer = Authorizer(MCP, Application("V"), entropy=entropy, record=driver.record)
        assert driver.call() == 200
        for server in servers:
            assert bool(server.asked) is (server is servers[expected])
            server.asked.clear()


def test_an_unbound_token_is_refused_where_dpop_is_required() -> None:
    application = Application("V", dpop=key())
    unbound = Driver(
        deployment(dpop=True, mcp_scheme="DPoP", metadata={"token_endpoint": f"{ISSUER}/other"}), application
    )

    def answer(request: SendRequest) -> FlowEvent | None:
        fields = {"access_token": "x", "token_type": "bearer"}
        return reply(200, fields) if request.url.endswith("/other") else None

    unbound.deployment.override = answer
    assert failure(unbound).blame is Blame.AUTHORIZATION_SERVER
    for driver in (
        Driver(deployment(dpop=True, mcp_metadata={"dpop_bound_access_tokens_required": True})),
        Driver(deployment(dpop=True, mcp_scheme="DPoP"), Application("V", dpop=key("RS256"))),
        Driver(deployment(mcp_scheme="DPoP"), application),
    ):
        assert failure(driver).blame is Blame.APPLICATION
        assert driver.deployment.servers[0].of("authorize") == []
    # A client with a DPoP key uses it only if the authorization server lists DPoP in its metadata.
    plain = Driver(deployment(), application)
    assert plain.call() == 200
    assert "DPoP" not in plain.deployment.mcp.calls[-1]


def test_a_token_request_is_repeated_once_for_a_new_nonce() -> None:
    driver = Driver(deployment(dpop=True), Application("V", dpop=key()))
    numbers = itertools.count()

    def answer(request: SendRequest) -> FlowEvent | None:
        if not request.url.endswith("/token"):
            return None
        return reply(400, {"error": "use_dpop_nonce"}, DPoP_Nonce=f"n{next(numbers)}")

    driver.deployment.override = answer
    assert failure(driver).blame is Blame.AUTHORIZATION_SERVER
    assert next(numbers) == 2


def test_a_refresh_has_a_proof_and_is_repeated_with_the_new_nonce() -> None:
    driver = Driver(deployment(dpop=True, nonce="n1"), Application("V", dpop=key()))
    driver.call()
    server = driver.deployment.servers[0]
    server.nonce = "n2"
    driver.now = LATER
    assert driver.call() == 200
    grants = [each["grant_type"] for each in server.of("token")]
    assert grants == ["authorization_code"] * 2 + ["refresh_token"] * 2


@pytest.mark.parametrize("name", ["client credentials", "workload"])
def test_a_grant_without_a_user_needs_a_configured_or_published_client(name: str) -> None:
    driver = driver_for(name)
    driver.application = attrs.evolve(driver.application, clients=())
    driver.__attrs_post_init__()
    assert failure(driver).blame is Blame.APPLICATION
    published = attrs.evolve(driver.application, document_url="https://app.example/client.json", key=key())
    driver = Driver(driver.deployment, published)
    server = driver.deployment.servers[0]
    server.metadata["client_id_metadata_document_supported"] = True
    server.methods = ("none", "private_key_jwt")
    assert driver.call() == 200
    assert "client_assertion" in server.of("token")[-1]


@pytest.mark.parametrize("name", ["client credentials", "workload"])
def test_a_grant_that_the_server_does_not_offer_is_not_tried(name: str) -> None:
    driver = driver_for(name)
    driver.deployment.servers[0].grants = ("authorization_code",)
    assert failure(driver).blame is Blame.APPLICATION
    assert driver.deployment.servers[0].of("token") == []
    driver.deployment.servers[0].metadata["grant_types_supported"] = None
    failure(driver)
    assert len(driver.deployment.servers[0].of("token")) == 1  # the metadata does not exclude the grant


def test_after_a_failed_renewal_the_next_flow_starts_with_discovery() -> None:
    driver = driver_for("client credentials")
    driver.call()
    server, driver.now = driver.deployment.servers[0], LATER
    server.endpoints = "/moved"
    failure(driver)
    assert driver.call() == 200
    assert driver.persisted[-1].authorization.token_endpoint == f"{ISSUER}/moved/token"  # type: ignore[union-attr]


def test_a_changed_secret_starts_a_new_flow_instead_of_a_renewal() -> None:
    driver = driver_for("client credentials")
    driver.call()
    application = attrs.evolve(driver.application, clients=(OAuthClient("known", ISSUER, "new"),))
    later = Driver(driver.deployment, application, driver.persisted[-1], now=LATER)
    assert later.call() == 200
    assert later.persisted[-1].authorization.client.secret == "new"  # type: ignore[union-attr]


# Documents that are not at the expected URL.


def test_the_well_known_urls_follow_if_the_named_url_has_no_document() -> None:
    driver = Driver(deployment(mcp_named="https://mcp.example/nowhere"))
    driver.deployment.mcp.paths = (WELL_KNOWN, "/elsewhere")
    assert Driver(deployment(mcp_named="http://mcp.example/behind-a-proxy")).call() == 200
    assert Driver(deployment(mcp_named="https://mcp.example/.well-known/oauth-protected-resource/typo")).call() == 200


def test_a_server_that_names_its_document_has_no_default_endpoints() -> None:
    driver = Driver(deployment(mcp_paths=()))
    error = failure(driver)
    assert error.blame is Blame.SERVER
    assert driver.deployment.servers[0].asked == []


def test_endpoints_are_not_guessed_where_the_resource_has_a_document() -> None:
    driver = Driver(deployment(path=None))
    assert failure(driver).blame is Blame.AUTHORIZATION_SERVER
    assert {each.kind for each in driver.deployment.servers[0].asked} == {"metadata"}


@pytest.mark.parametrize("number", range(3))
def test_a_failed_metadata_request_ends_the_flow(number: int) -> None:
    server = AuthServer("https://mcp.example", None, iss=None)
    driver = Driver(Deployment(McpServer(server, paths=(), named=None), [server]))
    asked = itertools.count()
    driver.deployment.override = lambda request: reply(503) if next(asked) == number else None
    assert "503" in str(failure(driver))
    assert server.of("authorize") == []
    assert driver.call() == 200


def test_a_document_may_redirect_three_times_within_its_origin() -> None:
    driver = Driver(deployment())
    sent = iter(range(10))

    def answer(request: SendRequest) -> FlowEvent | None:
        return reply(307, None, Location=f"{WELL_KNOWN}?{number}") if (number := next(sent, 99)) < 3 else None

    driver.deployment.override = answer
    assert driver.call() == 200
    assert [each.url.removeprefix("https://mcp.example") for each in driver.deployment.requests[:4]] == [
        WELL_KNOWN,
        *(f"{WELL_KNOWN}?{number}" for number in range(3)),
    ]
    driver = Driver(deployment())
    driver.deployment.override = lambda request: reply(301, None, Location=request.url)
    failure(driver)
    assert len(driver.deployment.requests) == 5  # the URL, three redirects, and the root


# Networks.

INSIDE = "https://10.0.0.7"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mcp_issuers": (INSIDE,)}, "only 'https://10.0.0.7', which is on a private network"),
        ({"metadata": {"token_endpoint": f"{INSIDE}/token"}}, "is on a private network, and the MCP server is not"),
        ({"metadata": {"token_endpoint": "https://other.example/token"}, "iss": None}, "is at another origin"),
        ({"mcp_named": f"{INSIDE}/metadata", "mcp_paths": ()}, "which is on a private network"),
    ],
)
def test_a_url_in_another_network_is_not_requested(settings: dict[str, Any], words: str) -> None:
    driver = Driver(deployment(**settings))
    error = failure(driver)
    assert words in str(error)
    assert "trusted_origins=" in str(error)
    assert not [each for each in driver.deployment.requests if each.url.startswith((INSIDE, "https://other.example"))]


def test_an_endpoint_with_a_reserved_query_parameter_is_refused() -> None:
    driver = Driver(deployment(metadata={"authorization_endpoint": f"{ISSUER}/authorize?state=mine"}))
    assert "has state in its query" in str(failure(driver))


def test_metadata_named_in_another_network_is_read_at_the_well_known_url() -> None:
    assert Driver(deployment(mcp_named=f"{INSIDE}/metadata")).call() == 200


def test_both_servers_may_be_in_the_same_private_network() -> None:
    driver = Driver(deployment(issuer=INSIDE, iss=INSIDE))
    assert "private network" in str(failure(driver))
    answer = driver.deployment.mcp.answer

    def from_inside(request: SendRequest) -> FlowEvent | None:
        is_mcp = request.url.startswith(driver.deployment.mcp.origin)
        return attrs.evolve(answer(request), address="10.0.0.8") if is_mcp else None

    driver.deployment.override = from_inside
    assert driver.call() == 200


def test_a_token_endpoint_that_moved_to_a_private_network_is_not_used() -> None:
    driver = Driver(deployment())
    driver.call()
    driver.now = LATER
    driver.deployment.override = lambda request: (
        ForbiddenAddress("10.0.0.7") if request.url.endswith("/token") else None
    )
    assert driver.call() == 200  # the MCP server is asked, and still takes the token
    driver.deployment.servers[0].tokens.clear()
    assert "10.0.0.7" in str(failure(driver))
    driver.deployment.override = lambda request: None
    assert driver.call() == 200


def test_a_key_that_cannot_sign_ends_the_flow_and_is_blamed_on_the_application() -> None:
    def sign(claims: Any, header: Any) -> str:
        raise LookupError("Geheim")

    broken = attrs.evolve(key(), sign=sign)
    driver = Driver(deployment(dpop=True), Application("V", dpop=broken))
    error = failure(driver)
    assert error.blame is Blame.APPLICATION
    assert "a Key could not sign (LookupError); start it again" in str(error)
    assert isinstance(error.__cause__, LookupError)
