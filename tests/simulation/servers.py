"""The services of a world: the server, a relay before it, an authorization server; and a hostile client.

Each `Service` is a program at a port that may be killed, be cancelled or drain.  After a pause it runs again, like a
new process: it has only the data that is stored outside (`Monitor.notes` and `Monitor.store`).
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
from tests.simulation.monitor import Monitor
from tests.simulation.network import Listener, Network, caller
from tests.simulation.replicas import is_store_failure
from tests.simulation.tasks import TASK_SECONDS, ProcessStore
from trio_mcp import Accepted, Context, Limits, Principal, RequestError, Server, ToolError, serve_http, serve_stream
from trio_mcp.core.oauth import SendRequest
from trio_mcp.types import Resource

__all__ = [
    "ISSUER",
    "KEYS",
    "LIMITS",
    "REPLICA_PORT",
    "SERVER_PORT",
    "TIGHT_LIMITS",
    "TOOLS",
    "Service",
    "build_server",
    "run_authorization_server",
    "run_hostile_client",
    "url_of",
]

# The replicas have the ports from REPLICA_PORT on.
SERVER_PORT, UPSTREAM_PORT, REPLICA_PORT, AUTHORITY_PORT = 3000, 3001, 3100, 4000
RESOURCE, ISSUER = f"http://127.0.0.1:{SERVER_PORT}", f"http://127.0.0.1:{AUTHORITY_PORT}"
KEYS = ("note://a", "note://b")
# As short as possible, so that sessions of absent clients expire soon after the end.
LIMITS = Limits(
    session_idle_seconds=60,
    parked_seconds=60,
    head_seconds=10,
    body_seconds=20,
    write_seconds=30,
    task_seconds=TASK_SECONDS,
)
TIGHT_LIMITS = attrs.evolve(
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
class _Current:
    """The monitor of the current world, for the handlers of a server that several worlds use."""

    monitor: Monitor


_REUSABLE: dict[tuple[Limits, int | None], tuple[Server, _Current]] = {}


def build_server(
    monitor: Monitor,
    limits: Limits = LIMITS,
    *,
    fresh: bool = True,
    number: int | None = None,
    store: ProcessStore | None = None,
) -> Server:
    """Return a server with handlers that report to the monitor; each call has its token as an argument.

    Without `fresh` the server may come from an earlier world, because making one takes as long as a dozen calls.
    `number` is its number among the replicas, which share a `store`.
    """
    store = ProcessStore(monitor.store) if store is None else store
    if not fresh and (limits, number) in _REUSABLE:
        server, current = _REUSABLE[limits, number]
        if server.statistics().connections == 0:  # otherwise the earlier world has broken a rule
            current.monitor = monitor
            server._store = store
            return server
    # A fresh server makes random keys, which the seed decides.  Keys of a reused server would differ when a world is
    # repeated, so its keys are fixed; so are those of replicas, which must be the same.
    keys = None if fresh and number is None else [bytes(32)]
    server, current = (
        Server(
            "simulated",
            version="1",
            limits=limits,
            page_size=4,
            change_debounce=0.05,
            state_keys=keys,
            store=store,
        ),
        _Current(monitor),
    )
    server._shares_store = number is not None  # without replicas the sessions end with the process
    _add_quick_tools(server, current)
    _add_slow_tools(server, current)
    _add_tasks(server, current)
    _add_data(server, current)
    if not fresh:
        _REUSABLE[limits, number] = server, current
    return server


def _add_quick_tools(server: Server, current: _Current) -> None:
    @server.tool
    async def echo(token: str, pad: str, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            return {"token": token, "length": len(pad)}

    @server.tool
    async def big(token: str, length: int, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            return {"token": token, "pad": "x" * length}

    @server.tool
    def plain(token: str, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            return {"token": token}

    @server.tool
    async def fail(token: str, politely: bool, ctx: Context) -> None:
        with current.monitor.handling(token, ctx.principal):
            raise ToolError(token) if politely else RequestError(7, token)

    @server.tool
    async def log(token: str, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            await ctx.log("warning", token)
            return {"token": token}


def _add_slow_tools(server: Server, current: _Current) -> None:
    @server.tool
    async def count(token: str, to: int, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            for number in range(to):
                await ctx.progress(number, to, message=token if ctx.revision > "2024-11-05" else None)
                await trio.sleep((0.0, 0.02, 1.0)[number % 3])
            return {"token": token}

    @server.tool
    async def hold(token: str, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            await trio.sleep_forever()
            return {"token": token}

    @server.tool
    async def away(token: str, ctx: Context) -> dict[str, Any]:
        """The client may go, and come back for the answer."""
        with current.monitor.handling(token, ctx.principal):
            await ctx.hang_up(retry=0.5)
            await trio.sleep(2)
            return {"token": token}

    @server.tool(replay=True)
    async def wizard(token: str, ctx: Context) -> dict[str, Any]:
        """Asks twice, and may be run again from its start, at another server."""
        with current.monitor.handling(token, ctx.principal, again=True):
            for _ in range(2):
                filled = await ctx.elicit(token, Answer)
                answer = filled.value.answer if isinstance(filled, Accepted) else ""
                current.monitor.check(answer == f"answer to {token}", f"{token} got the client's answer {answer!r}")
            return {"token": token}

    @server.tool
    async def ask(token: str, model: bool, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            if model:
                answer = (await ctx.sample(token, max_tokens=9)).content.text  # type: ignore[union-attr]
            else:
                filled = await ctx.elicit(token, Answer)
                answer = filled.value.answer if isinstance(filled, Accepted) else ""
            current.monitor.check(answer == f"answer to {token}", f"{token} got the client's answer {answer!r}")
            return {"token": token}


def _add_tasks(server: Server, current: _Current) -> None:
    @server.tool(task="optional")
    async def job(token: str, ctx: Context, seconds: float = 0.0) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            await trio.sleep(seconds)
            for number in range(len(token) % 4):
                await ctx.progress(number, message=token)
                await trio.sleep((0.0, 0.5, 3.0)[number % 3])
            return {"token": token}

    @server.tool(task="optional", replay=True)
    async def quiz(token: str, ctx: Context, seconds: float = 0.1) -> dict[str, Any]:
        """Asks twice, and may be run again from its start, with the answers that it has had."""
        with current.monitor.handling(token, ctx.principal, again=True):
            for _ in range(2):
                filled = await ctx.elicit(token, Answer)
                answer = filled.value.answer if isinstance(filled, Accepted) else ""
                current.monitor.check(answer == f"answer to {token}", f"{token} got the client's answer {answer!r}")
                await trio.sleep(seconds)
            return {"token": token}


def _add_data(server: Server, current: _Current) -> None:
    @server.tool
    async def put(token: str, uri: str, version: int, ctx: Context) -> dict[str, Any]:
        with current.monitor.handling(token, ctx.principal):
            current.monitor.notes[uri] = max(version, current.monitor.notes.get(uri, 0))
            current.monitor.publish(uri)
            server.notify_resource_updated(uri)
            await trio.lowlevel.checkpoint()
            return {"token": token}

    for uri in KEYS:
        server.add_resource(Resource(uri[-1], uri), lambda ctx, uri: str(current.monitor.notes.get(uri, 0)))

    @server.prompt
    async def say(token: str, ctx: Context) -> str:
        with current.monitor.handling(token, ctx.principal, again=True):  # a client may repeat a safe request
            return token

    @server.completion("say", "token")
    async def tokens(value: str) -> list[str]:
        return [f"{value}!"]


class Service:
    """A program that serves at a port.  `make` returns a context manager with the server of one run."""

    def __init__(
        self,
        name: str,
        port: int,
        transport: str,
        network: Network,
        monitor: Monitor,
        make: Callable[[], AbstractAsyncContextManager[Server]],
        *,
        authenticate: bool = False,
        single: bool = False,
    ) -> None:
        self.name, self.port = name, port
        self._single = single  # one request on each connection
        self.server: Server | None = None  # while it is up
        self._transport = transport
        self._network, self._monitor, self._make = network, monitor, make
        self._options = dict(_OPTIONS.get(transport, {}))
        if authenticate:
            self._options["authenticate"] = by_token
        if transport != "stream":
            self._options["task_status"] = SimpleNamespace(started=lambda address: self.serving.set())
        self._scope = trio.CancelScope()
        self._drain_seconds: float | None = None
        self._drain_requested = trio.Event()
        self._downtime = 0.0
        self.up = trio.Event()
        """Set when it listens for the first time."""
        self.serving = trio.Event()
        """Set when it serves for the first time, as one of the replicas."""
        self.ended = False

    async def run(self) -> None:
        caller.set(self.name)
        while not self.ended:
            self._scope, self._drain_requested, self._drain_seconds = trio.CancelScope(), trio.Event(), None
            try:
                with self._scope:
                    await self._run_once()
            except Exception as error:  # noqa: BLE001  # a client must not be able to end the server
                if not (self._monitor.harmful_faults and is_store_failure(error)):
                    self._monitor.unexpected(self.name, error)
                self._monitor.trace(f"{self.name} cannot begin")
                self._downtime = 1.0  # a supervisor tries again
            self.server = None
            self._monitor.trace(f"{self.name} has ended")
            if not self.ended:
                await trio.sleep(self._downtime)

    async def _run_once(self) -> None:
        async with self._make() as server, trio.open_nursery() as nursery:
            nursery.start_soon(self._draining, server)
            listener = self._network.listen(self.port, single=self._single)
            self._monitor.trace(f"{self.name} is up")
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
        """Serve all streams in one run of the server, as a program with byte streams does."""
        async with server.running(), trio.open_nursery() as nursery:
            try:
                while True:
                    nursery.start_soon(serve_stream, server, await listener.accept())
            finally:
                with trio.CancelScope(shield=True):
                    await listener.aclose()

    async def _draining(self, server: Server) -> None:
        await self._drain_requested.wait()
        assert self._drain_seconds is not None
        async with server.draining(self._drain_seconds):
            self._monitor.trace(f"{self.name} drains")
        self._scope.cancel()

    def kill(self, downtime: float) -> None:
        """Kill the process: its connections are reset, and it writes no more data."""
        if self.server is not None and isinstance(self.server._store, ProcessStore):
            self.server._store.killed = True
        self._network.crash(port=self.port, owner=self.name)
        self.stop(downtime)

    def stop(self, downtime: float) -> None:
        self._downtime = downtime
        self._scope.cancel()

    def drain(self, seconds: float, downtime: float) -> None:
        self._downtime, self._drain_seconds = downtime, seconds
        self._drain_requested.set()

    def end(self) -> None:
        """End it, without another run."""
        self.ended = True
        self.stop(0)


@contextlib.asynccontextmanager
async def opened(server: Server) -> AsyncIterator[Server]:
    yield server


# Access.


def protect(server: Server, authority: AuthServer, refused: set[str]) -> Server:
    """Let the server accept the tokens of this authority, except the refused ones."""

    def verify(token: str) -> Principal | None:
        granted = authority.tokens.get(token)
        if granted is None or token in refused:
            return None
        return Principal(authority.clients[granted.client_id]["client_name"], granted.scopes)

    server.protect(verify=verify, resource=RESOURCE, authorization_servers=[ISSUER])
    return server


async def run_authorization_server(authority: AuthServer, listener: Listener) -> None:
    """Serve an authorization server over HTTP; `AuthServer` decides its answers."""

    async def serve(stream: trio.abc.Stream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while (incoming := await _request(stream)) is not None:
                answer = authority.answer(incoming)
                fields = [*answer.headers, ("Content-Length", len(answer.body)), ("Content-Type", "application/json")]
                lines = [f"HTTP/1.1 {answer.status} X", *(f"{name}: {value}" for name, value in fields), "", ""]
                head = "\r\n".join(lines)
                await stream.send_all(head.encode() + answer.body)
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


# A hostile client.


async def run_hostile_client(
    way: int, transport: str, network: Network, dial: Callable[..., Awaitable[trio.abc.Stream]]
) -> None:
    """Connect and send nonsense, or a part of a request, or many requests without reading the answers."""
    caller.set("hostile")
    try:
        stream = await dial("127.0.0.1", SERVER_PORT)
    except OSError:
        return
    name = f"hostile-{len(network.connections)}"
    many = b"".join(_large_call(f"{name}.{number}", transport) for number in range(40))
    one = _large_call(name, transport)
    data = (b"\x00\xff{]\r\n\r\n" * 20, one[: len(one) // 2], many, one[:1], b"", many)[way % 6]
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(90):
        await stream.send_all(data)
        await trio.sleep_forever()
    await trio.aclose_forcefully(stream)


def _large_call(token: str, transport: str) -> bytes:
    """Return a request for an answer of 50 KB."""
    body = json.dumps(request("tools/call", {"name": "big", "arguments": {"token": token, "length": 50_000}}, token))
    if transport == "stream":
        return body.encode() + b"\n"
    fields = {
        "Host": f"127.0.0.1:{SERVER_PORT}",
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
