"""The differences of the three older revisions, one row each, beyond those in the README's table of features.

A row names revisions, and describes in a sentence how they differ from 2025-11-25.  Its check returns the behaviour of
the package in a revision: `then` in the revisions of the row, `now` in all others up to 2025-11-25.  So a row fails if
a revision loses a difference, or if another revision gains one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, NamedTuple

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, legacy, open_http_link, scripted_server
from tests.client.matrix import tcp_connects_to
from tests.client.memory_links import Peer
from tests.http.client import notification
from tests.http.scripted_server import SSE_PATHS, ScriptedServer, play_call
from tests.http.served import served
from tests.requirements import req
from tests.server.raw_client import CLIENT_INFO, REVISION_NAMES, connected
from trio_mcp import (
    Client,
    Context,
    Elicit,
    ElicitUrl,
    McpError,
    RequestError,
    Sample,
    Server,
    TextContent,
    UsageError,
    open_client,
)
from trio_mcp.core import (
    REVISIONS,
    ClientProtocol,
    Offer,
    Request,
    ToolExecution,
    ToolResultContent,
    ToolUseContent,
    check_meta,
)
from trio_mcp.errors import NotDeclared, NotInThisRevision, UrlElicitationRequired
from trio_mcp.testing import open_memory_pair
from trio_mcp.types import (
    Annotations,
    AudioContent,
    CreateMessageResult,
    Icon,
    Inquiry,
    Prompt,
    PromptArgument,
    PromptReference,
    Resource,
    ResourceLink,
    ResourceTemplate,
    Root,
    SamplingMessage,
    SamplingRequest,
    TextResourceContents,
    Tool,
    ToolAnnotations,
)

A, B, C, D = REVISION_NAMES[:4]

Object = dict[str, Any]
Check = Callable[[str], Awaitable[Any]]
META = {"com.example/key": 1}
SOUND = AudioContent(b"RIFF", "audio/wav")
LINK = ResourceLink("a", "r://a")
ONE, TWO = TextContent("one"), TextContent("two")


class Row(NamedTuple):
    revisions: tuple[str, ...]
    says: str
    check: Check
    then: Any
    now: Any
    among: tuple[str, ...] = (A, B, C, D)  # the revisions in which the check runs
    proves: Any = ()

    def __str__(self) -> str:
        return f"{' '.join(self.revisions)}: {self.says}"


def outcome(response: Object) -> Any:
    return response["error"]["code"] if "error" in response else "answered"


async def attempt(trying: Awaitable[Any]) -> str:
    try:
        await trying
    except McpError as error:
        return type(error).__name__
    return "answered"


# A server that the test plays.


class FakeServer(Peer):
    """`opening` has the params of `initialize`, `received` all later messages of the client.  Arrays are not split."""

    def __init__(self, stream: trio.abc.Stream, revision: str, capabilities: Object) -> None:
        super().__init__(stream, revision, capabilities)
        self.opening: Object = {}
        self.received: list[Any] = []

    async def _receive(self, message: Any) -> None:
        method = message.get("method") if isinstance(message, dict) else None
        if method == "initialize":
            self.opening = message["params"]
            await super()._receive(message)
        elif method != "notifications/initialized":
            self.received.append(message)
        if method == "completion/complete":
            await self.answer(message, {"completion": {"values": []}})

    async def answer_to(self, line: Any) -> Any:
        """The one message with which the client answers a line."""
        before = len(self.received)
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        await self.stream.send_all(data + b"\n")
        await wait_all_tasks_blocked()
        (answer,) = self.received[before:]
        return answer


@contextlib.asynccontextmanager
async def fake_server(
    revision: str, capabilities: Object | None = None, **options: Any
) -> AsyncIterator[tuple[Client, FakeServer]]:
    ours, theirs = memory_stream_pair()
    peer = FakeServer(theirs, revision, capabilities or {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        async with open_client(ours, revision=revision, **options) as client:
            yield client, peer


# Info and capabilities.

NEW_FIELDS = ["description", "icons", "websiteUrl"]


def server_info(*names: str) -> Check:
    async def check(revision: str) -> Any:
        more: Object = {"title": "T", "description": "It serves.", "website_url": "https://example.com"}
        server = Server("s", icons=[Icon("https://example.com/icon.png")], **more)
        async with connected(server, revision) as wire:
            return [name for name in names if name in wire.opening["serverInfo"]]

    return check


def client_info(*names: str) -> Check:
    async def check(revision: str) -> Any:
        more = {"title": "T", "description": "It asks.", "websiteUrl": "https://example.com", "icons": []}
        session = ClientProtocol(Offer({**CLIENT_INFO, **more}, revisions=(REVISIONS[revision],)))
        session.open()
        ((message, _),) = session.outgoing()
        assert isinstance(message, Request)
        return [name for name in names if name in message.params["clientInfo"]]

    return check


def unexpected(*_: object) -> Any:
    raise AssertionError("no request is expected")


def client_declares(capability: str, **offers: Any) -> Check:
    async def check(revision: str) -> Any:
        async with fake_server(revision, **offers) as (_, peer):
            return peer.opening["capabilities"].get(capability, "nothing")

    return check


sampling_with_tools = client_declares("sampling", sampling=unexpected, sampling_tools=True)
both_modes = client_declares("elicitation", elicitation=unexpected, elicitation_url=unexpected)
url_mode_only = client_declares("elicitation", elicitation_url=unexpected)


async def declares_elicitation(revision: str) -> Any:
    return await both_modes(revision) != "nothing"


async def negotiated(revision: str) -> Any:
    """A server's answer to an unknown version, if this is its newest revision, and the revision of a newer client."""
    server = Server("s", revisions=[name for name in REVISION_NAMES if name <= revision])
    async with connected(server, revision, opened=False) as wire:
        params = {"protocolVersion": "2099-01-01", "capabilities": {}, "clientInfo": CLIENT_INFO}
        answered = (await wire.call("initialize", params))["protocolVersion"]
    async with open_memory_pair(server) as pair:
        return answered, pair.client.revision


