"""One session of a relay with its upstream server: its life, the calls in it, and the questions of the server.

A session is opened again after its end, by the next request.

| State | A request | It opens | Opening fails | The server ends it | Idle for too long |
|---|---|---|---|---|---|
| closed | opening; refused during a pause | | | | |
| opening | waits | open | closed, pause | | |
| open | is sent | | | closed, pause | closing |
| closing | waits, and then uses a new `Upstream` | | | | |

`reopen` ends a session and opens it again at once, whatever its state is: the upstream program has changed.

So the next request restarts a process that has died, and a client that listens to changes restarts it after a second,
if no request comes.  The first restart is immediate; later ones come after pauses that grow to 30 seconds, because a
process that dies at once must not be restarted by every request.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from trio_mcp.client.callbacks import FormElicitationRequest, SamplingRequest, UrlElicitationRequest
from trio_mcp.client.client import Client, open_client
from trio_mcp.client.session import DroppingQueue
from trio_mcp.core.codec import REQUESTS, from_json, to_json
from trio_mcp.core.content import Model, well_formed
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    RESOURCE_NOT_FOUND,
    InputUnavailable,
    McpError,
    NotDeclared,
    NotInThisRevision,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.messages import Json, JsonObject, Request
from trio_mcp.core.models import CreateMessageResult, ListToolsResult, LoggingMessageParams, Root
from trio_mcp.core.revisions import LATEST, Revision, check_meta, in_protocol
from trio_mcp.core.shares import is_principal
from trio_mcp.core.subscriptions import ChangeEvent, ChangeKind
from trio_mcp.server.context import Context
from trio_mcp.server.questions import Elicit, ElicitUrl, Inquiry, ListRoots, Sample
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.relay.relay import Relay

__all__ = ["FORWARDED", "RelayedCall", "Upstream", "WatchedChange", "owner_of"]

_log = logging.getLogger("trio_mcp.relay")

# Seconds from the end of a session or a failed attempt to the next attempt: after the first failure in a row, after the
# second, and so on.
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_STABLE = 30.0  # a session that was open for this many seconds resets the count of failures; equals the longest pause
_MAX_ELICITATIONS = 100  # URL elicitations that are not known to be complete; as many as the client keeps
_PER_HOP = ("_meta", "inputResponses", "requestState")  # params that are not forwarded
_QUESTIONS = frozenset({"tools/call", "prompts/get", "resources/read"})  # requests during which a server may ask
_LISTS: Mapping[str, Callable[[Client, str | None], Awaitable[Model]]] = {
    "tools/list": Client.list_tools_page,
    "prompts/list": Client.list_prompts_page,
    "resources/list": Client.list_resources_page,
    "resources/templates/list": Client.list_resource_templates_page,
}
_LISTED = (ChangeKind.TOOLS, ChangeKind.PROMPTS, ChangeKind.RESOURCES)
FORWARDED = frozenset({*_LISTS, *_QUESTIONS, "completion/complete"})
"""The requests that are sent upstream."""
_Message: TypeAlias = LoggingMessageParams | tuple[str, JsonObject]  # the latter has the method and its params
_SAMPLING = (
    "max_tokens", "system_prompt", "temperature", "stop_sequences", "model_preferences", "include_context",
    "tool_choice", "metadata",
)  # fmt: skip


def owner_of(link: Any) -> Hashable | None:
    """The owner of the upstream session that a request on `link` uses: see the second table in `relay.relay`.

    `link` is a connection, a session, or a single request.  Returns the holder of a principal, the link of a client
    without one, or None for a single request without a principal.
    """
    holder: Hashable | None = link.account.holder
    if is_principal(holder):
        return holder
    return None if link.alone else link


class RelayedCall:
    """A running request and the client that sent it.

    A call that has ended, and whose task goes on, is given the `link` and the `owner` of the client.
    """

    def __init__(self, ctx: Context, *, link: Any = None, owner: Hashable | None = None) -> None:
        self.ctx = ctx
        self.notifies = False
        """Whether this is a notification, which has no request."""
        self.link, self.owner = link, owner
        if link is None:
            link = ctx._open_link("a request")
            self.notifies = link.detached
            self.link = link.origin if self.notifies else link
            self.owner = owner_of(self.link)
        self.question_lock = trio.Lock()  # asks one question at a time, because a 2026-07-28 call may have only one
        self.logs: DroppingQueue[_Message] = DroppingQueue()
        """Log messages, and notifications that the protocol does not have."""
        self.asks_for_task = False
        """Whether its request to a server of 2025-11-25 asks for a task, so that each message of it names the task."""
        self.task: str | None = None
        """The id that the upstream server has given to the task of this call; None if it is no task."""
        self.logs_sent: trio.Event | None = None  # set when all `logs` are sent; None if there are none


_current_call: ContextVar[RelayedCall | None] = ContextVar("the current call of a relay", default=None)


class WatchedChange:
    """A change to which clients of one upstream session are subscribed."""

    def __init__(self) -> None:
        self.listeners = 0
        self.scope = trio.CancelScope()
        self.announced = False
        """A subscription of a client was acknowledged; in 2026-07-28 before the upstream server has agreed."""
        self.missed = False
        """A change may have been missed since the acknowledgement."""
        self.settled = trio.Event()
        self.failure: McpError | None = None


class _UpstreamLife:
    """One opening of a session, up to its end."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.settled = trio.Event()  # set when it is open or has failed
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.reopens = False  # its end is followed by another opening of the same session

    @property
    def closing(self) -> bool:
        return self.scope.cancel_called and not self.reopens

    @property
    def ending(self) -> bool:
        return self.scope.cancel_called or (self.client is not None and self.client.closed)


