"""Our client at servers that offer the same as our own with one of everything, each built with an SDK of others, old or
new, and visited on every transport that it has; and at our own behind mcp-remote, which makes a stdio server of it.

What each behaviour looks like in each revision is in `behaviours`; where a server falls short, it is in `server_gaps`.
What was seen goes into `INTEROP.md`.  That `looking` finds all there is, our own server shows first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.fixtures.everything_server import make_server
from tests.peers.behaviours import ABSENT, PAGE_SIZE, seen_in
from tests.peers.installed import LEGACY, MODERN, PEERS, PROGRAMS, Peer, needs, node, npm, visits
from tests.peers.interop import BEHAVIOURS, FILE, OUR_CLIENT, Gap, Pair, expected, shortcomings
from tests.peers.listening import listening
from tests.peers.looking import TOO_LATE, visiting
from tests.peers.server_gaps import GAPS, LISTED
from tests.peers.visits import stdio_server
from trio_mcp import serve_http
from trio_mcp.core import REVISIONS
from trio_mcp.types import HttpOptions

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

PATIENCE = 300.0  # seconds for all of one visit, on a busy machine
PATHS = {"session": "/mcp", "modern": "/mcp", "sse": "/sse", "ws": "/ws"}
A, B, C, D, E = REVISIONS


@attrs.frozen
class Kind:
    """A server: what runs it, the ways to reach it, and the newest revision with a handshake that it has."""

    peer: Peer
    ways: Sequence[str]
    handshake: str = D
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Of our client, for this one."""
    also: Mapping[str, Any] = attrs.field(factory=dict)
    """What is looked at besides the behaviours that all have."""

    @property
    def both_eras(self) -> bool:
        return any(way.endswith("modern") for way in self.ways)


def beside(client: str, program: str) -> Peer:
    """What runs a server where this client is installed."""
    return attrs.evolve(PEERS[client], program=program)


PROXY = "mcp-remote-0.15.1"
OPTIONAL = {"optional": [2, None]}
KINDS = {
    # To the probe it says nothing.
    "python-1.0.0": Kind(beside("python-1.0.0", "server0.py"), ("stdio", "sse", "ws"), A, {"probe": 0.5}, OPTIONAL),
    "python-1.9.4": Kind(beside("python-1.9.4", "server1.py"), LEGACY, B, also=OPTIONAL),
    "python-1.12.4": Kind(beside("python-1.12.4", "server1.py"), LEGACY, C, also=OPTIONAL),
    "python-1.30.0": Kind(beside("python-1.30.0", "server1.py"), LEGACY, also=OPTIONAL),
    "python-2.3.0": Kind(beside("python-2.3.0", "server2.py"), MODERN, also=OPTIONAL),
    "typescript-1.0.4": Kind(beside("typescript-1.0.4", "server1.mjs"), ("stdio", "sse"), A),
    "typescript-1.12.3": Kind(beside("typescript-1.12.3", "server1.mjs"), ("stdio", "session", "sse"), B),
    "typescript-1.32.2": Kind(beside("typescript-1.32.2", "server1.mjs"), ("stdio", "session", "sse")),
    "typescript-2.4.0": Kind(PEERS["typescript-server-2.4.0"], MODERN),
    "fastmcp-4.1.2": Kind(PEERS["fastmcp-4.1.2"], MODERN, also=OPTIONAL),
    PROXY: Kind(PEERS[PROXY], PEERS[PROXY].ways),
}
VISITS: list[Pair] = [(name, way) for name, kind in KINDS.items() for way in kind.ways]

OUR_CLIENT.holds(VISITS, BEHAVIOURS)


def revision_of(pair: Pair) -> str:
    return E if pair[1].endswith("modern") else KINDS[pair[0]].handshake


def table_of(pair: Pair) -> dict[str, Any]:
    """What its revision has; no server is asked for what is absent there."""
    table = {**seen_in(revision_of(pair)), "list": LISTED, **KINDS[pair[0]].also, "deviations": []}
    return {name: seen for name, seen in table.items() if name not in ABSENT.get(revision_of(pair), ())}


