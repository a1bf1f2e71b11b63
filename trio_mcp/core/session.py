"""Which terms a message is under, and whether it may be sent or served under them.

A session is a `Peer` that knows the protocol: what a side says about itself (`Offer`), the legacy handshake, the modern
per-request terms, and which methods and notifications are open to whom.  What it can answer by itself it does: `ping`,
`initialize`, `server/discover`, `logging/setLevel`, unknown methods, undeclared capabilities, unserved versions.  Every
request and notification that is left is handed out with its terms, as `Call` and `Notice`.

This file has what both roles share and the server's side; the client's, which has to find out what it is talking to,
is in `opening`.  One server session serves both eras on one link: `initialize` agrees the terms of the link, a request
with modern `_meta` brings its own, and neither looks at the other (ver-08, ver-09).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar, TypeGuard

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import NotDeclared, NotInThisRevision, RequestError, SessionClosed, UsageError, shown
from trio_mcp.core.jsonrpc import (
    CachedResult,
    Event,
    Id,
    JsonObject,
    Limits,
    Message,
    Notification,
    Request,
    Response,
    encode,
    prepared_result,
)
from trio_mcp.core.meta import check_extension, meta_of
from trio_mcp.core.outcomes import PeerMistake
from trio_mcp.core.peer import Peer
from trio_mcp.core.records import record, thawed
from trio_mcp.core.revisions import (
    LATEST,
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_SERVER_INFO,
    META_SUBSCRIPTION_ID,
    META_VERSION,
    REVISIONS,
    MethodRule,
    Revision,
    Role,
    declares,
    missing_capabilities,
)
from trio_mcp.core.state import ANSWER, CANCELLED, LinkKind
from trio_mcp.core.terms import LOG_LEVELS, NOTHING, Terms

__all__ = ["Call", "Notice", "Offer", "Opened", "ServerProtocol", "SessionAgreed", "SessionProtocol"]


@record
class Call(Event):
    """A request to serve, under these terms.  It waits for `answer` or `refuse`."""

    request: Request
    terms: Terms


_thawed_call = thawed(Call)


def _call(request: Request, terms: Terms) -> Call:
    made = _thawed_call()
    made.request, made.terms = request, terms
    made.__class__ = Call
    return made  # type: ignore[no-any-return]


@record
class Notice(Event):
    """A notification, under these terms."""

    notification: Notification
    terms: Terms


@record
class SessionAgreed(Event):
    """`initialize` was answered, and the link is under these terms: a session begins.

    For a server.  On a client nothing can come between this and `Opened`, which says it all.
    """

    terms: Terms


@record
class Opened(Event):
    """The link is open for everything the terms allow."""

    terms: Terms


_REPEATED = 80  # characters of a version, which may be as long as a message, that its refusal sends back as data
_KINDS: Mapping[type, str] = {str: "a string", dict: "an object"}


def _needed_meta(revision: Revision) -> str:
    needed = [f"{name} ({_KINDS[kind]})" for name, kind in revision.required_meta.items()]
    return f"params._meta must have {' and '.join(needed)}"


def _is_info(info: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(info, Mapping) and all(isinstance(info.get(name), str) for name in ("name", "version"))


def _as_revisions(given: Iterable[Revision]) -> tuple[Revision, ...]:
    revisions = tuple(given)
    for each in (given,) if isinstance(given, str) else revisions:
        if not isinstance(each, Revision):
            name = each if each in tuple(REVISIONS) else LATEST.name
            raise UsageError(f'{each!r} is no Revision; offer REVISIONS["{name}"]')
    if not revisions:
        raise UsageError("an offer names at least one revision")
    return revisions


def _worked_out(work: Callable[[Any], Any]) -> Any:
    """A field that follows from the others."""
    return attrs.field(init=False, repr=False, eq=False, default=attrs.Factory(work, takes_self=True))


@record
class Offer:
    """What our side says about itself: identity, capabilities, and the revisions it speaks.

    All in wire form and for the newest revision; each revision is told the part it knows.  `revisions` may be given in
    any order.  Raises `UsageError` for an identity without name and version, for no revision at all, for
    a capability that no revision has or that is no object, for an extension whose identifier is none, and for what
    cannot be written as JSON.
    """

    info: Mapping[str, Any]
    capabilities: Mapping[str, Any] = NOTHING
    revisions: tuple[Revision, ...] = attrs.field(default=tuple(REVISIONS.values()), converter=_as_revisions)
    instructions: str | None = None  # a server's advice on how to use it
    # Worked out once, because a modern request lives for microseconds and its session is born with it.
    legacy: Revision | None = _worked_out(lambda offer: offer._newest(handshake=True))
    """The newest revision of the legacy era that is offered."""
    modern: Revision | None = _worked_out(lambda offer: offer._newest(handshake=False))
    """The newest revision of the modern era that is offered."""
    _infos: dict[Revision, JsonObject] = _worked_out(lambda offer: offer._info_by_revision())
    _declared: dict[tuple[Role, Revision], JsonObject] = _worked_out(lambda offer: offer._declared_by_revision())
    _completed: dict[tuple[Revision, bool], CachedResult] = _worked_out(lambda offer: offer._completed_by_revision())
    plain: Mapping[tuple[Role, Revision], frozenset[str]] = _worked_out(lambda offer: offer._plain_by_revision())
    """For each role of ours: the methods for which we have declared all that any request needs."""

    unreadable_id_is_null: bool = _worked_out(lambda offer: any(each.unreadable_id_is_null for each in offer.revisions))
    """JSON-RPC's own rule, which holds before anything is agreed, unless no revision on offer has it."""

    def _newest(self, *, handshake: bool) -> Revision | None:
        return max((each for each in self.revisions if each.handshake is handshake), key=str, default=None)

    def _info_by_revision(self) -> dict[Revision, JsonObject]:
        if not _is_info(self.info):
            raise UsageError("an implementation is described by at least a name and a version, both strings")
        return {
            revision: {name: value for name, value in self.info.items() if name in revision.info_fields}
            for revision in self.revisions
        }

    def _declared_by_revision(self) -> dict[tuple[Role, Revision], JsonObject]:
        # Of every revision: who pins an old one need not leave out what only newer ones have.
        tables = [table for each in (*REVISIONS.values(), *self.revisions) for table in each.capabilities.values()]
        known = sorted(set().union(*tables))
        for name, value in self.capabilities.items():
            if name not in known:
                raise UsageError(f"there is no capability {name!r}; there are {', '.join(known)}")
            if not isinstance(value, Mapping):
                raise UsageError(f"the capability {name} is declared by an object, such as {{}}")
        for extension in self.capabilities.get("extensions", NOTHING):
            check_extension(extension)
        for name, value in self.capabilities.get("experimental", NOTHING).items():
            if not isinstance(value, Mapping):
                raise UsageError(f"the experimental capability {name!r} is declared by an object, such as {{}}")
        return {
            (role, revision): revision.declarable(role, self.capabilities)
            for revision in self.revisions
            for role in Role
        }

    def _plain_by_revision(self) -> dict[tuple[Role, Revision], frozenset[str]]:
        plain: dict[tuple[Role, Revision], frozenset[str]] = {}
        for (role, revision), declared in self._declared.items():
            special = {need.method for need in revision.conditional_needs}
            plain[role, revision] = frozenset(
                name
                for name, row in revision.requests[role.other].items()
                if name not in special and (not row.needs or declares(declared, row.needs))
            )
        return plain

    def _completed_by_revision(self) -> dict[tuple[Revision, bool], CachedResult]:
        return {
            (revision, cacheable): CachedResult(
                {**revision.complete(cacheable), "_meta": {META_SERVER_INFO: self._infos[revision]}}
            )
            for revision in self.revisions
            for cacheable in (False, True)
        }

    def __attrs_post_init__(self) -> None:
        # Here, because it is sent in the course of `receive`, which never raises.
        encode(Response(0, {"said": [*self._infos.values(), *self._declared.values(), self.instructions]}))

    @property
    def versions(self) -> list[str]:
        """The names of the revisions, newest first."""
        return sorted(map(str, self.revisions), reverse=True)

    def find(self, version: object, *, handshake: bool) -> Revision | None:
        """The offered revision of this name, if it is of that era."""
        for each in self.revisions:
            if each.name == version and each.handshake is handshake:
                return each
        return None

    def completed(self, revision: Revision, method: str) -> CachedResult:
        """What a server's complete result of this method has there beside what the method says."""
        return self._completed[revision, method in revision.cacheable]

    def info_in(self, revision: Revision) -> JsonObject:
        """Our identity as this revision describes it."""
        return self._infos[revision]

    def declared(self, role: Role, revision: Revision) -> JsonObject:
        """Our capabilities as this revision declares them."""
        return self._declared[role, revision]


