"""The client's end of a link: find out the revision of the server, then use it.

A modern server answers the request `server/discover`, the probe.  A legacy server answers it with an error, with a
malformed message or not at all, and expects `initialize`.  So a client with a modern revision probes first.  Each
answer means one of three steps: adopt a revision, try a revision, or give up.  A modern revision is tried with the
probe, and a legacy one with `initialize`.  These rules hold:

- "The fallback MUST NOT be keyed to one specific error code": every answer that is not a known modern answer means that
  the server is a legacy one.
- A modern server that is too slow to answer the probe in time refuses `initialize`, with any error.  It is probed
  again, until the deadline.
- A revision that the server has refused is not tried again.  So the opening always ends.

A `Negotiation` records each attempt, each answer, the choice and the reason, because reports of a connection that does
not open usually lack them.

To pin a revision, offer only that one.  A client with only modern revisions probes too (ver-13).  A legacy server then
fails at once with a clear reason; otherwise it might serve a request under other rules than the client's.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

import attrs

from trio_mcp.core.errors import INVALID_PARAMS, MODERN_ERRORS, UNSUPPORTED_VERSION, RequestError, UsageError, shown
from trio_mcp.core.messages import CachedResult, Error, Event, Id, JsonObject, Notification, Request, prepare, record
from trio_mcp.core.requests import (
    Answered,
    ConnectionLost,
    InvalidAnswer,
    LinkKind,
    Outcome,
    PeerMistake,
    Refused,
    TimedOut,
)
from trio_mcp.core.revisions import (
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_SERVER_INFO,
    META_VERSION,
    REVISIONS,
    Revision,
    Role,
    Terms,
    in_protocol,
    meta_of,
)
from trio_mcp.core.rounds import is_complete
from trio_mcp.core.session import Opened, SessionProtocol

__all__ = ["Attempt", "ClientProtocol", "Negotiation", "OpeningFailed", "Phase"]

# life-20: the lifecycle pages of the legacy era use -32602 for an unsupported version.
_ABOUT_VERSIONS: Final = frozenset({UNSUPPORTED_VERSION, INVALID_PARAMS})


class Phase(enum.Enum):
    """The phase of the opening."""

    NEW = enum.auto()
    PROBING = enum.auto()
    INITIALIZING = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()


_ONLY_BY_OPEN = frozenset({"initialize", "notifications/initialized"})
# The terms that the `_meta` of a single request may replace.  xtask-02: an extension is declared per request.
_OF_ONE_REQUEST = (META_LOG_LEVEL, META_CLIENT_CAPABILITIES)


@record
class Attempt:
    """One request of the opening and its answer, in words."""

    tried: str
    answered: str


@record
class Negotiation:
    """The record of an opening: the attempts, the chosen revision (None if it failed) and the reason."""

    attempts: tuple[Attempt, ...]
    chosen: Revision | None
    why: str


@record
class OpeningFailed(Event):
    """The opening has failed, and the link is closed.  `error` is the error of the server, if it refused with one."""

    negotiation: Negotiation
    error: RequestError | None


@record
class _Step:
    """The step that an answer of the server leads to, and the reason in words.

    With a `result` of the server the `revision` is adopted; without one it is tried next.  Without a revision the
    opening fails; `error` is then the error of the server, if it refused with one.
    """

    why: str
    revision: Revision | None = None
    result: JsonObject | None = None
    error: RequestError | None = None


class ClientProtocol(SessionProtocol):
    """The client's end of a link.  `open` starts the negotiation; it ends with `Opened` or `OpeningFailed`.

    With `terms` the link is open from the start, for one exchange with a server whose revision is known.  Any `link`
    except DUPLEX means HTTP; the agreed revision then decides whether it is SESSION or EXCHANGE.
    """

    _ROLE = Role.CLIENT

    def _set_up(self) -> None:
        self.negotiation: Negotiation | None = None
        self.instructions: str | None = None
        self.log_level: str | None = None
        """The lowest level of the log messages that modern requests ask for; None: no log messages.

        The `_meta` of a single request overrides it."""
        self.phase = Phase.NEW
        if self.terms is not None:
            self.phase = Phase.OPEN
            self._set_link(self.terms.revision)
        self._allowed: set[str] = set()  # methods that may be sent with any params
        self._terms_meta: dict[tuple[Revision, str | None], CachedResult] = {}  # by revision and log level
        self.attempts: list[Attempt] = []
        """The attempts of the opening; may begin with those of earlier connections."""
        self._trying: Revision | None = None
        self._refused: set[Revision | None] = set()  # the server refused these; others may be tried
        self._denied: set[Revision | None] = set()  # refused once, by a server that claims to support them
        self._opening_id: int | None = None
        self._deadline: float | None = None
        self._last = False  # the probe may use all the time until the deadline
        self._late_probe: Revision | None = None  # the revision of the probe that was not answered in time
        self._refusal: _Step | None = None  # the refusal of `initialize` after that probe
        self._complained_at = 0  # the value of `_next_id` when we last sent an error without an id

    def open(self, *, probe_until: float | None = None, deadline: float | None = None) -> None:
        """Start the negotiation.

        If the server has not answered the probe by `probe_until`, it is treated as a legacy server, if we offer a
        legacy revision.  The opening fails at `deadline`.  Raises `UsageError` if it is called again.
        """
        if self.phase is not Phase.NEW:
            raise UsageError("open must be called only once")
        self._deadline = deadline
        first = self.offer.modern or self.offer.legacy
        assert first is not None  # an offer has at least one revision
        ends = (probe_until if self.offer.legacy is not None else None, deadline)
        self._try(first, min((each for each in ends if each is not None), default=None))

    def put_off(self, probe_until: float) -> None:
        """Give the server more time for the probe, until `probe_until`.

        The transport calls this if the server has not read the probe yet: its silence then says nothing about its
        revision.  Has no effect if the server is not being probed.
        """
        if self.phase is Phase.PROBING and not self._last:
            assert self._opening_id is not None
            until = probe_until if self._deadline is None else min(probe_until, self._deadline)
            self._deadlines.clear()  # the probe is the only open request
            self._schedule(until, self._opening_id)
            self._last = until == self._deadline

    def fall_back(self, why: str) -> list[Event]:
        """Report that the probed server is a legacy one, as the transport found out.

        Raises `UsageError` if the server is not being probed.
        """
        if self.phase is not Phase.PROBING:
            raise UsageError("fall_back must be called only while the server is being probed")
        assert self._opening_id is not None
        self.cancel(self._opening_id)
        return self._take(self._not_modern(why))

    # Messages that we send.

    def _check_call(
        self, method: str, params: JsonObject, progress: bool, about: Id | None, undeclared: bool
    ) -> tuple[JsonObject, CachedResult | None]:
        """Check a request of ours.  A method that passed the checks once is not checked again."""
        terms = self.terms
        if terms is None or method not in self._allowed:
            super()._check_call(method, params, progress, about, undeclared)
            conditional = terms is None or any(need.method == method for need in terms.revision.conditional_needs)
            if not conditional and not undeclared:
                self._allowed.add(method)
        if terms is None or terms.revision.handshake:
            return params, None
        ours = self._meta_of_terms(terms.revision)
        if not progress and type(params) is dict and "_meta" not in params:
            return params, ours
        given = meta_of("params", params)
        own = {key: given[key] for key in _OF_ONE_REQUEST if key in given}
        return {**params, "_meta": {**given, **ours["_meta"], **own}}, None

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """As `Peer.notify`.  A modern notification of an extension carries its terms, as requests do."""
        revision = None if self.terms is None else self.terms.revision
        if revision is None or revision.handshake or in_protocol(method):
            return super().notify(method, params, about=about)
        params = params or {}
        meta = {**meta_of(f"the params of {method}", params), **self._meta_of_terms(revision)["_meta"]}
        return super().notify(method, {**params, "_meta": meta}, about=about)

    def _may_notify(self, method: str, params: JsonObject, about: Id | None) -> bool:
        if self.phase is Phase.PROBING and method not in _ONLY_BY_OPEN:
            return False  # while the server is being probed, no notification is sent
        return super()._may_notify(method, params, about)

    def _terms_for(self, method: str, about: Id | None) -> Terms:
        if method in _ONLY_BY_OPEN:
            raise UsageError(f"{method} must be sent with ClientProtocol.open")
        if self.phase is Phase.INITIALIZING and self._trying is not None:
            return Terms(self._trying)  # life-05: a ping may be sent; `SessionProtocol` refuses all other methods
        return super()._terms_for(method, about)

    def _meta_of_terms(self, revision: Revision) -> CachedResult:
        """Return an object with the `_meta` of every request of this revision.  It is written only once."""
        holder = self._terms_meta.get((revision, self.log_level))
        if holder is None:
            ours = {
                META_VERSION: revision.name,
                META_CLIENT_CAPABILITIES: self.declared(revision),
                META_CLIENT_INFO: self.offer.infos[revision],
            }
            level = {} if self.log_level is None else {META_LOG_LEVEL: self.log_level}
            holder = self._terms_meta[revision, self.log_level] = CachedResult({"_meta": {**level, **ours}})
        return holder

    def _set_link(self, revision: Revision) -> None:
        """Set the kind of link.  On HTTP the revision decides the meaning of a cancellation and of a lost stream."""
        if self.link is not LinkKind.DUPLEX:
            # 2024-11-05 was made for HTTP+SSE, which is one stream.  A server that agrees to it on Streamable HTTP
            # keeps a session, as servers of the other legacy revisions do.
            by_stream = revision.http is not None and revision.http.disconnect_cancels
            self.link = LinkKind.EXCHANGE if by_stream else LinkKind.SESSION

    def _try(self, revision: Revision, until: float | None) -> None:
        """Send the request that opens a link of this revision.  A probe waits for its answer until `until`."""
        self._set_link(revision)
        if revision.handshake:
            params = {
                "protocolVersion": revision.name,
                "capabilities": self.declared(revision),
                "clientInfo": self.offer.infos[revision],
            }
            self._opening_id = self._send_request("initialize", params, None, self._deadline)
            self.phase = Phase.INITIALIZING
        else:
            self._opening_id = self._send_request("server/discover", {}, self._meta_of_terms(revision), until)
            self.phase, self._last = Phase.PROBING, until == self._deadline
        self._trying = revision

    # Messages that the server sends.

    @property
    def _sends_no_responses(self) -> bool:
        """trans-05: a modern client writes no responses, because a modern server sends no requests."""
        revision = self.offer.legacy if self.terms is None else self.terms.revision
        return revision is None or not revision.handshake

    def _refuse_call(self, request: Request, code: int, why: str, data: Any = None) -> list[Event]:
        if not self._sends_no_responses:
            return super()._refuse_call(request, code, why, data)
        del self._serving[request.id]  # the server cannot be waiting for an answer
        return [PeerMistake(f"{why}; not answered")]

    def _refuse_at_once(self, error: Error, events: list[Event], about: Any, batch: Any, why: str = "") -> None:
        if self._sends_no_responses:
            events.append(PeerMistake(f"{why or error.message}; not answered"))
        elif error.id is None and self._complained_at == self._next_id:
            # A server that prints its input would send our own error back.  Without a request of ours in between, the
            # two sides could exchange errors for ever.
            events.append(PeerMistake(f"{why or error.message}; not answered again"))
        else:
            if error.id is None:
                self._complained_at = self._next_id
            super()._refuse_at_once(error, events, about, batch, why)

    def _ended(self, outcome: Outcome) -> Sequence[Event]:
        if outcome.id != self._opening_id:
            return (outcome,)
        read = self._read_probe if self.phase is Phase.PROBING else self._read_initialize
        return self._take(read(outcome))

    def _take(self, step: _Step) -> list[Event]:
        """Record the answer, and take the step that it leads to."""
        assert self._trying is not None
        request = "initialize with" if self._trying.handshake else "server/discover in"
        self.attempts.append(Attempt(f"{request} {self._trying}", step.why))
        self._opening_id = None
        if step.revision is None:
            self.phase = Phase.FAILED
            self.negotiation = Negotiation(tuple(self.attempts), None, step.why)
            return [*super().connection_lost(why=step.why), OpeningFailed(self.negotiation, step.error)]
        if step.result is not None:
            return self._adopt(step.revision, step.result, step.why)
        self._try(step.revision, self._deadline)
        return []

    def _adopt(self, revision: Revision, result: JsonObject, why: str) -> list[Event]:
        """Open the link with the agreed revision."""
        self._set_link(revision)
        capabilities, instructions = result.get("capabilities"), result.get("instructions")
        identity = _member(result, "_meta", META_SERVER_INFO) if not revision.handshake else result.get("serverInfo")
        self.instructions = instructions if isinstance(instructions, str) else None
        self.terms = Terms(
            revision,
            capabilities if isinstance(capabilities, dict) else {},
            identity if isinstance(identity, dict) else None,
        )
        self.opened, self.phase = True, Phase.OPEN
        self.negotiation = Negotiation(tuple(self.attempts), revision, why)
        if revision.handshake:
            self._queue(prepare(Notification("notifications/initialized")), None)
        return [Opened(self.terms)]

    def _read_probe(self, outcome: Outcome) -> _Step:
        """Return the step for the answer to the probe."""
        match outcome:
            # rtype-03: only a complete result is an answer to the probe.
            case Answered(result={"supportedVersions": [*versions]} as result) if is_complete(result):
                step = self._compare(versions, f"the server supports {_listed(versions)}")
                modern = step.revision is not None and not step.revision.handshake
                return attrs.evolve(step, result=result) if modern else step
            case Refused(error=Error(code=code)) if code in MODERN_ERRORS:
                return self._read_refusal(outcome.error)
            case ConnectionLost(why=why):
                return _Step(why)
            case TimedOut() if self._last and self._refusal is None:
                return _Step(_describe(outcome))
            case _:
                self._late_probe = self._trying if isinstance(outcome, TimedOut) else None
                return self._not_modern(_describe(outcome))

    def _read_initialize(self, outcome: Outcome) -> _Step:
        """Return the step for the answer to `initialize`."""
        match outcome:
            case Answered(result={"protocolVersion": str(version)} as result):
                revision = self.offer.find(version, handshake=True)
                if revision is not None:
                    return _Step(f"the server chose {version}", revision, result)
                # life-13: a client that does not support the version closes the connection.
                return _Step(f"the server chose {shown(version, 24)}; we support {_listed(self.offer.versions)}")
            case Refused(error=error):
                step = self._read_refusal(error)
                if self._late_probe is None or _versions_in(error) is not None:
                    return step
                self._refusal, probe, self._late_probe = step, self._late_probe, None
                return attrs.evolve(step, revision=probe)
            case ConnectionLost(why=why):
                return _Step(why)
            case _:
                return _Step(_describe(outcome))

    def _read_refusal(self, error: Error) -> _Step:
        """Return the step for an error that answers the probe or `initialize`."""
        why, versions = _describe_error(error), _versions_in(error)
        if versions is None:
            return _Step(why, error=error.exception)
        # ver-02: the list may have the version that was just refused, for example while the servers behind one name are
        # being replaced.  That version is tried a second time, but not a third.
        if str(self._trying) in versions and self._trying not in self._denied:
            self._denied.add(self._trying)
        else:
            self._refused.add(self._trying)
        step = self._compare(versions, f"{why}; the server supports {_listed(versions)}")
        return attrs.evolve(step, error=error.exception)

    def _compare(self, versions: list[Any], why: str) -> _Step:
        """Choose the newest version that both sides support."""
        shared = [each for each in self.offer.revisions if each.name in versions and each not in self._refused]
        if not shared:
            return _Step(f"{why}; we support {_listed(self.offer.versions)}")
        return _Step(why, max(shared, key=str))

    def _not_modern(self, why: str) -> _Step:
        """Choose the newest legacy revision, if there is one to try."""
        if self._refusal is not None:  # the server has refused `initialize` already
            return attrs.evolve(self._refusal, why=f"{why}; {self._refusal.why}")
        older = [each for each in self.offer.revisions if each.handshake and each not in self._refused]
        if older:
            return _Step(why, max(older, key=str))
        return _Step(f"not a server of {self.offer.modern}, and no older revision may be used: {why}")


def _member(value: Any, *path: str) -> Any:
    """Return the member at this path, or None if there is none."""
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _versions_in(error: Error) -> list[Any] | None:
    """Return the versions that the server supports, if the error is about versions."""
    versions = _member(error.data, "supported")
    return versions if error.code in _ABOUT_VERSIONS and isinstance(versions, list) else None


def _listed(versions: list[Any]) -> str:
    names = [each if isinstance(each, str) and each in REVISIONS else shown(each, 24) for each in versions[:10]]
    return ", ".join(names) or "no version"


def _describe(outcome: Outcome) -> str:
    match outcome:
        case Refused(error=error):
            return _describe_error(error)
        case InvalidAnswer(why=why):
            return f"a malformed answer: {why}"
        case TimedOut():
            return "no answer in time"
        case Answered(result=result) if not is_complete(result):
            return f"an answer with the unknown resultType {shown(result['resultType'], 24)}"
        case _:
            return "an answer without a protocol version"


def _describe_error(error: Error) -> str:
    return f"error {error.code}: {shown(error.message, 200)}"
