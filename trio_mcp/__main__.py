"""``python -m trio_mcp`` is the command ``trio-mcp``."""

from __future__ import annotations

import sys

from trio_mcp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
