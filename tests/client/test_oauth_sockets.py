"""Whole OAuth flows over loopback: an authorization server, a user with a browser, and each fault of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from tests.http.auth_site import AuthSite, Hold, auth_site, protected_by
from tests.peers.programs.oauth_browser import Browser
from tests.requirements import req
from trio_mcp import Client, OAuth, open_client
from trio_mcp.errors import AuthorizationFailed
from trio_mcp.oauth import MemoryTokenStore

PATIENCE = 60.0  # seconds for all of a test, which takes one


@attrs.define
class User:
    """A user with a browser.  `urls` are the pages that were opened, `ends` the final status of each."""

    nursery: trio.Nursery
    urls: list[str] = attrs.field(factory=list)
    ends: list[int] = attrs.field(factory=list)

    async def open(self, url: str) -> None:
        """Start the visit, and return at once, as a browser does."""
        self.urls.append(url)
        self.nursery.start_soon(trio.to_thread.run_sync, partial(self._visit, url))

    def _visit(self, url: str) -> None:
        browser = Browser()
        back = browser.visit(url)
        with suppress(OSError):  # the client that opened the page may have stopped listening
            self.ends.append(browser.ask(back)[0])


@asynccontextmanager
async def browser_user() -> AsyncIterator[User]:
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            yield User(nursery)


def auth_of(user: User, **options: Any) -> OAuth:
    return OAuth("Visitor", browser=user.open, http_on_loopback=True, **options)


async def text_of(client: Client, tool: str, **arguments: str) -> str:
    return await client.call_tool(tool, arguments, returns=str)


@req("auth-16", "auth-29", "auth-55", "auth-82", "auth-112")
@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_a_user_grants_access_in_the_browser_and_later_a_further_scope(revision: str) -> None:
    store = MemoryTokenStore()
    async with auth_site() as site, protected_by(site) as url, browser_user() as user:
        async with open_client(url, auth=auth_of(user, store=store), revision=revision) as client:
            assert await text_of(client, "who") == "notes:read"
            assert await text_of(client, "write", text="milk") == "milk was written"
            assert len(user.urls) == 2
            site.server.expire()
            assert await text_of(client, "who") == "notes:read notes:write"
        async with open_client(url, auth=auth_of(user, store=store), revision=revision) as client:
            assert await text_of(client, "who") == "notes:read notes:write"
        assert [each["grant_type"] for each in site.server.of("token")] == ["authorization_code"] * 2 + [
            "refresh_token"
        ]
        assert len(site.server.of("register")) == 1
        site.server.expire()
        site.server.refresh_tokens.clear()  # as if another client had used it
        async with open_client(url, auth=auth_of(user, store=store), revision=revision) as client:
            assert await text_of(client, "who") == "notes:read notes:write"
    assert len(user.urls) == 3
    assert user.ends == [200] * 3


def wrong_issuer(site: AuthSite) -> None:
    site.server.metadata["issuer"] = "https://other.example"


def no_pkce(site: AuthSite) -> None:
    site.server.metadata["code_challenge_methods_supported"] = None


def mixed_up(site: AuthSite) -> None:
    site.server.iss = "https://other.example"


def denied(site: AuthSite) -> None:
    site.server.denies = {"error": "access_denied"}


def moved(site: AuthSite, path: str, to: str) -> None:
    site.server.redirects[path] = to


def bad(how: str, kind: str, site: AuthSite) -> None:
    getattr(site, how).add(kind)


METADATA = "oauth-authorization-server"
PLACE = f"/.well-known/{METADATA}"
# The fault of the server, and a part of the error message.
FAULTS = {
    "another issuer": (wrong_issuer, "names another issuer"),
    "no PKCE": (no_pkce, "does not list the PKCE method S256"),
    "an answer of another issuer": (mixed_up, "came back with the issuer 'https://other.example'"),
    "a user who denies": (denied, "issued no token: 'access_denied'"),
    "metadata at another origin": (partial(moved, path=PLACE, to="http://localhost:9/"), "publishes no metadata"),
    "metadata sent around": (partial(moved, path=PLACE, to=PLACE), "publishes no metadata"),
    "registration at another path": (partial(moved, path="/register", to="/token"), "refused to register"),
    "tokens at another origin": (
        partial(moved, path="/token", to="http://localhost:9/token"),
        "issued no token: 'status 307'",
    ),
    "dead metadata": (partial(bad, "unanswered", METADATA), "the connection ended before there was a reply"),
    "dead registration": (partial(bad, "unanswered", "register"), "the connection ended before there was a reply"),
    "dead tokens": (partial(bad, "unanswered", "token"), "the connection ended before there was a reply"),
    "unavailable metadata": (partial(bad, "unavailable", METADATA), "answered 503"),
    "unavailable registration": (
        partial(bad, "unavailable", "register"),
        "refused to register the application: 'status 503'",
    ),
    "unavailable tokens": (partial(bad, "unavailable", "token"), "issued no token: 'status 503'"),
}


@req("auth-85", "auth-91", "auth-103")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_flow_fails_at_a_faulty_server_and_works_after_the_repair(fault: str) -> None:
    async with auth_site() as site, protected_by(site) as url, browser_user() as user:
        server = site.server
        good = (dict(server.metadata), server.iss, dict(server.denies), dict(server.redirects))
        spoil, words = FAULTS[fault]
        spoil(site=site)
        auth = auth_of(user)
        with pytest.raises(AuthorizationFailed, match=words):
            async with open_client(url, auth=auth):
                raise AssertionError("let in")
        assert not server.tokens
        site.unanswered.clear()
        site.unavailable.clear()
        server.metadata, server.iss, server.denies, server.redirects = good
        async with open_client(url, auth=auth) as client:
            assert await text_of(client, "who") == "notes:read"


@pytest.mark.parametrize("kind", [METADATA, "register", "authorize", "token"])
async def test_a_cancelled_wait_for_a_slow_server_does_not_affect_the_next_flow(kind: str) -> None:
    async with auth_site() as site, protected_by(site) as url, browser_user() as user:
        auth, hold = auth_of(user), Hold()
        site.held[kind] = hold
        impatient = trio.CancelScope()

        async def give_up() -> None:
            with impatient:
                async with open_client(url, auth=auth):
                    raise AssertionError("let in")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
            await hold.arrived.wait()
            impatient.cancel()
        hold.release.set()
        async with open_client(url, auth=auth) as client:
            assert await text_of(client, "who") == "notes:read"
