"""The first message of a server on a stream: how long it may take, and what is said if it does not come.

A program that is started by mistake sends no MCP message: it prints, waits, reads or exits.  So the time for the first
message on a stream has its own limits, apart from the time for an answer, and the error repeats the program's output.
`Startup` has these rules:

| The program | The opening of the session |
|---|---|
| sends a message, with any content | goes on, with the usual time for an answer |
| writes a line that is not a message | logs the first line as a WARNING, and fails `garbage_timeout` seconds later |
| writes nothing, or an incomplete line | fails `start_timeout` seconds after the start |
| sends back its input, like `cat` | fails at once |
| closes its stdout or stdin, and keeps running | fails at once |
| exits, with any status | fails at once, with `ServerExited` |

If two lines apply at the same moment, the first one decides.  `math.inf` turns a timeout off.  When the session is
open, a line that is not a message is an ordinary deviation of the server.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from trio_mcp.client.session import ClientSession
from trio_mcp.core.errors import McpError, SessionClosed, printable
from trio_mcp.core.messages import Batch, InvalidMessage, Message, Request
from trio_mcp.transport.wire import Lines

if TYPE_CHECKING:
    from trio_mcp.client.options import ClientOptions
    from trio_mcp.transport.child import Child

__all__ = ["GARBAGE", "START", "Startup"]

_log = logging.getLogger("trio_mcp")

START = 120.0
"""Seconds for the first message: a launcher such as npx or uvx downloads the server at the first run, which takes a
minute over a slow network."""
GARBAGE = 30.0
"""Seconds for the first message after the first line that is not a message: servers that print a greeting do it when
they are ready."""

_MAX_LINES = 10  # lines that an error repeats: the first ones, because they show which program it is
_LINE_LENGTH = 200  # characters of each line
_CLIENT_REQUESTS = frozenset({"server/discover", "initialize"})  # requests that only a client sends


class Startup:
    """The time from the start of one server to its first message.  `child`: the process of the server, if it is one."""

    def __init__(self, lines: Lines, given: ClientOptions, child: Child | None = None) -> None:
        start, self._garbage_timeout = given.get("start_timeout", START), given.get("garbage_timeout", GARBAGE)
        self.longest = max(start, self._garbage_timeout)
        """The seconds that the server may take to send its first message."""
        self._lines = lines
        self._child = child
        self._name = "the server" if child is None else f"the server {child.name!r}"
        self._scope = trio.CancelScope(deadline=trio.current_time() + start)
        self._reason = f"{self._name} sent no MCP message within {start:g} seconds (start_timeout)"
        self._garbage: list[str] = []
        self._more_garbage = 0  # number of further lines
        self._rest = b""  # incomplete line after the last one
        self._starting = True
        self._echoes = False
        lines.watch = self._check_line

    @property
    def unread(self) -> Callable[[], bool] | None:
        """Tells whether the process has read nothing yet; None if the server is no process."""
        child = self._child
        return None if child is None else lambda: child.has_read_nothing

    async def guard(self, caller: ClientSession) -> None:
        """Fail the opening when the time for the first message is over.  Returns then, or when `opened` is called."""
        with self._scope:
            await trio.sleep_forever()
        if self._starting:
            why = self._reason
            if not self._echoes:
                output = self._output() or (
                    "; it wrote nothing" if self._child is None else "; it wrote nothing to stdout"
                )
                why += output + self._last_words(output)
            caller.handle_events(caller.session.connection_lost(why=why))

    async def opened(self) -> None:
        self._started()
        self._scope.cancel()
        await trio.lowlevel.checkpoint()

    def explain(self) -> McpError | None:
        """Return why the stream has ended, or None if only its end is known."""
        exited = None if self._child is None else self._child.exit
        if not self._starting:
            return exited
        output = self._output()
        if exited is not None:
            return exited.unstarted(output)
        closed = "the stream" if self._child is None else "its stdin or stdout"
        return SessionClosed(f"{self._name} closed {closed} before its first message{output}{self._last_words(output)}")

    def _check_line(self, line: bytes, message: Message) -> None:
        if type(message) is Batch and all(type(each) is InvalidMessage for each in message.items):
            message = message.items[0]  # a JSON array that is not a batch, such as a printed list
        if type(message) is Request and message.method in _CLIENT_REQUESTS:
            self._reason = (
                f"{self._name} sends back its input, so it is not an MCP server, or a terminal is in between, as with "
                "docker run -t"
            )
            self._echoes = True
            self._scope.deadline = -math.inf
            return
        if type(message) is not InvalidMessage:
            self._started()
            return
        text = _printable(line) or message.why
        if not self._garbage:
            _log.warning(
                "%s wrote a line that is not an MCP message: %r; stdout is for messages, use stderr for other output",
                self._name,
                text,
            )
            deadline = trio.current_time() + self._garbage_timeout
            if deadline < self._scope.deadline:
                self._scope.deadline = deadline
                self._reason = (
                    f"{self._name} sent no MCP message within {self._garbage_timeout:g} seconds after its first line "
                    "that is not a message (garbage_timeout)"
                )
        if len(self._garbage) < _MAX_LINES:
            self._garbage.append(text)
        else:
            self._more_garbage += 1

    def _started(self) -> None:
        self._starting = False
        self._scope.deadline = math.inf
        self._lines.watch = None

    def _output(self) -> str:
        """Return the output of the program on stdout, as a part of an error message."""
        self._rest = self._rest or self._lines.rest()
        lines = [*self._garbage, f"... and {self._more_garbage} more" if self._more_garbage else _printable(self._rest)]
        return "; it wrote:\n  " + "\n  ".join(filter(None, lines)) if any(lines) else ""

    def _last_words(self, output: str) -> str:
        return "" if self._child is None else self._child.last_words(output)


def _printable(line: bytes) -> str:
    text = printable(line[: 4 * _LINE_LENGTH].decode(errors="replace"))
    return text if len(text) <= _LINE_LENGTH else f"{text[: _LINE_LENGTH - 3]}..."
