"""Faults that the simulation has found, with one test for each."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import trio
from trio.testing import MockClock

from tests.client.matrix import Variant, no_tasks_left, serve_over
from tests.http.scripted_server import D, E
from tests.simulation.plan import Client as Program
from tests.simulation.plan import Fault, Line, Move, Plan
from tests.simulation.world import play
from trio_mcp import Client, Context, Limits, Server, open_client
from trio_mcp.errors import NoResponse, SessionLost
from trio_mcp.relay import open_relay
from trio_mcp.types import Request, Resource


@dataclass
class Size:
    size: int


class FailingNetwork:
    """A network in which connecting and sending fail until the time `up`.  Receiving works."""

    def __init__(self) -> None:
        self.up = 0.0
        self.refused = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        async def send(stream: trio.abc.Stream, data: bytes) -> None:
            if trio.current_time() < self.up:
                raise trio.BrokenResourceError

        with patched_connections(send, self.refuse):
            yield

    def refuse(self) -> None:
        if trio.current_time() < self.up:
            self.refused += 1
            raise ConnectionRefusedError


@contextmanager
def lossy_connections(lose: Callable[[bytes], bool]) -> Iterator[None]:
    """Break a connection when it sends data that is to be lost."""

    async def send(stream: trio.abc.Stream, data: bytes) -> None:
        if lose(data):
            await stream.aclose()
            raise trio.BrokenResourceError

    with patched_connections(send):
        yield


@contextmanager
def patched_connections(
    before: Callable[[trio.abc.Stream, bytes], Awaitable[None]], refuse: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Call `refuse` before each connection, and `before` with the bytes of each send.  Both may raise."""
    connect = trio.open_tcp_stream

    async def dial(*address: Any) -> trio.abc.Stream:
        refuse()
        stream: Any = await connect(*address)
        send = stream.send_all

        async def send_all(data: bytes) -> None:
            await before(stream, bytes(data))
            await send(data)

        stream.send_all = send_all
        return stream  # type: ignore[no-any-return]

    with mock.patch.object(trio, "open_tcp_stream", dial):
        yield


@asynccontextmanager
async def client_of_asking_server(variant: Variant, network: FailingNetwork, seconds: float) -> AsyncIterator[Client]:
    """A client of a server with a tool `order` that asks it.  The network fails for `seconds` after the question."""
    server = Server("asking")

    @server.tool
    async def order(ctx: Context) -> str:
        return repr(await ctx.elicit("Which size?", Size))

    async def answer(form: object) -> dict[str, object]:
        network.up = trio.current_time() + seconds
        return {"size": 3}

    async with no_tasks_left(), serve_over(variant.transport, server) as url:
        with network.active():
            async with open_client(url, revision=variant.revision, elicitation=answer) as client:
                yield client


@pytest.mark.parametrize("variant", [Variant("http", D), Variant("http+sse", D)], ids=" ".join)
@pytest.mark.parametrize("seconds", [5.0, 50.0])
async def test_an_answer_is_sent_again_while_the_server_cannot_be_reached(
    variant: Variant, seconds: float, autojump_clock: MockClock
) -> None:
    network = FailingNetwork()
    async with client_of_asking_server(variant, network, seconds) as client:
        with trio.fail_after(200):
            assert "size=3" in await client.call_tool("order", returns=str)
    assert network.refused > 0


async def test_a_call_ends_with_its_session_if_an_answer_cannot_be_sent(autojump_clock: MockClock) -> None:
    network = FailingNetwork()
    async with client_of_asking_server(Variant("http", D), network, math.inf) as client:
        with trio.fail_after(300), pytest.raises(SessionLost, match="an answer did not reach the server") as raised:
            await client.call_tool("order")
        assert raised.value.request_may_have_run
        network.up = 0.0


