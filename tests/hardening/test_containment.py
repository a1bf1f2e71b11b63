"""Mistakes of handlers: only the call of the handler fails, and the server and all other calls continue."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.matrix import Variant, client_of, each_transport_and_asgi, no_tasks_left, serve_over
from tests.hardening.mistakes import (
    EXPECTED_IN_THE_LOG,
    KEPT_GENERATORS,
    MISTAKES,
    Mistake,
    server_with_mistakes,
    stale_cancellation,
    yield_in_a_nursery,
)
from tests.http.client import Cut
from tests.http.scripted_server import ScriptedServer, Size, play_call, text_of
from tests.http.served import served
from trio_mcp import Context, Limits, McpError, Principal, RequestError, Server, ToolFailed, open_client
from trio_mcp.core.http import MemoryEventLog
from trio_mcp.types import FormElicitationRequest, HttpRequest, LoggingMessageParams

# Trio warns of each async generator that is dropped before its end, which is the mistake here.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@contextlib.contextmanager
def generators_closed() -> Any:
    """Drop the kept generators before the run ends."""
    try:
        yield
    finally:
        KEPT_GENERATORS.clear()


@each_transport_and_asgi(without=("child",), revisions=("2025-11-25", "2026-07-28"))
async def test_a_mistake_fails_only_its_own_call(
    variant: Variant, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = server_with_mistakes()
    waited: list[Any] = []
    with generators_closed(), caplog.at_level(logging.ERROR, "trio_mcp"):
        async with client_of(variant, server) as client, trio.open_nursery() as nursery:

            async def wait() -> None:
                waited.append(await client.call_tool("wait", returns=str))

            nursery.start_soon(wait)
            for name in MISTAKES:
                caplog.clear()
                with pytest.raises(ToolFailed, match="failed; the server's log says why"):
                    await client.call_tool(name, returns=int)
                assert any(record.name == "trio_mcp" and name in record.getMessage() for record in caplog.records), name
                assert EXPECTED_IN_THE_LOG.get(name, "") in caplog.text, name
                with pytest.raises(RequestError, match="failed; the server's log says why"):
                    await client.read_resource(f"mistake://{name}")
            assert not waited
            gate.set()
        assert waited == ["waited"]


@pytest.mark.parametrize("leave", ["return", "break"])
def test_a_shielded_task_in_a_nursery_that_was_left_open_finishes(leave: str) -> None:
    ended: list[float] = []
    server = Server("mistaken")

    async def shielded() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)
        ended.append(trio.current_time())

    async def yield_beside_a_shield() -> AsyncIterator[int]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shielded)
            await trio.lowlevel.checkpoint()
            yield 1

    @server.tool
    async def mistaken() -> int:
        async for number in yield_beside_a_shield():
            if leave == "break":
                break
            return number
        await trio.sleep(0.1)
        return 0

    async def main() -> float:
        start = trio.current_time()
        async with open_client(server) as client:
            with pytest.raises(ToolFailed):
                await client.call_tool("mistaken", returns=int)
            assert trio.current_time() - start < 1
        assert [time - start for time in ended] == [10]
        return start

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("dropped_by", ["another handler", "a thread", "the program"])
def test_a_generator_with_a_nursery_can_be_dropped_while_its_handler_waits(dropped_by: str) -> None:
    """The cyclic garbage collector, which runs in any task, may drop it like this."""
    kept: list[Any] = []
    server = Server("mistaken")

    @server.tool
    async def mistaken() -> None:
        kept.append(yield_in_a_nursery())
        await anext(kept[0])
        await trio.sleep(5)

    @server.tool
    async def drop() -> None:
        kept.clear()

    @server.tool
    async def drop_in_a_thread() -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(kept.clear)

    async def main() -> None:
        async with open_client(server) as client, trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(ToolFailed):
                    await client.call_tool("mistaken", returns=int)

            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            if dropped_by == "another handler":
                await client.call_tool("drop")
            elif dropped_by == "a thread":
                await client.call_tool("drop_in_a_thread")
            else:
                kept.clear()
            await trio.sleep(1)
            assert len((await client.list_tools_page()).tools) == 3

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_handler_that_does_not_wait_can_drop_many_generators(autojump_clock: MockClock) -> None:
    """The generators are closed while the handler runs, but not each at once."""
    server, closed = Server("dropping"), 0

    async def numbers() -> AsyncIterator[int]:
        nonlocal closed
        try:
            yield 1
        finally:
            closed += 1

    @server.tool
    async def drop() -> int:
        async with trio.open_nursery():
            for _ in range(3000):
                async for _ in numbers():
                    break
            await trio.sleep(1)
            return closed

    async with open_client(server) as client:
        assert await client.call_tool("drop", returns=int) >= 2000
        await trio.sleep(1)
        assert closed == 3000


@each_transport_and_asgi(without=("child",), revisions=("2025-11-25", "2026-07-28"))
async def test_ctrl_c_in_a_handler_ends_the_program(variant: Variant, autojump_clock: MockClock) -> None:
    """This is so even if the handler leaves a scope open."""
    server = Server("interrupted")

    @server.tool
    async def interrupt() -> None:
        trio.CancelScope().__enter__()
        raise KeyboardInterrupt

    async def call_a_tool() -> None:
        async with trio.open_nursery(), serve_over(variant.transport, server) as target, open_client(target) as client:
            await client.call_tool("interrupt")

    with pytest.raises(BaseExceptionGroup) as caught:
        await call_a_tool()
    assert caught.value.subgroup(KeyboardInterrupt) is not None


@each_transport_and_asgi(without=("child",), revisions=("2025-11-25", "2026-07-28"))
async def test_a_cancelled_handler_with_an_open_nursery_affects_no_other_call(
    variant: Variant, autojump_clock: MockClock
) -> None:
    server, gate = server_with_mistakes()
    begun = trio.Event()

    @server.tool
    async def leave_and_wait() -> None:
        async for _ in yield_in_a_nursery():
            break
        begun.set()
        await trio.sleep_forever()

    waited: list[Any] = []
    async with client_of(variant, server) as client, trio.open_nursery() as nursery:

        async def wait() -> None:
            waited.append(await client.call_tool("wait", returns=str))

        nursery.start_soon(wait)
        async with trio.open_nursery() as calls:
            calls.start_soon(client.call_tool, "leave_and_wait")
            await begun.wait()
            calls.cancel_scope.cancel()
        await trio.sleep(1)
        gate.set()
    assert waited == ["waited"]


@each_transport_and_asgi(without=("child",), revisions=("2025-11-25", "2026-07-28"))
@pytest.mark.parametrize("how", ["the client", "a deadline of the program"])
async def test_a_cancellation_is_not_logged_as_a_failure(
    how: str, variant: Variant, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = ScriptedServer()

    async def call_a_tool() -> None:
        async with client_of(variant, scripted.server) as client:
            with trio.move_on_after(5 if how == "the client" else 1000):
                await client.call_tool("play", {"steps": ["wait for ever"]})
            assert how == "the client"
            assert await client.call_tool("play", {"steps": []}, returns=str) == "done"

    with caplog.at_level(logging.INFO, "trio_mcp"), trio.move_on_after(10):
        await call_a_tool()
    assert scripted.cancelled == [""]
    assert [record.getMessage() for record in caplog.records if record.name == "trio_mcp"] == []


# Legacy clients that have disconnected.

KINDS: dict[str, dict[str, Any]] = {"stream": {}, "json": {"json_only": True}, "no session": {"sessions": False}}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_legacy_handler_of_a_disconnected_client_has_a_time_limit(kind: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(session_idle_seconds=100))
    async with scripted.server.running(), served(scripted.server, **KINDS[kind]) as web:
        session = None if kind == "no session" else await web.initialize("2025-11-25")
        with trio.move_on_after(1000):  # the client is connected during this time
            message = play_call("progress", "wait for ever")
            link, _, _ = await web.begin(message, session=session, revision="2025-11-25")
            try:
                await trio.sleep_forever()
            finally:
                await trio.aclose_forcefully(link.stream)
        assert scripted.began == [""]
        await trio.sleep(95)
        assert (scripted.cancelled, scripted.server.statistics().running) == ([], 1)
        await trio.sleep(10)
        assert (scripted.cancelled, scripted.server.statistics().running) == ([""], 0)
        assert scripted.server.statistics().connections == 0
        if session is not None:
            assert (await web.call("ping", session=session)).status == 404


@pytest.mark.parametrize("how", ["sends a POST", "reconnects", "was told to reconnect"])
async def test_a_legacy_handler_continues_while_its_client_is_active(how: str, autojump_clock: MockClock) -> None:
    scripted = ScriptedServer(limits=Limits(session_idle_seconds=100))
    async with served(scripted.server) as web:
        session = await web.initialize("2025-11-25")
        if how == "was told to reconnect":
            stream = await web.open(play_call("hang-up 250", "sleep 200"), session=session)
            assert [each async for each in stream]
            await trio.sleep(249)
        else:
            stream = await web.open(play_call("progress", "sleep 200"), session=session)
            await stream.message()
            await stream.aclose()
            await trio.sleep(90)
            if how == "sends a POST":
                assert (await web.call("ping", session=session)).status == 200
            else:
                await (await web.open(session=session, after=stream.last_event_id)).aclose()
            await trio.sleep(90)
            assert not scripted.ended
            assert (await web.call("ping", id=2, session=session)).status == 200
            await trio.sleep(30)
        async with web.stream(session=session, after=stream.last_event_id) as rest:
            assert text_of(await rest.response()) == "done"


# Authentication before a call.


async def sleep_for_ever() -> None:
    await trio.sleep_forever()


async def sleep_under_a_shield() -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep(3600)


HANGING: dict[str, Mistake] = {each.__name__: each for each in (sleep_for_ever, sleep_under_a_shield)}


async def name_of_holder(token: str) -> str | None:
    """The name of the holder of this token.  A token with the name of a mistake makes that mistake."""
    if token in MISTAKES or token in HANGING:
        await (MISTAKES.get(token) or HANGING[token])()
    return "ada" if token == "good" else None


async def authenticate(request: HttpRequest) -> str | None:
    return await name_of_holder(request.headers.get("Authorization", "").removeprefix("Bearer "))


async def verify(token: str) -> Principal | None:
    name = await name_of_holder(token)
    return None if name is None else Principal(name)


def verify_at_once(token: str) -> Principal | None:
    """A plain function: it does not wait, so it cannot leave a scope open."""
    if token == "raise_generator_exit":
        raise GeneratorExit
    return Principal("ada") if token == "good" else None


@each_transport_and_asgi(without=("child", "memory"), revisions=("2025-11-25", "2026-07-28"))
@pytest.mark.parametrize("how", ["authenticate", "verify", "verify_at_once"])
async def test_a_mistake_of_authentication_fails_only_its_own_request(
    how: str, variant: Variant, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = server_with_mistakes(authenticate_seconds=5)
    options: dict[str, Any] = {}
    mistakes, hanging = dict(MISTAKES), dict(HANGING)
    if how == "authenticate":
        options["authenticate"] = authenticate
    else:
        server.protect(
            verify=globals()[how],
            authorization_servers=["https://issuer.example.com"],
            resource="http://127.0.0.1:3000/mcp",
        )
        if how == "verify_at_once":
            mistakes, hanging = {"raise_generator_exit": MISTAKES["raise_generator_exit"]}, {}

    def client(token: str) -> Any:
        return open_client(target, revision=variant.revision, headers={"Authorization": f"Bearer {token}"})

    waited: list[Any] = []
    async with no_tasks_left():
        with generators_closed(), caplog.at_level(logging.INFO, "trio_mcp"):
            async with serve_over(variant.transport, server, **options) as target:
                async with client("good") as good, trio.open_nursery() as nursery:

                    async def wait() -> None:
                        waited.append(await good.call_tool("wait", returns=str))

                    nursery.start_soon(wait)
                    for name in (*mistakes, *hanging):
                        caplog.clear()
                        start = trio.current_time()
                        with pytest.raises(McpError):
                            async with client(name) as other:
                                await other.call_tool("wait")
                        asked = how.removesuffix("_at_once")
                        if name in mistakes:
                            assert f"{asked} has failed" in caplog.text, name
                            assert ": 500, internal error" in caplog.text, name
                        else:
                            assert f"{asked} took longer than 5 seconds (Limits.authenticate_seconds)" in caplog.text
                            assert ": 503, authentication is not available" in caplog.text
                            assert (
                                trio.current_time() - start <= 15
                            )  # the client has tried twice, with a pause in between
                    assert not waited
                    gate.set()
                await trio.sleep(3600)
    assert waited == ["waited"]


# Other private names in Trio.

WITH_A_RENAMED_ATTRIBUTE = """
import importlib.machinery, sys

