"""Where results and remarks go: results on stdout, everything else on stderr.

With ``--json`` a result is one JSON object a line. Without it, tables: drawn by rich on a
terminal, plain aligned columns into a pipe or file. ``NO_COLOR`` is obeyed (by rich).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


TEXT_WIDTH = 24
"""A column of texts is not narrower than this, if it has so much to say."""
GAP = 3
"""Between two columns."""


@dataclass
class Grid:
    """A table before it is drawn; every cell is text without control characters."""

    columns: Sequence[str]
    title: str = ""
    rows: list[Sequence[str]] = field(default_factory=list)
    right: frozenset[str] = frozenset()
    """Columns of numbers."""

    def plain(self) -> str:
        """Aligned columns, two spaces between, no trailing ones."""
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
        """What ``width`` characters have room for, and the columns that they have not: counts go
        first, from the right, so that whatever a row is called by stays."""
        kept, hidden = list(range(len(self.columns))), list[str]()
        needed = [self._needed(i) + GAP for i in kept]
        while len(kept) > 1 and sum(needed[i] for i in kept) > width:
            counts = [i for i in kept[1:] if self.columns[i] in self.right]
            # Of texts the second may still be part of the name, as a group is.
            last = counts[-1] if counts else kept[-1]
            kept.remove(last)
            hidden.insert(0, self.columns[last])
        if not hidden:
            return self, hidden
        rows: list[Sequence[str]] = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows), hidden

    def _needed(self, column: int) -> int:
        """Characters of the column: counts are never cut, texts may be folded to some lines."""
        full = max(len(line[column]) for line in [self.columns, *self.rows])
        return full if self.columns[column] in self.right else min(full, TEXT_WIDTH)


def facts_grid(
    heads: tuple[str, str],
    facts: Mapping[str, str | int],
    title: str = "",
    *,
    right: bool = False,
) -> Grid:
    """A table of what is called how: whole numbers as ``12,345``, texts as they are. ``right``:
    the values stand right."""
    rows: list[Sequence[str]] = [
        (name, f"{value:,}" if isinstance(value, int) else value) for name, value in facts.items()
    ]
    return Grid(heads, title=title, rows=rows, right=frozenset(heads[1:] if right else ()))


class Output:
    """One command's way to speak."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def record(self, fields: dict[str, Any]) -> None:
        """One result as one line of JSON, at once."""
        escape = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        sys.stdout.write(json.dumps(fields, ensure_ascii=escape, default=str) + "\n")
        sys.stdout.flush()

    def line(self, text: str) -> None:
        """One line of a result for people, at once."""
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()

    def grid(self, grid: Grid) -> None:
        """A table for people."""
        if not sys.stdout.isatty():
            self.line(grid.plain())
            return
        from rich.console import Console

        console = Console()
        shown, hidden = grid.fitted(console.width)
        console.print(table_of(shown))
        if hidden:
            remark(hidden_text(hidden))

    def remark(self, text: str) -> None:
        """Something beside the result, on stderr."""
        remark(text)


def hidden_text(hidden: Sequence[str]) -> str:
    return f"not in this width: {', '.join(hidden)} (--json has all)"


def table_of(grid: Grid, *, dim: bool = False) -> Table:
    """A grid as rich draws it."""
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
    )
    for index, name in enumerate(grid.columns):
        table.add_column(
            name,
            justify="right" if name in grid.right else "left",
            overflow="fold",
            no_wrap=name in grid.right,
            min_width=grid._needed(index),
        )
    for row in grid.rows:
        table.add_row(*(Text(cell, style=style) for cell in row))
    return table


def remark(text: str) -> None:
    """One line on stderr."""
    encoding = sys.stderr.encoding or "ascii"
    sys.stderr.write(f"tickwheel: {text}\n".encode(encoding, "replace").decode(encoding))
    sys.stderr.flush()