@pytest.mark.parametrize("seconds", [50.0, 75.0])
@pytest.mark.parametrize("era", [D, E])
def test_no_call_is_lost_when_a_server_closes_idle_connections(era: str, seconds: float) -> None:
    """This includes calls that are sent while the server closes the connection."""
    delay = 0.05
    for late in (-2 * delay, -delay, 0.0, delay, 2 * delay):
        moves = (Move("echo"), Move("echo", wait=seconds + late))
        assert play(Plan(1, "http", era, (Program(moves),), Line(delay=delay))).violations == ()


async def test_a_change_before_the_upstream_server_has_subscribed_is_received(
    autojump_clock: MockClock,
) -> None:
    async def slowly(ctx: Context, request: Request, call_next: Any) -> Any:
        if request.method == "resources/subscribe":
            await trio.sleep(5)
        return await call_next()

    server = Server("notes", middleware=[slowly])
    server.add_resource(Resource("a", "notes://a"), lambda ctx, uri: "a")
    async with (
        open_relay(server, revision=D) as shown,
        open_client(shown, revision=E) as client,
        client.listen(resources=["notes://a"]) as changes,
    ):
        server.notify_resource_updated("notes://a")
        with trio.fail_after(20):
            assert (await anext(changes)).item == "notes://a"


async def test_a_call_with_a_dropped_answer_may_have_run(autojump_clock: MockClock) -> None:
    server = Server("forgetful", limits=Limits(replay_events=1))

    @server.tool
    async def work(ctx: Context) -> None:
        assert await ctx.hang_up(retry=5)
        for step in range(3):
            await ctx.progress(step, message="away")
            await trio.sleep(0.1)

    async with no_tasks_left(), serve_over("http", server) as url, open_client(url, revision=D) as client:
        with trio.fail_after(100), pytest.raises(NoResponse, match="the server does not resume") as raised:
            await client.call_tool("work", on_progress=lambda *said: None)
        assert raised.value.request_may_have_run
        assert raised.value.status == 400


@pytest.mark.parametrize("variant", [Variant("http", D), Variant("http+sse", D)], ids=" ".join)
@pytest.mark.parametrize("lost", [1, 3])
async def test_a_session_is_complete_if_its_opening_had_to_be_sent_again(
    variant: Variant, lost: int, autojump_clock: MockClock
) -> None:
    server, left = Server("asking"), [lost]
    server.add_resource(Resource("a", "notes://a"), lambda ctx, uri: "a")

    @server.tool
    async def order(ctx: Context) -> str:
        return repr(await ctx.elicit("Which size?", Size))

    def lose(data: bytes) -> bool:
        found = b"notifications/initialized" in data and left[0] > 0
        left[0] -= found
        return found

    async with no_tasks_left(), serve_over(variant.transport, server) as url:
        with lossy_connections(lose):
            async with open_client(url, revision=variant.revision, elicitation=lambda form: {"size": 3}) as client:
                with trio.fail_after(100):
                    async with client.listen(resources=["notes://a"]) as changes:
                        server.notify_resource_updated("notes://a")
                        assert (await anext(changes)).item == "notes://a"
                    assert "size=3" in await client.call_tool("order", returns=str)
    assert left == [0]


@pytest.mark.parametrize(
    ("transport", "era", "behind", "victim"), [("http", D, None, 0), ("sse", D, None, 1), ("stream", E, "http", 0)]
)
def test_a_listener_gets_changes_if_its_opening_was_sent_on_a_dead_line(
    transport: str, era: str, behind: str | None, victim: int
) -> None:
    """The server has not received the end of the handshake, and did not close the connection."""
    client = Program((Move("listen", size=60), Move("put", wait=45.0)))
    dead = Fault("dead", at=491, victim=victim)
    played = play(Plan(1, transport, era, (client,), faults=(dead,), behind=behind, behind_era=D))
    assert played.fired == ("dead",)
    assert played.violations == ()


