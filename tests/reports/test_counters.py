"""The report of a real daemon's history says what the daemon's own Prometheus counters said."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reports.browser import Browser
from support.daemon import Daemon
from support.raw import Raw
from support.waiting import comes
from tickwheel import Client, Delivery, Retry, Task
from tickwheel.api.frames import FrameType as T
from tickwheel.history import spool
from tickwheel.history.segments import STATE

if TYPE_CHECKING:
    from tickwheel.reports.job import Report

PATIENCE_S = 90.0
ORDERS, MAILS, CARTS, NOBODY = "orders.close", "mails/send", "carts.remind", "nobody.home"
ORDER_COUNT, MAIL_COUNT, CART_COUNT, SHORT_COUNT, FAR_COUNT, CANCELLED = 120, 50, 40, 6, 9, 4
LET_GO = 2
"""Tasks whose first lease is over and whose second delivery is given back."""
Figures = Counter[tuple[str, str, str]]
"""Metric, topic, group (empty where it is a topic's own) → count."""

COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {
    "tickwheel_enqueued_total": lambda row: row["enqueued"],
    "tickwheel_cancelled_total": lambda row: row["cancelled"],
    "tickwheel_delivered_total": lambda row: row["delivered"],
    "tickwheel_acked_total": lambda row: row["acked"],
    # Nacks and rejects; the last one of a task is written as its death alone.
    "tickwheel_nacked_total": lambda row: row["nacked"] + row["dead"],
    # Every retry of this test has come due.
    "tickwheel_retried_total": lambda row: row["nacked"],
    "tickwheel_dead_total": lambda row: row["dead"],
    "tickwheel_expired_total": lambda row: row["expired"],
}
WANTED = {
    ("tickwheel_enqueued_total", ORDERS, ""): ORDER_COUNT + FAR_COUNT,
    ("tickwheel_cancelled_total", ORDERS, ""): CANCELLED,
    ("tickwheel_acked_total", ORDERS, "billing"): ORDER_COUNT,
    # Of 120: 24 fail once (every fifth), and of those 6 (every twentieth) again and die.
    ("tickwheel_delivered_total", ORDERS, "mail"): ORDER_COUNT + 24,
    ("tickwheel_retried_total", ORDERS, "mail"): 24,
    ("tickwheel_dead_total", ORDERS, "mail"): 6,
    ("tickwheel_acked_total", ORDERS, "mail"): ORDER_COUNT - 6,
    ("tickwheel_dead_total", MAILS, "default"): MAIL_COUNT // 10,
    ("tickwheel_delivered_total", CARTS, "default"): CART_COUNT + 2 * LET_GO,
    ("tickwheel_leases_over_total", "", ""): LET_GO,
    ("tickwheel_acked_total", CARTS, "default"): CART_COUNT,
    ("tickwheel_expired_total", NOBODY, "default"): SHORT_COUNT,
}


async def on_order_mail(number: int, delivery: Delivery) -> None:
    if number % 20 == 0 or (number % 5 == 0 and delivery.attempt == 1):
        await delivery.nack(reason="the mail server said no")
    else:
        await delivery.ack()


async def on_mail(number: int, delivery: Delivery) -> None:
    await (delivery.reject("no such address") if number % 10 == 0 else delivery.ack())


async def on_other(number: int, delivery: Delivery) -> None:
    await delivery.ack()


async def consume(client: Client, topic: str, group: str, handle: Callable[..., Any]) -> None:
    async for delivery in client.subscribe(topic, group=group):
        await handle(int(delivery.body), delivery)


async def live(daemon: Daemon) -> Figures:
    """Acks, nacks, rejects, deaths, a lease that is over, expiries, cancels; what was counted."""
    async with Client(daemon.url) as client:
        await client.create_group(ORDERS, "billing")
        await client.create_group(ORDERS, "mail", retry=Retry.fixed(0.05, retries=1))
        for topic in (MAILS, CARTS, NOBODY):
            await client.create_group(topic, "default")
        await client.enqueue_many(Task(CARTS, b"%d" % n) for n in range(LET_GO))
        await asyncio.to_thread(let_go, daemon.port, LET_GO)
        await client.enqueue_many(Task(CARTS, b"%d" % n) for n in range(LET_GO, CART_COUNT))
        far = [Task(ORDERS, b"0", delay=3_600) for _ in range(FAR_COUNT)]
        ids = [receipt.id for receipt in await client.enqueue_many(far)]
        await client.cancel_many(ids[:CANCELLED])
        await client.enqueue_many(Task(NOBODY, b"0", ttl=0.1) for _ in range(SHORT_COUNT))
        await client.enqueue_many(Task(NOBODY, b"0") for _ in range(3))
        await client.enqueue_many(
            Task(ORDERS, b"%d" % n, delay=n % 7 / 20, key=f"order-{n}") for n in range(ORDER_COUNT)
        )
        await client.enqueue_many(Task(MAILS, b"%d" % n) for n in range(MAIL_COUNT))
        plan = (
            (ORDERS, "billing", on_other), (ORDERS, "mail", on_order_mail),
            (MAILS, "default", on_mail), (CARTS, "default", on_other),
        )  # fmt: skip
        work = [asyncio.create_task(consume(client, *item)) for item in plan]
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            counted = await asyncio.to_thread(scraped, daemon)
            if all(counted[name] == value for name, value in WANTED.items()):
                break
            late = {name: counted[name] for name, value in WANTED.items() if counted[name] != value}
            assert time.monotonic() < deadline_s, late
            assert not any(task.done() for task in work)
            await asyncio.sleep(0.05)  # real time: another process
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return await asyncio.to_thread(scraped, daemon)


def let_go(port: int, count: int) -> None:
    """Take all there are and keep silent until their leases are over; then give them back."""
    with Raw(port) as raw:
        taken = raw.call(T.PULL, CARTS, "default", count, 20_000, {"lease_ms": 100})[2]
        assert len(taken[2]) == count
        left = count
        while left:
            epoch, _, items = raw.call(T.PULL, CARTS, "default", left, 20_000, {})[2]
            assert items
            ids, attempts = [item[0] for item in items], [item[1] for item in items]
            assert set(attempts) == {2}
            raw.call(T.RELEASE, CARTS, "default", epoch, ids, attempts)
            left -= len(items)


def scraped(daemon: Daemon) -> Figures:
    with urllib.request.urlopen(daemon.http + "/metrics", timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    return Counter(
        {
            (sample.name, sample.labels.get("topic", ""), sample.labels.get("group", "")): int(
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }
    )


async def taken_up(history: Path) -> None:
    """Until the writing process has turned everything into files, and sealed them."""
    await comes(
        lambda: (
            not [*history.glob("dt=*/hour=*/*.jsonl")]
            and not any(spool.files(folder) for folder in (history / STATE).iterdir())
        )
    )


async def history_of(folder: Path, history: Path) -> Figures:
    async with Daemon(folder, http=True, history_dir=history) as daemon:
        counted = await live(daemon)
        assert await daemon.aterminate() == 0
    await taken_up(history)
    return counted


@pytest.mark.slow
def test_figures_of_the_report_equal_the_daemons_own_counters(
    report: Callable[..., Report], browser: Browser, history: Path, tmp_path: Path
) -> None:
    exposed = asyncio.run(history_of(tmp_path / "daemon", history))
    made = report(stuck_after_ms=0)
    rows = {(row["topic"], row["group"]): row for row in made.rows["by_topic"]}
    counted: Figures = Counter()
    for (topic, group), row in rows.items():
        for metric, count in COLUMNS.items():
            counted[metric, topic, group] += count(row)
    of_daemon = {name: n for name, n in exposed.items() if name[0] in COLUMNS and n}
    assert of_daemon == {name: n for name, n in counted.items() if n}
    assert {name: exposed[name] for name in WANTED} == WANTED
    assert sum(row["lease_over"] for row in rows.values()) == LET_GO
    for topic in made.topics:
        firsts = sum(row["first_deliveries"] for (name, _), row in rows.items() if name == topic)
        assert firsts == exposed["tickwheel_delivery_lateness_seconds_count", topic, ""]
    # The gauges of what is left are the stuck and the dead; far tasks are not due yet.
    stuck = Counter(row["topic"] for row in made.rows["stuck"])
    assert stuck == {NOBODY: exposed["tickwheel_ready_tasks", NOBODY, "default"]}
    assert exposed["tickwheel_scheduled_tasks", ORDERS, ""] == FAR_COUNT - CANCELLED
    assert not made.rows["quarantine"]
    assert made.loaded.duplicates == 0
    assert {row["what"]: row["n"] for row in made.rows["daemon"]} == {"started": 1, "stopped": 1}
    # Seconds of life are a picture of seconds.
    dom = browser.dom(Path(made.page))
    assert 'data-drawn="all"' in dom
    assert {row["start_ms"] % 60_000 for row in made.rows["all_by_step"]} != {0}