# Completion.


def server_with_a_prompt() -> Server:
    server = Server("s")

    @server.prompt
    async def review(code: str) -> str:
        return code

    return server


async def completions_declared(revision: str) -> Any:
    server = server_with_a_prompt()
    server.completion(lambda value: [value])
    async with connected(server, revision) as wire:
        return "completions" in wire.opening["capabilities"]


async def server_completes(revision: str) -> Any:
    params = {"ref": {"type": "ref/prompt", "name": "review"}, "argument": {"name": "code", "value": "x"}}
    async with connected(server_with_a_prompt(), revision) as wire:
        return outcome(await wire.exchange("completion/complete", params))


async def client_asks_to_complete(revision: str) -> Any:
    async with fake_server(revision, {"prompts": {}}) as (client, _):
        return await attempt(client.complete(PromptReference("review"), "code", "x"))


async def title_of_a_reference(revision: str) -> Any:
    async with fake_server(revision, {"prompts": {}, "completions": {}}) as (client, peer):
        await client.complete(PromptReference("review", title="Review"), "code", "x")
        return peer.received[0]["params"]["ref"].get("title")


# Arrays of messages, and unreadable lines.


def ping(id: Any) -> Object:
    return {"jsonrpc": "2.0", "id": id, "method": "ping"}


CANCELLED = [notification("notifications/cancelled", {"requestId": id}) for id in (98, 99)]


def shape(said: Any) -> Any:
    return "an array" if isinstance(said, list) else outcome(said)


async def server_receives_requests(revision: str) -> Any:
    async with connected(Server("s"), revision) as wire:
        await wire.send([wire.request("ping"), wire.request("ping")])
        await wire.call("ping")
        *_, said, _ = wire.lines
        return shape(json.loads(said))


async def server_receives_notifications(revision: str) -> Any:
    async with connected(Server("s"), revision) as wire:
        await wire.send(CANCELLED)
        await wire.call("ping")
        return [outcome(error) for error in wire.unaddressed]


