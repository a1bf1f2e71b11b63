"""A wire that sends nothing.  The test reads the outgoing messages from the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from tests.server.raw_client import CAPABILITIES, CLIENT_INFO
from trio_mcp.core import LinkKind, Notification, Request
from trio_mcp.server import Run, ServerSession
from trio_mcp.transport import Wire

__all__ = ["WireStub", "session_of"]


class WireStub(Wire):
    """A `Wire` that records its calls."""

    def __init__(self, *, answers_only: bool = False, full: bool = False) -> None:
        self.answers_only = answers_only
        self.is_full = full
        self.woken = 0
        self.closed = False

    def wake(self) -> None:
        self.woken += 1

    @property
    def full(self) -> bool:
        return self.is_full

    @property
    def mark(self) -> int:
        return 1

    def close(self) -> None:
        self.closed = True


def session_of(
    run: Run, revision: str, own: WireStub, *, capabilities: Mapping[str, Any] | None = None
) -> ServerSession:
    """The server's end of a session over HTTP, after the handshake."""
    conversation = ServerSession(run, own, link=LinkKind.SESSION)
    declared = CAPABILITIES[revision] if capabilities is None else capabilities
    opening = {"protocolVersion": revision, "capabilities": declared, "clientInfo": CLIENT_INFO}
    conversation.receive(Request(0, "initialize", opening), trio.current_time())
    conversation.receive(Notification("notifications/initialized", {}), trio.current_time())
    conversation.session.outgoing()
    return conversation
