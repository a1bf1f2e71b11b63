"""Connecting: from a target to an open session.  Which transport is used, and what is tried in which order.

| Target | Transport | Attempts |
|---|---|---|
| ``http://...``, ``https://...`` | Streamable HTTP | discover; initialize; then HTTP+SSE at the same URL (sse-12) |
| ``ws://...``, ``wss://...`` | WebSocket | discover; initialize |
| a list of words | a child process, by its stdin and stdout | the same |
| a `Server` | memory, in this process | the same |
| a stream | the stream, one message per line | the same |

`Negotiation` of the session has the attempts and their results.

A URL at which a legacy server was found is not probed again by this program for ten minutes (ver-10).  If the legacy
handshake then fails, it is probed after all.  Some legacy child processes exit at the probe: they are started once
more, without a probe.  A WebSocket that is closed at the probe is opened once more.  If a process has not read the
probe, the probe is not the reason for its exit, and the time for an answer has not begun.

One task owns a connection from before its first byte until after its last.  So there is always a task that closes it,
even if the task that opened it is cancelled.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import attrs
import trio

from trio_mcp.client.errors import HandshakeError, NoResponse
from trio_mcp.client.session import ClientSession, ServerMessageHandler, StreamLink
from trio_mcp.client.startup import Startup
from trio_mcp.core.errors import (
    McpError,
    RemoteProtocolError,
    SessionClosed,
    UsageError,
    check_seconds,
    shown,
)
from trio_mcp.core.http.client_rules import url_without_secrets
from trio_mcp.core.http.fields import Fields, Mirror
from trio_mcp.core.messages import Limits
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.opening import Attempt, ClientProtocol, Negotiation
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.session import Offer
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import CLOSING, Framing, Lines, keep_alive

if TYPE_CHECKING:
    from trio_mcp.client.options import ClientOptions
    from trio_mcp.oauth.client import TokenSource
    from trio_mcp.transport.child import Child
    from trio_mcp.transport.http_pool import HttpPool

__all__ = ["Connector", "SessionOptions", "Target", "connector_for"]


@runtime_checkable
class InProcess(Protocol):
    """A server in this process.  A protocol class, because `client` must not import `server`."""

    async def _serve_client(self, stream: trio.abc.Stream) -> None: ...


Target: TypeAlias = "str | Sequence[str | os.PathLike[str]] | InProcess | trio.abc.Stream"

_TARGETS = 'a target must be a URL, a command such as ["python", "server.py"], a Server or a stream'

E = TypeVar("E", bound=McpError)
Connector: TypeAlias = "Callable[[SessionOptions, trio.TaskStatus[ClientSession]], Awaitable[None]]"
"""Opens a session and runs it until it is to be closed."""

PROBE = 5.0
"""Seconds that a server on a stream may take to answer `server/discover`; some legacy servers never answer it."""
OPENING = 300.0
"""Seconds that opening a session may take: a launcher may have to download the server first.  A new attempt, such as a
process that is started again, has the full time."""
HEARTBEAT = 20.0
"""Seconds without a message on a WebSocket after which the server is pinged.  After the same time without an answer the
connection is closed."""
EVENT_STREAM_WAIT = 1.0
"""Seconds that a client with callbacks waits for the stream on which the server sends its questions.  Some servers
discard a question if there is no stream; others do not answer the GET before they have a message to send."""

# Options that only some targets support.
_NETWORK = ("ssl_context", "headers", "auth")
_STARTING = ("start_timeout", "garbage_timeout")
_PROCESS = ("env", "environment", "cwd", "shutdown_timeout", "stderr")

_REMEMBER_SECONDS = 600.0  # seconds for which a legacy server is remembered
_MOST_SERVERS = 1000


@attrs.frozen(eq=False, repr=False)
class SessionOptions:
    """The options of all sessions of a client."""

    offer: Offer
    handler: ServerMessageHandler
    limits: Limits
    headers: Callable[[], Fields]
    """Returns the headers of the client; called for each HTTP request."""
    mirrors: Callable[[str], Sequence[Mirror]]
    """Returns the arguments of a tool that are sent in headers, too."""
    given: ClientOptions
    tokens: TokenSource | None = None
    attempts: tuple[Attempt, ...] = ()
    """The earlier attempts to open the session."""
    closing: trio.Event = attrs.field(factory=trio.Event)
    """Set to close the session normally."""

    def protocol(self, link: LinkKind = LinkKind.DUPLEX) -> ClientProtocol:
        protocol = ClientProtocol(self.offer, link=link, limits=self.limits)
        protocol.attempts += self.attempts
        return protocol

    def legacy(self, attempts: tuple[Attempt, ...] = ()) -> SessionOptions | None:
        """The options for a session without a probe, after these attempts; None if the offer has no older revision."""
        older = tuple(each for each in self.offer.revisions if each.handshake)
        if not older:
            return None
        return attrs.evolve(self, offer=attrs.evolve(self.offer, revisions=older), attempts=attempts)


def connector_for(target: Target, given: Mapping[str, Any]) -> Connector:
    """Return a function that opens a session with `target` and runs it.  `given` are the options of the client.

    Raises UsageError if `target` is not a target, or does not support one of the options.
    """
    kind, connect = f"a {type(target).__name__}", None
    supported: tuple[str, ...] = ()
    if isinstance(target, InProcess) and not isinstance(target, type):
        connect = partial(_run_server, target)
    elif isinstance(target, trio.abc.Stream):
        connect, supported = partial(_run_given_stream, target), _STARTING
    elif isinstance(target, str):
        kind, connect, supported = "a URL", partial(_run_url, target), _NETWORK
        if not target:
            raise UsageError(f"{_TARGETS}; got an empty string")
        if not target.startswith(("http://", "https://", "ws://", "wss://")):
            raise UsageError(
                "a URL must begin with http://, https://, ws:// or wss://; "
                'a command must be a list of words: ["python", "server.py"]'
            )
    elif isinstance(target, Sequence) and target and all(isinstance(each, str | os.PathLike) for each in target):
        kind, connect, supported = "a command", partial(_run_child, target), (*_PROCESS, *_STARTING)
    if connect is None:
        # The value is not shown: arguments may be secrets.
        raise UsageError(f"{_TARGETS}; got {_describe_target(target)}")
    used = {name for name in _NETWORK if given.get(name) is not None}
    used |= {name for name in (*_PROCESS, *_STARTING) if name in given}
    if unsupported := used.difference(supported):
        raise UsageError(f"{kind} does not support the options: {', '.join(sorted(unsupported))}")
    for name in _STARTING:
        if name in given:
            check_seconds(name, given[name])
    if isinstance(target, str) and target.startswith("http"):
        from trio_mcp.transport.dial import locate

        locate(target)  # raises UsageError if the URL is invalid
    return connect


def _describe_target(target: Any) -> str:
    """Return a description of an invalid target, and what to write instead."""
    if isinstance(target, type):
        return f"the class {target.__name__}; pass an object of it"
    if inspect.isroutine(target):
        return f"the function {target.__name__}; pass the Server that it returns"
    if inspect.iscoroutine(target):
        return "a coroutine; await it first"
    if inspect.ismodule(target):
        return f"the module {target.__name__}; pass its Server, such as {target.__name__}.server"
    if isinstance(target, os.PathLike):
        return 'a path; write ["python", path]'
    if isinstance(target, Mapping):
        return (
            f"a {type(target).__name__}; for an entry of a configuration, write open_client([command, *args], env=env)"
        )
    if not isinstance(target, Sequence) or isinstance(target, bytes | bytearray | memoryview):
        return type(target).__name__
    kind = f"a {type(target).__name__}"
    if not target:
        return f"an empty {type(target).__name__}"
    first = shown(target[0]) if isinstance(target[0], str | os.PathLike) else type(target[0]).__name__
    others = sorted({type(each).__name__ for each in target[1:]})
    return f"{kind} of {first}" + (f" and {', '.join(others)}" if others else "")


# One stream for all messages


async def _run_stream(
    options: SessionOptions,
    stream: trio.abc.Stream,
    framing: Framing,
    status: trio.TaskStatus[ClientSession],
    *,
    heartbeat: float | None = None,
    received: bytes = b"",
    startup: Startup | None = None,
) -> None:
    async with open_nursery() as nursery:
        link = StreamLink(
            options.protocol(), options.handler, stream, framing,
            nursery=nursery, tap=options.given.get("tap"), received=received,
            explain=None if startup is None else startup.explain,
        )  # fmt: skip
        link_ended = trio.Event()
        within, begin, unread = OPENING, None, None
        if startup is not None:
            nursery.start_soon(startup.guard, link, name="timeout for the first message of the server")
            begin, unread = startup.opened, startup.unread
            if (longest := startup.longest) >= OPENING:
                within += longest  # leaves time for the answer after the first message

        async def run_link() -> None:
            await link.run(heartbeat)
            link_ended.set()

        nursery.start_soon(run_link, name="the connection to the server")
        probe = options.given.get("probe", PROBE)
        await _run_session(options, link, status, probe=probe, within=within, unread=unread, begin=begin)
        with trio.move_on_after(CLOSING):
            await link.end()
            await link_ended.wait()


async def _run_session(
    options: SessionOptions,
    caller: ClientSession,
    status: trio.TaskStatus[ClientSession],
    *,
    probe: float | None = None,
    within: float = OPENING,
    unread: Callable[[], bool] | None = None,
    begin: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Open the session, and wait until it is to be closed.

    `begin` is called when the session is open, before it is used.
    """
    if options.tokens is not None:
        within += options.tokens.patience  # a user has to allow access
    await caller.open(probe=probe, within=within, unread=unread)
    if begin is not None:
        await begin()
    status.started(caller)
    await options.closing.wait()


