"""Start a server as a host does, and let an old client and a new one call it.

    python examples/first_call.py

Every line that crosses the pipes is shown.  A client would do this for you; here it is done by hand, to be seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parent / "echo.py"
WHO = {"name": "visitor", "version": "1.0"}
CALL = {"name": "echo", "arguments": {"message": "Hello, Trio!"}}
MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": WHO,
    "io.modelcontextprotocol/clientCapabilities": {},
}
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": WHO}


class Pipes:
    """A running server, spoken to one line at a time."""

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
    pipes = Pipes()
    pipes.call("initialize", INITIALIZE)
    pipes.send(method="notifications/initialized")
    pipes.call("tools/call", CALL)
    pipes.end()

    print("A client of 2026-07-28 says who it is in every request:")
    pipes = Pipes()
    pipes.call("tools/call", {**CALL, "_meta": MODERN})
    pipes.end()


if __name__ == "__main__":
    main()
