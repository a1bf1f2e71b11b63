"""Several processes that serve one address: `server.run(http=..., workers=4)`.

The supervisor binds and listens once, and forks.  Its workers inherit the listening socket and accept from it, so the
system gives each new connection to a worker that is free.  (A socket for each worker, with SO_REUSEPORT, was turned
down: connections that wait at the socket of a worker that ends are reset.)  The supervisor itself serves nothing, runs
no event loop and has no threads, so that it can fork at any time.

A worker is a fork of the program at the moment of `run`.  It has all that the program has made before: the server with
its tools, the random `state_keys`, open files.  Python and OpenSSL seed their random numbers again after a fork; Trio
has not run yet.  Connections to other systems, and threads, belong into the lifespan, which each worker enters itself.
Changed code needs a restart of the service, because a fork has the code of the old program.  (To run `sys.argv` again
instead was turned down: `-m`, `-c`, a notebook and an embedding program cannot be run again from their arguments.)

| Event | What the supervisor does | Exit status |
|---|---|---|
| SIGTERM | all workers leave, and finish their calls within `shutdown_timeout` seconds | 143 |
| Ctrl-C, and each further one | passes it on to the workers; see `process` for what they do | 130 |
| SIGHUP | replaces the workers one by one | |
| a worker ends by itself | replaces it, at once or after a pause | |
| the server cannot start, or no worker can start any more | ends the others | 1 |
| the supervisor is killed | its workers see the end of its socket, and leave | |

A worker that leaves first stops accepting; see `supervised`.  During SIGHUP the new worker is ready before the old one
leaves, and the old one has ended before the next is replaced.  So there is at most one process more than usual.  If a
new worker cannot start, the old ones stay.

Connections are kept for many requests, so their number is the load of a worker.  The worker that wakes first would
take most of those that come at the same time.  So the workers share their numbers in memory, and a worker that has more
connections than another one waits for a moment before it accepts.

The first worker starts alone.  A server that cannot start then fails once, and not once for each worker.

Workers are in process groups of their own, because Ctrl-C on a terminal would otherwise reach them twice.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeAlias

import attrs
import trio

from trio_mcp.server.http.sockets import ignore_new
from trio_mcp.server.process import LAST, unbuffer
from trio_mcp.transport.stdio import unhindered_stderr

__all__ = ["ConnectionCounts", "Roster", "Supervisor"]

_log = logging.getLogger("trio_mcp")

# Pauses before a worker is replaced: none after its first failure, because most failures do not come back, then twice
# as long each time.
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_STEADY = 60.0  # seconds after which a worker that fails counts as one that has failed for the first time
_TRIES = 5  # failed starts of each worker in a row, while none is ready; then the service manager must help
_ANSWER = 0.5  # seconds for the workers to answer with their statistics
_GRACE = 1.0  # seconds between the last deadline of a worker, which it keeps by itself, and SIGKILL
_TURN = 0.001  # seconds that a worker leaves to others to accept a connection
_LINE = 64 * 1024  # bytes of one message of a worker; the messages have some hundred

Pid = int
Work: TypeAlias = "Callable[[int, socket.socket, ConnectionCounts, int], None]"


# Which workers there should be.


@attrs.define(eq=False)
class _Place:
    """The place of one worker: its number, and the processes that have this number."""

    number: int
    serving: Pid | None = None
    starting: Pid | None = None
    leaving: Pid | None = None
    generation: int = 0  # of the process that serves
    ready_at: float = 0.0
    failures: int = 0  # in a row
    failed_starts: int = 0  # in a row
    start_at: float = -math.inf

    @property
    def vacant(self) -> bool:
        return self.serving is None and self.starting is None


class Roster:
    """Decides which workers start and which leave.  It has no processes and no clock: events come with their time."""

    def __init__(self, size: int) -> None:
        self._places = [_Place(number) for number in range(1, size + 1)]
        self._generation = 0
        self._opened = False  # a worker has been ready
        self._stopped = False
        self.failures = 0
        """The number of workers that have ended by themselves."""

    def started(self, number: int, pid: Pid) -> None:
        self._places[number - 1].starting = pid

    def ready(self, pid: Pid, now: float) -> Pid | None:
        """A worker accepts connections.  Return the process that must now leave, if there is one."""
        place = self._place_of(pid)
        old, place.serving, place.starting = place.serving, pid, None
        if old is not None:
            place.leaving = old
        place.generation, place.ready_at, place.failed_starts = self._generation, now, 0
        self._opened = True
        return old

    def ended(self, pid: Pid, now: float) -> float | None:
        """A process has ended.  Return the seconds until a worker takes its place; None if none does."""
        place = self._place_of(pid)
        if pid == place.leaving:
            place.leaving = None
            return None
        starting = pid == place.starting
        if starting:
            place.starting = None
        else:
            place.serving = None
        if self._stopped:
            return None
        self.failures += 1
        if starting:
            if place.serving is not None:  # a restart, which has failed
                for each in self._places:
                    each.generation = self._generation
                return None
            place.failed_starts += 1
        elif now - place.ready_at >= _STEADY:
            place.failures = 0
        place.failures += 1
        pause = 0.0 if place.failures == 1 else min(_LONGEST_PAUSE, _PAUSE * 2.0 ** min(place.failures - 2, 10))
        place.start_at = now + pause
        return None if self.hopeless else pause

    def restart(self) -> None:
        """Replace all workers, one by one.  A restart that is at work begins again."""
        self._generation += 1

    def stop(self) -> None:
        """Start no more workers."""
        self._stopped = True

    def starts(self, now: float) -> list[int]:
        """Return the numbers of the workers that must start now."""
        if self._stopped or self.hopeless:
            return []
        due = [place.number for place in self._places if place.vacant and place.start_at <= now]
        if not self._opened:
            return [] if any(place.starting for place in self._places) else due[:1]
        if any(place.leaving or place.starting or not place.serving for place in self._places):
            return due  # a restart goes on when all workers serve
        return [place.number for place in self._places if place.generation < self._generation][:1]

    def wakes_at(self) -> float:
        """The time of the next start that no event causes; infinite if there is none."""
        if self._stopped or self.hopeless or (not self._opened and any(place.starting for place in self._places)):
            return math.inf
        return min((place.start_at for place in self._places if place.vacant), default=math.inf)

    @property
    def hopeless(self) -> bool:
        """Whether no worker can start: the very first one has failed, or each of them `_TRIES` times in a row."""
        if self._opened:
            return all(place.serving is None and place.failed_starts >= _TRIES for place in self._places)
        return any(place.failed_starts for place in self._places)

    @property
    def serving(self) -> int:
        """The number of workers that accept connections."""
        return sum(place.serving is not None for place in self._places)

    def _place_of(self, pid: Pid) -> _Place:
        return next(place for place in self._places if pid in (place.serving, place.starting, place.leaving))


# The processes.


class ConnectionCounts:
    """The numbers of connections of all workers, in memory that they share.  Each worker has a slot."""

    _NOT_ACCEPTING = 2**31 - 1

    def __init__(self, slots: int) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 4 * slots)).cast("i")
        for slot in range(slots):
            self.leave(slot)

    def join(self, slot: int) -> None:
        """The worker with this slot accepts connections, and has none yet."""
        self._numbers[slot] = 0

    def leave(self, slot: int) -> None:
        """The worker with this slot accepts no connections."""
        self._numbers[slot] = self._NOT_ACCEPTING

    def _note(self, slot: int, connections: int) -> None:
        if self._numbers[slot] != self._NOT_ACCEPTING:  # one that leaves accepts those that wait, and no others
            self._numbers[slot] = connections

    async def turn(self, slot: int, listening: trio.socket.SocketType, connections: Callable[[], int]) -> None:
        """Return when a connection waits that this worker may accept.  Another one may be quicker."""
        room = select.poll()
        room.register(listening.fileno(), select.POLLIN)
        while True:
            self._note(slot, connections())
            await trio.lowlevel.wait_readable(listening)
            self._note(slot, mine := connections())
            if mine <= min(self._numbers):
                return
            await trio.sleep(_TURN)
            if room.poll(0):
                return


@attrs.define(eq=False)
class _Process:
    """A worker process, and our end of the link to it."""

    number: int
    pid: Pid
    link: socket.socket
    slot: int
    unread: bytes = b""
    ready: bool = False
    asked: bool = False  # to end
    deadline: float = math.inf  # it is killed then

    def tell(self, *message: Any) -> None:
        # A link holds thousands of our messages, so it is full only if the worker is stopped.
        with suppress(OSError):
            self.link.send(json.dumps(message).encode() + b"\n")

    def messages(self) -> list[list[Any]] | None:
        """Read the messages that have come; None: the worker has closed its end."""
        try:
            data = self.link.recv(_LINE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None


@attrs.define(eq=False)
class _Count:
    """Statistics of all workers, while they are collected."""

    number: int
    deadline: float
    missing: set[Pid]
    asking: set[Pid]
    sums: list[int] = attrs.field(factory=list)
    answers: int = 0


class Supervisor:
    """Runs `work(number, link, connections, slot)` in forks of this process.

    `work` serves connections of `sockets`; its `link` leads to this supervisor.  `announce(local_url, url)` is called
    when all workers are ready.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        sockets: Sequence[socket.socket],
        work: Work,
        announce: Callable[[str, str], None],
        shutdown_timeout: float,
    ) -> None:
        self._name = name
        self._workers = workers
        self._sockets = sockets
        self._work = work
        self._announce = announce
        self._patience = shutdown_timeout + LAST + _GRACE
        self._roster = Roster(workers)
        self._connections = ConnectionCounts(workers + 1)  # during a restart there is one more process
        self._processes: dict[Pid, _Process] = {}
        self._poll = select.poll()
        self._came: deque[int] = deque()  # signals
        self._handlers: dict[int, Any] = {}  # those of the program
        self._terminal = os.isatty(0)
        self._announced = False
        self._status: int | None = None  # the exit status, once the workers are to end
        self._interrupts = 0
        self._count: _Count | None = None
        self._counts = 0

    def run(self) -> NoReturn:
        """Keep workers until a signal ends them.  Raises `SystemExit` with the exit status."""
        try:
            with unhindered_stderr(), self._signals():
                while self._status is None or self._processes:
                    self._step()
        finally:
            unbuffer()
        raise SystemExit(self._status)

    def _step(self) -> None:
        for number in self._roster.starts(time.monotonic()):
            self._start(number)
        if self._roster.hopeless and self._status is None:
            _log.error("%s ends, because its workers cannot start", self._name)
            self._end(1, "leave")
        if self._status is not None and not self._processes:
            return
        self._wait()
        while self._came:
            self._signalled(self._came.popleft())
        self._reap()
        self._keep_deadlines(time.monotonic())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Note signals in `_came` inside the block, and let them wake `_wait`."""
        woken, wake = socket.socketpair()
        with woken, wake:
            for each in (woken, wake):
                each.setblocking(False)
            self._woken = woken
            self._poll.register(woken, select.POLLIN)
            usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            usual |= {signal.SIGHUP: signal.SIG_DFL}
            handled = [number for number, handler in usual.items() if signal.getsignal(number) == handler]
            before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            try:
                for number in (*handled, signal.SIGCHLD):
                    self._handlers[number] = signal.signal(number, lambda number, _: self._came.append(number))
                yield
            finally:
                self._restore_signals(before)

    def _restore_signals(self, wakeup: int) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)

    # Starting.

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        slot = min({*range(self._workers + 1)} - {process.slot for process in self._processes.values()})
        for file in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
                file.flush()  # otherwise both processes would write the rest
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        try:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._become_worker(number, theirs, slot, mask)
        except OSError as error:
            _log.error("worker %d cannot be started: %s", number, error)
            ours.close()
            pid = -number  # of no process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._roster.started(number, pid)
        if pid < 0:
            self._roster.ended(pid, time.monotonic())
            return
        self._processes[pid] = _Process(number, pid, ours, slot)
        self._poll.register(ours, select.POLLIN)

    def _become_worker(self, number: int, link: socket.socket, slot: int, mask: Collection[int]) -> NoReturn:
        """Work until the end of this process.  The rest of the program runs in the supervisor only."""
        status: object = 1
        try:
            os.setpgid(0, 0)
            for process in self._processes.values():
                process.link.close()  # otherwise the end of the supervisor would not be the end of these links
            self._restore_signals(-1)
            self._woken.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._work(number, link, self._connections, slot)
            status = 0
        except SystemExit as error:
            status = error.code
        except KeyboardInterrupt:
            status = 130
        except BaseException:  # noqa: BLE001  # as at the end of any program
            sys.excepthook(*sys.exc_info())
        finally:
            if isinstance(status, str):
                print(status, file=sys.stderr)  # noqa: T201  # as the interpreter does
                status = 1
            with suppress(Exception):
                logging.shutdown()
            os._exit(status if isinstance(status, int) else 0)

    # Events.

    def _wait(self) -> None:
        """Wait for a signal, a message or the next deadline, and handle messages."""
        deadlines = [process.deadline for process in self._processes.values()]
        deadlines += [self._roster.wakes_at(), math.inf if self._count is None else self._count.deadline]
        until = min(deadlines)
        timeout = None if until == math.inf else max(0.0, math.ceil(1000 * (until - time.monotonic())))
        by_link = {process.link.fileno(): process for process in self._processes.values()}
        for fd, _ in self._poll.poll(timeout):
            if fd in by_link:
                self._read(by_link[fd])
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)

    def _read(self, process: _Process) -> None:
        messages = process.messages()
        if messages is None:
            self._poll.unregister(process.link)
            process.link.close()
            return
        for message in messages:
            match message:
                case ["ready", str(local), str(url)]:
                    self._ready(process, local, url)
                case ["sum"]:
                    self._begin_count(process)
                case ["count", int(number), list(values)]:
                    self._add_count(process, number, values)

    def _ready(self, process: _Process, local: str, url: str) -> None:
        process.ready = True
        _log.info("worker %d serves (process %d)", process.number, process.pid)
        leaving = self._roster.ready(process.pid, time.monotonic())
        if leaving is not None:
            self._ask(self._processes[leaving], "leave")
        if self._roster.serving == self._workers and not self._announced:
            self._announced = True
            self._announce(local, url)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            self._end(130)
            for process in self._processes.values():
                os.kill(process.pid, signal.SIGINT if self._interrupts < 3 else signal.SIGKILL)
        elif number == signal.SIGCHLD or self._status is not None:
            return
        elif number == signal.SIGHUP and not (self._terminal and not os.isatty(0)):
            _log.info("SIGHUP: the workers are replaced one by one")
            self._roster.restart()
        else:  # SIGTERM, or the terminal has gone
            self._end(143, "leave")

    def _end(self, status: int, *message: str) -> None:
        """Start no workers any more, and tell all of them to end."""
        self._status = status
        self._roster.stop()
        for each in self._sockets:
            if message:  # the workers serve the connections that wait to be accepted
                ignore_new(each)
            each.close()  # connections are refused when the workers have closed theirs
        for process in self._processes.values():
            self._ask(process, *message)

    def _ask(self, process: _Process, *message: str) -> None:
        """Tell a worker to end, and note when it must have ended."""
        if message:
            process.tell(*message)
        process.asked = True
        process.deadline = min(process.deadline, time.monotonic() + self._patience)

    def _reap(self) -> None:
        for pid, process in tuple(self._processes.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._processes[pid]
                self._connections.leave(process.slot)
                if process.link.fileno() >= 0:
                    self._read(process)  # its last messages
                if process.link.fileno() >= 0:
                    self._poll.unregister(process.link)
                    process.link.close()
                self._ended(process, os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, code: int) -> None:
        if self._count is not None:
            self._count.missing.discard(process.pid)
        how = f"has ended with status {code}"
        if code < 0:
            how = f"was killed by {next((each.name for each in signal.Signals if each == -code), f'signal {-code}')}"
        pause = self._roster.ended(process.pid, time.monotonic())
        if process.asked:
            _log.info("worker %d (process %d) %s", process.number, process.pid, how)
            return
        if not process.ready:
            how += " before it was ready"
        if pause is not None:
            how += f"; it is replaced in {pause:g} s" if pause else "; it is replaced now"
        elif self._roster.serving:
            how += "; the old workers stay"
        _log.error("worker %d (process %d) %s", process.number, process.pid, how)

    def _keep_deadlines(self, now: float) -> None:
        for process in self._processes.values():
            if process.deadline <= now:
                _log.error("worker %d (process %d) has not ended in time; it is killed", process.number, process.pid)
                os.kill(process.pid, signal.SIGKILL)
                process.deadline = now + _GRACE
        if self._count is not None and (not self._count.missing or self._count.deadline <= now):
            self._end_count(self._count)

    # Statistics.

    def _begin_count(self, asking: _Process) -> None:
        """Ask all workers for their statistics.  Workers that ask meanwhile get the same sum."""
        if self._count is not None:
            self._count.asking.add(asking.pid)
            return
        self._counts += 1
        asked = [process for process in self._processes.values() if process.ready]
        deadline = time.monotonic() + _ANSWER
        self._count = _Count(self._counts, deadline, {process.pid for process in asked}, {asking.pid})
        for process in asked:
            process.tell("count", self._counts)

    def _add_count(self, process: _Process, number: int, values: list[int]) -> None:
        count = self._count
        if count is None or number != count.number or process.pid not in count.missing:
            return  # too late
        count.missing.discard(process.pid)
        count.sums = [*map(sum, zip(values, count.sums or [0] * len(values), strict=True))]
        count.answers += 1

    def _end_count(self, count: _Count) -> None:
        self._count = None
        for pid in count.asking & self._processes.keys():
            self._processes[pid].tell("sum", count.sums, count.answers, len(count.missing), self._roster.failures)
