"""`serve_http` on sockets, with TLS, and in memory: addresses, the limit of connections, and the end of a server."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import ssl
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trustme
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.core.test_h1_requests import SMUGGLED
from tests.http.client import HttpClient, request
from tests.http.served import MemoryListener, listening, served
from tests.http.test_http_connection import answers, get, refusal_message
from tests.http.ws import HANDSHAKE
from tests.peers.installed import needs, tool
from tests.requirements import req
from tests.server.checkpoints import Pair, PipeEnd, _Pipe, one_byte_pipe, unwrapped
from tests.server.raw_client import LATEST
from trio_mcp import Context, Limits, Server, UsageError
from trio_mcp.server.http import HttpAddress, serve_http, serve_http_stream

D = "2025-11-25"
ECHO = {"name": "echo", "arguments": {"text": "hello"}}


class EchoServer:
    """A server with the tools `echo` and `wait`; `log` has the steps of `wait`."""

    def __init__(self, **options: Any) -> None:
        self.server = Server("stage", **options)
        self.log: list[str] = []
        self.begun = trio.Event()
        self.go = trio.Event()
        self.server.tool(self.echo)
        self.server.tool(self.wait)

    async def echo(self, text: str) -> str:
        return text

    async def wait(self, *, ctx: Context) -> str:
        self.log.append("begun")
        self.begun.set()
        try:
            await ctx.progress(1)
            await self.go.wait()
        except trio.Cancelled:
            self.log.append("cancelled")
            raise
        self.log.append("done")
        return "waited"


def text_of(answer: Any) -> str:
    text: str = answer.result["content"][0]["text"]
    return text


async def start(nursery: trio.Nursery, server: Server, *args: Any, **options: Any) -> HttpAddress:
    run = partial(serve_http, server, *args, **options)
    address: HttpAddress = await nursery.start(lambda task_status: run(task_status=task_status))
    return address


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that depends on the system, so no event signals it."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)


def web_of(address: HttpAddress, connect: Callable[[], Awaitable[trio.abc.Stream]] | None = None) -> HttpClient:
    """A client that connects to the URL of the address."""
    rest = address.url.partition("://")[2]
    host, _, path = rest.partition("/")
    name, _, port = host.rpartition(":")

    async def open_tcp() -> trio.abc.Stream:
        return await trio.open_tcp_stream(name.strip("[]"), int(port))

    return HttpClient(connect or open_tcp, path=f"/{path}", host=host)


# Addresses


@req("http-06", "sse-02")
async def test_a_server_reports_its_addresses() -> None:
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server)
        port = address.listeners[0].socket.getsockname()[1]  # type: ignore[attr-defined]
        assert port != 0
        assert address.url == f"http://127.0.0.1:{port}/mcp"
        assert address.websocket_url == f"ws://127.0.0.1:{port}/ws"
        assert address.sse_url is None
        web = web_of(address)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        await web.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("options", "url", "websocket", "sse"),
    [
        ({"path": "/a/"}, "{base}/a", "ws:{at}/ws", None),
        ({"path": "/"}, "{base}/", "ws:{at}/ws", None),
        ({"websocket_path": None}, "{base}/mcp", None, None),
        ({"websocket_path": "/socket"}, "{base}/mcp", "ws:{at}/socket", None),
        ({"sse_path": "/sse", "message_path": "/messages"}, "{base}/mcp", "ws:{at}/ws", "{base}/sse"),
        ({"public_url": "https://a.example/tools/"}, "https://a.example/tools/mcp", "wss://a.example/tools/ws", None),
        ({"public_url": "http://example.com"}, "http://example.com/mcp", "ws://example.com/ws", None),
    ],
)  # fmt: skip
async def test_the_urls_of_an_address_have_the_paths_of_its_options(
    options: dict[str, Any], url: str, websocket: str | None, sse: str | None
) -> None:
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, **options)
        at = f"//127.0.0.1:{address.listeners[0].socket.getsockname()[1]}"  # type: ignore[attr-defined]

        def filled(text: str | None) -> str | None:
            return None if text is None else text.format(base=f"http:{at}", at=at)

        assert (address.url, address.websocket_url, address.sse_url) == (filled(url), filled(websocket), filled(sse))
        assert address.local_url == f"http:{at}{options.get('path', '/mcp').rstrip('/') or '/'}"
        nursery.cancel_scope.cancel()


async def test_a_name_with_several_addresses_has_one_port() -> None:
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, "localhost")
        ports = {each.socket.getsockname()[1] for each in address.listeners}  # type: ignore[attr-defined]
        (port,) = ports
        assert address.url == f"http://localhost:{port}/mcp"
        web = web_of(address)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        await web.aclose()
        nursery.cancel_scope.cancel()


async def test_a_free_port_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    bind, taken = socket.socket.bind, 2
    ports: list[int] = []

    async def two_addresses(host: str, port: int, **options: Any) -> list[Any]:
        return [*socket.getaddrinfo("127.0.0.1", port, **options), *socket.getaddrinfo("127.0.0.2", port, **options)]

    def bind_to_a_free_port(self: socket.socket, address: tuple[str, int]) -> None:
        """Refuse the port at the second address the first `taken` times."""
        ports.append(address[1])
        if address[0] == "127.0.0.2" and ports.count(0) <= taken:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        bind(self, address)

    monkeypatch.setattr(trio.socket, "getaddrinfo", two_addresses)
    monkeypatch.setattr(socket.socket, "bind", bind_to_a_free_port)
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, "two.addresses")
        assert address.url == f"http://two.addresses:{ports[-1]}/mcp"
        assert len(address.listeners) == 2
        nursery.cancel_scope.cancel()
    assert [port == 0 for port in ports] == [True, False] * 3
    taken = 1000
    assert "another program listens there" in await start_failure(host="two.addresses")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_url_has_an_ipv6_address_in_brackets() -> None:
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, "::1")
        assert address.url.startswith("http://[::1]:")
        web = web_of(address)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        await web.aclose()
        nursery.cancel_scope.cancel()


async def start_failure(**how: Any) -> str:
    """The message of the error with which the server refuses to start."""
    with pytest.raises(UsageError) as caught, unwrapped(), trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await start(nursery, EchoServer().server, **how)
    return str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_server_on_a_public_address_needs_allowed_hosts(host: str) -> None:
    if host == "::" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    words = await start_failure(host=host)
    assert host in words
    assert "allowed_hosts" in words
    assert "public_url" in words


async def test_a_public_address_is_refused_before_the_server_starts() -> None:
    started: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        started.append("lifespan")
        yield

    with pytest.raises(UsageError, match="allowed_hosts"), trio.fail_after(60):
        await serve_http(Server("a", lifespan=lifespan), "0.0.0.0", 0)
    assert started == []


@pytest.mark.parametrize("option", [{"allowed_hosts": ["example.com"]}, {"public_url": "http://example.com"}])
async def test_a_server_on_a_public_address_accepts_only_its_name(option: dict[str, Any]) -> None:
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, "0.0.0.0", **option)
        port = address.listeners[0].socket.getsockname()[1]  # type: ignore[attr-defined]
        for host, status in (("example.com", 200), ("evil.example", 421)):
            web = HttpClient(partial(trio.open_tcp_stream, "127.0.0.1", port), host=host)
            answer = await web.post(request("tools/call", ECHO))
            assert answer.status == status
            await web.aclose()
        nursery.cancel_scope.cancel()


async def test_listeners_on_a_public_address_need_allowed_hosts() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="0.0.0.0")
    assert "allowed_hosts" in await start_failure(listeners=[listener])
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()


async def test_an_address_in_use_is_an_error_with_advice() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    words = await start_failure(port=port)
    assert f"cannot listen at 127.0.0.1:{port}" in words
    assert "choose another port" in words
    await listener.aclose()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"host": "203.0.113.1", "port": 9, "allowed_hosts": ["*"]}, "does not have that address"),
        ({"host": "no.such.name.invalid", "port": 9}, "the name is unknown"),
        ({"host": "a..b", "port": 9}, "the name is invalid"),
        ({"host": ""}, "host must be a name or an address"),
        ({"host": None}, "host must be a name or an address"),
        ({"host": "127.0.0.1:80"}, "host must be a name or an address of this machine, without a port"),
        ({"port": 70_000}, "port must be between 0 and 65535"),
        ({"port": "80"}, "port must be between 0 and 65535"),
        ({"port": True}, "port must be between 0 and 65535"),
        ({"unix": "/no/such/directory/socket"}, "cannot listen at /no/such/directory/socket: No such file"),
        ({"unix": "/tmp/" + "x" * 200}, "path too long"),
        ({"port": 9, "unix": "/tmp/x"}, "give only one"),
        ({"listeners": [], "unix": "/tmp/x"}, "give only one"),
        ({"public_url": "example.com"}, "public_url"),
        ({"keep_alive": 0}, "keep_alive"),
        ({"path": "mcp"}, "slash"),
    ],
)
async def test_invalid_options_are_refused_at_the_start(how: dict[str, Any], words: str) -> None:
    assert words in await start_failure(**how)


async def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="allowed_hosts"), unwrapped():
        async with trio.open_nursery() as nursery:
            await start(nursery, EchoServer().server, allowed_host=["a"])


# Unix sockets


async def test_a_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, unix=path)
        assert address.url == "http://localhost/mcp"
        web = web_of(address, partial(trio.open_unix_socket, path))
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        await web.aclose()
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert stat.S_ISSOCK(path.lstat().st_mode)
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, unix=str(path))
        web = web_of(address, partial(trio.open_unix_socket, path))
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        await web.aclose()
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_the_socket_of_a_running_server_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        words = await start_failure(unix=path)
        assert "another program listens there" in words
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert path.exists()


async def test_the_socket_of_a_busy_server_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as stack:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(2):  # until no further client can connect
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(path))
        assert "another program listens there" in await start_failure(unix=path)
    assert path.exists()


async def test_a_system_without_unix_sockets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    assert "this system has no Unix sockets" in await start_failure(unix="/tmp/x")


async def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    assert "not a socket" in await start_failure(unix=path)
    assert path.read_text() == "precious"


async def test_a_file_that_replaced_the_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with trio.open_nursery() as nursery:
        await start(nursery, EchoServer().server, unix=path)
        path.unlink()
        path.write_text("another file")
        nursery.cancel_scope.cancel()
    assert path.exists()


# Given listeners and connections


async def test_given_listeners_are_served_and_closed_at_the_end() -> None:
    memory, (tcp,) = MemoryListener(), await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, listeners=[memory, tcp])
        assert address.url == "http://localhost/mcp"
        assert address.listeners == (memory, tcp)
        for connect in (memory.connect, partial(trio.open_tcp_stream, *tcp.socket.getsockname()[:2])):
            web = HttpClient(connect)
            assert text_of(await web.call("tools/call", ECHO)) == "hello"
            await web.aclose()
        nursery.cancel_scope.cancel()
    for listener in (memory, tcp):
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()


async def test_a_server_with_closed_listeners_runs_until_its_connections_end() -> None:
    (tcp,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    subject = EchoServer()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            address = await start(nursery, subject.server, listeners=[tcp])
            web = web_of(address)
            assert text_of(await web.call("tools/call", ECHO)) == "hello"
            await tcp.aclose()
            assert text_of(await web.call("tools/call", ECHO)) == "hello"
            await web.aclose()


async def test_serve_http_stream_serves_one_connection() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_http_stream, EchoServer().server, theirs)

            async def connect() -> trio.abc.Stream:
                return ours

            web = HttpClient(connect)
            session = await web.initialize("2025-11-25")
            assert text_of(await web.call("tools/call", ECHO, session=session)) == "hello"
            assert text_of(await web.call("tools/call", ECHO)) == "hello"
            await web.aclose()


async def test_a_stream_is_closed_if_its_server_cannot_start() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    with pytest.raises(UsageError):
        await serve_http_stream(EchoServer().server, theirs, keep_alive=0)
    assert await ours.receive_some() == b""


class ExhaustedListener(MemoryListener):
    """A listener with `times` failures of `accept`, as in a process without free file descriptors."""

    def __init__(self, error: int, times: int) -> None:
        super().__init__()
        self.error = error
        self.times = times

    async def accept(self) -> trio.abc.Stream:
        if self.times:
            self.times -= 1
            raise OSError(self.error, os.strerror(self.error))
        return await super().accept()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
async def test_a_server_without_file_descriptors_tries_again(
    error: int, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    listener = ExhaustedListener(error, 10)
    async with trio.open_nursery() as nursery:
        await start(nursery, EchoServer().server, listeners=[listener])
        web = HttpClient(listener.connect)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        assert trio.current_time() == pytest.approx(1, abs=0.01)
        await web.aclose()
        nursery.cancel_scope.cancel()
    (record,) = caplog.records  # one record for ten failures
    assert record.levelno == logging.WARNING
    assert os.strerror(error) in record.getMessage()
    assert record.exc_info is None


async def test_a_listener_that_is_broken_ends_the_server() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"), unwrapped():
        async with trio.open_nursery() as nursery:
            await start(nursery, EchoServer().server, listeners=[ExhaustedListener(errno.EBADF, 1)])


# TLS


@pytest.fixture(scope="session")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server on loopback and of a client that trusts it."""
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    return theirs, ours


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


