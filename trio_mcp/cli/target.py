"""The TARGET of a command: the server that it talks to, and the client that is opened for it.

| TARGET | Server |
|---|---|
| `weather.py`, `weather.py:server`, `package.module:server` | a child process: ``trio-mcp run TARGET`` |
| ``-- COMMAND ...`` | a child process |
| `http:`, `https:`, `ws:`, `wss:` URLs | the server at this address |
| a name | the entry of this name in the configuration file of a host, or in `--config FILE` |

A child process gets few variables of the environment, as in hosts; `--env` adds more.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Unpack

import attrs
import trio

from trio_mcp.cli.arguments import above_zero
from trio_mcp.cli.hosts import configured_entries
from trio_mcp.client.client import Client, open_client
from trio_mcp.client.errors import HandshakeError
from trio_mcp.client.options import ClientOptions
from trio_mcp.core.errors import (
    INTERNAL_ERROR,
    CannotServe,
    ConnectionFailed,
    McpError,
    NotDeclared,
    RemoteProtocolError,
    RequestError,
    SessionClosed,
    UsageError,
    printable,
)
from trio_mcp.core.messages import Limits
from trio_mcp.transport.nursery import open_nursery

__all__ = [
    "LIMITS",
    "NO_CONNECTION",
    "ServerTarget",
    "add_server_arguments",
    "add_target_arguments",
    "client_options",
    "connected",
    "end_of_log",
    "exit_status",
    "last_entry",
    "run_command",
    "server_log",
    "target_of",
    "until_signal",
]

NO_CONNECTION = 3
LIMITS = Limits(pages=1000)
"""Those of the client of a command.  A person reads the lists, so that a list without an end is noticed early."""

_PATIENCE = 30.0  # seconds
_PIECES = 8  # of the log of the server that are kept, with 64 KiB or less
_LINES = 5  # of one entry of a log
_EXCEPTION = re.compile(r"\s*[A-Za-z_][\w.]*(Error|Exception)\b")
_SUMMARY = re.compile(r'\{"file": .*, "frames": \d+, "bytes": \d+\}$')  # of `tap --json`, after the log of its server
_LONGEST = 4000  # characters of an error
_URL = re.compile(r"(https?|wss?)://")
_ADDRESS = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+|\[[\da-f:]+\])(:\d+)?(/|$)")  # a URL without its scheme
_OBJECT = re.compile(r"(.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)(:[A-Za-z_][\w.]*)?")


@attrs.frozen
class ServerTarget:
    """A server: a URL or a command, with the environment and the headers that its configuration adds."""

    address: str | Sequence[str]
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add TARGET and the options that belong to it.  A command after -- takes the place of TARGET."""
    if not parser.get_default("server_command"):
        parser.add_argument("target", metavar="TARGET", help="a file, a module, a URL or a configured name")
    server = parser.add_argument_group("the server")
    server.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="an HTTP header")
    server.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of a child process"
    )
    server.add_argument("--config", metavar="FILE", help="a file with mcpServers, for a name as TARGET")
    server.add_argument("--revision", help="the only protocol revision to use, such as 2025-11-25")


def add_target_arguments(parser: argparse.ArgumentParser, silence: str = "30; a call of a tool: no limit") -> None:
    """Add the options that every client of a server takes.  `silence`: the default of --timeout, for the help."""
    add_server_arguments(parser)
    client = parser.add_argument_group("the client")
    client.add_argument("--oauth", action="store_true", help="log in with the browser if the server requires it")
    client.add_argument(
        "--timeout", type=above_zero(float), metavar="SECONDS", help=f"without a sign of life ({silence})"
    )
    output = parser.add_argument_group("the output")
    output.add_argument("--json", action="store_true", help="write JSON")
    output.add_argument("--verbose", action="store_true", help="show the output of the server, and tracebacks")


