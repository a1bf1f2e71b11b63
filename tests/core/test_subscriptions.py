"""Subscriptions in both eras: each change goes to exactly its subscribers, and a client knows the agreed changes."""

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    ACKNOWLEDGED,
    LATEST,
    META_SUBSCRIPTION_ID,
    PROMPTS_CHANGED,
    RESOURCES_CHANGED,
    REVISIONS,
    TOOLS_CHANGED,
    Answered,
    ByteBudget,
    ChangeEvent,
    ChangeKind,
    ChangeReceived,
    ConnectionLost,
    Error,
    Id,
    InvalidAnswer,
    Json,
    JsonObject,
    Limits,
    Listeners,
    Notification,
    OpenSubscription,
    Outcome,
    Refused,
    Request,
    RequestError,
    Response,
    Revision,
    Role,
    SubscriptionAcknowledged,
    SubscriptionEnded,
    Subscriptions,
    SubscriptionState,
    TimedOut,
    UsageError,
    change_of,
    listen_params,
    resource_updated,
)

A, B, C = resource_updated("notes://a"), resource_updated("notes://b"), resource_updated("notes://ab")
CHANGES = [TOOLS_CHANGED, PROMPTS_CHANGED, RESOURCES_CHANGED, A, B, C]
EVERYTHING = {
    "tools": {"listChanged": True},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True, "subscribe": True},
}


def request(id: Id, *changes: ChangeEvent) -> Request:
    return Request(id, "subscriptions/listen", listen_params(changes))


def asking(filter: Json) -> Request:
    return Request(1, "subscriptions/listen", {"notifications": filter})


def receivers(listeners: Listeners[Any], change: ChangeEvent) -> list[Any]:
    return [key for key, _ in listeners.publish(change)]


# Changes on the wire.


@pytest.mark.parametrize(
    ("change", "method", "params"),
    [
        (TOOLS_CHANGED, "notifications/tools/list_changed", {}),
        (PROMPTS_CHANGED, "notifications/prompts/list_changed", {}),
        (RESOURCES_CHANGED, "notifications/resources/list_changed", {}),
        (A, "notifications/resources/updated", {"uri": "notes://a"}),
    ],
)
def test_a_change_is_converted_to_its_notification_and_back(
    change: ChangeEvent, method: str, params: JsonObject
) -> None:
    assert change.notification() == Notification(method, params)
    tagged = change.notification(7)
    assert tagged == Notification(method, {"_meta": {META_SUBSCRIPTION_ID: 7}, **params})
    assert change_of(change.notification()) == change_of(tagged) == change


@pytest.mark.parametrize("params", [{}, {"uri": None}, {"uri": 5}, {"uri": ["notes://a"]}])
def test_an_update_without_a_uri_is_no_change(params: JsonObject) -> None:
    assert change_of(Notification("notifications/resources/updated", params)) is None


def test_other_notifications_are_no_changes() -> None:
    assert change_of(Notification("notifications/progress", {})) is None


@pytest.mark.parametrize("revision", REVISIONS.values(), ids=str)
def test_each_kind_of_change_needs_the_capability_of_its_notification(revision: Revision) -> None:
    for kind in ChangeKind:
        row = revision.notification(Role.SERVER, kind.method)
        assert row is not None
        name, option = row.needs
        assert kind.declared_in({name: {option: True}})
        assert not kind.declared_in({name: {option: False}})
        assert not kind.declared_in({name: {}})
        assert not kind.declared_in({})


def test_the_params_of_a_listen_request_name_the_changes() -> None:
    assert listen_params([B, TOOLS_CHANGED, A]) == {
        "notifications": {"resourceSubscriptions": ["notes://b", "notes://a"], "toolsListChanged": True}
    }
    assert listen_params([]) == {"notifications": {}}


# The server's side, modern.


@req("sub-02", "sub-05")
@pytest.mark.parametrize("id", [1, 0, "1", "", "listen-1", -5, 2**53])
def test_each_message_of_a_subscription_has_the_id_of_its_request(id: Id) -> None:
    listeners: Listeners[str] = Listeners()
    assert listeners.publish(TOOLS_CHANGED) == []
    acknowledgement = listeners.listen("key", request(id, TOOLS_CHANGED, A), EVERYTHING)
    assert acknowledgement == Notification(
        "notifications/subscriptions/acknowledged",
        {
            "_meta": {META_SUBSCRIPTION_ID: id},
            "notifications": {"toolsListChanged": True, "resourceSubscriptions": ["notes://a"]},
        },
    )
    sent = [acknowledgement]
    for change in (TOOLS_CHANGED, A):
        ((key, notification),) = listeners.publish(change)
        assert key == "key"
        sent.append(notification)
    ended = listeners.close("key")
    assert ended is not None
    for params in [*(notification.params for notification in sent), ended.result]:
        got = params["_meta"][META_SUBSCRIPTION_ID]
        assert (got, type(got)) == (id, type(id))


