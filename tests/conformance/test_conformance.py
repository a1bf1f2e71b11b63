"""Each scenario of the official conformance suite for servers and clients of a revision is one test.

There is no list of expected failures.  Scenarios that cannot pass yet, because a whole part of the protocol is missing,
are in `NOT_REQUIRED`.  They are run, too.  An entry must leave the table as soon as all its scenarios pass.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter

import pytest

from tests.conformance.suite import LOOPBACK, NOT_REQUIRED, Scenario, exemption, suite
from tests.conformance.verdicts import Outcomes
from tests.peers.installed import Unavailable, needs, node
from tests.speeds import DEFAULT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first test that needs the suite installs it and runs it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        wanted: list[Scenario | None] = [None]  # one test, which reports the missing suite
        with contextlib.suppress(Unavailable):
            if metafunc.config.getoption("speed") != DEFAULT:  # the default suite must install nothing
                wanted = [each for each in suite().scenarios if exemption(each) is None]
        metafunc.parametrize("scenario", wanted, ids=lambda each: str(each or "not-installed"))


def test_the_suite_has_all_required_scenarios_of_each_revision() -> None:
    scenarios = needs("the conformance suite", suite).scenarios
    assert len(set(scenarios)) == len(scenarios)
    assert Counter((each.side, each.revision) for each in scenarios if each.group == "required") == {
        ("server", "2025-11-25"): 30,
        ("server", "2026-07-28"): 37,
        ("client", "2025-11-25"): 18,
        ("client", "2026-07-28"): 32,
    }


def test_servers_of_the_suite_listen_on_loopback_only() -> None:
    listen = "const s = require('net').createServer().listen(0); console.log(s.address().address); s.close()"
    program = [needs("node", node), "--import", LOOPBACK.as_uri(), "-e", listen]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("127.0.0.1", "")


def test_scenario(scenario: Scenario, outcomes: Outcomes) -> None:
    if wrong := outcomes[scenario]:
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("reason", NOT_REQUIRED.values(), ids=NOT_REQUIRED.keys())
def test_scenarios_that_are_not_required_do_not_pass_yet(reason: str, outcomes: Outcomes) -> None:
    assert any(wrong for each, wrong in outcomes.items() if exemption(each) == reason), f"no longer true: {reason}"
