"""Common code of the programs that drive clients in Python: try one behaviour after another, and print the results.

Each line of the output is a JSON object, ``{"behaviour": ..., "seen": ...}``.  An exception of a client is a result.
These programs run in the environment of the SDK, where this project is not installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

# Characters that can break a frame: quotes, all kinds of line ends (U+2028 and similar characters end a line for some
# readers of event streams), astral characters, and control characters that JSON must escape.
ODD = 'quote " backslash \\ é 東京 🦜 \u2028\u2029\u0085\u000b\u000c \r\n\t\x01\x7f end'
LARGE = ("0123456789 æøå 東京 🦜\n" * 40_000).encode()[:1_000_000].decode(errors="ignore")
PATIENCE = 60.0  # seconds for one behaviour, on a busy machine
# Seconds for which a server keeps an unused connection.  The default is five: on a busy machine the server may close a
# connection on which a client is sending a call, and the client cannot know whether the server has received the call.
KEEP_ALIVE = 300


def code_of(error: BaseException) -> int | None:
    """The JSON-RPC code in the error of any of these clients.  The error may be wrapped in exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    data = getattr(error, "error", error.args[0] if error.args else None)  # the first release has it in the arguments
    code = getattr(data, "code", None)
    return code if isinstance(code, int) else None


def wire(model: Any) -> dict[str, Any]:
    """A model of any of these clients in its JSON form, which is the same for all of them."""
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


class Report:
    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted

    async def look(self, behaviour: str, at: Callable[[], Awaitable[Any]]) -> None:
        """Try this behaviour and print its result, if it is wanted; an empty list of wanted behaviours means all."""
        if self.wanted and behaviour not in self.wanted:
            return
        try:
            with anyio.fail_after(PATIENCE):
                self.tell(behaviour, await at())
        except Exception as error:  # noqa: BLE001  each exception of a client is a result
            self.tell(behaviour, {"raised": f"{type(error).__name__}: {error}"[:300], "code": code_of(error)})

    def tell(self, behaviour: str, seen: Any) -> None:
        sys.stdout.write(json.dumps({"behaviour": behaviour, "seen": seen}) + "\n")
        sys.stdout.flush()


async def refused(call: Awaitable[Any]) -> Any:
    """The code of the error of this call, or ``isError``; if the call is not refused, its result, for the table."""
    try:
        answer = await call
    except Exception as error:  # noqa: BLE001
        code = code_of(error)
        return f"{type(error).__name__}: {error}"[:300] if code is None else code
    return "isError" if answer.get("isError") else f"no error: {answer}"[:300]


class Received:
    """Messages from the server, and a way to wait for them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self._changed = anyio.Event()

    def add(self, message: Any) -> None:
        self.seen.append(wire(message))
        self._changed.set()
        self._changed = anyio.Event()

    async def first(self, method: str) -> dict[str, Any]:
        """Wait for the first message of this method and return its parameters."""
        while True:
            for each in self.seen:
                if each.get("method") == method:
                    return each.get("params", {})
            await self._changed.wait()


class Logs:
    """The log messages of the tool, up to its last one."""

    def __init__(self) -> None:
        self._seen: list[str] = []
        self._complete = anyio.Event()

    def add(self, level: str, logger: str | None, data: Any) -> None:
        self._seen.append(f"{level} {logger} {data['level']}")
        if level == "error":
            self._complete.set()

    async def all(self) -> list[str]:
        await self._complete.wait()
        return self._seen
