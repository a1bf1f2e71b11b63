"""Subscriptions: a block gets its changes, in both eras, through gaps and until the end, and leaves no subscription."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.memory_links import Link, Peer, Recorder, open_link, open_scripted_link, start_link, stream_to
from tests.requirements import req
from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step, pipe_pair, wait_or_fail
from tests.server.raw_client import CANCELLED, LATEST, every_revision, legacy, modern
from trio_mcp import Limits, Server, UsageError
from trio_mcp.client import Subscription, SubscriptionManager, SubscriptionUnsupported, Unauthorized
from trio_mcp.core import (
    ACKNOWLEDGED,
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    TOOLS_CHANGED,
    ChangeEvent,
    ChangeKind,
    McpError,
    Notice,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    resource_updated,
)
from trio_mcp.types import Resource

Object = dict[str, Any]
ONE, TWO = resource_updated("r://one"), resource_updated("r://two")
LISTEN, SUBSCRIBE, UNSUBSCRIBE = "subscriptions/listen", "resources/subscribe", "resources/unsubscribe"
LISTS: Object = {"tools": {"listChanged": True}, "prompts": {"listChanged": True}}
EVERYTHING: Object = {**LISTS, "resources": {"listChanged": True, "subscribe": True}}
OLD = "2025-11-25"
ERAS = pytest.mark.parametrize("revision", [OLD, LATEST])
PAUSES = [0.0, 1.0, 2.0, 4.0, 8.0]  # seconds before each attempt on the same session


class Subscriber(Recorder):
    """The message handler of one client, for all its sessions."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__()
        self.listening = SubscriptionManager(limits or Limits())

    def notice(self, notice: Notice) -> None:
        super().notice(notice)
        self.listening.receive(notice)

    def connection_lost(self, failure: McpError) -> None:
        super().connection_lost(failure)
        self.listening.connection_lost()


@contextlib.asynccontextmanager
async def open_real(revision: str, **options: Any) -> AsyncIterator[tuple[SubscriptionManager, Server, Subscriber]]:
    """A client and a server with all kinds of changes."""
    subscriber, server = Subscriber(), changing_server()
    async with open_link(server, revision, recorder=subscriber, **options) as link:
        subscriber.listening.attach(link.caller)
        yield subscriber.listening, server, subscriber


def changing_server() -> Server:
    server = Server("changing", capabilities=("tools", "prompts", "resources"), change_debounce=0)
    server.add_resource(Resource("one", "r://one"), lambda ctx, uri: "one")
    server.add_resource(Resource("two", "r://two"), lambda ctx, uri: "two")
    return server


@contextlib.asynccontextmanager
async def open_scripted(
    revision: str, capabilities: Object = EVERYTHING, *, limits: Limits | None = None
) -> AsyncIterator[tuple[SubscriptionManager, Link, Peer]]:
    """A client and a server that the test controls."""
    subscriber = Subscriber(limits)
    async with open_scripted_link(revision, capabilities, recorder=subscriber) as (link, peer):
        subscriber.listening.attach(link.caller)
        yield subscriber.listening, link, peer


def unread(changes: Subscription) -> list[ChangeEvent]:
    """The changes that are not taken yet."""
    return list(changes._unread)


async def take_changes(changes: Subscription, count: int) -> list[ChangeEvent]:
    return [await wait_or_fail(changes.__anext__, "a change") for _ in range(count)]


class Block:
    """A block in a task of its own, which takes each change until the block ends."""

    def __init__(self, listening: SubscriptionManager, *requested: ChangeEvent) -> None:
        self.requested = requested
        self.changes: Subscription | None = None
        self.received: list[ChangeEvent] = []
        self.failure: BaseException | None = None
        self.entered, self.over = trio.Event(), trio.Event()
        self.scope = trio.CancelScope()
        self._listening = listening

    async def run(self) -> None:
        try:
            with self.scope:
                async with self._listening.listen(*self.requested) as self.changes:
                    self.entered.set()
                    async for change in self.changes:
                        self.received.append(change)
        except McpError as error:
            self.failure = error
        self.over.set()

    async def failed(self, kind: type[McpError]) -> McpError:
        await wait_or_fail(self.over.wait, "the end of a block")
        assert type(self.failure) is kind
        assert isinstance(self.failure, McpError)
        return self.failure

    async def ended(self) -> list[ChangeEvent]:
        await wait_or_fail(self.over.wait, "the end of a block")
        assert self.failure is None
        return self.received


@contextlib.asynccontextmanager
async def blocks(listening: SubscriptionManager, *requested: tuple[ChangeEvent, ...]) -> AsyncIterator[list[Block]]:
    """Blocks that run concurrently with the test."""
    made = [Block(listening, *each) for each in requested]
    async with trio.open_nursery() as nursery:
        for each in made:
            nursery.start_soon(each.run)
            await wait_all_tasks_blocked()  # so that they subscribe in order
        yield made
        nursery.cancel_scope.cancel()


async def acknowledge(peer: Peer, request: Object, filter: Object | None = None) -> None:
    agreed = request["params"]["notifications"] if filter is None else filter
    await peer.notify(ACKNOWLEDGED, {"notifications": agreed}, subscription=request)
    await wait_all_tasks_blocked()


