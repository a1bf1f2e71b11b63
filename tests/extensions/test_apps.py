"""Apps: pages of a server, the tools that open them, and a page in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from examples import clock_app
from tests.client.matrix import Variant, client_of, each_transport_and_asgi
from tests.peers.installed import needs, tool
from tests.server.raw_client import connected, every_revision
from trio_mcp import Context, Server, UsageError, open_client
from trio_mcp.core import RemoteProtocolError
from trio_mcp.extensions.apps import (
    APPS,
    PAGE_TYPE,
    HostedPage,
    add_page,
    is_for_model,
    page_of,
    read_page,
    shows_pages,
)
from trio_mcp.types import BlobResourceContents, Resource, TextResourceContents, Tool

HOST = {APPS: {"mimeTypes": [PAGE_TYPE]}}
SELF = "'self' 'unsafe-inline'"
STRICT_POLICY = (
    f"default-src 'none'; script-src {SELF}; style-src {SELF}; img-src 'self' data:; font-src 'self'; "
    "media-src 'self' data:; connect-src 'none'; frame-src 'none'; object-src 'none'; base-uri 'self'"
)


@each_transport_and_asgi(without=("child",))
async def test_a_host_finds_the_page_of_a_tool(variant: Variant, autojump_clock: MockClock) -> None:
    async with client_of(variant, clock_app.server, extensions=HOST) as client:
        assert client.extension(APPS) == {}
        tools = {tool.name: tool for tool in await client.list_tools()}
        if variant.revision >= "2025-06-18":  # older revisions have no _meta of a tool
            assert page_of(tools["time_in"]) == page_of(tools["refresh"]) == "ui://clock/face"
            assert (is_for_model(tools["time_in"]), is_for_model(tools["refresh"])) == (True, False)
        page = await read_page(client, "ui://clock/face")
        assert page.html == clock_app.PAGE
        assert (page.policy, page.permissions) == (STRICT_POLICY, ())
        (resource,) = await client.list_resources()
        assert (resource.uri, resource.name, resource.mime_type) == ("ui://clock/face", "clock", PAGE_TYPE)
        result = await client.call_tool("time_in", {"city": "Europe/Oslo"})
        assert not result.is_error
        assert (await client.call_tool("time_in", {"city": "Nowhere"})).is_error


@every_revision
async def test_a_handler_knows_whether_the_client_shows_pages(revision: str, autojump_clock: MockClock) -> None:
    server, known = Server("pages"), list[bool]()
    page = add_page(server, "ui://a", "<p>")

    @page.tool(name="show", meta={"com.example/x": 1})
    async def shown(ctx: Context) -> None:
        known.append(shows_pages(ctx))

    place = "extensions" if revision == "2026-07-28" else "experimental"
    # Some hosts declare it as an extension also in older revisions.
    for capabilities in ({place: HOST}, {"extensions": HOST}, {"extensions": {APPS: {}}}, {}):
        async with connected(server, revision, capabilities=capabilities, check=False) as wire:
            await wire.call("tools/call", {"name": "show"})
    assert known == [True, True, False, False]
    async with connected(server, revision) as wire:
        (listed,) = (await wire.call("tools/list"))["tools"]
    meta = {"com.example/x": 1, "ui": {"resourceUri": "ui://a", "visibility": ["model", "app"]}}
    assert listed.get("_meta") == (meta if revision >= "2025-06-18" else None)


async def test_a_page_declares_its_origins_and_permissions(tmp_path: Path, autojump_clock: MockClock) -> None:
    server, file = Server("pages"), tmp_path / "page.html"
    file.write_text("<p>one")
    add_page(
        server, "ui://a", file, connect=["https://api.example.com", "wss://*.example.com:8443"],
        load=["https://cdn.example.com"], frames=["https://video.example"], permissions=["camera"],
        prefers_border=False,
    )  # fmt: skip
    add_page(server, "ui://b", "<p>b")
    async with open_client(server) as client:
        page = await read_page(client, "ui://a")
        assert page == HostedPage("ui://a", "<p>one", page.policy, ("camera",), False)
        directives = dict(each.split(" ", 1) for each in page.policy.split("; "))
        assert directives["connect-src"] == "https://api.example.com wss://*.example.com:8443"
        assert directives["script-src"] == "'self' 'unsafe-inline' https://cdn.example.com"
        assert directives["frame-src"] == "https://video.example"
        assert (directives["object-src"], directives["base-uri"]) == ("'none'", "'self'")
        file.write_text("<p>two")
        assert (await read_page(client, "ui://a")).html == "<p>two"
        assert (await read_page(client, "ui://b")).prefers_border is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"uri": "https://a"}, "must begin with ui://"),
        ({"html": Path("/none")}, "there is no file /none"),
        ({"permissions": ["root"]}, "unknown permission 'root'"),
        ({"connect": ["https://a.example/path"]}, "is not an origin"),
        ({"load": ["https://a.example; script-src *"]}, "is not an origin"),
        ({"frames": ["*"]}, "is not an origin"),
    ],
)
def test_an_invalid_page_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        add_page(Server("x"), **{"uri": "ui://a", "html": "<p>", **wrong})


@pytest.mark.parametrize("visibility", ["model", [], ["user"]])
def test_an_invalid_visibility_is_refused(visibility: Any) -> None:
    page = add_page(Server("x"), "ui://a", "<p>")
    with pytest.raises(UsageError, match="visibility must be a list"):
        page.tool(visibility=visibility)


async def test_a_resource_that_is_no_valid_page_is_refused(autojump_clock: MockClock) -> None:
    server = Server("strange")

    def served(name: str, **contents: Any) -> None:
        kind = BlobResourceContents if "blob" in contents else TextResourceContents
        given = {"mime_type": PAGE_TYPE, **contents}
        uri = given.pop("uri", f"ui://{name}")
        server.add_resource(Resource(uri=f"ui://{name}", name=name), lambda ctx, _: kind(uri, **given))

    served("other", text="x", uri="ui://another")
    served("type", text="x", mime_type="text/html")
    served("bytes", blob=b"\xff")
    for number, origins in enumerate((["https://a.example; script-src *"], "https://a.example", [7])):
        served(f"origins-{number}", text="x", meta={"ui": {"csp": {"connectDomains": origins}}})
    served("good", blob=b"<p>", meta={"ui": {"csp": 7, "permissions": 7, "prefersBorder": 7}})
    async with open_client(server) as client:
        for name, why in {
            "other": "did not return the page", "type": "has the type 'text/html'", "bytes": "is not UTF-8",
            "origins-0": "is not an origin", "origins-1": "must be a list", "origins-2": "must be a list",
        }.items():  # fmt: skip
            with pytest.raises(RemoteProtocolError, match=why):
                await read_page(client, f"ui://{name}")
        assert await read_page(client, "ui://good") == HostedPage("ui://good", "<p>", STRICT_POLICY, (), None)


@pytest.mark.parametrize(
    "meta", [None, {}, {"ui": 7}, {"ui": {"resourceUri": 7}}, {"ui": {"resourceUri": "https://a"}}]
)
def test_a_tool_without_a_page_is_for_the_model(meta: Any) -> None:
    plain = Tool("x", {"type": "object"}, meta=meta)
    assert page_of(plain) is None
    assert is_for_model(plain)


# A real browser.

# A minimal host: it answers the handshake, passes the result of the tool to the app, and answers the calls of the app.
HOST_PAGE = """<!doctype html><pre id=log></pre><iframe id=app sandbox="allow-scripts allow-same-origin"></iframe>
<script>
  const given = GIVEN, said = []
  const frame = document.getElementById("app")
  const post = (message) => frame.contentWindow.postMessage({ jsonrpc: "2.0", ...message }, "*")
  addEventListener("message", ({ data }) => {
    said.push(data.method)
    if (data.method === "ui/initialize")
      post({ id: data.id, result: { protocolVersion: "2026-01-26", hostCapabilities: {}, hostContext: {} } })
    else if (data.method === "ui/notifications/initialized")
      post({ method: "ui/notifications/tool-result", params: given.first })
    else if (data.method === "tools/call") { said.push(data.params); post({ id: data.id, result: given.second }) }
    else if (data.method === "ui/notifications/size-changed") {
      const shown = frame.contentDocument
      said.push(shown.getElementById("time").textContent + " " + shown.getElementById("city").textContent)
      if (said.filter((each) => each === data.method).length === 1) shown.getElementById("again").click()
      else log.textContent = JSON.stringify(said)
    }
  })
  frame.srcdoc = `<meta http-equiv="Content-Security-Policy" content="${given.policy}">` + given.html
