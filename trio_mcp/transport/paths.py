"""Checks of paths that a client names: `file:` URIs, paths below a directory, and the roots that a client exposes.

A path from a client may come from an attacker.  It is checked in two steps: the text (absolute, `..`, and text that
becomes one of these when decoded once), and then the file system, which follows symbolic links to the real path.  The
result is resolved: open the returned path, not the requested one.

A refused path raises `PathRefused`, which a handler need not catch: the client gets -32602, and the message repeats
neither the requested path nor the server's directories.

Two limitations.  The check and the opening of the file are two steps: a user who can write below the directory may
create a link in between.  And roots only narrow the work that a server does for a client: a client can claim any root,
and a claim is not a permission.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, overload
from urllib.parse import unquote, unquote_to_bytes

from trio_mcp.core.errors import INVALID_PARAMS, RequestError

if TYPE_CHECKING:
    from trio_mcp.core.models import Root  # the models cost 20 ms, and most servers that have files ask for no roots

__all__ = ["PathRefused", "Roots", "below", "file_path"]

# Systems do not open longer paths (PATH_MAX of Linux), and resolving takes time by the length times the components.
_BYTES = 4096
# Only this host; no query or fragment, which files do not have; no control characters.
_FILE_URI = re.compile(r"file:(?://(?:localhost)?)?(/(?!/)[^?#\x00-\x1f\x7f]*)", re.IGNORECASE)
_NO_PATH = "Not a path: it is too long, or contains characters that no file name can have"
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class PathRefused(RequestError):
    """A path from the client that must not be opened.

    If a handler does not catch it, the client gets -32602; for a tool, the model gets a result with the error.
    """

    correctable = True  # the model chose the path, and may choose another

    def __init__(self, why: str) -> None:
        super().__init__(INVALID_PARAMS, why)


def file_path(uri: str) -> Path:
    """Return the path of a `file:` URI of this machine, percent-decoded once.  Does not access the file system.

    Raises `PathRefused` for any other URI, and for a path with `..`.
    """
    found = _FILE_URI.fullmatch(uri)
    if found is None or _BAD_ESCAPE.search(found[1]):
        raise PathRefused("Not the URI of a file on this machine: it needs the form file:///path, percent-encoded")
    try:
        path = os.fsdecode(unquote_to_bytes(found[1]))
    except UnicodeEncodeError:
        raise PathRefused(_NO_PATH) from None
    _check_text(path)
    return Path(path)


def below(base: Path, relative: str) -> Path:
    """Return the resolved path of `relative` below the directory `base`.  It need not exist; an empty one is `base`.

    Raises `PathRefused` if the path is absolute, contains `..` (also percent-encoded), or leads out of `base` through a
    symbolic link.
    """
    for reading in _check_text(relative):  # res-18
        if PurePath(reading).anchor or reading.startswith("\\"):
            raise PathRefused("The path is absolute; it must be relative")
    top = _resolved(base)
    target = _resolved(top / relative)
    if not target.is_relative_to(top):
        raise PathRefused("The path leads outside of the accessible directory")
    return target


class Roots(Sequence["Root"]):
    """The roots that a client exposes.  They may name directories and files that do not exist, or not any more."""

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
        """Resolve an absolute path or a `file:` URI that is one of the roots or below one.

        Raises `PathRefused` for any other path.  A root that no longer exists allows no path and is not an error.
        """
        text = os.fspath(place)  # root-08, root-09
        if text[:5].lower() == "file:":
            target = _resolved(file_path(text))
        else:
            _check_text(text)
            if not os.path.isabs(text):
                raise PathRefused("The path must be absolute, or a file: URI")
            target = _resolved(Path(text))
        for root in self._roots:
            with suppress(PathRefused):  # a root that is not a file URI has no paths below it
                top = _resolved(file_path(root.uri))
                if target.is_relative_to(top) and os.path.exists(top):  # false, without an error, without access
                    return target
        raise PathRefused("The path is outside of the roots that the client exposes, or its root is gone")


def _check_text(text: str) -> tuple[str, str]:
    """Return `text`, and `text` percent-decoded.  Raises if one of these is not a path, or has `..`."""
    readings = text, unquote(text)
    try:
        fits = len(os.fsencode(text)) <= _BYTES
    except UnicodeEncodeError:  # half a surrogate pair
        fits = False
    if not fits or "\0" in readings[1]:
        raise PathRefused(_NO_PATH)
    if any(".." in re.split(r"[/\\]", each) for each in readings):
        raise PathRefused("The path must not contain '..'")
    return readings


def _resolved(path: Path) -> Path:
    # Not Path.resolve, which raises for a link that leads to itself: opening such a path fails anyway.
    return Path(os.path.realpath(path))
