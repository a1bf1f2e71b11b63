"""What a seed decides, as plain data: so a world can be played again, printed, and made smaller.

A plan is drawn once, before anything runs.  It has no references to connections or tasks that exist; a fault names its
victim by a number (the third connection, the second client) and its time by a number of bytes or of task steps.  So a
plan stays a plan when a fault or a move is taken out of it.
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
# A server may answer a request by HTTP before it has read all of it, so there an answer of some lines has to fit.
NARROW = (1, 16, *WINDOWS)
MODEM = 16384  # bytes per second
DELAYS = (0.0, 0.0, 0.0, 0.001, 0.05, 1.5)

# The last two are as long as a tight server keeps an idle connection, and longer than it keeps an idle session: then a
# request meets the end of what it is sent by.
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
# Faults of worlds with replicas, beside those.
SHARED_FAULTS = {"away": 5, "outage": 3, "pause": 6, "crash": 4, "restart": 2, "drain": 2}
# A plan without a relay over one of these may get replicas.
SHARED = frozenset({"http", "json", "websocket"})
SHARE = 0.42  # of the worlds that may have replicas
LAGS = (0.0, 0.0, 0.001, 0.02, 0.1)


@attrs.frozen
class Move:
    """One thing that a client does, `wait` seconds after it began the one before.

    `size` is how much there is of it: bytes, reports, seconds.  `patience` is the time that it may take, None for any;
    `by_option` says whether that is given as an option of the call or as a cancel scope.
    """

    kind: str
    wait: float = 0.0
    size: int = 1
    patience: float | None = None
    by_option: bool = False


@attrs.frozen
class Client:
    """A program that calls."""

    moves: tuple[Move, ...]


@attrs.frozen
class Line:
    """What every connection is like: a read returns at most `chunk` bytes, `window` may be on the way, and each byte
    takes `delay` seconds.  With `splits` a read returns any number of bytes up to `chunk`."""

    chunk: int = 65536
    window: int = 65536
    delay: float = 0.0
    splits: bool = False


@attrs.frozen
class Fault:
    """What goes wrong.

    | Kind | `victim` | `at` | what happens |
    |---|---|---|---|
    | cut, end | connection | bytes | it is reset, or ends as a stream that is closed |
    | dead | connection | bytes | nothing arrives any more; the system gives it up after two minutes |
    | stall | connection | bytes | nothing arrives for `seconds` |
    | slow | connection | bytes | the reader takes `seconds` for each of its next reads |
    | unreachable | port | steps | for `seconds` connections are refused, or get no reply |
    | crash, restart, drain | host | steps | it dies; it is cancelled; it drains; it is back after `seconds` |
    | kill, leave | client | steps | its process dies with its connections; it is cancelled and closes them |
    | revoke | - | steps | all access tokens become invalid |
    | cancel | call | steps | one of the calls that run then is cancelled |
    | hostile | - | steps | a peer connects that sends nonsense, or asks and never reads |
    | pause | host | steps | its process stands still for `seconds`, and then goes on |
    | away, outage | host | steps | for `seconds` the shared store cannot be reached by it; by all |

    `back` is the direction, for what has one: from the server to the client.  A store that is away says nothing for a
    while, and not at once that it fails, if `back`.
    """

    kind: str
    at: int
    victim: int = 0
    seconds: float = 0.0
    back: bool = False


@attrs.frozen
class Plan:
    """A world before it runs.  `order` is the seed of the order of tasks and of all that is random within it.

    `behind` is the transport from a relay to the server, None for no relay; `behind_era` its revision.  With `probe`
    the client finds out which era the server is of, and after `pings` seconds it looks whether the server is there.
    Where the server is `tight` it has room for very little at a time, and closes what idles before its clients do.
    If `kept`, the store of its tasks outlives it.

    With more than one of `replicas`, so many processes serve behind a proxy and share a store, in which each call takes
    `lag` seconds.  Each connection goes to the next of them, or each request by HTTP if they are `scattered`.
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
    """The plan of a seed."""
    dice = random.Random(seed)
    transport = dice.choice(TRANSPORTS)
    # HTTP+SSE exists in the older era only.
    era = LEGACY if transport == "sse" else MODERN if dice.random() < 0.55 else LEGACY
    behind = dice.choice(("http", "json", "websocket", "sse")) if dice.random() < 0.12 else None
    behind_era = LEGACY if behind == "sse" else dice.choice(ERAS)
    oauth = transport != "stream" and dice.random() < 0.15
    # Each world has only some kinds of moves and faults: in a mixture of all, rare combinations stay rare.
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
    return _share(plan, random.Random(f"replicas {seed}"))


