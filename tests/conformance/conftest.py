"""One run of the conformance suite for all tests that use its results, and its scores at the end."""

from __future__ import annotations

import pytest
import trio

from tests.conformance.runs import run_scenarios
from tests.conformance.suite import exemption, suite
from tests.conformance.verdicts import Outcomes, scores
from tests.peers.installed import needs

OUTCOMES = pytest.StashKey[Outcomes]()


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The faults of each scenario that the tests of this session use.  Only these scenarios are run."""
    found = needs("the conformance suite", suite)
    tests = [each for each in request.session.items if isinstance(each, pytest.Function)]
    asked = [each.callspec.params for each in tests if "outcomes" in each.fixturenames]
    wanted = [each for each in found.scenarios if {"scenario": each} in asked or {"reason": exemption(each)} in asked]
    request.config.stash[OUTCOMES] = trio.run(run_scenarios, found, wanted, tmp_path_factory.mktemp("conformance"))
    return request.config.stash[OUTCOMES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in scores(config.stash.get(OUTCOMES, {})):
        terminalreporter.write_line(f"conformance of the {line}")
