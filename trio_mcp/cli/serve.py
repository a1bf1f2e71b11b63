"""``trio-mcp run``: run a server from a file or a module, on standard input and output or over HTTP.

With `--reload` it runs in a child process, and `reload` serves its clients.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from trio_mcp.cli.arguments import above_zero
from trio_mcp.cli.http_options import add_http_arguments, check_host, http_address, http_options
from trio_mcp.core.errors import UsageError

if TYPE_CHECKING:
    import ssl

    from trio_mcp.server.http.options import HttpOptions

__all__ = [
    "Events",
    "add_arguments",
    "explain",
    "failing_places",
    "load_server",
    "option_hint",
    "own_files",
    "run",
    "run_script",
]

_USUAL = ("server", "mcp", "app")
_INSTALLED = ("site-packages", "dist-packages")
_OURS = str(Path(__file__).parents[1])


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", type=_program, metavar="TARGET", help="weather.py, weather.py:server or package.module:server"
    )
    parser.add_argument(
        "--http", type=http_address, metavar="HOST:PORT", help="serve HTTP at this address instead of standard input"
    )
    parser.add_argument("--workers", type=above_zero(int), default=1, metavar="N", help="serve HTTP in N processes")
    add_http_arguments(parser)
    parser.add_argument("--reload", action="store_true", help="start the server again when one of its files changes")
    parser.add_argument(
        "--json", action="store_true", help="write events as JSON lines: to standard output with --http, else to stderr"
    )


def _program(text: str) -> str:
    """The `type` of TARGET.  The scheme of a URL would be imported as a module, and Python has one named `http`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"must be a file or a module; for a URL write trio-mcp bridge {text}")
    return text


def run(arguments: argparse.Namespace) -> int:
    target, http = arguments.target, arguments.http
    sys.excepthook = _end
    events = Events(arguments.json, over_http=http is not None)
    ssl_context, options = _http_options(arguments)
    if arguments.reload:
        return _reload(target, http, ssl_context, options, events)
    server = load_server(target)
    from trio_mcp.server.server import Server

    ours = isinstance(server, Server)
    if http is None:
        events.tell("serving", pid=os.getpid())
    elif not ours:
        found = "no server" if server is None else f"a {type(server).__name__}"
        raise UsageError(f"--http needs a Server of trio_mcp; {target} has {found}")
    elif arguments.json:
        server._announced = lambda url, workers: events.tell("listening", url=url, workers=workers, pid=os.getpid())
    try:
        if ours:
            server.run(http=http, workers=arguments.workers, ssl_context=ssl_context, **options)
        elif server is None:
            run_script(target)
        else:
            server.run()
    except UsageError as error:
        if ours and (hint := option_hint(error)):
            raise UsageError(f"{error}{hint}") from None
        _end(type(error), error, error.__traceback__)  # with the line of the user
        return 1
    return 0


class Events:
    """The events of a server that runs, for people or as JSON lines.

    On stdio, standard output is the wire, so all lines go to standard error.
    """

    def __init__(self, as_json: bool, *, over_http: bool) -> None:
        self._file = sys.stdout if as_json and over_http else sys.stderr
        self._as_json = as_json

    def tell(self, event: str, words: str | None = None, **members: object) -> None:
        """Write the event with its members as JSON, or `words` for people; without words, people are told nothing."""
        line = json.dumps({"event": event, **members}) if self._as_json else words and f"trio-mcp: {words}"
        if line:
            with suppress(OSError):  # the reader has gone
                self._file.write(f"{line}\n")
                self._file.flush()


