"""Schedules of a real daemon: from the command line and the client, and over kills."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from e2e.cli_runner import Cli
from e2e.stores import killed_on
from support.daemon import Daemon
from support.waiting import rest
from tickwheel import Client

FILE = """
[schedule.nightly]
topic = "reports"
body = "all"
cron = "30 2 * * *"
timezone = "Europe/Berlin"
fold = "both"
retry = "fixed:delay=5s,retries=2"
properties = { country = "de" }

[schedule.often]
topic = "polls"
every = "90s"
jitter = "5s"
start = 2030-01-01T00:00:00Z
"""


killed = killed_on("redis", "sqlite", "postgresql")


async def test_kills_neither_lose_nor_double_occurrences(killed: Daemon) -> None:
    """Real time: a schedule of a second, a daemon that is killed between its occurrences."""
    daemon = killed
    await daemon.astart()
    async with Client(daemon.url, send_timeout=10) as client:
        made = await client.put_schedule(
            "tick", topic="ticks", every=1, catch_up="all", overlap="allow"
        )
        anchor_ms = made.raw["anchor_ms"]
        for pause_s in (1.3, 0.6, 1.1):
            await rest(pause_s)
            await daemon.arestart()
        while (await client.show_schedule("tick")).runs < 5:  # real time
            await rest(0.05)
        shown = await client.pause_schedule("tick")
        tasks = [task async for task in client.list_tasks(topic="ticks")]
    planned = [task.raw["properties"]["tickwheel.planned_ms"] for task in tasks]
    assert sorted(planned) == [anchor_ms + 1_000 * n for n in range(1, len(planned) + 1)]
    assert shown.raw["next_ms"] == max(planned) + 1_000
    assert shown.runs == len(planned)
    assert all(task.due_ms >= at for task, at in zip(tasks, planned, strict=True))


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with Client(daemon.url) as connected:
        yield connected


def test_schedule_apply_shows_its_changes_first(daemon: Daemon, tmp_path: Path) -> None:
    cli = Cli(daemon)
    file = tmp_path / "schedules.toml"
    file.write_text(FILE)
    assert (
        "add --yes to confirm" in cli.run("schedule", "apply", str(file), expect=2).stderr.decode()
    )
    assert cli.json("schedule", "list") == []
    done = cli.run("schedule", "apply", str(file), "--yes", "--json")
    outcomes = [json.loads(line)["outcome"] for line in done.stdout.splitlines()]
    assert outcomes == ["created", "created"]
    assert b"tickwheel: nightly: create\ntickwheel: often: create\n" in done.stderr
    again = cli.run("schedule", "apply", str(file), "--yes")
    assert b"no schedule differs from the file" in again.stderr
    file.write_text(FILE.partition("[schedule.often]")[0].replace('"all"', '"some"'))
    changed = cli.run("schedule", "apply", str(file), "--yes", "--prune")
    assert b"nightly: change body b'all' -> b'some'\ntickwheel: often: delete\n" in changed.stderr
    (left,) = cli.json("schedule", "list")
    assert (left["name"], left["body"]) == ("nightly", "some")
