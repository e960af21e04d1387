"""The filter of a group: which tasks it is about, by their tags, by a condition, or by both.

``Filter.passes`` is asked for every task that comes due for the group, so all work that can be
done before is done when the filter is made. What it says of a task depends on nothing but the two:
it is the same after a restart. An expression that is UNKNOWN of a task leaves it out.

``tags`` is a list like ``eu || us``, or ``*`` for any task, also one without a tag. ``where`` is a
condition as SQL-92 has them; ``parsing.GRAMMAR`` is the language.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tickwheel.model.filters.conditions import (
    Condition,
    Judge,
    compiled,
    cost_of,
    depth_of,
    steps_of,
)
from tickwheel.model.filters.errors import FilterError
from tickwheel.model.records import PropertyValue, TaskOptions, TaskRow
from tickwheel.model.values import FILTER_LENGTH_MAX

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
        self._judge: Judge | None = None
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
    # Whoever names no condition does not wait for the parser to be loaded.
    from tickwheel.model.filters.parsing import parse

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
