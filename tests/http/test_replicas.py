"""Replicas: events in one process of a server, and their effects in the others."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import HttpClient, request
from tests.http.replicas import KEYS, make_scripted, replicas
from tests.http.scripted_server import TOOLS, UPDATED, B, C, D, ScriptedServer, play_params, text_of
from trio_mcp import Server, UsageError
from trio_mcp.core import CannotServe, Limits
from trio_mcp.server.http.listener import leave_to_others  # the process calls it at SIGTERM
from trio_mcp.stores import MemoryStore, StoreFailed, StoreFull

LISTEN = "subscriptions/listen"
LISTS = {"toolsListChanged": True, "resourceSubscriptions": ["r://1"]}


# Changes


@pytest.mark.parametrize("revision", [B, C, D])
async def test_a_change_reaches_the_sessions_of_all_replicas(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        for web in group.webs:
            session = await web.initialize(revision)
            stream = await web.open(session=session)
            group.servers[0].server.notify_list_changed("tools")
            assert (await stream.message())["method"] == TOOLS
            await stream.aclose()


async def test_a_change_reaches_the_listeners_of_all_replicas_once(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        streams = [await web.open(request(LISTEN, {"notifications": LISTS})) for web in group.webs]
        for stream in streams:
            await stream.message()  # the acknowledgement
        group.servers[1].server.notify_list_changed("tools")
        group.servers[2].server.notify_resource_updated("r://1")
        group.servers[2].server.notify_resource_updated("r://2")
        await trio.sleep(1)
        for stream in streams:
            assert {(await stream.message())["method"] for _ in range(2)} == {TOOLS, UPDATED}
            with trio.move_on_after(1):
                raise AssertionError(await stream.message())


async def test_after_lost_messages_all_changes_are_reported(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        stream = await group.webs[0].open(request(LISTEN, {"notifications": LISTS}))
        await stream.message()
        group.store._channels.resync()
        assert {(await stream.message())["method"] for _ in range(2)} == {TOOLS, UPDATED}


async def test_too_many_changes_are_reported_as_a_gap(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        stream = await group.webs[0].open(request(LISTEN, {"notifications": LISTS}))
        await stream.message()
        for number in range(1500):
            group.servers[1].server.notify_resource_updated(f"other://{number}")
        assert {(await stream.message())["method"] for _ in range(2)} == {TOOLS, UPDATED}


async def test_changes_wait_for_the_store(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        stream = await group.webs[0].open(request(LISTEN, {"notifications": LISTS}))
        await stream.message()
        send = group.store.send

        async def fail(*args: Any) -> None:
            raise StoreFailed("the store is away")

        monkeypatch.setattr(group.store, "send", fail)
        group.servers[1].server.notify_list_changed("tools")
        await trio.sleep(5)
        monkeypatch.setattr(group.store, "send", send)
        assert (await stream.message())["method"] == TOOLS


async def test_a_replica_knows_the_changes_of_the_last_seconds(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs them for a session that is handed over to it."""

    async def fail(*args: Any, **options: Any) -> Any:
        raise StoreFailed("the store is away")

    def uris(number: int, since: float) -> set[str] | None:
        (run,) = group.servers[number].server._runs
        assert run.replica is not None
        changes = run.replica.changes_since(since)
        return None if changes is None else {change.item for change in changes}

    async with replicas(monkeypatch=monkeypatch) as group:
        await trio.sleep(1)
        start = trio.current_time()
        group.servers[0].server.notify_resource_updated("r://1")
        assert [uris(number, start) for number in range(3)] == [
            {"r://1"},
            set(),
            set(),
        ]  # the others do not know of it yet
        await trio.sleep(1)
        later = trio.current_time()
        assert [uris(number, start) for number in range(3)] == [{"r://1"}] * 3
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "send", fail)
            group.servers[1].server.notify_resource_updated("r://2")
            await trio.sleep(5)
            assert [uris(number, later + 4) for number in range(3)] == [set(), {"r://2"}, set()]
        await trio.sleep(15)
        for number in (7, 8, 9):
            group.servers[0].server.notify_resource_updated(f"r://{number}")
        await trio.sleep(1)
        assert [uris(number, start) for number in range(3)] == [None] * 3  # some changes are forgotten by now
        assert uris(2, trio.current_time() - 2) == {"r://7", "r://8", "r://9"}
        now = trio.current_time()
        for number in range(1500):
            group.servers[0].server.notify_resource_updated(f"r://{number}")
        await trio.sleep(1)
        assert [uris(number, now) for number in range(3)] == [None] * 3


