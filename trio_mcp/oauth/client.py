"""OAuth: tokens for MCP servers that want them, got when they are wanted and kept for the next time.

    auth = OAuth("My app", store=FileTokenStore("~/.config/my-app/tokens.json"))
    async with open_client("https://mcp.example.com/mcp", auth=auth) as client:
        ...

What is asked for where, and what follows from it, is decided in `core.auth`; here it is done.  There is one
`TokenSource` for each MCP server, shared by all clients that were given the same `OAuth`, and `Credentials` for each
HTTP request, which say what goes along with it and whether it is to be sent again.

A flow runs in a task of its own, in no caller's scope: whoever waits for a token may give up, and the user who is just
finding a password is not interrupted.  It ends with the last client of its server.  A refresh token is good once, so
what may just be using one up is given a moment more, for what comes of it has to be kept.

Nothing is locked meanwhile.  Each request waits for the flow that it needs and for nothing else, and what has come of
that flow is the same for all of them.

What is exchanged with authorization servers goes by connections of its own: without the client's headers, and without
its tap.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import trio

from trio_mcp.core.errors import McpError, UsageError, check_seconds, repeated, shown
from trio_mcp.core.http.fields import Fields, RawFields
from trio_mcp.core.oauth.clients import (
    Application,
    AuthorizationCode,
    ClientCredentials,
    IdentityAssertion,
    OAuthClient,
    WorkloadIdentity,
    client_document,
)
from trio_mcp.core.oauth.deeds import FlowFailed
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame
from trio_mcp.core.oauth.flow import Flow
from trio_mcp.core.oauth.places import UrlRules, is_loopback, redirect_fault, url_fault
from trio_mcp.core.oauth.proofs import Key
from trio_mcp.core.oauth.records import ServerRecord, as_json, read_record
from trio_mcp.core.oauth.tokens import Authorized, AuthorizedRequest, Authorizer, StartFlow, Verdict
from trio_mcp.oauth.browser import OnBrowser, open_in_browser
from trio_mcp.oauth.run import FlowRun
from trio_mcp.oauth.token_stores import MemoryTokenStore, TokenStore

if TYPE_CHECKING:
    import ssl

__all__ = [
    "Application",
    "AuthorizationCode",
    "AuthorizationFailed",
    "Blame",
    "ClientCredentials",
    "Credentials",
    "IdentityAssertion",
    "Key",
    "OAuth",
    "OAuthClient",
    "OnAssertion",
    "OnVisit",
    "TokenSource",
    "WorkloadIdentity",
    "client_document",
]  # fmt: skip

T = TypeVar("T")

_log = logging.getLogger("trio_mcp.oauth")

OnVisit: TypeAlias = Callable[[str], "Awaitable[str] | str"]
"""Given the URL of a page to be visited by the user; what it returns is the URL that the browser was sent back to."""
OnAssertion: TypeAlias = Callable[[str, str], "Awaitable[str] | str"]
"""Given the audience and the resource; what it returns is a JWT or the like that says who we are."""

_OURS = frozenset({"authorization", "dpop"})
_LEAVING = 5.0  # seconds for a flow to end, which takes two unless a callback of the program holds it up
_STORING = 30.0  # seconds for a store to take or to give something, before it is taken for broken


class OAuth:
    """For the option `auth`: who the program is, and how it gets and keeps its tokens.

    `application` is the name that users are shown, or an `Application`, which says more: registrations made before,
    keys, scopes, and another grant than that of a user in a browser.  `store` is where tokens outlive the process; in
    memory they do not.

    To have them allowed by the user, `browser` shows a page (the system's browser does), and this process listens on
    loopback for the return: at a free port, or at `redirect_uri`.  Programs that cannot do that give `visit` instead,
    which is given the URL of the page and returns the URL that the browser was sent back to; nothing listens then, and
    `redirect_uri` has to be said.  `user_seconds` bounds how long a user is waited for.

    `assertion` gives what vouches for the program, or for its user, with `IdentityAssertion` and `WorkloadIdentity`.
    `http_on_loopback` allows plain http to servers on this machine, for development.  `ssl_context` is for the
    authorization servers.

    An MCP server names the authorization server, which names its endpoints.  Those on this machine, on a private and on
    the link-local network are refused unless the MCP server is there itself, and endpoints at another origin than the
    authorization server's unless it promises `iss` (RFC 9207).  `trusted_origins`, such as
    ``["https://accounts.google.com"]``, are followed wherever they are, and their endpoints may be anywhere.

    Raises `UsageError` for what cannot be.  One object may serve many clients and many servers.
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
            raise UsageError(f"an application is a name or an Application, not {type(application).__name__}")
        for name, callback in (("browser", browser), ("visit", visit), ("assertion", assertion)):
            if not (callback is None or callable(callback)):
                raise UsageError(f"{name} is a function, not {type(callback).__name__}")
        if not (store is None or all(callable(getattr(store, name, None)) for name in ("get", "set"))):
            raise UsageError(f"a store has get and set, as FileTokenStore(path) has; {type(store).__name__} has not")
        _check_redirect(redirect_uri, visit)
        check_seconds("user_seconds", user_seconds)
        vouched = isinstance(self.application.grant, IdentityAssertion | WorkloadIdentity)
        if vouched and assertion is None:
            grant = type(self.application.grant).__name__
            raise UsageError(f"the grant {grant} takes an assertion: a function that gets one")
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
        """What there is for the MCP server at this URL.  Raises `UsageError` where no token may be sent."""
        # To those who give tokens a WebSocket is what it begins as: a request by HTTP.
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
        raise UsageError(f"trusted_origins must be a list, also of one origin: [{shown(given)}]")
    for each in given:
        fault = url_fault(each, UrlRules(loopback=True))
        if fault is None and (urlsplit(each).path.strip("/") or "?" in each):
            fault = "has a path or a query"
        if fault is not None:
            raise UsageError(f"trusted_origins must be like 'https://auth.example.com'; {shown(each)} {fault}")
    return tuple(given)


def _check_redirect(uri: str | None, visit: OnVisit | None) -> None:
    if visit is not None and uri is None:
        raise UsageError("visit takes a redirect_uri: the one that the application is to be registered with")
    if uri is None:
        return
    if fault := redirect_fault(uri):
        raise UsageError(f"the redirect URI {shown(uri)} {fault}; it must be https, or on loopback")
    if visit is None and (urlsplit(uri).scheme != "http" or not is_loopback(uri)):
        raise UsageError(f"nobody here can listen at the redirect URI {shown(uri)}; with visit, something else may")


class TokenSource:
    """The tokens for one MCP server, and how they are got."""

    def __init__(self, oauth: OAuth, server_url: str) -> None:
        self.oauth = oauth
        self.authorizer = self._authorizer(server_url, None)
        self._loaded = False
        self._seen: ServerRecord | None = None  # what the store has, as far as is known here
        self._runs: dict[Flow, FlowRun] = {}
        self._clients = 0

    def _authorizer(self, server_url: str, record: ServerRecord | None) -> Authorizer:
        oauth = self.oauth
        return Authorizer(
            server_url, oauth.application, entropy=os.urandom, record=record, rules=oauth.rules, used_at=oauth.used_at
        )

    @property
    def generation(self) -> tuple[str, str]:
        """Tells the tokens that there are from those that were, which may have been another user's."""
        return "", str(self.authorizer.generation)

    @property
    def patience(self) -> float:
        """Seconds that a user may need before anything can be done."""
        return 0.0 if self.oauth.application.needs_no_user else self.oauth.rules.user_seconds

    def request(self, method: str, url: str, operation: str = "") -> Credentials:
        """What goes along with one HTTP request; `operation` says what it does."""
        return Credentials(self, method, url, operation)

    # As long as there are clients.

    def enter(self) -> None:
        self._clients += 1

    async def leave(self) -> None:
        """With the last client the flows end.  It takes as long as `FlowRun.end` says, also if it is cancelled."""
        self._clients -= 1
        if self._clients == 0:
            for run in list(self._runs.values()):
                run.end()
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _LEAVING):
                    await run.over.wait()

    # What is stored.

    async def load(self) -> None:
        # Whoever comes first reads it, and if several do they read the same: nobody waits for one who was cancelled.
        if not self._loaded:
            record = await self._stored()
            if not self._loaded:
                self._loaded, self._seen = True, record
                if record is not None:
                    self.authorizer = self._authorizer(self.authorizer.server_url, record)

    async def _stored(self) -> ServerRecord | None:
        url = self.authorizer.server_url
        entry = await _awaited("the store of tokens", self.oauth.store.get, url)
        if entry is None:
            return None
        record = read_record(entry)
        if record.server_url != url:
            raise UsageError("the store of tokens gave the entry of another server")
        return record

    async def found(self, flow: Flow) -> bool:
        """Whether another process has stored what this flow is for."""
        try:
            stored = await self._stored()
        except McpError as error:
            _log.warning("what other processes have stored cannot be read: %s", error)
            return False
        # What was there before is older than what we have, also where ours could not be stored, or is not trusted.
        news, self._seen = stored != self._seen, stored
        return news and stored is not None and self.authorizer.adopt(flow, stored)

    async def persist(self, record: ServerRecord) -> None:
        """Never raises: what was got is of use as long as the process, and who could be told is not at fault."""
        url = self.authorizer.server_url
        try:
            await _awaited("the store of tokens", self.oauth.store.set, url, as_json(record))
            self._seen = record
        except McpError as error:
            place = urlsplit(url).netloc
            _log.error("the tokens for %s could not be stored, and are gone with this process: %s", place, error)

    # Flows.

    def begin(self, flow: Flow) -> None:
        run = self._runs[flow] = FlowRun(self, flow)
        # In no nursery of a caller's: all others wait for it too.
        trio.lowlevel.spawn_system_task(self._drive, run, name="an authorization", context=copy_context())

    async def _drive(self, run: FlowRun) -> None:
        try:
            await run.drive()
        except Exception as error:  # noqa: BLE001  # what leaves a system task is Trio's end
            _log.exception("an authorization has failed in a way that was not foreseen")
            run.broke(error)
        finally:
            self.authorizer.abandon(run.flow)
            del self._runs[run.flow]
            run.settled.set()
            run.over.set()

    async def wait(self, flow: Flow) -> None:
        if (run := self._runs.get(flow)) is not None:
            await run.settled.wait()


