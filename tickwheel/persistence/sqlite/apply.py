"""The statements of one batch: effects to SQL, inside the transaction that the writer opened.

Order does not matter, because no key is in two maps; nothing here commits or is remembered.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

from tickwheel.model.effects import Effects
from tickwheel.model.records import TaskRow
from tickwheel.persistence.codec import encode_endings
from tickwheel.persistence.sqlite import statements as sql
from tickwheel.persistence.sqlite.packindex import Change
from tickwheel.persistence.sqlite.packs import Pack, PackValues, pack_bytes
from tickwheel.persistence.sqlite.rows import (
    STATEMENT_BYTES_MAX,
    dead_values,
    group_values,
    progress_values,
    session_values,
    task_rows_max,
    task_values,
)
from tickwheel.persistence.sqlite.statements import ROWS_MAX

SESSIONS_A_STATEMENT_MAX = 16
"""A session's window may hold 1,024 outcomes, about 25 KiB."""


def write(connection: sqlite3.Connection, effects: Effects) -> None:
    """Everything but new tasks and ``ended``."""
    if effects.updated:
        tasks = effects.updated.values()
        sql.REPLACE_TASKS.run(connection, task_values(tasks), task_rows_max(tasks))
    if effects.progress:
        progress = [row for row in effects.progress.values() if row is not None]
        sql.REPLACE_PREPARE.run(connection, progress_values(progress))
        if len(progress) < len(effects.progress):
            drops = [key for key, row in effects.progress.items() if row is None]
            sql.DELETE_PREPARE.run(connection, drops)
    if effects.dead:
        dead = [row for row in effects.dead.values() if row is not None]
        sql.REPLACE_DEAD.run(connection, dead_values(dead))
        drops = [key for key, row in effects.dead.items() if row is None]
        sql.DELETE_DEAD.run(connection, drops)
    if effects.sessions:
        sessions = [row for row in effects.sessions.values() if row is not None]
        sql.REPLACE_SESSIONS.run(connection, session_values(sessions), SESSIONS_A_STATEMENT_MAX)
        gone = [(key,) for key, row in effects.sessions.items() if row is None]
        sql.DELETE_SESSIONS.run(connection, gone)
    if effects.groups:
        groups = [row for row in effects.groups.values() if row is not None]
        sql.REPLACE_GROUPS.run(connection, group_values(groups))
        sql.DELETE_GROUPS.run(
            connection, [key for key, row in effects.groups.items() if row is None]
        )


def enqueue(
    connection: sqlite3.Connection, packs: Sequence[PackValues], loose: Collection[TaskRow]
) -> None:
    """New tasks, as ``packs.split`` has divided them."""
    if packs:
        size = max(map(pack_bytes, packs))
        rows_max = max(1, min(ROWS_MAX, STATEMENT_BYTES_MAX // size))
        sql.INSERT_PACKS.run(connection, packs, rows_max)
    if loose:
        sql.INSERT_TASKS.run(connection, task_values(loose), task_rows_max(loose))


def leave_packs(connection: sqlite3.Connection, change: Change) -> None:
    """Tasks leave their packs: finished, or with a row of their own from now on."""
    if change.masks:
        sql.REPLACE_GONE.run(connection, change.masks.items())
    if change.done:
        drop_packs(connection, change.done)


def drop_packs(connection: sqlite3.Connection, firsts: list[int]) -> None:
    connection.execute(sql.DELETE_PACKS, (str(firsts),))
    connection.execute(sql.DELETE_GONE, (str(firsts),))


def take_apart(connection: sqlite3.Connection, firsts: list[int]) -> None:
    """Give what is left in these packs rows of their own."""
    rows: list[TaskRow] = []
    for values in connection.execute(sql.READ_PACKS, (str(firsts),)).fetchall():
        rows += Pack(*values).rows()
    drop_packs(connection, firsts)
    sql.INSERT_TASKS.run(connection, task_values(rows), task_rows_max(rows))


def end(
    connection: sqlite3.Connection,
    n: int,
    effects: Effects,
    *,
    loose: list[int],
    has_progress: bool,
    has_dead: bool,
    upto: int,
    endings_max: int,
) -> None:
    """Drop all rows of the ended tasks and remember how they ended, within the bound.

    ``loose``: those that have a row of their own. ``upto`` is the number of endings written
    before; the flags say which tables have rows.
    """
    ids = str(list(effects.ended))
    if loose:
        connection.execute(sql.DELETE_TASKS_BY_ID, (str(loose),))
    if has_progress:
        connection.execute(sql.DELETE_PREPARE_BY_ID, (ids,))
    if has_dead:
        connection.execute(sql.DELETE_DEAD_BY_ID, (ids,))
    upto += len(effects.ended)
    connection.execute(sql.INSERT_ENDING, (n, upto, encode_endings(effects.ended)))
    if upto > endings_max:
        connection.execute(sql.TRIM_ENDINGS, (upto - endings_max,))
