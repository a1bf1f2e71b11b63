"""The exceptions of this package and the error codes of the protocol.

The class of an exception says which side made the mistake:

| Exception | Meaning |
|---|---|
| `UsageError` | this program broke the rules; nothing was sent |
| `RemoteProtocolError` | the peer broke the protocol |
| `RequestError` | no mistake: the peer answered the request with a JSON-RPC error |
| `SessionClosed` | the connection was lost before the answer came |

All of them derive from `McpError`, and no other class does.

An error message that repeats text of the peer cuts it with `shown`: the peer may send megabytes, and people read logs.

The constants are the error codes of JSON-RPC and of the five revisions.  `revisions` says which revision may send which
code.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = [
    "HEADER_MISMATCH", "INTERNAL_ERROR", "INVALID_PARAMS", "INVALID_REQUEST", "METHOD_NOT_FOUND",
    "MISSING_CLIENT_CAPABILITY", "MODERN_ERRORS", "PARSE_ERROR", "RESOURCE_NOT_FOUND", "UNSUPPORTED_VERSION",
    "URL_ELICITATION_REQUIRED", "CannotServe", "ConnectionFailed", "InputUnavailable", "McpError", "NotDeclared",
    "NotInThisRevision", "RemoteProtocolError", "RequestError", "ResourceNotFound", "SessionClosed", "UsageError",
    "check_amount", "check_seconds", "name_of", "printable", "redacted", "repeated", "shown",
]  # fmt: skip

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
"""The error codes that only a server of the modern era sends (ver-14)."""


_URI_SHOWN = 200  # characters of a URI in an error message; the error data has the whole URI


class McpError(Exception):
    """The base class of all errors that this package raises on purpose."""


class UsageError(McpError):
    """This program used the API or the protocol in a way that is not allowed.  Nothing was sent, nothing changed."""


E = TypeVar("E", bound=McpError)


class CannotServe(UsageError):
    """The environment does not let the process serve: for example, the port is in use or standard input is closed.

    The program has no bug, so `run()` prints one line without a traceback.
    """


class NotInThisRevision(UsageError):
    """This program tried to send a message that does not exist in the agreed revision.

    `method` is the method of the message.  `revision` is the agreed revision.  `use` is the alternative, or "" if there
    is no alternative.
    """

    def __init__(self, method: str, revision: str, use: str = "") -> None:
        super().__init__(f"{method} does not exist in {revision}" + (f"; use {use}" if use else ""))
        self.method = method
        self.revision = revision
        self.use = use


class NotDeclared(UsageError):
    """This program tried to use a capability that was not declared.

    `owner` is the side that must declare it, "client" or "server".  `capability` is the missing path, for example
    ``("elicitation", "url")``.
    """

    def __init__(self, method: str, owner: str, capability: tuple[str, ...]) -> None:
        super().__init__(f"{method} needs the {owner} capability {'.'.join(capability)}, which was not declared")
        self.method = method
        self.owner = owner
        self.capability = capability


class RemoteProtocolError(McpError):
    """The peer broke the protocol."""


class RequestError(McpError):
    """A request ended with a JSON-RPC error.

    A call raises it if the peer answered with an error.  A handler raises it to answer with an error.
    """

    correctable = False
    """Whether the arguments of a tool call are the cause.  A tool then answers with a result that the model sees."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


class ResourceNotFound(RequestError):
    """There is no resource at a URI.

    The handler of a resource or of a resource template raises it; the client gets the error code of its revision.  A
    call raises it for the code of either era.
    """

    # The code is that of the legacy era.  The session knows the revision, and replaces the code (res-05, res-06).
    def __init__(self, uri: str, message: str | None = None) -> None:
        super().__init__(RESOURCE_NOT_FOUND, message or f"Resource not found: {shown(uri, _URI_SHOWN)}", {"uri": uri})


class InputUnavailable(McpError):
    """A request was not completed: the server asked for input first, and this client did not give it.

    `method` is the method of the request.  `key` is the name of the input.  `why` is the reason, if it is known.  No
    side broke a rule.  If an exception was the reason, it is chained.
    """

    def __init__(self, method: str, key: str, why: str = "") -> None:
        reason = why or f"the server asked for input {shown(key)}, and none was given"
        super().__init__(f"{method} was not completed: {reason}")
        self.method = method
        self.key = key


class ConnectionFailed(McpError):
    """The server cannot be reached, or its process cannot be started.  No request was sent.

    If an `OSError` was the reason, it is chained.
    """


class SessionClosed(McpError):
    """The connection was lost before the request was answered.  If there is a cause, it is chained."""


def shown(value: object, limit: int = 80) -> str:
    """Return the repr of a value of the peer for an error message: one line, at most `limit` characters."""
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def printable(line: str) -> str:
    """Return a line or a name of another program for terminals and logs, with control characters replaced."""
    return "".join([char if char.isprintable() or char == "\t" else "\ufffd" for char in line])


# A shorter string protects nothing, and appears in ordinary sentences.
_SECRET_LENGTH = 4
# A secret of this length or more is replaced anywhere in the text.  No other word contains it by chance, and a letter
# may precede it: the "n" of an escaped line break in JSON.
_LONG_SECRET = 8


def redacted(text: str, secrets: Iterable[str | None]) -> str:
    """Return the text with "[secret]" in place of each secret; a short secret is replaced only as a whole word."""
    for secret in secrets:
        if secret is None or len(secret) < _SECRET_LENGTH:
            continue
        if len(secret) >= _LONG_SECRET:
            text = text.replace(secret, "[secret]")
        else:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", "[secret]", text)
    return text


def repeated(error: E) -> E:
    """Return a copy of the error.

    Each task that raises the error raises a copy of its own, because every raise adds to the traceback.
    """
    # `__new__` and not the class itself: the arguments of `__init__` are unknown, and its attributes are copied.
    new = type(error).__new__(type(error), *error.args)
    new.__dict__.update(error.__dict__)
    new.__cause__ = error.__cause__
    new.__suppress_context__ = error.__suppress_context__
    return new


def name_of(function: object) -> str:
    """Return the name of a function for error messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or f"an object of {type(function).__qualname__}"


def check_amount(name: str, amount: object, unit: str, *, finite: bool = False) -> None:
    """Raise UsageError if `amount` is not a number of at least 0; infinity is one, unless it must be `finite`."""
    number = type(amount) in (int, float)
    if not number or not amount >= 0 or (finite and amount == math.inf):  # type: ignore[operator]  # `not` catches NaN
        raise UsageError(f"{name} must be a number of {unit}, 0 or more, got {amount!r}")


def check_seconds(name: str, seconds: object, *, finite: bool = False) -> None:
    """Raise UsageError if `seconds` is not a number of seconds, as `check_amount`."""
    check_amount(name, seconds, "seconds", finite=finite)
