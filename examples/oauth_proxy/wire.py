"""Requests and responses: forms, pages, errors, and the check of redirect URIs."""

from contextlib import aclosing
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

MAX_BODY = 64 * 1024  # bytes
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NO_STORE = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
# No frames: the user could click on an invisible page (clickjacking).
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
PAGE_HEADERS = {**NO_STORE, "Content-Security-Policy": POLICY, "X-Frame-Options": "DENY"}
STYLE = """
  :root { color-scheme: light dark }
  body { font: 1.1rem/1.5 system-ui, sans-serif; max-width: 34rem; margin: 10vh auto 0; padding: 0 1.5rem }
  h1 { font-size: 1.4rem }
  h1, p { overflow-wrap: anywhere }
  button { font: inherit; padding: .4rem 1.2rem }
"""


class OAuthError(Exception):
    """The refusal of a request: its OAuth error code, the reason in words, and the HTTP status."""

    def __init__(self, error: str, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.error, self.why, self.status = error, why, status


def is_valid_redirect_uri(uri: Any) -> bool:
    """Allow https, and http on loopback for programs without a web site."""
    if not isinstance(uri, str) or len(uri) > 500 or not uri.isascii() or not uri.isprintable():
        return False
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018  # raises ValueError if the port is invalid
    except ValueError:
        return False
    secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    return secure and bool(parts.hostname) and "@" not in parts.netloc and not set(uri) & set(' "<>#\\')


async def body_of(request: Request) -> str:
    body = b""
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > MAX_BODY:
                raise OAuthError("invalid_request", "the request is too long", 413)
    return body.decode(errors="replace")


def fields_of(text: str) -> dict[str, str]:
    pairs = parse_qsl(text, keep_blank_values=True)
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise OAuthError("invalid_request", "a parameter came twice")
    return fields


def html_page(title: str, body: str) -> str:
    """Return a page; `body` is HTML, in which the caller has escaped the values of clients."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{body}</html>"
    )


def error_response(request: Request, error: Exception) -> Response:
    """Return a page for a browser, without a redirect, or JSON for a program."""
    assert isinstance(error, OAuthError)
    if request.url.path in ("/authorize", "/consent", "/callback"):
        return HTMLResponse(html_page("Sorry", f"<h1>Sorry</h1><p>{escape(error.why)}</p>"), error.status, PAGE_HEADERS)
    content = {"error": error.error, "error_description": error.why}
    challenge = {"WWW-Authenticate": "Basic"} if error.status == 401 else {}
    return JSONResponse(content, error.status, {**NO_STORE, **challenge})
