"""Answers that the client does not read: ``python -m tests.attacks.output``."""

from __future__ import annotations

import struct

import trio

from tests.attacks.victim import first_answer, post, request, victim
from tests.http.ws import upgrade_request


async def main() -> None:
    print("Mallory makes 200 calls whose answers of 4 MB are not read, each by a connection of its own.")
    print("before: each request of 548 bytes cost 9.7 MiB")
    async with victim(write_seconds=5) as (port, memory, _):
        empty, streams = memory(), []
        for _ in range(200):
            streams.append(await trio.open_tcp_stream("127.0.0.1", port))
            await streams[-1].send_all(post("give", request("give"), "mallory"))
        await trio.sleep(3)
        more = memory() - empty
        seconds, answer = await first_answer(port, post("echo", request("echo"), "ann"))
        print(f"now:    all together {more:.0f} MiB, {more / 200:.1f} each;")
        print(f"        Ann got {answer[9:12].decode()} in {seconds:.2f} s")
        await trio.sleep(6)
        print(f"        after a window (here 5 s, 60 by default): {memory() - empty:.0f} MiB")
    print("Mallory makes 40 calls with 15 MB each by one WebSocket, and then 40 calls with answers of 4 MB, unread.")
    print("before: 620 MiB while they ran, 379 MiB for the answers")
    async with victim(write_seconds=5) as (port, memory, _):
        for name, text in (("keep", "x" * 15_000_000), ("give", "")):
            empty = memory()
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(upgrade_request(Authorization="Bearer mallory", Host="127.0.0.1"))
            await stream.receive_some()
            with trio.move_on_after(30):
                for id in range(40):
                    arguments = {"text": text} if text else {}
                    await stream.send_all(quick_frame(request(name, id, **arguments)))
                await trio.sleep(2)
            print(f"now:    {name}: {memory() - empty:.0f} MiB more")
            await trio.aclose_forcefully(stream)
            await trio.sleep(2)
    await objects()
    await short_answers()


async def objects() -> None:
    """Requests that take many times their length in memory, once they are Python objects."""
    print("Mallory makes 70 calls of 1 MB with 200,000 objects each by one WebSocket, and then 9,000 of 3.7 KB.")
    print("before: 2,465 MiB and 1,218 MiB more")
    for nests, count in ((1900, 70), (7, 9000)):
        nested: object = 1
        for _ in range(100):
            nested = {"": nested}
        calls = [quick_frame(request("keep", id, text=[nested] * nests)) for id in range(count)]
        async with victim() as (port, memory, _), trio.open_nursery() as nursery:
            empty = memory()
            stream = await websocket(port)
            nursery.start_soon(read, stream)
            with trio.move_on_after(40):
                for call in calls:
                    await stream.send_all(call)
                await trio.sleep(2)
            print(f"now:    {memory() - empty:.0f} MiB more")
            nursery.cancel_scope.cancel()


async def short_answers() -> None:
    print("Mallory makes 5,000 calls by each of 40 WebSockets, whose answers of 4 KB are not read.")
    print("before: 1,040 MiB more after 20 seconds")
    calls = b"".join(quick_frame(request("give", id, size=3800)) for id in range(5000))
    async with victim() as (port, memory, _), trio.open_nursery() as nursery:
        empty = memory()
        for _ in range(40):
            nursery.start_soon((await websocket(port)).send_all, calls)
        await trio.sleep(20)
        print(f"now:    {memory() - empty:.0f} MiB more")
        nursery.cancel_scope.cancel()


async def websocket(port: int) -> trio.abc.Stream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(upgrade_request(Authorization="Bearer mallory", Host="127.0.0.1"))
    await stream.receive_some()
    return stream


async def read(stream: trio.abc.Stream) -> None:
    while await stream.receive_some():
        pass


def quick_frame(data: bytes) -> bytes:
    """A text frame with a mask of zeros, which leaves the bytes as they are."""
    size = (
        struct.pack("!BQ", 0x80 | 127, len(data)) if len(data) >= 1 << 16 else struct.pack("!BH", 0x80 | 126, len(data))
    )
    return b"\x81" + size + bytes(4) + data


if __name__ == "__main__":
    trio.run(main)
