"""Response streams: the messages that go back to a client over HTTP, as one JSON reply or as an event stream.

A `ResponseStream` answers the requests of one POST, or carries the messages of a session that belong to no request.
If the client accepts both kinds of answer, the kind is open at first.  An event stream gets comments as keep-alives.

A stream in a session outlives its HTTP response.  Each event is logged with an id before it is sent.  When the client
reconnects with the last id that it has read, the stream is attached to the new HTTP response.

| | attached, kind open | attached, event stream | detached, with event ids | detached, without |
|---|---|---|---|---|
| a message | becomes an event stream | logged and sent | logged | lost; a question fails |
| all requests answered | one JSON reply; over | sent; over | logged; over | over |
| all requests cancelled | 202; over | over | over | over |
| idle | becomes an event stream; a comment | a comment | | |
| the client disconnects | detached | detached; queued messages are logged | | |
| `hang_up` | becomes an event stream; then as that | an event with an id and `retry`; detached | refused | refused |
| the client resumes it | | attached to the new response | attached; missed events are sent | |

- With event ids, the client can reconnect and resume.
- A JSON-only response stays open until all its requests are answered, and drops all other messages.
- A stream that answers no request ends with `finish`.
- Every message goes out on exactly one stream (http-39).

A task that has a message writes it itself if no write is in progress.  Messages that are queued during a write are sent
together afterwards, by one writer task, which exists only while there are messages.  Most streams are complete before
their first write: one JSON reply, or an event stream with one answer, which goes out in one piece.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import attrs
import trio

from trio_mcp.core.http.event_log import EventLog
from trio_mcp.core.http.fields import Fields, reply_headers
from trio_mcp.core.http.server_rules import Answer, Serve, status_for
from trio_mcp.core.http.sse import KEEP_ALIVE, encode_messages, priming_event
from trio_mcp.core.messages import Batch, Error, Id, Notification, Request, Response, encode
from trio_mcp.core.requests import LinkKind, charged
from trio_mcp.core.revisions import Revision, Terms
from trio_mcp.core.shares import LONG, Account
from trio_mcp.server.run import Run
from trio_mcp.server.session import ServerSession
from trio_mcp.transport.wire import GONE, Wire

__all__ = [
    "EndpointStreams",
    "HttpResponse",
    "IdleOrder",
    "OneStream",
    "OutgoingMessage",
    "ResponseMode",
    "ResponseStream",
    "SingleRequest",
    "StreamOwner",
]

_log = logging.getLogger("trio_mcp")

T = TypeVar("T")
OutgoingMessage: TypeAlias = Request | Notification | Response | Error | Batch
_ANSWERS = (Response, Error, Batch)


class IdleOrder(Generic[T]):
    """Items in the order of their last activity, with one timeout for all.

    Because the timeout is the same for all items, the next one to expire is always the first.  An activity costs one
    move to the end, and one task serves all items.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # A plain dict would search for its first item through all that have moved to the end.
        self._last_active: OrderedDict[T, float] = OrderedDict()
        self._changed = trio.lowlevel.ParkingLot()  # wakes tasks when the order becomes empty or non-empty

    def __len__(self) -> int:
        return len(self._last_active)

    def __iter__(self) -> Iterator[T]:
        """Iterate from the item that is idle for longest."""
        return iter(self._last_active)

    def touch(self, item: T) -> None:
        """Record an activity of `item`: its timeout starts again."""
        if not self._last_active and self._changed:
            self._changed.unpark_all()
        self._last_active[item] = trio.current_time()
        self._last_active.move_to_end(item)

    def forget(self, item: T) -> None:
        if self._last_active.pop(item, None) is not None and not self._last_active and self._changed:
            self._changed.unpark_all()

    async def next(self) -> T:
        """Wait for an item that is idle for the whole timeout, and return it; its timeout starts again."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._last_active:
                await self._changed.park()
                await trio.sleep(self._timeout)  # before that, no item has been idle for the whole timeout
            elif (item := self.expired()) is not None:
                return item
            else:
                await trio.sleep_until(next(iter(self._last_active.values())) + self._timeout)

    def expired(self, early: float = 0.0) -> T | None:
        """Return an item that is idle for the timeout, less `early` seconds, or None; its timeout starts again."""
        item, last_active = next(iter(self._last_active.items()), (None, math.inf))
        if item is not None and last_active + self._timeout - early <= trio.current_time():
            self.touch(item)
            return item
        return None

    async def empty(self) -> None:
        """Wait until no item is left."""
        while self._last_active:
            await self._changed.park()


class HttpResponse(Protocol):
    """One HTTP response, as the HTTP server that owns the connection implements it.

    That server adds Content-Length, chunks and other framing.  `begin` and `send` raise `BrokenResourceError` if the
    client has disconnected.  They are never called at the same time, nor after a call with ``more=False``.  A
    cancellation does not interrupt them, except when the whole server ends.
    """

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        """Send the head and the first part of the body in one write.  Without `more` it is the whole reply."""

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send another part of the body.  Without `more` it is the last."""

    def send_now(self, data: bytes) -> bool:
        """Send another part without waiting.  False: it is not or not entirely sent; call `send` with another part,
        which first sends the rest."""

    def drop(self) -> None:
        """Abort the response: nothing more is sent, and the client sees that it is incomplete."""


