"""A server by HTTP whose clients get their tokens from an OAuth authorization server; every user has notes of his own.

    pip install 'trio_mcp[oauth]'
    RESOURCE=https://mcp.example.com/mcp ISSUER=https://auth.example.com python examples/protected.py 127.0.0.1:3000

`RESOURCE` is the URL under which clients know this server, behind a proxy that has TLS; `ISSUER` is who gives out the
tokens, as JWTs with the scopes `notes:read` and `notes:write`, and publishes its keys.  A client without a token is
told where to get one; one that may only read is told, when it wants to write, which scope that takes.
"""

import os
import sys

from trio_mcp import Context, Server
from trio_mcp.oauth.jwks import JwksVerifier

RESOURCE, ISSUER = os.environ.get("RESOURCE", ""), os.environ.get("ISSUER", "")

server = Server("notes", version="1.0")
notes: dict[str, list[str]] = {}


@server.tool
async def read(ctx: Context) -> list[str]:
    """All notes of this user."""
    return notes.get(ctx.principal, [])


@server.tool(scopes=["notes:write"])
async def write(text: str, ctx: Context) -> str:
    """Write a note."""
    notes.setdefault(ctx.principal, []).append(text)
    return f"{ctx.principal} has {len(notes[ctx.principal])} notes."


if __name__ == "__main__":
    if len(sys.argv) != 2 or not RESOURCE or not ISSUER:
        sys.exit(__doc__)
    server.protect(
        verify=JwksVerifier(f"{ISSUER}/jwks.json", issuer=ISSUER, audience=RESOURCE, http_on_loopback=True),
        resource=RESOURCE,
        authorization_servers=[ISSUER],
        scopes=["notes:read"],  # for every request; `write` needs one more
        implies={"notes:write": ["notes:read"]},
    )
    server.run(http=sys.argv[1])
