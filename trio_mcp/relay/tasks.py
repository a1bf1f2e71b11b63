"""Tasks through a relay: those of the upstream server, in the form that each client knows.

| The client knows | The upstream server has | A call of a tool |
|---|---|---|
| a form of tasks | the same form, or the other one | is sent in the server's form; its task gets a record here |
| a form of tasks | none | is an ordinary one, because the relay does not declare tasks |
| none | any form | is an ordinary one, and refused as by the server if the tool runs only as a task |

A record here is as that of a task of our own (`extensions.tasks`), which both forms can show.  Its work is to follow
the task of the upstream server as a client does: by its notifications, polls, and questions.

The id of a task is the upstream server's, with a tag that ties it to its owner and to this upstream server.  So a relay
needs no table of ids, and only the owner of a task may ask about it.  A relay that has no record of a task, because it
was started again, makes one with the first request about it.

Times and expiry are by the clock of the relay, because clocks differ.
"""

from __future__ import annotations

import hmac
import json
import logging
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trio_mcp.core.codec import from_json
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    ConnectionFailed,
    InputUnavailable,
    McpError,
    RequestError,
    SessionClosed,
    UsageError,
    shown,
)
from trio_mcp.core.messages import Json, JsonObject
from trio_mcp.core.models import CallToolResult
from trio_mcp.core.revisions import REVISIONS, declares, stable_name
from trio_mcp.core.shares import holder_of
from trio_mcp.core.task_states import TaskState
from trio_mcp.core.tasks import (
    CORE_TASKS,
    EXTENSION_TASKS,
    MAX_MESSAGE,
    POLL_MS,
    RELATED_TASK,
    TASKS_EXTENSION,
    TaskForm,
    TaskRecord,
    TaskStatus,
    read_task_id,
    requested_ttl,
)
from trio_mcp.extensions.tasks.client import ClientTask, OnState, TaskCancelled, ordinary_call, tasks_of
from trio_mcp.extensions.tasks.forms import CORE_FORM, EXTENSION_FORM
from trio_mcp.extensions.tasks.host import TaskHost
from trio_mcp.extensions.tasks.server import (
    METHODS,
    RunTasks,
    Work,
    form_asked,
    keep,
    refusal_of_plain_call,
    run_tasks,
    tasks_in,
)
from trio_mcp.relay.upstream import RelayedCall, Upstream
from trio_mcp.server.context import Context
from trio_mcp.stores.rows import StoreFailed, wall_time

if TYPE_CHECKING:
    from trio_mcp.client.client import Client
    from trio_mcp.core.content import Model
    from trio_mcp.relay.relay import Relay
    from trio_mcp.server.detached import ExtensionRun
    from trio_mcp.server.extensions import Listener
    from trio_mcp.server.server import Server

__all__ = ["RelayTasks", "form_of"]

_log = logging.getLogger("trio_mcp.relay")

_AGAIN: Final = 1.0  # seconds until an upstream server that is away is asked again about a task
_CANCELLING: Final = 10.0  # seconds in which the upstream server is told of a cancellation
_RANDOM: Final = 22  # characters of an id that nobody can guess: 128 bits


def form_of(client: Client) -> TaskForm | None:
    """The form of tasks that an upstream server has; None if its tools never run as tasks."""
    if not REVISIONS[client.revision].handshake:
        return None if client.extension(TASKS_EXTENSION) is None else EXTENSION_TASKS
    has = client.revision == CORE_TASKS.name and declares(client.capabilities, ("tasks", "requests", "tools", "call"))
    return CORE_TASKS if has else None