def target_of(arguments: argparse.Namespace) -> ServerTarget:
    """Return the server that the arguments name.  Raises `UsageError`."""
    given, command = arguments.target, arguments.server_command
    env = dict(_pair(each, "=", "--env NAME=VALUE") for each in arguments.env)
    headers = dict(_pair(each, ":", "--header NAME:VALUE") for each in arguments.header)
    if command:
        return ServerTarget(command, env, headers)
    if _URL.match(given):
        return ServerTarget(given, env, headers)
    configured = _configured(arguments.config)
    if given in configured:
        found = configured[given]
        return attrs.evolve(found, env={**found.env, **env}, headers={**found.headers, **headers})
    file, _, _ = given.partition(":")
    if file.endswith(".py") and not Path(file).is_file():
        raise UsageError(f"there is no file {file}")
    if not _OBJECT.fullmatch(given) or not (file.endswith(".py") or ":" in given):
        names = f"; the configured names are {', '.join(sorted(configured))}" if configured else ""
        if Path(f"{given}.py").is_file():
            names = f"; there is {given}.py"
        elif _ADDRESS.match(given):
            names = f"; a URL is like http://{given}"
        raise UsageError(f"{given!r} is no file, module:object, URL or configured name{names}; a command goes after --")
    return ServerTarget([sys.executable, "-m", "trio_mcp", "run", given], env, headers)


def _pair(text: str, sign: str, form: str) -> tuple[str, str]:
    name, found, value = text.partition(sign)
    if not found or not name.strip():
        raise UsageError(f"an option must be like {form}")  # the text is not repeated: it may be a secret
    return name.strip(), value.strip()


def _configured(file: str | None) -> dict[str, ServerTarget]:
    """The servers of one file, or of all files of hosts; an entry that comes first wins."""
    found: dict[str, ServerTarget] = {}
    for name, entry in configured_entries(file):
        target = _entry(entry)
        if target is not None:
            found.setdefault(name, target)
    return found


def _entry(entry: Any) -> ServerTarget | None:
    """Read one server of a configuration file; None if it has neither a URL nor a command."""
    if not isinstance(entry, dict):
        return None
    command, args, url = entry.get("command"), entry.get("args", []), entry.get("url", entry.get("httpUrl"))
    env, headers = (_strings(entry.get(name)) for name in ("env", "headers"))
    if isinstance(command, str) and isinstance(args, list):
        return ServerTarget([command, *map(str, args)], env)
    if isinstance(url, str):
        return ServerTarget(url, headers={**headers, **_strings(entry.get("http_headers"))})
    return None


def _strings(values: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}


@asynccontextmanager
async def connected(
    arguments: argparse.Namespace, *, log: deque[bytes] | None = None, **options: Unpack[ClientOptions]
) -> AsyncIterator[Client]:
    """``async with connected(arguments) as client``: a client of the server that the arguments name.

    `log` gets the standard error of a child process, unless it is shown.
    """
    target = target_of(arguments)
    patience = _PATIENCE if arguments.timeout is None else arguments.timeout
    options = {**options, **client_options(target, arguments), "timeout": patience, "limits": LIMITS}
    if not isinstance(target.address, str):
        options["start_timeout"] = patience
        if not arguments.verbose:
            options["stderr"] = None if log is None else log.append  # the error of a server that ends repeats its end
    opened = False
    try:
        async with open_client(target.address, **options) as client:
            opened = True
            if log is not None:
                log.clear()  # what a server says at its start is no reason of a failure
            yield client
    except RequestError as error:
        if error.code == INTERNAL_ERROR and (last := end_of_log(log or ())):
            error.add_note(last)
        raise
    except RemoteProtocolError as error:
        if opened:
            raise
        raise ConnectionFailed(f"this is no MCP server: {error}") from error


def client_options(target: ServerTarget, arguments: argparse.Namespace) -> ClientOptions:
    """Return the options of `open_client` that the target and its arguments ask for."""
    options: ClientOptions = {}
    if arguments.revision:
        options["revision"] = arguments.revision
    if target.headers:
        options["headers"] = target.headers
    if not isinstance(target.address, str):
        options["env"] = target.env
    if arguments.oauth:
        from trio_mcp.core.oauth.discovery import is_loopback
        from trio_mcp.oauth.client import OAuth
        from trio_mcp.oauth.token_stores import FileTokenStore

        local = isinstance(target.address, str) and is_loopback(target.address)
        store = FileTokenStore("~/.config/trio-mcp/tokens.json")
        options["auth"] = OAuth("trio-mcp", store=store, http_on_loopback=local, browser=_show_page)
    return options


def server_log() -> deque[bytes]:
    """Return a place for the end of the log of a server, as `connected` takes it."""
    return deque(maxlen=_PIECES)


