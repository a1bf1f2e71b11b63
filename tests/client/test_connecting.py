"""The opening of a session: the attempts, their order, and the error if all of them fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection, events

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, legacy, scripted_server
from tests.client.matrix import no_tasks_left, tcp_connects_to
from tests.http.scripted_server import A, D, E
from tests.requirements import req
from trio_mcp.client import ClientOptions, HandshakeError, NoResponse, SessionLost, connector_for, open_client

# The timeouts of the opening are not public.
from trio_mcp.client.connecting import EVENT_STREAM_WAIT, OPENING, PROBE
from trio_mcp.core import SessionClosed, UsageError
from trio_mcp.transport import ServerExited

Handler = Callable[[ReceivedRequest, ResponseWriter], Awaitable[None]]

# A child that exits if its first message is not `initialize`, and counts its starts in a file.
STRICT = """
import json, sys
with open(sys.argv[1], "a") as starts: starts.write("started\\n")
first = True
for line in sys.stdin:
    message = json.loads(line)
    if first and (message["method"] != "initialize" or sys.argv[2] == "never"):
        print("unexpected", message["method"], file=sys.stderr)
        sys.exit(3)
    first = False
    if "id" in message:
        result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "strict", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
PROBED, BEGUN = "server/discover in 2026-07-28", "initialize with 2025-11-25"
DIED = "the process ended with status 3"


def strict(folder: Path, mood: str = "") -> list[str]:
    return [sys.executable, "-c", STRICT, str(folder / "starts"), mood]


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


async def test_a_child_that_exits_on_the_probe_is_started_once_more(tmp_path: Path) -> None:
    async with no_tasks_left():
        async with open_client(strict(tmp_path)) as client:
            assert client.revision == "2025-06-18"
            assert [(each.tried, each.answered) for each in client.negotiation.attempts] == [
                (PROBED, DIED),
                (BEGUN, "the server chose 2025-06-18"),
            ]
        assert starts(tmp_path) == 2


async def test_a_child_that_exits_again_is_an_error(tmp_path: Path) -> None:
    async with no_tasks_left():
        with pytest.raises(ServerExited, match="unexpected initialize") as exited:
            async with open_client(strict(tmp_path, "never")):
                raise AssertionError("it was opened")
        assert starts(tmp_path) == 2
        opening = exited.value.__cause__
        assert isinstance(opening, HandshakeError)
        assert [each.tried for each in opening.negotiation.attempts] == [PROBED, BEGUN]
        assert opening.negotiation.attempts[0].answered == DIED
        assert DIED in str(opening)


@pytest.mark.parametrize("revision", [E, D])
async def test_a_child_is_not_started_again_for_the_same_request(tmp_path: Path, revision: str) -> None:
    with pytest.raises(ServerExited):
        async with open_client(strict(tmp_path, "never"), revision=revision):
            raise AssertionError("it was opened")
    assert starts(tmp_path) == 1


# A child that waits for a signal of the test before it reads, and reports its progress on stderr.  A test appends the
# rest of the program.
STARTING = """
import json, sys
with open(sys.argv[1], "a") as starts: starts.write("started\\n")
print("starting", file=sys.stderr, flush=True)
open(sys.argv[2]).read()
"""
BROKEN = 'raise ImportError("no module named weather")'
SILENT = """
print(json.loads(sys.stdin.readline())["method"], file=sys.stderr, flush=True)
request = json.loads(sys.stdin.readline())
result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "silent", "version": "1"}}
print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
sys.stdin.read()
"""
MODERN = """
from trio_mcp import Server
Server("slow").run()
"""
needs_unread_count = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell how much is unread in a pipe"
)


class Starting:
    """A child that starts to read when the test tells it to."""

    def __init__(self, folder: Path, then: str) -> None:
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        self.command = [sys.executable, "-c", STARTING + then, str(folder / "starts"), str(self._gate)]
        self._said = b""
        self._more = trio.Event()

    def on_stderr(self, data: bytes) -> None:
        self._said += data
        self._more.set()

    async def has_written(self, line: bytes) -> None:
        while line not in self._said.splitlines():
            await self._more.wait()
            self._more = trio.Event()

    async def release(self) -> None:
        await trio.to_thread.run_sync(self._gate.write_text, "go")


