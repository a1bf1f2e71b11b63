"""Monitoring of an HTTP server: `/healthz`, `/readyz` and `/metrics`, with the option `monitoring=True`.

They are no part of MCP: a GET without headers gets a short text.  They come before authentication, because probes of an
orchestrator have no credentials; a proxy should not pass them on from the internet.  Origin and Host are checked as for
any request, except that Host may also be an IP address.  Probes and Prometheus address a process in this way, and a
page that uses DNS rebinding cannot: its Host is a name.

| Path | Answer |
|---|---|
| `/healthz` | 200: the event loop of this process runs |
| `/readyz` | 200, or 503 while the server shuts down |
| `/metrics` | `Server.statistics()` in the text format of Prometheus, summed over the workers |

With workers, any of them answers.  A worker that does not answer the supervisor in time is missing in the sums, and is
counted as silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from trio_mcp.core.http.fields import Fields, HttpRequest, Reply, split_target

if TYPE_CHECKING:
    from trio_mcp.server.run import Run

__all__ = ["Monitoring", "Tally"]


@attrs.frozen
class Tally:
    """Statistics, summed over the workers that have answered."""

    counts: tuple[int, ...]
    """The values of `Statistics`, in their order."""
    workers: int = 1
    silent: int = 0
    failures: int = 0


# The names in the order of `Statistics`, and those of the workers.
_GAUGES = (
    ("connections", "Clients: streams, WebSockets, sessions, and running requests without a session."),
    ("running_requests", "Requests whose handler runs."),
    ("parked_handlers", "Handlers that wait for an answer of their client between two requests."),
    ("listeners", "Subscriptions and sessions that are notified of changes."),
    ("held_bytes", "Bytes that are held for clients (Limits.bytes_in_all)."),
    ("workers", "Worker processes that are counted here."),
    ("silent_workers", "Worker processes that did not answer, and are missing in the other numbers."),
)
_FAILURES = ("worker_failures_total", "Worker processes that have ended by themselves.")


class Monitoring:
    """Answers for one endpoint.  `draining` tells whether it shuts down."""

    def __init__(self, run: Run, draining: Callable[[], bool]) -> None:
        self._run = run
        self._draining = draining

    async def answer(self, request: HttpRequest) -> Reply:
        """Answer a GET or HEAD for one of the paths."""
        path = split_target(request.target)[1].rstrip("/")
        status, body = 200, "ok\n"
        if path == "/readyz" and self._draining():
            status, body = 503, "the server is shutting down\n"
        elif path == "/metrics":
            server = self._run.server
            worker = server._supervised
            tally = Tally(attrs.astuple(server.statistics())) if worker is None else await worker.gather()
            status, body = (503, "the supervisor does not answer\n") if tally is None else (200, _metrics(tally))
        data = body.encode()
        fields: Fields = (
            ("Content-Type", "text/plain; version=0.0.4; charset=utf-8" if path == "/metrics" else "text/plain"),
            ("Cache-Control", "no-store"),
            ("Content-Length", str(len(data))),
        )
        return Reply(status, fields, data)


def _metrics(tally: Tally) -> str:
    values = (*tally.counts, tally.workers, tally.silent)
    rows = [(*gauge, "gauge", value) for gauge, value in zip(_GAUGES, values, strict=True)]
    rows.append((*_FAILURES, "counter", tally.failures))
    return "".join(
        f"# HELP trio_mcp_{name} {text}\n# TYPE trio_mcp_{name} {kind}\ntrio_mcp_{name} {value}\n"
        for name, text, kind, value in rows
    )
