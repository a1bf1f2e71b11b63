"""Helpers for tests: a client and a server in one process, transcripts of their messages, and a replayed server.

    from trio_mcp import Server
    from trio_mcp.testing import assert_transcript, open_memory_pair

    server = Server("calculator")

    @server.tool
    def add(a: int, b: int) -> int:
        return a + b

    async def test_that_it_adds(autojump_clock):
        async with open_memory_pair(server, revision="2025-11-25") as pair:
            result = await pair.client.call_tool("add", {"a": 1, "b": 2})
        assert result.content[0].text == "3"
        assert_transcript(pair.transcript, '''
            ...
            > {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": "..."}
            < {"jsonrpc": "2.0", "id": 2, "result": {"content": [{"type": "text", "text": "3"}], "...": "..."}}
            ''')

Client and server exchange real bytes in memory: without sockets, sleeps or patches, so under Trio's `MockClock` a day
passes at once.  Two runs exchange the same messages; within `seeded` also in the same order, even with several tasks.

A transcript is text, one line for each message, in the order in which the client sent and received them:

| Line | Meaning |
|---|---|
| ``> {...}`` | the client sends this message |
| ``< {...}`` | the server sends this message |
| ``...`` | any number of messages, in an expected transcript |
| ``# ...``, empty | a comment |

In an expected transcript, ``"..."`` is a wildcard: as a value it matches every value, and as the name of a member it
matches any further members.  All other parts must be equal, including ids; the order of members does not matter.

A transcript contains every message, so it contains the secrets of the messages too.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack

import attrs
import trio
from trio.testing import memory_stream_pair

from trio_mcp.client.client import Client, ClientOptions, open_client
from trio_mcp.core.messages import Json
from trio_mcp.server.driver import serve_stream
from trio_mcp.server.threads import no_threads
from trio_mcp.transport.nursery import check_trio, open_nursery
from trio_mcp.transport.wire import CLOSING

if TYPE_CHECKING:
    import os

    from trio_mcp.server.server import Server

__all__ = [
    "Line",
    "MemoryPair",
    "ReplayedServer",
    "Transcript",
    "TranscriptMismatch",
    "assert_transcript",
    "open_memory_pair",
    "open_replayed",
    "replayed",
    "seeded",
]

# Trio has no public way to set the order of tasks.  These two names exist for its plugins for pytest and Hypothesis.
# They are looked up here once, so that a Trio without them causes a clear error, not runs that differ.
_trio_run: Any = getattr(getattr(trio, "_core", None), "_run", None)
_SCHEDULER = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")
_missing = [name for name in _SCHEDULER if not hasattr(_trio_run, name)]

_OPEN = "..."
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
    """One message: its sender, and its text as on the wire.  A line "..." has no text."""

    mark: Literal[">", "<", "..."]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.mark} {self.text}".rstrip()

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
        return cls(_lines(text))

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


def _lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: only \n ends a message
        content = line.strip()
        if content == _OPEN:
            yield Line("...")
        elif content.startswith((">", "<")):
            yield Line(">" if content[0] == ">" else "<", content[1:].strip())
        elif content and not content.startswith("#"):
            raise ValueError(
                f"line {number} of a transcript must begin with >, < or #, or be ..., got {content[:40]!r}"
            )


# Comparison with an expected transcript.


def assert_transcript(actual: Transcript, expected: Transcript | str) -> None:
    """Raise `TranscriptMismatch` unless the messages match the expected transcript.

    The error shows the first unexpected message as a diff.  If "..." can match in several ways, it shows the way that
    matches most of the expected messages.
    """
    wanted = tuple(Transcript.parse(expected) if isinstance(expected, str) else expected)
    # All positions in `wanted` that the messages so far can lead to, because "..." may match more messages or fewer.
    positions = _skip_open({0}, wanted)
    furthest, where = -1, 0  # the last position without a match, and the number of the message found instead
    for number, line in enumerate(actual):
        following: set[int] = set()
        for at in positions:
            if at < len(wanted) and wanted[at].mark == _OPEN:
                following.add(at)
            elif at < len(wanted) and _same(wanted[at], line):
                following.add(at + 1)
            elif at > furthest and not _after_open(at, wanted):
                furthest, where = at, number
        positions = _skip_open(following, wanted)
    if len(wanted) in positions:
        return
    if positions and max(positions) > furthest:
        furthest, where = max(positions), len(actual)
    raise TranscriptMismatch(_difference(where + 1, wanted[furthest:][:1], actual[where : where + 1]))


def _after_open(position: int, wanted: Sequence[Line]) -> bool:
    """Whether a message that does not match here can belong to a "..." before it."""
    return position > 0 and wanted[position - 1].mark == _OPEN


def _skip_open(positions: set[int], wanted: Sequence[Line]) -> set[int]:
    """Return these positions, and those after a "..." that matches no message."""
    found = set(positions)
    for at in sorted(positions):
        while at < len(wanted) and wanted[at].mark == _OPEN:
            at += 1
            found.add(at)
    return found


def _same(wanted: Line, line: Line) -> bool:
    return wanted.mark == line.mark and _matches(wanted.message, line.message)


def _matches(wanted: Json, actual: Json) -> bool:
    if wanted == _OPEN:
        return True
    if isinstance(wanted, dict) and isinstance(actual, dict):
        named = wanted.keys() - {_OPEN}
        exact = _OPEN in wanted or len(named) == len(actual)
        return exact and named <= actual.keys() and all(_matches(wanted[name], actual[name]) for name in named)
    if isinstance(wanted, list) and isinstance(actual, list):
        return len(wanted) == len(actual) and all(map(_matches, wanted, actual))
    return type(wanted) is type(actual) and bool(wanted == actual)  # True does not match 1


def _difference(number: int, wanted: Sequence[Line], actual: Sequence[Line]) -> str:
    """Return a diff for people, in which wildcards are filled in from the actual message."""
    pattern = _filled(wanted[0].message, actual[0].message) if wanted and actual else None
    before = _spread(wanted[0], pattern if actual else wanted[0].message) if wanted else ["(no more messages)"]
    after = _spread(actual[0], actual[0].message) if actual else ["(no more messages)"]
    diff = difflib.unified_diff(before, after, "expected", "actual", lineterm="", n=100)
    return "\n".join((f"message {number} differs from the expected transcript", *diff))


def _spread(line: Line, message: Json) -> list[str]:
    written = json.dumps(message, indent=2, sort_keys=True, ensure_ascii=False)
    return [f"{_SENDERS.get(line.mark, 'either side')} sends", *written.split("\n")]


def _filled(wanted: Json, actual: Json) -> Json:
    """Return `wanted` with its wildcards replaced by the actual values."""
    if wanted == _OPEN:
        return actual
    if isinstance(wanted, dict) and isinstance(actual, dict):
        more = {name: actual[name] for name in actual if name not in wanted} if _OPEN in wanted else {}
        named = {name: each for name, each in wanted.items() if name != _OPEN}
        return {name: _filled(each, actual.get(name, each)) for name, each in named.items()} | more
    if isinstance(wanted, list) and isinstance(actual, list) and len(wanted) == len(actual):
        return list(map(_filled, wanted, actual))
    return wanted


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
    return _PairBlock(server, options)


class _PairBlock(AbstractAsyncContextManager[MemoryPair]):
    """The block of `open_memory_pair`: runs the server in a nursery, and opens the client."""

    def __init__(self, server: Server, options: ClientOptions) -> None:
        self._server = server
        self._options = options
        self._failure: Exception | None = None  # of the server

    async def __aenter__(self) -> MemoryPair:
        check_trio()
        client_end, server_end = memory_stream_pair()
        transcript, served = Transcript(), trio.Event()
        options = _tapped(self._options, transcript)

        async def serve() -> None:
            try:
                # No timeout: a client that closes its end reads no more.
                await serve_stream(self._server, server_end, shutdown_timeout=0)
            except Exception as error:
                self._failure = error
                raise
            finally:
                served.set()

        async def wait() -> None:
            with trio.move_on_after(CLOSING):
                await served.wait()

        async with AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(open_nursery())
            nursery.start_soon(serve, name="the server of this pair")
            stack.push_async_callback(wait)
            client = await stack.enter_async_context(open_client(client_end, **options))
            self._stack = stack.pop_all()
        return MemoryPair(client, self._server, transcript, server_end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, traceback)
        except BaseException:
            if self._failure is not None:  # the reason why the client lost its server
                raise self._failure from None
            raise


def _tapped(options: ClientOptions, transcript: Transcript) -> ClientOptions:
    callers_tap = options.get("tap")

    def tap(direction: str, data: bytes) -> None:
        transcript.tap(direction, data)
        if callers_tap is not None:
            callers_tap(direction, data)

    tapped: ClientOptions = {**options, "tap": tap}
    return tapped


# A replayed server.


def open_replayed(
    transcript: Transcript | str, **options: Unpack[ClientOptions]
) -> AbstractAsyncContextManager[Client]:
    """Open a client of a server that sends the server's messages of a transcript:
    ``async with open_replayed(Transcript.read("talk.txt")) as client``.

    For tests of code that uses a client.  Raises `TranscriptMismatch` when the client sends a message that differs
    from the transcript, and at the end if it has not sent all of them.  The options and the other errors are those of
    `open_client`.
    """
    return _Replaying(transcript, options)


class _Replaying(AbstractAsyncContextManager[Client]):
    def __init__(self, transcript: Transcript | str, options: ClientOptions) -> None:
        self._peer = replayed(transcript)
        self._block = open_client(self._peer, **options)

    async def __aenter__(self) -> Client:
        try:
            return await self._block.__aenter__()
        except Exception as error:
            if self._peer.mismatch is not None:
                raise self._peer.mismatch from error
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            suppressed = await self._block.__aexit__(kind, error, traceback)
        finally:
            if self._peer.mismatch is not None:  # the reason why the client lost its server
                raise self._peer.mismatch
        if error is None:
            self._peer.finish()
        return suppressed


def replayed(transcript: Transcript | str) -> ReplayedServer:
    """Return a stream to a server that sends the server's messages of a transcript; for `connect_client` and others.

    Raises ValueError if the transcript contains ``...``.
    """
    return ReplayedServer(Transcript.parse(transcript) if isinstance(transcript, str) else transcript)


class ReplayedServer(trio.abc.Stream):
    """The client's end of a stream to a replayed server; see `replayed`.

    Each message of the server arrives as soon as the client has sent all messages before it.  If the client sends a
    different message, `send_all` raises `TranscriptMismatch`, which is also kept as `mismatch`, and the stream ends.
    """

    def __init__(self, transcript: Transcript) -> None:
        if any(line.mark == _OPEN for line in transcript):
            raise ValueError("a replayed transcript must contain every message; replace its ... by the messages")
        self.mismatch: TranscriptMismatch | None = None
        self._script = tuple(transcript)
        self._at = 0
        self._partial_line = b""
        self._output = b""
        self._closed = False
        self._changed = trio.Event()
        self._send_next()

    def finish(self) -> None:
        """Raise `TranscriptMismatch` unless the client has sent all its messages of the transcript."""
        if self.mismatch is None and self._at < len(self._script):
            self._set_mismatch(())
        if self.mismatch is not None:
            raise self.mismatch

    def _send_next(self) -> None:
        """Send the server's messages up to the client's next one."""
        while self._at < len(self._script) and self._script[self._at].mark == "<":
            self._output += self._script[self._at].text.encode("utf-8", "surrogateescape") + b"\n"
            self._at += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _receive(self, line: Line) -> None:
        if self._at == len(self._script) or not _same(self._script[self._at], line):
            self._set_mismatch((line,))
        else:
            self._at += 1
            self._send_next()

    def _set_mismatch(self, actual: Sequence[Line]) -> None:
        self.mismatch = TranscriptMismatch(_difference(self._at + 1, self._script[self._at :][:1], actual))
        self._wake()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError
        *lines, self._partial_line = (self._partial_line + bytes(data)).split(b"\n")
        for line in lines:
            if self.mismatch is None:
                self._receive(Line(">", line.decode("utf-8", "surrogateescape").strip()))
        if self.mismatch is not None:
            raise self.mismatch

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._output and self.mismatch is None and not self._closed:
            await self._changed.wait()
        if self._closed:
            raise trio.ClosedResourceError
        data = self._output[:max_bytes]
        self._output = self._output[len(data) :]
        return data

    async def aclose(self) -> None:
        self._closed = True
        self._wake()
        await trio.lowlevel.checkpoint()
