"""The checks of `trio-mcp check` through a client: lists and entries, wrong requests, calls of tools, cancellation.

Each probe sends raw requests with `Client.request`, because the other methods of the client forgive and repair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jsonschema_rs
import trio

from trio_mcp.cli.check_rules import CheckReport
from trio_mcp.cli.output import compact, few_names
from trio_mcp.cli.target import LIMITS
from trio_mcp.client.client import Client
from trio_mcp.core import models
from trio_mcp.core.codec import ModelType, from_json
from trio_mcp.core.content import Resource
from trio_mcp.core.errors import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    RESOURCE_NOT_FOUND,
    McpError,
    RemoteProtocolError,
    RequestError,
    UsageError,
)
from trio_mcp.core.http.fields import find_mirrors
from trio_mcp.core.revisions import META_SERVER_INFO, REVISIONS

__all__ = ["probe_all"]

_READS = 20  # resources, prompts and calls that are tried of each kind
_NOTHING = "trio-mcp-check-unknown"
_UNKNOWN_METHOD = "com.example/trio-mcp-check"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_TEMPLATE = re.compile(r"(?:[^{}]|\{[^{}]+\})*")
_UNUSUAL = {"string": {}, "integer": "x", "number": "x", "boolean": "x", "array": "x", "object": "x"}
_FAULTS = {"token": "http-80", "twice": "http-81", "of type": "http-82", "alone": "http-84"}
_CACHED = (
    "server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read",
)  # fmt: skip
_LISTS: Mapping[str, tuple[str, str, type[Any], ModelType]] = {
    "tools/list": ("tools", "tools", models.Tool, models.ListToolsResult),
    "resources/list": ("resources", "resources", Resource, models.ListResourcesResult),
    "resources/templates/list": (
        "resources", "resourceTemplates", models.ResourceTemplate, models.ListResourceTemplatesResult,
    ),
    "prompts/list": ("prompts", "prompts", models.Prompt, models.ListPromptsResult),
}  # fmt: skip


@attrs.frozen
class _CheckedAnswer:
    """The answer to a request: a result, an error with its code, or neither, and why."""

    result: dict[str, Any] | None = None
    code: int | None = None
    why: str = ""

    def __str__(self) -> str:
        if self.code is not None:
            return f"error {self.code}"
        return self.why if self.result is None else f"result {compact(self.result)}"


async def probe_all(client: Client, report: CheckReport, calls: Mapping[str, Mapping[str, Any]]) -> None:
    """Run all probes.  Raises `UsageError` if the server has not the tools of `calls`."""
    try:
        await _Probes(client, report).run(calls)
    except _CheckInterrupted:
        report.notes.append("the connection was lost, so the other checks were not made")


class _CheckInterrupted(Exception):
    """The connection was lost during a probe; the report says where."""


class _Probes:
    """The probes of one client."""

    def __init__(self, client: Client, report: CheckReport) -> None:
        self._client = client
        self._report = report
        self._expect = report.expect
        self._legacy = REVISIONS[client.revision].handshake

    async def run(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        """Run all probes.  Raises `_CheckInterrupted`."""
        listed: dict[str, list[Any]] = {}
        if not self._legacy:
            await self._discover()
        for method in _LISTS:
            if _LISTS[method][0] in self._client.capabilities:
                listed[method] = await self._list(method)
        tools = {tool["name"]: tool for tool in _named(listed.get("tools/list", ()))}
        if missing := calls.keys() - tools.keys():
            raise UsageError(f"the server has no tool {min(missing)!r}; it has {few_names(tools) or 'none'}")
        self._check_tools(listed.get("tools/list", ()))
        self._check_resources(listed)
        await self._unknown(listed)
        await self._read(listed.get("resources/list", ()))
        await self._get_prompts(listed.get("prompts/list", ()))
        await self._complete(listed.get("prompts/list", ()))
        await self._call(tools, calls)
        await self._cancel(listed)

    async def _ask(self, method: str, params: Mapping[str, Any] | None = None) -> _CheckedAnswer:
        try:
            return _CheckedAnswer(await self._client.request(method, params or {}))
        except RequestError as error:
            return _CheckedAnswer(code=error.code, why=str(error))
        except RemoteProtocolError as error:
            self._expect("type-01", False, method, str(error))
            return _CheckedAnswer(why=str(error))
        except trio.TooSlowError:
            return _CheckedAnswer(why="no answer in time")
        except McpError as error:
            why = str(error).partition("\n")[0].rstrip(":")
            self._expect("core-31", not self._client.closed, method, why)
            if self._client.closed:
                raise _CheckInterrupted from error
            return _CheckedAnswer(why=why)

    def _fits(self, method: str, shape: ModelType, value: Any) -> Any:
        """Read a result or an entry strictly; return it, or None for a deviation."""
        try:
            read = from_json(shape, value, strict=True)
        except RemoteProtocolError as error:
            lacks = re.search(r"\b(name|inputSchema): missing", str(error)) if shape is models.Tool else None
            self._expect("type-03" if lacks else "type-01", False, method, str(error))
            return None
        self._expect("type-01", True, method)
        if shape is models.Tool:
            self._expect("type-03", True, method)
        for member in _nulls(value):
            self._expect("type-01", False, method, f"{member} is null; a member without a value is left out")
        return read

    def _check_result(self, method: str, result: Mapping[str, Any]) -> None:
        """The members that each result has from 2026-07-28 on."""
        if self._legacy:
            return
        self._expect("rtype-01", result.get("resultType") == "complete", method, _member(result, "resultType"))
        meta = result.get("_meta")
        info = meta.get(META_SERVER_INFO) if isinstance(meta, dict) else None
        right = isinstance(info, dict) and all(isinstance(info.get(each), str) for each in ("name", "version"))
        self._expect("meta-13", right, method, f"{META_SERVER_INFO} is {compact(info)}")
        if method in _CACHED:
            scope, time = result.get("cacheScope"), result.get("ttlMs")
            lacks = [each for each in ("ttlMs", "cacheScope") if each not in result]
            self._expect("cache-01", not lacks and scope in ("public", "private"), method, _member(result, *lacks))
            if "ttlMs" in result:
                self._expect("cache-09", type(time) is int and time >= 0, method, f"ttlMs is {compact(time)}")

    async def _discover(self) -> None:
        reply = await self._ask("server/discover")
        result = reply.result or {}
        versions = result.get("supportedVersions")
        right = isinstance(versions, list) and self._client.revision in versions
        right = right and isinstance(result.get("capabilities"), dict)
        self._expect("ver-16", right, "server/discover", str(reply))
        if reply.result is not None:
            self._check_result("server/discover", result)

    # Lists

    async def _list(self, method: str) -> list[Any]:
        """Walk all pages, and check each entry; return the entries that are objects."""
        _, member, shape, page_shape = _LISTS[method]
        entries: list[Any] = []
        first: list[Any] = []
        params: dict[str, Any] = {}
        cursors: set[str] = set()
        scopes: set[str] = set()
        seen: set[str] = set()
        repeated: set[str] = set()
        for number in range(LIMITS.pages):
            reply = await self._ask(method, params)
            if reply.result is None:
                # No sentence demands templates of each server with resources.
                if method != "resources/templates/list" or reply.code != METHOD_NOT_FOUND:
                    self._expect("arch-02", False, f"{method}, page {number + 1}", str(reply))
                return entries
            self._expect("arch-02", True, method)
            self._check_result(method, reply.result)
            scopes.add(str(reply.result.get("cacheScope")))
            page = reply.result.get(member)
            found = page if isinstance(page, list) else []
            for entry in found:
                self._fits(f"{method}: {_label(entry)}", shape, entry)
            # The entries have been read one by one.
            self._fits(method, page_shape, {**reply.result, member: [] if isinstance(page, list) else page})
            labels = {_label(entry) for entry in found}
            repeated |= seen & labels
            seen |= labels
            entries += found
            first = first or found
            cursor = reply.result.get("nextCursor")
            if not isinstance(cursor, str):
                break
            if cursor in cursors:
                self._expect("page-11", False, method, "nextCursor comes twice, so the list has no end")
                break
            cursors.add(cursor)
            params = {"cursor": cursor}
        else:
            self._report.notes.append(f"{method} was read up to page {LIMITS.pages}, and has no end so far")
        self._expect("cache-23", len(scopes) == 1, method, f"cacheScope is {' and '.join(sorted(scopes))}")
        if cursors:
            self._expect("page-11", not repeated, method, f"on two pages: {', '.join(sorted(repeated))}")
        await self._wrong_cursor(method, member, first)
        return [entry for entry in entries if isinstance(entry, dict)]

    async def _wrong_cursor(self, method: str, member: str, first: Sequence[Any]) -> None:
        reply = await self._ask(method, {"cursor": _NOTHING})
        restarted = reply.result is not None and bool(first) and reply.result.get(member) == first
        self._expect("page-03", not restarted, f"{method} with an invalid cursor", "the first page")
        if not restarted:
            self._expect("page-09", reply.code == INVALID_PARAMS, f"{method} with an invalid cursor", str(reply))

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        names = [tool["name"] for tool in _named(tools)]
        for name in names:
            self._expect("tool-17", _NAME.fullmatch(name) is not None, "tools/list", f"the name {name!r}")
        twice = sorted({name for name in names if names.count(name) > 1})
        self._expect("tool-19", not twice, "tools/list", ", ".join(twice))
        for tool in tools:
            for member in ("inputSchema", "outputSchema"):
                if isinstance(tool.get(member), dict):
                    self._check_schema(f"tools/list: {_label(tool)}", member, tool[member])
            if isinstance(tool.get("inputSchema"), dict):
                self._check_headers(f"tools/list: {_label(tool)}", tool["inputSchema"])

    def _check_schema(self, where: str, member: str, schema: Mapping[str, Any]) -> None:
        kind = schema.get("type")
        self._expect("tool-36", kind == "object", where, f"{member} has type {compact(kind)}")
        try:
            jsonschema_rs.meta.validate(dict(schema))
        except jsonschema_rs.ReferencingError:
            return  # a dialect that this validator does not have
        except (jsonschema_rs.ValidationError, ValueError) as error:
            self._expect("schema-07", False, where, f"{member}: {str(error).splitlines()[0]}")
        else:
            self._expect("schema-07", True, where)

    def _check_headers(self, where: str, schema: Mapping[str, Any]) -> None:
        faults = find_mirrors(schema).faults
        for sign, rule in _FAULTS.items():
            found = [fault for fault in faults if sign in fault]
            self._expect(rule, not found, where, "; ".join(found))

    def _check_resources(self, listed: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        for entry in listed.get("resources/list", ()):
            uri = entry.get("uri")
            if isinstance(uri, str):
                self._expect("res-13", _SCHEME.match(uri) is not None, "resources/list", f"the URI {uri!r}")
        for entry in listed.get("resources/templates/list", ()):
            uri = entry.get("uriTemplate")
            if isinstance(uri, str):
                self._expect("res-22", _TEMPLATE.fullmatch(uri) is not None, "resources/templates/list", repr(uri))

    # Wrong requests

    async def _unknown(self, listed: Mapping[str, Sequence[Any]]) -> None:
        """Methods, tools, prompts, resources, levels that the server has not."""
        has = self._client.capabilities
        reply = await self._ask(_UNKNOWN_METHOD)
        self._expect("core-29", reply.code == METHOD_NOT_FOUND, "an unknown method", str(reply))
        if self._legacy:
            reply = await self._ask("ping")
            empty = reply.result is not None and reply.result.keys() <= {"_meta"}
            self._expect("ping-01", empty, "ping", str(reply))
        if "tools" in has:
            reply = await self._ask("tools/call", {"name": _NOTHING, "arguments": {}})
            self._expect("tool-31", reply.code == INVALID_PARAMS, "tools/call of an unknown tool", str(reply))
            reply = await self._ask("tools/call", {"arguments": {}})
            self._expect("core-30", reply.code == INVALID_PARAMS, "tools/call without a name", str(reply))
            again = await self._ask("tools/list")
            if not self._legacy and again.result is not None and "nextCursor" not in again.result:
                names = [_label(tool) for tool in again.result.get("tools") or ()]
                same = names == [_label(tool) for tool in listed["tools/list"]]
                self._expect("tool-25", same, "tools/list", "another order at the second time")
        if "resources" in has:
            reply = await self._ask("resources/read", {"uri": f"{_NOTHING}://nothing"})
            rule, code = ("res-05", RESOURCE_NOT_FOUND) if self._legacy else ("res-06", INVALID_PARAMS)
            if reply.result is None or not reply.result.get("contents"):  # a template may read any URI
                self._expect(rule, reply.code == code, "resources/read of an unknown URI", str(reply))
                self._expect("res-09", reply.result is None, "resources/read of an unknown URI", str(reply))
        if "prompts" in has:
            reply = await self._ask("prompts/get", {"name": _NOTHING})
            self._expect("prm-08", reply.code == INVALID_PARAMS, "prompts/get of an unknown prompt", str(reply))
        if "logging" in has and self._legacy:
            reply = await self._ask("logging/setLevel", {"level": "loud"})
            self._expect("log-03", reply.code == INVALID_PARAMS, "logging/setLevel loud", str(reply))

    # Results

    async def _read(self, resources: Sequence[Mapping[str, Any]]) -> None:
        for resource in resources[:_READS]:
            reply = await self._ask("resources/read", {"uri": resource.get("uri")})
            where = f"resources/read {resource.get('uri')}"
            if reply.result is not None and reply.result.get("resultType", "complete") == "complete":
                self._check_result("resources/read", reply.result)
                self._fits(where, models.ReadResourceResult, reply.result)

    async def _get_prompts(self, prompts: Sequence[Mapping[str, Any]]) -> None:
        for prompt in _named(prompts[:_READS]):
            required = [each.get("name") for each in _objects(prompt.get("arguments")) if each.get("required") is True]
            reply = await self._ask("prompts/get", {"name": prompt["name"], "arguments": {}})
            if required:
                where = f"prompts/get {prompt['name']} without {required[0]}"
                self._expect("prm-08", reply.code == INVALID_PARAMS, where, str(reply))
            elif reply.result is not None and reply.result.get("resultType", "complete") == "complete":
                self._check_result("prompts/get", reply.result)
                self._fits(f"prompts/get {prompt['name']}", models.GetPromptResult, reply.result)

    async def _complete(self, prompts: Sequence[Mapping[str, Any]]) -> None:
        if "completions" not in self._client.capabilities:
            return
        ref, argument = {"type": "ref/prompt", "name": _NOTHING}, {"name": "a", "value": ""}
        reply = await self._ask("completion/complete", {"ref": ref, "argument": argument})
        self._expect("cmpl-06", reply.code == INVALID_PARAMS, "completion of an unknown prompt", str(reply))
        for prompt in _named(prompts[:_READS]):
            for each in _named(_objects(prompt.get("arguments"))):
                ref, argument = {"type": "ref/prompt", "name": prompt["name"]}, {"name": each["name"], "value": ""}
                reply = await self._ask("completion/complete", {"ref": ref, "argument": argument})
                if reply.result is None:
                    continue
                where = f"completion of {prompt['name']} {each['name']}"
                self._check_result("completion/complete", reply.result)
                found = reply.result.get("completion")
                values = found.get("values") if isinstance(found, dict) else None
                if isinstance(values, list) and len(values) > 100:
                    self._expect("cmpl-07", False, where, f"{len(values)} values")
                else:
                    self._fits(where, models.CompleteResult, reply.result)
                    self._expect("cmpl-07", True, where)

    async def _call(self, tools: Mapping[str, Mapping[str, Any]], calls: Mapping[str, Mapping[str, Any]]) -> None:
        harmless = [name for name, tool in tools.items() if name not in calls and _is_harmless(tool)]
        for name, arguments in {**{name: {} for name in harmless[:_READS]}, **calls}.items():
            reply = await self._ask("tools/call", {"name": name, "arguments": arguments})
            if reply.result is None:
                failed = reply.code is not None and reply.code != INVALID_PARAMS
                self._expect("tool-30", not failed, f"tools/call {name}", str(reply))
                self._report.notes.append(f"the call of {name} was answered with {reply}")
            else:
                self._check_outcome(f"tools/call {name}", tools[name], reply.result)
            await self._call_wrongly(name, tools[name])

    def _check_outcome(self, where: str, tool: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        if result.get("resultType", "complete") != "complete":
            return  # a question, or a task
        self._check_result("tools/call", result)
        if self._fits(where, models.CallToolResult, result) is None or result.get("isError"):
            return
        schema, value = tool.get("outputSchema"), result.get("structuredContent")
        present = "structuredContent" in result
        if schema is not None:
            fault = _fault(schema, value) if present else "there is none"
            self._expect("tool-14", fault is None, where, f"structuredContent: {fault}")
        if present:
            self._expect("tool-34", isinstance(value, dict), where, f"structuredContent is {compact(value)}")
            texts = [block for block in _objects(result.get("content")) if block.get("type") == "text"]
            self._expect("tool-13", bool(texts), where, "there is no text block")

    async def _call_wrongly(self, name: str, tool: Mapping[str, Any]) -> None:
        """Call a tool that may be called with arguments that do not fit its schema."""
        schema = tool.get("inputSchema")
        if not isinstance(schema, dict):
            return
        wrong = next(iter(_wrong_arguments(schema)), None)
        if wrong is None or _fault(schema, wrong) is None:
            return
        reply = await self._ask("tools/call", {"name": name, "arguments": wrong})
        refused = reply.result is None or reply.result.get("isError") is True
        where = f"tools/call {name} with {compact(wrong)}"
        self._expect("tool-06", refused, where, str(reply))
        if refused:
            self._expect("tool-32", reply.code == INVALID_PARAMS, where, str(reply))
            self._expect("tool-33", reply.result is not None, where, str(reply))

    async def _cancel(self, listed: Mapping[str, Sequence[Any]]) -> None:
        """Cancel requests at once, and see that the connection survives."""
        method = next(iter(listed), "ping" if self._legacy else "server/discover")
        for _ in range(3):
            with trio.move_on_after(0.001):
                await self._ask(method)
        reply = await self._ask(method)
        self._expect("cancel-06", reply.result is not None, f"{method} after three cancelled requests", str(reply))


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _named(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if isinstance(entry.get("name"), str)]


def _label(entry: Any) -> str:
    """The name or the URI of an entry."""
    holder = entry if isinstance(entry, dict) else {}
    return str(holder.get("name") or holder.get("uri") or holder.get("uriTemplate") or compact(entry, 40))


def _member(result: Mapping[str, Any], *names: str) -> str:
    return ", ".join(f"{name} is {compact(result[name])}" if name in result else f"{name} is absent" for name in names)


def _nulls(value: Any) -> Iterator[str]:
    """The members of a result or an entry that are null, but must be absent."""
    if isinstance(value, dict):
        yield from (name for name, each in value.items() if each is None and name != "structuredContent")
        for holder in ("annotations", "execution"):
            if isinstance(value.get(holder), dict):
                yield from (f"{holder}.{name}" for name, each in value[holder].items() if each is None)
        for holder in ("content", "contents", "arguments", "messages"):
            for number, each in enumerate(_objects(value.get(holder))):
                yield from (f"{holder}[{number}].{name}" for name, part in each.items() if part is None)


def _is_harmless(tool: Mapping[str, Any]) -> bool:
    hints, schema, execution = tool.get("annotations"), tool.get("inputSchema"), tool.get("execution")
    read_only = isinstance(hints, dict) and hints.get("readOnlyHint") is True
    as_task = isinstance(execution, dict) and execution.get("taskSupport") == "required"
    return read_only and isinstance(schema, dict) and not schema.get("required") and not as_task


def _fault(schema: Any, value: Any) -> str | None:
    """Why a value does not fit a schema; None if it fits, or if the schema cannot be used."""
    try:
        jsonschema_rs.validator_for(schema).validate(value)
    except jsonschema_rs.ValidationError as error:
        return str(error).splitlines()[0]
    except (jsonschema_rs.ReferencingError, ValueError):
        return None
    return None


def _wrong_arguments(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments that do not fit: without a required one, or with a value of another type."""
    if schema.get("required"):
        yield {}
    properties = schema.get("properties")
    for name, each in properties.items() if isinstance(properties, dict) else ():
        kind = each.get("type") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind in _UNUSUAL:
            yield {name: _UNUSUAL[kind]}
