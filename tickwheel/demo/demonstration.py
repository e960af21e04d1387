"""``tickwheel demo`` and ``tickwheel bench``.

The demonstration runs for less than a minute. It starts a daemon with a SQLite store or the given
one, a producer, and consumers that ack; a few tasks fail twice. Halfway through, the daemon is
killed with SIGKILL and restarted. The clients record confirmed tasks, deliveries and confirmed
acks. At the end the records and the exit code show whether a task was lost or early. With an inbox,
an application also writes tasks in its own transactions.

``tickwheel bench`` measures one daemon with producers and consumers, within bounds. Each run has a
separate topic and consumes everything that it enqueues. The results include the work of this
process, which is often slower than the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json as json_
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tickwheel import environment
from tickwheel.api.frames import AckWord
from tickwheel.client import Client, Delivery, Receipt, Task, status_at
from tickwheel.errors import NotFound, TickwheelError

# --- display: live on a terminal, otherwise plain lines ------------------------------------------


RING_CELLS = 60
RING_WIDTH, RING_HEIGHT = 37, 15


@dataclass
class Picture:
    """The displayed state of the demonstration."""

    elapsed_s: float = 0.0
    phase: str = "starting"
    slot: int = 0
    slots: int = 3600
    scheduled: int = 0
    in_flight: int = 0
    waiting: int = 0
    enqueued: int = 0
    acked: int = 0
    delivered_per_s: float = 0.0
    p50_ms: int = 0
    p99_ms: int = 0
    early: int = 0


def ring(slot: int, slots: int) -> Text:
    """Draw the wheel as a circle with a mark at the current slot."""
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
        ("scheduled on the wheel", f"{picture.scheduled:,}"),
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
    """Shows the state repeatedly and reports events."""

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
                f"  acked {picture.acked:6d}  scheduled {picture.scheduled:6d}"
                f"  in flight {picture.in_flight:4d}  {picture.delivered_per_s:6.0f}/s"
                f"  late p50 {picture.p50_ms} ms p99 {picture.p99_ms} ms  {picture.phase}",
                highlight=False,
                soft_wrap=True,
            )

    def report(self, text: str) -> None:
        self._console.print(f"[bold]{text}[/bold]", highlight=False)


def summary_table(summary: dict[str, Any]) -> Table:
    """Return the table at the end of the demonstration."""
    table = Table(title="What the clients recorded", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("enqueued and confirmed", f"{summary['enqueued']:,}")
    table.add_row("acked and confirmed", f"{summary['acked']:,}")
    table.add_row("[bold]lost[/bold]", f"[bold]{summary['lost']}[/bold]")
    table.add_row("[bold]early[/bold]", f"[bold]{summary['early']}[/bold]")
    table.add_row("delivered again without a nack", f"{summary['duplicates']}")
    table.add_row("failed twice, then done", f"{summary['failed_twice']}")
    table.add_row("killed with SIGKILL", f"{summary['kills']} time")
    table.add_row("start after the kill", f"{summary['restart_s']:.2f} s")
    p50_ms, p99_ms = summary["lateness_p50_ms"], summary["lateness_p99_ms"]
    table.add_row("lateness p50 / p99 while it ran", f"{p50_ms} / {p99_ms} ms")
    table.add_row("maximum lateness, outage included", f"{summary['lateness_max_ms']:,} ms")
    if "committed" in summary:
        committed = f"{summary['committed_delivered']} of {summary['committed']}"
        rolled_back = f"{summary['rolled_back_delivered']} of {summary['rolled_back']}"
        table.add_row("delivered: tasks of committed transactions", committed)
        table.add_row("delivered: tasks of rolled back transactions", rolled_back)
    return table


# --- the load of `tickwheel bench` ---------------------------------------------------------------


BENCH_GROUP = "bench"
UNANSWERED_MAX = 512
"""Maximum unanswered enqueues if each task is enqueued by a separate call."""
BATCH_TASKS = 1_000
PREFETCH = 2_048
LEAD_S = 1.0
"""Seconds between the enqueue and the due time of a task in the lateness run."""


@dataclass
class Result:
    """The results of one run."""

    tasks: int = 0
    enqueue_single_per_s: float = 0.0
    enqueue_batched_per_s: float = 0.0
    delivery_per_s: float = 0.0
    early: int = 0
    late_ms: list[int] = field(default_factory=list)


class Bench:
    """One measurement of a daemon."""

    def __init__(self, client: Client, topic: str, body_bytes: int) -> None:
        self._client = client
        self._topic = topic
        self._body = b"x" * body_bytes
        self.result = Result()

    async def enqueue_single(self, count: int) -> None:
        """Enqueue each task by a separate call. Many calls run concurrently, and the client can
        merge them."""
        began = time.monotonic()
        waiting: deque[asyncio.Future[Receipt]] = deque()
        for _ in range(count):
            if len(waiting) >= UNANSWERED_MAX:
                await waiting.popleft()
            waiting.append(self._client.enqueue_nowait(self._topic, self._body, delay=0))
        await asyncio.gather(*waiting)
        self.result.enqueue_single_per_s = _rate(count, began)
        self.result.tasks += count

    async def enqueue_batched(self, count: int) -> None:
        """Enqueue tasks in lists."""
        began = time.monotonic()
        for start in range(0, count, BATCH_TASKS):
            size = min(BATCH_TASKS, count - start)
            await self._client.enqueue_many(
                [Task(self._topic, self._body, delay=0) for _ in range(size)]
            )
        self.result.enqueue_batched_per_s = _rate(count, began)
        self.result.tasks += count

    async def deliver(self, count: int) -> None:
        """Consume and ack due tasks until the last ack is durable."""
        began = time.monotonic()
        await self._consume(count, lambda delivery: None)
        self.result.delivery_per_s = _rate(count, began)

    async def lateness(self, per_s: int, seconds: float) -> None:
        """Enqueue tasks at a constant rate, each due ``LEAD_S`` later, while they are consumed."""
        count = int(per_s * seconds)
        consuming = asyncio.create_task(self._consume(count, self._note))
        began = time.monotonic()
        first_ms = time.time_ns() // 1_000_000 + int(LEAD_S * 1000)
        waiting: set[asyncio.Future[Receipt]] = set()
        try:
            for number in range(count):
                ahead_s = began + number / per_s - time.monotonic()
                if ahead_s > 0.002:
                    await asyncio.sleep(ahead_s)
                elapsed_ms = time.time_ns() // 1_000_000 - first_ms + int(LEAD_S * 1000)
                offset_ms = number * 1000 / per_s - elapsed_ms
                delay_s = max(0.0, LEAD_S + offset_ms / 1000)
                future = self._client.enqueue_nowait(self._topic, self._body, delay=delay_s)
                waiting.add(future)
                future.add_done_callback(waiting.discard)
                if len(waiting) >= UNANSWERED_MAX * 4:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*waiting)
            await consuming
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        self.result.tasks += count

    async def clear(self) -> None:
        """Delete the group, with the tasks that remain after a failed run."""
        with contextlib.suppress(NotFound):
            await self._client.delete_group(self._topic, BENCH_GROUP, force=True)

    def _note(self, delivery: Delivery) -> None:
        late_ms = delivery.delivered_ms - delivery.due_ms
        self.result.early += late_ms < 0
        self.result.late_ms.append(late_ms)

    async def _consume(self, count: int, note: Callable[[Delivery], None]) -> None:
        acks: set[asyncio.Future[AckWord]] = set()
        stream = self._client.subscribe(self._topic, group=BENCH_GROUP, prefetch=PREFETCH)
        async with stream as deliveries:
            async for delivery in _first(deliveries, count):
                note(delivery)
                ack = delivery.ack_nowait()
                acks.add(ack)
                ack.add_done_callback(acks.discard)
            errors = [
                result
                for result in await asyncio.gather(*acks, return_exceptions=True)
                if isinstance(result, TickwheelError)
            ]
        if errors:
            raise errors[0]


async def _first(deliveries: AsyncIterator[Delivery], count: int) -> AsyncIterator[Delivery]:
    """Yield deliveries until ``count`` different tasks were delivered."""
    ids: set[int] = set()
    while len(ids) < count:
        delivery = await anext(deliveries)
        ids.add(delivery.id)
        yield delivery


def _rate(count: int, began: float) -> float:
    return count / max(time.monotonic() - began, 0.000_001)


def percentile(values: list[int], share: float) -> int:
    """Return the percentile by nearest rank, or 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


