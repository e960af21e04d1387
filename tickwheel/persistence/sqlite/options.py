"""Settings of the SQLite store, with units and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from tickwheel.persistence.contract import StoreUnusable

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """Options of the SQLite store; a URL may have them: ``sqlite:///x.db?wal_bytes=4194304``."""

    wal_bytes: int = 16 * MIB
    """The write-ahead log is written back into the database when it has grown to this."""
    reserve_bytes: int = 24 * MIB
    """Kept free for acks on a full disk. At least ``wal_bytes`` and some: writing the log back
    may make the database grow by nearly as much as the log holds. 0 keeps no reserve."""
    writer_cache_bytes: int = 4 * MIB
    reader_cache_bytes: int = 2 * MIB
    endings_max: int = 100_000
    """For how many finished tasks the ending is remembered."""
    busy_ms: int = 5_000
    """How long to wait for another process (a shell) that holds the write lock, in ms."""

    disk_refuse: float = 1.0
    """Enqueues are refused while more of the disk than this share is used. The daemon's setting;
    not part of a URL, so that tools which copy a store are not stopped by it."""

    def fitted(self, disk_bytes: int) -> SqliteOptions:
        """These options for a disk of that size: small volumes cannot spare what large ones can."""
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
