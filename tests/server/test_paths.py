"""Paths from clients: `file:` URIs, paths below a directory, and roots, with real directories and links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import INVALID_PARAMS, RequestError, Root
from trio_mcp.transport import PathRefused, Roots, below, file_path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory `top` with files that clients may read, and a secret beside it."""
    top = tmp_path / "top"
    (top / "sub").mkdir(parents=True)
    (top / "sub" / "a b.txt").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "top-secret").mkdir()  # its name begins like `top`
    (top / "inner").symlink_to(top / "sub")
    (top / "out").symlink_to(tmp_path)
    (top / "sub" / "far").symlink_to("../../secret")
    (top / "loop").symlink_to(top / "loop")
    return top


# file: URIs


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///", "/"),
        ("file:///a/b.txt", "/a/b.txt"),
        ("FILE://LocalHost/a", "/a"),
        ("file:/a", "/a"),
        ("file:///a%20b/%C3%BC", "/a b/ü"),
        ("file:///a b/ü", "/a b/ü"),  # some clients do not encode URIs
        ("file:///100%25", "/100%"),
        ("file:///a%2520b", "/a%20b"),  # decoded once
        ("file:///%ff", os.fsdecode(b"/\xff")),  # a name need not be UTF-8
        ("file:///c..d/...", "/c..d/..."),
    ],
)
def test_a_file_uri_names_a_path(uri: str, path: str) -> None:
    assert file_path(uri) == Path(path)


@given(st.binary(min_size=1, max_size=20).filter(lambda name: not set(name) & set(b"/\0\\%") and name not in b".."))
def test_a_file_uri_can_name_any_file(name: bytes) -> None:
    assert os.fsencode(file_path("file:///tmp/" + quote(name))) == b"/tmp/" + name


@req("res-18")
@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/a",
        "http:///a",
        "files:///a",
        "file:a",
        "file://host/a",
        "file://user@localhost/a",
        "file://localhost:80/a",
        "file://",
        "file:////a",
        "file:///a?b",
        "file:///a#b",
        "file:///a\nb",
        "fi\tle:///a",
        " file:///a",
        "file:///a%00b",
        "file:///a%0",
        "file:///%zz",
        "file:///\ud800",
        "file:///a/../b",
        "file:///a/%2e%2E/b",
        "file:///a%2f..%2fb",
        "file:///a/%252e%252e/b",
        "file:///a/..%5cb",
        "file:///" + "a/" * 2048,
    ],
)
def test_other_uris_and_those_with_parent_parts_are_refused(uri: str) -> None:
    with pytest.raises(PathRefused):
        file_path(uri)


# Below a directory


@req("res-18")
@pytest.mark.parametrize(
    ("relative", "leads_to"),
    [
        ("", ""),
        (".", ""),
        ("sub/a b.txt", "sub/a b.txt"),
        ("./sub//a b.txt", "sub/a b.txt"),
        ("inner/a b.txt", "sub/a b.txt"),  # a link that stays inside
        ("out/top/sub", "sub"),  # a link leads out and the path back in: the target counts
        ("new/file.txt", "new/file.txt"),
        ("a%20b", "a%20b"),  # an ordinary name
        ("100%", "100%"),
        ("c..d", "c..d"),
        ("...", "..."),
    ],
)
def test_a_path_below_a_directory_is_resolved(tree: Path, relative: str, leads_to: str) -> None:
    assert below(tree, relative) == (tree / leads_to).resolve()


def test_the_directory_may_itself_be_a_link(tree: Path) -> None:
    assert below(tree / "inner", "a b.txt").read_text() == "inside"


@req("res-18")
@pytest.mark.parametrize(
    "relative",
    [
        "/etc/passwd",
        "//etc/passwd",
        "\\etc\\passwd",
        "%2fetc/passwd",
        "%5cetc",
        "..",
        "../secret",
        "../top/sub",  # it leads back, but no valid path needs ".."
        "sub/../../secret",
        "sub/..",
        "..\\secret",
        "%2e%2e/secret",
        "%2e./secret",
        "..%2fsecret",
        "..%5Csecret",
        "out/secret",
        "out",
        "sub/far",
        "inner/far",
        "a\0b",
        "a%00b",
        "\ud800",
        "a" * 4097,
        "../top-secret",
    ],
)
def test_a_path_out_of_its_directory_is_refused(tree: Path, relative: str) -> None:
    with pytest.raises(PathRefused) as caught:
        below(tree, relative)
    # The client gets this error if the handler does not catch it, so it must not tell where the directory is.
    assert isinstance(caught.value, RequestError)
    assert caught.value.code == INVALID_PARAMS
    assert caught.value.data is None
    assert str(tree.parent) not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_directory_with_the_same_prefix_is_outside(tree: Path) -> None:
    (tree / "near").symlink_to(tree.parent / "top-secret")
    with pytest.raises(PathRefused, match="outside"):
        below(tree, "near")


