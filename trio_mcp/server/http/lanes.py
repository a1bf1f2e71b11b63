"""What goes back to a client over HTTP: the answer to one POST, or a stream of events.

A stream is one such way.  Where the client takes both kinds of answer it begins undecided.  Once it is a stream, comments
tell that it lives.  A stream in a session outlives its connection: what is sent is logged first, under an id that the
client will know it by, and when the client names the last id that it has seen, another response carries the stream on.

| | carried, undecided | carried, a stream | not carried, with ids | not carried, without |
|---|---|---|---|---|
| a message | becomes a stream | is logged and sent | is logged | is lost; a question fails |
| all is answered | one JSON reply; over | sent; over | logged; over | over |
| all was cancelled | 202; over | over | over | over |
| silence | becomes a stream; a comment | a comment | | |
| its client leaves | not carried | not carried; what waits is logged | | |
| to be hung up | becomes a stream, and is | an id and `retry`; not carried | no | no |
| it is resumed | | another response carries it | carried; what was missed is sent | |

Most streams have said all that they ever say before anything was written: one JSON reply, or a stream of one answer.
That is written by whoever has it, in one piece, and nothing is set up for it: an `Outbox`, with its turns and its
writer, there is from the moment on when there is something to share.

With an id its client can come back.  What may only be JSON stays undecided until all is answered, and drops whatever
else there is.  A stream that answers no request is over when it is told so.  Every message goes out on exactly one stream
(http-39).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import attrs
import trio

from trio_mcp.core.http.event_log import EventLog
from trio_mcp.core.http.fields import Fields, reply_headers
from trio_mcp.core.http.sse import KEEP_ALIVE, encode_messages, priming_event
from trio_mcp.core.http.verdicts import Answer, status_for
from trio_mcp.core.jsonrpc import Batch, Error, Id, Notification, Request, Response, encode
from trio_mcp.core.peer import charged
from trio_mcp.core.revisions import Revision
from trio_mcp.core.shares import LONG
from trio_mcp.server.http.silence import IdleOrder
from trio_mcp.transport.outbox import GONE, Outbox

if TYPE_CHECKING:
    from trio_mcp.server.conversation import ServerSession

__all__ = ["EndpointStreams", "HttpResponse", "ResponseMode", "ResponseStream", "Spoken", "StreamOwner"]

_log = logging.getLogger("trio_mcp")

Spoken: TypeAlias = Request | Notification | Response | Error | Batch
_ANSWERS = (Response, Error, Batch)


class HttpResponse(Protocol):
    """One HTTP response, as the server that has its connection sends it.

    Content-Length, chunks and the like are that server's business.  `begin` and `send` raise `BrokenResourceError` when
    the client has gone.  They are never called at the same time, and not at all after one with ``more=False``.  No
    cancellation cuts them short, but for the end of everything.
    """

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        """Send the head and the first of the body in one write; the whole reply, unless there will be `more`."""

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send more of the body; the last of it, unless there will be `more`."""

    def drop(self) -> None:
        """Give the connection up: nothing more will be sent, and the response does not end properly."""


class StreamOwner:
    """Whose stream it is: who says what goes out on it, and hears what becomes of it."""

    conversation: ServerSession

    def pull(self, stream: ResponseStream) -> None:
        """Put what there is to be said into the streams that it belongs to, and wake them, but not this one."""

    def opened(self, stream: ResponseStream) -> None:
        """Its response is a stream now."""

    def detached(self, stream: ResponseStream, retry: float | None = None) -> None:
        """No response carries it any more, and it is not over; its client was asked to come back after `retry`."""

    def ended(self, stream: ResponseStream) -> None:
        """It is over."""


_NO_OWNER = StreamOwner()


@attrs.frozen(eq=False, repr=False)
class EndpointStreams:
    """What the streams of one endpoint share."""

    nursery: trio.Nursery
    """Where they are written."""
    limit: int
    """Of the messages that wait for one of them."""
    attached: IdleOrder[ResponseStream]
    """Those that a response carries, by how long nothing was sent on them."""


class ResponseMode(NamedTuple):
    """How a stream answers: what the verdict on its request said, and what its session adds."""

    answer: Answer
    revision: Revision | None = None
    """None: it is not agreed yet."""
    log: EventLog | None = None
    """None: the stream cannot be resumed, and its events have no ids (http-115)."""
    opening: bytes = b""
    """What a stream begins with: the endpoint event of HTTP+SSE."""

    @property
    def primes(self) -> bool:
        rules = None if self.log is None or self.revision is None else self.revision.http
        return rules is not None and rules.priming


