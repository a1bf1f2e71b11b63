"""The requests that reach the paths of monitoring."""

from __future__ import annotations

import pytest

from trio_mcp.core import UsageError
from trio_mcp.core.http import HttpPolicy, HttpRequest, PathKind, Reply, Screened, screen

POLICY = HttpPolicy(monitoring=True)
PATHS = ("/healthz", "/readyz", "/metrics")


def status_or_kind(policy: HttpPolicy, method: str, path: str, **headers: str) -> int | PathKind:
    """The status of the refusal, or the kind of the path."""
    found = screen(policy, HttpRequest(method, path, {"Host": "localhost:3000", **headers}))
    if isinstance(found, Screened):
        return found.path_kind
    assert isinstance(found, Reply)
    return found.status


@pytest.mark.parametrize("path", [*PATHS, "/healthz/", "/metrics?name=x"])
@pytest.mark.parametrize("headers", [{}, {"Accept": "image/png"}, {"Accept": "*/*;q=0"}])
def test_the_paths_are_served_for_any_accept_header(path: str, headers: dict[str, str]) -> None:
    assert status_or_kind(POLICY, "GET", path, **headers) is PathKind.MONITORING
    assert status_or_kind(POLICY, "HEAD", path, **headers) is PathKind.MONITORING
    assert status_or_kind(HttpPolicy(), "GET", path, **headers) == 404


@pytest.mark.parametrize(("method", "status"), [("POST", 405), ("DELETE", 405), ("OPTIONS", 204)])
def test_other_methods_are_refused(method: str, status: int) -> None:
    found = screen(POLICY, HttpRequest(method, "/metrics", {"Host": "localhost", "Content-Type": "application/json"}))
    assert isinstance(found, Reply)
    assert (found.status, dict(found.headers)["Allow"]) == (status, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("10.1.2.3", True),
        ("10.1.2.3:3000", True),
        ("[fd00::1]:3000", True),
        ("[fd00::1]", True),
        ("evil.example", False),
        ("evil.example:3000", False),
        ("[evil]", False),
        ("10.1.2.3.evil.example", False),
        ("", False),
    ],
)
def test_a_host_is_an_address_or_one_of_the_allowed_names(host: str, allowed: bool) -> None:
    assert status_or_kind(POLICY, "GET", "/readyz", Host=host) == (PathKind.MONITORING if allowed else 421)


def test_the_endpoint_is_not_served_for_an_address_as_host() -> None:
    assert status_or_kind(POLICY, "GET", "/mcp", Host="10.1.2.3:3000") == 421
    assert status_or_kind(HttpPolicy(), "GET", "/readyz", Host="10.1.2.3:3000") == 421


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_pages_of_other_sites_are_refused(headers: dict[str, str]) -> None:
    assert status_or_kind(POLICY, "GET", "/metrics", **headers, Host="10.1.2.3:3000") == 403


@pytest.mark.parametrize("path", PATHS)
def test_no_path_is_used_twice(path: str) -> None:
    with pytest.raises(UsageError, match=f"monitoring=True serves {path} itself; choose another path"):
        HttpPolicy(monitoring=True, path=path)
    assert HttpPolicy(path=path).paths[path] is PathKind.ENDPOINT
