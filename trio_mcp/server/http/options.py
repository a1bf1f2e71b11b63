"""How a server is served by HTTP: the options that users give, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypedDict

from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.event_log import EventLog
from trio_mcp.core.http.verdicts import LOOPBACK_HOSTS, HttpPolicy, HttpRequest
from trio_mcp.server.run import Run

__all__ = ["HttpOptions", "keep_alive_of", "policy_of", "public_url_of"]


class HttpOptions(TypedDict, total=False):
    """How a server is served by HTTP; the keyword options of `serve_http`, `Server.run` and the ASGI application."""

    path: str
    """Where the endpoint is, "/mcp" by default; served with and without a slash at its end."""
    sse_path: str
    """Where clients of 2024-11-05 open their stream, which is off by default.  Goes with `message_path`."""
    message_path: str
    """Where those clients post their messages."""
    websocket_path: str | None
    """Where WebSockets are, "/ws" by default; None: nowhere."""
    allowed_hosts: Sequence[str]
    """The names under which the server may be asked, as protection against DNS rebinding: those of loopback by default,
    and those of `public_url` and of the resource of a protected server.  A name without a port stands for all ports;
    "*" allows any."""
    allowed_origins: Sequence[str]
    """The origins of pages that may ask, such as "https://app.example.com": those of loopback by default.  The same
    list drives CORS."""
    public_url: str
    """The URL under which clients reach what is "/" here, where that is another than the one it listens at."""
    sessions: bool
    """False: clients of the legacy revisions get no session, and each of their requests stands alone."""
    json_only: bool
    """True: every answer is JSON, and there are no streams: no progress, no questions to legacy clients."""
    event_log: Callable[[str], EventLog]
    """Makes the log of the session with this id, from which its streams are resumed; in memory by default.  It is asked
    in the event loop, so it must not wait for long."""
    authenticate: Callable[[HttpRequest], Awaitable[str | None]]
    """Says who is behind a request, by a stable name; None is refused with 401.  Without it nobody is asked."""
    keep_alive: float
    """Seconds after which a silent stream gets a comment, 15 by default: proxies take longer silence for death."""


_OF_THE_POLICY = ("path", "sse_path", "message_path", "allowed_origins", "sessions", "json_only")


def policy_of(run: Run, options: HttpOptions) -> HttpPolicy:
    """Raises `UsageError` for options that cannot be."""
    if unknown := options.keys() - HttpOptions.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(HttpOptions.__annotations__)}")
    for name in ("sessions", "json_only"):
        if not isinstance(options.get(name, True), bool):
            raise UsageError(f"{name} is True or False; not {options.get(name)!r}")
    for name in ("authenticate", "event_log"):
        if name in options and not callable(options.get(name)):
            raise UsageError(f"{name} is a function, not {type(options.get(name)).__name__}")
    hosts = options.get("allowed_hosts", LOOPBACK_HOSTS)
    public = public_url_of(options)
    if public is not None and not isinstance(hosts, str):
        hosts = (*hosts, public.partition("://")[2].partition("/")[0])
    protection = run.dispatcher.protection()
    if protection is not None and protection.host is not None and not isinstance(hosts, str):
        hosts = (*hosts, protection.host)
    given = {name: value for name, value in options.items() if name in _OF_THE_POLICY}
    return HttpPolicy(
        **given,  # type: ignore[arg-type]  # each is what its annotation says
        websocket_path=options.get("websocket_path", "/ws"),
        allowed_hosts=hosts,
        revisions=run.offer().revisions,
        limits=run.limits,
    )


def public_url_of(options: HttpOptions) -> str | None:
    """Without a slash at its end."""
    url = options.get("public_url")
    if url is None:
        return None
    scheme, mark, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in ("http", "https") or not mark or not rest.partition("/")[0] or set("?# ") & set(rest):
        raise UsageError(f"public_url is like 'https://example.com' or 'https://example.com/tools'; not {url!r}")
    return url.rstrip("/")


def keep_alive_of(options: HttpOptions) -> float:
    seconds = options.get("keep_alive", 15.0)
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise UsageError(f"keep_alive is a number of seconds, above 0; not {seconds!r}")
    return seconds
