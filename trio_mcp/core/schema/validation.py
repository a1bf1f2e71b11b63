"""Validating JSON against a JSON Schema, trusting neither.

`compile_schema` takes any schema once, checks it, and returns a `CompiledSchema`, whose `errors` say where a value
breaks it.  The rules themselves are jsonschema_rs's, which is imported when the first schema is compiled.  This file
owns what surrounds it: which dialects there are, that nothing is ever fetched, and what hostile schemas and values
may cost.

Dialects (`DIALECTS`): draft 4, 6, 7, 2019-09 and 2020-12; without `$schema` it is 2020-12; any other is refused.
`format` is a note and never checked, in every dialect: 2020-12 has it so, the older ones permit it, and a peer is not
blamed for what its dialect does not promise.  Patterns run in time linear in the text, so look-around and
back-references, which cannot, are refused when the schema is compiled.

What surprises:
- A schema of a kilobyte can ask for more work than there is time: definitions that use the next one twice, 40 deep, or
  a recursive `anyOf` under a deep value.  So each schema is priced before it is compiled (see `_Price`), and each
  value is measured before it is judged.
- Linear is not cheap: `a[ab]{4000}c` has 4,000 places to be in after each character, and takes 14 µs for it.  So
  patterns are priced by their places, and the price of a value counts its characters.
- A verdict is cheap and its reasons are not (a thousandfold, as measured), so reasons are only worked out where the
  price allows.  The verdict is right in any case.
- A problem names the place, the keyword and what the schema wants, and never of the value found more than what kind of
  JSON it is: it may be a secret.  Names of members are part of a place and do appear.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urljoin

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import KINDS, Json, JsonObject
from trio_mcp.core.records import record

if TYPE_CHECKING:
    import jsonschema_rs

__all__ = [
    "DEFAULT_DIALECT",
    "DIALECTS",
    "CompiledSchema",
    "InvalidSchema",
    "Problem",
    "check_input_schema",
    "compile_schema",
]

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
"""The dialects that `$schema` may name (http or https, with or without the last `#`), and who validates them."""

# Schemas.  The largest tool schemas met have about 2,000 values, 20 deep; the engine compiles recursively.
_SCHEMA_VALUES = 20_000
_SCHEMA_DEPTH = 64
# A pattern may grow into a program of 2 MiB (`.{1,1000}` makes half of that), which takes 1.5 ms to build; and all that
# a schema has into one of 32 MiB.  To read their text takes 0.2 µs a character.
_PATTERNS = 200
_PATTERN_TEXT = 64 * 1024
_PATTERN_BYTES = 2 * 1024 * 1024
_PATTERNS_BYTES = 32 * 1024 * 1024
# Subschemas that may meet on one way into a value (`_Price.width`), and references that may follow one another.
_WIDTH = 5_000
_HEIGHT = 200
# Bytes that the places of all subschemas take, and copies of some: 0.1 s at the worst.
_SCHEMA_TEXT = 100_000_000
# Names and references, joined to their base: as long a URI as servers commonly take.  10,000 fit into a schema.
_URI = 2_048
# Places looked at on the way to what references mean.  10,000 references of 20 steps take 100 ms.
_LOOKS = 200_000

# Values.  Messages are at most 128 deep (`Limits.depth`); the engine itself gives up at 255.
_DEPTH = 250
# A message of 16 MiB (`Limits.message_bytes`) holds no more.
_VALUES = 8 * 1024 * 1024
# Subschemas applied to a value, at up to 17 ns each: 0.1 s at the worst.
_WORK = 6_000_000
# Places of patterns that may be reached at the bytes of a value, at up to 5 ns each: 0.1 s again.  A pattern of a few
# places becomes a table, which takes 1 ns for a byte whatever it is.
_PLACES = 25_000_000
_FEW_PLACES = 10
# Frames of the engine's recursion; a thread's stack of 1 MiB has been seen to carry 12,000.
_FRAMES = 12_000
# Bytes that all reasons together may hold.  The engine gives each its place, on paper and in the schema, and, four
# times over, the value and what was wanted of it.  A reason alone takes 1,000 bytes and 5 µs: again 0.1 s at worst.
_TEXT = 100_000_000
_REASONS = 20_000
_REASON = 1_000
_STEP = 64
_COPIES = 4
# To find equal items the engine hashes large integers as doubles; those that share one are compared in pairs.
_CROWD = 100
_EXACT_IN_A_DOUBLE = 2**53
_BITS_OF_A_DOUBLE = 1024
_BYTES_OF_A_LETTER = 3  # beyond ASCII; a few scripts and emoji take 4

# Answers: enough for a model to mend its call, and short whatever the schema and the names are.
_PROBLEMS = 20
_SHOWN = 200
_NAME_SHOWN = 64


class InvalidSchema(UsageError):
    """A schema that cannot be used.

    `reason` is "dialect" (not one of `DIALECTS`), "invalid" (against its dialect), "reference" (one that leads
    nowhere, or out of the document), "pattern" (not one that runs in linear time), "limit" (too much work), or
    "root" (not what this use of a schema requires).  Raised at our caller even where the schema is the peer's: what
    a client does with a tool whose output schema is unusable is the client's decision.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


