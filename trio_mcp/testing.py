"""Helpers for tests: a client and a server in one process, and transcripts of their messages.

    from trio_mcp import Server
    from trio_mcp.testing import assert_transcript, open_memory_pair

    server = Server("calculator")

    @server.tool
    def add(a: int, b: int) -> int:
        return a + b

    async def test_that_it_adds(autojump_clock):
        async with open_memory_pair(server, revision="2025-03-26") as pair:
            result = await pair.client.call_tool("add", {"a": 1, "b": 2})
        assert result.content[0].text == "3"
        assert_transcript(pair.transcript[-1:], '''
            < {"jsonrpc": "2.0", "id": 2, "result": {"content": [{"type": "text", "text": "3"}]}}
            ''')

Client and server exchange real bytes in memory: without sockets, sleeps or patches, so under Trio's `MockClock` a day
passes at once.  Two runs exchange the same messages; within `seeded` also in the same order, even with several tasks.

A transcript is text, one line for each message, in the order in which the client sent and received them:

| Line | Meaning |
|---|---|
| ``> {...}`` | the client sends this message |
| ``< {...}`` | the server sends this message |
| ``# ...``, empty | a comment |

A transcript contains every message, so it contains the secrets of the messages too.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import attrs
import trio
from trio.testing import memory_stream_pair

from trio_mcp.client.client import Client, ClientOptions, open_client
from trio_mcp.core.messages import Json
from trio_mcp.server.session import serve_stream
from trio_mcp.server.threads import no_threads
from trio_mcp.transport.nursery import block, check_trio, open_nursery
from trio_mcp.transport.wire import CLOSING

if TYPE_CHECKING:
    import os

    from trio_mcp.server.server import Server

__all__ = [
    "Line", "MemoryPair", "Transcript", "TranscriptMismatch", "assert_transcript", "open_memory_pair", "seeded",
]  # fmt: skip

# Trio has no public way to set the order of tasks.  These two names exist for its plugins for pytest and Hypothesis.
# They are looked up here once, so that a Trio without them causes a clear error, not runs that differ.
_trio_run: Any = getattr(getattr(trio, "_core", None), "_run", None)
_SCHEDULER = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")
_missing = [name for name in _SCHEDULER if not hasattr(_trio_run, name)]

_SENDERS = {">": "the client", "<": "the server"}
_MARKS: dict[str, Literal[">", "<"]] = {"out": ">", "in": "<"}


class TranscriptMismatch(AssertionError):
    """The messages differ from the expected transcript; the error message shows the first difference."""


# The order of tasks.


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block, `seed` determines the order in which Trio runs tasks that are ready at the same time.

    Each seed gives one order, the same in each run:

        for seed in range(1000):
            with seeded(seed):
                trio.run(scenario, seed, clock=trio.testing.MockClock(autojump_threshold=0))

    It may also be entered inside a run.  Within the block, `def` handlers run in the event loop, because the order of
    threads cannot be set.  Other sources of differences are left to the test: other threads, sockets, random ids, and
    sets of text, whose order depends on PYTHONHASHSEED.

    Raises RuntimeError if this version of Trio does not support it.
    """
    if _missing:
        raise RuntimeError(
            f"seeded() needs {' and '.join(_missing)} of trio._core._run, which Trio {trio.__version__} does not have; "
            "use Trio 0.35, which has them"
        )
    allowed, state = _trio_run._ALLOW_DETERMINISTIC_SCHEDULING, _trio_run._r.getstate()
    _trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    _trio_run._r.seed(seed)
    try:
        with no_threads():
            yield
    finally:
        _trio_run._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        _trio_run._r.setstate(state)


# Transcripts.


@attrs.frozen
class Line:
    """One message: its sender, and its text as on the wire."""

    mark: Literal[">", "<"]
    text: str

    def __str__(self) -> str:
        return f"{self.mark} {self.text}"

    @property
    def message(self) -> Json:
        """The message; if its text is not valid JSON, the text."""
        try:
            return json.loads(self.text)
        except ValueError:
            return self.text


