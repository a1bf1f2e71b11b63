"""Servers of HTTP that do what a test says, byte by byte, and a client's link to them over memory.

    async def play(asked: Asked, out: Out) -> None:           # called for each request, in a task for each connection
        await out.json(asked.answer({"tools": []}))

    async with script(modern(play)) as server, linked(server.connect, [E]) as bench:
        assert await bench.caller.request("tools/list") == {"tools": []}

`modern` and `legacy` play the opening, so that the rest is left to the test.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from tests.client.linked import Recorder
from tests.server.checkpoints import Pair, PipeEnd, unlimited_pipe, unwrapped
from trio_mcp.client import ClientSession, HttpLink, SseLink
from trio_mcp.core import REVISIONS, ClientProtocol, Limits, LinkKind, Offer
from trio_mcp.core.http import Fields, Headers, Mirror, SseEvent, encode_event
from trio_mcp.transport import HttpPool

__all__ = ["SESSION", "URL", "Asked", "Bench", "Out", "Play", "Script", "legacy", "linked", "modern", "script"]

Object = dict[str, Any]
Connect = Callable[[], Awaitable[trio.abc.Stream]]
URL = "http://127.0.0.1:3000/mcp"
SESSION = "fIVvX1WMvj8nT7Wc"
A, B, C, D, E = REVISIONS


@attrs.frozen
class Asked:
    method: str
    target: str
    headers: Headers
    body: bytes

    @property
    def message(self) -> Object:
        return json.loads(self.body) if self.body else {}

    @property
    def what(self) -> str:
        """The method of the message, or that of the request where there is none."""
        return self.message.get("method", "answer") if self.body.startswith(b"{") else self.method

    @property
    def id(self) -> Any:
        return self.message["id"]

    def answer(self, result: Object | None = None, **other: Any) -> Object:
        return {"jsonrpc": "2.0", "id": self.id, "result": {} if result is None else result, **other}

    def error(self, code: int, message: str = "no", **data: Any) -> Object:
        return {"jsonrpc": "2.0", "id": self.id, "error": {"code": code, "message": message, **data}}


class Out:
    """The response, and with it the connection."""

    def __init__(self, stream: PipeEnd) -> None:
        self.stream = stream

    async def raw(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def reply(
        self, status: int = 200, body: bytes = b"", headers: Mapping[str, str] | None = None, kind: str = ""
    ) -> None:
        fields = {"Content-Length": str(len(body)), **({"Content-Type": kind} if kind else {}), **(headers or {})}
        await self.raw(_head(status, fields) + body)

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.reply(status, json.dumps(value).encode(), headers, "application/json")

    async def begin(self, headers: Mapping[str, str] | None = None) -> None:
        """An event stream."""
        await self.raw(
            _head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked", **(headers or {})})
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any = None, **fields: Any) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        await self.chunk(encode_event(SseEvent(data, **fields)))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def hold(self) -> None:
        """Nothing more, until the client goes."""
        while True:
            await self.stream.receive_some() or _cut()

    def cut(self) -> None:
        self.stream.close()


def _head(status: int, fields: Mapping[str, str]) -> bytes:
    return "".join(
        [f"HTTP/1.1 {status} X\r\n", *(f"{name}: {text}\r\n" for name, text in fields.items()), "\r\n"]
    ).encode()


Play = Callable[[Asked, Out], Awaitable[None]]


class Script:
    """A server; `asked` is what it was asked, in order of arrival, and `links` are its connections."""

    def __init__(self, play: Play, nursery: trio.Nursery, streams: Callable[[], Pair]) -> None:
        self._play = play
        self._nursery = nursery
        self._streams = streams
        self.asked: list[Asked] = []
        self.links: list[PipeEnd] = []
        self.left: list[str] = []  # what was asked on connections that the client has closed meanwhile
        self.refuses = False

    @property
    def heard(self) -> list[str]:
        return [each.what for each in self.asked]

    async def connect(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self.refuses:
            raise OSError("nobody listens here")
        theirs, ours = self._streams()
        self.links.append(theirs)
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: PipeEnd) -> None:
        what = ""
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
                asked = Asked(method, target, headers, data[:size])
                data = data[size:]
                self.asked.append(asked)
                what = asked.what
                await self._play(asked, Out(stream))
                what = ""
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            pass
        finally:
            if what:
                self.left.append(what)
            stream.close()


def _cut() -> bytes:
    raise EOFError


@contextlib.asynccontextmanager
async def script(play: Play, streams: Callable[[], Pair] = unlimited_pipe) -> AsyncIterator[Script]:
    with unwrapped():
        async with trio.open_nursery() as nursery:
            yield Script(play, nursery, streams)
            nursery.cancel_scope.cancel()


def modern(play: Play) -> Play:
    """Answers discovery, and leaves the rest to `play`."""

    async def playing(asked: Asked, out: Out) -> None:
        if asked.what == "server/discover":
            found = {"supportedVersions": [E], "capabilities": {"tools": {}}, "resultType": "complete"}
            await out.json(asked.answer(found))
        else:
            await play(asked, out)

    return playing


def legacy(play: Play, *, session: str | None = SESSION, **capabilities: Any) -> Play:
    """Opens a session, and has no stream for what belongs to no request."""

    async def playing(asked: Asked, out: Out) -> None:
        if asked.what == "initialize":
            result = {
                "protocolVersion": asked.message["params"]["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}, **capabilities},
                "serverInfo": {"name": "script", "version": "1"},
            }
            await out.json(asked.answer(result), headers={} if session is None else {"Mcp-Session-Id": session})
        elif asked.what == "notifications/initialized":
            await out.reply(202)
        elif asked.what == "DELETE":
            await out.reply(204)
        else:
            await play(asked, out)

    return playing


@attrs.frozen(eq=False)
class Bench:
    caller: ClientSession
    link: Any
    talk: Recorder
    nursery: trio.Nursery


@contextlib.asynccontextmanager
async def linked(
    connect: Connect,
    revisions: Sequence[str],
    *,
    url: str = URL,
    headers: Callable[[], Fields] = tuple,
    mirrors: Callable[[str], Sequence[Mirror]] = lambda tool: (),
    talk: Recorder | None = None,
    sse: bool = False,
    opens: bool = True,
    limits: Limits | None = None,
    capabilities: Mapping[str, Any] | None = None,
) -> AsyncIterator[Bench]:
    """A session with the server that `connect` leads to; with ``opens=False`` it is for the test to open it."""

    async def dial(host: str, port: int) -> trio.abc.Stream:
        return await connect()

    limits, talk = limits or Limits(), talk or Recorder()
    offer = Offer(
        {"name": "bench", "version": "1"}, capabilities or {}, revisions=tuple(REVISIONS[name] for name in revisions)
    )
    with unwrapped():
        async with trio.open_nursery() as nursery, HttpPool(limits=limits, connect=dial, environ={}) as pool:
            session = ClientProtocol(offer, link=LinkKind.DUPLEX if sse else LinkKind.SESSION, limits=limits)
            link: Any
            if sse:
                link = SseLink(session, talk, pool, url, nursery=nursery, headers=headers)
            else:
                link = HttpLink(session, talk, pool, url, nursery=nursery, headers=headers, mirrors=mirrors)
            if opens:
                if sse:
                    await nursery.start(link.run)
                await link.open()
            yield Bench(link, link, talk, nursery)
            await link.aclose()
            await trio.testing.wait_all_tasks_blocked()
            left = {task.name for task in nursery.child_tasks}
            assert not left, left
            assert not link._scopes
