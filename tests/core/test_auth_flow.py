"""Flows: those that end badly, those of a new process, and what is made of a server that is not as it should be."""

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
    McpServer,
    Visitor,
    World,
    again,
    entropy,
    failed,
    key,
    reply,
    world,
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


# Flows that end badly, at each of their exchanges.

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


def visitor_of(name: str) -> Visitor:
    grant, settings, _ = GRANTS[name]
    clients = () if name == "code" else (OAuthClient("known", ISSUER),)
    visitor = Visitor(world(**settings), Application("V", grant=grant, clients=clients))
    visitor.world.servers[0].clients["known"] = {}

    def provider(request: SendRequest) -> FlowEvent | None:
        return reply(200, ID_JAG) if request.url.endswith("/idp") else None

    visitor.world.broken = provider
    return visitor


def upto(visitor: Visitor, number: int) -> tuple[Any, tuple[Any, ...]]:
    """A flow that has said its deed of this number, and that deed."""
    errand = visitor.authorizer.authorized_request("POST")
    errand.go(visitor.now)
    verdict = errand.refused(401, {}, visitor.now)
    assert isinstance(verdict, StartFlow)
    deeds = verdict.flow.start(visitor.now)
    for _ in range(number):
        deeds = verdict.flow.receive(visitor.act(deeds), visitor.now)
    return verdict.flow, deeds


def test_the_exchanges_are_counted_right() -> None:
    for name, (*_, count) in GRANTS.items():
        flow, deeds = upto(visitor_of(name), count)
        assert deeds[-1] == FlowDone()
        assert flow.over


@pytest.mark.parametrize(("name", "number"), EXCHANGES)
def test_a_flow_abandoned_anywhere_leaves_nothing_behind_that_hinders_the_next(name: str, number: int) -> None:
    visitor = visitor_of(name)
    flow, _ = upto(visitor, number)
    flow.abandon()
    assert visitor.call() == 200
    assert len(visitor.world.servers[0].of("register")) <= 1  # what was registered is kept


TROUBLES: list[Any] = [
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
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: type(each).__name__)
def test_trouble_anywhere_is_blamed_on_somebody_and_the_next_flow_works(
    name: str, number: int, trouble: FlowEvent
) -> None:
    visitor = visitor_of(name)
    flow, deeds = upto(visitor, number)
    if not isinstance(deeds[-1], SendRequest):
        trouble = FlowAbandoned("no time left")
    deeds = flow.receive(trouble, NOW)
    while not flow.over:
        deeds = flow.receive(visitor.act(deeds), NOW)
    visitor._note(deeds)
    # One place without a document is no failure where there is another one to ask.
    assert isinstance(deeds[-1], FlowFailed) or number == 0
    if isinstance(trouble, RequestFailed) and number > 1:
        assert "the name does not resolve" in str(deeds[-1])
    flow.abandon()
    assert visitor.call() == 200
    assert again(visitor).call() == 200


@pytest.mark.parametrize("number", range(6))
def test_what_does_not_answer_the_deed_is_the_drivers_mistake_and_changes_nothing(number: int) -> None:
    visitor = visitor_of("code")
    flow, deeds = upto(visitor, number)
    for heard in (reply(200), ReceiverReady(CALLBACK), BrowserReturned(""), Asserted("x")):
        fitting = {SendRequest: Replied, OpenReceiver: ReceiverReady, OpenBrowser: BrowserReturned}[type(deeds[-1])]
        if not isinstance(heard, fitting):
            with pytest.raises(UsageError, match=type(deeds[-1]).__name__):
                flow.receive(heard, NOW)
    while not flow.over:
        deeds = flow.receive(visitor.act(deeds), NOW)
    assert deeds[-1] == FlowDone()


@req("auth-26")
@pytest.mark.parametrize("uri", ["http://app.example/callback", "app://callback", "https://app.example/#x", ""])
def test_a_redirect_uri_is_on_loopback_or_https(uri: str) -> None:
    visitor = visitor_of("code")
    flow, deeds = upto(visitor, 2)
    with pytest.raises(UsageError, match="redirect URI"):
        flow.receive(ReceiverReady(uri), NOW)
    assert isinstance(flow.receive(visitor.act(deeds), NOW)[-1], SendRequest)


