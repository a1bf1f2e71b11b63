"""The checks of single lines: what a child process writes to its standard output, and how it takes odd lines.

`LineWatch` reads along with the client.  `check_lines` starts the command once more and speaks to it without a client,
because a client refuses to send what these checks send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from trio_mcp.cli.check_rules import CheckReport
from trio_mcp.cli.output import compact
from trio_mcp.core.errors import METHOD_NOT_FOUND, ConnectionFailed
from trio_mcp.core.revisions import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_VERSION, REVISIONS
from trio_mcp.transport.child import Child, start_child
from trio_mcp.transport.nursery import open_nursery

__all__ = ["LineWatch", "check_lines"]

_SIZE = 16 * 1024 * 1024  # bytes of one line
_START = 30.0  # seconds to the first answer
_WAIT = 5.0  # seconds for each other answer
_EXIT = 5.0  # seconds from the end of the input to the end of the process
_OLD = "1999-01-01"
_INFO = {"name": "trio-mcp", "version": "0"}
_MOST = 100  # faults and progress tokens that a watch remembers, and responses that were not asked for


class LineWatch:
    """The tap of a client on a child process: remembers what is wrong with the lines of the server."""

    def __init__(self) -> None:
        self.wrong: dict[tuple[str, str], str] = {}
        self.methods: set[str] = set()
        self._open = b""
        self._progress: dict[str | int, float] = {}

    def __call__(self, direction: str, data: bytes) -> None:
        if direction == "in":
            *lines, self._open = (self._open + bytes(data)).split(b"\n")
            self._open = self._open[-_SIZE:]
            for line in lines:
                if line.strip():
                    self._see(line)

    def report(self, report: CheckReport, capabilities: Mapping[str, Any]) -> None:
        for rule in ("stdio-03", "core-01", "core-11", "core-13", "prog-03"):
            found = {where: seen for (name, where), seen in self.wrong.items() if name == rule}
            for where, seen in found.items():
                report.expect(rule, False, where, seen)
            report.expect(rule, True, "")
        report.expect("stdio-14", not self._requests, "standard output", ", ".join(self._requests))
        if "notifications/message" in self.methods:
            report.expect("log-01", "logging" in capabilities, "notifications/message", "logging is not declared")

    @property
    def _requests(self) -> list[str]:
        return sorted(method for rule, method in self.wrong if rule == "request")

    def _see(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self._wrong("stdio-03", "standard output", repr(line[:60].decode(errors="replace")))
            return
        for each in message if isinstance(message, list) else (message,):
            if not isinstance(each, dict):
                self._wrong("stdio-03", "standard output", compact(each))
                continue
            self._see_message(each)

    def _see_message(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        where = str(method or "a response")
        if message.get("jsonrpc") != "2.0":
            self._wrong("core-01", where, f"jsonrpc is {compact(message.get('jsonrpc'))}")
        if method is None:
            if ("result" in message) == ("error" in message):
                self._wrong("core-11", where, f"members {', '.join(message)}")
            error = message.get("error")
            if isinstance(error, dict) and type(error.get("code")) is not int:
                self._wrong("core-13", where, f"code is {compact(error.get('code'))}")
            return
        self.methods.add(where)
        if "id" in message:
            self._wrong("request", where, "")
        elif method == "notifications/progress":
            self._see_progress(message.get("params"))

    def _see_progress(self, params: Any) -> None:
        token, value = (params.get("progressToken"), params.get("progress")) if isinstance(params, dict) else (None, 0)
        if isinstance(token, str | int) and isinstance(value, int | float):
            if token in self._progress and value <= self._progress[token]:
                self._wrong("prog-03", "notifications/progress", f"{value:g} after {self._progress[token]:g}")
            self._progress[token] = value
            if len(self._progress) > _MOST:
                del self._progress[next(iter(self._progress))]

    def _wrong(self, rule: str, where: str, seen: str) -> None:
        if len(self.wrong) < _MOST:
            self.wrong.setdefault((rule, where), seen)


class _LineServerEnded(Exception):
    """The process has closed its standard output, or has ended."""


class _LineServer:
    """A server process, line by line."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._data = b""
        self.strays: list[Any] = []
        """Responses that no request of these checks has asked for."""

    async def send(self, *messages: Any) -> None:
        data = b"".join(json.dumps(each).encode() + b"\n" for each in messages)
        try:
            await self._child.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _LineServerEnded from None

    async def ask(
        self, message: Mapping[str, Any], seconds: float | None = None, *, without_id: bool = False
    ) -> dict[str, Any] | None:
        """Send a request; return the response with its id, None after `seconds`.

        `without_id`: a response without an id will do.  JSON-RPC allows that for an invalid request.
        """
        await self.send(message)
        with trio.move_on_after(_WAIT if seconds is None else seconds):
            while True:
                for answer in await self._next():
                    if isinstance(answer, dict) and "method" not in answer:
                        id = answer.get("id")
                        if (id == message["id"] and type(id) is str) or (id is None and without_id):
                            return answer
                        if len(self.strays) < _MOST:
                            self.strays.append(answer)
        return None

    async def _next(self) -> list[Any]:
        while b"\n" not in self._data:
            try:
                more = await self._child.stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                more = b""
            if not more or len(self._data) > _SIZE:
                raise _LineServerEnded
            self._data += more
        line, _, self._data = self._data.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            return []  # the watch of the client reports these
        return found if isinstance(found, list) else [found]