class StreamOwner:
    """The owner of a response stream: a session or a single request.  Supplies messages, and is told of state changes.

    The methods here do nothing: `_NO_OWNER`, the owner of a stream that is over, needs nothing else.
    """

    server_session: ServerSession

    def pull(self, stream: ResponseStream) -> None:
        """Move the outgoing messages to their streams, and wake these streams, except this one."""

    def opened(self, stream: ResponseStream) -> None:
        """Its response has become an event stream."""

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        """It has lost its response and is not over.  With `retry`, its client was asked to reconnect after that."""

    def client_absent(self, stream: ResponseStream) -> None:
        """It has had no response for `Limits.session_idle_seconds`."""

    def ended(self, stream: ResponseStream) -> None:
        """It is over."""

    async def settle(self, seconds: float = 0.0) -> None:
        """Tell other replicas within so many seconds of the changes of a message; see `shared_sessions`."""


_NO_OWNER = StreamOwner()


@attrs.frozen(eq=False, repr=False)
class EndpointStreams:
    """The objects that the response streams of one endpoint share."""

    nursery: trio.Nursery
    """Runs the writer tasks."""
    limit: int
    """The number of messages that may wait in one stream."""
    attached: IdleOrder[ResponseStream]
    """The streams that have a response, in the order of their last write."""
    detached: IdleOrder[ResponseStream]
    """The streams that have lost their response and still owe answers, in the order of the loss."""


class ResponseMode(NamedTuple):
    """How a stream answers: from the verdict on its request, and from its session."""

    answer: Answer
    revision: Revision | None = None
    """None: not negotiated yet."""
    log: EventLog | None = None
    """None: the stream cannot be resumed, and its events have no ids (http-115)."""
    opening: bytes = b""
    """The first bytes of the event stream: the endpoint event of HTTP+SSE."""

    @property
    def primes(self) -> bool:
        """Whether the event stream begins with a priming event (http-46)."""
        rules = None if self.log is None or self.revision is None else self.revision.http
        return rules is not None and rules.priming


class _ResponsePart(NamedTuple):
    """The content of one write."""

    head: tuple[int, Fields] | None
    """Status and header fields, if this is the first write of the response."""
    data: bytes
    more: bool
    """The response continues after this write."""
    over: bool
    """The stream is over after this write."""


