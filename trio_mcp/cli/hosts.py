"""The hosts that this command line knows: their files, and the servers in these files.  And ``trio-mcp hosts``.

`HOSTS` is the only table of hosts.  `install` writes the files, and a configured name as TARGET is looked up in them,
in the order of the table: the files of the current folder come before those of the user.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trio_mcp.cli.edits import Document, put_json, put_toml, read_json, read_toml
from trio_mcp.cli.output import Output
from trio_mcp.core.errors import UsageError

__all__ = [
    "HOSTS", "ConfigurationFile", "HostProgram", "add_arguments", "configuration_files", "configured_entries",
    "masked", "run",
]  # fmt: skip

HIDDEN = "***"
_MARK = "\ufeff"  # editors of Windows begin a file of UTF-8 with it
_SECRETS = ("env", "headers", "http_headers")
_TELLING = re.compile(r"(?i)key|token|secret|passw|auth|credential|cookie")


class HostProgram(NamedTuple):
    """One host: where its files are, and how they spell a server."""

    title: str
    key: str
    """The member of the file that has the servers."""
    user: str | None
    """The file of the user.  `~`, `$CONFIG` (the folder of the system for configurations of programs)."""
    project: str | None = None
    """The file of a project, in the folder of the project."""
    typed: bool = False
    """Entries have a type: stdio or http."""
    url: str | None = "url"
    """The member for a URL; None: the file takes commands only."""
    headers: str = "headers"
    programs: Sequence[str] = ()
    """The commands that start the host."""


HOSTS: Mapping[str, HostProgram] = {
    "claude-desktop": HostProgram(
        "Claude Desktop", "mcpServers", "$CONFIG/Claude/claude_desktop_config.json", url=None,
        programs=("claude-desktop",),
    ),
    "claude-code": HostProgram(
        "Claude Code", "mcpServers", "~/.claude.json", ".mcp.json", typed=True, programs=("claude",)
    ),
    "vscode": HostProgram(
        "VS Code", "servers", "$CONFIG/Code/User/mcp.json", ".vscode/mcp.json", typed=True, programs=("code",)
    ),
    "cursor": HostProgram("Cursor", "mcpServers", "~/.cursor/mcp.json", ".cursor/mcp.json", programs=("cursor",)),
    "gemini": HostProgram(
        "Gemini CLI", "mcpServers", "~/.gemini/settings.json", ".gemini/settings.json", url="httpUrl",
        programs=("gemini",),
    ),
    "codex": HostProgram(
        "Codex", "mcp_servers", "~/.codex/config.toml", ".codex/config.toml", headers="http_headers",
        programs=("codex",),
    ),
}  # fmt: skip


class ConfigurationFile(NamedTuple):
    """A file of a host."""

    path: Path
    key: str

    def read(self) -> Document:
        """Read the file; a file that is absent is empty.  Raises `UsageError` if it cannot be read."""
        return self.parse(self.text())

    def text(self) -> str:
        """The text as it is, with its ends of lines and its mark of UTF-8."""
        try:
            return self.path.read_bytes().decode()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from None

    def parse(self, text: str) -> Document:
        text = text.removeprefix(_MARK)
        try:
            return read_toml(text) if self.path.suffix == ".toml" else read_json(text)
        except ValueError as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from None

    def put(self, text: str, name: str, entry: Mapping[str, Any]) -> str:
        """Return the text of the file with this server in it, and with the ends of lines that it has."""
        mark = _MARK if text.startswith(_MARK) else ""
        windows = "\r\n" in text and text.count("\r\n") == text.count("\n")
        text = text.removeprefix(_MARK)
        put = put_toml if self.path.suffix == ".toml" else put_json
        changed = put(text.replace("\r\n", "\n") if windows else text, self.key, name, entry)
        return mark + (changed.replace("\n", "\r\n") if windows else changed)

    def entries(self, document: Document) -> dict[str, Any]:
        """The servers of the file, by name; those that Claude Code keeps for the current folder come first."""
        projects = document.get("projects")
        local = projects.get(str(Path.cwd())) if isinstance(projects, dict) else None
        found: dict[str, Any] = {}
        for holder in (local, document):
            servers = holder.get(self.key) if isinstance(holder, dict) else None
            for name, entry in servers.items() if isinstance(servers, dict) else ():
                found.setdefault(name, entry)
        return found


def configuration_files(host: HostProgram) -> list[ConfigurationFile]:
    """The files of a host: the one of the current folder, then the one of the user."""
    files = [Path(host.project)] if host.project else []
    if host.user:
        files.append(Path(host.user.replace("$CONFIG", _config_folder(), 1)).expanduser())
    return [ConfigurationFile(path, host.key) for path in files]


def _config_folder() -> str:
    if sys.platform == "darwin":
        return "~/Library/Application Support"
    return os.environ.get("XDG_CONFIG_HOME") or "~/.config"


def configured_entries(file: str | None) -> Iterator[tuple[str, Any]]:
    """The servers of `file`, or else of all files of hosts.  Raises `UsageError` if `file` cannot be read.

    A file that no host has named may have any of the keys of hosts.  Files of hosts that cannot be read are skipped.
    """
    if file:
        path = Path(file)
        if not path.is_file():
            raise UsageError(f"there is no file {file}")
        for key in dict.fromkeys(host.key for host in HOSTS.values()):
            configured = ConfigurationFile(path, key)
            yield from configured.entries(configured.read()).items()
        return
    found = [configuration_files(host) for host in HOSTS.values()]
    for configured in sorted((each for files in found for each in files), key=lambda each: each.path.is_absolute()):
        try:
            entries = configured.entries(configured.read())
        except UsageError:
            continue
        yield from entries.items()


def masked(entry: Any) -> Any:
    """Return an entry without the values of its variables and headers, and of arguments that look like secrets."""
    if not isinstance(entry, dict):
        return HIDDEN
    shown = dict(entry)
    for member in _SECRETS:
        if isinstance(shown.get(member), dict):
            shown[member] = dict.fromkeys(shown[member], HIDDEN)
    for member in ("url", "httpUrl", "serverUrl"):
        if isinstance(shown.get(member), str):
            shown[member] = _masked_url(shown[member])
    if isinstance(shown.get("args"), list):
        shown["args"] = _masked_arguments(list(map(str, shown["args"])))
    return shown


def _masked_url(url: str) -> str:
    """Hide the user, and the values of the query, which often are keys."""
    url = re.sub(r"//[^/@?#]*@", f"//{HIDDEN}@", url)
    return re.sub(r"([?&][^=&#]*=)[^&#]*", rf"\1{HIDDEN}", url)


def _masked_arguments(arguments: Sequence[str]) -> list[str]:
    shown, hide = [], False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        if hide:
            shown.append(HIDDEN)
            hide = False
        elif sign and _TELLING.search(name):
            shown.append(f"{name}={HIDDEN}")
        elif "://" in argument:
            shown.append(_masked_url(argument))
        else:
            shown.append(f"{argument.partition(':')[0]}: {HIDDEN}" if _is_header(argument) else argument)
            hide = argument.startswith("-") and not sign and _TELLING.search(argument) is not None
    return shown


def _is_header(argument: str) -> bool:
    name, sign, _ = argument.partition(":")
    return bool(sign) and "/" not in name and _TELLING.search(name) is not None


# The command


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show each host, its files and their servers.  The status is 1 if a file cannot be read."""
    output = Output(arguments.json)
    found = [_look(name, host) for name, host in HOSTS.items()]
    if output.as_json:
        output.json({"hosts": found})
    else:
        for host in found:
            _show(host, output)
    return int(any("error" in file for host in found for file in host["files"]))


