"""The store in Redis, beyond the contract of stores: a server that stops, restarts or does not answer."""

from __future__ import annotations

import logging
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from math import inf
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
import trustme

from tests.ports import unclaimed_port
from tests.redis_server import RedisServer, cluster, redis_server
from trio_mcp import UsageError
from trio_mcp.stores import RedisStore, Resync, Row, StoreFailed

NOW = 1000.0
ROW = Row("task", "a", b"{}", "ann", NOW)
PASSWORD = "s3cret/&"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def fails(store: RedisStore) -> bool:
    """Return whether a call fails, with a short time limit."""
    with trio.fail_after(5):
        try:
            await store.get("task", "a")
        except StoreFailed:
            return True
    return False


async def works_again(store: RedisStore) -> None:
    with trio.fail_after(10):
        while await fails(store):  # noqa: ASYNC110  # until Redis works again
            await trio.sleep(0.01)


async def test_a_row_and_a_message_in_redis(server: RedisServer) -> None:
    async with RedisStore(server.url) as store, RedisStore(server.url) as other, other.receive(["a"]) as messages:
        assert await store.add(ROW)
        assert await other.get("task", "a") == ROW
        await store.send("a", b"hello")
        with trio.fail_after(5):
            assert await anext(messages) == ("a", b"hello")
        async with RedisStore(server.url, name="else") as third:
            assert await third.get("task", "a") is None


@pytest.mark.skipif(find_spec("coredis") is None, reason="there is no coredis in this environment")
async def test_a_store_without_redis_cannot_be_opened(tmp_path: Path) -> None:
    store = RedisStore(f"unix://:hush@{tmp_path}/none.sock")
    with trio.fail_after(5), pytest.raises(StoreFailed, match=r"/none\.sock does not work: .*No such file") as caught:
        async with store:
            pass
    assert "hush" not in str(caught.value)
    with pytest.raises(UsageError, match="is not open; use it inside `async with`"):
        await store.get("task", "a")


@pytest.mark.full
async def test_a_store_goes_on_when_redis_is_back(server: RedisServer) -> None:
    async with RedisStore(server.url) as store, store.receive(["a"]) as messages:
        await store.add(ROW)
        number, _ = await store.changes(-1)
        server.kill()
        with trio.fail_after(5):
            with pytest.raises(StoreFailed):
                await store.changes(number)
            with pytest.raises(StoreFailed):
                await store.add(attrs.evolve(ROW, key="b"))
            with pytest.raises(StoreFailed):
                async with store.receive(["b"]):
                    pass
        server.start()
        with trio.fail_after(10):
            assert await anext(messages) == Resync()
        assert await store.get("task", "a") == ROW
        assert await store.add(attrs.evolve(ROW, key="b"))
        await store.send("a", b"again")
        with trio.fail_after(5):
            assert await anext(messages) == ("a", b"again")
            assert (await store.changes(number))[1][-1] == ("task", "b")


@pytest.mark.full
async def test_calls_fail_if_redis_does_not_answer(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        await store.add(ROW)
        server.stop()
        failed = []

        async def call(number: int) -> None:
            failed.append(await fails(store))

        async with trio.open_nursery() as nursery:
            for number in range(300):  # more than the store sends at once
                nursery.start_soon(call, number)
        assert failed == [True] * 300
        server.go_on()
        assert not await fails(store)


@pytest.mark.full
async def test_an_answer_that_came_while_the_loop_was_blocked_counts(server: RedisServer) -> None:
    async with RedisStore(server.url) as store, trio.open_nursery() as nursery:
        server.stop()
        for _ in range(300):  # more than the store sends at once
            nursery.start_soon(store.get, "task", "a")
        await trio.testing.wait_all_tasks_blocked()
        server.go_on()
        time.sleep(1.5)  # noqa: ASYNC251  # like a handler that computes


@pytest.mark.full
async def test_a_slow_event_loop_does_not_disconnect_redis(server: RedisServer) -> None:
    async with RedisStore(server.url) as store, trio.open_nursery() as nursery:

        async def compute() -> None:
            while True:
                await trio.lowlevel.checkpoint()
                time.sleep(0.1)  # noqa: ASYNC251  # like many tasks on a busy machine

        assert store._link is not None
        store._link.drop()
        nursery.start_soon(compute)
        async with trio.open_nursery() as calls:
            for _ in range(40):  # more than the store sends at once
                calls.start_soon(store.get, "task", "a")
        nursery.cancel_scope.cancel()


@attrs.define
class RedisProxy:
    """A proxy in front of Redis; `spoil` changes its responses."""

    path: Path
    spoil: Callable[[bytes], bytes] = bytes

    async def run(self, task_status: trio.TaskStatus[str]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self.serve, [listener])
            task_status.started(f"redis://127.0.0.1:{listener.socket.getsockname()[1]}")

    async def serve(self, client: trio.abc.Stream) -> None:
        async with client, await trio.open_unix_socket(self.path) as redis, trio.open_nursery() as nursery:
            nursery.start_soon(self.pump, client, redis, bytes)
            await self.pump(redis, client, lambda data: self.spoil(data))
            nursery.cancel_scope.cancel()

    async def pump(self, source: trio.abc.Stream, sink: trio.abc.Stream, change: Callable[[bytes], bytes]) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while (data := await source.receive_some()) and (changed := change(data)):
                await sink.send_all(changed)


@pytest.mark.full
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda data: b"", id="cut"),
        pytest.param(lambda data: data[:3], id="half an answer"),
        pytest.param(lambda data: b"$x\r\n", id="no RESP"),
        pytest.param(lambda data: b">1\r\n$1\r\nx\r\n", id="pushed"),
    ],
)
async def test_the_store_recovers_from_a_corrupt_response(server: RedisServer, spoil: Callable[[bytes], bytes]) -> None:
    proxy = RedisProxy(server.path)
    async with trio.open_nursery() as nursery:
        url = await nursery.start(proxy.run)
        async with RedisStore(url) as store, RedisStore(server.url) as other, store.receive(["a"]) as messages:
            await store.add(ROW)
            proxy.spoil = spoil
            assert await fails(store)
            await other.send("a", b"lost")  # the response on the connection for messages is corrupt, too
            await trio.sleep(0.1)
            proxy.spoil = bytes
            await works_again(store)
            assert await store.get("task", "a") == ROW
            with trio.fail_after(15):
                while True:
                    await other.send("a", b"again")
                    with trio.move_on_after(0.1):
                        if await anext(messages) == ("a", b"again"):
                            break
        nursery.cancel_scope.cancel()


