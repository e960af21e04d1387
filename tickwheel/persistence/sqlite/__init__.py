"""The embedded store: one SQLite database, its log, a lock and a reserve file beside it."""

from __future__ import annotations

from tickwheel.persistence.sqlite.database import SqliteOptions, options_from
from tickwheel.persistence.sqlite.store import SqliteStore

__all__ = ["SqliteOptions", "SqliteStore", "options_from"]
