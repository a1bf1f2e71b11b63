"""The parts of a server that users write: public names, decorators, options, and types for type checkers."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trio_mcp
from tests.requirements import req
from tests.server.raw_client import REVISION_NAMES, ErrorResponse, connected, every_revision
from trio_mcp import CacheHints, Context, Limits, RequestError, Server, UsageError
from trio_mcp.types import Icon, Prompt, Resource, ResourceTemplate, Tool

PACKAGE = Path(trio_mcp.__file__).parent
Object = dict[str, Any]

# Methods that need no docstring, because their names are enough.
_CLEAR = {"remove_tool", "remove_prompt", "remove_resource", "remove_template", "method", "request_id"}
# Methods for other modules of the package, which therefore have no underscore.
_INTERNAL = {"detach", "attach", "cancel", "cancelled", "opened"}


@pytest.mark.parametrize("owner", [Server, Context], ids=lambda owner: owner.__name__)
def test_public_methods_have_a_docstring(owner: type) -> None:
    public = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    said = {name for name, value in public.items() if callable(value) or isinstance(value, property)}
    assert {name for name in said if not inspect.getdoc(getattr(owner, name))} <= _CLEAR | _INTERNAL


# The decorators.


def hello(text: str = "you") -> str:
    """Says hello."""
    return f"hello {text}"


async def ahello(text: str = "you") -> str:
    """Says hello."""
    return f"hello {text}"


class Greeter:
    """Says hello."""

    __name__ = "greeter"

    def hello(self, text: str = "you") -> str:
        """Says hello."""
        return f"hello {text}"

    def __call__(self, text: str = "you") -> str:
        return f"hello {text}"


FUNCTIONS: list[Callable[..., Any]] = [
    hello,
    ahello,
    Greeter().hello,
    Greeter(),
    functools.partial(hello),
    lambda text="you": f"hello {text}",
]
FORMS: dict[str, tuple[Callable[[Server, Any], Any], str, Object]] = {
    # The registration, and the request that reaches it.
    "tool": (lambda server, function: server.tool(function), "tools/call", {}),
    "tool()": (lambda server, function: server.tool()(function), "tools/call", {}),
    "tool(name)": (lambda server, function: server.tool(name="other")(function), "tools/call", {"name": "other"}),
    "prompt": (lambda server, function: server.prompt(function), "prompts/get", {}),
    "prompt()": (lambda server, function: server.prompt()(function), "prompts/get", {}),
    "prompt(name)": (lambda server, function: server.prompt(name="other")(function), "prompts/get", {"name": "other"}),
    "resource(template)": (
        lambda server, function: server.resource("h://{text}", name="h")(function),
        "resources/read",
        {"uri": "h://you"},
    ),
}


def text_of(result: Object) -> str:
    """The one text in a result of any method."""
    ((value,),) = (value for value in result.values() if isinstance(value, list))
    text: str = value.get("content", value)["text"] if isinstance(value.get("content", value), dict) else value["text"]
    return text


@every_revision
@pytest.mark.parametrize("form", FORMS)
async def test_each_form_of_a_decorator_registers_and_returns_the_function(
    form: str, revision: str, autojump_clock: MockClock
) -> None:
    register, method, params = FORMS[form]
    for function in FUNCTIONS if form not in ("tool", "tool()") else FUNCTIONS[:-1]:  # "<lambda>" names no tool
        server = Server("decorated")
        assert register(server, function) is function
        async with connected(server, revision) as wire:
            lists = await wire.call(method.split("/")[0] + ("/templates" if "uri" in params else "") + "/list")
            ((item,),) = (value for value in lists.values() if isinstance(value, list))
            assert text_of(await wire.call(method, params or {"name": item["name"]})) == "hello you"


COMPLETIONS: dict[str, tuple[Callable[[Server, Any], Any], set[str]]] = {
    # The registration, and the arguments of the prompt that it completes.
    "completion": (lambda server, function: server.completion(function), {"one", "two"}),
    "completion()": (lambda server, function: server.completion()(function), {"one", "two"}),
    "completion(ref)": (lambda server, function: server.completion("prompt")(function), {"one", "two"}),
    "completion(ref, argument)": (lambda server, function: server.completion("prompt", "two")(function), {"two"}),
    "completion(argument)": (lambda server, function: server.completion(argument="one")(function), {"one"}),
}


@every_revision
@pytest.mark.parametrize("form", COMPLETIONS)
async def test_each_form_of_completion_completes_its_arguments(
    form: str, revision: str, autojump_clock: MockClock
) -> None:
    register, completed = COMPLETIONS[form]
    server = Server("completing")
    server.prompt(name="prompt")(lambda one, two: "")

    async def function(value: str) -> list[str]:
        return [value * 2]

    assert register(server, function) is function
    async with connected(server, revision) as wire:
        for argument in ("one", "two"):
            params = {"ref": {"type": "ref/prompt", "name": "prompt"}, "argument": {"name": argument, "value": "a"}}
            values = (await wire.call("completion/complete", params))["completion"]["values"]
            assert values == (["aa"] if argument in completed else [])


@every_revision
async def test_added_entries_can_be_removed_and_added_again(revision: str, autojump_clock: MockClock) -> None:
    server = Server("by hand")

    def add() -> None:
        server.add_tool(Tool("tool", {"type": "object"}), lambda ctx, arguments: "tool")
        server.add_prompt(Prompt("prompt"), lambda ctx, arguments: "prompt")
        server.add_resource(Resource("resource", "r://one"), lambda ctx, uri: "resource", cache=CacheHints(1))
        server.add_template(ResourceTemplate("template", "t://{x}"), lambda ctx, uri, found: f"{uri} {found['x']}")

    calls = [
        ("tools/call", {"name": "tool"}, "tool"),
        ("prompts/get", {"name": "prompt"}, "prompt"),
        ("resources/read", {"uri": "r://one"}, "resource"),
        ("resources/read", {"uri": "t://one"}, "t://one one"),
    ]
    add()
    async with connected(server, revision) as wire:
        for _ in range(2):
            for method, params, text in calls:
                assert text_of(await wire.call(method, params)) == text
            server.remove_tool("tool")
            server.remove_prompt("prompt")
            server.remove_resource("r://one")
            server.remove_template("t://{x}")
            for method, params, _ in calls:
                with pytest.raises(ErrorResponse):
                    await wire.call(method, params)
            add()
    with pytest.raises(UsageError, match="exists already"):
        add()


# Options of a server.


class Wrong:
    """An object of an unexpected type."""


MISTAKES: list[tuple[Object, str]] = [
    ({"name": 3}, "the name of a server must be text, got int"),
    ({"version": 1.0}, "the version of a server must be text, got float"),
    ({"version": None}, "info must have a name and a version"),
    ({"title": b"x"}, "the title of a server must be text, got bytes"),
    ({"description": ["x"]}, "the description of a server must be text, got list"),
    ({"website_url": Wrong()}, "the websiteUrl of a server must be text, got Wrong"),
    ({"instructions": 3}, "the instructions of a server must be text, got int"),
    ({"instructions": "\ud800"}, "half a surrogate pair"),
    ({"icons": ["icon.png"]}, "the icons of a server must be a list of Icon objects"),
    ({"icons": Icon("https://example.com/icon.png")}, "the icons of a server must be a list of Icon objects"),
    ({"cache": 60}, "cache must be a mapping, got int"),
    ({"experimental": ["voice"]}, "experimental must be a mapping, got list"),
    ({"capabilities": None}, "capabilities must be a list of names, got NoneType"),
    ({"capabilities": [["tools"]]}, "unknown capability ['tools']; the capabilities are tools"),
    ({"revisions": 2025}, "revisions must be a list of names, got int"),
    ({"page_size": 0}, "page_size must be a number of items, 1 or more, or None for one page, got 0"),
    ({"page_size": True}, "got True"),
    ({"page_size": "10"}, "got '10'"),
    ({"change_debounce": -0.1}, "change_debounce must be a number of seconds, 0 or more, got -0.1"),
    ({"change_debounce": float("inf")}, "got inf"),
    ({"change_debounce": float("nan")}, "got nan"),
    ({"change_debounce": None}, "got None"),
    ({"threads": 0}, "threads must be a number of threads, 1 or more, got 0"),
    ({"threads": 1.5}, "got 1.5"),
    ({"middleware": print}, "middleware must be a list of async def"),
    ({"middleware": ["log"]}, "middleware must be a list of async def"),
    (
        {"middleware": [lambda ctx, call_next: None]},
        "middleware is called with (ctx, request, call_next), but <lambda> has other parameters",
    ),
    ({"lifespan": lambda: None}, "lifespan is called with (server), but <lambda> has other parameters: too many"),
    ({"filter": lambda principal: True}, "filter is called with (principal, item), but <lambda> has other parameters"),
    ({"filter": "tools"}, "filter must be a function, got str"),
    ({"lifespan": Wrong()}, "lifespan must be a function, got Wrong"),
    (
        {"capabilities": ["tool"]},
        "unknown capability 'tool'; the capabilities are tools, prompts, resources, completions",
    ),
    ({"cache": {"tools/call": CacheHints()}}, "cache: unknown list 'tools/call'; the lists are tools/list,"),
    ({"cache": {"tools/list": 60}}, "the hints for tools/list must be CacheHints, not int"),
    ({"revisions": []}, "revisions must have at least one revision"),
    ({"revisions": ["2024-11-05", "latest"]}, "unknown revision 'latest'; the revisions are 2024-11-05, 2025-03-26"),
    ({"revisions": "2024-11-05"}, "revisions must be a list, also of one name: revisions=['2024-11-05']"),
    ({"capabilities": "tools"}, "capabilities must be a list, also of one name: capabilities=['tools']"),
]


@pytest.mark.parametrize(("options", "why"), MISTAKES, ids=range(len(MISTAKES)))
def test_an_invalid_option_of_a_server_is_refused_at_once(options: Object, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        Server(**{"name": "mistaken", **options})
    assert why in str(caught.value)


@pytest.mark.parametrize("keys", [[], [b"short"], b"x" * 32, ["x" * 32], 7])
def test_an_invalid_sealing_key_is_refused_at_once(keys: Any) -> None:
    with pytest.raises(UsageError, match="sealing needs a sequence of keys"):
        Server("sealed", state_keys=keys)


def test_an_async_filter_is_refused_at_once() -> None:
    """It would return a coroutine, which is true in a condition."""

    async def never(principal: Any, item: Any) -> bool:
        return False

    class Never:
        async def __call__(self, principal: Any, item: Any) -> bool:
            return False

    for filter in (never, Never()):
        with pytest.raises(UsageError, match="filter must be a plain function"):
            Server("filtered", filter=filter)  # type: ignore[arg-type]


def test_other_limits_and_unknown_options_are_refused() -> None:
    with pytest.raises(UsageError, match="limits must be a Limits object"):
        Server("limited", limits={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'nam'; the options are name, title, "):
        Server("typo").tool(nam="add")(lambda: "")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unknown option 'nam'; the options are name, title, "):
        Server("typo").resource("notes://one", nam="one")(lambda: "")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unknown option 'threads'; the options are thread, abandon"):
        Server("typo").completion(threads=False)(lambda value: [])  # type: ignore[call-overload]


@every_revision
@pytest.mark.parametrize("served", [REVISION_NAMES[:1], REVISION_NAMES[1:3], REVISION_NAMES[3:4], REVISION_NAMES[:-1]])
async def test_a_server_may_support_some_revisions_only(
    served: tuple[str, ...], revision: str, autojump_clock: MockClock
) -> None:
    server = Server("choosy", revisions=served)
    async with connected(server, revision, opened=False) as wire:
        if wire.modern:
            with pytest.raises(ErrorResponse):
                await wire.about()
        else:
            info = {"name": "wire", "version": "1"}
            params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": info}
            agreed = (await wire.call("initialize", params))["protocolVersion"]
            assert agreed == (revision if revision in served else served[-1])


@every_revision
async def test_the_given_limits_apply(revision: str, autojump_clock: MockClock) -> None:
    server = Server("small", limits=Limits(calls=1))
    server.tool(name="wait")(forever)
    async with connected(server, revision) as wire:
        await wire.start("tools/call", {"name": "wait"})
        with pytest.raises(ErrorResponse, match=r"overloaded: .* \(Limits.calls\)"):
            await wire.call("tools/call", {"name": "wait"})


async def forever() -> None:
    await trio.sleep_forever()


def test_run_serves_standard_input_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Server, float, Any]] = []
    monkeypatch.setattr(
        "trio_mcp.server.server.run_stdio",
        lambda server, shutdown_timeout, tap: ran.append((server, shutdown_timeout, tap)),
    )
    server = Server("run")
    server.run()
    server.run(shutdown_timeout=1.5, tap=print)
    assert ran == [(server, 5.0, None), (server, 1.5, print)]


def test_a_tap_gets_all_bytes_in_and_out() -> None:
    code = "from trio_mcp import Server; Server('tapped').run(tap=print)"
    line = '{"jsonrpc":"2.0","id":1,"method":"nothing"}\n'
    shown = subprocess.run(
        [sys.executable, "-c", code], input=line, capture_output=True, text=True, check=True, timeout=60
    )
    assert "-32" in shown.stdout
    assert shown.stderr == f"in {line.encode()!r}\nout {shown.stdout.encode()!r}\n"


def test_an_update_of_a_resource_needs_a_uri() -> None:
    with pytest.raises(UsageError, match="uri must be a str, got PosixPath"):
        Server("updating").notify_resource_updated(Path("/tmp"))  # type: ignore[arg-type]


# Type checkers.

PROGRAM = """
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import trio
from trio_mcp import CacheHints, Context, Field, RequestError, Server, ToolError, UsageError
from trio_mcp import image, serve_stdio, serve_stream
from trio_mcp.types import Prompt, Resource, ResourceTemplate, Tool, ToolAnnotations
from trio_mcp.core.content import Described
from trio_mcp.core.messages import JsonObject, Request
from trio_mcp.server.dispatch import CallNext


