"""Sessions over HTTP+SSE (2024-11-05): messages are sent by POST, and received on one stream."""

from __future__ import annotations

import math

import trio

from trio_mcp.client.errors import NoResponse, SessionLost, Unauthorized
from trio_mcp.client.http import CLOSED_HERE, HttpLink
from trio_mcp.client.http_sender import ENDPOINT
from trio_mcp.core.errors import McpError, RemoteProtocolError, SessionClosed
from trio_mcp.core.http import client_rules as rules
from trio_mcp.core.http.sse import EventReader, Oversized
from trio_mcp.core.messages import Id
from trio_mcp.core.revisions import LEGACY
from trio_mcp.transport.http_pool import HttpReply

__all__ = ["SseLink"]


class SseLink(HttpLink):
    """A session over HTTP+SSE (2024-11-05): messages are sent by POST and received on one stream.

    Its session is one of `LinkKind.DUPLEX`: when the stream ends, all requests are lost, and they may have run.
    """

    _sse = True

    def send_request(self, id: Id) -> None:
        self.wake()  # the reply to a POST has no answer

    def request_done(self, id: Id) -> None:
        """Do nothing: the reply to the POST may still come, so that its connection can be used again."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the session until its stream ends; it is started when the server has sent the URL for POSTs.

        Before that it raises `Unauthorized`, `NoResponse`, `RemoteProtocolError`, and the errors of the pool.
        """
        verdict: rules.ReplyVerdict | None = None
        cause: McpError | None = None
        with self._running() as scope:
            try:
                get = rules.Exchange(self._url, LEGACY[0], method="GET", sse=True)
                verdict, get, reply = await self._sender.send(get, opening=scope)
                if isinstance(verdict, rules.Streaming):
                    async with reply:
                        await self._read_session(get.url, reply, scope, task_status)
            except McpError as error:
                if self._target is None:
                    raise
                cause = error
        if self._target is None:
            if self._closed:
                raise SessionClosed(CLOSED_HERE)
            if scope.cancelled_caught:
                raise RemoteProtocolError(f"no endpoint event came within {ENDPOINT:g} seconds")
            match verdict:
                case rules.Streaming():
                    raise RemoteProtocolError("the event stream ended before its endpoint event")
                case rules.Challenged(status, challenge, why):
                    raise Unauthorized(f"the event stream was refused: {why}", status, challenge)
            assert verdict is not None  # otherwise the request raised an error
            lost = verdict.status if isinstance(verdict, rules.ReplyLost) else None
            raise NoResponse(f"there is no event stream at this URL: {rules.reason(verdict)}", status=lost)
        how = "the server ended the event stream of the session"
        ended = SessionClosed(how if cause is None else f"the event stream of the session broke: {cause}")
        if self.session.terms is not None:
            ended = SessionLost(True, str(ended))  # a new session can be opened
        ended.__cause__ = cause
        self._close(ended)

    async def _read_session(
        self, url: str, reply: HttpReply, scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> None:
        reader, keep_alives = EventReader(self._limits.message_bytes), rules.KeepAlives()
        while (events := await self._receive_events(reply, reader, keep_alives)) is not None:
            for event in events:
                if self._target is None:
                    target = rules.read_endpoint(url, event)
                    if isinstance(target, rules.ReplyLost):
                        raise RemoteProtocolError(target.why)
                    self._target = target
                    scope.deadline = math.inf
                    task_status.started()
                    self.wake()
                elif isinstance(event, Oversized):
                    # It is unknown whose answer it was, and its caller would wait forever.
                    why = f"an event was longer than {event.limit} bytes (Limits.message_bytes)"
                    raise RemoteProtocolError(why)
                elif event.event == "message" and event.data:
                    self._deliver(self._decode(event), None)