(renamed,) = sys.argv[1:]

class Renaming(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        if renamed not in source:
            return super().get_code(fullname)
        return compile(source.replace(renamed, renamed + "_"), self.path, "exec", dont_inherit=True)

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target)
        if fullname.startswith("trio._core.") and spec is not None:
            spec.loader = Renaming(fullname, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)

import logging, warnings
import trio
from trio.testing import memory_stream_pair
from trio_mcp import RequestError, Server, ToolFailed, open_client
from tests.hardening.mistakes import KEPT_GENERATORS, MISTAKES, server_with_mistakes

assert not hasattr(trio.lowlevel.Task, renamed)
assert not hasattr(sys.modules["trio._core._parking_lot"], renamed)

async def main():
    server, gate = server_with_mistakes()
    lock = trio.Lock()

    @server.tool
    async def keep_the_lock() -> None:
        await lock.acquire()

    async with open_client(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.call_tool, "wait")
        for name in MISTAKES:
            try:
                await client.call_tool(name, returns=int)
            except ToolFailed:
                pass
            else:
                raise AssertionError(name)
        await client.call_tool("keep_the_lock")
        with trio.fail_after(5):
            try:
                await lock.acquire()
            except trio.BrokenResourceError:
                pass
            else:
                raise AssertionError("the lock")
        gate.set()
    KEPT_GENERATORS.clear()

