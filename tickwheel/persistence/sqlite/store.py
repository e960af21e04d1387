"""The SQLite store: the contract, spread over threads.

The writer has a thread of its own, so have short reads; what takes long (recovery, listings,
backups) runs on a few others, each with a connection of its own. Nothing here knows SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel import failpoints
from tickwheel.persistence.contract import (
    Handles,
    Heads,
    Keyed,
    Opened,
    Small,
    StoreBroken,
    StoreBusy,
    StoredTask,
    StoreUnusable,
)
from tickwheel.persistence.sqlite.database import (
    SqliteOptions,
    cannot_open,
    connect_reader,
    describe,
    is_busy,
)
from tickwheel.persistence.sqlite.reader import Reader
from tickwheel.persistence.sqlite.recovery import HandleReader, copy_database, read_small
from tickwheel.persistence.sqlite.rows import KeyReader
from tickwheel.persistence.sqlite.writer import Writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tickwheel.model.effects import Effects, ProgressKey
    from tickwheel.model.records import DeadRow

LONG_THREADS_MAX = 3
"""How many listings, backups and recoveries may run at one time."""
LONG_CACHE_BYTES = 1 << 20
ID_MAX = 2**63 - 1

_T = TypeVar("_T")


class SqliteStore:
    """The SQLite store: see ``contract.Store``. May be opened again after it was closed."""

    def __init__(self, path: str, options: SqliteOptions | None = None) -> None:
        self.path = os.path.realpath(path)
        """Links resolved, so that two names of a database have one lock."""
        self.options = options or SqliteOptions()
        self._writer = Writer(self.path, self.options)
        self._reader: Reader | None = None
        self._listers: SimpleQueue[Reader] = SimpleQueue()
        """A reader for each long thread, open from the start to the end: a listing must not need
        descriptors, which clients can use up."""
        self._writing: StoreThread | None = None
        self._reading: StoreThread | None = None
        self._long: ThreadPoolExecutor | None = None
        self._closing = False

    @property
    def has_room(self) -> bool:
        """Whether there is room: False from a refusal until ``probe_room`` finds some."""
        return self._writer.has_room

    @property
    def durability(self) -> str:
        """See ``Store.durability``."""
        return "synced to the disk before each answer: a confirmed task survives a power cut"

    async def open(self, owner: str, now_ms: int, *, epoch_min: int = 1) -> Opened:
        self._closing = False
        writing = StoreThread("tickwheel-sqlite-write")
        try:
            opened = await writing.ask(lambda: self._writer.open(owner, now_ms, epoch_min))
        except BaseException:
            writing.shutdown(wait=False)
            raise
        self._writing = writing
        self._reading = StoreThread("tickwheel-sqlite-read")
        self._long = ThreadPoolExecutor(LONG_THREADS_MAX, "tickwheel-sqlite-long")
        try:
            self._reader = Reader(self._connect(self.options.reader_cache_bytes))
            for _ in range(LONG_THREADS_MAX):
                self._listers.put(Reader(self._connect(LONG_CACHE_BYTES)))
        except sqlite3.Error as error:
            await self.close(clean=False)
            raise StoreUnusable(f"cannot read {self.path}: {describe(error)}") from error
        return opened

    async def recover_small(self) -> Small:
        def read() -> Small:
            connection = self._connect(LONG_CACHE_BYTES)
            try:
                return read_small(connection, self.options.endings_max)
            finally:
                connection.close()

        return await self._read(self._long, read)

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        handles = HandleReader(self._connect(LONG_CACHE_BYTES))
        try:
            found = await self._read(self._long, lambda: handles.first(chunk))
            if not found.ids:
                return
            yield found
            failpoints.hit("recovery.middle")
            if len(found.ids) < chunk:
                return
            await self._read(self._long, handles.sort)
            while (found := await self._read(self._long, lambda: handles.next(chunk))).ids:
                yield found
        finally:
            handles.close()

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        keys = KeyReader(self._connect(LONG_CACHE_BYTES))
        try:
            while (found := await self._read(self._long, keys.next)) is not None:
                yield found
        finally:
            keys.close()

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        if self._writing is None:
            raise StoreBroken("the store is not open")
        return await self._writing.ask(lambda: self._writer.commit(epoch, owner, n, effects))

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        reader = self._opened_reader()
        return await self._read(self._reading, lambda: reader.read(ids))

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        reader = self._opened_reader()
        return await self._read(self._reading, lambda: reader.read_some(ids, bytes_max))

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        reader = self._opened_reader()
        return await self._read(self._reading, lambda: reader.read_heads(ids, bytes_max))

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        after_id = max(-1, min(after_id, ID_MAX))
        return await self._list(lambda reader: reader.scan(after_id, limit, topic))

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        before_id = max(-1, min(before_id, ID_MAX + 1))
        return await self._list(lambda reader: reader.scan_back(before_id, limit, topic))

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        after = (max(-1, min(after[0], ID_MAX)), after[1])
        return await self._list(lambda reader: reader.scan_dead(after, limit, topic, group))

    async def backup(self, path: str) -> int:
        def copy() -> int:
            connection = self._connect(LONG_CACHE_BYTES)
            try:
                return copy_database(
                    connection, path, self.options.wal_bytes, lambda: self._closing
                )
            finally:
                connection.close()

        return await self._read(self._long, copy)

    async def probe_room(self) -> bool:
        if self._writing is None:
            raise StoreBroken("the store is not open")
        return await self._writing.ask(self._writer.probe_room)

    async def verify(self) -> None:
        """Return at once: nothing but this process changes the store."""

    async def close(self, clean: bool) -> None:
        """Close after what is under way has ended; a backup is given up."""
        self._closing = True
        loop = asyncio.get_running_loop()
        writing, self._writing = self._writing, None
        readers = [pool for pool in (self._reading, self._long) if pool is not None]
        self._reading = self._long = None
        for pool in readers:
            await loop.run_in_executor(None, pool.shutdown)
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        while not self._listers.empty():
            self._listers.get().close()
        if writing is not None:
            await writing.ask(lambda: self._writer.close(clean))
            writing.shutdown()

    # --- helpers -----------------------------------------------------------------------------

    def _connect(self, cache_bytes: int) -> sqlite3.Connection:
        return connect_reader(self.path, cache_bytes, self.options.busy_ms)

    def _opened_reader(self) -> Reader:
        if self._reader is None:
            raise StoreBroken("the store is not open")
        return self._reader

    async def _list(self, read: Callable[[Reader], _T]) -> _T:
        """Run a listing, which may scan the whole table, apart from the short reads."""

        def work() -> _T:
            reader = self._listers.get()
            try:
                return read(reader)
            finally:
                reader.rest()
                self._listers.put(reader)

        return await self._read(self._long, work)

    async def _read(
        self, pool: StoreThread | ThreadPoolExecutor | None, work: Callable[[], _T]
    ) -> _T:
        if pool is None:
            raise StoreBroken("the store is not open")
        self._writer.check_usable()
        try:
            if isinstance(pool, StoreThread):
                return await pool.ask(work)
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except sqlite3.Error as error:
            if cannot_open(error) or is_busy(error):
                message = f"store {self.path}: no further reader now: {describe(error)}"
                raise StoreBusy(message) from error
            raise StoreBroken(f"store {self.path}: reading failed: {describe(error)}") from error


class StoreThread:
    """One thread that does what a loop asks of it, in the order of asking.

    It costs less than an executor of one thread: an answer is one call into the loop, with no
    lock and no second future between. Every batch waits for that.
    """

    def __init__(self, name: str) -> None:
        self._asked: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._asked = SimpleQueue()
        # A process that ends without closing its store does not wait for it.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """What ``work`` returns or raises. Work that is cancelled before its turn is left out."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._asked.put((future, work))
        return future

    def shutdown(self, wait: bool = True) -> None:
        """End after what was asked so far; with ``wait`` return when it has ended."""
        self._asked.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, work = asked
            if future.cancelled():
                continue
            outcome, error = None, None
            try:
                outcome = work()
            except BaseException as raised:
                error = raised
            # A loop that is closed wants no answer any more.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(_answer, future, outcome, error)
            # What a batch holds must not stay until the next one.
            del asked, future, work, outcome, error


def _answer(future: asyncio.Future[Any], outcome: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