async def agree(peer: Peer, revision: str, uris: tuple[str, ...] = ()) -> list[Object]:
    """Agree to the request of one block."""
    if revision == LATEST:
        request = await peer.take(LISTEN)
        await acknowledge(peer, request)
        return [request]
    requests = [await peer.take(SUBSCRIBE) for _ in uris]
    for each in requests:
        await peer.answer(each)
    await wait_all_tasks_blocked()
    return requests


async def send_change(peer: Peer, change: ChangeEvent, subscription: Object | None = None) -> None:
    await peer.send(
        {
            "method": change.kind.method,
            "params": change.notification(None if subscription is None else subscription["id"]).params,
        }
    )
    await wait_all_tasks_blocked()


# With a real server.


@req("sub-06", "sub-07", "sub-12", "res-21")
@every_revision
async def test_each_block_gets_its_changes_until_it_is_left(revision: str, autojump_clock: MockClock) -> None:
    async with open_real(revision) as (listening, server, subscriber):
        async with listening.listen(tools=True, resources=["r://one"]) as changes:
            async with listening.listen(RESOURCES_CHANGED, resources=("r://one", "r://two")) as others:
                assert changes.missing == others.missing == ()
                server.notify_list_changed("tools", "prompts", "resources")
                server.notify_resource_updated("r://one")
                server.notify_resource_updated("r://two")
                assert set(await take_changes(changes, 2)) == {TOOLS_CHANGED, ONE}
                assert set(await take_changes(others, 3)) == {RESOURCES_CHANGED, ONE, TWO}
            await trio.sleep(1)
            server.notify_resource_updated("r://two")
            server.notify_resource_updated("r://one")
            await trio.sleep(1)
            assert unread(changes) == [ONE]
            assert unread(others) == []
        await trio.sleep(1)
        before = len(subscriber.notices)
        server.notify_resource_updated("r://one")
        await trio.sleep(1)
        assert len(subscriber.notices) == before  # the server does not send it
        assert subscriber.mistakes == []


@every_revision
async def test_a_repeated_change_is_reported_once_until_it_is_taken(revision: str, autojump_clock: MockClock) -> None:
    async with (
        open_real(revision) as (listening, server, subscriber),
        listening.listen(tools=True, resources="r://one") as changes,
    ):
        for _ in range(5):
            server.notify_resource_updated("r://one")
            server.notify_list_changed("tools")
            await trio.sleep(1)
        assert unread(changes) == [ONE, TOOLS_CHANGED] or unread(changes) == [TOOLS_CHANGED, ONE]
        assert sum(note.notification.method == ChangeKind.TOOLS.method for note in subscriber.notices) == 5


@every_revision
async def test_an_exception_of_the_body_is_raised_unchanged(revision: str, autojump_clock: MockClock) -> None:
    error = KeyError("mine")
    async with open_real(revision) as (listening, server, subscriber):
        with pytest.raises(KeyError) as caught:
            async with listening.listen(tools=True, resources="r://one"):
                raise error
        assert caught.value is error
        await trio.sleep(1)
        server.notify_resource_updated("r://one")
        await trio.sleep(1)
        assert subscriber.notices[-1:] == [] or subscriber.notices[-1].notification.method == ACKNOWLEDGED


@modern
async def test_a_server_that_drains_ends_the_iterator(revision: str, autojump_clock: MockClock) -> None:
    subscriber, server = Subscriber(), changing_server()
    async with server.running(), open_link(server, revision, recorder=subscriber) as link:
        subscriber.listening.attach(link.caller)
        async with subscriber.listening.listen(tools=True) as changes:
            server.notify_list_changed("tools")
            await trio.sleep(1)
            async with server.draining(5):
                pass
            assert [change async for change in changes] == [TOOLS_CHANGED]


@ERAS
@pytest.mark.parametrize("watch", ["the scenario", any_task], ids=["the block", "everything"])
def test_a_block_cancelled_at_any_step_leaves_no_subscription(revision: str, watch: Any) -> None:
    async def scenario(attempt: Attempt) -> None:
        subscriber, server = Subscriber(), changing_server()
        async with open_link(
            server, revision, recorder=subscriber, streams=attempt.streams(lambda: pipe_pair(64))
        ) as link:
            subscriber.listening.attach(link.caller)
            with attempt.window():
                async with subscriber.listening.listen(tools=True, resources="r://one") as changes:
                    server.notify_resource_updated("r://one")
                    assert await anext(changes) == ONE
            await trio.sleep(1)
            assert server.statistics().listeners == (revision != LATEST)
            subscriber.notices.clear()
            server.notify_resource_updated("r://one")
            await trio.sleep(1)
            assert subscriber.notices == []
            async with subscriber.listening.listen(resources="r://one") as changes:  # and the next one works
                server.notify_resource_updated("r://one")
                assert await anext(changes) == ONE

    assert cancel_at_each_step(scenario, watch=watch) > (20 if watch is any_task else 3)


# Requested changes.