@needs_unread_count
async def test_a_child_that_exits_before_it_reads_is_not_started_again(tmp_path: Path) -> None:
    child = Starting(tmp_path, BROKEN)
    async with no_tasks_left(), trio.open_nursery() as nursery:
        nursery.start_soon(child.release)
        with pytest.raises(ServerExited, match="no module named weather") as exited:
            async with open_client(child.command, stderr=child.on_stderr):
                raise AssertionError("it was opened")
    assert starts(tmp_path) == 1
    opening = exited.value.__cause__
    assert isinstance(opening, HandshakeError)
    assert [each.tried for each in opening.negotiation.attempts] == [PROBED]


@needs_unread_count
async def test_a_child_that_starts_slowly_is_not_taken_for_a_legacy_server(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    child = Starting(tmp_path, MODERN)

    async def wait_and_go() -> None:
        await child.has_written(b"starting")
        for _ in range(3):
            await wait_all_tasks_blocked()
            mock_clock.jump(PROBE)
        await wait_all_tasks_blocked()
        await child.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_and_go)
        async with open_client(child.command, stderr=child.on_stderr) as client:
            assert client.revision == E
            assert [each.tried for each in client.negotiation.attempts] == [PROBED]


async def test_a_child_that_reads_the_probe_and_stays_silent_is_a_legacy_server(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    child = Starting(tmp_path, SILENT)

    async def go_and_wait() -> None:
        await child.release()
        await child.has_written(b"server/discover")
        await wait_all_tasks_blocked()
        mock_clock.jump(PROBE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_and_wait)
        async with open_client(child.command, stderr=child.on_stderr) as client:
            assert [(each.tried, each.answered) for each in client.negotiation.attempts] == [
                (PROBED, "no answer in time"),
                (BEGUN, "the server chose 2025-06-18"),
            ]


async def _strict_socket(opened: list[str], mood: str, stream: trio.SocketStream) -> None:
    """Close the connection on `server/discover`, or, if the mood is "never", on any message."""
    connection = WSConnection(ConnectionType.SERVER)
    opened.append("opened")
    async for data in stream:
        connection.receive_data(data)
        for event in connection.events():
            if isinstance(event, events.Request):
                await stream.send_all(connection.send(events.AcceptConnection(subprotocol="mcp")))
            elif isinstance(event, events.TextMessage):
                message = json.loads(event.data)
                if message["method"] == "server/discover" or mood == "never":
                    await stream.aclose()
                    return
                if "id" in message:
                    result = {"protocolVersion": A, "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
                    answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
                    await stream.send_all(connection.send(events.TextMessage(answer)))


@asynccontextmanager
async def strict_sockets(opened: list[str], mood: str = "") -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, partial(_strict_socket, opened, mood), 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        yield f"ws://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


LOST = "the connection was lost without a close frame"


async def test_a_websocket_that_is_closed_on_the_probe_is_opened_once_more() -> None:
    opened: list[str] = []
    async with strict_sockets(opened) as url, open_client(url) as client:
        assert client.revision == A
        assert [(each.tried, each.answered) for each in client.negotiation.attempts] == [
            (PROBED, LOST),
            (BEGUN, f"the server chose {A}"),
        ]
    assert len(opened) == 2


@pytest.mark.parametrize(("options", "times"), [({}, 2), ({"revision": E}, 1), ({"revision": A}, 1)])
async def test_a_websocket_that_is_closed_again_is_an_error(options: ClientOptions, times: int) -> None:
    opened: list[str] = []
    async with strict_sockets(opened, "never") as url:
        with pytest.raises(SessionClosed, match=LOST):
            async with open_client(url, **options):
                raise AssertionError("it was opened")
    assert len(opened) == times


async def _slow_server(stream: trio.abc.Stream, late: float, refusal: int) -> None:
    """A modern server that starts slowly, and then answers at once."""
    await trio.sleep(late)
    data = b""
    while more := await stream.receive_some():
        *lines, data = (data + more).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["method"] == "server/discover":
                said = {"result": {"supportedVersions": [E], "capabilities": {}, "resultType": "complete"}}
            else:
                said = {"error": {"code": refusal, "message": "no"}}
            await stream.send_all(json.dumps({"jsonrpc": "2.0", "id": message["id"], **said}).encode() + b"\n")


@pytest.mark.parametrize("refusal", [-32601, -32602])
async def test_a_modern_server_that_starts_slowly_is_recognized(refusal: int, autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_slow_server, theirs, 30, refusal)
        async with open_client(ours) as client:
            assert client.revision == E
            assert [each.tried for each in client.negotiation.attempts] == [PROBED, BEGUN, PROBED]


# HTTP.


def refusing(status: int) -> Handler:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(status, b"nothing here")

    return handle


@pytest.mark.parametrize("revision", [None, D, A])
@pytest.mark.parametrize("status", [400, 404, 405])
async def test_the_error_for_a_url_without_a_server_lists_the_attempts(
    status: int, revision: str | None, autojump_clock: MockClock
) -> None:
    options: Any = {} if revision is None else {"revision": revision}
    async with scripted_server(refusing(status)) as server:
        with (
            tcp_connects_to(server.connect),
            pytest.raises(HandshakeError, match=r"127.0.0.1:3000/mcp; check the path") as failed,
        ):
            async with open_client(f"{URL}?key=Geheim", **options):
                raise AssertionError("it was opened")
        assert server.operations == ([] if revision else ["server/discover"]) + ["initialize", "GET"]
    tried = failed.value.negotiation.attempts
    assert [each.tried.split()[0] for each in tried] == [*server.operations[:-1], "HTTP+SSE"]
    assert all(f"HTTP {status}" in each.answered for each in tried[:-1])
    assert isinstance(failed.value.__cause__, NoResponse)
    assert "Geheim" not in str(failed.value)
    assert tried[-1].answered == str(failed.value.__cause__)


async def test_a_stream_without_an_endpoint_event_is_an_error(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.method == "POST":
            await out.reply(404)
        else:
            await out.begin()
            await out.end()

    async with scripted_server(handle) as server:
        with tcp_connects_to(server.connect), pytest.raises(HandshakeError, match="ended before its endpoint event"):
            async with open_client(URL):
                raise AssertionError("it was opened")


async def test_an_error_lists_only_attempts_that_were_made(autojump_clock: MockClock) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.begin()
        await out.wait_for_close()

    async with scripted_server(handle) as server:
        start = trio.current_time()
        with tcp_connects_to(server.connect), pytest.raises(HandshakeError, match="no answer in time") as failed:
            async with open_client(URL):
                raise AssertionError("it was opened")
        assert server.operations == ["server/discover"]
        assert [(each.tried, each.answered) for each in failed.value.negotiation.attempts] == [
            (PROBED, "no answer in time")
        ]
        assert OPENING <= trio.current_time() - start < OPENING + 5


async def _no_event_stream(received: ReceivedRequest, out: ResponseWriter) -> None:
    await out.reply(405)


@req("ver-10")
async def test_a_legacy_url_is_not_probed_again_but_another_query_is(autojump_clock: MockClock) -> None:
    opening = legacy(_no_event_stream)

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await (out.reply(404) if received.operation == "server/discover" else opening(received, out))

    async def visit(url: str) -> list[str]:
        async with scripted_server(handle) as server:
            with tcp_connects_to(server.connect):
                async with open_client(url) as client:
                    assert client.revision == D
            return server.operations[:2]

    probed, known = ["server/discover", "initialize"], ["initialize", "notifications/initialized"]
    assert await visit(f"{URL}?tenant=1") == probed
    assert await visit(f"{URL}?tenant=1") == known
    assert await visit(f"{URL}?tenant=2") == probed
    assert await visit(URL) == probed
    assert await visit(f"{URL}?tenant=2#here") == known
    await trio.sleep(601)
    assert await visit(URL) == probed


async def test_an_error_lists_a_failed_attempt_with_the_remembered_revision(autojump_clock: MockClock) -> None:
    opening = legacy(_no_event_stream)
    here = True

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await (opening(received, out) if here and received.operation != "server/discover" else out.reply(404))

    async with scripted_server(handle) as server:
        with tcp_connects_to(server.connect):
            async with open_client(URL):
                pass
            here = False
            with pytest.raises(HandshakeError) as failed:
                async with open_client(URL):
                    raise AssertionError("it was opened")
    tried = [each.tried for each in failed.value.negotiation.attempts]
    assert tried == [BEGUN, PROBED, BEGUN, "HTTP+SSE at the same URL"]


async def test_a_client_with_callbacks_waits_for_the_event_stream(autojump_clock: MockClock) -> None:
    """Some servers discard a question that belongs to no request of the client, until the event stream is open."""
    streams: list[ResponseWriter] = []
    answered = trio.Event()

    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation == "GET":
            await trio.sleep(EVENT_STREAM_WAIT / 2)
            await out.begin()
            streams.append(out)
            await out.wait_for_close()
        elif received.operation == "tools/call":
            form = {"message": "?", "requestedSchema": {"type": "object", "properties": {}}}
            for each in streams:
                await each.event({"jsonrpc": "2.0", "id": 1, "method": "elicitation/create", "params": form})
            await answered.wait()
            await out.json(received.answer({"content": []}))
        elif received.operation == "answer":
            answered.set()
            await out.reply(202)

    async with scripted_server(legacy(handle)) as server:
        with tcp_connects_to(server.connect), trio.fail_after(60):
            async with open_client(URL, revision=D, elicitation=lambda form: {}) as client:
                await client.call_tool("ask")
        assert server.operations == ["initialize", "notifications/initialized", "GET", "tools/call", "answer", "DELETE"]


@pytest.mark.parametrize(
    ("options", "refusal", "seconds"),
    [
        ({"roots": []}, None, EVENT_STREAM_WAIT), ({"roots": []}, 405, 0), ({"roots": []}, 500, 0),
        ({"roots": []}, "cut", 0),
        ({}, None, 0),
    ],
)  # fmt: skip
async def test_the_wait_for_the_event_stream_is_bounded(
    options: Any, refusal: Any, seconds: float, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        if received.operation != "GET":
            await out.json(received.answer({"tools": []}))
        elif refusal == "cut":
            out.close()
        else:
            await (out.wait_for_close() if refusal is None else out.reply(refusal))

    async with scripted_server(legacy(handle)) as server:
        start = trio.current_time()
        with tcp_connects_to(server.connect):
            async with open_client(URL, revision=D, **options) as client:
                assert trio.current_time() - start == seconds
                assert (await client.list_tools_page()).tools == []


@req("http-58")
@pytest.mark.parametrize("options", [{}, {"roots": []}, {"log_level": "info", "on_log": print}])
async def test_a_server_that_loses_each_session_is_not_opened_endlessly(
    options: Any, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(404)

    async with scripted_server(legacy(handle, logging={})) as server:
        with tcp_connects_to(server.connect), trio.fail_after(600), pytest.raises(SessionLost):
            await visit_often(options)
        assert server.operations.count("initialize") <= 3


async def visit_often(options: Any) -> None:
    async with open_client(URL, revision=D, **options) as client:
        for _ in range(20):
            await client.list_tools_page()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (["python", "x.py", 7, b"Geheim", "Geheim"], "a list of 'python' and bytes, int, str"),
        ([7, "Geheim"], "a list of int and str"),
        ((), "an empty tuple"),
        (b"Geheim", "bytes"),
        ({"token": "Geheim"}, r"a dict; for an entry of a configuration, write .*"),
    ],
)
def test_an_error_about_a_target_does_not_repeat_its_arguments(target: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"; got {said}$") as refused:
        connector_for(target, {})
    assert "Geheim" not in str(refused.value)
