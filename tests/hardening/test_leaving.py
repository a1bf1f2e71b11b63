"""A process that leaves: the effects for clients that connect or send a request at this moment.

When the last process closes a listening socket, the system resets the connections that wait to be accepted.  A proxy
that has sent a POST on one of them may not send it again.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.hardening.test_workers import client_of, request, running
from trio_mcp import Server, serve_http
from trio_mcp.server.http.listener import leave_to_others  # the process calls it at SIGTERM
from trio_mcp.stores import MemoryStore

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can open no more connections to a socket")


@on_linux
@pytest.mark.parametrize("given", [False, True])
async def test_a_socket_that_was_passed_in_still_accepts_connections(given: bool) -> None:
    """Another process may accept connections from it."""
    server, options = Server("crew", store=MemoryStore()), {}
    async with trio.open_nursery() as nursery:
        if given:
            options = {"listeners": await trio.open_tcp_listeners(0, host="127.0.0.1")}
        address = await nursery.start(partial(serve_http, server, **options))
        nursery.start_soon(leave_to_others, server, 5.0)
        await trio.testing.wait_all_tasks_blocked()
        with socket.socket() as client:
            client.setblocking(False)
            client.connect_ex(address.listeners[0].socket.getsockname())
            opened = select.poll()
            opened.register(client, select.POLLOUT)
            assert bool(opened.poll(0)) == given
        nursery.cancel_scope.cancel()


class SlowListener(trio.abc.Listener[trio.abc.Stream]):
    """A listener with an accept that cannot be cancelled, and takes a moment after the system has a connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.came = trio.Event()
        self._streams = [stream]

    async def accept(self) -> trio.abc.Stream:
        await self.came.wait()
        if not self._streams:
            await trio.sleep_forever()
        with trio.CancelScope(shield=True):
            await trio.sleep(0.01)
        return self._streams.pop()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_connection_that_was_accepted_last_is_served(autojump_clock: MockClock) -> None:
    server, (client, theirs) = Server("crew", store=MemoryStore()), trio.testing.memory_stream_pair()
    listener = SlowListener(theirs)
    server.tool(name="pid")(os.getpid)

    async def leave() -> None:
        await leave_to_others(server, 5.0)
        async with server.draining(5.0):
            pass

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, server, listeners=[listener]))
        nursery.start_soon(leave)
        await trio.sleep(0.015)  # shortly before the process stops listening
        listener.came.set()
        await client.send_all(request("pid"))
        assert (await client.receive_some()).startswith(b"HTTP/1.1 200 ")


@on_linux
@pytest.mark.full
async def test_waiting_connections_are_served_and_later_ones_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as service:
        workers = await service.opened(2)
        waits, late = client_of(service), client_of(service)
        for pid in workers.values():
            os.kill(pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.call, "pid")
            await trio.sleep(0.2)
            service.process.terminate()
            with trio.fail_after(10):
                while await takes_connections(service.port):
                    pass
            for pid in workers.values():
                os.kill(pid, signal.SIGCONT)
            with pytest.raises(OSError, match="all attempts to connect"):
                await late.call("pid")
        assert waits.connections == 1
        assert await service.ended() == 143


async def takes_connections(port: int) -> bool:
    with trio.move_on_after(0.2):
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
        return True
    return False


@pytest.mark.full
async def test_a_request_that_arrived_at_a_stopped_process_is_served(tmp_path: Path) -> None:
    async with running(tmp_path, workers=2) as service:
        await service.opened(2)
        clients = [client_of(service) for _ in range(8)]
        pids = {await client.call("pid") for client in clients}
        service.process.terminate()
        await trio.sleep(0.1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.call, "pid")
            await trio.sleep(1.5)  # an idle connection is closed after a second
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert {client.connections for client in clients} == {1}
        assert await service.ended() == 143
