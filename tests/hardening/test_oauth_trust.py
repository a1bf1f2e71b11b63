"""Trust of an OAuth client in URLs that hostile servers may name, and storage of tokens and keys."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import attrs
import pytest
import trio
import trustme
from trio.testing import MockClock, memory_stream_pair

from tests.client.http_script import URL, ReceivedRequest, ResponseWriter, scripted_server
from tests.client.matrix import tcp_connects_to
from tests.core.auth_server import CALLBACK, AuthServer, reply
from tests.http.auth_site import AuthSite
from tests.http.test_jwks import NOW, issuing, public, signed, verifier
from trio_mcp import McpError, OAuth, UsageError, open_client
from trio_mcp.core.oauth import Replied, SendRequest
from trio_mcp.errors import AuthorizationFailed, CannotVerify
from trio_mcp.oauth import FileTokenStore, MemoryTokenStore

# Credentials in the texts of servers.

LONG_TOKEN = "eyJhbGciOiJFUzI1NiJ9"


@pytest.mark.parametrize("url", [URL, URL.replace("http", "ws")])
@pytest.mark.parametrize(
    ("token", "words", "shown"),
    [
        ("no", "the access token is not accepted", "the access token is not accepted"),
        ("token", "the tokens are many, token. No token", "the tokens are many, [secret]. No [secret]"),
        ("a.b-c", "no a.b-c, and no xa.b-cx", "no [secret], and no xa.b-cx"),
        # A long credential is replaced even inside a word, because it cannot occur there by chance.
        (LONG_TOKEN, f"n{LONG_TOKEN}, {LONG_TOKEN[:-1]}", f"n[secret], {LONG_TOKEN[:-1]}"),
    ],
)
async def test_only_whole_credentials_are_removed_from_the_text_of_a_server(
    url: str, token: str, words: str, shown: str, autojump_clock: MockClock
) -> None:
    async def handle(received: ReceivedRequest, out: ResponseWriter) -> None:
        await out.reply(403, words.encode(), kind="text/plain")

    async with scripted_server(handle) as server:
        with tcp_connects_to(server.connect), pytest.raises(McpError) as failed:
            async with open_client(url, headers={"Authorization": f"Bearer {token}"}):
                raise AssertionError("it was opened")
    assert shown in str(failed.value)


# The file of tokens.

SERVER = "https://mcp.example/mcp"
ENTRY = {"form": 1}


async def test_the_folder_is_synced_after_the_file_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def replaced(old: str, new: str) -> None:
        done.append("replaced")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    await FileTokenStore(tmp_path / "tokens.json").set(SERVER, ENTRY)
    assert done == ["file", "replaced", "folder"]


async def test_a_lock_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / "tokens.json.lock").symlink_to(target)
    with pytest.raises(UsageError, match=r"tokens\.json\.lock must be a plain file, .* delete it"):
        await FileTokenStore(tmp_path / "tokens.json").set(SERVER, ENTRY)
    assert not target.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
async def test_a_file_of_tokens_with_access_for_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "tokens.json"
    store = FileTokenStore(file)
    await store.set(SERVER, ENTRY)
    file.chmod(mode)
    before = file.read_bytes()
    for attempt in (store.get(SERVER), store.set(SERVER, None)):
        with pytest.raises(UsageError, match=rf"mode is 0{mode:o}.*chmod 600 '?{file}") as failed:
            await attempt
        assert "allow access again" in str(failed.value)  # another user may have read it
    assert file.read_bytes() == before
    file.chmod(0o600)
    assert await store.get(SERVER) == ENTRY


# The keys of an issuer.

UNAVAILABLE = b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(("how", "seconds"), [({}, 3600), ({"max_age": 900.0}, 900), ({"max_age": math.inf}, 10**7)])
async def test_a_withdrawn_key_expires_if_its_issuer_cannot_be_reached(
    how: dict[str, float], seconds: int, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)  # the token does not expire during the test
    async with issuing(public("ES256", "k")) as issuer:
        verify = verifier(**how)
        assert await verify(signed(kid="k")) is not None
        issuer.reply = UNAVAILABLE
        await trio.sleep(seconds - 1)
        assert await verify(signed(kid="k")) is not None
        if seconds == 10**7:
            return
        await trio.sleep(1)
        with pytest.raises(CannotVerify):
            await verify(signed(kid="k"))
        issuer.reply, issuer.keys = None, [public("ES256", "other", 1)]
        await trio.sleep(10)
        assert await verify(signed(kid="k")) is None


async def test_keys_without_recent_use_are_fetched_again_before_use(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    async with issuing(public("ES256", "k")) as issuer:
        verify = verifier()
        assert await verify(signed(kid="k")) is not None
        issuer.keys = [public("ES256", "other", 1)]
        await trio.sleep(3600)
        assert await verify(signed(kid="k")) is None


@pytest.mark.parametrize("seconds", [-1, 59.9, math.nan, "60"])
def test_the_maximum_age_of_keys_has_a_minimum(seconds: object) -> None:
    with pytest.raises(UsageError, match="max_age"):
        verifier(max_age=seconds)


# URLs that servers name.  Names and addresses belong to a network in memory, and TLS is real.

MCP, HONEST, HOSTILE = "mcp.example", "as.example", "evil.example"
NAMES = [
    MCP, HONEST, HOSTILE, "accounts.example", "oauth2.example", "inside.example", "mcp.corp.example",
    "as.corp.example", "localhost", "printer.local", "10.0.0.7", "127.0.0.1", "169.254.169.254", "::1", "fd00::1",
    "fe80::1", "::ffff:10.0.0.7", "64:ff9b::a00:7",
]  # fmt: skip
PUBLIC, PRIVATE = "93.184.216.34", "10.0.0.7"


@functools.cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The TLS context of the client, and the one of all servers."""
    authority, ours, theirs = (
        trustme.CA(),
        ssl.create_default_context(),
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
    )
    authority.configure_trust(ours)
    authority.issue_cert(*NAMES).configure_cert(theirs)
    return ours, theirs


