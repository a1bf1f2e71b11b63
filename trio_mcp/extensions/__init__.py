"""Extensions of the protocol: what programs need to write one, and those that come with trio_mcp.

`Extension` says what one extension adds.  `Server.extension` returns a `ServerExtension`, and clients have the option
`extensions`, a list of `ClientExtension`.  `server` and `client` do not import this room; its modules are loaded when
they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.client.extensions import CallNextRequest as CallNextRequest
    from trio_mcp.client.extensions import ClientExtension as ClientExtension
    from trio_mcp.client.extensions import ExtensionCall as ExtensionCall
    from trio_mcp.core.extensions import Extension as Extension
    from trio_mcp.core.extensions import ExtensionMethod as ExtensionMethod
    from trio_mcp.server.detached import CallHost as CallHost
    from trio_mcp.server.detached import DetachedCall as DetachedCall
    from trio_mcp.server.detached import ExtensionRun as ExtensionRun
    from trio_mcp.server.extensions import Listener as Listener
    from trio_mcp.server.extensions import ServerExtension as ServerExtension
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client.extensions": "CallNextRequest ClientExtension ExtensionCall",
            "core.extensions": "Extension ExtensionMethod",
            "server.detached": "CallHost DetachedCall ExtensionRun",
            "server.extensions": "Listener ServerExtension",
        },
        "trio_mcp",
    )
