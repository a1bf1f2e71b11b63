"""Options, hooks and fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from tests.cuts import Cuts
from tests.speeds import ALL, DEFAULT, SPEEDS, has_examples, part_of, speeds

# In CI, Hypothesis tries the same examples each time, so that a failure can be repeated.  Without CI, each run tries
# new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A process in the background, or under nohup, ignores these signals.  Each child that a test starts would inherit this,
# and the tests of Ctrl-C would fail.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

EXAMPLES = 3  # the default suite tries one in three examples of Hypothesis

# The children of tests keep their bytecode: to compile the package at each start takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--speed",
        choices=(*SPEEDS, ALL),
        default=DEFAULT,
        help="the cases to run: those of the default suite, those that the full or the long suite adds, or all",
    )
    parser.addoption("--part", metavar="K/N", help="of these cases, the K-th of N parts of about the same length")
    parser.addoption(
        "--seed", type=int, help="the seed of the cases that differ from run to run; printed at the end of a run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # pytest-xdist passes this one on to its workers
        config.option.seed = random.randrange(1000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one worker more than there are cores, because some tests wait for processes and sockets."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    speed = config.getoption("speed")
    part, parts = map(int, (config.getoption("part") or "1/1").split("/"))
    of = speeds(items)
    wanted = {item for item in items if speed in (ALL, *of[item]) and part_of(item, parts) == part}
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]
    if speed == DEFAULT:
        for test in {item.obj for item in items if isinstance(item, pytest.Function) and has_examples(item)}:
            given = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = hypothesis.settings(
                given, max_examples=given.max_examples // EXAMPLES
            )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("speed") == DEFAULT:
        line = "This was the default suite. `.ci/run` adds the full one, and installs the programs that it needs."
    else:
        line = f"The seed of this run was {config.getoption('seed')} (--seed)."
    terminalreporter.line(line)


def pytest_collection_finish() -> None:
    _freeze_heap()  # the objects of pytest stay to the end


@pytest.fixture
def frozen_heap() -> None:
    """For a test that collects garbage, or counts objects, many times: it looks only at objects made after this."""
    _freeze_heap()


def _freeze_heap() -> None:
    """Hide all present objects from the collector, because to look through them takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cuts(pytestconfig: pytest.Config) -> Cuts:
    return Cuts(pytestconfig.getoption("speed"), pytestconfig.getoption("seed"))


@pytest.fixture(scope="session")
def examples(pytestconfig: pytest.Config) -> Callable[[int], hypothesis.settings]:
    """Settings for a function with `number` examples inside a test.  The default suite tries a third of them."""
    share = EXAMPLES if pytestconfig.getoption("speed") == DEFAULT else 1
    return lambda number: hypothesis.settings(max_examples=number // share)


@pytest.fixture(scope="session")
def shared_schemas() -> Path:
    """The folder of the official JSON Schemas and example messages, if it is beside this checkout."""
    folder = HERE.parent.parent / "shared" / "spec"
    if not (folder / "schema").is_dir():
        pytest.skip("the official schemas are not beside this checkout")
    return folder
