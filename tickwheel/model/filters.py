"""The filter of a group, which selects tasks by their tags, by a condition, or by both; and the
choice among a group's current and former filters (``Judge``).

``Filter.passes`` runs for every task that comes due for the group, so the constructor prepares as
much as possible. The result depends only on the filter and the task, so that it is the same after
a restart. A condition that is UNKNOWN for a task excludes the task.

``tags`` is a list like ``eu || us``, or ``*`` for any task, with or without a tag. ``where`` is a
condition as in SQL-92; ``conditions.GRAMMAR`` defines the language.

A former filter applies to the tasks that had come due before the filter was changed, even if a
crash makes them come due again. Therefore the moment of a change is a due time and a position in
the order of ids (``engine/ownership.py``). If the clock was set back, it is the highest position
that the wheel has reached. The filter is applied when a task comes due. The result depends only on
the task's row and the group's settings, so it is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from tickwheel.model.conditions import (
    Condition,
    FilterError,
    Predicate,
    compiled,
    cost_of,
    depth_of,
    parse,
    steps_of,
)
from tickwheel.model.conditions import why_never as why_never_of
from tickwheel.model.conditions import why_not as why_not_of
from tickwheel.model.records import (
    FormerFilter,
    GroupSettings,
    PropertyValue,
    TaskOptions,
    TaskRow,
    order_of,
)
from tickwheel.model.values import FILTER_LENGTH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FILTER_DEPTH_MAX = 32
"""Maximum nesting of AND, OR and NOT. Redundant parentheses do not count."""
FILTER_COST_MAX = 256
"""Maximum value of ``conditions.cost_of``: comparisons and searched characters of patterns."""

ANY_TAG = "*"
BETWEEN_TAGS = "||"
PLAIN = TaskOptions()
NO_PROPERTIES: Mapping[str, PropertyValue] = {}


class Filter:
    """A parsed filter. Filters are equal if they differ only in spaces, case, redundant
    parentheses, or the order of tags."""

    __slots__ = ("_condition", "_judge", "_tags", "steps", "tags", "where")

    def __init__(self, tags: str | None = None, where: str | None = None) -> None:
        """Raise FilterError for text that is not valid or exceeds a limit."""
        self.tags = tags
        self.where = where
        self._tags = None if tags is None else _tags(tags)
        self._condition = None if where is None else _condition(where)
        self._judge: Predicate | None = None
        self.steps = 1 if self._condition is None else 1 + steps_of(self._condition)
        """Maximum number of steps for applying the filter to a task; see
        ``conditions.steps_of``."""
        if self._condition is not None:
            self._judge = compiled(self._condition)

    @property
    def is_open(self) -> bool:
        """Whether every task passes because the filter has neither tags nor a condition."""
        return self._tags is None and self._judge is None

    def passes(self, row: TaskRow) -> bool:
        """Return whether the filter selects the task."""
        options = row[4] or PLAIN
        tags, judge = self._tags, self._judge
        if tags is not None and options[1] not in tags:
            return False
        return judge is None or judge(options, options[2] or NO_PROPERTIES) is True

    def why_not(self, row: TaskRow) -> str:
        """Return why the filter excludes the task, or "" if it selects the task."""
        options = row.options or PLAIN
        if self._tags is not None and options.tag not in self._tags:
            actual = "it has no tag" if options.tag is None else f"its tag is {options.tag!r}"
            return f"the filter's tags are {self.tags}, and {actual}"
        if self._condition is None:
            return ""
        return why_not_of(self._condition, options, options.properties or NO_PROPERTIES)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Filter):
            return NotImplemented
        return (self._tags, self._condition) == (other._tags, other._condition)

    def __hash__(self) -> int:
        return hash((self._tags, self._condition))

    def __str__(self) -> str:
        """Return the filter as text for messages and lists."""
        parts = (("tags", self.tags), ("where", self.where))
        return ", ".join(f"{name} {text}" for name, text in parts if text is not None) or "none"


@lru_cache(maxsize=128)
def known_filter(tags: str | None, where: str | None) -> Filter:
    """Return the filter for these texts. It is cached, because thousands of groups can use the same
    text. Raise FilterError for text that is not valid or exceeds a limit."""
    return Filter(tags, where)


@lru_cache(maxsize=128)
def why_never(group_filter: Filter) -> str | None:
    """Return why no task can satisfy the filter's condition, or None if no reason is found."""
    return None if group_filter._condition is None else why_never_of(group_filter._condition)


def _tags(text: str) -> frozenset[str | None] | None:
    """Return the tags that pass; None means any tag."""
    _check_length("tags", text)
    if text.strip() == ANY_TAG:
        return None
    tags: set[str | None] = set()
    position = 0
    for part in text.split(BETWEEN_TAGS):
        tag = part.strip()
        begin = position + len(part) - len(part.lstrip())
        if not tag:
            raise FilterError("tags", "expected a tag", text, begin)
        if tag == ANY_TAG:
            raise FilterError("tags", "* means any tag and must be alone", text, begin)
        tags.add(tag)
        position += len(part) + len(BETWEEN_TAGS)
    return frozenset(tags)


