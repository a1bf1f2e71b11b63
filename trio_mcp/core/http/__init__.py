"""HTTP without sockets: messages, fields, event streams, WebSocket frames, and the rules of both roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.http.client_rules import *
    from trio_mcp.core.http.event_log import *
    from trio_mcp.core.http.fields import *
    from trio_mcp.core.http.h1 import *
    from trio_mcp.core.http.response import *
    from trio_mcp.core.http.server_rules import *
    from trio_mcp.core.http.sse import *
    from trio_mcp.core.http.websocket import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client_rules": (
                "AnswerReceived Challenged Exchange KeepAlives NoStream Reconnect Redirected RefreshTools "
                "ReplyAccepted ReplyLost ReplyVerdict RetryAfter SessionGone StreamResumption Streaming "
                "TryInitialize TrySse kind_of read_answer read_endpoint read_reply reason request_headers "
                "url_without_secrets"
            ),
            "event_log": "EventLog LoggedEvent MemoryEventLog NotReplayable Replay Replayed",
            "fields": (
                "AllowList CREDENTIALS DRAFT_HEADER_MISMATCH EVENT_STREAM Fields Headers HttpRequest JSON "
                "LAST_EVENT_ID LOOPBACK_HOSTS METHOD Mirror Mirrors NAME NAMED_BY NO_NAMES PARAM_PREFIX "
                "PROTOCOL_VERSION RawFields Reply SESSION_ID TOKEN cors_headers decode_value empty encode_value "
                "find_mirrors is_json is_session_id listed media_type mirror_fault mirrored preflight_headers quality "
                "refusal reply_headers split_target standard_fault standard_headers without_credentials"
            ),
            "h1": (
                "CONTINUE ChunkError ChunkReader KnownHeads LAST_CHUNK ReplyHead ReplyReader RequestHead RequestReader "
                "UnreadableRequest chunk date head_bytes refused take"
            ),
            "response": "EncodedPart ResponseEncoder",
            "server_rules": (
                "Answer Deliver EndSession HttpPolicy LOOPBACK_ORIGINS OpenLegacyStream OpenStream "
                "PathKind SESSION_PARAMETER Screened Serve SessionFacts Verdict check_session endpoint_uri judge "
                "screen session_id status_for websocket_hint"
            ),
            "sse": (
                "EventReader KEEP_ALIVE Oversized SseEvent encode_event encode_message encode_messages priming_event"
            ),
            "websocket": "SUBPROTOCOL Upgrade WebSocketFrames judge_upgrade",
        },
    )
