"""The Model Context Protocol for Trio programs, in all five revisions, as server and as client.

The protocol itself lives in `trio_mcp.core` and needs no event loop.
"""

__version__ = "0.1.0"
