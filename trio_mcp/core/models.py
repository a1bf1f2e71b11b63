"""The parameters and results of the methods that programs serve and call, and the objects inside them.

One class serves all revisions.  The marks on a field (`since`, `until`) say which revisions know it, and the codec
obeys them.  Content is in `content` and elicitation in `forms`.  This module has the rest: tools, resources, prompts,
completion, sampling, roots and log messages.  The messages that a session reads and writes itself (handshake,
capabilities, progress, cancellations, subscriptions) have no classes; the session hands out its own events for them.

Surprising: the answers to input requests (`CreateMessageResult`, `ListRootsResult`, `ElicitResult`) do not inherit from
`Result`.  A client's results never had a resultType: since the revision with resultType, a client sends no results
(type-13).
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
    checked,
    fraction,
    model,
    since,
    until,
)
from trio_mcp.core.errors import UsageError
from trio_mcp.core.forms import ElicitParams, ElicitResult
from trio_mcp.core.messages import ABSENT, Absent, Json

__all__ = [
    "CacheableResult", "CallToolParams", "CallToolResult", "CompleteParams", "CompleteResult", "Completion",
    "CompletionArgument", "CompletionContext", "CreateMessageParams", "CreateMessageRequest", "CreateMessageResult",
    "ElicitRequest", "GetPromptParams", "GetPromptResult", "Implementation", "InputRequest", "InputRequiredResult",
    "InputResponse", "ListPromptsResult", "ListResourceTemplatesResult", "ListResourcesResult", "ListRootsRequest",
    "ListRootsResult", "ListToolsResult", "LogLevel", "LoggingMessageParams", "ModelHint", "ModelPreferences",
    "PaginatedParams", "Params", "Prompt", "PromptArgument", "PromptMessage", "PromptReference", "ReadResourceParams",
    "ReadResourceResult", "ResourceReference", "ResourceTemplate", "Result", "RetryParams", "Root", "SamplingMessage",
    "Tool", "ToolAnnotations", "ToolChoice", "ToolExecution",
]  # fmt: skip

LogLevel: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]

# The members that all parameters, and all results of a server, share


@model
class Params(Model):
    """The base of all parameters; by itself, parameters with metadata only."""

    meta: Meta | None = attrs.field(default=None, kw_only=True)


@model
class PaginatedParams(Params):
    """Parameters of a request for one page of a list; `cursor` is None for the first page."""

    cursor: str | None = None  # page-08: "" is a cursor


@model
class RetryParams(Params):
    """The members that a client adds when it repeats a request that was answered with an `InputRequiredResult`."""

    input_responses: Mapping[str, InputResponse | MalformedContent] | None = attrs.field(
        default=None, kw_only=True, metadata=since(V2026_07) | VITAL
    )
    request_state: str | None = attrs.field(default=None, kw_only=True, metadata=since(V2026_07) | VITAL)


@model
class _AnyResult(Model):
    """The members that all results share."""

    meta: Meta | None = attrs.field(default=None, kw_only=True)


@model
class Result(_AnyResult):
    """The base of all complete results; by itself, an empty result."""

    # rtype-04: an absent member means complete.  rtype-03: any other value is another kind of result, invalid here.
    result_type: Literal["complete"] = attrs.field(default="complete", kw_only=True, metadata=since(V2026_07))


def _not_negative(milliseconds: int) -> int:
    return max(milliseconds, 0)


@model
class CacheableResult(Result):
    """The base of the results that a client may cache: for `ttl_ms`, and for every user if the scope is "public"."""

    # cache-07, cache-08: a missing or negative time counts as 0.  cache-24: a result is public only by explicit choice.
    ttl_ms: int = attrs.field(default=0, converter=_not_negative, kw_only=True, metadata=since(V2026_07))
    cache_scope: Literal["public", "private"] = attrs.field(default="private", kw_only=True, metadata=since(V2026_07))


# The programs at both ends


@model
class Implementation(Named):
    """The name and version of a client or server program."""

    version: str
    icons: Sequence[Icon | MalformedContent] | None = attrs.field(default=None, metadata=since(V2025_11))
    description: str | None = attrs.field(default=None, metadata=since(V2025_11))
    website_url: str | None = attrs.field(default=None, metadata=since(V2025_11))


# Tools


@model
class ToolAnnotations(Model, since=V2025_03):
    """Hints about a tool's behaviour; do not trust them unless you trust the server.

    The fields hold the hints as they were sent, None if absent; the properties apply the protocol's defaults.
    """

    title: str | None = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None

    @property
    def read_only(self) -> bool:
        """Whether the tool changes nothing; False by default."""
        return self.read_only_hint is True

    @property
    def destructive(self) -> bool:
        """Whether the tool may delete or overwrite; True by default."""
        return self.destructive_hint is not False

    @property
    def idempotent(self) -> bool:
        """Whether a repeated call has no further effect; False by default."""
        return self.idempotent_hint is True

    @property
    def open_world(self) -> bool:
        """Whether the tool deals with the outside world, such as the web; True by default."""
        return self.open_world_hint is not False


@model
class ToolExecution(Model, since=V2025_11, until=V2025_11):
    """Whether a tool can, must or must not be called as a task."""

    task_support: Literal["forbidden", "optional", "required"] | None = None


@model
class Tool(Described):
    """A tool that a server lists: its name, its description and the schemas of its arguments and result."""

    input_schema: Mapping[str, Json] = attrs.field(
        validator=checked('a JSON Schema with "type": "object"', lambda schema: schema.get("type") == "object")
    )
    output_schema: Mapping[str, Json] | None = attrs.field(default=None, metadata=since(V2025_06))
    annotations: ToolAnnotations | None = attrs.field(default=None, metadata=since(V2025_03))
    execution: ToolExecution | None = attrs.field(default=None, metadata=since(V2025_11) | until(V2025_11))

    @property
    def display_name(self) -> str:
        """The title if there is one, otherwise the title of the annotations, otherwise the name."""
        return self.title or (self.annotations and self.annotations.title) or self.name


@model
class ListToolsResult(CacheableResult):
    """Result of `tools/list`: one page of tools; `next_cursor` asks for the next page."""

    tools: Sequence[Tool | MalformedContent]
    next_cursor: str | None = None


@model
class CallToolParams(RetryParams):
    """Parameters of `tools/call`."""

    name: str
    arguments: Mapping[str, Json] | None = None


@model
class CallToolResult(Result, ToolOutcome):
    """Result of `tools/call`: `content` for the model, `structured_content` for programs, and whether the tool failed.

    A server can always give structured content alone.  For a revision that cannot carry it, it is written as text into
    `content`, unless `content` already has a text: that text is expected to say the same.
    """

    content: Sequence[ContentBlock | MalformedContent]
    _structured_content: Json | Absent = attrs.field(
        default=ABSENT, alias="structured_content", metadata=since(V2025_06)
    )
    _is_error: bool | None = attrs.field(default=None, alias="is_error")


# Resources


@model
class ResourceTemplate(Described):
    """A URI template that a server lists; each URI that matches it is a resource."""

    uri_template: str
    mime_type: str | None = None
    annotations: Annotations | None = None


@model
class ListResourcesResult(CacheableResult):
    """Result of `resources/list`: one page of resources; `next_cursor` asks for the next page."""

    resources: Sequence[Resource | MalformedContent]
    next_cursor: str | None = None


@model
class ListResourceTemplatesResult(CacheableResult):
    """Result of `resources/templates/list`: one page of templates; `next_cursor` asks for the next page."""

    resource_templates: Sequence[ResourceTemplate | MalformedContent]
    next_cursor: str | None = None


@model
class ReadResourceParams(RetryParams):
    """Parameters of `resources/read`."""

    uri: str


@model
class ReadResourceResult(CacheableResult):
    """Result of `resources/read`: the contents of the resource, which can have several parts."""

    contents: Sequence[ResourceContents | MalformedContent]


# Prompts and completion


@model
class PromptArgument(Named):
    """One argument of a prompt."""

    description: str | None = None
    required: bool | None = None


@model
class Prompt(Described):
    """A prompt that a server lists: its name, its description and its arguments."""

    arguments: Sequence[PromptArgument | MalformedContent] | None = None


@model
class ListPromptsResult(CacheableResult):
    """Result of `prompts/list`: one page of prompts; `next_cursor` asks for the next page."""

    prompts: Sequence[Prompt | MalformedContent]
    next_cursor: str | None = None


@model
class GetPromptParams(RetryParams):
    """Parameters of `prompts/get`."""

    name: str
    arguments: Mapping[str, str] | None = None


@model
class PromptMessage(Model):
    """One message of a prompt."""

    role: Speaker
    content: ContentBlock


@model
class GetPromptResult(Result):
    """Result of `prompts/get`: the messages of the prompt."""

    messages: Sequence[PromptMessage | MalformedContent]
    description: str | None = None


@model
class PromptReference(Named, type="ref/prompt"):
    """The prompt that has the argument to complete."""


@model
class ResourceReference(Model, type="ref/resource"):
    """The resource template that has the argument to complete; `uri` is the template, or a URI."""

    uri: str


@model
class CompletionArgument(Model):
    """The argument to complete, and the text that the user has typed so far."""

    name: str
    value: str


@model
class CompletionContext(Model, since=V2025_06):
    """The other arguments of the prompt or template that already have a value."""

    arguments: Mapping[str, str] | None = None


@model
class CompleteParams(Params):
    """Parameters of `completion/complete`."""

    ref: PromptReference | ResourceReference
    argument: CompletionArgument
    context: CompletionContext | None = attrs.field(default=None, metadata=since(V2025_06))


@model
class Completion(Model):
    """Suggested values, at most 100; `total` and `has_more` tell of values beyond these."""

    values: Sequence[str] = attrs.field(
        validator=checked("at most 100 values; total and has_more tell of the rest", lambda values: len(values) <= 100)
    )
    total: int | None = None
    has_more: bool | None = None


@model
class CompleteResult(Result):
    """Result of `completion/complete`."""

    completion: Completion


# The requests of a server to a client


@model
class Root(Model):
    """A directory or file that the server may work on, as a file: URI."""

    uri: str
    name: str | None = None
    meta: Meta | None = attrs.field(default=None, metadata=since(V2025_06))


@model
class ListRootsResult(Model, has="roots"):
    """The client's answer to `roots/list`."""

    roots: Sequence[Root | MalformedContent]
    meta: Meta | None = attrs.field(default=None, metadata=until(V2025_11))


