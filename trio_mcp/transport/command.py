"""The command of a server process: its arguments, its environment, its name, and why it could not be started.

The name appears in messages, logs and task names, which other people read, and a command line may contain tokens and
passwords.  So the name is the program, and at most one argument.  If the program is known to run other programs, its
first argument is the script, module or package that it runs.  This argument is part of the name if it looks like one,
and if only known words and flags stand before it.  Arguments after any other option are not read.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from trio_mcp.core.errors import UsageError, shown

__all__ = ["MINIMAL", "Command", "Environment", "arguments_of", "explain_start_error", "name_of", "variables_of"]

Command: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Environment: TypeAlias = Literal["minimal", "inherit"] | Mapping[str, str]

if sys.platform == "win32":
    MINIMAL: tuple[str, ...] = (
        "APPDATA", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATH", "PATHEXT", "PROCESSOR_ARCHITECTURE", "SYSTEMDRIVE",
        "SYSTEMROOT", "TEMP", "USERNAME", "USERPROFILE",
    )  # fmt: skip
else:
    MINIMAL = ("HOME", "LANG", "LC_*", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""The variables of "minimal": those that programs need to be found, to find their files and to know the user's
language, and no secrets.  LC_* stands for all variables that begin with LC_."""

_PYTHON = frozenset({"-B", "-E", "-I", "-O", "-S", "-s", "-u", "-m"})
_YES = frozenset({"-y", "--yes"})

# Programs that run other programs, by name without version, and the words that may stand before the program to run.
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
# A path, a module or a package, with or without scope and version: no =, no blank, no option.
_RUN = re.compile(r"[\w@./][\w@./+-]*")
_VERSION = re.compile(r"[\d.]+$")
_MORE = re.compile(r"\s+-|=")
_NAME = 80  # characters


def name_of(argv: Sequence[str]) -> str:
    """Return the command in a few words, without secrets."""
    program, *arguments = argv
    # If the caller forgot that a command with arguments is a list, the program contains all arguments.
    words = [os.path.basename(_MORE.split(program)[0])]
    launcher = _VERSION.sub("", words[0])
    for word in arguments if launcher in _LAUNCHERS else ():
        if word in _LAUNCHERS[launcher]:
            words += [word] if word == "-m" or not word.startswith("-") else []
            continue
        if _RUN.fullmatch(word):
            # The last part of a path is enough; a scope belongs to its package.
            words.append(word if word.startswith("@") else os.path.basename(word))
        break
    name = " ".join(words)
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def arguments_of(command: Command) -> list[str]:
    """Return the program and its arguments as a list.  Raises `UsageError` if `command` is not a command."""
    try:
        if isinstance(command, (str, os.PathLike)):
            argv = [os.fspath(command)]
        else:
            argv = [os.fspath(part) for part in command]
    except TypeError:
        argv = []
    if not argv or not argv[0] or not all(isinstance(part, str) for part in argv):
        raise UsageError('a command must be a program and its arguments, all strings: ["python", "server.py"]')
    return argv


def variables_of(environment: Environment, env: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return the variables of the process: those of `environment`, changed by `env`.  Raises `UsageError` if one of
    the two is invalid."""
    variables: dict[str, str | None]
    if environment == "inherit":
        variables = dict(os.environ)
    elif environment == "minimal":
        variables = {name: value for name, value in os.environ.items() if name in MINIMAL or name.startswith("LC_")}
    elif isinstance(environment, Mapping):
        variables = dict(environment)
    else:
        raise UsageError('environment must be "minimal", "inherit" or a mapping of all variables of the process')
    variables |= env or {}
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, (str, type(None))):  # the value may be a secret
            raise UsageError(f"the environment variable {shown(name)} must be a string, got {type(value).__name__}")
    return {name: value for name, value in variables.items() if value is not None}


def explain_start_error(
    error: OSError | ValueError, program: str, variables: dict[str, str], cwd: str | os.PathLike[str] | None
) -> str:
    """Explain why the process could not be started.  The text repeats only the first word of the command, because
    arguments may be secrets."""
    word, *more = program.split(None, 1) or [program]
    name = shown(word)
    if not isinstance(error, OSError):
        return f"{name} cannot be started: arguments and variables must not contain NUL, names of variables no ="
    if cwd is not None and not os.path.isdir(cwd):
        return f"{name} cannot be started in {shown(os.fspath(cwd), 400)}: that is not a directory"
    if not os.path.dirname(program):
        folders = os.get_exec_path(variables)
        where = f" in {shown(os.pathsep.join(folders), 400)}"
    else:
        folders = [os.fspath(cwd or os.curdir)]
        where = "" if os.path.isabs(program) else f" in {shown(folders[0], 400)}"
    if os.path.dirname(program) and (fault := _path_fault(os.path.join(folders[0], program), error)):
        return f"{name} cannot be started{where}: {fault}"
    if not isinstance(error, FileNotFoundError):
        return f"{name} cannot be started{where}: {error.strerror}"
    if any(os.path.exists(os.path.join(folder, program)) for folder in folders):
        return f"{name} was found{where}, but not the interpreter that its first line names"
    hint = ""
    if more:
        name, hint = shown(f"{word} ..."), "; write a command with arguments as a list, one string for each"
    elif word.endswith(".py"):
        hint = '; name the program that runs it: ["python", "server.py"]'
    return f"there is no command {name}{where}{hint}"


def _path_fault(path: str, error: OSError) -> str | None:
    """Return why the file or directory at `path` is not a program, or None if the reason cannot be seen."""
    missing = error.errno == errno.ENOEXEC
    if os.path.isdir(path):
        return "it is a directory; name a program in it"
    if os.path.isfile(path) and (missing or not os.access(path, os.X_OK)):
        fault = "has no first line that names an interpreter" if missing else "is not executable"
        return f'it {fault}; name the program that runs it: ["python", "server.py"]'
    return None
