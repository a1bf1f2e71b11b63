"""The sockets at which an HTTP server listens: TCP ports, Unix sockets, and which of them other machines can reach.

A server that other machines can reach must declare its host names.  Otherwise a web page whose host name resolves to
this address could send requests to the server (DNS rebinding).  So a non-loopback address without `allowed_hosts` or
`public_url` is an error at the start; the alternative, to refuse each request, would puzzle the first client.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio

from trio_mcp.core.errors import CannotServe, UsageError
from trio_mcp.server.http.options import HttpOptions

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = [
    "Listener", "bracketed", "check_exposure", "ignore_new", "listener_of", "socket_name", "socket_under",
    "tcp_listeners", "tcp_sockets", "unix_socket",
]  # fmt: skip

Listener: TypeAlias = trio.abc.Listener[trio.abc.Stream]

_BACKLOG: Final = 0xFFFF  # connections that wait to be accepted; the system has a lower limit
_PORT_TRIES: Final = 10  # tries to find a port that is free for all addresses of one name
# A filter of Linux for packets, by its instructions: drop those that ask for a connection, SYN without ACK.
_SO_ATTACH_FILTER: Final = 26
_NO_SYN: Final = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

_ADVICE: Final = {
    errno.EADDRINUSE: "another program listens there; stop it, or choose another port (0: any free port)",
    errno.EACCES: "the system does not allow it; choose a port from 1024 on, or a directory that you may write to",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose one of its addresses, such as 127.0.0.1",
}


@contextlib.contextmanager
def _listening_at(where: str) -> Iterator[None]:
    """A block that listens; it raises `CannotServe` in place of the errors of the system and of names."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another address")
        if isinstance(error, socket.gaierror):  # its numbers are not those of errno
            advice = "the name is unknown; choose a name of this machine, or an address such as 127.0.0.1"
        raise CannotServe(f"cannot listen at {where}: {error.strerror or error}; {advice}") from error
    except UnicodeError as error:  # of the codec for names, for a label that is empty or too long
        raise CannotServe(
            f"cannot listen at {where}: the name is invalid; choose a name of this machine, or an address"
        ) from error


async def tcp_listeners(host: str, port: int) -> list[Listener]:
    """Listen at all addresses of a host, with one port for all of them.  Raises `UsageError` and `CannotServe`."""
    if not isinstance(host, str) or not host or host.count(":") == 1:  # IPv6 addresses have several colons
        raise UsageError(f"host must be a name or an address of this machine, without a port, got {host!r}")
    if type(port) is not int or not 0 <= port < 2**16:
        raise UsageError(f"port must be between 0 and 65535 (0: any free port), got {port!r}")
    with _listening_at(f"{bracketed(host)}:{port}"):
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return [listener_of(each) for each in _listening(found, port)]


def tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """As `tcp_listeners`, outside of Trio."""
    with _listening_at(f"{bracketed(host)}:{port}"):
        return _listening(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE), port)


def _listening(found: Sequence[Any], port: int) -> list[socket.socket]:
    """Listen at these results of `getaddrinfo`; with port 0 at one that is free for all of them."""
    for _ in range(_PORT_TRIES - 1 if port == 0 else 0):
        try:
            return _listening_once(found, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listening_once(found, port)


def _listening_once(found: Sequence[Any], port: int) -> list[socket.socket]:
    """As `trio.open_tcp_listeners` does it, which gives each address a free port of its own."""
    unsupported = None
    with contextlib.ExitStack() as undo:
        sockets: list[socket.socket] = []
        for family, kind, protocol, _, address in found:
            try:
                each = undo.enter_context(socket.socket(family, kind, protocol))
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:  # a system without IPv6 still knows IPv6 addresses
                    raise
                unsupported = error
                continue
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind((address[0], port or (sockets[0].getsockname()[1] if sockets else 0), *address[2:]))
            each.listen(_BACKLOG)
            sockets.append(each)
        if not sockets and unsupported is not None:
            raise unsupported
        undo.pop_all()
    return sockets


def listener_of(listening: socket.socket) -> Listener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))


@contextlib.contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """Listen at a socket file that exists for the duration of the block, with the permissions of the umask."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no Unix sockets; listen at a host and port")
    server_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with server_socket:
        with _listening_at(path):
            _remove_stale_socket(path)
            server_socket.bind(path)
            made = os.lstat(path)
            server_socket.listen(128)
        try:
            yield server_socket
        finally:
            with contextlib.suppress(OSError):  # it may have been removed already
                if os.path.samestat(os.lstat(path), made):
                    os.unlink(path)


def _remove_stale_socket(path: str) -> None:
    """Remove the socket file of a server that has crashed."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise CannotServe(f"cannot listen at {path}: it exists and is not a socket; choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            pass  # a server listens and is busy; `bind` raises


def ignore_new(listening: socket.socket | trio.socket.SocketType) -> None:
    """Open no more connections to this socket, and keep those that wait; then all of them can be accepted.

    Only Linux can do that.  A client that connects meanwhile tries again after a second, and is refused when the socket
    is closed.  No process can accept from the socket afterwards, so a socket that was given to this program is left
    alone.
    """
    if sys.platform == "linux" and listening.family != socket.AF_UNIX:
        filter = array("B", b"".join(struct.pack("HBBI", *each) for each in _NO_SYN))
        with contextlib.suppress(OSError):  # of a system that only looks like Linux
            program = struct.pack("HP", len(_NO_SYN), filter.buffer_info()[0])
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def socket_under(listener: Listener) -> trio.socket.SocketType | None:
    inner = listener.transport_listener if isinstance(listener, trio.SSLListener) else listener
    return inner.socket if isinstance(inner, trio.SocketListener) else None


def socket_name(listener: Listener) -> Any:
    """The address of the socket of a listener; None if it has no socket."""
    sock = socket_under(listener)
    return None if sock is None else sock.getsockname()


def check_exposure(names: Sequence[Any], options: HttpOptions, server: Server) -> None:
    """Raise `UsageError` if other machines can reach one of these socket names, and no host name is allowed."""
    named = server._catalog.protection is not None and server._catalog.protection.host is not None
    if named or "allowed_hosts" in options or "public_url" in options:
        return
    for name in names:
        if isinstance(name, tuple) and _is_public(name[0]):
            raise UsageError(
                f"other machines can reach {name[0]}; give the host names that they use as allowed_hosts, such as "
                "['mcp.example.com'], or give public_url"
            )


def _is_public(host: object) -> bool:
    """Whether this is an address of a network; False for a name."""
    try:
        return not ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """The host in a URL."""
    return f"[{host}]" if ":" in host else host
