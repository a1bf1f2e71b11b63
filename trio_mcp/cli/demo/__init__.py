"""The demo: ``python -m trio_mcp demo`` runs a server and a client, and shows their code.

`server` is the server, also a command for any host.  `scenes` has the actions of the client, whose lines are shown and
then run.  `tour` shows them in order.  The output is real: the values shown come from the server.
"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON lines: a kind and a text in each")


def run(arguments: argparse.Namespace) -> int:
    from trio_mcp.cli.demo.tour import run as tour  # the scenes import this package

    return tour(as_json=arguments.json)
