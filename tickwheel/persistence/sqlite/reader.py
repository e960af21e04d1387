"""Reads concurrent with the writer: rows by id, pages of tasks, pages of dead letters.

The code is synchronous, and one thread at a time uses a connection. A statement returns its rows as
the columns of a single row, because Python's sqlite3 releases the interpreter lock at every row,
and under load each row would wait for the event loop.

Invariant: each call reads a snapshot of whole batches. A task can move from its pack to a single
row during a read and must be found in one of them. So one statement, which SQLite answers from one
snapshot, reads both; calls that need several statements open a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, islice, pairwise, starmap
from typing import Any

from tickwheel.model.kinds import ProgressKey
from tickwheel.model.records import ID_STEP, DeadRow, TaskRow, is_key_alone, task_bytes
from tickwheel.persistence.codec import RecordUnreadable, decode_extras
from tickwheel.persistence.contract import SCAN_BYTES_MAX, Heads, StoredTask, head_row
from tickwheel.persistence.sqlite.database import blob_join, blob_of, snapshot
from tickwheel.persistence.sqlite.packs import (
    DUE_BYTES,
    PACK_TASKS_MAX,
    SIZE_BYTES,
    Pack,
    extras_of,
    ids_of,
    topics_of,
)
from tickwheel.persistence.sqlite.rows import (
    DUES,
    dead_row,
    from_json,
    moves_of,
    progress_row,
    task_row,
)

IDS_PER_STATEMENT = 512
HEADS_PER_STATEMENT = 1_024
PACK_STEP = PACK_TASKS_MAX * ID_STEP
NEIGHBOURS = 4
"""Minimum average number of requested tasks per pack for which whole packs are read."""
BODY_BYTES_INLINE = 16_384
"""Maximum bytes of a body, or extras, in a statement's result, so that the result stays below 8
MiB. Longer bodies and extras are read one by one."""
EXTRAS_BYTES_HEAD = 8_192
"""Maximum bytes of extras that are read with a head. Longer extras are more than a key. A
statement's result can contain 1,024 extras."""