def test_a_link_to_itself_cannot_be_read(tree: Path) -> None:
    with pytest.raises(OSError, match="loop"):
        below(tree, "loop").read_bytes()


@req("res-18")
@given(st.lists(st.sampled_from(["..", ".", "/", "\\", "%2e", "%2E", "%2f", "%25", "2e", "sub", "out", "far", "\0"])))
def test_no_accepted_path_leads_out_of_the_directory(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    top = tmp_path_factory.getbasetemp() / "below" / "top"
    if not top.exists():
        (top / "sub").mkdir(parents=True)
        (top / "out").symlink_to("..")
        (top / "sub" / "far").symlink_to("../../..")
    try:
        found = below(top, "".join(parts))
    except PathRefused:
        return
    assert found.resolve() == found
    assert found.is_relative_to(top.resolve())


# Roots


def uris(*places: Path | str) -> Roots:
    return Roots(Root(place.as_uri() if isinstance(place, Path) else place) for place in places)


def test_roots_are_a_sequence(tree: Path) -> None:
    first, second = Root("file:///a", "A"), Root("file:///b")
    roots = Roots([first, second])
    assert list(roots) == [first, second]
    assert (len(roots), roots[0], roots[-1], list(roots[1:])) == (2, first, second, [second])
    assert isinstance(roots[1:], Roots)
    assert repr(roots) == "Roots([Root(uri='file:///a', name='A'), Root(uri='file:///b')])"
    assert len(Roots()) == 0


@req("root-09")
def test_a_path_below_one_of_the_roots_is_resolved(tree: Path) -> None:
    roots = uris(tree.parent / "top-secret", tree)
    inside = tree / "sub" / "a b.txt"
    assert (
        roots.path(inside)
        == roots.path(str(inside))
        == roots.path(inside.as_uri().replace("file", "FILE"))
        == inside.resolve()
    )
    assert roots.path(tree / "inner" / "a b.txt") == inside.resolve()
    assert roots.path(tree) == tree.resolve()
    assert roots.path(tree / "new") == tree / "new"
    assert uris(inside).path(inside) == inside.resolve()  # a root may be a file
    assert uris(tree / "inner").path(inside) == inside.resolve()  # or a link


@req("root-09")
@pytest.mark.parametrize(
    "place",
    ["{}/secret", "file://{}/secret", "{}/top/out", "{}/top/sub/far", "{}/top/../secret", "{}", "/", "{}/top-secret"],
)
def test_a_path_outside_of_all_roots_is_refused(tree: Path, place: str) -> None:
    with pytest.raises(PathRefused) as caught:
        uris(tree).path(place.format(tree.parent))
    assert str(tree.parent) not in str(caught.value)


@req("root-09")
@pytest.mark.parametrize(
    "place",
    [
        "sub",
        "",
        "https://example.com/",
        "file:sub",
        "file://host/x",
        "a\0b",
        "/a\0b",
        "/a/../b",
        "/a/%2e%2e/b",
        "/" + "a/" * 2048,
    ],
)
def test_a_path_that_is_not_absolute_is_outside_of_all_roots(tree: Path, place: str) -> None:
    with pytest.raises(PathRefused):
        uris(tree, "file:///").path(place)


@req("root-09")
def test_without_roots_each_path_is_outside() -> None:
    with pytest.raises(PathRefused, match="outside"):
        Roots().path("/")


@req("root-08")
def test_a_deleted_root_allows_no_path_and_other_roots_still_work(tree: Path) -> None:
    gone, other = tree.parent / "gone", tree.parent / "other"
    gone.mkdir()
    other.mkdir()
    roots = uris(gone, other)
    assert roots.path(gone / "x") == gone / "x"
    gone.rmdir()
    with pytest.raises(PathRefused, match="gone"):
        roots.path(gone / "x")
    assert roots.path(other / "x") == other / "x"
    assert len(roots) == 2


@req("root-08", "root-09")
def test_roots_that_are_no_local_files_allow_no_path(tree: Path) -> None:
    roots = uris("https://example.com/", "file://host/", "file:///%zz", "file:///a/../..", tree)
    assert roots.path(tree / "sub") == tree / "sub"
    with pytest.raises(PathRefused):
        roots.path(tree.parent)


@req("root-08")
def test_a_root_that_became_a_link_allows_its_target_only(tree: Path) -> None:
    roots = uris(tree / "moving")
    (tree / "moving").symlink_to(tree / "sub")
    assert roots.path(tree / "moving" / "x") == tree / "sub" / "x"
    with pytest.raises(PathRefused):
        roots.path(tree)


def test_importing_the_module_loads_no_models() -> None:
    shown = "print([name for name in sys.modules if name.endswith(('models', 'trio'))])"
    code = f"import sys, trio_mcp.transport.paths; {shown}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
