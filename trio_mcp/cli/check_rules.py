"""The rules that `trio-mcp check` tests, and the report of their deviations.

The ids are those of the requirements of the protocol in the tests of this package.  A rule holds in some revisions
only: `CheckReport.expect` ignores a rule that the spoken revision does not have, so a probe needs no `if` for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["RULES", "CheckReport", "Deviation", "ProtocolRule"]

_A, _B, _C, _D, _E = "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"
_PER_RULE = 100
_SHOWN = 300  # characters of a text that may quote the server


class ProtocolRule(NamedTuple):
    """One sentence of the protocol, and the revisions that have it."""

    level: str
    since: str
    until: str
    sentence: str


RULES: Mapping[str, ProtocolRule] = {
    # Messages
    "core-01": ProtocolRule("MUST", _A, _E, 'Each message is an object with jsonrpc "2.0".'),
    "core-09": ProtocolRule("MUST", _A, _E, "A response has the id of its request: the same value and JSON type."),
    "core-11": ProtocolRule("MUST", _A, _E, "A response has either a result or an error."),
    "core-13": ProtocolRule("MUST", _A, _E, "Error codes are integers."),
    "core-16": ProtocolRule("MUST", _A, _E, "A notification gets no response, not even an unknown one."),
    "core-28": ProtocolRule("MUST", _A, _E, "JSON that is not a valid request gets -32600."),
    "core-29": ProtocolRule("MUST", _A, _E, "A request with an unknown method gets -32601."),
    "core-30": ProtocolRule("MUST", _A, _E, "Params that do not fit their schema get -32602."),
    "core-31": ProtocolRule("MUST", _A, _E, "An unexpected failure gets -32603, and the connection stays usable."),
    "stdio-03": ProtocolRule("MUST", _A, _E, "The server writes nothing but messages to standard output."),
    "stdio-11": ProtocolRule("SHOULD", _E, _E, "The server exits promptly when its standard input ends."),
    "stdio-14": ProtocolRule("MUST", _E, _E, "The server writes no requests to standard output."),
    "type-01": ProtocolRule("MUST", _A, _E, "Each message fits the schema of the revision."),
    "arch-02": ProtocolRule("MUST", _A, _E, "Declared capabilities are respected: their methods exist."),
    # Opening
    "life-10": ProtocolRule("MUST", _A, _D, "A version that is not supported is answered with another version."),
    "ping-01": ProtocolRule("MUST", _A, _D, "A ping gets an empty result, also before the end of the handshake."),
    "ping-07": ProtocolRule("MUST", _E, _E, "There is no ping: it gets -32601."),
    "ver-01": ProtocolRule("MUST", _E, _E, "A version that is not served gets -32022 with data.supported."),
    "ver-16": ProtocolRule("MUST", _E, _E, "The result of server/discover has supportedVersions and capabilities."),
    "meta-11": ProtocolRule("MUST", _E, _E, "A request without a required member of _meta gets -32602."),
    "meta-13": ProtocolRule("SHOULD", _E, _E, "Each result has the name and version of the server in _meta."),
    "rtype-01": ProtocolRule("MUST", _E, _E, 'Each ordinary result has resultType "complete".'),
    "cache-01": ProtocolRule("MUST", _E, _E, "Results that may be cached have ttlMs and cacheScope."),
    "cache-09": ProtocolRule("MUST", _E, _E, "ttlMs is an integer of at least 0."),
    "cache-23": ProtocolRule("MUST", _E, _E, "All pages of a list have the same cacheScope."),
    # Cancellation, progress, log messages
    "cancel-06": ProtocolRule("MUST", _A, _E, "A cancellation that comes too late does not break the connection."),
    "cancel-08": ProtocolRule("SHOULD", _A, _E, "A cancellation of an unknown request is ignored."),
    "prog-03": ProtocolRule("MUST", _A, _E, "Progress increases with each report."),
    "log-01": ProtocolRule("MUST", _A, _E, "A server that sends log messages declares logging."),
    "log-03": ProtocolRule("SHOULD", _A, _D, "An invalid level in logging/setLevel gets -32602."),
    # Lists
    "page-03": ProtocolRule("SHOULD", _A, _E, "An invalid cursor does not start again from the first page."),
    "page-09": ProtocolRule("SHOULD", _A, _E, "An invalid cursor gets -32602."),
    "page-11": ProtocolRule("SHOULD", _A, _E, "A cursor leads to the next entries, without a gap or a repetition."),
    # Tools
    "type-03": ProtocolRule("MUST", _A, _E, "A tool has a name and an inputSchema."),
    "schema-07": ProtocolRule("MUST", _D, _E, "The schemas of tools are valid JSON Schemas in their dialect."),
    "tool-06": ProtocolRule("MUST", _A, _E, "Arguments are checked against inputSchema before the tool runs."),
    "tool-13": ProtocolRule("SHOULD", _C, _E, "A result with structuredContent also has its JSON in a text block."),
    "tool-14": ProtocolRule("MUST", _C, _E, "With an outputSchema, structuredContent is present and conforms to it."),
    "tool-17": ProtocolRule("SHOULD", _D, _E, "Tool names have 1 to 128 letters, digits, _, - and dots."),
    "tool-19": ProtocolRule("SHOULD", _D, _E, "Tool names are unique in a server."),
    "tool-25": ProtocolRule("SHOULD", _E, _E, "tools/list has the same order each time."),
    "tool-30": ProtocolRule("SHOULD", _A, _E, "An error inside a tool is a result with isError, not a protocol error."),
    "tool-31": ProtocolRule("MUST", _A, _E, "An unknown tool is a protocol error -32602, not a result."),
    "tool-32": ProtocolRule("SHOULD", _A, _C, "Arguments that do not fit inputSchema get -32602."),
    "tool-33": ProtocolRule("SHOULD", _D, _E, "Arguments that do not fit inputSchema get a result with isError."),
    "tool-34": ProtocolRule("MUST", _C, _D, "structuredContent is a JSON object."),
    "tool-36": ProtocolRule("MUST", _C, _D, 'inputSchema and outputSchema have type "object" at the root.'),
    "http-80": ProtocolRule("MUST", _E, _E, "An x-mcp-header is an HTTP token."),
    "http-81": ProtocolRule("MUST", _E, _E, "Each x-mcp-header is used once in a tool, ignoring case."),
    "http-82": ProtocolRule("MUST", _E, _E, "x-mcp-header is only on properties of integer, string or boolean."),
    "http-84": ProtocolRule("MUST", _E, _E, "x-mcp-header is only on properties reached by properties alone."),
    # Resources, prompts, completion
    "res-05": ProtocolRule("SHOULD", _A, _D, "An unknown resource gets -32002."),
    "res-06": ProtocolRule("MUST", _E, _E, "An unknown resource gets -32602."),
    "res-09": ProtocolRule("MUST", _E, _E, "A missing resource is not answered with empty contents."),
    "res-13": ProtocolRule("MUST", _C, _E, "The URI of a resource has a scheme, as RFC 3986 demands."),
    "res-22": ProtocolRule("MUST", _A, _E, "Resource templates are URI templates (RFC 6570)."),
    "prm-08": ProtocolRule("SHOULD", _A, _E, "An unknown prompt, or a missing required argument, gets -32602."),
    "cmpl-06": ProtocolRule("SHOULD", _B, _E, "The completion of an unknown prompt gets -32602."),
    "cmpl-07": ProtocolRule("MUST", _A, _E, "A completion has at most 100 values."),
}


class Deviation(NamedTuple):
    """A rule that the server breaks: in which message, and what came instead."""

    rule: str
    where: str
    seen: str


class CheckReport:
    """The rules that were tested in one revision, and the deviations, at most 100 for each rule."""

    def __init__(self, revision: str) -> None:
        self.revision = revision
        self.tested: set[str] = set()
        self.checks = 0
        self.notes: list[str] = []
        self._found: dict[str, list[Deviation]] = {}

    def applies(self, rule: str) -> bool:
        return RULES[rule].since <= self.revision <= RULES[rule].until

    def expect(self, rule: str, right: bool, where: str, seen: str = "") -> None:
        """Count one check of a rule; a wrong one is a deviation."""
        if not self.applies(rule):
            return
        self.checks += 1
        self.tested.add(rule)
        found = self._found.setdefault(rule, [])
        if not right and len(found) < _PER_RULE:
            found.append(Deviation(rule, where[:_SHOWN], seen[:_SHOWN]))

    @property
    def deviations(self) -> list[Deviation]:
        """All deviations: those of MUST before those of SHOULD, in the order of the rules."""
        ordered = sorted(RULES, key=lambda rule: RULES[rule].level != "MUST")
        return [each for rule in ordered for each in self._found.get(rule, ())]
