"""The OAuth example as a real process, with servers on real sockets."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from tests.client.http_script import ScriptedHttpServer
from tests.client.oauth_network import OAuthNetwork
from tests.client.sample_server import sample_server
from tests.core.auth_server import AuthServer
from tests.server.checkpoints import PipeEnd
from trio_mcp import serve_http
from trio_mcp.errors import AuthorizationFailed, ConnectionFailed
from trio_mcp.oauth import Blame

ROOT = Path(__file__).parents[2]
CALLBACK = "http://127.0.0.1:3999/callback"


class Wire(PipeEnd):
    """A socket with the interface that `ScriptedHttpServer` needs."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    def close(self) -> None:
        stream = self._stream
        (stream if isinstance(stream, trio.SocketStream) else stream.transport_stream).socket.close()


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[OAuthNetwork]:
    mcp, issuer = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(2)]
    scheme = "http" if tls is None else "https"
    origin, authority = [f"{scheme}://127.0.0.1:{each.socket.getsockname()[1]}" for each in (mcp, issuer)]
    network = OAuthNetwork(f"{origin}/mcp", AuthServer(authority, iss=authority))
    server = sample_server()
    server.protect(verify=network.verify, resource=network.url, authorization_servers=[authority])
    async with trio.open_nursery() as nursery:
        scripted_server = ScriptedHttpServer(network.answer, nursery, lambda: (_ for _ in ()).throw(AssertionError))

        async def serve(stream: trio.SocketStream) -> None:
            wire = stream if tls is None else trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
            await scripted_server._serve(Wire(wire))

        nursery.start_soon(partial(trio.serve_listeners, serve, [issuer]))
        await nursery.start(
            lambda task_status: serve_http(server, listeners=[mcp], ssl_context=tls, task_status=task_status)
        )
        yield network
        nursery.cancel_scope.cancel()


async def run(network: OAuthNetwork, home: Path, *words: str, answers: bool = True) -> tuple[int, str, str]:
    """Run the example: its status, stdout and stderr.  The test copies the URLs in place of the user."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "oauth_client.py"), *words, network.url]
    environ = {**os.environ, "HOME": str(home)}
    with trio.fail_after(60):
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            out = b""
            async for data in process.stdout:
                out += data
                if b"to here:" in out and not network.pages:
                    network.pages.append(out.decode().splitlines()[1])
                    back = network.authority.browse(network.pages[0]) if answers else "error=access_denied"
                    await process.stdin.send_all(f"{CALLBACK}?{back}\n".encode())
            err = b"".join([bytes(data) async for data in process.stderr])
            return await process.wait(), out.decode(), err.decode()
        finally:
            process.kill()


async def test_the_user_grants_access_once_and_the_client_lists_the_tools(tmp_path: Path) -> None:
    async with listening() as network:
        for _ in range(2):
            status, out, err = await run(network, tmp_path, "--paste")
            assert (status, err) == (0, "")
            assert "house has, in 2026-07-28:" in out
            assert "  add: " in out
            network.revoke_tokens()
        assert len(network.pages) == 1
        assert network.exchange_kinds() == ["metadata", "register", "authorize", "token", "token"]


async def test_the_client_prints_the_reason_of_a_denied_access(tmp_path: Path) -> None:
    async with listening() as network:
        network.authority.denies = {"error": "access_denied"}
        status, _, err = await run(network, tmp_path, "--paste")
        assert status == 1
        assert err.startswith("There is no access, and the user can do something about it: ")
        assert "access_denied" in err
        network.pages.clear()
        status, _, err = await run(network, tmp_path, "--paste", answers=False)
        assert status == 1
        assert "the answer to another request" in err
        status, _, err = await run(network, tmp_path, "--wrong")
        assert "python examples/oauth_client.py" in err


async def test_the_authorization_server_may_have_its_own_certificates() -> None:
    authority, tls, trusting = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.configure_trust(trusting)
    with trio.fail_after(60):
        async with listening(tls) as network:
            options = {"http_on_loopback": False}
            async with network.client(network.auth(ssl_context=trusting, **options), ssl_context=trusting) as client:
                assert await client.call_tool("add", {"a": 1, "b": 2}, returns=int) == 3
            with pytest.raises(AuthorizationFailed, match=r"certificate of .* is not trusted") as failed:
                async with network.client(network.auth(**options), ssl_context=trusting):
                    raise AssertionError("it was opened")
            assert failed.value.blame is Blame.NETWORK
            assert isinstance(failed.value.__cause__, ConnectionFailed)
