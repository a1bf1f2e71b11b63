"""A page in a browser that connects directly to our server, which has not allowed its origin.

A page with an allowed origin is one of the clients in `test_clients`.
"""

from __future__ import annotations

import pytest

from tests.peers.visits import visited

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the packages of the page


@pytest.mark.parametrize(
    ("peer", "way"),
    [
        ("chromium-typescript-1.32.2", "ws"),
        ("chromium-typescript-2.4.0", "session"),
        ("chromium-typescript-2.4.0", "modern"),
        ("chromium-typescript-2.4.0", "sse"),
    ],
)
def test_a_page_with_a_refused_origin_cannot_connect(peer: str, way: str) -> None:
    visit = visited(peer, way, allowed_origins=["http://localhost:8000"])
    assert (visit.seen, visit.status, visit.server_status, visit.server_errors) == ({}, 1, 0, "")
