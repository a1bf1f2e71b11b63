"""Handlers: how each kind of callable is run and called, and which callables are refused."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest

# Hints name the class by its module, as programs may.
import trio_mcp.server.context
from trio_mcp.core import UsageError, name_of
from trio_mcp.server import Context, RunMode, handlers, raw, typed

if TYPE_CHECKING:
    from trio_mcp.server import Context as HiddenContext
    from trio_mcp.server import Context as Other

CTX: Any = object()


def plain(city: str) -> str:
    return city


async def coroutine(city: str) -> str:
    return city


def passed_through(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return list(function(*args, **kwargs))

    return wrapper


def numbers(city: str) -> Iterator[int]:
    yield 1


async def async_numbers(city: str) -> AsyncIterator[int]:
    yield 1


class Weather:
    def read(self, city: str) -> str:
        return city

    async def fetch(self, city: str) -> str:
        return city

    @classmethod
    async def of_class(cls, city: str) -> str:
        return city

    @staticmethod
    async def static(city: str) -> str:
        return city

    def __call__(self, city: str) -> str:
        return city


class Forecast:
    def __init__(self, city: str) -> None:
        self.city = city


class AsyncWeather:
    async def __call__(self, city: str) -> str:
        return city


class ObjectDecorator:
    """A decorator that replaces the function by an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


KINDS: dict[str, tuple[Callable[..., Any], RunMode]] = {
    "a function": (plain, RunMode.THREAD),
    "a coroutine function": (coroutine, RunMode.ASYNC),
    "a lambda": (lambda city: city, RunMode.THREAD),
    "a partial of a class": (functools.partial(Forecast), RunMode.THREAD),
    "a partial": (functools.partial(plain), RunMode.THREAD),
    "an async partial": (functools.partial(coroutine, "Oslo"), RunMode.ASYNC),
    "a partial of a partial": (functools.partial(functools.partial(coroutine), city="Oslo"), RunMode.ASYNC),
    "a method": (Weather().read, RunMode.THREAD),
    "an async method": (Weather().fetch, RunMode.ASYNC),
    "an async method of a class": (Weather.of_class, RunMode.ASYNC),
    "an async static method": (Weather.static, RunMode.ASYNC),
    "a static method not yet in its class": (staticmethod(coroutine), RunMode.ASYNC),
    "an object": (Weather(), RunMode.THREAD),
    "an async object": (AsyncWeather(), RunMode.ASYNC),
    "a partial of an async object": (functools.partial(AsyncWeather(), "Oslo"), RunMode.ASYNC),
    "a decorated function": (passed_through(plain), RunMode.THREAD),
    "a decorated coroutine function": (passed_through(coroutine), RunMode.ASYNC),
    "one that is decorated twice": (passed_through(passed_through(coroutine)), RunMode.ASYNC),
    "one that is decorated by an object": (ObjectDecorator(coroutine), RunMode.ASYNC),
    "a function made async by its decorator": (awaited(plain), RunMode.ASYNC),
    "a cached coroutine function": (functools.lru_cache(coroutine), RunMode.ASYNC),
    "a cached function": (functools.cache(plain), RunMode.THREAD),
    "a generator made a list by its decorator": (collected(numbers), RunMode.THREAD),
    "a built-in function": (len, RunMode.THREAD),
}
EACH_KIND = pytest.mark.parametrize(("function", "how"), KINDS.values(), ids=KINDS)


@EACH_KIND
def test_the_run_mode_of_a_wrapped_callable_is_found(function: Callable[..., Any], how: RunMode) -> None:
    assert typed(function).how is how
    if how is RunMode.THREAD:
        assert typed(function, thread=False).how is RunMode.INLINE
        assert typed(function).abandon_on_cancel
        assert not typed(function, abandon_on_cancel=False).abandon_on_cancel


@pytest.mark.parametrize("option", ["thread", "abandon_on_cancel"])
@pytest.mark.parametrize(
    "function", [function for function, how in KINDS.values() if how is RunMode.ASYNC][:8], ids=name_of
)
def test_options_for_threads_are_refused_for_async_functions(function: Callable[..., Any], option: str) -> None:
    with pytest.raises(UsageError, match=rf"is async, so no thread runs it; drop {option}=False, or the async"):
        typed(function, **{option: False})


def test_a_class_is_refused_with_a_hint() -> None:
    why = r"^Forecast is a class, .*; register a method of an object, such as Forecast\(...\).run, or a function"
    with pytest.raises(UsageError, match=why):
        typed(Forecast)