@req("auth-55")
def test_an_answer_to_somebody_else_is_discarded_and_the_right_one_waited_for() -> None:
    visitor = visitor_of("code")
    flow, deeds = upto(visitor, 4)
    assert isinstance(deeds[-1], OpenBrowser)
    right = visitor.world.browse(deeds[-1].url)
    said = dict(parse_qsl(right))
    for query in (
        "",
        "code=stolen",
        "code=stolen&state=guessed",
        "error=access_denied&state=%F0%9F",
        f"state={said['state']}&state=x&code=stolen",
        "&".join(f"a{number}=b" for number in range(100)) + right,
        "state=\ud800",
    ):
        assert isinstance(flow.receive(BrowserReturned(query), NOW)[-1], ReturnIgnored)
    deeds = flow.receive(BrowserReturned(f"?{right}"), NOW)
    assert b"code-" in deeds[-1].body  # type: ignore[union-attr]
    assert b"stolen" not in deeds[-1].body  # type: ignore[union-attr]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(exchange=st.sampled_from(EXCHANGES), status=st.sampled_from([200, 400, 401]), data=st.data())
def test_whatever_a_server_writes_a_flow_ends_well_or_says_why(
    exchange: tuple[str, int], status: int, data: st.DataObject
) -> None:
    visitor = visitor_of(exchange[0])
    flow, deeds = upto(visitor, exchange[1])
    heard = visitor.act(deeds)
    if isinstance(heard, Replied):
        said = json.loads(heard.body) if heard.body else {}
        name = data.draw(st.sampled_from([*said, "error", "error_description", "scope"]))
        heard = reply(status, {**said, name: data.draw(JSON_VALUES)})
    deeds = flow.receive(heard, NOW)
    while not flow.over:
        deeds = flow.receive(visitor.act(deeds), NOW)
    assert isinstance(deeds[-1], FlowDone | FlowFailed)
    for each in deeds:
        if isinstance(each, Persist):
            assert read_record(json.loads(json.dumps(as_json(each.record)))) == each.record


# A new process.


@req("auth-109")
def test_a_new_process_renews_its_token_with_one_request() -> None:
    visitor = Visitor(world(methods=("client_secret_basic",)))
    visitor.call()
    written = json.loads(json.dumps(as_json(visitor.persisted[-1])))
    fresh = Visitor(visitor.world, visitor.application, read_record(written), now=LATER)
    before = len(visitor.world.requests)
    assert [fresh.call(), fresh.call()] == [200, 200]
    (request,) = visitor.world.requests[before:]
    assert request.url == f"{ISSUER}/token"
    (first, renewal) = visitor.world.servers[0].of("token")
    assert renewal["resource"] == first["resource"] == MCP
    assert "scope" not in renewal
    assert fresh.persisted[-1].authorization.tokens.expires_at == LATER + 3600  # type: ignore[union-attr]


def test_a_token_is_used_until_shortly_before_its_end() -> None:
    visitor = Visitor(world())
    visitor.call()
    asked = len(visitor.world.requests)
    assert again(visitor, now=LATER - 11).call() == 200
    assert len(visitor.world.requests) == asked
    assert again(visitor, now=LATER - 10).call() == 200
    assert len(visitor.world.requests) == asked + 1


@pytest.mark.parametrize("rotates", [True, False])
def test_the_newest_refresh_token_is_kept(rotates: bool) -> None:
    visitor = Visitor(world(rotates=rotates))
    visitor.call()
    for number in range(1, 4):
        visitor.now = NOW + 3600 * number
        assert visitor.call() == 200
    assert len({each["refresh_token"] for each in visitor.world.servers[0].of("token")[1:]}) == (3 if rotates else 1)
    assert len(visitor.pages) == 1


@req("auth-109")
def test_without_refresh_tokens_the_server_says_when_a_new_one_is_needed() -> None:
    visitor = Visitor(world(refreshes=False))
    visitor.call()
    visitor.now = LATER
    assert visitor.call() == 200  # the token has ended by our clock, and not by the server's
    assert len(visitor.pages) == 1
    visitor.world.servers[0].tokens.clear()
    assert visitor.call() == 200
    assert len(visitor.pages) == 2


