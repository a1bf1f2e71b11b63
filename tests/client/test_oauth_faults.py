"""Faults at each step of an OAuth flow: the call raises an error, and the next call works."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.client.http_script import Handler, ReceivedRequest, ResponseWriter, legacy, modern
from tests.client.matrix import no_tasks_left
from tests.client.oauth_network import ISSUER, RESOURCE, OAuthNetwork, oauth_network
from tests.core.auth_server import key
from tests.http.scripted_server import B, D, E
from tests.requirements import req
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step
from trio_mcp import Client, UsageError
from trio_mcp.core.oauth import SendRequest
from trio_mcp.errors import AuthorizationFailed, ReplyBroken, Unauthorized, UpgradeRefused
from trio_mcp.oauth import Application, Blame, Key, MemoryTokenStore

in_both_eras = pytest.mark.parametrize("revision", [D, E])
Action = Callable[[], Awaitable[None]]


async def answer_tools(received: ReceivedRequest, out: ResponseWriter) -> None:
    if received.operation == "GET":
        await out.reply(405)
    elif "id" not in received.message:
        await out.reply(202)
    else:
        await out.json(received.answer({"resultType": "complete", "tools": [], "ttlMs": 0, "cacheScope": "private"}))


def protected_server(revision: str) -> Callable[[OAuthNetwork], Handler]:
    return lambda network: network.require_token(modern(answer_tools) if revision == E else legacy(answer_tools))


STEPS = ["oauth-protected-resource", "oauth-authorization-server", "/register", "the user", "/token"]


def act_at_step(network: OAuthNetwork, step: str, action: Action) -> list[str]:
    """Run the action at this step from now on.  The returned list has one entry for each time."""
    done: list[str] = []

    async def act(event: str) -> None:
        if step in event:
            done.append(step)
            await action()

    async def before(request: SendRequest) -> None:
        await act(request.url)

    network.before_exchange, network.before_consent = before, partial(act, "the user")
    return done


def repair(network: OAuthNetwork) -> None:
    network.before_exchange = network.before_consent = None
    network.authority.denies = {}


async def close_connection() -> None:
    raise EOFError


async def refused(client: Client) -> AuthorizationFailed:
    with pytest.raises(AuthorizationFailed) as failed:
        await client.list_tools_page()
    return failed.value


def restart(network: OAuthNetwork, client: Client) -> None:
    """Make both sides forget all credentials, so that the next flow has all steps."""
    network.revoke_tokens()
    network.authority.refresh_tokens.clear()
    network.authority.clients.clear()
    network.exchanges.clear()
    for each in network.auths:
        each.store = MemoryTokenStore()
        for place in each._servers.values():
            place.authorizer.record = type(place.authorizer.record)(place.authorizer.server_url)


@pytest.mark.parametrize("step", STEPS)
@in_both_eras
async def test_a_flow_may_be_cut_off_at_each_step(step: str, revision: str, autojump_clock: MockClock) -> None:
    async with (
        no_tasks_left(),
        oauth_network(front=protected_server(revision)) as network,
        network.client(revision=revision) as client,
    ):
        restart(network, client)
        done = act_at_step(network, step, close_connection if step != "the user" else deny(network))
        error = await refused(client)
        assert done
        assert error.blame is (Blame.USER if step == "the user" else Blame.NETWORK)
        assert isinstance(
            error.__cause__, ReplyBroken if step in ("/register", "/token") else Unauthorized | ReplyBroken
        )
        repair(network)
        await client.list_tools_page()
        await client.list_tools_page()


def deny(network: OAuthNetwork) -> Action:
    async def denying() -> None:
        network.authority.denies = {"error": "access_denied", "error_description": "I would rather not"}

    return denying


@pytest.mark.parametrize("step", STEPS)
@in_both_eras
async def test_a_flow_may_hang_at_each_step(step: str, revision: str, autojump_clock: MockClock) -> None:
    async with (
        no_tasks_left(),
        oauth_network(front=protected_server(revision)) as network,
        network.client(revision=revision) as client,
    ):
        restart(network, client)
        done = act_at_step(network, step, trio.sleep_forever)
        start = trio.current_time()
        error = await refused(client)
        assert done
        # The documents have several URLs, and each request has its own timeout.
        assert 30 <= trio.current_time() - start <= (600 if step == "the user" else 90)
        assert error.blame is (Blame.USER if step == "the user" else Blame.NETWORK)
        repair(network)
        await client.list_tools_page()


@pytest.mark.parametrize("step", STEPS)
@in_both_eras
async def test_a_waiting_call_may_be_cancelled_at_each_step_and_the_flow_goes_on(
    step: str, revision: str, autojump_clock: MockClock
) -> None:
    async with (
        no_tasks_left(),
        oauth_network(front=protected_server(revision)) as network,
        network.client(revision=revision) as client,
    ):
        restart(network, client)
        done = act_at_step(network, step, partial(trio.sleep, 10))
        with trio.move_on_after(5) as scope:
            await client.list_tools_page()
        assert done
        assert scope.cancelled_caught
        await client.list_tools_page()
        assert len(network.pages) == 2  # one of the first flow, one of this flow
        assert len(network.exchanges) == len(STEPS) - 1


@pytest.mark.parametrize("step", STEPS)
@in_both_eras
async def test_a_client_may_be_closed_at_each_step_and_the_next_starts_a_flow(
    step: str, revision: str, autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), oauth_network(front=protected_server(revision)) as network:
        auth = network.auth()
        done = act_at_step(network, step, trio.sleep_forever)
        with trio.move_on_after(5):
            async with network.client(auth, revision=revision):
                raise AssertionError("it was opened")
        assert done
        repair(network)
        async with network.client(auth, revision=revision) as client:
            await client.list_tools_page()


@pytest.mark.parametrize("step", STEPS)
async def test_all_waiting_calls_get_the_same_failure_and_the_next_works(step: str, autojump_clock: MockClock) -> None:
    async with (
        no_tasks_left(),
        oauth_network(front=protected_server(E)) as network,
        network.client(revision=E) as client,
    ):
        restart(network, client)
        act_at_step(network, step, close_connection if step != "the user" else deny(network))
        errors: list[AuthorizationFailed] = []

        async def fail() -> None:
            errors.append(await refused(client))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(fail)
        assert len({str(each) for each in errors}) == 1
        assert len({id(each) for each in errors}) == 5  # each error has its own traceback
        repair(network)
        await client.list_tools_page()


def test_a_call_may_be_cancelled_at_any_step_of_a_flow() -> None:
    async def scenario(attempt: Attempt) -> None:
        async with oauth_network(front=protected_server(E)) as network, network.client(revision=E) as client:
            restart(network, client)
            with attempt.window():
                await client.list_tools_page()
            await client.list_tools_page()
            assert len(network.pages) <= 2  # one page for both flows

    assert cancel_at_each_step(scenario, watch="the scenario") > 3


@pytest.mark.parametrize("watch", ["an authorization", "the scenario"])
@in_both_eras
def test_a_client_may_be_cancelled_at_any_step_of_a_flow(revision: str, watch: str) -> None:
    async def scenario(attempt: Attempt) -> None:
        async with oauth_network(front=protected_server(revision)) as network:
            auth = network.auth()
            with attempt.window():
                async with network.client(auth, revision=revision) as client:
                    await client.list_tools_page()
            assert not auth.at(network.url)._runs
            async with network.client(auth, revision=revision) as client:
                await client.list_tools_page()

    assert cancel_at_each_step(scenario, watch=watch) > 5


@pytest.mark.full
def test_any_task_may_be_cancelled_at_any_step() -> None:
    async def scenario(attempt: Attempt) -> None:
        async with oauth_network(front=protected_server(D)) as network:
            auth = network.auth()
            with attempt.window():
                async with network.client(auth, revision=D) as client:
                    await client.list_tools_page()
            async with network.client(auth, revision=D) as client:
                await client.list_tools_page()

    assert cancel_at_each_step(scenario, watch=any_task) > 50


# Replies of the servers.


@req("auth-85")
@pytest.mark.parametrize(
    ("settings", "blame", "why"),
    [
        ({"metadata": {"code_challenge_methods_supported": None}}, Blame.AUTHORIZATION_SERVER, "S256"),
        ({"metadata": {"issuer": "https://evil.example"}}, Blame.AUTHORIZATION_SERVER, "another issuer"),
        ({"metadata": {"token_endpoint": "http://as.example/token"}}, Blame.AUTHORIZATION_SERVER, "is not https"),
        ({"iss": "https://evil.example"}, Blame.AUTHORIZATION_SERVER, "came back with"),
        ({"registers": False}, Blame.APPLICATION, "no client id"),
        ({"denies": {"error": "access_denied"}}, Blame.USER, "access_denied"),
        ({"metadata": {"padding": "x" * 300_000}}, Blame.AUTHORIZATION_SERVER, "publishes no metadata"),
        ({"path": None}, Blame.AUTHORIZATION_SERVER, "publishes no metadata"),
    ],
)
async def test_an_error_has_the_blame_and_the_reason(
    settings: dict[str, Any], blame: Blame, why: str, autojump_clock: MockClock
) -> None:
    async with no_tasks_left(), oauth_network(front=protected_server(E), **settings) as network:
        with pytest.raises(AuthorizationFailed, match=why) as failed:
            async with network.client():
                raise AssertionError("it was opened")
        assert failed.value.blame is blame
        assert not network.authority.of("token")


@pytest.mark.parametrize("revision", [B, D, E])
async def test_a_server_that_refuses_each_token_is_an_error(revision: str, autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network(front=protected_server(revision)) as network:
        network.accepts_tokens = False
        with pytest.raises(AuthorizationFailed, match="has just issued") as failed:
            async with network.client(revision=revision):
                raise AssertionError("it was opened")
        assert isinstance(failed.value.__cause__, Unauthorized)
        assert failed.value.__cause__.status == 401
        assert len(network.pages) == 1


@pytest.mark.parametrize(("status", "challenge"), [(401, "Basic realm=x"), (403, ""), (403, "Bearer")])
async def test_a_refusal_that_no_token_can_fix_has_the_text_of_the_server(
    status: int, challenge: str, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(status, b"Only on Tuesdays", {"WWW-Authenticate": challenge}, "text/plain")

    async with (
        no_tasks_left(),
        oauth_network(front=lambda network: modern(handle)) as network,
        network.client(revision=E) as client,
    ):
        error = await refused(client)
        assert isinstance(error.__cause__, Unauthorized)
        assert "Only on Tuesdays" in str(error.__cause__)
        assert network.pages == []


async def test_a_metadata_document_is_read_up_to_a_limit(autojump_clock: MockClock) -> None:
    async def endless(received: ReceivedRequest, out: ResponseWriter) -> None:
        if not received.target.startswith("/.well-known/"):
            await out.reply(401, headers={"WWW-Authenticate": "Bearer"})
            return
        await out.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{")
        while True:
            sent.append(65536)
            await out.write(b" " * 65536)

    sent: list[int] = []
    async with no_tasks_left(), oauth_network(front=lambda network: endless) as network:
        with pytest.raises(AuthorizationFailed):
            async with network.client():
                raise AssertionError("it was opened")
    assert sum(sent) < 20 * 256 * 1024


async def test_a_recovered_failure_is_not_the_cause_of_a_later_error(autojump_clock: MockClock) -> None:
    settings: dict[str, Any] = {"path": "/.well-known/openid-configuration", "denies": {"error": "access_denied"}}
    async with no_tasks_left(), oauth_network(front=protected_server(E), **settings) as network:
        done = act_at_step(network, "oauth-authorization-server", close_connection)
        with pytest.raises(AuthorizationFailed, match="access_denied") as failed:
            async with network.client():
                raise AssertionError("it was opened")
        assert done
        assert isinstance(failed.value.__cause__, Unauthorized)


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
@pytest.mark.parametrize("name", ["browser", "visit"])
async def test_an_exception_of_a_callback_is_the_cause_of_the_error(
    name: str, kind: type[BaseException], autojump_clock: MockClock
) -> None:
    def failing(url: str) -> str:
        raise kind("Geheim")

    async with no_tasks_left(), oauth_network() as network:
        callbacks = {"visit": None, "redirect_uri": None, "browser": failing} if name == "browser" else {name: failing}
        with pytest.raises(AuthorizationFailed, match=f"the callback {name} failed .{kind.__name__}") as failed:
            async with network.client(network.auth(**callbacks)):
                raise AssertionError("it was opened")
        assert failed.value.blame is Blame.APPLICATION
        assert isinstance(failed.value.__cause__, kind)
        assert "Geheim" not in str(failed.value)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "must return the URL .*, got NoneType"),
        ("http://x/?code=1&state=wrong", "another request"),
        ("nothing", "must return the URL to which the browser was redirected, which begins with http"),
        ("http://[x/?code=1", "must return the URL .*, which begins with http"),
    ],
)
async def test_an_invalid_result_of_visit_is_an_error(answer: Any, why: str, autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        with pytest.raises(AuthorizationFailed, match=why) as failed:
            async with network.client(network.auth(visit=lambda url: answer)):
                raise AssertionError("it was opened")
        assert failed.value.blame is (Blame.APPLICATION if answer is None else Blame.USER)


async def test_blanks_around_the_result_of_visit_are_removed(autojump_clock: MockClock) -> None:
    async def copied(url: str) -> str:
        return f" {await network.visit(url)} \r\n"

    async with no_tasks_left(), oauth_network() as network, network.client(network.auth(visit=copied)) as client:
        assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3


async def test_a_key_that_cannot_sign_fails_the_flow_and_the_request(autojump_clock: MockClock) -> None:
    class DeviceRemoved(Exception):
        """The device with the key was removed."""

    good, works = key(), [True] * 2

    def sign(claims: Any, header: Any) -> str:
        if not works:
            raise DeviceRemoved
        works.pop()
        return good.sign(claims, header)

    application = Application("Visitor", dpop=Key("ES256", sign, good.jwk))

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.target.startswith("/.well-known/"):
            await out.json({"resource": RESOURCE, "authorization_servers": [ISSUER]})
        elif "DPoP" not in received.headers:
            await out.reply(401, headers={"WWW-Authenticate": "DPoP"})
        else:
            await answer_tools(received, out)

    async with no_tasks_left(), oauth_network(front=lambda network: modern(handle), dpop=True) as network:
        async with network.client(network.auth(application), revision=E) as client:
            await client.list_tools_page()
            with pytest.raises(UsageError, match="could not sign") as failed:
                await client.list_tools_page()
            assert isinstance(failed.value.__cause__, DeviceRemoved)
        async with network.client(network.auth(application), revision=E) as client:
            error = await refused(client)
            assert "could not sign" in str(error)
            assert isinstance(error.__cause__, DeviceRemoved)
            works += [True] * 2
            await client.list_tools_page()


async def test_the_refusal_of_a_websocket_is_the_cause_of_the_error(autojump_clock: MockClock) -> None:
    async with no_tasks_left(), oauth_network("websocket", denies={"error": "access_denied"}) as network:
        with pytest.raises(AuthorizationFailed, match="access_denied") as failed:
            async with network.client():
                raise AssertionError("it was opened")
        assert isinstance(failed.value.__cause__, UpgradeRefused)
        assert failed.value.__cause__.status == 401