@attrs.define
class Site:
    """An MCP server with any metadata about itself."""

    named: str | None = None  # the URL of its metadata in its challenge
    metadata: dict[str, Any] | None = None
    own: AuthServer | None = None  # its own authorization server, as in 2025-03-26
    trusts: list[AuthServer] = attrs.field(factory=list)
    origin: str = f"https://{MCP}"

    def answer(self, request: SendRequest) -> Replied:
        path = urlsplit(request.url).path
        if path == "/mcp" and request.method == "POST":
            return self._call(json.loads(request.body), dict(request.headers).get("authorization", ""))
        if path.startswith("/.well-known/oauth-protected-resource"):
            return reply(404) if self.metadata is None else reply(200, self.metadata)
        return reply(405) if self.own is None else self.own.answer(request)

    def _call(self, message: dict[str, Any], authorization: str) -> Replied:
        if not any(authorization == f"Bearer {token}" for each in self.trusts for token in each.tokens):
            named = "" if self.named is None else f' resource_metadata="{self.named}"'
            return reply(401, None, WWW_Authenticate=f"Bearer{named}")
        found = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "resultType": "complete"}
        result = found if message["method"] == "server/discover" else {"tools": [], "resultType": "complete"}
        return reply(200, {"jsonrpc": "2.0", "id": message["id"], "result": result}, Content_Type="application/json")


class AddressedStream(trio.abc.Stream):
    """A connection that tells the address of its peer."""

    def __init__(self, stream: trio.abc.Stream, address: str, heard: list[bytes]) -> None:
        self._stream = stream
        self._address = address
        self._heard = heard
        self.socket = self

    def getpeername(self) -> tuple[str, int]:
        return self._address, 443

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._heard.append(bytes(data))
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


