"""Mutations of the package, and whether the suite notices them: `python -m tests.mutations --count 30 --seed 7`.

A mutation is one small change of one module: `<` becomes `<=`, a statement is dropped, or two cells of a table change
places.  The seed decides which mutations are drawn.  The default suite runs against each mutation until its first
failure.  If a mutation survives, the `full` cases run against it, and with `--long` the `long` cases.

Each job has a clone of the commit, and an environment with the packages of this one that imports the clone.  The
test files near to the mutated module run first, so most mutations are caught within seconds.  `--json FILE` keeps the
results; a run that finds the file continues it, at the same commit.

A mutation may change no behaviour that counts: the order of headers, a deadline that is one second longer.  So a
mutation that survives is not yet a gap in the suite: a person must judge it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest

from tests.speeds import DEFAULT, SPEEDS

ROOT, PACKAGE = Path(__file__).parents[1], "trio_mcp"
FIRST = 10  # the number of near files that run first: to collect the whole suite takes ten seconds
EACH = 60.0  # seconds for one test of the default suite
HANGS = 6.0  # times as long as the default suite takes without a mutation
LATER = 4 * 3600.0  # seconds for the cases of a later speed
IMPORTS = f"""import importlib, pkgutil, {PACKAGE}
for each in pkgutil.walk_packages({PACKAGE}.__path__, "{PACKAGE}."):
    each.name.endswith("__main__") or importlib.import_module(each.name)
"""
TURNED = {"==": "!=", "<": "<=", ">": ">=", "is": "is not", "in": "not in", "and": "or", "+": "-", "+=": "-="}
TURNED |= {new: old for old, new in TURNED.items()}
OPERATOR = re.compile(rb"is not|not in|is|in|and|or|[=!<>+-]=|[<>+-]")
UNTOUCHED = {  # functions that log, that serve the type checker, or that take the name of an attribute or a codec
    *("debug", "info", "warning", "error", "exception", "log", "warn", "getLogger"),
    *("assert_never", "cast", "NewType", "ParamSpec", "TypeVar", "getattr", "hasattr", "setattr", "encode", "decode"),
}


@attrs.frozen
class Mutation:
    """A new text for the part of a module's source between two offsets, in bytes."""

    module: str
    source: bytes = attrs.field(repr=False)
    kind: str
    start: int
    end: int
    new: str

    @property
    def mutated(self) -> bytes:
        return self.source[: self.start] + self.new.encode() + self.source[self.end :]

    def described(self) -> dict[str, Any]:
        """Its module and line, its kind, and the lines that it changes, before and after."""
        first = self.source.rfind(b"\n", 0, self.start) + 1
        rest = len(self.source) - (self.source + b"\n").index(b"\n", self.end)
        old, new = (" ".join(s[first : len(s) - rest].decode().split()) for s in (self.source, self.mutated))
        line = self.source.count(b"\n", 0, self.start) + 1
        return {"module": self.module, "line": line, "kind": self.kind, "old": old, "new": new}


class Source:
    """The source of a module, and its possible mutations."""

    def __init__(self, module: str, text: bytes) -> None:
        self.module, self.text, tree = module, text, ast.parse(text)
        self.lines = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        values = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        # The order of a tuple alone, for example of exceptions, seldom has a meaning.  The order of a row does.
        self.tables = [each for top in values for each in _tables(top) if each is not top or isinstance(top, ast.Dict)]
        nodes = list(_mutable(tree))
        self.mutations = [each for some in (_expression, _statement) for node in nodes for each in some(self, node)]

    def span(self, node: Any) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end].decode()

    def replaced(self, kind: str, node: ast.AST, new: str) -> Mutation:
        return Mutation(self.module, self.text, kind, *self.span(node), new)

    def turned(self, kind: str, *operands: ast.AST) -> Iterator[Mutation]:
        """The operator between each two of these operands becomes its counterpart."""
        for left, right in itertools.pairwise(operands):
            (_, start), (end, _) = self.span(left), self.span(right)
            found = OPERATOR.search(self.text, start, end)
            if found and b"#" not in self.text[start:end]:
                yield Mutation(self.module, self.text, kind, *found.span(), TURNED[found[0].decode()])

    def exchanged(self, cells: Sequence[ast.AST]) -> Iterator[Mutation]:
        """Two neighbours in a table change places."""
        for one, other in itertools.pairwise(cell for cell in cells if not isinstance(cell, ast.Starred)):
            (start, middle), (start_of_other, end) = self.span(one), self.span(other)
            new = self.of(other) + self.text[middle:start_of_other].decode() + self.of(one)
            yield Mutation(self.module, self.text, "cells exchanged", start, end, new)


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """This node and all nodes below it, without those that must not change."""
    yield node
    for name, value in ast.iter_fields(node):
        of_types = name in ("annotation", "returns") or (name == "body" and _fixed(getattr(node, "test", node)))
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and not of_types and not _fixed(each):
                yield from _mutable(each)


