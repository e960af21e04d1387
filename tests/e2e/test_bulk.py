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
    Conflict,
    NotFound,
    SendTimeout,
    Task,
    TaskSelectionKeywords,
)
from tickwheel.sync import Client as SyncClient

HOUR_S = 3_600
MANY = 4_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), http=True) as daemon:
        yield daemon


killed = killed_on("sqlite", "redis", "asyncio-redis", "postgresql")


async def test_the_client_runs_every_bulk_verb(client: Client, topic: str) -> None:
    tasks = [
        Task(topic, b"", delay=HOUR_S, tag="ab"[n % 2], key=f"k{n}", properties={"n": n})
        for n in range(20)
    ]
    receipts = await client.enqueue_many(tasks)
    later = datetime.now(UTC) + timedelta(hours=3)
    few: TaskSelectionKeywords = {"where": "n < 5", "tags": "a"}
    tried = await client.preview_bulk("cancel", topic, few)
    assert (tried.looked_at, tried.matched, tried.would_change) == (20, 3, 3)
    assert tried.examples == tuple(receipts[n].id for n in (0, 2, 4))
    bulk = await client.cancel(topic=topic, filter=few, id=f"{topic}-1")
    bulk = await client.wait_bulk(bulk.id, timeout=20)
    assert (bulk.state, bulk.changed, bulk.refused) == ("done", 3, {})
    assert bulk.ended is not None and bulk.ended >= bulk.made
    assert await client.cancel(topic=topic, filter=few, id=f"{topic}-1") == bulk
    with pytest.raises(Conflict):
        await client.cancel(topic=topic, filter={"where": "n < 6"}, id=f"{topic}-1")
    moved = await client.reschedule(topic=topic, filter={"key_prefix": "k1"}, shift=-60)
    assert (await client.wait_bulk(moved.id)).changed == 11
    assert (await client.lookup(receipts[1].id)).due_ms == receipts[1].due_ms - 60_000
    sooner = receipts[3].due - timedelta(seconds=1)
    moved = await client.reschedule(topic=topic, filter={"due_to": sooner}, at=later)
    assert (await client.wait_bulk(moved.id)).changed == 11
    moved = await client.run_now(topic=topic, filter={"due_from": later, "state": "scheduled"})
    assert (await client.wait_bulk(moved.id)).changed == 11
    items = [item async for item in client.list_bulk(topic=topic, state="done", limit=3)]
    assert [item.kind for item in items] == ["run_now", "reschedule", "reschedule"]
    slow = await client.cancel(topic=topic, filter={}, rate=0.01)
    with pytest.raises(SendTimeout, match="still running"):
        await client.wait_bulk(slow.id, timeout=0.1)
    assert (await client.cancel_bulk(slow.id)).state == "cancelled"
    assert (await client.wait_bulk(slow.id)).is_over


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


def test_the_synchronous_client_runs_bulk_verbs(running: Daemon) -> None:
    with SyncClient(running.url) as client:
        client.enqueue_many([Task("sync", b"", delay=HOUR_S)] * 3)
        assert client.preview_bulk("cancel", "sync", {}).matched == 3
        bulk = client.wait_bulk(client.cancel(topic="sync", filter={}).id, timeout=20)
        assert (bulk.state, bulk.changed) == ("done", 3)
        assert [task.id for task in client.list_bulk(topic="sync")] == [bulk.id]


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


def test_tasks_are_spread_by_command_and_synchronous_client(running: Daemon) -> None:
    cli, topic = Cli(running), "--topic=crowd"
    nine = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
    with SyncClient(running.url) as client:
        receipts = client.enqueue_many([Task("crowd", b"", at=nine, key="k")] * 40)
        ids = [receipt.id for receipt in receipts]
        bulk = cli.one("reschedule", topic, "--all", "--spread", "20s", "--wait")
        assert (bulk["kind"], bulk["changed"], bulk["arguments"]) == (
            "spread", 40, {"within_ms": 20_000},
        )  # fmt: skip
        dues = [task.due for task in client.lookup_many(ids)]
        assert all(due and nine <= due < nine + timedelta(seconds=20) for due in dues)
        later = nine + timedelta(hours=1)
        moved = client.spread(topic="crowd", key="k", start=later, end=later + timedelta(minutes=1))
        assert [outcome.status for outcome in moved] == ["scheduled"] * 40
        assert len({outcome.due_ms for outcome in moved}) == 40
        assert client.spread(ids[0], within=5).status == "scheduled"
        assert [item.id for item in client.spread_many(ids[:2], within=5)] == ids[:2]
    message = cli.json(
        "reschedule", str(ids[0]), str(ids[1]), "--spread", "5s", "--at", nine.isoformat()
    )
    assert [entry["status"] for entry in message] == ["scheduled"] * 2
    tried = cli.one("reschedule", topic, "--all", "--spread", "20s", "--dry-run")
    assert (tried["matched"], tried["would_change"]) == (40, 40)
    message = cli.fails(2, "reschedule", topic, "--all", "--spread", "20s", "--delay", "1h")
    assert "--spread cannot be combined with --delay" in message


def test_dead_letter_commands_take_filters(running: Daemon) -> None:
    cli = Cli(running)
    with SyncClient(running.url) as client:
        client.create_group("clidead", "g")
        client.enqueue_many([Task("clidead", b"", tag=tag) for tag in "aab"])
        dead = 0
        while dead < 3:
            for delivery in client.pull("clidead", group="g", max=3, wait=10):
                delivery.reject("no")
                dead += 1
    topic = "--topic=clidead"
    assert cli.one("dead", "requeue", topic, "--tags", "a", "--dry-run")["would_change"] == 2
    assert cli.one("dead", "requeue", topic, "--tags", "b", "--wait")["changed"] == 1
    assert "2 dead letters of topic clidead" in cli.fails(1, "dead", "delete", topic, "--tags", "a")
    assert cli.one("dead", "delete", topic, "--tags", "a", "--yes", "--wait")["changed"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cancel", "--where", "n > 1"), "by topic and filter"),
        (("cancel", "--topic", "cli", "--yes"), "or --all"),
        (("cancel", "7", "--where", "n > 1"), "select tasks by ids, by topic and key"),
        (
            ("cancel", "--topic", "cli", "--key", "k", "--dry-run"),
            "select tasks by ids, by topic and key",
        ),
        (("cancel", "--topic", "cli", "--where", "n >", "--yes"), "where, character"),
        (
            ("reschedule", "--topic", "cli", "--all"),
            "give exactly one of --delay, --at, --shift, --spread",
        ),
        (("dead", "requeue", "7", "--where", "n > 1"), "cannot be combined with --where"),
        (("cancel", "--topic", "cli", "--due-from", "soon"), "neither an ISO-8601 time"),
    ],
)
def test_invalid_bulk_commands_are_usage_errors(
    running: Daemon, arguments: tuple[str, ...], says: str
) -> None:
    cli = Cli(running)
    cli.run("enqueue", "cli", "x", "--delay", "1h")
    assert says in cli.fails(2, *arguments)
