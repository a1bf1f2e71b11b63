"""The rules for URLs: which ones authorization may contact, and in which order documents are searched.

Every URL must be https.  Plain http is allowed only on loopback, and only if the application says so
(`UrlRules.loopback`).  The one exception is the redirect URI of a program that runs beside the browser: it is usually
http on loopback.

A server names URLs for the client to follow.  A hostile server could name URLs that it cannot reach itself, but this
process can.

| A URL that a server names is | followed |
|---|---|
| at the origin of the MCP server, whose URL is the application's | always |
| in a public network | always |
| in another `Network` | if the MCP server is in the same one, or the application lists the origin (`trusted_origins`) |
| an endpoint at another origin than its issuer's | if the issuer promises `iss` (RFC 9207), or is listed |

The network of a host name is known only once a connection is open.  `SendRequest.networks` are the allowed ones, and a
driver whose connection leads to another one reports `ForbiddenAddress` before it sends anything.  Behind a proxy the
proxy decides.  For the page in the browser only the URL is checked; the rest is up to the browser.

The last row prevents a mix-up: an authorization server that names another server's page and its own token endpoint
would receive the code of the other.  A promise of `iss` makes this useless, because the code is dropped unless it comes
with the issuer that was asked, which the other server does not send.  The endpoints of a listed issuer may be anywhere.

A resource is compared with the server's URL by the rule of RFC 9728: same origin, and a path that contains the
server's.  Issuers are plain strings, compared by `==`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, urljoin, urlsplit

from trio_mcp.core.records import record

__all__ = [
    "PUBLIC", "Network", "UrlRules", "client_id_fault", "covers", "forbidden_reason", "is_loopback", "is_trusted",
    "issuer_fault", "legacy_metadata_url", "network_at", "network_fault", "networks_of", "origin_of", "redirect_fault",
    "redirect_target", "resource_metadata_urls", "resource_of", "same_origin", "server_metadata_urls", "trust_advice",
    "url_fault",
]  # fmt: skip

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_DEFAULT_PORTS = {"https": 443, "http": 80}


class Network(enum.Enum):
    """A part of the network with addresses of its own.  The value describes it in messages."""

    PUBLIC = "on a public network"
    PRIVATE = "on a private network"  # any other network that is not reachable from everywhere
    LINK_LOCAL = "on the link-local network"  # where clouds give machines their credentials
    LOOPBACK = "on this machine"


PUBLIC = frozenset({Network.PUBLIC})


@record
class UrlRules:
    """The URLs that an application allows, and limits on the cost of requests to them."""

    # For development: http to an MCP server and to authorization servers, on loopback only.
    loopback: bool = False
    # Origins that are followed in any network.  Their issuers may have endpoints at other origins.
    trusted_origins: tuple[str, ...] = ()
    # The longest known metadata documents have some 10 KB.  A longer response counts as unreadable.
    document_bytes: int = 256 * 1024
    # A healthy server sends a document within seconds, and no person looks for a password for half an hour.
    request_seconds: float = 30.0
    user_seconds: float = 600.0
    # Redirects of one search for a document; they stay at the same origin.
    redirects: int = 3
    # How often more scopes are requested for one operation before its refusal is final (auth-83, auth-113).
    step_ups: int = 2
    # Seconds before its expiry at which a token is renewed, because the request needs time to arrive.
    margin: float = 10.0


def url_fault(url: object, rules: UrlRules) -> str | None:
    """Return the fault of a URL to request, or None."""
    if not isinstance(url, str) or not re.fullmatch(r"[!-\[\]-~]{1,2048}", url):
        return "is not a URL"
    parts = _split(url)
    if parts is None or not parts.hostname or not _is_host(parts.hostname):
        return "is not an absolute URL"
    if parts.scheme != "https" and not (rules.loopback and parts.scheme == "http" and parts.hostname in _LOOPBACK):
        return "is not https"
    if "@" in parts.netloc:
        return "contains credentials"
    return "has a fragment" if "#" in url else None


def issuer_fault(issuer: object, rules: UrlRules) -> str | None:
    """RFC 8414: "a URL that uses the "https" scheme and has no query or fragment components"."""
    fault = url_fault(issuer, rules)
    return fault or ("has a query" if "?" in str(issuer) else None)


def redirect_fault(uri: str) -> str | None:
    """auth-26: a redirect URI must be on loopback, or https."""
    return url_fault(uri, UrlRules(loopback=True))


def client_id_fault(url: str) -> str | None:
    """auth-71: a URL that is a client id must be https, and have a path."""
    fault = url_fault(url, UrlRules())
    if fault is not None:
        return fault
    path = urlsplit(url).path
    if path in ("", "/"):
        return "has no path"
    return "has a path with dots" if {".", ".."} & {*path.split("/")} else None


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


_NAME = re.compile(r"[a-z0-9_.-]+")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def _is_host(host: str) -> bool:
    """Whether this is a host name, or an address in standard notation.

    Browsers and operating systems take a name that ends in a number for an address, so 2130706433 and 0x7f.1 lead to
    this machine.  And only browsers decode "%".
    """
    if _address(host) is not None:
        return "%" not in host
    return bool(_NAME.fullmatch(host)) and not _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2])


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


# Networks.

_GLOBAL = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def network_at(address: str) -> Network:
    """Return the network of an IP address.  An address that embeds an IPv4 address has that one's network."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (IPv4Address(found.packed[12:]) if found in _NAT64 else None)
        found = inner or found
    if found.is_loopback or found.is_unspecified:  # a connection to 0.0.0.0 leads to this machine
        return Network.LOOPBACK
    if found.is_link_local:
        return Network.LINK_LOCAL
    public = found.is_global and not found.is_multicast and (found.version == 4 or found in _GLOBAL)
    return Network.PUBLIC if public else Network.PRIVATE


