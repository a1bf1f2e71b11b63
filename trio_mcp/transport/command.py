"""The command by which a server process is started: what it is given, how it is named, why it could not be started.

A name is for messages, logs and tasks, which others read, and a command line has tokens and passwords in it.  So it is
the program alone, and of what stands behind it only what says which server this is: to a program that is known to run
others, the first argument is the one to run, be it a script, a module or a package.  It is part of the name if nothing
but known words and flags stands before it and it looks like one; anything after another option is not looked at.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from trio_mcp.core.errors import UsageError, shown

__all__ = ["MINIMAL", "Command", "Environment", "arguments_of", "name_of", "variables_of", "why_not"]

Command: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Environment: TypeAlias = Literal["minimal", "inherit"] | Mapping[str, str]

if sys.platform == "win32":
    MINIMAL: tuple[str, ...] = (
        "APPDATA", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATH", "PATHEXT", "PROCESSOR_ARCHITECTURE", "SYSTEMDRIVE",
        "SYSTEMROOT", "TEMP", "USERNAME", "USERPROFILE",
    )  # fmt: skip
else:
    MINIMAL = ("HOME", "LANG", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""The variables that "minimal" is made of: what programs need to be found, to find their files and to know the user's
language, and no secrets.  LC_* stands for all that begin so."""

_PYTHON = frozenset({"-B", "-E", "-I", "-O", "-S", "-s", "-u", "-m"})
_YES = frozenset({"-y", "--yes"})

# Programs that run others, by their names without a version, and what may stand before the one to run.
_LAUNCHERS = {
    "bash": frozenset[str](),
    "bun": frozenset({"run"}),
    "bunx": _YES,
    "deno": frozenset({"run"}),
    "node": frozenset[str](),
    "npx": _YES,
    "pipx": frozenset({"run"}),
    "pypy": _PYTHON,
    "python": _PYTHON,
    "ruby": frozenset[str](),
    "sh": frozenset[str](),
    "uv": frozenset({"run", "tool", "-m"}),
    "uvx": frozenset[str](),
}
# A path, a module or a package, perhaps with its scope and version: no =, no blank, no option.
_RUN = re.compile(r"[\w@./][\w@./+-]*")
_VERSION = re.compile(r"[\d.]+$")
_MORE = re.compile(r"\s+-|=")
_NAME = 80  # characters


def name_of(argv: Sequence[str]) -> str:
    """The command in a few words, none of which is a secret."""
    program, *arguments = argv
    # Who has forgotten that a command with arguments is a list has them all in here.
    words = [os.path.basename(_MORE.split(program)[0])]
    launcher = _VERSION.sub("", words[0])
    for word in arguments if launcher in _LAUNCHERS else ():
        if word in _LAUNCHERS[launcher]:
            words += [word] if word == "-m" or not word.startswith("-") else []
            continue
        if _RUN.fullmatch(word):
            # Of a path the last part says enough; a scope belongs to its package.
            words.append(word if word.startswith("@") else os.path.basename(word))
        break
    name = " ".join(words)
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def arguments_of(command: Command) -> list[str]:
    """The program and its arguments.  Raises `UsageError` for what is no command."""
    try:
        if isinstance(command, (str, os.PathLike)):
            argv = [os.fspath(command)]
        else:
            argv = [os.fspath(part) for part in command]
    except TypeError:
        argv = []
    if not argv or not argv[0] or not all(isinstance(part, str) for part in argv):
        raise UsageError('a command is a program and its arguments, all of them strings: ["python", "server.py"]')
    return argv


def variables_of(environment: Environment, env: Mapping[str, str | None] | None) -> dict[str, str]:
    """The environment by this policy, with these overrides.  Raises `UsageError` for what is none."""
    variables: dict[str, str | None]
    if environment == "inherit":
        variables = dict(os.environ)
    elif environment == "minimal":
        variables = {name: value for name, value in os.environ.items() if name in MINIMAL or name.startswith("LC_")}
    elif isinstance(environment, Mapping):
        variables = dict(environment)
    else:
        raise UsageError('environment is "minimal", "inherit" or a mapping of just the variables to give')
    variables |= env or {}
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, (str, type(None))):  # whose value may be a secret
            raise UsageError(f"the environment variable {shown(name)} is no string: {type(value).__name__}")
    return {name: value for name, value in variables.items() if value is not None}


def why_not(
    error: OSError | ValueError, program: str, variables: dict[str, str], cwd: str | os.PathLike[str] | None
) -> str:
    """Why it could not be started.  Of the command only its first word is told, for arguments may be secrets."""
    word, *more = program.split(None, 1) or [program]
    name = shown(word)
    if not isinstance(error, OSError):
        return f"{name} cannot be started: no argument or variable may hold a NUL, and no variable's name a ="
    if cwd is not None and not os.path.isdir(cwd):
        return f"{name} cannot be started in {shown(os.fspath(cwd), 400)}: that is no directory"
    if not os.path.dirname(program):
        folders = os.get_exec_path(variables)
        where = f" in {shown(os.pathsep.join(folders), 400)}"
    else:
        folders = [os.fspath(cwd or os.curdir)]
        where = "" if os.path.isabs(program) else f" in {shown(folders[0], 400)}"
    if os.path.dirname(program) and (wrong := _no_program(os.path.join(folders[0], program), error)):
        return f"{name} cannot be started{where}: {wrong}"
    if not isinstance(error, FileNotFoundError):
        return f"{name} cannot be started{where}: {error.strerror}"
    if any(os.path.exists(os.path.join(folder, program)) for folder in folders):
        return f"{name} was found{where}, but not the interpreter that its first line names"
    hint = ""
    if more:
        name, hint = shown(f"{word} ..."), "; a command with arguments is a list, one string for each"
    elif word.endswith(".py"):
        hint = '; write the program that runs it, such as ["python", "server.py"]'
    return f"there is no command {name}{where}{hint}"


def _no_program(path: str, error: OSError) -> str | None:
    """Why a path that is there is no program, if that can be seen."""
    missing = error.errno == errno.ENOEXEC
    if os.path.isdir(path):
        return "it is a directory; write the program in it"
    if os.path.isfile(path) and (missing or not os.access(path, os.X_OK)):
        what = "has no first line that names an interpreter" if missing else "is not executable"
        return f'it {what}; write the program that runs it, such as ["python", "server.py"]'
    return None