@pytest.mark.parametrize(("transport", "era", "behind"), [("http", D, None), ("stream", E, "http")])
def test_a_listener_gets_changes_if_the_line_of_its_stream_was_dead(
    transport: str, era: str, behind: str | None
) -> None:
    """The server sent the changes on that line.  The client requests the stream again when it gives up the line."""
    client = Program((Move("listen", size=60), Move("put", wait=45.0)))
    dead = Fault("dead", at=700, back=True)
    played = play(Plan(3, transport, era, (client,), faults=(dead,), behind=behind, behind_era=D))
    assert played.fired == ("dead",)
    assert played.violations == ()


def test_a_relay_on_a_slow_line_may_listen_late() -> None:
    """When it listens, its session with the upstream server is open."""
    listens, puts = Program((Move("listen", size=9),)), Program((Move("listen"), Move("put")))
    line = Line(chunk=512, delay=1.5)
    plan = Plan(4, "stream", E, (listens, puts), line, behind="sse", behind_era=D)
    assert play(plan).violations == ()


def test_a_long_incoming_message_counts_as_the_answer_to_a_ping() -> None:
    """The answer to a ping follows it, and comes late."""
    moves = (Move("ask", wait=0.3, patience=0.001, by_option=True), Move("complete", wait=0.3))
    client = Program((*moves, Move("big", wait=2.0, size=70_009)))
    line = Line(chunk=2, window=24_576, delay=1.5)
    assert play(Plan(5016214, "websocket", D, (client,), line, pings=7.0)).violations == ()


def test_a_relay_listens_again_without_a_request() -> None:
    """The upstream server ends after a change, before it has sent the notification."""
    moves = (Move("follow", wait=0.01, size=4), Move("listen", wait=2.0, size=46), Move("fail", wait=45.0))
    client = Program((*moves, Move("put", wait=2.0), Move("tools")))
    crash = Fault("crash", at=318, victim=8, seconds=23.83, back=True)
    plan = Plan(5001716, "websocket", E, (client,), faults=(crash,), behind="websocket", behind_era=D)
    played = play(plan)
    assert played.fired == ("crash",)
    assert played.violations == ()


@pytest.mark.parametrize("behind", ["http", "websocket", "sse"])
@pytest.mark.parametrize("fault", ["drain", "crash"])
@pytest.mark.parametrize("era", [D, E])
def test_a_relay_listens_again_to_a_server_that_comes_back(era: str, fault: str, behind: str) -> None:
    """The subscription came while the upstream server was away."""
    moves = (Move("echo"), Move("listen", wait=0.01, size=60), Move("put", wait=20.0))
    away = Fault(fault, at=60, seconds=5.0)  # the upstream host is the first of two
    revision = D if behind == "sse" else E
    plan = Plan(1, "websocket", era, (Program(moves),), faults=(away,), behind=behind, behind_era=revision)
    played = play(plan)
    assert played.fired == (fault,)
    assert played.violations == ()


def test_a_call_is_answered_if_the_answer_to_its_question_is_slow() -> None:
    """The server gives up after `Limits.head_seconds`, says so with 408, and waits for the answer."""
    slow = Fault("slow", at=0, victim=2, seconds=3.0)
    played = play(Plan(1, "http", D, (Program((Move("ask"),)),), Line(chunk=64, window=4096), (slow,)))
    assert played.fired == ("slow",)
    assert played.outcomes == ("answered",)
    assert played.violations == ()


def test_an_unread_question_does_not_wait_for_the_end_of_its_session() -> None:
    """The client lost the response to one call; the relay asks there, and another call of the session waits for it."""
    calls = Program((Move("count", wait=0.01, size=3), Move("count", wait=0.3, size=2), Move("ask"), Move("echo")))
    calls = Program((*calls.moves, Move("ask", wait=0.01)))
    pings = Program((Move("ping", wait=0.3, patience=1.2, by_option=True),))
    faults = (Fault("end", at=0, victim=9, seconds=21.799, back=True), Fault("slow", at=0, victim=1, seconds=1.791))
    plan = Plan(5033481, "http", D, (calls, pings), faults=faults, behind="sse", behind_era=D)
    played = play(plan)
    assert set(played.fired) == {"end", "slow"}
    assert played.violations == ()


