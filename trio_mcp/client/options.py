"""What a client can be told: the options of `open_client`, and what goes along with one request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from trio_mcp.client.answering import GivenRoots, OnElicitation, OnElicitationUrl, OnSampling
from trio_mcp.client.asked import UrlElicitationRequest
from trio_mcp.core.errors import MISSING_CLIENT_CAPABILITY, RequestError, UsageError
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.jsonrpc import Json, JsonObject, Limits
from trio_mcp.core.models import LoggingMessageParams
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.core.session import Offer
from trio_mcp.core.terms import LOG_LEVELS

if TYPE_CHECKING:
    import os
    import ssl

    from trio_mcp.core.models import LogLevel
    from trio_mcp.oauth.client import OAuth
    from trio_mcp.transport.child import Environment
    from trio_mcp.transport.duplex import Tap

__all__ = [
    "ANSWERING",
    "CHILD",
    "ClientOptions",
    "RequestOptions",
    "check_along",
    "check_options",
    "checked_level",
    "fields_of",
    "log_level_of",
    "members",
    "name_the_options",
    "offer_of",
]


class RequestOptions(TypedDict, total=False):
    """What goes along with one request, whatever goes along with all of them."""

    meta: Mapping[str, Json] | None
    """As `_meta`."""
    headers: Mapping[str, str] | None
    """As headers of its HTTP requests; they go before those of the option `headers`."""
    timeout: float | None
    """Instead of the option `timeout`; `math.inf` for none."""
    max_timeout: float | None
    """Instead of the option `max_timeout`; `math.inf` for none."""


class ClientOptions(TypedDict, total=False):
    """The options of `open_client` and `connect_client`."""

    name: str
    version: str
    """How the client introduces itself."""
    revision: str | None
    """The only revision to speak, such as "2025-11-25"; without it, the newest that both sides have."""
    sampling: OnSampling
    """Asked for an answer of a model; `answering` tells what these callbacks are given and return."""
    sampling_tools: bool
    """`sampling` understands tools."""
    elicitation: OnElicitation
    """Asked to have the user fill in a form."""
    elicitation_url: OnElicitationUrl
    """Asked for the user's consent to visit a page."""
    roots: GivenRoots
    """Directories that the server may work in."""
    experimental: Mapping[str, Mapping[str, Any]]
    """Experimental capabilities of the client, as they are declared: objects by name."""
    on_elicitation_complete: Callable[[UrlElicitationRequest], object]
    """Called when the server says that what the user was to do on a page is done."""
    on_log: Callable[[LoggingMessageParams], object]
    """Called with each log message of the server."""
    on_notification: Callable[[str, JsonObject], object]
    """Called with the method and the params of each notification that nothing here waits for, such as a change without
    a `listen` block, or a log message without `on_log`."""
    log_level: LogLevel | None
    """From which level on the server is asked to send them; "info" where there is an `on_log`."""
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]]
    """What goes along with each HTTP request, such as Authorization; a function is asked for each call."""
    auth: OAuth
    """Gets the tokens that an HTTP server wants."""
    meta: Callable[[], Mapping[str, Json]]
    """What goes along with each request as `_meta`, such as a trace context.  Raises `UsageError` for keys that
    are reserved or malformed."""
    cache: bool
    """Whether results may be used again for as long as the server says so (2026-07-28); they are, by default."""
    timeout: float | None
    """Seconds for which a request may have neither an answer nor progress.  Beyond: `trio.TooSlowError`, and the server
    is told.  None by default: the caller's cancel scope is the timeout."""
    max_timeout: float | None
    """Seconds for a whole call, whatever progress it makes, and with what callbacks answer in its course.  None by
    default.  Beyond: as `timeout`."""
    ping_seconds: float | None
    """Seconds from one ping of the server to the next, in revisions that have `ping`.  If nothing comes from it for as
    long after one, the connection counts as lost.  None by default: there are none."""
    limits: Limits
    ssl_context: ssl.SSLContext
    tap: Tap
    """Called with "in" or "out" and the bytes that were received or are about to be sent."""
    probe: float
    """Seconds for which a server on a stream may think about whether it is a modern one."""
    env: Mapping[str, str | None]
    """Variables that a child process gets beside those of `environment`; None removes one."""
    environment: Environment
    """"minimal" (the default): HOME, LANG, LC_*, LOGNAME, PATH, SHELL, TERM, TMPDIR and USER; "inherit": all of ours;
    or just these variables."""
    cwd: str | os.PathLike[str]
    start_timeout: float
    """Seconds for the first message of a child process, or on a stream: 120; `math.inf` for no bound."""
    garbage_timeout: float
    """Seconds for it after the first line there that is no message: 30; `math.inf` for no bound."""
    shutdown_timeout: float
    """Seconds for which a child process may take its leave, and again after SIGTERM."""
    stderr: Callable[[bytes], object] | None
    """Called with what a child process writes to standard error, as it comes; None: nobody is.  By default that is
    written to our own."""


