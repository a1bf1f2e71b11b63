"""``trio-mcp run --reload``: a server that is started again when one of its files changes; its clients stay connected.

This process has the clients, and a relay presents to them the server, which runs in a child process (`reloaded`).

| With | The child | Sessions |
|---|---|---|
| stdio | speaks on its standard input and output; any SDK | the one of the host |
| `--http` | serves WebSocket at a port of this machine; a `Server` of trio_mcp | a connection for each client |

Twice a second this process looks at the times of the files that the child reports.  After a change:

1. Calls that run are cancelled at the server and answered with an error that names the file.  New ones wait, and so do
   requests that only read, which are sent again.
2. The child ends, and a new one starts.
3. If it starts, each client has a new session with it, and is told that all lists may have changed.
4. If it does not, calls fail with the reason, until a file changes again.  The old program is not used any more: its
   answers would look like those of the edited file.

At the beginning there is no old program, and nothing is known about the server.  So if the first child does not start,
clients wait until a file changes: a host on stdio for its first answer, and clients over HTTP for the port.

An error of a tool call is a result with `isError`, because models read these.
"""

from __future__ import annotations

import logging
import math
import os
import select
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.cli.bridge import PASSED_ON
from trio_mcp.cli.reloaded import read_report
from trio_mcp.cli.serve import Events, option_hint
from trio_mcp.client.options import ClientOptions
from trio_mcp.core.errors import INTERNAL_ERROR, ConnectionFailed, McpError, RequestError, SessionClosed, UsageError
from trio_mcp.core.messages import JsonObject, Request
from trio_mcp.core.revisions import REVISIONS, in_protocol
from trio_mcp.relay.relay import ASKS, Relay
from trio_mcp.relay.upstream import FORWARDED
from trio_mcp.server.context import Context
from trio_mcp.server.http.listener import serve_http
from trio_mcp.server.http.sockets import tcp_listeners
from trio_mcp.server.process import parse_address, serve_stdio
from trio_mcp.transport.child import Child, ServerExited, start_child
from trio_mcp.transport.nursery import open_nursery
from trio_mcp.transport.stdio import unhindered_stderr

if TYPE_CHECKING:
    import ssl

    from trio_mcp.server.dispatch import CallNext
    from trio_mcp.server.server import Server

__all__ = ["ChangedFiles", "serve_reloading"]

_LOOK = 0.5  # seconds between two looks at the files
_START = 120.0  # seconds for a child to listen, as for a server on stdio
_STARTING_LOOK = 0.02  # seconds between two looks at the report of a child that starts
_STEP = 1.0  # seconds for each step of ending a child
_STABLE = 5.0  # a child that has run for so many seconds is started again when it ends by itself


async def serve_reloading(
    target: str, http: str | None, ssl_context: ssl.SSLContext | None, options: Mapping[str, Any], events: Events
) -> int:
    """Serve until the end of input, or with `http` until it is cancelled.  Returns the exit status.

    A first child that does not start is started again when one of its files changes.  Raises `ConnectionFailed` if it
    has no files, or if the client on stdio has gone, and `CannotServe` if the port is in use.
    """
    logging.getLogger("trio_mcp.relay").setLevel(logging.ERROR)  # the reloader reports the same to the user
    if http is not None:  # a port in use is told now, and not after the first good start
        for each in await tcp_listeners(*parse_address(http)):
            await each.aclose()
    with tempfile.TemporaryDirectory(prefix="trio-mcp-") as folder, unhindered_stderr():
        async with open_nursery() as nursery:
            reloader = _Reloader(nursery, target, Path(folder, "report"), events, over_http=http is not None)
            async with AsyncExitStack() as stack:
                nursery.start_soon(reloader.keep_up, name="the files of the server")
                server = await reloader.open(stack)
                if http is None:
                    events.tell("serving", pid=os.getpid())
                    await serve_stdio(server)
                else:
                    at = parse_address(http)
                    serve = partial(serve_http, server, *at, ssl_context=ssl_context, **options)
                    await _serve_announced(server, serve, events)
    return 0


async def _serve_announced(server: Server, serve: Any, events: Events) -> None:
    async with open_nursery(wait=True) as nursery:
        try:
            address = await nursery.start(serve)
        except UsageError as error:
            raise UsageError(f"{error}{option_hint(error)}") from None
        name = server._current_offer().info["name"]
        words = f"{name} listens at {address.local_url} and is started again when a file changes; Ctrl-C ends"
        events.tell("listening", words, url=address.url, workers=1, pid=os.getpid())


