"""Where results and remarks go: results on stdout, everything else on stderr.

With ``--json`` a result is one JSON object a line. Without it, tables: drawn by rich on a
terminal, plain aligned columns into a pipe or file. ``NO_COLOR`` is obeyed (by rich).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