def end_of_log(log: Iterable[bytes]) -> str:
    """Return the last entry of a log as the reason of a failure; "" if there is none.

    The log is complete when the client has been closed.
    """
    last = printable(last_entry(b"".join(log).decode(errors="replace")))
    return f"the log of the server ends with: {last}; --verbose shows it" if last else ""


def last_entry(log: str) -> str:
    """The last line of a log; if it continues the lines before it, with these.

    A line that names an exception is enough, also in the frames that some loggers draw around a traceback.
    """
    lines = [line for line in log.splitlines() if line.strip() and not _SUMMARY.match(line)]
    entry = lines[-1:]
    for line in reversed(lines[-_LINES:-1]):
        if not entry[0].startswith((" ", "\t")) or _EXCEPTION.match(entry[0]):
            break
        entry.insert(0, line)
    return " ".join(" ".join(entry).split())


async def _show_page(url: str) -> None:
    import webbrowser

    # The address as well, because there may be no browser, or one that the user does not see.
    sys.stderr.write(f"trio-mcp: log in with the browser: {url}\n")
    sys.stderr.flush()
    with suppress(webbrowser.Error, OSError):
        await trio.to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True)


def run_command(work: Callable[[], Awaitable[int]], *, verbose: bool) -> int:
    """Run `work` until it ends, or until Ctrl-C or SIGTERM cancels it; return the exit status of the process.

    A cancelled call is cancelled at the server too, and a child process is ended in order.
    """
    return exit_status(lambda: trio.run(_until_stopped, work), verbose=verbose)


def exit_status(run: Callable[[], int], *, verbose: bool) -> int:
    """Call `run`, and return the exit status of the process.

    An error of the protocol becomes one line; with `verbose` the traceback is shown first.
    """
    try:
        return run()
    except (McpError, trio.TooSlowError) as error:
        if verbose:
            import traceback

            sys.stderr.writelines(f"{printable(line)}\n" for line in traceback.format_exc().split("\n"))
        sys.stdout.flush()
        prefix = "the server answered: " if isinstance(error, RequestError) else ""
        if isinstance(error, NotDeclared) and error.owner == "server":
            error = UsageError(f"the server has no {'.'.join(error.capability)}, which {error.method} needs")
        message = f"{prefix}{_in_options(_without_traceback(str(error)))}"[:_LONGEST]
        sys.stderr.write(f"trio-mcp: {printable(' '.join(message.split()))}\n")
        sys.stderr.writelines(f"trio-mcp: {note}\n" for note in getattr(error, "__notes__", ()))
        if isinstance(error, UsageError):
            return 1 if isinstance(error, CannotServe) else 2
        return NO_CONNECTION if isinstance(error, ConnectionFailed | HandshakeError | SessionClosed) else 1


def _in_options(text: str) -> str:
    """Name the options of the command line in an error that names those of `open_client`."""
    if "use the option auth" not in text:  # so that most errors load no HTTP
        return text
    from trio_mcp.client.http import AUTH_ADVICE

    return text.replace(AUTH_ADVICE, "use --oauth to log in, or --header 'Authorization: Bearer TOKEN'")


def _without_traceback(text: str) -> str:
    """Keep the last one of the lines on stderr that an error repeats: of a traceback, this is the reason."""
    before, mark, lines = text.partition("its last lines on stderr:\n")
    last = lines.rstrip().rpartition("\n")[2].strip().removeprefix("trio-mcp: ")
    return f"{before}the last line on stderr: {last}" if mark else text


async def _until_stopped(work: Callable[[], Awaitable[int]]) -> int:
    async with until_signal() as stopped:
        return await work()
    return 128 + stopped.signal


class Stopped:
    """The signal that has cancelled a block; 0 if the block has ended by itself."""

    signal = 0


@asynccontextmanager
async def until_signal() -> AsyncIterator[Stopped]:
    """``async with until_signal()``: a block that Ctrl-C or SIGTERM cancels.  The innermost block gets the signal."""
    stopped = Stopped()
    async with open_nursery() as nursery:

        async def wait_for_signal(task_status: trio.TaskStatus[None]) -> None:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                task_status.started()
                stopped.signal = await anext(signals)
                nursery.cancel_scope.cancel()

        await nursery.start(wait_for_signal)
        try:
            yield stopped
        finally:
            nursery.cancel_scope.cancel()
