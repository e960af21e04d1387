"""The embedded store: one SQLite database, its log, a lock and a reserve file beside it."""

from __future__ import annotations

from tickwheel.persistence.sqlite.store import SqliteOptions, SqliteStore, options_from

__all__ = ["SqliteOptions", "SqliteStore", "options_from"]
