"""Calls, handler runs and outcomes of one world, and the rules that hold in every world.

| Rule | When it is checked |
|---|---|
| a call has exactly one outcome | when it has one, and at the end |
| the handler of a tool runs at most once for a call | when it begins |
| what is said to have not run did not run, nor will it | at the end |
| an answer means that the handler ran to its end | with the answer |
| an answer belongs to its call, and its client's principal made it | in the handler, with the answer |
| progress rises, belongs to its call, and ends with it | with each report |
| a question reaches the client that made the call | in its callback |
| a log message reaches the client whose call it is about | in its callback |
| every listener hears of a change | when the listening ends |
| a session that replicas have in their store is not lost | when a client says that it is |
| what was written and acknowledged is read afterwards | with each read |
| a handler ends when its call is given up | a while later |
| where nothing harmful has happened, a call is answered, and in time | with its outcome |
| nothing raises what it does not say, and no error is logged | always |

What must not be left at the end is in `world`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trio_mcp import McpError, RequestError, UsageError
from trio_mcp.errors import (
    ConnectionFailed,
    InputUnavailable,
    NoResponse,
    SessionClosed,
    SessionLost,
    SubscriptionUnsupported,
    Unauthorized,
)
from trio_mcp.oauth import AuthorizationFailed
from trio_mcp.stores import MemoryStore

if TYPE_CHECKING:
    from tests.simulation.tasks import Errand

__all__ = ["ANSWERED", "Book", "Call", "Listened", "Run", "ToolSaysNo"]

ANSWERED, FAILED, ERROR, CANCELLED, LATE = "answered", "tool failed", "error", "cancelled", "timed out"
# Which outcome a call has that raises this; the first that fits.
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (trio.TooSlowError, LATE), (ConnectionFailed, "no connection"), (SessionLost, "session lost"),
    (NoResponse, "not answered"), (SessionClosed, "closed"), (Unauthorized, "unauthorized"),
    (AuthorizationFailed, "no access"), (InputUnavailable, "input not given"), (UsageError, "refused here"),
    (SubscriptionUnsupported, "nothing to hear"), (RequestError, ERROR), (McpError, "blamed"),
)  # fmt: skip
ASKING = ("ask", "wizard", "quiz", "answer", "errand", "fetch")
AS_TASKS = ("job", "quiz")  # calls that the server may make tasks
REPEATED = ("prompt", "wizard", "quiz")
# Of a handler that is told to stop: it hears of it within a round trip of the slowest line, and one that waits for an
# answer of its client is parked for `Limits.parked_seconds`.
STOPS, PARKED = 30.0, 150.0
# Seconds until a client knows of the task that its call has become, on the slowest line.
KNOWN = 15.0


class ToolSaysNo(Exception):
    """The tool has failed, and said so in its result."""


@attrs.define(eq=False)
class Call:
    token: str
    client: str
    kind: str
    fails: bool  # its tool fails on purpose
    patience: float | None
    since: float
    outcome: str = ""
    error: BaseException | None = None
    progress: float = -1.0
    touched: bool = False  # a fault has cancelled it
    harms: int = 0  # that had happened when it was over
    sessions: set[str] = attrs.field(factory=set)  # of its client, in the store of replicas when it began
    value: Any = None

    @property
    def claims_that_it_did_not_run(self) -> bool:
        error = self.error
        if isinstance(error, NoResponse | SessionLost):
            return not error.request_may_have_run
        return isinstance(error, ConnectionFailed | UsageError)


@attrs.define(eq=False)
class Run:
    """A handler at work."""

    token: str
    since: float
    ended: str = ""


@attrs.define(eq=False)
class Listened:
    """A block that listens: from when on, and when it heard of what."""

    client: str
    uris: tuple[str, ...]
    since: int
    heard: dict[str, int] = attrs.field(factory=dict)


class Book:
    """The memory of one world; `now` is its time, `tick` counts what happens."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.lines: list[str] = []
        self.violations: list[str] = []
        self.calls: dict[str, Call] = {}
        self.runs: defaultdict[str, list[Run]] = defaultdict(list)
        self.notes: dict[str, int] = {}  # what the server stores; it outlives the server
        self.written: dict[str, int] = {}  # of that, what was acknowledged
        self.published: list[tuple[int, str, float]] = []
        self.fired: Counter[str] = Counter()
        self.store = MemoryStore()  # of the present server
        self.errands: dict[str, Errand] = {}
        self.harms = 0
        self.tick = 0
        self.asks = self.tells = True
        """Whether there is a way for questions, and for changes, to every client."""
        self.principals: Callable[[str], str | None] = lambda client: None
        """The principal that handlers must see for calls of this client."""
        self.fronts: Callable[[str], str | None] = lambda client: None
        """The principal of this client at the program that it calls, which may be a relay."""
        self.shared = False
        """Whether there are replicas."""
        self.relayed = False
        """Whether clients call a relay."""
        self.left: defaultdict[str, list[float]] = defaultdict(list)
        """When a client was closed, or its process was killed; a program opens it again."""
        self.exchanges = False
        """Whether a request has a response of its own, which its client may close before it begins."""
        self.sessions: Callable[[str], set[str]] = lambda client: set()
        """The sessions of this client in the store of replicas."""
        self._numbers: Counter[str] = Counter()

    def tell(self, line: str) -> None:
        """A line of the transcript."""
        self.tick += 1
        self.lines.append(f"{self._now():.3f} {line}")

    def broken(self, rule: str) -> None:
        self.tell(f"BROKEN: {rule}")
        self.violations.append(rule)

    def check(self, kept: object, rule: str) -> None:
        if not kept:
            self.broken(rule)

    # The client's side.

    def begin(self, client: str, kind: str, patience: float | None) -> Call:
        self._numbers[client] += 1
        token = f"{client}-{self._numbers[client]}-{kind}"
        call = self.calls[token] = Call(token, client, kind, kind == "fail", patience, self._now())
        call.sessions = self.sessions(client)
        self.tell(f"{token} begins")
        return call

    def answered(self, call: Call, value: Any) -> None:
        """With what its handler returned."""
        call.value = value
        runs = self.runs[call.token]
        if call.kind in REPEATED:
            runs = runs[-1:]
        if call.kind in REPEATED and self.shared:  # the first run may be the one that counts
            runs = [run for run in self.runs[call.token] if run.ended == "done"][-1:]
        self.check(len(runs) == 1, f"{call.token} is answered, and its handler ran {len(runs)} times")
        self.check(all(run.ended == "done" for run in runs), f"{call.token} is answered, and its handler has not ended")
        said = value.get("token") if isinstance(value, dict) else value
        self.check(said == call.token, f"{call.token} got the answer of {said!r}")

    def settle(self, call: Call, outcome: str, error: BaseException | None = None) -> None:
        self.check(not call.outcome, f"{call.token} has a second outcome, {outcome}, after {call.outcome}")
        call.outcome, call.error, call.harms = outcome, error, self.harms
        self.tell(f"{call.token} is {outcome}" + (f": {type(error).__name__}: {error}"[:200] if error else ""))
        if self.harms == 0:
            self._check_calm(call)

    def settle_with(self, call: Call, error: BaseException) -> None:
        """The outcome of a call that raised this."""
        outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), None)
        if outcome is None or outcome == "blamed":
            self.unexpected(call.token, error)
        self.settle(call, outcome or "raised", error)
        if isinstance(error, SessionLost) and "does not know" in str(error) and call.sessions:
            gone = call.sessions - self.sessions(call.client)
            self.check(gone, f"{call.token} has lost its session, and it is in the store")

    def unexpected(self, what: str, error: BaseException) -> None:
        self.broken(f"{what} raised {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}")

    def _check_calm(self, call: Call) -> None:
        """No harmful fault has happened yet, so only its own deadline may keep a call from its answer."""
        fine = {ANSWERED}
        if call.fails:
            fine = {FAILED}
        if call.touched or call.kind == "hold":
            fine |= {CANCELLED}
        if call.patience is not None:
            fine |= {CANCELLED, LATE}
        if call.kind == "ping":
            fine |= {"refused here"}
        if call.kind in ASKING and not self.asks:
            fine |= {ERROR, FAILED}
        if call.kind == "listen" and not self.tells:
            fine |= {ERROR, "nothing to hear"}
        self.check(
            call.outcome in fine,
            f"{call.token} is {call.outcome} in a world without harm: {call.error!r}",
        )

    def progressed(self, call: Call, progress: float, message: str | None) -> None:
        self.check(not call.outcome, f"progress of {call.token} after it was {call.outcome}")
        self.check(progress > call.progress, f"progress of {call.token} goes from {call.progress} to {progress}")
        self.check(message in (None, call.token), f"{call.token} got the progress of {message}")
        call.progress = progress

    def asked(self, client: str, token: str) -> None:
        """A callback of the client was asked in the name of this call."""
        call = self.calls.get(token)
        self.check(call is not None and call.client == client, f"{client} is asked in the name of {token}")
        self.tell(f"{client} is asked by {token}")

    def logged(self, client: str, token: str) -> None:
        call = self.calls.get(token)
        self.check(call is not None and call.client == client, f"{client} hears the log of {token}")

    # The server's side.

    @contextlib.contextmanager
    def handling(self, token: str, principal: str | None, *, again: bool = False) -> Iterator[Run]:
        """Around the body of a handler; `again`: one that may be run more than once for a call."""
        run = Run(token, self._now())
        self.runs[token].append(run)
        self.tell(f"{token} runs")
        owner = token.partition("-")[0]
        self.check(again or len(self.runs[token]) == 1, f"{token} runs {len(self.runs[token])} times")
        self.check(token in self.calls or owner == "hostile", f"{token} runs without a call")
        if owner != "hostile":
            wanted = self.principals(owner)
            self.check(principal == wanted, f"{token} runs for {principal!r}, not for {wanted!r}")
        try:
            yield run
            run.ended = "done"
        except trio.Cancelled:
            run.ended = "cancelled"
            raise
        except BaseException:
            run.ended = "failed"
            raise
        finally:
            self.tell(f"{token} has {run.ended or 'ended'}")

    def publish(self, uri: str) -> None:
        self.tell(f"{uri} has changed")
        self.published.append((self.tick, uri, self._now()))

    # What takes a while.

    async def watch(self, call: Call) -> None:
        """For a call that was given up: its handler ends soon, unless something harmful happens meanwhile."""
        # A client may give up before it knows that its call is a task, which then goes on (cancel-09).  It cancels the
        # task when the late answer comes.  A response that it has closed brings none, nor does the end of the client.
        over = self._now()
        unknown = call.kind in AS_TASKS and over <= call.since + KNOWN
        if self.harms or (unknown and self.exchanges):
            return
        # A relay may ask in the course of any call, which it then parks.
        await trio.sleep(PARKED if call.kind in ASKING or not self.asks else STOPS)
        running = [run for run in self.runs[call.token] if not run.ended]
        if unknown and any(over <= left <= over + KNOWN for left in self.left[call.client]):
            return
        if self.shared:  # a replica that has to look for the session serves a request after its cancellation has come
            running = [run for run in running if run.since <= over]
        self.check(self.harms or not running, f"{call.token} was {call.outcome}, and its handler still runs")

    def listened(self, block: Listened, forgiven: float) -> None:
        """A block has ended by itself; changes of the last `forgiven` seconds may have been under way."""
        for tick, uri, at in self.published:
            if uri in block.uris and tick > block.since and at < self._now() - forgiven:
                heard = block.heard.get(uri, 0)
                self.check(heard > tick, f"{block.client} listened to {uri} and did not hear of the change at {at:.3f}")

    # At the end.

    def check_calls(self) -> None:
        for call in self.calls.values():
            self.check(call.outcome, f"{call.token} has no outcome")
            runs = self.runs[call.token]
            # A move with a task makes several requests; the last one may not have run.
            if call.claims_that_it_did_not_run and call.token not in self.errands:
                self.check(not runs, f"{call.token} is said to have not run ({call.error!r}), and it ran")
        for token, runs in self.runs.items():
            self.check(all(run.ended for run in runs), f"the handler of {token} is left")
