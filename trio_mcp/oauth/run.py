"""One flow, driven: each deed that it asks for is done, and what came of it is told.

What goes wrong here is an answer like any other, so a flow always has an outcome, unless it is ended from outside.
Then it has none, and whoever needs its token begins another.
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
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.oauth.deeds import (
    AskAssertion,
    Asserted,
    BrowserReturned,
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
from trio_mcp.core.oauth.flow import Flow, FlowStep
from trio_mcp.core.oauth.places import network_at
from trio_mcp.oauth.browser import BrowserReturn, RedirectReceiver, receive_returns
from trio_mcp.transport.dial import locate
from trio_mcp.transport.http_pool import HttpPool, HttpReply
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import HandlerEscape, contained

if TYPE_CHECKING:
    from trio_mcp.oauth.client import TokenSource

__all__ = ["FlowRun"]

_log = logging.getLogger("trio_mcp.oauth")

_ENDING = 2.0  # seconds for a token that may have been given just now to arrive and be stored
_SHOWING = 2.0  # seconds for the browser to take the page that tells how it went


class _AddressChanged(McpError):
    """A connection leads to an address where the request must not go."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the connection leads to {address}")
        self.address = address


class FlowRun:
    """`settled` is set as soon as it has an outcome, or will have none; `over` when nothing is left of it."""

    def __init__(self, authorization: TokenSource, flow: Flow) -> None:
        self.flow = flow
        self.settled = trio.Event()
        self.over = trio.Event()
        self._authorization = authorization
        self._oauth = authorization.oauth
        self._scope = trio.CancelScope()
        self._ending = self._storing = False
        self._receiver: RedirectReceiver | None = None
        self._came: BrowserReturn | None = None  # the browser, and waits to be told how it went
        self._deadline = math.inf  # for the user
        self._trouble: BaseException | None = None  # that the last deed came to
        self._request: SendRequest | None = None  # that is being sent
        self._addresses: dict[tuple[str, int], str] = {}  # that connections lead to, by host and port

    def end(self) -> None:
        """Nobody needs its outcome any more.  What must not be broken off is given `_ENDING` seconds."""
        self._ending = True
        self._scope.deadline = trio.current_time() + _ENDING if self._delicate else -math.inf

    @property
    def _delicate(self) -> bool:
        """Something may just be used up, or is to be stored; or the user is shown how it went."""
        return self._storing or self.flow.step in (FlowStep.TOKEN, FlowStep.REFRESH, FlowStep.OVER)

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
                    for action in actions:
                        await self._keep(action)
                    if self.flow.over:
                        break
                    if self._ending and not self._delicate:
                        return  # it would go on to ask a user
                    event = await self._do(actions[-1])
                self.settled.set()
                await self._show()

    def broke(self, error: Exception) -> None:
        """Something has failed that is nobody's deed; those who wait are not to try the same again."""
        self._trouble = error
        self._tell(FlowAbandoned("something has failed inside of it"))

    def _feed(self, event: FlowEvent | None) -> tuple[FlowAction, ...]:
        authorizer = self._authorization.authorizer
        try:
            if event is None:
                return authorizer.start(self.flow, time.time())
            return self._tell(event)
        except Exception as error:  # noqa: BLE001  # a Key signs by a function of the program's
            self._trouble = error
            why = str(error) if isinstance(error, McpError) else f"a Key could not sign ({type(error).__name__})"
            return self._tell(FlowAbandoned(why))

    def _tell(self, event: FlowEvent) -> tuple[FlowAction, ...]:
        actions = self._authorization.authorizer.receive(self.flow, event, time.time())
        if actions and isinstance(last := actions[-1], FlowFailed):
            last.error.__cause__ = self._trouble
        return actions

    async def _keep(self, action: FlowAction) -> None:
        if isinstance(action, Persist):
            self._storing = True
            await self._authorization.persist(action.record)
            self._storing = False

    # Deeds.

    async def _do(self, action: FlowAction) -> FlowEvent:
        self._trouble = None
        try:
            match action:
                case SendRequest():
                    return await self._send(action)
                case OpenReceiver():
                    return await self._listen()
                case OpenBrowser():
                    return await self._visit(action)
                case ReturnIgnored():
                    return await self._wait_on()
                case _:
                    assert isinstance(action, AskAssertion)
                    return await self._ask_assertion(action)
        except McpError as error:
            self._trouble = error
            return FlowAbandoned(str(error))

    async def _send(self, request: SendRequest) -> FlowEvent:
        self._request = request
        origin, _ = locate(request.url)
        with trio.move_on_after(request.seconds):
            try:
                async with self._pool.request(request.method, request.url, request.headers, request.body) as reply:
                    body = await _beginning(reply, request.body_bytes + 1)
                    return Replied(reply.status, reply.headers, body, self._addresses.get((origin.host, origin.port)))
            except _AddressChanged as error:
                return ForbiddenAddress(error.address)
            except McpError as error:
                self._trouble = error
                return RequestFailed(str(error))
        return RequestFailed(f"there was no answer within {request.seconds:g} seconds")

    async def _connect(self, host: str, port: int) -> trio.abc.Stream:
        """A connection of the pool, whose address is judged before the first byte of TLS, or of the request, is sent.

        To resolve the name before, and judge that, would not do: the answer may be another one the next time.
        """
        stream = await trio.open_tcp_stream(host, port)
        assert self._request is not None
        origin, _ = locate(self._request.url)
        peer = getattr(stream, "socket", None)
        if peer is None or (host, port) != (origin.host, origin.port):
            return stream  # in memory; or it is a proxy, which looks for the server on its own
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

    async def _visit(self, page: OpenBrowser) -> FlowEvent:
        oauth = self._oauth
        self._deadline = trio.current_time() + page.seconds
        if oauth.visit is None:
            _log.info("waiting for the user to allow access, in the browser: %s", page.issuer)
            with trio.move_on_at(self._deadline):
                event = await self._called("browser", oauth.browser, page.url)
                return event if isinstance(event, FlowAbandoned) else await self._wait_on()
        else:
            with trio.move_on_at(self._deadline):
                came = await self._called("visit", oauth.visit, page.url)
                if isinstance(came, FlowAbandoned):
                    return came
                return self._given_back(came)
        return self._nobody_came()

    def _given_back(self, came: object) -> FlowEvent:
        """What `visit` gave, which somebody may have pasted."""
        wanted = "the URL that the browser was sent back to"
        if not isinstance(came, str):
            return FlowAbandoned(f"visit gave {type(came).__name__} instead of {wanted}", at_fault=True)
        query = ""
        with suppress(ValueError):
            query = urlsplit(came.strip()).query
        if not query:
            return FlowAbandoned(f"what visit gave is not {wanted}, which begins with {self._oauth.redirect_uri}?")
        return BrowserReturned(query)

    async def _wait_on(self) -> FlowEvent:
        """For the browser, in what is left of the time."""
        if self._came is not None:
            self._came.stray()
        if self._receiver is None:
            return FlowAbandoned("what visit gave is the answer to another request")
        with trio.move_on_at(self._deadline):
            self._came = await self._receiver.returns.receive()
            return BrowserReturned(self._came.query)
        return self._nobody_came()

    def _nobody_came(self) -> FlowAbandoned:
        uri = self._oauth.redirect_uri if self._receiver is None else self._receiver.redirect_uri
        return FlowAbandoned(f"nobody has come back to {uri} within {self._oauth.rules.user_seconds:g} seconds")

    async def _ask_assertion(self, action: AskAssertion) -> FlowEvent:
        came = await self._called("assertion", self._oauth.assertion, action.audience, action.resource)
        if isinstance(came, FlowAbandoned):
            return came
        return (
            Asserted(came)
            if isinstance(came, str)
            else FlowAbandoned(f"assertion gave {type(came).__name__}, not text")
        )

    async def _called(self, name: str, callback: Callable[..., Any] | None, *args: object) -> Any:
        """What a callback of the program gives; `FlowAbandoned` if it raises, which is then the cause of the
        failure."""
        assert callback is not None
        call = partial(callback, *args)

        async def answer() -> Any:
            came = call()
            return await came if inspect.isawaitable(came) else came

        try:
            return await contained(answer, name)
        except Exception as error:  # noqa: BLE001  # it is the program's
            self._trouble = error.__cause__ if isinstance(error, HandlerEscape) else error
            return FlowAbandoned(f"the callback {name} has failed ({type(self._trouble).__name__})", at_fault=True)

    async def _show(self) -> None:
        """Tell the browser how it went: also where it came more than once, as those do that fetch ahead."""
        if self._came is None or self._receiver is None:
            return
        name, outcome = self._oauth.application.name, self.flow.outcome
        came = [self._came]
        with suppress(trio.WouldBlock):
            while True:
                came.append(self._receiver.returns.receive_nowait())
        for each in came:
            if each.query != self._came.query:
                each.stray()
            elif isinstance(outcome, FlowFailed):
                each.bad(name, outcome.error.why)
            else:
                each.good(name)
        with trio.move_on_after(_SHOWING):
            for each in came:
                await each.shown.wait()


async def _beginning(reply: HttpReply, limit: int) -> bytes:
    """Of the body, no more than so many bytes."""
    body = b""
    while len(body) < limit and (data := await reply.receive()):
        body += data
    return body[:limit]
