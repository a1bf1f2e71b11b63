"""``trio-mcp inspect``: start the official Inspector on a server.

    trio-mcp inspect weather.py                     # its page
    trio-mcp inspect weather.py --cli tools/list    # its command line

The Inspector is a package of npm, and npx runs it.  The server is given to it in a configuration file that only its
owner can read, because environment variables and headers may be secrets, and arguments of processes are visible to all
users of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trio_mcp.cli.output import Output
from trio_mcp.cli.tap import passing_signals
from trio_mcp.cli.target import NO_CONNECTION, ServerTarget, add_server_arguments, exit_status, target_of
from trio_mcp.core.errors import UsageError
from trio_mcp.core.revisions import REVISIONS

__all__ = ["add_arguments", "run"]

_PACKAGE = "@modelcontextprotocol/inspector"
_PAGE = re.compile(r"https?://[^\s?]+")  # without its query, which has a token


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--cli", metavar="METHOD", help="no page: one request, such as tools/list")
    parser.add_argument(
        "--json", action="store_true", help="write the address of the page as JSON; all else goes to standard error"
    )


def run(arguments: argparse.Namespace) -> int:
    return exit_status(lambda: _inspect(arguments), verbose=False)


def _inspect(arguments: argparse.Namespace) -> int:
    target = target_of(arguments)
    entry, name = _entry(target, arguments.revision), _name(target, arguments.target)
    if missing := [name for name in ("node", "npx") if shutil.which(name) is None]:
        sys.stderr.write(f"trio-mcp: there is no {missing[0]} in PATH; the Inspector needs Node.js, which brings it\n")
        return NO_CONNECTION
    with tempfile.TemporaryDirectory(prefix="trio-mcp-") as folder:  # only its owner can read it
        file = Path(folder) / "mcp.json"
        file.write_text(json.dumps({"mcpServers": {name: entry}}))
        command, config = ["npx", "-y", _PACKAGE], ["--config", str(file)]
        if arguments.cli is None:
            command += config
        else:  # the Inspector wants its mode first; its page shows all servers of the file
            command += ["--cli", *config, "--server", name, "--method", arguments.cli]
        # npx starts the Inspector as a child, and it the server: all of them get the signals.
        shows = arguments.json and arguments.cli is None  # the result of a request is JSON already
        process = subprocess.Popen(command, process_group=0, text=True, stdout=subprocess.PIPE if shows else None)
        with passing_signals(process):
            _show_address(process, name)
            status = process.wait()
    return status if status >= 0 else 128 - status


def _show_address(process: subprocess.Popen[str], name: str) -> None:
    """Write the address of the page as JSON, once the Inspector names it, and its own output to standard error."""
    shown = False
    for line in process.stdout or ():
        sys.stderr.write(line)
        sys.stderr.flush()
        if not shown and (url := _PAGE.search(line)):
            shown = True
            Output(as_json=True).json({"url": url[0], "server": name, "pid": process.pid})
            sys.stdout.flush()


def _name(target: ServerTarget, given: str | None) -> str:
    """The name that the page shows."""
    if isinstance(target.address, str):
        return urlsplit(target.address).hostname or "server"
    return Path(given or target.address[0]).name


def _entry(target: ServerTarget, revision: str | None) -> dict[str, Any]:
    """The entry of the server in the configuration file."""
    if revision is not None and revision not in REVISIONS:
        raise UsageError(f"there is no revision {revision!r}; the revisions are {', '.join(REVISIONS)}")
    era = "auto" if revision is None else "legacy" if REVISIONS[revision].handshake else "modern"
    address = target.address
    if not isinstance(address, str):
        program, *rest = map(os.fspath, address)
        return {"type": "stdio", "command": program, "args": rest, "env": target.env, "protocolEra": era}
    url = urlsplit(address)
    if url.scheme in ("ws", "wss"):
        bridge = "trio-mcp bridge URL --http 127.0.0.1:3000"
        raise UsageError(
            f"the Inspector does not speak WebSocket; start {bridge}, and inspect http://127.0.0.1:3000/mcp"
        )
    # Servers with the old transport use this path, and the Inspector does not try both.
    kind = "sse" if url.path.rstrip("/").endswith("/sse") else "streamable-http"
    return {"type": kind, "url": address, "headers": target.headers, "protocolEra": era}
