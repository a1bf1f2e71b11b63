"""``trio-mcp completion``: the completion of commands, options and choices for bash, zsh and fish.

The texts are made from the same functions that make the parsers, so they cannot differ from what the commands take.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from trio_mcp.cli.arguments import CommandParser
from trio_mcp.cli.main import COMMANDS
from trio_mcp.cli.output import Output

__all__ = ["SHELLS", "add_arguments", "run"]


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.add_argument("--json", action="store_true", help="write JSON: the shell and the script")


def run(arguments: argparse.Namespace) -> int:
    script = SHELLS[arguments.shell](_all_options())
    if arguments.json:
        Output(as_json=True).json({"shell": arguments.shell, "script": script})
    else:
        sys.stdout.write(script)
    return 0


def _all_options() -> dict[str, list[argparse.Action]]:
    """The options of each command, and its arguments without a name, which have no `option_strings`."""
    found = {}
    for name, command in COMMANDS.items():
        parser = CommandParser(f"trio-mcp {name}", add_help=False)
        parser.add_argument("--help", action="store_true", help="show the options")
        importlib.import_module(f"trio_mcp.cli.{command.module}").add_arguments(name, parser)
        found[name] = parser._actions
    return found


_BASH = """\
# eval "$(trio-mcp completion bash)"
_trio_mcp() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words= i
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W '@COMMANDS@ --help --version' -- "$word"))
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [ "${COMP_WORDS[i]}" = -- ]; then
            COMPREPLY=($(compgen -c -f -- "$word"))
            return
        fi
    done
    case "${COMP_WORDS[1]} $before" in
@CHOICES@
    esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]}" in
@OPTIONS@
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}
complete -F _trio_mcp trio-mcp
"""


def _bash(found: Mapping[str, Sequence[argparse.Action]]) -> str:
    choices, options = [], []
    for name, each in found.items():
        for option in each:
            if option.choices:  # an argument without a name follows the command
                befores = " | ".join(f"'{name} {before}'" for before in option.option_strings or (name,))
                choices.append(f"        {befores}) words='{' '.join(option.choices)}' ;;")
        options.append(
            f"        {name}) words='{' '.join(flag for option in each for flag in option.option_strings)}' ;;"
        )
    text = _BASH.replace("@COMMANDS@", " ".join(found))
    return text.replace("@CHOICES@", "\n".join(choices)).replace("@OPTIONS@", "\n".join(options))


_ZSH = """\
#compdef trio-mcp
# source <(trio-mcp completion zsh)
_trio_mcp() {
    local -a commands
    commands=(
@COMMANDS@
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    case "${words[2]}" in
@OPTIONS@
    esac
}
compdef _trio_mcp trio-mcp
"""


def _zsh(found: Mapping[str, Sequence[argparse.Action]]) -> str:
    commands = [f"        {shlex.quote(f'{name}:{COMMANDS[name].summary}')}" for name in found]
    options = []
    for name, each in found.items():
        rules = [rule for option in each for rule in _zsh_rules(option)]
        options.append(f"        {name}) shift words; (( CURRENT-- )); _arguments {' '.join(rules)} '*:file:_files' ;;")
    return _ZSH.replace("@COMMANDS@", "\n".join(commands)).replace("@OPTIONS@", "\n".join(options))


def _zsh_rules(option: argparse.Action) -> list[str]:
    help = "".join(f"\\{each}" if each in "[]:\\" else each for each in option.help or "")
    values = f"({' '.join(option.choices)})" if option.choices else "_files"
    if not option.option_strings:
        return [shlex.quote(f"1:{help}:{values}")] if option.choices else []
    value = f":value:{values}" if option.nargs != 0 else ""
    return [shlex.quote(f"*{flag}[{help}]{value}") for flag in option.option_strings]


def _fish(found: Mapping[str, Sequence[argparse.Action]]) -> str:
    lines = ["# trio-mcp completion fish | source"]
    for name in found:
        summary = _fish_quoted(COMMANDS[name].summary)
        lines.append(f"complete -c trio-mcp -f -n __fish_use_subcommand -a {name} -d {summary}")
    for name, each in found.items():
        here = f"complete -c trio-mcp -n '__fish_seen_subcommand_from {name}'"
        for option in each:
            flags = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.option_strings
            )
            values = f" -x -a {_fish_quoted(' '.join(option.choices))}" if option.choices else " -r"
            if flags:
                lines.append(
                    f"{here} {flags} -d {_fish_quoted(option.help or '')}{values if option.nargs != 0 else ''}"
                )
            elif option.choices:
                lines.append(f"{here} -f -a {_fish_quoted(' '.join(option.choices))}")
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, Callable[[Mapping[str, Sequence[argparse.Action]]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