def test_the_messages_are_those_of_the_official_examples() -> None:
    listeners: Listeners[int] = Listeners()
    declared = {"tools": {"listChanged": True}, "resources": {"subscribe": True}}
    config = resource_updated("file:///project/config.json")
    assert listeners.listen(0, request("listen-1", TOOLS_CHANGED, config), declared).params == {
        "_meta": {"io.modelcontextprotocol/subscriptionId": "listen-1"},
        "notifications": {"toolsListChanged": True, "resourceSubscriptions": ["file:///project/config.json"]},
    }
    assert listeners.publish(TOOLS_CHANGED)[0][1].params == {
        "_meta": {"io.modelcontextprotocol/subscriptionId": "listen-1"}
    }
    assert listeners.close(0) == Response(
        "listen-1", {"resultType": "complete", "_meta": {"io.modelcontextprotocol/subscriptionId": "listen-1"}}
    )


CAPABILITIES = [
    {},
    {"tools": {}, "prompts": {"listChanged": False}, "resources": None},
    {"tools": {"listChanged": True}},
    {"prompts": {"listChanged": True}, "resources": {"subscribe": True}},
    {"resources": {"listChanged": True}},
    EVERYTHING,
]


@req("sub-01", "sub-11", "sub-13", "sub-14")
@given(st.lists(st.sampled_from(CHANGES), unique=True), st.sampled_from(CAPABILITIES))
@settings(max_examples=100)
def test_exactly_the_requested_changes_that_are_declared_are_sent(
    asked: list[ChangeEvent], declared: dict[str, Any]
) -> None:
    listeners: Listeners[int] = Listeners()
    acknowledgement = listeners.listen(0, request(1, *asked), declared)
    agreed = [change for change in asked if change.kind.declared_in(declared)]
    assert acknowledgement.params["notifications"] == listen_params(agreed)["notifications"]
    assert [change for change in CHANGES if listeners.publish(change)] == [each for each in CHANGES if each in agreed]


@pytest.mark.parametrize("meant", ["notes://a/", "notes://A", "notes://a?x", "notes://", "notes://%61", ""])
def test_a_subscription_matches_the_exact_uri_only(meant: str) -> None:
    listeners: Listeners[int] = Listeners()
    listeners.listen(0, request(1, A), EVERYTHING)
    assert listeners.publish(resource_updated(meant)) == []


@pytest.mark.parametrize(
    "filter",
    [
        {"toolsListChanged": False, "resourceSubscriptions": []},
        {"somethingNew": True, "taskIds": 5},
        {},
    ],
)
@req("sub-14")
def test_false_empty_and_unknown_members_subscribe_to_nothing(filter: Json) -> None:
    listeners: Listeners[int] = Listeners()
    assert listeners.listen(0, asking(filter), EVERYTHING).params["notifications"] == {}
    assert [change for change in CHANGES if listeners.publish(change)] == []
    assert len(listeners) == 1


def test_a_uri_that_is_named_twice_is_notified_once() -> None:
    listeners: Listeners[int] = Listeners()
    acknowledgement = listeners.listen(0, asking({"resourceSubscriptions": ["notes://a", "notes://a"]}), EVERYTHING)
    assert acknowledgement.params["notifications"] == {"resourceSubscriptions": ["notes://a"]}
    assert receivers(listeners, A) == [0]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "notifications must be an object; got Absent"),
        ({"notifications": None}, "notifications must be an object; got NoneType"),
        ({"notifications": ["toolsListChanged"]}, "notifications must be an object; got list"),
        ({"notifications": {"toolsListChanged": None}}, "toolsListChanged must be a boolean; got NoneType"),
        ({"notifications": {"promptsListChanged": 1}}, "promptsListChanged must be a boolean; got int"),
        ({"notifications": {"resourcesListChanged": "yes"}}, "resourcesListChanged must be a boolean; got str"),
        ({"notifications": {"resourceSubscriptions": "notes://a"}}, "must be an array of strings; got str"),
        ({"notifications": {"resourceSubscriptions": [1]}}, "must be an array of strings"),
        ({"notifications": {"resourceSubscriptions": None}}, "must be an array of strings; got NoneType"),
        ({"notifications": {"resourceSubscriptions": {}}}, "must be an array of strings; got dict"),
        ({"notifications": {"resourceSubscriptions": True}}, "must be an array of strings; got bool"),
    ],
)
def test_a_malformed_filter_is_refused_and_adds_no_listener(params: JsonObject, why: str) -> None:
    listeners: Listeners[int] = Listeners()
    with pytest.raises(RequestError, match=why) as caught:
        listeners.listen(0, Request(1, "subscriptions/listen", params), EVERYTHING)
    assert caught.value.code == -32602
    assert len(listeners) == 0


