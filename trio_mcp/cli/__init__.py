"""The commands of `python -m trio_mcp`."""
