"""Tasks: calls that outlive their requests, in a store; for servers and clients, in both forms of the protocol."""
