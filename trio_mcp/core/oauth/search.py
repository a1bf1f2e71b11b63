"""Search for one document at several URLs, in order, until one of them has it.

A server that answers 4xx, or without a JSON object, does not have the document; some servers answer every path with 200
and the same page.  A server that answers 5xx or not at all may have it, and so may a URL in a forbidden network.  The
search then continues, but if it finds no document it fails, because it cannot conclude that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from trio_mcp.core.errors import shown
from trio_mcp.core.http.fields import JSON, Fields
from trio_mcp.core.jsonrpc import JsonObject
from trio_mcp.core.oauth.deeds import ForbiddenAddress, Replied, RequestFailed, SendRequest
from trio_mcp.core.oauth.documents import read_object
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame
from trio_mcp.core.oauth.places import UrlRules, forbidden_reason, network_at, redirect_target, trust_advice

__all__ = ["DocumentSearch", "forbidden_address"]

_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429)


class DocumentSearch:
    """Call `request` for the next request to send, and `read` with its result.  If `exhausted`, no URL is left."""

    def __init__(self, urls: Sequence[str], rules: UrlRules, blame: Blame, headers: Fields = ()) -> None:
        self.requested: list[str] = []
        self._urls = list(urls)
        self._rules = rules
        self._blame = blame
        self._headers = headers
        self._redirects = rules.redirects
        self._error: AuthorizationFailed | None = None

    @property
    def exhausted(self) -> bool:
        return not self._urls

    def request(self) -> SendRequest:
        self.requested.append(self._urls.pop(0))
        return SendRequest(
            "GET",
            self.requested[-1],
            (("Accept", JSON), *self._headers),
            body_bytes=self._rules.document_bytes,
            seconds=self._rules.request_seconds,
        )

    def read(self, event: Replied | ForbiddenAddress | RequestFailed) -> JsonObject | None:
        """Return the document in this result, or None."""
        url = self.requested[-1]
        if isinstance(event, ForbiddenAddress):
            self.pass_over(forbidden_address(url, event, self._blame))
            return None
        if isinstance(event, RequestFailed):
            self.pass_over(
                AuthorizationFailed(Blame.NETWORK, f"{_bare(url)} could not be reached: {event.why}", _LATER)
            )
            return None
        if event.status in _REDIRECTS:
            self._follow(url, event.headers.get("Location", ""))
            return None
        if event.status >= 500 or event.status in _BUSY:
            self.pass_over(AuthorizationFailed(self._blame, f"{_bare(url)} answered {event.status}", _LATER))
            return None
        return read_object(event.body, self._rules.document_bytes) if 200 <= event.status < 300 else None

    def pass_over(self, error: AuthorizationFailed) -> None:
        """Skip a URL because of this error.  If no document is found, the first skipped error is the reason."""
        self._error = self._error or error

    def conclude(self) -> None:
        """End the search without a document.  Raises if one may exist."""
        if self._error is not None:
            raise self._error

    def _follow(self, url: str, location: str) -> None:
        # The driver follows no redirects, so that each target is checked here first.
        target = redirect_target(url, location, self._rules)
        if target is not None and self._redirects > 0:
            self._redirects -= 1
            self._urls.insert(0, target)


def forbidden_address(url: str, event: ForbiddenAddress, blame: Blame) -> AuthorizationFailed:
    where = forbidden_reason(network_at(event.address))
    return AuthorizationFailed(blame, f"{_bare(url)} leads to {shown(event.address)}, which {where}", trust_advice(url))


def _bare(url: str) -> str:
    return shown(url.partition("?")[0])


_LATER = "try again later"
