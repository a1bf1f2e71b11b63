"""An HTTP client on h11, over memory streams or sockets, that checks each message of the server.

    async with served(server) as web:  # or listening(server)
        session = await web.initialize("2025-11-25")
        answer = await web.call("tools/call", {"name": "add"}, session=session)
        assert answer.result == {...}
        async with web.stream(session=session) as changes:
            assert await changes.message() == {...}

Each JSON-RPC message is checked against the official schema of its revision, if the checkout has the schemas, and
against the rules of HTTP: a JSON body is one response (or an array of them, in 2025-03-26), the stream of a request
ends with its response, the server sends no requests in the modern revision, and each response belongs to a request.

A broken rule ends the test with `ProtocolViolation`.  A wait for the server raises `Stuck` if no task can continue
under a mock clock.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import h11
import trio

from tests.server.checkpoints import stuck
from tests.server.raw_client import (
    CAPABILITIES,
    CLIENT_INFO,
    LATEST,
    ErrorResponse,
    Object,
    ProtocolViolation,
    _key,
    _parse,
    _rule,
    _schema,
)
from trio_mcp.core import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_LOG_LEVEL, META_VERSION
from trio_mcp.core.http import EventReader, Headers, SseEvent, encode_value

__all__ = [
    "Answer",
    "Cut",
    "ErrorResponse",
    "HttpClient",
    "Link",
    "ProtocolViolation",
    "Stream",
    "notification",
    "request",
    "response",
    "wait_with_deadline",
]

T = TypeVar("T")
Fields = Mapping[str, str | None] | Sequence[tuple[str, str]]

PATIENCE = 7200.0
"""Seconds after which a wait fails: longer than any deadline here, and at most a few hundred keep-alive comments."""

_NAMES = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_EVENT_BYTES = 64 * 1024 * 1024
_NAMED_SINCE = ("2025-06-18", "2025-11-25")  # the legacy revisions that requests name in a header
_BODY_TYPES = "application/json, text/event-stream"


class Cut(Exception):
    """The connection ended in the middle of a response, or before it."""


async def wait_with_deadline(wait: Callable[[], Awaitable[T]], awaited: str) -> T:
    """The result of `wait`, or `Stuck` after `PATIENCE`: a stream with keep-alive comments would wait for ever."""
    with trio.move_on_after(PATIENCE):
        return await wait()
    raise stuck(f"waited in vain for {awaited}")


# Messages.


def request(
    method: str,
    params: Object | None = None,
    id: Any = 1,
    *,
    revision: str = LATEST,
    capabilities: Object | None = None,
    log_level: str | None = None,
    progress: Any = None,
    meta: Object | None = None,
) -> Object:
    """A request as a client of this revision sends it; in the modern revision it has the metadata about the client."""
    params = dict(params or {})
    terms: Object = {}
    if revision == LATEST:
        declared = CAPABILITIES[revision] if capabilities is None else capabilities
        terms = {META_VERSION: revision, META_CLIENT_INFO: CLIENT_INFO, META_CLIENT_CAPABILITIES: declared}
        if log_level is not None:
            terms[META_LOG_LEVEL] = log_level
    if progress is not None:
        terms["progressToken"] = progress
    whole = {**terms, **params.get("_meta", {}), **(meta or {})}
    if whole:
        params["_meta"] = whole
    return {"jsonrpc": "2.0", "id": id, "method": method, **({"params": params} if params else {})}


def notification(method: str, params: Object | None = None) -> Object:
    return {"jsonrpc": "2.0", "method": method, **({} if params is None else {"params": params})}


def response(id: Any, result: Object) -> Object:
    return {"jsonrpc": "2.0", "id": id, "result": result}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_request(message: Any) -> bool:
    return isinstance(message, dict) and "method" in message and "id" in message


class _Checks:
    """Checks the messages of one HTTP response: each must be allowed there."""

    def __init__(self, revision: str | None, sent: Mapping[str, str], own: set[str] | None = None) -> None:
        self._revision = revision
        self._schema = _schema(revision) if revision is not None else None
        self._sent = sent  # the methods of all requests, by id
        self.open = (
            own  # requests that this response still has to answer; None: it may answer any request that was sent
        )

    def received(self, message: Any) -> None:
        _rule(isinstance(message, dict) and message.get("jsonrpc") == "2.0", "not a message", message)
        has = message.keys() - {"jsonrpc"}
        if "method" in has:
            _rule(self.open != set(), "a message after the last response", message)
            kind = "Request" if "id" in has else "Notification"
            _rule(kind == "Notification" or self._revision != LATEST, "a request by the server", message)
            if self._schema is not None:
                self._schema.message(kind, message)
        elif has == {"id", "result"} or has in ({"id", "error"}, {"error"}):
            self._response(message)
        else:
            raise ProtocolViolation(f"neither a request nor a notification nor a response: {message}")

    def _response(self, message: Object) -> None:
        if self._schema is not None and "error" in message:
            # HTTP refuses with "a JSON-RPC error response that has no `id`", although some schemas require an id.
            self._schema.error({"id": None, **message})
        if message.get("id") is None:
            _rule("error" in message, "a result without an id", message)
            return
        key = _key(message["id"])
        waits = key in self._sent if self.open is None else key in self.open
        _rule(waits, "a response without a request that waits for it here", message)
        if self.open is not None:
            self.open.discard(key)
        if self._schema is not None and "result" in message:
            self._schema.result(self._sent[key], message["result"])


# Connections.


class Link:
    """One HTTP/1.1 connection, which carries one request at a time."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=1024 * 1024)
        self.informational: list[int] = []  # the statuses before the current response
        self.chunks: list[tuple[float, bytes]] = []  # the parts of the current body, with their times

    async def ask(self, method: str, target: str, fields: Fields, body: bytes | None = None) -> None:
        """Send a request.  A broken connection is no error, because the server may have answered before it closed."""
        self.informational.clear()
        self.chunks.clear()
        pairs = list(fields.items()) if isinstance(fields, Mapping) else list(fields)
        headers = [(name, value) for name, value in pairs if value is not None]
        names = {name.lower() for name, _ in headers}
        if body is not None and not names & {"content-length", "transfer-encoding"}:
            headers.append(("Content-Length", str(len(body))))
        data = self.h11.send(h11.Request(method=method, target=target, headers=headers)) or b""
        if body:
            data += self.h11.send(h11.Data(data=body)) or b""
        data += self.h11.send(h11.EndOfMessage()) or b""
        with contextlib.suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)

    async def head(self) -> h11.Response:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise Cut(f"expected a response, got {type(event).__name__}")
            self.informational.append(event.status_code)

    async def chunk(self) -> bytes | None:
        """The next bytes of the body, or None at its end."""
        event = await self._next()
        if isinstance(event, h11.Data):
            data = bytes(event.data)
            self.chunks.append((trio.current_time(), data))
            return data
        assert isinstance(event, h11.EndOfMessage)
        return None

    async def body(self) -> bytes:
        parts: list[bytes] = []
        while (part := await self.chunk()) is not None:
            parts.append(part)
        return b"".join(parts)

    async def _next(self) -> Any:
        while True:
            try:
                event = self.h11.next_event()
                if event is h11.NEED_DATA:
                    self.h11.receive_data(await self._receive())
                    continue
            except h11.RemoteProtocolError as error:
                raise Cut(str(error)) from error
            if isinstance(event, h11.ConnectionClosed):
                raise Cut("the connection was closed")
            return event

    async def _receive(self) -> bytes:
        try:
            return bytes(await wait_with_deadline(self.stream.receive_some, "a part of a response"))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    def start_next_request(self) -> bool:
        """Prepare the next request, if the connection stays open."""
        if self.h11.our_state is h11.DONE and self.h11.their_state is h11.DONE:
            self.h11.start_next_cycle()
            return True
        return False

    async def aclose(self) -> None:
        await self.stream.aclose()


