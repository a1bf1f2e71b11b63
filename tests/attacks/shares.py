"""One client takes threads, calls and sessions that others need: ``python -m tests.attacks.shares``."""

from __future__ import annotations

import json

import trio

from tests.attacks.victim import first_answer, post, request, victim
from tests.http.ws import TEXT, frame, upgrade_request
from trio_mcp.core import Role


async def threads() -> None:
    print("Mallory makes 40 calls that block a thread, and closes its connections.")
    print("before: all clients waited for the abandoned threads")
    async with victim() as (port, _, _):
        for _ in range(40):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(post("block", request("block"), "mallory"))
            await trio.sleep(0.02)
            await stream.aclose()
        seconds, answer = await first_answer(port, post("thread", request("thread"), "ann"))
        print(f"now:    Ann got {answer[9:12].decode()} in {seconds:.2f} s")


async def calls() -> None:
    print("Mallory opens four WebSockets and makes 10,000 calls that wait by each.")
    print('before: all other clients got the answer "the server is overloaded"')
    async with victim() as (port, _, _), trio.open_nursery() as nursery:
        for _ in range(4):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(upgrade_request(Authorization="Bearer mallory", Host="127.0.0.1"))
            await stream.receive_some()
            nursery.start_soon(drain, stream)
            frames = [frame(Role.SERVER, TEXT, request("keep", id)) for id in range(10_000)]
            for start in range(0, 10_000, 500):
                await stream.send_all(b"".join(frames[start : start + 500]))
        await trio.sleep(5)
        seconds, answer = await first_answer(port, post("echo", request("echo"), "ann"))
        fair = b"overloaded" not in answer
        print(
            f"now:    Ann got {answer[9:12].decode()} in {seconds:.2f} s{'' if fair else ', and was told: overloaded'}"
        )
        nursery.cancel_scope.cancel()


async def drain(stream: trio.abc.Stream) -> None:
    while await stream.receive_some():
        pass


async def sessions() -> None:
    print("Ann has a session; then Mallory opens 12,000.")
    print("before: Ann's session was ended, because it was idle for longest")
    async with victim() as (port, _, _):
        ann = await session(port, "ann")
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        for _ in range(12_000):  # more than the limit
            await session(port, "mallory", stream)
        body = json.dumps({"jsonrpc": "2.0", "id": 2, "method": "ping"}).encode()
        data = post("", body, "ann").replace(b"Mcp-Method: tools/call\r\nMcp-Name: \r\n", b"")
        data = data.replace(b"2026-07-28", b"2025-11-25", 1).replace(
            b"\r\n\r\n", b"\r\nMcp-Session-Id: %b\r\n\r\n" % ann, 1
        )
        _, answer = await first_answer(port, data)
        print(f"now:    Ann's session answers {answer[9:12].decode()}")


async def session(port: int, user: str, stream: trio.abc.Stream | None = None) -> bytes:
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).encode()
    data = post("", body, user).replace(b"Mcp-Method: tools/call\r\nMcp-Name: \r\n", b"")
    data = data.replace(b"MCP-Protocol-Version: 2026-07-28\r\n", b"").replace(
        b", text/event-stream", b",text/event-stream"
    )
    stream = stream or await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(data)
    answer = bytes(await stream.receive_some(8000))
    at = answer.lower().index(b"mcp-session-id: ") + len(b"mcp-session-id: ")
    return answer[at:].partition(b"\r\n")[0]


async def main() -> None:
    await threads()
    await calls()
    await sessions()


if __name__ == "__main__":
    trio.run(main)
