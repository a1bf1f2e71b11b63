"""Real clients with our server: the official SDKs in Python and TypeScript, FastMCP, and others, old and new, each in
every way that it supports.

`behaviours` has the results of each behaviour in each revision.  The gaps of the clients are in `python_gaps` and
`typescript_gaps`.  The results are written into `INTEROP.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.peers import python_gaps, typescript_gaps
from tests.peers.behaviours import ABSENT, PAGE_SIZE, expected_results
from tests.peers.installed import NOT_INSTALLABLE, PEERS, needs, tool, visits
from tests.peers.interop import BEHAVIOURS, FILE, OUR_SERVER, Gap, differences
from tests.peers.visits import Visit, visited

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the client

VISITS = [(peer.name, way) for peer in PEERS.values() for way in peer.ways]
GAPS = {**python_gaps.GAPS, **typescript_gaps.GAPS}
# The revisions that the clients agree on in the handshake; all others agree on 2025-11-25.
HANDSHAKE = {
    "python-1.0.0": "2024-11-05",
    "python-1.9.4": "2025-03-26",
    "python-1.12.4": "2025-06-18",
    "typescript-1.0.4": "2024-11-05",
    "typescript-1.12.3": "2025-03-26",
}
ONE_PAGE = {"python-1.0.0"}  # clients that cannot request a second page
# Wrappers of clients that are also visited without the wrapper.
WRAPPERS = {"inspector-2.12.0", "chromium-typescript-1.32.2", "chromium-typescript-2.4.0", "mcp-remote-0.15.1"}

OUR_SERVER.declare(VISITS, BEHAVIOURS, NOT_INSTALLABLE)


def revision_of(peer: str, way: str) -> str:
    return "2026-07-28" if way.endswith("modern") else HANDSHAKE.get(peer, "2025-11-25")


def gaps_of(peer: str, way: str) -> dict[str, Gap]:
    return dict(GAPS.get((peer, way), {}))


def check(visit: Visit, wrong: Mapping[str, str]) -> None:
    """Assert that the visit has no differences, that both sides exited with 0, and that standard error is empty."""
    output = f"the client printed: {visit.errors}\nthe server printed: {visit.server_errors}"
    assert not wrong, "\n".join([*(f"{name}: {how}" for name, how in wrong.items()), output])
    assert (visit.status, visit.server_status, visit.errors + visit.server_errors) == (0, 0, ""), output


def test_a_missing_program_skips_a_test_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="the tool: there is no such-a-tool"):
        needs("the tool", lambda: tool("such-a-tool"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have it: the tool: there is no such-a-tool"):
        needs("the tool", lambda: tool("such-a-tool"))


def test_each_client_visit_has_a_row_in_the_file() -> None:
    assert OUR_SERVER.missing_rows(FILE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("peer", "way"), visits(VISITS))
def test_each_behaviour_with_a_real_client(peer: str, way: str) -> None:
    visit = visited(peer, way, page_size=None if peer in ONE_PAGE else PAGE_SIZE)
    revision = revision_of(peer, way)
    wrong = OUR_SERVER.record(
        (peer, way), visit.seen, expected_results(revision), gaps_of(peer, way), absent=ABSENT.get(revision, ())
    )
    check(visit, wrong)


PLAIN = ("list", "call", "structured", "tool error", "unknown tool", "read", "prompts", "1 MB", "20 at once", "end")


def plain_part(of: Mapping[str, Any]) -> dict[str, Any]:
    """The entries about the connection and the plain behaviours."""
    return {name: of[name] for name in ("connect", *PLAIN) if name in of}


REDUCED_SERVERS = {  # the options by which a server leaves features out, for each way
    "session": [{"json_only": True}, {"sessions": False}, {"json_only": True, "sessions": False}],
    "modern": [{"json_only": True}],
}


@pytest.mark.parametrize(
    ("peer", "way", "options"),
    visits(
        (peer, way, options) for peer, way in VISITS if peer not in WRAPPERS for options in REDUCED_SERVERS.get(way, ())
    ),
)
def test_plain_behaviours_need_neither_streams_nor_sessions(peer: str, way: str, options: dict[str, bool]) -> None:
    visit = visited(peer, way, *PLAIN, **options)
    table, gaps = plain_part(expected_results(revision_of(peer, way))), plain_part(gaps_of(peer, way))
    check(visit, differences(visit.seen, table, gaps))


@pytest.mark.parametrize(
    ("peer", "way"),
    [("python-1.30.0", "sse"), ("python-2.3.0", "modern"), ("typescript-1.32.2", "session")],
)
def test_a_real_client_gets_the_same_results_behind_nginx(peer: str, way: str) -> None:
    visit = visited(peer, way, behind_nginx=True)
    check(visit, differences(visit.seen, expected_results(revision_of(peer, way)), gaps_of(peer, way)))
