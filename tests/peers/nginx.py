"""An nginx process in front of a server: `proxied(port)` yields the port of nginx.

With several ports each request goes to the next server.

All settings that a plain installation leaves to the defaults have their defaults here: nginx buffers responses, and
uses HTTP/1.0 and a new connection for each request to the upstream.  Host names the upstream.
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
        # nginx inherits a socket that listens already, as after an upgrade of nginx.  No other process can take the
        # port before nginx has started, and the system keeps early connections in the queue of the socket.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)  # like the sockets that nginx opens
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
                stderr=subprocess.DEVNULL,  # nginx warns there about the inherited socket
            )
        try:
            yield port
            assert process.poll() is None, (folder / "error.log").read_text()
        finally:
            process.terminate()
            process.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
