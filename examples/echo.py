"""The smallest server that has one of each: a tool, a resource and a prompt, on standard input and output.

python examples/echo.py

That is the command to give to a host.  Any host will do, whichever revision of the protocol it speaks.
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
