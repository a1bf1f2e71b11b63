"""A port for who wants to be told one, and binds it later: one that the system gives to nobody by itself.

Of those that it does give, the one that was free just now may be somebody else's by then, on a busy machine.
"""

from __future__ import annotations

import random
import socket

__all__ = ["unclaimed_port"]

FREE = range(20_000, 32_768)  # below the least that Linux gives
_chance = random.SystemRandom()  # two runs of the tests at once do not take the same


def unclaimed_port() -> int:
    while True:
        port = _chance.choice(FREE)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
