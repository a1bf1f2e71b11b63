"""The import rules: which folder may import which, and the modules that an import loads.

A room is a folder of `trio_mcp`.  `test_costs` counts the modules that a program loads.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trio_mcp"

# From the top down.  A room imports from itself and from rooms above it.
ROOMS = ["core", "transport", "stores", "oauth", "server", "client", "extensions", "relay", "testing", "cli"]
SEPARATE = {"server", "client"}
# The public modules import from every room.
PUBLIC = {"trio_mcp", "trio_mcp.__main__", "trio_mcp.asgi", "trio_mcp.types", "trio_mcp.errors"}
# This module loads the public names of a package, so every room imports it.
LOADER = "trio_mcp._lazy"

# Imports inside functions: their targets, grouped by the reason for the late import.
MODELS = {f"trio_mcp.core.{name}" for name in ("caching", "codec", "content", "forms", "models", "sampling")}
SCHEMAS = {
    f"trio_mcp.core.schema.{name}"
    for name in ("classes", "cost", "hints", "shapes", "templates", "validation", "writing")
}
TRANSPORTS = {
    *(f"trio_mcp.client.{name}" for name in ("http", "sse", "websocket")),
    *(f"trio_mcp.server.http.{name}" for name in ("listener", "monitoring", "options", "shared_endpoint", "websocket")),
    *(f"trio_mcp.transport.{name}" for name in ("child", "dial", "http_pool")),
    "trio_mcp.core.http.websocket",
}
RARELY_USED = {
    *(f"trio_mcp.core.{name}" for name in ("http.fields", "oauth.resource", "revisions")),
    *(f"trio_mcp.core.{name}" for name in ("extensions", "request_state", "subscriptions")),
    *(f"trio_mcp.server.{name}" for name in ("context", "detached", "extensions")),
    *(f"trio_mcp.server.{name}" for name in ("forwarding", "parking", "publishing", "questions", "replicas")),
    *("trio_mcp.server.supervised", "trio_mcp.stores.sqlite"),
    *("trio_mcp.client.extensions", "trio_mcp.core.schema.params", "trio_mcp.oauth.client", "trio_mcp.transport.paths"),
    *("trio_mcp.relay.tasks", "trio_mcp.stores.redis_link"),
    *("trio_mcp.extensions.tasks.host", "trio_mcp.extensions.tasks.keeper", "trio_mcp.stores.memory"),
}
LATER = MODELS | SCHEMAS | TRANSPORTS | RARELY_USED

IO = {"trio", "h11", "wsproto", "ssl", "socket", "_socket", "asyncio", "selectors", "logging", "subprocess"}
# h11 and wsproto do no I/O; the HTTP code in the core may use them.
FORBIDDEN = (IO - {"h11", "wsproto"}) | {
    *("time", "random", "secrets", "threading", "concurrent", "multiprocessing", "queue", "sched"),
}
# They are larger than all others together, so few modules import them, and only on first use.
LAZY = {
    "h11": ["trio_mcp.core.http.h1"],
    "jsonschema_rs": ["trio_mcp.core.schema.validation"],
}


class Import(NamedTuple):
    module: str
    name: str | None
    deferred: bool


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}
CORE = sorted(module for module in FILES if module.startswith("trio_mcp.core"))
INNER = sorted(set(FILES) - PUBLIC - {LOADER})


def imports(node: ast.AST, deferred: bool = False) -> list[Import]:
    """The imports below a node, without those for type checkers only."""
    found: list[Import] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            found += [Import(alias.name, None, deferred) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                found.append(Import(*((inner, None) if inner in FILES else (str(child.module), alias.name)), deferred))
        else:
            found += imports(child, deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
    return found


IMPORTS = {module: imports(tree) for module, tree in TREES.items()}


def ours(module: str) -> list[Import]:
    return [each for each in IMPORTS[module] if each.module in FILES and each.module != LOADER]


def room_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", INNER)
def test_a_room_imports_from_rooms_above_it(module: str) -> None:
    for each in ours(module):
        if module.startswith("trio_mcp.cli") and each.module in PUBLIC:
            continue  # the command line is a program like that of any user
        here, there = room_of(module), room_of(each.module)
        assert ROOMS.index(there) <= ROOMS.index(here), each
        assert {here, there} != SEPARATE, each


@pytest.mark.parametrize("module", INNER)
def test_private_names_stay_in_their_room(module: str) -> None:
    for each in ours(module):
        if each.module in PUBLIC or room_of(module) != room_of(each.module):
            path = [*each.module.split("."), each.name or ""]
            assert not [part for part in path if part.startswith("_") and not part.endswith("__")], each


def test_modules_have_no_cycles() -> None:
    arrows = {module: {each.module for each in ours(module) if not each.deferred} for module in FILES}
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        raise AssertionError(error.args[1]) from None


@pytest.mark.parametrize("module", INNER)
def test_imports_inside_functions_are_in_the_list(module: str) -> None:
    later = {each.module for each in ours(module) if each.deferred}
    assert room_of(module) == "cli" or later <= LATER


def test_the_list_of_imports_inside_functions_has_no_unused_entry() -> None:
    assert {each.module for module in INNER for each in ours(module) if each.deferred} >= LATER


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_has_a_docstring_and_a_list_of_its_names(module: str) -> None:
    assert ast.get_docstring(TREES[module])
    if FILES[module].name == "__init__.py" or (module in PUBLIC and module != "trio_mcp.asgi"):
        return  # `test_public_names` checks their names
    listed = [
        ast.literal_eval(node.value)
        for node in TREES[module].body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    assert len(listed) == 1
    assert len(set(listed[0])) == len(listed[0])


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


# The core.


@pytest.mark.parametrize("module", CORE)
def test_the_core_has_no_io_no_clock_no_randomness_and_no_tasks(module: str) -> None:
    assert not {each.module.partition(".")[0] for each in IMPORTS[module]} & FORBIDDEN
    tasks = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node for node in ast.walk(TREES[module]) if isinstance(node, tasks)]
    calls = [node.func for node in ast.walk(TREES[module]) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert not called & {"print", "open", "input", "exec", "eval", "breakpoint", "__import__"}


@pytest.mark.parametrize("package", LAZY)
def test_a_slow_dependency_is_imported_by_few_modules(package: str) -> None:
    users = [module for module in CORE if package in {each.module.partition(".")[0] for each in IMPORTS[module]}]
    assert users == LAZY[package]


# The modules that an import loads.


def loaded_by(statement: str) -> set[str]:
    """The modules in a fresh interpreter after this statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_the_core_loads_no_trio() -> None:
    loaded = packages(loaded_by("; ".join(f"import {module}" for module in CORE)))
    # attrs loads threading and time; h11 and wsproto load no module that does I/O.
    assert not loaded & (IO - {"h11", "wsproto"} | {"anyio", "random", "sched"}) - packages(loaded_by("import h11"))
    assert not packages(loaded_by("import attrs, json")) & IO  # otherwise the comparison would prove nothing


