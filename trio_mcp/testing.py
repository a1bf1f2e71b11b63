"""For tests: a client and a server in one process, what they said to each other, and a server that is only played.

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

Real bytes go from one side to the other, no socket is opened, nothing sleeps and nothing is patched: under Trio's
`MockClock` a day passes at once.  Two runs say the same; in the same order as well within `seeded`, also where several
tasks work side by side.

A transcript is text, one line for each message, in the order in which the client sent and received them:

| A line | means |
|---|---|
| ``> {...}`` | the client says this |
| ``< {...}`` | the server does |
| ``...`` | any number of messages, in what is expected |
| ``# ...``, nothing | a remark |

What varies is left open by ``"..."``: as a value it stands for anything, and as the name of a member for any further
members.  Everything else has to be the same, ids as well; only the order of the members of an object means nothing.

A transcript has everything that was said, so what was secret there is secret here.
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
from trio_mcp.core.jsonrpc import Json
from trio_mcp.server.driver import serve_stream
from trio_mcp.server.threads import no_threads
from trio_mcp.transport.nursery import check_trio, open_nursery
from trio_mcp.transport.outbox import CLOSING

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

# Trio has no public way to decide the order of tasks.  These two names are there for its plugins of pytest and
# Hypothesis; they are looked up here once, so that a Trio without them is told by name and not by runs that differ.
_trio_run: Any = getattr(getattr(trio, "_core", None), "_run", None)
_SCHEDULER = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")
_missing = [name for name in _SCHEDULER if not hasattr(_trio_run, name)]

_OPEN = "..."
_WHO = {">": "the client", "<": "the server"}
_MARKS: dict[str, Literal[">", "<"]] = {"out": ">", "in": "<"}


class TranscriptMismatch(AssertionError):
    """Something else was said than the transcript has; the message shows what."""


# The order of tasks.


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block `seed` decides in which order Trio runs tasks that could run at the same time.

    Each seed is one order, and the same in each run:

        for seed in range(1000):
            with seeded(seed):
                trio.run(scenario, seed, clock=trio.testing.MockClock(autojump_threshold=0))

    It may also be entered inside a run.  Handlers that are `def` run in the event loop meanwhile, because threads have
    an order of their own.  What else differs from run to run is left to the test: other threads, sockets, random ids,
    and sets of text, whose order PYTHONHASHSEED decides.

    Raises RuntimeError if this version of Trio cannot do it.
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


# What was said.


@attrs.frozen
class Line:
    """One message: who says it, and its text as it was on the wire.  Of "..." there is no text."""

    mark: Literal[">", "<", "..."]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.mark} {self.text}".rstrip()

    @property
    def message(self) -> Json:
        """The message; its text where that is no JSON, for junk can be said, too."""
        try:
            return json.loads(self.text)
        except ValueError:
            return self.text


class Transcript(Sequence[Line]):
    """What a client and its server said to each other.

    To record, give `tap` to a client on any stream, and keep what it heard; `str` of a transcript is its text:

        transcript = Transcript()
        async with open_client(["python", "server.py"], tap=transcript.tap) as client:
            ...
        transcript.write("talk.txt")

    It grows for as long as the test which asked for it, and keeps all of it.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._lines = list(lines)
        self._rest = {">": b"", "<": b""}

    @classmethod
    def parse(cls, text: str) -> Transcript:
        """The transcript that is written here.  Raises ValueError for a line that is none of one."""
        return cls(_lines(text))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Transcript:
        """From a file.  Raises as `parse`, and OSError."""
        return cls.parse(Path(path).read_bytes().decode("utf-8", "surrogateescape"))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Into a file, from which `read` reads the same."""
        Path(path).write_bytes(str(self).encode("utf-8", "surrogateescape"))

    def tap(self, direction: str, data: bytes) -> None:
        """For the option `tap` of a client whose stream has one message a line."""
        mark = _MARKS[direction]
        *lines, self._rest[mark] = (self._rest[mark] + data).split(b"\n")
        for line in lines:  # what is no UTF-8 is kept as well: surrogates stand for its bytes
            self._lines.append(Line(mark, line.decode("utf-8", "surrogateescape").strip()))

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index]

    def __len__(self) -> int:
        return len(self._lines)

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


def _lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), 1):  # no other end of a line ends a message
        said = line.strip()
        if said == _OPEN:
            yield Line("...")
        elif said.startswith((">", "<")):
            yield Line(">" if said[0] == ">" else "<", said[1:].strip())
        elif said and not said.startswith("#"):
            raise ValueError(f"line {number} of a transcript begins with >, < or #, or is ...; not {said[:40]!r}")


# What was expected.


def assert_transcript(said: Transcript, expected: Transcript | str) -> None:
    """Raise `TranscriptMismatch` unless exactly this was said, but for what is left open.

    It shows the first message that was not expected, and how it differs: of the ways in which "..." may be understood,
    in the one by which most of what was expected was said.
    """
    wanted = tuple(Transcript.parse(expected) if isinstance(expected, str) else expected)
    # All places of `wanted` at which one may stand, as "..." may stand for more messages or fewer.
    places = _onward({0}, wanted)
    furthest, where = -1, 0  # the place that was left without a fitting message, and the number of what came instead
    for number, line in enumerate(said):
        following: set[int] = set()
        for at in places:
            if at < len(wanted) and wanted[at].mark == _OPEN:
                following.add(at)
            elif at < len(wanted) and _same(wanted[at], line):
                following.add(at + 1)
            elif at > furthest and not _after_open(at, wanted):
                furthest, where = at, number
        places = _onward(following, wanted)
    if len(wanted) in places:
        return
    if places and max(places) > furthest:
        furthest, where = max(places), len(said)
    raise TranscriptMismatch(_difference(where + 1, wanted[furthest:][:1], said[where : where + 1]))


def _after_open(place: int, wanted: Sequence[Line]) -> bool:
    """Whether what does not fit here can be one of any number of messages."""
    return place > 0 and wanted[place - 1].mark == _OPEN


def _onward(places: set[int], wanted: Sequence[Line]) -> set[int]:
    """These places, and those after a "..." that stands for nothing."""
    found = set(places)
    for at in sorted(places):
        while at < len(wanted) and wanted[at].mark == _OPEN:
            at += 1
            found.add(at)
    return found


def _same(wanted: Line, line: Line) -> bool:
    return wanted.mark == line.mark and _fits(wanted.message, line.message)


def _fits(wanted: Json, said: Json) -> bool:
    if wanted == _OPEN:
        return True
    if isinstance(wanted, dict) and isinstance(said, dict):
        named = wanted.keys() - {_OPEN}
        exact = _OPEN in wanted or len(named) == len(said)
        return exact and named <= said.keys() and all(_fits(wanted[name], said[name]) for name in named)
    if isinstance(wanted, list) and isinstance(said, list):
        return len(wanted) == len(said) and all(map(_fits, wanted, said))
    return type(wanted) is type(said) and bool(wanted == said)  # True is no 1


def _difference(number: int, wanted: Sequence[Line], said: Sequence[Line]) -> str:
    """For people: a diff, with what was left open shown as it was said."""
    pattern = _filled(wanted[0].message, said[0].message) if wanted and said else None
    before = _spread(wanted[0], pattern if said else wanted[0].message) if wanted else ["(nothing more)"]
    after = _spread(said[0], said[0].message) if said else ["(nothing more)"]
    diff = difflib.unified_diff(before, after, "expected", "said", lineterm="", n=100)
    return "\n".join((f"message {number} is not what was expected", *diff))


def _spread(line: Line, message: Json) -> list[str]:
    written = json.dumps(message, indent=2, sort_keys=True, ensure_ascii=False)
    return [f"{_WHO.get(line.mark, 'somebody')} says", *written.split("\n")]


def _filled(wanted: Json, said: Json) -> Json:
    """What was wanted, with what was left open filled in."""
    if wanted == _OPEN:
        return said
    if isinstance(wanted, dict) and isinstance(said, dict):
        more = {name: said[name] for name in said if name not in wanted} if _OPEN in wanted else {}
        named = {name: each for name, each in wanted.items() if name != _OPEN}
        return {name: _filled(each, said.get(name, each)) for name, each in named.items()} | more
    if isinstance(wanted, list) and isinstance(said, list) and len(wanted) == len(said):
        return list(map(_filled, wanted, said))
    return wanted


# A client and a server.


@attrs.frozen(eq=False, repr=False)
class MemoryPair:
    """A client and the server that it speaks with."""

    client: Client
    server: Server
    transcript: Transcript
    """What they have said so far."""
    _theirs: trio.abc.Stream

    async def drop(self) -> None:
        """The link is lost: whatever waits on either side ends at once."""
        await self._theirs.aclose()


def open_memory_pair(server: Server, **options: Unpack[ClientOptions]) -> AbstractAsyncContextManager[MemoryPair]:
    """``async with open_memory_pair(server, revision="2025-11-25") as pair``: a client of this server.

    The options are those of `open_client`, and it raises as that does.  What the server's own program raises, such as
    its lifespan, leaves the block as it is; what the block raises does, too.
    """
    return _PairBlock(server, options)


class _PairBlock(AbstractAsyncContextManager[MemoryPair]):
    """A class, as `groups.open_nursery` is one."""

    def __init__(self, server: Server, options: ClientOptions) -> None:
        self._server = server
        self._options = options
        self._failure: Exception | None = None  # of the server

    async def __aenter__(self) -> MemoryPair:
        check_trio()
        ours, theirs = memory_stream_pair()
        transcript, served = Transcript(), trio.Event()
        options = _tapped(self._options, transcript)

        async def serve() -> None:
            try:
                await serve_stream(
                    self._server, theirs, shutdown_timeout=0
                )  # a client that closes its end reads nothing more
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
            client = await stack.enter_async_context(open_client(ours, **options))
            self._stack = stack.pop_all()
        return MemoryPair(client, self._server, transcript, theirs)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, traceback)
        except BaseException:
            if self._failure is not None:  # it is why the client lost its server, and says more
                raise self._failure from None
            raise


def _tapped(options: ClientOptions, transcript: Transcript) -> ClientOptions:
    theirs = options.get("tap")

    def tap(direction: str, data: bytes) -> None:
        transcript.tap(direction, data)
        if theirs is not None:
            theirs(direction, data)

    tapped: ClientOptions = {**options, "tap": tap}
    return tapped


# A server that is played.


def open_replayed(
    transcript: Transcript | str, **options: Unpack[ClientOptions]
) -> AbstractAsyncContextManager[Client]:
    """``async with open_replayed(transcript) as client``: a client of a server that says what it said then.

    For tests of what uses a client: ``open_replayed(Transcript.read("talk.txt"))``.  Raises `TranscriptMismatch`, as
    soon as the client says something else than it did then, and at the end for what it has not said; otherwise as
    `open_client`, whose options these are.
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
            left = await self._block.__aexit__(kind, error, traceback)
        finally:
            if self._peer.mismatch is not None:  # why the client has lost its server, and whatever came of that
                raise self._peer.mismatch
        if error is None:
            self._peer.finish()
        return left


