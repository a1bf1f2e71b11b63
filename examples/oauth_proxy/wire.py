"""What comes in and goes out: forms, refusals, and where a browser may be sent."""

from contextlib import aclosing
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

MOST = 64 * 1024  # bytes of a request
LOOPBACK = ("localhost", "127.0.0.1", "::1")
NEVER = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
# A page in a frame could be clicked without being seen.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
PAGE = {**NEVER, "Content-Security-Policy": POLICY, "X-Frame-Options": "DENY"}
STYLE = """
  :root { color-scheme: light dark }
  body { font: 1.1rem/1.5 system-ui, sans-serif; max-width: 34rem; margin: 10vh auto 0; padding: 0 1.5rem }
  h1 { font-size: 1.4rem }
  h1, p { overflow-wrap: anywhere }
  button { font: inherit; padding: .4rem 1.2rem }
"""


class Fault(Exception):
    """Why a request is refused: OAuth's name for it, and words."""

    def __init__(self, error: str, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.error, self.why, self.status = error, why, status


def may_be_returned_to(uri: Any) -> bool:
    """https, or http on loopback, which is how programs without a site do it."""
    if not isinstance(uri, str) or len(uri) > 500 or not uri.isascii() or not uri.isprintable():
        return False
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018  # which is read only now
    except ValueError:
        return False
    secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    return secure and bool(parts.hostname) and "@" not in parts.netloc and not set(uri) & set(' "<>#\\')


async def body_of(request: Request) -> str:
    body = b""
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > MOST:
                raise Fault("invalid_request", "the request is too long", 413)
    return body.decode(errors="replace")


def fields_of(text: str) -> dict[str, str]:
    pairs = parse_qsl(text, keep_blank_values=True)
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Fault("invalid_request", "a parameter came twice")
    return fields


def page(title: str, body: str) -> str:
    """What is in `body` is HTML, and what others have said in it is escaped."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{body}</html>"
    )


def refusal(request: Request, fault: Exception) -> Response:
    """A page for those in a browser, which is not sent anywhere, and JSON for programs."""
    assert isinstance(fault, Fault)
    if request.url.path in ("/authorize", "/consent", "/callback"):
        return HTMLResponse(page("Sorry", f"<h1>Sorry</h1><p>{escape(fault.why)}</p>"), fault.status, PAGE)
    said = {"error": fault.error, "error_description": fault.why}
    known = {"WWW-Authenticate": "Basic"} if fault.status == 401 else {}
    return JSONResponse(said, fault.status, {**NEVER, **known})
