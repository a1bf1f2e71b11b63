"""WebSockets over real sockets: our two ends, with TLS too, and each of them against another implementation."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.server.checkpoints import wide
from tests.server.wire import LATEST, Wire, everywhere
from trio_mcp import Context, Limits, Server, SessionClosed
from trio_mcp.http_server import serve_http
from trio_mcp.websocket_client import UpgradeRefused, WebSocketLink, connect_websocket

LARGE = 3_000_000


def serving(**options: Any) -> Server:
    server = Server("served", burst=0, **options)

    @server.tool
    async def echo(text: str, ctx: Context) -> str:
        await ctx.progress(1)
        return text

    return server


@asynccontextmanager
async def listening(server: Server, *, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Gives the URL, with the name for which there is a certificate."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address = await nursery.start(partial(serve_http, server, ssl_context=ssl_context))
            yield address.websocket_url
            nursery.cancel_scope.cancel()


def requests(revision: str, text: str) -> list[bytes]:
    """A client's part, up to a call with the id "call"."""
    wire = Wire(wide()[0], revision)
    start = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    opening = [] if wire.modern else [wire.request("initialize", start), note]
    call = wire.request("tools/call", {"name": "echo", "arguments": {"text": text}}, progress="p", id="call")
    return [json.dumps(each, ensure_ascii=False).encode() for each in (*opening, call)]


def answer(texts: Iterator[bytes | str]) -> str:
    """The text of the call's result."""
    for text in texts:
        message = json.loads(text)
        if message.get("id") == "call":
            found: str = message["result"]["content"][0]["text"]
            return found
    raise AssertionError("no answer")


async def called(link: WebSocketLink, revision: str, text: str) -> str:
    for each in requests(revision, text):
        await link.send(each)
    while True:
        came = await link.receive()
        assert came is not None, link.why
        if b'"call"' in came:
            return answer(iter([came]))


# Our two ends.


@everywhere
async def test_our_two_ends_over_tcp(revision: str) -> None:
    async with listening(serving()) as url:
        for text in ("ä€𝄞\u2028", "x" * LARGE):
            async with await connect_websocket(url) as link:
                assert await called(link, revision, text) == text
            assert link.code == 1000


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    what = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *what]
    subprocess.run([*made, "-keyout", str(key), "-out", str(chain)], check=True, capture_output=True)
    return key, chain


async def test_our_two_ends_over_tls(certificate: tuple[Path, Path]) -> None:
    key, chain = certificate
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(chain, key)
    async with listening(serving(), ssl_context=server_side) as url:
        async with await connect_websocket(url, ssl_context=ssl.create_default_context(cafile=str(chain))) as link:
            assert await called(link, LATEST, "x" * LARGE) == "x" * LARGE
        assert link.code == 1000


async def test_a_server_that_nobody_vouches_for_is_not_trusted(certificate: tuple[Path, Path]) -> None:
    key, chain = certificate
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(chain, key)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def _() -> None:
            stream = trio.SSLStream(await listener.accept(), server_side, server_side=True, https_compatible=True)
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
            await trio.aclose_forcefully(stream)

        with pytest.raises(ssl.SSLCertVerificationError):
            await connect_websocket(f"wss://127.0.0.1:{listener.socket.getsockname()[1]}/ws")
    await listener.aclose()


async def test_opening_tls_may_be_cancelled() -> None:
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

        await connect_websocket(f"wss://127.0.0.1:{listener.socket.getsockname()[1]}/ws")


async def test_who_breaks_the_rules_over_a_socket_still_hears_why() -> None:
    # Had the server closed at once with something unread, its last words might have been lost.
    async with listening(serving(limits=Limits(message_bytes=100_000))) as url, await connect_websocket(url) as link:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _() -> None:
                with suppress(SessionClosed):
                    await link.send(b"x" * LARGE)

            assert await link.receive() is None
        assert (link.code, link.why) == (
            1009,
            "the server closed the connection with code 1009: "
            "'the message is longer than 100000 bytes (Limits.message_bytes)'",
        )


# Another implementation.


def other() -> Any:
    return pytest.importorskip("websockets", reason="another implementation of WebSocket is not installed")