def test_a_token_of_unknown_lifetime_is_used_until_it_is_refused_and_then_renewed_where_the_server_still_points() -> (
    None
):
    visitor = Visitor(world(expires_in=None, mcp_scope="a"))
    visitor.call()
    visitor.now = NOW + 10**9
    assert visitor.call() == 200
    visitor.world.servers[0].tokens.clear()
    asked = len(visitor.world.requests)
    assert visitor.call() == 200
    assert [each.url.removeprefix("https://") for each in visitor.world.requests[asked:]] == [
        f"mcp.example{WELL_KNOWN}",
        "as.example/token",
    ]
    visitor.world.servers[0].tokens.clear()
    visitor.world.mcp.scope = "a b"  # which a renewed token would not have
    assert visitor.call() == 200
    assert [each["scope"] for each in visitor.world.servers[0].of("authorize")] == ["a", "a b"]


@pytest.mark.parametrize("refused_by", ["expiry", "server"])
def test_a_refresh_token_that_is_no_longer_good_is_forgotten_and_the_user_asked(refused_by: str) -> None:
    visitor = Visitor(world())
    visitor.call()
    server = visitor.world.servers[0]
    server.refresh_tokens.clear()
    server.tokens.clear()
    visitor.now = LATER if refused_by == "expiry" else NOW
    assert visitor.call() == 200
    assert len(visitor.pages) == 2
    assert len([each for each in server.of("token") if each["grant_type"] == "refresh_token"]) == 1


@pytest.mark.parametrize("trouble", [RequestFailed("no route"), reply(503), reply(429), reply(200, {})])
def test_a_refresh_that_could_not_be_made_is_made_later(trouble: FlowEvent) -> None:
    visitor = Visitor(world())
    visitor.call()
    visitor.now = LATER
    visitor.world.broken = lambda request: trouble
    failed(visitor)
    visitor.world.broken = lambda request: None
    assert visitor.call() == 200
    assert len(visitor.pages) == 1


def test_a_server_that_has_forgotten_the_client_registers_it_again() -> None:
    visitor = Visitor(world())
    visitor.call()
    server = visitor.world.servers[0]
    server.clients.clear()
    server.tokens.clear()
    assert visitor.call() == 200
    assert len(server.of("register")) == 2


def test_a_page_that_nobody_returned_from_may_be_that_of_a_forgotten_client() -> None:
    visitor = Visitor(world(refreshes=False))
    visitor.call()
    server = visitor.world.servers[0]
    server.clients.clear()
    server.tokens.clear()
    flow, deeds = upto(visitor, 3)
    assert isinstance(deeds[-1], OpenBrowser)
    *_, last = deeds = flow.receive(FlowAbandoned("closed"), NOW)
    assert isinstance(last, FlowFailed)
    assert last.error.blame is Blame.USER
    visitor._note(deeds)
    assert visitor.call() == 200
    assert len(server.of("register")) == 2
    # A page that could not be shown says nothing of the user, and may have been of such a client too.
    server.tokens.clear()
    flow, deeds = upto(visitor, 3)
    assert isinstance(deeds[-1], OpenBrowser)
    *_, last = deeds = flow.receive(FlowAbandoned("no screen", at_fault=True), NOW)
    assert isinstance(last, FlowFailed)
    assert last.error.blame is Blame.APPLICATION
    assert "no screen" in str(last.error)
    visitor._note(deeds)
    assert visitor.call() == 200
    assert len(server.of("register")) == 3
    # The same, said in so many words.
    server.tokens.clear()
    server.denies = {"error": "unauthorized_client"}
    assert failed(visitor).blame is Blame.APPLICATION
    server.denies = {}
    assert visitor.call() == 200
    assert len(server.of("register")) == 4


@pytest.mark.parametrize("told_by", ["browser", "token endpoint"])
def test_scopes_that_are_no_longer_known_are_not_asked_for_for_ever(told_by: str) -> None:
    visitor = Visitor(world(mcp_scope="old", mcp_needs={"x": "new"}))
    visitor.call()
    server = visitor.world.servers[0]
    if told_by == "browser":
        server.denies = {"error": "invalid_scope"}
    else:
        visitor.world.broken = lambda request: (
            reply(400, {"error": "invalid_scope"}) if request.url.endswith("/token") else None
        )
    error = failed(visitor, "x")
    assert (error.blame, error.code) == (Blame.AUTHORIZATION_SERVER, "invalid_scope")
    server.denies, visitor.world.broken = {}, lambda request: None
    assert visitor.call("x") == 200
    assert [each["scope"] for each in server.of("authorize")] == ["old", "old new", "new"]


