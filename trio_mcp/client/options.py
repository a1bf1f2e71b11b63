"""The options of a client (`open_client`) and of one request, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from trio_mcp.client.callbacks import GivenRoots, OnElicitation, OnElicitationUrl, OnSampling, UrlElicitationRequest
from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.fields import Fields
from trio_mcp.core.messages import Json, JsonObject, Limits
from trio_mcp.core.models import LoggingMessageParams
from trio_mcp.core.options import check_options

if TYPE_CHECKING:
    import os
    import ssl

    from trio_mcp.client.extensions import ClientExtension
    from trio_mcp.core.models import LogLevel
    from trio_mcp.oauth.client import OAuth
    from trio_mcp.transport.child import Environment

__all__ = [
    "ANSWERING", "ClientOptions", "RequestOptions", "check_client_options", "check_request_options", "copy_mapping",
    "fields_of",
]  # fmt: skip


class RequestOptions(TypedDict, total=False):
    """Options of one request.  Each is a keyword of the methods of `Client` that send requests."""

    meta: Mapping[str, Json] | None
    """Members to add to `_meta` of the request."""
    headers: Mapping[str, str] | None
    """HTTP headers of this request.  They replace headers of the same name from the option `headers` of the client."""
    timeout: float | None
    """Replaces the option `timeout` of the client; `math.inf` turns it off."""
    max_timeout: float | None
    """Replaces the option `max_timeout` of the client; `math.inf` turns it off."""


class ClientOptions(TypedDict, total=False):
    """The options of `open_client` and `connect_client`."""

    name: str
    version: str
    """The name and the version that the client sends to the server.  Default: "trio_mcp" and "0"."""
    revision: str | None
    """The only protocol revision to use, such as "2025-11-25".  Default: the newest one that both sides have."""
    sampling: OnSampling
    """Callback that asks a language model for the server.  The module `trio_mcp.client.callbacks` has a table of the
    callbacks, their arguments and their results."""
    sampling_tools: bool
    """True if the callback `sampling` supports tools."""
    elicitation: OnElicitation
    """Callback that asks the user to fill in a form."""
    elicitation_url: OnElicitationUrl
    """Callback that asks the user for consent to open a web page."""
    roots: GivenRoots
    """Directories that the server may work in."""
    experimental: Mapping[str, Mapping[str, Any]]
    """Experimental capabilities of the client: an object for each name.  They are declared unchanged."""
    extensions: Sequence[ClientExtension] | Mapping[str, Mapping[str, Any]]
    """Extensions of the protocol: `ClientExtension` objects, or a mapping from identifiers to settings."""
    tasks: bool
    """True: the server may answer calls of tools with tasks.  `call_tool` waits for them; see `Client.start_task`."""
    on_elicitation_complete: Callable[[UrlElicitationRequest], object]
    """Called when the server reports that the user has finished on a web page."""
    on_log: Callable[[LoggingMessageParams], object]
    """Called with each log message of the server."""
    on_notification: Callable[[str, JsonObject], object]
    """Called with the method and the params of each notification that no other callback and no block receives:
    a change without a `listen` block, a log message without `on_log`, or one that the protocol does not have."""
    log_level: LogLevel | None
    """The lowest level of log messages that the server is asked to send.  Default: "info" if `on_log` is given."""
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]]
    """HTTP headers of each request, such as Authorization.  A function is called for each request."""
    auth: OAuth
    """Gets the access tokens that an HTTP server requires."""
    meta: Callable[[], Mapping[str, Json]]
    """A function that returns members to add to `_meta` of each request, such as a trace context.  A request raises
    `UsageError` if a key is reserved or malformed."""
    cache: bool
    """True (the default): a result is used again for as long as the server allows (2026-07-28), and completions for ten
    seconds."""
    timeout: float | None
    """Seconds that a request may take without an answer and without progress.  After that the call raises
    `trio.TooSlowError` and the server is told that the request is cancelled.  Default: None, no timeout except the
    cancel scopes of the program."""
    max_timeout: float | None
    """Seconds that a whole call may take, including the time of callbacks that answer the server, with or without
    progress.  After that the same happens as with `timeout`.  Default: None."""
    ping_seconds: float | None
    """Seconds between two pings of the server, in revisions that have `ping`.  The connection is closed if no message
    comes for this many seconds after a ping.  Default: None, no pings."""
    limits: Limits
    """Limits of message sizes, queues and concurrent callbacks."""
    ssl_context: ssl.SSLContext
    """The TLS context for https and wss.  Default: `ssl.create_default_context()`."""
    tap: Callable[[str, bytes], object]
    """Called with "in" and the received bytes, or with "out" and the bytes that are about to be sent."""
    probe: float
    """Seconds that a server on a stream may take to answer the first request, which asks if it speaks 2026-07-28 or
    later.  After that the client tries the older handshake.  Default: 5."""
    env: Mapping[str, str | None]
    """Variables to add to the environment of a child process; None as a value removes one."""
    environment: Environment
    """The environment of a child process before `env` is added.  "minimal" (the default): HOME, LANG, LC_*, LOGNAME,
    PATH, SHELL, TERM, TMPDIR and USER.  "inherit": all variables of this process.  A mapping: these variables only."""
    cwd: str | os.PathLike[str]
    """The working directory of a child process."""
    start_timeout: float
    """Seconds that a child process, or a server on a stream, may take to send its first message: 120; `math.inf` for no
    limit."""
    garbage_timeout: float
    """Seconds that it may take to send its first message after its first line that is not a message: 30; `math.inf` for
    no limit."""
    shutdown_timeout: float
    """Seconds that a child process may take to exit after its stdin is closed, and again after SIGTERM.  Default: 2."""
    stderr: Callable[[bytes], object] | None
    """Called with each piece of output that a child process writes to stderr; None discards it.  Default: it is written
    to stderr of this process."""


ANSWERING = ("sampling", "sampling_tools", "elicitation", "elicitation_url", "roots")
_TIMEOUTS = ("timeout", "max_timeout")
_MAPPINGS = ("headers", "experimental", "extensions")  # checked where they are read


def check_client_options(given: Mapping[str, Any]) -> None:
    """Check the options of a client.  Raises TypeError for an unknown option, UsageError for a wrong value."""
    typed = {name: each for name, each in given.items() if each is not None and name not in _MAPPINGS}
    check_options(typed, ClientOptions)
    headers, auth = given.get("headers"), given.get("auth")
    if not (headers is None or callable(headers) or isinstance(headers, Mapping)):
        # The value is not shown: it may be a secret.
        expected = "a mapping such as {'Authorization': ...} or a function"
        raise UsageError(f"headers must be {expected}, got {type(headers).__name__}")
    for name, annotation in ClientOptions.__annotations__.items():
        each = given.get(name)
        awaited = name in ANSWERING or "Callable" not in annotation.__forward_arg__
        if not awaited and any(map(inspect.iscoroutinefunction, (each, type(each).__call__))):
            why = "must be a plain function, got an async function; the client calls it without await"
            raise UsageError(f"{name} {why}")
    if auth is not None:
        from trio_mcp.oauth.client import OAuth

        if not isinstance(auth, OAuth):
            raise UsageError(
                f"auth must be an OAuth object, got {type(auth).__name__}; to send a token of your own, use headers"
            )
    _check_timeouts(given, *_TIMEOUTS, "ping_seconds")


def _check_timeouts(given: Mapping[str, Any], *names: str) -> None:
    for name in names:
        seconds = given.get(name)
        if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):  # `not >` also refuses NaN
            raise UsageError(f"{name} must be a number of seconds above 0, or None; got {seconds!r}")


def check_request_options(given: Mapping[str, object], method: str = "", name: str = "") -> None:
    """Check the options of one request.  Raises TypeError for an unknown keyword, UsageError for a wrong timeout.

    `method` and `name`: the method of `Client` and the tool or prompt.  They are for the hint in the error, because a
    caller may have passed an argument of a tool as a keyword.
    """
    _check_timeouts(given, *_TIMEOUTS)
    if given and (unknown := given.keys() - RequestOptions.__annotations__):
        keyword, known = min(unknown), ", ".join(RequestOptions.__annotations__)
        hint = f"; pass the arguments as one mapping: {method}({name!r}, {{{keyword!r}: ...}})" if method else ""
        if "timeout" in keyword:
            hint = ": write timeout=5, or put a cancel scope around the call: with trio.move_on_after(5)"
        elif method == "call_tool" and keyword in ("progress_callback", "progress_handler"):
            hint = f": write call_tool({name!r}, {{...}}, on_progress=function)"
        raise TypeError(f"unknown request option {keyword!r}; the options are {known}{hint}")


def copy_mapping(what: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of a mapping as a dict.  Raises UsageError if it is not a mapping; `what` names it in the error."""
    if given is None:
        return {}
    if type(given) is not dict and not isinstance(given, Mapping):  # the second check takes longer than the copy
        raise UsageError(f"{what} must be a mapping by name, got {type(given).__name__}")
    return dict(given)


def fields_of(headers: Mapping[str, str]) -> Fields:
    """Return the headers as a tuple of pairs.

    Raises UsageError if a name or a value is not a string, such as None from an environment variable that is not set.
    """
    fields = tuple(copy_mapping("headers", headers).items())
    for name, value in fields:
        if not (isinstance(name, str) and isinstance(value, str)):
            wrong = value if isinstance(name, str) else name
            raise UsageError(f"header names and values must be strings, got {type(wrong).__name__} in {name!r}")
    return fields
