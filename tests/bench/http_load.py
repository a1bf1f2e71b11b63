"""The load on servers by HTTP: connections that are kept, with one request at a time on each, over plain sockets."""

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

__all__ = ["EITHER", "STREAM", "Caller", "Ears", "Refused", "answered", "calls", "exchange", "listening"]

CHUNK = 1 << 18
TAIL = 500  # of what was heard, to complain about
STREAM = "text/event-stream"
EITHER = f"application/json, {STREAM}"


class Refused(Exception):
    """A server has no stream for this client."""


class Caller:
    """One connection of a client that takes these types of content."""

    def __init__(self, port: int, era: str, accept: str = EITHER) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port, self._era, self._accept = port, era, accept
        self._fields = {"MCP-Protocol-Version": REVISIONS[era]}
        self.heard = bytearray()
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
        """The request that carries this message."""
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
        """This is what is to be called."""
        self.template = Template(self.post(message))

    def ask(self, request: bytes) -> bytes:
        """The whole response to a request."""
        self.socket.sendall(request)
        self.heard.clear()
        while not self.whole():
            data = self.socket.recv(CHUNK)
            assert data, bytes(self.heard[-TAIL:])
            self.heard += data
        return bytes(self.heard)

    def next(self) -> None:
        self.heard.clear()
        self.socket.sendall(self.template.take())

    def begin(self, message: Any, share: float = 1.0) -> None:
        """Send this, or its first part, and await nothing."""
        request = self.post(message)
        self.socket.sendall(request[: int(len(request) * share)])

    def whole(self) -> bool:
        """Whether a whole response was heard."""
        end = self.heard.find(b"\r\n\r\n")
        if end < 0:
            return False
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", self.heard[:end])
        if found is None:
            return self.heard.endswith(b"0\r\n\r\n") or self.heard.startswith((b"HTTP/1.1 202", b"HTTP/1.1 204"))
        return len(self.heard) >= end + 4 + int(found[1])

    def stream(self) -> None:
        """Open a stream of its own, and leave it open."""
        if self._era == "modern":
            params = {"notifications": {"toolsListChanged": True}, "_meta": MODERN}
            request = self.post({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params})
        else:
            request = self._head("GET", {"Accept": STREAM})
        self.socket.sendall(request)
        head = self.socket.recv(CHUNK)
        if not head.startswith(b"HTTP/1.1 200") or STREAM.encode() not in head.lower():
            raise Refused(head.decode())


class Ears:
    """Waits until all these listeners have got a notice.  It is not read before the end of the block."""

    def __init__(self, listeners: Sequence[Caller]) -> None:
        self._sockets = {each.socket.fileno(): each.socket for each in listeners}
        for each in self._sockets.values():
            each.setblocking(False)

    def __enter__(self) -> Ears:
        self._read()
        self._deaf = set(self._sockets)
        self._until = time.monotonic() + PATIENCE
        self._poll = select.epoll(len(self._sockets))
        for fd in self._sockets:
            self._poll.register(fd, select.EPOLLIN | select.EPOLLET)
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()

    def all_have_heard(self, seconds: float = 0.0) -> bool:
        """Look, or wait for so long until one more has.  May be True too early where a keep-alive has come; `count`
        says how many have got what they wait for."""
        self._deaf.difference_update(fd for fd, _ in self._poll.poll(seconds))
        assert not self._deaf or time.monotonic() < self._until, f"{len(self._deaf)} listeners have heard nothing"
        return not self._deaf

    def count(self, sign: bytes) -> int:
        """How many of them have got these bytes."""
        return sum(sign in each for each in self._read())

    def _read(self) -> list[bytes]:
        heard = []
        for each in self._sockets.values():
            with suppress(BlockingIOError):
                heard.append(each.recv(CHUNK))
        return heard


def exchange(callers: Sequence[Caller], number: int, sign: bytes) -> None:
    """So many calls, one at a time by each of these, as fast as they are answered; each answer has this sign."""
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
                caller.heard += data
                if not data or not caller.whole():
                    assert data, bytes(caller.heard[-TAIL:])
                    continue
                assert sign in caller.heard, bytes(caller.heard[-TAIL:])
                ended += 1
                if begun < number:
                    begun += 1
                    caller.next()


def calls(usage: Usage, callers: Sequence[Caller], number: int, sign: bytes) -> Spent:
    """What such an exchange takes."""
    with Stopwatch(usage) as watch:
        exchange(callers, number, sign)
    return watch.spent


@contextmanager
def listening(command: list[str]) -> Iterator[tuple[Usage, int]]:
    """The server of this command, and the port it listens on."""
    with running(command) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(rb"(\d+)(?:/mcp)?(?:, with \d+ workers)?\s*$", said)
        assert found is not None, said
        yield Usage(process), int(found[1])


def answered(caller: Caller, message: Any, *, streams: bool) -> bytes:
    """The response to this message, which is of the right kind."""
    caller.prepare(message)
    answer = caller.ask(caller.template.take())
    kind = STREAM if streams else "application/json"
    assert answer.startswith(b"HTTP/1.1 200"), answer[:TAIL]
    assert kind.encode() in answer.lower(), answer[:TAIL]
    return answer
