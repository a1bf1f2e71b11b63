"""Skills of a server, for a client: their entries, and their files with digests verified (SEP-2640).

    skills = Skills(client)
    for skill in await skills.list():
        print(skill.name, skill.description)
    text = await skills.load(skill)                        # when the user has approved it
    form = await skills.read(skill, "references/FORMS.md")

No file is read before it is needed: `list` and `get` read entries only.  A skill of a server is untrusted text for a
model.  A host asks the user before it loads one, shows which server it comes from, and runs no code of it unasked.  A
digest only proves that entry and content agree; both come from the same server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from trio_mcp.core.caching import Pager
from trio_mcp.core.content import BlobResourceContents, TextResourceContents
from trio_mcp.core.errors import NotDeclared, RemoteProtocolError, shown
from trio_mcp.core.messages import JsonObject
from trio_mcp.extensions.skills.entries import MAX_BYTES, MAX_FILES, SKILLS, Skill, SkillNotVerified, read_skill

if TYPE_CHECKING:
    from trio_mcp.client.client import Client

__all__ = ["Skills"]

_Skills: TypeAlias = list[Skill]
_Items: TypeAlias = list[JsonObject]
_Faults: TypeAlias = list[str]
_LIST, _GET, _DIRECTORY = "skills/list", "skills/get", "resources/directory/read"


class Skills:
    """The skills of the server of a client.

    Raises `NotDeclared` if the server does not declare the extension.
    """

    def __init__(self, client: Client) -> None:
        settings = client.extension(SKILLS)
        if settings is None:
            raise NotDeclared(_LIST, "server", ("extensions", SKILLS))
        self._client = client
        self._reads_directories = settings.get("directoryRead") is True
        self.faults: _Faults = []
        """Why entries of the last `list` were left out."""
        self._read: dict[str, int] = {}  # bytes of the files that were read of each dynamic skill

    async def list(self) -> _Skills:
        """Return the entries of all skills that the server lists.  It may serve others: see `get`.

        An entry that breaks a rule is left out; `faults` has the reason.
        """
        skills, self.faults = _Skills(), []
        for each in await self._pages(_LIST, {}, "skills"):
            try:
                skills.append(read_skill(each))
            except RemoteProtocolError as error:
                self.faults.append(str(error))
        return skills

    async def get(self, uri: str) -> Skill:
        """Return the current entry of the skill whose SKILL.md has this URI.

        Raises `RequestError` if the server does not serve the skill, and `RemoteProtocolError` for an invalid entry.
        """
        skill = read_skill((await self._client.request(_GET, {"uri": uri})).get("skill"))
        if skill.uri != uri:
            raise RemoteProtocolError(f"the server answered {_GET} for {shown(uri)} with {shown(skill.uri)}")
        return skill

    async def load(self, skill: Skill) -> str:
        """Return the text of a SKILL.md, whose frontmatter and digest are those of the entry.

        Raises `SkillNotVerified` if they are not, and if the skill is larger than hosts must support.
        """
        if skill.files is not None:
            size = sum(each.size for each in skill.files.values())
            if len(skill.files) > MAX_FILES or size > MAX_BYTES:
                limits = f"the limits are {MAX_FILES} files and {MAX_BYTES} bytes"
                raise SkillNotVerified(f"{shown(skill.uri)} has {len(skill.files)} files and {size} bytes; {limits}")
        return (await self.read(skill, skill.uri)).decode()

    async def read(self, skill: Skill, path: str) -> bytes:
        """Return the verified bytes of a file of the skill, by its path relative to the directory of the skill.

        Raises `SkillNotVerified` for a file that the entry does not list, and for content that is not that of the
        entry; get the entry again then.
        """
        uri = skill.file_uri(path)
        contents = (await self._client.read_resource(uri)).contents
        found = [each for each in contents if getattr(each, "uri", None) == uri]
        if len(found) != 1 or not isinstance(found[0], TextResourceContents | BlobResourceContents):
            raise SkillNotVerified(f"the server did not return the content of {shown(uri)}")
        content = found[0].blob if isinstance(found[0], BlobResourceContents) else found[0].text.encode()
        if skill.files is None:
            read = self._read[skill.uri] = self._read.get(skill.uri, 0) + len(content)
            if read > MAX_BYTES:
                raise SkillNotVerified(f"the files of {shown(skill.uri)} have more than {MAX_BYTES} bytes")
        skill.check(uri, content)
        return content

    async def read_directory(self, uri: str) -> _Items:
        """Return the direct children of a directory, as resources in JSON; directories have the type inode/directory.

        A child that the entry of a skill does not list must not be read: the skill has changed.  Raises `NotDeclared`
        if the server cannot read directories.
        """
        if not self._reads_directories:
            raise NotDeclared(_DIRECTORY, "server", ("extensions", SKILLS, "directoryRead"))
        return await self._pages(_DIRECTORY, {"uri": uri}, "resources")

    async def _pages(self, method: str, params: JsonObject, member: str) -> _Items:
        pager, found = Pager(), _Items()
        while not pager.done:
            result = await self._client.request(method, {**params, **pager.params})
            if not isinstance(items := result.get(member), Sequence) or isinstance(items, str):
                raise RemoteProtocolError(f"the server answered {method} without an array {member}")
            found += items
            pager.received(result)
        return found
