"""Stores for registrations and tokens of clients, by MCP server.

An entry is a JSON object; `core.oauth.records` writes and reads it.  It contains secrets in the clear, so a store hides
it from other users of the machine (auth-22), and no repr or error message shows any of it.  A file that other users can
read is refused: a silent change of its mode would hide that they may have read it.

A write replaces the file as a whole, by renaming a draft, so each reader sees one complete state.  A writer holds a
lock from before it reads until it has written, so two processes do not lose each other's entries.  The lock is on a
file of its own, because each write replaces the file with the entries.  A file that cannot be read is never
overwritten: that would lose every login in it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Json, JsonObject

__all__ = ["FileTokenStore", "MemoryTokenStore", "TokenStore"]

T = TypeVar("T")

_FORM = 1  # of the file; another number means another version of this module
_LOCK_SECONDS = 10.0  # for which another process may hold the lock; it writes some KiB in that time
_RETRY_SECONDS = 0.02  # between two attempts to get the lock
_OTHERS = stat.S_IRWXG | stat.S_IRWXO  # a user who can write the file could plant tokens in it


class TokenStore(Protocol):
    """A place where `OAuth` stores registrations and tokens.  Write a class with these two methods for your own.

    Both methods may raise any exception, and may be cancelled.  An entry contains secrets: hide it from other users.
    """

    async def get(self, server_url: str) -> JsonObject | None:
        """Return the entry last set for the MCP server at this URL, or None if there is none."""

    async def set(self, server_url: str, entry: JsonObject | None) -> None:
        """Replace the entry; None deletes it, and then the user must allow access again."""


class MemoryTokenStore:
    """A token store in memory, lost when the process ends."""

    def __init__(self) -> None:
        self._entries: dict[str, JsonObject] = {}

    def __repr__(self) -> str:
        return f"<MemoryTokenStore of {len(self._entries)} servers>"

    async def get(self, server_url: str) -> JsonObject | None:
        await trio.lowlevel.checkpoint()
        return self._entries.get(server_url)

    async def set(self, server_url: str, entry: JsonObject | None) -> None:
        await trio.lowlevel.checkpoint()
        _put(self._entries, server_url, entry)


class FileTokenStore:
    """A token store in a JSON file that only its owner can read.  Several processes may use the same file.

    `path` may begin with ``~``.  Missing folders are created, also readable for the owner only.  A symbolic link is
    followed.  One file belongs to one application.  Both methods raise `UsageError` if the file cannot be read or
    written, if it is not a token store, and if other users can read or write it.  The file is not changed then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.realpath(os.path.expanduser(path)))

    def __repr__(self) -> str:
        return f"<FileTokenStore {self._path}>"

    async def get(self, server_url: str) -> JsonObject | None:
        entry = (await self._in_a_thread(self._read)).get(server_url)
        if entry is not None and not isinstance(entry, dict):
            raise self._damaged("an entry is not a JSON object")
        return entry

    async def set(self, server_url: str, entry: JsonObject | None) -> None:
        with trio.move_on_after(_LOCK_SECONDS):
            while True:
                try:
                    return await self._in_a_thread(lambda: self._update(server_url, entry))
                except BlockingIOError:
                    await trio.sleep(_RETRY_SECONDS)
        raise UsageError(
            f"another process has locked {self._path} for more than {_LOCK_SECONDS:g} seconds; does it hang?"
        )

    async def _in_a_thread(self, action: Callable[[], T]) -> T:
        # The thread is not abandoned, so that a cancelled write has either happened or not.
        try:
            return await trio.to_thread.run_sync(action)
        except BlockingIOError:
            raise
        except OSError as error:
            raise UsageError(f"cannot store tokens in {self._path}: {error.strerror or error}") from error

    # In a thread.

    def _read(self) -> dict[str, Json]:
        try:
            with open(self._path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read()
        except FileNotFoundError:
            return {}
        if mode & _OTHERS:
            raise UsageError(
                f"only the owner may have access to {self._path}, and its mode is {mode:04o}; "
                f"chmod 600 {shlex.quote(str(self._path))}, or, if other users may have read it, delete it and allow "
                "access again"
            )
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise self._damaged("it is not JSON") from None  # the text of the error may repeat secrets
        servers = content.get("servers") if isinstance(content, dict) and content.get("form") == _FORM else None
        if not isinstance(servers, dict):
            raise self._damaged("its form is unknown")
        return servers

    def _update(self, server_url: str, entry: JsonObject | None) -> None:
        """Raises BlockingIOError while another task or process holds the lock."""
        for folder in reversed(self._path.parents):  # mkdir(parents=True) uses the mode only for the last folder
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        lock = self._lock_file()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entries = self._read()
            _put(entries, server_url, entry)
            self._replace(json.dumps({"form": _FORM, "servers": entries}, indent=1).encode())
        finally:
            os.close(lock)

    def _lock_file(self) -> int:
        path = f"{self._path}.lock"
        try:
            # Through a symbolic link, any file could be created or locked with the rights of our user.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(f"{path} must be a plain file, and is a symbolic link; delete it") from None

    def _replace(self, data: bytes) -> None:
        draft = f"{self._path}.new"  # no other process writes a draft: we have the lock
        if os.path.lexists(draft):
            os.unlink(draft)  # left by a process that was killed; never written to, because it may be a link
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # the umask may have removed bits
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._path)
        # Until the folder is on the disk too, a crash of the machine may restore the old file, whose refresh token is
        # used up.  Some file systems cannot sync a folder, and some folders cannot be read: the new file is in place
        # even then.
        with suppress(OSError):
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _damaged(self, why: str) -> UsageError:
        return UsageError(f"{self._path} is not a token store: {why}; repair it, or delete it and allow access again")


def _put(entries: dict[str, Json], server_url: str, entry: JsonObject | None) -> None:
    if entry is None:
        entries.pop(server_url, None)
    else:
        entries[server_url] = entry
