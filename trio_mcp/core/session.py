"""Sessions: find the terms of each message, and check whether they allow it to be sent or served.

The terms of a message are its revision and the capabilities, identity and principal of the peer (`Terms`).  A legacy
revision has a handshake (`initialize`), which sets the terms of the whole link.  A modern revision has none: each
request has its terms in `_meta`.  These are the two eras.

A session is a `Peer` that knows the protocol: the identity and capabilities of our side (`Offer`), the handshake, the
terms, and the methods and notifications that each side may use.  It answers some requests itself: `ping`, `initialize`,
`server/discover`, `logging/setLevel`, and requests with an unknown method, an undeclared capability or an unsupported
version.  It returns all other requests and notifications with their terms, as `Call` and `Notice`.

This file has the code for both roles and the server.  The client, which must first find out the revision of its server,
is in `opening`.  One server session serves both eras on one link, and they do not affect each other (ver-08, ver-09).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import attrs

from trio_mcp.core import errors
from trio_mcp.core.errors import NotDeclared, NotInThisRevision, RequestError, SessionClosed, UsageError, shown
from trio_mcp.core.messages import (
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
    mutable_record,
    prepare,
    record,
)
from trio_mcp.core.requests import ANSWER, CANCELLED, LinkKind, Peer, PeerMistake
from trio_mcp.core.revisions import (
    LATEST,
    LOG_LEVELS,
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_SERVER_INFO,
    META_SUBSCRIPTION_ID,
    META_VERSION,
    NOTHING,
    REVISIONS,
    MethodRule,
    Revision,
    Role,
    Terms,
    check_extension,
    declares,
    in_protocol,
    is_like_protocol,
    meta_of,
    missing_capabilities,
)

if TYPE_CHECKING:
    from trio_mcp.core.extensions import Extensions

__all__ = ["Call", "Notice", "Offer", "Opened", "ServerProtocol", "SessionAgreed", "SessionProtocol"]


@mutable_record
class Call(Event):
    """A request to serve, and its terms.  It waits for `answer` or `refuse`."""

    request: Request
    terms: Terms


@record
class Notice(Event):
    """A notification and its terms."""

    notification: Notification
    terms: Terms


@record
class SessionAgreed(Event):
    """The server has answered `initialize`: a session with these terms begins.

    Only a server has this event.  On a client `Opened` comes at the same moment.
    """

    terms: Terms


@record
class Opened(Event):
    """The handshake has ended.  All messages that the terms allow may be sent."""

    terms: Terms


_VERSION_SHOWN = 80  # characters of an unsupported version in the error data: the client may send a very long one


def _is_info(info: object) -> TypeGuard[Mapping[str, Any]]:
    return (
        isinstance(info, (dict, Mapping))  # a dict first: the test for other mappings takes ten times as long
        and isinstance(info.get("name"), str)
        and isinstance(info.get("version"), str)
    )


def _as_revisions(given: Iterable[Revision]) -> tuple[Revision, ...]:
    revisions = tuple(given)
    for each in (given,) if isinstance(given, str) else revisions:
        if not isinstance(each, Revision):
            name = each if each in tuple(REVISIONS) else LATEST.name
            raise UsageError(f'revisions must be Revision objects, got {each!r}; use REVISIONS["{name}"]')
    if not revisions:
        raise UsageError("revisions must have at least one revision")
    return revisions


_DERIVED: Any = attrs.field(init=False, repr=False, eq=False)


@mutable_record
class Offer:
    """The description of our side: its identity, its capabilities and its revisions.

    Identity and capabilities have the JSON form of the newest revision.  An older revision gets only the fields that it
    defines.  `revisions` may be in any order.  `extensions` are declared together with the capabilities.  Raises
    `UsageError` if the identity lacks a name or a version, if there is no revision, if a capability is unknown or is
    not an object, if the identifier of an extension is malformed, or if a value cannot be written as JSON.
    """

    info: Mapping[str, Any]
    capabilities: Mapping[str, Any] = NOTHING
    revisions: tuple[Revision, ...] = attrs.field(default=tuple(REVISIONS.values()), converter=_as_revisions)
    instructions: str | None = None  # the advice of a server on how to use it
    extensions: Extensions | None = None
    # Computed once per offer and not once per session: over HTTP each modern request has its own session, which exists
    # for microseconds.
    legacy: Revision | None = _DERIVED
    """The newest offered revision of the legacy era."""
    modern: Revision | None = _DERIVED
    """The newest offered revision of the modern era."""
    unreadable_id_is_null: bool = _DERIVED
    """See `Peer.unreadable_id_is_null`.  Used before a revision is agreed: True if an offered revision has null ids."""
    plain: dict[tuple[Role, Revision], frozenset[str]] = _DERIVED
    """For each role of our side and each revision: the received methods that need no check of capabilities."""
    completed: dict[tuple[Revision, bool], CachedResult] = _DERIVED
    """For each revision, and for cacheable methods or others: the members that a server adds to complete results."""
    infos: dict[Revision, JsonObject] = _DERIVED
    """For each revision: the part of our identity that it knows."""
    _declared: dict[tuple[Role, Revision], JsonObject] = _DERIVED

    def __attrs_post_init__(self) -> None:
        if not _is_info(self.info):
            raise UsageError("info must have a name and a version, both strings")
        self._check_capabilities()
        legacy, modern = ([each for each in self.revisions if each.handshake is era] for era in (True, False))
        self.legacy, self.modern = max(legacy, key=str, default=None), max(modern, key=str, default=None)
        self.unreadable_id_is_null = any(each.unreadable_id_is_null for each in self.revisions)
        self.plain, self.infos, self._declared, self.completed = {}, {}, {}, {}
        for each in self.revisions:
            info = self.infos[each] = {name: value for name, value in self.info.items() if name in each.info_fields}
            special = {need.method for need in each.conditional_needs}
            for role in Role:
                declared = each.declarable(role, self.capabilities)
                if self.extensions is not None:
                    declared = self.extensions.declare(each, declared)
                self._declared[role, each] = declared
                requires = self.extensions is not None and role is Role.SERVER and self.extensions.requires(each)
                self.plain[role, each] = frozenset(
                    name
                    for name, row in each.requests[role.other].items()
                    if name not in special and not requires and (not row.needs or declares(declared, row.needs))
                )
            for cacheable in (False, True):
                members = {**each.complete(cacheable), "_meta": {META_SERVER_INFO: info}}
                self.completed[each, cacheable] = CachedResult(members)
        # Write these values once as a test.  Later `receive` sends them, and `receive` must never raise.
        encode(Response(0, {"values": [*self.infos.values(), *self._declared.values(), self.instructions]}))

    def _check_capabilities(self) -> None:
        # The names of all revisions and not only of the offered ones: a program that offers only an old revision need
        # not remove the capabilities of newer revisions.
        tables = [table for each in (*REVISIONS.values(), *self.revisions) for table in each.capabilities.values()]
        known = sorted(set().union(*tables))
        for name, value in self.capabilities.items():
            if name not in known:
                raise UsageError(f"there is no capability {name!r}; the capabilities are {', '.join(known)}")
            if not isinstance(value, Mapping):
                raise UsageError(f"the capability {name} must be an object, for example {{}}")
        for extension in self.capabilities.get("extensions", NOTHING):
            check_extension(extension)
        for name, value in self.capabilities.get("experimental", NOTHING).items():
            if not isinstance(value, Mapping):
                raise UsageError(f"the experimental capability {name!r} must be an object, for example {{}}")

    @property
    def mcp_names(self) -> Mapping[str, str]:
        """The parameter that the HTTP header Mcp-Name repeats, for the methods of extensions that have one."""
        return NOTHING if self.extensions is None else self.extensions.mcp_names

    @property
    def versions(self) -> list[str]:
        """The names of the revisions, newest first."""
        return sorted(map(str, self.revisions), reverse=True)

    def find(self, version: object, *, handshake: bool) -> Revision | None:
        """Return the offered revision with this name, or None if it is not offered or is of the other era."""
        for each in self.revisions:
            if each.name == version and each.handshake is handshake:
                return each
        return None

    def declared(self, role: Role, revision: Revision) -> JsonObject:
        """Return the part of our capabilities that this revision knows."""
        return self._declared[role, revision]


class SessionProtocol(Peer):
    """The part of a session that both roles share; see the head of this file.

    If `terms` are given, there is no handshake: the link is open from the start.
    """

    _ROLE: ClassVar[Role]

    def __init__(
        self,
        offer: Offer,
        *,
        link: LinkKind = LinkKind.DUPLEX,
        limits: Limits | None = None,
        terms: Terms | None = None,
    ) -> None:
        if terms is not None and terms.revision not in offer.revisions:
            raise UsageError(f"the terms have the revision {terms.revision}, which is not offered")
        super().__init__(self._ROLE, link=link, limits=limits)
        self.offer = offer
        self.terms = terms
        self.opened = terms is not None
        """Whether the handshake has ended.  Before that, only early messages (`MethodRule.early`) may be sent."""
        self._set_up()

    def _set_up(self) -> None:
        """Create the attributes that only one role has."""

    def declared(self, revision: Revision) -> JsonObject:
        """Return the part of our capabilities that this revision knows."""
        return self.offer.declared(self.role, revision)

    @property
    def unreadable_id_is_null(self) -> bool:
        """As `Peer.unreadable_id_is_null`; before a revision is agreed, the offer decides."""
        return (self.offer if self.terms is None else self.terms.revision).unreadable_id_is_null

    # Messages that we send.

    def _check_call(
        self, method: str, params: JsonObject, progress: bool, about: Id | None, undeclared: bool
    ) -> tuple[JsonObject, CachedResult | None]:
        terms = self._terms_for(method, about)
        row = terms.revision.request(self.role, method)
        if self._is_too_early(row, terms.revision):
            raise UsageError(f"{method} was not sent: the handshake has not ended")
        if row is None:
            self._check_beyond(method, terms, undeclared=undeclared)
        elif not undeclared and (missing := missing_capabilities(terms.revision, row, params, terms.capabilities)):
            raise NotDeclared(method, row.owner.value, missing[0])
        return params, None

    def _may_notify(self, method: str, params: JsonObject, about: Id | None) -> bool:
        if self.closed or (about is not None and not self.serves(about)):
            return False
        terms = self._terms_for(method, about)
        row = terms.revision.notification(self.role, method)
        if row is None:
            self._check_beyond(method, terms, notification=True)
        elif not declares(self.declared(terms.revision), row.needs):
            raise NotDeclared(method, row.owner.value, row.needs)
        return not self._is_too_early(row, terms.revision)

    def _terms_for(self, method: str, about: Id | None) -> Terms:
        if self.closed:
            raise SessionClosed(f"{method} was not sent: the link is closed")
        terms = self.terms if about is None else self.terms_of(about)
        if terms is None:
            why = "no revision has been agreed on this link" if about is None else f"request {about!r} has ended"
            raise UsageError(f"{method} was not sent: {why}")
        return terms

    def _check_beyond(self, method: str, terms: Terms, *, undeclared: bool = False, notification: bool = False) -> None:
        """Check a message that this revision does not define: of an extension, or agreed between two programs.

        Raises `NotInThisRevision` if another revision defines it, for a request of a modern server, which can send
        none, and for a name that is probably misspelt.  With `undeclared` spelling and declarations are not
        checked; a proxy, which has a fallback, sends unknown names as they are.
        """
        revision, extensions = terms.revision, self.offer.extensions
        row = None if extensions is None else extensions.find(self.role, revision, method, notification=notification)
        known = in_protocol(method) or (extensions is not None and method in extensions)
        passes_on = undeclared or (extensions is not None and extensions.fallback)
        elsewhere = row is None and (known or (is_like_protocol(method) and not passes_on))
        if elsewhere or (self.role is Role.SERVER and not (revision.handshake or notification)):
            raise NotInThisRevision(method, revision.name, revision.instead_of(method))
        if row is not None and extensions is not None and not undeclared:
            missing = extensions.lacking(self.role, method, terms)
            if missing is not None:
                raise NotDeclared(method, self.role.other.value, missing)

    def result_types(self, method: str, terms: Terms) -> frozenset[str]:
        """Return the result types beyond those of the protocol that results of this method may have (rtype-02)."""
        extensions = self.offer.extensions
        return frozenset() if extensions is None else extensions.result_types(method, terms)

    def _is_too_early(self, row: MethodRule | None, revision: Revision) -> bool:
        return revision.handshake and not self.opened and not (row is not None and row.early)

    def refuse(self, id: Id, error: RequestError) -> bool:
        """As `Peer.refuse`.  A code that the request's revision forbids is replaced; see `Revision.error_code`."""
        terms = self.terms_of(id)
        if terms is not None and type(error.code) is int:
            error = RequestError(terms.revision.error_code(error.code), error.message, error.data)
        return super().refuse(id, error)

    # Messages that the other side sends.

    def receive(
        self,
        message: Message,
        now: float,
        *,
        about: Hashable | None = None,
        principal: Any = None,
        headers: Mapping[str, str] = NOTHING,
    ) -> list[Event]:
        """As `Peer.receive`, but requests and notifications that pass all checks become `Call` and `Notice`.

        `principal` and `headers` are those of this message, and become part of its terms.
        """
        received = super().receive(message, now, about=about)
        if type(message) is Response:  # the fast path of a client: only the caller reads the result
            return received
        if len(received) == 1 and type(received[0]) is Request:  # the fast path: nearly every message to a server
            return self._check_request(received[0], principal, headers)
        events: list[Event] = []
        for event in received:
            if isinstance(event, Request):
                events += self._check_request(event, principal, headers)
            elif isinstance(event, Notification):
                events += self._check_notification(event, principal, headers)
            else:
                events.append(event)
        return events

    def _check_by_link(self, request: Request, principal: Any, headers: Mapping[str, str]) -> list[Event]:
        """Serve or refuse a received request under the terms of the link."""
        terms = self.terms or self._early_terms(request.method)
        if terms is None:
            return self._without_terms(request)
        return self._serve(request, self._for_message(terms, principal, headers))

    _check_request = _check_by_link

    def _early_terms(self, method: str) -> Terms | None:
        """Return provisional terms for an early method before the handshake, and None for other methods."""
        legacy = self.offer.legacy
        if legacy is None:
            return None
        sender = self.role.other
        row = legacy.request(sender, method) or legacy.notification(sender, method)
        return Terms(legacy) if row is not None and row.early else None  # `early` is the same in every revision

    def _without_terms(self, request: Request) -> list[Event]:
        """Refuse a request that comes before the terms are agreed."""
        if not any(self._exists(request.method, each) for each in self.offer.revisions):
            why = f"{shown(request.method)} does not exist in {', '.join(self.offer.versions)}"
            return self._refuse_call(request, errors.METHOD_NOT_FOUND, why)
        why = f"{request.method} must not be sent before the end of initialize"
        return self._refuse_call(request, errors.INVALID_REQUEST, why)

    def _exists(self, method: str, revision: Revision) -> bool:
        """Whether this side may get a request with this method in a revision."""
        extensions = self.offer.extensions
        return revision.request(self.role.other, method) is not None or (
            extensions is not None and extensions.serves(self.role.other, revision, method, notification=False)
        )

    def _check_notification(
        self, note: Notification, principal: Any, headers: Mapping[str, str], terms: Terms | None = None
    ) -> list[Event]:
        """Return a `Notice`, or report a method that the terms do not have: "unknown notifications are ignored".

        `terms` are those of the notification itself, or None for those of the link.
        """
        extensions = self.offer.extensions
        if terms is None:
            terms = self.terms or self._early_terms(note.method)
        if terms is not None and terms.revision.notification(self.role.other, note.method) is not None:
            return [Notice(note, self._for_message(terms, principal, headers))]
        why = f"{shown(note.method)} is not a notification for the {self.role.value} here; ignored"
        if terms is not None and extensions is not None:
            sender = self.role.other
            if extensions.serves(sender, terms.revision, note.method, notification=True):
                missing = extensions.lacking(sender, note.method, terms)
                if missing is None:
                    return [Notice(note, self._for_message(terms, principal, headers))]
                why = f"{note.method} belongs to {missing[-1]}, which the {sender.value} has not declared; ignored"
        return [PeerMistake(why)]

    def _serve(self, request: Request, terms: Terms) -> list[Event]:
        """Serve a request if its method exists and we declared the capabilities that it needs; otherwise refuse it."""
        method, revision = request.method, terms.revision
        if method not in self.offer.plain[self.role, revision]:
            row = revision.request(self.role.other, method)
            if row is None:
                return self._serve_beyond(request, terms)
            if missing := missing_capabilities(revision, row, request.params, self.declared(revision)):
                needed = ".".join(missing[0])
                why = f"{method} needs the {self.role.value} capability {needed}, which was not declared"
                # core-32: if the capability of the method is missing, the method does not exist.  If only the
                # capability for a mode in its params is missing, the params are invalid.
                code = errors.METHOD_NOT_FOUND if missing[0] == row.needs else errors.INVALID_PARAMS
                return self._refuse_call(request, code, why)
            extensions = self.offer.extensions
            if extensions is not None and method not in self._ANSWERED_HERE and self.role is Role.SERVER:
                refused = extensions.refusal_of_all(method, terms)
                if refused is not None:
                    return self._refuse_call(request, refused.code, refused.message, refused.data)
        answer_here = self._ANSWERED_HERE.get(method)
        return [Call(request, terms)] if answer_here is None else answer_here(self, request, terms)

    def _serve_beyond(self, request: Request, terms: Terms) -> list[Event]:
        """Serve a request that the revision does not define, if an extension or this program does."""
        method, revision, sender, extensions = request.method, terms.revision, self.role.other, self.offer.extensions
        if extensions is None or not extensions.serves(sender, revision, method, notification=False):
            return self._refuse_call(request, errors.METHOD_NOT_FOUND, f"{shown(method)} does not exist in {revision}")
        refused = extensions.refusal(sender, method, terms)
        if refused is not None:
            return self._refuse_call(request, refused.code, refused.message, refused.data)
        return [Call(request, terms)]

    def _refuse_call(self, request: Request, code: int, why: str, data: Any = None) -> list[Event]:
        super().refuse(request.id, RequestError(code, why, data))
        return [PeerMistake(why)]

    def _answer_ping(self, request: Request, terms: Terms) -> list[Event]:
        super().answer(request.id, {})
        return []

    _ANSWERED_HERE: ClassVar[Mapping[str, Callable[[Any, Request, Terms], list[Event]]]] = {"ping": _answer_ping}
    """The methods that the session answers itself."""

    @staticmethod
    def _for_message(terms: Terms, principal: Any, headers: Mapping[str, str]) -> Terms:
        """Return the terms of the link with the principal and the headers of one message."""
        if principal is None and not headers:
            return terms
        return attrs.evolve(terms, principal=principal, headers=headers)


