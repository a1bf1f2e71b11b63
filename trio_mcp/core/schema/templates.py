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
from typing import NamedTuple, TypeAlias
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


class _Operator(NamedTuple):
    """A row of the table in the RFC's appendix A."""

    first: str
    separator: str
    named: bool = False
    reserved: bool = False  # keep reserved characters and percent-encoding
    if_empty: str = "="

    def encode(self, text: object, prefix: int | None = None) -> str:
        if not isinstance(text, str):
            raise UsageError(f"template values must be strings, lists or maps of strings, got {type(text).__name__}")
        try:
            if not self.reserved:
                return quote(text[:prefix], safe="")
            parts = re.split(_ENCODED, "".join(re.findall(_CHARACTER, text)[:prefix]))
            parts[::2] = [quote(each, safe=_RESERVED) for each in parts[::2]]
        except UnicodeEncodeError:
            raise UsageError("a template value has half a surrogate pair, which a URI cannot encode") from None
        return "".join(parts)

    def pair(self, name: str, value: str) -> str:
        return f"{name}={value}" if value else name + self.if_empty


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


class _Variable(NamedTuple):
    name: str
    explode: bool
    prefix: int | None


class _Expression(NamedTuple):
    text: str
    operator: _Operator
    variables: tuple[_Variable, ...]

    def expand(self, values: Mapping[str, Value]) -> str:
        """Return the text for the values; an undefined one, an empty list and an empty map give none."""
        operator, pieces = self.operator, []
        for name, explode, prefix in self.variables:
            value = values.get(name)
            if value is None:
                continue
            if prefix is not None and not isinstance(value, str):
                raise UsageError(f"{{{self.text}}} takes a prefix of {name}, which must be a string")
            named = operator.named
            if isinstance(value, Mapping):
                pairs = [(operator.encode(key), operator.encode(each)) for key, each in value.items()]
                items = [operator.pair(*each) if explode else ",".join(each) for each in pairs]
                named = named and not explode  # the keys are the names
            elif isinstance(value, str) or not isinstance(value, Sequence):
                items = [operator.encode(value, prefix)]  # raises for other types
            else:
                items = [operator.encode(each) for each in value]
            if items and not explode:
                items = [",".join(items)]
            pieces += [operator.pair(name, each) for each in items] if named else items
        return operator.first + operator.separator.join(pieces) if pieces else ""


_Part: TypeAlias = str | _Expression


def _parse(text: str) -> Iterator[_Part]:
    for index, part in enumerate(re.split(_EXPRESSION, text)):
        if index % 2:
            symbol = part[:1] if part[:1] in tuple("+#./;?&") else ""
            variables = []
            for spec in part.removeprefix(symbol).split(","):
                if (found := re.fullmatch(_VARIABLE, spec)) is None:
                    raise UsageError(
                        f"the URI template {text!r} has an invalid expression {{{part}}}: expected names of letters, "
                        "digits, _ and ., with commas between, * or :length after a name, one of +#./;?& in front"
                    )
                variables.append(_Variable(found[1], found[2] is not None, int(found[3]) if found[3] else None))
            yield _Expression(part, _OPERATORS[symbol], tuple(variables))
        elif invalid := re.search(_NOT_LITERAL, part):
            fault = "an unpaired brace" if invalid[0] in "{}" else f"{invalid[0]!r}, which must be percent-encoded"
            raise UsageError(f"the URI template {text!r} has {fault}")
        elif part:
            yield quote(part, safe=_RESERVED + "%")


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


# Matching.  An expression without names becomes literals and values; an expression with names becomes an optional
# group.  They keep the order of the template, and each value or group is one group of one regular expression.


class _Reader(NamedTuple):
    """A variable that its place in the URI identifies, or the variables of an expression such as {?x,y}."""

    source: str  # the expression, for messages
    names: tuple[str, ...]
    operator: _Operator
    slashes: bool  # the value can contain slashes

    @property
    def in_path(self) -> bool:
        return self.operator.first not in ("?", "&")

    @property
    def first(self) -> str:
        """The character that it begins with; empty for a value, which can begin with any character."""
        return self.operator.first if self.operator.named else ""

    def read(self, raw: str) -> dict[str, str] | None:
        """Return the values, decoded once, or None if one of them could escape from its path."""
        pairs = [(self.names[0], raw)]
        if self.operator.named:
            pairs = [each.partition("=")[::2] for each in raw[1:].split(self.operator.separator)]
        values: dict[str, str] = {}
        for name, text in pairs:
            if name not in self.names or name in values or (self.in_path and re.search(_HIDDEN_SLASH, text)):
                return None
            try:
                values[name] = unquote(text, errors="strict")  # refuses overlong forms, such as %C0%AF for a slash
            except UnicodeDecodeError:
                return None
            if "\0" in values[name] or ".." in re.split(_SLASH, values[name]):
                return None
        return values