class Transcript(Sequence[Line]):
    """The messages that a client and its server exchanged.

    To record one, give its `tap` to a client on any stream; `str` of a transcript is its text:

        transcript = Transcript()
        async with open_client(["python", "server.py"], tap=transcript.tap) as client:
            ...
        transcript.write("talk.txt")

    It has no size limit and keeps every message.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._lines = list(lines)
        self._rest = {">": b"", "<": b""}

    @classmethod
    def parse(cls, text: str) -> Transcript:
        """Parse the text of a transcript.  Raises ValueError if a line is not in the format above."""
        lines: list[Line] = []
        for number, line in enumerate(text.split("\n"), 1):  # not splitlines: only \n ends a message
            content = line.strip()
            if content.startswith((">", "<")):
                lines.append(Line(">" if content[0] == ">" else "<", content[1:].strip()))
            elif content and not content.startswith("#"):
                raise ValueError(f"line {number} of a transcript must begin with >, < or #, got {content[:40]!r}")
        return cls(lines)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Transcript:
        """Read a transcript from a file.  Raises OSError, and ValueError like `parse`."""
        return cls.parse(Path(path).read_bytes().decode("utf-8", "surrogateescape"))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the transcript to a file, for `read`.  Raises OSError."""
        Path(path).write_bytes(str(self).encode("utf-8", "surrogateescape"))

    def tap(self, direction: str, data: bytes) -> None:
        """Record data.  Give this as the option `tap` of a client whose stream has one message a line."""
        mark = _MARKS[direction]
        *lines, self._rest[mark] = (self._rest[mark] + data).split(b"\n")
        for line in lines:  # bytes that are not UTF-8 are kept as surrogates
            self._lines.append(Line(mark, line.decode("utf-8", "surrogateescape").strip()))

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index]

    def __len__(self) -> int:
        return len(self._lines)

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


def assert_transcript(actual: Sequence[Line], expected: Sequence[Line] | str) -> None:
    """Raise `TranscriptMismatch` unless the messages are those of the expected transcript.

    Messages are compared as JSON: the order of members does not matter.  The error shows the first different message as
    a diff.
    """
    wanted = Transcript.parse(expected) if isinstance(expected, str) else expected
    for number, pair in enumerate(itertools.zip_longest(wanted, actual), 1):
        before, after = map(_shown, pair)
        if before != after:
            diff = difflib.unified_diff(before, after, "expected", "actual", lineterm="", n=100)
            raise TranscriptMismatch("\n".join((f"message {number} differs from the expected transcript", *diff)))


def _shown(line: Line | None) -> list[str]:
    if line is None:
        return ["(no more messages)"]
    written = json.dumps(line.message, indent=2, sort_keys=True, ensure_ascii=False)
    return [f"{_SENDERS[line.mark]} sends", *written.split("\n")]


# A client and a server.


@attrs.frozen(eq=False, repr=False)
class MemoryPair:
    """A client and a server, connected in memory."""

    client: Client
    server: Server
    transcript: Transcript
    """The messages so far."""
    _server_end: trio.abc.Stream

    async def drop(self) -> None:
        """Break the connection: all pending operations on both sides end at once."""
        await self._server_end.aclose()


def open_memory_pair(server: Server, **options: Unpack[ClientOptions]) -> AbstractAsyncContextManager[MemoryPair]:
    """Open a client of this server: ``async with open_memory_pair(server, revision="2025-11-25") as pair``.

    The options are those of `open_client`, and the block raises the same errors.  Exceptions of the block, and of the
    server's own program, such as its lifespan, are raised as themselves.
    """
    return _opened(server, options)


@block
async def _opened(stack: AsyncExitStack, server: Server, options: ClientOptions) -> MemoryPair:
    check_trio()
    client_end, server_end = memory_stream_pair()
    transcript, served, callers_tap = Transcript(), trio.Event(), options.get("tap")
    failures: list[Exception] = []  # of the server

    def tap(direction: str, data: bytes) -> None:
        transcript.tap(direction, data)
        if callers_tap is not None:
            callers_tap(direction, data)

    async def serve() -> None:
        try:
            # No timeout: a client that closes its end reads no more.
            await serve_stream(server, server_end, shutdown_timeout=0)
        except Exception as error:
            failures.append(error)
            raise
        finally:
            served.set()

    @stack.push
    def raise_failure(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and failures:  # the reason why the client lost its server
            raise failures[0] from None

    nursery = await stack.enter_async_context(open_nursery())
    nursery.start_soon(serve, name="the server of this pair")

    @stack.push_async_callback
    async def wait() -> None:
        with trio.move_on_after(CLOSING):
            await served.wait()

    tapped: ClientOptions = {**options, "tap": tap}
    client = await stack.enter_async_context(open_client(client_end, **tapped))
    return MemoryPair(client, server, transcript, server_end)
