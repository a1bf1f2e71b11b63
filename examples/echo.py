"""A minimal server with a tool, a resource and a prompt, on standard input and output.

python examples/echo.py

Configure this command in a host.  The server serves hosts of every revision of the protocol.
"""

from trio_mcp import Server

server = Server("echo", version="1.0")


@server.tool(title="Echo Tool")
async def echo(message: str) -> str:
    """Echoes back the provided message."""
    return f"Tool echo: {message}"


@server.resource("echo://{message}", name="echo", title="Echo Resource")
async def echo_resource(message: str) -> str:
    """Echoes back messages as resources."""
    return f"Resource echo: {message}"


@server.prompt(name="echo", title="Echo Prompt")
async def echo_prompt(message: str) -> str:
    """Creates a prompt to process a message."""
    return f"Please process this message: {message}"


if __name__ == "__main__":
    server.run()
