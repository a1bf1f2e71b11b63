"""Skills of a server: directories with a SKILL.md, read from the disk whenever a client asks (SEP-2640).

`Server.skills(path)` calls `add_skills`.  All directories below the path with a `SKILL.md` are skills, also nested
ones; `path` may be a skill itself.  Each file is a resource under `skill://`, and clients read it by `resources/read`.

Files are read in worker threads.  A file is hashed again only if its size or its time has changed.  Hidden files, and
links that lead out of the directory, are not part of a skill.  The filter of the server decides about the SKILL.md of
each skill, and so about the skill.
"""

from __future__ import annotations

import logging
import mimetypes
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import trio

from trio_mcp.core.caching import CacheHints, paginate
from trio_mcp.core.content import BlobResourceContents, Resource, ResourceContents, TextResourceContents
from trio_mcp.core.errors import INVALID_PARAMS, RequestError, ResourceNotFound, UsageError, shown
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.models import ResourceTemplate
from trio_mcp.extensions.skills.entries import (
    DIRECTORY,
    MAX_BYTES,
    MAX_FILES,
    SKILL_MD,
    SKILLS,
    Skill,
    SkillFile,
    check_skill_name,
    digest_of,
)
from trio_mcp.extensions.skills.frontmatter import BadFrontmatter, read_frontmatter
from trio_mcp.server.context import Context

if TYPE_CHECKING:
    from trio_mcp.server.server import Server

__all__ = ["SkillLibrary", "add_skills"]

_log = logging.getLogger("trio_mcp")
_PAGE = 50  # skills on one page: an entry with 512 files has about 80 KB
_SCHEME = "skill://"
_SINCE = "2026-07-28"  # results have cache hints

_libraries: WeakKeyDictionary[Server, SkillLibrary] = WeakKeyDictionary()


def add_skills(server: Server, path: str | os.PathLike[str], cache: CacheHints | None) -> None:
    """Serve the skills below a directory; see `Server.skills`."""
    library = _libraries.get(server)
    if library is None:
        library = SkillLibrary()
        library.register(server)
        _libraries[server] = library
    library.add(server, Path(path), cache)


