"""Usual mistakes of beginners: each raises an error of one line that tells the correct code."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import trio

import trio_mcp
import trio_mcp.errors
from tests.http.scripted_server import D, E
from trio_mcp import Client, Context, Server, UsageError, open_client
from trio_mcp.core import Request
from trio_mcp.types import Tool

PYTHON = sys.executable


async def notes(text: str) -> str:
    return text


async def log_calls(ctx: Any, request: Any, call_next: Any) -> Any:
    return await call_next()


class OtherSdk:
    class Context:
        __module__ = "mcp.server.fastmcp.server"


def context_without_hint(text: str, context) -> str:  # type: ignore[no-untyped-def]
    return text


def context_of_another_package(text: str, ctx: OtherSdk.Context) -> str:
    return text


class Notes:
    def __init__(self) -> None:
        self.server = Server("notes")


def refuse_to_run() -> Any:
    raise AssertionError("the server must not run")


SERVER: dict[str, tuple[Callable[[Server], object], str]] = {
    "mount a name": (
        lambda server: server.mount("x"),  # type: ignore[arg-type]
        'mount takes a Server, got str; write server.mount(other, prefix="notes_")',
    ),
    "mount nothing": (
        lambda server: server.mount(None),  # type: ignore[arg-type]
        'mount takes a Server, got NoneType; write server.mount(other, prefix="notes_")',
    ),
    "mount a class": (
        lambda server: server.mount(Server),  # type: ignore[arg-type]
        'mount takes a Server, got the class Server; write server.mount(other, prefix="notes_")',
    ),
    "mount with a prefix first": (
        lambda server: server.mount("notes", Server("x")),  # type: ignore[arg-type]
        'mount takes one Server, and the prefix by name; write server.mount(other, prefix="notes_")',
    ),
    "mount with a prefix by position": (
        lambda server: server.mount(Server("x"), "notes"),  # type: ignore[arg-type]
        'mount takes one Server, and the prefix by name; write server.mount(other, prefix="notes_")',
    ),
    "middleware as a decorator": (
        lambda server: server.middleware(log_calls),  # type: ignore[attr-defined]
        "a Server has no 'middleware'; write Server(\"name\", middleware=[log_calls])",
    ),
    "middleware that is no list": (
        lambda server: Server("x", middleware=log_calls),  # type: ignore[arg-type]
        "middleware must be a list of async def (ctx, request, call_next), got a function",
    ),
    "add_middleware": (
        lambda server: server.add_middleware(log_calls),  # type: ignore[attr-defined]
        "a Server has no 'add_middleware'; write Server(\"name\", middleware=[log_calls])",
    ),
    "add_tool with a function": (
        lambda server: server.add_tool(notes),  # type: ignore[arg-type]
        "add_tool takes a Tool and a handler, got a function; write server.tool(notes)",
    ),
    "add_tool with a function and a name": (
        lambda server: server.add_tool(notes, name="x"),  # type: ignore[arg-type]
        "add_tool takes a Tool and a handler, got a function; write server.tool(notes)",
    ),
    "add_tool without a handler": (
        lambda server: server.add_tool(Tool("notes", {"type": "object"})),
        "add_tool needs a handler; write server.add_tool(Tool(...), handler), with async def handler(ctx, arguments)",
    ),
    "add_prompt with a function": (
        lambda server: server.add_prompt(notes),  # type: ignore[arg-type]
        "add_prompt takes a Prompt and a handler, got a function; write server.prompt(notes)",
    ),
    "add_resource with a function": (
        lambda server: server.add_resource(notes),  # type: ignore[arg-type]
        'add_resource takes a Resource and a handler, got a function; write server.resource("notes://today")(notes)',
    ),
    "add_template without a handler": (
        lambda server: server.add_template(trio_mcp.types.ResourceTemplate("x", "x://{name}")),
        "add_template needs a handler; write server.add_template(ResourceTemplate(...), handler), "
        "with async def handler(ctx, uri, variables)",
    ),
    "a tool that is a class": (lambda server: server.tool()(Notes), "Notes is a class, and a call of it would only"),
    "a tool by its name": (
        lambda server: server.tool("notes"),  # type: ignore[call-overload]
        "a decorator takes a function, got 'notes'; give options by name: @server.tool(name='notes')",
    ),
    "a prompt by its name": (
        lambda server: server.prompt("notes"),  # type: ignore[call-overload]
        "a decorator takes a function, got 'notes'; give options by name: @server.prompt(name='notes')",
    ),
    "a resource without a URI": (
        lambda server: server.resource(notes),  # type: ignore[call-overload]
        'a resource needs a URI; write @server.resource("notes://{name}")',
    ),
    "a resource without anything": (
        lambda server: server.resource(),  # type: ignore[call-overload]
        'a resource needs a URI; write @server.resource("notes://{name}")',
    ),
    "a Context without a hint": (
        lambda server: server.tool(context_without_hint),
        "parameter 'context' of context_without_hint has no type, so it would be an argument of clients; "
        "write context: Context for the Context of the call, or the type of the argument",
    ),
    "a Context of another package": (
        lambda server: server.tool(context_of_another_package),
        "parameter 'ctx' of context_of_another_package is a Context of mcp.server.fastmcp.server; "
        "write from trio_mcp import Context",
    ),
    "instructions by position": (
        lambda server: Server("x", "Take notes."),  # type: ignore[arg-type]
        'Server takes only the name by position; give options by name, as in Server("x", instructions="...")',
    ),
    "host and port of a server": (
        lambda server: Server("x", host="0.0.0.0", port=8000),  # type: ignore[arg-type]
        "Server has no option 'host'; write server.run(http=\"127.0.0.1:3000\")",
    ),
    "the log level of a server": (
        lambda server: Server("x", log_level="DEBUG"),  # type: ignore[arg-type]
        "Server has no option 'log_level'; write logging.basicConfig(level=\"DEBUG\")",
    ),
    "tools of a server": (
        lambda server: Server("x", tools=[notes]),  # type: ignore[arg-type]
        "Server has no option 'tools'; write server.tool(function) for each",
    ),
    "an option that nobody has": (
        lambda server: Server("x", colour="red"),  # type: ignore[arg-type]
        "Server has no option 'colour'; the options are version, title, description, ",
    ),
    "host and port of a run": (
        lambda server: server.run(host="0.0.0.0", port=8000),  # type: ignore[call-arg]
        "run has no option 'host'; write server.run(http=\"127.0.0.1:3000\")",
    ),
    "a name of the official SDK for an option of a run": (
        lambda server: server.run(http="127.0.0.1:0", stateless_http=True),  # type: ignore[call-arg]
        "run has no option 'stateless_http'; write server.run(http=\"127.0.0.1:3000\", sessions=False)",
    ),
    "a transport by its name": (
        lambda server: server.run(transport="stdio"),  # type: ignore[call-arg]
        'run() takes no transport name: run() serves stdio, run(http="127.0.0.1:3000") serves HTTP',
    ),
    "run_async": (
        lambda server: server.run_async(),  # type: ignore[attr-defined]
        "a Server has no 'run_async'; write await serve_stdio(server), or await serve_http(server, ",
    ),
    "streamable_http_app": (
        lambda server: server.streamable_http_app(),  # type: ignore[attr-defined]
        "a Server has no 'streamable_http_app'; write trio_mcp.asgi.AsgiApp(server)",
    ),
    "an attribute that nobody has": (
        lambda server: server.tols,  # type: ignore[attr-defined]
        "'Server' object has no attribute 'tols'",
    ),
    "a message on the context": (
        lambda server: Context.info,  # type: ignore[attr-defined]
        "type object 'Context' has no attribute 'info'",
    ),
}


@pytest.mark.parametrize("mistake", SERVER)
def test_the_error_about_a_mistake_with_a_server_has_the_correct_code(mistake: str) -> None:
    make, message = SERVER[mistake]
    with pytest.raises((UsageError, TypeError, AttributeError)) as raised:
        make(Server("mine"))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("info", 'await ctx.log("info", "...")'),
        ("report_progress", "await ctx.progress(1, 3)"),
        ("session", "await ctx.sample(...), ctx.elicit(...) or ctx.roots()"),
    ],
)
async def test_the_error_about_an_unknown_attribute_of_a_context_has_the_code(name: str, write: str) -> None:
    server, expected_error = Server("mine"), []

    @server.tool
    async def act(ctx: Context) -> None:
        with pytest.raises(AttributeError) as raised:
            getattr(ctx, name)
        expected_error.append(str(raised.value))

    async with open_client(server) as client:
        await client.call_tool("act")
    assert expected_error == [f"a Context has no {name!r}; write {write}"]


def test_the_name_of_another_sdk_is_not_an_attribute() -> None:
    class Settled(Server):
        settings = "mine"

    assert Settled("mine").settings == "mine"
    server = Server("mine")
    assert "settings" not in dir(server)
    assert "settings" not in dir(Server)
    assert not hasattr(server, "settings")
    server.settings = "mine"  # type: ignore[attr-defined]
    assert server.settings == "mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"timeout": 5}])
def test_creating_a_client_by_its_class_is_refused_with_the_function(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^create a Client with open_client: async with open_client"):
        Client("server.py", **options)


@pytest.mark.parametrize(
    ("name", "expected_error"),
    [
        ("subscribe_resource",
         "a Client has no 'subscribe_resource'; write async with client.listen(resources=[uri]) as changes"),
        ("no_such", "'Client' object has no attribute 'no_such'"),
    ],
)  # fmt: skip
async def test_the_error_about_an_unknown_attribute_of_a_client_has_the_code(name: str, expected_error: str) -> None:
    async with open_client(Server("mine")) as client:
        with pytest.raises(AttributeError) as raised:
            getattr(client, name)
    assert str(raised.value) == expected_error


def test_the_error_about_fastmcp_names_the_class_server() -> None:
    with pytest.raises(AttributeError, match=r"^trio_mcp has no 'FastMCP'; write from trio_mcp import Server$"):
        trio_mcp.FastMCP  # noqa: B018


# Middleware.


@pytest.mark.parametrize("revision", [D, E])
async def test_call_next_passes_the_same_request_on(revision: str) -> None:
    seen = []

    async def outer(ctx: Context, request: Request, call_next: Any) -> Any:
        seen.append(request.params["arguments"]["text"])
        arguments = {"text": request.params["arguments"]["text"].upper()}
        return await call_next(Request(request.id, request.method, {**request.params, "arguments": arguments}))

    async def inner(ctx: Context, request: Request, call_next: Any) -> Any:
        seen.append(request.params["arguments"]["text"])
        return await call_next()

    server = Server("mine", middleware=[outer, inner])
    server.tool(notes)
    async with open_client(server, revision=revision) as client:
        assert await client.call_tool("notes", {"text": "a"}, returns=str) == "A"
    assert seen == ["a", "A"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda ctx, call_next: call_next(ctx), "call_next takes a Request, got Context; write await call_next()"),
        (
            lambda ctx, call_next: call_next,
            "a middleware must return a result, got partial; write return await call_next()",
        ),
        (
            lambda ctx, call_next: call_next(),
            "a middleware must return a result, got coroutine; write return await call_next()",
        ),
    ],
)
async def test_the_error_about_a_middleware_without_a_result_has_the_code(
    given: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def wrong(ctx: Context, request: Request, call_next: Any) -> Any:
        return given(ctx, call_next)

    server = Server("mine", middleware=[wrong])
    server.tool(notes)
    async with open_client(server) as client:
        assert (await client.call_tool("notes", {"text": "a"})).is_error
    assert message in caplog.text


# Event loops.


def test_run_in_a_running_loop_of_asyncio_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        Server("mine").run()

    monkeypatch.setattr(trio, "run", refuse_to_run)
    with pytest.raises(UsageError, match=r"an asyncio event loop runs in this thread; call server\.run"):
        asyncio.run(main())


async def test_run_in_trio_is_refused() -> None:
    with pytest.raises(UsageError, match="here, await serve_stdio"):
        Server("mine").run()


# Targets.

EXPECTED = 'a target must be a URL, a command such as ["python", "server.py"], a Server or a stream'


async def main() -> None: ...


def make_server() -> Server:
    return Server("mine")


TARGETS: dict[str, tuple[Any, str]] = {
    "an empty command": ([], f"{EXPECTED}; got an empty list"),
    "an empty string": ("", f"{EXPECTED}; got an empty string"),
    "a command in a string": (
        "python server.py",
        "a URL must begin with http://, https://, ws:// or wss://; "
        'a command must be a list of words: ["python", "server.py"]',
    ),
    "a file": ("server.py", "a URL must begin with http://, https://, ws:// or wss://; a command must be a list"),
    "an address": ("localhost:3000", "a URL must begin with http://, https://, ws:// or wss://; a command"),
    "a path": (pathlib.Path("server.py"), f'{EXPECTED}; got a path; write ["python", path]'),
    "a coroutine function": (main, f"{EXPECTED}; got the function main; pass the Server that it returns"),
    "a function": (make_server, f"{EXPECTED}; got the function make_server; pass the Server that it returns"),
    "a class": (Server, f"{EXPECTED}; got the class Server; pass an object of it"),
    "a module": (json, f"{EXPECTED}; got the module json; pass its Server, such as json.server"),
    "a configuration": (
        {"command": "python", "args": ["server.py"], "env": {"TOKEN": "secret"}},
        f"{EXPECTED}; got a dict; for an entry of a configuration, write open_client([command, *args], env=env)",
    ),
    "None": (None, f"{EXPECTED}; got NoneType"),
    "a list in a list": ([["python", "server.py"]], f"{EXPECTED}; got a list of list"),
    "a number": (["python", 3], f"{EXPECTED}; got a list of 'python' and int"),
}


@pytest.mark.parametrize("target", TARGETS)
def test_the_error_about_an_invalid_target_has_the_correct_form(target: str) -> None:
    given, message = TARGETS[target]
    with pytest.raises(UsageError) as raised:
        open_client(given)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_coroutine_as_a_target_is_refused_with_the_advice_to_await_it() -> None:
    coroutine = main()
    with pytest.raises(UsageError, match=re.escape(f"{EXPECTED}; got a coroutine; await it first")):
        open_client(coroutine)  # type: ignore[arg-type]
    coroutine.close()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such server.py"], "there is no command 'no-such ...' in "),
        (["no-such-program"], "there is no command 'no-such-program' in "),
        (["./notes"], "'./notes' cannot be started in {}: it is a directory; name a program in it"),
        (
            ["./plain.py"],
            "'./plain.py' cannot be started in {}: it is not executable; name the program that runs it: "
            '["python", "server.py"]',
        ),
        (
            ["./mute.py"],
            "'./mute.py' cannot be started in {}: it has no first line that names an interpreter; name the program "
            'that runs it: ["python", "server.py"]',
        ),
    ],
)
async def test_the_error_about_a_command_that_cannot_start_has_the_reason(
    command: list[str], message: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "plain.py").write_text("1")
    (tmp_path / "mute.py").write_text("1")
    (tmp_path / "mute.py").chmod(0o755)
    with pytest.raises(trio_mcp.errors.ConnectionFailed) as raised:
        async with open_client(command, cwd=tmp_path):
            pass
    assert str(raised.value).startswith(message.format(repr(str(tmp_path))))
