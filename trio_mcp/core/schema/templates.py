"""URI templates (RFC 6570, level 4), both ways.

`Template` expands: every operator, explode and prefix, strings, lists and maps.  Any valid template can be expanded,
which is all a client needs of the templates it is given.

`Matcher` goes back from a URI to the values, which the RFC leaves open: some templates cannot be matched ({x:3}), some
only by guessing ({a}{b}, {a}-{b}).  Those are refused when the matcher is made, with the change that helps.  What is
left has one answer for every URI made by expansion, found in time linear in the URI:

- `{x}`, `{.x}` and `{/x}` stop at / ? # and at the delimiter that the template puts beside them.  Every other character
  is accepted raw as well as encoded, because people and models type URIs by hand: `user:{mail}` takes `user:a@b`;
- `{+x}`, `{#x}` and `{/x*}` hold slashes; there may be one of them in a template;
- `{?x}`, `{&x}` and `{;x}` are named, so they may be absent and come in any order; a name that is not in the
  template, or comes twice, is no match.  All other variables must be there and not empty.

Values come back decoded once, as strings, and are safe to split at slashes: no NUL, no ".." segment, no backslash and
no encoded slash outside `{?x}` and `{&x}`, and no value that begins with the slash that already stands before it.
Literal text is compared as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote, unquote

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.records import record

__all__ = ["Matcher", "Template", "Value", "in_ascii"]

Value: TypeAlias = str | Sequence[str] | Mapping[str, str] | None
"""What a variable may stand for; None is the same as not being there."""

_RESERVED = ":/?#[]@!$&'()*+,;="
_ASCII = "".join(map(chr, range(128)))
_EXPRESSION = r"\{([^{}]*)\}"
_VARIABLE = r"(?ai)((?:\w|%[0-9A-F]{2})(?:\.?(?:\w|%[0-9A-F]{2}))*)(?:(\*)|:([1-9]\d{0,3}))?"
# The RFC forbids ' too, by an oversight its errata name (id 6937).
_NO_LITERAL = r'[\x00-\x20\x7f"<>\\^`{|}\ud800-\udfff]|%(?![0-9A-Fa-f]{2})'
_NO_URI = r"[\x00-\x1f\x7f]|%(?![0-9A-Fa-f]{2})"
_ENCODED = r"(%[0-9A-Fa-f]{2})"
# One character of a value in which what is encoded stays so: prefixes are counted in these.
_CHARACTER = r"(?is)%[C-F][0-9A-F](?:%[89AB][0-9A-F])*|%[0-9A-F]{2}|."
_HIDDEN_SLASH = r"(?i)%2f|%5c|\\"
_SLASH = r"[/\\]"


@record
class _Operator:
    """A row of the table in the RFC's appendix A."""

    first: str
    separator: str
    named: bool = False
    reserved: bool = False  # reserved characters and what is encoded already stay as they are
    if_empty: str = "="

    def encode(self, text: object) -> str:
        if not isinstance(text, str):
            raise UsageError(f"a template's values are strings, or lists or maps of strings; got {type(text).__name__}")
        try:
            if not self.reserved:
                return quote(text, safe="")
            kept = re.split(_ENCODED, text)
            kept[::2] = [quote(each, safe=_RESERVED) for each in kept[::2]]
        except UnicodeEncodeError:
            raise UsageError("a template's value holds half a surrogate pair, which no URI can") from None
        return "".join(kept)

    def pair(self, name: str, value: str) -> str:
        return f"{name}={value}" if value else name + self.if_empty

    def prefix(self, text: str, length: int | None) -> str:
        return "".join(re.findall(_CHARACTER, text)[:length]) if self.reserved else text[:length]


_OPERATORS = {
    "": _Operator("", ","),
    "+": _Operator("", ",", reserved=True),
    "#": _Operator("#", ",", reserved=True),
    ".": _Operator(".", "."),
    "/": _Operator("/", "/"),
    ";": _Operator(";", ";", named=True, if_empty=""),
    "?": _Operator("?", "&", named=True),
    "&": _Operator("&", "&", named=True),
}


@record
class _Variable:
    name: str
    explode: bool
    prefix: int | None


@record
class _Expression:
    text: str
    operator: _Operator
    variables: tuple[_Variable, ...]

    def expand(self, values: Mapping[str, Value]) -> str:
        pieces = [piece for each in self.variables for piece in self._pieces(each, values.get(each.name))]
        return self.operator.first + self.operator.separator.join(pieces) if pieces else ""

    def _pieces(self, variable: _Variable, value: Value) -> list[str]:
        """What stands between the separators; nothing for what is undefined, as empty lists and maps are."""
        operator = self.operator
        if value is None:
            return []
        if isinstance(value, str):
            items = [operator.encode(operator.prefix(value, variable.prefix))]
        elif variable.prefix is not None:
            raise UsageError(f"{{{self.text}}} takes a prefix of {variable.name}, which must be a string")
        elif isinstance(value, Mapping):
            pairs = [(operator.encode(name), operator.encode(each)) for name, each in value.items()]
            if variable.explode:
                return [operator.pair(name, each) for name, each in pairs]
            items = [each for pair in pairs for each in pair]
        elif isinstance(value, Sequence):
            items = [operator.encode(each) for each in value]
        else:
            items = [operator.encode(value)]  # which refuses it
        if not items:
            return []
        if not variable.explode:
            items = [",".join(items)]
        return [operator.pair(variable.name, each) for each in items] if operator.named else items