CHILD = ("env", "environment", "cwd", "shutdown_timeout", "stderr", "start_timeout", "garbage_timeout")
ANSWERING = ("sampling", "sampling_tools", "elicitation", "elicitation_url", "roots")
# By capability and its member; "" is that it is there at all.
_DECLARED_BY = {
    "sampling": {"": "sampling", "tools": "sampling_tools"},
    "elicitation": {"": "elicitation", "form": "elicitation", "url": "elicitation_url"},
    "roots": {"": "roots"},
}
_PLAIN = ("on_elicitation_complete", "on_log", "on_notification", "headers", "meta", "tap", "stderr")
_TIMEOUTS = ("timeout", "max_timeout")


def check_options(given: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that there is not, and UsageError for one that can be of no use."""
    if unknown := given.keys() - ClientOptions.__annotations__:
        known = ", ".join(ClientOptions.__annotations__)
        raise TypeError(f"a client has no option {min(unknown)!r}; there are {known}")
    for name in _PLAIN:
        _check_plain(name, given.get(name))
    if given.get("auth") is not None:
        from trio_mcp.oauth.client import OAuth

        if not isinstance(auth := given["auth"], OAuth):
            raise UsageError(f"auth is OAuth(...), not {type(auth).__name__}; headers takes a token you have")
    if not isinstance(limits := given.get("limits"), Limits | None):
        raise UsageError(f"limits are Limits(...), not {type(limits).__name__}")
    _check_seconds(given, *_TIMEOUTS, "ping_seconds")


def _check_seconds(given: Mapping[str, Any], *names: str) -> None:
    for name in names:
        seconds = given.get(name)
        if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):  # NaN is not
            raise UsageError(f"{name} must be a number of seconds above 0, or None; got {seconds!r}")


def _check_plain(name: str, callback: Any) -> None:
    if callback is None or (name == "headers" and isinstance(callback, Mapping)):
        return
    if not callable(callback):
        wanted = "a mapping such as {'Authorization': ...}, or a function" if name == "headers" else "a function"
        raise UsageError(f"{name} is {wanted}, not {type(callback).__name__}")  # no value: it may be a secret
    if any(map(inspect.iscoroutinefunction, (callback, type(callback).__call__))):
        raise UsageError(f"{name} is called in the middle of things and cannot wait; give a plain function")


def check_along(along: Mapping[str, object], method: str = "", name: str = "") -> None:
    """Raise TypeError for a keyword that no request has; with `method`, it may be an argument of what has this name.

    Raises UsageError for a timeout that is none.
    """
    _check_seconds(along, *_TIMEOUTS)
    if along and (unknown := along.keys() - RequestOptions.__annotations__):
        keyword, known = min(unknown), ", ".join(RequestOptions.__annotations__)
        instead = f"; arguments are one mapping: {method}({name!r}, {{{keyword!r}: ...}})" if method else ""
        if "timeout" in keyword:
            instead = ": write timeout=5, or put a cancel scope around the call: with trio.move_on_after(5)"
        elif method == "call_tool" and keyword in ("progress_callback", "progress_handler"):
            instead = f": write call_tool({name!r}, {{...}}, on_progress=function)"
        raise TypeError(f"nothing goes along with a request as {keyword!r}, but {known}{instead}")


def members(what: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was given by name, as a dict of its own.  Raises UsageError for what is no mapping."""
    if given is None:
        return {}
    return dict(given if type(given) is dict else _mapping(what, given))


def _mapping(what: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be a mapping by name, not {type(given).__name__}")
    return given


def fields_of(headers: Mapping[str, str]) -> Fields:
    """Headers as they are sent.  Raises UsageError for what is no text, as the None of a variable not set."""
    fields = tuple(_mapping("headers", headers).items())
    for name, value in fields:
        if not (isinstance(name, str) and isinstance(value, str)):
            wrong = value if isinstance(name, str) else name
            raise UsageError(f"the header {name!r} must be text, not {type(wrong).__name__}")
    return fields


def offer_of(options: ClientOptions, capabilities: JsonObject) -> Offer:
    info = {"name": options.get("name", "trio_mcp"), "version": options.get("version", "0")}
    revisions = tuple(REVISIONS.values())
    if (name := options.get("revision")) is not None:
        if name not in REVISIONS:
            raise UsageError(f"there is no revision {name!r}; there are {', '.join(REVISIONS)}")
        revisions = (REVISIONS[name],)
    experimental = options.get("experimental")
    if experimental is not None:
        capabilities = {**capabilities, "experimental": members("experimental", experimental)}
    return Offer(info, capabilities, revisions)


def log_level_of(options: ClientOptions) -> str | None:
    """Who listens to logs wants some: servers of 2026-07-28 send none unasked."""
    return checked_level(options.get("log_level", "info" if "on_log" in options else None))


def checked_level(level: str | None) -> str | None:
    if level is not None and level not in LOG_LEVELS:
        raise UsageError(f"a log level is one of {', '.join(LOG_LEVELS)}; not {level!r}")
    return level


def name_the_options(error: RequestError) -> None:
    """Note on an error of a server that misses a capability of the client by which option that is declared."""
    needed = error.data.get("requiredCapabilities") if isinstance(error.data, dict) else None
    if error.code != MISSING_CLIENT_CAPABILITY or not isinstance(needed, dict):
        return
    names = []
    for capability, options in _DECLARED_BY.items():
        inside = needed.get(capability)
        if isinstance(inside, dict):
            names += [name for member, name in options.items() if member in (inside or {"": {}})]
    if names:
        error.add_note(f"a client declares that by its options: {', '.join(names)}")
