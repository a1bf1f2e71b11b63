"""OAuth for clients: get tokens for MCP servers when a request needs them, and store them for the next time.

    auth = OAuth("My app", store=FileTokenStore("~/.config/my-app/tokens.json"))
    async with open_client("https://mcp.example.com/mcp", auth=auth) as client:
        ...

`core.oauth` decides which requests to send and what follows from their responses; this module sends them.  There is one
`TokenSource` for each MCP server, shared by all clients with the same `OAuth`.  Each HTTP request has its own
`Credentials`, which give the header fields to add, and tell whether to send the request again.  A `FlowRun` carries out
the actions of one flow.  A failed action is an event too, so a flow always has an outcome, except if it is ended from
outside.  Then the next request that needs a token starts another flow.

A flow runs in a task of its own, outside the caller's cancel scope: a request that waits for a token can be cancelled
without interrupting the user who is looking for a password.  The flow ends with the last client of its server.  A
refresh token is good once, so a flow that may be using one gets a moment more, in order to store the new one.

There are no locks.  Each request waits only for the flow that it needs, and all requests that wait for a flow get the
same outcome.

Requests to authorization servers use connections of their own, without the client's headers and without its tap.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import trio

from trio_mcp.core.errors import McpError, UsageError, check_seconds, repeated, shown
from trio_mcp.core.http.fields import Fields, RawFields
from trio_mcp.core.messages import Limits
from trio_mcp.core.oauth.actions import (
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
from trio_mcp.core.oauth.discovery import UrlRules, check_redirect_uri, is_loopback, network_at, url_fault
from trio_mcp.core.oauth.flow import Flow
from trio_mcp.core.oauth.messages import Application, IdentityAssertion, WorkloadIdentity
from trio_mcp.core.oauth.records import ServerRecord, as_json, read_record
from trio_mcp.core.oauth.tokens import Authorized, Authorizer, StartFlow, Verdict
from trio_mcp.oauth.browser import BrowserReturn, OnBrowser, RedirectReceiver, open_in_browser, receive_returns
from trio_mcp.oauth.token_stores import MemoryTokenStore, TokenStore
from trio_mcp.transport.dial import locate
from trio_mcp.transport.http_pool import HttpPool
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.workers import HandlerEscape, contained

if TYPE_CHECKING:
    import ssl

__all__ = ["Credentials", "OAuth", "OnAssertion", "OnVisit", "TokenSource"]

T = TypeVar("T")

_log = logging.getLogger("trio_mcp.oauth")

OnVisit: TypeAlias = Callable[[str], "Awaitable[str] | str"]
"""Takes the URL of a page for the user to visit, and returns the URL to which the browser was redirected back."""
OnAssertion: TypeAlias = Callable[[str, str], "Awaitable[str] | str"]
"""Takes the audience and the resource, and returns an assertion, such as a JWT, that identifies the program."""

_AUTH_FIELDS = frozenset({"authorization", "dpop"})
_END_SECONDS = 2.0  # for a token that may have just been issued to arrive and be stored
_PAGE_SECONDS = 2.0  # for the browser to load the page that shows the outcome
_FLOW_END_SECONDS = 5.0  # for a flow to end, which takes two unless a callback of the program delays it
_STORE_SECONDS = 30.0  # for one call of the token store; a slower store counts as broken


class OAuth:
    """The value of the option `auth`: the application's identity, and how it gets and stores its tokens.

    `application` is the name that users see, or an `Application` with more: earlier registrations, keys, scopes, and
    a grant other than that of a user in a browser.  `store` keeps tokens after the process ends; without it they are
    lost with the process.

    To ask the user for access, `browser` shows a page (by default in the system's browser), and this process listens
    on loopback for the redirect: at a free port, or at `redirect_uri`.  A program that cannot listen gives `visit`
    instead, a function that takes the URL of the page and returns the URL to which the browser was redirected back.
    `visit` requires `redirect_uri`.  `user_seconds` limits the time for the user's answer.

    `assertion` returns an assertion that identifies the program or its user, for the grants `IdentityAssertion` and
    `WorkloadIdentity`.  `http_on_loopback` allows plain http to servers on this machine, for development.
    `ssl_context` is for connections to the authorization servers.

    An MCP server names its authorization server, which names its endpoints.  URLs on this machine, on a private network
    or on the link-local network are refused unless the MCP server is on the same one.  Endpoints at another origin
    than the authorization server's are refused unless it promises `iss` (RFC 9207).  `trusted_origins`, such as
    ``["https://accounts.google.com"]``, are allowed on every network, and their endpoints at every origin.

    Raises `UsageError` if an option is invalid.  One object can serve many clients and many servers.
    """

    def __init__(
        self,
        application: Application | str,
        *,
        store: TokenStore | None = None,
        redirect_uri: str | None = None,
        browser: OnBrowser = open_in_browser,
        visit: OnVisit | None = None,
        assertion: OnAssertion | None = None,
        user_seconds: float = 600.0,
        http_on_loopback: bool = False,
        trusted_origins: Collection[str] = (),
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.application = Application(application) if isinstance(application, str) else application
        if not isinstance(self.application, Application):
            raise UsageError(f"application must be a name or an Application, got {type(application).__name__}")
        for name, callback in (("browser", browser), ("visit", visit), ("assertion", assertion)):
            if not (callback is None or callable(callback)):
                raise UsageError(f"{name} must be a function, got {type(callback).__name__}")
        if not (store is None or all(callable(getattr(store, name, None)) for name in ("get", "set"))):
            raise UsageError(
                f"store must have the methods get and set, like FileTokenStore(path); {type(store).__name__} does not"
            )
        _check_redirect(redirect_uri, visit)
        check_seconds("user_seconds", user_seconds)
        needs_assertion = isinstance(self.application.grant, IdentityAssertion | WorkloadIdentity)
        if needs_assertion and assertion is None:
            grant = type(self.application.grant).__name__
            raise UsageError(f"the grant {grant} needs the option assertion: a function that returns an assertion")
        self.store = MemoryTokenStore() if store is None else store
        self.redirect_uri = redirect_uri
        self.browser = browser
        self.visit = visit
        self.assertion = assertion
        origins = _origins(trusted_origins)
        self.rules = UrlRules(loopback=http_on_loopback, trusted_origins=origins, user_seconds=user_seconds)
        self.ssl_context = ssl_context
        self.used_at: dict[str, str] = {}  # issuers by client ids, of all servers
        self._servers: dict[str, TokenSource] = {}

    def __repr__(self) -> str:
        return f"<OAuth for {self.application.name}>"

    def at(self, server_url: str) -> TokenSource:
        """Return the token source for the MCP server at this URL.  Raises `UsageError` if no token may be sent there.

        Clients call this; a program has no need to.
        """
        # OAuth knows only HTTP URLs, and a WebSocket begins as an HTTP request.
        url = f"http{server_url.removeprefix('ws')}" if server_url.startswith("ws") else server_url
        if url not in self._servers:
            try:
                self._servers[url] = TokenSource(self, url)
            except UsageError as error:
                if not url.startswith("http://") or self.rules.loopback or not is_loopback(url):
                    raise
                raise UsageError(f"{error}; on this machine, http_on_loopback=True allows it") from None
        return self._servers[url]


def _origins(given: Collection[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"trusted_origins must be a list, even for one origin: [{shown(given)}]")
    for each in given:
        fault = url_fault(each, UrlRules(loopback=True))
        if fault is None and (urlsplit(each).path.strip("/") or "?" in each):
            fault = "has a path or a query"
        if fault is not None:
            raise UsageError(f"trusted_origins must be like 'https://auth.example.com'; {shown(each)} {fault}")
    return tuple(given)


def _check_redirect(uri: str | None, visit: OnVisit | None) -> None:
    if visit is not None and uri is None:
        raise UsageError("visit needs redirect_uri: the redirect URI with which the application is registered")
    if uri is None:
        return
    check_redirect_uri(uri)
    if visit is None and (urlsplit(uri).scheme != "http" or not is_loopback(uri)):
        raise UsageError(
            f"this process cannot listen at the redirect URI {shown(uri)}; use http on loopback, or the option visit"
        )


class TokenSource:
    """The tokens for one MCP server, shared by all of its clients: loads, stores and renews them."""

    def __init__(self, oauth: OAuth, server_url: str) -> None:
        self.oauth = oauth
        self.authorizer = Authorizer(
            server_url, oauth.application, entropy=os.urandom, rules=oauth.rules, used_at=oauth.used_at
        )
        self._loaded = False
        self._stored_record: ServerRecord | None = None  # the content of the store when last read or written
        self._runs: dict[Flow, FlowRun] = {}
        self._clients = 0

    @property
    def generation(self) -> tuple[str, str]:
        """A value that differs for tokens of a different login, which may belong to another user."""
        return "", str(self.authorizer.generation)

    @property
    def patience(self) -> float:
        """Seconds for which a request may have to wait for the user; 0 if the grant needs no user."""
        return 0.0 if self.oauth.application.needs_no_user else self.oauth.rules.user_seconds

    def credentials(self, method: str, url: str, operation: str = "") -> Credentials:
        """Return the credentials for one HTTP request; `operation` names what the request does."""
        return Credentials(self, method, url, operation)

    # The clients.

    def enter(self) -> None:
        """Count one more client."""
        self._clients += 1

    async def leave(self) -> None:
        """Count one client less; the last one ends the flows.  Waits as long as `FlowRun.end` allows, even if
        cancelled."""
        self._clients -= 1
        if self._clients == 0:
            for run in list(self._runs.values()):
                run.end()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _FLOW_END_SECONDS):
                    await run.over.wait()

    # The store.

    async def load(self) -> None:
        """Read the store, once."""
        # Requests that start at the same time may each read it, and they read the same.  One shared read would make
        # them wait for a task that may be cancelled.
        if not self._loaded:
            record = await self._read_store()
            if not self._loaded:
                self._loaded, self._stored_record = True, record
                if record is not None:
                    self.authorizer.restore(record)

    async def _read_store(self) -> ServerRecord | None:
        url = self.authorizer.server_url
        entry = await _call_store(self.oauth.store.get, url)
        if entry is None:
            return None
        record = read_record(entry)
        if record.server_url != url:
            raise UsageError("the token store returned the entry of another server")
        return record

    async def found(self, flow: Flow) -> bool:
        """Whether another process has stored the tokens that this flow would get.  If so, this process uses them."""
        try:
            stored = await self._read_store()
        except McpError as error:
            _log.warning("cannot read the tokens that other processes may have stored: %s", error)
            return False
        # A record that has not changed is older than ours, even if ours could not be stored or is not trusted.
        changed, self._stored_record = stored != self._stored_record, stored
        return changed and stored is not None and flow.adopt(stored)

    async def persist(self, record: ServerRecord) -> None:
        """Store the record.  Logs a failure and does not raise it: the tokens still work in this process, and the
        caller is not at fault."""
        url = self.authorizer.server_url
        try:
            await _call_store(self.oauth.store.set, url, as_json(record))
            self._stored_record = record
        except McpError as error:
            host = urlsplit(url).netloc
            _log.error("cannot store the tokens for %s; they are lost when this process ends: %s", host, error)

    # Flows.

    def follow(self, verdict: Verdict) -> Verdict:
        """Return the verdict; if it is a new flow, start its task at once, because other requests wait for it too."""
        if isinstance(verdict, StartFlow):
            run = self._runs[verdict.flow] = FlowRun(self, verdict.flow)
            # Not in the nursery of a caller, which may be cancelled.
            trio.lowlevel.spawn_system_task(run.run, name="an authorization", context=copy_context())
        return verdict


class Credentials:
    """The credentials of one HTTP request.

    Await `get`, send the request with the fields of `beside`, and call `replied` with the response.  If `refused` is
    true then, start again.
    """

    def __init__(self, source: TokenSource, method: str, url: str, operation: str) -> None:
        self._source = source
        self._request = source.authorizer.authorized_request(method, url, operation)
        self._method = method
        self._granted: Fields = ()
        self._verdict: Verdict | None = None  # of the last refusal
        self.refusal: McpError | None = None
        """The server's refusal as an error, set by the sender of the request.  If `get` fails after the refusal, this
        is the cause of its error."""

    @property
    def refused(self) -> bool:
        """Whether the response was a refusal.  `get` then gets a better token, or raises the reason."""
        return self._verdict is not None

    async def get(self) -> None:
        """Wait until there is a token, or the request needs none.

        Raises `AuthorizationFailed` if no token can be got, and `UsageError` if the program is at fault: its store
        cannot be read, or its key cannot sign.  Can be cancelled; a flow that has started continues, and the next
        request uses its token.
        """
        await self._source.load()
        source, request = self._source, self._request
        verdict, self._verdict = self._verdict or source.follow(request.go(time.time())), None
        while not isinstance(verdict, Authorized):
            if isinstance(verdict, FlowFailed):
                error = repeated(verdict.error)
                error.__cause__ = error.__cause__ or self.refusal
                raise error
            if (run := source._runs.get(verdict.flow)) is not None:
                await run.settled.wait()
            verdict = source.follow(request.go(time.time()))
        self._granted = verdict.headers

    def beside(self, own: Fields) -> Fields:
        """Return the program's own header fields, followed by those of the credentials."""
        for name, _ in own:
            if name.lower() in _AUTH_FIELDS:
                raise UsageError(f"the option auth sets the header {name}; leave out one of the two")
        return (*own, *self._granted)

    def replied(self, status: int, headers: RawFields) -> None:
        """Take note of the server's response, of every status."""
        if status not in (401, 403):
            self._source.authorizer.replied(headers)
        elif self._method != "DELETE":  # do not ask a user for access just to end a session
            self._verdict = self._source.follow(self._request.refused(status, headers, time.time()))


class FlowRun:
    """Runs one flow.

    `settled` is set once the flow has an outcome, or can have none.  `over` is set once its task ends.
    """

    def __init__(self, source: TokenSource, flow: Flow) -> None:
        self.settled = trio.Event()
        self.over = trio.Event()
        self._source = source
        self._oauth = source.oauth
        self._flow = flow
        self._scope = trio.CancelScope()
        self._ending = self._storing = False
        self._action: FlowAction | None = None  # the action that the flow waits for
        self._receiver: RedirectReceiver | None = None
        self._visit: BrowserReturn | None = None  # the browser's last request, which waits for its page
        self._deadline = math.inf  # for the user
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
        return self._storing or self._flow.over or (isinstance(action, SendRequest) and action.uses_up)

    async def run(self) -> None:
        """The task of the flow, which its source knows until its end."""
        try:
            with self._scope:
                await self._drive()
        except Exception as error:  # noqa: BLE001  # an exception that leaves a system task crashes Trio
            _log.exception("an authorization failed with an unexpected error")
            # The requests that wait for it get this error, and do not try it again.
            self._flow.receive(FlowAbandoned("an internal error", cause=error), time.time())
        finally:
            self._flow.abandon()
            del self._source._runs[self._flow]
            self.settled.set()
            self.over.set()

    async def _drive(self) -> None:
        if await self._source.found(self._flow):
            return
        async with (
            open_nursery() as nursery,
            HttpPool(ssl_context=self._oauth.ssl_context, limits=Limits(), connect=self._connect) as pool,
        ):
            actions = self._flow.start(time.time())
            while True:
                self._action = actions[-1]
                for action in actions:
                    if isinstance(action, Persist):
                        self._storing = True
                        await self._source.persist(action.record)
                        self._storing = False
                if self._flow.over:
                    break
                if self._ending and not self._delicate:
                    return  # the next action would ask the user
                actions = self._flow.receive(await self._do(self._action, nursery, pool), time.time())
            self.settled.set()
            await self._show_outcome()

    # Actions.

    async def _do(self, action: FlowAction, nursery: trio.Nursery, pool: HttpPool) -> FlowEvent:
        oauth = self._oauth
        try:
            match action:
                case SendRequest():
                    return await self._send(action, pool)
                case OpenReceiver() if oauth.visit is not None:
                    assert oauth.redirect_uri is not None
                    return ReceiverReady(oauth.redirect_uri)
                case OpenReceiver():
                    before = tuple(
                        uri for each in self._source.authorizer.record.registered for uri in each.redirect_uris
                    )
                    self._receiver = await nursery.start(receive_returns, oauth.redirect_uri, before)
                    return ReceiverReady(self._receiver.redirect_uri)
                case OpenBrowser() | ReturnIgnored():
                    return await self._ask_user(action)
                case _:
                    assert isinstance(action, AskAssertion)
                    returned = await self._call("assertion", oauth.assertion, action.audience, action.resource)
                    if isinstance(returned, str):
                        return Asserted(returned)
                    return FlowAbandoned(f"assertion must return text, got {type(returned).__name__}")
        except _CallbackFailed as failure:
            return FlowAbandoned(str(failure), at_fault=True, cause=failure.__cause__)
        except McpError as error:
            return FlowAbandoned(str(error), cause=error)

    async def _send(self, request: SendRequest, pool: HttpPool) -> FlowEvent:
        origin, _ = locate(request.url)
        with trio.move_on_after(request.seconds):
            try:
                async with pool.request(request.method, request.url, request.headers, request.body) as reply:
                    body = b""
                    while len(body) <= request.body_bytes and (data := await reply.receive()):
                        body += data
                    address = self._addresses.get((origin.host, origin.port))
                    return Replied(reply.status, reply.headers, body[: request.body_bytes + 1], address)
            except _AddressChanged as error:
                return ForbiddenAddress(str(error))
            except McpError as error:
                return RequestFailed(str(error), error)
        return RequestFailed(f"there was no response within {request.seconds:g} seconds")

    async def _connect(self, host: str, port: int) -> trio.abc.Stream:
        """Open a connection for the pool, and check its address before the first byte of TLS or of the request.

        To resolve the name earlier and check that address is not enough: the name may resolve to another address
        the next time.
        """
        stream = await trio.open_tcp_stream(host, port)
        assert isinstance(self._action, SendRequest)
        origin, _ = locate(self._action.url)
        peer = getattr(stream, "socket", None)
        if peer is None or (host, port) != (origin.host, origin.port):
            return stream  # it is in memory, or leads to a proxy, which resolves the server's name itself
        address: str = peer.getpeername()[0]
        if self._action.networks is not None and network_at(address) not in self._action.networks:
            await trio.aclose_forcefully(stream)
            raise _AddressChanged(address)
        self._addresses[host, port] = address
        return stream

    async def _ask_user(self, page: OpenBrowser | ReturnIgnored) -> FlowEvent:
        """Open the page and wait for the browser's return, or wait for its next return, until the deadline."""
        oauth = self._oauth
        uri = oauth.redirect_uri if self._receiver is None else self._receiver.redirect_uri
        if isinstance(page, OpenBrowser):
            self._deadline = trio.current_time() + page.seconds
        with trio.move_on_at(self._deadline):
            if self._receiver is None:
                if isinstance(page, ReturnIgnored):
                    return FlowAbandoned("visit returned the answer to another request")
                returned = await self._call("visit", oauth.visit, page.url)
                wanted = "visit must return the URL to which the browser was redirected"
                if not isinstance(returned, str):
                    return FlowAbandoned(f"{wanted}, got {type(returned).__name__}", at_fault=True)
                query = ""
                with suppress(ValueError):  # the user may have pasted any text
                    query = urlsplit(returned.strip()).query
                return BrowserReturned(query) if query else FlowAbandoned(f"{wanted}, which begins with {uri}?")
            if isinstance(page, OpenBrowser):
                _log.info("waiting for the user to allow access in the browser: %s", page.issuer)
                await self._call("browser", oauth.browser, page.url)
            if self._visit is not None:
                self._visit.stray()
            self._visit = await self._receiver.returns.receive()
            return BrowserReturned(self._visit.query)
        return FlowAbandoned(f"the browser did not return to {uri} within {oauth.rules.user_seconds:g} seconds")

    async def _call(self, name: str, callback: Callable[..., Any] | None, *args: object) -> Any:
        """Call a callback of the program and return its result."""
        assert callback is not None
        try:
            return await contained(name, callback, *args)
        except Exception as error:  # noqa: BLE001  # the program raised it
            cause = error.__cause__ if isinstance(error, HandlerEscape) else error
            raise _CallbackFailed(f"the callback {name} failed ({type(cause).__name__})") from cause

    async def _show_outcome(self) -> None:
        """Show the outcome to the browser, in each of its requests: browsers that prefetch send more than one."""
        if self._visit is None or self._receiver is None:
            return
        name, outcome = self._oauth.application.name, self._flow.outcome
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


class _CallbackFailed(Exception):
    """A callback of the program raised the cause of this error."""


class _AddressChanged(McpError):
    """A connection leads to this address, to which the request must not be sent."""


async def _call_store(method: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a method of the program's token store, with a time limit.

    Raises `UsageError` if it fails, with the exception of the store as its cause.
    """
    with trio.move_on_after(_STORE_SECONDS):
        try:
            pending = method(*args)
            if not inspect.isawaitable(pending):
                raise UsageError("get and set of the token store must be async def")
            return await pending
        except McpError:
            raise
        except Exception as error:
            raise UsageError(f"the token store failed: {type(error).__name__}") from error
    raise UsageError(f"the token store took longer than {_STORE_SECONDS:g} seconds")
