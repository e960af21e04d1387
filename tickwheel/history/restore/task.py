"""One task while events are applied to it, and what its groups have to remember."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.wheel.records import DeadRow, Failure, ProgressRow, ProgressState, TaskRow


class Task:
    """One task that an event has named."""

    __slots__ = ("dead", "has_body", "holders", "is_new", "let_go", "progress", "row")

    def __init__(
        self,
        row: TaskRow,
        progress: Iterable[ProgressRow] = (),
        dead: Iterable[DeadRow] = (),
        *,
        has_body: bool = True,
        is_new: bool = False,
    ) -> None:
        self.row = row
        self.is_new = is_new
        """Not of the backup."""
        self.progress = {one.group: one for one in progress}
        self.dead = {one.group: one for one in dead}
        self.holders: dict[str, str] = {}
        """Who had it last, by group."""
        self.let_go: set[str] = set()
        """Groups that were deleted, and had it."""
        self.has_body = has_body


def is_done(row: ProgressRow | None) -> bool:
    return row is not None and row.state is ProgressState.DONE


def has_history(task: Task) -> bool:
    """Some group has attempts, an ack or a dead letter to remember."""
    return bool(task.dead) or any(
        row.attempt or row.state is ProgressState.DONE for row in task.progress.values()
    )


def failures_of(task: Task, group: str) -> tuple[Failure, ...]:
    known: Any = task.progress.get(group) or task.dead.get(group)
    found: tuple[Failure, ...] = known.failures if known is not None else ()
    return found


def failures_until(task: Task, group: str, time_ms: int) -> tuple[Failure, ...]:
    return tuple(failure for failure in failures_of(task, group) if failure.at_ms <= time_ms)
