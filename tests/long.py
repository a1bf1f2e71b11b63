"""The long suite, in parts that can be run one by one: `python -m tests.long [K/N]`.

Without K/N, all six parts run, except those that have passed on this commit.  A part continues after a failure.  The
results are kept in `.long.json`, together with the commit.  The result of a part is not kept if the tree has changes
that are not committed, or if the tree changes while the part runs.  Results of another commit are not used.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".long.json"
PARTS = 6
SECONDS: float = 25 * 60
GRACE: float = 60  # seconds in which a part that is stopped writes its report


def commit() -> str | None:
    """The commit of the tree, or None if the tree has changes that are not committed."""
    if git("status", "--porcelain"):
        return None
    return git("rev-parse", "HEAD")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def results(of: str | None) -> dict[str, Any]:
    """The parts that have run on this commit, by their names."""
    if of is None or not RESULTS.exists():
        return {}
    kept = json.loads(RESULTS.read_text())
    return dict(kept["parts"]) if kept["commit"] == of else {}


def run(part: str) -> dict[str, Any]:
    """Run one part, and return its result."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--speed", "long", "--part", part]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        with subprocess.Popen([*command, "-n", "2", f"--junit-xml={report}"], cwd=ROOT) as process:
            try:
                code = process.wait(SECONDS)
                ended = {0: "passed", 5: "passed"}.get(code, "failed")  # 5: no case belongs to this part
            except subprocess.TimeoutExpired:
                ended = f"stopped after {SECONDS} s"
                _stop(process)
        # A run that does not start, or does not stop, leaves no report.
        text = report.read_text() if report.exists() else ""
    counts = re.search(r'errors="(\d+)" failures="(\d+)" skipped="(\d+)" tests="(\d+)"', text)
    errors, failures, skipped, tests = map(int, counts.groups()) if counts else (0, 0, 0, 0)
    return {
        "ended": ended,
        "tests": tests,
        "failed": errors + failures,
        "skipped": skipped,
        "seconds": round(time.monotonic() - start),
    }


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)  # then pytest stops its workers, and writes its report
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()


def check(part: str) -> None:
    """Raises `SystemExit` for an invalid part: pytest would find no case in it, and thus no failure."""
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise SystemExit(f"a part must be K/N with K from 1 to N, such as 3/{PARTS}, got {part!r}")


def main(wanted: str) -> int:
    if wanted:
        check(wanted)
    of = commit()
    if of is None:
        print("the tree has changes that are not committed: the results of this run will not be kept")
    done = results(of)
    parts = [wanted] if wanted else [f"{number}/{PARTS}" for number in range(1, PARTS + 1)]
    for part in parts:
        if not wanted and done.get(part, {}).get("ended") == "passed":
            continue
        print(f"== part {part}", flush=True)
        done[part] = run(part)
        if of is None:
            continue
        if commit() != of:
            print(f"the tree has changed meanwhile: the result of part {part} is not kept")
            continue
        kept = {**results(of), part: done[part]}  # another part may have run at the same time
        RESULTS.write_text(json.dumps({"commit": of, "parts": kept}, indent=1) + "\n")
    for part in sorted(done):
        print(f"part {part}: " + ", ".join(f"{name} {value}" for name, value in done[part].items()))
    return 0 if all(done[part]["ended"] == "passed" for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
