"""The errors of authorization: who is to blame, and what helps.

Every failure of authorization is an `AuthorizationFailed`.  Its text is one sentence: the fault, then the advice.
`blame` is the same for programs.  The text may repeat the words of a server, cut and on one line, but never a secret of
the client: `censored` removes secrets that the server has echoed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from trio_mcp.core.errors import McpError, redacted, shown
from trio_mcp.core.messages import Json

__all__ = ["AuthorizationFailed", "Blame", "censored", "error_text"]


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


def censored(text: object, secrets: Iterable[str | None], limit: int = 200) -> str:
    """Return a server's text in the form in which our errors may repeat it."""
    return shown(redacted(text if isinstance(text, str) else repr(text), secrets), limit)


def error_text(answer: Mapping[str, Json] | None, status: int) -> str:
    """Return the error code and the description of a refusal.

    Only strings: other values may be nested too deep to show.
    """
    texts = [] if answer is None else [answer.get(name) for name in ("error", "error_description")]
    return ": ".join(each for each in texts if isinstance(each, str) and each) or f"status {status}"
