"""The three speeds of the suite, and the speed of each case.

- `default`: the cases that `pytest` runs.  Each behaviour is tested once, near its code, on the two newest revisions.
- `full`: `.ci/run` adds them.  All revisions, conformance, the newest official SDKs, nginx and the browser.
- `long`: `.ci/run --long` adds them.  All transports times all revisions, every cut, every peer.

A mark with the name of a speed decides.  A mark of the test comes first, then a mark of the case, then a mark of the
module: this is the order of `iter_markers`.  Without a mark, two rules decide:

1. A case that needs the official schemas, which a user's checkout does not have, is `full`.
2. Cases that differ only in their revisions are one behaviour.  Those of the two newest revisions are `default`, the
   others are `full`.  If the behaviour has neither of these two revisions, its newest one is `default`.

A case that cuts an exchange (`tests/cuts.py`) runs at each speed, with other cuts.  A case with examples of Hypothesis
also runs at each speed: the default suite tries a third of the examples.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import hypothesis
import pytest

from tests.server.raw_client import REVISION_NAMES

__all__ = ["ALL", "DEFAULT", "FULL", "LONG", "SPEEDS", "has_examples", "part_of", "speeds"]

SPEEDS = DEFAULT, FULL, LONG = ("default", "full", "long")
ALL = "all"
NEWEST = REVISION_NAMES[-2:]


def speeds(items: Iterable[pytest.Item]) -> dict[pytest.Item, frozenset[str]]:
    """The speeds at which each case runs: one, and for a case with cuts or examples also the later ones."""
    newest: defaultdict[str, Sequence[str]] = defaultdict(list)  # the newest revisions of each behaviour
    for item in items:
        newest[_behaviour(item)] = max(newest[_behaviour(item)], _revisions(item))
    found = {}
    for item in items:
        revisions = _revisions(item)
        fixtures = getattr(item, "fixturenames", ())
        fast = all(each in NEWEST for each in revisions) or revisions == newest[_behaviour(item)]
        rule = DEFAULT if fast and "shared_schemas" not in fixtures else FULL
        marked = next((mark.name for mark in item.iter_markers() if mark.name in SPEEDS), rule)
        several = has_examples(item) or not {"cuts", "examples"}.isdisjoint(fixtures)
        found[item] = frozenset(SPEEDS[SPEEDS.index(marked) :] if several else [marked])
    return found


def has_examples(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj)


def part_of(item: pytest.Item, parts: int) -> int:
    """The part of a run, from 1 to `parts`, to which a case belongs."""
    return zlib.crc32(item.nodeid.encode()) % parts + 1


def _revisions(item: pytest.Item) -> Sequence[str]:
    """The revisions of a case: several, if the case has a relay between two of them."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    said = [getattr(each, "revision", each) for each in params.values()]
    names = [getattr(each, "name", each) for each in said]
    return [name for name in names if isinstance(name, str) and name in REVISION_NAMES]


def _behaviour(item: pytest.Item) -> str:
    """The name of a case without its revisions."""
    name = item.nodeid
    for revision in _revisions(item):
        name = name.replace(revision, "*")
    return name