async def client_receives_requests(revision: str) -> Any:
    async with fake_server(revision) as (_, peer):
        return shape(await peer.answer_to([ping(1), ping(2)]))


async def requests_posted(revision: str) -> Any:
    async with served(Server("s")) as web:
        session = await web.initialize(revision)
        answer = await web.post([web.request("ping", revision=revision) for _ in range(2)], session=session)
        return answer.status, [outcome(each) for each in answer.messages]


async def notifications_posted(revision: str) -> Any:
    async with served(Server("s")) as web:
        return (await web.post(CANCELLED, session=await web.initialize(revision))).status


async def answered_by_an_array(revision: str) -> Any:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.json([received.answer({"tools": []})])

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [revision]) as bench:
        return await attempt(bench.caller.request("tools/list"))


async def responses_posted(revision: str) -> Any:
    """The bodies that a client posts after it received an array of two requests on the stream of a call."""
    posted: list[Any] = []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "tools/list":
            await out.begin()
            await out.event([ping(1), ping(2)])
            await wait_all_tasks_blocked()
            await out.event(received.answer({"tools": []}))
            await out.end()
        else:
            posted.append(json.loads(received.body))
            await out.reply(202)

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [revision]) as bench:
        await bench.caller.request("tools/list")
    return [shape(each) for each in posted]


async def server_receives_junk(revision: str) -> Any:
    async with connected(Server("s"), revision) as wire:
        wire.post_bytes(b"{\n")
        await wire.call("ping")
        (error,) = wire.unaddressed
        return error.get("id", "no id")


async def client_receives_junk(revision: str) -> Any:
    async with fake_server(revision) as (_, peer):
        return (await peer.answer_to(b"{")).get("id", "no id")


# Errors.


async def wrong_arguments(revision: str) -> Any:
    server = Server("s")

    @server.tool
    async def double(number: int) -> int:
        return 2 * number

    async with connected(server, revision) as wire:
        answer = await wire.exchange("tools/call", {"name": "double", "arguments": {"number": "two"}})
        return "isError" if "result" in answer and answer["result"]["isError"] else outcome(answer)


def raises(make: Callable[[], RequestError]) -> Check:
    async def check(revision: str) -> Any:
        server = Server("s")

        @server.prompt
        async def prompt() -> str:
            raise make()

        async with connected(server, revision) as wire:
            return outcome(await wire.exchange("prompts/get", {"name": "prompt"}))

    return check


code_of_url_elicitation = raises(lambda: RequestError(-32042, "visit"))
url_elicitation_required = raises(lambda: UrlElicitationRequired(ElicitUrl("Log in", "https://example.com")))


# Metadata.


def meta_key(name: str) -> Check:
    async def check(revision: str) -> Any:
        try:
            check_meta({name: 1}, REVISIONS[revision])
        except UsageError:
            return "refused"
        return "free"

    return check


# Lists of a server.

LISTS = {"tools": "tools", "prompts": "prompts", "resources": "resources", "resourceTemplates": "resources/templates"}


def server_with_all_lists() -> Server:
    server = Server("s")
    common: Object = {"title": "T", "meta": META}
    about = Annotations(["user"], 1, "2025-06-18")
    tool = Tool("t", {"type": "object"}, None, ToolAnnotations("T", True), ToolExecution("optional"), **common)
    server.add_tool(tool, lambda ctx, arguments: "")
    server.add_prompt(Prompt("p", [PromptArgument("code", title="Code")], **common), lambda ctx, arguments: "")
    server.add_resource(Resource("r", "r://one", annotations=about, **common), lambda ctx, uri: "")
    template = ResourceTemplate("t", "t://{x}", annotations=about, **common)
    server.add_template(template, lambda ctx, uri, variables: "")
    return server


