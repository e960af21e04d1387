"""The statements that create an inbox, which people can read and run."""

from __future__ import annotations

import re
from importlib.resources import files

from tickwheel.client.sql import SCHEMA, check_schema

FOLDER = files("tickwheel.inbox")


def in_schema(text: str, schema: str) -> str:
    """Return SQL that is written for the schema ``tickwheel``, for another schema. Its name is
    checked (``check_schema``)."""
    if schema == SCHEMA:
        return text
    quoted = f'"{schema}"'
    text = text.replace("tickwheel.", f"{quoted}.").replace("'tickwheel'", f"'{schema}'")
    return re.sub(r"SCHEMA tickwheel(?=[ ;])", f"SCHEMA {quoted}", text)


def postgresql_sql(schema: str = SCHEMA) -> str:
    """Return the statements for PostgreSQL. Raise BadRequest."""
    check_schema(schema)
    return in_schema(FOLDER.joinpath("postgresql.sql").read_text(), schema)


def sqlite_sql() -> str:
    """Return the statements for SQLite."""
    return FOLDER.joinpath("sqlite.sql").read_text()
