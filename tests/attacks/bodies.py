"""Request bodies without their last byte: ``python -m tests.attacks.bodies``."""

from __future__ import annotations

import trio

from tests.attacks.victim import first_answer, post, request, victim

SIZE = 16 * 1024 * 1024


async def main() -> None:
    print("Mallory sends 40 bodies of 16 MiB, each but for its last byte; then Ann sends one of 1 MiB.")
    print("before: 16 of them were enough; all other clients got 503 for 34 seconds, and up to an hour")
    async with victim(body_seconds=5) as (port, memory, _), trio.open_nursery() as nursery:
        empty, refused = memory(), 0

        async def attack() -> None:
            nonlocal refused
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            try:
                await stream.send_all(post("echo", b"x" * (SIZE - 1), "mallory", SIZE))
            except trio.BrokenResourceError:
                refused += 1
                return
            refused += b" 503 " in await stream.receive_some(4000)

        for _ in range(40):
            nursery.start_soon(attack)
        await trio.sleep(4)
        seconds, answer = await first_answer(port, post("echo", request("echo", text="x" * 1_000_000), "ann"))
        print(f"now:    Ann got {answer[9:12].decode()} after {seconds:.2f} s;")
        print(f"        the server has {memory() - empty:.0f} MiB more")
        await trio.sleep(6)
        print(f"        and when a window (here 5 s, 30 by default) has passed, {memory() - empty:.0f} MiB more;")
        print(f"        {refused} of the 40 were refused")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