@model
class ModelHint(Model):
    """A model name, or part of one, that the server would like."""

    name: str | None = None


@model
class ModelPreferences(Model):
    """The model that a server would like: hints, best first, and priorities between 0 and 1."""

    hints: Sequence[ModelHint | MalformedContent] | None = None
    cost_priority: float | None = attrs.field(default=None, validator=fraction)
    speed_priority: float | None = attrs.field(default=None, validator=fraction)
    intelligence_priority: float | None = attrs.field(default=None, validator=fraction)


@model
class _MessageBody(Model):
    """The members that a sampling message and a sampling result share."""

    role: Speaker
    # One block; from 2025-11-25 on, one or several.
    content: SamplingContent | Sequence[SamplingContent | MalformedContent]

    @property
    def blocks(self) -> Sequence[SamplingContent | MalformedContent]:
        """The content as a sequence, even if it is one block."""
        return self.content if isinstance(self.content, Sequence) else [self.content]


@model
class SamplingMessage(_MessageBody):
    """One message of a conversation to sample from."""

    meta: Meta | None = attrs.field(default=None, metadata=since(V2025_11))


@model
class ToolChoice(Model, since=V2025_11):
    """Whether the model must, may or must not use tools."""

    mode: Literal["auto", "required", "none"] | None = None


