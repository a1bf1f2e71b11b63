"""The rows of the benchmark, and their aims.

An aim is a ratio to the bare program, and to the better one of the official SDKs in the same run.  Most aims come from
figures that were measured side by side on one machine (`Seen`), and from a figure to reach on that machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import attrs

from tests.bench import commands, core, measures
from tests.bench.measures import Prepare
from tests.bench.works import WORKS

__all__ = ["ROWS", "Aim", "Row", "Seen", "chosen"]

ALL = ("ours", "bare", "typescript", "python")
SPEED = ("ours", "ours+orjson", "bare", "typescript", "python")
CLIENTS = ("ours", "bare", "python")
ALONE = ("ours", "bare")
ERAS = ("modern", "session")


@attrs.frozen
class Aim:
    """The most that ours may cost, as a ratio to the cost of others; None: no aim."""

    bare: float | None = None
    peer: float | None = None
    most: float | None = None
    """In the unit of the row, for a row without a comparison."""


@attrs.frozen
class Seen:
    """The costs of others on one machine."""

    bare: float | None = None
    typescript: float | None = None
    python: float | None = None

    def aim(self, reach: float) -> Aim:
        peers = [each for each in (self.typescript, self.python) if each is not None]
        return Aim(reach / self.bare if self.bare else None, reach / min(peers) if peers else None)


@attrs.frozen
class Row:
    name: str
    unit: str
    prepare: Prepare
    aims: Mapping[str, Aim] = attrs.field(factory=dict)
    """The aim of each of our subjects that is measured."""
    subjects: Sequence[str] = ALL
    rounds: int | None = None
    """The largest number of rounds, if a round takes long or the figure hardly varies."""
    rate: bool = False
    """Whether the figure is shown as a rate, which is 1,000 divided by the cost."""
    sparse: bool = False
    """Whether the row is left out unless it is named, because similar rows are measured."""
    warm: bool = True
    """Whether some seconds of the same load come first, so that a just-in-time compiler has compiled the code."""

    def asked(self, words: Sequence[str]) -> bool:
        own = self.name.lower().replace(",", "").split()
        return all(word.lower().replace(",", "") in own for word in words) if words else not self.sparse


def _stdio() -> list[Row]:
    echo = Seen(10.3, 20, 333)
    rows = []
    for era in ERAS:
        both = {"ours": echo.aim(26), "ours+orjson": echo.aim(20)}
        rows.append(Row(f"stdio, echo, {era}, 64 in flight", "µs", partial(measures.stdio_calls, era, 64), both, SPEED))
    latency = {"ours": Seen(50, 54, 335).aim(65)}
    rows.append(
        Row(
            "stdio, echo, modern, 1 in flight, median by the clock",
            "µs",
            partial(measures.stdio_latency, "modern"),
            latency,
        )
    )
    reports = {"ours": Seen(2.6, 13, 113).aim(6)}
    rows.append(
        Row("stdio, 2,000 reports of progress, each", "µs", partial(measures.stdio_reports, "session", 2000), reports)
    )
    listed = {"ours": Seen(540, 4550, 3600).aim(80)}
    rows.append(Row("stdio, tools/list of 200 tools", "µs", partial(measures.stdio_list, "session", 200), listed))
    return rows


def _http() -> list[Row]:
    seen = {
        ("json", "modern"): Seen(80, 240, 177).aim(95),
        ("json", "session"): Seen(80, 189, 284).aim(100),
        ("sse", "session"): Seen(None, 177, 535).aim(120),
    }
    rows = []
    for style in ("json", "sse"):
        for era in ERAS:
            for many in (1, 16, 64):
                aims = {"ours": seen.get((style, era), Aim()) if many == 64 else Aim()}
                name = f"HTTP, {style.upper()}, {era}, {many} connection{'s' if many > 1 else ''}"
                prepare = partial(measures.http_calls, style, era, many)
                # The Python SDK always answers a modern call without reports by JSON.
                subjects = ALL if (style, era) != ("sse", "modern") else ("ours", "bare", "typescript")
                rows.append(Row(name, "µs", prepare, aims, subjects, sparse=many < 64))
    reports = {"ours": Seen(16, 18.5, 36).aim(10)}
    for era in ERAS:
        name = f"HTTP, SSE, {era}, 2,000 reports of progress, each"
        rows.append(Row(name, "µs", partial(measures.http_reports, era, 2000), reports))
    return rows


def _works() -> list[Row]:
    """The aim is the better SDK; with orjson for the row that is nearly all JSON."""
    rows = []
    for era in ERAS:
        for work in WORKS:
            large = work == "a text of 5 KB"
            subjects = SPEED if large else ALL
            aims = {"ours+orjson" if large else "ours": Aim(peer=1.0)}
            pipes, connections = (partial(each, work, era, 64) for each in (measures.stdio_works, measures.http_works))
            rows.append(Row(f"stdio, {work}, {era}, 64 in flight", "µs", pipes, aims, subjects))
            rows.append(Row(f"HTTP, {work}, {era}, 64 connections", "µs", connections, aims, subjects))
    return sorted(rows, key=lambda row: row.name.startswith("HTTP"))


def _workers() -> list[Row]:
    """Two processes on two cores, compared with one."""
    name = "HTTP, calls that compute for 2 ms, 2 workers beside 1 process, by the clock"
    return [Row(name, "ms", partial(measures.http_burning, 2, 2.0), {"ours": Aim(1 / 1.8)}, ALONE)]


def _tasks() -> list[Row]:
    """No aim for SQLite and Redis: the disk and the Redis process decide."""
    rows = []
    for store in ("memory", "sqlite", "redis"):
        name = f"stdio, tasks in {store}, created, finished and fetched, 64 in flight"
        aims = {"ours": Aim(peer=1.0) if store == "memory" else Aim()}
        subjects = ("ours", "python") if store == "memory" else ("ours",)
        rows.append(Row(name, "tasks/s", partial(measures.stdio_tasks, store, 64), aims, subjects, rate=True))
    return rows


def _listeners() -> list[Row]:
    """A server with many listeners.  The SDKs cannot open so many listen streams, so there is no comparison."""
    rows, number, aims = [], 5000, {"ours": Aim(most=10.0)}
    for era, kind in (("session", "GET"), ("modern", "listen")):
        notice = partial(measures.http_notice, era, number)
        idle = partial(measures.keep_alives, era, number)
        longest = f"HTTP, delay of a call by a notice to {number:,} {kind} streams"
        rows.append(Row(longest, "ms", notice, aims, ("ours",), warm=False))
        every = f"HTTP, keep-alives of {number:,} idle {kind} streams, each second"
        rows.append(Row(every, "ms", idle, aims, ("ours",), rounds=2, warm=False))
    return rows


def _replicas() -> list[Row]:
    """Three processes, compared with one that has all listeners and no store.  No aim: they share the cores with the
    load."""
    rows = []
    for store, name in (("sqlite", "SQLite"), ("redis", "Redis")):
        for era, kind in (("session", "GET"), ("modern", "listen")):
            row = f"HTTP, a notice to 1,000 {kind} streams, 3 replicas on {name}, by the clock"
            prepare = partial(measures.replicas_notice, store, era, 1000, 3)
            rows.append(Row(row, "ms", prepare, subjects=ALONE, warm=False))
    return rows


def _scale() -> list[Row]:
    stdio, http = {"ours": Seen(410, 374, 1860).aim(420)}, {"ours": Seen(545, 1525, 3650).aim(750)}
    rows = [
        Row(
            "stdio, 5,000 calls of 50 ms at once, by the clock",
            "ms",
            partial(measures.stdio_waits, "modern", 5000),
            stdio,
            rounds=3,
            warm=False,
        ),
        Row(
            "HTTP, 5,000 calls of 50 ms at once, by the clock",
            "ms",
            partial(measures.http_waits, "modern", 5000),
            http,
            rounds=3,
            warm=False,
        ),
    ]
    idle = {"ours": Seen(9.6, 61, 75).aim(15)}
    for era, kind in (("session", "GET"), ("modern", "listen")):
        for number in (1000, 5000):
            name = f"HTTP, memory of an idle {kind} stream, each of {number:,}"
            rows.append(
                Row(
                    name,
                    "KB",
                    partial(measures.idle_streams, era, number),
                    idle,
                    rounds=1,
                    sparse=number < 5000,
                    warm=False,
                )
            )
    return rows


def _clients() -> list[Row]:
    aims = {"stdio": Seen(10, None, 117).aim(24), "http": Seen(80, None, 685).aim(110)}
    rows = []
    for transport in ("stdio", "http"):
        for era in ERAS:
            for many in (1, 16, 32, 64):
                name = f"client, {'HTTP' if transport == 'http' else transport}, {era}, {many} in flight"
                prepare = partial(measures.client_calls, transport, era, many)
                aim = {"ours": aims[transport] if many == 32 else Aim()}
                rows.append(Row(name, "µs", prepare, aim, CLIENTS, sparse=many != 32))
    return rows


def _process() -> list[Row]:
    cold, memory = {"ours": Seen(76, 141, 372).aim(110)}, {"ours": Seen(25.4, 87, 67).aim(33)}
    large = Seen(1 / 312, 1 / 58, 1 / 390).aim(1 / 390)
    codecs = ("ours", "ours+orjson", "bare", "bare+orjson", "typescript", "python")
    return [
        Row("stdio, cold start to the first answer", "ms", measures.start, cold, rounds=9, warm=False),
        Row("stdio, memory after the first answer", "MB", measures.resident, memory, rounds=1, warm=False),
        Row("stdio, its growth over 100,000 calls", "MB", partial(measures.growth, 100_000), rounds=1, warm=False),
        Row(
            "stdio, echo of 5 MB",
            "MB/s",
            partial(measures.stdio_large, "modern", 5),
            {"ours+orjson": large},
            codecs,
            rate=True,
            warm=False,
        ),
    ]


def _core() -> list[Row]:
    def row(name: str, most: float, ours: str, bare: str) -> Row:
        return Row(name, "µs", partial(core.prepare, 1e-6, ours, bare), {"ours": Aim(most)}, ALONE, warm=False)

    # Linear means 2; quadratic would mean 4.
    name = "core, a line of 10 MiB byte by byte, beside one of 5 MiB"
    prepare = partial(core.prepare, 1.0, "feed 10 MiB", "feed 5 MiB")
    line = Row(name, "s", prepare, {"ours": Aim(3.0)}, ALONE, rounds=2, warm=False)

    calls = [
        row(f"core, tools/call, {era}: decode, receive, answer, encode", 3.0, f"serve {era}", f"parse {era}")
        for era in ERAS
    ]
    return [
        *calls,
        row("core, a session for one modern request, beside json.loads", 10.0, "begin a session", "parse a request"),
        line,
    ]


def _commands() -> list[Row]:
    listed = "command line, list of a stdio server, by the clock"
    rows = [Row(listed, "ms", commands.listed, {"ours": Aim(1.5)}, ALONE, warm=False)]
    for many in (1, 64):
        name = f"command line, tap, an echo of {many} in flight, by the clock"
        rows.append(Row(name, "µs", partial(commands.tapped, many), {"ours": Aim(2.0)}, ALONE))
    return rows


ROWS = [
    *_stdio(),
    *_http(),
    *_works(),
    *_workers(),
    *_tasks(),
    *_scale(),
    *_listeners(),
    *_replicas(),
    *_clients(),
    *_process(),
    *_core(),
    *_commands(),
]


def chosen(words: Sequence[str]) -> list[Row]:
    """The rows with all these words in their names."""
    return [row for row in ROWS if row.asked(words)]