logging.disable()
warnings.simplefilter("ignore")
trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
print("held")
"""


@pytest.mark.parametrize("name", ["_cancel_status", pytest.param("GLOBAL_PARKING_LOT_BREAKER", marks=pytest.mark.full)])
def test_a_mistake_is_contained_if_a_private_name_of_trio_changes(name: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITH_A_RENAMED_ATTRIBUTE, name]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("held\n", 0), done.stderr


# Mistakes of the lifespan, which end the run with an error or a log message.


@pytest.mark.parametrize("when", ["at its beginning", "at its end", "in a group"])
async def test_a_stale_cancellation_of_a_lifespan_is_a_failure(when: str, autojump_clock: MockClock) -> None:
    kept = await stale_cancellation()

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        if when == "at its beginning":
            raise kept
        yield
        raise kept if when == "at its end" else BaseExceptionGroup("one", [kept])

    with pytest.raises(RuntimeError, match="the lifespan raised"):
        async with Server("mistaken", lifespan=lifespan).running():
            await trio.sleep(1)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_lifespan_that_cancels_the_run_is_logged(
    cancelled: bool, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A task in its nursery raises a stale cancellation.  A cancellation by the program is not logged."""

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        async def mistaken() -> None:
            kept = await stale_cancellation()
            await trio.sleep(1000 if cancelled else 1)
            raise kept

        async with trio.open_nursery() as nursery:
            nursery.start_soon(mistaken)
            yield

    with trio.move_on_after(10) as scope:
        async with Server("mistaken", lifespan=lifespan).running():
            await trio.sleep(100)
    assert scope.cancelled_caught is cancelled
    logged = [record.getMessage() for record in caplog.records if record.name == "trio_mcp"]
    assert logged == ([] if cancelled else ["mistaken stops: its lifespan has cancelled the tasks inside it"])