# --- the demonstration ---------------------------------------------------------------------------


TOPIC = "demo.orders"
GROUP = "billing"
CONSOLE_NEEDS = ("msgspec", "offapi")
"""Modules of the extra ``http`` that the console needs."""
FAILS_TWICE_EVERY = 500
CONSUMERS = 2
START_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 45.0
REFRESH_S = 0.125
SEED = 7355
DOWN_S = 0.5
"""Seconds that the daemon stays dead, so that tasks come due while it is."""
RECENT_S = 2.0


class Demo:
    """A run of the demonstration."""

    def __init__(self, seconds: float, tasks: int, view: View, daemon: DemoDaemon) -> None:
        self._seconds = seconds
        self._tasks = tasks
        self._view = view
        self._daemon = daemon
        self._application = None if daemon.inbox is None else Application(daemon.inbox)
        self._records = Records()
        self._picture = Picture()
        self._outage_ms = (0, 0)
        self._recovered_s = 0.0
        self._recent: list[tuple[float, int]] = []

    async def run(self) -> dict[str, Any]:
        """Run the demonstration and return its summary. Raise RuntimeError if the daemon does not
        start, or the store or the inbox is in use."""
        application = self._application
        try:
            if application is not None:
                await application.connect()
            await self._daemon.start()
            if self._daemon.console is not None:
                self._view.report(f"the console, for a browser: {self._daemon.console}")
            self._began = time.monotonic()
            async with (
                Client(self._daemon.url, send_timeout=START_TIMEOUT_S) as producer,
                Client(self._daemon.url) as consumer,
                Client(self._daemon.url) as observer,
            ):
                await self._check_store(observer)
                watching = asyncio.create_task(self._watch(observer))
                consuming = [
                    asyncio.create_task(consume(consumer, self._records)) for _ in range(CONSUMERS)
                ]
                side_tasks = [asyncio.create_task(self._kill_half_way())]
                if application is not None:
                    self._view.report(
                        "an application commits tasks with orders, or rolls both back"
                    )
                    consuming.append(asyncio.create_task(application.consume(consumer)))
                    side_tasks.append(asyncio.create_task(application.write(self._seconds)))
                try:
                    self._picture.phase = "producing"
                    await produce(producer, self._records, self._tasks, self._seconds, SEED)
                    await asyncio.gather(*side_tasks)
                    self._picture.phase = "waiting for the last tasks"
                    await self._finish(consuming, observer)
                finally:
                    tasks = (watching, *side_tasks, *consuming)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._daemon.stop()
            if application is not None:
                await application.close()
        return self._summary()

    async def _check_store(self, observer: Client) -> None:
        """Raise RuntimeError if another daemon serves the store, or it has unfinished tasks."""
        if not (await status_at(self._daemon.url)).serves:
            raise RuntimeError("another daemon serves this store")
        stats = await observer.stats()
        unfinished = stats.scheduled + stats.ready + stats.in_flight + stats.waiting
        if unfinished:
            raise RuntimeError(f"the store must be empty; its unfinished tasks: {unfinished:,}")

    async def _kill_half_way(self) -> None:
        await asyncio.sleep(self._seconds / 2)
        down_ms = time.time_ns() // 1_000_000
        self._view.report(f"kill -9 {self._daemon.pid}")
        self._daemon.kill()
        self._picture.phase = "the daemon is dead"
        await asyncio.sleep(DOWN_S)
        self._recovered_s = await self._daemon.start()
        self._outage_ms = (down_ms, time.time_ns() // 1_000_000 + int(RECENT_S * 1000))
        self._view.report(f"started again; it serves after {self._recovered_s:.2f} s")
        self._picture.phase = "producing"

    async def _finish(self, consuming: list[asyncio.Task[None]], observer: Client) -> None:
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while not self._is_finished() and time.monotonic() < deadline:
            for task in consuming:
                if task.done():
                    task.result()
            await look_up_unanswered(observer, self._records)
            await asyncio.sleep(0.05)

    def _is_finished(self) -> bool:
        application = self._application
        return not self._records.unacked and (application is None or application.is_finished)

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
        picture, records, now_s = self._picture, self._records, time.monotonic()
        picture.elapsed_s = now_s - self._began
        picture.enqueued, picture.acked = len(records.due_ms), len(records.acked)
        picture.early = records.early
        self._recent.append((now_s, sum(records.deliveries.values())))
        while self._recent[0][0] < now_s - RECENT_S:
            self._recent.pop(0)
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        picture.delivered_per_s = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        recent = records.late_ms[-2000:]
        picture.p50_ms, picture.p99_ms = percentile(recent, 0.50), percentile(recent, 0.99)
        if stats is not None:
            for name in ("slot", "slots", "scheduled", "in_flight", "waiting"):
                setattr(picture, name, stats[name])

    def _summary(self) -> dict[str, Any]:
        records, (down_ms, up_ms) = self._records, self._outage_ms
        pairs = zip(records.due_of_late, records.late_ms, strict=True)
        steady = [late for due, late in pairs if not down_ms - 50 <= due <= up_ms]
        return {
            "enqueued": len(records.due_ms),
            "acked": len(records.acked),
            "lost": records.unacked,
            "early": records.early,
            "duplicates": records.duplicates,
            "failed_twice": records.nacked // 2,
            "refused": records.refused,
            "kills": 1,
            "restart_s": round(self._recovered_s, 3),
            "lateness_p50_ms": percentile(steady, 0.50),
            "lateness_p99_ms": percentile(steady, 0.99),
            "lateness_max_ms": max(records.late_ms, default=0),
            "seconds": round(time.monotonic() - self._began, 1),
            **(self._application.summary() if self._application is not None else {}),
        }


def run_demo(
    seconds: float = 20.0,
    tasks: int = 20_000,
    store: str | None = None,
    inbox: str | None = None,
    plain: bool = False,
    json: bool = False,
) -> int:
    """Run the demonstration. Return 0 if no task was lost or early, and the delivered tasks of
    transactions are those of the committed ones; otherwise 1."""
    console = Console(stderr=json)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tickwheel-demo-") as folder,
            View(console, plain=plain) as view,
        ):
            daemon = DemoDaemon(Path(folder), store, inbox)
            summary = asyncio.run(Demo(seconds, tasks, view, daemon).run())
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if json:
        print(json_.dumps(summary))
    else:
        console.print(summary_table(summary))
    faults = (
        summary["lost"],
        summary["early"],
        tasks - summary["enqueued"],
        tasks - summary["acked"],
        summary.get("committed", 0) - summary.get("committed_delivered", 0),
        summary.get("rolled_back_delivered", 0),
    )
    return 1 if any(faults) else 0