async def test_a_server_with_an_ssl_context_serves_tls(contexts: Contexts) -> None:
    theirs, ours = contexts
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, ssl_context=theirs)
        assert address.url.startswith("https://127.0.0.1:")
        assert (address.websocket_url or "").startswith("wss://127.0.0.1:")
        port = address.listeners[0].socket.getsockname()[1]  # type: ignore[attr-defined]

        async def connect() -> trio.abc.Stream:
            stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=ours, https_compatible=True)
            await stream.do_handshake()
            return stream

        web = web_of(address, connect)
        for _ in range(2):
            assert text_of(await web.call("tools/call", ECHO)) == "hello"
        assert len(web.links) == 1
        session = await web.initialize("2025-11-25")
        async with web.stream(session=session) as stream:
            assert stream.status == 200
        # A refusal reaches a client that is still sending, although TLS cannot close one half.
        assert (await web.send("POST", "/mcp", {"Content-Type": "text/plain"}, b"x" * 1_000_000)).status == 415
        await web.aclose()
        nursery.cancel_scope.cancel()


async def test_a_failed_tls_handshake_does_not_affect_other_clients(
    contexts: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = contexts
    caplog.set_level(logging.INFO, "trio_mcp")
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server, ssl_context=theirs)
        port = address.listeners[0].socket.getsockname()[1]  # type: ignore[attr-defined]
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b""):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(data)
                await stream.send_eof()
                while await stream.receive_some():
                    pass

        async def connect() -> trio.abc.Stream:
            return await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=ours, https_compatible=True)

        web = web_of(address, connect)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        await web.aclose()
        nursery.cancel_scope.cancel()
    assert [(record.name, record.levelname) for record in caplog.records] == [("trio_mcp.http", "INFO")] * 3
    assert caplog.messages[0] == "127.0.0.1: the TLS handshake has failed: HTTP_REQUEST"


