"""HTTP without sockets: messages, fields, event streams, WebSocket frames, and the rules of both roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.http.chunks import *
    from trio_mcp.core.http.client_rules import *
    from trio_mcp.core.http.event_log import *
    from trio_mcp.core.http.fields import *
    from trio_mcp.core.http.replies import *
    from trio_mcp.core.http.response import *
    from trio_mcp.core.http.server_rules import *
    from trio_mcp.core.http.sse import *
    from trio_mcp.core.http.verdicts import *
    from trio_mcp.core.http.websocket import *
    from trio_mcp.core.http.wire import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "chunks": "ChunkError ChunkReader take",
            "client_rules": (
                "AnswerReceived Challenged Exchange KeepAlives NoStream Reconnect Redirected RefreshTools "
                "ReplyAccepted ReplyLost ReplyVerdict RetryAfter SessionGone StreamResumption Streaming "
                "TryInitialize TrySse TryVersion kind_of read_answer read_endpoint read_reply request_headers "
                "url_without_secrets"
            ),
            "event_log": "EventLog LoggedEvent MemoryEventLog NotReplayable Replay Replayed",
            "fields": (
                "AllowList DRAFT_HEADER_MISMATCH EVENT_STREAM Fields Headers JSON LAST_EVENT_ID METHOD Mirror "
                "Mirrors NAME NAMED_BY PARAM_PREFIX PROTOCOL_VERSION RawFields SESSION_ID cors_headers decode_value "
                "encode_value find_mirrors is_json is_session_id media_type mirror_fault mirrored preflight_headers "
                "quality reply_headers standard_fault standard_headers without_credentials"
            ),
            "replies": "ReplyHead ReplyReader",
            "response": "EncodedPart ResponseEncoder",
            "server_rules": "check_session judge screen",
            "sse": (
                "EventReader KEEP_ALIVE Oversized SseEvent encode_event encode_message encode_messages priming_event"
            ),
            "verdicts": (
                "Answer Deliver EndSession HttpPolicy HttpRequest LOOPBACK_HOSTS LOOPBACK_ORIGINS OpenLegacyStream "
                "OpenStream PathKind Reply SESSION_PARAMETER Screened Serve SessionFacts Verdict empty endpoint_uri "
                "refusal session_id status_for websocket_hint"
            ),
            "websocket": "SUBPROTOCOL Upgrade WebSocketFrames judge_upgrade",
            "wire": "CONTINUE LAST_CHUNK RequestHead RequestReader UnreadableRequest chunk date head_bytes refused",
        },
    )
