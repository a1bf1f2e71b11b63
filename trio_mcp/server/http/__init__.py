"""A server over HTTP: listener, connections, sessions, responses, WebSocket, ASGI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.server.http.asgi import *
    from trio_mcp.server.http.authentication import *
    from trio_mcp.server.http.connection import *
    from trio_mcp.server.http.endpoint import *
    from trio_mcp.server.http.listener import *
    from trio_mcp.server.http.monitoring import *
    from trio_mcp.server.http.options import *
    from trio_mcp.server.http.responses import *
    from trio_mcp.server.http.sessions import *
    from trio_mcp.server.http.shared_endpoint import *
    from trio_mcp.server.http.shared_mail import *
    from trio_mcp.server.http.shared_row import *
    from trio_mcp.server.http.shared_sessions import *
    from trio_mcp.server.http.shared_speaker import *
    from trio_mcp.server.http.shared_streams import *
    from trio_mcp.server.http.sockets import *
    from trio_mcp.server.http.websocket import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "asgi": "AsgiApp",
            "authentication": "Authenticator Caller seconds_left",
            "connection": "HttpConnection ListenerState UpgradedConnection",
            "endpoint": (
                "AdmittedRequest Endpoint OnDisconnect cannot_resume ignore_disconnect log_refusal "
                "open_endpoint over_limit refuse send_reply try_later"
            ),
            "listener": "HttpAddress HttpService serve_http serve_http_stream",
            "monitoring": "Monitoring Tally",
            "options": "HttpOptions keep_alive_of policy_of public_url_of",
            "responses": (
                "EndpointStreams HttpResponse IdleOrder OneStream OutgoingMessage ResponseMode ResponseStream "
                "SingleRequest StreamOwner"
            ),
            "sessions": "HttpSession LegacyStream RegisteredSession Sessions",
            "shared_endpoint": "SharedEndpoint",
            "shared_mail": "SessionMail",
            "shared_row": "SessionRecord SessionRow key_of",
            "shared_sessions": "SharedServerSession SharedSession",
            "shared_speaker": "PlaceEvent Speaker SpeakerPlace",
            "shared_streams": "FollowedStream LoggedStream SharedEventLog StreamItem is_standalone read_item",
            "sockets": (
                "Listener bracketed check_exposure ignore_new listener_of socket_name socket_under tcp_listeners "
                "tcp_sockets unix_socket"
            ),
            "websocket": "serve_upgrade",
        },
    )
