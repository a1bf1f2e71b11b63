"""Clients that get their tokens with OAuth, from the first refusal to the end of the session."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.http_script import ReceivedRequest, ResponseWriter, legacy, modern
from tests.client.matrix import no_tasks_left
from tests.client.oauth_network import ISSUER, RESOURCE, oauth_network
from tests.client.sample_server import sample_server
from tests.core.auth_server import CALLBACK, AuthServer, Deployment, Driver, McpServer, jwt_parts, key
from tests.http.scripted_server import A, B, C, D, E
from tests.requirements import req
from trio_mcp import Client, OAuth, RequestError, Server, UsageError, open_client
from trio_mcp.core.oauth import SendRequest
from trio_mcp.errors import AuthorizationFailed, RemoteProtocolError
from trio_mcp.oauth import (
    Application,
    Blame,
    ClientCredentials,
    IdentityAssertion,
    MemoryTokenStore,
    OAuthClient,
    WorkloadIdentity,
)
from trio_mcp.relay import open_relay
from trio_mcp.types import ChangeKind, JsonObject

TRANSPORTS = [
    *(("http", revision) for revision in (B, C, D, E)),
    *(("http+sse", revision) for revision in (A, D)),
    *(("websocket", revision) for revision in (A, E)),
]
on_each_transport = pytest.mark.parametrize(("transport", "revision"), TRANSPORTS)
over_http = pytest.mark.parametrize(("transport", "revision"), [("http", B), ("http", D), ("http", E), ("http+sse", A)])
in_both_eras = pytest.mark.parametrize("revision", [D, E])
WHOLE_FLOW = ["metadata", "register", "authorize", "token"]


async def add(client: Client, number: int = 1) -> None:
    assert await client.call_tool("add", {"a": 1, "b": number}, returns=int) == 1 + number


# Getting and using a token.


@req("auth-01", "auth-16", "auth-17", "auth-29", "auth-48")
@on_each_transport
async def test_one_token_is_requested_and_used_for_all_calls(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), oauth_network(transport) as network:
        async with network.client(revision=revision) as client:
            assert client.revision == revision
            for number in range(3):
                await add(client, number)
        assert network.exchange_kinds() == WHOLE_FLOW
        assert len(network.pages) == 1


@on_each_transport
async def test_a_server_without_authorization_gets_no_token(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    async with (
        no_tasks_left(),
        oauth_network(transport, protected=False) as network,
        network.client(revision=revision) as client,
    ):
        await add(client)
        assert network.exchange_kinds() == network.pages == []


@over_http
async def test_an_expired_token_is_renewed_before_it_is_used(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), oauth_network(transport) as network, network.client(revision=revision) as client:
        await add(client)
        network.revoke_tokens()
        network.now += 3600
        seen = len(network.refused)
        await add(client)
        assert network.exchange_kinds() == [*WHOLE_FLOW, "token"]
        assert len(network.refused) == seen  # the server refused no request
        assert len(network.pages) == 1


@over_http
async def test_a_token_that_is_refused_in_the_middle_of_a_session_is_replaced(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), oauth_network(transport) as network, network.client(revision=revision) as client:
        for number in range(3):
            network.revoke_tokens()
            await add(client, number)
        assert len(network.pages) == 1  # a refresh needs no page for the user
        network.revoke_tokens()
        network.authority.refresh_tokens.clear()
        await add(client)
        assert len(network.pages) == 2


@over_http
async def test_calls_run_concurrently_and_wait_for_one_flow(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    server = sample_server()

    @server.tool
    async def slow() -> str:
        await trio.sleep(10)
        return "done"

    async with (
        no_tasks_left(),
        oauth_network(transport, server) as network,
        network.client(revision=revision) as client,
    ):

        async def time_of_ten_calls() -> float:
            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(partial(client.call_tool, "slow", returns=str))
            return trio.current_time() - start

        assert await time_of_ten_calls() == 10
        network.revoke_tokens()
        network.before_exchange = network.delay_tokens(3)
        # The metadata of the resource takes no time here, and the token request takes 3 seconds.
        assert await time_of_ten_calls() == 13
        assert network.exchange_kinds() == [*WHOLE_FLOW, "token"]


async def test_a_call_with_a_valid_token_does_not_wait_for_a_step_up(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network("http", scoped_server()) as network, network.client(revision=E) as client:
        assert await client.call_tool("look", returns=str) == "seen"
        network.before_consent = partial(trio.sleep, 60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(client.call_tool, "write", returns=str))
            await wait_all_tasks_blocked()
            with trio.fail_after(1):
                assert await client.call_tool("look", returns=str) == "seen"


def scoped_server() -> Server:
    server = Server("stepping")

    @server.tool(scopes=["read"])
    async def look() -> str:
        return "seen"

    @server.tool(scopes=["write"])
    async def write() -> str:
        return "written"

    @server.tool(scopes=["never"])
    async def overdo() -> str:
        raise AssertionError("this scope is never granted")

    return server


@req("auth-81", "auth-83", "auth-112")
@pytest.mark.parametrize(("transport", "revision"), [("http", D), ("http", E), ("http+sse", A)])
async def test_the_scope_of_a_tool_is_requested_when_it_is_called(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    async with (
        no_tasks_left(),
        oauth_network(transport, scoped_server(), withholds=("never",)) as network,
        network.client(revision=revision) as client,
    ):
        for _ in range(2):
            assert await client.call_tool("look", returns=str) == "seen"
            assert await client.call_tool("write", returns=str) == "written"
        asked = [set(each.get("scope", "").split()) for each in network.authority.of("authorize")]
        assert asked[-1] == {"read", "write"}
        pages = len(network.pages)
        with pytest.raises(AuthorizationFailed, match="never") as failed:
            await client.call_tool("overdo")
        assert failed.value.blame is Blame.USER
        assert len(network.pages) == pages + 1
        assert await client.call_tool("write", returns=str) == "written"


async def test_an_open_stream_is_resumed_with_a_new_token(autojump_clock: MockClock) -> None:
    server = sample_server()
    async with (
        no_tasks_left(),
        oauth_network("http", server, lifetime=100) as network,
        network.client(revision=D) as client,
    ):
        async with client.listen(tools=True) as changes:
            for _ in range(3):
                network.now += 3600
                await trio.sleep(200)  # the server ends streams with their tokens
                server.notify_list_changed("tools")
                with trio.fail_after(60):
                    assert (await anext(changes)).kind is ChangeKind.TOOLS
        assert len(network.pages) == 1


@pytest.mark.parametrize("plain_verify", [True, False])
async def test_a_stream_is_resumed_if_no_token_is_available_for_a_while(
    plain_verify: bool, autojump_clock: MockClock
) -> None:
    server = sample_server()

    asked = trio.Event()

    async def cut(request: SendRequest) -> None:
        asked.set()
        raise EOFError

    async with (
        no_tasks_left(),
        oauth_network("http", server, lifetime=100, plain_verify=plain_verify) as network,
        network.client(revision=D) as client,
        client.listen(tools=True) as changes,
    ):
        network.now, network.before_exchange = network.now + 3600, cut
        await asked.wait()
        network.before_exchange = None
        await trio.sleep(60)
        server.notify_list_changed("tools")
        with trio.fail_after(60):
            assert (await anext(changes)).kind is ChangeKind.TOOLS


@req("auth-18", "auth-48")
@in_both_eras
async def test_a_redirect_within_the_origin_keeps_its_token_and_others_are_not_followed(
    revision: str, autojump_clock: MockClock
) -> None:
    moved, tokens = f"{RESOURCE}/moved", []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        tokens.append((received.target, received.headers.get("Authorization")))
        if received.target == "/mcp":
            await out.reply(307, headers={"Location": moved})
        elif not received.target.startswith("/moved"):
            await out.json({"resource": RESOURCE, "authorization_servers": [ISSUER]})
        elif received.operation == "GET":
            await out.reply(405)
        elif tokens[-1][1] is None:
            await out.reply(401, headers={"WWW-Authenticate": "Bearer"})
        else:
            await out.json(received.answer({"resultType": "complete", "tools": []}))

    async with (
        no_tasks_left(),
        oauth_network(front=lambda _: modern(handle) if revision == E else legacy(handle)) as network,
    ):
        async with network.client(revision=revision) as client:
            await client.list_tools_page()
            assert tokens[-1][0] == "/moved"
            asked = len(tokens)
            moved = "http://127.0.0.1:5000/mcp"
            with pytest.raises(RemoteProtocolError, match="redirects to another origin"):
                await client.list_tools_page()
            assert [target for target, _ in tokens[asked:]] == ["/mcp"]
        assert network.ports == {3000, 4000}


# Stores.


class RecordingStore(MemoryTokenStore):
    """A store that records the given entries, and that can be slow or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[JsonObject | None] = []
        self.fails: str = ""
        self.seconds = 0.0

    async def get(self, server_url: str) -> JsonObject | None:
        await trio.sleep(self.seconds)
        if "get" in self.fails:
            raise ValueError("Geheim")
        return await super().get(server_url)

    async def set(self, server_url: str, entry: JsonObject | None) -> None:
        await trio.sleep(self.seconds)
        if "set" in self.fails:
            raise ValueError("Geheim")
        self.given.append(entry)
        await super().set(server_url, entry)


