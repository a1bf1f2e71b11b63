"""One entry in a configuration file of JSON or TOML: read it, and write it into the text of the file.

The rest of the text stays as it is: comments, order, indentation.  JSON files of hosts may have comments and trailing
commas.  After each change the new text is read again and compared with what it must say, so a form that these
functions do not expect (an inline table, a table in two places) raises `UsageError`, and no file is damaged.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trio_mcp.core.errors import UsageError

__all__ = ["Document", "put_json", "put_toml", "read_json", "read_toml", "toml_entry"]

Document = dict[str, Any]

_TOKEN = re.compile(r'(?P<gap>\s+|//[^\n]*|/\*.*?\*/)|"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"/]+', re.DOTALL)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\s*\[")


class _Token(NamedTuple):
    text: str
    start: int
    end: int


def read_json(text: str) -> Document:
    """Read a JSON object with comments and trailing commas; an empty text is an empty object.  Raises `ValueError`."""
    tokens = _tokens(text)
    kept = [
        token
        for token, after in zip(tokens, [*tokens[1:], None], strict=False)
        if not (token.text == "," and after is not None and after.text in "]}")
    ]
    try:
        document = json.loads(" ".join(token.text for token in kept) or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{_place(text, kept, error.pos)}: {error.msg}") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, got {type(document).__name__}")
    return document


def _place(text: str, kept: list[_Token], position: int) -> str:
    """The line of a position in the text of the kept tokens, which has no lines."""
    for token in kept:
        position -= len(token.text) + 1
        if position < 0:
            return f"line {text.count(chr(10), 0, token.start) + 1}"
    return "the end"


def put_json(text: str, key: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return the text with ``{key: {name: entry}}`` in it.  Raises `ValueError`, and `UsageError`."""
    document = read_json(text)
    unit = found[1] if (found := re.search(r"\n([ \t]+)\S", text)) else "  "
    if not document:
        changed = json.dumps({key: {name: entry}}, ensure_ascii=False, indent=unit) + "\n"
        if text.strip() not in ("", "{}"):  # an object of comments only
            changed = _put(text, _tokens(text), 0, key, {name: entry}, unit)
    else:
        tokens = _tokens(text)
        place = _members(tokens, 0).get(key)
        if place is None:
            changed = _put(text, tokens, 0, key, {name: entry}, unit)
        elif tokens[place[0]].text != "{":
            raise UsageError(f"{key!r} must be an object in the file")
        else:
            changed = _put(text, tokens, place[0], name, entry, unit)
    return _verified(changed, read_json, document, key, name, entry)


def _tokens(text: str) -> list[_Token]:
    """The tokens of a JSON text, without spaces and comments."""
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"line {text.count(chr(10), 0, at) + 1}: expected JSON")
        if match["gap"] is None:
            found.append(_Token(match[0], match.start(), match.end()))
        at = match.end()
    return found


def _close(tokens: list[_Token], at: int) -> int:
    """The index of the last token of the value that begins at this index."""
    depth = 0
    while True:
        depth += (tokens[at].text in ("{", "[")) - (tokens[at].text in ("}", "]"))
        if depth == 0:
            return at
        at += 1


def _members(tokens: list[_Token], at: int) -> dict[str, tuple[int, int]]:
    """The members of the object that begins at this index: the indexes of the first and last token of each value."""
    members = {}
    end, at = _close(tokens, at), at + 1
    while at < end:
        name, last = json.loads(tokens[at].text), _close(tokens, at + 2)
        members[name] = (at + 2, last)
        at = last + 1 + (tokens[last + 1].text == ",")
    return members