@req("sub-03")
def test_subscriptions_on_one_channel_do_not_wait_for_each_other() -> None:
    listeners: Listeners[str] = Listeners()
    listeners.listen("first", request(1, TOOLS_CHANGED), EVERYTHING)
    sent = [notification for _, notification in listeners.publish(TOOLS_CHANGED)]
    sent.append(listeners.listen("second", request("1", TOOLS_CHANGED), EVERYTHING))
    sent += [notification for _, notification in listeners.publish(TOOLS_CHANGED)]
    assert [(each.params["_meta"][META_SUBSCRIPTION_ID], each.method == ACKNOWLEDGED) for each in sent] == [
        (1, False),
        ("1", True),
        (1, False),
        ("1", False),
    ]


def test_a_key_cannot_be_used_by_two_listeners() -> None:
    listeners: Listeners[int] = Listeners()
    listeners.listen(0, request(1, TOOLS_CHANGED), EVERYTHING)
    for again in (
        lambda: listeners.listen(0, request(2, A), EVERYTHING),
        lambda: listeners.add_session(0, EVERYTHING),
    ):
        with pytest.raises(UsageError, match="listens already"):
            again()
    assert receivers(listeners, A) == []
    assert listeners.publish(TOOLS_CHANGED) == [(0, TOOLS_CHANGED.notification(1))]


@req("sub-08")
def test_a_subscription_that_the_server_ends_gets_one_result() -> None:
    listeners: Listeners[int] = Listeners()
    listeners.listen(0, request("x", TOOLS_CHANGED, A), EVERYTHING)
    listeners.listen(1, request("y", TOOLS_CHANGED), EVERYTHING)
    assert listeners.close(0) == Response("x", {"resultType": "complete", "_meta": {META_SUBSCRIPTION_ID: "x"}})
    assert listeners.close(0) is None
    assert not listeners.forget(0)
    assert receivers(listeners, TOOLS_CHANGED) == [1]
    assert receivers(listeners, A) == []


def test_a_subscription_that_the_client_ends_gets_no_messages() -> None:
    listeners: Listeners[int] = Listeners()
    listeners.listen(0, request(1, TOOLS_CHANGED, A), EVERYTHING)
    assert listeners.forget(0)
    assert not listeners.forget(0)
    assert listeners.close(0) is None
    assert len(listeners) == 0
    assert [change for change in CHANGES if listeners.publish(change)] == []


def test_a_server_that_ends_has_a_result_for_each_modern_subscription() -> None:
    listeners: Listeners[str] = Listeners()
    listeners.listen("a", request(1, TOOLS_CHANGED), EVERYTHING)
    listeners.add_session("b", EVERYTHING)
    listeners.listen("c", request(2), EVERYTHING)
    ended = [listeners.close(key) for key in ("a", "b", "c")]
    assert [None if result is None else result.id for result in ended] == [1, None, 2]
    assert len(listeners) == 0
    assert listeners.close("a") is None


# The server's side, legacy.


def test_a_legacy_session_gets_all_declared_list_changes_without_an_id() -> None:
    listeners: Listeners[str] = Listeners()
    listeners.add_session("all", EVERYTHING)
    listeners.add_session("tools", {"tools": {"listChanged": True}, "prompts": {}, "resources": {"subscribe": True}})
    assert listeners.publish(TOOLS_CHANGED) == [
        ("all", Notification("notifications/tools/list_changed")),
        ("tools", Notification("notifications/tools/list_changed")),
    ]
    assert receivers(listeners, PROMPTS_CHANGED) == ["all"]
    assert receivers(listeners, RESOURCES_CHANGED) == ["all"]
    assert receivers(listeners, A) == []


