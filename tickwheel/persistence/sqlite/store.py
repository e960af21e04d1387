"""The SQLite store, which implements the contract with several threads.

The writer and short reads each have a thread. Long operations (recovery, listings, backups) run on
a few other threads, each with its own connection. ``SqliteStore`` knows no SQL. Recovery and copies
of a database in use are synchronous and run concurrently with the writer.

Recovery reads the small tables completely, and the handles of all tasks in due order. A first pass
over all due times selects the first chunk, so that the daemon can begin to work. A second pass
distributes the other handles into arrays by due time, and each array is sorted when it is needed.
Each pass is a snapshot that ends before the first of its chunks is returned: commits continue, and
the log can start over, while millions of handles are loaded. Between the passes no task outside of
the first chunk changes, so all chunks together have the state at the first pass.

A copy is consistent. It is written under a temporary name, synced, and then renamed, so a file
with the final name is always complete. It never replaces an existing file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel import disk, failpoints
from tickwheel.model.records import ID_STEP, Outcome
from tickwheel.persistence.codec import decode_endings
from tickwheel.persistence.contract import (
    Evidence,
    Handles,
    Heads,
    Keyed,
    Opened,
    SmallState,
    StoreBroken,
    StoreBusy,
    StoredTask,
    StoreError,
    StoreUnusable,
)
from tickwheel.persistence.identity import COPY
from tickwheel.persistence.sqlite.database import (
    BRANCH,
    SqliteOptions,
    blob_join,
    blob_of,
    cannot_open,
    connect_reader,
    describe,
    free_bytes,
    is_busy,
    snapshot,
    whole_or_nothing,
    write_meta,
)
from tickwheel.persistence.sqlite.packs import DUE_BYTES, topics_of
from tickwheel.persistence.sqlite.reader import Reader
from tickwheel.persistence.sqlite.rows import (
    DUES,
    progress_row,
    read_keys,
    read_moves,
    read_records,
)
from tickwheel.persistence.sqlite.writer import Writer
from tickwheel.waiting import finish_despite_cancellation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tickwheel.model.kinds import Effects, ProgressKey
    from tickwheel.model.records import DeadRow

PACKS_AT_ONCE = 1_000
ROWS_AT_ONCE = 10_000
HANDLES_PER_DEAL = 32_768
HANDLES_PER_PART = 32_768
"""Approximate number of handles that are sorted at once."""
DUE_MS_MAX = 2**63 - 1

_LAST = (
    "SELECT max(ifnull((SELECT max(id) FROM task), 0),"
    f" ifnull((SELECT first + (count - 1) * {ID_STEP} FROM pack ORDER BY first DESC LIMIT 1), 0))"
)
_LOOSE = (
    "SELECT json_group_array(id), json_group_array(due_ms), json_group_array(topic) FROM"
    " (SELECT id, due_ms, topic FROM task WHERE id > ?1 AND id <= ?2 ORDER BY id LIMIT ?3)"
)
_PACKED = (
    "SELECT json_group_array(json_array(first, count, topics, mask)), {dues} FROM"
    f" (SELECT first, count, topics, ifnull(mask, 0) AS mask, {DUES} AS now"
    " FROM pack LEFT JOIN gone USING (first) LEFT JOIN moved USING (first)"
    " WHERE first > ?1 AND first <= ?2 ORDER BY first LIMIT ?3)"
)


def read_small(connection: sqlite3.Connection, endings_max: int) -> SmallState:
    """Read all small tables in one snapshot."""
    with snapshot(connection):
        return SmallState(
            records=read_records(connection),
            progress=[progress_row(*row) for row in connection.execute("SELECT * FROM prepare")],
            dead=list(connection.execute("SELECT id, grp, topic FROM dead ORDER BY id, grp")),
            outcomes=_endings(connection, endings_max),
        )


def _endings(connection: sqlite3.Connection, endings_max: int) -> list[tuple[int, Outcome]]:
    outcomes: list[tuple[int, Outcome]] = []
    for (data,) in connection.execute("SELECT data FROM ending ORDER BY batch"):
        outcomes += decode_endings(data)
    return outcomes[-endings_max:]


Run = tuple[Sequence[int], Sequence[int], Sequence[str]]
"""(ids, due times, topics), by id."""
Position = tuple[int, int]
"""(due time, id): the position of a handle in due order."""


class HandleReader:
    """Reads all handles in due order: call ``first``, then ``sort``, then ``next``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Take over the connection, which ``close`` closes."""
        self._connection = connection
        self._packed = _PACKED.format(dues=blob_join(connection).format("now"))
        self._last_id = 0
        """The highest id in the first pass; tasks created later are not returned."""
        self._cut: Position | None = None
        """The last handle of the first chunk, or None if that chunk has all handles."""
        self._bounds: list[int] = []
        """The last due time of each part except the last part."""
        self._total = 0
        """Number of handles in the first pass."""
        self._later: _Later | None = None

    def first(self, chunk: int) -> Handles:
        """Return the ``chunk`` handles that are due first, or all if there are fewer."""
        earliest: list[tuple[int, int, str]] = []
        sample = array("q")
        until_ms = DUE_MS_MAX
        with snapshot(self._connection):
            (self._last_id,) = self._connection.execute(_LAST).fetchone()
            for ids, dues_ms, topics in self._runs():
                self._total += len(ids)
                sample.append(dues_ms[self._total % len(dues_ms)])
                due_indexes = [index for index, due_ms in enumerate(dues_ms) if due_ms <= until_ms]
                earliest += [(dues_ms[index], ids[index], topics[index]) for index in due_indexes]
                if len(earliest) >= 4 * chunk:
                    earliest.sort()
                    del earliest[chunk:]
                    until_ms = earliest[-1][0]
        earliest.sort()
        del earliest[chunk:]
        if self._total > chunk:
            self._cut = earliest[-1][0], earliest[-1][1]
            self._bounds = _bounds(sorted(sample), self._total // HANDLES_PER_PART)
        return Handles([h[1] for h in earliest], [h[0] for h in earliest], [h[2] for h in earliest])

    def sort(self) -> None:
        """Read the handles after the first chunk, in a second pass, and divide them into parts."""
        if self._cut is None:
            return
        with snapshot(self._connection):
            later = self._later = _Later(self._cut, self._bounds, self._total)
            for run in self._runs():
                later.add(*run)
            later.deal()

    def next(self, chunk: int) -> Handles:
        """Return the next handles, or none if there are no more."""
        return self._later.take(chunk) if self._later is not None else Handles((), (), ())

    def counted(self, due_ms: int, without: AbstractSet[int]) -> tuple[int, array[int]]:
        """Return the number of tasks, except those in ``without``, and the ids of those due by
        ``due_ms``."""
        count, due = 0, array("q")
        with snapshot(self._connection):
            (self._last_id,) = self._connection.execute(_LAST).fetchone()
            for ids, dues_ms, _ in self._runs():
                indexes = [index for index, task_id in enumerate(ids) if task_id not in without]
                count += len(indexes)
                due.extend(ids[index] for index in indexes if dues_ms[index] <= due_ms)
        return count, due

    def close(self) -> None:
        self._connection.close()

    def _runs(self) -> Iterator[Run]:
        """Yield all handles in runs. Call it inside a snapshot. ``reader.py`` explains why each
        statement returns one row."""
        after_id = -1
        while True:
            columns = (after_id, self._last_id, ROWS_AT_ONCE)
            row = self._connection.execute(_LOOSE, columns).fetchone()
            ids, dues_ms, topics = map(json.loads, row)
            if ids:
                yield ids, dues_ms, topics
                after_id = ids[-1]
            if len(ids) < ROWS_AT_ONCE:
                break
        after_id, moves = -1, read_moves(self._connection)
        while True:
            columns = (after_id, self._last_id, PACKS_AT_ONCE)
            places, joined = self._connection.execute(self._packed, columns).fetchone()
            packs, heads, at = json.loads(places), blob_of(joined), 0
            for first, count, names, mask in packs:
                dues_ms = array("q")
                dues_ms.frombytes(heads[at : at + DUE_BYTES * count])
                at += DUE_BYTES * count
                if moves:
                    ids = range(first, first + count * ID_STEP, ID_STEP)
                    dues_ms = array("q", map(moves.get, ids, dues_ms))
                run = _run_of(first, dues_ms, topics_of(names, count), mask)
                if run[0]:
                    yield run
            if len(packs) < PACKS_AT_ONCE:
                return
            after_id = packs[-1][0]


def _run_of(first: int, dues_ms: Sequence[int], topics: Sequence[str], mask: int) -> Run:
    ids = range(first, first + len(dues_ms) * ID_STEP, ID_STEP)
    if not mask:
        return ids, dues_ms, topics
    bits = [bit for bit in range(len(dues_ms)) if not mask >> bit & 1]
    return [ids[b] for b in bits], [dues_ms[b] for b in bits], [topics[b] for b in bits]


def _bounds(sample: Sequence[int], parts: int) -> list[int]:
    """Return ascending due times that divide the sample, and thus the handles, evenly."""
    picks = {sample[len(sample) * n // parts] for n in range(1, parts)} if parts > 1 else set()
    return sorted(picks)


class _Later:
    """Handles after ``cut``, divided into parts by due time. Each part is sorted when it is needed.
    A handle is stored as one number, (due time after the cut) << (bits of an index) | its index, so
    that C code can sort it."""

    def __init__(self, cut: Position, bounds: Sequence[int], count_max: int) -> None:
        """``count_max``: maximum number of handles that will be added."""
        self._cut_ms, self._cut_id = cut
        self._bits = count_max.bit_length()
        self._bounds = [(bound + 1 - self._cut_ms) << self._bits for bound in bounds]
        self._parts: list[list[int] | array[int]] = [array("q") for _ in range(len(bounds) + 1)]
        self._ids = array("q")
        self._numbers = array("I")
        """For each handle, the index of its topic in ``_names``."""
        self._names: dict[str, int] = {}
        self._is_mixed = False
        """Whether the order of the indexes differs from the order of the ids."""
        self._undealt: list[int] = []
        self._sorted: list[int] = []
        """The remaining handles of the current part, in descending order."""

    def add(self, ids: Sequence[int], dues_ms: Sequence[int], topics: Sequence[str]) -> None:
        names, cut_ms, bits = self._names, self._cut_ms, self._bits
        for name in set(topics):
            names.setdefault(name, len(names))
        self._is_mixed |= len(self._ids) > 0 and self._ids[-1] > ids[0]
        self._undealt += [
            (due_ms - cut_ms) << bits | index
            for index, due_ms in enumerate(dues_ms, len(self._ids))
        ]
        self._ids.extend(ids)
        if topics.count(topics[0]) == len(topics):
            self._numbers.extend(array("I", (names[topics[0]],)) * len(topics))
        else:
            self._numbers.extend(map(names.__getitem__, topics))
        if len(self._undealt) >= HANDLES_PER_DEAL:
            self.deal()

    def deal(self) -> None:
        """Distribute the added handles to their parts."""
        handles, self._undealt = sorted(self._undealt), []
        start, end = bisect_left(handles, 0), bisect_left(handles, 1 << self._bits)
        at_cut = [handle for handle in handles[start:end] if self._ids[handle] > self._cut_id]
        handles[:end] = at_cut
        start = 0
        for number, bound in enumerate((*self._bounds, None)):
            end = len(handles) if bound is None else bisect_left(handles, bound, start)
            if end > start:
                self._add_to_part(number, handles[start:end])
            start = end

    def _add_to_part(self, number: int, handles: list[int]) -> None:
        try:
            self._parts[number].extend(array("q", handles))  # all of them or none
        except OverflowError:  # the due time is too far ahead for 64 bits with the index
            self._parts[number] = [*self._parts[number], *handles]

    def take(self, count: int) -> Handles:
        """Return the next handles, or none if there are no more."""
        handles: list[int] = []
        while len(handles) < count and (self._sorted or self._parts):
            if not self._sorted:
                self._sorted = self._in_order(self._parts.pop(0))
            missing = count - len(handles)
            handles += reversed(self._sorted[-missing:])
            del self._sorted[-missing:]
        cut_ms, names, numbers = self._cut_ms, list(self._names), self._numbers
        bits, mask = self._bits, (1 << self._bits) - 1
        indexes = [handle & mask for handle in handles]
        return Handles(
            [*map(self._ids.__getitem__, indexes)],
            [(handle >> bits) + cut_ms for handle in handles],
            names * len(handles)
            if len(names) == 1
            else [names[numbers[index]] for index in indexes],
        )

    def _in_order(self, part: Sequence[int]) -> list[int]:
        """Sort a part in descending order. Ties need ids, because single rows precede packs."""
        ids, bits, mask = self._ids, self._bits, (1 << self._bits) - 1
        ordered = sorted(part)
        if self._is_mixed:
            ordered.sort(key=lambda handle: (handle >> bits, ids[handle & mask]))
        ordered.reverse()
        return ordered


PAGES_PER_STEP = 4096


def copy_database(
    source: sqlite3.Connection, path: str, slack_bytes: int, stop: Callable[[], bool]
) -> int:
    """Copy all committed data to ``path``. Return the size of the copy in bytes. The copy leaves at
    least ``slack_bytes`` free on the disk. Raise StoreError once ``stop``, which is called between
    steps, returns True."""
    if os.path.lexists(path):
        raise StoreError(f"backup: {path} already exists")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise StoreError(f"backup: {os.path.dirname(path)} is not a folder")
    try:
        with whole_or_nothing(path) as part:
            _copy(source, part, slack_bytes, stop)
            write_meta(part, {BRANCH: COPY})
            size_bytes = os.path.getsize(part)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"backup to {path} failed: {describe(error)}") from error
    return size_bytes


def _copy(
    source: sqlite3.Connection, part: str, slack_bytes: int, stop: Callable[[], bool]
) -> None:
    def progress(status: int, remaining: int, total: int) -> None:
        if stop():
            raise StoreError("backup: the store is closing")

    # All steps share one snapshot. Otherwise a commit would make the copy start over.
    with snapshot(source):
        (pages,) = source.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
        source.execute("SELECT 1 FROM meta").fetchone()
        if free_bytes(part) < pages * page_bytes + slack_bytes:
            raise StoreError(f"backup: the disk has no room for another {pages * page_bytes} bytes")
        target = sqlite3.connect(part, isolation_level=None)
        try:
            target.execute("PRAGMA synchronous = OFF")  # synced once, when it is complete
            source.backup(target, pages=PAGES_PER_STEP, progress=progress, sleep=0)
        finally:
            target.close()
    disk.sync(part)


LONG_THREADS_MAX = 3
"""Maximum number of listings, backups and recoveries that run at the same time."""
LONG_CACHE_BYTES = 1 << 20
ID_MAX = 2**63 - 1

_T = TypeVar("_T")


class SqliteStore:
    """The SQLite store; see ``contract.Store``. It can be opened again after it was closed."""

    def __init__(self, path: str, options: SqliteOptions | None = None) -> None:
        self.path = os.path.realpath(path)
        """The path with links resolved, so that two names of a database have the same lock."""
        self.options = options or SqliteOptions()
        self._writer = Writer(self.path, self.options)
        self._reader: Reader | None = None
        self._listers: SimpleQueue[Reader] = SimpleQueue()
        """A reader for each long thread, open as long as the store. Clients can use up all
        descriptors, so a listing must not need a new one."""
        self._writing: StoreThread | None = None
        self._reading: StoreThread | None = None
        self._long: ThreadPoolExecutor | None = None
        self._closing = False

    @property
    def has_room(self) -> bool:
        """Whether the store has room. False from a refusal until ``probe_room`` returns True."""
        return self._writer.has_room

    @property
    def durability(self) -> str:
        """See ``Store.durability``."""
        return "synced to the disk before each answer: a confirmed task survives a power cut"

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = ()
    ) -> Opened:
        self._closing = False
        writing = StoreThread("tickwheel-sqlite-write")
        try:
            opened = await writing.ask(
                lambda: self._writer.open(owner, now_ms, epoch_min, evidence)
            )
        except asyncio.CancelledError:
            # The thread will still finish opening the store, and must then release the lock.
            closing = writing.ask(lambda: self._writer.close(False))
            writing.shutdown(wait=False)
            with contextlib.suppress(Exception):
                await finish_despite_cancellation(closing)
            raise
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

    async def recover_small(self) -> SmallState:
        def read() -> SmallState:
            with contextlib.closing(self._connect(LONG_CACHE_BYTES)) as connection:
                return read_small(connection, self.options.endings_max)

        return await self._read(self._long, read)

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        handles = HandleReader(self._connect(LONG_CACHE_BYTES))
        try:
            part = await self._read_through(lambda: handles.first(chunk))
            if not part.ids:
                return
            yield part
            failpoints.hit("recovery.middle")
            if len(part.ids) < chunk:
                return
            await self._read_through(handles.sort)
            while (part := await self._read_through(lambda: handles.next(chunk))).ids:
                yield part
        finally:
            handles.close()

    async def count(self, due_ms: int, without: AbstractSet[int]) -> tuple[int, array[int]]:
        """Return the number of tasks, except those in ``without``, and the ids of those due by
        ``due_ms``."""
        with contextlib.closing(HandleReader(self._connect(LONG_CACHE_BYTES))) as handles:
            return await self._read(self._long, lambda: handles.counted(due_ms, without))

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        with contextlib.closing(self._connect(LONG_CACHE_BYTES)) as connection:
            keys = read_keys(connection)
            while (part := await self._read_through(lambda: next(keys, None))) is not None:
                yield part

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
            with contextlib.closing(self._connect(LONG_CACHE_BYTES)) as connection:
                wal_bytes = self.options.wal_bytes
                return copy_database(connection, path, wal_bytes, lambda: self._closing)

        return await self._read(self._long, copy)

    async def probe_room(self) -> bool:
        if self._writing is None:
            raise StoreBroken("the store is not open")
        return await self._writing.ask(self._writer.probe_room)

    async def verify(self) -> None:
        """Return at once, because only this process changes the store."""

    async def close(self, clean: bool) -> None:
        """Close the store after all operations have ended. Abandon a backup."""
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
        """Run a listing, which may scan the whole table, on one of the long threads."""

        def work() -> _T:
            reader = self._listers.get()
            try:
                return read(reader)
            finally:
                reader.release_pages()
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
                message = f"store {self.path}: cannot open another reader: {describe(error)}"
                raise StoreBusy(message) from error
            raise StoreBroken(f"store {self.path}: reading failed: {describe(error)}") from error

    async def _read_through(self, work: Callable[[], _T]) -> _T:
        """Run a step on a connection that the caller closes. A cancelled caller resumes only after
        the step has ended, because closing a connection that a thread uses crashes the process."""
        return await finish_despite_cancellation(self._read(self._long, work))


class StoreThread:
    """A thread that runs functions for an event loop, in order. It costs less than an executor with
    one thread, because an answer is one call into the loop, without a lock or a second future.
    Every batch waits for such an answer."""

    def __init__(self, name: str) -> None:
        self._requests: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._requests = SimpleQueue()
        # The thread is a daemon thread, so that a process can end without closing its store.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Return a future for the result of ``work``. If it is cancelled before the thread begins
        the work, the work is skipped."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._requests.put((future, work))
        return future

    def shutdown(self, wait: bool = True) -> None:
        """End the thread after all earlier requests. ``wait``: until it has ended."""
        self._requests.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            future, work = request
            if future.cancelled():
                continue
            outcome, error = None, None
            try:
                outcome = work()
            except BaseException as raised:
                error = raised
            # A closed loop raises RuntimeError and needs no answer.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(_answer, future, outcome, error)
            # References to a batch must not live until the next batch.
            del request, future, work, outcome, error


def _answer(future: asyncio.Future[Any], outcome: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
