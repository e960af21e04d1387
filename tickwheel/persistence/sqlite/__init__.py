"""The embedded store: a SQLite database with its log, a lock file and a reserve file."""

from __future__ import annotations

from tickwheel.persistence.sqlite.database import SqliteOptions, options_from
from tickwheel.persistence.sqlite.store import SqliteStore

__all__ = ["SqliteOptions", "SqliteStore", "options_from"]