@req("res-19", "res-20")
def test_a_legacy_session_gets_updates_from_subscribe_to_unsubscribe() -> None:
    listeners: Listeners[str] = Listeners()
    listeners.add_session("s", EVERYTHING)
    listeners.add_session("t", EVERYTHING)
    a, b = {"uri": "notes://a"}, {"uri": "notes://b", "_meta": {}}
    assert listeners.unsubscribe("s", a) == {}  # never subscribed: no harm
    assert listeners.subscribe("s", a) == listeners.subscribe("s", b) == listeners.subscribe("s", a) == {}
    listeners.subscribe("t", b)
    assert listeners.publish(A) == [("s", Notification("notifications/resources/updated", {"uri": "notes://a"}))]
    assert receivers(listeners, B) == ["s", "t"]
    assert receivers(listeners, C) == []
    assert listeners.unsubscribe("s", a) == listeners.unsubscribe("s", a) == {}
    assert receivers(listeners, A) == []
    assert receivers(listeners, B) == ["s", "t"]
    assert receivers(listeners, TOOLS_CHANGED) == ["s", "t"]
    assert listeners.forget("s")
    assert receivers(listeners, B) == ["t"]


@pytest.mark.parametrize("params", [{}, {"uri": None}, {"uri": 5}, {"uri": ["notes://a"]}])
def test_a_subscribe_request_without_a_uri_is_refused(params: JsonObject) -> None:
    listeners: Listeners[int] = Listeners()
    listeners.add_session(0, EVERYTHING)
    for serve in (listeners.subscribe, listeners.unsubscribe):
        with pytest.raises(RequestError, match="uri must be a string") as caught:
            serve(0, params)
        assert caught.value.code == -32602


@req("res-21")
def test_a_modern_subscription_cannot_be_changed_by_subscribe_requests() -> None:
    listeners: Listeners[int] = Listeners()
    listeners.listen(0, request(1), EVERYTHING)
    for key in (0, 1):
        for serve in (listeners.subscribe, listeners.unsubscribe):
            with pytest.raises(UsageError, match="not a legacy session"):
                serve(key, {"uri": "notes://a"})
    assert receivers(listeners, A) == []
    assert LATEST.request(Role.CLIENT, "resources/subscribe") is None
    assert LATEST.request(Role.CLIENT, "resources/unsubscribe") is None


def test_a_legacy_session_gets_no_result_when_it_is_closed() -> None:
    listeners: Listeners[int] = Listeners()
    listeners.add_session(0, EVERYTHING)
    assert listeners.close(0) is None
    assert len(listeners) == 0
    assert receivers(listeners, TOOLS_CHANGED) == []


def test_a_change_is_sent_to_both_eras_in_their_own_forms() -> None:
    listeners: Listeners[str] = Listeners()
    listeners.add_session("legacy", EVERYTHING)
    listeners.listen("modern", request(9, TOOLS_CHANGED), EVERYTHING)
    assert listeners.publish(TOOLS_CHANGED) == [
        ("legacy", TOOLS_CHANGED.notification()),
        ("modern", TOOLS_CHANGED.notification(9)),
    ]


# Limits.


def test_the_number_of_changes_of_a_listener_is_limited() -> None:
    listeners: Listeners[int] = Listeners(Limits(listener_changes=2))
    listeners.listen(0, request(1, A, B), EVERYTHING)
    with pytest.raises(RequestError, match="may ask for 2 changes; these would be 3") as caught:
        listeners.listen(1, request(2, A, B, C), EVERYTHING)
    assert caught.value.code == -32602
    listeners.add_session(2, {"tools": {"listChanged": True}})
    listeners.subscribe(2, {"uri": "notes://a"})
    with pytest.raises(RequestError, match="may ask for 2 changes; these would be 3"):
        listeners.subscribe(2, {"uri": "notes://b"})
    listeners.subscribe(2, {"uri": "notes://a"})  # subscribed already
    listeners.unsubscribe(2, {"uri": "notes://a"})
    listeners.subscribe(2, {"uri": "notes://b"})
    assert receivers(listeners, B) == [0, 2]


def test_the_length_of_a_uri_is_limited() -> None:
    listeners: Listeners[int] = Listeners(Limits(uri_length=9))
    listeners.listen(0, request(1, A), EVERYTHING)
    with pytest.raises(RequestError, match="may have 9 characters; one has 10") as caught:
        listeners.listen(1, request(2, A, C), EVERYTHING)
    assert caught.value.code == -32602
    listeners.add_session(2, EVERYTHING)
    with pytest.raises(RequestError, match="may have 9 characters; one has 10"):
        listeners.subscribe(2, {"uri": C.item})
    assert len(listeners) == 2
    assert receivers(listeners, C) == []


def test_subscriptions_are_charged_for_the_length_of_their_uris() -> None:
    limits = Limits(bytes_each=1000)
    account = ByteBudget(limits).account("ann")
    listeners: Listeners[int] = Listeners(limits)
    listeners.listen(0, request(0, A), EVERYTHING, account)
    held = account.held
    assert held > len(A.item)
    listeners.add_session(1, EVERYTHING, account)
    with pytest.raises(RequestError, match=r"no room for more subscriptions \(Limits.bytes_each\)"):
        listeners.subscribe(1, {"uri": "notes://" + "x" * 1000})
    assert (0 in listeners, 2 in listeners, account.held) == (True, False, held)
    listeners.close(0)
    listeners.forget(1)
    assert account.held == 0


