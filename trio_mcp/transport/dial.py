"""Connections to HTTP servers: URLs, proxies, TCP, CONNECT and TLS.

`locate` parses a URL, `Proxies` reads the environment, and `dial` opens a stream on which the server, or for plain HTTP
its proxy, accepts requests.

The environment is read as most programs do.  HTTPS_PROXY or HTTP_PROXY is chosen by the scheme of the URL, with
ALL_PROXY as the fallback; lower case takes precedence.  NO_PROXY lists names (each includes its subdomains), addresses
and networks, each with or without a port, or ``*``.  Two surprises: this machine (localhost, 127.0.0.1, ::1) is never
reached through a proxy, because the proxy would connect to itself; and if REQUEST_METHOD is set, HTTP_PROXY is not
read, because under CGI it is a header of the client.
"""

from __future__ import annotations

import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TypeAlias
from urllib.parse import quote, unquote, urlsplit

import attrs
import idna  # Trio uses it to look up names
import trio

from trio_mcp.core.errors import ConnectionFailed, RemoteProtocolError, UsageError
from trio_mcp.core.http.h1 import ReplyReader
from trio_mcp.core.messages import Limits
from trio_mcp.transport.wire import GONE, keep_alive

__all__ = [
    "CONNECTING",
    "Connect",
    "Origin",
    "Proxies",
    "Proxy",
    "dial",
    "is_this_machine",
    "locate",
]

CONNECTING = 30.0
"""Seconds for opening a connection: TCP, the proxy and TLS together.  A handshake over a bad network takes a few
seconds; systems try TCP for two minutes, which is longer than a user waits."""

Connect: TypeAlias = Callable[[str, int], Awaitable[trio.abc.Stream]]
"""Opens a stream to a name or address, and a port."""


# URLs.


@attrs.frozen
class Origin:
    """The server that a request is for.  `host` is in ASCII, without brackets."""

    scheme: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """The host and the port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        """The address as URLs and the Host field have it: without the default port."""
        return self.address.removesuffix(f":{_PORTS[self.scheme]}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


_PORTS = {"http": 80, "https": 443}
_FORM = "the URL is invalid; it must be like http://127.0.0.1:3000/mcp or https://example.com/mcp"
_BLANKS = re.compile(r"[\x00-\x20\x7f]")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_RESERVED = "!$%&'()*+,/:;=?@[]~"  # not quoted: allowed in a path or a query, or part of a quoted character


@lru_cache(maxsize=64)  # a client requests the same few URLs again and again
def locate(url: str) -> tuple[Origin, str]:
    """Return the origin and the request target.  Raises `UsageError`, which repeats nothing of the URL."""
    if _BLANKS.search(url):
        raise UsageError("the URL contains white space or a control character; write a space as %20")
    try:
        parts = urlsplit(url)
        host, port = _in_ascii(parts.hostname or ""), parts.port
        target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), _RESERVED)
    except ValueError:  # a bad port, bracket or name, or a lone surrogate
        raise UsageError(_FORM) from None  # the text of the ValueError repeats parts of the URL
    if "@" in parts.netloc:
        raise UsageError("the URL contains a user or a password; send them in an Authorization header instead")
    if parts.scheme not in _PORTS or host is None or port == 0:
        raise UsageError(_FORM)
    return Origin(parts.scheme, host, port or _PORTS[parts.scheme]), target


def _in_ascii(host: str) -> str | None:
    if ":" in host:
        return host if _address_of(host) is not None and "%" not in host else None
    name = host if host.isascii() else idna.encode(host, uts46=True).decode()
    return name if _NAME.fullmatch(name) else None


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


# Proxies.


@attrs.frozen
class Proxy:
    """A proxy, and the environment variable that names it."""

    origin: Origin
    variable: str
    credentials: str = attrs.field(repr=False)  # for Proxy-Authorization; may be empty

    @property
    def fields(self) -> str:
        """The header lines for the proxy."""
        return f"Proxy-Authorization: {self.credentials}\r\n" if self.credentials else ""

    def __str__(self) -> str:
        return f"the proxy {self.origin.address} ({self.variable})"


class Proxies:
    """The proxy settings of the environment, read once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        def setting(name: str, *, upper: bool = True) -> tuple[str, str] | None:
            for each in (name.lower(), name) if upper else (name.lower(),):
                if value := environ.get(each, "").strip():
                    return each, value
            return None

        everything = setting("ALL_PROXY")
        cgi = "REQUEST_METHOD" in environ
        self._settings = {
            "http": setting("HTTP_PROXY", upper=not cgi) or everything,
            "https": setting("HTTPS_PROXY") or everything,
        }
        _, exempt = setting("NO_PROXY") or ("", "")
        self._exempt = [each for part in exempt.lower().split(",") if (each := part.strip())]

    def between(self, origin: Origin) -> Proxy | None:
        """Return the proxy for this origin, or None.  Raises `ConnectionFailed` if the variable's value is invalid."""
        setting = self._settings[origin.scheme]
        if setting is None or is_this_machine(origin.host) or any(_exempts(rule, origin) for rule in self._exempt):
            return None
        return _proxy(*setting)


def is_this_machine(host: str) -> bool:
    """Whether this is the name or address of this machine on loopback."""
    address = _address_of(host)
    return host.rstrip(".") == "localhost" or (address is not None and address.is_loopback)


_WITH_PORT = re.compile(r"(\[[^\]]*\]|[^:\[\]]+):(\d+)", re.ASCII)