@dataclass
class Database:
    url: str


@dataclass
class Size:
    width: int


@asynccontextmanager
async def lifespan(server: Server) -> AsyncIterator[Database]:
    yield Database("sqlite://")


async def log(ctx: Context, request: Request, call_next: CallNext) -> JsonObject:
    return await call_next(request)


def visible(principal: Any, item: Described) -> bool:
    return item.name != "hidden"


server = Server(
    "typed", version="1", lifespan=lifespan, middleware=[log], filter=visible, capabilities=["prompts"],
    cache={"tools/list": CacheHints(60_000)}, revisions=["2025-11-25", "2026-07-28"],
)


@server.tool
async def bare(city: str, *, ctx: Context) -> str:
    database: Database = ctx.lifespan
    await ctx.progress(1, 2, message="half")
    await ctx.log("info", {"city": city})
    answer = await ctx.elicit("Which size?", Size)
    return database.url


@server.tool(name="called", annotations=ToolAnnotations(read_only_hint=True), thread=False)
def called(number: Annotated[int, Field(ge=1)]) -> list[int]:
    if number > 3:
        raise ToolError("too many")
    return [number]


@server.prompt
def prompt(text: str) -> str:
    return text


@server.prompt(title="Called")
def called_prompt(text: str = "") -> list[str]:
    return [text]