</script>"""


@pytest.mark.full
async def test_the_page_of_the_example_opens_in_a_browser(tmp_path: Path) -> None:
    chromium = needs("chromium", lambda: tool("chromium"))
    async with open_client(clock_app.server, extensions=HOST) as client:
        page = await read_page(client, "ui://clock/face")
        first = await client.request("tools/call", {"name": "time_in", "arguments": {"city": "Europe/Oslo"}})
    second = {**first, "structuredContent": {"city": "Asia/Tokyo", "time": "12:34"}}
    given = {"html": page.html, "policy": page.policy, "first": first, "second": second}
    host = tmp_path / "host.html"
    host.write_text(HOST_PAGE.replace("GIVEN", json.dumps(given).replace("</", "<\\/")))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--virtual-time-budget=10000", "--dump-dom", host.as_uri()]
    with trio.fail_after(60):
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
    shown = done.stdout.decode()
    log = shown.partition('<pre id="log">')[2].partition("</pre>")[0]
    assert log, shown
    assert json.loads(log) == [
        "ui/initialize",
        "ui/notifications/initialized",
        "ui/notifications/size-changed",
        f"{first['structuredContent']['time']} Europe/Oslo",
        "tools/call",
        {"name": "refresh", "arguments": {"city": "Europe/Oslo"}},
        "ui/notifications/size-changed",
        "12:34 Asia/Tokyo",
    ]
