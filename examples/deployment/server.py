"""A server for production: several processes, probes, metrics, and settings from the environment.

    MCP_WORKERS=4 python examples/deployment/server.py

The other files of this folder run it: systemd, nginx, Caddy, containers, Kubernetes.  docs/deployment.md explains them.
"""

import logging
import os

from trio_mcp import Server
from trio_mcp.stores import RedisStore

redis = os.environ.get("MCP_REDIS")  # redis://localhost:6379/0; without it, workers of one machine share a file
server = Server("weather", version="1.0", store=None if redis is None else RedisStore(redis))


@server.tool
async def forecast(city: str) -> str:
    """The forecast for a city."""
    return f"Sunny in {city}"


if __name__ == "__main__":
    # %(processName)s is the name of the worker.
    logging.basicConfig(level="INFO", format="%(asctime)s %(processName)s %(levelname)s %(message)s")
    server.run(
        http=os.environ.get("MCP_ADDRESS", "127.0.0.1:3000"),
        workers=int(os.environ.get("MCP_WORKERS", "2")),
        # Names under which clients and proxies reach this process.
        allowed_hosts=os.environ.get("MCP_HOSTS", "localhost,127.0.0.1").split(","),
        shutdown_timeout=20,
        monitoring=True,
    )
