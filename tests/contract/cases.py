"""Runs the tests of `tests/server` on every transport.

A test of `tests/server` exchanges lines of JSON over a byte stream.  `copies` makes a copy of the test with one more
parameter, the transport.  The mark `contract` selects the tests of the contract, and the rows of their tables:

    @pytest.mark.contract(name=("form", "roots"))

If the mark does not name a table, the first row of that table is used.  The table of revisions is an exception: all
revisions are used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from tests.contract.transports import TRANSPORTS
from tests.server.raw_client import LATEST, REVISION_NAMES

__all__ = ["EXCEPTIONS", "MODULES", "copies", "over_transports", "tables_of"]

# The other modules test schemas, values and registrations, which are equal on each transport, or byte streams.
MODULES: Mapping[str, ModuleType] = {
    name: importlib.import_module(f"tests.server.test_{name}")
    for name in (
        "admission", "asking", "calls", "cancelling", "changes", "composition", "draining", "extensions", "lists",
        "parking", "resilience",
    )
}  # fmt: skip


# Predicates for the transports and revisions on which a behaviour does not hold.


def _everywhere(transport: str, revision: str) -> bool:
    return True


def _not_in_memory(transport: str, revision: str) -> bool:
    return transport != "memory"


def _by_network(transport: str, revision: str) -> bool:
    return transport not in ("stdio", "memory")


def _by_requests(transport: str, revision: str) -> bool:
    """Each message of the client is an HTTP request."""
    return transport in ("http json", "http stream", "http+sse", "asgi")


def _by_exchanges(transport: str, revision: str) -> bool:
    """Each request of the client is an HTTP request, and there is no session."""
    return transport in ("http json", "http stream", "asgi") and revision == LATEST


def _by_asgi(transport: str, revision: str) -> bool:
    return transport == "asgi"


def _by_asgi_exchanges(transport: str, revision: str) -> bool:
    return transport == "asgi" and revision == LATEST


class _Exception(NamedTuple):
    where: Callable[[str, str], bool]
    why: str


_UNREAD = _Exception(_not_in_memory, "another task reads while the client does not")
_TURNS = _Exception(_not_in_memory, "the server runs between two messages")
_ORDER = _Exception(_by_requests, "two HTTP requests have no order")
_HEADERS = _Exception(_by_network, "the request has headers")
_OUTLIVES = _Exception(_by_network, "the server outlives its clients")
_EXCHANGES = _Exception(_by_exchanges, "a request has a connection, and limits, of its own")
_HOST = _Exception(_by_asgi, "the host, not the application, ends the connections")
_HOST_OF_EXCHANGES = _Exception(_by_asgi_exchanges, _HOST.why)
_HALF_CLOSED = _Exception(_by_network, "only a byte stream can be half closed")
_NO_CONNECTION = _Exception(_everywhere, "the test does not connect by `connected`")

EXCEPTIONS: Mapping[str, _Exception] = {
    "a_subscription_is_answered_after_the_end_of_input": _HALF_CLOSED,
    "a_call_that_has_ended_and_waits_for_the_wire_can_still_be_cancelled": _UNREAD,
    "a_call_keeps_its_place_while_its_answer_waits": _UNREAD,
    "a_client_that_does_not_read_gets_the_newest_notification_of_each_key": _UNREAD,
    "a_client_that_does_not_read_delays_no_other_client": _UNREAD,
    "an_id_that_is_used_again_names_only_the_new_request": _UNREAD,
    "notifications_do_not_pile_up_if_the_client_does_not_read": _UNREAD,
    "pending_changes_of_an_ended_subscription_are_not_sent": _UNREAD,
    "messages_queued_for_a_request_are_dropped_at_its_cancellation": _UNREAD,
    "a_cancellation_may_cross_the_answer": _TURNS,
    "a_retry_that_is_cancelled_before_it_begins_uses_no_state": _TURNS,
    "a_request_cancelled_in_the_same_read_never_begins": _TURNS,
    "calls_beyond_the_limit_are_refused_at_once": _ORDER,
    "the_context_has_the_facts_of_the_request": _HEADERS,
    "each_handler_gets_the_facts_of_its_request": _HEADERS,
    "a_drain_does_not_wait_for_a_client_that_has_disconnected": _OUTLIVES,
    "a_drain_waits_for_the_lifespan_of_a_connection": _OUTLIVES,
    "connections_end_with_the_run_that_they_share": _OUTLIVES,
    "lifespans_end_from_the_inside_after_all_handlers": _OUTLIVES,
    "one_server_may_be_mounted_twice": _OUTLIVES,
    "the_end_of_the_client_cancels_its_handlers_with_a_reason": _OUTLIVES,
    "without_a_shared_run_a_handler_ends_with_its_connection": _OUTLIVES,
    "without_a_shared_run_each_connection_has_its_own_lifespan": _OUTLIVES,
    "a_cancelled_handler_can_read_the_reason_and_is_not_logged": _EXCHANGES,
    "a_resumed_handler_counts_as_a_running_call": _EXCHANGES,
    "a_mounted_server_may_also_run_alone": _EXCHANGES,
    "all_connections_of_a_server_together_have_a_limit": _EXCHANGES,
    "a_second_request_with_an_id_in_use_is_refused": _EXCHANGES,
    "an_id_is_in_use_until_its_cancelled_handler_has_ended": _EXCHANGES,
    "a_cancellation_reaches_one_handler_and_ends_its_messages": _EXCHANGES,
    "each_client_gets_updates_of_its_own_subscriptions": _EXCHANGES,
    "statistics_count_connections_calls_and_listeners": _EXCHANGES,
    "each_subscription_of_a_connection_has_its_id_in_notifications": _EXCHANGES,
    "a_call_takes_no_place_until_its_retry": _EXCHANGES,
    "a_drain_refuses_new_requests_and_lets_calls_finish": _HOST,
    "calls_are_stopped_at_the_deadline_which_counts_from_the_start": _HOST,
    "a_failure_in_the_block_of_a_drain_stops_all_calls_at_once": _HOST,
    "a_server_that_was_drained_may_run_again": _HOST,
    "a_mounted_server_drains_only_its_own_connections": _HOST,
    "the_error_of_a_draining_connection_is_raised_where_it_is_served": _HOST,
    "a_server_that_drains_ends_its_subscriptions_with_their_results": _HOST_OF_EXCHANGES,
    **dict.fromkeys(
        (
            "a_change_after_the_end_of_the_loop_is_ignored",
            "a_drain_ends_a_connection_of_any_kind",
            "a_parked_call_that_is_given_up_is_removed",
            "a_principal_must_have_a_stable_name",
            "a_lost_question_raises_client_gone",
            "a_server_runs_once_at_a_time",
            "a_server_that_does_not_run_is_drained_at_once",
            "a_state_contains_only_the_necessary_data",
            "a_state_expires_by_the_wall_clock",
            "a_stream_that_fails_to_close_leaves_no_connection",
            "a_stream_that_is_served_during_a_drain_is_closed_at_once",
            "the_limits_of_parking_can_be_set",
            "the_number_of_parked_handlers_is_limited",
            "over_http_only_the_user_of_the_session_can_answer",
            "questions_go_on_the_stream_of_their_call",
            "a_drain_waits_for_the_lifespan_of_an_http_server",
            "nurseries_of_lifespans_do_not_wrap_the_exception",
            "the_exception_of_a_lifespan_is_raised_unchanged",
            "a_second_failure_in_the_nursery_of_a_lifespan_makes_a_group",
            "a_question_that_fails_before_it_is_sent_leaves_no_state",
            "the_context_has_the_facts_of_the_current_request",
            "requests_that_wait_for_their_turn_end_with_their_connection",
        ),
        _NO_CONNECTION,
    ),
}


def holds(name: str, transport: str, revision: str) -> bool:
    """Return whether the behaviour of this name holds on this transport, in this revision."""
    if transport == "http+sse" and revision == LATEST:
        return False  # the modern era does not have this transport
    return name not in EXCEPTIONS or not EXCEPTIONS[name].where(transport, revision)


# Tables of cases.


class Table(NamedTuple):
    """A mark `parametrize`, with each row as a `pytest.param`."""

    names: tuple[str, ...]
    rows: list[Any]
    ids: Callable[[Any], object] | None = None

    def read(self, row: Any) -> dict[str, Any]:
        """The values of a row, by their names."""
        return dict(zip(self.names, row.values, strict=True))

    @property
    def mark(self) -> pytest.Mark:
        indirect = [name for name in self.names if name == "transport"]
        return pytest.mark.parametrize(self.names, self.rows, indirect=indirect, ids=self.ids).mark


def tables_of(test: Any) -> list[Table]:
    return [_table(mark) for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]


def _table(mark: pytest.Mark) -> Table:
    names = mark.args[0]
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    ids = mark.kwargs.get("ids")
    rows = []
    for number, row in enumerate(mark.args[1]):
        values = row.values if hasattr(row, "marks") else row if len(names) > 1 else (row,)
        id = getattr(row, "id", None) or (None if ids is None or callable(ids) else ids[number])
        rows.append(pytest.param(*values, marks=getattr(row, "marks", ()), id=id))
    return Table(names, rows, ids if callable(ids) else None)


def _chosen(table: Table, choice: Mapping[str, Collection[Any]]) -> Table:
    """The rows that the mark `contract` selects, otherwise the first row; each in all revisions."""
    wanted = {name: values for name, values in choice.items() if name in table.names}
    if not wanted:
        wanted = {name: (value,) for name, value in table.read(table.rows[0]).items() if name != "revision"}
    rows = [row for row in table.rows if all(table.read(row)[name] in values for name, values in wanted.items())]
    assert rows, f"no row has {wanted}"
    return table._replace(rows=rows)


def _times_transports(name: str, table: Table) -> Table:
    """The table of revisions for each transport.  A test without a revision uses the newest one."""
    rows = []
    for transport in TRANSPORTS:
        for row in table.rows:
            revision = table.read(row).get("revision", LATEST)
            if holds(name, transport, revision):
                # HTTP+SSE is the transport of the oldest revision.
                marks = [pytest.mark.default] if transport == "http+sse" and revision == REVISION_NAMES[0] else []
                id = row.id and f"{transport}-{row.id}"
                rows.append(pytest.param(transport, *row.values, marks=[*marks, *row.marks], id=id))
    return table._replace(names=("transport", *table.names), rows=rows)


# The copies.


@pytest.fixture
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The transport of `connected`.  A case of the contract that does not connect fails.

    A case of the long suite may have no connection in its revision.
    """
    serve, served = TRANSPORTS[request.param], False

    async def serving(*args: Any, **options: Any) -> None:
        nonlocal served
        served = True
        await serve(*args, **options)

    for home in ("session", "server"):
        monkeypatch.setattr(f"trio_mcp.server.{home}.serve_stream", serving)
    yield request.param
    assert served or request.node.get_closest_marker("long"), "the test has made no connection"


