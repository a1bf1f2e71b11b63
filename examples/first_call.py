"""Start a server as a host does, and call it as a client of an older revision and of the newest one.

    python examples/first_call.py

It prints every line on the pipes.  `trio_mcp.Client` does all this; this file writes the messages by hand to show them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parent / "echo.py"
CLIENT_INFO = {"name": "visitor", "version": "1.0"}
CALL = {"name": "echo", "arguments": {"message": "Hello, Trio!"}}
MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": CLIENT_INFO,
    "io.modelcontextprotocol/clientCapabilities": {},
}
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT_INFO}


class ServerProcess:
    """A running server, with methods that write and read one line at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        line = json.dumps({"jsonrpc": "2.0", **message})
        print(f"  -> {line}")
        print(line, file=self.process.stdin, flush=True)

    def call(self, method: str, params: dict[str, Any]) -> Any:
        assert self.process.stdout is not None
        self.send(id=method, method=method, params=params)
        line = self.process.stdout.readline()
        print(f"  <- {line}", end="")
        return json.loads(line)["result"]

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        print(f"The client closes the pipe; the server ends with status {self.process.wait()}.\n")
        self.process.stdout.close()


def main() -> None:
    print("A client of 2025-11-25 shakes hands first:")
    server = ServerProcess()
    server.call("initialize", INITIALIZE)
    server.send(method="notifications/initialized")
    server.call("tools/call", CALL)
    server.end()

    print("A client of 2026-07-28 says who it is in every request:")
    server = ServerProcess()
    server.call("tools/call", {**CALL, "_meta": MODERN})
    server.end()


if __name__ == "__main__":
    main()
