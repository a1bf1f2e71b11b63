"""Recordings: the file that `tap` writes, and that `show` and `replay` read.

The file has one JSON object in each line.  The first line describes the exchange; each other line is an entry:

| Member | Meaning |
|---|---|
| `at` | seconds since the start, by a clock that never goes back |
| `from` | "client" or "server" |
| `frame` | a message, as it was on the wire |
| `text` | a line, a body or an event that is not JSON; bytes that are not UTF-8 are lone surrogates |
| `stderr` | a line of the server's standard error |
| `http` | the HTTP request or reply of the entry; a reply has the `number` of its request |
| `cut` | the number of bytes of a frame too long to be kept; `text` has its beginning |
| `lost` | the number of bytes that were not recorded, because the disk was too slow |
| `end` | how this side has ended the exchange, or one HTTP request |

The wire never waits for the file.  The recorder queues what it gets, and a thread passes it to a process of low
priority, which divides it into frames, checks that they are JSON, and writes them.  A process, because a thread would
keep the threads of the wire from the interpreter meanwhile.  The queue and the file are bounded: bytes beyond the queue
are counted as `lost`, and a full file ends the recording, not the exchange.  If the process of the wire is killed, that
of the recorder writes what it has got.

A recording contains every message, so it contains the secrets of the messages.  Only its owner may read the file.
"""

from __future__ import annotations

import json
import marshal
import os
import queue
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn

from trio_mcp.core.errors import UsageError

__all__ = [
    "FORMAT", "Heard", "RecordedEntry", "Recorder", "Recording", "RecordingFile", "open_recorder", "read_recording",
    "summary_of",
]  # fmt: skip

FORMAT = 1
_QUEUED = 64 * 2**20  # bytes that wait for the disk: some seconds of the fastest exchange
_LONGEST = 64 * 2**20  # bytes of one frame; the longest that servers of this package accept is shorter
_KEPT = 64 * 1024  # bytes that are kept of a longer frame
_CLOSING = 5.0  # seconds for the rest of the queue
_POLL = 0.002  # seconds
# Seconds for which pieces are collected.  A thread that wakes for each of them would take the interpreter from the
# threads of the wire.
_BATCH = 0.005
_PIECES = 100  # at most; of stdio each has 64 KiB or less
_NICE = 10


class Heard(NamedTuple):
    """Bytes of one side.  `stream` names the stream of lines that they belong to; "": they are one frame."""

    at: float
    sender: str
    data: bytes | None
    stream: str
    more: Mapping[str, Any]


class Recorder:
    """Records an exchange.  `lines` and `entry` return at once, and may be called in any thread.

    `source` describes the exchange.  `most` bounds the file in bytes.  Raises OSError if the file cannot be made.
    """

    def __init__(self, path: str, source: Mapping[str, Any], most: int) -> None:
        file = RecordingFile(path, source, most)
        self._began = time.monotonic()
        reading, self._pipe = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._pipe)
            _write_in_this_process(reading, file)
        os.close(reading)
        file.forget()
        self._queue: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        self._lost: dict[tuple[str, str], int] = {}
        self._thread = threading.Thread(target=self._pass_on, name="trio-mcp: the recording", daemon=True)
        self._thread.start()

    def lines(self, sender: str, data: bytes, stream: str = "frame") -> None:
        """Record bytes of a stream with one frame in each line."""
        self._put(sender, data, stream, {})

    def entry(self, sender: str, data: bytes | None = None, **more: Any) -> None:
        """Record one frame, or an entry without a frame, with further members."""
        self._put(sender, data, "", more)

    def close(self) -> None:
        """Wait until the rest is written; at most `_CLOSING` seconds."""
        self._queue.put(None)
        deadline = time.monotonic() + _CLOSING
        self._thread.join(_CLOSING)
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _put(self, sender: str, data: bytes | None, stream: str, more: Mapping[str, Any]) -> None:
        at, size, key = time.monotonic() - self._began, len(data or b""), (sender, stream)
        with self._lock:
            if self._queued + size > _QUEUED:
                self._lost[key] = self._lost.get(key, 0) + size
                return
            self._queued += size
            lost = self._lost.pop(key, 0) if self._lost else 0
        if lost:
            self._queue.put(Heard(at, sender, None, stream, {"lost": lost}))
        self._queue.put(Heard(at, sender, data, stream, more))

    def _collected(self) -> list[Heard | None]:
        """Wait for a piece, and return it with those that come within a moment; None is the last one."""
        pieces = [self._queue.get()]
        if self._queue.empty():
            time.sleep(_BATCH)
        while pieces[-1] is not None and len(pieces) < _PIECES and not self._queue.empty():
            pieces.append(self._queue.get())
        return pieces

    def _pass_on(self) -> None:
        """The thread: wait for the other process instead of the wire."""
        try:
            pieces: list[Heard | None] = []
            while not pieces or pieces[-1] is not None:
                pieces = self._collected()
                taken: list[Any] = [each for each in pieces if each is not None]
                rest = memoryview(b"".join([marshal.dumps(tuple(each)) for each in taken]))
                while rest:
                    rest = rest[os.write(self._pipe, rest) :]
                with self._lock:
                    self._queued -= sum(len(each.data or b"") for each in taken)
        except OSError:  # the process has ended, and has said why
            while self._queue.get() is not None:  # so that the queue stays short
                pass
        finally:
            os.close(self._pipe)