@attrs.define
class FakeNetwork:
    """A network in memory.

    `places` has the addresses of each host, and each connection gets the next one.  `heard` has the bytes that were
    sent to each host.
    """

    nursery: trio.Nursery
    sites: dict[str, AuthSite] = attrs.field(factory=dict)
    places: dict[str, list[str]] = attrs.field(factory=dict)
    heard: dict[str, list[bytes]] = attrs.field(factory=dict)
    pages: list[str] = attrs.field(factory=list)
    real: dict[str, Any] = attrs.field(factory=dict)  # functions that open real connections to these hosts

    def put(self, host: str, server: Any, *addresses: str) -> None:
        self.sites[host], self.places[host] = AuthSite(server), list(addresses or [PUBLIC])

    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if host in self.real:
            return await self.real[host](self.places[host][0], port)
        addresses = self.places.get(host, [PRIVATE])
        ours, theirs = memory_stream_pair()
        if host in self.sites:
            secured = trio.SSLStream(theirs, contexts()[1], server_side=True, https_compatible=True)
            self.nursery.start_soon(self._serve, self.sites[host], secured)
        return AddressedStream(
            ours, addresses.pop(0) if len(addresses) > 1 else addresses[0], self.heard.setdefault(host, [])
        )

    async def _serve(self, site: AuthSite, stream: trio.SSLStream[trio.abc.Stream]) -> None:
        with contextlib.suppress(
            trio.BrokenResourceError
        ):  # the client has checked the address, and closed the connection
            await site.answer(stream)

    async def visit(self, url: str) -> str:
        """The user accepts the request of the page."""
        self.pages.append(url)
        server: Any = self.sites[urlsplit(url).hostname or ""].server
        return f"{CALLBACK}?{getattr(server, 'own', server).browse(url)}"

    def auth(self, **options: Any) -> OAuth:
        return OAuth("V", visit=self.visit, redirect_uri=CALLBACK, ssl_context=contexts()[0], **options)

    async def call(self, auth: OAuth | None = None, host: str = MCP, **options: Any) -> None:
        target = f"https://{host}/mcp"
        async with open_client(target, auth=auth or self.auth(**options), ssl_context=contexts()[0]) as client:
            await client.list_tools_page()

    async def refusal(self, **options: Any) -> str:
        with pytest.raises(AuthorizationFailed) as failed:
            await self.call(**options)
        return str(failed.value)


@contextlib.asynccontextmanager
async def fake_network(site: Site, *addresses: str, host: str = MCP) -> AsyncIterator[FakeNetwork]:
    async with trio.open_nursery() as nursery:
        found = FakeNetwork(nursery)
        found.put(host, site, *addresses)
        with (
            mock.patch.object(trio, "open_tcp_stream", found.dial),
            mock.patch.dict(os.environ, {"NO_PROXY": "*"}),
            mock.patch("time.time", side_effect=lambda: NOW),
        ):
            yield found
        nursery.cancel_scope.cancel()


def site_with(*servers: AuthServer, host: str = MCP, issuer: str | None = None, **more: Any) -> Site:
    """An MCP server that names these authorization servers in its metadata."""
    issuers = [each.issuer for each in servers] if issuer is None else [issuer]
    metadata = {"resource": f"https://{host}/mcp", "authorization_servers": issuers}
    return Site(metadata=metadata, trusts=list(servers), origin=f"https://{host}", **more)


def server_at(host: str, **settings: Any) -> AuthServer:
    issuer = f"https://{host}"
    return AuthServer(**{"issuer": issuer, "iss": issuer, **settings})