@pytest.mark.parametrize(
    ("requested", "how", "why"),
    [
        ((), {}, "listen needs at least one change"),
        ((), {"resources": []}, "listen needs at least one change"),
        ((), {"resources": [5]}, "expected a ChangeEvent"),
        ((), {"resources": [["r://one"]]}, "expected a ChangeEvent"),
        (("tools",), {}, "expected a ChangeEvent"),
        ((), {"resources": [""]}, "needs a URI"),
        ((ChangeEvent(ChangeKind.TOOLS, "one"),), {}, "has no URI"),
        ((), {"resources": ["r://" + "x" * 20]}, "uri_length"),
        ((), {"resources": [f"r://{n}" for n in range(4)]}, "listener_changes"),
    ],
)
def test_an_invalid_change_is_refused_at_once(requested: Any, how: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        SubscriptionManager(Limits(uri_length=20, listener_changes=3)).listen(*requested, **how)


@pytest.mark.parametrize(
    ("how", "filter"),
    [
        ({"tools": True}, {"toolsListChanged": True}),
        ({"prompts": True}, {"promptsListChanged": True}),
        ({"resources": True}, {"resourcesListChanged": True}),
        ({"resources": "r://one"}, {"resourceSubscriptions": ["r://one"]}),
        ({"resources": iter(["r://one", "r://two", "r://one"])}, {"resourceSubscriptions": ["r://one", "r://two"]}),
    ],
)
async def test_the_filter_has_the_requested_changes(how: Any, filter: Object, autojump_clock: MockClock) -> None:
    async with open_scripted(LATEST) as (listening, _, peer), trio.open_nursery() as nursery:

        async def block() -> None:
            async with listening.listen(**how):
                pass

        nursery.start_soon(block)
        request = await peer.take(LISTEN)
        assert request["params"]["notifications"] == filter
        await acknowledge(peer, request)


# Modern: agreeing.


@req("sub-04")
@modern
async def test_changes_that_the_server_did_not_agree_to_are_missing(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED, ONE, TWO)) as [block]:
        request = await peer.take(LISTEN)
        await send_change(peer, ONE, request)  # before the agreement, but still a change
        assert not block.entered.is_set()
        await trio.sleep(100)
        await acknowledge(peer, request, {"resourceSubscriptions": ["r://one"], "other": 5})
        assert block.entered.is_set()
        assert block.changes is not None
        assert block.changes.missing == (TOOLS_CHANGED, TWO)
        assert block.received == [ONE]


@pytest.mark.parametrize("filter", [{}, {"toolsListChanged": False}, {"toolsListChanged": 5}, []])
@modern
async def test_an_agreement_without_changes_is_an_error(revision: str, filter: Any, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        request = await peer.take(LISTEN)
        await acknowledge(peer, request, filter)
        error = await block.failed(SubscriptionUnsupported)
        assert "toolsListChanged" in str(error)
        assert isinstance(error, SubscriptionUnsupported)
        assert error.missing == (TOOLS_CHANGED,)
        assert (await peer.take(CANCELLED))["params"]["requestId"] == request["id"]


@modern
async def test_a_refusal_is_raised_on_entering(revision: str, autojump_clock: MockClock) -> None:
    async with (
        open_scripted(revision) as (listening, _, peer),
        blocks(listening, (TOOLS_CHANGED,), (ONE,)) as [one, two],
    ):
        first, second = await peer.take(LISTEN), await peer.take(LISTEN)
        await peer.refuse(first, -32603, "no room")
        error = await one.failed(RequestError)
        assert isinstance(error, RequestError)
        assert (error.code, error.message) == (-32603, "no room")
        await acknowledge(peer, second)
        assert two.entered.is_set()
        assert await peer.has_no_more_messages()


@req("sub-12")
@modern
@pytest.mark.parametrize("agreed", [True, False])
async def test_leaving_a_block_cancels_its_request(revision: str, agreed: bool, autojump_clock: MockClock) -> None:
    async with (
        open_scripted(revision) as (listening, link, peer),
        blocks(listening, (TOOLS_CHANGED,), (ONE,)) as [one, two],
    ):
        first, second = await peer.take(LISTEN), await peer.take(LISTEN)
        if agreed:
            await acknowledge(peer, first)
        await acknowledge(peer, second)
        one.scope.cancel()
        assert (await peer.take(CANCELLED))["params"]["requestId"] == first["id"]
        await acknowledge(peer, first)  # too late
        await send_change(peer, TOOLS_CHANGED, first)
        await peer.answer(first)
        await send_change(peer, ONE, second)
        assert (one.received, two.received) == ([], [ONE])
        assert await peer.has_no_more_messages()
        assert link.caller.session.waiting == 1


@req("sub-06")
@modern
async def test_changes_go_to_the_subscription_they_name(revision: str, autojump_clock: MockClock) -> None:
    async with (
        open_scripted(revision) as (listening, _, peer),
        blocks(listening, (TOOLS_CHANGED,), (TOOLS_CHANGED,)) as both,
    ):
        first, second = await peer.take(LISTEN), await peer.take(LISTEN)
        await acknowledge(peer, second)  # in any order
        await acknowledge(peer, first)
        await send_change(peer, TOOLS_CHANGED, second)
        assert [block.received for block in both] == [[], [TOOLS_CHANGED]]
        for subscription in (None, {"id": "1"}, {"id": True}, {"id": 99}):
            await send_change(peer, TOOLS_CHANGED, subscription)
        await send_change(peer, PROMPTS_CHANGED, first)
        assert [block.received for block in both] == [[], [TOOLS_CHANGED]]


# Modern: ending.


@modern
@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("how", ["result", "cancellation"])
async def test_a_regular_end_ends_the_iterator(
    revision: str, how: str, agreed: bool, autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED, ONE)) as [block]:
        request = await peer.take(LISTEN)
        if agreed:
            await acknowledge(peer, request)
        await peer.notify(TOOLS_CHANGED.kind.method, subscription=request)
        if how == "result":
            await peer.answer(request)
        else:
            await peer.notify(CANCELLED, {"requestId": request["id"], "reason": "maintenance"})
        assert await block.ended() == [TOOLS_CHANGED]
        assert await peer.has_no_more_messages()


