"""Every scenario that the official conformance suite has for servers and clients of a revision, each a test of its own.

There is no list of failures to expect: what cannot pass yet, for want of a whole part of the protocol, is in
`NOT_DEMANDED`, is run all the same, and leaves that table with the first run in which all of it passes.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter

import pytest

from tests.conformance.suite import LOOPBACK, NOT_DEMANDED, Scenario, suite, why_not
from tests.conformance.verdicts import Outcomes
from tests.peers.installed import Unavailable, needs, node
from tests.speeds import DEFAULT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first that needs it installs the suite and runs it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        wanted: list[Scenario | None] = [None]  # one test, to say what is missing
        with contextlib.suppress(Unavailable):
            if metafunc.config.getoption("speed") != DEFAULT:  # for which nothing is to be installed
                wanted = [each for each in suite().scenarios if why_not(each) is None]
        metafunc.parametrize("scenario", wanted, ids=lambda each: str(each or "not-installed"))


def test_the_suite_has_all_that_these_revisions_require() -> None:
    scenarios = needs("the conformance suite", suite).scenarios
    assert len(set(scenarios)) == len(scenarios)
    assert Counter((each.side, each.revision) for each in scenarios if each.group == "required") == {
        ("server", "2025-11-25"): 30,
        ("server", "2026-07-28"): 37,
        ("client", "2025-11-25"): 18,
        ("client", "2026-07-28"): 32,
    }


def test_the_servers_that_the_suite_plays_listen_on_loopback_only() -> None:
    listen = "const s = require('net').createServer().listen(0); console.log(s.address().address); s.close()"
    program = [needs("node", node), "--import", LOOPBACK.as_uri(), "-e", listen]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("127.0.0.1", "")


def test_scenario(scenario: Scenario, outcomes: Outcomes) -> None:
    if wrong := outcomes[scenario]:
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("reason", NOT_DEMANDED.values(), ids=NOT_DEMANDED.keys())
def test_what_is_not_demanded_does_not_pass_yet(reason: str, outcomes: Outcomes) -> None:
    assert any(wrong for each, wrong in outcomes.items() if why_not(each) == reason), f"no longer true: {reason}"
