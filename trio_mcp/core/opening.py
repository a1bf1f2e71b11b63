"""The client's end of a link: finding out what the server speaks, then keeping to it.

A server of the modern era answers `server/discover`; one of the legacy era answers it with some error, with nonsense,
or not at all, and wants `initialize`.  So the client probes first, if it speaks a modern revision, and the table
`OPENING` says what follows from what it hears. "The fallback MUST NOT be keyed to one specific error code": whatever is
not a recognised modern answer means legacy.  A modern server that only took too long to answer the probe refuses
`initialize`, in whatever words, and is probed again, for as long as there is time.  No revision that the server has
refused is tried once more, so the opening ends whatever it is told.  What was tried, what came back, what was chosen
and why is kept as a `Negotiation`, because that is what every report of a connection that does not open lacks.

To pin a revision, offer only that one.  A modern-only client probes too (ver-13): a legacy server then fails at once
and for a stated reason, instead of serving a request under rules the client does not know.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any, Final

import attrs

from trio_mcp.core.errors import (
    INVALID_PARAMS,
    MODERN_ERRORS,
    UNSUPPORTED_VERSION,
    RequestError,
    UsageError,
    shown,
)
from trio_mcp.core.jsonrpc import ABSENT, CachedResult, Error, Event, Id, JsonObject, Message, Request, Response
from trio_mcp.core.meta import meta_of
from trio_mcp.core.outcomes import Answered, ConnectionLost, InvalidAnswer, Outcome, PeerMistake, Refused, TimedOut
from trio_mcp.core.peer import Peer
from trio_mcp.core.records import record
from trio_mcp.core.revisions import (
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_SERVER_INFO,
    META_VERSION,
    REVISIONS,
    Revision,
    Role,
)
from trio_mcp.core.session import Opened, SessionProtocol
from trio_mcp.core.state import LinkKind
from trio_mcp.core.terms import NOTHING, Terms

__all__ = [
    "OPENING",
    "Attempt",
    "ClientProtocol",
    "Negotiation",
    "OpeningAction",
    "OpeningEvent",
    "OpeningFailed",
    "Phase",
]

# life-20: -32602 is how the lifecycle pages of the legacy era show it.
_ABOUT_VERSIONS: Final = frozenset({UNSUPPORTED_VERSION, INVALID_PARAMS})


class Phase(enum.Enum):
    NEW = enum.auto()
    PROBING = enum.auto()
    INITIALIZING = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()


class OpeningEvent(enum.Enum):
    AGREED = enum.auto()  # on a revision that both sides speak, under its own rules
    OTHER_MODERN = enum.auto()  # what we asked for is not served, a modern revision of ours is
    OTHER_LEGACY = enum.auto()  # likewise, a legacy one
    SHARES_NONE = enum.auto()
    NOT_MODERN = enum.auto()  # the probe got any other error, nonsense, or silence
    REFUSED = enum.auto()  # for a reason that is not the version
    REFUSED_LATE = enum.auto()  # likewise, by a server that said nothing to the probe while it was waited for
    LOST = enum.auto()


class OpeningAction(enum.Enum):
    ADOPT = enum.auto()
    PROBE = enum.auto()
    INITIALIZE = enum.auto()
    GIVE_UP = enum.auto()


OPENING: dict[Phase, dict[OpeningEvent, tuple[Phase, OpeningAction]]] = {
    Phase.PROBING: {
        OpeningEvent.AGREED: (Phase.OPEN, OpeningAction.ADOPT),
        OpeningEvent.OTHER_MODERN: (Phase.PROBING, OpeningAction.PROBE),
        OpeningEvent.OTHER_LEGACY: (Phase.INITIALIZING, OpeningAction.INITIALIZE),
        OpeningEvent.SHARES_NONE: (Phase.FAILED, OpeningAction.GIVE_UP),
        OpeningEvent.NOT_MODERN: (Phase.INITIALIZING, OpeningAction.INITIALIZE),
        # ver-14: only a modern server refuses so, and it is not asked to initialize.
        OpeningEvent.REFUSED: (Phase.FAILED, OpeningAction.GIVE_UP),
        OpeningEvent.LOST: (Phase.FAILED, OpeningAction.GIVE_UP),
    },
    Phase.INITIALIZING: {
        OpeningEvent.AGREED: (Phase.OPEN, OpeningAction.ADOPT),
        OpeningEvent.OTHER_MODERN: (Phase.PROBING, OpeningAction.PROBE),
        OpeningEvent.OTHER_LEGACY: (Phase.INITIALIZING, OpeningAction.INITIALIZE),
        OpeningEvent.SHARES_NONE: (Phase.FAILED, OpeningAction.GIVE_UP),
        OpeningEvent.REFUSED: (Phase.FAILED, OpeningAction.GIVE_UP),
        OpeningEvent.REFUSED_LATE: (Phase.PROBING, OpeningAction.PROBE),
        OpeningEvent.LOST: (Phase.FAILED, OpeningAction.GIVE_UP),
    },
}
_BY_HAND_NEVER = frozenset({"initialize", "notifications/initialized"})


@record
class Attempt:
    tried: str
    answered: str


@record
class Negotiation:
    """What was tried, what came back, what was chosen (None: nothing) and why."""

    attempts: tuple[Attempt, ...]
    chosen: Revision | None
    why: str


@record
class OpeningFailed(Event):
    """The link did not open, and is closed.  `error` is what the server refused with, if it did."""

    negotiation: Negotiation
    error: RequestError | None


@record
class _AnswerMeaning:
    """What one answer means: for the table, in words, and what to go on with."""

    heard: OpeningEvent
    said: str
    revision: Revision | None = None
    result: JsonObject = attrs.field(factory=dict)
    error: RequestError | None = None


class ClientProtocol(SessionProtocol):
    """The client's end of a link.  `open` starts the negotiation; it ends in `Opened` or `OpeningFailed`.

    With `terms` the link is open from the start: that is how one exchange is made with a server already known.  Any
    `link` but DUPLEX says that this is HTTP; which of the two it is then follows from the revision that is spoken.
    """

    _ROLE = Role.CLIENT

    def _set_up(self) -> None:
        self.negotiation: Negotiation | None = None
        self.instructions: str | None = None
        self.log_level: str | None = None
        """From which level on modern requests ask for log messages, unless they say so themselves; None: for none."""
        self.phase = Phase.NEW
        if self.terms is not None:
            self.phase = Phase.OPEN
            self._speak(self.terms.revision)
        self._allowed: set[str] = set()  # methods that may be sent, whatever their params
        self._ours: dict[tuple[Revision, str | None], CachedResult] = {}  # by revision and log level
        self._attempts: list[Attempt] = []
        self._trying: Revision | None = None
        self._refused: set[Revision | None] = set()  # by the server, though it may be asked in another one
        self._denied: set[Revision | None] = set()  # refused once, by a server that says it speaks them
        self._opening_id: int | None = None
        self._deadline: float | None = None
        self._last = False  # the probe has all the time that is left
        self._unheard: Revision | None = None  # the probe that has had no answer in time
        self._refusal: _AnswerMeaning | None = None  # what became of `initialize` after that
        self._complained = 0  # of something without an id, when our next request was to have this one

    def open(self, *, probe_until: float | None = None, deadline: float | None = None) -> None:
        """Start the negotiation.

        A server that has not answered the probe by `probe_until` is taken for a legacy one, if it may be one; what has
        not ended by `deadline` is given up.  Raises `UsageError` when called again.
        """
        if self.phase is not Phase.NEW:
            raise UsageError("a client session is opened once")
        self._deadline = deadline
        if (modern := self.offer.modern) is not None:
            may_be_older = any(each.handshake for each in self.offer.revisions)
            until = (each for each in (probe_until if may_be_older else None, deadline) if each is not None)
            self._probe(modern, min(until, default=None))
            self.phase = Phase.PROBING
        else:
            self._initialize(self.offer.legacy)
            self.phase = Phase.INITIALIZING

    def put_off(self, probe_until: float) -> None:
        """The transport has seen that nobody has read the probe yet, so that a legacy server is none by its silence.

        It has until then to answer, as `open` has it.  Nothing changes unless it is being probed.
        """
        if self.phase is Phase.PROBING and not self._last:
            assert self._opening_id is not None
            until = probe_until if self._deadline is None else min(probe_until, self._deadline)
            self._deadlines.clear()  # while a server is probed, it is asked nothing else
            self._schedule(until, self._opening_id)
            self._last = until == self._deadline

    def fall_back(self, why: str) -> list[Event]:
        """The transport has seen that the probed server is not modern.  Raises unless it is being probed."""
        if self.phase is not Phase.PROBING:
            raise UsageError("only a server that is being probed can turn out to be a legacy one")
        assert self._opening_id is not None
        self.cancel(self._opening_id)
        return self._go_on(self._not_modern(why))

    # What we send.

    def request(
        self,
        method: str,
        params: JsonObject | None = None,
        *,
        deadline: float | None = None,
        progress: bool = False,
        about: Id | None = None,
        undeclared: bool = False,
    ) -> int:
        """As `SessionProtocol.request`.  What the terms of the link have allowed once, they allow from then on."""
        terms = self.terms
        if terms is None or method not in self._allowed:
            id = super().request(
                method, params, deadline=deadline, progress=progress, about=about, undeclared=undeclared
            )
            conditional = terms is None or any(need.method == method for need in terms.revision.conditional_needs)
            if not conditional and not undeclared:
                self._allowed.add(method)
            return id
        params, more = params or {}, None
        if progress or type(params) is not dict or "_meta" in params:
            params = self._spoken(terms, params)
        elif not terms.revision.handshake:
            more = self._said(terms.revision)
        return self._ask(method, params, more, deadline, progress, about)

    def _spoken(self, terms: Terms, params: JsonObject) -> JsonObject:
        """A modern request says under which terms it is made."""
        return params if terms.revision.handshake else self._with_meta(terms.revision, params)

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """As `SessionProtocol.notify`; to a server that is being probed nothing is sent either: False."""
        if self.phase is Phase.PROBING and method not in _BY_HAND_NEVER:
            return False
        return super().notify(method, params, about=about)

    def _terms_for(self, method: str, about: Id | None) -> Terms:
        if method in _BY_HAND_NEVER:
            raise UsageError(f"{method} is sent by ClientProtocol.open, not by hand")
        if self.phase is Phase.INITIALIZING and self._trying is not None:
            return Terms(self._trying)  # life-05: a ping may be sent, and `SessionProtocol` lets nothing else pass
        return super()._terms_for(method, about)

    def _with_meta(self, revision: Revision, params: JsonObject) -> JsonObject:
        given, said = meta_of("params", params), self._said(revision)["_meta"]
        if META_LOG_LEVEL in given:  # of all that is said so, this alone is for the caller to choose
            said = {**said, META_LOG_LEVEL: given[META_LOG_LEVEL]}
        return {**params, "_meta": {**given, **said}}

    def _said(self, revision: Revision) -> CachedResult:
        """What every request of this revision says of its terms, and which is written once."""
        said = self._ours.get((revision, self.log_level))
        if said is None:
            ours = {
                META_VERSION: revision.name,
                META_CLIENT_CAPABILITIES: self.declared(revision),
                META_CLIENT_INFO: self.offer.info_in(revision),
            }
            level = {} if self.log_level is None else {META_LOG_LEVEL: self.log_level}
            said = self._ours[revision, self.log_level] = CachedResult({"_meta": {**level, **ours}})
        return said

    def _speak(self, revision: Revision) -> None:
        """On HTTP it is the revision that says what a cancellation and a lost stream mean."""
        if self.link is not LinkKind.DUPLEX:
            # 2024-11-05 was made for HTTP+SSE, which is one stream.  A server that agrees to it on Streamable HTTP all
            # the same keeps a session, like any other of its era.
            by_stream = revision.http is not None and revision.http.disconnect_cancels
            self.link = LinkKind.EXCHANGE if by_stream else LinkKind.SESSION

    def _probe(self, revision: Revision, until: float | None) -> None:
        self._speak(revision)
        self._opening_id = Peer.request(self, "server/discover", self._with_meta(revision, {}), deadline=until)
        self._trying, self._last = revision, until == self._deadline

    def _initialize(self, revision: Revision | None) -> None:
        assert revision is not None  # the table leads here only where a legacy revision is on offer
        self._speak(revision)
        params = {
            "protocolVersion": revision.name,
            "capabilities": self.declared(revision),
            "clientInfo": self.offer.info_in(revision),
        }
        self._opening_id = Peer.request(self, "initialize", params, deadline=self._deadline)
        self._trying = revision

    # What the server sends.

    def receive(
        self,
        message: Message,
        now: float,
        *,
        about: Hashable | None = None,
        principal: Any = None,
        headers: Mapping[str, str] = NOTHING,
    ) -> list[Event]:
        """As `SessionProtocol.receive`."""
        if type(message) is Response and self._opening_id is None:  # there is nobody but the caller to judge it
            return Peer.receive(self, message, now, about=about)
        return super().receive(message, now, about=about, principal=principal, headers=headers)

    @property
    def _answers_nothing(self) -> bool:
        """trans-05: in the modern era the client writes no responses, and nobody can be waiting for one."""
        revision = self.offer.legacy if self.terms is None else self.terms.revision
        return revision is None or not revision.handshake

    def _refuse_call(self, request: Request, code: int, why: str, data: Any = None) -> list[Event]:
        if not self._answers_nothing:
            return super()._refuse_call(request, code, why, data)
        self._forget(request.id)
        return [PeerMistake(f"{why}; not answered")]

    def _refuse_at_once(self, error: Error, events: list[Event], arrival: Any, why: str = "") -> None:
        if self._answers_nothing:
            events.append(PeerMistake(f"{why or error.message}; not answered"))
        elif error.id is None and self._complained == self._next_id:
            # It may be our own complaint, which a server repeats that prints whatever it reads: without a request of
            # ours in between, the two could go on for ever.
            events.append(PeerMistake(f"{why or error.message}; not answered once more"))
        else:
            if error.id is None:
                self._complained = self._next_id
            super()._refuse_at_once(error, events, arrival, why)

    def _judge_outcome(self, event: Event) -> list[Event]:
        if not isinstance(event, Outcome) or event.id != self._opening_id:
            return [event]
        return self._go_on(self._read_probe(event) if self.phase is Phase.PROBING else self._read_initialize(event))

    def _go_on(self, found: _AnswerMeaning) -> list[Event]:
        assert self._trying is not None
        how = "initialize with" if self._trying.handshake else "server/discover in"
        self._attempts.append(Attempt(f"{how} {self._trying}", found.said))
        self._opening_id = None
        self.phase, deed = OPENING[self.phase][found.heard]
        if deed is OpeningAction.ADOPT:
            return self._adopt(found)
        if deed is OpeningAction.GIVE_UP:
            self.negotiation = Negotiation(tuple(self._attempts), None, found.said)
            return [*super().connection_lost(why=found.said), OpeningFailed(self.negotiation, found.error)]
        if deed is OpeningAction.PROBE and found.revision is not None:
            self._probe(found.revision, self._deadline)
        else:
            self._initialize(found.revision)
        return []

    def _adopt(self, found: _AnswerMeaning) -> list[Event]:
        result, revision = found.result, found.revision
        assert revision is not None  # every finding that leads to OpeningAction.ADOPT names one
        self._speak(revision)
        capabilities, instructions = result.get("capabilities"), result.get("instructions")
        identity = _member(result, "_meta", META_SERVER_INFO) if not revision.handshake else result.get("serverInfo")
        self.instructions = instructions if isinstance(instructions, str) else None
        self.terms = Terms(
            revision,
            capabilities if isinstance(capabilities, dict) else {},
            identity if isinstance(identity, dict) else None,
        )
        self.opened = True
        self.negotiation = Negotiation(tuple(self._attempts), revision, found.said)
        if revision.handshake:
            Peer.notify(self, "notifications/initialized")
        return [Opened(self.terms)]

    def _read_probe(self, outcome: Outcome) -> _AnswerMeaning:
        match outcome:
            # rtype-03: any kind of result but a complete one is no answer to this.
            case Answered(result={"supportedVersions": [*versions]} as result) if _kind(result) == "complete":
                found = self._compare(versions, f"the server speaks {_listed(versions)}")
                heard = OpeningEvent.AGREED if found.heard is OpeningEvent.OTHER_MODERN else found.heard
                return attrs.evolve(found, heard=heard, result=result)
            case Refused(error=Error(code=code)) if code in MODERN_ERRORS:
                return self._read_refusal(outcome.error)
            case ConnectionLost(why=why):
                return _AnswerMeaning(OpeningEvent.LOST, why)
            case TimedOut() if self._last and self._refusal is None:
                return _AnswerMeaning(OpeningEvent.REFUSED, _describe(outcome))
            case _:
                self._unheard = self._trying if isinstance(outcome, TimedOut) else None
                return self._not_modern(_describe(outcome))

    def _read_initialize(self, outcome: Outcome) -> _AnswerMeaning:
        found = self._read_initialized(outcome)
        if found.heard is OpeningEvent.REFUSED and isinstance(outcome, Refused) and self._unheard is not None:
            self._refusal = found
            found = attrs.evolve(found, heard=OpeningEvent.REFUSED_LATE, revision=self._unheard)
            self._unheard = None
        return found

    def _read_initialized(self, outcome: Outcome) -> _AnswerMeaning:
        match outcome:
            case Answered(result={"protocolVersion": str(version)} as result):
                revision = self.offer.find(version, handshake=True)
                if revision is not None:
                    return _AnswerMeaning(OpeningEvent.AGREED, f"the server chose {version}", revision, result)
                # life-13: a client that cannot speak the version closes the connection.
                said = f"the server chose {shown(version, 24)}; we speak {_listed(self.offer.versions)}"
                return _AnswerMeaning(OpeningEvent.SHARES_NONE, said)
            case Refused(error=error):
                return self._read_refusal(error)
            case ConnectionLost(why=why):
                return _AnswerMeaning(OpeningEvent.LOST, why)
            case _:
                return _AnswerMeaning(OpeningEvent.REFUSED, _describe(outcome))

    def _read_refusal(self, error: Error) -> _AnswerMeaning:
        said, raised = _describe_error(error), _as_error(error)
        versions = _member(error.data, "supported")
        if error.code not in _ABOUT_VERSIONS or not isinstance(versions, list):
            return _AnswerMeaning(OpeningEvent.REFUSED, said, error=raised)
        # ver-02: the version to try next may be the one just refused, as while the servers behind one name are being
        # replaced.  It is asked for a second time, but not a third.
        if str(self._trying) in versions and self._trying not in self._denied:
            self._denied.add(self._trying)
        else:
            self._refused.add(self._trying)
        return attrs.evolve(self._compare(versions, f"{said}; the server speaks {_listed(versions)}"), error=raised)

    def _compare(self, versions: list[Any], said: str) -> _AnswerMeaning:
        """What to go on with: the newest version that both sides speak."""
        shared = [each for each in self.offer.revisions if each.name in versions and each not in self._refused]
        if not shared:
            return _AnswerMeaning(OpeningEvent.SHARES_NONE, f"{said}; we speak {_listed(self.offer.versions)}")
        revision = max(shared, key=str)
        return _AnswerMeaning(
            OpeningEvent.OTHER_LEGACY if revision.handshake else OpeningEvent.OTHER_MODERN, said, revision
        )

    def _not_modern(self, said: str) -> _AnswerMeaning:
        if self._refusal is not None:  # it would be refused once more
            return attrs.evolve(self._refusal, said=f"{said}; {self._refusal.said}")
        older = [each for each in self.offer.revisions if each.handshake and each not in self._refused]
        if older:
            return _AnswerMeaning(OpeningEvent.NOT_MODERN, said, max(older, key=str))
        said = f"not a server of {self.offer.modern}, and no older revision may be used: {said}"
        return _AnswerMeaning(OpeningEvent.SHARES_NONE, said)

    # Outcomes reach `_judge_outcome` from wherever they arise.  What `receive` gets from `tick` is judged twice, which
    # is harmless: the opening has moved on by then.

    def tick(self, now: float) -> list[Event]:
        return [judged for event in super().tick(now) for judged in self._judge_outcome(event)]

    def connection_lost(self, about: Id | None = None, why: str = "the link was lost") -> list[Event]:
        return [judged for event in super().connection_lost(about, why) for judged in self._judge_outcome(event)]

    def input_ended(self, why: str = "the other side of the link was closed") -> list[Event]:
        return [judged for event in super().input_ended(why) for judged in self._judge_outcome(event)]

    def fail(self, id: Id, why: str) -> list[Event]:
        return [judged for event in super().fail(id, why) for judged in self._judge_outcome(event)]


def _member(value: Any, *path: str) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _kind(result: JsonObject) -> Any:
    return result.get("resultType", "complete")  # rtype-04


def _listed(versions: list[Any]) -> str:
    names = [each if isinstance(each, str) and each in REVISIONS else shown(each, 24) for each in versions[:10]]
    return ", ".join(names) or "no version at all"


def _describe(outcome: Outcome) -> str:
    match outcome:
        case Refused(error=error):
            return _describe_error(error)
        case InvalidAnswer(why=why):
            return f"no valid answer: {why}"
        case TimedOut():
            return "no answer in time"
        case Answered(result=result) if (kind := _kind(result)) != "complete":
            return f"an answer of the unknown kind {shown(kind, 24)}"
        case _:
            return "an answer without a protocol version"


def _describe_error(error: Error) -> str:
    return f"error {error.code}: {shown(error.message, 200)}"


def _as_error(error: Error) -> RequestError:
    return RequestError(error.code, error.message, None if error.data is ABSENT else error.data)
