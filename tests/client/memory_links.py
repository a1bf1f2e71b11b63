"""Client sessions over memory streams.  The peer is a real server, or a `Peer` that the test controls.

    async with open_link(server, revision) as link:  # `serve_stream(server, ...)` is at the other end
        await link.caller.request("tools/list")

    async with open_scripted_link(revision, {"tools": {"listChanged": True}}) as (link, peer):
        request = await peer.take("tools/call")  # the peer answers the opening, the test answers the rest
        await peer.answer(request, {"content": []})

A `Recorder` is the session's handler of server messages, and keeps them; a test may extend it.  A test with several
sessions, one after the other, opens each with `start_link`, in a nursery of its own, with the same recorder.
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

__all__ = ["Link", "Peer", "Recorder", "open_link", "open_scripted_link", "start_link", "stream_to"]

Object = dict[str, Any]
Streams = Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]]
INFO = {"name": "linked", "version": "1"}


class Recorder:
    """Keeps the messages of the server.  `answers`: by method, how it answers requests of the server."""

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
    recorder: Recorder
    stream: trio.abc.Stream
    ended: trio.Event


async def start_link(
    nursery: trio.Nursery,
    stream: trio.abc.Stream,
    recorder: Recorder,
    revision: str,
    *,
    capabilities: Object | None = None,
    limits: Limits | None = None,
) -> Link:
    """Open a session in this revision.  Its task runs in the nursery until the stream ends."""
    limits = limits or Limits()
    offer = Offer(INFO, CAPABILITIES[revision] if capabilities is None else capabilities, (REVISIONS[revision],))
    caller = StreamLink(ClientProtocol(offer, limits=limits), recorder, stream, Lines(limits), nursery=nursery)
    ended = trio.Event()

    async def run() -> None:
        try:
            await caller.run()
        finally:
            ended.set()

    nursery.start_soon(run, name="the client's link")
    await caller.open()
    return Link(caller, recorder, stream, ended)


@contextlib.asynccontextmanager
async def stream_to(server: Server, *, streams: Streams = unlimited_pipe) -> AsyncIterator[trio.abc.Stream]:
    """Run the server on a memory stream; yield the client's end."""
    ours, theirs = streams()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, theirs, name="the server")
        yield ours
        await ours.aclose()


@contextlib.asynccontextmanager
async def open_link(
    server: Server,
    revision: str,
    *,
    recorder: Recorder | None = None,
    streams: Streams = unlimited_pipe,
    **options: Any,
) -> AsyncIterator[Link]:
    """A session with this server.  The end of the block closes the stream, and waits until the server has returned."""
    with unwrapped():
        async with stream_to(server, streams=streams) as stream, trio.open_nursery() as nursery:
            link = await start_link(nursery, stream, recorder or Recorder(), revision, **options)
            yield link
            await stream.aclose()
            await wait_or_fail(link.ended.wait, "the client's link to end")


class Peer:
    """A server that the test controls, line by line.

    It answers `server/discover`, `initialize` and `notifications/initialized`, each time that they arrive.  Every other
    message waits until the test takes it.
    """

    def __init__(self, stream: trio.abc.Stream, revision: str, capabilities: Object) -> None:
        self.stream = stream
        self.revision = revision
        self.capabilities = capabilities
        self.messages: list[Object] = []  # not taken yet
        self._arrival = trio.lowlevel.ParkingLot()
        self._rest = b""

    async def run(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := bytes(await self.stream.receive_some()):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    await self._receive(json.loads(line))
                self._arrival.unpark_all()

    async def _receive(self, message: Object) -> None:
        modern = {"supportedVersions": [self.revision], "ttlMs": 0, "cacheScope": "private"}
        legacy = {"protocolVersion": self.revision, "serverInfo": INFO}
        opening: dict[Any, Object] = {"server/discover": modern, "initialize": legacy}
        if (method := message.get("method")) in opening:
            await self.answer(message, {**opening[method], "capabilities": self.capabilities})
        elif method != "notifications/initialized":
            self.messages.append(message)

    async def take(self, method: str) -> Object:
        """The next message, which must have this method."""

        async def wait() -> None:
            while not self.messages:
                await self._arrival.park()

        await wait_or_fail(wait, method)
        message = self.messages.pop(0)
        assert message.get("method") == method, message
        return message

    async def has_no_more_messages(self) -> bool:
        """Whether the client is idle, and all its messages are taken."""
        await wait_all_tasks_blocked()
        return not self.messages

    async def send(self, message: Object) -> None:
        await self.stream.send_all(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def answer(self, request: Object, result: Object | None = None) -> None:
        kind: Object = {"resultType": "complete"} if REVISIONS[self.revision].result_type else {}
        await self.send({"id": request["id"], "result": {**kind, **(result or {})}})

    async def refuse(self, request: Object, code: int, message: str = "no") -> None:
        await self.send({"id": request["id"], "error": {"code": code, "message": message}})

    async def notify(self, method: str, params: Object | None = None, *, subscription: Object | None = None) -> None:
        """Send a notification.  `subscription`: the request of the subscription to which it belongs."""
        meta = {} if subscription is None else {"_meta": {META_SUBSCRIPTION_ID: subscription["id"]}}
        await self.send({"method": method, "params": {**meta, **(params or {})}})


@contextlib.asynccontextmanager
async def open_scripted_link(
    revision: str,
    capabilities: Object,
    *,
    recorder: Recorder | None = None,
    streams: Streams = unlimited_pipe,
    **options: Any,
) -> AsyncIterator[tuple[Link, Peer]]:
    """A session with a server that the test controls."""
    ours, theirs = streams()
    peer = Peer(theirs, revision, capabilities)
    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, name="the peer")
            link = await start_link(nursery, ours, recorder or Recorder(), revision, **options)
            yield link, peer
            await ours.aclose()
            await theirs.aclose()
            await wait_or_fail(link.ended.wait, "the client's link to end")
