"""Connections to an HTTP server: URLs, proxies, CONNECT and TLS, and the errors of failed connections."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trustme
from trio.testing import MockClock

from tests.server.checkpoints import Attempt, any_task, cancel_at_each_step, unlimited_pipe
from trio_mcp import Limits, McpError, UsageError
from trio_mcp.errors import ConnectionFailed
from trio_mcp.transport import CONNECTING, HttpPool, Origin, Proxies, locate, open_nursery

HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"

# URLs.


@pytest.mark.parametrize(
    ("url", "origin", "target"),
    [
        ("http://a.test", "http://a.test", "/"),
        ("HTTPS://A.test:443/B?c=d#e", "https://a.test", "/B?c=d"),
        ("https://a.test:80/", "https://a.test:80", "/"),
        ("http://[2001:DB8::1]:8080/mcp", "http://[2001:db8::1]:8080", "/mcp"),
        ("http://[::1]", "http://[::1]", "/"),
        ("http://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.test/\xfc?\xfc", "http://xn--bcher-kva.test",
         "/%C3%BC?%C3%BC"),
        ("http://fa\N{LATIN SMALL LETTER SHARP S}.test", "http://xn--fa-hia.test", "/"),
        ("http://a_b.test./a%2Fb//c", "http://a_b.test.", "/a%2Fb//c"),
        ("http://a.test/\"<>\\^`{|}", "http://a.test", "/%22%3C%3E%5C%5E%60%7B%7C%7D"),
    ],
)  # fmt: skip
def test_a_url_has_an_origin_and_a_target(url: str, origin: str, target: str) -> None:
    where, what = locate(url)
    assert (str(where), what) == (origin, target)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "the URL is invalid"),
        ("secret", "the URL is invalid"),
        ("ftp://secret.test/", "the URL is invalid"),
        ("ws://secret.test/", "the URL is invalid"),
        ("http:///secret", "the URL is invalid"),
        ("http://secret.test:0/", "the URL is invalid"),
        ("http://secret.test:65536/", "the URL is invalid"),
        ("http://secret.test:secret/", "the URL is invalid"),
        ("http://[secret]/", "the URL is invalid"),
        ("http://[fe80::1%25secret]/", "the URL is invalid"),
        ("http://[::1/secret", "the URL is invalid"),
        ("http://sec\\ret.test/secret", "the URL is invalid"),
        ("http://.secret.test/", "the URL is invalid"),
        ("http://" + 64 * "x" + ".secret/", "the URL is invalid"),
        ("http://secret.\N{SNOWMAN}\N{COMBINING ACUTE ACCENT}-.test/", "the URL is invalid"),
        ("http://a.test/secret\ud800", "the URL is invalid"),
        ("http://secret@a.test/", "user or a password"),
        ("http://user:secret@a.test/", "user or a password"),
        ("http://a.test/secret\r\nA: b", "white space"),
        ("http://a.test/secret x", "white space"),
        ("http://a.test/?secret\0", "white space"),
        (" http://a.test/secret", "white space"),
    ],
)
def test_the_error_of_an_invalid_url_does_not_show_it(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        locate(url)
    assert "secret" not in str(caught.value)


# The choice of a proxy.


@pytest.mark.parametrize(
    ("environ", "url", "proxy"),
    [
        ({}, "https://a.test", None),
        ({"HTTPS_PROXY": "http://p.test:3128"}, "https://a.test", "p.test:3128 (HTTPS_PROXY)"),
        ({"HTTPS_PROXY": "http://p.test:3128"}, "http://a.test", None),
        ({"https_proxy": "p.test"}, "https://a.test", "p.test:80 (https_proxy)"),
        ({"https_proxy": "https://p.test/"}, "https://a.test", "p.test:443 (https_proxy)"),
        ({"https_proxy": "low.test", "HTTPS_PROXY": "up.test"}, "https://a.test", "low.test:80 (https_proxy)"),
        ({"https_proxy": "", "HTTPS_PROXY": "up.test"}, "https://a.test", "up.test:80 (HTTPS_PROXY)"),
        ({"HTTP_PROXY": "p.test:1"}, "http://a.test", "p.test:1 (HTTP_PROXY)"),
        ({"HTTP_PROXY": "p.test:1", "REQUEST_METHOD": "GET"}, "http://a.test", None),
        ({"http_proxy": "p.test:1", "REQUEST_METHOD": "GET"}, "http://a.test", "p.test:1 (http_proxy)"),
        ({"ALL_PROXY": "p.test:1"}, "http://a.test", "p.test:1 (ALL_PROXY)"),
        ({"ALL_PROXY": "p.test:1", "HTTPS_PROXY": "q.test:1"}, "https://a.test", "q.test:1 (HTTPS_PROXY)"),
        ({"ALL_PROXY": "http://[::2]:1"}, "http://a.test", "[::2]:1 (ALL_PROXY)"),
    ],
)
def test_the_environment_names_a_proxy(environ: dict[str, str], url: str, proxy: str | None) -> None:
    found = Proxies(environ).between(locate(url)[0])
    assert (found and str(found)) == (proxy and f"the proxy {proxy}")


@pytest.mark.parametrize(
    ("rules", "host", "direct"),
    [
        ("a.test", "a.test", True),
        ("A.test", "b.a.test", True),
        (".a.test", "b.a.test", True),
        ("*.a.test", "b.a.test.", True),
        ("a.test", "ba.test", False),
        ("x, a.test ,y", "a.test", True),
        ("a.test:80", "a.test", True),
        ("a.test:81", "a.test", False),
        ("*", "a.test", True),
        (",", "a.test", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.1.2.4/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("2.3", "10.1.2.3", False),
        ("[2001:db8::1]", "2001:db8::1", True),
        ("2001:db8::/32", "2001:db8::1", True),
        ("[2001:db8::1]:81", "2001:db8::1", False),
        ("", "localhost", True),
        ("", "127.0.0.9", True),
        ("", "::1", True),
        ("", "localhost.test", False),
    ],
)
def test_no_proxy_excludes_servers(rules: str, host: str, direct: bool) -> None:
    proxies = Proxies({"ALL_PROXY": "http://p.test", "no_proxy": rules})
    assert (proxies.between(Origin("http", host, 80)) is None) == direct


@pytest.mark.parametrize(
    "value", ["socks5://u:secret@p.test", "http://u:secret@", "http://u:secret@p.test:x", "http://secret@["]
)
async def test_the_error_of_an_invalid_proxy_does_not_show_its_password(value: str) -> None:
    async with HttpPool(limits=Limits(), environ={"HTTPS_PROXY": value}) as pool:
        with pytest.raises(ConnectionFailed, match=r"^HTTPS_PROXY .*NO_PROXY") as caught:
            pool.request("GET", "https://a.test", ())
        assert "secret" not in str(caught.value)


def test_credentials_for_a_proxy_are_not_in_a_repr() -> None:
    proxy = Proxies({"ALL_PROXY": "http://us%65r:s%40c:r@et@p.test"}).between(Origin("http", "a.test", 80))
    assert proxy is not None
    assert proxy.fields == "Proxy-Authorization: Basic dXNlcjpzQGM6ckBldA==\r\n"  # user:s@c:r@et
    assert "dXNlcj" not in repr(proxy)
    assert proxy.origin == Origin("http", "p.test", 80)


# Connections.

Handler = Callable[[trio.abc.Stream], Awaitable[None]]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def answer_hi(stream: trio.abc.Stream) -> None:
    """A handler that answers each request."""
    async with stream:
        while (data := await stream.receive_some()) and data.endswith(b"\r\n\r\n"):
            await stream.send_all(HI)


@asynccontextmanager
async def listening(handler: Handler, authority: trustme.CA | None = None, name: str = "a.test") -> AsyncIterator[int]:
    """Serve on loopback, with a certificate for `name` if there is an authority.  Yields the port."""
    context: ssl.SSLContext | None = None
    if authority is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["h2", "http/1.1"])
        authority.issue_cert(name).configure_cert(context)

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await handler(trio.SSLStream(stream, context, server_side=True) if context is not None else stream)
        except trio.BrokenResourceError:
            await trio.aclose_forcefully(stream)

    async with open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        yield next(each.socket.getsockname()[1] for each in listeners if each.socket.family == socket.AF_INET)


def connect_to(port: int) -> Callable[[str, int], Awaitable[trio.abc.Stream]]:
    """A function for `connect=` that connects each name to this port."""

    async def connect(host: str, _: int) -> trio.abc.Stream:
        return await trio.open_tcp_stream("127.0.0.1", port)

    return connect


async def fetch(url: str, times: int = 1, **options: Any) -> list[bytes]:
    async with HttpPool(**{"limits": Limits(), "environ": {}, **options}) as pool:
        bodies = []
        for _ in range(times):
            async with pool.request("GET", url, ()) as reply:
                bodies.append(await reply.read(100))
        return bodies


async def test_https_works_and_its_connections_are_kept(authority: trustme.CA, trusting: ssl.SSLContext) -> None:
    spoken = []

    async def handler(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, trio.SSLStream)
        await stream.do_handshake()
        spoken.append(stream.selected_alpn_protocol())
        await answer_hi(stream)

    trusting.set_alpn_protocols(["http/1.1"])
    async with listening(handler, authority) as port:
        assert await fetch("https://a.test./", 5, ssl_context=trusting, connect=connect_to(port)) == [b"hi"] * 5
    assert spoken == ["http/1.1"]


async def test_a_server_may_end_a_reply_without_a_tls_close_notify(
    authority: trustme.CA, trusting: ssl.SSLContext
) -> None:
    async def handler(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, trio.SSLStream)
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\nhi")
        await stream.transport_stream.aclose()

    async with listening(handler, authority) as port:
        assert await fetch("https://a.test/", ssl_context=trusting, connect=connect_to(port)) == [b"hi"]


async def test_the_default_context_trusts_the_system_certificates(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    spoken = []

    async def handler(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, trio.SSLStream)
        await stream.do_handshake()
        spoken.append(stream.selected_alpn_protocol())
        await answer_hi(stream)

    async with listening(handler, authority) as port:
        assert await fetch("https://a.test/", connect=connect_to(port)) == [b"hi"]
    assert spoken == ["http/1.1"]


async def test_an_invalid_certificate_is_refused_with_the_reason(
    authority: trustme.CA, trusting: ssl.SSLContext
) -> None:
    async with listening(answer_hi, authority, "b.test") as port:
        for context, why in [(trusting, "[Hh]ostname mismatch.*a.test"), (None, "unable to get local issuer")]:
            with pytest.raises(ConnectionFailed, match=f"a.test:443 is not trusted: .*{why}.*ssl_context=") as caught:
                await fetch("https://a.test/", ssl_context=context, connect=connect_to(port))
            assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)


async def test_the_error_of_a_server_without_tls_says_so(trusting: ssl.SSLContext) -> None:
    async def plain(stream: trio.abc.Stream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def silent(stream: trio.abc.Stream) -> None:
        await stream.aclose()

    for handler, why in [(plain, "does not speak TLS"), (silent, "broke the connection in the TLS handshake")]:
        async with listening(handler) as port:
            with pytest.raises(ConnectionFailed, match=f"^a.test:443 {why}"):
                await fetch("https://a.test/", ssl_context=trusting, connect=connect_to(port))


async def test_a_refused_connection_is_one_error_with_the_system_error_as_cause() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # but does not listen
        port = unused.getsockname()[1]
        with pytest.raises(ConnectionFailed, match=f"^no connection to 127.0.0.1:{port}: connection refused") as caught:
            await fetch(f"http://127.0.0.1:{port}/")
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value, McpError)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the name is unknown"),
        (OSError("all attempts failed"), "all attempts failed"),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
async def test_the_error_of_a_failed_connection_has_the_reason(error: OSError, why: str) -> None:
    async def connect(host: str, port: int) -> trio.abc.Stream:
        raise error

    with pytest.raises(ConnectionFailed, match=f"^no connection to a.test:80: {why}") as caught:
        await fetch("http://a.test/", connect=connect)
    assert caught.value.__cause__ is error


async def test_the_error_lists_each_address_once() -> None:
    async def connect(host: str, port: int) -> trio.abc.Stream:
        reasons = [OSError(113, "No route"), OSError(113, "No route"), OSError(111, "Connection refused")]
        raise OSError("all attempts to connect failed") from ExceptionGroup("several", reasons)

    with pytest.raises(ConnectionFailed, match=r"a.test:80: No route, Connection refused$"):
        await fetch("http://a.test/", connect=connect)


@pytest.mark.parametrize("url", ["http://a.test/", "https://a.test/", "https://b.test/"])
async def test_opening_a_connection_has_a_timeout(url: str, autojump_clock: MockClock) -> None:
    """The name lookup, the TLS handshake and the proxy do not answer."""
    opened = []

    async def connect(host: str, port: int) -> trio.abc.Stream:
        if url.startswith("http:"):
            await trio.sleep_forever()
        ours, theirs = unlimited_pipe()
        opened.append((ours, theirs))
        return ours

    start = trio.current_time()
    with pytest.raises(ConnectionFailed, match=r"within 30 seconds"):
        await fetch(url, connect=connect, environ={"HTTPS_PROXY": "p.test:1", "NO_PROXY": "a.test"})
    assert trio.current_time() == start + CONNECTING
    assert all(theirs._into.no_sender for _, theirs in opened)


# Through a proxy.


class Proxy:
    """A proxy on loopback to one server, which listens at `port`.  `heads` are the requests that it received."""

    def __init__(self, port: int, reply: bytes = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n") -> None:
        self.port = port
        self.reply = reply
        self.heads: list[bytes] = []

    async def __call__(self, stream: trio.abc.Stream) -> None:
        async with stream:
            data = b""
            while not data.endswith(b"\r\n\r\n"):
                data += (more := await stream.receive_some())
                if not more:
                    return
            self.heads.append(data)
            if not data.startswith(b"CONNECT"):
                await stream.send_all(HI)
                return
            await stream.send_all(self.reply)
            if b" 200 " in self.reply:
                server = await trio.open_tcp_stream("127.0.0.1", self.port)
                async with server, open_nursery() as nursery:
                    nursery.start_soon(self._forward, server, stream)
                    await self._forward(stream, server)

    async def _forward(self, one: trio.abc.Stream, other: trio.abc.Stream) -> None:
        try:
            while data := await one.receive_some():
                await other.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


@pytest.mark.parametrize("kind", ["http", "https"])
async def test_https_goes_through_a_tunnel(kind: str, authority: trustme.CA, trusting: ssl.SSLContext) -> None:
    async with listening(answer_hi, authority, "a.test") as port:
        between = Proxy(port)
        secured = authority if kind == "https" else None
        async with listening(between, secured, "127.0.0.1") as proxy:
            environ = {"HTTPS_PROXY": f"{kind}://user:secret@127.0.0.1:{proxy}"}
            assert await fetch("https://a.test/?secret", 3, ssl_context=trusting, environ=environ) == [b"hi"] * 3
    assert between.heads == [
        b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\nProxy-Authorization: Basic dXNlcjpzZWNyZXQ=\r\n\r\n"
    ]


async def test_plain_http_names_the_server_to_the_proxy() -> None:
    between = Proxy(0)
    async with listening(between) as proxy:
        environ = {"HTTP_PROXY": f"http://user:secret@127.0.0.1:{proxy}"}
        assert await fetch("http://a.test/mcp?b", environ=environ) == [b"hi"]
    assert between.heads == [
        b"GET http://a.test/mcp?b HTTP/1.1\r\nHost: a.test\r\nAccept-Encoding: identity\r\n"
        b"Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=\r\n\r\n"
    ]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"HTTP/1.1 407 Who\r\nContent-Length: 6\r\n\r\nsecret", r"requires other credentials \(407\)"),
        (b"HTTP/1.1 503 No\r\n\r\nsecret", "refused to connect to a.test:443 .503.; .*NO_PROXY"),
        (b"secret\r\n\r\n", "no HTTP reply; is it a proxy"),
        (b"HTTP/1.1 ", "ended in the middle.*is it a proxy"),
        (b"", "ended before there was a reply"),
        (b"HTTP/1.1 201 Ok\r\n\r\nsecret", "unexpected data"),
    ],
)
async def test_the_error_of_a_refusing_proxy_names_it_and_has_advice(reply: bytes, why: str) -> None:
    async with listening(Proxy(0, reply)) as port:
        environ = {"https_proxy": f"http://user:secret@127.0.0.1:{port}"}
        with pytest.raises(ConnectionFailed, match=rf"^the proxy 127.0.0.1:{port} \(https_proxy\) .*{why}") as caught:
            await fetch("https://a.test/secret", environ=environ)
        assert "secret" not in str(caught.value)


async def test_the_error_of_an_unreachable_proxy_names_the_proxy() -> None:
    async def connect(host: str, port: int) -> trio.abc.Stream:
        raise ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(
        ConnectionFailed, match=r"no connection to the proxy p.test:80 \(ALL_PROXY\): connection refused"
    ):
        await fetch("http://a.test/", connect=connect, environ={"ALL_PROXY": "p.test"})


async def test_a_connection_through_one_proxy_is_not_used_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    async def connect(host: str, port: int) -> trio.abc.Stream:
        opened.append(host)
        return await trio.open_tcp_stream("127.0.0.1", here)

    environ = {"HTTP_PROXY": "p.test", "NO_PROXY": "b.test"}
    async with listening(answer_hi) as here, HttpPool(limits=Limits(), connect=connect, environ=environ) as pool:
        for host in ("a.test", "b.test", "p.test", "a.test", "b.test"):
            async with pool.request("GET", f"http://{host}/", ()) as reply:
                await reply.read(10)
    assert opened == ["p.test", "b.test", "p.test"]


# Cancelling.


def test_cancelling_in_the_middle_of_tls_or_a_proxy_leaves_no_connection_open(
    authority: trustme.CA, trusting: ssl.SSLContext
) -> None:
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("a.test").configure_cert(served)

    async def scenario(attempt: Attempt) -> None:
        async def proxy(stream: trio.abc.Stream) -> None:
            try:
                data = b""
                while not data.endswith(b"\r\n\r\n"):
                    data += await stream.receive_some()
                await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
                await answer_hi(trio.SSLStream(stream, served, server_side=True))
            except trio.BrokenResourceError:
                pass

        ends = []

        async with open_nursery() as nursery:

            async def connect(host: str, port: int) -> trio.abc.Stream:
                await trio.lowlevel.checkpoint()
                ours, theirs = unlimited_pipe()
                ends.append(ours)
                nursery.start_soon(proxy, theirs)
                return ours

            environ = {"ALL_PROXY": "p.test"}
            pool = HttpPool(ssl_context=trusting, limits=Limits(), connect=connect, environ=environ)
            async with pool:
                with attempt.window():
                    async with pool.request("GET", "https://a.test", ()) as reply:
                        assert await reply.read(10) == b"hi"
                open_now = sum(not each._out.no_sender for each in ends)
                assert open_now == (not attempt.scope.cancelled_caught)
                async with pool.request("GET", "https://a.test", ()) as reply:
                    assert await reply.read(10) == b"hi"
            assert all(each._out.no_sender for each in ends)

    assert cancel_at_each_step(scenario, watch=any_task) > 8