def test_a_renewal_that_lost_its_refresh_token_to_another_request_bothers_nobody() -> None:
    visitor = Visitor(world())
    visitor.call()
    errand = visitor.authorizer.authorized_request("POST")
    first = errand.go(LATER)
    assert isinstance(first, StartFlow)
    visitor.authorizer._drop_refresh_token()
    first.flow.abandon()
    second = errand.go(LATER)
    assert isinstance(second, StartFlow)
    visitor.drive(second.flow)
    assert second.flow.outcome == FlowDone()
    assert isinstance(errand.go(LATER), Authorized)
    assert len(visitor.pages) == 1


def test_a_refusal_by_the_user_does_not_cost_the_registration() -> None:
    visitor = Visitor(world(denies={"error": "access_denied"}))
    assert failed(visitor).blame is Blame.USER
    assert failed(visitor).blame is Blame.USER
    assert len(visitor.world.servers[0].of("register")) == 1
    # Nor does a page that was closed, where the registration is a new one and surely known.
    visitor = Visitor(world())
    flow, _ = upto(visitor, 4)
    flow.receive(FlowAbandoned("closed"), NOW)
    assert visitor.call() == 200
    assert len(visitor.world.servers[0].of("register")) == 1


def test_a_registration_is_good_for_the_redirect_uri_it_was_made_with_and_until_its_secret_ends() -> None:
    visitor = Visitor(world(refreshes=False, expires_in=None))
    server = visitor.world.servers[0]
    visitor.call()
    record = visitor.persisted[-1]
    (client,) = record.registered
    for changed in (
        attrs.evolve(client, redirect_uris=("http://127.0.0.1:1/callback",)),
        attrs.evolve(client, secret_expires_at=NOW),
        attrs.evolve(client, issuer="https://other.example"),
    ):
        server.tokens.clear()
        count = len(server.of("register"))
        assert Visitor(visitor.world, record=attrs.evolve(record, registered=(changed,))).call() == 200
        assert len(server.of("register")) == count + 1


# What the application was when it got the token, and what it is now.


def test_what_was_granted_to_another_application_is_not_used_to_renew() -> None:
    visitor = visitor_of("client credentials")
    visitor.call()
    server = visitor.world.servers[0]
    server.clients["other"] = {}
    application = attrs.evolve(visitor.application, clients=(OAuthClient("other"),))
    later = Visitor(visitor.world, application, visitor.persisted[-1], now=LATER)
    assert later.call() == 200
    assert [each["client_id"] for each in server.of("token")] == ["known", "other"]
    # It had no issuer of its own, and belongs to this one from now on, which is stored once.
    assert "other" in {each.client_id for each in later.persisted[-1].registered}
    count = len(later.persisted)
    server.tokens.clear()
    assert later.call() == 200
    assert len(later.persisted) == count + 1


@pytest.mark.parametrize("lost", ["key", "dpop", "tls"])
def test_without_the_keys_of_before_everything_begins_anew(lost: str) -> None:
    client = OAuthClient("known", method=ClientAuthMethod.KEY)
    visitor = Visitor(
        world(dpop=True, methods=("private_key_jwt",)), Application("V", clients=(client,), key=key(), dpop=key())
    )
    visitor.world.servers[0].clients["known"] = {}
    visitor.call()
    record = visitor.persisted[-1]
    held = record.authorization
    assert held is not None
    assert held.tokens.kind == "DPoP"
    application = visitor.application
    if lost == "tls":
        record = attrs.evolve(record, authorization=attrs.evolve(held, token_endpoint="http://localhost/token"))
    else:
        without: dict[str, Any] = {lost: None}
        application = attrs.evolve(application, **without)
    later = Visitor(visitor.world, application, record, now=LATER)
    if lost != "dpop":  # as long as the server takes the old token, nobody is bothered
        assert later.call() == 200
        assert later.pages == []
        visitor.world.servers[0].tokens.clear()
    if lost == "key":
        assert failed(later).blame is Blame.APPLICATION
    else:
        assert later.call() == 200
        assert len(later.pages) == 1
        assert visitor.world.servers[0].of("token")[-1]["grant_type"] == "authorization_code"


