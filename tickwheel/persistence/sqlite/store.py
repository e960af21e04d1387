"""The SQLite store: the contract, spread over threads.

The writer has a thread of its own, so have short reads; what takes long (recovery, listings,
backups) runs on a few others, each with a connection of its own. ``SqliteStore`` knows no SQL.
Before it are the two that a store does beside its work: what a start reads, and copies of a
database in use. Both run beside the writer, synchronously, on connections of their own.

A start reads the small tables whole, and the handles of all tasks in due order. The first chunk is
picked out of one pass over all due times, so that work can begin; a second pass deals the other
handles out to arrays by their due times, each of which is sorted when its turn comes. Both passes
are snapshots that end before a chunk is handed out: commits go on and the log can start over while
millions of handles are loaded. Between the two nothing happens to a task that the first has not
handed out, so what is handed out comes to the one moment of the first.

A copy is consistent. It is written under another name, synced, and given its name last: a file of
the name asked for is always whole. It never replaces a file that is there.
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
    Handles,
    Heads,
    Keyed,
    Known,
    Opened,
    Small,
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
from tickwheel.waiting import to_its_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tickwheel.model.kinds import Effects, ProgressKey
    from tickwheel.model.records import DeadRow

PACKS_AT_ONCE = 1_000
ROWS_AT_ONCE = 10_000
HANDLES_A_DEAL = 32_768
HANDLES_A_PART = 32_768
"""About how many handles are sorted at once."""
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


def read_small(connection: sqlite3.Connection, endings_max: int) -> Small:
    """All small tables, read at one moment."""
    with snapshot(connection):
        return Small(
            records=read_records(connection),
            progress=[progress_row(*row) for row in connection.execute("SELECT * FROM prepare")],
            dead=list(connection.execute("SELECT id, grp, topic FROM dead ORDER BY id, grp")),
            outcomes=_endings(connection, endings_max),
        )


def _endings(connection: sqlite3.Connection, endings_max: int) -> list[tuple[int, Outcome]]:
    found: list[tuple[int, Outcome]] = []
    for (data,) in connection.execute("SELECT data FROM ending ORDER BY batch"):
        found += decode_endings(data)
    return found[-endings_max:]


Run = tuple[Sequence[int], Sequence[int], Sequence[str]]
"""(ids, due times, topics), by id."""
Place = tuple[int, int]
"""(due time, id): where a handle stands in the order."""


class HandleReader:
    """Reads all handles in due order: call ``first``, then ``sort``, then ``next``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """``close`` closes the connection."""
        self._connection = connection
        self._packed = _PACKED.format(dues=blob_join(connection).format("now"))
        self._last_id = 0
        """The highest id in the first pass; tasks made later are not handed out."""
        self._cut: Place | None = None
        """The last handle of the first chunk; None: there are no others."""
        self._bounds: list[int] = []
        """The last due times of all parts except the last part."""
        self._total = 0
        """How many handles the first pass has seen."""
        self._later: _Later | None = None

    def first(self, chunk: int) -> Handles:
        """The ``chunk`` handles that are due first, or all if there are fewer."""
        found: list[tuple[int, int, str]] = []
        sample = array("q")
        until_ms = DUE_MS_MAX
        with snapshot(self._connection):
            (self._last_id,) = self._connection.execute(_LAST).fetchone()
            for ids, dues_ms, topics in self._runs():
                self._total += len(ids)
                sample.append(dues_ms[self._total % len(dues_ms)])
                early = [index for index, due_ms in enumerate(dues_ms) if due_ms <= until_ms]
                found += [(dues_ms[index], ids[index], topics[index]) for index in early]
                if len(found) >= 4 * chunk:
                    found.sort()
                    del found[chunk:]
                    until_ms = found[-1][0]
        found.sort()
        del found[chunk:]
        if self._total > chunk:
            self._cut = found[-1][0], found[-1][1]
            self._bounds = _bounds(sorted(sample), self._total // HANDLES_A_PART)
        return Handles([h[1] for h in found], [h[0] for h in found], [h[2] for h in found])

    def sort(self) -> None:
        """Read and sort, in a second pass, the handles behind the first chunk."""
        if self._cut is None:
            return
        with snapshot(self._connection):
            later = self._later = _Later(self._cut, self._bounds, self._total)
            for run in self._runs():
                later.add(*run)
            later.deal()

    def next(self, chunk: int) -> Handles:
        """The next handles; empty: there are no more."""
        return self._later.take(chunk) if self._later is not None else Handles((), (), ())

    def counted(self, due_ms: int, without: AbstractSet[int]) -> tuple[int, array[int]]:
        """How many tasks there are but for these, and the ids of those that are due by then."""
        count, due = 0, array("q")
        with snapshot(self._connection):
            (self._last_id,) = self._connection.execute(_LAST).fetchone()
            for ids, dues_ms, _ in self._runs():
                left = [at for at, one in enumerate(ids) if one not in without]
                count += len(left)
                due.extend(ids[at] for at in left if dues_ms[at] <= due_ms)
        return count, due

    def close(self) -> None:
        self._connection.close()

    def _runs(self) -> Iterator[Run]:
        """All handles in runs; inside a snapshot. Statements return one row: see ``reader.py``."""
        after_id = -1
        while True:
            columns = (after_id, self._last_id, ROWS_AT_ONCE)
            found = self._connection.execute(_LOOSE, columns).fetchone()
            ids, dues_ms, topics = map(json.loads, found)
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
    here = [bit for bit in range(len(dues_ms)) if not mask >> bit & 1]
    return [ids[b] for b in here], [dues_ms[b] for b in here], [topics[b] for b in here]


def _bounds(sample: Sequence[int], parts: int) -> list[int]:
    """Ascending due times that divide the sample, and so about all handles, evenly."""
    picks = {sample[len(sample) * n // parts] for n in range(1, parts)} if parts > 1 else set()
    return sorted(picks)


class _Later:
    """Handles after ``cut``, dealt out by their due times and sorted part by part.

    A handle is (due time after the cut) << (bits of an index) | its index, so that sorting is C's
    work.
    """

    def __init__(self, cut: Place, bounds: Sequence[int], count_max: int) -> None:
        """``count_max``: how many handles will be added at most."""
        self._cut_ms, self._cut_id = cut
        self._bits = count_max.bit_length()
        self._bounds = [(bound + 1 - self._cut_ms) << self._bits for bound in bounds]
        self._parts: list[list[int] | array[int]] = [array("q") for _ in range(len(bounds) + 1)]
        self._ids = array("q")
        self._numbers = array("I")
        """The number of each handle's topic."""
        self._names: dict[str, int] = {}
        self._is_mixed = False
        """Whether indexes are not in the order of the ids."""
        self._undealt: list[int] = []
        self._sorted: list[int] = []
        """What is left of the part whose turn it is, the last handle first."""

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
        if len(self._undealt) >= HANDLES_A_DEAL:
            self.deal()

    def deal(self) -> None:
        """Deal the handles that were added out to their parts."""
        some, self._undealt = sorted(self._undealt), []
        start, end = bisect_left(some, 0), bisect_left(some, 1 << self._bits)
        at_cut = [handle for handle in some[start:end] if self._ids[handle] > self._cut_id]
        some[:end] = at_cut
        start = 0
        for number, bound in enumerate((*self._bounds, None)):
            end = len(some) if bound is None else bisect_left(some, bound, start)
            if end > start:
                self._put(number, some[start:end])
            start = end

    def _put(self, number: int, some: list[int]) -> None:
        try:
            self._parts[number].extend(some)
        except OverflowError:  # due in a thousand years
            self._parts[number] = [*self._parts[number], *some]

    def take(self, count: int) -> Handles:
        """The next handles; empty: there are no more."""
        some: list[int] = []
        while len(some) < count and (self._sorted or self._parts):
            if not self._sorted:
                self._sorted = self._in_order(self._parts.pop(0))
            wanted = count - len(some)
            some += reversed(self._sorted[-wanted:])
            del self._sorted[-wanted:]
        cut_ms, names, numbers = self._cut_ms, list(self._names), self._numbers
        bits, mask = self._bits, (1 << self._bits) - 1
        indexes = [handle & mask for handle in some]
        return Handles(
            [*map(self._ids.__getitem__, indexes)],
            [(handle >> bits) + cut_ms for handle in some],
            names * len(some) if len(names) == 1 else [names[numbers[index]] for index in indexes],
        )

    def _in_order(self, part: Sequence[int]) -> list[int]:
        """A part sorted, the last handle first. Rows on their own were added before packs."""
        ids, bits, mask = self._ids, self._bits, (1 << self._bits) - 1
        ordered = sorted(part)
        if self._is_mixed:
            ordered.sort(key=lambda handle: (handle >> bits, ids[handle & mask]))
        ordered.reverse()
        return ordered


PAGES_A_STEP = 4096


def copy_database(
    source: sqlite3.Connection, path: str, slack_bytes: int, stop: Callable[[], bool]
) -> int:
    """Copy everything committed so far to ``path``; the copy's size in bytes.

    ``slack_bytes`` stay free on the disk. ``stop`` is asked between steps, to give up.
    """
    if os.path.lexists(path):
        raise StoreError(f"backup: {path} exists already")
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

    # One snapshot around all steps: without it a commit would start the copy over.
    with snapshot(source):
        (pages,) = source.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
        source.execute("SELECT 1 FROM meta").fetchone()
        if free_bytes(part) < pages * page_bytes + slack_bytes:
            raise StoreError(f"backup: no room on the disk for {pages * page_bytes} bytes more")
        target = sqlite3.connect(part, isolation_level=None)
        try:
            target.execute("PRAGMA synchronous = OFF")  # synced once, when it is whole
            source.backup(target, pages=PAGES_A_STEP, progress=progress, sleep=0)
        finally:
            target.close()
    disk.sync(part)


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

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, known: Sequence[Known] = ()
    ) -> Opened:
        self._closing = False
        writing = StoreThread("tickwheel-sqlite-write")
        try:
            opened = await writing.ask(lambda: self._writer.open(owner, now_ms, epoch_min, known))
        except asyncio.CancelledError:
            # The thread opens it all the same: it has to give the lock back behind that.
            closing = writing.ask(lambda: self._writer.close(False))
            writing.shutdown(wait=False)
            with contextlib.suppress(Exception):
                await to_its_end(closing)
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

    async def recover_small(self) -> Small:
        def read() -> Small:
            with contextlib.closing(self._connect(LONG_CACHE_BYTES)) as connection:
                return read_small(connection, self.options.endings_max)

        return await self._read(self._long, read)

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        handles = HandleReader(self._connect(LONG_CACHE_BYTES))
        try:
            found = await self._read_through(lambda: handles.first(chunk))
            if not found.ids:
                return
            yield found
            failpoints.hit("recovery.middle")
            if len(found.ids) < chunk:
                return
            await self._read_through(handles.sort)
            while (found := await self._read_through(lambda: handles.next(chunk))).ids:
                yield found
        finally:
            handles.close()

    async def count(self, due_ms: int, without: AbstractSet[int]) -> tuple[int, array[int]]:
        """How many tasks there are but for these, and the ids of those that are due by then."""
        with contextlib.closing(HandleReader(self._connect(LONG_CACHE_BYTES))) as handles:
            return await self._read(self._long, lambda: handles.counted(due_ms, without))

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        with contextlib.closing(self._connect(LONG_CACHE_BYTES)) as connection:
            keys = read_keys(connection)
            while (found := await self._read_through(lambda: next(keys, None))) is not None:
                yield found

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

    async def _read_through(self, work: Callable[[], _T]) -> _T:
        """Run a step on a connection that its caller closes. A caller that is cancelled goes on
        when the step has ended: closing a connection that a thread uses crashes the process."""
        return await to_its_end(self._read(self._long, work))


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