class SessionProtocol(Peer):
    """What both roles share; see the head of this file.

    With `terms` the link is open under them from the start.
    """

    _ROLE: ClassVar[Role]

    def __init__(
        self,
        offer: Offer,
        *,
        link: LinkKind = LinkKind.DUPLEX,
        limits: Limits | None = None,
        first_id: int = 1,
        terms: Terms | None = None,
    ) -> None:
        if terms is not None and terms.revision not in offer.revisions:
            raise UsageError(f"the terms are of {terms.revision}, which is not offered")
        super().__init__(self._ROLE, link=link, limits=limits, first_id=first_id)
        self.offer = offer
        self.terms = terms
        self.opened = terms is not None
        """Whether everything may be sent that the terms allow, not only what may precede the end of the handshake."""
        self._set_up()

    def _set_up(self) -> None:
        """Set up what one role keeps and the other does not."""

    def declared(self, revision: Revision) -> JsonObject:
        """Our capabilities as this revision declares them."""
        return self.offer.declared(self.role, revision)

    @property
    def unreadable_id_is_null(self) -> bool:
        """As `Peer.unreadable_id_is_null`; before anything is agreed, the offer decides."""
        return (self.offer if self.terms is None else self.terms.revision).unreadable_id_is_null

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
        """As `Peer.request`, if the terms allow it.

        Raises `NotInThisRevision` for a method that the revision lacks and `NotDeclared`, unless `undeclared` is set,
        for one that stands on a capability which the other side did not declare; nothing is sent then.
        """
        terms = self._terms_for(method, about)
        row = terms.revision.request(self.role, method)
        if row is None:
            raise NotInThisRevision(method, terms.revision.name, terms.revision.instead_of(method))
        if self._too_early(row, terms.revision):
            raise UsageError(f"{method} was not sent: the handshake has not ended")
        missing = missing_capabilities(terms.revision, row, params or {}, terms.capabilities)
        if missing and not undeclared:
            raise NotDeclared(method, row.owner.value, missing[0])
        params = self._spoken(terms, params or {})
        return super().request(method, params, deadline=deadline, progress=progress, about=about)

    def _spoken(self, terms: Terms, params: JsonObject) -> JsonObject:
        """The params of a request of ours, with what the terms want to be said along with it."""
        return params

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """As `Peer.notify`, if the terms allow it.  Raises as `request`; here the capability is our own.

        What must wait for the end of the handshake is not sent: False.  Changes happen when they happen, and who hears
        nothing of one yet has read nothing yet that it could have made stale.
        """
        if self.closed or (about is not None and not self.serves(about)):
            return False
        terms = self._terms_for(method, about)
        row = terms.revision.notification(self.role, method)
        if row is None:
            raise NotInThisRevision(method, terms.revision.name)
        if not declares(self.declared(terms.revision), row.needs):
            raise NotDeclared(method, row.owner.value, row.needs)
        return not self._too_early(row, terms.revision) and super().notify(method, params, about=about)

    def _terms_for(self, method: str, about: Id | None) -> Terms:
        if self.closed:
            raise SessionClosed(f"{method} was not sent: the link is closed")
        terms = self.terms if about is None else self.terms_of(about)
        if terms is None:
            why = "no revision has been agreed on this link" if about is None else f"request {about!r} is over"
            raise UsageError(f"{method} was not sent: {why}")
        return terms

    def _too_early(self, row: MethodRule, revision: Revision) -> bool:
        return revision.handshake and not self.opened and not row.early

    def refuse(self, id: Id, error: RequestError) -> bool:
        """As `Peer.refuse`.  A code that the request's revision forbids is replaced by the one it has for the case."""
        terms = self.terms_of(id)
        if terms is not None and type(error.code) is int:
            error = RequestError(terms.revision.error_code(error.code), error.message, error.data)
        return super().refuse(id, error)

    # What the other side sends.

    def receive(
        self,
        message: Message,
        now: float,
        *,
        about: Hashable | None = None,
        principal: Any = None,
        headers: Mapping[str, str] = NOTHING,
    ) -> list[Event]:
        """As `Peer.receive`; requests and notifications come out as `Call` and `Notice`, or not at all.

        `principal` and `headers` are those of this message; they end up in its terms.
        """
        heard = super().receive(message, now, about=about)
        if len(heard) == 1 and type(heard[0]) is Request:  # as nearly always for a server
            return self._judge_request(heard[0], principal, headers)
        events: list[Event] = []
        for event in heard:
            if isinstance(event, Request):
                events += self._judge_request(event, principal, headers)
            elif isinstance(event, Notification):
                events += self._judge_notification(event, principal, headers)
            else:
                events += self._judge_outcome(event)
        return events

    def _judge_request(self, request: Request, principal: Any, headers: Mapping[str, str]) -> list[Event]:
        terms = self._heard_under(request.method)
        if terms is None:
            return self._without_terms(request)
        return self._serve(request, self._with(terms, principal, headers))

    def _heard_under(self, method: str) -> Terms | None:
        """The terms of the link; before they are agreed, provisional ones for what may be said as early as that."""
        legacy = self.offer.legacy
        if self.terms is not None or legacy is None:
            return self.terms
        sender = self.role.other
        row = legacy.request(sender, method) or legacy.notification(sender, method)
        return Terms(legacy) if row is not None and row.early else None  # early is the same in every revision

    def _without_terms(self, request: Request) -> list[Event]:
        """A request before it is known what it means."""
        if not any(each.request(self.role.other, request.method) for each in self.offer.revisions):
            why = f"{shown(request.method)} does not exist in {', '.join(self.offer.versions)}"
            return self._refuse_call(request, errors.METHOD_NOT_FOUND, why)
        return self._refuse_call(request, errors.INVALID_REQUEST, f"{request.method} before the end of initialize")

    def _judge_outcome(self, event: Event) -> list[Event]:
        return [event]

    def _judge_notification(self, note: Notification, principal: Any, headers: Mapping[str, str]) -> list[Event]:
        """Hand on what the terms of the link know; "unknown notifications are ignored", and reported."""
        terms = self._heard_under(note.method)
        if terms is None or terms.revision.notification(self.role.other, note.method) is None:
            return [PeerMistake(f"{shown(note.method)} is no notification for the {self.role.value} here; ignored")]
        return [Notice(note, self._with(terms, principal, headers))]

    def _serve(self, request: Request, terms: Terms) -> list[Event]:
        """Hand a request out if its method exists and stands on what we declared; refuse it otherwise."""
        if request.method in self.offer.plain[self.role, terms.revision]:
            return self._admit(request, terms)
        row = terms.revision.request(self.role.other, request.method)
        if row is None:
            why = f"{shown(request.method)} does not exist in {terms.revision}"
            return self._refuse_call(request, errors.METHOD_NOT_FOUND, why)
        declared = self.declared(terms.revision)
        missing = missing_capabilities(terms.revision, row, request.params, declared)
        if not missing:
            return self._admit(request, terms)
        why = f"{request.method} needs the {self.role.value} capability {'.'.join(missing[0])}, which was not declared"
        # core-32: without its capability the method does not exist; a mode that was not declared is a wrong parameter.
        code = errors.METHOD_NOT_FOUND if missing[0] == row.needs else errors.INVALID_PARAMS
        return self._refuse_call(request, code, why)

    def _admit(self, request: Request, terms: Terms) -> list[Event]:
        own = self._OWN.get(request.method)
        return [_call(request, terms)] if own is None else own(self, request, terms)

    def _refuse_call(self, request: Request, code: int, why: str, data: Any = None) -> list[Event]:
        super().refuse(request.id, RequestError(code, why, data))
        return [PeerMistake(why)]

    def _pong(self, request: Request, terms: Terms) -> list[Event]:
        super().answer(request.id, {})
        return []

    _OWN: ClassVar[Mapping[str, Callable[[Any, Request, Terms], list[Event]]]] = {"ping": _pong}
    """What is answered here."""

    @staticmethod
    def _with(terms: Terms, principal: Any, headers: Mapping[str, str]) -> Terms:
        if principal is None and not headers:
            return terms
        return attrs.evolve(terms, principal=principal, headers=headers)


