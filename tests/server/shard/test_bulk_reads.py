"""Reads of bulk operations: few, of few bytes, in turn, and nobody else waits for them. Everything
is counted: what the store was asked for and has not answered, and what is in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from server.shard.test_bulk import HOUR_MS, TURNS_MAX, put
from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.engine import Engine
from tickwheel.engine.state import EngineConfig
from tickwheel.persistence.contract import SCAN_BYTES_MAX, StoredTask
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import bulk as bulks
from tickwheel.server.shard.reads import BULK_READ_BYTES_MAX, BULK_READS_MAX, READS_MAX, Reader

BULKS = READS_MAX + 16
"""More than there are places for everybody's reads."""


class GatedStore(MemoryStore):
    """Reads of what belongs to topic "big" wait at the gate while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way = 0
        self.most = 0
        self.asked: list[int] = []
        """How many bytes each of those reads might bring."""

    def _topic_of(self, task_id: int) -> str:
        known = self._tasks.get(task_id)
        return "" if known is None else self._stored(known)[0].topic

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        is_scan = bytes_max == SCAN_BYTES_MAX
        if is_scan or not any(self._topic_of(task_id) == "big" for task_id in ids):
            return await super().read_some(ids, bytes_max)
        self.asked.append(bytes_max)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            return await super().read_some(ids, bytes_max)
        finally:
            self.under_way -= 1


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, store=GatedStore(), resident_horizon_s=1) as made:
        yield made


def store_of(daemon: InProcess) -> GatedStore:
    store = daemon.store
    assert isinstance(store, GatedStore)
    return store


async def begin(peer: Peer, kind: str, count: int = BULKS, **options: Any) -> None:
    for number in range(count):
        asked = {"where": "nothing = 1", **options, "id": f"j{number}"}
        await peer.do(T.BULK_MAKE, "big", kind, asked)


async def all_ended(peer: Peer, count: int = BULKS) -> list[dict[str, Any]]:
    for _ in range(TURNS_MAX):
        result = (await peer.do(T.BULK_LIST, {"limit": count}))["bulk"]
        if all(bulk["state"] != "running" for bulk in result):
            return list(result)
        await asyncio.sleep(0)
    raise AssertionError("they do not end")


@pytest.mark.parametrize("kind", ["cancel", "requeue"])
async def test_hanging_bulk_reads_delay_no_other_request(daemon: InProcess, kind: str) -> None:
    peer, store = daemon.connect(), store_of(daemon)
    for number in range(20):
        await put(peer, HOUR_MS + number, topic="big")
    due, kept, gone = [await put(peer, ms, topic="other") for ms in (60_000, HOUR_MS, HOUR_MS)]
    await peer.do(T.SUBSCRIBE, 1, "other", "g", 10, None)
    store.gate.clear()
    await begin(peer, kind)
    await daemon.turn()
    assert store.under_way <= BULK_READS_MAX
    assert len(daemon.shard.reader._running) <= BULK_READS_MAX
    assert await peer.do(T.CANCEL, (gone,)) == ((gone, "cancelled"),)
    (shown,) = await peer.do(T.LOOKUP, (kept,))
    assert shown["state"] == "scheduled"
    listed = await peer.do(T.LIST, {"topic": "other"})
    assert [task["id"] for task in listed["tasks"]] == [due, kept]
    daemon.pass_time(61_000)  # its row is read when it is due: it is not in memory
    for _ in range(100):
        await asyncio.sleep(0)
    delivered = [frame for frame in peer.frames() if frame[0] == T.DELIVER]
    assert [item[0] for frame in delivered for item in frame[4]] == [due]
    store.gate.set()
    result = await all_ended(peer)
    assert {bulk["state"] for bulk in result} == {"done"}


async def test_bulk_reads_are_limited_in_number_and_bytes(daemon: InProcess) -> None:
    peer, store = daemon.connect(), store_of(daemon)
    for _ in range(300):
        await put(peer, topic="big", tag="x")
    store.asked.clear()
    held, reader = list[int](), daemon.shard.reader

    async def watch() -> None:
        while True:
            held.append(len(reader._running))
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await begin(peer, "cancel", where="nothing = 1")
    result = await all_ended(peer)
    watcher.cancel()
    assert {(bulk["state"], bulk["looked_at"]) for bulk in result} == {("done", 300)}
    assert 0 < max(held) <= BULK_READS_MAX, "rows of reads whose slice has not come are in memory"
    assert max(store.asked) * BULK_READS_MAX <= BULK_READ_BYTES_MAX


async def test_a_waiting_bulk_holds_no_read_slot(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulks, "PACE_S_MAX", 0.0)
    peer, reader = daemon.connect(), daemon.shard.reader
    for number in range(20):
        await put(peer, HOUR_MS + number, topic="big")
    for number in range(8):
        asked = {"rate": 0.001, "shift_ms": 1, "id": f"slow{number}"}
        await peer.do(T.BULK_MAKE, "big", "reschedule", asked)
    for _ in range(200):
        await asyncio.sleep(0)
    assert not reader._running and not reader._bulk_places.locked()
    await peer.do(T.BULK_MAKE, "big", "cancel", {"id": "quick"})
    for _ in range(TURNS_MAX):
        if (await peer.do(T.BULK, "quick", "show"))["state"] == "done":
            break
        await asyncio.sleep(0)
    else:
        raise AssertionError("it waits for those that wait")
    for number in range(8):
        await peer.do(T.BULK, f"slow{number}", "cancel")


async def test_read_slots_are_given_in_order() -> None:
    store = MemoryStore()
    opened = await store.open("me", 0)
    engine = Engine(EngineConfig(), opened.epoch, 1_000_000, 0)
    reader, order = Reader(engine.core, store), list[str]()

    async def bulk(name: str, turns: int) -> None:
        for _ in range(turns):
            async with reader.bulk_turn() as read, read([1024]) as (view, _):
                order.append(name)
                view([1024])
                await asyncio.sleep(0)

    await asyncio.gather(*(bulk(name, 10 if name == "a" else 5) for name in "abcde"))
    for end in range(len(order)):
        counts = Counter(order[:end])
        left = [counts[name] for name in "abcde" if counts[name] < 5]
        assert max(left, default=0) - min(left, default=0) <= 1, order
    assert Counter(order) == Counter("abcde" * 5 + "a" * 5)
