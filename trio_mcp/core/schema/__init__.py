"""Type hints and JSON Schema: shapes of values, validation, URI templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.core.schema.annotated import *
    from trio_mcp.core.schema.classes import *
    from trio_mcp.core.schema.composites import *
    from trio_mcp.core.schema.cost import *
    from trio_mcp.core.schema.hints import *
    from trio_mcp.core.schema.params import *
    from trio_mcp.core.schema.shapes import *
    from trio_mcp.core.schema.templates import *
    from trio_mcp.core.schema.validation import *
    from trio_mcp.core.schema.writing import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "annotated": "annotated_shape misplaced",
            "classes": "attributes_of class_shape describes_itself members_of",
            "composites": "choice_shape container_shape union_shape",
            "cost": "DEFAULT_DIALECT DIALECTS InvalidSchema",
            "hints": (
                "Description Field Hint Member alternatives_of describe full_name hint_of parameters_of resolved "
                "resolved_alone substituted unsupported wrapper_of"
            ),
            "params": "MethodParams read_result write_object_of",
            "shapes": "Mode Shape Unreadable arguments_shape schema_of shape_of",
            "templates": "Matcher Template Value in_ascii",
            "validation": "CompiledSchema Problem check_input_schema compile_schema",
            "writing": ("to_json_value write_guarded write_mapping write_object write_self_described write_value"),
        },
    )
