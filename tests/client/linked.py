"""A caller over memory, joined to a server of ours or to one that is played by the test.

    async with linked(server, revision) as link:                     # `serve_stream(server, ...)` is at the other end
        await link.caller.request("tools/list")

    async with scripted(revision, {"tools": {"listChanged": True}}) as (link, peer):
        asked = await peer.take("tools/call")                        # everything but the opening is for the test
        await peer.answer(asked, {"content": []})

What the server says of itself is kept by the `Recorder` that is the caller's `Talk`, which a test may extend.  A test
that outlives sessions opens each in a nursery of its own, by `connect`, with the same recorder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.server.checkpoints import unlimited_pipe, unwrapped, wait_or_fail
from tests.server.raw_client import CAPABILITIES
from trio_mcp import Server, serve_stream
from trio_mcp.client import ClientSession, StreamLink
from trio_mcp.core import (
    META_SUBSCRIPTION_ID,
    REVISIONS,
    Call,
    ClientProtocol,
    JsonObject,
    Limits,
    McpError,
    Notice,
    Offer,
    RequestError,
)
from trio_mcp.transport import Lines

__all__ = ["Link", "Peer", "Recorder", "connect", "linked", "scripted", "serving"]

Object = dict[str, Any]
Streams = Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]]
INFO = {"name": "linked", "version": "1"}


class Recorder:
    """A `Talk` that keeps what it hears.  `answers`: by method, what a request of the server's is answered with."""

    def __init__(self, answers: Mapping[str, Callable[[Call], JsonObject]] | None = None) -> None:
        self.answers = dict(answers or {})
        self.calls: list[Call] = []
        self.notices: list[Notice] = []
        self.mistakes: list[str] = []
        self.missed_for_good: list[bool] = []
        self.failure: McpError | None = None  # why the link is gone

    async def answer(self, call: Call) -> JsonObject:
        await trio.lowlevel.checkpoint()
        self.calls.append(call)
        if call.request.method not in self.answers:
            raise RequestError(-32601, f"{call.request.method} is not answered in this test")
        return self.answers[call.request.method](call)

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def answered_late(self, method: str, result: JsonObject) -> None: ...

    def missed(self, *, for_good: bool) -> None:
        self.missed_for_good.append(for_good)

    def mistake(self, why: str) -> None:
        self.mistakes.append(why)

    def connection_lost(self, failure: McpError) -> None:
        self.failure = failure


@attrs.frozen(eq=False)
class Link:
    """A session that is open.  `ended` is set when its stream is closed."""

    caller: ClientSession
    talk: Recorder
    stream: trio.abc.Stream
    ended: trio.Event


async def connect(
    nursery: trio.Nursery,
    stream: trio.abc.Stream,
    talk: Recorder,
    revision: str,
    *,
    capabilities: Object | None = None,
    limits: Limits | None = None,
) -> Link:
    """Open a session in this revision; it is carried in the nursery until the stream ends."""
    limits = limits or Limits()
    offer = Offer(INFO, CAPABILITIES[revision] if capabilities is None else capabilities, (REVISIONS[revision],))
    caller = StreamLink(ClientProtocol(offer, limits=limits), talk, stream, Lines(limits), nursery=nursery)
    ended = trio.Event()

    async def carry() -> None:
        try:
            await caller.run()
        finally:
            ended.set()

    nursery.start_soon(carry, name="the client's link")
    await caller.open()
    return Link(caller, talk, stream, ended)


@contextlib.asynccontextmanager
async def serving(server: Server, *, streams: Streams = unlimited_pipe) -> AsyncIterator[trio.abc.Stream]:
    """The client's end of a stream at whose other end a server of ours is."""
    ours, theirs = streams()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs, name="the server")
        yield ours
        await ours.aclose()


@contextlib.asynccontextmanager
async def linked(
    server: Server, revision: str, *, talk: Recorder | None = None, streams: Streams = unlimited_pipe, **options: Any
) -> AsyncIterator[Link]:
    """A session with a server of ours.  When the block ends the link does, and the server has to return."""
    with unwrapped():
        async with serving(server, streams=streams) as stream, trio.open_nursery() as nursery:
            link = await connect(nursery, stream, talk or Recorder(), revision, **options)
            yield link
            await stream.aclose()
            await wait_or_fail(link.ended.wait, "the client's link to end")


class Peer:
    """A server that the test plays, line by line.

    `server/discover`, `initialize` and `notifications/initialized` are answered by it, as often as they come; every
    other message waits to be taken.
    """

    def __init__(self, stream: trio.abc.Stream, revision: str, capabilities: Object) -> None:
        self.stream = stream
        self.revision = revision
        self.capabilities = capabilities
        self.messages: list[Object] = []  # that nobody has taken yet
        self._arrival = trio.lowlevel.ParkingLot()
        self._rest = b""

    async def run(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := bytes(await self.stream.receive_some()):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    await self._hear(json.loads(line))
                self._arrival.unpark_all()

    async def _hear(self, message: Object) -> None:
        modern = {"supportedVersions": [self.revision], "ttlMs": 0, "cacheScope": "private"}
        legacy = {"protocolVersion": self.revision, "serverInfo": INFO}
        opening: dict[Any, Object] = {"server/discover": modern, "initialize": legacy}
        if (method := message.get("method")) in opening:
            await self.answer(message, {**opening[method], "capabilities": self.capabilities})
        elif method != "notifications/initialized":
            self.messages.append(message)

    async def take(self, method: str) -> Object:
        """The next message, which must have this method."""

        async def come() -> None:
            while not self.messages:
                await self._arrival.park()

        await wait_or_fail(come, method)
        message = self.messages.pop(0)
        assert message.get("method") == method, message
        return message

    async def silent(self) -> bool:
        """Whether the client has said everything, and all of it was taken."""
        await wait_all_tasks_blocked()
        return not self.messages

    async def send(self, message: Object) -> None:
        await self.stream.send_all(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def answer(self, request: Object, result: Object | None = None) -> None:
        kind: Object = {"resultType": "complete"} if REVISIONS[self.revision].result_type else {}
        await self.send({"id": request["id"], "result": {**kind, **(result or {})}})

    async def refuse(self, request: Object, code: int, message: str = "no") -> None:
        await self.send({"id": request["id"], "error": {"code": code, "message": message}})

    async def tell(self, method: str, params: Object | None = None, *, subscription: Object | None = None) -> None:
        """A notification; of a subscription, by its request."""
        meta = {} if subscription is None else {"_meta": {META_SUBSCRIPTION_ID: subscription["id"]}}
        await self.send({"method": method, "params": {**meta, **(params or {})}})


@contextlib.asynccontextmanager
async def scripted(
    revision: str,
    capabilities: Object,
    *,
    talk: Recorder | None = None,
    streams: Streams = unlimited_pipe,
    **options: Any,
) -> AsyncIterator[tuple[Link, Peer]]:
    """A session with a server that the test plays."""
    ours, theirs = streams()
    peer = Peer(theirs, revision, capabilities)
    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, name="the peer")
            link = await connect(nursery, ours, talk or Recorder(), revision, **options)
            yield link, peer
            await ours.aclose()
            await theirs.aclose()
            await wait_or_fail(link.ended.wait, "the client's link to end")
