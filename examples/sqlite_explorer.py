"""A server that lets a model read a SQLite database: the schema is a resource, and a tool runs queries.

python examples/sqlite_explorer.py DATABASE

It shows plain functions, which run in worker threads; structured results; errors that the model can correct.
"""

import math
import sqlite3
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trio_mcp import Field, Server, ToolError
from trio_mcp.types import ToolAnnotations

SECONDS = 5.0  # for each query
MAX_TEXT = 10_000  # characters of a value in the result
MAX_VALUE = 10_000_000  # bytes of a value in SQLite's memory: hex(zeroblob(1000000000)) is a short query
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

Value = str | int | float | None


@dataclass
class Rows:
    columns: list[str]
    rows: list[list[Value]]
    more: Annotated[bool, "There are more rows than the limit let through."]


@contextmanager
def opened(database: Path) -> Generator[sqlite3.Connection, None, None]:
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        # A thread cannot be cancelled, so this limit also ends the query of a cancelled call: "interrupted".
        deadline = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        yield connection


def only_reading(action: int, *_about: str | None) -> int:
    # The database is opened read-only, but ATTACH could open another file.
    return sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY


def shown(value: Value | bytes) -> Value:
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot express it
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[:MAX_TEXT] + "…"
    return value


def explorer(database: Path) -> Server:
    server = Server("sqlite-explorer", version="1.0", instructions="Read sqlite://schema before you query.")

    @server.resource("sqlite://schema", mime_type="application/sql")
    def schema() -> str:
        """The tables, views and indexes of the database, as they were created."""
        with opened(database) as connection:
            found = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid")
            return "\n".join(f"{sql};" for (sql,) in found)

    @server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    def query(
        sql: str, parameters: list[Value] | None = None, limit: Annotated[int, Field(ge=1, le=1000)] = 100
    ) -> Rows:
        """Run one SELECT.

        Args:
            sql: The query, with a ? for each value.
            parameters: The values, in the order of the question marks.
            limit: The maximum number of rows.
        """
        try:
            with opened(database) as connection:
                connection.set_authorizer(only_reading)
                cursor = connection.execute(sql, parameters or [])
                rows = [[shown(value) for value in row] for row in cursor.fetchmany(limit)]
                more = cursor.fetchone() is not None
        except (sqlite3.Error, OverflowError) as error:
            # The model reads this error and can correct its query.
            raise ToolError(f"SQLite says: {error}") from None
        return Rows([column[0] for column in cursor.description or ()], rows, more)

    return server


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python examples/sqlite_explorer.py DATABASE")
    explorer(Path(sys.argv[1])).run()
