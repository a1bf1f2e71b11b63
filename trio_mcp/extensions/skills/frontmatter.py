"""The frontmatter of a SKILL.md: a small part of YAML, read as JSON.

    ---
    name: pdf-processing
    description: Extract, fill, and assemble PDF documents
    metadata:
      version: "2.1"
    ---

Mappings, lists, plain and quoted scalars, block scalars (`|`, `>`), and flow collections on one line are read, with the
types of the core schema of YAML 1.2.  Skills need no more.  The rest of YAML (anchors, tags, several documents) raises
`BadFrontmatter` with the line: a reader that guessed could show the user another skill than the model gets.
"""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple, NoReturn

from trio_mcp.core.messages import Json, JsonObject

__all__ = ["BadFrontmatter", "read_frontmatter"]

_LONGEST = 64 * 1024  # characters: the specification allows about 2,000 in the fields that it names
_DEEPEST = 20
_FENCE = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_NUMBERS = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, Json] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SINGLE = re.compile(r"'((?:[^']|'')*)'")
# Spaces are looked at only after another character, or a long run of them would take minutes.
_KEY = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#,\[\]{}&*!|>'"%@`?-][^#]*?|[?-][^\s#][^#]*?)(?<=\S)\s*:(?:\s+(.*)|)$"""
)
_COMMENT = re.compile(r"(?<!\s)\s+#")
_BLOCK = re.compile(r"([|>])([-+]?)\s*(?:#.*)?")


class BadFrontmatter(ValueError):
    """The frontmatter is missing, or is not in the part of YAML that is read."""


class _YamlLine(NamedTuple):
    number: int
    indent: int
    text: str


def read_frontmatter(text: str) -> JsonObject:
    """Return the frontmatter of a file.  Raises `BadFrontmatter`."""
    found = _FENCE.match(text)
    if found is None or len(found[1]) > _LONGEST:
        raise BadFrontmatter(
            f"SKILL.md must begin with frontmatter between two lines ---, of {_LONGEST} characters at most"
        )
    value = _YamlReader(found[1].replace("\r\n", "\n")).document()
    if not isinstance(value, dict):
        raise BadFrontmatter("the frontmatter of SKILL.md must be a mapping: name: value")
    return value


