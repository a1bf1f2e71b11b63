"""The words of one command: their meaning, and one line for a mistake.

Words after `--` are the command of a server.  A command has no program whose name begins with a hyphen, so `--` before
such a word has its usual meaning instead, and the words up to the next `--` are no options:

    trio-mcp call weather.py -- -tool city=Oslo
    trio-mcp task cancel -- -task-id -- npx -y @scope/server
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

__all__ = ["CommandParser", "above_zero", "divided"]

_OF_OTHERS = re.compile(r"^unrecognized.* --(transport|host|port)\b")  # as other packages name them
_PLAIN = "\0"  # before a word that looks like an option and is none; words of a process cannot contain it


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.  Options may stand anywhere between the other words."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **settings)  # `--a 1` is an argument of a tool, and not --args

    def parse_words(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words without those of the server's command.  A mistake ends the process with status 2."""
        found = self.parse_intermixed_args(words)
        for name, value in vars(found).items():
            if isinstance(value, str):
                setattr(found, name, value.removeprefix(_PLAIN))
            elif isinstance(value, list):
                setattr(found, name, [each.removeprefix(_PLAIN) for each in value])
        return found

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): must", r"\1 must", message.replace(_PLAIN, "")).removeprefix("argument ")
        help = f"{self.prog} --help shows the options"
        if message.startswith("unrecognized") and any(each.dest == "given" for each in self._actions):
            help += "; arguments of a tool are like NAME=VALUE"
        if _OF_OTHERS.search(message) and any("--http" in each.option_strings for each in self._actions):
            message += "; write --http HOST:PORT, or --http PORT"
        if message.startswith("unrecognized"):
            help += "; the command of a server, or a name that begins with -, follows after --"
        self.exit(2, f"trio-mcp: {message}; {help}\n")


def divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words for the parser, and the command of a server, which is empty if there is none."""
    own: list[str] = []
    options_ended = False
    for at, word in enumerate(words):
        if word != "--":
            own.append(_PLAIN + word if options_ended and word.startswith("-") else word)
        elif options_ended or not "".join(words[at + 1 : at + 2]).startswith("-"):
            return own, list(words[at + 1 :])
        else:
            options_ended = True
    return own, []


def above_zero(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return the `type` of an option that must be a number above 0."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:  # also if it is no number at all, as "nan" says
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {expected} above 0, got {text!r}")
        return value

    return read
