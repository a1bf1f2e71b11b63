"""A worker process: serves the connections that it accepts, and obeys its supervisor.

| The supervisor says | The worker |
|---|---|
| `leave` | accepts those that wait, serves requests on open connections until no call runs, and then drains |
| nothing any more: it has ended | leaves |
| `count` | answers with its statistics |

SIGTERM to one worker lets it leave, too.  `shutdown_timeout` holds for all of this.

Both sides write lines of JSON.  The worker says `ready` when it accepts connections, and `sum` when it wants the
statistics of all workers.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import trio

from trio_mcp.core.errors import CannotServe, UsageError
from trio_mcp.server.http.listener import HttpAddress, leave_to_others, serve_http
from trio_mcp.server.http.monitoring import Tally
from trio_mcp.server.http.sockets import Listener, check_exposure, listener_of, socket_under, tcp_sockets, unix_socket
from trio_mcp.server.process import ProcessLife, announce, check_process, live, show_operator
from trio_mcp.server.supervisor import ConnectionCounts, Supervisor
from trio_mcp.stores.memory import MemoryStore
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    import ssl

    from trio_mcp.server.http.options import HttpOptions
    from trio_mcp.server.server import Server
    from trio_mcp.transport.wire import Tap

__all__ = ["Supervised", "run_workers"]

_log = logging.getLogger("trio_mcp")

_SUM = 1.0  # seconds for the statistics of all workers; the supervisor waits for half of it
_LINE = 64 * 1024  # bytes of one read
_FOLDER = "trio_mcp-workers-"
_NEW = 60.0  # seconds in which a folder gets its lock


def run_workers(
    server: Server,
    workers: int,
    address: tuple[str, int] | tuple[()],
    unix: str | os.PathLike[str] | None,
    *,
    shutdown_timeout: float,
    ssl_context: ssl.SSLContext | None,
    tap: Tap | None,
    options: HttpOptions,
) -> NoReturn:
    """Serve HTTP in several processes until a signal; see `supervisor`.  Raises `SystemExit`, and `UsageError`."""
    _check(workers, shutdown_timeout, options)
    name = server._info["name"]
    try:
        if not hasattr(os, "fork"):
            raise CannotServe("workers need fork, which this system does not have; run one process, without workers")
        with ExitStack() as undo:
            if address:
                sockets: Sequence[socket.socket] = tcp_sockets(*address)
                undo.callback(_close, sockets)
            else:
                assert unix is not None
                sockets = [undo.enter_context(unix_socket(os.fspath(unix)))]
            check_exposure([each.getsockname() for each in sockets], options, server)
            advice = _share_store(server, undo)
            _warn_of_threads()
            serve = partial(serve_http, server, ssl_context=ssl_context, tap=tap, **options)
            work = partial(_work, server, sockets, serve, shutdown_timeout)
            show = partial(_announce, server, unix, workers, advice)
            Supervisor(name, workers, sockets, work, show, shutdown_timeout).run()
    except CannotServe as error:
        raise SystemExit(f"{name}: {error}") from None


def _check(workers: int, shutdown_timeout: float, options: HttpOptions) -> None:
    if type(workers) is not int or workers < 1:
        raise UsageError(f"workers must be a number of processes, 1 or more, got {workers!r}")
    check_process(shutdown_timeout)
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("run(workers=...) must be called in the main thread, because only that one gets signals")
    if options.get("sse_path") is not None:
        raise UsageError(
            "sse_path cannot be used with workers: a client of HTTP+SSE posts on connections that any worker may "
            "accept, but its session is in one of them; serve these clients with one process"
        )


def _announce(
    server: Server, unix: str | os.PathLike[str] | None, workers: int, advice: str, local_url: str, url: str
) -> None:
    announce(server, local_url, url, unix, workers)
    if advice:
        show_operator(advice)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _share_store(server: Server, undo: ExitStack) -> str:
    """Make a store in a file, for the time of this run, if the server was given none.  Return advice about it."""
    if isinstance(server._store, MemoryStore):
        raise UsageError(
            "workers cannot share a MemoryStore; leave store= out, and they share a file, or give an SQLiteStore or a "
            "RedisStore"
        )
    if server._store is not None:
        return ""
    from trio_mcp.stores.sqlite import SQLiteStore  # a server with another store needs no sqlite3

    server._store, server._shares_store = SQLiteStore(_folder(undo) / "store.db"), True
    return (
        f"{server._info['name']} has no store: tasks and sessions end with this service; "
        'Server(store=SQLiteStore("tasks.db")) keeps them'
    )


def _folder(undo: ExitStack) -> Path:
    """Make a folder for the time of this run, and remove those of runs that were killed.

    A run locks its folder.  The forks inherit the lock, and the system ends it with the last of these processes.
    """
    import fcntl  # after the check for fork: a system has both or none

    for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):  # it is of another user, at work, or has just been removed
            descriptor = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and found.st_mtime < time.time() - _NEW:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)
            finally:
                os.close(descriptor)
    folder = undo.enter_context(tempfile.TemporaryDirectory(prefix=_FOLDER))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    undo.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return Path(folder)


def _warn_of_threads() -> None:
    """A fork has the thread that forks and no other."""
    names = sorted(each.name for each in threading.enumerate() if each is not threading.main_thread())
    if names:
        _log.warning(
            "workers are forks of this process and have none of its threads (%s); start threads in the lifespan, "
            "which each worker enters",
            ", ".join(names),
        )


def _work(
    server: Server,
    sockets: Sequence[socket.socket],
    serve: Callable[..., Awaitable[None]],
    shutdown_timeout: float,
    number: int,
    link: socket.socket,
    connections: ConnectionCounts,
    slot: int,
) -> None:
    """Serve as the worker with this number, until the supervisor or a signal ends it."""
    _name_worker(number)
    worker = server._supervised = Supervised(server, link, connections, slot, shutdown_timeout)

    async def serving(life: ProcessLife) -> None:
        async with open_nursery() as nursery:
            nursery.start_soon(worker.obey, life, name="supervisor")
            await serve(listeners=[listener_of(each) for each in sockets], task_status=worker)

    live(server, serving, shutdown_timeout=shutdown_timeout, leave=worker.leave)


def _name_worker(number: int) -> None:
    """Let log lines have the number: as `%(processName)s`, or where logging is not configured, at their start."""
    name = f"worker {number}"
    multiprocessing.current_process().name = name
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter(f"{name}: %(message)s"))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a worker ends without flushing, and lines of workers never mix


class Supervised:
    """The worker's end of the link to its supervisor.  It is the task status of its `serve_http`."""

    def __init__(
        self, server: Server, link: socket.socket, connections: ConnectionCounts, slot: int, shutdown_timeout: float
    ) -> None:
        link.setblocking(False)
        self._server = server
        self._link = link
        self._connections = connections
        self._slot = slot
        self._shutdown_timeout = shutdown_timeout
        self._tally: Tally | None = None
        self._tallied: trio.Event | None = None

    def started(self, address: HttpAddress | None = None) -> None:
        assert address is not None
        self._connections.join(self._slot)
        self._tell("ready", address.local_url, address.url)

    async def obey(self, life: ProcessLife) -> None:
        """Do what the supervisor says, and leave when it has ended."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._link))
        unread = b""
        with suppress(trio.BrokenResourceError):
            while data := await stream.receive_some(_LINE):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._told(json.loads(line), life)
        _log.warning("the supervisor has ended: this worker accepts no more connections, and ends after its calls")
        life.terminate("the end of the supervisor")

    def _told(self, message: list[Any], life: ProcessLife) -> None:
        match message:
            case ["leave"]:
                life.terminate("the request of the supervisor")
            case ["count", number]:
                self._tell("count", number, attrs.astuple(self._server.statistics()))
            case ["sum", list(counts), *numbers]:
                self._tally = Tally(tuple(counts), *numbers)
                if self._tallied is not None:
                    self._tallied.set()
                    self._tallied = None

    def _tell(self, *message: Any) -> None:
        with suppress(OSError):  # the supervisor has ended; `obey` sees it, too
            self._link.send(json.dumps(message).encode() + b"\n")

    async def leave(self) -> None:
        """Let the other workers have all new connections, and finish those that are open."""
        self._connections.leave(self._slot)
        await leave_to_others(self._server, self._shutdown_timeout)

    async def turn(self, listener: Listener, connections: Callable[[], int]) -> None:
        """Return when this worker may accept a connection; `connections` tells how many it has."""
        listening = socket_under(listener)
        assert listening is not None  # `_work` has made it
        await self._connections.turn(self._slot, listening, connections)

    async def gather(self) -> Tally | None:
        """Return the statistics of all workers; None if the supervisor does not answer in time."""
        if self._tallied is None:
            self._tallied = trio.Event()
            self._tell("sum")
        tallied = self._tallied
        with trio.move_on_after(_SUM):
            await tallied.wait()
            return self._tally
        self._tallied = None
        return None
