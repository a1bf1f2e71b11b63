"""The example of a protected server, run as a user runs it, with an issuer beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.http.client import Answer, HttpClient
from tests.http.served import bearer
from tests.http.test_jwks import Issuer, public, signed
from tests.server.test_example_servers import line_of, until_sigterm
from trio_mcp.core.oauth import WELL_KNOWN

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "protected.py")
RESOURCE = "https://mcp.example.com/mcp"


@asynccontextmanager
async def protected() -> AsyncIterator[tuple[HttpClient, str]]:
    """A client of the example, which listens until SIGTERM, and the issuer of its tokens."""
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, Issuer(public("ES256", "k")).answer, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        issuer = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        known = {**os.environ, "RESOURCE": RESOURCE, "ISSUER": issuer}
        command = [sys.executable, "-W", "error", EXAMPLE, "127.0.0.1:0"]
        process = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE, env=known)
        assert process.stderr is not None
        async with until_sigterm(process, 143):
            line = await line_of(process.stderr)
            authority = line.removeprefix("notes listens at http://").removesuffix("/mcp\n")
            host, _, port = authority.partition(":")
            web = HttpClient(partial(trio.open_tcp_stream, host, int(port)), host="mcp.example.com")
            yield web, issuer
            await web.aclose()
        nursery.cancel_scope.cancel()


async def test_a_token_allows_the_tools_of_its_scopes() -> None:
    async with protected() as (web, issuer):

        async def ask(scope: str | None, tool: str, sub: str = "ada", **arguments: Any) -> Answer:
            token = "x" if scope is None else signed(kid="k", iss=issuer, exp=time.time() + 60, sub=sub, scope=scope)
            return await web.call("tools/call", {"name": tool, "arguments": arguments}, headers=bearer(token))

        refused = await ask(None, "read")
        assert refused.status == 401
        place = f"https://mcp.example.com{WELL_KNOWN}/mcp"
        assert f'resource_metadata="{place}", scope="notes:read"' in refused.headers["WWW-Authenticate"]
        metadata = (await web.send("GET", place.removeprefix("https://mcp.example.com"))).json
        assert metadata["authorization_servers"] == [issuer]
        poor = await ask("notes:read", "write", text="x")
        assert poor.status == 403
        assert 'scope="notes:read notes:write"' in poor.headers["WWW-Authenticate"]
        assert (await ask("notes:write", "write", text="x")).result["content"][0]["text"] == "ada has 1 notes."
        for sub, notes in (("ada", ["x"]), ("bob", [])):
            answer = await ask("notes:read", "read", sub)
            assert answer.result["structuredContent"] == notes


@pytest.mark.parametrize("missing", ["RESOURCE", "ISSUER"])
def test_a_missing_setting_is_reported_at_the_start(missing: str) -> None:
    known = {**os.environ, "RESOURCE": RESOURCE, "ISSUER": "https://auth.example.com", missing: ""}
    command = [sys.executable, EXAMPLE, "127.0.0.1:0"]
    ended = subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert f"{missing}=https://" in ended.stderr
