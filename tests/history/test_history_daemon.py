"""A real daemon with its history: nothing is missing in it, and a restore gives the store back."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.history_daemon import PATIENCE_S, daemon_in, taken_up
from support.history_rig import read_all
from support.restore_rig import Held, held, url
from tickwheel import Client, Delivery, Task
from tickwheel.cli.app import run
from tickwheel.history.restore import Plan, Report, restore
from tickwheel.history.segments import Event, Tally
from tickwheel.model.kinds import SCHEDULE
from tickwheel.model.records import ProgressState

FAR = 3_600.0
KILLS = 2


@dataclass
class Life:
    """What was done with a daemon until its end, as its clients know it."""

    folder: Path
    killed: bool
    backup: str = ""
    epoch: int = 0
    far: set[int] = field(default_factory=set)
    """Not due for a long time yet."""
    waiting: set[int] = field(default_factory=set)
    """For a retry, for as long."""
    overdue: dict[int, bytes] = field(default_factory=dict)
    """Due and not finished: never taken, or in flight at the end."""
    dead: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    """Acked, or cancelled."""
    before: Held | None = None
    """The store at the end."""

    @property
    def history(self) -> Path:
        return self.folder / "history"

    async def live(self) -> Life:
        async with daemon_in(self.folder) as daemon:
            async with Client(daemon.url, name="shop") as client:
                self.epoch = (await client.status()).epoch
                await client.create_group("t", "g", start="first")
                await client.create_group("u", "h", start="now", paused=True)
                await self.half(client, "early")
                self.backup = (await client.backup("backup.db")).path
                await self.half(client, "late")
            if self.killed:
                await daemon.akill()
            else:
                assert await daemon.aterminate() == 0
            await taken_up(self.history)
        self.before = await held(daemon.store)
        return self

    async def half(self, client: Client, name: str) -> None:
        """Tasks in every state."""
        ids = await enqueued(client, name, "t", 20, FAR)
        await client.cancel_many(ids[:5])
        await client.reschedule(ids[5], delay=2 * FAR)
        self.over.update(ids[:5])
        self.far.update(ids[5:])
        # Paused: nobody takes these.
        for task_id in await enqueued(client, name, "u", 3, 0):
            self.overdue[task_id] = f"{name} u".encode()
        await client.put_schedule(name, topic="u", body=f"{name} u".encode(), cron="0 9 * * *")
        self.overdue[await client.run_schedule(name)] = f"{name} u".encode()
        await client.pause_schedule("early")
        due = await enqueued(client, name, "t", 8, 0)
        async with client.subscribe("t", group="g", prefetch=100) as deliveries:
            got: dict[int, Delivery] = {}
            async for delivery in deliveries:
                got[delivery.id] = delivery
                if got.keys() >= set(due):
                    break
            await got[due[0]].ack()
            await got[due[1]].nack(delay=FAR, reason="näh\n")
            await got[due[2]].reject(reason="no use")
        self.over.add(due[0])
        self.waiting.add(due[1])
        self.dead.add(due[2])
        self.overdue |= dict.fromkeys(due[3:], f"{name} t".encode())


async def enqueued(client: Client, name: str, topic: str, count: int, delay: float) -> list[int]:
    body = f"{name} {topic}".encode()
    receipts = await client.enqueue_many(
        Task(topic, body, delay=delay, key=f"{name}-{n % 7}") for n in range(count)
    )
    return [receipt.id for receipt in receipts]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """One that ended in order, one that was killed. Many restores are made of each."""
    result = {}
    for how in ("stopped", "killed"):
        life = Life(tmp_path_factory.mktemp(how), how == "killed")
        result[how] = asyncio.run(life.live())
    return result


# --- the store as it was --------------------------------------------------------------------------


async def restored(life: Life, folder: Path) -> tuple[Held, Report]:
    plan = Plan(url(folder), life.backup, (str(life.history),))
    report = await restore(plan, int(time.time() * 1000))
    return await held(url(folder)), report


async def test_a_restore_after_a_clean_stop_is_exact(
    lives: dict[str, Life], tmp_path: Path
) -> None:
    before = lives["stopped"].before
    after, report = await restored(lives["stopped"], tmp_path)
    assert before is not None and len(before.rows) > 40 and before.dead and before.progress
    assert after.rows == before.rows
    # In which order they died is not in the history: all of them died before the restore.
    assert after.dead == {k: row._replace(newest_id=0) for k, row in before.dead.items()}
    assert after.groups == before.groups
    assert len(after.small.of_kind(SCHEDULE)) == 2 and after.small.of_kind(
        SCHEDULE
    ) == before.small.of_kind(SCHEDULE)
    assert states(after) == states(before)
    assert after.opened.epoch > before.opened.epoch
    assert after.opened.id_mark >= before.opened.id_mark
    assert report.exact, report.gaps


async def test_a_restore_after_a_kill_keeps_all_tasks(
    lives: dict[str, Life], tmp_path: Path
) -> None:
    before = lives["killed"].before
    after, report = await restored(lives["killed"], tmp_path)
    # Everything had been answered, so all of it was in the spool.
    assert before is not None and after.rows == before.rows
    assert after.small.of_kind(SCHEDULE) == before.small.of_kind(SCHEDULE)
    assert not report.exact and not report.clean_stop and report.missing_events == 0


def states(found: Held) -> dict[tuple[int, str], tuple[str, int]]:
    """In flight and given back are one: nobody has it after a restore."""
    shown = {ProgressState.IN_FLIGHT: "RELEASED"}
    return {k: (shown.get(p.state, p.state.name), p.attempt) for k, p in found.progress.items()}


# --- from the command line to the consumer --------------------------------------------------------


@pytest.mark.parametrize("scope", ["all", "one"])
@pytest.mark.parametrize("overdue", ["include", "skip"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_restored_store_delivers_its_tasks(
    lives: dict[str, Life], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    how: str, overdue: str, scope: str
) -> None:  # fmt: skip
    life = lives[how]
    due, far = max(life.overdue), max(life.far)
    wanted = {due, far} if scope == "one" else set(life.overdue) | life.far | life.waiting
    at_once = wanted & set(life.overdue)
    kept = wanted if overdue == "include" else wanted - at_once
    options = ["--overdue", overdue] + [f"--id={task_id}" for task_id in wanted] * (scope == "one")
    report = restore_by_command(capsys, life, url(tmp_path), *options)
    dead = len(life.dead) if scope == "all" else 0
    assert report["restored"] == len(kept) + dead
    skipped = report["skipped_overdue"]["ids"]
    assert set(map(int, skipped)) == (at_once if overdue == "skip" else set())
    assert report["clean_stop"] is (how == "stopped")
    assert report["epoch"] > life.epoch
    assert int(report["id_mark"]) >= max(life.far | life.over | life.overdue.keys())
    asyncio.run(look(life, Daemon(tmp_path, store=url(tmp_path)), kept, dead, report))


def restore_by_command(
    capsys: pytest.CaptureFixture[str], life: Life, into: str, *options: str
) -> dict[str, Any]:
    """What ``tickwheel restore --json`` says."""
    source = ["--from", life.backup, "--history", str(life.history)]
    code = run(["restore", *source, "--into", into, *options, "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


async def look(
    life: Life, daemon: Daemon, kept: set[int], dead: int, report: dict[str, Any]
) -> None:
    """What a daemon on the restored store has, and what it gives out."""
    async with daemon, Client(daemon.url) as client:
        assert (await client.status()).epoch >= report["epoch"]
        listed = {task.id: task async for task in client.list_tasks()}
        assert listed.keys() - life.dead == kept
        assert len(listed.keys() & life.dead) == dead
        later = {task_id for task_id, task in listed.items() if task.state == "scheduled"}
        assert later == kept & life.far
        due = {task_id: life.overdue[task_id] for task_id in kept & life.overdue.keys()}
        if due:
            await client.resume("u", "h")
        got = dict([item async for item in delivered(client, len(due))])
        assert got == due
        stats = await client.stats()
        assert stats.ready == 0, "something came that was not promised"
        assert (await client.enqueue("t", b"new")).id > max(
            life.far | life.over | life.overdue.keys()
        )


async def delivered(client: Client, count: int) -> Any:
    """(id, body) of so many tasks, each of which is acked."""
    while count:
        for topic, group in (("t", "g"), ("u", "h")):
            for delivery in await client.pull(topic, group=group, max=100):
                yield delivery.id, delivery.body
                assert await delivery.ack() == "acked"
                count -= 1


# --- under load -----------------------------------------------------------------------------------


async def test_a_kill_under_load_loses_no_complete_line(tmp_path: Path) -> None:
    history = tmp_path / "history"
    confirmed: set[int] = set()
    done: set[int] = set()
    async with daemon_in(tmp_path, history_bodies="false") as daemon:
        for _ in range(KILLS):
            await load(daemon, confirmed, done)
            await daemon.arestart()
        assert await daemon.aterminate() == 0
        await taken_up(history)
    tally = Tally()
    events = read_all(history, tally)
    assert tally.torn == tally.unreadable == 0
    numbers = Counter((event["epoch"], event["seq"]) for event in events)
    assert set(numbers.values()) == {1}
    for epoch in {epoch for epoch, _ in numbers}:
        seqs = [seq for e, seq in numbers if e == epoch]
        assert sorted(seqs) == list(range(1, len(seqs) + 1))
    # What was answered had been appended before.
    assert confirmed <= ids_of(events, "enqueued")
    assert done <= ids_of(events, "acked")


def ids_of(events: list[Event], kind: str) -> set[int]:
    return {int(event["task_id"]) for event in events if event["event"] == kind}


async def load(daemon: Daemon, confirmed: set[int], done: set[int]) -> None:
    """Producers and a consumer, until the daemon is killed in the middle of it."""

    async def produce(client: Client) -> None:
        while True:
            receipts = await client.enqueue_many(Task("t", b"x") for _ in range(20))
            confirmed.update(receipt.id for receipt in receipts)

    async def consume(client: Client) -> None:
        async for delivery in client.subscribe("t", group="g", prefetch=500):
            if await delivery.ack() in ("acked", "done"):
                done.add(delivery.id)
            if len(done) >= wanted:
                enough.set()

    wanted, enough = len(done) + 80, asyncio.Event()
    client = Client(daemon.url, retries=0, send_timeout=PATIENCE_S)
    await client.connect()
    work = [asyncio.create_task(produce(client)), asyncio.create_task(consume(client))]
    await asyncio.wait_for(enough.wait(), PATIENCE_S)
    await daemon.akill()
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await client.close(timeout=0)


@pytest.mark.parametrize("backed_up", ["before all", "before it was replaced", "in the end"])
async def test_a_task_replaced_in_flight_is_not_restored(tmp_path: Path, backed_up: str) -> None:
    async with daemon_in(tmp_path) as daemon:
        async with Client(daemon.url) as client:
            await client.create_group("t", "g")

            async def back_up(when: str) -> None:
                if when == backed_up:
                    await client.backup("backup.db")

            await back_up("before all")
            old = await client.enqueue("t", b"old", key="k")
            [delivery] = await client.pull("t", group="g", wait=PATIENCE_S)
            await back_up("before it was replaced")
            new = await client.enqueue("t", b"new", key="k", if_pending="replace")
            assert (delivery.id, new.id != old.id, new.outcome) == (old.id, True, "stored")
            await back_up("in the end")
            await daemon.akill()
        await taken_up(tmp_path / "history")
    (backup,) = tmp_path.rglob("backup.db")
    plan = Plan(url(tmp_path), str(backup), (str(tmp_path / "history"),))
    await restore(plan, int(time.time() * 1000))
    with Daemon(tmp_path / "again", store=url(tmp_path)) as served:
        async with Client(served.url) as client:
            async with client.subscribe("t", group="g") as deliveries:
                got = await anext(deliveries)
                assert (got.id, got.body) == (new.id, b"new")
                await got.ack()
            assert (await client.lookup(old.id)).state == "cancelled"
