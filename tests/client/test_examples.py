"""The client examples as real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trio_mcp import Client

ROOT = Path(__file__).parent.parent.parent
PROGRESS, KITCHEN = ([sys.executable, str(ROOT / "examples" / f"{name}.py")] for name in ("progress", "kitchen"))


@pytest.mark.parametrize(
    ("program", "said", "status"),
    [
        (PROGRESS, ["progress 1.0, in 2026-07-28", "tool export(rows): Write a table"], 0),
        (KITCHEN, ["tool cook(name): Cook a dish", "resource menu://today: The dishes of today."], 0),
        (
            KITCHEN,
            [
                "template recipes://{dish}: The recipe of a dish.",
                "prompt shopping_list(dish, guests?): A shopping list for a dish.",
            ],
            0,
        ),
        ([], ["python examples/look.py http://"], 1),
        (["--help"], ["python examples/look.py http://"], 1),
        (["--call", "export", '{"rows": 5}', *PROGRESS], ["  5 of 5", "it gave:"], 0),
        (["--call", "export", "{}", *PROGRESS], ["it has failed:", "rows"], 0),
        (["--call", "export", "rows=5", *PROGRESS], ["the arguments of a tool are a JSON object"], 1),
        (["http://127.0.0.1:1/mcp"], ["connection refused"], 1),
        (["ftp://example.com"], ["a URL must begin with http://"], 1),
        ([sys.executable, "-c", "raise SystemExit('no API key')"], ["ended with status 1", "no API key"], 1),
    ],
)
def test_the_inspecting_example_prints_the_entries_of_a_server(
    program: list[str], said: list[str], status: int, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "examples" / "look.py"), *program]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in shown.stderr
    for each in said:
        assert each in shown.stdout + shown.stderr
    assert shown.returncode == status


def test_questions_of_the_server_are_answered_at_the_terminal() -> None:
    server = [sys.executable, str(ROOT / "examples" / "ask_user.py")]
    command = [sys.executable, str(ROOT / "examples" / "look.py"), "--call", "order_pizza", "{}", *server]
    shown = subprocess.run(command, input="funghi\n2\n\n", capture_output=True, text=True, timeout=60, check=True)
    assert "  kind (margherita, funghi, marinara) []: " in shown.stdout
    assert "Ordered: 2 funghi." in shown.stdout


IN_ALL_REVISIONS = [
    "laksa is begun",
    "Dish(name='laksa', minutes=60, spicy=True)",
    "0 of 3",
    "given up: True; the diary: the soup was taken off the stove",
    "is_error: True, TextContent(text='Nobody here cooks stones",
    "the tool 'cook' has failed",
    "Resource not found",
    "text='salad'",
    "# laksa",
    "List what laksa for 3 takes.",
    "la... is ['laksa', 'lasagne']",
    "a model of ours says",
    f"cookbooks, from now on: TextContent(text='[\"{ROOT.as_uri()}\"]')",
    "menu://today has changed",
    "text='salad, laksa'",
    "another kitchen",
    "Off the protocol: nothing",
]


@pytest.mark.parametrize(
    ("revision", "said"),
    [
        ("2026-07-28", ["2 3 heat", "A table for 4 outside.", "gone to pay.", "NotInThisRevision: ping"]),
        ("2025-06-18", ["2 3 heat", "A table for 4 outside.", "with a URL does not exist", "there it is"]),
        ("2024-11-05", ["2 3 None", "elicitation/create does not exist", "there it is"]),
    ],
)
def test_the_client_example_prints_each_result(revision: str, said: list[str], tmp_path: Path) -> None:
    shell = str(ROOT / "tests" / ".." / "examples" / "client.py")  # a path as seen from another directory
    command = [sys.executable, "-W", "error", shell, revision]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stderr == ""
    for each in (f"speaks {revision}", *IN_ALL_REVISIONS, *said):
        assert each in shown.stdout
    assert shown.stdout.count("salad is begun") == 1  # the second message is below the log level


def test_the_client_example_uses_each_method() -> None:
    text = (ROOT / "examples" / "client.py").read_text(encoding="utf-8")
    methods = {name for name in dir(Client) if not name.startswith("_")}
    unused = {name for name in methods if not re.search(rf"\.{name}\b", text)}
    assert unused == {
        "list_resources_page",
        "list_resource_templates_page",
        "list_prompts_page",
    }  # are used as those for tools
