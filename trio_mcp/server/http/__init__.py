"""A server over HTTP: listener, connections, sessions, responses, WebSocket, ASGI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.server.http.asgi import *
    from trio_mcp.server.http.connection import *
    from trio_mcp.server.http.endpoint import *
    from trio_mcp.server.http.gate import *
    from trio_mcp.server.http.listener import *
    from trio_mcp.server.http.options import *
    from trio_mcp.server.http.responses import *
    from trio_mcp.server.http.sessions import *
    from trio_mcp.server.http.silence import *
    from trio_mcp.server.http.websocket import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "asgi": "AsgiApp",
            "connection": "HttpConnection ListenerState UpgradedConnection",
            "endpoint": "AdmittedRequest Endpoint busy log_refusal over_limit send_reply",
            "gate": "Authenticator Caller name_of seconds_left",
            "responses": "EndpointStreams HttpResponse OutgoingMessage ResponseMode ResponseStream StreamOwner",
            "listener": "HttpAddress serve_http serve_http_stream",
            "options": "HttpOptions keep_alive_of policy_of public_url_of",
            "sessions": "HttpSession LegacyStream RegisteredSession Sessions pull_all",
            "silence": "IdleOrder",
            "websocket": "serve_upgrade",
        },
    )
