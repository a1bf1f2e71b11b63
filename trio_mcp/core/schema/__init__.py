"""Type hints and JSON Schema: shapes of values, validation, URI templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.schema.hints import *
    from trio_mcp.core.schema.schema import *
    from trio_mcp.core.schema.self_described import *
    from trio_mcp.core.schema.templates import *
    from trio_mcp.core.schema.validation import *
    from trio_mcp.core.schema.values import *
    from trio_mcp.core.schema.writing import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "hints": "Converter Hint MAKERS MemberHint TEXTS Walk compiled full_name is_typed_dict",
            "schema": (
                "Description Field describe hint_of members_of parameters_schema resolved_alone schema_of "
                "substituted unsupported wrapper_of"
            ),
            "self_described": "Definition Mode describes_itself own_schema",
            "templates": "Matcher Template Value in_ascii",
            "validation": (
                "CompiledSchema DEFAULT_DIALECT DIALECTS InvalidSchema Problem check_input_schema compile_schema"
            ),
            "values": "Unreadable arguments_reader reader_of",
            "writing": "Write to_json_value writer_of",
        },
    )
