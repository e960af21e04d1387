"""Rows as columns and back: ``wheel.records`` to flat values for statements, and from them.

Pure. What most rows do not have (extras, failures) is NULL and costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from tickwheel.persistence.codec import (
    decode_extras,
    decode_failures,
    decode_outcomes,
    decode_settings,
    encode_extras,
    encode_failures,
    encode_outcomes,
    encode_settings,
    progress_state,
)
from tickwheel.persistence.sqlite.statements import ROWS_MAX
from tickwheel.wheel.records import (
    DeadRow,
    GroupRow,
    ProgressRow,
    SessionRow,
    TaskRow,
)

STATEMENT_BYTES_MAX = 1 << 20
"""SQLite copies the values of a statement and keeps them until its next use."""
ROW_BYTES = 64
"""A task without its body: id, due time, topic, headers."""

_extras_of = itemgetter(4)
_body_of = itemgetter(3)


def task_values(rows: Collection[TaskRow]) -> Collection[Sequence[object]]:
    """A task row is its own list of columns unless it has extras."""
    if not any(map(_extras_of, rows)):
        return rows
    return [
        row if row[4] is None else (row[0], row[1], row[2], row[3], encode_extras(row[4]))
        for row in rows
    ]


def task_bytes(rows: Collection[TaskRow]) -> int:
    """About what the rows take in the database, not counting extras."""
    return sum(map(len, map(_body_of, rows))) + ROW_BYTES * len(rows)


def task_rows_max(rows: Collection[TaskRow]) -> int:
    """How many of these rows one statement may take."""
    size_bytes = task_bytes(rows)
    if size_bytes <= STATEMENT_BYTES_MAX:
        return ROWS_MAX
    return max(1, min(ROWS_MAX, STATEMENT_BYTES_MAX * len(rows) // size_bytes))


def progress_values(rows: Iterable[ProgressRow]) -> Iterator[Sequence[object]]:
    return (
        (task_id, group, int(state), attempt, at_ms, epoch, encode_failures(failures))
        for task_id, group, state, attempt, at_ms, epoch, failures in rows
    )


def dead_values(rows: Iterable[DeadRow]) -> Iterator[Sequence[object]]:
    return ((*row[:6], encode_failures(row.failures)) for row in rows)


def group_values(rows: Iterable[GroupRow]) -> Iterator[Sequence[object]]:
    return ((*row[:3], encode_settings(row.settings), row.since_id) for row in rows)


def session_values(rows: Iterable[SessionRow]) -> Iterator[Sequence[object]]:
    return ((*row[:3], encode_outcomes(row.outcomes)) for row in rows)


def progress_row(
    task_id: int, group: str, state: int, attempt: int, at_ms: int, epoch: int, failures: Any
) -> ProgressRow:
    return ProgressRow(
        task_id, group, progress_state(state), attempt, at_ms, epoch, decode_failures(failures)
    )


def dead_row(
    task_id: int, group: str, topic: str, died_ms: int, attempt: int, reason: str, failures: Any
) -> DeadRow:
    return DeadRow(task_id, group, topic, died_ms, attempt, reason, decode_failures(failures))


def group_row(
    topic: str,
    group: str,
    since_ms: int,
    settings: bytes | None = None,
    since_id: int | None = None,
) -> GroupRow:
    """A row of a layout below 4 has no last column, below 3 not the one before it either."""
    return GroupRow(topic, group, since_ms, decode_settings(settings), since_id)


def session_row(session: bytes, floor: int, seen_ms: int, outcomes: bytes) -> SessionRow:
    return SessionRow(session, floor, seen_ms, decode_outcomes(outcomes))


def task_row(task_id: int, due_ms: int, topic: str, body: bytes, extras: Any) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, decode_extras(extras))


def from_json(text: str) -> list[list[Any]]:
    """Rows of ``json_group_array(json_array(…, hex(failures)))``, the last column as bytes."""
    rows: list[list[Any]] = json.loads(text)
    for row in rows:
        row[-1] = bytes.fromhex(row[-1])
    return rows