# Plain functions.


@each_transport_and_asgi(without=("child",), revisions=("2025-11-25", "2026-07-28"))
async def test_a_mistake_of_a_filter_fails_only_its_own_request(
    variant: Variant, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    mistakes: list[BaseException] = []
    gate = trio.Event()

    def judge(principal: str | None, item: Any) -> bool:
        if mistakes:
            raise mistakes[0]
        return True

    server = Server("filtered", filter=judge)

    @server.tool
    async def wait() -> str:
        await gate.wait()
        return "waited"

    @server.resource("it://it")
    async def it() -> str:
        return "it"

    waited: list[Any] = []
    async with client_of(variant, server) as client, trio.open_nursery() as nursery:

        async def call() -> None:
            waited.append(await client.call_tool("wait", returns=str))

        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        for error in (GeneratorExit(), SystemExit(3), await stale_cancellation()):
            mistakes[:] = [error]
            with pytest.raises(McpError):
                await client.list_tools_page()
            with pytest.raises(McpError):
                async with client.listen(resources="it://it"):
                    pass
        mistakes.clear()
        assert len((await client.list_tools_page()).tools) == 1
        gate.set()
    assert waited == ["waited"]


class BrokenLog(MemoryEventLog):
    def append(self, stream: str, data: Any) -> Any:
        raise SystemExit(3)


async def test_a_mistake_of_an_event_log_ends_only_its_own_stream(autojump_clock: MockClock) -> None:
    scripted = ScriptedServer()
    logs = iter([MemoryEventLog(), BrokenLog()])
    async with served(scripted.server, event_log=lambda id: next(logs)) as web, trio.open_nursery() as nursery:
        good, bad = [await web.initialize("2025-11-25") for _ in range(2)]

        async def call() -> None:
            async with web.stream(play_call("progress", "wait go"), session=good) as stream:
                assert text_of(await stream.response()) == "done"

        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        with pytest.raises(Cut):
            await web.open(play_call("progress"), session=bad)
        assert (await web.call("ping", session=good)).status == 200
        scripted.go["go"].set()


# Mistakes of callbacks of a client.


@each_transport_and_asgi(without=("child",), revisions=("2025-11-25", "2026-07-28"))
async def test_a_mistake_of_a_callback_fails_only_its_own_request(
    variant: Variant, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = server_with_mistakes()
    wanted: Mistake

    @server.tool
    async def ask(ctx: Context) -> str:
        return type(await ctx.elicit("Which size?", Size)).__name__

    @server.tool
    async def tell(ctx: Context) -> None:
        await ctx.log("error", "something")

    async def answer(form: FormElicitationRequest) -> dict[str, int]:
        await wanted()
        return {"size": 1}

    def logged(params: LoggingMessageParams) -> None:
        raise SystemExit(3)

    options: dict[str, Any] = {"elicitation": answer, "on_log": logged, "log_level": "error"}
    if variant.transport == "http json" and not variant.modern:
        return  # on this transport a server cannot send requests
    waited: list[Any] = []
    with generators_closed():
        async with client_of(variant, server, **options) as client, trio.open_nursery() as nursery:

            async def wait() -> None:
                waited.append(await client.call_tool("wait", returns=str))

            nursery.start_soon(wait)
            for name in MISTAKES:
                wanted = MISTAKES[name]
                with pytest.raises((ToolFailed, McpError), match=r"the client|callback"):
                    await client.call_tool("ask", returns=str)
                await client.call_tool("tell")
            wanted = trio.lowlevel.checkpoint
            assert await client.call_tool("ask", returns=str) == "Accepted"
            gate.set()
    assert waited == ["waited"]


async def test_a_stream_that_cannot_be_closed_ends_only_its_own_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = 0

    def streams() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        ours, theirs = trio.testing.memory_stream_pair()
        close = theirs.aclose

        async def aclose() -> None:
            nonlocal closed
            closed += 1
            await close()
            if closed == 1:
                raise OSError("the stream cannot be closed")

        monkeypatch.setattr(theirs, "aclose", aclose)
        return ours, theirs

    async with served(Server("s"), streams=streams) as web:
        for _ in range(2):
            link = await web.link()
            await link.stream.send_all(b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert bytes(await link.stream.receive_some()).startswith(b"HTTP/1.1 4")
            await link.aclose()
            await wait_all_tasks_blocked()
    assert closed == 2
    assert "the stream cannot be closed" in caplog.text