def test_a_bound_token_whose_key_is_lost_is_sent_without_a_proof_and_refused() -> None:
    visitor = Visitor(world(dpop=True), Application("V", dpop=key()))
    visitor.call()
    later = Visitor(visitor.world, Application("V"), visitor.persisted[-1])
    (authorization,) = later.authorizer.authorized_request("POST").go(NOW).headers  # type: ignore[union-attr]
    assert authorization[0] == "Authorization"


@req("auth-97", "auth-95")
@pytest.mark.parametrize("issuer", [None, ISSUER])
def test_credentials_are_not_taken_along_to_another_issuer(issuer: str | None) -> None:
    other = AuthServer("https://other.example", iss="https://other.example")
    client = OAuthClient("known", issuer, "hush")
    server = AuthServer(methods=("client_secret_post",), clients={"known": {"client_secret": "hush"}})
    visitor = Visitor(World(McpServer(server), [server, other]), Application("V", clients=(client,)))
    assert visitor.call() == 200
    visitor.world.mcp.trusts = other
    for each in (visitor, again(visitor)):
        error = failed(each)
        assert error.blame is Blame.APPLICATION
        assert ISSUER in str(error)
        assert "hush" not in str(error)
    assert {each.kind for each in other.asked} == {"metadata"}


@req("auth-90", "auth-95")
def test_another_server_does_not_get_what_was_given_without_an_issuer() -> None:
    """One that cannot be trusted names an authorization server of its own, which would be shown the secret."""
    thief = AuthServer("https://thief.example", iss="https://thief.example", grants=("client_credentials",))
    robot = Application("Robot", grant=ClientCredentials(), clients=(OAuthClient("robot", secret="hush"),))
    server = AuthServer(
        grants=("client_credentials",), methods=("client_secret_post",), clients={"robot": {"client_secret": "hush"}}
    )
    used_at: dict[str, str] = {}
    visitors = [Visitor(World(McpServer(each), [each]), robot) for each in (server, thief)]
    for visitor in visitors:
        visitor.authorizer = Authorizer(MCP, robot, entropy=entropy, used_at=used_at)
    good, bad = visitors
    assert good.call() == 200
    assert ISSUER in str(failed(bad))
    assert {each.kind for each in thief.asked} == {"metadata"}
    # Whatever comes first, what was stored is known as well.
    used_at.clear()
    Authorizer(MCP, robot, entropy=entropy, record=good.persisted[-1], used_at=used_at)
    assert ISSUER in str(failed(bad))


@req("auth-118")
def test_of_several_issuers_the_application_has_the_first_word() -> None:
    urls = ["https://a.example", "https://b.example", "https://c.example"]
    servers = [AuthServer(url, iss=url, clients={"known": {}}) for url in urls]
    for expected, application in [
        (0, Application("V")),
        (1, Application("V", clients=(OAuthClient("known", urls[1]),))),
        (2, Application("V", clients=(OAuthClient("known"),), prefers=("https://x.example", urls[2]))),
    ]:
        visitor = Visitor(World(McpServer(servers[expected], issuers=("http://bad", *urls)), servers), application)
        assert visitor.call() == 200
        # And where it is known already, it stays.
        servers[expected].tokens.clear()
        visitor = again(visitor)
        visitor.authorizer = Authorizer(MCP, Application("V"), entropy=entropy, record=visitor.record)
        assert visitor.call() == 200
        for server in servers:
            assert bool(server.asked) is (server is servers[expected])
            server.asked.clear()


def test_a_token_that_is_not_bound_is_not_enough_for_a_server_that_wants_bound_ones() -> None:
    application = Application("V", dpop=key())
    unbound = Visitor(world(dpop=True, mcp_scheme="DPoP", metadata={"token_endpoint": f"{ISSUER}/other"}), application)

    def answer(request: SendRequest) -> FlowEvent | None:
        said = {"access_token": "x", "token_type": "bearer"}
        return reply(200, said) if request.url.endswith("/other") else None

    unbound.world.broken = answer
    assert failed(unbound).blame is Blame.AUTHORIZATION_SERVER
    for visitor in (
        Visitor(world(dpop=True, mcp_metadata={"dpop_bound_access_tokens_required": True})),
        Visitor(world(dpop=True, mcp_scheme="DPoP"), Application("V", dpop=key("RS256"))),
        Visitor(world(mcp_scheme="DPoP"), application),
    ):
        assert failed(visitor).blame is Blame.APPLICATION
        assert visitor.world.servers[0].of("authorize") == []
    # Who has a key uses it only where the authorization server says that it can.
    plain = Visitor(world(), application)
    assert plain.call() == 200
    assert "DPoP" not in plain.world.mcp.calls[-1]