async def by_other_client(url: str, talk: Callable[[Any], Any], **options: Any) -> Any:
    """What `talk` makes of a connection that the other client has opened, in a thread of its own."""
    other()
    from websockets.sync.client import connect

    def run() -> Any:
        with connect(url, **{"subprotocols": ["mcp"], "proxy": None, "max_size": None, **options}) as connection:
            return talk(connection)

    return await trio.to_thread.run_sync(run)


@everywhere
async def test_another_client_uses_our_server(revision: str) -> None:
    def talk(connection: Any) -> None:
        assert connection.subprotocol == "mcp"
        assert connection.protocol.extensions == []  # it has offered to compress
        assert "permessage-deflate" in connection.request.headers["Sec-WebSocket-Extensions"]
        for text in ("ä€𝄞\u2028", "x" * LARGE):
            for each in requests(revision, text)[-1:] if text[0] == "x" else requests(revision, text):
                connection.send(each.decode())
            assert answer(iter(connection)) == text
        connection.ping(b"there?").wait(30)
        parts = requests(revision, "in parts")[-1].decode()
        connection.send(parts[at : at + 5] for at in range(0, len(parts), 5))
        assert answer(iter(connection)) == "in parts"

    async with listening(serving()) as url:
        await by_other_client(url, talk)


async def test_another_client_is_closed_with_the_code_that_tells() -> None:
    from_here = other()

    def talk(data: Any) -> Callable[[Any], tuple[int, str]]:
        def talk(connection: Any) -> tuple[int, str]:
            def exchange() -> None:
                connection.send(data)
                connection.recv()

            with pytest.raises(from_here.exceptions.ConnectionClosed) as caught:
                exchange()
            return caught.value.rcvd.code, caught.value.rcvd.reason

        return talk

    async with listening(serving(limits=Limits(message_bytes=100_000))) as url:
        assert (await by_other_client(url, talk(b"{}")))[0] == 1003
        assert (await by_other_client(url, talk("x" * LARGE)))[0] == 1009


async def test_another_client_that_is_refused_is_told_why() -> None:
    from_here = other()
    async with listening(serving()) as url:
        with pytest.raises(from_here.exceptions.InvalidStatus) as caught:
            await by_other_client(url, lambda connection: None, subprotocols=["soap"])
        assert caught.value.response.status_code == 400
        assert b"offer mcp" in caught.value.response.body
        with pytest.raises(from_here.exceptions.InvalidStatus) as caught:
            await by_other_client(url, lambda connection: None, origin="http://evil.example")
        assert caught.value.response.status_code == 403


@contextmanager
def other_server(handler: Callable[[Any], None], **options: Any) -> Iterator[str]:
    other()
    from websockets.sync.server import serve

    with serve(handler, "127.0.0.1", 0, **{"subprotocols": ["mcp"], "max_size": None, **options}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws"
        finally:
            server.shutdown()
            thread.join()


async def test_our_client_uses_another_server() -> None:
    done: list[Any] = []

    def handler(connection: Any) -> None:
        assert connection.protocol.extensions == []
        for text in connection:
            if text == "parts":
                connection.send(iter(["pa", "r", "", "ts"]))
            elif text == "ping":
                done.append(connection.ping().wait(30))
                connection.send("pinged")
            else:
                connection.send(text)
        done.append(connection.close_code)

    with other_server(handler) as url, trio.fail_after(60):
        async with await connect_websocket(url) as link:
            for text in (b"x", "ä€𝄞".encode(), b"parts", b"y" * LARGE):
                await link.send(text)
                assert await link.receive() == text
            await link.send(b"ping")
            assert await link.receive() == b"pinged"
        assert link.code == 1000
    assert done == [True, 1000]


async def test_our_client_hears_how_another_server_closes() -> None:
    def handler(connection: Any) -> None:
        connection.recv()
        connection.close(4001, "enough")

    with other_server(handler) as url, trio.fail_after(60):
        async with await connect_websocket(url) as link:
            await link.send(b"x")
            assert await link.receive() is None
            assert (link.code, link.why) == (4001, "the server closed the connection with code 4001: 'enough'")


async def test_our_client_tells_what_another_server_lacks() -> None:
    with other_server(lambda connection: None, subprotocols=None) as url, trio.fail_after(60):
        with pytest.raises(UpgradeRefused, match="no subprotocol instead of mcp"):
            await connect_websocket(url)
        with pytest.raises(UpgradeRefused, match="answered 4"):
            await connect_websocket(url, headers=(("Sec-WebSocket-Key", "twice"),))