def _attempts(error: McpError) -> tuple[Attempt, ...]:
    """Return the attempts of the opening that has failed with this error."""
    opening = error if isinstance(error, HandshakeError) else error.__cause__
    return opening.negotiation.attempts if isinstance(opening, HandshakeError) else ()


async def _run_given_stream(
    stream: trio.abc.Stream, options: SessionOptions, status: trio.TaskStatus[ClientSession]
) -> None:
    keep_alive(stream)
    lines = Lines(options.limits)
    await _run_stream(options, stream, lines, status, startup=Startup(lines, options.given))


async def _run_server(server: InProcess, options: SessionOptions, status: trio.TaskStatus[ClientSession]) -> None:
    from trio.testing import memory_stream_pair

    client_end, server_end = memory_stream_pair()
    async with open_nursery() as nursery:
        served = trio.Event()

        async def serve() -> None:
            await server._serve_client(server_end)
            served.set()

        nursery.start_soon(serve, name="the server of this client")
        await _run_stream(options, client_end, Lines(options.limits), status)
        with trio.move_on_after(CLOSING):
            await served.wait()


async def _run_child(command: Any, options: SessionOptions, status: trio.TaskStatus[ClientSession]) -> None:
    from trio_mcp.transport.child import ServerExited, start_child

    given: Mapping[str, Any] = options.given
    child: Child

    async def connect(options: SessionOptions) -> None:
        nonlocal child
        async with open_nursery() as nursery:
            child = await start_child(nursery, command, **{name: given[name] for name in _PROCESS if name in given})
            async with child:
                lines = Lines(options.limits)
                startup = Startup(lines, options.given, child)
                await _run_stream(options, child.stream, lines, status, startup=startup)

    def how_exited(error: ServerExited) -> str | None:
        return None if child.has_read_nothing else f"the process {error.how}"

    await _retry_without_probe(connect, options, ServerExited, how_exited)


