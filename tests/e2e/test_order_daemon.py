"""Order keys of a real daemon over kills, on each store: what is held, what waits, what comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.stores import killed_on
from support.daemon import Daemon
from tickwheel import Client, Conflict, Delivery
from tickwheel.client import HeldKey

GROUP = {"order_failure": "hold", "order_attempts": 1, "fair_by": "tenant", "limit_each": 5}


killed = killed_on("redis", "sqlite", "asyncio-redis", "postgresql")


async def test_held_keys_and_lines_outlast_kills(killed: Daemon) -> None:
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        await client.create_group("t", "g", **GROUP)
        for body in (b"a1", b"a2", b"b1", b"b2"):
            await client.enqueue("t", body, order_key=body.decode()[0])
        for delivery in await pulled(client, {b"a1", b"b1"}):
            assert await delivery.nack(reason="no account") == "held"
        held = await all_held(client)
        await killed.arestart()
        assert await all_held(client) == held
        assert [(item.key, item.waiting, item.reason) for item in held] == [
            ("a", 1, "no account"), ("b", 1, "no account"),
        ]  # fmt: skip
        assert await client.pull("t", group="g", max=9) == []
        with pytest.raises(Conflict, match="order_failure 'hold', not 'dead'"):
            await client.pull("t", group="g", order_failure="dead")
        assert await client.release_key("t", "g", key="a") == "released"
        assert await client.skip_key("t", "g", held[1].id) == "skipped"
        await killed.arestart()
        assert await client.held_keys("t", "g") == []
        got = await pulled(client, {b"a1", b"b2"})
        assert [delivery.attempt for delivery in got if delivery.body == b"a1"] == [1], (
            "counted anew"
        )
        for delivery in got:
            assert await delivery.ack() == "acked"
        (last,) = await pulled(client, {b"a2"})
        await killed.arestart()
        assert await last.ack() in ("stale", "acked")
        letters = [(letter.id, letter.reason) async for letter in client.dead_list()]
        assert letters == [(held[1].id, "skipped: its key was held")]


async def test_paused_keys_outlast_kills(killed: Daemon) -> None:
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        await client.create_group("t", "g", **GROUP)
        for named in ({"key": "a"}, {"value": "acme"}):
            made = await client.pause_key("t", "g", **named)
            assert made.paused and made.changed
        await client.enqueue("t", b"before", order_key="a")
        paused = await client.paused_keys("t", "g")
        await killed.arestart()
        result = await client.paused_keys("t", "g")
        assert [(item.kind, item.value, item.since, item.by) for item in result] == [
            (item.kind, item.value, item.since, item.by) for item in paused
        ]
        again = await client.pause_key("t", "g", key="a")
        assert (again.changed, again.since) == (False, paused[0].since)
        await client.enqueue("t", b"acme", properties={"tenant": "acme"})
        await client.enqueue("t", b"tiny", properties={"tenant": "tiny"})
        (tiny,) = await pulled(client, {b"tiny"})
        assert await tiny.ack() == "acked"
        assert (await client.resume_key("t", "g", key="a")).changed
        await killed.arestart()
        (before,) = await pulled(client, {b"before"})
        assert await before.ack() == "acked"
        assert await client.pull("t", group="g", max=9) == []
        assert (await client.resume_key("t", "g", value="acme")).changed
        assert not (await client.resume_key("t", "g", value="acme")).changed
        await pulled(client, {b"acme"})
        assert await client.paused_keys("t", "g") == []


async def test_a_backup_has_paused_keys(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    await daemon.astart()
    async with Client(daemon.url) as client:
        await client.create_group("t", "g")
        await client.pause_key("t", "g", key="a")
        path = (await client.backup("copy.db")).path
    other = make_daemon(store=f"sqlite:///{path}")
    await other.astart()
    async with Client(other.url) as client:
        await client.enqueue("t", b"x", order_key="a")
        assert [paused_key.value for paused_key in await client.paused_keys("t", "g")] == ["a"]
        assert await client.pull("t", group="g") == []


async def all_held(client: Client) -> list[HeldKey]:
    """When all four tasks have come due."""
    while True:
        held = await client.held_keys("t", "g")
        if sum(1 + item.waiting for item in held) == 4:
            return held


async def pulled(client: Client, wanted: set[bytes]) -> list[Delivery]:
    """Exactly these, and nothing else, come now."""
    deliveries: list[Delivery] = []
    while {delivery.body for delivery in deliveries} != wanted:
        deliveries += await client.pull("t", group="g", max=9, wait=10, lease=60)
        assert {delivery.body for delivery in deliveries} <= wanted
    return deliveries