def test_a_cancellation_ends_streams_to_make_room() -> None:
    """The streams of cancelled calls are still read; they count for the limit of connections, and were not ended."""
    echo = Program((Move("echo", wait=45.0, size=571),))
    moves = (Move("hold", size=10, patience=17.375), Move("hold", wait=0.3, size=33), Move("away", wait=0.3))
    assert play(Plan(5038977, "http", D, (echo, Program(moves)), tight=True)).violations == ()


def test_a_cancellation_does_not_overtake_its_request() -> None:
    """Each has its own connection, and the line is slow."""
    moves = (Move("tools", patience=2.178), Move("log"), Move("put"), Move("hold"), Move("plain", wait=45.0))
    cancel = Fault("cancel", at=479, victim=7, seconds=0.078)
    plan = Plan(5039712, "sse", D, (Program(moves),), Line(chunk=1, splits=True), (cancel,), behind_era=D)
    played = play(plan)
    assert played.fired == ("cancel",)
    assert played.violations == ()


def test_a_task_ends_with_the_store_of_its_process() -> None:
    """The server is replaced while the reply that creates the task is on its way."""
    drain = Fault("drain", at=61, victim=11, seconds=4.506, back=True)
    line = Line(window=24576, delay=1.5, splits=True)
    played = play(Plan(8000198, "json", E, (Program((Move("task"),)),), line, (drain,)))
    assert played.fired == ("drain",)
    assert played.violations == ()


def test_a_slow_line_has_time_for_the_end_of_a_session() -> None:
    """The client closes at once after a cancellation, and the line needs 1.5 seconds for each of the two."""
    line = Line(chunk=64, window=24576, delay=1.5, splits=True)
    plan = Plan(8014400, "http", D, (Program((Move("hold", wait=0.3, size=60),)),), line)
    played = play(plan)
    assert played.outcomes == ("cancelled",)
    assert played.violations == ()


def test_a_client_that_ends_when_its_call_becomes_a_task_may_leave_the_task() -> None:
    """The client does not know the task yet."""
    faults = (
        Fault("cancel", at=89, victim=8, seconds=19.987, back=True),
        Fault("leave", at=24, seconds=0.085, back=True),
    )
    plan = Plan(0, "websocket", E, (Program((Move("quiz", wait=0.3),)),), faults=faults, probe=True)
    played = play(plan)
    assert set(played.fired) == {"cancel", "leave"}
    assert played.violations == ()
    moves = (
        Move("count", 0.3, 3), Move("fail", 45.0), Move("errand", 0.3, 2), Move("tools"), Move("errand", size=22),
        Move("quiz"), Move("listen", 2.0, 59),
    )  # fmt: skip
    faults = Fault("cancel", 181, 7, 0.017), Fault("leave", 187, 1, 0.165, back=True)
    played = play(Plan(8329212, "websocket", E, (Program(moves),), faults=faults))  # the client is opened again
    assert set(played.fired) == {"cancel", "leave"}
    assert played.violations == ()


def test_sessions_of_other_replicas_are_counted() -> None:
    """Copies of several sessions were made at the same time, and took more room than there was."""
    clients = tuple(Program((move,)) for move in (Move("fail", wait=0.3), Move("fail"), Move("peek", wait=0.01)))
    assert not play(Plan(2493, "http", D, clients, tight=True, replicas=2)).violations


def test_a_subscription_reaches_other_replicas_if_its_message_is_lost() -> None:
    """The subscription was stored, but the message about it could not be sent, so other replicas never read it."""
    programs = Program((Move("listen", size=40),)), Program((Move("put", wait=2.0), *(Move("put", wait=0.3),) * 12))
    away = Fault("away", at=500, seconds=4.0)
    plan = Plan(0, "http", D, programs, faults=(away,), kept=True, replicas=2, scattered=True, lag=0.02)
    assert not play(plan).violations


