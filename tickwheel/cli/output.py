"""Where results and remarks go: results on stdout, everything else on stderr.

With ``--json`` a result is one JSON object a line. Without it, tables: drawn by rich on a
terminal, plain aligned columns into a pipe or file. ``NO_COLOR`` is obeyed (by rich).

How far a list goes: as JSON to its end, as a table to ROWS_SHOWN, or as far as ``--limit`` says.

A table that stops before the end says so on stderr: nobody takes a part for the whole.

Tables of counts: a row for each topic or group, columns over what the daemon's STATS say. Pure.

``topics``, ``groups``, ``stats`` and ``top`` choose their columns; how a count, an age or a rate
looks is decided here. A count that an older daemon does not send is a dash.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from tickwheel.cli.options import format_count, format_duration, short_policy, spec_duration

if TYPE_CHECKING:
    from rich.table import Table


NAME_WIDTHS = 20, 12
"""Characters after which a name is folded where there is little room; a narrower name is used
before a text is left out. A text is folded at its blanks."""
TEXT_WIDTH = 12
TIME_WIDTH = 19
GAP = 2
"""Blanks between two columns."""
NOTHING = frozenset(("", "-"))


@dataclass
class Grid:
    """A table before it is drawn; every cell is text without control characters."""

    columns: Sequence[str]
    title: str = ""
    rows: list[Sequence[str]] = field(default_factory=list)
    right: frozenset[str] = frozenset()
    """The columns of numbers."""
    times: frozenset[str] = frozenset()
    """The columns of times, which lose their milliseconds where there is little room."""
    spare: Sequence[str] = ()
    """The columns that are left out first, in this order."""

    def plain(self) -> str:
        """The table as text in aligned columns, two blanks between them, none at the end."""
        lines = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [self.title] if self.title else []
        for line in lines:
            cells = [
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for name, cell, width in zip(self.columns, line, widths, strict=True)
            ]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text)

    def fitted(self, width: int) -> tuple[Grid, list[str]]:
        """What ``width`` characters have room for, and the columns that they have not.

        First times do without their milliseconds, then columns go that say nothing in any row, then
        texts are folded. Columns are left out after that: ``spare`` in its order, counts from the
        right, and, when texts are folded still narrower, texts from the right. Whatever a row is
        called by stays.
        """
        if self._takes(range(len(self.columns))) <= width:
            return self, []
        grid = self._without_milliseconds()
        kept, hidden = list(range(len(grid.columns))), list[int]()
        for i in reversed(range(1, len(grid.columns))):
            if grid._takes(kept) > width and all(row[i] in NOTHING for row in grid.rows):
                kept.remove(i)
        fold = NAME_WIDTHS[0] if grid._takes(kept) > width else None
        while len(kept) > 1 and grid._takes(kept, fold) > width:
            least = grid._least(kept)
            if fold != NAME_WIDTHS[1] and not self._is_spare(least):
                fold = NAME_WIDTHS[1]
                continue
            hidden.append(least)
            kept.remove(least)
        rows: list[Sequence[str]] = [[row[i] for i in kept] for row in grid.rows]
        columns = [grid.columns[i] for i in kept]
        return replace(grid, columns=columns, rows=rows), [grid.columns[i] for i in sorted(hidden)]

    def _is_spare(self, column: int) -> bool:
        return self.columns[column] in {*self.spare, *self.right}

    def _least(self, kept: list[int]) -> int:
        """The column among ``kept`` that can be missed most easily."""
        for name in self.spare:
            for i in kept[1:]:
                if self.columns[i] == name:
                    return i
        counts = [i for i in kept[1:] if self.columns[i] in self.right]
        # Of texts the second may still be part of the name, as a group is.
        return counts[-1] if counts else kept[-1]

    def _without_milliseconds(self) -> Grid:
        times = {i for i, name in enumerate(self.columns) if name in self.times}
        rows: list[Sequence[str]] = [
            [_MILLISECONDS.sub(r"\1", cell) if i in times else cell for i, cell in enumerate(row)]
            for row in self.rows
        ]
        return replace(self, rows=rows)

    def widths(self, width: int) -> list[int]:
        """The width of each column. Room that texts do not need goes to columns from the left."""
        every = range(len(self.columns))
        fold = next((fold for fold in NAME_WIDTHS if self._takes(every, fold) <= width), TEXT_WIDTH)
        found = [self._needed(i, fold) for i in every]
        left = width - self._takes(every, fold)
        for i in every:
            more = min(max(left, 0), self._needed(i) - found[i])
            found[i], left = found[i] + more, left - more
        return found

    def _takes(self, kept: Iterable[int], fold: int | None = None) -> int:
        # Rich reckons with a blank behind the last column, too.
        return sum(self._needed(i, fold) + GAP for i in kept) - GAP + 1

    def _needed(self, column: int, fold: int | None = None) -> int:
        """The characters that a column needs, with names folded after ``fold``. A count is never
        cut; a text may be folded at its blanks, and a word of it that is too long anywhere."""
        cells = [line[column] for line in [self.columns, *self.rows]]
        full = max(map(len, cells))
        if fold is None or self.columns[column] in self.right:
            return full
        if self.columns[column] in self.times:
            return min(full, TIME_WIDTH)
        words = max((len(word) for cell in cells for word in cell.split()), default=0)
        return min(full, max(TEXT_WIDTH, min(words, fold)))


_MILLISECONDS = re.compile(r"(\d:\d\d)\.\d{3}\b")


def facts_grid(
    heads: tuple[str, str],
    facts: Mapping[str, str | int],
    title: str = "",
    *,
    right: bool = False,
) -> Grid:
    """A table of names and values: whole numbers as ``12,345``, texts as they are. ``right``: the
    values stand right."""
    rows: list[Sequence[str]] = [
        (name, f"{value:,}" if isinstance(value, int) else value) for name, value in facts.items()
    ]
    return Grid(heads, title=title, rows=rows, right=frozenset(heads[1:] if right else ()))


class Output:
    """Writes the results and remarks of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def record(self, fields: dict[str, Any]) -> None:
        """Write one result as a line of JSON, at once."""
        escape = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        sys.stdout.write(json.dumps(fields, ensure_ascii=escape, default=str) + "\n")
        sys.stdout.flush()

    def line(self, text: str) -> None:
        """Write one line of a result for people, at once."""
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()

    def grid(self, grid: Grid) -> None:
        """Write a table for people."""
        if not sys.stdout.isatty():
            self.line(grid.plain())
            return
        from rich.console import Console

        console = Console()
        shown, hidden = grid.fitted(console.width)
        console.print(table_of(shown, console.width))
        if hidden:
            remark(hidden_text(hidden))

    def remark(self, text: str) -> None:
        """Write a remark beside the result, on stderr."""
        remark(text)