class _ResponsePart(NamedTuple):
    """What one write carries."""

    head: tuple[int, Fields] | None
    """What the response begins with, if this is its first write."""
    data: bytes
    more: bool
    """The response goes on."""
    over: bool
    """The stream does not."""


class ResponseStream:
    """See the head of this file; a `Wire` for the conversation of its owner.

    It answers the requests with these `ids`, and is over when they have been answered.  Without any it stands alone,
    until `finish`.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_charged",
        "_cors",
        "_finished",
        "_ids",
        "_keep_alive_due",
        "_log_failed",
        "_missed",
        "_mode",
        "_outbox",
        "_over",
        "_owner",
        "_queue",
        "_response",
        "_retry",
        "_shared",
        "_single_write",
        "_streaming",
        "answers_only",
        "name",
        "session_id",
    )  # fmt: skip

    def __init__(
        self, owner: StreamOwner, mode: ResponseMode, shared: EndpointStreams, ids: Collection[Id] = ()
    ) -> None:
        self.name: str | None = None
        """Under which the log knows it, once its client has an id to come back with."""
        self.session_id: str | None = None
        """Of the session that `initialize` opened: its answer brings it to the client."""
        self.answers_only = mode.answer is Answer.JSON
        self._owner = owner
        self._mode = mode
        self._shared = shared
        self._ids = ids
        self._queue: list[Spoken] = []
        self._charged = 0  # bytes in the account of its conversation, of what is in the queue or being written
        self._streaming = mode.answer is Answer.STREAM
        self._finished = False
        self._log_failed = False  # the log has failed
        self._over = False
        # The response at hand.
        self._response: HttpResponse | None = None
        self._outbox: Outbox[_ResponsePart] | None = None  # once it is needed
        self._single_write = False  # the one reply is on its way
        self._cors: Fields = ()
        self._begun = False
        self._missed = b""  # what the client of a resumed stream has not seen
        self._keep_alive_due = False  # for so long that a sign of life is due
        self._retry: float | None = None  # seconds after which the client is asked to come back

    # Who carries it.

    @property
    def attached(self) -> bool:
        """Whether there is a response at hand."""
        return self._response is not None

    def attach(self, response: HttpResponse, cors: Fields, missed: bytes = b"", taken: int = 0) -> Callable[[], None]:
        """Send by this response from now on; first what its client has missed (http-42).  `flush` is to follow.

        For that so many bytes were `taken` from the account, which are given back when it is written.  A response that
        carried the stream before is dropped: its client is the one that has come back.  Returns what is to be called when
        the client leaves this response before it ends.
        """
        if self._response is not None:
            self._drop()
        self._charged += taken
        self._response, self._cors, self._begun, self._missed = response, cors, False, missed
        self._shared.attached.touch(self)
        return partial(self._response_lost, response)

    def _open_outbox(self) -> Outbox[_ResponsePart]:
        """Of those who write, by the response at hand."""
        if self._outbox is None:
            limit, nursery = self._shared.limit, self._shared.nursery
            gone = partial(self._response_lost, self._response)
            self._outbox = Outbox(self._send, self._take, self._waiting, limit, gone, spawn=nursery)
        return self._outbox

    def _response_lost(self, response: HttpResponse | None, failure: Exception | None = None) -> None:
        """Its client has left this response before it ended, or it has failed."""
        if self._response is None or self._response is not response:
            return
        if failure is None and self._outbox is not None:
            failure = self._outbox.failure
        self._lose_response()
        if failure is not None:
            _log.error("a response broke off, which is no fault of its client", exc_info=failure)
            response.drop()

    def _lose_response(self) -> None:
        """Go on without a response."""
        retry = self._retry
        self._detach()
        queue, self._queue = self._queue, []
        self._refund()
        for message in queue:
            self._log_unsent(message)
        if not self._log_failed:
            self._owner.detached(self, retry)
        self._log_pending()

    def _drop(self) -> None:
        response = self._response
        self._detach()
        if response is not None:
            response.drop()

    def _detach(self) -> None:
        if self._response is None:
            return
        outbox = self._outbox
        self._response = self._outbox = None
        self._missed, self._keep_alive_due, self._retry, self._single_write = b"", False, None, False
        self._shared.attached.forget(self)
        if outbox is not None:
            outbox.close()

    # What is to be sent.

    def put(self, message: Spoken) -> int:
        """Send it, in its turn.  Returns the bytes that it is charged for, if this is to give them back later."""
        if self._response is not None:
            if not self.answers_only or isinstance(message, _ANSWERS):
                self._queue.append(message)
                size = charged(message)
                self._charged += size
                return size
        elif self._owner is not _NO_OWNER:
            self._log_unsent(message)
        return 0

    def _refund(self) -> None:
        """Give back what is charged for all that is not in the queue any more: it has gone, or never will."""
        if self._charged:
            left = sum(map(charged, self._queue)) + (len(self._missed) if len(self._missed) > LONG else 0)
            self._owner.conversation.account.give(self._charged - left)
            self._charged = left

    def _log_unsent(self, message: Spoken) -> None:
        """Nothing carries it: it is logged for a client that can come back."""
        try:
            if self.name is not None and not self._log_failed:
                self._logged([encode(message)])
                return
        except Exception:  # noqa: BLE001  # an author's log may raise anything, and whoever speaks is not to blame
            _log.exception("the event log of a session has failed, and one of its streams with it")
        if isinstance(message, Request):
            self._owner.conversation.undeliverable(message.id)

    def finish(self, *, retry: float | None = None) -> None:
        """Nothing more is to come: end what stands alone.  Who might come back is asked to, after `retry` seconds."""
        self._finished = True
        if retry is None or not self.hang_up(retry):
            self.wake()

    def send_keep_alive(self) -> None:
        """It has been silent for so long that something between us and the client might think it dead."""
        if not self.answers_only:
            self._keep_alive_due = True
            self.wake()

    @property
    def _done(self) -> bool:
        """Whether all that it is to say has been said, or never will be."""
        if not self._ids:
            return self._finished
        label_of = self._owner.conversation.session.label_of
        return self not in map(label_of, self._ids)

    # The wire of a conversation.

    def wake(self) -> None:
        if self._response is None:
            self._log_pending()
        elif self._outbox is not None:
            self._outbox.wake()
        elif not self._single_write and self._waiting():
            self._open_outbox().wake()

    async def flush(self) -> None:
        if self._response is None:
            self._log_pending()
            await trio.lowlevel.checkpoint()
        elif self._outbox is not None:
            await self._outbox.flush()
        elif self._single_write:
            await trio.lowlevel.checkpoint()
        elif (whole := self._take_complete()) is not None:
            await self._send_complete(whole, self._response)
        else:
            await self._open_outbox().flush()

    async def begin(self) -> None:
        """The first `flush`; no checkpoint where nothing can be said yet, which is so for nearly every call.

        The head of a stream is early, but not so early that it would go out apart from what is said at once: every
        handler has had a turn before, in whatever order tasks run, also in a new worker, which begins a turn later.
        """
        if self._streaming and self._ids:
            for _ in range(3):
                await trio.lowlevel.checkpoint()
        if self._response is not None and (self._streaming or self._owner.conversation.session.queued or self._done):
            await self.flush()

    def _log_pending(self) -> None:
        """Nothing carries it: what there is is logged, and maybe that was all."""
        self._owner.pull(self)
        if not self._over and (self._log_failed or self._done):
            self._end()

    @property
    def mark(self) -> int:
        if self._outbox is not None:
            return self._outbox.mark
        return 0 if self._response is None or self._single_write else self._open_outbox().mark

    async def written(self, mark: int) -> None:
        if self._outbox is not None:
            await self._outbox.written(mark)

    @property
    def waiting(self) -> int:
        """How many messages wait to be sent."""
        if self._over:
            return 0
        self._owner.pull(self)  # while somebody writes, nobody is woken to do so
        return len(self._queue)

    @property
    def full(self) -> bool:
        # Whether there is enough for that is seen at once; what of it is for this stream, only in looking at all.
        most = self._shared.limit
        if self._over or len(self._queue) + self._owner.conversation.session.queued < most:
            return False
        return self.waiting >= most

    @property
    def crowded(self) -> bool:
        """As `full`, for who puts into it."""
        return len(self._queue) >= self._shared.limit

    async def room(self) -> None:
        if self._outbox is not None:
            await self._outbox.room()
        else:
            await trio.lowlevel.checkpoint()

    def hang_up(self, retry: float) -> bool:
        """End the response, and not the stream: the client is to come back after `retry` seconds (http-47, http-49)."""
        if self._response is None or self.answers_only or not self._mode.primes:
            return False
        self._streaming = True
        self._retry = retry
        self.wake()
        return True

    def cut(self) -> None:
        """End the response at once, whoever reads it; what that means to the stream is as if its client had left."""
        response = self._response
        if response is not None:
            self._lose_response()
            response.drop()

    def close(self) -> None:
        """The server has stopped."""
        self._drop()
        if not self._over:
            self._end()

    # Writing.

    def _waiting(self) -> int:
        """How much there is to be written; what only changes the state of the response counts as one."""
        messages = self.waiting
        if self._over:
            return 0
        return messages + (1 if self._keep_alive_due or self._retry is not None or self._done else 0)

    def _take_complete(self) -> _ResponsePart | None:
        """All that there ever is to be written, if it is there and nothing of it has been."""
        self._owner.pull(self)
        if self._begun or not self._complete():
            return None
        return self._reply_part() or self._stream_part(done=True)

    def _complete(self) -> bool:
        if not self._done:
            return False
        if self._ids and not (self._queue and isinstance(self._queue[-1], _ANSWERS)):
            self._queue.clear()  # cancel-18: nothing more for what was cancelled
        return True

    def _take(self) -> _ResponsePart | None:
        self._owner.pull(self)
        done = self._complete()
        if done and not self._begun and (reply := self._reply_part()) is not None:
            return reply
        if not (self._streaming or self._queue or self._keep_alive_due):
            return None
        return self._stream_part(done)

    def _stream_part(self, done: bool) -> _ResponsePart | None:
        self._streaming = True
        head = None if self._begun else (200, self._fields(stream=True))
        data = self._events(done)
        if head is None and not data and not done:
            return None
        if head is not None:
            self._begun = True
            self._owner.opened(self)
        return _ResponsePart(head, data, more=not done and self._retry is None, over=done)

    def _events(self, done: bool) -> bytes:
        """What there is to be sent on a stream."""
        parts = [self._missed]
        texts = [encode(each) for each in self._queue]
        if not self._begun and self.name is None:  # else it is carried on
            parts.append(self._mode.opening)
            if self._mode.primes:
                texts.insert(0, b"")  # http-46: a priming event
        if texts:
            parts.append(self._logged(texts))
            self._queue.clear()
        if self._retry is not None and not (done and self._ids):  # else the answer is there already
            parts.append(self._logged([b""], self._retry))
        elif self._keep_alive_due and not any(parts):
            parts.append(KEEP_ALIVE)
        self._missed, self._keep_alive_due = b"", False
        return b"".join(parts)

    def _reply_part(self) -> _ResponsePart | None:
        """The answer as a reply of its own, if that is what it is to be: nothing precedes it."""
        if not self._queue:
            # Every request was cancelled, so nothing may be said (cancel-03): clients read 202 as just that.
            return None if self._streaming else _ResponsePart((202, self._cors), b"", more=False, over=True)
        message, *rest = self._queue
        status, revision = 200, self._mode.revision
        if isinstance(message, Error) and revision is not None:
            status = status_for(revision, message.code)
        if rest or (self._streaming and status == 200):
            return None
        self._queue.clear()
        return _ResponsePart((status, self._fields(stream=False)), encode(message), more=False, over=True)

    def _fields(self, *, stream: bool) -> Fields:
        return reply_headers(self._cors, stream=stream, session=self.session_id)

    def _logged(self, texts: Sequence[bytes], retry: float | None = None) -> bytes:
        """Events with these texts, of which a priming one is empty, which are in the log now, if there is one."""
        log = self._mode.log
        if log is None:
            return encode_messages(texts)
        try:
            if self.name is None:
                self.name = log.open()
            ids = log.append(self.name, texts)
            return encode_messages(texts, ids) if retry is None else priming_event(ids[0], round(retry * 1000))
        except Exception:
            self._log_failed = True  # to go on without these events would be to lose them unseen
            raise

    async def _send_complete(self, reply: _ResponsePart, response: HttpResponse) -> None:
        """As an outbox would, where there is nothing else to be written."""
        self._single_write = True
        try:
            await self._send(reply)
        except GONE:
            self._response_lost(response)
        except Exception as error:  # noqa: BLE001  # it is no fault of the handler that writes here
            self._response_lost(response, error)

    async def _send(self, part: _ResponsePart) -> None:
        response = self._response
        assert response is not None  # or nothing would have been taken
        try:
            if part.head is None:
                await response.send(part.data, more=part.more)
            else:
                await response.begin(*part.head, part.data, more=part.more)
        finally:
            self._refund()
        if response is not self._response:
            return
        if part.more:
            self._shared.attached.touch(self)
        elif part.over:
            self._end()
        else:
            self._lose_response()

    def _end(self) -> None:
        self._over = True
        self._detach()
        if self.name is not None and self._mode.log is not None:
            try:
                self._mode.log.finish(self.name)
            except Exception:  # noqa: BLE001  # as above
                _log.exception("the event log of a session has failed")
        owner = self._owner
        self._queue.clear()
        self._refund()
        if not self._log_failed:
            self._owner = _NO_OWNER  # or each would keep the other alive
        owner.ended(self)