def test_a_replica_that_drains_does_not_report_a_session_as_ended() -> None:
    """The copy of the session ended between the head and the body of a request.  Other replicas have the session."""
    moves = (
        Move("tools"), Move("count", size=9), Move("echo", size=120), Move("wizard"), Move("prompt"),
        Move("tools", wait=0.01), Move("complete", wait=0.3), Move("complete", patience=5.06, by_option=True),
        Move("log", wait=0.3),
    )  # fmt: skip
    clients = Program((Move("errand", wait=0.3),)), Program(moves)
    line, drain = Line(64, 24576, 1.5), Fault("drain", at=425, seconds=0.489)
    assert not play(Plan(22341, "json", D, clients, line, (drain,), replicas=2)).violations


def test_the_end_of_a_session_while_its_state_is_written_is_not_an_error() -> None:
    """The client ended the session at another replica, and the log of this replica had an error about that."""
    leave = Fault("leave", at=149, victim=9, seconds=3.614)
    plan = Plan(
        30765, "json", D, (Program((Move("ask"),)),), faults=(leave,), pings=7.0, replicas=3, scattered=True, lag=0.001
    )
    assert not play(plan).violations


def test_a_task_whose_tool_has_failed_is_completed_in_the_store() -> None:
    """Clients of 2025-11-25 see that it has failed."""
    moves = Program((Move("errand", wait=45.0, size=3), Move("errand", size=19)))
    crash, end = (
        Fault("crash", at=52, victim=1, seconds=9.035, back=True),
        Fault("end", at=1363, victim=5, seconds=0.405),
    )
    cut = Fault("cut", at=521, victim=7, seconds=0.093, back=True)
    plan = Plan(702081864, "sse", D, (moves,), faults=(crash, end, cut), behind="json", behind_era=D)
    played = play(plan)
    assert set(played.fired) == {"crash", "end", "cut"}
    assert played.violations == ()


def test_a_subscription_of_an_ended_session_is_not_a_failure_of_the_store() -> None:
    """The client ends its session at one replica while it subscribes at another one."""
    moves = Program((Move("listen", size=4), Move("echo", size=1705)))
    assert not play(Plan(8041814, "http", D, (moves,), replicas=2)).violations


def test_a_change_of_a_replica_that_stops_is_sent() -> None:
    """The message about the change waited for a slow store."""
    plan = Plan(
        order=0,
        transport="http",
        era="2026-07-28",
        clients=(
            Program(
                moves=(
                    Move(kind="read", patience=0.404),
                    Move(kind="listen", wait=20.0, size=27),
                    Move(kind="read", wait=0.3),
                    Move(kind="put", wait=0.01),
                    Move(kind="read"),
                )
            ),
            Program(
                moves=(
                    Move(kind="listen", size=16),
                    Move(kind="quiz"),
                    Move(kind="tools"),
                    Move(kind="count", wait=2.0, size=4),
                    Move(kind="put"),
                    Move(kind="count", wait=0.01, size=3),
                    Move(kind="put"),
                )
            ),
        ),
        faults=(
            Fault(kind="cut", at=6, victim=8, seconds=6.64),
            Fault(kind="restart", at=751, victim=4, seconds=0.029),
            Fault(kind="drain", at=370, victim=4, seconds=0.137),
            Fault(kind="outage", at=128, victim=11, seconds=2.636, back=True),
        ),
        probe=True,
        replicas=2,
        scattered=True,
        lag=0.1,
    )
    played = play(plan)
    assert "restart" in played.fired
    assert played.violations == ()