# --- the daemon --------------------------------------------------------------------------------


class DemoDaemon:
    """A daemon process that can be killed and started again on the same port."""

    def __init__(self, folder: Path, store: str | None, inbox: str | None) -> None:
        self.folder = folder
        self._store = store or f"sqlite:///{folder / 'demo.db'}"
        self.inbox = inbox
        self.port = 0
        self.http: str | None = None
        """URL of the daemon's HTTP API; None before the first start."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def console(self) -> str | None:
        """The URL of the console, or None if its extra is not installed."""
        is_installed = all(map(find_spec, CONSOLE_NEEDS))
        return f"{self.http}/console/" if is_installed and self.http is not None else None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> float:
        """Start the daemon and return the seconds until it serves. Raise RuntimeError on
        failure."""
        began = time.monotonic()
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tickwheel", "serve"),
            *("--store", self._store),
            *(() if self.inbox is None else ("--inbox", self.inbox)),
            *("--listen", f"tcp://127.0.0.1:{self.port}"),
            *("--http", self.http or "http://127.0.0.1:0"),
            *("--ready-file", str(ready), "--log-format", "json"),
            # Make retries and grace periods short enough for the demonstration.
            *("--set", "retry_base_s=0.5", "--set", "reconnect_grace_s=1"),
        ]
        # A real daemon's inbox or history must not become this one's.
        env = {n: v for n, v in os.environ.items() if not n.upper().startswith(environment.PREFIX)}
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=log)
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                raise RuntimeError(f"the daemon did not start:\n{self.log_tail()}")
            await asyncio.sleep(0.01)
        addresses = json_.loads(ready.read_text())
        self.port, self.http = int(addresses["url"].rpartition(":")[2]), addresses["http"]
        return time.monotonic() - began

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """Stop the daemon with SIGTERM, or with SIGKILL after 15 s."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log_tail(self) -> str:
        path = self.folder / "daemon.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-10:])