_Part: TypeAlias = str | _Expression


def _parse(text: str) -> Iterator[_Part]:
    for at, part in enumerate(re.split(_EXPRESSION, text)):
        if at % 2:
            yield _parse_expression(text, part)
        elif wrong := re.search(_NO_LITERAL, part):
            what = "an unpaired brace" if wrong[0] in "{}" else f"{wrong[0]!r}, which must be percent-encoded"
            raise UsageError(f"the URI template {text!r} holds {what}")
        elif part:
            yield quote(part, safe=_RESERVED + "%")


def _parse_expression(text: str, inside: str) -> _Expression:
    symbol = inside[0] if inside and inside[0] in "+#./;?&" else ""
    variables = []
    for spec in inside[len(symbol) :].split(","):
        found = re.fullmatch(_VARIABLE, spec)
        if found is None:
            raise UsageError(
                f"the URI template {text!r} has an expression {{{inside}}} that cannot be read: expected names of "
                f"letters, digits, _ and ., with commas between, * or :length after a name, one of +#./;?& in front"
            )
        variables.append(_Variable(found[1], found[2] is not None, int(found[3]) if found[3] else None))
    return _Expression(inside, _OPERATORS[symbol], tuple(variables))


@record
class Template:
    """A template to be expanded.  Raises UsageError for a text that is no template."""

    text: str
    _parts: tuple[_Part, ...] = attrs.field(
        init=False,
        eq=False,
        repr=False,
        default=attrs.Factory(lambda template: tuple(_parse(template.text)), takes_self=True),
    )

    @property
    def variables(self) -> tuple[str, ...]:
        """The names, each once, in the order of the text."""
        expressions = [part for part in self._parts if isinstance(part, _Expression)]
        return tuple(dict.fromkeys(each.name for expression in expressions for each in expression.variables))

    def expand(self, values: Mapping[str, Value]) -> str:
        """The URI.  Variables that are absent are left out, as the RFC has it.

        Raises UsageError for values that are not strings, and for a prefix of a list or map.
        """
        return "".join([part if isinstance(part, str) else part.expand(values) for part in self._parts])


# Matching.  Each expression without names becomes literals and slots, each one with names an optional group; between
# them the order of the template is kept, and each slot or group is one group of one regular expression.


@record
class _Slot:
    """A variable whose value stands at a place of its own."""

    source: str  # the expression, for messages
    name: str
    slashes: bool  # the value may hold them

    def read(self, raw: str) -> dict[str, str] | None:
        value = None if re.search(_HIDDEN_SLASH, raw) else _decoded(raw)
        return None if value is None else {self.name: value}


@record
class _Group:
    """The variables of an expression with names."""

    source: str
    first: str
    separator: str
    names: tuple[str, ...]

    @property
    def forbidden(self) -> str:
        return "/?#" if self.first == ";" else "#"

    def read(self, raw: str) -> dict[str, str] | None:
        values: dict[str, str] = {}
        for pair in raw[1:].split(self.separator):
            name, _, text = pair.partition("=")
            value = None if self.first == ";" and re.search(_HIDDEN_SLASH, text) else _decoded(text)
            if name not in self.names or name in values or value is None:
                return None
            values[name] = value
        return values


_Item: TypeAlias = str | _Slot | _Group


def _decoded(raw: str) -> str | None:
    """The value, decoded once, unless it could lead out of where it belongs."""
    try:
        value = unquote(raw, errors="strict")  # refuses overlong forms, such as %C0%AF for a slash
    except UnicodeDecodeError:
        return None
    return None if "\0" in value or ".." in re.split(_SLASH, value) else value


def in_ascii(uri: str) -> str | None:
    """The URI with all beyond ASCII encoded, as `Matcher.match_ascii` takes it; None for what is no URI."""
    try:
        ascii = quote(uri, safe=_ASCII)
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    return None if re.search(_NO_URI, ascii) else ascii


