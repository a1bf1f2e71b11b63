"""``trio-mcp install``: write a server into the configuration file of a host.

The entry has absolute paths and the Python that runs this command, because hosts start servers in folders of their own
and activate no environments.  Before the file is changed, the server is tried in that way, and the difference is shown;
values of variables and headers are not.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.machinery
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from trio_mcp.cli.edits import toml_entry
from trio_mcp.cli.hosts import HIDDEN, HOSTS, ConfigurationFile, HostProgram, configuration_files, masked
from trio_mcp.cli.output import Output
from trio_mcp.cli.target import ServerTarget, run_command, target_of
from trio_mcp.client.client import open_client
from trio_mcp.core.errors import McpError, UsageError

__all__ = ["add_arguments", "run"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PATIENCE = 30.0  # seconds; the first start of npx or uvx installs packages


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    if not parser.get_default("server_command"):
        parser.add_argument("target", metavar="TARGET", help="a file, a module, a URL or a configured name")
    parser.add_argument("--host", choices=HOSTS, required=True, help="the host that gets the server")
    parser.add_argument("--project", action="store_true", help="the file of the current folder, not of the user")
    parser.add_argument("--name", dest="entry", help="the name of the server in the host (that of the file or module)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the server")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="an HTTP header")
    parser.add_argument("--config", metavar="FILE", help="a file with mcpServers, for a name as TARGET")
    parser.add_argument("--replace", action="store_true", help="replace an entry of this name")
    parser.add_argument("--dry-run", action="store_true", help="show the difference, and write nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="write JSON, and do not ask")
    parser.add_argument("--verbose", action="store_true", help="show the output of the server, and tracebacks")


def run(arguments: argparse.Namespace) -> int:
    return run_command(lambda: _install(arguments), verbose=arguments.verbose)


async def _install(arguments: argparse.Namespace) -> int:
    host, output = HOSTS[arguments.host], Output(arguments.json)
    file = _file(host, arguments.project)
    target = _absolute(target_of(arguments), arguments.target)
    name = arguments.entry or _usual_name(arguments)
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name must have 1 to 64 letters, digits, - and _, got {name!r}")
    entry = _entry_of(target, host)
    text = file.text()
    document = file.parse(text)
    servers = document.get(host.key)
    old = servers.get(name) if isinstance(servers, dict) else None
    report = {"host": arguments.host, "file": str(file.path), "name": name, "entry": masked(entry)}
    if old == entry:
        _say(output, report, "unchanged", f"{file.path} already has this entry.")
        return 0
    if old is not None and not arguments.replace:
        raise UsageError(f"{file.path} already has a server {name!r}; use --replace, or another --name")
    changed = file.put(text, name, entry)
    asks = not (arguments.yes or arguments.dry_run or output.as_json)
    if asks and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("standard input is not a terminal, so there is no answer; use --yes or --dry-run")
    await _try(target, arguments.verbose)
    if not output.as_json:
        _show_difference(file, name, old, entry, output)
    if arguments.dry_run:
        _say(output, report, "dry run", "Nothing was written (--dry-run).")
        return 0
    if asks and not await _agreed():
        _say(output, report, "declined", "Nothing was written.")
        return 1
    backup = _write(file, text, changed)
    report["backup"] = str(backup) if backup else None
    _say(output, report, "replaced" if old is not None else "added", f"Written: {file.path}")
    if backup and not output.as_json:
        output.line(f"Backup:  {backup}")
    if not output.as_json:
        output.line(f"Restart {host.title}, or reload its servers.")
    return 0


def _say(output: Output, report: Mapping[str, Any], done: str, line: str) -> None:
    if output.as_json:
        output.json({**report, "done": done})
    else:
        output.line(line)


def _file(host: HostProgram, project: bool) -> ConfigurationFile:
    files = configuration_files(host)
    if project and not host.project:
        raise UsageError(f"{host.title} has no file for a project; leave out --project")
    chosen = files[0] if project else files[-1]
    # Files of configuration are often links into a folder under version control; the link must stay.
    return chosen._replace(path=chosen.path.absolute().resolve())


def _absolute(target: ServerTarget, given: str | None) -> ServerTarget:
    """The target with absolute paths, so that it starts in any folder."""
    if isinstance(target.address, str):
        return target
    command, *arguments = target.address
    found = shutil.which(command)
    if found is None:
        raise UsageError(f"there is no program {command!r}; name it with its path")
    env = dict(target.env)
    if given is not None and arguments[:3] == ["-m", "trio_mcp", "run"]:
        file, sign, name = arguments[3].partition(":")
        if file.endswith(".py"):
            arguments[3] = f"{Path(file).absolute()}{sign}{name}"
        elif importlib.machinery.PathFinder.find_spec(file.partition(".")[0], _installed()) is None:
            env.setdefault("PYTHONPATH", str(Path.cwd()))  # the module is found from this folder only
    else:
        ours = Path(command).name == "trio-mcp" or arguments[:2] == ["-m", "trio_mcp"]
        made = ("-o", "--output") if ours else ()  # before the file that `tap` makes, which may not exist yet
        arguments = [
            os.path.abspath(each) if before in made else _absolute_argument(each)
            for before, each in pairwise(("", *arguments))
        ]
    # Not resolved: the link bin/python is what makes Python use its virtual environment.
    return ServerTarget([str(Path(found).absolute()), *arguments], env, target.headers)


def _installed() -> list[str]:
    here = Path.cwd()
    return [each for each in sys.path if each and Path(each).absolute() != here]


def _absolute_argument(argument: str) -> str:
    """A path of a file or a folder, made absolute; a name without a dot or a slash is not taken for a path."""
    path = Path(argument)
    is_path = not argument.startswith("-") and ("." in argument or "/" in argument) and path.exists()
    return os.path.abspath(argument) if is_path else argument


def _usual_name(arguments: argparse.Namespace) -> str:
    given = arguments.target
    if given is None or "://" in given:
        raise UsageError("give the server a name: --name NAME")
    file = given.partition(":")[0]
    name = Path(file).stem if file.endswith(".py") else file.rpartition(".")[2] if ":" in given else given
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")


def _entry_of(target: ServerTarget, host: HostProgram) -> dict[str, Any]:
    """The entry in the form of the host."""
    entry: dict[str, Any] = {}
    if isinstance(target.address, str):
        if host.url is None:
            raise UsageError(f"the file of {host.title} takes commands only; add a URL under Settings, Connectors")
        if not target.address.startswith("http"):
            raise UsageError(f"hosts connect to http and https URLs only, got {target.address.partition(':')[0]}")
        if host.typed:
            entry["type"] = "http"
        entry[host.url] = target.address
        if target.headers:
            entry[host.headers] = dict(target.headers)
        return entry
    if target.headers:
        raise UsageError("--header needs a URL as TARGET; a command gets its settings with --env")
    command, *arguments = target.address
    entry = {"type": "stdio"} if host.typed else {}
    entry |= {"command": command, "args": arguments}
    if target.env:
        entry["env"] = dict(target.env)
    return entry


async def _try(target: ServerTarget, verbose: bool) -> None:
    """Start a command as a host does, in another folder; say on standard error if it does not answer.

    The entry may be right nevertheless: a container may be built later.  So this is a warning.
    """
    if isinstance(target.address, str):
        return
    last: list[bytes] = []
    options: dict[str, Any] = {} if verbose else {"stderr": last.append}
    try:
        with trio.fail_after(_PATIENCE):
            async with open_client(target.address, cwd="/", env=target.env, start_timeout=_PATIENCE, **options):
                return
    except (McpError, trio.TooSlowError) as error:
        reason = " ".join(str(error).split()) or f"no answer within {_PATIENCE:g} seconds"
        sys.stderr.write(f"trio-mcp: warning: the server does not start as a host would start it: {reason}\n")


def _show_difference(file: ConfigurationFile, name: str, old: Any, new: Mapping[str, Any], output: Output) -> None:
    """The entry before and after.  The rest of the file is not shown, because it may have secrets of other servers."""
    output.title(str(file.path))
    before = _lines(file, name, masked(old)) if old is not None else []
    shown = masked(new)
    for member in ("env", "headers", "http_headers"):
        values = old.get(member) if isinstance(old, dict) else None
        for each, value in new.get(member, {}).items():
            if isinstance(values, dict) and values.get(each, value) != value:
                shown[member][each] = f"{HIDDEN} (changed)"
    for line in difflib.unified_diff(before, _lines(file, name, shown), n=1000, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            colour = {"+": "good", "-": "bad"}.get(line[0])
            output.line("  " + (output.painted(line, colour) if colour else line))


def _lines(file: ConfigurationFile, name: str, entry: Mapping[str, Any]) -> list[str]:
    if file.path.suffix == ".toml":
        return toml_entry(file.key, name, entry).splitlines()
    return json.dumps({file.key: {name: entry}}, ensure_ascii=False, indent=2).splitlines()


async def _agreed() -> bool:
    sys.stderr.write("Write this? [y/N] ")
    sys.stderr.flush()
    answer: str = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    return answer.strip().lower() in ("y", "yes")


def _write(file: ConfigurationFile, text: str, changed: str) -> Path | None:
    """Replace the file in one step; return the backup of a file that existed.  Raises `UsageError`.

    Both get the permissions of the file.  A new file may be read by its user only, because entries have secrets.
    """
    path = file.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else None
        if file.text() != text:
            raise UsageError(f"{path} has been changed by another program; try again")
        backup = None
        if mode is not None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            backup = path.with_name(f"{path.name}.{stamp}.backup")
            _write_at_once(backup, text, mode)
        _write_at_once(path, changed, mode or 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
    return backup


def _write_at_once(path: Path, text: str, mode: int) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
