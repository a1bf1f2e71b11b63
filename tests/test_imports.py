"""What may import what, and what comes along: the core is a room without I/O, and arrows point up only.

How many come along is counted by `test_costs`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trio_mcp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trio_mcp"
CORE = PACKAGE / "core"
MODULES = sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")
SERVER_MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")

# From the top down; each may import what stands above it.  What shares a line knows nothing of its neighbours.
ORDER = """
errors records
principals json_text glimpse
jsonrpc
shares pace
lines outcomes revisions
terms meta content
forms
models
codec
state
peer
session
opening
listen
rounds
tasks
pages
cache
sse
headers
verdicts
http
http_client
replay
templates
validation
self_described
schema
icons
auth_errors auth_places auth_challenge
resource_server
auth_proofs
auth_documents
auth_clients
auth_records
auth_deeds auth_grants
auth_search
auth_flow
auth
""".strip().splitlines()
RANK = {name: rank for rank, line in enumerate(ORDER) for name in line.split()}

# Likewise of the server, which stands on the core; not all of these need exist.
SERVER_ORDER = """
hints other_names
writing
values
paths
results
questions
context
handlers
arguments
entries
registration
catalog
admission groups rates threads
crew
parking publishing
dispatch
outbox
stderr
duplex
running
conversation
driver
watchdog
process
stdio
silence
lanes
http_sessions http_options
gate
endpoint
http_chunks
http_wire
http_connection
websocket
websocket_server
http_server
asgi
description
server
asked
caller command
answering child
http_replies
http_proxy
http_pool websocket_client
jwks loopback token_stores oauth_keys
oauth_run
oauth
http_posts
http_link
stream_link
starting
listening
tool_book
following
connecting
client_options
keeper
client
relay_server relay_sessions
relay testing
demo
__main__
""".strip().splitlines()
SERVER_RANK = {name: rank for rank, line in enumerate(SERVER_ORDER) for name in line.split()}
# What users' functions and values become is worked out without Trio; only `context` needs it, and is asked for late.
NO_TRIO = {
    "admission", "arguments", "catalog", "description", "entries", "handlers", "hints", "paths", "questions",
    "registration", "results", "values", "writing",
}  # fmt: skip
# 25 ms together, which a server without lists and answers from clients should not wait for.
MODELS = {f"trio_mcp.core.{name}" for name in ("models", "content", "forms", "codec", "validation")}

TRANSPORT = {"trio", "h11", "wsproto", "ssl", "socket", "_socket", "asyncio", "selectors", "logging", "subprocess"}
# Loaded on first use only, for they cost more than the rest together.
LAZY = {"cattrs", "jsonschema_rs"}
# orjson, where it is installed, and what that knows classes of; 4 ms.
OF_ORJSON = {"orjson", "uuid", "_uuid", "datetime", "_datetime", "dataclasses"}
# All that a core module may bring along beside attrs and json: things that compute.
COMPUTES = {"base64", "binascii", "hashlib", "heapq", "hmac", "ipaddress", "math"} | {
    "struct",
    "urllib",  # for urllib.parse, which from 3.13 on brings ipaddress along
    "_blake2",
    "_hashlib",
    "_heapq",
    "_struct",
    # For the annotation Path; what comes with it depends on the Python.
    "pathlib",
    "errno",
    "fnmatch",
    "glob",
    "grp",
    "ntpath",
    "pwd",
}
# Not to be asked for by name.  attrs itself loads threading and time, so these two cannot be kept out of the process:
# what a module brings along is compared with what attrs and json alone do.
FORBIDDEN = TRANSPORT | {"time", "random", "secrets", "threading", "concurrent", "multiprocessing", "queue", "sched"}


def modules_of(statement: str) -> set[str]:
    """The modules in a fresh interpreter after this statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def loaded_by(statement: str) -> set[str]:
    """Their top-level packages."""
    return {name.partition(".")[0] for name in modules_of(statement)}


@pytest.fixture(scope="module")
def with_attrs_alone() -> set[str]:
    return loaded_by("import attrs, json")


def tree(module: str, room: Path = CORE) -> ast.Module:
    return ast.parse((room / f"{module}.py").read_text(encoding="utf-8"))


