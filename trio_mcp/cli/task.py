"""``trio-mcp task``: calls of tools that outlive their connection.

A task is found again by its id, from any process, as long as the server keeps it: a server over HTTP, or one with a
store.  A stdio server with tasks in memory forgets them at the end of each command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from trio_mcp.cli.call import add_result_arguments, show, tool_arguments
from trio_mcp.cli.forms import Terminal
from trio_mcp.cli.output import Output, ReportLines, compact, few_names
from trio_mcp.cli.target import LIMITS, add_target_arguments, connected, run_command, target_of
from trio_mcp.client.client import Client
from trio_mcp.core.caching import Pager
from trio_mcp.core.codec import to_json
from trio_mcp.core.elicitation import FormCheck
from trio_mcp.core.errors import RemoteProtocolError, UsageError
from trio_mcp.core.models import CallToolResult
from trio_mcp.core.revisions import REVISIONS
from trio_mcp.core.rounds import Question
from trio_mcp.core.schema.cost import InvalidSchema
from trio_mcp.core.task_states import TaskState, read_task
from trio_mcp.core.tasks import TaskStatus

__all__ = ["add_arguments", "run"]

_ACTIONS = """\
actions:
  start TARGET TOOL [NAME=VALUE ...]
                        call a tool as a task, and print its id
  list TARGET           show the tasks that the server has (2025-11-25 only)
  status TARGET ID      show the state of a task
  follow TARGET ID      show its states, ask its questions, and show its result
  answer TARGET ID KEY=JSON ...
                        answer questions by their keys (2026-07-28);
                        also KEY=decline, KEY=cancel
  cancel TARGET ID      cancel a task