async def test_after_the_crash_of_a_replica_all_changes_are_reported(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have crashed before it reported its last changes."""
    async with replicas(monkeypatch=monkeypatch) as group:
        streams = [await web.open(request(LISTEN, {"notifications": LISTS})) for web in group.webs]
        for stream in streams:
            await stream.message()
        living = next(row for row in group.store._rows.values() if row.kind.startswith("replica "))
        await group.store.add(attrs.evolve(living, key="dead", holder="dead"))  # a replica without a lease
        for stream in streams:
            assert {(await stream.message())["method"] for _ in range(2)} == {TOOLS, UPDATED}


# Keys


async def run_replica(store: Any, keys: Any) -> None:
    """Run a replica with these keys until it is cancelled."""
    async with replicas(
        lambda _: Server("s", store=store, state_keys=keys), number=1, monkeypatch=pytest.MonkeyPatch()
    ):
        await trio.sleep_forever()


OLD_KEY, NEW_KEY, OTHER_KEY = (bytes([number]) * 32 for number in range(3))


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ([OLD_KEY], [OLD_KEY], True),
        ([OLD_KEY], [OLD_KEY, NEW_KEY], True),
        ([OLD_KEY, NEW_KEY], [NEW_KEY, OLD_KEY], True),
        ([NEW_KEY, OLD_KEY], [NEW_KEY], True),
        ([OLD_KEY], [NEW_KEY], False),
        ([OLD_KEY], [NEW_KEY, OLD_KEY], False),
        ([OLD_KEY], None, False),
        (None, None, False),
    ],
)
async def test_replicas_must_have_keys_for_the_states_of_each_other(
    first: Any, second: Any, fits: bool, autojump_clock: MockClock
) -> None:
    store = MemoryStore()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_replica, store, first)
        await wait_all_tasks_blocked()
        with trio.move_on_after(60) as scope:
            try:
                await run_replica(store, second)
            except* CannotServe as errors:
                assert not fits
                (error,) = errors.exceptions
                while isinstance(error, BaseExceptionGroup):
                    (error,) = error.exceptions
                assert all(words in str(error) for words in ("TRIO_MCP_STATE_KEYS", "state_keys"))
                assert OLD_KEY.hex() not in str(error)
        assert scope.cancelled_caught is fits
        nursery.cancel_scope.cancel()


async def test_a_crashed_replica_with_other_keys_is_ignored(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()

    def make(store: Any) -> Server:
        return Server("s", store=store)

    async with replicas(make, number=1, store=store, monkeypatch=monkeypatch) as group:
        await group.crash(0)
        async with replicas(make, number=1, store=store, monkeypatch=monkeypatch) as next:
            assert (await next.web.call("server/discover", {})).status == 200


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_MCP_STATE_KEYS", f"{OLD_KEY.hex()}, {NEW_KEY.hex()}")
    assert Server("s")._state_keys == [OLD_KEY, NEW_KEY]
    assert Server("s", state_keys=[OTHER_KEY])._state_keys == [OTHER_KEY]
    for wrong in ("", "secret", OLD_KEY.hex()[:-1]):
        monkeypatch.setenv("TRIO_MCP_STATE_KEYS", wrong)
        with pytest.raises(UsageError) as caught:
            Server("s")
        assert "secret" not in str(caught.value)


# Parked calls: the holder is alive or not, and each kind of message arrives at another replica


async def call_with_question(web: HttpClient, *steps: str, name: str = "play") -> tuple[Any, Any]:
    """Make a call that asks a question; return its params, and the result with the question."""
    params = {**play_params(*steps), "name": name}
    result = (await web.call("tools/call", params)).result
    assert result["resultType"] == "input_required"
    return params, result


def retry(params: Any, result: Any, size: Any = 3) -> Any:
    answer = {"action": "accept", "content": {"size": size}}
    return {**params, "requestState": result["requestState"], "inputResponses": {"form": answer}}


async def test_an_answer_reaches_the_handler_through_another_replica(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "progress", "say hello")
        stream = await group.webs[1].open(request("tools/call", retry(params, result), progress="t"))
        assert [each.get("method") for each in await stream.rest()] == ["notifications/progress", None]
        assert text_of(stream.seen[-1]) == "hello"
        assert [str(answer) for answer in group.servers[0].answers] == ["Accepted(value=Size(size=3))"]
        assert (group.servers[0].began, group.servers[1].began) == ([""], [])


async def test_credentials_are_not_written_into_the_store(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask")
        append = group.store.append

        async def record(stream: str, body: bytes, **options: Any) -> Any:
            written.append(body)
            return await append(stream, body, **options)

        monkeypatch.setattr(group.store, "append", record)
        headers = {"Authorization": "Bearer hush", "Cookie": "a=hush", "X-Api-Key": "hush", "X-Region": "north"}
        answer = await group.webs[1].call("tools/call", retry(params, result), headers=headers)
        assert answer.result["content"]
    assert any(b"north" in body for body in written)
    assert not any(b"hush" in body for body in written)


async def test_each_round_can_go_to_another_replica(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.web, "ask", "ask", "ask")
        for round in range(3):
            answers = {key: {"action": "accept", "content": {"size": round}} for key in result["inputRequests"]}
            again = {**params, "requestState": result["requestState"], "inputResponses": answers}
            result = (await group.web.call("tools/call", again)).result
        assert result["content"][0]["text"] == "done"
        assert [name for scripted in group.servers for name in scripted.began] == [""]


async def test_a_refused_retry_changes_nothing(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask")
        refused = await group.webs[1].call("tools/call", retry(params, result, size="large"))
        assert refused.code == -32602
        assert (await group.webs[2].call("tools/call", retry(params, result))).result["content"]


async def test_a_state_is_used_once_in_all_replicas(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask")
        assert (await group.webs[1].call("tools/call", retry(params, result))).result["content"]
        for web in group.webs:
            again = await web.call("tools/call", retry(params, result))
            assert "has been used" in again.message["error"]["message"]


async def test_closing_the_response_cancels_the_handler_at_another_replica(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "progress", "wait x")
        stream = await group.webs[1].open(request("tools/call", retry(params, result), progress="t"))
        await stream.message()
        await stream.aclose()
        await trio.sleep(1)
        assert group.servers[0].cancelled == [""]


def replaying(store: Any) -> ScriptedServer:
    scripted = make_scripted(store)
    scripted.server.tool(name="replayed", replay=True)(scripted.play)
    return scripted


@pytest.mark.parametrize("name", ["play", "replayed"])
@pytest.mark.parametrize("waits", [0, 60])
async def test_a_retry_after_the_crash_of_the_holder(
    name: str, waits: float, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def authenticate(request: Any) -> str:
        return "ann"

    async with replicas(replaying, monkeypatch=monkeypatch, authenticate=authenticate) as group:
        params, result = await call_with_question(group.webs[0], "ask", "say again", name=name)
        await group.crash(0)
        await trio.sleep(waits)
        answer = await group.webs[1].call("tools/call", retry(params, result))
        if name == "replayed":
            assert answer.result["content"][0]["text"] == "again"
            assert group.servers[1].began == [""]
            assert [row.owner for row in group.store._rows.values() if row.kind.startswith("spent")] == [
                "principal ann"
            ]
            spent = await group.webs[2].call("tools/call", retry(params, result))
            assert "has been used" in spent.message["error"]["message"]
        else:
            assert "has ended: send the request again" in answer.message["error"]["message"]


async def test_a_suspended_holder_does_not_continue_a_call_taken_by_another(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(replaying, monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "say again", name="replayed")
        (row,) = [
            row
            for row in group.store._rows.values()
            if row.key == next(iter(group.servers[0].server._runs)).replica.name
        ]
        await group.store.delete(row.kind, row.key)  # so the others treat the replica as dead
        assert (await group.webs[1].call("tools/call", retry(params, result))).result["content"]
        again = await group.webs[0].call("tools/call", retry(params, result))
        assert "has been used" in again.message["error"]["message"]
        assert (group.servers[0].ended, group.servers[1].ended) == ([], [""])


async def test_a_holder_that_crashes_while_it_answers_gives_an_error(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "progress", "wait x")
        stream = await group.webs[1].open(request("tools/call", retry(params, result), progress="t"))
        await stream.message()
        await group.crash(0)
        assert "has ended" in (await stream.response())["error"]["message"]


async def test_a_long_call_at_another_replica_is_answered(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(parked_seconds=1))

    async with replicas(make, monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "progress", "sleep 200", "say late")
        with trio.fail_after(250):
            stream = await group.webs[1].open(request("tools/call", retry(params, result), progress="t"))
            assert text_of(await stream.response()) == "late"


async def test_a_holder_that_shuts_down_writes_its_answers_first(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str] = []
    async with replicas(monkeypatch=monkeypatch) as group, trio.open_nursery() as nursery:
        params, result = await call_with_question(group.webs[0], "ask", "say hello")
        append = group.store.append

        async def slowly(stream: str, body: bytes, **options: Any) -> Any:
            if stream.endswith(" back"):
                await trio.sleep(3)
            return await append(stream, body, **options)

        async def answer() -> None:
            answers.append(text_of((await group.webs[1].call("tools/call", retry(params, result))).json))

        monkeypatch.setattr(group.store, "append", slowly)
        nursery.start_soon(answer)
        await trio.sleep(0.1)
        await leave_to_others(group.servers[0].server, 60)
        await wait_all_tasks_blocked()
        assert answers == ["hello"]


async def test_the_cancellation_of_a_long_call_reaches_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        return ScriptedServer(store=store, state_keys=KEYS, limits=Limits(parked_seconds=1))

    async with replicas(make, monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "progress", "wait x")
        stream = await group.webs[1].open(request("tools/call", retry(params, result), progress="t"))
        await stream.message()
        await trio.sleep(200)
        await stream.aclose()
        await trio.sleep(1)
        assert group.servers[0].cancelled == [""]


async def test_a_retry_that_was_already_served_is_ignored(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask")
        (run,) = group.servers[0].server._runs
        await group.store.append("retry stage old there", b"taken", owner="", expires=1000.0, max_bytes=1000)
        await run.replica.send(run.replica.name, "retry", id="old")
        await trio.sleep(1)
        assert (await group.webs[0].call("tools/call", retry(params, result))).result["content"]


async def test_an_answer_without_room_in_the_store_is_an_error(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", "say large")
        append = group.store.append

        async def refuse(stream: str, body: bytes, **options: Any) -> Any:
            if b"large" in body and stream.endswith("back"):
                raise StoreFull("max_bytes")
            return await append(stream, body, **options)

        monkeypatch.setattr(group.store, "append", refuse)
        with trio.fail_after(60):
            answer = await group.webs[1].call("tools/call", retry(params, result))
        assert "does not answer" in answer.message["error"]["message"]


async def test_a_state_is_not_lost_if_the_store_does_not_confirm_its_use(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(replaying, monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", name="replayed")
        add = group.store.add

        async def silent(*args: Any, **options: Any) -> bool:
            await add(*args, **options)
            raise StoreFailed("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(group.store, "add", silent)
            refused = await group.webs[0].call("tools/call", retry(params, result))
            assert "does not work" in refused.message["error"]["message"]
        assert (await group.webs[0].call("tools/call", retry(params, result))).result["content"]
        assert [name for scripted in group.servers for name in scripted.began] == [""]


async def test_a_call_without_a_place_to_wait_again_is_cancelled(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(store: Any) -> ScriptedServer:
        scripted = ScriptedServer(store=store, state_keys=KEYS, limits=Limits(parked=1))
        scripted.server.tool(name="replayed", replay=True)(scripted.play)
        return scripted

    async with replicas(make, monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", name="replayed")

        async def slow(*args: Any, **options: Any) -> bool:
            await call_with_question(group.webs[0], "ask", name="replayed")  # takes the only place for a parked call
            raise StoreFailed("away")

        monkeypatch.setattr(group.store, "add", slow)
        refused = await group.webs[0].call("tools/call", retry(params, result))
        assert "does not work" in refused.message["error"]["message"]
        assert group.servers[0].cancelled == [""]


async def test_a_replica_outlives_a_store_without_room(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: Any, **options: Any) -> bool:
        raise StoreFull("max_bytes")

    async with replicas(monkeypatch=monkeypatch) as group:
        (run,) = group.servers[0].server._runs
        with monkeypatch.context() as patch:
            patch.setattr(group.store, "add", full)
            await group.store.delete(run.replica._kind, run.replica.name)  # the others treat it as dead
            await trio.sleep(60)
            assert not await run.replica.alive(run.replica.name)
        await trio.sleep(10)
        assert await run.replica.alive(run.replica.name)
        assert (await group.webs[0].call("tools/call", play_params("say plain"))).result["content"]


@pytest.mark.full
async def test_a_replica_renews_its_lease_for_hours(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(monkeypatch=monkeypatch, number=1) as group:
        (run,) = group.servers[0].server._runs
        (row,) = [row for row in group.store._rows.values() if row.key == run.replica.name]
        await trio.sleep(20 * 3600)
        (now,) = [row for row in group.store._rows.values() if row.key == run.replica.name]
        assert (now.created, now.expires > row.expires) == (row.created, True)


async def test_a_failing_store_gives_errors_and_ends_no_call(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(replaying, monkeypatch=monkeypatch) as group:
        params, result = await call_with_question(group.webs[0], "ask", name="replayed")

        async def hang(*args: Any) -> None:
            await trio.sleep(1000)

        add, get = group.store.add, group.store.get
        monkeypatch.setattr(group.store, "add", hang)
        monkeypatch.setattr(group.store, "get", hang)
        for web in group.webs[:2]:
            start = trio.current_time()
            refused = await web.call("tools/call", retry(params, result))
            assert "the store of the replicas does not work" in refused.message["error"]["message"]
            assert trio.current_time() - start < 2
        assert (await group.webs[2].call("tools/call", play_params("say plain"))).result[
            "content"
        ]  # this call needs no store
        monkeypatch.setattr(group.store, "add", add)
        monkeypatch.setattr(group.store, "get", get)
        assert (await group.webs[1].call("tools/call", retry(params, result))).result["content"]
