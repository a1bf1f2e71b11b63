"""The Model Context Protocol for Trio programs, in all five revisions.

The protocol itself lives in `trio_mcp.core` and needs no event loop.  The names below are loaded when they are first
used, so that a program pays for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trio_mcp.client.answering import GivenRoots, OnElicitation, OnElicitationUrl, OnSampling
    from trio_mcp.client.asked import FormElicitationRequest, SamplingRequest, UrlElicitationRequest
    from trio_mcp.client.caller import HandshakeError, NoResponse, OnProgress, SessionLost, Unauthorized
    from trio_mcp.client.client import Client, connect_client, open_client
    from trio_mcp.client.connecting import Target
    from trio_mcp.client.following import Progress, ToolCall
    from trio_mcp.client.options import ClientOptions, RequestOptions
    from trio_mcp.client.subscriptions import Subscription, SubscriptionUnsupported
    from trio_mcp.client.tools import ToolFailed
    from trio_mcp.client.websocket import UpgradeRefused
    from trio_mcp.core.cache import CacheHints
    from trio_mcp.core.content import (
        Annotations,
        AudioContent,
        BlobResourceContents,
        EmbeddedResource,
        Icon,
        ImageContent,
        MalformedContent,
        Resource,
        ResourceLink,
        TextContent,
        TextResourceContents,
        ToolResultContent,
        ToolUseContent,
        UnknownContent,
    )
    from trio_mcp.core.elicitation import Accepted, Declined, Dismissed
    from trio_mcp.core.errors import (
        ConnectionFailed,
        InputUnavailable,
        McpError,
        NotDeclared,
        NotInThisRevision,
        RemoteProtocolError,
        RequestError,
        ResourceNotFound,
        SessionClosed,
        UsageError,
    )
    from trio_mcp.core.http.event_log import EventLog
    from trio_mcp.core.http.verdicts import HttpRequest
    from trio_mcp.core.jsonrpc import Json, JsonObject, Limits, Request
    from trio_mcp.core.models import (
        CallToolResult,
        Completion,
        CreateMessageResult,
        GetPromptResult,
        ListPromptsResult,
        ListResourcesResult,
        ListResourceTemplatesResult,
        ListToolsResult,
        LoggingMessageParams,
        LogLevel,
        ModelHint,
        ModelPreferences,
        Prompt,
        PromptArgument,
        PromptMessage,
        PromptReference,
        ReadResourceResult,
        ResourceReference,
        ResourceTemplate,
        Root,
        SamplingMessage,
        Tool,
        ToolAnnotations,
        ToolChoice,
    )
    from trio_mcp.core.oauth.principals import Principal
    from trio_mcp.core.oauth.resource import CannotVerify
    from trio_mcp.core.opening import Negotiation
    from trio_mcp.core.schema.schema import Field
    from trio_mcp.core.schema.validation import InvalidSchema
    from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind
    from trio_mcp.oauth.client import (
        Application,
        AuthorizationCode,
        AuthorizationFailed,
        Blame,
        ClientCredentials,
        IdentityAssertion,
        Key,
        OAuth,
        OAuthClient,
        OnAssertion,
        OnVisit,
        WorkloadIdentity,
        client_document,
    )
    from trio_mcp.oauth.keys import load_key, new_key
    from trio_mcp.oauth.token_stores import FileTokenStore, MemoryTokenStore, TokenStore
    from trio_mcp.relay.relay import open_relay
    from trio_mcp.server.context import ClientError, Context
    from trio_mcp.server.dispatch import CallNext, Middleware
    from trio_mcp.server.driver import serve_stream
    from trio_mcp.server.http.listener import HttpAddress, serve_http, serve_http_stream
    from trio_mcp.server.http.options import HttpOptions
    from trio_mcp.server.questions import (
        Elicit,
        ElicitUrl,
        Inquiry,
        ListRoots,
        Sample,
        UrlElicitationRequired,
    )
    from trio_mcp.server.results import InputRequired, ToolError, audio, file, image
    from trio_mcp.server.run import Statistics
    from trio_mcp.server.server import Server
    from trio_mcp.server.stdio import serve_stdio
    from trio_mcp.transport.child import ServerExited
    from trio_mcp.transport.http_pool import ReplyBroken, ReplyTooLong
    from trio_mcp.transport.paths import PathRefused, Roots, below, file_path

__all__ = [
    "Accepted",
    "Annotations",
    "Application",
    "AudioContent",
    "AuthorizationCode",
    "AuthorizationFailed",
    "Blame",
    "BlobResourceContents",
    "CacheHints",
    "CallNext",
    "CallToolResult",
    "CannotVerify",
    "ChangeEvent",
    "ChangeKind",
    "Client",
    "ClientCredentials",
    "ClientError",
    "ClientOptions",
    "Completion",
    "ConnectionFailed",
    "Context",
    "CreateMessageResult",
    "Declined",
    "Dismissed",
    "Elicit",
    "ElicitUrl",
    "EmbeddedResource",
    "EventLog",
    "Field",
    "FileTokenStore",
    "FormElicitationRequest",
    "GetPromptResult",
    "GivenRoots",
    "HandshakeError",
    "HttpAddress",
    "HttpOptions",
    "HttpRequest",
    "Icon",
    "IdentityAssertion",
    "ImageContent",
    "InputRequired",
    "InputUnavailable",
    "Inquiry",
    "InvalidSchema",
    "Json",
    "JsonObject",
    "Key",
    "Limits",
    "ListPromptsResult",
    "ListResourceTemplatesResult",
    "ListResourcesResult",
    "ListRoots",
    "ListToolsResult",
    "LogLevel",
    "LoggingMessageParams",
    "MalformedContent",
    "McpError",
    "MemoryTokenStore",
    "Middleware",
    "ModelHint",
    "ModelPreferences",
    "Negotiation",
    "NoResponse",
    "NotDeclared",
    "NotInThisRevision",
    "OAuth",
    "OAuthClient",
    "OnAssertion",
    "OnElicitation",
    "OnElicitationUrl",
    "OnProgress",
    "OnSampling",
    "OnVisit",
    "PathRefused",
    "Principal",
    "Progress",
    "Prompt",
    "PromptArgument",
    "PromptMessage",
    "PromptReference",
    "ReadResourceResult",
    "RemoteProtocolError",
    "ReplyBroken",
    "ReplyTooLong",
    "Request",
    "RequestError",
    "RequestOptions",
    "Resource",
    "ResourceLink",
    "ResourceNotFound",
    "ResourceReference",
    "ResourceTemplate",
    "Root",
    "Roots",
    "Sample",
    "SamplingMessage",
    "SamplingRequest",
    "Server",
    "ServerExited",
    "SessionClosed",
    "SessionLost",
    "Statistics",
    "Subscription",
    "SubscriptionUnsupported",
    "Target",
    "TextContent",
    "TextResourceContents",
    "TokenStore",
    "Tool",
    "ToolAnnotations",
    "ToolCall",
    "ToolChoice",
    "ToolError",
    "ToolFailed",
    "ToolResultContent",
    "ToolUseContent",
    "Unauthorized",
    "UnknownContent",
    "UpgradeRefused",
    "UrlElicitationRequest",
    "UrlElicitationRequired",
    "UsageError",
    "WorkloadIdentity",
    "audio",
    "below",
    "client_document",
    "connect_client",
    "file",
    "file_path",
    "image",
    "load_key",
    "new_key",
    "open_client",
    "open_relay",
    "serve_http",
    "serve_http_stream",
    "serve_stdio",
    "serve_stream",
]  # fmt: skip

_HOMES = {
    "trio_mcp.client.answering": "GivenRoots OnElicitation OnElicitationUrl OnSampling",
    "trio_mcp.client.asked": "FormElicitationRequest UrlElicitationRequest SamplingRequest",
    "trio_mcp.client.caller": "NoResponse OnProgress HandshakeError SessionLost Unauthorized",
    "trio_mcp.transport.child": "ServerExited",
    "trio_mcp.client.client": "Client connect_client open_client",
    "trio_mcp.client.options": "RequestOptions ClientOptions",
    "trio_mcp.client.connecting": "Target",
    "trio_mcp.server.context": "ClientError Context",
    "trio_mcp.core.cache": "CacheHints",
    "trio_mcp.core.content": "Annotations AudioContent BlobResourceContents EmbeddedResource Icon ImageContent "
    "MalformedContent Resource ResourceLink TextContent TextResourceContents "
    "ToolResultContent ToolUseContent UnknownContent",
    "trio_mcp.core.elicitation": "Accepted Declined Dismissed",
    "trio_mcp.core.errors": "ConnectionFailed InputUnavailable UsageError McpError NotDeclared "
    "NotInThisRevision RemoteProtocolError RequestError ResourceNotFound SessionClosed",
    "trio_mcp.core.jsonrpc": "Json JsonObject Limits Request",
    "trio_mcp.core.subscriptions": "ChangeEvent ChangeKind",
    "trio_mcp.core.models": "CallToolResult Completion CreateMessageResult GetPromptResult ListPromptsResult "
    "ListResourceTemplatesResult ListResourcesResult ListToolsResult LogLevel "
    "LoggingMessageParams ModelHint ModelPreferences Prompt PromptArgument "
    "PromptMessage PromptReference ReadResourceResult ResourceReference "
    "ResourceTemplate Root SamplingMessage Tool ToolAnnotations ToolChoice",
    "trio_mcp.core.opening": "Negotiation",
    "trio_mcp.core.oauth.principals": "Principal",
    "trio_mcp.core.http.event_log": "EventLog",
    "trio_mcp.core.oauth.resource": "CannotVerify",
    "trio_mcp.core.schema.schema": "Field",
    "trio_mcp.core.schema.validation": "InvalidSchema",
    "trio_mcp.core.http.verdicts": "HttpRequest",
    "trio_mcp.server.dispatch": "CallNext Middleware",
    "trio_mcp.server.driver": "serve_stream",
    "trio_mcp.client.following": "ToolCall Progress",
    "trio_mcp.server.http.options": "HttpOptions",
    "trio_mcp.transport.http_pool": "ReplyBroken ReplyTooLong",
    "trio_mcp.server.http.listener": "HttpAddress serve_http serve_http_stream",
    "trio_mcp.client.subscriptions": "Subscription SubscriptionUnsupported",
    "trio_mcp.oauth.client": "Application AuthorizationCode AuthorizationFailed Blame ClientCredentials "
    "IdentityAssertion Key OAuth OAuthClient OnAssertion OnVisit WorkloadIdentity client_document",
    "trio_mcp.oauth.keys": "load_key new_key",
    "trio_mcp.transport.paths": "PathRefused Roots below file_path",
    "trio_mcp.server.questions": "Elicit ElicitUrl Inquiry ListRoots Sample UrlElicitationRequired",
    "trio_mcp.relay.relay": "open_relay",
    "trio_mcp.server.results": "InputRequired ToolError audio file image",
    "trio_mcp.server.run": "Statistics",
    "trio_mcp.server.server": "Server",
    "trio_mcp.server.stdio": "serve_stdio",
    "trio_mcp.oauth.token_stores": "FileTokenStore MemoryTokenStore TokenStore",
    "trio_mcp.client.tools": "ToolFailed",
    "trio_mcp.client.websocket": "UpgradeRefused",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME_OF:
        from trio_mcp.core.migration import MODULE, import_error

        if name in MODULE:  # no AttributeError, which `from trio_mcp import` would replace by one of its own
            raise import_error(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
