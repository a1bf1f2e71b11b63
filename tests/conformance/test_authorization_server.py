"""The scenarios of the official conformance suite for authorization servers, run against the one in the examples.

The suite asks the user to visit a page, and waits until the browser comes back to it.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import trio

from tests.conformance.suite import suite
from tests.http.auth_site import auth_site
from tests.peers.installed import needs
from tests.peers.programs.oauth_browser import Browser
from tests.ports import unclaimed_port
from tests.requirements import req
from tests.server.test_example_oauth_proxy import PROVIDER, proxy_before

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the first test that needs the suite installs it

TIMEOUT = 300.0  # seconds for the whole run, on a busy machine
PAGE = re.compile(r"(http://127\.0\.0\.1:\d+/authorize\?\S+)\n")
READY = "Callback server started"  # the suite may print the page earlier, when it still refuses the browser


def agree(page: str) -> None:
    browser = Browser()
    status, _, _ = browser.ask(browser.visit(page))
    assert status == 200


async def output_of(process: trio.Process) -> str:
    """The output of the process, while its user visits the page that it asks for."""
    assert process.stdout is not None
    said, seen = "", False
    async with trio.open_nursery() as nursery:
        async for data in process.stdout:
            said += data.decode()
            if not seen and READY in said and (page := PAGE.search(said)):
                seen = True
                nursery.start_soon(trio.to_thread.run_sync, agree, page[1])
    return said


@req("auth-09", "auth-29", "auth-36", "auth-60")
async def test_the_proxy_passes_all_scenarios_for_authorization_servers() -> None:
    found = needs("the conformance suite", suite)
    port = unclaimed_port()  # the suite listens there
    wanted = {"redirect_uris": [f"http://127.0.0.1:{port}/callback"], "token_endpoint_auth_method": "none"}
    async with auth_site(**PROVIDER) as site, proxy_before(site) as url:
        public = url.removesuffix("/mcp")
        register = f"{public}/register"
        _, _, client = await trio.to_thread.run_sync(Browser().ask, register, json.dumps(wanted).encode())
        options = ["--client-id", json.loads(client)["client_id"], "-p", str(port)]
        command = found.command("authorization", "--url", public, "--resource", url, *options)
        with trio.fail_after(TIMEOUT):
            process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said = await output_of(process)
            assert await process.wait() == 0, said
    passed = re.findall(r"✓ (\S+): (\d+) passed, 0 failed", said)
    assert [name for name, number in passed if number != "0"] == [
        "authorization-server-metadata-endpoint",
        "authorization-code-grant",
    ]
