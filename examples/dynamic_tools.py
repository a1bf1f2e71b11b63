"""A server that adds and removes tools at runtime: clients that listen get a notification that the list has changed.

python examples/dynamic_tools.py
"""

from trio_mcp import Server, ToolError, UsageError

MAX_PHRASES = 100

server = Server("dynamic-tools", version="1.0")
phrases: set[str] = set()


@server.tool
async def learn(name: str, text: str) -> str:
    """Learn a phrase: it becomes a tool of that name."""

    async def say() -> str:
        return text

    if len(phrases) == MAX_PHRASES:
        raise ToolError("There is no room for another phrase; forget one.")
    try:
        server.tool(name=name, description=f"Say {text!r}")(say)
    except UsageError as error:  # the name is taken or invalid
        raise ToolError(str(error)) from None
    phrases.add(name)
    return f"There is a tool {name} now."


@server.tool
async def forget(name: str) -> str:
    """Forget a phrase: its tool disappears."""
    if name not in phrases:
        raise ToolError(f"There is no such phrase; there are: {', '.join(sorted(phrases)) or 'none'}")
    phrases.remove(name)
    server.remove_tool(name)
    return f"There is no tool {name} any more."


if __name__ == "__main__":
    server.run()