# Answers.


@attrs.frozen(eq=False)
class Answer:
    """A whole response."""

    status: int
    headers: Headers
    body: bytes = attrs.field(repr=False)
    informational: tuple[int, ...] = ()

    @property
    def type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0]

    @property
    def json(self) -> Any:
        assert self.type == "application/json", (self, self.body)
        return _parse(self.body)

    @property
    def events(self) -> list[SseEvent]:
        assert self.type == "text/event-stream", (self, self.body)
        return [_as_event(event) for event in EventReader(_EVENT_BYTES).feed(self.body)]

    @property
    def messages(self) -> list[Object]:
        """All messages in the body, from JSON or from events."""
        if self.type == "text/event-stream":
            return [each for event in self.events if event.data for each in _items(_parse(event.data))]
        return _items(self.json) if self.body else []

    @property
    def message(self) -> Object:
        """The response to the request, which is the last message."""
        last = self.messages[-1]
        assert "method" not in last, self.messages
        return last

    @property
    def result(self) -> Object:
        """The result in the response; raises `ErrorResponse` for an error."""
        if "error" in self.message:
            error = self.message["error"]
            raise ErrorResponse(error["code"], error["message"], error.get("data"))
        result: Object = self.message["result"]
        return result

    @property
    def code(self) -> int | None:
        """The code of the JSON-RPC error in the response, if it has one."""
        code: int | None = self.message.get("error", {}).get("code")
        return code


