"""Schedules of a real daemon: from the command line and the client, and over kills."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from e2e.stores import killed_on
from support.daemon import Daemon
from support.waiting import rest, soon
from tickwheel import Client
from tickwheel.errors import BadRequest, NotFound

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


async def test_tasks_of_a_schedule_name_it_and_the_planned_time(client: Client) -> None:
    name = f"seen{time.time_ns()}"
    await client.put_schedule(name, topic=name, body=b"hi", every=1, runs_max=1, key="k")
    async with client.subscribe(name) as deliveries:
        delivery = await soon(anext(deliveries))
        await delivery.ack()
    assert (delivery.schedule, delivery.body, delivery.key) == (name, b"hi", "k")
    assert delivery.planned is not None
    # A daemon that is late makes its task due at once.
    assert timedelta(0) <= delivery.due - delivery.planned < timedelta(seconds=20)
    shown = await client.show_schedule(name)
    (run,) = shown.recent
    assert (run.outcome, run.task_id, run.state) == ("fired", delivery.id, "acked")
    assert shown.next is None
    await client.delete_schedule(name)
    with pytest.raises(NotFound, match=f"there is no schedule {name}"):
        await client.show_schedule(name)


async def test_run_and_backfill_are_tasks_at_once(client: Client) -> None:
    name = f"more{time.time_ns()}"
    await client.put_schedule(name, topic=name, cron="0 * * * *")
    one = await client.run_schedule(name)
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    ids = await client.backfill_schedule(name, begin, begin + timedelta(hours=3))
    by_id = {task.id: task async for task in client.list_tasks(topic=name)}
    assert by_id.keys() == {one, *ids}
    planned = [by_id[i].raw["properties"]["tickwheel.planned_ms"] for i in ids]
    assert planned == [1_767_225_600_000 + n * 3_600_000 for n in range(3)]
    with pytest.raises(BadRequest, match="no occurrence is planned between"):
        await client.backfill_schedule(
            name, begin + timedelta(minutes=1), begin + timedelta(minutes=9)
        )
    await client.delete_schedule(name)


def test_the_command_line_shows_schedules_to_people(daemon: Daemon) -> None:
    cli = Cli(daemon)
    cli.one("schedule", "put", "nine", "--topic", "mails", "--cron", "0 9 * * *")
    cli.one("schedule", "run", "nine")
    for arguments in (("list",), ("show", "nine"), ("next", "nine")):
        assert cli.run("schedule", *arguments).stdout
    cli.one("schedule", "delete", "nine")
    assert "there is no schedule nine" in cli.fails(4, "schedule", "show", "nine")


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


def test_invalid_schedules_are_one_line_errors(daemon: Daemon, tmp_path: Path) -> None:
    cli = Cli(daemon)
    put: Any = ("schedule", "put", "x", "--topic", "t")
    wrong = {
        ("--cron", "@daily", "--timezone", "Mars/Base"): "timezone 'Mars/Base' is not known",
        ("--cron", "0 0 31 2 *"): "cron '0 0 31 2 *' never runs: there is no such day",
        ("--cron", "61 * * * *"): "cron '61 * * * *' cannot be read: minute 61 is not",
        ("--cron", "@every 1h"): "use every instead of cron (--every 1h",
        ("--cron", "*/90 * * * *"): "minute */90 has the step 90; the limit is 59",
        ("--cron", "@daily", "--timezone", "Factory"): "timezone 'Factory' is not known",
        ("--every", "500ms"): "every_ms must be at least 1000 (schedule_interval_min_s), not 500",
        (): "either cron or every_ms",
        ("--cron", "@daily", "--every", "5s"): "either cron or every_ms",
        ("--every", "5s", "--timezone", "UTC"): "timezone must not be combined with every_ms",
        ("--every", "5s", "--overlap", "no"): "'no' is not one of allow, skip",
        ("--every", "5s", "--end", "2020-01-01T00:00Z"): "the schedule never runs",
        ("--every", "5s", "--body", "x" * 65_537): "schedule_bytes_max",
    }
    for arguments, words in wrong.items():
        assert words in cli.fails(2, *put, *arguments)
    for name in ("n" * 256, "a b", ""):
        named = ("schedule", "put", name, "--topic", "t", "--every", "5s")
        assert "name must be 1 to 255" in cli.fails(2, *named)
    file = tmp_path / "wrong.toml"
    for text, words in {
        "[schedule.a]\nevery='5s'": "topic is missing",
        "[schedule.a]\ntopic='t'\never='5s'": "ever is not a valid field",
        "[schedule.a]\ntopic=5": "topic must be 1 to 255 characters",
        "[other]": "must contain only tables [schedule.NAME]",
        "x": "wrong.toml",
    }.items():
        file.write_text(text)
        assert words in cli.fails(2, "schedule", "apply", str(file), "--yes")
    assert cli.json("schedule", "list") == []
