"""An endpoint without HTTP: requests are handed to it as they are, and a `Recorder` stands for each response.

async with endpoint_of(server) as client:
    session = await door.initialize("2025-11-25")
    visit = await door.post(request("tools/call", ...), session)
    assert visit.response.messages == [...]
    visit.leave()  # the client goes
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


_broken: list[str] = []


def _rule(kept: bool, otherwise: str) -> None:
    if not kept:
        _broken.append(otherwise)
        raise AssertionError(otherwise)


@contextlib.contextmanager
def checked_responses() -> Iterator[None]:
    """Fails at its end if a response was used as it must not be, whoever has caught what that raised."""
    _broken.clear()
    yield
    assert not _broken


class Recorder:
    """A response that keeps what is sent by it, and that nothing is sent by it which may not be.

    `hold()` lets writes wait, as for a client that does not read, until `go_on()`; what waits has not been received.
    After `cut()` the client has gone.  With `failure` set a write raises that.
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
        _rule(bool(data) or not more, "a write that says nothing")
        async with self._write(more):
            self.writes.append(data)

    def send_now(self, data: bytes) -> bool:
        return False

    @contextlib.asynccontextmanager
    async def _write(self, more: bool) -> AsyncIterator[None]:
        _rule(not self.writing, "two write at the same time")
        _rule(not self.ended, "something after the end")
        _rule(not self.dropped, "something after it was dropped")
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

    # What came.

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
    """One request, its response, and what the server is told when the client goes."""

    response: Recorder
    gone: Callable[[], None]

    def leave(self) -> None:
        self.response.cut()
        self.gone()


class EndpointClient:
    """Where requests come in."""

    def __init__(self, endpoint: Endpoint, run: Run) -> None:
        self.endpoint = endpoint
        self.run = run
        self.revisions: dict[str, str] = {}
        self._web = HttpClient(_nowhere)

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
        """One request; comes back when the endpoint has done what it can do at once."""
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
            return RecordedExchange(response, _nothing)
        gone = await self.endpoint.serve(admitted, HttpRequest(method, path, kept, body), response)
        return RecordedExchange(response, gone)

    async def post(self, message: Any, session: str | None = None, **how: Any) -> RecordedExchange:
        visit = await self.ask("POST", message, session, **how)
        await wait_all_tasks_blocked()
        return visit

    async def get(self, session: str, after: str | None = None, **how: Any) -> RecordedExchange:
        how.setdefault("Last_Event_ID", after)
        visit = await self.ask("GET", None, session, **how)
        await wait_all_tasks_blocked()
        return visit

    async def initialize_alone(self, revision: str, **how: Any) -> RecordedExchange:
        params = {"protocolVersion": revision, "capabilities": CAPABILITIES[revision], "clientInfo": CLIENT_INFO}
        return await self.post(request("initialize", params, 0, revision=revision), revision=revision, **how)

    async def initialize(self, revision: str, **how: Any) -> str:
        visit = await self.initialize_alone(revision, **how)
        session = visit.response.headers["Mcp-Session-Id"]
        self.revisions[session] = revision
        headers = {name: value for name, value in how.items() if name == "Authorization"}
        opened = await self.post(notification("notifications/initialized"), session, **headers)
        assert opened.response.status == 202
        return session


async def _nowhere() -> trio.abc.Stream:
    raise AssertionError("nothing is sent by HTTP here")


def _nothing() -> None:
    """The response has ended."""


@contextlib.asynccontextmanager
async def endpoint_of(server: Server, **options: Any) -> AsyncIterator[EndpointClient]:
    """The endpoint of a server that runs for as long as the block."""
    with checked_responses():
        async with _at(server, options) as door:
            yield door


@contextlib.asynccontextmanager
async def _at(server: Server, options: Any) -> AsyncIterator[EndpointClient]:
    async with server.running() as run, trio.open_nursery() as nursery:
        endpoint = Endpoint(run, **options)
        nursery.start_soon(endpoint.run)
        await wait_all_tasks_blocked()
        yield EndpointClient(endpoint, run)
        nursery.cancel_scope.cancel()
