"""The example of an OAuth proxy in front of an identity provider: the whole flow, its errors, and attacks."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.core.auth_server import AuthServer
from tests.http.asgi_servers import hosted
from tests.http.auth_site import AuthSite, auth_site
from tests.http.client import Answer, HttpClient, request
from tests.http.served import bearer
from tests.peers.programs.oauth_browser import Browser
from tests.requirements import req
from tests.server.test_example_servers import line_of, until_sigterm
from trio_mcp import OAuth, open_client
from trio_mcp.core.oauth import Replied, SendRequest
from trio_mcp.oauth import MemoryTokenStore

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
notes, kept, upstream = (import_module(f"oauth_proxy.{name}") for name in ("notes", "kept", "upstream"))

PUBLIC = "https://notes.example.com"
RESOURCE = f"{PUBLIC}/mcp"
CALLBACK = "https://app.example/back?with=query"
SECRET = "the secret of the proxy"
VERIFIER = "v" * 43
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).rstrip(b"=").decode()
PROVIDER: dict[str, Any] = {
    "path": "/.well-known/openid-configuration",
    "registers": False,
    "methods": ("client_secret_post",),
}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@attrs.define
class ProxySetup:
    """The proxy, its identity provider, and one user with a browser."""

    site: AuthSite
    web: HttpClient
    proxy: Any
    cookie: str | None = None

    async def register(self, **more: Any) -> dict[str, Any]:
        said = {"redirect_uris": [CALLBACK], "client_name": "App", "token_endpoint_auth_method": "none", **more}
        answer = await self.web.send("POST", "/register", {}, json.dumps(said).encode())
        assert answer.status == 201, answer.body
        found: dict[str, Any] = answer.json
        return found

    async def post(self, target: str, **fields: str | None) -> Answer:
        headers = {**FORM, "Cookie": self.cookie, "Authorization": fields.pop("authorization", None)}
        form = {name: value for name, value in fields.items() if value is not None}
        return await self.web.send("POST", target, headers, urlencode(form).encode())

    async def get(self, target: str, **fields: str | None) -> Answer:
        query = urlencode({name: value for name, value in fields.items() if value is not None})
        return await self.web.send("GET", f"{target}?{query}", {"Cookie": self.cookie})

    async def ask(self, client: dict[str, Any], **changes: str | None) -> Answer:
        """A client sends the user's browser to the authorization endpoint."""
        asked: dict[str, str | None] = {
            "response_type": "code",
            "client_id": client["client_id"],
            "redirect_uri": CALLBACK,
            "state": "client's state",
            "code_challenge": CHALLENGE,
            "code_challenge_method": "S256",
            "scope": "notes:read notes:write",
            "resource": RESOURCE,
        }
        answer = await self.get("/authorize", **{**asked, **changes})
        if "Set-Cookie" in answer.headers:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return answer

    async def agree(self, question: Answer, decision: str = "allow") -> Answer:
        return await self.post("/consent", ticket=ticket_of(question), decision=decision)

    def sign_in(self, answer: Answer) -> dict[str, str]:
        """The parameters with which the provider sends the browser back."""
        assert answer.status == 303, answer.body
        return dict(parse_qsl(self.site.server.browse(answer.headers["Location"])))

    async def code(self, client: dict[str, Any], **changes: str | None) -> str:
        back = self.sign_in(await self.agree(await self.ask(client, **changes)))
        return parameters_of(await self.get("/callback", **back))["code"]

    async def redeem(self, client: dict[str, Any], code: str, **changes: str | None) -> Answer:
        fields = {"grant_type": "authorization_code", "code": code, "redirect_uri": CALLBACK, "resource": RESOURCE}
        known = {"client_id": client["client_id"], "code_verifier": VERIFIER}
        return await self.post("/token", **{**fields, **known, **changes})

    async def tokens(self, client: dict[str, Any], **changes: str | None) -> dict[str, Any]:
        answer = await self.redeem(client, await self.code(client, **changes))
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    async def refresh(self, client: dict[str, Any], tokens: dict[str, Any], **changes: str | None) -> Answer:
        fields = {"grant_type": "refresh_token", "refresh_token": tokens["refresh_token"]}
        return await self.post("/token", **{**fields, "client_id": client["client_id"], **changes})

    async def call(self, tokens: dict[str, Any] | str, tool: str = "read", **arguments: str) -> Answer:
        token = tokens if isinstance(tokens, str) else tokens["access_token"]
        return await self.web.post(request("tools/call", {"name": tool, "arguments": arguments}), headers=bearer(token))


