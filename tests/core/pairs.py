"""Two sessions joined by bytes: what one sends is encoded, decoded, and heard by the other."""

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
    """The message as the other side reads it."""
    return decode(encode(message), LIMITS)


def drain(session: SessionProtocol) -> list[Message]:
    """What a session has to say, as the other side reads it."""
    return [wire(message) for message, _ in session.outgoing()]


@attrs.define
class Pair:
    client: ClientProtocol
    server: ServerProtocol
    client_saw: list[Event] = attrs.field(factory=list)
    server_saw: list[Event] = attrs.field(factory=list)
    said: list[Message] = attrs.field(factory=list)  # by both, in the order of the wire

    def pump(self) -> None:
        """Carry everything to and fro until both are silent."""
        while messages := [(self.server, self.server_saw, each) for each in drain(self.client)] + [
            (self.client, self.client_saw, each) for each in drain(self.server)
        ]:
            for hearer, saw, message in messages:
                self.said.append(message)
                saw += hearer.receive(message, 0.0)

    def methods(self) -> list[str]:
        """The requests that were made, by either side."""
        return [message.method for message in self.said if isinstance(message, Request)]

    def forget(self) -> None:
        for log in (self.client_saw, self.server_saw, self.said):
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
    """A pair that has agreed on this revision, with nothing in its logs."""
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
    """A request with everything that the modern era requires in its `_meta`; `meta` by the last part of its names."""
    named = {f"io.modelcontextprotocol/{name}": value for name, value in meta.items()}
    whole = {META_VERSION: version, META_CLIENT_CAPABILITIES: {}, **named}
    return Request(id, method, {**(params or {}), "_meta": whole})


def initialize(id: int | str = 0, version: str = "2025-11-25", capabilities: JsonObject | None = None) -> Request:
    params = {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": CLIENT_INFO}
    return Request(id, "initialize", params)
