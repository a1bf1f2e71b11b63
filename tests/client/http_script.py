"""HTTP servers that write the bytes of the test, and a client's link to them, all in memory.

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json(received.answer({"tools": []}))

    async with scripted_server(modern(handle)) as server, open_http_link(server.connect, [E]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}

The handler is called for each request, in one task for each connection.

`modern` and `legacy` answer the opening of a session.  The test answers the other requests.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from tests.client.memory_links import Recorder
from tests.server.checkpoints import Pair, PipeEnd, unlimited_pipe, unwrapped
from trio_mcp.client import ClientSession, HttpLink, SseLink
from trio_mcp.core import REVISIONS, ClientProtocol, Limits, LinkKind, Offer
from trio_mcp.core.http import Fields, Headers, Mirror, SseEvent, encode_event
from trio_mcp.transport import HttpPool

__all__ = [
    "SESSION",
    "URL",
    "Bench",
    "Handler",
    "ReceivedRequest",
    "ResponseWriter",
    "ScriptedHttpServer",
    "legacy",
    "modern",
    "open_http_link",
    "scripted_server",
]

Object = dict[str, Any]
Connect = Callable[[], Awaitable[trio.abc.Stream]]
URL = "http://127.0.0.1:3000/mcp"
SESSION = "fIVvX1WMvj8nT7Wc"
A, B, C, D, E = REVISIONS


@attrs.frozen
class ReceivedRequest:
    method: str
    target: str
    headers: Headers
    body: bytes

    @property
    def message(self) -> Object:
        return json.loads(self.body) if self.body else {}

    @property
    def operation(self) -> str:
        """The method of the JSON-RPC message, "answer" for a response, or the HTTP method if there is no message."""
        return self.message.get("method", "answer") if self.body.startswith(b"{") else self.method

    @property
    def id(self) -> Any:
        return self.message["id"]

    def answer(self, result: Object | None = None, **other: Any) -> Object:
        return {"jsonrpc": "2.0", "id": self.id, "result": {} if result is None else result, **other}

    def error(self, code: int, message: str = "no", **data: Any) -> Object:
        return {"jsonrpc": "2.0", "id": self.id, "error": {"code": code, "message": message, **data}}


class ResponseWriter:
    """Writes the HTTP response, and can close the connection."""

    def __init__(self, stream: PipeEnd) -> None:
        self.stream = stream

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def reply(
        self, status: int = 200, body: bytes = b"", headers: Mapping[str, str] | None = None, kind: str = ""
    ) -> None:
        fields = {"Content-Length": str(len(body)), **({"Content-Type": kind} if kind else {}), **(headers or {})}
        await self.write(_head(status, fields) + body)

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.reply(status, json.dumps(value).encode(), headers, "application/json")

    async def begin(self, headers: Mapping[str, str] | None = None) -> None:
        """Begin an event stream."""
        await self.write(
            _head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked", **(headers or {})})
        )

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any = None, **fields: Any) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        await self.chunk(encode_event(SseEvent(data, **fields)))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def wait_for_close(self) -> None:
        """Send nothing more, and wait until the client closes the connection."""
        while True:
            await self.stream.receive_some() or _cut()

    def close(self) -> None:
        self.stream.close()


def _head(status: int, fields: Mapping[str, str]) -> bytes:
    return "".join(
        [f"HTTP/1.1 {status} X\r\n", *(f"{name}: {text}\r\n" for name, text in fields.items()), "\r\n"]
    ).encode()


Handler = Callable[[ReceivedRequest, ResponseWriter], Awaitable[None]]


class ScriptedHttpServer:
    """A server that passes each request to its handler.

    `requests` are the requests in the order of their arrival, and `connections` the server's ends of its connections.
    """

    def __init__(self, handle: Handler, nursery: trio.Nursery, streams: Callable[[], Pair]) -> None:
        self._handle = handle
        self._nursery = nursery
        self._streams = streams
        self.requests: list[ReceivedRequest] = []
        self.connections: list[PipeEnd] = []
        self.abandoned: list[str] = []  # requests of connections that were closed before the handler returned
        self.refuses_connections = False

    @property
    def operations(self) -> list[str]:
        return [each.operation for each in self.requests]

    async def connect(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self.refuses_connections:
            raise OSError("connection refused")
        theirs, ours = self._streams()
        self.connections.append(theirs)
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: PipeEnd) -> None:
        operation = ""
        try:
            data = b""
            while True:
                while b"\r\n\r\n" not in data:
                    more = await stream.receive_some()
                    if not more:
                        return
                    data += more
                head, _, data = data.partition(b"\r\n\r\n")
                first, *lines = head.decode().split("\r\n")
                headers = Headers([tuple(line.split(": ", 1)) for line in lines])  # type: ignore[misc]
                size = int(headers.get("Content-Length", "0"))
                while len(data) < size:
                    data += await stream.receive_some() or _cut()
                method, target, _ = first.split(" ")
                received = ReceivedRequest(method, target, headers, data[:size])
                data = data[size:]
                self.requests.append(received)
                operation = received.operation
                await self._handle(received, ResponseWriter(stream))
                operation = ""
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            pass
        finally:
            if operation:
                self.abandoned.append(operation)
            stream.close()


def _cut() -> bytes:
    raise EOFError


@contextlib.asynccontextmanager
async def scripted_server(
    handle: Handler, streams: Callable[[], Pair] = unlimited_pipe
) -> AsyncIterator[ScriptedHttpServer]:
    with unwrapped():
        async with trio.open_nursery() as nursery:
            yield ScriptedHttpServer(handle, nursery, streams)
            nursery.cancel_scope.cancel()


def modern(handle: Handler) -> Handler:
    """Answer `server/discover`; pass the other requests to `handle`."""

    async def handle_opening(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "server/discover":
            found = {"supportedVersions": [E], "capabilities": {"tools": {}}, "resultType": "complete"}
            await out.json(received.answer(found))
        else:
            await handle(received, out)

    return handle_opening


def legacy(handle: Handler, *, session: str | None = SESSION, **capabilities: Any) -> Handler:
    """Open and end the session; pass the other requests to `handle`."""

    async def handle_opening(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "initialize":
            result = {
                "protocolVersion": received.message["params"]["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}, **capabilities},
                "serverInfo": {"name": "script", "version": "1"},
            }
            await out.json(received.answer(result), headers={} if session is None else {"Mcp-Session-Id": session})
        elif received.operation == "notifications/initialized":
            await out.reply(202)
        elif received.operation == "DELETE":
            await out.reply(204)
        else:
            await handle(received, out)

    return handle_opening


@attrs.frozen(eq=False)
class Bench:
    caller: ClientSession
    link: Any
    recorder: Recorder
    nursery: trio.Nursery


@contextlib.asynccontextmanager
async def open_http_link(
    connect: Connect,
    revisions: Sequence[str],
    *,
    url: str = URL,
    headers: Callable[[], Fields] = tuple,
    mirrors: Callable[[str], Sequence[Mirror]] = lambda tool: (),
    recorder: Recorder | None = None,
    sse: bool = False,
    opens: bool = True,
    limits: Limits | None = None,
    capabilities: Mapping[str, Any] | None = None,
) -> AsyncIterator[Bench]:
    """A session with the server that `connect` connects to.  With ``opens=False`` the test opens it."""

    async def dial(host: str, port: int) -> trio.abc.Stream:
        return await connect()

    limits, recorder = limits or Limits(), recorder or Recorder()
    offer = Offer(
        {"name": "bench", "version": "1"}, capabilities or {}, revisions=tuple(REVISIONS[name] for name in revisions)
    )
    with unwrapped():
        async with trio.open_nursery() as nursery, HttpPool(limits=limits, connect=dial, environ={}) as pool:
            session = ClientProtocol(offer, link=LinkKind.DUPLEX if sse else LinkKind.SESSION, limits=limits)
            link: Any
            if sse:
                link = SseLink(session, recorder, pool, url, nursery=nursery, headers=headers)
            else:
                link = HttpLink(session, recorder, pool, url, nursery=nursery, headers=headers, mirrors=mirrors)
            if opens:
                if sse:
                    await nursery.start(link.run)
                await link.open()
            yield Bench(link, link, recorder, nursery)
            await link.aclose()
            await trio.testing.wait_all_tasks_blocked()
            left = {task.name for task in nursery.child_tasks}
            assert not left, left
            assert not link._scopes
