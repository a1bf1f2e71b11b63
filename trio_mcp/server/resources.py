"""Resources and resource templates: how they are made from functions, and the results of their handlers.

An empty list that a resource returns is data, `[]`.  A missing resource is `ResourceNotFound`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from trio_mcp.core.errors import UsageError, name_of
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.schema.templates import Matcher
from trio_mcp.server.entries import Entry, ResourceOptions, described_as, read_function
from trio_mcp.server.prompts import text_arguments
from trio_mcp.server.results import (
    SCHEME,
    HandlerFault,
    blob,
    is_mime_type,
    json_text,
    model_class,
    with_uri,
    written,
)

if TYPE_CHECKING:
    from trio_mcp.core.revisions import Revision

__all__ = ["resource_of", "resource_result"]

# RFC 3986, appendix A.
_PLAIN = r"[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_PATH = rf"(?:{_PLAIN}|[:@/])*"
_LITERAL = r"\[(?:[0-9A-Fa-f:.]+|[Vv][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]"  # [::1]
_AUTHORITY = rf"(?:(?:{_PLAIN}|:)*@)?(?:{_LITERAL}|(?:{_PLAIN})*)(?::[0-9]*)?"
_REST = rf"(?:{_PLAIN}|[:@/?])*"
_URI = rf"{SCHEME}(?://{_AUTHORITY}(?:/{_PATH})?|(?!//){_PATH})(?:\?{_REST})?(?:#{_REST})?"


def resource_of(function: Callable[..., Any], uri: str, **options: Unpack[ResourceOptions]) -> Entry:
    """Make a resource that the function reads, or a resource template if `uri` is an RFC 6570 template.

    The variables of a template are the function's parameters.
    """
    name, handler, details = read_function(function, "resource", options, ResourceOptions)
    check_contents(f"the resource {name!r}", options)
    arguments = text_arguments(function, handler, "the variables of a URI template")
    if not (isinstance(uri, str) and "{" in uri):
        check_uri(uri)
        for parameter in arguments.schema["properties"]:
            raise UsageError(
                f"parameter {parameter!r} of {name_of(function)} is not in the URI {uri!r}; write {{{parameter}}} into "
                "the URI, or drop the parameter"
            )
        return resource_entry(uri, handler, described_as("Resource", name, uri, **details), options)
    if details.pop("size") is not None:
        raise UsageError(f"the resources of the template {uri!r} have different sizes; drop size={options['size']}")
    matcher = matcher_of(uri)
    _check_variables(function, matcher, arguments.schema)
    describe = described_as("ResourceTemplate", name, uri, **details)
    return resource_entry(uri, handler, describe, options, matcher=matcher, arguments=arguments)


def resource_entry(
    uri: str, handler: Any, describe: Callable[[], Any], options: Mapping[str, Any], **more: Any
) -> Entry:
    """Make a resource of its parts, or a template if one of them is a matcher."""
    kept = {name: options[name] for name in ("replay", "mime_type", "cache") if name in options}
    kind = "resources"
    if "matcher" in more:
        kind, more["takes"] = "templates", frozenset(more["matcher"].template.variables)
    return Entry(kind, uri, handler, _finish, describe, **kept, **more)


def check_uri(uri: str) -> None:
    """res-10, res-13."""
    if not isinstance(uri, str) or not re.fullmatch(_URI, uri):
        raise UsageError(
            f"{uri!r} is not an absolute URI (RFC 3986): it needs a scheme, such as notes://today, and characters that "
            "URIs do not allow must be percent-encoded"
        )


def matcher_of(text: str) -> Matcher:
    """Read a URI template.  Raises UsageError if it cannot be matched with URIs."""
    if not re.match(SCHEME + r"|\{", text):
        raise UsageError(f"the URI template {text!r} must begin with a scheme, such as notes://{{name}}")
    return Matcher(text)


def check_contents(subject: str, given: Mapping[str, Any]) -> None:
    """Check the options that describe the contents of a resource."""
    mime_type, size, annotations = given.get("mime_type"), given.get("size"), given.get("annotations")
    if mime_type is not None and not is_mime_type(mime_type):
        raise UsageError(f"the mime_type of {subject} must be like text/plain, not {mime_type!r}")
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(f"the size of {subject} must be a number of bytes, got {size!r}")
    if annotations is not None:  # res-25
        from datetime import datetime

        if not set(annotations.audience or ()) <= {"user", "assistant"}:
            raise UsageError(f"the audience of {subject} must be a list of user and assistant")
        try:
            datetime.fromisoformat(annotations.last_modified or "2025-06-18")
        except ValueError:
            raise UsageError(
                f"the last_modified of {subject} must be ISO 8601, such as 2025-06-18T15:00:00Z, not "
                f"{annotations.last_modified!r}"
            ) from None


def _check_variables(function: Callable[..., Any], matcher: Matcher, schema: JsonObject) -> None:
    """Raise UsageError unless the variables of the template are the parameters of the function."""
    where, variables = f"the URI template {matcher.template.text!r}", matcher.template.variables
    for name in schema["properties"]:
        if name not in variables:
            raise UsageError(
                f"parameter {name!r} of {name_of(function)} is not in {where}; write {{{name}}} or {{?{name}}} into "
                "the template, or drop the parameter"
            )
    for name in variables:
        if name not in schema["properties"]:
            raise UsageError(f"{where} has {name!r}, which {name_of(function)} does not take; add the parameter")
        if name in matcher.optional and name in schema.get("required", ()):
            raise UsageError(
                f"{name!r} may be absent from the URIs of {where}; give the parameter of {name_of(function)} a default"
            )


def _finish(entry: Entry, value: Any, uri: str, revision: Revision) -> JsonObject:
    return resource_result(value, uri, entry.mime_type, revision)


def resource_result(value: Any, uri: str, mime_type: str | None, revision: Revision) -> JsonObject:
    """Make a result from text, bytes, contents, a list of contents, `ReadResourceResult`, or data.

    Raises as `tool_result`.
    """
    if type(value) is str:
        return {"contents": [{"uri": uri, "mimeType": mime_type or "text/plain", "text": value}]}
    with HandlerFault("the result of the resource", uri):
        if value is None:
            raise UsageError("it is None; raise ResourceNotFound if there is no such resource")
        if isinstance(value, model_class("ReadResourceResult")):
            if not value.contents:  # res-09
                raise UsageError("it has no contents; raise ResourceNotFound if there is no such resource")
            result = written(value, revision)
            return {**result, "contents": [with_uri(each) for each in result["contents"]]}
        if isinstance(value, bytes):
            return {"contents": [blob(value, uri, mime_type)]}  # res-12
        kind = model_class("ResourceContents")
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, kind) for each in values):
            if not all(isinstance(each, kind) for each in values):
                raise UsageError("it mixes contents with other values; return a list of contents only")
            return {"contents": [with_uri(written(each, revision)) for each in values]}
        if isinstance(value, str):
            text, default = str.__str__(value), "text/plain"
        else:
            text, default = json_text(value), "application/json"
        return {"contents": [{"uri": uri, "mimeType": mime_type or default, "text": text}]}
