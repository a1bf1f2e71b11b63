"""One connection on a byte stream: how it reads, writes and ends, also if the stream fails."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.requirements import req
from tests.server.checkpoints import PipeEnd, one_byte_pipe, pipe_pair, unlimited_pipe, wait_or_fail
from tests.server.raw_client import (
    LATEST,
    MESSAGE,
    PROGRESS,
    REVISION_NAMES,
    ErrorResponse,
    Object,
    ProtocolViolation,
    RawClient,
    connected,
    every_revision,
    modern,
    since,
)
from tests.server.streams import NotHalfCloseable, RecordedStream, lines_in, recorded_pairs
from trio_mcp import Accepted, Context, Limits, Server, serve_stream
from trio_mcp.core import ServerProtocol
from trio_mcp.transport import CLOSING

BATCHES = "2025-03-26"
ERAS = pytest.mark.parametrize("revision", ["2025-11-25", LATEST])


class ServerUnderTest:
    """The server of these tests, and the gates at which its handlers wait."""

    def __init__(self, **options: Any) -> None:
        self.server = server = Server("bench", change_debounce=0, **options)
        self.gates: dict[str, trio.Event] = {}
        self.began: list[str] = []
        self.ended: list[str] = []

        @server.tool
        async def echo(text: str) -> str:
            return text

        @server.tool(thread=False)
        def much(size: int) -> str:
            return "x" * size

        @server.tool
        async def gate(name: str) -> str:
            self.began.append(name)
            try:
                await self.open(name).wait()
                return name
            finally:
                self.ended.append(name)

        @server.tool
        async def report(ctx: Context, times: int, log: bool = False, name: str = "") -> str:
            if name:
                await self.open(name).wait()
            for number in range(times):
                if log:
                    await ctx.log("info", number)
                else:
                    await ctx.progress(number)
            return "reported"

        @server.tool
        async def ask(ctx: Context) -> str:
            await ctx.progress(1)
            await ctx.sample("How many?", max_tokens=5)
            return "asked"

        @server.resource("it://changes")
        def changes() -> str:
            return ""

    def open(self, name: str) -> trio.Event:
        return self.gates.setdefault(name, trio.Event())


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [each["result"]["content"][0]["text"] for each in found]


async def wait_for_end(wire: RawClient) -> None:
    await wait_or_fail(wire.ended.wait, "the end of the server's side")


# Reading.


def transcript(revision: str) -> bytes:
    """Input of a client in one piece: each kind of line end, and invalid lines between the messages."""
    wire = RawClient(unlimited_pipe()[0], revision)
    opening = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    lines: list[Any] = [] if wire.modern else [wire.request("initialize", opening), _note("initialized")]
    lines += [wire.request("tools/list"), wire.request("tools/call", call("echo", text="ä€𝄞\n\r\u2028"))]
    written = [json.dumps(each, ensure_ascii=index % 2 == 0).encode() for index, each in enumerate(lines)]
    last = json.dumps(wire.request("tools/call", call("echo", text="last"))).encode()
    return b"\xef\xbb\xbf" + b"\r\n".join(written) + b"\n\n \r\n\xff\n{]\r\n" + last + b"\n"


def _note(name: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": f"notifications/{name}"}


def lines_from(revision: str, pieces: list[bytes]) -> list[bytes]:
    """The answers of a server that reads these pieces one by one, sorted, because calls may end in any order."""

    async def main() -> bytes:
        ours, theirs = unlimited_pipe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_stream, ServerUnderTest().server, theirs)
            for piece in pieces:
                await ours.send_all(piece)
                await wait_all_tasks_blocked()
            await ours.send_eof()
        return ours.heard

    return sorted(trio.run(main, clock=MockClock(autojump_threshold=0)).splitlines())


@settings(max_examples=40)
@given(st.sampled_from(REVISION_NAMES), st.data())
def test_chunk_boundaries_do_not_matter(revision: str, data: st.DataObject) -> None:
    whole = transcript(revision)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    edges = [0, *cuts, len(whole)]
    answers = lines_from(revision, [whole])
    assert len(answers) == (5 if revision == LATEST else 6)
    assert lines_from(revision, [whole[a:b] for a, b in itertools.pairwise(edges)]) == answers


@every_revision
def test_bytes_may_come_one_by_one(revision: str) -> None:
    whole = transcript(revision)
    assert lines_from(revision, [bytes([byte]) for byte in whole]) == lines_from(revision, [whole])


JUNK: list[tuple[bytes, int]] = [
    (b"hello", -32700),
    (b"\xff\xfe", -32700),
    (b'{"jsonrpc": "2.0", "id": 7, "method": "ping"', -32700),
    (b"NaN", -32700),
    (b"7", -32600),
    (b"null", -32600),
    (b"{}", -32600),
    (b'{"jsonrpc": "1.0", "id": null, "method": "ping"}', -32600),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, -32600),
    (b"x" * 2001, -32600),
]


@pytest.mark.parametrize(("junk", "code"), JUNK, ids=[str(line[:20]) for line, _ in JUNK])
@every_revision
async def test_an_invalid_line_gets_one_error_and_the_connection_goes_on(
    revision: str, junk: bytes, code: int, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest(limits=Limits(message_bytes=2000))
    async with connected(tested.server, revision) as wire:
        for count in (1, 2):
            wire.post_bytes(junk + b"\n")
            assert (await wire.call("tools/list"))["tools"]
            assert [error["error"]["code"] for error in wire.unaddressed] == [code] * count
        # JSON-RPC requires `id: null`.  2025-11-25 forbids it, after the handshake has agreed on this revision.
        assert [("id" in error) for error in wire.unaddressed] == [revision != "2025-11-25"] * 2


@every_revision
async def test_a_line_that_is_too_long_is_answered_before_its_end(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(limits=Limits(message_bytes=1000))
    async with connected(tested.server, revision) as wire:
        wire.post_bytes(b'{"' + b"x" * 1000)
        await wait_all_tasks_blocked()
        [refusal] = wire.unaddressed
        assert "1000" in refusal["error"]["message"]
        for _ in range(5):
            wire.post_bytes(b"y" * 1000)
        wire.post_bytes(b"\n")
        assert (await wire.call("tools/list"))["tools"]
        assert len(wire.unaddressed) == 1


@every_revision
async def test_an_incomplete_last_line_is_ignored_without_half_close(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()

    def streams() -> Any:
        ours, theirs = unlimited_pipe()
        return ours, NotHalfCloseable(theirs)

    async with connected(tested.server, revision, streams=streams) as wire:
        wire.post_bytes(json.dumps(wire.request("tools/call", call("gate", name="a"))).encode())
        await wait_all_tasks_blocked()
    assert tested.began == []


@req("stdio-19", "batch-03")
@pytest.mark.parametrize("revision", [name for name in REVISION_NAMES if name != BATCHES])
async def test_an_array_is_refused_in_revisions_without_batches(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    async with connected(tested.server, revision) as wire:
        wire.post_bytes(json.dumps([wire.request("tools/call", call("gate", name="a"))] * 2).encode() + b"\n")
        assert (await wire.call("tools/list"))["tools"]
        [refusal] = wire.unaddressed
        assert (refusal["error"]["code"], tested.began) == (-32600, [])
    assert all(line.startswith(b"{") for line in wire.lines)


@req("stdio-20", "batch-01", "batch-04")
async def test_a_batch_is_answered_by_one_line_when_all_requests_are_done(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    async with connected(tested.server, BATCHES) as wire:
        gated = wire.request("tools/call", call("gate", name="a"))
        listed, bad = wire.request("tools/list"), wire.request("tools/call", call("nothing"))
        await wire.send([gated, _note("initialized"), listed, {"jsonrpc": "2.0", "method": "notifications/x"}, bad])
        before = len(wire.lines)
        await wire.send([_note("initialized"), _note("cancelled")])  # a batch without requests has no answer
        await wait_all_tasks_blocked()
        assert (tested.began, len(wire.lines)) == (["a"], before)
        assert await wire.call("ping") == {}  # other requests do not wait for the batch
        tested.open("a").set()
        assert texts([await wire.response(gated["id"])]) == ["a"]
        answers = json.loads(wire.lines[-1])
        assert {each["id"] for each in answers} == {gated["id"], listed["id"], bad["id"]}


async def test_a_batch_does_not_wait_for_cancelled_requests(autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    async with connected(tested.server, BATCHES) as wire:
        gated, listed = wire.request("tools/call", call("gate", name="a")), wire.request("tools/list")
        await wire.send([gated, listed])
        await wait_all_tasks_blocked()
        assert not wire.answered(listed["id"])
        await wire.cancel(gated["id"])
        assert [each["id"] for each in json.loads((await wire.response(listed["id"])) and wire.lines[-1])] == [
            listed["id"]
        ]
        assert tested.ended == ["a"]


# Writing.


@every_revision
async def test_an_answer_is_written_at_once_by_the_task_of_its_call(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with connected(tested.server, revision, streams=streams) as wire:
        for text in "abc":
            await wire.call("tools/call", call("echo", text=text))
        assert [write.task[:15] for write in made[0].writes[-3:]] == ["tools/call echo"] * 3


@every_revision
async def test_answers_that_are_ready_together_are_sent_in_one_write(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs(one_byte_pipe)
    async with connected(tested.server, revision, streams=streams) as wire:
        names = ["first"] * 20 + ["second"] * 10 + ["third"] * 20
        ids = [await wire.start("tools/call", call("gate", name=name)) for name in names]
        await wait_all_tasks_blocked()
        before = len(made[0].writes)
        with wire.not_reading():
            for name in ("first", "second", "third"):
                tested.open(name).set()
                await wait_all_tasks_blocked()
        for id in ids:
            await wire.response(id)
        assert [lines_in(write.data) for write in made[0].writes[before:]] == [20, 30]


@req("stdio-02")
@every_revision
async def test_each_message_is_one_line_with_any_characters_in_it(revision: str, autojump_clock: MockClock) -> None:
    text = "one\ntwo\r\nthree\u2028four\u2029five\x85six\x0b\x0c\x1c\x1d\x1eseven\t\x00\x7f"
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with connected(tested.server, revision, streams=streams) as wire:
        assert texts([await wire.exchange("tools/call", call("echo", text=text))]) == [text]
        assert texts([await wire.exchange("tools/call", call("echo", text="\n" * 1000))]) == ["\n" * 1000]
        with pytest.raises(ErrorResponse):
            await wire.call("tools/call", call(text))
    data = b"".join(write.data for write in made[0].writes)
    assert data.endswith(b"\n")
    assert [json.loads(line)["jsonrpc"] for line in data.splitlines()] == ["2.0"] * lines_in(data)


@req("stdio-14")
@modern
async def test_a_modern_server_writes_no_requests(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    sampled = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "1"}}
    async with connected(tested.server, revision, answers={"sampling/createMessage": lambda _: sampled}) as wire:
        await wire.subscribe(tools=True, resources=True, uris=["it://changes"])
        assert texts([{"result": await wire.call("tools/call", call("ask"), progress="p")}]) == ["asked"]
        tested.server.notify_list_changed("tools")
        tested.server.notify_resource_updated("it://changes")
        assert {await wire.changed(), await wire.changed()} == {("tools", None), ("updated", "it://changes")}
        assert not [message for message in wire.messages if "method" in message and "id" in message]
        assert wire.asked


def pieces(end: RecordedStream) -> list[list[str]]:
    """The messages of each write: their methods, or "answer"."""
    return [
        [message.get("method", "answer") for message in map(json.loads, write.data.splitlines())]
        for write in end.writes
    ]


@every_revision
async def test_progress_and_logs_are_written_before_the_answer_and_apart_from_it(
    revision: str, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with connected(tested.server, revision, streams=streams, log_level="info") as wire:
        for log, method in [(False, PROGRESS), (True, MESSAGE)] * 10:  # in many orders of the tasks
            before = len(made[0].writes)
            await wire.call("tools/call", call("report", times=1, log=log), progress="p")
            assert pieces(made[0])[before:] == [[method], ["answer"]]


@every_revision
async def test_progress_is_apart_from_its_answer_on_a_busy_wire_too(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs(one_byte_pipe)
    async with connected(tested.server, revision, streams=streams) as wire:
        others = [await wire.start("tools/call", call("gate", name="now")) for _ in range(3)]
        ids = [await wire.start("tools/call", call("report", times=2, name="now"), progress=token) for token in "pqrst"]
        await wait_all_tasks_blocked()
        before = len(made[0].writes)
        tested.open("now").set()
        for id in (*others, *ids):
            await wire.response(id)
    written = made[0].writes[before:]
    apart: set[str] = set()
    for write in written:
        told = {m["params"]["progressToken"] for m in map(json.loads, write.data.splitlines()) if "method" in m}
        done = {m["id"] for m in map(json.loads, write.data.splitlines()) if "id" in m}
        assert not told & {token for token, id in zip("pqrst", ids, strict=True) if id in done}
        apart |= told
    assert apart == set("pqrst")
    assert len(written) < 8  # the messages were not written one by one


@modern
async def test_a_question_is_written_apart_from_progress(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with connected(tested.server, revision, streams=streams) as wire:
        for _ in range(20):  # in many orders of the tasks
            await wire.call("tools/call", call("ask"), progress="p", rounds=False)
        assert pieces(made[0]) == [[PROGRESS], ["answer"]] * 20


@every_revision
async def test_a_tap_sees_every_byte_both_ways(revision: str, autojump_clock: MockClock) -> None:
    seen: dict[str, list[bytes]] = {"in": [], "out": []}
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with connected(
        tested.server, revision, streams=streams, tap=lambda way, data: seen[way].append(data)
    ) as wire:
        wire.post_bytes(b"junk\n")
        await wire.call("tools/call", call("report", times=2), progress="p")
    assert seen["out"] == [write.data for write in made[0].writes]
    assert b"".join(seen["in"]) == bytes(made[0].stream.heard)  # type: ignore[attr-defined]
    assert all(type(data) is bytes for way in seen.values() for data in way)


# Clients that do not read.


@every_revision
async def test_messages_of_a_client_that_does_not_read_are_handled(revision: str, autojump_clock: MockClock) -> None:
    """A cancellation takes effect while a large answer waits for the client."""
    tested = ServerUnderTest()
    async with connected(tested.server, revision, streams=one_byte_pipe) as wire:
        with wire.not_reading():
            big = await wire.start("tools/call", call("much", size=50_000))
            gated = await wire.start("tools/call", call("gate", name="a"))
            await wait_all_tasks_blocked()
            assert tested.began == ["a"]
            await wire.cancel(gated)
            await wait_all_tasks_blocked()
            assert tested.ended == ["a"]
            listed = await wire.start("tools/list")
            await wait_all_tasks_blocked()
        assert len(texts([await wire.response(big)])[0]) == 50_000
        assert (await wire.response(listed))["result"]["tools"]
        assert not wire.answered(gated)


class Slow(PipeEnd):
    """An end that pauses before each read."""

    pause = 0.0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep(self.pause)
        return await super().receive_some(max_bytes)


@every_revision
async def test_a_client_that_reads_one_byte_a_second_is_served_at_that_pace(
    revision: str, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest()
    ours, theirs = one_byte_pipe()
    slow = Slow(ours._out, ours._into)
    async with connected(tested.server, revision, streams=lambda: (slow, theirs)) as wire:
        slow.pause = 1.0
        big = await wire.start("tools/call", call("much", size=3000))
        gated = await wire.start("tools/call", call("gate", name="a"))
        await trio.sleep(100)
        await wire.cancel(gated)
        await trio.sleep(1)
        assert (tested.ended, wire.answered(big)) == (["a"], False)
        assert len(texts([await wire.response(big)])[0]) == 3000
        assert trio.current_time() > 3000
        slow.pause = 0.0


@every_revision
async def test_handlers_that_report_wait_for_a_client_that_does_not_read(
    revision: str, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest(limits=Limits(outgoing=10, calls=4))
    async with connected(tested.server, revision, streams=one_byte_pipe, log_level="info") as wire:
        with wire.not_reading():
            ids = [
                await wire.start("tools/call", call("report", times=30, log=bool(n % 2)), progress=f"p{n}")
                for n in range(4)
            ]
            await wait_all_tasks_blocked()
            assert queued(tested.server) <= 10 + 4
            assert tested.server.statistics().running == 4
            await wire.cancel(ids[0])
            await wait_all_tasks_blocked()
            # Its place is free, and its queued messages are dropped.
            assert tested.server.statistics().running == 3
            another = await wire.start("tools/call", call("report", times=1, log=True))
            await wait_all_tasks_blocked()
            assert tested.server.statistics().running == 4
        for id in (*ids[1:], another):
            assert texts([await wire.response(id)]) == ["reported"]
        assert not wire.answered(ids[0])


def queued(server: Server) -> int:
    """The number of messages in the queues of all connections of a server."""
    [run] = server._runs
    return sum(connection._duplex._queued() for connection in run.connections)  # type: ignore[attr-defined]


@every_revision
async def test_reading_stops_when_the_queue_is_full_and_goes_on_later(revision: str, autojump_clock: MockClock) -> None:
    """Independent of the sizes of the reads."""
    tested = ServerUnderTest(limits=Limits(outgoing=5, calls=5))
    streams, made = recorded_pairs(lambda: pipe_pair(1000))
    async with connected(tested.server, revision, streams=streams) as wire:
        requests = [wire.request("tools/list" if n % 2 else "no/such/method") for n in range(500)]
        with wire.not_reading():
            for request in requests:
                wire.post(request)
                wire.post_bytes(b"junk\n")
            await wait_all_tasks_blocked()
            # The server stops its own answers at the limit.  The five calls that have begun may still end.
            assert 5 + 5 < queued(tested.server) <= 5 + 5 + 1 + 5
            read = made[0].read
            assert read < 30 * len(json.dumps(requests[-1])) + 1000
            await trio.sleep(1000)
            assert made[0].read == read
        for request in requests:
            await wire.response(request["id"])
        await wait_all_tasks_blocked()
        assert len(wire.unaddressed) == 500


@pytest.mark.full
async def test_a_flood_from_a_client_that_does_not_read_needs_no_more_memory(autojump_clock: MockClock) -> None:
    """The bytes that the server does not read stay in the client's pipe."""
    tested = ServerUnderTest(limits=Limits(outgoing=50, calls=50, requests=200))
    ours, theirs = pipe_pair(60_000)
    pings = [b'{"jsonrpc":"2.0","id":%d,"method":"ping"}\n' % number for number in range(300)]
    flood = itertools.cycle([b"junk\n", b"{}\n", *pings])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, tested.server, theirs)
        before = None
        for count in range(100):
            with trio.move_on_after(1):
                await ours.send_all(b"".join(itertools.islice(flood, 1000)))
            await wait_all_tasks_blocked()
            assert queued(tested.server) <= 101
            if count % 33 == 0:
                gc.collect()
                before = before or len(gc.get_objects())
                assert len(gc.get_objects()) < before + 500
        ours.close()


