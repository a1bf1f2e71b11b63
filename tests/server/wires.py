"""Wires that take nothing: the test looks into the session for what would go out, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from tests.server.wire import CAPABILITIES, CLIENT_INFO
from trio_mcp.core import LinkKind, Notification, Request
from trio_mcp.server import Run, ServerSession

__all__ = ["Nowhere", "session_of"]


class Nowhere:
    """A `Wire` that remembers what was asked of it."""

    mark = 1

    def __init__(self, *, answers_only: bool = False, full: bool = False) -> None:
        self.answers_only = answers_only
        self.full = full
        self.woken = 0
        self.closed = False

    def wake(self) -> None:
        self.woken += 1

    async def flush(self) -> None:
        self.wake()
        await trio.lowlevel.checkpoint()

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()

    async def written(self, mark: int) -> None:
        await trio.lowlevel.checkpoint()

    def hang_up(self, retry: float) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def session_of(
    run: Run, revision: str, own: Nowhere, *, capabilities: Mapping[str, Any] | None = None
) -> ServerSession:
    """A conversation with a session over HTTP, after the handshake."""
    conversation = ServerSession(run, own, link=LinkKind.SESSION)
    declared = CAPABILITIES[revision] if capabilities is None else capabilities
    opening = {"protocolVersion": revision, "capabilities": declared, "clientInfo": CLIENT_INFO}
    conversation.receive(Request(0, "initialize", opening), trio.current_time())
    conversation.receive(Notification("notifications/initialized", {}), trio.current_time())
    conversation.session.outgoing()
    return conversation
