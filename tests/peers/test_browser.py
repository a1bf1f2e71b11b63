"""A page in a browser at our server, without anything between them, where the server has not allowed it.

Where it has, the page is one of the real clients of `test_peers`.
"""

from __future__ import annotations

import pytest

from tests.peers.visits import visited

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs what the page is made of


@pytest.mark.parametrize(
    ("peer", "way"),
    [
        ("chromium-typescript-1.32.2", "ws"),
        ("chromium-typescript-2.4.0", "session"),
        ("chromium-typescript-2.4.0", "modern"),
        ("chromium-typescript-2.4.0", "sse"),
    ],
)
def test_a_page_that_is_not_allowed_sees_nothing(peer: str, way: str) -> None:
    visit = visited(peer, way, allowed_origins=["http://localhost:8000"])
    assert (visit.seen, visit.status, visit.server_status, visit.server_errors) == ({}, 1, 0, "")
