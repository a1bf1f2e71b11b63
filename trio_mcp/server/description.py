"""Check the options of `Server`, and convert them to objects of the protocol.

All functions raise `UsageError` for an invalid option; the message names the valid values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trio_mcp.core.errors import UsageError, shown
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.revisions import REVISIONS, Revision
from trio_mcp.server.catalog import LISTS

if TYPE_CHECKING:
    from trio_mcp.core.caching import CacheHints
    from trio_mcp.core.content import Icon

__all__ = [
    "CAPABILITIES", "check_cache", "check_hooks", "check_list", "check_numbers", "check_switches", "experimental_of",
    "info_of", "kind_of", "offers_of", "revisions_of", "text_of",
]  # fmt: skip

# The capabilities that a server declares, with the notifications of each.  Every server may log.
CAPABILITIES: Mapping[str, Sequence[str]] = {
    "tools": ("listChanged",),
    "prompts": ("listChanged",),
    "resources": ("listChanged", "subscribe"),
    "completions": (),
}


def kind_of(thing: object) -> str:
    """Describe a wrong argument for an error message, without its value, which may be a secret."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return "a function" if inspect.isroutine(thing) else type(thing).__name__


def text_of(option: str, text: str | None) -> str | None:
    """Check an option that must be text or None."""
    if text is not None and not isinstance(text, str):
        raise UsageError(f"the {option} of a server must be text, got {type(text).__name__}")
    return text


def info_of(
    name: str,
    version: str,
    title: str | None,
    description: str | None,
    website_url: str | None,
    icons: Sequence[Icon] | None,
) -> JsonObject:
    """Make the identity of a server (`serverInfo`)."""
    given = {"name": name, "version": version, "title": title, "description": description, "websiteUrl": website_url}
    if not name:
        raise UsageError("a server needs a name, which clients show")
    info: JsonObject = {key: text for key, value in given.items() if (text := text_of(key, value)) is not None}
    if icons is not None:
        from trio_mcp.core.codec import to_json
        from trio_mcp.core.content import Icon
        from trio_mcp.core.revisions import LATEST

        if not all(isinstance(icon, Icon) for icon in icons):
            raise UsageError("the icons of a server must be a list of Icon objects")
        info["icons"] = [to_json(icon, LATEST) for icon in icons]
    return info


def check_list(option: str, names: Collection[str]) -> None:
    """Raise UsageError for a str, which is a collection of letters."""
    if isinstance(names, str):
        raise UsageError(f"{option} must be a list, also of one name: {option}=[{shown(names)}]")


def revisions_of(names: Collection[str]) -> list[Revision]:
    check_list("revisions", names)
    for name in names:
        if name not in REVISIONS:
            raise UsageError(f"unknown revision {name!r}; the revisions are {', '.join(REVISIONS)}")
    return [REVISIONS[name] for name in names]


def offers_of(names: Collection[str]) -> frozenset[str]:
    check_list("capabilities", names)
    for name in names:
        if name not in CAPABILITIES:
            raise UsageError(f"unknown capability {name!r}; the capabilities are {', '.join(CAPABILITIES)}")
    return frozenset(names)


def experimental_of(given: Mapping[str, Mapping[str, Any]] | None) -> JsonObject:
    """Return the experimental capability, if there is one.  Its content is checked when it is declared."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"experimental must be a mapping by name, got {kind_of(given)}")
    return {"experimental": dict(given)}


def check_switches(**switches: bool) -> None:
    for name, on in switches.items():
        if not isinstance(on, bool):
            raise UsageError(f"{name} must be True or False, got {on!r}")


def check_numbers(page_size: int | None, change_debounce: float, threads: int) -> None:
    if page_size is not None and (type(page_size) is not int or page_size < 1):
        raise UsageError(f"page_size must be a number of items, 1 or more, or None for one page, got {page_size!r}")
    if type(change_debounce) not in (int, float) or not 0 <= change_debounce < math.inf:
        raise UsageError(f"change_debounce must be a number of seconds, 0 or more, got {change_debounce!r}")
    if type(threads) is not int or threads < 1:
        raise UsageError(f"threads must be a number of threads, 1 or more, got {threads!r}")


def check_hooks(lifespan: Any, middleware: Any, filter: Any) -> None:
    if not isinstance(middleware, Sequence) or not all(map(callable, middleware)):
        raise UsageError(f"middleware must be a list of async def (ctx, request, call_next), got {kind_of(middleware)}")
    for name, hook in (("lifespan", lifespan), ("filter", filter)):
        if hook is not None and not callable(hook):
            raise UsageError(f"{name} must be a function, got {type(hook).__name__}")
    for each in middleware:
        _check_call("middleware", each, "ctx", "request", "call_next")
    _check_call("lifespan", lifespan, "server")
    _check_call("filter", filter, "principal", "item")
    if inspect.iscoroutinefunction(filter) or inspect.iscoroutinefunction(type(filter).__call__):
        raise UsageError("filter must be a plain function, got an async function; it cannot wait")


def _check_call(option: str, hook: Any, *given: str) -> None:
    """Raise UsageError for a function with other parameters, as hooks of other packages have them."""
    if hook is None:
        return
    try:
        inspect.signature(hook).bind(*given)
    except TypeError as error:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise UsageError(
            f"{option} is called with ({', '.join(given)}), but {name} has other parameters: {error}"
        ) from None
    except ValueError:  # some builtins have no signature
        return


def check_cache(cache: Mapping[str, CacheHints]) -> None:
    if not cache:
        return
    from trio_mcp.core.caching import CacheHints

    for method, hints in cache.items():
        if method not in LISTS:
            raise UsageError(f"cache: unknown list {method!r}; the lists are {', '.join(LISTS)}")
        if not isinstance(hints, CacheHints):
            raise UsageError(f"cache: the hints for {method} must be CacheHints, not {type(hints).__name__}")
