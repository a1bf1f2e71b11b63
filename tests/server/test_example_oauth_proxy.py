"""The example of a proxy before an identity provider: a whole flow, and all who try to get in by another way."""

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
class House:
    """The program, its provider, and one user at a browser."""

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
        """What the provider sends the browser back with."""
        assert answer.status == 303, answer.body
        return dict(parse_qsl(self.site.server.browse(answer.headers["Location"])))

    async def code(self, client: dict[str, Any], **changes: str | None) -> str:
        back = self.sign_in(await self.agree(await self.ask(client, **changes)))
        return returned(await self.get("/callback", **back))["code"]

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


def returned(answer: Answer) -> dict[str, str]:
    """What the client is told, at its own redirect URI and nowhere else."""
    assert answer.status == 303, answer.body
    assert answer.headers["Location"].startswith(f"{CALLBACK}&")
    found = dict(parse_qsl(urlsplit(answer.headers["Location"]).query))
    assert (found.pop("with"), found.pop("iss"), found.pop("state")) == ("query", PUBLIC, "client's state")
    return found


def sorry(answer: Answer, words: str) -> None:
    """The user is told, and stays where he is."""
    assert (answer.status, answer.type) == (400, "text/html")
    assert words in answer.body.decode().replace("&#x27;", "'")
    assert "Location" not in answer.headers
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def refused(answer: Answer, error: str, status: int = 400) -> None:
    assert (answer.status, answer.json["error"]) == (status, error)
    assert answer.headers["Cache-Control"] == "no-store"


@asynccontextmanager
async def house(**settings: Any) -> AsyncIterator[House]:
    known = {"proxy": {"client_secret": SECRET, "redirect_uris": [f"{PUBLIC}/callback"]}}
    async with auth_site(clients=known, **PROVIDER, **settings) as site:
        for name in ("userinfo", "revocation"):
            site.server.metadata[f"{name}_endpoint"] = f"{site.issuer}/{name.replace('revocation', 'revoke')}"
        provider = await upstream.Upstream.discover(site.issuer, "proxy", SECRET, f"{PUBLIC}/callback")
        app, _ = notes.make_app(PUBLIC, provider)
        async with hosted(app) as web:
            web.headers["Host"] = "notes.example.com"
            yield House(site, web, app.state.proxy)


# The whole flow.