def test_a_token_endpoint_that_wants_ever_new_nonces_is_obeyed_once() -> None:
    visitor = Visitor(world(dpop=True), Application("V", dpop=key()))
    numbers = itertools.count()

    def answer(request: SendRequest) -> FlowEvent | None:
        if not request.url.endswith("/token"):
            return None
        return reply(400, {"error": "use_dpop_nonce"}, DPoP_Nonce=f"n{next(numbers)}")

    visitor.world.broken = answer
    assert failed(visitor).blame is Blame.AUTHORIZATION_SERVER
    assert next(numbers) == 2


def test_a_refresh_is_proven_too_and_tried_again_with_the_nonce() -> None:
    visitor = Visitor(world(dpop=True, nonce="n1"), Application("V", dpop=key()))
    visitor.call()
    server = visitor.world.servers[0]
    server.nonce = "n2"
    visitor.now = LATER
    assert visitor.call() == 200
    grants = [each["grant_type"] for each in server.of("token")]
    assert grants == ["authorization_code"] * 2 + ["refresh_token"] * 2


@pytest.mark.parametrize("name", ["client credentials", "workload"])
def test_where_no_user_is_asked_a_client_is_brought_along_or_published(name: str) -> None:
    visitor = visitor_of(name)
    visitor.application = attrs.evolve(visitor.application, clients=())
    visitor.__attrs_post_init__()
    assert failed(visitor).blame is Blame.APPLICATION
    published = attrs.evolve(visitor.application, document_url="https://app.example/client.json", key=key())
    visitor = Visitor(visitor.world, published)
    server = visitor.world.servers[0]
    server.metadata["client_id_metadata_document_supported"] = True
    server.methods = ("none", "private_key_jwt")
    assert visitor.call() == 200
    assert "client_assertion" in server.of("token")[-1]


@pytest.mark.parametrize("name", ["client credentials", "workload"])
def test_a_grant_that_the_server_does_not_offer_is_not_tried(name: str) -> None:
    visitor = visitor_of(name)
    visitor.world.servers[0].grants = ("authorization_code",)
    assert failed(visitor).blame is Blame.APPLICATION
    assert visitor.world.servers[0].of("token") == []
    visitor.world.servers[0].metadata["grant_types_supported"] = None
    failed(visitor)
    assert len(visitor.world.servers[0].of("token")) == 1  # nobody has said that it cannot


def test_a_grant_that_is_no_longer_good_where_it_was_begins_with_discovery_next_time() -> None:
    visitor = visitor_of("client credentials")
    visitor.call()
    server, visitor.now = visitor.world.servers[0], LATER
    server.endpoints = "/moved"
    failed(visitor)
    assert visitor.call() == 200
    assert visitor.persisted[-1].authorization.token_endpoint == f"{ISSUER}/moved/token"  # type: ignore[union-attr]


def test_a_secret_that_was_changed_begins_anew_instead_of_renewing() -> None:
    visitor = visitor_of("client credentials")
    visitor.call()
    application = attrs.evolve(visitor.application, clients=(OAuthClient("known", ISSUER, "new"),))
    later = Visitor(visitor.world, application, visitor.persisted[-1], now=LATER)
    assert later.call() == 200
    assert later.persisted[-1].authorization.client.secret == "new"  # type: ignore[union-attr]


# Documents that are not where they should be.


def test_a_named_place_that_has_no_document_is_followed_by_the_well_known_ones() -> None:
    visitor = Visitor(world(mcp_named="https://mcp.example/nowhere"))
    visitor.world.mcp.paths = (WELL_KNOWN, "/elsewhere")
    assert Visitor(world(mcp_named="http://mcp.example/behind-a-proxy")).call() == 200
    assert Visitor(world(mcp_named="https://mcp.example/.well-known/oauth-protected-resource/typo")).call() == 200