# Members of a result that have the same meaning for all methods.
_COMMON_MEMBERS = frozenset({"_meta", "resultType", "ttlMs", "cacheScope"})
# The keys of `_meta` that carry the terms of a modern request.
_TERMS = (META_VERSION, META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_LOG_LEVEL)


def _terms_meta(meta: Mapping[str, Any]) -> JsonObject:
    """Return the part of `_meta` that carries the terms."""
    return {name: meta[name] for name in _TERMS if name in meta}


class ServerProtocol(SessionProtocol):
    """The server's end of a link, for both eras at the same time.

    If `terms` are given, the link is open from the start.  It then serves one request: the session of this request is
    stored elsewhere, or there is no session.
    """

    _ROLE = Role.SERVER

    # A cache: the `_meta` and terms of the latest modern request.  Most requests on one link have the same terms.
    _last_terms: tuple[JsonObject, Terms | None] = {}, None

    # Messages that we send.

    def _may_notify(self, method: str, params: JsonObject, about: Id | None) -> bool:
        terms = self.terms if about is None else self.terms_of(about)
        if terms is not None:
            revision = terms.revision
            subscription = meta_of(f"the params of {method}", params).get(META_SUBSCRIPTION_ID)
            if method == "notifications/message" and not terms.wants_log(params.get("level", "")):
                return False
            subscribed = about is not None and self._serving[about].method in revision.teardown
            belongs = method in revision.on_subscriptions or self._is_subscribed(method, revision)
            if subscribed is not belongs:
                where = "never" if subscribed else "only"
                raise UsageError(f"in {revision}, {method} is {where} sent on a subscription")
            # sub-05: the two ids must be equal in value and type.
            if belongs and (type(subscription), subscription) != (type(about), about):
                expected = f"the id of the subscription, {about!r}, got {shown(subscription)}"
                raise UsageError(f"{META_SUBSCRIPTION_ID} of {method} must be {expected}")
        return super()._may_notify(method, params, about)

    def _is_subscribed(self, method: str, revision: Revision) -> bool:
        """Whether a notification of an extension belongs to subscriptions."""
        extensions = self.offer.extensions
        row = None if extensions is None else extensions.find(Role.SERVER, revision, method, notification=True)
        return row is not None and row.subscribed

    def answer(self, id: Id, result: JsonObject) -> bool:
        """As `Peer.answer`.  Adds the members that every modern result of the method must have.

        Raises `UsageError` for an input-required result if this method or revision does not have it, and for another
        result type unless it belongs to an extension that both sides have declared (rtype-02).
        """
        serving = self._serving.get(id)
        terms = None if serving is None else serving.terms or self.terms
        if serving is None or terms is None:
            return False
        method, revision = serving.method, terms.revision
        more = self.offer.completed[revision, method in revision.cacheable]
        if type(result) is dict and _COMMON_MEMBERS.isdisjoint(result):
            response = Response(id, result)
            if revision.result_type and serving.state is not CANCELLED:
                prepare(response, more)
            return self._finish(id, response, ANSWER)
        meta = meta_of(f"the result of {method}", result)
        kind = result.get("resultType", "complete")
        if kind == "input_required" and method not in revision.input_required:
            raise UsageError(f"{method} cannot be answered with an input-required result in {revision}")
        if revision.result_type:
            if kind not in ("complete", "input_required") and kind not in self.result_types(method, terms):
                raise UsageError(f"{method} cannot be answered with the result type {shown(kind)}: no extension has it")

            def completed() -> JsonObject:
                # cache-26: hints belong to complete results only.
                return {**(more if kind == "complete" else NOTHING), **result, "_meta": {**more["_meta"], **meta}}

            # The key has no method, because a cached result belongs to one method.
            result = result.with_more(revision.name, more, completed) if type(result) is CachedResult else completed()
        return super().answer(id, result)

    # Messages that the client sends.

    def _check_request(self, request: Request, principal: Any, headers: Mapping[str, str]) -> list[Event]:
        meta = request.params.get("_meta", NOTHING)
        # A server with only legacy revisions must ignore the key: its error would make it look like a modern server.
        if META_VERSION in meta and self.offer.modern is not None:
            return self._modern(request, meta, principal, headers)
        return self._check_by_link(request, principal, headers)

    def _without_terms(self, request: Request) -> list[Event]:
        """Refuse a request that has no version in its `_meta` and comes before the handshake."""
        modern = self.offer.modern
        if modern is not None and request.method == "initialize":
            # ver-12: the error names the supported versions, because a legacy client can show its user only the error.
            return self._unsupported(request, request.params.get("protocolVersion"))
        if modern is None or not self._exists(request.method, modern):
            return super()._without_terms(request)
        unless = "" if self.offer.legacy is None else ", unless the connection was opened with initialize"
        return self._refuse_call(request, errors.INVALID_PARAMS, f"{modern.meta_fault(None)}{unless}")

    def _modern(
        self, request: Request, meta: Mapping[str, Any], principal: Any, headers: Mapping[str, str]
    ) -> list[Event]:
        """Serve or refuse a modern request.  state-01: only its own `_meta` counts, not earlier messages."""
        serving = self._serving[request.id]
        if serving.batch is not None:
            # batch-03: no modern revision has batches, and an open subscription would delay the other answers for ever.
            why = f"a request of {shown(meta[META_VERSION])} must not be part of a batch; send it alone"
            return self._refuse_call(request, errors.INVALID_REQUEST, why)
        last, terms = self._last_terms
        if terms is not None and principal is None and not headers and (meta == last or _terms_meta(meta) == last):
            serving.terms = terms
            return self._serve(request, terms)
        revision = self.offer.find(meta[META_VERSION], handshake=False)
        if revision is None:
            return self._unsupported(request, meta[META_VERSION])
        if (fault := revision.meta_fault(meta)) is not None:
            return self._refuse_call(request, errors.INVALID_PARAMS, fault)
        capabilities, level, info = meta[META_CLIENT_CAPABILITIES], meta.get(META_LOG_LEVEL), meta.get(META_CLIENT_INFO)
        if level is not None and level not in LOG_LEVELS:
            return self._refuse_call(request, errors.INVALID_PARAMS, f"{META_LOG_LEVEL} must be one of {LOG_LEVELS}")
        # meta-14: the identity is only for display, so a request with a malformed one is not refused.
        terms = Terms(revision, capabilities, info if _is_info(info) else None, level, principal, headers)
        if principal is None and not headers:
            self._last_terms = _terms_meta(meta), terms
        serving.terms = terms
        return self._serve(request, terms)

    def _terms_in(self, note: Notification) -> Terms | None:
        """Return the terms that a modern notification carries, or None.

        The modern revision defines none that needs terms, but a notification of an extension does.
        """
        meta = note.params.get("_meta")
        revision = self.offer.find(meta.get(META_VERSION), handshake=False) if isinstance(meta, dict) else None
        if meta is None or revision is None or revision.meta_fault(meta) is not None:
            return None
        info = meta.get(META_CLIENT_INFO)
        return Terms(revision, meta[META_CLIENT_CAPABILITIES], info if _is_info(info) else None)

    def _unsupported(self, request: Request, requested: object) -> list[Event]:
        supported = self.offer.versions
        data: JsonObject = {"supported": supported}
        if not isinstance(requested, str):
            why = f"the protocol version must be a string: one of {', '.join(supported)}"
            return self._refuse_call(request, errors.INVALID_PARAMS, why, data)
        requested = requested[:_VERSION_SHOWN]
        why = f"protocol version {shown(requested)} is not supported; supported: {', '.join(supported)}"
        return self._refuse_call(request, errors.UNSUPPORTED_VERSION, why, {**data, "requested": requested})

    def _discover(self, request: Request, terms: Terms) -> list[Event]:
        self._introduce(request, terms.revision, {"supportedVersions": self.offer.versions})
        return []

    def _initialize(self, request: Request, terms: Terms) -> list[Event]:
        params = request.params
        version, capabilities, info = (params.get(name) for name in ("protocolVersion", "capabilities", "clientInfo"))
        if self.terms is not None:
            return self._refuse_call(request, errors.INVALID_REQUEST, "initialize must be sent only once")
        if not isinstance(version, str) or not isinstance(capabilities, dict) or not _is_info(info):
            why = "initialize needs protocolVersion (a string), capabilities (an object) and clientInfo (name, version)"
            return self._refuse_call(request, errors.INVALID_PARAMS, why)
        # life-09..11: the requested version if we support it, otherwise our latest legacy version.
        revision = self.offer.find(version, handshake=True) or terms.revision
        self.terms = Terms(revision, capabilities, info)  # without the principal and headers, which are per request
        result = {"protocolVersion": revision.name, "serverInfo": self.offer.infos[revision]}
        self._introduce(request, revision, result)
        return [SessionAgreed(self.terms)]

    def _introduce(self, request: Request, revision: Revision, result: JsonObject) -> None:
        """Answer with `result` and the description of this server."""
        result["capabilities"] = self.declared(revision)
        if self.offer.instructions is not None:
            result["instructions"] = self.offer.instructions
        try:
            self.answer(request.id, result)
        except RequestError as error:  # the instructions are long, and the client does not read
            self.refuse(request.id, error)

    def _set_level(self, request: Request, terms: Terms) -> list[Event]:
        level = request.params.get("level")
        if level not in LOG_LEVELS:
            return self._refuse_call(request, errors.INVALID_PARAMS, f"level must be one of {', '.join(LOG_LEVELS)}")
        assert self.terms is not None  # `logging/setLevel` is not an early method
        self.terms = attrs.evolve(self.terms, log_level=level)
        self.answer(request.id, {})
        return []

    _ANSWERED_HERE: ClassVar[Mapping[str, Callable[[Any, Request, Terms], list[Event]]]] = {
        **SessionProtocol._ANSWERED_HERE,
        "initialize": _initialize,
        "server/discover": _discover,
        "logging/setLevel": _set_level,
    }

    def _check_notification(
        self, note: Notification, principal: Any, headers: Mapping[str, str], terms: Terms | None = None
    ) -> list[Event]:
        if note.method != "notifications/initialized":
            return super()._check_notification(note, principal, headers, self._terms_in(note))
        if self.terms is None or self.opened:
            return [PeerMistake(f"{note.method} without a preceding initialize; ignored")]
        self.opened = True
        return [Opened(self.terms)]
