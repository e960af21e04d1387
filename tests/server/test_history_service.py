"""The daemon's end of the history with real files and the real writing process: what happens when
the disk, the process or the store fails, and what stands in the files afterwards.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.shard.test_committer import NOW_MS, Bench, Peer
from support.daemon import NO_DISK_LIMITS, DaemonFailed
from support.history_daemon import daemon_in, metric, spools, taken_up
from support.history_rig import NODE, read_all, segment_names
from support.in_process import InProcess
from support.redis_server import RedisServer
from support.shard_rig import Sources
from support.waiting import comes
from tickwheel import Client, Task
from tickwheel.clock import Clock
from tickwheel.history import daemon as history_module
from tickwheel.history.daemon import History, Recorder
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import STATE, Event
from tickwheel.model.records import ID_STEP
from tickwheel.persistence.contract import CommitRefused, CommitUnknown, Opened
from tickwheel.server.settings import Settings
from tickwheel.server.shard import committer as committer_module

SPOOL_BYTES = 65_536
"""The smallest bound."""
FAR = 3_600.0


class Service:
    """One tenure of a shard that has nothing but its history; what was noticed of it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder / "history"
        settings = NO_DISK_LIMITS | settings
        given = Settings(store="memory:", history_dir=str(self.folder), node=NODE, **settings)
        self.clock = Clock(86_400_000)
        self.notices: list[str] = []
        options = given.history(0)
        assert options is not None
        self.history = History(options, self.clock, lambda event, text: self.notices.append(event))
        self.kept: list[int] = []
        """Ids of the tasks whose arrival was kept."""
        self.batches = self._tasks = 0

    def begin(self) -> Service:
        self._recorder = self.history.begin(Opened(1, 0, 0, 0, clean=True, created=True))
        return self

    def batch(self, count: int = 200) -> None:
        """Enqueue `count` tasks durably."""
        now_ms = self.clock.read().now_ms
        ids = range(self._tasks * ID_STEP, (self._tasks + count) * ID_STEP, ID_STEP)
        self._tasks += count
        self._recorder.arrived(None, ids, [("t", now_ms, b"", None)] * count, now_ms)
        self.batches += 1
        dropped = self.history.dropped
        self.history.keep(self.batches, self._recorder.cut())
        if self.history.dropped == dropped:
            self.kept += ids

    async def stop(self) -> list[Event]:
        """In order; every event of the files, which must be numbered without a gap."""
        self.history.end(clean=True)
        await self.history.stop()
        events = sorted(read_all(self.folder), key=lambda event: event["seq"])
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert events[-1]["event"] == "stopped"
        return events


def ids_of(events: Iterable[Event], *kinds: str) -> list[int]:
    return [int(event["task_id"]) for event in events if event["event"] in kinds]


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


# --- no room, no disk -------------------------------------------------------------------------


async def test_a_full_spool_drops_history_and_logs_it_once(tmp_path: Path) -> None:
    service = Service(tmp_path, history_spool_bytes_max=SPOOL_BYTES).begin()
    while not service.history.dropped:
        service.batch()
    service.batch()
    service.batch()
    assert service.history.dropped == 600
    assert service.notices == ["history_dropped"]
    assert SPOOL_BYTES / 2 < service.history.spool_bytes <= SPOOL_BYTES
    service.history.start()
    await comes(lambda: service.history.spool_bytes <= SPOOL_BYTES / 2)
    service.batch()
    assert service.notices == ["history_dropped", "history_kept_again"]
    events = await service.stop()
    assert ids_of(events, "enqueued") == service.kept
    (dropped,) = of_kind(events, "dropped")
    assert dropped["count"] == 600
    assert f"{SPOOL_BYTES} bytes" in dropped["reason"]