@record
class Problem:
    """One way in which a value breaks a schema.

    `path` is a JSON Pointer into the value, long names shortened; `keyword` is the schema keyword, or empty where the
    value as a whole could not be judged; `message` never quotes the value.
    """

    path: str
    keyword: str
    message: str


@attrs.frozen(eq=False)
class CompiledSchema:
    """A schema that is valid, self-contained and bounded.  Made by `compile_schema`."""

    dialect: str
    _schema: Json = attrs.field(repr=False)
    _validator: jsonschema_rs.Validator = attrs.field(repr=False)
    _price: _Price = attrs.field(repr=False)

    def judges(self, instance: Json) -> bool:
        """Whether `errors` would look at `instance` at all, which it does not where that is too much work."""
        return not isinstance(self._sized(instance), str)

    def errors(self, instance: Json) -> list[Problem]:
        """What is wrong with `instance`: nothing, or at most 20 problems.  Raises for no value whatever."""
        size = self._sized(instance)
        if isinstance(size, str):
            return [Problem("", "", size)]
        try:
            if self._validator.is_valid(instance):
                return []
            if not self._price.allows_reasons(size, instance):
                return [Problem("", "", "breaks the schema; it would take too much work to say where")]
            found = self._validator.iter_errors(instance)
        except ValueError:  # half a surrogate pair, a set, a member whose name is no string
            return [Problem("", "", "is not JSON")]
        problems = chain.from_iterable(_problems(leaf, self._schema) for error in found for leaf in _closest(error))
        return list(dict.fromkeys(problems))[:_PROBLEMS]

    def _sized(self, instance: Json) -> _Size | str:
        size = _measure(instance, _DEPTH, letters=self._price.letters > 0)
        if isinstance(size, str) or self._price.allows_verdict(size):
            return size
        return "would take too much work to check against this schema"


