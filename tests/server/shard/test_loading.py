"""A start with many tasks: it works with what it has while the rest is loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.waiting import comes, soon
from tickwheel import Client, Task, disk
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.model.kinds import GROUP, Effects, keyed
from tickwheel.model.records import ID_STEP, GroupRow, TaskRow, id_floor
from tickwheel.persistence.contract import Handles
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server import roles
from tickwheel.server.daemon import Daemon
from tickwheel.server.logs import configure
from tickwheel.server.roles import status_map
from tickwheel.server.settings import Settings
from tickwheel.server.shard.reads import load_bytes
from tickwheel.server.shard.shard import FIRST_CHUNK

OVERDUE = 3
DAY_MS = 86_400_000
EARLIER_MS = 1_790_000_000_000
FIRST_ID = id_floor(EARLIER_MS, 0)


class GatedStore(MemoryStore):
    """All handles behind the first chunk wait for the test. What is handed out at a time may be
    less than was asked for, as with large bodies on Redis."""

    def __init__(self, piece: int = FIRST_CHUNK) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self._piece = piece

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        first = True
        async for handles in super().recover_handles(chunk):
            if not first:
                await self.gate.wait()
            first = False
            for start in range(0, len(handles.ids), self._piece):
                part = slice(start, start + self._piece)
                yield Handles(handles.ids[part], handles.dues_ms[part], handles.topics[part])


async def _filled(piece: int = FIRST_CHUNK) -> tuple[GatedStore, list[int]]:
    """A few overdue tasks, and more far ones than one chunk has."""
    store = GatedStore(piece)
    opened = await store.open("before", EARLIER_MS)
    ids = [FIRST_ID + n * ID_STEP for n in range(OVERDUE + FIRST_CHUNK)]
    rows = {
        task_id: TaskRow(
            task_id, EARLIER_MS + (n if n < OVERDUE else 4_000 * DAY_MS + n), "t", b"%d" % n
        )
        for n, task_id in enumerate(ids)
    }
    effects = Effects(
        enqueued=rows, records=keyed(GROUP, [GroupRow("t", "default", 0)]), id_mark=ids[-1]
    )
    await store.commit(opened.epoch, "before", 1, effects)
    await store.close(clean=False)
    return store, ids


@pytest.fixture(params=[FIRST_CHUNK, FIRST_CHUNK // 4])
async def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GatedStore:
    filled, _ = await _filled(request.param)
    monkeypatch.setattr(roles, "open_store", lambda settings: (filled, settings.engine()))
    return filled


async def test_a_daemon_works_while_it_loads(store: GatedStore) -> None:
    _, ids = await _filled()
    settings = Settings(store="memory:", listen="tcp://127.0.0.1:0")
    daemon = Daemon(settings, configure("json", "error"))
    await daemon.start()
    try:
        async with Client(daemon.url) as client:
            assert status_map(daemon)["state"] == "loading"
            assert status_map(daemon)["loaded"] == FIRST_CHUNK
            async with client.subscribe("t") as deliveries:
                for n in range(OVERDUE):
                    delivery = await anext(deliveries)
                    assert (delivery.id, delivery.body) == (ids[n], b"%d" % n)
                    assert await delivery.ack() == "acked"
                fresh = await client.enqueue("t", b"fresh")
                assert (await anext(deliveries)).id == fresh.id
            # A task that is not in memory yet cannot be commanded: the command waits.
            cancelling = asyncio.ensure_future(client.cancel(ids[-1]))
            await client.ping()
            assert not cancelling.done()
            store.gate.set()
            assert await cancelling == "cancelled"
            await comes(lambda: status_map(daemon)["state"] == "ready")  # it has all keys too
            assert (await client.stats()).scheduled == FIRST_CHUNK - 1
            assert await client.cancel(ids[-2]) == "cancelled"
    finally:
        await daemon.stop()


async def test_a_stop_while_it_loads_is_clean(store: GatedStore) -> None:
    settings = Settings(store="memory:", listen="tcp://127.0.0.1:0")
    daemon = Daemon(settings, configure("json", "error"))
    await daemon.start()
    await daemon.stop()
    assert (await store.open("after", EARLIER_MS)).clean


async def test_the_disk_is_measured_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, threads = disk.measure, set[int]()

    def measured(folder: str) -> disk.Use:
        threads.add(threading.get_ident())
        return measure(folder)

    monkeypatch.setattr(disk, "measure", measured)
    settings = Settings(store=f"sqlite:///{tmp_path}/x.db", listen="tcp://127.0.0.1:0")
    daemon = Daemon(settings, configure("json", "error"))
    await daemon.start()
    await comes(lambda: status_map(daemon)["disk_free_bytes"])
    assert 0 < status_map(daemon)["disk_used"] < 1
    await daemon.stop()
    assert threads and threading.get_ident() not in threads


# --- the budget of bodies ------------------------------------------------------------------------


async def test_a_backlog_is_loaded_within_the_memory_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many ready tasks without a row in memory; consumers that take much and ack nothing."""
    size, count, budget = 50_000, 400, 2_000_000
    most = 0
    keep = Core.keep

    def watched(core: Core, row: TaskRow) -> None:
        nonlocal most
        keep(core, row)
        most = max(most, core.resident_bytes)

    monkeypatch.setattr(Core, "keep", watched)
    settings = Settings(store="memory:", listen="tcp://127.0.0.1:0", resident_bytes_max=budget)
    daemon = Daemon(settings, configure("json", "error"))
    await daemon.start()
    try:
        async with Client(daemon.url) as client:
            await client.create_group("t", "default")
            await client.enqueue_many([Task("t", bytes(size)) for _ in range(count)])
            taken: set[int] = set()
            async with client.subscribe("t", prefetch=count) as deliveries:
                while len(taken) < count:
                    taken.add((await soon(anext(deliveries))).id)
    finally:
        await daemon.stop()
    row = size + ROW_OVERHEAD_BYTES
    assert budget / 2 < most <= budget + load_bytes(budget) + 2 * row
