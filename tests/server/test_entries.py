"""Entries made of functions and of objects, and each mistake, which is reported at registration and not later."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest

from tests.requirements import req
from trio_mcp import server as entries
from trio_mcp.core import (
    LATEST,
    Annotations,
    CacheHints,
    Icon,
    Prompt,
    PromptArgument,
    Resource,
    ResourceTemplate,
    Tool,
    ToolAnnotations,
    UsageError,
)
from trio_mcp.core.http import Mirror
from trio_mcp.core.schema import Field, InvalidSchema
from trio_mcp.server import BadArguments, Catalog, Context, RunMode, raw_entry

raw_tool = functools.partial(raw_entry, "tools")
raw_prompt = functools.partial(raw_entry, "prompts")
raw_resource = functools.partial(raw_entry, "resources")
raw_template = functools.partial(raw_entry, "templates")
CTX: Any = object()
ICONS = [Icon("https://example.com/icon.png")]
META = {"com.example/owner": "weather"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


async def forecast(city: str, days: int = 3, *, ctx: Context) -> dict[str, int]:
    """The forecast for a city.

    Args:
        city: where
        days: how many
    """
    return {city: days}


def review(code: Annotated[str, Field(title="The code", description="what to read")], size: Size = Size.SMALL) -> str:
    """Review some code."""
    return f"{code} {size.name}"


def note(name: str, kind: Literal["todo", "done"] = "todo") -> str:
    """A note."""
    return f"{name} {kind}"


def today() -> str:
    return "sunny"


def given(*everything: Any) -> Any:
    """The values that a raw handler gets."""
    return everything


# Entries.


def test_a_tool_is_derived_from_its_function() -> None:
    tool = entries.tool_of(forecast)
    assert (tool.key, tool.kind, tool.replay, tool.mirrors) == ("forecast", "tools", False, ())
    assert tool.handler.how is RunMode.ASYNC
    assert tool.model == Tool(
        "forecast",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer", "description": "how many", "default": 3},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        description="The forecast for a city.",
        output_schema={"type": "object", "additionalProperties": {"type": "integer"}},
    )
    assert tool.model is tool.model


@req("tool-16")
def test_a_tool_without_parameters_has_an_object_schema() -> None:
    def ping() -> None: ...

    assert entries.tool_of(ping).json(LATEST)["inputSchema"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_all_members_of_a_tool_can_be_given() -> None:
    annotations = ToolAnnotations(read_only_hint=True)
    tool = entries.tool_of(
        today, name="weather.today", title="Today", description="", annotations=annotations, icons=ICONS, meta=META,
        structured=False, thread=False, replay=True,
    )  # fmt: skip
    assert tool.model == Tool(
        "weather.today",
        {"type": "object", "properties": {}, "additionalProperties": False},
        title="Today",
        description="",
        annotations=annotations,
        icons=ICONS,
        meta=META,
    )
    assert tool.output is None
    assert tool.replay
    assert tool.handler.how is RunMode.INLINE
    assert not entries.tool_of(today, abandon_on_cancel=False).handler.abandon_on_cancel


async def test_a_tool_is_called_with_its_arguments_and_the_context() -> None:
    async def both(city: str, ctx: Context) -> Any:
        return city, ctx

    assert await entries.tool_of(both).prepare(CTX, {"city": "Oslo"})() == ("Oslo", CTX)
    with pytest.raises(BadArguments, match=r"^/city: must be of type string, not an integer$"):
        entries.tool_of(both).prepare(CTX, {"city": 1})


def test_a_partial_has_the_name_of_its_function() -> None:
    assert entries.tool_of(functools.partial(functools.partial(note), name="x")).key == "note"


@req("tool-06", "tool-16")
def test_a_raw_tool_keeps_its_model_and_its_arguments_are_checked() -> None:
    said = Tool("forecast", SCHEMA, description="The forecast.", output_schema={"type": "object"})
    tool = raw_tool(said, given, replay=True, thread=False)
    assert (tool.key, tool.model, tool.replay, tool.handler.how) == ("forecast", said, True, RunMode.INLINE)
    assert tool.output is not None
    assert tool.output.schema == {"type": "object"}
    assert tool.prepare(CTX, {"city": "Oslo", "more": 1})() == (CTX, {"city": "Oslo", "more": 1})
    with pytest.raises(BadArguments, match=r'^arguments: lacks the member "city"$'):
        tool.prepare(CTX, {})
    assert raw_tool(Tool("a", SCHEMA), given).output is None


def test_marked_arguments_are_mirrored_in_headers() -> None:
    def query(region: Annotated[str, Field(header="Region")], text: str) -> None: ...

    assert entries.tool_of(query).mirrors == (Mirror("Mcp-Param-Region", ("region",)),)
    marked = {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "A"}}}
    assert raw_tool(Tool("q", marked), given).mirrors == (Mirror("Mcp-Param-A", ("a",)),)


def test_a_resource_with_one_uri() -> None:
    hints = CacheHints(1000, "public")
    entry = entries.resource_of(
        today, "weather://today", title="T", mime_type="text/plain", size=5, icons=ICONS, meta=META, cache=hints,
        annotations=Annotations(["user"], 0.5, "2025-06-18"), thread=False, replay=True,
    )  # fmt: skip
    assert entry.kind == "resources"
    assert entry.model == Resource(
        "today", "weather://today", "text/plain", 5, Annotations(["user"], 0.5, "2025-06-18"),
        title="T", icons=ICONS, meta=META,
    )  # fmt: skip
    assert (entry.key, entry.mime_type, entry.cache, entry.replay) == ("weather://today", "text/plain", hints, True)
    assert entry.prepare(CTX, {}, "weather://today")() == "sunny"
    assert entry.takes == frozenset()


def test_a_raw_resource() -> None:
    said = Resource("today", "weather://today", "text/plain")
    hints = CacheHints(1)
    entry = raw_resource(said, given, cache=hints)
    assert (entry.model, entry.mime_type, entry.cache) == (said, "text/plain", hints)
    assert entry.prepare(CTX, {}, "weather://today")() == (CTX, "weather://today")


@req("res-22")
def test_a_resource_with_a_template() -> None:
    entry = entries.resource_of(
        note, "notes://{name}{?kind}", name="a note", mime_type="text/plain", cache=CacheHints(1)
    )
    assert entry.kind == "templates"
    assert entry.model == ResourceTemplate("a note", "notes://{name}{?kind}", "text/plain", description="A note.")
    assert entry.takes == {"name", "kind"}
    found = entry.match("notes://to%20buy?kind=done")
    assert found == {"name": "to buy", "kind": "done"}
    assert entry.prepare(CTX, found, "notes://to%20buy?kind=done")() == "to buy done"
    assert entry.prepare(CTX, {"name": "x"}, "notes://x")() == "x todo"


@req("res-10")
@pytest.mark.parametrize(
    "uri",
    [
        "notes://",
        "notes://a/b",
        "notes://..",
        "notes://%2e%2e",
        "notes://a%00b",
        "notes://a%2Fb",
        "notes://a%zz",
        "notes://\ud800",
        "notes://a?kind=other",  # not in the Literal
        "notes://a?kind=todo&kind=todo",
        "notes://a?more=1",
        "other://a",
        "",
    ],
)
def test_a_uri_that_does_not_fit_a_template_is_not_found(uri: str) -> None:
    catalog = Catalog()
    catalog.add(entries.resource_of(note, "notes://{name}{?kind}"))
    assert catalog.find_resource("notes://a?kind=todo") is not None
    assert catalog.find_resource(uri) is None


def test_a_template_refuses_variables_that_did_not_match() -> None:
    entry = entries.resource_of(note, "notes://{name}{?kind}")
    with pytest.raises(BadArguments, match=r"^/kind: must be one of"):
        entry.prepare(CTX, {"name": "a", "kind": "other"}, "notes://a?kind=other")


@req("res-22")
def test_a_raw_template() -> None:
    said = ResourceTemplate("files", "file:///{+path}", "text/plain")
    entry = raw_template(said, given, cache=CacheHints(1))
    assert (entry.model, entry.mime_type, entry.cache, entry.takes) == (said, "text/plain", CacheHints(1), {"path"})
    variables = entry.match("file:///a/b")
    assert variables == {"path": "a/b"}
    assert entry.prepare(CTX, variables, "file:///a/b")() == (CTX, "file:///a/b", {"path": "a/b"})
    everything = raw_template(ResourceTemplate("all", "{+uri}"), given)
    assert everything.match("any://thing") == {"uri": "any://thing"}


@req("prm-17")
def test_a_prompt_is_derived_from_its_function() -> None:
    prompt = entries.prompt_of(review, title="Review", icons=ICONS, meta=META, replay=True, thread=False)
    assert prompt.kind == "prompts"
    assert prompt.model == Prompt(
        "review",
        [PromptArgument("code", "what to read", True, title="The code"), PromptArgument("size", None, False)],
        title="Review",
        description="Review some code.",
        icons=ICONS,
        meta=META,
    )
    assert (prompt.key, prompt.description, prompt.replay) == ("review", "Review some code.", True)
    assert prompt.takes == {"code", "size"}
    assert prompt.prepare(CTX, {"code": "x", "size": "large"})() == "x LARGE"
    assert entries.prompt_of(today).model == Prompt("today")


@req("prm-08", "prm-09", "prm-17")
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, 'arguments: lacks the member "code"'),
        ({"code": 1}, "/code: must be of type string, not an integer"),
        ({"code": None}, "/code: must be of type string, not null"),
        ({"code": "x", "more": "y"}, '/more: is not allowed; the allowed names are "code", "size"'),
    ],
)
def test_the_arguments_of_a_prompt_are_checked(arguments: Any, problem: str) -> None:
    said = Prompt("review", [PromptArgument("code", required=True), PromptArgument("size")], description="D")
    by_hand = raw_prompt(said, given)
    assert by_hand.prepare(CTX, {"code": "x"})() == (CTX, {"code": "x"})
    assert (by_hand.model, by_hand.description, by_hand.takes) == (said, "D", {"code", "size"})
    for prompt in (by_hand, entries.prompt_of(review)):
        with pytest.raises(BadArguments) as caught:
            prompt.prepare(CTX, arguments)
        assert caught.value.problems == [problem]


def test_a_raw_prompt_without_arguments_takes_none() -> None:
    prompt = raw_prompt(Prompt("hello"), given)
    assert prompt.prepare(CTX, {})() == (CTX, {})
    with pytest.raises(BadArguments, match=r"^/a: is not allowed; no members are allowed$"):
        prompt.prepare(CTX, {"a": "b"})


# Refused registrations.

Make = Callable[[], Any]


def function_named(name: str) -> Callable[..., Any]:
    """A function with this name."""

    def function() -> None: ...

    function.__name__ = name
    return function


class Nameless:
    def __call__(self) -> None: ...


@req("tool-17")
@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x" * 128, "9"])
def test_valid_names_of_tools(name: str) -> None:
    assert entries.tool_of(today, name=name).key == name
    assert entries.tool_of(function_named(name)).key == name
    assert raw_tool(Tool(name, SCHEMA), given).key == name


@req("tool-17")
@pytest.mark.parametrize("name", ["x" * 129, "get weather", "a,b", "Wetter für Oslo", "a/b", "a:b", "a\n", "<lambda>"])
def test_invalid_names_of_tools_are_refused(name: str) -> None:
    for make in (
        lambda: entries.tool_of(today, name=name),
        lambda: entries.tool_of(function_named(name)),
        lambda: raw_tool(Tool(name, SCHEMA), given),
    ):
        with pytest.raises(
            UsageError,
            match=r"^the name of a tool must have 1 to 128 of the characters A-Z a-z 0-9 _ - \., "
            r"got .*; give name=\.\.\.$",
        ):
            make()


def other(name: str, more: str = "") -> None: ...


NAMES: dict[str, tuple[Make, str]] = {
    "empty": (lambda: entries.tool_of(today, name=""), "the name of a tool must be a str and not empty, got ''"),
    "no text": (lambda: entries.prompt_of(today, name=3), "the name of a prompt must be a str and not empty, got 3"),  # type: ignore[arg-type]
    "no name": (
        lambda: entries.resource_of(Nameless(), "a:b"),
        "an object of Nameless has no name; give name=... for the resource",
    ),
    "empty, raw": (
        lambda: raw_prompt(Prompt(""), given),
        "the name of a Prompt must be a str and not empty, got ''",
    ),
}
DETAILS: dict[str, tuple[Make, str]] = {
    "title": (lambda: entries.tool_of(today, title=1), "the title of the tool 'today' must be text, not int"),  # type: ignore[arg-type]
    "description": (
        lambda: entries.prompt_of(today, description=b"x"),  # type: ignore[arg-type]
        "the description of the prompt 'today' must be text, not bytes",
    ),
    "mime type": (
        lambda: entries.resource_of(today, "a:b", mime_type="text"),
        "the mime_type of the resource 'today' must be like text/plain, not 'text'",
    ),
    "mime type, raw": (
        lambda: raw_resource(Resource("n", "a:b", "text/"), given),
        "the mime_type of the Resource 'n' must be like text/plain, not 'text/'",
    ),
    "size": (
        lambda: entries.resource_of(today, "a:b", size=-1),
        "the size of the resource 'today' must be a number of bytes, got -1",
    ),
    "size, no number": (
        lambda: raw_resource(Resource("n", "a:b", size=True), given),
        "the size of the Resource 'n' must be a number of bytes, got True",
    ),
    "size of many": (
        lambda: entries.resource_of(note, "a:{name}{?kind}", size=3),
        "the resources of the template 'a:{name}{?kind}' have different sizes; drop size=3",
    ),
    "icons": (
        lambda: entries.tool_of(today, icons="https://example.com/a.png"),  # type: ignore[arg-type]
        "the icons of the tool 'today' must be a list of Icon objects",
    ),
    "icons, one": (
        lambda: entries.prompt_of(today, icons=ICONS[0]),  # type: ignore[arg-type]
        "the icons of the prompt 'today' must be a list of Icon objects",
    ),
    "annotations": (
        lambda: entries.tool_of(today, annotations={"readOnlyHint": True}),  # type: ignore[arg-type]
        "the annotations of the tool 'today' must be ToolAnnotations, not dict",
    ),
    "annotations of a resource": (
        lambda: entries.resource_of(today, "a:b", annotations=ToolAnnotations()),  # type: ignore[arg-type]
        "the annotations of the resource 'today' must be Annotations, not ToolAnnotations",
    ),
    "annotations, raw": (
        lambda: raw_tool(Tool("t", SCHEMA, annotations=Annotations()), given),  # type: ignore[arg-type]
        "the annotations of the Tool 't' must be ToolAnnotations, not Annotations",
    ),
    "meta": (
        lambda: entries.tool_of(today, meta=[]),  # type: ignore[arg-type]
        "the meta of the tool 'today' must be a mapping, not list",
    ),
    "meta key": (
        lambda: entries.tool_of(today, meta={"io.modelcontextprotocol/x": 1}),
        "'io.modelcontextprotocol/x' in _meta has a prefix reserved by 2026-07-28; use your own: com.example/name",
    ),
    "meta key, raw": (
        lambda: raw_template(ResourceTemplate("n", "a:{b}", meta={"a b": 1}), given),
        "'a b' must end with letters, digits, hyphens, underscores and dots, or with the slash",
    ),
    "cache": (
        lambda: entries.resource_of(today, "a:b", cache=60),  # type: ignore[arg-type]
        "the cache of the resource 'today' must be CacheHints, not int",
    ),
    "cache, raw": (
        lambda: raw_resource(Resource("n", "a:b"), given, cache={}),  # type: ignore[arg-type]
        "the cache of the Resource 'n' must be CacheHints, not dict",
    ),
    "cache of a raw template": (
        lambda: raw_template(ResourceTemplate("n", "a:{b}"), given, cache={}),  # type: ignore[arg-type]
        "the cache of the ResourceTemplate 'n' must be CacheHints, not dict",
    ),
    "object": (
        lambda: raw_tool({"name": "x"}, given),  # type: ignore[arg-type]
        "expected a Tool object, got dict",
    ),
    "other object": (
        lambda: raw_template(Resource("n", "a:b"), given),  # type: ignore[arg-type]
        "expected a ResourceTemplate object, got Resource",
    ),
}
SIGNATURES: dict[str, tuple[Make, str]] = {
    "positional": (
        lambda: entries.tool_of(eval("lambda a, /: a"), name="t"),
        "parameter 'a' of <lambda> is positional-only; declare each argument as a named parameter",
    ),
    "starred": (
        lambda: entries.tool_of(given),
        "parameter 'everything' of given is variadic positional; declare each argument as a named parameter",
    ),
    "raw": (
        lambda: raw_tool(Tool("t", SCHEMA), today),
        "today is called by position, with (ctx, arguments), but takes () -> 'str': too many positional arguments",
    ),
    "raw resource": (
        lambda: raw_resource(Resource("n", "a:b"), today),
        "today is called by position, with (ctx, uri), but takes () -> 'str': too many positional arguments",
    ),
    "raw template": (
        lambda: raw_template(ResourceTemplate("n", "a:{b}"), today),
        "today is called by position, with (ctx, uri, variables), but takes () -> 'str': too many positional arguments",
    ),
    "raw prompt": (
        lambda: raw_prompt(Prompt("n"), today),
        "today is called by position, with (ctx, arguments), but takes () -> 'str': too many positional arguments",
    ),
    "completion": (
        lambda: entries.completer_of(note),
        "parameter 'name' of note is not a parameter of completions; these are value, arguments, argument, ref and a "
        "Context",
    ),
    "prompt": (
        lambda: entries.prompt_of(forecast),
        "parameter 'days' of forecast: the arguments of a prompt are text; make it str, str | None, a Literal of "
        "strings or an Enum of strings, and convert it in the function",
    ),
    "template": (
        lambda: entries.resource_of(forecast, "a:{city}{?days}"),
        "parameter 'days' of forecast: the variables of a URI template are text; make it str, str | None, a Literal "
        "of strings or an Enum of strings, and convert it in the function",
    ),
}
URIS: dict[str, tuple[Make, str]] = {
    "parameter without a place": (
        lambda: entries.resource_of(note, "notes://all"),
        "parameter 'name' of note is not in the URI 'notes://all'; write {name} into the URI, or drop the parameter",
    ),
    "parameter without a variable": (
        lambda: entries.resource_of(other, "notes://{name}"),
        "parameter 'more' of other is not in the URI template 'notes://{name}'; write {more} or {?more} into the "
        "template, or drop the parameter",
    ),
    "variable without a parameter": (
        lambda: entries.resource_of(other, "notes://{name}/{more}/{id}"),
        "the URI template 'notes://{name}/{more}/{id}' has 'id', which other does not take; add the parameter",
    ),
    "optional variable": (
        lambda: entries.resource_of(other, "notes://{more}{?name}"),
        "'name' may be absent from the URIs of the URI template 'notes://{more}{?name}'; give the parameter of other a "
        "default",
    ),
    "no template": (
        lambda: entries.resource_of(other, "notes://{name"),
        "the URI template 'notes://{name' has an unpaired brace",
    ),
    "guesswork": (
        lambda: entries.resource_of(other, "notes://{name}{more}"),
        "the URI template 'notes://{name}{more}' cannot be matched: the value before {more} has no delimiter after it; "
        "put one of :/?#[]@!$&'()*+,;= there",
    ),
    "no scheme": (
        lambda: entries.resource_of(other, "notes/{name}/{more}"),
        "the URI template 'notes/{name}/{more}' must begin with a scheme, such as notes://{name}",
    ),
    "no scheme, raw": (
        lambda: raw_template(ResourceTemplate("n", "/{name}"), given),
        "the URI template '/{name}' must begin with a scheme, such as notes://{name}",
    ),
    "no variables": (
        lambda: raw_template(ResourceTemplate("n", "notes://all"), given),
        "'notes://all' has no variables; register it as a resource",
    ),
}
SCHEMAS: dict[str, tuple[Make, str]] = {
    "root": (
        lambda: raw_tool(Tool("t", {}, raw={}), given),
        'the input schema of the tool \'t\': an input schema needs "type": "object" at its root',
    ),
    "input": (
        lambda: raw_tool(Tool("t", {"type": "object", "required": 1}), given),
        "the input schema of the tool 't': the schema is not valid under https://json-schema.org/draft/2020-12/schema "
        'at /required: 1 is not of type "array"',
    ),
    "reference": (
        lambda: raw_tool(Tool("t", {"type": "object", "$ref": "https://example.com/s"}), given),
        "the input schema of the tool 't': ",
    ),
    "output": (
        lambda: raw_tool(Tool("t", SCHEMA, output_schema={"type": "objekt"}), given),
        "the output schema of the tool 't': the schema is not valid under https://json-schema.org/draft/2020-12/schema",
    ),
    "header": (
        lambda: raw_tool(
            Tool("t", {"type": "object", "properties": {"a": {"type": "array", "x-mcp-header": "A"}}}), given
        ),
        "the tool 't' cannot have its arguments in headers: x-mcp-header at /properties/a: a property of type 'array' "
        "cannot be mirrored, only string, integer, boolean",
    ),
    "prompt argument": (
        lambda: raw_prompt(Prompt("p", [{"name": "a"}]), given),  # type: ignore[list-item]
        "the arguments of the prompt 'p' must be PromptArgument objects, each with a name of its own",
    ),
    "prompt argument twice": (
        lambda: raw_prompt(Prompt("p", [PromptArgument("a"), PromptArgument("a")]), given),
        "the arguments of the prompt 'p' must be PromptArgument objects, each with a name of its own",
    ),
    "prompt argument without a name": (
        lambda: raw_prompt(Prompt("p", [PromptArgument("")]), given),
        "the arguments of the prompt 'p' must be PromptArgument objects, each with a name of its own",
    ),
}
REFUSED = {
    f"{group}: {name}": case
    for group, cases in [
        ("name", NAMES),
        ("detail", DETAILS),
        ("signature", SIGNATURES),
        ("uri", URIS),
        ("schema", SCHEMAS),
    ]
    for name, case in cases.items()
}


@req("tool-16")
@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_refused_at_registration(make: Make, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value).startswith(why)


def test_a_return_hint_without_a_schema_needs_structured_false() -> None:
    def parts() -> complex:
        return 1j

    with pytest.raises(UsageError, match=r"^the tool 'parts': .*complex"):
        entries.tool_of(parts)
    assert entries.tool_of(parts, structured=False).model.output_schema is None  # type: ignore[attr-defined]


def test_the_error_of_a_bad_schema_keeps_its_reason() -> None:
    with pytest.raises(InvalidSchema) as caught:
        raw_tool(Tool("t", {"type": "object", "$schema": "urn:mine"}), given)
    assert caught.value.reason == "dialect"


def test_a_marked_argument_of_an_unsupported_type_is_refused() -> None:
    def query(texts: Annotated[list[str], Field(header="Texts")]) -> None: ...

    with pytest.raises(UsageError, match=r"^the tool 'query' cannot have its arguments in headers: x-mcp-header"):
        entries.tool_of(query)


@req("res-25")
@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        (Annotations(["user", "robot"]), "the audience of the resource 'today' must be a list of user and assistant"),  # type: ignore[list-item]
        (
            Annotations(last_modified="yesterday"),
            "the last_modified of the resource 'today' must be ISO 8601, such as 2025-06-18T15:00:00Z, not 'yesterday'",
        ),
    ],
)
def test_annotations_of_resources_are_checked(annotations: Annotations, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        entries.resource_of(today, "a:b", annotations=annotations)
    assert str(caught.value) == why
    with pytest.raises(UsageError):
        raw_template(ResourceTemplate("n", "a:{b}", annotations=annotations), given)


@req("res-25")
@pytest.mark.parametrize("moment", ["2025-06-18", "2025-06-18T15:00:00Z", "2025-06-18T15:00:00.5+02:00", None])
def test_valid_annotations_of_resources_are_kept(moment: str | None) -> None:
    annotations = Annotations(["user", "assistant"], 1, moment)
    assert entries.resource_of(today, "a:b", annotations=annotations).model.annotations == annotations  # type: ignore[attr-defined]


@req("res-13")
@pytest.mark.parametrize(
    "uri",
    [
        "notes://today", "file:///a/b.txt", "https://user:pw@example.com:8080/a?b=c#d", "urn:isbn:0451450523",
        "mailto:a@b.example", "x-my.scheme+1:", "a:/b/c", "db://[::1]/table", "db://[v1.x]:5432", "a://h?q", "a://h#f",
        "notes://to%20do", "tel:+47-1", "a:b:c@d/e?f/g?h#i/j?k", "s://(a)*!$&',;=",
    ],
)  # fmt: skip
def test_valid_uris_of_rfc_3986_are_accepted(uri: str) -> None:
    assert entries.resource_of(today, uri).key == uri
    assert raw_resource(Resource("n", uri), given).key == uri


@req("res-13")
@pytest.mark.parametrize(
    "uri",
    [
        "", "today", "/a/b", "//host/a", "1a:b", "a b:c", "-a:b", "a_b:c", "notes://to do", "notes://å", "a:b\n",
        "a:%zz", "a:%2", "a:b\\c", "a:<b>", 'a:"', "a:b|c", "a:^", "a:`", "a://[::1", "a://h:port/", "a://u@v@h/",
        "a:b#c#d", "a:[b]", "notes://a}", ":b",
    ],
)  # fmt: skip
def test_invalid_uris_are_refused(uri: str) -> None:
    for make in (lambda: entries.resource_of(today, uri), lambda: raw_resource(Resource("n", uri), given)):
        with pytest.raises(UsageError, match=r"is not an absolute URI \(RFC 3986\): it needs a scheme, such"):
            make()


def test_a_uri_that_is_no_string_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^None is not an absolute URI"):
        entries.resource_of(today, None)  # type: ignore[arg-type]