@req("auth-06", "auth-11", "auth-30", "auth-33", "auth-101", "auth-102")
@pytest.mark.parametrize("method", ["none", "client_secret_post", "client_secret_basic"])
async def test_a_user_signs_in_at_the_provider_and_calls_a_tool(method: str, mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register(token_endpoint_auth_method=method)
        code = await here.code(client)
        proof: dict[str, str | None] = {}
        if method == "client_secret_post":
            proof = {"client_secret": client["client_secret"]}
        elif method == "client_secret_basic":
            pair = f"{client['client_id']}:{client['client_secret']}".encode()
            proof = {"client_id": None, "authorization": f"Basic {base64.b64encode(pair).decode()}"}
        answer = await here.redeem(client, code, **proof)
        assert answer.headers["Cache-Control"] == "no-store"
        tokens = answer.json
        assert (tokens["token_type"], tokens["scope"]) == ("Bearer", "notes:read notes:write")
        written = await here.call(tokens, "write", text="milk")
        assert written.result["content"][0]["text"] == "ada has 1 notes."
        assert (await here.call(tokens)).result["structuredContent"] == ["milk"]
        assert (await here.call(tokens, "who_am_i")).result["content"][0]["text"] == "ada"


@req("auth-09", "auth-10", "auth-36", "auth-60")
async def test_clients_of_every_revision_find_the_endpoints(mock_clock: MockClock) -> None:
    async with house() as here:
        refusal = await here.web.post(request("tools/list"))
        assert refusal.status == 401
        resource = (await here.web.send("GET", "/.well-known/oauth-protected-resource/mcp")).json
        assert (resource["resource"], resource["authorization_servers"]) == (RESOURCE, [PUBLIC])
        said = (await here.web.send("GET", "/.well-known/oauth-authorization-server")).json
        assert said["issuer"] == PUBLIC
        for name, path in (("authorization", "authorize"), ("token", "token"), ("registration", "register")):
            assert said[f"{name}_endpoint"] == f"{PUBLIC}/{path}"  # where those of 2025-03-26 look by themselves
        assert said["code_challenge_methods_supported"] == ["S256"]
        assert said["authorization_response_iss_parameter_supported"] is True


@req("auth-49", "auth-50")
async def test_neither_side_gets_a_token_of_the_other(mock_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with house() as here:
        client = await here.register()
        tokens = await here.tokens(client)
        theirs = [*here.site.server.tokens, *here.site.server.refresh_tokens]
        ours = [tokens["access_token"], tokens["refresh_token"]]
        assert len(theirs) == 2
        for each in theirs:
            assert each not in json.dumps(tokens)
            assert (await here.call(each)).status == 401
        await here.call(tokens, "who_am_i")
        refreshed = (await here.refresh(client, tokens)).json
        ours += [refreshed["access_token"], refreshed["refresh_token"]]
        sent = repr([(each.fields, dict(each.headers)) for each in here.site.server.asked])
        assert not [each for each in ours if each in sent]
        assert VERIFIER not in sent  # PKCE of each leg is its own
        secrets = [*ours, *theirs, *here.site.server.tokens, *here.site.server.refresh_tokens, SECRET, VERIFIER]
        held = repr(vars(here.proxy))
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
async def test_what_cannot_be_registered(said: Any, error: str, mock_clock: MockClock) -> None:
    async with house() as here:
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        refused(await here.web.send("POST", "/register", {}, body), error)
        assert not here.proxy.clients


async def test_what_is_sent_and_kept_is_bounded(mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oauth_proxy.proxy.MAX_CLIENTS", 2)
    async with house() as here:
        refused(await here.web.send("POST", "/register", {}, b" " * 100_000), "invalid_request", 413)
        first, *_, last = [await here.register() for _ in range(3)]
        assert len(here.proxy.clients) == 2
        sorry(await here.ask(first), "it has to register")
        ticket_of(await here.ask(last))


def test_a_shelf_keeps_no_secret_nothing_for_long_and_not_much(mock_clock: MockClock) -> None:
    async def main() -> None:
        shelf = kept.SecretStore(10.0, max_values=2)
        secrets = [shelf.add(number) for number in range(3)]
        assert [shelf.get(each) for each in secrets] == [None, 1, 2]
        assert not [each for each in secrets if each in repr(vars(shelf))]
        assert [shelf.take(secrets[2]), shelf.take(secrets[2])] == [2, None]
        mock_clock.jump(10)
        assert shelf.get(secrets[1]) is None
        shelf.add(3)
        assert len(shelf) == 1

    trio.run(main, clock=mock_clock)


# The question.


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
async def test_what_is_not_even_asked(changes: dict[str, Any], words: str, mock_clock: MockClock) -> None:
    async with house() as here:
        sorry(await here.ask(await here.register(), **changes), words)
        assert not here.site.server.of("authorize")


async def test_a_parameter_that_came_twice_is_no_parameter(mock_clock: MockClock) -> None:
    async with house() as here:
        sorry(await here.web.send("GET", "/authorize?client_id=a&client_id=b"), "came twice")


@req("auth-57", "auth-88", "auth-115")
async def test_the_user_is_asked_each_time_and_sees_who_asks_for_what(mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register(client_name='<script>"App"</script>')
        for _ in range(2):
            question = await here.ask(client)
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
            assert not here.site.server.of("authorize")  # nobody was sent on
        disguised = await here.register(client_name="\u202eknab ruoY\n")
        assert "<h1>knab ruoY asks for access</h1>" in (await here.ask(disguised)).body.decode()
        nameless = await here.register(client_name="\u200b")
        assert "<h1>A program without a name asks" in (await here.ask(nameless)).body.decode()
        local = await here.register(redirect_uris=["http://127.0.0.1:3000/back"])
        question = await here.ask(local, redirect_uri="http://127.0.0.1:3000/back", scope="notes:read other")
        assert "<b>on this computer</b>" in question.body.decode()
        assert "write notes" not in question.body.decode()


async def test_a_user_who_denies_is_believed(mock_clock: MockClock) -> None:
    async with house() as here:
        answer = await here.agree(await here.ask(await here.register()), "deny")
        assert returned(answer) == {"error": "access_denied"}
        assert not here.proxy.states._values


@req("auth-32", "auth-57")
async def test_nobody_agrees_for_the_user(mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register()
        question = await here.ask(client)
        own = here.cookie
        for cookie in (None, "__Host-browser=mallory"):  # a form on another page, or in another browser
            here.cookie = cookie
            sorry(await here.agree(question), "begin anew")
            here.cookie = own
            sorry(await here.agree(question), "begin anew")  # and it is worth nothing any more
            question = await here.ask(client)
        sorry(await here.post("/consent", decision="allow"), "begin anew")
        assert (await here.agree(question)).status == 303
        sorry(await here.agree(question), "begin anew")
        late = await here.ask(client)
        mock_clock.jump(601)
        sorry(await here.agree(late), "begin anew")


async def test_two_questions_in_one_browser_do_not_disturb_each_other(mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register()
        first, second = await here.ask(client), await here.ask(client)
        for question in (first, second):
            assert "code" in returned(await here.get("/callback", **here.sign_in(await here.agree(question))))


# The return from the provider.


@req("auth-32")
async def test_a_return_belongs_to_the_browser_that_agreed_and_is_good_once(mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register()
        back = here.sign_in(await here.agree(await here.ask(client)))
        own, here.cookie = here.cookie, "__Host-browser=victim"  # who was sent a link that somebody else began
        sorry(await here.get("/callback", **back), "begin anew")
        here.cookie = own
        back = here.sign_in(await here.agree(await here.ask(client)))
        sorry(await here.get("/callback", **{**back, "state": "another"}), "begin anew")
        assert "code" in returned(await here.get("/callback", **back))
        sorry(await here.get("/callback", **back), "begin anew")
        back = here.sign_in(await here.agree(await here.ask(client)))
        mock_clock.jump(601)
        sorry(await here.get("/callback", **back), "begin anew")
        assert not here.site.server.of("token")[1:]


@pytest.mark.parametrize("changes", [{"iss": "https://evil.example"}, {"iss": None}])
async def test_the_answer_of_another_server_is_not_taken(changes: dict[str, Any], mock_clock: MockClock) -> None:
    async with house() as here:
        back = here.sign_in(await here.agree(await here.ask(await here.register())))
        sorry(await here.get("/callback", **{**back, **changes}), "not of the server that was asked")
        assert not here.site.server.of("token")


async def test_a_provider_that_does_not_say_who_it_is_need_not(mock_clock: MockClock) -> None:
    async with house(iss=None) as here:
        assert (await here.tokens(await here.register()))["access_token"]


@req("auth-32")
@pytest.mark.parametrize(
    ("error", "told"), [("access_denied", "access_denied"), ("temporarily_unavailable", "server_error")]
)
async def test_a_provider_that_refuses_is_passed_on_without_its_words(
    error: str, told: str, mock_clock: MockClock
) -> None:
    async with house(denies={"error": error, "error_description": "call +1 555"}) as here:
        back = here.sign_in(await here.agree(await here.ask(await here.register())))
        assert returned(await here.get("/callback", **back)) == {"error": told}


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
async def test_a_provider_that_fails_costs_this_flow_only(
    kind: str, how: str, told: str, mock_clock: MockClock
) -> None:
    async with house() as here:
        client = await here.register()
        back = here.sign_in(await here.agree(await here.ask(client)))
        if how in ("unanswered", "unavailable"):
            getattr(here.site, how).add(kind)
        elif how == "redirected":
            here.site.server.redirects["/token"] = f"{here.site.issuer}/elsewhere"
        else:
            here.site.server.codes[back["code"]]["code_challenge"] = "of another flow"  # a code that was injected
        assert returned(await here.get("/callback", **back)) == {"error": told}
        here.site.unanswered.clear()
        here.site.unavailable.clear()
        here.site.server.redirects.clear()
        assert (await here.call(await here.tokens(client))).status == 200


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"issuer": "https://evil.example"}, "that of 'https://evil.example'; the issuer has to be the same"),
        ({"code_challenge_methods_supported": ["plain"]}, "does not say that it has PKCE"),
        ({"userinfo_endpoint": None}, "has no userinfo_endpoint"),
    ],
)
async def test_a_provider_has_its_own_metadata_and_pkce(metadata: dict[str, Any], why: str) -> None:
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
    async with house() as here:
        for name in ("authorization", "token", "userinfo"):
            here.proxy.upstream.metadata[f"{name}_endpoint"] += "?tenant=one"
        monkeypatch.setattr(AuthServer, "answer", answer)
        await here.code(await here.register())
        assert asked == [("/token", "tenant=one"), ("/userinfo", "tenant=one")]
        assert here.site.server.of("authorize")[0]["tenant"] == "one"


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
async def test_a_code_is_for_what_it_was_given_for(changes: Any, error: str, mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register()
        fields = {"code": await here.code(client), **changes}
        refused(await here.redeem(client, **fields), error)
        assert len(here.proxy.access_tokens) == 0


@req("auth-06", "auth-33")
async def test_a_client_is_who_it_says_or_gets_nothing(mock_clock: MockClock) -> None:
    async with house() as here:
        public, other = await here.register(), await here.register()
        post = await here.register(token_endpoint_auth_method="client_secret_post")
        code = await here.code(public)
        refused(await here.redeem(other, code), "invalid_grant")
        basic = base64.b64encode(f"{post['client_id']}:{post['client_secret']}".encode()).decode()
        wrong: list[dict[str, str | None]] = [
            {"client_id": None},
            {"client_id": "nobody"},
            {"client_secret": "a public one has none"},
            {"client_id": post["client_id"]},
            {"client_id": post["client_id"], "client_secret": "wrong"},
            {"client_id": None, "authorization": f"Basic {basic}"},  # which is not how it has registered
            {"client_id": None, "authorization": "Basic ="},
        ]
        for changes in wrong:
            answer = await here.redeem(public, code, **changes)
            refused(answer, "invalid_client", 401)
            assert answer.headers["WWW-Authenticate"] == "Basic"
        assert (await here.redeem(public, code)).status == 200


@req("auth-28")
async def test_a_code_that_is_used_twice_takes_all_with_it(mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register()
        code = await here.code(client)
        tokens = (await here.redeem(client, code)).json
        assert (await here.call(tokens)).status == 200
        refused(await here.redeem(client, code), "invalid_grant")
        assert (await here.call(tokens)).status == 401
        refused(await here.refresh(client, tokens), "invalid_grant")
        late = await here.code(client)
        mock_clock.jump(61)
        refused(await here.redeem(client, late), "invalid_grant")


@req("auth-23", "auth-31", "auth-51", "auth-52")
async def test_tokens_live_for_minutes_and_are_renewed_with_those_of_the_provider(mock_clock: MockClock) -> None:
    async with house() as here:
        client = await here.register()
        first = await here.tokens(client)
        assert first["expires_in"] == 600
        mock_clock.jump(601)
        assert (await here.call(first)).status == 401
        second = (await here.refresh(client, first)).json
        assert [each["grant_type"] for each in here.site.server.of("token")][1:] == ["refresh_token"]
        assert (await here.call(second)).status == 200
        narrow = (await here.refresh(client, second, scope="notes:read admin")).json
        assert narrow["scope"] == "notes:read"
        assert (await here.call(narrow, "write", text="x")).status == 403
        refused(await here.refresh(client, first), "invalid_grant")  # somebody has a copy of it
        assert (await here.call(narrow)).status == 401
        refused(await here.refresh(client, narrow), "invalid_grant")
        mock_clock.jump(31 * 86400)
        old = await here.tokens(client)
        mock_clock.jump(31 * 86400)
        refused(await here.refresh(client, old), "invalid_grant")


@req("auth-31", "auth-32")
@pytest.mark.parametrize("refreshes", [True, False])
async def test_what_the_provider_takes_away_is_gone_here(refreshes: bool, mock_clock: MockClock) -> None:
    async with house(refreshes=refreshes) as here:
        client = await here.register()
        tokens = await here.tokens(client)
        here.site.unanswered |= {"token", "userinfo"}
        refused(await here.refresh(client, tokens), "temporarily_unavailable", 503)
        assert (await here.call(tokens, "who_am_i")).result["isError"]
        here.site.unanswered.clear()
        tokens = (await here.refresh(client, tokens)).json  # nothing was lost
        here.site.server.expire()
        if refreshes:  # a token of the provider that came to its end before ours
            assert (await here.call(tokens, "who_am_i")).result["content"][0]["text"] == "ada"
            here.site.server.refresh_tokens.clear()
        here.site.server.expire()
        if refreshes:
            refused(await here.refresh(client, tokens), "invalid_grant")
        else:
            assert (await here.call(tokens, "who_am_i")).result["isError"]
        assert (await here.call(tokens)).status == 401


async def test_a_provider_may_keep_its_refresh_token(mock_clock: MockClock) -> None:
    async with house(rotates=False) as here:
        client = await here.register()
        tokens = await here.tokens(client)
        for _ in range(3):
            tokens = (await here.refresh(client, tokens)).json
            assert (await here.call(tokens, "who_am_i")).result["content"][0]["text"] == "ada"
        kept_there = [each["refresh_token"] for each in here.site.server.of("token")[1:]]
        assert len(kept_there) == 3
        assert len({*kept_there}) == 1


async def test_many_who_need_the_provider_renew_its_tokens_once(mock_clock: MockClock) -> None:
    async with house() as here:
        tokens = await here.tokens(await here.register())
        here.site.server.expire()
        found: list[str] = []

        async def ask() -> None:
            found.append((await here.call(tokens, "who_am_i")).result["content"][0]["text"])

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert found == ["ada"] * 5
        assert [each["grant_type"] for each in here.site.server.of("token")][1:] == ["refresh_token"]


@pytest.mark.parametrize("which", ["access_token", "refresh_token"])
async def test_what_a_client_revokes_is_gone_here_and_there(which: str, mock_clock: MockClock) -> None:
    async with house() as here:
        client, other = await here.register(), await here.register()
        tokens = await here.tokens(client)
        known = {"client_id": client["client_id"]}
        refused(await here.post("/revoke", token=tokens[which], client_id="nobody"), "invalid_client", 401)
        assert (await here.post("/revoke", token=tokens[which], client_id=other["client_id"])).status == 200
        assert (await here.post("/revoke", token="another", **known)).status == 200
        assert (await here.call(tokens)).status == 200
        assert not here.site.server.of("revoke")
        assert (await here.post("/revoke", token=tokens[which], **known)).status == 200
        assert (await here.call(tokens)).status == 401
        refused(await here.refresh(client, tokens), "invalid_grant")
        assert not here.site.server.refresh_tokens
        here.site.unanswered.add("revoke")
        tokens = await here.tokens(client)
        assert (await here.post("/revoke", token=tokens[which], **known)).status == 200
        assert (await here.call(tokens)).status == 401


# As a user runs it.


@asynccontextmanager
async def proxy_before(site: AuthSite) -> AsyncIterator[str]:
    """The URL of the MCP server in the example of a proxy, run as a user runs it; this site is its provider."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()  # its own URL has to be known before it begins
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
            for notes in (1, 2):  # the second time as a new process
                async with open_client(url, auth=auth(), revision=revision) as client:
                    assert await client.call_tool("who_am_i", returns=str) == "ada"
                    assert await client.call_tool("write", {"text": "milk"}, returns=str) == f"ada has {notes} notes."
                    assert client.deviations == ()
            assert len(pages) == 2  # for the second scope was asked for when it was needed


@pytest.mark.parametrize("missing", ["PUBLIC_URL", "ISSUER", "CLIENT_ID", "CLIENT_SECRET"])
def test_what_is_missing_is_noticed_at_the_start(missing: str) -> None:
    given = dict.fromkeys(("PUBLIC_URL", "ISSUER", "CLIENT_ID", "CLIENT_SECRET"), "https://example.com")
    known = {**os.environ, **given, missing: ""}
    command = [sys.executable, "-m", "oauth_proxy", "8000"]
    ended = subprocess.run(command, cwd=EXAMPLES, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert f"{missing}=" in ended.stderr


def test_a_provider_that_is_not_there_is_noticed_at_the_start() -> None:
    given = dict.fromkeys(("PUBLIC_URL", "CLIENT_ID", "CLIENT_SECRET"), "https://example.com")
    known = {**os.environ, **given, "ISSUER": "http://login.example.com"}
    command = [sys.executable, "-m", "oauth_proxy", "8000"]
    ended = subprocess.run(command, cwd=EXAMPLES, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("the identity provider cannot be used: http://login.example.com/")
