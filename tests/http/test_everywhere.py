"""The behaviours of `tests/server` once more, over every transport.

Those tests speak lines of JSON over a byte stream; here their lines go through a gateway (`over_http`), so that what
they say of tools, questions, changes and cancellations holds wherever a server is served.  Each of them goes over one
transport, by the hash of its name: a table is spread over all of them.  TRANSPORT names one that all of them go over.
"""

from __future__ import annotations

import importlib
import inspect
import os
import zlib
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.http.over_http import TRANSPORTS
from tests.server.wire import LATEST

# What they are about does not depend on the transport in the others: schemas, values, registrations.
_MODULES = (
    "admission", "asking", "calls", "cancelling", "changes", "composition", "lists", "parking", "questions",
    "resilience",
)  # fmt: skip

_Where = Callable[[str, str], bool]  # by transport and revision


def _anywhere(transport: str, revision: str) -> bool:
    return True


def _alone(transport: str, revision: str) -> bool:
    """Where each request has a connection of its own."""
    return transport in ("http", "http, streams only") and revision == LATEST


# What is true of byte streams only, and why.
_NOT_HERE: dict[str, tuple[_Where, str]] = {
    "a_call_whose_answer_waits_for_the_wire_keeps_its_place": (_anywhere, "the gateway reads what the client does not"),
    "a_call_that_has_ended_and_waits_for_the_wire_can_still_be_cancelled": (_anywhere, "as before"),
    "what_was_queued_for_a_request_is_not_sent_after_its_cancellation": (_anywhere, "as before"),
    "an_id_that_is_used_again_names_the_new_request_alone": (_anywhere, "as before"),
    "what_was_held_back_for_a_subscription_that_ended_is_not_told": (_anywhere, "as before"),
    "a_cancellation_may_cross_the_answer": (_anywhere, "the gateway waits in between"),
    "what_is_cancelled_in_the_same_breath_never_begins": (_anywhere, "as before"),
    "so_many_run_so_many_wait_and_the_others_are_refused_at_once": (_anywhere, "two that begin at once have no order"),
    "a_context_says_what_is_known_of_the_request": (_anywhere, "here there are headers"),
    "a_handler_knows_its_request": (_anywhere, "as before"),
    "a_drain_takes_nothing_new_under_an_old_name": (_anywhere, "a refusal is a status, or a connection that is closed"),
    "lifespans_begin_from_the_outside_and_end_from_the_inside_after_all_handlers": (
        _anywhere,
        "a server outlives its clients, and is cancelled here",
    ),
    "one_server_may_be_mounted_twice": (_anywhere, "as before"),
    "without_a_shared_run_each_connection_has_its_own": (_anywhere, "as before"),
    "connections_end_with_the_run_that_they_share": (_anywhere, "nobody listens any more"),
    "when_the_client_goes_its_handlers_hear_why": (_anywhere, "they hear other reasons"),
    "cancelling_reaches_one_handler_with_its_reason_and_nothing_is_sent_after_it": (
        _alone,
        "who closes a response gives no reason",
    ),
    "a_cancelled_handler_is_no_failure_and_its_reason_is_there_to_be_read": (_alone, "as before"),
    "an_id_in_use_is_refused_to_another_and_the_first_goes_on": (_alone, "an id is in use in its own response only"),
    "an_id_is_in_use_until_its_cancelled_handler_has_ended_and_free_then": (_alone, "as before"),
    "what_waits_and_is_cancelled_frees_its_place_and_never_starts": (_alone, "the limit is one for each connection"),
    "who_waits_for_a_retry_takes_no_place_and_the_retry_gives_it_one": (_alone, "as before"),
    "each_client_hears_of_its_own_resources_until_it_has_heard_enough": (_alone, "that it has closed is heard later"),
    "subscriptions_of_one_connection_are_told_each_under_its_own_id": (_alone, "their streams have no common order"),
    "a_mounted_server_may_run_by_itself_as_well": (_alone, "there is a connection only while there is a request"),
    "statistics_count_what_there_is": (_alone, "as before"),
}


def _take(module: ModuleType) -> None:
    """The module's tests that use a connection, under names of their own, and its fixtures."""
    for name, value in vars(module).items():
        if type(value).__name__ == "FixtureFunctionDefinition":
            globals()[name] = value
        elif name.startswith("test_") and inspect.iscoroutinefunction(value):
            name = name.removeprefix("test_")
            if "connected(" in inspect.getsource(value) and _NOT_HERE.get(name, ("", ""))[0] is not _anywhere:
                globals()[f"{module.__name__.rpartition('.')[2]}__{name}"] = value


for _module in _MODULES:
    _take(importlib.import_module(f"tests.server.test_{_module}"))


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.node.originalname.partition("__")[2]
    revision = getattr(request.node, "callspec", None) and request.node.callspec.params.get("revision")
    absent, _ = _NOT_HERE.get(name, (lambda transport, revision: False, ""))
    fit = [
        each for each in TRANSPORTS if not absent(each, revision) and not (each == "http+sse" and revision == LATEST)
    ]
    chosen = os.environ.get("TRANSPORT") or fit[zlib.crc32(request.node.name.encode()) % len(fit)]
    if chosen not in fit:
        pytest.skip(f"not over {chosen}")
    monkeypatch.setattr("trio_mcp.driver.serve_stream", TRANSPORTS[chosen])
    return chosen


def test_every_exception_is_one_of_a_test_that_there_is() -> None:
    modules = [importlib.import_module(f"tests.server.test_{each}") for each in _MODULES]
    names = {name.removeprefix("test_") for module in modules for name in vars(module)}
    assert _NOT_HERE.keys() - names == set()
