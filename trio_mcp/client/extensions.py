"""Extensions of a client: what it declares, handlers for the server's messages, and wrappers of its own requests.

    ping = ClientExtension("com.example/ping", settings={"loud": True})

    @ping.notification("com.example/changed")
    def changed(name: str) -> None: ...

    async with open_client(target, extensions=[ping]) as client:
        pong = await client.request("com.example/ping", {"target": "moon"}, returns=Pong)

`core.extensions` has the rules: what is declared, and which messages of the server are refused.  Handlers are ordinary
functions; their params and results follow the annotations (`core.schema.params`).

A client loads this module if it gets the option `extensions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import attrs

from trio_mcp.core.errors import (
    INVALID_PARAMS,
    InputUnavailable,
    McpError,
    RemoteProtocolError,
    RequestError,
    UsageError,
    name_of,
)
from trio_mcp.core.extensions import Extension, ExtensionMethod, Extensions
from trio_mcp.core.messages import Json, JsonObject
from trio_mcp.core.revisions import Role, Terms
from trio_mcp.core.rounds import Question
from trio_mcp.core.schema.params import MethodParams, write_object_of
from trio_mcp.transport.workers import contained

if TYPE_CHECKING:
    import trio

    from trio_mcp.client.client import Client
    from trio_mcp.client.session import OnProgress, Timer
    from trio_mcp.core.http.fields import Fields
    from trio_mcp.core.session import Call

__all__ = ["Around", "CallNextRequest", "ClientExtension", "ClientExtensions", "ExtensionCall"]

F = TypeVar("F", bound=Callable[..., Any])


Send: TypeAlias = Callable[..., Awaitable[tuple[JsonObject, JsonObject]]]
"""`Client._send`."""


class CallNextRequest(Protocol):
    """Sends the request of a call, by default with its own params, and returns the result.

    The questions of the server are answered before.  The result is complete, or has a result type of the extension.
    """

    def __call__(self, params: Mapping[str, Json] | None = None, /) -> Awaitable[JsonObject]: ...


@attrs.frozen(eq=False)
class ExtensionCall:
    """A request of the client, for the wrapper of an extension."""

    client: Client
    method: str
    params: JsonObject
    on_progress: OnProgress | None
    """The callback of the caller for progress reports, if there is one."""
    terms: Terms
    """The revision of the session, and what the server declares."""
    _request: Callable[[str, JsonObject], Awaitable[JsonObject]]
    _answer: Callable[[Sequence[Question]], Awaitable[Mapping[str, JsonObject]]]

    async def request(self, method: str, params: Mapping[str, Json] | None = None) -> JsonObject:
        """Send another request, with the headers and within the time limits of this call."""
        return await self._request(method, dict(params or {}))

    async def answer(self, questions: Sequence[Question]) -> Mapping[str, JsonObject]:
        """Ask the callbacks of the program, by the rules for direct questions (xtask-26).  Returns the answers by key.

        Raises `InputUnavailable` if one of them has no answer.
        """
        return await self._answer(questions)


Around: TypeAlias = Callable[[ExtensionCall, CallNextRequest], Awaitable[JsonObject]]


Answering: TypeAlias = (
    "Callable[[trio.Nursery, Call, Callable[[JsonObject], Awaitable[JsonObject]]], Awaitable[JsonObject]]"
)


class ClientExtension:
    """One extension of a client, for the option `extensions`.

    - `id`: its identifier, with a prefix: "com.example/ping"; or an `Extension` of `trio_mcp.core`, and `forms` if it
      differs between revisions.
    - `settings`: an object for the server.
    - `mcp_names`: for methods of the server, the parameter that the HTTP header Mcp-Name repeats.

    Raises `UsageError` for a malformed identifier, or settings that are no object.
    """

    def __init__(
        self,
        id: str | Extension,
        *forms: Extension,
        settings: Mapping[str, Any] | None = None,
        mcp_names: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(id, Extension):
            if settings is not None or mcp_names is not None:
                raise UsageError("an Extension has its own settings and methods; give them there")
            self._values: tuple[Extension, ...] = (id, *forms)
        else:
            sent = [ExtensionMethod(name, Role.CLIENT, mcp_name=each) for name, each in (mcp_names or {}).items()]
            self._values = (Extension(id, {} if settings is None else settings, sent),)
        if len({each.id for each in self._values}) > 1:
            raise UsageError("the forms of one extension have one identifier")
        self._handlers: dict[str, _MessageHandler] = {}
        self._around: dict[str, Around] = {}
        self._answering: dict[str, Answering] = {}

    @property
    def id(self) -> str:
        """The identifier of the extension."""
        return self._values[0].id

    def method(self, name: str) -> Callable[[F], F]:
        """Register a function that answers requests of the server: `@ext.method("com.example/ask")`.

        Its parameters are the params, or one parameter `params` takes all of them.  It returns an object for JSON, such
        as a dataclass or a dict, or None.  It is an `async def`, or a `def` that does not block.

        Servers of 2026-07-28 send no requests.  Raises `UsageError` for a name that is taken.
        """
        return self._register(ExtensionMethod(name, Role.SERVER))

    def notification(self, name: str) -> Callable[[F], F]:
        """Register a plain function for notifications of the server; its parameters are as those of `method`."""
        return self._register(ExtensionMethod(name, Role.SERVER, notification=True))

    def around(self, method: str) -> Callable[[Around], Around]:
        """Register an `async def (call, call_next)` that wraps requests of this method, such as "tools/call".

        It is called if the server declares the extension, and returns the result for the caller.
        """

        def register(wrapper: Around) -> Around:
            if method in self._around:
                raise UsageError(f"{self.id} wraps {method} already")
            self._around[method] = wrapper
            return wrapper

        return register

    def answering(self, method: str) -> Callable[[Answering], Answering]:
        """Register an `async def (nursery, call, ask)` that answers requests of the server of this method.

        `await ask(params)` is the usual answer, by the callback of the program.  The nursery is that of the client.
        """

        def register(wrapper: Answering) -> Answering:
            self._answering[method] = wrapper
            return wrapper

        return register

    def _register(self, row: ExtensionMethod) -> Callable[[F], F]:
        def register(function: F) -> F:
            if row.name in self._handlers:
                raise UsageError(f"{self.id} has a handler for {row.name} already")
            self._handlers[row.name] = _MessageHandler(row, function)
            return function

        return register

    def declared_in(self, terms: Terms) -> bool:
        """Whether the server declares the extension."""
        return any(each.declared_in(terms) for each in self._values)

    def values(self) -> list[Extension]:
        """Return its forms with the methods that were registered."""
        listed = {method.name for each in self._values for method in each.methods}
        added = [each.row for each in self._handlers.values() if each.row.name not in listed]
        return [attrs.evolve(each, methods=(*filter(self._is_known, each.methods), *added)) for each in self._values]

    def _is_known(self, row: ExtensionMethod) -> bool:
        """Whether a method is sent, or has a handler: others would be accepted, and then be unknown."""
        return row.sender is Role.CLIENT or row.name in self._handlers


class _MessageHandler:
    """A function of the program for a request or a notification of the server."""

    def __init__(self, row: ExtensionMethod, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise UsageError(f"a handler must be a function, got {type(function).__name__}")
        if row.notification and inspect.iscoroutinefunction(function):
            raise UsageError(f"{name_of(function)} must be a plain function: notifications are heard in their order")
        self.row = row
        self._function = function
        self._params = MethodParams(function)

    async def answer(self, params: JsonObject) -> JsonObject:
        try:
            given = self._params.read(params)
        except RemoteProtocolError as error:
            raise RequestError(INVALID_PARAMS, f"{self.row.name}: {error}") from None

        value = await contained(name_of(self._function), self._function, **given)
        return write_object_of(value, f"the result of {self.row.name}")

    def hear(self, params: JsonObject) -> None:
        """Call the function.  Raises `RemoteProtocolError` for params that do not fit."""
        self._function(**self._params.read(params))


class ClientExtensions:
    """The extensions of one client.  Raises `UsageError` for two with one identifier, or one method."""

    def __init__(self, given: object, *added: ClientExtension, fallback: bool) -> None:
        if isinstance(given, Mapping):
            given = [ClientExtension(id, settings=settings) for id, settings in given.items()]
        if not isinstance(given, Sequence) or not all(isinstance(each, ClientExtension) for each in given):
            raise UsageError("extensions must be a list of ClientExtension, or a mapping from identifiers to settings")
        self._extensions: Sequence[ClientExtension] = (*given, *added)
        given = self._extensions
        self.tasks: Any = added[0] if added else None
        """The extension that the option `tasks` has added."""
        self.offered = Extensions([value for each in given for value in each.values()], fallback=fallback)
        self._handlers = {name: handler for each in given for name, handler in each._handlers.items()}
        self.answering = {name: wrapper for each in given for name, wrapper in each._answering.items()}
        """The wrappers of the answers to requests of the server, by method."""
        self.wrapped = frozenset(name for each in given for name in each._around)
        """The methods that have a wrapper."""

    def handler(self, method: str, *, notification: bool) -> _MessageHandler | None:
        """Return the handler for a message of the server, or None."""
        found = self._handlers.get(method)
        return found if found is not None and found.row.notification is notification else None

    def around(self, method: str, terms: Terms) -> list[Around]:
        """Return the wrappers of a method that the server agrees to, the outermost first."""
        return [each._around[method] for each in self._extensions if method in each._around and each.declared_in(terms)]

    def sending(self, client: Client, send: Send) -> Send:
        """Return `send` of a client, wrapped by the extensions."""

        async def send_around(
            method: str,
            params: JsonObject,
            on_progress: OnProgress | None,
            headers: Mapping[str, str] | None,
            timer: Timer | None,
            fields: Fields | None = None,
            *,
            refresh_tools: bool = False,
        ) -> tuple[JsonObject, JsonObject]:
            wrappers: Sequence[Around] = ()
            if method in self.wrapped:
                terms = (await client._connection.session()).terms
                wrappers = self.around(method, terms)
            if not wrappers:
                return await send(method, params, on_progress, headers, timer, fields, refresh_tools=refresh_tools)

            async def request(other: str, given: JsonObject) -> JsonObject:
                result, _ = await send(other, client._with_meta(given, None), None, headers, timer)
                return result

            async def answer(questions: Sequence[Question]) -> Mapping[str, JsonObject]:
                def abandon(key: str, why: str) -> McpError:
                    return InputUnavailable(method, key, why)

                ask = partial(client._answering.answer_all, questions, terms, abandon)
                return await (ask() if timer is None else timer.run(method, ask, request=False))

            async def send_now(given: JsonObject) -> JsonObject:
                result, _ = await send(method, given, on_progress, headers, timer, refresh_tools=refresh_tools)
                return result

            call = ExtensionCall(client, method, params, on_progress, terms, request, answer)
            sending: _SendParams = send_now
            for wrapper in reversed(wrappers):
                sending = _wrapped(wrapper, call, sending)
            return await sending(params), params

        return send_around


_SendParams: TypeAlias = Callable[[JsonObject], Coroutine[Any, Any, JsonObject]]


def _wrapped(wrapper: Around, call: ExtensionCall, send: _SendParams) -> _SendParams:
    async def send_wrapped(params: JsonObject) -> JsonObject:
        def call_next(given: Mapping[str, Json] | None = None, /) -> Awaitable[JsonObject]:
            return send(params if given is None else dict(given))

        result = await wrapper(attrs.evolve(call, params=params), call_next)
        if not isinstance(result, dict):
            raise UsageError(f"the wrapper of {call.method} must return a result, got {type(result).__name__}")
        return result

    return send_wrapped
