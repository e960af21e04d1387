"""The settings of the SQLite store, with their units and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from tickwheel.persistence.contract import StoreUnusable

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """All may be given in the store's URL, for example ``sqlite:///x.db?wal_bytes=4194304``."""

    wal_bytes: int = 16 * MIB
    """The write-ahead log is written back into the database when it has grown to this."""
    reserve_bytes: int = 24 * MIB
    """Kept free for acks on a full disk. At least ``wal_bytes`` and some: writing the log back
    may make the database grow by nearly as much as the log holds. 0 keeps no reserve."""
    writer_cache_bytes: int = 4 * MIB
    reader_cache_bytes: int = 2 * MIB
    endings_max: int = 100_000
    """For how many finished tasks is known how they ended."""
    busy_ms: int = 5_000
    """How long to wait for another process (a sqlite3 shell) that holds the write lock."""

    disk_refuse: float = 1.0
    """Enqueues are refused while more of the disk than this share is used. The daemon's setting;
    not part of a URL, so that tools which copy a store are not stopped by it."""

    def fitted(self, disk_bytes: int) -> SqliteOptions:
        """The same for a disk of that size: a small volume cannot spare what a large one can."""
        return replace(
            self,
            wal_bytes=min(self.wal_bytes, disk_bytes // 16),
            reserve_bytes=min(self.reserve_bytes, disk_bytes // 8),
        )


def options_from(url: str, settings: Sequence[tuple[str, int]]) -> SqliteOptions:
    """Options from a URL's query; raises StoreUnusable for one that does not exist."""
    known = {field.name for field in fields(SqliteOptions)} - {"disk_refuse"}
    for name, _ in settings:
        if name not in known:
            raise StoreUnusable(
                f"store {url!r}: unknown setting {name!r}; known are {', '.join(sorted(known))}"
            )
    return SqliteOptions(**dict(settings))
