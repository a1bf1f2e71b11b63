"""The demo: ``python -m trio_mcp demo`` shows a server and a client at work, and the code that they are made of.

| Module | What it has |
|---|---|
| `server` | the server; ``python -m trio_mcp.cli.demo.server`` is a command for any host |
| `scenes` | what the client does; each scene is a function, whose lines are shown and then run |
| `screen` | how that looks in a terminal, and in a pipe |
| `tour` | the order of it all, and how it ends |

Nothing is played: what is shown came from the server.
"""

__all__ = ["scenes", "screen", "server", "tour"]
