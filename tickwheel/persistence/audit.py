"""The offline check: a store's rows against each other, read and never changed.

Refuses a store that a daemon has open. Every row is decoded, so that what a start would choke
on shows here. What is found wrong comes back as sentences; repairing is not done here.
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
from tickwheel.persistence.contract import Audit, Small, StoreUnusable

PROBLEMS_MAX = 100
"""How many problems of one kind are listed, at most."""

_ORPHANS = (
    ("prepare", "progress of group {1!r} with task {0}, which is not stored"),
    ("dead", "a dead letter of group {1!r} for task {0}, which is not stored"),
)
# A task that came due, that some group is done with, that no group owes an ack, and that is
# nobody's dead letter should have ended. ``place`` is its own in the order: see
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
    """Scan the whole store. Raises StoreUnusable when it is in use, not ours, or not there.
    ``is_locked``: the caller keeps daemons off the store."""
    parsed = parse(url)
    if parsed.kind != "sqlite":
        raise StoreUnusable(f"store {url!r}: there is nothing to check offline")
    path = os.path.realpath(parsed.path)
    if not os.path.exists(path):
        raise StoreUnusable(f"{path} does not exist")
    from tickwheel.persistence.sqlite import database

    with contextlib.ExitStack() as stack:
        if not is_locked:
            stack.enter_context(_not_in_use(path))
        connection = stack.enter_context(database.looking(path, 4 << 20))
        if connection is None:
            raise StoreUnusable(f"{path} is empty: no daemon has used it yet")
        meta = database.read_meta(connection, path)
        if not is_locked:  # else reshard asks, which may have been cut off
            instead = "check those, for example sqlite:///{folder}shard-0.db"
            database.check_not_given_up(meta, path, instead)
        return _audit(connection, meta)


@contextlib.contextmanager
def _not_in_use(path: str) -> Iterator[None]:
    """Keep daemons off the store while it is checked. No lock file: none has ever used it here."""
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
        stack.callback(lock.give_up)
        lock.lock_file()
        yield


def _audit(connection: sqlite3.Connection, meta: dict[str, int | str]) -> Audit:
    """The findings in all tables, read inside a snapshot, so that they are of one moment."""
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
    """Decode every row; compare their number with what the index says."""
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


def _records(connection: sqlite3.Connection, audit: Audit) -> Small:
    """Decode the records of every kind, and check that each is stored under its own key."""
    from tickwheel.persistence.sqlite import rows

    found = Small()
    for number, stored_key, data in connection.execute("SELECT kind, key, data FROM record"):
        try:
            (kind, key), row = rows.record_row(number, data)
        except RecordUnreadable as error:
            _add(audit, f"record {stored_key!r}: {error}")
            continue
        if key_text(key) != stored_key:
            _add(audit, f"{kind.name} {key_text(key)!r} is stored as {stored_key!r}")
        found.records[kind, stored_key] = row
    return found


def _groups(connection: sqlite3.Connection, records: Small) -> None:
    """Put all groups into a temporary table."""
    groups = records.of_kind(GROUP)
    connection.executemany(
        "INSERT OR IGNORE INTO owner VALUES (?, ?, ?, ?)",
        [(row.topic, row.group, row.since_ms, row.since_id) for row in groups],
    )


def _packs(
    connection: sqlite3.Connection, audit: Audit, meta: dict[str, int | str]
) -> dict[int, int]:
    """Decode every pack, and put all tasks into a temporary table; the hashes of those that have a
    key, by id."""
    from tickwheel.model.key_hash import KeyHash
    from tickwheel.persistence.sqlite import database, packs, rows
    from tickwheel.persistence.sqlite import rows as sql

    key_hash = KeyHash(bytes.fromhex(str(meta[database.KEY_SEED])))
    hashes: dict[int, int] = {}
    connection.execute("PRAGMA query_only = OFF")  # it forbids temporary tables too
    for statement in _EVERY:
        connection.execute(statement)
    for values in connection.execute("SELECT * FROM task WHERE extras IS NOT NULL"):
        with contextlib.suppress(RecordUnreadable):
            row = rows.task_row(*values)
            hashes |= key_hash.of_rows([row])
            if order_of(row) != row.id:
                placed = (order_of(row), row.id)
                connection.execute("UPDATE every SET place = ? WHERE id = ?", placed)
    moves = sql.read_moves(connection)
    for values in connection.execute(sql.ALL_PACKS):
        first, count, mask = values[0], values[1], values[-2]
        if not 0 < count <= packs.PACK_TASKS_MAX or not 0 <= mask < packs.mask_of(count):
            _add(audit, f"pack {first!r}: {count!r} tasks of which {mask!r} are gone")
            continue
        try:
            found = list(packs.Pack(*values).rows())
        except RecordUnreadable as error:
            _add(audit, str(error))
            continue
        audit.tasks += len(found)
        hashes |= key_hash.of_rows(found)
        connection.executemany(
            "INSERT OR IGNORE INTO every VALUES (?, ?, ?, ?)",
            [(row.id, moves.get(row.id, row.due_ms), row.topic, order_of(row)) for row in found],
        )
    (distinct,) = connection.execute("SELECT count(*) FROM every").fetchone()
    if distinct != audit.tasks:
        audit.problems.append(f"{audit.tasks} tasks, but {distinct} different ids")
    for (first,) in connection.execute("SELECT first FROM gone EXCEPT SELECT first FROM pack"):
        _add(audit, f"tasks are gone from pack {first!r}, which is not stored")
    for (first,) in connection.execute("SELECT first FROM moved EXCEPT SELECT first FROM pack"):
        _add(audit, f"tasks were moved in pack {first!r}, which is not stored")
    return hashes


def _keys(connection: sqlite3.Connection, audit: Audit, wanted: dict[int, int]) -> None:
    """Check that the hash of every key stands beside its task, and that no other hash is there."""
    from tickwheel.persistence.sqlite import rows

    found: dict[int, int] = {}
    for some in rows.read_keys(connection):
        found |= zip(some.ids, some.hashes, strict=True)
    for task_id in sorted(wanted.keys() | found.keys()):
        if wanted.get(task_id) != found.get(task_id):
            _add(audit, f"the hash beside task {task_id} is not that of its topic and key")


def _relations(connection: sqlite3.Connection, audit: Audit, meta: dict[str, int | str]) -> None:
    for table, sentence in _ORPHANS:
        found = connection.execute(
            f"SELECT id, grp FROM {table} WHERE id NOT IN (SELECT id FROM every)"
            f" ORDER BY id, grp LIMIT {PROBLEMS_MAX}"
        )
        for row in found:
            audit.problems.append(sentence.format(*row))
    both = connection.execute(
        "SELECT id, grp FROM dead JOIN prepare USING (id, grp) ORDER BY id, grp"
        f" LIMIT {PROBLEMS_MAX}"
    )
    for task_id, group in both:
        audit.problems.append(f"task {task_id} is both dead and in progress for group {group!r}")
    finished = connection.execute(
        f"{_FINISHED} LIMIT {PROBLEMS_MAX}", {"position_ms": meta["position_ms"]}
    )
    for (task_id,) in finished:
        audit.problems.append(f"task {task_id} is done for every group and is still stored")
    (id_max,) = connection.execute("SELECT max(id) FROM every").fetchone()
    if id_max is not None and id_max > int(meta["id_mark"]):
        audit.problems.append(f"task {id_max} lies above the id mark {meta['id_mark']}")


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
        still = connection.execute(
            "SELECT id FROM every WHERE id IN (SELECT value FROM json_each(?))", (ids,)
        )
        for (task_id,) in still:
            _add(audit, f"task {task_id} ended in batch {batch} and is still stored")


def _sessions(records: Small, audit: Audit) -> None:
    """Check that each request was answered once."""
    answered: dict[bytes, set[int]] = {}
    for row in sorted(records.of_kind(SESSION)):
        requests = answered.setdefault(row.session, set())
        for request, *_ in row.answers:
            if request in requests:
                _add(audit, f"session {row.session.hex()}: request {request} was answered twice")
            requests.add(request)
    audit.sessions = len(answered)


def _transactions(records: Small, audit: Audit) -> None:
    """Check that half tasks are those that their transactions count; a decided one has none."""
    heads: dict[str, TransactionRow] = {}
    found: dict[str, tuple[int, int]] = {}
    for row in records.of_kind(TRANSACTION):
        if isinstance(row, Halves):
            tasks, size_bytes = found.get(row.transaction, (0, 0))
            more = sum(half.size_bytes for half in row.halves)
            found[row.transaction] = tasks + len(row.halves), size_bytes + more
        else:
            heads[row.id] = row
    for name in sorted(found.keys() - heads.keys()):
        _add(audit, f"half tasks of transaction {name!r}, which is not stored")
    for name, head in sorted(heads.items()):
        wanted = (0, 0) if head.state.is_decided else (head.tasks, head.size_bytes)
        if found.get(name, (0, 0)) != wanted:
            _add(
                audit,
                f"transaction {name!r} has half tasks of {found.get(name, (0, 0))} (number, bytes);"
                f" it counts {wanted}",
            )


def _add(audit: Audit, problem: str) -> None:
    if len(audit.problems) < PROBLEMS_MAX * 10:
        audit.problems.append(problem)
