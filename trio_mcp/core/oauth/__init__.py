"""OAuth without sockets: the flow of a client, tokens, discovery, and the checks of a resource server."""
