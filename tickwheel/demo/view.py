"""What the demonstration shows: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

RING_CELLS = 60
RING_WIDTH, RING_HEIGHT = 37, 15


@dataclass
class Picture:
    """One moment of the demonstration."""

    elapsed_s: float = 0.0
    phase: str = "starting"
    slot: int = 0
    slots: int = 3600
    pending: int = 0
    in_flight: int = 0
    waiting: int = 0
    enqueued: int = 0
    acked: int = 0
    delivered_per_s: float = 0.0
    p50_ms: int = 0
    p99_ms: int = 0
    early: int = 0


def ring(slot: int, slots: int) -> Text:
    """The wheel as a circle; the hand stands at the slot whose turn it is."""
    grid = [[" "] * RING_WIDTH for _ in range(RING_HEIGHT)]
    current = slot * RING_CELLS // slots
    for cell in range(RING_CELLS):
        angle = 2 * math.pi * cell / RING_CELLS - math.pi / 2
        column = round((RING_WIDTH - 1) / 2 * (1 + math.cos(angle)))
        row = round((RING_HEIGHT - 1) / 2 * (1 + math.sin(angle)))
        grid[row][column] = "●" if cell == current else "·"
    label = f"slot {slot} of {slots}"
    start = (RING_WIDTH - len(label)) // 2
    grid[RING_HEIGHT // 2][start : start + len(label)] = label
    text = Text("\n".join("".join(line) for line in grid), style="cyan")
    text.highlight_regex("●", "bold yellow")
    text.highlight_regex(r"slot \d+ of \d+", "bold white")
    return text


def figures(picture: Picture) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("enqueued and confirmed", f"{picture.enqueued:,}"),
        ("acked and confirmed", f"{picture.acked:,}"),
        ("pending on the wheel", f"{picture.pending:,}"),
        ("in flight", f"{picture.in_flight:,}"),
        ("waiting for a retry", f"{picture.waiting:,}"),
        ("delivered a second", f"{picture.delivered_per_s:,.0f}"),
        ("lateness p50 / p99", f"{picture.p50_ms} / {picture.p99_ms} ms"),
        ("early", f"{picture.early}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def render(picture: Picture) -> RenderableType:
    body = Table.grid(padding=(0, 4))
    body.add_row(ring(picture.slot, picture.slots), figures(picture))
    title = f"Tickwheel  {picture.elapsed_s:4.1f} s  {picture.phase}"
    return Panel(Group(body), title=title, border_style="cyan", expand=False)


class View:
    """``show`` a picture now and then; ``report`` what happened."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._plain = plain or not console.is_terminal
        self._live = None if self._plain else Live(console=console, refresh_per_second=8)
        self._shown_s = -1.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, picture: Picture) -> None:
        if self._live is not None:
            self._live.update(render(picture))
        elif picture.elapsed_s - self._shown_s >= 1.0:
            self._shown_s = picture.elapsed_s
            self._console.print(
                f"{picture.elapsed_s:5.1f} s  slot {picture.slot:4d}"
                f"  enqueued {picture.enqueued:6d}"
                f"  acked {picture.acked:6d}  pending {picture.pending:6d}"
                f"  in flight {picture.in_flight:4d}  {picture.delivered_per_s:6.0f}/s"
                f"  late p50 {picture.p50_ms} ms p99 {picture.p99_ms} ms  {picture.phase}",
                highlight=False,
                soft_wrap=True,
            )

    def report(self, text: str) -> None:
        self._console.print(f"[bold]{text}[/bold]", highlight=False)


def summary_table(summary: dict[str, Any]) -> Table:
    """The table at the end of the demonstration."""
    table = Table(title="What the clients' own books say", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("enqueued and confirmed", f"{summary['enqueued']:,}")
    table.add_row("acked and confirmed", f"{summary['acked']:,}")
    table.add_row("[bold]lost[/bold]", f"[bold]{summary['lost']}[/bold]")
    table.add_row("[bold]early[/bold]", f"[bold]{summary['early']}[/bold]")
    table.add_row("delivered more than once, unasked", f"{summary['duplicates']}")
    table.add_row("failed twice, then done", f"{summary['failed_twice']}")
    table.add_row("killed with SIGKILL", f"{summary['kills']} time")
    table.add_row("start after the kill", f"{summary['restart_s']:.2f} s")
    p50_ms, p99_ms = summary["lateness_p50_ms"], summary["lateness_p99_ms"]
    table.add_row("lateness p50 / p99 while it ran", f"{p50_ms} / {p99_ms} ms")
    table.add_row("lateness at most, the outage included", f"{summary['lateness_max_ms']:,} ms")
    return table
