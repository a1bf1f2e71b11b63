"""Where what is known of MCP servers' authorization outlives the process: registrations and tokens, by server.

An entry is a JSON object, which `core.auth_records` makes and reads.  It is full of secrets, in the clear: a store
keeps it from other users of the machine (auth-22), and no repr or error of it shows any.  A file that others can read
is refused: to tighten its mode in silence would hide that they may have read it.

The file is replaced as a whole, by a name that nobody else has, so whoever reads it sees all of one state.  Whoever
writes it holds a lock beside it from before the reading, so two processes do not lose each other's entries; it lies
in a file of its own, for the one with the entries is another after each writing.  What cannot be read is never
overwritten: that would be the end of every login in it.
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
from trio_mcp.core.jsonrpc import Json, JsonObject

__all__ = ["FileTokenStore", "MemoryTokenStore", "TokenStore"]

T = TypeVar("T")

_FORM = 1  # of the file; another number is from another version of this module
_LOCKED = 10.0  # seconds for which another process may hold the lock, who writes some KiB meanwhile
_AGAIN = 0.02  # seconds between two attempts to get it
_OTHERS = stat.S_IRWXG | stat.S_IRWXO  # who can write the file could also plant tokens in it


class TokenStore(Protocol):
    """What `OAuth` keeps registrations and tokens in.

    Both methods may raise anything, and may be cancelled.  An entry holds secrets: keep it from others.
    """

    async def get(self, server_url: str) -> JsonObject | None:
        """What was last set for the MCP server at this URL; None if nothing was."""

    async def set(self, server_url: str, entry: JsonObject | None) -> None:
        """Keep this in place of what was set before; None forgets it, and the user has to allow everything again."""


class MemoryTokenStore:
    """For as long as the process."""

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
    """A file that only its owner can read, of JSON; several processes may use the same.

    `path` may begin with ``~``.  Folders that are missing are made, likewise for the owner alone; a symbolic link is
    followed.  One file belongs to one application.  Both methods raise `UsageError` for a file that cannot be
    read or written, for one with something else in it, and for one that other users can read or write: it then is left
    as it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(os.path.realpath(os.path.expanduser(path)))

    def __repr__(self) -> str:
        return f"<FileTokenStore {self._path}>"

    async def get(self, server_url: str) -> JsonObject | None:
        entry = (await self._in_a_thread(self._read)).get(server_url)
        if entry is not None and not isinstance(entry, dict):
            raise self._damaged("an entry is no object")
        return entry

    async def set(self, server_url: str, entry: JsonObject | None) -> None:
        with trio.move_on_after(_LOCKED):
            while True:
                try:
                    return await self._in_a_thread(lambda: self._update(server_url, entry))
                except BlockingIOError:
                    await trio.sleep(_AGAIN)
        raise UsageError(f"{self._path} is locked by another process for {_LOCKED:g} seconds; has it stopped?")

    async def _in_a_thread(self, deed: Callable[[], T]) -> T:
        # Not to be abandoned: who is cancelled has either written or has not.
        try:
            return await trio.to_thread.run_sync(deed)
        except BlockingIOError:
            raise
        except OSError as error:
            raise UsageError(f"tokens cannot be kept in {self._path}: {error.strerror or error}") from error

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
                f"{self._path} must be open to its owner only, and has mode {mode:04o}; "
                f"chmod 600 {shlex.quote(str(self._path))}, or, if others may have read it, delete it and have "
                "everything allowed again"
            )
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            raise self._damaged("it is no JSON") from None  # what was read may be secret
        servers = said.get("servers") if isinstance(said, dict) and said.get("form") == _FORM else None
        if not isinstance(servers, dict):
            raise self._damaged("it is of another kind")
        return servers

    def _update(self, server_url: str, entry: JsonObject | None) -> None:
        """Raises BlockingIOError while somebody else writes."""
        for folder in reversed(self._path.parents):  # mkdir(parents=True) would leave all but the last to the umask
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
            # What a link leads to would be created, or locked, in the name of our user.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(f"{path} must be a plain file, and is a symbolic link; delete it") from None

    def _replace(self, data: bytes) -> None:
        draft = f"{self._path}.new"  # nobody else writes one: we have the lock
        if os.path.lexists(draft):
            os.unlink(draft)  # of a process that was killed; whatever it is, nothing is written to it
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask has made of it
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._path)
        # Until its folder is on the disk too, a crash of the machine may bring the old file back, whose refresh token
        # is used up.  Some file systems cannot do that, and some folders cannot be read: then the file is in its place
        # all the same.
        with suppress(OSError):
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _damaged(self, why: str) -> UsageError:
        return UsageError(
            f"{self._path} is no store of tokens: {why}; mend it, or delete it and have everything allowed again"
        )


def _put(entries: dict[str, Json], server_url: str, entry: JsonObject | None) -> None:
    if entry is None:
        entries.pop(server_url, None)
    else:
        entries[server_url] = entry
