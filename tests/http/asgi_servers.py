"""Hosts of an ASGI application: `hosted` over memory streams, `hypercorn_of` over loopback sockets.

`hosted` is a minimal ASGI server.  It has no settings, and works under a mock clock.  `hypercorn_of` runs Hypercorn
with its Trio worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import unquote

import h11
import hypercorn.config
import hypercorn.trio
import trio

from tests.http.client import HttpClient
from tests.http.served import MemoryListener
from tests.server.checkpoints import unwrapped

__all__ = ["Event", "Events", "hosted", "hypercorn_of", "lifespan_of"]

App: TypeAlias = Callable[..., Awaitable[None]]
Event: TypeAlias = MutableMapping[str, Any]


class Events:
    """One ASGI scope, driven by the test: `feed` queues events for the application, `sent` are the events it sent.

    `before` is called with each event that the application sends.  It may raise or wait.
    """

    def __init__(self, *events: Event) -> None:
        self.sent: list[Event] = []
        self.arrived = trio.lowlevel.ParkingLot()
        self.before: Callable[[Event], Awaitable[None]] | None = None
        self._send_event, self._receive_event = trio.open_memory_channel[Event](float("inf"))
        self.feed(*events)

    def feed(self, *events: Event) -> None:
        for event in events:
            self._send_event.send_nowait(event)

    async def receive(self) -> Event:
        return await self._receive_event.receive()

    async def send(self, event: Event) -> None:
        await trio.lowlevel.checkpoint()
        if self.before is not None:
            await self.before(event)
        self.sent.append(event)
        self.arrived.unpark_all()

    async def until(self, kind: str) -> Event:
        """Wait for the first event of this type from the application, and return it."""
        while not (found := [event for event in self.sent if event["type"] == kind]):
            await self.arrived.park()
        return found[0]

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def body(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.sent)


@contextlib.asynccontextmanager
async def lifespan_of(app: App) -> AsyncIterator[Events]:
    """Run the lifespan of an application around the block."""
    events = Events({"type": "lifespan.startup"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, {"type": "lifespan", "asgi": {"version": "3.0"}}, events.receive, events.send)
        await events.until("lifespan.startup.complete")
        yield events
        events.feed({"type": "lifespan.shutdown"})
        await events.until("lifespan.shutdown.complete")


@contextlib.asynccontextmanager
async def hosted(app: App, *, lifespan: bool = True, path: str = "/mcp", **scope: Any) -> AsyncIterator[HttpClient]:
    """A client of an application; `scope` has further keys for each ASGI scope."""
    listener = MemoryListener()
    with unwrapped():
        async with contextlib.AsyncExitStack() as stack:
            if lifespan:
                await stack.enter_async_context(lifespan_of(app))
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(trio.serve_listeners, partial(_connection, app, scope), [listener])
            web = HttpClient(listener.connect, path=path)
            yield web
            await web.aclose()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def _connection(app: App, more: Mapping[str, Any], stream: trio.abc.Stream) -> None:
    http = h11.Connection(h11.SERVER)
    while isinstance(request := await _request(http, stream), h11.Request):
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 3000),
            **more,
        }
        events = Events()
        events.before = partial(_send, http, stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, http, stream, events)
            await app(scope, events.receive, events.send)
            nursery.cancel_scope.cancel()
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            break
        http.start_next_cycle()
    await stream.aclose()


async def _request(http: h11.Connection, stream: trio.abc.Stream) -> object:
    while (event := http.next_event()) is h11.NEED_DATA:
        try:
            http.receive_data(bytes(await stream.receive_some()))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return None
    return event


async def _read(http: h11.Connection, stream: trio.abc.Stream, events: Events) -> None:
    while True:
        event = http.next_event()
        if isinstance(event, h11.Data):
            events.feed({"type": "http.request", "body": bytes(event.data), "more_body": True})
        elif isinstance(event, h11.EndOfMessage):
            events.feed({"type": "http.request"})
        else:
            try:
                data = bytes(await stream.receive_some())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                events.feed({"type": "http.disconnect"})
                return
            http.receive_data(data)


async def _send(http: h11.Connection, stream: trio.abc.Stream, event: Event) -> None:
    data: bytes | None
    if event["type"] == "http.response.start":
        data = http.send(h11.Response(status_code=event["status"], headers=event["headers"]))
    else:
        data = http.send(h11.Data(data=event.get("body", b"")))
        if not event.get("more_body", False):
            data = (data or b"") + (http.send(h11.EndOfMessage()) or b"")
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(data or b"")


@contextlib.asynccontextmanager
async def hypercorn_of(
    app: App, shut_down: Callable[[], Awaitable[None]] | None = None, *, path: str = "/mcp", **settings: Any
) -> AsyncIterator[HttpClient]:
    """A client of an application under Hypercorn.

    Hypercorn shuts down at the end of the block, or when `shut_down` returns.

    `settings` are attributes of Hypercorn's `Config`.
    """
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.loglevel = "ERROR"
    for name, value in settings.items():
        setattr(config, name, value)
    stop = trio.Event()
    with unwrapped():
        async with trio.open_nursery() as nursery:
            whole: Any = app  # Hypercorn types the scopes as TypedDicts
            serve = partial(hypercorn.trio.serve, whole, config, shutdown_trigger=shut_down or stop.wait)
            (url,) = await nursery.start(serve)
            port = int(url.rpartition(":")[2])
            web = HttpClient(partial(trio.open_tcp_stream, "127.0.0.1", port), host=f"127.0.0.1:{port}", path=path)
            try:
                yield web
            finally:
                await web.aclose()
                stop.set()
