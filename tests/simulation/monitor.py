"""Calls, handler runs and outcomes of one world, and the rules that hold in every world.

| Rule | When it is checked |
|---|---|
| a call has exactly one outcome | when it has one, and at the end |
| the handler of a tool runs at most once for a call | when it begins |
| if the client says that a handler did not run, it does not run, also not later | at the end |
| an answer means that the handler ran to its end | with the answer |
| an answer belongs to its call, and the handler sees the principal of its client | in the handler, with the answer |
| progress rises, belongs to its call, and ends with it | with each report |
| a question reaches the client that made the call | in its callback |
| a log message reaches the client that made the call | in its callback |
| every listener gets each change | when the listening ends |
| a session in the store of the replicas is not lost | when a client says that it is |
| acknowledged data is read afterwards | with each read |
| a handler ends when its call has been cancelled or has timed out | some seconds later |
| before the first harmful fault each call is answered, in time | with its outcome |
| only documented exceptions are raised, and no error is logged | always |

`world` checks that nothing is left at the end.
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
    from tests.simulation.tasks import KnownTask

__all__ = ["ANSWERED", "Call", "ListenBlock", "Monitor", "Run", "ToolReportedFailure"]

ANSWERED, FAILED, ERROR, CANCELLED, TIMED_OUT = "answered", "tool failed", "error", "cancelled", "timed out"
# The outcome of a call that raised this exception; the first class that matches.
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (trio.TooSlowError, TIMED_OUT), (ConnectionFailed, "no connection"), (SessionLost, "session lost"),
    (NoResponse, "not answered"), (SessionClosed, "closed"), (Unauthorized, "unauthorized"),
    (AuthorizationFailed, "no access"), (InputUnavailable, "input not given"), (UsageError, "refused here"),
    (SubscriptionUnsupported, "nothing to hear"), (RequestError, ERROR), (McpError, "blamed"),
)  # fmt: skip
ASKING_KINDS = ("ask", "wizard", "quiz", "answer", "errand", "fetch")
TASK_KINDS = ("job", "quiz")  # calls that the server may turn into tasks
REPEATABLE_KINDS = ("prompt", "wizard", "quiz")
# Seconds until a cancelled handler has ended.  The cancellation reaches it within a round trip of the slowest line.  A
# handler that waits for an answer of its client is parked for `Limits.parked_seconds`.
STOP_SECONDS, PARKED_SECONDS = 30.0, 150.0
# Seconds until a client knows the task of its call, on the slowest line.
KNOWN_SECONDS = 15.0


class ToolReportedFailure(Exception):
    """The result of the call says that the tool has failed."""


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
    cancelled_from_outside: bool = False  # by a fault, or with its client
    harmful_faults: int = 0  # the number of them when the call ended
    sessions: set[str] = attrs.field(factory=set)  # of its client, in the store of the replicas when the call began
    value: Any = None

    @property
    def claims_that_it_did_not_run(self) -> bool:
        error = self.error
        if isinstance(error, NoResponse | SessionLost):
            return not error.request_may_have_run
        return isinstance(error, ConnectionFailed | UsageError)


@attrs.define(eq=False)
class Run:
    """One run of a handler."""

    token: str
    since: float
    ended: str = ""


@attrs.define(eq=False)
class ListenBlock:
    """A block that listens: the tick of its begin, and for each resource the tick of the last notification."""

    client: str
    uris: tuple[str, ...]
    since: int
    heard: dict[str, int] = attrs.field(factory=dict)


class Monitor:
    """Records the events of one world, and checks its rules; `now` is its time, `tick` counts the events."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.transcript: list[str] = []
        self.violations: list[str] = []
        self.calls: dict[str, Call] = {}
        self.runs: defaultdict[str, list[Run]] = defaultdict(list)
        self.notes: dict[str, int] = {}  # the data of the server, which outlives its process
        self.written: dict[str, int] = {}  # the data that the server has acknowledged
        self.published: list[tuple[int, str, float]] = []
        self.fired: Counter[str] = Counter()
        self.store = MemoryStore()  # of the current server
        self.tasks: dict[str, KnownTask] = {}
        self.harmful_faults = 0
        self.tick = 0
        self.can_ask = self.can_notify = True
        """Whether questions and changes can reach every client."""
        self.principals: Callable[[str], str | None] = lambda client: None
        """The principal that handlers must see for calls of this client."""
        self.front_principals: Callable[[str], str | None] = lambda client: None
        """The principal of this client at the server or relay that it calls."""
        self.has_replicas = False
        self.has_relay = False
        self.closed_at: defaultdict[str, list[float]] = defaultdict(list)
        """The times at which a client was closed or its process was killed; a program opens it again."""
        self.closable_responses = False
        """Whether a request has its own response, which the client may close before it begins."""
        self.loses_cancellations_of_tasks = False
        """Whether a client may close the response to tasks/cancel, which cancels that request, before it arrives."""
        self.sessions: Callable[[str], set[str]] = lambda client: set()
        """The sessions of this client in the store of the replicas."""
        self._numbers: Counter[str] = Counter()

    def trace(self, line: str) -> None:
        """Write a line of the transcript."""
        self.tick += 1
        self.transcript.append(f"{self._now():.3f} {line}")

    def report(self, rule: str) -> None:
        self.trace(f"BROKEN: {rule}")
        self.violations.append(rule)

    def check(self, holds: object, rule: str) -> None:
        if not holds:
            self.report(rule)

    # The client's side.

    def begin(self, client: str, kind: str, patience: float | None) -> Call:
        self._numbers[client] += 1
        token = f"{client}-{self._numbers[client]}-{kind}"
        call = self.calls[token] = Call(token, client, kind, kind == "fail", patience, self._now())
        call.sessions = self.sessions(client)
        self.trace(f"{token} begins")
        return call

    def answered(self, call: Call, value: Any) -> None:
        """Record the answer of a call: the value that its handler returned."""
        call.value = value
        runs = self.runs[call.token]
        if call.kind in REPEATABLE_KINDS:
            runs = runs[-1:]
        if call.kind in REPEATABLE_KINDS and self.has_replicas:  # the answer may be that of an earlier run
            runs = [run for run in self.runs[call.token] if run.ended == "done"][-1:]
        self.check(len(runs) == 1, f"{call.token} is answered, and its handler ran {len(runs)} times")
        self.check(all(run.ended == "done" for run in runs), f"{call.token} is answered, and its handler has not ended")
        returned = value.get("token") if isinstance(value, dict) else value
        self.check(returned == call.token, f"{call.token} got the answer of {returned!r}")

    def settle(self, call: Call, outcome: str, error: BaseException | None = None) -> None:
        self.check(not call.outcome, f"{call.token} has a second outcome, {outcome}, after {call.outcome}")
        call.outcome, call.error, call.harmful_faults = outcome, error, self.harmful_faults
        self.trace(f"{call.token} is {outcome}" + (f": {type(error).__name__}: {error}"[:200] if error else ""))
        if self.harmful_faults == 0:
            self._check_without_harm(call)

    def settle_with(self, call: Call, error: BaseException) -> None:
        """Record the outcome of a call that raised this error."""
        outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), None)
        if outcome is None or outcome == "blamed":
            self.unexpected(call.token, error)
        self.settle(call, outcome or "raised", error)
        if isinstance(error, SessionLost) and "does not know" in str(error) and call.sessions:
            gone = call.sessions - self.sessions(call.client)
            self.check(gone, f"{call.token} has lost its session, and it is in the store")

    def unexpected(self, subject: str, error: BaseException) -> None:
        self.report(f"{subject} raised {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}")

    def _check_without_harm(self, call: Call) -> None:
        """Before the first harmful fault only its own deadline may keep a call from its answer."""
        allowed = {ANSWERED}
        if call.fails:
            allowed = {FAILED}
        if call.cancelled_from_outside or call.kind == "hold":
            allowed |= {CANCELLED}
        if call.patience is not None:
            allowed |= {CANCELLED, TIMED_OUT}
        if call.kind == "ping":
            allowed |= {"refused here"}
        if call.kind in ASKING_KINDS and not self.can_ask:
            allowed |= {ERROR, FAILED}
        if call.kind == "listen" and not self.can_notify:
            allowed |= {ERROR, "nothing to hear"}
        self.check(
            call.outcome in allowed,
            f"{call.token} is {call.outcome} in a world without harm: {call.error!r}",
        )

    def progressed(self, call: Call, progress: float, message: str | None) -> None:
        self.check(not call.outcome, f"progress of {call.token} after it was {call.outcome}")
        self.check(progress > call.progress, f"progress of {call.token} goes from {call.progress} to {progress}")
        self.check(message in (None, call.token), f"{call.token} got the progress of {message}")
        call.progress = progress

    def check_question(self, client: str, token: str) -> None:
        """Check that a question of this call reached the client that made the call."""
        call = self.calls.get(token)
        self.check(call is not None and call.client == client, f"{client} is asked in the name of {token}")
        self.trace(f"{client} is asked by {token}")

    def check_log(self, client: str, token: str) -> None:
        call = self.calls.get(token)
        self.check(call is not None and call.client == client, f"{client} hears the log of {token}")

    # The server's side.

    @contextlib.contextmanager
    def handling(self, token: str, principal: str | None, *, again: bool = False) -> Iterator[Run]:
        """Record the run of a handler in this block.  With `again` the handler may run more than once for a call."""
        run = Run(token, self._now())
        self.runs[token].append(run)
        self.trace(f"{token} runs")
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
            self.trace(f"{token} has {run.ended or 'ended'}")

    def publish(self, uri: str) -> None:
        self.trace(f"{uri} has changed")
        self.published.append((self.tick, uri, self._now()))

    # Later.

    async def check_handler_ends(self, call: Call) -> None:
        """Check that the handler of a cancelled or late call ends soon, unless a harmful fault happens."""
        # A client may cancel a call before it knows that the call is a task; then the task continues (cancel-09).  The
        # client cancels the task when the late answer comes.  No late answer comes if the response is closed, or if
        # the client has ended.
        over = self._now()
        unknown = call.kind in TASK_KINDS and over <= call.since + KNOWN_SECONDS
        if self.harmful_faults or (unknown and self.closable_responses):
            return
        if call.kind in TASK_KINDS and self.loses_cancellations_of_tasks:
            return
        # A relay may ask during any call, and then parks the call.
        await trio.sleep(PARKED_SECONDS if call.kind in ASKING_KINDS or not self.can_ask else STOP_SECONDS)
        running = [run for run in self.runs[call.token] if not run.ended]
        if unknown and any(over <= left <= over + KNOWN_SECONDS for left in self.closed_at[call.client]):
            return
        if self.has_replicas:  # a cancellation may overtake its request while a replica fetches the session
            running = [run for run in running if run.since <= over]
        self.check(self.harmful_faults or not running, f"{call.token} was {call.outcome}, and its handler still runs")

    def check_changes(self, block: ListenBlock, forgiven: float) -> None:
        """Check that a block has got all changes, except those of the last `forgiven` seconds."""
        for tick, uri, at in self.published:
            if uri in block.uris and tick > block.since and at < self._now() - forgiven:
                heard = block.heard.get(uri, 0)
                self.check(heard > tick, f"{block.client} listened to {uri} and did not hear of the change at {at:.3f}")

    # At the end.

    def check_calls(self) -> None:
        for call in self.calls.values():
            self.check(call.outcome, f"{call.token} has no outcome")
            runs = self.runs[call.token]
            # A move with a task makes several requests; the claim may be about the last one only.
            if call.claims_that_it_did_not_run and call.token not in self.tasks:
                self.check(not runs, f"{call.token} is said to have not run ({call.error!r}), and it ran")
        for token, runs in self.runs.items():
            self.check(all(run.ended for run in runs), f"the handler of {token} is left")