# --- the application ---------------------------------------------------------------------------


APPLICATION_TOPIC = "demo.transactions"
TRANSACTIONS = 40
HAS_INBOX = "SELECT to_regclass('tickwheel.inbox_state') IS NOT NULL"
ENQUEUE = "SELECT tickwheel.enqueue(topic => $1, body => $2::text, delay => interval '1 second')"


class Application:
    """A program that writes orders and their tasks in transactions of its database in PostgreSQL.

    It rolls back every second transaction. At the end the delivered tasks must be those of the
    orders in the database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._orders: set[str] = set()
        self._delivered: set[str] = set()

    async def connect(self) -> None:
        """Raise RuntimeError if the database cannot be reached, or has an inbox already, whose rows
        belong to another daemon."""
        import asyncpg

        try:
            self._connection = await asyncpg.connect(self._url)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise RuntimeError(f"the database of the inbox: {error}") from None
        if await self._connection.fetchval(HAS_INBOX):
            raise RuntimeError("the database of the inbox must be empty; it has an inbox already")

    async def write(self, seconds: float) -> None:
        """Run the transactions evenly over ``seconds``. Raise RuntimeError if the daemon creates no
        inbox."""
        connection = self._connection
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await connection.fetchval(HAS_INBOX):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no inbox was created within {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.05)
        await connection.execute("CREATE TEMPORARY TABLE orders (number text)")
        for number in range(TRANSACTIONS):
            await asyncio.sleep(seconds / TRANSACTIONS)
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute("INSERT INTO orders VALUES ($1)", str(number))
            await connection.execute(ENQUEUE, APPLICATION_TOPIC, str(number))
            await (transaction.rollback() if number % 2 else transaction.commit())
        rows = await connection.fetch("SELECT number FROM orders")
        self._orders = {row["number"] for row in rows}

    async def consume(self, client: Client) -> None:
        """Ack deliveries until cancelled."""
        async with client.subscribe(APPLICATION_TOPIC, group=GROUP) as deliveries:
            async for delivery in deliveries:
                self._delivered.add(delivery.body.decode())
                delivery.ack_nowait()

    @property
    def is_finished(self) -> bool:
        """Whether the tasks of all orders were delivered."""
        return self._delivered >= self._orders

    def summary(self) -> dict[str, int]:
        return {
            "committed": len(self._orders),
            "committed_delivered": len(self._delivered & self._orders),
            "rolled_back": TRANSACTIONS - len(self._orders),
            "rolled_back_delivered": len(self._delivered - self._orders),
        }

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


# --- clients and their records -----------------------------------------------------------------


@dataclass
class Records:
    """The records of the producer and the consumers."""

    due_ms: dict[int, int] = field(default_factory=dict)
    """Due time of each confirmed task, by id."""
    deliveries: dict[int, int] = field(default_factory=dict)
    nacked: int = 0
    acked: set[int] = field(default_factory=set)
    """Ids of the tasks whose ack was confirmed."""
    unanswered: set[int] = field(default_factory=set)
    """Ids of the tasks whose ack was sent, and its answer lost."""
    early: int = 0
    late_ms: list[int] = field(default_factory=list)
    """The lateness of first deliveries, in ms."""
    due_of_late: list[int] = field(default_factory=list)
    """The due times of the deliveries in ``late_ms``."""
    refused: int = 0
    """Number of enqueues that failed with an error."""

    @property
    def duplicates(self) -> int:
        """Number of deliveries that were neither the first of a task nor caused by a nack."""
        return sum(self.deliveries.values()) - len(self.deliveries) - self.nacked

    @property
    def unacked(self) -> int:
        return len(self.due_ms.keys() - self.acked)


async def produce(client: Client, records: Records, tasks: int, seconds: float, seed: int) -> None:
    """Enqueue ``tasks`` evenly over ``seconds``, each due 1 to 5 s later."""
    random_ = random.Random(seed)
    began = time.monotonic()
    waiting: set[asyncio.Future[Receipt]] = set()

    def confirmed(future: asyncio.Future[Receipt]) -> None:
        waiting.discard(future)
        if future.cancelled() or future.exception() is not None:
            records.refused += 1
        else:
            receipt = future.result()
            records.due_ms[receipt.id] = receipt.due_ms

    for number in range(tasks):
        wait_s = began + number * seconds / tasks - time.monotonic()
        if wait_s > 0.001:
            await asyncio.sleep(wait_s)
        fails = number % FAILS_TWICE_EVERY == 0
        body = f"order {number}{' fails twice' if fails else ''}".encode()
        future = client.enqueue_nowait(TOPIC, body, delay=random_.uniform(1.0, 5.0))
        waiting.add(future)
        future.add_done_callback(confirmed)
    while waiting:
        await asyncio.wait(set(waiting))


async def consume(client: Client, records: Records) -> None:
    """Ack deliveries until cancelled. Nack tasks that are marked as failing twice."""
    async with client.subscribe(TOPIC, group=GROUP, prefetch=512) as deliveries:
        async for delivery in deliveries:
            _note(records, delivery)
            if delivery.body.endswith(b"fails twice") and delivery.attempt <= 2:
                records.nacked += 1
                nack = delivery.nack(reason="it always fails twice")
                _ignore_lost_nack(asyncio.ensure_future(nack))
            else:
                _confirm(records, delivery)


def _note(records: Records, delivery: Delivery) -> None:
    earlier_deliveries = records.deliveries.get(delivery.id, 0)
    records.deliveries[delivery.id] = earlier_deliveries + 1
    late_ms = delivery.delivered_ms - delivery.due_ms
    if late_ms < 0 or time.time_ns() // 1_000_000 < delivery.due_ms:
        records.early += 1
    if not earlier_deliveries:
        records.late_ms.append(late_ms)
        records.due_of_late.append(delivery.due_ms)


def _confirm(records: Records, delivery: Delivery) -> None:
    def done(future: asyncio.Future[AckWord]) -> None:
        if future.cancelled() or future.exception() is not None:
            records.unanswered.add(delivery.id)
        elif future.result() in ("acked", "done"):
            records.acked.add(delivery.id)

    delivery.ack_nowait().add_done_callback(done)


async def look_up_unanswered(client: Client, records: Records) -> None:
    """Record the acks that were stored although their answer was lost, which the kill of the daemon
    can cause: such tasks are not delivered again."""
    ids = records.unanswered - records.acked
    if ids:
        records.acked.update(t.id for t in await client.lookup_many([*ids]) if t.state == "acked")


def _ignore_lost_nack(future: asyncio.Future[str]) -> None:
    """Ignore a nack that is lost with its connection, because the task is then delivered again."""
    future.add_done_callback(
        lambda f: None if f.cancelled() or isinstance(f.exception(), TickwheelError) else f.result()
    )
