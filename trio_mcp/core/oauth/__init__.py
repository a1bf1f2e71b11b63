"""OAuth without sockets: the flow of a client, tokens, discovery, and the checks of a resource server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.oauth.challenge import *
    from trio_mcp.core.oauth.clients import *
    from trio_mcp.core.oauth.deeds import *
    from trio_mcp.core.oauth.documents import *
    from trio_mcp.core.oauth.errors import *
    from trio_mcp.core.oauth.flow import *
    from trio_mcp.core.oauth.grants import *
    from trio_mcp.core.oauth.places import *
    from trio_mcp.core.oauth.principals import *
    from trio_mcp.core.oauth.proofs import *
    from trio_mcp.core.oauth.records import *
    from trio_mcp.core.oauth.resource import *
    from trio_mcp.core.oauth.search import *
    from trio_mcp.core.oauth.tokens import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "challenge": "AuthChallenge BEARER Challenge DPOP read_auth_challenge read_challenges scopes_of union",
            "clients": (
                "Application AuthorizationCode ClientAuthMethod ClientCredentials Grant IdentityAssertion "
                "OAuthClient WorkloadIdentity authenticated choose_method client_document find_client "
                "find_client_without_user is_printable preregistered_client read_registration registration "
                "registration_refused"
            ),
            "deeds": (
                "AskAssertion Asserted BrowserReturned FlowAbandoned FlowAction FlowDone FlowEvent FlowFailed "
                "ForbiddenAddress OpenBrowser OpenReceiver Persist ReceiverReady Replied RequestFailed "
                "ReturnIgnored SendRequest"
            ),
            "documents": (
                "ResourceDocument ServerDocument default_server read_object read_resource read_seconds read_server"
            ),
            "errors": "AuthorizationFailed Blame censored error_text",
            "flow": "FLOW Flow FlowFinding FlowSettings FlowStep",
            "grants": (
                "JWT_BEARER OFFLINE PendingAuthorization authorization_url check_pkce client_credentials_grant "
                "code_grant exchange_grant form jwt_grant new_authorization read_assertion read_return read_tokens "
                "refresh_grant refused"
            ),
            "places": (
                "Network PUBLIC UrlRules client_id_fault covers forbidden_reason is_loopback is_trusted "
                "issuer_fault legacy_metadata_url network_at network_fault networks_of origin_of redirect_fault "
                "redirect_target resource_metadata_urls resource_of same_origin server_metadata_urls trust_advice "
                "url_fault"
            ),
            "principals": "Principal declared_scopes has_scopes",
            "proofs": "Entropy Key Nonces base64url client_assertion dpop_proof token_text",
            "records": "ServerRecord TokenGrant Tokens as_json read_record",
            "resource": "CannotVerify Protection ResourceServer Verify WELL_KNOWN canonical claims_fault scopes_in",
            "search": "DocumentSearch forbidden_address",
            "tokens": "Authorized AuthorizedRequest Authorizer StartFlow Verdict WaitForFlow",
        },
    )