def open_recorder(path: str, source: Mapping[str, Any], most: int) -> Recorder:
    """Start a recording.  Raises `UsageError` if the file cannot be made."""
    try:
        return Recorder(path, source, most)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def summary_of(path: str) -> str:
    """Return the file, its frames and its bytes, as JSON on one line."""
    frames = size = 0
    with suppress(FileNotFoundError), open(path, "rb") as file:  # it may have been removed
        for line in file:
            frames += b', "frame": ' in line  # within strings, quotes are escaped
            size += len(line)
    return json.dumps({"file": path, "frames": frames, "bytes": size})


def _write_in_this_process(pipe: int, file: RecordingFile) -> NoReturn:
    """Write all that comes through the pipe; the process ends with the pipe."""
    try:
        os.setsid()  # Ctrl-C at the terminal ends the exchange, and this process records the end
        os.nice(_NICE)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)  # a host waits for the end of these
        os.dup2(null, 1)
        with open(pipe, "rb") as heard:
            while True:
                file.record(Heard(*marshal.load(heard)))
                if not select.select([heard], [], [], 0)[0]:
                    file.flush()
    except (EOFError, ValueError):  # the end of the pipe, perhaps within a piece
        file.close()
    except OSError as error:
        _say(f"{file.path}: {error.strerror}; the recording has ended, the exchange goes on")
    finally:
        os._exit(0)


def _say(words: str) -> None:
    with suppress(OSError):
        os.write(2, f"trio-mcp: {words}\n".encode())


