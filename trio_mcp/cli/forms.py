"""Questions of a server, asked on the terminal: forms field by field, and pages with their address.

Without a terminal every question is declined.  The questions go to standard error, because standard output has the
result.
"""

from __future__ import annotations

import json
import sys
import webbrowser
from typing import Any

import trio

from trio_mcp.cli.output import ReportLines
from trio_mcp.client.callbacks import FormElicitationRequest, UrlElicitationRequest
from trio_mcp.core.codec import to_json
from trio_mcp.core.elicitation import Accepted, Declined, Dismissed, FormCheck
from trio_mcp.core.errors import printable
from trio_mcp.core.forms import BooleanSchema, IntegerSchema, MultiSelectSchema, NumberSchema
from trio_mcp.core.revisions import LATEST

__all__ = ["Terminal"]

_YES = ("y", "yes", "true", "1")
_NO = ("n", "no", "false", "0")


class Terminal:
    """The callbacks of a client for questions of its server."""

    def __init__(self, reports: ReportLines) -> None:
        self._reports = reports
        self._lock = trio.Lock()  # one question at a time

    async def fill_in(self, request: FormElicitationRequest) -> Any:
        """Ask for each field of a form.  An empty answer takes the default; Ctrl-D dismisses the question."""
        async with self._lock:
            if not self._asks(request.message):
                return Declined()
            try:
                return Accepted(await self._fields(request))
            except EOFError:
                return Dismissed()

    async def open_page(self, request: UrlElicitationRequest) -> Any:
        """Show the address of a page, and open it only if the user agrees (elic-38 to elic-40)."""
        async with self._lock:
            if not self._asks(request.message):
                return Declined()
            for warning in request.warnings:
                self._say(f"warning: {warning}")
            self._say(f"page: {request.url}")
            try:
                answer = await self._ask(f"open this page of {request.host} in the browser? [y/n] ")
            except EOFError:
                return Dismissed()
            if answer.lower() not in _YES:
                return Declined()
            await trio.to_thread.run_sync(webbrowser.open, request.url)
            return Accepted(None)

    def _asks(self, message: str) -> bool:
        """Show the question; False if there is no terminal to answer it."""
        self._reports.settle()
        self._say(f"the server asks: {message}")
        if sys.stdin.isatty():
            return True
        self._say("declined: standard input is not a terminal")
        return False

    async def _fields(self, request: FormElicitationRequest) -> dict[str, Any]:
        form = request.params.requested_schema
        check = FormCheck(to_json(form, LATEST))
        values: dict[str, Any] = {}
        for name, field in form.properties.items():
            required, default = name in (form.required or ()), request.defaults.get(name)
            while True:
                label = "answer" if list(form.properties) == ["value"] else name  # the form of one value
                text = await self._ask(self._prompt(label, field, required, default))
                if not text and (default is not None or not required):
                    break  # the default is sent for a field that is left out
                try:
                    value = _value(text, field)
                except ValueError as error:
                    self._say(f"  {error}")
                    continue
                # Asked again here: later the whole form would be refused, and the call would fail (elic-08).
                problems = check.fields.errors({name: value})
                if not problems:
                    values[name] = value
                    break
                for problem in problems:
                    self._say(f"  {problem.message}")
        return values

    def _prompt(self, label: str, field: Any, required: bool, default: Any) -> str:
        label = printable(getattr(field, "title", None) or label)
        if description := getattr(field, "description", None):
            self._say(f"  {description}")
        for number, (value, title) in enumerate(getattr(field, "choices", ())):
            self._say(f"  {number + 1}  {title}" + (f" ({value})" if title != value else ""))
        note = f" [{json.dumps(default)}]" if default is not None else "" if required else " (optional)"
        kind = " (y/n)" if isinstance(field, BooleanSchema) else ""
        return f"  {label}{kind}{note}: "

    async def _ask(self, prompt: str) -> str:
        self._reports.settle()
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line: str = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        if not line:
            self._say("")
            raise EOFError
        return line.strip()

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def _value(text: str, field: Any) -> Any:
    """Convert the text of a field.  Raises `ValueError` with the reason."""
    if choices := list(getattr(field, "choices", ())):
        if isinstance(field, MultiSelectSchema):
            return [_choice(part.strip(), choices) for part in text.split(",")]
        return _choice(text, choices)
    if isinstance(field, BooleanSchema):
        if text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
        raise ValueError(f"expected y or n, got {text!r}")
    if isinstance(field, NumberSchema):
        whole = isinstance(field, IntegerSchema)
        try:
            return int(text) if whole else float(text)
        except ValueError:
            raise ValueError(f"expected a {'whole ' if whole else ''}number, got {text!r}") from None
    return text


def _choice(text: str, choices: list[tuple[str, str]]) -> str:
    """The value that a number, a value or a title chooses."""
    if text.isdecimal() and 1 <= int(text) <= len(choices):
        return choices[int(text) - 1][0]
    for value, title in choices:
        if text in (value, title):
            return value
    raise ValueError(f"expected a number from 1 to {len(choices)} or a value, got {text!r}")
