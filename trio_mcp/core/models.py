"""The parameters and results of every method, and what they are made of.

One class serves all revisions.  Which fields each revision knows stands on the fields (`since`, `until`), and the codec
obeys it.  Content is in `content`, elicitation in `forms`; tools, resources, prompts, completion, sampling, roots,
capabilities, lifecycle, notifications and subscriptions are here.

Surprising: answers to input requests (`CreateMessageResult`, `ListRootsResult`, `ElicitResult`) are no `Result`s.  The
client's results never had a resultType, for when resultType came they had stopped being results (type-13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import attrs

from trio_mcp.core.content import (
    V2025_03,
    V2025_06,
    V2025_11,
    V2026_07,
    VITAL,
    Annotations,
    ContentBlock,
    Described,
    Icon,
    MalformedContent,
    Meta,
    Model,
    Named,
    Resource,
    ResourceContents,
    SamplingContent,
    Speaker,
    ToolOutcome,
    UnknownContent,
    model,
    ours,
    share,
    since,
    until,
)
from trio_mcp.core.errors import UsageError
from trio_mcp.core.forms import ElicitParams, ElicitResult
from trio_mcp.core.jsonrpc import ABSENT, Absent, Id, Json

__all__ = [
    "AcknowledgedParams", "CacheableResult", "CallToolParams", "CallToolResult", "CancelledParams",
    "ClientCapabilities", "CompleteParams", "CompleteResult", "Completion", "CompletionArgument", "CompletionContext",
    "CreateMessageParams", "CreateMessageRequest", "CreateMessageResult", "DiscoverResult", "ElicitRequest",
    "ElicitationCapability", "GetPromptParams", "GetPromptResult", "Implementation", "InitializeParams",
    "InitializeResult", "InputRequest", "InputRequiredResult", "InputResponse", "ListPromptsResult",
    "ListResourceTemplatesResult", "ListResourcesResult", "ListRootsRequest", "ListRootsResult", "ListToolsResult",
    "ListenParams", "ListingCapability", "LogLevel", "LoggingMessageParams", "ModelHint", "ModelPreferences",
    "PaginatedParams", "Params", "ProgressParams", "Prompt", "PromptArgument", "PromptMessage", "PromptReference",
    "ReadResourceParams", "ReadResourceResult", "ResourceReference", "ResourceTemplate", "ResourceUpdatedParams",
    "ResourcesCapability", "Result", "RetryParams", "Root", "RootsCapability", "SamplingCapability", "SamplingMessage",
    "ServerCapabilities", "SetLevelParams", "SubscribeParams", "SubscriptionFilter", "Tool", "ToolAnnotations",
    "ToolChoice", "ToolExecution",
]  # fmt: skip

LogLevel: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]

# What all parameters and all results of a server share


@model
class Params(Model):
    """Parameters that are nothing but metadata, and the base of all others."""

    meta: Meta | None = attrs.field(default=None, kw_only=True)


@model
class PaginatedParams(Params):
    cursor: str | None = None  # page-08: "" is a cursor


@model
class RetryParams(Params):
    """What a retry adds, when the first attempt was answered with an `InputRequiredResult`."""

    input_responses: Mapping[str, InputResponse | MalformedContent] | None = attrs.field(
        default=None, kw_only=True, metadata=since(V2026_07) | VITAL
    )
    request_state: str | None = attrs.field(default=None, kw_only=True, metadata=since(V2026_07) | VITAL)


@model
class _AnyResult(Model):
    meta: Meta | None = attrs.field(default=None, kw_only=True)


@model
class Result(_AnyResult):
    """A complete result; by itself, an empty one."""

    # rtype-04: absent is complete.  rtype-03: any other value makes it something else, and invalid here.
    result_type: Literal["complete"] = attrs.field(default="complete", kw_only=True, metadata=since(V2026_07))


def _not_negative(milliseconds: int) -> int:
    return max(milliseconds, 0)


@model
class CacheableResult(Result):
    # cache-07, cache-08: a missing or negative time counts as 0.  cache-24: public only by explicit choice.
    ttl_ms: int = attrs.field(default=0, converter=_not_negative, kw_only=True, metadata=since(V2026_07))
    cache_scope: Literal["public", "private"] = attrs.field(default="private", kw_only=True, metadata=since(V2026_07))


# Who is there, and what they can do


@model
class Implementation(Named):
    version: str
    icons: Sequence[Icon | MalformedContent] | None = attrs.field(default=None, metadata=since(V2025_11))
    description: str | None = attrs.field(default=None, metadata=since(V2025_11))
    website_url: str | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class _Capabilities(Model):
    """Each is on when it is there, be it as `{}`.  `revisions.declares` reads the wire form, unknown ones too."""

    experimental: Mapping[str, Meta] | None = attrs.field(default=None, kw_only=True)
    extensions: Mapping[str, Meta] | None = attrs.field(default=None, kw_only=True, metadata=since(V2026_07))


@model
class RootsCapability(Model):
    list_changed: bool | None = attrs.field(default=None, metadata=until(V2025_11))


@model
class SamplingCapability(Model):
    context: Meta | None = attrs.field(default=None, metadata=since(V2025_11))
    tools: Meta | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class ElicitationCapability(Model, since=V2025_06):
    """With neither mode it means forms (elic-11)."""

    form: Meta | None = attrs.field(default=None, metadata=since(V2025_11))
    url: Meta | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class ClientCapabilities(_Capabilities):
    roots: RootsCapability | None = None
    sampling: SamplingCapability | None = None
    elicitation: ElicitationCapability | None = attrs.field(default=None, metadata=since(V2025_06))


@model
class ListingCapability(Model):
    list_changed: bool | None = None


@model
class ResourcesCapability(ListingCapability):
    subscribe: bool | None = None


@model
class ServerCapabilities(_Capabilities):
    tools: ListingCapability | None = None
    prompts: ListingCapability | None = None
    resources: ResourcesCapability | None = None
    completions: Meta | None = attrs.field(default=None, metadata=since(V2025_03))
    logging: Meta | None = None


@model
class InitializeParams(Params, until=V2025_11):
    protocol_version: str
    capabilities: ClientCapabilities
    client_info: Implementation


@model
class InitializeResult(_AnyResult, until=V2025_11):
    protocol_version: str
    capabilities: ServerCapabilities
    server_info: Implementation
    instructions: str | None = None


@model
class DiscoverResult(CacheableResult, since=V2026_07):
    supported_versions: Sequence[str]
    capabilities: ServerCapabilities
    instructions: str | None = None


# Tools


@model
class ToolAnnotations(Model, since=V2025_03):
    """Hints, not to be trusted.  The fields say what was said; the properties what holds, with the defaults."""

    title: str | None = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None

    @property
    def read_only(self) -> bool:
        return self.read_only_hint is True

    @property
    def destructive(self) -> bool:
        return self.destructive_hint is not False

    @property
    def idempotent(self) -> bool:
        return self.idempotent_hint is True

    @property
    def open_world(self) -> bool:
        return self.open_world_hint is not False


@model
class ToolExecution(Model, since=V2025_11, until=V2025_11):
    task_support: Literal["forbidden", "optional", "required"] | None = None


@model
class Tool(Described):
    input_schema: Mapping[str, Json] = attrs.field(
        validator=ours('a JSON Schema with "type": "object"', lambda schema: schema.get("type") == "object")
    )
    output_schema: Mapping[str, Json] | None = attrs.field(default=None, metadata=since(V2025_06))
    annotations: ToolAnnotations | None = attrs.field(default=None, metadata=since(V2025_03))
    execution: ToolExecution | None = attrs.field(default=None, metadata=since(V2025_11) | until(V2025_11))

    @property
    def display_name(self) -> str:
        """What to show people; `name` is for programs."""
        return self.title or (self.annotations and self.annotations.title) or self.name


@model
class ListToolsResult(CacheableResult):
    tools: Sequence[Tool | MalformedContent]
    next_cursor: str | None = None


@model
class CallToolParams(RetryParams):
    name: str
    arguments: Mapping[str, Json] | None = None


@model
class CallToolResult(Result, ToolOutcome):
    """What a tool gave: `content` for the model, `structured_content` for programs, and whether it has failed.

    Structured content can always be given alone: towards a revision that cannot carry it, it is written as text into
    `content`, unless a text is there already, which is taken to say the same.
    """

    content: Sequence[ContentBlock | MalformedContent]
    _structured_content: Json | Absent = attrs.field(
        default=ABSENT, alias="structured_content", metadata=since(V2025_06)
    )
    _is_error: bool | None = attrs.field(default=None, alias="is_error")


# Resources


@model
class ResourceTemplate(Described):
    uri_template: str
    mime_type: str | None = None
    annotations: Annotations | None = None


@model
class ListResourcesResult(CacheableResult):
    resources: Sequence[Resource | MalformedContent]
    next_cursor: str | None = None


@model
class ListResourceTemplatesResult(CacheableResult):
    resource_templates: Sequence[ResourceTemplate | MalformedContent]
    next_cursor: str | None = None


@model
class ReadResourceParams(RetryParams):
    uri: str


@model
class ReadResourceResult(CacheableResult):
    contents: Sequence[ResourceContents | MalformedContent]


@model
class SubscribeParams(Params, until=V2025_11):
    uri: str


# Prompts and completion


@model
class PromptArgument(Named):
    description: str | None = None
    required: bool | None = None


@model
class Prompt(Described):
    arguments: Sequence[PromptArgument | MalformedContent] | None = None


@model
class ListPromptsResult(CacheableResult):
    prompts: Sequence[Prompt | MalformedContent]
    next_cursor: str | None = None


@model
class GetPromptParams(RetryParams):
    name: str
    arguments: Mapping[str, str] | None = None


@model
class PromptMessage(Model):
    role: Speaker
    content: ContentBlock


@model
class GetPromptResult(Result):
    messages: Sequence[PromptMessage | MalformedContent]
    description: str | None = None


@model
class PromptReference(Named, type="ref/prompt"):
    """A prompt, whose argument is to be completed."""


@model
class ResourceReference(Model, type="ref/resource"):
    """`uri` is a URI or a URI template."""

    uri: str


@model
class CompletionArgument(Model):
    name: str
    value: str


@model
class CompletionContext(Model, since=V2025_06):
    """Other arguments of the prompt or template that already have a value."""

    arguments: Mapping[str, str] | None = None


@model
class CompleteParams(Params):
    ref: PromptReference | ResourceReference
    argument: CompletionArgument
    context: CompletionContext | None = attrs.field(default=None, metadata=since(V2025_06))


@model
class Completion(Model):
    values: Sequence[str] = attrs.field(
        validator=ours("at most 100 values; total and has_more tell of the rest", lambda values: len(values) <= 100)
    )
    total: int | None = None
    has_more: bool | None = None


@model
class CompleteResult(Result):
    completion: Completion


# What a server asks of a client


@model
class Root(Model):
    uri: str
    name: str | None = None
    meta: Meta | None = attrs.field(default=None, metadata=since(V2025_06))


@model
class ListRootsResult(Model, has="roots"):
    roots: Sequence[Root | MalformedContent]
    meta: Meta | None = attrs.field(default=None, metadata=until(V2025_11))


@model
class ModelHint(Model):
    name: str | None = None


@model
class ModelPreferences(Model):
    hints: Sequence[ModelHint | MalformedContent] | None = None
    cost_priority: float | None = attrs.field(default=None, validator=share)
    speed_priority: float | None = attrs.field(default=None, validator=share)
    intelligence_priority: float | None = attrs.field(default=None, validator=share)


@model
class _MessageBody(Model):
    role: Speaker
    # One block; from 2025-11-25 on, one or several.
    content: SamplingContent | Sequence[SamplingContent | MalformedContent]

    @property
    def blocks(self) -> Sequence[SamplingContent | MalformedContent]:
        """The content as a sequence, also where it is one block."""
        return self.content if isinstance(self.content, Sequence) else [self.content]


@model
class SamplingMessage(_MessageBody):
    meta: Meta | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class ToolChoice(Model, since=V2025_11):
    mode: Literal["auto", "required", "none"] | None = None


@model
class CreateMessageParams(Model):
    messages: Sequence[SamplingMessage | MalformedContent]
    max_tokens: int
    model_preferences: ModelPreferences | None = None
    system_prompt: str | None = None
    include_context: Literal["none", "thisServer", "allServers"] | None = None
    temperature: float | None = None
    stop_sequences: Sequence[str] | None = None
    metadata: Mapping[str, Json] | None = None
    tools: Sequence[Tool | MalformedContent] | None = attrs.field(default=None, metadata=since(V2025_11) | VITAL)
    tool_choice: ToolChoice | None = attrs.field(default=None, metadata=since(V2025_11) | VITAL)
    # An input request of 2026-07-28 is no request of its own, and has no metadata.
    meta: Meta | None = attrs.field(default=None, metadata=until(V2025_11))


@model
class CreateMessageResult(_MessageBody, has="model"):
    model: str
    stop_reason: str | None = None  # endTurn, stopSequence, maxTokens, toolUse, or anything else
    meta: Meta | None = None


# Input requests: the same questions, asked inside a result (2026-07-28)


@model
class ElicitRequest(Model, since=V2026_07, method="elicitation/create"):
    params: ElicitParams


@model
class CreateMessageRequest(Model, since=V2026_07, method="sampling/createMessage"):
    params: CreateMessageParams


@model
class ListRootsRequest(Model, since=V2026_07, method="roots/list"):
    params: Params | None = None


InputRequest: TypeAlias = ElicitRequest | CreateMessageRequest | ListRootsRequest | UnknownContent
InputResponse: TypeAlias = ElicitResult | CreateMessageResult | ListRootsResult


@model
class InputRequiredResult(_AnyResult, since=V2026_07, resultType="input_required"):
    """Questions to answer, by key, before the same request is sent again with the answers under the same keys."""

    input_requests: Mapping[str, InputRequest | MalformedContent] | None = None
    request_state: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.raw is None and not self.input_requests and self.request_state is None:
            raise UsageError("InputRequiredResult needs input_requests or request_state, or both")  # mrtr-12


# Notifications and subscriptions


@model
class ProgressParams(Params):
    progress_token: Id
    progress: float
    total: float | None = None
    message: str | None = attrs.field(default=None, metadata=since(V2025_03))  # prog-14


@model
class CancelledParams(Params):
    # The schema of 2025-11-25 lets it be absent, but only for tasks, which have a method of their own (cancel-10).
    request_id: Id
    reason: str | None = None


@model
class LoggingMessageParams(Params):
    level: LogLevel
    data: Json
    logger: str | None = None


@model
class SetLevelParams(Params, until=V2025_11):
    level: LogLevel


@model
class ResourceUpdatedParams(Params):
    uri: str


@model
class SubscriptionFilter(Model, since=V2026_07):
    tools_list_changed: bool | None = None
    prompts_list_changed: bool | None = None
    resources_list_changed: bool | None = None
    resource_subscriptions: Sequence[str] | None = None


@model
class ListenParams(Params, since=V2026_07):
    notifications: SubscriptionFilter


@model
class AcknowledgedParams(Params, since=V2026_07):
    notifications: SubscriptionFilter
