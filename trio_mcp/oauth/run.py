"""The driver of one flow: carries out each action that the flow asks for, and reports the result as an event.

A failed action is an event too, so a flow always has an outcome, except if it is ended from outside.  Then it has none,
and the next request that needs a token starts another flow.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import trio

from trio_mcp.core.errors import McpError
from trio_mcp.core.messages import Limits
from trio_mcp.core.oauth.discovery import network_at
from trio_mcp.core.oauth.flow import (
    AskAssertion,
    Asserted,
    BrowserReturned,
    Flow,
    FlowAbandoned,
    FlowAction,
    FlowEvent,
    FlowFailed,
    ForbiddenAddress,
    OpenBrowser,
    OpenReceiver,
    Persist,
    ReceiverReady,
    Replied,
    RequestFailed,
    ReturnIgnored,
    SendRequest,
)
from trio_mcp.oauth.browser import BrowserReturn, RedirectReceiver, receive_returns
from trio_mcp.transport.dial import locate
from trio_mcp.transport.http_pool import HttpPool, HttpReply
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import HandlerEscape, contained

if TYPE_CHECKING:
    from trio_mcp.oauth.client import TokenSource

__all__ = ["FlowRun"]

_log = logging.getLogger("trio_mcp.oauth")

_END_SECONDS = 2.0  # for a token that may have just been issued to arrive and be stored
_PAGE_SECONDS = 2.0  # for the browser to load the page that shows the outcome


class _AddressChanged(McpError):
    """A connection leads to an address to which the request must not be sent."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the connection leads to {address}")
        self.address = address