@on_each_transport
async def test_a_new_process_only_refreshes_the_stored_token_years_later(
    transport: str, revision: str, autojump_clock: MockClock
) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network(transport) as network:
        async with network.client(network.auth(store=store), revision=revision) as client:
            await add(client)
        for _ in range(3):
            network.revoke_tokens()
            network.now += 3 * 365 * 86400
            before, asked = len(network.exchange_kinds()), len(network.metadata_requests)
            async with network.client(network.auth(store=store), revision=revision) as client:
                await add(client)
            assert network.exchange_kinds()[before:] == ["token"]
            assert len(network.metadata_requests) == asked
            assert network.authority.of("token")[-1]["grant_type"] == "refresh_token"
        assert len(network.pages) == 1


async def test_a_valid_token_is_used_by_the_next_process(autojump_clock: MockClock) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network() as network:
        for _ in range(2):
            async with network.client(network.auth(store=store)) as client:
                await add(client)
        assert network.exchange_kinds() == WHOLE_FLOW


async def test_two_processes_share_the_renewed_tokens(autojump_clock: MockClock) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(network.auth(store=store)) as one, network.client(network.auth(store=store)) as other:
            for number in range(4):
                network.revoke_tokens()
                for client in (one, other):
                    await add(client, number)
        # Each time one client has renewed the token for both.
        assert network.exchange_kinds() == [*WHOLE_FLOW, *["token"] * 4]


