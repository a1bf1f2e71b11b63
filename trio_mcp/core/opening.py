"""The client's end of a link: finding out what the server speaks, then keeping to it.

A server of the modern era answers `server/discover`; one of the legacy era answers it with some error, with nonsense,
or not at all, and wants `initialize`.  So the client probes first, if it speaks a modern revision, and the table
`OPENING` says what follows from what it hears.  "The fallback MUST NOT be keyed to one specific error code": whatever
is not a recognised modern answer means legacy.  What was tried, what came back, what was chosen and why is kept as a
`Negotiation`, because that is what every report of a connection that does not open lacks.

To pin a revision, offer only that one.  A modern-only client probes too (ver-13): a legacy server then fails at once
and for a stated reason, instead of serving a request under rules the client does not know.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import attrs

from trio_mcp.core.errors import (
    HEADER_MISMATCH,
    MISSING_CLIENT_CAPABILITY,
    UNSUPPORTED_VERSION,
    LocalProtocolError,
    RequestError,
)
from trio_mcp.core.jsonrpc import ABSENT, Error, Event, Id, JsonObject, Limits, Request
from trio_mcp.core.peer import Answered, Garbled, Lost, Outcome, Peer, PeerMistake, Refused, TimedOut
from trio_mcp.core.revisions import (
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_SERVER_INFO,
    META_VERSION,
    Revision,
    Role,
)
from trio_mcp.core.session import Offer, Opened, Session
from trio_mcp.core.state import Link
from trio_mcp.core.terms import Terms

__all__ = ["OPENING", "Attempt", "ClientSession", "Deed", "Heard", "Negotiation", "OpeningFailed", "Phase"]

MODERN_ERRORS: Final = frozenset({HEADER_MISMATCH, MISSING_CLIENT_CAPABILITY, UNSUPPORTED_VERSION})


class Phase(enum.Enum):
    NEW = enum.auto()
    PROBING = enum.auto()
    INITIALIZING = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()


class Heard(enum.Enum):
    SHARES_MODERN = enum.auto()  # the server is modern and serves a modern revision of ours
    SHARES_LEGACY = enum.auto()  # the server names its versions, and only legacy ones are ours too
    SHARES_NONE = enum.auto()
    OTHER_MODERN = enum.auto()  # the version we probed with is not served, another modern one of ours is
    MODERN_ERROR = enum.auto()  # a modern server refuses for a reason that is not the version
    NOT_MODERN = enum.auto()  # any other error, nonsense, or silence
    REFUSED = enum.auto()  # initialize was
    LOST = enum.auto()


class Deed(enum.Enum):
    ADOPT = enum.auto()
    PROBE = enum.auto()
    INITIALIZE = enum.auto()
    GIVE_UP = enum.auto()


OPENING: dict[Phase, dict[Heard, tuple[Phase, Deed]]] = {
    Phase.PROBING: {
        Heard.SHARES_MODERN: (Phase.OPEN, Deed.ADOPT),
        Heard.SHARES_LEGACY: (Phase.INITIALIZING, Deed.INITIALIZE),
        Heard.SHARES_NONE: (Phase.FAILED, Deed.GIVE_UP),
        Heard.OTHER_MODERN: (Phase.PROBING, Deed.PROBE),
        # ver-14: a modern error never leads to initialize.
        Heard.MODERN_ERROR: (Phase.FAILED, Deed.GIVE_UP),
        Heard.NOT_MODERN: (Phase.INITIALIZING, Deed.INITIALIZE),
        Heard.LOST: (Phase.FAILED, Deed.GIVE_UP),
    },
    Phase.INITIALIZING: {
        Heard.SHARES_LEGACY: (Phase.OPEN, Deed.ADOPT),
        Heard.SHARES_NONE: (Phase.FAILED, Deed.GIVE_UP),
        Heard.REFUSED: (Phase.FAILED, Deed.GIVE_UP),
        Heard.LOST: (Phase.FAILED, Deed.GIVE_UP),
    },
}


@attrs.frozen
class Attempt:
    tried: str
    answered: str


@attrs.frozen
class Negotiation:
    """What was tried, what came back, what was chosen (None: nothing) and why."""

    attempts: tuple[Attempt, ...]
    chosen: Revision | None
    why: str


@attrs.frozen
class OpeningFailed(Event):
    """The link did not open, and is closed.  `error` is what the server refused with, if it did."""

    negotiation: Negotiation
    error: RequestError | None


@attrs.frozen
class _Finding:
    """What one answer means: for the table, in words, and what to go on with."""

    heard: Heard
    said: str
    revision: Revision | None = None
    result: JsonObject = attrs.field(factory=dict)
    error: RequestError | None = None


class ClientSession(Session):
    """The client's end of a link.  `open` starts the negotiation; it ends in `Opened` or `OpeningFailed`.

    With `terms` the link is open from the start: that is how one exchange is made with a server already known.
    """

    def __init__(
        self,
        offer: Offer,
        *,
        link: Link = Link.DUPLEX,
        limits: Limits | None = None,
        first_id: int = 1,
        terms: Terms | None = None,
    ) -> None:
        super().__init__(Role.CLIENT, offer, link=link, limits=limits, first_id=first_id, terms=terms)
        self.negotiation: Negotiation | None = None
        self.instructions: str | None = None
        self.log_level: str | None = None
        """From which level on modern requests ask for log messages; None: for none."""
        self.phase = Phase.NEW if terms is None else Phase.OPEN
        self._attempts: list[Attempt] = []
        self._tried = ""
        self._opening_id: int | None = None
        self._deadline: float | None = None

    def open(self, *, probe_until: float | None = None, deadline: float | None = None) -> None:
        """Start the negotiation.

        A server that has not answered the probe by `probe_until` is taken for a legacy one; one that has not answered
        `initialize` by `deadline` is given up.  Raises `LocalProtocolError` when called again.
        """
        if self.phase is not Phase.NEW:
            raise LocalProtocolError("a client session is opened once")
        self._deadline = deadline
        if (modern := self.offer.modern) is not None:
            self.phase = Phase.PROBING
            self._probe(modern, probe_until)
        else:
            self.phase = Phase.INITIALIZING
            self._initialize(self.offer.legacy)

    def fall_back(self, why: str) -> list[Event]:
        """The transport has seen that the probed server is not modern.  Raises unless it is being probed."""
        if self.phase is not Phase.PROBING or self._opening_id is None:
            raise LocalProtocolError("only a server that is being probed can turn out to be a legacy one")
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
    ) -> int:
        """As `Session.request`; a modern request says under which terms it is made."""
        if self.terms is not None and not self.terms.revision.handshake:
            params = self._with_meta(self.terms.revision, params or {})
        return super().request(method, params, deadline=deadline, progress=progress, about=about)

    def _with_meta(self, revision: Revision, params: JsonObject) -> JsonObject:
        ours: JsonObject = {
            META_VERSION: revision.name,
            META_CLIENT_CAPABILITIES: self.declared(revision),
            META_CLIENT_INFO: self.offer.info_in(revision),
        }
        if self.log_level is not None:
            ours[META_LOG_LEVEL] = self.log_level
        return {**params, "_meta": {**params.get("_meta", {}), **ours}}

    def _probe(self, revision: Revision, until: float | None) -> None:
        self._tried = f"server/discover in {revision}"
        self._opening_id = Peer.request(self, "server/discover", self._with_meta(revision, {}), deadline=until)

    def _initialize(self, revision: Revision | None) -> None:
        assert revision is not None  # the table leads here only where a legacy revision is on offer
        self._tried = f"initialize with {revision}"
        params = {
            "protocolVersion": revision.name,
            "capabilities": self.declared(revision),
            "clientInfo": self.offer.info_in(revision),
        }
        self._opening_id = Peer.request(self, "initialize", params, deadline=self._deadline)

    # What the server sends.

    def _unknown(self, request: Request, why: str) -> list[Event]:
        if self.terms is not None and not self.terms.revision.handshake:
            # http-13, stdio: a modern client writes no responses; nobody can be waiting for one.
            self._forget(request.id)
            return [PeerMistake(f"{request.method} is no request for the client; not answered")]
        return super()._unknown(request, why)

    def _judge_outcome(self, event: Event) -> list[Event]:
        if not isinstance(event, Outcome) or event.id != self._opening_id:
            return [event]
        return self._go_on(self._read_probe(event) if self.phase is Phase.PROBING else self._read_initialize(event))

    def _go_on(self, found: _Finding) -> list[Event]:
        self._attempts.append(Attempt(self._tried, found.said))
        self._opening_id = None
        self.phase, deed = OPENING[self.phase][found.heard]
        if deed is Deed.ADOPT:
            return self._adopt(found)
        if deed is Deed.PROBE and found.revision is not None:
            self._probe(found.revision, self._deadline)
        elif deed is Deed.INITIALIZE:
            self._initialize(found.revision)
        else:
            self.negotiation = Negotiation(tuple(self._attempts), None, found.said)
            return [*super().lost(why=found.said), OpeningFailed(self.negotiation, found.error)]
        return []

    def _adopt(self, found: _Finding) -> list[Event]:
        result, revision = found.result, found.revision
        assert revision is not None  # every finding that leads to Deed.ADOPT names one
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
            self.notify("notifications/initialized")
        return [Opened(self.terms)]

    def _read_probe(self, outcome: Outcome) -> _Finding:
        match outcome:
            case Answered(result={"supportedVersions": [*versions]} as result):
                return self._compare(versions, f"the server speaks {_listed(versions)}", result)
            case Refused(error=Error(code=code)) if code in MODERN_ERRORS:
                return self._read_modern_error(outcome.error)
            case Lost(why=why):
                return _Finding(Heard.LOST, why)
            case _:
                return self._not_modern(_describe(outcome))

    def _read_modern_error(self, error: Error) -> _Finding:
        said, raised = _describe_error(error), _as_error(error)
        versions = _member(error.data, "supported")
        if error.code != UNSUPPORTED_VERSION or not isinstance(versions, list):
            return _Finding(Heard.MODERN_ERROR, said, error=raised)
        found = self._compare(versions, said, {})
        if found.heard is Heard.SHARES_MODERN:
            # It cannot both refuse the version we asked in and serve it; another one is worth a second probe.
            heard = Heard.MODERN_ERROR if str(found.revision) in self._tried else Heard.OTHER_MODERN
            return attrs.evolve(found, heard=heard, error=raised)
        return attrs.evolve(found, error=raised)

    def _compare(self, versions: list[Any], said: str, result: JsonObject) -> _Finding:
        """The newest version that both sides speak."""
        shared = [each for each in self.offer.revisions if each.name in versions]
        if not shared:
            return _Finding(Heard.SHARES_NONE, f"{said}; we speak {_listed(self.offer.versions)}")
        revision = max(shared, key=str)
        heard = Heard.SHARES_LEGACY if revision.handshake else Heard.SHARES_MODERN
        return _Finding(heard, said, revision, result)

    def _not_modern(self, said: str) -> _Finding:
        legacy = self.offer.legacy
        if legacy is None:
            said = f"not a server of {self.offer.modern}, and no older revision may be used: {said}"
            return _Finding(Heard.SHARES_NONE, said)
        return _Finding(Heard.NOT_MODERN, said, legacy)

    def _read_initialize(self, outcome: Outcome) -> _Finding:
        match outcome:
            case Answered(result={"protocolVersion": str(version)} as result):
                revision = self.offer.find(version, handshake=True)
                if revision is not None:
                    return _Finding(Heard.SHARES_LEGACY, f"the server chose {version}", revision, result)
                # life-13: a client that cannot speak the version closes the connection.
                said = f"the server chose {version!r}; we speak {_listed(self.offer.versions)}"
                return _Finding(Heard.SHARES_NONE, said)
            case Refused(error=error):
                return _Finding(Heard.REFUSED, _describe_error(error), error=_as_error(error))
            case Lost(why=why):
                return _Finding(Heard.LOST, why)
            case _:
                return _Finding(Heard.REFUSED, _describe(outcome))

    # Outcomes reach `_judge_outcome` from wherever they arise.  What `receive` gets from `tick` is judged twice, which
    # is harmless: the opening has moved on by then.

    def tick(self, now: float) -> list[Event]:
        return [judged for event in super().tick(now) for judged in self._judge_outcome(event)]

    def lost(self, about: Id | None = None, why: str = "the link was lost") -> list[Event]:
        return [judged for event in super().lost(about, why) for judged in self._judge_outcome(event)]


def _member(value: Any, *path: str) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _listed(versions: list[Any]) -> str:
    return ", ".join(str(each)[:20] for each in versions[:10]) or "no version at all"


def _describe(outcome: Outcome) -> str:
    match outcome:
        case Refused(error=error):
            return _describe_error(error)
        case Garbled(why=why):
            return f"no valid answer: {why}"
        case TimedOut():
            return "no answer in time"
        case _:
            return "an answer without a protocol version"


def _describe_error(error: Error) -> str:
    return f"error {error.code}: {error.message[:200]}"


def _as_error(error: Error) -> RequestError:
    return RequestError(error.code, error.message, None if error.data is ABSENT else error.data)