def ticket_of(question: Answer) -> str:
    assert question.status == 200, question.body
    found = re.search(r'name="ticket" value="([^"]+)"', question.body.decode())
    assert found is not None
    return found[1]


def parameters_of(answer: Answer) -> dict[str, str]:
    """The parameters for the client, which must be sent to its own redirect URI."""
    assert answer.status == 303, answer.body
    assert answer.headers["Location"].startswith(f"{CALLBACK}&")
    found = dict(parse_qsl(urlsplit(answer.headers["Location"]).query))
    assert (found.pop("with"), found.pop("iss"), found.pop("state")) == ("query", PUBLIC, "client's state")
    return found


def assert_error_page(answer: Answer, words: str) -> None:
    """The user sees an error page, and is not redirected."""
    assert (answer.status, answer.type) == (400, "text/html")
    assert words in answer.body.decode().replace("&#x27;", "'")
    assert "Location" not in answer.headers
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def assert_refused(answer: Answer, error: str, status: int = 400) -> None:
    assert (answer.status, answer.json["error"]) == (status, error)
    assert answer.headers["Cache-Control"] == "no-store"


@asynccontextmanager
async def running_proxy(**settings: Any) -> AsyncIterator[ProxySetup]:
    known = {"proxy": {"client_secret": SECRET, "redirect_uris": [f"{PUBLIC}/callback"]}}
    async with auth_site(clients=known, **PROVIDER, **settings) as site:
        for name in ("userinfo", "revocation"):
            site.server.metadata[f"{name}_endpoint"] = f"{site.issuer}/{name.replace('revocation', 'revoke')}"
        provider = await upstream.Upstream.discover(site.issuer, "proxy", SECRET, f"{PUBLIC}/callback")
        app, _ = notes.make_app(PUBLIC, provider)
        async with hosted(app) as web:
            web.headers["Host"] = "notes.example.com"
            yield ProxySetup(site, web, app.state.proxy)


# The whole flow.