class RelayTasks:
    """The tasks of a relay whose upstream server has this form of tasks.  `place` tells that server from others."""

    def __init__(
        self, relay: Relay, server: Server, form: TaskForm, place: str, capabilities: Mapping[str, Any]
    ) -> None:
        self._relay = relay
        self._form = form
        self._place = place
        self._secrets = tuple(server._state_keys)
        self._adopting: dict[str, trio.Lock] = {}
        core = CORE_FORM
        if form is CORE_TASKS and not declares(capabilities, ("tasks", "cancel")):  # task-66
            core = attrs.evolve(core, settings={name: each for name, each in core.settings.items() if name != "cancel"})
        ext = server.extension(EXTENSION_FORM, core)
        ext.background(self._keep)
        ext.filter("taskIds")(self._listen)
        for name, serve in METHODS.items():
            ext.method(name)(self._after_adoption(serve))

    # Ids.

    def _tags(self, id: str, owner: str | None) -> Iterator[str]:
        """The tags of a task, one for each key.

        Without an owner the id is all that a client needs, so no secret protects it better than the id does itself.
        Then the tag is the same in each relay to this server, unless the relay was given keys.
        """
        text = json.dumps([self._place, owner, id]).encode()
        secret = self._relay.state_keys is not None or owner is not None or len(id) < _RANDOM
        for key in self._secrets if secret else (b"",):
            yield urlsafe_b64encode(hmac.digest(key, text, "sha256")[:16]).decode().rstrip("=")

    def _shown_id(self, id: str, owner: str | None) -> str:
        return f"{id}.{next(self._tags(id, owner))}"

    def _upstream_id(self, shown_id: str, owner: str | None) -> str | None:
        """The id of the upstream server; None if the task is not of this owner, or of another server."""
        id, _, tag = shown_id.rpartition(".")
        given = tag.encode()
        return id if any(hmac.compare_digest(given, each.encode()) for each in self._tags(id, owner)) else None

    def named_in(self, meta: Mapping[str, Json]) -> str | None:
        """The upstream server's id of the task that a message of it belongs to (task-26)."""
        related = meta.get(RELATED_TASK)
        id = related.get("taskId") if isinstance(related, dict) else None
        return id if isinstance(id, str) else None

    # Lists of tools.

    def listed(self, page: JsonObject, ctx: Context) -> JsonObject:
        """Say on a page of tools which may run as tasks, for a client that asks for tasks.

        A server of the extension decides that with each call, and its tools do not say it.
        """
        if self._form is EXTENSION_TASKS and ctx.revision == CORE_TASKS.name:
            support = {"execution": {"taskSupport": "optional"}}
            page["tools"] = [{**support, **tool} if isinstance(tool, dict) else tool for tool in page["tools"]]
        return page

    # Calls of tools.

    async def call(
        self, upstream: Upstream, client: Client, call: RelayedCall, params: JsonObject, meta: JsonObject
    ) -> Model:
        """Call a tool of the upstream server.  If its answer is a task, follow that to its end."""
        ctx, form, given = call.ctx, form_asked(call.ctx), params.get("arguments")
        if form is None:
            return await self._call_plainly(client, ctx, params, meta)
        tasks = tasks_in(ctx)
        ttl = requested_ttl(ctx.request.params, inf) if form is CORE_TASKS else None
        task = await tasks_of(client).start(
            client, params["name"], given or {}, ttl, {"meta": meta}, partial(_report, ctx),
            always=form is self._form,  # the client knows which tools to ask for, and the server refuses others
            on_asked=partial(setattr, call, "asks_for_task", True),
        )  # fmt: skip
        if not task.id:
            call.asks_for_task = False
            if form is CORE_TASKS:  # task-33: a call that asks for a task is answered with one
                await tasks.begin(ctx, form, tasks.record(ctx, form))
            return from_json(CallToolResult, task.state.result or {})
        try:
            id = self._shown_id(task.id, stable_name(ctx.principal))
            record = self._record(id, tasks, ctx, form, task.state)
            async with call.question_lock:  # during a question that names no call there is no request to answer
                host = await tasks.begin(ctx, form, record, task.state.immediate, recoverable=True)
        except BaseException:  # the client does not hear of the task
            await self._cancel(upstream, task.id)
            raise
        return await self._follow(upstream, call, host, task.id)

    async def _call_plainly(self, client: Client, ctx: Context, params: JsonObject, meta: JsonObject) -> Model:
        on_progress = ctx.progress if "progressToken" in ctx.meta else None
        try:
            with ordinary_call():
                return await client.call_tool(
                    params["name"], params.get("arguments"), on_progress=on_progress, meta=meta
                )
        except RequestError as error:
            # The two forms refuse a call of a tool that runs only as a task with different errors.
            if self._form is CORE_TASKS:
                only_as_task = error.code == METHOD_NOT_FOUND
            else:
                needed = error.data.get("requiredCapabilities") if isinstance(error.data, dict) else None
                asks_for_tasks = isinstance(needed, dict) and declares(needed, ("extensions", TASKS_EXTENSION))
                only_as_task = error.code == MISSING_CLIENT_CAPABILITY and asks_for_tasks
            if only_as_task:
                raise refusal_of_plain_call(ctx) from error
            raise

    def _record(self, id: str, tasks: RunTasks, ctx: Context, form: TaskForm, state: TaskState) -> TaskRecord:
        """The record of a task of the upstream server, with the id that clients see."""
        task = tasks.record(ctx, form)
        longest = requested_ttl({"task": {"ttl": state.ttl}} if state.ttl is not None else {}, tasks.longest)
        return attrs.evolve(
            task, id=id, ttl=longest, poll=POLL_MS if state.poll is None else state.poll,
            message=None if state.message is None else state.message[:MAX_MESSAGE],
            method="tools/call", terms={**task.terms, "elsewhere": True},
        )  # fmt: skip

    # Tasks of the upstream server.

    async def _follow(self, upstream: Upstream, call: RelayedCall, host: TaskHost, id: str) -> Model:
        """Wait for the end of a task, and return its result; states, progress and questions go to `host` meanwhile."""
        upstream.has_task(call, id)
        host.cancel_elsewhere = partial(self._cancel_confirmed, upstream, host, id)
        while True:
            task = await self._open(upstream, id)
            try:
                return await task.result(on_progress=partial(_report, call.ctx), on_state=_noting(host))
            except TaskCancelled as error:
                await host.end()
                raise RequestError(INTERNAL_ERROR, str(error)) from None  # not stored: the task is cancelled
            except InputUnavailable:  # the client refuses a question, which only an answer can close
                await self._cancel(upstream, id)
                raise
            except (SessionClosed, ConnectionFailed, trio.TooSlowError) as error:
                _log.info("the upstream server is away; its task %s is asked for again: %s", shown(id), error)
                await trio.sleep(_AGAIN)

    async def withdrawn(self, call: RelayedCall) -> None:
        """The upstream server waits no more for an answer to a question of this call."""
        host = getattr(call.ctx._link, "host", None)
        if isinstance(host, TaskHost) and not host.over:
            with trio.CancelScope(deadline=trio.current_time() + _CANCELLING, shield=True), suppress(StoreFailed):
                await host.withdraw_abandoned()

    async def _open(self, upstream: Upstream, id: str) -> ClientTask:
        """Return the handle of a task when there is a session.  Raises RequestError if there will not be one."""
        while not self._relay.ended:
            try:
                return (await upstream.client()).open_task(id)
            except RequestError:
                if not self._relay.can_reopen:
                    raise
                await trio.sleep(_AGAIN)
        raise RequestError(INTERNAL_ERROR, "the relay has ended; open the task again at another one")

    async def _cancel_confirmed(self, upstream: Upstream, host: TaskHost, id: str) -> None:
        """Cancel a task at the upstream server for its client.  If it has ended there, wait for its outcome.

        The server is asked first, so that the client is told of a cancellation that has happened (task-46).
        """
        with trio.move_on_after(_CANCELLING), upstream.used():
            task = await self._open(upstream, id)
            try:
                with _none_or_ended():  # it has ended already
                    await task.cancel()
                with _none_or_ended():  # the server has forgotten it
                    state = await task.status()
                    if state.terminal and state.status is not TaskStatus.CANCELLED:
                        await host.wait_ended()
            except (SessionClosed, ConnectionFailed, trio.TooSlowError) as error:
                _log.warning("tasks/cancel got no answer from the upstream server: %s", error)
            else:
                return
        raise RequestError(INTERNAL_ERROR, "the upstream server did not answer, and the task goes on; try again later")

    async def _cancel(self, upstream: Upstream, id: str) -> None:
        """Tell the upstream server that no client waits for a task any more."""
        with trio.CancelScope(deadline=trio.current_time() + _CANCELLING, shield=True):
            while not self._relay.ended:
                try:
                    await (await self._open(upstream, id)).cancel()
                except (McpError, trio.TooSlowError) as error:
                    if isinstance(error, RequestError) and error.code != INTERNAL_ERROR:
                        return  # it has ended already
                    await trio.sleep(_AGAIN)
                else:
                    return

    # Requests about tasks.

    def _after_adoption(self, serve: Any) -> Any:
        async def served(params: dict[str, Any], ctx: Context) -> JsonObject:
            if ctx.method != "tasks/list":
                await self._adopt(read_task_id(params), ctx)
            answer: JsonObject = await serve(params, ctx)
            return answer

        return served

    async def _listen(self, ctx: Context, asked: Json, listener: Listener) -> Json:
        return await tasks_in(ctx).listen(ctx, asked, listener, self._adopt)

    async def _adopt(self, shown_id: str, ctx: Context) -> None:
        """Make the record of a task that the upstream server has, and this relay has not."""
        tasks, id = tasks_in(ctx), self._upstream_id(shown_id, stable_name(ctx.principal))
        if id is None:
            return
        lock = self._adopting.setdefault(shown_id, trio.Lock())
        try:
            async with lock:
                if await tasks.keeper.find(shown_id) is None:
                    call = RelayedCall(ctx)
                    upstream = await self._relay.upstream_for(call.owner, call.link)
                    await upstream.work(call, ctx.method, partial(self._read, upstream, call, shown_id, id))
        finally:
            if not lock.locked():
                self._adopting.pop(shown_id, None)

    async def _read(
        self, upstream: Upstream, asking: RelayedCall, shown_id: str, id: str, client: Client
    ) -> JsonObject:
        """Ask the upstream server for a task, and make its record."""
        ctx, task = asking.ctx, client.open_task(id)
        tasks, now = tasks_in(ctx), wall_time()
        try:
            state = await task.status()
        except RequestError as error:
            if error.code != INVALID_PARAMS:
                raise
            return {}  # it has no such task, and so has this relay
        form = CORE_TASKS if ctx._terms.revision.handshake else EXTENSION_TASKS
        record = self._record(shown_id, tasks, ctx, form, state)
        if state.terminal:
            try:
                result = upstream.result(await task.result(), ctx._terms.revision)
                record = record.finish(result, now).task
            except TaskCancelled:
                record = record.cancel(now).task
            except RequestError as error:
                record = record.fail(error, now).task
        await tasks.adopt(ctx, record, partial(self._carry_on, id, asking))
        return {}

    async def _carry_on(self, id: str, asking: RelayedCall | None, ctx: Context, host: TaskHost) -> JsonObject:
        """Follow a task that has a record, and whose call has ended.  `asking` is a request about it, if there is one.

        `ctx` is a context whose client is the task.
        """
        owner = asking.owner if asking is not None else holder_of(stable_name(ctx.principal), None)
        call = RelayedCall(ctx, link=ctx._link if asking is None else asking.link, owner=owner)
        upstream = await self._relay.upstream_for(owner, None if asking is None else asking.link)
        return await upstream.work(call, "tools/call", lambda client: self._follow(upstream, call, host, id))

    async def _keep(self, extended: ExtensionRun) -> None:
        run_tasks(extended).recover_elsewhere.append(self._recover)
        await keep(extended)

    def _recover(self, task: TaskRecord) -> Work | None:
        """The work of a task whose run has ended; None if it is not a task of this upstream server."""
        id = self._upstream_id(task.id, task.owner)
        return None if id is None else partial(self._carry_on, id, None)


@contextmanager
def _none_or_ended() -> Iterator[None]:
    """A block that ends where the upstream server answers that a task has ended, or that there is none (-32602)."""
    try:
        yield
    except RequestError as error:
        if error.code != INVALID_PARAMS:
            raise


def _noting(host: TaskHost) -> OnState:
    """A function that shows the status message of each state."""
    last: list[str | None] = [None]

    async def note(state: TaskState) -> None:
        if state.message is not None and state.message != last[0]:
            last[0] = state.message
            await host.note(state.message[:MAX_MESSAGE])

    return note


async def _report(ctx: Context, progress: float, total: float | None, message: str | None) -> None:
    with suppress(UsageError):  # a tool that runs again begins again, and a report that falls is not sent
        await ctx.progress(progress, total, message)
