"""The bytes after which an exchange is cut: its connection is closed or reset, or junk follows.

A test that cuts an exchange after each of its bytes takes minutes.  So the speed of the run decides:

- `default`: one cut of each class: before the first byte, after it, in the middle, before and after the last one, and
  after the first occurrence of each separator.
- `full`: every fifth byte, and the ends.  The seed of the run says which fifth; runs with other seeds try the others.
- `long` and `all`: after each byte.
"""

from __future__ import annotations

import attrs

from tests.speeds import DEFAULT, FULL

__all__ = ["Cuts"]

SEPARATORS = (b"\r", b"\r\n", b"\r\n\r\n", b"\n", b"\n\n", b": ", b" ", b"{", b",", b"}", b"}\n")
FIFTH = 5


@attrs.frozen
class Cuts:
    """The test fixture `cuts`: `cuts(data)` are the numbers of bytes after which `data` is cut, in rising order."""

    speed: str
    seed: int

    def __call__(self, data: bytes) -> list[int]:
        offsets = range(len(data) + 1)
        if self.speed == FULL:
            return sorted({0, len(data), *offsets[self.seed % FIFTH :: FIFTH]})
        if self.speed != DEFAULT:
            return list(offsets)
        classes = {0, 1, len(data) // 2, len(data) - 1, len(data)}
        classes |= {data.index(each) + len(each) for each in SEPARATORS if each in data}
        return sorted(classes.intersection(offsets))
