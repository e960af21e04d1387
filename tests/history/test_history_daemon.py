"""A real daemon with its history: nothing is missing in it, and a restore gives the store back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from daemon import Daemon

from history.history_rig import read_all
from history.restore_rig import Held, held, url
from tickwheel import Client, Task
from tickwheel.history import spool_read
from tickwheel.history.names import STATE
from tickwheel.history.restore import Plan, Report, restore
from tickwheel.history.segments import Event, Tally
from tickwheel.wheel.records import ProgressState

PATIENCE_S = 30.0
FAR = 3_600.0


def daemon_in(folder: Path, **settings: Any) -> Daemon:
    history = {"history_dir": folder / "history", "history_bodies": "true"}
    return Daemon(folder, **(history | settings))


async def taken_up(history: Path) -> None:
    """Until the writing process has turned everything into files."""
    deadline = time.monotonic() + PATIENCE_S
    while any(spool_read.files(folder) for folder in (history / STATE).iterdir()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def some_life(daemon: Daemon) -> str:
    """Tasks in every state, half of them before a backup and half after; the backup's path."""
    async with Client(daemon.url) as client:
        await client.create_group("t", "g", start="first")
        await half(client, "early")
        path = str((await client.backup("backup.db"))["path"])
        await client.create_group("t", "h", start="now", paused=True)
        await half(client, "late")
    return path


async def half(client: Client, name: str) -> None:
    receipts = await client.enqueue_many(
        Task("t", f"{name} {n}".encode(), delay=FAR, key=f"{name}-{n % 7}") for n in range(40)
    )
    ids = [receipt.id for receipt in receipts]
    await client.cancel_many(ids[:5])
    await client.reschedule(ids[5], delay=2 * FAR)
    due = [await client.enqueue("t", f"{name} due {n}".encode()) for n in range(8)]
    async with client.subscribe("t", group="g", prefetch=100) as deliveries:
        got = {}
        while len(got) < len(due):
            one = await anext(aiter(deliveries))
            got[one.id] = one
        acked, failed, buried, *_ = (got[receipt.id] for receipt in due)
        await acked.ack()
        await failed.nack(delay=FAR, reason="näh\n")
        await buried.reject(reason="no use")


async def life_to_restore(folder: Path, *, kill: bool) -> tuple[Held, Held, Report]:
    """What the store held at the end, what was restored, and the report."""
    async with daemon_in(folder) as daemon:
        backup = await some_life(daemon)
        if kill:
            await daemon.akill()
        else:
            assert await daemon.aterminate() == 0
        await taken_up(folder / "history")
    report = await restore(
        Plan(url(folder), backup, (str(folder / "history"),)), int(time.time() * 1000)
    )
    return await held(daemon.store), await held(url(folder)), report


def same(before: Held, after: Held) -> None:
    assert after.rows == before.rows
    assert after.dead == before.dead
    assert after.groups == before.groups
    assert states(after) == states(before)
    assert after.opened.epoch > before.opened.epoch
    assert after.opened.id_mark >= before.opened.id_mark


def states(found: Held) -> dict[tuple[int, str], tuple[str, int]]:
    """In flight and given back are one: nobody has it after a restore."""
    shown = {ProgressState.IN_FLIGHT: "RELEASED"}
    return {k: (shown.get(p.state, p.state.name), p.attempt) for k, p in found.progress.items()}


async def test_restore_after_a_clean_stop(tmp_path: Path) -> None:
    before, after, report = await life_to_restore(tmp_path, kill=False)
    assert len(before.rows) > 60 and before.dead and before.progress
    same(before, after)
    assert report.exact, report.gaps


async def test_restore_after_a_kill(tmp_path: Path) -> None:
    before, after, report = await life_to_restore(tmp_path, kill=True)
    assert after.rows.keys() >= before.rows.keys()
    assert not report.clean_stop and report.missing_events == 0


async def test_killed_under_load_no_complete_line_is_lost(tmp_path: Path) -> None:
    history = tmp_path / "history"
    confirmed: set[int] = set()
    done: set[int] = set()
    async with daemon_in(tmp_path, history_bodies="false") as daemon:
        for _ in range(3):
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
    told = {kind: ids_of(events, kind) for kind in ("enqueued", "acked")}
    # A kill may cost the batch that was being appended at that moment, and no other.
    assert len(confirmed - told["enqueued"]) <= 3 * 1_000
    assert len(done - told["acked"]) <= 3 * 1_000


def ids_of(events: list[Event], kind: str) -> set[int]:
    return {int(event["task_id"]) for event in events if event["event"] == kind}


async def load(daemon: Daemon, confirmed: set[int], done: set[int]) -> None:
    """Producers and a consumer, until the daemon is killed in the middle of it."""

    async def produce(client: Client) -> None:
        while True:
            receipts = await client.enqueue_many(Task("t", b"x") for _ in range(200))
            confirmed.update(receipt.id for receipt in receipts)

    async def consume(client: Client) -> None:
        async for delivery in client.subscribe("t", group="g", prefetch=2_000):
            if await delivery.ack() in ("acked", "done"):
                done.add(delivery.id)
            if len(done) >= wanted:
                enough.set()

    wanted, enough = len(done) + 500, asyncio.Event()
    client = Client(daemon.url, retries=0, send_timeout=1.0, connect_timeout=1.0)
    await client.connect()
    work = [asyncio.create_task(produce(client)), asyncio.create_task(consume(client))]
    await asyncio.wait_for(enough.wait(), PATIENCE_S)
    await daemon.akill()
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await client.close()
