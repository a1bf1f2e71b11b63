"""The messages of a recording, each linked to the others: requests to answers, progress and cancellations.

A row is one message, or one other entry of the recording.  An answer belongs to the latest open request of the other
side with its id; over HTTP, where clients share a recording, that of the same HTTP request goes first.  Progress
belongs to the open request with its token, and a cancellation to that with its id.  Lines that follow each other on
standard error are one row.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from trio_mcp.cli.recording import RecordedEntry, Recording

__all__ = ["DiagramRow", "as_json", "counts", "matching", "rows_of"]

_OTHER = {"client": "server", "server": "client"}
_MUCH = 500  # characters of a summary
_MODERN = "2026"  # from this year on, clients of a revision cancel by disconnecting
_TOGETHER = 0.05  # seconds between two lines of one row of standard error


@attrs.define(eq=False)
class DiagramRow:
    """One row of the diagram."""

    number: int
    at: float
    sender: str
    kind: str
    """"request", "answer", "notification", "progress", "cancelled", "stderr", "text", "http" or "end"."""
    title: str
    """The method with the name of its tool, prompt or resource; that of the request for an answer."""
    summary: str
    """The content of the message, in one line."""
    frame: Any = None
    """The message as JSON; the text of other entries."""
    method: str = ""
    id: Any = None
    status: str = ""
    """Of a request and its answer: "ok", "error", "cancelled" or, without an answer, "open"."""
    request: DiagramRow | None = None
    """The request that an answer, progress or a cancellation belongs to."""
    answer: DiagramRow | None = None
    http: Mapping[str, Any] | None = None

    @property
    def seconds(self) -> float | None:
        """How long the request of this row has taken."""
        first = self.request if self.kind == "answer" else self
        if first is None or first.answer is None:
            return None
        return first.answer.at - first.at


def rows_of(recording: Recording) -> list[DiagramRow]:
    """Return all rows, in the order of time."""
    linker = _Linker()
    for entry in recording.entries:
        linker.add(entry)
    return linker.rows


def matching(rows: Sequence[DiagramRow], patterns: Sequence[str]) -> list[DiagramRow]:
    """Return the rows with a method that fits a pattern, such as ``tools/*``."""
    if not patterns:
        return list(rows)
    return [row for row in rows if any(fnmatch.fnmatchcase(_named(row), pattern) for pattern in patterns)]


def _named(row: DiagramRow) -> str:
    """The method that a filter sees: progress, answers and cancellations go with their request."""
    return row.request.method if row.request is not None else row.method


def counts(rows: Sequence[DiagramRow]) -> dict[str, int]:
    """How many requests there are, and how many of each status."""
    requests = [row for row in rows if row.kind == "request"]
    found = {"requests": len(requests)}
    for status in ("ok", "error", "cancelled", "open"):
        if number := sum(row.status == status for row in requests):
            found[status] = number
    return found


def as_json(row: DiagramRow) -> dict[str, Any]:
    """Return a row for JSON; links are the numbers of rows."""
    seconds = row.seconds
    found = {
        "number": row.number, "at": row.at, "from": row.sender, "kind": row.kind, "method": row.method or None,
        "id": row.id, "title": row.title, "summary": row.summary, "status": row.status or None,
        "request": row.request and row.request.number, "answer": row.answer and row.answer.number,
        "ms": None if seconds is None else round(seconds * 1000, 3), "http": row.http, "frame": row.frame,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


class _Linker:
    """Makes the rows of entries, and links them."""

    def __init__(self) -> None:
        self.rows: list[DiagramRow] = []
        self._open: list[DiagramRow] = []  # requests without an answer

    def add(self, entry: RecordedEntry) -> None:
        http = entry.has.get("http")
        before = len(self.rows)
        if "frame" in entry.has:
            frame = entry.has["frame"]
            for message in frame if isinstance(frame, list) and frame else [frame]:
                self._message(entry, message, http)
        elif "stderr" in entry.has:
            self._stderr(entry)
        elif "text" in entry.has:
            self._row(entry, "text", "not JSON", _line(entry.has["text"]), entry.has["text"])
        elif "end" in entry.has:
            self._ended(entry, http)
        elif "lost" in entry.has:
            self._row(entry, "text", "not recorded", f"{entry.has['lost']} bytes")
        elif http is not None:
            status = "error" if http.get("status", 0) >= 400 else ""
            self._row(entry, "http", _http_title(http), _http_words(http), http, status=status)
        for row in self.rows[before:]:
            row.http = http

    def _row(
        self, entry: RecordedEntry, kind: str, title: str, summary: str, frame: Any = None, **more: Any
    ) -> DiagramRow:
        row = DiagramRow(len(self.rows), entry.at, entry.sender, kind, title, summary, frame, **more)
        self.rows.append(row)
        return row

    def _message(self, entry: RecordedEntry, message: Any, http: Mapping[str, Any] | None) -> None:
        match message:
            case {"method": str() as method, "id": id}:
                title, summary = _request_words(method, message.get("params"))
                row = self._row(
                    entry, "request", title, summary, message, method=method, id=id, status="open"
                )  # fmt: skip
                row.http = http
                self._open.append(row)
            case {"method": str() as method}:
                self._notification(entry, method, message)
            case {"result": result, "id": id}:
                self._answer(entry, id, message, http, *_result_words(result))
            case {"error": error}:
                self._answer(entry, message.get("id"), message, http, "error", _error_words(error))
            case _:
                self._row(entry, "text", "no message", _line(json.dumps(message, ensure_ascii=False)), message)

    def _notification(self, entry: RecordedEntry, method: str, message: Mapping[str, Any]) -> None:
        params = message.get("params")
        given = params if isinstance(params, dict) else {}
        title = method.removeprefix("notifications/")
        summary = _line(json.dumps(params, ensure_ascii=False)) if params else ""
        kind, request = "notification", None
        if method == "notifications/progress":
            kind, summary = "progress", _progress_words(given)
            request = self._find(_OTHER[entry.sender], token=given.get("progressToken"))
        elif method == "notifications/cancelled":
            kind, summary = "cancelled", str(given.get("reason", ""))
            request = self._find(entry.sender, id=given.get("requestId"))
        elif method == "notifications/message":
            data = given.get("data")
            title = f"message {given.get('level', '')}"
            summary = _line(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
        row = self._row(entry, kind, title, summary, message, method=method, request=request)
        if kind == "cancelled" and request is not None:
            row.title, request.status = f"cancelled {request.title}", "cancelled"
        elif kind == "progress" and request is not None:
            row.title = f"progress {request.title}"

    def _answer(
        self, entry: RecordedEntry, id: Any, message: Any, http: Mapping[str, Any] | None, status: str, summary: str
    ) -> None:
        request = self._find(_OTHER[entry.sender], id=id, http=http)
        if request is None and id is None and http is not None:  # a server refuses a POST without a look at its id
            request = next((row for row in self._open if _number(row.http) == _number(http)), None)
        row = self._row(entry, "answer", "an answer without a request", summary, message, id=id, status=status)
        if request is not None:
            row.title, row.request, row.method, request.answer = request.title, request, request.method, row
            if request.status == "open":
                request.status = status
            self._open.remove(request)

    def _find(
        self, sender: str, *, id: Any = None, token: Any = None, http: Mapping[str, Any] | None = None
    ) -> DiagramRow | None:
        """Return the open request of this sender with this id or progress token."""
        found = None
        for row in self._open:
            fits = _same(row.id, id) if token is None else _same(_token(row), token)
            if row.sender == sender and fits:
                found = row
                if http is not None and _number(row.http) == _number(http):
                    return row
        return found

    def _stderr(self, entry: RecordedEntry) -> None:
        text, last = entry.has["stderr"], self.rows[-1] if self.rows else None
        if last is not None and last.kind == "stderr" and entry.at - last.at < _TOGETHER:
            last.frame += f"\n{text}"
            last.summary = _line(text)
            last.title = f"stderr, {last.frame.count(chr(10)) + 1} lines"
        else:
            self._row(entry, "stderr", "stderr", _line(text), text)

    def _ended(self, entry: RecordedEntry, http: Mapping[str, Any] | None) -> None:
        """Add the end of a side, or that of an HTTP request."""
        if http is None:
            title = "the server" if entry.sender == "server" else "the end"
            self._row(entry, "end", title, _line(entry.has["end"]), entry.has["end"])
            return
        failed = "error" if http.get("failed") else ""
        row = self._row(entry, "end", "HTTP", _line(entry.has["end"]), entry.has["end"], status=failed)
        for request in self._open if entry.sender == "client" else ():
            if request.http is None or _number(request.http) != _number(http):
                continue
            row.request, row.title = request, f"HTTP {request.title}"
            if str(request.http.get("headers", {}).get("mcp-protocol-version", "")) >= _MODERN:
                request.status = "cancelled"  # by disconnecting; in older revisions the call goes on
                row.kind, row.title = "cancelled", f"cancelled {request.title}"


def _number(http: Mapping[str, Any] | None) -> Any:
    """The number of the HTTP request that a row came with."""
    return None if http is None else http.get("number")


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _token(row: DiagramRow) -> Any:
    match row.frame:
        case {"params": {"_meta": {"progressToken": token}}}:
            return token
    return None


def _line(text: str) -> str:
    """A text in one line; longer than the widest terminal, and short enough for a page of ten thousand rows."""
    return " ".join(text[: 2 * _MUCH].split())[:_MUCH]


# The content of messages, in words.


_NAMES = ("name", "uri", "taskId", "level")
_HIDDEN = frozenset({"_meta", "name", "uri", "taskId"})


def _request_words(method: str, params: Any) -> tuple[str, str]:
    """The title of a request, and its arguments."""
    given = params if isinstance(params, dict) else {}
    name = next((given[key] for key in _NAMES if isinstance(given.get(key), str)), "")
    rest = {key: value for key, value in given.items() if key not in _HIDDEN and value != name}
    if method == "initialize":
        info = given.get("clientInfo")
        who = f"{info.get('name')} {info.get('version')}, " if isinstance(info, dict) else ""
        return method, f"{who}{given.get('protocolVersion', '')}"
    if list(rest) == ["arguments"]:
        rest = rest["arguments"]
    if method == "elicitation/create" and isinstance(given.get("message"), str):
        return method, _line(given["message"])
    title = f"{method} {name}".strip()
    return _line(title), _line(json.dumps(rest, ensure_ascii=False)) if rest else ""


def _result_words(result: Any) -> tuple[str, str]:
    """The status of an answer, and its content."""
    if not isinstance(result, dict):
        return "ok", _line(json.dumps(result, ensure_ascii=False))
    status = "error" if result.get("isError") is True else "ok"
    if result.get("resultType", "complete") != "complete":
        requests = result.get("inputRequests")
        asked = ", ".join(sorted(_asked(requests))) if isinstance(requests, dict) else ""
        return status, f"{str(result['resultType']).replace('_', ' ')} {asked}".strip()
    return status, _line(" · ".join(_result_parts(result)))


def _asked(requests: Mapping[str, Any]) -> Iterator[str]:
    for each in requests.values():
        if isinstance(each, dict) and isinstance(each.get("method"), str):
            yield each["method"]


def _result_parts(result: Mapping[str, Any]) -> Iterator[str]:
    for key, value in sorted(result.items(), key=lambda item: item[0] != "serverInfo"):
        if key in ("_meta", "resultType", "isError", "ttlMs", "cacheScope"):
            continue
        if key in ("serverInfo", "clientInfo") and isinstance(value, dict):
            yield f"{value.get('name')} {value.get('version', '')}".strip()
        elif key == "capabilities" and isinstance(value, dict):
            yield f"capabilities {', '.join(value) or 'none'}"
        elif key == "content" and "structuredContent" in result:
            continue  # repeats it as a text
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            names = [each.get("name") or each.get("text") or each.get("uri") or each.get("type") for each in value]
            noun = key if len(value) > 1 else key.removesuffix("s")
            yield f"{'' if key in ('content', 'contents') else f'{len(value)} {noun}: '}{', '.join(map(str, names))}"
        elif isinstance(value, str):
            yield value if key == "protocolVersion" else f"{key} {value}"
        elif key == "structuredContent":
            yield json.dumps(value, ensure_ascii=False)
        elif key != "supportedVersions":
            yield f"{key} {json.dumps(value, ensure_ascii=False)}"


def _error_words(error: Any) -> str:
    if isinstance(error, dict):
        return _line(f"{error.get('code', '')} {error.get('message', '')}")
    return _line(json.dumps(error))


def _progress_words(params: Mapping[str, Any]) -> str:
    total, message = params.get("total"), params.get("message")
    share = f"{params.get('progress')}" + (f" of {total}" if total is not None else "")
    return _line(f"{share} {message}" if message else share)


def _http_title(http: Mapping[str, Any]) -> str:
    if "method" in http:
        return f"HTTP {http['method']} {http.get('path', '')}"
    return f"HTTP {http['status']}" if "status" in http else f"HTTP event {http.get('event', '')}"


def _http_words(http: Mapping[str, Any]) -> str:
    headers = http.get("headers")
    return _line(", ".join(f"{key}: {value}" for key, value in headers.items())) if isinstance(headers, dict) else ""