def _network_named(url: str) -> Network | None:
    """The network of a URL's host, if the URL shows it; None for a name, whose network only a connection shows."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if _address(host) is not None:
        return network_at(host)
    if host == "localhost" or host.endswith(".localhost"):
        return Network.LOOPBACK
    return Network.PRIVATE if host.endswith(".local") else None


def networks_of(server_url: str, seen: Network | None) -> frozenset[Network]:
    """Return the networks of URLs that the MCP server may name.  `seen`: its network at its last response, if known."""
    return PUBLIC | {each for each in (_network_named(server_url), seen) if each is not None}


def is_trusted(url: str, rules: UrlRules) -> bool:
    """Return whether the application trusts the origin of this URL."""
    return any(same_origin(url, each) for each in rules.trusted_origins)


def network_fault(url: str, rules: UrlRules, networks: Collection[Network]) -> str | None:
    """Return the fault in the network of a URL that a server has named, as far as the URL shows it, or None."""
    found = _network_named(url)
    if found is None or found in networks or is_trusted(url, rules):
        return None
    return forbidden_reason(found)


def forbidden_reason(network: Network) -> str:
    """Return the reason why a URL in this network is not followed."""
    return f"is {network.value}, and the MCP server is not"


def trust_advice(url: str) -> str:
    """Return the advice for allowing this URL."""
    return f"trusted_origins=[{origin_of(url)!r}] allows it, if the application trusts this origin"


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if the port is not valid
    except ValueError:
        return None
    return parts


def _site(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)


def same_origin(one: str, other: str) -> bool:
    return _site(urlsplit(one)) == _site(urlsplit(other))


def origin_of(url: str) -> str:
    """Scheme, host and port, in lower case (auth-14: the authorization base URL of 2025-03-26)."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}"


def covers(resource: str, url: str) -> bool:
    """Return whether `resource` is the server at `url`, or contains it."""
    if url_fault(resource, UrlRules(loopback=True)) is not None:  # auth-43: absolute, without a fragment
        return False
    if not same_origin(resource, url):  # auth-45: scheme and host are compared in lower case
        return False
    theirs, ours = urlsplit(resource), urlsplit(url)
    if theirs.query and theirs.query != ours.query:
        return False
    within = theirs.path.rstrip("/")  # auth-46: a final slash does not make another resource
    return ours.path == within or ours.path.startswith(f"{within}/")


def resource_of(server_url: str) -> str:
    """auth-43 to auth-46: the resource of a server that does not name it.

    Without the query, which may contain a key.
    """
    return f"{origin_of(server_url)}{urlsplit(server_url).path.rstrip('/')}"


# The URLs of documents, in the order of the search.


def resource_metadata_urls(server_url: str, named: str | None, rules: UrlRules) -> tuple[str, ...]:
    """auth-41: the URL in the challenge; else at the path of the server, else at the root.

    A URL that breaks the rules is skipped: servers behind a proxy often name themselves http, and the well-known URLs
    belong to them too.
    """
    parts = urlsplit(server_url)
    root = f"{origin_of(server_url)}/.well-known/oauth-protected-resource"
    query = f"?{parts.query}" if parts.query else ""
    path = parts.path if parts.path != "/" else ""
    urls = [root + path + query, root]
    if named is not None and url_fault(named, rules) is None:
        urls.insert(0, named)
    return tuple(dict.fromkeys(urls))


def server_metadata_urls(issuer: str) -> tuple[str, ...]:
    """auth-67, auth-68: the URLs for the metadata of this issuer, by RFC 8414 and by OpenID Connect."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    oauth, openid = "/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"
    urls = (origin + oauth + path, origin + openid + path, origin + path + openid)
    return tuple(dict.fromkeys(urls))


def legacy_metadata_url(server_url: str) -> str:
    """auth-14: the metadata URL of 2025-03-26, independent of the server's path."""
    return f"{origin_of(server_url)}/.well-known/oauth-authorization-server"


def redirect_target(url: str, location: str, rules: UrlRules) -> str | None:
    """Return the target of a document's redirect, or None if it must not be followed."""
    try:
        target = urljoin(url, location)
    except ValueError:
        return None
    if url_fault(target, rules) is not None or not same_origin(target, url):
        return None
    return target