async def test_other_tasks_run_during_a_flood_of_messages(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message has three bytes and needs an answer, and all messages arrive in one read."""
    ours, theirs = pipe_pair(10**7)
    turn = 0
    heard: Counter[int] = Counter()
    receive = ServerProtocol.receive

    def counted(self: ServerProtocol, *args: Any, **how: Any) -> Any:
        heard[turn] += 1
        return receive(self, *args, **how)

    async def other() -> None:
        nonlocal turn
        while True:
            turn += 1
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(ServerProtocol, "receive", counted)
    async with trio.open_nursery() as nursery:
        await ours.send_all(b"{}\n" * 5000)
        nursery.start_soon(other)
        nursery.start_soon(serve_stream, ServerUnderTest().server, theirs)
        answered = 0
        while answered < 5000:
            answered += bytes(await ours.receive_some()).count(b"\n")
        nursery.cancel_scope.cancel()
    assert heard.total() == 5000
    assert max(heard.values()) <= 2 * 1000  # the order of two tasks within one pass of the loop is random


# Streams that fail.


@pytest.mark.parametrize("error", [trio.BrokenResourceError, trio.ClosedResourceError])
@every_revision
async def test_a_write_that_fails_ends_only_its_connection(
    revision: str, error: type[Exception], autojump_clock: MockClock
) -> None:
    """Each write may fail: that of a handler's task, and that of the writer task, for notifications and refusals."""
    tested = ServerUnderTest()
    async with tested.server.running(), connected(tested.server, revision) as other:
        for number in range(1, 8):
            streams, made = recorded_pairs()
            async with connected(tested.server, revision, streams=streams, log_level="info", opened=False) as wire:
                made[0].fails = lambda count, number=number: error() if count == number else None
                with suppress(ProtocolViolation):  # the server has ended
                    await wire.open()
                    await wire.start("tools/call", call("gate", name="for ever"))
                    for _ in range(3):
                        await wire.call("tools/call", call("report", times=1), progress="p")
                        await wire.call("tools/list")
                await wait_all_tasks_blocked()
                assert len(made[0].writes) == number  # no write follows
                assert (made[0].closed_at is not None, wire.ended.is_set()) == (True, True)
                assert tested.server.statistics().running == 0
            assert await other.call("tools/list")
    assert tested.began == tested.ended
    assert tested.began


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("shared", [False, True], ids=["a run of its own", "a run that goes on"])
@every_revision
async def test_an_exception_of_a_tap_ends_its_connection_unchanged(
    revision: str, shared: bool, way: str, autojump_clock: MockClock
) -> None:
    mine = KeyError("mine")
    tested = ServerUnderTest()

    called = False

    def tap(direction: str, data: bytes) -> None:
        nonlocal called
        called |= b"tools/call" in data
        if called and direction == way:
            raise mine

    async with another_client(tested.server, revision, shared) as other:
        streams, made = recorded_pairs()
        with pytest.raises(KeyError) as caught:
            await last_call(connected(tested.server, revision, streams=streams, tap=tap))
        assert caught.value is mine
        assert made[0].closed_at is not None
        assert tested.server.statistics().running == 0
        if other is not None:
            assert await other.call("tools/list")


async def last_call(
    connecting: AbstractAsyncContextManager[RawClient], first: Callable[[], None] = lambda: None
) -> None:
    """A call at which the connection ends."""
    async with connecting as wire:
        first()
        await wire.start("tools/call", call("echo", text="x"))
        await wait_for_end(wire)


@asynccontextmanager
async def another_client(server: Server, revision: str, shared: bool) -> AsyncIterator[RawClient | None]:
    """Another client on the same run, if the run is shared."""
    if shared:
        async with server.running(), connected(server, revision) as other:
            yield other
    else:
        yield None


@pytest.mark.parametrize("shared", [False, True], ids=["a run of its own", "a run that goes on"])
async def test_an_unexpected_exception_of_a_stream_is_raised_unchanged(shared: bool, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    mine = OSError("the cable")
    async with another_client(tested.server, LATEST, shared) as other:
        streams, made = recorded_pairs()
        with pytest.raises(OSError) as caught:
            await last_call(connected(tested.server, LATEST, streams=streams), lambda: made[0].fail_with(mine))
        assert caught.value is mine
        assert made[0].closed_at is not None
        if other is not None:
            assert await other.call("tools/list")


@pytest.mark.parametrize("error", [trio.BrokenResourceError, trio.ClosedResourceError])
@every_revision
async def test_a_read_that_fails_ends_the_connection(
    revision: str, error: type[Exception], autojump_clock: MockClock
) -> None:
    class Failing(RecordedStream):
        async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
            data = await super().receive_some(max_bytes)
            if not data:
                raise error
            return data

    tested = ServerUnderTest()
    ours, theirs = unlimited_pipe()
    async with connected(tested.server, revision, streams=lambda: (ours, Failing(theirs))) as wire:
        await wire.start("tools/call", call("gate", name="a"))
        await wait_all_tasks_blocked()
    assert tested.ended == ["a"]


# The end.


@every_revision
async def test_after_the_end_of_input_only_answers_are_written(revision: str, autojump_clock: MockClock) -> None:
    """Changes are not written: a client that has closed its side expects no new messages, and some clients fail."""
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with connected(tested.server, revision, streams=streams, log_level="info") as wire:
        await wire.subscribe(tools=True, uris=["it://changes"])
        ids = [await wire.start("tools/call", call("gate", name=name)) for name in "abc"]
        await wait_all_tasks_blocked()
        before = len(wire.messages)
        wire._outbox.close()
        await wait_all_tasks_blocked()
        tested.server.notify_list_changed("tools")
        tested.server.notify_resource_updated("it://changes")
        await trio.sleep(1)
        ends = wire.messages[before:]
        for name in "abc":
            tested.open(name).set()
        assert texts([await wire.response(id) for id in ids]) == ["a", "b", "c"]
        await wait_for_end(wire)
    assert [end.get("method", "result") for end in ends] == (
        ["result", "notifications/cancelled"] if wire.modern else []
    )
    assert sorted(tested.ended) == ["a", "b", "c"]
    assert made[0].closed_at == 1


@every_revision
async def test_at_the_end_the_current_line_is_finished_and_the_rest_dropped(
    revision: str, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs(one_byte_pipe)
    scope = trio.CancelScope()

    async def serve(server: Server, stream: trio.abc.Stream) -> None:
        await _serve_in(scope, server, stream)

    async with connected(tested.server, revision, streams=streams, serve=serve) as wire:
        with wire.not_reading():
            first = await wire.start("tools/call", call("echo", text="first"))
            await wait_all_tasks_blocked()
            second = await wire.start("tools/call", call("echo", text="second"))
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
        await wait_for_end(wire)
        assert (wire.answered(first), wire.answered(second)) == (True, False)
        assert lines_in(made[0].writes[-1].data) == 1


@pytest.mark.parametrize("how", ["the client", "a cancellation", "the run"])
@every_revision
async def test_a_client_that_does_not_read_does_not_delay_the_end(
    revision: str, how: str, autojump_clock: MockClock
) -> None:
    """The stream is closed in time, although the current line cannot be finished."""
    tested = ServerUnderTest()
    ours, theirs = one_byte_pipe()
    end, scope, over = RecordedStream(theirs), trio.CancelScope(), trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(_run_until, over, tested.server)
        nursery.start_soon(_serve_in, scope, tested.server, end)
        wire = RawClient(ours, revision)
        nursery.start_soon(wire.run)
        await wire.open()
        with wire.not_reading():
            await wire.start("tools/call", call("much", size=100))
            await wait_all_tasks_blocked()
            start = trio.current_time()
            {"the client": wire._outbox.close, "a cancellation": scope.cancel, "the run": over.set}[how]()
            await trio.sleep(10 * CLOSING)
        # A client that has closed its side may still read, so it has the time that a running call would have.
        shutdown_timeout = 5 + CLOSING if how == "the client" else 0
        assert end.closed_at == start + shutdown_timeout + CLOSING
        assert tested.server.statistics().connections == 0
        over.set()
        nursery.cancel_scope.cancel()


async def _run_until(over: trio.Event, server: Server, task_status: Any) -> None:
    async with server.running():
        task_status.started()
        await over.wait()


async def _serve_in(scope: trio.CancelScope, server: Server, stream: trio.abc.Stream) -> None:
    with scope:
        await serve_stream(server, stream)


@every_revision
async def test_the_stream_is_closed_before_a_slow_handler_ends(revision: str, autojump_clock: MockClock) -> None:
    server = Server("slow")

    @server.tool
    async def stubborn() -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)
        return "at last"

    streams, made = recorded_pairs()
    async with connected(server, revision, streams=streams) as wire:
        await wire.start("tools/call", call("stubborn"))
        await wait_all_tasks_blocked()
        await wire.close()
        assert made[0].closed_at == trio.current_time() == 5 + CLOSING
        assert server.statistics().running == 1
    assert trio.current_time() == 100


@pytest.mark.parametrize("closing", ["for ever", "with an error"])
async def test_a_stream_that_fails_to_close_gracefully_is_closed_by_force(
    closing: str, autojump_clock: MockClock
) -> None:
    class Slow(RecordedStream):
        async def aclose(self) -> None:
            try:
                if self.closed_at is None and closing == "for ever":
                    await trio.sleep_forever()
                elif self.closed_at is None:
                    raise trio.BrokenResourceError
            finally:
                await super().aclose()

    tested = ServerUnderTest()
    ours, theirs = unlimited_pipe()
    end = Slow(theirs)
    await ours.send_eof()
    await serve_stream(tested.server, end)
    assert end.closed_at == trio.current_time() == (CLOSING if closing == "for ever" else 0)


@every_revision
async def test_a_drain_lets_running_calls_finish_and_refuses_new_ones(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(limits=Limits(calls=3))
    drain = trio.Event()
    async with connected(tested.server, revision, streams=one_byte_pipe, drain=drain) as wire:
        listening = await wire.subscribe(tools=True)
        running = [await wire.start("tools/call", call("gate", name="a")) for _ in range(3)]
        waiting = [await wire.start("tools/call", call("gate", name="b")) for _ in range(3)]
        await wait_all_tasks_blocked()
        drain.set()
        for id in waiting:
            assert (await wire.response(id))["error"]["code"] == -32603
        with pytest.raises(ErrorResponse, match="shutting down"):
            await wire.call("tools/list")
        if wire.modern:
            assert (await wire.response(listening.id))["result"]["resultType"] == "complete"
        await trio.sleep(1000)
        assert (tested.began, wire.ended.is_set()) == (["a"] * 3, False)
        with wire.not_reading():
            tested.open("a").set()
            await wait_all_tasks_blocked()
        assert texts([await wire.response(id) for id in running]) == ["a"] * 3
        await wait_for_end(wire)


@pytest.mark.parametrize("number", [1, 6])
@every_revision
async def test_a_drain_takes_the_time_that_the_client_needs_to_read_its_answers(
    revision: str, number: int, autojump_clock: MockClock
) -> None:
    """Also for answers that need no handler, and for the line that is being written."""
    drain = trio.Event()
    async with connected(ServerUnderTest().server, revision, streams=one_byte_pipe, drain=drain) as wire:
        with wire.not_reading():
            ids = []
            for _ in range(number):
                ids.append(await wire.start("no/such/method"))
                await wait_all_tasks_blocked()
            drain.set()
            await trio.sleep(100 * CLOSING)
        for id in ids:
            assert (await wire.response(id))["error"]["code"] == -32601
        await wait_for_end(wire)


async def test_a_drain_of_an_idle_connection_ends_it_at_once(autojump_clock: MockClock) -> None:
    drain = trio.Event()
    async with connected(ServerUnderTest().server, LATEST, drain=drain) as wire:
        drain.set()
        await wait_for_end(wire)


@every_revision
async def test_queued_changes_are_written_before_a_drain_ends_the_connection(
    revision: str, autojump_clock: MockClock
) -> None:
    """Also the changes that were held back while the queue was full."""
    tested = ServerUnderTest(limits=Limits(outgoing=2))
    drain = trio.Event()
    async with connected(tested.server, revision, streams=one_byte_pipe, drain=drain) as wire:
        await wire.subscribe(tools=True, prompts=True, resources=True, uris=["it://changes"])
        with wire.not_reading():
            ids = [await wire.start("tools/call", call("echo", text="x")) for _ in range(5)]
            await wait_all_tasks_blocked()
            tested.server.notify_list_changed("tools", "resources")
            tested.server.notify_resource_updated("it://changes")
            await trio.sleep(1)
            drain.set()
            await wait_all_tasks_blocked()
        assert texts([await wire.response(id) for id in ids]) == ["x"] * 5
        await wait_for_end(wire)
        # In the modern revision the subscription has ended by then.
        assert len(wire._changes) == (0 if wire.modern else 3)


@every_revision
async def test_changes_that_find_a_full_queue_are_sent_once_later(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest(limits=Limits(outgoing=2))
    async with connected(tested.server, revision, streams=one_byte_pipe) as wire:
        listening = await wire.subscribe(tools=True, uris=["it://changes"])
        with wire.not_reading():
            ids = [await wire.start("tools/call", call("echo", text="x")) for _ in range(5)]
            await wait_all_tasks_blocked()
            for _ in range(10):
                tested.server.notify_list_changed("tools")
                tested.server.notify_resource_updated("it://changes")
                await trio.sleep(1)
        assert texts([await wire.response(id) for id in ids]) == ["x"] * 5
        assert {await wire.changed(), await wire.changed()} == {("tools", None), ("updated", "it://changes")}
        await trio.sleep(1)
        assert not wire._changes
        await listening.end()


@modern
async def test_changes_held_back_for_a_subscription_are_dropped_with_it(
    revision: str, autojump_clock: MockClock
) -> None:
    """Another subscription with the same id does not get them."""
    tested = ServerUnderTest(limits=Limits(outgoing=2))
    async with connected(tested.server, revision, streams=one_byte_pipe) as wire:
        listening = await wire.subscribe(tools=True)
        with wire.not_reading():
            ids = [await wire.start("tools/call", call("echo", text="x")) for _ in range(5)]
            await wait_all_tasks_blocked()
            tested.server.notify_list_changed("tools")
            await trio.sleep(1)
            await listening.end()
            await wire.start("subscriptions/listen", {"notifications": {"promptsListChanged": True}}, id=listening.id)
            await wait_all_tasks_blocked()
        assert texts([await wire.response(id) for id in ids]) == ["x"] * 5
        await trio.sleep(1)
        assert not wire._changes


@pytest.mark.parametrize("ask", ["server/discover", "no/such/method"])
async def test_a_request_without_a_handler_is_answered_before_an_immediate_end(
    ask: str, autojump_clock: MockClock
) -> None:
    """In each order of the tasks."""
    for _ in range(30):
        ours, theirs = unlimited_pipe()
        await ours.send_all(json.dumps(RawClient(ours, LATEST).request(ask)).encode() + b"\n")
        await ours.send_eof()
        await serve_stream(ServerUnderTest().server, theirs)
        assert lines_in(ours.heard) == 1


async def test_cancelled_serving_ends_after_its_handlers(autojump_clock: MockClock) -> None:
    """In a shared run, in which no other task would wait for the handlers."""
    server = Server("slow")

    @server.tool
    async def stubborn() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(100)

    async with server.running():
        ours, theirs = unlimited_pipe()
        await ours.send_all(
            json.dumps(RawClient(ours, LATEST).request("tools/call", call("stubborn"))).encode() + b"\n"
        )
        with trio.move_on_after(10):
            await serve_stream(server, theirs)
        assert (trio.current_time(), server.statistics().running) == (100, 0)
        assert theirs._out.no_sender


# Runs.


@every_revision
async def test_the_end_of_a_run_ends_its_connections(revision: str, autojump_clock: MockClock) -> None:
    tested = ServerUnderTest()
    streams, made = recorded_pairs()
    async with trio.open_nursery() as nursery:
        async with tested.server.running():
            wire = RawClient(streams()[0], revision)
            nursery.start_soon(wire.run)
            nursery.start_soon(serve_stream, tested.server, made[0])
            await wire.open()
            await wire.start("tools/call", call("gate", name="a"))
            await wait_all_tasks_blocked()
            before = len(made[0].writes)
        assert tested.ended == ["a"]
        wire.post(wire.request("tools/list"))  # no request may begin now
        await wait_for_end(wire)
        assert len(made[0].writes) == before
        assert trio.current_time() == 0


async def test_a_request_that_arrives_while_a_run_ends_is_not_begun(autojump_clock: MockClock) -> None:
    """In no order of the tasks that end."""
    tested = ServerUnderTest()
    for _ in range(30):
        ours, theirs = unlimited_pipe()
        line = json.dumps(RawClient(ours, LATEST).request("tools/call", call("gate", name="late"))).encode() + b"\n"
        async with trio.open_nursery() as nursery, tested.server.running():
            nursery.start_soon(serve_stream, tested.server, theirs)
            await wait_all_tasks_blocked()
            ours._out.buffer += line
            ours._out.changed.unpark_all()
    assert tested.began == []


@asynccontextmanager
async def failing_lifespan(server: Server) -> AsyncIterator[None]:
    raise KeyError("begin")
    yield


@asynccontextmanager
async def failing_end(server: Server) -> AsyncIterator[None]:
    try:
        yield
    finally:
        raise KeyError("end")


@pytest.mark.parametrize(("lifespan", "when"), [(failing_lifespan, "begin"), (failing_end, "end")])
async def test_an_exception_of_a_lifespan_is_raised_and_closes_the_stream(
    lifespan: Any, when: str, autojump_clock: MockClock
) -> None:
    server = Server("failing", lifespan=lifespan)
    ours, theirs = unlimited_pipe()
    await ours.send_eof()
    end = RecordedStream(theirs)
    with pytest.raises(KeyError, match=when):
        await serve_stream(server, end)
    assert end.closed_at == 0
    with pytest.raises(KeyError, match=when):
        async with server.running():
            assert when == "end"
    with pytest.raises(KeyError, match=when):  # a second attempt is possible
        async with server.running():
            pass
    assert server.statistics().connections == 0


async def test_a_block_and_its_lifespan_may_both_fail(autojump_clock: MockClock) -> None:
    with pytest.raises(KeyError, match="end") as caught:
        async with Server("failing", lifespan=failing_end).running():
            raise LookupError("body")
    assert isinstance(caught.value.__context__, LookupError)


@pytest.mark.parametrize("error", [KeyError("mine"), StopAsyncIteration("mine"), KeyboardInterrupt("mine")])
async def test_an_exception_in_the_block_of_a_run_is_raised_unchanged(
    error: BaseException, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest()

    async def body() -> None:
        async with tested.server.running(), connected(tested.server, LATEST) as wire:
            await wire.start("tools/call", call("gate", name="a"))
            await wait_all_tasks_blocked()
            raise error

    with pytest.raises(type(error)) as caught:
        await body()
    assert caught.value is error
    assert tested.ended == ["a"]


def interrupts() -> dict[str, Callable[[], Any]]:
    async def group(*errors: BaseException) -> None:
        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(_raise, error)

    return {
        "itself": lambda: _raise(KeyboardInterrupt()),
        "in a group": lambda: group(KeyboardInterrupt()),
        "with a failure": lambda: group(KeyboardInterrupt(), ValueError("both")),
        "with an exit": lambda: group(SystemExit(1), KeyboardInterrupt()),
    }


async def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("kind", sorted(interrupts()))
@pytest.mark.parametrize("shared", [False, True], ids=["a run of its own", "a run that goes on"])
async def test_a_keyboard_interrupt_of_a_handler_ends_its_run_ungrouped(
    shared: bool, kind: str, autojump_clock: MockClock
) -> None:
    tested = ServerUnderTest()

    @tested.server.tool
    async def interrupt() -> None:
        await wait_all_tasks_blocked()
        await interrupts()[kind]()

    async def talk() -> None:
        if shared:
            async with tested.server.running():
                await _one_call(tested.server)
        else:
            await _one_call(tested.server)

    with pytest.raises(BaseException) as caught:  # the test compares the exact type
        await talk()
    assert type(caught.value) is KeyboardInterrupt
    assert tested.ended == ["a"]


async def _one_call(server: Server) -> None:
    ours, theirs = memory_stream_pair()
    wire = RawClient(ours, LATEST)
    for request in (call("gate", name="a"), call("interrupt")):
        await ours.send_all(json.dumps(wire.request("tools/call", request)).encode() + b"\n")
    await serve_stream(server, theirs)


@pytest.mark.parametrize("errors", [[SystemExit(1)], [SystemExit(1), ValueError("x")], [ValueError(), KeyError()]])
@ERAS
async def test_other_exception_groups_fail_only_their_call(
    revision: str, errors: list[BaseException], caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    server = Server("failing")

    @server.tool
    async def fail() -> None:
        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(_raise, error)

    async with connected(server, revision) as wire:
        assert (await wire.call("tools/call", call("fail")))["isError"]
        assert await wire.call("tools/list")
    assert "fail" in caplog.text


async def test_a_filter_that_raises_fails_only_the_subscription(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    def filter(principal: Any, item: Any) -> bool:
        raise ValueError("broken filter")

    tested = ServerUnderTest(filter=filter)
    async with connected(tested.server, LATEST) as wire:
        with pytest.raises(ErrorResponse) as caught:
            await wire.subscribe(uris=["it://changes"])
        assert (caught.value.code, "broken" in caught.value.message) == (-32603, False)
        assert await wire.call("server/discover")
    assert "broken filter" in caplog.text


@since("2025-06-18")
async def test_a_drain_lets_the_client_answer_open_questions(revision: str, autojump_clock: MockClock) -> None:
    server, drain = Server("draining"), trio.Event()

    @server.tool
    async def order(ctx: Context) -> str:
        answer = await ctx.elicit("Sure?", bool)
        assert isinstance(answer, Accepted)
        return "ordered" if answer.value else "dropped"

    async def later(params: Object) -> Object:
        drain.set()
        await trio.sleep(60)
        return {"action": "accept", "content": {"value": True}}

    async with connected(server, revision, drain=drain) as wire:
        wire.answers["elicitation/create"] = later
        assert texts([{"result": await wire.call("tools/call", {"name": "order"})}]) == ["ordered"]
        await wait_for_end(wire)


async def test_consecutive_reports_are_written_together_without_delay(autojump_clock: MockClock) -> None:
    server = Server("telling")

    @server.tool
    async def work(ctx: Context) -> str:
        for number in range(60):
            if number % 20 == 0:
                await trio.sleep(0.002)  # like a pause for work
            await ctx.progress(number)
        return "done"

    streams, made = recorded_pairs()
    async with connected(server, "2025-11-25", streams=streams) as wire:
        before = len(made[0].writes)
        await wire.call("tools/call", {**call("work"), "_meta": {"progressToken": "a"}})
        assert [note["progress"] for note in wire.noted(PROGRESS)] == list(range(60))
        *reports, answer = pieces(made[0])[before:]
        assert answer == ["answer"]
        # The first report of each row starts the writer, which may run before or after the next report.
        assert {len(each) for each in reports} <= {20, 1, 19}