_IDS = "(SELECT value FROM json_each(?1))"
_PAST_HEX = "hex(past)"
_PROGRESS = f"id, grp, state, attempt, at_ms, epoch, {_PAST_HEX}"
_DEAD = f"id, grp, topic, died_ms, attempt, reason, behind_id, {_PAST_HEX}"
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
# The whole packs that may contain the other ids, also as one row.
_PACKS = (
    "SELECT json_group_array(json_array(first, count, topics, length(bodies), ifnull(mask, 0))),"
    " {dues}, {sizes}, {bodies}, group_concat(hex(extras))"
    " FROM pack LEFT JOIN gone USING (first) LEFT JOIN moved USING (first)"
    " WHERE first IN (SELECT (SELECT max(first) FROM pack WHERE first <= value)"
    " FROM json_each(?1) WHERE NOT EXISTS (SELECT 1 FROM task WHERE id = value))"
)
# New due times that this connection has not yet read.
_MOVES = (
    "SELECT (SELECT ifnull(min(batch), 0) FROM move), ifnull(max(batch), 0), {data} FROM"
    " (SELECT batch, data FROM move WHERE batch > ?2 ORDER BY batch)"
)
_READ_ALL = "SELECT * FROM ({moves}), ({rows}), ({packs})"
_MOVES_COLUMNS = 3
_NONE = "[]"
NO_IDS: frozenset[int] = frozenset()
_ROW_COLUMNS = 8
# The due time of each id from its pack, in the order of ``json_each``; NO_DUE if the id is in no
# pack or has options. LEFT JOINs keep every id in its position.
NO_DUE = -(2**63)
_IF_HERE = (
    f"CASE WHEN bit < count AND (value - first) % {ID_STEP} = 0"
    " AND NOT ifnull(mask, 0) >> bit & 1 AND {those} THEN"
)
_HAS_NONE = "typeof(extras) = 'null'"
_HAS_FEW = f"({_HAS_NONE} OR length(extras) <= {EXTRAS_BYTES_HEAD})"
_DUE = f"{DUE_BYTES} * bit + 1, {DUE_BYTES}"
_HEAD_DUE = (
    f"{_IF_HERE} CASE WHEN length(dues) = {DUE_BYTES} * count THEN substr(dues, {_DUE})"
    f" ELSE substr(head, {_DUE}) END ELSE x'0000000000000080' END"
)
_HEAD_TOPICS = (
    f"json_group_array({_IF_HERE} CASE WHEN substr(topics, 1, 1) = '['"
    " THEN json_extract(topics, '$[' || bit || ']') ELSE topics END END)"
)
_PACKED = (
    "SELECT {columns} FROM"
    f" (SELECT value, (value - first) / {ID_STEP} AS bit, pack.*, mask, dues FROM json_each(?1)"
    " LEFT JOIN pack ON first = (SELECT max(first) FROM pack WHERE first <= value)"
    " LEFT JOIN gone USING (first) LEFT JOIN moved USING (first))"
)
_PACKED_COLUMNS = 4
# The location of a body: its pack, and the lengths of all bodies up to and including it.
_PLACES = f"json_group_array({_IF_HERE} first END)"
_SIZES = f"{_IF_HERE} substr(head, {DUE_BYTES} * count + 1, {SIZE_BYTES} * (bit + 1)) ELSE x'' END"
# The location of a task's options, if its pack has any: pack, bit, length of the pack's options.
_OPTIONS = (
    f"group_concat({_IF_HERE} '[' || first || ',' || bit || ',' || length(extras) || ']' END)"
)
_EXTRAS = f"{_IF_HERE} extras END"
# A few bytes from each of many packs, in the order of the argument.
_BODIES = "SELECT {bodies} FROM json_each(?) CROSS JOIN pack ON first = json_extract(value, '$[0]')"
_BODY = "substr(bodies, json_extract(value, '$[1]') + 1, json_extract(value, '$[2]'))"
_HISTORY = (
    f"SELECT (SELECT json_group_array(json_array({_PROGRESS})) FROM"
    f" (SELECT * FROM prepare WHERE id IN {_IDS} ORDER BY id, grp)),"
    f" (SELECT json_group_array(json_array({_DEAD})) FROM"
    f" (SELECT * FROM dead WHERE id IN {_IDS} ORDER BY id, grp))"
)
_ROW_HEADS = (
    "SELECT * FROM (SELECT json_group_array(id), json_group_array(due_ms), json_group_array(topic),"
    " group_concat(hex(extras))"
    f" FROM task WHERE id IN {_IDS} AND {_HAS_FEW}), ({_HISTORY})"
)

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
PACKS_PER_SCAN = 512
_SCAN_DEAD = (
    f"SELECT json_group_array(json_array({_DEAD})) FROM (SELECT * FROM dead"
    " WHERE (id, grp) > (?1, ?2) AND (?3 IS NULL OR topic = ?3) AND (?4 IS NULL OR grp = ?4)"
    " ORDER BY id, grp LIMIT ?5)"
)