def remove(folder: Path) -> None:
    """Though its writer may be making a file in it at this moment."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
        except OSError:
            continue
        return
    raise AssertionError(f"{folder} is never empty")


async def test_a_removed_history_folder_is_reported_and_recreated(tmp_path: Path) -> None:
    """Linux keeps a file that is open: what is appended goes nowhere, without an error."""
    service = Service(tmp_path).begin()
    service.history.start()
    service.batch(3)
    await comes(lambda: segment_names(service.folder))
    remove(service.folder)
    service.batch(4)
    core: Any = SimpleNamespace(sealed=None, open=SimpleNamespace(is_empty=lambda: True))
    flushing = asyncio.create_task(service.history.flush_for_ever(core))
    await comes(lambda: service.history.dropped)
    assert "history_dropped" in service.notices
    assert service.history.dropped >= 4
    await comes(lambda: service.history.writer_restarts)
    service.batch(5)
    flushing.cancel()
    events = await service.stop()
    assert [event["event"] for event in events] == ["dropped", *["enqueued"] * 5, "stopped"]
    assert "removed or moved" in events[0]["reason"] and "count" not in events[0]


async def test_dropped_history_is_reported_at_a_clean_stop(tmp_path: Path) -> None:
    service = Service(tmp_path, history_spool_bytes_max=SPOOL_BYTES).begin()
    while not service.history.dropped:
        service.batch()
    service.history.start()
    await comes(lambda: service.history.spool_bytes <= SPOOL_BYTES / 2)
    (dropped,) = of_kind(await service.stop(), "dropped")
    assert dropped["count"] == 200


async def test_a_daemon_starts_without_its_history_folder(tmp_path: Path) -> None:
    service = Service(tmp_path)
    state = service.folder / STATE
    away = tmp_path / "away"
    state.rename(away)
    state.write_text("in the way")
    service.begin()
    service.batch(7)
    assert service.notices == ["history_dropped"]
    assert service.history.dropped == 8  # with ``started``
    state.unlink()
    away.rename(state)
    service.batch(3)
    service.history.start()
    events = await service.stop()
    assert [event["event"] for event in events] == ["dropped", *["enqueued"] * 3, "stopped"]
    assert events[0]["count"] == 8


async def test_a_daemon_serves_on_after_its_history_folder_is_lost(tmp_path: Path) -> None:
    small = {"history_spool_bytes_max": SPOOL_BYTES, "history_bodies": "false"}
    async with daemon_in(tmp_path, http=True, **small) as daemon:
        (folder,) = [path for path in (tmp_path / "history" / STATE).iterdir() if path.is_dir()]
        away = tmp_path / "away"
        async with Client(daemon.url) as client:
            folder.rename(away)
            folder.write_text("in the way")
            while not metric(daemon, "tickwheel_history_dropped_total"):
                await enqueue_far(client, 200)
            await enqueue_far(client, 200)
            assert await served(client)
            folder.unlink()
            away.rename(folder)
            while "history_kept_again" not in daemon.log_text():
                await enqueue_far(client, 1)
            dropped = metric(daemon, "tickwheel_history_dropped_total")
        log = daemon.log_text()
        assert (log.count("history_dropped"), log.count("history_kept_again")) == (1, 1)
        assert "File exists" in log and "Traceback" not in log
        assert await daemon.aterminate() == 0
    events = read_all(tmp_path / "history")
    assert sum(event["count"] for event in of_kind(events, "dropped")) == dropped >= 400
    assert events[-1]["event"] == "stopped"


async def enqueue_far(client: Client, count: int) -> set[int]:
    receipts = await client.enqueue_many(Task("far", b"", delay=FAR) for _ in range(count))
    return {receipt.id for receipt in receipts}


async def served(client: Client) -> bool:
    """A task goes through: enqueued, delivered, acked."""
    receipt = await client.enqueue("now", b"")
    async with client.subscribe("now", group="g") as deliveries:
        delivery = await anext(aiter(deliveries))
        return delivery.id == receipt.id and await delivery.ack() == "acked"


async def test_a_folder_that_cannot_be_made_is_reported_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    daemon = daemon_in(tmp_path, history_dir=tmp_path / "taken" / "history")
    with pytest.raises(DaemonFailed, match="ended with 1 before it was ready"):
        await daemon.astart()
    assert "setting history_dir: cannot make" in daemon.log_text()
    assert "Not a directory" in daemon.log_text()
    assert "Traceback" not in daemon.log_text()


# --- the clock --------------------------------------------------------------------------------


async def test_a_clock_set_back_is_noted_once_before_later_events(tmp_path: Path) -> None:
    service = Service(tmp_path, history_spool_bytes_max=SPOOL_BYTES).begin()
    history, now_ms = service.history, service.clock.read().now_ms
    for position_ms in (now_ms, now_ms + 5, now_ms + 5, now_ms + 4):
        history.note_clock(now_ms, position_ms)
    while not history.dropped:
        service.batch()
    history.note_clock(now_ms, now_ms + 6)  # there is no room
    history.start()
    await comes(lambda: history.spool_bytes <= SPOOL_BYTES / 2)
    history.note_clock(now_ms, now_ms + 6)
    service.batch()
    events = await service.stop()
    assert [event["details"]["position_ms"] for event in of_kind(events, "clock_set_back")] == [
        now_ms + 5, now_ms + 6
    ]  # fmt: skip
    names = [event["event"] for event in events if event["event"] != "enqueued"]
    assert names == ["started", "clock_set_back", "clock_set_back", "dropped", "stopped"]


async def test_a_clock_behind_the_store_is_noted_at_the_start(tmp_path: Path) -> None:
    service = Service(tmp_path)
    position_ms = service.clock.read().now_ms + 3_600_000
    service.history.begin(Opened(2, 0, 0, position_ms, clean=True, created=False))
    service.history.start()
    names = [event["event"] for event in await service.stop()]
    assert names == ["started", "clock_set_back", "stopped"]


async def test_a_tick_notes_that_the_clock_was_set_back(tmp_path: Path) -> None:
    async with InProcess(tmp_path, history_dir=str(tmp_path / "history")) as daemon:
        for ms in (-5_000, 10_000):
            daemon.pass_time(ms)
            await daemon.turn()
    (event,) = of_kind(read_all(tmp_path / "history"), "clock_set_back")
    assert event["details"] == {"position_ms": NOW_MS}


# --- the writing process ----------------------------------------------------------------------


async def test_a_killed_history_writer_restarts_without_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "RESTART_S", 0.0)
    service = Service(tmp_path, history_segment_bytes=100_000).begin()
    history = service.history
    history.start()
    for _ in range(3):
        await kill_in_the_middle(service)
    events = await service.stop()
    assert ids_of(events, "enqueued") == service.kept == list(range(0, 12_000 * ID_STEP, ID_STEP))
    assert service.notices == ["history_writer_ended"] * 3


async def kill_in_the_middle(service: Service) -> None:
    """Kill the writer while it usually works, and wait for the next one."""
    history, before = service.history, len(read_all(service.folder))
    await comes(lambda: history._process is not None)
    process = history._process
    assert process is not None
    for _ in range(20):
        service.batch()
    await comes(lambda: len(read_all(service.folder)) > before)
    os.kill(process.pid, signal.SIGKILL)
    await comes(lambda: history._process is not process)


async def test_a_stop_restarts_a_history_writer_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "RESTART_S", 3_600.0)
    service = Service(tmp_path).begin()
    history = service.history
    history.start()
    await comes(lambda: history._process is not None)
    assert history._process is not None
    history._process.kill()
    await comes(lambda: service.notices == ["history_writer_ended"])
    service.batch()
    events = await service.stop()
    assert ids_of(events, "enqueued") == service.kept != []


async def test_an_unexpected_error_does_not_end_the_restarts_of_the_history_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "RESTART_S", 0.0)
    service = Service(tmp_path)
    monkeypatch.setattr(service.history, "_write", lambda: 1 / 0)
    service.history.start()
    await comes(lambda: service.notices[:2] == ["history_writer_ended"] * 2)
    await service.history.stop()


async def test_a_clean_stop_leaves_sealed_segments_and_no_spool(tmp_path: Path) -> None:
    async with daemon_in(tmp_path) as daemon:
        async with Client(daemon.url, name="shop") as client:
            await client.oneway("t", b"a body", key="k")
            await client.enqueue_many([Task("t", b"b", delay=FAR)] * 3)
        assert await daemon.aterminate() == 0
    history = tmp_path / "history"
    assert spools(history) == []
    assert all(name.endswith(".jsonl.gz") for name in segment_names(history))
    events = read_all(history)
    assert events[0]["event"] == "started" and events[0]["clean"] is True
    assert events[-1]["event"] == "stopped" and events[-1]["clean"] is True
    records = of_kind(events, "enqueued")
    assert [event.get("key") for event in records] == ["k", None, None, None]
    assert all(event["producer"].startswith("shop 127.0.0.1:") for event in records)


# --- what no batch carries, and what is finished when it is written ------------------------------


async def test_broadcasts_reach_the_files_without_a_batch(tmp_path: Path) -> None:
    history = tmp_path / "history"
    async with (
        daemon_in(tmp_path) as daemon,
        Client(daemon.url, name="screen") as client,
        client.subscribe("t", group="", broadcast=True) as deliveries,
    ):
        ids = [(await client.enqueue("t", b"")).id for _ in range(3)]
        stream = aiter(deliveries)
        assert [(await anext(stream)).id for _ in ids] == ids
        await comes(lambda: ids_of(read_all(history), "delivered") == ids, 5)
    for event in of_kind(read_all(history), "delivered"):
        assert "group" not in event
        assert event["subscriber"].startswith("screen 127.0.0.1:")


async def test_at_most_once_is_delivered_and_acked(tmp_path: Path) -> None:
    async with daemon_in(tmp_path) as daemon:
        async with Client(daemon.url) as client:
            receipt = await client.enqueue("t", b"")
            async with client.subscribe("t", group="g", ack="on_delivery") as deliveries:
                assert (await anext(aiter(deliveries))).id == receipt.id
        assert await daemon.aterminate() == 0
    events = [event for event in read_all(tmp_path / "history") if "task_id" in event]
    assert [event["event"] for event in events] == ["enqueued", "delivered", "acked"]
    assert events[-1]["ended"] is True


# --- a store that does not take it ---------------------------------------------------------------


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(committer_module, "UNKNOWN_RETRY_S", 0)
    monkeypatch.setattr(committer_module, "REFUSED_RETRY_S", 0)
    made = await Bench(Service(tmp_path).history).start()
    yield made
    await made.stop()


async def ended(bench: Bench, folder: Path) -> list[Event]:
    assert bench.history is not None
    bench.history.end(clean=True)
    bench.history.start()
    await bench.history.stop()
    return read_all(folder / "history")


class Looking(Peer):
    """Looks, when it is answered, at how much waits for the writing process."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history
        self.seen: list[int] = []

    def flush(self) -> None:
        self.seen.append(self.history.spool_bytes)
        super().flush()


