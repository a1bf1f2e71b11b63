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
from trio_mcp.core.oauth.places import UrlRules, misplaced, moved_to, network_at, trust

__all__ = ["DocumentSearch", "led_elsewhere"]

_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429)


class DocumentSearch:
    """Call `request` for the next request to send, and `read` with its result.  If `exhausted`, no URL is left."""

    def __init__(self, places: Sequence[str], rules: UrlRules, blame: Blame, headers: Fields = ()) -> None:
        self.asked: list[str] = []
        self._places = list(places)
        self._rules = rules
        self._blame = blame
        self._headers = headers
        self._redirects = rules.redirects
        self._trouble: AuthorizationFailed | None = None

    @property
    def exhausted(self) -> bool:
        return not self._places

    def request(self) -> SendRequest:
        self.asked.append(self._places.pop(0))
        return SendRequest(
            "GET",
            self.asked[-1],
            (("Accept", JSON), *self._headers),
            body_bytes=self._rules.document_bytes,
            seconds=self._rules.request_seconds,
        )

    def read(self, heard: Replied | ForbiddenAddress | RequestFailed) -> JsonObject | None:
        """Return the document, or None if this result is none."""
        url = self.asked[-1]
        if isinstance(heard, ForbiddenAddress):
            self.pass_over(led_elsewhere(url, heard, self._blame))
            return None
        if isinstance(heard, RequestFailed):
            self.pass_over(
                AuthorizationFailed(Blame.NETWORK, f"{_bare(url)} could not be reached: {heard.why}", _LATER)
            )
            return None
        if heard.status in _REDIRECTS:
            self._follow(url, heard.headers.get("Location", ""))
            return None
        if heard.status >= 500 or heard.status in _BUSY:
            self.pass_over(AuthorizationFailed(self._blame, f"{_bare(url)} answered {heard.status}", _LATER))
            return None
        return read_object(heard.body, self._rules.document_bytes) if 200 <= heard.status < 300 else None

    def pass_over(self, trouble: AuthorizationFailed) -> None:
        """Skip a URL because of this error.  If no document is found, the first skipped error is the reason."""
        self._trouble = self._trouble or trouble

    def conclude(self) -> None:
        """End the search without a document.  Raises if one may exist."""
        if self._trouble is not None:
            raise self._trouble

    def _follow(self, url: str, location: str) -> None:
        # The driver follows no redirects, so that each target is checked here first.
        target = moved_to(url, location, self._rules)
        if target is not None and self._redirects > 0:
            self._redirects -= 1
            self._places.insert(0, target)


def led_elsewhere(url: str, heard: ForbiddenAddress, blame: Blame) -> AuthorizationFailed:
    where = misplaced(network_at(heard.address))
    return AuthorizationFailed(blame, f"{_bare(url)} leads to {shown(heard.address)}, which {where}", trust(url))


def _bare(url: str) -> str:
    return shown(url.partition("?")[0])


_LATER = "try again later"