async def check_lines(command: Sequence[str], env: Mapping[str, str], report: CheckReport) -> None:
    """Start the command and send lines that a client does not send."""
    async with open_nursery() as nursery:
        child = None
        try:
            child = await start_child(nursery, command, env=env, stderr=None, shutdown_timeout=_EXIT)
            lines = _LineServer(child)
            if REVISIONS[report.revision].handshake:
                await _legacy(lines, report)
            else:
                await _modern(lines, report)
                await _end(child, report)
        except (_LineServerEnded, ConnectionFailed):
            report.expect("core-31", False, "odd messages on standard input", "the server has ended its output")
        finally:
            if child is not None:
                await child.aclose()


async def _legacy(lines: _LineServer, report: CheckReport) -> None:
    handshake = {"protocolVersion": _OLD, "capabilities": {}, "clientInfo": _INFO}
    opened = await lines.ask(_request("open", "initialize", handshake), _START)
    if opened is None:
        report.notes.append(f"no answer to initialize with version {_OLD}: single lines were not checked")
        return
    error = opened.get("error")
    if error is not None:  # -32602 with the supported versions is allowed too
        report.expect("life-10", error.get("code") == -32602, f"initialize {_OLD}", _shown(opened))
        handshake = {**handshake, "protocolVersion": report.revision}
        await lines.ask(_request("again", "initialize", handshake))
    else:
        chosen = opened["result"].get("protocolVersion") if isinstance(opened.get("result"), dict) else None
        report.expect(
            "life-10", isinstance(chosen, str) and chosen != _OLD, f"initialize {_OLD}", f"version {compact(chosen)}"
        )
    early = await lines.ask(_request("early", "ping", {}))
    report.expect("ping-01", _is_empty(early), "ping before notifications/initialized", _shown(early))
    await lines.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
    invalid = await _odd_lines(lines, {})
    last = await lines.ask(_request("last", "ping", {}))
    report.expect("core-31", last is not None, "ping after odd messages", _shown(last))
    _strays(lines, invalid, report)


async def _modern(lines: _LineServer, report: CheckReport) -> None:
    terms = {META_VERSION: report.revision, META_CLIENT_CAPABILITIES: {}, META_CLIENT_INFO: _INFO}
    first = await lines.ask(_request("open", "server/discover", {"_meta": terms}), _START)
    if first is None:
        report.notes.append("no answer to server/discover: single lines were not checked")
        return
    old = await lines.ask(_request("old", "server/discover", {"_meta": {**terms, META_VERSION: _OLD}}))
    data = (_error(old) or {}).get("data")
    right = _code(old) == -32022 and isinstance(data, dict) and isinstance(data.get("supported"), list)
    report.expect("ver-01", right, f"server/discover with version {_OLD}", _shown(old))
    partial = {META_VERSION: report.revision, META_CLIENT_INFO: _INFO}
    answer = await lines.ask(_request("partial", "tools/list", {"_meta": partial}))
    # A server without tools may name that fault first.
    right = _code(answer) in (-32602, METHOD_NOT_FOUND)
    report.expect("meta-11", right, "tools/list without clientCapabilities in _meta", _shown(answer))
    ping = await lines.ask(_request("ping", "ping", {"_meta": terms}))
    report.expect("ping-07", _code(ping) == METHOD_NOT_FOUND, "ping", _shown(ping))
    invalid = await _odd_lines(lines, {"_meta": terms})
    last = await lines.ask(_request("last", "server/discover", {"_meta": terms}))
    report.expect("core-31", last is not None and "result" in last, "server/discover after odd messages", _shown(last))
    _strays(lines, invalid, report)


async def _odd_lines(lines: _LineServer, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Send odd messages; return the answer to an invalid request."""
    invalid = await lines.ask({"jsonrpc": "2.0", "id": "invalid", "method": 5}, without_id=True)
    await lines.send(
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {**params, "requestId": "never-sent"}},
        {"jsonrpc": "2.0", "method": "notifications/com.example", "params": params},
    )
    return invalid


def _strays(lines: _LineServer, invalid: dict[str, Any] | None, report: CheckReport) -> None:
    """Judge the responses that no request has asked for.

    Some come from requests whose response has another id, and some are answers to a notification.
    """
    late = [each for each in lines.strays if each.get("id") == "invalid"]  # from a busy machine
    lines.strays = [each for each in lines.strays if each not in late]
    answer = late[0] if late else invalid
    report.expect("core-28", _code(answer) == -32600, "a request with the method 5", _shown(answer))
    seen = "; ".join(map(_shown, lines.strays[:3]))
    cancelled = [each for each in lines.strays if each.get("id") == "never-sent"]
    report.expect("cancel-08", not cancelled, "notifications/cancelled of an unknown request", seen)
    without = [each for each in lines.strays if each.get("id") is None]
    report.expect("core-16", not without, "notifications", seen)
    others = [each for each in lines.strays if each not in cancelled and each not in without]
    report.expect("core-09", not others, "requests with ids that are strings", seen)


async def _end(child: Child, report: CheckReport) -> None:
    """Close standard input: the child is sent a signal if it has not exited after `_EXIT` seconds."""
    start = trio.current_time()
    await child.aclose()
    prompt = trio.current_time() - start < _EXIT
    report.expect("stdio-11", prompt, "end of standard input", f"still running after {_EXIT:g} seconds")


def _request(id: str, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def _is_empty(answer: Mapping[str, Any] | None) -> bool:
    return answer is not None and isinstance(answer.get("result"), dict) and answer["result"].keys() <= {"_meta"}


def _error(answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    error = answer.get("error") if answer is not None else None
    return error if isinstance(error, dict) else None


def _code(answer: Mapping[str, Any] | None) -> Any:
    return (_error(answer) or {}).get("code")


def _shown(answer: Mapping[str, Any] | None) -> str:
    """A response in a few words."""
    if answer is None:
        return f"no answer within {_WAIT:g} seconds"
    error = _error(answer)
    return f"error {compact(error.get('code'))}" if error else f"result {compact(answer.get('result'))}"
