"""Paths that a client names: `file:` URIs, staying below a directory, and the roots that a client exposes.

A path from outside is the input of an attacker.  What may come of it is decided here in two steps: the words are judged
(absolute, `..`, and whatever becomes that when it is decoded), and then the file system is asked where the path really
leads, symbolic links followed.  A path that passed is resolved: open that one, not the one that was asked for.

What is refused raises `PathRefused`, which a handler need not catch: it answers the client with -32602, and repeats
neither the path asked for nor where the server keeps its files.

Two limits.  A check and the opening that follows it are two steps: who can write below the directory may put a link in
between.  And roots narrow what a server does for a client; a client can claim any, and is entitled to none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, overload
from urllib.parse import unquote, unquote_to_bytes

from trio_mcp.core.errors import INVALID_PARAMS, RequestError

if TYPE_CHECKING:
    from trio_mcp.core.models import Root  # the models cost 20 ms, and most servers that have files ask for no roots

__all__ = ["PathRefused", "Roots", "below", "file_path"]

# Systems open no longer path (PATH_MAX of Linux); and to resolve one takes time by its length times its steps.
_BYTES = 4096
# How often somebody behind us might decode a path once more: a proxy, a template, a careless file server.
_DECODINGS = 4
# No host but this one; no query or fragment, which files do not have; no control characters.
_FILE_URI = re.compile(r"file:(?://(?:localhost)?)?(/(?!/)[^?#\x00-\x1f\x7f]*)", re.IGNORECASE)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class PathRefused(RequestError):
    """A path from the client that must not be followed.

    Uncaught it answers the request with -32602, or the call of a tool with a result that tells the model.
    """

    def __init__(self, why: str) -> None:
        super().__init__(INVALID_PARAMS, why)


def file_path(uri: str) -> Path:
    """The path that a `file:` URI of this machine names, percent-decoded once; nothing is looked up.

    Raises `PathRefused` for any other URI, and for one that climbs by `..`.
    """
    found = _FILE_URI.fullmatch(uri)
    if found is None or _BAD_ESCAPE.search(found[1]):
        raise PathRefused("Not the URI of a file on this machine: it needs the form file:///path, percent-encoded")
    try:
        path = os.fsdecode(unquote_to_bytes(found[1]))
    except UnicodeEncodeError:
        raise _no_path() from None
    _readings(path)
    return Path(path)


def below(base: Path, relative: str) -> Path:
    """`relative` below the directory `base`, resolved; it need not exist.  An empty one is `base` itself.

    res-18: raises `PathRefused` for a path that is absolute, climbs by `..` (encoded, too, however often), or leads out
    of `base` by a symbolic link.
    """
    for reading in _readings(relative):
        if PurePath(reading).anchor or reading.startswith("\\"):
            raise PathRefused("The path is absolute; it must be relative")
    top = _resolved(base)
    target = _resolved(top / relative)
    if not target.is_relative_to(top):
        raise PathRefused("The path leads outside of what may be accessed")
    return target


class Roots(Sequence["Root"]):
    """The roots that a client exposes.  It may name directories and files that are not, or no longer, there."""

    __slots__ = ("_roots",)

    def __init__(self, roots: Iterable[Root] = ()) -> None:
        self._roots = tuple(roots)

    @overload
    def __getitem__(self, index: int) -> Root: ...
    @overload
    def __getitem__(self, index: slice) -> Roots: ...
    def __getitem__(self, index: int | slice) -> Root | Roots:
        return Roots(self._roots[index]) if isinstance(index, slice) else self._roots[index]

    def __len__(self) -> int:
        return len(self._roots)

    def __repr__(self) -> str:
        return f"Roots({list(self._roots)!r})"

    def path(self, place: str | os.PathLike[str]) -> Path:
        """An absolute path or a `file:` URI, resolved, if it is one of the roots or below one (root-09).

        Raises `PathRefused` otherwise.  A root that has disappeared allows nothing, and is no error (root-08).
        """
        text = os.fspath(place)
        path = file_path(text) if text[:5].lower() == "file:" else _absolute(text)
        target = _resolved(path)
        if not any(target.is_relative_to(top) for top in self._tops()):
            raise PathRefused("The path is outside of the roots that the client exposes, or its root is gone")
        return target

    def _tops(self) -> Iterator[Path]:
        for root in self._roots:
            try:
                top = _resolved(file_path(root.uri))
            except PathRefused:
                continue  # a root that is no file, or no root at all, has nothing below it
            if os.path.exists(top):  # and no error for one that may not be seen
                yield top


def _absolute(text: str) -> Path:
    _readings(text)
    if not os.path.isabs(text):
        raise PathRefused("The path must be absolute, or a file: URI")
    return Path(text)


def _readings(text: str) -> list[str]:
    """`text` as it stands, and as it reads decoded again, and again.  Raises if one of them is no path, or climbs."""
    try:
        fits = len(os.fsencode(text)) <= _BYTES
    except UnicodeEncodeError:  # half a surrogate pair
        fits = False
    if not fits:
        raise _no_path()
    readings = [text]
    while len(readings) < _DECODINGS and (plain := unquote(readings[-1])) != readings[-1]:
        readings.append(plain)
    for reading in readings:
        if "\0" in reading:
            raise _no_path()
        if ".." in re.split(r"[/\\]", reading):
            raise PathRefused("The path climbs by '..'")
    return readings


def _no_path() -> PathRefused:
    return PathRefused("Not a path: it is too long, or holds characters that no file name has")


def _resolved(path: Path) -> Path:
    # Not Path.resolve, which raises for a link that leads to itself: that one is refused when it is opened.
    return Path(os.path.realpath(path))