def _fixed(node: ast.AST) -> bool:
    """Whether this node and all its parts must stay as they are."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()) | ast.Compare(left=ast.Name(id="__name__")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Subscript(value=ast.Name(id="Literal")) | ast.Name(id="TYPE_CHECKING"):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in UNTOUCHED
        case ast.Expr(value=ast.Await(value=call)) | ast.Expr(value=call):
            return _fixed(call)
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):  # an overload, or a method of a protocol
            return all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in body)
    return False


def _tables(node: ast.AST) -> Iterator[ast.AST]:
    """The tables in the value of a module's name: the value itself, and the values in its cells."""
    match node:
        case ast.Dict(values=cells) | ast.Tuple(elts=cells) | ast.List(elts=cells):
            yield node
        case ast.Call(func=ast.Name(id="MappingProxyType"), args=cells):
            pass
        case _:
            cells = []
    for cell in cells:
        yield from _tables(cell)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str | bytes)


def _expression(source: Source, node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare():
            yield from source.turned("comparison turned", node.left, *node.comparators)
        case ast.BoolOp():
            yield from source.turned("condition changed", *node.values)
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text(node.left) and not _is_text(node.right):
            yield from source.turned("sign swapped", node.left, node.right)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            for moved in (number + 1, number - 1) if number >= 1 else (number + 1,):
                yield source.replaced("bound moved", node, repr(moved))
        # A string of one word is a name of the protocol: of a method, a field, a header.
        case ast.Constant(value=str() as word) if re.fullmatch(r"[$A-Za-z_][\w$./:-]+", word):
            if source.of(node) == f'"{word}"':
                yield source.replaced("word changed", node, f'"{word}x"')
        case ast.Dict() if node in source.tables:
            yield from source.exchanged([value for key, value in zip(node.keys, node.values, strict=True) if key])
        case ast.Tuple() | ast.List() if node in source.tables:
            yield from source.exchanged(node.elts)


def _statement(source: Source, node: ast.AST) -> Iterator[Mutation]:
    # An `if`, a `while`, a conditional expression; a guard of a `case`; the conditions of a comprehension.
    for test in (getattr(node, "test", None), getattr(node, "guard", None), *getattr(node, "ifs", ())):
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield source.replaced("condition changed", test, f"({source.of(test.operand)})")
        elif test is not None and not _fixed(test):
            yield source.replaced("condition changed", test, f"not ({source.of(test)})")
    match node:
        case ast.If(test=test, body=[*_, ast.Return() | ast.Raise()]) if not _fixed(test):
            yield source.replaced("guard never true", test, "False")
        case ast.Return(value=ast.AST() as value) if source.of(value) != "None":
            yield source.replaced("statement dropped", node, "return None")
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())) | ast.Delete():
            yield source.replaced("statement dropped", node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield source.replaced("statement dropped", node, "pass")
        case ast.AugAssign(op=op):
            yield source.replaced("statement dropped", node, "pass")
            if isinstance(op, ast.Add | ast.Sub):
                yield from source.turned("sign swapped", node.target, node.value)


def drawn(package: Path, seed: int) -> Iterator[Mutation]:
    """The mutations of a package, each once, in an order that the seed decides.

    All modules are about equally likely: a module with sixteen times as many mutations has twice the chance.  All kinds
    of mutation in a module are equally likely.
    """
    files = [file for file in sorted(package.rglob("*.py")) if "demo" not in file.parts]
    offers = [Source(file.relative_to(package.parent).as_posix(), file.read_bytes()).mutations for file in files]
    offers = [some for some in offers if some]
    random, left = Random(seed), set(itertools.chain(*offers))
    while left:
        [some] = random.choices(offers, [len(some) ** 0.25 for some in offers])
        kind = random.choice(sorted({each.kind for each in some}))
        mutation = random.choice([each for each in some if each.kind == kind])
        if mutation in left:
            left.remove(mutation)
            if ast.dump(ast.parse(mutation.mutated)) != ast.dump(ast.parse(mutation.source)):
                yield mutation


class Clone:
    """A clone of a commit, with its own environment, for one run at a time."""

    def __init__(self, folder: Path, repository: Path, commit: str, seed: int) -> None:
        self.root, self.seed, self.limit = folder / "clone", seed, LATER
        self._stopped, self._clock = False, itertools.count(10**9)
        self.python = str(self.root / ".venv" / "bin" / "python")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST", "PYTHON"))}
        self._process: subprocess.Popen[bytes]
        subprocess.run(["git", "clone", "-q", "--local", "--no-checkout", repository, self.root], check=True)
        subprocess.run(["git", "-C", self.root, "checkout", "-q", "--detach", commit], check=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root / ".venv"], check=True)
        # Python reads no .pth files in the folders that a .pth file adds, so it does not see the editable install.
        [packages] = self.root.glob(".venv/lib/python*/site-packages")
        (packages / "clone.pth").write_text(f"{self.root}\n{sysconfig.get_path('purelib')}\n")
        for there, here in ((repository.parent / "shared", folder), (repository / ".peers", self.root)):
            if there.exists():  # the official schemas, and the peer programs
                (here / there.name).symlink_to(there)
        _, imported = self.run("-c", f"import {PACKAGE}; print({PACKAGE}.__file__)")
        assert imported.strip() == str(self.root / PACKAGE / "__init__.py"), f"{self.python} imports {imported}"

    def run(self, *arguments: str, limit: float = EACH) -> tuple[int | None, str]:
        """Run a program of the environment.  Returns its exit code, None if it hangs, and its output."""
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            where: dict[str, Any] = {"cwd": self.root, "env": self._environment, "start_new_session": True}
            self._process = subprocess.Popen([self.python, *arguments], **ends, **where)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if self._stopped else limit)
            code = self._process.poll()
            self._end()
            if self._stopped:
                raise KeyboardInterrupt
            said.seek(0)
            return code, said.read()

    def stop(self) -> None:
        """End the program that runs, and start no other one."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        """End the program, its session, and each process outside it that runs by the clone's interpreter."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if each.read_bytes().startswith(f"{self.python}\0".encode()):
                    os.kill(int(each.parent.name), signal.SIGKILL)

    def failure(self, files: Sequence[str], speed: str = DEFAULT, mutation: Mutation | None = None) -> str:
        """The first test in these files that fails, with a mutation or without one; "" if all pass."""
        options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
        # The cases that differ from run to run must be the same with a mutation and without one.
        options += [f"--basetemp={self.root.parent / 'tmp'}", "--seed", str(self.seed), "--speed", speed]
        options += [f"--timeout={EACH}"] if speed == DEFAULT else []
        limit = self.limit if speed == DEFAULT else LATER
        with self.mutated(mutation):
            code, said = self.run("-m", "pytest", *options, *files, limit=limit) if files else (0, "")
        failed: list[str] = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        if failed:
            return failed[-1]
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        if code == pytest.ExitCode.USAGE_ERROR and "while loading conftest" not in said:
            raise RuntimeError(said)
        return "a hang" if code is None else f"pytest, which ends with {code}: {said.strip()[-200:]}"

    def imports(self, mutation: Mutation) -> bool:
        """Whether the package imports with this mutation."""
        with self.mutated(mutation):
            code, said = self.run("-c", IMPORTS)
        if code != 0:
            place, why = mutation.described(), (said.strip().splitlines() or ["it hangs"])[-1]
            print(f"drawn again: {place['module']}:{place['line']}  {place['new'][:80]}  does not import: {why[:80]}")
        return code == 0

    @contextmanager
    def mutated(self, mutation: Mutation | None) -> Iterator[None]:
        if mutation is not None:
            self._write(mutation.module, mutation.mutated)
        try:
            yield
        finally:
            if mutation is not None:
                self._write(mutation.module, mutation.source)

    def _write(self, module: str, text: bytes) -> None:
        # Python takes bytecode as fresh if its source has the same time and size, so each text gets its own time.
        (self.root / module).write_bytes(text)
        moment = next(self._clock)
        os.utime(self.root / module, (moment, moment))

    def files(self, module: str) -> tuple[list[str], list[str]]:
        """The test files in two lists.  The first has those near to the module: they import it or have its name."""
        package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
        imports = re.compile(rf"\b{re.escape(package)}(\.{name}\b| import .*\b{name}\b)")
        mentions = re.compile(rf"(?<![^\W_]){name}(?![^\W_])")

        def distance(file: Path) -> tuple[bool, int]:
            text = file.read_text()
            return file.stem != f"test_{name}" and not imports.search(text), -len(mentions.findall(text))

        files = sorted(sorted((self.root / "tests").rglob("test_*.py")), key=distance)
        ordered = [str(file.relative_to(self.root)) for file in files]
        return ordered[:FIRST], ordered[FIRST:]


