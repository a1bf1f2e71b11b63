"""The params and results of methods that the protocol does not have: read and written by the annotations of a function.

    async def ping(target: str, times: int = 1) -> Pong: ...     # each parameter is a member of the params
    async def ping(params: PingParams) -> Pong: ...              # one parameter `params` is all of them

Members that the function does not know are ignored, because an extension may grow.  `_meta` is no member.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from trio_mcp.core.errors import RemoteProtocolError, UsageError, name_of
from trio_mcp.core.messages import JsonObject
from trio_mcp.core.schema.hints import Hint, parameters_of
from trio_mcp.core.schema.shapes import Shape, Unreadable, arguments_shape, shape_of
from trio_mcp.core.schema.validation import compile_schema
from trio_mcp.core.schema.writing import to_json_value

__all__ = ["MethodParams", "read_result", "write_object_of"]

# Members of params and of results that belong to the protocol, and not to a method.
_OF_THE_PROTOCOL = frozenset({"_meta", "resultType"})


class MethodParams:
    """The params of a function, except the parameters in `skip`.  Raises `UsageError` for a hint without a schema."""

    __slots__ = ("_shape", "_whole")

    def __init__(self, function: Callable[..., object], skip: Collection[str] = ()) -> None:
        members = parameters_of(function, skip)
        self._whole = len(members) == 1 and members[0].name == "params"
        if self._whole:
            self._shape = shape_of(members[0].hint, where=f"parameter 'params' of {name_of(function)}")
        else:
            self._shape = arguments_shape(function, skip)

    def read(self, params: JsonObject) -> dict[str, Any]:
        """Return the keyword arguments.  Raises `RemoteProtocolError` for params that do not fit."""
        value = _read(self._shape, params, "params")
        return {"params": value} if self._whole else value


def _read(shape: Shape, given: JsonObject, where: str) -> Any:
    closed = shape.schema.get("additionalProperties") is False
    known = shape.schema.get("properties", {}) if closed else given.keys() - _OF_THE_PROTOCOL
    value = {key: each for key, each in given.items() if key in known}
    if not shape.fits(value):
        problems = [f"{where}{each.path}: {each.message}" for each in compile_schema(shape.schema).errors(value)]
        raise RemoteProtocolError("; ".join(problems) or f"{where}: unexpected value")
    try:
        return value if shape.read is None else shape.read(value)
    except Unreadable as error:
        raise RemoteProtocolError(f"{where}{error.path}: {error.why}") from None


def read_result(hint: Hint, result: JsonObject) -> Any:
    """Return a result as a value of this type.  Raises `RemoteProtocolError` if it does not fit."""
    return _read(shape_of(hint), result, "result")


def write_object_of(value: Any, subject: str) -> JsonObject:
    """Write params or a result.  None has no members.  Raises `UsageError` for a value that is no object in JSON."""
    written = {} if value is None else to_json_value(value)
    if not isinstance(written, dict):
        raise UsageError(f"{subject} must be an object, such as a dict or a dataclass, got {type(value).__name__}")
    return written
