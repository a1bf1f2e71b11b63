"""``trio-mcp bridge``: serve a server over another transport, to clients of any revision.

    trio-mcp bridge https://mcp.example.com/mcp --oauth                                # for a host that has only stdio
    trio-mcp bridge --http 127.0.0.1:3000 -- npx -y @modelcontextprotocol/server-everything

It is a relay (`trio_mcp.relay`) in a process of its own.  The session with the server opens first, so that an error of
the address, the command or the login ends the process with one line.  From then on the process lives as long as its
clients: a session or a child process that has ended is opened again by the next request.

Standard output is the wire, so the address of a bridge over HTTP is the only output besides standard error.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

import trio

from trio_mcp.cli.http_options import add_http_arguments, check_host, http_address, http_options
from trio_mcp.cli.output import Output
from trio_mcp.cli.target import ServerTarget, add_target_arguments, client_options, exit_status, target_of
from trio_mcp.client.options import ClientOptions
from trio_mcp.core.errors import UsageError
from trio_mcp.core.http.fields import AllowList, HttpRequest
from trio_mcp.extensions.apps import APPS, PAGE_TYPE
from trio_mcp.extensions.skills.entries import SKILLS
from trio_mcp.relay.relay import open_relay
from trio_mcp.server.process import ProcessLife, live, parse_address
from trio_mcp.server.server import Server
from trio_mcp.server.session import serve_stream
from trio_mcp.transport.stdio import owned_stdio

if TYPE_CHECKING:
    import ssl

    from trio_mcp.server.http.listener import HttpAddress
    from trio_mcp.server.http.options import HttpOptions

__all__ = ["PASSED_ON", "add_arguments", "run"]

PASSED_ON: Mapping[str, Mapping[str, Any]] = {APPS: {"mimeTypes": [PAGE_TYPE]}, SKILLS: {}}
"""The extensions that only need their messages passed on, with what a client declares."""

_SHUTDOWN = 5.0  # seconds for running calls after SIGTERM or the end of input, as in `Server.run`


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser, silence="no limit: clients have their own")
    front = parser.add_argument_group("the clients")
    sides = front.add_mutually_exclusive_group()
    sides.add_argument("--stdio", action="store_true", help="one client on standard input and output (the default)")
    sides.add_argument(
        "--http", type=http_address, metavar="HOST:PORT", help="Streamable HTTP, HTTP+SSE and WebSocket; port 0: any"
    )
    sides.add_argument("--ws", type=http_address, metavar="HOST:PORT", help="the same, for clients of the WebSocket")
    front.add_argument("--token-env", metavar="NAME", help="the variable with the bearer token that clients must send")
    add_http_arguments(front)
    front.add_argument(
        "--allowed-origin",
        action="append",
        metavar="ORIGIN",
        help="a web page that may call, such as https://a.example",
    )


def run(arguments: argparse.Namespace) -> int:
    return exit_status(lambda: _run(arguments), verbose=arguments.verbose)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    target = target_of(arguments)
    options = client_options(target, arguments)
    options["extensions"] = PASSED_ON
    if arguments.timeout is not None:
        options["timeout"] = arguments.timeout
        if not isinstance(target.address, str):
            options["start_timeout"] = arguments.timeout
    address = arguments.http or arguments.ws
    if address is None:
        for name in ("token_env", "allowed_host", "allowed_origin", "tls_cert", "tls_key"):
            if getattr(arguments, name):
                raise UsageError(f"--{name.replace('_', '-')} needs --http HOST:PORT or --ws HOST:PORT")
        serve = partial(_serve_stdio, target, options)
    else:
        from trio_mcp.server.http.listener import serve_http

        host, port = parse_address(address)
        context, http = _http_options(host, arguments)
        listen = partial(serve_http, host=host, port=port, ssl_context=context, **http)
        serve = partial(_serve_http, target, options, listen, _PrintedAddress(arguments))
    # The relay takes its place when it is open; until then there is no client to drain.
    live(Server("trio-mcp bridge"), serve, shutdown_timeout=_SHUTDOWN)
    return 0


async def _serve_stdio(target: ServerTarget, options: ClientOptions, life: ProcessLife) -> None:
    terminal = os.isatty(0)
    # The input is watched while the session opens, because a host may end before a login does.
    with owned_stdio(life) as stream, trio.CancelScope() as life.opening:
        async with open_relay(target.address, **options) as relay:
            life.opening, life.server = None, relay
            if terminal:
                sys.stderr.write("trio-mcp: waiting for an MCP client on standard input; Ctrl-C ends\n")
            await serve_stream(relay, stream, shutdown_timeout=_SHUTDOWN)


async def _serve_http(
    target: ServerTarget,
    options: ClientOptions,
    listen: Callable[..., Awaitable[None]],
    printed: _PrintedAddress,
    life: ProcessLife,
) -> None:
    with trio.CancelScope() as life.opening:
        async with open_relay(target.address, **options) as relay:
            life.opening, life.server = None, relay
            await listen(relay, task_status=printed)


class _PrintedAddress:
    """A task status that writes the addresses of the bridge."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    def started(self, value: HttpAddress | None = None) -> None:
        assert value is not None
        output = Output(self._arguments.json)
        if output.as_json:
            output.json({"url": value.url, "sse_url": value.sse_url, "websocket_url": value.websocket_url})
            sys.stdout.flush()
            return
        first, last = value.url, value.websocket_url
        if self._arguments.ws:
            first, last = str(last), first
        sys.stderr.write(f"trio-mcp: the bridge is at {first}, also {value.sse_url} and {last}; Ctrl-C ends\n")
        sys.stderr.flush()


def _http_options(host: str, arguments: argparse.Namespace) -> tuple[ssl.SSLContext | None, HttpOptions]:
    """The TLS context and the options of `serve_http` at this host."""
    check_host(host, arguments)
    context, options = http_options(arguments)
    options["sse_path"], options["message_path"] = "/sse", "/messages"
    if arguments.allowed_origin:
        AllowList("--allowed-origin", arguments.allowed_origin, schemes=True)  # an error here, before the relay opens
        options["allowed_origins"] = arguments.allowed_origin
    if arguments.token_env:
        options["authenticate"] = _authenticator(arguments.token_env)
    return context, options


def _authenticator(variable: str) -> Callable[[HttpRequest], Awaitable[str | None]]:
    """Accepts requests with the bearer token in this variable.  All of its owners are one principal."""
    token = os.environ.get(variable, "").encode()
    if not token:
        raise UsageError(f"--token-env {variable}: the variable is not set or is empty")

    async def authenticate(request: HttpRequest) -> str | None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # In constant time, so that the time of a refusal tells nothing about the token.
        known = compare_digest(given.strip().encode(), token)
        return "bearer" if known and scheme.lower() == "bearer" else None

    return authenticate
