"""The exceptions of trio_mcp.

`McpError` is the base of all.  `UsageError` blames the calling program, `RemoteProtocolError` the peer.  `RequestError`
is an answer of the peer that is an error.  `SessionClosed` and its subclasses say that a connection or session ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.client.errors import HandshakeError as HandshakeError
    from trio_mcp.client.errors import NoResponse as NoResponse
    from trio_mcp.client.errors import SessionLost as SessionLost
    from trio_mcp.client.errors import Unauthorized as Unauthorized
    from trio_mcp.client.subscriptions import SubscriptionUnsupported as SubscriptionUnsupported
    from trio_mcp.client.tools import ToolFailed as ToolFailed
    from trio_mcp.client.websocket import UpgradeRefused as UpgradeRefused
    from trio_mcp.core.errors import ConnectionFailed as ConnectionFailed
    from trio_mcp.core.errors import InputUnavailable as InputUnavailable
    from trio_mcp.core.errors import McpError as McpError
    from trio_mcp.core.errors import NotDeclared as NotDeclared
    from trio_mcp.core.errors import NotInThisRevision as NotInThisRevision
    from trio_mcp.core.errors import RemoteProtocolError as RemoteProtocolError
    from trio_mcp.core.errors import RequestError as RequestError
    from trio_mcp.core.errors import ResourceNotFound as ResourceNotFound
    from trio_mcp.core.errors import SessionClosed as SessionClosed
    from trio_mcp.core.errors import UsageError as UsageError
    from trio_mcp.core.oauth.errors import AuthorizationFailed as AuthorizationFailed
    from trio_mcp.core.oauth.resource import CannotVerify as CannotVerify
    from trio_mcp.core.schema.cost import InvalidSchema as InvalidSchema
    from trio_mcp.extensions.tasks.client import TaskCancelled as TaskCancelled
    from trio_mcp.server.context import ClientError as ClientError
    from trio_mcp.server.questions import UrlElicitationRequired as UrlElicitationRequired
    from trio_mcp.server.results import ToolError as ToolError
    from trio_mcp.stores.rows import StoreFailed as StoreFailed
    from trio_mcp.stores.rows import StoreFull as StoreFull
    from trio_mcp.transport.child import ServerExited as ServerExited
    from trio_mcp.transport.http_pool import ReplyBroken as ReplyBroken
    from trio_mcp.transport.http_pool import ReplyTooLong as ReplyTooLong
    from trio_mcp.transport.paths import PathRefused as PathRefused
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client.errors": "HandshakeError NoResponse SessionLost Unauthorized",
            "client.subscriptions": "SubscriptionUnsupported",
            "client.tools": "ToolFailed",
            "client.websocket": "UpgradeRefused",
            "core.errors": (
                "ConnectionFailed InputUnavailable McpError NotDeclared NotInThisRevision RemoteProtocolError "
                "RequestError ResourceNotFound SessionClosed UsageError"
            ),
            "core.oauth.errors": "AuthorizationFailed",
            "core.oauth.resource": "CannotVerify",
            "core.schema.cost": "InvalidSchema",
            "extensions.tasks.client": "TaskCancelled",
            "server.context": "ClientError",
            "server.questions": "UrlElicitationRequired",
            "server.results": "ToolError",
            "stores.rows": "StoreFailed StoreFull",
            "transport.child": "ServerExited",
            "transport.http_pool": "ReplyBroken ReplyTooLong",
            "transport.paths": "PathRefused",
        },
        "trio_mcp",
    )
