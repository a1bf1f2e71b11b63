"""The first message of a server on a stream: what the program may do before it, and the errors if it never comes.

A program that is started by mistake sends no MCP message: it prints, waits, reads or exits.  So the time for the first
message has its own limits, apart from the time for an answer, and the error repeats the program's output.

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
from typing import TYPE_CHECKING

import attrs
import trio

from trio_mcp.core.errors import McpError, SessionClosed, check_seconds, printable
from trio_mcp.core.messages import Batch, InvalidMessage, Message, Request

if TYPE_CHECKING:
    from trio_mcp.client.caller import Caller
    from trio_mcp.transport.child import Child
    from trio_mcp.transport.wire import Lines

__all__ = ["GARBAGE", "START", "Startup", "Timeouts"]

START = 120.0
"""Seconds for the first message: a launcher such as npx or uvx downloads the server at the first run, which takes a
minute over a slow network."""
GARBAGE = 30.0
"""Seconds for the first message after the first line that is not a message: servers that print a greeting do it when
they are ready."""

_log = logging.getLogger("trio_mcp")

_MAX_LINES = 10  # lines that an error repeats: the first ones, because they show which program it is
_LINE_LENGTH = 200  # characters of each line
_CLIENT_REQUESTS = frozenset({"server/discover", "initialize"})  # requests that only a client sends


@attrs.frozen
class Timeouts:
    """The timeouts for the first message.  Raises `UsageError` if a value is not a number of seconds."""

    start_timeout: float = START
    garbage_timeout: float = GARBAGE

    def __attrs_post_init__(self) -> None:
        check_seconds("start_timeout", self.start_timeout)
        check_seconds("garbage_timeout", self.garbage_timeout)

    @property
    def longest(self) -> float:
        """Return the seconds that a server may take to send its first message."""
        return max(self.start_timeout, self.garbage_timeout)


class Startup:
    """The time from the start of one server to its first message.  `child`: the process of the server, if it is one."""

    def __init__(self, lines: Lines, timeouts: Timeouts, child: Child | None = None) -> None:
        self.timeouts = timeouts
        self._lines = lines
        self._child = child
        self._name = "the server" if child is None else f"the server {child.name!r}"
        self._scope = trio.CancelScope(deadline=trio.current_time() + timeouts.start_timeout)
        self._reason = f"{self._name} sent no MCP message within {timeouts.start_timeout:g} seconds (start_timeout)"
        self._garbage: list[str] = []
        self._more_garbage = 0  # number of further lines
        self._rest = b""  # incomplete line after the last one
        self._starting = True
        self._echoes = False
        lines.watch = self._check_line

    async def guard(self, caller: Caller) -> None:
        """Fail the opening when the time for the first message is over.  Returns then, or when `opened` is called."""
        with self._scope:
            await trio.sleep_forever()
        if self._starting:
            why = self._reason if self._echoes else f"{self._reason}{self._output_or_silence()}"
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
        if type(message) is InvalidMessage:
            self._add_garbage(_printable(line) or message.why)
        elif type(message) is Request and message.method in _CLIENT_REQUESTS:
            self._reason = (
                f"{self._name} sends back its input, so it is not an MCP server, or a terminal is in between, as with "
                "docker run -t"
            )
            self._echoes = True
            self._scope.deadline = -math.inf
        else:
            self._started()

    def _started(self) -> None:
        self._starting = False
        self._scope.deadline = math.inf
        self._lines.watch = None

    def _add_garbage(self, text: str) -> None:
        if not self._garbage:
            _log.warning(
                "%s wrote a line that is not an MCP message: %r; stdout is for messages, use stderr for other output",
                self._name,
                text,
            )
            seconds = self.timeouts.garbage_timeout
            deadline = trio.current_time() + seconds
            if deadline < self._scope.deadline:
                self._scope.deadline = deadline
                self._reason = (
                    f"{self._name} sent no MCP message within {seconds:g} seconds after its first line that is not "
                    "a message (garbage_timeout)"
                )
        if len(self._garbage) < _MAX_LINES:
            self._garbage.append(text)
        else:
            self._more_garbage += 1

    def _output(self) -> str:
        """Return the output of the program on stdout, as a part of an error message."""
        self._rest = self._rest or self._lines.rest()
        lines = [*self._garbage, f"... and {self._more_garbage} more" if self._more_garbage else _printable(self._rest)]
        return "; it wrote:\n  " + "\n  ".join(filter(None, lines)) if any(lines) else ""

    def _output_or_silence(self) -> str:
        output = self._output() or ("; it wrote nothing" if self._child is None else "; it wrote nothing to stdout")
        return output + self._last_words(output)

    def _last_words(self, output: str) -> str:
        return "" if self._child is None else self._child.last_words(output)


def _printable(line: bytes) -> str:
    text = printable(line[: 4 * _LINE_LENGTH].decode(errors="replace"))
    return text if len(text) <= _LINE_LENGTH else f"{text[: _LINE_LENGTH - 3]}..."