@req("auth-06", "auth-11", "auth-30", "auth-33", "auth-101", "auth-102")
@pytest.mark.parametrize("method", ["none", "client_secret_post", "client_secret_basic"])
async def test_a_user_signs_in_at_the_provider_and_calls_a_tool(method: str, mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register(token_endpoint_auth_method=method)
        code = await env.code(client)
        proof: dict[str, str | None] = {}
        if method == "client_secret_post":
            proof = {"client_secret": client["client_secret"]}
        elif method == "client_secret_basic":
            pair = f"{client['client_id']}:{client['client_secret']}".encode()
            proof = {"client_id": None, "authorization": f"Basic {base64.b64encode(pair).decode()}"}
        answer = await env.redeem(client, code, **proof)
        assert answer.headers["Cache-Control"] == "no-store"
        tokens = answer.json
        assert (tokens["token_type"], tokens["scope"]) == ("Bearer", "notes:read notes:write")
        written = await env.call(tokens, "write", text="milk")
        assert written.result["content"][0]["text"] == "ada has 1 notes."
        assert (await env.call(tokens)).result["structuredContent"] == ["milk"]
        assert (await env.call(tokens, "who_am_i")).result["content"][0]["text"] == "ada"


@req("auth-09", "auth-10", "auth-36", "auth-60")
async def test_clients_of_every_revision_find_the_endpoints(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        refusal = await env.web.post(request("tools/list"))
        assert refusal.status == 401
        resource = (await env.web.send("GET", "/.well-known/oauth-protected-resource/mcp")).json
        assert (resource["resource"], resource["authorization_servers"]) == (RESOURCE, [PUBLIC])
        said = (await env.web.send("GET", "/.well-known/oauth-authorization-server")).json
        assert said["issuer"] == PUBLIC
        for name, path in (("authorization", "authorize"), ("token", "token"), ("registration", "register")):
            assert said[f"{name}_endpoint"] == f"{PUBLIC}/{path}"  # the default paths of 2025-03-26
        assert said["code_challenge_methods_supported"] == ["S256"]
        assert said["authorization_response_iss_parameter_supported"] is True


@req("auth-49", "auth-50")
async def test_neither_side_gets_a_token_of_the_other(mock_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_proxy() as env:
        client = await env.register()
        tokens = await env.tokens(client)
        theirs = [*env.site.server.tokens, *env.site.server.refresh_tokens]
        ours = [tokens["access_token"], tokens["refresh_token"]]
        assert len(theirs) == 2
        for each in theirs:
            assert each not in json.dumps(tokens)
            assert (await env.call(each)).status == 401
        await env.call(tokens, "who_am_i")
        refreshed = (await env.refresh(client, tokens)).json
        ours += [refreshed["access_token"], refreshed["refresh_token"]]
        sent = repr([(each.fields, dict(each.headers)) for each in env.site.server.asked])
        assert not [each for each in ours if each in sent]
        assert VERIFIER not in sent  # the proxy has its own PKCE at the provider
        secrets = [
            *ours,
            *theirs,
            *env.site.server.tokens,
            *env.site.server.refresh_tokens,
            SECRET,
            VERIFIER,
        ]
        held = repr(vars(env.proxy))
        assert not [each for each in secrets if each in caplog.text + held]


# Registration.


@req("auth-25", "auth-32")
@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"{", "invalid_client_metadata"),
        (b"[" * 20_000, "invalid_client_metadata"),
        (b"[]", "invalid_client_metadata"),
        ({"redirect_uris": []}, "invalid_redirect_uri"),
        ({"redirect_uris": "https://app.example"}, "invalid_redirect_uri"),
        ({"redirect_uris": ["https://app.example"] * 11}, "invalid_redirect_uri"),
        ({"redirect_uris": ["http://app.example"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["https://app.example/#x"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["https://ada@app.example/"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["https://app.example:x/"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["javascript:alert(1)"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["https:///back"]}, "invalid_redirect_uri"),
        ({"redirect_uris": ["https://app.example/" + "x" * 500]}, "invalid_redirect_uri"),
        ({"redirect_uris": [7]}, "invalid_redirect_uri"),
        ({"redirect_uris": [CALLBACK], "token_endpoint_auth_method": "tls"}, "invalid_client_metadata"),
        ({"redirect_uris": [CALLBACK], "client_name": 7}, "invalid_client_metadata"),
    ],
)
async def test_invalid_registrations_are_refused(said: Any, error: str, mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        assert_refused(await env.web.send("POST", "/register", {}, body), error)
        assert not env.proxy.clients


async def test_the_size_and_the_number_of_registrations_are_limited(
    mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oauth_proxy.proxy.MAX_CLIENTS", 2)
    async with running_proxy() as env:
        assert_refused(await env.web.send("POST", "/register", {}, b" " * 100_000), "invalid_request", 413)
        first, *_, last = [await env.register() for _ in range(3)]
        assert len(env.proxy.clients) == 2
        assert_error_page(await env.ask(first), "it has to register")
        ticket_of(await env.ask(last))


def test_a_secret_store_limits_time_and_number_and_keeps_no_secret(mock_clock: MockClock) -> None:
    async def main() -> None:
        secret_store = kept.SecretStore(10.0, max_values=2)
        secrets = [secret_store.add(number) for number in range(3)]
        assert [secret_store.get(each) for each in secrets] == [None, 1, 2]
        assert not [each for each in secrets if each in repr(vars(secret_store))]
        assert [secret_store.take(secrets[2]), secret_store.take(secrets[2])] == [2, None]
        mock_clock.jump(10)
        assert secret_store.get(secrets[1]) is None
        secret_store.add(3)
        assert len(secret_store) == 1

    trio.run(main, clock=mock_clock)


# The consent page.


@req("auth-25", "auth-32", "auth-56", "auth-57", "auth-114")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client_id": "nobody"}, "it has to register"),
        ({"client_id": None}, "it has to register"),
        ({"redirect_uri": "https://app.example/back"}, "has not said it is"),
        ({"redirect_uri": CALLBACK + "&more=1"}, "has not said it is"),
        ({"redirect_uri": "https://evil.example/"}, "has not said it is"),
        ({"redirect_uri": None}, "has not said it is"),
        ({"response_type": "token"}, "response_type is code"),
        ({"code_challenge_method": "plain"}, "PKCE is needed"),
        ({"code_challenge": None}, "PKCE is needed"),
        ({"code_challenge": "é" * 43}, "PKCE is needed"),
        ({"resource": "https://other.example/mcp"}, "tokens from here are for"),
    ],
)
async def test_an_invalid_authorization_request_gets_an_error_page(
    changes: dict[str, Any], words: str, mock_clock: MockClock
) -> None:
    async with running_proxy() as env:
        assert_error_page(await env.ask(await env.register(), **changes), words)
        assert not env.site.server.of("authorize")


async def test_a_repeated_parameter_is_refused(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        assert_error_page(await env.web.send("GET", "/authorize?client_id=a&client_id=b"), "came twice")


@req("auth-57", "auth-88", "auth-115")
async def test_the_user_is_asked_each_time_and_sees_client_and_scopes(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register(client_name='<script>"App"</script>')
        for _ in range(2):
            question = await env.ask(client)
            text = question.body.decode()
            assert "&lt;script&gt;&quot;App&quot;&lt;/script&gt;" in text
            assert "<script>" not in text
            assert "<b>https://app.example/back</b>" in text
            assert "read your notes" in text
            assert "write notes in your name" in text
            assert "on this computer" not in text
            assert "frame-ancestors 'none'" in question.headers["Content-Security-Policy"]
            cookie = question.headers["Set-Cookie"]
            assert cookie.startswith("__Host-browser=")
            assert {"Secure", "HttpOnly", "Path=/", "SameSite=lax"} <= {*cookie.split("; ")}
            assert not env.site.server.of("authorize")  # the browser was not sent to the provider
        disguised = await env.register(client_name="\u202eknab ruoY\n")
        assert "<h1>knab ruoY asks for access</h1>" in (await env.ask(disguised)).body.decode()
        nameless = await env.register(client_name="\u200b")
        assert "<h1>A program without a name asks" in (await env.ask(nameless)).body.decode()
        local = await env.register(redirect_uris=["http://127.0.0.1:3000/back"])
        question = await env.ask(local, redirect_uri="http://127.0.0.1:3000/back", scope="notes:read other")
        assert "<b>on this computer</b>" in question.body.decode()
        assert "write notes" not in question.body.decode()


async def test_the_denial_of_the_user_is_returned(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        answer = await env.agree(await env.ask(await env.register()), "deny")
        assert parameters_of(answer) == {"error": "access_denied"}
        assert not env.proxy.states._values


@req("auth-32", "auth-57")
async def test_consent_needs_the_cookie_and_the_ticket_of_the_user(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register()
        question = await env.ask(client)
        own = env.cookie
        for cookie in (None, "__Host-browser=mallory"):  # a form on another page, or in another browser
            env.cookie = cookie
            assert_error_page(await env.agree(question), "begin anew")
            env.cookie = own
            assert_error_page(await env.agree(question), "begin anew")  # the attempt made the ticket invalid
            question = await env.ask(client)
        assert_error_page(await env.post("/consent", decision="allow"), "begin anew")
        assert (await env.agree(question)).status == 303
        assert_error_page(await env.agree(question), "begin anew")
        late = await env.ask(client)
        mock_clock.jump(601)
        assert_error_page(await env.agree(late), "begin anew")


async def test_two_flows_in_one_browser_are_independent(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register()
        first, second = await env.ask(client), await env.ask(client)
        for question in (first, second):
            assert "code" in parameters_of(await env.get("/callback", **env.sign_in(await env.agree(question))))


# The return from the provider.


@req("auth-32")
async def test_a_callback_is_valid_once_and_in_the_browser_of_the_consent(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register()
        back = env.sign_in(await env.agree(await env.ask(client)))
        own, env.cookie = (
            env.cookie,
            "__Host-browser=victim",
        )  # the victim got the link of an attacker's flow
        assert_error_page(await env.get("/callback", **back), "begin anew")
        env.cookie = own
        back = env.sign_in(await env.agree(await env.ask(client)))
        assert_error_page(await env.get("/callback", **{**back, "state": "another"}), "begin anew")
        assert "code" in parameters_of(await env.get("/callback", **back))
        assert_error_page(await env.get("/callback", **back), "begin anew")
        back = env.sign_in(await env.agree(await env.ask(client)))
        mock_clock.jump(601)
        assert_error_page(await env.get("/callback", **back), "begin anew")
        assert not env.site.server.of("token")[1:]


@pytest.mark.parametrize("changes", [{"iss": "https://evil.example"}, {"iss": None}])
async def test_the_callback_of_another_server_is_refused(changes: dict[str, Any], mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        back = env.sign_in(await env.agree(await env.ask(await env.register())))
        assert_error_page(await env.get("/callback", **{**back, **changes}), "not of the server that was asked")
        assert not env.site.server.of("token")


async def test_a_provider_without_iss_in_its_metadata_need_not_send_it(mock_clock: MockClock) -> None:
    async with running_proxy(iss=None) as env:
        assert (await env.tokens(await env.register()))["access_token"]


@req("auth-32")
@pytest.mark.parametrize(
    ("error", "told"), [("access_denied", "access_denied"), ("temporarily_unavailable", "server_error")]
)
async def test_an_error_of_the_provider_is_returned_without_its_text(
    error: str, told: str, mock_clock: MockClock
) -> None:
    async with running_proxy(denies={"error": error, "error_description": "call +1 555"}) as env:
        back = env.sign_in(await env.agree(await env.ask(await env.register())))
        assert parameters_of(await env.get("/callback", **back)) == {"error": told}


@req("auth-32")
@pytest.mark.parametrize(
    ("kind", "how", "told"),
    [
        ("token", "unanswered", "temporarily_unavailable"),
        ("userinfo", "unanswered", "temporarily_unavailable"),
        ("token", "unavailable", "temporarily_unavailable"),
        ("userinfo", "unavailable", "temporarily_unavailable"),
        ("token", "redirected", "access_denied"),
        ("code", "forged", "access_denied"),
    ],
)
async def test_a_failure_of_the_provider_fails_only_this_flow(
    kind: str, how: str, told: str, mock_clock: MockClock
) -> None:
    async with running_proxy() as env:
        client = await env.register()
        back = env.sign_in(await env.agree(await env.ask(client)))
        if how in ("unanswered", "unavailable"):
            getattr(env.site, how).add(kind)
        elif how == "redirected":
            env.site.server.redirects["/token"] = f"{env.site.issuer}/elsewhere"
        else:
            env.site.server.codes[back["code"]]["code_challenge"] = "of another flow"  # an injected code
        assert parameters_of(await env.get("/callback", **back)) == {"error": told}
        env.site.unanswered.clear()
        env.site.unavailable.clear()
        env.site.server.redirects.clear()
        assert (await env.call(await env.tokens(client))).status == 200


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"issuer": "https://evil.example"}, "that of 'https://evil.example'; the issuer has to be the same"),
        ({"code_challenge_methods_supported": ["plain"]}, "does not say that it has PKCE"),
        ({"userinfo_endpoint": None}, "has no userinfo_endpoint"),
    ],
)
async def test_a_provider_needs_valid_metadata_and_pkce(metadata: dict[str, Any], why: str) -> None:
    metadata = {"userinfo_endpoint": "https://evil.example/userinfo", **metadata}
    async with auth_site(path="/.well-known/openid-configuration", metadata=metadata) as site:
        with pytest.raises(upstream.Refused, match=why):
            await upstream.Upstream.discover(site.issuer, "proxy", SECRET, f"{PUBLIC}/callback")
        with pytest.raises(upstream.Refused, match=r"there is no metadata at .* .status 404"):
            await upstream.Upstream.discover(f"{site.issuer}/other", "proxy", SECRET, f"{PUBLIC}/callback")
    with pytest.raises(upstream.Refused, match="not https"):
        await upstream.Upstream.discover("http://login.example.com", "proxy", SECRET, f"{PUBLIC}/callback")


async def test_the_endpoints_of_a_provider_may_have_a_query(
    mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(server: AuthServer, request: SendRequest) -> Replied:
        asked.append(urlsplit(request.url)[2:4])
        return answered(server, request)

    answered = AuthServer.answer
    async with running_proxy() as env:
        for name in ("authorization", "token", "userinfo"):
            env.proxy.upstream.metadata[f"{name}_endpoint"] += "?tenant=one"
        monkeypatch.setattr(AuthServer, "answer", answer)
        await env.code(await env.register())
        assert asked == [("/token", "tenant=one"), ("/userinfo", "tenant=one")]
        assert env.site.server.of("authorize")[0]["tenant"] == "one"


# Codes and tokens.


@req("auth-25", "auth-28", "auth-29")
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"code": "another"}, "invalid_grant"),
        ({"code_verifier": "w" * 43}, "invalid_grant"),
        ({"code_verifier": None}, "invalid_grant"),
        ({"redirect_uri": "https://app.example/back"}, "invalid_grant"),
        ({"redirect_uri": None}, "invalid_grant"),
        ({"resource": "https://other.example/mcp"}, "invalid_target"),
        ({"grant_type": "password"}, "unsupported_grant_type"),
        ({"grant_type": None}, "unsupported_grant_type"),
    ],
)
async def test_a_code_is_valid_only_for_its_own_request(changes: Any, error: str, mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register()
        fields = {"code": await env.code(client), **changes}
        assert_refused(await env.redeem(client, **fields), error)
        assert len(env.proxy.access_tokens) == 0


@req("auth-06", "auth-33")
async def test_a_client_must_authenticate_as_it_has_registered(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        public, other = await env.register(), await env.register()
        post = await env.register(token_endpoint_auth_method="client_secret_post")
        code = await env.code(public)
        assert_refused(await env.redeem(other, code), "invalid_grant")
        basic = base64.b64encode(f"{post['client_id']}:{post['client_secret']}".encode()).decode()
        wrong: list[dict[str, str | None]] = [
            {"client_id": None},
            {"client_id": "nobody"},
            {"client_secret": "a public one has none"},
            {"client_id": post["client_id"]},
            {"client_id": post["client_id"], "client_secret": "wrong"},
            {"client_id": None, "authorization": f"Basic {basic}"},  # it has registered another method
            {"client_id": None, "authorization": "Basic ="},
        ]
        for changes in wrong:
            answer = await env.redeem(public, code, **changes)
            assert_refused(answer, "invalid_client", 401)
            assert answer.headers["WWW-Authenticate"] == "Basic"
        assert (await env.redeem(public, code)).status == 200


@req("auth-28")
async def test_a_code_that_is_used_twice_revokes_its_tokens(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register()
        code = await env.code(client)
        tokens = (await env.redeem(client, code)).json
        assert (await env.call(tokens)).status == 200
        assert_refused(await env.redeem(client, code), "invalid_grant")
        assert (await env.call(tokens)).status == 401
        assert_refused(await env.refresh(client, tokens), "invalid_grant")
        late = await env.code(client)
        mock_clock.jump(61)
        assert_refused(await env.redeem(client, late), "invalid_grant")


@req("auth-23", "auth-31", "auth-51", "auth-52")
async def test_tokens_live_for_minutes_and_are_renewed_at_the_provider(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client = await env.register()
        first = await env.tokens(client)
        assert first["expires_in"] == 600
        mock_clock.jump(601)
        assert (await env.call(first)).status == 401
        second = (await env.refresh(client, first)).json
        assert [each["grant_type"] for each in env.site.server.of("token")][1:] == ["refresh_token"]
        assert (await env.call(second)).status == 200
        narrow = (await env.refresh(client, second, scope="notes:read admin")).json
        assert narrow["scope"] == "notes:read"
        assert (await env.call(narrow, "write", text="x")).status == 403
        assert_refused(await env.refresh(client, first), "invalid_grant")  # it was used twice, so it may be stolen
        assert (await env.call(narrow)).status == 401
        assert_refused(await env.refresh(client, narrow), "invalid_grant")
        mock_clock.jump(31 * 86400)
        old = await env.tokens(client)
        mock_clock.jump(31 * 86400)
        assert_refused(await env.refresh(client, old), "invalid_grant")


@req("auth-31", "auth-32")
@pytest.mark.parametrize("refreshes", [True, False])
async def test_tokens_end_when_the_provider_revokes_its_tokens(refreshes: bool, mock_clock: MockClock) -> None:
    async with running_proxy(refreshes=refreshes) as env:
        client = await env.register()
        tokens = await env.tokens(client)
        env.site.unanswered |= {"token", "userinfo"}
        assert_refused(await env.refresh(client, tokens), "temporarily_unavailable", 503)
        assert (await env.call(tokens, "who_am_i")).result["isError"]
        env.site.unanswered.clear()
        tokens = (await env.refresh(client, tokens)).json  # the failed refresh did no harm
        env.site.server.expire()
        if refreshes:  # the provider's token expires before ours
            assert (await env.call(tokens, "who_am_i")).result["content"][0]["text"] == "ada"
            env.site.server.refresh_tokens.clear()
        env.site.server.expire()
        if refreshes:
            assert_refused(await env.refresh(client, tokens), "invalid_grant")
        else:
            assert (await env.call(tokens, "who_am_i")).result["isError"]
        assert (await env.call(tokens)).status == 401


async def test_a_provider_may_keep_its_refresh_token(mock_clock: MockClock) -> None:
    async with running_proxy(rotates=False) as env:
        client = await env.register()
        tokens = await env.tokens(client)
        for _ in range(3):
            tokens = (await env.refresh(client, tokens)).json
            assert (await env.call(tokens, "who_am_i")).result["content"][0]["text"] == "ada"
        kept_there = [each["refresh_token"] for each in env.site.server.of("token")[1:]]
        assert len(kept_there) == 3
        assert len({*kept_there}) == 1


async def test_concurrent_calls_renew_the_tokens_of_the_provider_once(mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        tokens = await env.tokens(await env.register())
        env.site.server.expire()
        found: list[str] = []

        async def ask() -> None:
            found.append((await env.call(tokens, "who_am_i")).result["content"][0]["text"])

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert found == ["ada"] * 5
        assert [each["grant_type"] for each in env.site.server.of("token")][1:] == ["refresh_token"]


@pytest.mark.parametrize("which", ["access_token", "refresh_token"])
async def test_a_revoked_token_is_also_revoked_at_the_provider(which: str, mock_clock: MockClock) -> None:
    async with running_proxy() as env:
        client, other = await env.register(), await env.register()
        tokens = await env.tokens(client)
        known = {"client_id": client["client_id"]}
        assert_refused(await env.post("/revoke", token=tokens[which], client_id="nobody"), "invalid_client", 401)
        assert (await env.post("/revoke", token=tokens[which], client_id=other["client_id"])).status == 200
        assert (await env.post("/revoke", token="another", **known)).status == 200
        assert (await env.call(tokens)).status == 200
        assert not env.site.server.of("revoke")
        assert (await env.post("/revoke", token=tokens[which], **known)).status == 200
        assert (await env.call(tokens)).status == 401
        assert_refused(await env.refresh(client, tokens), "invalid_grant")
        assert not env.site.server.refresh_tokens
        env.site.unanswered.add("revoke")
        tokens = await env.tokens(client)
        assert (await env.post("/revoke", token=tokens[which], **known)).status == 200
        assert (await env.call(tokens)).status == 401


# As a user runs it.


@asynccontextmanager
async def proxy_before(site: AuthSite) -> AsyncIterator[str]:
    """The URL of the MCP server in the example, run as a user runs it, with this site as the provider."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()  # the proxy must know its own URL before it starts
    public = f"http://127.0.0.1:{port}"
    site.server.clients["proxy"] = {"client_secret": SECRET, "redirect_uris": [f"{public}/callback"]}
    site.server.metadata["userinfo_endpoint"] = f"{site.issuer}/userinfo"
    known = {"PUBLIC_URL": public, "ISSUER": site.issuer, "CLIENT_ID": "proxy", "CLIENT_SECRET": SECRET}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "oauth_proxy", str(port)],
        cwd=EXAMPLES,
        env={**os.environ, **known},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    async with until_sigterm(process, 0):
        assert await line_of(process.stdout) == f"listening for {public}\n"
        yield f"{public}/mcp"


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_our_client_gets_its_tokens_from_the_proxy(revision: str) -> None:
    store, pages = MemoryTokenStore(), list[str]()

    async def visit(url: str) -> str:
        pages.append(url)
        return await trio.to_thread.run_sync(Browser().visit, url)

    def auth() -> OAuth:
        callback = "http://127.0.0.1:9/callback"
        return OAuth("Visitor", visit=visit, redirect_uri=callback, store=store, http_on_loopback=True)

    with trio.fail_after(60):
        async with auth_site(**PROVIDER) as site, proxy_before(site) as url:
            for notes in (1, 2):  # the second time with a new client
                async with open_client(url, auth=auth(), revision=revision) as client:
                    assert await client.call_tool("who_am_i", returns=str) == "ada"
                    assert await client.call_tool("write", {"text": "milk"}, returns=str) == f"ada has {notes} notes."
                    assert client.deviations == ()
            assert len(pages) == 2  # the second scope was requested when it was needed


@pytest.mark.parametrize("missing", ["PUBLIC_URL", "ISSUER", "CLIENT_ID", "CLIENT_SECRET"])
def test_a_missing_setting_is_reported_at_the_start(missing: str) -> None:
    given = dict.fromkeys(("PUBLIC_URL", "ISSUER", "CLIENT_ID", "CLIENT_SECRET"), "https://example.com")
    known = {**os.environ, **given, missing: ""}
    command = [sys.executable, "-m", "oauth_proxy", "8000"]
    ended = subprocess.run(command, cwd=EXAMPLES, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert f"{missing}=" in ended.stderr


def test_an_unreachable_provider_is_reported_at_the_start() -> None:
    given = dict.fromkeys(("PUBLIC_URL", "CLIENT_ID", "CLIENT_SECRET"), "https://example.com")
    known = {**os.environ, **given, "ISSUER": "http://login.example.com"}
    command = [sys.executable, "-m", "oauth_proxy", "8000"]
    ended = subprocess.run(command, cwd=EXAMPLES, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("the identity provider cannot be used: http://login.example.com/")