@pytest.mark.full
async def test_a_connection_that_is_just_being_closed_fails_its_calls(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        assert store._link is not None
        await store._link._connection._write_buffer_in.aclose()
        store._link.tell(b"PING")
        assert await fails(store)
        await works_again(store)


@pytest.mark.full
async def test_cancelled_calls_leave_nothing_behind(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        for _ in range(100):
            with trio.move_on_after(0.0001):
                await store.add(ROW)
        assert await store.get("task", "a") in (ROW, None)
        server.stop()
        for _ in range(1200):  # each call is cancelled so early that it does not notice the silence of Redis
            with trio.move_on_after(0):
                await store.get("task", "a")
            with trio.move_on_after(0.0001):
                await store.get("task", "a")
        link = store._link
        assert link is not None
        assert link._connection.statistics.requests_pending < 1100
        server.go_on()
        await works_again(store)


@pytest.mark.full
async def test_calls_that_are_cancelled_while_they_connect_leave_the_store_usable(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        for _ in range(100):
            assert store._link is not None
            store._link.drop()
            with trio.move_on_after(0):
                await store.get("task", "a")
            with trio.move_on_after(0.0005):
                await store.get("task", "a")
        assert not await fails(store)


@pytest.mark.full
async def test_a_script_that_was_forgotten_is_loaded_again(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        server.ask("SCRIPT FLUSH SYNC")
        await works_again(store)


@pytest.mark.full
async def test_an_error_response_of_redis_is_reported(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        await store.add(ROW)
        server.ask("CONFIG SET maxmemory 1")
        with pytest.raises(StoreFailed, match="OOM"):
            await store.add(attrs.evolve(ROW, key="b"))
        link = store._link
        server.ask("CONFIG SET maxmemory 0")
        assert await store.get("task", "a") == ROW
        assert store._link is link  # the connection is still in use


@pytest.mark.full
async def test_expired_data_disappears_without_a_sweep(server: RedisServer) -> None:
    async with RedisStore(server.url, name="x") as store:
        await store.add(ROW)
        await store.add(attrs.evolve(ROW, key="b", expires=2.0))
        await store.append("s", b"event", owner="ann", expires=2.0, max_bytes=1000)
        prefix = "trio_mcp:1:{x}"
        ttl = {key: server.ask(f"TTL {prefix}:{key}") for key in ("body:4:taska", "body:4:taskb", "events:s")}
        assert ttl == {"body:4:taska": b":-1\r\n", "body:4:taskb": b":3600\r\n", "events:s": b":3600\r\n"}
        server.ask(f"DEL {prefix}:body:4:taskb {prefix}:events:s")  # like Redis does an hour later
        assert await store.get("task", "b") is None
        assert [row.key for row in await store.list("task", "ann", (-inf, ""), 9)] == ["a"]
        assert not await store.replace(attrs.evolve(ROW, key="b"))
        assert (await store.read("s", 0, 9))[0] == 0
        assert await store.add(attrs.evolve(ROW, key="b", expires=3.0), each=2)
        assert await store.append("s", b"event", owner="ann", expires=3.0, max_bytes=1000) == 1
        server.ask(f"DEL {prefix}:body:4:taskb {prefix}:events:s")
        assert await store.sweep(5.0) == 2
        assert await store.delete("task", "a")
        left = server.ask(f"KEYS {prefix}:*").split()[2::2]
        assert sorted(left) == [f"{prefix}:{key}".encode() for key in ("bytes", "clock", "numbers")]
        assert server.ask(f"HGETALL {prefix}:bytes").split() == [b"*2", b"$3", b"all", b"$1", b"0"]


@pytest.mark.full
async def test_the_cluster_node_that_has_the_store_is_found() -> None:
    options = cluster()
    with redis_server(*options) as owner, redis_server(*cluster()) as other:
        owner.ask("CLUSTER ADDSLOTSRANGE 0 16383")
        other.ask(f"CLUSTER MEET 127.0.0.1 {options[3]} {options[5]}")
        # The nodes need some time to agree.
        while not all(b"cluster_state:ok" in each.ask("CLUSTER INFO") for each in (owner, other)):  # noqa: ASYNC110
            await trio.sleep(0.01)
        async with RedisStore(other.url) as store, RedisStore(owner.url) as direct, store.receive(["a"]) as messages:
            assert await store.add(ROW)
            assert await direct.get("task", "a") == ROW
            assert store._link is not None
            store._link.drop()
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(store.get, "task", "a")
            await direct.send("a", b"hello")
            with trio.fail_after(5):
                assert await anext(messages) == ("a", b"hello")


@pytest.mark.full
async def test_tls_and_passwords(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    authority, port = trustme.CA(), unclaimed_port()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    options = ["--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "no"]
    options += ["--tls-key-file", str(tmp_path / "key"), "--tls-cert-file", str(tmp_path / "cert")]
    options += ["--tls-ca-cert-file", str(tmp_path / "ca")]
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    url = f"rediss://mcp:s3cret%2F%26@localhost:{port}"
    with redis_server(*options) as server:
        server.ask(f"ACL SETUSER mcp on >{PASSWORD} ~trio_mcp:* &trio_mcp:* +@all")
        async with RedisStore(url, ssl_context=trusted) as store, store.receive(["a"]):
            assert await store.add(ROW)
            assert repr(store) == f"RedisStore('rediss://localhost:{port}/0')"
        with pytest.raises(StoreFailed) as caught:
            async with RedisStore(url):  # this machine does not trust the authority of the certificate
                pass
        errors = [str(caught.value), repr(caught.value.__cause__)]
        with pytest.raises(StoreFailed) as caught:
            async with RedisStore(url.replace("%26", "%27"), ssl_context=trusted):
                pass
        errors += [str(caught.value), repr(caught.value.__cause__)]
        assert "certificate verify failed" in errors[0]
        assert "invalid username-password pair" in errors[2]
    assert not [text for text in (*errors, caplog.text, repr(store)) if "s3cret" in text]


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://localhost", "redis://localhost:6379/0"),
        ("redis://ann:pw@10.0.0.1:7000/3", "redis://10.0.0.1:7000/3"),
        ("rediss://:pw@[::1]/", "rediss://[::1]:6379/0"),
        ("unix:///run/redis%20x.sock?db=2", "unix:///run/redis x.sock"),
    ],
)
def test_a_store_shows_where_it_is(url: str, where: str) -> None:
    pytest.importorskip("coredis")
    assert repr(RedisStore(url)) == f"RedisStore({where!r})"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://:hush@localhost", "no scheme 'http'"),
        ("redis://:hush@localhost:port", "needs a URL"),
        (b"redis://:hush@localhost", "needs a URL"),
        ("redis://:hush@localhost/hush", "database number"),
        ("redis://:hush@localhost/0?timeout=1", "database number"),
        ("tasks.db", "no scheme ''"),
    ],
)
def test_a_bad_url_is_refused_and_not_repeated(url: str, why: str) -> None:
    pytest.importorskip("coredis")
    with pytest.raises(UsageError, match=why) as caught:
        RedisStore(url)
    assert "hush" not in str(caught.value)


def test_options_are_checked() -> None:
    pytest.importorskip("coredis")
    with pytest.raises(UsageError, match="nothing is encrypted"):
        RedisStore("redis://localhost", ssl_context=ssl.create_default_context())
    with pytest.raises(UsageError, match="without braces"):
        RedisStore("redis://localhost", name="{x}")


def test_a_store_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio_mcp.stores.redis_link", None)
    with pytest.raises(UsageError, match=r"pip install 'trio_mcp\[redis\]'"):
        RedisStore("redis://localhost")


async def test_text_that_cannot_be_sent_fails_only_its_call(server: RedisServer) -> None:
    added: list[bool] = []
    async with RedisStore(server.url) as store, trio.open_nursery() as nursery:

        async def add(key: str) -> None:
            added.append(await store.add(attrs.evolve(ROW, key=key)))

        async def refused() -> None:
            with pytest.raises(UnicodeEncodeError):
                await store.add(attrs.evolve(ROW, key="half a pair", owner="\ud800"))

        for number in range(3):
            nursery.start_soon(add, str(number))
            nursery.start_soon(refused)
    assert added == [True] * 3
