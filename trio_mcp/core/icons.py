"""Checks of icons, for clients that show them.

An icon is a URI and an image, and both come from a peer.  This module fetches and decodes nothing.  A client makes
these checks before it does, in this order:

1. `address_fault`: may the URI be fetched?  Only `data:` and `https:` URIs may, and `https:` only from the server's own
   origin or from an origin that the user trusts.  Fetch with `REQUEST_HEADERS` and no other headers, follow a redirect
   only if `redirect_fault` returns None, and stop reading at the limit; `embedded` returns the bytes of a `data:` URI.
2. `image_fault`: is it an image?  The first bytes decide, and the media types of the icon and the response must agree.
3. `suits`: is it an icon for this size and theme?

SVG can carry scripts, so it is accepted only if the caller asks for it.  A small file can still hold a very large
image: limit its dimensions and frames when you decode it.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Collection
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from trio_mcp.core.content import Icon
from trio_mcp.core.errors import shown

__all__ = [
    "ICON_BYTES",
    "IMAGE_TYPES",
    "REQUEST_HEADERS",
    "SVG",
    "address_fault",
    "embedded",
    "image_fault",
    "redirect_fault",
    "suits",
]

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
SVG = "image/svg+xml"
# A 512x512 PNG in full colour is about 300 KiB.  A larger image than this is refused.
ICON_BYTES = 1024 * 1024
# icon-05: "Do not send cookies, Authorization headers, or client credentials."
REQUEST_HEADERS = (("Accept", ", ".join((*IMAGE_TYPES, SVG))),)

_URI = re.compile(r"[!-\[\]-~]+")  # ASCII without spaces, controls and the backslash, which clients read differently
_MAGIC = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    # A DOCTYPE with its own declarations does not match: they can expand without end.
    # A comment ends at its first "-->", and `*+` never backtracks: the time stays linear.
    SVG: re.compile(
        rb"(\xef\xbb\xbf)?\s*+(<\?xml[^>]*+>\s*+)?(<!--((?!-->).)*+-->\s*+)*+(<!DOCTYPE svg[^>\[]*+>\s*+)?<svg[\s>]",
        re.DOTALL,
    ),
}
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.IGNORECASE)


def address_fault(src: str, origins: Collection[str]) -> str | None:
    """Return why `src` must not be fetched, or None.

    `origins` are the server's own origin, such as ``https://example.com``, and the origins that the user trusts.
    """
    if src[:5].lower() == "data:":
        return None
    origin = _origin(src)
    if origin is None:
        return "the src of an icon must be an https: or data: URI without credentials"
    if origin not in {_origin(each) for each in origins}:
        return f"an icon must come from the server's own or a trusted origin, not {shown('{}://{}:{}'.format(*origin))}"
    return None


def redirect_fault(src: str, location: str) -> str | None:
    """Return why a redirect from `src` to `location` must not be followed, or None.

    Scheme, host and port must stay the same.
    """
    origin = _origin(src)
    try:
        target = urljoin(src, location)
    except ValueError:  # a bracket without its partner
        target = ""
    if origin is None or not _URI.fullmatch(location) or _origin(target) != origin:
        return "a redirect of an icon must stay at its origin"
    return None


def _origin(uri: str) -> tuple[str, str, int] | None:
    try:
        parts = urlsplit(uri)
        port = 443 if parts.port is None else parts.port
    except ValueError:
        return None
    if not _URI.fullmatch(uri) or parts.scheme != "https" or not parts.hostname or "@" in parts.netloc:
        return None
    return parts.scheme, parts.hostname, port


def embedded(src: str, max_bytes: int = ICON_BYTES) -> tuple[str, bytes] | None:
    """Return the media type and the bytes of a `data:` URI.

    Returns None if `src` is not a valid `data:` URI or has more than `max_bytes` bytes.
    """
    head, comma, body = src[5:].partition(",")
    if src[:5].lower() != "data:" or not comma:
        return None
    media_type, *parameters = head.lower().split(";")
    data = unquote_to_bytes(body)
    if "base64" in parameters:
        try:
            data = binascii.a2b_base64(data, strict_mode=True)
        except binascii.Error:
            return None
    return (media_type or "text/plain", data) if len(data) <= max_bytes else None


def image_fault(
    data: bytes, media_type: str | None = None, *, types: Collection[str] = IMAGE_TYPES, max_bytes: int = ICON_BYTES
) -> str | None:
    """Return why `data` must not be shown, or None.

    `media_type` is the type from the icon or the response, if there is one.  `types` are the media types that may be
    shown: add `SVG` to allow it.
    """
    if len(data) > max_bytes:
        return f"an icon may have {max_bytes} bytes, got {len(data)}"
    # Any declaration before an SVG's first tag fits into a KiB, and the others need 12 bytes.
    found = next((name for name, magic in _MAGIC.items() if name in types and magic.match(data[:1024])), None)
    if found is None:
        return f"an icon must be one of {', '.join(types)}, by its first bytes"
    declared = (media_type or found).partition(";")[0].strip().lower()
    # "Treat the MIME type information as advisory": octet-stream contains no advice.
    if declared not in (found, "application/octet-stream") and (declared, found) != ("image/jpg", "image/jpeg"):
        return f"the media type of an icon must match its bytes, which are {found}"
    return None


def suits(icon: Icon, *, size: tuple[int, int] | None = None, theme: str | None = None) -> bool:
    """Whether an icon is meant for this size and theme.  An icon without sizes or theme is meant for all (icon-11)."""
    if theme is not None and icon.theme is not None and icon.theme != theme:
        return False
    if size is None or icon.sizes is None:
        return True
    sizes = [_SIZE.fullmatch(each) for each in icon.sizes]
    return "any" in icon.sizes or any(each is not None and (int(each[1]), int(each[2])) == size for each in sizes)
