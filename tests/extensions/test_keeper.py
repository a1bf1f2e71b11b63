"""The keeper of tasks: steps, questions, cancellation, and the end of a process, with each store."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.requirements import req
from trio_mcp import Limits, RequestError, Server
from trio_mcp.core import CORE_TASKS, EXTENSION_TASKS, Question, Response, TaskRecord, TaskStatus, encode
from trio_mcp.errors import SessionClosed

# The keeper is internal.  These tests use it without the protocol.
from trio_mcp.extensions.tasks import keeper as keepers
from trio_mcp.extensions.tasks.host import TaskHost  # internal, too
from trio_mcp.extensions.tasks.keeper import Keeper  # internal, too
from trio_mcp.stores import MemoryStore, Row, SQLiteStore, Store, StoreFailed, StoreFull
from trio_mcp.stores import rows as clock

MakeStore: TypeAlias = Callable[[], Store]
NAME = Question("name", "elicitation/create", {"message": "Who?"})
SIZE = Question("size", "elicitation/create", {"message": "Size?"})
ANN = {"action": "accept", "content": {"name": "Ann"}}
RESULT: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}


@pytest.fixture(params=["memory", "sqlite"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    memory = MemoryStore(max_bytes=1_000_000)
    if request.param == "memory":
        return lambda: memory
    return partial(SQLiteStore, tmp_path / "tasks.db", max_bytes=1_000_000)


@asynccontextmanager
async def running_keeper(
    make_store: MakeStore, *, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Keeper]:
    keeper = Keeper(make_store(), "test", limits or Limits(), **options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        yield keeper
        nursery.cancel_scope.cancel()


def new_record(id: str = "t-1", **changes: Any) -> TaskRecord:
    return attrs.evolve(TaskRecord(id, "ann", clock.wall(), 3_600_000, "tools/call", {"name": "report"}), **changes)


async def begin(keeper: Keeper, id: str = "t-1", **changes: Any) -> TaskHost:
    task = new_record(id, **changes)
    await keeper.add(task, "principal ann")
    return TaskHost(keeper, task)


async def until(keeper: Keeper, status: TaskStatus, id: str = "t-1") -> TaskRecord:
    task = await keeper.watch(id, lambda task: task.status is status)
    assert task is not None
    return task


async def eventually(check: Callable[[], bool]) -> None:
    while not check():  # noqa: ASYNC110  # another process changes the state, without an event
        await trio.sleep(0.01)


async def test_a_task_is_found_as_soon_as_it_is_added(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        await begin(keeper)
        got = await keeper.get({"taskId": "t-1"}, "ann", EXTENSION_TASKS)
        assert (got["status"], got["ttlMs"]) == ("working", 3_600_000)


@req("task-55", "task-59", "xtask-46", "task-51")
async def test_only_its_owner_finds_a_task(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        await begin(keeper)
        await begin(keeper, "open", owner=None)
        for params, principal in ({"taskId": "t-1"}, "bob"), ({"taskId": "t-1"}, None), ({"taskId": "open"}, "ann"):
            for ask in (
                partial(keeper.get, params, principal, CORE_TASKS),
                partial(keeper.cancel, params, principal, CORE_TASKS),
                partial(keeper.update, {**params, "inputResponses": {}}, principal),
            ):
                with pytest.raises(RequestError, match=r"there is no task .* for this caller"):
                    await ask()
        assert (await keeper.find("t-1")) is not None


@req("task-36", "xtask-18")
async def test_the_outcome_of_a_handler_is_stored(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        for id, outcome in ("a", RESULT), ("b", RequestError(-5, "no", {"x": 1})):
            await (await begin(keeper, id)).finish(outcome)
        done, failed = await until(keeper, TaskStatus.COMPLETED, "a"), await until(keeper, TaskStatus.FAILED, "b")
        assert done.result == {}  # it is read with `whole=True` only
        whole = await keeper.find("a", whole=True)
        assert whole is not None
        assert whole.result == RESULT
        assert failed.error == {"code": -5, "message": "no", "data": {"x": 1}}


async def test_a_poll_reads_neither_the_result_nor_the_arguments(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll parses only the first line of a record: it sends the stored text of a result, and needs no arguments."""
    read: list[int] = []
    from_text = TaskRecord.from_text

    def counted(text: str) -> TaskRecord:
        read.append(len(text))
        return from_text(text)

    rows = {"structuredContent": {"rows": list(range(5_000))}}
    async with running_keeper(make_store) as keeper:
        await begin(keeper, "running", params={"rows": list(range(5_000))})
        await (await begin(keeper, "ended")).finish(rows)
        monkeypatch.setattr(TaskRecord, "from_text", counted)
        for id, form in itertools.product(("running", "ended"), (CORE_TASKS, EXTENSION_TASKS)):
            got = await keeper.get({"taskId": id}, "ann", form, whole=False)
            assert "result" not in got
            sent = json.loads(encode(Response(1, got)))["result"]
            shown = id == "ended" and form is EXTENSION_TASKS
            assert sent.get("result") == ({"resultType": "complete", **rows} if shown else None)
        assert len((await keeper.list({}, "principal ann", lambda task: True))["tasks"]) == 2
        await keeper.cancel({"taskId": "ended"}, "ann", EXTENSION_TASKS)
        assert max(read) < 1000