class Reader:
    """Reads through one connection, which the reader owns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # The first statement opens all files; later ones need no descriptors.
        connection.execute("SELECT 1 FROM meta").fetchone()
        join = blob_join(connection)
        moves = _MOVES.format(data=join.format("data"))
        self._moves: dict[int, int] = {}
        """Id → new due time of a packed task; overrides the due times in ``pack`` and ``moved``."""
        self._moves_oldest = self._moves_upto = 0
        """The first and the last batch of these due times."""
        self._read = _READ_ALL.format(
            moves=moves,
            rows=_READ.format(bodies=join.format(_SMALL)),
            packs=_PACKS.format(
                dues=join.format(DUES),
                sizes=join.format(f"substr(head, {DUE_BYTES} * count + 1)"),
                bodies=join.format("bodies"),
            ),
        )

        dues, sizes = join.format(_HEAD_DUE), join.format(_SIZES)
        heads = _packed(_HAS_FEW, dues, _HEAD_TOPICS, _OPTIONS, join.format(_EXTRAS))
        self._heads = _READ_ALL.format(moves=moves, rows=heads, packs=_ROW_HEADS)
        picks = _packed(_HAS_NONE, dues, _HEAD_TOPICS, _PLACES, sizes)
        self._picks = _READ_ALL.format(moves=moves, rows=picks, packs=_HISTORY)
        self._bodies = _BODIES.format(bodies=join.format(_BODY))

    def close(self) -> None:
        self._connection.close()

    def release_pages(self) -> None:
        """Release cached pages before a possibly long pause."""
        self._moves = {}
        self._moves_oldest = self._moves_upto = 0
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA shrink_memory")

    def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """See ``Store.read``."""
        tasks = self._read_in_one_statement(ids) if len(ids) <= IDS_PER_STATEMENT else None
        if tasks is not None:
            return tasks
        with snapshot(self._connection):
            return self._read_all(ids)

    def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """See ``Store.read_some``. No statement returns more small bodies than ``bytes_max``."""
        tasks = self._read_in_one_statement(ids) if len(ids) <= _step(bytes_max) else None
        if tasks is not None:
            return tasks, ()
        with snapshot(self._connection):
            return self._first(ids, bytes_max)

    def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        """See ``Moves.read_heads``. Tasks with options other than a key are read with their
        bodies."""
        with snapshot(self._connection):
            heads = Heads()
            ordered = sorted(ids)  # to read each page once
            for start in range(0, len(ids), HEADS_PER_STATEMENT):
                self._add_heads(ordered[start : start + HEADS_PER_STATEMENT], heads)
            absent = heads.absent(ids)
            if not absent:
                return heads, ()
            complete_tasks, unread = self._first([i for i in ids if i in absent], bytes_max)
        heads.others |= complete_tasks
        if unread:
            rest = ids[ids.index(unread[0]) :]
            heads.drop(frozenset(rest))
            return heads, rest
        return heads, ()

    def _add_heads(self, ids: Sequence[int], heads: Heads) -> None:
        """Add the tasks without options other than a key. Call it inside a snapshot."""
        columns = self._columns(self._heads, ids)
        dues, topics, options, extras = columns[:_PACKED_COLUMNS]
        keys, others = _packed_keys(options, extras) if options else ({}, NO_IDS)
        _add_columns(heads.plain, *self._plain(ids, dues, topics, others))
        loose, loose_ms, loose_topics, extras, *history = columns[_PACKED_COLUMNS:]
        rows = json.loads(loose), json.loads(loose_ms), json.loads(loose_topics)
        heads.keys |= keys
        if extras and any(map(",".__ne__, extras)):
            others = _add_keys(heads.keys, rows[0], extras.split(","))
            rows = _exclude_tasks(others, *rows)
        _add_columns(heads.plain, *rows)
        if any(map(_NONE.__ne__, history)):
            self._move_to_others(heads, *history)

    @staticmethod
    def _move_to_others(heads: Heads, progress: str, dead: str) -> None:
        """Move tasks with progress or dead letters from ``plain`` to ``others``."""
        recorded = {row[0] for row in chain(json.loads(progress), json.loads(dead))}
        for topic, dues_ms in heads.plain.items():
            for task_id in dues_ms.keys() & recorded:
                row = head_row(task_id, dues_ms.pop(task_id), topic, heads.keys)
                heads.others[task_id] = StoredTask(row, (), ())
        _add_history(heads.others, progress, dead)

    def _plain(
        self, ids: Sequence[int], dues: bytes | str, topics: str, others: Collection[int] = NO_IDS
    ) -> tuple[Sequence[int], Sequence[int], Sequence[str]]:
        """Return ids, due times and topics of the packed tasks that are not in ``others``."""
        dues_ms, names, moves = array("q", blob_of(dues)), json.loads(topics), self._moves
        if len(dues_ms) != len(ids):
            raise RecordUnreadable("heads of packs are shorter than their counts require")
        if NO_DUE in dues_ms:
            is_packed = [due_ms != NO_DUE for due_ms in dues_ms]
            ids, names = list(compress(ids, is_packed)), list(compress(names, is_packed))
            dues_ms = array("q", compress(dues_ms, is_packed))
        if others:
            ids, plain_ms, names = _exclude_tasks(others, ids, dues_ms, names)
            dues_ms = array("q", plain_ms)
        return ids, array("q", map(moves.get, ids, dues_ms)) if moves else dues_ms, names

    def _first(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """Read as ``read_some`` does, inside a snapshot."""
        step = _step(bytes_max)
        tasks: dict[int, StoredTask] = {}
        size = 0
        for start in range(0, len(ids), step):
            part, large = self._read_part(ids[start : start + step])
            unread = set(large)
            for index, task_id in enumerate(ids[start : start + step], start):
                if size >= bytes_max:
                    return tasks, ids[index:]
                if task_id not in part:
                    continue
                task = part[task_id]
                tasks[task_id] = self._with_body(task) if task_id in unread else task
                size += task_bytes(tasks[task_id].row)
        return tasks, ()

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
        """Yield the ids of ``topic`` in each pack from ``position`` on. Call it inside a
        snapshot."""
        statement, step = (_SCAN_PACKS_BACK, -1) if back else (_SCAN_PACKS, 1)
        while True:
            columns = (position, PACKS_PER_SCAN)
            (text,) = self._connection.execute(statement, columns).fetchone()
            packs = json.loads(text)
            yield from (_ids_in(topic, *pack) for pack in packs)
            if len(packs) < PACKS_PER_SCAN:
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
        """Return a page of tasks by id, limited in tasks and bytes. Call it inside a snapshot."""
        limit = columns[2]
        (loose,) = self._connection.execute(statement, columns).fetchone()
        ids = sorted(chain(json.loads(loose), islice(packed, limit)), reverse=back)[:limit]
        tasks, _ = self._first(ids, SCAN_BYTES_MAX)
        return list(tasks.values())

    def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        """See ``Store.scan_dead``."""
        (rows,) = self._connection.execute(_SCAN_DEAD, (*after, topic, group, limit)).fetchone()
        return list(starmap(dead_row, from_json(rows)))

    def _read_all(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """Read as ``read`` does, inside a snapshot."""
        tasks: dict[int, StoredTask] = {}
        for start in range(0, len(ids), IDS_PER_STATEMENT):
            part, large = self._read_part(ids[start : start + IDS_PER_STATEMENT])
            tasks |= part
            for task_id in large:
                tasks[task_id] = self._with_body(tasks[task_id])
        return tasks

    def _with_body(self, task: StoredTask) -> StoredTask:
        """Return a task with its large body. Call it inside the snapshot that has read the task."""
        row = self._connection.execute("SELECT * FROM task WHERE id = ?", (task.row.id,))
        return task._replace(row=task_row(*row.fetchone()))

    def _read_in_one_statement(self, ids: Sequence[int]) -> dict[int, StoredTask] | None:
        """Read tasks with one statement, which needs no snapshot. Return None if several statements
        are needed."""
        if _are_scattered(ids):
            return None
        try:
            tasks, large = self._statement(ids)
        except sqlite3.DataError:
            return None
        return tasks if not large else None

    def _read_part(self, ids: Sequence[int]) -> tuple[dict[int, StoredTask], list[int]]:
        """Return tasks by id, and the ids of tasks whose large body was not read. Call it inside a
        snapshot."""
        try:
            return self._statement(ids)
        except sqlite3.DataError:
            # Tasks with long properties can exceed SQLite's maximum length of a result.
            if len(ids) == 1:
                raise
            half = len(ids) // 2
            first, first_large = self._read_part(ids[:half])
            second, second_large = self._read_part(ids[half:])
            return first | second, first_large + second_large

    def _statement(self, ids: Sequence[int]) -> tuple[dict[int, StoredTask], list[int]]:
        """Read as ``_read_part`` does. Raise DataError if the result would be too long."""
        picked = self._picked(ids) if _are_scattered(ids) else {}
        if picked:
            others = [task_id for task_id in ids if task_id not in picked]
            tasks, large = self._read_whole_packs(others) if others else ({}, [])
            return picked | tasks, large
        return self._read_whole_packs(ids)

    def _picked(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """Return packed tasks without options, reading only their own bodies from the packs. Call
        it inside a snapshot."""
        ordered = sorted(ids)
        dues, topics, packs, sizes, *history = self._columns(self._picks, ordered)
        heads = self._plain(ordered, dues, topics)
        lengths, at = array("I", blob_of(sizes)), 0
        places: list[tuple[int, int, int]] = []
        firsts = [first for first in json.loads(packs) if first is not None]
        for task_id, first in zip(heads[0], firsts, strict=True):
            end = at + (task_id - first) // ID_STEP + 1
            places.append((first, sum(lengths[at : end - 1]), lengths[end - 1]))
            at = end
        (joined,) = self._connection.execute(self._bodies, (json.dumps(places),)).fetchone()
        bodies, at = blob_of(joined), 0
        if len(bodies) != sum(place[2] for place in places):
            raise RecordUnreadable("bodies of packs are shorter than their heads require")
        tasks: dict[int, StoredTask] = {}
        for task_id, due_ms, topic, (_, _, length) in zip(*heads, places, strict=True):
            row = TaskRow(task_id, due_ms, topic, bodies[at : at + length])
            tasks[task_id] = StoredTask(row, (), ())
            at += length
        _add_history(tasks, *history)
        return tasks

    def _read_whole_packs(self, ids: Sequence[int]) -> tuple[dict[int, StoredTask], list[int]]:
        """Return tasks by id, reading their whole packs."""
        columns = self._columns(self._read, ids)
        rows, large = self._tasks(*columns[:6])
        tasks = {row.id: StoredTask(row, (), ()) for row in rows}
        moves = self._moves
        missing_ids = sorted(task_id for task_id in ids if task_id not in tasks)
        for pack in self._packed(columns[_ROW_COLUMNS:]):
            end_id = pack.first + pack.count * ID_STEP
            low, high = bisect_left(missing_ids, pack.first), bisect_left(missing_ids, end_id)
            for row in pack.rows(missing_ids[low:high]):
                if row.id in moves:
                    row = row._replace(due_ms=moves[row.id])
                tasks[row.id] = StoredTask(row, (), ())
        _add_history(tasks, columns[6], columns[7])
        return tasks, large

    def _columns(self, statement: str, ids: Sequence[int]) -> Sequence[Any]:
        """Execute a statement. Apply its columns of ``_MOVES``, and return the others."""
        arguments = (str(list(ids)), self._moves_upto)
        columns: Sequence[Any] = self._connection.execute(statement, arguments).fetchone()
        oldest, upto, data = columns[:_MOVES_COLUMNS]
        if oldest != self._moves_oldest:
            # The remembered due times are now in table ``moved``.
            self._moves_oldest, self._moves = oldest, {}
        if upto:
            self._moves_upto = upto
            self._moves |= moves_of(blob_of(data))
        return columns[_MOVES_COLUMNS:]

    def _packed(self, columns: Sequence[Any]) -> list[Pack]:
        places, dues, sizes, bodies, options = columns
        packs: list[Pack] = []
        due_at = size_at = body_at = 0
        dues, sizes, bodies = map(blob_of, (dues, sizes, bodies))
        for (first, count, names, length, mask), extras in zip(
            json.loads(places), (options or "").split(","), strict=False
        ):
            due_end, size_end = due_at + DUE_BYTES * count, size_at + SIZE_BYTES * count
            head = dues[due_at:due_end] + sizes[size_at:size_end]
            parts = head, names, bodies[body_at : body_at + length]
            packs.append(Pack(first, count, *parts, bytes.fromhex(extras) or None, mask))
            due_at, size_at, body_at = due_end, size_end, body_at + length
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
        """Build task rows from columns: JSON arrays, concatenated bodies, extras in hex."""
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
        data = blob_of(joined)
        ends = list(accumulate(sizes))
        bodies = map(data.__getitem__, map(slice, chain((0,), ends), ends))
        decoded = map(decode_extras, map(bytes.fromhex, parts))
        return map(
            TaskRow, task_ids, json.loads(dues_ms), json.loads(topics), bodies, decoded
        ), large


def _add_columns(
    plain: dict[str, dict[int, int]],
    ids: Sequence[int],
    dues_ms: Iterable[int],
    topics: Sequence[str],
) -> None:
    if ids and topics.count(topics[0]) == len(topics):  # the usual case
        plain.setdefault(topics[0], {}).update(zip(ids, dues_ms, strict=True))
        return
    for task_id, due_ms, topic in zip(ids, dues_ms, topics, strict=True):
        plain.setdefault(topic, {})[task_id] = due_ms


def _packed(condition: str, *columns: str) -> str:
    """Return the statement that reads packed tasks whose options satisfy ``condition``."""
    return _PACKED.format(columns=", ".join(columns)).format(those=condition)


def _packed_keys(options: str, extras: bytes | str) -> tuple[dict[int, str], set[int]]:
    """Return, for packs with options: id → key of tasks whose only option is a key, and the ids of
    tasks with other options."""
    keys: dict[int, str] = {}
    others: set[int] = set()
    data, at, last = blob_of(extras), 0, -1
    all_extras: Sequence[Any] = ()
    for first, bit, length in json.loads(f"[{options}]"):
        if first != last:
            last, all_extras = first, extras_of(first, data[at : at + length])
        at += length
        packed: Any = all_extras[bit] if bit < len(all_extras) else b""
        task_id = first + bit * ID_STEP
        if type(packed) is str:
            keys[task_id] = packed
        elif packed is not None:
            others.add(task_id)
    return keys, others


def _add_keys(keys: dict[int, str], ids: Sequence[int], extras: Sequence[str]) -> set[int]:
    """Add the keys of single rows whose only option is a key. Return the ids with other options.
    ``extras`` are in hex."""
    others: set[int] = set()
    for task_id, text in zip(ids, extras, strict=True):
        options = decode_extras(bytes.fromhex(text))
        if options is not None and options.key is not None and is_key_alone(options):
            keys[task_id] = options.key
        elif options is not None:
            others.add(task_id)
    return others


def _exclude_tasks(
    others: Collection[int], ids: Sequence[int], dues_ms: Sequence[int], topics: Sequence[str]
) -> tuple[Sequence[int], Sequence[int], Sequence[str]]:
    """Return the columns without the tasks of ``others``."""
    if not others:
        return ids, dues_ms, topics
    is_included = [task_id not in others for task_id in ids]
    return (
        list(compress(ids, is_included)),
        list(compress(dues_ms, is_included)),
        list(compress(topics, is_included)),
    )


def _add_history(tasks: dict[int, StoredTask], progress_rows: str, dead_rows: str) -> None:
    for progress in starmap(progress_row, from_json(progress_rows)):
        if progress.id in tasks:
            task = tasks[progress.id]
            tasks[progress.id] = task._replace(progress=(*task.progress, progress))
    for dead in starmap(dead_row, from_json(dead_rows)):
        if dead.id in tasks:
            task = tasks[dead.id]
            tasks[dead.id] = task._replace(dead=(*task.dead, dead))


def _are_scattered(ids: Sequence[int]) -> bool:
    """Return whether the ids are in many packs, with few requested tasks in each pack."""
    ordered = sorted(ids)
    apart = sum(b - a >= PACK_STEP for a, b in pairwise(ordered))
    return apart * NEIGHBOURS >= len(ordered) > 1


def _step(bytes_max: int) -> int:
    """Return for how many ids the small bodies in a statement stay below ``bytes_max``."""
    return min(IDS_PER_STATEMENT, max(1, bytes_max // BODY_BYTES_INLINE))


def _ids_in(topic: str | None, first: int, count: int, names: str, mask: int) -> Sequence[int]:
    """Return the ids that are still in a pack, ascending. With ``topic``, return only its ids."""
    ids = ids_of(first, count, mask)
    if topic is None or names == topic:
        return ids
    topics = topics_of(names, count)
    return [i for i in ids if topics[(i - first) // ID_STEP] == topic]