def _as_event(event: object) -> SseEvent:
    assert isinstance(event, SseEvent)
    return event


class Stream:
    """An event stream, read event by event; an iteration gives the events until the server ends the stream.

    `last_event_id` and `retry` are the values that a client keeps for its next connection; `comments` counts keep-alive
    comments.  Closing the stream closes its connection, like a client that disconnects.
    """

    def __init__(self, link: Link, head: h11.Response, checks: _Checks, after: str = "") -> None:
        self.link = link
        self.status = head.status_code
        self.headers = Headers(head.headers)
        self.ended = False  # the server ended it regularly
        self.seen: list[Object] = []  # all messages so far
        self._checks = checks
        self.last_event_id = after
        self._reader = EventReader(_EVENT_BYTES)
        self._ready: list[SseEvent] = []
        self._messages: list[Object] = []

    @property
    def retry(self) -> int | None:
        return self._reader.retry

    @property
    def comments(self) -> int:
        return b"".join(data for _, data in self.link.chunks).count(b": keep-alive\n\n")

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> SseEvent:
        while not self._ready:
            data = None if self.ended else await self.link.chunk()
            if data is None:
                self.ended = True
                raise StopAsyncIteration
            self._ready += [_as_event(event) for event in self._reader.feed(data)]
        event = self._ready.pop(0)
        if event.id is not None:
            self.last_event_id = event.id
        if event.data and event.event == "message":
            messages = _items(_parse(event.data))
            for each in messages:
                self._checks.received(each)
            self.seen += messages
        return event

    async def event(self) -> SseEvent:
        """The next event; raises `Cut` at the end of the stream."""
        async for event in self:
            return event
        raise Cut("the stream has ended")

    async def message(self) -> Object:
        """The next message; raises `Cut` at the end of the stream."""
        while not self._messages:
            event = await self.event()
            if event.data:
                self._messages += _items(_parse(event.data))
        return self._messages.pop(0)

    async def rest(self) -> list[Object]:
        """The messages from here to the end of the stream."""
        async for event in self:
            if event.data:
                self._messages += _items(_parse(event.data))
        taken, self._messages = self._messages, []
        return taken

    async def response(self) -> Object:
        """The response, which ends the stream; the messages before it are in `seen`."""
        await self.rest()
        assert self.seen, "the stream had no message"
        assert "method" not in self.seen[-1]
        return self.seen[-1]

    async def aclose(self) -> None:
        await self.link.aclose()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class HttpClient:
    """A client that opens as many connections as it needs at once; `connect` opens one.

    `path` is the path of the endpoint.  `headers` are sent with each request, without the headers that are None.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[trio.abc.Stream]],
        *,
        path: str = "/mcp",
        host: str = "127.0.0.1:3000",
        headers: Mapping[str, str | None] | None = None,
        check: bool = True,
    ) -> None:
        self.connect = connect
        self.path = path
        self.headers: dict[str, str | None] = {"Host": host, **(headers or {})}
        self.check = check
        self.links: list[Link] = []  # all connections so far
        self._idle: list[Link] = []
        self._ids = 0
        self._methods: dict[str, dict[str, str]] = {}  # by session and id of the request
        self._revisions: dict[str, str] = {}  # by session

    async def link(self) -> Link:
        """A new connection, for a test that uses it directly."""
        link = Link(await self.connect())
        self.links.append(link)
        return link

    async def raw(self, data: bytes) -> bytes:
        """Send these bytes on a new connection, and return all bytes that come until the server closes it."""
        stream = (await self.link()).stream
        received = bytearray()
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(data)
            while part := await wait_with_deadline(stream.receive_some, "the end of the connection"):
                received += part
        return bytes(received)

    async def aclose(self) -> None:
        for link in self.links:
            await link.aclose()

    # Requests of any kind.

    async def send(
        self, method: str, target: str, headers: Mapping[str, str | None] | None = None, body: bytes | None = None
    ) -> Answer:
        """Send a request, and return the complete response."""
        link, head = await self.ask(method, target, headers, body)
        return await self._read_answer(link, head)

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str | None] | None = None, body: bytes | None = None
    ) -> tuple[Link, h11.Response]:
        """Send a request, and return the head of the response; the body is not read yet."""
        fields = {**self.headers, **(headers or {})}
        while True:
            kept = bool(self._idle)
            link = self._idle.pop() if kept else await self.link()
            try:
                await link.ask(method, target, fields, body)
                return link, await link.head()
            except Cut:
                # The server may close a kept connection at any time; this request found out first.
                if not kept:
                    raise
            except trio.Cancelled:
                await trio.aclose_forcefully(link.stream)  # as a client does that gives up its request
                raise

    async def _read_answer(self, link: Link, head: h11.Response) -> Answer:
        body = await link.body()
        if link.start_next_request():
            self._idle.append(link)
        else:
            await link.aclose()
        return Answer(head.status_code, Headers(head.headers), body, tuple(link.informational))

    # MCP.

    def headers_for(self, message: Any, revision: str, session: str | None) -> dict[str, str | None]:
        """The headers that a client of this revision sends with a message."""
        fields: dict[str, str | None] = {"Accept": _BODY_TYPES, "Content-Type": "application/json"}
        opening = isinstance(message, dict) and message.get("method") == "initialize"
        if revision == LATEST or (revision in _NAMED_SINCE and not opening):
            fields["MCP-Protocol-Version"] = revision
        if session is not None:
            fields["Mcp-Session-Id"] = session
        if revision == LATEST and isinstance(message, dict) and "method" in message:
            fields["Mcp-Method"] = message["method"]
            name = (message.get("params") or {}).get(_NAMES.get(message["method"], ""))
            if isinstance(name, str):
                fields["Mcp-Name"] = encode_value(name)
        return fields

    async def begin(
        self,
        message: Any,
        *,
        revision: str | None = None,
        session: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        path: str | None = None,
        body: bytes | None = None,
    ) -> tuple[Link, h11.Response, _Checks]:
        """Post a message or a batch, or `body` in its place, and return after the head of the response."""
        revision = revision or self._revisions.get(session or "", LATEST)
        requests = {_key(each["id"]): str(each["method"]) for each in _items(message) if _is_request(each)}
        sent = requests if session is None else self._methods.setdefault(session, {})
        sent.update(requests)
        own = set(requests)
        if body is None:
            body = json.dumps(message, ensure_ascii=False).encode()
        fields = {**self.headers_for(message, revision, session), **(headers or {})}
        link, head = await self.ask("POST", path or self.path, fields, body)
        return link, head, _Checks(revision if self.check else None, sent, own)

    def expect(self, message: Any, session: str = "") -> None:
        """Allow responses to these requests on the streams of the session; without a session, on those of HTTP+SSE."""
        requests = {_key(each["id"]): str(each["method"]) for each in _items(message) if _is_request(each)}
        self._methods.setdefault(session, {}).update(requests)

    async def post(self, message: Any, **how: Any) -> Answer:
        """Post a message, and return the complete response; the options are those of `begin`."""
        link, head, checks = await self.begin(message, **how)
        answer = await self._read_answer(link, head)
        if answer.type in ("application/json", "text/event-stream"):
            for each in answer.messages:
                _rule(
                    answer.type != "application/json" or "method" not in each, "another message than a response", each
                )
                checks.received(each)
        if answer.status == 200:
            _rule(not checks.open, "requests without a response", (checks.open, answer.body))
        return answer

    def request(self, method: str, params: Object | None = None, **how: Any) -> Object:
        """A request; without `id`, its id is one that this client has not used yet."""
        if "id" not in how:
            self._ids += 1
            how["id"] = self._ids
        return request(method, params, **how)

    async def call(
        self,
        method: str,
        params: Object | None = None,
        *,
        revision: str | None = None,
        session: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        **how: Any,
    ) -> Answer:
        """The answer to one request, of this revision or in this session; `how` are the options of `request`."""
        revision = revision or self._revisions.get(session or "", LATEST)
        message = self.request(method, params, revision=revision, **how)
        return await self.post(message, revision=revision, session=session, headers=headers)

    async def open(
        self,
        message: Any = None,
        *,
        revision: str | None = None,
        session: str | None = None,
        after: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        path: str | None = None,
    ) -> Stream:
        """The stream that answers a message; without a message, that of the session, from the event `after` on."""
        if message is not None:
            link, head, checks = await self.begin(
                message, revision=revision, session=session, headers=headers, path=path
            )
        else:
            revision = revision or self._revisions.get(session or "", "2024-11-05")
            fields = {**self.headers_for(None, revision, session), "Content-Type": None, "Accept": "text/event-stream"}
            if after is not None:
                fields["Last-Event-ID"] = after
            link, head = await self.ask("GET", path or self.path, {**fields, **(headers or {})})
            sent = self._methods.setdefault(session or "", {})
            checks = _Checks(revision if self.check else None, sent)
        stream = Stream(link, head, checks, after or "")
        if stream.headers.get("Content-Type") != "text/event-stream":
            raise ProtocolViolation(f"expected a stream, got {stream.status} {await link.body()!r}")
        return stream

    @contextlib.asynccontextmanager
    async def stream(self, message: Any = None, **how: Any) -> AsyncIterator[Stream]:
        """Like `open`, but the stream closes at the end of the block."""
        stream = await self.open(message, **how)
        async with stream:
            yield stream

    async def initialize(
        self,
        revision: str,
        capabilities: Object | None = None,
        *,
        headers: Mapping[str, str | None] | None = None,
        initialized: bool = True,
    ) -> str:
        """Open a session, and return its id."""
        params = {
            "protocolVersion": revision,
            "capabilities": CAPABILITIES[revision] if capabilities is None else capabilities,
            "clientInfo": CLIENT_INFO,
        }
        answer = await self.call("initialize", params, revision=revision, headers=headers)
        assert answer.status == 200, (answer, answer.body)
        assert answer.result["protocolVersion"] == revision
        session = answer.headers["Mcp-Session-Id"]
        self._revisions[session] = revision
        if initialized:
            done = await self.post(notification("notifications/initialized"), session=session, headers=headers)
            assert (done.status, done.body) == (202, b"")
        return session

    async def end(self, session: str, headers: Mapping[str, str | None] | None = None) -> Answer:
        """DELETE the session."""
        revision = self._revisions.get(session, "2025-11-25")
        fields = {**self.headers_for(None, revision, session), "Content-Type": None}
        return await self.send("DELETE", self.path, {**fields, **(headers or {})})