def imported(module: str, room: Path = CORE) -> set[str]:
    """Every name that stands in an import, wherever, but for those that only type checkers see."""
    found: set[str] = set()
    unvisited: list[ast.AST] = [tree(module, room)]
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            unvisited += node.orelse
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            unvisited += ast.iter_child_nodes(node)
    return found


def core_modules(module: str) -> set[str]:
    """The modules of the core that this one imports."""
    parts = [name.split(".") for name in imported(module) if name.startswith("trio_mcp.")]
    assert all(part[1] == "core" for part in parts), "the core imports nothing of what stands below it"
    return {part[2] for part in parts}


def test_the_core_modules_bring_along_nothing_but_what_computes(with_attrs_alone: set[str]) -> None:
    came = loaded_by("; ".join(f"import trio_mcp.core.{module}" for module in MODULES)) - with_attrs_alone
    assert came <= COMPUTES | OF_ORJSON | {"trio_mcp"}


def test_the_package_itself_is_small_and_loads_no_transport(with_attrs_alone: set[str]) -> None:
    loaded = modules_of("import trio_mcp")
    assert len(loaded) <= 330
    assert {name for name in loaded if name.startswith("trio_mcp")} == {"trio_mcp"}
    assert not {name.partition(".")[0] for name in loaded} & (TRANSPORT | LAZY)
    # And what is compared with has none either, or the comparison would prove nothing.
    assert not with_attrs_alone & (TRANSPORT | LAZY)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the size of a process is seen in /proc")
def test_the_package_and_a_server_take_little_memory() -> None:
    """Of the process, the interpreter and Trio included, in KiB."""
    code = "; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    bare, package, server = (
        int(subprocess.run([sys.executable, "-c", load + code], capture_output=True, text=True, check=True).stdout)
        for load in ("pass", "import trio_mcp", "from trio_mcp import Server, serve_stdio")
    )
    assert package < min(34 * 1024, bare + 4 * 1024)
    assert server < bare + 34 * 1024


def test_few_distributions_come_along_and_none_has_an_upper_bound() -> None:
    here = importlib.metadata.distribution("trio_mcp")
    found, waiting = {"trio-mcp"}, [Requirement(each) for each in here.requires or []]
    for each in waiting:
        assert not any(specifier.operator in ("<", "<=", "==", "~=", "===") for specifier in each.specifier), each
    while waiting:
        each = waiting.pop()
        name = each.name.lower().replace("_", "-")
        if name in found or (each.marker is not None and not each.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += [Requirement(each) for each in importlib.metadata.requires(each.name) or []]
    assert len(found) <= 12, found


@pytest.mark.parametrize(("package", "where"), [("cattrs", "codec"), ("jsonschema_rs", "validation")])
def test_a_dependency_has_one_door(package: str, where: str) -> None:
    assert [module for module in MODULES if package in {name.partition(".")[0] for name in imported(module)}] == [where]


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_up_only(module: str) -> None:
    assert module in RANK, f"{module} has no place in the order"
    assert all(RANK[above] < RANK[module] for above in core_modules(module))


@pytest.mark.parametrize("module", MODULES)
def test_the_core_has_no_clock_no_randomness_and_no_tasks(module: str) -> None:
    assert not {name.partition(".")[0] for name in imported(module)} & FORBIDDEN
    tasks = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node for node in ast.walk(tree(module)) if isinstance(node, tasks)]
    called = {
        node.func.id
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"print", "open", "input", "exec", "eval", "breakpoint", "__import__"}