async def test_a_question_waits_for_its_answers(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper, trio.open_nursery() as nursery:
        host = await begin(keeper)
        answers: dict[str, Any] = {}

        async def ask() -> None:
            answers.update(await host.ask([NAME, SIZE]))
            await host.finish(RESULT)

        nursery.start_soon(ask)
        await until(keeper, TaskStatus.INPUT_REQUIRED)
        await keeper.update({"taskId": "t-1", "inputResponses": {"size": ANN, "other": {}}}, "ann")
        got = await keeper.get({"taskId": "t-1"}, "ann", EXTENSION_TASKS)
        assert list(got["inputRequests"]) == ["name"]
        assert not answers
        await keeper.update({"taskId": "t-1", "inputResponses": {"name": ANN}}, "ann")
        await until(keeper, TaskStatus.COMPLETED)
        assert answers == {"name": ANN, "size": ANN}


async def test_another_process_answers_and_cancels(make_store: MakeStore) -> None:
    async with (
        running_keeper(make_store) as keeper,
        running_keeper(make_store) as other,
        trio.open_nursery() as nursery,
    ):
        host = await begin(keeper)
        events: list[str] = []

        async def work() -> None:
            with trio.CancelScope() as scope:
                host.cancel = lambda reason: scope.cancel()
                await host.ask([NAME])
                events.append("answered")
                await trio.sleep_forever()
            events.append("stopped")
            await host.finish(RESULT)

        nursery.start_soon(work)
        await until(other, TaskStatus.INPUT_REQUIRED)
        await other.update({"taskId": "t-1", "inputResponses": {"name": ANN}}, "ann")
        await until(keeper, TaskStatus.WORKING)
        await eventually(lambda: bool(events))
        acknowledged = await other.cancel({"taskId": "t-1"}, "ann", CORE_TASKS)
        assert acknowledged["status"] == "cancelled"
        await eventually(lambda: len(events) == 2)
        task = await keeper.find("t-1")
        assert task is not None
        assert (task.status, task.result) == (TaskStatus.CANCELLED, None)


@req("task-44", "xtask-29")
async def test_a_task_that_has_ended_is_not_cancelled(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        await (await begin(keeper)).finish(RESULT)
        assert await keeper.cancel({"taskId": "t-1"}, "ann", EXTENSION_TASKS) == {}
        with pytest.raises(RequestError, match="is completed and cannot be cancelled"):
            await keeper.cancel({"taskId": "t-1"}, "ann", CORE_TASKS)


async def test_a_cancelled_question_is_closed_with_the_next_message(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        host = await begin(keeper)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.ask, [NAME])
            await until(keeper, TaskStatus.INPUT_REQUIRED)
            nursery.cancel_scope.cancel()
        task = await keeper.find("t-1")
        assert task is not None
        assert task.questions == (NAME,)  # another process may ask it again
        await host.note("the handler goes on")
        task = await keeper.find("t-1")
        assert task is not None
        assert (task.status, task.questions) == (TaskStatus.WORKING, ())


async def test_a_question_that_the_client_refuses_raises(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper, trio.open_nursery() as nursery:
        host = await begin(keeper)

        async def ask() -> None:
            with pytest.raises(SessionClosed, match="the question has no answer"):
                await host.ask([NAME])

        nursery.start_soon(ask)
        await until(keeper, TaskStatus.INPUT_REQUIRED)
        await keeper.step("t-1", lambda task: task.withdraw(["name"], 0))


async def test_a_question_shows_the_newest_message(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper, trio.open_nursery() as nursery:
        host = await begin(keeper)
        await host.progress(1, 2, "page 1")
        await host.progress(2, 2, "page 2")  # too soon after the last one: it is stored with the question
        nursery.start_soon(host.ask, [NAME])
        await until(keeper, TaskStatus.INPUT_REQUIRED)
        state = await keeper.get({"taskId": "t-1"}, "ann", EXTENSION_TASKS)
        assert state["statusMessage"] == "page 2"
        nursery.cancel_scope.cancel()


async def test_messages_are_stored(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    async with running_keeper(make_store) as keeper:
        host = await begin(keeper)

        async def shown() -> Any:
            return (await keeper.get({"taskId": "t-1"}, "ann", EXTENSION_TASKS)).get("statusMessage")

        await host.note("half")
        assert await shown() == "half"
        await host.log("info", "x", None)
        await host.progress(1, 2, None)
        await host.progress(2, 2, "page 2" * 1000)
        assert await shown() == ("page 2" * 1000)[:1024]
        await host.progress(3, 2, "page 3")
        assert str(await shown()).startswith("page 2")  # frequent reports are not all stored
        await trio.sleep(1)
        await host.progress(4, 2, "page 4")
        assert await shown() == "page 4"


# Limits


@req("task-62")
async def test_tasks_are_bounded(make_store: MakeStore) -> None:
    async with running_keeper(make_store, limits=Limits(tasks_each=1, tasks=2)) as keeper:
        await keeper.add(new_record("a"), "principal ann")
        with pytest.raises(RequestError, match=r"no room for more tasks \(Limits.tasks_each\)"):
            await keeper.add(new_record("b"), "principal ann")
        await keeper.add(new_record("c"), None)
        with pytest.raises(RequestError, match=r"\(Limits.tasks\)"):
            await keeper.add(new_record("d"), None)
        await keeper.drop("c")
        await keeper.add(new_record("d"), None)


async def test_data_above_the_byte_limit_is_refused(make_store: MakeStore) -> None:
    async with running_keeper(make_store, limits=Limits(task_bytes=1000)) as keeper:
        await (await begin(keeper)).finish({"content": ["x" * 2000]})
        task = await until(keeper, TaskStatus.FAILED)
        assert task.error is not None
        assert "Limits.task_bytes" in task.error["message"]
        with pytest.raises(RequestError, match=r"Limits.task_bytes"):
            await keeper.add(new_record("b", params={"x": "y" * 1000}), None)
        host = await begin(keeper, "c")
        with pytest.raises(RequestError, match=r"Limits.task_bytes"):
            await host.ask([attrs.evolve(NAME, params={"x": "y" * 1000})])


async def test_a_full_store_fails_the_task_and_refuses_the_next(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        await (await begin(keeper)).finish({"content": ["x" * 1_200_000]})
        task = await until(keeper, TaskStatus.FAILED)
        assert task.error is not None
        assert "the store has no room" in task.error["message"]
        await keeper.add(new_record("b", params={"x": "y" * 950_000}), None)
        with pytest.raises(RequestError, match="max_bytes of the store"):
            await keeper.add(new_record("c", params={"x": "y" * 100_000}), None)


@req("task-31", "task-62", "xtask-41")
async def test_a_task_expires_while_it_runs(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    async with running_keeper(make_store) as keeper, trio.open_nursery() as nursery:
        host, stopped = await begin(keeper, ttl=5_000), trio.Event()

        async def work() -> None:
            with trio.CancelScope() as scope:
                host.cancel = lambda reason: scope.cancel()
                await trio.sleep_forever()
            stopped.set()

        nursery.start_soon(work)
        await trio.sleep(4.9)
        assert await keeper.find("t-1") is not None
        await trio.sleep(0.1)
        with pytest.raises(RequestError, match="it may have expired"):
            await keeper.get({"taskId": "t-1"}, "ann", EXTENSION_TASKS)
        assert await keeper.watch("t-1", lambda task: False) is None
        await stopped.wait()
        assert trio.current_time() <= 20
        await trio.sleep(20)
        assert await keeper._store.get("task test", "t-1") is None


# Lists


@req("task-40", "task-41", "task-43", "task-60")
async def test_tasks_are_listed_in_pages(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        for number in range(120):
            owner = "ann" if number % 2 == 0 else "bob"
            await keeper.add(new_record(f"t-{number:03}", owner=owner, created=float(number), ttl=None), "shared")
        found: list[str] = []
        params: dict[str, Any] = {}
        pages = 0
        while True:
            page = await keeper.list(params, "shared", lambda task: task.owner == "ann")
            found += [task["taskId"] for task in page["tasks"]]
            pages += 1
            if "nextCursor" not in page:
                break
            params = {"cursor": page["nextCursor"]}
        assert (pages, found) == (2, [f"t-{number:03}" for number in range(0, 120, 2)])
        assert await keeper.list({}, "nobody", lambda task: True) == {"tasks": []}
        with pytest.raises(RequestError, match="the cursor is not from this server"):
            await keeper.list({"cursor": "x"}, "shared", lambda task: True)


# The end of a process


async def test_tasks_of_a_process_that_ends_are_taken_over_at_once(make_store: MakeStore) -> None:
    recovered: list[str] = []

    def recover(task: TaskRecord) -> bool:
        recovered.append(task.id)
        return True

    async with running_keeper(make_store) as first:
        await begin(first, "a")
        (await begin(first, "b")).recoverable = False
        await (await begin(first, "c")).finish(RESULT)
    async with running_keeper(make_store, recover=recover) as second:
        lost = await until(second, TaskStatus.FAILED, "b")
        assert lost.error is not None
        assert "the server stopped while this task ran" in lost.error["message"]
        await eventually(lambda: bool(recovered))
        assert recovered == ["a"]  # the first process itself has failed task b
        again, done = await second.find("a"), await second.find("c", whole=True)
        assert again is not None
        assert done is not None
        assert (again.status, done.result) == (TaskStatus.WORKING, RESULT)


@pytest.mark.parametrize("runs", [True, False, None])
async def test_tasks_of_a_process_that_has_died_are_recovered(
    runs: bool | None, make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    first, recovered = Keeper(make_store(), "test", Limits()), list[str]()

    def recover(task: TaskRecord) -> bool | None:
        recovered.append(task.id)
        return runs

    async with first._store:
        first._ready.set()
        await begin(first)
        async with running_keeper(make_store, recover=recover) as second:
            await trio.sleep(keepers.LEASE - 1)
            task = await second.find("t-1")
            assert task is not None
            assert task.status is (TaskStatus.FAILED if runs is False else TaskStatus.WORKING)
            # Without room the task is given back, and the recovery is tried again.
            assert len(recovered) == (3 if runs is None else 1)
            row = await first._store.get("task test", "t-1")
            assert row is not None
            assert row.holder == {True: second._holder, False: "", None: "given back"}[runs]


@pytest.mark.parametrize("leaving", [True, False])
async def test_a_process_that_is_about_to_end_takes_over_no_tasks(
    leaving: bool, make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    first = Keeper(make_store(), "test", Limits())
    async with first._store:
        first._ready.set()
        await begin(first)
        second = Keeper(make_store(), "test", Limits())
        second.leaving = lambda: leaving
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second.run)
            task = await second.watch("t-1", lambda task: task.terminal) if not leaving else await second.find("t-1")
            await trio.sleep(keepers.LEASE)
            assert task is not None
            assert task.terminal is not leaving
            nursery.cancel_scope.cancel()


async def test_a_task_that_fails_at_its_limit_of_bytes_says_so(make_store: MakeStore) -> None:
    async with running_keeper(make_store, limits=Limits(task_bytes=2000)) as keeper:
        task = new_record("t-1")
        host = await begin(keeper, terms={"name": "x" * (1975 - len(task.text().encode()))})
        await host.finish({"content": [{"type": "text", "text": "x" * 200}]})
        failed = await until(keeper, TaskStatus.FAILED)
        assert "Limits.task_bytes" in str(failed.message)


@pytest.mark.parametrize("runs", [True, False])
async def test_a_task_that_was_stored_under_larger_limits_ends(
    runs: bool, make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    first = Keeper(make_store(), "test", Limits())
    async with first._store:
        first._ready.set()
        await first.add(new_record(terms={"name": "x" * 50_000}), None)
        hosts: list[TaskHost] = []

        def recover(task: TaskRecord) -> bool:
            hosts.extend([TaskHost(second, task)] if runs else [])
            return runs

        second = Keeper(make_store(), "test", Limits(task_bytes=1000), recover)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second.run)
            await trio.sleep(1)
            for host in hosts:
                await host.finish({"content": [{"type": "text", "text": "x" * 200}]})
            failed = await until(second, TaskStatus.FAILED)
            assert ("Limits.task_bytes" in str(failed.message)) is runs
            nursery.cancel_scope.cancel()


async def test_a_task_at_its_limit_of_bytes_can_be_cancelled(make_store: MakeStore) -> None:
    async with running_keeper(make_store, limits=Limits(task_bytes=2000)) as keeper:
        await begin(keeper, terms={"name": "x" * (1975 - len(new_record("t-1").text().encode()))})
        await keeper.cancel({"taskId": "t-1"}, "ann", CORE_TASKS)
        await until(keeper, TaskStatus.CANCELLED)


async def test_an_outcome_is_retried_while_the_store_is_full(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    async def full(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        tried.append(trio.current_time())
        raise StoreFull("max_bytes")

    async with running_keeper(make_store) as keeper, trio.open_nursery() as nursery:
        host = await begin(keeper)
        with monkeypatch.context() as patch:
            patch.setattr(type(keeper._store), "replace", full)
            nursery.start_soon(host.finish, RESULT)
            await trio.sleep(2.5)
        assert len(tried) == 4  # at once, then as a failure, then each second
        await until(keeper, TaskStatus.FAILED)


async def test_an_outcome_that_is_nested_too_deep_fails_the_task(make_store: MakeStore) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    async with running_keeper(make_store) as keeper:
        await (await begin(keeper)).finish(RequestError(-5, "no", deep))
        failed = await until(keeper, TaskStatus.FAILED)
        assert "log" in str(failed.message)


async def test_tasks_of_another_version_are_left_alone(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    first, later = Keeper(make_store(), "test", Limits()), b'{"layout":99}'
    async with first._store:
        first._ready.set()
        await begin(first)
        await first._store.add(Row("task test", "later", later, "principal ann", 1.0, holder="gone"))
        async with running_keeper(make_store) as second:
            await until(second, TaskStatus.FAILED)
            mine = await begin(second, "mine")
            mine.recoverable = False
            row = await second._store.get("task test", "mine")
            assert row is not None
            await second._store.replace(attrs.evolve(row, body=later))
            await trio.sleep(3 * keepers.LEASE)
            listed = await second.list({}, "principal ann", lambda task: True)
            assert [each["taskId"] for each in listed["tasks"]] == ["t-1"]
            assert not mine.over
        row = await first._store.get("task test", "later")
        assert row is not None
        assert (row.body, row.holder) == (later, "given back")
        assert "a task of layout 99" in caplog.text


async def test_after_a_sleep_of_the_machine_no_task_is_taken_over(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the sleep the wall clock has advanced, and the clock of timers has not."""
    async with running_keeper(make_store) as first:
        hosts = [await begin(first, "a")]
        await trio.sleep(keepers.LEASE / 6)  # the first keeper looks for dead processes before the second has a lease
        async with running_keeper(make_store) as second:
            hosts.append(await begin(second, "b"))
            await trio.sleep(keepers.LEASE)
            monkeypatch.setattr(clock, "wall", lambda: 1e9 + 1000 + trio.current_time())
            await trio.sleep(3 * keepers.LEASE)
            assert not any(host.over for host in hosts)


async def test_tasks_are_taken_over_when_the_wall_clock_is_set_back(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Keeper(make_store(), "test", Limits())
    async with first._store, running_keeper(make_store, recover=lambda task: True) as second:
        first._ready.set()
        await trio.sleep(keepers.LEASE)
        with monkeypatch.context() as patch:
            patch.setattr(clock, "wall", lambda: 1e9 + 10_000 + trio.current_time())
            await trio.sleep(2 * keepers.LEASE)
        await trio.sleep(1)
        await begin(first)
        await trio.sleep(3 * keepers.LEASE)
        row = await first._store.get("task test", "t-1")
        assert row is not None
        assert row.holder == second._holder


async def test_messages_are_shown_when_the_wall_clock_is_set_back(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_keeper(make_store) as keeper:
        host = await begin(keeper)
        await host.progress(1, None, "one")
        monkeypatch.setattr(clock, "wall", lambda: 1e9 - 1000 + trio.current_time())
        await trio.sleep(2)
        await host.progress(2, None, "two")
        task = await keeper.find("t-1")
        assert task is not None
        assert task.message == "two"


async def test_a_process_that_wakes_up_late_writes_nothing(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    async with running_keeper(make_store, recover=lambda task: True) as second:
        first = Keeper(make_store(), "test", Limits())
        async with first._store:
            await first._store.lease(first._holder, clock.wall() + keepers.LEASE)
            first._ready.set()
            host = await begin(first)
            # The first keeper does not renew its lease.
            await second.watch("t-1", lambda task: task.updated > task.created)
            await host.finish(RESULT)
            assert await host._keeper.step("t-1", lambda task: task.cancel(0), ours=True) is None
        task = await second.find("t-1")
        assert task is not None
        assert task.status is TaskStatus.WORKING


async def test_a_live_process_keeps_its_tasks(
    make_store: MakeStore, sqlite_in_event_loop: None, autojump_clock: MockClock
) -> None:
    async with running_keeper(make_store) as first, running_keeper(make_store) as second:
        await begin(first)
        await trio.sleep(10 * keepers.LEASE)
        task = await second.find("t-1")
        assert task is not None
        assert task.status is TaskStatus.WORKING


async def test_a_store_that_fails_is_tried_again(
    make_store: MakeStore,
    sqlite_in_event_loop: None,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_keeper(make_store) as keeper:
        host = await begin(keeper)
        store = keeper._store
        with monkeypatch.context() as patch:
            for name in ("get", "lease", "changes"):
                patch.setattr(type(store), name, fail)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.finish, RESULT)
                await trio.sleep(2.5)
                patch.undo()
        await until(keeper, TaskStatus.COMPLETED)
        await trio.sleep(2 * keepers.LEASE)
        assert "the disk is full" in caplog.text
        assert await keeper.find("t-1") is not None


@pytest.mark.parametrize("method", ["changes", "sweep"])
async def test_a_fault_of_a_store_ends_the_server_with_this_error(
    method: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is an error other than `StoreFailed`."""
    fault, server = OSError("a store of the program"), Server("tasks")
    server.tool(name="report", task="required")(lambda: "done")

    async def faulty(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise fault

    monkeypatch.setattr(MemoryStore, method, faulty)
    with pytest.raises(OSError, match="a store of the program") as caught:
        async with server.running():
            await trio.sleep(60)
    assert caught.value is fault
    assert "the extension io.modelcontextprotocol/tasks has raised this" in "".join(fault.__notes__)


async def test_a_task_is_stopped_at_its_ttl_during_an_outage_of_the_store(
    make_store: MakeStore, outage: Callable[[], AbstractContextManager[None]], autojump_clock: MockClock
) -> None:
    stopped: list[str] = []
    async with running_keeper(make_store) as keeper:
        host = await begin(keeper, ttl=5000)
        host.cancel = stopped.append
        with outage():
            await trio.sleep(keepers.LEASE)
            assert stopped == ["the ttl of the task has passed"]


@pytest.fixture
def outage(
    make_store: MakeStore, sqlite_in_event_loop: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AbstractContextManager[None]]:
    """A block in which all methods of the stores fail."""

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in ("add", "get", "replace", "delete", "list", "sweep", "lease", "claim", "changes"):
                patch.setattr(type(make_store()), name, fail)
            yield

    return block


async def test_handlers_continue_after_an_outage_of_the_store(
    make_store: MakeStore, outage: Callable[[], AbstractContextManager[None]], autojump_clock: MockClock
) -> None:
    answers: dict[str, Any] = {}
    async with (
        running_keeper(make_store) as keeper,
        running_keeper(make_store) as other,
        trio.open_nursery() as nursery,
    ):
        ended, asking = await begin(keeper, "ended"), await begin(keeper, "asking")

        async def ask() -> None:
            answers.update(await asking.ask([NAME]))

        with outage():
            nursery.start_soon(ended.finish, RESULT)
            await asking.note("not stored")
            nursery.start_soon(ask)
            await trio.sleep(3 * keepers.LEASE)  # all leases have expired
        await until(keeper, TaskStatus.COMPLETED, "ended")
        task = await until(other, TaskStatus.INPUT_REQUIRED, "asking")
        assert task.message != "not stored"
        await trio.sleep(3 * keepers.LEASE)
        assert not asking.over  # no other process has taken it over
        with outage():
            await trio.sleep(2)
        await other.update({"taskId": "asking", "inputResponses": {"name": ANN}}, "ann")
        await trio.sleep(keepers.LEASE)
        assert answers == {"name": ANN}


@pytest.mark.parametrize("fault", ["claim", "get"])
async def test_a_task_is_recovered_when_the_answer_to_its_claim_was_lost(
    fault: str,
    make_store: MakeStore,
    autojump_clock: MockClock,
    sqlite_in_event_loop: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store has recorded the claim of this process, but the process gets the tasks only later."""
    recovered: list[str] = []
    store = type(make_store())

    async def lost(self: Any, *args: Any, **how: Any) -> Any:
        if not claimed:
            claimed.append(await claim(self, *args, **how))
            raise StoreFailed("the connection has ended")
        return await claim(self, *args, **how)

    async def lose_next(self: Any, *args: Any, **how: Any) -> Any:
        rows = await claim(self, *args, **how)
        if rows and not claimed:
            claimed.append(rows)
            patch.setattr(store, "get", fail)
        return rows

    def recover(task: TaskRecord) -> bool:
        recovered.append(task.id)
        TaskHost(keeper, task)
        return True

    claim, claimed = store.claim, list[Any]()
    async with running_keeper(make_store) as gone:
        for id in ("a", "b"):
            await begin(gone, id)
    async with running_keeper(make_store, recover=recover) as keeper:
        with monkeypatch.context() as patch:
            patch.setattr(store, "claim", lost if fault == "claim" else lose_next)
            for _ in range(20):
                await trio.sleep(keepers.LEASE / 10)
                if claimed and fault == "get":
                    break
        await begin(keeper, "own")
        await trio.sleep(3 * keepers.LEASE)
        assert sorted(recovered) == ["a", "b"]


async def test_a_claim_gets_the_known_tasks_as_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store looks up each of its tasks in them, so the lookup must be fast."""
    claimed_with, claim = list[Any](), MemoryStore.claim

    async def record_claim(self: Any, *args: Any, known: Any = None, **how: Any) -> Any:
        claimed_with.append(known)
        return await claim(self, *args, known=known, **how)

    monkeypatch.setattr(MemoryStore, "claim", record_claim)
    async with running_keeper(MemoryStore) as keeper:
        await begin(keeper, "a")
        await wait_all_tasks_blocked()
        await keeper.drop("b")  # the store may still have it
        assert await keeper._keep_up()
        assert claimed_with[-1] == {"a"}


async def test_outcomes_that_wait_for_the_store_are_charged_to_their_clients(
    make_store: MakeStore, outage: Callable[[], AbstractContextManager[None]], autojump_clock: MockClock
) -> None:
    """An outcome above the limit becomes a failure, and its memory is freed at once."""

    class Long(dict[str, Any]):
        """A dict that supports weak references."""

    alive: list[weakref.ref[Long]] = []

    def long() -> Long:
        result = Long(content=[{"type": "text", "text": "x" * 10_000}])
        alive.append(weakref.ref(result))
        return result

    limits = Limits(bytes_in_all=100_000)
    async with running_keeper(make_store, limits=limits) as keeper, trio.open_nursery() as nursery:
        hosts = [await begin(keeper, f"t-{number}") for number in range(20)]
        with outage():
            for number, host in enumerate(hosts):
                host.holder = "principal ann" if number < 15 else "principal bob"
                nursery.start_soon(host.finish, long() if number % 2 else RequestError(-1, "no", long()))
            await trio.sleep(2)
            held = keeper.bytes.shares
            assert 10_000 < held.of("principal bob") <= held.of("principal ann") <= 75_000  # three quarters at most
            assert held.held <= 100_000
            gc.collect()
            assert sum(each() is not None for each in alive) == held.held // 10_000
        await trio.sleep(5)
        assert held.held == 0
        assert not keeper._hosts


async def test_clients_get_an_error_during_an_outage_of_the_store(
    make_store: MakeStore, outage: Callable[[], AbstractContextManager[None]], autojump_clock: MockClock
) -> None:
    params = {"taskId": "t-1", "inputResponses": {}}
    async with running_keeper(make_store) as keeper:
        await begin(keeper)
        for ask in (
            partial(keeper.add, new_record("t-2"), "principal ann"),
            partial(keeper.get, params, "ann", CORE_TASKS),
            partial(keeper.update, params, "ann"),
            partial(keeper.cancel, params, "ann", CORE_TASKS),
            partial(keeper.list, {}, "principal ann", lambda task: True),
        ):
            with outage(), pytest.raises(RequestError, match="the store of the tasks does not work; try again later"):
                await ask()
        with outage():
            await keeper.drop("t-1")
        assert await keeper.find("t-1") is not None


async def test_a_run_ends_during_an_outage_of_the_store(
    make_store: MakeStore, outage: Callable[[], AbstractContextManager[None]], autojump_clock: MockClock
) -> None:
    with trio.fail_after(20), ExitStack() as stack:
        async with running_keeper(make_store) as keeper, trio.open_nursery() as nursery:
            host = await begin(keeper)
            stack.enter_context(outage())
            nursery.start_soon(host.finish, RESULT)
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
        assert not keeper._hosts


async def fail(*_: object, **options: object) -> None:
    await trio.lowlevel.checkpoint()
    raise StoreFailed("the disk is full")


async def test_listeners_get_each_change(make_store: MakeStore) -> None:
    events: list[str] = []

    async def on_change(task: TaskRecord, rest: bytes) -> None:
        events.append(task.status.value)
        assert (b"content" in rest) == (task.status is TaskStatus.COMPLETED)

    async with running_keeper(make_store) as keeper, running_keeper(make_store) as other:
        for each in (keeper, other):
            each.followed = {"t-1"}
            each.on_change = on_change
        await other.find("x")  # then both keepers are ready
        host = await begin(keeper)
        await host.finish(RESULT)
        await eventually(lambda: events.count("completed") == 2)


async def test_a_cancelled_task_stores_no_more_messages(make_store: MakeStore) -> None:
    async with running_keeper(make_store) as keeper:
        host = await begin(keeper)
        await keeper.cancel({"taskId": "t-1"}, "ann", CORE_TASKS)
        assert host.over
        await host.note("late")
        await host.progress(1, 2, "late")
        await host.finish(RESULT)
        task = await keeper.find("t-1")
        assert task is not None
        assert (task.status, task.message) == (TaskStatus.CANCELLED, "The task was cancelled.")


async def test_a_result_that_is_not_json_fails_the_task(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_keeper(make_store) as keeper:
        await (await begin(keeper)).finish({"content": object()})
        task = await until(keeper, TaskStatus.FAILED)
        assert task.message == "the task failed; the server's log says why"
        assert "cannot be written as JSON" in caplog.text
