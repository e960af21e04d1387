"""How ``tickwheel top`` draws a frame: full screen on a terminal, plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from tickwheel.cli.counts import age, count
from tickwheel.cli.output import Grid, Output
from tickwheel.cli.top_frame import Frame, Row
from tickwheel.cli.values import format_duration, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADS = (
    "topic", "group", "pending", "ready", "in flight", "retrying", "dead", "oldest", "in/s",
    "out/s", "acked/s", "",
)  # fmt: skip
CHROME_LINES = 7
"""Of the screen, beside the rows."""


def head_lines(frame: Frame) -> list[str]:
    """The daemon as a whole."""
    late, counts = frame.lateness, frame.counts
    store = "ok" if frame.store_ok else "NOT OK"
    lateness = " / ".join(f"{late.get(name) or 0:g}" for name in ("p50_ms", "p99_ms"))
    return [
        f"{printable(frame.node)}  {frame.role}  up {format_duration(frame.uptime_s)}"
        f"  epoch {frame.epoch}  store {store}"
        f"  connections {frame.connections}  subscribers {frame.subscribers}",
        f"pending {count(counts.get('pending'))}  ready {count(counts.get('ready'))}"
        f"  in flight {count(counts.get('in_flight'))}"
        f"  retrying {count(counts.get('waiting'))}  dead {count(counts.get('dead'))}"
        f"  oldest {age(frame.oldest_ms)}",
        f"in {_rate(frame.rates.get('enqueued'))}/s  out {_rate(frame.rates.get('delivered'))}/s"
        f"  acked {_rate(frame.rates.get('acked'))}/s"
        f"  late p50 / p99 {lateness} ms  early {frame.early}",
    ]


def rows_grid(frame: Frame, rows_max: int | None = None) -> Grid:
    """Topics and their groups; the last line says how many did not fit."""
    grid = Grid(HEADS, right=frozenset(HEADS[2:-1]))
    rows = list(_rows(frame))
    shown = rows if rows_max is None or len(rows) <= rows_max else rows[: max(rows_max - 1, 1)]
    grid.rows.extend(shown)
    if len(shown) < len(rows):
        grid.rows.append((f"… {len(rows) - len(shown)} more", *[""] * (len(HEADS) - 1)))
    return grid


def plain(frame: Frame) -> str:
    """A frame as text."""
    trouble = [frame.trouble] if frame.trouble else []
    return "\n".join([*trouble, *head_lines(frame), "", rows_grid(frame).plain()])


def _rows(frame: Frame) -> Iterator[tuple[str, ...]]:
    for topic, groups in frame.topics:
        yield _cells(topic, topic.topic)
        for group in groups:
            yield _cells(group, "")


def _cells(row: Row, topic: str) -> tuple[str, ...]:
    return (
        topic,
        row.group or "",
        "" if row.pending is None else count(row.pending),
        count(row.ready),
        count(row.in_flight),
        count(row.waiting),
        count(row.dead),
        age(row.oldest_ms),
        "" if row.group is not None else _rate(row.enqueued_per_s),
        _rate(row.delivered_per_s),
        _rate(row.acked_per_s),
        "paused" if row.paused else "",
    )


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


class View:
    """``show`` frames one after the other."""

    def __init__(self, out: Output, *, live: bool = True) -> None:
        from rich.console import Console
        from rich.live import Live

        self._out = out
        self._console = Console()
        drawn = live and self._console.is_terminal and not out.as_json
        self._live = Live(console=self._console, screen=True, auto_refresh=False) if drawn else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, frame: Frame) -> None:
        if self._out.as_json:
            self._out.record(frame.fields())
        elif self._live is None:
            self._out.line(plain(frame))
        else:
            self._live.update(self._drawn(frame), refresh=True)

    def _drawn(self, frame: Frame) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from tickwheel.cli.output import table_of

        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in head_lines(frame)]
        trouble = Text(frame.trouble or " ", style="bold red", no_wrap=True, overflow="ellipsis")
        grid = rows_grid(frame, max(self._console.height - CHROME_LINES, 1))
        return Group(trouble, *lines, table_of(grid, dim=bool(frame.trouble)))
