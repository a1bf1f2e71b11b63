"""The cost of a schema and of a value, estimated before the engine sees them; both may be hostile.

A schema of a kilobyte can cost unbounded time: for example definitions that each use the next one twice, 40 deep, or a
recursive `anyOf` with a deep value.  `Analysis` finds the subschemas of a schema and the targets of its references, and
makes its `Cost`.  `measure` finds the `Size` of a value.  The cost says whether a value of that size may be checked.

Linear is not cheap: `a[ab]{4000}c` can be in 4,000 states after each character, and takes 14 µs for it.  So the cost of
a pattern is its number of states, and the cost of a value includes its characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urljoin

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Json, JsonObject, record

__all__ = ["DEFAULT_DIALECT", "DIALECTS", "InvalidSchema"]

DEFAULT_DIALECT = "https://json-schema.org/draft/2020-12/schema"
DIALECTS: Mapping[str, str] = MappingProxyType(
    {
        "http://json-schema.org/draft-04/schema#": "Draft4Validator",
        "http://json-schema.org/draft-06/schema#": "Draft6Validator",
        "http://json-schema.org/draft-07/schema#": "Draft7Validator",
        "https://json-schema.org/draft/2019-09/schema": "Draft201909Validator",
        DEFAULT_DIALECT: "Draft202012Validator",
    }
)
"""The dialects that `$schema` may name (http or https, with or without the last `#`), and their validators."""

# Schemas.  The largest known tool schemas have about 2,000 values, 20 deep; the engine compiles recursively.
_SCHEMA_VALUES = 20_000
_SCHEMA_DEPTH = 64
# A pattern may compile to a program of 2 MiB (`.{1,1000}` takes half of that), which takes 1.5 ms to build, and all
# patterns of a schema to 32 MiB.  Parsing their text takes 0.2 µs a character.
_PATTERNS = 200
_PATTERN_TEXT = 64 * 1024
_PATTERN_BYTES = 2 * 1024 * 1024
_PATTERNS_BYTES = 32 * 1024 * 1024
# Subschemas on one path into a value (`Cost.width`), and the length of a chain of references.
_WIDTH = 5_000
_HEIGHT = 200
# Bytes for the paths of all subschemas, and the copies of some subschemas: at most 0.1 s.
_SCHEMA_TEXT = 100_000_000
# The length of a name or reference, joined to its base: servers commonly accept URIs of this length.  10,000 fit into
# a schema.
_URI = 2_048
# Lookups to resolve all references.  10,000 references of 20 steps take 100 ms.
_LOOKUPS = 200_000

# Values.  Messages are at most 128 deep (`Limits.depth`); the engine stops at 255.
_DEPTH = 250
# A message of 16 MiB (`Limits.message_bytes`) cannot have more.
_VALUES = 8 * 1024 * 1024
# Subschemas applied to a value, at up to 17 ns each: at most 0.1 s.
_WORK = 6_000_000
# Pattern states at all bytes of a value, at up to 5 ns each: at most 0.1 s.  A pattern of a few states is compiled to a
# table, which takes 1 ns for any byte.
_STATES = 25_000_000
_FEW_STATES = 10
# Frames of the engine's recursion; a thread's stack of 1 MiB has room for 12,000 (measured).
_FRAMES = 12_000
# Bytes of all reasons together.  The engine gives each reason its path in the value and in the schema, and four copies
# of the value and of the violated keyword's value.  A reason alone takes 1,000 bytes and 5 µs: at most 0.1 s.
_TEXT = 100_000_000
_REASONS = 20_000
_REASON = 1_000
_STEP = 64
_COPIES = 4
# To find equal items, the engine hashes large integers as doubles; integers with the same double are compared in pairs.
_COLLISIONS = 100
_EXACT_IN_A_DOUBLE = 2**53
_BITS_OF_A_DOUBLE = 1024
_DIGITS = 309  # of the largest double
_BYTES_PER_CHARACTER = 3  # beyond ASCII; a few scripts and emoji take 4

_SHOWN = 200  # characters of a part of a schema in an error message


class InvalidSchema(UsageError):
    """A JSON Schema that cannot be used; `reason` says why.

    | `reason` | Meaning |
    |---|---|
    | "dialect" | its `$schema` is not one of `DIALECTS` |
    | "invalid" | it breaks the rules of its dialect |
    | "reference" | a reference without a target in the schema itself |
    | "pattern" | a pattern that does not run in linear time |
    | "limit" | it would take too much work |
    | "root" | it cannot be used for this purpose, for example as an input schema |

    It is a `UsageError` even if a peer sent the schema: the caller decides how to treat, for example, a tool with an
    unusable output schema.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


