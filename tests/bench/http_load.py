"""The load on HTTP servers: persistent connections over plain sockets, with one request at a time on each."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.bench.messages import INITIALIZE, MODERN, REVISIONS, Template, encoded
from tests.bench.stdio_load import PATIENCE, Spent, Stopwatch
from tests.bench.subjects import Usage, running

__all__ = ["EITHER", "STREAM", "Caller", "NoticeWait", "Refused", "answered", "calls", "exchange", "listening"]

CHUNK = 1 << 18
TAIL = 500  # bytes of a wrong reply to show in an error
STREAM = "text/event-stream"
EITHER = f"application/json, {STREAM}"


class Refused(Exception):
    """A server refuses to open a stream for this client."""


class Caller:
    """One connection of a client that accepts these content types."""

    def __init__(self, port: int, era: str, accept: str = EITHER) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port, self._era, self._accept = port, era, accept
        self._fields = {"MCP-Protocol-Version": REVISIONS[era]}
        self.received = bytearray()
        self.template: Template
        if era == "session":
            self._initialize()

    def _initialize(self) -> None:
        version = self._fields.pop("MCP-Protocol-Version")
        accept, self._accept = self._accept, EITHER
        head = self.ask(self.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE}))
        found = re.search(rb"(?i)\r\nmcp-session-id: *(\S+)", head)
        assert found is not None, head
        self._fields = {"MCP-Protocol-Version": version, "Mcp-Session-Id": found[1].decode()}
        self.ask(self.post({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        self._accept = accept

    def post(self, message: Any) -> bytes:
        """The HTTP request that carries this message."""
        body = encoded(message)
        fields = {"Accept": self._accept, "Content-Type": "application/json", "Content-Length": str(len(body))}
        if self._era == "modern":
            fields["Mcp-Method"] = message["method"]
            name = message["params"].get("name", message["params"].get("uri"))
            if name is not None:
                fields["Mcp-Name"] = name
        return self._head("POST", fields) + body

    def _head(self, method: str, fields: Mapping[str, str]) -> bytes:
        every = {"Host": f"127.0.0.1:{self._port}", **fields, **self._fields}
        lines = (f"{method} /mcp HTTP/1.1", *(f"{name}: {value}" for name, value in every.items()), "", "")
        return "\r\n".join(lines).encode()

    def prepare(self, message: Any) -> None:
        """Set the message that `next` sends."""
        self.template = Template(self.post(message))

    def ask(self, request: bytes) -> bytes:
        """Send a request, and return its complete response."""
        self.socket.sendall(request)
        self.received.clear()
        while not self.whole():
            data = self.socket.recv(CHUNK)
            assert data, bytes(self.received[-TAIL:])
            self.received += data
        return bytes(self.received)

    def next(self) -> None:
        self.received.clear()
        self.socket.sendall(self.template.take())

    def begin(self, message: Any, share: float = 1.0) -> None:
        """Send this message, or its first part, without waiting for a response."""
        request = self.post(message)
        self.socket.sendall(request[: int(len(request) * share)])

    def whole(self) -> bool:
        """Whether a complete response was received."""
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return False
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", self.received[:end])
        if found is None:
            return self.received.endswith(b"0\r\n\r\n") or self.received.startswith((b"HTTP/1.1 202", b"HTTP/1.1 204"))
        return len(self.received) >= end + 4 + int(found[1])

    def stream(self) -> None:
        """Open a stream for notifications, and leave it open."""
        if self._era == "modern":
            params = {"notifications": {"toolsListChanged": True}, "_meta": MODERN}
            request = self.post({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params})
        else:
            request = self._head("GET", {"Accept": STREAM})
        self.socket.sendall(request)
        head = self.socket.recv(CHUNK)
        if not head.startswith(b"HTTP/1.1 200") or STREAM.encode() not in head.lower():
            raise Refused(head.decode())


class NoticeWait:
    """Waits until all these listeners have received a notice.  `count` reads the notices."""

    def __init__(self, listeners: Sequence[Caller]) -> None:
        self._sockets = {each.socket.fileno(): each.socket for each in listeners}
        for each in self._sockets.values():
            each.setblocking(False)

    def __enter__(self) -> NoticeWait:
        self._read()
        self._waiting = set(self._sockets)
        self._until = time.monotonic() + PATIENCE
        self._poll = select.epoll(len(self._sockets))
        for fd in self._sockets:
            self._poll.register(fd, select.EPOLLIN | select.EPOLLET)
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()

    def all_received(self, seconds: float = 0.0) -> bool:
        """Check, or wait up to `seconds` until one more listener has received bytes.  A keep-alive counts as well, so
        the result may be True too early; `count` tells how many listeners have received the notice."""
        self._waiting.difference_update(fd for fd, _ in self._poll.poll(seconds))
        assert not self._waiting or time.monotonic() < self._until, (
            f"{len(self._waiting)} listeners have received no bytes"
        )
        return not self._waiting

    def count(self, sign: bytes) -> int:
        """How many listeners have received these bytes."""
        return sum(sign in each for each in self._read())

    def _read(self) -> list[bytes]:
        output = []
        for each in self._sockets.values():
            with suppress(BlockingIOError):
                output.append(each.recv(CHUNK))
        return output


def exchange(callers: Sequence[Caller], number: int, sign: bytes) -> None:
    """Make so many calls, one at a time on each connection, as fast as they are answered.  Each answer has the sign."""
    by_fd = {each.socket.fileno(): each for each in callers}
    begun, ended = min(len(by_fd), number), 0
    with select.epoll(len(by_fd)) as epoll:
        for caller in callers[:begun]:
            epoll.register(caller.socket, select.EPOLLIN)
            caller.next()
        while ended < begun:
            ready = epoll.poll(PATIENCE)
            assert ready, "the server is silent"
            for fd, _ in ready:
                caller = by_fd[fd]
                data = caller.socket.recv(CHUNK)
                caller.received += data
                if not data or not caller.whole():
                    assert data, bytes(caller.received[-TAIL:])
                    continue
                assert sign in caller.received, bytes(caller.received[-TAIL:])
                ended += 1
                if begun < number:
                    begun += 1
                    caller.next()


def calls(usage: Usage, callers: Sequence[Caller], number: int, sign: bytes) -> Spent:
    """Measure an exchange."""
    with Stopwatch(usage) as watch:
        exchange(callers, number, sign)
    return watch.spent


@contextmanager
def listening(command: list[str]) -> Iterator[tuple[Usage, int]]:
    """Start the server of this command; yields its usage and its port."""
    with running(command) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(rb"(\d+)(?:/mcp)?(?:, with \d+ workers)?\s*$", line)
        assert found is not None, line
        yield Usage(process), int(found[1])


def answered(caller: Caller, message: Any, *, streams: bool) -> bytes:
    """The response to this message, after a check of its status and its kind."""
    caller.prepare(message)
    answer = caller.ask(caller.template.take())
    kind = STREAM if streams else "application/json"
    assert answer.startswith(b"HTTP/1.1 200"), answer[:TAIL]
    assert kind.encode() in answer.lower(), answer[:TAIL]
    return answer
