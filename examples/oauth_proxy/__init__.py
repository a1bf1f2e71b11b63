"""An MCP server whose users sign in at an identity provider that knows nothing of MCP clients.

Clients register by themselves, and providers such as those of companies let nobody do that: one application is entered
by hand there.  So this program is an authorization server of its own for its MCP clients, and towards the provider it
is that one application.  In this folder's parent:

    pip install starlette hypercorn
    PUBLIC_URL=https://notes.example.com ISSUER=https://login.example.com CLIENT_ID=... CLIENT_SECRET=... \
        python -m oauth_proxy 8000

The provider has to know `PUBLIC_URL` with ``/callback`` after it as a redirect URI.  In this order:

- `upstream`: the provider, as its client sees it
- `kept` and `wire`: what is remembered, and what comes in and goes out
- `proxy`: the authorization server for MCP clients
- `notes`: the MCP server, and the application with both

docs/oauth.md says in "A proxy before an identity provider" what each check stands against.  Everything is kept in
memory: after a restart clients register anew and users sign in again.
"""