# Measuring a value, before any recursion into it.


class Size(NamedTuple):
    """The size of a value.  The last four members are 0 if its strings were not counted."""

    values: int
    depth: int
    collisions: int  # the largest number of large integers that share one double
    text: int = 0  # bytes of all strings, names included
    steps: int = 0  # of the paths of all values together
    longest: int = 0  # bytes of the longest name
    copied: int = 0  # bytes of the strings and long numbers in each value, with those below it, of all values together

    def described(self, step: int) -> int:
        """The bytes that reasons for all values would take: for each its path, with `step` for a step, and a copy."""
        return self.steps * (step + self.longest + _STEP) + _COPIES * self.copied


def measure(value: Json, *, text: bool, max_depth: int = _DEPTH) -> Size | str:
    """Return the size of `value`, or why it is unfit.  Works level by level, so that no depth can exhaust a stack.

    `text`: count the bytes of strings.
    """
    values = depth = text_bytes = steps = longest = copied = 0
    by_double: dict[float, int] = {}
    level = [value]
    while level:
        values += len(level)
        depth += 1
        if depth > max_depth:
            return f"is nested more than {max_depth} deep"
        if values > _VALUES:
            return f"has more than {_VALUES} values"
        if text:
            names = [_bytes(each) for item in level if isinstance(item, dict) for each in item if isinstance(each, str)]
            here = sum(names) + sum(_bytes(item) for item in level if isinstance(item, str))
            text_bytes, copied = text_bytes + here, copied + depth * here
            steps, longest = steps + depth * len(level), max(longest, *names, 0)
        below: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
            elif isinstance(item, (int, float)) and not -_EXACT_IN_A_DOUBLE <= item <= _EXACT_IN_A_DOUBLE:
                # 1e400 is JSON, but `json` reads it as infinity, which the engine would take for null.  The engine
                # compares longer integers slowly.
                if not (item.bit_length() < _BITS_OF_A_DOUBLE if isinstance(item, int) else math.isfinite(item)):
                    return "has a number outside the range of a double"
                if isinstance(item, int):
                    by_double[float(item)] = by_double.get(float(item), 0) + 1
                    copied += depth * _DIGITS
        level = below
    return Size(values, depth, max(by_double.values(), default=0), text_bytes, steps, longest, copied)


def _bytes(text: str) -> int:
    """Bytes of a string or the name of a member: patterns can apply to both."""
    return len(text) if text.isascii() else _BYTES_PER_CHARACTER * len(text)


# The parts of a schema: its subschemas, their names, and the targets of its references.

_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
_NESTED = frozenset({"additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else"})
_NESTED |= {"if", "items", "not", "oneOf", "prefixItems", "propertyNames", "then"}
_NESTED |= {"unevaluatedItems", "unevaluatedProperties"}
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})


