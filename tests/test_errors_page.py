"""docs/errors.md: each of its headings is the text of an error that the library raises."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client.oauth_network import oauth_network
from tests.hardening.test_oauth_trust import HONEST, HOSTILE, PRIVATE, fake_network, server_at, site_with
from tests.http.client import request
from tests.http.served import served
from tests.ports import unclaimed_port
from trio_mcp import Context, OAuth, Server, open_client, serve_http
from trio_mcp.client import Client
from trio_mcp.errors import StoreFailed
from trio_mcp.oauth import Application, FileTokenStore
from trio_mcp.stores import MemoryStore, RedisStore, SQLiteStore

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
HEADINGS = re.findall(r"^### `(.*)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
TRIGGERS: dict[str, Callable[[], Awaitable[str]]] = {}
FORM = {"type": "object", "properties": {"n": {"type": "integer"}}}


def shop() -> Server:
    server = Server("shop")

    @server.tool
    async def add(a: int) -> int:
        return a

    @server.tool
    async def ask(ctx: Context) -> None:
        await ctx.elicit("How many?", FORM)

    @server.tool
    async def broken() -> None:
        raise KeyError("a secret")

    return server


def triggers(begin: str) -> Callable[[Callable[[], Awaitable[Any]]], None]:
    """Register a function for the heading that starts with `begin`.  It raises this error, or returns its text."""

    def register(trigger: Callable[[], Awaitable[Any]]) -> None:
        async def message() -> str:
            try:
                return str(await trigger())
            except Exception as error:  # noqa: BLE001  # the test compares it with the page
                return str(error)

        (heading,) = [each for each in HEADINGS if each.startswith(begin)]
        TRIGGERS[heading] = message

    return register


# At the start of a server.


@triggers("run() starts")
async def _() -> None:
    shop().run()


@triggers("trio_mcp runs on Trio")
async def _() -> None:
    async def on_asyncio() -> None:
        async with open_client(shop()):
            pass

    await trio.to_thread.run_sync(asyncio.run, on_asyncio())


@triggers("run() takes no transport name")
async def _() -> None:
    run: Any = shop().run
    run(transport="stdio")


@triggers("other machines can reach")
async def _() -> None:
    await serve_http(shop(), "0.0.0.0", 0)


@triggers("… cannot join its replicas")
async def _() -> str:
    store = MemoryStore()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_http, Server("shop", store=store))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trio_mcp.server.replicas.LEASE", 0)  # or it would wait for the lease of the first
            patch.setattr("trio_mcp.server.replicas._PERIOD", 0)
            try:
                await serve_http(Server("shop", store=store))
            except Exception as error:  # noqa: BLE001  # as above
                nursery.cancel_scope.cancel()
                return str(error)
    raise AssertionError("two servers with other keys share a store")


@triggers("cannot listen")
async def _() -> str:
    async with trio.open_nursery() as nursery:
        address: Any = await nursery.start(serve_http, shop())
        port = address.listeners[0].socket.getsockname()[1]
        with contextlib.suppress(trio.TooSlowError):
            try:
                await serve_http(shop(), "127.0.0.1", port)
            except Exception as error:  # noqa: BLE001  # as above
                nursery.cancel_scope.cancel()
                return str(error)
    raise AssertionError("two servers listen at one port")


@triggers("the tool … exists already")
async def _() -> None:
    shop().tool(name="add")(lambda: None)


@triggers("parameter …")
async def _() -> None:
    async def strange(x: complex) -> None: ...

    shop().tool(strange)


# HTTP requests that a server refuses.


async def error_of_post(path: str = "/mcp", **headers: str) -> str:
    async with served(shop(), path="/mcp") as web:
        web.path = path
        how = {name.replace("_", "-"): value for name, value in headers.items()}
        revision = "2025-11-25" if "Mcp-Session-Id" in how or not headers else "2026-07-28"
        asked = request("tools/list", revision=revision)
        answer = await web.post(asked, revision=revision, headers=how)
        assert answer.status >= 400
        return str(answer.json["error"]["message"])


@triggers("the host")
async def _() -> str:
    return await error_of_post(Host="evil.example")


@triggers("the origin")
async def _() -> str:
    return await error_of_post(Origin="https://evil.example")


@triggers("Accept is")
async def _() -> str:
    return await error_of_post(Accept="text/html")


@triggers("the Mcp-Session-Id header")
async def _() -> str:
    return await error_of_post()


@triggers("this session is unknown")
async def _() -> str:
    return await error_of_post(Mcp_Session_Id="x" * 32)


@triggers("nothing is served at")
async def _() -> str:
    return await error_of_post("/other", Mcp_Method="tools/list")


def protected_shop() -> Server:
    server = shop()
    server.protect(
        verify=lambda token: None, resource="https://a.example/mcp", authorization_servers=["https://b.example"]
    )
    return server


async def error_without_access(**headers: str) -> str:
    async with served(protected_shop(), path="/mcp") as web:
        answer = await web.post(request("tools/list", revision="2026-07-28"), revision="2026-07-28", headers=headers)
        assert answer.status == 401
        return str(answer.json["error"]["message"])


@triggers("the request has no access token")
async def _() -> str:
    return await error_without_access()


@triggers("the access token is not accepted")
async def _() -> str:
    return await error_without_access(Authorization="Bearer a-secret")


# In calls.


def with_client(begin: str, **options: Any) -> Callable[[Callable[[Client], Awaitable[Any]]], None]:
    def register(use: Callable[[Client], Awaitable[Any]]) -> None:
        async def trigger() -> Any:
            async with open_client(shop(), revision="2026-07-28", **options) as client:
                result = await use(client)
            return result.content[0].text if hasattr(result, "content") else result

        triggers(begin)(trigger)

    return register


with_client("there is no tool")(lambda client: client.call_tool("nothing"))
with_client("…: must be of type integer")(lambda client: client.call_tool("add", {"a": "1"}))
with_client("tools/call … failed")(lambda client: client.call_tool("broken"))
triggers("no running event loop")(lambda: asyncio.sleep(1))
with_client("elicitation/create needs")(lambda client: client.call_tool("ask"))
with_client("… needs the server capability")(lambda client: client.list_prompts_page())
with_client("ping does not exist")(lambda client: client.ping())
with_client("unknown request option")(lambda client: client.call_tool("add", a=1))  # type: ignore[call-overload]


# Connections.


@triggers("no connection to")
async def _() -> None:
    with trio.socket.socket() as bound:  # the port is closed as long as the socket is bound
        await bound.bind(("127.0.0.1", 0))
        async with open_client(f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"):
            pass


@triggers("there is no command")
async def _() -> None:
    async with open_client(["no-such-program"]):
        pass


@triggers("the server … ended with status …")
async def _() -> None:
    dying = "import sys; print('no API key', file=sys.stderr); sys.exit(3)"
    async with open_client([sys.executable, "-c", dying], stderr=lambda data: None):
        pass


async def command(program: str, **options: Any) -> None:
    async with open_client([sys.executable, "-S", "-c", program], stderr=None, **options):
        pass


triggers("the server … ended with status 0")(lambda: command("pass"))


_unopened = "the connection could not be opened: the server …"
_greets = "print('Hello', flush=True); import sys; sys.stdin.read()"
triggers(f"{_unopened} sent no MCP message within … seconds after")(lambda: command(_greets, garbage_timeout=0.001))
triggers(f"{_unopened} sent no MCP message within … seconds (")(lambda: command(_greets, start_timeout=0.001))


@triggers(f"{_unopened} sends back")
async def _() -> None:
    async with open_client(["cat"]):
        pass


@triggers("the client has been closed")
async def _() -> None:
    async with open_client(shop()) as client:
        pass
    await client.call_tool("add", {"a": 1})


# Access.


async def sign_in(application: str | Application = "Visitor", scopes: tuple[str, ...] = (), **settings: Any) -> None:
    """Open a client with these options, at authorization servers with these settings."""
    options = {name: settings.pop(name) for name in ("visit", "browser", "user_seconds") if name in settings}
    if "browser" in options:
        options |= {"visit": None, "redirect_uri": None}
    satisfied = settings.pop("satisfied", True)
    async with oauth_network(scopes=scopes, **settings) as at:
        at.accepts_tokens = satisfied
        async with at.client(at.auth(application, **options)):
            pass


@triggers("tokens cannot be sent")
async def _() -> None:
    OAuth("Visitor").at("http://127.0.0.1:3000/mcp")


triggers("… was not allowed to issue a token: the browser")(
    lambda: sign_in(browser=lambda url: None, user_seconds=0.001)
)
triggers("… was not allowed to issue a token: visit")(lambda: sign_in(visit=lambda url: "the-code"))
triggers("the application has no client id")(lambda: sign_in(registers=False))
triggers("the MCP server refused")(lambda: sign_in(satisfied=False))
triggers("this request needs the scopes")(lambda: sign_in(scopes=("notes:write",), withholds=("notes:write",)))


@triggers("… leads to")
async def _() -> str:
    async with fake_network(site_with(server_at(HONEST))) as at:
        at.places[HONEST] = [PRIVATE]
        return await at.refusal()


@triggers("the token_endpoint of")
async def _() -> str:
    server = server_at(HONEST, iss=None, metadata={"token_endpoint": f"https://{HOSTILE}/token"})
    async with fake_network(site_with(server)) as at:
        at.put(HONEST, server)
        return await at.refusal()


@triggers("only the owner may have access")
async def _() -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o644)
        await FileTokenStore(file.name).get("https://mcp.example/mcp")


@triggers("RedisStore needs coredis")
async def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trio_mcp.stores.redis_link", None)
        RedisStore("redis://localhost")


@triggers("redis://… does not work")
async def _() -> None:
    pytest.importorskip("coredis")
    async with RedisStore(f"redis://:a%20secret@127.0.0.1:{unclaimed_port()}"):
        pass


@triggers("another process has locked the file")
async def _() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("trio_mcp.stores.sqlite_file._BUSY", 0)
        path = Path(folder) / "tasks.db"
        async with SQLiteStore(path) as store:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as shell:
                shell.execute("BEGIN IMMEDIATE")
                await store.delete("task", "a")


@triggers("the store of the tasks does not work")
async def _() -> None:
    async def fail(*_: object, **options: object) -> None:
        raise StoreFailed("a secret")

    server = Server("shop", store=(store := MemoryStore()))

    @server.tool(task="optional")
    async def report() -> str:
        return ""

    async with open_client(server, tasks=True) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "add", fail)
            await client.start_task("report", {})


def test_every_error_of_the_page_is_tried() -> None:
    assert list(TRIGGERS) == HEADINGS


@pytest.mark.parametrize("heading", HEADINGS)
async def test_the_error_has_the_text_on_the_page(heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with trio.fail_after(60):
        said = await TRIGGERS[heading]()
    expected = ".*".join(re.escape(each) for each in heading.split("…"))
    assert re.fullmatch(expected, said, re.DOTALL), said
    assert "a secret" not in said