@server.resource("r://one", cache=CacheHints(5))
def resource() -> bytes:
    return b""


@server.resource("t://{x}")
async def template(x: str) -> str:
    return x


@server.completion
def anything(value: str) -> list[str]:
    return [value]


@server.completion("prompt", "text")
async def texts(value: str, arguments: dict[str, str]) -> list[str]:
    return [value]


server.add_tool(Tool("raw", {"type": "object"}), lambda ctx, arguments: arguments)
server.add_prompt(Prompt("raw"), lambda ctx, arguments: "raw")
server.add_resource(Resource("raw", "raw://"), lambda ctx, uri: "raw", cache=CacheHints(5))
server.add_template(ResourceTemplate("raw", "raw://{x}"), lambda ctx, uri, variables: "raw")

other = Server("other")
other.mount(server, prefix="typed_")
server.notify_list_changed("tools")
server.notify_resource_updated("r://one")

# A decorated function keeps its type.
reveal_type(bare)
reveal_type(called)
reveal_type(prompt)
reveal_type(called_prompt)
reveal_type(resource)
reveal_type(template)
reveal_type(texts)
running: int = server.statistics().running


async def main(stream: trio.abc.Stream) -> None:
    async with server.running(), trio.open_nursery() as nursery:
        nursery.start_soon(serve_stream, server, stream)
    await serve_stdio(server)


