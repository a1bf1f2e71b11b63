"""Declarations of servers and clients: experimental capabilities, and changes that are switched off."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.matrix import Variant, client_of, each_transport
from tests.http.scripted_server import D, E
from tests.requirements import req
from trio_mcp import Context, RequestError, Server, UsageError, open_client
from trio_mcp.errors import SubscriptionUnsupported
from trio_mcp.types import Resource

EXPERIMENTAL: dict[str, Any] = {"com.example/voice": {"rates": [8000, 16000]}, "com.example/video": {}}


@each_transport(without=["child"])
async def test_experimental_capabilities_are_declared_by_both_sides(variant: Variant) -> None:
    server, heard = Server("mine", experimental=EXPERIMENTAL), []

    @server.tool
    async def look(ctx: Context) -> None:
        heard.append(ctx._terms.capabilities["experimental"])
        assert ctx.supports("experimental", "com.example/voice")
        assert not ctx.supports("experimental", "com.example/smell")

    async with client_of(variant, server, experimental=EXPERIMENTAL) as client:
        for _ in range(2):
            await client.call_tool("look")
        assert client.capabilities["experimental"] == EXPERIMENTAL
    assert heard == [EXPERIMENTAL, EXPERIMENTAL]


@pytest.mark.parametrize("revision", [D, E])
async def test_without_the_option_no_experimental_capability_is_declared(revision: str) -> None:
    server, heard = Server("mine"), []

    @server.tool
    async def look(ctx: Context) -> None:
        heard.append("experimental" in ctx._terms.capabilities)

    async with open_client(server, revision=revision) as client:
        await client.call_tool("look")
        assert "experimental" not in client.capabilities
    assert heard == [False]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["voice"], "experimental must be a mapping"),
        ({"voice": True}, "the experimental capability 'voice' must be an object, for example {}"),
        ({"voice": {"rate": object()}}, "JSON"),
    ],
)
def test_malformed_experimental_capabilities_are_refused(given: Any, message: str) -> None:
    for make in (lambda: Server("mine", experimental=given), lambda: open_client(Server("x"), experimental=given)):
        with pytest.raises(UsageError, match=message):
            make()


def server_of_notes(**options: Any) -> Server:
    server = Server("mine", change_debounce=0, **options)
    server.add_resource(Resource("one", "notes://one"), lambda ctx, uri: "")

    @server.tool
    async def grow() -> None:
        server.tool(name="more")(lambda: "")

    return server


@each_transport(revisions=[D, E], without=["child", "http json"])
async def test_a_server_without_list_changes_does_not_declare_them(variant: Variant, autojump_clock: MockClock) -> None:
    notified: list[str] = []
    async with client_of(
        variant, server_of_notes(list_changed=False), on_notification=lambda method, params: notified.append(method)
    ) as client:
        assert client.capabilities["tools"] == {}
        assert client.capabilities["resources"] == {"subscribe": True}
        with pytest.raises(SubscriptionUnsupported):
            async with client.listen(tools=True):
                pass
        async with client.listen(resources="notes://one"):
            await client.call_tool("grow")
            await wait_all_tasks_blocked()
    assert notified == []


@each_transport(revisions=[D, E], without=["child", "http json"])
async def test_a_server_without_subscriptions_does_not_declare_them(
    variant: Variant, autojump_clock: MockClock
) -> None:
    async with client_of(variant, server_of_notes(subscribe=False)) as client:
        assert client.capabilities["resources"] == {"listChanged": True}
        with pytest.raises(SubscriptionUnsupported):
            async with client.listen(resources="notes://one"):
                pass
        async with client.listen(tools=True) as changes:
            await client.call_tool("grow")
            assert (await changes.__anext__()).kind.name == "TOOLS"


async def test_a_server_without_subscriptions_refuses_a_legacy_one() -> None:
    async with open_client(server_of_notes(subscribe=False), revision=D) as client:
        with pytest.raises((RequestError, UsageError)):
            await client.request("resources/subscribe", {"uri": "notes://one"})


def test_an_undeclared_change_cannot_be_announced() -> None:
    server = server_of_notes(list_changed=False, subscribe=False)
    with pytest.raises(UsageError, match="a change of tools: the server was created with list_changed=False"):
        server.notify_list_changed("tools")
    with pytest.raises(UsageError, match="a change of a resource: the server was created with subscribe=False"):
        server.notify_resource_updated("notes://one")


@pytest.mark.parametrize("option", ["subscribe", "list_changed"])
def test_the_switches_must_be_booleans(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be True or False, got 'no'"):
        Server("mine", **{option: "no"})  # type: ignore[arg-type]


# The keys of `_meta` that a user gives.

WRONG_META: dict[str, dict[str, Any]] = {
    "labels": {"-x.example/key": 1},
    "name": {"com.example/_key": 1},
    "reserved": {"io.modelcontextprotocol/key": 1},
    "token": {"progressToken": 1},
}


@req("meta-02", "meta-03", "meta-04", "meta-05", "meta-06", "meta-08")
@each_transport(without=["child"], revisions=[D, E])
async def test_a_client_refuses_to_send_reserved_or_malformed_meta_keys(variant: Variant) -> None:
    server, called, of_all = Server("mine"), [], {}

    @server.tool
    async def look(ctx: Context) -> None:
        called.append(ctx.meta.get("com.example/key"))

    async with client_of(variant, server, meta=lambda: of_all) as client:
        for wrong in WRONG_META.values():
            with pytest.raises(UsageError):
                await client.call_tool("look", meta=wrong)
            with pytest.raises(UsageError):
                await client.list_tools_page(meta=wrong)
            of_all.update(wrong)
            with pytest.raises(UsageError):
                await client.read_resource("x://x")
            of_all.clear()
        of_all["com.example/key"] = 1
        await client.call_tool("look")
    assert called == [1]
