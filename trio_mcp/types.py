"""Models of the protocol, and the types of options, callbacks and events.

A model is a frozen attrs class with the names of Python (`input_schema`), and the codec knows the names of the wire
(`inputSchema`).  A module is loaded when one of its names is used for the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.client.callbacks import FormElicitationRequest as FormElicitationRequest
    from trio_mcp.client.callbacks import GivenRoots as GivenRoots
    from trio_mcp.client.callbacks import OnElicitation as OnElicitation
    from trio_mcp.client.callbacks import OnElicitationUrl as OnElicitationUrl
    from trio_mcp.client.callbacks import OnSampling as OnSampling
    from trio_mcp.client.callbacks import SamplingRequest as SamplingRequest
    from trio_mcp.client.callbacks import UrlElicitationRequest as UrlElicitationRequest
    from trio_mcp.client.client import ToolCall as ToolCall
    from trio_mcp.client.connecting import Target as Target
    from trio_mcp.client.options import ClientOptions as ClientOptions
    from trio_mcp.client.options import RequestOptions as RequestOptions
    from trio_mcp.client.session import OnProgress as OnProgress
    from trio_mcp.client.session import Progress as Progress
    from trio_mcp.client.subscriptions import Subscription as Subscription
    from trio_mcp.core.content import Annotations as Annotations
    from trio_mcp.core.content import AudioContent as AudioContent
    from trio_mcp.core.content import BlobResourceContents as BlobResourceContents
    from trio_mcp.core.content import EmbeddedResource as EmbeddedResource
    from trio_mcp.core.content import Icon as Icon
    from trio_mcp.core.content import ImageContent as ImageContent
    from trio_mcp.core.content import MalformedContent as MalformedContent
    from trio_mcp.core.content import Resource as Resource
    from trio_mcp.core.content import ResourceLink as ResourceLink
    from trio_mcp.core.content import TextContent as TextContent
    from trio_mcp.core.content import TextResourceContents as TextResourceContents
    from trio_mcp.core.content import ToolResultContent as ToolResultContent
    from trio_mcp.core.content import ToolUseContent as ToolUseContent
    from trio_mcp.core.content import UnknownContent as UnknownContent
    from trio_mcp.core.http.event_log import EventLog as EventLog
    from trio_mcp.core.http.fields import HttpRequest as HttpRequest
    from trio_mcp.core.messages import Json as Json
    from trio_mcp.core.messages import JsonObject as JsonObject
    from trio_mcp.core.messages import Request as Request
    from trio_mcp.core.models import CallToolResult as CallToolResult
    from trio_mcp.core.models import Completion as Completion
    from trio_mcp.core.models import CreateMessageResult as CreateMessageResult
    from trio_mcp.core.models import GetPromptResult as GetPromptResult
    from trio_mcp.core.models import ListPromptsResult as ListPromptsResult
    from trio_mcp.core.models import ListResourcesResult as ListResourcesResult
    from trio_mcp.core.models import ListResourceTemplatesResult as ListResourceTemplatesResult
    from trio_mcp.core.models import ListToolsResult as ListToolsResult
    from trio_mcp.core.models import LoggingMessageParams as LoggingMessageParams
    from trio_mcp.core.models import LogLevel as LogLevel
    from trio_mcp.core.models import ModelHint as ModelHint
    from trio_mcp.core.models import ModelPreferences as ModelPreferences
    from trio_mcp.core.models import Prompt as Prompt
    from trio_mcp.core.models import PromptArgument as PromptArgument
    from trio_mcp.core.models import PromptMessage as PromptMessage
    from trio_mcp.core.models import PromptReference as PromptReference
    from trio_mcp.core.models import ReadResourceResult as ReadResourceResult
    from trio_mcp.core.models import ResourceReference as ResourceReference
    from trio_mcp.core.models import ResourceTemplate as ResourceTemplate
    from trio_mcp.core.models import Root as Root
    from trio_mcp.core.models import SamplingMessage as SamplingMessage
    from trio_mcp.core.models import Tool as Tool
    from trio_mcp.core.models import ToolAnnotations as ToolAnnotations
    from trio_mcp.core.models import ToolChoice as ToolChoice
    from trio_mcp.core.opening import Negotiation as Negotiation
    from trio_mcp.core.subscriptions import ChangeEvent as ChangeEvent
    from trio_mcp.core.subscriptions import ChangeKind as ChangeKind
    from trio_mcp.server.dispatch import CallNext as CallNext
    from trio_mcp.server.dispatch import Middleware as Middleware
    from trio_mcp.server.http.listener import HttpAddress as HttpAddress
    from trio_mcp.server.http.options import HttpOptions as HttpOptions
    from trio_mcp.server.questions import Inquiry as Inquiry
    from trio_mcp.server.run import Statistics as Statistics
    from trio_mcp.transport.paths import Roots as Roots
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client.callbacks": (
                "FormElicitationRequest GivenRoots OnElicitation OnElicitationUrl OnSampling SamplingRequest "
                "UrlElicitationRequest"
            ),
            "client.client": "ToolCall",
            "client.connecting": "Target",
            "client.options": "ClientOptions RequestOptions",
            "client.session": "OnProgress Progress",
            "client.subscriptions": "Subscription",
            "core.content": (
                "Annotations AudioContent BlobResourceContents EmbeddedResource Icon ImageContent MalformedContent "
                "Resource ResourceLink TextContent TextResourceContents ToolResultContent ToolUseContent "
                "UnknownContent"
            ),
            "core.http.event_log": "EventLog",
            "core.http.fields": "HttpRequest",
            "core.messages": "Json JsonObject Request",
            "core.models": (
                "CallToolResult Completion CreateMessageResult GetPromptResult ListPromptsResult "
                "ListResourceTemplatesResult ListResourcesResult ListToolsResult LogLevel LoggingMessageParams "
                "ModelHint ModelPreferences Prompt PromptArgument PromptMessage PromptReference ReadResourceResult "
                "ResourceReference ResourceTemplate Root SamplingMessage Tool ToolAnnotations ToolChoice"
            ),
            "core.opening": "Negotiation",
            "core.subscriptions": "ChangeEvent ChangeKind",
            "server.dispatch": "CallNext Middleware",
            "server.http.listener": "HttpAddress",
            "server.http.options": "HttpOptions",
            "server.questions": "Inquiry",
            "server.run": "Statistics",
            "transport.paths": "Roots",
        },
        "trio_mcp",
    )