def test_abandon_on_cancel_is_refused_without_a_thread() -> None:
    with pytest.raises(
        UsageError, match=r"^plain has thread=False, so no thread runs it; drop abandon_on_cancel=False$"
    ):
        typed(plain, thread=False, abandon_on_cancel=False)


@pytest.mark.parametrize(
    "function", [numbers, async_numbers, functools.partial(numbers), functools.partial(async_numbers)], ids=name_of
)
def test_generators_are_refused(function: Callable[..., Any]) -> None:
    for make in (typed, lambda it: raw(it, ("city",))):
        with pytest.raises(
            UsageError, match=r"numbers is a generator function, whose call returns only a generator; return all"
        ):
            make(function)


def test_an_object_that_is_not_callable_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^a handler must be a function or another callable, got dict$"):
        typed({})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got classmethod"):  # @server.tool above @classmethod
        typed(vars(Weather)["of_class"])


def test_a_callable_without_a_signature_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^dict\.update has no signature: .*; wrap it in a function"):
        typed({}.update)

    @functools.wraps(plain)
    def circular() -> None: ...

    circular.__wrapped__ = circular  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"^plain has no signature: wrapper loop"):
        typed(circular)


def test_a_method_without_its_object_is_refused_with_a_hint() -> None:
    with pytest.raises(
        UsageError,
        match=r"^parameter 'self' of Weather\.read would be an argument: this is a method without its object; register",
    ):
        typed(Weather.read)


def test_self_with_a_type_hint_is_an_ordinary_argument() -> None:
    def name(self: str) -> str:
        return self

    assert typed(name).bind(CTX, {"self": "me"})() == "me"


# The context.


def unannotated(city: str, ctx) -> Any:  # type: ignore[no-untyped-def]
    return ctx


def annotated(city: str, *, context: Context) -> Any:
    return context


def first(it: Context, city: str) -> Any:
    return it


def qualified(city: str, it: trio_mcp.server.context.Context) -> Any:
    return it


def optional(city: str, it: Context | None = None) -> Any:
    return it


def old_optional(city: str, it: Optional[Context] = None) -> Any:  # noqa: UP045
    return it


def noted(city: str, it: Annotated[Context, "who asks"]) -> Any:
    return it


def hidden(city: str, it: HiddenContext) -> Any:
    return it


def hidden_in_module(city: str, it: handlers.Context) -> Any:  # type: ignore[name-defined]
    return it


def hidden_optional(city: str, it: HiddenContext | None = None) -> Any:
    return it


def hidden_after_none(city: str, it: None | HiddenContext = None) -> Any:  # noqa: RUF036
    return it


def hidden_in_optional(city: str, it: Optional[HiddenContext] = None) -> Any:  # noqa: UP045
    return it


def hidden_with_parameter(city: str, it: HiddenContext[int]) -> Any:  # type: ignore[type-arg]
    return it


class MyContext(Context):
    pass


def subclass(city: str, it: MyContext) -> Any:
    return it


def of_evaluated(hint: Any) -> Callable[..., Any]:
    """A function with evaluated hints, as without `from __future__ import annotations`."""

    def function(city: str, it: Any) -> Any:
        return it

    function.__annotations__ |= {"city": str, "it": hint}
    return function


class Asking:
    def ask(self, city: str, ctx: Context) -> Any:
        return ctx

    def __call__(self, city: str, ctx: Context) -> Any:
        return ctx


@pytest.mark.parametrize(
    "function",
    [
        unannotated,
        annotated,
        first,
        qualified,
        optional,
        old_optional,
        noted,
        hidden,
        hidden_in_module,
        hidden_optional,
        hidden_after_none,
        hidden_in_optional,
        hidden_with_parameter,
        subclass,
        Asking().ask,
        Asking(),
        passed_through(annotated),
        functools.partial(annotated),
        of_evaluated(Context),
        of_evaluated(Context | None),
        of_evaluated(Optional["HiddenContext"]),
        of_evaluated("HiddenContext"),
        of_evaluated(Annotated["HiddenContext | None", "who asks"]),
    ],
    ids=lambda function: (
        f"{name_of(function)}-{function.__annotations__.get('it', '')}"
        if hasattr(function, "__annotations__")
        else name_of(function)
    ),
)
def test_the_context_is_found(function: Callable[..., Any]) -> None:
    handler = typed(function)
    assert handler.context in ("ctx", "context", "it")
    assert handler.skip == {handler.context}
    assert handler.bind(CTX, {"city": "Oslo"})() is CTX