class SkillLibrary:
    """The directories with skills of one server."""

    def __init__(self) -> None:
        self._roots: list[tuple[Path, str]] = []  # directory, and its path in URIs
        self._cache = CacheHints()
        self._digests: dict[Path, tuple[int, int, str]] = {}  # time, size and digest

    def register(self, server: Server) -> None:
        with server._extended().whole():
            server.extension(SKILLS, settings={"directoryRead": True})
            # A client need not declare the extension to use these.
            server.method("skills/list")(self.list_skills)
            server.method("skills/get")(self.get_skill)
            server.method("resources/directory/read")(self.read_directory)
        server.add_template(
            ResourceTemplate(name="skill files", uri_template="skill://{+path}", description="The files of skills"),
            self.read_file,
        )

    def add(self, server: Server, path: Path, cache: CacheHints | None) -> None:
        top = path.resolve()
        if not top.is_dir():
            raise UsageError(f"skills needs a directory, got {os.fspath(path)!r}")
        prefix = top.name if (top / SKILL_MD).is_file() else ""
        found = [self._skill(*each) for each in self._directories(top, prefix)]
        if not found:
            raise UsageError(f"there is no {SKILL_MD} in {os.fspath(path)!r} or a directory below it")
        served = {each.uri for each in self._skills()}
        for skill in found:
            if skill.uri in served:
                raise UsageError(f"the skill {skill.uri} is served already; give another directory")
        self._roots.append((top, prefix))
        if cache is not None:
            self._cache = cache
        for skill in found:
            described = Resource(
                uri=skill.uri, name=skill.name, description=skill.description, mime_type="text/markdown"
            )
            server.add_resource(described, partial(self.read_file, variables={}))

    # Methods.

    async def list_skills(self, ctx: Context, cursor: str | None = None) -> JsonObject:
        every = await trio.to_thread.run_sync(self._skills)
        visible = [each for each in every if ctx.may_read(each.uri)]
        skills, following = paginate(visible, cursor, _PAGE, lambda skill: skill.uri)
        result: JsonObject = {"skills": [each.to_json() for each in skills], **self._hints(ctx)}
        return result if following is None else {**result, "nextCursor": following}

    async def get_skill(self, uri: str, ctx: Context) -> JsonObject:
        for skill in await trio.to_thread.run_sync(self._skills):
            if skill.uri == uri and ctx.may_read(uri):
                return {"skill": skill.to_json(), **self._hints(ctx)}
        raise RequestError(INVALID_PARAMS, f"no skill is served at {shown(uri)}")

    async def read_directory(self, uri: str, ctx: Context, cursor: str | None = None) -> JsonObject:
        skills = [each for each in await trio.to_thread.run_sync(self._skills) if ctx.may_read(each.uri)]
        prefix, children = f"{uri}/", dict[str, JsonObject]()
        for file in sorted(each for skill in skills for each in skill.files or ()):
            if file.startswith(prefix):
                name, _, below = file.removeprefix(prefix).partition("/")
                child, shown_name = prefix + name, unquote(name)
                kind = DIRECTORY if below else _mime_type(PurePath(shown_name))
                children[child] = {"uri": child, "name": shown_name, "mimeType": kind}
        if not children:
            raise RequestError(INVALID_PARAMS, f"{shown(uri)} is not a directory of a skill")
        page, following = paginate(list(children.values()), cursor, MAX_FILES, lambda child: str(child["uri"]))
        return {"resources": page} if following is None else {"resources": page, "nextCursor": following}

    async def read_file(self, ctx: Context, uri: str, variables: dict[str, str]) -> ResourceContents:
        path, skills = await trio.to_thread.run_sync(self._find, uri)
        if not any(map(ctx.may_read, skills)):
            raise ResourceNotFound(uri)
        return _contents(uri, await trio.to_thread.run_sync(path.read_bytes), _mime_type(path))

    def _hints(self, ctx: Context) -> JsonObject:
        return self._cache.members() if ctx.revision >= _SINCE else {}

    # Files.

    def _skills(self) -> list[Skill]:
        """Return all skills as they are now.  One that has become invalid is left out, and logged."""
        found: list[Skill] = []
        for top, prefix in self._roots:
            for each in self._directories(top, prefix):
                try:
                    found.append(self._skill(*each))
                except (UsageError, OSError) as error:
                    _log.warning("a skill is left out: %s", error)
        return found

    def _directories(self, top: Path, prefix: str) -> Iterator[tuple[Path, str]]:
        """Yield each directory with a SKILL.md, and its path in URIs."""
        for path, uri in sorted(_files_below(top, prefix), key=lambda each: each[1]):
            if path.name == SKILL_MD and "/" in uri:
                yield path.parent, uri.removesuffix(f"/{SKILL_MD}")

    def _skill(self, directory: Path, uri: str) -> Skill:
        root = f"{_SCHEME}{uri}"
        files = {f"{_SCHEME}{each}": path for path, each in _files_below(directory, uri)}
        try:
            frontmatter = read_frontmatter(files[f"{root}/{SKILL_MD}"].read_bytes().decode())
        except (BadFrontmatter, UnicodeDecodeError) as error:
            raise UsageError(f"{directory / SKILL_MD}: {error}") from None
        check_skill_name(frontmatter.get("name"), frontmatter.get("description"), uri.rpartition("/")[2])
        size = sum(path.stat().st_size for path in files.values())
        if len(files) > MAX_FILES or size > MAX_BYTES:  # asked before they are read
            raise UsageError(
                f"the skill {frontmatter['name']!r} has {len(files)} files and {size} bytes; "
                f"hosts support {MAX_FILES} files and {MAX_BYTES} bytes"
            )
        entries = {each: self._entry(each, path) for each, path in sorted(files.items())}
        return Skill(f"{root}/{SKILL_MD}", frontmatter, entries)

    def _entry(self, uri: str, path: Path) -> SkillFile:
        status = path.stat()
        known = self._digests.get(path)
        if known is None or known[:2] != (status.st_mtime_ns, status.st_size):
            content = path.read_bytes()
            known = self._digests[path] = status.st_mtime_ns, len(content), digest_of(content)
        return SkillFile(uri, known[2], known[1])

    def _find(self, uri: str) -> tuple[Path, list[str]]:
        """Return the file with this URI, and the URIs of the skills that it belongs to."""
        for top, prefix in self._roots:
            start = f"{_SCHEME}{prefix}/" if prefix else _SCHEME
            parts = [unquote(part) for part in uri.removeprefix(start).split("/")]
            path = top.joinpath(*parts)
            if not uri.startswith(start) or any(part.startswith(".") or "/" in part or not part for part in parts):
                continue
            if quote("/".join(parts)) != uri.removeprefix(start) or not _belongs(path, top):
                continue
            skills = [
                f"{start}{quote(f'{folder.relative_to(top).as_posix()}/').removeprefix('./')}{SKILL_MD}"
                for folder in path.parents
                if folder.is_relative_to(top) and (folder / SKILL_MD).is_file() and (prefix or folder != top)
            ]
            if skills:
                return path, skills
        return Path(), []


def _files_below(top: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Yield all files below a directory that belong to skills, with their paths in URIs."""
    for folder, directories, files in os.walk(top):
        directories[:] = [each for each in directories if not each.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and _belongs(path, top):
                parts = [*([prefix] if prefix else []), *(quote(part) for part in path.relative_to(top).parts)]
                yield path, "/".join(parts)


def _belongs(path: Path, top: Path) -> bool:
    """Whether this is a file, and no link that leads out of the directory.  Links to directories are not followed."""
    try:
        return path.is_file() and path.parent.resolve() == path.parent and path.resolve().is_relative_to(top)
    except OSError:  # the name is too long
        return False


def _mime_type(path: PurePath) -> str:
    if path.suffix == ".md":
        return "text/markdown"
    return mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def _contents(uri: str, content: bytes, mime_type: str) -> ResourceContents:
    """Return the contents.  Text must have the same bytes again when a host encodes it, because it is hashed."""
    options: dict[str, Any] = {"mime_type": mime_type}
    try:
        return TextResourceContents(uri, text=content.decode(), **options)
    except UnicodeDecodeError:
        return BlobResourceContents(uri, blob=content, **options)
