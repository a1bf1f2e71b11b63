"""Options of functions: shown in signatures, checked by their annotations; and the names that other SDKs have for them.

A function that passes `**options` on shows none of them in `help` and in editors at run time.  `show_options` gives it
the signature that its callers see.  The alternative, the same thirty parameters in each function, was turned down: the
copies would differ after the first change.

`check_options` checks the names and the types of options where they are written once, in a TypedDict.

A program that was written for FastMCP or the official SDK gets errors with the line to write.
docs/from_official_sdk.md and docs/from_fastmcp.md list all equivalents, with those that an error cannot name.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never, TypeVar

from trio_mcp.core.errors import UsageError

__all__ = ["OPTIONS", "WithOtherNames", "check_options", "option_error", "show_options"]

F = TypeVar("F", bound=Callable[..., Any])

# For each type that is checked: its name in messages.  All other annotations are left to the callers.
_EXPECTED = {
    "str": "text",
    "bool": "True or False",
    "Mapping": "a mapping",
    "Callable": "a function",
    "Limits": "a Limits object",
    "CacheHints": "CacheHints",
    "Annotations": "Annotations",
    "ToolAnnotations": "ToolAnnotations",
    "Icon": "an Icon object",
}


class _Unset:
    """The default of an option whose real default is in its documentation."""

    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset()


def show_options(function: F, options: Any) -> F:
    """Replace `**options` in the signature of `function` by the keys of a TypedDict, and return the function."""
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSET, annotation=_source(annotation))
        for name, annotation in options.__annotations__.items()
    ]
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    return function


def check_options(given: Mapping[str, Any], options: Any, owner: str = "") -> None:
    """Check options by the annotations of a TypedDict.

    Raises TypeError for an unknown name, and UsageError for a value that its annotation does not allow.  Checked are
    text, switches, mappings, functions, lists of objects and a few classes, each also with "| None"; the callers check
    bounds and all other types.  `owner` names the object that has the options, for the message.
    """
    annotations = options.__annotations__
    if unknown := given.keys() - annotations.keys():
        raise TypeError(f"unknown option {min(unknown)!r}; the options are {', '.join(annotations)}")
    for name, value in given.items():
        annotation = _source(annotations[name])
        word, _, inside = annotation.removesuffix(" | None").partition("[")
        item = inside.rstrip("]")
        if (value is None and annotation.endswith(" | None")) or _is_a(value, word, item):
            continue
        of, but = (f"the {name} of {owner}", "not") if owner else (name, "got")
        if word == "Sequence":
            raise UsageError(f"{of} must be a list of {item} objects")
        # Only a switch is shown: other values may be secrets.
        got = repr(value) if word == "bool" else type(value).__name__
        raise UsageError(f"{of} must be {_EXPECTED[word]}, {but} {got}")


def _is_a(value: object, word: str, item: str) -> bool:
    """Whether a value is of this type, or the type is not checked.

    Classes are compared by name, because the modules of some take 50 ms to import, and a value of such a class comes
    only from a program that has imported it.
    """
    if word == "Callable":
        return callable(value)
    if word == "Mapping":
        return isinstance(value, Mapping)
    if word == "Sequence" and item[:1].isupper():
        return isinstance(value, Sequence) and all(_is_a(each, item, "") for each in value)
    return word not in _EXPECTED or any(each.__name__ == word for each in type(value).__mro__)


def _source(annotation: Any) -> str:
    """The annotation as it is written: a TypedDict holds it as a ForwardRef."""
    source: str = getattr(annotation, "__forward_arg__", annotation)
    return source


# Names of other SDKs.

_RUN = 'server.run(http="127.0.0.1:3000")'
_SERVE = 'await serve_stdio(server), or await serve_http(server, "127.0.0.1", 3000)'
_RAW = "@server.tool, or server.add_tool(Tool(...), handler) for a schema of your own"
_PROTECT = "server.protect(verify=..., authorization_servers=[...])"

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
