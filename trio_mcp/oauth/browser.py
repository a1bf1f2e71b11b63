"""The user's browser: open a page in it, and receive the redirect back to this program.

The authorization server redirects the browser to an address on loopback, where this program listens while it waits
(RFC 8252).  Any program on the machine can send requests there, and a browser prefetches pages and asks for icons.  So
no request is accepted here as the answer: each one is passed on as a `BrowserReturn`, and the flow decides whether it
is the answer.  After this decision the browser gets its page, which shows the outcome.

The page repeats nothing of the request except the reason of a failure, escaped.  It loads no other resources and has
no links.
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
import trio

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.http.h1 import RequestReader, UnreadableRequest, head_bytes
from trio_mcp.core.messages import Limits
from trio_mcp.transport.wire import GONE

__all__ = ["BrowserReturn", "OnBrowser", "RedirectReceiver", "open_in_browser", "receive_returns"]

OnBrowser: TypeAlias = Callable[[str], "Awaitable[object] | object"]
"""Shows the page at this URL to the user, and returns without waiting for the user."""

HOST = "127.0.0.1"  # RFC 8252, 8.3: not localhost, which may be the name of another machine
PATH = "/callback"

_LIMITS = Limits(header_bytes=32 * 1024)  # of one request; a code may be a signed JWT
_IO_SECONDS = 10.0  # for a request to arrive, and again for its response to be sent
_MAX_CONNECTIONS = 20  # at once; a browser has two
_OUTCOME_SECONDS = 60.0  # for which a browser waits for its page; the flow sends one more request meanwhile


async def open_in_browser(url: str) -> None:
    """Open the page in the user's browser.  If no browser can be opened, write the URL to standard error."""
    import webbrowser

    try:
        opened = await trio.to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        sys.stderr.write(f"Open this page in a browser on this machine, and allow the access it asks for:\n{url}\n")
        sys.stderr.flush()


@attrs.define(eq=False, repr=False)
class BrowserReturn:
    """A request of the browser for the redirect URI, with this query.

    The flow calls `stray`, `good` or `bad`, and the browser gets the page for it.
    """

    query: str
    _page: tuple[int, str] | None = None
    _decided: trio.Event = attrs.field(factory=trio.Event)
    shown: trio.Event = attrs.field(factory=trio.Event)
    """Set when the browser has the page, or has closed the connection."""

    def stray(self) -> None:
        """Show that this request was not the expected answer."""
        self._decide(404, "This is not the expected answer", "It has been ignored. You may close this window.")

    def good(self, name: str) -> None:
        """Show that the application `name` has its token."""
        self._decide(200, "Done", f"{name} has access now. You may close this window.")

    def bad(self, name: str, why: str) -> None:
        """Show that the application `name` got no token, and the reason."""
        self._decide(200, "That did not work", f"{name} could not be given access: {why}. You may close this window.")

    def _decide(self, status: int, title: str, text: str) -> None:
        if self._page is None:
            self._page = status, _page(title, text)
            self._decided.set()

    async def page(self) -> tuple[int, str]:
        """Wait for the outcome, and return the status and the HTML of its page."""
        with trio.move_on_after(_OUTCOME_SECONDS):
            await self._decided.wait()
        return self._page or (200, _page("Not finished yet", "You may close this window."))


@attrs.frozen(eq=False)
class RedirectReceiver:
    """The receiver's address, and the channel of the requests that the browser sent there."""

    redirect_uri: str
    returns: trio.MemoryReceiveChannel[BrowserReturn] = attrs.field(repr=False)


async def receive_returns(
    fixed: str | None,
    before: tuple[str, ...] = (),
    *,
    task_status: trio.TaskStatus[RedirectReceiver] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen for the browser until cancelled.  Reports `started` when the sockets listen.

    `fixed` is the redirect URI if the program has set one.  `before` are redirect URIs used earlier: the first one
    whose port is free is used again.  Raises `UsageError` if it cannot listen at `fixed`.
    """
    listeners, redirect_uri = await _listeners(fixed, before)
    path = urlsplit(redirect_uri).path or "/"
    send, returns = trio.open_memory_channel[BrowserReturn](_MAX_CONNECTIONS)
    room = trio.CapacityLimiter(_MAX_CONNECTIONS)
    task_status.started(RedirectReceiver(redirect_uri, returns))
    await trio.serve_listeners(partial(_serve, path=path, send=send, room=room), listeners)


async def _listeners(fixed: str | None, before: tuple[str, ...]) -> tuple[list[trio.SocketListener], str]:
    if fixed is not None:
        try:
            return await _open(fixed), fixed
        except OSError as error:
            raise UsageError(
                f"cannot listen at the redirect URI {shown(fixed)}: {error.strerror or error}; is the port in use?"
            ) from error
    for uri in before:
        # An earlier registration names this port, and some servers accept no other.
        with suppress(OSError, ValueError):
            if urlsplit(uri).hostname == HOST:
                return await _open(uri), uri
    listeners = await trio.open_tcp_listeners(0, host=HOST)
    port = listeners[0].socket.getsockname()[1]
    return listeners, f"http://{HOST}:{port}{PATH}"


async def _open(uri: str) -> list[trio.SocketListener]:
    parts = urlsplit(uri)
    return await trio.open_tcp_listeners(parts.port or 80, host=parts.hostname)


# One connection, which carries one request.


async def _serve(
    stream: trio.abc.Stream, *, path: str, send: trio.MemorySendChannel[BrowserReturn], room: trio.CapacityLimiter
) -> None:
    with suppress(*GONE, UnreadableRequest, trio.WouldBlock):
        async with stream:
            room.acquire_nowait()
            try:
                await _answer(stream, path, send)
            finally:
                room.release()


async def _answer(stream: trio.abc.Stream, path: str, send: trio.MemorySendChannel[BrowserReturn]) -> None:
    reader = RequestReader(_LIMITS)
    with trio.move_on_after(_IO_SECONDS) as scope:
        while (request := reader.head()) is None:
            if not (data := await stream.receive_some()):
                return  # the connection ended before its request
            reader.feed(bytes(data))
        scope.deadline = math.inf
        target, _, query = request.target.partition("?")
        visit: BrowserReturn | None = None
        if request.method != "GET" or target != path:
            status, page = 404, _page("Nothing is here", "You may close this window.")
        else:
            visit = BrowserReturn(query)
            send.send_nowait(visit)
            status, page = await visit.page()
        scope.deadline = trio.current_time() + _IO_SECONDS
        try:
            body = page.encode()
            head = head_bytes(status, (*_HEADERS, ("Content-Length", str(len(body)))), None)
            await stream.send_all(head if request.method == "HEAD" else head + body)
        finally:
            if visit is not None:
                visit.shown.set()


_HEADERS: Final = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),  # the address of the page contains the code
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
)


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
