"""Skills as data: the entry of a skill, its rules, and the check of content against it (SEP-2640).

A skill is a directory with a `SKILL.md`.  Its entry has the frontmatter of that file and a list of all files, each with
its digest and size.  A host builds its list of skills from entries alone, and checks each file when it reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

import attrs

from trio_mcp.core.errors import RemoteProtocolError, UsageError, shown
from trio_mcp.core.messages import JsonObject
from trio_mcp.extensions.skills.frontmatter import BadFrontmatter, read_frontmatter

__all__ = [
    "DIRECTORY", "MAX_BYTES", "MAX_FILES", "SKILLS", "SKILL_MD", "Skill", "SkillFile", "SkillNotVerified",
    "check_skill_name", "digest_of", "read_skill",
]  # fmt: skip

SKILLS: Final = "io.modelcontextprotocol/skills"
SKILL_MD: Final = "SKILL.md"
DIRECTORY: Final = "inode/directory"
MAX_FILES: Final = 512
"""Files of one skill that every host must support; servers should not serve more."""
MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all files of one skill, by the same rule."""

_NAME = re.compile(r"(?!.*--)[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class SkillNotVerified(RemoteProtocolError):
    """Content of a skill is not what its entry says.  Get the entry again; the user must approve the skill again."""


@attrs.frozen
class SkillFile:
    """One file of a skill, with the SHA-256 digest and the number of its bytes."""

    uri: str
    digest: str
    size: int


@attrs.frozen
class Skill:
    """The entry of one skill.

    `uri` is that of its `SKILL.md`.  `files` are all its files, or None for a skill whose content is made when it is
    read ("dynamic"), so that it has no digests.  A name is no identity: two skills may share it.
    """

    uri: str
    frontmatter: JsonObject
    files: Mapping[str, SkillFile] | None

    @property
    def name(self) -> str:
        """The name in the frontmatter."""
        return str(self.frontmatter["name"])

    @property
    def description(self) -> str:
        """The description in the frontmatter."""
        return str(self.frontmatter["description"])

    @property
    def root(self) -> str:
        """The URI of the skill's directory."""
        return self.uri.removesuffix(f"/{SKILL_MD}")

    def file_uri(self, path: str) -> str:
        """Return the URI of a file, by its path relative to the directory of the skill, or its URI.

        Raises `SkillNotVerified` for a file that the entry does not list.
        """
        uri = path if "://" in path else f"{self.root}/{path}"
        if self.files is None:
            if not uri.startswith(f"{self.root}/") or "/../" in f"{uri}/":
                raise SkillNotVerified(f"{shown(uri)} is not in the directory of the skill {shown(self.uri)}")
        elif uri not in self.files:
            raise SkillNotVerified(f"the entry of the skill {shown(self.uri)} has no file {shown(uri)}")
        return uri

    def check(self, uri: str, content: bytes) -> None:
        """Check the bytes of a file, and of `SKILL.md` its frontmatter.  Raises `SkillNotVerified`."""
        if self.files is not None:
            file = self.files[uri]
            if len(content) != file.size:
                raise SkillNotVerified(f"{shown(uri)} has {len(content)} bytes, its entry says {file.size}")
            if digest_of(content) != file.digest:
                raise SkillNotVerified(f"the content of {shown(uri)} does not have the digest of its entry")
        if uri == self.uri:
            try:
                frontmatter = read_frontmatter(content.decode())
            except (BadFrontmatter, UnicodeDecodeError) as error:
                raise SkillNotVerified(f"the frontmatter of {shown(uri)} cannot be read: {error}") from None
            if not _equal(frontmatter, self.frontmatter):
                raise SkillNotVerified(f"the frontmatter of {shown(uri)} is not that of its entry")

    def to_json(self) -> JsonObject:
        """Return the entry for the wire."""
        files: Any = "dynamic"
        if self.files is not None:
            files = [{"uri": each.uri, "digest": each.digest, "size": each.size} for each in self.files.values()]
        return {"uri": self.uri, "frontmatter": self.frontmatter, "resources": files}


def _equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: to Python, True is 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(each, other[key]) for key, each in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def digest_of(content: bytes) -> str:
    """Return the digest of a file's bytes."""
    return f"sha256:{sha256(content).hexdigest()}"


def check_skill_name(name: object, description: object, directory: str) -> None:
    """Check the frontmatter of a skill of ours.  Raises `UsageError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            "the name of a skill must have 1 to 64 of the characters a-z 0-9 -, without - at an end or twice in a row; "
            f"got {shown(name)}"
        )
    if name != directory:
        raise UsageError(f"the skill {name!r} is in the directory {directory!r}; both must have the same name")
    if not isinstance(description, str) or not 1 <= len(description) <= 1024:
        raise UsageError(f"the skill {name!r} needs a description of 1 to 1024 characters")


# What a server sent.


def read_skill(entry: object) -> Skill:
    """Read an entry of a server.  Raises `RemoteProtocolError` for one that breaks a rule of the extension."""
    uri, frontmatter, files = (entry.get(each) if isinstance(entry, dict) else None for each in _MEMBERS)
    if not isinstance(uri, str) or not uri.endswith(f"/{SKILL_MD}"):
        raise RemoteProtocolError(f"a skill: uri must be that of a SKILL.md, got {shown(uri)}")
    names = frontmatter if isinstance(frontmatter, dict) else {}
    if not all(isinstance(names.get(each), str) and names[each] for each in ("name", "description")):
        raise RemoteProtocolError(f"the skill {shown(uri)}: frontmatter must have a name and a description")
    if names["name"] != uri.split("/")[-2]:
        raise RemoteProtocolError(f"the skill {shown(uri)} has the name {shown(names['name'])}")
    return Skill(uri, names, None if files == "dynamic" else _read_files(uri, files))


_MEMBERS = ("uri", "frontmatter", "resources")


def _read_files(uri: str, files: object) -> dict[str, SkillFile]:
    if not isinstance(files, list):
        raise RemoteProtocolError(f'the skill {shown(uri)}: resources must be an array or "dynamic"')
    found: dict[str, SkillFile] = {}
    for each in files:
        file, digest, size = (each.get(name) if isinstance(each, dict) else None for name in ("uri", "digest", "size"))
        if not isinstance(file, str) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise RemoteProtocolError(f"the skill {shown(uri)}: a file needs a uri and a digest, sha256:...")
        if type(size) is not int or size < 0:
            raise RemoteProtocolError(f"the skill {shown(uri)}: the size of {shown(file)} must be a number of bytes")
        if file in found or not file.startswith(uri.removesuffix(SKILL_MD)) or "/../" in f"{file}/":
            raise RemoteProtocolError(
                f"the skill {shown(uri)}: {shown(file)} is not one of its files, or is there twice"
            )
        found[file] = SkillFile(file, digest, size)
    if uri not in found:
        raise RemoteProtocolError(f"the skill {shown(uri)}: resources must have its SKILL.md")
    return found