def test_the_number_of_subscriptions_of_a_server_is_limited() -> None:
    listeners: Listeners[int] = Listeners(Limits(subscriptions=6))

    def refused(serve: Any, *arguments: Any) -> None:
        with pytest.raises(RequestError, match="no room for more subscriptions") as caught:
            serve(*arguments)
        assert caught.value.code == -32603

    listeners.listen(0, request(1, A, B), EVERYTHING)  # 3 places: itself and two changes
    listeners.add_session(1, {})  # 1
    listeners.subscribe(1, {"uri": "notes://a"})  # 1
    listeners.subscribe(1, {"uri": "notes://a"})  # 0: subscribed already
    refused(listeners.listen, 2, request(2, A), EVERYTHING)  # 2
    listeners.listen(2, request(2), EVERYTHING)  # 1: if an empty one were free, their number would have no limit
    refused(listeners.listen, 3, request(3), EVERYTHING)
    refused(listeners.subscribe, 1, {"uri": "notes://b"})
    listeners.unsubscribe(1, {"uri": "notes://a"})
    listeners.unsubscribe(1, {"uri": "notes://a"})
    listeners.subscribe(1, {"uri": "notes://b"})
    refused(listeners.subscribe, 1, {"uri": "notes://c"})
    listeners.close(0)
    listeners.forget(1)
    listeners.forget(1)
    listeners.listen(4, request(4, TOOLS_CHANGED, PROMPTS_CHANGED, A, B), EVERYTHING)
    refused(listeners.listen, 5, request(5), EVERYTHING)


def test_ten_thousand_idle_subscriptions_cost_less_than_a_kibibyte_each() -> None:
    requests = [request(at, TOOLS_CHANGED, resource_updated(f"notes://{at}")) for at in range(10_000)]
    listeners: Listeners[int] = Listeners()
    gc.collect()
    tracemalloc.start()
    try:
        for at, each in enumerate(requests):
            listeners.listen(at, each, EVERYTHING)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        assert used < 10_000 * 1024
        for at in range(10_000):
            listeners.forget(at)
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < used / 5  # the empty tables remain


def test_publishing_takes_no_time_for_other_subscriptions() -> None:
    # A search through all listeners for each change takes 400 million steps, and fails by the timeout of the suite.
    listeners: Listeners[int] = Listeners()
    for at in range(20_000):
        listeners.listen(at, request(at, resource_updated(f"notes://{at}")), EVERYTHING)
    for at in range(20_000):
        assert len(listeners.publish(resource_updated(f"notes://{at}"))) == 1
    assert listeners.publish(TOOLS_CHANGED) == []


# Any order of operations, compared with the simplest correct model.

steps = st.lists(
    st.one_of(
        st.tuples(st.just("listen"), st.integers(0, 3), st.lists(st.sampled_from(CHANGES), max_size=3)),
        st.tuples(st.just("add_session"), st.integers(4, 5), st.just([])),
        st.tuples(st.sampled_from(["subscribe", "unsubscribe"]), st.integers(4, 5), st.just([A]) | st.just([B])),
        st.tuples(st.sampled_from(["forget", "close"]), st.integers(0, 5), st.just([])),
    ),
    max_size=20,
)


def play(
    listeners: Listeners[int], heard: dict[int, set[ChangeEvent]], name: str, key: int, changes: list[ChangeEvent]
) -> None:
    if name == "listen" and key not in heard:
        listeners.listen(key, request(key, *changes), EVERYTHING)
        heard[key] = set(changes)
    elif name == "add_session" and key not in heard:
        listeners.add_session(key, EVERYTHING)
        heard[key] = {TOOLS_CHANGED, PROMPTS_CHANGED, RESOURCES_CHANGED}
    elif name == "subscribe" and key in heard:
        listeners.subscribe(key, {"uri": changes[0].item})
        heard[key].add(changes[0])
    elif name == "unsubscribe" and key in heard:
        listeners.unsubscribe(key, {"uri": changes[0].item})
        heard[key].discard(changes[0])
    elif name == "forget":
        assert listeners.forget(key) is (key in heard)
        heard.pop(key, None)
    elif name == "close":
        assert (listeners.close(key) is not None) is (key in heard and key < 4)
        heard.pop(key, None)