async def _retry_without_probe(
    connect: Callable[[SessionOptions], Awaitable[None]],
    options: SessionOptions,
    error_type: type[E],
    how_ended: Callable[[E], str | None],
) -> None:
    """Run a connection; if it ended because of the probe, run another one without a probe.

    `how_ended` returns how the connection ended, or None if the probe cannot be the reason.
    """
    try:
        await connect(options)
        return
    except error_type as error:
        attempts, answered = _attempts(error), how_ended(error)
        if options.offer.modern is None or not attempts or answered is None:
            raise  # the probe was not the reason
        legacy = options.legacy((*attempts[:-1], attrs.evolve(attempts[-1], answered=answered)))
        if legacy is None:
            raise  # there is no other handshake to try
    await connect(legacy)


# URLs


async def _run_url(url: str, options: SessionOptions, status: trio.TaskStatus[ClientSession]) -> None:
    run = _run_websocket if url.startswith("ws") else _run_http_url
    if options.tokens is None:
        await run(url, options, status)
        return
    options.tokens.enter()
    try:
        await run(url, options, status)
    finally:
        await options.tokens.leave()


async def _run_websocket(url: str, options: SessionOptions, status: trio.TaskStatus[ClientSession]) -> None:
    from trio_mcp.client.websocket import UpgradeRefused, dial_websocket
    from trio_mcp.core.http.websocket import WebSocketFrames
    from trio_mcp.core.revisions import Role

    dial = partial(dial_websocket, url, ssl_context=options.given.get("ssl_context"), limits=options.limits)

    async def dial_authorized(tokens: TokenSource) -> tuple[trio.abc.Stream, bytes]:
        """Dial with an access token; if the server refuses it, get a better one and dial again."""
        credentials = tokens.credentials("GET", tokens.authorizer.server_url)
        while True:
            await credentials.get()
            try:
                return await dial(headers=credentials.beside(options.headers()))
            except UpgradeRefused as error:
                credentials.replied(error.status, error.headers)
                if not credentials.refused:
                    raise
                credentials.refusal = error

    async def connect(options: SessionOptions) -> None:
        dialing = dial(headers=options.headers()) if options.tokens is None else dial_authorized(options.tokens)
        stream, received = await dialing
        frames = WebSocketFrames(Role.CLIENT, options.limits)
        await _run_stream(options, stream, frames, status, heartbeat=HEARTBEAT, received=received)

    await _retry_without_probe(connect, options, SessionClosed, str)


