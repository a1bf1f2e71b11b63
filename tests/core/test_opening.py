"""The opening of a client: every kind of answer that a server can give to the probe and to initialize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.core.pairs import CLIENT_INFO, EVERYTHING_OF_A_CLIENT, LIMITS, SERVER_INFO, drain, modern, opened, pair
from tests.requirements import req
from trio_mcp.core import (
    ABSENT,
    LATEST,
    LEGACY,
    META_VERSION,
    REVISIONS,
    Attempt,
    Call,
    ClientProtocol,
    ConnectionLost,
    Error,
    Event,
    InvalidMessage,
    LinkKind,
    Negotiation,
    Notification,
    Offer,
    Opened,
    OpeningFailed,
    PeerMistake,
    Phase,
    Request,
    Response,
    Revision,
    ServerProtocol,
    SessionClosed,
    Terms,
    TimedOut,
    UsageError,
    decode,
    encode,
)

A, B, C, D, E = REVISIONS.values()
ALL = tuple(REVISIONS.values())
NEWER = attrs.evolve(LATEST, name="2027-01-01")
NEWEST = attrs.evolve(LATEST, name="2027-06-01")
CAPABILITIES = {"tools": {}}


def discovered(*versions: Any, **more: Any) -> dict[str, Any]:
    meta = {"io.modelcontextprotocol/serverInfo": SERVER_INFO}
    return {"supportedVersions": list(versions), "capabilities": CAPABILITIES, "_meta": meta, **more}


def chosen(version: str) -> dict[str, Any]:
    return {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": SERVER_INFO}


def refusal(code: int, supported: Any = ABSENT) -> Error:
    return Error(0, code, "no", ABSENT if supported is ABSENT else {"supported": supported, "requested": "x"})


Silence = "silence"
LinkLost = "the link is lost"
InputEnded = "the server has closed its side"
FallBack = "the transport tells the client to fall back"
Unsendable = "the POST is refused"
Reply = Any  # a result, an Error, or one of the five above


@attrs.define
class ScriptedOpening:
    """A client that gets replies of a server in order, with the requests it sent and the events it reported."""

    client: ClientProtocol
    sent: list[str] = attrs.field(factory=list)
    seen: list[Event] = attrs.field(factory=list)

    def take(self, reply: Reply) -> None:
        messages = drain(self.client)
        assert len(messages) == 1
        message = messages[0]
        assert isinstance(message, Request)
        version = message.params.get("protocolVersion") or message.params["_meta"][META_VERSION]
        self.sent.append(f"{message.method} {version}")
        if reply is Silence:
            deadline = self.client.next_deadline()
            assert deadline is not None
            assert not self.client.tick(deadline - 0.1)
            self.seen += self.client.tick(deadline)
        elif reply is LinkLost:
            self.seen += self.client.connection_lost(why="it broke")
        elif reply is InputEnded:
            self.seen += self.client.input_ended("it sends no more")
        elif reply is Unsendable:
            self.seen += self.client.fail(message.id, "HTTP 503")
        elif reply is FallBack:
            self.seen += self.client.fall_back("HTTP 404")
        elif isinstance(reply, Error):
            self.seen += self.client.receive(attrs.evolve(reply, id=message.id), 0.0)
        elif isinstance(reply, InvalidMessage):
            self.seen += self.client.receive(attrs.evolve(reply, answers=message.id), 0.0)
        else:
            self.seen += self.client.receive(Response(message.id, reply), 0.0)


def test_a_modern_only_client_waits_for_the_probe_until_the_deadline() -> None:
    for offer, until in ((BOTH, 5.0), ((E,), 60.0)):
        assert open_with(offer).client.next_deadline() == until


def open_with(offer: tuple[Revision, ...], *replies: Reply) -> ScriptedOpening:
    client = ClientProtocol(Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT, offer))
    client.open(probe_until=5.0, deadline=60.0)
    played = ScriptedOpening(client)
    for reply in replies:
        played.take(reply)
    return played


BOTH = (D, B, E)
PROBE, INITIALIZE = "server/discover 2026-07-28", "initialize 2025-11-25"
GARBAGE = InvalidMessage("this is no answer")


@attrs.frozen
class Case:
    name: str
    offer: tuple[Revision, ...]
    replies: tuple[Reply, ...]
    sent: tuple[str, ...]
    chosen: Revision | None
    why: str
    code: int | None = None  # of the error that the opening failed with


def then_legacy(name: str, reply: Reply, why: str) -> Case:
    """After any answer that is not a recognised modern one the client sends initialize."""
    return Case(name, BOTH, (reply, chosen(D.name)), (PROBE, INITIALIZE), D, why)


CASES = [
    # A server of the modern era answers the probe.
    Case("discover", BOTH, (discovered(E.name),), (PROBE,), E, "2026-07-28"),
    Case("discover, complete", BOTH, (discovered(E.name, resultType="complete"),), (PROBE,), E, "2026-07-28"),
    Case("discover, modern only", (E,), (discovered(E.name, D.name),), (PROBE,), E, "2026-07-28, 2025-11-25"),
    Case("discover, garbage around it", BOTH, (discovered(None, 7, [], E.name, {}),), (PROBE,), E, "2026-07-28"),
    Case(
        "discover, only legacy shared",
        BOTH,
        (discovered("2030-01-01", B.name), chosen(B.name)),
        (PROBE, "initialize 2025-03-26"),
        B,
        "chose 2025-03-26",
    ),
    Case(
        "discover, no shared version", BOTH, (discovered("2030-01-01"),), (PROBE,), None, "we support 2026-07-28, 2025-"
    ),
    Case("discover, no version", BOTH, (discovered(),), (PROBE,), None, "no version"),
    Case(
        "discover names another modern version",
        (E, NEWER),
        (discovered(E.name),),
        ("server/discover 2027-01-01",),
        E,
        "the server supports 2026-07-28",
    ),
    Case(
        "-32022 naming another modern version",
        (D, E, NEWER),
        (refusal(-32022, [E.name, D.name]), discovered(E.name)),
        ("server/discover 2027-01-01", PROBE),
        E,
        "the server supports 2026-07-28",
    ),
    Case(
        "-32022 naming modern versions in turn",
        (E, NEWER, NEWEST),
        (refusal(-32022, [NEWER.name]), refusal(-32022, [NEWEST.name, E.name]), refusal(-32022, [NEWER.name])),
        ("server/discover 2027-06-01", "server/discover 2027-01-01", PROBE),
        None,
        "-32022",
        -32022,
    ),
    Case(
        "-32022 naming only legacy ones",
        BOTH,
        (refusal(-32022, [B.name, D.name]), chosen(D.name)),
        (PROBE, INITIALIZE),
        D,
        "chose 2025-11-25",
    ),
    Case(
        "-32022 naming no version of ours",
        BOTH,
        (refusal(-32022, ["2030-01-01"]),),
        (PROBE,),
        None,
        "2030-01-01",
        -32022,
    ),
    Case("-32022 naming legacy, modern only", (E,), (refusal(-32022, [D.name]),), (PROBE,), None, D.name, -32022),
    Case(
        "-32022 naming the refused version",
        BOTH,
        (refusal(-32022, [D.name, E.name]), discovered(E.name)),
        (PROBE, PROBE),
        E,
        "the server supports 2026-07-28",
    ),
    Case(
        "-32022 naming the refused version, twice",
        BOTH,
        (refusal(-32022, [E.name]), refusal(-32022, [E.name])),
        (PROBE, PROBE),
        None,
        "-32022: 'no'",
        -32022,
    ),
    Case(
        "-32022 naming the refused version, twice, and an older one",
        BOTH,
        (refusal(-32022, [D.name, E.name]), refusal(-32022, [D.name, E.name]), chosen(D.name)),
        (PROBE, PROBE, INITIALIZE),
        D,
        "chose 2025-11-25",
    ),
    Case("-32022 naming no version", BOTH, (refusal(-32022),), (PROBE,), None, "error -32022: 'no'", -32022),
    Case("-32022 with garbage", BOTH, (refusal(-32022, "all"),), (PROBE,), None, "error -32022: 'no'", -32022),
    Case("-32022 with null data", BOTH, (Error(0, -32022, "no", None),), (PROBE,), None, "error -32022", -32022),
    Case("-32020", BOTH, (refusal(-32020, [D.name]),), (PROBE,), None, "error -32020: 'no'", -32020),
    Case("-32021", BOTH, (refusal(-32021),), (PROBE,), None, "error -32021: 'no'", -32021),
    # Any other server answers it.
    *[
        then_legacy(f"{code} to the probe", refusal(code), "the server chose 2025-11-25")
        for code in (-32601, -32602, -32600, -32603, -32700, -32000, -32002, -32001, -32042, 0, 1, 404, -1)
    ],
    then_legacy("-32602 that names versions", refusal(-32602, [E.name]), "chose"),
    then_legacy("an empty result", {}, "chose"),
    then_legacy("versions that are no list", {"supportedVersions": "2026-07-28"}, "chose"),
    then_legacy("a discovery that asks for input", discovered(E.name, resultType="input_required"), "chose"),
    then_legacy("a discovery of an unknown kind", discovered(E.name, resultType="x"), "chose"),
    then_legacy("a discovery of no kind at all", discovered(E.name, resultType=None), "chose"),
    then_legacy("garbage", GARBAGE, "chose"),
    then_legacy("silence", Silence, "chose"),
    then_legacy("the transport falls back", FallBack, "chose"),
    Case("lost while probing", BOTH, (LinkLost,), (PROBE,), None, "it broke"),
    Case("half-closed while probing", BOTH, (InputEnded,), (PROBE,), None, "it sends no more"),
    Case("failed while probing", BOTH, (Unsendable,), (PROBE,), None, "HTTP 503"),
    *[
        Case(f"modern only, {name}", (E,), (reply,), (PROBE,), None, f"no older revision may be used: {why}")
        for name, reply, why in (
            ("-32601", refusal(-32601), "error -32601: 'no'"),
            ("garbage", GARBAGE, "a malformed answer: this is no answer"),
            ("{}", {}, "an answer without a protocol version"),
            (
                "a request for input",
                discovered(E.name, resultType="input_required"),
                "an answer with the unknown resultType 'input_required'",
            ),
            (
                "an unknown kind",
                discovered(E.name, resultType="x" * 900),
                f"an answer with the unknown resultType '{'x' * 20}...",
            ),
            ("fall back", FallBack, "HTTP 404"),
        )
    ],
    # Initialize.
    Case("legacy only", (D, A), (chosen(D.name),), (INITIALIZE,), D, "the server chose 2025-11-25"),
    Case("an older one", (D, A), (chosen(A.name),), (INITIALIZE,), A, "the server chose 2024-11-05"),
    Case(
        "a version we lack", (D, A), (chosen(B.name),), (INITIALIZE,), None, "chose '2025-03-26'; we support 2025-11-25"
    ),
    Case("a version that has no handshake", BOTH, (refusal(1), chosen(E.name)), (PROBE, INITIALIZE), None, "chose"),
    Case("no version", (D,), ({},), (INITIALIZE,), None, "an answer without a protocol version"),
    Case("a version that is no string", (D,), ({"protocolVersion": 1},), (INITIALIZE,), None, "without a protocol"),
    Case("garbage to initialize", (D,), (GARBAGE,), (INITIALIZE,), None, "a malformed answer"),
    Case("modern only, silence", (E,), (Silence,), (PROBE,), None, "no answer in time"),
    Case("silence to initialize", (D,), (Silence,), (INITIALIZE,), None, "no answer in time"),
    Case("silence to both", BOTH, (Silence, Silence), (PROBE, INITIALIZE), None, "no answer in time"),
    Case("lost in initialize", (D,), (LinkLost,), (INITIALIZE,), None, "it broke"),
    Case("half-closed in initialize", (D,), (InputEnded,), (INITIALIZE,), None, "it sends no more"),
    Case("failed in initialize", (D,), (Unsendable,), (INITIALIZE,), None, "HTTP 503"),
    Case("failed in initialize, after the probe", BOTH, (Silence, Unsendable), (PROBE, INITIALIZE), None, "HTTP 503"),
    *[
        Case(f"{code} to initialize", (D,), (refusal(code),), (INITIALIZE,), None, f"error {code}: 'no'", code)
        for code in (-32603, -32601, -32602, -32000, -32022, -32021)
    ],
    Case(
        "-32602 naming no version of ours",
        (D,),
        (refusal(-32602, ["1.0"]),),
        (INITIALIZE,),
        None,
        "the server supports '1.0'",
        -32602,
    ),
    Case(
        "-32602 naming an older one",
        (D, B, A),
        (refusal(-32602, [A.name, B.name]), chosen(B.name)),
        (INITIALIZE, "initialize 2025-03-26"),
        B,
        "the server chose 2025-03-26",
    ),
    Case(
        "-32602 naming the refused version",
        (D, A),
        (refusal(-32602, [D.name]), refusal(-32602, [D.name])),
        (INITIALIZE, INITIALIZE),
        None,
        "error -32602: 'no'",
        -32602,
    ),
    Case("-32603 naming one", (D, B), (refusal(-32603, [B.name]),), (INITIALIZE,), None, "error -32603", -32603),
    # A modern server that was slow to answer says so when it refuses initialize.
    Case(
        "modern and slow",
        BOTH,
        (Silence, refusal(-32022, [E.name]), discovered(E.name)),
        (PROBE, INITIALIZE, PROBE),
        E,
        "the server supports 2026-07-28",
    ),
    *[
        Case(
            f"modern and slow, {code} to initialize",
            BOTH,
            (Silence, refusal(code), discovered(E.name)),
            (PROBE, INITIALIZE, PROBE),
            E,
            "the server supports 2026-07-28",
        )
        for code in (-32601, -32602, -32600, -32000)
    ],
    Case("not slow", BOTH, (refusal(1), refusal(-32601)), (PROBE, INITIALIZE), None, "error -32601: 'no'", -32601),
    *[
        Case(
            f"slow and not modern, {name}",
            BOTH,
            (Silence, refusal(-32603), reply),
            (PROBE, INITIALIZE, PROBE),
            None,
            why,
            -32603,
        )
        for name, reply, why in (
            ("error", refusal(-32601), "error -32601: 'no'; error -32603: 'no'"),
            ("garbage", GARBAGE, "a malformed answer: this is no answer; error -32603: 'no'"),
            ("silence", Silence, "no answer in time; error -32603: 'no'"),
        )
    ],
    Case(
        "slow, and refuses twice",
        BOTH,
        (Silence, refusal(-32603), discovered(D.name), refusal(-32601)),
        (PROBE, INITIALIZE, PROBE, INITIALIZE),
        None,
        "error -32601: 'no'",
        -32601,
    ),
    Case("legacy only, modern server", (D,), (refusal(-32022, [E.name]),), (INITIALIZE,), None, E.name, -32022),
    Case(
        "refusals in a circle",
        BOTH,
        (refusal(1), refusal(-32022, [E.name]), refusal(1), refusal(-32022, [E.name]), refusal(1)),
        (PROBE, INITIALIZE, PROBE, "initialize 2025-03-26", PROBE),
        None,
        "no older revision may be used",
    ),
]


def check(case: Case) -> None:
    played = open_with(case.offer, *case.replies)
    client = played.client
    assert tuple(played.sent) == case.sent
    negotiation = client.negotiation
    assert negotiation is not None
    assert negotiation.chosen is case.chosen
    assert case.why in negotiation.why
    assert [each.tried.split()[0] for each in negotiation.attempts] == [each.split()[0] for each in case.sent]
    assert [each.tried.split()[-1] for each in negotiation.attempts] == [each.split()[-1] for each in case.sent]
    assert negotiation.attempts[-1].answered in negotiation.why
    last = played.seen[-1]
    rest = drain(client)
    if case.chosen is None:
        assert isinstance(last, OpeningFailed)
        assert last.negotiation == negotiation
        assert (None if last.error is None else last.error.code) == case.code
        assert (client.closed, client.opened, client.phase, rest) == (True, False, Phase.FAILED, [])
    else:
        assert last == Opened(Terms(case.chosen, CAPABILITIES, SERVER_INFO))
        assert client.terms == last.terms
        assert (client.closed, client.opened, client.phase) == (False, True, Phase.OPEN)
        # The opening sends no cancellation: "initialize MUST NOT be cancelled", and a legacy server knows no probe.
        assert rest == ([Notification("notifications/initialized")] if case.chosen.handshake else [])
    assert len(played.seen) == 1
    assert (client.waiting, client.next_deadline()) == (0, None)


@req("rtype-03", "rtype-04")
@req("life-12", "life-13", "life-14", "life-17", "life-20", "ver-02", "ver-13", "ver-14", "ver-17")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_answer_of_a_server_leads_to_its_revision_or_failure(case: Case) -> None:
    check(case)


def test_the_negotiation_lists_each_attempt_and_its_answer() -> None:
    played = open_with(BOTH, Silence, refusal(-32022, [E.name, "2030-01-01"]), discovered(E.name))
    assert played.client.negotiation == Negotiation(
        (
            Attempt("server/discover in 2026-07-28", "no answer in time"),
            Attempt("initialize with 2025-11-25", "error -32022: 'no'; the server supports 2026-07-28, '2030-01-01'"),
            Attempt("server/discover in 2026-07-28", "the server supports 2026-07-28"),
        ),
        E,
        "the server supports 2026-07-28",
    )


def test_the_negotiation_is_short_even_if_the_answer_is_long() -> None:
    for reply in (refusal(-32602, ["x" * 1000] * 1000), Error(0, 1, "x" * 10_000), chosen("x" * 1000)):
        played = open_with((D,), reply)
        assert played.client.negotiation is not None
        assert len(played.client.negotiation.why) < 500


@req("life-20")
def test_the_versions_in_an_error_to_initialize_are_surfaced() -> None:
    data = {"supported": ["2024-10-07"], "requested": D.name}
    (failed,) = open_with((D,), Error(0, -32602, "Unsupported protocol version", data)).seen
    assert isinstance(failed, OpeningFailed)
    assert failed.error is not None
    assert failed.error.data == data
    assert "2024-10-07" in failed.negotiation.why


def test_late_answers_to_the_probe_are_dropped() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    client.open(probe_until=5.0)
    (probe,) = drain(client)
    assert isinstance(probe, Request)
    assert not client.tick(5.0)
    (initialize,) = drain(client)
    assert isinstance(initialize, Request)
    for late in (Response(probe.id, discovered(E.name)), Error(probe.id, -32022, "no", {"supported": [E.name]})):
        assert not client.receive(late, 6.0)
    assert isinstance(client.receive(Response(initialize.id, chosen(D.name)), 7.0)[0], Opened)
    assert not client.receive(Response(probe.id, discovered(E.name)), 8.0)


def test_an_answer_that_comes_with_the_deadline_is_too_late() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    client.open(probe_until=5.0)
    assert not client.receive(Response(1, discovered(E.name)), 5.0)
    assert client.phase is Phase.INITIALIZING
    only = ClientProtocol(Offer(CLIENT_INFO, revisions=(E,)))
    only.open(deadline=5.0)
    (failed,) = only.receive(Response(1, discovered(E.name)), 5.0)
    assert isinstance(failed, OpeningFailed)


@pytest.mark.parametrize(
    ("offer", "probe_until", "deadline", "first"),
    [
        (ALL, 5.0, 60.0, 5.0),
        (ALL, 60.0, 5.0, 5.0),
        (ALL, None, 5.0, 5.0),
        (ALL, 5.0, None, 5.0),
        (ALL, None, None, None),
        ((E,), None, 5.0, 5.0),
        ((D,), 5.0, None, None),
        ((D,), 5.0, 60.0, 60.0),
    ],
    ids=str,
)
def test_no_step_of_the_opening_outlasts_the_deadline(offer: Any, probe_until: Any, deadline: Any, first: Any) -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, revisions=offer))
    client.open(probe_until=probe_until, deadline=deadline)
    assert client.next_deadline() == first
    for _ in range(3):
        client.tick(deadline or 0.0)
    assert client.closed is (deadline is not None)


def test_the_time_for_the_probe_can_be_extended() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    client.open(probe_until=5.0, deadline=60.0)
    (probe,) = drain(client)
    assert isinstance(probe, Request)
    for now in (4.0, 8.0):
        client.put_off(now + 5.0)
        assert client.next_deadline() == now + 5.0
        assert not client.tick(now + 4.0)
        assert client.phase is Phase.PROBING
    assert isinstance(client.receive(Response(probe.id, discovered(E.name)), 12.5)[0], Opened)
    client.put_off(99.0)  # the probe has ended
    assert client.next_deadline() is None


def test_a_server_that_does_not_answer_the_extended_probe_is_legacy() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    client.open(probe_until=5.0)
    client.put_off(9.0)
    assert not client.tick(9.0)
    _, initialize = drain(client)
    assert isinstance(initialize, Request)
    assert initialize.method == "initialize"
    client.put_off(99.0)
    assert client.next_deadline() is None


@pytest.mark.parametrize("offer", [ALL, (E,)], ids=str)
def test_the_probe_cannot_be_extended_beyond_the_deadline(offer: Any) -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, revisions=offer))
    client.open(probe_until=5.0, deadline=10.0)
    for until in (99.0, 5.0):
        client.put_off(until)
        assert client.next_deadline() == 10.0
    (failed,) = client.tick(10.0)
    assert isinstance(failed, OpeningFailed)
    assert failed.negotiation.attempts == (Attempt("server/discover in 2026-07-28", "no answer in time"),)


def test_the_negotiation_lists_no_attempt_that_was_not_made() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    client.open(deadline=60.0)
    assert len(drain(client)) == 1
    (failed,) = client.tick(60.0)
    assert isinstance(failed, OpeningFailed)
    assert failed.negotiation.attempts == (Attempt("server/discover in 2026-07-28", "no answer in time"),)
    assert drain(client) == []


@req("life-17")
def test_a_ping_fails_when_the_opening_fails() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO, revisions=(D,)))
    client.open()
    id = client.request("ping")
    lost, failed = client.receive(refusal_to(1), 0.0)
    assert isinstance(lost, ConnectionLost)
    assert lost.id == id
    assert isinstance(failed, OpeningFailed)
    with pytest.raises(SessionClosed):
        client.request("ping")
    assert not client.connection_lost()


def refusal_to(id: int) -> Error:
    return Error(id, -32603, "no")


def test_the_loss_of_an_open_link_does_not_report_the_opening_again() -> None:
    for revision in (D, E):
        made = opened(revision)
        id = made.client.request("tools/list")
        assert made.client.connection_lost(why="gone") == [ConnectionLost(id, "tools/list", "gone")]


def test_open_and_fall_back_can_be_called_only_once() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    with pytest.raises(UsageError, match="being probed"):
        client.fall_back("x")
    client.open()
    with pytest.raises(UsageError, match="open must be called only once"):
        client.open()
    client.fall_back("x")
    with pytest.raises(UsageError, match="being probed"):
        client.fall_back("x")
    client.receive(Response(2, chosen(D.name)), 0.0)
    for act in (client.open, lambda: client.fall_back("x")):
        with pytest.raises(UsageError):
            act()
    assert len(client.outgoing()) == 3
    with pytest.raises(UsageError, match="open must be called only once"):
        ClientProtocol(Offer(CLIENT_INFO), terms=Terms(E)).open()


def test_a_link_that_is_lost_before_it_is_opened_cannot_be_opened() -> None:
    for offer in (ALL, LEGACY):
        client = ClientProtocol(Offer(CLIENT_INFO, revisions=offer))
        client.connection_lost()
        with pytest.raises(SessionClosed):
            client.open()
        assert client.phase is Phase.NEW


@req("life-01", "life-04")
@pytest.mark.parametrize("revision", ALL, ids=str)
def test_the_messages_of_the_opening_cannot_be_sent_by_hand(revision: Revision) -> None:
    client = opened(revision).client
    for act in (lambda: client.request("initialize"), lambda: client.notify("notifications/initialized")):
        with pytest.raises(UsageError, match=r"must be sent with ClientProtocol\.open"):
            act()
    assert not client.outgoing()


@req("meta-10", "meta-12", "ver-10")
def test_every_modern_request_carries_its_terms() -> None:
    made = pair(client_speaks=ALL, server_speaks=ALL)
    made.client.open()
    made.pump()
    made.client.request("tools/call", {"name": "x", "_meta": {"com.example/a": 1}}, progress=True)
    made.client.request("tools/list")
    made.client.request("subscriptions/listen", {"_meta": {META_VERSION: "1"}})
    made.pump()
    requests = [message for message in made.sent if isinstance(message, Request)]
    assert len(requests) == 4
    for message in requests:
        meta = message.params["_meta"]
        assert meta[META_VERSION] == E.name
        assert meta["io.modelcontextprotocol/clientCapabilities"] == {**EVERYTHING_OF_A_CLIENT, "roots": {}}
        assert meta["io.modelcontextprotocol/clientInfo"] == CLIENT_INFO
        assert "io.modelcontextprotocol/logLevel" not in meta
    assert requests[1].params["_meta"]["com.example/a"] == 1
    assert requests[1].params["_meta"]["progressToken"] == requests[1].id
    calls = [event for event in made.server_saw if isinstance(event, Call)]
    assert len(calls) == 3


@req("meta-10")
def test_a_client_without_capabilities_declares_an_empty_object_each_time() -> None:
    made = opened(E, {})
    made.client.request("tools/list")
    (message,) = drain(made.client)
    assert isinstance(message, Request)
    assert message.params["_meta"]["io.modelcontextprotocol/clientCapabilities"] == {}


@req("xtask-02")
def test_one_request_may_declare_other_capabilities() -> None:
    made, key = opened(E, {"sampling": {}}), "io.modelcontextprotocol/clientCapabilities"
    for meta in ({key: {"roots": {}}}, {}):
        made.client.request("tools/list", {"_meta": meta})
    messages = [message for message in drain(made.client) if isinstance(message, Request)]
    assert [message.params["_meta"][key] for message in messages] == [{"roots": {}}, {"sampling": {}}]


@pytest.mark.parametrize("revision", LEGACY, ids=str)
def test_a_legacy_request_does_not_carry_terms(revision: Revision) -> None:
    made = opened(revision)
    made.client.log_level = "debug"
    made.client.request("tools/list", {"cursor": "c"})
    assert drain(made.client) == [Request(2, "tools/list", {"cursor": "c"})]


@pytest.mark.parametrize("garbled", ["instructions", "capabilities", "serverInfo", "_meta"])
@pytest.mark.parametrize("wrong", [7, None, [], "x"], ids=repr)
def test_malformed_details_of_the_server_do_not_fail_the_opening(garbled: str, wrong: Any) -> None:
    if garbled == "instructions" and wrong == "x":
        wrong = {}
    for played in (
        open_with((E,), discovered(E.name, **{garbled: wrong})),
        open_with((D,), {**chosen(D.name), garbled: wrong}),
    ):
        (event,) = played.seen
        assert isinstance(event, Opened)
        assert played.client.instructions is None
        if garbled == "capabilities":
            assert event.terms.capabilities == {}
        assert event.terms.identity in (SERVER_INFO, None)


@req("ver-12", "life-17")
def test_a_legacy_client_can_show_which_versions_a_modern_server_speaks() -> None:
    made = pair(client_speaks=LEGACY, server_speaks=(E,))
    made.client.open()
    made.pump()
    (failed,) = made.client_saw
    assert isinstance(failed, OpeningFailed)
    assert "the server supports 2026-07-28" in failed.negotiation.why
    assert made.methods() == ["initialize"]


@req("ver-14", "ver-02")
def test_a_slow_modern_server_is_recognised_after_initialize() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    server = ServerProtocol(Offer(SERVER_INFO, revisions=(E,)))
    client.open(probe_until=5.0, deadline=60.0)
    late = drain(client)
    client.tick(5.0)
    for message in late + drain(client):
        server.receive(message, 6.0)
    answers = drain(server)
    assert len(answers) == 2
    for message in answers:
        assert not client.receive(message, 7.0)
    for message in drain(client):
        server.receive(message, 8.0)
    (event,) = [event for message in drain(server) for event in client.receive(message, 9.0)]
    assert isinstance(event, Opened)
    assert event.terms.revision is E


@req("trans-05", "mrtr-01")
@pytest.mark.parametrize("method", ["sampling/createMessage", "roots/list", "elicitation/create", "ping", "no/such"])
def test_in_the_modern_era_the_client_answers_no_requests(method: str) -> None:
    probing = ClientProtocol(Offer(CLIENT_INFO, revisions=(E,)))
    probing.open()
    probing.outgoing()
    for client in (opened(E).client, probing):
        for request in (Request(1, method), Request(1, method, {"_meta": 7})):
            (event,) = client.receive(request, 0.0)
            assert isinstance(event, PeerMistake)
            assert "not answered" in event.why
            assert (client.outgoing(), client.serving) == ([], 0)


@req("trans-05")
@pytest.mark.parametrize("line", [b"starting up", b"[]", b'{"jsonrpc":"1.0"}', b'{"jsonrpc":"2.0","id":1}'])
def test_a_stray_line_is_answered_in_the_legacy_era_only(line: bytes) -> None:
    for revision in (D, E):
        client = opened(revision).client
        (event,) = client.receive(decode(line, LIMITS), 0.0)
        assert isinstance(event, PeerMistake)
        assert len(client.outgoing()) == (1 if revision is D else 0)
        client.receive(Request(1, "no/such"), 0.0)
        assert len(client.outgoing()) == (1 if revision is D else 0)


def test_a_server_that_prints_its_input_gets_one_error_for_each_request() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO))
    client.open()
    lines = [encode(message) for message in drain(client)]
    errors = 0
    while lines:
        (event,) = client.receive(decode(b"Received: " + lines.pop(0), LIMITS), 0.0)
        assert isinstance(event, PeerMistake)
        lines += [encode(message) for message in drain(client)]
        errors += 1
        assert errors <= 2, "only the request, and the error about the first stray line"
    client.fall_back("the server is not modern")
    assert len(drain(client)) == 1
    client.receive(decode(b"Received: initialize", LIMITS), 0.0)
    assert len(drain(client)) == 1, "after a request of ours there is one error again"
    client.receive(Request("a", "no/such"), 0.0)
    assert len(drain(client)) == 1, "a request with an id is always answered"


@pytest.mark.parametrize("link", list(LinkKind), ids=lambda link: link.name)
def test_no_kind_of_link_cancels_the_probe_or_initialize(link: LinkKind) -> None:
    acts: list[Callable[[ClientProtocol], object]] = [
        lambda client: client.tick(5.0),
        lambda client: client.fall_back("x"),
        lambda client: client.receive(Error(1, -32601, "no"), 0.0),
    ]
    for act in acts:
        client = ClientProtocol(Offer(CLIENT_INFO), link=link)
        client.open(probe_until=5.0, deadline=6.0)
        act(client)
        client.tick(6.0)
        assert client.phase is Phase.FAILED or client.waiting == 0
        assert not any(isinstance(message, Notification) for message, _ in client.outgoing())


# On HTTP the revision decides the meaning of a cancellation and of a lost stream.  The opening agrees on the revision.

HTTP = [LinkKind.SESSION, LinkKind.EXCHANGE]
each_http = pytest.mark.parametrize("link", HTTP, ids=lambda link: link.name)
each_link = pytest.mark.parametrize("link", list(LinkKind), ids=lambda link: link.name)
NEGOTIATIONS = [
    pytest.param((E,), (discovered(E.name),), LinkKind.EXCHANGE, id="modern"),
    pytest.param(BOTH, (discovered(E.name),), LinkKind.EXCHANGE, id="modern, of both"),
    pytest.param(BOTH, (refusal(-32601), chosen(D.name)), LinkKind.SESSION, id="legacy, after the probe"),
    pytest.param(BOTH, (FallBack, chosen(D.name)), LinkKind.SESSION, id="legacy, by the transport"),
    pytest.param(BOTH, (Silence, chosen(B.name)), LinkKind.SESSION, id="older, after silence"),
    pytest.param(BOTH, (discovered(B.name), chosen(B.name)), LinkKind.SESSION, id="legacy, by discovery"),
    pytest.param((D,), (chosen(D.name),), LinkKind.SESSION, id="legacy alone"),
    pytest.param((D, A), (chosen(A.name),), LinkKind.SESSION, id="2024-11-05"),
    pytest.param(
        BOTH, (Silence, refusal(-32022, [E.name]), discovered(E.name)), LinkKind.EXCHANGE, id="modern, after all"
    ),
]


def started(link: LinkKind, offer: tuple[Revision, ...] = BOTH) -> ClientProtocol:
    client = ClientProtocol(Offer(CLIENT_INFO, EVERYTHING_OF_A_CLIENT, offer), link=link)
    client.open(probe_until=5.0, deadline=60.0)
    return client


@req("cancel-15", "cancel-16", "http-28", "http-29", "http-114")
@each_link
@pytest.mark.parametrize(("offer", "replies", "on_http"), NEGOTIATIONS)
def test_the_agreed_revision_decides_the_rules_of_the_link(
    link: LinkKind, offer: tuple[Revision, ...], replies: tuple[Reply, ...], on_http: LinkKind
) -> None:
    played = ScriptedOpening(started(link, offer))
    for reply in replies:
        played.take(reply)
    client = played.client
    assert isinstance(played.seen[-1], Opened)
    means = link if link is LinkKind.DUPLEX else on_http
    assert client.link is means
    client.outgoing()
    told = [] if means is LinkKind.EXCHANGE else ["notifications/cancelled"]

    def notes() -> list[str]:
        return [message.method for message in drain(client) if isinstance(message, Notification)]

    assert client.cancel(client.request("tools/list"))
    assert notes() == told
    id = client.request("tools/list", deadline=99.0)
    assert client.tick(99.0) == [TimedOut(id, "tools/list")]
    assert notes() == told
    id = client.request("tools/list")
    if means is LinkKind.DUPLEX:
        with pytest.raises(UsageError, match="this link is a single stream"):
            client.connection_lost(id)
    else:
        assert client.connection_lost(id, "reset") == (
            [ConnectionLost(id, "tools/list", "reset")] if means is LinkKind.EXCHANGE else []
        )
    assert client.waiting == (0 if means is LinkKind.EXCHANGE else 1)
    assert len(client.connection_lost()) == client.waiting + (means is not LinkKind.EXCHANGE)


@each_http
@pytest.mark.parametrize("offer", [BOTH, (E,)], ids=["both eras", "modern only"])
def test_the_loss_of_the_stream_of_the_probe_ends_the_opening(link: LinkKind, offer: tuple[Revision, ...]) -> None:
    client = started(link, offer)
    (failed,) = client.connection_lost(about=1, why="reset")
    assert isinstance(failed, OpeningFailed)
    assert failed.negotiation == Negotiation((Attempt("server/discover in 2026-07-28", "reset"),), None, "reset")


@each_http
@pytest.mark.parametrize("act", [lambda c: c.tick(5.0), lambda c: c.fall_back("x")], ids=["silence", "fall back"])
def test_the_loss_of_the_stream_of_initialize_does_not_end_the_opening(link: LinkKind, act: Any) -> None:
    client = started(link)
    assert not act(client)
    (_, initialize) = drain(client)
    assert isinstance(initialize, Request)
    ping = client.request("ping")
    for about in (1, initialize.id, ping):  # the late end of the stream of the probe has no effect either
        assert not client.connection_lost(about=about)
    assert client.cancel(ping)
    assert [type(message) for message in drain(client)] == [Request, Notification]
    assert client.fail(client.request("ping"), "HTTP 500") == [ConnectionLost(4, "ping", "HTTP 500")]
    assert isinstance(client.receive(Response(initialize.id, chosen(D.name)), 6.0)[0], Opened)


@each_http
def test_the_loss_of_the_stream_of_a_second_probe_ends_the_opening(link: LinkKind) -> None:
    client = started(link)
    client.tick(5.0)
    ping = client.request("ping")
    assert not client.receive(attrs.evolve(refusal(-32022, [E.name]), id=2), 6.0)
    client.outgoing()
    assert client.connection_lost(ping) == [ConnectionLost(ping, "ping", "the link was lost")]
    (failed,) = client.connection_lost(about=4)
    assert isinstance(failed, OpeningFailed)
    assert not client.outgoing()


@each_http
@pytest.mark.parametrize("by_stream", [True, False])
def test_the_rules_are_those_of_the_adopted_revision_not_of_the_tried_one(link: LinkKind, by_stream: bool) -> None:
    assert E.http is not None
    odd = attrs.evolve(NEWER, http=attrs.evolve(E.http, disconnect_cancels=False))
    tried, adopted = (odd, E) if by_stream else (attrs.evolve(NEWEST, http=E.http), odd)
    played = ScriptedOpening(started(link, (tried, adopted)))
    assert played.client.link is (LinkKind.SESSION if by_stream else LinkKind.EXCHANGE)
    played.take(discovered(adopted.name))
    assert played.client.link is (LinkKind.EXCHANGE if by_stream else LinkKind.SESSION)


@each_link
@pytest.mark.parametrize("revision", ALL, ids=str)
def test_known_terms_decide_the_kind_of_link_from_the_start(link: LinkKind, revision: Revision) -> None:
    client = ClientProtocol(Offer(CLIENT_INFO), link=link, terms=Terms(revision))
    legacy_or_not = LinkKind.SESSION if revision.handshake else LinkKind.EXCHANGE
    assert client.link is (link if link is LinkKind.DUPLEX else legacy_or_not)


def test_a_client_that_knows_its_server_makes_one_exchange_without_opening() -> None:
    client = ClientProtocol(Offer(CLIENT_INFO), link=LinkKind.EXCHANGE, terms=Terms(E, {"tools": {}}))
    assert client.phase is Phase.OPEN
    client.request("tools/call", {"name": "x"})
    (message,) = drain(client)
    expected = modern(1, "tools/call", {"name": "x"})
    assert isinstance(message, Request)
    assert message.params["_meta"].keys() == {*expected.params["_meta"], "io.modelcontextprotocol/clientInfo"}
