"""A client without any event loop: the core over the pipes of a child process, for a script or a web worker.

    python examples/blocking_client.py python examples/echo.py

The `Connection` does the protocol: the revision that both speak, ids, deadlines, late answers, progress, the end.  This
file moves bytes and has the clock.  One thread uses it at a time; with a lock around each call, several can share it.
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

OFFER = Offer({"name": "blocking-client", "version": "1.0"})  # declares nothing, so it is asked nothing
PROBE = 5.0  # seconds after which a server that stays silent is taken for an old one
GRACE = 2.0  # seconds for a child to end when its input does

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

    def call_tool(self, name: str, arguments: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
        """What a tool gives; `how` is that of `request`."""
        return self.request("tools/call", {"name": name, "arguments": arguments or {}}, **how)

    def request(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        """The result.  Raises `RequestError` for an error, TimeoutError, and `SessionClosed` if the server has gone."""
        deadline = time.monotonic() + timeout
        id = self.connection.request(method, params, deadline=deadline, progress=on_progress is not None)

        def ours(event: Event) -> Outcome | None:
            if isinstance(event, ProgressReported) and event.id == id and on_progress is not None:
                on_progress(event.progress, event.total, event.message)
            return event if isinstance(event, Outcome) and event.id == id else None

        try:
            return self._result(self._until(ours), timeout)
        except BaseException:  # Ctrl-C, or what `on_progress` has raised
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

    def _until(self, found: Callable[[Event], T | None]) -> T:
        """Carry bytes both ways until `found` makes something of an event."""
        what: T | None = None
        while what is None:
            self._send()
            for event in self._events():
                if isinstance(event, Call):  # nothing was declared that could be asked for; pings are answered already
                    self.connection.refuse(event.request.id, RequestError(METHOD_NOT_FOUND, "nothing is served here"))
                what = what or found(event)
        return what

    def _events(self) -> list[Event]:
        """What happens next: something comes, there is room to send, the server goes, or a deadline passes."""
        until = self.connection.next_deadline()
        wait = None if until is None else max(0.0, until - time.monotonic())
        readable, writable, _ = select.select([self.reads], [self.writes] if self.unsent else [], [], wait)
        if writable:
            self._write()
        if readable:
            self.connection.receive_data(os.read(self.reads, 65536), time.monotonic())  # no bytes: the server has gone
        else:
            self.connection.tick(time.monotonic())
        return self.connection.events()

    def _send(self) -> None:
        self.unsent += self.connection.data_to_send()
        self._write()

    def _write(self) -> None:
        """As much as the pipe takes; to wait for more would be to wait for a server that first wants to be read."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self.writes, self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()  # it has gone, which is seen where it is read

    def close(self) -> None:
        """The end of its input is the server's sign to end; one that does not is killed."""
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