_Item: TypeAlias = str | _Reader


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
        self._readers = [item for item in items if isinstance(item, _Reader)]
        self._regex = re.compile("".join(_regex(text, items)), re.S)

    @property
    def optional(self) -> frozenset[str]:
        """The variables that can be absent from a match: those of {?x}, {&x} and {;x}."""
        return frozenset(name for each in self._readers if each.operator.named for name in each.names)

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
    """Return the literals, each as long as possible, and the readers.  Raises UsageError for a variable of no use."""
    items: list[_Item] = [""]
    seen: set[str] = set()
    for part in template._parts:
        found: list[_Item] = [part] if isinstance(part, str) else []
        if isinstance(part, _Expression):
            source, operator, variables = part
            for name, explode, prefix in variables:
                why = ""
                if name in seen:
                    why = f"it has two variables {name}; rename one of them"
                elif prefix is not None:
                    why = f"{{{source}}} is only the beginning of {name}; drop the :{prefix}"
                elif explode and operator is not _OPERATORS["/"]:
                    why = f"{name}* is a list; write {{+{name}}} or {{/{name}*}} for a path, or drop the *"
                if why:
                    raise _unmatchable(template.text, why)
                seen.add(name)
                found += [operator.separator if found else operator.first]
                found += [_Reader(source, (name,), operator, operator.reserved or explode)]
            if operator.named:
                found = [_Reader(source, tuple(each.name for each in variables), operator, slashes=False)]
        for item in found:
            if isinstance(item, str) and isinstance(items[-1], str):
                items[-1] += item
            else:
                items.append(item)
    return [item for item in items if item]


def _unmatchable(text: str, why: str) -> UsageError:
    return UsageError(f"the URI template {text!r} cannot be matched: {why}")


def _regex(text: str, items: list[_Item]) -> Iterator[str]:
    """The parts of the regular expression, with one group for each reader.  Raises UsageError if they are ambiguous.

    The match is linear: a value without slashes never passes a delimiter, so backtracking looks at its characters once.
    The one value with slashes gives up one character at a time, and the part after it stops at the next delimiter.
    """
    if sum(isinstance(each, _Reader) and each.slashes for each in items) > 1:
        raise _unmatchable(text, "it may have only one of {+x}, {#x} and {/x*}; use {x} for the others")
    firsts = [item[:1] if isinstance(item, str) else item.first for item in items]
    for index, item in enumerate(items):
        before, after = items[index - 1] if index else "", items[index + 1] if index + 1 < len(items) else ""
        if isinstance(item, str):
            yield re.escape(item)
        elif item.operator.named:
            forbidden = "/?#" if item.in_path else "#"
            if after and firsts[index + 1] not in tuple(forbidden):
                raise _unmatchable(text, f"{{{item.source}}} would include the text after it; put it last")
            yield f"({re.escape(item.first)}[^{re.escape(forbidden)}]*)?"
        else:
            gap = before if isinstance(before, str) else ""  # the literal before the value
            follows_a_value = index > (1 if gap else 0)
            if follows_a_value and not _delimiters(gap):
                why = f"the value before {{{item.source}}} has no delimiter after it; put one of {_RESERVED} there"
                raise _unmatchable(text, why)
            if item.slashes:  # it ends where a later part of the URI begins
                later = "".join(each if isinstance(each, str) else each.first for each in items[index + 1 :])
                stops = "".join(char for char in "?#;&" if char in later)
            else:  # it ends at the delimiters next to it, and at the end of a segment
                near = _delimiters(after)[:1] if isinstance(after, str) else after.first
                stops = "/?#" + (_delimiters(gap)[-1:] if follows_a_value else "") + near
            # file:///{+path} refuses a second slash, which would make the path absolute; file://{+path} needs it.
            guard = "(?!/)" if gap.endswith("/") and not gap.endswith("://") else ""
            yield rf"{guard}([^\0{re.escape(stops)}]+)"


def _delimiters(literal: str) -> str:
    """The characters of `literal` that are encoded in every expanded value."""
    return "".join(char for char in literal if char in _RESERVED)
