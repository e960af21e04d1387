"""What a group's filter says of a task, and which filter that is.

A filter is changed at a moment: what had come due by then the former one judges, whenever that is,
also after a crash that makes it come due anew. So a moment is nothing but a due time and a place in
the order of ids (``ownership.py``). Where a clock was set back, it is as far as the wheel had ever
been.

What is said of a task depends on its row and on the group's settings alone. It is decided when the
task comes due, and nothing is written of it: after a restart the same is decided again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.model.filters.filter import Filter, known_filter
from tickwheel.model.records import FormerFilter, GroupSettings, TaskOptions, TaskRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


STEPS_PER_TICK = 65_536
"""Steps (``conditions.steps_of``) of one look at what is due: about ten milliseconds."""

TOPIC_STEPS_MAX = 65_536
"""How many steps judging one task by all filters of its topic's groups and broadcasts may take."""


class Judge:
    """The filters of one group. Their texts are read when the first task is judged, so that a
    restart does not wait for thousands of them."""

    __slots__ = ("_current", "_former", "_settings")

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._current: Filter | None = None
        self._former: Sequence[tuple[FormerFilter, Filter]] = ()

    def wants(self, row: TaskRow) -> bool:
        """Whether the filter lets a task that has come due pass."""
        current = self._current
        if current is None:
            current = self._read()
        if row.options is not None and row.options.replayed is not None:
            row = with_key(row, row.options.replayed.key)
        for former, judging in self._former:
            if is_before(former, row):
                return judging.passes(row)
        return current.passes(row)

    def divided(self, rows: Iterable[TaskRow]) -> tuple[list[TaskRow], list[TaskRow]]:
        """The rows that the filter lets pass, and the others; no row may stand for another task."""
        current = self._current or self._read()
        wants = self.wants if self._former else current.passes
        ours: list[TaskRow] = []
        others: list[TaskRow] = []
        for row in rows:
            (ours if wants(row) else others).append(row)
        return ours, others

    @property
    def steps(self) -> int:
        """How many steps judging a task takes at most."""
        current = self._current or self._read()
        return max(current.steps, *(judging.steps for _, judging in self._former), 0)

    def _read(self) -> Filter:
        settings = self._settings
        self._former = [(one, known_filter(one.tags, one.where)) for one in settings.former]
        self._current = known_filter(settings.tags, settings.where)
        return self._current


def filters_of(settings: GroupSettings) -> tuple[object, ...]:
    """All settings that the group's judge depends on."""
    return settings.tags, settings.where, settings.former


def length_of(settings: GroupSettings) -> int:
    """How many characters the filters of a group have, former ones included."""
    texts = (settings.tags, settings.where, *(text for one in settings.former for text in one[:2]))
    return sum(len(text) for text in texts if text is not None)


def judge_of(settings: GroupSettings | None) -> Judge | None:
    """The judge for a group with these settings; None: the group has no filter."""
    if settings is None or not (settings.tags or settings.where or settings.former):
        return None
    return Judge(settings)


def is_before(former: FormerFilter, row: TaskRow) -> bool:
    """Whether the task came due before the filter ``former`` was changed."""
    return row.due_ms <= former.due_ms and order_of(row) <= former.id


def order_of(row: TaskRow) -> int:
    """The task's place in the order of ids."""
    if row.options is None or row.options.order_id is None:
        return row.id
    return row.options.order_id


def with_key(row: TaskRow, key: str | None) -> TaskRow:
    """The row of a replayed task with the key of the original, as its consumers see it."""
    return row._replace(options=(row.options or TaskOptions())._replace(key=key))


def with_former(settings: GroupSettings, due_ms: int, order: int) -> tuple[FormerFilter, ...]:
    """The former filters with that of ``settings`` added, for tasks due by ``due_ms`` up to
    ``order``."""
    former, fresh = settings.former, FormerFilter(settings.tags, settings.where, due_ms, order)
    if former:
        last = former[-1]
        if last.due_ms >= due_ms and last.id >= order:
            return former  # nothing has come due since the last change
        is_later = last.due_ms <= due_ms and last.id <= order
        if is_later and (last.tags, last.where) == (fresh.tags, fresh.where):
            return (*former[:-1], fresh)
    return (*former, fresh)
