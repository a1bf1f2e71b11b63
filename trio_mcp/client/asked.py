"""Requests of the server, as the callbacks of a client get them: to sample a model, to fill in a form, to open a page.

Each request has the name of the server that asks (elic-04).  The server chooses this name itself: show it, but do not
trust it.  The texts of the server may be private, so no repr shows them (samp-10).

A request is checked before a callback gets it.  A request that breaks the rules raises `RemoteProtocolError`, and no
callback is called.  The values that a callback returns for a form are checked against the form, too.  The `UsageError`
names the field that does not fit, never its value.
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
from trio_mcp.core.messages import Json, JsonObject
from trio_mcp.core.schema.validation import CompiledSchema, compile_schema

__all__ = ["AnswerForm", "FormElicitationRequest", "SamplingRequest", "UrlElicitationRequest", "host_of"]


@attrs.frozen(eq=False)
class SamplingRequest:
    """The server asks the model of the client.

    `params` has the messages and all options of the server.  The answer must not exceed `max_tokens` and must obey
    `tool_choice`; the other options are advice.
    """

    params: models.CreateMessageParams = attrs.field(repr=False)
    server: models.Implementation | None

    def pick_model(self, available: Iterable[str]) -> str | None:
        """Return the model of `available` that the server prefers, or None if no hint matches.

        A hint is a part of a model's name; case does not matter.  If several models match a hint, the first is
        returned.
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

    `defaults` are the values to show first.  If the callback leaves a field out, its default is sent.
    """

    params: forms.ElicitFormParams = attrs.field(repr=False)
    server: models.Implementation | None
    defaults: Mapping[str, forms.ElicitValue] = attrs.field(repr=False)

    @property
    def message(self) -> str:
        """The question, and the reason for it."""
        return self.params.message

    @property
    def fields(self) -> Mapping[str, forms.FieldSchema | MalformedContent]:
        """The fields by name.  A field that the protocol does not allow in a form is a `MalformedContent`: its `raw` is
        a JSON Schema.
        """
        return self.params.requested_schema.properties


@attrs.frozen(eq=False)
class UrlElicitationRequest:
    """The server asks the user to open a web page.

    Show the whole `url`, `host` and `warnings`, and open the page only if the user agrees, in the user's own browser.
    `url` is exactly what the server sent.  It has only ASCII characters, so it cannot contain invisible or look-alike
    characters.
    """

    params: forms.ElicitUrlParams = attrs.field(repr=False)
    server: models.Implementation | None
    host: str

    @property
    def message(self) -> str:
        """The reason to open the page."""
        return self.params.message

    @property
    def url(self) -> str:
        return self.params.url

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the URL to show before the user agrees."""
        parts = urlsplit(self.url)
        return tuple(warning for warning, applies in _WARNINGS if applies(parts))


# Forms


class AnswerForm:
    """The schema of a form.  It checks the values of the user.

    Raises `RemoteProtocolError` if the schema is invalid or takes too much work to check.
    """

    __slots__ = ("_check", "_names", "defaults")

    def __init__(self, schema: JsonObject) -> None:
        properties = schema["properties"]
        try:
            self._check = compile_schema(schema)
            one_field = compile_schema({key: each for key, each in schema.items() if key != "required"})
        except UsageError as error:  # it blames this side, but the schema is the server's
            raise RemoteProtocolError(f"requestedSchema: {error}") from None
        self._names = tuple(properties)
        self.defaults = _defaults(properties, one_field)

    def fill_in(self, values: Mapping[str, Any]) -> dict[str, forms.ElicitValue]:
        """Return the content of the answer (elic-44): the values, with defaults for the missing fields."""
        for name in values:
            if name not in self._names:
                raise UsageError(f"the form has no field {shown(name)}; its fields are {shown(self._names)}")
        given = {**self.defaults, **values}
        content = {name: _plain(name, value) for name, value in given.items() if value is not None}
        if problems := self._check.errors(content):
            why = "; ".join(f"content{each.path} {each.message}" for each in problems)
            raise UsageError(f"the values of the elicitation callback do not fit the form: {why}")
        return content


def _defaults(properties: Mapping[str, Json], schema: CompiledSchema) -> dict[str, forms.ElicitValue]:
    """Return the valid defaults.  A default that does not fit the schema of its own field is ignored."""
    defaults = {name: each.get("default") for name, each in properties.items() if isinstance(each, dict)}
    plain = {name: value for name, value in defaults.items() if _is_plain(value)}
    if not schema.can_check(plain):  # the check of each is cheap, but the check of all together may not be
        return {}
    return {name: value for name, value in plain.items() if not schema.errors({name: value})}


def _is_plain(value: object) -> TypeGuard[forms.ElicitValue]:
    if isinstance(value, list | tuple):
        return all(type(each) is str for each in value)
    return type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _plain(name: str, value: Any) -> forms.ElicitValue:
    if not _is_plain(value):
        expected = "a str, a finite number, a bool or a list of str"
        raise UsageError(f"the form field {shown(name)} must be {expected}, got {type(value).__name__}")
    return list(value) if isinstance(value, tuple) else value


# Pages

# Only the characters of RFC 3986.  Programs disagree about others: one drops a backslash or a tab, another reads it as
# a slash.
_URL = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")


def host_of(url: str) -> str:
    """Return the host of a URL.  Raises `RemoteProtocolError` unless all browsers read the same host from it."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if _URL.fullmatch(url) and parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # an unclosed bracket, or a port that is not a number
        host = None
    if not host or "%" in host:
        # The URL is not shown: it may contain secrets for the page.
        raise RemoteProtocolError("url: expected an absolute http or https URL, percent-encoded, its host in ASCII")
    return host


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_WARNINGS: tuple[tuple[str, Callable[[SplitResult], bool]], ...] = (
    (
        "the host is written in Punycode: it may look like another one",
        lambda parts: any(label.startswith("xn--") for label in (parts.hostname or "").split(".")),
    ),
    ("the text before the @ is not the host", lambda parts: "@" in parts.netloc),
    (
        "the page is not encrypted",
        lambda parts: parts.scheme == "http" and parts.hostname not in _LOOPBACK,
    ),
)
