"""What the callbacks of a client are given: a question to its model, a form to fill in, a page to visit.

Each is told which server asks (elic-04), by the name that the server gives itself: good to show, and proof of nothing.
What the server says may be private, so none of it is in a repr (samp-10).

A request is checked before it is one: what a server may not ask raises `RemoteProtocolError`, and no callback hears of
it.  What is filled in is held against the form here as well; `UsageError` names the place that does not fit,
never what stood there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard
from urllib.parse import SplitResult, urlsplit

import attrs

from trio_mcp.core import forms, models
from trio_mcp.core.content import MalformedContent, well_formed
from trio_mcp.core.errors import RemoteProtocolError, UsageError, shown
from trio_mcp.core.jsonrpc import Json, JsonObject
from trio_mcp.core.schema.validation import CompiledSchema, compile_schema

__all__ = ["AnswerForm", "FormElicitationRequest", "SamplingRequest", "UrlElicitationRequest", "host_of"]


@attrs.frozen(eq=False)
class SamplingRequest:
    """The server asks the client's model.

    `params` has the messages and all that goes with them, as they came.  `max_tokens` is never to be exceeded (samp-23)
    and `tool_choice` is to be obeyed (samp-16); the rest is advice.
    """

    params: models.CreateMessageParams = attrs.field(repr=False)
    server: models.Implementation | None

    def pick_model(self, available: Iterable[str]) -> str | None:
        """The model of `available` that the server would like most; None if its hints speak for none.

        A hint is a part of a name, in any case of letters; of several models that have it the first is taken.
        """
        names = list(available)
        preferences = self.params.model_preferences
        for hint in well_formed((preferences and preferences.hints) or ()):  # samp-27: the first that matches
            part = (hint.name or "").casefold()
            found = next((name for name in names if part in name.casefold()), None) if part else None
            if found is not None:
                return found
        return None


@attrs.frozen(eq=False)
class FormElicitationRequest:
    """The server asks the user to fill in a form.

    `defaults` are the values to show before the user has entered any (elic-17), and what stands for a field that the
    callback leaves out.
    """

    params: forms.ElicitFormParams = attrs.field(repr=False)
    server: models.Implementation | None
    defaults: Mapping[str, forms.ElicitValue] = attrs.field(repr=False)

    @property
    def message(self) -> str:
        """What is asked, and why."""
        return self.params.message

    @property
    def fields(self) -> Mapping[str, forms.FieldSchema | MalformedContent]:
        """The fields by name.  A `MalformedContent` one is more than a form may have: its `raw` is a JSON Schema."""
        return self.params.requested_schema.properties


@attrs.frozen(eq=False)
class UrlElicitationRequest:
    """The server asks the user to visit a page.

    Show the whole `url`, with `host` and `warnings`, and open it only if the user agrees, in a browser of the user's
    own.  It is what the server sent, and as the browser will understand it: no invisible or look-alike characters.
    """

    params: forms.ElicitUrlParams = attrs.field(repr=False)
    server: models.Implementation | None
    host: str

    @property
    def message(self) -> str:
        """Why the page is to be visited."""
        return self.params.message

    @property
    def url(self) -> str:
        return self.params.url

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the URL before saying yes (elic-41)."""
        parts = urlsplit(self.url)
        return tuple(warning for warning, applies in _WARNINGS if applies(parts))


# Forms


class AnswerForm:
    """The schema of a form, as what is filled in is held against it.

    Raises `RemoteProtocolError` for one that is no schema, or too much work.
    """

    __slots__ = ("_check", "_names", "defaults")

    def __init__(self, schema: JsonObject) -> None:
        properties = schema["properties"]
        try:
            self._check = compile_schema(schema)
            alone = compile_schema({key: each for key, each in schema.items() if key != "required"})
        except UsageError as error:  # said of us, but the schema is the server's
            raise RemoteProtocolError(f"requestedSchema: {error}") from None
        self._names = tuple(properties)
        self.defaults = _defaults(properties, alone)

    def filled_in(self, values: Mapping[str, Any]) -> dict[str, forms.ElicitValue]:
        """The content of the answer (elic-44)."""
        for name in values:
            if name not in self._names:
                raise UsageError(f"the form has no field {shown(name)}; it asks for {shown(self._names)}")
        given = {**self.defaults, **values}
        content = {name: _plain(name, value) for name, value in given.items() if value is not None}
        if problems := self._check.errors(content):
            why = "; ".join(f"content{each.path} {each.message}" for each in problems)
            raise UsageError(f"what the elicitation callback returned does not fit the form: {why}")
        return content


def _defaults(properties: Mapping[str, Json], alone: CompiledSchema) -> dict[str, forms.ElicitValue]:
    """The defaults that would be answers: one that does not fit its own field is nobody's."""
    said = {name: each.get("default") for name, each in properties.items() if isinstance(each, dict)}
    plain = {name: value for name, value in said.items() if _is_plain(value)}
    if not alone.judges(plain):  # each by itself may be little work, and all of them more than anybody has time for
        return {}
    return {name: value for name, value in plain.items() if not alone.errors({name: value})}


def _is_plain(value: object) -> TypeGuard[forms.ElicitValue]:
    if isinstance(value, list | tuple):
        return all(type(each) is str for each in value)
    return type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _plain(name: str, value: Any) -> forms.ElicitValue:
    if not _is_plain(value):
        wanted = "a str, a finite number, a bool or a list of str"
        raise UsageError(f"field {shown(name)} of the form takes {wanted}, not this {type(value).__name__}")
    return list(value) if isinstance(value, tuple) else value


# Pages

# RFC 3986, and no more: what lies beyond, such as a backslash or a tab, one program drops and another reads as a slash.
_URL = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")


def host_of(url: str) -> str:
    """The host of a page to visit.  Raises `RemoteProtocolError` unless it is the one to which any browser goes."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if _URL.fullmatch(url) and parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # half a bracket; a port that is no number
        host = None
    if not host or "%" in host:
        # Not repeated: it may hold what is meant for the page alone.
        raise RemoteProtocolError("url: expected an absolute http or https URL, percent-encoded, its host in ASCII")
    return host


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_WARNINGS: tuple[tuple[str, Callable[[SplitResult], bool]], ...] = (
    (
        "the host is written in Punycode: it may look like another one",
        lambda parts: any(label.startswith("xn--") for label in (parts.hostname or "").split(".")),
    ),
    ("what stands before the @ is no host", lambda parts: "@" in parts.netloc),
    (
        "the page is not encrypted",
        lambda parts: parts.scheme == "http" and parts.hostname not in _LOOPBACK,
    ),
)