# The legacy servers by URL: the end of the time for which they are remembered, and whether they use HTTP+SSE.
_legacy_servers_var: trio.lowlevel.RunVar[dict[str, tuple[float, bool]] | None] = trio.lowlevel.RunVar(
    "legacy MCP servers by URL", None
)


def _legacy_servers() -> dict[str, tuple[float, bool]]:
    servers = _legacy_servers_var.get()
    if servers is None:
        servers = {}
        _legacy_servers_var.set(servers)
    return servers


def _recall_legacy(url: str) -> bool | None:
    """Return None if no legacy server is known at the URL; otherwise whether it uses HTTP+SSE."""
    entry = _legacy_servers().get(_key(url))
    return entry[1] if entry is not None and trio.current_time() < entry[0] else None


def _remember(url: str, sse: bool | None) -> None:
    known = _legacy_servers()
    known.pop(_key(url), None)
    if sse is not None:
        known[_key(url)] = trio.current_time() + _REMEMBER_SECONDS, sse
        if len(known) > _MOST_SERVERS:
            del known[next(iter(known))]


def _key(url: str) -> str:
    """Return the key for a URL.  The query is hashed: it may select the server, and it may be secret."""
    return f"{url_without_secrets(url)}?{sha256(urlsplit(url).query.encode()).hexdigest()}"


async def _run_http_url(url: str, options: SessionOptions, status: trio.TaskStatus[ClientSession]) -> None:
    from trio_mcp.client.http import NeedsSse
    from trio_mcp.transport.http_pool import HttpPool

    given, sse = options.given, _recall_legacy(url)
    # A server that was not probed was not found to be legacy.
    probed = options.offer.modern is not None
    legacy = options.legacy() if sse is not None else None
    async with HttpPool(ssl_context=given.get("ssl_context"), limits=options.limits, tap=given.get("tap")) as pool:
        if legacy is not None:
            try:
                await _run_http(pool, url, legacy, status, sse=sse is True, remember=False)
                return
            except AuthorizationFailed:
                raise  # the user has just refused: do not ask again
            except McpError as error:
                _remember(url, None)
                options = attrs.evolve(options, attempts=_attempts(error))  # the server may have been replaced
        try:
            await _run_http(pool, url, options, status, remember=probed)
        except NeedsSse as error:
            legacy = options.legacy(_attempts(error))
            assert legacy is not None  # the server refused `initialize`, so there are legacy revisions
            await _run_http(pool, url, legacy, status, sse=True, remember=probed)


async def _run_http(
    pool: HttpPool,
    url: str,
    options: SessionOptions,
    status: trio.TaskStatus[ClientSession],
    *,
    sse: bool = False,
    remember: bool,
) -> None:
    """Run a session over Streamable HTTP, or over HTTP+SSE."""
    from trio_mcp.client.http import HttpLink
    from trio_mcp.client.sse import SseLink

    async with open_nursery() as nursery:
        link = (SseLink if sse else HttpLink)(
            options.protocol(LinkKind.DUPLEX if sse else LinkKind.SESSION), options.handler, pool, url,
            nursery=nursery, headers=options.headers, mirrors=options.mirrors, authorization=options.tokens,
        )  # fmt: skip
        if isinstance(link, SseLink):
            by_sse = "HTTP+SSE at the same URL"
            try:
                await nursery.start(link.run)
            except (NoResponse, RemoteProtocolError) as error:
                attempted = (*options.attempts, Attempt(by_sse, str(error)))
                why = f"no MCP server answers at {url_without_secrets(url)}; check the path of the URL"
                raise HandshakeError(Negotiation(attempted, None, why)) from error
            link.session.attempts.append(Attempt(by_sse, "an endpoint event"))

        async def begin() -> None:
            revision = link.terms.revision
            if remember:
                _remember(url, sse if revision.handshake else None)
            if revision.handshake and not sse:
                stream_ready = trio.Event()
                nursery.start_soon(link.run_event_stream, stream_ready, name="the event stream of the session")
                if link.session.declared(revision):
                    with trio.move_on_after(EVENT_STREAM_WAIT):
                        await stream_ready.wait()

        try:
            await _run_session(options, link, status, begin=begin)
        finally:
            await link.aclose()  # also if this task is cancelled: otherwise the server keeps the session (http-59)
