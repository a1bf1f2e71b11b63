"""A server with tools for the events that may happen to a process.

Arguments: `shutdown_timeout`, and `LAST`, the seconds after it until the process exits in any case.
"""
# ruff: noqa: T201

import ctypes
import os
import signal
import subprocess
import sys
import time

import trio

from trio_mcp import Server
from trio_mcp.server import process

print("printed while the program was imported")
server = Server("tools", version="1")


def tell(text: str) -> None:
    """Send a word to the test, which reads our stderr."""
    os.write(2, f"<{text}>\n".encode())


@server.tool
async def echo(text: str) -> str:
    return text


@server.tool
async def big(size: int) -> str:
    return "x" * size


@server.tool
async def wait() -> None:
    tell("waiting")
    try:
        await trio.sleep_forever()
    finally:
        tell("cancelled")


@server.tool
async def wait_for(path: str) -> str:
    """Wait until the test writes to this pipe."""
    tell("waiting")
    return await trio.to_thread.run_sync(lambda: open(path).read(), abandon_on_cancel=True)


@server.tool
def wait_in_thread() -> None:
    tell("waiting")
    while True:
        time.sleep(3600)


@server.tool
def print_in_thread() -> None:
    tell("waiting")
    while True:
        print("and on and on")


def wait_for_signals() -> None:
    handler = signal.getsignal(signal.SIGINT)
    tell("waiting")
    while True:
        while signal.getsignal(signal.SIGINT) == handler:
            time.sleep(0.001)
        handler = signal.getsignal(signal.SIGINT)
        tell("interrupted")


@server.tool(thread=False)
def block() -> None:
    wait_for_signals()


@server.tool(abandon_on_cancel=False)
def hold() -> None:
    wait_for_signals()


@server.tool
def prints() -> str:
    print("printed, überall")
    os.write(1, b"written to 1\n")
    ctypes.CDLL(None).puts(b"put by C")
    subprocess.run([sys.executable, "-c", "import sys; print('read', repr(sys.stdin.read()))"], check=True)
    subprocess.run(["echo", "said by a child"], check=True)
    sys.stdout.write("left in the buffer")
    return "said it all"


@server.tool
async def exits() -> None:
    raise SystemExit(7)


@server.tool
def exits_in_thread() -> None:
    raise SystemExit(7)


@server.tool
async def interrupts() -> None:
    raise KeyboardInterrupt


@server.tool
def interrupts_in_thread() -> None:
    raise KeyboardInterrupt


if len(sys.argv) == 1:
    server.run()
    print("printed when all was over")
else:
    if len(sys.argv) > 2:
        process.LAST = float(sys.argv[2])
    process.run_stdio(server, shutdown_timeout=float(sys.argv[1]))
