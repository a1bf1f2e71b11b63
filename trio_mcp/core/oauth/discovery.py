"""Discovery: the challenge of a refused request, the URLs that may be followed, and the documents found there.

Nothing that a server says here is trusted.  A challenge is a hint: its URL is one more place to look for metadata, and
its scopes are only requested.

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

Only the needed fields of a document are read.  A field that is missing or has another type counts as absent, unless
nothing works without it; then the error names the document and the field.  Three checks refuse a document before any
further request: its resource must be the MCP server (another resource's tokens could be meant), its issuer must be the
one whose URL was asked (auth-91), and its endpoints must be allowed by the rules for URLs.

A resource is compared with the server's URL by the rule of RFC 9728: same origin, and a path that contains the
server's.  Issuers are plain strings, compared by `==`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from types import MappingProxyType
from urllib.parse import parse_qsl, urljoin, urlsplit

from trio_mcp.core.elicitation import LOOPBACK_HOSTS
from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.messages import Json, UnreadableNumber, parse, record
from trio_mcp.core.oauth.errors import AuthorizationFailed, Blame

__all__ = [
    "BEARER", "DPOP", "PUBLIC", "AuthChallenge", "Challenge", "Network", "ResourceDocument", "ServerDocument",
    "UrlRules", "check_redirect_uri", "client_id_fault", "covers", "default_server", "is_loopback", "issuer_fault",
    "network_at", "read_auth_challenge", "read_challenges", "read_object", "read_resource", "read_server",
    "redirect_target", "resource_metadata_urls", "resource_of", "scopes_of", "server_metadata_urls", "union",
    "url_fault",
]  # fmt: skip

# WWW-Authenticate.

BEARER = "Bearer"
DPOP = "DPoP"
SCHEMES = {BEARER.lower(): BEARER, DPOP.lower(): DPOP}

# Longer fields are cut.  A field of ten challenges has 1 KB, and the head of a response has a limit of its own.
_LENGTH = 8192
_SCOPES = 200
_SCOPE_TOKEN = r"[!#-\[\]-~]{1,256}"
_ITEM = r"""([!#$%&'*+\-.^_`|~0-9A-Za-z]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*)))?"""


@record
class Challenge:
    """One challenge: the scheme and the parameter names are in lower case."""

    scheme: str
    parameters: Mapping[str, str] = MappingProxyType({})


@record
class AuthChallenge:
    """The demand of a 401 or 403, as far as the server states it.

    `schemes`: the accepted ones of Bearer and DPoP, which are the schemes supported here.
    """

    status: int
    schemes: tuple[str, ...] = ()
    error: str = ""
    scopes: tuple[str, ...] = ()
    metadata_url: str | None = None


def read_challenges(value: str) -> tuple[Challenge, ...]:
    """Return the challenges in order.  Text that is no challenge is skipped.

    The field is a list of challenges.  Each is a scheme with parameters, and commas separate both.  A parameter has
    ``=``, which tells it from a scheme.  The faults of real servers are accepted: missing quotes and missing commas.
    """
    found: list[tuple[str, dict[str, str]]] = []
    for match in re.finditer(_ITEM, value[:_LENGTH]):
        name, quoted, plain = match.groups()
        if quoted is None and plain is None:
            found.append((name.lower(), {}))
        elif found:
            text = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found[-1][1].setdefault(name.lower(), text)
    return tuple(Challenge(scheme, parameters) for scheme, parameters in found)


def read_auth_challenge(status: int, value: str | None) -> AuthChallenge | None:
    """Return the demand of a 401 or 403.  Returns None if all its challenges have other schemes (auth-40).

    A 401 without any challenge is a demand too: the metadata is at a well-known URL (auth-41).
    """
    challenges = read_challenges(value or "")
    ours = [each for each in challenges if each.scheme in SCHEMES]
    if challenges and not ours:
        return None
    said: dict[str, str] = {}
    for each in ours:
        said = {**each.parameters, **said}
    return AuthChallenge(
        status,
        tuple(dict.fromkeys(SCHEMES[each.scheme] for each in ours)),
        said.get("error", ""),
        scopes_of(said.get("scope")),
        said.get("resource_metadata"),
    )


def scopes_of(value: object) -> tuple[str, ...]:
    """Return the scopes in a string, or in a list of strings.  Invalid ones are left out."""
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list | tuple):
        return ()
    good = [each for each in value if isinstance(each, str) and re.fullmatch(_SCOPE_TOKEN, each)]
    return tuple(dict.fromkeys(good))[:_SCOPES]


def union(*scopes: Iterable[str]) -> tuple[str, ...]:
    """auth-112: return all scopes, each once, in order of first appearance."""
    return tuple(dict.fromkeys(scope for each in scopes for scope in each))


# URLs.

_DEFAULT_PORTS = {"https": 443, "http": 80}


class Network(enum.Enum):
    """A part of the network with addresses of its own.  Records contain the value."""

    PUBLIC = "PUBLIC"
    PRIVATE = "PRIVATE"  # any other network that is not reachable from everywhere
    LINK_LOCAL = "LINK_LOCAL"  # where clouds give machines their credentials
    LOOPBACK = "LOOPBACK"


_PLACES = {
    Network.PUBLIC: "on a public network",
    Network.PRIVATE: "on a private network",
    Network.LINK_LOCAL: "on the link-local network",
    Network.LOOPBACK: "on this machine",
}
PUBLIC = frozenset({Network.PUBLIC})


@record
class UrlRules:
    """The URLs that an application allows, and the time that it gives its user."""

    # For development: http to an MCP server and to authorization servers, on loopback only.
    loopback: bool = False
    # Origins that are followed in any network.  Their issuers may have endpoints at other origins.
    trusted_origins: tuple[str, ...] = ()
    # No person looks for a password for half an hour.
    user_seconds: float = 600.0


def url_fault(url: object, rules: UrlRules) -> str | None:
    """Return the fault of a URL to request, or None."""
    if not isinstance(url, str) or not re.fullmatch(r"[!-\[\]-~]{1,2048}", url):
        return "is not a URL"
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if the port is not valid
    except ValueError:
        return "is not an absolute URL"
    if not parts.hostname or not _is_host(parts.hostname):
        return "is not an absolute URL"
    if parts.scheme != "https" and not (rules.loopback and parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS):
        return "is not https"
    if "@" in parts.netloc:
        return "contains credentials"
    return "has a fragment" if "#" in url else None


def issuer_fault(issuer: object, rules: UrlRules) -> str | None:
    """RFC 8414: "a URL that uses the "https" scheme and has no query or fragment components"."""
    fault = url_fault(issuer, rules)
    return fault or ("has a query" if "?" in str(issuer) else None)


def check_redirect_uri(uri: str) -> None:
    """auth-26: raise `UsageError` unless a redirect URI is on loopback, or https."""
    if fault := url_fault(uri, UrlRules(loopback=True)):
        raise UsageError(f"the redirect URI {shown(uri)} {fault}; it must be https, or on loopback")


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
    return urlsplit(url).hostname in LOOPBACK_HOSTS


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
    return f"is {_PLACES[network]}, and the MCP server is not"


def trust_advice(url: str) -> str:
    """Return the advice for allowing this URL."""
    return f"trusted_origins=[{origin_of(url)!r}] allows it, if the application trusts this origin"


def same_origin(one: str, other: str) -> bool:
    return origin_parts(one) == origin_parts(other)


def origin_parts(url: str) -> tuple[str, str | None, int | None]:
    """Return the scheme, host and port, by which origins are compared."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)


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


def redirect_target(url: str, location: str, rules: UrlRules) -> str | None:
    """Return the target of a document's redirect, or None if it must not be followed."""
    try:
        target = urljoin(url, location)
    except ValueError:
        return None
    if url_fault(target, rules) is not None or not same_origin(target, url):
        return None
    return target


# Documents.

_ISSUERS = 20  # of one resource that are read; real ones have one


def read_object(body: bytes, limit: int) -> dict[str, Json] | None:
    """Return the JSON object in a body.  None if it is no object, or longer than `limit`."""
    if len(body) > limit:
        return None
    try:
        value, _ = parse(body)
    except (ValueError, UnreadableNumber, RecursionError):  # not UTF-8, not JSON, or nested too deep
        return None
    return value if isinstance(value, dict) else None


def read_seconds(value: Json) -> float | None:
    """Read a time or a lifetime, which some servers write as a string.

    None if it is no number, as if it were absent.
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value):
        value = int(value)
    if type(value) not in (int, float) or not 0 <= value <= 10**12:
        return None
    return float(value)


@record
class ResourceDocument:
    """Protected Resource Metadata (RFC 9728).  `scopes` is None if the document has no list of scopes."""

    resource: str
    issuers: tuple[str, ...]
    scopes: tuple[str, ...] | None = None
    requires_dpop: bool = False


def read_resource(
    document: Mapping[str, Json], server_url: str, rules: UrlRules, networks: Collection[Network] = PUBLIC
) -> ResourceDocument:
    """Read the document of the server at `server_url`.  `networks`: where its issuers may be.

    Raises `AuthorizationFailed` if the document must not be used.
    """
    resource = document.get("resource")
    if not isinstance(resource, str):
        raise AuthorizationFailed(
            Blame.SERVER, "the resource metadata of the MCP server names no resource", "its operator must add it"
        )
    if not covers(resource, server_url):
        raise AuthorizationFailed(
            Blame.SERVER,
            f"the resource metadata is for {shown(resource)}, not for the MCP server at {origin_of(server_url)}",
            "its operator must fix the metadata, because tokens for another resource are never requested",
        )
    listed = document.get("authorization_servers")
    named = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    fit = [each for each in named[:_ISSUERS] if issuer_fault(each, rules) is None]
    good = [each for each in fit if network_fault(each, rules, networks) is None]
    if not good:
        named_issuer, advice = "none", "its operator must fix it"
        if named:
            named_issuer = f"only {shown(named[0])}, which {issuer_fault(named[0], rules)}"
        if fit:
            named_issuer = f"only {shown(fit[0])}, which {network_fault(fit[0], rules, networks)}"
            advice = trust_advice(fit[0])
        raise AuthorizationFailed(
            Blame.SERVER,
            f"the resource metadata of the MCP server must name its authorization server, and names {named_issuer}",
            advice,
        )
    scopes = document.get("scopes_supported")
    return ResourceDocument(
        resource,
        tuple(dict.fromkeys(good)),
        scopes_of(scopes) if isinstance(scopes, list) else None,
        document.get("dpop_bound_access_tokens_required") is True,
    )


@record
class ServerDocument:
    """Authorization Server Metadata (RFC 8414), or that of an OpenID provider: the fields that are used here.

    `issuer` is the issuer whose URL was asked; credentials are stored under it.  `stated_issuer` is the issuer in the
    document, which may differ by a slash in 2025-03-26.  None: the document does not say.
    """

    issuer: str
    stated_issuer: str
    token_endpoint: str
    authorization_endpoint: str | None = None
    registration_endpoint: str | None = None
    scopes: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    grants: tuple[str, ...] | None = None
    challenges: tuple[str, ...] | None = None
    supports_iss: bool = False
    supports_client_documents: bool = False
    dpop_algorithms: tuple[str, ...] = ()
    legacy: bool = False


# Our parameters for the authorization page.  In the endpoint's own query they could redirect the answer, or replace our
# id.
_OUR_PARAMETERS = frozenset(
    {"client_id", "code_challenge", "code_challenge_method", "redirect_uri", "response_mode", "response_type", "state"}
)


def read_server(
    document: Mapping[str, Json],
    issuer: str,
    rules: UrlRules,
    networks: Collection[Network] = PUBLIC,
    *,
    legacy: bool = False,
) -> ServerDocument:
    """Read the metadata of this issuer.  `networks`: where its endpoints may be.

    Raises `AuthorizationFailed` if it must not be used.  `legacy`: by the rules of 2025-03-26, in which `issuer` is
    only the origin where the document was found.
    """
    stated_issuer = document.get("issuer")
    # 2025-03-26 does not define how the origin is written as an issuer, and some servers add a slash.  No other
    # difference is allowed: a server that names another server's issuer would receive that server's codes (a mix-up).
    if stated_issuer != issuer and not (legacy and stated_issuer == f"{issuer}/"):
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(issuer)} names another issuer, {shown(stated_issuer)}",
            "the two must be equal, letter by letter; its operator or the MCP server's must fix one",
        )
    supports_iss = document.get("authorization_response_iss_parameter_supported") is True

    endpoints: dict[str, str] = {}
    for name in ("token_endpoint", "authorization_endpoint", "registration_endpoint"):
        if (url := document.get(name)) is None:
            continue
        advice = "its operator must fix the metadata"
        fault = url_fault(url, rules)  # auth-24
        if fault is None and (twice := _OUR_PARAMETERS & {each for each, _ in parse_qsl(urlsplit(str(url)).query)}):
            fault = f"has {min(twice)} in its query, a parameter that only the client may set"
        if fault is None and not is_trusted(issuer, rules):
            if (fault := network_fault(str(url), rules, networks)) is not None:
                advice = trust_advice(str(url))
            elif not supports_iss and not same_origin(str(url), issuer):
                fault = "is at another origin, and its metadata does not promise iss, which protects from a mix-up"
                advice = trust_advice(issuer)
        if fault is not None:
            raise AuthorizationFailed(
                Blame.AUTHORIZATION_SERVER, f"the {name} of {shown(issuer)}, {shown(str(url))}, {fault}", advice
            )
        endpoints[name] = str(url)
    if "token_endpoint" not in endpoints:
        raise AuthorizationFailed(
            Blame.AUTHORIZATION_SERVER,
            f"the metadata of {shown(issuer)} names no token endpoint",
            "its operator must add it",
        )
    return ServerDocument(
        issuer,
        str(stated_issuer),
        endpoints["token_endpoint"],
        endpoints.get("authorization_endpoint"),
        endpoints.get("registration_endpoint"),
        scopes_of(document.get("scopes_supported")),
        _texts(document.get("token_endpoint_auth_methods_supported")),
        _texts(document.get("grant_types_supported")),
        _texts(document.get("code_challenge_methods_supported")),
        supports_iss,
        document.get("client_id_metadata_document_supported") is True,
        _texts(document.get("dpop_signing_alg_values_supported")) or (),
        legacy,
    )


def default_server(server_url: str) -> ServerDocument:
    """auth-15: the default endpoints of a 2025-03-26 server that publishes no metadata."""
    base = origin_of(server_url)
    return ServerDocument(base, base, f"{base}/token", f"{base}/authorize", f"{base}/register", legacy=True)


def _texts(value: Json) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        return None
    return tuple(each for each in value if isinstance(each, str))
