"""A free port for a test that must know the number before it binds the port.

The port is not in the range from which Linux assigns ports.  On a busy machine, another process may get a port of that
range before the test binds it.
"""

from __future__ import annotations

import random
import socket

__all__ = ["unclaimed_port"]

FREE = range(20_000, 32_768)  # below the range from which Linux assigns ports
_random = random.SystemRandom()  # two runs of the tests at the same time choose different ports


def unclaimed_port() -> int:
    while True:
        port = _random.choice(FREE)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
