"""The HTTP options that users give, and the policy that results from them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypedDict

from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.event_log import EventLog
from trio_mcp.core.http.fields import LOOPBACK_HOSTS, HttpRequest, split_target
from trio_mcp.core.http.server_rules import HttpPolicy
from trio_mcp.core.options import check_options
from trio_mcp.server.run import Run

__all__ = ["HttpOptions", "keep_alive_of", "policy_of", "public_url_of"]


class HttpOptions(TypedDict, total=False):
    """The HTTP options: keyword options of `serve_http`, `Server.run` and the ASGI application."""

    path: str
    """The path of the endpoint, "/mcp" by default.  It is served with and without a slash at its end."""
    sse_path: str
    """The path at which clients of 2024-11-05 open their stream.  Off by default; requires `message_path`."""
    message_path: str
    """The path to which clients of 2024-11-05 post their messages."""
    websocket_path: str | None
    """The path for WebSockets, "/ws" by default.  None: no WebSockets."""
    allowed_hosts: Sequence[str]
    """The host names that a request may address, as protection against DNS rebinding.  By default the names of
    loopback, of `public_url` and of the resource of a protected server.  A name without a port allows all ports; "*"
    allows any host."""
    allowed_origins: Sequence[str]
    """The origins of web pages that may send requests, such as "https://app.example.com".  By default those of
    loopback.  The same list is used for CORS."""
    public_url: str
    """The URL under which clients reach "/" of this server, if it differs from the address that the server listens
    at."""
    sessions: bool
    """False: clients of the legacy revisions get no session, and each of their requests is independent."""
    json_only: bool
    """True: every answer is JSON and there are no event streams, so no progress and no questions to legacy clients."""
    event_log: Callable[[str], EventLog]
    """Makes the event log of the session with this id, from which its streams are resumed.  By default the log is in
    memory.  The log is called in the event loop, so it must not block for long."""
    authenticate: Callable[[HttpRequest], Awaitable[str | None]]
    """Returns a stable name for the sender of a request; a request for which it returns None is refused with 401.
    If it raises `CannotVerify`, the answer is 503.  Without this option requests are not authenticated."""
    keep_alive: float
    """Seconds after which an idle stream gets a comment, 15 by default.  Proxies close streams that are idle for
    longer."""
    monitoring: bool
    """True: serve `/healthz`, `/readyz` and `/metrics`, without authentication.  Off by default."""


def policy_of(run: Run, options: HttpOptions) -> HttpPolicy:
    """Make the policy of an endpoint.  Raises `UsageError` for an invalid option and `TypeError` for an unknown one."""
    public, protection = public_url_of(options), run.dispatcher.protection()
    check_options(options, HttpOptions)
    hosts = options.get("allowed_hosts", LOOPBACK_HOSTS)
    more = [None if public is None else split_target(public)[0], None if protection is None else protection.host]
    if not isinstance(hosts, str):  # a string is refused by the policy
        hosts = (*hosts, *(each for each in more if each is not None))
    given = {name: value for name, value in options.items() if name in HttpPolicy.__annotations__}
    return HttpPolicy(
        **{"websocket_path": "/ws", **given, "allowed_hosts": hosts},  # type: ignore[arg-type]  # checked above
        revisions=run.offer.revisions,
        limits=run.limits,
    )


def public_url_of(options: HttpOptions) -> str | None:
    """The checked `public_url`, without a slash at its end; None if it is not given."""
    url = options.get("public_url")
    if url is None:
        return None
    scheme, mark, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in ("http", "https") or not mark or not rest.partition("/")[0] or set("?# ") & set(rest):
        raise UsageError(f"public_url must be like 'https://example.com' or 'https://example.com/tools', got {url!r}")
    return url.rstrip("/")


def keep_alive_of(options: HttpOptions) -> float:
    seconds = options.get("keep_alive", 15.0)
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise UsageError(f"keep_alive must be a number of seconds above 0, got {seconds!r}")
    return seconds
