"""``tickwheel demo``: the main bulk operation in under a minute, with a kill in the middle.

A daemon on an embedded store, a producer, consumers that ack, and a few tasks that fail twice.
Half way the daemon is killed with SIGKILL and started again. The clients keep books of their own:
what the daemon confirmed, what it delivered, which acks it confirmed. At the end these books say
whether anything was lost or early, and the exit code says so too.
"""

from __future__ import annotations

import asyncio
import json as json_
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from tickwheel.api.words import AckWord
from tickwheel.client import Client, Delivery, Receipt
from tickwheel.demo.bench import percentile
from tickwheel.demo.view import Picture, View, summary_table
from tickwheel.errors import TickwheelError

TOPIC = "demo.orders"
GROUP = "billing"
CONSOLE_NEEDS = ("msgspec", "offapi")
"""Modules of the extra ``http`` that the console needs."""
FAILS_TWICE_EVERY = 500
CONSUMERS = 2
START_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 45.0
REFRESH_S = 0.125
SEED = 7355
DOWN_S = 0.5
"""How long the daemon stays dead: long enough that tasks come due meanwhile."""
RECENT_S = 2.0


class Demo:
    """One run of the demonstration."""

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
        """Run; returns the summary. Raises RuntimeError when the daemon does not start."""
        await self._daemon.start()
        if self._daemon.console is not None:
            self._view.report(f"look at it in a browser: {self._daemon.console}")
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
        self._view.report(f"kill -9 {self._daemon.pid}")
        self._daemon.kill()
        self._picture.phase = "the daemon is dead"
        await asyncio.sleep(DOWN_S)
        self._recovered_s = await self._daemon.start()
        self._outage_ms = (down_ms, time.time_ns() // 1_000_000 + int(RECENT_S * 1000))
        self._view.report(f"started again; it serves after {self._recovered_s:.2f} s")
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
        console.print(summary_table(summary))
    fine = summary["enqueued"] == tasks == summary["acked"]
    return 0 if fine and not summary["lost"] and not summary["early"] else 1


# --- the daemon --------------------------------------------------------------------------------


class DemoDaemon:
    """The daemon: ``start``, ``kill``, ``start`` again on the same port; ``stop`` at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.http: str | None = None
        """The URL of its HTTP API; None: it is not up."""
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def console(self) -> str | None:
        """The URL of the console; None: the extra that it needs is not installed."""
        is_there = all(map(find_spec, CONSOLE_NEEDS))
        return f"{self.http}/console/" if is_there and self.http is not None else None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> float:
        """Start the daemon and wait until it serves; returns the seconds. Raises RuntimeError."""
        began = time.monotonic()
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tickwheel", "serve"),
            *("--store", f"sqlite:///{self.folder / 'demo.db'}"),
            *("--listen", f"tcp://127.0.0.1:{self.port}"),
            *("--http", self.http or "http://127.0.0.1:0"),
            *("--ready-file", str(ready), "--log-format", "json"),
            # Retries and takeovers within the demonstration's time, not within hours.
            *("--set", "retry_base_s=0.5", "--set", "reconnect_grace_s=1"),
        ]
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                raise RuntimeError(f"the daemon did not start:\n{self.log_tail()}")
            await asyncio.sleep(0.01)
        said = json_.loads(ready.read_text())
        self.port, self.http = int(said["url"].rpartition(":")[2]), said["http"]
        self.starts += 1
        return time.monotonic() - began

    def kill(self) -> None:
        """Kill the daemon (SIGKILL): it cannot write anything more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """End the daemon by SIGTERM, and by SIGKILL if it has not drained in time."""
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


# --- the work and the books --------------------------------------------------------------------


@dataclass
class Books:
    """What producer and consumers saw."""

    due_ms: dict[int, int] = field(default_factory=dict)
    """Id of a confirmed task → when it is due."""
    deliveries: dict[int, int] = field(default_factory=dict)
    nacked: int = 0
    acked: set[int] = field(default_factory=set)
    """Tasks whose ack was confirmed."""
    early: int = 0
    late_ms: list[int] = field(default_factory=list)
    """The lateness of first deliveries, in ms."""
    due_of_late: list[int] = field(default_factory=list)
    """The due times that belong to ``late_ms``."""
    refused: int = 0
    """Enqueues that failed in the end, with an error for the producer."""

    @property
    def duplicates(self) -> int:
        """Deliveries that were neither the first one nor asked for by a nack."""
        return sum(self.deliveries.values()) - len(self.deliveries) - self.nacked

    @property
    def lost(self) -> int:
        return len(self.due_ms.keys() - self.acked)


async def produce(client: Client, books: Books, tasks: int, seconds: float, seed: int) -> None:
    """Enqueue ``tasks`` evenly over ``seconds``, each due 1 to 5 s later."""
    random_ = random.Random(seed)
    began = time.monotonic()
    waiting: set[asyncio.Future[Receipt]] = set()

    def confirmed(future: asyncio.Future[Receipt]) -> None:
        waiting.discard(future)
        if future.cancelled() or future.exception() is not None:
            books.refused += 1
        else:
            receipt = future.result()
            books.due_ms[receipt.id] = receipt.due_ms

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


async def consume(client: Client, books: Books) -> None:
    """Ack deliveries until cancelled; tasks whose body says so fail twice first."""
    async with client.subscribe(TOPIC, group=GROUP, prefetch=512) as deliveries:
        async for delivery in deliveries:
            _note(books, delivery)
            if delivery.body.endswith(b"fails twice") and delivery.attempt <= 2:
                books.nacked += 1
                _watch(asyncio.ensure_future(delivery.nack(reason="it always fails twice")))
            else:
                _confirm(books, delivery)


def _note(books: Books, delivery: Delivery) -> None:
    seen = books.deliveries.get(delivery.id, 0)
    books.deliveries[delivery.id] = seen + 1
    late_ms = delivery.delivered_ms - delivery.due_ms
    if late_ms < 0 or time.time_ns() // 1_000_000 < delivery.due_ms:
        books.early += 1
    if not seen:
        books.late_ms.append(late_ms)
        books.due_of_late.append(delivery.due_ms)


def _confirm(books: Books, delivery: Delivery) -> None:
    def done(future: asyncio.Future[AckWord]) -> None:
        if not future.cancelled() and future.exception() is None:
            if future.result() in ("acked", "done"):
                books.acked.add(delivery.id)

    delivery.ack_nowait().add_done_callback(done)


def _watch(future: asyncio.Future[str]) -> None:
    """Ignore a nack that is lost with its connection: the lease ends, and the task comes back."""
    future.add_done_callback(
        lambda f: None if f.cancelled() or isinstance(f.exception(), TickwheelError) else f.result()
    )
