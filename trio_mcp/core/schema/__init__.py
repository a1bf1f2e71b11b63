"""Type hints and JSON Schema: shapes of values, validation, URI templates."""
