"""The protocol without I/O: no clock, no tasks, no randomness, no logging, no event loop.

Bytes come in by `messages`, messages go through a `session`, and what happened comes back as events.  Nothing is
imported here, so that a program pays only for the parts it names.

An id in a comment, such as core-32, is a row of tests/requirements.tsv: the sentence of the specification obeyed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.caching import *
    from trio_mcp.core.client_subscriptions import *
    from trio_mcp.core.codec import *
    from trio_mcp.core.connection import *
    from trio_mcp.core.content import *
    from trio_mcp.core.elicitation import *
    from trio_mcp.core.errors import *
    from trio_mcp.core.extensions import *
    from trio_mcp.core.forms import *
    from trio_mcp.core.framing import *
    from trio_mcp.core.messages import *
    from trio_mcp.core.models import *
    from trio_mcp.core.opening import *
    from trio_mcp.core.options import *
    from trio_mcp.core.principals import *
    from trio_mcp.core.request_state import *
    from trio_mcp.core.requests import *
    from trio_mcp.core.revisions import *
    from trio_mcp.core.rounds import *
    from trio_mcp.core.sampling import *
    from trio_mcp.core.session import *
    from trio_mcp.core.shares import *
    from trio_mcp.core.subscriptions import *
    from trio_mcp.core.task_states import *
    from trio_mcp.core.tasks import *
    from trio_mcp.core.turns import *
    from trio_mcp.core.unparsed import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "caching": "COMPLETION_SECONDS CacheHints MAX_BYTES MAX_ENTRIES MAX_TTL_MS Pager ResponseCache paginate",
            "client_subscriptions": (
                "ChangeReceived OpenSubscription SubscriptionAcknowledged SubscriptionState Subscriptions"
            ),
            "codec": "MAX_MALFORMED MethodModels ModelType REQUESTS from_json to_json",
            "connection": "Connection",
            "content": (
                "Annotations AudioContent BlobResourceContents ContentBlock Described EmbeddedResource Icon "
                "ImageContent MalformedContent Meta Model Named Resource ResourceContents ResourceLink SamplingContent "
                "Speaker TextContent TextResourceContents ToolOutcome ToolResultContent ToolUseContent UnknownContent "
                "V2024_11 V2025_03 V2025_06 V2025_11 V2026_07 VITAL checked fraction since until well_formed"
            ),
            "elicitation": "Accepted Declined Dismissed ElicitationOutcome FormCheck LOOPBACK_HOSTS split_url",
            "errors": (
                "CannotServe ConnectionFailed HEADER_MISMATCH INTERNAL_ERROR INVALID_PARAMS INVALID_REQUEST "
                "InputUnavailable METHOD_NOT_FOUND MISSING_CLIENT_CAPABILITY MODERN_ERRORS McpError NotDeclared "
                "NotInThisRevision PARSE_ERROR RESOURCE_NOT_FOUND RemoteProtocolError RequestError ResourceNotFound "
                "SessionClosed UNSUPPORTED_VERSION URL_ELICITATION_REQUIRED UsageError check_amount check_seconds "
                "name_of printable redacted repeated shown"
            ),
            "extensions": "Extension ExtensionMethod Extensions",
            "forms": (
                "BooleanSchema ElicitFormParams ElicitParams ElicitResult ElicitUrlParams ElicitValue EnumItems "
                "EnumOption EnumSchema FieldSchema IntegerSchema MultiSelectSchema NumberSchema RequestedSchema "
                "StringSchema TitledEnumItems TitledEnumSchema"
            ),
            "framing": "LineFramer",
            "messages": (
                "ABSENT Absent Batch CachedResult EDGE Error Event Id InvalidMessage Json JsonObject KINDS "
                "LONG_NUMBERS Limits Message Notification PLAIN PROGRESS Request Response UnreadableNumber decode "
                "encode mutable_record parse prepare prepared_progress to_readable to_text writable"
            ),
            "models": (
                "CacheableResult CallToolParams CallToolResult CompleteParams CompleteResult Completion "
                "CompletionArgument CompletionContext CreateMessageParams CreateMessageRequest CreateMessageResult "
                "ElicitRequest GetPromptParams GetPromptResult Implementation InputRequest InputRequiredResult "
                "InputResponse ListPromptsResult ListResourceTemplatesResult ListResourcesResult ListRootsRequest "
                "ListRootsResult ListToolsResult LogLevel LoggingMessageParams ModelHint ModelPreferences "
                "PaginatedParams Params Prompt PromptArgument PromptMessage PromptReference ReadResourceParams "
                "ReadResourceResult ResourceReference ResourceTemplate Result RetryParams Root SamplingMessage Tool "
                "ToolAnnotations ToolChoice ToolExecution"
            ),
            "opening": "Attempt ClientProtocol Negotiation OpeningFailed Phase",
            "options": "OPTIONS WithOtherNames check_options option_error show_options",
            "principals": "Principal declared_scopes has_scopes name_of_principal",
            "request_state": "MAX_STATE_CHARS SealedState StateRefusal StateSealer read_keys",
            "requests": (
                "ANSWER Action Answered CALLING CANCELLED ConnectionLost GONE InvalidAnswer LinkKind NOTE Outcome "
                "Outgoing Peer PeerComplaint PeerMistake ProgressReported Refused RequestCancelled RequestEvent "
                "SERVING State SubscriptionEnded Table TimedOut charged checked_total first_state step"
            ),
            "revisions": (
                "Capability CapabilityRule ConditionalNeed HttpRules INSTEAD LATEST LATEST_LEGACY LEGACY LOG_LEVELS "
                "META_CLIENT_CAPABILITIES META_CLIENT_INFO META_LOG_LEVEL META_SERVER_INFO META_SUBSCRIPTION_ID "
                "META_VERSION MODERN MethodRule NOTHING REVISIONS Revision Role Terms capability_object "
                "check_extension check_key check_meta declares in_protocol is_like_protocol meta_of "
                "missing_capabilities stable_name"
            ),
            "rounds": "Answers MAX_ROUNDS Question Rounds input_required is_complete read_answers",
            "sampling": "check_sampling",
            "session": "Call Notice Offer Opened ServerProtocol SessionAgreed SessionProtocol",
            "shares": ("Account ByteBudget Charge FEW LONG Pace Shares holder_of is_principal weight"),
            "subscriptions": (
                "ACKNOWLEDGED ChangeEvent ChangeKind Listeners PROMPTS_CHANGED RESOURCES_CHANGED TOOLS_CHANGED "
                "change_of filter_items listen_params resource_updated"
            ),
            "task_states": "TaskState poll_seconds read_created read_task",
            "tasks": (
                "CORE_TASKS EXTENSION_TASKS IMMEDIATE_RESPONSE MAX_MESSAGE POLL_MS RELATED_TASK TASKS TASKS_EXTENSION "
                "TERMINAL TaskDeed TaskEvent TaskForm TaskRecord TaskStatus TaskStep cursor_of missing_extension "
                "read_cursor read_task_id related requested_ttl unknown_task"
            ),
            "turns": "FairQueue to_make_room",
            "unparsed": (
                "MessageKind beginning ending estimated_values holds_more_values not_parsed outside_strings too_long"
            ),
        },
    )
