"""Output of commands: results on stdout, everything else on stderr.

With ``--json`` a result is one JSON object per line. Without it, tables: drawn by rich on a
terminal, plain aligned columns into a pipe or file. ``NO_COLOR`` is respected (by rich).

A list is complete as JSON, has ROWS_SHOWN rows as a table, or as many as ``--limit``. A table that
stops early says so on stderr, so that nobody takes a part for the whole.

Commands choose their columns and rows; this module formats times, counts, ages, policies and
bodies.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgpack

from tickwheel import environment
from tickwheel.api.kinds import Id, Moment
from tickwheel.api.shapes import Answer
from tickwheel.client.encodings import (
    KEYS_VARIABLE,
    SHOWN_UNPACKED_BYTES_MAX,
    UNPACKED_BYTES_MAX,
    Codec,
    key_of,
)
from tickwheel.errors import Undecodable
from tickwheel.model.policies import UNITS_MS, policy_spec
from tickwheel.model.values import is_utf8

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

T = TypeVar("T")
Map = Mapping[str, Any]

# --- values for people ---------------------------------------------------------------------------

BODY_SHOWN_MAX = 60
"""Maximum characters of a body in a table; JSON has all of it."""


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: ``1h 30m``, ``12.5 s``, ``3 ms``."""
    total_ms = round(abs(seconds) * 1000)
    sign = "-" if seconds < 0 and total_ms else ""
    if total_ms < 1_000:
        return f"{sign}{total_ms} ms"
    if total_ms < 60_000:
        return f"{sign}{total_ms / 1000:.3g} s"
    parts: list[str] = []
    rest_ms = total_ms
    for unit in ("d", "h", "m", "s"):
        count, rest_ms = divmod(rest_ms, UNITS_MS[unit])
        if count or parts:
            parts.append(f"{count}{unit}")
        if len(parts) == 2:
            break
    return sign + " ".join(parts)


def format_count(value: Any) -> str:
    """Format a count as ``12,345``; a dash if unknown."""
    return f"{value:,}" if isinstance(value, int) else "-"


def format_time(at_ms: int | None, precision: str = "milliseconds") -> str:
    """Format a local time to ``precision``, with its offset; a dash for None."""
    if at_ms is None:
        return "-"
    try:
        local = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"
    shown = local.replace(microsecond=at_ms % 1000 * 1000)
    return shown.isoformat(" ", precision)


def ago(at_ms: int | None) -> str:
    """Format the time since ``at_ms`` by this machine's clock; a dash for None."""
    if at_ms is None:
        return "-"
    return format_duration(max(0.0, time.time() - at_ms / 1000))


def trouble_lines(overview: Map, most: int | None = None) -> list[str]:
    """Return lines with the ``most`` worst current troubles, and one that counts the others."""
    lines = [f"{row['level']}: {printable(row['text'])}" for row in overview["troubles"]]
    shown = lines[:most]
    left_out = len(lines) - len(shown) + overview["troubles_left_out"]
    return [*shown, *([f"and {left_out:,} more"] if left_out else [])]


