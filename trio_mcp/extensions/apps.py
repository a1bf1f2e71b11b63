"""Apps: pages that a host shows beside the result of a tool (MCP Apps, SEP-1865).

    clock = add_page(server, "ui://clock/face", Path("clock.html"))

    @clock.tool
    async def time_in(city: str) -> Time: ...

A page is a resource under `ui://`, and a tool names it in its `_meta`.  A host that shows pages loads it in a frame
without access to the host, and passes it the arguments and the result of the call.  Any other client ignores the page,
so the tool returns a result for a model as well.

For hosts, `read_page` reads a page and gives the policy under which it may be shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, overload
from weakref import WeakSet

import attrs

from trio_mcp.core.content import BlobResourceContents, Resource, TextResourceContents
from trio_mcp.core.errors import RemoteProtocolError, UsageError, shown
from trio_mcp.core.messages import JsonObject

if TYPE_CHECKING:
    from trio_mcp.client.client import Client
    from trio_mcp.core.models import Tool
    from trio_mcp.server.context import Context
    from trio_mcp.server.server import Server

__all__ = [
    "APPS", "PAGE_TYPE", "AppPage", "HostedPage", "add_page", "is_for_model", "page_of", "read_page", "shows_pages",
]  # fmt: skip

APPS: Final = "io.modelcontextprotocol/ui"
PAGE_TYPE: Final = "text/html;profile=mcp-app"

F = TypeVar("F", bound=Callable[..., Any])
Visibility: TypeAlias = Literal["model", "app"]
Permission: TypeAlias = Literal["camera", "microphone", "geolocation", "clipboardWrite"]

_PERMISSIONS = ("camera", "microphone", "geolocation", "clipboardWrite")
_EVERYONE: tuple[Visibility, ...] = ("model", "app")
# A scheme, a host whose first label may be a wildcard, and a port.  No character of it could begin another directive.
_ORIGIN = re.compile(r"(?:https?|wss?)://(?:\*\.)?[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*(?::[0-9]{1,5})?")
_DOMAINS = {
    "connectDomains": ("connect-src",),
    "resourceDomains": ("script-src", "style-src", "img-src", "font-src", "media-src"),
    "frameDomains": ("frame-src",),
    "baseUriDomains": ("base-uri",),
}
_NOTHING = "'none'"
_servers: WeakSet[Server] = WeakSet()  # those that declare the extension


# Servers.


class AppPage:
    """A page of a server, made by `add_page`."""

    def __init__(self, server: Server, uri: str) -> None:
        self.uri = uri
        self._server = server

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(self, *, visibility: Collection[Visibility] = ..., **options: Any) -> Callable[[F], F]: ...
    def tool(self, function: Any = None, *, visibility: Collection[Visibility] = _EVERYONE, **options: Any) -> Any:
        """Register a tool whose result the page shows: `@page.tool`, or `@page.tool(name="add", ...)`.

        `visibility` lists its callers: the "model", the "app" (the page itself), or both.  The other options are those
        of `Server.tool`.
        """
        if isinstance(visibility, str) or not visibility or not set(visibility) <= {*_EVERYONE}:
            raise UsageError(f'visibility must be a list of "model" and "app", got {visibility!r}')
        meta = {**(options.pop("meta", None) or {}), "ui": self._link(visibility)}
        register = self._server.tool(meta=meta, **options)
        return register if function is None else register(function)

    def _link(self, visibility: Collection[Visibility]) -> JsonObject:
        return {"resourceUri": self.uri, "visibility": [each for each in _EVERYONE if each in visibility]}


def add_page(
    server: Server,
    uri: str,
    html: str | Path,
    *,
    name: str | None = None,
    description: str | None = None,
    connect: Sequence[str] = (),
    load: Sequence[str] = (),
    frames: Sequence[str] = (),
    permissions: Collection[Permission] = (),
    prefers_border: bool | None = None,
) -> AppPage:
    """Add a page to a server.

    - `html`: the document, or the path of a file that is read whenever a host asks.
    - `connect`, `load`, `frames`: origins to which the page connects, from which it loads scripts, styles and images,
      and that it shows in frames, such as "https://api.example.com".  By default there are none: the page holds all.
    - `permissions`: parts of the browser that the page uses: "camera" and others.  The host may refuse them.

    Raises `UsageError` for a URI without ``ui://``, an origin that is none, a missing file, or an unknown permission.
    """
    if not uri.startswith("ui://"):
        raise UsageError(f'the URI of a page must begin with ui://, as in "ui://clock/face"; got {shown(uri)}')
    if isinstance(html, Path) and not html.is_file():
        raise UsageError(f"there is no file {html}")
    if unknown := [each for each in permissions if each not in _PERMISSIONS]:
        raise UsageError(f"unknown permission {unknown[0]!r}; the permissions are {', '.join(_PERMISSIONS)}")
    domains = {"connectDomains": connect, "resourceDomains": load, "frameDomains": frames}
    for each in (*connect, *load, *frames):
        if not _ORIGIN.fullmatch(each):
            raise UsageError(f'{each!r} is not an origin, such as "https://api.example.com"')
    ui: JsonObject = {}
    if csp := {key: list(origins) for key, origins in domains.items() if origins}:
        ui["csp"] = csp
    if permissions:
        ui["permissions"] = {each: {} for each in permissions}
    if prefers_border is not None:
        ui["prefersBorder"] = prefers_border
    meta = {"ui": ui} if ui else None
    resource = Resource(uri=uri, name=name or uri, description=description, mime_type=PAGE_TYPE, meta=meta)

    def read(ctx: Context, uri: str) -> TextResourceContents:
        text = html if isinstance(html, str) else html.read_text(encoding="utf-8")
        return TextResourceContents(uri, text=text, mime_type=PAGE_TYPE, meta=meta)

    server.add_resource(resource, read)
    if server not in _servers:
        server.extension(APPS)
        _servers.add(server)
    return AppPage(server, uri)


def shows_pages(ctx: Context) -> bool:
    """Whether the client of a call shows pages."""
    types = (ctx.extension(APPS) or {}).get("mimeTypes")
    return isinstance(types, list) and PAGE_TYPE in types


# Hosts.


@attrs.frozen
class HostedPage:
    """A page as a host gets it.

    Show it in a frame with the attribute `sandbox` and another origin than the host's, under `policy`; grant none of
    `permissions` without asking the user.
    """

    uri: str
    html: str = attrs.field(repr=False)
    policy: str
    """The Content-Security-Policy: nothing is allowed that the server has not declared."""
    permissions: tuple[str, ...]
    prefers_border: bool | None


def page_of(tool: Tool) -> str | None:
    """Return the URI of the page that shows the results of a tool, or None."""
    uri = _ui(tool.meta).get("resourceUri")
    return uri if isinstance(uri, str) and uri.startswith("ui://") else None


def is_for_model(tool: Tool) -> bool:
    """Whether a model may see a tool; the others are for pages of the same server only."""
    visibility = _ui(tool.meta).get("visibility", _EVERYONE)
    return isinstance(visibility, list | tuple) and "model" in visibility


async def read_page(client: Client, uri: str) -> HostedPage:
    """Read a page of a server.

    Raises `RemoteProtocolError` if it is no page, and for origins that are none: they could change the policy.
    """
    for each in (await client.read_resource(uri)).contents:
        if isinstance(each, TextResourceContents | BlobResourceContents) and each.uri == uri:
            break
    else:
        raise RemoteProtocolError(f"the server did not return the page {shown(uri)}")
    if each.mime_type != PAGE_TYPE:
        raise RemoteProtocolError(f"the page {shown(uri)} has the type {shown(each.mime_type)}, not {PAGE_TYPE}")
    try:
        html = each.text if isinstance(each, TextResourceContents) else each.blob.decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"the page {shown(uri)} is not UTF-8") from None
    ui = _ui(each.meta)
    csp, permissions, border = ui.get("csp"), ui.get("permissions"), ui.get("prefersBorder")
    asked = tuple(name for name in _PERMISSIONS if isinstance(permissions, Mapping) and name in permissions)
    return HostedPage(uri, html, _policy(uri, csp), asked, border if isinstance(border, bool) else None)


def _ui(meta: Mapping[str, Any] | None) -> Mapping[str, Any]:
    ui = None if meta is None else meta.get("ui")
    return ui if isinstance(ui, Mapping) else {}


def _policy(uri: str, csp: object) -> str:
    """Return the policy for the declared origins."""
    own = "'self' 'unsafe-inline'"
    sources = {
        "default-src": "'none'",
        "script-src": own,
        "style-src": own,
        "img-src": "'self' data:",
        "font-src": "'self'",
        "media-src": "'self' data:",
        "connect-src": "",
        "frame-src": "",
        "object-src": "'none'",
        "base-uri": "",
    }
    for member, directives in _DOMAINS.items():
        origins = csp.get(member, ()) if isinstance(csp, Mapping) else ()
        if not isinstance(origins, list | tuple) or not all(isinstance(each, str) for each in origins):
            raise RemoteProtocolError(f"the page {shown(uri)}: {member} must be a list of origins")
        if wrong := [each for each in origins if not _ORIGIN.fullmatch(each)]:
            raise RemoteProtocolError(f"the page {shown(uri)}: {shown(wrong[0])} of {member} is not an origin")
        for directive in directives:
            sources[directive] = " ".join([*filter(None, [sources[directive]]), *origins])
    empty = {"base-uri": "'self'"}
    return "; ".join(f"{name} {allowed or empty.get(name, _NOTHING)}" for name, allowed in sources.items())
