"""The options of commands that serve HTTP: the address, host names and TLS."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trio_mcp.core.errors import UsageError

if TYPE_CHECKING:
    import ssl

    from trio_mcp.server.http.options import HttpOptions

__all__ = ["add_http_arguments", "check_host", "http_address", "http_options"]


def http_address(text: str) -> str:
    """The `type` of `--http`: HOST:PORT, or the number of a port of this machine.  Returns HOST:PORT."""
    from trio_mcp.server.process import parse_address  # a command without this option loads no server

    address = f"127.0.0.1:{text}" if text.isascii() and text.isdecimal() else text
    try:
        parse_address(address)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("http ")) from None
    return address


def check_host(host: str, arguments: argparse.Namespace) -> None:
    """Raise `UsageError` if other machines can reach this host, and no host name is allowed."""
    from trio_mcp.transport.dial import is_this_machine

    if not arguments.allowed_host and not is_this_machine(host):
        fix = "name the hosts in their URLs with --allowed-host, such as --allowed-host mcp.example.com"
        raise UsageError(f"other machines can reach {host}; {fix}")


def add_http_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate and its chain, as PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="the private key, if the file of the certificate has none")
    parser.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="a host name under which clients reach HTTP"
    )


def http_options(arguments: argparse.Namespace) -> tuple[ssl.SSLContext | None, HttpOptions]:
    """Return the TLS context and the options of `serve_http`.  Raises `UsageError`."""
    certificate, key = arguments.tls_cert, arguments.tls_key
    if key is not None and certificate is None:
        raise UsageError("--tls-key needs --tls-cert, the certificate of this key")
    options: HttpOptions = {}
    if arguments.allowed_host:
        from trio_mcp.core.http.fields import LOOPBACK_HOSTS, AllowList

        AllowList("--allowed-host", arguments.allowed_host, schemes=False)  # an error here, before the server starts
        # A program of this machine may still use the names of loopback, for example to see whether the server runs.
        options["allowed_hosts"] = (*LOOPBACK_HOSTS, *arguments.allowed_host)
    if certificate is None:
        return None, options
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password here, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=_no_password)
    except OSError as error:
        files = certificate if key is None else f"{certificate} and {key}"
        raise UsageError(f"no TLS with {files}: {error.strerror or error}") from None
    return context, options


def _no_password() -> str:
    raise UsageError("the private key is encrypted; write one without a password: openssl pkey -in KEY -out NEW")