def text_named_ctx(city: str, ctx: str) -> Any:
    return ctx


def other_class(city: str, it: int) -> Any:
    return it


def unresolvable(city: str, it: Other) -> Any:
    return it


def one_of_two(city: str, it: Context | str) -> Any:
    return it


def lists_of_them(city: str, it: list[HiddenContext]) -> Any:
    return it


def starred(city: str, *ctx, **context: Context) -> Any:  # type: ignore[no-untyped-def]
    return ctx


@pytest.mark.parametrize(
    "function", [text_named_ctx, other_class, unresolvable, one_of_two, lists_of_them, starred], ids=name_of
)
def test_a_parameter_of_another_type_stays_an_argument(function: Callable[..., Any]) -> None:
    handler = typed(function)
    assert handler.context is None
    assert handler.skip == set()
    if function is not starred:
        assert (
            handler.bind(CTX, {"city": "Oslo", "it": 1} if function is not text_named_ctx else {"city": "", "ctx": 1})()
            == 1
        )


def test_two_contexts_are_refused() -> None:
    def twice(ctx, context: Context) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(
        UsageError,
        match=r"the parameters 'ctx' and 'context' of test_two.*twice both take the Context; keep one of them$",
    ):
        typed(twice)


def test_a_positional_only_context_is_refused() -> None:
    def placed(ctx: Context, /, city: str) -> None: ...

    with pytest.raises(
        UsageError,
        match=r"^parameter 'ctx' of .*placed is positional-only, but the Context is given by name; make it an ordinary",
    ):
        typed(placed)


def test_parameters_bound_by_a_partial_are_no_arguments() -> None:
    def query(database: str, city: str, ctx=None) -> Any:  # type: ignore[no-untyped-def]
        return database, city, ctx

    handler = typed(functools.partial(functools.partial(query, database="main"), ctx=3))
    assert handler.skip == {"database", "ctx"}
    assert handler.context is None
    assert handler.bind(CTX, {"city": "Oslo"})() == ("main", "Oslo", 3)


def test_a_function_without_a_context_gets_its_arguments_only() -> None:
    assert typed(plain).bind(CTX, {"city": "Oslo"}, "ignored")() == "Oslo"


# Raw handlers.


def three(ctx: Any, uri: str, variables: Any) -> Any:
    return ctx, uri, variables


@pytest.mark.parametrize(
    "function",
    [
        three,
        lambda *everything: everything,
        lambda ctx, *rest: (ctx, *rest),
        lambda ctx, uri, variables, more=1, **others: (ctx, uri, variables),
        functools.partial(lambda database, *rest: rest, "main"),
        passed_through(three),
    ],
)
def test_a_raw_handler_gets_all_values_by_position(function: Callable[..., Any]) -> None:
    handler = raw(function, ("ctx", "uri", "variables"))
    assert (handler.how, handler.abandon_on_cancel, handler.context, handler.skip) == (
        RunMode.THREAD,
        True,
        None,
        set(),
    )
    assert handler.bind(CTX, {"ignored": 1}, "a:b", {"x": "y"})() == (CTX, "a:b", {"x": "y"})


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda ctx: 0, r"but takes \(ctx\): too many positional arguments$"),
        (lambda ctx, uri, more: 0, r"but takes \(ctx, uri, more\): missing a required argument: 'more'$"),
        (lambda ctx, uri, *, key: 0, r"but takes \(ctx, uri, \*, key\): missing a required (keyword-only )?argument"),
    ],
)
def test_a_raw_handler_with_other_parameters_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(UsageError, match=r"<lambda> is called by position, with \(ctx, uri\), " + why):
        raw(function, ("ctx", "uri"))


def test_raw_handlers_have_the_same_run_modes() -> None:
    async def fetch(ctx: Any) -> None: ...

    assert raw(fetch, ("ctx",)).how is RunMode.ASYNC
    assert raw(lambda ctx: 0, ("ctx",), thread=False).how is RunMode.INLINE
    assert not raw(lambda ctx: 0, ("ctx",), abandon_on_cancel=False).abandon_on_cancel


def test_an_object_without_a_name_is_named_by_its_class() -> None:
    assert name_of(Weather()) == "an object of Weather"
    assert name_of(functools.partial(Weather().read)) == "Weather.read"
