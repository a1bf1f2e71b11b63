"""The mutation tool: its seed decides the draw, some code stays untouched, and the result says which test failed."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
from pathlib import Path

import pytest

from tests.mutations import PACKAGE, ROOT, Source, drawn, main
from tests.peers.installed import needs, tool


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", ["a <= b"]),
        ("(a) == (b)", ["(a) != (b)"]),
        ("a is not b", ["a is b"]),
        ("a in b not in c", ["a not in b not in c", "a in b in c"]),
        ("(a <  # why\nb)", []),
        ("a and b", ["a or b"]),
        ("a if not b else c", ["a if (b) else c"]),
        ("[a for a in b if a]", ["[a for a in b if not (a)]"]),
        ("while a: b", ["while not (a): b"]),
        ("a = 1", ["a = 2", "a = 0"]),
        ("a = 0.5", ["a = 1.5"]),
        ("a - b", ["a + b"]),
        ("a += b", ["pass", "a -= b"]),
        ("a + 'text'", []),
        ("a.b(c)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("def a(): return b", ["def a(): return None"]),
        ("def a(): return None", []),
        ("a = {b: c, d: e}", ["a = {b: e, d: c}"]),
        ("a = {b: (c, d)}", ["a = {b: (d, c)}"]),
        ("a = b, c", []),
        ('a["tools/list"]', ['a["tools/listx"]']),
        ('a = "an error text"', []),
        ("def a():\n    if b: return", ["def a():\n    if not (b): return", "def a():\n    if False: return"]),
        ('"é" in a', ['"é" not in a']),
    ],
)
def test_each_mutation_makes_the_change_of_its_kind(before: str, after: list[str]) -> None:
    mutations = Source("module.py", before.encode()).mutations
    assert sorted(each.mutated.decode() for each in mutations) == sorted(after)
    for each in mutations:
        assert ast.dump(ast.parse(each.mutated)) != ast.dump(ast.parse(before))


UNTOUCHED = '''"""A docstring: a < b, 1."""

from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never, overload

__all__ = ["One", "two"]

if TYPE_CHECKING:
    limit = 1

Name: TypeAlias = Literal["one", "two"]


class One:
    """Another docstring."""

    kind: Literal["one"]
    """It is "one"."""

    @overload
    def two(self, kind: Literal["one"], most: int = 1) -> Literal[1]: ...

    def two(self, kind: Literal["one"]) -> "One":
        """A third: return 1."""
        _log.warning("more than %s", 1)
        assert_never(kind)
        raise ValueError("one")
'''


def test_docstrings_types_and_errors_are_not_mutated() -> None:
    assert Source("module.py", UNTOUCHED.encode()).mutations == []


def test_a_mutation_is_described_by_the_lines_that_it_touches() -> None:
    [first, *_] = Source("module.py", b"a = b\n\nfound = (\n    a < b  # why\n)\n").mutations
    assert first.described() == {
        "module": "module.py",
        "line": 4,
        "kind": "comparison turned",
        "old": "a < b # why",
        "new": "a <= b # why",
    }


def test_the_same_seed_draws_the_same_mutations() -> None:
    package = ROOT / PACKAGE / "core" / "schema"
    first, again, other = (list(itertools.islice(drawn(package, seed), 20)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 20
    for each in first:
        assert ast.dump(ast.parse(each.mutated)) != ast.dump(ast.parse(each.source))


def test_every_mutation_is_drawn_once(tmp_path: Path) -> None:
    (tmp_path / "ages.py").write_text("a = {1: 2, 3: 3}\nb = a is c\n")
    kinds = [each.kind for each in drawn(tmp_path, 1)]
    assert sorted(kinds) == ["bound moved"] * 8 + ["cells exchanged", "comparison turned"]


SAMPLE = {
    f"{PACKAGE}/__init__.py": "",
    f"{PACKAGE}/ages.py": """\
same = lambda one, other: one is other
both = lambda one, other: one and other
gap = lambda one, other: one - other
FIRST = [()][0]
""",
    "tests/__init__.py": "",
    "tests/conftest.py": """\
def pytest_addoption(parser):
    parser.addoption("--speed")
    parser.addoption("--seed")
""",
    "tests/test_ages.py": f"""\
from {PACKAGE}.ages import both, same

def test_the_same_is_the_same():
    assert same(None, None)

def test_both_are_meant(request):
    assert request.config.getoption("--speed") == "default" or not both(True, False)
""",
    "tests/test_early.py": """\
def test_it_is_early(request):
    assert request.config.getoption("--speed") == "default"
""",
}


@pytest.mark.full
def test_the_results_say_which_mutations_were_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample, results = tmp_path / "sample", tmp_path / "results"
    for name, text in SAMPLE.items():
        (sample / name).parent.mkdir(parents=True, exist_ok=True)
        (sample / name).write_text(text)
    git = [needs("git", lambda: tool("git")), "-C", str(sample), "-c", "user.name=N", "-c", "user.email=n@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A sample"]):
        subprocess.run([*git, *command], check=True)
    command = ["--seed", "1", "--json", str(results)]
    assert main([*command, "--count", "2"], sample) == 0
    assert main(command, sample) == 0
    _, _, again = capsys.readouterr().out.partition("2 mutations")
    assert "without a mutation" not in again  # a finished mutation does not run a second time
    assert "\n3 mutations" in again
    found = {each["old"]: each for each in map(json.loads, results.read_text().splitlines())}
    assert len(found) == 3
    same, both, gap = (found[line] for line in SAMPLE[f"{PACKAGE}/ages.py"].splitlines()[:3])
    assert (same["result"], same["speed"]) == ("caught", "default")
    assert same["test"] == "tests/test_ages.py::test_the_same_is_the_same"
    assert (both["result"], both["speed"]) == ("caught", "full")
    assert (gap["result"], gap["left_out"]) == ("survived", ["tests/test_early.py"])
