"""Tasks of a client: `call_tool` that waits for a task, and handles of tasks that outlive the client.

`open_client(target, tasks=True)` declares the extension.  Then each call of a tool may be answered with a task.
`call_tool` drives it to its end: it polls, listens where the server sends notices, and answers questions by the usual
callbacks.  `client.start_task` returns a `ClientTask` instead, and `client.open_task` makes one of an id.

Cancelling `call_tool` cancels the task.  Cancelling a method of a handle cancels only the waiting.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from contextvars import ContextVar
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import attrs
import trio

from trio_mcp.client.errors import NoResponse, SessionLost
from trio_mcp.client.extensions import CallNextRequest, ClientExtension, ExtensionCall
from trio_mcp.client.tools import ReturnType
from trio_mcp.core.codec import from_json
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    ConnectionFailed,
    InputUnavailable,
    McpError,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    UsageError,
    shown,
)
from trio_mcp.core.messages import Json, JsonObject, Limits
from trio_mcp.core.models import CallToolResult
from trio_mcp.core.revisions import META_CLIENT_CAPABILITIES, Role, Terms, declares
from trio_mcp.core.rounds import Question
from trio_mcp.core.task_states import TaskState, poll_seconds, read_created, read_task
from trio_mcp.core.tasks import (
    CORE_TASKS,
    EXTENSION_TASKS,
    MAX_MESSAGE,
    RELATED_TASK,
    TASKS_EXTENSION,
    TaskForm,
    TaskStatus,
)
from trio_mcp.extensions.tasks.answering import ClientAnswers
from trio_mcp.extensions.tasks.forms import EXTENSION_FORM, core_form_of_client
from trio_mcp.transport.nursery import open_nursery

if TYPE_CHECKING:
    from trio_mcp.client.client import Client
    from trio_mcp.client.options import RequestOptions
    from trio_mcp.client.session import OnProgress

__all__ = ["ClientTask", "ClientTasks", "OnState", "TaskCancelled", "ordinary_call", "tasks_of"]

T = TypeVar("T")
OnState: TypeAlias = Callable[[TaskState], Awaitable[object]]
_Report: TypeAlias = tuple[Any, Any, str | None]  # progress, total, message

_LISTENING: Final = 15.0  # seconds between two polls while the server sends notices: they may get lost
_FAILURES: Final = 5  # polls in a row that may fail because the server is away; it may be starting again
_CANCELLING: Final = 2.0  # seconds for the cancellation of a task whose call was cancelled
_REPORTS: Final = 100  # reports of progress that wait for a slow callback; older ones are dropped
_EARLY: Final = 100  # tasks whose reports are kept although no call waits for them
_LONGEST_ID: Final = 1024  # characters of the id of a task whose reports are kept; ours have 32
_TOOLS: Final = 10_000  # tools whose task support is remembered


class TaskCancelled(McpError):
    """The task was cancelled, by this client or another one, and has no result."""


@attrs.frozen
class _Wish:
    """How the next call of a tool is made.  The task that answers it is returned as it came."""

    wanted: bool = True
    """False: the call is an ordinary one, as of a client that does not know tasks."""
    always: bool = False
    """Ask for a task in 2025-11-25 also if the tool is not known to have one; its server decides."""
    ttl: int | None = None
    """Milliseconds to keep the task, in 2025-11-25."""
    on_asked: Callable[[], None] | None = None
    """Called before the request that asks for a task is sent, in 2025-11-25."""


_wish: ContextVar[_Wish | None] = ContextVar("wish", default=None)  # None: the call waits for its task


@contextmanager
def ordinary_call() -> Iterator[None]:
    """A block with one `call_tool`, which is made as by a client that does not know tasks."""
    token = _wish.set(_Wish(wanted=False))
    try:
        yield
    finally:
        _wish.reset(token)


def tasks_of(client: Client) -> ClientTasks:
    """The tasks of a client that has the option `tasks`.  Raises `UsageError` for another one."""
    return client._task_extension()


class ClientTasks(ClientExtension):
    """The extension of a client; `open_client(..., tasks=True)` makes one."""

    def __init__(self, *answered: str, limits: Limits | None = None) -> None:
        """`answered` are the methods of the server that the client may answer with tasks of its own."""
        super().__init__(EXTENSION_FORM, core_form_of_client(*answered))
        answers = ClientAnswers(limits or Limits())
        for method in answered:
            self.answering(method)(answers.answer)
        for name in ("get", "cancel", "result", "list") if answered else ():
            self.method(f"tasks/{name}")(getattr(answers, name))
        self.on_state: OnState | None = None
        """Awaited with each state of a task that a call waits for."""
        self._support: dict[str, str] = {}  # of the listed tools, in 2025-11-25
        self._notices: dict[str, _LatestState] = {}  # of the tasks that a call waits for
        self._early: dict[str, deque[_Report]] = {}  # of tasks that no call waits for, or not yet
        self.around("tools/call")(self._around_call)
        self.around("tools/list")(self._around_list)
        for form in (CORE_TASKS, EXTENSION_TASKS):
            self.notification(form.status_notification)(self._noticed)

    def _noticed(self, params: dict[str, Any]) -> None:
        notice = self._notices.get(str(params.get("taskId")))
        if notice is not None:
            notice.state = read_task(params)
            notice.came.set()

    def progressed(self, params: JsonObject) -> None:
        """Take progress of a task, which comes after the answer to its request (prog-11)."""
        meta, progress = params.get("_meta"), params.get("progress")
        related = meta.get(RELATED_TASK) if isinstance(meta, dict) else None
        id = related.get("taskId") if isinstance(related, dict) else None
        if not isinstance(id, str) or len(id) > _LONGEST_ID or type(progress) not in (int, float):
            return
        total, message = params.get("total"), params.get("message")
        # It may wait here, so the message is cut as a status message is.
        text = message[:MAX_MESSAGE] if isinstance(message, str) else None
        report = progress, total if type(total) in (int, float) else None, text
        notice = self._notices.get(id)
        if notice is not None:
            notice.reports.append(report)
            notice.came.set()
        else:  # it may overtake the call, which hears of the task only now
            self._early.setdefault(id, deque(maxlen=_REPORTS)).append(report)
            if len(self._early) > _EARLY:
                del self._early[next(iter(self._early))]

    def left_task(self, result: JsonObject) -> str | None:
        """The task that a call has left on the server, because it was cancelled before the client knew of the task.

        cancel-09: `notifications/cancelled` ends the call alone.  The result comes too late for it, and is dropped.
        """
        with suppress(RemoteProtocolError):
            created = read_created(result)
            return None if created is None else created.id
        return None

    async def _around_list(self, call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        """Remember which tools run as tasks (task-05, task-08)."""
        result = await call_next()
        tools = result.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            execution = tool.get("execution") if isinstance(tool, dict) else None
            support = execution.get("taskSupport") if isinstance(execution, dict) else None
            if isinstance(tool, dict) and len(self._support) < _TOOLS:
                self._support[str(tool.get("name"))] = support if isinstance(support, str) else "forbidden"
        return result

    async def _around_call(self, call: ExtensionCall, call_next: CallNextRequest) -> JsonObject:
        wish, form = _wish.get(), _form(call.terms)
        _wish.set(None)  # a callback that answers the server may make calls of its own
        params: Mapping[str, Json] = call.params
        if wish is not None and not wish.wanted:
            params = params if form is CORE_TASKS else _undeclared(call)
        elif form is CORE_TASKS and ((wish is not None and wish.always) or await self._asks_for_task(call, wish)):
            params = {**params, "task": {} if wish is None or wish.ttl is None else {"ttl": wish.ttl}}
            if wish is not None and wish.on_asked is not None:
                wish.on_asked()
        result = await call_next(params)
        state = read_created(result)
        if state is None or wish is not None:
            return result
        waiting = _Waiting(self, call.client, form, state.id, call.request, call.answer, call.on_progress)
        waiting.on_state = self.on_state
        return await waiting.drive(state, cancels=True)

    async def _asks_for_task(self, call: ExtensionCall, wish: _Wish | None) -> bool:
        """Whether a call asks for a task: if its tool needs one, or the caller wants one and the tool can have one."""
        if not declares(call.terms.capabilities, ("tasks", "requests", "tools", "call")):  # task-02, task-04
            return False
        name = str(call.params.get("name"))
        if name not in self._support:
            await call.client.list_tools()
        support = self._support.setdefault(name, "forbidden")
        return support == "required" or (wish is not None and support == "optional")

    async def start(
        self,
        client: Client,
        name: str,
        arguments: JsonObject,
        ttl: int | None,
        options: RequestOptions,
        on_progress: OnProgress | None = None,
        *,
        always: bool = False,
        on_asked: Callable[[], None] | None = None,
    ) -> ClientTask:
        """Call a tool, and return its task; if the server has answered at once, a task that has ended.

        `ttl` is in milliseconds.  With `always`, a server of 2025-11-25 is asked for a task in any case.  `on_asked` is
        called before a request that asks for one is sent.
        """
        params = client._with_meta({"name": name, "arguments": arguments}, options.get("meta"))
        headers, timer = options.get("headers"), client._timer(options, progress=True)
        token = _wish.set(_Wish(always=always, ttl=ttl, on_asked=on_asked))
        try:
            result, _ = await client._send("tools/call", params, on_progress, headers, timer, refresh_tools=True)
        finally:
            _wish.reset(token)
        state = read_created(result)
        if state is None:
            return ClientTask(self, client, TaskState("", TaskStatus.COMPLETED, result=result))
        return ClientTask(self, client, state)

    def open(self, client: Client, id: str) -> ClientTask:
        """Return the handle of a task."""
        return ClientTask(self, client, TaskState(id, TaskStatus.WORKING))


def _undeclared(call: ExtensionCall) -> JsonObject:
    """The params of a call that does not declare the extension, so that it is never answered with a task (xtask-02)."""
    declared = call.client._offer.declared(Role.CLIENT, call.terms.revision)
    others = {id: each for id, each in declared["extensions"].items() if id != TASKS_EXTENSION}
    meta = {**call.params.get("_meta", {}), META_CLIENT_CAPABILITIES: {**declared, "extensions": others}}
    return {**call.params, "_meta": meta}


def _form(terms: Terms) -> TaskForm:
    return CORE_TASKS if terms.revision.handshake else EXTENSION_TASKS


@attrs.define(eq=False)
class _LatestState:
    """The latest state that a notification brought."""

    users: int = 0
    state: TaskState | None = None
    reports: deque[_Report] = attrs.field(factory=lambda: deque(maxlen=_REPORTS))
    came: trio.Event = attrs.field(factory=trio.Event)

    def take(self) -> TaskState | None:
        state, self.state, self.came = self.state, None, trio.Event()
        return state


@attrs.define(eq=False)
class _Waiting:
    """A call or a handle that waits for a task."""

    tasks: ClientTasks
    client: Client
    form: TaskForm
    id: str
    request: Callable[[str, JsonObject], Awaitable[JsonObject]]
    answer: Callable[[Sequence[Question]], Awaitable[Mapping[str, JsonObject]]]
    on_progress: OnProgress | None = None
    on_state: OnState | None = None
    beside: bool = False
    """Whether polls go on beside tasks/result (task-14) and beside answers, so that states are still seen."""
    failures: int = 0
    result: JsonObject | Exception | None = None
    """The outcome of tasks/result beside the polls."""
    fetching: bool = False
    updated: bool = False
    """An answer was sent beside the polls, so there is a new state."""
    asking: dict[str, trio.CancelScope] = attrs.field(factory=dict)
    """The questions that are or were asked beside the polls, by key."""

    async def get(self) -> TaskState:
        """Poll."""
        return read_task(await self.send("tasks/get", {}))

    async def send(self, method: str, params: JsonObject) -> JsonObject:
        """Send a request that may be repeated.  A server that is away or shuts down may be starting again."""
        while True:
            try:
                result = await self.request(method, {"taskId": self.id, **params})
            except (SessionClosed, ConnectionFailed):
                self.failures += 1
                if self.failures == _FAILURES or self.client.closed:
                    raise
            except RequestError as error:
                if error.code != INTERNAL_ERROR:  # xtask-43: with this one the server says nothing of the task
                    raise
                self.failures += 1
                if self.failures == _FAILURES:
                    raise self._refused(method, error) from error
            else:
                self.failures = 0
                return result
            await trio.sleep(1)

    def _refused(self, method: str, error: RequestError) -> NoResponse:
        return NoResponse(f"the server refuses {method} of the task {shown(self.id)}: {error}")

    async def drive(self, state: TaskState, *, cancels: bool) -> JsonObject:
        """Wait for the end of the task, and return the result of the call.  Raises as the call would have."""
        try:
            return await self._to_the_end(state)
        except (trio.Cancelled, trio.TooSlowError, InputUnavailable):
            if cancels:  # cancel-09, xtask-34: never by notifications/cancelled
                with trio.CancelScope(deadline=trio.current_time() + _CANCELLING, shield=True):
                    await self._cancel_quietly()
            raise
        except (ConnectionFailed, NoResponse, SessionLost) as error:
            if not cancels:
                raise
            # The last request has not run, perhaps; the call has.
            why = f"the server is away; its task {shown(self.id)} goes on, and client.open_task finds it: {error}"
            raise NoResponse(why) from error

    async def _to_the_end(self, state: TaskState) -> JsonObject:
        async with open_nursery(wait=True) as nursery, aclosing(self.states(state)) as states:
            async for each in states:
                state = each
                if self.on_state is not None:
                    await self.on_state(state)
                asks = self.form is CORE_TASKS and state.status is TaskStatus.INPUT_REQUIRED
                if asks and not self.beside:
                    break  # task-27: the questions come on the stream of tasks/result
                if self.beside:
                    self._ask_beside(nursery, state, asks)
        if isinstance(self.result, Exception):
            raise self.result
        return await self._outcome(state) if self.result is None else self.result

    def _ask_beside(self, nursery: trio.Nursery, state: TaskState, asks: bool) -> None:
        """Ask the new questions of a state, and stop asking those that are not open any more."""
        for question in state.questions:
            if question.key not in self.asking:  # xtask-27
                scope = self.asking[question.key] = trio.CancelScope()
                nursery.start_soon(self._answer, question, scope, name=f"a task asks: {question.method}")
        open = {question.key for question in state.questions}
        for key, scope in self.asking.items():
            if key not in open:
                scope.cancel(reason="the question was answered, or withdrawn")
        if asks and not self.fetching:
            self.fetching = True
            nursery.start_soon(self._fetch, state, name="tasks/result beside polls")

    async def _fetch(self, state: TaskState) -> None:
        try:
            self.result = await self._outcome(state)
        except (McpError, trio.TooSlowError) as error:
            self.result = error
        self._wake()

    async def _answer(self, question: Question, scope: trio.CancelScope) -> None:
        with scope:
            answers = await self.answer([question])
            await self.send("tasks/update", {"inputResponses": dict(answers)})
        self.updated = True
        self._wake()

    def _wake(self) -> None:
        if (notice := self.tasks._notices.get(self.id)) is not None:
            notice.came.set()

    async def _cancel_quietly(self) -> None:
        try:
            await self.client.request("tasks/cancel", {"taskId": self.id})
        except McpError:
            return  # it has ended, or the server is away

    async def states(self, state: TaskState) -> AsyncGenerator[TaskState, None]:
        """Each state of the task that differs from the last, until it has ended; questions are answered meanwhile."""
        asked: set[str] = set()
        notice = self.tasks._notices.setdefault(self.id, _LatestState())
        notice.users += 1
        notice.reports.extend(self.tasks._early.pop(self.id, ()))
        try:
            async with AsyncExitStack() as stack:
                listening, listen_at = False, -inf
                yield state
                while not state.terminal and self.result is None:
                    new = [each for each in state.questions if each.key not in asked]  # xtask-27
                    if new and not self.beside:
                        asked |= {each.key for each in new}
                        answers = await self.answer(new)
                        await self.send("tasks/update", {"inputResponses": dict(answers)})
                    else:
                        await self._pause(notice, _LISTENING if listening else poll_seconds(state))
                        if not listening and trio.current_time() >= listen_at:
                            listening = await self._listen(stack, poll_seconds(state))
                            listen_at = trio.current_time() + _LISTENING
                    following = notice.take() or await self.get()
                    if following != state:
                        state = following
                        yield state
        finally:
            notice.users -= 1
            if not notice.users:
                self.tasks._notices.pop(self.id, None)

    async def _pause(self, notice: _LatestState, seconds: float) -> None:
        """Wait for a new state, or until the next poll; tell the caller of progress meanwhile."""
        deadline, waiting = trio.current_time() + seconds, True
        while waiting:
            while notice.reports and self.on_progress is not None:
                called = self.on_progress(*notice.reports.popleft())
                if inspect.isawaitable(called):
                    await called
            if notice.state is not None or self.result is not None or self.updated:
                self.updated = False
                return
            if notice.came.is_set():
                notice.came = trio.Event()
            with trio.move_on_at(deadline) as scope:
                await notice.came.wait()
            waiting = not scope.cancelled_caught

    async def _listen(self, stack: AsyncExitStack, seconds: float) -> bool:
        """Ask for notices of the task, where the server has them; else polls go on, after at most these seconds."""
        if self.form is CORE_TASKS:
            return False  # task-16: they come by themselves or not at all
        with trio.move_on_after(seconds):  # a server that drains or is away refuses it again and again
            try:
                await stack.enter_async_context(self.client.listen(filters={"taskIds": [self.id]}))
            except McpError:
                return False
            return True
        return False

    async def _outcome(self, state: TaskState) -> JsonObject:
        refusals = 0
        while self.form is CORE_TASKS and state.status is not TaskStatus.CANCELLED:
            try:
                return await self.request("tasks/result", {"taskId": self.id})
            except RequestError as error:  # that of the call, or of tasks/result
                state = await self.get()
                if error.code == INTERNAL_ERROR and state.status is not TaskStatus.FAILED:
                    refusals += 1
                    if refusals == _FAILURES:
                        raise self._refused("tasks/result", error) from error
                    await trio.sleep(1)
                elif state.status is not TaskStatus.CANCELLED:
                    raise
        if state.status is TaskStatus.CANCELLED:
            raise TaskCancelled(f"the task {shown(self.id)} was cancelled: {state.message or 'no reason was given'}")
        if state.error is not None:
            raise state.error
        if state.result is None:
            raise RemoteProtocolError(f"the task {shown(self.id)} is {state.status.value}, but has no result")
        return state.result


class ClientTask:
    """A handle of a task, made by `Client.start_task` or `Client.open_task`.

    Iterate over it to see its states: ``async for state in task``.  It can be awaited in another process: keep the
    `id`, and open it there.  The methods raise `RequestError` (-32602) if the server does not have the task any more.
    """

    def __init__(self, tasks: ClientTasks, client: Client, state: TaskState) -> None:
        self._tasks = tasks
        self._client = client
        self.state = state
        """The latest known state."""

    @property
    def id(self) -> str:
        """The id of the task; empty if the server has answered the call at once, without a task."""
        return self.state.id

    def _waiting(self) -> _Waiting:
        client = self._client

        async def request(method: str, params: JsonObject) -> JsonObject:
            if method == "tasks/result":  # it takes as long as the task
                return await client.request(method, params, timeout=inf, max_timeout=inf)
            return await client.request(method, params)

        async def answer(questions: Sequence[Question]) -> Mapping[str, JsonObject]:
            return await client._answering.answer_all(
                questions, client._terms, lambda key, why: InputUnavailable("tasks/get", key, why)
            )

        return _Waiting(self._tasks, client, _form(client._terms), self.id, request, answer)

    async def status(self) -> TaskState:
        """Ask the server for the state of the task."""
        if self.id:
            self.state = await self._waiting().get()
        else:
            await trio.lowlevel.checkpoint()
        return self.state

    async def result(self, *, on_progress: OnProgress | None = None, on_state: OnState | None = None) -> CallToolResult:
        """Wait for the end of the task, and return its result; the callbacks of the client answer questions.

        `on_state` is awaited with each state.  `on_progress` is called with the progress that `Client.start_task` has
        asked for (2025-11-25).  Raises `RequestError` if the call failed with an error, and `TaskCancelled`.  If this
        is cancelled, only the waiting ends.
        """
        if self.id:
            waiting = self._waiting()
            waiting.on_progress, waiting.on_state, waiting.beside = on_progress, on_state, True
            raw = await waiting.drive(await self.status(), cancels=False)
        else:
            await trio.lowlevel.checkpoint()
            raw = self.state.result or {}
        return from_json(CallToolResult, raw)

    async def value(self, returns: type[T]) -> T:
        """As `result`, and return the structured value as an object of a type, as `call_tool(..., returns=...)` does.

        Raises `ToolFailed` if the tool has failed.
        """
        kind = ReturnType(returns)
        return kind.value(f"of the task {self.id}", await self.result(), wrapped=True)

    async def cancel(self) -> None:
        """Cancel the task.  It may still end in another way, if it was about to."""
        if not self.id:
            raise UsageError("there is no task to cancel: the server has answered the call at once")
        await self._client.request("tasks/cancel", {"taskId": self.id})

    async def answer(self, responses: Mapping[str, Mapping[str, Json]]) -> None:
        """Answer questions of `state.questions` by their keys, instead of the callbacks (2026-07-28)."""
        responses_as_json = {key: dict(each) for key, each in responses.items()}
        await self._client.request("tasks/update", {"taskId": self.id, "inputResponses": responses_as_json})

    async def __aiter__(self) -> AsyncIterator[TaskState]:
        """The states of the task until its end.  Questions are left to `answer` or `result`."""
        waiting = self._waiting()
        state = await self.status()
        yield state
        while not state.terminal:
            await trio.sleep(poll_seconds(state))
            following = await waiting.get()
            if following != state:
                state = self.state = following
                yield state