# URLs in private networks, by their host or by the address that their name resolves to.
PRIVATE_URLS = {
    "https://10.0.0.7": "", "https://127.0.0.1:8443": "", "https://169.254.169.254": "", "https://[::1]": "",
    "https://[fd00::1]": "", "https://[fe80::1]": "", "https://[::ffff:10.0.0.7]": "", "https://[64:ff9b::a00:7]": "",
    "https://localhost": "", "https://printer.local": "", "https://inside.example": "10.0.0.7",
    "https://inside.example:8443": "127.0.0.1", "https://inside.example.": "192.168.1.1",
    "https://inside.example/1": "169.254.169.254", "https://inside.example/2": "::1",
    "https://inside.example/3": "fd00::1", "https://inside.example/4": "fe80::1%eth0",
    "https://inside.example/5": "::ffff:127.0.0.1", "https://inside.example/6": "64:ff9b::a00:7",
    "https://inside.example/7": "0.0.0.0", "https://inside.example/8": "100.64.0.1",
    "https://inside.example/9": "2002:a00:7::1",
}  # fmt: skip


@pytest.mark.parametrize("url", PRIVATE_URLS)
async def test_an_authorization_server_in_a_private_network_gets_no_request(
    url: str, autojump_clock: MockClock
) -> None:
    host = urlsplit(url).hostname or ""
    async with fake_network(site_with(issuer=url)) as network:
        network.places[host] = [PRIVATE_URLS[url] or host]
        why = await network.refusal()
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        assert f"and the MCP server is not; trusted_origins=['{origin}'] allows it" in why
        assert not network.heard.get(host)


@pytest.mark.parametrize("trusted", [False, True])
async def test_plain_http_on_this_machine_needs_a_server_on_this_machine(
    trusted: bool, autojump_clock: MockClock
) -> None:
    """The option that allows the scheme does not allow the network."""
    url = "http://localhost:4000"
    async with fake_network(site_with(issuer=url)) as network:
        why = await network.refusal(http_on_loopback=True, trusted_origins=[url] if trusted else [])
        assert ("which is on this machine, and the MCP server is not" in why) is not trusted
        assert bool(network.heard.get("localhost")) is trusted  # no server answers there


@pytest.mark.parametrize("url", ["https://2130706433", "https://0x7f.1", "https://127.1", "https://%31%32%37.0.0.1"])
async def test_an_obfuscated_address_is_not_a_url(url: str, autojump_clock: MockClock) -> None:
    async with fake_network(site_with(issuer=url)) as network:
        assert "is not an absolute URL" in await network.refusal()
        assert network.heard.keys() == {MCP}


PRIVATE_METADATA = ["https://10.0.0.7/metadata", "https://localhost/metadata", "https://inside.example/metadata"]


@pytest.mark.parametrize("url", PRIVATE_METADATA)
@pytest.mark.parametrize("well_known", [True, False])
async def test_metadata_in_a_private_network_is_replaced_by_the_well_known_one(
    url: str, well_known: bool, autojump_clock: MockClock
) -> None:
    server = server_at(HONEST)
    site = site_with(server, named=url)
    site.metadata = site.metadata if well_known else None
    async with fake_network(site) as network:
        network.put(HONEST, server)
        if well_known:
            await network.call()
        else:
            assert "trusted_origins=" in await network.refusal()
        assert not network.heard.get(urlsplit(url).hostname or "")


@pytest.mark.parametrize(
    ("name", "url"),
    [
        *((name, url) for name in ("token", "registration") for url in (*PRIVATE_METADATA, "https://[::1]/x")),
        # The browser resolves a name by itself, so only addresses and local names can be checked.
        *(("authorization", url) for url in ("https://10.0.0.7/x", "https://localhost/x", "https://[::1]/x")),
    ],
)
async def test_an_endpoint_in_a_private_network_gets_no_request(name: str, url: str, autojump_clock: MockClock) -> None:
    server = server_at(HONEST, metadata={f"{name}_endpoint": url})  # its metadata promises iss
    async with fake_network(site_with(server)) as network:
        network.put(HONEST, server)
        host = urlsplit(url).hostname or ""
        assert (
            f"and the MCP server is not; trusted_origins=['https://{urlsplit(url).netloc}']" in await network.refusal()
        )
        assert not network.heard.get(host)
        assert not [page for page in network.pages if host in page]


