"""Programs that a client starts: their environment, slow servers, and programs that are not servers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from tests.server.raw_client import LATEST
from trio_mcp import McpError, Server, UsageError, open_client
from trio_mcp.errors import HandshakeError, ServerExited, SessionClosed

# A server with one tool, which returns the environment.
ENVIRONMENT_SERVER = """
import os
from trio_mcp import Server

server = Server("tells")

@server.tool
def environment() -> dict[str, str]:
    return dict(os.environ)

server.run()
"""
LANGUAGE = {"LANG": "de_AT.UTF-8", "LC_TIME": "de_AT.UTF-8", "TMPDIR": "/tmp"}


@pytest.mark.parametrize(
    ("options", "given", "withheld"),
    [
        ({}, LANGUAGE, {"API_KEY", "PYTHONWARNINGS"}),
        ({"env": {"API_KEY": "k", "LANG": None}}, {"API_KEY": "k", "TMPDIR": "/tmp"}, {"LANG", "PYTHONWARNINGS"}),
        ({"environment": "inherit"}, {**LANGUAGE, "API_KEY": "s3cret", "PYTHONWARNINGS": "error"}, set()),
    ],
    ids=["default", "env", "inherit"],
)
async def test_a_child_gets_a_few_environment_variables_by_default(
    options: Any, given: dict[str, str], withheld: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**LANGUAGE, "API_KEY": "s3cret", "PYTHONWARNINGS": "error"}.items():
        monkeypatch.setenv(name, value)
    async with open_client([sys.executable, "-c", ENVIRONMENT_SERVER], **options) as client:
        found = json.loads((await client.call_tool("environment")).content[0].text)
    assert given.items() <= found.items()
    assert found["PATH"] == os.environ["PATH"]
    assert not withheld & found.keys()


# Programs that do not speak MCP.  These run in memory with a mock clock, and those below are real processes.

Program = Callable[["FakeProgram"], Awaitable[None]]


class FakeProgram:
    """A program at the other end of a stream; times are those since its start."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream
        self._start = trio.current_time()

    async def write(self, text: str = "", at: float = 0) -> None:
        await trio.sleep_until(self._start + at)
        await self._stream.send_all(text.encode())

    async def close(self) -> None:
        await self._stream.aclose()

    async def half_close(self) -> None:
        await self._stream.send_eof()

    async def serve(self, at: float = 0) -> None:
        """Answer each request as a modern server, from this time on."""
        await trio.sleep_until(self._start + at)
        async for data in self._stream:
            for line in bytes(data).splitlines():
                asked = json.loads(line)
                if "method" not in asked:
                    continue  # an error about the text that was written before
                answer: dict[str, Any] = {"error": {"code": -32601, "message": "no"}}
                if asked["method"] == "server/discover":
                    answer = {"result": {"supportedVersions": [LATEST], "capabilities": {}, "resultType": "complete"}}
                await self.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}) + "\n")

    async def echo(self) -> None:
        async for data in self._stream:
            await self._stream.send_all(data)


async def prints_a_greeting(program: FakeProgram) -> None:
    await program.write("Hello, \x1b[1mworld\n", at=7)


async def prints_many_lines(program: FakeProgram) -> None:
    for number in range(200):
        await program.write(f"line {number} {'x' * 500}\n", at=7 + 1.01 * number)


async def prints_a_log_line(program: FakeProgram) -> None:
    await program.write('{"level": "info", "message": "Listening on 3000"}\n', at=7)


async def prints_an_array(program: FakeProgram) -> None:
    await program.write("[0, 1]\n", at=7)


async def prints_a_prompt(program: FakeProgram) -> None:
    await program.write("Password: ")


async def prints_and_closes(program: FakeProgram) -> None:
    await program.write("no key\nbye")
    await program.half_close()


async def prints_and_notifies(program: FakeProgram) -> None:
    await program.write("Hello\n")
    await program.write('{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}\n', at=7)