if __name__ == "__main__":
    server.run()
"""
REVEALED = [
    "def (city: str, *, ctx: Context) -> Coroutine[Any, Any, str]",
    "def (number: int) -> list[int]",
    "def (text: str) -> str",
    "def (text: str =) -> list[str]",
    "def () -> bytes",
    "def (x: str) -> Coroutine[Any, Any, str]",
    "def (value: str, arguments: dict[str, str]) -> Coroutine[Any, Any, list[str]]",
]
MISTYPED = """
from trio_mcp import Context, Server

server = Server("typed", page_size="10")
server.notify_list_changed("tool")
server.tool(titel="x")
server.resource(print)


async def tool(ctx: Context) -> None:
    await ctx.log("loud", "x")
    ctx.progres(1)
"""


def mypy(program: str, folder: Path) -> list[str]:
    """The output of `mypy --strict` for a program."""
    file = folder / "program.py"
    file.write_text(program)
    cache = Path(__file__).parents[2] / ".mypy_cache" / "programs"
    options = ["--strict", "--hide-error-context", "--no-error-summary", "--cache-dir", str(cache)]
    run = [sys.executable, "-m", "mypy", *options, "--config-file", "", str(file)]
    done = subprocess.run(run, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_a_typed_program_passes_strict_type_checks_and_keeps_its_types(tmp_path: Path) -> None:
    said = mypy(PROGRAM, tmp_path)
    assert [line for line in said if ": note: Revealed" not in line] == []
    revealed = [line.split('Revealed type is "')[1].removesuffix('"') for line in said]
    plain = [line.replace("builtins.", "").replace("typing.", "") for line in revealed]
    assert [line.replace("trio_mcp.server.context.", "") for line in plain] == REVEALED


@pytest.mark.full
def test_type_checkers_find_wrong_names_and_types(tmp_path: Path) -> None:
    lines = sorted({int(line.split(":")[1]) for line in mypy(MISTYPED, tmp_path) if ": error:" in line})
    assert lines == [4, 5, 6, 7, 11, 12]


@pytest.mark.full
def test_the_typed_program_runs(tmp_path: Path) -> None:
    program = "\n".join(line for line in PROGRAM.splitlines() if not line.startswith("reveal_type"))
    file = tmp_path / "program.py"
    file.write_text(program)
    run = [sys.executable, "-W", "error", str(file)]
    done = subprocess.run(run, cwd=PACKAGE.parent, input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_decorator_with_wrong_arguments_is_refused_with_a_hint() -> None:
    server = Server("mistaken")
    with pytest.raises(UsageError, match=r"give options by name: @server\.tool\(name='adder'\)"):
        server.tool("adder")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"give options by name: @server\.prompt\(name='greeting'\)"):
        server.prompt("greeting")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="a resource needs a URI"):
        server.resource(lambda: "text")  # type: ignore[call-overload]


@pytest.mark.parametrize("lifespan", [lambda server: None, lambda server: iter(())])
async def test_a_lifespan_without_its_decorator_is_refused_with_a_hint(
    lifespan: Any, autojump_clock: MockClock
) -> None:
    with pytest.raises(UsageError, match=r"write @contextlib\.asynccontextmanager above it"):
        async with Server("living", lifespan=lifespan).running():
            pytest.fail("it began")


def test_a_server_needs_a_name() -> None:
    with pytest.raises(UsageError, match="a server needs a name"):
        Server("")


@req("core-25")
async def test_a_reserved_error_code_is_replaced_and_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    server = Server("coded")

    @server.tool
    async def fail() -> str:
        raise RequestError(-32001, "taken")

    async with connected(server, REVISION_NAMES[-1]) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call("tools/call", {"name": "fail"})
    assert refused.value.code == -32603
    assert "2026-07-28 reserves -32001" in caplog.text


MISTAKES: list[tuple[str, Object]] = [
    ("no/such/method", {}),
    ("tools/call", {}),
    ("tools/call", {"name": 7}),
    ("tools/call", {"name": "x" * 100_000}),
    ("tools/call", {"name": "add", "arguments": []}),
    ("prompts/get", {"name": "nobody\nhere"}),
    ("resources/read", {"uri": "nowhere:" + "y" * 5_000}),
    ("resources/list", {"cursor": "z" * 9_000}),
    ("completion/complete", {"ref": {"type": "ref/what"}, "argument": {}}),
]


@req("core-18")
@every_revision
@pytest.mark.parametrize(("method", "params"), MISTAKES, ids=[f"{number}" for number in range(len(MISTAKES))])
async def test_an_error_is_a_short_sentence(
    revision: str, method: str, params: Object, autojump_clock: MockClock
) -> None:
    server = Server("terse", capabilities=("tools", "prompts", "resources", "completions"))
    async with connected(server, revision) as wire:
        with pytest.raises(ErrorResponse) as refused:
            await wire.call(method, params)
    assert 5 < len(refused.value.message) < 250
    assert refused.value.message.isprintable()