def test_a_question_beside_a_new_task_belongs_to_its_own_call() -> None:
    """The question names no call, and the task is not known yet."""
    moves = Program((Move("wizard"), Move("job")))
    plan = Plan(5, "websocket", E, (moves,), behind="sse", behind_era=D)
    played = play(plan)
    assert played.violations == ()
    assert {line[6:] for line in played.transcript if "is asked by" in line} == {"c0 is asked by c0-1-wizard"}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(
            5, "http", D, (Program((Move("ask", 0.3), Move("ask", 2.0), Move("ask"), Move("ask", 2.0))),),
            faults=(Fault("away", 377, 1, 8.0), Fault("crash", 508, 1, 2.0)), replicas=3, scattered=True,
        ),
        Plan(
            12, "http", D, (Program((Move("ask"), Move("ask", 0.3), Move("ask", 2.0), Move("ask", 2.0))),),
            faults=(Fault("away", 260, 0, 8.0), Fault("crash", 398, 0, 2.0)), replicas=3, scattered=True,
        ),
        Plan(
            15, "http", D, (Program((Move("ask", 2.0), Move("ask"), Move("ask"))),),
            faults=(Fault("away", 212, 2, 8.0), Fault("crash", 299, 2, 2.0)), replicas=3,
        ),
    ],
)  # fmt: skip
def test_an_answer_is_not_lost_with_the_replica_that_took_it(plan: Plan) -> None:
    """The store was away, and the replica ended before it was back.  The question waited for ever."""
    played = play(plan)
    assert set(played.fired) == {"away", "crash"}
    assert played.violations == ()


def test_a_subscription_that_no_replica_can_keep_is_refused() -> None:
    """The replica that received it accepted it, and the replica that listens for the session refused it silently."""
    listens = Program(
        (
            Move("listen", 0.01, 5), Move("quiz", 2.0, patience=0.028), Move("ask", 0.01, patience=1.932),
            Move("put", 0.3),
        )
    )  # fmt: skip
    plan = Plan(33430, "http", D, (Program((Move("count", 0.01, 7),)), listens), tight=True, replicas=3)
    assert not play(plan).violations


def test_a_stream_that_is_resumed_while_its_session_ends_keeps_no_event() -> None:
    """The replica paused while it read the missed events, and the session had ended when it continued."""
    faults = Fault("crash", 169, 8, 1.79), Fault("pause", 133, 11, 15.009)
    plan = Plan(0, "http", D, (Program((Move("drop", 20.0, 4),)),), faults=faults, tight=True, replicas=2)
    played = play(plan)
    assert set(played.fired) == {"crash", "pause"}
    assert played.violations == ()


def test_the_bytes_of_a_forwarded_answer_that_cannot_be_sent_are_freed() -> None:
    """The store was away when the question of a handler was to go back to another replica."""
    moves = (
        Move("errand", 0.01, 50), Move("errand", size=3), Move("follow", size=3), Move("follow", size=2),
        Move("task", 20.0, patience=4.568), Move("answer", 0.01), Move("put", 0.3),
        Move("put", 0.3, patience=8.316, by_option=True), Move("wizard"), Move("wizard", 0.01),
    )  # fmt: skip
    faults = Fault("away", 308, 9, 2.566, back=True), Fault("away", 535, 9, 7.119, back=True)
    plan = Plan(7000045, "http", E, (Program(moves),), faults=faults, pings=7.0, replicas=2, scattered=True)
    assert not play(plan).violations


def test_a_session_without_an_active_replica_has_room_for_its_subscriptions() -> None:
    """Its subscriptions were accepted when no copy spoke, and then no replica had room for all of them."""
    moves = (
        Move("hold", size=16, patience=3.362), Move("hold", size=34), Move("listen", 2.0, 53), Move("fetch", 0.01),
        Move("follow"), Move("put", 2.0), Move("errand", 0.01, 13), Move("wizard", 2.0), Move("ask"), Move("ask"),
        Move("listen", 2.0),
    )  # fmt: skip
    faults = Fault("drain", 879, 7, 1.998), Fault("pause", 108, 10, 44.716, back=True)
    line = Line(chunk=1, window=819, delay=0.05, splits=True)
    clients = Program((Move("put", 2.0, patience=2.746),)), Program(moves)
    plan = Plan(53, "http", D, clients, line, faults, tight=True, pings=7.0, replicas=2)
    played = play(plan)
    assert set(played.fired) == {"drain", "pause"}
    assert played.violations == ()


