"""``python -m trio_mcp demo`` shows a server and a client at work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

USAGE = """\
usage: python -m trio_mcp demo

  demo    a server and a client at work, in old and new revisions of the protocol

Servers and clients of yours are programs by themselves; the README has one of each to paste.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit status: 2 for what cannot be understood, 130 after Ctrl-C."""
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if list(arguments) != ["demo"]:
        sys.stderr.write(f"not understood: {' '.join(arguments)}\n" * bool(arguments) + USAGE)
        return 2
    try:
        from trio_mcp.cli.demo.tour import run

        return run()
    except KeyboardInterrupt:  # while all of it is loaded
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
