"""Where results and remarks go: results on stdout, everything else on stderr.

With ``--json`` a result is one JSON object a line. Without it, tables: drawn by rich on a
terminal, plain aligned columns into a pipe or file. ``NO_COLOR`` is obeyed (by rich).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


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

        Console().print(table_of(grid))

    def remark(self, text: str) -> None:
        """Something beside the result, on stderr."""
        remark(text)


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
    for name in grid.columns:
        table.add_column(
            name,
            justify="right" if name in grid.right else "left",
            overflow="fold",
            no_wrap=name in grid.right,
        )
    for row in grid.rows:
        table.add_row(*(Text(cell, style=style) for cell in row))
    return table


def remark(text: str) -> None:
    """One line on stderr."""
    encoding = sys.stderr.encoding or "ascii"
    sys.stderr.write(f"tickwheel: {text}\n".encode(encoding, "replace").decode(encoding))
    sys.stderr.flush()
