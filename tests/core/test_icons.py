"""Icons: which addresses may be fetched, which bytes may be shown."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.requirements import req
from trio_mcp.core import (
    ICON_BYTES,
    IMAGE_TYPES,
    REQUEST_HEADERS,
    SVG,
    Icon,
    address_fault,
    embedded,
    image_fault,
    redirect_fault,
    suits,
)

SERVER = "https://example.com"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
JPEG = b"\xff\xd8\xff\xe0" + bytes(16)
WEBP = b"RIFF\x10\x00\x00\x00WEBPVP8 "
VECTOR = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


@req("icon-03", "icon-06", "icon-09")
@pytest.mark.parametrize(
    "src",
    [
        "https://example.com/icon.png",
        "HTTPS://EXAMPLE.com:443/icon.png",
        "https://cdn.example.net:8443/icon.png",
        "data:image/png;base64,iVBORw0KGgo=",
        "DATA:,",
    ],
)
def test_the_servers_own_addresses_trusted_ones_and_embedded_icons_are_fine(src: str) -> None:
    assert address_fault(src, [SERVER, "https://cdn.example.net:8443"]) is None


@req("icon-03")
@pytest.mark.parametrize(
    "src",
    [
        "http://example.com/icon.png",
        "javascript:alert(1)",
        "file:///etc/passwd",
        "ftp://example.com/icon.png",
        "ws://example.com/",
        "myapp://example.com/",
        "//example.com/icon.png",
        "icon.png",
        "https:",
        "https:///icon.png",
        "https://example.com:port/",
        "https://[::1/",
        "",
    ],
)
def test_other_schemes_are_refused(src: str) -> None:
    assert address_fault(src, [SERVER, "http://example.com", src]) is not None


@req("icon-05")
@pytest.mark.parametrize(
    "src", ["https://user@example.com/", "https://user:word@example.com/", "https://@example.com/"]
)
def test_an_address_with_credentials_is_refused(src: str) -> None:
    assert address_fault(src, [SERVER]) is not None


@req("icon-05")
def test_the_headers_of_a_request_hold_no_credentials() -> None:
    assert [name for name, _ in REQUEST_HEADERS] == ["Accept"]


@req("icon-06", "icon-09")
@pytest.mark.parametrize(
    "src",
    [
        "https://example.org/",
        "https://sub.example.com/",
        "https://example.com:8443/",
        "https://example.com.evil.net/",
        "https://evil.net\\@example.com/",
        "https://evil.net/\nhttps://example.com/",
        "https://exa\tmple.com/",
        "https://example.com /",
        "https://exämple.com/",
    ],
)
def test_another_origin_is_refused(src: str) -> None:
    assert address_fault(src, [SERVER]) is not None
    assert address_fault(src, []) is not None


def test_the_fault_names_the_origin_and_not_the_rest_of_the_address() -> None:
    fault = address_fault("https://evil.net/?token=secret", [SERVER])
    assert fault is not None
    assert "https://evil.net:443" in fault
    assert "secret" not in fault
    assert len(address_fault(f"https://{'e' * 1_000_000}.net/", [SERVER]) or "") < 200


@req("icon-04")
@pytest.mark.parametrize("location", ["/b.png", "b.png", "https://example.com/b.png", "https://EXAMPLE.com:443/", "?b"])
def test_a_redirect_within_the_origin_is_followed(location: str) -> None:
    assert redirect_fault("https://example.com/a.png", location) is None


@req("icon-04")
@pytest.mark.parametrize(
    "location",
    [
        "http://example.com/b.png",
        "//evil.net/b.png",
        "https://evil.net/",
        "https://example.com:8443/",
        "data:image/png,",
        "javascript:alert(1)",
        "\\\\evil.net/",
        "/b\r\nSet-Cookie:a=b",
        "https://[/b.png",
    ],
)
def test_a_redirect_elsewhere_is_not(location: str) -> None:
    assert redirect_fault("https://example.com/a.png", location) is not None
    assert redirect_fault("http://example.com/a.png", "/b.png") is not None


@req("icon-01", "icon-02")
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (PNG, "image/png"),
        (PNG, None),
        (PNG, "IMAGE/PNG; charset=binary"),
        (PNG, "application/octet-stream"),
        (JPEG, "image/jpeg"),
        (JPEG, "image/jpg"),
        (WEBP, "image/webp"),
    ],
)
def test_images_that_are_what_they_say_are_shown(data: bytes, said: str | None) -> None:
    assert image_fault(data, said) is None


@req("icon-02", "icon-10")
@pytest.mark.parametrize(
    "data",
    [
        VECTOR,
        b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- a -->\n<!-- b --><!DOCTYPE svg PUBLIC "x" "y">\n' + VECTOR,
        b"\n <svg>",
    ],
)
def test_svg_is_shown_only_where_it_is_asked_for(data: bytes) -> None:
    assert image_fault(data, SVG) is not None
    assert image_fault(data, SVG, types=[*IMAGE_TYPES, SVG]) is None


@req("icon-07")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF89a",
        b"<html>",
        b"<script>alert(1)</script>",
        b"\x89PNG",
        b"RIFF\x00\x00\x00\x00AVI ",
        b"MZ" + PNG,
        b"<svgx>",
        b'<!DOCTYPE svg [<!ENTITY a "aaaa">]><svg>',
        b"<!DOCTYPE svg [ %a; ]><svg>",
        b"<!--" + b"x" * 2000 + b"--><svg>",
    ],
)
def test_bytes_of_no_known_kind_are_refused(data: bytes) -> None:
    assert image_fault(data, types=[*IMAGE_TYPES, SVG]) is not None


@req("icon-08")
@pytest.mark.parametrize("comment", [b"<!---->", b"<!-- -- -> ->-->\n", b"<!--<!---->", b"<!-->-->"])
def test_many_comments_are_read_in_one_pass(comment: bytes) -> None:
    """Tried in every way in which one comment can swallow others, the first few dozen would already take for ever."""
    types = [*IMAGE_TYPES, SVG]
    within = comment * (1000 // len(comment))
    assert image_fault(within + b"<svg>", types=types) is None
    assert image_fault(within + b"x", types=types) is not None
    assert image_fault(comment * 1000 + b"<svg>", types=types) is not None
    assert image_fault(b"<!--" + comment[:-3] + b"--x" + b"<svg>", types=types) is not None


@req("icon-07")
@pytest.mark.parametrize(
    ("data", "said"), [(PNG, "image/jpeg"), (JPEG, "image/png"), (PNG, "text/html"), (WEBP, "image/jpg"), (PNG, SVG)]
)
def test_an_image_under_another_name_is_refused(data: bytes, said: str) -> None:
    assert image_fault(data, said) is not None


@req("icon-08")
def test_sizes_and_kinds_are_limited() -> None:
    assert image_fault(PNG + bytes(ICON_BYTES)) is not None
    assert image_fault(PNG, max_bytes=len(PNG)) is None
    assert image_fault(PNG, max_bytes=len(PNG) - 1) is not None
    assert image_fault(PNG, types=["image/jpeg"]) is not None


@req("icon-08")
@given(st.binary(max_size=64), st.none() | st.text(max_size=20))
def test_no_bytes_make_it_raise(data: bytes, said: str | None) -> None:
    for start in (b"", PNG[:8], b"RIFF", b"<svg", b"<!--", b"<?xml"):
        image_fault(start + data, said, types=[*IMAGE_TYPES, SVG])


@given(st.text(max_size=30), st.sampled_from(["", "https://", "data:", "data:;base64,", "https://example.com"]))
def test_no_address_makes_it_raise(text: str, start: str) -> None:
    address_fault(start + text, [SERVER])
    redirect_fault(start + text, text)
    redirect_fault("https://example.com", start + text)
    embedded(start + text)


@given(st.binary(max_size=100))
def test_embedded_bytes_come_back(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    assert embedded(f"data:image/png;base64,{encoded}") == ("image/png", data)
    assert embedded("DATA:Image/PNG;x=y;Base64," + encoded.replace("=", "%3D")) == ("image/png", data)
    assert embedded("data:," + "".join(f"%{byte:02x}" for byte in data)) == ("text/plain", data)


@req("icon-08")
def test_embedded_bytes_are_limited() -> None:
    assert embedded("data:,abcd", max_bytes=4) == ("text/plain", b"abcd")
    assert embedded("data:,abcde", max_bytes=4) is None
    assert embedded("data:;base64,YWJjZGU=", max_bytes=4) is None


@pytest.mark.parametrize("src", ["data:image/png;base64,====", "data:image/png;base64,é", "data:x", "https://e.com/,"])
def test_what_is_no_data_uri_has_no_bytes(src: str) -> None:
    assert embedded(src) is None


@req("icon-11")
@pytest.mark.parametrize(
    ("sizes", "size", "meant"),
    [
        (None, (48, 48), True),
        (None, None, True),
        (["48x48"], None, True),
        (["48x48"], (48, 48), True),
        (["16X16", "96x48"], (96, 48), True),
        (["96x48"], (48, 96), False),
        (["any"], (7, 9), True),
        (["big", "48", "0x0", "048x48", "x"], (48, 48), False),
        ([], (48, 48), False),
    ],
)
def test_an_icon_suits_the_sizes_it_names_or_all(
    sizes: list[str] | None, size: tuple[int, int] | None, meant: bool
) -> None:
    assert suits(Icon(src="data:,", sizes=sizes), size=size) is meant


@req("icon-11")
def test_an_icon_suits_the_theme_it_names_or_both() -> None:
    assert suits(Icon(src="data:,"), theme="dark")
    assert suits(Icon(src="data:,", theme="dark"), theme="dark")
    assert suits(Icon(src="data:,", theme="dark"))
    assert not suits(Icon(src="data:,", theme="dark"), theme="light")