def listed(read: Callable[[Object], Any]) -> Check:
    """`read` gets the one item of each list."""

    async def check(revision: str) -> Any:
        async with connected(server_with_all_lists(), revision) as wire:
            return read({name: (await wire.call(f"{method}/list"))[name][0] for name, method in LISTS.items()})

    return check


lists_with_metadata = listed(lambda items: [name for name, item in items.items() if "_meta" in item])
title_of_an_argument = listed(lambda items: items["prompts"]["arguments"][0].get("title"))
annotations_of_a_tool = listed(lambda items: items["tools"].get("annotations"))
execution_of_a_tool = listed(lambda items: items["tools"].get("execution"))
annotations_of_a_resource = listed(lambda items: sorted(items["resources"]["annotations"]))


async def result_against_its_schema(revision: str) -> Any:
    """The schema of a tool has an object of numbers, and a middleware replaces a number by a text."""

    async def spoil(ctx: Context, request: Request, call_next: Any) -> Object:
        result: Object = await call_next(request)
        return {**result, "structuredContent": {"degrees": "warm"}} if "structuredContent" in result else result

    server = Server("s", middleware=[spoil])

    @server.tool
    async def forecast() -> dict[str, int]:
        return {"degrees": 3}

    async with open_memory_pair(server, revision=revision) as pair:
        await pair.client.list_tools_page()
        return await attempt(pair.client.call_tool("forecast"))


# Results of handlers.


def gives(value: Any, method: Literal["tools/call", "prompts/get"]) -> Check:
    async def check(revision: str) -> Any:
        server = Server("s")

        async def give() -> Any:
            return value

        (server.tool if method == "tools/call" else server.prompt)(give)
        async with connected(server, revision) as wire:
            answer = await wire.exchange(method, {"name": "give"})
        if "error" in answer or answer["result"].get("isError"):
            assert f"does not exist in {revision}" in str(answer)
            return "refused"
        result = answer["result"]
        (block,) = result["content"] if "content" in result else [each["content"] for each in result["messages"]]
        return sorted(block)

    return check


async def contents_of_a_resource(revision: str) -> Any:
    server = Server("s")

    @server.resource("r://one")
    async def one() -> TextResourceContents:
        return TextResourceContents("r://one", "1", meta=META)

    async with connected(server, revision) as wire:
        (contents,) = (await wire.call("resources/read", {"uri": "r://one"}))["contents"]
        return sorted(contents)


# Requests of a server.

SAMPLED: Object = {"role": "assistant", "content": {"type": "text", "text": "much"}, "model": "m"}
ANSWERS = {"elicitation/create": lambda params: {"action": "decline"}, "sampling/createMessage": lambda params: SAMPLED}


def asks(make: Callable[[], Inquiry[Any]], read: Callable[[Object], Any] | None = None, **options: Any) -> Check:
    """The value that `read` takes from the request, or the name of the exception that the handler gets."""

    async def check(revision: str) -> Any:
        server = Server("s")

        @server.tool
        async def ask(ctx: Context) -> str:
            try:
                await ctx.ask(it=make())
            except (NotInThisRevision, NotDeclared) as error:
                return type(error).__name__
            return "asked"

        async with connected(server, revision, answers=ANSWERS, **options) as wire:
            result = await wire.call("tools/call", {"name": "ask"})
            return result["content"][0]["text"] if read is None or not wire.asked else read(wire.asked[0][1])

    return check


def sample(content: Any) -> Sample:
    return Sample([SamplingMessage("user", content, meta=META)], max_tokens=9)


def sample_of_a_tool_use() -> Sample:
    use, result = ToolUseContent("1", "look", {}), ToolResultContent("1", [ONE])
    return Sample([SamplingMessage("assistant", use), SamplingMessage("user", result)], max_tokens=9)


def form(field: Object) -> Elicit[Any]:
    return Elicit("Which?", {"type": "object", "properties": {"value": field}})


COLOURS: Object = {"type": "string", "oneOf": [{"const": "r", "title": "Red"}, {"const": "g", "title": "Green"}]}
SIZES: Object = {"type": "array", "items": {"type": "string", "enum": ["S", "M"]}}