"""
_Work = Callable[[argparse.Namespace, Client, Output], Awaitable[int]]


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, _ACTIONS
    parser.add_argument("action", choices=_WORKS, metavar="ACTION", help=", ".join(_WORKS))
    add_target_arguments(parser)
    parser.add_argument("words", nargs="*", default=[], metavar="WORD", help="see below; arguments as for call")
    add_result_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return run_command(lambda: _connected(arguments), verbose=arguments.verbose)


def _check_words(arguments: argparse.Namespace) -> None:
    """Give the words of the action their names.  Raises `UsageError` for too few or too many."""
    action, words = arguments.action, list(arguments.words)
    wanted = {"start": "TOOL [NAME=VALUE ...]", "list": "", "answer": "ID KEY=JSON ..."}.get(action, "ID")
    least, most = {"start": (1, math.inf), "list": (0, 0), "answer": (2, math.inf)}.get(action, (1, 1))
    if not least <= len(words) <= most:
        raise UsageError(f"write trio-mcp task {action} TARGET {wanted}".rstrip())
    arguments.tool = arguments.id = words[0] if words else ""
    arguments.given = arguments.responses = words[1:]


async def _connected(arguments: argparse.Namespace) -> int:
    _check_words(arguments)
    output, terminal = Output(arguments.json), Terminal(ReportLines())
    async with connected(
        arguments, tasks=True, elicitation=terminal.fill_in, elicitation_url=terminal.open_page
    ) as client:
        return await _WORKS[arguments.action](arguments, client, output)


async def _start(arguments: argparse.Namespace, client: Client, output: Output) -> int:
    task = await client.start_task(arguments.tool, await tool_arguments(arguments, client))
    if not task.id:
        return _finished(await task.result(), client, output, Path(arguments.save), arguments.tool)
    if output.as_json:
        output.json(_row(task.state))
    else:
        output.content(task.id)
    if not isinstance(target_of(arguments).address, str):
        why = "the server ends now; its task goes on if it has a store, and the tool replay=True"
        sys.stderr.write(f"trio-mcp: {why}\n")
    return 0


async def _list(arguments: argparse.Namespace, client: Client, output: Output) -> int:
    if not REVISIONS[client.revision].handshake:
        raise UsageError(f"tasks/list does not exist in {client.revision}; add --revision 2025-11-25")
    tasks: list[Any] = []
    pager = Pager(LIMITS)
    while not pager.done:
        page: Any = await client.request("tasks/list", pager.params)
        pager.received(page)
        if not isinstance(page.get("tasks"), list):
            raise RemoteProtocolError(f"tasks/list has no list of tasks: {compact(page)}")
        tasks += page["tasks"]
    if output.as_json:
        output.json(tasks)
    elif not tasks:
        sys.stderr.write("trio-mcp: no tasks; without access tokens a server lists those of the same session only\n")
    else:
        states = [read_task(each if isinstance(each, dict) else {}) for each in tasks]
        output.table([(each.id, each.status.value, each.message or "") for each in states])
    return 0


async def _status(arguments: argparse.Namespace, client: Client, output: Output) -> int:
    _show_state(await client.open_task(arguments.id).status(), output)
    return 0


async def _follow(arguments: argparse.Namespace, client: Client, output: Output) -> int:
    task = client.open_task(arguments.id)
    async for state in task:
        if not output.as_json:
            _show_state(state, output)
        if state.status is TaskStatus.INPUT_REQUIRED:
            break  # `result` lets the terminal answer; in 2025-11-25 the questions come only there (task-27)
    return _finished(await task.result(), client, output, Path(arguments.save), "task")


async def _answer(arguments: argparse.Namespace, client: Client, output: Output) -> int:
    task, texts = client.open_task(arguments.id), dict(map(_pair, arguments.responses))
    asked: dict[str, Question] = {}
    if not REVISIONS[client.revision].handshake:  # in others there are no answers, as the error says
        asked = {each.key: each for each in (await task.status()).questions}
        if unknown := sorted(texts.keys() - asked):  # servers ignore these
            known = f"it asks {few_names(asked)}: write {next(iter(asked))}=JSON" if asked else "it asks nothing"
            raise UsageError(f"the task has no question {few_names(unknown)}; {known}")
    await task.answer({key: _response(key, text, asked.get(key)) for key, text in texts.items()})
    return 0


async def _cancel(arguments: argparse.Namespace, client: Client, output: Output) -> int:
    await client.open_task(arguments.id).cancel()
    return 0


def _pair(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise UsageError(f"an answer must be like KEY=JSON, got {text!r}")
    return key, value


def _response(key: str, text: str, question: Question | None) -> dict[str, Any]:
    """Read an answer: an object is the content of an accepted form; a word is the action alone.

    A form with the field `value` alone may be answered with the value.  Raises `UsageError`.
    """
    if text in ("accept", "decline", "cancel"):
        return {"action": text}
    form: Any = None if question is None else question.params.get("requestedSchema")
    fields: Any = form.get("properties") if isinstance(form, dict) else None
    one_value = isinstance(fields, dict) and list(fields) == ["value"]
    try:
        content = json.loads(text)
    except ValueError:
        content = text if one_value else None
    if one_value and not isinstance(content, dict):
        takes_text = isinstance(fields["value"], dict) and fields["value"].get("type") == "string"
        content = {"value": text if takes_text and not isinstance(content, str) else content}
    if not isinstance(content, dict):
        expected = "a JSON object with the fields of the form, accept, decline or cancel"
        raise UsageError(f"the answer {key} must be {expected}, got {text!r}")
    # Here it can be mended: most servers take any answer, and their tool fails later.
    try:
        problems = FormCheck(form).errors(content) if isinstance(form, dict) else []
    except InvalidSchema:  # a mistake of the server, which checks the answer itself
        problems = []
    if problems:
        why = "; ".join(f"{each.path} {each.message}".strip() for each in problems)
        raise UsageError(f"the answer {key} does not fit its form: {why}")
    return {"action": "accept", "content": content}


def _row(state: TaskState) -> dict[str, Any]:
    questions = {each.key: each.method for each in state.questions}
    return {"id": state.id, "status": state.status.value, "message": state.message, "questions": questions}


def _show_state(state: TaskState, output: Output) -> None:
    if output.as_json:
        output.json(_row(state))
        return
    output.content(f"{state.status.value}  {state.message or ''}".rstrip())
    output.table([(each.key, str((each.params or {}).get("message", each.method))) for each in state.questions])


def _finished(result: CallToolResult, client: Client, output: Output, folder: Path, name: str) -> int:
    if output.as_json:
        output.json(to_json(result, REVISIONS[client.revision]))
    else:
        show(result, output, folder, name)
    return 1 if result.is_error else 0


_WORKS: Mapping[str, _Work] = {
    "start": _start,
    "list": _list,
    "status": _status,
    "follow": _follow,
    "answer": _answer,
    "cancel": _cancel,
}