async def test_history_is_spooled_before_the_answer(bench: Bench) -> None:
    assert bench.history is not None
    peer, before = Looking(bench.history), bench.history.spool_bytes
    bench.enqueue(peer, 1)
    await bench.arrived()
    assert bench.history.spool_bytes == before
    bench.let()
    await peer.next()
    assert peer.seen == [bench.history.spool_bytes]
    assert peer.seen[0] > before


async def test_a_batch_notes_that_the_clock_was_set_back(bench: Bench, tmp_path: Path) -> None:
    sources = cast(Sources, bench.clock._sources)
    sources.now_ms -= 5_000
    peer = Peer()
    bench.enqueue(peer, 1)
    bench.let()
    await peer.next()
    events = sorted(await ended(bench, tmp_path), key=lambda event: event["seq"])
    names = [event["event"] for event in events]
    assert names == ["started", "clock_set_back", "enqueued", "stopped"]


async def test_a_refused_batch_leaves_no_history(bench: Bench, tmp_path: Path) -> None:
    refused, taken = Peer(), Peer()
    bench.enqueue(refused, 1, "refused")
    await bench.arrived()
    bench.let(CommitRefused("the disk says no"))
    assert (await refused.next())[2] == "refused"
    bench.enqueue(taken, 2, "taken")
    for _ in range(3):
        bench.let()
    (first, *_) = (await taken.next())[2][1]  # type: ignore[index]  # an OK: (accepted, ids)
    records = of_kind(await ended(bench, tmp_path), "enqueued")
    assert [(event["task_id"], event["topic"]) for event in records] == [(str(first), "taken")]
    assert records[0]["producer"] == "shop 1.2.3.4:5"