model_is_asked_about_sound = asks(lambda: sample(SOUND))
model_is_asked_about_blocks = asks(lambda: sample([ONE, TWO]))
model_is_asked_about_a_block = asks(lambda: sample([ONE]), lambda params: type(params["messages"][0]["content"]))
model_is_told_of_tools = asks(sample_of_a_tool_use)
message_to_a_model = asks(lambda: sample(ONE), lambda params: sorted(params["messages"][0]))
context_is_asked_for = asks(
    lambda: Sample("?", max_tokens=9, include_context="thisServer"), capabilities={"sampling": {}}
)
form_without_capability = asks(lambda: form(COLOURS), capabilities={})
mode_of_a_form = asks(lambda: form(COLOURS), lambda params: params.get("mode"))
titled_choice = asks(lambda: form(COLOURS), lambda params: sorted(params["requestedSchema"]["properties"]["value"]))
choice_of_several = asks(lambda: form(SIZES))


# Answers of a client.

SAMPLING: Object = {"messages": [{"role": "user", "content": {"type": "text", "text": "?"}}], "maxTokens": 9}
SAMPLING_WITH_TOOLS: Object = {**SAMPLING, "tools": [{"name": "look", "inputSchema": {"type": "object"}}]}
FORM: Object = {"message": "?", "requestedSchema": {"type": "object", "properties": {"value": SIZES}}}


def answers(method: str, params: Object, read: Callable[[Object], Any] | None = None, **offers: Any) -> Check:
    """The value that `read` takes from the answer of a client with these options, or the code of its error."""

    async def check(revision: str) -> Any:
        async with fake_server(revision, **offers) as (_, peer):
            response = await peer.answer_to({**ping(1), "method": method, "params": params})
            return outcome(response) if read is None or "error" in response else read(response["result"])

    return check


def model_answers(content: Any) -> Check:
    answer = CreateMessageResult("assistant", content, "m")
    return answers("sampling/createMessage", SAMPLING, sampling=lambda asked: answer)


root_of_a_client = answers(
    "roots/list", {}, lambda result: sorted(result["roots"][0]), roots=[Root("file:///srv", meta=META)]
)
tools_were_not_offered = answers("sampling/createMessage", SAMPLING_WITH_TOOLS, sampling=lambda asked: ("much", "m"))
several_values = answers("elicitation/create", FORM, elicitation=lambda asked: {"value": ["S"]})


async def client_is_asked_by_a_form(revision: str) -> Any:
    async with fake_server(revision, elicitation=lambda asked: None) as (_, peer):
        response = await peer.answer_to({**ping(1), "method": "elicitation/create", "params": FORM})
        return "no such method" if "does not exist" in str(response) else outcome(response)


async def tools_in_a_request(revision: str) -> Any:
    heard: list[Any] = []

    def think(asked: SamplingRequest) -> tuple[str, str]:
        heard.append(asked.params.tools)
        return "much", "m"

    async with fake_server(revision, sampling=think, sampling_tools=True) as (_, peer):
        await peer.answer_to({**ping(1), "method": "sampling/createMessage", "params": SAMPLING_WITH_TOOLS})
    return [tools and [tool.name for tool in tools] for tools in heard]


async def url_elicitation_complete(revision: str) -> Any:
    """Whether the client takes the notification as a deviation."""
    async with fake_server(revision, elicitation_url=lambda page: True) as (client, peer):
        await peer.notify("notifications/elicitation/complete", {"elicitationId": "1"})
        await wait_all_tasks_blocked()
        return ["is not a notification" in each for each in client.deviations]


# HTTP.


async def first_event(revision: str) -> Any:
    async with served(ScriptedServer().server) as web:
        session = await web.initialize(revision)
        async with web.stream(play_call("progress", revision=revision), session=session) as stream:
            return "a message" if (await stream.event()).data else "nothing"


