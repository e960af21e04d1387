"""The other shards of a folder; see ``contract.Siblings``.

Each call opens the database of a shard read-only and closes it again. A connection that stays open
would need descriptors for each shard, and would prevent the shard's log from starting over when its
daemon ends. Calls run on a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tickwheel.model.kinds import COUNTER, GROUP
from tickwheel.model.records import SettingsCounter
from tickwheel.persistence.codec import decode_record, key_text
from tickwheel.persistence.contract import SiblingSettings, StoreAway
from tickwheel.persistence.sqlite.database import connect_reader, describe, identify, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tickwheel.model.kinds import RecordKey

CACHE_BYTES = 1 << 20
BUSY_MS = 500
_OF_KIND = "SELECT data FROM record WHERE kind = ?"
_EXISTS = "SELECT 1 FROM record WHERE kind = ? AND key = ?"


class SqliteSiblings:
    """The databases of a folder."""

    def __init__(self, database: Callable[[int], str]) -> None:
        """``database`` returns the path of a shard's database."""
        self._database = database
        self._thread = ThreadPoolExecutor(1, "tickwheel-sqlite-siblings")

    def prepare(self) -> None:
        """Do nothing: each call opens the file."""

    async def settings(self, shard: int, known_number: int | None) -> SiblingSettings:
        path = self._database(shard)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _read, path, known_number)

    async def contains(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        path = self._database(shard)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _contains, path, keys)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _open_snapshot(path: str) -> Iterator[sqlite3.Connection | None]:
    """Yield a connection with a snapshot, or None if the database is empty. Raise StoreAway."""
    try:
        connection = connect_reader(path, CACHE_BYTES, BUSY_MS, mode="ro")
        with contextlib.closing(connection), snapshot(connection):
            yield connection if identify(connection, path) else None
    except sqlite3.Error as error:
        raise StoreAway(f"cannot read {path}: {describe(error)}") from error


def _contains(path: str, keys: Sequence[RecordKey]) -> Sequence[bool]:
    with _open_snapshot(path) as connection:
        if connection is None:
            raise StoreAway(f"{path} is empty; no daemon uses it")
        rows = ((kind.number, key_text(key)) for kind, key in keys)
        return [connection.execute(_EXISTS, row).fetchone() is not None for row in rows]


def _read(path: str, known_number: int | None) -> SiblingSettings:
    with _open_snapshot(path) as connection:
        if connection is None:
            return SiblingSettings(SettingsCounter(), ())
        stored = connection.execute(_OF_KIND, (COUNTER.number,)).fetchone()
        counter = SettingsCounter() if stored is None else decode_record(COUNTER, stored[0])
        if counter.number == known_number:
            return SiblingSettings(counter, None)
        rows = connection.execute(_OF_KIND, (GROUP.number,))
        return SiblingSettings(counter, [decode_record(GROUP, data) for (data,) in rows])