def option_hint(error: UsageError) -> str:
    """The option of the command line, for an error that names an option of `Server.run`; or ""."""
    return "; on the command line: --allowed-host mcp.example.com" if "allowed_hosts" in str(error) else ""


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Takes the place of `sys.excepthook`: the last line says where the file of the user has failed."""
    why = explain(kind, error, trace)
    if isinstance(error, ModuleNotFoundError):  # often the server has an environment of its own
        why += f"; this is {sys.executable}; for another Python, give its command after --"
    sys.stderr.write(f"trio-mcp: {why}\n")


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """Write the traceback, without the frames that led to a file of the user.  Returns the place and the error."""
    import traceback

    places = failing_places(error, trace)
    first = trace
    while first is not None and not own_files([first.tb_frame.f_code.co_filename]):
        first = first.tb_next
    traceback.print_exception(kind, error, first if places else trace)
    where = f"{os.path.basename(places[-1][0])}:{places[-1][1]}: " if places else ""
    return where + traceback.format_exception_only(kind, error)[-1].strip()


def failing_places(error: BaseException, trace: TracebackType | None) -> list[tuple[str, int | None]]:
    """The files of the user in which an error was raised, with their lines; the innermost one is the last."""
    import traceback

    places = [(each.filename, each.lineno) for each in traceback.extract_tb(trace)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    return [(name, line) for name, line in places if own_files([name])]


def own_files(files: Collection[str]) -> list[str]:
    """The files that belong to the user: not to Python, to an installed package or to this package.

    A file without a suffix is no module: it is the script `trio-mcp`.
    """
    import sysconfig

    python = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
    others = (*python, os.path.join(_OURS, ""))
    own = [each for each in files if not each.startswith(others) and not set(_INSTALLED) & set(Path(each).parts)]
    return [each for each in own if os.path.splitext(each)[1] and os.path.isfile(each)]


def run_script(file: str) -> None:
    """Run a script that starts its server itself, of any SDK."""
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")


def _reload(
    target: str, http: str | None, ssl_context: ssl.SSLContext | None, options: HttpOptions, events: Events
) -> int:
    from trio_mcp.cli.reload import serve_reloading
    from trio_mcp.cli.target import run_command

    return run_command(lambda: serve_reloading(target, http, ssl_context, options, events), verbose=False)


def _http_options(arguments: argparse.Namespace) -> tuple[ssl.SSLContext | None, HttpOptions]:
    """The options for HTTP.  Raises `UsageError`."""
    if arguments.http is None and (arguments.tls_cert is not None or arguments.allowed_host or arguments.workers != 1):
        raise UsageError("--tls-cert, --allowed-host and --workers need --http HOST:PORT")
    if arguments.workers != 1 and arguments.reload:
        raise UsageError("--reload runs one process; leave --workers out")
    if arguments.http is not None and arguments.reload:  # without it the server itself may name its hosts
        check_host(arguments.http.rpartition(":")[0].strip("[]"), arguments)
    return http_options(arguments)


def load_server(target: str) -> Any:
    """Import the file or the module of TARGET, and return its server; None for a script without one.

    Without a name, the server is the only `Server` of the module, or an object with a method `run` that has a usual
    name, as servers of other SDKs do.  Raises `UsageError`.
    """
    from trio_mcp.server.server import Server

    file, _, name = target.partition(":")
    sys.argv = [file]  # the arguments of trio-mcp mean nothing to a module that reads some
    module = _module(file)
    servers = {id(each): key for key, each in vars(module).items() if isinstance(each, Server)}
    names = ", ".join(f"{file}:{key}" for key in servers.values())
    if name:
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise UsageError(f"{file} has no {name!r}" + (f"; it has {names}" if names else ""))
            found = getattr(found, part)
        return found
    if len(servers) > 1:
        raise UsageError(f"{file} has {len(servers)} servers; choose one of {names}")
    for key in (*servers.values(), *_USUAL):
        candidate = getattr(module, key, None)
        if callable(getattr(candidate, "run", None)):
            return candidate
    if file.endswith(".py"):
        return None
    raise UsageError(f"{file} has no Server")


def _module(file: str) -> ModuleType:
    """Import a file under its own name, or a module by its dotted name."""
    if not file.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(file)
        except ModuleNotFoundError as error:
            if error.name is None or not file.startswith(error.name):
                raise
            raise UsageError(f"there is no module {file}") from None
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes of the module are looked up by its name
    spec.loader.exec_module(module)
    return module
