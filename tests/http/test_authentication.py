"""A protected server: which tokens each transport accepts, how it refuses the others, and that it leaks no token."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from trio.testing import MockClock

from tests.client.matrix import Variant, client_of, each_transport, serve_over
from tests.http.asgi_servers import Events, hosted, lifespan_of
from tests.http.client import Answer, Cut, HttpClient, Stream, request
from tests.http.scripted_server import SSE_PATHS, A, B, C, D, E
from tests.http.served import bearer, listening, served
from tests.http.ws import Socket, upgrade_request, websocket
from tests.requirements import req
from tests.server.raw_client import ErrorResponse, client_on
from trio_mcp import Context, Limits, McpError, Principal, RequestError, Server, UsageError, open_client
from trio_mcp.asgi import AsgiApp
from trio_mcp.core import TextContent
from trio_mcp.core.oauth import WELL_KNOWN
from trio_mcp.errors import CannotVerify
from trio_mcp.types import HttpRequest

AT = "http://127.0.0.1:3000/mcp"
ISSUER = "https://auth.example.com"
METADATA = f"http://127.0.0.1:3000{WELL_KNOWN}/mcp"
_SSE_OPTIONS: dict[str, Any] = {**SSE_PATHS}
SECRET = "s3cr3t-"  # the prefix of all tokens here, so that a search for it finds any token
PRINCIPALS = {
    "ada": Principal("ada", ["read"]),
    "bob": Principal("bob", ["read", "write"]),
    "boss": Principal("boss", ["admin"]),
    "guest": Principal("guest"),
    "old": Principal("old", ["read"], expires=1.0),
}


def verify(token: str) -> Principal | None:
    return PRINCIPALS.get(token.removeprefix(SECRET))


def token(name: str) -> dict[str, Any]:
    return bearer(SECRET + name)


def protected(server: Server | None = None, **how: Any) -> Server:
    server = server or Server("notes")

    @server.tool
    async def who(ctx: Context) -> str:
        assert "Authorization" not in ctx.headers
        return f"{ctx.principal} {' '.join(sorted(ctx.scopes))}"

    @server.tool(scopes=["write", "draw"])
    async def draw(ctx: Context) -> str:
        return f"drawn by {ctx.principal}"

    @server.tool(scopes=["write"])
    def write() -> str:
        return "written"

    server.protect(
        **{
            "verify": verify,
            "resource": AT,
            "authorization_servers": [ISSUER],
            "scopes": ["read"],
            "implies": {"admin": ["read", "write", "draw"]},
            **how,
        }
    )
    return server


def call(tool: str, id: Any = 1, **how: Any) -> dict[str, Any]:
    return request("tools/call", {"name": tool, "arguments": {}}, id, **how)


def challenge(answer: Answer) -> str:
    return answer.headers["WWW-Authenticate"]


def text(result: Any) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


# All transports, with the client of this package


@req("auth-01", "auth-02", "auth-19", "auth-50", "auth-111")
@each_transport(without=["memory", "child"])
async def test_a_valid_token_is_accepted_on_every_transport(variant: Variant, autojump_clock: MockClock) -> None:
    async with client_of(variant, protected(), headers=token("ada")) as client:
        assert text(await client.call_tool("who")) == "ada read"
        assert {each.name for each in await client.list_tools()} == {"who", "draw", "write"}
    async with client_of(variant, protected(), headers=token("boss")) as client:
        assert text(await client.call_tool("who")) == "boss admin draw read write"
        assert text(await client.call_tool("draw")) == "drawn by boss"


@req("auth-12", "auth-21")
@each_transport(without=["memory", "child"])
@pytest.mark.parametrize("headers", [{}, token("eve"), token("old")])
async def test_a_missing_or_invalid_token_is_refused_on_every_transport(
    variant: Variant, headers: dict[str, str], autojump_clock: MockClock
) -> None:
    async with serve_over(variant.transport, protected()) as target:
        with pytest.raises(McpError) as caught:
            async with open_client(target, revision=variant.revision, headers=headers):
                raise AssertionError("the connection was opened")
    assert "401" in repr(caught.value)
    assert SECRET not in repr(caught.value)


@req("auth-80")
@each_transport(without=["memory", "child"])
async def test_a_call_that_lacks_a_scope_is_refused_on_every_transport(
    variant: Variant, autojump_clock: MockClock
) -> None:
    async with client_of(variant, protected(), headers=token("ada")) as client:
        with pytest.raises(McpError) as caught:
            await client.call_tool("draw")
        if variant.transport == "websocket":  # a message of an open WebSocket has no HTTP status
            assert isinstance(caught.value, RequestError)
            assert caught.value.code == -32600
            assert caught.value.data == {"error": "insufficient_scope", "scope": "read write draw"}
        assert text(await client.call_tool("who")) == "ada read"


@req("auth-80")
@pytest.mark.parametrize("revision", [D, E])
async def test_a_call_that_lacks_a_scope_does_not_become_a_task(revision: str, autojump_clock: MockClock) -> None:
    server = protected()

    @server.tool(scopes=["write"], task="required")
    async def later() -> str:
        return "written"

    variant = Variant("websocket", revision)
    async with client_of(variant, server, headers=token("ada"), tasks=True) as client:
        with pytest.raises(RequestError, match="lacks a scope"):
            await client.start_task("later")
    async with client_of(variant, server, headers=token("bob"), tasks=True) as client:
        assert text(await client.call_tool("later")) == "written"


@req("auth-03")
@each_transport(without=["child", "http", "http json", "http+sse", "websocket"])
async def test_transports_without_http_need_no_token(variant: Variant, autojump_clock: MockClock) -> None:
    async with client_of(variant, protected()) as client:
        assert text(await client.call_tool("who")) == "None "
        assert text(await client.call_tool("draw")) == "drawn by None"


# The exact response of each path

_POST = {"Content-Type": "application/json"}
ENDPOINTS = [
    pytest.param("POST", "/mcp", _POST, id="POST"),
    pytest.param("GET", "/mcp", {"Mcp-Session-Id": "x"}, id="GET"),
    pytest.param("DELETE", "/mcp", {"Mcp-Session-Id": "x"}, id="DELETE"),
    pytest.param("GET", "/sse", {}, id="SSE"),
    pytest.param("POST", "/messages?session=x", _POST, id="messages"),
]
REFUSED = [
    (None, "", 401, "Bearer resource_metadata="),
    ("Basic YTpi", "", 401, "Bearer resource_metadata="),
    (f"Bearer {SECRET}eve", "", 401, 'Bearer error="invalid_token"'),
    (f"Bearer {SECRET}old", "", 401, 'Bearer error="invalid_token"'),
    (f"Bearer {SECRET} {SECRET}", "", 400, 'Bearer error="invalid_request"'),
    (f"Bearer {SECRET}ada", f"access_token={SECRET}ada", 400, 'Bearer error="invalid_request"'),
    (None, f"access_token={SECRET}ada", 400, 'Bearer error="invalid_request"'),
]
refused = pytest.mark.parametrize(("value", "query", "status", "begins"), REFUSED)


def fronts(server: Server) -> dict[str, AbstractAsyncContextManager[HttpClient]]:
    return {"http": served(server, **_SSE_OPTIONS), "asgi": hosted(AsgiApp(server, **_SSE_OPTIONS))}


@req("auth-12", "auth-20", "auth-21", "auth-27", "auth-38", "auth-62")
@pytest.mark.parametrize("front", ["http", "asgi"])
@pytest.mark.parametrize(("method", "target", "headers"), ENDPOINTS)
@refused
async def test_a_refusal_has_its_reason_and_the_metadata_url(
    front: str, method: str, target: str, headers: Any, value: str | None, query: str, status: int, begins: str,
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    async with fronts(protected())[front] as web:
        target += ("&" if "?" in target else "?") + query if query else ""
        fields = {**headers, "Authorization": value, "Origin": "http://localhost"}
        answer = await web.send(method, target, fields, b"{}" if method == "POST" else None)
    assert answer.status == status
    assert challenge(answer).startswith(begins)
    assert f'resource_metadata="{METADATA}", scope="read"' in challenge(answer)
    assert answer.json["error"]["code"] == -32600
    assert answer.headers["Access-Control-Allow-Origin"] == "http://localhost"
    assert "WWW-Authenticate" in answer.headers["Access-Control-Expose-Headers"]
    assert caplog.messages
    assert SECRET not in caplog.text + challenge(answer) + answer.body.decode()


@req("auth-04", "auth-12")
@pytest.mark.parametrize("front", ["http", "asgi"])
@refused
async def test_a_websocket_without_a_valid_token_is_refused_at_the_handshake(
    front: str, value: str | None, query: str, status: int, begins: str, autojump_clock: MockClock
) -> None:
    target = "/ws" + (f"?{query}" if query else "")
    if front == "http":
        async with served(protected()) as web:
            data = await web.raw(upgrade_request(target, Authorization=value))
        assert data.startswith(f"HTTP/1.1 {status} ".encode())
        assert f"\r\nWWW-Authenticate: {begins}".encode() in data
    else:
        events = await asgi_websocket(AsgiApp(protected()), target, value)
        assert events[0]["status"] == status
        assert dict(events[0]["headers"])[b"www-authenticate"].startswith(begins.encode())


async def asgi_websocket(app: AsgiApp, target: str, authorization: str | None) -> list[Any]:
    path, _, query = target.partition("?")
    headers = [(b"host", b"127.0.0.1")] + ([(b"authorization", authorization.encode())] if authorization else [])
    scope = {
        "type": "websocket", "asgi": {"version": "3.0"}, "path": path, "query_string": query.encode(),
        "headers": headers, "subprotocols": ["mcp"], "extensions": {"websocket.http.response": {}},
    }  # fmt: skip
    events = Events({"type": "websocket.connect"})
    async with lifespan_of(app), trio.open_nursery() as nursery:
        nursery.start_soon(app, scope, events.receive, events.send)
        await trio.testing.wait_all_tasks_blocked()
        events.feed({"type": "websocket.disconnect", "code": 1000})
    return events.sent


# Scopes


@req("auth-27", "auth-65", "auth-79", "auth-80", "auth-81")
@pytest.mark.parametrize("front", ["http", "asgi"])
@pytest.mark.parametrize("revision", [B, C, D, E])
async def test_one_challenge_has_all_scopes_of_a_call(front: str, revision: str, autojump_clock: MockClock) -> None:
    async with fronts(protected())[front] as web:
        session = None if revision == E else await web.initialize(revision, headers=token("ada"))
        post: Any = {"revision": revision, "session": session}
        for name, tool, needed in (("ada", "draw", "read write draw"), ("ada", "write", "read write")):
            answer = await web.post(call(tool, 7, revision=revision), headers=token(name), **post)
            assert answer.status == 403
            assert challenge(answer).startswith('Bearer error="insufficient_scope", ')
            assert f'scope="{needed}"' in challenge(answer)
            assert answer.json["id"] == 7
        good = await web.post(call("who", 8, revision=revision), headers=token("ada"), **post)
        assert good.result["content"][0]["text"] == "ada read"


async def test_a_token_without_the_scopes_of_the_server_is_refused(autojump_clock: MockClock) -> None:
    async with served(protected(), **_SSE_OPTIONS) as web:
        for answer, needed in (
            (await web.post(call("who"), headers=token("guest")), "read"),
            (await web.post(call("draw"), headers=token("guest")), "read write draw"),
            (await web.send("GET", "/sse", token("guest")), "read"),
        ):
            assert answer.status == 403
            assert f'scope="{needed}"' in challenge(answer)
        data = await web.raw(upgrade_request(Authorization=f"Bearer {SECRET}guest"))
        assert data.startswith(b"HTTP/1.1 403 ")
        assert b'error="insufficient_scope"' in data


async def test_a_batch_is_refused_as_a_whole_with_the_scopes_of_all_its_calls(autojump_clock: MockClock) -> None:
    async with served(protected()) as web:
        session = await web.initialize(B, headers=token("ada"))
        batch = [call(tool, id, revision=B) for id, tool in enumerate(["who", "write", "draw"], 1)]
        answer = await web.post(batch, session=session, headers=token("ada"))
        assert answer.status == 403
        assert 'scope="read write draw"' in challenge(answer)
        assert "id" not in answer.json


async def test_a_post_for_a_legacy_event_stream_is_refused_by_its_status(autojump_clock: MockClock) -> None:
    async with served(protected(), **_SSE_OPTIONS) as web, web.stream(path="/sse", headers=token("ada")) as stream:
        target = (await stream.event()).data.decode()
        body = json.dumps(call("draw", 3, revision=A)).encode()
        answer = await web.send("POST", target, {**token("ada"), **_POST}, body)
        assert (answer.status, answer.json["id"]) == (403, 3)
        assert 'scope="read write draw"' in challenge(answer)


async def test_the_scopes_of_a_hidden_tool_do_not_reveal_it(autojump_clock: MockClock) -> None:
    server = protected(Server("notes", filter=lambda principal, item: item.name != "draw" or principal == "bob"))
    async with served(server) as web:
        hidden, unknown = [await web.post(call(tool), headers=token("ada")) for tool in ("draw", "nothing")]
        assert hidden.code == unknown.code == -32602
        assert (await web.post(call("draw"), headers=token("bob"))).status == 403


async def test_a_mounted_tool_keeps_its_scopes(autojump_clock: MockClock) -> None:
    other, whole = Server("other"), Server("whole")
    whole.mount(protected(other), prefix="o_")
    whole.protect(verify=verify, resource=AT, authorization_servers=[ISSUER])
    async with served(whole) as web:
        answer = await web.post(call("o_write"), headers=token("ada"))
        assert answer.status == 403
        assert 'scope="write"' in challenge(
            answer
        )  # the scope that the mounted server needs for all requests is not needed here
        assert (await web.post(call("o_write"), headers=token("bob"))).result["content"][0]["text"] == "written"


async def test_a_protected_server_is_not_served_by_an_open_outer_server(autojump_clock: MockClock) -> None:
    whole = Server("whole")
    whole.mount(protected(), prefix="o_")
    with pytest.raises(UsageError, match="call protect of the outer server"):
        async with served(whole):
            raise AssertionError("the server was started")


async def always_ada(asking: HttpRequest) -> str:
    return "ada"


@pytest.mark.parametrize("options", [{}, {"authenticate": always_ada}])
async def test_callers_of_an_open_server_have_no_scopes(options: dict[str, Any], autojump_clock: MockClock) -> None:
    server = Server("open")
    server.tool(scopes=["write"], name="write")(lambda: "written")
    async with served(server, **options) as web:
        answer = await web.post(call("write", 7))
        assert (answer.status, answer.json["id"]) == (403, 7)
        assert "protect" in answer.json["error"]["message"]
        assert "WWW-Authenticate" not in answer.headers
    async with websocket(server, E, endpoint=options) as (wire, _):
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("tools/call", {"name": "write", "arguments": {}})
        assert caught.value.data == {"error": "insufficient_scope", "scope": "write"}


# Sessions and their principals


@req("auth-47")
@pytest.mark.parametrize("revision", [B, C, D])
async def test_a_session_accepts_all_tokens_of_its_principal_and_no_others(
    revision: str, autojump_clock: MockClock
) -> None:
    names = {"first": "ada", "second": "ada", "other": "eve"}
    server = protected(verify=lambda token: Principal(names[token.removeprefix(SECRET)], ["read"]))
    async with served(server) as web:
        session = await web.initialize(revision, headers=token("first"))
        for name, status in (("first", 200), ("second", 200), ("other", 403)):
            answer = await web.post(call("who", name, revision=revision), session=session, headers=token(name))
            assert answer.status == status
        assert (await web.end(session, token("other"))).status == 403
        assert (await web.end(session, token("second"))).status == 204


@req("auth-19")
@pytest.mark.parametrize("revision", [D, E])
async def test_concurrent_calls_have_the_scopes_of_their_own_tokens(revision: str, autojump_clock: MockClock) -> None:
    server = protected(verify=lambda token: Principal("ada", ["read", token]))
    go = trio.Event()

    @server.tool
    async def wait(ctx: Context) -> str:
        before = ctx.scopes
        await go.wait()
        return " ".join(sorted(before & ctx.scopes))

    async with served(server) as web:
        session = None if revision == E else await web.initialize(revision, headers=bearer("zero"))
        found: dict[str, str] = {}

        async def one(scope: str) -> None:
            how: Any = {"session": session, "headers": bearer(scope)}
            answer = await web.post(call("wait", scope, revision=revision), revision=revision, **how)
            found[scope] = answer.messages[-1]["result"]["content"][0]["text"]

        async with trio.open_nursery() as nursery:
            for scope in ("a", "b", "c"):
                nursery.start_soon(one, scope)
            await trio.sleep(1)
            go.set()
        assert found == {scope: f"{scope} read" for scope in "abc"}


# Metadata


@req("auth-34", "auth-37", "auth-39")
@pytest.mark.parametrize("front", ["http", "asgi"])
@pytest.mark.parametrize("place", [WELL_KNOWN, WELL_KNOWN + "/mcp", WELL_KNOWN + "/mcp/"])
async def test_the_metadata_is_served_without_a_token(front: str, place: str, autojump_clock: MockClock) -> None:
    async with fronts(protected())[front] as web:
        for headers in ({}, {"Origin": "https://page.example", "Host": "elsewhere.example"}):
            answer = await web.send("GET", place, headers)
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "*")
            assert answer.json["resource"] == AT
            assert answer.json["authorization_servers"] == [ISSUER]
            assert answer.json["scopes_supported"] == ["read"]
        head = await web.send("HEAD", place)
        assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(answer.body)))
        assert (await web.send("OPTIONS", place)).status == 204
        assert (await web.send("POST", place, _POST, b"{}")).status == 405
        assert (await web.post(call("who"), headers=token("ada"))).status == 200


@pytest.mark.parametrize("front", ["http", "asgi"])
async def test_a_server_that_is_not_protected_has_no_metadata(front: str, autojump_clock: MockClock) -> None:
    async with fronts(Server("open"))[front] as web:
        assert (await web.send("GET", WELL_KNOWN)).status == 404


@req("auth-39")
async def test_an_application_under_a_prefix_is_found_by_either_url(autojump_clock: MockClock) -> None:
    app = AsgiApp(protected(resource="https://example.com/tools/mcp"))
    place = WELL_KNOWN + "/tools/mcp"
    routes = [Mount("/tools", app), Route(place, app)]
    async with hosted(Starlette(routes=routes), lifespan=False) as web, app.running():
        refused = await web.send("POST", "/tools/mcp", {**_POST, "Host": "example.com"}, b"{}")
        named = f"https://example.com/tools{WELL_KNOWN}/mcp"
        assert f'resource_metadata="{named}"' in challenge(refused)
        for path in (named.removeprefix("https://example.com"), place):
            answer = await web.send("GET", path, {"Host": "example.com"})
            assert answer.json["resource"] == "https://example.com/tools/mcp"


@req("auth-34")
async def test_the_metadata_and_challenges_take_no_host_from_the_request(autojump_clock: MockClock) -> None:
    server = protected(resource=None)
    forged = {"Host": "evil.example", "X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "gopher"}
    async with served(server, public_url="https://gate.example/a", allowed_hosts=["*"]) as web:
        refused = await web.send("POST", "/mcp", {**_POST, **forged}, b"{}")
        assert f'"https://gate.example/a{WELL_KNOWN}/mcp"' in challenge(refused)
        answer = await web.send("GET", WELL_KNOWN, forged)
        assert answer.json["resource"] == "https://gate.example/a/mcp"
        assert b"evil" not in refused.body + answer.body


async def test_the_host_of_the_resource_is_a_name_of_the_server(autojump_clock: MockClock) -> None:
    server = protected(resource="https://mcp.example.com/mcp")
    async with served(server) as web:
        for host, status in (("mcp.example.com", 200), ("other.example.com", 421)):
            assert (await web.post(call("who"), headers={**token("ada"), "Host": host})).status == status
    async with listening(server, host="0.0.0.0") as web:
        assert (await web.post(call("who"), headers=token("ada"))).status == 200


# The `verify` function


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_verifier_can_wait(is_async: bool, autojump_clock: MockClock) -> None:
    async def slowly(token: str) -> Principal | None:
        await trio.sleep(1)
        return verify(token)

    async with served(protected(verify=slowly if is_async else verify)) as web:
        assert (await web.post(call("who"), headers=token("ada"))).status == 200
        assert (await web.post(call("who"), headers=token("eve"))).status == 401


@req("auth-22")
@pytest.mark.parametrize(
    ("raised", "status", "logged"),
    [
        (lambda token: ValueError(f"what is {token}?"), 500, "what is [secret]?"),
        (lambda token: CannotVerify(f"no keys for {token}"), 503, "no keys for [secret]"),
        (None, 500, "got str"),
    ],
)
async def test_a_failing_verifier_fails_only_its_request_and_leaks_no_token(
    raised: Any, status: int, logged: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    def fails(token: str) -> Any:
        if token != SECRET + "bad":
            return verify(token)
        if raised is None:
            return "ada"
        raise raised(token)

    async with served(protected(verify=fails)) as web:
        answer = await web.post(call("who"), headers=token("bad"))
        assert answer.status == status
        assert ("Retry-After" in answer.headers) is (status == 503)
        assert "WWW-Authenticate" not in answer.headers
        assert (await web.post(call("who"), headers=token("ada"))).status == 200
    assert logged in caplog.text
    assert SECRET not in caplog.text + answer.body.decode()


async def test_requests_are_counted_for_each_principal(autojump_clock: MockClock) -> None:
    server = protected(Server("notes", limits=Limits(request_rate=1)))
    async with served(server) as web:
        answers = [await web.post(call("who"), headers=token(name)) for name in ("ada", "ada", "bob", "eve")]
        assert [answer.status for answer in answers] == [200, 429, 200, 401]


@pytest.mark.parametrize("front", ["http", "asgi"])
async def test_a_websocket_ends_with_its_token(
    front: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mcp.server.http.authentication.time.time", lambda: 1000.0)
    server = protected(verify=lambda token: Principal("ada", ["read"], expires=1060.0))
    began = trio.current_time()
    if front == "http":
        async with served(server) as web:
            socket = Socket(await web.connect(), extra_headers=[(b"Authorization", b"Bearer x")])
            async with client_on(socket, E) as wire:
                assert (await wire.call("tools/call", {"name": "who", "arguments": {}}))["content"]
                await wire.ended.wait()
    else:
        app, seen = AsgiApp(server), list[Any]()

        async def receive() -> Any:
            if not seen:
                seen.append({})
                return {"type": "websocket.connect"}
            await trio.sleep_forever()
            return None

        async def send(event: Any) -> None:
            seen.append(event)

        scope = {
            "type": "websocket", "path": "/ws", "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer x")],
        }  # fmt: skip
        async with app.running():
            await app(scope, receive, send)
        assert seen[1]["type"] == "websocket.accept"
    assert trio.current_time() - began == 60


@pytest.mark.parametrize("revision", [A, B, C, D, E])
async def test_a_standing_stream_ends_with_its_token(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mcp.server.http.authentication.time.time", lambda: 1000.0)
    expiries = {"short": 1060.0, "long": 1600.0, "ever": None}
    server = protected(verify=lambda token: Principal("ada", ["read"], expires=expiries[token]))
    async with served(server, **_SSE_OPTIONS) as web:
        for name, until in (("short", 60), ("long", 600)):
            began = trio.current_time()
            async with await standing_stream(web, revision, bearer(name)) as stream:
                with pytest.raises(Cut):
                    await read_to_end(stream)
                assert until <= trio.current_time() - began <= until + 10
        async with await standing_stream(web, revision, bearer("ever")) as stream:
            with trio.move_on_after(5000) as scope:
                await read_to_end(stream)
            assert scope.cancelled_caught


async def read_to_end(stream: Stream) -> None:
    async for _ in stream:
        pass


async def standing_stream(web: HttpClient, revision: str, headers: Any) -> Stream:
    if revision == A:
        return await web.open(path="/sse", headers=headers)
    if revision == E:
        asked = request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        return await web.open(asked, headers=headers)
    session = await web.initialize(revision, headers=headers)
    return await web.open(session=session, headers=headers)


@pytest.mark.parametrize("revision", [D, E])
async def test_a_call_outlives_its_token_and_a_stream_resumes_with_a_new_one(
    revision: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_mcp.server.http.authentication.time.time", lambda: 1000.0)
    server = protected(verify=lambda token: Principal("ada", ["read"], expires=1000 + float(token)))

    @server.tool
    async def wait(ctx: Context) -> str:
        await ctx.progress(1)
        await trio.sleep(300)
        return "waited"

    async with served(server) as web:
        session = None if revision == E else await web.initialize(revision, headers=bearer("60"))
        how: Any = {"session": session, "revision": revision}
        async with web.stream(call("wait", revision=revision, progress="p"), headers=bearer("60"), **how) as stream:
            assert (await stream.response())["result"]["content"][0]["text"] == "waited"
        if session is None:
            return
        async with web.stream(session=session, headers=bearer("60")) as stream:
            with pytest.raises(Cut):
                await stream.rest()
        began, after = trio.current_time(), stream.last_event_id
        async with web.stream(session=session, after=after, headers=bearer("600")) as stream:
            server.remove_tool("wait")
            assert (await stream.message())["method"] == "notifications/tools/list_changed"
            with pytest.raises(Cut):
                await stream.rest()
            assert 600 <= trio.current_time() - began <= 610


# Wrong uses


@pytest.mark.parametrize(
    ("how", "options", "words"),
    [
        ({"resource": None}, {}, "public_url"),
        ({}, {"authenticate": always_ada}, "authenticate cannot be used"),
    ],
)
async def test_contradictory_options_of_protect_are_refused_at_the_start(how: Any, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        async with served(protected(**how), **options):
            raise AssertionError("the server was started")


async def test_a_running_server_cannot_become_protected() -> None:
    server = Server("open")
    async with server.running():
        with pytest.raises(UsageError, match="before the server runs"):
            server.protect(verify=verify, resource=AT, authorization_servers=[ISSUER])


def test_a_server_without_an_issuer_cannot_be_protected() -> None:
    with pytest.raises(UsageError, match=r"at least one issuer, .* got \(\)"):
        Server("open").protect(verify=verify)


def test_the_scopes_of_a_tool_are_names() -> None:
    with pytest.raises(UsageError, match="the scopes of the tool 'write'"):
        Server("open").tool(scopes="write", name="write")(lambda: "")