async def open_session(program: Program, **options: Any) -> str:
    """The reason why no session is opened with this program, or an empty text."""
    ours, theirs = memory_stream_pair()

    async def run() -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # the client has closed the stream
            await program(FakeProgram(theirs))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        why = ""
        try:
            async with open_client(ours, **options) as client:
                assert client.revision == LATEST
        except (HandshakeError, SessionClosed) as error:
            why = str(error)
        nursery.cancel_scope.cancel()
    return why


@pytest.mark.parametrize(
    ("program", "options", "seconds", "words"),
    [
        (prints_a_greeting, {}, 37,
         ["within 30 seconds after its first line that is not a message (garbage_timeout)", "Hello, \ufffd[1mwor"]),
        (prints_a_greeting, {"garbage_timeout": 3}, 10, ["within 3 seconds", "Hello"]),
        (prints_a_greeting, {"garbage_timeout": math.inf}, 120, ["within 120 seconds (start_timeout)", "Hello"]),
        (prints_a_greeting, {"garbage_timeout": math.inf, "start_timeout": 200}, 200, ["Hello"]),
        (prints_a_greeting, {"garbage_timeout": 500, "start_timeout": math.inf}, 507, ["Hello"]),
        (prints_many_lines, {}, 37, ["  line 0 xxx", "  line 9 xxx", "  ... and 20 more"]),
        (prints_a_log_line, {}, 37, ["Listening on 3000"]),
        (prints_an_array, {}, 37, ["  [0, 1]"]),
        (prints_a_prompt, {}, 120, ["within 120 seconds (start_timeout)", "  Password: "]),
        (FakeProgram.write, {}, 120, ["it wrote nothing"]),
        (FakeProgram.write, {"start_timeout": 9.5}, 9.5, ["within 9.5 seconds"]),
        (FakeProgram.write, {"start_timeout": 500}, 500, ["within 500 seconds"]),
        (FakeProgram.close, {}, 0, ["closed the stream before its first message"]),
        (prints_and_closes, {}, 0, ["closed the stream before its first message", "  no key\n  bye"]),
        (FakeProgram.echo, {}, 0, ["sends back its input, so it is not an MCP server"]),
        (FakeProgram.echo, {"revision": "2025-06-18"}, 0, ["sends back its input"]),
        # This program sends a message, so it has the time that servers have.
        (prints_and_notifies, {}, 300, ["no answer in time"]),
    ],
)  # fmt: skip
async def test_a_program_that_is_not_a_server_fails_in_time_with_its_output(
    program: Program, options: Any, seconds: float, words: list[str], autojump_clock: MockClock
) -> None:
    start = trio.current_time()
    why = await open_session(program, **options)
    assert trio.current_time() - start == pytest.approx(seconds, abs=0.1)
    assert [word for word in words if word not in why] == []
    assert len(why) < 5000


async def prints_and_serves(program: FakeProgram) -> None:
    await prints_a_greeting(program)
    await program.serve(at=36)


async def serves_late(program: FakeProgram) -> None:
    await program.serve(at=119)


async def prints_notifies_and_serves(program: FakeProgram) -> None:
    await prints_and_notifies(program)
    await program.serve(at=299)


async def serves_after_hours(program: FakeProgram) -> None:
    await prints_a_greeting(program)
    await program.serve(at=10_000)


NO_TIMEOUTS = {"start_timeout": math.inf, "garbage_timeout": math.inf, "revision": LATEST}


@pytest.mark.parametrize(
    ("program", "options"),
    [(prints_and_serves, {}), (serves_late, {}), (prints_notifies_and_serves, {}), (serves_after_hours, NO_TIMEOUTS)],
)
async def test_a_server_that_is_slow_or_prints_text_is_accepted(
    program: Program, options: Any, autojump_clock: MockClock
) -> None:
    assert await open_session(program, **options) == ""


