"""URI templates (RFC 6570, level 4), in both directions.

`Template` expands: every operator, explode and prefix, strings, lists and maps.  Any valid template can be expanded; a
client needs no more for the templates of a server.

`Matcher` reads the values back from a URI, which the RFC leaves open: some templates cannot be matched ({x:3}), others
only by guessing ({a}{b}, {a}-{b}).  The matcher refuses these templates when it is made, and names the change that
helps.  For all others, every URI that was made by expansion has one set of values, found in time linear in the URI:

- `{x}`, `{.x}` and `{/x}` stop at / ? # and at the delimiter next to them in the template.  Every other character is
  accepted raw or encoded, because people and models type URIs by hand: `user:{mail}` matches `user:a@b`.
- `{+x}`, `{#x}` and `{/x*}` can contain slashes; a template may have one of them.
- `{?x}`, `{&x}` and `{;x}` carry names, so they can be absent and come in any order.  A URI with an unknown or repeated
  name does not match.  All other variables must be there and not empty.

Values are strings, decoded once, and safe to split at slashes: no NUL, no ".." segment, no backslash and no encoded
slash outside `{?x}` and `{&x}`, and no slash at the beginning of a value if the template has one before it.  Literal
text is compared without decoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote, unquote

import attrs

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import record

__all__ = ["Matcher", "Template", "Value", "in_ascii"]

Value: TypeAlias = str | Sequence[str] | Mapping[str, str] | None
"""The value of a variable; None means absent."""

_RESERVED = ":/?#[]@!$&'()*+,;="
_ASCII = "".join(map(chr, range(128)))
_EXPRESSION = r"\{([^{}]*)\}"
_VARIABLE = r"(?ai)((?:\w|%[0-9A-F]{2})(?:\.?(?:\w|%[0-9A-F]{2}))*)(?:(\*)|:([1-9]\d{0,3}))?"
# The RFC forbids ' too, by an error that its errata list (id 6937).
_NOT_LITERAL = r'[\x00-\x20\x7f"<>\\^`{|}\ud800-\udfff]|%(?![0-9A-Fa-f]{2})'
_NOT_URI = r"[\x00-\x1f\x7f]|%(?![0-9A-Fa-f]{2})"
_ENCODED = r"(%[0-9A-Fa-f]{2})"
# One character of a value that keeps its percent-encoding: a prefix counts these.
_CHARACTER = r"(?is)%[C-F][0-9A-F](?:%[89AB][0-9A-F])*|%[0-9A-F]{2}|."
_HIDDEN_SLASH = r"(?i)%2f|%5c|\\"
_SLASH = r"[/\\]"


@record
class _Operator:
    """A row of the table in the RFC's appendix A."""

    first: str
    separator: str
    named: bool = False
    reserved: bool = False  # keep reserved characters and percent-encoding
    if_empty: str = "="

    def encode(self, text: object) -> str:
        if not isinstance(text, str):
            raise UsageError(f"template values must be strings, lists or maps of strings, got {type(text).__name__}")
        try:
            if not self.reserved:
                return quote(text, safe="")
            parts = re.split(_ENCODED, text)
            parts[::2] = [quote(each, safe=_RESERVED) for each in parts[::2]]
        except UnicodeEncodeError:
            raise UsageError("a template value has half a surrogate pair, which a URI cannot encode") from None
        return "".join(parts)

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
        """The texts between the separators; none for an undefined value, an empty list or an empty map."""
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
            items = [operator.encode(value)]  # raises for this type
        if not items:
            return []
        if not variable.explode:
            items = [",".join(items)]
        return [operator.pair(variable.name, each) for each in items] if operator.named else items


_Part: TypeAlias = str | _Expression


def _parse(text: str) -> Iterator[_Part]:
    for index, part in enumerate(re.split(_EXPRESSION, text)):
        if index % 2:
            yield _parse_expression(text, part)
        elif invalid := re.search(_NOT_LITERAL, part):
            fault = "an unpaired brace" if invalid[0] in "{}" else f"{invalid[0]!r}, which must be percent-encoded"
            raise UsageError(f"the URI template {text!r} has {fault}")
        elif part:
            yield quote(part, safe=_RESERVED + "%")


def _parse_expression(text: str, inside: str) -> _Expression:
    symbol = inside[0] if inside and inside[0] in "+#./;?&" else ""
    variables = []
    for spec in inside[len(symbol) :].split(","):
        found = re.fullmatch(_VARIABLE, spec)
        if found is None:
            raise UsageError(
                f"the URI template {text!r} has an invalid expression {{{inside}}}: expected names of letters, digits, "
                f"_ and ., with commas between, * or :length after a name, one of +#./;?& in front"
            )
        variables.append(_Variable(found[1], found[2] is not None, int(found[3]) if found[3] else None))
    return _Expression(inside, _OPERATORS[symbol], tuple(variables))