class ResponseStream(Wire):
    """One response stream; see the head of this file.  It is a `Wire` for the `ServerSession` of its owner.

    It answers the requests with these `ids`, and is over when they have been answered.  Without ids it answers no
    request, and is over after `finish`.
    """

    # Class attributes, because few streams change these values, and each request has its own stream.
    name: str | None = None
    """Its name in the event log, from its first event id on."""
    session_id: str | None = None
    """The id of the session that `initialize` opened; the response to `initialize` has it in a header."""
    _charged = 0  # bytes charged to the account of its owner, for messages in the queue or being written
    _finished = False
    _absent = False  # it has lost its response, and its client has a time limit to come back
    _log_failed = False
    _over = False
    # The current response.
    _response: HttpResponse | None = None
    _cors: Fields = ()
    _begun = False  # its head is sent
    _missed = b""  # events that the client of a resumed stream has not read
    _keep_alive_due = False
    _retry: float | None = None  # after this many seconds the client is asked to reconnect
    # The writes.  A response that was lost may still be written when another one is attached.
    _writing: HttpResponse | None = None  # the response of the newest write in progress
    _writer: HttpResponse | None = None  # the response of the newest writer task
    _writes = 0  # that have ended
    _written: trio.lowlevel.ParkingLot | None = None  # made when a task waits for a write

    def __init__(
        self, owner: StreamOwner, mode: ResponseMode, shared: EndpointStreams, ids: Collection[Id] = ()
    ) -> None:
        self.owner = owner
        """The session or the request that it belongs to, until it is over."""
        self._mode = mode
        self._shared = shared
        self._ids = ids
        self._queue: list[OutgoingMessage] = []
        self._streaming = mode.answer is Answer.STREAM  # the kind is decided: an event stream
        self.answers_only = mode.answer is Answer.JSON

    # Its response.

    @property
    def attached(self) -> bool:
        """Whether it has an HTTP response."""
        return self._response is not None

    def attach(self, response: HttpResponse, cors: Fields, missed: bytes = b"", taken: int = 0) -> Callable[[], None]:
        """Send on this response from now on, beginning with the events that its client has missed (http-42).

        Call `flush` afterwards.  `taken` bytes were charged to the account for the missed events; the charge is
        released when they are written.  A previous response is dropped, because its client is the one that has
        reconnected.  Returns a function to call if the client disconnects before this response ends.
        """
        if self._response is not None:
            self._drop()
        self._charged += taken
        self._response, self._cors, self._begun, self._missed = response, cors, False, missed
        self._shared.attached.touch(self)
        self._present()
        return partial(self._response_lost, response)

    def _response_lost(self, response: HttpResponse | None, failure: Exception | None = None) -> None:
        """Detach: the client has disconnected before this response ended, or writing it has failed."""
        if self._response is None or self._response is not response:
            return
        self._detach_and_log()
        if failure is not None:
            _log.error("a response failed, and not because of its client", exc_info=failure)
            response.drop()

    def _detach_and_log(self) -> None:
        """Continue without a response: log the queued messages, and tell the owner."""
        retry = self._retry
        self._detach()
        queue, self._queue = self._queue, []
        if self._charged:
            self._refund()
        for message in queue:
            self._log_unsent(message)
        if self._ids:
            self._shared.detached.touch(self)
            self._absent = True
        if not self._log_failed:
            self.owner.detached(self, retry)
        self._log_pending()

    def _drop(self) -> None:
        response = self._response
        self._detach()
        if response is not None:
            response.drop()

    def _present(self) -> None:
        """It has a response again, or is over: no time limit runs for its client."""
        if self._absent:
            self._absent = False
            self._shared.detached.forget(self)

    def _detach(self) -> None:
        if self._response is not None:
            self._response = None
            self._missed, self._keep_alive_due, self._retry = b"", False, None
            self._shared.attached.forget(self)
            if self._written is not None:
                self._written.unpark_all()

    # Messages to send.

    def put(self, message: OutgoingMessage, size: int = 0) -> int:
        """Queue a message.  Returns its charge, `size`, if this stream will release it; else 0."""
        if self._response is not None:
            if not self.answers_only or isinstance(message, _ANSWERS):
                self._queue.append(message)
                self._charged += size
                return size
        elif self.owner is not _NO_OWNER:
            self._log_unsent(message)
        return 0

    def _refund(self) -> None:
        """Release the charge for messages that have left the queue, sent or dropped.  Call it if there is a charge."""
        left = sum(map(charged, self._queue)) + (len(self._missed) if len(self._missed) > LONG else 0)
        self.owner.server_session.account.give(self._charged - left)
        self._charged = left

    def _log_unsent(self, message: OutgoingMessage) -> None:
        """Log a message without sending it, so that a client that reconnects gets it."""
        try:
            if self.name is not None and not self._log_failed:
                self._encode_and_log([encode(message)])
                return
        except Exception:  # noqa: BLE001  # an author's log may raise any exception, and the sender is not to blame
            _log.exception("the event log of a session has failed, and one of its streams with it")
        if isinstance(message, Request):
            self.owner.server_session.undeliverable(message.id)

    def finish(self, *, retry: float | None = None) -> None:
        """End a stream without ids.  With `retry`, a client that can resume it is asked to reconnect after that."""
        self._finished = True
        if retry is None or not self.hang_up(retry):
            self.wake()

    def send_keep_alive(self) -> None:
        """Send a comment, so that no proxy closes the idle connection."""
        response = self._response
        if response is None or self.answers_only:
            return
        if (
            self._begun
            and self._writing is not response
            and not self._pending_writes()
            and response.send_now(KEEP_ALIVE)
        ):
            return
        self._keep_alive_due = True
        self.wake()

    @property
    def _done(self) -> bool:
        """Whether all its requests are answered or cancelled, or it is finished; its queue may still be full."""
        if not self._ids:
            return self._finished
        label_of = self.owner.server_session.session.label_of
        return self not in map(label_of, self._ids)

    # The methods of a `Wire`.

    def wake(self) -> None:
        response = self._response
        if response is None:
            self._log_pending()
        elif self._writing is not response and self._writer is not response and self._pending_writes():
            self._writer = response
            self._shared.nursery.start_soon(self._write_all, response, name="the writer of a response")

    async def flush(self, batch: bool = False) -> None:
        response = self._response
        if response is None:
            self._log_pending()
            await trio.lowlevel.checkpoint()
        elif self._writing is response or not await self._write(response):
            await trio.lowlevel.checkpoint()

    async def begin(self, on_disconnect: Callable[[], None]) -> Callable[[], None]:
        """Flush for the first time, and return `on_disconnect`, which `attach` has returned.

        Not a checkpoint if there is nothing to write yet, as for nearly every call.  The head of an event stream goes
        out early, but in the same write as messages that handlers send at once.  So each handler runs first: one tick
        for tasks in any order, and another because a new worker begins a tick later.
        """
        try:
            if self._streaming and self._ids:
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
            response = self._response
            if response is not None and (self._streaming or self.owner.server_session.session.queue or self._done):
                await self.flush()
        except BaseException:  # the caller does not get `on_disconnect`, so it is called here
            on_disconnect()
            raise
        return on_disconnect

    def _log_pending(self) -> None:
        """Log the new messages of a detached stream, and end the stream if these were the last."""
        self.owner.pull(self)
        if not self._over and (self._log_failed or self._done):
            self._end()

    @property
    def mark(self) -> int:
        response = self._response
        return 0 if response is None else self._writes + 1 + (self._writing is response)

    async def written(self, mark: int) -> None:
        while self._writes < mark and (response := self._response) is not None and self._pending_writes():
            if self._writing is response:
                await self._wait_for_write()
            else:
                await self._write(response)

    @property
    def waiting(self) -> int:
        """The number of messages that wait to be sent."""
        if self._over:
            return 0
        self.owner.pull(self)  # while a write is running, the owner does not wake this stream for new messages
        return len(self._queue)

    @property
    def full(self) -> bool:
        # A cheap test first: to count the messages for this stream, the owner must sort all its messages.
        limit = self._shared.limit
        if self._over or len(self._queue) + len(self.owner.server_session.session.queue) < limit:
            return False
        return self.waiting >= limit

    @property
    def crowded(self) -> bool:
        """Whether its queue is full.  For owners, which call `put`; does not pull, as `full` does."""
        return len(self._queue) >= self._shared.limit

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._response is not None and self._pending_writes() > self._shared.limit:
            self.wake()
            await self._wait_for_write()

    def hang_up(self, retry: float) -> bool:
        """End the response but not the stream, and ask the client to reconnect after `retry` s (http-47, http-49)."""
        if self._response is None or self.answers_only or not self._mode.primes:
            return False
        self._streaming = True
        self._retry = retry
        self.wake()
        return True

    def cut(self) -> None:
        """Drop the response at once.  The stream goes on as if its client had disconnected."""
        response = self._response
        if response is not None:
            self._detach_and_log()
            response.drop()

    def close(self) -> None:
        """The server has stopped."""
        self._drop()
        if not self._over:
            self._end()

    # Writing.

    def _pending_writes(self) -> int:
        """The number of messages to write; a change of the response's state counts as one."""
        messages = self.waiting
        if self._over:
            return 0
        return messages + (1 if self._keep_alive_due or self._retry is not None or self._done else 0)

    async def _write_all(self, response: HttpResponse) -> None:
        """Write until no message is left."""
        try:
            while self._response is response is not self._writing and self._pending_writes():
                if not await self._write(response):
                    return
        finally:
            if self._writer is response:
                self._writer = None

    async def _write(self, response: HttpResponse) -> bool:
        """Write the queued messages; False if there were none."""
        self._writing = response
        part: _ResponsePart | None = None
        try:
            part = self._take()
            if part is not None:
                await self._send(part, response)
            return part is not None
        except GONE:
            self._response_lost(response)
        except Exception as error:  # noqa: BLE001  # the handler whose task writes this is not to blame
            self._response_lost(response, error)
        finally:
            if self._writing is response:
                self._writing = None
            self._writes += 1
            if self._written is not None:
                self._written.unpark_all()
            if part is not None and part.more:
                self.wake()  # for messages queued meanwhile
        return True

    async def _wait_for_write(self) -> None:
        if self._written is None:
            self._written = trio.lowlevel.ParkingLot()
        await self._written.park()

    def _complete(self) -> bool:
        """Whether no message can follow those in the queue."""
        if not self._done:
            return False
        if self._ids and not (self._queue and isinstance(self._queue[-1], _ANSWERS)):
            self._queue.clear()  # cancel-18: no more messages for a cancelled request
        return True

    def _take(self) -> _ResponsePart | None:
        self.owner.pull(self)
        done = self._complete()
        if done and not self._begun and (reply := self._reply_part()) is not None:
            return reply
        if not (self._streaming or self._queue or self._keep_alive_due):
            return None
        return self._stream_part(done)

    def _stream_part(self, done: bool) -> _ResponsePart | None:
        self._streaming = True
        head = None if self._begun else (200, reply_headers(self._cors, stream=True, session=self.session_id))
        data = self._events(done)
        if head is None and not data and not done:
            return None
        if head is not None:
            self._begun = True
            self.owner.opened(self)
        return _ResponsePart(head, data, more=not done and self._retry is None, over=done)

    def _events(self, done: bool) -> bytes:
        """The next bytes of the event stream."""
        parts = [self._missed]
        texts = [encode(each) for each in self._queue]
        if not self._begun and self.name is None:  # else the stream is resumed
            parts.append(self._mode.opening)
            if self._mode.primes:
                texts.insert(0, b"")  # http-46: a priming event
        if texts:
            parts.append(self._encode_and_log(texts))
            self._queue.clear()
        if self._retry is not None and not (done and self._ids):  # else the answer is in this write already
            parts.append(self._encode_and_log([b""], self._retry))
        elif self._keep_alive_due and not any(parts):
            parts.append(KEEP_ALIVE)
        self._missed, self._keep_alive_due = b"", False
        return b"".join(parts)

    def _reply_part(self) -> _ResponsePart | None:
        """The answer as a plain JSON reply; None if it has to go on an event stream."""
        if not self._queue:
            # Every request was cancelled, so there must be no answer (cancel-03); clients understand 202 so.
            return None if self._streaming else _ResponsePart((202, self._cors), b"", more=False, over=True)
        message, *rest = self._queue
        status, revision = 200, self._mode.revision
        if isinstance(message, Error) and revision is not None:
            status = status_for(revision, message.code)
        if rest or (self._streaming and status == 200):
            return None
        self._queue.clear()
        fields = reply_headers(self._cors, stream=False, session=self.session_id)
        return _ResponsePart((status, fields), encode(message), more=False, over=True)

    def _encode_and_log(self, texts: Sequence[bytes], retry: float | None = None) -> bytes:
        """Encode these texts as events, and append them to the log, if there is one.  An empty text primes."""
        log = self._mode.log
        if log is None:
            return encode_messages(texts)
        try:
            if self.name is None:
                self.name = log.open()
            ids = log.append(self.name, texts)
            return encode_messages(texts, ids) if retry is None else priming_event(ids[0], round(retry * 1000))
        except Exception:
            self._log_failed = True  # the stream ends; to continue would lose these events silently
            raise

    async def _send(self, part: _ResponsePart, response: HttpResponse) -> None:
        try:
            if part.head is None:
                await response.send(part.data, more=part.more)
            else:
                await response.begin(*part.head, part.data, more=part.more)
        finally:
            if self._charged:
                self._refund()
        if response is not self._response:
            return
        if part.more:
            self._shared.attached.touch(self)
        elif part.over:
            self._end()
        else:
            self._detach_and_log()

    def _end(self) -> None:
        self._over = True
        self._detach()
        self._present()
        if self.name is not None and self._mode.log is not None:
            try:
                self._mode.log.finish(self.name)
            except Exception:  # noqa: BLE001  # as above
                _log.exception("the event log of a session has failed")
        owner = self.owner
        self._queue.clear()
        if self._charged:
            self._refund()
        if not self._log_failed:  # otherwise its requests go on, and `put` fails their questions by the owner
            self.owner = _NO_OWNER  # breaks the reference cycle
        owner.ended(self)


