"""Connecting: from a target to an open session.  Which transport is used, and what is tried in which order.

| Target | Transport | Attempts |
|---|---|---|
| ``http://...``, ``https://...`` | Streamable HTTP | discover; initialize; then HTTP+SSE at the same URL (sse-12) |
| ``ws://...``, ``wss://...`` | WebSocket | discover; initialize |
| a list of words | a child process, by its stdin and stdout | the same |
| a `Server` | memory, in this process | the same |
| a stream | the stream, one message per line | the same |

`starting` has the rules for a child or a stream before its first message.  `Negotiation` of the session has the
attempts and their results.

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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import attrs
import trio

from trio_mcp.client.caller import Caller, HandshakeError, NoResponse, ServerMessageHandler
from trio_mcp.client.stream_link import StreamLink
from trio_mcp.core.errors import McpError, RemoteProtocolError, SessionClosed, UsageError, shown
from trio_mcp.core.http.client_rules import url_without_secrets
from trio_mcp.core.http.fields import Fields, Mirror
from trio_mcp.core.messages import Limits
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.opening import Attempt, ClientProtocol, Negotiation
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.session import Offer
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.wire import CLOSING, Framing, Lines, Tap, keep_alive

if TYPE_CHECKING:
    import ssl

    from trio_mcp.client.starting import Startup, Timeouts
    from trio_mcp.oauth.client import OAuth, TokenSource
    from trio_mcp.transport.http_pool import HttpPool

__all__ = ["Connector", "OpenSession", "SessionOptions", "Target", "connector_for"]


@runtime_checkable
class InProcess(Protocol):
    """A server in this process.  A protocol class, because `client` must not import `server`."""

    async def _serve_client(self, stream: trio.abc.Stream) -> None: ...


Target: TypeAlias = "str | Sequence[str | os.PathLike[str]] | InProcess | trio.abc.Stream"

_TARGETS = 'a target must be a URL, a command such as ["python", "server.py"], a Server or a stream'

E = TypeVar("E", bound=McpError)
T = TypeVar("T")
Connector: TypeAlias = "Callable[[SessionOptions, trio.TaskStatus[OpenSession]], Any]"

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

STARTING = ("start_timeout", "garbage_timeout")  # the options of `starting.Timeouts`
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
    tap: Tap | None = None
    extra_open_time: float = 0.0
    """Seconds that opening a session may take in addition to `OPENING`, because a user has to allow access."""
    closing: trio.Event = attrs.field(factory=trio.Event)
    """Set to close the session normally."""


@attrs.frozen(eq=False, repr=False)
class OpenSession:
    """An open session, and how it was opened."""

    caller: Caller
    negotiation: Negotiation


def connector_for(
    target: Target,
    *,
    ssl_context: ssl.SSLContext | None = None,
    headers: object = None,
    auth: OAuth | None = None,
    probe: float = PROBE,
    **child: Any,
) -> Connector:
    """Return a function that opens a session with `target` and runs it; `child` are the options of `start_child` and
    `starting`.

    Raises UsageError if `target` is not a target, or does not support one of the options.
    """
    network_options = {"ssl_context": ssl_context, "headers": headers, "auth": auth}
    network_options = {name: value for name, value in network_options.items() if value is not None}
    timeouts = {name: child[name] for name in STARTING if name in child}
    process_options = {name: value for name, value in child.items() if name not in timeouts}
    in_process = isinstance(target, InProcess) and not isinstance(target, type)
    unsupported = {**network_options, **(child if in_process else process_options)}
    if (in_process or isinstance(target, trio.abc.Stream)) and unsupported:
        raise _unsupported(target, unsupported)
    if isinstance(target, InProcess) and in_process:
        return lambda options, status: _run_server(target, options, probe, status)
    if isinstance(target, trio.abc.Stream):
        starting = _starting(timeouts)
        return lambda options, status: _run_given_stream(target, options, probe, starting, status)
    if isinstance(target, str):
        return _connector_for_url(target, ssl_context, auth, probe, child)
    if isinstance(target, Sequence) and target and all(isinstance(each, str | os.PathLike) for each in target):
        if network_options:
            raise _unsupported(target, network_options)
        starting = _starting(timeouts)
        return lambda options, status: _run_child(target, process_options, options, probe, starting, status)
    # The value is not shown: arguments may be secrets.
    raise UsageError(f"{_TARGETS}; got {_describe_target(target)}")


def _starting(timeouts: Mapping[str, Any]) -> Timeouts:
    from trio_mcp.client.starting import Timeouts

    return Timeouts(**timeouts)


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


def _unsupported(target: Any, options: Mapping[str, Any]) -> UsageError:
    kind = f"a {type(target).__name__}"
    if isinstance(target, Sequence):
        kind = "a URL" if isinstance(target, str) else "a command"
    return UsageError(f"{kind} does not support the options: {', '.join(sorted(options))}")


def _connector_for_url(
    url: str, ssl_context: ssl.SSLContext | None, auth: OAuth | None, probe: float, child: Mapping[str, Any]
) -> Connector:
    if not url:
        raise UsageError(f"{_TARGETS}; got an empty string")
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("http", "https", "ws", "wss"):
        raise UsageError(
            "a URL must begin with http://, https://, ws:// or wss://; "
            'a command must be a list of words: ["python", "server.py"]'
        )
    if child:
        raise _unsupported(url, child)
    if scheme.startswith("ws"):
        token_source = None if auth is None else auth.at(url)
        return _with_tokens(
            token_source, lambda options, status: _run_websocket(url, ssl_context, token_source, options, probe, status)
        )
    from trio_mcp.transport.dial import locate

    locate(url)  # raises UsageError if the URL is invalid
    token_source = None if auth is None else auth.at(url)
    return _with_tokens(
        token_source, lambda options, status: _run_http_url(url, ssl_context, token_source, options, status)
    )


def _with_tokens(token_source: TokenSource | None, connect: Connector) -> Connector:
    """Return the same connector, with the token source in use while it runs."""
    if token_source is None:
        return connect

    async def connect_with_tokens(options: SessionOptions, status: trio.TaskStatus[OpenSession]) -> None:
        token_source.enter()
        try:
            await connect(attrs.evolve(options, extra_open_time=token_source.patience), status)
        finally:
            await token_source.leave()

    return connect_with_tokens


# One stream for all messages


async def _run_stream(
    options: SessionOptions,
    stream: trio.abc.Stream,
    framing: Framing,
    status: trio.TaskStatus[OpenSession],
    *,
    probe: float,
    heartbeat: float | None = None,
    received: bytes = b"",
    startup: Startup | None = None,
    unread: Callable[[], bool] | None = None,
    attempts: tuple[Attempt, ...] = (),
) -> None:
    async with open_nursery() as nursery:
        caller = Caller(ClientProtocol(options.offer, limits=options.limits), options.handler, nursery=nursery)
        explain = None if startup is None else startup.explain
        link = StreamLink(caller, stream, framing, nursery=nursery, tap=options.tap, explain=explain, received=received)
        link_ended = trio.Event()
        within, begin = OPENING, None
        if startup is not None:
            nursery.start_soon(startup.guard, caller, name="timeout for the first message of the server")
            begin, longest = startup.opened, startup.timeouts.longest
            # Leaves time for the answer after the first message.
            within = OPENING if longest < OPENING else longest + OPENING

        async def run_link() -> None:
            await link.run(heartbeat)
            link_ended.set()

        nursery.start_soon(run_link, name="the connection to the server")
        await _run_session(
            options, caller, status, probe=probe, within=within, unread=unread, attempts=attempts, begin=begin
        )
        with trio.move_on_after(CLOSING):
            await link.end()
            await link_ended.wait()


async def _run_session(
    options: SessionOptions,
    caller: Caller,
    status: trio.TaskStatus[OpenSession],
    *,
    probe: float | None = None,
    within: float = OPENING,
    unread: Callable[[], bool] | None = None,
    attempts: tuple[Attempt, ...] = (),
    begin: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Open the session, and wait until it is to be closed.

    `attempts` are the earlier attempts.  `begin` is called when the session is open, before it is used.
    """
    try:
        await caller.open(probe=probe, within=within + options.extra_open_time, unread=unread)
    except McpError as error:
        opening = error if isinstance(error, HandshakeError) else error.__cause__
        if isinstance(opening, HandshakeError):
            opening.negotiation = _add_attempts(attempts, opening.negotiation)
        raise
    assert caller.session.negotiation is not None
    if begin is not None:
        await begin()
    status.started(OpenSession(caller, _add_attempts(attempts, caller.session.negotiation)))
    await options.closing.wait()