def _look(name: str, host: HostProgram) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    here = any(map(shutil.which, host.programs))
    for configured in configuration_files(host):
        folder = configured.path.parent
        if configured.path.is_absolute() and folder != Path.home() and folder.is_dir():
            here = True  # the host has a folder of its own, such as ~/.cursor, since it was started once
        if not configured.path.is_file():
            continue
        here = True
        shown: dict[str, Any] = {"path": str(configured.path.absolute())}
        try:
            entries = configured.entries(configured.read())
            shown["servers"] = {each: masked(entry) for each, entry in entries.items()}
        except UsageError as error:
            shown["error"] = str(error)
        files.append(shown)
    return {"host": name, "title": host.title, "here": here, "files": files}


def _show(host: Mapping[str, Any], output: Output) -> None:
    state = "" if host["here"] else output.painted("  not found", "dim")
    output.line(f"{output.painted(host['title'], 'title')}  {host['host']}{state}")
    for file in host["files"]:
        output.line(f"  {file['path']}")
        if "error" in file:
            output.line("    " + output.painted(file["error"], "bad"))
            continue
        output.table([(name, _summary(entry)) for name, entry in file["servers"].items()], indent=4)
        if not file["servers"]:
            output.line("    " + output.painted("no servers", "dim"))


def _summary(entry: Any) -> str:
    """One line for an entry whose secrets are hidden."""
    if not isinstance(entry, dict):
        return "not an object"
    words = [str(entry["command"]), *map(str, entry.get("args") or ())] if "command" in entry else []
    words = words or [str(entry.get(each)) for each in ("url", "httpUrl", "serverUrl") if each in entry]
    extra = [f"{member}: {', '.join(entry[member])}" for member in _SECRETS if isinstance(entry.get(member), dict)]
    off = ["disabled"] if entry.get("disabled") is True or entry.get("enabled") is False else []
    line = " ".join(json.dumps(word) if " " in word or not word else word for word in words)
    return "  ".join([line or "neither a command nor a URL", *(f"({each})" for each in extra + off)])
