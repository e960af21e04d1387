"""A daemon whose store does not have what its memory holds: nothing is lost, no answer says that
a task has left, every answer says that something is wrong; and it goes on when the row is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from server.shard.holey_store import HoleyStore
from support.waiting import soon
from tickwheel import Client, Delivery
from tickwheel.errors import TickwheelError
from tickwheel.server import roles
from tickwheel.server.daemon import Daemon
from tickwheel.server.logs import configure
from tickwheel.server.roles import readiness, status_map
from tickwheel.server.settings import Settings
from tickwheel.server.shard import reads as loading
from tickwheel.server.shard import reads as reader

PAUSE_S = 0.005


class House:
    """A daemon that keeps no row in memory, its store, and a client."""

    def __init__(self, daemon: Daemon, store: HoleyStore, client: Client) -> None:
        self.daemon, self.store, self.client = daemon, store, client

    async def missing(self, *ids: int) -> None:
        """Until these are known to be missing."""
        await self.until(lambda: set(self.core.missing) == set(ids))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not is_so():  # noqa: ASYNC110 # no event for it
                await asyncio.sleep(0)

        await soon(wait())

    @property
    def core(self):  # type: ignore[no-untyped-def] # the engine's memory
        shard = self.daemon.roles.shard
        assert shard is not None
        return shard.core


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    store = HoleyStore()
    monkeypatch.setattr(roles, "open_store", lambda settings: (store, settings.engine()))
    monkeypatch.setattr(reader, "REREAD_S", PAUSE_S)
    monkeypatch.setattr(loading, "MISSING_RETRY_S", PAUSE_S)
    settings = Settings(store="memory:", listen="tcp://127.0.0.1:0", resident_bytes_max=1)
    daemon = Daemon(settings, configure("json", "critical"))
    await daemon.start()
    try:
        async with Client(daemon.url) as client:
            await client.enqueue("filler", b"all the room there is", delay=30)
            yield House(daemon, store, client)
    finally:
        await daemon.stop()


async def comes(deliveries: AsyncIterator[Delivery], task_id: int) -> None:
    delivery = await soon(anext(deliveries))
    assert delivery.id == task_id
    assert await delivery.ack() == "acked"


async def is_reported(house: House, task_id: int) -> None:
    """By ``/readyz``, STATUS, the metrics, and to everybody who names the task."""
    is_ready, shown = readiness(house.daemon)
    assert (is_ready, shown["status"]) == (False, "rows_missing")
    assert str(task_id) in shown["reason"]
    assert status_map(house.daemon)["state"] == "rows_missing"
    assert house.core.totals.rows_missing == 1
    client = house.client
    named: list[Awaitable[object]] = [
        client.lookup(task_id), client.cancel(task_id), client.reschedule(task_id, delay=0),
        client.run_now(task_id),
    ]  # fmt: skip
    for answer in named:
        with pytest.raises(TickwheelError) as refused:
            await soon(answer)
        assert refused.value.code == "row_missing"
        assert str(task_id) in refused.value.message


async def goes_on(house: House, deliveries: AsyncIterator[Delivery], task_id: int) -> None:
    """Others while it is missing, and it when its row is there again."""
    fresh = await house.client.enqueue("t", b"another")
    await comes(deliveries, fresh.id)
    house.store.hidden.clear()
    await comes(deliveries, task_id)
    await house.until(lambda: not house.core.missing)
    assert readiness(house.daemon)[0]
    assert (await house.client.lookup(task_id)).state == "acked"
    stats = await house.client.stats()
    assert (stats.scheduled, stats.ready, stats.in_flight) == (1, 0, 0), "the filler"


async def test_a_row_missing_at_its_due_time_is_counted(house: House) -> None:
    async with house.client.subscribe("t") as deliveries:
        task = await house.client.enqueue("t", b"x", delay=0.05)
        house.store.hidden.add(task.id)
        await house.missing(task.id)
        assert (await house.client.stats()).scheduled == 2
        await is_reported(house, task.id)
        await goes_on(house, deliveries, task.id)


async def test_a_row_missing_at_its_delivery_is_counted(house: House) -> None:
    task = await house.client.enqueue("t", b"x")
    await house.until(lambda: house.core.scheduled == 1)
    house.store.hidden.add(task.id)
    async with house.client.subscribe("t", prefetch=1) as deliveries:
        await house.missing(task.id)
        assert (await house.client.stats()).ready == 1
        await is_reported(house, task.id)
        await goes_on(house, deliveries, task.id)


async def test_a_row_missing_at_its_expiry_is_counted(house: House) -> None:
    task = await house.client.enqueue("t", b"x", ttl=0.1)
    await house.until(lambda: house.core.scheduled == 1)
    house.store.hidden.add(task.id)
    await house.missing(task.id)
    await is_reported(house, task.id)
    house.store.hidden.clear()
    await house.until(lambda: house.core.totals.expired == 1)
    assert (await house.client.lookup(task.id)).state == "expired"
    assert not house.core.missing


async def test_a_row_missing_in_flight_can_be_acked(house: House) -> None:
    """Its current receipt still ends it: for that nothing has to be read."""
    async with house.client.subscribe("t") as deliveries:
        task = await house.client.enqueue("t", b"x")
        delivery = await soon(anext(deliveries))
        house.store.hidden.add(task.id)
        await is_reported_by_lookup(house, task.id)
        assert await soon(delivery.ack()) == "acked"
        await house.until(lambda: not house.core.missing)
        assert (await house.client.lookup(task.id)).state == "acked"


async def is_reported_by_lookup(house: House, task_id: int) -> None:
    with pytest.raises(TickwheelError) as refused:
        await soon(house.client.lookup(task_id))
    assert refused.value.code == "row_missing"
    assert set(house.core.missing) == {task_id}


async def test_a_group_with_a_missing_row_is_not_deleted(house: House) -> None:
    client = house.client
    task = await client.enqueue("t", b"x")
    await house.until(lambda: house.core.scheduled == 1)
    await client.create_group("t", "g")
    house.store.hidden.add(task.id)
    await client.delete_group("t", "g", force=True)
    await house.missing(task.id)
    assert "g" in house.core.topics["t"].groups
    house.store.hidden.clear()
    await house.until(lambda: "g" not in house.core.topics["t"].groups)
    assert (await client.lookup(task.id)).state == "deleted"


async def test_a_cancelled_task_is_not_counted_as_missing(house: House) -> None:
    """Cancelled while it is read: silent."""
    async with house.client.subscribe("t"):
        for _ in range(20):
            task = await house.client.enqueue("t", b"x", delay=0.001)
            await house.client.cancel(task.id)
    assert not house.core.missing
    assert house.core.totals.rows_missing == 0
