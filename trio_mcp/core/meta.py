"""The keys of `_meta` and of `extensions`: their grammar, the reserved prefixes, and the three keys of W3C.

The checks are for data that *our* program sends.  Data of the peer is never checked here: any value at any key is
accepted and passed on, because "implementations MUST NOT make assumptions about values at these keys".

A key is an optional prefix, dotted labels and a slash, and then a name.  A custom prefix should be a reversed domain
(``com.example/``); no check can tell whether it is.  The protocol reserves some prefixes.  They have changed once, and
are in `Revision.reserved_labels`.  The core writes the reserved keys and the progress token itself, after this check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import Json, JsonObject
from trio_mcp.core.revisions import Revision

__all__ = ["check_extension", "check_key", "check_meta", "meta_of"]

# A label must "start with a letter and end with a letter or digit".
_LABEL = "[A-Za-z](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
# A name, "unless empty", begins and ends with a letter or digit.
_NAME = "(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)?"

_RESERVED = frozenset({"modelcontextprotocol", "mcp"})


def meta_of(name: str, holder: object) -> JsonObject:
    """Return the `_meta` of params or of a result that we are about to send.

    `name` is the name of `holder` for the error message.  Raises UsageError if `holder` or its `_meta` is not an
    object.
    """
    meta = holder.get("_meta", {}) if isinstance(holder, dict) else None
    if not isinstance(meta, dict):
        raise UsageError(f"{name} must be an object, and the _meta in it, if there is one, must be an object too")
    return meta


def check_meta(meta: Mapping[str, Json], revision: Revision) -> None:
    """Raise UsageError if the program must not send one of these keys in `_meta`."""
    for key, value in meta.items():
        if key == "progressToken":
            raise UsageError("progressToken in _meta must not be set by hand; request progress instead")
        if key in _W3C:
            if not isinstance(value, str) or not _W3C[key](value):
                raise UsageError(f"{key} in _meta must follow the W3C format of that name")
        elif revision.reserved_labels is not None and _RESERVED & set(check_key(key)[revision.reserved_labels]):
            raise UsageError(f"{key!r} in _meta has a prefix reserved by {revision}; use your own: com.example/name")


def check_extension(identifier: str) -> None:
    """Raise UsageError if this is not the name of an extension: a key with a prefix (ver-05)."""
    if not check_key(identifier):
        raise UsageError(f"the extension {identifier!r} needs a prefix, for example com.example/{identifier}")


def check_key(key: str) -> list[str]:
    """Return the labels of the key's prefix.  Raises UsageError if the key is malformed."""
    prefix, slash, name = key.rpartition("/")
    labels = prefix.split(".") if slash else []
    if not all(re.fullmatch(_LABEL, label) for label in labels):
        raise UsageError(
            f"the prefix of {key!r} must be labels of letters, digits and hyphens, for example com.example/"
        )
    if not re.fullmatch(_NAME, name):
        raise UsageError(f"{key!r} must end with letters, digits, hyphens, underscores and dots, or with the slash")
    return labels


# The formats of W3C Trace Context, https://www.w3.org/TR/trace-context/, and Baggage, https://www.w3.org/TR/baggage/.

_IDS = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
# Version ff is forbidden; future versions may add fields.
_TRACEPARENT = f"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(?:-[!-~]*)?"

_TRACESTATE_KEY = "[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}"
_TRACESTATE_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACESTATE_MEMBER = f"({_TRACESTATE_KEY})={_TRACESTATE_VALUE}"

_TOKEN = "[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_BAGGAGE_VALUE = r"[ \t]*=[ \t]*[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*"
_BAGGAGE_ENTRY = f"{_TOKEN}{_BAGGAGE_VALUE}"
_BAGGAGE_PROPERTY = f"{_TOKEN}(?:{_BAGGAGE_VALUE})?"


def _is_traceparent(text: str) -> bool:
    return re.fullmatch(_TRACEPARENT, text) is not None


def _is_tracestate(text: str) -> bool:
    texts = [each for member in text.split(",") if (each := member.strip(" \t"))]
    members = [re.fullmatch(_TRACESTATE_MEMBER, each) for each in texts]
    keys = {member[1] for member in members if member}
    return len(keys) == len(members) <= 32  # every member is well-formed, and no key appears twice


def _is_baggage(text: str) -> bool:
    members = [[part.strip(" \t") for part in member.split(";")] for member in text.split(",")]
    return len(members) <= 180 and all(
        re.fullmatch(_BAGGAGE_ENTRY, entry) and all(re.fullmatch(_BAGGAGE_PROPERTY, each) for each in properties)
        for entry, *properties in members
    )


_W3C: dict[str, Callable[[str], bool]] = {
    "traceparent": _is_traceparent,
    "tracestate": _is_tracestate,
    "baggage": _is_baggage,
}
