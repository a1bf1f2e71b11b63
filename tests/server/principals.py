"""Requests with a principal, as a transport with authentication passes them on.

Byte streams have no authentication.  So here the request itself names its principal, under a key of `_meta`:

    with principals_in_meta():
        async with connected(server, revision, meta=principal_meta("ada")) as wire: ...
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
    """The `_meta` of a request of this principal."""
    return {} if principal is None else {_KEY: principal}


@contextlib.contextmanager
def principals_in_meta() -> Iterator[None]:
    receive = ServerSession.receive

    def receive_with_principal(conversation: ServerSession, message: Message, now: float, **how: Any) -> None:
        meta = message.params.get("_meta") if isinstance(message, Request) else None
        if isinstance(meta, dict) and _KEY in meta:
            how["principal"], how["headers"] = meta[_KEY], {"authorization": f"Bearer {meta[_KEY]}"}
        receive(conversation, message, now, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerSession, "receive", receive_with_principal)
        yield