def test_a_server_that_names_its_document_has_no_default_endpoints() -> None:
    visitor = Visitor(world(mcp_paths=()))
    error = failed(visitor)
    assert error.blame is Blame.SERVER
    assert visitor.world.servers[0].asked == []


def test_endpoints_are_not_guessed_where_the_resource_has_a_document() -> None:
    visitor = Visitor(world(path=None))
    assert failed(visitor).blame is Blame.AUTHORIZATION_SERVER
    assert {each.kind for each in visitor.world.servers[0].asked} == {"metadata"}


@pytest.mark.parametrize("number", range(3))
def test_nothing_is_concluded_from_a_document_that_could_not_be_asked_for(number: int) -> None:
    server = AuthServer("https://mcp.example", None, iss=None)
    visitor = Visitor(World(McpServer(server, paths=(), named=None), [server]))
    asked = itertools.count()
    visitor.world.broken = lambda request: reply(503) if next(asked) == number else None
    assert "503" in str(failed(visitor))
    assert server.of("authorize") == []
    assert visitor.call() == 200


def test_a_document_may_move_within_its_origin_and_not_for_ever() -> None:
    visitor = Visitor(world())
    sent = iter(range(10))

    def answer(request: SendRequest) -> FlowEvent | None:
        return reply(307, None, Location=f"{WELL_KNOWN}?{number}") if (number := next(sent, 99)) < 3 else None

    visitor.world.broken = answer
    assert visitor.call() == 200
    assert [each.url.removeprefix("https://mcp.example") for each in visitor.world.requests[:4]] == [
        WELL_KNOWN,
        *(f"{WELL_KNOWN}?{number}" for number in range(3)),
    ]
    visitor = Visitor(world())
    visitor.world.broken = lambda request: reply(301, None, Location=request.url)
    failed(visitor)
    assert len(visitor.world.requests) == 5  # three times the same, and the root


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
def test_what_is_named_in_another_network_is_not_asked(settings: dict[str, Any], words: str) -> None:
    visitor = Visitor(world(**settings))
    error = failed(visitor)
    assert words in str(error)
    assert "trusted_origins=" in str(error)
    assert not [each for each in visitor.world.requests if each.url.startswith((INSIDE, "https://other.example"))]


def test_an_endpoint_does_not_say_what_is_for_the_client_to_say() -> None:
    visitor = Visitor(world(metadata={"authorization_endpoint": f"{ISSUER}/authorize?state=mine"}))
    assert "has state in its query" in str(failed(visitor))


def test_metadata_that_is_named_in_another_network_may_be_where_it_is_well_known() -> None:
    assert Visitor(world(mcp_named=f"{INSIDE}/metadata")).call() == 200


def test_where_the_mcp_server_is_its_authorization_server_may_be() -> None:
    visitor = Visitor(world(issuer=INSIDE, iss=INSIDE))
    assert "private network" in str(failed(visitor))
    answer = visitor.world.mcp.answer

    def from_inside(request: SendRequest) -> FlowEvent | None:
        is_mcp = request.url.startswith(visitor.world.mcp.origin)
        return attrs.evolve(answer(request), address="10.0.0.8") if is_mcp else None

    visitor.world.broken = from_inside
    assert visitor.call() == 200


def test_a_token_endpoint_that_leads_elsewhere_since_is_not_asked_to_renew() -> None:
    visitor = Visitor(world())
    visitor.call()
    visitor.now = LATER
    visitor.world.broken = lambda request: ForbiddenAddress("10.0.0.7") if request.url.endswith("/token") else None
    assert visitor.call() == 200  # the MCP server is asked, and still takes the token
    visitor.world.servers[0].tokens.clear()
    assert "10.0.0.7" in str(failed(visitor))
    visitor.world.broken = lambda request: None
    assert visitor.call() == 200


def test_a_key_that_cannot_sign_ends_the_flow_and_is_blamed_on_the_application() -> None:
    def sign(claims: Any, header: Any) -> str:
        raise LookupError("Geheim")

    broken = attrs.evolve(key(), sign=sign)
    visitor = Visitor(world(dpop=True), Application("V", dpop=broken))
    error = failed(visitor)
    assert error.blame is Blame.APPLICATION
    assert "a Key could not sign (LookupError); start it again" in str(error)
    assert isinstance(error.__cause__, LookupError)