@model
class CreateMessageParams(Model):
    """Parameters of `sampling/createMessage`: ask the client's model for a message."""

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
    # In 2026-07-28 a sampling request is part of a result, not a request, and has no metadata.
    meta: Meta | None = attrs.field(default=None, metadata=until(V2025_11))


@model
class CreateMessageResult(_MessageBody, has="model"):
    """The client's answer to `sampling/createMessage`: the message, and the model that wrote it."""

    model: str
    stop_reason: str | None = None  # endTurn, stopSequence, maxTokens, toolUse, or another text
    meta: Meta | None = None


# Input requests: the same requests to a client, inside a result (2026-07-28)


@model
class ElicitRequest(Model, since=V2026_07, method="elicitation/create"):
    """An elicitation inside an `InputRequiredResult`."""

    params: ElicitParams


@model
class CreateMessageRequest(Model, since=V2026_07, method="sampling/createMessage"):
    """A sampling request inside an `InputRequiredResult`."""

    params: CreateMessageParams


@model
class ListRootsRequest(Model, since=V2026_07, method="roots/list"):
    """A request for the roots inside an `InputRequiredResult`."""

    params: Params | None = None


InputRequest: TypeAlias = ElicitRequest | CreateMessageRequest | ListRootsRequest | UnknownContent
InputResponse: TypeAlias = ElicitResult | CreateMessageResult | ListRootsResult


@model
class InputRequiredResult(_AnyResult, since=V2026_07, resultType="input_required"):
    """The server needs input: answer each request in `input_requests`, then repeat the call.

    The repeated call carries the answers under the same keys in `input_responses`, and `request_state` unchanged.
    """

    input_requests: Mapping[str, InputRequest | MalformedContent] | None = None
    request_state: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.raw is None and not self.input_requests and self.request_state is None:
            raise UsageError("InputRequiredResult needs input_requests or request_state, or both")  # mrtr-12


# Notifications


@model
class LoggingMessageParams(Params):
    """Parameters of the notification with a log message."""

    level: LogLevel
    data: Json
    logger: str | None = None