@pytest.mark.parametrize(
    ("room", "module"), [*((CORE, module) for module in MODULES), *((PACKAGE, module) for module in SERVER_MODULES)]
)
def test_a_module_says_what_it_offers(room: Path, module: str) -> None:
    listed = [
        ast.literal_eval(node.value)
        for node in tree(module, room).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    assert len(listed) == 1
    assert len(set(listed[0])) == len(listed[0])
    assert ast.get_docstring(tree(module, room))


# The server.


def server_modules(module: str) -> set[str]:
    """The modules of the server that this one imports."""
    parts = [name.split(".") for name in imported(module, PACKAGE) if name.startswith("trio_mcp.")]
    return {part[1] for part in parts if part[1] != "core"} & {*SERVER_MODULES, *SERVER_RANK}


@pytest.mark.parametrize("module", SERVER_MODULES)
def test_arrows_of_the_server_point_up_only(module: str) -> None:
    assert module in SERVER_RANK, f"{module} has no place in the order"
    assert all(SERVER_RANK[above] < SERVER_RANK[module] for above in server_modules(module))


# A client makes models of what it gets, so these begin with them.
OF_MODELS = {
    "answering",
    "asked",
    "client",
    "client_options",
    "keeper",
    "relay",
    "relay_server",
    "relay_sessions",
    "testing",
    "tool_book",
}


def test_no_module_of_the_server_loads_models_or_another_event_loop() -> None:
    loaded = modules_of("; ".join(f"import trio_mcp.{module}" for module in sorted({*SERVER_MODULES} - OF_MODELS)))
    assert not {name.partition(".")[0] for name in loaded} & (LAZY | {"asyncio", "anyio"})
    assert not loaded & MODELS


@pytest.mark.parametrize("module", sorted(NO_TRIO & set(SERVER_MODULES)))
def test_trio_comes_along_with_the_context_only(module: str) -> None:
    assert "trio" not in {name.partition(".")[0] for name in imported(module, PACKAGE)}
    assert "trio" not in modules_of(f"import trio_mcp.{module}")


HTTP = {
    "http_chunks",
    "asgi", "endpoint", "gate", "http_connection", "http_options", "http_server", "http_sessions", "http_wire", "lanes",
    "silence", "websocket", "websocket_server",
}  # fmt: skip


def test_the_modules_of_http_are_those_that_are_said_to_be() -> None:
    assert set(SERVER_MODULES) >= HTTP
    ranks = [SERVER_RANK[module] for module in HTTP]
    assert {module for module, rank in SERVER_RANK.items() if min(ranks) <= rank <= max(ranks)} == HTTP


@pytest.mark.parametrize(
    "statement",
    [
        "import trio_mcp; trio_mcp.Limits",
        "from trio_mcp import Server, serve_stdio, serve_stream",
        "import trio_mcp.server.process",
    ],
)
def test_a_server_without_http_loads_nothing_of_it(statement: str) -> None:
    """A cold start on stdio is not to wait for what only HTTP needs; ssl comes along with Trio, or not at all."""
    loaded = modules_of(statement)
    assert not {f"trio_mcp.{module}" for module in HTTP} & loaded
    packages = {name.partition(".")[0] for name in loaded}
    assert not packages & ({"h11", "wsproto", "ssl"} - loaded_by("import trio"))


def test_a_server_by_http_loads_no_websockets_before_somebody_asks_for_one() -> None:
    loaded = modules_of("from trio_mcp import Server, serve_http")
    assert "trio_mcp.server.http.listener" in loaded
    assert not {"wsproto", "trio_mcp.core.http.websocket"} & loaded


# The demo, which is written as anybody's program could be.


def demo_imports(module: str) -> set[str]:
    return {name for name in imported(module, PACKAGE / "demo") if name.startswith("trio_mcp.")}


@pytest.mark.parametrize("module", ["server", "scenes"])
def test_what_the_demo_shows_is_made_of_what_is_public(module: str) -> None:
    inside = {name for name in demo_imports(module) if not name.startswith(("trio_mcp.core.", "trio_mcp.demo."))}
    assert {name.removeprefix("trio_mcp.") for name in inside} <= {*trio_mcp.__all__}


def test_nothing_but_the_command_line_knows_of_the_demo() -> None:
    assert [module for module in SERVER_MODULES if "demo" in server_modules(module)] == ["__main__"]
    assert len(modules_of("import trio_mcp.__main__")) == len(modules_of("import trio_mcp")) + 1


OF_OAUTH = {"oauth", "oauth_run", "oauth_keys", "loopback", "token_stores"}


def test_a_client_without_oauth_loads_nothing_of_it() -> None:
    loaded = modules_of("from trio_mcp import open_client; import trio_mcp.client.http_link, trio_mcp.websocket_client")
    assert set(SERVER_MODULES) >= OF_OAUTH
    assert not {f"trio_mcp.{module}" for module in OF_OAUTH} & loaded
    assert {name for name in loaded if name.startswith("trio_mcp.core.oauth.tokens")} == {"trio_mcp.core.oauth.errors"}
    assert not {"webbrowser", "jwt", "cryptography"} & modules_of("from trio_mcp import OAuth; OAuth('x')")
