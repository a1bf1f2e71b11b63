"""The ASGI application, for Hypercorn's Trio worker and frameworks that mount applications."""

from __future__ import annotations

from trio_mcp.server.http.asgi import AsgiApp

__all__ = ["AsgiApp"]
