"""Our client with third-party servers, each built with another SDK, old or new, and visited on every transport that it
supports.  They have the same content as our everything server.  Our own server is visited behind mcp-remote, too, which
turns it into a stdio server.

`behaviours` has the results of each behaviour in each revision, and `server_gaps` the gaps of the servers.  The results
are written into `INTEROP.md`.  The last test checks `our_client` itself with our own server.
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
from tests.peers.behaviours import ABSENT, PAGE_SIZE, expected_results
from tests.peers.installed import LEGACY, MODERN, PEERS, PROGRAMS, Peer, needs, node, npm, visits
from tests.peers.interop import BEHAVIOURS, FILE, OUR_CLIENT, Gap, Pair, differences, with_gaps
from tests.peers.listening import listening
from tests.peers.our_client import TOO_LATE, visiting
from tests.peers.server_gaps import GAPS, LISTED
from tests.peers.visits import stdio_server
from trio_mcp import serve_http
from trio_mcp.core import REVISIONS
from trio_mcp.types import HttpOptions

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first visit installs the server

PATIENCE = 300.0  # seconds for one visit, on a busy machine
PATHS = {"session": "/mcp", "modern": "/mcp", "sse": "/sse", "ws": "/ws"}
A, B, C, D, E = REVISIONS


@attrs.frozen
class Kind:
    """A server: the peer that runs it, the ways to reach it, and its newest revision with a handshake."""

    peer: Peer
    ways: Sequence[str]
    handshake: str = D
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of our client for this server."""
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    """Results of further behaviours, which only some servers have."""

    @property
    def both_eras(self) -> bool:
        return any(way.endswith("modern") for way in self.ways)


def in_environment_of(client: str, program: str) -> Peer:
    """A peer that runs this server program in the environment of this client."""
    return attrs.evolve(PEERS[client], program=program)


PROXY = "mcp-remote-0.15.1"
OPTIONAL = {"optional": [2, None]}
KINDS = {
    # It does not answer the probe.
    "python-1.0.0": Kind(
        in_environment_of("python-1.0.0", "server0.py"), ("stdio", "sse", "ws"), A, {"probe": 0.5}, OPTIONAL
    ),
    "python-1.9.4": Kind(in_environment_of("python-1.9.4", "server1.py"), LEGACY, B, extra=OPTIONAL),
    "python-1.12.4": Kind(in_environment_of("python-1.12.4", "server1.py"), LEGACY, C, extra=OPTIONAL),
    "python-1.30.0": Kind(in_environment_of("python-1.30.0", "server1.py"), LEGACY, extra=OPTIONAL),
    "python-2.3.0": Kind(in_environment_of("python-2.3.0", "server2.py"), MODERN, extra=OPTIONAL),
    "typescript-1.0.4": Kind(in_environment_of("typescript-1.0.4", "server1.mjs"), ("stdio", "sse"), A),
    "typescript-1.12.3": Kind(in_environment_of("typescript-1.12.3", "server1.mjs"), ("stdio", "session", "sse"), B),
    "typescript-1.32.2": Kind(in_environment_of("typescript-1.32.2", "server1.mjs"), ("stdio", "session", "sse")),
    "typescript-2.4.0": Kind(PEERS["typescript-server-2.4.0"], MODERN),
    "fastmcp-4.1.2": Kind(PEERS["fastmcp-4.1.2"], MODERN, extra=OPTIONAL),
    PROXY: Kind(PEERS[PROXY], PEERS[PROXY].ways),
}
VISITS: list[Pair] = [(name, way) for name, kind in KINDS.items() for way in kind.ways]

OUR_CLIENT.declare(VISITS, BEHAVIOURS)


def revision_of(pair: Pair) -> str:
    return E if pair[1].endswith("modern") else KINDS[pair[0]].handshake