async def test_withdrawn_tasks_leave_no_history_and_unclear_ones_do(
    bench: Bench, tmp_path: Path
) -> None:
    unclear, withdrawn = Peer(), Peer()
    bench.enqueue(unclear, 1, "unclear")
    await bench.arrived()
    bench.enqueue(withdrawn, 2, "withdrawn")
    bench.let(CommitUnknown("no answer"))
    assert (await unclear.next())[2] == "outcome_unknown"
    assert (await withdrawn.next())[2] == "refused"
    await bench.arrived()
    for _ in range(3):
        bench.let()
    await bench.committer.barrier()
    # Once more: the batch that what was withdrawn would have belonged to.
    await bench.committer.barrier()
    records = of_kind(await ended(bench, tmp_path), "enqueued")
    assert [event["topic"] for event in records] == ["unclear"]


async def test_repeated_deliveries_without_commits_are_bounded(
    bench: Bench, tmp_path: Path
) -> None:
    """A lease that ends and is given out again needs no batch that is durable."""
    history, recorder, core = bench.history, bench.engine.core.recorder, bench.engine.core
    assert history is not None and isinstance(recorder, Recorder)
    recorder.repeats_max = 5
    on_event: list[str] = []
    history._on_event = lambda event, text: on_event.append(f"{event}: {text}")
    group: Any = SimpleNamespace(topic=SimpleNamespace(name="t"), name="g")
    worker = SimpleNamespace(label="w@1")
    lease: Any = SimpleNamespace(
        group=group, subscriber=worker, id=1, attempt=1, epoch=1, since_mono_ms=0
    )
    flushing = asyncio.create_task(history.flush_for_ever(core))
    bench.enqueue(Peer(), 1)
    await bench.arrived()
    for now_ms in range(NOW_MS, NOW_MS + 9):
        recorder.lease_over(lease, "the lease ended", now_ms)
    recorder.acked(group, [lease], frozenset())
    await comes(lambda: history.dropped == 4)
    assert on_event == [
        "history_dropped: 5 deliveries and retries already wait for the store; "
        "the service continues without history"
    ]
    bench.let()
    await bench.committer.barrier()
    flushing.cancel()
    result = await ended(bench, tmp_path)
    assert on_event[1:] == ["history_kept_again: 4 events are missing"]
    assert len(of_kind(result, "lease_over")) == 5
    assert len(of_kind(result, "acked")) == 1
    (dropped,) = of_kind(result, "dropped")
    assert dropped["count"] == 4
    assert "5 deliveries and retries" in dropped["reason"]


