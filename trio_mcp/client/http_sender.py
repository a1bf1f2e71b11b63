"""Sending the HTTP requests of a session, each with its headers, until there is a verdict on its response.

`core.http.client_rules` decides the meaning of a response.  This file acts on the verdicts that need another request;
all others are returned:

| Verdict | Action |
|---|---|
| RetryAfter | the message is sent again, if the pause is at most `MAX_RETRY_AFTER` |
| Redirected | the message is sent to the new URL, up to five times in a row |
| Challenged | with the option `auth`, the message is sent again with a better token |

An answer is repeated for a minute if it does not arrive, because the server and a caller here both wait for it; then
the session is lost.  The same holds for ``notifications/initialized``, without which the server sends nothing on its
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from trio_mcp.client.errors import NoResponse, SessionLost, Unauthorized
from trio_mcp.core.errors import ConnectionFailed, UsageError
from trio_mcp.core.http import client_rules as rules
from trio_mcp.core.http.fields import (
    EVENT_STREAM,
    LAST_EVENT_ID,
    METHOD,
    NAME,
    PARAM_PREFIX,
    PROTOCOL_VERSION,
    SESSION_ID,
    Fields,
    Mirror,
    without_credentials,
)
from trio_mcp.core.messages import (
    Batch,
    Error,
    InvalidMessage,
    Limits,
    Message,
    Notification,
    Request,
    Response,
    encode,
)
from trio_mcp.core.oauth.errors import AuthorizationFailed, is_final
from trio_mcp.transport.http_pool import HttpPool, HttpReply, ReplyBroken

if TYPE_CHECKING:
    from trio_mcp.oauth.client import Credentials, TokenSource

__all__ = [
    "ACKNOWLEDGE_TIMEOUT", "ENDPOINT", "INITIALIZED", "MAX_RETRY_AFTER", "HttpSender", "drain", "is_initialized",
    "title_of",
]  # fmt: skip

MAX_RETRY_AFTER = 60.0
"""The longest Retry-After in seconds that is waited for.  If it is longer, the request fails at once, and the error has
the time."""

ACKNOWLEDGE_TIMEOUT = 30.0
"""Seconds that a server may take to accept a notification or an answer, or to say when to retry: no caller's scope
limits this, and calls may wait for it."""

ENDPOINT = 10.0
"""Seconds for the first event of an HTTP+SSE stream: another kind of stream may never send one."""

INITIALIZED = "notifications/initialized"

_MAX_REDIRECTS = 5  # redirects in a row: a moved URL has one or two, a loop has no end
_DRAIN_SECONDS = 1.0  # seconds to read the rest of a complete reply, so that its connection can be used again
# Seconds between attempts to send an answer: a server that restarts has a minute.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
# Attempts to send `notifications/initialized` if the server breaks the connection or does not reply.  They share the
# time for a reply, because the calls of the session wait for it, and one connection may be dead.
_INITIALIZED_ATTEMPTS = 4
# The server, or a proxy before it, may accept the message later; after 408 it has waited too long for the whole of it.
_BUSY = frozenset({408, 429, 502, 503, 504})

# Methods that may be sent a second time if the server closed the connection meanwhile: they change nothing, or have the
# same effect twice.  A tool may do anything.
_REPEATABLE = frozenset(
    {
        *("initialize", "server/discover", "ping", "tools/list", "prompts/list", "prompts/get", "completion/complete"),
        *("resources/list", "resources/templates/list", "resources/read", "resources/subscribe"),
        *("resources/unsubscribe", "logging/setLevel", "subscriptions/listen"),
    }
)
_RESERVED = frozenset(
    each.lower() for each in ("Accept", "Content-Type", SESSION_ID, PROTOCOL_VERSION, METHOD, NAME, LAST_EVENT_ID)
)


class HttpSender:
    """Sends the HTTP requests of one session.

    `headers` returns the headers of the program for each request, and raises only `McpError`.  `mirrors` returns the
    arguments of a tool that are sent in headers, too.  `make_room` is called when the server is busy: it ends a
    connection that can be spared.
    """

    def __init__(
        self,
        pool: HttpPool,
        url: str,
        limits: Limits,
        *,
        headers: Callable[[], Fields],
        mirrors: Callable[[str], Sequence[Mirror]],
        mcp_names: Mapping[str, str],
        authorization: TokenSource | None,
        make_room: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._url = url
        self._limits = limits
        self._headers = headers
        self._mirrors = mirrors
        self._mcp_names = mcp_names
        self._authorization = authorization
        self._make_room = make_room
        self.session_id: str | None = None  # http-61: never shown
        """The session id that the server has given last."""

    async def send(
        self, exchange: rules.Exchange, given: Fields = (), *, opening: trio.CancelScope | None = None
    ) -> tuple[rules.ReplyVerdict, rules.Exchange, HttpReply]:
        """Send an HTTP request, with redirects, retries and better tokens.

        Returns the verdict, and the last request and its reply.  If the verdict is `Streaming`, enter the block of the
        reply at once and read it.  `given` are the headers of a call, which already contain those of the client.
        `opening` is cancelled if a stream does not begin within `ENDPOINT` seconds; its reader takes the deadline away.

        The server waits for an answer, and accepts it once.  Without `initialized` a server sends no questions and no
        changes in this session; but some servers break the connection over it, or do not reply, and work otherwise.
        Raises `SessionLost` if such a message did not arrive.
        """
        message = exchange.message
        assert not isinstance(message, InvalidMessage)  # messages to send are made here
        body = b"" if message is None else encode(message)
        answers, initialized = isinstance(message, Response | Error | Batch), is_initialized(message)
        pauses = iter(_PAUSES)
        broken = 0  # attempts that the server may have received; of `initialized` also those it was too busy for
        redirects = 0
        while True:
            last = initialized and broken + 1 >= _INITIALIZED_ATTEMPTS
            silent = False
            try:
                verdict, reply = await self._attempt(exchange, body, given, opening)
            except (ReplyBroken, ConnectionFailed, NoResponse, AuthorizationFailed) as error:
                sent = not isinstance(error, ConnectionFailed | AuthorizationFailed)
                if is_final(error) or not (answers or initialized) or (last and sent):
                    raise
                broken += sent
                lost, silent = str(error), initialized and isinstance(error, NoResponse)
            else:
                match verdict:
                    case rules.Redirected(url):
                        redirects += 1
                        if redirects > _MAX_REDIRECTS:
                            why = f"the server redirects more than {_MAX_REDIRECTS} times"
                            return rules.ReplyLost(why), exchange, reply
                        exchange = attrs.evolve(exchange, url=url)
                        continue
                    case rules.RetryAfter(seconds) if exchange.method == "POST":
                        if seconds > MAX_RETRY_AFTER:
                            why = f"HTTP {reply.status}: the server is busy for {seconds} seconds"
                            return rules.ReplyLost(why, reply.status), exchange, reply
                        self._make_room("the server is busy, perhaps with too many connections")
                        await trio.sleep(seconds)
                        exchange = attrs.evolve(exchange, waited=True)
                        continue
                if last or not (answers or initialized) or reply.status not in _BUSY:
                    if answers and broken and reply.status in (400, 404, 409):
                        verdict = rules.ReplyAccepted()  # an earlier attempt was received
                    return verdict, exchange, reply
                broken += initialized
                lost = f"HTTP {reply.status}"
            if (pause := next(pauses, None)) is None:  # the server and the caller here must learn it
                raise SessionLost(True, f"{title_of(message)} did not reach the server: {lost}")
            await trio.sleep(0.0 if silent else pause)  # without a reply, the attempt has waited already

    async def _attempt(
        self, exchange: rules.Exchange, body: bytes, given: Fields, opening: trio.CancelScope | None
    ) -> tuple[rules.ReplyVerdict, HttpReply]:
        """Send the request once; with the option `auth` with a token, and again if a better token can be had."""
        if self._authorization is None and exchange.asked:
            return await self._send_once(exchange, body, given, None)
        credentials: Credentials | None = None
        if self._authorization is not None:
            operation = exchange.method  # an operation may need scopes of its own
            if isinstance(request := exchange.message, Request):
                operation = f"{request.method} {request.params.get('name', request.params.get('uri', ''))}"
            credentials = self._authorization.credentials(exchange.method, exchange.url, operation)
        while True:
            if credentials is not None:
                await credentials.get()
            seconds = ACKNOWLEDGE_TIMEOUT if exchange.method == "POST" and not exchange.asked else math.inf
            if is_initialized(exchange.message):
                seconds /= _INITIALIZED_ATTEMPTS
            if opening is not None:  # not before: the user may need longer to allow access
                opening.deadline = trio.current_time() + ENDPOINT
            with trio.move_on_after(seconds) as waiting:
                verdict, reply = await self._send_once(exchange, body, given, credentials)
            if waiting.cancelled_caught:
                raise NoResponse(f"no answer within {seconds:g} seconds")
            if opening is not None and not isinstance(verdict, rules.Streaming):
                opening.deadline = math.inf
            if credentials is None or not credentials.refused:
                return verdict, reply
            assert isinstance(verdict, rules.Challenged)
            credentials.refusal = self.refusal(exchange.message, verdict)

    async def _send_once(
        self, exchange: rules.Exchange, body: bytes, given: Fields, credentials: Credentials | None
    ) -> tuple[rules.ReplyVerdict, HttpReply]:
        fields, message = self._fields(exchange, given, credentials), exchange.message
        replayable = not isinstance(message, Request) or message.method in _REPEATABLE
        async with self._pool.request(exchange.method, exchange.url, fields, body, replayable=replayable) as reply:
            status = reply.status
            if credentials is not None:
                credentials.replied(status, reply.headers)
            content = b""
            success = 200 <= status < 300
            if success and exchange.method == "POST" and (exchange.sse or not exchange.asked):
                await drain(reply)  # only the status matters
            elif not success or rules.kind_of(reply.headers) != EVENT_STREAM:
                content = await reply.read(self._limits.message_bytes)
            if not success or exchange.method == "GET":  # then it is no message, and an error may show it
                content = without_credentials(content, fields)
            verdict = rules.read_reply(exchange, status, reply.headers, content, self._limits)
            if isinstance(verdict, rules.ReplyLost) and success:  # it quotes the body that is no message
                verdict = attrs.evolve(verdict, why=without_credentials(verdict.why.encode(), fields).decode())
            if isinstance(verdict, rules.AnswerReceived | rules.Streaming) and verdict.session is not None:
                self.session_id = verdict.session
            if isinstance(verdict, rules.Streaming):
                reply.leave()  # the block in which it is read is entered before the next checkpoint
        return verdict, reply

    def _fields(self, exchange: rules.Exchange, given: Fields, credentials: Credentials | None) -> Fields:
        """Return the headers of the protocol and those of the program."""
        message = exchange.message
        mirrors: Sequence[Mirror] = ()
        if isinstance(message, Request) and message.method == "tools/call":
            mirrors = self._mirrors(str(message.params.get("name")))
        protocol = rules.request_headers(exchange, mirrors=mirrors, mcp_names=self._mcp_names)
        given = given or self._headers()
        for name, _ in given:
            if name.lower() in _RESERVED or name.lower().startswith(PARAM_PREFIX.lower()):
                raise UsageError(f"the header {name} is set by the protocol; leave it out")
        return (*protocol, *(given if credentials is None else credentials.beside(given)))

    def refusal(self, message: Message | None, verdict: rules.Challenged, advice: str = "") -> Unauthorized:
        """Return a 401 or 403 as an error."""
        why = f"{title_of(message)} was refused by {rules.url_without_secrets(self._url)}: {verdict.why}{advice}"
        return Unauthorized(why, verdict.status, verdict.challenge)


def title_of(message: Message | None) -> str:
    """Return a name of the message for errors."""
    return message.method if isinstance(message, Request | Notification) else "an answer"


def is_initialized(message: Message | None) -> bool:
    return isinstance(message, Notification) and message.method == INITIALIZED


async def drain(reply: HttpReply) -> None:
    """Read the rest of the reply without using it, so that the connection can be used again."""
    with trio.move_on_after(_DRAIN_SECONDS), suppress(ReplyBroken):
        while await reply.receive():
            pass
