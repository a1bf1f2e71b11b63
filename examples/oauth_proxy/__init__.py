"""An MCP server for the users of an identity provider that does not let MCP clients register.

MCP clients register themselves.  The identity providers of companies do not allow that: an administrator enters one
application by hand.  So this program is an authorization server for its MCP clients, and the one application of the
provider.  Run it in the parent of this folder:

    pip install starlette hypercorn
    PUBLIC_URL=https://notes.example.com ISSUER=https://login.example.com CLIENT_ID=... CLIENT_SECRET=... \\
        python -m oauth_proxy 8000

Register `PUBLIC_URL` followed by ``/callback`` as a redirect URI at the provider.  The modules, in the order to read:

- `upstream`: the client of the provider
- `kept` and `wire`: the stored data; requests and responses
- `proxy`: the authorization server for MCP clients
- `notes`: the MCP server, and the ASGI application with both

docs/oauth.md lists the attack that each check prevents, in "A proxy before an identity provider".  All data is in
memory: after a restart clients register again and users sign in again.
"""