@given(steps)
@settings(max_examples=150)
def test_exactly_the_subscribers_are_notified_after_any_order_of_operations(
    plan: list[tuple[str, int, list[ChangeEvent]]],
) -> None:
    listeners: Listeners[int] = Listeners()
    heard: dict[int, set[ChangeEvent]] = {}
    for step in plan:
        play(listeners, heard, *step)
        assert len(listeners) == len(heard)
        for change in CHANGES:
            published = listeners.publish(change)
            assert {key for key, _ in published} == {key for key in heard if change in heard[key]}
            assert all(note == change.notification(key if key < 4 else None) for key, note in published)


# The client's side.


def acknowledged(id: Json, filter: Json) -> Notification:
    return Notification(ACKNOWLEDGED, {"_meta": {META_SUBSCRIPTION_ID: id}, "notifications": filter})


@req("sub-04")
@pytest.mark.parametrize(
    ("filter", "agreed", "missing"),
    [
        ({"toolsListChanged": True, "resourceSubscriptions": ["notes://b", "notes://a"]}, (TOOLS_CHANGED, A, B), ()),
        ({"toolsListChanged": True}, (TOOLS_CHANGED,), (A, B)),
        ({"resourceSubscriptions": ["notes://b"]}, (B,), (TOOLS_CHANGED, A)),
        ({}, (), (TOOLS_CHANGED, A, B)),
        ({"toolsListChanged": False, "somethingNew": [1]}, (), (TOOLS_CHANGED, A, B)),
        ({"toolsListChanged": True, "promptsListChanged": True}, (TOOLS_CHANGED,), (A, B)),  # more than we asked for
        (None, (), (TOOLS_CHANGED, A, B)),
        ({"toolsListChanged": "yes"}, (), (TOOLS_CHANGED, A, B)),
    ],
)
def test_the_client_knows_which_requested_changes_are_missing(
    filter: Json, agreed: tuple[ChangeEvent, ...], missing: tuple[ChangeEvent, ...]
) -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [TOOLS_CHANGED, A, B, A])
    assert (subscription.state, subscription.asked) == (SubscriptionState.ASKED, (TOOLS_CHANGED, A, B))
    assert (subscription.agreed, subscription.missing) == (None, ())
    assert subscriptions.receive(acknowledged(1, filter)) == [SubscriptionAcknowledged(subscription)]
    assert (subscription.state, subscription.agreed, subscription.missing) == (SubscriptionState.OPEN, agreed, missing)


def test_only_the_first_acknowledgement_counts() -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [TOOLS_CHANGED])
    subscriptions.receive(acknowledged(1, {"toolsListChanged": True}))
    assert subscriptions.receive(acknowledged(1, {})) == []
    assert subscription.agreed == (TOOLS_CHANGED,)


@req("sub-06", "sub-07", "stdio-15")
def test_notifications_go_to_the_subscription_they_name() -> None:
    subscriptions = Subscriptions()
    one, text, two = (subscriptions.ask(id, [TOOLS_CHANGED, A]) for id in (1, "1", 2))
    assert subscriptions.receive(TOOLS_CHANGED.notification(1)) == [ChangeReceived(one, TOOLS_CHANGED)]
    assert subscriptions.receive(TOOLS_CHANGED.notification("1")) == [ChangeReceived(text, TOOLS_CHANGED)]
    assert subscriptions.receive(acknowledged("1", {})) == [SubscriptionAcknowledged(text)]
    assert subscriptions.receive(A.notification(2)) == [ChangeReceived(two, A)]
    assert (one.state, text.state, two.state) == (
        SubscriptionState.ASKED,
        SubscriptionState.OPEN,
        SubscriptionState.ASKED,
    )


@pytest.mark.parametrize(
    "notification",
    [
        TOOLS_CHANGED.notification(2),  # a subscription that does not exist
        TOOLS_CHANGED.notification("1"),
        TOOLS_CHANGED.notification(),  # of the legacy era
        PROMPTS_CHANGED.notification(1),  # never requested
        acknowledged(2, {}),
        Notification(ACKNOWLEDGED, {"notifications": {}}),
        Notification("notifications/progress", {"_meta": {META_SUBSCRIPTION_ID: 1}}),
        Notification("notifications/resources/updated", {"_meta": {META_SUBSCRIPTION_ID: 1}}),
        Notification("notifications/resources/updated", {"_meta": {META_SUBSCRIPTION_ID: 1}, "uri": 5}),
        *(
            Notification("notifications/tools/list_changed", {"_meta": {META_SUBSCRIPTION_ID: id}})
            for id in (True, 1.0, None, [1], {})
        ),
        Notification("notifications/tools/list_changed", {"_meta": [1]}),
        Notification("notifications/tools/list_changed", {"_meta": None}),
    ],
)
def test_a_notification_for_no_subscription_of_ours_is_ignored(notification: Notification) -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [TOOLS_CHANGED, A])
    assert subscriptions.receive(notification) == []
    assert subscription.state is SubscriptionState.ASKED