def table_of(pair: Pair) -> dict[str, Any]:
    """The results for its revision, without the behaviours that the revision does not have."""
    table = {**expected_results(revision_of(pair)), "list": LISTED, **KINDS[pair[0]].extra, "deviations": []}
    return {name: seen for name, seen in table.items() if name not in ABSENT.get(revision_of(pair), ())}


def gaps_of(pair: Pair) -> dict[str, Gap]:
    return dict(GAPS.get(pair, {}))


def with_recorded_exit(ended: Path, command: Sequence[str]) -> list[str]:
    """Wrap the command of a server so that its exit status is written into the file `ended`."""
    return [sys.executable, str(PROGRAMS / "record_exit.py"), str(ended), *command]


@contextlib.asynccontextmanager
async def served(pair: Pair, ended: Path) -> AsyncIterator[Any]:
    """A target: a command from `with_recorded_exit`, or the URL of a process that runs until the end of the block."""
    name, way = pair
    peer = KINDS[name].peer
    if name == PROXY:
        proxy = str(needs(name, lambda: npm(name, peer.packages)) / "node_modules/mcp-remote/dist/proxy.js")
        async with our_server(way, ended.parent) as url:
            transport = "sse-only" if way == "sse" else "http-only"
            yield with_recorded_exit(ended, [node(), proxy, url, "--silent", "--transport", transport])
        return
    command = needs(name, peer.command)
    if way.startswith("stdio"):
        yield with_recorded_exit(ended, [*command, "stdio"])
        return
    async with listening([*command, "session" if way == "modern" else way]) as origin:
        yield (origin.replace("http", "ws", 1) if way == "ws" else origin) + PATHS[way]


async def seen_at(pair: Pair, folder: Path) -> dict[str, Any]:
    """The results of this server, and how it ended after the client closed."""
    kind, ended, options = KINDS[pair[0]], folder / "ended", dict(KINDS[pair[0]].options)
    if kind.both_eras and not pair[1].endswith("modern"):  # otherwise the client finds the revision
        options["revision"] = kind.handshake
    expected_late = [name for name, gap in gaps_of(pair).items() if gap.seen == TOO_LATE]
    with trio.fail_after(PATIENCE):
        async with served(pair, ended) as target:
            is_child = not isinstance(target, str)
            if is_child:
                options |= {"stderr": None, "env": {"MCP_REMOTE_CONFIG_DIR": str(folder)}, "shutdown_timeout": PATIENCE}
            async with visiting(target, **options) as visitor:
                seen = await visitor.observe(with_gaps(table_of(pair), gaps_of(pair)), expected_late)
                seen["deviations"] = list(visitor.client.deviations)
            status = "0"
            if is_child:
                status = ended.read_text() if ended.exists() else "an unknown status"
    return {**seen, "end": "clean" if status == "0" else f"clean, but the server ended with {status}"}


@pytest.mark.parametrize(("name", "way"), visits(VISITS))
async def test_each_behaviour_with_a_real_server(name: str, way: str, tmp_path: Path) -> None:
    pair = (name, way)
    seen = await seen_at(pair, tmp_path)
    absent = ABSENT.get(revision_of(pair), ())
    wrong = OUR_CLIENT.record(pair, seen, table_of(pair), gaps_of(pair), absent)
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


def test_each_server_visit_has_a_row_in_the_file() -> None:
    _, _, ours = FILE.read_text(encoding="utf-8").partition(f"## {OUR_CLIENT.title}")
    assert OUR_CLIENT.missing_rows(ours) == []


# `our_client` with our own server.


@contextlib.asynccontextmanager
async def our_server(way: str, folder: Path) -> AsyncIterator[Any]:
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
async def test_each_behaviour_with_our_client_and_our_server(way: str, revision: str, tmp_path: Path) -> None:
    table = expected_results(revision)
    async with our_server(way, tmp_path) as target, visiting(target, revision=revision) as visitor:
        seen = await visitor.observe(table)
        assert visitor.client.deviations == ()
    assert differences({**seen, "end": "clean"}, table, {}) == {}