def compile_schema(schema: Json) -> CompiledSchema:
    """Check `schema` and make it ready for use; raises `InvalidSchema`.  Does no I/O of any kind."""
    if not isinstance(schema, dict | bool):
        raise InvalidSchema("invalid", f"a schema is an object or a boolean, not {type(schema).__name__}")
    size = _measure(schema, _SCHEMA_DEPTH)
    if isinstance(size, str):
        raise InvalidSchema("limit", f"the schema {size}")
    if size.values > _SCHEMA_VALUES:
        raise InvalidSchema("limit", f"the schema has {size.values} values; {_SCHEMA_VALUES} are allowed")

    import jsonschema_rs  # 20 ms, and only who has schemas to check should pay

    dialect = DEFAULT_DIALECT
    try:
        if _text(schema, _STEP) > _SCHEMA_TEXT:  # the engine keeps the place of every subschema, and some of them whole
            raise InvalidSchema("limit", "the schema has too much text, too deep")
        document = _Document(schema if isinstance(schema, dict) else {})
        price = _Pricing(document).price()
        dialect = document.dialect
        validator = getattr(jsonschema_rs, DIALECTS[dialect])(
            schema,
            validate_formats=False,
            offline=True,  # the engine would fetch; no reference out of the document has come this far
            pattern_options=jsonschema_rs.RegexOptions(
                size_limit=min(_PATTERN_BYTES, _PATTERNS_BYTES // max(document.patterns, 1))
            ),
        )
    except jsonschema_rs.ValidationError as error:
        raise _refusal(error, dialect) from None
    except ValueError as error:
        raise InvalidSchema("invalid", f"the schema is not JSON: {error}") from None
    return CompiledSchema(dialect, schema, validator, price)


def check_input_schema(schema: Json) -> None:
    """Raise `InvalidSchema` unless `schema` can be a tool's input schema: an object with ``"type": "object"``."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidSchema("root", 'an input schema needs "type": "object" at its root: arguments come by name')


def _refusal(error: jsonschema_rs.ValidationError, dialect: str) -> InvalidSchema:
    where, what = _pointer(error.instance_path), _shortened(error.message, _SHOWN)
    if error.kind.name == "format":
        why = "wrong, too large, or needs look-around or back-references, which do not run in linear time"
        return InvalidSchema("pattern", f"the pattern at {where} is {why}: {what}")
    return InvalidSchema("invalid", f"the schema is not valid under {dialect} at {where or 'its root'}: {what}")


# Measuring a value, before anybody recurses into it.


class _Size(NamedTuple):
    values: int
    depth: int
    crowd: int  # the most large integers that share one double
    letters: int  # bytes of all strings, names included; 0 where nobody asked


def _measure(value: Json, most: int, *, letters: bool = False) -> _Size | str:
    """How large `value` is, or what makes it unfit.  Level by level, so that no depth can exhaust a stack."""
    values = depth = text = 0
    crowds: dict[float, int] = {}
    level = [value]
    while level:
        values += len(level)
        depth += 1
        if depth > most:
            return f"is nested more than {most} deep"
        if values > _VALUES:
            return f"has more than {_VALUES} values"
        if letters:
            text += sum(_letters(item) for item in level if isinstance(item, (str, dict)))
        below: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
            elif isinstance(item, (int, float)) and not -_EXACT_IN_A_DOUBLE <= item <= _EXACT_IN_A_DOUBLE:
                if not _fits_a_double(item):
                    return "holds a number outside the range of a double"
                if isinstance(item, int):
                    crowds[float(item)] = crowds.get(float(item), 0) + 1
        level = below
    return _Size(values, depth, max(crowds.values(), default=0), text)


def _letters(item: str | JsonObject) -> int:
    """Bytes of a string, or of the names of members, which patterns may judge."""
    if isinstance(item, str):
        return len(item) if item.isascii() else _BYTES_OF_A_LETTER * len(item)
    return sum(_letters(name) for name in item if isinstance(name, str))


def _text(value: Json, step: int) -> int:
    """Bytes held by reasons for each of the values in `value`: its place, at so much a `step`, and all inside it."""
    text = depth = 0
    level = [(value, 0)]
    while level:
        depth += 1
        below: list[tuple[Json, int]] = []
        for item, place in level:
            own = 0  # characters
            if isinstance(item, dict):
                own = sum(len(str(name)) for name in item)
                below.extend((each, place + step + len(str(name))) for name, each in item.items())
            elif isinstance(item, list | tuple):
                below.extend((each, place + step) for each in item)
            else:
                own = len(str(item))
            text += place + depth * (_STEP + _COPIES * own)  # it is also inside all that is above it
        level = below
    return text


def _fits_a_double(number: float) -> bool:
    # 1e400 is JSON, and read as infinity, which the engine would take for null; longer integers it compares slowly.
    return number.bit_length() < _BITS_OF_A_DOUBLE if isinstance(number, int) else math.isfinite(number)


# Knowing a schema: its subschemas, where they begin, and where its references lead.

_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
_NESTED = frozenset({"additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else"})
_NESTED |= {"if", "items", "not", "oneOf", "prefixItems", "propertyNames", "then"}
_NESTED |= {"unevaluatedItems", "unevaluatedProperties"}
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})


def _subschemas(schema: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """The subschemas of any dialect, each with its keyword; boolean ones, which cost nothing, left out."""
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
    """The patterns that a subschema has itself."""
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            yield pattern


class _Document:
    """A schema as a set of places that references can name.  A name given twice means all that have it."""

    def __init__(self, root: JsonObject) -> None:
        self.dialect = _dialect(root)
        self.root = root
        self.subschemas: list[JsonObject] = []
        # By base and fragment; by None and name, what a dynamic reference may mean from anywhere.
        self._places: dict[tuple[str | None, str], list[Json]] = {("", ""): [root]}
        self._base: dict[int, str] = {}  # by identity
        self.patterns = 0
        self._pattern_text = 0
        self._looks = 0
        self._walk(root, "")

    def _walk(self, root: JsonObject, base: str) -> None:
        waiting = [(root, base)]
        while waiting:
            schema, base = waiting.pop()
            self._look(1)
            if "$schema" in schema and _dialect(schema) != self.dialect:
                raise InvalidSchema("dialect", "the schema mixes dialects; all of its parts must have the root's")
            base = self._enter(schema, base)
            self.subschemas.append(schema)
            for pattern in _patterns(schema):
                self.patterns += 1
                self._pattern_text += len(pattern)
            waiting.extend((below, base) for _, below in _subschemas(schema))
        if self.patterns > _PATTERNS:
            raise InvalidSchema("limit", f"the schema has more than {_PATTERNS} patterns")
        if self._pattern_text > _PATTERN_TEXT:
            raise InvalidSchema("limit", f"the patterns of the schema have more than {_PATTERN_TEXT} characters")

    def _enter(self, schema: JsonObject, base: str) -> str:
        """Note the names of `schema`; return the base URI for the references in it."""
        old = self.dialect.startswith("http:")
        name = schema.get("id" if "draft-04" in self.dialect else "$id")
        if isinstance(name, str) and not (old and "$ref" in schema):  # until draft 7, $ref silences all beside it
            base, _, anchor = _join(base, name).partition("#")
            self._places.setdefault((base, anchor), []).append(schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._places.setdefault((base, name), []).append(schema)
        # Which of these a dynamic reference means depends on the way that led to it.
        dynamic = "" if schema.get("$recursiveAnchor") is True else schema.get("$dynamicAnchor")
        if isinstance(dynamic, str):
            self._places.setdefault((None, dynamic), []).append(schema)
        self._base[id(schema)] = base
        return base

    def targets(self, schema: JsonObject) -> Iterator[JsonObject]:
        """What the references of `schema` lead to."""
        for keyword in _REFERENCES & schema.keys():
            reference = schema[keyword]
            if not isinstance(reference, str):
                raise InvalidSchema("invalid", f"a {keyword} is a string")
            base, _, fragment = _join(self._base[id(schema)], reference).partition("#")
            found = self._find(base, unquote(fragment))
            if not found:
                # schema-08, schema-11: what is not in the document is neither fetched nor taken to allow everything.
                raise InvalidSchema("reference", f"{_shown(reference)} leads to nothing in the schema itself")
            if keyword != "$ref":
                found += self._places.get((None, fragment), [])
                self._look(len(found))
            for each in found:
                if isinstance(each, dict):  # or true or false
                    if id(each) not in self._base:  # a pointer may lead under a keyword that is no JSON Schema
                        self._walk(each, base)
                    yield each

    def _find(self, base: str, fragment: str) -> list[Json]:
        steps = fragment.split("/")[1:] if fragment.startswith("/") else []
        found = list(self._places.get((base, "" if steps else fragment), ()))
        for step in steps:
            self._look(len(found))
            found = [below for at in found for below in _step(at, step.replace("~1", "/").replace("~0", "~"))]
        self._look(len(found))
        return found

    def _look(self, places: int) -> None:
        """Count what is looked at: a name may have many places, and a place many names."""
        self._looks += places
        if self._looks > _LOOKS:
            raise InvalidSchema("limit", f"it takes more than {_LOOKS} steps to find what the references mean")


def _step(at: Json, step: str) -> list[Json]:
    if isinstance(at, list | tuple):
        return [at[int(step)]] if step.isdecimal() and int(step) < len(at) else []
    return [at[step]] if isinstance(at, dict) and step in at else []


def _dialect(schema: JsonObject) -> str:
    named = schema.get("$schema", DEFAULT_DIALECT)
    for dialect in DIALECTS:
        if isinstance(named, str) and _bare(named) == _bare(dialect):
            return dialect
    # schema-06: "return an appropriate error indicating the dialect is not supported".
    raise InvalidSchema("dialect", f"the dialect {_shown(named)} is not supported; supported are {', '.join(DIALECTS)}")


def _bare(uri: str) -> str:
    return uri.removeprefix("http://").removeprefix("https://").removesuffix("#")


def _join(base: str, reference: str) -> str:
    try:
        joined = base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError as error:
        raise InvalidSchema("reference", f"{_shown(reference)} is not a URI: {error}") from None
    if len(joined) > _URI:
        raise InvalidSchema("limit", f"the URI {_shown(joined)} has more than {_URI} characters")
    return joined


# Pricing a schema.

# Worked out again when the same schema has unevaluatedItems or unevaluatedProperties: once to validate, and (as
# measured) up to twice to see what has been evaluated.
_EVALUATED_AGAIN = frozenset({"$ref", "allOf", "anyOf", "contains", "dependentSchemas", "else", "if", "not", "oneOf"})
_EVALUATED_AGAIN |= {"then"}
_UNEVALUATED = frozenset({"unevaluatedItems", "unevaluatedProperties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_QUOTED = frozenset({"const", "dependencies", "dependentRequired", "enum", "not", "pattern", "required"})
_ONE_OF_THEM = frozenset({"prefixItems", "properties"})  # a way into the value meets one of these, and all of the rest


@record
class _Price:
    """What a schema may cost.  None of it depends on a value.

    `width`: subschemas applied along the worst way from the root of a value down to one of its leaves, a recursive
    reference counting as one.  `loops`: the recursive references among them; each starts the whole anew, one level
    further down at least.  `height`: how deep the engine recurses before it comes to such a reference.  `letters`:
    places of patterns, and other work, for each byte of text on that way.  `wanted`: the longest part of the schema
    that one reason quotes, in characters.
    """

    width: int
    loops: int
    height: int
    letters: float = 0.0
    wanted: int = 0
    compares: bool = False  # has uniqueItems
    looks_again: bool = False  # has unevaluatedItems or unevaluatedProperties

    def allows_verdict(self, size: _Size) -> bool:
        # The engine remembers verdicts of recursive references, and searches what it remembers from end to end; but
        # it does not remember what has been evaluated.
        again = self.width if self.loops else 1
        work = size.values * again * (self._unremembered(size) if self.looks_again else self.width)
        levels = size.depth if self.loops else 1
        crowded = self.compares and size.crowd > _CROWD
        places = size.letters * self.letters * (self._unremembered(size) // self.width if self.looks_again else 1)
        return work <= _WORK and places <= _PLACES and self.height * levels <= _FRAMES and not crowded

    def allows_reasons(self, size: _Size, value: Json) -> bool:
        # It remembers no reasons either, and works them out for every branch of an anyOf, all of them at once.
        times = self._unremembered(size)
        if times * size.values > _REASONS or size.letters * self.letters * (times // self.width) > _PLACES:
            return False
        place = _STEP * self.height  # in the schema; each recursive reference goes as far again
        text = size.values * (_REASON + place + _COPIES * self.wanted)
        return times * text <= _TEXT and times * (text + _text(value, _STEP + (place if self.loops else 0))) <= _TEXT

    def _unremembered(self, size: _Size) -> int:
        """Subschemas applied to each value by an engine that remembers nothing."""
        loops: int = max(self.loops, 1) ** size.depth
        return self.width * loops


class _Pricing:
    def __init__(self, document: _Document) -> None:
        self._document = document
        self._known: dict[int, _Price | None] = {}  # by identity; None while it is being worked out

    def price(self) -> _Price:
        price = self._of(self._document.root, 1)
        for schema in self._document.subschemas:  # definitions that nothing uses are compiled all the same
            self._of(schema, 1)
        used = {keyword for schema in self._document.subschemas for keyword in schema}
        wanted = max((_wanted(schema) for schema in self._document.subschemas), default=0)
        return attrs.evolve(price, wanted=wanted, compares="uniqueItems" in used, looks_again=bool(_UNEVALUATED & used))

    def _of(self, schema: JsonObject, level: int) -> _Price:
        if id(schema) not in self._known:
            self._known[id(schema)] = None
            self._known[id(schema)] = self._work_out(schema, level)
        return self._known[id(schema)] or _Price(width=1, loops=1, height=1)

    def _work_out(self, schema: JsonObject, level: int) -> _Price:
        if level > _HEIGHT:
            raise InvalidSchema("limit", f"subschemas or references follow one another more than {_HEIGHT} times")
        again = 3 if _UNEVALUATED & schema.keys() else 1
        parts = [*_subschemas(schema), *(("$ref", target) for target in self._document.targets(schema))]
        width, loops, height, letters = _own_reasons(schema), 0, 0, _own_letters(schema)
        widest, most_loops, most_letters = 0, 0, 0.0
        for keyword, part in parts:
            if keyword in _DEFINITIONS:
                continue
            price = self._of(part, level + 1)
            height = max(height, price.height)
            if keyword in _ONE_OF_THEM:
                widest, most_loops = max(widest, price.width), max(most_loops, price.loops)
                most_letters = max(most_letters, price.letters)
            else:
                times = again if keyword in _EVALUATED_AGAIN else 1
                width, loops = width + times * price.width, loops + times * price.loops
                letters += times * price.letters
        width, loops, height, letters = width + widest, loops + most_loops, height + 1, letters + most_letters
        if width > _WIDTH or height > _HEIGHT:
            raise InvalidSchema("limit", f"more than {_WIDTH} subschemas can meet at one value, or {_HEIGHT} in a row")
        return _Price(width, loops, height, letters)


def _own_letters(schema: JsonObject) -> float:
    """What a subschema itself does for each byte of a text, in places of a pattern."""
    counting = _COUNTED & schema.keys()  # which count the characters of a text
    return sum(map(_places, _patterns(schema))) + len(counting) * _OF_A_COUNT


_COUNTED = frozenset({"maxLength", "minLength"})
_OF_A_COUNT = 1 / 256
_OF_A_TABLE = 1 / 4
_quantifier = re.compile(r"\{(\d+)(?:(,)(\d*))?\}").match
_escape = re.compile(r"\\(?:[pP]\{[^}]*\}|u\{[^}]*\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)?", re.DOTALL).match
_class = re.compile(r"\[\^?(?:[^\]\\]|\\.)*\]?", re.DOTALL).match


def _places(pattern: str) -> float:
    """How much a pattern does for each byte of a text: the places in it that may be reached together there, or less
    where they are few.  What is understood otherwise than the engine does counts as more places."""
    outer: list[int] = []  # places before each group that is open
    places = last = at = 0  # in this group, and those of its last part, which a quantifier repeats
    while at < len(pattern):
        char = pattern[at]
        found = None
        if char == "(":
            outer.append(places)
            places = last = 0
        elif char == ")" and outer:
            last = places
            places += outer.pop()
        elif char == "{" and (found := _quantifier(pattern, at)) is not None:
            times = max(int(each) for each in found.group(1, 3) if each)
            places, last = places + last * (min(times, _MOST_PLACES) - 1), last * times
        elif char not in "*+?|":
            found = _escape(pattern, at) or _class(pattern, at)
            places, last = places + 1, 1
        places, last = min(places, _MOST_PLACES), min(last, _MOST_PLACES)
        at = at + 1 if found is None else found.end()
    places = min(sum(outer, places), _MOST_PLACES)
    return places if places > _FEW_PLACES else _OF_A_TABLE


_MOST_PLACES = 10**9


def _own_reasons(schema: JsonObject) -> int:
    """How many problems a subschema can find by itself with one value: one, or one for each member required."""
    lists = [schema.get("required")]
    for keyword in ("dependentRequired", "dependencies"):
        if isinstance(by_member := schema.get(keyword), dict):
            lists.extend(by_member.values())
    return 1 + sum(len(each) for each in lists if isinstance(each, list | tuple))


def _wanted(schema: JsonObject) -> int:
    """How many characters of a subschema one problem quotes at most."""
    by_pattern = schema.get("patternProperties")
    patterns = by_pattern if isinstance(by_pattern, dict) else ()
    return sum(len(str(each)) for each in chain(patterns, (schema[keyword] for keyword in _QUOTED & schema.keys())))


# Saying what is wrong.

_MESSAGES = {
    "additionalItems": "must have at most {} items",
    "anyOf": "matches none of the alternatives",
    "const": "must be {}",
    "contains": "does not have the required number of certain items",
    "enum": "must be one of {}",
    "exclusiveMaximum": "must be less than {}",
    "exclusiveMinimum": "must be more than {}",
    "falseSchema": "is not allowed",
    "maxItems": "must have at most {} items",
    "maxLength": "must have at most {} characters",
    "maxProperties": "must have at most {} members",
    "maximum": "must be at most {}",
    "minItems": "must have at least {} items",
    "minLength": "must have at least {} characters",
    "minProperties": "must have at least {} members",
    "minimum": "must be at least {}",
    "multipleOf": "must be a multiple of {}",
    "not": "is of a form that is excluded",
    "oneOf": "must match exactly one of the alternatives",
    "pattern": "must match the pattern {}",
    "propertyNames": "has a member whose name is not allowed",
    "required": "lacks the member {}",
    "type": "must be of type {}",
    "unevaluatedItems": "has items that are not allowed",
    "uniqueItems": "must not have the same item twice",
}


def _closest(error: jsonschema_rs.ValidationError) -> Iterator[jsonschema_rs.ValidationError]:
    """The reasons inside a failed choice, where only one of its branches was of the right type at all."""
    if error.kind.name in ("anyOf", "oneOf"):
        near = [
            branch for branch in error.kind.value if branch and not any(_wrong_type(each, error) for each in branch)
        ]
        if len(near) == 1:
            for each in near[0]:
                yield from _closest(each)
            return
    yield error


def _wrong_type(inner: jsonschema_rs.ValidationError, outer: jsonschema_rs.ValidationError) -> bool:
    return inner.kind.name == "type" and inner.instance_path == outer.instance_path


def _problems(error: jsonschema_rs.ValidationError, schema: Json) -> Iterator[Problem]:
    keyword, value = error.kind.name, error.kind.value
    if keyword in ("additionalProperties", "unevaluatedProperties"):
        message = "is not allowed" + _what_is(error, schema)
        for name in value[:_PROBLEMS]:
            yield Problem(_pointer([*error.instance_path, name]), keyword, message)
        return
    message = _MESSAGES.get(keyword, f"breaks {keyword}")
    if keyword == "type":
        came = KINDS.get(type(error.instance))
        message = message.format(" or ".join(value)) + (f", not {came}" if came else "")
    elif "{}" in message:  # then the value is the schema's
        message = message.format(_shown(value))
    yield Problem(_pointer(error.instance_path), keyword, message)


def _what_is(error: jsonschema_rs.ValidationError, schema: Json) -> str:
    """Which members are allowed where others are not; nothing, where that is not simply a list of names."""
    if error.kind.name != "additionalProperties" or error.absolute_keyword_location is not None:
        return ""  # the latter: a part of the schema has a name of its own, and the path begins there
    found = [schema]
    for step in error.schema_path[:-1]:
        found = [below for at in found for below in _step(at, str(step))]
    if not found or "patternProperties" in found[0]:  # the former: it was changed after it was compiled
        return ""
    names = found[0].get("properties", ())
    shown = ", ".join(_shown(name) for name in islice(names, _PROBLEMS)) + ("…" if len(names) > _PROBLEMS else "")
    return f"; there are {_shortened(shown, _SHOWN)}" if names else ", nor is any other"


def _pointer(path: list[str | int]) -> str:
    steps = (_shortened(str(step).replace("~", "~0").replace("/", "~1"), _NAME_SHOWN) for step in path)
    return "".join("/" + step for step in steps)


def _shown(of_the_schema: Json) -> str:
    return _shortened(json.dumps(of_the_schema, ensure_ascii=False, default=str), _SHOWN)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"
