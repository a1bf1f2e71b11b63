"""What a server on a stream may do before its first message, and what the client makes of it.

A program that is started by mistake says nothing of MCP: it prints, waits, reads or ends.  So the time until the first
message is bounded apart from that for an answer, and what the program wrote instead is in the error.

| The program | The opening of the session |
|---|---|
| sends a message, whatever it says | goes on; an answer has the time that it has anywhere |
| writes a line that is no message | logs the first such line as a WARNING, and fails `garbage_timeout` seconds later |
| writes nothing, or only a part of a line | fails `start_timeout` seconds after the start |
| sends back what it is sent, as `cat` does | fails at once |
| closes its stdout or stdin, and runs on | fails at once |
| ends, with whatever status | fails at once, with `ServerExited` |

The first line of two that apply to the same moment decides.  `math.inf` turns a timeout off.  Once a session is open,
a line that is no message is a deviation of the server like any other.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import attrs
import trio

from trio_mcp.core.errors import McpError, SessionClosed, check_seconds, printable
from trio_mcp.core.jsonrpc import Batch, InvalidMessage, Message, Request

if TYPE_CHECKING:
    from trio_mcp.client.caller import Caller
    from trio_mcp.transport.child import Child
    from trio_mcp.transport.duplex import Lines

__all__ = ["GARBAGE", "START", "Startup", "Timeouts"]

START = 120.0
"""Seconds for the first message: a launcher such as npx or uvx fetches the server at its first run, which over a slow
line takes a minute."""
GARBAGE = 30.0
"""Seconds for the first message after the first line that is none: servers that greet do it when they are ready."""

_log = logging.getLogger("trio_mcp")

_LINES = 10  # that an error repeats: the first ones, which say what the program is
_LINE = 200  # characters of each
_OURS = frozenset({"server/discover", "initialize"})  # which no server asks


@attrs.frozen
class Timeouts:
    """Raises `UsageError` for what is no number of seconds."""

    start_timeout: float = START
    garbage_timeout: float = GARBAGE

    def __attrs_post_init__(self) -> None:
        check_seconds("start_timeout", self.start_timeout)
        check_seconds("garbage_timeout", self.garbage_timeout)

    @property
    def longest(self) -> float:
        """Seconds that a server may take to its first message, which is before the answer."""
        return max(self.start_timeout, self.garbage_timeout)


class Startup:
    """The time from the start of one server to its first message; `child` is the server where it is a process."""

    def __init__(self, lines: Lines, timeouts: Timeouts, child: Child | None = None) -> None:
        self.timeouts = timeouts
        self._lines = lines
        self._child = child
        self._name = "the server" if child is None else f"the server {child.name!r}"
        self._scope = trio.CancelScope(deadline=trio.current_time() + timeouts.start_timeout)
        self._why = f"{self._name} sent no MCP message within {timeouts.start_timeout:g} seconds (start_timeout)"
        self._garbage: list[str] = []
        self._more = 0  # lines that are not kept
        self._rest = b""  # what was written after the last line
        self._starting = True
        self._echoes = False
        lines.watch = self._see

    async def guard(self, caller: Caller) -> None:
        """Fail the opening when the time for the first message is over.  Returns then, or when it is `opened`."""
        with self._scope:
            await trio.sleep_forever()
        if self._starting:
            caller.act(
                caller.session.connection_lost(why=self._why if self._echoes else f"{self._why}{self._silence()}")
            )

    async def opened(self) -> None:
        self._started()
        self._scope.cancel()
        await trio.lowlevel.checkpoint()

    def explain(self) -> McpError | None:
        """Why the stream has ended, if there is more to say than that it has."""
        exited = None if self._child is None else self._child.exit
        if not self._starting:
            return exited
        said = self._said()
        if exited is not None:
            return exited.unstarted(said)
        what = "the stream" if self._child is None else "its stdin or stdout"
        return SessionClosed(f"{self._name} closed {what} before its first message{said}{self._last_words(said)}")

    def _see(self, line: bytes, message: Message) -> None:
        if type(message) is Batch and all(type(each) is InvalidMessage for each in message.items):
            message = message.items[0]  # an array of something else, such as a list that was printed
        if type(message) is InvalidMessage:
            self._see_garbage(_printable(line) or message.why)
        elif type(message) is Request and message.method in _OURS:
            self._why = (
                f"{self._name} sends back what it is sent, so it is no MCP server, or a terminal is in between, as by "
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

    def _see_garbage(self, text: str) -> None:
        if not self._garbage:
            _log.warning(
                "%s wrote a line that is no MCP message: %r; stdout is for messages alone, and all else goes to stderr",
                self._name,
                text,
            )
            seconds = self.timeouts.garbage_timeout
            deadline = trio.current_time() + seconds
            if deadline < self._scope.deadline:
                self._scope.deadline = deadline
                self._why = (
                    f"{self._name} sent no MCP message within {seconds:g} seconds of the first line that is none "
                    "(garbage_timeout)"
                )
        if len(self._garbage) < _LINES:
            self._garbage.append(text)
        else:
            self._more += 1

    def _said(self) -> str:
        """What it has written to stdout, in words of an error."""
        self._rest = self._rest or self._lines.rest()
        lines = [*self._garbage, f"... and {self._more} more" if self._more else _printable(self._rest)]
        return "; it wrote:\n  " + "\n  ".join(filter(None, lines)) if any(lines) else ""

    def _silence(self) -> str:
        said = self._said() or ("; it wrote nothing" if self._child is None else "; it wrote nothing to stdout")
        return said + self._last_words(said)

    def _last_words(self, said: str) -> str:
        return "" if self._child is None else self._child.last_words(said)


def _printable(line: bytes) -> str:
    text = printable(line[: 4 * _LINE].decode(errors="replace"))
    return text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."
