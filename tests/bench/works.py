"""The requests to measure in addition to the echo; each subject gives the same answers to them.

Each server has their tools, resource and prompt: `programs/ours_works.py`, `bare.py`, `official.py` and `official.mjs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from tests.bench.messages import TEXT

__all__ = ["WORKS", "Work"]

LONG = f"{TEXT}\n" * 96 + "The end."  # 5 KB
GUEST = {"name": "Ann", "age": 42, "email": "ann@example.com"}
BOOKING = {
    "guest": GUEST,
    "room": {"beds": 2, "floor": 3, "view": "sea"},
    "stay": {"nights": 7, "price": 99.5},
    "wishes": ["quiet", "high up"],
    "breakfast": True,
}


@attrs.frozen
class Work:
    """A request, and bytes that its answer contains once."""

    method: str
    params: Mapping[str, Any]
    sign: bytes


def _tool(name: str, arguments: Mapping[str, Any], sign: bytes) -> Work:
    return Work("tools/call", {"name": name, "arguments": arguments}, sign)


WORKS: Mapping[str, Work] = {
    "a text of 5 KB": _tool("echo", {"text": LONG}, b"The end."),
    "two blocks of content": _tool("blocks", {"city": "Oslo"}, b"Light wind"),
    "add": _tool("add", {"a": 20, "b": 22}, b'"text":"42"'),
    "a dataclass": _tool("weather", {"city": "Oslo"}, b'"structuredContent":{"city":"Oslo"'),
    "ten bounded arguments": _tool("book", BOOKING, b"booked for Ann"),
    "resources/read": Work("resources/read", {"uri": "bench://note"}, TEXT.encode()),
    "prompts/get": Work("prompts/get", {"name": "greet", "arguments": {"name": "Ann"}}, b"Say hello to Ann."),
}
