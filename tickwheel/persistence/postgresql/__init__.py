"""The PostgreSQL store: each batch is one statement, and tables with tasks are only added to."""

from __future__ import annotations

from tickwheel.persistence.postgresql.driver import PostgresOptions, options_from
from tickwheel.persistence.postgresql.store import PostgresStore

__all__ = ["PostgresOptions", "PostgresStore", "options_from"]
