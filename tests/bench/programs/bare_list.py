"""Prints the tools of a server, with Trio and json alone: ``bare_list.py COMMAND ...``.

It starts the server, opens a session as a client of 2025-11-25 does, and prints the names and the descriptions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import trio

HELLO = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "bench", "version": "1"},
}


async def main(command: list[str]) -> None:
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    buffer = b""

    async def ask(id: int, method: str, params: dict[str, Any]) -> Any:
        nonlocal buffer
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        await stdin.send_all(json.dumps(request).encode() + b"\n")
        while b"\n" not in buffer:
            buffer += await stdout.receive_some()
        line, _, buffer = buffer.partition(b"\n")
        return json.loads(line)["result"]

    await ask(1, "initialize", HELLO)
    await stdin.send_all(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
    for tool in (await ask(2, "tools/list", {}))["tools"]:
        print(f"{tool['name']}  {tool.get('description', '')}")
    await stdin.aclose()
    await process.wait()


trio.run(main, sys.argv[1:])
