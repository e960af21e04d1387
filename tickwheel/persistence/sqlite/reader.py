"""Reading beside the writer: rows by id, pages of tasks, pages of dead letters.

Synchronous; a connection is used by one thread at a time. Results come as one row of columns a
statement instead of many rows, because Python's sqlite3 gives up the interpreter lock at every
row: under load each row would wait for the event loop.

Invariant: one call sees whole batches, as of one moment. A task that moves from its pack to a row
of its own while it is read must be found in one of the two, so both are looked at by one
statement, which SQLite answers from one snapshot; calls of more statements open one.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, islice
from typing import Any

from tickwheel.model.effects import ProgressKey
from tickwheel.model.records import ID_STEP, DeadRow, ProgressRow, TaskRow, task_bytes
from tickwheel.persistence.codec import decode_extras
from tickwheel.persistence.contract import SCAN_BYTES_MAX, StoredTask
from tickwheel.persistence.sqlite.connection import snapshot
from tickwheel.persistence.sqlite.packs import HEAD_BYTES, Pack, ids_of, topics_of
from tickwheel.persistence.sqlite.rows import dead_row, from_json, progress_row, task_row

IDS_A_STATEMENT = 512
BODY_BYTES_INLINE = 16_384
"""Longer bodies and extras are read one by one, so that a statement's result stays below 8 MiB."""

_IDS = "(SELECT value FROM json_each(?1))"
_FAILURES = "hex(failures)"
_PROGRESS = f"id, grp, state, attempt, at_ms, epoch, {_FAILURES}"
_DEAD = f"id, grp, topic, died_ms, attempt, reason, {_FAILURES}"
_SMALL = f"CASE WHEN length(body) <= {BODY_BYTES_INLINE} THEN body END"
_LARGE = "-"
_SMALL_EXTRAS = (
    f"CASE WHEN length(extras) > {BODY_BYTES_INLINE} THEN '{_LARGE}' ELSE hex(extras) END"
)
_READ = (
    "SELECT json_group_array(id), json_group_array(due_ms), json_group_array(topic),"
    f" json_group_array(length(body)), {{bodies}}, group_concat({_SMALL_EXTRAS}),"
    f" (SELECT json_group_array(json_array({_PROGRESS})) FROM"
    f" (SELECT * FROM prepare WHERE id IN {_IDS} ORDER BY id, grp)),"
    f" (SELECT json_group_array(json_array({_DEAD})) FROM"
    f" (SELECT * FROM dead WHERE id IN {_IDS} ORDER BY id, grp))"
    f" FROM task WHERE id IN {_IDS}"
)
# The packs that the other ids may be in, whole: one row again, whatever the number of packs.
_PACKS = (
    "SELECT json_group_array(json_array(first, count, topics, length(bodies), ifnull(mask, 0))),"
    " {heads}, {bodies}, group_concat(hex(extras)) FROM pack LEFT JOIN gone USING (first)"
    " WHERE first IN (SELECT (SELECT max(first) FROM pack WHERE first <= value)"
    " FROM json_each(?1) WHERE NOT EXISTS (SELECT 1 FROM task WHERE id = value))"
)
_BOTH = "SELECT * FROM ({rows}), ({packs})"
_ROW_COLUMNS = 8
# Concatenating blobs keeps their bytes in the versions of SQLite there are, but no document
# promises it: the first use of a connection tries it, and falls back to twice the bytes.
_JOIN_RAW = "CAST(group_concat({}, '') AS BLOB)"
_JOIN_HEX = "group_concat(hex({}), '')"
_TRIAL = "SELECT {} FROM (SELECT x'00FF' AS b UNION ALL SELECT x'' UNION ALL SELECT x'FE00')"

_SCAN = (
    "SELECT json_group_array(id) FROM"
    " (SELECT id FROM task WHERE id > ?1 AND (?2 IS NULL OR topic = ?2) ORDER BY id LIMIT ?3)"
)
_SCAN_BACK = (
    "SELECT json_group_array(id) FROM"
    " (SELECT id FROM task WHERE id <= ?1 AND (?2 IS NULL OR topic = ?2) ORDER BY id DESC LIMIT ?3)"
)
_SCAN_PACKS = (
    "SELECT json_group_array(json_array(first, count, topics, ifnull(mask, 0))) FROM"
    " (SELECT first, count, topics, mask FROM pack LEFT JOIN gone USING (first)"
    " WHERE first >= ?1 ORDER BY first LIMIT ?2)"
)
_SCAN_PACKS_BACK = (
    "SELECT json_group_array(json_array(first, count, topics, ifnull(mask, 0))) FROM"
    " (SELECT first, count, topics, mask FROM pack LEFT JOIN gone USING (first)"
    " WHERE first <= ?1 ORDER BY first DESC LIMIT ?2)"
)
_PACK_OF = "SELECT ifnull(max(first), 0) FROM pack WHERE first <= ?"
PACKS_A_SCAN = 512
_SCAN_DEAD = (
    f"SELECT json_group_array(json_array({_DEAD})) FROM (SELECT * FROM dead"
    " WHERE (id, grp) > (?1, ?2) AND (?3 IS NULL OR topic = ?3) AND (?4 IS NULL OR grp = ?4)"
    " ORDER BY id, grp LIMIT ?5)"
)


