"""Looking for one document at several places, in order, until one of them has it.

A place that answers 4xx, or with something that is no JSON object, does not have it; programs with one page for all
paths answer 200 to everything.  One that answers 5xx, or not at all, may have it, and so may one in a network where it
must not be asked: the search goes on, but when it ends with nothing it has failed, instead of having found that there
is nothing.
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
    """`request` is what to send next; `read` says what came of it.  With `exhausted`, there is nothing to send."""

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
        """The document, if this is one."""
        url = self.asked[-1]
        if isinstance(heard, ForbiddenAddress):
            self.pass_over(led_elsewhere(url, heard, self._blame))
            return None
        if isinstance(heard, RequestFailed):
            self.pass_over(AuthorizationFailed(Blame.NETWORK, f"{_bare(url)} could not be asked: {heard.why}", _LATER))
            return None
        if heard.status in _REDIRECTS:
            self._follow(url, heard.headers.get("Location", ""))
            return None
        if heard.status >= 500 or heard.status in _BUSY:
            self.pass_over(AuthorizationFailed(self._blame, f"{_bare(url)} answered {heard.status}", _LATER))
            return None
        return read_object(heard.body, self._rules.document_bytes) if 200 <= heard.status < 300 else None

    def pass_over(self, trouble: AuthorizationFailed) -> None:
        """What is at this place cannot be used.  The first such trouble is the reason, should nothing else be found."""
        self._trouble = self._trouble or trouble

    def conclude(self) -> None:
        """There is nothing more to ask.  Raises where nobody can know whether there is such a document."""
        if self._trouble is not None:
            raise self._trouble

    def _follow(self, url: str, location: str) -> None:
        # Nobody follows redirects but here, where what they lead to is looked at first.
        target = moved_to(url, location, self._rules)
        if target is not None and self._redirects > 0:
            self._redirects -= 1
            self._places.insert(0, target)


def led_elsewhere(url: str, heard: ForbiddenAddress, blame: Blame) -> AuthorizationFailed:
    where = misplaced(network_at(heard.address))
    return AuthorizationFailed(blame, f"{_bare(url)} leads to {shown(heard.address)}, which {where}", trust(url))


def _bare(url: str) -> str:
    return shown(url.partition("?")[0])


_LATER = "it may be tried again later"
