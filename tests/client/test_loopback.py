"""The browser of the user: opening it, and the pages that it gets after the redirect."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.requirements import req
from trio_mcp.core import UsageError

# The receiver is private: programs pass `visit`, or use the default.
from trio_mcp.oauth.browser import RedirectReceiver, open_in_browser, receive_returns


@asynccontextmanager
async def receiving(fixed: str | None = None, *before: str) -> AsyncIterator[RedirectReceiver]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(receive_returns, fixed, before)
        nursery.cancel_scope.cancel()


async def connect(receiver: RedirectReceiver) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", urlsplit(receiver.redirect_uri).port or 80)


async def fetch(receiver: RedirectReceiver, target: str, *, method: str = "GET", head: str = "") -> str:
    """The whole response, until the end of the connection."""
    async with await connect(receiver) as stream:
        await stream.send_all(f"{method} {target} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        return "".join([bytes(part).decode() async for part in stream])


async def test_the_page_shows_the_outcome() -> None:
    async with receiving() as receiver, trio.open_nursery() as nursery:
        answers: list[str] = []

        async def browse(query: str) -> None:
            answers.append(await fetch(receiver, f"/callback?{query}"))

        nursery.start_soon(browse, "code=1&state=stray")
        redirect = await receiver.returns.receive()
        assert redirect.query == "code=1&state=stray"
        redirect.stray()
        nursery.start_soon(browse, "code=2")
        redirect = await receiver.returns.receive()
        redirect.bad("<App>", "<script>alert(1)</script>")
        redirect.good("App")  # a second call has no effect
        nursery.start_soon(browse, "code=3")
        redirect = await receiver.returns.receive()
        redirect.good("Tom & Jerry")
        await redirect.shown.wait()
    stray, bad, good = sorted(answers, key=lambda each: ["404", "work", "Done"].index(kind_of(each)))
    assert stray.startswith("HTTP/1.1 404 ")
    assert good.startswith("HTTP/1.1 200 ")
    assert "<title>Done</title>" in good
    assert "Tom &amp; Jerry has access now. You may close this window." in good
    assert "&lt;App&gt; could not be given access: &lt;script&gt;alert(1)&lt;/script&gt;" in bad
    for page in answers:
        assert "<script" not in page
        assert "Content-Security-Policy: default-src 'none'" in page
        assert "Referrer-Policy: no-referrer" in page
        assert "Cache-Control: no-store" in page
        assert "code=" not in page


def kind_of(page: str) -> str:
    return next(each for each in ("404", "work", "Done") if each in page)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        *(
            ("GET", target)
            for target in ("/", "/favicon.ico", "/callback/?code=1", "/call?code=1", "/callback%2F?code=1")
        ),
        *((method, "/callback?code=1") for method in ("POST", "HEAD", "OPTIONS")),
    ],
)
async def test_other_requests_get_status_404(method: str, target: str) -> None:
    async with receiving() as receiver:
        assert (await fetch(receiver, target, method=method)).startswith("HTTP/1.1 404 ")
        with pytest.raises(trio.WouldBlock):
            receiver.returns.receive_nowait()


async def test_an_invalid_request_is_not_answered(autojump_clock: trio.testing.MockClock) -> None:
    async with receiving() as receiver:
        for garbage in (b"\r\n\r\n\r\n", b"\x16\x03\x01" * 100, b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 100_000):
            async with await connect(receiver) as stream:
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(garbage)
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
        async with await connect(receiver) as silent:  # a silent connection is closed after a timeout
            assert await silent.receive_some() == b""
        assert (await fetch(receiver, "/")).startswith("HTTP/1.1 404 ")


async def test_many_open_connections_do_not_block_the_redirect(autojump_clock: trio.testing.MockClock) -> None:
    async with receiving() as receiver:
        many = [await connect(receiver) for _ in range(30)]
        await wait_all_tasks_blocked()
        await trio.sleep(20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, receiver, "/callback?code=1")
            (await receiver.returns.receive()).good("App")
        for each in many:
            await each.aclose()


@pytest.mark.filterwarnings("error")
async def test_the_page_says_not_finished_if_there_is_no_outcome(autojump_clock: trio.testing.MockClock) -> None:
    async with receiving() as receiver:
        assert "Not finished yet" in await fetch(receiver, "/callback?code=1")


@req("auth-26")
async def test_the_receiver_listens_only_on_loopback_at_a_free_port(autojump_clock: trio.testing.MockClock) -> None:
    async with receiving() as one, receiving() as other:
        parts = [urlsplit(each.redirect_uri) for each in (one, other)]
        assert {(each.scheme, each.hostname, each.path) for each in parts} == {("http", "127.0.0.1", "/callback")}
        assert parts[0].port != parts[1].port


async def test_the_registered_port_is_used_again_if_it_is_free() -> None:
    async with receiving() as first, receiving(None, first.redirect_uri) as other:
        assert other.redirect_uri != first.redirect_uri
    strange = ("https://app.example/callback", "http://localhost:1/callback", "http://127.0.0.1:x/", "nothing")
    async with receiving(None, *strange, first.redirect_uri, other.redirect_uri) as again:
        assert again.redirect_uri == first.redirect_uri


async def test_a_fixed_uri_is_used_or_its_port_is_reported_in_use() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    uri = f"http://localhost:{port}/some/where"
    async with receiving(uri) as receiver, trio.open_nursery() as nursery:
        assert receiver.redirect_uri == uri
        nursery.start_soon(fetch, receiver, "/some/where?code=1")
        (await receiver.returns.receive()).good("App")
        with pytest.raises(UsageError, match=r"cannot listen at .*is the port in use"):
            await nursery.start(receive_returns, uri)


# Opening the browser.


@pytest.mark.parametrize("outcome", [True, False, webbrowser.Error("none"), OSError("none")])
async def test_the_page_is_opened_or_shown(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = []

    def open(url: str) -> bool:
        opened.append(url)
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    monkeypatch.setattr(webbrowser, "open", open)
    url = "https://as.example/authorize?a=1&b=2"
    await open_in_browser(url)
    assert opened == [url]
    out, err = capsys.readouterr()
    assert out == ""
    assert (url in err) is (outcome is not True)
