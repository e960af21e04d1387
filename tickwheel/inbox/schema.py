"""The statements that create an inbox, which people can read and run."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

SCHEMA: Final = "tickwheel"


def in_schema(text: str, schema: str) -> str:
    """Return SQL that is written for the schema ``tickwheel``, for another schema."""
    if schema == SCHEMA:
        return text
    quoted = '"' + schema.replace('"', '""') + '"'
    text = text.replace("tickwheel.", f"{quoted}.")
    for clause in ("IN SCHEMA ", "IF NOT EXISTS ", "USAGE ON SCHEMA "):
        for end in (" ", ";"):
            text = text.replace(f"{clause}tickwheel{end}", f"{clause}{quoted}{end}")
    return text


def postgresql_sql(schema: str = SCHEMA) -> str:
    """Return the statements for PostgreSQL."""
    return in_schema(files("tickwheel.inbox").joinpath("postgresql.sql").read_text(), schema)


def sqlite_sql() -> str:
    """Return the statements for SQLite."""
    return files("tickwheel.inbox").joinpath("sqlite.sql").read_text()