class Upstream:
    """One session with the upstream server, and the calls that run in it; see the head of this file.

    After `idle` seconds without use it is closed.
    """

    def __init__(self, relay: Relay) -> None:
        self.owner: Hashable | None = None
        self.holder: Hashable | None = None
        self.shared = False
        """Whether calls of several clients may run in it."""
        self.lists_known = False
        """Whether clients may have lists that can be out of date when the session opens."""
        self.idle = math.inf
        self.users = 0
        self.last_used = -math.inf
        self._relay = relay
        self._client_disconnected = False
        self._life = _UpstreamLife()
        self._life.ended.set()
        self._failures = 0  # ends and failed attempts in a row, without a stable session between them
        self._not_before = -math.inf
        self._reason = ""  # why there is no session, for error messages
        self._calls: dict[RelayedCall, None] = {}
        self._elicitations: OrderedDict[UrlElicitationRequest, tuple[Context, ElicitUrl]] = OrderedDict()
        self._roots_given = False
        self._early: DroppingQueue[tuple[str, _Message]] = DroppingQueue()  # messages of tasks that no call has yet

    # For the tasks that use the session.

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the session as in use for the duration of the block."""
        self.users += 1
        self._life.scope.deadline = math.inf
        try:
            yield
        finally:
            self.users -= 1
            if not self.users:
                self.last_used = trio.current_time()
                self._life.scope.deadline = self.last_used + self.idle
                if self._client_disconnected:
                    self.close()

    async def client(self) -> Client:
        """The client of the session, which is opened first if needed.

        Raises RequestError if opening fails, or during a pause.
        """
        while True:
            life = self._life
            if life.ended.is_set():
                life = self._start_reopening()
            elif life.ending:
                await life.ended.wait()
                continue
            if not life.settled.is_set():
                await life.settled.wait()
            if life.ending:
                continue
            if life.client is None:
                raise self._unavailable()
            return life.client

    # For the relay.

    @property
    def closing(self) -> bool:
        """Whether it is being closed, so that its owner needs a new session."""
        return self._life.closing

    def close(self) -> None:
        """Close it.  The relay forgets it when that is done."""
        if self._life.ended.is_set():
            self._relay.forget(self)
        else:
            self._life.scope.cancel(reason="the session with the upstream server is not needed any more")

    def client_disconnected(self) -> None:
        """Close the session when its last call has ended, because its client has disconnected."""
        self._client_disconnected = True
        if not self.users:
            self.close()

    async def open(self) -> Client:
        """Open it for the first time.  Raises as entering `open_client` does."""
        self._life = _UpstreamLife()
        await self._relay.nursery.start(self._run_life, name="a session of a relay")
        return await self.client()

    async def reopen(self) -> None:
        """End the session, and open it again without a pause, unless it is being closed.

        Running calls fail, and requests that come meanwhile wait.  Raises RequestError if it cannot be opened.
        """
        if self.closing:
            return
        with self.used():  # it is closed afterwards if its client disconnects meanwhile
            if not self._life.ended.is_set():
                self._life.reopens = True
                self._life.scope.cancel(reason="the upstream server is started again")
                await self._life.ended.wait()
            self._failures, self._not_before = 0, -math.inf
            await self.client()
            for kind in _LISTED if self.lists_known else ():
                self._publish_change(ChangeEvent(kind))

    async def share(self) -> None:
        """Let other clients use the session as well."""
        if self.shared:
            return
        self.shared = True
        if self._roots_given:
            client = await self.client()
            await client.set_roots(self._list_roots)  # tells the server that its roots are out of date

    # Opening.

    def connect(self) -> AbstractAsyncContextManager[Client]:
        """Make the client of the next opening.  Raises for an invalid target or option."""
        asks, given = self._relay.asks, self._relay.options
        answers: dict[str, Any] = {
            "sampling": self._sample,
            "elicitation": self._elicit,
            "elicitation_url": self._visit_url,
            "roots": self._list_roots,
        }
        own: dict[str, Any] = {
            "on_log": self._logged,
            "on_elicitation_complete": self._elicitation_complete,
            "on_notification": self._notified,
            "tasks": True,
            "log_level": "debug",
            "cache": False,  # two caches in a row would keep a result for twice its lifetime
            **{name: answers[name] for name in asks},
        }
        if "sampling" in asks and "sampling" not in given:
            own["sampling_tools"] = True
        return open_client(self._relay.target, **{**own, **given})

    async def _run_life(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        life, opened_at = self._life, math.inf
        try:
            with life.scope:
                async with self.connect() as client, open_nursery() as nursery:
                    opened_at, life.client = trio.current_time(), client
                    nursery.start_soon(self._watch_lists, client, name="list changes of a relay")
                    task_status.started()
                    life.settled.set()
                    self._relay.session_opened()
                    await client.wait_closed()
        finally:
            now = trio.current_time()
            self._reason = "could not be reached" if opened_at == math.inf else "has ended"
            self._failures = 1 if now >= opened_at + _STABLE else self._failures + 1
            self._not_before = now + _PAUSES[min(self._failures, len(_PAUSES)) - 1]
            life.settled.set()
            life.ended.set()
            if life.closing:
                self._relay.forget(self)

    def _start_reopening(self) -> _UpstreamLife:
        if not self._relay.can_reopen:
            raise RequestError(INTERNAL_ERROR, "the upstream server did not answer: its stream has ended")
        if trio.current_time() < self._not_before:
            raise self._unavailable()
        self._life = _UpstreamLife()
        self._relay.nursery.start_soon(self._reopen, name="a session of a relay")
        return self._life

    async def _reopen(self) -> None:
        try:
            await self._run_life()
        except McpError as error:
            _log.warning("the upstream server could not be reached: %s", error)
        except Exception:  # noqa: BLE001  # callbacks among the client options may raise any exception
            _log.exception("the upstream server could not be reached")

    def _unavailable(self) -> RequestError:
        wait = math.ceil(max(0.0, self._not_before - trio.current_time()))
        when = f"in {wait} s" if wait else "with the next request"
        return RequestError(INTERNAL_ERROR, f"the upstream server {self._reason}; it is started again {when}")

    @property
    def _upstream_revision(self) -> Revision:
        return self._relay.revision

    # Requests.

    async def forward(self, call: RelayedCall, request: Request) -> JsonObject:
        """Send the request upstream and return its result."""
        return await self.work(call, request.method, lambda client: self._call_upstream(client, call, request))

    async def work(
        self, call: RelayedCall, method: str, send: Callable[[Client], Awaitable[Model | JsonObject]]
    ) -> JsonObject:
        """Call `send`, which works upstream for this call, and return its result as JSON for the client."""
        with self.used():
            # Before the session opens, because some servers ask at once.
            if method in _QUESTIONS or not in_protocol(method):
                self._calls[call] = None
            try:
                model = await self._send_upstream(call, method, send)
                async with call.question_lock:
                    pass  # wait for a question that is still being asked
                while call.logs_sent is not None:  # send earlier log messages before the result
                    await call.logs_sent.wait()
            finally:
                self._calls.pop(call, None)
            return self.result(model, call.ctx._terms.revision)

    def result(self, model: Model | JsonObject, revision: Revision) -> JsonObject:
        """Write a result of the upstream server for a client of this revision."""
        if isinstance(model, dict):
            result = {name: value for name, value in model.items() if name != "resultType"}
        elif self._upstream_revision is revision and model.raw is not None:
            result = dict(model.raw)
        else:
            result = to_json(model, revision)
        meta = _end_to_end_meta(result.pop("_meta", None) or {}, revision)
        return {**result, "_meta": meta} if meta else result

    async def forward_notification(self, request: Request) -> JsonObject:
        """Send a notification upstream that the protocol does not have."""
        with self.used():
            client = await self.client()
            params = {name: value for name, value in request.params.items() if name != "_meta"}
            await client.notify(request.method, params)
            return {}

    async def _send_upstream(
        self, call: RelayedCall, method: str, send: Callable[[Client], Awaitable[Model | JsonObject]]
    ) -> Model | JsonObject:
        client = await self.client()
        token = _current_call.set(call)
        try:
            return await send(client)
        except InputUnavailable as error:
            raise _error_for_client(error) from error
        except (RequestError, RemoteProtocolError):
            raise
        except (NotDeclared, NotInThisRevision) as error:
            raise RequestError(METHOD_NOT_FOUND, f"the upstream server does not have {method}") from error
        except (McpError, trio.TooSlowError) as error:
            # The text of the error goes to the log only, because it may contain output of the process.
            _log.warning("%s got no answer from the upstream server: %s", method, error)
            again = "; it has ended, and is started again with the next request"
            again *= self._relay.can_reopen and client.closed
            raise RequestError(INTERNAL_ERROR, f"the upstream server did not answer{again}") from error
        finally:
            _current_call.reset(token)

    async def _call_upstream(self, client: Client, call: RelayedCall, request: Request) -> Model | JsonObject:
        method, ctx = request.method, call.ctx
        if not in_protocol(method):
            given = {name: value for name, value in request.params.items() if name != "_meta"}
            return await client.request(method, given, meta=_end_to_end_meta(ctx.meta, self._upstream_revision))
        params = _params(request, self._upstream_revision)
        if method in _LISTS:
            page = await _LISTS[method](client, params.get("cursor"))
            self.lists_known = True
            if isinstance(page, ListToolsResult):
                self._relay.catalog.learn(page.tools)
            return page
        meta = _end_to_end_meta(ctx.meta, self._upstream_revision)
        on_progress = ctx.progress if "progressToken" in ctx.meta else None
        if method == "tools/call":
            if self._relay.tasks is not None:
                return await self._relay.tasks.call(self, client, call, params, meta)
            arguments = params.get("arguments")
            return await client.call_tool(params["name"], arguments, on_progress=on_progress, meta=meta)
        try:
            result = await client.request(method, params, on_progress=on_progress, meta=meta)
        except RequestError as error:
            # res-06: a server of 2026-07-28 sends the code of wrong params.  The client gets that of its own revision.
            named = isinstance(error.data, dict) and "uri" in error.data
            if method == "resources/read" and error.code == INVALID_PARAMS and named:
                raise RequestError(RESOURCE_NOT_FOUND, error.message, error.data) from None
            raise
        read: Model = from_json(REQUESTS[method].result, result)
        return read

    # Questions of the upstream server.

    def _call_for_message(
        self, calls: Sequence[RelayedCall], meta: Mapping[str, Json] | None = None
    ) -> RelayedCall | str:
        """The call to which a question or log message of the upstream server belongs, or the reason why it is unknown.

        See the third table in `relay.relay`.
        """
        if (id := self._task_in(meta)) is not None:
            return next((each for each in self._calls if each.task == id), "its task is not known")
        call = _current_call.get()
        # With a legacy server the context is that of the opening of the session, so it does not name the call.
        if call is not None and call in self._calls and not self._upstream_revision.handshake:
            return call
        if not calls:
            return "no call is running"
        if self.shared:
            if len({each.link if each.owner is None else each.owner for each in self._calls}) > 1:
                return "calls of several clients are running, and the message does not name its call"
            client = self._life.client
            if client is not None and client.has_unanswered_cancellations:
                return "a call was cancelled, and the upstream server may still work on it"
        # The messages of a task name it (task-26), also before the server has answered that there is a task.
        return next((each for each in reversed(calls) if each.task is None and not each.asks_for_task), calls[-1])

    def _task_in(self, meta: Mapping[str, Json] | None) -> str | None:
        """The upstream server's id of the task that a message names; None if it names none."""
        tasks = self._relay.tasks
        return None if tasks is None or meta is None else tasks.named_in(meta)

    async def _ask(self, make: Callable[[RelayedCall], Inquiry[Any]], meta: Mapping[str, Json] | None = None) -> Any:
        calls = list(self._calls)
        call = self._call_for_message([each for each in calls if each.ctx._link is not None] or calls, meta)
        if isinstance(call, str):
            raise _not_forwarded(call)
        # A task has several questions at once.  Their keys are new also after a restart, when the context is another
        # one (xtask-28): a client that has answered a key does not look at it again.
        key = "passed_on" if call.task is None else f"passed_on-{secrets.token_urlsafe(6)}"
        async with call.question_lock if call.task is None else nullcontext():
            try:
                return (await call.ctx.ask(**{key: make(call)}))[key]
            except trio.Cancelled:
                if self._relay.tasks is not None:
                    await self._relay.tasks.withdrawn(call)
                raise
            except RequestError:
                raise
            except McpError as error:
                if not self._upstream_revision.handshake:
                    raise  # the call itself fails with it
                raise _error_for_upstream(error) from error

    async def _sample(self, asked: SamplingRequest) -> CreateMessageResult:
        params = asked.params
        given: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING}
        if params.tools is not None:
            given["tools"] = well_formed(params.tools)
        result: CreateMessageResult = await self._ask(
            lambda call: Sample(well_formed(params.messages), **given), params.meta
        )
        return result

    async def _elicit(self, asked: FormElicitationRequest) -> Any:
        params = asked.params
        answer = await self._ask(lambda call: Elicit(asked.message, params.requested_schema), params.meta)
        values = getattr(answer, "value", None)
        # None for each field that the user left out: the client in front has applied the defaults that the user saw,
        # so they must not be applied again here.
        return answer if values is None else {**dict.fromkeys(asked.fields), **values}

    async def _visit_url(self, asked: UrlElicitationRequest) -> Any:
        def make(call: RelayedCall) -> ElicitUrl:
            question = ElicitUrl(asked.message, asked.url)
            self._elicitations[asked] = call.ctx, question
            if len(self._elicitations) > _MAX_ELICITATIONS:
                self._elicitations.popitem(last=False)
            return question

        return await self._ask(make, asked.params.meta)

    async def _list_roots(self) -> list[Root]:
        if self.shared and self._upstream_revision.handshake:
            raise _not_forwarded("several clients use this session, and the server would keep the roots of one of them")
        self._roots_given = True
        return list(await self._ask(lambda call: ListRoots()))

    # Notifications of the upstream server.

    def _elicitation_complete(self, page: UrlElicitationRequest) -> None:
        if (asked := self._elicitations.pop(page, None)) is not None:
            self._relay.nursery.start_soon(self._report_complete, *asked, name="elicitation/complete of a relay")

    async def _report_complete(self, ctx: Context, question: ElicitUrl) -> None:
        try:
            await ctx.completed(question)
        except McpError as error:
            _log.info("the completion of a URL elicitation could not be forwarded: %s", error)

    def _notified(self, method: str, params: JsonObject) -> None:
        if not in_protocol(method):
            self._logged((method, params))

    def has_task(self, call: RelayedCall, id: str) -> None:
        """The upstream server has made this call a task.  Its messages may have come before the answer that says so."""
        call.task = id
        for _ in range(len(self._early)):
            task, message = self._early.take()
            if task == id:
                self._logged(message)
            else:
                self._early.add((task, message), _length(message))

    def _logged(self, message: _Message) -> None:
        meta = message[1].get("_meta") if isinstance(message, tuple) else message.meta
        meta = meta if isinstance(meta, Mapping) else None
        call = self._call_for_message(list(self._calls), meta)
        if isinstance(call, str):
            if (id := self._task_in(meta)) is not None:
                self._early.add((id, message), _length(message))
                return
            level = logging.DEBUG if call in self._relay.warned else logging.WARNING
            self._relay.warned.add(call)
            _log.log(level, "log messages of the upstream server are dropped: %s", call)
            return
        call.logs.add(message, _length(message))
        if call.logs_sent is None:
            call.logs_sent = trio.Event()
            self._relay.nursery.start_soon(self._send_logs, call, call.logs_sent, name="log messages of a relay")

    async def _send_logs(self, call: RelayedCall, sent: trio.Event) -> None:
        try:
            while call.logs:
                each = call.logs.take()
                if isinstance(each, tuple):
                    await call.ctx.notify(*each)
                else:
                    await call.ctx.log(each.level, each.data, logger=each.logger)
        except McpError as error:
            _log.info("a log message could not be forwarded: %s", error)
        finally:
            call.logs_sent = None
            sent.set()

    async def _watch_lists(self, client: Client) -> None:
        changes = [ChangeEvent(kind) for kind in _LISTED if kind.declared_in(client.capabilities)]
        if not changes:
            return
        try:
            async with client.listen(*changes) as subscription:
                for change in changes if self.lists_known else ():
                    self._publish_change(change)
                self.lists_known = True
                async for change in subscription:
                    self._publish_change(change)
        except McpError as error:
            _log.warning("changes of lists are not forwarded any more: %s", error)

    def _publish_change(self, change: ChangeEvent) -> None:
        self._relay.publish(change, self._reaches)

    def _reaches(self, link: Any) -> bool:
        """Whether a connection belongs to a client of this session."""
        return self._relay.upstream_of(owner_of(link)) is self

    async def listen(self, change: ChangeEvent, watch: WatchedChange) -> None:
        """Forward the changes until the session ends, or the upstream server ends the subscription properly.

        Raises as `Client.listen` does.
        """
        client = await self.client()
        if change.kind is not ChangeKind.RESOURCE:  # `_watch_lists` forwards list changes
            watch.settled.set()
            await client.wait_closed()
            return
        async with client.listen(change) as subscription:
            if watch.missed:
                watch.missed = False
                self._publish_change(change)
            watch.announced = True
            watch.settled.set()
            async for each in subscription:
                self._publish_change(each)


