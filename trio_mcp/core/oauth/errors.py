"""The errors of authorization: who is to blame, and what helps.

Every failure of authorization is an `AuthorizationFailed`.  Its text is one sentence: the fault, then the advice.
`blame` is the same for programs.
"""

from __future__ import annotations

import enum

from trio_mcp.core.errors import McpError, shown

__all__ = ["AuthorizationFailed", "Blame", "is_final"]


class Blame(enum.Enum):
    """The party that has to change something before the authorization can succeed."""

    APPLICATION = "the application"
    USER = "the user"
    SERVER = "the MCP server"
    AUTHORIZATION_SERVER = "the authorization server"
    IDENTITY_PROVIDER = "the identity provider"
    NETWORK = "the network"


class AuthorizationFailed(McpError):
    """A request has no token, or its token is not sufficient.

    `advice` is what the party to `blame` can do.  `code` is the OAuth error code of the response, or "".
    """

    def __init__(self, blame: Blame, why: str, advice: str, code: str = "") -> None:
        super().__init__(f"{why}; {advice}")
        self.code = code
        self.blame = blame
        self.why = why
        self.advice = advice

    @property
    def passes(self) -> bool:
        """True if a later attempt may succeed by itself.  Otherwise it only asks the user again, or changes nothing."""
        return self.blame in (Blame.NETWORK, Blame.AUTHORIZATION_SERVER, Blame.IDENTITY_PROVIDER)


def is_final(error: Exception) -> bool:
    """Whether this is a failure of authorization that does not pass, so that no later attempt is made."""
    return isinstance(error, AuthorizationFailed) and not error.passes


def issuer_failed(issuer: str, why: str, advice: str = "its operator must fix it") -> AuthorizationFailed:
    """Make the error of a mistake of an authorization server; `why` follows its name."""
    return AuthorizationFailed(Blame.AUTHORIZATION_SERVER, f"{shown(issuer)} {why}", advice)