def gaps_of(pair: Pair) -> dict[str, Gap]:
    return dict(GAPS.get(pair, {}))


def witnessed(ended: Path, command: Sequence[str]) -> list[str]:
    """The command of a server that leaves its exit status in that file."""
    return [sys.executable, str(PROGRAMS / "witness.py"), str(ended), *command]


@contextlib.asynccontextmanager
async def served(pair: Pair, ended: Path) -> AsyncIterator[Any]:
    """A target: a command that is `witnessed`, or the URL of a process that ends with the block and not before."""
    name, way = pair
    peer = KINDS[name].peer
    if name == PROXY:
        proxy = str(needs(name, lambda: npm(name, peer.packages)) / "node_modules/mcp-remote/dist/proxy.js")
        async with our_own(way, ended.parent) as url:
            transport = "sse-only" if way == "sse" else "http-only"
            yield witnessed(ended, [node(), proxy, url, "--silent", "--transport", transport])
        return
    command = needs(name, peer.command)
    if way.startswith("stdio"):
        yield witnessed(ended, [*command, "stdio"])
        return
    async with listening([*command, "session" if way == "modern" else way]) as origin:
        yield (origin.replace("http", "ws", 1) if way == "ws" else origin) + PATHS[way]


async def seen_at(pair: Pair, folder: Path) -> dict[str, Any]:
    """All that is seen of this server, and how it fares when the client has gone."""
    kind, ended, options = KINDS[pair[0]], folder / "ended", dict(KINDS[pair[0]].options)
    if kind.both_eras and not pair[1].endswith("modern"):  # else it is found out
        options["revision"] = kind.handshake
    hasty = [name for name, gap in gaps_of(pair).items() if gap.seen == TOO_LATE]
    with trio.fail_after(PATIENCE):
        async with served(pair, ended) as target:
            a_child = not isinstance(target, str)
            if a_child:
                options |= {"stderr": None, "env": {"MCP_REMOTE_CONFIG_DIR": str(folder)}, "shutdown_timeout": PATIENCE}
            async with visiting(target, **options) as visitor:
                seen = await visitor.look(expected(table_of(pair), gaps_of(pair)), hasty)
                seen["deviations"] = list(visitor.client.deviations)
            status = "0"
            if a_child:
                status = ended.read_text() if ended.exists() else "nobody knows what"
    return {**seen, "end": "clean" if status == "0" else f"clean, but the server ended with {status}"}


@pytest.mark.parametrize(("name", "way"), visits(VISITS))
async def test_what_our_client_sees_of_a_real_server(name: str, way: str, tmp_path: Path) -> None:
    pair = (name, way)
    seen = await seen_at(pair, tmp_path)
    absent = ABSENT.get(revision_of(pair), ())
    wrong = OUR_CLIENT.record(pair, seen, table_of(pair), gaps_of(pair), absent)
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


def test_each_visit_of_ours_has_its_row_in_the_file() -> None:
    _, _, ours = FILE.read_text(encoding="utf-8").partition(f"## {OUR_CLIENT.title}")
    assert OUR_CLIENT.unseen(ours) == []


# The looking by itself, at our own server.


@contextlib.asynccontextmanager
async def our_own(way: str, folder: Path) -> AsyncIterator[Any]:
    if way == "stdio":
        yield stdio_server(PAGE_SIZE, folder / "ended")
        assert (folder / "ended").read_text() == "0"
        return
    paths: HttpOptions = {"sse_path": "/sse", "message_path": "/messages", "websocket_path": "/ws"}
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve_http, make_server(PAGE_SIZE), **paths))
        yield {"sse": address.sse_url, "ws": address.websocket_url}.get(way, address.url)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("way", "revision"),
    [(way, revision) for way in LEGACY for revision in REVISIONS if (way, revision) != ("sse", E)],
)
async def test_our_client_sees_everything_at_our_own_server(way: str, revision: str, tmp_path: Path) -> None:
    table = seen_in(revision)
    async with our_own(way, tmp_path) as target, visiting(target, revision=revision) as visitor:
        seen = await visitor.look(table)
        assert visitor.client.deviations == ()
    assert shortcomings({**seen, "end": "clean"}, table, {}) == {}
