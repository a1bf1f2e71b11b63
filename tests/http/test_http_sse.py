"""HTTP+SSE, the transport of 2024-11-05: the server sends all messages on one stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import Answer, HttpClient, Stream, notification, request, response
from tests.http.scripted_server import (
    QUESTIONS,
    SSE_PATHS,
    TOOLS,
    A,
    D,
    E,
    ScriptedServer,
    methods,
    play_call,
    small_pipe,
    text_of,
    wait_until_idle,
)
from tests.http.served import bearer, by_token, served
from tests.requirements import req
from tests.server.raw_client import CANCELLED, PROGRESS
from trio_mcp import Limits


class SseClient:
    """A client of 2024-11-05: it posts its messages, and receives messages on its stream."""

    def __init__(self, web: HttpClient, stream: Stream, target: str) -> None:
        self.web, self.stream, self.target = web, stream, target

    @classmethod
    async def connect(cls, web: HttpClient, **how: Any) -> SseClient:
        stream = await web.open(path="/sse", revision=A, **how)
        event = await stream.event()
        assert event.event == "endpoint"
        return cls(web, stream, event.data.decode())

    async def post(self, message: Any, headers: dict[str, Any] | None = None) -> Answer:
        self.web.expect(message)
        fields = {"Content-Type": "application/json", **(headers or {})}
        return await self.web.send("POST", self.target, fields, json.dumps(message).encode())

    async def initialize(self, headers: dict[str, Any] | None = None) -> None:
        params = {
            "protocolVersion": A,
            "capabilities": {"sampling": {}, "roots": {}},
            "clientInfo": {"name": "old", "version": "1"},
        }
        assert (await self.post(request("initialize", params, "open", revision=A), headers)).status == 202
        opened = await self.stream.message()
        assert opened["result"]["protocolVersion"] == A
        assert (await self.post(notification("notifications/initialized"), headers)).status == 202


@req("sse-04", "sse-05", "sse-07")
async def test_http_sse_delivers_all_messages_on_its_stream(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        posted = await client.post(play_call("progress", "sample", id=1, revision=A))
        assert (posted.status, posted.body) == (202, b"")
        assert (await client.stream.message())["method"] == PROGRESS
        question = await client.stream.message()
        assert question["method"] == "sampling/createMessage"
        assert (await client.post(response(question["id"], QUESTIONS["sample"][1]))).status == 202
        assert text_of(await client.stream.message()) == "done"
        scripted.server.notify_list_changed("tools")
        assert (await client.stream.message())["method"] == TOOLS


@req("sse-09")
async def test_the_endpoint_is_served_beside_http_sse(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        session = await web.initialize(D)
        assert text_of((await web.post(play_call(id=1), session=session, revision=D)).messages[-1]) == "done"
        assert text_of((await web.post(play_call(id=2, revision=E), revision=E)).messages[-1]) == "done"
        assert (await client.post(play_call(id=3, revision=A))).status == 202
        assert text_of(await client.stream.message()) == "done"


@req("sse-05")
@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({}, "/messages?session="),
        ({"public_url": "https://mcp.example/tools"}, "https://mcp.example/tools/messages?session="),
    ],
)
async def test_the_endpoint_event_has_the_url_for_posts(
    options: dict[str, Any], begins: str, autojump_clock: MockClock
) -> None:
    async with served(ScriptedServer().server, **SSE_PATHS, **options) as web:
        client = await SseClient.connect(web)
        assert client.target.startswith(begins)
        client.target = client.target.removeprefix("https://mcp.example/tools")
        await client.initialize()


async def test_events_of_http_sse_have_no_ids_and_no_priming(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        await client.post(play_call("progress", id=1, revision=A))
        events = [await client.stream.event() for _ in range(2)]
        assert [(event.event, event.id) for event in events] == [("message", None)] * 2
        assert all(event.data for event in events)


@req("http-118")
async def test_the_end_of_an_sse_stream_cancels_the_calls_of_its_session(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, **SSE_PATHS) as web:
        client, other = await SseClient.connect(web), await SseClient.connect(web)
        for each, name in ((client, "mine"), (other, "other")):
            await each.initialize()
            await each.post(play_call("progress", "wait go", id=1, revision=A, name=name))
            await each.stream.message()
        await client.stream.aclose()
        await wait_until_idle()
        assert scripted.cancelled == ["mine"]
        assert (await client.post(request("ping", id=2, revision=A))).status == 404
        scripted.go["go"].set()
        assert text_of(await other.stream.message()) == "done"


@req("sse-03")
async def test_an_sse_stream_is_bound_to_the_principal_that_opened_it(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server, authenticate=by_token, **SSE_PATHS) as web:
        client = await SseClient.connect(web, headers=bearer("ada"))
        await client.initialize(bearer("ada"))
        assert (await client.post(request("ping", revision=A))).status == 401
        assert (await client.post(request("ping", revision=A), bearer("bob"))).status == 403
        assert (await client.post(request("ping", revision=A), bearer("ada"))).status == 202
        assert (await client.stream.message())["result"] == {}


@req("http-113")
async def test_an_sse_stream_is_kept_alive(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer(limits=Limits(session_idle_seconds=20)).server, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        with trio.move_on_after(61):
            await client.stream.message()
        assert client.stream.comments == 4
        assert (await client.post(request("ping", revision=A))).status == 202
        assert (await client.stream.message())["result"] == {}


async def test_a_call_over_http_sse_can_be_cancelled(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        await client.post(play_call("progress", "wait never", id=7, revision=A))
        await client.stream.message()
        await client.post(notification(CANCELLED, {"requestId": 7}))
        await wait_until_idle()
        assert scripted.cancelled == [""]
        await client.post(request("ping", id=8, revision=A))
        assert (await client.stream.message())["id"] == 8


async def test_an_sse_stream_ends_when_the_server_drains(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server, ends=False, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        await client.post(play_call("progress", "sleep 3", id=7, revision=A))
        await client.stream.message()
        async with scripted.server.draining(10):
            assert methods(await client.stream.rest()) == ["the answer"]
            assert client.stream.ended


async def test_a_client_that_posts_and_never_reads_gets_429(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(calls=10, outgoing=10, write_seconds=10_000))
    async with served(scripted.server, streams=small_pipe, **SSE_PATHS) as web:
        client = await SseClient.connect(web)
        await client.initialize()
        statuses = [(await client.post(request("ping", id=n, revision=A))).status for n in range(60)]
        taken = statuses.count(202)
        assert statuses == [202] * taken + [429] * (60 - taken)
        assert 20 <= taken < 40
        assert [(await client.stream.message())["id"] for _ in range(taken)] == list(range(taken))
        assert (await client.post(request("ping", id=99, revision=A))).status == 202
        assert (await client.stream.message())["id"] == 99
