"""A client that writes its JSON by hand.  Its interface is the same in every revision.

It shares only the names of `_meta` keys with the code under test.  One test body runs in all revisions:

    @every_revision
    async def test_a_tool_asks(revision: str, autojump_clock: MockClock) -> None:
        async with connected(server, revision) as wire:
            wire.answers["elicitation/create"] = lambda params: {"action": "accept", "content": {"size": 3}}
            result = await wire.call("tools/call", {"name": "order"}, progress="p")
            assert [params["progress"] for method, params in wire.notes if method == PROGRESS] == [1, 2]

The client checks each message of the server when it arrives.  A message that breaks a rule ends the test with
`ProtocolViolation`.  The rules:

- Every line is one JSON object in UTF-8 (in 2025-03-26 it may be an array of them).  It has no duplicate key, no NaN
  and no carriage return.  The last line is complete.
- A message is a request, a notification or a response, and is valid against the official schema of the revision, if
  the schemas are beside the checkout.  (`check=False` turns this off, for tests of messages that have no schema.)
- A response belongs to a request that waits for one.  Progress belongs to a request that waits, and increases.
- In the modern revision the server sends no requests.  It sends logs only for a request that asked for them, and
  change notifications only on a subscription: with its id, after its acknowledgement, and of a kind that the client
  asked for and the server promised.

Each wait for the server ends with `Stuck` when, under a mock clock, no more event can come.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import json
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jsonschema_rs
import pytest
import trio

from tests.server.checkpoints import running_tasks, task_positions, unwrapped, wait_or_fail
from trio_mcp.core import (
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_SERVER_INFO,
    META_SUBSCRIPTION_ID,
    META_VERSION,
)

__all__ = [
    "ACKNOWLEDGED",
    "CANCELLED",
    "CAPABILITIES",
    "CLIENT_INFO",
    "MESSAGE",
    "PROGRESS",
    "REVISION_NAMES",
    "ErrorResponse",
    "ProtocolViolation",
    "RawClient",
    "Subscription",
    "client_on",
    "connected",
    "draining_when",
    "every_revision",
    "legacy",
    "modern",
    "since",
    "until",
]

T = TypeVar("T")
Object = dict[str, Any]
Answer = Callable[[Object], Any]  # the result or an exception, or an awaitable of it

REVISION_NAMES = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28")
LATEST = REVISION_NAMES[-1]

every_revision = pytest.mark.parametrize("revision", REVISION_NAMES)
legacy = pytest.mark.parametrize("revision", REVISION_NAMES[:-1])
modern = pytest.mark.parametrize("revision", REVISION_NAMES[-1:])


def since(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("revision", REVISION_NAMES[REVISION_NAMES.index(name) :])


def until(name: str) -> pytest.MarkDecorator:
    """The revisions up to this one, inclusive."""
    return pytest.mark.parametrize("revision", REVISION_NAMES[: REVISION_NAMES.index(name) + 1])


CLIENT_INFO = {"name": "wire", "version": "1"}
_FULL = {
    "roots": {"listChanged": True},
    "sampling": {"context": {}, "tools": {}},
    "elicitation": {"form": {}, "url": {}},
}
CAPABILITIES: Mapping[str, Object] = {
    "2024-11-05": {"roots": {"listChanged": True}, "sampling": {}},
    "2025-03-26": {"roots": {"listChanged": True}, "sampling": {}},
    "2025-06-18": {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {}},
    "2025-11-25": _FULL,
    "2026-07-28": {**_FULL, "roots": {}},
}
"""The capabilities of a client that supports every feature of the revision."""

PROGRESS, MESSAGE, CANCELLED = "notifications/progress", "notifications/message", "notifications/cancelled"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
_LISTEN = "subscriptions/listen"
_CHANGES = {
    "notifications/tools/list_changed": ("tools", "toolsListChanged"),
    "notifications/prompts/list_changed": ("prompts", "promptsListChanged"),
    "notifications/resources/list_changed": ("resources", "resourcesListChanged"),
    "notifications/resources/updated": ("updated", "resourceSubscriptions"),
}
_FIELDS = dict(_CHANGES.values())
_MAX_ROUNDS = 100


class ProtocolViolation(AssertionError):
    """The server broke a rule of the protocol."""


class ErrorResponse(Exception):
    """An error response, of the server or, as an answer to a request of the server, of the client."""

    def __init__(self, code: int, message: str = "", data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code, self.message, self.data = code, message, data


def _rule(kept: object, fault: str, about: object) -> None:
    if not kept:
        raise ProtocolViolation(f"{fault}: {str(about)[:1000]}")


# Strict JSON.


def _object(pairs: list[tuple[str, Any]]) -> Object:
    made = dict(pairs)
    _rule(len(made) == len(pairs), "a duplicate key", [key for key, _ in pairs])
    return made


def _constant(name: str) -> None:
    raise ProtocolViolation(f"{name} is not JSON")


def _parse(line: bytes) -> Any:
    _rule(b"\r" not in line, "a carriage return in a line", line)
    try:
        return json.loads(line.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except ValueError as error:
        raise ProtocolViolation(f"a line that is not JSON ({error}): {line[:1000]!r}") from None


def _key(id: Any) -> str:
    """The key under which an id is stored: 1, "1" and true are three different ids."""
    return json.dumps(id)


# The official schemas.

_FOLDER = Path(__file__).parents[3] / "shared" / "spec" / "schema"
_RESULTS = {
    "initialize": "InitializeResult",
    "ping": "EmptyResult",
    "server/discover": "DiscoverResult",
    "tools/list": "ListToolsResult",
    "tools/call": "CallToolResult",
    "prompts/list": "ListPromptsResult",
    "prompts/get": "GetPromptResult",
    "resources/list": "ListResourcesResult",
    "resources/templates/list": "ListResourceTemplatesResult",
    "resources/read": "ReadResourceResult",
    "completion/complete": "CompleteResult",
    "resources/subscribe": "EmptyResult",
    "resources/unsubscribe": "EmptyResult",
    "logging/setLevel": "EmptyResult",
    _LISTEN: "SubscriptionsListenResult",
}


class _Schema:
    """The schema of one revision."""

    def __init__(self, revision: str) -> None:
        self._whole = json.loads((_FOLDER / f"{revision}.json").read_text())
        self._place = "$defs" if "$defs" in self._whole else "definitions"
        self.definitions = self._whole[self._place]
        if "JSONValue" in self.definitions:  # a mistake in the schema: null is JSON
            self.definitions["JSONValue"]["anyOf"].append({"type": "null"})
        self._validators: dict[str, Any] = {}

    def check(self, name: str, value: Any) -> None:
        if name not in self._validators:
            schema = {**self._whole, "$ref": f"#/{self._place}/{name}"}
            self._validators[name] = jsonschema_rs.validator_for(schema, validate_formats=True)
        error = next(iter(self._validators[name].iter_errors(value)), None)
        if error is not None:
            raise ProtocolViolation(
                f"not a valid {name}, {error.message} at {list(error.instance_path)}: {str(value)[:1000]}"
            )

    def message(self, kind: str, message: Object) -> None:
        """Check a message of the server; `kind` is "Request" or "Notification"."""
        name = self._sent_by_servers(kind).get(message["method"])
        if name is None:
            raise ProtocolViolation(f"not a {kind.lower()} of a server in this revision: {message}")
        self.check(name, message)

    def _sent_by_servers(self, kind: str) -> Mapping[str, str]:
        """The definitions by method.  A check against the union would report only that no member fits."""
        names = [each["$ref"].rsplit("/", 1)[1] for each in self.definitions[f"Server{kind}"]["anyOf"]]
        return {self.definitions[name]["properties"]["method"]["const"]: name for name in names}

    def result(self, method: str, result: Object) -> None:
        if result.get("resultType") == "input_required":
            self.check("InputRequiredResult", result)
        elif "task" in result and "CreateTaskResult" in self.definitions:
            self.check("CreateTaskResult", result)
        elif method in _RESULTS:
            self.check(_RESULTS[method], result)

    def error(self, message: Object) -> None:
        if message.get("id", 0) is None:
            message = {**message, "id": 0}  # before 2025-11-25 the text permits null, but the schema does not
        self.check(next(name for name in ("JSONRPCError", "JSONRPCErrorResponse") if name in self.definitions), message)


@functools.cache
def _schema(revision: str) -> _Schema | None:
    return _Schema(revision) if _FOLDER.is_dir() else None


# The client.


class _Sent:
    """A request of this client."""

    def __init__(self, id: Any, method: str, params: Object) -> None:
        self.id = id
        self.method = method
        meta = params.get("_meta")
        self.meta: Object = meta if isinstance(meta, dict) else {}  # a test may send anything
        self.asked: Object = params.get("notifications", {})
        self.agreed: Object | None = None  # of a subscription
        self.progress: float | None = None
        self.response: Object | None = None

    @property
    def open(self) -> bool:
        return self.response is None

    @property
    def at_work(self) -> bool:
        """It waits for its response, or it became a task: "the original token stays in use" (2025-11-25)."""
        return self.response is None or "task" in self.response.get("result", {})

    def covers(self, params: Object, field: str) -> bool:
        promised = (self.agreed or {}).get(field)
        # "the server may send for sub-resources": the URI alone does not show whether it is a sub-resource
        return bool(promised) if field == "resourceSubscriptions" else promised is True


class Subscription:
    """A subscription of the client.  `agreed` holds the names of the lists and the URIs that the server promised."""

    def __init__(self, wire: RawClient, id: Any, agreed: Iterable[str], uris: Iterable[str]) -> None:
        self._wire = wire
        self.id = id
        self.agreed = frozenset(agreed)
        self.uris = tuple(uris)

    async def end(self) -> None:
        """Legacy: unsubscribes from the URIs; list changes go on coming.  Modern: cancels the subscription."""
        if self._wire.modern:
            await self._wire.cancel(self.id)
        else:
            for uri in self.uris:
                await self._wire.call("resources/unsubscribe", {"uri": uri})


class RawClient:
    """A client; see the module docstring.  `run` must run in the background: `client_on` and `connected` start it.

    `capabilities`: the capabilities that the client declares, by default all.  `log_level`: the level from the start;
    in the legacy era the client sends `logging/setLevel`.  `meta`: members of the `_meta` of each request.  `answers`:
    the answers to the requests of the server, by method.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        revision: str,
        *,
        capabilities: Object | None = None,
        log_level: str | None = None,
        meta: Object | None = None,
        answers: Mapping[str, Answer] | None = None,
        check: bool = True,
    ) -> None:
        self.stream = stream
        self.revision = revision
        self.modern = revision == LATEST
        self.capabilities = CAPABILITIES[revision] if capabilities is None else capabilities
        self.log_level = log_level
        self.meta: Object = dict(meta or {})
        self.answers: dict[str, Answer] = dict(answers or {})
        self.opening: Object = {}  # the result of initialize
        self.lines: list[bytes] = []
        self.messages: list[Object] = []
        self.notes: list[tuple[str, Object]] = []
        self.asked: list[tuple[str, Object]] = []  # the requests of the server, in either era
        self.unaddressed: list[Object] = []  # errors without the id of a request
        self.ended = trio.Event()  # the server has closed its side
        self.rest = b""  # the incomplete line
        self._schema = _schema(revision) if check else None
        self._sent: dict[str, _Sent] = {}
        self._ids = 0
        self._taken: Counter[str] = Counter()
        self._changes: deque[tuple[str, str | None]] = deque()
        self._wanted: set[str] = set()  # the kinds of changes that the client subscribed to
        self._answering: dict[str, trio.CancelScope] = {}
        self._arrival = trio.lowlevel.ParkingLot()
        self._outbox, self._to_write = trio.open_memory_channel[bytes](float("inf"))
        self._nursery: trio.Nursery | None = None
        self._receiving = trio.CancelScope()
        self._may_read = trio.Event()
        self._may_read.set()

    # Requests.

    async def call(
        self,
        method: str,
        params: Object | None = None,
        *,
        id: Any = None,
        progress: Any = None,
        meta: Object | None = None,
        rounds: bool = True,
    ) -> Object:
        """The result; raises `ErrorResponse` for an error.

        In the modern revision the client answers the requests of the server from `answers`, and repeats its own
        request under a new id until the result is complete.  `rounds=False` turns this off.  `progress` is a token.
        Cancelling this coroutine only ends the wait: `cancel` is the method that notifies the server.
        """
        params = dict(params or {})
        result = await self._call(method, params, id=id, progress=progress, meta=meta)
        for _ in range(_MAX_ROUNDS):
            if not rounds or result.get("resultType") != "input_required":
                return result
            again = dict(params)
            if "inputRequests" in result:
                asked = result["inputRequests"].items()
                again["inputResponses"] = {key: await self._answer_round(question) for key, question in asked}
            if "requestState" in result:
                again["requestState"] = result["requestState"]
            result = await self._call(method, again, progress=progress, meta=meta)
        raise ProtocolViolation(f"{method} has too many rounds")

    async def _call(self, method: str, params: Object, **how: Any) -> Object:
        message = await self.exchange(method, params, **how)
        if "error" in message:
            error = message["error"]
            raise ErrorResponse(error["code"], error["message"], error.get("data"))
        result: Object = message["result"]
        return result

    async def exchange(self, method: str, params: Object | None = None, **how: Any) -> Object:
        """Send one request, and return the whole response message."""
        return await self.response(await self.start(method, params, **how))

    async def start(
        self,
        method: str,
        params: Object | None = None,
        *,
        id: Any = None,
        progress: Any = None,
        meta: Object | None = None,
    ) -> Any:
        """Send a request, and return its id."""
        message = self.request(method, params, id=id, progress=progress, meta=meta)
        await self.send(message)
        return message["id"]

    def request(
        self,
        method: str,
        params: Object | None = None,
        *,
        id: Any = None,
        progress: Any = None,
        meta: Object | None = None,
    ) -> Object:
        """The message of a request, without sending it; for example for a batch."""
        if id is None:
            self._ids += 1
            id = self._ids
        params = dict(params or {})
        whole = {**(self._terms() if self.modern else {}), **self.meta, **params.get("_meta", {}), **(meta or {})}
        if progress is not None:
            whole["progressToken"] = progress
        if whole:
            params["_meta"] = whole
        return {"jsonrpc": "2.0", "id": id, "method": method, **({"params": params} if params else {})}

    def _terms(self) -> Object:
        terms = {
            META_VERSION: self.revision,
            META_CLIENT_INFO: CLIENT_INFO,
            META_CLIENT_CAPABILITIES: self.capabilities,
        }
        return terms if self.log_level is None else {**terms, META_LOG_LEVEL: self.log_level}

    async def response(self, id: Any) -> Object:
        """The response to the request with this id."""
        return await self._until(lambda: self._sent[_key(id)].response, f"the response to {id!r}")

    def answered(self, id: Any) -> bool:
        return self._sent[_key(id)].response is not None

    async def cancel(self, id: Any, reason: str | None = None) -> None:
        await self.notify(CANCELLED, {"requestId": id, **({} if reason is None else {"reason": reason})})

    async def notify(self, method: str, params: Object | None = None) -> None:
        await self.send({"jsonrpc": "2.0", "method": method, **({"params": params} if params is not None else {})})

    # Sending.

    async def send(self, message: Object | list[Object]) -> None:
        """Queue any message, or a batch of messages.  It may not have arrived when this returns."""
        self.post(message)
        await trio.lowlevel.checkpoint()

    def post(self, message: Object | list[Object]) -> None:
        """Like `send`, but synchronous."""
        for each in message if isinstance(message, list) else [message]:
            if "method" in each and "id" in each:
                params = each.get("params")
                self._sent[_key(each["id"])] = _Sent(each["id"], each["method"], params if type(params) is dict else {})
        self.post_bytes(json.dumps(message, ensure_ascii=False).encode() + b"\n")

    def post_bytes(self, data: bytes) -> None:
        self._outbox.send_nowait(data)

    async def close(self) -> None:
        """Send the rest of the queue and the end of the stream, and wait until the server has closed its side."""
        self._outbox.close()
        await wait_or_fail(self.ended.wait, "the end of the server's side")

    # Notifications.

    async def note(self, method: str) -> Object:
        """The params of the next notification of this method.  Each call returns the next one, from the first on."""

        def found() -> Object | None:
            those = [params for name, params in self.notes if name == method]
            return those[self._taken[method]] if len(those) > self._taken[method] else None

        params = await self._until(found, method)
        self._taken[method] += 1
        return params

    def noted(self, method: str) -> list[Object]:
        """The params of all notifications of this method so far."""
        return [params for name, params in self.notes if name == method]

    async def subscribe(
        self, *, tools: bool = False, prompts: bool = False, resources: bool = False, uris: Iterable[str] = ()
    ) -> Subscription:
        """Subscribe to changes; see `changed`.  Raises `ErrorResponse` if the server refuses."""
        uris = tuple(uris)
        lists = [name for name, on in [("tools", tools), ("prompts", prompts), ("resources", resources)] if on]
        self._wanted |= {*lists, *(["updated"] if uris else [])}
        if not self.modern:
            for uri in uris:
                await self.call("resources/subscribe", {"uri": uri})
            declared = self.opening["capabilities"]
            told = [name for name in lists if (declared.get(name) or {}).get("listChanged")]
            return Subscription(self, None, (*told, *uris), uris)
        filter: Object = {_FIELDS[name]: True for name in lists}
        if uris:
            filter["resourceSubscriptions"] = list(uris)
        id = await self.start(_LISTEN, {"notifications": filter})
        sent = self._sent[_key(id)]
        await self._until(lambda: sent.agreed if sent.open else sent.response, "the acknowledgement")
        if sent.response is not None:
            error = sent.response.get("error", {})
            raise ErrorResponse(error.get("code", 0), error.get("message", "ended at once"), error.get("data"))
        agreed = sent.agreed or {}
        told = [name for name in lists if agreed.get(_FIELDS[name])]
        return Subscription(self, id, (*told, *agreed.get("resourceSubscriptions", ())), uris)

    async def changed(self) -> tuple[str, str | None]:
        """The next change that the client subscribed to: ("tools", None) and so on for lists, or ("updated", uri)."""
        await self._until(lambda: self._changes or None, "a change")
        return self._changes.popleft()

    # Operations that differ between the eras, with one interface for the tests.

    async def about(self) -> Object:
        """The description of the server: capabilities, serverInfo, and instructions if there are any."""
        if not self.modern:
            return self.opening
        result = await self.call("server/discover")
        return {**result, "serverInfo": result.get("_meta", {}).get(META_SERVER_INFO)}

    async def set_level(self, level: str) -> None:
        """Receive logs of this level and above from now on; in the modern era, for the requests that follow."""
        self.log_level = level
        if not self.modern:
            await self.call("logging/setLevel", {"level": level})

    async def open(self) -> None:
        """Do the handshake.  The modern revision has no handshake."""
        if self.modern:
            return
        params = {"protocolVersion": self.revision, "capabilities": self.capabilities, "clientInfo": CLIENT_INFO}
        self.opening = await self.call("initialize", params)
        _rule(self.opening["protocolVersion"] == self.revision, f"not {self.revision}", self.opening)
        await self.notify("notifications/initialized")
        if self.log_level is not None:
            await self.set_level(self.log_level)

    @contextlib.contextmanager
    def not_reading(self) -> Iterator[None]:
        """The client does not read within the block.  The server notices it only if the stream has a small buffer."""
        self._may_read = trio.Event()
        self._receiving.cancel()
        try:
            yield
        finally:
            self._may_read.set()

    # The loops.

    async def run(self) -> None:
        """Read and write until the server closes its side."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._write, name="the client writes")
            await self._read()
            self.ended.set()
            self._arrival.unpark_all()
            self._nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # the reader goes on
            async for data in self._to_write:
                await self.stream.send_all(data)
            if isinstance(self.stream, trio.abc.HalfCloseableStream):
                await self.stream.send_eof()
            else:
                await self.stream.aclose()

    async def _read(self) -> None:
        while True:
            await self._may_read.wait()
            data: bytes | None = None
            try:
                with trio.CancelScope() as self._receiving:
                    data = bytes(await self.stream.receive_some())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if data == b"":
                _rule(not self.rest, "an incomplete line at the end", self.rest)
                return
            *lines, self.rest = (self.rest + (data or b"")).split(b"\n")
            for line in lines:
                self.lines.append(line)
                self._receive(_parse(line))
                self._arrival.unpark_all()

    async def _until(self, found: Callable[[], T | None], what: str) -> T:
        async def wait() -> T:
            while True:
                value = found()
                if value is not None:
                    return value
                _rule(not self.ended.is_set(), f"the server ended before {what}", self.messages[-3:])
                await self._arrival.park()

        await trio.lowlevel.checkpoint()
        return await wait_or_fail(wait, what)

    # Received messages.

    def _receive(self, value: Any) -> None:
        if isinstance(value, list):
            _rule(self.revision == "2025-03-26" and value, "an array", value)
        for message in value if isinstance(value, list) else [value]:
            _rule(isinstance(message, dict) and message.get("jsonrpc") == "2.0", "not a message", message)
            self.messages.append(message)
            has = message.keys() - {"jsonrpc"}
            if "method" in has and "id" in has and has <= {"id", "method", "params"}:
                self._receive_request(message)
            elif "method" in has and has <= {"method", "params"}:
                self._receive_notification(message)
            elif has == {"id", "result"} or has in ({"id", "error"}, {"error"}):
                self._receive_response(message)
            else:
                raise ProtocolViolation(f"neither a request nor a notification nor a response: {message}")

    def _receive_response(self, message: Object) -> None:
        if self._schema is not None and "error" in message:
            self._schema.error(message)
        if message.get("id") is None:
            _rule("error" in message, "a result without an id", message)
            self.unaddressed.append(message)
            return
        sent = self._sent.get(_key(message["id"]))
        if sent is None or not sent.open:
            raise ProtocolViolation(f"a response without an open request: {message}")
        if self._schema is not None and "result" in message:
            self._schema.result(sent.method, message["result"])
        if sent.method == _LISTEN and "result" in message:
            tag = message["result"].get("_meta", {}).get(META_SUBSCRIPTION_ID)
            _rule(_key(tag) == _key(sent.id), "the end of a subscription without its id", message)
        sent.response = message

    def _receive_notification(self, message: Object) -> None:
        method, params = message["method"], message.get("params", {})
        if self._schema is not None:
            self._schema.message("Notification", message)
        if method == PROGRESS:
            self._receive_progress(params)
        elif method == MESSAGE and self.modern:
            heard = [sent for sent in self._sent.values() if sent.open and META_LOG_LEVEL in sent.meta]
            _rule(heard, "a log message that no request asked for", params)
        elif method == ACKNOWLEDGED:
            self._receive_acknowledgement(params)
        elif method in _CHANGES:
            self._receive_change(method, params)
        elif method == CANCELLED and not self.modern and _key(params.get("requestId")) in self._answering:
            self._answering[_key(params["requestId"])].cancel()
        self.notes.append((method, params))

    def _receive_progress(self, params: Object) -> None:
        token = _key(params["progressToken"])
        running = [
            sent for sent in self._sent.values() if sent.at_work and _key(sent.meta.get("progressToken")) == token
        ]
        _rule(running, "progress without an open request", params)
        before = running[-1].progress
        _rule(before is None or params["progress"] > before, f"progress that does not rise from {before}", params)
        running[-1].progress = params["progress"]

    def _subscription_of(self, params: Object) -> _Sent:
        id = params.get("_meta", {}).get(META_SUBSCRIPTION_ID)
        sent = self._sent.get(_key(id))
        if sent is None or sent.method != _LISTEN or not sent.open:
            raise ProtocolViolation(f"not on a subscription: {params}")
        return sent

    def _receive_acknowledgement(self, params: Object) -> None:
        sent = self._subscription_of(params)
        _rule(sent.agreed is None, "acknowledged twice", params)
        agreed = sent.agreed = params["notifications"]
        for field, value in agreed.items():
            asked = sent.asked.get(field)
            kept = set(value) <= set(asked or ()) if isinstance(value, list) else value == asked
            _rule(kept, f"the server promised more than the client asked for ({sent.asked})", params)

    def _receive_change(self, method: str, params: Object) -> None:
        name, field = _CHANGES[method]
        if self.modern:
            sent = self._subscription_of(params)
            _rule(sent.agreed is not None, "a change before the acknowledgement", params)
            _rule(sent.covers(params, field), f"not promised ({sent.agreed})", (method, params))
        else:
            _rule(META_SUBSCRIPTION_ID not in params.get("_meta", {}), "a subscription id in a legacy revision", params)
        if name in self._wanted:  # legacy: list changes come without a subscription
            self._changes.append((name, params.get("uri")))

    # Requests of the server.

    def _receive_request(self, message: Object) -> None:
        _rule(not self.modern, "a request by the server", message)
        _rule(_key(message["id"]) not in self._answering, "an id that is in use", message)
        if self._schema is not None:
            self._schema.message("Request", message)
        assert self._nursery is not None
        self._answering[_key(message["id"])] = trio.CancelScope()
        self._nursery.start_soon(self._reply, message, name=f"the client answers {message['method']}")

    async def _reply(self, message: Object) -> None:
        id, method = message["id"], message["method"]
        with self._answering[_key(id)]:
            if method == "ping":
                outcome: Any = {}
            else:
                outcome = await self._outcome(method, message.get("params", {}))
            if isinstance(outcome, Exception):
                error = outcome if isinstance(outcome, ErrorResponse) else ErrorResponse(-32603, str(outcome))
                data = {} if error.data is None else {"data": error.data}
                outcome = {"error": {"code": error.code, "message": error.message, **data}}
            else:
                outcome = {"result": outcome}
            with contextlib.suppress(trio.ClosedResourceError):  # the test has closed the stream in the meantime
                await self.send({"jsonrpc": "2.0", "id": id, **outcome})
        del self._answering[_key(id)]

    async def _answer_round(self, question: Object) -> Object:
        """An answer for the next request.  The modern revision has no error answers: an error is raised by `call`."""
        outcome = await self._outcome(question["method"], question.get("params", {}))
        if isinstance(outcome, Exception):
            raise outcome
        answer: Object = outcome
        return answer

    async def _outcome(self, method: str, params: Object) -> Any:
        self.asked.append((method, params))
        assert method in self.answers, f"the test has no answer to {method}: {params}"
        try:
            outcome = self.answers[method](params)
            return await outcome if inspect.isawaitable(outcome) else outcome
        except ErrorResponse as error:
            return error


# Connections.

Serve = Callable[..., Awaitable[object]]
_served_here: contextvars.ContextVar[object] = contextvars.ContextVar("served_here", default=None)


@contextlib.asynccontextmanager
async def client_on(
    stream: trio.abc.Stream, revision: str, *, opened: bool = True, **options: Any
) -> AsyncIterator[RawClient]:
    """A client on a stream to a server, for example to a process; `options` are those of `RawClient`.

    With `opened=False` there is no handshake.  At the end of the block the client closes its side of the stream, and
    the server must close its own.  An exception of the block leaves it unchanged, without an exception group.
    """
    wire = RawClient(stream, revision, **options)
    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.run, name="the client")
            if opened:
                await wire.open()
            yield wire
            await wire.close()
    await stream.aclose()


@contextlib.asynccontextmanager
async def connected(
    server: Any,
    revision: str,
    *,
    streams: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = trio.testing.memory_stream_pair,
    serve: Serve | None = None,
    tap: Any = None,
    drain: trio.Event | None = None,
    **options: Any,
) -> AsyncIterator[RawClient]:
    """A client of `server` on a stream in memory; `options` are those of `client_on`.

    `streams` makes the two ends, first that of the client; for example `checkpoints.one_byte_pipe`.  When `drain` is
    set, the whole server drains, without a time limit.  At the end the client closes the stream.  Then `serve_stream`
    must return and leave no tasks behind, except handlers that wait for a retry in a run of the server that goes on.
    """
    if serve is None:
        # The contract suite replaces this name in `trio_mcp`.
        from trio_mcp.server.session import serve_stream

        serve = serve_stream
    run: Serve = serve
    how = {} if tap is None else {"tap": tap}
    ours, theirs = streams()
    here, done = object(), trio.Event()
    system = _system_tasks()

    async def serving() -> None:
        _served_here.set(here)  # every task that is started from here inherits it, also in other nurseries
        async with draining_when(server, drain):
            await run(server, theirs, **how)
        done.set()
        await theirs.aclose()

    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving, name="the server")
            async with client_on(ours, revision, **options) as wire:
                yield wire
            await wait_or_fail(done.wait, "the server to return")
    left = await _left(lambda: {task for task in running_tasks() if task.context.get(_served_here) is here})
    waiting = server.statistics().parked if hasattr(server, "statistics") else 0
    left = left if len(left) > waiting else set()
    left |= await _left(lambda: _system_tasks() - system)
    assert not left, f"tasks were left: {sorted(task.name for task in left)}\n{task_positions()}"


@contextlib.asynccontextmanager
async def draining_when(server: Any, drain: trio.Event | None) -> AsyncIterator[None]:
    """Drain the server when the event is set, within the block."""
    if drain is None:
        yield
        return
    asked = drain

    async def drained() -> None:
        await asked.wait()
        async with server.draining(math.inf):
            pass

    with unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drained, name="the task that drains the server")
            yield
            nursery.cancel_scope.cancel()


def _system_tasks() -> set[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    return {task for task in running_tasks() if task.parent_nursery and task.parent_nursery.parent_task is root}


async def _left(tasks: Callable[[], set[trio.lowlevel.Task]]) -> set[trio.lowlevel.Task]:
    if tasks():
        await trio.testing.wait_all_tasks_blocked()  # some tasks may be about to end
    return tasks()
