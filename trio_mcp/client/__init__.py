"""The client: opening a session, requests, callbacks, subscriptions, HTTP and WebSocket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.client.callbacks import *
    from trio_mcp.client.client import *
    from trio_mcp.client.connecting import *
    from trio_mcp.client.connection import *
    from trio_mcp.client.errors import *
    from trio_mcp.client.extensions import *
    from trio_mcp.client.http import *
    from trio_mcp.client.http_sender import *
    from trio_mcp.client.options import *
    from trio_mcp.client.session import *
    from trio_mcp.client.sse import *
    from trio_mcp.client.startup import *
    from trio_mcp.client.subscriptions import *
    from trio_mcp.client.tools import *
    from trio_mcp.client.websocket import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "callbacks": (
                "Answering FormAnswer FormElicitationRequest GivenRoots OnElicitation OnElicitationUrl OnSampling "
                "PageAnswer RootLike SamplingAnswer SamplingRequest UrlElicitationRequest"
            ),
            "client": "Client ToolCall _stream_call connect_client open_client",
            "connecting": "Connector SessionOptions Target connector_for",
            "connection": "ClientConnection",
            "errors": (
                "HandshakeError HeadersRefused NoResponse SessionLost Unauthorized failure_of "
                "too_large_questions too_many_questions"
            ),
            "extensions": "Around CallNextRequest ClientExtension ClientExtensions ExtensionCall",
            "http": "AUTH_ADVICE CLOSED_HERE HttpLink NeedsSse",
            "http_sender": (
                "ACKNOWLEDGE_TIMEOUT ENDPOINT HttpSender INITIALIZED MAX_RETRY_AFTER drain is_initialized title_of"
            ),
            "options": (
                "ANSWERING ClientOptions RequestOptions check_client_options check_request_options copy_mapping "
                "fields_of"
            ),
            "session": (
                "ClientSession DroppingQueue OnProgress PAUSES Progress STABLE ServerMessageHandler StreamLink Timer"
            ),
            "sse": "SseLink",
            "startup": "GARBAGE START Startup",
            "subscriptions": "Subscription SubscriptionManager SubscriptionUnsupported",
            "tools": "KnownTools ReturnType ToolFailed",
            "websocket": "UpgradeRefused dial_websocket",
        },
    )
