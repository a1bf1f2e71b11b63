"""Tasks of a server: calls of tools with `task=` that go on after their request is answered.

`add_tool` adds the extension to a server, in both forms.  A middleware makes a call of a tool with `task=` a task
before its handler starts.  A tool with `asks_first=True` does it itself, with `await ctx.task.start()`, when its first
questions are answered.  The handler notices no difference: `ctx.detach` puts a `TaskHost` in the place of its client.
"""

from __future__ import annotations

import secrets
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import attrs
import trio

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, McpError, RequestError, SessionClosed
from trio_mcp.core.messages import JsonObject, Request
from trio_mcp.core.revisions import REVISIONS, Terms, stable_name
from trio_mcp.core.rounds import Question
from trio_mcp.core.shares import Shares
from trio_mcp.core.tasks import (
    CORE_TASKS,
    EXTENSION_TASKS,
    TASKS_EXTENSION,
    TaskForm,
    TaskRecord,
    missing_extension,
    read_task_id,
    related,
    requested_ttl,
)
from trio_mcp.extensions.tasks.asking import ask_by_task
from trio_mcp.extensions.tasks.forms import CORE_FORM, EXTENSION_FORM
from trio_mcp.extensions.tasks.host import TaskHost
from trio_mcp.extensions.tasks.keeper import Keeper, for_clients
from trio_mcp.server.context import ClientGone
from trio_mcp.server.handlers import BadArguments
from trio_mcp.stores.memory import MemoryStore
from trio_mcp.stores.rows import StoreFailed, wall_time
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.core.messages import Json
    from trio_mcp.server.context import Context
    from trio_mcp.server.detached import DetachedCall, ExtensionRun
    from trio_mcp.server.dispatch import CallNext
    from trio_mcp.server.entries import Entry, TaskSupport
    from trio_mcp.server.extensions import Listener
    from trio_mcp.server.run import Run
    from trio_mcp.server.server import Server

__all__ = [
    "METHODS", "RunTasks", "ServerTasks", "ToolTask", "Work", "add_tool", "form_asked", "keep",
    "refusal_of_plain_call", "run_tasks", "tasks_in",
]  # fmt: skip

Work: TypeAlias = "Callable[[Context, TaskHost], Awaitable[JsonObject]]"
"""The work of a task that is done elsewhere: it gets a context whose client is the task, and returns the result."""
# Members of params that belong to one request only.
_OF_ONE_REQUEST = frozenset({"_meta", "task", "inputResponses", "requestState"})


def add_tool(server: Server, name: str, task: TaskSupport) -> None:
    """A tool of the server is about to be registered that runs as a task; the first one adds the extension."""
    registry = server._catalog.extended
    if (
        registry is None
        or EXTENSION_FORM.id not in registry.extensions
        or not METHODS.keys() <= registry.methods.keys()
    ):
        ServerTasks(server)  # refused if the program has an extension or a method of its own by these names


