"""Who is to blame.

Every exception that leaves this package says whose mistake it was: our caller's (`UsageError`), the peer's
(`RemoteProtocolError`), nobody's (`RequestError`: the peer answered, and the answer is an error), or the link's
(`SessionClosed`).  They share one base, so that `except McpError` catches all of them and nothing else.

What a message of ours repeats of the peer's words is cut by `shown`: the peer may send megabytes, and a log is read.

The numbers are the error codes of JSON-RPC and of the five revisions.  Which revision may emit which is in `revisions`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trio_mcp.core.jsonrpc import Error

__all__ = [
    "HEADER_MISMATCH",
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "INVALID_REQUEST",
    "METHOD_NOT_FOUND",
    "MISSING_CLIENT_CAPABILITY",
    "MODERN_ERRORS",
    "PARSE_ERROR",
    "RESOURCE_NOT_FOUND",
    "UNSUPPORTED_VERSION",
    "URL_ELICITATION_REQUIRED",
    "CannotServe",
    "ConnectionFailed",
    "InputUnavailable",
    "McpError",
    "NotDeclared",
    "NotInThisRevision",
    "RemoteProtocolError",
    "RequestError",
    "ResourceNotFound",
    "SessionClosed",
    "UsageError",
    "printable",
    "redacted",
    "shown",
]

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
RESOURCE_NOT_FOUND = -32002
HEADER_MISMATCH = -32020
MISSING_CLIENT_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022
URL_ELICITATION_REQUIRED = -32042

MODERN_ERRORS = frozenset({HEADER_MISMATCH, MISSING_CLIENT_CAPABILITY, UNSUPPORTED_VERSION})
"""The codes by which a server shows itself to be of the modern era (ver-14)."""


_URI_SHOWN = 200  # of its characters, in a message: all of it is in the data


class McpError(Exception):
    """The base of every error that this package raises on purpose."""


class UsageError(McpError):
    """Our side asked for something the protocol forbids.  Nothing was sent and nothing changed."""


class CannotServe(UsageError):
    """The environment does not let the process serve: the port is in use, or standard input is closed.

    No line of the program is at fault, so `run()` prints one line without a traceback.
    """


class NotInThisRevision(UsageError):
    """Our side tried to send what the agreed revision cannot carry.

    `method` is what was tried, `revision` the revision in force, `use` what to do instead (empty if nothing).
    """

    def __init__(self, method: str, revision: str, use: str = "") -> None:
        super().__init__(f"{method} does not exist in {revision}" + (f"; use {use}" if use else ""))
        self.method = method
        self.revision = revision
        self.use = use


class NotDeclared(UsageError):
    """Our side tried to use a capability that its owner did not declare.

    `capability` is the missing path, such as ``("elicitation", "url")``.
    """

    def __init__(self, method: str, owner: str, capability: tuple[str, ...]) -> None:
        super().__init__(f"{method} needs the {owner} capability {'.'.join(capability)}, which was not declared")
        self.method = method
        self.owner = owner
        self.capability = capability


class RemoteProtocolError(McpError):
    """The peer broke the protocol.  `reply` is the error it is owed, or None where no answer is possible."""

    def __init__(self, why: str, reply: Error | None = None) -> None:
        super().__init__(why)
        self.reply = reply


class RequestError(McpError):
    """A request ended with a JSON-RPC error.

    Raised at the caller when the peer answered with one; raised by a handler to answer with one.
    """

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


class ResourceNotFound(RequestError):
    """There is nothing to read at a URI.

    Raised by a handler of a resource, or of a template for a URI that it stands for, to say so: the client gets the
    code that its revision has for it.  Raised at the caller for the code of either era.
    """

    # Not with the code of the revision yet: the session knows that (res-05, res-06).
    def __init__(self, uri: str, message: str | None = None) -> None:
        super().__init__(RESOURCE_NOT_FOUND, message or f"Resource not found: {shown(uri, _URI_SHOWN)}", {"uri": uri})


class InputUnavailable(McpError):
    """A request of ours was not completed: the peer wanted input first, and our side gave none.

    `method` is the request's, `key` names the input, and `why` says what kept us from giving it, where that is known.
    Nobody broke a rule; the exception that was the reason, where there was one, is chained.
    """

    def __init__(self, method: str, key: str, why: str = "") -> None:
        reason = why or f"the server asked for input {shown(key)}, and none was given"
        super().__init__(f"{method} was not completed: {reason}")
        self.method = method
        self.key = key


class ConnectionFailed(McpError):
    """There is no connection to the server, so nothing was asked of it: nobody could be reached, or no process started.

    `OSError` is chained where there was one.
    """


class SessionClosed(McpError):
    """The link went away before the request was answered; the cause, where there is one, is chained."""


def shown(value: object, limit: int = 80) -> str:
    """Whatever the peer sent, as a message of ours may repeat it: on one line, and no longer than `limit`."""
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def printable(line: str) -> str:
    """A line of another program, for terminals and logs: without what would move a cursor there."""
    return "".join([char if char.isprintable() or char == "\t" else "\ufffd" for char in line])


# A shorter one guards nothing, and is in every other sentence.
_SECRET_LENGTH = 4
# From this length on a secret is replaced wherever it stands: no other word contains it by chance, and a letter may
# stand before it, as that of an escaped line break in a JSON text does.
_UNMISTAKABLE = 8


def redacted(text: str, secrets: Iterable[str | None]) -> str:
    """The peer's words with "[secret]" in place of each of these; a short secret counts only as a whole word."""
    for secret in secrets:
        if secret is None or len(secret) < _SECRET_LENGTH:
            continue
        if len(secret) >= _UNMISTAKABLE:
            text = text.replace(secret, "[secret]")
        else:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", "[secret]", text)
    return text


def repeated(error: McpError) -> Callable[[], McpError]:
    """For an error that several may have to raise: a copy each, as a traceback grows wherever one is raised."""

    def copy() -> McpError:
        made = type(error).__new__(type(error), *error.args)  # what else its class wants is in its attributes
        made.__dict__.update(error.__dict__)
        made.__cause__ = error.__cause__
        made.__suppress_context__ = error.__suppress_context__
        return made

    return copy


def name_of(function: object) -> str:
    """What to call a function in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or f"an object of {type(function).__qualname__}"


def check_seconds(name: str, seconds: object) -> None:
    if type(seconds) not in (int, float) or not seconds >= 0:  # type: ignore[operator]  # NaN is none either
        raise UsageError(f"{name} is a number of seconds, 0 or more; not {seconds!r}")
