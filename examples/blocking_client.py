"""A client without an event loop: the core over the pipes of a child process, for a script or a web worker.

    python examples/blocking_client.py python examples/echo.py

The `Connection` does the protocol: the choice of the revision, ids, deadlines, late answers, progress, the end of the
session.  This file moves the bytes and reads the clock.  One thread may use the client at a time; several threads can
share it with a lock around each call.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from trio_mcp.core.connection import Connection
from trio_mcp.core.errors import METHOD_NOT_FOUND, RemoteProtocolError, RequestError, SessionClosed
from trio_mcp.core.messages import ABSENT, Event
from trio_mcp.core.opening import ClientProtocol, OpeningFailed
from trio_mcp.core.requests import Answered, InvalidAnswer, Outcome, ProgressReported, Refused, TimedOut
from trio_mcp.core.session import Call, Offer, Opened

OFFER = Offer({"name": "blocking-client", "version": "1.0"})  # no capabilities, so the server may not ask the client
PROBE = 5.0  # seconds without an answer after which the server is treated as one of an older revision
GRACE = 2.0  # seconds for the child to exit after the end of its input

T = TypeVar("T")
OnProgress = Callable[[float, float | None, str | None], object]


class BlockingClient:
    """``with BlockingClient(["python", "server.py"]) as client: client.call_tool("echo", {"text": "x"})``"""

    def __init__(self, command: Sequence[str], *, timeout: float = 30.0) -> None:
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.writes, self.reads = self.child.stdin.fileno(), self.child.stdout.fileno()
        os.set_blocking(self.writes, False)
        self.unsent = bytearray()
        self.connection = Connection(ClientProtocol(OFFER))
        now = time.monotonic()
        self.connection.session.open(probe_until=now + min(PROBE, timeout), deadline=now + timeout)
        try:
            opened = self._until(lambda event: event if isinstance(event, Opened | OpeningFailed) else None)
            if isinstance(opened, OpeningFailed):
                raise opened.error or SessionClosed(opened.negotiation.why)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def call_tool(self, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Return the result of a tool; `options` are those of `request`."""
        return self.request("tools/call", {"name": name, "arguments": arguments or {}}, **options)

    def request(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        """Return the result.

        Raises `RequestError` if the server answers with an error, `RemoteProtocolError` if its answer is invalid,
        TimeoutError after `timeout` seconds, and `SessionClosed` if the server has ended.
        """
        deadline = time.monotonic() + timeout
        id = self.connection.request(method, params, deadline=deadline, progress=on_progress is not None)

        def outcome_of(event: Event) -> Outcome | None:
            if isinstance(event, ProgressReported) and event.id == id and on_progress is not None:
                on_progress(event.progress, event.total, event.message)
            return event if isinstance(event, Outcome) and event.id == id else None

        try:
            return self._result(self._until(outcome_of), timeout)
        except BaseException:  # Ctrl-C, or an exception from `on_progress`
            self.connection.cancel(id)
            self._send()
            raise

    def _result(self, outcome: Outcome, timeout: float) -> dict[str, Any]:
        match outcome:
            case Answered(result=result):
                return result
            case Refused(error=error):
                raise RequestError(error.code, error.message, None if error.data is ABSENT else error.data)
            case InvalidAnswer(why=why):
                raise RemoteProtocolError(why)
            case TimedOut(method=method):
                raise TimeoutError(f"{method} has not been answered within {timeout:g} seconds")
            case _:
                raise SessionClosed(f"{outcome.method} has not been answered: the server has gone")

    def _until(self, select_event: Callable[[Event], T | None]) -> T:
        """Carry bytes in both directions until `select_event` returns a value for an event."""
        selected: T | None = None
        while selected is None:
            self._send()
            for event in self._events():
                if isinstance(event, Call):  # the client declares no capabilities; the core has answered the pings
                    self.connection.refuse(event.request.id, RequestError(METHOD_NOT_FOUND, "nothing is served here"))
                selected = selected or select_event(event)
        return selected

    def _events(self) -> list[Event]:
        """Wait until data arrives, the pipe takes data, the server ends or a deadline passes; return the events."""
        deadline = self.connection.next_deadline()
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, writable, _ = select.select([self.reads], [self.writes] if self.unsent else [], [], wait)
        if writable:
            self._write()
        if readable:
            self.connection.receive_data(os.read(self.reads, 65536), time.monotonic())  # no bytes: the server has ended
        else:
            self.connection.tick(time.monotonic())
        return self.connection.events()

    def _send(self) -> None:
        self.unsent += self.connection.data_to_send()
        self._write()

    def _write(self) -> None:
        """Write as much as the pipe takes.

        A blocking write could wait forever: the server may not read before the client has read from it.
        """
        try:
            while self.unsent:
                del self.unsent[: os.write(self.writes, self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()  # the server has ended; the next read notices it

    def close(self) -> None:
        """Close the input of the server, which tells it to exit; kill it after `GRACE` seconds."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.close()
        try:
            self.child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()


def main() -> None:
    if not sys.argv[1:]:
        sys.exit(__doc__)
    with BlockingClient(sys.argv[1:]) as client:
        print(client.connection.session.negotiation)
        for tool in client.request("tools/list")["tools"]:
            print(tool["name"], "-", tool.get("description", ""))


if __name__ == "__main__":
    main()
