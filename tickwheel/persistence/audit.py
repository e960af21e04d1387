"""The offline check of a store: it reads all rows, compares them, and changes nothing.

It refuses a store that a daemon has open. It decodes every row, to find rows that would make a
daemon's start fail. It describes each problem in a sentence, and repairs none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from tickwheel.model.kinds import GROUP, SESSION, TRANSACTION, Halves, TransactionRow
from tickwheel.model.records import order_of
from tickwheel.persistence import parse
from tickwheel.persistence.codec import RecordUnreadable, decode_endings, key_text
from tickwheel.persistence.contract import Audit, SmallState, StoreUnusable

PROBLEMS_MAX = 100
"""Maximum number of problems of one kind in the list."""

_ORPHANS = (
    ("prepare", "progress of group {1!r} with task {0}, which is not stored"),
    ("dead", "a dead letter of group {1!r} for task {0}, which is not stored"),
)
# A due task should have ended if at least one group has finished it, no group still has to receive
# it, and it is not a dead letter. ``place`` is its position in the order of
# ``engine/ownership.py``.
_FINISHED = """
SELECT id FROM every AS task WHERE due_ms <= :position_ms
 AND EXISTS (SELECT 1 FROM prepare p WHERE p.id = task.id AND p.state IN (4, 6))
 AND NOT EXISTS (SELECT 1 FROM dead d WHERE d.id = task.id)
 AND NOT EXISTS (SELECT 1 FROM prepare p WHERE p.id = task.id AND p.state NOT IN (4, 6))
 AND NOT EXISTS (SELECT 1 FROM owner AS g WHERE g.topic = task.topic AND g.grp <> ''
  AND (task.place > g.since_id OR g.since_ms <= task.due_ms)
  AND NOT EXISTS (SELECT 1 FROM prepare p WHERE p.id = task.id AND p.grp = g.grp))
