"""What goes back to a client over HTTP: the answer to one POST, or a stream of events.

A lane is one such way.  It begins undecided, if the client takes both kinds of answer: it is JSON if nothing precedes
the answer, and becomes an event stream as soon as something does, or when the answer takes so long that a proxy would
take the silence for death.  Once it is a stream, comments tell that it lives.

A stream in a session outlives its connection.  What is sent is logged first, under an id that the client will know it
by; when the client names the last one that it has seen, another response carries the lane on.  While none does, it only
logs.  What was no stream yet when its connection broke is lost, for the client has no id to name.

Every message goes out on exactly one lane (http-39).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeAlias

import attrs
import trio

from trio_mcp.core.headers import Fields, reply_headers
from trio_mcp.core.http import Answer, status_for
from trio_mcp.core.jsonrpc import Batch, Error, Id, Notification, Request, Result, encode
from trio_mcp.core.replay import EventLog, Replay
from trio_mcp.core.revisions import Revision
from trio_mcp.core.session import ServerSession
from trio_mcp.core.sse import KEEP_ALIVE, encode_message, priming_event
from trio_mcp.outbox import Outbox
from trio_mcp.silence import Silence

__all__ = ["Lane", "Response", "Spoken", "Way"]

_log = logging.getLogger("trio_mcp")

Spoken: TypeAlias = Request | Notification | Result | Error | Batch
_ANSWERS = (Result, Error, Batch)


class Response(Protocol):
    """One HTTP response, as the server that has its connection sends it.

    Content-Length, chunks and the like are that server's business.  `begin` and `send` raise `BrokenResourceError` when
    the client has gone.  They are never called at the same time, and not at all after one with ``more=False``.
    """

    async def begin(self, status: int, fields: Fields, body: bytes, *, more: bool) -> None:
        """Send the head and the first of the body in one write; the whole reply, unless there will be `more`."""

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send more of the body; the last of it, unless there will be `more`."""

    def drop(self) -> None:
        """Give the connection up: nothing more will be sent, and the response does not end properly."""


@attrs.frozen(eq=False, repr=False)
class Way:
    """How a lane answers: what the verdict on its request said, and what its session adds."""

    answer: Answer
    revision: Revision | None = None  # None: initialize is to agree one
    log: EventLog | None = None  # None: the stream cannot be resumed, and its events have no ids (http-115)
    opening: bytes = b""  # what a stream begins with: the endpoint event of HTTP+SSE

    @property
    def primes(self) -> bool:
        return self.revision is not None and self.revision.http is not None and self.revision.http.priming


@attrs.frozen(eq=False, repr=False)
class _Part:
    """What one write carries.  `head`: what the response begins with, if this is its first write."""

    head: tuple[int, Fields] | None
    data: bytes
    more: bool


