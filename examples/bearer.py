"""A server by HTTP for users who are known by a bearer token; each of them has notes of his own.

    ALICE_TOKEN=... BOB_TOKEN=... python examples/bearer.py 127.0.0.1:3000

Make a token with ``python -c "import secrets; print(secrets.token_urlsafe())"``.  A client sends it with every request,
as ``Authorization: Bearer <token>``; without one it gets 401, and 403 in the session of somebody else.

To be reached from other machines, listen at 0.0.0.0:3000 and say under which name: `allowed_hosts=["mcp.example.com"]`;
or behind a proxy, `public_url="https://mcp.example.com"`.  Tokens want TLS, which the proxy has, or `ssl_context` of
`serve_http`.
"""

import os
import sys
from hmac import compare_digest

from trio_mcp import Context, Server
from trio_mcp.types import HttpRequest

TOKENS = {user: os.environ.get(f"{user.upper()}_TOKEN", "") for user in ("alice", "bob")}

server = Server("notes", version="1.0")
notes: dict[str | None, list[str]] = {user: [] for user in TOKENS}


async def authenticate(request: HttpRequest) -> str | None:
    """Who asks, by a name that stays the same, or None, which is 401.  It is asked for each request, and may wait."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    given = token.strip().encode()
    # Every token is compared, and in constant time: how long it takes tells nothing about them.
    found = [user for user, known in TOKENS.items() if compare_digest(given, known.encode())]
    return found[0] if found else None


@server.tool
async def note(text: str, ctx: Context) -> list[str]:
    """Write a note.

    Returns:
        All notes of this user.
    """
    own = notes[ctx.principal]  # what `authenticate` said
    own.append(text)
    return own


@server.tool
async def who_am_i(ctx: Context) -> str:
    """The user in whose name this is asked."""
    return f"You are {ctx.principal}."


if __name__ == "__main__":
    if len(sys.argv) != 2 or not all(TOKENS.values()):  # an empty token would be known to everybody
        sys.exit(__doc__)
    server.run(http=sys.argv[1], authenticate=authenticate)
