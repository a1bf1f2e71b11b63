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
            "challenge": "AuthChallenge BEARER Challenge DPOP read_challenges read_demand scopes_of union",
            "clients": (
                "Application AuthorizationCode ClientAuthMethod ClientCredentials Grant IdentityAssertion "
                "OAuthClient WorkloadIdentity authenticated choose_method client_document find_client "
                "find_own_client given_client is_printable read_registration registration registration_refused"
            ),
            "deeds": (
                "AskAssertion Asserted BrowserReturned Deed FlowAbandoned FlowDone FlowFailed ForbiddenAddress "
                "Heard OpenBrowser OpenReceiver Persist ReceiverReady Replied RequestFailed ReturnIgnored "
                "SendRequest"
            ),
            "documents": (
                "ResourceDocument ServerDocument default_server read_object read_resource read_seconds read_server"
            ),
            "errors": "AuthorizationFailed Blame censored words_of",
            "flow": "FLOW Flow FlowFinding FlowSettings FlowStep",
            "grants": (
                "JWT_BEARER OFFLINE PendingAuthorization authorization_url check_pkce code_grant exchange_grant "
                "form jwt_grant own_grant pending read_assertion read_return read_tokens refresh_grant refused"
            ),
            "places": (
                "Network PUBLIC UrlRules client_id_fault covers is_loopback is_trusted issuer_fault legacy_place "
                "misplaced moved_to network_at networks_of origin_of place_fault redirect_fault resource_of "
                "resource_places same_origin server_places trust url_fault"
            ),
            "principals": "Principal declared_scopes has_scopes",
            "proofs": "Entropy Key Nonces base64url client_assertion dpop_proof token_text",
            "records": "ServerRecord TokenGrant Tokens as_json read_record",
            "resource": "CannotVerify Protection ResourceServer Verify WELL_KNOWN canonical claims_fault scopes_in",
            "search": "DocumentSearch led_elsewhere",
            "tokens": "Authorized AuthorizedRequest Authorizer StartFlow Verdict WaitForFlow",
        },
    )