def _condition(text: str) -> Condition:
    _check_length("where", text)
    condition = parse(text)
    depth, limit = depth_of(condition), FILTER_DEPTH_MAX
    if depth > limit:
        message = f"AND, OR and NOT are nested {depth} deep; the limit is {limit}"
        raise FilterError("where", f"{message} (FILTER_DEPTH_MAX)", text, None)
    cost = cost_of(condition)
    if cost > FILTER_COST_MAX:
        message = f"evaluating the condition takes {cost} steps; the limit is {FILTER_COST_MAX}"
        raise FilterError("where", f"{message} (FILTER_COST_MAX)", text, None)
    return condition


def _check_length(field: str, text: str) -> None:
    if len(text) > FILTER_LENGTH_MAX:
        message = f"{len(text)} characters; the limit is {FILTER_LENGTH_MAX} (FILTER_LENGTH_MAX)"
        raise FilterError(field, message, text, None)


STEPS_PER_TICK = 65_536
"""Maximum filter steps (``conditions.steps_of``) in one tick of the shard: about 10 ms.
Giving a due task to one of several groups, or to a broadcast, is a step of up to 1 µs."""

TOPIC_STEPS_MAX = 65_536
"""Maximum number of steps for all filters of a topic's groups and broadcasts, per task."""


class Judge:
    """The filters of one group. Their texts are parsed for the first task, so that a restart does
    not parse thousands of filters."""

    __slots__ = ("_current", "_former", "_settings")

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._current: Filter | None = None
        self._former: Sequence[tuple[FormerFilter, Filter]] = ()

    def wants(self, row: TaskRow) -> bool:
        """Return whether the group's filter selects a due task."""
        current = self._current
        if current is None:
            current = self._read()
        if row.options is not None and row.options.replayed is not None:
            row = with_key(row, row.options.replayed.key)
        for former, former_filter in self._former:
            if is_before(former, row):
                return former_filter.passes(row)
        return current.passes(row)

    def why_not(self, row: TaskRow) -> str:
        """Return ``Filter.why_not`` of the filter that applies to the task."""
        current = self._current or self._read()
        if row.options is not None and row.options.replayed is not None:
            row = with_key(row, row.options.replayed.key)
        judging = (
            former_filter for former, former_filter in self._former if is_before(former, row)
        )
        return next(judging, current).why_not(row)

    def divided(self, rows: Iterable[TaskRow]) -> tuple[list[TaskRow], list[TaskRow]]:
        """Return (selected rows, excluded rows). No task may have been created by a reset."""
        current = self._current or self._read()
        wants = self.wants if self._former else current.passes
        selected: list[TaskRow] = []
        excluded: list[TaskRow] = []
        for row in rows:
            (selected if wants(row) else excluded).append(row)
        return selected, excluded

    @property
    def steps(self) -> int:
        """Maximum number of steps for one task."""
        current = self._current or self._read()
        return max(current.steps, *(former_filter.steps for _, former_filter in self._former), 0)

    def _read(self) -> Filter:
        settings = self._settings
        self._former = [
            (former, known_filter(former.tags, former.where)) for former in settings.former
        ]
        self._current = known_filter(settings.tags, settings.where)
        return self._current


def filters_of(settings: GroupSettings) -> tuple[object, ...]:
    """Return the settings on which the group's judge depends."""
    return settings.tags, settings.where, settings.former


def length_of(settings: GroupSettings) -> int:
    """Return the number of characters in the current and former filters of a group."""
    former_texts = (text for former in settings.former for text in former[:2])
    texts = (settings.tags, settings.where, *former_texts)
    return sum(len(text) for text in texts if text is not None)


def judge_of(settings: GroupSettings | None) -> Judge | None:
    """Return the judge for a group with these settings, or None if it has no filter."""
    if settings is None or not (settings.tags or settings.where or settings.former):
        return None
    return Judge(settings)


def is_before(former: FormerFilter, row: TaskRow) -> bool:
    """Return whether the task came due before the filter ``former`` was changed."""
    return row.due_ms <= former.due_ms and order_of(row) <= former.id


def with_key(row: TaskRow, key: str | None) -> TaskRow:
    """Return the row of a reset's task with the key of the original, as consumers see it."""
    return row._replace(options=(row.options or TaskOptions())._replace(key=key))


def with_former(settings: GroupSettings, due_ms: int, order: int) -> tuple[FormerFilter, ...]:
    """Return the former filters with the current filter of ``settings`` added, which applies to
    tasks due by ``due_ms`` with positions up to ``order``."""
    former, present = settings.former, FormerFilter(settings.tags, settings.where, due_ms, order)
    if former:
        last = former[-1]
        if last.due_ms >= due_ms and last.id >= order:
            return former  # no task has come due since the last change
        is_later = last.due_ms <= due_ms and last.id <= order
        if is_later and (last.tags, last.where) == (present.tags, present.where):
            return (*former[:-1], present)
    return (*former, present)
