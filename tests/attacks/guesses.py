"""Guesses of a token: ``python -m tests.attacks.guesses``."""

from __future__ import annotations

import trio

from tests.attacks.victim import first_answer, post, request, victim


async def main() -> None:
    print("Mallory guesses 300 tokens, where Limits.request_rate is 5.")
    print("before: authenticate was called 300 times")
    async with victim(request_rate=5) as (port, _, asked):
        began, statuses = trio.current_time(), []
        for number in range(300):
            _, answer = await first_answer(port, post("echo", request("echo"), f"guess {number}"))
            statuses.append(answer[9:12].decode())
        seconds = trio.current_time() - began
        counts = ", ".join(f"{statuses.count(each)} times {each}" for each in sorted(set(statuses)))
        print(f"now:    authenticate was called {asked[0]} times in {seconds:.1f} s ({counts})")


if __name__ == "__main__":
    trio.run(main)