def test_an_update_below_a_subscribed_resource_is_received() -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [A])
    below = resource_updated("notes://a/line/1")
    assert subscriptions.receive(below.notification(1)) == [ChangeReceived(subscription, below)]


OUTCOMES: list[tuple[Outcome, SubscriptionState]] = [
    (Answered(1, "subscriptions/listen", {"resultType": "complete"}), SubscriptionState.ENDED),
    (SubscriptionEnded(1, "subscriptions/listen", ""), SubscriptionState.ENDED),
    (Refused(1, "subscriptions/listen", Error(1, -32601, "no")), SubscriptionState.REFUSED),
    (InvalidAnswer(1, "subscriptions/listen", "why"), SubscriptionState.BROKEN),
    (TimedOut(1, "subscriptions/listen"), SubscriptionState.BROKEN),
    (ConnectionLost(1, "subscriptions/listen", "why"), SubscriptionState.BROKEN),
]


@req("sub-09")
@pytest.mark.parametrize("open", [False, True])
@pytest.mark.parametrize(("outcome", "state"), OUTCOMES)
def test_the_outcome_of_the_request_decides_the_state_of_its_subscription(
    outcome: Outcome, state: SubscriptionState, open: bool
) -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [TOOLS_CHANGED])
    if open:
        subscriptions.receive(acknowledged(1, {"toolsListChanged": True}))
    assert subscriptions.finish(outcome) is subscription
    assert subscription.state is state
    assert subscriptions.receive(TOOLS_CHANGED.notification(1)) == []
    for late, _ in OUTCOMES:  # sub-08 and cancel-12 may come in either order
        assert subscriptions.finish(late) is None
    assert subscriptions.close(1) is None
    assert subscriptions.connection_lost() == []
    assert subscription.state is state


def test_the_outcome_of_another_request_ends_no_subscription() -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [TOOLS_CHANGED])
    assert subscriptions.finish(Answered(2, "tools/list", {})) is None
    assert subscription.state is SubscriptionState.ASKED


def test_a_subscription_that_we_end_receives_no_more_changes() -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.ask(1, [TOOLS_CHANGED])
    assert subscriptions.close(1) is subscription
    assert subscription.state is SubscriptionState.ENDED
    assert subscriptions.receive(TOOLS_CHANGED.notification(1)) == []
    assert subscriptions.close(1) is None


def test_subscriptions_that_were_open_when_the_link_was_lost_are_returned() -> None:
    subscriptions = Subscriptions()
    first, second, third = (subscriptions.ask(id, [TOOLS_CHANGED, A]) for id in (1, 2, 3))
    subscriptions.close(2)
    assert subscriptions.connection_lost() == [first, third]
    assert [each.state for each in (first, second, third)] == [
        SubscriptionState.BROKEN,
        SubscriptionState.ENDED,
        SubscriptionState.BROKEN,
    ]
    again = subscriptions.ask(1, third.asked)
    assert (again.state, again.asked) == (SubscriptionState.ASKED, third.asked)


def test_two_subscriptions_cannot_have_one_id() -> None:
    subscriptions = Subscriptions()
    first = subscriptions.ask(1, [TOOLS_CHANGED])
    with pytest.raises(UsageError, match="already"):
        subscriptions.ask(1, [PROMPTS_CHANGED])
    with pytest.raises(UsageError, match="already"):
        subscriptions.attach(1, [PROMPTS_CHANGED], EVERYTHING)
    assert subscriptions.receive(TOOLS_CHANGED.notification(1)) == [ChangeReceived(first, TOOLS_CHANGED)]


# The client's side, legacy.


def test_legacy_subscriptions_share_notifications_without_an_id() -> None:
    subscriptions = Subscriptions()
    tools = subscriptions.attach("tools", [TOOLS_CHANGED], EVERYTHING)
    both = subscriptions.attach("both", [TOOLS_CHANGED, A, A], EVERYTHING)
    notes = subscriptions.attach("notes", [B], EVERYTHING)
    assert [each.state for each in (tools, both, notes)] == [SubscriptionState.OPEN] * 3
    assert both.asked == both.agreed == (TOOLS_CHANGED, A)

    def heard(change: ChangeEvent) -> list[OpenSubscription]:
        events = subscriptions.receive(change.notification())
        assert events == [ChangeReceived(each.subscription, change) for each in events]
        return [each.subscription for each in events]

    assert heard(TOOLS_CHANGED) == [tools, both]
    assert heard(PROMPTS_CHANGED) == []
    assert heard(A) == [both]
    assert heard(B) == [notes]
    assert heard(resource_updated("notes://other")) == [
        both,
        notes,
    ]  # may be below a resource of either; the URI does not tell
    assert subscriptions.receive(Notification("notifications/message", {})) == []
    subscriptions.close("both")
    assert heard(TOOLS_CHANGED) == [tools]