async def stream_is_ended(revision: str) -> Any:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        session = await web.initialize(revision)
        async with web.stream(play_call("progress", "hang-up 2", revision=revision), session=session) as stream:
            await stream.rest()
        await wait_all_tasks_blocked()
        return scripted.answers


async def client_names_its_revision(revision: str) -> Any:
    named: list[str | None] = []

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        named.append(received.headers.get("MCP-Protocol-Version"))
        await out.json(received.answer({"tools": []}))

    async with scripted_server(legacy(handle)) as server, open_http_link(server.connect, [revision]) as bench:
        await bench.caller.request("tools/list")
    assert named in ([None], [revision])
    return named == [revision]


async def served_without_a_session(revision: str) -> Any:
    """Whether a client names its revision, and whether the server serves the request in it."""
    server = Server("s")

    @server.tool
    async def spoken(ctx: Context) -> str:
        return ctx.revision

    async with served(server, sessions=False) as web:
        call = web.request("tools/call", {"name": "spoken"}, revision=revision)
        answer = await web.post(call, revision=revision)
        named = "MCP-Protocol-Version" in web.headers_for(call, revision, None)
        return named, answer.result["content"][0]["text"] == revision


async def after_410(revision: str) -> Any:
    """Whether a client tries HTTP+SSE if its POST gets the status 410."""

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(410)

    async def open_it() -> None:
        async with open_client(URL, revision=revision):
            raise AssertionError("it was opened")

    async with scripted_server(handle) as server:
        with tcp_connects_to(server.connect):
            assert await attempt(open_it()) != "answered"
        return "GET" in server.operations


async def answer_by_http(revision: str) -> Any:
    """The status of a POST, and whether the answer is in its body, by the transport that the revision describes."""
    async with served(Server("s"), **SSE_PATHS) as web:
        if REVISIONS[revision].http is not None:
            answer = await web.call("ping", session=await web.initialize(revision))
            return answer.status, answer.result == {}
        async with web.stream(revision=revision, path="/sse") as stream:
            event = await stream.event()
            assert event.event == "endpoint"
            params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": CLIENT_INFO}
            message = web.request("initialize", params, revision=revision)
            web.expect(message)
            body = json.dumps(message).encode()
            answer = await web.send("POST", event.data.decode(), {"Content-Type": "application/json"}, body)
            assert (await stream.message())["result"]["protocolVersion"] == revision
            return answer.status, answer.body != b""


# The table.

