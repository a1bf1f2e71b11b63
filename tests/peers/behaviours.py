"""The results that a client gets from `tests/fixtures/everything_server.py`, for each behaviour and each revision.

The server is started with ``INTEROP_PAGE_SIZE`` set to `PAGE_SIZE`.  Each visit has a server of its own.  For each
behaviour a program does this, and prints this JSON as the result:

=================  ====================================================================================================
connect            opens the connection; the revision and the server's instructions: ``["2025-11-25", "..."]``
list               all pages of each kind: ``{"tools": [names], "resources": [uris], "templates": [uri templates],
                   "prompts": [names], "paged": [kinds that came in more than one page]}``, each list sorted
call               ``interop_echo`` of the text `ODD`: whether the same text came back, byte for byte
structured         ``interop_structured`` of 2 and 3: ``[structured content or null, JSON of the text]``
tool error         ``test_error_handling``: ``[isError, text]``
unknown tool       calls ``interop_nothing``: the code of the error; ``"isError"`` for a result with isError
bad arguments      ``interop_check`` with count "two": the same as for an unknown tool
progress           ``interop_progress``, and ``interop_heard`` after all three reports, because some clients lose a
                   report that arrives in one piece with the result: ``[[progress, total], ...]``
cancel             ``interop_wait`` of 60 seconds with tag "cancel", cancelled after its first progress report; calls
                   ``interop_cancelled`` until the tag is in its JSON: true
read               the text, the MIME type of the picture, the JSON of item 7: ``[text, type, object]``
unknown resource   reads ``test://no-such-resource``: the code of the error
subscribe          ``test://watched-resource``, then ``interop_touch``: the URI in the notification
list changed       ``interop_toggle`` of tools, resources, prompts, one after the other: on, waits for the
                   notification, lists, off; the kinds whose list has the new entry:
                   ``["tools", "resources", "prompts"]``
prompts            the simple one; with arguments "a" and "b"; with a resource; with an image: ``[text, text, [types of
                   content], [types of content]]``
unknown prompt     gets ``interop_nothing``: the code of the error
completion         arg1 "alp"; arg2 "" with the context arg1 = "v"; id "1" of the template: ``[values, values, values]``
logging            sets the level notice, then ``interop_log``: ``["level logger level-in-the-data", ...]``
sampling           ``test_sampling`` of "a joke", answered with "a model was told a joke": the text of the result
elicitation        ``test_elicitation`` of "Which?", accepted with ``{"response": "blue"}``: the text of the result
roots              ``interop_roots``, of file:///srv/a (named "a") and file:///srv/b: the text of the result
1 MB               ``interop_echo`` of the text `LARGE`: whether the same text came back
20 at once         20 of ``interop_echo`` with delay_ms 200: how many texts came back unchanged
end                closes the connection and prints ``"clean"``.  If a stdio server then has not exited with status 0,
                   the visit adds that: ``"clean, but the server ended with SIGTERM"``.  If an HTTP server still has
                   calls or listeners, the visit adds them: ``"clean, but the server was left with 2 listeners"``
=================  ====================================================================================================

`ODD` and `LARGE` are in `programs/report.py` and `programs/report.mjs`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ABSENT", "LISTS", "PAGE_SIZE", "Contains", "expected_results"]

PAGE_SIZE = 2


class Contains:
    """Equal to each text or list that contains all of these parts."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str | list) and all(part in other for part in self.parts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Contains({', '.join(map(repr, self.parts))})"


SUM = {"sum": 5, "label": "2+3"}
KINDS = ["tools", "resources", "prompts"]
LISTS = {
    "tools": Contains(
        "test_simple_text",
        "test_error_handling",
        "json_schema_2020_12_tool",
        "interop_echo",
        "interop_structured",
        "interop_wait",
        "interop_toggle",
    ),
    "resources": Contains("test://static-text", "test://static-binary", "test://watched-resource"),
    "templates": Contains("test://template/{id}/data"),
    "prompts": Contains("test_simple_prompt", "test_prompt_with_arguments", "test_prompt_with_image"),
    "paged": sorted(KINDS),
}
TABLE: dict[str, Any] = {
    "list": LISTS,
    "call": True,
    "structured": [SUM, SUM],
    "tool error": [True, Contains("This tool intentionally returns an error for testing")],
    "unknown tool": -32602,
    "bad arguments": "isError",
    "progress": [[0, 100], [50, 100], [100, 100]],
    "cancel": True,
    "read": [
        "This is the content of the static text resource.",
        "image/png",
        {"id": "7", "templateTest": True, "data": "Data for ID: 7"},
    ],
    "unknown resource": -32002,
    "subscribe": "test://watched-resource",
    "list changed": KINDS,
    "prompts": [
        "This is a simple prompt for testing.",
        "Prompt with arguments: arg1='a', arg2='b'",
        ["resource", "text"],
        ["image", "text"],
    ],
    "unknown prompt": -32602,
    "completion": [["alpha", "alphabet"], ["v-2"], ["1", "12"]],
    "logging": [f"{level} interop {level}" for level in ("notice", "warning", "error")],
    "sampling": "LLM response: a model was told a joke",
    "elicitation": Contains("action=accept", '"response"', '"blue"'),
    "roots": "file:///srv/a,file:///srv/b",
    "1 MB": True,
    "20 at once": 20,
    "end": "clean",
}
# Features that a revision does not have.  The server then uses the nearest feature, or answers with an error.
ABSENT = {
    "2024-11-05": {"structured", "elicitation"},
    "2025-03-26": {"structured", "elicitation"},
}
# Results that differ in a revision.
FIRST_REVISIONS = {
    "structured": [None, SUM],
    "bad arguments": -32602,
    "completion": [["alpha", "alphabet"], [], ["1", "12"]],
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "2024-11-05": {**FIRST_REVISIONS, "elicitation": Contains("elicitation/create does not exist in 2024-11-05")},
    "2025-03-26": {**FIRST_REVISIONS, "elicitation": Contains("elicitation/create does not exist in 2025-03-26")},
    "2025-06-18": {"bad arguments": -32602},
    "2025-11-25": {},
    "2026-07-28": {"unknown resource": -32602},
}


def expected_results(revision: str) -> dict[str, Any]:
    """The table for this revision."""
    return {"connect": [revision, "interop fixture"], **TABLE, **DIFFERENT[revision]}
