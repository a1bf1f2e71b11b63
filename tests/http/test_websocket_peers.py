"""WebSockets over real sockets: both ends of this package, also with TLS, and each end with another implementation."""

from __future__ import annotations

import importlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
import trustme

from tests.server.checkpoints import unlimited_pipe
from tests.server.raw_client import RawClient, every_revision
from trio_mcp import Context, Limits, Server, TextContent, open_client
from trio_mcp.errors import ConnectionFailed, SessionClosed, UpgradeRefused
from trio_mcp.server.http import serve_http

LARGE = 3_000_000
HANDSHAKE = "2025-06-18"
INFO = {"name": "other", "version": "1"}


def echo_server(**options: Any) -> Server:
    server = Server("served", change_debounce=0, **options)

    @server.tool
    async def echo(text: str, ctx: Context) -> str:
        await ctx.progress(1)
        return text

    return server


@asynccontextmanager
async def listening(server: Server, *, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The URL of the server; its host is the name in the certificate."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(partial(serve_http, server, ssl_context=ssl_context))
            yield address.websocket_url
            nursery.cancel_scope.cancel()


def requests(revision: str, text: str) -> list[bytes]:
    """The messages of a client up to a call with the id "call"."""
    wire = RawClient(unlimited_pipe()[0], revision)
    start = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    opening = [] if wire.modern else [wire.request("initialize", start), note]
    call = wire.request("tools/call", {"name": "echo", "arguments": {"text": text}}, progress="p", id="call")
    return [json.dumps(each, ensure_ascii=False).encode() for each in (*opening, call)]


def answer(texts: Iterator[bytes | str]) -> str:
    """The text in the result of the call."""
    for text in texts:
        message = json.loads(text)
        if message.get("id") == "call":
            found: str = message["result"]["content"][0]["text"]
            return found
    raise AssertionError("no answer")


# Both ends of this package


@every_revision
async def test_both_ends_work_over_tcp(revision: str) -> None:
    async with listening(echo_server()) as url, open_client(url, revision=revision) as client:
        for text in ("ä€𝄞\u2028", "x" * LARGE):
            assert await client.call_tool("echo", {"text": text}, returns=str) == text


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certified(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


async def test_both_ends_work_over_tls(authority: trustme.CA, certified: ssl.SSLContext) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with listening(echo_server(), ssl_context=certified) as url:
        assert url.startswith("wss://")
        async with open_client(url, ssl_context=trusting) as client:
            assert await client.call_tool("echo", {"text": "x" * LARGE}, returns=str) == "x" * LARGE


async def test_a_wrong_url_for_the_server_is_an_error_with_advice(certified: ssl.SSLContext) -> None:
    async with listening(echo_server(), ssl_context=certified) as secure, listening(echo_server()) as plain:
        ways: list[tuple[str, type[Exception], str]] = [
            (secure, ConnectionFailed, "certificate of .* is not trusted: .*ssl_context="),
            (secure.replace("wss:", "ws:"), SessionClosed, r"closed the connection.*not wss://$"),
            (plain.replace("ws:", "wss:"), ConnectionFailed, r"does not speak TLS; is it ws:// instead of wss://\?"),
            (plain.replace("/ws", "/mcp"), UpgradeRefused, "WebSockets are at /ws"),
            (plain.replace("/ws", "/other"), UpgradeRefused, "404.*WebSockets are at /ws"),
        ]
        for url, kind, why in ways:
            with pytest.raises(kind, match=why):
                async with open_client(url):
                    raise AssertionError("the connection was opened")


async def test_opening_tls_can_be_cancelled() -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            async with await listener.accept() as stream:
                assert await stream.receive_some()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True), suppress(trio.BrokenResourceError), trio.fail_after(30):
                    while await stream.receive_some():
                        pass

        async with open_client(f"wss://127.0.0.1:{listener.socket.getsockname()[1]}/ws"):
            raise AssertionError("the connection was opened")


async def test_a_protocol_error_over_a_socket_reaches_the_client() -> None:
    # If the server closed with unread data, a reset could destroy its close frame.
    why = (
        "^the server closed the connection with code 1009: "
        r"'the message is longer than 100000 bytes \(Limits.message_bytes\)'$"
    )
    async with listening(echo_server(limits=Limits(message_bytes=100_000))) as url, open_client(url) as client:
        with pytest.raises(SessionClosed, match=why):
            await client.call_tool("echo", {"text": "x" * LARGE})


# Another implementation


def import_websockets() -> Any:
    found = pytest.importorskip("websockets", reason="another implementation of WebSocket is not installed")
    importlib.import_module("websockets.exceptions")  # the package does not import it itself
    return found


async def with_other_client(url: str, talk: Callable[[Any], Any], **options: Any) -> Any:
    """The result of `talk` with a connection of the other client, in a thread."""
    import_websockets()
    from websockets.sync.client import connect

    def run() -> Any:
        with connect(url, **{"subprotocols": ["mcp"], "proxy": None, "max_size": None, **options}) as connection:
            return talk(connection)

    return await trio.to_thread.run_sync(run)


@every_revision
async def test_another_client_uses_our_server(revision: str) -> None:
    def talk(connection: Any) -> None:
        assert connection.subprotocol == "mcp"
        assert connection.protocol.extensions == []  # although the client offered compression
        assert "permessage-deflate" in connection.request.headers["Sec-WebSocket-Extensions"]
        for text in ("ä€𝄞\u2028", "x" * LARGE):
            for each in requests(revision, text)[-1:] if text[0] == "x" else requests(revision, text):
                connection.send(each.decode())
            assert answer(iter(connection)) == text
        connection.ping(b"there?").wait(30)
        parts = requests(revision, "in parts")[-1].decode()
        connection.send(parts[at : at + 5] for at in range(0, len(parts), 5))
        assert answer(iter(connection)) == "in parts"

    async with listening(echo_server()) as url:
        await with_other_client(url, talk)


async def test_another_client_gets_the_close_code_of_its_error() -> None:
    websockets = import_websockets()

    def talk(data: Any) -> Callable[[Any], tuple[int, str]]:
        def talk(connection: Any) -> tuple[int, str]:
            def exchange() -> None:
                connection.send(data)
                connection.recv()

            with pytest.raises(websockets.exceptions.ConnectionClosed) as caught:
                exchange()
            return caught.value.rcvd.code, caught.value.rcvd.reason

        return talk

    async with listening(echo_server(limits=Limits(message_bytes=100_000))) as url:
        assert (await with_other_client(url, talk(b"{}")))[0] == 1003
        assert (await with_other_client(url, talk("x" * LARGE)))[0] == 1009


async def test_another_client_gets_the_reason_of_a_refusal() -> None:
    websockets = import_websockets()
    async with listening(echo_server()) as url:
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            await with_other_client(url, lambda connection: None, subprotocols=["soap"])
        assert caught.value.response.status_code == 400
        assert b"offer mcp" in caught.value.response.body
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            await with_other_client(url, lambda connection: None, origin="http://evil.example")
        assert caught.value.response.status_code == 403


@contextmanager
def other_server(handler: Callable[[Any], None], **options: Any) -> Iterator[str]:
    import_websockets()
    from websockets.sync.server import serve

    with serve(handler, "127.0.0.1", 0, **{"subprotocols": ["mcp"], "max_size": None, **options}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws"
        finally:
            server.shutdown()
            thread.join()


def requests_of(connection: Any) -> Iterator[dict[str, Any]]:
    """Open the session of a client, and yield its other requests; the caller answers them with `response`."""
    for text in connection:
        message = json.loads(text)
        if message["method"] == "initialize":
            result = {"protocolVersion": HANDSHAKE, "capabilities": {"tools": {}}, "serverInfo": INFO}
            connection.send(response(message, result))
        elif "id" in message:
            yield message


def response(message: dict[str, Any], result: dict[str, Any]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}, ensure_ascii=False)


async def test_our_client_uses_another_server() -> None:
    done: list[Any] = []

    def handler(connection: Any) -> None:
        assert connection.protocol.extensions == []
        for message in requests_of(connection):
            text = message["params"]["arguments"]["text"]
            reply = response(message, {"content": [{"type": "text", "text": text}]})
            if text == "parts":
                connection.send(iter([reply[:5], reply[5:6], "", reply[6:]]))
            elif text == "ping":
                done.append(connection.ping().wait(30))
                connection.send(reply)
            else:
                connection.send(reply)
        done.append(connection.close_code)

    with other_server(handler) as url, trio.fail_after(60):
        async with open_client(url, revision=HANDSHAKE) as client:
            for text in ("x", "ä€𝄞", "parts", "y" * LARGE, "ping"):
                result = await client.call_tool("echo", {"text": text})
                assert [each.text for each in result.content if isinstance(each, TextContent)] == [text]
    assert done == [True, 1000]


async def test_our_client_gets_the_close_reason_of_another_server() -> None:
    def handler(connection: Any) -> None:
        next(requests_of(connection))
        connection.close(4001, "enough")

    with other_server(handler) as url, trio.fail_after(60):
        async with open_client(url, revision=HANDSHAKE) as client:
            with pytest.raises(SessionClosed, match=r"^the server closed the connection with code 4001: 'enough'$"):
                await client.call_tool("echo", {"text": "x"})


async def test_our_client_reports_a_missing_subprotocol_of_another_server() -> None:
    lacks = pytest.raises(UpgradeRefused, match="no subprotocol instead of mcp")
    with other_server(lambda connection: None, subprotocols=None) as url, trio.fail_after(60), lacks:
        async with open_client(url):
            raise AssertionError("the connection was opened")
