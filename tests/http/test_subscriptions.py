"""Subscriptions of the modern revision over HTTP."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import MockClock

from tests.http.client import request
from tests.http.scripted_server import (
    TOOLS,
    UPDATED,
    E,
    ScriptedServer,
    methods,
    play_call,
    wait_until_idle,
)
from tests.http.served import served
from tests.requirements import req
from tests.server.raw_client import ACKNOWLEDGED, PROGRESS
from trio_mcp.core import META_SUBSCRIPTION_ID


def listen_request(id: Any = 1, **wanted: Any) -> dict[str, Any]:
    return request("subscriptions/listen", {"notifications": wanted}, id, revision=E)


@req("sub-01", "sub-02", "sub-05", "sub-11", "sub-13", "sub-14")
async def test_a_subscription_delivers_the_acknowledged_changes_only(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        wanted = {"toolsListChanged": True, "promptsListChanged": True, "resourceSubscriptions": ["r://1"]}
        async with (
            web.stream(listen_request("x", **wanted)) as some,
            web.stream(listen_request(7, resourcesListChanged=True)) as others,
        ):
            for stream, id, agreed in [
                (some, "x", {"toolsListChanged": True, "resourceSubscriptions": ["r://1"]}),
                (others, 7, {"resourcesListChanged": True}),
            ]:
                first = await stream.message()
                assert first["method"] == ACKNOWLEDGED
                assert first["params"]["notifications"] == agreed
                assert first["params"]["_meta"][META_SUBSCRIPTION_ID] == id
            for change in (
                lambda: scripted.server.notify_list_changed("tools"),
                lambda: scripted.server.notify_resource_updated("r://1"),
                lambda: scripted.server.notify_resource_updated("r://2"),
                lambda: scripted.server.notify_list_changed("resources"),
            ):
                change()
                await trio.sleep(1)
            changed = [await some.message() for _ in range(2)]
            assert methods(changed) == [TOOLS, UPDATED]
            assert [each["params"]["_meta"][META_SUBSCRIPTION_ID] for each in changed] == ["x", "x"]
            assert changed[1]["params"]["uri"] == "r://1"
            assert (await others.message())["params"]["_meta"][META_SUBSCRIPTION_ID] == 7
            await wait_until_idle()
            assert (len(some.seen), len(others.seen)) == (3, 2)


@req("http-116")
async def test_progress_and_logs_come_on_the_stream_of_their_call_only(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        wanted = {"toolsListChanged": True, "resourceSubscriptions": ["r://1"]}
        async with web.stream(listen_request(1, **wanted)) as changes:
            message = play_call(
                "progress", "log x", "touch r://1", "tools", "sleep 1", id=1, revision=E, log_level="debug"
            )
            answer = await web.post(message)
            assert methods(answer.messages) == [PROGRESS, "notifications/message", "the answer"]
            await trio.sleep(1)
            assert sorted([(await changes.message())["method"] for _ in range(3)]) == sorted(
                [ACKNOWLEDGED, TOOLS, UPDATED]
            )


@req("cancel-14", "sub-13")
async def test_closing_a_subscription_ends_it(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with served(scripted.server) as web:
        for _ in range(3):
            async with web.stream(listen_request(toolsListChanged=True)) as changes:
                await changes.message()
                assert scripted.server.statistics().listeners == 1
                scripted.server.notify_list_changed("tools")
                assert (await changes.message())["method"] == TOOLS
            await wait_until_idle()
            assert scripted.server.statistics().listeners == 0


@req("sub-08", "http-27")
async def test_a_subscription_ends_with_its_result_when_the_server_drains(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    async with (
        served(scripted.server, ends=False) as web,
        web.stream(listen_request("x", toolsListChanged=True)) as changes,
    ):
        await changes.message()
        async with scripted.server.draining(10):
            (last,) = await changes.rest()
            assert changes.ended
            assert last["id"] == "x"
            assert last["result"]["resultType"] == "complete"
            assert last["result"]["_meta"][META_SUBSCRIPTION_ID] == "x"


@req("http-113")
async def test_a_subscription_is_kept_alive(autojump_clock: MockClock) -> None:
    async with served(ScriptedServer().server) as web, web.stream(listen_request(toolsListChanged=True)) as changes:
        await changes.message()
        with trio.move_on_after(61):
            await changes.message()
        assert changes.comments == 4
