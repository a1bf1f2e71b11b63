"""The demo: ``python -m trio_mcp demo`` runs a server and a client, and shows their code.

| Module | Content |
|---|---|
| `server` | the server; ``python -m trio_mcp.cli.demo.server`` is a command for any host |
| `scenes` | the client's actions; each scene is a function, whose lines are shown and then run |
| `screen` | the output, in a terminal and in a pipe |
| `tour` | the order of the scenes, and the end of the demo |

The output is real: the values shown come from the server.
"""

__all__ = ["scenes", "screen", "server", "tour"]
