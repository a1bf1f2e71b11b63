"""The host of a handler whose call is a task: it has the place of the client.

The handler reports, asks and ends as in an ordinary call; its host writes that into the record of the task (`keeper`).
A store that is away delays questions and outcomes, and drops status messages.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final

import trio

from trio_mcp.core.errors import INTERNAL_ERROR, RequestError, SessionClosed
from trio_mcp.core.messages import JsonObject, to_text
from trio_mcp.core.rounds import Question
from trio_mcp.core.shares import Charge, weight
from trio_mcp.core.tasks import MAX_MESSAGE, POLL_MS, TaskDeed, TaskRecord, TaskStep
from trio_mcp.stores.rows import StoreFailed, StoreFull, wall_time

if TYPE_CHECKING:
    from trio_mcp.extensions.tasks.keeper import Keeper

__all__ = ["TaskHost"]

_log = logging.getLogger("trio_mcp")

_AGAIN: Final = 1.0  # seconds until a store that failed is tried again
_CLOSING: Final = 5.0  # seconds for the last write of a handler in a run that ends


class TaskHost:
    """Stands in for the client of a handler from the moment on when the call is a task."""

    def __init__(self, keeper: Keeper, task: TaskRecord) -> None:
        self.id = task.id
        self.expires = task.expires
        self.cancel: Callable[[str], object] = lambda reason: None
        """Cancels the handler, with a reason."""
        self.cancel_elsewhere: Callable[[], Awaitable[None]] | None = None
        """Cancels the work where it is done, if that is elsewhere.  Returns when the work is known to be cancelled, or
        its end is in the record.  Raises `RequestError` if the task cannot be cancelled now."""
        self.over = False
        """True: the task has ended, or another process has taken it over."""
        self.recoverable = True
        """Whether another process can go on with the task."""
        self.holder: Hashable | None = None
        """The client that is charged for an outcome that waits for the store."""
        self._keeper = keeper
        self._noted = -inf
        self._left_out: str | None = None  # the message of the newest report that came too soon after another
        self._abandoned: frozenset[str] = frozenset()
        keeper.host(self)

    def stop(self, reason: str) -> None:
        """Cancel the handler; its outcome does not count any more."""
        self.over = True
        self._keeper.release(self)
        self.cancel(reason)

    async def run(self, work: Callable[[], Awaitable[JsonObject]]) -> None:
        """Run `work` in place of a handler, and store its outcome."""
        if self.over:
            return
        outcome: JsonObject | RequestError
        with trio.CancelScope() as scope:
            self.cancel = lambda reason: scope.cancel(reason=reason)
            try:
                outcome = await work()
            except RequestError as error:
                outcome = error
            except Exception:  # noqa: BLE001  # a callback may raise anything, and the peer must not see it
                _log.exception("a task failed")
                why = "the task has failed; the log of the side that ran it says why"
                outcome = RequestError(INTERNAL_ERROR, why)
            finishing = self.finish(outcome)
            del outcome  # `finish` may have to drop it
            await finishing

    async def wait_ended(self) -> None:
        """Wait until the record says that the task has ended."""
        await self._keeper.watch(self.id, lambda task: task.terminal)

    async def end(self) -> None:
        """The task was cancelled where its work is done: elsewhere."""
        await self._step(lambda task: task.cancel(wall_time()))
        self.stop("the task was cancelled elsewhere")

    async def withdraw_abandoned(self) -> None:
        """Close the questions for which no handler waits any more."""
        if keys := self._abandoned:
            await self._keeper.step(self.id, lambda task: task.withdraw(keys, wall_time()), ours=True)
            self._abandoned -= keys

    async def _step(self, take: Callable[[TaskRecord], TaskStep]) -> None:
        await self.withdraw_abandoned()
        step = await self._keeper.step(self.id, take, ours=True)
        if step is None or (step.deed is TaskDeed.NOTHING and step.task.terminal):
            self.stop("the task has ended, or another process has taken it over")

    async def note(self, message: str) -> None:
        """Set the status message."""
        self._left_out = None
        try:
            await self._step(lambda task: task.note(message, wall_time()))
        except StoreFailed as error:
            _log.error("%s", error)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Show the message of a progress report as the status message, at most once in an interval of polls."""
        if message is not None and not self.over:
            if trio.current_time() - self._noted >= POLL_MS / 1000:
                self._noted = trio.current_time()
                await self.note(message[:MAX_MESSAGE])
                return
            self._left_out = message[:MAX_MESSAGE]
        await trio.lowlevel.checkpoint()

    async def log(self, level: str, data: Any, logger: str | None) -> None:
        """Take a log message.  xtask-39: it is not sent."""
        await trio.lowlevel.checkpoint()

    async def ask(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        """Open questions, and return their answers by key.  Raises `SessionClosed` if one is withdrawn."""
        keys = frozenset(each.key for each in questions)
        if self._left_out is not None:  # a task may wait for its answer for hours, with the message before this one
            await self.note(self._left_out)
        while True:
            try:
                await self._step(lambda task: task.ask(questions, wall_time()))
                break
            except StoreFailed as error:
                _log.error("%s", error)
                await trio.sleep(_AGAIN)
        try:
            task = await self._keeper.watch(
                self.id,
                lambda task: not any(each.key in keys for each in task.questions) or task.terminal,
                whole=True,
            )
        except trio.Cancelled:
            # The questions are closed if the handler goes on.  If the run ends, they stay open for the next process.
            self._abandoned |= keys
            raise
        if task is None or not keys <= task.answers.keys():
            raise SessionClosed("the question has no answer: the task has ended, or the client refused the question")
        if not self.recoverable:  # answers may be secret
            try:
                await self._keeper.step(self.id, lambda task: task.take(keys), ours=True)
            except StoreFailed as error:
                _log.error("%s", error)
        return {key: task.answers[key] for key in keys}

    async def finish(self, outcome: JsonObject | RequestError) -> None:
        """Store the outcome of the handler.  While the store is away, the outcome is charged to the client."""
        if self.over:
            return
        self.over = True
        refused = False
        try:
            with Charge(self._keeper.bytes.account(self.holder)) as charge:
                while True:
                    # The run may be about to end.
                    with trio.CancelScope(deadline=trio.current_time() + _CLOSING, shield=True):
                        try:
                            if await self._stored(outcome, charge):
                                break
                        except (StoreFull, RequestError, TypeError, ValueError, RecursionError) as error:
                            if not refused:
                                refused, outcome = True, _refusal(error)
                                continue
                            _log.error("the failure of a task cannot be stored: %s", error)
                    await trio.sleep(_AGAIN)
        finally:
            self._keeper.release(self)

    async def _stored(self, outcome: JsonObject | RequestError, charge: Charge) -> bool:
        """Store the outcome, or let it wait.  Raises `RequestError` and others if it can do neither."""
        try:
            await self._store(outcome)
            return True
        except StoreFailed as error:
            _log.error("%s", str(error))  # a handler of the log may keep its arguments, and the error keeps its frames
        if not charge.held:
            data = to_text(outcome if isinstance(outcome, dict) else outcome.data)
            if (limit := charge.set(weight(data, inf))) is not None:
                why = f"the store was away when this task ended, and its outcome could not wait (Limits.{limit})"
                raise RequestError(INTERNAL_ERROR, why)
        return False

    async def _store(self, outcome: JsonObject | RequestError) -> None:
        if isinstance(outcome, RequestError):
            await self._keeper.step(self.id, lambda task: task.fail(outcome, wall_time()), ours=True)
        else:
            await self._keeper.step(self.id, lambda task: task.finish(outcome, wall_time()), ours=True)


def _refusal(error: Exception) -> RequestError:
    """The failure of a task whose outcome cannot be stored."""
    if isinstance(error, RequestError):  # the outcome is too large
        return RequestError(error.code, error.message)  # `error` holds the frames that hold the outcome
    if isinstance(error, StoreFull):
        return RequestError(INTERNAL_ERROR, "the store has no room for the result of this task")
    _log.error("the outcome of a task cannot be written as JSON", exc_info=error)
    return RequestError(INTERNAL_ERROR, "the task failed; the server's log says why")
