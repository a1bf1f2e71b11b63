"""The public names: few at the top, and each is found, typed and explained."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import trio_mcp

ROOT = Path(__file__).parent.parent
TOP = [
    "Accepted", "CacheHints", "Client", "Context", "Declined", "Dismissed", "Elicit", "ElicitUrl", "Field",
    "InputRequired", "Limits", "ListRoots", "McpError", "OAuth", "Principal", "RequestError", "ResourceNotFound",
    "Sample", "Server", "TextContent", "ToolError", "ToolFailed", "UsageError", "audio", "below", "connect_client",
    "file", "file_path", "image", "open_client", "serve_http", "serve_http_stream", "serve_stdio", "serve_stream",
]  # fmt: skip
NAMESPACES = ["trio_mcp", "trio_mcp.types", "trio_mcp.errors", "trio_mcp.oauth", "trio_mcp.relay", "trio_mcp.stores"]
NAMESPACES += ["trio_mcp.extensions", "trio_mcp.extensions.tasks"]
ROOMS = [f"trio_mcp.{room}" for room in ("core", "core.http", "core.oauth", "core.schema", "transport", "server")]
ROOMS += ["trio_mcp.server.http", "trio_mcp.client"]


def public(module: str) -> list[str]:
    return [name for name in dir(importlib.import_module(module)) if not name.startswith("_")]


PUBLIC = [(module, name) for module in NAMESPACES for name in public(module)]


def test_the_top_has_few_names() -> None:
    assert public("trio_mcp") == sorted(TOP)
    assert len(TOP) <= 35


@pytest.mark.parametrize("module", NAMESPACES)
def test_type_checkers_see_the_same_names(module: str) -> None:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.asname or "" for node in imports for alias in node.names) == public(module)


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[f"{module}.{name}" for module, name in PUBLIC])
def test_a_public_name_is_found_and_explained(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, type):
        assert vars(value).get("__doc__"), "a class has a docstring of its own"
    elif inspect.isfunction(value):
        assert inspect.getdoc(value)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_names_of_its_modules(room: str) -> None:
    for name in public(room):
        assert getattr(importlib.import_module(room), name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trio_mcp' has no attribute 'Sever'"):
        trio_mcp.Sever  # noqa: B018


def test_help_fits_on_two_screens() -> None:
    shown = pydoc.render_doc("trio_mcp", renderer=pydoc.plaintext)
    assert len(shown.splitlines()) <= 60
    assert all(name in shown for name in TOP)


def test_a_fresh_interpreter_finds_every_name() -> None:
    script = f"from trio_mcp import {', '.join(TOP)}"
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "module",
    [
        *("trio_mcp", "trio_mcp.types", "trio_mcp.errors", "trio_mcp.oauth", "trio_mcp.relay", "trio_mcp.stores"),
        "trio_mcp.extensions.tasks",
    ],
)
def test_the_reference_has_every_public_name(module: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{module.partition('.')[2] or 'top'}.md").read_text(encoding="utf-8")
    entries = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    assert sorted(entries) == sorted(f"{module}.{name}" for name in public(module))


def test_help_shows_real_signatures() -> None:
    from trio_mcp import Server, connect_client, open_client, serve_http

    options = {
        Server.tool: "structured",
        Server.resource: "mime_type",
        Server.prompt: "title",
        Server.completion: "thread",
        open_client: "timeout",
        connect_client: "timeout",
        serve_http: "allowed_hosts",
    }
    for function, option in options.items():
        parameters = inspect.signature(function).parameters
        assert option in parameters
        assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
