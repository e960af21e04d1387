"""``tickwheel demo``: the main job in under a minute, with a kill in the middle.

A daemon on an embedded store, a producer, consumers that ack, a few tasks that fail twice.
Half way the daemon is killed with SIGKILL and started again. The clients' own books say at
the end whether anything was lost or early; the exit code says so too.
"""

from __future__ import annotations

import asyncio
import json as json_
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tickwheel.client import Client
from tickwheel.demo.daemon import DemoDaemon
from tickwheel.demo.load import CONSUMERS, Books, consume, percentile, produce
from tickwheel.demo.view import Picture, View
from tickwheel.errors import TickwheelError

FINISH_TIMEOUT_S = 45.0
REFRESH_S = 0.125
SEED = 7355
DOWN_S = 0.5
"""How long the daemon stays dead: long enough that tasks come due meanwhile."""
RECENT_S = 2.0


class Demo:
    """One run."""

    def __init__(self, seconds: float, tasks: int, view: View, folder: Path) -> None:
        self._seconds = seconds
        self._tasks = tasks
        self._view = view
        self._daemon = DemoDaemon(folder)
        self._books = Books()
        self._picture = Picture()
        self._outage_ms = (0, 0)
        self._recovered_s = 0.0
        self._recent: list[tuple[float, int]] = []

    async def run(self) -> dict[str, Any]:
        """The summary. Raises RuntimeError when the daemon does not start."""
        await self._daemon.start()
        self._began = time.monotonic()
        try:
            async with (
                Client(self._daemon.url, send_timeout=10.0) as producer,
                Client(self._daemon.url) as consumer,
                Client(self._daemon.url) as observer,
            ):
                watching = asyncio.create_task(self._watch(observer))
                consuming = [
                    asyncio.create_task(consume(consumer, self._books)) for _ in range(CONSUMERS)
                ]
                killing = asyncio.create_task(self._kill_half_way())
                try:
                    self._picture.phase = "producing"
                    await produce(producer, self._books, self._tasks, self._seconds, SEED)
                    await killing
                    self._picture.phase = "waiting for the last ones"
                    await self._finish(consuming)
                finally:
                    for task in (watching, killing, *consuming):
                        task.cancel()
                    await asyncio.gather(watching, killing, *consuming, return_exceptions=True)
        finally:
            await self._daemon.stop()
        return self._summary()

    async def _kill_half_way(self) -> None:
        await asyncio.sleep(self._seconds / 2)
        down_ms = time.time_ns() // 1_000_000
        self._view.tell(f"kill -9 {self._daemon.pid}")
        self._daemon.kill()
        self._picture.phase = "the daemon is dead"
        await asyncio.sleep(DOWN_S)
        self._recovered_s = await self._daemon.start()
        self._outage_ms = (down_ms, time.time_ns() // 1_000_000 + int(RECENT_S * 1000))
        self._view.tell(f"started again; it serves after {self._recovered_s:.2f} s")
        self._picture.phase = "producing"

    async def _finish(self, consuming: list[asyncio.Task[None]]) -> None:
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while self._books.lost and time.monotonic() < deadline:
            for task in consuming:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def _watch(self, observer: Client) -> None:
        while True:
            try:
                stats = await observer.stats()
            except TickwheelError:
                stats = None
            self._update(stats.raw if stats is not None else None)
            self._view.show(self._picture)
            await asyncio.sleep(REFRESH_S)

    def _update(self, stats: Mapping[str, Any] | None) -> None:
        picture, books, now_s = self._picture, self._books, time.monotonic()
        picture.elapsed_s = now_s - self._began
        picture.enqueued, picture.acked = len(books.due_ms), len(books.acked)
        picture.early = books.early
        self._recent.append((now_s, sum(books.deliveries.values())))
        while self._recent[0][0] < now_s - RECENT_S:
            self._recent.pop(0)
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        picture.delivered_per_s = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        recent = books.late_ms[-2000:]
        picture.p50_ms, picture.p99_ms = percentile(recent, 0.50), percentile(recent, 0.99)
        if stats is not None:
            for name in ("slot", "slots", "pending", "in_flight", "waiting"):
                setattr(picture, name, stats[name])

    def _summary(self) -> dict[str, Any]:
        books, (down_ms, up_ms) = self._books, self._outage_ms
        pairs = zip(books.due_of_late, books.late_ms, strict=True)
        steady = [late for due, late in pairs if not down_ms - 50 <= due <= up_ms]
        return {
            "enqueued": len(books.due_ms),
            "acked": len(books.acked),
            "lost": books.lost,
            "early": books.early,
            "duplicates": books.duplicates,
            "failed_twice": books.nacked // 2,
            "refused": books.refused,
            "kills": 1,
            "restart_s": round(self._recovered_s, 3),
            "lateness_p50_ms": percentile(steady, 0.50),
            "lateness_p99_ms": percentile(steady, 0.99),
            "lateness_max_ms": max(books.late_ms, default=0),
            "seconds": round(time.monotonic() - self._began, 1),
        }


def run_demo(
    seconds: float = 20.0, tasks: int = 20_000, plain: bool = False, json: bool = False
) -> int:
    """Show it. 0 when nothing was lost or early, 1 otherwise."""
    console = Console(stderr=json)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tickwheel-demo-") as folder,
            View(console, plain=plain) as view,
        ):
            summary = asyncio.run(Demo(seconds, tasks, view, Path(folder)).run())
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    if json:
        print(json_.dumps(summary))
    else:
        console.print(_table(summary))
    fine = summary["enqueued"] == tasks == summary["acked"]
    return 0 if fine and not summary["lost"] and not summary["early"] else 1


def _table(summary: dict[str, Any]) -> Table:
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
