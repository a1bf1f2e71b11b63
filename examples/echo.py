"""The smallest server: one tool, on standard input and output.

python examples/echo.py

That is the command to give to a host.  Any host will do, whichever revision of the protocol it speaks.
"""

from trio_mcp import Server

server = Server("echo", version="1.0")


@server.tool
async def echo(text: str) -> str:
    """Say the same again."""
    return text


if __name__ == "__main__":
    server.run()