class Credentials:
    """What goes along with one HTTP request.

    ``get`` it, send the request, say by `replied` what came, and if it was `refused`, begin again.
    """

    def __init__(self, authorization: TokenSource, method: str, url: str, operation: str) -> None:
        self._authorization = authorization
        self._method = method
        self._url = url
        self._operation = operation
        self._authorized_request: AuthorizedRequest | None = None
        self._granted: Fields = ()
        self._verdict: Verdict | None = None  # of the last refusal
        self.refusal: McpError | None = None
        """How the server said it, which whoever has sent the request knows: the cause, where `get` fails after that."""

    @property
    def refused(self) -> bool:
        """What came was no answer: `get` has something better now, or says why not."""
        return self._verdict is not None

    async def get(self) -> None:
        """Wait until there are some, or none are needed.

        Raises `AuthorizationFailed` if there is no token and none is to be had, and `UsageError` for what
        concerns the program: its store cannot be read, or its key cannot sign.  May be cancelled; what was begun goes
        on, and the next request has the use of it.
        """
        authorization = self._authorization
        await authorization.load()
        if self._authorized_request is None:
            self._authorized_request = authorization.authorizer.authorized_request(
                self._method, self._url, self._operation
            )
        go = self._authorized_request.go
        verdict = self._verdict or self._heed(go)
        self._verdict = None
        while not isinstance(verdict, Authorized):
            if isinstance(verdict, FlowFailed):
                error = repeated(verdict.error)()
                error.__cause__ = error.__cause__ or self.refusal
                raise error
            await authorization.wait(verdict.flow)
            verdict = self._heed(go)
        self._granted = verdict.headers

    def beside(self, own: Fields) -> Fields:
        """The program's own header fields, and these beside them."""
        for name, _ in own:
            if name.lower() in _OURS:
                raise UsageError(f"the header {name} is what the option auth is there for; leave one of them out")
        return (*own, *self._granted)

    def replied(self, status: int, headers: RawFields) -> None:
        """The server has answered, whatever it was."""
        if status not in (401, 403):
            self._authorization.authorizer.replied(headers)
            return
        if self._method == "DELETE":
            return  # nobody is asked for anything in order to say goodbye
        authorized_request = self._authorized_request
        assert authorized_request is not None  # what was sent was asked for before
        self._verdict = self._heed(lambda now: authorized_request.refused(status, headers, now))

    def _heed(self, ask: Callable[[float], Verdict]) -> Verdict:
        try:
            verdict = ask(time.time())
        except McpError:
            raise
        except Exception as error:  # a Key signs by a function of the program's
            raise UsageError("the dpop Key of the application could not sign") from error
        if isinstance(verdict, StartFlow):
            self._authorization.begin(verdict.flow)  # at once: from now on others wait for it
        return verdict


async def _awaited(whose: str, call: Callable[..., Awaitable[T]], *args: Any) -> T:
    """What a callback of the program gives, in time; what it raises is an error of ours, with its own as the cause."""
    with trio.move_on_after(_STORING):
        try:
            came = call(*args)
            if not inspect.isawaitable(came):
                raise UsageError(f"{whose} is awaited: its get and set are to be async def")
            return await came
        except McpError:
            raise
        except Exception as error:
            raise UsageError(f"{whose} has failed: {type(error).__name__}") from error
    raise UsageError(f"{whose} takes longer than {_STORING:g} seconds")
