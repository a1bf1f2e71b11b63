"""A browser with a user that allows everything: it follows redirects, keeps cookies, and presses Allow.

It needs only the standard library, because it runs in the environments of the SDKs and in ours.  It runs in a thread.
"""

from __future__ import annotations

import html
import re
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlencode, urljoin, urlsplit
from urllib.request import HTTPCookieProcessor, HTTPRedirectHandler, ProxyHandler, Request, build_opener

_INPUT = re.compile(r'<input type="hidden" name="([^"]*)" value="([^"]*)">')
_ACTION = re.compile(r'<form method="post" action="([^"]*)">')


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Browser:
    """The browser of one user.  Like real browsers, its cookie jar treats http on loopback as secure."""

    def __init__(self) -> None:
        policy = DefaultCookiePolicy(secure_protocols=("http", "https"))
        self.cookies = CookieJar(policy)
        # All its URLs are on loopback, so it must not use the proxy of the machine.
        self._opener = build_opener(_NoRedirect, HTTPCookieProcessor(self.cookies), ProxyHandler({}))
        self.pages: list[str] = []

    def ask(self, url: str, body: bytes | None = None) -> tuple[int, Any, str]:
        """Send one request and return status, headers and text.  With a body it is a POST."""
        try:
            with self._opener.open(Request(url, body), timeout=30) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except HTTPError as answer:
            with answer:
                return answer.code, answer.headers, answer.read().decode()

    def visit(self, url: str) -> str:
        """Go from the authorization URL to the redirect URI of the client.  Return that URI; it gets no request."""
        (redirect_uri,) = parse_qs(urlsplit(url).query)["redirect_uri"]
        form: bytes | None = None
        for _ in range(10):
            if url.startswith(redirect_uri):
                return url
            status, headers, text = self.ask(url, form)
            if status in (302, 303):
                url, form = urljoin(url, headers["Location"]), None
                continue
            self.pages.append(text)
            action = _ACTION.search(text)
            if status != 200 or action is None:
                raise AssertionError(f"there is no form at {url.partition('?')[0]}: {status} {text}")
            hidden = [(name, html.unescape(value)) for name, value in _INPUT.findall(text)]
            url, form = urljoin(url, html.unescape(action[1])), urlencode([*hidden, ("decision", "allow")]).encode()
        raise AssertionError("there are too many redirects")
