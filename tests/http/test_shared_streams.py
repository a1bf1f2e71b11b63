"""Events of streams in the store: they are written after they are sent, in order, and without gaps."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.http.replicas import replicas
from tests.http.scripted_server import D, play_call
from trio_mcp import Context
from trio_mcp.core.http import LoggedEvent
from trio_mcp.server.http import StreamItem, read_item
from trio_mcp.stores import StoreFailed, StoreFull


@given(st.integers(0, 1000), st.lists(st.binary(max_size=20), max_size=5), st.lists(st.integers() | st.text()))
def test_a_written_item_can_be_read(first: int, data: list[bytes], ids: list[Any]) -> None:
    item = read_item(StreamItem(first, data, ids).text())
    assert (item.first, item.begins, item.data, item.ids) == (first, first, data, ids)
    events = [LoggedEvent(f"s-{first + n}", each) for n, each in enumerate(data)]
    for number in range(first - 1, first + len(data)):
        assert item.after("s", number) == events[number - first + 1 :]


@pytest.mark.parametrize("item", [StreamItem(end=True), StreamItem(next="another")])
def test_an_item_without_events(item: StreamItem) -> None:
    found = read_item(item.text())
    assert (found, found.begins, found.after("s", -1)) == (item, None, [])


async def test_events_wait_while_the_store_is_away(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*args: Any, **options: Any) -> int:
        raise StoreFailed("the store is away")

    async with replicas(monkeypatch=monkeypatch) as group:
        session = await group.webs[0].initialize(D)
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "append", fail)
            stream = await group.webs[0].open(play_call("many 20", "wait x"), session=session)
            for _ in range(20):
                await stream.message()
            await trio.sleep(20)
        assert [each.message for each in caplog.records] == ["the store is away"]
        await stream.aclose()
        await trio.sleep(5)
        group.servers[0].go["x"].set()
        group.webs[1]._revisions[session] = D
        group.webs[1].expect(play_call(), session)
        resumed = await group.webs[1].open(session=session, after=stream.last_event_id.rpartition("-")[0] + "-5")
        assert [each["params"]["progress"] for each in (await resumed.rest())[:-1]] == list(range(6, 21))


@pytest.mark.parametrize("how", ["slow", "full"])
async def test_a_stream_the_store_cannot_take_resumes_at_its_replica_only(
    how: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(stream: str, *args: Any, **options: Any) -> int:
        if not stream.startswith("events"):
            return await append(stream, *args, **options)
        if how == "full":
            raise StoreFull("max_bytes")
        await trio.sleep(1000)
        return 0

    async with replicas(monkeypatch=monkeypatch) as group:
        append = group.store.append
        session = await group.webs[0].initialize(D)
        scripted = group.servers[0]

        @scripted.server.tool
        async def flood(ctx: Context) -> str:
            for number in range(60):
                await ctx.progress(number, message="x" * 100_000)
            await scripted.go["x"].wait()
            return "done"

        monkeypatch.setattr(group.store, "append", refuse)
        message = group.webs[0].request("tools/call", {"name": "flood"}, revision=D, progress="t")
        stream = await group.webs[0].open(message, session=session)
        for _ in range(60):
            await stream.message()
        await stream.aclose()
        await trio.sleep(3)
        group.webs[1]._revisions[session] = D
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": session, "Last-Event-ID": stream.last_event_id}
        assert (await group.webs[1].send("GET", "/mcp", headers)).status == 400
        group.webs[0].expect(message, session)
        resumed = await group.webs[0].open(session=session, after=stream.last_event_id)
        scripted.go["x"].set()
        assert (await resumed.response())["result"]["content"][0]["text"] == "done"
