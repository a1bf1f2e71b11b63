"""The files of examples/deployment, checked and run with the programs that use them."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from tests.hardening.test_process_life import ENVIRONMENT
from tests.hardening.test_workers import PROGRAM, Client, Load, Service, get, request, running
from tests.peers.installed import needs, python_of, tool
from tests.ports import unclaimed_port
from trio_mcp import open_client

pytestmark = pytest.mark.full

FILES = Path(__file__).parents[2] / "examples" / "deployment"
HOST = b"Host: mcp.example.com\r\n"


def example_text(name: str) -> str:
    return (FILES / name).read_text()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = needs("systemd-analyze", lambda: tool("systemd-analyze"))
    unit = example_text("weather.service").replace("/srv/weather/.venv/bin/python", sys.executable)
    (tmp_path / "weather.service").write_text(unit)
    done = subprocess.run(
        [program, "verify", "--man=no", str(tmp_path / "weather.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "weather" in line]) == (0, [])


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("compose.yaml", ["check_jsonschema", "--builtin-schema", "vendor.compose-spec"]),
        ("kubernetes.yaml", ["kubernetes_validate", "--strict"]),
    ],
)
def test_the_yaml_follows_its_schema(name: str, command: list[str]) -> None:
    packages = ("check-jsonschema==0.39.0", "kubernetes-validate==1.37.0")
    python = needs("the schemas", lambda: python_of("deployment-schemas", packages))
    subprocess.run([str(python), "-m", *command, str(FILES / name)], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_containers_share_a_store_and_keys(name: str) -> None:
    assert all(variable in example_text(name) for variable in ("MCP_REDIS", "TRIO_MCP_STATE_KEYS"))


def test_stop_timeouts_exceed_the_shutdown_timeout() -> None:
    (patience,) = map(int, re.findall(r"shutdown_timeout=(\d+)", example_text("server.py")))
    (stop,) = map(int, re.findall(r"TimeoutStopSec=(\d+)", example_text("weather.service")))
    (grace,) = map(int, re.findall(r"stop_grace_period: (\d+)s", example_text("compose.yaml")))
    (pod,) = map(int, re.findall(r"terminationGracePeriodSeconds: (\d+)", example_text("kubernetes.yaml")))
    (pause,) = map(int, re.findall(r'sleep, "(\d+)"', example_text("kubernetes.yaml")))
    assert min(stop, grace, pod - pause) >= patience + 5


async def test_the_server_answers_calls_and_probes() -> None:
    port = unclaimed_port()
    environment = {**ENVIRONMENT, "MCP_ADDRESS": f"127.0.0.1:{port}", "MCP_WORKERS": "2"}
    with trio.fail_after(60):
        process = await trio.lowlevel.open_process(
            [sys.executable, str(FILES / "server.py")], env=environment, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        received = b""
        while b"listens at" not in received:
            received += await process.stderr.receive_some()
        async with open_client(f"http://127.0.0.1:{port}/mcp") as client:
            assert (await client.call_tool("forecast", {"city": "Oslo"})).content[0].text == "Sunny in Oslo"
        web = Client(partial(trio.open_tcp_stream, "127.0.0.1", port))
        assert (await web.ask(get("/readyz")))[0] == 200
        await web.close()
        process.terminate()
        assert await process.wait() == 143
        await process.stderr.aclose()


# Proxies.


@attrs.define
class Proxy:
    """A proxy in front of two servers, which share a store."""

    port: int
    services: list[Service]

    def client(self) -> Client:
        return Client(partial(trio.open_tcp_stream, "127.0.0.1", self.port), translate=with_public_host)


def nginx(folder: Path, port: int, first: int, second: int) -> list[str]:
    program = needs("nginx", lambda: tool("nginx"))
    text = example_text("nginx.conf").replace("listen 8080", f"listen 127.0.0.1:{port}")
    text = re.sub(r"(?<=127\.0\.0\.1:)300[01]\b", lambda found: str({"3000": first, "3001": second}[found[0]]), text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    settings_in_folder = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds) + "    access_log off;\n"
    (folder / "nginx.conf").write_text(text.replace("http {\n", f"http {{\n{settings_in_folder}"))
    settings = f"daemon off; user {getpass.getuser()}; pid {folder}/nginx.pid; error_log {folder}/error.log;"
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    subprocess.run([*command, "-g", settings, "-t", "-q"], check=True)
    return [*command, "-g", settings]


def caddy(folder: Path, port: int, first: int, second: int) -> list[str]:
    program = needs("caddy", lambda: tool("caddy"))
    text = example_text("Caddyfile").replace("mcp.example.com {", f"http://mcp.example.com:{port} {{")
    text = re.sub(r"(?<=127\.0\.0\.1:)300[01]\b", lambda found: str({"3000": first, "3001": second}[found[0]]), text)
    (folder / "Caddyfile").write_text("{\n\tadmin off\n\tauto_https off\n}\n" + text)
    command = [program, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    subprocess.run([program, "validate", *command[2:]], check=True, capture_output=True)
    return command


PROXIES = {"nginx": nginx, "caddy": caddy}


@asynccontextmanager
async def behind(name: str, folder: Path, workers: int = 1) -> AsyncIterator[Proxy]:
    """This proxy in front of two servers with this number of workers."""
    ports = [unclaimed_port() for _ in range(3)]
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    command = PROXIES[name](folder, *ports)
    async with server(folder, ports[1], workers) as first, server(folder, ports[2], workers) as second:
        process = await trio.lowlevel.open_process(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", ports[0])).aclose()
                except OSError:
                    await trio.sleep(0.05)
                    assert process.returncode is None
                else:
                    break
            yield Proxy(ports[0], [first, second])
        finally:
            process.terminate()
            with trio.CancelScope(shield=True):
                await process.wait()


@asynccontextmanager
async def server(folder: Path, port: int, workers: int) -> AsyncIterator[Service]:
    options = {"http": f"127.0.0.1:{port}", "workers": workers, "store": folder / "store.db", "host": "mcp.example.com"}
    async with running(folder, PROGRAM, **options) as service:
        await service.line("listens at")
        yield service


def with_public_host(data: bytes) -> bytes:
    return data.replace(b"Host: localhost\r\n", HOST)


@pytest.mark.parametrize("name", PROXIES)
async def test_calls_reach_both_servers_and_probes_get_404(name: str, tmp_path: Path) -> None:
    async with behind(name, tmp_path) as proxy:
        client, pids = proxy.client(), set()
        while len(pids) < 2:
            status, body = await client.ask(request("pid"))
            assert status == 200, body
            pids.add(body)
        for path in ("/metrics", "/readyz", "/healthz", "/mcp/x"):
            assert (await client.ask(get(path)))[0] == 404
        await client.close()


@pytest.mark.parametrize("name", PROXIES)
async def test_events_arrive_while_the_call_runs(name: str, tmp_path: Path) -> None:
    async with behind(name, tmp_path) as proxy, await trio.open_tcp_stream("127.0.0.1", proxy.port) as stream:
        received = b""
        await stream.send_all(with_public_host(request("report", accept="application/json, text/event-stream")))
        while b"notifications/progress" not in received:
            received += await stream.receive_some()
        assert b"resultType" not in received
        (tmp_path / "go").touch()
        while b"resultType" not in received:
            received += await stream.receive_some()


@pytest.mark.parametrize("name", PROXIES)
async def test_a_websocket_is_opened(name: str, tmp_path: Path) -> None:
    upgrade = (
        b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with behind(name, tmp_path) as proxy, await trio.open_tcp_stream("127.0.0.1", proxy.port) as stream:
        await stream.send_all(with_public_host(upgrade))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("name", PROXIES)
async def test_no_request_fails_while_workers_are_replaced(name: str, tmp_path: Path) -> None:
    async with behind(name, tmp_path, workers=2) as proxy, loaded(proxy) as load:
        await load.more(100)
        for service in proxy.services:
            service.process.send_signal(signal.SIGHUP)
        for service in proxy.services:
            await service.opened(2)
        await load.more(100)


async def test_no_request_fails_while_servers_are_restarted(tmp_path: Path) -> None:
    """Only with nginx: Caddy up to 2.11.1 cannot repeat a POST after its connection was refused."""
    async with behind("nginx", tmp_path) as proxy, trio.open_nursery() as nursery:
        async with loaded(proxy) as load:
            await load.more(100)
            for service in proxy.services:
                port = service.port
                service.process.send_signal(signal.SIGTERM)
                assert await service.ended() == 143
                await load.more(100)
                process = await nursery.start(restarted, tmp_path, port)
                while not load.answers[process.pid]:
                    await load.more(50)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def loaded(proxy: Proxy) -> AsyncIterator[Load]:
    """Thirty clients of the proxy; no request may fail."""
    load, clients = Load(), [proxy.client() for _ in range(30)]
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(load.client, client, 0.02)
        yield load
        load.over = True
    for client in clients:
        await client.close()
    assert load.failures == []


async def restarted(folder: Path, port: int, task_status: trio.TaskStatus[trio.Process]) -> None:
    async with server(folder, port, 1) as service:
        task_status.started(service.process)
        await trio.sleep_forever()
