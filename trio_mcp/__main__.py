"""``python -m trio_mcp demo`` shows a server and a client at work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

USAGE = """\
usage: python -m trio_mcp demo

  demo    run a server and a client, in old and new revisions of the protocol

Your own servers and clients are separate programs; the README contains an example of each.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status: 2 for wrong arguments, 130 after Ctrl-C."""
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if list(arguments) != ["demo"]:
        sys.stderr.write(f"unknown arguments: {' '.join(arguments)}\n" * bool(arguments) + USAGE)
        return 2
    try:
        from trio_mcp.cli.demo.tour import run

        return run()
    except KeyboardInterrupt:  # during the imports
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