def _put(text: str, tokens: list[_Token], at: int, name: str, value: Any, unit: str) -> str:
    """Set one member of the object that begins at this index; a new member comes last."""
    members = _members(tokens, at)
    opened, closed = tokens[at], tokens[_close(tokens, at)]
    outer = _indent_of(text, opened.start)
    inner = _indent_of(text, tokens[at + 1].start) if members else outer + unit
    if inner == outer:  # the object is on one line
        inner = outer + unit
    written = json.dumps(value, ensure_ascii=False, indent=unit).replace("\n", f"\n{inner}")
    if name in members:
        first, last = members[name]
        return text[: tokens[first].start] + written + text[tokens[last].end :]
    before, comma = opened.end, ""
    if members:
        before_close = tokens[_close(tokens, at) - 1]
        before, comma = before_close.end, "" if before_close.text == "," else ","
    between = text[before : closed.start].rstrip()
    member = f"\n{inner}{json.dumps(name, ensure_ascii=False)}: {written}\n{outer}"
    return text[:before] + comma + between + member + text[closed.start :]


def _indent_of(text: str, at: int) -> str:
    """The spaces at the start of the line of this position."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def read_toml(text: str) -> Document:
    """Read TOML.  Raises `ValueError`."""
    import tomllib

    return tomllib.loads(text)


def put_toml(text: str, key: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return the text with the table ``[key.name]`` in it; a new one comes last.  Raises `ValueError`, `UsageError`."""
    document = read_toml(text)
    lines = text.splitlines(keepends=True)
    kept: list[str] = []
    place = None
    at = 0
    while at < len(lines):
        if not _belongs(lines[at], key, name):
            kept.append(lines[at])
            at += 1
            continue
        end = next((more for more in range(at + 1, len(lines)) if _HEADER.match(lines[more])), len(lines))
        rest = end  # empty lines and comments before the next header belong to that one
        while rest > at + 1 and (not lines[rest - 1].strip() or lines[rest - 1].lstrip().startswith("#")):
            rest -= 1
        if place is None:
            place = len(kept)
        else:
            while len(kept) > place and not kept[-1].strip():
                kept.pop()
        kept.extend(lines[rest:end])
        at = end
    written = toml_entry(key, name, entry)
    if place is None:
        start = "".join(kept)
        gap = "" if not start else "\n" if start.endswith("\n") else "\n\n"
        changed = f"{start}{gap}{written}"
    else:
        changed = "".join([*kept[:place], written, *kept[place:]])
    return _verified(changed, read_toml, document, key, name, entry)


def _belongs(line: str, key: str, name: str) -> bool:
    """Whether this line is the header of the table of the entry, or of a table in it."""
    if not _HEADER.match(line):
        return False
    try:
        header = read_toml(line)
    except ValueError:  # part of a value, such as a list over several lines
        return False
    tables = header.get(key)
    return isinstance(tables, dict) and name in tables


def toml_entry(key: str, name: str, entry: Mapping[str, Any]) -> str:
    """Write an entry of strings, lists of strings and mappings of strings as a table."""
    path = f"{_toml_key(key)}.{_toml_key(name)}"
    plain = {each: value for each, value in entry.items() if not isinstance(value, Mapping)}
    tables = {each: value for each, value in entry.items() if isinstance(value, Mapping)}
    lines = [f"[{path}]", *(f"{_toml_key(each)} = {_toml_value(value)}" for each, value in plain.items())]
    for table, values in tables.items():
        lines += ["", f"[{path}.{_toml_key(table)}]"]
        lines += [f"{_toml_key(each)} = {_toml_value(value)}" for each, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    # A JSON string, and a JSON list of strings, are TOML too, except for DEL, which TOML demands escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _verified(
    changed: str, read: Callable[[str], Document], document: Document, key: str, name: str, entry: Mapping[str, Any]
) -> str:
    expected = copy.deepcopy(document)
    try:
        expected.setdefault(key, {})[name] = dict(entry)
        right = read(changed) == expected
    except (ValueError, TypeError):
        right = False
    if not right:
        raise UsageError(f"the file has {key}.{name} in a form that cannot be changed here; edit the file by hand")
    return changed
