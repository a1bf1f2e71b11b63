"""The command ``python -m oauth_proxy PORT``; the docstring of the package describes it."""

import os
import signal
import sys
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from . import __doc__ as usage
from .notes import make_app
from .upstream import Refused, Unavailable, Upstream

PUBLIC_URL, ISSUER, CLIENT_ID, CLIENT_SECRET = (
    os.environ.get(name, "") for name in ("PUBLIC_URL", "ISSUER", "CLIENT_ID", "CLIENT_SECRET")
)

PUBLIC_URL = PUBLIC_URL.rstrip("/")


async def main(port: int) -> None:
    try:
        upstream = await Upstream.discover(ISSUER, CLIENT_ID, CLIENT_SECRET, f"{PUBLIC_URL}/callback")
    except (Refused, Unavailable) as error:
        sys.exit(f"the identity provider cannot be used: {error}")
    app, server = make_app(PUBLIC_URL, upstream)
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None  # and no access log, because queries contain states and codes
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def wait_for_shutdown() -> None:
            await anext(signals)
            async with server.draining(5):
                pass

        async with trio.open_nursery() as nursery:
            serving = partial(serve, app, config, shutdown_trigger=wait_for_shutdown)  # type: ignore[arg-type]
            await nursery.start(serving)
            print("listening for", PUBLIC_URL, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not all((PUBLIC_URL, ISSUER, CLIENT_ID, CLIENT_SECRET)):
        sys.exit(usage)
    trio.run(main, int(sys.argv[1]))
