"""The plan that a seed decides, as plain data: so a world can be repeated, printed, and made smaller.

A plan is drawn once, before the world runs.  It has no references to connections or tasks.  A fault names its victim by
a number (the third connection, the second client) and its time by a number of bytes or of task steps.  So a plan stays
valid when a fault or a move is removed from it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import attrs

__all__ = [
    "ERAS",
    "FAULTS",
    "LEGACY",
    "MODERN",
    "MOVES",
    "TRANSPORTS",
    "Client",
    "Fault",
    "Line",
    "Move",
    "Plan",
    "draw",
]

LEGACY, MODERN = ERAS = ("2025-11-25", "2026-07-28")
TRANSPORTS = ("stream", "http", "json", "websocket", "sse")
CHUNKS = (1, 2, 7, 64, 512, 4096, 65536)
WINDOWS = (700, 4096, 65536)
# Windows for byte streams only: a server may answer an HTTP request before it has read all of it, so the window of HTTP
# needs room for an answer of some lines.
NARROW = (1, 16, *WINDOWS)
MODEM = 16384  # bytes per second
DELAYS = (0.0, 0.0, 0.0, 0.001, 0.05, 1.5)

# The last two: as long as a tight server keeps an idle connection, and longer than it keeps an idle session.  Then a
# request is sent while the server closes its connection or session.
WAITS = (0.0,) * 9 + (0.01,) * 3 + (0.3,) * 3 + (2.0,) * 2 + (20.0, 45.0)

# The work of a client, and how often each kind is drawn.
MOVES = {
    "echo": 9, "count": 6, "hold": 6, "ask": 6, "plain": 4, "fail": 3, "put": 5, "read": 4, "big": 2, "tools": 3,
    "listen": 3, "follow": 3, "away": 2, "wizard": 3, "prompt": 2, "complete": 2, "log": 2, "ping": 1,
    "job": 3, "quiz": 3, "task": 3, "errand": 4, "fetch": 3, "answer": 3, "drop": 3, "peek": 3,
}  # fmt: skip

# Faults, and how often each kind is drawn.  Without a fault that is not in HARMLESS every call must be answered.
FAULTS = {
    "cut": 6, "end": 3, "dead": 3, "stall": 3, "slow": 3, "unreachable": 3, "crash": 4, "restart": 3, "kill": 4,
    "drain": 2, "revoke": 2, "cancel": 8, "leave": 3, "hostile": 3,
}  # fmt: skip
HARMLESS = frozenset({"cancel", "leave", "hostile"})
# Additional faults of worlds with replicas.
REPLICA_FAULTS = {"away": 5, "outage": 3, "pause": 6, "crash": 4, "restart": 2, "drain": 2}
# The transports of worlds with replicas; these worlds have no relay.
REPLICA_TRANSPORTS = frozenset({"http", "json", "websocket"})
REPLICAS_SHARE = 0.42  # of the worlds that may have replicas
LAGS = (0.0, 0.0, 0.001, 0.02, 0.1)


@attrs.frozen
class Move:
    """One action of a client, `wait` seconds after it began the one before.

    `size` is a number of bytes, reports or seconds.  `patience` is its timeout in seconds, or None.  With `by_option`
    the timeout is an option of the call, otherwise a cancel scope.
    """

    kind: str
    wait: float = 0.0
    size: int = 1
    patience: float | None = None
    by_option: bool = False


@attrs.frozen
class Client:
    """A program with a client."""

    moves: tuple[Move, ...]


@attrs.frozen
class Line:
    """The properties of every connection.

    A read returns at most `chunk` bytes, with `splits` a random number up to `chunk`.  At most `window` bytes may be on
    the way, and each byte takes `delay` seconds.
    """

    chunk: int = 65536
    window: int = 65536
    delay: float = 0.0
    splits: bool = False


@attrs.frozen
class Fault:
    """A fault.

    | Kind | `victim` | `at` | Effect |
    |---|---|---|---|
    | cut, end | connection | bytes | it is reset; it ends as a stream that is closed |
    | dead | connection | bytes | no more bytes arrive; the system resets it after two minutes |
    | stall | connection | bytes | no bytes arrive for `seconds` |
    | slow | connection | bytes | the reader takes `seconds` for each of its next reads |
    | unreachable | port | steps | for `seconds` connections are refused, or get no reply |
    | crash, restart, drain | service | steps | it is killed; it is cancelled; it drains; it is back after `seconds` |
    | kill, leave | client | steps | its process dies with its connections; it is cancelled and closes them |
    | revoke | - | steps | all access tokens become invalid |
    | cancel | call | steps | one of the running calls is cancelled |
    | hostile | - | steps | a peer connects that sends nonsense, or sends requests and never reads |
    | pause | service | steps | its process pauses for `seconds`, and then continues |
    | away, outage | service | steps | for `seconds` the shared store cannot be reached, by it or by all |

    `back` is the direction of a fault of a connection: from the server to the client.  For a port or the store, `back`
    means that calls get no reply for a while; otherwise they fail at once.
    """

    kind: str
    at: int
    victim: int = 0
    seconds: float = 0.0
    back: bool = False


@attrs.frozen
class Plan:
    """A world before it runs.  `order` is the seed of the order of tasks and of all random numbers in the world.

    `behind` is the transport from a relay to the server, or None without a relay; `behind_era` is its revision.  With
    `probe` the client detects the era of the server.  The client pings after `pings` seconds of silence.  A `tight`
    server has small limits, and closes idle connections and sessions before its clients do.  With `kept` the store of
    its tasks outlives the server.

    `replicas` is the number of processes behind a proxy.  They share a store, in which each call takes `lag` seconds.
    The proxy gives each connection to the next process, or with `scattered` each HTTP request.
    """

    order: int
    transport: str
    era: str
    clients: tuple[Client, ...]
    line: Line = Line()
    faults: tuple[Fault, ...] = ()
    behind: str | None = None
    behind_era: str = MODERN
    oauth: bool = False
    probe: bool = False
    tight: bool = False
    pings: float | None = None
    kept: bool = False
    replicas: int = 1
    scattered: bool = False
    lag: float = 0.0

    @property
    def moves(self) -> int:
        return sum(len(client.moves) for client in self.clients)


def draw(seed: int) -> Plan:
    """Draw the plan of a seed."""
    dice = random.Random(seed)
    transport = dice.choice(TRANSPORTS)
    # HTTP+SSE exists in the older era only.
    era = LEGACY if transport == "sse" else MODERN if dice.random() < 0.55 else LEGACY
    behind = dice.choice(("http", "json", "websocket", "sse")) if dice.random() < 0.12 else None
    behind_era = LEGACY if behind == "sse" else dice.choice(ERAS)
    oauth = transport != "stream" and dice.random() < 0.15
    # Each world has only some kinds of moves and faults, because in a mixture of all kinds rare combinations stay rare.
    moves = _some(dice, MOVES, least=5)
    faults = _some(dice, FAULTS if oauth else {**FAULTS, "revoke": 0}, least=4)
    clients = [
        Client(tuple(_move(dice, moves) for _ in range(dice.randint(8, 17)))) for _ in range(dice.choice((1, 2, 2, 3)))
    ]
    count = 0 if dice.random() < 0.08 else dice.randint(3, 9)
    plan = Plan(
        order=seed,
        transport=transport,
        era=era,
        clients=tuple(clients),
        line=_line(dice, NARROW if transport == "stream" and behind is None else WINDOWS),
        faults=tuple(_fault(dice, faults) for _ in range(count)),
        behind=behind,
        behind_era=behind_era,
        oauth=oauth,
        probe=dice.random() < 0.2,
        tight=dice.random() < 0.08,
        pings=7.0 if dice.random() < 0.1 else None,
        kept=dice.random() < 0.6,
    )
    return _with_replicas(plan, random.Random(f"replicas {seed}"))


def _with_replicas(plan: Plan, dice: random.Random) -> Plan:
    """Add replicas to some plans.  It has its own random numbers, so that the other plans stay the same."""
    if (
        plan.transport not in REPLICA_TRANSPORTS
        or plan.behind is not None
        or plan.oauth
        or dice.random() >= REPLICAS_SHARE
    ):
        return plan
    calm = dice.random() < 0.2
    kinds = _some(dice, REPLICA_FAULTS, least=2)
    faults = (
        plan.faults if calm else plan.faults + tuple(_replica_fault(dice, kinds) for _ in range(dice.randint(1, 5)))
    )
    return attrs.evolve(
        plan,
        faults=tuple(each for each in faults if not calm or each.kind in HARMLESS),
        kept=True,
        replicas=dice.choice((2, 2, 3)),
        scattered=plan.transport != "websocket" and dice.random() < 0.6,
        lag=dice.choice(LAGS),
    )


def _replica_fault(dice: random.Random, kinds: dict[str, int]) -> Fault:
    fault = _fault(dice, kinds)
    # Half of the pauses are longer than the leases of replicas and of tasks.
    return attrs.evolve(fault, seconds=round(dice.uniform(0.5, 60.0), 3)) if fault.kind == "pause" else fault


def _some(dice: random.Random, weights: dict[str, int], least: int) -> dict[str, int]:
    possible = sorted(name for name in weights if weights[name])
    return {name: weights[name] for name in dice.sample(possible, dice.randint(least, len(possible)))}


def _pick(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]


def _log_uniform(dice: random.Random, low: float, high: float) -> float:
    """Draw a number between the two, with equal weight for each order of magnitude."""
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _line(dice: random.Random, windows: tuple[int, ...]) -> Line:
    if dice.random() < 0.5:
        return Line()
    chunk, window, delay = dice.choice(CHUNKS), dice.choice(windows), dice.choice(DELAYS)
    # No line is slower than the slowest modem, because the deadlines of HTTP allow for that modem only.
    return Line(chunk, max(window, round(delay * MODEM)), delay, dice.random() < 0.5)


_SIZES: dict[str, tuple[float, float]] = {
    "echo": (1, 3000), "big": (2000, 100_000), "count": (1, 12), "follow": (1, 8), "hold": (1, 100), "listen": (1, 60),
    "errand": (1, 60), "drop": (1, 9),
}  # fmt: skip


def _move(dice: random.Random, kinds: dict[str, int]) -> Move:
    kind = _pick(dice, kinds)
    wait = dice.choice(WAITS)
    size = round(_log_uniform(dice, *_SIZES[kind])) if kind in _SIZES else 1
    impatient = 0.7 if kind == "hold" else 0.15
    patience = round(_log_uniform(dice, 0.001, 20.0), 3) if dice.random() < impatient and kind != "listen" else None
    return Move(kind, wait, size, patience, patience is not None and dice.random() < 0.5)


def _fault(dice: random.Random, kinds: dict[str, int]) -> Fault:
    kind = _pick(dice, kinds)
    in_bytes = kind in ("cut", "end", "dead", "stall", "slow")
    at = round(_log_uniform(dice, 1, 9000)) if in_bytes else round(_log_uniform(dice, 20, 2500))
    victim = round(_log_uniform(dice, 1, 12)) - 1 if in_bytes else dice.randrange(12)
    seconds = round(_log_uniform(dice, 0.01, 60.0), 3)
    return Fault(kind, at, victim, seconds, dice.random() < 0.5)


def written(value: Any) -> str:
    """Return a plan, or a part of it, as Python source without the fields that have their defaults."""
    if isinstance(value, tuple):
        inside = ", ".join(map(written, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if not attrs.has(type(value)):
        return repr(value)
    fields = [
        f"{field.name}={written(getattr(value, field.name))}"
        for field in attrs.fields(type(value))
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(fields)})"