OLDER, BEFORE_C = (A, B, C), (A, B)
SINCE_B, SINCE_C = (B, C, D), (C, D)
LINK_FIELDS, AUDIO_FIELDS = ["name", "type", "uri"], ["data", "mimeType", "type"]
ANNOTATION_FIELDS = ["audience", "priority"]
ROWS = [
    # Info and capabilities.
    Row(BEFORE_C, "a server has no title", server_info("title"), [], ["title"]),
    Row(OLDER, "a server has no description, icons and website", server_info(*NEW_FIELDS), [], NEW_FIELDS),
    Row(BEFORE_C, "a client has no title", client_info("title"), [], ["title"]),
    Row(OLDER, "a client has no description, icons and website", client_info(*NEW_FIELDS), [], NEW_FIELDS),
    Row(OLDER, "a client does not declare that its model uses tools", sampling_with_tools, {}, {"tools": {}}),
    Row(BEFORE_C, "a client declares no elicitation", declares_elicitation, False, True),
    Row((C,), "elicitation has no modes", both_modes, {}, {"form": {}, "url": {}}, SINCE_C),
    Row(OLDER, "a client that only opens pages declares no elicitation", url_mode_only, "nothing", {"url": {}}),
    Row((A,), "a server of 2024-11-05 answers an unknown version by its own", negotiated, (A, A), (D, D), (A, D)),
    Row((B,), "a server of 2025-03-26 answers an unknown version by its own", negotiated, (B, B), (D, D), (B, D)),
    Row((C,), "a server of 2025-06-18 answers an unknown version by its own", negotiated, (C, C), (D, D), (C, D)),
    # Completion.
    Row((A,), "a server does not declare completions", completions_declared, False, True, proves=req("cmpl-10")),
    Row((A,), "a server completes undeclared", server_completes, "answered", -32601, proves=req("cmpl-10")),
    Row(
        (A,),
        "a client asks for completions that are not declared",
        client_asks_to_complete,
        "answered",
        "NotDeclared",
        proves=req("life-15"),
    ),
    Row(BEFORE_C, "a reference to a prompt has no title", title_of_a_reference, None, "Review"),
    # Arrays of messages, and unreadable lines.
    Row((B,), "a server answers an array of requests by one array", server_receives_requests, "an array", -32600),
    Row((B,), "a server has no answer to an array of notifications", server_receives_notifications, [], [-32600]),
    Row((B,), "a client answers an array of requests by one array", client_receives_requests, "an array", -32600),
    Row(
        (B,),
        "a POST of several requests is answered by all responses",
        requests_posted,
        (200, ["answered", "answered"]),
        (400, [-32600]),
    ),
    Row((B,), "a POST of several notifications is accepted", notifications_posted, 202, 400),
    Row((B,), "an HTTP response may be an array", answered_by_an_array, "answered", "RemoteProtocolError"),
    Row((B,), "a client posts an array of responses", responses_posted, ["an array"], [-32600], proves=req("http-10")),
    Row(OLDER, "a server's error about an unreadable line has a null id", server_receives_junk, None, "no id"),
    Row(OLDER, "a client's error about an unreadable line has a null id", client_receives_junk, None, "no id"),
    # Errors.
    Row(
        OLDER,
        "wrong arguments of a tool are a protocol error",
        wrong_arguments,
        -32602,
        "isError",
        proves=req("tool-32"),
    ),
    Row(OLDER, "the error code -32042 does not leave", code_of_url_elicitation, -32603, -32042),
    Row(OLDER, "a handler cannot demand the visit of a page", url_elicitation_required, -32603, -32042),
    # Metadata.
    Row(BEFORE_C, "the keys of metadata have no grammar", meta_key("-/x"), "free", "refused"),
    Row((C,), "a prefix with mcp before its last label is reserved", meta_key("mcp.dev/x"), "refused", "free"),
    Row(OLDER, "a prefix with mcp as its last label is free", meta_key("dev.mcp/x"), "free", "refused"),
    Row(BEFORE_C, "tools, prompts, resources and templates have no metadata", lists_with_metadata, [], [*LISTS]),
    Row(
        BEFORE_C,
        "a block of content has no metadata",
        gives(TextContent("hi", meta=META), "tools/call"),
        ["text", "type"],
        ["_meta", "text", "type"],
    ),
    Row(
        BEFORE_C,
        "the contents of a resource have no metadata",
        contents_of_a_resource,
        ["text", "uri"],
        ["_meta", "text", "uri"],
    ),
    Row(BEFORE_C, "a root has no metadata", root_of_a_client, ["uri"], ["_meta", "uri"]),
    Row(
        OLDER,
        "a message to a model has no metadata",
        message_to_a_model,
        ["content", "role"],
        ["_meta", "content", "role"],
    ),
    # Lists.
    Row(BEFORE_C, "an argument of a prompt has no title", title_of_an_argument, None, "Code"),
    Row((A,), "a tool has no annotations", annotations_of_a_tool, None, {"title": "T", "readOnlyHint": True}),
    Row(OLDER, "a tool does not say whether it runs as a task", execution_of_a_tool, None, {"taskSupport": "optional"}),
    Row(
        BEFORE_C,
        "a resource does not say when it was modified",
        annotations_of_a_resource,
        ANNOTATION_FIELDS,
        sorted([*ANNOTATION_FIELDS, "lastModified"]),
    ),
    Row(
        BEFORE_C,
        "a client has no output schema to judge a result by",
        result_against_its_schema,
        "answered",
        "RemoteProtocolError",
    ),
    # Content.
    Row((A,), "a tool gives no sound", gives(SOUND, "tools/call"), "refused", AUDIO_FIELDS),
    Row((A,), "a prompt holds no sound", gives(SOUND, "prompts/get"), "refused", AUDIO_FIELDS),
    Row((A,), "a model is not asked about sound", model_is_asked_about_sound, "NotInThisRevision", "asked"),
    Row((A,), "a model does not answer by sound", model_answers(SOUND), -32603, "answered"),
    Row(BEFORE_C, "a tool gives no links", gives(LINK, "tools/call"), "refused", LINK_FIELDS),
    Row(BEFORE_C, "a prompt holds no links", gives(LINK, "prompts/get"), "refused", LINK_FIELDS),
    # Sampling.
    Row(
        OLDER,
        "a message to a model has one block only",
        model_is_asked_about_blocks,
        "NotInThisRevision",
        "asked",
        proves=req("type-11"),
    ),
    Row(OLDER, "the block of a message stands in no array", model_is_asked_about_a_block, dict, list),
    Row(OLDER, "a model is not told of uses of tools", model_is_told_of_tools, "NotInThisRevision", "asked"),
    Row(
        OLDER,
        "a model answers by one block only",
        model_answers([ONE, TWO]),
        -32603,
        "answered",
        proves=req("type-11"),
    ),
    Row(OLDER, "a model hears of no tools", tools_in_a_request, [None], [["look"]]),
    Row(OLDER, "a client ignores tools that it did not declare", tools_were_not_offered, "answered", -32602),
    Row(OLDER, "no capability is needed to ask for context", context_is_asked_for, "asked", "NotDeclared"),
    # Elicitation.
    Row(
        BEFORE_C,
        "a handler learns that a revision has no forms, also if the client does not declare them",
        form_without_capability,
        "NotInThisRevision",
        "NotDeclared",
    ),
    Row(BEFORE_C, "a client knows no question by a form", client_is_asked_by_a_form, "no such method", "answered"),
    Row((C,), "a form has no mode", mode_of_a_form, None, "form", SINCE_C),
    Row(
        (C,),
        "the titles of choices stand apart from their values",
        titled_choice,
        ["enum", "enumNames", "type"],
        ["oneOf", "type"],
        SINCE_C,
    ),
    Row((C,), "a form offers no choice of several", choice_of_several, "NotInThisRevision", "asked", SINCE_C),
    Row(
        (C,),
        "a field of an answer has one value only",
        several_values,
        -32603,
        "answered",
        SINCE_C,
        req("type-17"),
    ),
    Row(OLDER, "a client knows no notification of a page that is done", url_elicitation_complete, [True], []),
    # HTTP.
    Row((B, C), "a stream begins with a message", first_event, "a message", "nothing", SINCE_B),
    Row(
        (B, C),
        "a server ends no stream before the response",
        stream_is_ended,
        [False],
        [True],
        SINCE_B,
        req("http-26"),
    ),
    Row(BEFORE_C, "a client does not name its revision in a header", client_names_its_revision, False, True),
    Row(
        (B,),
        "a request without a header that names a revision is one of 2025-03-26",
        served_without_a_session,
        (False, True),
        (True, True),
        SINCE_B,
    ),
    Row(OLDER, "a client looks for HTTP+SSE after 410", after_410, True, False, proves=req("sse-10")),
    Row((A,), "the answer to a POST is not in its body", answer_by_http, (202, False), (200, True)),
]


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row), marks=row.proves) for row in ROWS])
async def test_an_older_revision_differs_as_its_row_says(row: Row, autojump_clock: MockClock) -> None:
    with trio.fail_after(600):
        for revision in row.among:
            seen = await row.check(revision)
            assert (revision, seen) == (revision, row.then if revision in row.revisions else row.now)


def test_every_row_is_a_difference_and_is_in_the_table_once() -> None:
    for row in ROWS:
        assert row.then != row.now, row
        assert set(row.revisions) < set(row.among), row
        assert D in set(row.among) - set(row.revisions), row
    assert len({str(row) for row in ROWS}) == len(ROWS)
