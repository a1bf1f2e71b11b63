"""The Model Context Protocol for Trio programs: servers and clients, in all five revisions.

    from trio_mcp import Server                       from trio_mcp import open_client

    server = Server("weather")                        async with open_client(["python", "weather.py"]) as client:
                                                          print(await client.call_tool("forecast", {"city": "Oslo"}))
    @server.tool
    async def forecast(city: str) -> str: ...

    server.run()

Serve     Server, Context, Field, Limits, Principal, CacheHints; server.run, serve_stdio, serve_http, serve_stream,
          serve_http_stream
Ask       ctx.elicit, ctx.sample; Elicit, ElicitUrl, Sample, ListRoots for several questions at once; InputRequired;
          Accepted, Declined and Dismissed are the outcomes of a form
Return    TextContent; image, audio and file make content of a file; below and file_path check paths of clients
Call      open_client, connect_client, Client, OAuth
Fail      ToolError, ResourceNotFound, RequestError, ToolFailed, UsageError, McpError

The rest: trio_mcp.types (models, options, callbacks), .errors, .oauth, .relay, .testing, .asgi, and .core, the protocol
without an event loop.  A module is loaded when one of its names is used for the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trio_mcp.client.client import Client as Client
    from trio_mcp.client.client import connect_client as connect_client
    from trio_mcp.client.client import open_client as open_client
    from trio_mcp.client.tools import ToolFailed as ToolFailed
    from trio_mcp.core.caching import CacheHints as CacheHints
    from trio_mcp.core.content import TextContent as TextContent
    from trio_mcp.core.elicitation import Accepted as Accepted
    from trio_mcp.core.elicitation import Declined as Declined
    from trio_mcp.core.elicitation import Dismissed as Dismissed
    from trio_mcp.core.errors import McpError as McpError
    from trio_mcp.core.errors import RequestError as RequestError
    from trio_mcp.core.errors import ResourceNotFound as ResourceNotFound
    from trio_mcp.core.errors import UsageError as UsageError
    from trio_mcp.core.messages import Limits as Limits
    from trio_mcp.core.principals import Principal as Principal
    from trio_mcp.core.schema.hints import Field as Field
    from trio_mcp.oauth.client import OAuth as OAuth
    from trio_mcp.server.context import Context as Context
    from trio_mcp.server.http.listener import serve_http as serve_http
    from trio_mcp.server.http.listener import serve_http_stream as serve_http_stream
    from trio_mcp.server.media import audio as audio
    from trio_mcp.server.media import file as file
    from trio_mcp.server.media import image as image
    from trio_mcp.server.process import serve_stdio as serve_stdio
    from trio_mcp.server.questions import Elicit as Elicit
    from trio_mcp.server.questions import ElicitUrl as ElicitUrl
    from trio_mcp.server.questions import ListRoots as ListRoots
    from trio_mcp.server.questions import Sample as Sample
    from trio_mcp.server.results import InputRequired as InputRequired
    from trio_mcp.server.results import ToolError as ToolError
    from trio_mcp.server.server import Server as Server
    from trio_mcp.server.session import serve_stream as serve_stream
    from trio_mcp.transport.paths import below as below
    from trio_mcp.transport.paths import file_path as file_path
else:
    _find, __dir__ = lazy_names(
        __name__,
        {
            "client.client": "Client connect_client open_client",
            "client.tools": "ToolFailed",
            "core.caching": "CacheHints",
            "core.content": "TextContent",
            "core.elicitation": "Accepted Declined Dismissed",
            "core.errors": "McpError RequestError ResourceNotFound UsageError",
            "core.messages": "Limits",
            "core.principals": "Principal",
            "core.schema.hints": "Field",
            "oauth.client": "OAuth",
            "server.context": "Context",
            "server.session": "serve_stream",
            "server.http.listener": "serve_http serve_http_stream",
            "server.questions": "Elicit ElicitUrl ListRoots Sample",
            "server.media": "audio file image",
            "server.results": "InputRequired ToolError",
            "server.process": "serve_stdio",
            "server.server": "Server",
            "transport.paths": "below file_path",
        },
    )

    def __getattr__(name: str) -> object:
        if name == "FastMCP":
            raise AttributeError("trio_mcp has no 'FastMCP'; write from trio_mcp import Server")
        return _find(name)
