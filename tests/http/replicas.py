"""Replicas of a server: several servers in one process that share a store; each has its own endpoint.

async with replicas() as group:
    await group.web.call(...)       # each request goes to the next replica
    await group.webs[1].call(...)   # goes to the second replica
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from tests.http.client import HttpClient
from tests.http.scripted_server import ScriptedServer
from tests.http.served import MemoryListener
from trio_mcp import Server
from trio_mcp.core.http import LOOPBACK_HOSTS
from trio_mcp.server.http import serve_http
from trio_mcp.stores import MemoryStore
from trio_mcp.stores import rows as clock  # the test replaces its clock

__all__ = ["KEYS", "ReplicaGroup", "make_scripted", "replicas"]

KEYS = [bytes(32)]


@attrs.define
class ReplicaGroup:
    """The replicas of a server."""

    servers: list[Any]
    webs: list[HttpClient]
    """A client of each replica."""
    web: HttpClient
    """A client that sends each request to the next replica."""
    store: Any
    scopes: list[trio.CancelScope]

    async def crash(self, number: int) -> None:
        """End a replica without a further write: its rows and its lease stay in the store."""
        scripted = self.servers[number]
        getattr(scripted, "server", scripted)._store.cut()
        self.scopes[number].cancel()
        await trio.testing.wait_all_tasks_blocked()


class _CuttableStore:
    """The store of one replica; after `cut` the replica writes to it no more."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._cut = False

    def cut(self) -> None:
        self._cut = True

    async def __aenter__(self) -> _CuttableStore:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._store.__aexit__(*exc_info)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not self._cut or name == "receive":
            return found
        return partial(_empty_result, name)


async def _empty_result(name: str, *args: Any, **options: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return {"read": (0, ()), "list": (), "claim": (), "changes": (0, ())}.get(name)


def make_scripted(store: Any) -> ScriptedServer:
    return ScriptedServer(store=store, state_keys=KEYS)


@contextlib.asynccontextmanager
async def replicas(
    make: Callable[[Any], Any] = make_scripted,
    *,
    number: int = 3,
    store: Any = None,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> AsyncIterator[ReplicaGroup]:
    """Replicas that `make` creates with this store; `options` are those of `serve_http`.

    `make` returns a `Server` or a `ScriptedServer`."""
    monkeypatch.setattr(clock, "wall", trio.current_time)  # leases end by the mock clock
    store = MemoryStore() if store is None else store
    options.setdefault("allowed_hosts", LOOPBACK_HOSTS)
    servers = [make(_CuttableStore(store)) for _ in range(number)]
    listeners = [MemoryListener() for _ in servers]
    scopes = [trio.CancelScope() for _ in servers]
    turn = 0

    async def connect() -> trio.abc.Stream:
        nonlocal turn
        turn += 1
        return await listeners[turn % number].connect()

    async def serve(server: Server, index: int, task_status: trio.TaskStatus[Any]) -> None:
        with scopes[index]:
            await serve_http(server, listeners=[listeners[index]], task_status=task_status, **options)

    webs = [HttpClient(each.connect) for each in listeners]
    alternating = HttpClient(connect, headers={"Connection": "close"})
    async with trio.open_nursery() as nursery:
        for index, scripted in enumerate(servers):
            await nursery.start(serve, getattr(scripted, "server", scripted), index)
        async with contextlib.AsyncExitStack() as stack:
            for web in (*webs, alternating):
                await stack.enter_async_context(contextlib.aclosing(web))
            yield ReplicaGroup(servers, webs, alternating, store, scopes)
        nursery.cancel_scope.cancel()
