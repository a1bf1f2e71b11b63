"""Names of other SDKs: each fails with the line to write instead, and no list of attributes shows it.

The names depend on the name of the class, so these tests use stand-ins for Server and Context.
"""

from __future__ import annotations

import abc
from typing import Any

import pytest

from trio_mcp.core import OPTIONS, WithOtherNames, option_error


class Server(metaclass=WithOtherNames):
    def prompt(self) -> str:
        return "prompt"


class Context(metaclass=WithOtherNames):
    pass


class Derived(Server):
    settings = "mine"


class Other(metaclass=WithOtherNames):
    middleware = "mine"


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Server, "run_async", "a Server has no 'run_async'; write await serve_stdio(server), or await serve_http("
         'server, "127.0.0.1", 3000)'),
        (Derived, "middleware", "a Derived has no 'middleware'; write Server(\"name\", middleware=[log_calls])"),
        (Context, "info", "a Context has no 'info'; write await ctx.log(\"info\", \"...\")"),
        # Names of another class and unknown names fail as in any class.
        (Context, "run_async", "'Context' object has no attribute 'run_async'"),
        (Server, "info", "'Server' object has no attribute 'info'"),
        (Server, "unknown", "'Server' object has no attribute 'unknown'"),
    ],
)  # fmt: skip
def test_reading_a_name_of_another_sdk_fails_with_the_line_to_write(owner: Any, name: str, error: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(owner(), name)
    assert str(caught.value) == error
    assert not hasattr(owner(), name)


@pytest.mark.parametrize("name", ["run_async", "unknown"])
def test_the_class_itself_has_the_usual_error_of_python(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(Server, name)
    assert str(caught.value) == f"type object 'Server' has no attribute {name!r}"


def test_a_program_may_define_the_name_itself() -> None:
    assert Derived().settings == Derived.settings == "mine"
    assert Other().middleware == Other.middleware == "mine"
    server: Any = Server()
    server.middleware = "mine"
    assert server.middleware == "mine"


def test_a_class_of_a_program_may_have_the_same_name() -> None:
    def list_tools(self: Any) -> str:
        return "mine"

    same: Any = WithOtherNames("Server", (Server,), {"list_tools": list_tools})
    assert same().list_tools() == "mine"
    assert "list_tools" in dir(same)
    assert "list_tools" in dir(same())
    with pytest.raises(AttributeError, match="a Server has no 'run_async'; write"):
        same().run_async  # noqa: B018


def test_a_class_may_inherit_from_an_abstract_class_too() -> None:
    class Named(Server, abc.ABC):
        pass

    with pytest.raises(AttributeError, match="a Named has no 'run_async'; write"):
        Named().run_async  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("listed", [Server, Server(), Derived, Derived()])
def test_dir_lists_only_the_names_that_the_class_has(listed: object) -> None:
    names = dir(listed)
    assert "prompt" in names
    assert "__init__" in names
    assert not {"run_async", "middleware", "list_tools"} & {*names}


def test_dir_of_a_class_with_other_names_is_complete() -> None:
    assert "middleware" in dir(Other)
    assert "middleware" in dir(Other())


def test_an_option_of_another_sdk_is_refused_with_the_line_to_write() -> None:
    error = option_error("Server", "json_response", ["name", "version"])
    assert type(error) is TypeError
    assert str(error) == (
        "Server has no option 'json_response'; write server.run(http=\"127.0.0.1:3000\", json_only=True)"
    )
    for name, equivalent in OPTIONS.items():
        assert str(option_error("Server", name, ())) == f"Server has no option {name!r}; write {equivalent}"


def test_an_unknown_option_is_refused_with_the_options_that_exist() -> None:
    error = option_error("Server", "nmae", ["name", "version"])
    assert type(error) is TypeError
    assert str(error) == "Server has no option 'nmae'; the options are name, version"
