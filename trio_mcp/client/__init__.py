"""The client: opening a session, requests, callbacks, subscriptions, HTTP and WebSocket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.client.answering import *
    from trio_mcp.client.asked import *
    from trio_mcp.client.caller import *
    from trio_mcp.client.client import *
    from trio_mcp.client.connecting import *
    from trio_mcp.client.following import *
    from trio_mcp.client.http_link import *
    from trio_mcp.client.http_posts import *
    from trio_mcp.client.keeper import *
    from trio_mcp.client.options import *
    from trio_mcp.client.starting import *
    from trio_mcp.client.stream_link import *
    from trio_mcp.client.subscriptions import *
    from trio_mcp.client.tools import *
    from trio_mcp.client.websocket import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "answering": (
                "Answering FormAnswer GivenRoots OnElicitation OnElicitationUrl OnSampling PageAnswer RootLike "
                "SamplingAnswer"
            ),
            "asked": "AnswerForm FormElicitationRequest SamplingRequest UrlElicitationRequest host_of",
            "caller": (
                "Caller Failure HandshakeError HeadersRefused NoResponse OnProgress Reports ServerMessageHandler "
                "SessionLost Timer Transport Unauthorized failure_of retries_exhausted too_many_questions"
            ),
            "client": "Client connect_client open_client",
            "connecting": "Connector OpenSession SessionOptions Target connector_for",
            "following": "Progress ToolCall _ToolCallBlock",
            "http_link": "ENDPOINT HttpLink SseLink",
            "http_posts": (
                "ACKNOWLEDGE_TIMEOUT InFlight MAX_RETRY_AFTER NeedsSse OnStream PostTransport closed_here drain name_of"
            ),
            "keeper": "ClientParts Keeper terms_of",
            "options": (
                "ANSWERING CHILD ClientOptions RequestOptions check_options check_request_options checked_level "
                "copy_mapping fields_of log_level_of note_missing_options offer_of"
            ),
            "starting": "GARBAGE START Startup Timeouts",
            "stream_link": "StreamLink",
            "subscriptions": "Subscription SubscriptionManager SubscriptionUnsupported",
            "tools": "KnownTools ReturnType ToolFailed",
            "websocket": "UpgradeRefused dial_websocket",
        },
    )
