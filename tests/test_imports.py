"""What may import what, and what comes along: the core is a room without I/O, and arrows point up only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "trio_mcp" / "core"
MODULES = sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")

# From the top down; each may import what stands above it.  What shares a line knows nothing of its neighbours.
ORDER = """
errors records
jsonrpc
revisions
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
http
http_client
replay
templates
validation
schema
icons
auth
""".strip().splitlines()
RANK = {name: rank for rank, line in enumerate(ORDER) for name in line.split()}

TRANSPORT = {"trio", "h11", "wsproto", "ssl", "socket", "_socket", "asyncio", "selectors", "logging", "subprocess"}
# Loaded on first use only, for they cost more than the rest together.
LAZY = {"cattrs", "jsonschema_rs", "orjson"}
# All that a core module may bring along beside attrs and json: things that compute.
COMPUTES = {"base64", "binascii", "dataclasses", "datetime", "hashlib", "heapq", "hmac", "ipaddress", "math"} | {
    "struct",
    "urllib",  # for urllib.parse, which from 3.13 on brings ipaddress along
    "uuid",
    "_blake2",
    "_datetime",
    "_hashlib",
    "_heapq",
    "_struct",
    "_uuid",
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


def loaded_by(statement: str) -> set[str]:
    """The top-level packages in a fresh interpreter after this statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def with_attrs_alone() -> set[str]:
    return loaded_by("import attrs, json")


def tree(module: str) -> ast.Module:
    return ast.parse((CORE / f"{module}.py").read_text(encoding="utf-8"))


def imported(module: str) -> set[str]:
    """Every name that stands in an import, wherever, but for those that only type checkers see."""
    found: set[str] = set()
    unvisited: list[ast.AST] = [tree(module)]
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


@pytest.mark.parametrize("module", MODULES)
def test_a_core_module_brings_along_nothing_but_what_computes(module: str, with_attrs_alone: set[str]) -> None:
    came = loaded_by(f"import trio_mcp.core.{module}") - with_attrs_alone
    assert came <= COMPUTES | {"trio_mcp"}


def test_the_package_itself_loads_no_transport(with_attrs_alone: set[str]) -> None:
    assert not loaded_by("import trio_mcp") & (TRANSPORT | LAZY)
    # And what is compared with has none either, or the comparison would prove nothing.
    assert not with_attrs_alone & (TRANSPORT | LAZY)


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


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_offers(module: str) -> None:
    listed = [
        ast.literal_eval(node.value)
        for node in tree(module).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    assert len(listed) == 1
    assert len(set(listed[0])) == len(listed[0])
    assert ast.get_docstring(tree(module))