class OneStream(StreamOwner):
    """The owner of one stream, on which every message goes out."""

    stream: ResponseStream

    def pull(self, stream: ResponseStream) -> None:
        session = self.server_session.session
        while True:
            if session.queue:
                outgoing, unsent = session.outgoing(), session.take_charge()
                for message, _ in outgoing:
                    unsent -= stream.put(message, charged(message) if unsent else 0)
                if unsent:
                    self.server_session.account.give(unsent)
            held = self.server_session.held_reports or self.server_session.held_changes
            if held and not stream.crowded:
                self.server_session.release()
            if not session.queue:
                return


class SingleRequest(OneStream):
    """A request outside any session: its `ServerSession` ends with its response."""

    def __init__(
        self, run: Run, shared: EndpointStreams, verdict: Serve, requests: set[ServerSession], account: Account
    ) -> None:
        revision = verdict.revision
        self._modern = revision is not None and not revision.handshake
        self._requests = requests
        mode = ResponseMode(verdict.answer, revision)
        self.stream = ResponseStream(self, mode, shared, verdict.ids)
        link = LinkKind.EXCHANGE if self._modern else LinkKind.SESSION
        terms = None if self._modern or revision is None else Terms(revision)
        self.server_session = ServerSession(
            run, self.stream, account=account, link=link, terms=terms, changes=self._modern
        )
        requests.add(self.server_session)

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        if self._modern:
            self.server_session.connection_lost("the client has closed the response stream")  # cancel-14

    def client_absent(self, stream: ResponseStream) -> None:
        self.server_session.connection_lost("the client was absent for too long (Limits.session_idle_seconds)")

    def ended(self, stream: ResponseStream) -> None:
        self._requests.discard(self.server_session)
        if not self._modern:
            self.server_session.connection_lost("the response has ended")