class FlowRun:
    """Runs one flow.

    `settled` is set once the flow has an outcome, or can have none.  `over` is set once its task ends.
    """

    def __init__(self, authorization: TokenSource, flow: Flow) -> None:
        self.flow = flow
        self.settled = trio.Event()
        self.over = trio.Event()
        self._authorization = authorization
        self._oauth = authorization.oauth
        self._scope = trio.CancelScope()
        self._ending = self._storing = False
        self._receiver: RedirectReceiver | None = None
        self._visit: BrowserReturn | None = None  # the browser's last request, which waits for its page
        self._deadline = math.inf  # for the user
        self._error: BaseException | None = None  # of the last action
        self._action: FlowAction | None = None  # the action that the flow waits for
        self._request: SendRequest | None = None  # the request being sent
        self._addresses: dict[tuple[str, int], str] = {}  # the addresses of the connections, by host and port

    def end(self) -> None:
        """End the flow, because its outcome is not needed any more.  A step that must not be interrupted gets
        `_END_SECONDS` seconds."""
        self._ending = True
        self._scope.deadline = trio.current_time() + _END_SECONDS if self._delicate else -math.inf

    @property
    def _delicate(self) -> bool:
        """Whether a code or a refresh token may be in use, a token is being stored, or the outcome is being shown."""
        action = self._action
        return self._storing or self.flow.over or (isinstance(action, SendRequest) and action.uses_up)

    async def drive(self) -> None:
        with self._scope:
            if await self._authorization.found(self.flow):
                return
            async with (
                open_nursery() as nursery,
                HttpPool(ssl_context=self._oauth.ssl_context, limits=Limits(), connect=self._connect) as pool,
            ):
                self._nursery, self._pool = nursery, pool
                event: FlowEvent | None = None
                while True:
                    actions = self._feed(event)
                    self._action = actions[-1]
                    for action in actions:
                        await self._persist(action)
                    if self.flow.over:
                        break
                    if self._ending and not self._delicate:
                        return  # the next action would ask the user
                    event = await self._do(actions[-1])
                self.settled.set()
                await self._show_outcome()

    def fail(self, error: Exception) -> None:
        """End the flow after an error in this program, so that the waiting requests fail and do not try it again."""
        self._error = error
        self._report(FlowAbandoned("an internal error"))

    def _feed(self, event: FlowEvent | None) -> tuple[FlowAction, ...]:
        authorizer = self._authorization.authorizer
        try:
            if event is None:
                return authorizer.start(self.flow, time.time())
            return self._report(event)
        except Exception as error:  # noqa: BLE001  # the program's own function signs for a Key
            self._error = error
            why = str(error) if isinstance(error, McpError) else f"a Key could not sign ({type(error).__name__})"
            return self._report(FlowAbandoned(why))

    def _report(self, event: FlowEvent) -> tuple[FlowAction, ...]:
        actions = self._authorization.authorizer.receive(self.flow, event, time.time())
        if actions and isinstance(last := actions[-1], FlowFailed):
            last.error.__cause__ = self._error
        return actions

    async def _persist(self, action: FlowAction) -> None:
        if isinstance(action, Persist):
            self._storing = True
            await self._authorization.persist(action.record)
            self._storing = False

    # Actions.

    async def _do(self, action: FlowAction) -> FlowEvent:
        self._error = None
        try:
            match action:
                case SendRequest():
                    return await self._send(action)
                case OpenReceiver():
                    return await self._listen()
                case OpenBrowser():
                    return await self._open_browser(action)
                case ReturnIgnored():
                    return await self._wait_for_browser()
                case _:
                    assert isinstance(action, AskAssertion)
                    return await self._ask_assertion(action)
        except McpError as error:
            self._error = error
            return FlowAbandoned(str(error))

    async def _send(self, request: SendRequest) -> FlowEvent:
        self._request = request
        origin, _ = locate(request.url)
        with trio.move_on_after(request.seconds):
            try:
                async with self._pool.request(request.method, request.url, request.headers, request.body) as reply:
                    body = await _read_up_to(reply, request.body_bytes + 1)
                    return Replied(reply.status, reply.headers, body, self._addresses.get((origin.host, origin.port)))
            except _AddressChanged as error:
                return ForbiddenAddress(error.address)
            except McpError as error:
                self._error = error
                return RequestFailed(str(error))
        return RequestFailed(f"there was no response within {request.seconds:g} seconds")

    async def _connect(self, host: str, port: int) -> trio.abc.Stream:
        """Open a connection for the pool, and check its address before the first byte of TLS or of the request.

        To resolve the name earlier and check that address is not enough: the name may resolve to another address
        the next time.
        """
        stream = await trio.open_tcp_stream(host, port)
        assert self._request is not None
        origin, _ = locate(self._request.url)
        peer = getattr(stream, "socket", None)
        if peer is None or (host, port) != (origin.host, origin.port):
            return stream  # it is in memory, or leads to a proxy, which resolves the server's name itself
        address: str = peer.getpeername()[0]
        if self._request.networks is not None and network_at(address) not in self._request.networks:
            await trio.aclose_forcefully(stream)
            raise _AddressChanged(address)
        self._addresses[host, port] = address
        return stream

    async def _listen(self) -> FlowEvent:
        oauth = self._oauth
        if oauth.visit is not None:
            assert oauth.redirect_uri is not None
            return ReceiverReady(oauth.redirect_uri)
        before = [uri for each in self.flow.record.registered for uri in each.redirect_uris]
        self._receiver = await self._nursery.start(receive_returns, oauth.redirect_uri, tuple(before))
        return ReceiverReady(self._receiver.redirect_uri)

    async def _open_browser(self, page: OpenBrowser) -> FlowEvent:
        oauth = self._oauth
        self._deadline = trio.current_time() + page.seconds
        if oauth.visit is None:
            _log.info("waiting for the user to allow access in the browser: %s", page.issuer)
            with trio.move_on_at(self._deadline):
                event = await self._call("browser", oauth.browser, page.url)
                return event if isinstance(event, FlowAbandoned) else await self._wait_for_browser()
        else:
            with trio.move_on_at(self._deadline):
                returned = await self._call("visit", oauth.visit, page.url)
                if isinstance(returned, FlowAbandoned):
                    return returned
                return self._read_visit(returned)
        return self._no_return()

    def _read_visit(self, returned: object) -> FlowEvent:
        """Check the result of the callback `visit`, which a user may have pasted."""
        wanted = "the URL to which the browser was redirected"
        if not isinstance(returned, str):
            return FlowAbandoned(f"visit must return {wanted}, got {type(returned).__name__}", at_fault=True)
        query = ""
        with suppress(ValueError):
            query = urlsplit(returned.strip()).query
        if not query:
            return FlowAbandoned(f"visit must return {wanted}, which begins with {self._oauth.redirect_uri}?")
        return BrowserReturned(query)

    async def _wait_for_browser(self) -> FlowEvent:
        """Wait for the browser's next request, until the deadline."""
        if self._visit is not None:
            self._visit.stray()
        if self._receiver is None:
            return FlowAbandoned("visit returned the answer to another request")
        with trio.move_on_at(self._deadline):
            self._visit = await self._receiver.returns.receive()
            return BrowserReturned(self._visit.query)
        return self._no_return()

    def _no_return(self) -> FlowAbandoned:
        uri = self._oauth.redirect_uri if self._receiver is None else self._receiver.redirect_uri
        seconds = self._oauth.rules.user_seconds
        return FlowAbandoned(f"the browser did not return to {uri} within {seconds:g} seconds")

    async def _ask_assertion(self, action: AskAssertion) -> FlowEvent:
        returned = await self._call("assertion", self._oauth.assertion, action.audience, action.resource)
        if isinstance(returned, FlowAbandoned):
            return returned
        return (
            Asserted(returned)
            if isinstance(returned, str)
            else FlowAbandoned(f"assertion must return text, got {type(returned).__name__}")
        )

    async def _call(self, name: str, callback: Callable[..., Any] | None, *args: object) -> Any:
        """Call a callback of the program and return its result.  If it raises, return `FlowAbandoned`; its exception
        becomes the cause of the flow's failure."""
        assert callback is not None
        call = partial(callback, *args)

        async def answer() -> Any:
            result = call()
            return await result if inspect.isawaitable(result) else result

        try:
            return await contained(answer, name)
        except Exception as error:  # noqa: BLE001  # the program raised it
            self._error = error.__cause__ if isinstance(error, HandlerEscape) else error
            return FlowAbandoned(f"the callback {name} failed ({type(self._error).__name__})", at_fault=True)

    async def _show_outcome(self) -> None:
        """Show the outcome to the browser, in each of its requests: browsers that prefetch send more than one."""
        if self._visit is None or self._receiver is None:
            return
        name, outcome = self._oauth.application.name, self.flow.outcome
        visits = [self._visit]
        with suppress(trio.WouldBlock):
            while True:
                visits.append(self._receiver.returns.receive_nowait())
        for each in visits:
            if each.query != self._visit.query:
                each.stray()
            elif isinstance(outcome, FlowFailed):
                each.bad(name, outcome.error.why)
            else:
                each.good(name)
        with trio.move_on_after(_PAGE_SECONDS):
            for each in visits:
                await each.shown.wait()


async def _read_up_to(reply: HttpReply, limit: int) -> bytes:
    """Return the body of the reply, or its first `limit` bytes."""
    body = b""
    while len(body) < limit and (data := await reply.receive()):
        body += data
    return body[:limit]
