"""Names of FastMCP and the official SDK, and their equivalents in trio_mcp.

docs/from_official_sdk.md and docs/from_fastmcp.md list all equivalents, with those that an error cannot name.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable, Mapping
from typing import Any, Never

__all__ = ["OPTIONS", "WithOtherNames", "option_error"]

_RUN = 'server.run(http="127.0.0.1:3000")'
_SERVE = 'await serve_stdio(server), or await serve_http(server, "127.0.0.1", 3000)'
_RAW = "@server.tool, or server.add_tool(Tool(...), handler) for a schema of your own"
_PROTECT = "server.protect(verify=..., authorization_servers=[...])"
_CHANGED = "server.notify_list_changed({})".format

OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("host", "port"), _RUN),
    **dict.fromkeys(("debug", "log_level"), 'logging.basicConfig(level="DEBUG")'),
    "stateless_http": 'server.run(http="127.0.0.1:3000", sessions=False)',
    "json_response": 'server.run(http="127.0.0.1:3000", json_only=True)',
    "streamable_http_path": 'server.run(http="127.0.0.1:3000", path="/mcp")',
    "mount_path": "a framework that mounts trio_mcp.asgi.AsgiApp(server)",
    **dict.fromkeys(("sse_path", "message_path"), 'server.run(http=..., sse_path="/sse", message_path="/messages")'),
    "transport_security": "server.run(http=..., allowed_hosts=[...], allowed_origins=[...])",
    "tools": "server.tool(function) for each",
    **dict.fromkeys(("auth", "token_verifier", "auth_server_provider"), _PROTECT),
}

_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "Server": {
        "run_async": _SERVE,
        "run_stdio_async": "await serve_stdio(server)",
        **dict.fromkeys(
            ("run_http_async", "run_sse_async", "run_streamable_http_async"),
            'await serve_http(server, "127.0.0.1", 3000)',
        ),
        **dict.fromkeys(("streamable_http_app", "sse_app", "http_app"), "trio_mcp.asgi.AsgiApp(server)"),
        "middleware": 'Server("name", middleware=[log_calls])',
        "custom_route": "a route of the framework that mounts trio_mcp.asgi.AsgiApp(server)",
        "add_middleware": 'Server("name", middleware=[log_calls])',
        "import_server": 'server.mount(other, prefix="notes_")',
        "get_context": "a parameter ctx: Context of the handler",
        "settings": f"options where the server is made or run, such as {_RUN}",
        **dict.fromkeys(("list_tools", "call_tool"), _RAW),
        **dict.fromkeys(("list_resources", "read_resource"), '@server.resource("notes://{name}")'),
        **dict.fromkeys(("list_prompts", "get_prompt"), "@server.prompt"),
        "get_capabilities": "nothing: the server declares its capabilities itself",
        "create_initialization_options": "nothing: serve_stdio(server) takes the server alone",
    },
    "Context": {
        **{level: f'await ctx.log("{level}", "...")' for level in ("debug", "info", "warning", "error")},
        "report_progress": "await ctx.progress(1, 3)",
        "session": "await ctx.sample(...), ctx.elicit(...) or ctx.roots()",
        "list_roots": "await ctx.roots()",
        "request_context": "ctx.lifespan, ctx.meta or ctx.request",
        "lifespan_context": "ctx.lifespan",
        "client_id": "ctx.principal",
        "read_resource": "a call of the function that gives the resource",
        "fastmcp": "the Server itself, which handlers see in their module",
        "mcp_server": "the Server itself, which handlers see in their module",
        **dict.fromkeys(("get_state", "set_state"), "a contextvars.ContextVar"),
        "send_tool_list_changed": 'server.notify_list_changed("tools")',
        "send_resource_updated": "server.notify_resource_updated(uri)",
    },
    "Client": {
        "initialize": "nothing: open_client has done that",
        "close": "await client.aclose()",
        "send_ping": "await client.ping()",
        "send_request": "await client.request(method, params)",
        "set_logging_level": 'await client.set_log_level("info")',
        "call_tool_mcp": "await client.call_tool(name, arguments)",
        **dict.fromkeys(
            ("subscribe_resource", "unsubscribe_resource"), "async with client.listen(resources=[uri]) as changes"
        ),
    },
}


def option_error(owner: str, name: str, known: Iterable[str]) -> TypeError:
    if name in OPTIONS:
        return TypeError(f"{owner} has no option {name!r}; write {OPTIONS[name]}")
    return TypeError(f"{owner} has no option {name!r}; the options are {', '.join(known)}")


class _OtherName:
    """An attribute that the class does not have.  Reading it raises an error with the line to write."""

    __slots__ = ("_equivalent", "_name")

    def __init__(self, name: str, equivalent: str) -> None:
        self._name = name
        self._equivalent = equivalent

    def __get__(self, instance: object, owner: type) -> Never:
        if instance is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")
        raise AttributeError(f"a {owner.__name__} has no {self._name!r}; write {self._equivalent}")


class WithOtherNames(ABCMeta):
    """The metaclass of Server, Context and Client.  The names of other SDKs fail with the equivalent.

    `dir` and `help` do not list these names.  A `__getattr__` would do the same, but it slows each lookup of any
    attribute: a call took 4 % more instructions.  It is an ABCMeta, so that a class may inherit from Server and from an
    abstract class.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        if any(isinstance(base, WithOtherNames) for base in bases):
            return  # a class of a program, which may be called Server too, inherits the names and may define them
        for other, equivalent in _ATTRIBUTES.get(name, {}).items():
            setattr(cls, other, _OtherName(other, equivalent))
        if name in _ATTRIBUTES:
            cls.__dir__ = _names_of  # type: ignore[method-assign, assignment]

    def __dir__(cls) -> list[str]:
        return _without_other_names(cls, type.__dir__(cls))


def _names_of(instance: object) -> list[str]:
    return _without_other_names(type(instance), object.__dir__(instance))


def _without_other_names(owner: type, names: Iterable[str]) -> list[str]:
    members = {name: value for each in reversed(owner.__mro__) for name, value in vars(each).items()}
    return [name for name in names if not isinstance(members.get(name), _OtherName)]