def over_transports(test: Any, choice: Mapping[str, Collection[Any]] | None) -> Any:
    """A copy of the test over all transports; None for a test that holds on no transport.

    With a choice the copy has the chosen rows of its tables, at the speeds of the suite.  Without a choice it has all
    rows, and all its cases belong to the long suite.
    """
    tables = tables_of(test)
    if choice is not None:
        unknown = choice.keys() - {name for table in tables for name in table.names}
        assert not unknown, f"{test.__name__} has no {unknown}"
        tables = [_chosen(table, choice) for table in tables]
    revisions = next((table for table in tables if "revision" in table.names), Table((), [pytest.param()]))
    over = _times_transports(test.__name__.removeprefix("test_"), revisions)
    if not over.rows:
        return None
    copied = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copied.__kwdefaults__, copied.__module__ = test.__kwdefaults__, test.__module__
    tables = [over, *(table for table in tables if table is not revisions)]
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name != "parametrize"]
    marks += [pytest.mark.usefixtures("transport").mark, *(table.mark for table in tables)]
    if choice is None:
        marks.insert(0, pytest.mark.long.mark)  # the first mark with a speed decides
    vars(copied)["pytestmark"] = marks
    return copied


def copies(*, contract: bool) -> dict[str, Any]:
    """Copies of the tests of the contract, or of all tests, and the fixtures of their modules."""
    found: dict[str, Any] = {"transport": transport}
    for origin, module in MODULES.items():
        for name, value in vars(module).items():
            if type(value).__name__ == "FixtureFunctionDefinition":
                found[name] = value
            elif name.startswith("test_") and inspect.iscoroutinefunction(value):
                marks: list[pytest.Mark] = getattr(value, "pytestmark", [])
                choice = next((mark.kwargs for mark in marks if mark.name == "contract"), None)
                if choice is not None or not contract:
                    copied = over_transports(value, choice if contract else None)
                    if copied is not None:
                        found[f"test_{origin}__{name.removeprefix('test_')}"] = copied
    return found