@modern
async def test_an_ended_iterator_stays_ended(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), trio.open_nursery() as nursery:
        nursery.start_soon(agree, peer, revision)
        async with listening.listen(tools=True) as changes:
            listening.closed()
            for _ in range(2):
                assert [change async for change in changes] == []
        assert [change async for change in changes] == []


@ERAS
async def test_changes_that_were_not_taken_end_with_the_block(revision: str, autojump_clock: MockClock) -> None:
    async with open_real(revision) as (listening, server, _):
        async with listening.listen(tools=True) as changes:
            server.notify_list_changed("tools")
            await trio.sleep(1)
            assert unread(changes) == [TOOLS_CHANGED]
        assert [change async for change in changes] == []


def gone() -> McpError:
    return SessionClosed("the stream broke off")


@req("sub-09")
@modern
async def test_a_broken_stream_is_requested_again_after_growing_pauses(
    revision: str, autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (TOOLS_CHANGED, ONE)) as [block]:
        request = (await agree(peer, revision))[0]
        await trio.sleep(100)
        pauses = []
        for _ in PAUSES:
            link.caller.fail(request["id"], gone())
            broken = trio.current_time()
            request = await peer.take(LISTEN)
            pauses.append(trio.current_time() - broken)
            assert block.received == [TOOLS_CHANGED, ONE] * (len(pauses) - 1)
            await acknowledge(peer, request)
            # Changes may have been missed, so each is reported once.
            assert block.received == [TOOLS_CHANGED, ONE] * len(pauses)
        assert pauses == PAUSES
        await send_change(peer, ONE, request)
        assert block.received[-1] == ONE
        link.caller.fail(request["id"], gone())
        error = await block.failed(SessionClosed)
        assert "6 times in a row" in str(error)
        assert "the stream broke off" in str(error)
        assert isinstance(error.__cause__, SessionClosed)  # the last one
        assert await peer.has_no_more_messages()
        assert not link.caller.session.closed


@req("sub-09")
@modern
async def test_a_stream_that_has_lasted_is_requested_again_at_once(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        for _ in range(20):
            request = (await agree(peer, revision))[0]
            await trio.sleep(8)
            link.caller.fail(request["id"], gone())
            broken = trio.current_time()
            await wait_or_fail(wait_for_message(peer), "the next listen")
            assert trio.current_time() == broken
        assert block.received == [TOOLS_CHANGED] * 19


@pytest.mark.parametrize(("revision", "entered"), [(OLD, False), (LATEST, False), (LATEST, True)])
@pytest.mark.parametrize(
    "cause", [Unauthorized("who asks?", 401, "Bearer"), UsageError("the headers could not be made")]
)
async def test_an_error_that_a_retry_cannot_fix_is_raised_at_once(
    revision: str, entered: bool, cause: McpError, autojump_clock: MockClock
) -> None:
    method = LISTEN if revision == LATEST else SUBSCRIBE
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (ONE,)) as [block]:
        request = (await agree(peer, revision))[0] if entered else await peer.take(method)
        start = trio.current_time()
        link.caller.fail(request["id"], cause)
        assert await block.failed(type(cause)) is cause
        assert block.entered.is_set() is entered
        assert trio.current_time() == start


@legacy
async def test_a_gap_in_unrequested_legacy_notifications_is_reported(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED, ONE), (ONE,)) as made:
        request = await peer.take(SUBSCRIBE)
        listening.missed(for_good=False)
        await peer.answer(request)
        await wait_all_tasks_blocked()
        assert [each.received for each in made] == [[], []]  # the blocks were not entered
        listening.missed(for_good=False)
        await wait_all_tasks_blocked()
        assert [each.received for each in made] == [[TOOLS_CHANGED, ONE], [ONE]]


@legacy
async def test_listening_without_an_event_stream_is_an_error(revision: str, autojump_clock: MockClock) -> None:
    requested: list[tuple[ChangeEvent, ...]] = [(TOOLS_CHANGED,), (ONE,)]
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, *requested) as [entered, entering]:
        request = await peer.take(SUBSCRIBE)
        await send_change(peer, TOOLS_CHANGED)
        link.caller.missed(for_good=True)
        listening.missed(for_good=True)
        for each in (entered, entering):
            error = await each.failed(SubscriptionUnsupported)
            assert isinstance(error, SubscriptionUnsupported)
            assert error.missing == each.requested
        assert (entered.received, entering.received) == ([TOOLS_CHANGED], [])
        await peer.answer(request)
        await peer.take(UNSUBSCRIBE)
        with pytest.raises(SubscriptionUnsupported):
            async with listening.listen(tools=True):
                pass
        assert await peer.has_no_more_messages()