def judged(clone: Clone, mutation: Mutation, speeds: Sequence[str]) -> dict[str, Any]:
    """The verdict on one mutation: the test that catches it, and at which speed, or that it survives."""
    start, near, others = time.monotonic(), *clone.files(mutation.module)
    verdict: dict[str, Any] = {"result": "survived", "left_out": []}
    runs = [(DEFAULT, near), (DEFAULT, others), *((speed, near + others) for speed in speeds if speed != DEFAULT)]
    while runs:
        (speed, files), *runs = runs
        test = clone.failure(files, speed, mutation)
        file = test.partition("::")[0]
        if file in files and clone.failure([file], speed):
            # A file that also fails without the mutation proves nothing; the other files run.
            verdict["left_out"].append(file)
            runs = [(speed, [each for each in files if each != file]), *runs]
        elif test:
            # If a test fails by chance, it passes the second time.
            again = file not in files or bool(clone.failure([file], speed, mutation))
            verdict |= {"result": "caught", "speed": speed, "test": test, "again": again}
            break
    return {**mutation.described(), **verdict, "seconds": round(time.monotonic() - start)}


def shown(result: dict[str, Any]) -> str:
    """A result as one line."""
    verdict = f"caught by {result['test']}" if result["result"] == "caught" else "SURVIVED"
    if result["result"] == "caught" and result["speed"] != DEFAULT:
        verdict = f"SURVIVED default; {verdict} ({result['speed']})"
    doubt = "" if result.get("again", True) else ", but its file passes the second time"
    doubt += "".join(f"; {file} fails without the mutation, too" for file in result["left_out"])
    place = f"{result['number']:3}  {result['module']}:{result['line']}  {result['kind']}"
    # Of a long line, only the part around the change is shown.
    old, new = result["old"], result["new"]
    same = sum(itertools.takewhile(bool, (a == b for a, b in zip(old, new, strict=False))))
    change = "  ->  ".join(line[max(0, same - 50) : same + 50] for line in (old, new))
    return f"{place}  {change}  {verdict} in {result['seconds']} s{doubt}"