def test_a_server_that_is_too_busy_to_resume_a_stream_breaks_no_rule() -> None:
    """The store of its replicas was away for half a minute.  The call has no answer, and may have run."""
    moves = (
        Move("listen", 2.0, 18), Move("ask", 0.01), Move("wizard"), Move("quiz", 0.01), Move("away", 45.0),
        Move("count", size=3),
    )  # fmt: skip
    others = (
        Move("wizard"), Move("put", patience=0.116, by_option=True), Move("ask", patience=0.633, by_option=True),
        Move("listen", 0.3),
    )  # fmt: skip
    faults = Fault("restart", 115, 0, 0.104), Fault("away", 1007, 7, 30.841), Fault("pause", 646, 6, 22.144, back=True)
    plan = Plan(0, "http", D, (Program(moves), Program(others)), faults=faults, tight=True, replicas=2)
    played = play(plan)
    assert set(played.fired) == {"restart", "away", "pause"}
    assert played.violations == ()


def test_a_client_may_close_a_response_before_it_knows_of_a_task() -> None:
    """The call is cancelled in the step in which its handler begins; the client of a relay closes the response."""
    moves = Move("hold", 0.3, 8), Move("follow", size=4, patience=1.697, by_option=True), Move("quiz")
    faults = Fault("hostile", 74, 8, 0.014, back=True), Fault("cancel", 102, 5, 0.045)
    played = play(Plan(1, "json", D, (Program(moves),), faults=faults, probe=True))
    assert set(played.fired) == {"hostile", "cancel"}
    assert played.violations == ()
    moves = Move("away", 0.01, patience=0.178, by_option=True), Move("quiz", patience=0.137), Move("listen", 0.01, 11)
    line = Line(chunk=2, window=819, delay=0.05, splits=True)
    assert play(Plan(8101389, "websocket", E, (Program(moves),), line, behind="json")).violations == ()


def test_a_change_may_wait_behind_a_large_answer_on_a_slow_line() -> None:
    """The answer of 186 KB takes 12 seconds."""
    moves = Move("listen", 0.3, 2), Move("big", 2.0, 93266), Move("put", 0.01)
    line = Line(chunk=2, window=24576, delay=1.5, splits=True)
    played = play(Plan(8097327, "stream", E, (Program(moves),), line))
    assert played.outcomes == ("answered",) * 3
    assert played.violations == ()


def test_a_relay_may_show_the_question_of_another_call_in_a_task() -> None:
    """The session behind it is of 2024-11-05, in which a question names no call."""
    moves = (
        Move("ask", 0.01), Move("ask"), Move("ask"), Move("ask"), Move("ask", 0.3), Move("peek", 45.0), Move("ask"),
        Move("ask", 0.01, patience=0.002), Move("answer"), Move("ask"),
    )  # fmt: skip
    line = Line(delay=0.001, splits=True)
    faults = (Fault("kill", 67, 3, 0.012, back=True),)
    played = play(Plan(8233621, "websocket", E, (Program(moves),), line, faults, behind="sse", behind_era=D))
    assert set(played.fired) == {"kill"}
    assert played.violations == ()


def test_all_requests_to_an_ended_session_on_a_slow_line_are_repeated_in_a_new_one() -> None:
    moves = Move("fetch", 45.0, patience=0.795), Move("errand", 45.0, 44), Move("task", 2.0)
    line = Line(chunk=4096, window=24576, delay=1.5, splits=True)
    assert play(Plan(8401993, "json", D, (Program(moves),), line)).violations == ()


def test_a_task_may_go_on_if_its_cancellation_takes_longer_than_the_client_waits() -> None:
    """`tasks/cancel` and the end of its connection arrive at the same moment, after three seconds."""
    moves = Move("job", patience=5.829, by_option=True), Move("count", size=8), Move("ask"), Move("quiz")
    line = Line(chunk=4096, window=24576, delay=1.5)
    faults = (Fault("cancel", 407, 3, 0.128, back=True),)
    played = play(Plan(8447268, "http", E, (Program(moves),), line, faults, probe=True, scattered=True))
    assert set(played.fired) == {"cancel"}
    assert played.violations == ()
