"""``trio-mcp``: the command line.

Each command lives in the module that `COMMANDS` names, and only the module of the used command is loaded: `--help`
needs no protocol, and `list` needs no server.  A module has two functions: `add_arguments(command, parser)`, and
`run(arguments)`, which returns the exit status.

| Status | Meaning |
|---|---|
| 0 | the command succeeded |
| 1 | the server answered with an error, the tool failed, or a port is in use |
| 2 | wrong arguments |
| 3 | no connection: the server cannot be started or reached, has ended, or does not speak MCP |
| 130 | ended by Ctrl-C |
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trio_mcp import __version__

__all__ = ["COMMANDS", "main"]


class CommandEntry(NamedTuple):
    """One command: its module in this package, and its line in the help."""

    module: str
    summary: str


COMMANDS: Mapping[str, CommandEntry] = {
    "run": CommandEntry("serve", "run a server on standard input and output, or over HTTP"),
    "demo": CommandEntry("demo", "show a server and a client at work"),
    "list": CommandEntry("explore", "show the tools, resources, templates and prompts of a server"),
    "call": CommandEntry("call", "call a tool"),
    "read": CommandEntry("explore", "read a resource"),
    "prompt": CommandEntry("explore", "get a prompt"),
    "complete": CommandEntry("explore", "complete an argument of a prompt or of a resource template"),
    "listen": CommandEntry("explore", "show changes of lists and resources as they come"),
    "ping": CommandEntry("explore", "measure round trips"),
    "task": CommandEntry("task", "start, list, follow, answer and cancel tasks"),
    "bridge": CommandEntry("bridge", "serve a server over another transport: stdio, HTTP, HTTP+SSE, WebSocket"),
    "check": CommandEntry("check", "test whether a server obeys the protocol"),
    "inspect": CommandEntry("inspector", "open a server in the MCP Inspector"),
    "install": CommandEntry("install", "write a server into the configuration of a host"),
    "hosts": CommandEntry("hosts", "show the hosts of this machine and their servers"),
    "new": CommandEntry("new", "make a project: a server, its tests and an entry for hosts"),
    "tap": CommandEntry("tap", "record the messages between a host and a server"),
    "show": CommandEntry("show", "show a recording as a sequence diagram"),
    "replay": CommandEntry("replay", "send the client's half of a recording again, and show the differences"),
    "completion": CommandEntry("completion", "write the completion for bash, zsh or fish"),
}

_USAGE = "usage: trio-mcp COMMAND [TARGET] [options] [-- SERVER COMMAND ...]"
_TARGETS = """\
A TARGET is a file (weather.py, weather.py:server), a module (package.module:server), a URL (http, https, ws, wss),
or a name in the configuration file of a host.  A command follows after --:

  trio-mcp list weather.py
  trio-mcp call weather.py forecast city=Oslo
  trio-mcp list -- npx -y @modelcontextprotocol/server-everything

"trio-mcp COMMAND --help" explains a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    if not given or given[0] in ("-h", "--help"):
        (sys.stdout if given else sys.stderr).write(_help())
        return 0 if given else 2
    if given[0] == "--version":
        sys.stdout.write(f"trio-mcp {__version__}\n")
        return 0
    name = given.pop(0)
    if name not in COMMANDS:
        sys.stderr.write(f"trio-mcp: unknown command {name!r}; {_instead(name, given)}\n")
        return 2
    from trio_mcp.cli.arguments import CommandParser, divided  # the help of all commands needs no argparse
    from trio_mcp.core.errors import UsageError

    try:
        module = importlib.import_module(f"trio_mcp.cli.{COMMANDS[name].module}")
        parser = CommandParser(f"trio-mcp {name}", description=COMMANDS[name].summary)
        words, command = divided(given)
        parser.set_defaults(name=name, target=None, server_command=command)
        module.add_arguments(name, parser)
        status: int = module.run(parser.parse_words(words))
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(f"trio-mcp: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe.  With /dev/null in its place, Python's last flush raises no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _instead(name: str, words: Sequence[str]) -> str:
    """The commands to write in place of one that does not exist."""
    if name.endswith(".py") or ":" in name:
        return f"write trio-mcp list {name}, or trio-mcp run {name}"
    import shlex  # the help loads no regular expressions
    from difflib import get_close_matches

    match name:  # commands of other packages
        case "dev":
            given = shlex.join(words or ["TARGET"])
            return f"write trio-mcp inspect {given}, or trio-mcp run {given} --reload"
        case "version":
            return "write trio-mcp --version"
        case "uninstall" | "remove":
            return "delete the entry from its file, which trio-mcp hosts shows"
    if close := get_close_matches(name, COMMANDS, 1):
        return f"write {shlex.join(['trio-mcp', *close, *words])}"
    return f"the commands are {', '.join(COMMANDS)}"


def _help() -> str:
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([_USAGE, "", *lines, "", _TARGETS, ""])