class Lane:
    """See the head of this file; a `Wire` for the conversation.

    It says what `attend` tells it to.  `ended` is called when nothing more will be sent, `left` when no response
    carries it any more.  Whoever has been silent for so long that a sign of life is due is found in `signs`.
    """

    def __init__(
        self,
        way: Way,
        *,
        limit: int,
        nursery: trio.Nursery,
        signs: Silence[Lane],
        ended: Callable[[Lane], object],
        left: Callable[[Lane], object],
    ) -> None:
        self.name: str | None = None
        """Under which the log knows it, once it is a stream that can be resumed."""
        self.session_id: str | None = None
        """Of the session that `initialize` opened: its answer brings it to the client."""
        self._way = way
        self._limit = limit
        self._nursery = nursery
        self._signs = signs
        self._ended = ended
        self._left = left
        self._queue: deque[Spoken] = deque()
        self._missed = b""  # what the client of a resumed stream has not seen
        self._streams = way.answer is Answer.STREAM
        self._silent = False  # for so long that a sign of life is due
        self._finished = False
        self._retry: float | None = None  # seconds after which the client is asked to come back
        self._over = False
        # The response at hand.
        self._response: Response | None = None
        self._outbox: Outbox[_Part] | None = None
        self._cors: Fields = ()
        self._begun = False

    def attend(self, session: ServerSession, pull: Callable[[Lane], None], ids: Collection[Id] = ()) -> None:
        """Say what the session has to say here.

        `pull` moves that from the session into the lanes that it belongs to.  `ids` are the requests that this one
        answers: it ends when they have been.  Without any it stands alone, and ends by `finish`.
        """
        self._session = session
        self._pull = pull
        self._ids = ids

    # Who carries it.

    @property
    def carried(self) -> bool:
        """Whether there is a response at hand."""
        return self._response is not None

    def carry(self, response: Response, cors: Fields, replay: Replay | None = None) -> Callable[[], None]:
        """Send by this response from now on; first what its client has missed (http-42).

        A response that carried the lane before is dropped: its client is the one that has come back.  Returns what is
        to be called when the client leaves this response before it ends.
        """
        if self._response is not None:
            self._response.drop()
            self._let_go()
        if replay is not None:
            self._missed = b"".join(encode_message(event.data, event.id) for event in replay.events)
        gone = partial(self._gone, response)
        send, take = partial(self._send, response), partial(self._take, response)
        self._response, self._cors, self._begun = response, cors, False
        self._outbox = Outbox(send, take, self._waiting, self._limit, gone, spawn=self._nursery)
        self._signs.hear(self)
        return gone

    def _gone(self, response: Response) -> None:
        """The client has left its response before it ended."""
        if self._response is not response:
            return
        if self._outbox is not None and self._outbox.failure is not None:
            _log.error("a response broke off, which is no fault of its client", exc_info=self._outbox.failure)
            response.drop()
        self._let_go()
        if self.name is not None:
            for message in self._queue:
                self._event(message)
        self._queue.clear()
        self._left(self)
        self._look()

    def _let_go(self) -> None:
        self._response, outbox, self._outbox = None, self._outbox, None
        self._missed, self._retry = b"", None
        self._signs.forget(self)
        if outbox is not None:
            outbox.close()

    # What is to be sent.

    def put(self, message: Spoken) -> None:
        if self._over:
            return
        if self._response is not None:
            if isinstance(message, _ANSWERS) or not self.answers_only:
                self._queue.append(message)
        elif self.name is not None:
            self._event(message)

    def finish(self, *, retry: float | None = None) -> None:
        """Nothing more is to come: end what stands alone.  Who might come back is asked to after `retry` seconds."""
        self._finished = True
        self.hang_up(retry)
        self.wake()

    def hang_up(self, retry: float | None) -> bool:
        """End the response, not the lane: the client is to come back after `retry` seconds (http-47, http-49).

        False where it would not, because its revision has no such thing, or could not, because its stream has no ids.
        """
        if retry is None or not self._way.primes or self._way.log is None or self._response is None:
            return False
        if self._way.answer is Answer.JSON:
            return False
        self._streams = True
        self._retry = retry
        self.wake()
        return True

    def show_life(self) -> None:
        """It has been silent for so long that something between us and the client might think it dead."""
        if self._way.answer is not Answer.JSON:
            self._silent = True
            self.wake()

    @property
    def _done(self) -> bool:
        """Whether all that it is to say has been said, or never will be."""
        if not self._ids:
            return self._finished
        label_of = self._session.label_of
        return not any(label_of(id) is self for id in self._ids)

    # The wire of a conversation.

    def wake(self) -> None:
        if self._outbox is not None:
            self._outbox.wake()
        else:
            self._look()

    async def flush(self) -> None:
        if self._outbox is not None:
            await self._outbox.flush()
        else:
            await trio.lowlevel.checkpoint()
            self._look()

    def _look(self) -> None:
        """Nobody carries it: what there is is logged, and maybe that was the last."""
        self._pull(self)
        if self._done and not self._over:
            self._end()

    @property
    def mark(self) -> int:
        return 0 if self._outbox is None else self._outbox.mark

    async def written(self, mark: int) -> None:
        if self._outbox is not None:
            await self._outbox.written(mark)

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._limit

    async def room(self) -> None:
        if self._outbox is not None:
            await self._outbox.room()
        else:
            await trio.lowlevel.checkpoint()

    @property
    def answers_only(self) -> bool:
        """Whether nothing but the answer can be sent: it is JSON, or went with a client that cannot come back."""
        return self._way.answer is Answer.JSON or (self._response is None and self.name is None)

    def close(self) -> None:
        """The server has stopped."""
        if self._response is not None:
            self._response.drop()
            self._let_go()
        if not self._over:
            self._end()

    # Writing.

    def _waiting(self) -> int:
        """How much there is to be sent; what only changes the state of the response counts as one."""
        self._pull(self)
        due = self._done or self._silent or self._retry is not None or (self._streams and not self._begun)
        return len(self._queue) + bool(due or self._missed)

    def _take(self, response: Response) -> _Part | None:
        if response is not self._response:
            return None  # another carries it meanwhile
        self._pull(self)
        done = self._done
        if done and not any(isinstance(message, _ANSWERS) for message in self._queue):
            self._queue.clear()  # cancel-18: nothing more for what was cancelled
        if done and not self._begun and self.name is None and (reply := self._reply()) is not None:
            return reply
        if not (self._streams or self._queue or self._silent):
            return None
        self._streams = True
        head = None if self._begun else (200, self._fields(stream=True))
        data = self._events(opens=head is not None, over=done)
        if head is None and not data and not done:
            return None
        self._begun = True
        return _Part(head, data, more=not done and self._retry is None)

    def _events(self, *, opens: bool, over: bool) -> bytes:
        """What there is to be sent on a stream."""
        data = self._opening() if opens else b""
        data += self._missed + b"".join(map(self._event, self._queue))
        self._missed = b""
        self._queue.clear()
        if self._retry is not None and self.name is not None:
            data += self._priming(self._retry)
        elif self._silent and not data and not over:
            data = KEEP_ALIVE
        self._silent = False
        return data

    def _opening(self) -> bytes:
        """What a stream begins with."""
        if self.name is not None:
            return b""  # it is carried on
        if self._way.log is None:
            return self._way.opening
        self.name = self._way.log.open()
        return self._priming() if self._way.primes else b""  # http-46

    def _reply(self) -> _Part | None:
        """The answer as a reply of its own, if that is what it is to be: nothing precedes it."""
        status = 200
        if not self._queue:
            if self._streams:
                return None
            # Every request was cancelled, so nothing may be said (cancel-03): clients read 202 as just that.
            return _Part((202, self._cors), b"", more=False)
        if len(self._queue) > 1:
            return None
        (message,) = self._queue
        if isinstance(message, Error) and self._way.revision is not None:
            status = status_for(self._way.revision, message.code)
        if self._streams and status == 200:
            return None
        self._queue.clear()
        return _Part((status, self._fields(stream=False)), self._encoded(message), more=False)

    def _fields(self, *, stream: bool) -> Fields:
        return reply_headers(self._cors, stream=stream, session=self.session_id)

    def _priming(self, retry: float | None = None) -> bytes:
        assert self._way.log is not None
        assert self.name is not None
        return priming_event(self._way.log.append(self.name, b""), None if retry is None else round(retry * 1000))

    def _event(self, message: Spoken) -> bytes:
        text = self._encoded(message)
        if self.name is None or self._way.log is None:
            return encode_message(text)
        return encode_message(text, self._way.log.append(self.name, text))

    def _encoded(self, message: Spoken) -> bytes:
        return encode(message, null_id=self._session.unreadable_id_is_null)

    async def _send(self, response: Response, part: _Part) -> None:
        if part.head is None:
            await response.send(part.data, more=part.more)
        else:
            await response.begin(*part.head, part.data, more=part.more)
        if response is not self._response:
            return
        if part.more:
            self._signs.hear(self)
        elif self._done:
            self._end()
        else:  # it was hung up
            self._let_go()
            self._left(self)

    def _end(self) -> None:
        self._over = True
        if self._response is not None:
            self._let_go()
        if self.name is not None and self._way.log is not None:
            self._way.log.finish(self.name)
        self._ended(self)