# Members of a result that have a meaning for all methods.
_SAID_FOR_ALL = frozenset({"_meta", "resultType", "ttlMs", "cacheScope"})
# What a modern request says of its terms.
_TERMS = (META_VERSION, META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_LOG_LEVEL)


def _of_terms(meta: Mapping[str, Any]) -> JsonObject:
    return {name: meta[name] for name in _TERMS if name in meta}


class ServerProtocol(SessionProtocol):
    """The server's end of a link, in both eras at once.

    With `terms` the link starts out open under them: that is how one request of a session kept elsewhere, or of none,
    is served.
    """

    _ROLE = Role.SERVER

    def _set_up(self) -> None:
        # What the latest modern request said of its terms, and those: as a rule all on one link say the same.
        self._said: tuple[JsonObject, Terms | None] = {}, None

    # What we send.

    def notify(self, method: str, params: JsonObject | None = None, *, about: Id | None = None) -> bool:
        """As `SessionProtocol.notify`.  Log messages that the client did not ask for are not sent: False.

        In the modern era everything belongs to a request: raises `UsageError` for a change notice that is not
        about a subscription, or does not carry its id as `Change.notification` puts it there, and for anything else
        that is about one.
        """
        terms = self.terms_of(about) if about is not None else self.terms
        if terms is not None:
            params = params or {}
            mark = meta_of(f"what {method} is sent with", params).get(META_SUBSCRIPTION_ID)
            if method == "notifications/message" and not terms.wants_log(params.get("level", "")):
                return False
            self._check_stream(method, terms.revision, about)
            # sub-05: equal in value and type.
            if method in terms.revision.on_subscriptions and (type(mark), mark) != (type(about), about):
                why = f"{method} on subscription {about!r} has {shown(mark)} as its {META_SUBSCRIPTION_ID}"
                raise UsageError(why)
        return super().notify(method, params, about=about)

    def progress(self, id: Id, progress: float, total: float | None = None, message: str | None = None) -> bool:
        """As `Peer.progress`; never on a subscription (http-116)."""
        serving = self._serving.get(id)
        terms = None if serving is None else serving.terms or self.terms
        if serving is not None and terms is not None and serving.method in terms.revision.teardown:
            self._check_stream("notifications/progress", terms.revision, id)
        return super().progress(id, progress, total, message)

    def _check_stream(self, method: str, revision: Revision, about: Id | None) -> None:
        subscribed = about is not None and self.method_of(about) in revision.teardown
        if subscribed is not (method in revision.on_subscriptions):
            where = "only" if not subscribed else "never"
            raise UsageError(f"in {revision}, {method} is {where} sent on a subscription")

    def answer(self, id: Id, result: JsonObject) -> bool:
        """As `Peer.answer`.  A modern result gets what every result of its method must have, where it lacks it.

        Raises `UsageError` for an input-required result that this method or revision cannot have.
        """
        serving = self._serving.get(id)
        terms = None if serving is None else serving.terms or self.terms
        if serving is None or terms is None:
            return False
        method, revision = serving.method, terms.revision
        if type(result) is dict and _SAID_FOR_ALL.isdisjoint(result):
            if not revision.result_type or serving.state is CANCELLED:
                return super().answer(id, result)
            return self._finish(id, prepared_result(id, result, self.offer.completed(revision, method)), ANSWER)
        meta = meta_of(f"the result of {method}", result)
        kind = result.get("resultType", "complete")
        if kind == "input_required" and method not in revision.input_required:
            raise UsageError(f"{method} cannot be answered with an input-required result in {revision}")
        if revision.result_type:
            info = self.offer.info_in(revision)
            # cache-26: hints belong to complete results only.
            defaults = revision.result_defaults(method) if kind == "complete" else NOTHING

            def completed() -> JsonObject:
                return {**defaults, **result, "_meta": {META_SERVER_INFO: info, **meta}}

            # A kept one is the answer to one method.
            result = result.with_more(revision.name, info, completed) if type(result) is CachedResult else completed()
        return super().answer(id, result)

    # What the client sends.

    def _judge_request(self, request: Request, principal: Any, headers: Mapping[str, str]) -> list[Event]:
        meta = request.params.get("_meta", NOTHING)
        # A server of the legacy era alone knows no such key, and must not be taken for a modern one by its errors.
        if META_VERSION in meta and self.offer.modern is not None:
            return self._modern(request, meta, principal, headers)
        return super()._judge_request(request, principal, headers)

    def _without_terms(self, request: Request) -> list[Event]:
        """A request with neither a handshake before it nor a version in it."""
        modern = self.offer.modern
        if modern is not None and request.method == "initialize":
            # ver-12: name the versions served; a legacy client has nothing else to show its user.
            return self._unsupported(request, request.params.get("protocolVersion"))
        if modern is None or modern.request(Role.CLIENT, request.method) is None:
            return super()._without_terms(request)
        how = "" if self.offer.legacy is None else ", unless the connection was opened by initialize"
        return self._refuse_call(request, errors.INVALID_PARAMS, f"{_needed_meta(modern)}{how}")

    def _modern(
        self, request: Request, meta: Mapping[str, Any], principal: Any, headers: Mapping[str, str]
    ) -> list[Event]:
        """state-01: a request is judged by its own `_meta`, whatever came before it on this link."""
        serving = self._serving[request.id]
        if serving.batch is not None:
            # batch-03: no revision that speaks by `_meta` has batches; and what waits there would wait for a listener.
            why = f"a request of {shown(meta[META_VERSION])} cannot be part of a batch; send it by itself"
            return self._refuse_call(request, errors.INVALID_REQUEST, why)
        said, terms = self._said
        if terms is not None and principal is None and not headers and (meta == said or _of_terms(meta) == said):
            serving.terms = terms
            return self._serve(request, terms)
        revision = self.offer.find(meta[META_VERSION], handshake=False)
        if revision is None:
            return self._unsupported(request, meta[META_VERSION])
        if not all(isinstance(meta.get(name), kind) for name, kind in revision.required_meta.items()):
            return self._refuse_call(request, errors.INVALID_PARAMS, _needed_meta(revision))
        capabilities, level, info = meta[META_CLIENT_CAPABILITIES], meta.get(META_LOG_LEVEL), meta.get(META_CLIENT_INFO)
        if level is not None and level not in LOG_LEVELS:
            return self._refuse_call(request, errors.INVALID_PARAMS, f"{META_LOG_LEVEL} must be one of {LOG_LEVELS}")
        # meta-14: the identity is for display, so one that cannot be displayed is no reason to refuse.
        terms = Terms(revision, capabilities, info if _is_info(info) else None, level, principal, headers)
        if principal is None and not headers:
            self._said = _of_terms(meta), terms
        serving.terms = terms
        return self._serve(request, terms)

    def _unsupported(self, request: Request, requested: object) -> list[Event]:
        supported = self.offer.versions
        data: JsonObject = {"supported": supported}
        if not isinstance(requested, str):
            why = f"the protocol version must be a string: one of {', '.join(supported)}"
            return self._refuse_call(request, errors.INVALID_PARAMS, why, data)
        requested = requested[:_REPEATED]
        why = f"protocol version {shown(requested)} is not served here; served: {', '.join(supported)}"
        return self._refuse_call(request, errors.UNSUPPORTED_VERSION, why, {**data, "requested": requested})

    def _discover(self, request: Request, terms: Terms) -> list[Event]:
        self._introduce(request, terms.revision, {"supportedVersions": self.offer.versions})
        return []

    def _initialize(self, request: Request, terms: Terms) -> list[Event]:
        params = request.params
        version, capabilities, info = (params.get(name) for name in ("protocolVersion", "capabilities", "clientInfo"))
        if self.terms is not None:
            return self._refuse_call(request, errors.INVALID_REQUEST, "initialize may be sent once only")
        if not isinstance(version, str) or not isinstance(capabilities, dict) or not _is_info(info):
            why = "initialize needs protocolVersion (a string), capabilities (an object) and clientInfo (name, version)"
            return self._refuse_call(request, errors.INVALID_PARAMS, why)
        # life-09..11: the same version if we serve it, else the latest that a handshake can agree.
        revision = self.offer.find(version, handshake=True) or terms.revision
        self.terms = Terms(revision, capabilities, info)  # and not the principal and headers of this one request
        who = {"protocolVersion": revision.name, "serverInfo": self.offer.info_in(revision)}
        self._introduce(request, revision, who)
        return [SessionAgreed(self.terms)]

    def _introduce(self, request: Request, revision: Revision, result: JsonObject) -> None:
        result["capabilities"] = self.declared(revision)
        if self.offer.instructions is not None:
            result["instructions"] = self.offer.instructions
        try:
            self.answer(request.id, result)
        except RequestError as error:  # long instructions, and a client that does not read
            self.refuse(request.id, error)

    def _set_level(self, request: Request, terms: Terms) -> list[Event]:
        level = request.params.get("level")
        if level not in LOG_LEVELS:
            return self._refuse_call(request, errors.INVALID_PARAMS, f"level must be one of {', '.join(LOG_LEVELS)}")
        assert self.terms is not None  # it is none of the requests that may come before them
        self.terms = attrs.evolve(self.terms, log_level=level)
        self.answer(request.id, {})
        return []

    _OWN: ClassVar[Mapping[str, Callable[[Any, Request, Terms], list[Event]]]] = {
        **SessionProtocol._OWN,
        "initialize": _initialize,
        "server/discover": _discover,
        "logging/setLevel": _set_level,
    }

    def _judge_notification(self, note: Notification, principal: Any, headers: Mapping[str, str]) -> list[Event]:
        if note.method != "notifications/initialized":
            return super()._judge_notification(note, principal, headers)
        if self.terms is None or self.opened:
            return [PeerMistake(f"{note.method} does not follow an initialize; ignored")]
        self.opened = True
        return [Opened(self.terms)]