async def test_a_tls_handshake_has_the_deadline_of_a_head(contexts: Contexts, autojump_clock: MockClock) -> None:
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        subject = EchoServer(limits=Limits(head_seconds=10))
        await start(nursery, subject.server, listeners=[listener], ssl_context=contexts[0])
        stream = await listener.connect()
        await stream.send_all(b"\x16\x03\x01")
        assert await stream.receive_some() == b""
        assert trio.current_time() == pytest.approx(10, abs=0.01)
        nursery.cancel_scope.cancel()


# The limit of connections


async def test_a_connection_over_the_limit_gets_503(autojump_clock: MockClock) -> None:
    async with served(EchoServer(limits=Limits(connections=2)).server) as web:
        links = [await web.link() for _ in range(2)]
        for link in links:
            await link.stream.send_all(b"GET")  # an idle connection would be closed to make room
        await wait_all_tasks_blocked()
        (refused,) = answers(await web.raw(get("/mcp")))
        assert (refused[0], refused[1]["connection"]) == (503, "close")
        assert "2 connections are open" in refusal_message(refused)
        assert "Limits.connections" in refusal_message(refused)
        assert json.loads(refused[2])["error"]["code"] == -32603
        assert int(refused[1]["retry-after"]) > 0
        await links[0].aclose()
        await wait_all_tasks_blocked()
        assert text_of(await web.call("tools/call", ECHO)) == "hello"