def iso_time(at_ms: int) -> str:
    """Format a time in UTC, as JSON readers expect it; one after the year 9999 in milliseconds."""
    try:
        moment = datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def printable(text: str, length_max: int | None = None) -> str:
    """Return ``text`` on one line, with control characters escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if length_max is not None and len(shown) > length_max:
        return shown[: length_max - 1] + "…"
    return shown


def as_text(value: Any) -> str:
    """Format a value on one line; a dash for None and for an empty text."""
    return "-" if value is None else printable(str(value)) or "-"


def body_text(body: bytes, length_max: int | None = BODY_SHOWN_MAX) -> str:
    """Format a body for people, cut to ``length_max`` characters."""
    try:
        return printable(body.decode("utf-8"), length_max)
    except UnicodeDecodeError:
        return f"({len(body)} bytes that are not text)"


def describe_rule(raw: str | Mapping[str, Any]) -> str:
    """Format a rule for pending keys on one line."""
    if isinstance(raw, str):
        return raw
    parts = [str(raw["action"])]
    for name, value in raw.items():
        if name.endswith("_ms"):
            parts.append(f"{name.removesuffix('_ms')}={format_duration(value / 1000)}")
        elif name != "action":
            parts.append(f"{name}={value}")
    return " ".join(parts)


def format_policy(policy: Mapping[str, Any] | str | None) -> str:
    """Format a policy as a SPEC; a dash for None."""
    return "-" if policy is None else policy_spec(policy)


def short_policy(policy: Mapping[str, Any] | str | None) -> str:
    """Format a policy for a narrow column: its name, or kind and retries; a dash for None."""
    if not isinstance(policy, Mapping) or policy.get("name") or policy.get("kind") == "none":
        return format_policy(policy)
    return f"{policy.get('kind')} x{policy.get('retries')}"


def describe_policy(policy: Mapping[str, Any] | str | None) -> str:
    """Format a policy as a SPEC, followed by the meaning of its name."""
    spec = format_policy(policy)
    if isinstance(policy, str) or policy is None or not policy.get("name"):
        return spec
    meaning = format_policy({key: value for key, value in policy.items() if key != "name"})
    return spec if meaning == spec else f"{spec} ({meaning})"


# --- tables --------------------------------------------------------------------------------------

NAME_WIDTHS = 20, 12
"""Maximum characters of a word in a narrow table. The smaller width is tried before a text column
is left out. Texts are folded at blanks."""
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
    right: Collection[str] = ()
    """The columns of numbers."""
    times: Collection[str] = ()
    """The columns of times, which lose their milliseconds in a narrow table."""
    spare: Sequence[str] = ()
    """The columns to leave out first, in this order."""

    def plain(self) -> str:
        """Return the table as text in aligned columns, separated by two blanks."""
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
        """Return the table that fits ``width`` characters, and the columns left out.

        The steps are: drop milliseconds, drop columns that are empty in every row, fold texts, then
        leave out columns: ``spare`` in its order, counts from the right, and, with texts folded
        still narrower, texts from the right. The first column always stays.
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
        """Return the column in ``kept`` that is needed least."""
        for name in self.spare:
            for i in kept[1:]:
                if self.columns[i] == name:
                    return i
        counts = [i for i in kept[1:] if self.columns[i] in self.right]
        # The second of the texts may still be part of the name, for example a group.
        return counts[-1] if counts else kept[-1]

    def _without_milliseconds(self) -> Grid:
        times = {i for i, name in enumerate(self.columns) if name in self.times}
        rows: list[Sequence[str]] = [
            [_MILLISECONDS.sub(r"\1", cell) if i in times else cell for i, cell in enumerate(row)]
            for row in self.rows
        ]
        return replace(self, rows=rows)

    def widths(self, width: int) -> list[int]:
        """Return the width of each column. Spare room goes to columns from the left."""
        every = range(len(self.columns))
        fold = next((fold for fold in NAME_WIDTHS if self._takes(every, fold) <= width), TEXT_WIDTH)
        sizes = [self._needed(i, fold) for i in every]
        left = width - self._takes(every, fold)
        for i in every:
            more = min(max(left, 0), self._needed(i) - sizes[i])
            sizes[i], left = sizes[i] + more, left - more
        return sizes

    def _takes(self, kept: Iterable[int], fold: int | None = None) -> int:
        # Rich also counts a blank after the last column.
        return sum(self._needed(i, fold) + GAP for i in kept) - GAP + 1

    def _needed(self, column: int, fold: int | None = None) -> int:
        """Return the characters that a column needs, with words folded after ``fold``. Counts are
        never cut. Texts are folded at blanks, and words that are too long anywhere."""
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
    heads: tuple[str, str], facts: Mapping[str, str | int], title: str = "", *, right: bool = False
) -> Grid:
    """Return a table of names and values, with integers as ``12,345``. ``right``: align the values
    to the right."""
    rows: list[Sequence[str]] = [
        (name, f"{value:,}" if isinstance(value, int) else value) for name, value in facts.items()
    ]
    return Grid(heads, title=title, rows=rows, right=heads[1:] if right else ())


def hidden_text(hidden: Sequence[str]) -> str:
    return f"columns left out: {', '.join(hidden)} (--json has all)"