def test_the_package_itself_loads_nothing() -> None:
    loaded = loaded_by("import trio_mcp")
    assert {name for name in loaded if name.startswith("trio_mcp")} == {"trio_mcp", LOADER}
    assert not packages(loaded) & (IO | {*LAZY})


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the size of a process is read from /proc")
def test_the_package_and_a_server_take_little_memory() -> None:
    """The figures are KiB of the whole process, with the interpreter and Trio."""
    code = "; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    bare, package, server = (
        int(subprocess.run([sys.executable, "-c", load + code], capture_output=True, text=True, check=True).stdout)
        for load in ("pass", "import trio_mcp", "from trio_mcp import Server, serve_stdio")
    )
    assert package < min(34 * 1024, bare + 4 * 1024)
    assert server < bare + 34 * 1024


def test_dependencies_are_few_and_have_no_upper_bounds() -> None:
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


@pytest.mark.parametrize(
    "statement", ["import trio_mcp; trio_mcp.Limits", "from trio_mcp import Server, serve_stdio, serve_stream"]
)
def test_a_server_on_stdio_loads_no_http_no_models_and_no_other_room(statement: str) -> None:
    loaded = loaded_by(statement)
    rooms = {name.removeprefix("trio_mcp.") for name in loaded if name.startswith("trio_mcp.")}
    assert not [name for name in rooms if name.startswith(("server.http", "client", "oauth", "relay", "testing"))]
    assert not loaded & (MODELS | {"trio_mcp.core.schema.validation"})
    # Only Trio may load ssl.
    assert not packages(loaded) & (
        {"h11", "wsproto", "ssl", "asyncio", "anyio", *LAZY} - packages(loaded_by("import trio"))
    )


def test_a_server_over_http_loads_no_websockets() -> None:
    loaded = loaded_by("from trio_mcp import Server, serve_http")
    assert "trio_mcp.server.http.listener" in loaded
    assert not {"wsproto", "trio_mcp.core.http.websocket"} & loaded


def test_a_client_without_oauth_loads_no_oauth_code() -> None:
    loaded = loaded_by("from trio_mcp import open_client; import trio_mcp.client.http, trio_mcp.client.websocket")
    assert {name for name in loaded if name.startswith(("trio_mcp.oauth", "trio_mcp.core.oauth."))} == {
        "trio_mcp.core.oauth.errors"
    }
    assert not {"webbrowser", "jwt", "cryptography"} & loaded_by("from trio_mcp import OAuth; OAuth('x')")


# The demo is written as a program of a user.


@pytest.mark.parametrize("module", ["server", "scenes"])
def test_the_demo_uses_public_names_only(module: str) -> None:
    found = [each for each in IMPORTS[f"trio_mcp.cli.demo.{module}"] if each.module.startswith("trio_mcp")]
    assert {each.module for each in found} <= PUBLIC | {"trio_mcp.core.revisions", "trio_mcp.cli.demo.server"}


def test_the_command_line_loads_a_command_on_first_use() -> None:
    loaded = loaded_by("import trio_mcp.__main__") - loaded_by("import trio_mcp, argparse")
    assert loaded == {"trio_mcp.__main__", "trio_mcp.cli", "trio_mcp.cli.main"}


def _inner_imports(text: str) -> list[int]:
    """The lines in which a test imports a module inside a room."""
    if not any(map(_is_inner, re.findall(r"\btrio_mcp\.[\w.]+", text))):
        return []  # faster than to parse all tests, which takes seconds
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        if any(map(_is_inner, modules)):
            found.append(node.lineno)
    return found


def _is_inner(module: str) -> bool:
    return module in FILES and module not in PUBLIC and not _is_room(module)


def _is_room(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or module.split(".")[1:] in (["testing"], ["extensions", "apps"])  # public modules


def test_a_test_gives_a_reason_for_importing_an_inner_module() -> None:
    """Tests import public names or names of a room, so that modules inside a room can move."""
    without = []
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        lines = text.splitlines()
        for number in _inner_imports(text):
            if "#" not in lines[number - 1] and not lines[number - 2].lstrip().startswith("#"):
                without.append(f"{path.relative_to(ROOT)}:{number}")
    assert without == []
