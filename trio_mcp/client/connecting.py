"""A target, and how a session with it is opened: what the transport is, and what is tried in which order.

| The target | How it is reached | What is tried |
|---|---|---|
| ``http://...``, ``https://...`` | Streamable HTTP | discover; initialize; then HTTP+SSE at the same URL (sse-12) |
| ``ws://...``, ``wss://...`` | WebSocket | discover; initialize |
| a list of words | a child process, by its standard input and output | the same |
| a `Server` | memory, in this process | the same |
| a stream | as it is, one message a line | the same |

What a child or a stream may do before its first message is in `starting`.

Which of these the server understood is in the session's `Negotiation`.  An origin that was found to be of the legacy
era is not probed again by this program for a while (ver-10); should that prove wrong, it is.  A child process that ends
over the probe, as some of the legacy era do, is started once more and not probed then; a WebSocket that is closed over
it is opened once more.  Of a probe that nobody has read no process has ended, and no time has passed for one that is
still starting.

A connection is held by one task, from before the first byte until after the last, so that whatever happens to whoever
opened it, somebody is there to close it.
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
from trio_mcp.core.jsonrpc import Limits
from trio_mcp.core.oauth.errors import AuthorizationFailed
from trio_mcp.core.opening import Attempt, ClientProtocol, Negotiation
from trio_mcp.core.session import Offer
from trio_mcp.core.state import LinkKind
from trio_mcp.transport.duplex import Framing, Lines, Tap, keep_alive
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.outbox import CLOSING

if TYPE_CHECKING:
    import ssl

    from trio_mcp.client.starting import Startup, Timeouts
    from trio_mcp.oauth.client import OAuth, TokenSource
    from trio_mcp.transport.http_pool import HttpPool

__all__ = ["Hold", "OpenSession", "SessionOptions", "Target", "how_to_reach"]


@runtime_checkable
class InProcess(Protocol):
    """A server in this process.  A protocol, because this room does not import that of the server."""

    async def _serve_client(self, stream: trio.abc.Stream) -> None: ...


Target: TypeAlias = "str | Sequence[str | os.PathLike[str]] | InProcess | trio.abc.Stream"

E = TypeVar("E", bound=McpError)
T = TypeVar("T")
Hold: TypeAlias = "Callable[[SessionOptions, trio.TaskStatus[OpenSession]], Any]"

PROBE = 5.0
"""Seconds for which a server on a stream may think about `server/discover`; some of the legacy era say nothing."""
OPENING = 300.0
"""Seconds for which a server may think about how to open a session: a launcher may have to fetch it first.  Whoever is
tried anew, as a process that is started again, has them anew."""
HEARTBEAT = 20.0
"""Seconds of silence on a WebSocket after which the server is asked whether it is there, and then given up."""
STANDING = 1.0
"""Seconds for which a client that may be asked waits for the stream that questions come by.  Some servers discard a
question while there is none; others do not say that there is one before they have something to say on it."""

STARTING = ("start_timeout", "garbage_timeout")  # options of `starting.Timeouts`
_REMEMBERED = 600.0  # seconds for which an origin is known to be a legacy one
_MOST_REMEMBERED = 1000


@attrs.frozen(eq=False, repr=False)
class SessionOptions:
    """How a client wants its sessions to be."""

    offer: Offer
    talk: ServerMessageHandler
    limits: Limits
    headers: Callable[[], Fields]
    """What goes along with each HTTP request, asked for each time."""
    mirrors: Callable[[str], Sequence[Mirror]]
    """Which arguments of the tool of this name go into headers."""
    tap: Tap | None = None
    patience: float = 0.0
    """Seconds that opening a session may take beyond `OPENING`, for a user who has to allow it."""
    ending: trio.Event = attrs.field(factory=trio.Event)
    """When this is set the session is to be closed in good order."""


@attrs.frozen(eq=False, repr=False)
class OpenSession:
    """An open session."""

    caller: Caller
    negotiation: Negotiation


def how_to_reach(
    target: Target,
    *,
    ssl_context: ssl.SSLContext | None = None,
    headers: object = None,
    auth: OAuth | None = None,
    probe: float = PROBE,
    **child: Any,
) -> Hold:
    """What opens a session with `target`, and holds it; `child` are the options of `start_child` and `starting`.

    Raises UsageError for what is no target, and for options that it has no use for.
    """
    of_the_web = {"ssl_context": ssl_context, "headers": headers, "auth": auth}
    web = {name: value for name, value in of_the_web.items() if value is not None}
    timeouts = {name: child[name] for name in STARTING if name in child}
    of_process = {name: value for name, value in child.items() if name not in timeouts}
    in_process = isinstance(target, InProcess) and not isinstance(target, type)
    useless = {**web, **(child if in_process else of_process)}
    if (in_process or isinstance(target, trio.abc.Stream)) and useless:
        raise _useless(target, useless)
    if isinstance(target, InProcess) and in_process:
        return lambda manner, status: _hold_server(target, manner, probe, status)
    if isinstance(target, trio.abc.Stream):
        starting = _starting(timeouts)
        return lambda manner, status: _hold_given(target, manner, probe, starting, status)
    if isinstance(target, str):
        return _by_url(target, ssl_context, auth, probe, child)
    if isinstance(target, Sequence) and target and all(isinstance(each, str | os.PathLike) for each in target):
        if web:
            raise _useless(target, web)
        starting = _starting(timeouts)
        return lambda manner, status: _hold_child(target, of_process, manner, probe, starting, status)
    # Not as it is, for arguments may be secrets.
    raise UsageError(
        f'a target is a URL, a command such as ["python", "server.py"], a Server or a stream; got {_kind_of(target)}'
    )


def _starting(timeouts: Mapping[str, Any]) -> Timeouts:
    from trio_mcp.client.starting import Timeouts

    return Timeouts(**timeouts)


def _kind_of(target: Any) -> str:
    """What was given instead of a target, and what to write."""
    if isinstance(target, type):
        return f"the class {target.__name__}; give an object of it"
    if inspect.isroutine(target):
        return f"the function {target.__name__}; call what makes the Server, and give that"
    if inspect.iscoroutine(target):
        return "a coroutine; await it first"
    if inspect.ismodule(target):
        return f"the module {target.__name__}; give the Server in it, such as {target.__name__}.server"
    if isinstance(target, os.PathLike):
        return 'a path; write ["python", path]'
    if isinstance(target, Mapping):
        return f"a {type(target).__name__}; of a configuration, write open_client([command, *args], env=env)"
    if not isinstance(target, Sequence) or isinstance(target, bytes | bytearray | memoryview):
        return type(target).__name__
    kind = f"a {type(target).__name__}"
    if not target:
        return f"an empty {type(target).__name__}"
    first = shown(target[0]) if isinstance(target[0], str | os.PathLike) else type(target[0]).__name__
    others = sorted({type(each).__name__ for each in target[1:]})
    return f"{kind} of {first}" + (f" and {', '.join(others)}" if others else "")


def _useless(target: Any, options: Mapping[str, Any]) -> UsageError:
    what = f"a {type(target).__name__}"
    if isinstance(target, Sequence):
        what = "a URL" if isinstance(target, str) else "a command"
    return UsageError(f"{', '.join(sorted(options))} means nothing to {what}")


def _by_url(
    url: str, ssl_context: ssl.SSLContext | None, auth: OAuth | None, probe: float, child: Mapping[str, Any]
) -> Hold:
    if not url:
        raise UsageError(
            'a target is a URL, a command such as ["python", "server.py"], a Server or a stream; got an empty string'
        )
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("http", "https", "ws", "wss"):
        raise UsageError(
            "a URL begins with http://, https://, ws:// or wss://; "
            'a command is a list, one string for each word: ["python", "server.py"]'
        )
    if child:
        raise _useless(url, child)
    if scheme.startswith("ws"):
        granting = None if auth is None else auth.at(url)
        return _authorized(
            granting, lambda manner, status: _hold_websocket(url, ssl_context, granting, manner, probe, status)
        )
    from trio_mcp.transport.dial import locate

    locate(url)  # which raises what there is to say
    granting = None if auth is None else auth.at(url)
    return _authorized(granting, lambda manner, status: _hold_url(url, ssl_context, granting, manner, status))


def _authorized(granting: TokenSource | None, hold: Hold) -> Hold:
    """The same, with what gives it tokens for as long."""
    if granting is None:
        return hold

    async def holding(manner: SessionOptions, status: trio.TaskStatus[OpenSession]) -> None:
        granting.enter()
        try:
            await hold(attrs.evolve(manner, patience=granting.patience), status)
        finally:
            await granting.leave()

    return holding


# One stream for everything.


async def _hold_stream(
    manner: SessionOptions,
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
        caller = Caller(ClientProtocol(manner.offer, limits=manner.limits), manner.talk, nursery=nursery)
        explain = None if startup is None else startup.explain
        link = StreamLink(caller, stream, framing, nursery=nursery, tap=manner.tap, explain=explain, received=received)
        carried = trio.Event()
        within, begin = OPENING, None
        if startup is not None:
            nursery.start_soon(startup.guard, caller, name="waits for the first message of the server")
            begin, longest = startup.opened, startup.timeouts.longest
            within = OPENING if longest < OPENING else longest + OPENING  # or there would be no time for the answer

        async def carry() -> None:
            await link.run(heartbeat)
            carried.set()

        nursery.start_soon(carry, name="the connection to the server")
        await _use(manner, caller, status, probe=probe, within=within, unread=unread, attempts=attempts, begin=begin)
        with trio.move_on_after(CLOSING):
            await link.end()
            await carried.wait()


async def _use(
    manner: SessionOptions,
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

    `attempts` are those that were made before; `begin` is called before anybody uses the session.
    """
    try:
        await caller.open(probe=probe, within=within + manner.patience, unread=unread)
    except McpError as error:
        opening = error if isinstance(error, HandshakeError) else error.__cause__
        if isinstance(opening, HandshakeError):
            opening.negotiation = _after(attempts, opening.negotiation)
        raise
    assert caller.session.negotiation is not None
    if begin is not None:
        await begin()
    status.started(OpenSession(caller, _after(attempts, caller.session.negotiation)))
    await manner.ending.wait()