async def test_a_flood_of_connections_is_closed_without_responses(autojump_clock: MockClock) -> None:
    async with served(EchoServer(limits=Limits(connections=2)).server) as web:
        links = [await web.link() for _ in range(2)]
        for link in links:
            await link.stream.send_all(b"GET")
        await wait_all_tasks_blocked()
        links += [await web.link() for _ in range(298)]
        await trio.sleep(5)
        words = {}
        for number, link in enumerate(links):
            with trio.move_on_after(0.001):
                words[number] = b" 503 " in await link.stream.receive_some()
        assert words == {number: number < 102 for number in range(2, 300)}
        # The refused connections are closed by now, so the next one gets a response again.
        assert b" 503 " in await web.raw(get("/mcp"))


async def test_a_thousand_streams_can_be_open_at_once() -> None:
    subject = EchoServer(limits=Limits(streams=10_000))
    async with listening(subject.server) as web:
        listen = {"notifications": {"toolsListChanged": True}}
        streams = []
        for _ in range(1000):
            streams.append(await web.open(web.request("subscriptions/listen", listen)))
            assert (await streams[-1].message())["method"] == "notifications/subscriptions/acknowledged"
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
        assert subject.server.statistics().listeners == 1000
        subject.server.notify_list_changed("tools")
        for stream in streams:
            assert (await stream.message())["method"] == "notifications/tools/list_changed"
        for stream in streams:
            await stream.aclose()
        await until(lambda: subject.server.statistics().listeners == 0)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"


