"""OAuth on Trio: tokens for clients, the user's browser, token stores, signing keys, and the keys of issuers.

The names below are public.  A module is loaded when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.oauth.errors import AuthorizationFailed as AuthorizationFailed
    from trio_mcp.core.oauth.errors import Blame as Blame
    from trio_mcp.core.oauth.messages import Application as Application
    from trio_mcp.core.oauth.messages import AuthorizationCode as AuthorizationCode
    from trio_mcp.core.oauth.messages import ClientCredentials as ClientCredentials
    from trio_mcp.core.oauth.messages import IdentityAssertion as IdentityAssertion
    from trio_mcp.core.oauth.messages import Key as Key
    from trio_mcp.core.oauth.messages import WorkloadIdentity as WorkloadIdentity
    from trio_mcp.core.oauth.messages import client_document as client_document
    from trio_mcp.core.oauth.records import OAuthClient as OAuthClient
    from trio_mcp.core.oauth.resource import CannotVerify as CannotVerify
    from trio_mcp.core.principals import Principal as Principal
    from trio_mcp.oauth.client import OAuth as OAuth
    from trio_mcp.oauth.client import OnAssertion as OnAssertion
    from trio_mcp.oauth.client import OnVisit as OnVisit
    from trio_mcp.oauth.jwks import JwksVerifier as JwksVerifier
    from trio_mcp.oauth.keys import load_key as load_key
    from trio_mcp.oauth.keys import new_key as new_key
    from trio_mcp.oauth.token_stores import FileTokenStore as FileTokenStore
    from trio_mcp.oauth.token_stores import MemoryTokenStore as MemoryTokenStore
    from trio_mcp.oauth.token_stores import TokenStore as TokenStore
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "core.oauth.errors": "AuthorizationFailed Blame",
            "core.oauth.messages": (
                "Application AuthorizationCode ClientCredentials IdentityAssertion Key WorkloadIdentity client_document"
            ),
            "core.principals": "Principal",
            "core.oauth.records": "OAuthClient",
            "core.oauth.resource": "CannotVerify",
            "oauth.client": "OAuth OnAssertion OnVisit",
            "oauth.jwks": "JwksVerifier",
            "oauth.keys": "load_key new_key",
            "oauth.token_stores": "FileTokenStore MemoryTokenStore TokenStore",
        },
        "trio_mcp",
    )