async def test_the_first_line_that_is_not_a_message_is_logged_at_once(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    warnings: list[tuple[float, str]] = []
    start = trio.current_time()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING and "not an MCP message" in (text := record.getMessage()):
                warnings.append((trio.current_time() - start, text))

    handler = Handler()
    logging.getLogger("trio_mcp").addHandler(handler)
    try:
        await open_session(prints_many_lines)
    finally:
        logging.getLogger("trio_mcp").removeHandler(handler)
    [(seconds, text)] = warnings
    assert seconds == 7
    assert "wrote a line that is not an MCP message: 'line 0 xxx" in text
    assert len(text) < 400


# Real programs, each once.

WAIT_FOR_EOF = "; import sys; sys.stdin.read()"


@pytest.mark.parametrize(
    ("program", "options", "error", "words"),
    [
        ("print('Hello', flush=True)" + WAIT_FOR_EOF, {"garbage_timeout": 0.01}, HandshakeError,
         ["(garbage_timeout)", "  Hello\nand nothing to stderr"]),
        ("pass", {}, ServerExited,
         ["ended with status 0 before its first message (did it forget server.run()?), and wrote nothing"]),
        ("print('usage: x')", {}, ServerExited, ["(did it forget server.run()?); it wrote:\n  usage: x\nand nothing"]),
        ("print('half'); raise SystemExit('no key')", {}, ServerExited,
         ["ended with status 1 before its first message; it wrote:\n  half\nand its last lines on stderr:\n  no key"]),
        ("import os, time; os.close(0); time.sleep(0.1); os.write(1, b'half'); raise SystemExit(3)", {}, ServerExited,
         ["ended with status 3 before its first message; it wrote:\n  half\n"]),
        ("import os; os.close(1)" + WAIT_FOR_EOF, {}, SessionClosed,
         ["closed its stdin or stdout before its first message"]),
    ],
    ids=["text", "nothing", "usage", "status", "stdin closed", "stdout closed"],
)  # fmt: skip
async def test_the_error_about_a_real_program_has_its_output_and_status(
    program: str, options: Any, error: type[McpError], words: list[str]
) -> None:
    with pytest.raises(error) as failed:
        async with open_client([sys.executable, "-S", "-c", program], stderr=None, **options):
            raise AssertionError("it was opened")
    assert [word for word in words if word not in str(failed.value)] == []


async def test_a_silent_real_program_fails_in_time_with_its_stderr(mock_clock: MockClock) -> None:
    heard = trio.Event()

    async def wait() -> None:
        await heard.wait()
        await wait_all_tasks_blocked()
        mock_clock.jump(120)

    silent = "import sys; print('no key', file=sys.stderr, flush=True)" + WAIT_FOR_EOF
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        with pytest.raises(
            HandshakeError, match=r"\(start_timeout\); it wrote nothing to stdout; .* stderr:\n  no key"
        ):
            async with open_client([sys.executable, "-S", "-c", silent], stderr=lambda data: heard.set()):
                raise AssertionError("it was opened")


async def test_cat_is_not_a_server() -> None:
    with pytest.raises(
        HandshakeError, match="the server 'cat' sends back its input, so it is not an MCP server"
    ) as failed:
        async with open_client(["cat"]):
            raise AssertionError("it was opened")
    assert "nothing" not in str(failed.value)


@pytest.mark.parametrize("name", ["start_timeout", "garbage_timeout"])
@pytest.mark.parametrize("seconds", [-1, math.nan, "30", None])
def test_a_timeout_must_be_a_number_of_seconds(name: str, seconds: Any) -> None:
    options: Any = {name: seconds}
    with pytest.raises(UsageError, match=f"{name} must be a number of seconds"):
        open_client(["cat"], **options)


@pytest.mark.parametrize("target", ["http://127.0.0.1/mcp", "ws://127.0.0.1/ws", Server("s")])
def test_other_targets_refuse_the_timeouts_of_programs(target: Any) -> None:
    with pytest.raises(UsageError, match=r"does not support the options: start_timeout$"):
        open_client(target, start_timeout=5)