# Requests


@pytest.mark.parametrize("data", SMUGGLED.values(), ids=SMUGGLED)
async def test_an_ambiguous_request_is_refused_and_closes_the_connection(data: bytes) -> None:
    # Without a Content-Type the request would be refused for another reason.
    data = data.replace(b"Host: localhost\r\n", b"Host: localhost\r\nContent-Type: application/json\r\n", 1)
    subject = EchoServer()
    async with listening(subject.server) as web:
        with trio.fail_after(60):
            (answer,) = answers(await web.raw(data + get("/mcp")))
        assert (answer[0], answer[1]["connection"]) == (400, "close")
        assert refusal_message(answer)
        assert text_of(await web.call("tools/call", ECHO)) == "hello"


async def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    subject = EchoServer(limits=Limits(message_bytes=1_000_000))
    async with listening(subject.server) as web:
        for size in (10, 100_000, 1_000_001):
            answer = await web.send("POST", "/mcp", {"Content-Type": "text/plain"}, b"x" * size)
            assert answer.status in (413, 415)
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        for _ in range(20):  # repeated, because a reset would occur only sometimes
            answer = await web.send("POST", "/mcp", headers, b"x" * 3_000_000)
            assert answer.status == 413


async def test_a_reset_connection_cancels_its_call_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    subject = EchoServer()
    async with listening(subject.server) as web:
        link, _, _ = await web.begin(web.request("tools/call", {"name": "wait"}, progress=1))
        await subject.begun.wait()
        assert isinstance(link.stream, trio.SocketStream)
        link.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await link.aclose()
        await until(lambda: subject.log == ["begun", "cancelled"])
        assert text_of(await web.call("tools/call", ECHO)) == "hello"
    assert caplog.records == []