def table_of(grid: Grid, width: int, *, dim: bool = False) -> Table:
    """Convert a grid to a rich table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style = "dim" if dim else ""
    table = Table(
        title=Text(printable(grid.title), "table.title") if grid.title else None,
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
    with suppress(OSError, ValueError):  # full or closed: there is no other place to report it
        sys.stderr.write(f"tickwheel: {text}\n".encode(encoding, "replace").decode(encoding))
        sys.stderr.flush()


# --- streams --------------------------------------------------------------------------------------


class Output:
    """Writes the results and remarks of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def record(self, fields: dict[str, Any]) -> None:
        """Write one result as a line of JSON, without delay."""
        text = json.dumps(fields, ensure_ascii=False, default=str)
        encoding = (sys.stdout.encoding or "").lower().replace("-", "")
        if encoding != "utf8" or not is_utf8(text):  # a path can contain any bytes
            text = json.dumps(fields, default=str)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def line(self, text: str) -> None:
        """Write one line of a result for people, without delay."""
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()

    def result(self, fields: dict[str, Any], *shown: str | Grid) -> None:
        """Write one result: its fields as JSON, or its lines and tables for people."""
        if self.as_json:
            self.record(fields)
            return
        for part in shown:
            if isinstance(part, str):
                self.line(part)
            else:
                self.grid(part)

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
        """Write a remark about the result to stderr."""
        remark(text)


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table: its head, and the function that formats the cell of an item."""

    head: str
    cell: Callable[[T], str]
    right: bool = False
    """Whether the cells are numbers, which are aligned right."""
    is_time: bool = False
    """Whether the cells are times, which lose their milliseconds in a narrow table."""


def column(
    head: str, name: str | None = None, show: Callable[[Any], str] = as_text, *, right: bool = False
) -> Column[Any]:
    """Return a column of the field or attribute ``name`` (default: from the head), formatted by
    ``show``."""
    name = name or head.replace(" ", "_")

    def cell(item: Any) -> str:
        return show(item.get(name) if isinstance(item, Mapping) else getattr(item, name))

    is_number = right or show in (format_count, ago)
    return Column(head, cell, is_number, is_time=show is format_time)


def row_of(columns: Iterable[Column[Any]], item: Any) -> tuple[str, ...]:
    """Return the cells of an item."""
    return tuple(column.cell(item) for column in columns)


def grid_of(
    columns: Sequence[Column[Any]],
    items: Iterable[Any] = (),
    *,
    title: str = "",
    spare: Sequence[str] = (),
) -> Grid:
    """Return a table with a row for each item; ``spare`` is as in ``Grid``."""
    return Grid(
        [column.head for column in columns],
        title,
        [row_of(columns, item) for item in items],
        right={column.head for column in columns if column.right},
        times={column.head for column in columns if column.is_time},
        spare=spare,
    )


# --- lists ---------------------------------------------------------------------------------------

ROWS_SHOWN: Final = 100
"""Default maximum rows of a table."""


def wanted(out: Output, limit: int | None) -> int | None:
    """Return the maximum rows to show; None: all."""
    return limit if limit is not None or out.as_json else ROWS_SHOWN


def cut(out: Output, limit: int | None, rows: Iterable[T]) -> Iterator[T]:
    """Yield the rows to show, and remark if there are more."""
    rows_max = wanted(out, limit)
    for count, row in enumerate(rows):
        if rows_max is not None and count >= rows_max:
            if not out.as_json:
                _remark_stop(out, rows_max)
            return
        yield row


def _remark_stop(out: Output, rows_max: int) -> None:
    out.remark(f"only the first {rows_max:,} rows are shown: --limit N shows N, --json all")


class Listing:
    """Items of one kind: each is written at once as JSON, or is a row of a table, which is shown at
    the end."""

    def __init__(
        self,
        out: Output,
        columns: Sequence[Column[Any]],
        fields: Callable[[Any], dict[str, Any]],
        nothing: str | None = None,
        spare: Sequence[str] = (),
    ) -> None:
        """``fields`` returns an item for JSON. ``nothing`` is a remark instead of an empty table;
        "" shows neither. ``spare`` is as in ``Grid``."""
        self.out = out
        self.count = 0
        self._columns, self._fields, self._nothing = columns, fields, nothing
        self._grid = grid_of(columns, spare=spare)

    def add(self, item: Any) -> None:
        self.count += 1
        if self.out.as_json:
            self.out.record(self._fields(item))
        else:
            self._grid.rows.append(row_of(self._columns, item))

    def show(self, items: Iterable[Any]) -> int:
        """Show all items. Return their number."""
        for item in items:
            self.add(item)
        return self._end()

    async def ask(self, limit: int | None, ask: Callable[[int | None], AsyncIterator[Any]]) -> None:
        """Show the items that ``ask(count)`` yields, up to the limit."""
        rows_max = wanted(self.out, limit)
        # A table asks for one more than it shows, to know if it stops.
        async for item in ask(rows_max and rows_max + (not self.out.as_json)):
            if rows_max is not None and self.count >= rows_max:
                _remark_stop(self.out, rows_max)
                break
            self.add(item)
        self._end()

    def _end(self) -> int:
        if self.out.as_json:
            return self.count
        if self.count or self._nothing is None:
            self.out.grid(self._grid)
        elif self._nothing:
            self.out.remark(self._nothing)
        return self.count


# --- JSON ----------------------------------------------------------------------------------------


def body_fields(body: bytes) -> dict[str, Any]:
    """Return ``{"body": text}`` for UTF-8, else ``{"body_base64": …}``; bulk input reads both."""
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def fields_of(answer: Answer) -> dict[str, Any]:
    """Return the fields of an answer, and of answers in its lists, for ``--json``. Ids are text,
    because some readers store numbers as doubles; times (``…_ms``) are there also as text."""
    fields = dict(answer.raw)
    for shape in answer.fields():
        value = getattr(answer, shape.name) if fields.get(shape.name) is not None else None
        if isinstance(shape.kind, Id) and value is not None:
            fields[shape.name] = str(value)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Answer):
            fields[shape.name] = [fields_of(item) for item in value]
    return fields | {name: iso_time(at_ms) for name, at_ms in _moments(answer)}


def time_facts(answer: Answer) -> dict[str, str]:
    """Return the known times of an answer by name, for a table."""
    return {name: format_time(at_ms) for name, at_ms in _moments(answer)}


def _moments(answer: Answer) -> Iterator[tuple[str, int]]:
    for shape in answer.fields():
        if isinstance(shape.kind, Moment) and answer.raw.get(shape.name) is not None:
            yield shape.name.removesuffix("_ms"), answer.raw[shape.name]


# --- progress ------------------------------------------------------------------------------------


def progress_bars(*columns: str) -> Progress:
    """Return progress bars on stderr; a column is a text about a bar, or the name of a rich
    column."""
    from rich import progress
    from rich.console import Console

    parts = [progress.TextColumn(c) if "{" in c else getattr(progress, c)() for c in columns]
    return progress.Progress(*parts, console=Console(stderr=True))


@contextmanager
def progress_bar(*columns: str, total: int | None, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show a bar if stderr is a terminal. Yields a function that updates its fields."""
    if not sys.stderr.isatty():
        yield lambda **changed: None
        return
    with progress_bars(*columns) as progress:
        bar = progress.add_task("", total=total, **fields)
        yield lambda **changed: progress.update(bar, **changed)


