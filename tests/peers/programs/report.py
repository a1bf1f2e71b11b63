"""What the programs for clients in Python have in common: looking at one behaviour after another, and telling.

Each line of the output is a JSON object, ``{"behaviour": ..., "seen": ...}``; what a client raised is seen as well.
These programs run in the environment of the SDK, where nothing of this project is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

# What each kind of text does to a frame: quotes, line ends of every kind (U+2028 and friends end a line for some who
# read event streams), astral characters, and control characters that JSON must escape.
ODD = 'quote " backslash \\ é 東京 🦜 \u2028\u2029\u0085\u000b\u000c \r\n\t\x01\x7f end'
LARGE = ("0123456789 æøå 東京 🦜\n" * 40_000).encode()[:1_000_000].decode(errors="ignore")
PATIENCE = 60.0  # seconds for one behaviour, on a busy machine
# Seconds that a server keeps a connection which is not used.  By default they are five: on a busy machine it may close
# one at which a client has just begun to call, and cannot know whether it has been called.
KEPT = 300


def code_of(error: BaseException) -> int | None:
    """The JSON-RPC code in the error of any of these clients, which may be wrapped in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    told = getattr(error, "error", error.args[0] if error.args else None)  # the first release has it in the arguments
    code = getattr(told, "code", None)
    return code if isinstance(code, int) else None


def wire(model: Any) -> dict[str, Any]:
    """A model of any of these clients as it is on the wire, which is the same for all of them."""
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


class Report:
    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted

    async def look(self, behaviour: str, at: Callable[[], Awaitable[Any]]) -> None:
        """Tell what is seen of it, if it is wanted (without a list of them, all are)."""
        if self.wanted and behaviour not in self.wanted:
            return
        try:
            with anyio.fail_after(PATIENCE):
                self.tell(behaviour, await at())
        except Exception as error:  # noqa: BLE001  the table is told of whatever a client raises
            self.tell(behaviour, {"raised": f"{type(error).__name__}: {error}"[:300], "code": code_of(error)})

    def tell(self, behaviour: str, seen: Any) -> None:
        sys.stdout.write(json.dumps({"behaviour": behaviour, "seen": seen}) + "\n")
        sys.stdout.flush()


async def refused(call: Awaitable[Any]) -> Any:
    """The code of the error that the call ends with, or that its result says so; or what it gave, for the table."""
    try:
        answer = await call
    except Exception as error:  # noqa: BLE001
        code = code_of(error)
        return f"{type(error).__name__}: {error}"[:300] if code is None else code
    return "isError" if answer.get("isError") else f"no error: {answer}"[:300]


class Latest:
    """What the server told, to be waited for."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self._changed = anyio.Event()

    def add(self, message: Any) -> None:
        self.seen.append(wire(message))
        self._changed.set()
        self._changed = anyio.Event()

    async def some(self, method: str) -> dict[str, Any]:
        """The parameters of the first one of this method."""
        while True:
            for each in self.seen:
                if each.get("method") == method:
                    return each.get("params", {})
            await self._changed.wait()


class Logs:
    """The log messages that came, up to the last one that the tool sends."""

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
