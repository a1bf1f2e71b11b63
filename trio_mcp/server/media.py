"""Content from bytes and files: `image`, `audio` and `file`."""

from __future__ import annotations

import mimetypes
import os
import pathlib
from typing import TYPE_CHECKING

from trio_mcp.core.content import (
    AudioContent,
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    TextResourceContents,
)
from trio_mcp.core.errors import UsageError
from trio_mcp.server.results import is_mime_type

if TYPE_CHECKING:
    from trio_mcp.core.content import Annotations

__all__ = ["audio", "file", "image"]


def image(
    source: bytes | str | os.PathLike[str], *, mime_type: str | None = None, annotations: Annotations | None = None
) -> ImageContent:
    """Make image content from bytes or a path.

    The suffix of a path gives the MIME type; for bytes, give `mime_type`.  Raises `UsageError` if the type is unknown
    or is not an image, and `OSError` if the file cannot be read.
    """
    return ImageContent(*_media(source, mime_type, "image"), annotations=annotations)


def audio(
    source: bytes | str | os.PathLike[str], *, mime_type: str | None = None, annotations: Annotations | None = None
) -> AudioContent:
    """Make audio content from bytes or a path, as `image` does.  Clients of 2024-11-05 have no audio."""
    return AudioContent(*_media(source, mime_type, "audio"), annotations=annotations)


def file(
    source: bytes | str | os.PathLike[str], *, uri: str | None = None, mime_type: str | None = None
) -> EmbeddedResource:
    """Make an embedded resource from bytes or a path.  The default `uri` of a path is its file: URI.

    Raises `UsageError` if the MIME type is unknown or bytes have no `uri`, and `OSError` if the file cannot be read.
    """
    data, mime_type = _loaded(source, mime_type)
    if uri is None:
        if isinstance(source, bytes):
            raise UsageError("a file from bytes needs a uri; give uri=...")
        uri = pathlib.Path(source).absolute().as_uri()
    text = _real_text(data, mime_type)
    if text is None:
        return EmbeddedResource(BlobResourceContents(uri, data, mime_type=mime_type))
    return EmbeddedResource(TextResourceContents(uri, text, mime_type=mime_type))


def _media(source: bytes | str | os.PathLike[str], mime_type: str | None, kind: str) -> tuple[bytes, str]:
    data, mime_type = _loaded(source, mime_type)
    if not mime_type.lower().startswith(f"{kind}/"):
        raise UsageError(f"{mime_type} is not a type of {kind}; give mime_type={kind + '/...'!r}, or use file()")
    return data, mime_type


def _loaded(source: bytes | str | os.PathLike[str], mime_type: str | None) -> tuple[bytes, str]:
    mime_type = mime_type or (None if isinstance(source, bytes) else _type_of(os.fspath(source)))
    if mime_type is None:
        which = "from bytes" if isinstance(source, bytes) else f"with the suffix {os.path.splitext(source)[1]!r}"
        raise UsageError(f"the MIME type of a file {which} is unknown; give mime_type=...")
    if not is_mime_type(mime_type):
        raise UsageError(f"mime_type must be a MIME type such as image/png, got {mime_type!r}")
    if isinstance(source, bytes):
        return source, mime_type
    with open(source, "rb") as opened:
        return opened.read(), mime_type


# Types that the standard library calls unofficial, or does not know before Python 3.13.
_TYPES = {
    ".flac": "audio/flac",
    ".gz": "application/gzip",
    ".m4a": "audio/mp4",
    ".md": "text/markdown",
    ".ogg": "audio/ogg",
    ".toml": "application/toml",
    ".webp": "image/webp",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}


def _type_of(path: str) -> str | None:
    suffix = os.path.splitext(path)[1].lower()
    # Not `guess_type`, which reads the system's tables: the same file would have another type on another machine.
    return _TYPES.get(suffix) or mimetypes.MimeTypes().types_map[True].get(suffix)


_TEXTUAL = frozenset({"application/json", "application/toml", "application/xml", "application/yaml"})
_TEXTUAL |= {"application/javascript", "application/sql", "application/x-sh"}


def _real_text(data: bytes, mime_type: str) -> str | None:
    """res-23: "this must only be set if the item can actually be represented as text"."""
    mime_type = mime_type.lower().partition(";")[0].strip()
    if not (mime_type.startswith("text/") or mime_type.endswith(("+json", "+xml")) or mime_type in _TEXTUAL):
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