class ChangedFiles:
    """Files and folders, and whether one of them has changed since the last look."""

    def __init__(self) -> None:
        self._times: dict[str, int | None] = {}

    def remember(self, names: Iterable[str]) -> None:
        """Look at further files for the first time."""
        self._times |= {name: _mtime(name) for name in names}

    def look(self, files: Mapping[str, float]) -> str:
        """The name of a file that has changed; "" if none has.

        `files` are the files of now, with the time from which on a change counts: a program may have read a file
        shortly before it was reported.  A time in the future is no change, as it would be one for ever.
        """
        changed, times = "", {}
        now = time.time_ns()
        for name, since in files.items():
            times[name] = mtime = _mtime(name)
            if name in self._times:
                if mtime != self._times[name]:
                    changed = changed or name  # of a file and its folder the file, which comes first
            elif mtime is None or since * 1e9 < mtime <= now:
                changed = changed or name
        self._times = times
        return os.path.basename(changed)


def _mtime(name: str) -> int | None:
    try:
        return os.stat(name).st_mtime_ns
    except OSError:
        return None


class _Reloader:
    """The child process, the relay in front of it, and the calls that run."""

    def __init__(self, nursery: trio.Nursery, target: str, report: Path, events: Events, *, over_http: bool) -> None:
        self._nursery = nursery
        self._tell = events.tell
        self._changed = target
        self._report = report
        self._over_http = over_http
        self._command = [sys.executable, "-m", "trio_mcp.cli.reloaded", str(report), target]
        self._started_at = time.time()
        self._known: Collection[str] = ()  # the files of the last child that reported some
        self._folders: Collection[str] = ()  # of these files, after a failure: a missing module may be written there
        self._watched = ChangedFiles()
        self._child: Child | None = None  # only over HTTP; on stdio the relay has it
        self._failure = ""  # why no server runs
        self._settled = trio.Event()  # set when a server runs, or has failed, but not by failures at the beginning
        self._attempt = trio.CancelScope()  # to start the server; cancelled by the next change
        self._edited = trio.Event()  # set by a change before the server has run for the first time
        self._running: set[trio.CancelScope] = set()
        self._idle = trio.Event()  # set when no call runs
        self._turn = trio.Lock()
        self._relay: Relay | None = None

    async def open(self, stack: AsyncExitStack) -> Server:
        """Start the first child, and open the relay to it until the end of the stack; after a failure, wait for a
        change and try again."""
        while True:
            self._edited = trio.Event()
            async with AsyncExitStack() as opened:
                # It stays open with the relay, so a change must not cancel it any more.
                opened.enter_context(self._attempt)
                try:
                    relay, server = await self._open_relay(opened)
                except (McpError, trio.TooSlowError) as error:
                    await self._fail_at_first(error)
                else:
                    self._attempt, self._relay = trio.CancelScope(), relay
                    await stack.enter_async_context(opened.pop_all())
                    break
            await self._edited.wait()
            self._forget_report()
        if self._failure:
            self._failure, self._folders = "", ()
            self._tell("started", "the server runs")
        if not self._files():
            words = f"no file is watched: {self._changed} is in an installed package; use pip install -e"
            self._tell("unwatched", words, target=self._changed)
        self._settled.set()
        return server

    async def _open_relay(self, stack: AsyncExitStack) -> tuple[Relay, Server]:
        options: ClientOptions = {"extensions": PASSED_ON}
        if not self._over_http:
            options |= {"environment": "inherit", "shutdown_timeout": _STEP}
        target = await self._start_child() if self._over_http else self._command
        relay = Relay(target, ASKS, (self._guard,), tuple(REVISIONS), options, lists_change=True)
        return relay, await relay.open(stack)

    async def _fail_at_first(self, error: Exception) -> None:
        """Wait until a file changes; raise `ConnectionFailed` if none can, or if the client on stdio has gone."""
        if not self._files() or not (self._over_http or _has_client()):
            raise ConnectionFailed(f"the server could not be started: {self._reason(error)}") from error
        self._fail(error)
        while self._over_http or _has_client():  # noqa: ASYNC110  # until a change cancels the attempt
            await trio.sleep(_LOOK)
        raise ConnectionFailed("the client has gone before the server could be started") from error

    # Requests of clients.

    async def _guard(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        """The middleware: lets a request wait for a server that starts, and ends it when the server ends.

        A request that only reads is then sent to the new server; a call may have done half of its work.
        """
        if request.method not in FORWARDED and in_protocol(request.method):
            return await call_next()
        cancelled = True
        while cancelled:
            await self._settled.wait()
            if self._failure:
                return _failed(request, self._failure)
            with trio.CancelScope() as scope:
                self._running.add(scope)
                try:
                    return await call_next()
                finally:
                    self._running.discard(scope)
                    if not self._running:
                        self._idle.set()
            cancelled = request.method in FORWARDED and request.method != "tools/call"
        ended = f"the server was started again while {request.method} ran"
        return _failed(request, f"{ended}, because {self._changed} has changed; send it again")

    # Changes of files.

    async def keep_up(self) -> None:
        """Start the server again after each change, also while it is being started."""
        while True:
            await trio.sleep(_LOOK)
            if changed := self._watched.look(self._files()):
                self._attempt.cancel(reason="a file has changed again")
                self._attempt, self._changed = trio.CancelScope(), changed
                self._tell("changed", f"{changed} has changed; the server is started again", file=changed)
                if self._relay is None:
                    self._edited.set()
                else:
                    self._nursery.start_soon(
                        self._start_again, self._relay, self._attempt, name="start the server again"
                    )

    def _files(self) -> dict[str, float]:
        self._known = read_report(self._report).files or self._known  # a child may end without a report
        return dict.fromkeys(self._known, self._started_at) | dict.fromkeys(self._folders, math.inf)

    def _forget_report(self) -> None:
        self._started_at = time.time()
        self._report.unlink(missing_ok=True)

    async def _start_again(self, relay: Relay, attempt: trio.CancelScope) -> None:
        with attempt:
            async with self._turn:
                if self._settled.is_set():
                    self._settled = trio.Event()
                await self._end_calls()
                self._forget_report()
                try:
                    if self._over_http:
                        relay.target = await self._start_child()
                    await relay.reopen()
                except (McpError, trio.TooSlowError) as error:
                    self._fail(error)
                else:
                    self._failure, self._folders = "", ()
                    self._tell("started", "the server runs")
                self._settled.set()

    async def _end_calls(self) -> None:
        """Cancel the calls that run, so that the server stops their handlers."""
        self._idle = trio.Event()
        for scope in self._running:
            scope.cancel(reason="the server is started again")
        if self._running:
            with trio.move_on_after(_STEP):
                await self._idle.wait()

    def _reason(self, error: Exception) -> str:
        """Why the server could not be started."""
        how = error.how if isinstance(error, ServerExited) else "it did not answer; standard error may say why"
        return read_report(self._report).error or how

    def _fail(self, error: Exception) -> None:
        reason = self._reason(error)
        self._failure = f"the server could not be started: {reason}. It is started again when a file changes."
        self._folders = {os.path.dirname(each) for each in read_report(self._report).files or self._known}
        self._watched.remember(self._folders)
        self._tell("failed", self._failure, error=reason)

    # The child that serves HTTP.

    async def _start_child(self) -> str:
        """Start a new child in place of the old one.  Returns its URL.

        Raises `ServerExited` if it ends before it listens, and TooSlowError if it does not listen in time.
        """
        if self._child is not None:
            child, self._child = self._child, None
            await child.aclose()
        command = [*self._command, "http"]
        child = await start_child(self._nursery, command, environment="inherit", shutdown_timeout=_STEP)
        self._child = child
        self._nursery.start_soon(self._stay, child, name="the output of the server")
        with trio.fail_after(_START):
            while not (url := read_report(self._report).url):
                if child.exit is not None:
                    raise child.exit
                await trio.sleep(_STARTING_LOOK)
        return url

    async def _stay(self, child: Child) -> None:
        """Copy its standard output to ours, and start it again if it ends by itself."""
        began = trio.current_time()
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            while data := await child.stream.receive_some():
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        if child is not self._child or not self._settled.is_set():
            return  # it was ended, or has not started: then its start fails
        self._tell("ended", "the server has ended by itself")
        if trio.current_time() > began + _STABLE:
            assert self._relay is not None  # it has settled
            await self._start_again(self._relay, trio.CancelScope())
        else:
            self._fail(child.exit or SessionClosed())


def _has_client() -> bool:
    """Whether standard input is a terminal, or a pipe or socket whose other end is open."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
        return os.isatty(0)
    end = select.poll()
    end.register(0, getattr(select, "POLLRDHUP", 0))
    return not end.poll(0)


def _failed(request: Request, why: str) -> JsonObject:
    if request.method == "tools/call":
        return {"content": [{"type": "text", "text": why}], "isError": True}
    raise RequestError(INTERNAL_ERROR, why)
