"""The filter of a group: which tasks it is about, by their tags, by a condition, or by both; and
which of a group's filters judges a task (``Judge``).

``Filter.passes`` is asked for every task that comes due for the group, so all work that can be
done before is done when the filter is made. What it says of a task depends on nothing but the two:
it is the same after a restart. An expression that is UNKNOWN of a task leaves it out.

``tags`` is a list like ``eu || us``, or ``*`` for any task, also one without a tag. ``where`` is a
condition as SQL-92 has them; ``conditions.GRAMMAR`` is the language.

A filter is changed at a moment: what had come due by then the former one judges, whenever that is,
also after a crash that makes it come due anew. So a moment is nothing but a due time and a place in
the order of ids (``engine/ownership.py``). Where a clock was set back, it is as far as the wheel
had ever been. What is said of a task depends on its row and on the group's settings alone. It is
decided when the task comes due, and nothing is written of it: after a restart the same is decided
again.
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
"""How deep AND, OR and NOT may be nested; parentheses count by what they make."""
FILTER_COST_MAX = 256
"""The highest ``conditions.cost_of``: comparisons, and searched characters of patterns."""

ANY_TAG = "*"
BETWEEN_TAGS = "||"
PLAIN = TaskOptions()
NO_PROPERTIES: Mapping[str, PropertyValue] = {}


class Filter:
    """What a group wants, ready to judge. Two that want the same by the same words are equal,
    however they are spaced, cased or put in parentheses, and in whatever order tags are."""

    __slots__ = ("_condition", "_judge", "_tags", "steps", "tags", "where")

    def __init__(self, tags: str | None = None, where: str | None = None) -> None:
        """Raises FilterError for text that cannot be read, or is over a limit."""
        self.tags = tags
        self.where = where
        self._tags = None if tags is None else _tags(tags)
        self._condition = None if where is None else _condition(where)
        self._judge: Predicate | None = None
        self.steps = 1 if self._condition is None else 1 + steps_of(self._condition)
        """How many steps judging a task takes at most: see ``conditions.steps_of``."""
        if self._condition is not None:
            self._judge = compiled(self._condition)

    @property
    def is_open(self) -> bool:
        """Whether every task passes, because no tags and no condition are given."""
        return self._tags is None and self._judge is None

    def passes(self, row: TaskRow) -> bool:
        """Whether the group wants the task."""
        options = row[4] or PLAIN
        tags, judge = self._tags, self._judge
        if tags is not None and options[1] not in tags:
            return False
        return judge is None or judge(options, options[2] or NO_PROPERTIES) is True

    def why_not(self, row: TaskRow) -> str:
        """Say why the group does not want the task: which tag it lacks, or which condition failed
        and by which value; "" when it does."""
        options = row.options or PLAIN
        if self._tags is not None and options.tag not in self._tags:
            found = "it has none" if options.tag is None else f"its tag is {options.tag!r}"
            return f"it wants the tags {self.tags}, and {found}"
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
        """The texts of the filter, as an error or a list shows them."""
        parts = (("tags", self.tags), ("where", self.where))
        return ", ".join(f"{name} {text}" for name, text in parts if text is not None) or "none"


@lru_cache(maxsize=128)
def known_filter(tags: str | None, where: str | None) -> Filter:
    """A filter, read once for all who use the same text: thousands may. Raises FilterError."""
    return Filter(tags, where)


@lru_cache(maxsize=128)
def why_never(wanted: Filter) -> str | None:
    """Say why no task can meet the filter's condition; None: nothing rules that out."""
    return None if wanted._condition is None else why_never_of(wanted._condition)


def _tags(text: str) -> frozenset[str | None] | None:
    """The tags that let a task pass; None: any does."""
    _check_length("tags", text)
    if text.strip() == ANY_TAG:
        return None
    tags: set[str | None] = set()
    place = 0
    for part in text.split(BETWEEN_TAGS):
        tag = part.strip()
        begin = place + len(part) - len(part.lstrip())
        if not tag:
            raise FilterError("tags", "a tag is expected", text, begin)
        if tag == ANY_TAG:
            raise FilterError("tags", "* stands for any tag, and alone", text, begin)
        tags.add(tag)
        place += len(part) + len(BETWEEN_TAGS)
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
        message = f"judging a task costs {cost} steps; the limit is {FILTER_COST_MAX}"
        raise FilterError("where", f"{message} (FILTER_COST_MAX)", text, None)
    return condition


def _check_length(field: str, text: str) -> None:
    if len(text) > FILTER_LENGTH_MAX:
        message = f"{len(text)} characters; the limit is {FILTER_LENGTH_MAX} (FILTER_LENGTH_MAX)"
        raise FilterError(field, message, text, None)


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

    def why_not(self, row: TaskRow) -> str:
        """``Filter.why_not`` of the filter that judges the task."""
        current = self._current or self._read()
        if row.options is not None and row.options.replayed is not None:
            row = with_key(row, row.options.replayed.key)
        judging = (one for former, one in self._former if is_before(former, row))
        return next(judging, current).why_not(row)

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
