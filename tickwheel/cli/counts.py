"""Tables of counts: a row for each topic or group, columns over what the daemon's STATS say. Pure.

``topics``, ``groups``, ``stats`` and ``top`` choose their columns; how a count, an age or a rate
looks is decided here. A count that an older daemon does not send is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_count, format_duration, short_policy, spec_duration

Map = Mapping[str, Any]

STATES = ("pending", "ready", "in_flight", "waiting", "dead")
"""Counts of what is there now; a group has no pending of its own."""
GROUP_STATES = STATES[1:]
TOTALS = ("enqueued", "delivered", "acked")
"""Counts of what has happened."""
_HEADS = {"in_flight": "in flight"}


@dataclass(frozen=True)
class Column:
    """The head of a column, and how its cell is read from a row's map."""

    head: str
    cell: Callable[[Map], str]
    number: bool = True
    """Whether the cells are numbers, which stand right."""


def counts_grid(
    names: Sequence[str],
    columns: Sequence[Column],
    rows: Iterable[tuple[Sequence[str], Map]],
    title: str = "",
    spare: Sequence[str] = (),
) -> Grid:
    """A table of rows with their names, under ``names``, and columns; ``spare`` as a grid has
    it."""
    heads = (*names, *(column.head for column in columns))
    numbers = frozenset(column.head for column in columns if column.number)
    cells = [(*called, *(column.cell(row) for column in columns)) for called, row in rows]
    return Grid(heads, title=title, rows=list(cells), right=numbers, spare=spare)


def head(name: str) -> str:
    """The name of a count for people."""
    return _HEADS.get(name, name.replace("_", " "))


def count_columns(
    names: Iterable[str], *, absent: str = "-", head: Callable[[str], str] = head
) -> tuple[Column, ...]:
    """Counts by their names in STATS; ``absent`` is shown for one that the row does not have."""

    def column(name: str) -> Column:
        return Column(head(name), lambda row: format_count(row[name]) if name in row else absent)

    return tuple(column(name) for name in names)


def age(oldest_ms: Any) -> str:
    """How long the oldest ready task has been waiting; a dash when there is none."""
    return format_duration(oldest_ms / 1000) if isinstance(oldest_ms, int) and oldest_ms else "-"


def rate_limit(settings: Map) -> str:
    """``100/s``, ``100/s burst 200``, or a dash for no limit."""
    limit, burst = settings.get("rate"), settings.get("burst")
    if limit is None:
        return "-"
    return f"{limit:g}/s" + ("" if burst is None else f" burst {burst}")


def replay(group: Map) -> str:
    """How far tasks from before the group have been looked at for it; a dash: all have been."""
    found = group.get("replay")
    return "-" if found is None else f"{found['share']:.0%}"


OLDEST = Column("oldest", lambda row: age(row.get("oldest_ready_ms")))


def _held_up(row: Map) -> str:
    if row.get("deleting"):
        return "deleting"
    return "paused" if row.get("paused") else "-"


PAUSED = Column("paused", _held_up, number=False)
RATE = Column("rate", rate_limit, number=False)
RETRY = Column("retry", lambda row: short_policy(row.get("retry")), number=False)


def filter_text(group: Map) -> str:
    """The filter of a group, or a dash for none."""
    parts = (f"{name} {group[name]}" for name in ("tags", "where") if group.get(name))
    return ", ".join(parts) or "-"


def lines_texts(group: Map) -> list[str]:
    """The settings of order keys and fair shares of a group, in words."""
    found = []
    if (retry_ms := group.get("order_retry_ms")) is not None:
        found.append(f"order retry {spec_duration(retry_ms)}")
    failure, attempts = group.get("order_failure"), group.get("order_attempts")
    if failure is not None:
        found.append(
            "tried for ever" if attempts is None else f"{failure} after {attempts} attempts"
        )
    if (value := group.get("fair_by")) is not None:
        limit, rate = group.get("limit_each"), group.get("rate_each")
        limits = [f"{limit} in flight"] if limit is not None else []
        limits += [f"{rate:g}/s"] if rate is not None else []
        found.append(f"fair by {value}" + (f" ({', '.join(limits)} each)" if limits else ""))
    return found


def _lines_text(group: Map) -> str:
    return ", ".join(lines_texts(group)) or "-"


LINES = Column("order, shares", _lines_text, number=False)
FILTER = Column("filter", filter_text, number=False)
GROUPS = Column("groups", lambda row: format_count(len(row.get("groups") or {})))
MEMBERS = Column("members", lambda row: format_count(row.get("subscribers")))
REPLAY = Column("replay", replay)
UNUSED = Column("unused", lambda row: age(row.get("unused_ms")))


def _unused_groups(topic: Map) -> str:
    """How many groups nobody has used for long; a dash: none."""
    groups = (topic.get("groups") or {}).values()
    found = sum(group.get("unused_ms") is not None for group in groups)
    return format_count(found) if found else "-"


UNUSED_GROUPS = Column("unused", _unused_groups)