def _exempts(rule: str, origin: Origin) -> bool:
    if match := _WITH_PORT.fullmatch(rule):
        rule, port = match[1], match[2]
        if port != str(origin.port):
            return False
    if rule == "*":
        return True
    host = origin.host.rstrip(".")
    if (address := _address_of(host)) is not None:
        with suppress(ValueError):
            return address in ip_network(rule.strip("[]"), strict=False)
        return False
    name = rule.strip("[]").removeprefix("*").strip(".")
    return host == name or host.endswith(f".{name}")


@lru_cache(maxsize=8)  # there are three variables
def _proxy(variable: str, value: str) -> Proxy:
    scheme, mark, rest = value.partition("://")
    if not mark:
        scheme, rest = "http", value
    # Not urlsplit: a password may contain every character, quoted or not.
    login, _, address = rest.rstrip("/").rpartition("@")
    fault = "must name a proxy like http://proxy.example:3128"
    if scheme.lower() in _PORTS:
        with suppress(UsageError):
            origin, _ = locate(f"{scheme}://{address}")
            user, _, password = login.partition(":")
            pair = f"{unquote(user)}:{unquote(password)}".encode()
            return Proxy(origin, variable, f"Basic {b64encode(pair).decode()}" if login else "")
    else:
        fault = "must name an http or https proxy; other kinds are not supported"
    raise ConnectionFailed(f"{variable} {fault}; correct it, or list the server in NO_PROXY")


# Connections.


async def dial(
    origin: Origin, proxy: Proxy | None, *, connect: Connect, context: Callable[[], ssl.SSLContext], limits: Limits
) -> trio.abc.Stream:
    """Open a connection for requests to this origin within `CONNECTING` seconds.  Raises `ConnectionFailed`."""
    first = origin if proxy is None else proxy.origin
    name = origin.address if proxy is None else str(proxy)
    with trio.move_on_after(CONNECTING):
        try:
            stream = await connect(first.host, first.port)
        except OSError as error:
            raise ConnectionFailed(f"no connection to {name}: {_explain(error)}") from error
        keep_alive(stream)
        try:
            if first.scheme == "https":
                stream = await _secured(stream, first.host, name, context())
            if proxy is not None and origin.scheme == "https":
                await _tunnel(stream, origin, proxy, limits)
                stream = await _secured(stream, origin.host, origin.address, context())
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream
    route = name if proxy is None else f"{origin.address} through {name}"
    raise ConnectionFailed(
        f"no connection to {route} within {CONNECTING:g} seconds; is the server up, or is a firewall in between?"
    )


def _explain(error: OSError) -> str:
    """The reason of the error, and advice."""
    reasons = _reasons(error)
    if any(isinstance(each, socket.gaierror) for each in reasons):
        return f"the name is unknown ({reasons[0].strerror}); is it correct, and is there a network?"
    if all(isinstance(each, ConnectionRefusedError) for each in reasons):
        return "connection refused; is the server running, and is the port correct?"
    return ", ".join(dict.fromkeys(each.strerror or str(each) for each in reasons))


def _reasons(error: BaseException) -> list[OSError]:
    """The errors that caused Trio's "all attempts to connect failed": one for each address."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for each in error.exceptions for reason in _reasons(each)]
    causes = _reasons(error.__cause__) if error.__cause__ is not None else []
    return causes or ([error] if isinstance(error, OSError) else [])


async def _tunnel(stream: trio.abc.Stream, origin: Origin, proxy: Proxy, limits: Limits) -> None:
    """Ask the proxy for a tunnel to the origin (RFC 9110, 9.3.6)."""
    where = origin.address
    reader = ReplyReader(limits, bodiless=True)
    try:
        await stream.send_all(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{proxy.fields}\r\n".encode())
        while (head := reader.head()) is None:
            reader.feed(bytes(await stream.receive_some()))
    except GONE as error:
        raise ConnectionFailed(f"{proxy} broke the connection when asked to connect to {where}") from error
    except RemoteProtocolError as error:
        raise ConnectionFailed(f"{proxy} was asked to connect to {where}: {error}; is it a proxy?") from error
    if head.status == 407:
        wants = "other credentials" if proxy.credentials else "credentials"
        raise ConnectionFailed(
            f"{proxy} requires {wants} (407); put them into its URL, as http://user:password@host:port"
        )
    if not 200 <= head.status < 300:
        raise ConnectionFailed(
            f"{proxy} refused to connect to {where} ({head.status}); if no proxy is needed, list it in NO_PROXY"
        )
    # These bytes cannot be the server's: in TLS the client sends first.
    if reader.surplus:
        raise ConnectionFailed(f"{proxy} sent unexpected data after it had connected to {where}")


async def _secured(stream: trio.abc.Stream, host: str, name: str, context: ssl.SSLContext) -> trio.abc.Stream:
    secure = trio.SSLStream(stream, context, server_hostname=host.rstrip("."), https_compatible=True)
    try:
        await secure.do_handshake()
        return secure
    except trio.BrokenResourceError as broken:
        error = broken.__cause__ if isinstance(broken.__cause__, OSError) else None
        reason = error.reason if isinstance(error, ssl.SSLError) else None
        if isinstance(error, ssl.SSLCertVerificationError):
            why = (
                f"the certificate of {name} is not trusted: {error.verify_message.rstrip('.')}; "
                "to trust another certificate, give ssl_context= an ssl.SSLContext"
            )
        elif reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"):
            why = f"{name} does not speak TLS; is it http:// instead of https://?"
        elif reason is None or isinstance(error, ssl.SSLEOFError):
            why = f"{name} broke the connection in the TLS handshake; is it https://, and is the port correct?"
        else:
            why = f"no TLS with {name}: {reason.replace('_', ' ').lower()}; to change the settings, give ssl_context="
        raise ConnectionFailed(why) from error or broken
