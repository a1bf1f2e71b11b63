"""`JwksVerifier`: valid and invalid access tokens that are JWTs, and the fetching of keys."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import jwt
import pytest
import trio
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.matrix import tcp_connects_to
from tests.http.client import HttpClient, request
from tests.http.served import MemoryListener, bearer, served
from tests.requirements import req
from trio_mcp import Context, Principal, Server, UsageError
from trio_mcp.errors import CannotVerify
from trio_mcp.oauth import JwksVerifier

ISSUER = "https://auth.example.com"
AT = "https://mcp.example.com/mcp"
URL = "http://127.0.0.1:9/jwks.json"
NOW = 1_000_000.0

_CURVES: dict[str, Any] = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}


@lru_cache  # RSA keys are slow to generate
def private(algorithm: str, number: int) -> Any:
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm]())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, 1024 if algorithm == "short" else 2048)


def kind(algorithm: str) -> str:
    """The kind of key for an algorithm; all algorithms of RSA use one key."""
    return "RSA" if algorithm[0] in "RP" else algorithm


def public(algorithm: str, kid: str | None = None, number: int = 0, **more: Any) -> dict[str, Any]:
    key = private(kind(algorithm), number).public_key()
    made = jwt.get_algorithm_by_name("RS256" if algorithm == "short" else algorithm).to_jwk(key, as_dict=True)
    made.pop("key_ops", None)
    return {**made, **({} if kid is None else {"kid": kid}), **more}


def signed(algorithm: str = "ES256", kid: str | None = None, number: int = 0, head: Any = None, **claims: Any) -> str:
    """A token that is valid except for these arguments."""
    whole = {"iss": ISSUER, "aud": AT, "exp": NOW + 60, "sub": "ada", "scope": "read write", **claims}
    headers = {**({} if kid is None else {"kid": kid}), **(head or {})}
    name = "RS256" if algorithm == "short" else algorithm
    return jwt.encode(whole, private(kind(algorithm), number), name, headers)


class Issuer:
    """An issuer that answers requests for its keys after `wait` seconds, and counts them in `requests`.

    The answer is `reply` if it is set, or has the `keys`.
    """

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.keys = list(keys)
        self.reply: bytes | None = None
        self.wait = 0.0
        self.requests = 0
        self.listener = MemoryListener()
        self.ssl: Any = None

    def key_set(self) -> bytes:
        body = json.dumps({"keys": self.keys}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def answer(self, stream: trio.abc.Stream) -> None:
        if self.ssl is not None:
            stream = trio.SSLStream(stream, self.ssl, server_side=True, https_compatible=True)
        with contextlib.suppress(trio.BrokenResourceError):  # a client that does not trust the certificate disconnects
            await self._serve(stream)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            await stream.receive_some()
            self.requests += 1
            reply = self.key_set() if self.reply is None else self.reply  # read before the wait
            await trio.sleep(self.wait)
            await stream.send_all(reply)


@asynccontextmanager
async def issuing(*keys: dict[str, Any]) -> AsyncIterator[Issuer]:
    issuer = Issuer(*keys)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, issuer.answer, [issuer.listener])
        with tcp_connects_to(issuer.listener.connect):
            yield issuer
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mcp.oauth.jwks.time.time", lambda: NOW)


def verifier(**how: Any) -> JwksVerifier:
    how = {"issuer": ISSUER, "audience": AT, "http_on_loopback": True, **how}
    return JwksVerifier(how.pop("url", URL), **how)


ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


# Valid and invalid tokens


@req("auth-19", "auth-47")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_a_valid_token_names_its_principal(algorithm: str, autojump_clock: MockClock) -> None:
    async with issuing(public(algorithm, "k")):
        verify = verifier()
        principal = await verify(signed(algorithm, "k", org="acme"))
        assert principal == Principal(
            "ada",
            ["read", "write"],
            NOW + 90,
            {"iss": ISSUER, "aud": AT, "exp": NOW + 60, "sub": "ada", "scope": "read write", "org": "acme"},
        )
        assert await verify(signed(algorithm, "k", number=1)) is None  # another key with the same id


@req("auth-19", "auth-21", "auth-47")
@pytest.mark.parametrize(
    ("claims", "logged"),
    [
        ({"iss": "https://evil.example"}, "it has another issuer"),
        ({"aud": "https://other.example/mcp"}, "it is for another audience"),
        ({"exp": NOW - 31}, "it has expired"),
        ({"nbf": NOW + 31}, "it is not valid yet"),
        ({"head": {"typ": "logout+jwt"}}, "it is a JWT for another purpose"),
        ({"head": {"typ": 7}}, "it is a JWT for another purpose"),
        ({"head": {"crit": ["exp"], "exp": 1}}, "it is not a signed JWT"),
        ({"head": {"b64": False, "crit": ["b64"]}}, "its signature is wrong"),
    ],
)
async def test_an_invalid_token_is_not_accepted(
    claims: Any, logged: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    async with issuing(public("ES256", "k")):
        token = signed(kid="k", **claims)
        assert await verifier()(token) is None
    assert logged in caplog.text
    assert not [part for part in token.split(".") if part and part in caplog.text]


async def test_clocks_can_differ_by_some_seconds(autojump_clock: MockClock) -> None:
    async with issuing(public("ES256", "k")):
        verify = verifier()
        for claims in ({"exp": NOW - 29}, {"nbf": NOW + 30}, {"head": {"typ": "at+JWT"}}, {"head": {"typ": None}}):
            assert await verify(signed(kid="k", **claims)) is not None
        assert await verifier(leeway=0)(signed(kid="k", exp=NOW)) is None


@pytest.mark.parametrize("audience", [AT + "/", ["api://x", "HTTPS://MCP.example.com/mcp"], {AT}])
async def test_audiences_are_compared_in_a_normalized_form(audience: Any, autojump_clock: MockClock) -> None:
    async with issuing(public("ES256", "k")):
        assert await verifier(audience=audience)(signed(kid="k")) is not None


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed_with_the_public_key() -> str:
    """The known attack: a symmetric signature with the public key as the secret."""
    key = private("RSA", 0).public_key()
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    head, claims = part({"alg": "HS256", "kid": "k", "typ": "JWT"}), part({"iss": ISSUER, "aud": AT, "exp": NOW + 60})
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    return f"{head}.{claims}.{part(algorithm.sign(f'{head}.{claims}'.encode(), pem))}"


@req("auth-28")
@pytest.mark.parametrize(
    "token",
    [
        "x",
        "a.b.c",
        "....",
        part({"alg": "none", "kid": "k"}) + "." + part({"iss": ISSUER}) + ".",
        part({"alg": ["RS256"], "kid": "k"}) + "." + part({"iss": ISSUER}) + "." + part(b"x"),
        part({"alg": "RS256", "kid": 7}) + "." + part({"iss": ISSUER}) + "." + part(b"x"),
        part(b"[" * 100_000) + "." + part({}) + "." + part(b"x"),
        signed_with_the_public_key(),
        signed("ES256", "k"),  # a key of another kind
        jwt.api_jws.encode(b"[1]", private("RSA", 0), "RS256", {"kid": "k"}),
        jwt.api_jws.encode(b"{", private("RSA", 0), "RS256", {"kid": "k"}),
        jwt.api_jws.encode(b"[" * 100_000, private("RSA", 0), "RS256", {"kid": "k"}),
    ],
)
async def test_a_forged_or_malformed_token_is_not_accepted(token: str, autojump_clock: MockClock) -> None:
    async with issuing(public("RS256", "k")):
        assert await verifier()(token) is None


async def test_only_allowed_algorithms_are_accepted(autojump_clock: MockClock) -> None:
    async with issuing(public("RS256", "k"), public("ES256", "e")):
        verify = verifier(algorithms=["ES256"])
        assert await verify(signed("ES256", "e")) is not None
        assert await verify(signed("RS256", "k")) is None


# Valid and invalid keys


@pytest.mark.parametrize(
    "key",
    [
        public("ES256", "k", alg="ES384"),
        public("ES256", "k", use="enc"),
        public("ES256", "k", x="AA"),
        public("ES256", "k", x=7),
        {"kty": "EC", "crv": "P-256", "kid": "k"},
        {"kty": "oct", "k": "AAAA", "kid": "k"},
        {"kty": ["EC"], "crv": "P-256", "kid": "k"},
        public("ES384", "k"),
    ],
)
async def test_a_key_is_used_for_its_stated_purpose_only(key: Any, autojump_clock: MockClock) -> None:
    async with issuing(key) as issuer:
        verify = verifier()
        assert await verify(signed("ES256", "k")) is None
        issuer.keys = [public("ES256", "k", alg="ES256", use="sig", d="the private part is ignored")]
        await trio.sleep(11)
        assert await verify(signed("ES256", "k")) is not None


async def test_a_too_short_key_is_not_used(autojump_clock: MockClock) -> None:
    async with issuing(public("short", "k")):
        with pytest.warns(jwt.warnings.InsecureKeyLengthWarning):
            token = signed("short", "k")
        assert await verifier()(token) is None


async def test_a_token_need_not_name_the_only_key_that_fits(autojump_clock: MockClock) -> None:
    async with issuing(public("ES256"), public("RS256", "other")) as issuer:
        verify = verifier()
        assert await verify(signed("ES256")) is not None
        assert await verify(signed("RS256")) is not None
        issuer.keys.append(public("ES256", "one too many", 1))
        await trio.sleep(601)
        await verify(signed("ES256"))
        await wait_all_tasks_blocked()
        assert await verify(signed("ES256")) is None


# Fetching keys


async def test_keys_are_fetched_once_for_all_waiting_callers(autojump_clock: MockClock) -> None:
    async with issuing(public("ES256", "k")) as issuer, trio.open_nursery() as nursery:
        issuer.wait = 5
        verify = verifier()
        found: list[Any] = []

        async def one(cancelled: bool) -> None:
            with trio.move_on_after(1 if cancelled else 30):
                found.append(await verify(signed(kid="k")))

        for number in range(20):
            nursery.start_soon(one, number == 0)  # the first caller is cancelled before the keys arrive
        await trio.sleep(6)
        assert len(found) == 19
        assert None not in found
        assert issuer.requests == 1


async def test_a_new_key_is_found_and_known_ones_do_not_wait_for_it(autojump_clock: MockClock) -> None:
    async with issuing(public("ES256", "old")) as issuer, trio.open_nursery() as nursery:
        verify = verifier()
        assert await verify(signed(kid="old")) is not None
        await trio.sleep(11)
        issuer.keys.append(public("ES256", "new", 1))
        issuer.wait = 5
        found: list[Any] = []

        async def new() -> None:
            found.append(await verify(signed(kid="new", number=1)))

        nursery.start_soon(new)
        await wait_all_tasks_blocked()
        before = trio.current_time()
        assert await verify(signed(kid="old")) is not None
        assert (trio.current_time(), found) == (before, [])
        await trio.sleep(6)
        assert [each.name for each in found] == ["ada"]
        assert issuer.requests == 2


async def test_no_fetch_begins_during_another(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_mcp.oauth.jwks._FETCH_SECONDS", 60.0)
    async with issuing(public("ES256", "k")) as issuer, trio.open_nursery() as nursery:
        issuer.wait = 30
        verify = verifier()
        for _ in range(4):
            nursery.start_soon(verify, signed(kid="k"))
            await trio.sleep(7)
        assert issuer.requests == 1


async def test_fetches_for_unknown_keys_are_limited(autojump_clock: MockClock) -> None:
    async with issuing(public("ES256", "k")) as issuer:
        verify = verifier()
        for number in range(100):
            assert await verify(signed(kid=f"made up {number}")) is None
            await trio.sleep(1)
        assert issuer.requests == 10


async def test_withdrawn_keys_are_no_longer_accepted(autojump_clock: MockClock) -> None:
    async with issuing(public("ES256", "k")) as issuer:
        verify = verifier()
        assert await verify(signed(kid="k")) is not None
        issuer.keys = [public("ES256", "other", 1)]
        await trio.sleep(599)
        assert await verify(signed(kid="k")) is not None
        assert issuer.requests == 1
        await trio.sleep(1)
        assert await verify(signed(kid="k")) is not None  # this call starts a fetch in the background
        await wait_all_tasks_blocked()
        assert await verify(signed(kid="k")) is None


BAD_REPLIES = [
    (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/x\r\nContent-Length: 0\r\n\r\n", "the status is 302"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{", "the response is not JSON"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000, "the response is not JSON"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "the response is not a key set"),
    (b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"keys":{}}', "the response is not a key set"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n", "longer than the allowed"),
    (b"nonsense\r\n\r\n", "GET http://127.0.0.1:9"),
]


@pytest.mark.parametrize(("reply", "logged"), BAD_REPLIES)
async def test_without_keys_no_token_counts_as_invalid(
    reply: bytes, logged: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with issuing(public("ES256", "k")) as issuer:
        issuer.reply = reply
        verify = verifier()
        for _ in range(2):
            with pytest.raises(CannotVerify):
                await verify(signed(kid="k"))
        assert issuer.requests == 1
        assert logged in caplog.text
        issuer.reply = None
        await trio.sleep(10)
        assert await verify(signed(kid="k")) is not None
        issuer.reply = reply
        await trio.sleep(10)
        with pytest.raises(CannotVerify):
            await verify(signed(kid="new", number=1))  # the token may be valid
        assert await verify(signed(kid="k")) is not None


async def test_an_issuer_that_does_not_answer_is_abandoned(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with issuing() as issuer:
        issuer.wait = 60
        before = trio.current_time()
        with pytest.raises(CannotVerify):
            await verifier()(signed(kid="k"))
        assert trio.current_time() - before == 10
    assert "it took too long" in caplog.text


def test_a_verifier_outlives_an_event_loop() -> None:
    verify = verifier()

    async def main(number: int) -> None:
        async with issuing(public("ES256", "k", number)) as issuer:
            for _ in range(2):
                found = await verify(signed(kid="k", number=number))
                await wait_all_tasks_blocked()
            assert found is not None
            assert issuer.requests == 1

    trio.run(main, 0, clock=MockClock(autojump_threshold=0))
    verify._fetch_began += 1e6  # clocks of event loops start at random times, so the next one may be behind
    trio.run(main, 1, clock=MockClock(autojump_threshold=0))


async def test_keys_are_fetched_over_tls(autojump_clock: MockClock) -> None:

    authority = trustme.CA()
    async with issuing(public("ES256", "k")) as issuer:
        issuer.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("auth.example.com").configure_cert(issuer.ssl)
        trusting = ssl.create_default_context()
        with pytest.raises(CannotVerify):
            await verifier(url=ISSUER + "/jwks", ssl_context=trusting)(signed(kid="k"))
        authority.configure_trust(trusting)
        assert await verifier(url=ISSUER + "/jwks", ssl_context=trusting)(signed(kid="k")) is not None


# Invalid settings


@req("auth-24", "auth-53")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"http_on_loopback": False}, "https"),
        ({"url": "http://auth.example.com/jwks"}, "https"),
        ({"url": "auth.example.com"}, "the URL is invalid"),
        ({"audience": []}, "issuer and audience must not be empty"),
        ({"audience": ""}, "issuer and audience must not be empty"),
        ({"audience": [AT, ""]}, "issuer and audience must not be empty"),
        ({"issuer": ""}, "issuer and audience must not be empty"),
        ({"algorithms": ["RS256", "HS256"]}, "got 'HS256'"),
        ({"algorithms": ["none"]}, "got 'none'"),
        ({"leeway": -1}, "leeway"),
    ],
)
def test_unsafe_settings_are_refused(how: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        verifier(**how)


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(UsageError, match=r"trio_mcp\[oauth\]"):
        verifier()


def test_the_repr_of_a_verifier_has_the_issuer() -> None:
    assert repr(verifier()) == f"<JwksVerifier for {ISSUER}>"


# With a server


async def test_a_server_is_protected_by_a_jwks_verifier(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.DEBUG)
    server = Server("notes")
    server.tool(who)
    server.protect(verify=verifier(), resource=AT, authorization_servers=[ISSUER], scopes=["read"])
    tokens = {"good": signed(kid="k"), "bad": signed(kid="k", number=1), "poor": signed(kid="k", scope="x")}
    async with served(server) as web, issuing(public("ES256", "k")) as issuer:
        issuer.reply = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
        assert await status(web, tokens["good"]) == 503
        issuer.reply = None
        await trio.sleep(10)
        assert [await status(web, tokens[each]) for each in ("good", "bad", "poor")] == [200, 401, 403]
    assert not [token for token in tokens.values() if token in caplog.text]


async def who(ctx: Context) -> str:
    return f"{ctx.principal} of {ctx._terms.principal.claims['iss']}"


async def status(web: HttpClient, token: str) -> int:
    answer = await web.post(request("tools/call", {"name": "who", "arguments": {}}), headers=bearer(token))
    if answer.status == 200:
        assert answer.result["content"][0]["text"] == f"ada of {ISSUER}"
    return answer.status
