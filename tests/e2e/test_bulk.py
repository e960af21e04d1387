"""Bulk operations of a real daemon: both clients, the command line, and a daemon that is killed in
between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from e2e.stores import killed_on
from support.daemon import Daemon
from support.redis_server import RedisServer
from support.waiting import rest
from tickwheel import (
    BadRequest,
    Client,
    NotFound,
    Task,
)

HOUR_S = 3_600
MANY = 4_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), http=True) as daemon:
        yield daemon


killed = killed_on("sqlite", "redis", "asyncio-redis", "postgresql")


async def test_invalid_bulk_calls_raise(client: Client, topic: str) -> None:
    with pytest.raises(NotFound):
        await client.cancel(topic=topic, filter={})
    await client.enqueue(topic, b"", delay=HOUR_S)
    with pytest.raises(BadRequest, match=r"\n.*\^"):
        await client.cancel(topic=topic, filter={"where": "n > > 1"})
    for given in (
        {"rate": 0}, {"rate": "5"}, {"filter": {"key_prefix": 5}}, {"filter": {"due_from": 5}},
        {"id": ""}, {"filter": {"state": "odd"}}, {"filter": "n > 1"}, {"filter": None},
        {"filter": None, "key": "k", "rate": 5}, {"key": "k"},
    ):  # fmt: skip
        wrong: dict[str, Any] = {"topic": topic, "filter": {}, **given}
        with pytest.raises(BadRequest):
            await client.cancel(**wrong)
    misspelt: dict[str, Any] = {"topic": topic, "filter": {"wear": "n > 1"}}
    with pytest.raises(TypeError, match="wear"):
        await client.cancel(**misspelt)
    with pytest.raises(BadRequest, match="one of delay, at and shift"):
        await client.reschedule(topic=topic, filter={})
    with pytest.raises(BadRequest, match="kind"):
        await client.preview_bulk("burn", topic, {})
    with pytest.raises(NotFound):
        await client.show_bulk("never")


async def test_a_bulk_resumes_after_kills(killed: Daemon) -> None:
    """Each task is moved once, however often the daemon dies on the way."""
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        tasks = [Task("t", b"x" * (n % 50), delay=HOUR_S) for n in range(MANY)]
        receipts = await client.enqueue_many(tasks)
        bulk = await client.reschedule(topic="t", filter={}, shift=600, rate=MANY / 2)
        seen = 0
        for share in (0.1, 0.3, 0.6):
            while (bulk := await client.show_bulk(bulk.id)).changed < share * MANY:
                assert bulk.changed >= seen, "what was said to be done stays done"
                await rest(0.02)
            seen = bulk.changed
            await killed.akill()
            await killed.astart()
        done = await client.wait_bulk(bulk.id, timeout=60)
        assert (done.state, done.looked_at, done.changed) == ("done", MANY, MANY)
        dues = {receipt.id: receipt.due_ms + 600_000 for receipt in receipts}
        by_id = {task.id: task.due_ms async for task in client.list_tasks(topic="t")}
        assert by_id == dues


@pytest.mark.slow  # server/shard/test_spread.py: over a restart
async def test_a_spread_resumes_after_kills(killed: Daemon) -> None:
    """All of a crowd are in the window in the end, none of them twice, and no tick has many."""
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        nine = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2)
        await client.enqueue_many([Task("t", b"", at=nine) for _ in range(MANY)])
        bulk = await client.spread(topic="t", filter={}, within=400, rate=MANY / 2)
        while (bulk := await client.show_bulk(bulk.id)).changed < MANY // 4:
            await rest(0.02)
        await killed.akill()
        await killed.astart()
        done = await client.wait_bulk(bulk.id, timeout=60)
        assert (done.state, done.looked_at, done.changed) == ("done", MANY, MANY)
        first_ms = round(nine.timestamp() * 1000)
        by_id = {task.id: task.due_ms or 0 async for task in client.list_tasks(topic="t")}
        assert len(by_id) == MANY
        assert all(first_ms <= due_ms < first_ms + 400_000 for due_ms in by_id.values())
        heaviest = max(Counter(due_ms // 1_000 for due_ms in by_id.values()).values())
        assert heaviest <= 2 * MANY // 400, "one tick had all of them"


@pytest.mark.slow  # a bulk operation over kills: above; takeovers: test_failover.py
async def test_a_standby_resumes_a_bulk(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start()
    await asyncio.to_thread(server.lay_out)
    first, second = (make_daemon(store=server.url(), leader_ttl_s=2) for _ in range(2))
    await first.astart()
    await second.astart()
    urls = f"{first.url},{second.url.removeprefix('tcp://')}"
    async with Client(urls, send_timeout=20) as client:
        receipts = await client.enqueue_many([Task("t", b"", delay=HOUR_S)] * 1_000)
        bulk = await client.reschedule(topic="t", filter={}, shift=600, rate=200)
        for _ in range(1_000):
            bulk = await client.show_bulk(bulk.id)
            if bulk.changed >= 100:
                break
            await rest(0.02)
        assert bulk.state == "running"
        await first.akill()
        done = await client.wait_bulk(bulk.id, timeout=60)
        assert (done.state, done.changed) == ("done", 1_000)
        by_id = {task.id: task.due_ms async for task in client.list_tasks(topic="t")}
        assert by_id == {receipt.id: receipt.due_ms + 600_000 for receipt in receipts}
    second.close()  # while its Redis is there: else it waits for it
    server.stop()


# --- the command line ----------------------------------------------------------------------------


def test_commands_run_bulk_operations(running: Daemon) -> None:
    cli, topic = Cli(running), "--topic=cli"
    for n in range(4):
        more = ("--prop", f"n:={n}", "--tag", "ab"[n % 2])
        cli.run("enqueue", "cli", "x", "--delay", "1h", *more)
    tried = cli.one("cancel", topic, "--where", "n > 1", "--dry-run")
    assert (tried["matched"], tried["would_change"], len(tried["examples"])) == (2, 2, 2)
    shown = cli.run("cancel", topic, "--tags", "a", "--dry-run").stdout.decode().splitlines()
    assert (shown[0], len(shown)) == ("dry run  2 of 4 would be changed", 3)
    message = cli.fails(1, "cancel", topic, "--where", "n > 1")
    assert message.endswith("2 tasks of topic cli with where n > 1 would be cancelled; add --yes\n")
    bulk = cli.one("reschedule", topic, "--all", "--shift", "30m", "--wait")
    assert (bulk["state"], bulk["changed"], bulk["arguments"]) == (
        "done",
        4,
        {"shift_ms": 1_800_000},
    )
    bulk = cli.one("reschedule", topic, "--due-from", "1h", "--shift", "-30m", "--wait")
    assert bulk["arguments"] == {"shift_ms": -1_800_000}
    bulk = cli.one("run-now", topic, "--where", "n = 0", "--wait")
    assert bulk["changed"] == 1
    bulk = cli.one("cancel", topic, "--where", "n > 1", "--yes", "--wait")
    assert (bulk["state"], bulk["changed"], bulk["selection"]) == ("done", 2, {"where": "n > 1"})
    slow = cli.one("cancel", topic, "--all", "--yes", "--rate", "0.01")["id"]
    assert cli.one("bulk", "cancel", slow)["state"] == "cancelled"
    assert [row["id"] for row in cli.json("bulk", "--topic", "cli", "--limit", "1")] == [slow]
    assert "cancelled" in cli.run("bulk", "show", slow).stdout.decode()
    listed = cli.run("bulk", "list", "--state", "done").stdout.decode()
    assert bulk["id"] in listed and slow not in listed