class Reader:
    """Reads through one connection, which it owns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # Files are opened by the first use; from here on no descriptor is needed.
        connection.execute("SELECT 1 FROM meta").fetchone()
        trial = connection.execute(_TRIAL.format(_JOIN_RAW.format("b"))).fetchone()
        join = _JOIN_RAW if trial == (b"\x00\xff\xfe\x00",) else _JOIN_HEX
        self._read = _BOTH.format(
            rows=_READ.format(bodies=join.format(_SMALL)),
            packs=_PACKS.format(heads=join.format("head"), bodies=join.format("bodies")),
        )

    def close(self) -> None:
        self._connection.close()

    def rest(self) -> None:
        """It may be long until the next use: give the cached pages back."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA shrink_memory")

    def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """See ``Store.read``."""
        found = self._at_once(ids) if len(ids) <= IDS_A_STATEMENT else None
        if found is not None:
            return found
        with snapshot(self._connection):
            return self._all(ids)

    def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """See ``Store.read_some``. No statement brings more small bodies than are wanted."""
        found = self._at_once(ids) if len(ids) <= _step(bytes_max) else None
        if found is not None:
            return found, ()
        with snapshot(self._connection):
            return self._first(ids, bytes_max)

    def _first(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """Inside a snapshot."""
        step = _step(bytes_max)
        found: dict[int, StoredTask] = {}
        size = 0
        for start in range(0, len(ids), step):
            some, large = self._some(ids[start : start + step])
            unread = set(large)
            for index, task_id in enumerate(ids[start : start + step], start):
                if size >= bytes_max:
                    return found, ids[index:]
                if task_id not in some:
                    continue
                task = some[task_id]
                found[task_id] = self._with_body(task) if task_id in unread else task
                size += task_bytes(found[task_id].row)
        return found, ()

    def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        with snapshot(self._connection):
            (first,) = self._connection.execute(_PACK_OF, (after_id,)).fetchone()
            packed = (i for ids in self._packs(topic, first) for i in ids if i > after_id)
            return self._page(_SCAN, (after_id, topic, limit), packed)

    def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        last_id = before_id - 1
        with snapshot(self._connection):
            packed = (
                i
                for ids in self._packs(topic, last_id, back=True)
                for i in reversed(ids)
                if i <= last_id
            )
            return self._page(_SCAN_BACK, (last_id, topic, limit), packed, back=True)

    def _packs(
        self, topic: str | None, position: int, *, back: bool = False
    ) -> Iterator[Sequence[int]]:
        """The ids of ``topic`` in each pack from ``position`` on; inside a snapshot."""
        statement, step = (_SCAN_PACKS_BACK, -1) if back else (_SCAN_PACKS, 1)
        while True:
            columns = (position, PACKS_A_SCAN)
            (text,) = self._connection.execute(statement, columns).fetchone()
            packs = json.loads(text)
            yield from (_ids_in(topic, *pack) for pack in packs)
            if len(packs) < PACKS_A_SCAN:
                return
            position = packs[-1][0] + step

    def _page(
        self,
        statement: str,
        columns: tuple[int, str | None, int],
        packed: Iterator[int],
        *,
        back: bool = False,
    ) -> list[StoredTask]:
        """Up to a limit of tasks and of bytes, in packs or not, by id; inside a snapshot."""
        limit = columns[2]
        (alone,) = self._connection.execute(statement, columns).fetchone()
        ids = sorted(chain(json.loads(alone), islice(packed, limit)), reverse=back)[:limit]
        found, _ = self._first(ids, SCAN_BYTES_MAX)
        return list(found.values())

    def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        """See ``Store.scan_dead``; one statement."""
        (rows,) = self._connection.execute(_SCAN_DEAD, (*after, topic, group, limit)).fetchone()
        return [_dead(values) for values in from_json(rows)]

    def _all(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """Inside a snapshot."""
        found: dict[int, StoredTask] = {}
        for start in range(0, len(ids), IDS_A_STATEMENT):
            some, large = self._some(ids[start : start + IDS_A_STATEMENT])
            found |= some
            for task_id in large:
                found[task_id] = self._with_body(found[task_id])
        return found

    def _with_body(self, task: StoredTask) -> StoredTask:
        """One that was left without its body; inside the snapshot it was found in."""
        row = self._connection.execute("SELECT * FROM task WHERE id = ?", (task.row.id,))
        return task._replace(row=task_row(*row.fetchone()))

    def _at_once(self, ids: Sequence[int]) -> dict[int, StoredTask] | None:
        """Tasks by id, by one statement, which needs no snapshot; None: it takes several."""
        try:
            found, large = self._statement(ids)
        except sqlite3.DataError:
            return None
        return found if not large else None

    def _some(self, ids: Sequence[int]) -> tuple[dict[int, StoredTask], list[int]]:
        """Tasks by id, and the ids of those whose body is missing because it is large; inside a
        snapshot."""
        try:
            return self._statement(ids)
        except sqlite3.DataError:
            # Older versions packed tasks with properties of any size: longer than a result may be.
            if len(ids) == 1:
                raise
            half = len(ids) // 2
            found, large = self._some(ids[:half])
            others, more = self._some(ids[half:])
            return found | others, large + more

    def _statement(self, ids: Sequence[int]) -> tuple[dict[int, StoredTask], list[int]]:
        """See ``_some``. Raises DataError when the result would be too long."""
        columns = self._connection.execute(self._read, (str(list(ids)),)).fetchone()
        rows, large = self._tasks(*columns[:6])
        found = {row.id: StoredTask(row, (), ()) for row in rows}
        wanted = sorted(task_id for task_id in ids if task_id not in found)
        for pack in self._packed(columns[_ROW_COLUMNS:]):
            end_id = pack.first + pack.count * ID_STEP
            low, high = bisect_left(wanted, pack.first), bisect_left(wanted, end_id)
            for row in pack.rows(wanted[low:high]):
                found[row.id] = StoredTask(row, (), ())
        for progress in map(_progress, from_json(columns[6])):
            if progress.id in found:
                task = found[progress.id]
                found[progress.id] = task._replace(progress=(*task.progress, progress))
        for dead in map(_dead, from_json(columns[7])):
            if dead.id in found:
                task = found[dead.id]
                found[dead.id] = task._replace(dead=(*task.dead, dead))
        return found, large

    def _packed(self, columns: Sequence[Any]) -> list[Pack]:
        """The packs that stand in these columns."""
        places, heads, bodies, options = columns
        packs: list[Pack] = []
        head_at = body_at = 0
        heads, bodies = _bytes(heads), _bytes(bodies)
        for (first, count, names, length, mask), more in zip(
            json.loads(places), (options or "").split(","), strict=False
        ):
            head_end, body_end = head_at + HEAD_BYTES * count, body_at + length
            parts = heads[head_at:head_end], names, bodies[body_at:body_end]
            packs.append(Pack(first, count, *parts, bytes.fromhex(more) or None, mask))
            head_at, body_at = head_end, body_end
        return packs

    def _tasks(
        self,
        ids: str,
        dues_ms: str,
        topics: str,
        lengths: str,
        joined: bytes | str | None,
        options: str,
    ) -> tuple[Iterable[TaskRow], list[int]]:
        """Rows from columns: JSON arrays, all bodies end to end, extras in hex."""
        task_ids = json.loads(ids)
        if not task_ids:
            return (), []
        sizes = json.loads(lengths)
        large = [i for i, size in zip(task_ids, sizes, strict=True) if size > BODY_BYTES_INLINE]
        if large:
            sizes = [size if size <= BODY_BYTES_INLINE else 0 for size in sizes]
        parts = options.split(",")
        if _LARGE in parts:
            apart = set(large).union(compress(task_ids, map(_LARGE.__eq__, parts)))
            large = [task_id for task_id in task_ids if task_id in apart]
            parts = ["" if part == _LARGE else part for part in parts]
        joined = _bytes(joined)
        ends = list(accumulate(sizes))
        bodies = map(joined.__getitem__, map(slice, chain((0,), ends), ends))
        decoded = map(decode_extras, map(bytes.fromhex, parts))
        return map(
            TaskRow, task_ids, json.loads(dues_ms), json.loads(topics), bodies, decoded
        ), large


def _step(bytes_max: int) -> int:
    """Ids of a statement whose small bodies are not more than ``bytes_max``."""
    return min(IDS_A_STATEMENT, max(1, bytes_max // BODY_BYTES_INLINE))


def _ids_in(topic: str | None, first: int, count: int, names: str, mask: int) -> Sequence[int]:
    """Of one pack: the ids that are still in it, by id."""
    here = ids_of(first, count, mask)
    if topic is None or names == topic:
        return here
    topics = topics_of(names, count)
    return [i for i in here if topics[(i - first) // ID_STEP] == topic]


def _bytes(joined: bytes | str | None) -> bytes:
    """Blobs end to end: as they are, in hex, or NULL for none."""
    if not joined:
        return b""
    return bytes.fromhex(joined) if isinstance(joined, str) else joined


def _progress(values: list[Any]) -> ProgressRow:
    return progress_row(*values)


def _dead(values: list[Any]) -> DeadRow:
    return dead_row(*values)