# --- several daemons ------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [pytest.param("b", marks=pytest.mark.slow), "a"])
async def test_daemons_of_one_redis_can_share_a_history_folder(tmp_path: Path, node: str) -> None:
    """Also on one machine, where both have its name: one writing process at a time."""
    history = tmp_path / "history"
    server = await asyncio.to_thread(RedisServer(tmp_path / "redis").start)
    try:
        server.lay_out()
        shared = {"store": server.url(), "history_dir": history, "leader_ttl_s": 3.0}
        first = daemon_in(tmp_path / "a", node="a", **shared)
        second = daemon_in(tmp_path / "b", node=node, **shared)
        async with first, second:
            both = f"{first.url},{second.url.removeprefix('tcp://')}"
            async with Client(both, name="shop") as client:
                confirmed = await enqueue_far(client, 500)
                await first.akill()
                confirmed |= await enqueue_far(client, 500)
            assert await second.aterminate() == 0
            assert "history_unfinished" not in second.log_text()
        await taken_up(history)
    finally:
        await asyncio.to_thread(server.kill)
    events = read_all(history)
    # Answered batches were appended before.
    assert sorted(ids_of(events, "enqueued")) == sorted(confirmed)
    numbers: dict[int, list[int]] = {}
    for event in events:
        numbers.setdefault(event["epoch"], []).append(event["seq"])
        assert event["node"] == ("a" if event["epoch"] == min(numbers) else node)
    assert len(numbers) == 2
    for seqs in numbers.values():
        assert sorted(seqs) == list(range(1, len(seqs) + 1))


def test_records_of_repeatedly_refused_batches_are_bounded() -> None:
    """Records of a refused batch wait again and count again."""
    recorder = Recorder(1, lambda: (NOW_MS, 0), str)
    recorder.repeats_max = 5
    group = SimpleNamespace(topic=SimpleNamespace(name="t"), name="g")
    lease: Any = SimpleNamespace(
        group=group, subscriber=SimpleNamespace(label="w@1"), id=1, attempt=1
    )
    for _ in range(3):
        for _ in range(4):
            recorder.nacked(lease, "no", NOW_MS, NOW_MS)
        recorder.requeued("t", "g", 1)
        recorder.rejoin(recorder.cut())
    notes = recorder.cut()
    assert notes is not None
    assert [record[0] for record in notes.records].count(EventKind.NACKED) == 5
    assert [record[0] for record in notes.records].count(EventKind.REQUEUED) == 3
    assert recorder.lost == 3 * 4 - 5
