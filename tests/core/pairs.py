"""A client session and a server session that exchange messages as bytes: each is encoded, decoded and received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trio_mcp.core import (
    META_CLIENT_CAPABILITIES,
    META_VERSION,
    ClientProtocol,
    Event,
    JsonObject,
    Limits,
    Message,
    Offer,
    Request,
    Revision,
    ServerProtocol,
    SessionProtocol,
    decode,
    encode,
)

LIMITS = Limits()
CLIENT_INFO = {"name": "client", "version": "1", "title": "The Client", "websiteUrl": "https://example.com"}
SERVER_INFO = {"name": "server", "version": "2", "title": "The Server", "icons": []}
EVERYTHING_OF_A_CLIENT = {
    "elicitation": {"form": {}, "url": {}},
    "experimental": {"x": {}},
    "extensions": {"com.example/x": {}},
    "roots": {"listChanged": True},
    "sampling": {"context": {}, "tools": {}},
}
EVERYTHING_OF_A_SERVER = {
    "completions": {},
    "experimental": {"y": {}},
    "extensions": {"com.example/y": {}},
    "logging": {},
    "prompts": {"listChanged": True},
    "resources": {"subscribe": True, "listChanged": True},
    "tools": {"listChanged": True},
}


def wire(message: Message) -> Message:
    """The message after it is encoded and decoded, as the other side reads it."""
    return decode(encode(message), LIMITS)


def drain(session: SessionProtocol) -> list[Message]:
    """The queued messages of a session, as the other side reads them."""
    return [wire(message) for message, _ in session.outgoing()]


@attrs.define
class Pair:
    client: ClientProtocol
    server: ServerProtocol
    client_saw: list[Event] = attrs.field(factory=list)
    server_saw: list[Event] = attrs.field(factory=list)
    sent: list[Message] = attrs.field(factory=list)  # by both, in the order of the wire

    def pump(self) -> None:
        """Deliver messages in both directions until both queues are empty."""
        while messages := [(self.server, self.server_saw, each) for each in drain(self.client)] + [
            (self.client, self.client_saw, each) for each in drain(self.server)
        ]:
            for receiver, saw, message in messages:
                self.sent.append(message)
                saw += receiver.receive(message, 0.0)

    def methods(self) -> list[str]:
        """The methods of the requests of both sides."""
        return [message.method for message in self.sent if isinstance(message, Request)]

    def forget(self) -> None:
        for log in (self.client_saw, self.server_saw, self.sent):
            log.clear()


def pair(
    client: Mapping[str, Any] = EVERYTHING_OF_A_CLIENT,
    server: Mapping[str, Any] = EVERYTHING_OF_A_SERVER,
    *,
    client_speaks: tuple[Revision, ...],
    server_speaks: tuple[Revision, ...],
    instructions: str | None = None,
) -> Pair:
    return Pair(
        ClientProtocol(Offer(CLIENT_INFO, client, client_speaks)),
        ServerProtocol(Offer(SERVER_INFO, server, server_speaks, instructions)),
    )


def opened(
    revision: Revision, client: Mapping[str, Any] | None = None, server: Mapping[str, Any] | None = None
) -> Pair:
    """A pair that has agreed on this revision, with empty logs."""
    made = pair(
        EVERYTHING_OF_A_CLIENT if client is None else client,
        EVERYTHING_OF_A_SERVER if server is None else server,
        client_speaks=(revision,),
        server_speaks=(revision,),
    )
    made.client.open()
    made.pump()
    assert made.client.opened
    made.forget()
    return made


def modern(
    id: int | str, method: str, params: JsonObject | None = None, *, version: str = "2026-07-28", **meta: Any
) -> Request:
    """A request with the `_meta` that the modern era requires.  A keyword of `meta` is the last part of a name."""
    named = {f"io.modelcontextprotocol/{name}": value for name, value in meta.items()}
    whole = {META_VERSION: version, META_CLIENT_CAPABILITIES: {}, **named}
    return Request(id, method, {**(params or {}), "_meta": whole})


def initialize(id: int | str = 0, version: str = "2025-11-25", capabilities: JsonObject | None = None) -> Request:
    params = {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": CLIENT_INFO}
    return Request(id, "initialize", params)