@modern
async def test_a_gap_in_unrequested_notifications_does_not_affect_a_modern_block(
    revision: str, autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        request = (await agree(peer, revision))[0]
        for for_good in (False, True):
            listening.missed(for_good=for_good)
        await send_change(peer, TOOLS_CHANGED, request)
        await wait_all_tasks_blocked()
        assert block.received == [TOOLS_CHANGED]


def wait_for_message(peer: Peer) -> Callable[[], Any]:
    async def come() -> None:
        while not peer.messages:
            await trio.lowlevel.checkpoint()

    return come


@modern
@pytest.mark.parametrize(
    ("answer", "kind"),
    [({"result": 5}, RemoteProtocolError), ({"result": {}, "error": {}}, RemoteProtocolError)],
)
async def test_invalid_answers_before_the_agreement_end_in_an_error(
    revision: str, answer: Object, kind: type[McpError], autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        for _ in range(6):
            request = await peer.take(LISTEN)
            await peer.send({"id": request["id"], **answer})
        error = await block.failed(kind)
        assert LISTEN in str(error)
        assert not block.entered.is_set()
        assert trio.current_time() == sum(PAUSES)


@modern
async def test_a_server_without_subscriptions_listen_is_an_error(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        await peer.refuse(await peer.take(LISTEN), -32601, "Method not found")
        error = await block.failed(SubscriptionUnsupported)
        assert isinstance(error, SubscriptionUnsupported)
        assert error.missing == (TOOLS_CHANGED,)
        assert isinstance(error.__cause__, RequestError)
        assert await peer.has_no_more_messages()


@modern
async def test_a_refusal_after_a_gap_is_raised_by_the_iterator(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        request = (await agree(peer, revision))[0]
        link.caller.fail(request["id"], gone())
        await peer.refuse(await peer.take(LISTEN), -32602)
        await block.failed(RequestError)


@modern
async def test_a_block_may_be_left_in_a_pause(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (TOOLS_CHANGED,)) as [block]:
        for _ in range(3):
            request = (await agree(peer, revision))[0]
            link.caller.fail(request["id"], gone())
        await wait_all_tasks_blocked()
        block.scope.cancel()
        await trio.sleep(100)
        assert await peer.has_no_more_messages()


# Legacy.


@legacy
async def test_only_new_resources_are_subscribed_and_the_last_block_unsubscribes(
    revision: str, autojump_clock: MockClock
) -> None:
    async with (
        open_scripted(revision) as (listening, _, peer),
        blocks(listening, (ONE,), (ONE, TWO, TOOLS_CHANGED), (TWO,)) as [first, second, third],
    ):
        requests = [await peer.take(SUBSCRIBE), await peer.take(SUBSCRIBE)]
        assert [request["params"] for request in requests] == [{"uri": "r://one"}, {"uri": "r://two"}]
        await peer.answer(requests[0])
        await wait_all_tasks_blocked()
        assert [block.entered.is_set() for block in (first, second, third)] == [True, False, False]
        await peer.answer(requests[1])
        await wait_all_tasks_blocked()
        assert second.entered.is_set()
        assert third.entered.is_set()
        async with listening.listen(resources=["r://one", "r://two"]):  # needs no request
            await send_change(peer, TWO)
            await send_change(peer, TOOLS_CHANGED)
        assert (first.received, second.received, third.received) == ([], [TWO, TOOLS_CHANGED], [TWO])
        second.scope.cancel()
        assert await peer.has_no_more_messages()
        first.scope.cancel()
        assert (await peer.take(UNSUBSCRIBE))["params"] == {"uri": "r://one"}
        third.scope.cancel()
        last = await peer.take(UNSUBSCRIBE)
        assert last["params"] == {"uri": "r://two"}
        assert await peer.has_no_more_messages()
        await peer.answer(last)
        await wait_all_tasks_blocked()
        assert list(listening._resources) == ["r://one"]  # its unsubscribe has no answer


@req("res-27")
@legacy
async def test_one_resource_has_one_pending_request_at_a_time(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (ONE,), (ONE, TWO)) as [one, two]:
        first, other = await peer.take(SUBSCRIBE), await peer.take(SUBSCRIBE)
        await peer.answer(other)
        one.scope.cancel()
        two.scope.cancel()
        assert (await peer.take(UNSUBSCRIBE))["params"] == {"uri": "r://two"}
        assert await peer.has_no_more_messages()  # the other one waits for its answer
        await peer.answer(first)
        unsubscribing = await peer.take(UNSUBSCRIBE)
        assert unsubscribing["params"] == {"uri": "r://one"}
        async with blocks(listening, (ONE,)) as [again]:
            assert await peer.has_no_more_messages()
            await peer.refuse(unsubscribing, -32602, "not subscribed")  # has no effect
            await peer.answer(await peer.take(SUBSCRIBE))
            await wait_all_tasks_blocked()
            assert again.entered.is_set()
        await peer.take(UNSUBSCRIBE)
        assert link.caller.session.waiting == 2  # r://two has no answer yet


@legacy
async def test_a_block_joins_the_pending_subscription_of_another_block(
    revision: str, autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (ONE,)) as [one]:
        request = await peer.take(SUBSCRIBE)
        one.scope.cancel()
        await wait_all_tasks_blocked()
        async with blocks(listening, (ONE,)) as [two]:
            await peer.answer(request)
            await wait_all_tasks_blocked()
            assert two.entered.is_set()
            assert await peer.has_no_more_messages()
        await peer.take(UNSUBSCRIBE)


@legacy
async def test_a_refused_resource_fails_only_the_blocks_that_wait_for_it(
    revision: str, autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (ONE,), (ONE, TWO)) as [one, both]:
        requests = [await peer.take(SUBSCRIBE), await peer.take(SUBSCRIBE)]
        await peer.answer(requests[0])
        await peer.refuse(requests[1], -32002, "gone")
        error = await both.failed(RequestError)
        assert isinstance(error, RequestError)
        assert error.code == -32002
        assert one.entered.is_set()
        await send_change(peer, ONE)
        assert one.received == [ONE]
        assert await peer.has_no_more_messages()


@legacy
async def test_a_refused_block_unsubscribes_the_granted_resources(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (ONE, TWO)) as [block]:
        requests = [await peer.take(SUBSCRIBE), await peer.take(SUBSCRIBE)]
        await peer.refuse(requests[0], -32002, "gone")
        await block.failed(RequestError)
        await peer.answer(requests[1])
        assert (await peer.take(UNSUBSCRIBE))["params"] == {"uri": "r://two"}
        assert await peer.has_no_more_messages()


@legacy
async def test_an_unanswered_subscribe_is_undone_and_sent_again(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, link, peer), blocks(listening, (ONE,)) as [block]:
        for _ in PAUSES:
            link.caller.fail((await peer.take(SUBSCRIBE))["id"], gone())
            await peer.answer(await peer.take(UNSUBSCRIBE))
        await peer.answer(await peer.take(SUBSCRIBE))
        await wait_all_tasks_blocked()
        assert trio.current_time() == sum(PAUSES)
        assert block.entered.is_set()
        assert block.received == []


@legacy
@pytest.mark.parametrize(
    ("capabilities", "missing"),
    [
        (EVERYTHING, ()),
        ({**LISTS, "resources": {"subscribe": True}}, ()),
        ({**LISTS, "resources": {"subscribe": False}}, (ONE,)),
        ({"tools": {}, "resources": {"subscribe": True}}, (TOOLS_CHANGED,)),
    ],
)
async def test_undeclared_changes_are_missing(
    revision: str, capabilities: Object, missing: tuple[ChangeEvent, ...], autojump_clock: MockClock
) -> None:
    async with (
        open_scripted(revision, capabilities) as (listening, _, peer),
        blocks(listening, (TOOLS_CHANGED, ONE)) as [block],
    ):
        await agree(peer, revision, () if ONE in missing else ("r://one",))
        assert block.entered.is_set()
        assert block.changes is not None
        assert block.changes.missing == missing
        assert await peer.has_no_more_messages()


@legacy
async def test_listening_only_to_undeclared_changes_is_an_error(revision: str, autojump_clock: MockClock) -> None:
    async with open_scripted(revision, {"prompts": {"listChanged": True}}) as (listening, _, peer):
        with pytest.raises(SubscriptionUnsupported, match="resourceSubscriptions, toolsListChanged"):
            async with listening.listen(tools=True, resources="r://one"):
                pass
        assert await peer.has_no_more_messages()


@legacy
async def test_too_many_requests_fail_on_entering_and_leave_no_subscription(
    revision: str, autojump_clock: MockClock
) -> None:
    subscriber, limits = Subscriber(), Limits(requests=2)
    async with open_scripted_link(revision, EVERYTHING, recorder=subscriber, limits=limits) as (link, peer):
        subscriber.listening.attach(link.caller)
        with pytest.raises(UsageError, match="2 requests are waiting"):
            async with subscriber.listening.listen(resources=["r://one", "r://two", "r://three"]):
                pass
        for _ in range(2):
            await peer.answer(await peer.take(SUBSCRIBE))
        uris = {(await peer.take(UNSUBSCRIBE))["params"]["uri"] for _ in range(2)}
        assert len(uris) == 2
        assert await peer.has_no_more_messages()


@modern
async def test_too_many_listen_requests_fail_on_entering(revision: str, autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with open_scripted_link(revision, EVERYTHING, recorder=subscriber, limits=Limits(requests=1)) as (link, peer):
        subscriber.listening.attach(link.caller)
        async with blocks(subscriber.listening, (ONE,)) as [block]:
            await agree(peer, revision)
            with pytest.raises(UsageError, match="1 requests are waiting"):
                async with subscriber.listening.listen(tools=True):
                    pass
            assert block.entered.is_set()


# Limits of the changes that wait.


@ERAS
async def test_changes_of_resources_below_are_reported_by_name_up_to_a_limit(
    revision: str, autojump_clock: MockClock
) -> None:
    async with (
        open_scripted(revision, limits=Limits(listener_changes=3, uri_length=20)) as (listening, _, peer),
        trio.open_nursery() as nursery,
    ):
        requests: list[Object] = []
        agreed = trio.Event()

        async def agree_later() -> None:
            requests.extend(await agree(peer, revision, ("r://one",)))
            agreed.set()

        nursery.start_soon(agree_later)
        async with listening.listen(tools=True, resources="r://one") as changes:
            await agreed.wait()
            subscription = requests[0] if revision == LATEST else None
            below = [resource_updated(f"r://one/{n}") for n in range(100)]
            for each in below:
                await send_change(peer, each, subscription)
            assert unread(changes) == [*below[:3], ONE]
            assert await take_changes(changes, 4) == [*below[:3], ONE]
            await send_change(peer, resource_updated("r://one/" + "x" * 100), subscription)
            await send_change(peer, below[0], subscription)
            assert unread(changes) == [ONE, below[0]]


# Several sessions.


@req("sub-10")
@every_revision
async def test_a_new_session_subscribes_again_and_reports_each_change_once(
    revision: str, autojump_clock: MockClock
) -> None:
    subscriber, server = Subscriber(), changing_server()
    listening = subscriber.listening
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_collect_after_gap, listening, subscriber, server, revision, nursery)


async def _collect_after_gap(
    listening: SubscriptionManager, subscriber: Subscriber, server: Server, revision: str, nursery: trio.Nursery
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with stream_to(server) as stream:
            link = await start_link(nursery, stream, subscriber, revision)
            listening.attach(link.caller)
            changes = await stack.enter_async_context(listening.listen(tools=True, resources=["r://one"]))
            others = await stack.enter_async_context(listening.listen(resources=["r://one", "r://two"]))
            server.notify_resource_updated("r://two")
            assert await take_changes(others, 1) == [TWO]
        await wait_or_fail(link.ended.wait, "the link to end")
        assert unread(changes) == unread(others) == []
        async with stream_to(server) as stream:
            link = await start_link(nursery, stream, subscriber, revision)
            listening.attach(link.caller)
            assert await take_changes(changes, 2) == [TOOLS_CHANGED, ONE]
            assert await take_changes(others, 2) == [ONE, TWO]
            server.notify_resource_updated("r://two")
            server.notify_list_changed("tools")
            assert (await take_changes(changes, 1), await take_changes(others, 1)) == ([TOOLS_CHANGED], [TWO])
            assert subscriber.mistakes == []


@modern
@pytest.mark.parametrize("breaks", [3, 5])
async def test_breaks_do_not_count_in_the_next_session(revision: str, breaks: int, autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with blocks(subscriber.listening, (TOOLS_CHANGED,)) as [block]:
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            for _ in range(breaks):
                link.caller.fail((await agree(peer, revision))[0]["id"], gone())
            if breaks == 5:
                await peer.take(LISTEN)  # the next break would be the last
        await trio.sleep(1000)  # without a session there are no requests
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            link.caller.fail((await agree(peer, revision))[0]["id"], gone())
            broken = trio.current_time()
            await agree(peer, revision)
            assert trio.current_time() == broken
            assert not block.over.is_set()


@modern
async def test_an_ended_block_is_not_part_of_the_next_session(revision: str, autojump_clock: MockClock) -> None:
    subscriber, ended, leave = Subscriber(), trio.Event(), trio.Event()

    async def stay_in_block() -> None:
        async with subscriber.listening.listen(tools=True) as changes:
            assert [change async for change in changes] == []
            ended.set()
            await leave.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay_in_block)
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await peer.answer((await agree(peer, revision))[0])
            await ended.wait()
        async with (
            blocks(subscriber.listening, (TOOLS_CHANGED,)) as [block],
            open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer),
        ):
            subscriber.listening.attach(link.caller)
            request = (await agree(peer, revision))[0]  # with the id of the other request
            leave.set()
            await wait_all_tasks_blocked()
            await send_change(peer, TOOLS_CHANGED, request)
            assert block.received == [TOOLS_CHANGED]
            assert await peer.has_no_more_messages()


async def test_a_block_refused_after_a_gap_is_not_requested_again(autojump_clock: MockClock) -> None:
    subscriber, refused = Subscriber(), trio.Event()

    async def stay_in_block() -> None:
        async with subscriber.listening.listen(ONE, TWO) as changes:
            with pytest.raises(RequestError):
                await anext(changes)
            refused.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay_in_block)
        async with open_scripted_link(OLD, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await agree(peer, OLD, ("r://one", "r://two"))
        async with open_scripted_link(OLD, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            one, two = await peer.take(SUBSCRIBE), await peer.take(SUBSCRIBE)
            await peer.refuse(one, -32002)
            await wait_or_fail(refused.wait, "the refusal")
            link.caller.fail(two["id"], gone())
            assert (await peer.take(UNSUBSCRIBE))["params"] == {"uri": "r://two"}  # the server may have subscribed it
        async with open_scripted_link(OLD, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            assert await peer.has_no_more_messages()
        nursery.cancel_scope.cancel()


async def test_pending_requests_of_one_session_do_not_affect_the_next(autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with blocks(subscriber.listening, (ONE,)) as [block]:
        async with open_scripted_link(OLD, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            before = await peer.take(SUBSCRIBE)
        async with open_scripted_link(LATEST, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            [request] = await agree(peer, LATEST)
            assert request["id"] == before["id"]
            await peer.answer(request)
            assert await block.ended() == []


@ERAS
async def test_without_a_session_a_block_waits_for_one(revision: str, autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with blocks(subscriber.listening, (TOOLS_CHANGED,)) as [block]:
        await trio.sleep(1000)
        assert not block.entered.is_set()
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await agree(peer, revision)
            assert block.entered.is_set()
            assert block.received == []  # it was never subscribed before, so it has missed no change


@ERAS
async def test_a_block_whose_session_is_lost_on_entering_uses_the_next_session(
    revision: str, autojump_clock: MockClock
) -> None:
    subscriber = Subscriber()
    asks = LISTEN if revision == LATEST else SUBSCRIBE
    async with blocks(subscriber.listening, (TOOLS_CHANGED, ONE)) as [block]:
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await peer.take(asks)
        assert not block.entered.is_set()
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await agree(peer, revision, ("r://one",))
            assert block.entered.is_set()
            assert block.received == []


async def test_the_next_session_may_be_of_another_era(autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with blocks(subscriber.listening, (TOOLS_CHANGED, ONE)) as [block]:
        for gaps, revision in enumerate([LATEST, OLD, LATEST]):
            async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
                subscriber.listening.attach(link.caller)
                await agree(peer, revision, ("r://one",))
                assert block.received == [TOOLS_CHANGED, ONE] * gaps


async def test_changes_that_the_next_server_does_not_declare_are_missing(autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with blocks(subscriber.listening, (TOOLS_CHANGED, ONE)) as [block]:
        async with open_scripted_link(OLD, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await agree(peer, OLD, ("r://one",))
        async with open_scripted_link(OLD, LISTS, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await wait_all_tasks_blocked()
            assert block.changes is not None
            assert block.changes.missing == (ONE,)
            assert block.received == [TOOLS_CHANGED]
        async with open_scripted_link(OLD, {}, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await block.failed(SubscriptionUnsupported)


@ERAS
async def test_no_block_waits_if_no_further_session_is_expected(revision: str, autojump_clock: MockClock) -> None:
    subscriber = Subscriber()
    async with blocks(subscriber.listening, (TOOLS_CHANGED,)) as [waiting]:
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):
            subscriber.listening.attach(link.caller)
            await agree(peer, revision)
        assert waiting.changes is not None
        subscriber.listening.connection_lost(SessionClosed("the server has gone"))
        error = await waiting.failed(SessionClosed)
        assert str(error) == "the server has gone"
        with pytest.raises(SessionClosed, match="has gone"):
            async with subscriber.listening.listen(tools=True):
                pass
        async with open_scripted_link(revision, EVERYTHING, recorder=subscriber) as (link, peer):  # the server is back
            subscriber.listening.attach(link.caller)
            async with blocks(subscriber.listening, (TOOLS_CHANGED,)) as [another]:
                await agree(peer, revision)
                assert another.entered.is_set()


@ERAS
@pytest.mark.parametrize("entered", [True, False])
async def test_closing_the_client_ends_every_block(revision: str, entered: bool, autojump_clock: MockClock) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED, ONE)) as [block]:
        if entered:
            request = (await agree(peer, revision, ("r://one",)))[0]
            await peer.notify(TOOLS_CHANGED.kind.method, subscription=request if revision == LATEST else None)
            await wait_all_tasks_blocked()
        listening.closed()
        if entered:
            assert await block.ended() == [TOOLS_CHANGED]
        else:
            assert str(await block.failed(SessionClosed)) == "the client is closed"
            assert not block.entered.is_set()
        with pytest.raises(SessionClosed, match="the client is closed"):
            async with listening.listen(tools=True):
                pass


@ERAS
@pytest.mark.parametrize("entered", [True, False])
async def test_the_reason_of_closing_is_raised_after_the_received_changes(
    revision: str, entered: bool, autojump_clock: MockClock
) -> None:
    async with open_scripted(revision) as (listening, _, peer), blocks(listening, (TOOLS_CHANGED, ONE)) as [block]:
        if entered:
            request = (await agree(peer, revision, ("r://one",)))[0]
            await peer.notify(TOOLS_CHANGED.kind.method, subscription=request if revision == LATEST else None)
            await wait_all_tasks_blocked()
        listening.closed(SessionClosed("the server has exited"))
        listening.closed()  # it is closed already
        error = await block.failed(SessionClosed)
        assert str(error) == "the server has exited"
        assert block.received == [TOOLS_CHANGED] * entered
        with pytest.raises(SessionClosed, match="has exited"):
            async with listening.listen(tools=True):
                pass


# Waiting.


async def test_two_tasks_cannot_iterate_over_one_subscription(autojump_clock: MockClock) -> None:
    async with open_scripted(OLD) as (listening, _, peer), listening.listen(tools=True) as changes:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(changes.__anext__)
            await wait_all_tasks_blocked()
            with pytest.raises(UsageError, match="another task"):
                await anext(changes)
            await send_change(peer, TOOLS_CHANGED)
        await send_change(peer, TOOLS_CHANGED)
        assert await anext(changes) == TOOLS_CHANGED


async def test_a_cancelled_wait_loses_no_change(autojump_clock: MockClock) -> None:
    async with open_scripted(OLD) as (listening, _, peer), listening.listen(tools=True, prompts=True) as changes:
        with trio.move_on_after(5) as scope:
            await anext(changes)
        assert scope.cancelled_caught
        await send_change(peer, TOOLS_CHANGED)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(changes)
        assert scope.cancelled_caught
        assert await anext(changes) == TOOLS_CHANGED


async def test_other_notifications_are_not_consumed(autojump_clock: MockClock) -> None:
    async with open_scripted_link(OLD, {**EVERYTHING, "logging": {}}) as (link, peer):
        listening = SubscriptionManager(Limits())
        listening.attach(link.caller)
        await peer.notify("notifications/message", {"level": "info", "data": "hello"})
        await wait_all_tasks_blocked()
        [notice] = link.recorder.notices
        assert not listening.receive(notice)