@pytest.mark.parametrize("error", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET, errno.EBADF])
async def test_an_unreachable_client_cancels_its_call_and_is_not_logged(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(fd: int, most: int) -> bytes:
        raise OSError(error, os.strerror(error))

    subject = EchoServer()
    async with listening(subject.server) as web:
        link, _, _ = await web.begin(web.request("tools/call", {"name": "wait"}, progress=1))
        await subject.begun.wait()
        with monkeypatch.context() as patch:
            patch.setattr(
                "trio_mcp.server.http.connection.os", SimpleNamespace(read=read, write=os.write, name=os.name)
            )
            await link.stream.send_all(b"x")
            await until(lambda: subject.log == ["begun", "cancelled"])
        await link.aclose()
    assert caplog.records == []


@req("cancel-14")
async def test_closing_the_stream_of_a_request_cancels_it(autojump_clock: MockClock) -> None:
    for streams in ({}, {"streams": one_byte_pipe}):
        subject = EchoServer()
        async with served(subject.server, **streams) as web:
            async with web.stream(web.request("tools/call", {"name": "wait"}, progress=1)) as stream:
                assert (await stream.message())["method"] == "notifications/progress"
            await wait_all_tasks_blocked()
            await trio.sleep(1)
            assert subject.log == ["begun", "cancelled"]


async def test_websockets_are_served_on_the_same_port() -> None:
    subject = EchoServer()
    async with listening(subject.server) as web:
        link = await web.link()
        head = "".join(f"{name}: {value}\r\n" for name, value in HANDSHAKE.items())
        for target, status in (("/ws", b"101"), ("/mcp", b"400")):  # at another path it is a plain GET
            link = await web.link()
            await link.stream.send_all(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode())
            assert (await link.stream.receive_some()).startswith(b"HTTP/1.1 " + status)
        assert subject.server.statistics().connections == 1


async def test_a_tap_of_serve_http_sees_the_bytes_of_both_directions() -> None:
    seen = {"in": bytearray(), "out": bytearray()}
    async with served(EchoServer().server, tap=lambda way, data: seen[way].extend(data)) as web:
        answer = await web.call("tools/call", ECHO)
        assert answer.body in seen["out"]
        assert seen["in"].startswith(b"POST /mcp HTTP/1.1\r\n")


async def test_an_exception_of_a_tap_ends_the_server_unchanged() -> None:
    class Mistake(Exception):
        pass

    def tap(_way: str, _data: bytes) -> None:
        raise Mistake

    listener = MemoryListener()
    stream = await listener.connect()
    await stream.send_all(get("/mcp"))
    with pytest.raises(Mistake):
        await serve_http(EchoServer().server, listeners=[listener], tap=tap)


# The end of a server


async def test_a_draining_server_finishes_its_calls_and_returns(autojump_clock: MockClock) -> None:
    subject = EchoServer()
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        ended = trio.Event()

        async def serve(task_status: trio.TaskStatus[HttpAddress]) -> None:
            await serve_http(subject.server, listeners=[listener], task_status=task_status)
            ended.set()

        await nursery.start(serve)
        web = HttpClient(listener.connect)
        idle = await web.link()
        stream = await web.open(web.request("tools/call", {"name": "wait"}, progress=1))
        assert (await stream.message())["method"] == "notifications/progress"
        changes = await web.open(web.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}}))
        await changes.message()
        began = trio.current_time()
        async with subject.server.draining(30):
            await trio.sleep(10)
            late = await HttpClient(listener.connect).call(
                "server/discover"
            )  # still accepted, because running calls may need their client
            assert (late.status, late.headers["Connection"]) == (503, "close")
            assert not ended.is_set()
            subject.go.set()
        assert await idle.stream.receive_some() == b""
        with pytest.raises(OSError):  # the listener is closed
            await listener.connect()
        assert trio.current_time() - began == pytest.approx(10, abs=0.01)
        assert [each["result"]["content"][0]["text"] for each in await stream.rest()] == ["waited"]
        assert stream.ended
        await changes.rest()
        assert changes.ended
        await ended.wait()
        await web.aclose()
    assert subject.log == ["begun", "done"]


async def test_calls_over_the_time_of_a_drain_are_cancelled(autojump_clock: MockClock) -> None:
    subject = EchoServer()
    async with served(subject.server, ends=False) as web:
        stream = await web.open(web.request("tools/call", {"name": "wait"}, progress=1))
        await stream.message()
        began = trio.current_time()
        async with subject.server.draining(30):
            pass
        assert trio.current_time() - began == pytest.approx(30, abs=0.01)
    assert subject.log == ["begun", "cancelled"]


async def test_a_server_that_starts_during_a_drain_accepts_no_connection(autojump_clock: MockClock) -> None:
    subject = EchoServer()
    async with subject.server.running(), trio.open_nursery() as nursery, subject.server.draining(5):
        with trio.fail_after(1):
            await wait_all_tasks_blocked()  # the drain of the existing connections is complete
            listener = MemoryListener()
            nursery.start_soon(partial(serve_http, subject.server, listeners=[listener]))
            await wait_all_tasks_blocked()
            with pytest.raises(OSError):
                await listener.connect()


async def test_a_connection_that_starts_during_a_drain_is_closed(autojump_clock: MockClock) -> None:
    subject = EchoServer()
    async with subject.server.running(), subject.server.draining(5):
        await wait_all_tasks_blocked()
        with trio.fail_after(1):
            await serve_http_stream(subject.server, one_byte_pipe()[1])


