"""OAuth without sockets: the flow of a client, tokens, discovery, and the checks of a resource server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.oauth.actions import *
    from trio_mcp.core.oauth.discovery import *
    from trio_mcp.core.oauth.errors import *
    from trio_mcp.core.oauth.flow import *
    from trio_mcp.core.oauth.messages import *
    from trio_mcp.core.oauth.records import *
    from trio_mcp.core.oauth.resource import *
    from trio_mcp.core.oauth.tokens import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "actions": (
                "AskAssertion Asserted BrowserReturned FlowAbandoned FlowAction FlowDone FlowEvent FlowFailed "
                "ForbiddenAddress OpenBrowser OpenReceiver Persist ReceiverReady Replied RequestFailed "
                "ReturnIgnored SendRequest"
            ),
            "discovery": (
                "AuthChallenge BEARER Challenge DPOP Network PUBLIC ResourceDocument ServerDocument UrlRules "
                "check_redirect_uri client_id_fault covers default_server is_loopback issuer_fault network_at "
                "read_auth_challenge read_challenges read_object read_resource read_server redirect_target "
                "resource_metadata_urls resource_of scopes_of server_metadata_urls union url_fault"
            ),
            "errors": "AuthorizationFailed Blame is_final",
            "flow": "Flow",
            "messages": (
                "Application AuthorizationCode ClientCredentials Entropy Grant IdentityAssertion JWT_BEARER Key "
                "Nonces PendingAuthorization WorkloadIdentity authenticated authorization_url censored check_pkce "
                "choose_method client_document dpop_proof form new_authorization read_registration read_return "
                "read_tokens refused registration registration_refused"
            ),
            "records": "ClientAuthMethod OAuthClient ServerRecord TokenGrant Tokens as_json read_record",
            "resource": "CannotVerify Protection ResourceServer Verify WELL_KNOWN canonical claims_fault scopes_in",
            "tokens": "Authorized AuthorizedRequest Authorizer StartFlow Verdict WaitForFlow",
        },
    )