def _add_attempts(attempts: tuple[Attempt, ...], negotiation: Negotiation) -> Negotiation:
    return attrs.evolve(negotiation, attempts=(*attempts, *negotiation.attempts))


async def _run_given_stream(
    stream: trio.abc.Stream,
    options: SessionOptions,
    probe: float,
    timeouts: Timeouts,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.starting import Startup

    keep_alive(stream)
    lines = Lines(options.limits)
    await _run_stream(options, stream, lines, status, probe=probe, startup=Startup(lines, timeouts))


async def _run_server(
    server: InProcess, options: SessionOptions, probe: float, status: trio.TaskStatus[OpenSession]
) -> None:
    from trio.testing import memory_stream_pair

    client_end, server_end = memory_stream_pair()
    async with open_nursery() as nursery:
        served = trio.Event()

        async def serve() -> None:
            await server._serve_client(server_end)
            served.set()

        nursery.start_soon(serve, name="the server of this client")
        await _run_stream(options, client_end, Lines(options.limits), status, probe=probe)
        with trio.move_on_after(CLOSING):
            await served.wait()


async def _run_child(
    command: Any,
    child_options: Mapping[str, Any],
    options: SessionOptions,
    probe: float,
    timeouts: Timeouts,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.starting import Startup
    from trio_mcp.transport.child import Child, ServerExited, start_child

    child: Child

    async def connect(options: SessionOptions, attempts: tuple[Attempt, ...]) -> None:
        nonlocal child
        async with open_nursery() as nursery:
            child = await start_child(nursery, command, **child_options)
            async with child:
                lines = Lines(options.limits)
                await _run_stream(
                    options,
                    child.stream,
                    lines,
                    status,
                    probe=probe,
                    startup=Startup(lines, timeouts, child),
                    unread=lambda: child.has_read_nothing,
                    attempts=attempts,
                )

    def how_exited(error: ServerExited) -> str | None:
        return None if child.has_read_nothing else f"the process {error.how}"

    await _retry_without_probe(connect, options, ServerExited, how_exited)


async def _retry_without_probe(
    connect: Callable[[SessionOptions, tuple[Attempt, ...]], Awaitable[None]],
    options: SessionOptions,
    error_type: type[E],
    how_ended: Callable[[E], str | None],
) -> None:
    """Run a connection; if it ended because of the probe, run another one without a probe.

    `how_ended` returns how the connection ended, or None if the probe cannot be the reason.
    """
    try:
        await connect(options, ())
    except error_type as error:
        legacy, attempts = _legacy_only(options), _attempts(error)
        answered = how_ended(error)
        if options.offer.modern is None or legacy is None or not attempts or answered is None:
            raise  # the probe was not the reason, or there is no other handshake to try
        failed_probe = attrs.evolve(attempts[-1], answered=answered)
    else:
        return
    await connect(legacy, (*attempts[:-1], failed_probe))


async def _run_websocket(
    url: str,
    ssl_context: ssl.SSLContext | None,
    token_source: TokenSource | None,
    options: SessionOptions,
    probe: float,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.websocket import dial_websocket
    from trio_mcp.core.http.websocket import WebSocketFrames
    from trio_mcp.core.revisions import Role

    async def dial(headers: Fields) -> tuple[trio.abc.Stream, bytes]:
        return await dial_websocket(url, ssl_context=ssl_context, headers=headers, limits=options.limits)

    async def connect(options: SessionOptions, attempts: tuple[Attempt, ...]) -> None:
        if token_source is None:
            stream, received = await dial(options.headers())
        else:
            stream, received = await _dial_authorized(token_source, options.headers, dial)
        frames = WebSocketFrames(Role.CLIENT, options.limits)
        await _run_stream(
            options,
            stream,
            frames,
            status,
            probe=probe,
            heartbeat=HEARTBEAT,
            received=received,
            attempts=attempts,
        )

    await _retry_without_probe(connect, options, SessionClosed, str)


async def _dial_authorized(
    token_source: TokenSource, headers: Callable[[], Fields], dial: Callable[[Fields], Awaitable[T]]
) -> T:
    """Dial with an access token; if the server refuses it, get a better one and dial again."""
    from trio_mcp.client.websocket import UpgradeRefused

    credentials = token_source.request("GET", token_source.authorizer.server_url)
    while True:
        await credentials.get()
        try:
            return await dial(credentials.beside(headers()))
        except UpgradeRefused as error:
            credentials.replied(error.status, error.headers)
            if not credentials.refused:
                raise
            credentials.refusal = error


# HTTP

_legacy_servers_var: trio.lowlevel.RunVar[OrderedDict[str, tuple[float, bool]]] = trio.lowlevel.RunVar(
    "legacy MCP servers by URL"
)


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
            known.popitem(last=False)


def _legacy_servers() -> OrderedDict[str, tuple[float, bool]]:
    with suppress(LookupError):
        return _legacy_servers_var.get()
    servers: OrderedDict[str, tuple[float, bool]] = OrderedDict()
    _legacy_servers_var.set(servers)
    return servers


def _key(url: str) -> str:
    """Return the key for a URL.  The query is hashed: it may select the server, and it may be secret."""
    return f"{url_without_secrets(url)}?{sha256(urlsplit(url).query.encode()).hexdigest()}"


async def _run_http_url(
    url: str,
    ssl_context: ssl.SSLContext | None,
    token_source: TokenSource | None,
    options: SessionOptions,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.http_link import NeedsSse
    from trio_mcp.transport.http_pool import HttpPool

    sse = _recall_legacy(url)
    # A server that was not probed was not found to be legacy.
    remember = partial(_remember, url) if options.offer.modern is not None else lambda sse: None
    attempts: tuple[Attempt, ...] = ()
    legacy = _legacy_only(options) if sse is not None else None
    async with HttpPool(ssl_context=ssl_context, limits=options.limits, tap=options.tap) as pool:
        if legacy is not None:
            try:
                await (_run_sse if sse else _run_http)(pool, url, token_source, legacy, status, (), lambda sse: None)
                return
            except AuthorizationFailed:
                raise  # the user has just refused: do not ask again
            except McpError as error:
                _remember(url, None)
                attempts = _attempts(error)  # the server may have been replaced
        try:
            await _run_http(pool, url, token_source, options, status, attempts, remember)
        except NeedsSse as error:
            legacy = _legacy_only(options)
            assert legacy is not None  # the server refused `initialize`, so there are legacy revisions
            await _run_sse(pool, url, token_source, legacy, status, _attempts(error), remember)


def _attempts(error: McpError) -> tuple[Attempt, ...]:
    opening = error if isinstance(error, HandshakeError) else error.__cause__
    return opening.negotiation.attempts if isinstance(opening, HandshakeError) else ()


def _legacy_only(options: SessionOptions) -> SessionOptions | None:
    older = tuple(each for each in options.offer.revisions if each.handshake)
    return attrs.evolve(options, offer=attrs.evolve(options.offer, revisions=older)) if older else None


async def _run_http(
    pool: HttpPool,
    url: str,
    token_source: TokenSource | None,
    options: SessionOptions,
    status: trio.TaskStatus[OpenSession],
    attempts: tuple[Attempt, ...],
    remember: Callable[[bool | None], object],
) -> None:
    from trio_mcp.client.http_link import HttpLink

    async with open_nursery() as nursery:
        session = ClientProtocol(options.offer, link=LinkKind.SESSION, limits=options.limits)
        caller = Caller(session, options.handler, nursery=nursery)
        link = HttpLink(
            caller, pool, url,
            nursery=nursery, headers=options.headers, mirrors=options.mirrors, authorization=token_source,
        )  # fmt: skip

        async def begin() -> None:
            assert session.terms is not None
            revision = session.terms.revision
            remember(False if revision.handshake else None)
            if revision.handshake:
                stream_ready = trio.Event()
                nursery.start_soon(link.run_event_stream, stream_ready, name="the event stream of the session")
                if session.declared(revision):
                    with trio.move_on_after(EVENT_STREAM_WAIT):
                        await stream_ready.wait()

        try:
            await _run_session(options, caller, status, attempts=attempts, begin=begin)
        finally:
            await link.aclose()  # also if this task is cancelled: otherwise the server keeps the session (http-59)


async def _run_sse(
    pool: HttpPool,
    url: str,
    token_source: TokenSource | None,
    options: SessionOptions,
    status: trio.TaskStatus[OpenSession],
    attempts: tuple[Attempt, ...],
    remember: Callable[[bool | None], object],
) -> None:
    from trio_mcp.client.http_link import SseLink

    by_sse = "HTTP+SSE at the same URL"
    async with open_nursery() as nursery:
        caller = Caller(ClientProtocol(options.offer, limits=options.limits), options.handler, nursery=nursery)
        link = SseLink(caller, pool, url, nursery=nursery, headers=options.headers, authorization=token_source)
        try:
            await nursery.start(link.run)
        except (NoResponse, RemoteProtocolError) as error:
            attempted = (*attempts, Attempt(by_sse, str(error)))
            why = f"no MCP server answers at {url_without_secrets(url)}; check the path of the URL"
            raise HandshakeError(Negotiation(attempted, None, why)) from error
        attempted = (*attempts, Attempt(by_sse, "an endpoint event"))

        async def begin() -> None:
            remember(True)

        await _run_session(options, caller, status, attempts=attempted, begin=begin)
        await link.aclose()
