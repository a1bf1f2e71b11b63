"""The server process behind ``trio-mcp run --reload``: ``python -m trio_mcp.cli.reloaded REPORT TARGET [http]``.

It serves standard input and output, or with `http` a free port of this machine, until the end of standard input.  It
writes a report into the file REPORT, which `reload` reads:

| Member | Meaning |
|---|---|
| `files` | the source files of the loaded modules, without those of Python and of installed packages |
| `error` | why the server could not be started, with the file and the line; "" if it could |
| `url` | the WebSocket URL of a server with `http`; "" before it listens |

Only this process knows these files, and it goes on looking, because a handler may import a module later.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from trio_mcp.cli.serve import explain, failing_places, load_server, own_files, run_script
from trio_mcp.core.errors import UsageError
from trio_mcp.server.registry import CAPABILITIES
from trio_mcp.server.server import Server
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.stdio import block_signals

if TYPE_CHECKING:
    from trio_mcp.server.process import ProcessLife

__all__ = ["Report", "main", "read_report"]

_LOOK = 0.5  # seconds between two looks at the loaded modules


@attrs.frozen
class Report:
    """The report of the process; see the head of this file."""

    files: Collection[str] = ()
    error: str = ""
    url: str = ""


def read_report(path: Path) -> Report:
    """Read a report.  It is empty if the process has not written it yet."""
    try:
        return Report(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Report()


class _Reporter:
    """Writes the report of this process anew when it changes."""

    def __init__(self, path: str, target: str) -> None:
        self._path = path
        self._report = Report()
        self._more = {os.path.abspath(target.partition(":")[0])}  # known before its import has succeeded
        self._lock = threading.Lock()

    def update(self, **changes: Any) -> None:
        with self._lock:
            files = sorted(own_files(_loaded() | self._more))
            report = attrs.evolve(self._report, files=files, **changes)
            if report != self._report:
                self._report = report
                new = f"{self._path}.new"
                Path(new).write_text(json.dumps(attrs.asdict(report)))
                os.replace(new, self._path)  # so that no reader sees half of it

    def failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Takes the place of `sys.excepthook`."""
        self._more.update(name for name, _ in failing_places(error, trace))
        self.update(error=explain(kind, error, trace))

    def watch(self) -> None:
        block_signals()
        count = 0
        while True:
            time.sleep(_LOOK)
            if len(sys.modules) != count:
                count = len(sys.modules)
                self.update()


def _loaded() -> set[str]:
    # Read from the namespace, because some modules import others when an attribute is looked up.
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    files = [vars(each).get("__file__") for each in modules]
    return {os.path.abspath(each) for each in files if isinstance(each, str)}


def main(path: str, target: str, *http: str) -> None:
    # Python compares a source file with its bytecode by its size and by whole seconds, so it would not see an edit
    # within the second of the last one.
    sys.dont_write_bytecode = True
    reporter = _Reporter(path, target)
    sys.excepthook = reporter.failed
    try:
        server = load_server(target)
    except UsageError as error:
        reporter.update(error=str(error))
        raise SystemExit(f"trio-mcp: {error}") from None
    except SystemExit as end:
        reporter.update(error=f"it has ended by itself: {end}")
        raise
    finally:
        reporter.update()  # also if it has failed or exits: then a change of these files starts it again
    if isinstance(server, Server):
        # Clients read the capabilities once, when they connect, and the first prompt may be written after that.
        server._capabilities |= CAPABILITIES.keys()
    threading.Thread(target=reporter.watch, name="trio-mcp: the files of the server", daemon=True).start()
    if http:
        _serve_http(server, target, reporter)
    elif server is None:
        run_script(target)
    else:
        server.run()


def _serve_http(server: Server, target: str, reporter: _Reporter) -> None:
    from trio_mcp.server.http.listener import serve_http
    from trio_mcp.server.process import live

    why = ""
    if not isinstance(server, Server):
        why = f"--http needs a Server of trio_mcp; {target} has "
        why += "no server" if server is None else f"a {type(server).__name__}"
    elif server._catalog.protection is not None:
        why = "a server that requires access tokens has no --reload over HTTP, because the relay to it has none"
    if why:
        reporter.update(error=why)
        raise SystemExit(f"trio-mcp: {why}")
    threading.Thread(target=_end_with_parent, name="trio-mcp: the end of input", daemon=True).start()

    async def serve(_: ProcessLife) -> None:
        async with open_nursery(wait=True) as nursery:
            address = await nursery.start(serve_http, server)
            reporter.update(url=address.websocket_url)

    live(server, serve, shutdown_timeout=5.0)


def _end_with_parent() -> None:
    """The system closes standard input when the parent ends, however it does."""
    block_signals()
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
