"""OAuth with a browser that is redirected to this process, over real sockets on loopback."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import trio

from tests.client.matrix import no_tasks_left
from tests.client.oauth_network import OAuthNetwork, oauth_network
from tests.client.test_oauth import RecordingStore, add
from tests.requirements import req
from trio_mcp import OAuth
from trio_mcp.core.oauth import SendRequest, read_record
from trio_mcp.errors import AuthorizationFailed
from trio_mcp.oauth import Blame

# The receiver returns it to the OAuth client only.
from trio_mcp.oauth.browser import BrowserReturn


class Browser:
    """A browser that follows the redirect to the application.  Before that it requests the `detours`."""

    def __init__(self, network: OAuthNetwork, nursery: trio.Nursery, *detours: str) -> None:
        self.pages: list[str] = []
        self._at = network
        self._nursery = nursery
        self._detours = detours

    def __call__(self, url: str) -> None:
        self._at.pages.append(url)
        self._nursery.start_soon(self._visit, url)

    async def _visit(self, url: str) -> None:
        uri = dict(parse_qsl(urlsplit(url).query))["redirect_uri"]
        for detour in self._detours:
            self.pages.append(await fetch(uri, detour))
        self.pages.append(await fetch(uri, f"{urlsplit(uri).path}?{self._at.authority.browse(url)}"))


async def fetch(uri: str, target: str) -> str:
    """Request the page with a socket of its own, because `oauth_network` replaces `trio.open_tcp_stream`."""
    parts = urlsplit(uri)
    with trio.socket.socket() as sock:
        await sock.connect(("127.0.0.1", parts.port))
        await sock.send(f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        page = b""
        while data := await sock.recv(65536):
            page += data
    return page.decode()


def browser_options(browser: Callable[[str], object], **more: Any) -> dict[str, Any]:
    return {"browser": browser, "visit": None, "redirect_uri": None, **more}


def redirect_uris(network: OAuthNetwork) -> list[str]:
    return [each["redirect_uri"] for each in network.authority.of("authorize")]


@req("auth-55")
async def test_the_redirect_is_accepted_and_other_requests_are_ignored() -> None:
    detours = ("/favicon.ico", "/callback", "/callback?code=theirs&state=theirs", "/callback?error=access_denied")
    async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
        browser = Browser(network, nursery, *detours)
        async with network.client(network.auth("<My> app", **browser_options(browser))) as client:
            await add(client)
        assert len(network.pages) == 1
        for page in browser.pages[:-1]:
            assert page.startswith("HTTP/1.1 404 ")
        assert "<p>&lt;My&gt; app has access now. You may close this window.</p>" in browser.pages[-1]
        # The port is closed now.
        with pytest.raises(OSError, match="refused"):
            await fetch(redirect_uris(network)[0], "/callback")


async def test_a_repeated_redirect_gets_the_same_page() -> None:
    """Browsers that prefetch pages do this."""
    async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
        pages: dict[str, str] = {}

        async def request_page(who: str, uri: str, target: str) -> None:
            came[len([each for each in came if each.is_set()])].set()
            pages[who] = await fetch(uri, target)

        async def before(request: SendRequest) -> None:
            if request.url.endswith("/token"):
                await came[2].wait()  # until all requests have arrived
                await trio.testing.wait_all_tasks_blocked(0.1)

        came = [trio.Event() for _ in range(3)]

        async def visit(url: str) -> None:
            network.pages.append(url)
            network.before_exchange = before
            uri = dict(parse_qsl(urlsplit(url).query))["redirect_uri"]
            target = f"/callback?{network.authority.browse(url)}"
            for who, each in (("one", target), ("other", target), ("stray", "/callback?state=1")):
                nursery.start_soon(request_page, who, uri, each)

        async with network.client(network.auth(**browser_options(visit))) as client:
            await add(client)
        assert "has access now" in pages["one"]
        assert "has access now" in pages["other"]
        assert "has been ignored" in pages["stray"]


async def test_the_page_shows_the_reason_of_a_later_failure() -> None:
    async with (
        no_tasks_left(),
        trio.open_nursery() as nursery,
        oauth_network(denies={"error": "access_denied"}) as network,
    ):
        browser = Browser(network, nursery)
        with pytest.raises(AuthorizationFailed, match="access_denied") as failed:
            async with network.client(network.auth(**browser_options(browser))):
                raise AssertionError("it was opened")
        assert failed.value.blame is Blame.USER
        assert "access_denied" in browser.pages[-1]
        network.authority.denies = {"code": "<b>spent</b>"}
        with pytest.raises(AuthorizationFailed, match="invalid_grant"):
            async with network.client(network.auth(**browser_options(browser))):
                raise AssertionError("it was opened")
        assert "Visitor could not be given access" in browser.pages[-1]
        assert "invalid_grant" in browser.pages[-1]
        assert "<b>" not in browser.pages[-1]


async def test_the_port_that_was_registered_is_used_again() -> None:
    store = RecordingStore()
    async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
        for _ in range(2):
            async with network.client(
                network.auth(store=store, **browser_options(Browser(network, nursery)))
            ) as client:
                await add(client)
            network.revoke_tokens()
            network.authority.refresh_tokens.clear()
        first, second = redirect_uris(network)
        assert first == second
        assert len(network.authority.of("register")) == 1
        with socket.socket() as sock:  # another program has the port now
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", urlsplit(first).port))
            sock.listen()
            async with network.client(
                network.auth(store=store, **browser_options(Browser(network, nursery)))
            ) as client:
                await add(client)
        assert redirect_uris(network)[-1] != first
        assert len(network.authority.of("register")) == 2
        entry = store.given[-1]
        assert entry is not None
        assert read_record(entry).registered[0].redirect_uris == (redirect_uris(network)[-1],)


async def test_the_client_listens_at_a_fixed_redirect_uri() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        uri = f"http://localhost:{sock.getsockname()[1]}/signed-in"
    async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
        async with network.client(
            network.auth(**browser_options(Browser(network, nursery), redirect_uri=uri))
        ) as client:
            await add(client)
        assert redirect_uris(network) == [uri]


async def test_a_redirect_uri_in_use_is_an_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        uri = f"http://127.0.0.1:{sock.getsockname()[1]}/callback"
        async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
            with pytest.raises(AuthorizationFailed, match="is the port in use") as failed:
                async with network.client(network.auth(**browser_options(Browser(network, nursery), redirect_uri=uri))):
                    raise AssertionError("it was opened")
            assert failed.value.blame is Blame.APPLICATION
            assert network.pages == []


async def test_waiting_for_the_user_has_a_timeout(autojump_clock: trio.testing.MockClock) -> None:
    async with no_tasks_left(), oauth_network() as network:
        start = trio.current_time()
        with pytest.raises(AuthorizationFailed, match=r"did not return to http://.* within 120 seconds") as failed:
            async with network.client(network.auth(**browser_options(network.pages.append, user_seconds=120))):
                raise AssertionError("it was opened")
        assert failed.value.blame is Blame.USER
        assert trio.current_time() - start == 120


async def test_the_system_browser_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
        browser = Browser(network, nursery)
        monkeypatch.setattr(webbrowser, "open", lambda url: trio.from_thread.run_sync(browser, url) is None)
        async with network.client(OAuth("Visitor", http_on_loopback=True)) as client:
            await add(client)
        assert len(network.pages) == 1


async def test_the_page_is_shown_also_if_the_client_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that only signs in.  The page is requested slowly, and the program closes at once."""
    at_once = BrowserReturn.page

    async def slow(self: BrowserReturn) -> tuple[int, str]:
        page = await at_once(self)
        await closing.wait()
        await trio.testing.wait_all_tasks_blocked()
        return page

    monkeypatch.setattr(BrowserReturn, "page", slow)
    closing = trio.Event()
    async with no_tasks_left(), trio.open_nursery() as nursery, oauth_network() as network:
        browser = Browser(network, nursery)
        async with network.client(network.auth(**browser_options(browser))) as client:
            await add(client)
            assert network.auths[-1].at(network.url)._runs  # the page was not requested yet, and no call waits for it
            closing.set()
        assert "You may close this window" in browser.pages[-1]
