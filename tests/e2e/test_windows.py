"""Due windows of a real daemon: from client and command line, and over kills on each store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from math import ceil

from e2e.cli_runner import Cli
from e2e.stores import killed_on
from support.daemon import Daemon
from tickwheel import Client, Task

NINE = datetime(2030, 1, 31, 9, tzinfo=UTC)
NINE_MS = round(NINE.timestamp() * 1000)
WITHIN_S = 600


killed = killed_on("sqlite", "redis", "postgresql")


async def test_chosen_due_times_survive_a_kill(killed: Daemon) -> None:
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        await client.enqueue_many([Task("t", b"plain", at=NINE)] * 50)
        tasks = [Task("t", b"x", at=NINE, within=WITHIN_S) for _ in range(3_000)]
        receipts = await client.enqueue_many(tasks)
        dues = {receipt.id: receipt.due_ms for receipt in receipts}
        each = Counter(due_ms // 1000 for due_ms in dues.values())
        assert max(each.values()) <= ceil(3_000 / (WITHIN_S - 1))
        assert NINE_MS // 1000 not in each, "there is a crowd"
        assert min(dues.values()) > NINE_MS and max(dues.values()) <= NINE_MS + WITHIN_S * 1000
        load = await client.load(since=NINE, step=60, steps=11)
        await killed.arestart()
        by_id = {task.id: task async for task in client.list_tasks() if task.body == b"x"}
        assert {task_id: task.due_ms for task_id, task in by_id.items()} == dues
        assert {(task.asked_ms, task.within_ms) for task in by_id.values()} == {
            (NINE_MS, WITHIN_S * 1000)
        }
        assert await client.load(since=NINE, step=60, steps=11) == load
        assert sum(load.counts) == 3_050 and load.exact and max(load.counts) <= 300 + 50 + 10
        # Stored tasks count for windows after a restart.
        receipt = await client.enqueue("t", b"y", at=NINE, within=timedelta(seconds=WITHIN_S))
        assert each[receipt.due_ms // 1000] == min(each.values())


def test_windows_are_set_by_command(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.start()
    cli = Cli(daemon)
    nine = "2030-01-31T09:00:00Z"
    window = ("--at", nine, "--within", "10m")
    first, second = (cli.one("enqueue", "t", "x", *window) for _ in range(2))
    assert (first["due_ms"], second["due_ms"]) == (NINE_MS, NINE_MS + 1_000)
    shown = cli.run("show", second["id"]).stdout.decode()
    assert "10m, at its emptiest moment" in shown and "requested" in shown
    cli.run("reschedule", second["id"], "--at", "2030-02-01T09:00:00Z")
    assert "10m, rescheduled since" in cli.run("show", second["id"]).stdout.decode()
    lines = b'{"body": "a", "within": "30s"}\n{"body": "b"}\n'
    window = ("--at", "2030-01-31T09:01:00Z", "--within", "10m")
    answer = cli.json("enqueue", "u", "--from", "-", *window, stdin=lines)
    assert [entry["due_ms"] - NINE_MS for entry in answer] == [60_000, 61_000]
    assert cli.one("load", "--from", nine, "--steps", "3")["counts"] == [1, 2, 0]
    table = cli.run("load", "--from", nine, "--steps", "2", "--step", "1h")
    assert b"3" in table.stdout
    assert b"3 of 4 tasks on the wheel are due within 2h" in table.stderr
    assert "within_ms_max" in cli.fails(2, "enqueue", "t", "x", "--within", "2d")
    put = cli.one("schedule", "put", "s", "--topic", "t", "--every", "1h", "--within", "5m")
    assert put["task"] == {"within_ms": 300_000}
