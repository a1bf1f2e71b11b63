"""Skills: the frontmatter, the methods of a server, and the checks of a client (SEP-2640)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.client.matrix import Variant, client_of, each_transport_and_asgi
from tests.server.raw_client import ErrorResponse, Object, connected, every_revision
from trio_mcp import RequestError, ResourceNotFound, Server, UsageError, open_client
from trio_mcp.core import INVALID_PARAMS, CacheHints, RemoteProtocolError
from trio_mcp.errors import NotDeclared
from trio_mcp.extensions.skills import Skill, SkillFile, SkillNotVerified, Skills

# The parser is internal.
from trio_mcp.extensions.skills.frontmatter import BadFrontmatter, read_frontmatter
from trio_mcp.types import TextResourceContents

HEAD = "---\nname: {name}\ndescription: {name} helps\n---\n\n# {name}\n"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "skills"


def make_skills(folder: Path, *names: str) -> Path:
    """Create skills at these paths of the folder, each with a supporting file."""
    for path in names:
        skill = folder / path
        (skill / "references").mkdir(parents=True)
        (skill / "SKILL.md").write_text(HEAD.format(name=skill.name))
        (skill / "references" / "a b.bin").write_bytes(b"\xff\x00")
    return folder


# The frontmatter.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: -2.5\nc: 0x1f\nd: 0o17\ne: 1e3", {"a": 1, "b": -2.5, "c": 31, "d": 15, "e": 1000.0}),
        ("a: true\nb: False\nc: null\nd: ~", {"a": True, "b": False, "c": None, "d": None}),
        ("e:\nf: yes", {"e": None, "f": "yes"}),
        ("a: plain text # comment\n# comment\n\nb: x#y", {"a": "plain text", "b": "x#y"}),
        ("a: 'it''s: #1'\nb: \"x\\n\\u00e9\" # c", {"a": "it's: #1", "b": "x\né"}),
        ("'a b': 1\n\"c:d\": 2\na-b.c/d: 3", {"a b": 1, "c:d": 2, "a-b.c/d": 3}),
        ("a: 1.2.3\nb: 2026-07-28\nc: 1_000\nd: 12:30", {"a": "1.2.3", "b": "2026-07-28", "c": "1_000", "d": "12:30"}),
        ("a:\n  b:\n    c: 1\n  d: 2\ne: 3", {"a": {"b": {"c": 1}, "d": 2}, "e": 3}),
        ("a:\n  - 1\n  - x\nb:\n- y\n- \n- z", {"a": [1, "x"], "b": ["y", None, "z"]}),
        ("a:\n  - b: 1\n    c: 2\n  - d: 3\n  - - 4\n    - 5", {"a": [{"b": 1, "c": 2}, {"d": 3}, [4, 5]]}),
        ("a:\n  -\n    b: 1", {"a": [{"b": 1}]}),
        ("a: [1, two, 'three', [4], {b: 5}]", {"a": [1, "two", "three", [4], {"b": 5}]}),
        ("c: {}\nd: []", {"c": {}, "d": []}),
        ('a: {b: "c, d", "e": [f]}', {"a": {"b": "c, d", "e": ["f"]}}),
        ("a: |\n  x\n    y\n\n  z\nb: 1", {"a": "x\n  y\n\nz\n", "b": 1}),
        ("a: |-\n  x\n  y\n\nb: |+\n  z\n\nc: 1", {"a": "x\ny", "b": "z\n\n", "c": 1}),
        ("a: >\n  x\n  y\n\n  z\nb: >-\n  w", {"a": "x y\nz\n", "b": "w"}),
        ("a: first\n  second\n  third\nb: 1", {"a": "first second third", "b": 1}),
        ("a: Bash(git:*)", {"a": "Bash(git:*)"}),
    ],
)  # fmt: skip
def test_frontmatter_is_read_as_json(text: str, value: Object) -> None:
    assert read_frontmatter(f"---\n{text}\n---\nbody: no\n") == value
    assert read_frontmatter(f"\ufeff---\r\n{text}\n---".replace("\n", "\r\n").replace("\r\r", "\r")) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: b: c", "a value with a colon needs quotes"),
        ("a: &x 1", "must not begin with '&'"),
        ("a: *x", r"must not begin with '\*'"),
        ("a: !!str 1", "must not begin with '!'"),
        ("a: 1\na: 2", "'a' is there twice"),
        ("\ta: 1", "a tab must not indent"),
        ("a:\n    b: 1\n  c: 2", "the indentation does not fit"),
        ("a: 1\n  b: 2", "the indentation does not fit"),
        ("a: 1\njust text", "expected a member, name: value"),
        ("a: 'open", "must end on their line"),
        ("a: [1, 2", "must end on their line|expected a comma"),
        ("a: [1 2]x", "unexpected text"),
        ("a: {b}", "expected a member"),
        ('a: "\\x41"', "must begin an escape of JSON"),
        ("a: .inf", "has no JSON form"),
        ("a: >\n  x\n    y", "must not be indented further"),
        ('a: "\\ud800"', "half a surrogate pair"),
        ("- a", "must be a mapping"),
        ("", "must be a mapping"),
        ("\n".join(f"{' ' * n}a{n}:" for n in range(40)), "nested too deep"),
        (f"a: {'[' * 40}{']' * 40}", "nested too deep"),
    ],
)
def test_unsupported_yaml_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(BadFrontmatter, match=why):
        read_frontmatter(f"---\n{text}\n---\n")


@pytest.mark.timeout(5)  # with quadratic time the reader would take a minute
@pytest.mark.parametrize("text", ["a{}x", "a: x{}y", "a: x{}# y", "'a'{}x", "a:{}x"])
def test_long_runs_of_spaces_are_read_quickly(text: str) -> None:
    with contextlib.suppress(BadFrontmatter):
        read_frontmatter(f"---\n{text.format(' ' * 60_000)}\n---\n")


@pytest.mark.parametrize("text", ["", "name: x", "---\nname: x\n", f"---\na: {'x' * 100_000}\n---\n"])
def test_a_file_without_frontmatter_is_refused(text: str) -> None:
    with pytest.raises(BadFrontmatter, match="must begin with frontmatter between"):
        read_frontmatter(text)


# Both sides.


@each_transport_and_asgi(without=("child",))
async def test_a_client_lists_loads_and_reads_skills(
    variant: Variant, tmp_path: Path, autojump_clock: MockClock
) -> None:
    server = Server("skills")
    server.skills(
        make_skills(tmp_path, "acme/refunds", "acme/refunds/nested", "git"), cache=CacheHints(60_000, "public")
    )
    async with client_of(variant, server) as client:
        skills = Skills(client)
        listed = {skill.uri: skill for skill in await skills.list()}
        assert [*listed] == [f"skill://{name}/SKILL.md" for name in ("acme/refunds", "acme/refunds/nested", "git")]
        refunds = listed["skill://acme/refunds/SKILL.md"]
        assert (refunds.name, refunds.description, refunds.root) == ("refunds", "refunds helps", "skill://acme/refunds")
        assert refunds.files is not None
        assert len(refunds.files) == 4  # with those of the nested skill
        assert await skills.get(refunds.uri) == refunds
        assert await skills.load(refunds) == HEAD.format(name="refunds")
        assert await skills.read(refunds, "references/a%20b.bin") == b"\xff\x00"
        with pytest.raises(SkillNotVerified, match="has no file"):
            await skills.read(refunds, "../git/SKILL.md")
        children = await skills.read_directory(refunds.root)
        assert {each["name"]: each["mimeType"] for each in children} == {
            "SKILL.md": "text/markdown", "nested": "inode/directory", "references": "inode/directory",
        }  # fmt: skip
        assert [each["uri"] for each in await skills.read_directory("skill://acme")] == ["skill://acme/refunds"]
        for wrong in (refunds.uri, "skill://none", "skill://acme/refunds/"):
            with pytest.raises(RequestError, match="is not a directory of a skill"):
                await skills.read_directory(wrong)
        with pytest.raises(RequestError, match="no skill is served"):
            await skills.get("skill://none/SKILL.md")
        for wrong in ("skill://acme/refunds/none.md", "skill://acme/refunds/../git/SKILL.md", "skill://acme/x"):
            with pytest.raises(ResourceNotFound):
                await client.read_resource(wrong)


@every_revision
async def test_results_have_cache_hints_if_the_revision_has_them(
    revision: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    server = Server("skills")
    server.skills(make_skills(tmp_path, *(f"skill-{n}" for n in range(60))), cache=CacheHints(5, "public"))
    async with connected(server, revision, check=False) as wire:
        first = await wire.call("skills/list")
        assert len(first["skills"]) == 50
        rest = await wire.call("skills/list", {"cursor": first["nextCursor"]})
        assert len(rest["skills"]) == 10
        got = await wire.call("skills/get", {"uri": "skill://skill-1/SKILL.md"})
        modern = revision == "2026-07-28"
        for result in (first, rest, got):
            assert (result.get("ttlMs"), result.get("cacheScope")) == ((5, "public") if modern else (None, None))
        with pytest.raises(ErrorResponse) as caught:
            await wire.call("skills/list", {"cursor": "no"})
        assert caught.value.code == INVALID_PARAMS


async def test_a_filter_decides_which_skills_a_client_sees(tmp_path: Path, autojump_clock: MockClock) -> None:
    def allowed(principal: Any, item: Any) -> bool:
        return "secret" not in str(getattr(item, "uri", ""))

    server = Server("skills", filter=allowed)
    server.skills(make_skills(tmp_path, "a/git", "b/secret"))
    async with open_client(server) as client:
        skills = Skills(client)
        assert [skill.name for skill in await skills.list()] == ["git"]
        with pytest.raises(RequestError, match="no skill is served"):
            await skills.get("skill://b/secret/SKILL.md")
        for hidden in ("SKILL.md", "references/a%20b.bin"):
            with pytest.raises(ResourceNotFound):
                await client.read_resource(f"skill://b/secret/{hidden}")
        with pytest.raises(RequestError, match="is not a directory"):
            await skills.read_directory("skill://b/secret")


async def test_a_changed_skill_is_served_with_its_new_content(tmp_path: Path, autojump_clock: MockClock) -> None:
    server = Server("skills")
    server.skills(make_skills(tmp_path, "git", "other"))
    async with open_client(server) as client:
        skills = Skills(client)
        held, _ = await skills.list()
        (tmp_path / "git" / "SKILL.md").write_text(HEAD.format(name="git") + "more\n")
        (tmp_path / "git" / ".hidden").write_text("x")
        (tmp_path / "other" / "SKILL.md").write_text("no frontmatter")
        os.symlink("/etc", tmp_path / "git" / "out")
        os.symlink("/etc/hosts", tmp_path / "git" / "hosts")
        os.symlink(tmp_path / "git", tmp_path / "git" / "again")
        with pytest.raises(SkillNotVerified, match="its entry says"):
            await skills.load(held)
        current = await skills.get(held.uri)
        assert (await skills.load(current)).endswith("more\n")
        assert current.files is not None
        assert len(current.files) == 2
        assert [skill.name for skill in await skills.list()] == ["git"]  # without frontmatter the other one is no skill
        for wrong in ("hosts", ".hidden", "out/hosts", "again/SKILL.md", "x" * 1000):
            with pytest.raises(ResourceNotFound):
                await client.read_resource(f"skill://git/{wrong}")


def test_an_invalid_skill_directory_is_refused(tmp_path: Path) -> None:
    server = Server("skills")
    folder = make_skills(tmp_path / "good", "git")
    server.skills(folder)
    server.skills(make_skills(tmp_path / "more", "one") / "one")  # the folder of a skill
    with pytest.raises(UsageError, match=r"skill://git/SKILL\.md is served already"):
        server.skills(folder)
    with pytest.raises(UsageError, match="skills needs a directory"):
        server.skills(folder / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"there is no SKILL\.md"):
        server.skills(tmp_path / "empty")

    def refused(name: str, text: str, why: str, prepare: Callable[[Path], object] = lambda folder: None) -> None:
        skill = tmp_path / name / "it"
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text(text)
        prepare(skill)
        with pytest.raises(UsageError, match=why):
            Server("x").skills(tmp_path / name)

    refused("a", HEAD.format(name="other"), "both must have the same name")
    refused("b", HEAD.format(name="It"), "the name of a skill must have")
    refused("c", "---\nname: it\n---\n", "needs a description")
    refused("d", "---\nname: [\n---\n", "SKILL.md: line 2")
    whole = HEAD.format(name="it")
    refused("e", whole, "hosts support 512 files", lambda skill: [(skill / str(n)).touch() for n in range(512)])
    refused("f", whole, "hosts support", lambda skill: (skill / "big").write_bytes(bytes(17 * 1024 * 1024)))

    def grow(skill: Path) -> None:
        (skill / "huge").touch()
        os.truncate(skill / "huge", 1 << 40)  # a sparse file

    refused("g", whole, "hosts support", grow)


# A client with servers of other implementations.


class SkillServer:
    """A server with given answers to the methods of skills."""

    def __init__(self, *, text: str = HEAD.format(name="git"), directories: bool = False) -> None:
        self.server = Server("skill_server")
        self.server.extension("io.modelcontextprotocol/skills", settings={"directoryRead": directories})
        self.answers: dict[str, Object] = {}
        self.server.fallback(self.answer)
        self.server.resource("skill://git/SKILL.md")(lambda: text)

    async def answer(self, ctx: Any, method: str, params: Object) -> Object:
        return self.answers[method]


def entry(**members: Any) -> Object:
    text = HEAD.format(name="git").encode()
    uri = "skill://git/SKILL.md"
    files = [{"uri": uri, "digest": f"sha256:{sha256(text).hexdigest()}", "size": len(text)}]
    return {"uri": uri, "frontmatter": {"name": "git", "description": "git helps"}, "resources": files, **members}


FILE = {"uri": "skill://git/SKILL.md", "digest": f"sha256:{'0' * 64}", "size": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"uri": "skill://git/README.md"},
        {"uri": 7},
        {"frontmatter": {"name": "git"}},
        {"frontmatter": []},
        {"frontmatter": {"name": "other", "description": "x"}},
        {"resources": None},
        {"resources": "static"},
        {"resources": []},
        {"resources": [{**FILE, "digest": "sha256:0"}]},
        {"resources": [{**FILE, "size": -1}]},
        {"resources": [{**FILE, "size": True}]},
        {"resources": [FILE, FILE]},
        {"resources": [FILE, {**FILE, "uri": "skill://other/SKILL.md"}]},
        {"resources": [FILE, {**FILE, "uri": "skill://git/../other"}]},
        {"resources": ["skill://git/SKILL.md"]},
    ],
)
async def test_an_invalid_entry_is_refused(wrong: Object, autojump_clock: MockClock) -> None:
    skill_server = SkillServer()
    skill_server.answers = {"skills/list": {"skills": [entry(**wrong)]}, "skills/get": {"skill": entry(**wrong)}}
    skill_server.answers["skills/list"]["skills"].append(entry())
    async with open_client(skill_server.server) as client:
        skills = Skills(client)
        assert [skill.name for skill in await skills.list()] == ["git"]  # the other entry is left out
        assert len(skills.faults) == 1
        with pytest.raises(RemoteProtocolError):
            await skills.get("skill://git/SKILL.md")


@pytest.mark.parametrize(
    ("members", "text", "why"),
    [
        ({}, HEAD.format(name="git").replace("helps", "kills"), "does not have the digest"),
        ({}, "x", "has 1 bytes, its entry says"),
        ({"frontmatter": {"name": "git", "description": "git harms"}}, HEAD.format(name="git"), "is not that of its"),
        ({"frontmatter": {"name": "git", "description": "git helps", "x": 1}, "resources": "dynamic"},
         "---\nname: git\ndescription: git helps\nx: true\n---\n", "is not that of its entry"),
        ({"resources": "dynamic"}, "no frontmatter", "cannot be read"),
    ],
)  # fmt: skip
async def test_content_that_does_not_match_its_entry_is_refused(
    members: Object, text: str, why: str, autojump_clock: MockClock
) -> None:
    skill_server = SkillServer(text=text)
    skill_server.answers["skills/get"] = {"skill": entry(**members)}
    async with open_client(skill_server.server) as client:
        skills = Skills(client)
        with pytest.raises(SkillNotVerified, match=why):
            await skills.load(await skills.get("skill://git/SKILL.md"))


async def test_a_dynamic_skill_is_bounded_and_has_no_digests(autojump_clock: MockClock) -> None:
    skill_server, big = SkillServer(), "x" * (9 * 1024 * 1024)
    skill_server.answers["skills/get"] = {"skill": entry(resources="dynamic")}
    skill_server.server.resource("skill://git/big")(lambda: big)
    async with open_client(skill_server.server) as client:
        skills = Skills(client)
        skill = await skills.get("skill://git/SKILL.md")
        assert skill.files is None
        assert (await skills.load(skill)).startswith("---")
        assert skill.to_json() == entry(resources="dynamic")
        for wrong in ("../other/SKILL.md", "skill://other/SKILL.md"):
            with pytest.raises(SkillNotVerified, match="is not in the directory"):
                await skills.read(skill, wrong)
        await skills.read(skill, "big")
        with pytest.raises(SkillNotVerified, match="have more than 16777216 bytes"):
            await skills.read(skill, "big")


async def test_requests_that_the_server_does_not_offer_are_not_sent(autojump_clock: MockClock) -> None:
    async with open_client(Server("plain")) as client:
        with pytest.raises(NotDeclared, match="skills/list needs the server capability"):
            Skills(client)
    skill_server = SkillServer()
    skill_server.answers = {"skills/list": {"skills": 7}, "skills/get": {"skill": entry()}}
    async with open_client(skill_server.server) as client:
        skills = Skills(client)
        with pytest.raises(NotDeclared, match="directoryRead"):
            await skills.read_directory("skill://git")
        with pytest.raises(RemoteProtocolError, match="without an array skills"):
            await skills.list()
        with pytest.raises(RemoteProtocolError, match=r"with 'skill://git/SKILL\.md'"):
            await skills.get("skill://other/SKILL.md")
        files = {f"skill://git/{n}": SkillFile(f"skill://git/{n}", "", 1) for n in range(513)}
        with pytest.raises(SkillNotVerified, match="the limits are 512 files"):
            await skills.load(Skill("skill://git/SKILL.md", {"name": "git", "description": "x"}, files))


async def test_contents_with_the_uri_of_another_resource_are_refused(autojump_clock: MockClock) -> None:
    skill_server = SkillServer()
    skill_server.answers["skills/get"] = {
        "skill": entry(resources=[*entry()["resources"], {**FILE, "uri": "skill://git/a"}])
    }

    @skill_server.server.resource("skill://git/a")
    async def other() -> Any:
        return [TextResourceContents("skill://git/b", text="x"), TextResourceContents("skill://git/c", text="x")]

    async with open_client(skill_server.server) as client:
        skills = Skills(client)
        with pytest.raises(SkillNotVerified, match="did not return the content"):
            await skills.read(await skills.get("skill://git/SKILL.md"), "a")


def test_the_skills_of_the_fixtures_are_served() -> None:
    Server("x").skills(FIXTURES)
