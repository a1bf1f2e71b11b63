"""The data of user A that user B sees if both use one relay: ``python -m tests.attacks.relay``.

The server behind the relay is a process of revision 2025-11-25 that ignores `notifications/cancelled`, as it may.
A's call of `transfer` is cancelled while the server works on it.  Then B makes a call, and the server continues A's
call: it asks for a confirmation and for the roots, and logs a line.  In 2025-11-25, these messages do not say to which
call they belong.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import attrs
import trio

from tests.client.matrix import serve_over
from tests.http.served import bearer, by_token
from trio_mcp import open_client
from trio_mcp.relay import open_relay

__all__ = ["CASES", "COMMAND", "Case", "Findings", "attack", "cancelled_transfer"]

PROGRAM = """
import json, sys

transfers, waits, asked = {}, [], {}

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def say(id, value):
    send(id=id, result={"content": [{"type": "text", "text": json.dumps(value)}]})

def go_on(id, owner):
    send(method="notifications/message", params={"level": "info", "data": "the PIN of " + owner + " is 1234"})
    form = {"type": "object", "properties": {"confirm": {"type": "boolean"}}}
    question = {"message": "transfer for " + owner + "?", "requestedSchema": form}
    send(id="roots", method="roots/list")
    send(id="confirm", method="elicitation/create", params=question)

for line in sys.stdin:
    message = json.loads(line)
    method, id, params = message.get("method"), message.get("id"), message.get("params", {})
    if method == "initialize":
        said = {"capabilities": {"tools": {}, "logging": {}}, "serverInfo": {"name": "bank", "version": "1"}}
        send(id=id, result={"protocolVersion": "2025-11-25", **said})
    elif method == "tools/call" and params["name"] == "transfer":
        transfers[id] = params["arguments"]["owner"]
        print("begun", file=sys.stderr, flush=True)
    elif method == "tools/call" and transfers:
        waits.append(id)
        go_on(*list(transfers.items())[0])
    elif method == "tools/call":
        say(id, {})
    elif method == "notifications/cancelled":
        print("cancelled", file=sys.stderr, flush=True)
    elif method:
        send(id=id, result={})
    elif id in ("roots", "confirm"):
        asked[id] = message.get("result") or message["error"]["message"]
        if len(asked) == 2:
            say(list(transfers)[0], asked)
            say(waits.pop(), asked)
            asked, transfers = {}, {}
"""
COMMAND = [sys.executable, "-E", "-S", "-c", PROGRAM]


@attrs.frozen
class Case:
    """The connection of the two users to the relay."""

    transport: str
    revision: str
    principals: bool

    def __str__(self) -> str:
        return f"{self.transport} {self.revision} {'principals' if self.principals else 'anonymous'}"


CASES = [
    Case("http", "2025-11-25", principals=True),
    Case("http", "2026-07-28", principals=True),
    Case("websocket", "2025-11-25", principals=True),
    Case("websocket", "2026-07-28", principals=True),
    Case("http", "2025-11-25", principals=False),
    Case("http", "2026-07-28", principals=False),
    Case("websocket", "2025-11-25", principals=False),
    Case("http+sse", "2024-11-05", principals=False),
    Case("memory", "2025-11-25", principals=False),
]


@attrs.define
class Findings:
    """The messages that B received, and the answers of B that the server took as answers of A."""

    asked: list[str] = attrs.field(factory=list)
    logged: list[str] = attrs.field(factory=list)
    roots: int = 0
    """The number of times that B was asked for its roots."""
    answer: dict[str, Any] = attrs.field(factory=dict)
    """The answers that the server received for A's transfer.  Empty if it received no answer."""

    def __str__(self) -> str:
        shown, taken = self.asked, isinstance(self.answer.get("confirm"), dict)
        return (
            f"A's question shown: {'yes' if shown else 'no':<4} B's answer counts for A: {'yes' if taken else 'no':<4}"
            f" A's log lines: {len(self.logged)}  asked for roots: {self.roots}"
        )


class _Stderr:
    """The text that the server process wrote to stderr."""

    def __init__(self) -> None:
        self._text = ""
        self._came = trio.lowlevel.ParkingLot()

    def __call__(self, data: bytes) -> None:
        self._text += data.decode()
        self._came.unpark_all()

    async def wait_for(self, word: str) -> None:
        while word not in self._text:
            await self._came.park()


@contextlib.asynccontextmanager
async def cancelled_transfer(case: Case, target: Any = COMMAND) -> AsyncIterator[Any]:
    """Cancel A's transfer, on which the server still works.  Yields the function that opens B's client."""
    stderr = _Stderr()
    http = {"authenticate": by_token} if case.principals else {}

    def client(name: str, **options: Any) -> Any:
        headers = {"headers": bearer(name)} if case.principals else {}
        return open_client(url, revision=case.revision, **headers, **options)

    async with (
        open_relay(target, revision="2025-11-25", stderr=stderr) as shown,
        shown.running(),
        serve_over(case.transport, shown, **http) as url,
        client("alice", elicitation=lambda asked: None, roots=["/home/alice"]) as alice,
    ):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(alice.call_tool, "transfer", {"owner": "alice"})
                await stderr.wait_for("begun")
                scope.cancel()
        await stderr.wait_for("cancelled")
        yield client


async def attack(case: Case) -> Findings:
    """Make the calls of both users.  Returns the messages that B received."""
    found = Findings()

    def confirm(asked: Any) -> dict[str, bool]:
        found.asked.append(asked.message)
        return {"confirm": True}

    def roots() -> list[str]:
        found.roots += 1
        return ["/home/bob"]

    offered: dict[str, Any] = {"elicitation": confirm} if case.revision > "2025-06" else {}
    with trio.fail_after(30):
        async with (
            cancelled_transfer(case) as client,
            client("bob", roots=roots, on_log=lambda message: found.logged.append(message.data), **offered) as bob,
        ):
            said = await bob.call_tool("balance")
            found.answer = json.loads(said.content[0].text)
    return found


# The results at commit a4d8e0f.  Revision 2024-11-05 has no elicitation.
_ALL = Findings(["?"], ["?"], 1, {"confirm": {}})
BEFORE = {case: _ALL if case.revision > "2025-06" else Findings([], ["?"], 1) for case in CASES}


def main() -> None:
    for case in CASES:
        sys.stdout.write(f"{case}\n  before  {BEFORE[case]}\n  now     {trio.run(attack, case)}\n")


if __name__ == "__main__":
    main()