async def test_an_unused_server_drains_at_once(autojump_clock: MockClock) -> None:
    subject = EchoServer()
    async with served(subject.server, ends=False):
        async with subject.server.draining(30):
            pass
        assert trio.current_time() < 1


async def test_a_server_ends_with_a_shared_run(autojump_clock: MockClock) -> None:
    subject = EchoServer()
    listeners = [MemoryListener(), MemoryListener()]
    async with trio.open_nursery() as nursery:
        async with subject.server.running():
            for listener in listeners:
                await start(nursery, subject.server, listeners=[listener])
            for listener in listeners:
                web = HttpClient(listener.connect)
                stream = await web.open(web.request("tools/call", {"name": "wait"}, progress=1))
                await stream.message()
        await wait_all_tasks_blocked()
        assert nursery.child_tasks == set()
    assert subject.log == ["begun", "begun", "cancelled", "cancelled"]


def slow_reader_pipe() -> Pair:
    """A connection without a limit to the server, and with room for 50 bytes to the client until the client reads."""
    there, back = _Pipe(math.inf), _Pipe(50)
    return PipeEnd(there, back), PipeEnd(back, there)


async def refused_request(web: HttpClient, subject: EchoServer) -> bytes:
    return get("/nowhere")


async def answered_request(web: HttpClient, subject: EchoServer) -> bytes:
    return request_bytes(web, "POST", request("tools/list"), LATEST)


async def handled_request(web: HttpClient, subject: EchoServer) -> bytes:
    return request_bytes(web, "POST", request("tools/call", ECHO), LATEST)


async def resumed_request(web: HttpClient, subject: EchoServer) -> bytes:
    """A request that resumes a finished stream."""
    subject.go.set()
    session = await web.initialize(D)
    call = await web.open(request("tools/call", {"name": "wait"}, revision=D, progress=1), revision=D, session=session)
    seen = (await call.event()).id
    await call.rest()
    return request_bytes(web, "GET", None, D, {"Last-Event-ID": seen}, session)


def request_bytes(
    web: HttpClient,
    method: str,
    message: Any,
    revision: str,
    more: Mapping[str, Any] | None = None,
    session: str | None = None,
) -> bytes:
    """The bytes of a request as its client sends it."""
    body = b"" if message is None else json.dumps(message).encode()
    fields = {**web.headers_for(message, revision, session), **(more or {}), "Content-Length": len(body)}
    return get("/mcp", *(f"{name}: {value}" for name, value in fields.items() if value), method=method) + body


@pytest.mark.parametrize("request_of", [refused_request, answered_request, handled_request, resumed_request])
@pytest.mark.parametrize("how", ["cancelled", "drained", "one stream"])
async def test_a_client_that_does_not_read_delays_the_end_by_a_second(
    request_of: Callable[[HttpClient, EchoServer], Awaitable[bytes]], how: str, autojump_clock: MockClock
) -> None:
    subject, listener = EchoServer(), MemoryListener(slow_reader_pipe)
    async with trio.open_nursery() as nursery:
        await start(nursery, subject.server, listeners=[listener])
        web = HttpClient(listener.connect)
        data = await request_of(web, subject)
        await web.aclose()
        ours: trio.abc.Stream
        ours, theirs = slow_reader_pipe()
        if how == "one stream":
            nursery.start_soon(serve_http_stream, subject.server, theirs)
        else:
            ours = await listener.connect()
        await ours.send_all(data)
        await trio.sleep(7)
        began = trio.current_time()
        if how == "drained":
            async with subject.server.draining(0):
                pass
        else:
            nursery.cancel_scope.cancel()
    # A drain waits one second for the last messages, and then one second for writes in progress.
    assert trio.current_time() - began == (2 if how == "drained" else 1)