async def test_clients_of_one_object_share_their_tokens(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        auth = network.auth()
        for _ in range(2):
            async with network.client(auth) as one, network.client(auth) as other:
                await add(one)
                await add(other)
        assert network.exchange_kinds() == WHOLE_FLOW


async def test_a_failing_store_is_logged_and_the_calls_go_on(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = RecordingStore()
    store.fails = "set"
    async with no_tasks_left(), oauth_network() as network:
        auth = network.auth(store=store)
        async with network.client(auth) as client:
            await add(client)
            assert "cannot store the tokens" in caplog.text
            store.seconds, start = math.inf, trio.current_time()
            network.revoke_tokens()
            await add(client)
            # Both `get` (another process may have stored tokens) and `set` are abandoned after a timeout.
            assert trio.current_time() - start == 60
            store.seconds, store.fails = 0, "get"
            network.revoke_tokens()
            await add(client)
            assert "cannot read the tokens" in caplog.text
        with pytest.raises(UsageError, match="the token store failed") as failed:
            async with network.client(network.auth(store=store)):
                raise AssertionError("it was opened")
        assert isinstance(failed.value.__cause__, ValueError)
        assert "Geheim" not in caplog.text
        assert "Geheim" not in str(failed.value)


async def test_a_store_without_async_functions_is_refused(autojump_clock: MockClock) -> None:
    class Plain:
        def get(self, server_url: str) -> None: ...

        def set(self, server_url: str, entry: object) -> None: ...

    store: Any = Plain()
    async with no_tasks_left(), oauth_network() as network:
        with pytest.raises(UsageError, match="get and set of the token store must be async def"):
            async with network.client(network.auth(store=store)):
                raise AssertionError("it was opened")


async def test_tokens_that_cannot_be_stored_replace_the_stored_ones(autojump_clock: MockClock) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(network.auth(store=store)) as client:
            await add(client)
        store.fails = "set"
        async with network.client(network.auth(store=store)) as client:
            for number in range(3):
                network.revoke_tokens()
                await add(client, number)
        used = [each["refresh_token"] for each in network.authority.of("token")[1:]]
        assert len(set(used)) == len(used) == 3  # each one is used once
        assert len(network.pages) == 1


async def test_a_refresh_is_not_repeated_if_its_token_is_refused(autojump_clock: MockClock) -> None:
    async def judge(request: SendRequest) -> None:
        network.accepts_tokens = b"grant_type=refresh_token" not in request.body

    async with no_tasks_left(), oauth_network() as network:
        network.before_exchange = judge
        async with network.client(network.auth(store=RecordingStore())) as client:
            await add(client)
            network.revoke_tokens()
            with pytest.raises(AuthorizationFailed, match="has just issued"):
                await add(client)
            await add(client)
        asked = [each["grant_type"] for each in network.authority.of("token")]
        assert asked == ["authorization_code", "refresh_token", "authorization_code"]


async def test_waiting_for_a_store_has_a_timeout(autojump_clock: MockClock) -> None:
    store = RecordingStore()
    store.seconds = math.inf
    async with no_tasks_left(), oauth_network() as network:
        start = trio.current_time()
        with pytest.raises(UsageError, match="took longer than 30 seconds"):
            async with network.client(network.auth(store=store)):
                raise AssertionError("it was opened")
        assert trio.current_time() - start == 30


@pytest.mark.parametrize("entry", [{}, {"form": 1, "server_url": "https://other.example", "registered": []}])
async def test_an_invalid_entry_of_a_store_is_an_error(entry: JsonObject, autojump_clock: MockClock) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network() as network:
        await store.set(network.url, entry)
        with pytest.raises(UsageError, match=r"cannot be read|another server"):
            async with network.client(network.auth(store=store)):
                raise AssertionError("it was opened")


# Without a user.


async def test_a_program_gets_tokens_without_a_user(autojump_clock: MockClock) -> None:
    settings = {"methods": ("client_secret_basic",), "grants": ("client_credentials",), "registers": False}
    machine = Application("Robot", grant=ClientCredentials(), clients=(OAuthClient("robot", secret="geheim"),))
    async with no_tasks_left(), oauth_network(**settings) as network:
        network.authority.clients["robot"] = {"client_secret": "geheim"}
        async with network.client(network.auth(machine)) as client:
            await add(client)
            network.now += 7200
            network.revoke_tokens()
            await add(client)
        assert network.exchange_kinds() == ["metadata", "token", "token"]


@req("auth-90")
def test_a_client_id_is_not_sent_to_another_issuer() -> None:
    robot = Application("Robot", grant=ClientCredentials(), clients=[OAuthClient("robot", secret="geheim")])
    server = AuthServer(
        grants=("client_credentials",), methods=("client_secret_post",), clients={"robot": {"client_secret": "geheim"}}
    )
    thief = AuthServer("https://thief.example", grants=("client_credentials",))
    oauth = OAuth(robot)
    first, second = (
        Driver(Deployment(McpServer(each, resource=url), [each]), robot)
        for each, url in ((server, "https://mcp.example/mcp"), (thief, "https://mcp.example/other"))
    )
    for driver in (first, second):
        driver.authorizer = oauth.at(driver.deployment.mcp.resource or "").authorizer
    assert first.call() == 200
    with pytest.raises(AuthorizationFailed, match=r"is registered at 'https://as\.example'"):
        second.call()
    assert not thief.of("token")


async def test_the_assertion_callback_is_called_for_each_token(autojump_clock: MockClock) -> None:
    grant = "urn:ietf:params:oauth:grant-type:jwt-bearer"
    workload = Application("Robot", grant=WorkloadIdentity(), clients=(OAuthClient("robot"),))
    asked: list[tuple[str, str | None]] = []

    async def vouch(audience: str, resource: str | None) -> str:
        asked.append((audience, resource))
        return f"vouched {len(asked)}"

    async with no_tasks_left(), oauth_network(grants=(grant,), registers=False) as network:
        network.authority.clients["robot"] = {}
        async with network.client(network.auth(workload, assertion=vouch)) as client:
            await add(client)
            network.revoke_tokens()
            await add(client)
        assert asked == [(ISSUER, RESOURCE)] * 2
        assert [each["assertion"] for each in network.authority.of("token")] == ["vouched 1", "vouched 2"]


@pytest.mark.parametrize(
    ("vouch", "why"), [(lambda *_: 1 / 0, "ZeroDivisionError"), (lambda *_: None, "must return text, got NoneType")]
)
async def test_an_assertion_callback_without_a_result_fails_the_flow(
    vouch: Callable[..., Any], why: str, autojump_clock: MockClock
) -> None:
    workload = Application("Robot", grant=WorkloadIdentity(), clients=(OAuthClient("robot"),))
    async with (
        no_tasks_left(),
        oauth_network(grants=("urn:ietf:params:oauth:grant-type:jwt-bearer",), registers=False) as network,
    ):
        with pytest.raises(AuthorizationFailed, match=why) as failed:
            async with network.client(network.auth(workload, assertion=vouch)):
                raise AssertionError("it was opened")
        assert failed.value.blame is Blame.APPLICATION


async def test_a_relay_gets_tokens_for_its_upstream_server(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        async with open_relay(network.url, auth=network.auth()) as server, open_client(server) as client:
            await add(client)
        assert len(network.pages) == 1


# Tokens that are bound to a key.


async def test_every_request_proves_the_key_with_the_newest_nonce(autojump_clock: MockClock) -> None:
    bound = Application("Visitor", dpop=key())
    proofs: list[dict[str, Any]] = []
    refused: list[str] = []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        """Each answer has the nonce for the next request."""
        nonce = {"DPoP-Nonce": f"n{len(proofs)}"}
        if received.target.startswith("/.well-known/"):
            await out.json({"resource": RESOURCE, "authorization_servers": [ISSUER]})
            return
        scheme, _, token = received.headers.get("Authorization", "").partition(" ")
        claims = jwt_parts(received.headers["DPoP"])[1] if scheme == "DPoP" else {}
        if not claims or (proofs and claims.get("nonce") != f"n{len(proofs) - 1}"):
            wrong = "use_dpop_nonce" if claims else "invalid_token"
            challenge = {"WWW-Authenticate": f'DPoP error="{wrong}"', **({} if not proofs else nonce)}
            refused.append(wrong)
            await out.reply(401, headers=challenge)
            return
        assert token in network.authority.tokens
        proofs.append({**claims, "method": received.method, "url": f"{RESOURCE}{received.target}"})
        nonce = {"DPoP-Nonce": f"n{len(proofs) - 1}"}
        if received.operation == "server/discover":
            found = {"supportedVersions": [E], "capabilities": {"tools": {}}, "resultType": "complete"}
            await out.json(received.answer(found), headers=nonce)
        else:
            await out.json(received.answer({"resultType": "complete", "tools": []}), headers=nonce)

    async with no_tasks_left(), oauth_network(front=lambda _: handle, dpop=True) as network:
        async with network.client(network.auth(bound), revision=E) as client:
            for _ in range(3):
                await client.list_tools_page()
        assert len({each["jti"] for each in proofs}) == len(proofs) >= 4
        assert [(each["htm"], each["htu"]) for each in proofs] == [(each["method"], each["url"]) for each in proofs]
        assert refused == ["invalid_token"]  # nonces of successful answers are used as well


async def test_a_program_authenticates_with_a_key(autojump_clock: MockClock) -> None:
    robot = Application("Robot", grant=ClientCredentials(), clients=[OAuthClient("robot")], key=key())
    settings = {"methods": ("private_key_jwt",), "grants": ("client_credentials",), "registers": False}
    async with no_tasks_left(), oauth_network(**settings) as network:
        network.authority.clients["robot"] = {}
        async with network.client(network.auth(robot)) as client:
            await add(client)
        (asked,) = network.authority.of("token")
        assert jwt_parts(asked["client_assertion"])[1]["sub"] == "robot"


# Invalid options.


class Stream(trio.abc.Stream):
    """A stream that is not used."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...
    async def wait_send_all_might_not_block(self) -> None: ...
    async def receive_some(self, max_bytes: int | None = None) -> bytes: ...  # type: ignore[empty-body]
    async def aclose(self) -> None: ...


@pytest.mark.parametrize("target", [["python", "server.py"], Server("x"), Stream()])
def test_auth_is_refused_for_targets_without_http(target: Any) -> None:
    with pytest.raises(UsageError, match=r"does not support the options: auth$"):
        open_client(target, auth=OAuth("Visitor"))


@req("auth-24", "auth-53")
@pytest.mark.parametrize("url", ["http://mcp.example/mcp", "ws://mcp.example/ws", "http://127.0.0.1:3000/mcp"])
def test_auth_is_refused_for_unencrypted_urls(url: str) -> None:
    with pytest.raises(UsageError, match=r"tokens cannot be sent .* is not https"):
        open_client(url, auth=OAuth("Visitor"))
    if "127" in url:
        with pytest.raises(UsageError, match="http_on_loopback=True allows it"):
            open_client(url, auth=OAuth("Visitor"))
    else:
        with pytest.raises(UsageError, match=r"tokens cannot be sent .* is not https"):
            open_client(url, auth=OAuth("Visitor", http_on_loopback=True))


def test_an_invalid_auth_option_is_refused_without_its_value() -> None:
    for given in ("Geheim", {"Authorization": "Geheim"}):
        with pytest.raises(UsageError, match=r"auth must be an OAuth object, got (str|dict)") as failed:
            open_client("https://mcp.example/mcp", auth=given)  # type: ignore[arg-type]
        assert "Geheim" not in str(failed.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"application": 7}, "must be a name or an Application, got int"),
        ({"visit": "x", "redirect_uri": CALLBACK}, "visit must be a function"),
        ({"browser": "x"}, "browser must be a function"),
        ({"store": "tokens.json"}, r"like FileTokenStore\(path\); str does not"),
        ({"visit": print}, "visit needs redirect_uri"),
        ({"redirect_uri": "http://app.example/callback"}, "is not https"),
        ({"redirect_uri": "https://app.example/callback"}, "or the option visit"),
        ({"user_seconds": "10"}, "user_seconds must be a number of seconds"),
        ({"application": Application("V", grant=WorkloadIdentity())}, "WorkloadIdentity needs the option assertion"),
        (
            {"application": Application("V", grant=IdentityAssertion("https://idp.example", OAuthClient("x")))},
            "IdentityAssertion needs the option assertion",
        ),
    ],
)
def test_invalid_options_of_oauth_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        OAuth(**{"application": "Visitor", **options})


@pytest.mark.parametrize(("transport", "revision"), [("http", E), ("http", D), ("http+sse", A), ("websocket", E)])
@pytest.mark.parametrize("own", [{"authorization": "Basic Z2VoZWlt"}, lambda: {"DPoP": "Z2VoZWlt"}])
async def test_auth_and_an_own_authorization_header_are_refused_together(
    own: Any, transport: str, revision: str, autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), oauth_network(transport) as network:
        with pytest.raises(UsageError, match="leave out one of the two") as failed:
            async with network.client(revision=revision, headers=own):
                raise AssertionError("it was opened")
        assert "Z2VoZWlt" not in str(failed.value)


# Secrets.


@pytest.mark.parametrize(("transport", "revision"), [("http", E), ("http+sse", A), ("websocket", E)])
async def test_no_secret_is_in_a_log_a_repr_or_an_error(
    transport: str, revision: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = RecordingStore()
    async with no_tasks_left(), oauth_network(transport, scoped_server()) as network:
        auth = network.auth(store=store)
        errors = []
        async with network.client(auth, revision=revision) as client:
            reprs = [repr(auth), repr(store), repr(auth.at(network.http_url)), repr(client)]
            for deny in ({"error": "access_denied"}, {"error": "invalid_scope"}):
                network.authority.denies = deny
                try:
                    await client.call_tool("write")
                except (
                    AuthorizationFailed,
                    RequestError,
                ) as error:  # a WebSocket keeps the scopes with which it was opened
                    errors.append(repr(error) + str(error.__cause__))
                network.authority.denies = {}
        secrets = [*network.authority.tokens, *network.authority.refresh_tokens, "s3cret"]
        secrets += [each[name] for each in network.authority.of("authorize") for name in ("state", "code_challenge")]
        secrets += [each[name] for each in network.authority.of("token") for name in ("code", "code_verifier")]
        said = caplog.text + "".join(reprs) + "".join(errors)
        assert not [each for each in secrets if each in said]
        assert len(secrets) >= 7


@req("auth-22")
@pytest.mark.parametrize("transport", ["http", "http+sse", "websocket"])
async def test_a_token_in_the_text_of_a_refusal_is_not_shown(transport: str, autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        words = f"The user of {received.headers['Authorization']} has no access"
        await out.reply(403, words.encode(), {"WWW-Authenticate": "Bearer"}, "text/plain")

    async with (
        no_tasks_left(),
        oauth_network(transport, front=lambda network: network.require_token(handle)) as network,
    ):
        with pytest.raises(AuthorizationFailed) as failed:
            async with network.client():
                raise AssertionError("it was opened")
        assert "Bearer [secret] has no access" in str(failed.value.__cause__)
        (token,) = network.authority.tokens
        assert token not in "".join(traceback.format_exception(failed.value))


async def test_the_tap_gets_no_messages_of_the_authorization_server(autojump_clock: MockClock) -> None:
    seen: list[bytes] = []
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(tap=lambda way, data: seen.append(data)) as client:
            await add(client)
        whole = b"".join(seen)
        assert b"Authorization: Bearer access-" in whole  # it gets the messages to the MCP server
        for secret in ("s3cret", *network.authority.refresh_tokens, "127.0.0.1:4000\r\n", "code_verifier"):
            assert secret.encode() not in whole


async def test_own_headers_are_not_sent_to_the_authorization_server(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(headers={"X-Key": "Geheim", "Cookie": "Geheim"}) as client:
            await add(client)
        assert network.exchanges
        assert network.metadata_requests
        assert "Geheim" not in str([each.headers for each in network.exchanges])
        assert "Geheim" not in str(network.metadata_requests)


# A page that is open.


async def test_the_page_outlives_the_call_that_needed_it(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network, network.client() as client:
        network.revoke_tokens()
        network.authority.refresh_tokens.clear()
        network.before_consent = partial(trio.sleep, 100)
        for _ in range(9):
            with trio.move_on_after(10):
                await add(client)
                raise AssertionError("the user has not consented yet")
        await add(client)
        assert len(network.pages) == 2


async def test_a_page_is_abandoned_when_the_last_client_closes(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        auth = network.auth()
        network.before_consent = trio.sleep_forever
        for _ in range(2):
            with trio.move_on_after(30):
                async with network.client(auth):
                    raise AssertionError("it was opened")
            await wait_all_tasks_blocked()
        assert len(network.pages) == 2
        network.before_consent = None
        async with network.client(auth) as client:
            await add(client)


async def test_the_page_stays_open_for_the_other_clients(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        auth = network.auth()
        network.before_consent = partial(trio.sleep, 60)

        async def visit(patience: float) -> None:
            with trio.move_on_after(patience):
                async with network.client(auth) as client:
                    await add(client)
                    done.append(patience)

        done: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit, 30)
            await wait_all_tasks_blocked()
            nursery.start_soon(visit, 90)
        assert done == [90]
        assert len(network.pages) == 1


async def test_a_refresh_completes_if_the_client_is_closed_meanwhile(autojump_clock: MockClock) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(network.auth(store=store)) as client:
            network.revoke_tokens()
            network.before_exchange = network.delay_tokens(1)
            with trio.move_on_after(0.5):
                await add(client)
        async with network.client(network.auth(store=store)) as client:
            await add(client)
        assert len(network.pages) == 1


async def test_a_session_is_ended_without_a_page_for_the_user(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(revision=D) as client:
            await add(client)
            network.revoke_tokens()
            network.authority.refresh_tokens.clear()
        assert len(network.pages) == 1


async def test_opening_a_client_waits_for_a_slow_user(autojump_clock: MockClock) -> None:
    for transport, revision in (("http", E), ("http", B), ("http+sse", A), ("websocket", D)):
        async with no_tasks_left(), oauth_network(transport) as network:
            network.before_consent = partial(trio.sleep, 590)
            async with network.client(revision=revision) as client:
                await add(client)


@req("cache-17")
async def test_a_result_cached_for_one_token_is_not_used_with_the_next(autojump_clock: MockClock) -> None:
    """The user may have signed in as another person."""
    asked: list[str] = []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        asked.append(received.operation)
        await out.json(
            received.answer({"resultType": "complete", "tools": [], "ttlMs": 10**9, "cacheScope": "private"})
        )

    async with (
        no_tasks_left(),
        oauth_network(front=lambda network: network.require_token(modern(handle))) as network,
        network.client(revision=E) as client,
    ):
        for _ in range(2):
            await client.list_tools_page()
            await client.list_tools_page()
            network.revoke_tokens()
            await client.request("tools/list")  # is not cached
        assert asked == ["tools/list"] * 4


async def test_a_denial_is_not_followed_by_a_second_page_for_another_era(autojump_clock: MockClock) -> None:
    async with (
        no_tasks_left(),
        oauth_network(front=lambda network: network.require_token(legacy(no_event_stream))) as network,
    ):
        async with network.client():
            pass
        pages = len(network.pages)
        network.authority.denies = {"error": "access_denied"}
        with pytest.raises(AuthorizationFailed, match="access_denied"):
            async with network.client(network.auth()):  # this server is known to be of the legacy era
                raise AssertionError("it was opened")
        assert len(network.pages) == pages + 1


async def no_event_stream(received: ReceivedRequest, out: ResponseWriter) -> None:
    await out.reply(405 if received.method == "GET" else 400)


async def test_a_denial_is_not_followed_by_a_second_page_for_an_idle_session(autojump_clock: MockClock) -> None:
    async with (
        no_tasks_left(),
        oauth_network("http+sse", lifetime=100) as network,
        network.client(revision=D) as client,
    ):
        await add(client)
        network.revoke_tokens()
        network.authority.refresh_tokens.clear()
        network.authority.denies = {"error": "access_denied"}
        network.now += 3600
        await trio.sleep(3600)  # the stream ends with its token
        assert len(network.pages) == 2
        network.authority.denies = {}
        await add(client)


async def test_a_denial_is_not_followed_by_a_second_page_for_a_stream(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        raise AssertionError("it has no token")

    async with (
        no_tasks_left(),
        oauth_network(front=lambda network: modern(network.require_token(handle))) as network,
        network.client(revision=E) as client,
    ):
        network.authority.denies = {"error": "access_denied"}
        with pytest.raises(AuthorizationFailed):
            async with client.listen(tools=True) as changes:
                await anext(changes)
        assert len(network.pages) == 1


async def test_a_stream_is_requested_again_after_a_temporary_failure(autojump_clock: MockClock) -> None:
    server = sample_server()

    async def fail(request: SendRequest) -> None:
        failed.append(request.url)
        if len(failed) < 3:
            raise EOFError

    failed: list[str] = []
    async with no_tasks_left(), oauth_network("http", server) as network, network.client(revision=E) as client:
        network.revoke_tokens()
        network.before_exchange = fail
        async with client.listen(tools=True) as changes:
            assert len(failed) == 3
            server.notify_list_changed("tools")
            assert (await anext(changes)).kind is ChangeKind.TOOLS


async def test_a_client_closed_during_a_refresh_opens_no_page(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        async with network.client() as client:
            network.revoke_tokens()
            network.authority.refresh_tokens.clear()  # the refresh is refused, and the next step would ask the user
            network.before_exchange = network.delay_tokens(1)
            with trio.move_on_after(0.5):
                await add(client)
        assert network.authority.of("token")[-1]["grant_type"] == "refresh_token"
        assert len(network.pages) == 1


async def test_an_entry_of_another_server_is_not_used(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = RecordingStore()
    async with no_tasks_left(), oauth_network() as network:
        async with network.client(network.auth(store=store)) as client:
            (*_, entry) = store.given
            assert entry is not None
            held = entry["authorization"]
            other = {**entry, "server_url": f"{ISSUER}/mcp"}
            other["authorization"] = {**held, "tokens": {**held["tokens"], "access": "Geheim"}}
            await store.set(network.url, other)
            network.revoke_tokens()
            await add(client)
        assert "returned the entry of another server" in caplog.text
        assert "Geheim" not in network.refused
