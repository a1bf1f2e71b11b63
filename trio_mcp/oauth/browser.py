"""The user's browser: opening a page in it, and being there when it comes back.

A program that runs beside the browser is told what the user has allowed by a redirect to an address on loopback, where
it listens for as long as it waits (RFC 8252).  Anything on the machine can ask there, and a browser asks for icons and
ahead of its user, so nothing that comes is taken for the answer: it is handed on, and whoever waits says what it was.
The page is shown then, and tells how it all went.

Nothing of what comes is repeated but the reason of a failure, and that escaped; the page loads nothing and leads
nowhere.
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import attrs
import h11
import trio

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.transport.outbox import GONE

__all__ = ["BrowserReturn", "OnBrowser", "RedirectReceiver", "open_in_browser", "receive_returns"]

OnBrowser: TypeAlias = Callable[[str], "Awaitable[object] | object"]
"""Shows the page of this URL to the user, and returns without waiting for what comes of it."""

HOST = "127.0.0.1"  # RFC 8252, 8.3: not localhost, which may be another machine's
PATH = "/callback"

_HEAD = 32 * 1024  # bytes of one request; a code may be a signed JWT
_ASKING = 10.0  # seconds for a request to arrive, and again for its reply to be taken
_MOST = 20  # connections at once; a browser has two
_JUDGED = 60.0  # seconds that a browser waits to be told how it went, which takes one more request of ours


async def open_in_browser(url: str) -> None:
    """Open the user's browser, or show the URL on standard error where there is none."""
    import webbrowser

    try:
        opened = await trio.to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        sys.stderr.write(f"Open this page in a browser on this machine, and allow what it asks for:\n{url}\n")
        sys.stderr.flush()


@attrs.define(eq=False, repr=False)
class BrowserReturn:
    """The browser came to the redirect URI with this query.  Whoever looks at it says `stray`, or how it went."""

    query: str
    _page: tuple[int, str] | None = None
    _told: trio.Event = attrs.field(factory=trio.Event)
    shown: trio.Event = attrs.field(factory=trio.Event)
    """The browser has the page, or is gone."""

    def stray(self) -> None:
        """It was not the answer that is waited for."""
        self._tell(404, "This is not what is waited for", "It has been ignored. You may close this window.")

    def good(self, name: str) -> None:
        self._tell(200, "Done", f"{name} has what it needs. You may close this window.")

    def bad(self, name: str, why: str) -> None:
        self._tell(200, "That did not work", f"{name} could not be given access: {why}. You may close this window.")

    def _tell(self, status: int, title: str, text: str) -> None:
        if self._page is None:
            self._page = status, _page(title, text)
            self._told.set()

    async def page(self) -> tuple[int, str]:
        with trio.move_on_after(_JUDGED):
            await self._told.wait()
        return self._page or (200, _page("Not finished yet", "You may close this window."))


@attrs.frozen(eq=False)
class RedirectReceiver:
    """`redirect_uri` is what it is reached by; `returns` are the times that the browser has come there."""

    redirect_uri: str
    returns: trio.MemoryReceiveChannel[BrowserReturn] = attrs.field(repr=False)


async def receive_returns(
    fixed: str | None,
    before: tuple[str, ...] = (),
    *,
    task_status: trio.TaskStatus[RedirectReceiver] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen for the browser until cancelled; started once it may come.

    `fixed` is the redirect URI, where it is not for us to choose; `before` are some that were used, of which the first
    whose port is free is used again.  Raises `UsageError` for one that cannot be listened at.
    """
    listeners, redirect_uri = await _listeners(fixed, before)
    path = urlsplit(redirect_uri).path or "/"
    send, returns = trio.open_memory_channel[BrowserReturn](_MOST)
    room = trio.CapacityLimiter(_MOST)
    handler = partial(_serve, path=path, send=send, room=room)
    async with trio.open_nursery() as nursery:
        for each in listeners:
            nursery.start_soon(partial(trio.serve_listeners, handler, [each]))
        task_status.started(RedirectReceiver(redirect_uri, returns))


async def _listeners(fixed: str | None, before: tuple[str, ...]) -> tuple[list[trio.SocketListener], str]:
    if fixed is not None:
        try:
            return await _open(fixed), fixed
        except OSError as error:
            raise UsageError(
                f"nobody can listen at the redirect URI {shown(fixed)}: {error.strerror or error}; is the port in use?"
            ) from error
    for uri in before:
        # What was registered once is registered with this port, and some servers take no other.
        with suppress(OSError, ValueError):
            if urlsplit(uri).hostname == HOST:
                return await _open(uri), uri
    listeners = await trio.open_tcp_listeners(0, host=HOST)
    port = listeners[0].socket.getsockname()[1]
    return listeners, f"http://{HOST}:{port}{PATH}"


async def _open(uri: str) -> list[trio.SocketListener]:
    parts = urlsplit(uri)
    return await trio.open_tcp_listeners(parts.port or 80, host=parts.hostname)


# One connection, of one request.


async def _serve(
    stream: trio.abc.Stream, *, path: str, send: trio.MemorySendChannel[BrowserReturn], room: trio.CapacityLimiter
) -> None:
    with suppress(*GONE, h11.ProtocolError, trio.WouldBlock):
        async with stream:
            room.acquire_nowait()
            try:
                await _answer(stream, path, send)
            finally:
                room.release()


async def _answer(stream: trio.abc.Stream, path: str, send: trio.MemorySendChannel[BrowserReturn]) -> None:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD)
    with trio.move_on_after(_ASKING) as scope:
        request = await _request(stream, http)
        scope.deadline = math.inf
        target, _, query = request.target.decode("ascii", "replace").partition("?")
        came: BrowserReturn | None = None
        if request.method != b"GET" or target != path:
            status, page = 404, _page("Nothing is here", "You may close this window.")
        else:
            came = BrowserReturn(query)
            send.send_nowait(came)
            status, page = await came.page()
        scope.deadline = trio.current_time() + _ASKING
        try:
            await stream.send_all(_reply(http, status, page.encode(), bodiless=request.method == b"HEAD"))
        finally:
            if came is not None:
                came.shown.set()


async def _request(stream: trio.abc.Stream, http: h11.Connection) -> h11.Request:
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            raise trio.BrokenResourceError("it has ended")
        http.receive_data(bytes(await stream.receive_some()))


_HEADERS: Final = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),  # the address of the page holds the code
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
)


def _reply(http: h11.Connection, status: int, body: bytes, *, bodiless: bool) -> bytes:
    headers = [*_HEADERS, ("Content-Length", str(len(body)))]
    data = h11.Data(data=b"" if bodiless else body)
    parts = (h11.Response(status_code=status, headers=headers), data, h11.EndOfMessage())
    return b"".join([http.send(each) or b"" for each in parts])


def _page(title: str, text: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 1.1rem/1.5 system-ui, sans-serif; max-width: 34rem; margin: 20vh auto 0; padding: 0 1.5rem }}
  h1 {{ font-size: 1.4rem; margin: 0 0 .5rem }}
  p {{ margin: 0; overflow-wrap: anywhere }}
</style>
<h1>{html.escape(title)}</h1>
<p>{html.escape(text)}</p>
</html>
"""
