"""Why there is no token: who is to blame, and what they can do about it.

Every failure of authorization is an `AuthorizationFailed`, whose text is one sentence: what was wrong, then what helps.
`blame` says to programs who it was.  What a server wrote may be repeated in it, cut and on one line, but never a secret
of ours: `censored` takes out whatever the server has echoed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from trio_mcp.core.errors import McpError, redacted, shown
from trio_mcp.core.jsonrpc import Json

__all__ = ["AuthorizationFailed", "Blame", "censored", "words_of"]


class Blame(enum.Enum):
    APPLICATION = "the application"
    USER = "the user"
    SERVER = "the MCP server"
    AUTHORIZATION_SERVER = "the authorization server"
    IDENTITY_PROVIDER = "the identity provider"
    NETWORK = "the network"


class AuthorizationFailed(McpError):
    """There is no token for a request, or none that is good enough.

    `advice` is what the one to blame can do, `code` the error of OAuth that was answered with, if any was.
    """

    def __init__(self, blame: Blame, why: str, advice: str, code: str = "") -> None:
        super().__init__(f"{why}; {advice}")
        self.code = code
        self.blame = blame
        self.why = why
        self.advice = advice

    @property
    def passes(self) -> bool:
        """Whether to try again later may help by itself; else it asks the user once more, or changes nothing."""
        return self.blame in (Blame.NETWORK, Blame.AUTHORIZATION_SERVER, Blame.IDENTITY_PROVIDER)


def censored(text: object, secrets: Iterable[str | None], limit: int = 200) -> str:
    """What a server said, as an error of ours may repeat it."""
    return shown(redacted(text if isinstance(text, str) else repr(text), secrets), limit)


def words_of(said: Mapping[str, Json] | None, status: int) -> str:
    """OAuth's name for a refusal and the words with it.  What is no text could be nested too deep to be shown."""
    told = [] if said is None else [said.get(name) for name in ("error", "error_description")]
    return ": ".join(each for each in told if isinstance(each, str) and each) or f"status {status}"