async def test_a_name_that_later_resolves_to_a_private_address_is_refused(
    autojump_clock: MockClock,
) -> None:
    server = server_at(HONEST)
    async with fake_network(site_with(server)) as network:
        network.put(HONEST, server, PUBLIC, PRIVATE)  # the metadata comes from the public address
        assert f"leads to '{PRIVATE}', which is on a private network" in await network.refusal()
        assert [each.kind for each in server.asked] == ["metadata"]


async def test_the_address_of_a_real_connection_is_checked_before_sending() -> None:
    heard: list[bytes] = []
    heard_all = trio.Event()

    async def listen(stream: trio.SocketStream) -> None:
        heard.extend([bytes(each) async for each in stream])
        heard_all.set()

    connect = trio.open_tcp_stream
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(functools.partial(trio.serve_tcp, listen, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with fake_network(site_with(issuer=f"https://inside.example:{port}")) as network:
            network.real["inside.example"], network.places["inside.example"] = connect, ["127.0.0.1"]
            assert "leads to '127.0.0.1', which is on this machine" in await network.refusal()
        await heard_all.wait()
        assert heard == []
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("server_address", "issuer_address", "options", "may"),
    [
        ("10.0.0.5", "192.168.1.1", {}, True),
        ("fd00::5", "10.0.0.6", {}, True),
        ("10.0.0.5", PUBLIC, {}, True),
        ("10.0.0.5", "127.0.0.1", {}, False),
        ("10.0.0.5", "169.254.169.254", {}, False),
        ("127.0.0.1", "10.0.0.6", {}, False),
        ("127.0.0.1", "::1", {}, True),
        (PUBLIC, "10.0.0.6", {}, False),
        (PUBLIC, "10.0.0.6", {"trusted_origins": ["https://as.corp.example:443/"]}, True),
        (PUBLIC, "127.0.0.1", {"trusted_origins": ["https://AS.corp.example"]}, True),
        (PUBLIC, "10.0.0.6", {"trusted_origins": ["https://other.corp.example"]}, False),
    ],
)
async def test_urls_in_the_network_of_the_server_or_in_trusted_origins_are_used(
    server_address: str, issuer_address: str, options: Any, may: bool, autojump_clock: MockClock
) -> None:
    server = server_at("as.corp.example")
    async with fake_network(
        site_with(server, host="mcp.corp.example"), server_address, host="mcp.corp.example"
    ) as network:
        network.put("as.corp.example", server, issuer_address)
        if may:
            await network.call(host="mcp.corp.example", **options)
        else:
            assert "trusted_origins=" in await network.refusal(host="mcp.corp.example", **options)
            assert not network.heard["as.corp.example"]


async def test_a_token_is_renewed_in_the_same_network_and_in_a_new_one(
    autojump_clock: MockClock,
) -> None:
    """A laptop may be outside of its company's network, then inside, and outside again."""
    server = server_at("as.corp.example", expires_in=1)
    store = MemoryTokenStore()
    host = "mcp.corp.example"
    async with fake_network(site_with(server, host=host), host=host) as network:
        network.put("as.corp.example", server)
        for address in (PUBLIC, PRIVATE, PRIVATE, PUBLIC):
            network.places = {host: [address], "as.corp.example": [address]}
            await network.call(network.auth(store=store), host=host)
        assert len(network.pages) == 1
        kinds = [each["grant_type"] for each in server.of("token")]
        assert kinds[0] == "authorization_code"
        assert {*kinds[1:]} == {"refresh_token"}


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_hostile_server_cannot_get_the_code_of_another_server(trusted: bool, autojump_clock: MockClock) -> None:
    honest = server_at(HONEST, iss=None)
    hostile = server_at(
        HOSTILE, iss=None, metadata={
            "authorization_endpoint": f"https://{HONEST}/authorize", "registration_endpoint": f"https://{HONEST}/register",
        }
    )  # fmt: skip
    async with fake_network(site_with(hostile)) as network:
        network.put(HONEST, honest)
        network.put(HOSTILE, hostile)
        # The trust of the application in the other server does not extend to this one.
        options = {"trusted_origins": [f"https://{HONEST}"]} if trusted else {}
        why = await network.refusal(**options)
        assert "is at another origin, and its metadata does not promise iss" in why
        assert f"trusted_origins=['https://{HOSTILE}'] allows it" in why
        assert (network.pages, honest.asked) == ([], [])
        assert {each.kind for each in hostile.asked} == {"metadata"}


@pytest.mark.parametrize("iss", [None, f"https://{HONEST}"])
async def test_a_hostile_server_gets_no_code_if_it_promises_iss(iss: str | None, autojump_clock: MockClock) -> None:
    honest = server_at(HONEST, iss=iss)
    endpoints = {f"{name}_endpoint": f"https://{HONEST}/{path}" for name, path in
                 (("authorization", "authorize"), ("registration", "register"))}  # fmt: skip
    hostile = server_at(HOSTILE, metadata=endpoints)
    async with fake_network(site_with(hostile)) as network:
        network.put(HONEST, honest)
        network.put(HOSTILE, hostile)
        assert "the answer may come from another server and was not used" in await network.refusal()
        assert len(network.pages) == 1
        assert not hostile.of("token")


@pytest.mark.parametrize("parameter", ["redirect_uri=https://evil.example/%3Fiss=x", "state=1", "client_id=x"])
async def test_an_endpoint_cannot_set_parameters_of_the_client(parameter: str, autojump_clock: MockClock) -> None:
    server = server_at(HONEST, metadata={"authorization_endpoint": f"https://{HONEST}/authorize?p=1&{parameter}"})
    async with fake_network(site_with(server)) as network:
        network.put(HONEST, server)
        assert f"has {parameter.partition('=')[0]} in its query" in await network.refusal()
        assert not network.pages


@pytest.mark.parametrize(
    ("iss", "options", "may"),
    [
        (None, {}, False),
        (None, {"trusted_origins": ["https://accounts.example"]}, True),
        (None, {"trusted_origins": ["https://oauth2.example"]}, False),  # the trusted origin must be that of the issuer
        ("https://accounts.example", {}, True),
    ],
)
async def test_endpoints_at_several_origins_need_a_trusted_issuer_or_iss(
    iss: str | None, options: Any, may: bool, autojump_clock: MockClock
) -> None:
    server = server_at("accounts.example", iss=iss, metadata={"token_endpoint": "https://oauth2.example/token"})
    async with fake_network(site_with(server)) as network:
        network.put("accounts.example", server)
        network.put("oauth2.example", server)
        if may:
            await network.call(**options)
            assert len(server.of("token")) == 1
        else:
            why = await network.refusal(**options)
            assert "trusted_origins=['https://accounts.example'] allows it" in why
            assert not server.of("token")


async def test_a_server_without_metadata_gets_tokens_only_for_its_own_resource(autojump_clock: MockClock) -> None:
    own = server_at(MCP, iss=None, expires_in=1)
    site = Site(own=own, trusts=[own])
    async with fake_network(site) as network:
        auth = network.auth()
        for _ in range(2):
            await network.call(auth)
    sent = [*own.of("authorize"), *own.of("token")]
    assert [each["resource"] for each in sent] == [f"https://{MCP}/mcp"] * len(sent)
    assert {each["grant_type"] for each in own.of("token")} == {"authorization_code", "refresh_token"}


@pytest.mark.parametrize(
    ("origins", "words"),
    [
        ("https://as.example", "must be a list"),
        (["https://as.example/tenant"], "has a path"),
        (["https://as.example?x"], "has a path or a query"),
        (["as.example"], "not an absolute URL"),
        (["http://as.example"], "is not https"),
        ([7], "is not a URL"),
    ],
)
def test_trusted_origins_must_be_origins(origins: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"trusted_origins .*{words}"):
        OAuth("V", trusted_origins=origins)
