"""Notifications of changes while clients are connected: their kinds, their times and their receivers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.checkpoints import one_byte_pipe
from tests.server.raw_client import (
    ACKNOWLEDGED,
    LATEST,
    ErrorResponse,
    RawClient,
    connected,
    every_revision,
    legacy,
    modern,
)
from trio_mcp import Context, Limits, Server, UsageError
from trio_mcp.core import META_SUBSCRIPTION_ID, TOOLS_CHANGED
from trio_mcp.server import Run
from trio_mcp.types import CallNext, JsonObject, Prompt, Request, Resource, ResourceTemplate, Tool

Object = dict[str, Any]
BURST = 0.05
LISTS = ("tools", "prompts", "resources")
METHODS = {
    "tools": "notifications/tools/list_changed",
    "prompts": "notifications/prompts/list_changed",
    "resources": "notifications/resources/list_changed",
    "updated": "notifications/resources/updated",
}


def server_with_lists(**options: Any) -> Server:
    """A server with all list capabilities and two resources."""
    server = Server("changing", capabilities=LISTS, **options)
    server.add_resource(Resource("one", "r://one"), lambda ctx, uri: "one")
    server.add_resource(Resource("two", "r://two"), lambda ctx, uri: "two")
    return server


def notices(wire: RawClient) -> list[tuple[str, str | None]]:
    """All notifications of changes that a client received, on any subscription."""
    names = {method: name for name, method in METHODS.items()}
    return [(names[method], params.get("uri")) for method, params in wire.notes if method in names]


async def settle() -> None:
    """Wait until all changes have been sent."""
    await trio.sleep(1)
    await wait_all_tasks_blocked()


@contextlib.asynccontextmanager
async def listening(server: Server, revision: str, *uris: str, **options: Any) -> AsyncIterator[RawClient]:
    """A client that subscribed to all lists, and to updates of these URIs."""
    async with connected(server, revision, **options) as wire:
        await wire.subscribe(tools=True, prompts=True, resources=True, uris=uris)
        yield wire


# Kinds of changes.

CHANGES: dict[str, tuple[Callable[[Server], Any], tuple[str, str | None] | None]] = {
    # The change, and its notification.
    "a tool more": (lambda server: server.tool(name="more")(lambda: ""), ("tools", None)),
    "a raw tool more": (
        lambda server: server.add_tool(Tool("raw", {"type": "object"}), lambda ctx, given: ""),
        ("tools", None),
    ),
    "a prompt more": (lambda server: server.prompt(name="more")(lambda: ""), ("prompts", None)),
    "a raw prompt more": (lambda server: server.add_prompt(Prompt("raw"), lambda ctx, given: ""), ("prompts", None)),
    "a resource more": (lambda server: server.resource("r://more", name="more")(lambda: ""), ("resources", None)),
    "a template more": (lambda server: server.resource("m://{x}", name="more")(lambda x: ""), ("resources", None)),
    "a raw template more": (
        lambda server: server.add_template(ResourceTemplate("raw", "w://{x}"), lambda ctx, uri, found: ""),
        ("resources", None),
    ),
    "a tool less": (lambda server: server.remove_tool("old"), ("tools", None)),
    "a prompt less": (lambda server: server.remove_prompt("old"), ("prompts", None)),
    "a resource less": (lambda server: server.remove_resource("r://one"), ("resources", None)),
    "a template less": (lambda server: server.remove_template("o://{x}"), ("resources", None)),
    "a notification of tools": (lambda server: server.notify_list_changed("tools"), ("tools", None)),
    "a notification of prompts": (lambda server: server.notify_list_changed("prompts"), ("prompts", None)),
    "a notification of resources": (lambda server: server.notify_list_changed("resources"), ("resources", None)),
    "an update": (lambda server: server.notify_resource_updated("r://one"), ("updated", "r://one")),
    "an update of another resource": (lambda server: server.notify_resource_updated("r://two"), None),
    "an update below": (lambda server: server.notify_resource_updated("r://one/below"), None),
    "an update of an unknown resource": (lambda server: server.notify_resource_updated("nothing://"), None),
    "a completion more": (lambda server: server.completion("old")(lambda value: []), None),
    "a notification of no list": (lambda server: server.notify_list_changed(), None),
}


@pytest.mark.contract(name=("a tool more", "an update"))
@req("tool-03", "tool-04", "prm-03", "prm-04", "res-02", "res-20", "sub-01", "sub-05", "sub-13")
@every_revision
@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_is_sent_once_and_causes_no_other_notification(
    name: str, revision: str, autojump_clock: MockClock
) -> None:
    change, told = CHANGES[name]
    server = server_with_lists()
    server.tool(name="old")(lambda: "")
    server.prompt(name="old")(lambda text: "")
    server.resource("o://{x}", name="old")(lambda x: "")
    async with server.running(), listening(server, revision, "r://one") as wire:
        change(server)
        await settle()
    assert notices(wire) == ([] if told is None else [told])


@req("tool-04", "prm-04", "res-02", "sub-01", "sub-13", "sub-14")
@modern
@pytest.mark.parametrize("asked", [(), *((name,) for name in LISTS), ("tools", "resources")])
async def test_a_subscription_gets_only_the_changes_of_its_filter(
    asked: tuple[str, ...], revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_lists()
    async with server.running(), connected(server, revision) as wire:
        subscription = await wire.subscribe(**dict.fromkeys(asked, True))
        assert subscription.agreed == set(asked)
        server.notify_list_changed(*LISTS)
        server.notify_resource_updated("r://one")
        await settle()
    assert notices(wire) == [(name, None) for name in asked]


@pytest.mark.contract
@req("sub-13", "tool-03", "prm-03", "res-02")
@every_revision
async def test_list_changes_need_no_subscription_in_the_legacy_era_only(
    revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_lists()
    async with server.running(), connected(server, revision) as wire:
        server.notify_list_changed(*LISTS)
        server.notify_resource_updated("r://one")
        await settle()
    assert notices(wire) == ([] if wire.modern else [(name, None) for name in LISTS])


@req("life-06", "arch-02")
@legacy
async def test_no_change_is_sent_before_the_end_of_the_handshake(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists()
    async with server.running(), connected(server, revision, opened=False) as wire:
        server.notify_list_changed("tools")
        await settle()
        info = {"name": "wire", "version": "1"}
        params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": info}
        await wire.call("initialize", params)
        server.notify_list_changed("tools")
        await settle()
        assert notices(wire) == []
        await wire.notify("notifications/initialized")
        await settle()
        server.notify_list_changed("tools")
        await settle()
    assert notices(wire) == [("tools", None)]


@req("arch-02", "arch-04", "sub-11")
@every_revision
async def test_changes_of_undeclared_capabilities_are_not_sent(revision: str, autojump_clock: MockClock) -> None:
    server = Server("bare")
    server.tool(name="old")(lambda: "")
    async with server.running(), connected(server, revision) as wire:
        if wire.modern:
            asked = await wire.subscribe(tools=True, prompts=True, resources=True, uris=["r://one"])
            assert asked.agreed == {"tools"}
        else:
            with pytest.raises(ErrorResponse) as refused:
                await wire.call("resources/subscribe", {"uri": "r://one"})
            assert refused.value.code == -32601
        server.notify_list_changed(*LISTS)
        server.notify_resource_updated("r://one")
        server.add_resource(Resource("one", "r://one"), lambda ctx, uri: "")
        server.notify_resource_updated("r://one")
        await settle()
    assert notices(wire) == [("tools", None)]


def test_an_unknown_list_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown list 'tool'; the lists are tools, prompts, resources"):
        server_with_lists().notify_list_changed("tools", "tool")  # type: ignore[arg-type]


def test_changes_are_ignored_while_the_server_does_not_run() -> None:
    server = server_with_lists()
    server.notify_list_changed(*LISTS)
    server.notify_resource_updated("r://one")


# Times.


@every_revision
@pytest.mark.parametrize("burst", [0, BURST, 2])
async def test_changes_of_one_window_are_sent_once_at_its_end(
    burst: float, revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_lists(change_debounce=burst)
    async with server.running(), listening(server, revision, "r://one", "r://two") as wire:
        for _ in range(3):
            start = trio.current_time()
            for _ in range(5):
                server.notify_list_changed("resources", "tools")
                server.notify_resource_updated("r://two")
            told = []
            while len(told) < 3:
                told.append((await wire.changed(), trio.current_time() - start))
            times = {round(time, 9) for _, time in told}
            assert [change for change, _ in told] == [("resources", None), ("tools", None), ("updated", "r://two")]
            assert times == {burst}
        await settle()
        assert len(notices(wire)) == 9


@every_revision
async def test_a_window_opens_with_the_first_change_and_is_not_extended(
    revision: str, autojump_clock: MockClock
) -> None:
    """If a list changes all the time, its notification is still sent, twenty times a second."""
    server = server_with_lists()
    async with server.running(), listening(server, revision) as wire:
        start = trio.current_time()
        told: list[float] = []

        async def listen() -> None:
            while True:
                await wire.changed()
                told.append(round(trio.current_time() - start, 9))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            for _ in range(100):
                server.notify_list_changed("tools")
                await trio.sleep(0.01)
            await settle()
            nursery.cancel_scope.cancel()
    assert 15 <= len(told) <= 21
    assert told[0] == BURST
    assert all(later - earlier > BURST - 1e-6 for earlier, later in itertools.pairwise(told))


@every_revision
async def test_a_change_after_its_notification_is_sent_again(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists()
    async with server.running(), listening(server, revision) as wire:
        start = trio.current_time()
        server.notify_list_changed("tools")
        await wire.changed()
        server.notify_list_changed("tools")
        await wire.changed()
        assert trio.current_time() - start == pytest.approx(2 * BURST)


# Receivers.


@pytest.mark.contract
@req("res-19", "res-20", "sub-13")
@every_revision
async def test_each_client_gets_updates_of_its_own_subscriptions(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists()
    async with (
        server.running(),
        connected(server, revision) as one,
        connected(server, revision) as two,
        connected(server, revision) as third,
    ):
        first = await one.subscribe(uris=["r://one"])
        second = await one.subscribe(uris=["r://two"])
        await two.subscribe(uris=["r://two"])
        for uri in ("r://one", "r://two"):
            server.notify_resource_updated(uri)
        await settle()
        assert (notices(one), notices(two)) == (
            [("updated", "r://one"), ("updated", "r://two")],
            [("updated", "r://two")],
        )
        await first.end()
        await settle()
        for uri in ("r://one", "r://two"):
            server.notify_resource_updated(uri)
        await settle()
        assert notices(one)[2:] == [("updated", "r://two")]
        await second.end()
        await settle()
        server.notify_resource_updated("r://two")
        await settle()
        assert len(notices(one)) == 3
        assert len(notices(two)) == 3
        assert notices(third) == []


@pytest.mark.contract
@req("res-19", "res-20")
@legacy
async def test_repeated_requests_to_subscribe_or_unsubscribe_do_no_harm(
    revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_lists()
    async with server.running(), connected(server, revision) as wire:
        for _ in range(2):
            assert await wire.call("resources/subscribe", {"uri": "r://one"}) == {}
        server.notify_resource_updated("r://one")
        await settle()
        assert notices(wire) == [("updated", "r://one")]
        for uri in ("r://one", "r://one", "r://two", "nothing://"):
            assert await wire.call("resources/unsubscribe", {"uri": uri}) == {}
        server.notify_resource_updated("r://one")
        await settle()
        assert len(notices(wire)) == 1


@req("res-21")
@modern
@pytest.mark.parametrize("method", ["resources/subscribe", "resources/unsubscribe"])
async def test_the_modern_revision_has_no_requests_to_subscribe(
    method: str, revision: str, autojump_clock: MockClock
) -> None:
    async with connected(server_with_lists(), revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call(method, {"uri": "r://one"})
    assert refused.value.code == -32601


@req("sub-02", "sub-03", "sub-05")
@modern
@pytest.mark.parametrize("ids", [(1001, 1002), ("1001", 1001), ("", "a")])
async def test_each_subscription_of_a_connection_has_its_id_in_notifications(
    ids: tuple[Any, Any], revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_lists()
    asked = ({"toolsListChanged": True}, {"toolsListChanged": True, "resourceSubscriptions": ["r://one", "r://one"]})
    async with server.running(), connected(server, revision) as wire:
        for id, filter in zip(ids, asked, strict=True):
            await wire.start("subscriptions/listen", {"notifications": filter}, id=id)
        await settle()
        server.notify_list_changed("tools")
        server.notify_resource_updated("r://one")
        await settle()
        assert wire.noted(ACKNOWLEDGED) == [
            {"_meta": {META_SUBSCRIPTION_ID: ids[0]}, "notifications": asked[0]},
            {
                "_meta": {META_SUBSCRIPTION_ID: ids[1]},
                "notifications": {"toolsListChanged": True, "resourceSubscriptions": ["r://one"]},
            },
        ]
        assert wire.noted(METHODS["tools"]) == [{"_meta": {META_SUBSCRIPTION_ID: id}} for id in ids]
        assert wire.noted(METHODS["updated"]) == [{"_meta": {META_SUBSCRIPTION_ID: ids[1]}, "uri": "r://one"}]
        assert not any(wire.answered(id) for id in ids)


@every_revision
async def test_clients_of_both_eras_get_the_same_change(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists()
    async with (
        server.running(),
        listening(server, revision, "r://one") as one,
        listening(server, LATEST, "r://one") as two,
    ):
        server.notify_list_changed("prompts")
        server.notify_resource_updated("r://one")
        await settle()
    assert notices(one) == notices(two) == [("prompts", None), ("updated", "r://one")]


@every_revision
async def test_a_disconnected_client_is_forgotten(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists()
    async with server.running():
        async with listening(server, revision, "r://one"):
            assert server.statistics().listeners == 1
            server.notify_list_changed("tools")
        assert server.statistics().listeners == 0
        await settle()  # the pending notification has no receiver
        async with connected(server, revision) as wire:
            server.notify_list_changed("tools")
            await settle()
        assert len(notices(wire)) == (0 if wire.modern else 1)


# The end of a subscription.


@pytest.mark.contract
@req("sub-08")
@modern
async def test_a_server_that_drains_ends_its_subscriptions_with_their_results(
    revision: str, autojump_clock: MockClock
) -> None:
    server, drain = server_with_lists(), trio.Event()
    async with server.running(), connected(server, revision, drain=drain) as wire:
        ids = [
            await wire.start("subscriptions/listen", {"notifications": {"toolsListChanged": True}}) for _ in range(2)
        ]
        await settle()
        drain.set()
        for id in ids:
            result = (await wire.response(id))["result"]
            assert result["resultType"] == "complete"
            assert result["_meta"][META_SUBSCRIPTION_ID] == id
        server.notify_list_changed("tools")
        await settle()
        assert notices(wire) == []
        assert server.statistics().listeners == 0
        await wire.ended.wait()


@pytest.mark.contract
@req("sub-01", "cancel-03", "cancel-18")
@modern
async def test_a_cancelled_subscription_ends_at_once_without_an_answer(
    revision: str, autojump_clock: MockClock
) -> None:
    server = server_with_lists()
    async with server.running(), connected(server, revision) as wire:
        id = await wire.start("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        await settle()
        server.notify_list_changed("tools")  # its notification is pending
        await wire.cancel(id)
        await settle()
        assert (notices(wire), server.statistics().listeners) == ([], 0)
        assert not wire.answered(id)
        await wire.start("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, id=id)  # the id is free
        await settle()
        server.notify_list_changed("tools")
        await settle()
        assert notices(wire) == [("tools", None)]


# Invalid subscriptions.


@req("sub-14", "core-30")
@modern
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"notifications": None},
        {"notifications": []},
        {"notifications": {"toolsListChanged": "yes"}},
        {"notifications": {"toolsListChanged": None}},
        {"notifications": {"resourceSubscriptions": "r://one"}},
        {"notifications": {"resourceSubscriptions": [1]}},
        {"notifications": {"resourceSubscriptions": {"r://one": True}}},
    ],
    ids=str,
)
async def test_an_invalid_filter_is_refused(params: Object, revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists()
    async with server.running(), connected(server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call("subscriptions/listen", params)
        assert (refused.value.code, server.statistics().listeners) == (-32602, 0)


LIMITS: list[tuple[Object, tuple[str, ...], int | None]] = [
    ({"listener_changes": 5}, ("r://one",), None),
    ({"listener_changes": 5}, tuple(f"r://{number}" for number in range(6)), -32602),
    ({"uri_length": 7}, ("r://one",), None),
    ({"uri_length": 6}, ("r://one",), -32602),
    ({"subscriptions": 4}, ("r://one", "r://two"), None),
    ({"subscriptions": 4}, ("r://one", "r://two", "r://3", "r://4"), -32603),
]


@pytest.mark.contract(code=(-32603,))
@every_revision
@pytest.mark.parametrize(("limits", "uris", "code"), LIMITS)
async def test_the_number_and_the_length_of_subscribed_uris_are_limited(
    limits: Object, uris: tuple[str, ...], code: int | None, revision: str, autojump_clock: MockClock
) -> None:
    server = Server("small", limits=Limits(**limits))
    server.resource("r://{x}", name="r")(lambda x: x)
    async with server.running(), connected(server, revision) as wire:
        if code is None:
            assert (await wire.subscribe(uris=uris)).agreed == set(uris)
        else:
            with pytest.raises(ErrorResponse) as refused:
                await wire.subscribe(uris=uris)
            assert refused.value.code == code
        assert (await wire.call("resources/read", {"uri": "r://fine"}))["contents"]


# A client that does not read.


@every_revision
async def test_notifications_do_not_pile_up_if_the_client_does_not_read(
    revision: str, autojump_clock: MockClock
) -> None:
    uris = [f"r://{number}" for number in range(20)]
    server = Server("slow", capabilities=LISTS, limits=Limits(outgoing=4))
    server.resource("r://{x}", name="r")(lambda x: x)
    async with server.running(), listening(server, revision, *uris, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            for _ in range(50):
                server.notify_list_changed(*LISTS)
                for uri in uris:
                    server.notify_resource_updated(uri)
                await settle()
        await settle()
        told = notices(wire)
        # Of the 1150 notifications, the client gets those in transit, those that waited for the wire, and those that
        # waited for room.  Each of these groups has a notification at most once for each kind of change.
        every = {*((name, None) for name in LISTS), *(("updated", uri) for uri in uris)}
        assert set(told) == every
        assert len(told) <= 4 + 2 * len(every)
        server.notify_list_changed("tools")
        await settle()
        assert notices(wire)[len(told) :] == [("tools", None)]


@modern
async def test_pending_changes_of_an_ended_subscription_are_not_sent(revision: str, autojump_clock: MockClock) -> None:
    server = Server("slow", capabilities=LISTS, limits=Limits(outgoing=1))
    async with server.running(), connected(server, revision, streams=one_byte_pipe) as wire:
        subscriptions = [await wire.subscribe(tools=True, prompts=True) for _ in range(3)]
        with wire.not_reading():
            for _ in range(5):
                server.notify_list_changed("tools", "prompts")
                await settle()
            for subscription in subscriptions[1:]:
                await subscription.end()
            await settle()
        await settle()
        # `wire` fails if a notification comes on an ended subscription.  Most changes were never sent.
        assert len(notices(wire)) <= 6
        before = len(notices(wire))
        server.notify_list_changed("tools")
        await settle()
        assert notices(wire)[before:] == [("tools", None)]


@every_revision
async def test_a_client_that_does_not_read_delays_no_other_client(revision: str, autojump_clock: MockClock) -> None:
    server = server_with_lists(limits=Limits(outgoing=1))
    async with (
        server.running(),
        listening(server, revision, streams=one_byte_pipe) as slow,
        listening(server, revision) as quick,
    ):
        with slow.not_reading():
            for number in range(1, 11):
                start = trio.current_time()
                server.notify_list_changed("tools")
                await quick.changed()
                assert trio.current_time() - start == pytest.approx(BURST)
                assert len(notices(quick)) == number
                await settle()
        await settle()
        assert 1 <= len(notices(slow)) <= 3


async def test_a_worker_thread_may_change_the_server_and_notify(autojump_clock: MockClock) -> None:
    server = Server("threads", capabilities=["resources"])

    @server.tool
    def learn(name: str) -> str:
        """Learn something new."""
        server.tool(name=name)(lambda: name)
        server.notify_resource_updated("notes://all")
        return f"learned {name}"

    async with connected(server, "2026-07-28") as wire:
        await wire.subscribe(tools=True, uris=["notes://all"])
        for name in ("one", "two"):  # the second change is sent like the first
            await wire.call("tools/call", {"name": "learn", "arguments": {"name": name}})
            assert {await wire.changed(), await wire.changed()} == {("tools", None), ("updated", "notes://all")}
        listed = await wire.call("tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["learn", "one", "two"]


async def test_a_change_after_the_end_of_the_loop_is_ignored(autojump_clock: MockClock) -> None:
    runs: list[Run] = []
    server = Server("gone")

    async def make() -> None:
        async with server.running():
            runs.extend(server._runs)

    def in_another_loop() -> None:
        trio.run(make)

    await trio.to_thread.run_sync(in_another_loop)
    runs[0].publish(TOOLS_CHANGED)


@pytest.mark.parametrize("method", ["resources/subscribe", "resources/unsubscribe"])
async def test_a_subscription_is_answered_after_the_end_of_input(
    method: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def slowly(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        await trio.sleep(0.1)  # meanwhile the input ends
        return await call_next(request)

    server = Server("notes", middleware=[slowly])
    server.resource("note://a")(lambda: "a")
    async with connected(server, "2025-11-25") as wire:
        id = await wire.start(method, {"uri": "note://a"})
        await wire.close()
        assert (await wire.response(id))["result"] == {}
    assert caplog.records == []
