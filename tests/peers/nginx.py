"""An nginx of one's own, in front of a server: `proxied(port)` gives the port that leads to it.

With several ports each request goes to the next server.

All that a plain installation leaves to the defaults is left to them: responses are buffered, HTTP/1.0 is spoken
upstream, each request on a connection of its own, and Host names the upstream.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.peers.installed import needs, tool

__all__ = ["proxied"]

CONFIG = """
daemon off;
worker_processes 1;
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
events {{}}
http {{
    access_log off;
    client_max_body_size 10m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream servers {{
        {servers}
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://servers;
            proxy_set_header Host 127.0.0.1:{first};
        }}
    }}
}}
"""


@contextmanager
def proxied(*upstreams: int) -> Iterator[int]:
    program = needs("nginx", lambda: tool("nginx"))
    folder = Path(tempfile.mkdtemp(prefix="nginx-"))
    try:
        # It inherits a socket that listens already, as after an upgrade of itself: nobody can take the port before it
        # has started, and what connects meanwhile is kept waiting by the system.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)  # as its own are
            port = listener.getsockname()[1]
            servers = " ".join(f"server 127.0.0.1:{each} max_fails=0;" for each in upstreams)
            config = CONFIG.format(
                user=getpass.getuser(), folder=folder, port=port, servers=servers, first=upstreams[0]
            )
            (folder / "nginx.conf").write_text(config)
            process = subprocess.Popen(
                [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")],
                env={**os.environ, "NGINX": f"{listener.fileno()};"},
                pass_fds=[listener.fileno()],
                stderr=subprocess.DEVNULL,  # it complains there that it inherited a socket
            )
        try:
            yield port
            assert process.poll() is None, (folder / "error.log").read_text()
        finally:
            process.terminate()
            process.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
