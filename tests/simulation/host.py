"""The programs that serve: the server, a relay before it, an authorization server, and a client that means harm.

Each `Host` is a program at a port that may die, be cancelled or drain, and comes back after a while as another process
would: with nothing but what is stored outside (`Book.notes`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import attrs
import trio

from tests.core.auth_server import AuthServer
from tests.http.client import request
from tests.http.served import by_token
from tests.simulation.book import Book
from tests.simulation.network import Listener, Network, caller
from tests.simulation.replicas import is_away
from tests.simulation.tasks import TASK_SECONDS, Mounted
from trio_mcp import Accepted, Context, Limits, Principal, RequestError, Server, ToolError, serve_http, serve_stream
from trio_mcp.core.oauth import SendRequest
from trio_mcp.types import Resource

__all__ = [
    "ISSUER",
    "KEYS",
    "LIMITS",
    "REPLICAS",
    "SERVER",
    "TIGHT",
    "TOOLS",
    "Host",
    "authorize",
    "build",
    "hostile",
    "url_of",
]

SERVER, BEHIND, REPLICAS, AUTHORITY = 3000, 3001, 3100, 4000  # ports; the replicas have those from 3100 on
RESOURCE, ISSUER = f"http://127.0.0.1:{SERVER}", f"http://127.0.0.1:{AUTHORITY}"
KEYS = ("note://a", "note://b")
# As short as they can be, so that what is left behind is gone soon after the end.
LIMITS = Limits(
    session_idle_seconds=60,
    parked_seconds=60,
    head_seconds=10,
    body_seconds=20,
    write_seconds=30,
    task_seconds=TASK_SECONDS,
)
TIGHT = attrs.evolve(
    LIMITS, session_idle_seconds=40, idle_seconds=20, calls=2, calls_in_all=3, parked=2,
    parked_each=1, sessions=2, connections=5, streams=2, subscriptions=3, outgoing=2, replay_events=3, requests=6,
)  # fmt: skip
_PATHS = {"http": "/mcp", "json": "/mcp", "sse": "/sse", "websocket": "/ws"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "http": {}, "json": {"json_only": True}, "sse": {"sse_path": "/sse", "message_path": "/messages"}, "websocket": {},
}  # fmt: skip
TOOLS = ("echo", "big", "plain", "fail", "log", "count", "hold", "away", "wizard", "ask", "job", "quiz", "put")


def url_of(transport: str, port: int) -> str:
    return f"{'ws' if transport == 'websocket' else 'http'}://127.0.0.1:{port}{_PATHS[transport]}"


@dataclass
class Answer:
    answer: str


@attrs.define(eq=False)
class _At:
    """Which world the handlers of a server are in."""

    book: Book


_KEPT: dict[tuple[Limits, int | None], tuple[Server, _At]] = {}


def build(
    book: Book,
    limits: Limits = LIMITS,
    *,
    anew: bool = True,
    place: int | None = None,
    store: Mounted | None = None,
) -> Server:
    """A server whose handlers write in the book what they do; each is told by its token for whom.

    Without `anew` it may be one that has been served in another world.  To make one takes as long as a dozen calls.
    `place` is its number among replicas, which share a `store`.
    """
    store = Mounted(book.store) if store is None else store
    if not anew and (limits, place) in _KEPT:
        server, at = _KEPT[limits, place]
        if server.statistics().connections == 0:  # else that world has broken a rule
            at.book = book
            server._store = store
            return server
    # With keys of its own, or what it seals would differ from one play of a world to the next.
    keys = None if anew and place is None else [bytes(32)]
    server, at = (
        Server(
            "simulated",
            version="1",
            limits=limits,
            page_size=4,
            change_debounce=0.05,
            state_keys=keys,
            store=store,
        ),
        _At(book),
    )
    server._shares_store = place is not None  # else the sessions end with the process
    _add_quick_tools(server, at)
    _add_slow_tools(server, at)
    _add_tasks(server, at)
    _add_the_rest(server, at)
    if not anew:
        _KEPT[limits, place] = server, at
    return server


def _add_quick_tools(server: Server, at: _At) -> None:
    @server.tool
    async def echo(token: str, pad: str, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            return {"token": token, "length": len(pad)}

    @server.tool
    async def big(token: str, length: int, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            return {"token": token, "pad": "x" * length}

    @server.tool
    def plain(token: str, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            return {"token": token}

    @server.tool
    async def fail(token: str, politely: bool, ctx: Context) -> None:
        with at.book.handling(token, ctx.principal):
            raise ToolError(token) if politely else RequestError(7, token)

    @server.tool
    async def log(token: str, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            await ctx.log("warning", token)
            return {"token": token}


def _add_slow_tools(server: Server, at: _At) -> None:
    @server.tool
    async def count(token: str, to: int, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            for number in range(to):
                await ctx.progress(number, to, message=token if ctx.revision > "2024-11-05" else None)
                await trio.sleep((0.0, 0.02, 1.0)[number % 3])
            return {"token": token}

    @server.tool
    async def hold(token: str, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            await trio.sleep_forever()
            return {"token": token}

    @server.tool
    async def away(token: str, ctx: Context) -> dict[str, Any]:
        """The client may go, and come back for the answer."""
        with at.book.handling(token, ctx.principal):
            await ctx.hang_up(retry=0.5)
            await trio.sleep(2)
            return {"token": token}

    @server.tool(replay=True)
    async def wizard(token: str, ctx: Context) -> dict[str, Any]:
        """Asks twice, and may be run again from its start, at another server."""
        with at.book.handling(token, ctx.principal, again=True):
            for _ in range(2):
                filled = await ctx.elicit(token, Answer)
                said = filled.value.answer if isinstance(filled, Accepted) else ""
                at.book.check(said == f"answer to {token}", f"{token} got the client's answer {said!r}")
            return {"token": token}

    @server.tool
    async def ask(token: str, model: bool, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            if model:
                said = (await ctx.sample(token, max_tokens=9)).content.text  # type: ignore[union-attr]
            else:
                filled = await ctx.elicit(token, Answer)
                said = filled.value.answer if isinstance(filled, Accepted) else ""
            at.book.check(said == f"answer to {token}", f"{token} got the client's answer {said!r}")
            return {"token": token}


def _add_tasks(server: Server, at: _At) -> None:
    @server.tool(task="optional")
    async def job(token: str, ctx: Context, seconds: float = 0.0) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            await trio.sleep(seconds)
            for number in range(len(token) % 4):
                await ctx.progress(number, message=token)
                await trio.sleep((0.0, 0.5, 3.0)[number % 3])
            return {"token": token}

    @server.tool(task="optional", replay=True)
    async def quiz(token: str, ctx: Context, seconds: float = 0.1) -> dict[str, Any]:
        """Asks twice, and may be run again from its start, with the answers that it has had."""
        with at.book.handling(token, ctx.principal, again=True):
            for _ in range(2):
                filled = await ctx.elicit(token, Answer)
                said = filled.value.answer if isinstance(filled, Accepted) else ""
                at.book.check(said == f"answer to {token}", f"{token} got the client's answer {said!r}")
                await trio.sleep(seconds)
            return {"token": token}


def _add_the_rest(server: Server, at: _At) -> None:
    @server.tool
    async def put(token: str, uri: str, version: int, ctx: Context) -> dict[str, Any]:
        with at.book.handling(token, ctx.principal):
            at.book.notes[uri] = max(version, at.book.notes.get(uri, 0))
            at.book.publish(uri)
            server.notify_resource_updated(uri)
            await trio.lowlevel.checkpoint()
            return {"token": token}

    for uri in KEYS:
        server.add_resource(Resource(uri[-1], uri), lambda ctx, uri: str(at.book.notes.get(uri, 0)))

    @server.prompt
    async def say(token: str, ctx: Context) -> str:
        with at.book.handling(token, ctx.principal, again=True):  # a client may repeat what changes nothing
            return token

    @server.completion("say", "token")
    async def tokens(value: str) -> list[str]:
        return [f"{value}!"]


class Host:
    """A program that serves at a port.  `make` gives the server that it serves, for as long as it lives."""

    def __init__(
        self,
        name: str,
        port: int,
        transport: str,
        network: Network,
        book: Book,
        make: Callable[[], AbstractAsyncContextManager[Server]],
        *,
        authenticate: bool = False,
        single: bool = False,
    ) -> None:
        self.name, self.port = name, port
        self._single = single  # one request on each connection
        self.server: Server | None = None  # while it is up
        self._transport = transport
        self._network, self._book, self._make = network, book, make
        self._options = dict(_OPTIONS.get(transport, {}))
        if authenticate:
            self._options["authenticate"] = by_token
        if transport != "stream":
            self._options["task_status"] = SimpleNamespace(started=lambda address: self.joined.set())
        self._scope = trio.CancelScope()
        self._drain: float | None = None
        self._asked = trio.Event()
        self._pause = 0.0
        self.up = trio.Event()
        """Set when it listens for the first time."""
        self.joined = trio.Event()
        """Set when it serves for the first time, as one of the replicas."""
        self.ended = False

    async def run(self) -> None:
        caller.set(self.name)
        while not self.ended:
            self._scope, self._asked, self._drain = trio.CancelScope(), trio.Event(), None
            try:
                with self._scope:
                    await self._live()
            except Exception as error:  # noqa: BLE001  # serving raises nothing because of a client
                if not (self._book.harms and is_away(error)):
                    self._book.unexpected(self.name, error)
                self._book.tell(f"{self.name} cannot begin")
                self._pause = 1.0  # a supervisor tries again
            self.server = None
            self._book.tell(f"{self.name} has ended")
            if not self.ended:
                await trio.sleep(self._pause)

    async def _live(self) -> None:
        async with self._make() as server, trio.open_nursery() as nursery:
            nursery.start_soon(self._draining, server)
            listener = self._network.listen(self.port, single=self._single)
            self._book.tell(f"{self.name} is up")
            self.server = server
            self.up.set()
            try:
                if self._transport == "stream":
                    await self._accept(server, listener)
                else:
                    await serve_http(server, listeners=[listener], allowed_hosts=["127.0.0.1"], **self._options)
            finally:
                listener.close()
            self._scope.cancel()

    async def _accept(self, server: Server, listener: Listener) -> None:
        """As a program does that serves streams, all in one run."""
        async with server.running(), trio.open_nursery() as nursery:
            try:
                while True:
                    nursery.start_soon(serve_stream, server, await listener.accept())
            finally:
                with trio.CancelScope(shield=True):
                    await listener.aclose()

    async def _draining(self, server: Server) -> None:
        await self._asked.wait()
        assert self._drain is not None
        async with server.draining(self._drain):
            self._book.tell(f"{self.name} drains")
        self._scope.cancel()

    def die(self, pause: float) -> None:
        """The process is killed: nothing of it is heard any more."""
        if self.server is not None and isinstance(self.server._store, Mounted):
            self.server._store.killed = True
        self._network.crash(port=self.port, who=self.name)
        self.stop(pause)

    def stop(self, pause: float) -> None:
        self._pause = pause
        self._scope.cancel()

    def drain(self, seconds: float, pause: float) -> None:
        self._pause, self._drain = pause, seconds
        self._asked.set()

    def end(self) -> None:
        """For good."""
        self.ended = True
        self.stop(0)


@contextlib.asynccontextmanager
async def always(server: Server) -> AsyncIterator[Server]:
    yield server


# Access.


def protect(server: Server, authority: AuthServer, refused: set[str]) -> Server:
    """It takes the tokens of this authority, except those refused."""

    def verify(token: str) -> Principal | None:
        granted = authority.tokens.get(token)
        if granted is None or token in refused:
            return None
        return Principal(authority.clients[granted.client_id]["client_name"], granted.scopes)

    server.protect(verify=verify, resource=RESOURCE, authorization_servers=[ISSUER])
    return server


async def authorize(authority: AuthServer, listener: Listener) -> None:
    """The authorization server: its rules are in `AuthServer`, here is its HTTP."""

    async def serve(stream: trio.abc.Stream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while (asked := await _request(stream)) is not None:
                said = authority.answer(asked)
                fields = [*said.headers, ("Content-Length", len(said.body)), ("Content-Type", "application/json")]
                lines = [f"HTTP/1.1 {said.status} X", *(f"{name}: {value}" for name, value in fields), "", ""]
                head = "\r\n".join(lines)
                await stream.send_all(head.encode() + said.body)
        await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(serve, await listener.accept())


async def _request(stream: trio.abc.Stream) -> SendRequest | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some()
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    size = int(next((value for name, value in fields if name.lower() == "content-length"), "0"))
    while len(body) < size:
        more = await stream.receive_some()
        if not more:
            return None
        body += more
    method, target, _ = first.split(" ")
    return SendRequest(method, ISSUER + target, tuple(fields), body)


# A client that means harm.


async def hostile(way: int, transport: str, network: Network, dial: Callable[..., Awaitable[trio.abc.Stream]]) -> None:
    """Connects, and sends nonsense, or a part of a request, or asks for much and never reads."""
    caller.set("hostile")
    try:
        stream = await dial("127.0.0.1", SERVER)
    except OSError:
        return
    name = f"hostile-{len(network.connections)}"
    asked = b"".join(_large_call(f"{name}.{number}", transport) for number in range(40))
    one = _large_call(name, transport)
    said = (b"\x00\xff{]\r\n\r\n" * 20, one[: len(one) // 2], asked, one[:1], b"", asked)[way % 6]
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(90):
        await stream.send_all(said)
        await trio.sleep_forever()
    await trio.aclose_forcefully(stream)


def _large_call(token: str, transport: str) -> bytes:
    """A request for an answer of 50 KB."""
    body = json.dumps(request("tools/call", {"name": "big", "arguments": {"token": token, "length": 50_000}}, token))
    if transport == "stream":
        return body.encode() + b"\n"
    fields = {
        "Host": f"127.0.0.1:{SERVER}",
        "Authorization": "Bearer hostile",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call",
        "Mcp-Name": "big",
        "Content-Length": str(len(body)),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {_PATHS[transport]} HTTP/1.1\r\n{head}\r\n{body}".encode()