def replayed(transcript: Transcript | str) -> ReplayedServer:
    """A stream at whose other end somebody plays the server's part of a transcript; for `connect_client` and the like.

    Raises ValueError for a transcript that leaves open how much is said.
    """
    return ReplayedServer(Transcript.parse(transcript) if isinstance(transcript, str) else transcript)


class ReplayedServer(trio.abc.Stream):
    """The client's end; see `replayed`.

    Each message of the server comes as soon as the client has said everything that stands before it.  When the client
    says something else, `send_all` raises `TranscriptMismatch`, which is also kept as `mismatch`, and the stream ends.
    """

    def __init__(self, transcript: Transcript) -> None:
        if any(line.mark == _OPEN for line in transcript):
            raise ValueError("what is replayed has to say every message; ... stands for any number of them")
        self.mismatch: TranscriptMismatch | None = None
        self._script = tuple(transcript)
        self._at = 0
        self._heard = b""
        self._said = b""
        self._closed = False
        self._news = trio.Event()
        self._go_on()

    def finish(self) -> None:
        """Raise `TranscriptMismatch` unless the client has said all that the transcript has."""
        if self.mismatch is None and self._at < len(self._script):
            self._refuse(())
        if self.mismatch is not None:
            raise self.mismatch

    def _go_on(self) -> None:
        """Say what is the server's to say now."""
        while self._at < len(self._script) and self._script[self._at].mark == "<":
            self._said += self._script[self._at].text.encode("utf-8", "surrogateescape") + b"\n"
            self._at += 1
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _hear(self, line: Line) -> None:
        if self._at == len(self._script) or not _same(self._script[self._at], line):
            self._refuse((line,))
        else:
            self._at += 1
            self._go_on()

    def _refuse(self, said: Sequence[Line]) -> None:
        self.mismatch = TranscriptMismatch(_difference(self._at + 1, self._script[self._at :][:1], said))
        self._wake()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError
        *lines, self._heard = (self._heard + bytes(data)).split(b"\n")
        for line in lines:
            if self.mismatch is None:
                self._hear(Line(">", line.decode("utf-8", "surrogateescape").strip()))
        if self.mismatch is not None:
            raise self.mismatch

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._said and self.mismatch is None and not self._closed:
            await self._news.wait()
        if self._closed:
            raise trio.ClosedResourceError
        some = self._said[:max_bytes]
        self._said = self._said[len(some) :]
        return some

    async def aclose(self) -> None:
        self._closed = True
        self._wake()
        await trio.lowlevel.checkpoint()
