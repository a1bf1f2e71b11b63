"""``trio-mcp run``: run a server from a file or a module, on standard input and output or over HTTP."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trio_mcp.core.errors import UsageError

__all__ = ["add_arguments", "run"]

_USUAL = ("server", "mcp", "app")


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="weather.py, weather.py:server or package.module:server")
    parser.add_argument("--http", metavar="HOST:PORT", help="serve HTTP at this address instead of standard input")


def run(arguments: argparse.Namespace) -> int:
    try:
        server = load_server(arguments.target)
    except UsageError as error:
        sys.stderr.write(f"trio-mcp: {error}\n")
        return 2
    from trio_mcp.server.server import Server

    if isinstance(server, Server):
        server.run(http=arguments.http)
    elif server is None:  # a script that starts its server itself, of any SDK
        sys.argv = [arguments.target]
        runpy.run_path(arguments.target, run_name="__main__")
    elif arguments.http is not None:
        sys.stderr.write(
            f"trio-mcp: --http needs a Server of trio_mcp; {arguments.target} has a {type(server).__name__}\n"
        )
        return 2
    else:
        server.run()
    return 0


def load_server(target: str) -> Any:
    """Import the file or the module of TARGET, and return its server; None for a script without one.

    Without a name, the server is the only `Server` of the module, or an object with a method `run` that has a usual
    name, as servers of other SDKs do.  Raises `UsageError`.
    """
    from trio_mcp.server.server import Server

    file, _, name = target.partition(":")
    module = _module(file)
    if name:
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise UsageError(f"{file} has no {name!r}")
            found = getattr(found, part)
        return found
    servers = {id(each): key for key, each in vars(module).items() if isinstance(each, Server)}
    if len(servers) > 1:
        names = ", ".join(f"{file}:{key}" for key in servers.values())
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