class ServerTasks:
    """Tasks in one server: a middleware for its tools, and the methods of both forms."""

    def __init__(self, server: Server) -> None:
        self._catalog = server._catalog
        with server._extended().whole():  # a method may be taken: then the server declares no tasks
            ext = server.extension(EXTENSION_FORM, CORE_FORM)
            ext.middleware(self._around)
            ext.filter("taskIds")(_listen)
            for name, serve in METHODS.items():
                ext.method(name)(serve)
            ext.background(keep)

    async def _around(self, ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
        """The middleware for calls of tools."""
        name = request.params.get("name")
        route = self._catalog.find("tools", name) if isinstance(name, str) else None
        if request.method != "tools/call" or route is None or len(route.places) > 1:
            return await call_next()
        entry, form = route.entry, form_asked(ctx)
        if entry.task == "forbidden" or not route.allowed(ctx.principal):
            if form is CORE_TASKS and route.allowed(ctx.principal):  # task-06
                raise RequestError(METHOD_NOT_FOUND, f"the tool {route.key!r} never runs as a task; call it without")
            return await call_next()
        task = ctx._task = ToolTask(ctx, entry)
        if task.id is not None:  # it runs again, after the end of another process
            return await call_next()
        arguments = request.params.get("arguments")
        if not isinstance(arguments, dict | None):
            return await call_next()
        try:
            entry.prepare(ctx, arguments or {})
        except BadArguments:
            return await call_next()  # it refuses the arguments, without a task
        tasks_in(ctx).check_scopes(ctx, entry)
        if not entry.asks_first:
            await task.start()
        elif form is None and entry.task == "required":
            raise refusal_of_plain_call(ctx)
        result = await call_next()
        if task.id is None and form is CORE_TASKS:
            await task.start()  # task-33: a call that asks for a task is answered with one
        return result


def form_asked(ctx: Context) -> TaskForm | None:
    """The form in which the call of `ctx` can become a task; None if its client cannot have one."""
    if not ctx._terms.revision.handshake:
        # xtask-02: only what this request declares counts.
        return None if ctx.extension(TASKS_EXTENSION) is None else EXTENSION_TASKS
    known = ctx.revision == CORE_TASKS.name
    return CORE_TASKS if known and "task" in ctx.request.params else None


def refusal_of_plain_call(ctx: Context) -> RequestError:
    """The error for a call of a tool that needs a task, by a client that cannot have one (task-09, xtask-05)."""
    if not ctx._terms.revision.handshake:
        return missing_extension("this tool")
    return RequestError(METHOD_NOT_FOUND, "this tool runs only as a task: call it with params.task, in 2025-11-25")


class ToolTask:
    """The task of a call, as its handler sees it: `ctx.task`.

    A tool with `task=` has one in each of its calls.  `id` is None as long as the call is an ordinary one.
    """

    __slots__ = ("_ctx", "_entry", "_host", "_starting")

    def __init__(self, ctx: Context, entry: Entry) -> None:
        self._ctx = ctx
        self._entry = entry
        self._starting = trio.Lock()  # a handler may start it from several of its tasks
        host = getattr(ctx._link, "host", None)
        self._host = host if isinstance(host, TaskHost) else None

    @property
    def id(self) -> str | None:
        """The id of the task; None if the call is an ordinary one."""
        return None if self._host is None else self._host.id

    async def start(self) -> bool:
        """Make the call a task now, in a tool with `asks_first=True`.  False if this client cannot have a task.

        The request of the client is answered, and the handler goes on.  Does nothing if the call is a task already.
        Raises `RequestError` if the tool must run as a task and the client cannot have one, or if there is no room.
        """
        async with self._starting:
            if self._host is None:
                form = form_asked(self._ctx)
                if form is None:
                    if self._entry.task == "required":
                        raise refusal_of_plain_call(self._ctx)
                    return False
                tasks = tasks_in(self._ctx)
                replay = self._entry.replay
                record = tasks.record(self._ctx, form, replay=replay)
                self._host = await tasks.begin(self._ctx, form, record, recoverable=replay)
            return True

    async def status(self, message: str) -> None:
        """Set the status message, which the client shows while the task runs; at most 1,024 characters.

        In an ordinary call nothing is sent.
        """
        if self._host is None:
            await trio.lowlevel.checkpoint()
        else:
            await self._host.note(message)


# Runs, and the methods of the protocol.


def _of(run: Run) -> RunTasks:
    # The run owns its tasks: a table by weak references would keep both, because they refer to the run.
    found: RunTasks | None = run.kept.get(EXTENSION_FORM.id)
    if found is None:
        found = run.kept[EXTENSION_FORM.id] = RunTasks(run)
    return found


def tasks_in(ctx: Context) -> RunTasks:
    """The tasks of the run that serves this call."""
    return _of(ctx._open_link("a task")._run)


def run_tasks(extended: ExtensionRun) -> RunTasks:
    """The tasks of a run."""
    return _of(extended._run)


async def keep(extended: ExtensionRun) -> None:
    """Keep the tasks of a run: the background of the extension."""
    await _of(extended._run).run(extended)


async def _get(params: dict[str, Any], ctx: Context) -> JsonObject:
    tasks = tasks_in(ctx)
    return await tasks.keeper.get(params, ctx.principal, _asked_in(ctx), whole=tasks.wrapped)


async def _update(params: dict[str, Any], ctx: Context) -> JsonObject:
    return await tasks_in(ctx).keeper.update(params, ctx.principal)


async def _cancel(params: dict[str, Any], ctx: Context) -> JsonObject:
    return await tasks_in(ctx).keeper.cancel(params, ctx.principal, _asked_in(ctx))


async def _result(params: dict[str, Any], ctx: Context) -> JsonObject:
    with for_clients():
        return await tasks_in(ctx).result(params, ctx)


async def _list(params: dict[str, Any], ctx: Context) -> JsonObject:
    return await tasks_in(ctx).list(params, ctx)


async def _listen(ctx: Context, asked: Json, listener: Listener) -> Json:
    with for_clients():
        return await tasks_in(ctx).listen(ctx, asked, listener)


METHODS = {
    "tasks/get": _get,
    "tasks/update": _update,
    "tasks/cancel": _cancel,
    "tasks/result": _result,
    "tasks/list": _list,
}


def _asked_in(ctx: Context) -> TaskForm:
    """The form of a request about a task."""
    return CORE_TASKS if ctx._terms.revision.handshake else EXTENSION_TASKS


class RunTasks:
    """The tasks of one run of a server, and of the servers mounted in it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        server = run.server
        if server._store is None:
            server._store = MemoryStore()
        self.keeper = Keeper(server._store, server._info["name"], run.limits, self._recover)
        self.keeper.bytes = run.bytes
        self.keeper.on_change = self._tell
        self.keeper.leaving = lambda: run.draining
        self._extended: ExtensionRun | None = None
        self.recover_elsewhere: list[Callable[[TaskRecord], Work | None]] = []
        """Functions that know the work of tasks that is done elsewhere, for those whose run has ended."""
        self._listeners: dict[str, dict[Listener, None]] = {}
        # Of the older form, with the time at which their tasks expire: their sessions hear of each change.
        self._callers: dict[str, tuple[DetachedCall, float]] = {}
        self.keeper.on_sweep = self._sweep
        self.keeper.followed = ChainMap[str, Any](self._listeners, self._callers)
        self._followed = Shares(run.limits.subscriptions)  # tasks, by each listener
        self._asking: set[tuple[str, str]] = set()  # task and key of each question that is on its way to a client
        self._sessions: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    async def run(self, extended: ExtensionRun) -> None:
        if self._extended is None:  # else a server that is mounted here has tasks, too
            self._extended = extended
            await self.keeper.run(self._run.detached_ended)

    # Calls.

    def check_scopes(self, ctx: Context, entry: Entry) -> None:
        """Raise `RequestError` if the access token lacks a scope of the tool, before there is a task (auth-80)."""
        if entry.scopes:
            self._run.dispatcher.check_scopes(ctx, entry)

    @property
    def wrapped(self) -> bool:
        """Whether a middleware of the program gets the results of requests, and may read them."""
        functions = [each for part in self._run.dispatcher.catalog.parts() for each in part.middleware]
        return any(getattr(each, "__func__", None) is not ServerTasks._around for each in functions)

    @property
    def longest(self) -> float:
        """The seconds that a task may be kept."""
        return self._run.limits.task_seconds

    def record(self, ctx: Context, form: TaskForm, *, replay: bool = False) -> TaskRecord:
        """The record of a new task, for the call of `ctx`."""
        terms, limits = ctx._terms, self._run.limits
        kept: JsonObject = {"revision": terms.revision.name, "capabilities": dict(terms.capabilities)}
        if terms.identity is not None:
            kept["identity"] = dict(terms.identity)
        if ctx.principal is None and form is CORE_TASKS:
            kept["session"] = self._session_name(ctx)
        # A call that never runs again need not be kept, and may be long, or secret.
        given = ctx.request.params if replay else {"name": ctx.request.params.get("name")}
        params = {name: each for name, each in given.items() if name not in _OF_ONE_REQUEST}
        return TaskRecord(
            secrets.token_hex(16),  # xtask-45, task-57; no "-" begins it, which is an option in a shell
            stable_name(ctx.principal), wall_time(),
            requested_ttl(ctx.request.params if form is CORE_TASKS else {}, limits.task_seconds),
            ctx.method, params, kept, answers=dict(ctx._recorded),
        )  # fmt: skip

    async def begin(
        self,
        ctx: Context,
        form: TaskForm,
        task: TaskRecord,
        immediate: str | None = None,
        *,
        recoverable: bool = False,
    ) -> TaskHost:
        """Make a call a task, and answer its request; the handler of the call goes on.

        A task that is `recoverable` can go on in another run.  xtask-10: the request is answered when the store has it.
        """
        host = _ServerHost(self.keeper, task) if form is EXTENSION_TASKS else _CoreTaskHost(self.keeper, task, ctx)
        host.recoverable, host.holder = recoverable, ctx._holder
        try:
            await self.keeper.add(task, ctx._holder)
            call = await ctx.detach(host, form.created(task, immediate))
        except BaseException:
            self.keeper.release(host)
            await self.keeper.drop(task.id)  # no client knows it
            raise
        host.cancel = call.cancel
        if host.over:
            call.cancel("the task has ended before its handler began")
        elif isinstance(host, _CoreTaskHost):
            host.call = call
            self._callers[task.id] = call, task.expires
        return host

    async def adopt(self, ctx: Context, task: TaskRecord, work: Work) -> None:
        """Store a task whose work is done elsewhere.  If it has not ended, `work` is called for its outcome.

        `ctx` is the context of any request about it.  `work` gets another one, whose client is the task.
        """
        await self.keeper.add(task, ctx._holder)
        if not task.terminal:
            self._start_work(task, ctx.request, ctx._terms, work)

    def _start_work(self, task: TaskRecord, request: Request, terms: Terms, work: Work) -> None:
        assert self._extended is not None  # the run has begun
        host = _ServerHost(self.keeper, task)
        ctx = self._extended.context(request, terms, host)
        host.holder = ctx._holder
        self._run.nursery.start_soon(host.run, partial(work, ctx, host), name="a task whose work is elsewhere")

    def _session_name(self, ctx: Context) -> str:
        """A name for the session of a client without a principal: it lists the tasks of this session only (task-58)."""
        session = ctx._session("a task")
        return session.name or self._sessions.setdefault(session, secrets.token_urlsafe(12))

    def _recover(self, task: TaskRecord) -> bool | None:
        """Run a task again, if its tool allows that.  None: the params of such tasks have too many bytes now."""
        kept, revision = task.terms, REVISIONS.get(str(task.terms.get("revision")))
        if revision is None or self._extended is None:
            return False
        terms = Terms(revision, kept["capabilities"], kept.get("identity"), None, task.owner)
        request = Request(1, task.method, task.params)
        for recover in self.recover_elsewhere:
            if (work := recover(task)) is not None:
                self._start_work(task, request, terms, work)
                return True
        route = self._run.dispatcher.catalog.find("tools", str(task.params.get("name")))
        if route is None or not route.entry.replay:
            return False
        host = _ServerHost(self.keeper, task)
        try:
            call = self._extended.start(request, terms, host)
        except RequestError:
            self.keeper.release(host)
            return None
        host.cancel, host.holder = call.cancel, call.account.holder
        return True

    # The older form.

    async def result(self, params: Mapping[str, Any], ctx: Context) -> JsonObject:
        """Serve tasks/result: ask the questions of the task on the stream of this request until it ends (task-36)."""
        id, asked = read_task_id(params), dict[str, trio.CancelScope]()

        def new(task: TaskRecord) -> list[Question]:
            return [each for each in task.questions if each.key not in asked and (id, each.key) not in self._asking]

        async with open_nursery() as nursery:
            while not (task := await self.keeper.owned(id, ctx.principal)).terminal:
                for each in new(task):
                    asked[each.key] = trio.CancelScope()
                    self._asking.add((id, each.key))
                    nursery.start_soon(self._ask, ctx, id, each, asked[each.key])
                open = {each.key for each in task.questions}
                for key in asked.keys() - open:
                    asked[key].cancel()  # the question was answered elsewhere, or withdrawn
                await self.keeper.watch(
                    id,
                    lambda task, open=open: (
                        task.terminal  # type: ignore[misc]
                        or {each.key for each in task.questions} != open
                        or bool(new(task))
                    ),
                )
            nursery.cancel_scope.cancel()
        task, rest = await self.keeper.stored(id, ctx.principal, whole=self.wrapped)
        self.keeper.show(task)
        return CORE_TASKS.outcome(task, rest)

    async def _ask(self, ctx: Context, id: str, question: Question, scope: trio.CancelScope) -> None:
        """Ask the client, and give its answer to the task.

        If the client refuses, the question is withdrawn, and the handler gets an error.  If the client is gone, it
        stays open for the next tasks/result.
        """
        try:
            with scope:
                params = {**question.params, "_meta": {**question.params.get("_meta", {}), **related(id)}}  # task-26
                asking = attrs.evolve(question, params=params)
                answers = await ask_by_task(ctx, [asking])
                await self.keeper.step(id, lambda task: task.answer(answers, wall_time()))
        except ClientGone:
            return
        except StoreFailed:
            raise  # the question stays open, too
        except McpError:
            await self.keeper.step(id, lambda task: task.withdraw([question.key], wall_time()))
        finally:
            self._asking.discard((id, question.key))

    async def list(self, params: Mapping[str, Any], ctx: Context) -> JsonObject:
        """Serve tasks/list."""
        owner = stable_name(ctx.principal)
        session = self._session_name(ctx) if owner is None else None
        return await self.keeper.list(
            params,
            ctx._open_link("tasks/list").account.holder,
            lambda task: task.owner == owner and task.terms.get("session") == session,
        )

    # Notifications.

    async def listen(
        self,
        ctx: Context,
        asked: Json,
        listener: Listener,
        look_for: Callable[[str, Context], Awaitable[object]] | None = None,
    ) -> Sequence[str]:
        """Agree to notifications about the tasks of this client (xtask-49).

        `look_for` is called with each id first, and may make the record of its task.
        """
        most = self._run.limits.listener_changes
        if not isinstance(asked, list) or not all(isinstance(each, str) for each in asked) or len(asked) > most:
            raise RequestError(INVALID_PARAMS, f"notifications.taskIds must be an array of at most {most:g} strings")
        ids = list(dict.fromkeys(asked))
        if not self._followed.take(ctx._holder, len(ids)):
            why = "this server has no room for more subscriptions (Limits.subscriptions); try again later"
            raise RequestError(INTERNAL_ERROR, why)
        agreed: list[str] = []
        # Started before the first wait: a listener whose request fails has ended, too.
        forget = partial(self._forget, listener, agreed, ctx._holder, len(ids))
        self._run.nursery.start_soon(forget, name="the end of a listener of tasks")
        for id in ids:
            if look_for is not None:
                await look_for(id, ctx)
            task = await self.keeper.find(id)
            if task is not None and task.owner == stable_name(ctx.principal):
                agreed.append(id)
                self._listeners.setdefault(id, {})[listener] = None
        return agreed

    def _sweep(self, now: float) -> None:
        """Forget the callers of tasks whose ttl has passed: there is no notice of their end.

        A task may run in another process then, and its caller hears of it until the end.
        """
        for id, (_, expires) in tuple(self._callers.items()):
            if expires <= now:
                del self._callers[id]

    async def _forget(self, listener: Listener, ids: Sequence[str], holder: Any, taken: int) -> None:
        await listener.ended.wait()
        self._followed.give(holder, taken)
        for id in ids:
            del self._listeners[id][listener]
            if not self._listeners[id]:
                del self._listeners[id]

    async def _tell(self, task: TaskRecord, rest: bytes) -> None:
        """Tell clients of the present state of a task (xtask-48, task-15)."""
        note = EXTENSION_TASKS.notification(task, rest)
        for listener in tuple(self._listeners.get(task.id, ())):
            listener.notify(note.method, note.params, task.id)
            self.keeper.show(task)
            await trio.lowlevel.checkpoint()  # there may be thousands, and a result may be long
        if task.id in self._callers:
            note = CORE_TASKS.notification(task)
            self._callers[task.id][0].notify(note.method, note.params)
            if task.terminal:
                del self._callers[task.id]


class _ServerHost(TaskHost):
    """The host of a handler."""

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        """As `TaskHost.ask`."""
        try:
            return await super().ask(questions)
        except SessionClosed as error:  # the dispatcher tells the client why its call failed
            raise ClientGone(str(error)) from None

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        """As `TaskHost.finish`.  A drain waits for this, so that a client can come for the outcome."""
        over, finishing = self.over, super().finish(outcome)
        del outcome  # it may have to be dropped
        await finishing
        if not over and self._keeper.leaving():
            await self._keeper.seen(self.id)


class _CoreTaskHost(_ServerHost):
    """The host of a task in the older form: progress and log messages go on in the session of its client."""

    def __init__(self, keeper: Keeper, task: TaskRecord, ctx: Context) -> None:
        super().__init__(keeper, task)
        self.call: DetachedCall | None = None
        self._token = ctx.meta.get("progressToken")
        self._terms = ctx._terms

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress under the token of the request (prog-11), until the task ends (prog-12)."""
        if self.call is not None and not self.over and isinstance(self._token, str | int):
            self.call.progress(self._token, progress, total, message, related(self.id))  # task-26
        await trio.lowlevel.checkpoint()

    async def log(self, level: str, data: Any, logger: str | None) -> None:
        """Send a log message."""
        if self.call is not None and not self.over and self._terms.wants_log(level):
            params: JsonObject = {"level": level, "data": data, "_meta": related(self.id)}  # task-26
            if logger is not None:
                params["logger"] = logger
            self.call.notify("notifications/message", params)
        await trio.lowlevel.checkpoint()
