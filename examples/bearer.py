"""A server over HTTP that identifies its users by bearer tokens; each user has their own notes.

    ALICE_TOKEN=... BOB_TOKEN=... python examples/bearer.py 127.0.0.1:3000

Make a token with ``python -c "import secrets; print(secrets.token_urlsafe())"``.  A client sends it with every request,
as ``Authorization: Bearer <token>``.  A request without a token gets 401; a request in a session of another user gets
403.

To serve other machines, listen at 0.0.0.0:3000 and name the host: `allowed_hosts=["mcp.example.com"]`; or behind a
proxy, `public_url="https://mcp.example.com"`.  Tokens need TLS, either at the proxy or by the `ssl_context` of
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
    """Return the name of the user, or None to answer with 401.  The server awaits this function for each request."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    given = token.strip().encode()
    # Compare all tokens, each in constant time, so that the duration reveals nothing about them.
    found = [user for user, known in TOKENS.items() if compare_digest(given, known.encode())]
    return found[0] if found else None


@server.tool
async def note(text: str, ctx: Context) -> list[str]:
    """Write a note.

    Returns:
        All notes of this user.
    """
    own = notes[ctx.principal]  # the name that `authenticate` returned
    own.append(text)
    return own


@server.tool
async def who_am_i(ctx: Context) -> str:
    """Return the user of this request."""
    return f"You are {ctx.principal}."


if __name__ == "__main__":
    if len(sys.argv) != 2 or not all(TOKENS.values()):  # an empty token would let every client in
        sys.exit(__doc__)
    server.run(http=sys.argv[1], authenticate=authenticate)
