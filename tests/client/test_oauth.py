"""Clients that get their tokens by OAuth, from the first refusal to the end of the session."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from tests.client.oauth_town import quiet, town
from tests.http.stage import A, B, C, D, E

PLACES = [
    ("http", B),
    ("http", C),
    ("http", D),
    ("http", E),
    ("http+sse", A),
    ("http+sse", D),
    ("websocket", E),
    ("websocket", A),
]
everywhere = pytest.mark.parametrize(("transport", "revision"), PLACES)
WHOLE = ["metadata", "register", "authorize", "token"]


@everywhere
async def test_a_token_is_got_once_and_used_for_all(transport: str, revision: str, autojump_clock: MockClock) -> None:
    async with quiet(), town(transport) as at:
        async with at.client(revision=revision) as client:
            assert client.revision == revision
            for number in range(3):
                assert await client.call_tool("add", {"a": 1, "b": number}, returns=int) == 1 + number
        assert at.kinds() == WHOLE
        assert len(at.pages) == 1
