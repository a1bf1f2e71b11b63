"""The server for the clients of the bench, which answers as fast as it can: ``scripted.py json stdio|http``.

It knows no protocol, and uses neither an event loop nor a library: json parses lines and bodies, a search finds the
length of a body, and messages that arrive together are answered together.  Over HTTP it prints its port.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
from typing import Any

from tests.bench.messages import TEXT

CHUNK = 1 << 16
INITIALIZED = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "bench", "version": "1"},
}
# The members of a modern result that must not be cached.
UNKEPT = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
RESULTS: dict[str, Any] = {
    "tools/call": {"content": [{"type": "text", "text": TEXT}], "resultType": "complete"},
    "initialize": INITIALIZED,
    "server/discover": {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **UNKEPT},
    "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}], **UNKEPT},
}


def answer(data: bytes) -> bytes:
    """The response to this message; empty for a notification."""
    message = json.loads(data)
    result = RESULTS.get(message["method"])
    if result is None:
        return b""
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}, separators=(",", ":")).encode()


def by_stdio() -> None:
    rest = b""
    while data := os.read(0, CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        output = memoryview(b"".join(reply + b"\n" for reply in map(answer, lines) if reply))
        while output:
            output = output[os.write(1, output) :]


class Connection:
    """A connection of a client, which may send several requests at once."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.received = b""

    def serve(self) -> bool:
        """Answer the requests that have arrived; False when the client has closed the connection."""
        try:
            data = self.stream.recv(CHUNK)
            self.received += data
            while (reply := self.reply()) is not None:
                self.stream.sendall(reply)
        except ConnectionError:
            return False
        return bool(data)

    def reply(self) -> bytes | None:
        """The response to the first request, or None if the request is not complete."""
        head, end, rest = self.received.partition(b"\r\n\r\n")
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        length = int(found[1]) if found else 0
        if not end or len(rest) < length:
            return None
        body, self.received = rest[:length], rest[length:]
        if not head.startswith(b"POST"):  # this server has no streams for sessions, and sessions need no end
            return b"HTTP/1.1 405 Method Not Allowed\r\nAllow: POST\r\nContent-Length: 0\r\n\r\n"
        output = answer(body)
        if not output:
            return b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
        fields = b"" if b"mcp-method" in head.lower() else b"Mcp-Session-Id: bench\r\n"
        start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
        return start % (fields, len(output)) + output


def by_http() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener, select.epoll() as epoll:
        print(listener.getsockname()[1], flush=True)
        epoll.register(listener, select.EPOLLIN)
        connections: dict[int, Connection] = {}
        while True:
            for fd, _ in epoll.poll():
                if fd == listener.fileno():
                    stream, _ = listener.accept()
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections[stream.fileno()] = Connection(stream)
                    epoll.register(stream, select.EPOLLIN)
                elif not connections[fd].serve():
                    connections.pop(fd).stream.close()


if __name__ == "__main__":
    {"stdio": by_stdio, "http": by_http}[sys.argv[2]]()