def _share(plan: Plan, dice: random.Random) -> Plan:
    """Some of the plans, with replicas.  With dice of its own, so that all other plans stay what they are."""
    if plan.transport not in SHARED or plan.behind is not None or plan.oauth or dice.random() >= SHARE:
        return plan
    calm = dice.random() < 0.2
    kinds = _some(dice, SHARED_FAULTS, least=2)
    faults = plan.faults if calm else plan.faults + tuple(_shared_fault(dice, kinds) for _ in range(dice.randint(1, 5)))
    return attrs.evolve(
        plan,
        faults=tuple(each for each in faults if not calm or each.kind in HARMLESS),
        kept=True,
        replicas=dice.choice((2, 2, 3)),
        scattered=plan.transport != "websocket" and dice.random() < 0.6,
        lag=dice.choice(LAGS),
    )


def _shared_fault(dice: random.Random, kinds: dict[str, int]) -> Fault:
    fault = _fault(dice, kinds)
    # Half of these are longer than the leases of replicas and of tasks.
    return attrs.evolve(fault, seconds=round(dice.uniform(0.5, 60.0), 3)) if fault.kind == "pause" else fault


def _some(dice: random.Random, weights: dict[str, int], least: int) -> dict[str, int]:
    possible = sorted(name for name in weights if weights[name])
    return {name: weights[name] for name in dice.sample(possible, dice.randint(least, len(possible)))}


def _pick(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]


def _log(dice: random.Random, low: float, high: float) -> float:
    """A number of any order of magnitude between the two."""
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _line(dice: random.Random, windows: tuple[int, ...]) -> Line:
    if dice.random() < 0.5:
        return Line()
    chunk, window, delay = dice.choice(CHUNKS), dice.choice(windows), dice.choice(DELAYS)
    # No line is slower than the slowest modem, which all deadlines of HTTP are made for.
    return Line(chunk, max(window, round(delay * MODEM)), delay, dice.random() < 0.5)


_SIZES: dict[str, tuple[float, float]] = {
    "echo": (1, 3000), "big": (2000, 100_000), "count": (1, 12), "follow": (1, 8), "hold": (1, 100), "listen": (1, 60),
    "errand": (1, 60), "drop": (1, 9),
}  # fmt: skip


def _move(dice: random.Random, kinds: dict[str, int]) -> Move:
    kind = _pick(dice, kinds)
    wait = dice.choice(WAITS)
    size = round(_log(dice, *_SIZES[kind])) if kind in _SIZES else 1
    impatient = 0.7 if kind == "hold" else 0.15
    patience = round(_log(dice, 0.001, 20.0), 3) if dice.random() < impatient and kind != "listen" else None
    return Move(kind, wait, size, patience, patience is not None and dice.random() < 0.5)


def _fault(dice: random.Random, kinds: dict[str, int]) -> Fault:
    kind = _pick(dice, kinds)
    in_bytes = kind in ("cut", "end", "dead", "stall", "slow")
    at = round(_log(dice, 1, 9000)) if in_bytes else round(_log(dice, 20, 2500))
    victim = round(_log(dice, 1, 12)) - 1 if in_bytes else dice.randrange(12)
    seconds = round(_log(dice, 0.01, 60.0), 3)
    return Fault(kind, at, victim, seconds, dice.random() < 0.5)


def written(value: Any) -> str:
    """A plan, or a part of it, as Python has it: without what is as by default."""
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
