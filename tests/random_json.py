"""Random changes of JSON values, for peers whose messages are almost correct."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

__all__ = ["randomly_changed"]


def randomly_changed(chance: random.Random, value: Any, junk: Sequence[Any], names: Sequence[str]) -> Any:
    """Return `value` without a member, with a value of `junk`, with a name of `names`, or as it is."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return copy.deepcopy(chance.choice(junk)) if chance.random() < 0.3 else value
    if isinstance(value, list):
        return [randomly_changed(chance, each, junk, names) for each in value]
    name, way = chance.choice(list(value)), chance.random()
    if way < 0.15:
        return {key: each for key, each in value.items() if key != name}
    if way < 0.5:
        return {**value, name if way < 0.35 else chance.choice(names): copy.deepcopy(chance.choice(junk))}
    return {**value, name: randomly_changed(chance, value[name], junk, names)}