class Matcher:
    """A template to be matched.

    Raises UsageError for a text that is no template, and for one that cannot be matched without guessing.
    """

    def __init__(self, text: str) -> None:
        self.template = Template(text)
        items = _flatten(self.template)
        self._readers = [item for item in items if not isinstance(item, str)]
        self._regex = re.compile("".join(_regex(text, items)), re.S)

    @property
    def optional(self) -> frozenset[str]:
        """The variables that a match may be without: those of {?x}, {&x} and {;x}."""
        return frozenset(name for each in self._readers if isinstance(each, _Group) for name in each.names)

    def match(self, uri: str) -> dict[str, str] | None:
        """The values, or None where the URI is not of this template or is not safe."""
        ascii = in_ascii(uri)
        return None if ascii is None else self.match_ascii(ascii)

    def match_ascii(self, ascii: str) -> dict[str, str] | None:
        """The same for what `in_ascii` gave, which who has many templates asks once."""
        found = self._regex.fullmatch(ascii)
        if found is None:
            return None
        values: dict[str, str] = {}
        for reader, raw in zip(self._readers, found.groups(), strict=True):
            read = {} if raw is None else reader.read(raw)
            if read is None:
                return None
            values |= read
        return values


def _flatten(template: Template) -> list[_Item]:
    items: list[_Item] = []
    seen: set[str] = set()
    for part in template._parts:
        if isinstance(part, str):
            _add_literal(items, part)
            continue
        operator = part.operator
        for each in part.variables:
            _check_variable(template.text, part, each, seen)
        if operator.named:
            names = tuple(each.name for each in part.variables)
            items.append(_Group(part.text, operator.first, operator.separator, names))
            continue
        for at, each in enumerate(part.variables):
            _add_literal(items, operator.separator if at else operator.first)
            items.append(_Slot(part.text, each.name, operator.reserved or each.explode))
    return items


def _add_literal(items: list[_Item], text: str) -> None:
    if items and isinstance(items[-1], str):
        items[-1] += text
    elif text:
        items.append(text)


def _check_variable(text: str, expression: _Expression, variable: _Variable, seen: set[str]) -> None:
    name = variable.name
    if name in seen:
        raise _unmatchable(text, f"{name} stands in it twice; give it another name at one place")
    seen.add(name)
    if variable.prefix is not None:
        raise _unmatchable(text, f"{{{expression.text}}} is only the beginning of {name}; drop the :{variable.prefix}")
    if variable.explode and expression.operator is not _OPERATORS["/"]:
        raise _unmatchable(text, f"{name}* is a list; for a path write {{+{name}}} or {{/{name}*}}, else drop the *")


def _unmatchable(text: str, why: str) -> UsageError:
    return UsageError(f"the URI template {text!r} cannot be matched: {why}")


def _regex(text: str, items: list[_Item]) -> Iterator[str]:
    """One group for each reader; raises for what could be read in two ways.

    Linear: a slot without slashes never reaches past a delimiter, so what it gives back is looked at once.  The one
    slot with slashes gives back a character at a time, and whatever follows it stops at the next delimiter.
    """
    if sum(isinstance(each, _Slot) and each.slashes for each in items) > 1:
        raise _unmatchable(text, "only one of {+x}, {#x} and {/x*} can be told from the rest; use {x} for the others")
    for at, item in enumerate(items):
        after = items[at + 1 :]
        if isinstance(item, str):
            yield re.escape(item)
        elif isinstance(item, _Group):
            if after and _begins(after[0]) not in item.forbidden:
                raise _unmatchable(text, f"{{{item.source}}} reaches into what follows it; put it last")
            yield f"({re.escape(item.first)}[^{re.escape(item.forbidden)}]*)?"
        else:
            gap, previous = _gap(items[:at])
            if previous and not _delimiters(gap):
                raise _unmatchable(
                    text, f"nothing tells where the value before {{{item.source}}} ends; put one of {_RESERVED} there"
                )
            stops = _later_stops(after) if item.slashes else _near_stops(gap if previous else "", after)
            # file:///{+path} takes no second slash, which would make the path absolute; file://{+path} asks for it.
            guard = "(?!/)" if gap.endswith("/") and not gap.endswith("://") else ""
            yield f"{guard}([^{re.escape(stops)}]+)"


def _begins(item: _Item) -> str:
    if isinstance(item, str):
        return item[0]
    return item.first if isinstance(item, _Group) else " "  # a value may begin with anything


def _gap(before: list[_Item]) -> tuple[str, bool]:
    """The literal at the end of `before`, and whether there is a variable before it."""
    if before and isinstance(before[-1], str):
        return before[-1], len(before) > 1
    return "", bool(before)


def _delimiters(literal: str) -> str:
    """What no value can hold when it was expanded as the RFC says."""
    return "".join(char for char in literal if char in _RESERVED)


def _near_stops(gap: str, after: list[_Item]) -> str:
    """What ends a value without slashes: the delimiters next to it, besides those that end a segment."""
    following = _begins(after[0]) if after and isinstance(after[0], _Group) else _delimiters(_literal(after))[:1]
    return "\0/?#" + _delimiters(gap)[-1:] + following


def _literal(after: list[_Item]) -> str:
    return after[0] if after and isinstance(after[0], str) else ""


def _later_stops(after: list[_Item]) -> str:
    """What ends the value with slashes: only what begins another part of the URI further on."""
    later = "".join(each if isinstance(each, str) else each.first for each in after if not isinstance(each, _Slot))
    return "\0" + "".join(char for char in "?#;&" if char in later)
