"""Stores that keep tokens longer than the process: only the owner can read them, and no entry is lost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.requirements import req
from trio_mcp import UsageError
from trio_mcp.oauth import FileTokenStore, MemoryTokenStore, TokenStore

URL, OTHER = "https://mcp.example/mcp", "https://other.example/mcp"
ENTRY = {"form": 1, "secret": "Geheim"}


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def text_of(path: Path) -> str:
    return path.read_text(encoding="latin-1")


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text, encoding="latin-1")
    path.chmod(mode)


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, file: Path) -> TokenStore:
    return MemoryTokenStore() if request.param == "memory" else FileTokenStore(file)


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


async def test_a_store_returns_the_last_value_of_a_key(store: TokenStore) -> None:
    assert await store.get(URL) is None
    await store.set(URL, {"a": 1})
    await store.set(OTHER, {"b": 2})
    await store.set(URL, ENTRY)
    assert (await store.get(URL), await store.get(OTHER)) == (ENTRY, {"b": 2})
    await store.set(URL, None)
    await store.set(URL, None)
    assert (await store.get(URL), await store.get(OTHER)) == (None, {"b": 2})
    assert "Geheim" not in repr(store)


@req("auth-22")
async def test_only_the_owner_can_read_the_file_with_any_umask(tmp_path: Path, umask: int) -> None:
    # With the umask 0o777 a new folder could not be opened, so this case uses an existing one.
    folder = tmp_path if umask == 0o777 else tmp_path / "brand" / "new"
    store = FileTokenStore(folder / "tokens.json")
    for _ in range(2):
        await store.set(URL, ENTRY)
        assert names_in(folder) == ["tokens.json", "tokens.json.lock"]
        assert mode_of(folder / "tokens.json") == 0o600
        assert mode_of(folder) == 0o700
        assert umask == 0o777 or mode_of(folder.parent) == 0o700
    assert await store.get(URL) == ENTRY


async def test_a_symbolic_link_is_followed(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    await FileTokenStore(link).set(URL, ENTRY)
    assert link.is_symlink()
    assert await FileTokenStore(file).get(URL) == ENTRY


async def test_a_tilde_in_the_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    await FileTokenStore("~/config/tokens").set(URL, ENTRY)
    assert (tmp_path / "config" / "tokens").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"servers": {}}', '{"form": 2, "servers": {}}', '{"form": 1}', "[" * 100_000, "\xff"],
)
async def test_an_unreadable_file_is_an_error_and_is_not_changed(file: Path, text: str) -> None:
    write(file, text)
    store = FileTokenStore(file)
    with pytest.raises(UsageError, match=r"tokens\.json is not a token store: .*repair it, or delete it"):
        await store.get(URL)
    with pytest.raises(UsageError, match="is not a token store"):
        await store.set(URL, ENTRY)
    assert text_of(file) == text


async def test_an_invalid_entry_is_an_error_that_does_not_show_its_value(file: Path) -> None:
    write(file, json.dumps({"form": 1, "servers": {URL: "Geheim"}}))
    with pytest.raises(UsageError, match="an entry is not a JSON object") as failed:
        await FileTokenStore(file).get(URL)
    assert "Geheim" not in str(failed.value)


async def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    store = FileTokenStore(tmp_path / "file" / "tokens")
    for attempt in (store.get(URL), store.set(URL, ENTRY)):
        with pytest.raises(UsageError, match=r"cannot store tokens in .*(Not a directory|File exists)"):
            await attempt
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        await FileTokenStore(tmp_path / "folder").get(URL)


async def test_a_killed_writer_does_not_damage_the_file(file: Path, tmp_path: Path) -> None:
    store = FileTokenStore(file)
    await store.set(URL, ENTRY)
    write(tmp_path / "tokens.json.new", "half")
    assert await store.get(URL) == ENTRY
    await store.set(OTHER, ENTRY)
    assert names_in(tmp_path) == ["tokens.json", "tokens.json.lock"]
    # A symbolic link in the place of the temporary file is not followed.
    write(tmp_path / "foreign", "")
    (tmp_path / "tokens.json.new").symlink_to(tmp_path / "foreign")
    await store.set(OTHER, {})
    assert text_of(tmp_path / "foreign") == ""


async def test_waiting_for_a_locked_store_ends_with_an_error(
    file: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise BlockingIOError

    async def run_at_once(function: object, *_: object) -> object:
        await trio.lowlevel.checkpoint()
        assert callable(function)
        return function()

    monkeypatch.setattr("fcntl.flock", busy)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_at_once)
    with pytest.raises(UsageError, match=r"another process has locked .* for more than 10 seconds"):
        await FileTokenStore(file).set(URL, ENTRY)
    assert "tokens.json" not in names_in(file.parent)


WRITER = """
import sys, trio
from trio_mcp.oauth import FileTokenStore

async def main(path, writer):
    store = FileTokenStore(path)
    for number in range(20):
        await store.set(f"https://{writer}.example/{number}", {"writer": writer})

trio.run(main, *sys.argv[1:])
"""


async def test_processes_do_not_lose_each_others_entries(file: Path) -> None:
    store, names = FileTokenStore(file), ("one", "two", "three")
    async with trio.open_nursery() as nursery:
        for writer in names:
            nursery.start_soon(trio.run_process, [sys.executable, "-c", WRITER, str(file), writer])
        while len(nursery.child_tasks) == 3:  # a read between the writes gets a complete state
            await store.get(URL)
    for writer in names:
        for number in range(20):
            assert await store.get(f"https://{writer}.example/{number}") == {"writer": writer}


async def test_tasks_do_not_lose_each_others_entries(file: Path) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(FileTokenStore(file).set, f"https://{number}.example", ENTRY)
    assert len(json.loads(text_of(file))["servers"]) == 20


async def test_a_cancelled_write_is_complete_or_not_made(file: Path) -> None:
    store = FileTokenStore(file)
    with trio.CancelScope() as scope:
        scope.cancel()
        await store.set(URL, ENTRY)
    assert await store.get(URL) in (None, ENTRY)
    await store.set(OTHER, ENTRY)
    assert await store.get(OTHER) == ENTRY