def test_the_uris_are_those_of_the_open_legacy_subscriptions() -> None:
    subscriptions = Subscriptions()
    assert subscriptions.uris == frozenset()
    subscriptions.ask(1, [C])  # has a listen request of its own
    subscriptions.attach("x", [TOOLS_CHANGED, A, B], EVERYTHING)
    subscriptions.attach("y", [A], EVERYTHING)
    assert subscriptions.uris == {"notes://a", "notes://b"}
    subscriptions.close("x")
    assert subscriptions.uris == {"notes://a"}
    subscriptions.connection_lost()
    assert subscriptions.uris == frozenset()


def test_a_legacy_subscription_agrees_on_the_declared_changes() -> None:
    subscriptions = Subscriptions()
    subscription = subscriptions.attach("x", [TOOLS_CHANGED, PROMPTS_CHANGED, A], {"tools": {"listChanged": True}})
    assert subscription.agreed == (TOOLS_CHANGED,)
    assert subscription.missing == (PROMPTS_CHANGED, A)
    assert subscriptions.uris == frozenset()


def test_a_subscription_may_expect_more_than_the_server_has_agreed_to() -> None:
    subscriptions = Subscriptions()
    legacy = subscriptions.attach("x", [TOOLS_CHANGED, A], {"tools": {"listChanged": True}}, undeclared=True)
    assert (legacy.expected, legacy.missing) == ((TOOLS_CHANGED, A), (A,))
    assert subscriptions.uris == {A.item}
    modern = subscriptions.ask(1, [TOOLS_CHANGED], undeclared=True)
    assert modern.expected == (TOOLS_CHANGED,)
    assert subscriptions.ask(2, [TOOLS_CHANGED]).expected == ()


# Both sides.


@req("sub-02", "sub-06")
@given(st.lists(st.lists(st.sampled_from(CHANGES), max_size=4), min_size=1, max_size=4), st.sampled_from(CAPABILITIES))
@settings(max_examples=60)
def test_each_notification_of_a_server_reaches_its_subscription(
    requested: list[list[ChangeEvent]], declared: dict[str, Any]
) -> None:
    listeners: Listeners[int] = Listeners()
    subscriptions = Subscriptions()
    ours = [subscriptions.ask(id, asked) for id, asked in enumerate(requested)]
    for each in ours:
        acknowledgement = listeners.listen(hash(each.id), request(each.id, *each.asked), declared)
        assert subscriptions.receive(acknowledgement) == [SubscriptionAcknowledged(each)]
        assert set(each.agreed or ()) | set(each.missing) == set(each.asked)
    for change in CHANGES:
        published = [notification for _, notification in listeners.publish(change)]
        heard = [event for notification in published for event in subscriptions.receive(notification)]
        assert heard == [ChangeReceived(each, change) for each in ours if change in (each.agreed or ())]
    for result in filter(None, [listeners.close(hash(each.id)) for each in ours]):
        ended = subscriptions.finish(Answered(result.id, "subscriptions/listen", result.result))
        assert ended is not None
    assert {each.state for each in ours} == {SubscriptionState.ENDED}


def test_the_repr_of_a_change_is_short() -> None:
    assert (
        repr([TOOLS_CHANGED, resource_updated("notes://Oslo")]) == "[Change(TOOLS), Change(RESOURCE, 'notes://Oslo')]"
    )
    assert len(repr(resource_updated("x" * 1_000_000))) < 120


def test_the_changes_of_all_listeners_and_of_one_are_listed() -> None:
    listeners: Listeners[str] = Listeners()
    assert (listeners.changes, listeners.changes_of("s")) == ((), ())
    listeners.add_session("s", EVERYTHING)
    listeners.subscribe("s", {"uri": A.item})
    listeners.add_session("t", {"tools": {"listChanged": True}})
    assert set(listeners.changes) == {TOOLS_CHANGED, PROMPTS_CHANGED, RESOURCES_CHANGED, A}
    assert set(listeners.changes_of("s")) == set(listeners.changes)
    assert listeners.changes_of("t") == (TOOLS_CHANGED,)
