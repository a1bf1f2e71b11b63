"""A client of a server that requires access tokens: the user signs in once in a browser, then it lists the tools.

    python examples/oauth_client.py https://mcp.example.com/mcp
    python examples/oauth_client.py --paste https://mcp.example.com/mcp    # without a browser here, as over SSH

It stores the tokens in ``~/.trio_mcp_example/tokens.json``, which only the owner can read.  The next run uses them, and
the user is not asked again as long as the authorization server renews them.  Delete the file to sign out.

It connects to servers on this machine also over plain http.
"""

from __future__ import annotations

import sys

import trio

from trio_mcp import McpError, OAuth, open_client
from trio_mcp.errors import AuthorizationFailed
from trio_mcp.oauth import FileTokenStore

STORE = FileTokenStore("~/.trio_mcp_example/tokens.json")


async def paste(url: str) -> str:
    """Let the user open the page on another machine, and return the address at which the browser ends.

    The browser cannot load that address, because no program listens there.  The address contains the answer.
    """
    print(f"Open this page in a browser:\n{url}")
    print("In the end it shows an error. Copy the address of that page to here:", flush=True)
    return await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)


async def main(url: str, pasting: bool) -> None:
    if pasting:
        auth = OAuth(
            "An example",
            store=STORE,
            visit=paste,
            redirect_uri="http://127.0.0.1:3999/callback",  # no program listens there
            http_on_loopback=True,
        )
    else:
        auth = OAuth("An example", store=STORE, http_on_loopback=True)
    async with open_client(url, auth=auth) as client:
        print(f"{client.server.get('name')} has, in {client.revision}:")
        for tool in await client.list_tools():
            print(f"  {tool.name}: {tool.description}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1:-1] not in ([], ["--paste"]):
        sys.exit(__doc__)
    try:
        trio.run(main, sys.argv[-1], len(sys.argv) == 3)
    except AuthorizationFailed as error:
        sys.exit(f"There is no access, and {error.blame.value} can do something about it: {error}")
    except McpError as error:
        sys.exit(str(error))