async def test_a_response_read_within_that_second_is_complete(autojump_clock: MockClock) -> None:
    subject, listener = EchoServer(), MemoryListener(slow_reader_pipe)
    async with trio.open_nursery() as nursery:
        await start(nursery, subject.server, listeners=[listener])
        client = await listener.connect()
        await client.send_all(get("/nowhere"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        raw = bytearray()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.9)
            while data := await client.receive_some():
                raw += data
    ((status, _, _),) = answers(bytes(raw))
    assert status == 404


async def test_a_cancelled_server_leaves_no_task(autojump_clock: MockClock) -> None:
    for streams in (None, one_byte_pipe):
        subject = EchoServer()
        began = trio.current_time()
        # `served` cancels the server, and checks that no task is left.
        async with served(subject.server, **({} if streams is None else {"streams": streams})) as web:
            await web.link()
            await web.open(web.request("tools/call", {"name": "wait"}, progress=1))
            await subject.begun.wait()
        assert trio.current_time() - began <= 3
        assert subject.log == ["begun", "cancelled"]


# curl


@pytest.mark.full  # curl is not on all systems
@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--http1.0"], 200),
        (["--http1.1"], 200),
        (["--http2"], 200),  # asks for an upgrade to h2c, which the server ignores
        (["-H", "Expect: 100-continue"], 200),
        (["-H", "Transfer-Encoding: chunked"], 200),
        (["-H", "Connection: close"], 200),
        (["--proxy", "{url}"], 200),  # the whole URL as the target
        (["-I", "-X", "HEAD"], 405),
        (["-X", "OPTIONS"], 204),
        (["-X", "PUT"], 405),
        (["-H", "Content-Type: text/plain"], 415),
        (["-H", "Content-Length: 3", "-H", "Transfer-Encoding: chunked"], 400),
        (["-H", "X-Long: " + "x" * 70_000], 431),
        (["-H", "Host: evil.example"], 421),
        (["-H", "Host:", "--http1.1"], 400),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
async def test_curl_gets_its_answer(options: list[str], status: int, tmp_path: Path) -> None:
    program = needs("curl", lambda: tool("curl"))
    message = tmp_path / "message"
    message.write_text(json.dumps(request("tools/call", ECHO)))
    async with trio.open_nursery() as nursery:
        address = await start(nursery, EchoServer().server)
        base = address.url.removesuffix("/mcp")
        fields = {"Accept": "application/json", "Content-Type": "application/json", "Expect": ""}
        fields |= {"MCP-Protocol-Version": LATEST, "Mcp-Method": "tools/call", "Mcp-Name": "echo"}
        given = " ".join(options).lower()
        body = [] if "-I" in options else ["--data-binary", f"@{message}"]
        done = await trio.run_process(
            [
                program, "-sS", "--max-time", "10", "-w", "\n%{http_code}", *body,
                *(part for name, value in fields.items() if f"{name.lower()}:" not in given
                  for part in ("-H", f"{name}: {value}" if value else f"{name}:")),
                *(each.format(url=base) for each in options), address.url,
            ],
            capture_stdout=True, capture_stderr=True, check=False,
            env={name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        )  # fmt: skip
        out, _, code = done.stdout.decode().rpartition("\n")
        assert int(code) == status, (out, done.stderr)
        if status == 200:
            assert '"text":"hello"' in out
        nursery.cancel_scope.cancel()


@pytest.mark.full  # curl is not on all systems
async def test_curl_reads_a_stream_incrementally(tmp_path: Path) -> None:
    program = needs("curl", lambda: tool("curl"))
    subject = EchoServer()
    message = tmp_path / "message"
    message.write_text(json.dumps(request("tools/call", {"name": "wait"}, progress=1)))
    async with trio.open_nursery() as nursery:
        address = await start(nursery, subject.server, unix=tmp_path / "socket")
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [
                    program, "-sSN", "--max-time", "10", "--unix-socket", str(tmp_path / "socket"),
                    "-H", "Content-Type: application/json", "-H", f"MCP-Protocol-Version: {LATEST}",
                    "-H", "Mcp-Method: tools/call", "-H", "Mcp-Name: wait",
                    "--data-binary", f"@{message}", address.url,
                ],
                stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        received = bytearray()
        assert process.stdout is not None
        while b"notifications/progress" not in received:
            received += await process.stdout.receive_some()
        subject.go.set()
        while data := await process.stdout.receive_some():
            received += data
        assert b'"text":"waited"' in received
        nursery.cancel_scope.cancel()


# Startup


def test_an_http_server_loads_wsproto_only_for_a_websocket() -> None:
    code = (
        "import sys, trio_mcp.server.http.listener; print(sorted({'wsproto', 'asyncio', 'anyio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