def hidden_text(hidden: Sequence[str]) -> str:
    return f"not in this width: {', '.join(hidden)} (--json has all)"


def table_of(grid: Grid, width: int, *, dim: bool = False) -> Table:
    """A grid as a rich table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = "dim" if dim else ""
    table = Table(
        title=grid.title or None,
        title_justify="left",
        header_style="bold",
        style=style,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
    )
    for name, size in zip(grid.columns, grid.widths(width), strict=True):
        table.add_column(
            name,
            justify="right" if name in grid.right else "left",
            overflow="fold",
            no_wrap=name in grid.right,
            width=size,
        )
    for row in grid.rows:
        table.add_row(*(Text(cell, style=style) for cell in row))
    return table


def remark(text: str) -> None:
    """Write one line to stderr."""
    encoding = sys.stderr.encoding or "ascii"
    sys.stderr.write(f"tickwheel: {text}\n".encode(encoding, "replace").decode(encoding))
    sys.stderr.flush()


# --- how far a list goes -------------------------------------------------------------------------

T = TypeVar("T")

ROWS_SHOWN: Final = 100
"""Rows of a table, unless ``--limit`` says otherwise."""

LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"At most so many. Default: all with --json, {ROWS_SHOWN} as a table.",
    ),
]


def wanted(out: Output, limit: int | None) -> int | None:
    """How many rows are shown; None: all."""
    return limit if limit is not None or out.as_json else ROWS_SHOWN


def asked(out: Output, limit: int | None) -> int | None:
    """How many rows to ask for: a table asks for one more than it shows, to know if it stops."""
    most = wanted(out, limit)
    return most if most is None or out.as_json else most + 1


async def shown(
    out: Output, limit: int | None, ask: Callable[[int | None], AsyncIterator[T]]
) -> AsyncIterator[T]:
    """The rows that ``ask(how many)`` finds, as far as the list goes."""
    most, count = wanted(out, limit), 0
    async for one in ask(asked(out, limit)):
        if most is not None and count >= most:
            stops(out, most)
            return
        yield one
        count += 1


def cut(out: Output, limit: int | None, found: Iterable[T]) -> Iterator[T]:
    """The rows of ``found``, as far as the list goes."""
    most = wanted(out, limit)
    for count, one in enumerate(found):
        if most is not None and count >= most:
            if not out.as_json:
                stops(out, most)
            return
        yield one


def stops(out: Output, most: int) -> None:
    out.remark(f"there are more than these {most:,}: --limit N shows so many, --json all")


# --- tables of counts ----------------------------------------------------------------------------

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
