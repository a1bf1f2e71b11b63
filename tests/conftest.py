"""What every test may use."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest

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

HERE = Path(__file__).parent


def pytest_collection_finish() -> None:
    # Some look for garbage, or count what there is, again and again.  What pytest knows of all the others is none of
    # it, and takes a third of a second to look through.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_schemas() -> Path:
    """The official JSON Schemas and example messages, where this checkout stands beside them."""
    folder = HERE.parent.parent / "shared" / "spec"
    if not (folder / "schema").is_dir():
        pytest.skip("the official schemas are not beside this checkout")
    return folder
