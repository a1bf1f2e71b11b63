"""A server over HTTP for clients with tokens of an OAuth authorization server; each user has their own notes.

    pip install 'trio_mcp[oauth]'
    RESOURCE=https://mcp.example.com/mcp ISSUER=https://auth.example.com python examples/protected.py 127.0.0.1:3000

`RESOURCE` is the URL of this server for its clients, at a proxy with TLS.  `ISSUER` is the authorization server: it
publishes its keys, and issues JWTs with the scopes `notes:read` and `notes:write`.  The error for a client without a
token says where to get one.  The error for a client that writes without `notes:write` names that scope.
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
        scopes=["notes:read"],  # for every request; `write` needs another one
        implies={"notes:write": ["notes:read"]},
    )
    server.run(http=sys.argv[1])
