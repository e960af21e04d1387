"""The statements of one batch: effects to SQL, inside the transaction that the writer opened.

Order does not matter, because no key is in two maps; nothing here commits or is remembered.
"""

from __future__ import annotations

import sqlite3

from tickwheel.persistence.codec import encode_endings
from tickwheel.persistence.sqlite import statements as sql
from tickwheel.persistence.sqlite.rows import (
    dead_values,
    progress_values,
    session_values,
    task_rows_max,
    task_values,
)
from tickwheel.wheel.effects import Effects

SESSIONS_A_STATEMENT_MAX = 16
"""A session's window may hold 1,024 outcomes, about 25 KiB."""


def write(connection: sqlite3.Connection, effects: Effects) -> None:
    """Everything but ``ended``."""
    if effects.enqueued:
        tasks = effects.enqueued.values()
        sql.INSERT_TASKS.run(connection, task_values(tasks), task_rows_max(tasks))
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
        sql.REPLACE_GROUPS.run(
            connection, [row for row in effects.groups.values() if row is not None]
        )
        sql.DELETE_GROUPS.run(
            connection, [key for key, row in effects.groups.items() if row is None]
        )


def end(
    connection: sqlite3.Connection,
    n: int,
    effects: Effects,
    *,
    has_progress: bool,
    has_dead: bool,
    upto: int,
    endings_max: int,
) -> None:
    """Drop all rows of the ended tasks and remember how they ended, within the bound.

    ``upto`` is the number of endings written before; the flags say which tables have rows.
    """
    ids = str(list(effects.ended))
    connection.execute(sql.DELETE_TASKS_BY_ID, (ids,))
    if has_progress:
        connection.execute(sql.DELETE_PREPARE_BY_ID, (ids,))
    if has_dead:
        connection.execute(sql.DELETE_DEAD_BY_ID, (ids,))
    upto += len(effects.ended)
    connection.execute(sql.INSERT_ENDING, (n, upto, encode_endings(effects.ended)))
    if upto > endings_max:
        connection.execute(sql.TRIM_ENDINGS, (upto - endings_max,))
