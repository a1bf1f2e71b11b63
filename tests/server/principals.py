"""Who asks: requests in the name of a principal, as a transport that authenticates hands them on.

Byte streams have nobody to authenticate.  So here the request itself says who sends it, under a key of `_meta`:

    with known_callers():
        async with connected(server, revision, meta=named("ada")) as wire: ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from trio_mcp.core import Message, Request
from trio_mcp.server import ServerSession

__all__ = ["principal_meta", "principals_in_meta"]

_KEY = "com.example/principal"


def principal_meta(principal: str | None) -> dict[str, Any]:
    """What a request of theirs has in its `_meta`."""
    return {} if principal is None else {_KEY: principal}


@contextlib.contextmanager
def principals_in_meta() -> Iterator[None]:
    hear = ServerSession.receive

    def recognise(conversation: ServerSession, message: Message, now: float, **how: Any) -> None:
        meta = message.params.get("_meta") if isinstance(message, Request) else None
        if isinstance(meta, dict) and _KEY in meta:
            how["principal"], how["headers"] = meta[_KEY], {"authorization": f"Bearer {meta[_KEY]}"}
        hear(conversation, message, now, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerSession, "receive", recognise)
        yield