class _YamlReader:
    """Reads the lines of one document."""

    def __init__(self, text: str) -> None:
        self._raw = text.split("\n")
        self._at = 0

    def document(self) -> Json:
        first = self._next()
        if first is None:
            return None
        value = self._block(first.indent, 0)
        if (rest := self._next()) is not None:
            self._fail(rest, "the indentation does not fit")
        return value

    def _fail(self, line: _YamlLine, why: str) -> NoReturn:
        raise BadFrontmatter(f"line {line.number} of the frontmatter: {why}")

    def _next(self) -> _YamlLine | None:
        """Return the next line that is not empty, without taking it."""
        while self._at < len(self._raw):
            raw = self._raw[self._at]
            text = raw.lstrip(" ")
            if text and not text.startswith("#"):
                line = _YamlLine(self._at + 2, len(raw) - len(text), text.rstrip())  # the first line is the fence
                if text.startswith("\t"):
                    self._fail(line, "a tab must not indent")
                if text.strip():
                    return line
            self._at += 1
        return None

    # Blocks.

    def _block(self, indent: int, depth: int) -> Json:
        line = self._next()
        assert line is not None  # the caller has seen it
        if depth > _DEEPEST:
            self._fail(line, "the frontmatter is nested too deep")
        if line.text == "-" or line.text.startswith("- "):
            return self._list(indent, depth)
        if _KEY.match(line.text):
            return self._mapping(indent, depth)
        self._at += 1
        return self._scalar(line, line.text, indent - 1)

    def _mapping(self, indent: int, depth: int) -> JsonObject:
        found: JsonObject = {}
        while (line := self._next()) is not None and line.indent == indent:
            match = _KEY.match(line.text)
            if match is None:
                self._fail(line, "expected a member, name: value")
            key = self._key(line, match[1])
            if key in found:
                self._fail(line, f"{key!r} is there twice")
            self._at += 1
            found[key] = self._value(line, (match[2] or "").strip(), indent, depth, in_mapping=True)
        if line is not None and line.indent > indent:
            self._fail(line, "the indentation does not fit")
        return found

    def _list(self, indent: int, depth: int) -> list[Json]:
        found: list[Json] = []
        while (line := self._next()) is not None and line.indent == indent and re.match(r"-(?: |$)", line.text):
            inner = line.text[1:].lstrip(" ")
            if inner and (_KEY.match(inner) or inner.startswith("- ") or inner == "-"):
                # The item is a mapping or a list that begins on this line: read it as if it began on a line of its own.
                column = indent + len(line.text) - len(inner)
                self._raw[self._at] = " " * column + inner
                found.append(self._block(column, depth + 1))
            else:
                self._at += 1
                found.append(self._value(line, inner, indent, depth, in_mapping=False))
        return found

    def _value(self, line: _YamlLine, text: str, indent: int, depth: int, *, in_mapping: bool) -> Json:
        """Read the value after a key or a dash."""
        if block := _BLOCK.fullmatch(text):
            return self._block_scalar(block[1], block[2], indent)
        if text and not text.startswith("#"):
            return self._scalar(line, text, indent)
        following = self._next()
        if following is None:
            return None
        same = in_mapping and following.indent == indent and re.match(r"-(?: |$)", following.text)
        return self._block(following.indent, depth + 1) if following.indent > indent or same else None

    def _block_scalar(self, style: str, chomp: str, indent: int) -> str:
        lines: list[str] = []
        while self._at < len(self._raw):
            raw = self._raw[self._at]
            if raw.strip() and len(raw) - len(raw.lstrip(" ")) <= indent:
                break
            lines.append(raw)
            self._at += 1
        kept = [len(each) - len(each.lstrip(" ")) for each in lines if each.strip()]
        margin = kept[0] if kept else 0
        text = "\n".join(each[margin:] for each in lines)
        body = text.rstrip("\n")
        tail = text[len(body) :] + "\n"
        if style == ">":
            body = _folded(body)
        return body if chomp == "-" or not body else body + ("\n" if chomp != "+" else tail)

    # Scalars.

    def _key(self, line: _YamlLine, text: str) -> str:
        if text[0] in "\"'":
            return str(self._scalar(line, text, line.indent))
        return text

    def _scalar(self, line: _YamlLine, text: str, indent: int) -> Json:
        if text[0] in "\"'[{":
            value, rest = self._flow(line, text, 0)
            if rest and not re.match(r"\s+#|\s*$", rest):
                self._fail(line, "unexpected text after the value; quotes and brackets must end on their line")
            return value
        if text[0] in "&*!%@`|>?,]}":
            self._fail(line, f"a value must not begin with {text[0]!r}: write it in quotes")
        parts = [_without_comment(text)]
        # A plain scalar goes on over lines that are indented further.
        while (more := self._next()) is not None and more.indent > indent and more.number == self._at + 2:
            if _KEY.match(more.text) or re.match(r"-(?: |$)", more.text):
                self._fail(more, "the indentation does not fit")
            parts.append(_without_comment(more.text))
            self._at += 1
        if any(": " in part or part.endswith(":") for part in parts):
            self._fail(line, "a value with a colon needs quotes")
        return " ".join(parts) if len(parts) > 1 else self._plain(line, parts[0])

    def _plain(self, line: _YamlLine, text: str) -> Json:
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            sign = -1 if text.startswith("-") else 1
            digits = text.lstrip("+-")
            return sign * int(digits, 8 if digits.startswith("0o") else 16 if digits.startswith("0x") else 10)
        if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            return number
        if _NOT_NUMBERS.fullmatch(text):
            self._fail(line, f"{text} has no JSON form")
        return text

    def _flow(self, line: _YamlLine, text: str, depth: int) -> tuple[Json, str]:
        """Read a quoted scalar, a flow list or a flow mapping; return it and the rest of the line."""
        if depth > _DEEPEST:
            self._fail(line, "the frontmatter is nested too deep")
        if found := _DOUBLE.match(text):
            return self._unescaped(line, found[1]), text[found.end() :]
        if found := _SINGLE.match(text):
            return found[1].replace("''", "'"), text[found.end() :]
        if text.startswith("["):
            return self._flow_list(line, text[1:], depth)
        if text.startswith("{"):
            return self._flow_mapping(line, text[1:], depth)
        if not (plain := re.match(r"[^,\[\]{}\s&*!|>'\"%@`#:][^,\[\]{}:#]*", text)):
            self._fail(line, "quotes and brackets must end on their line")
        return self._plain(line, plain[0].strip()), text[plain.end() :]

    def _flow_list(self, line: _YamlLine, text: str, depth: int) -> tuple[Json, str]:
        items: list[Json] = []
        while not (text := text.lstrip()).startswith("]"):
            item, text = self._flow(line, text, depth + 1)
            items.append(item)
            text = self._after_item(line, text, "]")
        return items, text[1:]

    def _flow_mapping(self, line: _YamlLine, text: str, depth: int) -> tuple[Json, str]:
        members: JsonObject = {}
        while not (text := text.lstrip()).startswith("}"):
            key, text = self._flow(line, text, depth + 1)
            if not (text := text.lstrip()).startswith(":") or not isinstance(key, str) or key in members:
                self._fail(line, "expected a member, name: value, each once")
            members[key], text = self._flow(line, text[1:].lstrip(), depth + 1)
            text = self._after_item(line, text, "}")
        return members, text[1:]

    def _after_item(self, line: _YamlLine, text: str, end: str) -> str:
        text = text.lstrip()
        if text.startswith(","):
            return text[1:]
        if not text.startswith(end):
            self._fail(line, f"expected a comma or {end}")
        return text

    def _unescaped(self, line: _YamlLine, text: str) -> str:
        # YAML has more escapes than JSON; those that both have are enough for a frontmatter.
        try:
            value = str(json.loads(f'"{text}"'))
        except ValueError:
            self._fail(line, "a backslash in double quotes must begin an escape of JSON, such as \\n")
        try:
            value.encode()
        except UnicodeEncodeError:
            self._fail(line, "the text has half a surrogate pair")
        return value


def _without_comment(text: str) -> str:
    return _COMMENT.split(text, maxsplit=1)[0].rstrip()


def _folded(text: str) -> str:
    """Fold the lines of a `>` scalar: a line end becomes a space, an empty line becomes a line end."""
    if re.search(r"^ ", text, re.MULTILINE):
        raise BadFrontmatter("a line of a > text must not be indented further than the first; use |")
    return re.sub(r"(?<!\n)\n(\n*)(?!\n)", lambda found: found[1] or " ", text)
