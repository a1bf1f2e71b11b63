"""``trio-mcp replay``: send the client's half of a recording again, and show the differences.

A client of this package plays the host.  It makes its own connection, handshake, ids and session, and sends the
recorded requests, notifications and cancellations in their order.  A recording of several clients, one after another,
is sent by several.  Where the recording has an answer, the replay waits
for its own.  Questions of the server get the recorded answers, in their order for each kind of question.

Compared are the name, the capabilities and the instructions of the server, the answer to each request, and the texts of
its questions.  Not compared are `_GENERATED` members, members of the option ``--ignore``, and UUIDs and times within
texts.  A generated value, such as a cursor or the id of a task, that a later request repeats is replaced by that of
this replay.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import trio

from trio_mcp.cli.exchange import DiagramRow, rows_of
from trio_mcp.cli.output import Output
from trio_mcp.cli.recording import read_recording
from trio_mcp.cli.target import add_target_arguments, connected, run_command
from trio_mcp.client.callbacks import FormElicitationRequest, SamplingRequest, UrlElicitationRequest
from trio_mcp.client.client import Client
from trio_mcp.client.options import ClientOptions
from trio_mcp.core.codec import from_json
from trio_mcp.core.elicitation import Accepted, Declined, Dismissed
from trio_mcp.core.errors import McpError, RequestError
from trio_mcp.core.models import CreateMessageResult, Root
from trio_mcp.transport.nursery import open_nursery

__all__ = ["add_arguments", "run"]

_GENERATED = ("createdAt", "lastUpdatedAt", "nextCursor", "progressToken", "requestState", "taskId")
_HANDSHAKE = ("initialize", "notifications/initialized", "server/discover")
_UNSENT = ("subscriptions/listen", "notifications/cancelled", "notifications/progress")
_TERMS = "io.modelcontextprotocol/"  # members of `_meta` that each client writes itself
_LOG_LEVEL = f"{_TERMS}logLevel"
_LONGEST_WAIT = 2.0  # seconds before a cancellation, at most
_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_CHANGING = re.compile(
    rf"(?P<uuid>{_UUID})|(?P<time>\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)"
)


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording of tap")
    add_target_arguments(parser)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="a member of results that is not compared"
    )


def run(arguments: argparse.Namespace) -> int:
    return run_command(lambda: _replay(arguments), verbose=arguments.verbose)


async def _replay(arguments: argparse.Namespace) -> int:
    pairs: list[_Pair] = []
    unsent: list[str] = []
    for rows in _clients(rows_of(read_recording(arguments.file))):
        script = _Script(rows)
        pairs += await _play(script, arguments)
        unsent += script.unsent
    ignored = {*_GENERATED, f"{_TERMS}serverInfo", *arguments.ignore}
    return _report([pair.compared(ignored) for pair in pairs], unsent, Output(arguments.json))


def _clients(rows: Sequence[DiagramRow]) -> Iterator[list[DiagramRow]]:
    """Divide a recording at each handshake that follows other requests: it is that of another client."""
    part: list[DiagramRow] = []
    for row in rows:
        opens = row.kind == "request" and row.method in _HANDSHAKE
        if opens and any(each.kind == "request" and each.method not in _HANDSHAKE for each in part):
            yield part
            part = []
        part.append(row)
    yield part


async def _play(script: _Script, arguments: argparse.Namespace) -> list[_Pair]:
    """Send the half of one client to a new connection."""
    answers = _RecordedAnswers(script)
    given = argparse.Namespace(**{**vars(arguments), "revision": arguments.revision or script.revision})
    async with connected(given, **answers.options()) as client:
        player = _Player(client, script)
        await player.play()
        about = {"instructions": client.instructions, "capabilities": client.capabilities, "serverInfo": client.server}
    pairs = [_Pair("the server", script.about, {key: about[key] for key in script.about}), *player.pairs]
    if script.questions or answers.questions:
        pairs.append(_Pair("questions of the server", script.questions, answers.questions))
    return pairs


@attrs.frozen
class _Pair:
    """One thing of the recording, and its counterpart of the replay."""

    title: str
    recorded: Any
    replayed: Any

    def compared(self, ignored: set[str]) -> _Pair:
        return _Pair(self.title, _comparable(self.recorded, ignored), _comparable(self.replayed, ignored))


class _Script:
    """The client's half of a recording, and the server's answers to it."""

    def __init__(self, rows: Sequence[DiagramRow]) -> None:
        self.rows = rows
        self.unsent: list[str] = []
        """Messages that the replay cannot send, in words."""
        self.about: dict[str, Any] = {}
        self.revision: str | None = None
        self.log_level: Any = None
        self.capabilities: Mapping[str, Any] = {}
        self.questions: list[str] = []
        self.given: dict[str, list[Any]] = {}
        """The answers of the client to questions, by their method."""
        self._last: dict[
            int, DiagramRow
        ] = {}  # the last answer of a request that was repeated with answers to questions
        self._first: dict[int, DiagramRow] = {}  # the request that one with answers to questions repeats
        for row in rows:
            self._look(row)

    def sends(self, row: DiagramRow) -> bool:
        """Whether the replay sends this row by itself."""
        if row.sender == "server" or row.method in (*_HANDSHAKE, *_UNSENT) or row.number in self._first:
            return False
        return row.kind in ("request", "notification")

    def answer(self, request: DiagramRow) -> DiagramRow | None:
        """The answer that ends a request, after all its rounds."""
        return self._last.get(request.number, request.answer)

    def first(self, request: DiagramRow) -> DiagramRow:
        """The request that this one repeats, or itself."""
        return self._first.get(request.number, request)

    def _look(self, row: DiagramRow) -> None:
        if row.sender == "server":
            if row.kind == "request":
                self.questions.append(_question(row.method, row.frame.get("params")))
            return
        if row.kind == "request":
            params = row.frame.get("params")
            params = params if isinstance(params, dict) else {}
            self._read_terms(row, params)
            if "inputResponses" in params or "requestState" in params:
                self._add_round(row, params)
        elif row.kind == "answer" and row.request is not None and "result" in row.frame:
            self.given.setdefault(row.method, []).append(row.frame["result"])
        elif row.kind == "text":
            self.unsent.append(f"{row.title}: {row.summary}")
        if row.method == "subscriptions/listen":
            self.unsent.append(row.title)

    def _read_terms(self, row: DiagramRow, params: Mapping[str, Any]) -> None:
        """Read the revision, the capabilities, and the name and instructions of the server."""
        meta = params.get("_meta")
        meta = meta if isinstance(meta, dict) else {}
        result = row.answer.frame.get("result") if row.answer is not None else None
        if row.method in ("initialize", "server/discover") and isinstance(result, dict):
            found = {key: result[key] for key in ("instructions", "capabilities", "serverInfo") if key in result}
            info = result.get("_meta", {}).get(f"{_TERMS}serverInfo")  # there in 2026-07-28
            self.about = {**({"serverInfo": info} if info else {}), **found}
        if row.method == "initialize" and isinstance(result, dict):
            self.revision = result.get("protocolVersion")
            self.capabilities = params.get("capabilities") or {}
        elif f"{_TERMS}protocolVersion" in meta and row.status == "ok":
            self.revision = meta[f"{_TERMS}protocolVersion"]
            self.capabilities = meta.get(f"{_TERMS}clientCapabilities") or self.capabilities
            self.log_level = meta.get(_LOG_LEVEL, self.log_level)

    def _add_round(self, row: DiagramRow, params: Mapping[str, Any]) -> None:
        """Find the request that this one repeats with the answers to its questions."""
        for first in reversed(self.rows[: self.rows.index(row)]):
            result = first.answer.frame.get("result") if first.kind == "request" and first.answer else None
            if not isinstance(result, dict) or result.get("resultType") != "input_required" or first.title != row.title:
                continue
            if result.get("requestState") != params.get("requestState"):
                continue
            asked, given = result.get("inputRequests") or {}, params.get("inputResponses") or {}
            for name, question in asked.items():
                self.questions.append(_question(question.get("method"), question.get("params")))
                if name in given:
                    self.given.setdefault(question.get("method"), []).append(given[name])
            start = self._first[row.number] = self.first(first)
            if row.answer is not None:
                self._last[start.number] = row.answer
            return


def _question(method: Any, params: Any) -> str:
    given = params if isinstance(params, dict) else {}
    return f"{method} {given['message']}" if isinstance(given.get("message"), str) else str(method)


class _RecordedAnswers:
    """The callbacks of the client, which give the recorded answers to questions of the server."""

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._given = {method: deque(answers) for method, answers in script.given.items()}
        self.questions: list[str] = []

    def options(self) -> ClientOptions:
        """The callbacks for the capabilities that the recorded client has declared."""
        options: dict[str, Any] = {}
        declared = self._script.capabilities
        if (form := declared.get("elicitation")) is not None:
            options["elicitation"] = self._elicit
            if isinstance(form, dict) and "url" in form:
                options["elicitation_url"] = self._elicit
        if "sampling" in declared:
            options["sampling"] = self._sample
        if "roots" in declared:
            given: Any = next(iter(self._given.get("roots/list", ())), {})
            options["roots"] = [from_json(Root, each) for each in given.get("roots", [])]
        if self._script.log_level is not None:
            options["log_level"] = self._script.log_level
        return cast(ClientOptions, options)

    def _elicit(self, request: FormElicitationRequest | UrlElicitationRequest) -> Any:
        match self._next("elicitation/create", request.message):
            case {"action": "accept", **rest}:
                return Accepted(rest.get("content"))
            case {"action": "decline"}:
                return Declined()
        return Dismissed()

    def _sample(self, request: SamplingRequest) -> Any:
        given = self._next("sampling/createMessage", None)
        return Declined() if given is None else from_json(CreateMessageResult, given)

    def _next(self, method: str, message: str | None) -> Any:
        self.questions.append(_question(method, {"message": message}))
        left = self._given.get(method)
        return left.popleft() if left else None


class _Player:
    """Sends the script, in the order of the recording."""

    def __init__(self, client: Client, script: _Script) -> None:
        self._client = client
        self._script = script
        self._done: dict[int, trio.Event] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self._outcomes: dict[int, Any] = {}
        self._values: dict[str, str] = {}  # generated values: those of the recording, and ours

    async def play(self) -> None:
        async with open_nursery() as nursery:
            for row in self._script.rows:
                if self._script.sends(row):
                    await self._send(row, nursery)
                elif row.request is not None and (first := self._script.first(row.request)).number in self._done:
                    await self._follow(row, first)
            for scope in self._scopes.values():  # requests that the recording leaves open
                scope.cancel()

    @property
    def pairs(self) -> Iterator[_Pair]:
        for row in self._script.rows:
            if row.number in self._outcomes and (answer := self._script.answer(row)) is not None:
                yield _Pair(f"{row.title} #{row.id}", _half(answer.frame), self._outcomes[row.number])

    async def _send(self, row: DiagramRow, nursery: trio.Nursery) -> None:
        params = self._own(row.frame.get("params"))
        if row.kind == "notification":
            await self._client.notify(row.method, params)
            return
        self._done[row.number], self._scopes[row.number] = trio.Event(), trio.CancelScope()
        nursery.start_soon(self._request, row, params)
        await trio.lowlevel.checkpoint()  # the task sends it before the next row

    async def _request(self, row: DiagramRow, params: Any) -> None:
        try:
            with self._scopes[row.number]:
                self._outcomes[row.number] = await self._outcome(row, params)
                answer = self._script.answer(row)
                if answer is not None:
                    self._learn(_half(answer.frame), self._outcomes[row.number])
        finally:
            self._done[row.number].set()

    async def _outcome(self, row: DiagramRow, params: Any) -> Any:
        wanted = "progressToken" in ((row.frame.get("params") or {}).get("_meta") or {})
        try:
            if wanted:
                return await self._client.request(row.method, params, on_progress=lambda *_: None)
            return await self._client.request(row.method, params)
        except RequestError as error:
            found = {"code": error.code, "message": error.message, "data": error.data}
            return {"error": {key: value for key, value in found.items() if value is not None}}
        except (McpError, trio.TooSlowError) as error:
            return {"no answer": str(error)}

    async def _follow(self, row: DiagramRow, request: DiagramRow) -> None:
        """Wait as the recording did: for the answer, or before a cancellation for the recorded time."""
        if row.kind == "answer" and row is self._script.answer(request):
            await self._done[request.number].wait()
        elif row.kind == "cancelled":
            with trio.move_on_after(min(row.at - request.at, _LONGEST_WAIT)):
                await self._done[request.number].wait()
            self._scopes[request.number].cancel()

    def _own(self, params: Any) -> Any:
        """The params with our generated values, and without the members that the client writes itself."""
        if not isinstance(params, dict):
            return None
        params = self._replaced(params)
        if isinstance(meta := params.pop("_meta", None), dict):
            kept = {key: value for key, value in meta.items() if key != "progressToken" and _TERMS not in key}
            params |= {"_meta": kept} if kept else {}
        return params

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._replaced(each) for each in value]
        return self._values.get(value, value) if isinstance(value, str) else value

    def _learn(self, recorded: Any, replayed: Any, name: str = "") -> None:
        """Remember which of our generated values stands for which recorded one."""
        if isinstance(recorded, dict) and isinstance(replayed, dict):
            for key in recorded.keys() & replayed.keys():
                self._learn(recorded[key], replayed[key], key)
        elif isinstance(recorded, list) and isinstance(replayed, list):
            for one, other in zip(recorded, replayed, strict=False):
                self._learn(one, other)
        elif (isinstance(recorded, str) and isinstance(replayed, str)) and (
            name in _GENERATED or (re.fullmatch(_UUID, recorded) and re.fullmatch(_UUID, replayed))
        ):
            self._values[recorded] = replayed


def _half(frame: Mapping[str, Any]) -> Any:
    """The result of an answer, or its error."""
    return frame["result"] if "result" in frame else {"error": frame["error"]}


def _comparable(value: Any, ignored: set[str]) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _comparable(each, ignored) for key, each in value.items() if key not in ignored}
        return {key: each for key, each in kept.items() if key != "_meta" or each}
    if isinstance(value, list | tuple):
        return [_comparable(each, ignored) for each in value]
    if isinstance(value, str):
        return _CHANGING.sub(lambda found: f"<{found.lastgroup}>", value)
    return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value


def _report(pairs: Sequence[_Pair], unsent: Sequence[str], output: Output) -> int:
    different = [pair for pair in pairs if pair.recorded != pair.replayed]
    if output.as_json:
        found = [{"title": each.title, "recorded": each.recorded, "replayed": each.replayed} for each in different]
        output.json({"compared": len(pairs), "different": found, "not sent": list(unsent)})
        return 1 if different else 0
    for pair in pairs:
        same = pair.recorded == pair.replayed
        output.line(output.painted(f"{'✓' if same else '✗'} {pair.title}", "good" if same else "bad"))
        if not same:
            before, after = (_lines(each) for each in (pair.recorded, pair.replayed))
            for line in list(difflib.unified_diff(before, after, "recorded", "replayed", lineterm="", n=3)):
                colour = {"+": "good", "-": "bad"}.get(line[0], "dim")
                output.line(f"    {output.painted(line, colour)}")
    for words in unsent:
        output.line(output.painted(f"not sent: {words}", "warn"))
    output.line(f"{len(pairs)} compared, {len(different) or 'none'} different")
    return 1 if different else 0


def _lines(value: Any) -> list[str]:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).split("\n")
