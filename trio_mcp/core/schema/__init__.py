"""Type hints and JSON Schema: shapes of values, validation, URI templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.schema.hints import *
    from trio_mcp.core.schema.shapes import *
    from trio_mcp.core.schema.templates import *
    from trio_mcp.core.schema.validation import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "hints": (
                "Description Field Hint Member alternatives_of attributes_of describe hint_of members_of "
                "parameters_of resolved_alone substituted unsupported wrapper_of"
            ),
            "shapes": ("Mode Shape Unreadable arguments_shape describes_itself schema_of shape_of to_json_value"),
            "templates": "Matcher Template Value in_ascii",
            "validation": (
                "CompiledSchema DEFAULT_DIALECT DIALECTS InvalidSchema Problem check_input_schema compile_schema"
            ),
        },
    )
