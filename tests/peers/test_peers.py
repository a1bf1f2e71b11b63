"""Real clients at our server: the official SDKs in Python and TypeScript and FastMCP, old and new, each in every way
that it has.

What each behaviour looks like to a client of each revision is in `behaviours`; where a client itself falls short, it
is in the gaps.  What was seen goes into `INTEROP.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.peers import python_gaps, typescript_gaps
from tests.peers.behaviours import ABSENT, PAGE_SIZE, seen_in
from tests.peers.installed import LEFT_OUT, PEERS, needs, tool, visits
from tests.peers.interop import BEHAVIOURS, FILE, OUR_SERVER, Gap, shortcomings
from tests.peers.visits import Visit, visited

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the client

VISITS = [(peer.name, way) for peer in PEERS.values() for way in peer.ways]
GAPS = {**python_gaps.GAPS, **typescript_gaps.GAPS}
# What clients agree on by a handshake; all others on 2025-11-25.
HANDSHAKE = {
    "python-1.0.0": "2024-11-05",
    "python-1.9.4": "2025-03-26",
    "python-1.12.4": "2025-06-18",
    "typescript-1.0.4": "2024-11-05",
    "typescript-1.12.3": "2025-03-26",
}
ONE_PAGE = {"python-1.0.0"}  # who cannot turn them
# Around clients that are visited by themselves, too.
AROUND = {"inspector-2.12.0", "chromium-typescript-1.32.2", "chromium-typescript-2.4.0", "mcp-remote-0.15.1"}

OUR_SERVER.holds(VISITS, BEHAVIOURS, LEFT_OUT)


def revision_of(peer: str, way: str) -> str:
    return "2026-07-28" if way.endswith("modern") else HANDSHAKE.get(peer, "2025-11-25")


def gaps_of(peer: str, way: str) -> dict[str, Gap]:
    return dict(GAPS.get((peer, way), {}))


def check(visit: Visit, wrong: Mapping[str, str]) -> None:
    """The visit was as it should be, and nobody had to say a word about it on standard error."""
    said = f"the client said: {visit.errors}\nthe server said: {visit.server_errors}"
    assert not wrong, "\n".join([*(f"{name}: {how}" for name, how in wrong.items()), said])
    assert (visit.status, visit.server_status, visit.errors + visit.server_errors) == (0, 0, ""), said


def test_what_is_not_here_is_a_reason_to_skip_but_for_ci_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="the tool: there is no such-a-tool"):
        needs("the tool", lambda: tool("such-a-tool"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have it: the tool: there is no such-a-tool"):
        needs("the tool", lambda: tool("such-a-tool"))


def test_each_visit_has_its_row_in_the_file() -> None:
    assert OUR_SERVER.unseen(FILE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("peer", "way"), visits(VISITS))
def test_what_a_real_client_sees(peer: str, way: str) -> None:
    visit = visited(peer, way, page_size=None if peer in ONE_PAGE else PAGE_SIZE)
    revision = revision_of(peer, way)
    wrong = OUR_SERVER.record(
        (peer, way), visit.seen, seen_in(revision), gaps_of(peer, way), absent=ABSENT.get(revision, ())
    )
    check(visit, wrong)


PLAIN = ("list", "call", "structured", "tool error", "unknown tool", "read", "prompts", "1 MB", "20 at once", "end")


def some(of: Mapping[str, Any]) -> dict[str, Any]:
    """What stands there about the connection and all that is plain."""
    return {name: of[name] for name in ("connect", *PLAIN) if name in of}


WITHOUT = {  # what a server may leave out on each of these ways
    "session": [{"json_only": True}, {"sessions": False}, {"json_only": True, "sessions": False}],
    "modern": [{"json_only": True}],
}


@pytest.mark.parametrize(
    ("peer", "way", "options"),
    visits((peer, way, options) for peer, way in VISITS if peer not in AROUND for options in WITHOUT.get(way, ())),
)
def test_a_server_without_streams_or_without_sessions_does_for_calls(
    peer: str, way: str, options: dict[str, bool]
) -> None:
    visit = visited(peer, way, *PLAIN, **options)
    table, gaps = some(seen_in(revision_of(peer, way))), some(gaps_of(peer, way))
    check(visit, shortcomings(visit.seen, table, gaps))


@pytest.mark.parametrize(
    ("peer", "way"),
    [("python-1.30.0", "sse"), ("python-2.3.0", "modern"), ("typescript-1.32.2", "session")],
)
def test_a_real_client_sees_the_same_behind_nginx(peer: str, way: str) -> None:
    visit = visited(peer, way, behind_nginx=True)
    check(visit, shortcomings(visit.seen, seen_in(revision_of(peer, way)), gaps_of(peer, way)))
