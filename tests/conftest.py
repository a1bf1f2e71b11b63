"""What every test may use."""

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

# In CI the same examples every time, so that what fails there fails again here; elsewhere new ones each run.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# What runs in the background, or under nohup, ignores these, and so would each child that a test starts, also where the
# test is about Ctrl-C.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

EXAMPLES = 3  # the default suite tries one example of Hypothesis in so many

# The children of tests keep their bytecode: to compile the package at each start takes them longer than most tests.
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
    parser.addoption("--seed", type=int, help="what varies from run to run; the end of a run prints it")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # pytest-xdist passes this one on to its workers
        config.option.seed = random.randrange(1000)


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
    # Some tests look for garbage, or count objects, again and again.  The objects of pytest are not among them, and
    # take a third of a second to look through.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cuts(pytestconfig: pytest.Config) -> Cuts:
    return Cuts(pytestconfig.getoption("speed"), pytestconfig.getoption("seed"))


@pytest.fixture(scope="session")
def examples(pytestconfig: pytest.Config) -> Callable[[int], hypothesis.settings]:
    """For a function with examples within a test: the settings of so many, of which the default suite tries a third."""
    share = EXAMPLES if pytestconfig.getoption("speed") == DEFAULT else 1
    return lambda number: hypothesis.settings(max_examples=number // share)


@pytest.fixture(scope="session")
def shared_schemas() -> Path:
    """The official JSON Schemas and example messages, where this checkout stands beside them."""
    folder = HERE.parent.parent / "shared" / "spec"
    if not (folder / "schema").is_dir():
        pytest.skip("the official schemas are not beside this checkout")
    return folder
