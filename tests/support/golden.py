"""Golden files: what each version of the stored formats wrote, in a folder of its own.

``PYTHONPATH=tests python -m support.golden tests/golden/v1`` writes those of this checkout:
``records.json`` (each case of ``cases``), ``sqlite.sql`` and ``redis.json`` (what the two stores
keep of ``content`` and what follows it), the last one in the folder of its layout. Files of a
version that was released must decode for ever and are never written again; CONTRIBUTING says when
that holds.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from support.redis_dump import dump
from support.redis_server import RedisServer
from support.store_rows import (
    BULKS,
    CLAIMS,
    COUNTER_ROW,
    DEAD,
    FAILURES,
    FULL_EXTRAS,
    GROUPS,
    HALVES,
    KNOWN_FAILURES,
    PAUSED_KEYS,
    PROGRESS,
    SCHEDULES,
    SESSIONS,
    TARGETS,
    TASKS,
    TRANSACTIONS,
    everything,
)
from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    COUNTER,
    GROUP,
    PAUSED_KEY,
    SCHEDULE,
    SESSION,
    TARGET,
    TRANSACTION,
    Effects,
    Kind,
    TransactionRow,
    TransactionState,
    key_of,
    keyed,
)
from tickwheel.model.records import ID_STEP, Outcome, Past, TaskOptions, TaskRow
from tickwheel.persistence import codec
from tickwheel.persistence.contract import Moves, Store
from tickwheel.persistence.redis import RedisStore, options_from
from tickwheel.persistence.redis.layout import LAYOUT
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore, writer

GOLDEN = Path(__file__).parent.parent / "golden"
OWNER = "golden"
NOW_MS = 1_700_000_000_000
BODY_BYTES_MAX = 1_000
"""Maximum bytes of bodies in golden files."""

STORED_TRANSACTIONS = [
    row._replace(size_bytes=sum(half.size_bytes for part in HALVES for half in part.halves))
    if isinstance(row, TransactionRow) and row.state is TransactionState.OPEN
    else row
    for row in TRANSACTIONS
]
"""Transactions with the sum that ``check`` compares."""
GOLDEN_TASKS = [row for row in TASKS if len(row.body) < BODY_BYTES_MAX]
GOLDEN_SESSIONS = [row._replace(answers=row.answers[:3]) for row in SESSIONS]
ENDED = {int(how) << 50 | 1: how for how in Outcome}

Case = tuple[Any, Callable[[Any], bytes | None], Callable[[Any], Any]]


def cases() -> dict[str, Case]:
    """Return (value, encode, decode) by name for every kind of record."""
    result: dict[str, Case] = {
        "extras-full": (FULL_EXTRAS, codec.encode_extras, codec.decode_extras),
        "past": (Past(FAILURES), codec.encode_past, codec.decode_past),
        "past-full": (Past(KNOWN_FAILURES, 17, 1_000, 2), codec.encode_past, codec.decode_past),
        "past-snoozed": (Past(snoozes=3), codec.encode_past, codec.decode_past),
        "past-replaced": (Past(replaced_by=7), codec.encode_past, codec.decode_past),
        "endings": (ENDED, codec.encode_endings, lambda data: dict(codec.decode_endings(data))),
    }
    for i, task in enumerate(GOLDEN_TASKS):
        result[f"task-{i}"] = (task, codec.encode_task, codec.decode_task)
        if task.options is not None:
            result[f"extras-{i}"] = (task.options, codec.encode_extras, codec.decode_extras)
    for i, progress in enumerate(PROGRESS):
        result[f"progress-{i}"] = (progress, codec.encode_progress, codec.decode_progress)
    for i, dead in enumerate(DEAD):
        result[f"dead-{i}"] = (dead, codec.encode_dead, codec.decode_dead)
    for name, kind, row in records():
        result[name] = (row, partial(codec.encode_record, kind), partial(codec.decode_record, kind))
    return result


def records() -> Iterator[tuple[str, Kind[Any], Any]]:
    """Yield (name, kind, row) of records of every kind."""
    yield from ((f"group-{i}", GROUP, row) for i, row in enumerate(GROUPS))
    yield from ((f"session-{i}", SESSION, row) for i, row in enumerate(GOLDEN_SESSIONS))
    yield from ((f"schedule-{row.schedule.name}", SCHEDULE, row) for row in SCHEDULES)
    for transaction in TRANSACTIONS:
        name = f"transaction-{'/'.join(map(str, key_of(transaction)))}"
        yield name, TRANSACTION, transaction
    yield from ((f"bulk-{row.bulk.id}", BULK, row) for row in BULKS)
    yield from ((f"paused-key-{i}", PAUSED_KEY, row) for i, row in enumerate(PAUSED_KEYS))
    yield from ((f"target-{i}", TARGET, row) for i, row in enumerate(TARGETS))
    yield "counter", COUNTER, COUNTER_ROW
    yield from ((f"claim-{row.of}", CLAIM, row) for row in CLAIMS)


# --- what golden stores hold ----------------------------------------------------------------------


def content() -> Effects:
    """Return a batch with every extreme except large bodies."""
    effects = everything()
    effects.enqueued = {row.id: row for row in GOLDEN_TASKS}
    effects.ended |= ENDED
    effects.records = dict(
        keyed(GROUP, GROUPS)
        | keyed(SESSION, GOLDEN_SESSIONS)
        | keyed(SCHEDULE, SCHEDULES)
        | keyed(TRANSACTION, STORED_TRANSACTIONS)
        | keyed(BULK, BULKS)
        | keyed(PAUSED_KEY, PAUSED_KEYS)
        | keyed(TARGET, TARGETS)
        | keyed(COUNTER, [COUNTER_ROW])
        | keyed(CLAIM, CLAIMS)
    )
    return effects


def crowd() -> Effects:
    """Return consecutive tasks, which SQLite keeps in packs."""
    first = 1 << 40
    options = (None, TaskOptions("k", "t", {"a": 1}, 7, 1000))
    ids = range(first, first + 70 * ID_STEP, ID_STEP)
    rows = [TaskRow(i, n, "ab"[n % 2], bytes([n]) * n, options[n % 2]) for n, i in enumerate(ids)]
    return Effects(enqueued={row.id: row for row in rows}, id_mark=ids[-1])


def ended() -> Effects:
    """Return a batch in which some of the crowd end and one is rescheduled."""
    rows = list(crowd().enqueued.values())
    effects = Effects(id_mark=rows[-1].id)
    effects.ended = {row.id: Outcome.ACKED for row in rows[3:9]}
    effects.updated = {rows[20].id: rows[20]._replace(due_ms=99)}
    return effects


def moved() -> tuple[Effects, Effects]:
    """Return batches that reschedule some of the crowd, two of them twice."""
    ids = list(crowd().enqueued)
    return Effects(moved={i: 1_000 + i % 7 for i in ids[30:66]}), Effects(
        moved={ids[31]: 5, ids[60]: 2**40, ids[10]: 3}
    )


def stored_tasks() -> dict[int, TaskRow]:
    """Return the tasks of a golden store by id."""
    rows = content().enqueued | crowd().enqueued | ended().updated
    for effects in moved():
        rows |= _moved_rows(rows, effects)
    return {i: row for i, row in rows.items() if i not in ended().ended}


def _moved_rows(rows: dict[int, TaskRow], effects: Effects) -> dict[int, TaskRow]:
    return {i: rows[i]._replace(due_ms=due_ms) for i, due_ms in effects.moved.items()}


async def fill(store: Store) -> None:
    """Write the content of a golden store batch by batch, and close the store."""
    opened = await store.open(OWNER, NOW_MS)
    some, others = moved()
    if not isinstance(store, Moves):
        rows = crowd().enqueued
        some, others = (Effects(updated=_moved_rows(rows, effects)) for effects in moved())
    for n, effects in enumerate((content(), crowd(), ended(), some, others), 1):
        # Some moves are written into their packs' rows, the others beside them.
        writer.MOVES_MAX = 0 if effects is some else 1_000
        assert await store.commit(opened.epoch, OWNER, n, effects)
    await store.close(clean=True)


# --- the files ------------------------------------------------------------------------------------


def load_dump(dump: Path, path: Path) -> None:
    """Create a database from a dump."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(dump.read_text(encoding="utf-8"))
    connection.close()


def dump_database(path: Path) -> str:
    """Return the dump that ``load_dump`` reads."""
    connection = sqlite3.connect(path)
    lines = list(connection.iterdump())
    for pragma in ("application_id", "user_version"):
        (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
        lines.append(f"PRAGMA {pragma} = {value};")
    connection.close()
    return "\n".join(lines) + "\n"


def encoded_cases() -> dict[str, str]:
    """Return the records of ``cases`` in hexadecimal."""
    encoded = {name: encode(value) for name, (value, encode, _) in cases().items()}
    return {name: data.hex() for name, data in encoded.items() if data is not None}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = json.dumps(encoded_cases(), indent=1) + "\n"
    (folder / "records.json").write_text(records, encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "store.db"
        asyncio.run(fill(SqliteStore(str(path), SqliteOptions(reserve_bytes=0))))
        (folder / "sqlite.sql").write_text(dump_database(path), encoding="utf-8")
        server = RedisServer(Path(name) / "redis").start()
        try:
            asyncio.run(fill(RedisStore(options_from(server.url()))))
            dumped = json.dumps(asyncio.run(dump(server.url())), indent=1) + "\n"
        finally:
            server.kill()
        (folder.with_name(f"v{LAYOUT}") / "redis.json").write_text(dumped, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