def _after(attempts: tuple[Attempt, ...], negotiation: Negotiation) -> Negotiation:
    return attrs.evolve(negotiation, attempts=(*attempts, *negotiation.attempts))


async def _hold_given(
    stream: trio.abc.Stream,
    manner: SessionOptions,
    probe: float,
    timeouts: Timeouts,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.starting import Startup

    keep_alive(stream)
    lines = Lines(manner.limits)
    await _hold_stream(manner, stream, lines, status, probe=probe, startup=Startup(lines, timeouts))


async def _hold_server(
    server: InProcess, manner: SessionOptions, probe: float, status: trio.TaskStatus[OpenSession]
) -> None:
    from trio.testing import memory_stream_pair

    ours, theirs = memory_stream_pair()
    async with open_nursery() as nursery:
        served = trio.Event()

        async def serve() -> None:
            await server._serve_client(theirs)
            served.set()

        nursery.start_soon(serve, name="the server of this client")
        await _hold_stream(manner, ours, Lines(manner.limits), status, probe=probe)
        with trio.move_on_after(CLOSING):
            await served.wait()


async def _hold_child(
    command: Any,
    options: Mapping[str, Any],
    manner: SessionOptions,
    probe: float,
    timeouts: Timeouts,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.starting import Startup
    from trio_mcp.transport.child import Child, ServerExited, start_child

    child: Child

    async def hold(manner: SessionOptions, attempts: tuple[Attempt, ...]) -> None:
        nonlocal child
        async with open_nursery() as nursery:
            child = await start_child(nursery, command, **options)
            async with child:
                lines = Lines(manner.limits)
                await _hold_stream(
                    manner,
                    child.stream,
                    lines,
                    status,
                    probe=probe,
                    startup=Startup(lines, timeouts, child),
                    unread=lambda: child.has_read_nothing,
                    attempts=attempts,
                )

    def how(error: ServerExited) -> str | None:
        return None if child.has_read_nothing else f"the process {error.how}"

    await _perhaps_again(hold, manner, ServerExited, how)


async def _perhaps_again(
    hold: Callable[[SessionOptions, tuple[Attempt, ...]], Awaitable[None]],
    manner: SessionOptions,
    over: type[E],
    what: Callable[[E], str | None],
) -> None:
    """Hold a connection, and if it was over already with the probe, one more without it.

    `what` says how it ended, or None where the probe cannot have been the reason.
    """
    try:
        await hold(manner, ())
    except over as error:
        legacy, attempts = _legacy_only(manner), _attempts(error)
        answered = what(error)
        if manner.offer.modern is None or legacy is None or not attempts or answered is None:
            raise  # it was not the probe that it died of, or nothing else can be tried
        died = attrs.evolve(attempts[-1], answered=answered)
    else:
        return
    await hold(legacy, (*attempts[:-1], died))


async def _hold_websocket(
    url: str,
    ssl_context: ssl.SSLContext | None,
    granting: TokenSource | None,
    manner: SessionOptions,
    probe: float,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.websocket import dial_websocket
    from trio_mcp.core.http.websocket import WebSocketFrames
    from trio_mcp.core.revisions import Role

    async def dial(headers: Fields) -> tuple[trio.abc.Stream, bytes]:
        return await dial_websocket(url, ssl_context=ssl_context, headers=headers, limits=manner.limits)

    async def hold(manner: SessionOptions, attempts: tuple[Attempt, ...]) -> None:
        if granting is None:
            stream, received = await dial(manner.headers())
        else:
            stream, received = await _granted(granting, manner.headers, dial)
        frames = WebSocketFrames(Role.CLIENT, manner.limits)
        await _hold_stream(
            manner,
            stream,
            frames,
            status,
            probe=probe,
            heartbeat=HEARTBEAT,
            received=received,
            attempts=attempts,
        )

    await _perhaps_again(hold, manner, SessionClosed, str)


async def _granted(granting: TokenSource, headers: Callable[[], Fields], dial: Callable[[Fields], Awaitable[T]]) -> T:
    """What `dial` gives, with what the server wants to see."""
    from trio_mcp.client.websocket import UpgradeRefused

    credentials = granting.request("GET", granting.authorizer.server_url)
    while True:
        await credentials.get()
        try:
            return await dial(credentials.beside(headers()))
        except UpgradeRefused as error:
            credentials.replied(error.status, error.headers)
            if not credentials.refused:
                raise
            credentials.refusal = error


# HTTP.

_eras: trio.lowlevel.RunVar[OrderedDict[str, tuple[float, bool]]] = trio.lowlevel.RunVar("legacy MCP servers by URL")


def _known(url: str) -> bool | None:
    """Whether a server of the legacy era is known to be here, and then, whether it takes HTTP+SSE."""
    found = _remembered().get(_key(url))
    return found[1] if found is not None and trio.current_time() < found[0] else None


def _remember(url: str, sse: bool | None) -> None:
    known = _remembered()
    known.pop(_key(url), None)
    if sse is not None:
        known[_key(url)] = trio.current_time() + _REMEMBERED, sse
        if len(known) > _MOST_REMEMBERED:
            known.popitem(last=False)


def _remembered() -> OrderedDict[str, tuple[float, bool]]:
    with suppress(LookupError):
        return _eras.get()
    eras: OrderedDict[str, tuple[float, bool]] = OrderedDict()
    _eras.set(eras)
    return eras


def _key(url: str) -> str:
    """By which it is remembered.  The query may choose the server, and may be secret."""
    return f"{url_without_secrets(url)}?{sha256(urlsplit(url).query.encode()).hexdigest()}"


async def _hold_url(
    url: str,
    ssl_context: ssl.SSLContext | None,
    granting: TokenSource | None,
    manner: SessionOptions,
    status: trio.TaskStatus[OpenSession],
) -> None:
    from trio_mcp.client.http_link import NeedsSse
    from trio_mcp.transport.http_pool import HttpPool

    sse = _known(url)
    # What was not asked for the modern era was not found to be of the other.
    found = partial(_remember, url) if manner.offer.modern is not None else lambda sse: None
    attempts: tuple[Attempt, ...] = ()
    legacy = _legacy_only(manner) if sse is not None else None
    async with HttpPool(ssl_context=ssl_context, limits=manner.limits, tap=manner.tap) as pool:
        if legacy is not None:
            try:
                await (_hold_sse if sse else _hold_http)(pool, url, granting, legacy, status, (), lambda sse: None)
                return
            except AuthorizationFailed:
                raise  # and nobody is asked once more, who has just said no
            except McpError as error:
                _remember(url, None)
                attempts = _attempts(error)  # it may have changed since
        try:
            await _hold_http(pool, url, granting, manner, status, attempts, found)
        except NeedsSse as error:
            legacy = _legacy_only(manner)
            assert legacy is not None  # it is `initialize` that was refused
            await _hold_sse(pool, url, granting, legacy, status, _attempts(error), found)


def _attempts(error: McpError) -> tuple[Attempt, ...]:
    opening = error if isinstance(error, HandshakeError) else error.__cause__
    return opening.negotiation.attempts if isinstance(opening, HandshakeError) else ()


def _legacy_only(manner: SessionOptions) -> SessionOptions | None:
    older = tuple(each for each in manner.offer.revisions if each.handshake)
    return attrs.evolve(manner, offer=attrs.evolve(manner.offer, revisions=older)) if older else None


async def _hold_http(
    pool: HttpPool,
    url: str,
    granting: TokenSource | None,
    manner: SessionOptions,
    status: trio.TaskStatus[OpenSession],
    attempts: tuple[Attempt, ...],
    found: Callable[[bool | None], object],
) -> None:
    from trio_mcp.client.http_link import HttpLink

    async with open_nursery() as nursery:
        session = ClientProtocol(manner.offer, link=LinkKind.SESSION, limits=manner.limits)
        caller = Caller(session, manner.talk, nursery=nursery)
        link = HttpLink(
            caller, pool, url,
            nursery=nursery, headers=manner.headers, mirrors=manner.mirrors, authorization=granting,
        )  # fmt: skip

        async def begin() -> None:
            assert session.terms is not None
            revision = session.terms.revision
            found(False if revision.handshake else None)
            if revision.handshake:
                standing = trio.Event()
                nursery.start_soon(link.stand, standing, name="what the server says outside of requests")
                if session.declared(revision):
                    with trio.move_on_after(STANDING):
                        await standing.wait()

        try:
            await _use(manner, caller, status, attempts=attempts, begin=begin)
        finally:
            await link.aclose()  # also if this is cancelled: the server would keep the session (http-59)


async def _hold_sse(
    pool: HttpPool,
    url: str,
    granting: TokenSource | None,
    manner: SessionOptions,
    status: trio.TaskStatus[OpenSession],
    attempts: tuple[Attempt, ...],
    found: Callable[[bool | None], object],
) -> None:
    from trio_mcp.client.http_link import SseLink

    by_sse = "HTTP+SSE at the same URL"
    async with open_nursery() as nursery:
        caller = Caller(ClientProtocol(manner.offer, limits=manner.limits), manner.talk, nursery=nursery)
        link = SseLink(caller, pool, url, nursery=nursery, headers=manner.headers, authorization=granting)
        try:
            await nursery.start(link.run)
        except (NoResponse, RemoteProtocolError) as error:
            tried = (*attempts, Attempt(by_sse, str(error)))
            why = f"no MCP server answers at {url_without_secrets(url)}; the path of the URL may be a wrong one"
            raise HandshakeError(Negotiation(tried, None, why)) from error
        tried = (*attempts, Attempt(by_sse, "an endpoint event"))

        async def begin() -> None:
            found(True)

        await _use(manner, caller, status, attempts=tried, begin=begin)
        await link.aclose()