class RecordingFile:
    """The file of a recording: divides streams into frames, and writes them.  Raises OSError."""

    def __init__(self, path: str, source: Mapping[str, Any], most: int) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
        self.path = path
        self._most = most
        self._size = 0
        self._full = False
        self._last = 0.0
        self._streams: dict[tuple[str, str], _LineBuffer] = {}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._append({"trio-mcp tap": FORMAT, "began": now, **source}, None)
            self.flush()
        except OSError:
            with suppress(OSError):  # it tries to write again
                self._file.close()
            raise

    def record(self, heard: Heard) -> None:
        self._last = heard.at
        if not heard.stream:
            self._frame(heard, heard.data)
            return
        buffer = self._streams.setdefault((heard.sender, heard.stream), _LineBuffer())
        if heard.data is None:
            buffer.broken()
            self._frame(heard, None)
            return
        for line, size in buffer.feed(heard.data):
            self._frame(heard if size <= _LONGEST else heard._replace(more={"cut": size}), line)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Write lines that have no end, and close the file."""
        for (sender, stream), buffer in self._streams.items():
            if rest := buffer.rest():
                self._frame(Heard(self._last, sender, rest, stream, {}), rest)
        self._file.close()

    def forget(self) -> None:
        """Close the file, which another process writes."""
        self._file.close()

    def _frame(self, heard: Heard, data: bytes | None) -> None:
        entry: dict[str, Any] = {"at": round(heard.at, 6), "from": heard.sender, **heard.more}
        frame = None
        if data is not None and heard.stream != "stderr" and "cut" not in entry and _is_json(data):
            # Outside of strings a line break is white space, and JSON has none inside.
            frame = data.replace(b"\r", b" ").replace(b"\n", b" ").strip()
        elif data is not None:
            entry["stderr" if heard.stream == "stderr" else "text"] = data.decode("utf-8", "surrogateescape")
        self._append(entry, frame)

    def _append(self, entry: Mapping[str, Any], frame: bytes | None) -> None:
        if self._full:
            return
        line = json.dumps(entry).encode()
        if frame is not None:
            line = b'%b, "frame": %b}' % (line[:-1], frame)
        if self._size + len(line) > self._most:
            self._full = True
            _say(f"the recording is full: {self.path} has {self._size} bytes (--limit); the exchange goes on")
            line = json.dumps({"at": round(self._last, 6), "from": "client", "end": "the recording is full"}).encode()
        self._file.write(line + b"\n")
        self._size += len(line) + 1


class _LineBuffer:
    """The incomplete line of one stream."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._size = 0  # of the line, with the bytes that are not kept
        self._skipping = False  # the beginning of the line was lost

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the complete lines that are not empty, each with its size."""
        for piece in data.splitlines(keepends=True) if b"\r" not in data else _split(data):
            self._size += len(piece)
            if self._size <= _LONGEST:
                self._line += piece
            elif len(self._line) > _KEPT:
                del self._line[_KEPT:]
            if piece.endswith(b"\n"):
                line, size, skipped = bytes(self._line).rstrip(b"\r\n"), self._size, self._skipping
                self.broken()
                self._skipping = False
                if line and not skipped:
                    yield line, size

    def broken(self) -> None:
        """Forget the incomplete line, and ignore its end."""
        self._line.clear()
        self._size, self._skipping = 0, True

    def rest(self) -> bytes:
        return b"" if self._skipping else bytes(self._line)


def _split(data: bytes) -> list[bytes]:
    """Divide data after each LF; `splitlines` would also divide it after a CR alone."""
    *lines, rest = data.split(b"\n")
    return [line + b"\n" for line in lines] + ([rest] if rest else [])


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Reading.


class RecordedEntry(NamedTuple):
    """One line of a recording; `has` has the members that the table at the head of this file lists."""

    at: float
    sender: str
    has: Mapping[str, Any]


class Recording(NamedTuple):
    """A whole recording."""

    about: Mapping[str, Any]
    entries: Sequence[RecordedEntry]


def read_recording(path: str) -> Recording:
    """Read a file of `tap`, or a transcript of `trio_mcp.testing`, which has no times.

    The last line may be incomplete, because `tap` may have been killed or may still be at work.  Raises `UsageError`.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            lines = file.read().split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if lines[0].startswith((">", "<", "#")):
        return _transcript(path)
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line else None
        except ValueError as error:
            if number == len(lines) > 1:
                break
            raise UsageError(f"{path} is no recording: line {number} is not JSON ({error})") from None
        if value is not None:
            values.append(value)
    if not values or not isinstance(values[0], dict) or values[0].get("trio-mcp tap") != FORMAT:
        raise UsageError(f"{path} is no recording; make one with: trio-mcp tap -o {path} -- COMMAND")
    entries = []
    for number, value in enumerate(values[1:], 2):
        match value:
            case {"at": int() | float() as at, "from": "client" | "server" as sender}:
                entries.append(RecordedEntry(float(at), sender, value))
            case _:
                raise UsageError(f"{path}: entry {number} must have the members 'at' and 'from'")
    entries.sort(key=lambda entry: entry.at)  # several threads have recorded them
    return Recording(values[0], entries)


def _transcript(path: str) -> Recording:
    from trio_mcp.testing import Transcript

    try:
        lines = Transcript.read(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    senders = {">": "client", "<": "server"}
    entries = []
    for line in lines:
        message = line.message
        has = {"text": message} if isinstance(message, str) else {"frame": message}
        entries.append(RecordedEntry(0.0, senders[line.mark], has))
    return Recording({"trio-mcp tap": FORMAT, "kind": "transcript"}, entries)
