"""Bulk operations of a real daemon: both clients, the command line, and a daemon that is killed in
between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from e2e.stores import OTHER_DRIVER, killed_on
from support.daemon import Daemon
from support.redis_server import RedisServer
from support.waiting import rest
from tickwheel import BadRequest, Client, Conflict, NotFound, SendTimeout, Task
from tickwheel.sync import Client as SyncClient

HOUR_S = 3_600
MANY = 4_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), http=True) as daemon:
        yield daemon


killed = killed_on("sqlite", "redis", OTHER_DRIVER)


async def test_every_verb_of_the_client(client: Client, topic: str) -> None:
    tasks = [
        Task(topic, b"", delay=HOUR_S, tag="ab"[n % 2], key=f"k{n}", properties={"n": n})
        for n in range(20)
    ]
    receipts = await client.enqueue_many(tasks)
    later = datetime.now(UTC) + timedelta(hours=3)
    tried = await client.preview_matching("cancel", topic, where="n < 5", tags="a")
    assert (tried.looked_at, tried.matched, tried.would_change) == (20, 3, 3)
    assert tried.examples == tuple(receipts[n].id for n in (0, 2, 4))
    bulk = await client.cancel_matching(topic, where="n < 5", tags="a", id=f"{topic}-1")
    bulk = await client.wait_bulk(bulk.id, timeout=20)
    assert (bulk.state, bulk.changed, bulk.refused) == ("done", 3, {})
    assert bulk.ended is not None and bulk.ended >= bulk.made
    assert await client.cancel_matching(topic, where="n < 5", tags="a", id=f"{topic}-1") == bulk
    with pytest.raises(Conflict):
        await client.cancel_matching(topic, where="n < 6", id=f"{topic}-1")
    moved = await client.reschedule_matching(topic, shift=-60, key_prefix="k1")
    assert (await client.wait_bulk(moved.id)).changed == 11
    assert (await client.lookup(receipts[1].id)).due_ms == receipts[1].due_ms - 60_000
    sooner = receipts[3].due - timedelta(seconds=1)
    moved = await client.reschedule_matching(topic, at=later, due_to=sooner)
    assert (await client.wait_bulk(moved.id)).changed == 11
    moved = await client.run_now_matching(topic, due_from=later, state="scheduled")
    assert (await client.wait_bulk(moved.id)).changed == 11
    found = [one async for one in client.list_bulk(topic=topic, state="done", limit=3)]
    assert [one.kind for one in found] == ["run_now", "reschedule", "reschedule"]
    slow = await client.cancel_matching(topic, rate=0.01)
    with pytest.raises(SendTimeout, match="goes on"):
        await client.wait_bulk(slow.id, timeout=0.1)
    assert (await client.cancel_bulk(slow.id)).state == "cancelled"
    assert (await client.wait_bulk(slow.id)).is_over


async def test_what_a_client_can_get_wrong(client: Client, topic: str) -> None:
    with pytest.raises(NotFound):
        await client.cancel_matching(topic)
    await client.enqueue(topic, b"", delay=HOUR_S)
    with pytest.raises(BadRequest, match=r"\n.*\^"):
        await client.cancel_matching(topic, where="n > > 1")
    for given in (
        {"rate": 0}, {"rate": "5"}, {"key_prefix": 5}, {"due_from": 5}, {"id": ""},
        {"state": "odd"},
    ):  # fmt: skip
        wrong: dict[str, Any] = given
        with pytest.raises(BadRequest):
            await client.cancel_matching(topic, **wrong)
    with pytest.raises(BadRequest, match="one of delay_ms, due_ms, shift_ms"):
        await client.reschedule_matching(topic)
    with pytest.raises(BadRequest, match="kind"):
        await client.preview_matching("burn", topic)
    with pytest.raises(NotFound):
        await client.show_bulk("never")


def test_the_synchronous_client(running: Daemon) -> None:
    with SyncClient(running.url) as client:
        client.enqueue_many([Task("sync", b"", delay=HOUR_S)] * 3)
        assert client.preview_matching("cancel", "sync").matched == 3
        bulk = client.wait_bulk(client.cancel_matching("sync").id, timeout=20)
        assert (bulk.state, bulk.changed) == ("done", 3)
        assert [one.id for one in client.list_bulk(topic="sync")] == [bulk.id]


async def test_a_daemon_that_is_killed_goes_on_where_it_was(killed: Daemon) -> None:
    """Each task is moved once, however often the daemon dies on the way."""
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        tasks = [Task("t", b"x" * (n % 50), delay=HOUR_S) for n in range(MANY)]
        receipts = await client.enqueue_many(tasks)
        bulk = await client.reschedule_matching("t", shift=600, rate=MANY / 2)
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
        found = {task.id: task.due_ms async for task in client.list_tasks(topic="t")}
        assert found == dues


async def test_a_standby_goes_on_with_it(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    server = RedisServer(tmp_path / "redis").start()
    first, second = (make_daemon(store=server.url(), leader_ttl_s=1) for _ in range(2))
    await first.astart()
    await second.astart()
    urls = f"{first.url},{second.url.removeprefix('tcp://')}"
    async with Client(urls, send_timeout=20) as client:
        receipts = await client.enqueue_many([Task("t", b"", delay=HOUR_S)] * 1_000)
        bulk = await client.reschedule_matching("t", shift=600, rate=500)
        for _ in range(1_000):
            bulk = await client.show_bulk(bulk.id)
            if bulk.changed >= 100:
                break
            await rest(0.02)
        assert bulk.state == "running"
        await first.akill()
        done = await client.wait_bulk(bulk.id, timeout=60)
        assert (done.state, done.changed) == ("done", 1_000)
        found = {task.id: task.due_ms async for task in client.list_tasks(topic="t")}
        assert found == {receipt.id: receipt.due_ms + 600_000 for receipt in receipts}
    second.close()  # while its Redis is there: else it waits for it
    server.stop()


# --- the command line ----------------------------------------------------------------------------


def test_commands_that_make_a_bulk(running: Daemon) -> None:
    cli, topic = Cli(running), "--topic=cli"
    for n in range(4):
        more = ("--prop", f"n:={n}", "--tag", "ab"[n % 2])
        cli.run("enqueue", "cli", "x", "--delay", "1h", *more)
    tried = cli.one("cancel", topic, "--where", "n > 1", "--dry-run")
    assert (tried["matched"], tried["would_change"], len(tried["examples"])) == (2, 2, 2)
    shown = cli.run("cancel", topic, "--tags", "a", "--dry-run").stdout.decode().splitlines()
    assert (shown[0], len(shown)) == ("dry run  2 of 4 would be changed", 3)
    said = cli.fails(1, "cancel", topic, "--where", "n > 1")
    assert said.endswith("2 tasks of topic cli with where n > 1 would be cancelled; say --yes\n")
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
    assert [one["id"] for one in cli.json("bulk", "--topic", "cli", "--limit", "1")] == [slow]
    assert "cancelled" in cli.run("bulk", "show", slow).stdout.decode()
    listed = cli.run("bulk", "list", "--state", "done").stdout.decode()
    assert bulk["id"] in listed and slow not in listed


def test_commands_for_dead_letters_that_match(running: Daemon) -> None:
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
        (("cancel", "--where", "n > 1"), "--topic is needed"),
        (("cancel", "--topic", "cli", "--yes"), "or --all"),
        (("cancel", "7", "--where", "n > 1"), "give ids, or"),
        (("cancel", "--topic", "cli", "--key", "k", "--dry-run"), "give ids, or"),
        (("cancel", "--topic", "cli", "--where", "n >", "--yes"), "where, character"),
        (("reschedule", "--topic", "cli", "--all"), "give --delay or --at"),
        (("reschedule", "7", "--shift", "5m"), "--shift is for all that match"),
        (("dead", "requeue", "7", "--where", "n > 1"), "do not go with it"),
        (("cancel", "--topic", "cli", "--due-from", "soon"), "neither an ISO-8601 time"),
    ],
)
def test_what_a_command_can_get_wrong(
    running: Daemon, arguments: tuple[str, ...], says: str
) -> None:
    cli = Cli(running)
    cli.run("enqueue", "cli", "x", "--delay", "1h")
    assert says in cli.fails(2, *arguments)