@record
class Template:
    """A URI template that can be expanded.  Raises UsageError if the text is not a valid template."""

    text: str
    _parts: tuple[_Part, ...] = attrs.field(
        init=False,
        eq=False,
        repr=False,
        default=attrs.Factory(lambda template: tuple(_parse(template.text)), takes_self=True),
    )

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables, without duplicates, in the order of the text."""
        expressions = [part for part in self._parts if isinstance(part, _Expression)]
        return tuple(dict.fromkeys(each.name for expression in expressions for each in expression.variables))

    def expand(self, values: Mapping[str, Value]) -> str:
        """Return the URI.  Absent variables are left out, as in the RFC.

        Raises UsageError if a value is not a string, list or map of strings, or if a list or map needs a prefix.
        """
        return "".join([part if isinstance(part, str) else part.expand(values) for part in self._parts])


# Matching.  An expression without names becomes literals and slots; an expression with names becomes an optional group.
# They keep the order of the template, and each slot or group is one group of one regular expression.


@record
class _Slot:
    """A variable without a name in the URI: its place identifies it."""

    source: str  # the expression, for messages
    name: str
    slashes: bool  # the value can contain slashes

    def read(self, raw: str) -> dict[str, str] | None:
        value = None if re.search(_HIDDEN_SLASH, raw) else _decoded(raw)
        return None if value is None else {self.name: value}


@record
class _Group:
    """The variables of an expression with names in the URI, such as {?x,y}."""

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
    """Decode a value once; None if it is not UTF-8, or could escape from its path."""
    try:
        value = unquote(raw, errors="strict")  # refuses overlong forms, such as %C0%AF for a slash
    except UnicodeDecodeError:
        return None
    return None if "\0" in value or ".." in re.split(_SLASH, value) else value


def in_ascii(uri: str) -> str | None:
    """Percent-encode the characters beyond ASCII, for `Matcher.match_ascii`; None if the text is not a URI."""
    try:
        ascii = quote(uri, safe=_ASCII)
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    return None if re.search(_NOT_URI, ascii) else ascii


class Matcher:
    """A URI template that can be matched with URIs.

    Raises UsageError if the text is not a valid template, or cannot be matched without guessing.
    """

    def __init__(self, text: str) -> None:
        self.template = Template(text)
        items = _flatten(self.template)
        self._readers = [item for item in items if not isinstance(item, str)]
        self._regex = re.compile("".join(_regex(text, items)), re.S)

    @property
    def optional(self) -> frozenset[str]:
        """The variables that can be absent from a match: those of {?x}, {&x} and {;x}."""
        return frozenset(name for each in self._readers if isinstance(each, _Group) for name in each.names)

    def match(self, uri: str) -> dict[str, str] | None:
        """Return the values, or None if the URI does not match or has an unsafe value."""
        ascii = in_ascii(uri)
        return None if ascii is None else self.match_ascii(ascii)

    def match_ascii(self, ascii: str) -> dict[str, str] | None:
        """Match the result of `in_ascii`; a caller with many templates calls `in_ascii` once."""
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
        for index, each in enumerate(part.variables):
            _add_literal(items, operator.separator if index else operator.first)
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
        raise _unmatchable(text, f"it has two variables {name}; rename one of them")
    seen.add(name)
    if variable.prefix is not None:
        raise _unmatchable(text, f"{{{expression.text}}} is only the beginning of {name}; drop the :{variable.prefix}")
    if variable.explode and expression.operator is not _OPERATORS["/"]:
        raise _unmatchable(text, f"{name}* is a list; write {{+{name}}} or {{/{name}*}} for a path, or drop the *")


def _unmatchable(text: str, why: str) -> UsageError:
    return UsageError(f"the URI template {text!r} cannot be matched: {why}")


def _regex(text: str, items: list[_Item]) -> Iterator[str]:
    """The parts of the regular expression, with one group for each reader.  Raises UsageError if they are ambiguous.

    The match is linear: a slot without slashes never passes a delimiter, so backtracking looks at its characters once.
    The one slot with slashes gives up one character at a time, and the part after it stops at the next delimiter.
    """
    if sum(isinstance(each, _Slot) and each.slashes for each in items) > 1:
        raise _unmatchable(text, "it may have only one of {+x}, {#x} and {/x*}; use {x} for the others")
    for index, item in enumerate(items):
        if isinstance(item, str):
            yield re.escape(item)
        elif isinstance(item, _Slot):
            yield _slot_regex(text, item, items, index)
        else:
            following = items[index + 1] if index + 1 < len(items) else ""
            if isinstance(following, _Slot) or _first(following) not in item.forbidden:
                raise _unmatchable(text, f"{{{item.source}}} would include the text after it; put it last")
            yield f"({re.escape(item.first)}[^{re.escape(item.forbidden)}]*)?"


def _slot_regex(text: str, slot: _Slot, items: list[_Item], index: int) -> str:
    before, after = items[index - 1] if index else "", items[index + 1 :]
    gap = before if isinstance(before, str) else ""  # the literal before the value
    follows_a_value = index > (1 if gap else 0)
    if follows_a_value and not _delimiters(gap):
        raise _unmatchable(
            text, f"the value before {{{slot.source}}} has no delimiter after it; put one of {_RESERVED} there"
        )
    if slot.slashes:  # it ends where a later part of the URI begins
        later = "".join(each if isinstance(each, str) else _first(each) for each in after)
        stops = "".join(char for char in "?#;&" if char in later)
    else:  # it ends at the delimiters next to it, and at the end of a segment
        following = after[0] if after else ""
        near = _delimiters(following)[:1] if isinstance(following, str) else _first(following)
        stops = "/?#" + (_delimiters(gap)[-1:] if follows_a_value else "") + near
    # file:///{+path} refuses a second slash, which would make the path absolute; file://{+path} needs it.
    guard = "(?!/)" if gap.endswith("/") and not gap.endswith("://") else ""
    return rf"{guard}([^\0{re.escape(stops)}]+)"


def _first(item: _Item) -> str:
    """The character that an item begins with; empty for a value, which can begin with any character."""
    if isinstance(item, str):
        return item[:1]
    return item.first if isinstance(item, _Group) else ""


def _delimiters(literal: str) -> str:
    """The characters of `literal` that are encoded in every expanded value."""
    return "".join(char for char in literal if char in _RESERVED)
