"""The backup that a restore begins with: a SQLite store, read from a copy and never changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.errors import NotFound
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.store import Small, Store, StoredTask, StoreUnusable

PAGE = 1_000
OWNER = "restore"
ENDINGS_MAX = 100_000


@dataclass
class Backup:
    """What was stored when the backup was made; an empty one stands for none."""

    store: Store | None = None
    small: Small = field(default_factory=Small)
    epoch: int = 0
    """Of the daemon that made it; copies of other kinds of stores say 1."""
    id_mark: int = 0
    position_ms: int = 0
    """Of the wheel then: not after the moment of the backup."""

    async def read(self, ids: Sequence[int]) -> list[StoredTask]:
        if self.store is None or not ids:
            return []
        return list((await self.store.read(ids)).values())

    async def tasks(self) -> AsyncIterator[list[StoredTask]]:
        """All of them, by id."""
        after_id = -1
        while self.store is not None:
            page = await self.store.scan(after_id, PAGE, None)
            if not page:
                return
            yield page
            after_id = page[-1].row.id


@asynccontextmanager
async def open_backup(path: str | None, scratch: str | None) -> AsyncIterator[Backup]:
    """``scratch``: the folder for the copy. Raises NotFound, StoreUnusable, OSError."""
    if path is None:
        yield Backup()
        return
    source = Path(path)
    if not source.is_file():
        raise NotFound(f"backup {path}: no such file")
    if not source.stat().st_size:
        raise StoreUnusable(f"backup {path} is empty")
    with tempfile.TemporaryDirectory(prefix=".tickwheel-restore-", dir=scratch) as folder:
        copy = Path(folder) / "backup.db"
        shutil.copyfile(source, copy)
        log = source.with_name(source.name + "-wal")
        if log.exists():
            # A store that was in use, not a backup: what it had committed last is in here.
            shutil.copyfile(log, copy.with_name(copy.name + "-wal"))
        options = SqliteOptions(reserve_bytes=0, endings_max=ENDINGS_MAX)
        store = SqliteStore(str(copy), options)
        try:
            opened = await store.open(OWNER, 0)
        except StoreUnusable as error:
            raise StoreUnusable(error.message.replace(store.path, str(path))) from error
        try:
            yield Backup(
                store,
                await store.recover_small(),
                opened.epoch - 1,
                opened.id_mark,
                opened.position_ms,
            )
        finally:
            await store.close(clean=True)
