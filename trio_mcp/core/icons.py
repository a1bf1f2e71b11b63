"""Judging icons, for clients that show them.

An icon is an address and some bytes, and both come from a peer.  Nothing is fetched or decoded here: these are the
questions to ask before either, in this order.

1. `address_fault`: may it be fetched?  Only `data:` and `https:` addresses, and the latter only from the server's own
   origin or one the user trusts.  Fetch with `REQUEST_HEADERS` and no others, follow a redirect only if
   `redirect_fault` has nothing against it, and stop reading at the limit; `embedded` gives the bytes of a `data:` URI.
2. `image_fault`: is it an image?  The bytes decide, by their first few; what anybody says of them must agree.
3. `suits`: is it the one wanted?

SVG can carry scripts, so it is accepted only where the caller asks for it.  A small file can still be a vast picture:
whoever decodes it has to bound its dimensions and frames.
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
# A 512x512 PNG in full colour is about 300 KiB.  Beyond: refused.
ICON_BYTES = 1024 * 1024
# icon-05: "Do not send cookies, Authorization headers, or client credentials."
REQUEST_HEADERS = (("Accept", ", ".join((*IMAGE_TYPES, SVG))),)

_URI = re.compile(r"[!-\[\]-~]+")  # ASCII without spaces, controls and the backslash, which clients read differently
_MAGIC = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    # A DOCTYPE with declarations of its own, which can expand without end, does not pass.
    # A comment ends at the first chance, and nothing is tried twice (`*+` gives nothing back): the time stays linear.
    SVG: re.compile(
        rb"(\xef\xbb\xbf)?\s*+(<\?xml[^>]*+>\s*+)?(<!--((?!-->).)*+-->\s*+)*+(<!DOCTYPE svg[^>\[]*+>\s*+)?<svg[\s>]",
        re.DOTALL,
    ),
}
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.IGNORECASE)


def address_fault(src: str, origins: Collection[str]) -> str | None:
    """Why `src` must not be fetched, or None.  `origins`: the server's, as ``https://example.com``, and trusted."""
    if src[:5].lower() == "data:":
        return None
    origin = _origin(src)
    if origin is None:
        return "an icon's address is an https: or data: URI without credentials"
    if origin not in {_origin(each) for each in origins}:
        return f"an icon comes from the server's own origin or a trusted one, not from {shown('{}://{}:{}'.format(*origin))}"
    return None


def redirect_fault(src: str, location: str) -> str | None:
    """Why a redirect from `src` must not be followed, or None.  Neither scheme, host nor port may change."""
    origin = _origin(src)
    try:
        target = urljoin(src, location)
    except ValueError:  # half of a bracketed address
        target = ""
    if origin is None or not _URI.fullmatch(location) or _origin(target) != origin:
        return "an icon's redirect stays at its origin"
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


def embedded(src: str, most: int = ICON_BYTES) -> tuple[str, bytes] | None:
    """The media type and the bytes in a `data:` URI; None if it is none, or holds more than `most` bytes."""
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
    return (media_type or "text/plain", data) if len(data) <= most else None


def image_fault(
    data: bytes, said: str | None = None, *, types: Collection[str] = IMAGE_TYPES, most: int = ICON_BYTES
) -> str | None:
    """Why `data` must not be shown, or None.

    `said` is the media type from the icon or the response, if any; `types` what may be shown: add `SVG` to allow it.
    """
    if len(data) > most:
        return f"an icon has at most {most} bytes"
    # Any declaration before an SVG's first tag fits into a KiB, and the others need 12 bytes.
    found = next((name for name, magic in _MAGIC.items() if name in types and magic.match(data[:1024])), None)
    if found is None:
        return f"an icon is one of {', '.join(types)}, by its first bytes"
    declared = (said or found).partition(";")[0].strip().lower()
    # "Treat the MIME type information as advisory": octet-stream advises nothing.
    if declared not in (found, "application/octet-stream") and (declared, found) != ("image/jpg", "image/jpeg"):
        return f"an icon is what it says it is, not {found} under another name"
    return None


def suits(icon: Icon, *, size: tuple[int, int] | None = None, theme: str | None = None) -> bool:
    """Whether an icon is meant for this size and theme.  One that does not say is meant for all (icon-11)."""
    if theme is not None and icon.theme is not None and icon.theme != theme:
        return False
    if size is None or icon.sizes is None:
        return True
    sizes = [_SIZE.fullmatch(each) for each in icon.sizes]
    return "any" in icon.sizes or any(each is not None and (int(each[1]), int(each[2])) == size for each in sizes)