def _length(message: _Message) -> int:
    return len(str(message[1] if isinstance(message, tuple) else message.data))


def _not_forwarded(why: str) -> RequestError:
    return RequestError(INTERNAL_ERROR, f"the question was not forwarded: {why}")


# Translation between the two hops.


def _params(request: Request, revision: Revision) -> JsonObject:
    params = {name: value for name, value in request.params.items() if name not in _PER_HOP}
    try:
        read: Model = from_json(REQUESTS[request.method].params, params)
    except RemoteProtocolError as error:
        raise RequestError(INVALID_PARAMS, str(error)) from None
    return to_json(read, revision)


def _end_to_end_meta(meta: Mapping[str, Json], revision: Revision) -> JsonObject:
    """The keys of `_meta` that are not reserved for one hop.  Revisions reserve different keys, so two are checked."""
    kept: JsonObject = {}
    for key, value in meta.items():
        with suppress(UsageError):
            check_meta({key: value}, LATEST)
            check_meta({key: value}, revision)
            kept[key] = value
    return kept


def _error_for_client(error: InputUnavailable) -> McpError:
    """The error for a client that did not answer a question, or could not be asked."""
    why = error.__cause__
    if isinstance(why, NotDeclared | NotInThisRevision | RequestError):
        return why
    return RequestError(INTERNAL_ERROR, f"a question of the upstream server could not be forwarded: {why or error}")


def _error_for_upstream(error: McpError) -> RequestError:
    """The error for the upstream server if the client cannot be asked."""
    if isinstance(error, NotDeclared):  # the error that the client itself would send
        return RequestError(METHOD_NOT_FOUND if len(error.capability) == 1 else INVALID_PARAMS, str(error))
    return RequestError(INTERNAL_ERROR, f"the question was not forwarded, or not answered: {error}")
