"""Options of HTTP: wrong options are refused at the start, and refused requests are logged for the operator."""

from __future__ import annotations

import logging
import ssl
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.http.scripted_server import SSE_PATHS, E, ScriptedServer
from tests.http.served import bearer, by_token, served
from trio_mcp import Server, UsageError
from trio_mcp.errors import CannotVerify
from trio_mcp.server.http import Endpoint
from trio_mcp.types import HttpRequest


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sessions": "no"}, "sessions must be True or False, got 'no'"),
        ({"json_only": 1}, "json_only must be True or False, got 1"),
        ({"authenticate": "token"}, "authenticate must be a function, got str"),
        ({"event_log": object()}, "event_log must be a function, got object"),
        ({"public_url": 8}, "public_url must be like"),
        ({"public_url": "example.com"}, "public_url must be like"),
        ({"keep_alive": 0}, "keep_alive must be a number of seconds"),
        ({"allowed_hosts": "example.com"}, "allowed_hosts must be a list"),
    ],
)
async def test_an_invalid_option_is_refused_at_the_start(options: dict[str, Any], expected: str) -> None:
    async with Server("test").running() as run:
        with pytest.raises(UsageError, match=expected):
            Endpoint(run, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"transport": "http"}, r"run\(\) serves stdio, run\(http="),
        ({"json_only": True}, r"json_only is an option for HTTP; to serve HTTP, write run\(http="),
        ({"http": "127.0.0.1:0", "port": 3000}, "run has no option 'port'"),
        ({"http": "127.0.0.1:0", "listeners": []}, "run has no option 'listeners'; serve_http has it"),
        ({"ssl_context": ssl.create_default_context()}, "ssl_context is an option for HTTP"),
    ],
)
def test_run_explains_an_unknown_option(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        Server("test").run(**options)


def test_a_server_takes_one_address_only() -> None:
    with pytest.raises(UsageError, match="give either http or unix, not both"):
        Server("test").run(http="127.0.0.1:0", unix="mcp.sock")
    with pytest.raises(UsageError, match=r"ssl_context must be an ssl\.SSLContext, got str"):
        Server("test").run(http="127.0.0.1:0", ssl_context="cert.pem")  # type: ignore[arg-type]


def test_an_address_is_given_by_name() -> None:
    run: Any = Server("test").run
    with pytest.raises(TypeError, match=r"run\(http='127.0.0.1:3000'\)"):
        run("127.0.0.1:3000")


@pytest.mark.parametrize("name", ["stdio", "sse", "streamable-http"])
def test_a_transport_name_of_another_sdk_is_explained(name: str) -> None:
    run: Any = Server("test").run
    for how in (lambda: run(name), lambda: run(transport=name)):
        with pytest.raises(TypeError, match=r'run\(\) serves stdio, run\(http="127.0.0.1:3000"\) serves HTTP'):
            how()


async def raises(request: HttpRequest) -> str | None:
    raise RuntimeError("no database")


async def half_a_pair(request: HttpRequest) -> str | None:
    return "\ud800"


@pytest.mark.parametrize(
    ("authenticate", "expected"),
    [
        (raises, "no database"),
        (lambda request: "ada", "authenticate must be an async function, but it returned str"),
        (half_a_pair, "must be Unicode text"),
    ],
)
async def test_a_failing_authenticate_fails_only_its_request(
    authenticate: Any, expected: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with served(
        ScriptedServer().server, authenticate=authenticate, allowed_origins=["https://app.example"]
    ) as web:
        for _ in range(2):
            answer = await web.call("server/discover", headers={"Origin": "https://app.example"})
            assert (answer.status, answer.code) == (500, -32603)
            assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert expected not in answer.body.decode()
    head, *trace = caplog.records[0].message.splitlines()
    assert head == "authenticate has failed"
    assert expected in trace[-1]


async def test_an_authenticate_that_cannot_verify_now_gives_503(autojump_clock: MockClock) -> None:
    async def authenticate(request: HttpRequest) -> str | None:
        raise CannotVerify("no database")

    async with served(ScriptedServer().server, authenticate=authenticate) as web:
        answer = await web.call("server/discover")
    assert (answer.status, answer.code) == (503, -32603)
    assert answer.headers["Retry-After"]
    assert "no database" not in answer.body.decode()


@pytest.mark.parametrize("error", [KeyError, CannotVerify])
@pytest.mark.parametrize(
    ("name", "value", "quoted"),
    [
        ("Authorization", "Bearer very-secret", "Bearer very-secret"),
        ("Authorization", "Bearer very-secret", "very-secret"),
        ("Cookie", "theme=dark; sid=very-secret", "very-secret"),
        ("X-API-Key", "very-secret", "very-secret"),
    ],
)
async def test_credentials_that_the_exception_of_authenticate_quotes_are_not_logged(
    error: Any, name: str, value: str, quoted: str, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def authenticate(request: HttpRequest) -> str | None:
        raise error(quoted)

    async with served(ScriptedServer().server, authenticate=authenticate) as web:
        await web.call("server/discover", headers={name: value})
    assert "[secret]" in caplog.text
    assert "very-secret" not in caplog.text


async def test_refused_requests_are_logged_without_secrets(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "trio_mcp.http")
    async with served(ScriptedServer().server, authenticate=by_token, **SSE_PATHS) as web:
        await web.call("server/discover")
        await web.call("server/discover", headers={"Authorization": "Basic secret"})
        await web.call("server/discover", headers={"Host": "evil.example"})
        fields = {**web.headers_for(None, E, None), **bearer("ada"), "Content-Type": "application/json"}
        await web.send("POST", "/messages?session=secret", fields, b"{}")
        await trio.testing.wait_all_tasks_blocked()
    assert [record.message for record in caplog.records] == [
        "'POST' '/mcp': 401, not authenticated; send credentials in the Authorization header",
        "'POST' '/mcp': 401, the credentials in the Authorization header are not accepted; send others",
        "'POST' '/mcp': 421, the host 'evil.example' is not served here; add it to allowed_hosts to serve it",
        "'POST' '/messages': 404, this session is unknown or has ended; open a new one by initialize",
    ]