def main(arguments: Sequence[str], repository: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=30, help="how many mutations to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, required=True, help="decides which ones")
    parser.add_argument("--only", type=int, metavar="K", help="run the K-th of them by itself")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results there, and continue them")
    parser.add_argument("--long", action="store_true", help="run the `long` cases, too, against what survives")
    given = parser.parse_args(arguments)
    kept = given.json.read_text().splitlines() if given.json and given.json.exists() else []
    results = [json.loads(line) for line in kept]
    if any(result["seed"] != given.seed for result in results):
        parser.error(f"{given.json} has the results of another seed")
    head = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    base = {"seed": given.seed, "commit": head.stdout.strip(), "limit": LATER}
    base = {key: results[0][key] for key in base} if results else base
    print(f"seed {given.seed}, commit {base['commit']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        clones = [Clone(Path(folder) / str(job), repository, base["commit"], given.seed) for job in range(given.jobs)]
        try:
            if not results:
                base["limit"] = HANGS * unmutated(pool, clones)
            mutations = filter(clones[0].imports, drawn(clones[0].root / PACKAGE, given.seed))
            numbered = list(enumerate(itertools.islice(mutations, given.only or given.count), 1))
            finished = {result["number"] for result in results}
            wanted = iter([each for each in numbered if each[0] not in finished and given.only in (None, each[0])])

            def work(clone: Clone) -> None:
                clone.limit = base["limit"]
                for number, mutation in wanted:
                    result = {**base, "number": number, **judged(clone, mutation, SPEEDS if given.long else SPEEDS[:2])}
                    results.append(result)
                    print(shown(result), flush=True)
                    if given.json:
                        with given.json.open("a") as file:
                            file.write(json.dumps(result) + "\n")

            list(pool.map(work, clones))
        finally:
            for clone in clones:
                clone.stop()
    verdicts = Counter(f"caught ({each['speed']})" if "speed" in each else "survived" for each in results)
    print(f"{len(results)} mutations:", ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return 0


def unmutated(pool: ThreadPoolExecutor, clones: Sequence[Clone]) -> float:
    """The seconds that the default suite takes without a mutation.  Raises `SystemExit` if it fails."""
    start = time.monotonic()
    files = list(itertools.chain(*clones[0].files(f"{PACKAGE}/__init__.py")))
    for test in pool.map(lambda clone: clone.failure(files), clones):
        if test:
            sys.exit(f"without a mutation, the suite fails: {test}")
    print(f"without a mutation, the suite passes in {time.monotonic() - start:.0f} s", flush=True)
    return time.monotonic() - start


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the clones are removed
    sys.exit(main(sys.argv[1:]))
