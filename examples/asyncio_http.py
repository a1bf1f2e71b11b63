"""An MCP server over HTTP that runs on asyncio, without Trio: python examples/asyncio_http.py 3000

It has sessions and event streams, for all revisions, at http://127.0.0.1:3000/mcp.  h11 reads and writes HTTP, `judge`
decides about each request, `ResponseEncoder` about each response, and a `ServerProtocol` does the protocol.  This file
moves the messages between them.  It has no time limits, and streams cannot be resumed; `trio_mcp.Server` has both.
"""

import asyncio
import secrets
import sys
from contextlib import suppress

import h11
from asyncio_stdio import Handlers
from asyncio_tools import OFFER

from trio_mcp.core.http import server_rules
from trio_mcp.core.http.fields import Fields, HttpRequest, Reply
from trio_mcp.core.http.response import ResponseEncoder
from trio_mcp.core.http.server_rules import judge
from trio_mcp.core.messages import Message
from trio_mcp.core.requests import LinkKind
from trio_mcp.core.session import ServerProtocol, SessionAgreed

POLICY = server_rules.HttpPolicy(resumable=False)  # and allowed_hosts=["mcp.example.com"] for other machines
SESSIONS: dict[str, "Session"] = {}


class Session:
    """A protocol session, its handlers, and its open responses, each with the connection that carries it."""

    def __init__(self, protocol: ServerProtocol) -> None:
        self.protocol, self.handlers = protocol, Handlers(protocol, self.flush)
        self.responses: dict[ResponseEncoder, HttpConnection] = {}
        self.stream: ResponseEncoder | None = None  # the newest response to a GET
        self.facts: server_rules.SessionFacts | None = None

    def receive(self, message: Message, response: ResponseEncoder | None) -> None:
        events = self.protocol.receive(message, 0.0, about=response)
        for event in events:
            if isinstance(event, SessionAgreed) and response is not None:
                response.session_id = server_rules.session_id(secrets.token_bytes(24))
                self.facts = server_rules.SessionFacts(event.terms.revision)
                SESSIONS[response.session_id] = self
                if len(SESSIONS) > 1000:
                    SESSIONS.pop(next(iter(SESSIONS))).end("there are too many sessions")
        self.handlers.handle(events)

    def flush(self) -> None:
        for message, label in self.protocol.outgoing():
            response = label if isinstance(label, ResponseEncoder) else self.stream
            if response is not None:
                response.send(message)
        for response, connection in tuple(self.responses.items()):
            if (part := response.data_to_send()) is not None:
                connection.send(*part)

    def end(self, why: str) -> None:
        self.handlers.handle(self.protocol.connection_lost(why=why))


class HttpConnection(asyncio.Protocol):  # serves one request at a time
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.http = transport, h11.Connection(h11.SERVER)
        self.open: tuple[Session, ResponseEncoder] | None = None
        self.keep_alive()

    def keep_alive(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(15.0, self.keep_alive)
        if self.open is not None:
            self.open[1].keep_alive()
            self.open[0].flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.timer.cancel()
        if self.open is not None:
            session, response = self.open
            response.connection_lost()
            del session.responses[response]
            if session.protocol.link is LinkKind.EXCHANGE:  # a modern request is cancelled with its response
                session.end("the client has closed the response")

    def data_received(self, data: bytes) -> None:
        try:
            self.http.receive_data(data)
            while not self.transport.is_closing() and not isinstance(event := self.http.next_event(), type):
                if isinstance(event, h11.Request):
                    self.head, self.body = event, bytearray()
                elif isinstance(event, h11.Data):
                    self.body += event.data
                if isinstance(event, h11.EndOfMessage) or len(self.body) > POLICY.limits.message_bytes:
                    self.serve(self.head)
        except h11.RemoteProtocolError:
            self.transport.close()
        if self.transport.get_write_buffer_size() > 2**24 or (self.open is not None and self.http.trailing_data[0]):
            self.transport.abort()  # the client sends requests and does not read the responses

    def serve(self, head: h11.Request) -> None:
        request = HttpRequest(head.method.decode(), head.target.decode(), list(head.headers), bytes(self.body))
        match judge(POLICY, request, find_session=lambda id: SESSIONS[id].facts if id in SESSIONS else None):
            case server_rules.Serve(session=id) as verdict:
                session = Session(verdict.new_session(OFFER)) if id is None else SESSIONS[id]
                session.receive(verdict.message, self.begin(session, verdict))
            case server_rules.OpenStream(session=id) as verdict:
                SESSIONS[id].stream = self.begin(SESSIONS[id], verdict)
                SESSIONS[id].flush()
            case server_rules.Deliver(session=id) as verdict:
                if id is not None:
                    SESSIONS[id].receive(verdict.message, None)
                self.reply(verdict.reply)
            case server_rules.EndSession(session=id) as verdict:
                SESSIONS.pop(id).end("the client has ended the session")
                self.reply(verdict.reply)
            case Reply() as reply:
                self.reply(reply)

    def begin(self, session: Session, verdict: server_rules.Serve | server_rules.OpenStream) -> ResponseEncoder:
        response = ResponseEncoder(verdict, session.protocol)
        self.open = session, response
        session.responses[response] = self
        return response

    def reply(self, reply: Reply) -> None:
        self.send((reply.status, reply.headers), reply.body, more=False)

    def send(self, head: tuple[int, Fields] | None, data: bytes, more: bool) -> None:
        if head is not None:
            self.transport.write(self.http.send(h11.Response(status_code=head[0], headers=list(head[1]))))
        self.transport.write(self.http.send(h11.Data(data=data)))
        if not more:
            self.transport.write(self.http.send(h11.EndOfMessage()))
            if self.open is not None:
                del self.open[0].responses[self.open[1]]
                self.open = None
            if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
                self.http.start_next_cycle()
            else:
                self.transport.close()


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(HttpConnection, "127.0.0.1", port)
    print("serving http://{}:{}/mcp".format(*server.sockets[0].getsockname()), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with suppress(KeyboardInterrupt):
        asyncio.run(main(int(sys.argv[1])))
