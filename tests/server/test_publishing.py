"""The publisher merges changes into windows.  The tests use it without a server or a client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from trio_mcp.core import (
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    TOOLS_CHANGED,
    ChangeEvent,
    Id,
    Limits,
    Notification,
    Request,
    resource_updated,
)
from trio_mcp.server import ListenerKey, Publisher

WINDOW = 0.5
DECLARED = {name: {"listChanged": True, "subscribe": True} for name in ("tools", "prompts", "resources")}
LISTEN: dict[ChangeEvent, Any] = {
    TOOLS_CHANGED: {"toolsListChanged": True},
    PROMPTS_CHANGED: {"promptsListChanged": True},
    RESOURCES_CHANGED: {"resourcesListChanged": True},
    resource_updated("r://one"): {"resourceSubscriptions": ["r://one"]},
}


class Subscriber:
    """A connection that records the notifications of changes, with their times."""

    def __init__(self) -> None:
        self.received: list[tuple[float, str, Id | None]] = []

    def tell_change(self, notification: Notification, about: Id | None) -> None:
        self.received.append((round(trio.current_time(), 6), notification.method.split("/", 1)[1], about))


@contextlib.asynccontextmanager
async def running_publisher(window: float = WINDOW) -> AsyncIterator[Publisher]:
    """A running publisher.  The mock clock starts at zero."""
    publisher = Publisher(Limits(), window)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publisher.run)
        await wait_all_tasks_blocked()
        assert trio.current_time() == 0
        yield publisher
        await trio.sleep(10)
        nursery.cancel_scope.cancel()


def listen(publisher: Publisher, subscriber: Subscriber, id: Id, *changes: ChangeEvent) -> ListenerKey:
    asked = {name: value for change in changes for name, value in LISTEN[change].items()}
    key = ListenerKey(subscriber, id)
    publisher.listeners.listen(key, Request(id, "subscriptions/listen", {"notifications": asked}), DECLARED)
    return key


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ([0], [0.5]),
        ([0, 0, 0], [0.5]),
        ([0, 0.2, 0.49], [0.5]),
        ([0, 0.51], [0.5, 1.01]),
        ([0, 0.4, 0.8, 1.2], [0.5, 1.3]),
        ([0, 0.3, 0.6, 0.9, 1.2, 1.5], [0.5, 1.1, 1.7]),
        ([0, 5], [0.5, 5.5]),
    ],
)
async def test_the_changes_of_one_window_are_one_notification(
    changes: list[float], times: list[float], clock: MockClock
) -> None:
    subscriber = Subscriber()
    async with running_publisher() as publisher:
        listen(publisher, subscriber, 1, TOOLS_CHANGED)
        for at in changes:
            await trio.sleep_until(at)
            publisher.publish(TOOLS_CHANGED)
    assert [time for time, _, _ in subscriber.received] == times


@req("sub-01", "sub-13")
async def test_each_subscriber_gets_its_changes_in_their_first_order(clock: MockClock) -> None:
    one, two = Subscriber(), Subscriber()
    async with running_publisher() as publisher:
        listen(publisher, one, "a", TOOLS_CHANGED, resource_updated("r://one"))
        listen(publisher, one, "b", TOOLS_CHANGED)
        listen(publisher, two, "a", PROMPTS_CHANGED)
        for change in (resource_updated("r://one"), PROMPTS_CHANGED, TOOLS_CHANGED, resource_updated("r://one")):
            publisher.publish(change)
        publisher.publish(RESOURCES_CHANGED)
        publisher.publish(resource_updated("r://two"))
    assert one.received == [
        (0.5, "resources/updated", "a"), (0.5, "tools/list_changed", "a"), (0.5, "tools/list_changed", "b"),
    ]  # fmt: skip
    assert two.received == [(0.5, "prompts/list_changed", "a")]


async def test_subscribers_at_the_end_of_the_window_get_the_change(clock: MockClock) -> None:
    left, stayed, came = Subscriber(), Subscriber(), Subscriber()
    async with running_publisher() as publisher:
        key = listen(publisher, left, 1, TOOLS_CHANGED)
        listen(publisher, stayed, 1, TOOLS_CHANGED)
        publisher.publish(TOOLS_CHANGED)
        publisher.listeners.forget(key)
        listen(publisher, came, 1, TOOLS_CHANGED)
    assert (len(left.received), len(stayed.received), len(came.received)) == (0, 1, 1)


async def test_a_change_without_subscribers_is_not_kept(clock: MockClock) -> None:
    subscriber = Subscriber()
    async with running_publisher() as publisher:
        publisher.publish(TOOLS_CHANGED)
        listen(publisher, subscriber, 1, TOOLS_CHANGED)
        await trio.sleep(1)
    assert subscriber.received == []


async def test_without_a_window_changes_are_sent_at_once(clock: MockClock) -> None:
    subscriber = Subscriber()
    async with running_publisher(0) as publisher:
        listen(publisher, subscriber, 1, TOOLS_CHANGED)
        for _ in range(2):
            publisher.publish(TOOLS_CHANGED)
            publisher.publish(TOOLS_CHANGED)
            await wait_all_tasks_blocked()
    assert [time for time, _, _ in subscriber.received] == [0, 0]


async def test_a_change_by_a_subscriber_is_sent_in_the_next_window(clock: MockClock) -> None:
    """One change may cause another one, and both are sent."""

    class Echo(Subscriber):
        def tell_change(self, notification: Notification, about: Id | None) -> None:
            super().tell_change(notification, about)
            if len(self.received) < 3:
                publisher.publish(TOOLS_CHANGED)

    subscriber = Echo()
    async with running_publisher() as publisher:
        listen(publisher, subscriber, 1, TOOLS_CHANGED)
        publisher.publish(TOOLS_CHANGED)
    assert [time for time, _, _ in subscriber.received] == [0.5, 1.0, 1.5]