# --- tables of counts ----------------------------------------------------------------------------

STATES = ("scheduled", "ready", "in_flight", "waiting", "dead")
"""Counts of the current state; a group has no scheduled tasks."""
GROUP_STATES = STATES[1:]
TOTALS = ("enqueued", "delivered", "acked")
"""Counts of past events."""


def head(name: str) -> str:
    """Return the name of a count for people."""
    return name.replace("_", " ")


def text_columns(*names: str) -> list[Column[Any]]:
    """Return columns of texts with these field names."""
    return [column(head(name), name) for name in names]


def count_columns(*names: str) -> list[Column[Any]]:
    """Return columns of counts with these field names."""
    return [column(head(name), name, format_count) for name in names]


def age(elapsed_ms: Any) -> str:
    """Format the time that a task has waited, or that a group is unused; a dash for None or 0."""
    return format_duration(elapsed_ms / 1000) if isinstance(elapsed_ms, int) and elapsed_ms else "-"


OLDEST = Column[Map]("oldest", lambda row: age(row.get("oldest_ready_ms")), right=True)


# --- stored bodies, unpacked if this process has the keys ----------------------------------------


@lru_cache(2)
def _codec(keys_file: str | None, bytes_max: int) -> Codec:
    """Return a codec with the keys of the process's file of keys."""
    return Codec(keys_file=keys_file, unpacked_bytes_max=bytes_max)


def unpacked(
    topic: str, body: bytes, encoding: str | None, *, whole: bool = False
) -> tuple[bytes, str | None, str]:
    """Return a body unpacked as far as possible, its remaining encoding, and why it is not unpacked
    further. ``whole``: the body is processed, not only shown, so the larger limit applies."""
    if encoding is None:
        return body, None, ""
    try:
        codec = _codec(
            environment.value(KEYS_VARIABLE),
            UNPACKED_BYTES_MAX if whole else SHOWN_UNPACKED_BYTES_MAX,
        )
        return *codec.unpacked(topic, body, encoding), ""
    except Undecodable as error:
        key = key_of(encoding)
        why = error.message if key is None else f"encrypted with key {key}"
        return body, encoding, why


def stored_text(
    topic: str,
    body: bytes,
    encoding: str | None,
    length_max: int | None = BODY_SHOWN_MAX,
    *,
    whole: bool = False,
) -> str:
    """Return ``body_text`` of a stored body, unpacked; or why it cannot be unpacked."""
    body, encoding, why = unpacked(topic, body, encoding, whole=whole)
    if why:
        return printable(f"({len(body)} bytes: {why})")
    if encoding is not None and encoding.partition(";")[0] == "msgpack":
        with suppress(ValueError, RecursionError, msgpack.exceptions.UnpackException):
            return printable(json.dumps(msgpack.unpackb(body), default=str), length_max)
    return body_text(body, length_max)


def stored_fields(
    topic: str, body: bytes, encoding: str | None, *, whole: bool = False
) -> dict[str, Any]:
    """Return ``body_fields`` of a stored body, unpacked if possible, with its ``encoding``, and
    with ``stored_encoding`` if that differs."""
    body, now, _ = unpacked(topic, body, encoding, whole=whole)
    fields = body_fields(body) | {"encoding": now}
    return fields if now == encoding else fields | {"stored_encoding": encoding}