def _subschemas(schema: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """The subschemas in any dialect, each with its keyword, without boolean ones, which cost nothing."""
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            inside = list(value.values())
        elif keyword in _NESTED:
            inside = list(value) if isinstance(value, list | tuple) else [value]
        else:
            continue
        for each in inside:
            if isinstance(each, dict):
                yield keyword, each


def _patterns(schema: JsonObject) -> Iterator[str]:
    """The patterns of a subschema itself."""
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            yield pattern


class Analysis:
    """The subschemas of a schema: their names, the targets of their references, and their costs.

    If two subschemas have one name, a reference means both.
    """

    def __init__(self, schema: Json) -> None:
        _check_size(schema)
        root = schema if isinstance(schema, dict) else {}
        self.dialect = _dialect(root)
        self._root = root
        self._subschemas: list[JsonObject] = []
        # By base and fragment.  By None and name: the possible targets of a dynamic reference in any place.
        self._named: dict[tuple[str | None, str], list[Json]] = {("", ""): [root]}
        self._base: dict[int, str] = {}  # by identity
        self._costs: dict[int, Cost] = {}  # by identity
        self._patterns = 0
        self._pattern_text = 0
        self._lookups = 0
        self._walk(root, "")

    def _walk(self, root: JsonObject, base: str) -> None:
        waiting = [(root, base)]
        while waiting:
            schema, base = waiting.pop()
            self._count_lookups(1)
            if "$schema" in schema and _dialect(schema) != self.dialect:
                raise InvalidSchema("dialect", "the schema mixes dialects; all parts must have the dialect of the root")
            base = self._enter(schema, base)
            self._subschemas.append(schema)
            for pattern in _patterns(schema):
                self._patterns += 1
                self._pattern_text += len(pattern)
            waiting.extend((below, base) for _, below in _subschemas(schema))
        if self._patterns > _PATTERNS:
            raise InvalidSchema("limit", f"the schema has more than {_PATTERNS} patterns")
        if self._pattern_text > _PATTERN_TEXT:
            raise InvalidSchema("limit", f"the patterns of the schema have more than {_PATTERN_TEXT} characters")

    def _enter(self, schema: JsonObject, base: str) -> str:
        """Record the names of `schema`.  Returns the base URI for the references in it."""
        old = self.dialect.startswith("http:")
        name = schema.get("id" if "draft-04" in self.dialect else "$id")
        if isinstance(name, str) and not (old and "$ref" in schema):  # up to draft 7, $ref disables its siblings
            base, _, anchor = _join(base, name).partition("#")
            self._named.setdefault((base, anchor), []).append(schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._named.setdefault((base, name), []).append(schema)
        # The target of a dynamic reference depends on the path that the engine has taken.
        dynamic = "" if schema.get("$recursiveAnchor") is True else schema.get("$dynamicAnchor")
        if isinstance(dynamic, str):
            self._named.setdefault((None, dynamic), []).append(schema)
        self._base[id(schema)] = base
        return base

    def _targets(self, schema: JsonObject) -> Iterator[JsonObject]:
        """The targets of the references of `schema`."""
        for keyword in _REFERENCES & schema.keys():
            reference = schema[keyword]
            if not isinstance(reference, str):
                raise InvalidSchema("invalid", f"{keyword} must be a string, got {type(reference).__name__}")
            base, _, fragment = _join(self._base[id(schema)], reference).partition("#")
            targets = self._find(base, unquote(fragment))
            if not targets:
                # schema-08, schema-11: a target outside the document is not fetched.  Nor does its absence allow every
                # value.
                raise InvalidSchema("reference", f"{shown_part(reference)} has no target in the schema itself")
            if keyword != "$ref":
                targets += self._named.get((None, fragment), [])
                self._count_lookups(len(targets))
            for each in targets:
                if isinstance(each, dict):  # the others are true or false
                    if id(each) not in self._base:  # a pointer can go through a keyword that JSON Schema does not have
                        self._walk(each, base)
                    yield each

    def _find(self, base: str, fragment: str) -> list[Json]:
        steps = fragment.split("/")[1:] if fragment.startswith("/") else []
        found = list(self._named.get((base, "" if steps else fragment), ()))
        for step in steps:
            self._count_lookups(len(found))
            found = [below for each in found for below in below_step(each, step.replace("~1", "/").replace("~0", "~"))]
        self._count_lookups(len(found))
        return found

    def _count_lookups(self, number: int) -> None:
        """Limit the lookups: one name can belong to many subschemas, and one subschema can have many names."""
        self._lookups += number
        if self._lookups > _LOOKUPS:
            raise InvalidSchema("limit", f"it takes more than {_LOOKUPS} steps to resolve the references")

    @property
    def pattern_bytes(self) -> int:
        """The bytes to which each pattern may be compiled."""
        return min(_PATTERN_BYTES, _PATTERNS_BYTES // max(self._patterns, 1))

    # The cost, from the costs of the subschemas.

    def cost(self) -> Cost:
        cost = self._cost_of(self._root, 1)
        for schema in self._subschemas:  # the engine compiles unused definitions, too
            self._cost_of(schema, 1)
        used = {keyword for schema in self._subschemas for keyword in schema}
        quoted = max((_quoted(schema) for schema in self._subschemas), default=0)
        return attrs.evolve(cost, quoted=quoted, compares="uniqueItems" in used, reevaluates=bool(_UNEVALUATED & used))

    def _cost_of(self, schema: JsonObject, level: int) -> Cost:
        if (known := self._costs.get(id(schema))) is not None:
            return known
        self._costs[id(schema)] = Cost(width=1, loops=1, height=1)  # of a recursive reference
        if level > _HEIGHT:
            raise InvalidSchema("limit", f"subschemas or references follow one another more than {_HEIGHT} times")
        again = 3 if _UNEVALUATED & schema.keys() else 1
        parts = [*_subschemas(schema), *(("$ref", target) for target in self._targets(schema))]
        costs = [(keyword, self._cost_of(part, level + 1)) for keyword, part in parts if keyword not in _DEFINITIONS]
        one_of = [cost for keyword, cost in costs if keyword in _EXCLUSIVE]
        all_of = [
            (again if keyword in _EVALUATED_AGAIN else 1, cost) for keyword, cost in costs if keyword not in _EXCLUSIVE
        ]
        states = sum(map(_states, _patterns(schema))) + len(_COUNTING & schema.keys()) * _COUNTING_COST
        width = _own_reasons(schema) + sum(times * each.width for times, each in all_of)
        width += max((each.width for each in one_of), default=0)
        loops = sum(times * each.loops for times, each in all_of) + max((each.loops for each in one_of), default=0)
        states += sum(times * each.states for times, each in all_of) + max((each.states for each in one_of), default=0)
        height = 1 + max((each.height for _, each in costs), default=0)
        if width > _WIDTH or height > _HEIGHT:
            raise InvalidSchema("limit", f"more than {_WIDTH} subschemas can apply to one value, or {_HEIGHT} in a row")
        cost = self._costs[id(schema)] = Cost(width, loops, height, states)
        return cost


def _check_size(schema: Json) -> None:
    size = measure(schema, text=True, max_depth=_SCHEMA_DEPTH)
    if isinstance(size, str):
        raise InvalidSchema("limit", f"the schema {size}")
    if size.values > _SCHEMA_VALUES:
        raise InvalidSchema("limit", f"the schema has {size.values} values; {_SCHEMA_VALUES} are allowed")
    if size.described(_STEP) > _SCHEMA_TEXT:  # the engine stores each path, and copies of some subschemas
        raise InvalidSchema("limit", "the schema has too much text, too deep")


def below_step(value: Json, step: str) -> list[Json]:
    if isinstance(value, list | tuple):
        return [value[int(step)]] if step.isdecimal() and int(step) < len(value) else []
    return [value[step]] if isinstance(value, dict) and step in value else []


def _dialect(schema: JsonObject) -> str:
    uri = schema.get("$schema", DEFAULT_DIALECT)
    for dialect in DIALECTS:
        if isinstance(uri, str) and _bare(uri) == _bare(dialect):
            return dialect
    # schema-06: "return an appropriate error indicating the dialect is not supported".
    raise InvalidSchema(
        "dialect", f"the dialect {shown_part(uri)} is not supported; supported are {', '.join(DIALECTS)}"
    )


def _bare(uri: str) -> str:
    return uri.removeprefix("http://").removeprefix("https://").removesuffix("#")


def _join(base: str, reference: str) -> str:
    try:
        joined = base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError as error:
        raise InvalidSchema("reference", f"{shown_part(reference)} is not a URI: {error}") from None
    if len(joined) > _URI:
        raise InvalidSchema("limit", f"the URI {shown_part(joined)} has more than {_URI} characters")
    return joined


# The cost of a schema.

# Evaluated again if the same schema has unevaluatedItems or unevaluatedProperties: once to validate, and up to twice
# (measured) to find which items and members have been evaluated.
_EVALUATED_AGAIN = frozenset({"$ref", "allOf", "anyOf", "contains", "dependentSchemas", "else", "if", "not", "oneOf"})
_EVALUATED_AGAIN |= {"then"}
_UNEVALUATED = frozenset({"unevaluatedItems", "unevaluatedProperties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_QUOTED = frozenset({"const", "dependencies", "dependentRequired", "enum", "not", "pattern", "required"})
_EXCLUSIVE = frozenset({"prefixItems", "properties"})  # a path into the value takes one of these, and all other parts


@record
class Cost:
    """The greatest cost of a schema.  It does not depend on a value.

    | Member | Meaning |
    |---|---|
    | `width` | subschemas applied on the worst path from the root of a value to a leaf; a recursion counts as 1 |
    | `loops` | the recursive references among them; each starts the whole again, at least one level deeper |
    | `height` | how deep the engine recurses before it comes to a recursive reference |
    | `states` | pattern states, and other work in this unit, for each byte of text on that path |
    | `quoted` | the longest part of the schema that one reason quotes, in characters |
    """

    width: int
    loops: int
    height: int
    states: float = 0.0
    quoted: int = 0
    compares: bool = False  # has uniqueItems
    reevaluates: bool = False  # has unevaluatedItems or unevaluatedProperties

    def allows_verdict(self, size: Size) -> bool:
        # The engine caches verdicts of recursive references, and searches this cache from end to end.  It does not
        # cache which items and members have been evaluated.
        again = self.width if self.loops else 1
        work = size.values * again * (self._uncached(size) if self.reevaluates else self.width)
        levels = size.depth if self.loops else 1
        colliding = self.compares and size.collisions > _COLLISIONS
        states = size.text * self.states * (self._uncached(size) // self.width if self.reevaluates else 1)
        return work <= _WORK and states <= _STATES and self.height * levels <= _FRAMES and not colliding

    def allows_reasons(self, size: Size | str) -> bool:
        # The engine does not cache reasons either, and computes them for every branch of an anyOf, all at once.
        assert not isinstance(size, str)  # it was measured before
        times = self._uncached(size)
        if times * size.values > _REASONS or size.text * self.states * (times // self.width) > _STATES:
            return False
        path = _STEP * self.height  # in the schema; each recursive reference adds as much again
        reasons = size.values * (_REASON + path + _COPIES * self.quoted)
        return times * (reasons + size.described(_STEP + (path if self.loops else 0))) <= _TEXT

    def _uncached(self, size: Size) -> int:
        """The number of subschemas that an engine without a cache applies to each value."""
        loops: int = max(self.loops, 1) ** size.depth
        return self.width * loops


_COUNTING = frozenset({"maxLength", "minLength"})  # they count the characters of a text
_COUNTING_COST = 1 / 256
_TABLE_COST = 1 / 4
_quantifier = re.compile(r"\{(\d+)(?:(,)(\d*))?\}").match
_escape = re.compile(r"\\(?:[pP]\{[^}]*\}|u\{[^}]*\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)?", re.DOTALL).match
_class = re.compile(r"\[\^?(?:[^\]\\]|\\.)*\]?", re.DOTALL).match


def _states(pattern: str) -> float:
    """The work of a pattern for each byte of a text: the states that can be active together, or less if they are few.

    Where this function and the engine read a pattern differently, this function counts more states.
    """
    outer: list[int] = []  # states before each open group
    states = last = at = 0  # states in this group, and in its last part, which a quantifier repeats
    while at < len(pattern):
        char = pattern[at]
        found = None
        if char == "(":
            outer.append(states)
            states = last = 0
        elif char == ")" and outer:
            last = states
            states += outer.pop()
        elif char == "{" and (found := _quantifier(pattern, at)) is not None:
            times = max(int(each) for each in found.group(1, 3) if each)
            states, last = states + last * (min(times, _MAX_STATES) - 1), last * times
        elif char not in "*+?|":
            found = _escape(pattern, at) or _class(pattern, at)
            states, last = states + 1, 1
        states, last = min(states, _MAX_STATES), min(last, _MAX_STATES)
        at = at + 1 if found is None else found.end()
    states = min(sum(outer, states), _MAX_STATES)
    return states if states > _FEW_STATES else _TABLE_COST


_MAX_STATES = 10**9


def _own_reasons(schema: JsonObject) -> int:
    """The number of problems that a subschema itself can find in one value: one, and one for each required member."""
    lists = [schema.get("required")]
    for keyword in ("dependentRequired", "dependencies"):
        if isinstance(by_member := schema.get(keyword), dict):
            lists.extend(by_member.values())
    return 1 + sum(len(each) for each in lists if isinstance(each, list | tuple))


def _quoted(schema: JsonObject) -> int:
    """The greatest number of characters of a subschema that one problem quotes."""
    by_pattern = schema.get("patternProperties")
    patterns = by_pattern if isinstance(by_pattern, dict) else ()
    return sum(len(str(each)) for each in chain(patterns, (schema[keyword] for keyword in _QUOTED & schema.keys())))


def shown_part(part_of_schema: Json) -> str:
    """Return a part of a schema for an error message."""
    return shortened(json.dumps(part_of_schema, ensure_ascii=False, default=str))


def shortened(text: str, length: int = _SHOWN) -> str:
    """Return a text for an error message, cut to a length."""
    return text if len(text) <= length else text[:length] + "…"