"""

_EVERY = (
    "CREATE TEMP TABLE owner(topic TEXT, grp TEXT, since_ms INTEGER, since_id INTEGER,"
    " PRIMARY KEY(topic, grp))",
    "CREATE TEMP TABLE every(id INTEGER PRIMARY KEY, due_ms INTEGER, topic TEXT, place INTEGER)",
    "INSERT INTO every SELECT id, due_ms, topic, id FROM task",
)


def check(url: str, *, is_locked: bool = False) -> Audit:
    """Scan the whole store. Raise StoreUnusable if it is in use, missing, or not a Tickwheel store.
    ``is_locked``: the caller already prevents daemons from opening the store."""
    parsed = parse(url)
    if parsed.kind != "sqlite":
        raise StoreUnusable(f"store {url!r}: only a SQLite store can be checked offline")
    path = os.path.realpath(parsed.path)
    if not os.path.exists(path):
        raise StoreUnusable(f"{path} does not exist")
    from tickwheel.persistence.sqlite import database

    with contextlib.ExitStack() as stack:
        if not is_locked:
            stack.enter_context(_not_in_use(path))
        connection = stack.enter_context(database.open_snapshot(path, 4 << 20))
        if connection is None:
            raise StoreUnusable(f"{path} is empty: no daemon has used it yet")
        meta = database.read_meta(connection, path)
        if not is_locked:  # reshard holds the lock, possibly to resume after an interruption
            instead = "check those, for example sqlite:///{folder}shard-0.db"
            database.check_not_moved(meta, path, instead)
        return _audit(connection, meta)


@contextlib.contextmanager
def _not_in_use(path: str) -> Iterator[None]:
    """Prevent daemons from opening the store during the check. If there is no lock file, no daemon
    has used the store."""
    from tickwheel.persistence.sqlite.database import StoreLock

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path + ".lock", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
                raise StoreUnusable(
                    f"{path} is in use by {holder}; stop it, or check a backup"
                ) from error
        lock = StoreLock(path)
        stack.callback(lock.close_descriptor)
        lock.lock_file()
        yield


def _audit(connection: sqlite3.Connection, meta: dict[str, int | str]) -> Audit:
    """Check all tables. The caller must have begun a snapshot."""
    audit = Audit(tasks=0, progress=0, dead=0, sessions=0)
    try:
        for (message,) in connection.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})"):
            if message != "ok":
                audit.problems.append(f"SQLite: {message}")
    except sqlite3.DatabaseError as error:
        audit.problems.append(f"SQLite: {error}")
    if audit.problems:
        return audit
    _count(connection, audit)
    records = _records(connection, audit)
    hashes = _packs(connection, audit, meta)
    _groups(connection, records)
    _keys(connection, audit, hashes)
    _relations(connection, audit, meta)
    _endings(connection, audit)
    _sessions(records, audit)
    _transactions(records, audit)
    return audit


def _count(connection: sqlite3.Connection, audit: Audit) -> None:
    """Decode every row, and compare the number of rows with the index."""
    from tickwheel.persistence.sqlite import rows

    kinds: tuple[tuple[str, str, Callable[..., object]], ...] = (
        ("tasks", "task", rows.task_row),
        ("progress", "prepare", rows.progress_row),
        ("dead", "dead", rows.dead_row),
    )
    for name, table, build in kinds:
        scanned = 0
        for row in connection.execute(f"SELECT * FROM {table}"):
            scanned += 1
            try:
                build(*row)
            except RecordUnreadable as error:
                _add(audit, f"{table} {row[0]!r}: {error}")
        setattr(audit, name, scanned)
        (counted,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        if counted != scanned:
            audit.problems.append(f"{table}: {counted} rows counted, {scanned} found by a scan")


def _records(connection: sqlite3.Connection, audit: Audit) -> SmallState:
    """Decode the records of every kind, and check that each is stored under its key."""
    from tickwheel.persistence.sqlite import rows

    records = SmallState()
    for number, stored_key, data in connection.execute("SELECT kind, key, data FROM record"):
        try:
            (kind, key), row = rows.record_row(number, data)
        except RecordUnreadable as error:
            _add(audit, f"record {stored_key!r}: {error}")
            continue
        if key_text(key) != stored_key:
            _add(audit, f"{kind.name} {key_text(key)!r} is stored as {stored_key!r}")
        records.records[kind, stored_key] = row
    return records


def _groups(connection: sqlite3.Connection, records: SmallState) -> None:
    """Put all groups into a temporary table."""
    groups = records.of_kind(GROUP)
    connection.executemany(
        "INSERT OR IGNORE INTO owner VALUES (?, ?, ?, ?)",
        [(row.topic, row.group, row.since_ms, row.since_id) for row in groups],
    )


def _packs(
    connection: sqlite3.Connection, audit: Audit, meta: dict[str, int | str]
) -> dict[int, int]:
    """Decode every pack, and put all tasks into a temporary table. Return id → hash of the tasks
    that have a key."""
    from tickwheel.model.key_hash import KeyHash
    from tickwheel.persistence.sqlite import database, packs, rows
    from tickwheel.persistence.sqlite import rows as sql

    key_hash = KeyHash(bytes.fromhex(str(meta[database.KEY_SEED])))
    hashes: dict[int, int] = {}
    connection.execute("PRAGMA query_only = OFF")  # query_only also forbids temporary tables
    for statement in _EVERY:
        connection.execute(statement)
    for columns in connection.execute("SELECT * FROM task WHERE extras IS NOT NULL"):
        with contextlib.suppress(RecordUnreadable):
            row = rows.task_row(*columns)
            hashes |= key_hash.of_rows([row])
            if order_of(row) != row.id:
                placed = (order_of(row), row.id)
                connection.execute("UPDATE every SET place = ? WHERE id = ?", placed)
    moves = sql.read_moves(connection)
    for columns in connection.execute(sql.ALL_PACKS):
        first, count, mask = columns[0], columns[1], columns[-2]
        if not 0 < count <= packs.PACK_TASKS_MAX or not 0 <= mask < packs.mask_of(count):
            _add(
                audit, f"pack {first!r}: {count!r} tasks do not fit the mask {mask!r} of ended ones"
            )
            continue
        try:
            rows_of_pack = list(packs.Pack(*columns).rows())
        except RecordUnreadable as error:
            _add(audit, str(error))
            continue
        audit.tasks += len(rows_of_pack)
        hashes |= key_hash.of_rows(rows_of_pack)
        connection.executemany(
            "INSERT OR IGNORE INTO every VALUES (?, ?, ?, ?)",
            [
                (row.id, moves.get(row.id, row.due_ms), row.topic, order_of(row))
                for row in rows_of_pack
            ],
        )
    (distinct,) = connection.execute("SELECT count(*) FROM every").fetchone()
    if distinct != audit.tasks:
        audit.problems.append(f"{audit.tasks} tasks, but {distinct} different ids")
    for (first,) in connection.execute("SELECT first FROM gone EXCEPT SELECT first FROM pack"):
        _add(audit, f"tasks have left pack {first!r}, which is not stored")
    for (first,) in connection.execute("SELECT first FROM moved EXCEPT SELECT first FROM pack"):
        _add(audit, f"tasks were moved in pack {first!r}, which is not stored")
    return hashes


def _keys(connection: sqlite3.Connection, audit: Audit, hashes: dict[int, int]) -> None:
    """Check that the store has the hash of every key, and no other hashes."""
    from tickwheel.persistence.sqlite import rows

    stored: dict[int, int] = {}
    for chunk in rows.read_keys(connection):
        stored |= zip(chunk.ids, chunk.hashes, strict=True)
    for task_id in sorted(hashes.keys() | stored.keys()):
        if hashes.get(task_id) != stored.get(task_id):
            _add(audit, f"the stored hash of task {task_id} does not match its topic and key")


def _relations(connection: sqlite3.Connection, audit: Audit, meta: dict[str, int | str]) -> None:
    for table, sentence in _ORPHANS:
        orphans = connection.execute(
            f"SELECT id, grp FROM {table} WHERE id NOT IN (SELECT id FROM every)"
            f" ORDER BY id, grp LIMIT {PROBLEMS_MAX}"
        )
        for row in orphans:
            audit.problems.append(sentence.format(*row))
    in_both = connection.execute(
        "SELECT id, grp FROM dead JOIN prepare USING (id, grp) ORDER BY id, grp"
        f" LIMIT {PROBLEMS_MAX}"
    )
    for task_id, group in in_both:
        audit.problems.append(f"task {task_id} is both dead and in progress for group {group!r}")
    finished = connection.execute(
        f"{_FINISHED} LIMIT {PROBLEMS_MAX}", {"position_ms": meta["position_ms"]}
    )
    for (task_id,) in finished:
        audit.problems.append(f"task {task_id} is finished in every group and is still stored")
    (id_max,) = connection.execute("SELECT max(id) FROM every").fetchone()
    if id_max is not None and id_max > int(meta["id_mark"]):
        audit.problems.append(f"task {id_max} is above the id mark {meta['id_mark']}")


def _endings(connection: sqlite3.Connection, audit: Audit) -> None:
    before: Any = 0
    for batch, upto, data in connection.execute("SELECT * FROM ending ORDER BY batch"):
        try:
            ended = decode_endings(data)
        except RecordUnreadable as error:
            _add(audit, f"ending of batch {batch}: {error}")
            continue
        if before and upto != before + len(ended):
            _add(audit, f"ending of batch {batch}: counts {upto}, expected {before + len(ended)}")
        before = upto
        ids = str([task_id for task_id, _ in ended])
        stored = connection.execute(
            "SELECT id FROM every WHERE id IN (SELECT value FROM json_each(?))", (ids,)
        )
        for (task_id,) in stored:
            _add(audit, f"task {task_id} ended in batch {batch} and is still stored")


def _sessions(records: SmallState, audit: Audit) -> None:
    """Check that no request was answered twice."""
    answered: dict[bytes, set[int]] = {}
    for row in sorted(records.of_kind(SESSION)):
        requests = answered.setdefault(row.session, set())
        for request, *_ in row.answers:
            if request in requests:
                _add(audit, f"session {row.session.hex()}: request {request} was answered twice")
            requests.add(request)
    audit.sessions = len(answered)


def _transactions(records: SmallState, audit: Audit) -> None:
    """Check that undecided transactions have the half tasks they count, and decided ones none."""
    heads: dict[str, TransactionRow] = {}
    counts: dict[str, tuple[int, int]] = {}
    for row in records.of_kind(TRANSACTION):
        if isinstance(row, Halves):
            tasks, size_bytes = counts.get(row.transaction, (0, 0))
            half_bytes = sum(half.size_bytes for half in row.halves)
            counts[row.transaction] = tasks + len(row.halves), size_bytes + half_bytes
        else:
            heads[row.id] = row
    for name in sorted(counts.keys() - heads.keys()):
        _add(audit, f"half tasks of transaction {name!r}, which is not stored")
    for name, head in sorted(heads.items()):
        expected = (0, 0) if head.state.is_decided else (head.tasks, head.size_bytes)
        if counts.get(name, (0, 0)) != expected:
            _add(
                audit,
                f"transaction {name!r} has {counts.get(name, (0, 0))} half tasks (number, bytes),"
                f" but counts {expected}",
            )


def _add(audit: Audit, problem: str) -> None:
    if len(audit.problems) < PROBLEMS_MAX * 10:
        audit.problems.append(problem)
