"""A history made by hand: events at readable times, and segments of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def ms(text: str) -> int:
    """Convert ``2026-11-20T10:00:00.005`` (UTC) to milliseconds since 1970."""
    return round(datetime.fromisoformat(text + "+00:00").timestamp() * 1000)


class Book:
    """Events in the order of writing, numbered by `seq`."""

    def __init__(self, day: str = "2026-11-20", *, shard: int = 0, epoch: int = 1) -> None:
        self.day, self.shard, self.epoch = day, shard, epoch
        self.events: list[Event] = []

    def add(self, at: str | int, event: str, task: int | None = None, **fields: Any) -> Event:
        """Add an event. `at` is a time of day or milliseconds."""
        time_ms = ms(f"{self.day}T{at}") if isinstance(at, str) else at
        one: Event = {"v": 1, "time_ms": time_ms, "event": event}
        if task is not None:
            one["task_id"] = str(task)
        one |= fields
        one |= {"node": "n1", "shard": self.shard, "epoch": self.epoch}
        one["seq"] = len(self.events) + 1
        self.events.append(one)
        return one

    def task(self, task: int, topic: str, enqueued: str, due: str, **fields: Any) -> None:
        self.add(enqueued, "enqueued", task, topic=topic, due_ms=ms(f"{self.day}T{due}"),
                 producer="shop-1", **fields)  # fmt: skip

    def delivery(
        self, task: int, topic: str, group: str, due: str, late_ms: int, attempt: int = 1
    ) -> int:
        """Add a delivery and return its time."""
        due_ms = ms(f"{self.day}T{due}")
        late = {"lateness_ms": late_ms} if attempt == 1 else {}
        self.add(due_ms + late_ms, "delivered", task, topic=topic, group=group, due_ms=due_ms,
                 attempt=attempt, subscriber=f"{group}-1@10.0.0.3:50124", **late)  # fmt: skip
        return due_ms + late_ms

    def ack(
        self, task: int, topic: str, group: str, delivered_ms: int, took_ms: int, attempt: int = 1
    ) -> None:
        self.add(delivered_ms + took_ms, "acked", task, topic=topic, group=group, attempt=attempt,
                 ack_ms=took_ms, subscriber=f"{group}-1@10.0.0.3:50124")  # fmt: skip


def write(
    root: Path, events: Iterable[Event], number: int = 1, *, sealed: bool = True, tail: str = ""
) -> list[Path]:
    """Write a segment for each hour with events. `tail` is appended to the last one."""
    hours: dict[str, list[Event]] = {}
    for event in events:
        hour = datetime.fromtimestamp(event["time_ms"] / 1000, UTC)
        hours.setdefault(f"dt={hour:%Y-%m-%d}/hour={hour:%H}", []).append(event)
    made = []
    for place, inside in sorted(hours.items()):
        text = "".join(json.dumps(e, separators=(",", ":")) + "\n" for e in inside)
        if place == max(hours):
            text += tail
        first = inside[0]
        name = f"{first.get('node', 'n1')}-s{first.get('shard', 0)}-e{first.get('epoch', 0)}"
        path = root / place / f"{name}-{number:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if sealed:
            path = path.with_name(path.name + ".gz")
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        made.append(path)
    return made


ORDERS, MAIL = "orders.close", "mail/out:v2_" + "x" * 200


def story() -> Book:
    """A morning in two topics. What the figures of it are, test_figures.py says by hand.

    Orders have two groups, billing and audit; mails one, and a name that fits no folder.
    """
    book = Book()
    book.add("09:59:59", "started", clean=False)
    book.task(1, ORDERS, "10:00:00", "10:30:00", key="c-1")
    book.task(2, ORDERS, "10:00:00.500", "10:30:00", key="c-2")
    book.task(3, MAIL, "10:05:00", "11:00:00", key="m-3")
    book.task(4, MAIL, "10:05:01", "10:45:00")
    book.task(5, MAIL, "10:06:00", "10:10:00", key="m-5")
    book.task(6, MAIL, "10:20:00", "10:40:00")
    book.task(7, MAIL, "10:21:00", "11:10:00")
    book.task(8, MAIL, "10:22:00", "10:50:00")
    book.add("10:23:00", "cancelled", 4, topic=MAIL)
    book.add("10:24:00", "rescheduled", 6, topic=MAIL, due_ms=ms("2026-11-20T23:00:00"))
    # Task 1 goes well everywhere; task 2 fails once in billing.
    book.ack(1, ORDERS, "billing", book.delivery(1, ORDERS, "billing", "10:30:00", 5), 20)
    book.ack(1, ORDERS, "audit", book.delivery(1, ORDERS, "audit", "10:30:00", 7), 3)
    at = book.delivery(2, ORDERS, "billing", "10:30:00", 150)
    book.add(at + 30, "nacked", 2, topic=ORDERS, group="billing", attempt=1,
             due_ms=ms("2026-11-20T10:30:10"), reason="card 12345678 declined",
             subscriber="billing-1@10.0.0.3:50124")  # fmt: skip
    book.ack(2, ORDERS, "audit", book.delivery(2, ORDERS, "audit", "10:30:00", 9), 4)
    at = book.delivery(2, ORDERS, "billing", "10:30:10", 2, attempt=2)
    book.ack(2, ORDERS, "billing", at, 40, attempt=2)
    book.add("10:50:01", "expired", 8, topic=MAIL, group="default", reason="ttl over")
    # Task 3 dies; task 7 is handed out and never heard of again.
    at = book.delivery(3, MAIL, "default", "11:00:00", 1)
    book.add(at + 9, "nacked", 3, topic=MAIL, group="default", attempt=1,
             due_ms=ms("2026-11-20T11:00:10"), reason="mailbox full")  # fmt: skip
    book.delivery(3, MAIL, "default", "11:00:10", 0, attempt=2)
    book.add("11:00:11", "dead", 3, topic=MAIL, group="default", attempt=2, reason="mailbox full")
    book.delivery(7, MAIL, "default", "11:10:00", 3)
    book.add("13:00:00", "dropped", count=7)
    return book
