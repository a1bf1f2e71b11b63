"""Real clients at our server: the official SDKs in Python and TypeScript, old and new, each in every way it has.

One table says what each behaviour looks like to a client of each revision.  Where a client itself falls short,
`GAPS` says how, and what is seen instead; a gap that has gone must leave the table.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.installed import PEERS, needs, tool
from tests.peers.visits import Visit, visited

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first visit installs the client

VISITS = [(peer.name, way) for peer in PEERS.values() for way in peer.ways]
# What clients agree on by a handshake; all others on 2025-11-25.
HANDSHAKE = {"python-1.0.0": "2024-11-05", "python-1.12.4": "2025-06-18"}

TOOLS = ["add", "ask", "echo", "fail", "gone", "log", "roots", "sample", "slow", "toggle", "touch", "wait"]
TABLE: dict[str, Any] = {
    "list": {
        "tools": TOOLS,
        "prompts": ["compare"],
        "resources": ["peers://greeting", "peers://picture"],
        "templates": ["peers://item/{id}"],
    },
    "call": True,
    "structured result": {"sum": 5},
    "error result": [True, "on purpose"],
    "unknown tool": -32602,
    "bad arguments": True,
    "progress": [[[step, 5, f"step {step}"] for step in range(1, 6)], "done"],
    "cancel": "gone",
    "read": ["hello", "image/png", "iVBORw==", "item 7"],
    "unknown resource": -32002,
    "subscribe": "peers://greeting",
    "list changed": True,
    "prompt": ["user", "Compare Oslo and Rome."],
    "unknown prompt": -32602,
    "completion": ["Oslo", "Odense"],
    "logging": ["info a info", "warning a warning", "error a error"],
    "sampling": "a model was told a joke",
    "elicitation": "Ada, 36",
    "roots": "file:///srv/a,file:///srv/b",
    "large": True,
    "parallel": 20,
    "end": "clean",
}
# What some revisions have otherwise.
OTHERWISE: dict[str, dict[str, Any]] = {
    "2024-11-05": {"structured result": '{"sum": 5}', "bad arguments": -32602},
    "2025-06-18": {"bad arguments": {"raised": "McpError: /a: must be of type integer, not a string", "code": -32602}},
    "2026-07-28": {"unknown resource": -32602},
}

# (peer, way): what is seen instead of the table, and why that is the client's own doing.
OWN = "it gives its programs the code that this has in 2026-07-28, whatever the server sent"
SILENT = "it declares neither, so it is not asked, and the model reads why"
UNDECLARED = "needs the client capability sampling, which was not declared"
NOTHING = object()
NO_WAY = "its interface has no way to do so"
GAPS: dict[tuple[str, str], dict[str, tuple[Any, str]]] = {
    ("python-1.0.0", "sse"): {
        "progress": (NOTHING, NO_WAY),
        "cancel": (NOTHING, NO_WAY),
        "sampling": (f"tools/call 'sample': sampling/createMessage {UNDECLARED}", SILENT),
        "elicitation": ("tools/call 'ask': elicitation/create does not exist in 2024-11-05", SILENT),
    },
    ("typescript-2.4.0", "session"): {"unknown resource": (-32602, OWN)},
    ("typescript-2.4.0", "sse"): {"unknown resource": (-32602, OWN)},
}


def expected(peer: str, way: str, *behaviours: str) -> dict[str, Any]:
    """What this peer sees of these behaviours; of all, if none is named."""
    revision = "2026-07-28" if way == "modern" else HANDSHAKE.get(peer, "2025-11-25")
    gaps = {name: seen for name, (seen, _) in GAPS.get((peer, way), {}).items()}
    table = {**TABLE, **OTHERWISE.get(revision, {}), **gaps}
    seen = {name: table[name] for name in behaviours or table}
    return {"connect": [revision, "peers"], **{name: what for name, what in seen.items() if what is not NOTHING}}


def check(visit: Visit, wanted: dict[str, Any]) -> None:
    """The visit was as it should be, and nobody had to say a word about it on standard error."""
    names = wanted.keys() | visit.seen.keys()
    wrong = [
        f"{name}: {visit.seen.get(name, 'nothing')!r}, not {wanted.get(name, 'anything')!r}"
        for name in names
        if (name in visit.seen, visit.seen.get(name)) != (name in wanted, wanted.get(name))
    ]
    said = f"the client said: {visit.errors}\nthe server said: {visit.server_errors}"
    assert not wrong, "\n".join([*wrong, said])
    assert (visit.status, visit.server_status, visit.errors + visit.server_errors) == (0, 0, ""), said
    assert not any(visit.left.values()), visit.left


def test_what_is_not_here_is_a_reason_to_skip_but_for_ci_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="the tool: there is no such-a-tool"):
        needs("the tool", lambda: tool("such-a-tool"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have it: the tool: there is no such-a-tool"):
        needs("the tool", lambda: tool("such-a-tool"))


@pytest.mark.parametrize(("peer", "way"), VISITS)
def test_what_a_real_client_sees(peer: str, way: str) -> None:
    check(visited(peer, way), expected(peer, way))


PLAIN = ("call", "structured result", "error result", "unknown tool", "read", "prompt", "large", "parallel", "end")


@pytest.mark.parametrize("options", [{"json_only": True}, {"sessions": False}, {"json_only": True, "sessions": False}])
@pytest.mark.parametrize(("peer", "way"), [each for each in VISITS if each[1] != "sse"])
def test_a_server_without_streams_or_without_sessions_does_for_calls(
    peer: str, way: str, options: dict[str, bool]
) -> None:
    check(visited(peer, way, *PLAIN, **options), expected(peer, way, *PLAIN))


@pytest.mark.parametrize(
    ("peer", "way"),
    [("python-1.30.0", "sse"), ("python-2.3.0", "modern"), ("typescript-1.32.2", "session")],
)
def test_a_real_client_sees_the_same_behind_nginx(peer: str, way: str) -> None:
    check(visited(peer, way, behind_nginx=True), expected(peer, way))
