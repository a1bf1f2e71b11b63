"""`Client.stream_tool`: the progress reports of a call, and its result or error, for each way in which it can end."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.sample_server import Forecast, sample_server
from tests.server.checkpoints import wait_or_fail
from trio_mcp import RequestError
from trio_mcp.client import ToolCall, ToolFailed, _stream_call, open_client
from trio_mcp.errors import SessionClosed


async def forever(on_progress: Any) -> str:
    on_progress(1, 2, "begun")
    await trio.sleep_forever()
    raise AssertionError("it ended")


async def test_a_call_that_was_left_early_has_no_result() -> None:
    async with _stream_call(forever, "a call") as call:
        async for report in call:
            assert report.message == "begun"
            break
    with pytest.raises(SessionClosed, match="was cancelled"):
        await wait_or_fail(call.result, "an outcome")
    assert [report async for report in call] == []


async def test_a_task_that_waits_for_the_result_gets_an_error_at_the_block_end() -> None:
    outcomes: list[str] = []

    async def wait(call: ToolCall[str]) -> None:
        with pytest.raises(SessionClosed) as failed:
            await call.result()
        outcomes.append(str(failed.value))

    async with trio.open_nursery() as nursery, _stream_call(forever, "a call") as call:
        nursery.start_soon(wait, call)
        await wait_all_tasks_blocked()
    assert outcomes == ["the call was cancelled before it had a result"]


async def test_the_block_raises_the_error_of_a_call_if_no_task_has_read_it() -> None:
    async def call(on_progress: Any) -> Any:
        on_progress(1, 2, None)
        raise RequestError(-32602, "no such tool")

    with pytest.raises(RequestError, match="no such tool"):
        async with _stream_call(call, "a call") as streamed:
            assert [report.progress async for report in streamed] == [1]
    mine = KeyError("mine")
    with pytest.raises(KeyError) as raised:
        async with _stream_call(call, "a call"):
            raise mine
    assert raised.value is mine


@pytest.mark.parametrize("value", [None, 0, "done"])
async def test_a_result_can_be_read_several_times(value: Any) -> None:
    async def call(on_progress: Any) -> Any:
        return value

    async with _stream_call(call, "a call") as streamed:
        assert await streamed.result() == value
    assert await streamed.result() == value


async def test_result_raises_the_error_of_the_call_and_the_block_goes_on() -> None:
    async def call(on_progress: Any) -> Any:
        raise RequestError(7, "not today")

    async with _stream_call(call, "a call") as streamed:
        with pytest.raises(RequestError, match="not today"):
            await streamed.result()


async def test_the_result_of_a_streamed_tool_is_converted_to_the_given_type(autojump_clock: MockClock) -> None:
    async with open_client(sample_server()) as client:
        async with client.stream_tool("forecast", {"city": "Oslo"}, returns=Forecast) as call:
            assert await call.result() == Forecast("Oslo", [1, 2, 3])
        async with client.stream_tool("count", {"to": 2}, returns=int) as counted:
            assert [report.progress async for report in counted] == [0, 1]
            assert await counted.result() == 2
        async with client.stream_tool("greet", {"name": "you"}) as greeting:
            assert not (await greeting.result()).is_error
        async with client.stream_tool("fail", {"why": "late"}, returns=int) as failing:
            with pytest.raises(ToolFailed, match="late"):
                await failing.result()
