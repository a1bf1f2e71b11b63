"""A client of an endpoint without HTTP: it calls the endpoint directly, and a `Recorder` is each response.

async with endpoint_of(server) as client:
    session = await client.initialize("2025-11-25")
    exchange = await client.post(request("tools/call", ...), session)
    assert exchange.response.messages == [...]
    exchange.disconnect()
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.http.client import HttpClient, notification, request
from tests.server.raw_client import CAPABILITIES, CLIENT_INFO
from trio_mcp import Server
from trio_mcp.core.http import EventReader, Fields, Headers, HttpRequest, Reply, SseEvent
from trio_mcp.server import Run
from trio_mcp.server.http import Endpoint, send_reply

__all__ = ["EndpointClient", "RecordedExchange", "Recorder", "checked_responses", "endpoint_of"]


_violations: list[str] = []


def _rule(kept: bool, violation: str) -> None:
    if not kept:
        _violations.append(violation)
        raise AssertionError(violation)


@contextlib.contextmanager
def checked_responses() -> Iterator[None]:
    """Fails at the end of the block if a response was used wrongly, even if the endpoint caught the error."""
    _violations.clear()
    yield
    assert not _violations


class Recorder:
    """A response that records the writes of the endpoint, and checks their order.

    After `hold()` writes wait, as for a client that does not read, until `go_on()`; a write that waits is not recorded
    yet.  After `cut()` the client has gone.  If `failure` is set, a write raises it.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.times: list[float] = []
        self.ended = False
        self.dropped = False
        self.failure: Exception | None = None
        self.writing = False
        self._begun = False
        self._broken = False
        self._free = trio.Event()
        self._free.set()

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        _rule(not self._begun, "a response begins once")
        self._begun = True
        async with self._write(more):
            self.status, self.headers = status, dict(fields)
            self.writes.append(body)

    async def send(self, data: bytes, *, more: bool) -> None:
        _rule(self._begun, "a response begins with its head")
        _rule(bool(data) or not more, "a write without data")
        async with self._write(more):
            self.writes.append(data)

    def send_now(self, data: bytes) -> bool:
        return False

    @contextlib.asynccontextmanager
    async def _write(self, more: bool) -> AsyncIterator[None]:
        _rule(not self.writing, "two writes at the same time")
        _rule(not self.ended, "a write after the end")
        _rule(not self.dropped, "a write after the response was dropped")
        self.writing = True
        try:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                await self._free.wait()
        finally:
            self.writing = False
        if self.failure is not None:
            raise self.failure
        if self._broken:
            raise trio.BrokenResourceError("the client has gone")
        yield
        self.times.append(trio.current_time())
        self.ended = not more

    def drop(self) -> None:
        self.dropped = True
        self.cut()

    def cut(self) -> None:
        self._broken = True
        self._free.set()

    def hold(self) -> None:
        if self._free.is_set() and not self._broken:
            self._free = trio.Event()

    def go_on(self) -> None:
        self._free.set()

    # The recorded response.

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def streams(self) -> bool:
        return self.headers.get("Content-Type") == "text/event-stream"

    @property
    def json(self) -> Any:
        assert not self.streams
        return json.loads(self.body)

    @property
    def events(self) -> list[SseEvent]:
        assert self.streams
        events = EventReader(1_000_000).feed(self.body)
        assert all(isinstance(event, SseEvent) for event in events)
        return events  # type: ignore[return-value]

    @property
    def messages(self) -> list[Any]:
        return [json.loads(event.data) for event in self.events if event.data]

    @property
    def comments(self) -> int:
        return self.body.count(b": keep-alive\n\n")

    @property
    def last_id(self) -> str:
        return [event.id for event in self.events if event.id is not None][-1]


@attrs.frozen
class RecordedExchange:
    """One request: its response, and the callback of the endpoint for a client that disconnects."""

    response: Recorder
    on_disconnect: Callable[[], None]

    def disconnect(self) -> None:
        self.response.cut()
        self.on_disconnect()


class EndpointClient:
    """A client that hands its requests to an endpoint."""

    def __init__(self, endpoint: Endpoint, run: Run) -> None:
        self.endpoint = endpoint
        self.run = run
        self.revisions: dict[str, str] = {}
        self._web = HttpClient(_no_connection)

    async def ask(
        self,
        method: str,
        message: Any = None,
        session: str | None = None,
        *,
        revision: str | None = None,
        path: str = "/mcp",
        response: Recorder | None = None,
        peer: str | None = None,
        prefix: str = "",
        **headers: str | None,
    ) -> RecordedExchange:
        """Send one request, and return when `serve` of the endpoint has returned."""
        revision = revision or self.revisions.get(session or "", "2026-07-28")
        fields = {"Host": "localhost", **self._web.headers_for(message, revision, session)}
        if method == "GET":
            fields["Accept"] = "text/event-stream"
        fields.update({name.replace("_", "-"): value for name, value in headers.items()})
        kept = Headers([(name, value) for name, value in fields.items() if value is not None])
        body = b"" if message is None else json.dumps(message).encode()
        response = response or Recorder()
        admitted = await self.endpoint.admit(HttpRequest(method, path, kept, prefix=prefix), peer)
        if isinstance(admitted, Reply):
            await send_reply(response, admitted)
            return RecordedExchange(response, _ended)
        on_disconnect = await self.endpoint.serve(admitted, HttpRequest(method, path, kept, body), response)
        return RecordedExchange(response, on_disconnect)

    async def post(self, message: Any, session: str | None = None, **how: Any) -> RecordedExchange:
        exchange = await self.ask("POST", message, session, **how)
        await wait_all_tasks_blocked()
        return exchange

    async def get(self, session: str, after: str | None = None, **how: Any) -> RecordedExchange:
        how.setdefault("Last_Event_ID", after)
        exchange = await self.ask("GET", None, session, **how)
        await wait_all_tasks_blocked()
        return exchange

    async def send_initialize(self, revision: str, **how: Any) -> RecordedExchange:
        params = {"protocolVersion": revision, "capabilities": CAPABILITIES[revision], "clientInfo": CLIENT_INFO}
        return await self.post(request("initialize", params, 0, revision=revision), revision=revision, **how)

    async def initialize(self, revision: str, **how: Any) -> str:
        exchange = await self.send_initialize(revision, **how)
        session = exchange.response.headers["Mcp-Session-Id"]
        self.revisions[session] = revision
        headers = {name: value for name, value in how.items() if name == "Authorization"}
        opened = await self.post(notification("notifications/initialized"), session, **headers)
        assert opened.response.status == 202
        return session


async def _no_connection() -> trio.abc.Stream:
    raise AssertionError("this client sends no HTTP")


def _ended() -> None:
    """The response has ended, so there is no request to disconnect."""


@contextlib.asynccontextmanager
async def endpoint_of(server: Server, **options: Any) -> AsyncIterator[EndpointClient]:
    """A client of the endpoint of a server, which runs for the duration of the block."""
    with checked_responses():
        async with _at(server, options) as client:
            yield client


@contextlib.asynccontextmanager
async def _at(server: Server, options: Any) -> AsyncIterator[EndpointClient]:
    async with server.running() as run, trio.open_nursery() as nursery:
        endpoint = Endpoint(run, **options)
        nursery.start_soon(endpoint.run)
        await wait_all_tasks_blocked()
        yield EndpointClient(endpoint, run)
        nursery.cancel_scope.cancel()
